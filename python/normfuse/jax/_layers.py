# SPDX-License-Identifier: MIT
"""The common part of the layers in the place of Flax's: which of Flax's options there is no kernel for, and a call in
the words of Flax."""
from __future__ import annotations

import math
from typing import Any, Iterable, Optional, Tuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from . import batch_norm, channel_norm, group_norm
from ._call import axes_of


def refuse(layer: Any, option: str, value: Any, reason: str) -> None:
    raise NotImplementedError(f"normfuse.jax: {type(layer).__name__}({option}={value!r}) is not supported: {reason}; "
                              f"flax's own layer has it")


def check(layer: Any, mask: Any, has_axis_name: bool = False) -> None:
    """Raises NotImplementedError for options that would change the result."""
    if mask is not None:
        refuse(layer, "mask", "...", "statistics are those of all positions")
    if layer.axis_index_groups is not None:
        refuse(layer, "axis_index_groups", layer.axis_index_groups, "statistics are shared by all devices of an axis")
    if layer.axis_name is not None and not has_axis_name:
        refuse(layer, "axis_name", layer.axis_name, "a sample's statistics are its own device's")
    if not getattr(layer, "force_float32_reductions", True):
        refuse(layer, "force_float32_reductions", False, "statistics are never rounded to 16 bits")


def layout(layer: Any, option: str, axes: Any, rank: int) -> str:
    """That of a channel axis, which is the last one or the second."""
    axis = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    if rank >= 2 and len(axis) == 1 and axis[0] % rank in (rank - 1, 1):
        return "nhwc" if axis[0] % rank == rank - 1 else "nchw"
    return refuse(layer, option, axes, "channels are the last axis or the second")  # type: ignore[func-returns-value]


def check_reduction(layer: Any, rank: int) -> None:
    axes = layer.reduction_axes
    if axes is not None and {a % rank for a in (axes if isinstance(axes, Iterable) else (axes,))} != \
            set(range(1, rank)):
        refuse(layer, "reduction_axes", axes, "statistics are over all axes but the first")


def group(layer: Any, x: Any, groups: int, scale: Any, bias: Any, dtype: Any, post_add: Any, order: str) -> Any:
    """Group norm whose result has dtype, computed in no less than that."""
    x = x.astype(jnp.promote_types(x.dtype, dtype))
    y = group_norm(x, groups, scale, bias, layer.epsilon, activation=layer.activation, act_param=layer.act_param,
                   post_add=None if post_add is None else post_add.astype(x.dtype), layout=order)
    return y.astype(dtype)


def channel_axis(layer: Any, rank: int) -> str:
    """The layout in which the axis that a LayerNorm or an RMSNorm reduces has the channels."""
    order = layout(layer, "reduction_axes", layer.reduction_axes, rank)
    features = layer.feature_axes if isinstance(layer.feature_axes, Iterable) else (layer.feature_axes,)
    if [a % rank for a in features] != [rank - 1 if order == "nhwc" else 1]:
        refuse(layer, "feature_axes", layer.feature_axes, "parameters are those of the axis that is reduced")
    return order


def by_position(layer: Any, x: Any, scale: Any, bias: Any, dtype: Any, post_add: Any, order: str,
                statistics: str) -> Any:
    """Layer norm or RMS norm of channels whose result has dtype. There are kernels for a result of x's dtype, and for
    one of float32 and one of 16 bits."""
    dtype = jnp.dtype(dtype)
    if x.dtype != dtype and {x.dtype.itemsize, dtype.itemsize} != {2, 4}:
        x = x.astype(jnp.promote_types(x.dtype, dtype))
    given = dtype if dtype.itemsize < 8 and x.dtype.itemsize < 8 else x.dtype
    y = channel_norm(x, scale, bias, statistics=statistics, eps=layer.epsilon, activation=layer.activation,
                     act_param=layer.act_param, post_add=None if post_add is None else post_add.astype(given),
                     dtype=given,
                     layout=order)
    return y.astype(dtype)


def batch(layer: Any, x: Any, running: Tuple[Any, Any], scale: Any, bias: Any, dtype: Any, post_add: Any, order: str,
          training: bool, axis_name: Optional[Any]) -> Tuple[Any, Any, Any]:
    """y, and in training the mean and the biased variance of x, as Flax keeps them."""
    x = x.astype(jnp.promote_types(x.dtype, dtype))
    words = dict(activation=layer.activation, act_param=layer.act_param, layout=order,
                 post_add=None if post_add is None else post_add.astype(x.dtype))
    if not training:
        return batch_norm(x, *running, scale, bias, eps=layer.epsilon, **words).astype(dtype), None, None
    channels = x.shape[-1 if order == "nhwc" else 1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    values = x.size // channels * math.prod(size for _, size in axes_of(axis_name)) if channels else 0
    if channels and not is_symbolic_dim(values) and values < 2:
        return _batch_of_few(x, values, scale, bias, dtype, layer.epsilon, words)
    y, mean, variance = batch_norm(x, jnp.zeros(channels, wide), jnp.zeros(channels, wide), scale, bias, True, 1.0,
                                   layer.epsilon, axis_name=axis_name, **words)
    values = jnp.asarray(values, wide)
    return y.astype(dtype), mean, variance * ((values - 1) / values)


def _batch_of_few(x: Any, values: int, scale: Any, bias: Any, dtype: Any, eps: float, words: Any
                  ) -> Tuple[Any, Any, Any]:
    """The result of Flax where a channel has one value or none: the value is its own mean and the variance 0, which is
    an evaluation without a gradient of x; a mean and a variance of nothing are NaN."""
    x = jax.lax.stop_gradient(x)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    channels = x.shape[-1 if words["layout"] == "nhwc" else 1]
    mean = x.reshape(channels).astype(wide) if values else jnp.full(channels, jnp.nan, wide)
    variance = mean * 0
    return batch_norm(x, mean, variance, scale, bias, eps=eps, **words).astype(dtype), mean, variance

# SPDX-License-Identifier: MIT
"""GroupNorm, InstanceNorm, BatchNorm, LayerNorm and RMSNorm in the place of flax.linen's: subclasses with the same
fields, parameters, collections and results, and a fused activation and addition besides.

    norm = linen.GroupNorm(32, activation="silu")
    y = norm.apply(variables, x, post_add=residual)

use_fast_variance has no effect: the variance is always the exact one. Options that would change the result raise
NotImplementedError: mask, axis_index_groups, axis_name (but for BatchNorm), force_float32_reductions=False,
reduction_axes of GroupNorm other than all but the first, channels on other axes than the last or the second. In
GroupNorm channels are last. In LayerNorm and RMSNorm reduction_axes and feature_axes are the channels' axis."""
from __future__ import annotations

from typing import Any, Optional

from .._words import require
from . import _layers

require("flax", "Flax", (0, 12), "normfuse.jax.linen", "flax")

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax.linen import dtypes, module  # noqa: E402

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


def _parameters(layer: Any, x: Any, channels: int) -> Any:
    """scale, bias, and the dtype of the result."""
    scale = layer.param("scale", layer.scale_init, (channels,), layer.param_dtype) if layer.use_scale else None
    bias = None
    if getattr(layer, "use_bias", False):
        bias = layer.param("bias", layer.bias_init, (channels,), layer.param_dtype)
    given = [value for value in (x, scale, bias) if value is not None]
    return scale, bias, dtypes.canonicalize_dtype(*given, dtype=layer.dtype)


class GroupNorm(nn.GroupNorm):
    activation: Optional[str] = None
    act_param: Optional[float] = None

    @nn.compact
    def __call__(self, x: Any, *, mask: Any = None, post_add: Any = None) -> Any:
        _layers.check(self, mask)
        x = jnp.asarray(x)
        _layers.check_reduction(self, x.ndim)
        if (self.num_groups is None) == (self.group_size is None):
            raise ValueError("Either `num_groups` or `group_size` should be specified, and the other be None")
        channels = x.shape[-1]
        groups = self.num_groups
        if groups is None:
            if channels % self.group_size:
                raise ValueError(f"Number of channels ({channels}) is not multiple of the group size "
                                 f"({self.group_size}).")
            groups = channels // self.group_size
        scale, bias, dtype = _parameters(self, x, channels)
        return _layers.group(self, x, groups, scale, bias, dtype, post_add, "nhwc")


class InstanceNorm(nn.InstanceNorm):
    activation: Optional[str] = None
    act_param: Optional[float] = None

    @nn.compact
    def __call__(self, x: Any, *, mask: Any = None, post_add: Any = None) -> Any:
        _layers.check(self, mask)
        x = jnp.asarray(x)
        order = _layers.layout(self, "feature_axes", self.feature_axes, x.ndim)
        channels = x.shape[-1 if order == "nhwc" else 1]
        scale, bias, dtype = _parameters(self, x, channels)
        return _layers.group(self, x, channels, scale, bias, dtype, post_add, order)


class BatchNorm(nn.BatchNorm):
    activation: Optional[str] = None
    act_param: Optional[float] = None

    @nn.compact
    def __call__(self, x: Any, use_running_average: Optional[bool] = None, *, mask: Any = None,
                 post_add: Any = None) -> Any:
        evaluates = module.merge_param("use_running_average", self.use_running_average, use_running_average)
        _layers.check(self, mask, has_axis_name=True)
        x = jnp.asarray(x)
        order = _layers.layout(self, "axis", self.axis, x.ndim)
        channels = x.shape[-1 if order == "nhwc" else 1]
        mean = self.variable("batch_stats", "mean", lambda shape: jnp.zeros(shape, jnp.float32), (channels,))
        variance = self.variable("batch_stats", "var", lambda shape: jnp.ones(shape, jnp.float32), (channels,))
        scale, bias, dtype = _parameters(self, x, channels)
        y, new_mean, new_variance = _layers.batch(self, x, (mean.value, variance.value), scale, bias, dtype, post_add,
                                                  order, not evaluates,
                                                  None if self.is_initializing() else self.axis_name)
        if not evaluates and not self.is_initializing():
            mean.value = self.momentum * mean.value + (1 - self.momentum) * new_mean
            variance.value = self.momentum * variance.value + (1 - self.momentum) * new_variance
        return y


def _by_position(layer: Any, x: Any, mask: Any, post_add: Any, statistics: str) -> Any:
    _layers.check(layer, mask)
    x = jnp.asarray(x)
    order = _layers.channel_axis(layer, x.ndim)
    scale, bias, dtype = _parameters(layer, x, x.shape[-1 if order == "nhwc" else 1])
    return _layers.by_position(layer, x, scale, bias, dtype, post_add, order, statistics)


class LayerNorm(nn.LayerNorm):
    activation: Optional[str] = None
    act_param: Optional[float] = None

    @nn.compact
    def __call__(self, x: Any, *, mask: Any = None, post_add: Any = None) -> Any:
        return _by_position(self, x, mask, post_add, "mean_and_variance")


class RMSNorm(nn.RMSNorm):
    activation: Optional[str] = None
    act_param: Optional[float] = None

    @nn.compact
    def __call__(self, x: Any, *, mask: Any = None, post_add: Any = None) -> Any:
        return _by_position(self, x, mask, post_add, "mean_square")

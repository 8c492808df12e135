# SPDX-License-Identifier: MIT
"""GroupNorm, InstanceNorm, BatchNorm, LayerNorm and RMSNorm in the place of flax.nnx's: subclasses with the same
arguments, variables and results, and a fused activation and addition besides.

    norm = nnx.GroupNorm(256, 32, activation="silu", rngs=flax.nnx.Rngs(0))
    y = norm(x, post_add=residual)

What is not supported, and raises NotImplementedError, is as in normfuse.jax.linen."""
from __future__ import annotations

from typing import Any, Optional

from .._words import require
from . import _layers

require("flax", "Flax", (0, 12), "normfuse.jax.nnx", "flax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


def _promoted(layer: Any, x: Any) -> Any:
    """x, scale and bias in the dtype of the result, as flax casts them."""
    scale, bias = (None if value is None else value[...] for value in (layer.scale, layer.bias))
    return layer.promote_dtype((jnp.asarray(x), scale, bias), dtype=layer.dtype)


class _Fused:
    """The arguments that Flax's layers do not have."""

    def __init__(self, *args: Any, activation: Optional[str] = None, act_param: Optional[float] = None,
                 **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation, self.act_param = activation, act_param


class GroupNorm(_Fused, nnx.GroupNorm):
    def __call__(self, x: Any, *, mask: Any = None, post_add: Any = None) -> Any:
        _layers.check(self, mask)
        _layers.check_reduction(self, x.ndim)
        x, scale, bias = _promoted(self, x)
        return _layers.group(self, x, self.num_groups, scale, bias, x.dtype, post_add, "nhwc")


class InstanceNorm(_Fused, nnx.InstanceNorm):
    def __call__(self, x: Any, *, mask: Any = None, post_add: Any = None) -> Any:
        _layers.check(self, mask)
        order = _layers.layout(self, "feature_axes", self.feature_axes, x.ndim)
        x, scale, bias = _promoted(self, x)
        return _layers.group(self, x, self.num_features, scale, bias, x.dtype, post_add, order)


class BatchNorm(_Fused, nnx.BatchNorm):
    def __call__(self, x: Any, use_running_average: Optional[bool] = None, *, mask: Any = None,
                 post_add: Any = None) -> Any:
        evaluates = self.use_running_average if use_running_average is None else use_running_average
        if evaluates is None:
            raise ValueError("No `use_running_average` argument was provided to BatchNorm")
        _layers.check(self, mask, has_axis_name=True)
        order = _layers.layout(self, "axis", self.axis, x.ndim)
        x, scale, bias = _promoted(self, x)
        running = self.mean[...], self.var[...]
        y, mean, variance = _layers.batch(self, x, running, scale, bias, x.dtype, post_add, order, not evaluates,
                                          self.axis_name)
        if not evaluates:
            for variable, new in ((self.mean, mean), (self.var, variance)):
                variable[...] = jax.lax.stop_gradient(self.momentum * variable[...] + (1 - self.momentum) * new)
        return y


class LayerNorm(_Fused, nnx.LayerNorm):
    def __call__(self, x: Any, *, mask: Any = None, post_add: Any = None) -> Any:
        _layers.check(self, mask)
        order = _layers.channel_axis(self, x.ndim)
        x, scale, bias = _promoted(self, x)
        return _layers.by_position(self, x, scale, bias, x.dtype, post_add, order, "mean_and_variance")


class RMSNorm(_Fused, nnx.RMSNorm):
    def __call__(self, x: Any, mask: Any = None, *, post_add: Any = None) -> Any:
        _layers.check(self, mask)
        order = _layers.channel_axis(self, x.ndim)
        scale = None if self.scale is None else self.scale[...]
        x, scale = self.promote_dtype((jnp.asarray(x), scale), dtype=self.dtype)
        return _layers.by_position(self, x, scale, None, x.dtype, post_add, order, "mean_square")

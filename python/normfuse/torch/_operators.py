# SPDX-License-Identifier: MIT
"""The operators ``torch.ops.normfuse.*``: schemas, fake kernels, and the CPU and CUDA kernels.

Every operator has a fixed number of outputs and no aliases; nothing is mutated but running statistics. An output that
was not asked for is a tensor of shape [0]. The kernels are registered from the C library through libtorch's stable C
interface where it has what they need ("shim"), and otherwise call the same library by ctypes ("ctypes"): ``binding()``
tells which, and why. ``NORMFUSE_TORCH_BINDING`` = ``ctypes`` asks for the second.

Shapes: x, dy, post_add, ... are [N, C, spatial...] with any number of spatial axes; weight, bias [C]; scale, shift
[N, C]; pre_bias [C] or [N, C]; slope, prelu's, [C] or [1]; mean, rstd [N, groups] or [C], of channel norm
[N, groups, positions]. Saved means are f64: f32 would lose digits of the gradients where the mean is large beside the
standard deviation. RMS norm has none.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Optional, Tuple

import torch
from torch import Tensor

from . import _checks, _native
from .. import _library as _shared
from .._library import EPS_KINDS, STATISTICS
from ._namespace import NAMESPACE

ops = getattr(torch.ops, NAMESPACE)

# The bits of `wanted` that the backward operators take.
WANT_X, WANT_WEIGHT, WANT_BIAS, WANT_SCALE, WANT_SHIFT, WANT_POST_ADD = 1, 2, 4, 8, 16, 32
FROM_Y = 64  # and one that says what their post_add is: the forward's y, of which the activation's derivative is made
WANT_PRE_BIAS = 128  # with WANT_X
FROM_U = 256  # pre_bias is in u already; without it u is x + pre_bias
WANT_SLOPE = 512

ACTIVATIONS = {None: 0, **_shared.ACTIVATIONS}
DEFAULT_ACT_PARAM = {ACTIVATIONS[name]: value for name, value in _shared.DEFAULT_ACT_PARAM.items()}
# Channel norm's y_dtype: an index. None: x's.
Y_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16)
MEAN_SQUARE, EPS_OF_NORM = STATISTICS["mean_square"], EPS_KINDS["of_norm"]

_ACT = "int activation, float act_param"
_NORM = "Tensor x, Tensor? weight, Tensor? bias"
_ADAPTIVE = "Tensor? scale, Tensor? shift"
_AFTER = "Tensor? post_add, Tensor? slope"
_ADDS = f"Tensor? pre_bias, Tensor? pre_add, {_AFTER}"
_RUNNING = "Tensor(a!)? running_mean, Tensor(b!)? running_var"
_GIVEN_NORM, _GIVEN_RUNNING = "Tensor x, Tensor weight, Tensor bias", "Tensor(a!) running_mean, Tensor(b!) running_var"
_SAVED = "Tensor mean, Tensor rstd"
_BACK = f"Tensor? pre_bias, {_AFTER}"
_OF_CHANNELS = "int groups, float eps, int statistics, int eps_kind"
_SHARDS = "Tensor sums, Tensor parts, Tensor stats"

SCHEMAS = {
    "group_norm":
        f"({_NORM}, {_ADAPTIVE}, {_ADDS}, int groups, float eps, {_ACT}, bool return_sum) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    "group_norm_inference": f"({_NORM}, {_ADAPTIVE}, {_ADDS}, int groups, float eps, {_ACT}) -> Tensor",
    "group_norm_backward":
        f"(Tensor dy, Tensor? du, Tensor u, {_SAVED}, Tensor? weight, Tensor? bias, {_ADAPTIVE}, {_BACK}, "
        f"int groups, float eps, {_ACT}, int wanted) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "instance_norm":
        f"({_NORM}, {_RUNNING}, {_ADDS}, float momentum, float eps, {_ACT}, bool return_sum) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    "batch_norm":
        f"({_NORM}, {_RUNNING}, {_ADDS}, float momentum, float eps, {_ACT}, bool return_sum) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    "batch_norm_backward":
        f"(Tensor dy, Tensor? du, Tensor u, {_SAVED}, Tensor? weight, Tensor? bias, {_BACK}, float eps, "
        f"{_ACT}, int wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "batch_norm_evaluate":
        f"({_NORM}, Tensor running_mean, Tensor running_var, {_ADDS}, float eps, {_ACT}, bool return_sum) "
        "-> (Tensor, Tensor)",
    "batch_norm_inference":
        f"({_NORM}, Tensor running_mean, Tensor running_var, {_ADDS}, float eps, {_ACT}) -> Tensor",
    "batch_norm_evaluate_backward":
        "(Tensor dy, Tensor? du, Tensor u, Tensor running_mean, Tensor running_var, Tensor? weight, Tensor? bias, "
        f"{_BACK}, float eps, {_ACT}, int wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # y_dtype: of Y_DTYPES. channels_last: y's channels are adjacent, whatever x's layout is.
    "channel_norm":
        f"({_NORM}, {_ADAPTIVE}, {_ADDS}, {_OF_CHANNELS}, {_ACT}, int y_dtype, bool channels_last, bool return_sum) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    "channel_norm_inference":
        f"({_NORM}, {_ADAPTIVE}, {_ADDS}, {_OF_CHANNELS}, {_ACT}, int y_dtype, bool channels_last) -> Tensor",
    "channel_norm_backward":
        f"(Tensor dy, Tensor? du, Tensor u, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, {_ADAPTIVE}, "
        f"{_BACK}, {_OF_CHANNELS}, {_ACT}, int wanted) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "channel_affine": f"(Tensor x, Tensor? scale, Tensor? bias, {_AFTER}, {_ACT}) -> Tensor",
    "channel_affine_backward":
        f"(Tensor dy, Tensor x, Tensor? scale, Tensor? bias, {_AFTER}, {_ACT}, int wanted) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # Statistics that are spread over workers: see normfuse.h, "sharded statistics". parts: the stats, or sums, of all
    # shards in rank order, [shards, ...] or one after the other. ..._apply merges them, and returns the merged stats
    # last. ..._backward_apply makes gradients of parameters of this shard's `sums`, those of x and pre_bias of `parts`
    # (which is not read where they are not wanted) and the merged `stats`: the host need not know the count.
    "group_norm_stats": "(Tensor x, Tensor? pre_bias, Tensor? pre_add, int groups) -> (Tensor, Tensor)",
    "group_norm_apply":
        f"(Tensor u, Tensor parts, Tensor? weight, Tensor? bias, {_ADAPTIVE}, {_AFTER}, int groups, "
        f"float eps, {_ACT}) -> (Tensor, Tensor, Tensor, Tensor)",
    "group_norm_backward_sums":
        f"(Tensor dy, Tensor u, {_SAVED}, Tensor? weight, Tensor? bias, {_ADAPTIVE}, {_AFTER}, int groups, "
        f"{_ACT}, int wanted) -> (Tensor, Tensor, Tensor)",
    "group_norm_backward_apply":
        f"(Tensor dy, Tensor? du, Tensor u, {_SAVED}, {_SHARDS}, Tensor? weight, Tensor? bias, {_ADAPTIVE}, "
        f"{_BACK}, int groups, {_ACT}, int wanted) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "batch_norm_stats": "(Tensor x, Tensor? pre_bias, Tensor? pre_add) -> (Tensor, Tensor)",
    "batch_norm_apply":
        f"(Tensor u, Tensor parts, Tensor? weight, Tensor? bias, {_RUNNING}, {_AFTER}, float momentum, "
        f"float eps, {_ACT}) -> (Tensor, Tensor, Tensor, Tensor)",
    "batch_norm_backward_sums":
        f"(Tensor dy, Tensor u, {_SAVED}, Tensor? weight, Tensor? bias, {_AFTER}, {_ACT}, int wanted) "
        "-> (Tensor, Tensor, Tensor)",
    "batch_norm_backward_apply":
        f"(Tensor dy, Tensor? du, Tensor u, {_SAVED}, {_SHARDS}, Tensor? weight, Tensor? bias, {_BACK}, "
        f"{_ACT}, int wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    # The same without what is seldom given, and without gradients of their own: the eager path's (_autograd.py), which
    # pays for every argument, output and layer of the dispatcher, and for whether an argument is optional. One value
    # that is all of a call's group or channel is refused here.
    "lean_group_norm": f"({_NORM}, int groups, float eps, {_ACT}) -> (Tensor, Tensor, Tensor)",
    "lean_group_norm_inference": f"({_NORM}, int groups, float eps, {_ACT}) -> Tensor",
    "lean_group_norm_backward":
        f"(Tensor dy, Tensor u, {_SAVED}, Tensor? weight, Tensor? bias, int groups, {_ACT}, int wanted) "
        "-> (Tensor, Tensor, Tensor)",
    "lean_batch_norm":
        f"({_GIVEN_NORM}, {_GIVEN_RUNNING}, float momentum, float eps, {_ACT}) -> (Tensor, Tensor, Tensor)",
    "lean_batch_norm_add":
        f"({_GIVEN_NORM}, Tensor post_add, {_GIVEN_RUNNING}, float momentum, float eps, {_ACT}) "
        "-> (Tensor, Tensor, Tensor)",
    "lean_batch_norm_forward_only": f"({_GIVEN_NORM}, {_GIVEN_RUNNING}, float momentum, float eps, {_ACT}) -> Tensor",
    "lean_batch_norm_inference":
        f"({_GIVEN_NORM}, Tensor running_mean, Tensor running_var, float eps, {_ACT}) -> Tensor",
    "lean_batch_norm_backward":
        f"(Tensor dy, Tensor u, {_SAVED}, Tensor weight, Tensor bias, {_ACT}, int wanted) "
        "-> (Tensor, Tensor, Tensor)",
    "lean_batch_norm_add_backward":
        f"(Tensor dy, Tensor u, {_SAVED}, Tensor weight, Tensor bias, Tensor post_add, {_ACT}, int wanted) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    "lean_batch_norm_evaluate_backward":
        "(Tensor dy, Tensor u, Tensor running_mean, Tensor running_var, Tensor weight, Tensor bias, float eps, "
        f"{_ACT}, int wanted) -> (Tensor, Tensor, Tensor)",
    "lean_batch_norm_stats": "(Tensor x) -> Tensor",
    "lean_batch_norm_apply":
        f"(Tensor u, Tensor parts, Tensor weight, Tensor bias, {_GIVEN_RUNNING}, float momentum, float eps, {_ACT}) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
    "lean_batch_norm_backward_sums":
        f"(Tensor dy, Tensor u, {_SAVED}, Tensor weight, Tensor bias, {_ACT}) -> Tensor",
    "lean_batch_norm_backward_apply":
        f"(Tensor dy, Tensor u, {_SAVED}, {_SHARDS}, Tensor weight, Tensor bias, {_ACT}, int wanted) "
        "-> (Tensor, Tensor, Tensor)",
}  # fmt: skip


def qualified(name: str) -> str:
    """The operator's name with its namespace."""
    return f"{NAMESPACE}::{name}"


# ---- layouts ---------------------------------------------------------------------------------------------------------


def _channels_last_strides(shape) -> Tuple[int, ...]:
    strides = [0] * len(shape)
    step = shape[1]
    for axis in range(len(shape) - 1, 1, -1):
        strides[axis] = step
        step = step * shape[axis]
    strides[1] = 1
    strides[0] = step
    return tuple(strides)


def _spatial_stride(x) -> Optional[int]:
    """The stride of the spatial axes taken as one, 0 where there is one position, None where they are not one."""
    expected = stride = 0
    for axis in range(x.dim() - 1, 1, -1):
        size = x.shape[axis]
        if size == 1:
            continue
        if stride == 0:
            stride = expected = x.stride(axis)
        if x.stride(axis) != expected or stride <= 0:
            return None
        expected = expected * size
    return stride


def is_walkable(x) -> bool:
    """True if the library walks x in place: contiguous, channels-last, or a slice of either along N or C."""
    if x.numel() == 0:
        return True
    position = _spatial_stride(x)
    if position is None:
        return False
    channels = x.shape[1]
    positions = 1
    for size in x.shape[2:]:
        positions = positions * size
    if channels == 1:
        return positions == 1 or position >= 1
    channel = x.stride(1)
    if positions == 1:
        return channel >= 1
    return (position == 1 and channel >= positions) or (channel == 1 and position >= channels)


def like(x: Tensor, dtype: Optional[torch.dtype] = None, channels_last: bool = False) -> Tensor:
    """An uninitialized result for x: x's strides where x is dense; else channels-last where x's channels are adjacent,
    and contiguous otherwise. channels_last: that, whatever x is. dtype: None for x's."""
    dtype = x.dtype if dtype is None else dtype
    if channels_last and x.numel() > 0:
        return torch.empty_strided(x.shape, _channels_last_strides(x.shape), dtype=dtype, device=x.device)
    if x.is_contiguous():
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
    if x.dim() > 2 and is_walkable(x) and x.shape[1] > 1 and x.stride(1) == 1:
        return torch.empty_strided(x.shape, _channels_last_strides(x.shape), dtype=dtype, device=x.device)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _walkable(x: Optional[Tensor]) -> Optional[Tensor]:
    return x if x is None or is_walkable(x) else x.contiguous()


# ---- kernels over ctypes ---------------------------------------------------------------------------------------------


def _none(x: Tensor) -> Tensor:
    return torch.empty((0,), dtype=x.dtype, device=x.device)


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _saved(x: Tensor, *shape) -> Tuple[Tensor, Tensor]:
    return (torch.empty(shape, dtype=torch.float64, device=x.device),
            torch.empty(shape, dtype=statistics_dtype(x), device=x.device))


def _f64(x: Tensor, *shape) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device=x.device)


def _asked(x: Tensor, wanted: int, bit: int, like_this: Optional[Tensor]) -> Tensor:
    """The gradient of a parameter that was given and is asked for."""
    if like_this is None or not wanted & bit:
        return _none(x)
    return torch.empty(like_this.shape, dtype=like_this.dtype, device=like_this.device)


def _big(x: Tensor, condition) -> Tensor:
    return like(x) if condition else _none(x)


def y_type(y_dtype: int) -> Optional[torch.dtype]:
    """None: x's."""
    if not 0 <= y_dtype < len(Y_DTYPES):
        raise RuntimeError("y_dtype is not one that the library knows")
    return Y_DTYPES[y_dtype]


def writes_u(pre_bias: Optional[Tensor], pre_add: Optional[Tensor], return_sum: bool) -> bool:
    """True if u is an output. pre_bias alone is a part of the mean, of which the backward makes it again."""
    return pre_add is not None or (pre_bias is not None and return_sum)


class _Outputs:
    """The outputs of each operator, for the fake kernels and the ctypes kernels alike."""

    @staticmethod
    def group_norm(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps, activation,
                   act_param, return_sum):
        return (like(x), _big(x, writes_u(pre_bias, pre_add, return_sum)), *_saved(x, x.shape[0], groups))

    @staticmethod
    def group_norm_inference(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps, activation,
                             act_param):
        return like(x)

    @staticmethod
    def group_norm_backward(dy, du, u, mean, rstd, weight, bias, scale, shift, pre_bias, post_add, slope, groups, eps,
                            activation, act_param, wanted):
        return (_big(u, wanted & WANT_X), _asked(u, wanted, WANT_WEIGHT, weight), _asked(u, wanted, WANT_BIAS, bias),
                _asked(u, wanted, WANT_SCALE, scale), _asked(u, wanted, WANT_SHIFT, shift),
                _big(u, post_add is not None and wanted & WANT_POST_ADD), _asked(u, wanted, WANT_PRE_BIAS, pre_bias),
                _asked(u, wanted, WANT_SLOPE, slope))

    @staticmethod
    def channel_norm(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps, statistics,
                     eps_kind, activation, act_param, y_dtype, channels_last, return_sum):
        mean, rstd = _saved(x, x.shape[0], groups, _checks.product(x.shape[2:]))
        return (like(x, y_type(y_dtype), channels_last), _big(x, writes_u(pre_bias, pre_add, return_sum)),
                _none(x) if statistics == MEAN_SQUARE else mean, rstd)

    @staticmethod
    def channel_norm_inference(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps,
                               statistics, eps_kind, activation, act_param, y_dtype, channels_last):
        return like(x, y_type(y_dtype), channels_last)

    @staticmethod
    def channel_norm_backward(dy, du, u, mean, rstd, weight, bias, scale, shift, pre_bias, post_add, slope, groups, eps,
                              statistics, eps_kind, activation, act_param, wanted):
        return (_big(u, wanted & WANT_X), _asked(u, wanted, WANT_WEIGHT, weight), _asked(u, wanted, WANT_BIAS, bias),
                _asked(u, wanted, WANT_SCALE, scale), _asked(u, wanted, WANT_SHIFT, shift),
                like(u, dy.dtype) if post_add is not None and wanted & WANT_POST_ADD else _none(u),
                _asked(u, wanted, WANT_PRE_BIAS, pre_bias), _asked(u, wanted, WANT_SLOPE, slope))

    @staticmethod
    def instance_norm(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, momentum, eps,
                      activation, act_param, return_sum):
        return (like(x), _big(x, writes_u(pre_bias, pre_add, return_sum)), *_saved(x, x.shape[0], x.shape[1]))

    @staticmethod
    def batch_norm(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, momentum, eps,
                   activation, act_param, return_sum):
        return (like(x), _big(x, writes_u(pre_bias, pre_add, return_sum)), *_saved(x, x.shape[1]))

    @staticmethod
    def batch_norm_backward(dy, du, u, mean, rstd, weight, bias, pre_bias, post_add, slope, eps, activation, act_param,
                            wanted):
        return (_big(u, wanted & WANT_X), _asked(u, wanted, WANT_WEIGHT, weight), _asked(u, wanted, WANT_BIAS, bias),
                _big(u, post_add is not None and wanted & WANT_POST_ADD), _asked(u, wanted, WANT_PRE_BIAS, pre_bias),
                _asked(u, wanted, WANT_SLOPE, slope))

    batch_norm_evaluate_backward = batch_norm_backward

    @staticmethod
    def batch_norm_evaluate(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, eps,
                            activation, act_param, return_sum):
        return like(x), _big(x, writes_u(pre_bias, pre_add, return_sum))

    @staticmethod
    def batch_norm_inference(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, eps,
                             activation, act_param):
        return like(x)

    @staticmethod
    def channel_affine(x, scale, bias, post_add, slope, activation, act_param):
        return like(x)

    @staticmethod
    def channel_affine_backward(dy, x, scale, bias, post_add, slope, activation, act_param, wanted):
        return (_big(x, wanted & WANT_X), _asked(x, wanted, WANT_WEIGHT, scale), _asked(x, wanted, WANT_BIAS, bias),
                _big(x, post_add is not None and wanted & WANT_POST_ADD), _asked(x, wanted, WANT_SLOPE, slope))

    @staticmethod
    def group_norm_stats(x, pre_bias, pre_add, groups):
        return _f64(x, x.shape[0], groups, 3), _big(x, writes_u(pre_bias, pre_add, True))

    @staticmethod
    def group_norm_apply(u, parts, weight, bias, scale, shift, post_add, slope, groups, eps, activation, act_param):
        return (like(u), *_saved(u, u.shape[0], groups), _f64(u, u.shape[0], groups, 3))

    @staticmethod
    def group_norm_backward_sums(dy, u, mean, rstd, weight, bias, scale, shift, post_add, slope, groups, activation,
                                 act_param, wanted):
        return (_f64(u, u.shape[0], u.shape[1], 2), _big(u, post_add is not None and wanted & WANT_POST_ADD),
                _asked(u, wanted, WANT_SLOPE, slope))

    @staticmethod
    def group_norm_backward_apply(dy, du, u, mean, rstd, sums, parts, stats, weight, bias, scale, shift, pre_bias,
                                  post_add, slope, groups, activation, act_param, wanted):
        return (_big(u, wanted & WANT_X), _asked(u, wanted, WANT_WEIGHT, weight), _asked(u, wanted, WANT_BIAS, bias),
                _asked(u, wanted, WANT_SCALE, scale), _asked(u, wanted, WANT_SHIFT, shift),
                _asked(u, wanted, WANT_PRE_BIAS, pre_bias))

    @staticmethod
    def batch_norm_stats(x, pre_bias, pre_add):
        return _f64(x, x.shape[1], 3), _big(x, writes_u(pre_bias, pre_add, True))

    @staticmethod
    def batch_norm_apply(u, parts, weight, bias, running_mean, running_var, post_add, slope, momentum, eps, activation,
                         act_param):
        return (like(u), *_saved(u, u.shape[1]), _f64(u, u.shape[1], 3))

    @staticmethod
    def batch_norm_backward_sums(dy, u, mean, rstd, weight, bias, post_add, slope, activation, act_param, wanted):
        return (_f64(u, u.shape[1], 2), _big(u, post_add is not None and wanted & WANT_POST_ADD),
                _asked(u, wanted, WANT_SLOPE, slope))

    @staticmethod
    def batch_norm_backward_apply(dy, du, u, mean, rstd, sums, parts, stats, weight, bias, pre_bias, post_add, slope,
                                  activation, act_param, wanted):
        return (_big(u, wanted & WANT_X), _asked(u, wanted, WANT_WEIGHT, weight), _asked(u, wanted, WANT_BIAS, bias),
                _asked(u, wanted, WANT_PRE_BIAS, pre_bias))

    @staticmethod
    def lean_group_norm(x, weight, bias, groups, eps, activation, act_param):
        return (like(x), *_saved(x, x.shape[0], groups))

    @staticmethod
    def lean_group_norm_inference(x, weight, bias, groups, eps, activation, act_param):
        return like(x)

    @staticmethod
    def lean_group_norm_backward(dy, u, mean, rstd, weight, bias, groups, activation, act_param, wanted):
        return (_big(u, wanted & WANT_X), _asked(u, wanted, WANT_WEIGHT, weight), _asked(u, wanted, WANT_BIAS, bias))

    @staticmethod
    def lean_batch_norm(x, weight, bias, running_mean, running_var, momentum, eps, activation, act_param):
        return (like(x), *_saved(x, x.shape[1]))

    @staticmethod
    def lean_batch_norm_add(x, weight, bias, post_add, running_mean, running_var, momentum, eps, activation, act_param):
        return (like(x), *_saved(x, x.shape[1]))

    @staticmethod
    def lean_batch_norm_forward_only(x, weight, bias, running_mean, running_var, momentum, eps, activation, act_param):
        return like(x)

    @staticmethod
    def lean_batch_norm_inference(x, weight, bias, running_mean, running_var, eps, activation, act_param):
        return like(x)

    @staticmethod
    def lean_batch_norm_backward(dy, u, mean, rstd, weight, bias, activation, act_param, wanted):
        return (_big(u, wanted & WANT_X), _asked(u, wanted, WANT_WEIGHT, weight), _asked(u, wanted, WANT_BIAS, bias))

    @staticmethod
    def lean_batch_norm_add_backward(dy, u, mean, rstd, weight, bias, post_add, activation, act_param, wanted):
        return (_big(u, wanted & WANT_X), _asked(u, wanted, WANT_WEIGHT, weight), _asked(u, wanted, WANT_BIAS, bias),
                _big(u, wanted & WANT_POST_ADD))

    @staticmethod
    def lean_batch_norm_evaluate_backward(dy, u, running_mean, running_var, weight, bias, eps, activation, act_param,
                                          wanted):
        return (_big(u, wanted & WANT_X), _asked(u, wanted, WANT_WEIGHT, weight), _asked(u, wanted, WANT_BIAS, bias))

    @staticmethod
    def lean_batch_norm_stats(x):
        return _f64(x, x.shape[1], 3)

    @staticmethod
    def lean_batch_norm_apply(u, parts, weight, bias, running_mean, running_var, momentum, eps, activation, act_param):
        return (like(u), *_saved(u, u.shape[1]), _f64(u, u.shape[1], 3))

    @staticmethod
    def lean_batch_norm_backward_sums(dy, u, mean, rstd, weight, bias, activation, act_param):
        return _f64(u, u.shape[1], 2)

    @staticmethod
    def lean_batch_norm_backward_apply(dy, u, mean, rstd, sums, parts, stats, weight, bias, activation, act_param,
                                       wanted):
        return (_big(u, wanted & WANT_X), _asked(u, wanted, WANT_WEIGHT, weight), _asked(u, wanted, WANT_BIAS, bias))


# The library's name of each output, in order.
OUTPUT_NAMES = {
    "group_norm": ("y", "u", "mean", "rstd"),
    "group_norm_inference": ("y",),
    "group_norm_backward": ("dx", "dweight", "dbias", "dscale", "dshift", "dpost_add", "dpre_bias", "dslope"),
    "channel_norm": ("y", "u", "mean", "rstd"),
    "channel_norm_inference": ("y",),
    "channel_norm_backward": ("dx", "dweight", "dbias", "dscale", "dshift", "dpost_add", "dpre_bias", "dslope"),
    "instance_norm": ("y", "u", "mean", "rstd"),
    "batch_norm": ("y", "u", "mean", "rstd"),
    "batch_norm_backward": ("dx", "dweight", "dbias", "dpost_add", "dpre_bias", "dslope"),
    "batch_norm_evaluate": ("y", "u"),
    "batch_norm_inference": ("y",),
    "batch_norm_evaluate_backward": ("dx", "dweight", "dbias", "dpost_add", "dpre_bias", "dslope"),
    "channel_affine": ("y",),
    "channel_affine_backward": ("dx", "dweight", "dbias", "dpost_add", "dslope"),
    "group_norm_stats": ("stats", "u"),
    "group_norm_apply": ("y", "mean", "rstd", "stats"),
    "group_norm_backward_sums": ("sums", "dpost_add", "dslope"),
    "group_norm_backward_apply": ("dx", "dweight", "dbias", "dscale", "dshift", "dpre_bias"),
    "batch_norm_stats": ("stats", "u"),
    "batch_norm_apply": ("y", "mean", "rstd", "stats"),
    "batch_norm_backward_sums": ("sums", "dpost_add", "dslope"),
    "lean_group_norm": ("y", "mean", "rstd"),
    "lean_group_norm_inference": ("y",),
    "lean_group_norm_backward": ("dx", "dweight", "dbias"),
    "lean_batch_norm": ("y", "mean", "rstd"),
    "lean_batch_norm_add": ("y", "mean", "rstd"),
    "lean_batch_norm_forward_only": ("y",),
    "lean_batch_norm_inference": ("y",),
    "lean_batch_norm_backward": ("dx", "dweight", "dbias"),
    "lean_batch_norm_add_backward": ("dx", "dweight", "dbias", "dpost_add"),
    "lean_batch_norm_evaluate_backward": ("dx", "dweight", "dbias"),
    "lean_batch_norm_stats": ("stats",),
    "lean_batch_norm_apply": ("y", "mean", "rstd", "stats"),
    "lean_batch_norm_backward_sums": ("sums",),
    "lean_batch_norm_backward_apply": ("dx", "dweight", "dbias"),
    "batch_norm_backward_apply": ("dx", "dweight", "dbias", "dpre_bias"),
}
# The outputs that are not written where the other inputs do not ask for them; all others always are.
_OPTIONAL_OUTPUTS = {"u", "dx", "dweight", "dbias", "dscale", "dshift", "dpost_add", "dpre_bias", "dslope"}

# Operator -> the library's operator, the direction whose scratch memory it takes, its function, the options' flags.
_FUNCTIONS = {
    "group_norm": ("group_norm", "forward", "forward", 0),
    "group_norm_inference": ("group_norm", "forward", "forward", 0),
    "group_norm_backward": ("group_norm", "backward", "backward", 0),
    "instance_norm": ("group_norm", "forward", "forward", 0),
    "batch_norm": ("batch_norm", "forward", "forward", 0),
    "batch_norm_backward": ("batch_norm", "backward", "backward", 0),
    "batch_norm_evaluate": ("batch_norm", "forward", "forward", _native.EVALUATE),
    "batch_norm_inference": ("batch_norm", "forward", "forward", _native.EVALUATE),
    "batch_norm_evaluate_backward": ("batch_norm", "backward", "backward", _native.EVALUATE),
    "channel_norm": ("channel_norm", "forward", "forward", 0),
    "channel_norm_inference": ("channel_norm", "forward", "forward", 0),
    "channel_norm_backward": ("channel_norm", "backward", "backward", 0),
    "channel_affine": ("affine", "forward", "forward", 0),
    "channel_affine_backward": ("affine", "backward", "backward", 0),
    "group_norm_stats": ("group_norm", "forward", "stats", 0),
    "group_norm_apply": ("group_norm", "forward", "apply", 0),
    "group_norm_backward_sums": ("group_norm", "backward", "backward_sums", 0),
    "group_norm_backward_apply": ("group_norm", "backward", "backward_apply", 0),
    "batch_norm_stats": ("batch_norm", "forward", "stats", 0),
    "batch_norm_apply": ("batch_norm", "forward", "apply", 0),
    "batch_norm_backward_sums": ("batch_norm", "backward", "backward_sums", 0),
    "batch_norm_backward_apply": ("batch_norm", "backward", "backward_apply", 0),
}
_BIG_INPUTS = {"x", "pre_add", "post_add", "dy", "du"}
# For x and tensors of its shape the library asks whether x alone is given; u is x with what was added before.
_RENAMED = {"u": "x"}


def _of_lean(name: str) -> str:
    """The operator that a lean one is with fewer arguments and outputs."""
    return name.removeprefix("lean_").removesuffix("_forward_only").replace("norm_add", "norm")


def _ctypes_kernel(name: str):
    schema = torch._C.parse_schema(qualified(name) + SCHEMAS[name])
    arguments = [argument.name for argument in schema.arguments]
    outputs_of = getattr(_Outputs, name)
    output_names = OUTPUT_NAMES[name]
    operator, direction, function, flags = _FUNCTIONS[_of_lean(name)]
    is_affine = name.startswith("channel_affine")
    renamed = {**_RENAMED, "scale": "weight"} if is_affine else _RENAMED

    def kernel(*values):
        tensors, numbers = {}, {}
        for argument, value in zip(arguments, values):
            if isinstance(value, Tensor):
                slot = renamed.get(argument, argument)
                if slot in _BIG_INPUTS:
                    _checks.dimensions(value)  # the library would, but N and C are asked for before it is called
                    value = _walkable(value)
                tensors[slot] = value
            elif value is not None:
                numbers[argument] = value
        if numbers.get("wanted", 0) & FROM_Y:
            tensors["y"] = tensors.pop("post_add")
        if numbers.get("wanted", 0) & FROM_U:
            tensors.pop("pre_bias", None)
        x = tensors["x"]
        for slot in ("mean", "rstd"):  # hooks on saved tensors may give another dtype back
            statistic = tensors.get(slot)
            if statistic is not None and not (slot == "mean" and statistic.dtype == torch.float64):
                tensors[slot] = statistic.to(statistics_dtype(x))
        if "groups" in numbers:
            _checks.groups_divide(x.shape[1], numbers["groups"])  # before outputs are made of their number
        outputs = outputs_of(*values)
        if name in ("lean_group_norm", "lean_group_norm_inference"):
            _checks.values_per_group(x, numbers["groups"])
        if name == "instance_norm":
            numbers["groups"] = x.shape[1]
        for slot, tensor in zip(output_names, outputs if isinstance(outputs, tuple) else (outputs,)):
            if slot not in _OPTIONAL_OUTPUTS or tensor.dim() > 1 or tensor.numel() > 0:
                tensors[slot] = tensor
        if numbers.get("statistics") == MEAN_SQUARE:
            tensors.pop("mean", None)
        if "parts" in tensors:
            _of_shards(partial(_native.call, operator, direction, function, flags), numbers, tensors)
        else:
            _native.call(operator, direction, function, flags, numbers, tensors)
        return outputs

    return kernel


def _of_shards(call, numbers, tensors) -> None:
    """..._apply and ..._backward_apply of the parts of all shards."""
    parts = tensors.pop("parts")
    if "y" in tensors and "dy" not in tensors:
        _native.merge("stats_merge", _in_parts(parts, tensors["stats"]), tensors["stats"])
        call(numbers, tensors)
        return
    numbers, stats = {**numbers, "set_values": _native.PER_VALUE}, tensors.pop("stats")
    of_parameters = {"dweight", "dbias", "dscale", "dshift"} & set(tensors)
    if of_parameters:
        call(numbers, {slot: tensor for slot, tensor in tensors.items()
                       if slot not in ("dx", "dpre_bias", "du", "pre_bias")})
    if "dx" in tensors:
        shared = torch.empty_like(tensors["sums"], memory_format=torch.contiguous_format)
        _native.merge("sums_merge_per_value", _in_parts(parts, shared), stats, shared)
        call(numbers, {**{slot: tensor for slot, tensor in tensors.items() if slot not in of_parameters},
                       "sums": shared})


def _in_parts(parts: Tensor, one: Tensor) -> Tensor:
    """[shards, ...] of what may be one after the other."""
    if parts.dtype != torch.float64 or not parts.is_contiguous() or parts.numel() % max(one.numel(), 1):
        raise RuntimeError("parts is not what the shards gave, one after the other")
    return parts.view(parts.numel() // one.numel() if one.numel() else 1, *one.shape)


def _with_checks(name: str):
    """The fake kernel: what the library would refuse, then the outputs. The kernel, too, of tensors on several devices
    one of which is meta."""
    outputs_of = getattr(_Outputs, name)
    lean = name.removeprefix("lean_")
    arguments = [argument.name for argument in torch._C.parse_schema(qualified(name) + SCHEMAS[name]).arguments]
    if name in ("lean_group_norm", "lean_group_norm_inference"):
        def check(x, weight, bias, groups, *numbers):
            _checks.values_per_group(x, groups)
            _checks.group_norm(x, weight, bias, None, None, None, None, None, groups)
    elif name in ("group_norm", "group_norm_inference"):
        def check(*args):
            _checks.group_norm(*args[:8], args[9])
    elif name in ("channel_norm", "channel_norm_inference"):
        def check(*args):
            _checks.channel_norm(*args[:8], args[9], y_type(args[15]))
    elif name in ("lean_batch_norm", "lean_batch_norm_forward_only", "lean_batch_norm_inference"):
        def check(*args):
            if name != "lean_batch_norm_inference":
                _checks.values_per_channel(args[0].shape)
            _checks.batch_norm("batch_norm", *args[:5], None, None, None)
    elif name == "lean_batch_norm_add":
        def check(*args):
            _checks.values_per_channel(args[0].shape)
            _checks.batch_norm("batch_norm", *args[:3], *args[4:6], None, None, args[3])
    elif lean in ("instance_norm", "batch_norm", "batch_norm_evaluate", "batch_norm_inference"):
        def check(*args):
            _checks.batch_norm(lean, *args[:8])
    elif name == "channel_affine":
        def check(*args):
            _checks.channel_affine(*args[:4])
    else:
        def check(*args):
            pass

    def fake(*args):
        _checks.one_device(args)
        check(*args)
        given = dict(zip(arguments, args))
        if "activation" in given:
            _checks.slope(given["x" if "x" in given else "u"], given.get("slope"), given["activation"])
        return outputs_of(*args) if _native.preparation.devices is None else noting(*args)

    noting = _ctypes_kernel(name)
    return fake


_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(qualified(_name), _with_checks(_name), lib=_library)
    if _name.startswith("lean_"):
        _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")


# Operators that update running statistics, with a schema that does not say so, as those of aten's batch norms do not.
# It is for torch.func.functionalize alone, which refuses operators of other libraries that say it.
UNANNOTATED = {"batch_norm_unannotated": "batch_norm", "instance_norm_unannotated": "instance_norm"}
for _name, _annotated in UNANNOTATED.items():
    OUTPUT_NAMES[_name] = OUTPUT_NAMES[_annotated]
    _library.define(_name + SCHEMAS[_annotated].replace(_RUNNING, "Tensor? running_mean, Tensor? running_var"),
                    tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(qualified(_name), _with_checks(_annotated), lib=_library)
    _library.impl(_name, getattr(ops, _annotated).default, "CompositeExplicitAutograd")


def _register() -> Tuple[str, str]:
    """The kernels: registered once, when this module is first imported."""
    asked_for = os.environ.get("NORMFUSE_TORCH_BINDING", "")
    if asked_for not in ("", "shim", "ctypes"):
        raise ImportError(f"NORMFUSE_TORCH_BINDING is {asked_for!r}; it may be 'shim' or 'ctypes'")
    if asked_for == "ctypes":
        why = "NORMFUSE_TORCH_BINDING asks for it"
    else:
        why = _native.register_shim()
        if why is None:
            return "shim", "libtorch has the stable C interface"
        if asked_for == "shim":
            raise ImportError(f"NORMFUSE_TORCH_BINDING is 'shim', but {why}")
    for name in SCHEMAS:
        for key in ("CPU", "CUDA"):
            _library.impl(name, _ctypes_kernel(name), key)
    return "ctypes", why


_binding = _register()


def binding() -> Tuple[str, str]:
    """Which kernels the operators have, "shim" or "ctypes", and why."""
    return _binding


def straight(name: str):
    """The operator as a callable of libtorch: without torch.ops' Python frame, and without the look for
    __torch_function__ in every argument, which costs 0.5 us a call and is the layers' own first step."""
    return partial(torch._C._dispatch_call_boxed, torch._C._dispatch_find_schema_or_throw(qualified(name), ""))

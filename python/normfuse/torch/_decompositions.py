# SPDX-License-Identifier: MIT
"""The operators out of aten's, for exported programs: ExportedProgram.run_decompositions(), and what builds on it, such
as torch.onnx.export, leaves no `normfuse.*`.

Values are centred twice, in f32 (f64 for f64): by their mean as a sum in f32 gives it, then by the mean of what is
left. So a large mean costs no digits; docs/numerics.md has the bound. What is fused is one computation here as well,
rounded once to x's dtype.

With its default table run_decompositions() decomposes those custom operators that are CompositeImplicitAutograd.
`normfuse::decomposition`, which nothing calls, is one and stands for all of ours: while it is being decomposed, so are
they (`is_decomposing`). They are none themselves, since torch.compile would then take them apart as well. A table
without it (`del table[torch.ops.normfuse.decomposition.default]`) keeps them.
"""
from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from . import _operators
from ._operators import EPS_OF_NORM, MEAN_SQUARE, ops, writes_u, y_type

# ---- formulas -------------------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def wide_beside(x: Tensor, parameter: Tensor) -> Tensor:
    """A parameter as wide as what is computed of x and it: `1 + scale` is then no less exact."""
    return parameter.double() if x.dtype == torch.float64 else wide(parameter)


def activate(z: Tensor, activation: int, act_param: float, slope: Optional[Tensor]) -> Tensor:
    functions = torch.nn.functional
    if activation == 0:
        return z
    if activation == 1:
        return functions.relu(z)
    if activation == 2:
        return functions.leaky_relu(z, act_param)
    if activation == 3:
        return functions.silu(z)
    if activation == 4:
        return functions.gelu(z)
    if activation == 5:
        return functions.gelu(z, approximate="tanh")
    if activation == 6:
        return z * (z + 3).clamp(0, 6) / 6  # torch's on CUDA multiplies by 1/6 in f32, whatever z is
    if activation == 7:
        return functions.elu(z, act_param)
    if activation == 9:
        return functions.relu6(z)
    if activation == 10:
        return functions.prelu(z, slope.to(z.dtype))
    return functions.mish(z)


def activate_backward(dy: Tensor, z: Tensor, activation: int, act_param: float, slope: Optional[Tensor]) -> Tensor:
    # silu and mish are spelled out: torch has no derivatives of its silu_backward and mish_backward.
    aten = torch.ops.aten
    if activation == 0:
        return dy
    if activation == 1:
        return aten.threshold_backward(dy, z, 0)
    if activation == 2:
        return aten.leaky_relu_backward(dy, z, act_param, False)
    if activation == 3:
        sigmoid = z.sigmoid()
        return dy * sigmoid * (1 + z * (1 - sigmoid))
    if activation == 4:
        return aten.gelu_backward(dy, z)
    if activation == 5:
        return aten.gelu_backward(dy, z, approximate="tanh")
    if activation == 6:
        return aten.hardswish_backward(dy, z)
    if activation == 7:
        return aten.elu_backward(dy, act_param, 1.0, 1.0, False, z)
    if activation == 9:
        return aten.hardtanh_backward(dy, z, 0, 6)
    if activation == 10:
        return torch.where(z > 0, dy, dy * slope.to(z.dtype).reshape(1, -1, 1))
    tanh_softplus = torch.nn.functional.softplus(z).tanh()
    return dy * (tanh_softplus + z * z.sigmoid() * (1 - tanh_softplus.square()))


def _shaped(parameter: Tensor, x: Tensor) -> Tensor:
    """[C] or [N, C] to be broadcast to x."""
    shape = (1, -1) if parameter.dim() == 1 else parameter.shape
    return wide_beside(x, parameter).reshape(*shape, *(1,) * (x.dim() - 2))


def _of_groups(groups: int) -> Callable[[Tensor], Tensor]:
    """The mean over the values that share statistics, to be broadcast to x."""

    def average(x: Tensor) -> Tensor:
        n, c = x.shape[:2]
        if groups == c and x.dim() > 2:
            return x.mean(tuple(range(2, x.dim())), keepdim=True)
        mean = x.reshape(n, groups, -1).mean(2, keepdim=True)
        return mean.expand(n, groups, c // groups).reshape(n, c, *(1,) * (x.dim() - 2))

    return average


def _of_positions(groups: int) -> Callable[[Tensor], Tensor]:
    """Likewise, of the channels of a group at each position."""

    def average(x: Tensor) -> Tensor:
        n, c, *positions = x.shape
        if groups == 1:
            return x.mean(1, keepdim=True)
        mean = x.reshape(n, groups, c // groups, *positions).mean(2, keepdim=True)
        return mean.expand(n, groups, c // groups, *positions).reshape(x.shape)

    return average


def _of_batch(x: Tensor) -> Tensor:
    return x.mean((0, *range(2, x.dim())), keepdim=True)


def _finish(x, normalized, weight, bias, scale, shift, post_add, slope, activation, act_param, dtype=None):
    """dtype: the result's; None: x's."""
    z = normalized
    if weight is not None:
        z = z * _shaped(weight, x)
    if bias is not None:
        z = z + _shaped(bias, x)
    if scale is not None:
        z = z * (1.0 + _shaped(scale, x))
    if shift is not None:
        z = z + _shaped(shift, x)
    if post_add is not None:
        z = z + wide(post_add)
    return activate(z, activation, act_param, slope).to(x.dtype if dtype is None else dtype)


def _centred(values, average):
    """values - mean, and the mean in f64."""
    near = average(values)
    values = values - near
    rest = average(values)
    return values - rest, near.double() + rest.double()


def _normalize(u, average, eps):
    """(u - mean) * rstd, and the mean in f64, the variance and rstd of what `average` averages over."""
    values, mean = _centred(wide(u), average)
    variance = average(values * values)
    rstd = (variance + eps).rsqrt()
    return values * rstd, mean, variance, rstd


def added(x: Tensor, pre_bias: Optional[Tensor], pre_add: Optional[Tensor], return_sum: bool) -> Tensor:
    """u: rounded once to x's dtype where it is a tensor, and wide where pre_bias is a part of the mean."""
    if pre_bias is None:
        return x if pre_add is None else x + pre_add
    u = wide(x) + _shaped(pre_bias, x)
    u = u if pre_add is None else u + wide(pre_add)
    return u.to(x.dtype) if writes_u(pre_bias, pre_add, return_sum) else u


def _sum(x: Tensor, pre_bias: Optional[Tensor], pre_add: Optional[Tensor], return_sum: bool) -> tuple[Tensor, Tensor]:
    """The tensor that is normalized, and the operator's output of it."""
    u = added(x, pre_bias, pre_add, return_sum)
    return u, u if writes_u(pre_bias, pre_add, return_sum) else x.new_empty(0)


def _update(running_mean: Tensor, mean: Tensor, running_var: Tensor, variance: Tensor, count: int,
            momentum: float) -> None:
    for running, new in ((running_mean, mean), (running_var, variance.double() * (count / (count - 1)))):
        running.copy_(running.double() * (1.0 - momentum) + new * momentum)


def _of_samples(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps, activation, act_param,
                return_sum):
    """Group norm's outputs and the variance, with statistics that are [N, C]."""
    u, written = _sum(x, pre_bias, pre_add, return_sum)
    normalized, *statistics = _normalize(u, _of_groups(groups), eps)
    y = _finish(x, normalized, weight, bias, scale, shift, post_add, slope, activation, act_param)
    mean, variance, rstd = (t.flatten(1) for t in statistics)
    return y, written, mean, variance, rstd


def _group_norm(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps, activation, act_param,
                return_sum=False):
    y, written, mean, _, rstd = _of_samples(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups,
                                            eps, activation, act_param, return_sum)
    each = x.shape[1] // groups
    return y, written, mean[:, ::each], rstd[:, ::each]


def _channel_norm(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps, statistics, eps_kind,
                  activation, act_param, y_dtype, channels_last, return_sum=False):
    u = added(x, pre_bias, pre_add, True)
    written = u if writes_u(pre_bias, pre_add, return_sum) else x.new_empty(0)
    average, values, mean = _of_positions(groups), wide(u), None
    if statistics != MEAN_SQUARE:
        values, mean = _centred(values, average)
    square, each = average(values * values), x.shape[1] // groups
    if eps_kind == EPS_OF_NORM:
        rstd = each ** 0.5 / (square * each).sqrt().clamp_min(eps)
    else:
        rstd = (square + eps).rsqrt()
    y = _finish(x, values * rstd, weight, bias, scale, shift, post_add, slope, activation, act_param, y_type(y_dtype))
    if channels_last:
        y = y.movedim(1, -1).contiguous().movedim(-1, 1)
    shape = x.shape[0], groups, x.shape[2:].numel()
    mean, rstd = (None if t is None else (t if groups == 1 else t[:, ::each]).reshape(shape) for t in (mean, rstd))
    return y, written, x.new_empty(0) if mean is None else mean, rstd


def _instance_norm(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, momentum, eps,
                   activation, act_param, return_sum):
    y, written, mean, variance, rstd = _of_samples(x, weight, bias, None, None, pre_bias, pre_add, post_add, slope,
                                                   x.shape[1], eps, activation, act_param, return_sum)
    if running_mean is not None:
        _update(running_mean, mean.mean(0), running_var, variance.mean(0), x.numel() // (x.shape[0] * x.shape[1]),
                momentum)
    return y, written, mean, rstd


def _batch_norm(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, momentum, eps,
                activation, act_param, return_sum):
    u, written = _sum(x, pre_bias, pre_add, return_sum)
    normalized, mean, variance, rstd = _normalize(u, _of_batch, eps)
    y = _finish(x, normalized, weight, bias, None, None, post_add, slope, activation, act_param)
    if running_mean is not None:
        _update(running_mean, mean.flatten(), running_var, variance.flatten(), x.numel() // x.shape[1], momentum)
    return y, written, mean.flatten(), rstd.flatten()


def _batch_norm_evaluate(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, eps,
                         activation, act_param, return_sum=False):
    u, written = _sum(x, pre_bias, pre_add, return_sum)
    normalized = (wide(u) - _shaped(running_mean, u)) * (_shaped(running_var, u) + eps).rsqrt()
    return _finish(x, normalized, weight, bias, None, None, post_add, slope, activation, act_param), written


def _channel_affine(x, scale, bias, post_add, slope, activation, act_param):
    return _finish(x, wide(x), scale, bias, None, None, post_add, slope, activation, act_param)


def _first(formula: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: formula(*args)[0]


formulas = {
    "group_norm": _group_norm,
    "group_norm_inference": _first(_group_norm),
    "channel_norm": _channel_norm,
    "channel_norm_inference": _first(_channel_norm),
    "instance_norm": _instance_norm,
    "batch_norm": _batch_norm,
    "batch_norm_evaluate": _batch_norm_evaluate,
    "batch_norm_inference": _first(_batch_norm_evaluate),
    "channel_affine": _channel_affine,
    "batch_norm_unannotated": _batch_norm,
    "instance_norm_unannotated": _instance_norm,
}

# ---- registration ---------------------------------------------------------------------------------------------------

_IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd
_operators._library.define("decomposition(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_operators._library.impl("decomposition", torch.clone, "CompositeImplicitAutograd")
_mark = ops.decomposition.default
_mark.py_impl(_IMPLICIT)(torch.clone)


def is_decomposing() -> bool:
    """True if run_decompositions() is at work: while it is, operators of its table have Python kernels for every
    backend, and those that it is to keep have another decomposition."""
    return torch._C.DispatchKey.CPU in _mark.py_kernels and _mark.py_kernels[_IMPLICIT] is torch.clone

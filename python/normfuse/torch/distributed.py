# SPDX-License-Identifier: MIT
"""Normalization whose statistics are spread over processes: batch norm over the batches of all of them, group norm of
images that are cut in strips. SyncBatchNorm and GroupNorm(sharded_dim=) call these functions.

Each process makes (count, mean, M2) of what it has, in f64; all of them are gathered, and every process merges them in
rank order with the formula of Chan et al. (1979), so that all have the same statistics to the bit. The backward gathers
its two sums in the same way. One gather of 24 bytes for each channel (or group of a sample) in the forward and one of
16 bytes for each channel (of a sample) in the backward are all that is sent.

A process may have an empty batch or strip; it takes part in the gathers like the others. All processes of the group
must make the same calls, so arguments are checked before anything is sent, and gradients of the input must be asked for
in all of them or in none. Counts stay on the device, nothing waits for it, except where gloo gathers parts of a GPU,
which go through host memory.

What the gradients are of is the sum of what all processes make of their results. Where they are to be differentiated
themselves (``create_graph=True``, in all processes), formulas of differentiable operations take the operators' place,
as without processes, and each of their averages is one more gather.
"""
from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from . import _autograd, _checks, functional
from ._operators import (FROM_U, WANT_BIAS, WANT_POST_ADD, WANT_PRE_BIAS, WANT_SCALE, WANT_SHIFT, WANT_SLOPE,
                         WANT_WEIGHT, WANT_X, ops, writes_u)

__all__ = ["batch_norm", "group_norm", "spans_processes"]


def spans_processes(process_group: Optional[Any] = None) -> bool:
    """Whether `process_group` (None: all processes) is more than this process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


# What a gather needs to know of a group: its name, its processes, and whether its parts go through host memory.
_Group = tuple[str, int, bool]


def _gather(part: Tensor, group: _Group) -> Tensor:
    """[processes, ...]: the parts of all processes in rank order."""
    name, processes, through_host = group
    sent = part.unsqueeze(0).cpu() if through_host else part.unsqueeze(0)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(sent, processes, name)
    gathered = torch.ops._c10d_functional.wait_tensor(gathered)
    return gathered.to(part.device) if through_host else gathered


@torch.compiler.assume_constant_result
def _goes_through_host(group_name: str, device: str) -> bool:
    """Gloo reads the parts of this gather as host memory, whatever device they are on, and the process is gone:
    https://github.com/pytorch/pytorch/issues/152645"""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    return group._get_backend(torch.device(device)).name() == "gloo"


def _named(process_group: Optional[Any], input: Tensor) -> _Group:
    group = dist.group.WORLD if process_group is None else process_group
    name = group.group_name
    return name, dist.get_world_size(group), input.device.type != "cpu" and _goes_through_host(name, input.device.type)


# What the library is told that a set counts: its real count, on the device, is not known to the host, so `_per_value`
# divides by it first and multiplies by this one, which changes no digit. (1 is refused, as it should be elsewhere.)
_SET_VALUES = 2


def _per_value(sums: Tensor, counts: Tensor) -> Tensor:
    """Merged sums for backward_apply with set_values=_SET_VALUES. An empty set has sums of 0."""
    return sums * _SET_VALUES / counts.clamp(min=1.0)


class _SumOverProcesses(torch.autograd.Function):
    """Added in rank order. All processes use the sum, so each of them has a part of its gradient."""

    @staticmethod
    def forward(ctx, part, *group):
        ctx.group = group
        return _gather(part.contiguous(), group).sum(0)

    @staticmethod
    def backward(ctx, gradient):
        return _SumOverProcesses.apply(gradient, *ctx.group), None, None, None


def _batch_average(counts: Tensor, group: _Group) -> Callable[[Tensor], Tensor]:
    """For the formulas, as those of _autograd. counts: [C], the values of all processes."""

    def average(x: Tensor) -> Tensor:
        sums = _SumOverProcesses.apply(x.sum((0, 2), dtype=torch.float64), *group)
        return (sums / counts.clamp(min=1.0)).to(x.dtype).reshape(1, -1, 1)

    return average


def _group_average(counts: Tensor, group: _Group) -> Callable[[Tensor], Tensor]:
    """counts: [N, groups]."""

    def average(x: Tensor) -> Tensor:
        (n, c, s), groups = x.shape, counts.shape[1]
        sums = _SumOverProcesses.apply(x.reshape(n, groups, c // groups * s).sum(2, dtype=torch.float64), *group)
        means = (sums / counts.clamp(min=1.0)).to(x.dtype)
        return means.unsqueeze(2).expand(n, groups, c // groups).reshape(n, c, 1)

    return average


def _is_recorded() -> bool:
    """Whether the derivative of a backward may be asked for. torch.compile has none of them."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, momentum,
                eps, activation, act_param, group_name, processes, through_host):
        group = (group_name, processes, through_host)
        stats, u = ops.batch_norm_stats(input, pre_bias, pre_add)
        merged = ops.stats_merge(_gather(stats, group))
        has_u = writes_u(pre_bias, pre_add, True)
        x = u if has_u else input
        y, mean, rstd = ops.batch_norm_apply(x, merged, weight, bias, running_mean, running_var, post_add, slope,
                                             momentum, eps, activation, act_param)
        post_add, from_y = _autograd.saved_for_activation(post_add, y, activation, act_param)
        ctx.save_for_backward(x, mean, rstd, merged, weight, bias, pre_bias, post_add, slope)
        ctx.rest = eps, activation, act_param, from_y | FROM_U, group
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(merged)
        return (y, merged, u) if has_u else (y, merged)

    @staticmethod
    def backward(ctx, dy, _, du=None):
        x, mean, rstd, merged, weight, bias, pre_bias, post_add, slope = ctx.saved_tensors
        eps, activation, act_param, bits, group = ctx.rest
        if dy is None:
            dy = torch.zeros_like(x)
        needs = ctx.needs_input_grad
        asks_x = needs[0] or needs[5] or needs[6]
        through = needs[7] and activation != 0
        of_bias = WANT_PRE_BIAS if needs[5] else 0
        of_slope = WANT_SLOPE if needs[8] else 0
        if _is_recorded():
            moments = _autograd._moments_of(_batch_average(merged[:, 0], group), eps)
            dx, dweight, dbias, _, _, dpost_add, dpre_bias, dslope = _autograd._composite(
                dy, du, x, weight, bias, None, None, pre_bias, post_add, slope, activation, act_param, moments,
                bits | of_bias)
            return _BatchNorm._of_inputs(needs, dx, dweight, dbias, dpre_bias, dpost_add if through else dy, dslope)
        sums, dpost_add, dslope = ops.batch_norm_backward_sums(
            dy, x, mean, rstd, weight, bias, post_add, slope, activation, act_param,
            (WANT_POST_ADD if through else 0) | of_slope | bits)
        dx = dweight = dbias = dpre_bias = None
        wanted = WANT_WEIGHT * (weight is not None and needs[1]) + WANT_BIAS * (bias is not None and needs[2])
        if wanted:
            _, dweight, dbias, _ = ops.batch_norm_backward_apply(dy, None, x, mean, rstd, sums, weight, bias, None,
                                                                 post_add, slope, _SET_VALUES, activation, act_param,
                                                                 wanted | bits)
        if asks_x:
            shared = _per_value(ops.sums_merge(_gather(sums, group)), merged[:, :1])
            dx, _, _, dpre_bias = ops.batch_norm_backward_apply(dy, du, x, mean, rstd, shared, weight, bias, pre_bias,
                                                                post_add, slope, _SET_VALUES, activation, act_param,
                                                                WANT_X | of_bias | bits)
        return _BatchNorm._of_inputs(needs, dx, dweight, dbias, dpre_bias, dpost_add if through else dy, dslope)

    @staticmethod
    def _of_inputs(needs, dx, dweight, dbias, dpre_bias, dpost_add, dslope):
        return (dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None, None, None,
                dpre_bias if needs[5] else None, dx if needs[6] else None, dpost_add if needs[7] else None,
                dslope if needs[8] else None, *(None,) * 7)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps, activation,
                act_param, group_name, processes, through_host):
        group = (group_name, processes, through_host)
        stats, u = ops.group_norm_stats(input, pre_bias, pre_add, groups)
        merged = ops.stats_merge(_gather(stats, group))
        has_u = writes_u(pre_bias, pre_add, True)
        x = u if has_u else input
        y, mean, rstd = ops.group_norm_apply(x, merged, weight, bias, scale, shift, post_add, slope, groups, eps,
                                             activation, act_param)
        post_add, from_y = _autograd.saved_for_activation(post_add, y, activation, act_param)
        ctx.save_for_backward(x, mean, rstd, merged, weight, bias, scale, shift, pre_bias, post_add, slope)
        ctx.rest = groups, eps, activation, act_param, from_y | FROM_U, group
        ctx.set_materialize_grads(False)
        return (y, u) if has_u else y

    @staticmethod
    def backward(ctx, dy, du=None):
        x, mean, rstd, merged, weight, bias, scale, shift, pre_bias, post_add, slope = ctx.saved_tensors
        groups, eps, activation, act_param, bits, group = ctx.rest
        if dy is None:
            dy = torch.zeros_like(x)
        needs = ctx.needs_input_grad
        asks_x = needs[0] or needs[5] or needs[6]
        through = needs[7] and activation != 0
        of_bias = WANT_PRE_BIAS if needs[5] else 0
        of_slope = WANT_SLOPE if needs[8] else 0
        if _is_recorded():
            moments = _autograd._moments_of(_group_average(merged[:, :, 0], group), eps)
            *gradients, dpost_add, dpre_bias, dslope = _autograd._composite(
                dy, du, x, weight, bias, scale, shift, pre_bias, post_add, slope, activation, act_param, moments,
                bits | of_bias)
            return _GroupNorm._of_inputs(needs, *gradients, dpre_bias, dpost_add if through else dy, dslope)
        sums, dpost_add, dslope = ops.group_norm_backward_sums(
            dy, x, mean, rstd, weight, bias, scale, shift, post_add, slope, groups, activation, act_param,
            (WANT_POST_ADD if through else 0) | of_slope | bits)
        dx = dweight = dbias = dscale = dshift = dpre_bias = None
        wanted = (WANT_WEIGHT * (weight is not None and needs[1]) + WANT_BIAS * (bias is not None and needs[2])
                  + WANT_SCALE * (scale is not None and needs[3]) + WANT_SHIFT * (shift is not None and needs[4]))
        if wanted:
            _, dweight, dbias, dscale, dshift, _ = ops.group_norm_backward_apply(
                dy, None, x, mean, rstd, sums, weight, bias, scale, shift, None, post_add, slope, groups,
                _SET_VALUES, activation, act_param, wanted | bits)
        if asks_x:
            counts = merged[:, :, :1].repeat_interleave(x.shape[1] // groups, 1)
            shared = _per_value(ops.sums_merge(_gather(sums, group)), counts)
            dx, _, _, _, _, dpre_bias = ops.group_norm_backward_apply(
                dy, du, x, mean, rstd, shared, weight, bias, scale, shift, pre_bias, post_add, slope, groups,
                _SET_VALUES, activation, act_param, WANT_X | of_bias | bits)
        return _GroupNorm._of_inputs(needs, dx, dweight, dbias, dscale, dshift, dpre_bias, dpost_add if through else dy,
                                     dslope)

    @staticmethod
    def _of_inputs(needs, dx, dweight, dbias, dscale, dshift, dpre_bias, dpost_add, dslope):
        return (dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None,
                dscale if needs[3] else None, dshift if needs[4] else None, dpre_bias if needs[5] else None,
                dx if needs[6] else None, dpost_add if needs[7] else None, dslope if needs[8] else None, *(None,) * 7)


def batch_norm(input: Tensor, running_mean: Optional[Tensor], running_var: Optional[Tensor],
               weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, momentum: float = 0.1,
               eps: float = 1e-5, *, batches_tracked: Optional[Tensor] = None, process_group: Optional[Any] = None,
               activation: Optional[str] = None, act_param: Optional[float] = None, slope: Optional[Tensor] = None,
               pre_bias: Optional[Tensor] = None, pre_add: Optional[Tensor] = None, return_sum: bool = False,
               post_add: Optional[Tensor] = None) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Training batch norm with the statistics of the batches of all processes.

    input: [N, C, ...], this process's batch; N may be 0. C is the same in all processes.
    running_mean, running_var: [C], both or neither; updated in place, to the same bits in all processes.
    momentum: the new statistics' weight. batches_tracked: a tensor, how many batches there were with this one: the
        running statistics become the average over all of them, and momentum is not used. It is not read by the host.
    process_group: None for all processes.
    The others, and what is returned, as of normfuse.torch.batch_norm. Gradients of weight, bias, slope and
    pre_bias are those of this process's batch.
    """
    if not spans_processes(process_group) and batches_tracked is None:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps,
                                     activation=activation, act_param=act_param, slope=slope, pre_bias=pre_bias,
                                     pre_add=pre_add, return_sum=return_sum, post_add=post_add)
    if eps <= 0.0:
        raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
    if (running_mean is None) != (running_var is None):
        raise RuntimeError("Expected running_mean and running_var to be both given, or both None")
    number, parameter = functional._activation(activation, act_param)
    input, pre_bias, pre_add, post_add = _fitted(input, pre_bias, pre_add, post_add, return_sum)
    _checks.batch_norm("batch_norm", input, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add)
    _checks.slope(input, slope, activation)
    cumulative = batches_tracked is not None and running_mean is not None
    output = _BatchNorm.apply(input, weight, bias, None if cumulative else running_mean,
                              None if cumulative else running_var, pre_bias, pre_add, post_add, slope, momentum, eps,
                              number, parameter, *_named(process_group, input))
    if cumulative:
        _average(running_mean, running_var, output[1], batches_tracked)
    return (output[0], output[2]) if return_sum else output[0]


@torch.no_grad()
def _average(running_mean: Tensor, running_var: Tensor, stats: Tensor, batches: Tensor) -> None:
    count, mean, m2 = stats.unbind(1)
    factor = 1.0 / batches.double()
    for running, new in ((running_mean, mean), (running_var, m2 / (count - 1.0))):
        running.copy_(running.double() * (1.0 - factor) + new * factor)


def group_norm(input: Tensor, num_groups: int, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None,
               eps: float = 1e-5, *, sharded_dim: int, process_group: Optional[Any] = None,
               activation: Optional[str] = None, act_param: Optional[float] = None, slope: Optional[Tensor] = None,
               pre_bias: Optional[Tensor] = None, pre_add: Optional[Tensor] = None, return_sum: bool = False,
               post_add: Optional[Tensor] = None, scale: Optional[Tensor] = None,
               shift: Optional[Tensor] = None) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Group norm of images that the processes hold in strips.

    input: [N, C, ...], this process's strip of the N images; its size along sharded_dim may be 0 and may differ from
        the other processes', the other sizes may not.
    sharded_dim: the axis that is cut, a spatial one (2 or more, or negative).
    process_group: None for all processes.
    The others, and what is returned, as of normfuse.torch.group_norm. Gradients of weight, bias, scale, shift,
    slope and pre_bias are those of this process's strips: their sum over the processes is the whole.
    """
    axis = sharded_dim if sharded_dim >= 0 else sharded_dim + input.dim()
    if not 2 <= axis < input.dim():
        raise IndexError(f"sharded_dim must be a spatial axis of the input, but got {sharded_dim} for input of shape "
                         f"{list(input.shape)}")
    if not spans_processes(process_group):
        return functional.group_norm(input, num_groups, weight, bias, eps, activation=activation, act_param=act_param,
                                     slope=slope, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum,
                                     post_add=post_add, scale=scale, shift=shift)
    number, parameter = functional._activation(activation, act_param)
    input, pre_bias, pre_add, post_add = _fitted(input, pre_bias, pre_add, post_add, return_sum)
    scale, shift = functional._per_sample(scale), functional._per_sample(shift)
    _checks.group_norm(input, weight, bias, scale, shift, pre_bias, pre_add, post_add, num_groups)
    _checks.slope(input, slope, activation)
    output = _GroupNorm.apply(input, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, num_groups, eps,
                              number, parameter, *_named(process_group, input))
    return output if return_sum or not writes_u(pre_bias, pre_add, True) else output[0]


def _fitted(input: Tensor, pre_bias: Optional[Tensor], pre_add: Optional[Tensor], post_add: Optional[Tensor],
            return_sum: bool) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    if functional._autocast_to_float32:
        input = functional._under_autocast(input)
    pre_add, post_add = functional._additions(input, pre_bias, pre_add, return_sum, post_add)
    return input, functional._per_sample(pre_bias), pre_add, post_add

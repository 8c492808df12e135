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

import types
import weakref
from typing import Any, Callable, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from . import _autograd, _checks, functional
from ._operators import (FROM_U, WANT_POST_ADD, WANT_PRE_BIAS, WANT_SCALE, WANT_SHIFT, WANT_SLOPE, WANT_X, ops,
                         straight, writes_u)

__all__ = ["batch_norm", "group_norm", "spans_processes"]


_is_compiling = torch.compiler.is_compiling
_ProcessGroup = dist.ProcessGroup if dist.is_available() else None
# The function behind torch.distributed.all_gather_single; before PyTorch 2.13 it had another name.
_all_gather = getattr(_ProcessGroup, "all_gather_single", None) or getattr(_ProcessGroup, "_allgather_base", None)
_ON_THIS_STREAM = torch._C._distributed_c10d.AllgatherOptions() if dist.is_available() else None
if _ON_THIS_STREAM is not None:
    _ON_THIS_STREAM.asyncOp = False

# A group, as a gather needs to know it: itself, its processes, and whether its parts go through host memory. Under
# torch.compile, and of gloo, its name, for the functional collectives: gloo's threads hold the parts a while longer,
# and end a process with an error whose Python ends meanwhile, which was seen where the group itself was asked.
_Group = tuple[Any, int, bool]
_ALONE = None, 1, False
# By group and type of device, how many processes it has and whether gloo gathers there: asked at each call, that took
# 50 us of a forward over NCCL, in a profile.
_known_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _is_watched() -> bool:
    """True if a mode of torch's looks on, which may want collectives that it can follow: fake tensors, traces."""
    return not functional._is_plain_eager() or torch._C._len_torch_dispatch_stack() > 0


_PARTS = ("stats", "apply", "backward_sums", "backward_apply")
# The operators of shards past torch.ops, see straight.
_straight = types.SimpleNamespace(**{name: straight(name) for name in (
    *(f"{lean}batch_norm_{part}" for lean in ("", "lean_") for part in _PARTS),
    *(f"group_norm_{part}" for part in _PARTS))})


def _calls(x: Tensor) -> Any:
    return ops if type(x) is not Tensor or _is_watched() else _straight


def _gather(part: Tensor, group: _Group) -> Tensor:
    """[processes * n, ...] of parts [n, ...]: those of all processes, in rank order."""
    of, processes, through_host = group
    if processes == 1:
        return part
    sent = part.cpu() if through_host else part
    if isinstance(of, str) or _calls(sent) is ops:
        name = of if isinstance(of, str) else of.group_name
        gathered = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(sent, processes, name))
    else:
        gathered = _gather_straight(sent, group)
    return gathered.to(part.device) if through_host else gathered


def _gather_straight(part: Tensor, group: _Group) -> Tensor:
    """By the group itself: the functional collectives are two operators with kernels in Python, and a stream of their
    own. Where NCCL gathers on this stream there is nothing to wait for, and no work is returned."""
    gathered = part.new_empty((group[1] * part.shape[0], *part.shape[1:]))
    work = _all_gather(group[0], gathered, part, _ON_THIS_STREAM)
    if work is not None:
        work.wait()
    return gathered


def _goes_through_host(group_name: str, device: str) -> bool:
    """Gloo reads the parts of this gather as host memory, whatever device they are on, and the process is gone:
    https://github.com/pytorch/pytorch/issues/152645"""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    return group._get_backend(torch.device(device)).name() == "gloo"


# The effect of torch.compiler.assume_constant_result. That itself loads torch._dynamo, and with it
# torch.distributed.nn, whose functions keep the group that is there meanwhile: destroy_process_group then leaves gloo's
# threads, and one that still holds a tensor when Python ends aborts the process. It takes a second, too.
_goes_through_host._dynamo_marked_constant = True


def spans_processes(process_group: Optional[Any] = None) -> bool:
    """True if the group (None: all processes) is more than this process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


def spanned(process_group: Optional[Any], input: Tensor) -> Optional[_Group]:
    """`process_group` (None: all processes), where it is more than this process; else None."""
    world = None if _ProcessGroup is None else dist.group.WORLD  # None: there are no groups
    if world is None:
        return None
    group = world if process_group is None else process_group
    if _is_compiling():
        processes = dist.get_world_size(group)
        if processes < 2:
            return None
        name = group.group_name
        return name, processes, input.device.type != "cpu" and _goes_through_host(name, input.device.type)
    if not isinstance(group, _ProcessGroup):  # this process is none of it
        return None
    device = input.device.type
    known = _known_groups.get(group)
    if known is None:
        known = _known_groups[group] = {}
    if device not in known:
        processes = group.size()
        known[device] = processes, processes > 1 and group._get_backend(input.device).name() == "gloo"
    processes, through_gloo = known[device]
    if processes < 2:
        return None
    return (group.group_name, processes, device != "cpu") if through_gloo else (group, processes, False)


class _SumOverProcesses(torch.autograd.Function):
    """Added in rank order. All processes use the sum, so each of them has a part of its gradient."""

    @staticmethod
    def forward(ctx, part, *group):
        ctx.group = group
        return _gather(part.contiguous(), group).view(group[1], *part.shape).sum(0)

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
    """True if the derivative of a backward may be asked for. torch.compile has none of them."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _BatchNorm(torch.autograd.Function):
    """(x, weight, bias, pre_bias, pre_add, post_add, slope, others) -> y, and u where it is written. In `others` are
    running_mean, running_var, batches_tracked (of a cumulative average), momentum, eps, activation, act_param and the
    group."""

    @staticmethod
    def forward(ctx, input, weight, bias, pre_bias, pre_add, post_add, slope, others):
        running_mean, running_var, batches, momentum, eps, activation, act_param, group = others
        calls = _calls(input)
        stats, u = calls.batch_norm_stats(input, pre_bias, pre_add)
        has_u = writes_u(pre_bias, pre_add, True)
        x = u if has_u else input
        running = (running_mean, running_var) if batches is None else (None, None)
        y, mean, rstd, merged = calls.batch_norm_apply(x, _gather(stats, group), weight, bias, *running, post_add,
                                                       slope, momentum, eps, activation, act_param)
        if batches is not None:
            _average(running_mean, running_var, merged, batches)
        post_add, from_y = _autograd.saved_for_activation(post_add, y, activation, act_param)
        ctx.save_for_backward(x, mean, rstd, weight, bias, pre_bias, post_add, slope)
        ctx.merged = merged  # for its counts, which hooks on saved tensors that round would change
        ctx.rest = eps, activation, act_param, from_y | FROM_U, group
        if has_u:
            ctx.set_materialize_grads(False)
            return y, u
        return y

    @staticmethod
    def backward(ctx, dy, du=None):
        x, mean, rstd, weight, bias, pre_bias, post_add, slope = ctx.saved_tensors
        merged = ctx.merged
        eps, activation, act_param, bits, group = ctx.rest
        if dy is None:
            dy = torch.zeros_like(x)
        (x_needs, weight_needs, bias_needs, pre_bias_needs, pre_add_needs, post_add_needs, slope_needs,
         _) = ctx.needs_input_grad
        through = post_add_needs and activation != 0
        if pre_bias_needs:
            bits |= WANT_PRE_BIAS
        if _is_recorded():
            moments = _autograd._moments_of(_batch_average(merged[:, 0], group), eps)
            dx, dweight, dbias, _, _, dpost_add, dpre_bias, dslope = _autograd._composite(
                dy, du, x, weight, bias, None, None, pre_bias, post_add, slope, activation, act_param, moments,
                bits)
        else:
            calls = _calls(dy)
            sums, dpost_add, dslope = calls.batch_norm_backward_sums(
                dy, x, mean, rstd, weight, bias, post_add, slope, activation, act_param,
                bits | (WANT_POST_ADD if through else 0) | (WANT_SLOPE if slope_needs else 0))
            wanted = _autograd._wanted(x_needs, weight_needs, bias_needs, pre_bias_needs, pre_add_needs, False)
            dx, dweight, dbias, dpre_bias = calls.batch_norm_backward_apply(
                dy, du, x, mean, rstd, sums, _gather(sums, group) if wanted & WANT_X else sums, merged, weight, bias,
                pre_bias, post_add, slope, activation, act_param, wanted | bits)
        return (dx if x_needs else None, dweight if weight_needs else None, dbias if bias_needs else None,
                dpre_bias if pre_bias_needs else None, dx if pre_add_needs else None,
                (dpost_add if through else dy) if post_add_needs else None, dslope if slope_needs else None, None)


class _GroupNorm(torch.autograd.Function):
    """(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, others) -> y, and u where it is written. In
    `others` are the number of groups, eps, activation, act_param and the group of processes."""

    @staticmethod
    def forward(ctx, input, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, others):
        groups, eps, activation, act_param, group = others
        calls = _calls(input)
        stats, u = calls.group_norm_stats(input, pre_bias, pre_add, groups)
        has_u = writes_u(pre_bias, pre_add, True)
        x = u if has_u else input
        y, mean, rstd, merged = calls.group_norm_apply(x, _gather(stats, group), weight, bias, scale, shift, post_add,
                                                       slope, groups, eps, activation, act_param)
        post_add, from_y = _autograd.saved_for_activation(post_add, y, activation, act_param)
        ctx.save_for_backward(x, mean, rstd, weight, bias, scale, shift, pre_bias, post_add, slope)
        ctx.merged = merged
        ctx.rest = groups, eps, activation, act_param, from_y | FROM_U, group
        if has_u:
            ctx.set_materialize_grads(False)
            return y, u
        return y

    @staticmethod
    def backward(ctx, dy, du=None):
        x, mean, rstd, weight, bias, scale, shift, pre_bias, post_add, slope = ctx.saved_tensors
        merged = ctx.merged
        groups, eps, activation, act_param, bits, group = ctx.rest
        if dy is None:
            dy = torch.zeros_like(x)
        (x_needs, weight_needs, bias_needs, scale_needs, shift_needs, pre_bias_needs, pre_add_needs, post_add_needs,
         slope_needs, _) = ctx.needs_input_grad
        through = post_add_needs and activation != 0
        if pre_bias_needs:
            bits |= WANT_PRE_BIAS
        if _is_recorded():
            moments = _autograd._moments_of(_group_average(merged[:, :, 0], group), eps)
            dx, dweight, dbias, dscale, dshift, dpost_add, dpre_bias, dslope = _autograd._composite(
                dy, du, x, weight, bias, scale, shift, pre_bias, post_add, slope, activation, act_param, moments,
                bits)
        else:
            calls = _calls(dy)
            sums, dpost_add, dslope = calls.group_norm_backward_sums(
                dy, x, mean, rstd, weight, bias, scale, shift, post_add, slope, groups, activation, act_param,
                bits | (WANT_POST_ADD if through else 0) | (WANT_SLOPE if slope_needs else 0))
            wanted = _autograd._wanted(x_needs, weight_needs, bias_needs, pre_bias_needs, pre_add_needs, False) | \
                (WANT_SCALE if scale_needs else 0) | (WANT_SHIFT if shift_needs else 0)
            dx, dweight, dbias, dscale, dshift, dpre_bias = calls.group_norm_backward_apply(
                dy, du, x, mean, rstd, sums, _gather(sums, group) if wanted & WANT_X else sums, merged, weight, bias,
                scale, shift, pre_bias, post_add, slope, groups, activation, act_param, wanted | bits)
        return (dx if x_needs else None, dweight if weight_needs else None, dbias if bias_needs else None,
                dscale if scale_needs else None, dshift if shift_needs else None,
                dpre_bias if pre_bias_needs else None, dx if pre_add_needs else None,
                (dpost_add if through else dy) if post_add_needs else None, dslope if slope_needs else None, None)


class _LeanBatchNorm(torch.autograd.Function):
    """_BatchNorm of (x, weight, bias, others) in calls that nobody looks on, without additions, of which everything is
    given. In `others` are running_mean, running_var, momentum, eps, activation, act_param and the group."""

    @staticmethod
    def forward(ctx, x, weight, bias, others):
        y, mean, rstd, stats = _straight.lean_batch_norm_apply(
            x, _gather(_straight.lean_batch_norm_stats(x), others[6]), weight, bias, *others[:6])
        ctx.to_save = x, mean, rstd, weight, bias
        ctx.stats = stats
        ctx.others = others
        return y

    @staticmethod
    def backward(ctx, dy):
        x, mean, rstd, weight, bias = ctx.saved_tensors
        stats = ctx.stats
        _, _, _, eps, activation, act_param, group = ctx.others
        wanted = _autograd._WANTED[ctx.needs_input_grad]
        if _is_recorded():
            moments = _autograd._moments_of(_batch_average(stats[:, 0], group), eps)
            gradients = _autograd._composite(dy, None, x, weight, bias, None, None, None, None, None, activation,
                                             act_param, moments)[:3]
        else:
            calls = _calls(dy)
            sums = calls.lean_batch_norm_backward_sums(dy, x, mean, rstd, weight, bias, activation, act_param)
            gradients = calls.lean_batch_norm_backward_apply(
                dy, x, mean, rstd, sums, _gather(sums, group) if wanted & WANT_X else sums, stats, weight, bias,
                activation, act_param, wanted)
        return (*gradients, None) if wanted == _autograd._WANT_ALL else _autograd._only(wanted, *gradients)


def _apply(function: Any, input: Tensor, *others: Any) -> Any:
    """function.apply; in eager calls that nobody looks on without its search for a setup_context, see
    _autograd._straight."""
    if _calls(input) is ops:
        return function.apply(input, *others)
    return function.straight_apply(*(_unwrap_if_dead(value) if isinstance(value, Tensor) else value
                                     for value in (input, *others)))


_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
for _function in (_BatchNorm, _LeanBatchNorm, _GroupNorm):
    _function.straight_apply = super(torch.autograd.Function, _function).apply
    _function._backward_cls.apply = _function.backward  # without the search for a vjp
_straight_lean_batch_norm = _LeanBatchNorm.straight_apply


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
    group = spanned(process_group, input)
    if group is None and batches_tracked is None:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps,
                                     activation=activation, act_param=act_param, slope=slope, pre_bias=pre_bias,
                                     pre_add=pre_add, return_sum=return_sum, post_add=post_add)
    return batch_norm_over(group or _ALONE, input, running_mean, running_var, weight, bias, momentum, eps,
                           batches_tracked,
                            activation, act_param, slope, pre_bias, pre_add, return_sum, post_add)


def batch_norm_over(group: _Group, input: Tensor, running_mean: Optional[Tensor], running_var: Optional[Tensor],
                    weight: Optional[Tensor], bias: Optional[Tensor], momentum: float, eps: float,
                    batches_tracked: Optional[Tensor], activation: Optional[str], act_param: Optional[float],
                    slope: Optional[Tensor], pre_bias: Optional[Tensor], pre_add: Optional[Tensor], return_sum: bool,
                    post_add: Optional[Tensor]) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """batch_norm over more than this process."""
    if eps <= 0.0:
        raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
    if (running_mean is None) != (running_var is None):
        raise RuntimeError("Expected running_mean and running_var to be both given, or both None")
    number, parameter = (functional._NUMBERS[None] if activation is None is act_param
                         else functional._activation(activation, act_param))
    if (slope is pre_bias is pre_add is post_add is batches_tracked is None and activation != "prelu"
            and not return_sum and not functional._autocast_to_float32 and weight is not None and bias is not None
            and running_mean is not None and _calls(input) is _straight
            and input.shape[1:2] == weight.shape == bias.shape == running_mean.shape == running_var.shape):
        return _straight_lean_batch_norm(_unwrap_if_dead(input), _unwrap_if_dead(weight), _unwrap_if_dead(bias), (
            running_mean, running_var, momentum, eps, number, parameter, group))
    input, pre_bias, pre_add, post_add = _fitted(input, pre_bias, pre_add, post_add, return_sum)
    _checks.batch_norm("batch_norm", input, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add)
    _checks.slope(input, slope, activation)
    output = _apply(_BatchNorm, input, weight, bias, pre_bias, pre_add, post_add, slope, (
        running_mean, running_var, None if running_mean is None else batches_tracked, momentum, eps, number, parameter,
        group))
    return output if return_sum or not writes_u(pre_bias, pre_add, True) else output[0]


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
    group = spanned(process_group, input)
    if group is None:
        return functional.group_norm(input, num_groups, weight, bias, eps, activation=activation, act_param=act_param,
                                     slope=slope, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum,
                                     post_add=post_add, scale=scale, shift=shift)
    number, parameter = functional._activation(activation, act_param)
    input, pre_bias, pre_add, post_add = _fitted(input, pre_bias, pre_add, post_add, return_sum)
    scale, shift = functional._per_sample(scale), functional._per_sample(shift)
    _checks.group_norm(input, weight, bias, scale, shift, pre_bias, pre_add, post_add, num_groups)
    _checks.slope(input, slope, activation)
    output = _apply(_GroupNorm, input, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, (
        num_groups, eps, number, parameter, group))
    return output if return_sum or not writes_u(pre_bias, pre_add, True) else output[0]


def _fitted(input: Tensor, pre_bias: Optional[Tensor], pre_add: Optional[Tensor], post_add: Optional[Tensor],
            return_sum: bool) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    if functional._autocast_to_float32:
        input = functional._under_autocast(input)
    pre_add, post_add = functional._additions(input, pre_bias, pre_add, return_sum, post_add)
    return input, functional._per_sample(pre_bias), pre_add, post_add

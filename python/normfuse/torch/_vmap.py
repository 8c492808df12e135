# SPDX-License-Identifier: MIT
"""torch.func.vmap of the operators: where the mapped axis can join the samples, one call; elsewhere one for each slice.

Samples share nothing in group norm, channel norm, channel affine and evaluating batch norm, so N samples of B slices
are B*N samples.
The axis stays where it is when it is the first or the second, which needs no copy; from elsewhere it becomes the first.
What else has x's shape and is not mapped is repeated. Slices are called one by one where x is not mapped; where
parameters are, but channel affine's scale and bias, which may be those of a sample; in training batch norm; and in
backwards, which are mapped by torch.autograd.grad(is_grads_batched=True) alone: torch.func's transformations have
formulas in their place.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _operators
from ._operators import ops

_Results = Tuple[Any, Any]  # and the axes along which they are mapped


def _slices(op: Callable[..., Any], size: int, in_dims: Sequence[Optional[int]], args: Sequence[Any]) -> _Results:
    """One call for each slice."""
    results = [op(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims)))
               for i in range(size)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])


class _Samples:
    """The mapped axis and the samples as one: `axis` (0 or 1) is where the mapped one comes out."""

    def __init__(self, size: int, x: Tensor, dim: int) -> None:
        self.size, self.axis = size, dim if dim in (0, 1) else 0
        self.samples = x.movedim(dim, self.axis).shape[1 - self.axis]

    def join(self, tensor: Optional[Tensor], dim: Optional[int]) -> Optional[Tensor]:
        """[N, ...] with or without the mapped axis: [B * N, ...]."""
        if tensor is None:
            return None
        if dim is None:
            tensor = tensor.unsqueeze(self.axis)
            sizes = list(tensor.shape)
            sizes[self.axis] = self.size
            tensor = tensor.expand(sizes)
        else:
            tensor = tensor.movedim(dim, self.axis)
        return tensor.flatten(0, 1)

    def of_samples(self, parameter: Optional[Tensor], dim: Optional[int]) -> Optional[Tensor]:
        """A parameter of channels or of samples and channels: [B * N, C]."""
        if parameter is None:
            return None
        if parameter.dim() - (dim is not None) == 1:
            parameter = (parameter if dim is None else parameter.movedim(dim, 0).unsqueeze(1 - self.axis))
            shape = (self.size, self.samples) if self.axis == 0 else (self.samples, self.size)
            return parameter.expand(*shape, parameter.shape[-1]).flatten(0, 1)
        return self.join(parameter, dim)

    def bias_before(self, pre_bias: Optional[Tensor], dim: Optional[int]) -> Optional[Tensor]:
        """[C] where all share it, or else [B * N, C]."""
        return pre_bias if pre_bias is None or dim is None and pre_bias.dim() == 1 else self.of_samples(pre_bias, dim)

    def split(self, joined: Tensor) -> Tensor:
        shape = (self.size, self.samples) if self.axis == 0 else (self.samples, self.size)
        return joined.unflatten(0, shape)

    def results(self, results: Any) -> _Results:
        """Outputs that were not asked for have no elements and one axis, and are the same for every slice."""
        if isinstance(results, Tensor):
            return self.split(results), self.axis
        there = [result.dim() > 1 for result in results]
        return (tuple(self.split(r) if is_there else r for r, is_there in zip(results, there)),
                tuple(self.axis if is_there else None for is_there in there))


def _group_norm(op):
    def rule(info, in_dims, *args):
        if in_dims[0] is None or any(in_dims[i] is not None for i in (1, 2, 8)):
            return _slices(op, info.batch_size, in_dims, args)
        samples = _Samples(info.batch_size, args[0], in_dims[0])
        x, weight, bias, scale, shift, pre_bias, pre_add, post_add, *rest = args
        scale, shift, pre_add, post_add = (samples.join(arg, dim) for arg, dim in (
            (scale, in_dims[3]), (shift, in_dims[4]), (pre_add, in_dims[6]), (post_add, in_dims[7])))
        return samples.results(op(samples.join(x, in_dims[0]), weight, bias, scale, shift,
                                  samples.bias_before(pre_bias, in_dims[5]), pre_add, post_add, *rest))

    return rule


def _channel_affine(op):
    def rule(info, in_dims, *args):
        if in_dims[0] is None or in_dims[4] is not None:
            return _slices(op, info.batch_size, in_dims, args)
        samples = _Samples(info.batch_size, args[0], in_dims[0])
        x, scale, bias, post_add, *rest = args
        if any(dim is not None or (p is not None and p.dim() == 2) for p, dim in zip((scale, bias), in_dims[1:3])):
            scale, bias = samples.of_samples(scale, in_dims[1]), samples.of_samples(bias, in_dims[2])
        return samples.results(op(samples.join(x, in_dims[0]), scale, bias, samples.join(post_add, in_dims[3]), *rest))

    return rule


def _evaluating_batch_norm(op):
    def rule(info, in_dims, *args):
        if in_dims[0] is None or any(in_dims[i] is not None for i in (1, 2, 3, 4, 8)):
            return _slices(op, info.batch_size, in_dims, args)
        samples = _Samples(info.batch_size, args[0], in_dims[0])
        return samples.results(op(samples.join(args[0], in_dims[0]), *args[1:5],
                                  samples.bias_before(args[5], in_dims[5]), samples.join(args[6], in_dims[6]),
                                  samples.join(args[7], in_dims[7]), *args[8:]))

    return rule


def _training(op):
    def rule(info, in_dims, *args):
        if any(args[i] is not None and in_dims[i] is None for i in (3, 4)):
            raise RuntimeError("vmap: the input is mapped and the running statistics, which are updated in place, are "
                               "not: map them too, or call without them (track_running_stats=False)")
        return _slices(op, info.batch_size, in_dims, args)

    return rule


def _each_slice(op):
    return lambda info, in_dims, *args: _slices(op, info.batch_size, in_dims, args)


_RULES = {"group_norm": _group_norm, "group_norm_inference": _group_norm, "channel_norm": _group_norm,
          "channel_norm_inference": _group_norm, "channel_affine": _channel_affine,
          "batch_norm_evaluate": _evaluating_batch_norm, "batch_norm_inference": _evaluating_batch_norm,
          "instance_norm": _training, "batch_norm": _training}

for _name in (*_operators.SCHEMAS, *_operators.UNANNOTATED):
    _rule = _RULES.get(_name.removesuffix("_unannotated"), _each_slice if _name.endswith("_backward") else None)
    if _rule is not None:
        torch.library.register_vmap(_operators.qualified(_name), _rule(getattr(ops, _name).default),
                                    lib=_operators._library)

# SPDX-License-Identifier: MIT
"""How the operators run on DTensors: which of their tensors may be cut along a mesh axis, and what that makes of the
results.

Group norm and channel norm are cut along the samples, training batch norm along the channels; evaluation and channel
affine along any axis, each value being on its own. Other inputs are redistributed, to whole tensors at worst: DTensor
picks what moves the fewest bytes. A gradient that a cut leaves to be summed is Partial. Running statistics are updated
where they lie, so they are never redistributed: training with whole ones is training on the whole batch, as it is with
stock's.

torch.distributed.tensor takes a while to import. So strategies are registered when a DTensor may first be there, not
before.
"""
from __future__ import annotations

import sys
from typing import Any, Callable, Optional

import torch

from ._operators import (MEAN_SQUARE, OUTPUT_NAMES, UNANNOTATED, WANT_BIAS, WANT_POST_ADD, WANT_PRE_BIAS, WANT_SCALE,
                         WANT_SHIFT, WANT_SLOPE, WANT_WEIGHT, WANT_X, ops, writes_u)

_WANTED = {"dx": WANT_X, "dweight": WANT_WEIGHT, "dbias": WANT_BIAS, "dscale": WANT_SCALE, "dshift": WANT_SHIFT,
           "dpost_add": WANT_POST_ADD, "dpre_bias": WANT_PRE_BIAS, "dslope": WANT_SLOPE}
_BIG = {"x", "u", "y", "dy", "du", "dx", "pre_add", "post_add", "dpost_add"}
_SAMPLES, _CHANNELS = 0, 1  # the axes of [N, C, spatial...]

# Operators by what may be cut: the lean ones, too.
_OF_SAMPLES = ("group_norm", "group_norm_inference", "group_norm_backward", "lean_group_norm",
               "lean_group_norm_inference", "lean_group_norm_backward", "instance_norm", "instance_norm_unannotated",
               "channel_norm", "channel_norm_inference", "channel_norm_backward")
_OF_CHANNELS = ("batch_norm", "batch_norm_backward", "lean_batch_norm", "lean_batch_norm_add",
                "lean_batch_norm_forward_only", "lean_batch_norm_backward", "lean_batch_norm_add_backward",
                "batch_norm_unannotated")
_OF_VALUES = ("batch_norm_evaluate", "batch_norm_inference", "batch_norm_evaluate_backward",
              "lean_batch_norm_inference", "lean_batch_norm_evaluate_backward", "channel_affine",
              "channel_affine_backward")


def _is_asked(name: str, given: dict[str, Any]) -> bool:
    """True if an output has the shape that its name says, and is not a tensor of no elements."""
    if name == "u":
        return writes_u(given.get("pre_bias"), given.get("pre_add"), given.get("return_sum", True))
    if name == "mean":
        return given.get("statistics") != MEAN_SQUARE
    if name not in _WANTED:
        return True
    return bool(given.get("wanted", WANT_X | WANT_WEIGHT | WANT_BIAS) & _WANTED[name]) and (
        name == "dx" or given.get(name[1:]) is not None)


class _Cut:
    """The placements of everything where x is cut along one of its axes, or is whole (None)."""

    def __init__(self, axis: Optional[int], x: Any, of_batch: bool) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard
        self.axis, self.channels, self.of_batch = axis, x.shape[_CHANNELS], of_batch
        self.whole, self.to_sum, self.cut_along = Replicate(), Partial(), Shard

    def of_input(self, name: str, tensor: Any) -> Any:
        if tensor is None or not hasattr(tensor, "placements"):
            return None  # not given, or a number
        return self.of_tensor(name, tensor.ndim, tensor.shape)

    def of_tensor(self, name: str, axes: int, shape: Any) -> Any:
        """Big tensors, statistics and parameters: of [C], [N, C] or, statistics of norms of samples, [N, ...]."""
        if self.axis is None:
            return self.whole
        if name in _BIG:
            return self.cut_along(self.axis)
        if self.axis == _SAMPLES:
            return self.cut_along(0) if axes > 1 else self.whole
        if self.axis == _CHANNELS and shape[-1] == self.channels:
            return self.cut_along(axes - 1)
        return self.whole

    def of_output(self, name: str, given: dict[str, Any]) -> Any:
        if not _is_asked(name, given):
            return self.whole
        if name in ("mean", "rstd"):
            axes = 1 if self.of_batch else 2
            return self.of_tensor(name, axes, (self.channels,) * axes)
        if name in _BIG:
            return self.of_tensor(name, 2, ())
        parameter = given[name[1:]]
        placement = self.of_tensor(name[1:], parameter.ndim, parameter.shape)
        return self.to_sum if self.axis is not None and placement == self.whole else placement


def _running_is_cut(given: dict[str, Any]) -> bool:
    """True if the running statistics that a call updates lie on their processes in parts."""
    from torch.distributed.tensor import Replicate, Shard
    placements = {placement for name in ("running_mean", "running_var") for placement in given[name].placements}
    if placements == {Replicate()}:
        return False
    if placements == {Shard(0)}:
        return True
    raise RuntimeError("running statistics that are DTensors may be replicated or cut along every axis of the mesh, "
                       f"but their placements are {sorted(map(str, placements))}")


def _strategy(name: str) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    arguments = [argument.name for argument in getattr(ops, name).default._schema.arguments]
    updates = name.removeprefix("lean_") in ("batch_norm", "batch_norm_add", "batch_norm_forward_only", "instance_norm",
                                             *UNANNOTATED)

    def strategy(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        given = dict(zip(arguments, args))
        x = given["x" if "x" in given else "u"]
        axes: list[Optional[int]] = [None]
        if updates and given["running_mean"] is not None:
            if not _running_is_cut(given):
                axes = [None]
            elif name in _OF_CHANNELS:
                axes = [_CHANNELS]
            else:
                raise RuntimeError(f"{name} updates running statistics that are cut over the mesh; replicate them")
        elif name in _OF_SAMPLES:
            axes.append(_SAMPLES)
        elif name in _OF_CHANNELS:
            axes.append(_CHANNELS)
        elif name in _OF_VALUES:
            axes.extend(range(x.ndim))
        cuts = [_Cut(axis, x, "batch_norm" in name) for axis in axes]
        parameters = {**given, "weight": given["scale"]} if "affine" in name else given
        return [([cut.of_output(output, parameters) for output in OUTPUT_NAMES[name]],
                 [cut.of_input(argument, value) for argument, value in given.items()]) for cut in cuts]

    return strategy


_is_registered = False


def register() -> None:
    """Registers the strategies where DTensor has been imported, once."""
    global _is_registered
    if _is_registered or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.experimental import register_sharding
    _is_registered = True
    for name in (*_OF_SAMPLES, *_OF_CHANNELS, *_OF_VALUES):
        register_sharding(getattr(ops, name).default)(_strategy(name))


# The mark that torch.compiler.assume_constant_result sets. The function itself imports torch._dynamo, which takes
# seconds, and keeps process groups past their end.
register._dynamo_marked_constant = True

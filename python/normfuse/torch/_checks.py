# SPDX-License-Identifier: MIT
"""The checks of what the layers refuse, with torch's kind of exception and message.

The library checks every argument itself. So that a call that is in order does not pay for checks in Python, the eager
path makes these when a kernel has refused; fake kernels, which no library checks, make them each time.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

_DTYPES = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


def dtype(name: str, **tensors: Optional[Tensor]) -> None:
    for tensor in tensors.values():
        if tensor is not None and tensor.dtype not in _DTYPES:
            raise NotImplementedError(f'"{name}" not implemented for \'{str(tensor.dtype).replace("torch.", "")}\'')


def tensor(name: str, input: Any) -> None:
    """input: what is not exactly a Tensor."""
    if not isinstance(input, Tensor) and not hasattr(input, "__torch_function__"):
        raise TypeError(f"normfuse.torch.{name} takes tensors, but got a {type(input).__name__}: normfuse.{name} takes "
                        "arrays of NumPy and other libraries")


def module(model: Any, name: str) -> None:
    """Refuses what is no module, or has no Python left in it."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"{name} takes no torch.jit.ScriptModule, whose code is compiled: call it before "
                        "torch.jit.script or torch.jit.trace")
    if not isinstance(model, torch.nn.Module):
        parts = [part for part in ("vae", "unet", "transformer")
                 if isinstance(getattr(model, part, None), torch.nn.Module)]
        hint = (f"give it its parts, such as {name}(pipe.{parts[0]})" if parts else
                f"of a pipeline of diffusers it takes a part, such as {name}(pipe.vae)")
        raise TypeError(f"{name} takes a torch.nn.Module, but got a {type(model).__name__}: {hint}")


def dense(*tensors: Optional[Tensor]) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.layout is not torch.strided:
            raise TypeError(f"normfuse takes no tensor of the layout {tensor.layout}: call .to_dense() on it")


def product(sizes) -> int:
    """torch.Size.numel() makes constants of the sizes that torch.export takes as dynamic."""
    result = 1
    for size in sizes:
        result = result * size
    return result


def values_per_channel(size) -> None:
    if size[0] * product(size[2:]) == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")


def values_per_group(input: Tensor, groups: int) -> None:
    if input.dim() >= 2 and input.numel() < 2 * groups:  # or else a group has two values or more
        size = input.shape
        values_per_channel([size[0] * size[1] // groups, groups, *size[2:]])


def dimensions(input: Tensor) -> None:
    if input.dim() < 2:
        raise RuntimeError(f"Expected at least 2 dimensions for input tensor but received {input.dim()}")


def one_device(tensors) -> None:
    devices = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
    if len(devices) > 1:
        raise RuntimeError("Expected all tensors to be on the same device, but found " +
                           " and ".join(sorted(map(str, devices))))


def groups_divide(channels: int, groups: int) -> None:
    if groups <= 0 or channels % groups != 0:
        raise RuntimeError("groups must be greater than 0 and divide the number of channels, but are "
                           f"{groups} of {channels}")


def like_input(input: Tensor, of: Any = None, **others: Optional[Tensor]) -> None:
    """of: their dtype, that of the result, where it is not input's."""
    for name, other in others.items():
        if other is not None and other.shape != input.shape:
            raise RuntimeError(
                f"Expected {name} to have the shape of input, but got {list(other.shape)} and {list(input.shape)}")
        if other is not None and other.dtype != (input.dtype if of is None else of):
            whose, expected = ("input", input.dtype) if of is None else ("the result", of)
            raise RuntimeError(f"Expected {name} to have the dtype of {whose}, but got {other.dtype} and {expected}")


def bias_before(input: Tensor, pre_bias: Optional[Tensor]) -> None:
    # Shapes of one length: to compare others makes torch.export take N and C for unequal.
    if pre_bias is not None and pre_bias.shape != (input.shape[1:2] if pre_bias.dim() == 1 else input.shape[:2]):
        raise RuntimeError(f"Expected pre_bias to be of shape [C] or [N, C], but got {list(pre_bias.shape)} and input "
                           f"of shape {list(input.shape)}")


def elements(channels: int, **parameters: Optional[Tensor]) -> None:
    for name, parameter in parameters.items():
        if parameter is not None and (parameter.numel() != channels or parameter.dim() != 1):
            raise RuntimeError(f"{name} should contain {channels} elements not {parameter.numel()}")


def slope(x, slope, activation: Any) -> None:
    """activation: its name or number."""
    is_prelu = activation in ("prelu", 10)
    if slope is None and is_prelu:
        raise ValueError("slope is None, but required")
    if slope is None:
        return
    if not is_prelu:
        raise ValueError("slope is for prelu alone and must be None")
    if not isinstance(slope, Tensor):
        raise TypeError(f"slope is a {type(slope).__name__}, expected a tensor")
    if slope.dim() != 1:
        raise ValueError(f"slope has {slope.dim()} axes, expected [C]")
    if slope.shape[0] != 1 and slope.shape[0] != x.shape[1]:
        raise ValueError(f"slope has {slope.shape[0]} elements along C, input has {x.shape[1]}")
    dtype("prelu", slope=slope)


def group_norm(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, groups) -> None:
    dense(x, weight, bias, scale, shift, pre_bias, pre_add, post_add)
    dimensions(x)
    if isinstance(groups, float):
        raise TypeError("group_norm(): argument 'num_groups' (position 2) must be int, not float")
    if groups <= 0:
        raise RuntimeError(f"Expected num groups to be greater than 0, got {groups}")
    if x.shape[1] % groups != 0:
        raise RuntimeError("Expected number of channels in input to be divisible by num_groups, but got input of "
                           f"shape {list(x.shape)} and num_groups={groups}")
    _adaptive("group_norm", x, weight, bias, scale, shift, pre_bias)
    like_input(x, pre_add=pre_add, post_add=post_add)


def _adaptive(function, x, weight, bias, scale, shift, pre_bias) -> None:
    """The parameters of a norm of samples."""
    size, channels = x.shape, x.shape[1]
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and (parameter.dim() != 1 or parameter.shape[0] != channels):
            raise RuntimeError(f"Expected {name} to be a vector of size equal to the number of channels in input, but "
                               f"got {name} of shape {list(parameter.shape)} and input of shape {list(size)}")
    for name, parameter in (("scale", scale), ("shift", shift)):
        if parameter is not None and parameter.shape != size[:2]:
            raise RuntimeError(f"Expected {name} to be of shape [N, C] = {list(size[:2])}, but got "
                               f"{list(parameter.shape)}")
    bias_before(x, pre_bias)
    dtype(function, input=x, weight=weight, bias=bias, scale=scale, shift=shift, pre_bias=pre_bias)


def channel_norm(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, groups, result) -> None:
    """result: its dtype; None: input's."""
    dimensions(x)
    groups_divide(x.shape[1], groups)
    _adaptive("channel_norm", x, weight, bias, scale, shift, pre_bias)
    result_dtype(x, result)
    like_input(x, pre_add=pre_add)
    like_input(x, None if result == x.dtype else result, post_add=post_add)


def result_dtype(x, result) -> None:
    sixteen_bits = (torch.float16, torch.bfloat16)
    known = (x.dtype, *(sixteen_bits if x.dtype == torch.float32 else [torch.float32] if x.dtype in sixteen_bits
                        else []))
    if result is not None and result not in known:
        raise RuntimeError("Expected the result to have the dtype of input, or one of them f32 and the other one 16 "
                           f"bits, but got {result} and {x.dtype}")


def batch_norm(name, x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add) -> None:
    dense(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add)
    dimensions(x)
    elements(x.shape[1], running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    bias_before(x, pre_bias)
    like_input(x, pre_add=pre_add, post_add=post_add)
    dtype(name, input=x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var,
          pre_bias=pre_bias)


def channel_affine(x, scale, bias, post_add) -> None:
    dense(x, scale, bias, post_add)
    dimensions(x)
    for name, parameter in (("scale", scale), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[1:2] and parameter.shape != x.shape[:2]:
            raise RuntimeError(f"Expected {name} to be of shape [C] or [N, C], but got {list(parameter.shape)} and "
                               f"input of shape {list(x.shape)}")
    if scale is not None and bias is not None and scale.dim() != bias.dim():
        raise RuntimeError("Expected scale and bias to be both [C] or both [N, C], but got "
                           f"{list(scale.shape)} and {list(bias.shape)}")
    like_input(x, post_add=post_add)
    dtype("channel_affine", input=x, scale=scale, bias=bias)

# SPDX-License-Identifier: MIT
"""Calls of norms with what convert folded into them, and biases of convolutions that their readers add: `convolve`
gives output and bias apart, as a Biased, and sums and layers take a Biased in the place of a tensor."""
from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _activations, functional
from ._rules import hooked

# Devices on which a convolution's bias costs a pass over its output. On the CPU oneDNN's convolutions add it for
# nothing.
BIAS_DEVICES = {"cuda"}

_TRANSPOSED = {nn.ConvTranspose1d.forward: F.conv_transpose1d, nn.ConvTranspose2d.forward: F.conv_transpose2d,
               nn.ConvTranspose3d.forward: F.conv_transpose3d}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FORWARDS = {kind.forward: kind for kind in CONVOLUTIONS}
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Biased(NamedTuple):
    """value + bias, not added yet. bias: [C] or [N, C], or None where value is the whole."""
    value: Any
    bias: Optional[Tensor]


Operand = Union[Tensor, Biased]

# ---- convolutions and sums ------------------------------------------------------------------------------------------


def has_bias_to_move(module: Optional[nn.Module]) -> bool:
    """Is it a convolution with a bias, which PyTorch's code adds, and does no one watch or replace its calls?"""
    kind = next((kind for kind in type(module).__mro__ if kind in CONVOLUTIONS), None)
    return kind is not None and module._parameters.get("bias") is not None and not hooked(module) and (
        getattr(type(module), "_conv_forward", None) is getattr(kind, "_conv_forward", None))


def ends_in_convolution(module: nn.Module) -> bool:
    """May its forward give the output of a convolution with a bias: of a child, or of super()?"""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return any(map(has_bias_to_move, module.children())) or (
        code is not None and "__class__" in code.co_freevars and has_bias_to_move(module))


def _works_channels_last(convolution: nn.Module) -> bool:
    """Does its weight's layout make it work channels-last, whatever its input's is?"""
    weight = convolution.weight
    return weight.dim() == 4 and weight.stride(1) == 1 and weight.stride(3) == weight.shape[1] > 1


def convolve(convolution: nn.Module, input: Tensor, forward: Any, copied: bool = False) -> Biased:
    """forward(convolution, input), one of FORWARDS, with its bias apart, where a bias costs a pass. An input without a
    batch axis has its channels elsewhere. copied: of input.contiguous(), a copy that a convolution which works
    channels-last copies back."""
    weight, bias = convolution.weight, convolution.bias
    if copied and (bias is None or not _works_channels_last(convolution)):
        input = input.contiguous()
    apart = None
    if bias is not None and input.dim() == weight.dim() and bias.dtype == weight.dtype and weight.is_floating_point():
        apart, bias = bias, None
    transposed = _TRANSPOSED.get(forward)
    if transposed is None:
        return Biased(convolution._conv_forward(input, weight, bias), apart)
    return Biased(transposed(input, weight, bias, convolution.stride, convolution.padding, convolution.output_padding,
                             convolution.groups, convolution.dilation), apart)


def complete(operand: Operand) -> Any:
    """The tensor that it stands for."""
    if not isinstance(operand, Biased):
        return operand
    return operand.value if operand.bias is None else _added(operand.value, operand.bias, None)


def _added(value: Tensor, bias: Tensor, other: Optional[Tensor]) -> Tensor:
    """value + bias [+ other] in one pass, and in value's type: autocast_to_float32 is about norms."""
    return functional.channel_affine(value, None, bias, post_add=other).to(value.dtype)


def _sum_of_biases(bias: Tensor, other: Tensor) -> Tensor:
    """In f32 at least: in 16 bits it would be rounded at the size of the biases, whatever that of the whole sum."""
    return (bias.float() if bias.dtype in _SIXTEEN_BITS else bias) + other


def add_with_biases(first: Operand, second: Operand, in_place: bool) -> Biased:
    """first + second. A tensor [N, C, 1, ...], such as an embedding, goes to the bias of the other one; two of the same
    shape are added in one pass, with both biases. in_place: stock writes the sum to first."""
    (value, bias), (other, other_bias) = (
        operand if isinstance(operand, Biased) else Biased(operand, None) for operand in (first, second))
    if bias is None:
        value, bias, other, other_bias = other, other_bias, value, bias
    if bias is not None and isinstance(other, Tensor) and other.dtype == value.dtype and other.device == value.device:
        if other_bias is None and other.shape == (*value.shape[:2], *(1,) * (value.dim() - 2)):
            return Biased(value, _sum_of_biases(bias, other.reshape(other.shape[:2])))
        if other.shape == value.shape and other.stride() == value.stride():  # or else the sum is laid out as first
            if other_bias is not None:
                bias = _sum_of_biases(bias, other_bias)
            return Biased(_added(value, bias, other), None)
    first, second = complete(first), complete(second)
    if in_place:
        first += second
        return Biased(first, None)
    return Biased(first + second, None)


# ---- layers ---------------------------------------------------------------------------------------------------------


def fused_call(layer: nn.Module, input: Operand, choice: _activations.Choice, **added: Tensor) -> Tensor:
    """The layer's call with what is added to its output (post_add, or scale and shift), and the activation."""
    if isinstance(input, Biased):
        input, added["pre_bias"] = input
    slope = choice.get("slope")
    # Without a batch axis PReLU's channels are not the layer's.
    if slope is None or slope.shape == (1,) or slope.shape == input.shape[1:2] and not (
            isinstance(layer, nn.modules.instancenorm._InstanceNorm) and input.dim() == layer._get_no_batch_dim()):
        return layer(input, **added, **choice)
    return _activations.apply(layer(input, **added), choice)

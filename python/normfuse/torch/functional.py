# SPDX-License-Identifier: MIT
"""Functional normalization layers: drop-ins for those of ``torch.nn.functional``, with an activation and additions
fused in.

    u = input [+ pre_add]
    z = ((u - mean) * rstd * weight + bias) [* (1 + scale) + shift] [+ post_add]
    y = activation(z)

Tensors may have any of the dtypes f64, f32, f16, bf16; parameters may have another one than the input, so a 16-bit
input under autocast is taken as it is, and the result has its dtype. Channels-last inputs are read in place and give
channels-last results. ``activation`` is None, "relu", "leaky_relu" (``act_param``: slope, 0.01), "silu", "gelu",
"gelu_tanh", "hardswish", "elu" (``act_param``: alpha, 1.0) or "mish".
"""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import _autograd
from ._operators import ACTIVATIONS, DEFAULT_ACT_PARAM, ops

__all__ = ["group_norm", "batch_norm", "instance_norm", "channel_affine", "autocast_to_float32"]

_below_autograd = torch._C._AutoDispatchBelowAutograd
_functorch_is_active = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling
_autocast_to_float32 = False


def autocast_to_float32(enabled: bool = True) -> bool:
    """Whether under autocast 16-bit inputs are converted to f32 first, as torch's own group norm does, so that results
    are f32 too. Off by default: sums are f32 either way, and converting doubles the memory read and written.

    Returns the setting before."""
    global _autocast_to_float32
    before, _autocast_to_float32 = _autocast_to_float32, bool(enabled)
    return before


def _activation(activation: Optional[str], act_param: Optional[float]) -> Tuple[int, float]:
    try:
        number = ACTIVATIONS[activation]
    except (KeyError, TypeError):
        names = ", ".join(name for name in ACTIVATIONS if name)
        raise ValueError(f"activation must be None or one of {names}, but got {activation!r}") from None
    return number, DEFAULT_ACT_PARAM.get(number, 0.0) if act_param is None else float(act_param)


def _verify_batch_size(size) -> None:
    values = size[0]
    for extent in size[2:]:
        values *= extent
    if values == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")


def _check_channels(channels: int, size, **parameters: Optional[Tensor]) -> None:
    for name, parameter in parameters.items():
        if parameter is not None and (parameter.dim() != 1 or parameter.shape[0] != channels):
            raise RuntimeError(
                f"Expected {name} to be a vector of size equal to the number of channels in input, but got {name} of "
                f"shape {list(parameter.shape)} and input of shape {list(size)}"
            )


def _check_elements(channels: int, **parameters: Optional[Tensor]) -> None:
    for name, parameter in parameters.items():
        if parameter is not None and parameter.numel() != channels:
            raise RuntimeError(f"{name} should contain {channels} elements not {parameter.numel()}")


def _check_big(input: Tensor, **others: Optional[Tensor]) -> None:
    for name, other in others.items():
        if other is not None and other.shape != input.shape:
            raise RuntimeError(
                f"Expected {name} to have the shape of input, but got {list(other.shape)} and {list(input.shape)}"
            )


def _same_dtype(input: Tensor, other: Optional[Tensor]) -> Optional[Tensor]:
    """An addition under autocast may arrive in f32 where the input is 16 bits wide, or the other way round."""
    return other if other is None or other.dtype == input.dtype else other.to(input.dtype)


def _per_sample(input: Tensor, name: str, parameter: Optional[Tensor]) -> Optional[Tensor]:
    """[N, C], or [N, C, 1, ...]."""
    if parameter is None:
        return None
    shape = parameter.shape
    if shape[:2] != input.shape[:2] or any(extent != 1 for extent in shape[2:]):
        raise RuntimeError(
            f"Expected {name} to be of shape [N, C] = {list(input.shape[:2])}, but got {list(shape)}"
        )
    return parameter if len(shape) == 2 else parameter.reshape(shape[:2])


def _under_autocast(input: Tensor) -> Tensor:
    if _autocast_to_float32 and torch.is_autocast_enabled(input.device.type) and input.dtype in (
            torch.float16, torch.bfloat16):
        return input.float()
    return input


_is_grad_enabled = torch.is_grad_enabled
_any_requires_grad = torch._C._any_requires_grad


def _needs_gradient(args) -> bool:
    if not _is_grad_enabled():
        return False
    if _is_compiling():  # which does not know the other function
        return any(isinstance(value, Tensor) and value.requires_grad for value in args)
    return _any_requires_grad(*args)


def _run(name: str, *args):
    """The operator `name` with gradients, past the dispatcher's autograd layer where nothing but eager execution is
    going on."""
    if _is_compiling() or _functorch_is_active():
        return getattr(ops, name).default(*args)
    if _needs_gradient(args):
        return getattr(_autograd, name).apply(*args)
    with _below_autograd():
        return getattr(ops, name).default(*args)


def _infer(op, *args):
    if _is_compiling() or _functorch_is_active():
        return op(*args)
    with _below_autograd():
        return op(*args)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
    *,
    activation: Optional[str] = None,
    act_param: Optional[float] = None,
    pre_add: Optional[Tensor] = None,
    return_sum: bool = False,
    post_add: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Group normalization (Wu and He 2018, arXiv:1803.08494).

    Args:
        input: [N, C, ...], any number of further axes.
        num_groups: divides C; the mean and the variance are those of each sample's C/num_groups adjacent channels.
        weight, bias: [C].
        eps: added to the variance.
        activation, act_param: applied to the result; see the module's documentation.
        pre_add: input's shape; added to input before the statistics are taken.
        return_sum: also return ``input + pre_add``, in input's dtype. Needs pre_add.
        post_add: input's shape; added before the activation.
        scale, shift: [N, C] (or [N, C, 1, ...]): ``* (1 + scale) + shift`` after weight and bias (AdaGN).

    Returns:
        A tensor of input's shape, dtype and layout; with return_sum a pair of it and the sum.

    Raises:
        RuntimeError: shapes do not fit, or C is not divisible by num_groups.
        ValueError: a group has a single value; activation is not known.
    """
    if has_torch_function_variadic(input, weight, bias, pre_add, post_add, scale, shift):
        return handle_torch_function(
            group_norm, (input, weight, bias, pre_add, post_add, scale, shift), input, num_groups, weight=weight,
            bias=bias, eps=eps, activation=activation, act_param=act_param, pre_add=pre_add, return_sum=return_sum,
            post_add=post_add, scale=scale, shift=shift)
    size = input.shape
    if len(size) < 2:
        raise RuntimeError(f"Expected at least 2 dimensions for input tensor but received {len(size)}")
    channels = size[1]
    _verify_batch_size([size[0] * channels // num_groups, num_groups, *size[2:]])
    if num_groups <= 0:
        raise RuntimeError(f"Expected num groups to be greater than 0, got {num_groups}")
    if channels % num_groups != 0:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(size)} and num_groups={num_groups}"
        )
    if weight is not None or bias is not None:
        _check_channels(channels, size, weight=weight, bias=bias)
    number, parameter = _activation(activation, act_param)
    if _autocast_to_float32:
        input = _under_autocast(input)
    if pre_add is not None or post_add is not None:
        _check_big(input, pre_add=pre_add, post_add=post_add)
        pre_add, post_add = _same_dtype(input, pre_add), _same_dtype(input, post_add)
    elif return_sum:
        raise ValueError("return_sum needs pre_add")
    if scale is not None or shift is not None:
        scale, shift = _per_sample(input, "scale", scale), _per_sample(input, "shift", shift)
    args = (input, weight, bias, scale, shift, pre_add, post_add, num_groups, eps, number, parameter)
    if return_sum or _needs_gradient(args):
        y, u, _, _ = _run("group_norm", *args)
        return (y, u) if return_sum else y
    return _infer(ops.group_norm_inference.default, *args)


def _check_batch_norm_input(input: Tensor, name: str) -> int:
    if input.dim() < 2:
        raise RuntimeError(f"{name}: expected at least 2 dimensions for input tensor but received {input.dim()}")
    return input.shape[1]


def batch_norm(
    input: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: Optional[str] = None,
    act_param: Optional[float] = None,
    pre_add: Optional[Tensor] = None,
    return_sum: bool = False,
    post_add: Optional[Tensor] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167).

    Args:
        input: [N, C, ...], any number of further axes.
        running_mean, running_var: [C], of any dtype. Training: both or neither, updated in place, the variance with
            the unbiased one. Else: the statistics that input is normalized with.
        weight, bias: [C].
        training: take the statistics of input.
        momentum: running = (1 - momentum) * running + momentum * new.
        eps: added to the variance; above 0 when training.
        activation, act_param, pre_add, return_sum, post_add: as of :func:`group_norm`.

    Returns:
        A tensor of input's shape, dtype and layout; with return_sum a pair of it and the sum.

    Raises:
        ValueError: a channel has a single value when training; eps is not positive; activation is not known.
        RuntimeError: shapes do not fit; no running statistics in evaluation.
    """
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias, pre_add, post_add):
        return handle_torch_function(
            batch_norm, (input, running_mean, running_var, weight, bias, pre_add, post_add), input, running_mean,
            running_var, weight=weight, bias=bias, training=training, momentum=momentum, eps=eps,
            activation=activation, act_param=act_param, pre_add=pre_add, return_sum=return_sum, post_add=post_add)
    channels = _check_batch_norm_input(input, "batch_norm")
    if training:
        _verify_batch_size(input.shape)
        if eps <= 0.0:
            raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
        if (running_mean is None) != (running_var is None):
            raise RuntimeError("Expected running_mean and running_var to be both given, or both None")
    else:
        if eps < 0.0:
            raise ValueError(f"batch_norm eps must be non-negative, but got {eps}")
        if running_mean is None or running_var is None:
            raise RuntimeError(f"Expected running_{'mean' if running_mean is None else 'var'} to be defined in "
                               "evaluation mode")
    _check_elements(channels, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    number, parameter = _activation(activation, act_param)
    if _autocast_to_float32:
        input = _under_autocast(input)
    if pre_add is not None or post_add is not None:
        _check_big(input, pre_add=pre_add, post_add=post_add)
        pre_add, post_add = _same_dtype(input, pre_add), _same_dtype(input, post_add)
    elif return_sum:
        raise ValueError("return_sum needs pre_add")
    if training:
        y, u, _, _ = _run("batch_norm", input, weight, bias, running_mean, running_var, pre_add, post_add, momentum,
                          eps, number, parameter)
        return (y, u) if return_sum else y
    return _evaluate(return_sum, input, weight, bias, running_mean, running_var, pre_add, post_add, eps, number,
                     parameter)


def _evaluate(return_sum: bool, *args) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    if return_sum or _needs_gradient(args):
        y, u = _run("batch_norm_evaluate", *args)
        return (y, u) if return_sum else y
    return _infer(ops.batch_norm_inference.default, *args)


def instance_norm(
    input: Tensor,
    running_mean: Optional[Tensor] = None,
    running_var: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: Optional[str] = None,
    act_param: Optional[float] = None,
    pre_add: Optional[Tensor] = None,
    return_sum: bool = False,
    post_add: Optional[Tensor] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Instance normalization (Ulyanov et al. 2016, arXiv:1607.08022).

    Args:
        input: [N, C, ...], any number of further axes.
        running_mean, running_var: [C], of any dtype; both or neither. With use_input_stats updated in place by the
            means over the batch of mean and unbiased variance; else the statistics that input is normalized with.
        weight, bias: [C].
        use_input_stats: take the statistics of each sample's channels.
        momentum: running = (1 - momentum) * running + momentum * new.
        eps: added to the variance.
        activation, act_param, pre_add, return_sum, post_add: as of :func:`group_norm`.

    Returns:
        A tensor of input's shape, dtype and layout; with return_sum a pair of it and the sum.

    Raises:
        ValueError: a channel of a sample has a single value; activation is not known.
        RuntimeError: shapes do not fit; no running statistics where they are needed.
    """
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias, pre_add, post_add):
        return handle_torch_function(
            instance_norm, (input, running_mean, running_var, weight, bias, pre_add, post_add), input,
            running_mean=running_mean, running_var=running_var, weight=weight, bias=bias,
            use_input_stats=use_input_stats, momentum=momentum, eps=eps, activation=activation, act_param=act_param,
            pre_add=pre_add, return_sum=return_sum, post_add=post_add)
    channels = _check_batch_norm_input(input, "instance_norm")
    if use_input_stats:
        positions = 1
        for extent in input.shape[2:]:
            positions *= extent
        if positions == 1:
            raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.shape}")
    if (running_mean is None or running_var is None) and not use_input_stats:
        raise RuntimeError("Expected running_mean and running_var to be defined when use_input_stats is false")
    if (running_mean is None) != (running_var is None):
        raise RuntimeError("Expected running_mean and running_var to be both given, or both None")
    _check_elements(channels, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    number, parameter = _activation(activation, act_param)
    if _autocast_to_float32:
        input = _under_autocast(input)
    if pre_add is not None or post_add is not None:
        _check_big(input, pre_add=pre_add, post_add=post_add)
        pre_add, post_add = _same_dtype(input, pre_add), _same_dtype(input, post_add)
    elif return_sum:
        raise ValueError("return_sum needs pre_add")
    if not use_input_stats:
        return _evaluate(return_sum, input, weight, bias, running_mean, running_var, pre_add, post_add, eps, number,
                         parameter)
    if running_mean is not None:
        y, u, _, _ = _run("instance_norm", input, weight, bias, running_mean, running_var, pre_add, post_add, momentum,
                          eps, number, parameter)
        return (y, u) if return_sum else y
    args = (input, weight, bias, None, None, pre_add, post_add, channels, eps, number, parameter)
    if return_sum or _needs_gradient(args):
        y, u, _, _ = _run("group_norm", *args)
        return (y, u) if return_sum else y
    return _infer(ops.group_norm_inference.default, *args)


def channel_affine(
    input: Tensor,
    scale: Optional[Tensor],
    bias: Optional[Tensor],
    *,
    activation: Optional[str] = None,
    act_param: Optional[float] = None,
    post_add: Optional[Tensor] = None,
) -> Tensor:
    """``activation(scale * input + bias [+ post_add])``, with a scale and a bias for each channel.

    Args:
        input: [N, C, ...], any number of further axes.
        scale, bias: both [C], or both [N, C]; None: 1 and 0.
        activation, act_param, post_add: as of :func:`group_norm`.

    Returns:
        A tensor of input's shape, dtype and layout.

    Raises:
        RuntimeError: shapes do not fit.
        ValueError: activation is not known.
    """
    if has_torch_function_variadic(input, scale, bias, post_add):
        return handle_torch_function(
            channel_affine, (input, scale, bias, post_add), input, scale, bias, activation=activation,
            act_param=act_param, post_add=post_add)
    _check_batch_norm_input(input, "channel_affine")
    for name, parameter in (("scale", scale), ("bias", bias)):
        if parameter is not None and parameter.shape not in (input.shape[1:2], input.shape[:2]):
            raise RuntimeError(
                f"Expected {name} to be of shape [C] or [N, C], but got {list(parameter.shape)} and input of shape "
                f"{list(input.shape)}"
            )
    if scale is not None and bias is not None and scale.dim() != bias.dim():
        raise RuntimeError("Expected scale and bias to be both [C] or both [N, C], but got "
                           f"{list(scale.shape)} and {list(bias.shape)}")
    number, parameter = _activation(activation, act_param)
    if _autocast_to_float32:
        input = _under_autocast(input)
    if post_add is not None:
        _check_big(input, post_add=post_add)
        post_add = _same_dtype(input, post_add)
    return _run("channel_affine", input, scale, bias, post_add, number, parameter)

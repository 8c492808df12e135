# SPDX-License-Identifier: MIT
"""Functional normalization layers: drop-ins for those of ``torch.nn.functional``, with an activation and additions
fused in.

    u = input [+ pre_bias] [+ pre_add]
    z = ((u - mean) * rstd * weight + bias) [* (1 + scale) + shift] [+ post_add]
    y = activation(z)

Channel norm has one mean, or none, and one rstd for the channels of each position.

Tensors may have any of the dtypes f64, f32, f16, bf16; parameters may have another one than the input, so a 16-bit
input under autocast is taken as it is, and the result has its dtype. Channels-last inputs are read in place and give
channels-last results. ``activation`` is None, "relu", "leaky_relu" (``act_param``: slope, 0.01), "silu", "gelu",
"gelu_tanh", "hardswish", "elu" (``act_param``: alpha, 1.0), "mish", "relu6" or "prelu" (``slope``: a tensor).
"""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import _autograd, _checks, _sharding, _vmap  # noqa: F401: registers rules
from ._operators import ACTIVATIONS, DEFAULT_ACT_PARAM, UNANNOTATED, Y_DTYPES, ops, straight
from .._library import EPS_KINDS, STATISTICS
from .._words import meant

__all__ = ["group_norm", "batch_norm", "instance_norm", "channel_affine", "channel_norm", "autocast_to_float32"]

_below_autograd = torch._C._AutoDispatchBelowAutograd
_functorch_is_active = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class _Asked:
    """The stand-in where torch.compiler keeps no flag of that name."""

    @property
    def _is_compiling_flag(self) -> bool:
        return _is_compiling()


# `_is_dynamo_compiling() or _compiler._is_compiling_flag` is _is_compiling() for one Python call less.
_compiler = torch.compiler if hasattr(torch.compiler, "_is_compiling_flag") else _Asked()
_is_grad_enabled = torch.is_grad_enabled
_is_tracing = torch._C._is_tracing
_any_requires_grad = torch._C._any_requires_grad
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
_autocast_to_float32 = False
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
# Devices on which torch's autocast gives layer_norm f32; rms_norm, too, but not yet in PyTorch 2.11.
_AUTOCASTS_TO_FLOAT32 = frozenset(("cuda", "xpu", "mtia", "maia"))


def autocast_to_float32(enabled: bool = True) -> bool:
    """Sets whether under autocast 16-bit inputs are converted to f32 first, as torch's own group norm does, so that
    results are f32 too. Off by default: sums are f32 either way, and converting doubles the memory read and written.
    Channel norm, which converts nothing, does as torch's layer_norm and rms_norm do, and with this so on the CPU, too.

    Returns the setting before."""
    global _autocast_to_float32
    before, _autocast_to_float32 = _autocast_to_float32, bool(enabled)
    return before


# ---- arguments -------------------------------------------------------------------------------------------------------

# A function that needs no other call looks here itself: host time is counted in tenths of a microsecond. What is wrong
# with a name is asked once it has not been found.
_NUMBERS = {name: (number, DEFAULT_ACT_PARAM.get(number, 0.0)) for name, number in ACTIVATIONS.items()}


def _activation(activation: Optional[str], act_param: Optional[float]) -> Tuple[int, float]:
    """The activation's number, and its parameter or the default of it."""
    _check_activation(activation)
    number, parameter = _NUMBERS[activation]
    return number, parameter if act_param is None else _parameter(activation, act_param)


def _parameter(activation: Optional[str], act_param: float) -> float:
    if ACTIVATIONS[activation] not in DEFAULT_ACT_PARAM:
        raise ValueError(f"act_param is leaky_relu's slope or elu's alpha, but activation is {activation!r}")
    return float(act_param)


def _check_activation(activation: Optional[str]) -> None:
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        names = ", ".join(name for name in ACTIVATIONS if name)
        raise ValueError(f"activation must be None or one of {names}, but got {activation!r}"
                         f"{_said_right(activation)}") from None


def _said_right(activation: Any) -> str:
    """How to say what torch calls by another name: a module, its class, a function."""
    name = activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)
    name = meant(name, ACTIVATIONS)
    if name is None:
        return ""
    if name == "gelu" and getattr(activation, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    parameter = getattr(activation, "negative_slope", getattr(activation, "alpha", None))
    return f": say activation={name!r}" + ("" if parameter is None else f", act_param={parameter}")


def _under_autocast(input: Tensor) -> Tensor:
    if _autocast_to_float32 and torch.is_autocast_enabled(input.device.type) and input.dtype in _SIXTEEN_BITS:
        return input.float()
    return input


def _additions(input: Tensor, pre_bias: Optional[Tensor], pre_add: Optional[Tensor], return_sum: bool,
               post_add: Optional[Tensor],
               dtype: Optional[torch.dtype] = None) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """In input's dtype: under autocast an addition may arrive in f32 where input is 16 bits wide, or the other way
    round. dtype: the result's, where it is another one."""
    if return_sum and pre_add is None and pre_bias is None:
        raise ValueError("return_sum needs pre_add or pre_bias")
    if pre_add is not None and pre_add.dtype != input.dtype:
        pre_add = pre_add.to(input.dtype)
    dtype = input.dtype if dtype is None else dtype
    if post_add is not None and post_add.dtype != dtype:
        post_add = post_add.to(dtype)
    return pre_add, post_add


def _per_sample(parameter: Optional[Tensor]) -> Optional[Tensor]:
    """[N, C] of what may be [N, C, 1, ...]."""
    if parameter is not None and parameter.dim() > 2 and _checks.product(parameter.shape[2:]) == 1:
        return parameter.reshape(parameter.shape[:2])
    return parameter


# ---- how a call runs -------------------------------------------------------------------------------------------------


def _is_plain_eager() -> bool:
    """Neither torch.compile nor torch.func nor forward-mode derivatives nor torch.jit.trace look on: past the
    dispatcher's layers for them."""
    return not (_is_dynamo_compiling() or _compiler._is_compiling_flag or _functorch_is_active() or
                forward_ad._current_level >= 0 or _is_tracing())


def _needs_gradient(args) -> bool:
    if not _is_grad_enabled():
        return False
    if _is_compiling():  # which does not know the other function
        return any(isinstance(value, Tensor) and value.requires_grad for value in args)
    return _any_requires_grad(*args)


def _is_functionalized() -> bool:
    """Does torch.func.functionalize look on, at whatever level?"""
    return any(level.key() == TransformType.Functionalize for level in get_interpreter_stack() or ())


def _run(name: str, args: Tuple[Any, ...], needs_gradient: Optional[bool] = None):
    """The operator's outputs, or in eager calls with gradients y, and u where the last argument asks for it.
    needs_gradient: None where it is not known."""
    if not _is_plain_eager():
        op = getattr(ops, name).default
        if not _is_compiling() and name + "_unannotated" in UNANNOTATED and _is_functionalized():
            op = getattr(ops, name + "_unannotated").default
        return op(*args)
    if _needs_gradient(args) if needs_gradient is None else needs_gradient:
        return getattr(_autograd, name)(*args)
    with _below_autograd():
        return _autograd.eager(name)(*args)


def _run_or_infer(name: str, inference: str, return_sum: bool, args: Tuple[Any, ...]):
    """The operator that saves what a backward needs, where there is to be one, or the one that does not. A trace of
    torch.jit has the second, whose derivatives are the first's, with gradients or without."""
    needs_gradient = _needs_gradient(args)
    if return_sum or needs_gradient and (_is_compiling() or not _is_tracing()):
        outputs = _run(name, (*args, return_sum), needs_gradient)
        return _y_and_sum(outputs, return_sum)
    return _run(inference, args, needs_gradient)


def _y_and_sum(outputs: Any, return_sum: bool) -> Any:
    return (outputs[0], outputs[1]) if return_sum else outputs if isinstance(outputs, Tensor) else outputs[0]


_lean_group_norm_inference = straight("lean_group_norm_inference")
_lean_batch_norm_inference = straight("lean_batch_norm_inference")
_lean_batch_norm_forward_only = straight("lean_batch_norm_forward_only")
_batch_norm_inference = _autograd.eager("batch_norm_inference")
_apply_lean_group_norm = _autograd.apply_lean_group_norm
_apply_lean_batch_norm = _autograd.apply_lean_batch_norm
_apply_lean_batch_norm_add = _autograd.apply_lean_batch_norm_add
_apply_lean_batch_norm_evaluate = _autograd.apply_lean_batch_norm_evaluate


# ---- without additions -----------------------------------------------------------------------------------------------

# The call that most layers make, where nothing looks on (_is_plain_eager); None elsewhere. GroupNorm and batch norms
# call them themselves: without a call that has fourteen keywords, a training step takes 113 us in the place of 119.


def group_norm_alone(input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], num_groups: int, eps: float,
                     activation: Optional[str], act_param: Optional[float]) -> Optional[Tensor]:
    if not _is_plain_eager():
        return None
    number, parameter = _NUMBERS[activation]
    if act_param is not None:
        parameter = _parameter(activation, act_param)
    if _autocast_to_float32:
        input = _under_autocast(input)
    if _is_grad_enabled() and (input.requires_grad or weight is not None and weight.requires_grad or
                               bias is not None and bias.requires_grad):
        return _apply_lean_group_norm(
            _unwrap_if_dead(input), None if weight is None else _unwrap_if_dead(weight),
            None if bias is None else _unwrap_if_dead(bias), (num_groups, eps, number, parameter))
    return _lean_group_norm_inference(input, weight, bias, num_groups, eps, number, parameter)


def batch_norm_alone(input: Tensor, running_mean: Optional[Tensor], running_var: Optional[Tensor],
                     weight: Optional[Tensor], bias: Optional[Tensor], training: bool, momentum: float, eps: float,
                     activation: Optional[str], act_param: Optional[float],
                     post_add: Optional[Tensor] = None) -> Optional[Tensor]:
    """With all its tensors, eps above 0, and post_add of input's type."""
    if weight is None or bias is None or running_mean is None or running_var is None or eps <= 0.0 or \
            not _is_plain_eager():
        return None
    number, parameter = _NUMBERS[activation]
    if act_param is not None:
        parameter = _parameter(activation, act_param)
    if _autocast_to_float32:
        input = _under_autocast(input)
    if post_add is not None:
        if post_add.dtype != input.dtype:
            return None
        needs_gradient = _is_grad_enabled() and _any_requires_grad(input, weight, bias, post_add)
        if needs_gradient and training and number:
            return _apply_lean_batch_norm_add(
                _unwrap_if_dead(input), _unwrap_if_dead(weight), _unwrap_if_dead(bias), _unwrap_if_dead(post_add),
                (running_mean, running_var, momentum, eps, number, parameter))
        given = input, weight, bias, running_mean, running_var, None, None, post_add, None
        numbers = eps, number, parameter
        if training:
            _checks.values_per_channel(input.shape)
        if needs_gradient:
            return (_autograd.batch_norm(*given, momentum, *numbers, False) if training else
                    _autograd.batch_norm_evaluate(*given, *numbers, False))
        if not training:
            with _below_autograd():
                return _batch_norm_inference(*given, *numbers)
        return None
    if _is_grad_enabled() and (input.requires_grad or weight.requires_grad or bias.requires_grad):
        if training:
            return _apply_lean_batch_norm(
                _unwrap_if_dead(input), _unwrap_if_dead(weight), _unwrap_if_dead(bias),
                (running_mean, running_var, momentum, eps, number, parameter))
        return _apply_lean_batch_norm_evaluate(
            _unwrap_if_dead(input), _unwrap_if_dead(weight), _unwrap_if_dead(bias),
            (running_mean, running_var, eps, number, parameter))
    if training:
        return _lean_batch_norm_forward_only(input, weight, bias, running_mean, running_var, momentum, eps, number,
                                             parameter)
    return _lean_batch_norm_inference(input, weight, bias, running_mean, running_var, eps, number, parameter)


def refused_group_norm(input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], num_groups: int,
                       activation: Optional[str], *additions: Optional[Tensor],
                       slope: Optional[Tensor] = None) -> None:
    """Raises stock's error for what stock refuses. additions: scale, shift, pre_bias, pre_add, post_add."""
    _checks.values_per_group(input, num_groups)
    _check_activation(activation)
    _checks.group_norm(input, weight, bias, *(additions or (None,) * 5), num_groups)
    _checks.slope(input, slope, activation)


def refused_batch_norm(input: Tensor, running_mean: Optional[Tensor], running_var: Optional[Tensor],
                       weight: Optional[Tensor], bias: Optional[Tensor], training: bool, activation: Optional[str],
                       *additions: Optional[Tensor], slope: Optional[Tensor] = None) -> None:
    """Likewise. additions: pre_bias, pre_add, post_add."""
    if training:
        _checks.values_per_channel(input.shape)
    _check_activation(activation)
    _checks.batch_norm("batch_norm", input, weight, bias, running_mean, running_var, *(additions or (None,) * 3))
    _checks.slope(input, slope, activation)


# ---- the layers ------------------------------------------------------------------------------------------------------


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-5,
    *,
    activation: Optional[str] = None,
    act_param: Optional[float] = None,
    slope: Optional[Tensor] = None,
    pre_bias: Optional[Tensor] = None,
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
        activation: applied to the result: None, "relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "elu",
            "mish", "relu6" or "prelu".
        act_param: leaky_relu's slope (0.01) or elu's alpha (1.0); of no other activation.
        slope: prelu's, which needs it: [C], or [1] for all channels; of no other activation.
        pre_bias: [C] or [N, C] (or [N, C, 1, ...]); added to input before the statistics are taken: the bias of the
            convolution before, an embedding. Its gradient is the sum of input's.
        pre_add: input's shape; likewise.
        return_sum: also return ``input + pre_bias + pre_add``, in input's dtype. Needs one of them.
        post_add: input's shape; added before the activation.
        scale, shift: [N, C] (or [N, C, 1, ...]): ``* (1 + scale) + shift`` after weight and bias (AdaGN).

    Returns:
        A tensor of input's shape, dtype and layout; with return_sum a pair of it and the sum.

    Raises:
        RuntimeError: shapes do not fit, or C is not divisible by num_groups.
        ValueError: a group has a single value; activation is not known, or act_param or slope means nothing to it;
            slope is missing or of another shape.
    """
    if type(input) is not Tensor:
        _checks.tensor("group_norm", input)
        _sharding.register()
    if has_torch_function_variadic(input, weight, bias, slope, pre_bias, pre_add, post_add, scale, shift):
        return handle_torch_function(
            group_norm, (input, weight, bias, slope, pre_bias, pre_add, post_add, scale, shift), input, num_groups,
            weight=weight, bias=bias, eps=eps, activation=activation, act_param=act_param, slope=slope,
            pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum, post_add=post_add, scale=scale, shift=shift)
    try:
        if pre_add is None and post_add is None and scale is None and shift is None and pre_bias is None and \
                slope is None and not return_sum:
            y = group_norm_alone(input, weight, bias, num_groups, eps, activation, act_param)
            if y is not None:
                return y
        number, parameter = _activation(activation, act_param)
        if _autocast_to_float32:
            input = _under_autocast(input)
        _checks.values_per_group(input, num_groups)
        pre_add, post_add = _additions(input, pre_bias, pre_add, return_sum, post_add)
        scale, shift, pre_bias = _per_sample(scale), _per_sample(shift), _per_sample(pre_bias)
        return _run_or_infer("group_norm", "group_norm_inference", return_sum,
                             (input, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, num_groups, eps,
                              number, parameter))
    except (RuntimeError, TypeError, ValueError, KeyError):
        refused_group_norm(input, weight, bias, num_groups, activation, scale, shift, pre_bias, pre_add, post_add,
                           slope=slope)
        raise


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
    slope: Optional[Tensor] = None,
    pre_bias: Optional[Tensor] = None,
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
        activation, act_param, slope, pre_bias, pre_add, return_sum, post_add: as of :func:`group_norm`.

    Returns:
        A tensor of input's shape, dtype and layout; with return_sum a pair of it and the sum.

    Raises:
        ValueError: a channel has a single value when training; eps is not positive; activation is not known, or
            act_param or slope means nothing to it; slope is missing or of another shape.
        RuntimeError: shapes do not fit; no running statistics in evaluation.
    """
    if type(input) is not Tensor:
        _checks.tensor("batch_norm", input)
        _sharding.register()
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias, slope, pre_bias, pre_add, post_add):
        return handle_torch_function(
            batch_norm, (input, running_mean, running_var, weight, bias, slope, pre_bias, pre_add, post_add), input,
            running_mean, running_var, weight=weight, bias=bias, training=training, momentum=momentum, eps=eps,
            activation=activation, act_param=act_param, slope=slope, pre_bias=pre_bias, pre_add=pre_add,
            return_sum=return_sum, post_add=post_add)
    if input.dim() < 2:
        return _of_no_channels(input, running_mean, running_var)
    if training:
        if eps <= 0.0:
            raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
        if (running_mean is None) != (running_var is None):
            raise ValueError("running_mean and running_var must either both be None or neither be None")
    else:
        if eps < 0.0:
            raise ValueError(f"batch_norm eps must be non-negative, but got {eps}")
        if running_mean is None or running_var is None:
            raise RuntimeError(f"running_{'mean' if running_mean is None else 'var'} must be defined in evaluation "
                               "mode")
    try:
        if pre_add is None and pre_bias is None and slope is None and not return_sum:
            y = batch_norm_alone(input, running_mean, running_var, weight, bias, training, momentum, eps, activation,
                                 act_param, post_add)
            if y is not None:
                return y
        number, parameter = _activation(activation, act_param)
        if _autocast_to_float32:
            input = _under_autocast(input)
        pre_add, post_add = _additions(input, pre_bias, pre_add, return_sum, post_add)
        pre_bias = _per_sample(pre_bias)
        if training:
            _checks.values_per_channel(input.shape)
            outputs = _run("batch_norm", (input, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add,
                                          slope, momentum, eps, number, parameter, return_sum))
            return _y_and_sum(outputs, return_sum)
        return _run_or_infer("batch_norm_evaluate", "batch_norm_inference", return_sum,
                             (input, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, eps,
                              number, parameter))
    except (RuntimeError, TypeError, ValueError, KeyError):
        refused_batch_norm(input, running_mean, running_var, weight, bias, training, activation, pre_bias, pre_add,
                           post_add, slope=slope)
        raise


def _of_no_channels(input: Tensor, running_mean: Optional[Tensor], running_var: Optional[Tensor]) -> Tensor:
    """torch gives a copy of an empty vector back, and takes no other."""
    if input.dim() == 1 and input.numel() == 0:
        return input.clone()
    _checks.elements(0, running_mean=running_mean, running_var=running_var)
    _checks.dimensions(input)
    return input


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
    slope: Optional[Tensor] = None,
    pre_bias: Optional[Tensor] = None,
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
        activation, act_param, slope, pre_bias, pre_add, return_sum, post_add: as of :func:`group_norm`.

    Returns:
        A tensor of input's shape, dtype and layout; with return_sum a pair of it and the sum.

    Raises:
        ValueError: a channel of a sample has a single value; activation is not known, or act_param or slope means
            nothing to it; slope is missing or of another shape.
        RuntimeError: shapes do not fit; no running statistics where they are needed.
    """
    if type(input) is not Tensor:
        _checks.tensor("instance_norm", input)
        _sharding.register()
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias, slope, pre_bias, pre_add, post_add):
        return handle_torch_function(
            instance_norm, (input, running_mean, running_var, weight, bias, slope, pre_bias, pre_add, post_add), input,
            running_mean=running_mean, running_var=running_var, weight=weight, bias=bias,
            use_input_stats=use_input_stats, momentum=momentum, eps=eps, activation=activation, act_param=act_param,
            slope=slope, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum, post_add=post_add)
    if use_input_stats and _checks.product(input.shape[2:]) == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.shape}")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    if running_mean is None and not use_input_stats:
        raise RuntimeError("Expected running_mean and running_var to be defined when use_input_stats is false")
    _checks.dimensions(input)
    try:
        number, parameter = _NUMBERS[activation]
        if act_param is not None:
            parameter = _parameter(activation, act_param)
        if _autocast_to_float32:
            input = _under_autocast(input)
        pre_add, post_add = _additions(input, pre_bias, pre_add, return_sum, post_add)
        pre_bias = _per_sample(pre_bias)
        if not use_input_stats:
            return _run_or_infer("batch_norm_evaluate", "batch_norm_inference", return_sum,
                                 (input, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope,
                                  eps, number, parameter))
        if running_mean is not None:
            outputs = _run("instance_norm", (input, weight, bias, running_mean, running_var, pre_bias, pre_add,
                                             post_add, slope, momentum, eps, number, parameter, return_sum))
            return _y_and_sum(outputs, return_sum)
        channels = input.shape[1]
        if channels == 0:
            return (input.clone(), input.clone()) if return_sum else input.clone()
        if pre_bias is None and pre_add is None and post_add is None and slope is None and _is_plain_eager():
            if _needs_gradient((input, weight, bias)):
                tensors = [None if t is None else _unwrap_if_dead(t) for t in (input, weight, bias)]
                return _apply_lean_group_norm(*tensors, (channels, eps, number, parameter))
            return _lean_group_norm_inference(input, weight, bias, channels, eps, number, parameter)
        return _run_or_infer("group_norm", "group_norm_inference", return_sum,
                             (input, weight, bias, None, None, pre_bias, pre_add, post_add, slope, channels, eps,
                              number, parameter))
    except (RuntimeError, TypeError, ValueError, KeyError):
        _check_activation(activation)
        _checks.batch_norm("instance_norm", input, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add)
        _checks.slope(input, slope, activation)
        raise


def channel_affine(
    input: Tensor,
    scale: Optional[Tensor],
    bias: Optional[Tensor],
    *,
    activation: Optional[str] = None,
    act_param: Optional[float] = None,
    slope: Optional[Tensor] = None,
    post_add: Optional[Tensor] = None,
) -> Tensor:
    """``activation(scale * input + bias [+ post_add])``, with a scale and a bias for each channel.

    Args:
        input: [N, C, ...], any number of further axes.
        scale, bias: both [C], or both [N, C]; None: 1 and 0.
        activation, act_param, slope, post_add: as of :func:`group_norm`.

    Returns:
        A tensor of input's shape, dtype and layout.

    Raises:
        RuntimeError: shapes do not fit.
        ValueError: activation is not known, or act_param or slope means nothing to it; slope is missing or of another
            shape.
    """
    if type(input) is not Tensor:
        _checks.tensor("channel_affine", input)
        _sharding.register()
    if has_torch_function_variadic(input, scale, bias, slope, post_add):
        return handle_torch_function(
            channel_affine, (input, scale, bias, slope, post_add), input, scale, bias, activation=activation,
            act_param=act_param, slope=slope, post_add=post_add)
    try:
        number, parameter = _NUMBERS[activation]
        if act_param is not None:
            parameter = _parameter(activation, act_param)
        if _autocast_to_float32:
            input = _under_autocast(input)
        _, post_add = _additions(input, None, None, False, post_add)
        return _run("channel_affine", (input, scale, bias, post_add, slope, number, parameter))
    except (RuntimeError, TypeError, ValueError, KeyError):
        _check_activation(activation)
        _checks.channel_affine(input, scale, bias, post_add)
        _checks.slope(input, slope, activation)
        raise


def _result_type(input: Tensor, dtype: Optional[torch.dtype]) -> Optional[torch.dtype]:
    """The type of channel norm's result; None for input's. Under autocast, f32 where torch's layer_norm and rms_norm
    give f32."""
    if dtype is None:
        device = input.device.type
        if input.dtype in _SIXTEEN_BITS and torch.is_autocast_enabled(device) and (
                device in _AUTOCASTS_TO_FLOAT32 or _autocast_to_float32):
            return torch.float32
        return None
    _checks.result_dtype(input, dtype)
    return None if dtype == input.dtype else dtype


def _word(name: str, word: Any, numbers: Any) -> int:
    if not (isinstance(word, str) and word in numbers):
        raise ValueError(f"{name} must be one of {', '.join(numbers)}, but got {word!r}")
    return numbers[word]


def _channels_second(tensor: Optional[Tensor]) -> Optional[Tensor]:
    return tensor if tensor is None else tensor.movedim(-1, 1)


def channel_norm(
    input: Tensor,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    *,
    groups: int = 1,
    statistics: str = "mean_and_variance",
    eps: float = 1e-5,
    eps_kind: str = "added",
    dim: int = 1,
    activation: Optional[str] = None,
    act_param: Optional[float] = None,
    slope: Optional[Tensor] = None,
    pre_bias: Optional[Tensor] = None,
    pre_add: Optional[Tensor] = None,
    return_sum: bool = False,
    post_add: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    dtype: Optional[torch.dtype] = None,
    channels_last: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Normalization of each position over its channels, or over those of a group: layer normalization (Ba et al. 2016,
    arXiv:1607.06450) of channels, or RMS normalization (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        input: [N, C, ...], any number of further axes; with dim=-1 [N, ..., C] or [C].
        weight, bias: [C].
        groups: divides C; the norm group of a position is D = C/groups adjacent channels.
        statistics: "mean_and_variance", layer norm, or "mean_square", RMS norm, whose mean is 0.
        eps: with v = u - mean, or u, added to the mean of v^2: ``v / sqrt(mean(v^2) + eps)``.
        eps_kind: "added", or "of_norm" where eps is the smallest norm of v: ``v * sqrt(D) / max(norm(v), eps)``. With
            "mean_square" this is sqrt(D) times torch.nn.functional.normalize, whose eps is 1e-12.
        dim: the axis of the channels, 1 or -1: that of input, pre_add and post_add.
        activation, act_param, slope, pre_bias, pre_add, return_sum: as of :func:`group_norm`. pre_bias alone rounds its
            sum as pre_add does.
        post_add: input's shape; added before the activation, in the result's dtype.
        scale, shift: [N, C] (or of input's number of axes, with one position): ``* (1 + scale) + shift`` after weight
            and bias.
        dtype: the result's: input's (None), f32 of a 16-bit input, or a 16-bit one of an f32 input. None under autocast
            is f32 where torch's layer_norm and rms_norm give f32: of 16-bit inputs on CUDA, not on the CPU.
        channels_last: the result's channels are adjacent, whatever input's layout is; with dim=-1 it is contiguous.

    Returns:
        A tensor of input's shape and layout; with return_sum a pair of it and the sum.

    Raises:
        RuntimeError: shapes do not fit, C is not divisible by groups, dtype is not one of these; on CUDA what
            docs/operators/channel-norm.md says.
        ValueError: statistics, eps_kind or activation is not known, dim is neither 1 nor the last axis, or act_param or
            slope means nothing to the activation; slope is missing or of another shape.
    """
    if type(input) is not Tensor:
        _sharding.register()
    if has_torch_function_variadic(input, weight, bias, slope, pre_bias, pre_add, post_add, scale, shift):
        return handle_torch_function(
            channel_norm, (input, weight, bias, slope, pre_bias, pre_add, post_add, scale, shift), input, weight=weight,
            bias=bias, groups=groups, statistics=statistics, eps=eps, eps_kind=eps_kind, dim=dim, activation=activation,
            act_param=act_param, slope=slope, pre_bias=pre_bias, pre_add=pre_add, return_sum=return_sum,
            post_add=post_add, scale=scale, shift=shift, dtype=dtype, channels_last=channels_last)
    axes = input.dim()
    if dim != 1 and dim != -1 and dim != axes - 1:
        raise ValueError(f"dim must be 1 or the last axis, but got {dim} and an input of {axes} axes")
    if axes == 1 and dim != 1:
        given = {name: value if value is None else value.unsqueeze(0) for name, value in (
            ("pre_add", pre_add), ("post_add", post_add))}
        output = channel_norm(input.unsqueeze(0), weight, bias, groups=groups, statistics=statistics, eps=eps,
                              eps_kind=eps_kind, activation=activation, act_param=act_param, slope=slope,
                              pre_bias=pre_bias, return_sum=return_sum, scale=scale, shift=shift, dtype=dtype, **given)
        return (output[0].squeeze(0), output[1].squeeze(0)) if return_sum else output.squeeze(0)
    moves = dim != 1 and axes > 2
    if moves:
        input, pre_add, post_add, pre_bias, scale, shift = (
            _channels_second(t) if t is not None and t.dim() == axes else t for t in (
                input, pre_add, post_add, pre_bias, scale, shift))
    type_of_y = None
    try:
        number, parameter = _activation(activation, act_param)
        statistics_number = _word("statistics", statistics, STATISTICS)
        eps_number = _word("eps_kind", eps_kind, EPS_KINDS)
        type_of_y = _result_type(input, dtype)
        pre_add, post_add = _additions(input, pre_bias, pre_add, return_sum, post_add, type_of_y)
        scale, shift, pre_bias = _per_sample(scale), _per_sample(shift), _per_sample(pre_bias)
        output = _run_or_infer("channel_norm", "channel_norm_inference", return_sum,
                               (input, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps,
                                statistics_number, eps_number, number, parameter, Y_DTYPES.index(type_of_y),
                                channels_last))
    except (RuntimeError, TypeError, ValueError, KeyError):
        _check_activation(activation)
        _checks.channel_norm(input, weight, bias, scale, shift, pre_bias, pre_add, post_add, groups, type_of_y)
        _checks.slope(input, slope, activation)
        raise
    if not moves:
        return output
    return (output[0].movedim(1, -1), output[1].movedim(1, -1)) if return_sum else output.movedim(1, -1)

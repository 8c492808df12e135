# SPDX-License-Identifier: MIT
"""Gradients of the operators, to any order.

The first derivative is a backward operator. Where that must be differentiated itself (``create_graph=True``), a
composite formula of torch's own operators takes its place, as torch's own norms do it. Saved for the backward are the
normalized tensor (x, or the sum that was written; of x with pre_bias alone x: it is a part of the mean), mean and
rstd, and the parameters; with post_add and an activation also what the derivative of the activation is made of: y,
where that is enough, or post_add.
"""

from __future__ import annotations

import functools
from typing import Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch._functorch.utils import enable_single_level_autograd_function

from . import _decompositions, _operators
from ._decompositions import activate, activate_backward, added, wide, wide_beside
from ._operators import (EPS_OF_NORM, FROM_U, FROM_Y, MEAN_SQUARE, WANT_BIAS, WANT_POST_ADD, WANT_PRE_BIAS,
                         WANT_SCALE, WANT_SHIFT, WANT_SLOPE, WANT_WEIGHT, WANT_X, ops, straight, writes_u, y_type)

_below_autograd = torch._C._AutoDispatchBelowAutograd
_functorch_is_active = torch._C._are_functorch_transforms_active
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled

# ---- composite formulas ----------------------------------------------------------------------------------------------


def _composite_z(u, weight, bias, scale, shift, post_add, moments):
    """The activation's argument [N, C, S], (u - mean)*rstd, what `moments` gives, and weight, bias, 1 + scale as they
    multiply [N, C, S]. `moments(x)` gives mean and rstd, to be broadcast to [N, C, S], after a function: it takes from
    a gradient of the normalized values, which it is given as well, what goes through the statistics (None: they are
    given, or there are none)."""
    flat = (u.shape[0], u.shape[1], -1) if u.numel() else (u.shape[0], u.shape[1], 0)
    x = wide(u).reshape(flat)

    def per_channel(parameter, default):
        if parameter is None:
            return default
        return wide_beside(x, parameter).reshape((1, -1, 1) if parameter.dim() == 1 else (*parameter.shape, 1))

    w, b = per_channel(weight, 1.0), per_channel(bias, 0.0)
    one_and_scale = 1.0 + per_channel(scale, 0.0)
    statistics = moments(x)
    normalized = (x - statistics[1]) * statistics[2]
    z = (normalized * w + b) * one_and_scale + per_channel(shift, 0.0)
    if post_add is not None:
        z = z + wide(post_add).reshape(flat)
    return z, normalized, statistics, (w, b, one_and_scale)


def pre_bias_gradient(dx, pre_bias):
    """The sum of dx over what shares the bias."""
    axes = (*range(2 - pre_bias.dim()), *range(2, dx.dim()))
    return (wide(dx).sum(axes) if axes else dx).to(pre_bias.dtype)


def _composite(dy, du, u, weight, bias, scale, shift, pre_bias, post_add, slope, activation, act_param, moments,
               bits=0, rounds=False):
    """dx, dweight, dbias, dscale, dshift, dpost_add, dpre_bias, dslope out of differentiable operations. bits: FROM_Y,
    FROM_U, and WANT_PRE_BIAS. rounds: does pre_bias alone round its sum?"""
    shape, dtype = u.shape, u.dtype
    if not bits & FROM_U:
        u = added(u, pre_bias, None, rounds)
    z, normalized, (without, _, rstd), (w, b, one_and_scale) = _composite_z(
        u, weight, bias, scale, shift, None if bits & FROM_Y else post_add, moments)
    if bits & FROM_Y:
        z = wide(post_add.detach()).reshape(z.shape)  # the derivative is constant but for kinks
    y_dtype, dy = dy.dtype, wide(dy).reshape(z.shape)
    dz = activate_backward(dy, z, activation, act_param, slope)
    toward = dz * (w * one_and_scale)
    if without is not None:
        toward = without(toward, normalized)
    dx = (toward * rstd).reshape(shape)
    if du is not None:
        dx = dx + wide(du)
    sums, sums_of_products = dz.sum(2, keepdim=True), (dz * normalized).sum(2, keepdim=True)

    def gradient(value, parameter):
        if parameter is None:
            return None
        value = value.sum(0) if parameter.dim() == 1 else value
        return value.expand(*value.shape[:-2], shape[1], 1).reshape(parameter.shape).to(parameter.dtype)

    dx = dx.to(dtype)
    dslope = None if slope is None else (dy * z.clamp(max=0)).sum((0, 2)).sum_to_size(slope.shape).to(slope.dtype)
    return (dx, gradient(one_and_scale * sums_of_products, weight), gradient(one_and_scale * sums, bias),
            gradient(w * sums_of_products + b * sums, scale), gradient(sums, shift),
            None if post_add is None else dz.reshape(shape).to(y_dtype),
            pre_bias_gradient(dx, pre_bias) if bits & WANT_PRE_BIAS else None, dslope)


def _composite_forward(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, activation, act_param,
                       return_sum, moments, y_dtype=None):
    """y and u (or None) out of differentiable operations, for forward-mode derivatives. y_dtype: None for x's."""
    u = added(x, pre_bias, pre_add, return_sum)
    z, _, _, _ = _composite_z(u, weight, bias, scale, shift, post_add, moments)
    y = activate(z, activation, act_param, slope).reshape(x.shape).to(x.dtype if y_dtype is None else y_dtype)
    return y, u if writes_u(pre_bias, pre_add, return_sum) else None


def _group_average(groups):
    def average(x):
        n, c, s = x.shape
        m = x.reshape(n, groups, -1).mean(2, keepdim=True) if x.numel() else x.new_zeros(n, groups, 1)
        return m.expand(n, groups, c // groups).reshape(n, c, 1)

    return average


def _batch_average(x):
    return x.mean((0, 2), keepdim=True)


def _given_moments(running_mean, running_var, eps):
    def moments(x):
        mean, variance = (t.to(x.dtype).reshape(1, -1, 1) for t in (running_mean, running_var))
        return None, mean, (variance + eps).rsqrt()

    return moments


def _moments_of(average, eps):
    def without(g, h):
        return g - average(g) - h * average(g * h)

    def moments(x):
        mean = average(x)
        return without, mean, (average((x - mean).square()) + eps).rsqrt()

    return moments


def _moments_of_positions(groups, eps, statistics, eps_kind):
    def average(x):
        n, c, s = x.shape
        if groups == 1:
            return x.mean(1, keepdim=True)
        return x.reshape(n, groups, -1, s).mean(2, keepdim=True).expand(n, groups, c // groups, s).reshape(n, c, s)

    def moments(x):
        n, c, s = x.shape
        mean = 0.0 if statistics == MEAN_SQUARE else average(x)
        values, free = x - mean, 1.0
        if eps_kind == EPS_OF_NORM:
            each = c // groups
            norm = torch.linalg.vector_norm(values.reshape(n, groups, each, s), dim=2, keepdim=True)
            norm = norm.expand(n, groups, each, s).reshape(n, c, s)
            rstd = each ** 0.5 / norm.clamp_min(eps)
            free = (norm > eps).to(x.dtype)  # a norm that was clamped makes rstd a constant
        else:
            rstd = (average(values.square()) + eps).rsqrt()

        def without(g, h):
            rest = g - h * (average(g * h) * free)
            return rest if statistics == MEAN_SQUARE else rest - average(g)

        return without, mean, rstd

    return moments


def _composite_group_norm(dy, du, u, mean, rstd, weight, bias, scale, shift, pre_bias, post_add, slope, groups, eps,
                          activation, act_param, wanted):
    return _composite(dy, du, u, weight, bias, scale, shift, pre_bias, post_add, slope, activation, act_param,
                      _moments_of(_group_average(groups), eps), wanted)


def _composite_channel_norm(dy, du, u, mean, rstd, weight, bias, scale, shift, pre_bias, post_add, slope, groups, eps,
                            statistics, eps_kind, activation, act_param, wanted):
    return _composite(dy, du, u, weight, bias, scale, shift, pre_bias, post_add, slope, activation, act_param,
                      _moments_of_positions(groups, eps, statistics, eps_kind), wanted, rounds=True)


def _composite_batch_norm(dy, du, u, mean, rstd, weight, bias, pre_bias, post_add, slope, eps, activation, act_param,
                          wanted):
    gradients = _composite(dy, du, u, weight, bias, None, None, pre_bias, post_add, slope, activation, act_param,
                           _moments_of(_batch_average, eps), wanted)
    return (*gradients[:3], *gradients[5:])


def _composite_batch_norm_evaluate(dy, du, u, running_mean, running_var, weight, bias, pre_bias, post_add, slope, eps,
                                   activation, act_param, wanted):
    gradients = _composite(dy, du, u, weight, bias, None, None, pre_bias, post_add, slope, activation, act_param,
                           _given_moments(running_mean, running_var, eps), wanted)
    return (*gradients[:3], *gradients[5:])


def _no_moments(x):
    return None, 0.0, 1.0


def _composite_channel_affine(dy, x, scale, bias, post_add, slope, activation, act_param, wanted):
    gradients = _composite(dy, None, x, scale, bias, None, None, None, post_add, slope, activation, act_param,
                           _no_moments, wanted)
    return (*gradients[:3], gradients[5], gradients[7])


# Forward-mode derivatives: y and u of each forward operator.


def _forward_group_norm(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps, activation,
                        act_param, return_sum):
    return _composite_forward(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, activation, act_param,
                              return_sum, _moments_of(_group_average(groups), eps))


def _forward_channel_norm(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps, statistics,
                          eps_kind, activation, act_param, y_dtype, channels_last, return_sum):
    y, u = _composite_forward(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, activation, act_param,
                              return_sum, _moments_of_positions(groups, eps, statistics, eps_kind), y_type(y_dtype))
    return y.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else y, u


def _forward_instance_norm(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, momentum,
                           eps, activation, act_param, return_sum):
    return _composite_forward(x, weight, bias, None, None, pre_bias, pre_add, post_add, slope, activation, act_param,
                              return_sum, _moments_of(_group_average(x.shape[1]), eps))


def _forward_batch_norm(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, momentum, eps,
                        activation, act_param, return_sum):
    return _composite_forward(x, weight, bias, None, None, pre_bias, pre_add, post_add, slope, activation, act_param,
                              return_sum, _moments_of(_batch_average, eps))


def _forward_batch_norm_evaluate(x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, eps,
                                 activation, act_param, return_sum):
    return _composite_forward(x, weight, bias, None, None, pre_bias, pre_add, post_add, slope, activation, act_param,
                              return_sum, _given_moments(running_mean, running_var, eps))


def _forward_channel_affine(x, scale, bias, post_add, slope, activation, act_param):
    return _composite_forward(x, scale, bias, None, None, None, None, post_add, slope, activation, act_param, False,
                              _no_moments)[:1]


# ---- first derivatives -----------------------------------------------------------------------------------------------


eager = functools.cache(straight)  # is called below autograd, where no other code of Python looks at arguments


def _call(name, *args):
    """Runs an operator; its own derivative is only of interest where this backward is being recorded."""
    if _is_dynamo_compiling() or _is_grad_enabled() or _functorch_is_active() or forward_ad._current_level >= 0:
        return getattr(ops, name).default(*args)
    with _below_autograd():
        return eager(name)(*args)


def saved_for_activation(post_add, y, activation, act_param):
    """The tensor that the backward takes as post_add, and FROM_Y where that is y: of relu, leaky_relu and relu6, as
    torch's own save their result, so that what was added may be overwritten."""
    if post_add is None or activation == 0:  # without an activation dpost_add is dy itself
        return None, 0
    if activation in (1, 9) or (activation == 2 and act_param > 0):
        return y, FROM_Y
    return post_add, 0


def _save(ctx, x, u, statistics, parameters, pre_bias, pre_add, post_add, slope, y, return_sum):
    """Saves the common part of all norms: the normalized tensor, and ctx.bits for what the saved tensors are."""
    has_u = writes_u(pre_bias, pre_add, return_sum)
    post_add, from_y = saved_for_activation(post_add, y, ctx.activation, ctx.act_param)
    ctx.bits = from_y | (FROM_U if has_u else 0)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(u if has_u else x, *statistics, *parameters, pre_bias, post_add, slope)
    return () if has_u else (u,)  # no derivative


def _wanted(x_needs, weight_needs, bias_needs, pre_bias_needs, pre_add_needs, slope_needs):
    return (WANT_X if x_needs or pre_add_needs or pre_bias_needs else 0) | (WANT_WEIGHT if weight_needs else 0) | \
        (WANT_BIAS if bias_needs else 0) | (WANT_PRE_BIAS if pre_bias_needs else 0) | (WANT_SLOPE if slope_needs else 0)


def _of_sum_alone(ctx, du, pre_bias_needs, pre_add_needs):
    """The gradients of x, pre_bias and pre_add where y has none."""
    of_bias = du is not None and pre_bias_needs
    return (du, pre_bias_gradient(du, ctx.saved_tensors[-3]) if of_bias else None, du if pre_add_needs else None)


def _gradients_of_samples(operator, others):
    """The backward of a norm whose parameters may be of samples. others: how many of its arguments are no tensors."""

    def backward(ctx, dy, du=None, dmean=None, drstd=None):
        (x_needs, weight_needs, bias_needs, scale_needs, shift_needs, pre_bias_needs, pre_add_needs,
         post_add_needs, slope_needs) = ctx.needs_input_grad[:9]
        if dy is None:
            dx, dpre_bias, dpre_add = _of_sum_alone(ctx, du, pre_bias_needs, pre_add_needs)
            return dx, None, None, None, None, dpre_bias, dpre_add, None, None, *(None,) * others
        wanted = _wanted(x_needs, weight_needs, bias_needs, pre_bias_needs, pre_add_needs, slope_needs) | \
            (WANT_SCALE if scale_needs else 0) | (WANT_SHIFT if shift_needs else 0)
        activation = ctx.activation
        if post_add_needs and activation:
            wanted |= WANT_POST_ADD
        dx, dweight, dbias, dscale, dshift, dpost_add, dpre_bias, dslope = _call(
            operator, dy, du, *ctx.saved_tensors, *ctx.numbers, activation, ctx.act_param,
            wanted | ctx.bits) if wanted else (None,) * 8
        return (dx if x_needs else None, dweight if weight_needs else None, dbias if bias_needs else None,
                dscale if scale_needs else None, dshift if shift_needs else None,
                dpre_bias if pre_bias_needs else None, dx if pre_add_needs else None,
                (dpost_add if activation else dy) if post_add_needs else None, dslope if slope_needs else None,
                *(None,) * others)

    return backward


class _GroupNormBackward:
    """Also of instance norm with running statistics, whose groups are channels."""

    @staticmethod
    def save(ctx, inputs, outputs):
        (x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, groups, eps, ctx.activation,
         ctx.act_param, return_sum) = inputs
        ctx.numbers = groups, eps
        y, u, mean, rstd = outputs
        fixed = _save(ctx, x, u, (mean, rstd), (weight, bias, scale, shift), pre_bias, pre_add, post_add, slope, y,
                      return_sum)
        return *fixed, mean, rstd

    backward = staticmethod(_gradients_of_samples("group_norm_backward", 5))


class _ChannelNormBackward:
    @staticmethod
    def save(ctx, inputs, outputs):
        (x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, *numbers, ctx.activation, ctx.act_param, _,
         _, return_sum) = inputs
        ctx.numbers = tuple(numbers)
        y, u, mean, rstd = outputs
        fixed = _save(ctx, x, u, (None if numbers[2] == MEAN_SQUARE else mean, rstd), (weight, bias, scale, shift),
                      pre_bias, pre_add, post_add, slope, y, return_sum)
        return *fixed, mean, rstd

    backward = staticmethod(_gradients_of_samples("channel_norm_backward", 9))


class _InstanceNormBackward:
    @staticmethod
    def save(ctx, inputs, outputs):
        (x, weight, bias, _, _, pre_bias, pre_add, post_add, slope, _, eps, ctx.activation, ctx.act_param,
         return_sum) = inputs
        y, u, mean, rstd = outputs
        ctx.numbers = x.shape[1], eps
        fixed = _save(ctx, x, u, (mean, rstd), (weight, bias, None, None), pre_bias, pre_add, post_add, slope, y,
                      return_sum)
        return *fixed, mean, rstd

    backward = _GroupNormBackward.backward


def _batch_norm_gradients(ctx, op, dy, du):
    """In the order of batch_norm's nine tensors."""
    (x_needs, weight_needs, bias_needs, _, _, pre_bias_needs, pre_add_needs, post_add_needs,
     slope_needs) = ctx.needs_input_grad[:9]
    if dy is None:
        dx, dpre_bias, dpre_add = _of_sum_alone(ctx, du, pre_bias_needs, pre_add_needs)
        return dx, None, None, None, None, dpre_bias, dpre_add, None, None
    wanted = _wanted(x_needs, weight_needs, bias_needs, pre_bias_needs, pre_add_needs, slope_needs)
    activation = ctx.activation
    if post_add_needs and activation:
        wanted |= WANT_POST_ADD
    dx, dweight, dbias, dpost_add, dpre_bias, dslope = _call(
        op, dy, du, *ctx.saved_tensors, ctx.eps, activation, ctx.act_param, wanted | ctx.bits) if wanted else \
        (None,) * 6
    return (dx if x_needs else None, dweight if weight_needs else None, dbias if bias_needs else None, None, None,
            dpre_bias if pre_bias_needs else None, dx if pre_add_needs else None,
            (dpost_add if activation else dy) if post_add_needs else None, dslope if slope_needs else None)


class _BatchNormBackward:
    @staticmethod
    def save(ctx, inputs, outputs):
        (x, weight, bias, _, _, pre_bias, pre_add, post_add, slope, _, ctx.eps, ctx.activation, ctx.act_param,
         return_sum) = inputs
        y, u, mean, rstd = outputs
        fixed = _save(ctx, x, u, (mean, rstd), (weight, bias), pre_bias, pre_add, post_add, slope, y, return_sum)
        return *fixed, mean, rstd

    @staticmethod
    def backward(ctx, dy, du=None, dmean=None, drstd=None):
        return (*_batch_norm_gradients(ctx, "batch_norm_backward", dy, du), *(None,) * 5)


class _BatchNormEvaluateBackward:
    @staticmethod
    def save(ctx, inputs, outputs):
        (x, weight, bias, running_mean, running_var, pre_bias, pre_add, post_add, slope, ctx.eps, ctx.activation,
         ctx.act_param, return_sum) = inputs
        y, u = outputs
        return _save(ctx, x, u, (running_mean, running_var), (weight, bias), pre_bias, pre_add, post_add, slope, y,
                     return_sum)

    @staticmethod
    def backward(ctx, dy, du=None):
        return (*_batch_norm_gradients(ctx, "batch_norm_evaluate_backward", dy, du), *(None,) * 4)


class _ChannelAffineBackward:
    @staticmethod
    def save(ctx, inputs, outputs):
        x, scale, bias, post_add, slope, ctx.activation, ctx.act_param = inputs
        post_add, ctx.from_y = saved_for_activation(post_add, outputs, ctx.activation, ctx.act_param)
        ctx.is_sum = scale is None and ctx.activation == 0
        if ctx.is_sum:  # as torch's additions, it keeps no tensor
            ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        else:
            ctx.save_for_backward(x, scale, bias, post_add, slope)
        return ()

    @staticmethod
    def backward(ctx, dy):
        x_needs, scale_needs, bias_needs, post_add_needs, slope_needs = ctx.needs_input_grad[:5]
        if ctx.is_sum:
            shape, dtype = ctx.bias if bias_needs else (None, None)
            dbias = _call("channel_affine_backward", dy, dy, None, dy.new_empty(shape, dtype=dtype), None,
                          None, 0, 0.0, WANT_BIAS)[2] if bias_needs else None
            return dy if x_needs else None, None, dbias, dy if post_add_needs else None, None, None, None
        wanted = _wanted(x_needs, scale_needs, bias_needs, False, False, slope_needs)
        activation = ctx.activation
        if post_add_needs and activation:
            wanted |= WANT_POST_ADD
        dx, dscale, dbias, dpost_add, dslope = _call(
            "channel_affine_backward", dy, *ctx.saved_tensors, activation, ctx.act_param,
            wanted | ctx.from_y) if wanted else (None,) * 5
        return (dx if x_needs else None, dscale if scale_needs else None, dbias if bias_needs else None,
                (dpost_add if activation else dy) if post_add_needs else None, dslope if slope_needs else None, None,
                None)


def _function(op, backward):
    def forward(ctx, *args):
        if _functorch_is_active():
            # The levels below take derivatives of their own, which a Function's forward has switched off.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), _below_autograd():
                outputs = op(*args)
        else:
            with _below_autograd():
                outputs = op(*args)
        ctx.mark_non_differentiable(*backward.save(ctx, args, outputs))
        return outputs

    return _made(op._opname, forward, backward)


def _eager_function(name, backward):
    """The same for calls that nobody looks on. It gives y, and u where return_sum, the last argument, asks for it or
    the backward takes it, whose own derivative goes through u then: each output more would cost a microsecond."""
    op = straight(name)

    def forward(ctx, *args):
        with _below_autograd():
            outputs = op(*args)
        fixed = backward.save(ctx, args, outputs)
        if isinstance(outputs, Tensor):
            return outputs
        if fixed and fixed[0] is outputs[1]:
            if not args[-1]:
                return outputs[0]
            ctx.mark_non_differentiable(outputs[1])
        return outputs[:2]

    function = _made(name, forward, backward)
    function._backward_cls.apply = function.backward  # as in _straight
    return function.apply


def _made(name, forward, backward):
    # Without the look for torch.func's levels that autograd.Function.apply takes: the dispatcher has gone through them
    # before it calls an autograd kernel, and the eager path is taken where there are none.
    return type(name, (torch.autograd.function._SingleLevelFunction,),
                {"forward": staticmethod(forward), "backward": staticmethod(backward.backward),
                 "_compiled_autograd_key": staticmethod(torch.autograd.Function._compiled_autograd_key)})


def _requires_grad(args) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


def _has_tangent(args) -> bool:
    """True if a forward-mode derivative is being taken of any of them."""
    return forward_ad._current_level >= 0 and any(
        isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in args)


def _register_kernel(name: str, kernel) -> None:
    formula = _decompositions.formulas[name]

    def kernel_or_formula(*args):
        return formula(*args) if _decompositions.is_decomposing() else kernel(*args)

    _operators._library.impl(name, kernel_or_formula, "Autograd")


def _register_forward(name: str, backward, composite):
    op = getattr(ops, name).default
    function = _function(op, backward)

    def kernel(*args):
        if _has_tangent(args):
            with _below_autograd():  # for what has no derivative, running statistics among it
                outputs = op(*(value.detach() if isinstance(value, Tensor) else value for value in args))
            if isinstance(outputs, Tensor):
                return composite(*args)[0]
            y, u = composite(*args)
            return (y, outputs[1] if u is None else u, *outputs[2:])
        if _requires_grad(args):
            if _functorch_is_active():
                with enable_single_level_autograd_function():
                    return function.apply(*args)
            return function.apply(*args)
        with _below_autograd():
            return op(*args)

    _register_kernel(name, kernel)
    return _eager_function(name, backward)


def _register_inference(name: str, differentiable: str) -> None:
    """An operator that saves nothing: where a derivative is asked for it is another one's first output."""
    op, other = getattr(ops, name).default, getattr(ops, differentiable).default

    def kernel(*args):
        if _requires_grad(args) or _has_tangent(args):
            return other(*args, False)[0]
        with _below_autograd():
            return op(*args)

    _register_kernel(name, kernel)


def _register_backward(name: str, composite) -> None:
    op = getattr(ops, name).default

    def kernel(*args):
        if not _requires_grad(args) and not _has_tangent(args):
            with _below_autograd():
                return op(*args)
        like = args[2] if name != "channel_affine_backward" else args[1]
        return tuple(like.new_empty(0) if gradient is None else gradient for gradient in composite(*args))

    _operators._library.impl(name, kernel, "Autograd")


group_norm = _register_forward("group_norm", _GroupNormBackward, _forward_group_norm)
channel_norm = _register_forward("channel_norm", _ChannelNormBackward, _forward_channel_norm)
instance_norm = _register_forward("instance_norm", _InstanceNormBackward, _forward_instance_norm)
batch_norm = _register_forward("batch_norm", _BatchNormBackward, _forward_batch_norm)
_register_forward("batch_norm_unannotated", _BatchNormBackward, _forward_batch_norm)
_register_forward("instance_norm_unannotated", _InstanceNormBackward, _forward_instance_norm)
batch_norm_evaluate = _register_forward("batch_norm_evaluate", _BatchNormEvaluateBackward, _forward_batch_norm_evaluate)
channel_affine = _register_forward("channel_affine", _ChannelAffineBackward, _forward_channel_affine)
_register_inference("group_norm_inference", "group_norm")
_register_inference("channel_norm_inference", "channel_norm")
_register_inference("batch_norm_inference", "batch_norm_evaluate")
_register_backward("group_norm_backward", _composite_group_norm)
_register_backward("channel_norm_backward", _composite_channel_norm)
_register_backward("batch_norm_backward", _composite_batch_norm)
_register_backward("batch_norm_evaluate_backward", _composite_batch_norm_evaluate)
_register_backward("channel_affine_backward", _composite_channel_affine)


# ---- the eager path --------------------------------------------------------------------------------------------------

_lean_group_norm = straight("lean_group_norm")
_lean_group_norm_backward = straight("lean_group_norm_backward")
_lean_batch_norm = straight("lean_batch_norm")
_lean_batch_norm_add = straight("lean_batch_norm_add")
_lean_batch_norm_inference = straight("lean_batch_norm_inference")
_lean_batch_norm_backward = straight("lean_batch_norm_backward")
_lean_batch_norm_add_backward = straight("lean_batch_norm_add_backward")
_lean_batch_norm_evaluate_backward = straight("lean_batch_norm_evaluate_backward")

_WANT_ALL = WANT_X | WANT_WEIGHT | WANT_BIAS
# `wanted` by needs_input_grad of x, weight, bias and what is no tensor.
_WANTED = {(bool(bits & WANT_X), bool(bits & WANT_WEIGHT), bool(bits & WANT_BIAS), False): bits
           for bits in range(_WANT_ALL + 1)}

# These are called for every layer of every step, and their host time is counted in tenths of a microsecond: ctx.to_save
# is what save_for_backward sets, and a tuple is not taken apart where it may be passed on.
# Compiled autograd traces the backwards, and Dynamo knows operators by their names in torch.ops alone.


def _only(wanted, dx, dweight, dbias):
    return (dx if wanted & WANT_X else None, dweight if wanted & WANT_WEIGHT else None,
            dbias if wanted & WANT_BIAS else None, None)


class lean_group_norm(torch.autograd.Function):
    """group_norm(x, weight, bias, (groups, eps, activation, act_param)) with one output."""

    @staticmethod
    def forward(ctx, x, weight, bias, numbers):
        y, mean, rstd = _lean_group_norm(x, weight, bias, *numbers)
        ctx.to_save = x, mean, rstd, weight, bias
        ctx.numbers = numbers
        return y

    @staticmethod
    def backward(ctx, dy):
        wanted = _WANTED[ctx.needs_input_grad]
        groups, eps, activation, act_param = ctx.numbers
        if _is_grad_enabled() or forward_ad._current_level >= 0:
            x, mean, rstd, weight, bias = ctx.saved_tensors
            dx, dweight, dbias, *_ = ops.group_norm_backward.default(
                dy, None, x, mean, rstd, weight, bias, *(None,) * 5, groups, eps, activation, act_param, wanted)
            return _only(wanted, dx, dweight, dbias)
        gradients = (ops.lean_group_norm_backward.default if _is_dynamo_compiling() else _lean_group_norm_backward)(
            dy, *ctx.saved_tensors, groups, activation, act_param, wanted)
        return (*gradients, None) if wanted == _WANT_ALL else _only(wanted, *gradients)


class lean_batch_norm(torch.autograd.Function):
    """batch_norm(x, weight, bias, (running_mean, running_var, momentum, eps, activation, act_param)) with one
    output."""

    @staticmethod
    def forward(ctx, x, weight, bias, others):
        y, mean, rstd = _lean_batch_norm(x, weight, bias, *others)
        ctx.to_save = x, mean, rstd, weight, bias
        ctx.numbers = others[3:]
        return y

    @staticmethod
    def backward(ctx, dy):
        wanted = _WANTED[ctx.needs_input_grad]
        eps, activation, act_param = ctx.numbers
        if _is_grad_enabled() or forward_ad._current_level >= 0:
            x, mean, rstd, weight, bias = ctx.saved_tensors
            dx, dweight, dbias, *_ = ops.batch_norm_backward.default(dy, None, x, mean, rstd, weight, bias, None, None,
                                                                     None, eps, activation, act_param, wanted)
            return _only(wanted, dx, dweight, dbias)
        gradients = (ops.lean_batch_norm_backward.default if _is_dynamo_compiling() else _lean_batch_norm_backward)(
            dy, *ctx.saved_tensors, activation, act_param, wanted)
        return (*gradients, None) if wanted == _WANT_ALL else _only(wanted, *gradients)


class lean_batch_norm_add(torch.autograd.Function):
    """batch_norm(x, weight, bias, post_add, (running_mean, running_var, momentum, eps, activation, act_param)) with one
    output, and an activation."""

    @staticmethod
    def forward(ctx, x, weight, bias, post_add, others):
        y, mean, rstd = _lean_batch_norm_add(x, weight, bias, post_add, *others)
        ctx.numbers = others[3:]
        saved, ctx.from_y = saved_for_activation(post_add, y, *others[4:])
        ctx.to_save = x, mean, rstd, weight, bias, saved
        return y

    @staticmethod
    def backward(ctx, dy):
        x_needs, weight_needs, bias_needs, post_add_needs, _ = ctx.needs_input_grad
        eps, activation, act_param = ctx.numbers
        wanted = _WANTED[x_needs, weight_needs, bias_needs, False] | (WANT_POST_ADD if post_add_needs else 0)
        if _is_grad_enabled() or forward_ad._current_level >= 0:
            *norm, post_add = ctx.saved_tensors
            dx, dweight, dbias, dpost_add, *_ = ops.batch_norm_backward.default(
                dy, None, *norm, None, post_add, None, eps, activation, act_param, wanted | ctx.from_y)
        else:
            backward = (ops.lean_batch_norm_add_backward.default if _is_dynamo_compiling() else
                        _lean_batch_norm_add_backward)
            dx, dweight, dbias, dpost_add = backward(dy, *ctx.saved_tensors, activation, act_param, wanted | ctx.from_y)
        return (dx if x_needs else None, dweight if weight_needs else None, dbias if bias_needs else None,
                dpost_add if post_add_needs else None, None)


class lean_batch_norm_evaluate(torch.autograd.Function):
    """batch_norm_evaluate(x, weight, bias, (running_mean, running_var, eps, activation, act_param)) with one
    output."""

    @staticmethod
    def forward(ctx, x, weight, bias, others):
        ctx.to_save = x, others[0], others[1], weight, bias
        ctx.numbers = others[2:]
        return _lean_batch_norm_inference(x, weight, bias, *others)

    @staticmethod
    def backward(ctx, dy):
        wanted = _WANTED[ctx.needs_input_grad]
        if _is_grad_enabled() or forward_ad._current_level >= 0:
            x, mean, var, weight, bias = ctx.saved_tensors
            dx, dweight, dbias, *_ = ops.batch_norm_evaluate_backward.default(
                dy, None, x, mean, var, weight, bias, None, None, None, *ctx.numbers, wanted)
            return _only(wanted, dx, dweight, dbias)
        backward = (ops.lean_batch_norm_evaluate_backward.default if _is_dynamo_compiling() else
                    _lean_batch_norm_evaluate_backward)
        gradients = backward(dy, *ctx.saved_tensors, *ctx.numbers, wanted)
        return (*gradients, None) if wanted == _WANT_ALL else _only(wanted, *gradients)


def _straight(function):
    """`function.apply` for callers who know that no transformation of torch.func is active, and have called
    unwrap_if_dead: the rest of what Function.apply does then, without its search for a setup_context. On the way back
    likewise: without the search for a vjp."""
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply


apply_lean_group_norm = _straight(lean_group_norm)
apply_lean_batch_norm = _straight(lean_batch_norm)
apply_lean_batch_norm_add = _straight(lean_batch_norm_add)
apply_lean_batch_norm_evaluate = _straight(lean_batch_norm_evaluate)

# SPDX-License-Identifier: MIT
"""The operators as differentiable functions of a dict of arrays: forward and backward are calls of the library, the
backward of the backward is JAX's, of the formula in jax.numpy."""
from __future__ import annotations

import functools
import math
from typing import Any, Dict, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .. import _library
from ._call import Axes, Call, index_along, ordered, run, synchronized, varying_of

Arrays = Dict[str, Any]


class Settings(NamedTuple):
    """The static part of an operator's call."""
    operator: str  # of _call.Call
    channels_last: bool
    groups: int
    eps: float
    momentum: float
    flags: int
    activation: int
    act_param: float
    return_sum: bool
    axes: Axes  # batch norm: those whose devices share the statistics
    statistics: int = 0  # channel norm
    eps_kind: int = 0
    y_dtype: str = ""  # "": that of x

    @property
    def has_mean(self) -> bool:
        return self.statistics == _library.STATISTICS["mean_and_variance"]


def _call(settings: Settings, direction: str, arrays: Arrays, outputs: Any, index: Any) -> Arrays:
    call = Call(f"{settings.operator}_{direction}", ordered(arrays), ordered(outputs), settings.channels_last,
                settings.groups, settings.eps, settings.momentum, settings.flags, settings.activation,
                settings.act_param, statistics=settings.statistics, eps_kind=settings.eps_kind,
                y_dtype=settings.y_dtype)
    return synchronized(call, arrays, settings.axes, index) if settings.axes else run(call, arrays)


def _trains(settings: Settings) -> bool:
    return settings.operator != "affine" and not settings.flags & _library.EVALUATE


def _forward(settings: Settings, arrays: Arrays, saves: bool) -> Arrays:
    outputs = {"y"}
    if settings.return_sum:
        outputs.add("u")
    if _trains(settings):
        outputs |= {"running_mean", "running_var"} & set(arrays)
        if saves or settings.axes:
            outputs |= {"mean", "rstd"} if settings.has_mean else {"rstd"}
    return _call(settings, "forward", arrays, outputs, index_along(settings.axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply(settings: Settings, arrays: Arrays) -> Arrays:
    """y, u if settings.return_sum, and running statistics where they are updated. Those have no gradient."""
    made = _forward(settings, arrays, False)
    return {name: made[name] for name in made if name not in ("mean", "rstd")}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply_and_save(settings: Settings, arrays: Arrays) -> Arrays:
    """The same with mean and rstd, for the backward. A function of its own, since it is differentiated again where
    gradients of gradients are; `backward` then knows how mean and rstd depend on x."""
    return _forward(settings, arrays, True)


def _apply_forward(settings: Settings, given: Any) -> Any:
    arrays = {name: primal.value for name, primal in given.items()}
    made = _apply_and_save(settings, arrays)
    saved = {name: made[name] for name in ("mean", "rstd") if name in made}
    kept = {name: value for name, value in arrays.items()
            if not name.startswith("running") or not _trains(settings)}
    if settings.return_sum:  # what was normalized is u, rounded, and pre_bias is the shape of its gradient alone
        kept["x"] = made["u"]
        kept.pop("pre_add", None)
    bias_of_u = kept.pop("pre_bias", None) if settings.return_sum else None
    # Keys of dicts are static.
    wanted = {name: () for name, primal in given.items() if primal.perturbed and not name.startswith("running")}
    made = {name: made[name] for name in made if name not in saved}
    if settings.axes:  # which is not to be had in every backward
        saved = {**saved, "index": index_along(settings.axes)}
    return made, (kept, saved, wanted, dict.fromkeys(arrays, ()), bias_of_u)


def _save_forward(settings: Settings, given: Any) -> Any:
    made, residuals = _apply_forward(settings, given)
    return {**made, **{name: value for name, value in residuals[1].items() if name != "index"}}, residuals


def _bias_gradient(settings: Settings, dx: Any, pre_bias: Any) -> Any:
    """The sum of dx, of what the library was given u for."""
    channel = dx.ndim - 1 if settings.channels_last else 1
    shared = tuple(a for a in range(dx.ndim) if a != channel and (a > 0 or pre_bias.ndim == 1))
    return jnp.sum(dx.astype(jnp.promote_types(dx.dtype, jnp.float32)), shared).astype(pre_bias.dtype)


def _apply_backward(settings: Settings, residuals: Any, cotangents: Arrays) -> Any:
    kept, saved, wanted, names, bias_of_u = residuals
    given = {"d" + name: cotangents[name] for name in ("y", "u")
             if name in cotangents and not isinstance(cotangents[name], SymbolicZero)}
    if "dy" not in given:
        given["dy"] = jnp.zeros(kept["x"].shape, settings.y_dtype or kept["x"].dtype)
    of_dx = {"x", "pre_add"} if bias_of_u is None else {"x", "pre_add", "pre_bias"}
    outputs = {"d" + name for name in wanted if name not in of_dx}
    if {"x", "pre_add", "pre_bias"} & set(wanted):
        outputs.add("dx")
    else:
        given.pop("du", None)
    made = backward(settings, ordered(outputs), kept, saved, given) if outputs else {}
    if "dx" in made:
        made["dpre_add"] = made["dx"]
        if bias_of_u is not None and "pre_bias" in wanted:
            made["dpre_bias"] = _bias_gradient(settings, made["dx"], bias_of_u)
    return ({name: made["d" + name] if name in wanted else None for name in names},)


apply.defvjp(_apply_forward, _apply_backward, symbolic_zeros=True)
_apply_and_save.defvjp(_save_forward, _apply_backward, symbolic_zeros=True)


# ---- the backward, which is differentiable itself --------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def backward(settings: Settings, outputs: Any, kept: Arrays, saved: Arrays, given: Arrays) -> Arrays:
    """The outputs (dx, dweight, ...) of the forward's arrays, what it saved, and dy and du."""
    statistics = {name: value for name, value in saved.items() if name != "index"}
    return _call(settings, "backward", {**kept, **statistics, **given}, outputs, saved.get("index"))


def _backward_forward(settings: Settings, outputs: Any, kept: Arrays, saved: Arrays, given: Arrays) -> Any:
    return backward(settings, outputs, kept, saved, given), (kept, saved, given)


def _backward_backward(settings: Settings, outputs: Any, residuals: Any, cotangents: Arrays) -> Any:
    kept, saved, given = residuals
    differentiable = {name: value for name, value in kept.items() if not name.startswith("running")}
    running = {name: value for name, value in kept.items() if name.startswith("running")}

    def composite(arrays: Arrays, upstream: Arrays) -> Arrays:
        targets = {"x" if name == "dx" else name[1:] for name in outputs}
        fixed = {name: value for name, value in {**arrays, **running}.items() if name not in targets}
        made, pull = jax.vjp(lambda chosen: formula(settings, {**fixed, **chosen}),
                             {name: arrays[name] for name in targets})
        zeros = jax.tree.map(jnp.zeros_like, made)
        gradients, = pull({name: upstream.get("d" + name, zeros[name]) for name in made})
        return {"dx" if name == "x" else "d" + name: value for name, value in gradients.items()}

    _, pull = jax.vjp(composite, differentiable, given)
    of_arrays, of_given = pull(cotangents)
    return ({name: of_arrays.get(name, None) for name in kept}, dict.fromkeys(saved), of_given)


backward.defvjp(_backward_forward, _backward_backward)

# The activations that are not the function of their name in jax.nn.
_ACTIVATIONS = {
    "identity": lambda z, p: z, "leaky_relu": lambda z, p: jnp.where(z > 0, z, p * z),
    "gelu": lambda z, p: jax.nn.gelu(z, approximate=False), "gelu_tanh": lambda z, p: jax.nn.gelu(z, approximate=True),
    "hardswish": lambda z, p: jax.nn.hard_swish(z),
    "elu": lambda z, p: jnp.where(z > 0, z, p * jnp.expm1(jnp.minimum(z, 0)))}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mean(axes: Axes, is_checked: bool, value: Any) -> Any:
    return jax.lax.psum(value, tuple(name for name, _ in axes)) / math.prod(size for _, size in axes)


def _mean_backward(axes: Axes, is_checked: bool, residuals: Any, gradient: Any) -> Any:
    if is_checked:
        gradient = gradient / math.prod(size for _, size in axes)
        return jax.lax.pcast(gradient, tuple(name for name, _ in axes), to="varying"),
    return _mean(axes, False, gradient),


_mean.defvjp(lambda axes, is_checked, value: (_mean(axes, is_checked, value), None), _mean_backward)


def _mean_over(axes: Axes, value: Any) -> Any:
    """pmean, whose own gradient asks JAX for sizes of axes, which it does not have in a backward under
    vmap(axis_name)."""
    varying, names = varying_of(jax.typeof(value)), {name for name, _ in axes}
    if varying & names and names - varying:
        value = jax.lax.pcast(value, tuple(names - varying), to="varying")
    return _mean(axes, bool(varying & names), value) if axes else value


def _normalized_by_position(settings: Settings, u: Any, channel: int) -> Any:
    grouped = jnp.moveaxis(u, channel, -1)
    shape = grouped.shape
    grouped = grouped.reshape(*shape[:-1], settings.groups, shape[-1] // settings.groups)
    if settings.has_mean:
        grouped = grouped - grouped.mean(-1, keepdims=True)
    if settings.eps_kind == _library.EPS_KINDS["added"]:
        grouped = grouped * jax.lax.rsqrt(jnp.square(grouped).mean(-1, keepdims=True) + settings.eps)
    else:
        squares = jnp.square(grouped).sum(-1, keepdims=True)
        is_clamped = jnp.sqrt(squares) <= settings.eps
        norm = jnp.where(is_clamped, settings.eps, jnp.sqrt(jnp.where(is_clamped, 1, squares)))  # sqrt'(0) is infinite
        grouped = grouped * (math.sqrt(grouped.shape[-1]) / norm)
    return jnp.moveaxis(grouped.reshape(shape), -1, channel)


def formula(settings: Settings, arrays: Arrays) -> Arrays:
    """y and u in jax.numpy: what the library computes, for derivatives that it has not."""
    x = arrays["x"]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    channel = x.ndim - 1 if settings.channels_last else 1

    def spread(parameter: Any) -> Any:
        shape = [1] * x.ndim
        shape[channel] = x.shape[channel]
        if parameter.ndim == 2:
            shape[0] = x.shape[0]
        return parameter.astype(wide).reshape(shape)

    u = x.astype(wide)
    if "pre_bias" in arrays:
        u = u + spread(arrays["pre_bias"])
    if "pre_add" in arrays:
        u = u + arrays["pre_add"].astype(wide)
    # pre_bias alone is a part of the mean, and nothing is rounded, but in a channel norm.
    if settings.return_sum or "pre_add" in arrays or settings.operator == "channel_norm":
        u = u.astype(x.dtype).astype(wide)
    z = u
    if settings.operator == "channel_norm":
        z = _normalized_by_position(settings, u, channel)
    elif settings.operator != "affine":
        if not _trains(settings):
            mean, variance = spread(arrays["running_mean"]), spread(arrays["running_var"])
        elif settings.operator == "batch_norm":
            axes = tuple(a for a in range(x.ndim) if a != channel)
            mean = _mean_over(settings.axes, z.mean(axes, keepdims=True))
            variance = _mean_over(settings.axes, jnp.square(z - mean).mean(axes, keepdims=True))
        else:
            grouped = jnp.moveaxis(z, channel, 1).reshape(x.shape[0], settings.groups, -1)
            mean = grouped.mean(2)
            variance = jnp.square(grouped - mean[..., None]).mean(2)
            each = x.shape[channel] // settings.groups
            mean, variance = (spread(jnp.repeat(v, each, axis=1)) for v in (mean, variance))
        z = (z - mean) * jax.lax.rsqrt(variance + settings.eps)
    if "weight" in arrays:
        z = z * spread(arrays["weight"])
    if "bias" in arrays:
        z = z + spread(arrays["bias"])
    if "scale" in arrays:
        z = z * (1 + spread(arrays["scale"]))
    if "shift" in arrays:
        z = z + spread(arrays["shift"])
    if "post_add" in arrays:
        z = z + arrays["post_add"].astype(wide)
    name = next(name for name, number in _library.ACTIVATIONS.items() if number == settings.activation)
    parameter = settings.act_param if settings.flags & _library.HAS_ACT_PARAM else \
        _library.DEFAULT_ACT_PARAM.get(name, 0.0)
    y = _ACTIVATIONS[name](z, parameter) if name in _ACTIVATIONS else getattr(jax.nn, name)(z)
    made = {"y": y.astype(settings.y_dtype or x.dtype)}
    if settings.return_sum:
        made["u"] = u.astype(x.dtype)
    return made

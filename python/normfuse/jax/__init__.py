# SPDX-License-Identifier: MIT
"""normfuse's operators as JAX functions, on the CPU and on CUDA, through XLA's foreign function interface.

    import normfuse.jax as nfj
    y = nfj.group_norm(x, 32, weight, bias, activation="silu")      # x: [N, H, W, C]

They work under jit, grad (to any order), vmap and jit over several devices, and have a fused backward. docs/jax.md says
what is supported. normfuse.jax.linen and normfuse.jax.nnx have layers in the place of Flax's.

Shapes. x has the axes N, spatial ones, C; with layout="nchw" N, C, spatial ones. [C] parameters are shared by the
samples. dtypes: bfloat16, float16, float32, and float64 with jax_enable_x64; parameters are of any of these, whatever x
is. Results have x's shape and dtype, gradients those of their argument.

Errors. While tracing: ValueError where shapes or options contradict each other, TypeError for a dtype that there is no
kernel for, with the library's own words.
"""
from __future__ import annotations

import math
from typing import Any, Optional

from .. import _activation, _library, _number_of
from .._words import did_you_mean, require

require("jax", "JAX", (0, 10), "normfuse.jax", "normfuse[jax]")

import jax  # noqa: E402
from jax.export import is_symbolic_dim  # noqa: E402

from ._call import all_varying, axes_of, refuse_symbolic_axes  # noqa: E402
from ._gradients import Settings, apply  # noqa: E402

__all__ = ["batch_norm", "channel_affine", "channel_norm", "group_norm", "instance_norm"]

Array = Any
_LAYOUTS = {"nhwc": True, "nchw": False}


def _run(operator: str, arrays: Any, layout: str, activation: Optional[str], act_param: Optional[float],
         return_sum: bool, groups: int = 0, eps: float = 1e-5, momentum: float = 0.0, evaluate: bool = False,
         axis_name: Any = None, **of_channel_norm: Any) -> Any:
    if layout not in _LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(_LAYOUTS)}{did_you_mean(layout, _LAYOUTS)}")
    if return_sum and arrays.get("pre_add") is None and arrays.get("pre_bias") is None:
        raise ValueError("return_sum needs pre_add or pre_bias")
    channels_last = _LAYOUTS[layout]
    given = {name: jax.numpy.asarray(value) for name, value in arrays.items() if value is not None}
    x = given["x"]
    shape = x.shape
    if x.ndim > 5:  # the library has three spatial axes; more are as one
        positions = math.prod(shape[1:-1] if channels_last else shape[2:])
        folded = (shape[0], positions, shape[-1]) if channels_last else (*shape[:2], positions)
        for name in ("x", "pre_add", "post_add"):
            if name in given and given[name].shape == shape:
                given[name] = given[name].reshape(folded)
    channels = shape[-1 if channels_last else 1] if x.ndim > 1 else 0
    if is_symbolic_dim(channels):
        raise NotImplementedError("normfuse.jax: the number of channels must be known while tracing; export it as a "
                                  "number")
    axes = axes_of(axis_name)
    if axes and any(map(is_symbolic_dim, shape)):
        refuse_symbolic_axes()
    # Refused as the library does in a call, in its words, but while tracing. A device's part may be of one value.
    if channels and not evaluate:
        if operator == "batch_norm" and x.size == channels and all(size == 1 for _, size in axes):
            raise ValueError("batch_norm forward: x: expected more than 1 value per channel when training")
        if operator == "instance_norm" and "running_mean" in given and x.size == channels * shape[0]:
            raise ValueError("instance_norm forward: running_var takes the unbiased variance, which needs more than 1 "
                             "value per channel")
    running = {name: given.pop(name) for name in ("running_mean", "running_var") if name in given}
    if evaluate:
        given = all_varying({**given, **running})
    else:
        given = {**all_varying(given), **{name: jax.lax.stop_gradient(value) for name, value in running.items()}}
    if activation == "prelu":
        raise ValueError("activation is 'prelu', whose slope the functions of JAX do not take")
    fields = _activation(activation, act_param)
    flags = fields["flags"] | (_library.EVALUATE if evaluate else 0)
    if operator == "instance_norm":
        operator, groups = "group_norm", channels
    word_of_groups = "groups" if operator == "channel_norm" else "num_groups"
    made = apply(Settings(operator, channels_last, _library.integer(word_of_groups, groups), float(eps),
                          float(momentum),
                          flags, fields["activation"], float(fields["act_param"]), return_sum, axes,
                          **of_channel_norm), given)
    results = [made[name].reshape(shape) for name in ("y", "u") if name in made]
    results += [jax.lax.stop_gradient(made[name]) for name in ("running_mean", "running_var") if name in made]
    return results[0] if len(results) == 1 else tuple(results)


def group_norm(x: Array, num_groups: int, weight: Optional[Array] = None, bias: Optional[Array] = None,
               eps: float = 1e-5, *, activation: Optional[str] = None, act_param: Optional[float] = None,
               pre_bias: Optional[Array] = None, pre_add: Optional[Array] = None, return_sum: bool = False,
               post_add: Optional[Array] = None, scale: Optional[Array] = None, shift: Optional[Array] = None,
               layout: str = "nhwc") -> Any:
    """act((norm(x + pre_bias + pre_add) * weight + bias) * (1 + scale) + shift + post_add), normalized over the
    channels of each group and all positions of one sample.

    x                   [N, ..., C] (layout="nchw": [N, C, ...])
    num_groups          divides C
    weight, bias        [C]; None: 1 and 0
    eps                 is added to the biased variance
    activation          None, or a name of normfuse.ACTIVATIONS but prelu; act_param: the slope of leaky_relu (0.01),
    the
                        alpha of elu (1)
    pre_bias            [C] or [N, C]: the bias of the convolution before, an embedding
    pre_add, post_add   like x. return_sum: also return x + pre_bias + pre_add
    scale, shift        [N, C]; None: 0

    Returns y, or (y, u) with return_sum. Raises ValueError and TypeError while tracing; see the module."""
    arrays = dict(x=x, weight=weight, bias=bias, pre_bias=pre_bias, pre_add=pre_add, post_add=post_add, scale=scale,
                  shift=shift)
    return _run("group_norm", arrays, layout, activation, act_param, return_sum, num_groups, eps)


def instance_norm(x: Array, weight: Optional[Array] = None, bias: Optional[Array] = None, eps: float = 1e-5, *,
                  running_mean: Optional[Array] = None, running_var: Optional[Array] = None,
                  use_input_stats: bool = True, momentum: float = 0.1, activation: Optional[str] = None,
                  act_param: Optional[float] = None, pre_bias: Optional[Array] = None,
                  pre_add: Optional[Array] = None, return_sum: bool = False, post_add: Optional[Array] = None,
                  scale: Optional[Array] = None, shift: Optional[Array] = None, layout: str = "nhwc") -> Any:
    """group_norm with a group for each channel.

    running_mean, running_var   [C]; with use_input_stats their updates are returned behind y (and u):
                        (1 - momentum) * running + momentum * new, where new is the mean over the batch of means and of
                        unbiased variances; without, they are what x is normalized with

    The other arguments are group_norm's."""
    arrays = dict(x=x, weight=weight, bias=bias, pre_bias=pre_bias, pre_add=pre_add, post_add=post_add, scale=scale,
                  shift=shift, running_mean=running_mean, running_var=running_var)
    return _run("instance_norm", arrays, layout, activation, act_param, return_sum, 0, eps, momentum,
                not use_input_stats)


def batch_norm(x: Array, running_mean: Optional[Array] = None, running_var: Optional[Array] = None,
               weight: Optional[Array] = None, bias: Optional[Array] = None, training: bool = False,
               momentum: float = 0.1, eps: float = 1e-5, *, activation: Optional[str] = None,
               act_param: Optional[float] = None, pre_bias: Optional[Array] = None, pre_add: Optional[Array] = None,
               return_sum: bool = False, post_add: Optional[Array] = None, axis_name: Any = None,
               layout: str = "nhwc") -> Any:
    """act(norm(x + pre_bias + pre_add) * weight + bias + post_add), normalized over all samples and positions of one
    channel.

    training            normalize with the statistics of x, and return the updates of running_mean and running_var, if
                        given, behind y (and u): (1 - momentum) * running + momentum * new, of the unbiased variance.
                        Otherwise running_mean and running_var are what x is normalized with; they have no gradient
    axis_name           in training, under shard_map, pmap or vmap: the axis, or a tuple of them, whose devices share
    the
                        statistics. Gradients of weight, bias and pre_bias are then a device's share, as those of other
                        parameters: their sum over the devices is the gradient. Under jit with a sharded batch nothing
                        is needed

    The other arguments are group_norm's."""
    arrays = dict(x=x, weight=weight, bias=bias, pre_bias=pre_bias, pre_add=pre_add, post_add=post_add,
                  running_mean=running_mean, running_var=running_var)
    return _run("batch_norm", arrays, layout, activation, act_param, return_sum, 0, eps, momentum, not training,
                axis_name if training else None)


def channel_norm(x: Array, weight: Optional[Array] = None, bias: Optional[Array] = None, *, groups: int = 1,
                 statistics: str = "mean_and_variance", eps: float = 1e-5, eps_kind: str = "added",
                 activation: Optional[str] = None, act_param: Optional[float] = None, pre_bias: Optional[Array] = None,
                 pre_add: Optional[Array] = None, return_sum: bool = False, post_add: Optional[Array] = None,
                 scale: Optional[Array] = None, shift: Optional[Array] = None, dtype: Any = None,
                 layout: str = "nhwc") -> Any:
    """act((norm(x + pre_bias + pre_add) * weight + bias) * (1 + scale) + shift + post_add), each position normalized
    over the D = C/groups channels of a group: layer norm of channels (arXiv:1607.06450), or RMS norm
    (arXiv:1910.07467).

    x                   [N, ..., C] (layout="nchw": [N, C, ...]); tokens are [N, C] or [N, L, C]
    groups              of channels, divides C; 1: all channels of a position
    statistics          "mean_and_variance": layer norm, v = u - mean. "mean_square": RMS norm, v = u
    eps_kind            "added": rstd = 1/sqrt(sum of v^2 / D + eps), for any eps. "of_norm": rstd = sqrt(D) /
    max(sqrt(sum
                        of v^2), eps), for eps of 0 or above
    dtype               of y, and of post_add: None or x's, float32 where x has 16 bits, or one of 16 bits where x is
                        float32. u has x's

    The other arguments are group_norm's. On CUDA channels are last; docs/operators/channel-norm.md has what else is not
    taken there, which raises TypeError."""
    arrays = dict(x=x, weight=weight, bias=bias, pre_bias=pre_bias, pre_add=pre_add, post_add=post_add, scale=scale,
                  shift=shift)
    return _run("channel_norm", arrays, layout, activation, act_param, return_sum, groups, eps,
                statistics=_number_of("statistics", statistics, _library.STATISTICS),
                eps_kind=_number_of("eps_kind", eps_kind, _library.EPS_KINDS),
                y_dtype="" if dtype is None else jax.numpy.dtype(dtype).name)


def channel_affine(x: Array, scale: Optional[Array] = None, bias: Optional[Array] = None, *,
                   activation: Optional[str] = None, act_param: Optional[float] = None,
                   pre_bias: Optional[Array] = None, pre_add: Optional[Array] = None, return_sum: bool = False,
                   post_add: Optional[Array] = None, layout: str = "nhwc") -> Any:
    """act(scale * (x + pre_bias + pre_add) + bias + post_add): no statistics.

    scale, bias         [C] for all samples or [N, C] for each, both alike; None: 1 and 0

    The other arguments are group_norm's."""
    arrays = dict(x=x, weight=scale, bias=bias, pre_bias=pre_bias, pre_add=pre_add, post_add=post_add)
    return _run("affine", arrays, layout, activation, act_param, return_sum)

# SPDX-License-Identifier: MIT
"""Normalization layers of neural networks over arrays: NumPy's, and those of PyTorch, CuPy, JAX and every other library
that speaks DLPack or the array interfaces, on the CPU and on CUDA, without a copy.

    u = x [+ pre_bias] [+ pre_add]                             rounded to x's dtype where it is a tensor
    z = ((u - mean) * rstd * weight + bias) [* (1 + scale) + shift] [+ post_add]
    y = act(z)

    import normfuse
    y = normfuse.group_norm(x, 32, weight, bias, activation="silu")

What all functions share:

Shapes. x has the axes N, C and zero to three spatial ones; with layout="nhwc" the channels are its last axis. N is the
number of samples, C of channels. Arrays "like x" have its shape, dtype and device, and strides of their own: memory may
be contiguous in either order of axes, or a slice of such memory along N or C. Other strides are refused, not copied.

dtypes. x is float64, float32, float16 or bfloat16 (in NumPy: of the package ml_dtypes). Parameters (weight, bias,
scale, shift, pre_bias, slope, running statistics) are of any of these, whatever x is. Statistics are float64 for the
mean, and for rstd = 1/sqrt(variance + eps) float32, or float64 for float64 x. Values have no units; activations are
applied to z as it is.

Activations. None or a name of normfuse.ACTIVATIONS: "relu", "silu", "gelu" and others. "leaky_relu" and "elu" take
act_param (slope, 0.01; alpha, 1.0), "prelu" takes slope (an array).

Outputs. Given arrays are written to, in any layout; those that are not given are made in the library of x (of the
parameter, for its gradient) and laid out in memory as x. `out` may be x, pre_add or post_add; `out_sum` x or pre_add;
dx may be dy, x or du; dpost_add may be dy; any other overlap is refused. There is no automatic differentiation here.

CUDA. Kernels are enqueued on the current stream of x's library (CuPy, PyTorch), and nothing is waited for.

Errors. ValueError: shapes that contradict each other, overlapping or read-only outputs, options out of range.
OverflowError: an integer that 64 bits do not hold. TypeError: a dtype, device or strides that there is no kernel for,
or what is not an array. MemoryError; RuntimeError: the CUDA driver. Where one is raised before the work began nothing
was written.

Numbers. Results are within the bounds of docs/numerics.md, on the CPU the same bits from any number of threads
(NORMFUSE_NUM_THREADS) and any instruction set.
"""
from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ._arrays import Call as _Call
from ._arrays import dtype_of as _dtype_of
from ._arrays import stack as _stack
from ._library import (ACTIVATIONS, CUMULATIVE, EPS_KINDS, EVALUATE, HAS_ACT_PARAM, STATISTICS, AffineOptions,
                       BatchNormOptions, ChannelNormOptions, GroupNormOptions)
from ._library import call as _check
from ._library import integer as _integer
from ._library import version as _version
from ._words import did_you_mean as _did_you_mean

__all__ = ["Gradients", "batch_norm", "batch_norm_backward", "channel_affine", "channel_affine_backward",
           "channel_norm",
           "channel_norm_backward", "group_norm", "group_norm_apply", "group_norm_backward", "group_norm_stats",
           "instance_norm", "instance_norm_backward", "stats_merge"]

__version__: str = _version

# An array of any library; there is no common type. An output of a library is an array of the same library.
Array = Any
# An output of a backward: an array to write to, True to have one made, False for none, None for the default.
Wanted = Union[Array, bool, None]


class Gradients(NamedTuple):
    """The gradients of a backward, None where not computed: those of the arguments without the d."""
    dx: Optional[Array]
    dweight: Optional[Array]
    dbias: Optional[Array]
    dscale: Optional[Array]
    dshift: Optional[Array]
    dpost_add: Optional[Array]
    dpre_bias: Optional[Array]
    dslope: Optional[Array]


# Names here of the arguments of normfuse.h.
_FORWARD_NAMES = {"groups": "num_groups", "y": "out", "u": "out_sum", "mean": "out_mean", "rstd": "out_rstd"}
_BACKWARD_NAMES = {"groups": "num_groups"}
_CHANNEL_FORWARD_NAMES = {field: word for field, word in _FORWARD_NAMES.items() if field != "groups"}
_AFFINE_FORWARD_NAMES = {"weight": "scale", "y": "out", "u": "out_sum"}
_AFFINE_BACKWARD_NAMES = {"weight": "scale", "dweight": "dscale"}


# ---- what the functions share ---------------------------------------------------------------------------------------


def _number_of(name: str, word: Any, numbers: Mapping[str, int], before: str = "") -> int:
    """The number that normfuse.h has for one of its words; `before`: what else the argument may be."""
    if not (isinstance(word, str) and word in numbers):
        raise ValueError(f"{name} is {word!r}, expected {before}one of {', '.join(numbers)}"
                         f"{_did_you_mean(word, numbers)}")
    return numbers[word]


def _activation(activation: Optional[str], act_param: Optional[float]) -> Dict[str, Any]:
    """The fields of the options that say the activation."""
    word = "identity" if activation is None else activation
    return {"activation": _number_of("activation", word, ACTIVATIONS, "None or "),
            "flags": 0 if act_param is None else HAS_ACT_PARAM,
            "act_param": 0.0 if act_param is None else act_param}


def _with_running(fields: Dict[str, Any], evaluate: bool, momentum: Optional[float], batches_seen: int) -> None:
    """Adds what an operator with running statistics has beside."""
    fields["flags"] |= (EVALUATE if evaluate else 0) | (CUMULATIVE if momentum is None else 0)
    fields["momentum"] = 0.0 if momentum is None else momentum
    fields["batches_seen"] = _integer("batches_seen", batches_seen)


def _statistics_of(call: _Call, groups: int) -> Tuple[int, int]:
    """The shape of a group norm's statistics. No array is made for a number of groups that the library refuses."""
    is_possible = groups >= 0 and (groups <= call.channels or call.channels == 0)
    return call.samples, groups if is_possible else 0


def _run_forward(call: _Call, options: Any, statistics: Tuple[int, ...], return_sum: bool, return_statistics: bool,
                 out: Optional[Array], out_sum: Optional[Array], out_mean: Optional[Array],
                 out_rstd: Optional[Array], phase: str = "forward", has_mean: bool = True) -> Any:
    """Takes the outputs, runs, and returns y alone or (y[, u][, mean, rstd]); mean is None where there is none."""
    call.take("y", out)
    names = ["y"]
    if return_sum or out_sum is not None:
        call.take("u", out_sum)
        names.append("u")
    if return_statistics or out_mean is not None or out_rstd is not None:
        wide = _dtype_of(call.x) == "float64"
        if has_mean or out_mean is not None:
            call.take_parameter("mean", out_mean, statistics, "float64")
        call.take_parameter("rstd", out_rstd, statistics, "float64" if wide else "float32")
        names += ["mean", "rstd"]
    call.run(phase, options)
    if len(names) == 1:
        return call.output("y")
    return tuple(call.output(name) for name in names)


def _take_gradients(call: _Call, parameters: Dict[str, Tuple[Wanted, bool, Tuple[int, ...]]], dx: Wanted,
                    dpost_add: Wanted, has_post_add: bool, dpre_bias: Wanted, dslope: Wanted) -> None:
    """parameters: the parameter's field -> (its gradient's argument, whether the parameter is given, its shape)."""
    for name, wanted, default, like in (("dx", dx, True, "x"), ("dpost_add", dpost_add, has_post_add, "dy")):
        if wanted is None:
            wanted = default
        if wanted is not False:
            call.take(name, None if wanted is True else wanted, like)
    shape = call.shape_of("pre_bias")
    parameters["pre_bias"] = (dpre_bias, bool(shape) and dx is not False, shape or (call.channels,))
    shape = call.shape_of("slope")
    parameters["slope"] = (dslope, bool(shape), shape or (call.channels,))
    for name, (wanted, default, shape) in parameters.items():
        if wanted is None:
            wanted = default
        if wanted is not False:
            call.take_parameter("d" + name, None if wanted is True else wanted, shape, like=name)


# ---- group norm -----------------------------------------------------------------------------------------------------


def group_norm(x: Array, num_groups: int, weight: Optional[Array] = None, bias: Optional[Array] = None,
               eps: float = 1e-5, *, activation: Optional[str] = None, act_param: Optional[float] = None,
               slope: Optional[Array] = None, pre_add: Optional[Array] = None, pre_bias: Optional[Array] = None,
               return_sum: bool = False, post_add: Optional[Array] = None, scale: Optional[Array] = None,
               shift: Optional[Array] = None, return_statistics: bool = False, layout: str = "nchw",
               out: Optional[Array] = None, out_sum: Optional[Array] = None, out_mean: Optional[Array] = None,
               out_rstd: Optional[Array] = None) -> Any:
    """Group normalization (Wu and He 2018, arXiv:1803.08494) of x, with statistics over the C/num_groups channels of
    each group and all positions of one sample.

    x               [N, C, ...] (layout="nhwc": [N, ..., C])
    num_groups      divides C
    weight, bias    [C]; None: 1 and 0
    eps             is added to the biased variance; any number, rstd = 1/sqrt(variance + eps) in IEEE arithmetic
    pre_add         like x; added before the statistics
    pre_bias        [C] or [N, C]; likewise: a convolution's bias, an embedding. return_sum: also return u, the sum of x
    and
                    these
    post_add        like x; added before the activation
    slope           [C] or [1]: that of activation="prelu" (He et al. 2015, arXiv:1502.01852), which needs it
    scale, shift    [N, C], for each sample: AdaGN (Dhariwal and Nichol 2021, arXiv:2105.05233); None: 0
    return_statistics   also return mean and rstd, [N, num_groups], which the backward needs
    out, out_sum, out_mean, out_rstd   where y, u, mean and rstd are written; the last three are then returned, too

    Returns y, like x; or, if more was requested, the tuple (y[, u][, mean, rstd]).
    Raises ValueError where num_groups does not divide C; see the module for the rest."""
    groups = _integer("num_groups", num_groups)
    call = _Call("group_norm", x, layout, _FORWARD_NAMES)
    call.give(pre_add=pre_add, post_add=post_add)
    call.give_parameters(pre_bias=pre_bias, slope=slope, weight=weight, bias=bias, scale=scale, shift=shift)
    options = GroupNormOptions(groups=groups, eps=eps, **_activation(activation, act_param))
    return _run_forward(call, options, _statistics_of(call, groups), return_sum, return_statistics, out, out_sum,
                        out_mean, out_rstd)


def group_norm_backward(dy: Array, x: Array, mean: Array, rstd: Array, num_groups: int, weight: Optional[Array] = None,
                        bias: Optional[Array] = None, *, activation: Optional[str] = None,
                        act_param: Optional[float] = None, slope: Optional[Array] = None,
                        pre_add: Optional[Array] = None, pre_bias: Optional[Array] = None,
                        post_add: Optional[Array] = None, y: Optional[Array] = None, scale: Optional[Array] = None,
                        shift: Optional[Array] = None, du: Optional[Array] = None, layout: str = "nchw",
                        dx: Wanted = None, dweight: Wanted = None, dbias: Wanted = None, dscale: Wanted = None,
                        dshift: Wanted = None, dpost_add: Wanted = None, dpre_bias: Wanted = None,
                        dslope: Wanted = None) -> Gradients:
    """The gradients of `group_norm`, given dy, that of its y, and the arguments and statistics of the forward.

    dy              like x
    x               the forward's x, or the u that it returned, in whose place pre_add and pre_bias are then left out
    mean, rstd      [N, num_groups], as the forward returned them
    y               like x: the forward's y in the place of post_add, which may have been overwritten then; for relu,
                    relu6 and leaky_relu with a slope above 0
    du              like x: the gradient of u where it was returned; it is added to dx
    dx, dweight, dbias, dscale, dshift, dpost_add, dpre_bias, dslope   each an array that the gradient is written to,
                    True for a new one, False for none; None: a new one where its argument is given, dx always. dx is
                    also the gradient of pre_add, and dpre_bias its sum: [C] where pre_bias is not given

    Returns Gradients; dx and dpost_add are like x, the others have the shape and dtype of their parameter."""
    groups = _integer("num_groups", num_groups)
    call = _Call("group_norm", x, layout, _BACKWARD_NAMES)
    call.give(dy=dy, pre_add=pre_add, post_add=post_add, y=y, du=du)
    call.give_parameters(mean=mean, rstd=rstd, pre_bias=pre_bias, slope=slope, weight=weight, bias=bias, scale=scale,
                         shift=shift)
    channel, pair = (call.channels,), (call.samples, call.channels)
    _take_gradients(call, {"weight": (dweight, weight is not None, channel), "bias": (dbias, bias is not None, channel),
                           "scale": (dscale, scale is not None, pair), "shift": (dshift, shift is not None, pair)},
                    dx, dpost_add, post_add is not None or y is not None, dpre_bias, dslope)
    call.run("backward", GroupNormOptions(groups=groups, eps=1e-5, **_activation(activation, act_param)))
    return Gradients(*map(call.output, Gradients._fields))


# ---- group norm of an image in parts ---------------------------------------------------------------------------------


def group_norm_stats(x: Array, num_groups: int, *, pre_add: Optional[Array] = None, pre_bias: Optional[Array] = None,
                     return_sum: bool = False, layout: str = "nchw", out: Optional[Array] = None,
                     out_sum: Optional[Array] = None) -> Any:
    """The statistics of a part of an image, a tile or a strip: what `stats_merge` joins and `group_norm_apply` takes.

    x               [N, C, ...] (layout="nhwc": [N, ..., C]), the same part of N images; a part may have no position
    num_groups      divides C
    pre_add         like x; added before the statistics
    pre_bias        [C] or [N, C]; likewise: a convolution's bias, an embedding. return_sum: also return u, the sum of x
    and
                    these
    out             [N, num_groups, 3] of float64, where the statistics are written; out_sum as in `group_norm`

    Returns float64 [N, num_groups, 3]: the number of values of each group, their mean, and the sum of their squared
    differences to it; or the tuple (statistics, u).
    Raises ValueError where num_groups does not divide C; see the module for the rest."""
    groups = _integer("num_groups", num_groups)
    call = _Call("group_norm", x, layout, {**_FORWARD_NAMES, "stats": "out"})
    call.give(pre_add=pre_add)
    call.give_parameters(pre_bias=pre_bias)
    call.take_parameter("stats", out, (*_statistics_of(call, groups), 3), "float64")
    if return_sum or out_sum is not None:
        call.take("u", out_sum)
        call.run("stats", GroupNormOptions(groups=groups, eps=1e-5))
        return call.output("stats"), call.output("u")
    call.run("stats", GroupNormOptions(groups=groups, eps=1e-5))
    return call.output("stats")


def stats_merge(stats: Union[Array, Sequence[Array]], *, out: Optional[Array] = None) -> Array:
    """The statistics of a whole from those of its parts (Chan et al. 1979). The same parts in the same order have the
    same bits in every process.

    stats           float64 [parts, ..., 3], or a list or tuple of arrays [..., 3], which are copied into one; at least
                    one part. A count of 0 is legal
    out             float64 [..., 3], where the result is written; it may be stats[0]

    Returns float64 [..., 3].
    Raises ValueError: no parts, or a last axis that is not 3. TypeError: another dtype."""
    if isinstance(stats, (list, tuple)):
        if not stats:
            raise ValueError("stats is empty, expected the statistics of one part or more")
        stats = _stack(stats)
    if getattr(stats, "ndim", 2) < 2:
        raise ValueError(f"stats has {stats.ndim} axis, expected [parts, ..., 3]")
    call = _Call("stats", stats, "nchw", {"x": "stats"})
    shape = call.shape_of("x")
    if shape[-1] != 3 or shape[0] == 0:
        raise ValueError(f"stats has the shape {shape}, expected [parts, ..., 3] with one part or more")
    if _dtype_of(call.x) != "float64":
        raise TypeError(f"stats has dtype {_dtype_of(call.x)}, expected float64")
    return call.merge(out)


def group_norm_apply(x: Array, stats: Array, num_groups: int, weight: Optional[Array] = None,
                     bias: Optional[Array] = None, eps: float = 1e-5, *, activation: Optional[str] = None,
                     act_param: Optional[float] = None, slope: Optional[Array] = None, pre_add: Optional[Array] = None,
                     pre_bias: Optional[Array] = None, post_add: Optional[Array] = None, scale: Optional[Array] = None,
                     shift: Optional[Array] = None, return_statistics: bool = False, layout: str = "nchw",
                     out: Optional[Array] = None, out_mean: Optional[Array] = None,
                     out_rstd: Optional[Array] = None) -> Any:
    """`group_norm` of a part of an image with the statistics of the whole.

    x               [N, C, ...] (layout="nhwc": [N, ..., C]), a part
    stats           float64 [N, num_groups, 3], of the whole: what `stats_merge` returned

    The other arguments, and what is returned, are as in `group_norm`; mean and rstd are those of the whole. With
    pre_add u is not written: `group_norm_stats` returns it."""
    groups = _integer("num_groups", num_groups)
    call = _Call("group_norm", x, layout, _FORWARD_NAMES)
    call.give(pre_add=pre_add, post_add=post_add)
    call.give_parameters(stats=stats, pre_bias=pre_bias, slope=slope, weight=weight, bias=bias, scale=scale,
                         shift=shift)
    options = GroupNormOptions(groups=groups, eps=eps, **_activation(activation, act_param))
    return _run_forward(call, options, _statistics_of(call, groups), False, return_statistics, out, None, out_mean,
                        out_rstd, "apply")


# ---- instance norm --------------------------------------------------------------------------------------------------


def instance_norm(x: Array, running_mean: Optional[Array] = None, running_var: Optional[Array] = None,
                  weight: Optional[Array] = None, bias: Optional[Array] = None, use_input_stats: bool = True,
                  momentum: Optional[float] = 0.1, eps: float = 1e-5, *, activation: Optional[str] = None,
                  act_param: Optional[float] = None, slope: Optional[Array] = None, pre_add: Optional[Array] = None,
                  pre_bias: Optional[Array] = None, return_sum: bool = False, post_add: Optional[Array] = None,
                  scale: Optional[Array] = None, shift: Optional[Array] = None, return_statistics: bool = False,
                  batches_seen: int = 0, layout: str = "nchw", out: Optional[Array] = None,
                  out_sum: Optional[Array] = None, out_mean: Optional[Array] = None,
                  out_rstd: Optional[Array] = None) -> Any:
    """Instance normalization (Ulyanov et al. 2016, arXiv:1607.08022) of x: group norm with statistics over all
    positions of one channel of one sample.

    running_mean, running_var   [C]; both or neither. With use_input_stats they are updated, running = (1 - momentum) *
                    running + momentum * new, where new is the mean over the batch of means and of unbiased variances;
                    without, they are what x is normalized with, and needed
    momentum        None: the cumulative average, 1/(batches_seen + 1), where batches_seen is of the calls before
    return_statistics   also return mean and rstd, [N, C]; with use_input_stats only

    The other arguments, and what is returned, are as in `group_norm`."""
    call = _Call("group_norm", x, layout, _FORWARD_NAMES)
    call.give(pre_add=pre_add, post_add=post_add)
    call.give_parameters(pre_bias=pre_bias, slope=slope, weight=weight, bias=bias, scale=scale, shift=shift)
    if use_input_stats:
        call.update(running_mean=running_mean, running_var=running_var)
    else:
        call.give_parameters(running_mean=running_mean, running_var=running_var)
    fields = _activation(activation, act_param)
    _with_running(fields, not use_input_stats, momentum, batches_seen)
    options = GroupNormOptions(groups=call.channels, eps=eps, **fields)
    return _run_forward(call, options, (call.samples, call.channels), return_sum, return_statistics, out, out_sum,
                        out_mean, out_rstd)


def instance_norm_backward(dy: Array, x: Array, mean: Optional[Array], rstd: Optional[Array],
                           weight: Optional[Array] = None, bias: Optional[Array] = None, *,
                           running_mean: Optional[Array] = None, running_var: Optional[Array] = None,
                           use_input_stats: bool = True, eps: float = 1e-5, activation: Optional[str] = None,
                           act_param: Optional[float] = None, slope: Optional[Array] = None,
                           pre_add: Optional[Array] = None, pre_bias: Optional[Array] = None,
                           post_add: Optional[Array] = None, y: Optional[Array] = None, scale: Optional[Array] = None,
                           shift: Optional[Array] = None, du: Optional[Array] = None, layout: str = "nchw",
                           dx: Wanted = None, dweight: Wanted = None, dbias: Wanted = None, dscale: Wanted = None,
                           dshift: Wanted = None, dpost_add: Wanted = None, dpre_bias: Wanted = None,
                           dslope: Wanted = None) -> Gradients:
    """The gradients of `instance_norm`. With use_input_stats mean and rstd are [N, C], as the forward returned them;
    without, they are None, and running_mean, running_var and eps are the forward's.

    The other arguments, and what is returned, are as in `group_norm_backward`."""
    call = _Call("group_norm", x, layout, _BACKWARD_NAMES)
    call.give(dy=dy, pre_add=pre_add, post_add=post_add, y=y, du=du)
    call.give_parameters(mean=mean, rstd=rstd, pre_bias=pre_bias, slope=slope, weight=weight, bias=bias, scale=scale,
                         shift=shift)
    if not use_input_stats:
        call.give_parameters(running_mean=running_mean, running_var=running_var)
    channel, pair = (call.channels,), (call.samples, call.channels)
    _take_gradients(call, {"weight": (dweight, weight is not None, channel), "bias": (dbias, bias is not None, channel),
                           "scale": (dscale, scale is not None, pair), "shift": (dshift, shift is not None, pair)},
                    dx, dpost_add, post_add is not None or y is not None, dpre_bias, dslope)
    fields = _activation(activation, act_param)
    _with_running(fields, not use_input_stats, 0.0, 0)
    call.run("backward", GroupNormOptions(groups=call.channels, eps=eps, **fields))
    return Gradients(*map(call.output, Gradients._fields))


# ---- batch norm -----------------------------------------------------------------------------------------------------


def batch_norm(x: Array, running_mean: Optional[Array], running_var: Optional[Array], weight: Optional[Array] = None,
               bias: Optional[Array] = None, training: bool = False, momentum: Optional[float] = 0.1, eps: float = 1e-5,
               *, activation: Optional[str] = None, act_param: Optional[float] = None, slope: Optional[Array] = None,
               pre_add: Optional[Array] = None, pre_bias: Optional[Array] = None, return_sum: bool = False,
               post_add: Optional[Array] = None, return_statistics: bool = False, batches_seen: int = 0,
               layout: str = "nchw", out: Optional[Array] = None, out_sum: Optional[Array] = None,
               out_mean: Optional[Array] = None, out_rstd: Optional[Array] = None) -> Any:
    """Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167) of x, with statistics over all samples and
    positions of one channel (training), or with given ones.

    x               [N, C, ...] (layout="nhwc": [N, ..., C])
    running_mean, running_var   [C]. Training: both or neither; updated, running = (1 - momentum) * running + momentum *
                    new, where the new variance is the unbiased one. Otherwise needed: x is normalized with them
    weight, bias    [C]; None: 1 and 0
    momentum        None: the cumulative average, 1/(batches_seen + 1), where batches_seen is of the calls before
    eps             is added to the variance (training: the biased one); above 0 when training
    pre_add, post_add, slope, return_sum, out, out_sum, out_mean, out_rstd   as in `group_norm`
    return_statistics   also return mean and rstd, [C], which the backward needs; when training only

    Returns y, like x; or, if more was requested, the tuple (y[, u][, mean, rstd]).
    Raises ValueError when training on one value for each channel."""
    call = _Call("batch_norm", x, layout, _FORWARD_NAMES)
    call.give(pre_add=pre_add, post_add=post_add)
    call.give_parameters(pre_bias=pre_bias, slope=slope, weight=weight, bias=bias)
    if training:
        call.update(running_mean=running_mean, running_var=running_var)
    else:
        call.give_parameters(running_mean=running_mean, running_var=running_var)
    fields = _activation(activation, act_param)
    _with_running(fields, not training, momentum, batches_seen)
    return _run_forward(call, BatchNormOptions(eps=eps, **fields), (call.channels,), return_sum, return_statistics,
                        out, out_sum, out_mean, out_rstd)


def batch_norm_backward(dy: Array, x: Array, mean: Optional[Array], rstd: Optional[Array],
                        weight: Optional[Array] = None, bias: Optional[Array] = None, *,
                        running_mean: Optional[Array] = None, running_var: Optional[Array] = None,
                        training: bool = True, eps: float = 1e-5, activation: Optional[str] = None,
                        act_param: Optional[float] = None, slope: Optional[Array] = None,
                        pre_add: Optional[Array] = None, pre_bias: Optional[Array] = None,
                        post_add: Optional[Array] = None, y: Optional[Array] = None, du: Optional[Array] = None,
                        layout: str = "nchw", dx: Wanted = None, dweight: Wanted = None, dbias: Wanted = None,
                        dpost_add: Wanted = None, dpre_bias: Wanted = None, dslope: Wanted = None) -> Gradients:
    """The gradients of `batch_norm`. Of a training forward, which is the default, mean and rstd are [C], as it returned
    them; with training=False they are None, and running_mean, running_var and eps are the forward's.

    The other arguments, and what is returned, are as in `group_norm_backward`."""
    call = _Call("batch_norm", x, layout, _BACKWARD_NAMES)
    call.give(dy=dy, pre_add=pre_add, post_add=post_add, y=y, du=du)
    call.give_parameters(mean=mean, rstd=rstd, pre_bias=pre_bias, slope=slope, weight=weight, bias=bias)
    if not training:
        call.give_parameters(running_mean=running_mean, running_var=running_var)
    channel = (call.channels,)
    _take_gradients(call, {"weight": (dweight, weight is not None, channel),
                           "bias": (dbias, bias is not None, channel)},
                    dx, dpost_add, post_add is not None or y is not None, dpre_bias, dslope)
    fields = _activation(activation, act_param)
    _with_running(fields, not training, 0.0, 0)
    call.run("backward", BatchNormOptions(eps=eps, **fields))
    return Gradients(*map(call.output, Gradients._fields))


# ---- channel norm ---------------------------------------------------------------------------------------------------


def _channel_norm_options(groups: int, eps: float, statistics: str, eps_kind: str, activation: Optional[str],
                          act_param: Optional[float]) -> ChannelNormOptions:
    return ChannelNormOptions(groups=groups, eps=eps, statistics=_number_of("statistics", statistics, STATISTICS),
                              eps_kind=_number_of("eps_kind", eps_kind, EPS_KINDS),
                              **_activation(activation, act_param))


def channel_norm(x: Array, weight: Optional[Array] = None, bias: Optional[Array] = None, *, groups: int = 1,
                 statistics: str = "mean_and_variance", eps: float = 1e-5, eps_kind: str = "added",
                 activation: Optional[str] = None, act_param: Optional[float] = None, slope: Optional[Array] = None,
                 pre_add: Optional[Array] = None, pre_bias: Optional[Array] = None, return_sum: bool = False,
                 post_add: Optional[Array] = None, scale: Optional[Array] = None, shift: Optional[Array] = None,
                 return_statistics: bool = False, layout: str = "nchw", out: Optional[Array] = None,
                 out_sum: Optional[Array] = None, out_mean: Optional[Array] = None,
                 out_rstd: Optional[Array] = None) -> Any:
    """Normalization of each position of x over its D = C/groups channels of a group: layer normalization (Ba et al.
    2016, arXiv:1607.06450) of channels, or RMS normalization (Zhang and Sennrich 2019, arXiv:1910.07467). On CUDA x is
    channels last, or tokens.

    x               [N, C, ...] (layout="nhwc": [N, ..., C]); tokens are [N, C], or [N, L, C] with layout="nhwc"
    weight, bias    [C]; None: 1 and 0
    groups          of channels, divides C; 1: all channels of a position
    statistics      "mean_and_variance": layer norm, v = u - mean. "mean_square": RMS norm, v = u; mean is 0
    eps_kind        "added": rstd = 1/sqrt(sum of v^2 / D + eps), for any eps. "of_norm": rstd = sqrt(D) / max(sqrt(sum
    of
                    v^2), eps), for eps of 0 or above. With "mean_square" this is sqrt(D) times
                    torch.nn.functional.normalize, whose eps is 1e-12
    post_add        like y
    return_statistics   also return mean and rstd, [N, groups, ...] whatever the layout, which the backward needs; mean
    is
                    None with "mean_square"
    out             where y is written: like x, but of float32 where x has 16 bits, or of 16 bits where x is float32, if
                    that is its dtype. What is not given is made with x's dtype

    The other arguments are as in `group_norm`.

    Returns y, or, if more was requested, the tuple (y[, u][, mean, rstd]).
    Raises ValueError where groups does not divide C, or statistics or eps_kind is another word; TypeError for
    arrays on CUDA with more channels than its registers hold; see the module for the rest."""
    options = _channel_norm_options(groups, eps, statistics, eps_kind, activation, act_param)
    call = _Call("channel_norm", x, layout, _CHANNEL_FORWARD_NAMES)
    call.give(pre_add=pre_add, post_add=post_add)
    call.give_parameters(pre_bias=pre_bias, slope=slope, weight=weight, bias=bias, scale=scale, shift=shift)
    shape = (*_statistics_of(call, options.groups), *call.shape_of("x")[2:])
    return _run_forward(call, options, shape, return_sum, return_statistics, out, out_sum, out_mean, out_rstd,
                        has_mean=statistics != "mean_square")


def channel_norm_backward(dy: Array, x: Array, mean: Optional[Array], rstd: Array, weight: Optional[Array] = None,
                          bias: Optional[Array] = None, *, groups: int = 1, statistics: str = "mean_and_variance",
                          eps: float = 1e-5, eps_kind: str = "added", activation: Optional[str] = None,
                          act_param: Optional[float] = None, slope: Optional[Array] = None,
                          pre_add: Optional[Array] = None, pre_bias: Optional[Array] = None,
                          post_add: Optional[Array] = None, y: Optional[Array] = None, scale: Optional[Array] = None,
                          shift: Optional[Array] = None, du: Optional[Array] = None, layout: str = "nchw",
                          dx: Wanted = None, dweight: Wanted = None, dbias: Wanted = None, dscale: Wanted = None,
                          dshift: Wanted = None, dpost_add: Wanted = None, dpre_bias: Wanted = None,
                          dslope: Wanted = None) -> Gradients:
    """The gradients of `channel_norm`, given dy, that of its y, and the arguments and statistics of the forward.

    dy              like y
    mean, rstd      [N, groups, ...], as the forward returned them; mean is None with statistics="mean_square"
    eps             the forward's. It matters with eps_kind="of_norm": where eps was above the norm rstd is a constant
    y               like y; as in `group_norm_backward`

    The other arguments, and what is returned, are as in `group_norm_backward`; dpost_add is like dy."""
    options = _channel_norm_options(groups, eps, statistics, eps_kind, activation, act_param)
    call = _Call("channel_norm", x, layout, {})
    call.give(dy=dy, pre_add=pre_add, post_add=post_add, y=y, du=du)
    call.give_parameters(mean=mean, rstd=rstd, pre_bias=pre_bias, slope=slope, weight=weight, bias=bias, scale=scale,
                         shift=shift)
    channel, pair = (call.channels,), (call.samples, call.channels)
    _take_gradients(call, {"weight": (dweight, weight is not None, channel), "bias": (dbias, bias is not None, channel),
                           "scale": (dscale, scale is not None, pair), "shift": (dshift, shift is not None, pair)},
                    dx, dpost_add, post_add is not None or y is not None, dpre_bias, dslope)
    call.run("backward", options)
    return Gradients(*map(call.output, Gradients._fields))


# ---- channel affine -------------------------------------------------------------------------------------------------


def channel_affine(x: Array, scale: Optional[Array] = None, bias: Optional[Array] = None, *,
                   activation: Optional[str] = None, act_param: Optional[float] = None, slope: Optional[Array] = None,
                   pre_add: Optional[Array] = None, pre_bias: Optional[Array] = None, return_sum: bool = False,
                   post_add: Optional[Array] = None, layout: str = "nchw", out: Optional[Array] = None,
                   out_sum: Optional[Array] = None) -> Any:
    """act(scale * u + bias [+ post_add]) with u = x [+ pre_bias] [+ pre_add]: no statistics.

    x               [N, C, ...] (layout="nhwc": [N, ..., C])
    scale, bias     [C] for all samples or [N, C] for each, both alike; None: 1 and 0
    the others      as in `group_norm`

    Returns y, like x, or the tuple (y, u) if u was requested."""
    call = _Call("affine", x, layout, _AFFINE_FORWARD_NAMES)
    call.give(pre_add=pre_add, post_add=post_add)
    call.give_parameters(pre_bias=pre_bias, slope=slope, weight=scale, bias=bias)
    options = AffineOptions(**_activation(activation, act_param))
    return _run_forward(call, options, (), return_sum, False, out, out_sum, None, None)


def channel_affine_backward(dy: Array, x: Array, scale: Optional[Array] = None, bias: Optional[Array] = None, *,
                            activation: Optional[str] = None, act_param: Optional[float] = None,
                            slope: Optional[Array] = None, pre_add: Optional[Array] = None,
                            pre_bias: Optional[Array] = None, post_add: Optional[Array] = None,
                            y: Optional[Array] = None, du: Optional[Array] = None, layout: str = "nchw",
                            dx: Wanted = None, dscale: Wanted = None, dbias: Wanted = None, dpost_add: Wanted = None,
                            dpre_bias: Wanted = None, dslope: Wanted = None) -> Gradients:
    """The gradients of `channel_affine`, given dy, that of its y, and its arguments: dscale = sum of dz * u, dbias =
    sum of dz, where dz = dy * act'(z), over what shares the parameter.

    The other arguments, and what is returned, are as in `group_norm_backward`. Without scale and bias, their gradients,
    where requested, are [C], and an array that is given for one decides between [C] and [N, C]."""
    call = _Call("affine", x, layout, _AFFINE_BACKWARD_NAMES)
    call.give(dy=dy, pre_add=pre_add, post_add=post_add, y=y, du=du)
    call.give_parameters(pre_bias=pre_bias, slope=slope, weight=scale, bias=bias)
    shape = call.shape_of("weight") or call.shape_of("bias") or (call.channels,)
    _take_gradients(call, {"weight": (dscale, scale is not None, shape), "bias": (dbias, bias is not None, shape)},
                    dx, dpost_add, post_add is not None or y is not None, dpre_bias, dslope)
    call.run("backward", AffineOptions(**_activation(activation, act_param)))
    return Gradients(call.output("dx"), None, call.output("dbias"), call.output("dweight"), None,
                     call.output("dpost_add"), call.output("dpre_bias"), call.output("dslope"))

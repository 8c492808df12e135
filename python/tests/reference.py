# SPDX-License-Identifier: MIT
"""What the operators are, in float64, and how far a right result may be from it: docs/numerics.md as code over whole
tensors, for the CPU and for CUDA. It shares nothing with the library; tests/ref/ is the same in C. Bounds are worst
cases over all roundings (on the CPU without the drift of the data, which tests/ref/ measures); none is fitted to what
the library gives.

A Problem has its arrays as float64 in the axes N, C, S; forward() and backward() return {output: (want, error)}, where
error is that before the result is stored in its dtype; compare() does the storing. A channel norm is computed as what
it is, the group norm of tensors without positions: each position is a sample.
"""
import dataclasses
import math
from typing import Optional

import numpy

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LARGEST = {"float64": float(numpy.finfo("f8").max), "float32": float(numpy.finfo("f4").max), "float16": 65504.0,
           "bfloat16": (2 - 2.0**-7) * 2.0**127}
STEP = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
DOUBLE = 2.0**-53
SECOND_ORDER = 1.01  # covers products of two errors

DEFAULT_PARAMETER = {"leaky_relu": 0.01, "elu": 1.0}


@dataclasses.dataclass
class Problem:
    """kind: "group" (statistics over a group of a sample), "batch" (over a channel), "channel" (over a group of a
    position) or "affine"."""
    kind: str
    dtype: str                    # of x
    x: numpy.ndarray              # [N, C, S]
    groups: int = 0
    columns: bool = False         # whether x has its channels last in memory
    weight: Optional[numpy.ndarray] = None  # [C]; affine: or [N, C]
    bias: Optional[numpy.ndarray] = None
    scale: Optional[numpy.ndarray] = None   # [N, C]
    shift: Optional[numpy.ndarray] = None
    pre_add: Optional[numpy.ndarray] = None
    pre_bias: Optional[numpy.ndarray] = None  # [C] or [N, C]
    post_add: Optional[numpy.ndarray] = None
    running_mean: Optional[numpy.ndarray] = None  # [C]; evaluate: what x is normalized with
    running_var: Optional[numpy.ndarray] = None
    evaluate: bool = False
    momentum: float = 0.1
    eps: float = 1e-5
    activation: str = "identity"
    act_param: Optional[float] = None
    slope: Optional[numpy.ndarray] = None  # prelu's, [C] or [1]
    on_cuda: bool = False
    writes_u: bool = False  # which rounds x + pre_bias
    statistics: str = "mean_and_variance"  # channel norm's: or "mean_square"
    eps_kind: str = "added"                # channel norm's: or "of_norm"

    def __post_init__(self):
        self.samples, self.channels, self.positions = self.x.shape
        self.is_ambiguous = self.channels == 1 or self.positions == 1  # memory is the same in either picture
        self.is_grouped = self.kind in ("group", "channel")
        self.is_double = self.dtype == "float64"
        parameter = DEFAULT_PARAMETER.get(self.activation, 0.0) if self.act_param is None else self.act_param
        self.parameter = parameter if self.is_double else float(numpy.float32(parameter))
        if self.slope is not None:
            self.parameter = self.slope.reshape(1, -1, 1)
        self.is_half = self.dtype in ("float16", "bfloat16")
        self.has_statistics = self.kind != "affine" and not self.evaluate
        self.u = self.x
        addends = [] if self.pre_bias is None else [self.pairs(self.pre_bias, 0)[:, :, None]]
        if self.pre_add is not None:
            addends.append(self.pre_add)
        for addend in addends:
            if not self.is_double:
                addend = addend.astype("f4")
            self.u = self.u + addend if self.is_double or len(addends) < 2 else self.u.astype("f4") + addend
        own = self.kind == "channel" or (self.kind == "batch" and not self.evaluate and self.pre_bias is not None and
                                         self.pre_bias.ndim == 2)
        if addends and not self.is_double and (self.pre_add is not None or self.writes_u or own):
            self.u = rounded(self.u, self.dtype)

    def by_position(self):
        """A channel norm with each position as a sample, [N * S, C, 1]; any other problem as it is."""
        if self.kind != "channel":
            return self
        pairs = {name: None if value is None else numpy.repeat(value, self.positions, axis=0)
                 for name, value in (("scale", self.scale), ("shift", self.shift))}
        post_add = None if self.post_add is None else self.to_positions(self.post_add)[..., None]
        flat = dataclasses.replace(self, x=self.to_positions(self.u)[..., None], pre_add=None, pre_bias=None,
                                   post_add=post_add, **pairs)
        flat.is_ambiguous = self.is_ambiguous
        return flat

    def to_positions(self, values):
        """[N, C, S] as [N * S, C]."""
        return numpy.moveaxis(values, 2, 1).reshape(self.samples * self.positions, values.shape[1])

    def from_positions(self, values):
        """The way back, for [N * S, C, 1], too; a number stays."""
        if numpy.ndim(values) == 0:
            return values
        return numpy.moveaxis(values.reshape(self.samples, self.positions, values.shape[1]), 2, 1)

    # Statistics are [N, groups] or [C]; these bring them to [N, C], and sum [N, C] over what shares statistics.

    def spread(self, statistics):
        if self.is_grouped:
            return numpy.repeat(statistics, self.channels // max(self.groups, 1), axis=1)
        return numpy.broadcast_to(statistics, (self.samples, self.channels))

    def set_sum(self, pairs):
        if self.is_grouped:
            groups = pairs.reshape(self.samples, self.groups, self.channels // self.groups)
            return self.spread(groups.sum(axis=2))
        return self.spread(pairs.sum(axis=0))

    @property
    def set_shape(self):
        """rows, channels and positions of one set; of a channel norm by_position"""
        if self.is_grouped:
            return 1, self.channels // self.groups, self.positions
        return self.samples, 1, self.positions

    def pairs(self, parameter, absent):
        if parameter is None:
            return numpy.full((self.samples, self.channels), float(absent))
        return numpy.broadcast_to(parameter, (self.samples, self.channels)).astype("f8")


def rounded(values, dtype):
    """float32 or float64 values as the nearest of dtype, in float64."""
    if dtype == "bfloat16":
        import ml_dtypes
        return values.astype("f4").astype(ml_dtypes.bfloat16).astype("f8")
    return values.astype(dtype).astype("f8")


# ---- activations ----------------------------------------------------------------------------------------------------

_erfc = numpy.vectorize(math.erfc, otypes=["f8"])


def _sigmoid(z):
    with numpy.errstate(over="ignore"):
        return 1 / (1 + numpy.exp(-z))


def _normal(z):
    return 0.5 * _erfc(-z * math.sqrt(0.5)), math.sqrt(0.5 / math.pi) * numpy.exp(-0.5 * z * z)


def _tanh_argument(z):
    return 2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)


def act(name, parameter, z):
    if name == "relu":
        return numpy.maximum(z, 0)
    if name in ("leaky_relu", "prelu"):
        return numpy.where(z > 0, z, parameter * z)
    if name == "silu":
        return z * _sigmoid(z)
    if name == "gelu":
        return z * _normal(z)[0]
    if name == "gelu_tanh":
        return z * _sigmoid(_tanh_argument(z))
    if name == "hardswish":
        return z * numpy.clip(z + 3, 0, 6) / 6
    if name == "elu":
        return numpy.where(z > 0, z, parameter * numpy.expm1(numpy.minimum(z, 0)))
    if name == "mish":
        return z * numpy.tanh(numpy.logaddexp(0, z))
    if name == "relu6":
        return numpy.clip(z, 0, 6)
    return z


def slope(name, parameter, z):
    """The derivative; at kinks PyTorch's choice. At NaN those that compare z pass dy on, others are NaN."""
    if name == "relu":
        return numpy.where(z <= 0, 0.0, 1.0)
    if name in ("leaky_relu", "prelu"):
        return numpy.where(z <= 0, parameter, 1)
    if name == "silu":
        return _sigmoid(z) * (1 + z * _sigmoid(-z))
    if name == "gelu":
        distribution, density = _normal(z)
        return distribution + z * density
    if name == "gelu_tanh":
        t = _tanh_argument(z)
        return _sigmoid(t) * (1 + z * _sigmoid(-t) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z))
    if name == "hardswish":
        return numpy.where(z <= -3, 0, numpy.where(z < 3, z / 3 + 0.5, 1))
    if name == "elu":
        return numpy.where(z > 0, 1, parameter * numpy.exp(numpy.minimum(z, 0)))
    if name == "mish":
        t = numpy.tanh(numpy.logaddexp(0, z))
        return t + z * _sigmoid(z) * (1 - t * t)
    if name == "relu6":
        return numpy.where((z <= 0) | (z >= 6), 0.0, 1.0)
    return numpy.ones_like(z)


# Roundings that computing y and act' takes, in units of u: the table of docs/numerics.md.


def _computed(name, z, y):
    size = abs(y)
    if name == "gelu_tanh":
        t = _tanh_argument(z)
        return (6 + 5 * abs(t) * _sigmoid(-t)) * size
    if name == "hardswish":
        return numpy.where(abs(z) < 3.01, z * z / 6 + 2 * size, 0)
    if name == "elu":
        return numpy.where(z > 0, 0, 11 * size)
    return {"leaky_relu": 2, "prelu": 2, "silu": 6, "gelu": 20, "mish": 9}[name] * size


def _computed_slope(name, z, derivative):
    size = abs(derivative)
    if name in ("leaky_relu", "prelu"):
        return size
    if name == "silu":
        return 11 * abs(z) * _sigmoid(z) * _sigmoid(-z) + 5 * _sigmoid(z) + size
    if name == "gelu":
        distribution, density = _normal(z)
        return 19 * distribution + 8 * abs(z) * density + size
    if name == "gelu_tanh":
        t = _tanh_argument(z)
        s, rest = _sigmoid(t), _sigmoid(-t)
        steep = abs(z) * s * rest * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)
        return (5 + 5 * abs(t) * rest) * s + (17 + 5 * abs(t)) * steep + size
    if name == "hardswish":
        return numpy.where(abs(z) < 3.01, abs(z) / 3 + size, 0)
    if name == "elu":
        return numpy.where(z > 0, 0, 4 * size)
    t = numpy.tanh(numpy.logaddexp(0, z))  # mish
    return 8 * abs(t) + 26 * abs(derivative - t) + size


_STEEPEST = {"silu": 1.0999, "gelu": 1.1290, "gelu_tanh": 1.1292, "hardswish": 1.5, "mish": 1.0886}  # L
_CHANGE = {"silu": 0.5, "gelu": 0.7979, "gelu_tanh": 0.7979, "hardswish": 1 / 3, "mish": 0.645}      # C


# The device's forms: absolute, half where they are stored in 16 bits.


def _computed_on_cuda(name, z, y, derivative, half):
    unit, size = 2.0**-24, numpy.maximum(abs(y), abs(z * derivative))
    roundings = {"leaky_relu": 1, "prelu": 1, "silu": 8, "gelu": 12, "gelu_tanh": 14, "hardswish": 4,
                 "elu": 4}.get(name)
    if name == "mish":
        roundings = 16 + half * (4 + 2.4 * numpy.minimum(abs(z), 100))
    return unit * roundings * size + (half * 2.0**-12 * abs(z) if name in ("silu", "gelu_tanh") else 0)


def _computed_slope_on_cuda(name, z, derivative, half):
    unit, size, fast = 2.0**-24, abs(derivative), 2.0**-12
    if name in ("leaky_relu", "prelu"):
        return unit * size
    if name == "silu":
        return unit * (_sigmoid(z) * (8 + 10 * abs(z)) + size) + half * 1.01 * fast * (1 + abs(z))
    if name == "gelu":
        distribution, density = _normal(z)
        return unit * (12 * distribution + abs(z) * density * (20 + z * z + half * (4 + 1.2 * z * z)) + size)
    if name == "gelu_tanh":
        z = numpy.clip(z, -12, 12)
        t = _tanh_argument(z)
        s, rest = _sigmoid(t), _sigmoid(-t)
        steep = abs(z) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)
        return (unit * (s * (6 + 5 * abs(t) * rest) * (1 + steep) + 8 * steep * s + 2 * size) +
                half * 1.01 * fast * (1 + steep))
    if name == "hardswish":
        return unit * 4 * size
    if name == "elu":
        return unit * (6 + half * 2.4 * numpy.minimum(abs(z), 100)) * size
    t = numpy.tanh(numpy.logaddexp(0, z))  # mish
    steep = 16 + half * (4 + 2.4 * numpy.minimum(abs(z), 100))
    return (unit * (steep * t + abs(z) * _sigmoid(z) * (10 * (1 - t * t) + 2 * steep * t * t + 2) + size) +
            half * fast * abs(z) * (1 - t * t))


def _steepest(name, parameter):
    return numpy.maximum(1, abs(parameter)) if name in ("leaky_relu", "prelu", "elu") else _STEEPEST.get(name, 1)


def _change(name, parameter):
    return abs(parameter) if name == "elu" else _CHANGE.get(name, 0)


def _jump(name, parameter, z, z_error):
    """Where z may be on the other side of a kink."""
    if name == "relu":
        return (abs(z) <= z_error) * 1.0
    if name in ("leaky_relu", "prelu", "elu"):
        return (abs(z) <= z_error) * abs(1 - parameter)
    if name == "hardswish":
        return (abs(abs(z) - 3) <= z_error) * 0.5
    if name == "relu6":
        return (numpy.minimum(abs(z), abs(z - 6)) <= z_error) * 1.0
    return numpy.zeros_like(z)


def _flushed(problem, z):
    return 2.0**-1060 if problem.is_double else 2.0**-124 * (1 + abs(z))


def act_error(problem, z, z_error):
    name, parameter = problem.activation, problem.parameter
    steep = abs(slope(name, parameter, z)) + _change(name, parameter) * z_error + _jump(name, parameter, z, z_error)
    error = numpy.minimum(steep, _steepest(name, parameter)) * z_error
    if name in ("identity", "relu", "relu6"):
        return error
    y = act(name, parameter, z)
    if problem.on_cuda and not problem.is_double:
        computed = _computed_on_cuda(name, z, y, slope(name, parameter, z), problem.is_half)
        return error + SECOND_ORDER * computed + _flushed(problem, z)
    computed = _computed(name, z, y)
    if problem.is_double:  # libm's and this reference's own
        computed = 2 * computed + (8 + 4 * z * z) * abs(y)
    return error + SECOND_ORDER * arithmetic_unit(problem) * computed + _flushed(problem, z)


def slope_error(problem, z, z_error):
    name, parameter = problem.activation, problem.parameter
    if name == "identity":
        return numpy.zeros_like(z)
    error = _change(name, parameter) * z_error + _jump(name, parameter, z, z_error)
    if name in ("relu", "relu6"):
        return error
    if problem.on_cuda and not problem.is_double:
        computed = _computed_slope_on_cuda(name, z, slope(name, parameter, z), problem.is_half)
        return error + SECOND_ORDER * computed + _flushed(problem, z)
    computed = _computed_slope(name, z, slope(name, parameter, z))
    if problem.is_double:
        computed = 2 * computed + 8 * (1 + abs(z))
    return error + SECOND_ORDER * arithmetic_unit(problem) * computed + _flushed(problem, z)


# ---- statistics -----------------------------------------------------------------------------------------------------


def arithmetic_unit(problem):
    return DOUBLE if problem.is_double else 2.0**-24


def _tiny(problem):
    return STEP["float64" if problem.is_double else "float32"]


def growth(roundings, unit):
    return roundings * unit / (1 - roundings * unit)


@dataclasses.dataclass
class Sums:
    """docs/numerics.md, "Chunks" and "CUDA"."""
    additions: float        # that a value meets on its way into a chunk's sum; CUDA: into the set's
    shift_additions: float
    shift_ratio: float      # r
    joins: float            # J
    shift_unit: float       # how far, relatively, the shift of elements may be from the mean
    coefficients: float     # roundings of what elements are multiplied with
    in_thread: float = 0    # CUDA: of the additions, those in a thread, in the joins below the last, in the last
    below: float = 0
    last: float = 0
    products: float = 0             # roundings of what the backward sums, beside those that every such sum has
    parameter_additions: float = 0  # additions and joins of dweight and its like, where others
    parameter_joins: float = 0


def _sums_on_cuda(problem, columns):
    rows, channels, positions = problem.set_shape
    per_channel = rows * positions
    count = per_channel * channels
    pack = 2 if problem.is_double else 8 if problem.is_half else 4
    if columns:
        thread = in_thread = min(128, per_channel)
        below = min(16, per_channel) + 2 * 7 + 4 + min(max(16, math.ceil(channels / 32)), channels)
        last = min(per_channel, 768 / max(1, min(32, channels / (2 * pack)))) + 7
        backward = in_thread + below
    else:
        lanes = 1
        while lanes < 32 and lanes * pack < positions:
            lanes *= 2
        thread, in_thread = min(48 * pack, count), min(24 * pack, count) + 1
        below, last = 3 + 2 * 7, 0
        if count > 1536:
            below += max(4 * 15, 7 + 4 * math.ceil(min(384, count) / 32))
        backward = min(22 * pack + max(27, 512 / lanes), count) + 10
    shift_unit = 0.0 if problem.is_double else UNIT[problem.dtype] if columns else 2.0**-24
    return Sums(max(in_thread + below + last, backward), 0, max(thread, 1), 16 + count / 256, shift_unit, 8, in_thread,
                below, last)


def _sums_of_channels(problem, columns):
    """docs/numerics.md, "Norm over channels"; each sample is a position."""
    _, channels, _ = problem.set_shape
    if columns:
        additions, parameters = math.ceil(min(channels, 4096) / (16 if problem.is_double else 32)) + 6, 128
    else:
        additions, parameters = min(channels, 128), 68 if problem.is_double else 36
    return Sums(additions, additions, 1, 4 + channels / 128, 0.0 if problem.is_double else 2.0**-24, 3, products=4,
                parameter_additions=min(problem.samples, parameters), parameter_joins=4 + problem.samples)


def sums(problem):
    def one(columns):
        if problem.on_cuda:
            return _sums_on_cuda(problem, columns)
        if problem.kind == "channel":
            return _sums_of_channels(problem, columns)
        rows, channels, positions = problem.set_shape
        per_channel = rows * positions
        count = per_channel * channels
        rest = 0.0 if problem.is_double else 2.0**-24, 1
        if columns:
            return Sums(min(128, per_channel), 8, 1 if per_channel <= 8 else min(per_channel, 128) / 8,
                        16 + per_channel / 16 + channels, *rest)
        per_lane = 4096 / max(positions, 1) if positions < 32 else 4096 / 32 + 4096 / positions
        return Sums(min(per_lane, count) + 5, 64 + 5, 1 if count <= 64 else min(count, 4096) / 64, 16 + count / 256,
                    *rest)

    positions_are_samples = problem.kind == "channel" and problem.on_cuda
    if not problem.is_ambiguous and not positions_are_samples:
        return one(problem.columns)
    both = Sums(*numpy.maximum(dataclasses.astuple(one(False)), dataclasses.astuple(one(True))))
    if positions_are_samples:  # a thread goes on from one to the next
        both.parameter_additions = both.additions + min(problem.samples, 128)
    return both


def statistics(problem):
    """mean, M2 and values of each set."""
    u = problem.u.astype(numpy.longdouble)
    if problem.is_grouped:
        sets, axes = u.reshape(problem.samples, problem.groups, -1), (2,)
    else:
        sets, axes = u, (0, 2)
    mean = sets.mean(axis=axes, keepdims=True) * (problem.statistics != "mean_square")
    m2 = ((sets - mean)**2).sum(axis=axes)
    rows, channels, positions = problem.set_shape
    return mean.squeeze(axes).astype("f8"), m2.astype("f8"), rows * channels * positions


def _widest(problem, mean):
    """The farthest value of each set from its mean."""
    if problem.is_grouped:
        sets = problem.u.reshape(problem.samples, problem.groups, -1)
        return abs(sets - mean[..., None]).max(axis=2)
    return abs(problem.u - mean[:, None]).max(axis=(0, 2))


def _rstd(problem, m2, count):
    with numpy.errstate(divide="ignore", invalid="ignore"):
        if problem.eps_kind == "of_norm":
            return math.sqrt(count) / numpy.maximum(numpy.sqrt(m2), problem.eps)
        return 1 / numpy.sqrt(m2 / count + problem.eps)


def _rstd_error(problem, m2, m2_error, count):
    """Of a channel norm, relative."""
    least = 0 if problem.eps_kind == "of_norm" else -count * problem.eps
    below, above = (_rstd(problem, numpy.maximum(value, least), count) for value in (m2 - m2_error, m2 + m2_error))
    rstd = _rstd(problem, m2, count)
    return numpy.maximum(below / rstd - 1, 1 - above / rstd) + 6 * DOUBLE


def statistics_error(problem, mean, m2, count):
    """Of the mean and M2, absolute, and of rstd, relative."""
    chunk = sums(problem)
    if problem.statistics == "mean_square":
        m2_error = (growth(chunk.additions + 1, arithmetic_unit(problem)) + chunk.joins * DOUBLE) * m2
        return numpy.zeros_like(m2), m2_error, _rstd_error(problem, m2, m2_error, count)
    unit, joins = arithmetic_unit(problem), chunk.joins * DOUBLE
    grown = growth(chunk.additions + 2, unit)
    shift = SECOND_ORDER * growth(chunk.shift_additions + 1, unit) * abs(mean)
    factor = 1 + max(2 * chunk.shift_ratio, 8) if chunk.shift_ratio > 1 else 1
    about_shift = factor * m2 + 2 * count * shift * shift  # T
    if problem.on_cuda:
        drift = SECOND_ORDER * _widest(problem, mean)
        about_shift = numpy.minimum(about_shift, 2 * m2 + 4 * count * (drift * drift + shift * shift))
        about_shift = numpy.minimum(about_shift, (numpy.sqrt(m2) + math.sqrt(count) * drift)**2)
        in_thread, below, last = (growth(n + 2, unit) for n in (chunk.in_thread, chunk.below, chunk.last))
        grown, across = in_thread + below + last, 2 * numpy.sqrt(m2 * about_shift)
        m2_error = SECOND_ORDER * (in_thread * (3 * about_shift + across) + below * (m2 + across) + last * m2 +
                                   grown * grown * about_shift)
    else:
        m2_error = grown * (3 * about_shift + 2 * numpy.sqrt(m2 * about_shift)) * SECOND_ORDER
    m2_error = (m2_error + joins * DOUBLE * count * mean * mean + 8 * joins * m2 +
                8 * abs(mean) * DOUBLE * numpy.sqrt(count * chunk.joins * m2))
    mean_error = grown * numpy.sqrt(about_shift / count) + 2 * joins * (abs(mean) + numpy.sqrt(about_shift / count))
    if problem.kind == "channel":
        return mean_error, m2_error, _rstd_error(problem, m2, m2_error, count)
    error, rounding = m2_error, 4 * DOUBLE
    if problem.on_cuda and not problem.is_double:
        # Squares are f32: small ones are lost, and where their sum is too large nothing is known.
        m2_error = numpy.where(2 * about_shift >= LARGEST["float32"], numpy.inf, m2_error + 4 * count * _tiny(problem))
        mean_error = mean_error + 4 * _tiny(problem)
        error = m2_error + 2 * unit * (m2 + count * abs(problem.eps))
        rounding += 4 * unit
    variance, below = m2 / count + problem.eps, (m2 - error) / count + problem.eps
    with numpy.errstate(divide="ignore", invalid="ignore"):
        rstd_error = numpy.where((variance > 0) & (below > 0), numpy.sqrt(variance / below) - 1, numpy.inf)
    return mean_error, m2_error, rstd_error + rounding


# ---- forward --------------------------------------------------------------------------------------------------------


def _affine(problem, mean, rstd, mean_error, rstd_error):
    """z, its error, gain and |u - k|, of [N, C, S]; mean, rstd and their errors are [N, C]."""
    unit, chunk = arithmetic_unit(problem), sums(problem)
    weight, bias = problem.pairs(problem.weight, 1), problem.pairs(problem.bias, 0)
    factor, shift = 1 + problem.pairs(problem.scale, 0), problem.pairs(problem.shift, 0)
    gain, offset = (rstd * weight * factor)[..., None], (bias * factor + shift)[..., None]
    parts = (abs(bias * factor) + abs(shift))[..., None]
    centred = problem.u - mean[..., None]
    z0 = centred * gain + offset
    z = z0 if problem.post_add is None else z0 + problem.post_add
    rounding = chunk.shift_unit * abs(mean)[..., None]
    shifted = abs(centred) + mean_error[..., None] + rounding
    size = abs(gain)
    error = (size * (mean_error[..., None] + abs(centred) * rstd_error[..., None]) +
             (1 + chunk.coefficients) * unit * size * shifted + unit * abs(z0))
    error = error + unit * (4 * parts + 3 * size * rounding if problem.on_cuda else abs(offset) + size * rounding)
    if problem.post_add is not None:
        error = error + unit * abs(z)
    if problem.is_double:
        error = error + 8 * unit * (size * abs(centred) + parts + abs(z))
    return z, SECOND_ORDER * error + _tiny(problem) * (2 + shifted), gain, shifted


def _given(problem):
    """mean, rstd and their errors, [N, C], where they are not of x."""
    zeros = numpy.zeros((problem.samples, problem.channels))
    if problem.kind == "affine":
        return zeros, zeros + 1, zeros, zeros
    rstd = 1 / numpy.sqrt(problem.pairs(problem.running_var, 1) + problem.eps)
    return problem.pairs(problem.running_mean, 0), rstd, zeros, zeros + 4 * DOUBLE


def forward(problem):
    """u, y, mean and rstd ([N, groups], [C], [N, groups, S]), running_mean and running_var."""
    outputs = _forward(problem.by_position())
    if problem.kind != "channel":
        return outputs
    return {name: tuple(map(problem.from_positions, output)) for name, output in outputs.items()}


def _forward(problem):
    outputs = {"u": (problem.u, 0.0)}
    if problem.has_statistics:
        mean, m2, count = statistics(problem)
        mean_error, m2_error, rstd_error = statistics_error(problem, mean, m2, count)
        rstd = _rstd(problem, m2, count)
        outputs["mean"], outputs["rstd"] = (mean, mean_error), (rstd, rstd * rstd_error)
        if problem.running_mean is not None and count > 1:
            outputs.update(_running(problem, mean, m2 / (count - 1), mean_error, m2_error / (count - 1)))
        each = tuple(map(problem.spread, (mean, rstd, mean_error, rstd_error)))
    else:
        each = _given(problem)
    z, z_error, _, _ = _affine(problem, *each)
    outputs["y"] = (act(problem.activation, problem.parameter, z), act_error(problem, z, z_error))
    return outputs


def _running(problem, mean, variance, mean_error, variance_error):
    size = abs(mean)
    if problem.kind == "group":  # instance norm: means over the batch
        samples = problem.samples
        mean, variance, size = mean.mean(axis=0), variance.mean(axis=0), size.mean(axis=0)
        mean_error = mean_error.mean(axis=0) + samples * DOUBLE * size
        variance_error = variance_error.mean(axis=0) + samples * DOUBLE * variance
    momentum, unit = problem.momentum, arithmetic_unit(problem)
    outputs = {}
    for name, old, new, error in (("running_mean", problem.running_mean, mean, mean_error),
                                  ("running_var", problem.running_var, variance, variance_error)):
        steps = 4 * unit * (abs(1 - momentum) * abs(old) + abs(momentum) * abs(new))
        outputs[name] = ((1 - momentum) * old + momentum * new, abs(momentum) * error + steps)
    return outputs


# ---- backward -------------------------------------------------------------------------------------------------------


def backward(problem, dy, mean=None, rstd=None, du=None):
    """dx, dweight, dbias, dscale, dshift, dpost_add, dslope, given the statistics ([N, groups], [C] or [N, groups, S];
    mean None for 0) that the library is."""
    if problem.kind != "channel":
        return _backward(problem, dy, mean, rstd, du)
    mean = numpy.zeros_like(rstd) if mean is None else mean
    dy, du = (None if value is None else problem.to_positions(value)[..., None] for value in (dy, du))
    outputs = _backward(problem.by_position(), dy, problem.to_positions(mean), problem.to_positions(rstd), du)
    for name in ("dx", "dpost_add"):
        outputs[name] = tuple(map(problem.from_positions, outputs[name]))
    for name in ("dscale", "dshift"):
        outputs[name] = tuple(problem.from_positions(value).sum(axis=2) for value in outputs[name])
    return outputs


def _is_clamped(problem, rstd):
    """Where the given rstd does not depend on u."""
    if problem.eps_kind != "of_norm" or problem.eps <= 0:
        return numpy.zeros_like(rstd, dtype=bool)
    _, channels, _ = problem.set_shape
    return rstd >= rounded(numpy.sqrt(float(channels)) / problem.eps, "float64" if problem.is_double else "float32")


def _backward(problem, dy, mean, rstd, du):
    unit, tiny = arithmetic_unit(problem), _tiny(problem)
    zeros = numpy.zeros((problem.samples, problem.channels))
    if problem.has_statistics:
        mean, rstd, mean_error, rstd_error = problem.spread(mean), problem.spread(rstd), zeros, zeros
    else:
        mean, rstd, mean_error, rstd_error = _given(problem)
    z, z_error, gain, shifted = _affine(problem, mean, rstd, mean_error, rstd_error)
    dz = dy * slope(problem.activation, problem.parameter, z)
    dz_error = numpy.zeros_like(dz)
    if problem.activation != "identity":
        dz_error = slope_error(problem, z, z_error) * abs(dy) + unit * abs(dz) + tiny
    normalized = (problem.u - mean[..., None]) * rstd[..., None]
    weight, bias = problem.pairs(problem.weight, 1), problem.pairs(problem.bias, 0)
    factor = 1 + problem.pairs(problem.scale, 0)
    chunk = sums(problem)
    shift_error, coefficients = chunk.shift_unit * abs(mean), chunk.coefficients * unit

    # Sums over the positions of one channel of one sample.
    size, size_centred = abs(dz).sum(axis=2), (abs(dz) * shifted).sum(axis=2)

    def sum_errors(grown):
        sum_error = 1.01 * (grown * size + dz_error.sum(axis=2))
        return sum_error, 1.01 * (grown * size_centred + (dz_error * shifted).sum(axis=2)) + shift_error * sum_error

    sum_error, centred_error = sum_errors(growth(chunk.additions + 3 + chunk.products, unit) + chunk.joins * DOUBLE)
    s1, s2 = dz.sum(axis=2), (dz * normalized).sum(axis=2)

    # dx = gain * dz + q * (u - k) + r
    steps = abs(gain) * abs(dz)
    error = abs(gain) * (dz_error + coefficients * abs(dz))
    dx = gain * dz
    if problem.has_statistics:
        rows, channels, positions = problem.set_shape
        count = rows * channels * positions
        m1, m2 = problem.set_sum(s1 * factor * weight) / count, problem.set_sum(s2 * factor * weight) / count
        has_m1, has_m2 = problem.statistics != "mean_square", ~_is_clamped(problem, rstd)
        m1, m2 = m1 * has_m1, m2 * has_m2
        dx = dx - rstd[..., None] * (m1[..., None] + normalized * m2[..., None])
        wide = abs(factor * weight)
        m2_error = rstd * problem.set_sum(wide * centred_error) / count * has_m2
        q = rstd * rstd * abs(m2)
        q_error = rstd * rstd * m2_error + coefficients * q
        r = rstd * abs(m1) + shift_error * q
        r_error = (rstd * problem.set_sum(wide * sum_error) / count * has_m1 + shift_error * rstd * rstd * m2_error +
                   coefficients * r)
        q, q_error, r, r_error = (value[..., None] for value in (q, q_error, r, r_error))
        error = error + shifted * (q_error + 2 * unit * q) + r_error + unit * (shifted * q + r)
        steps = steps + shifted * q + r
    error = error + unit * abs(dx)
    if problem.is_double:
        error = error + 16 * unit * steps
    if du is not None:
        dx = dx + du
        error = error + unit * abs(dx)
    error = 1.01 * error + tiny * (4 + shifted + abs(dz))

    grown = (growth((chunk.parameter_additions or chunk.additions) + 3 + chunk.products, unit) +
             (chunk.parameter_joins or chunk.joins) * DOUBLE)
    sum_error, centred_error = sum_errors(grown)
    noise = 16 * DOUBLE  # of the double coefficients and of this reference
    wide_sum, wide_centred = sum_error + noise * size, rstd * (centred_error + noise * size_centred)
    outputs = {"dx": (dx, error), "dpost_add": (dz, dz_error),
               "dscale": (s2 * weight + s1 * bias, abs(weight) * wide_centred + abs(bias) * wide_sum),
               "dshift": (s1, sum_error)}
    each = {"dweight": (s2 * factor, abs(factor) * wide_centred, abs(factor) * rstd * size_centred),
            "dbias": (s1 * factor, abs(factor) * wide_sum, abs(factor) * size)}
    if problem.slope is not None:
        terms = numpy.where(z > 0, 0, dy * z)
        error_of_z = numpy.where(z > z_error, 0, abs(dy) * z_error) + tiny
        pair_size = abs(terms).sum(axis=2)
        pair_error = 1.01 * (grown * pair_size + error_of_z.sum(axis=2))
        pair_error = pair_error + (noise + problem.samples * DOUBLE) * pair_size
        axes = 0 if len(problem.slope) == problem.channels else None
        if axes is None:
            pair_error = pair_error + problem.channels * DOUBLE * pair_size
        outputs["dslope"] = (terms.sum(axis=2).sum(axis=axes).reshape(-1), pair_error.sum(axis=axes).reshape(-1))
    for name, (want, pair_error, pair_size) in each.items():
        per_sample = any(p is not None and p.ndim == 2 for p in (problem.weight, problem.bias))
        if per_sample:
            outputs[name] = (want, pair_error)
        else:
            outputs[name] = (want.sum(axis=0), (pair_error + problem.samples * DOUBLE * pair_size).sum(axis=0))
    return outputs


# ---- comparing ------------------------------------------------------------------------------------------------------


def compare(name, got, want, error, dtype):
    """Asserts that every element of `got` is within `error`, and the rounding to dtype, of `want`; returns how much of
    that budget the worst one used."""
    got = numpy.asarray(got).astype("f8")
    want, error = numpy.broadcast_arrays(numpy.asarray(want, "f8"), numpy.asarray(error, "f8"))
    assert got.shape == want.shape, f"{name} has shape {got.shape}, expected {want.shape}"
    if got.size == 0:
        return 0.0
    assert not numpy.isnan(error).any() and not numpy.isinf(error).any(), f"{name}: the bound says nothing"
    budget = numpy.where(error == 0, 0, error + UNIT[dtype] * (abs(want) + error) + STEP[dtype] / 2)
    want = numpy.where(error == 0, rounded(want, dtype), want)
    overflow = numpy.isinf(got) & (abs(want) + budget >= LARGEST[dtype] * (1 + UNIT[dtype] / 2)) & (got * want > 0)
    equal = (got == want) | overflow | (numpy.isnan(got) & numpy.isnan(want))
    with numpy.errstate(divide="ignore", invalid="ignore"):
        used = numpy.where(equal, 0, abs(got - want) / budget)
    used = numpy.where(numpy.isnan(used), numpy.inf, used)
    worst = numpy.unravel_index(used.argmax(), used.shape)
    assert used[worst] <= 1, (f"{name}{list(map(int, worst))}: got {got[worst]!r}, want {want[worst]!r}, "
                              f"{used[worst]:.3g} times its bound {budget[worst]:.3g}")
    return float(used[worst])

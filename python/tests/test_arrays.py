# SPDX-License-Identifier: MIT
"""normfuse over arrays, against reference.py: every operator, direction, dtype, layout and activation; outputs given
and made; slices, strides, ranks, empty arrays; what is refused; other libraries' arrays; threads."""
import gc
import itertools
import os
import pathlib
import re
import subprocess
import sys
import threading
import tracemalloc
import weakref

import numpy
import pytest
from numpy.lib.stride_tricks import as_strided

import normfuse
import reference
from reference import Problem, compare, rounded

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = ["float64", "float32", "float16", "bfloat16"]
ACTIVATIONS = [None, "relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "elu", "mish", "relu6", "prelu"]
OPERATORS = ["group_norm", "instance_norm", "batch_norm", "batch_norm_eval", "instance_norm_eval", "channel_norm",
             "channel_norm_mean_square", "affine", "affine_per_sample"]
# How x lies in memory, and which axes it is handed over with.
LAYOUTS = ["contiguous", "channels_last", "nhwc", "nhwc_contiguous", "slice_c", "slice_n", "slice_c_last"]


def numpy_dtype(name):
    return numpy.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def lay(values, dtype, layout):
    """[N, C, ...] float64 values as an array of that layout; for "nhwc..." its axes are N, ..., C."""
    values = values.astype("f4").astype(numpy_dtype(dtype)) if dtype == "bfloat16" else values.astype(dtype)
    n, c = values.shape[:2]
    last = numpy.ascontiguousarray(numpy.moveaxis(values, 1, -1))
    if layout == "contiguous":
        return numpy.ascontiguousarray(values)
    if layout == "channels_last":
        return numpy.moveaxis(last, -1, 1)
    if layout == "nhwc":
        return last
    if layout == "nhwc_contiguous":  # axes N, ..., C over memory that is N, C, ...
        return numpy.moveaxis(numpy.ascontiguousarray(values), 1, -1)
    if layout == "slice_c":
        whole = numpy.full((n, c + 3, *values.shape[2:]), 7, values.dtype)
        whole[:, 1:c + 1] = values
        return whole[:, 1:c + 1]
    if layout == "slice_n":
        whole = numpy.full((2 * n, *values.shape[1:]), 7, values.dtype)
        whole[::2] = values
        return whole[::2]
    assert layout == "slice_c_last"
    whole = numpy.full((n, *values.shape[2:], c + 3), 7, values.dtype)
    whole[..., 2:c + 2] = last
    return numpy.moveaxis(whole[..., 2:c + 2], -1, 1)


def axes_of(layout):
    return "nhwc" if layout.startswith("nhwc") else "nchw"


def dense(array, layout):
    """Back to float64 [N, C, S]."""
    array = numpy.asarray(array)
    if axes_of(layout) == "nhwc":
        array = numpy.moveaxis(array, -1, 1)
    return array.astype("f8").reshape(array.shape[0], array.shape[1], -1)


class Case:
    """Random inputs of one operator, as float64 values that their dtypes hold, and its two calls."""

    def __init__(self, operator, dtype, layout="contiguous", activation=None, act_param=None, shape=(3, 6, 4, 5),
                 groups=3, mean=0.25, parameter_dtype=None, extras=False, seed=0, momentum=0.1,
                 one_slope=False, eps=1e-5, eps_kind="added"):
        random = numpy.random.default_rng([seed, *map(ord, operator)])
        n, c = shape[:2]
        self.operator, self.dtype, self.layout, self.shape, self.momentum = operator, dtype, layout, shape, momentum
        self.parameter_dtype = parameter_dtype or dtype
        per_sample = operator == "affine_per_sample"

        def big(center=0.0):
            return rounded(center + random.standard_normal(shape), dtype)

        def parameter(center, wide=False, spread=0.25):
            values = center + spread * random.standard_normal((n, c) if wide else (c,))
            return rounded(values, self.parameter_dtype)

        self.values = {"x": big(mean), "dy": big(), "weight": parameter(1, per_sample),
                       "bias": parameter(0, per_sample)}
        if activation == "prelu":
            self.values["slope"] = parameter(0.25)[:1 if one_slope else c]
        if extras:
            self.values.update(pre_add=big(), post_add=big(), du=big(),
                               pre_bias=parameter(0, operator.startswith(("instance", "affine_per"))))
            if operator.startswith(("group", "instance", "channel")):
                self.values.update(scale=parameter(0, True), shift=parameter(0, True))
        if operator.startswith(("batch_norm", "instance_norm")):
            self.values.update(running_mean=parameter(mean), running_var=abs(parameter(1)))
        kind = ("group" if operator.startswith(("group", "instance")) else
                "batch" if operator.startswith("batch") else
                "channel" if operator.startswith("channel") else "affine")
        flat = {name: value.reshape(n, c, -1) if value.ndim > 2 else value for name, value in self.values.items()
                if name not in ("dy", "du")}
        if len(shape) == 2:
            flat.update({name: value.reshape(n, c, 1) for name, value in self.values.items()
                         if name in ("x", "pre_add", "post_add")})
        self.problem = Problem(kind=kind, dtype=dtype,
                               groups=groups if operator.startswith(("group", "channel")) else c,
                               columns=layout in ("channels_last", "nhwc", "slice_c_last"), momentum=momentum,
                               evaluate=operator.endswith("eval"), activation=activation or "identity",
                               act_param=act_param, eps=eps, eps_kind=eps_kind,
                               statistics="mean_square" if operator.endswith("mean_square") else "mean_and_variance",
                               **flat)
        self.words = {"activation": activation, "act_param": act_param, "layout": axes_of(layout)}
        if kind == "channel":
            self.words.update(groups=groups, eps=eps, eps_kind=eps_kind, statistics=self.problem.statistics)

    def array(self, name):
        if name in ("x", "dy", "du", "pre_add", "post_add"):
            return lay(self.values[name], self.dtype, self.layout)
        return self.values[name].astype(numpy_dtype(self.parameter_dtype))

    def given(self, *names):
        return {name: self.array(name) for name in names if name in self.values}

    def forward(self, **words):
        words = {**self.words, **self.given("pre_add", "pre_bias", "post_add", "bias", "slope"), **words}
        x = words.pop("x", None)
        x = self.array("x") if x is None else x
        if self.operator.startswith("affine"):
            return normfuse.channel_affine(x, self.array("weight"), **words)
        words = {**self.given("weight", "scale", "shift"), **words}
        if self.operator == "group_norm":
            return normfuse.group_norm(x, self.problem.groups, **words)
        if self.operator.startswith("channel"):
            return normfuse.channel_norm(x, **words)
        if self.operator.startswith("batch"):
            words = {**self.given("running_mean", "running_var"), "momentum": self.momentum, **words}
            return normfuse.batch_norm(x, training=not self.problem.evaluate, **words)
        if self.problem.evaluate:
            words = {**self.given("running_mean", "running_var"), **words}
        return normfuse.instance_norm(x, use_input_stats=not self.problem.evaluate, momentum=self.momentum, **words)

    def statistics(self):
        """What the backward is given: mean in float64, or None, and rstd as it is stored."""
        if not self.problem.has_statistics:
            return None, None
        outputs = reference.forward(self.problem)
        dtype = "f8" if self.dtype == "float64" else "f4"
        mean = None if self.problem.statistics == "mean_square" else numpy.ascontiguousarray(outputs["mean"][0])
        return mean, numpy.ascontiguousarray(outputs["rstd"][0].astype(dtype))

    def backward(self, **words):
        words = {**self.words, **self.given("pre_add", "pre_bias", "post_add", "du", "bias", "slope"), **words}
        x, dy = words.pop("x", None), words.pop("dy", None)
        x, dy = self.array("x") if x is None else x, self.array("dy") if dy is None else dy
        if self.operator.startswith("affine"):
            return normfuse.channel_affine_backward(dy, x, self.array("weight"), **words)
        words = {**self.given("weight", "scale", "shift"), **words}
        mean, rstd = self.statistics()
        if self.operator == "group_norm":
            return normfuse.group_norm_backward(dy, x, mean, rstd, self.problem.groups, **words)
        if self.operator.startswith("channel"):
            return normfuse.channel_norm_backward(dy, x, mean, rstd, **words)
        if self.problem.evaluate:
            words = {**self.given("running_mean", "running_var"), **words}
        if self.operator.startswith("batch"):
            return normfuse.batch_norm_backward(dy, x, mean, rstd, training=not self.problem.evaluate, **words)
        return normfuse.instance_norm_backward(dy, x, mean, rstd, use_input_stats=not self.problem.evaluate, **words)

    def check_forward(self, y, layout=None, dtype=None):
        layout = layout or self.layout
        return compare("y", dense(y, layout), *reference.forward(self.problem)["y"], dtype or self.dtype)

    def check_statistics(self, mean, rstd, dtype="float64"):
        """`dtype`: the mean's."""
        want = reference.forward(self.problem)
        assert str(rstd.dtype) == ("float64" if self.dtype == "float64" else "float32")
        if self.problem.kind == "channel":
            assert rstd.shape == (self.shape[0], self.problem.groups, *self.shape[2:])
            mean, rstd = (None if a is None else a.reshape(self.shape[0], self.problem.groups, -1)
                          for a in (mean, rstd))
        compare("rstd", rstd, *want["rstd"], str(rstd.dtype))
        assert (mean is None) == (self.problem.statistics == "mean_square")
        if mean is not None:
            assert mean.dtype == dtype
            compare("mean", mean, *want["mean"], dtype)

    def check_backward(self, gradients, dy_dtype=None):
        mean, rstd = self.statistics()
        if rstd is not None:
            rstd = rstd.astype("f8")
        du = self.values.get("du")
        flat = self.problem.x.shape
        want = reference.backward(self.problem, self.values["dy"].reshape(flat), mean, rstd,
                                  None if du is None else du.reshape(flat))
        if gradients.dpre_bias is not None:  # of dx as it was written; sums of 128 values, joined in double
            dx = dense(gradients.dx, self.layout).reshape(flat)
            axes, unit = (0,
                          2) if gradients.dpre_bias.ndim == 1 else 2, 2.0**-53 if self.dtype == "float64" else 2.0**-24
            want["dpre_bias"] = dx.sum(axes), 136 * unit * abs(dx).sum(axes)
        checked = 0
        for name, got in gradients._asdict().items():
            if got is None:
                continue
            is_big = name in ("dx", "dpost_add")
            # what channel_affine calls scale is a weight to the reference
            key = "dweight" if name == "dscale" and self.operator.startswith("affine") else name
            dtype = self.dtype if name == "dx" else dy_dtype or self.dtype if is_big else self.parameter_dtype
            compare(name, dense(got, self.layout) if is_big else got, *want[key], dtype)
            checked += 1
        return checked


# ---- every operator, dtype, layout and activation -------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layouts(operator, dtype, activation):
    for layout in LAYOUTS:
        case = Case(operator, dtype, layout, activation)
        y = case.forward()
        assert y.shape == case.array("x").shape and y.dtype == numpy_dtype(dtype)
        case.check_forward(y)
        gradients = case.backward()
        # dx and the gradients of the parameters
        assert case.check_backward(gradients) == 3 + (activation == "prelu")
        assert (gradients.dslope is None) == (activation != "prelu")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_at_once(operator, dtype):
    """Additions, the sum written out, statistics, AdaGN, gradients of all; parameters in another dtype than x."""
    for layout, parameter_dtype in itertools.product(("contiguous", "nhwc"), ("float64", "float32", "float16")):
        case = Case(operator, dtype, layout, "silu", parameter_dtype=parameter_dtype, extras=True)
        words = {"return_sum": True}
        if case.problem.has_statistics:
            words["return_statistics"] = True
        results = case.forward(**words)
        want = reference.forward(case.problem)
        case.check_forward(results[0])
        compare("u", dense(results[1], layout), *want["u"], dtype)
        assert len(results) == (4 if case.problem.has_statistics else 2)
        if case.problem.has_statistics:
            case.check_statistics(*results[2:])
        gradients = case.backward()
        has_scale = "scale" in case.values
        assert case.check_backward(gradients) == (7 if has_scale else 5)
        # The sum in x's place gives the same bits.
        bias = gradients.dpre_bias
        again = case.backward(x=results[1], pre_add=None, pre_bias=None, dpre_bias=numpy.zeros_like(bias))
        for one, other in zip(gradients, again):
            assert one is other is None or one.tobytes() == other.tobytes()


SHAPES = [(4, 6), (2, 6, 33), (2, 6, 3, 4, 5), (1, 6, 1, 1), (3, 1, 4, 4), (2, 8, 64, 65)]


@pytest.mark.parametrize("operator,shape", [case for case in itertools.product(OPERATORS, SHAPES)
                                            if case != ("batch_norm", (1, 6, 1, 1))])  # is refused: test_errors
def test_ranks(operator, shape):
    groups = 1 if shape[1] == 1 else 2
    for layout in ("contiguous", "channels_last", "nhwc"):
        case = Case(operator, "float32", layout, "gelu", shape=shape, groups=groups)
        case.check_forward(case.forward())
        case.check_backward(case.backward())


@pytest.mark.parametrize("operator", ["group_norm", "instance_norm", "batch_norm", "channel_norm"])
@pytest.mark.parametrize("layout", ["contiguous", "nhwc"])
def test_large_mean(operator, layout):
    """mean = 10^4 sigma: f32 keeps the digits of y, dx and dweight."""
    case = Case(operator, "float32", layout, shape=(3, 6, 24, 25), mean=1e4)
    case.check_forward(case.forward())
    case.check_backward(case.backward())
    y, exact = dense(case.forward(), layout), reference.forward(case.problem)["y"][0]
    assert abs(y - exact).max() < 1e-5


@pytest.mark.parametrize("activation,act_param", [("leaky_relu", 0.2), ("leaky_relu", -1.5), ("elu", 0.5)])
def test_act_param(activation, act_param):
    case = Case("group_norm", "float32", activation=activation, act_param=act_param)
    case.check_forward(case.forward())
    case.check_backward(case.backward())


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("parameter_dtype", ["float64", "float32", "bfloat16"])
def test_prelu(operator, parameter_dtype):
    """Of any dtype, one for each channel or one; the gradient has the slope's dtype and shape, is made or written to an
    array, also alone, and is not made without being requested."""
    for one_slope, extras in itertools.product((False, True), (False, True)):
        case = Case(operator, "float32", activation="prelu", parameter_dtype=parameter_dtype, one_slope=one_slope,
                    extras=extras)
        case.check_forward(case.forward())
        gradients = case.backward()
        case.check_backward(gradients)
        slope = case.array("slope")
        assert gradients.dslope.dtype == slope.dtype
        assert gradients.dslope.shape == slope.shape == ((1,) if one_slope else (6,))
        given = numpy.full((len(slope), 2), 7, slope.dtype)
        scale = "dscale" if operator.startswith("affine") else "dweight"
        alone = case.backward(dx=False, dbias=False, dpost_add=False, dslope=given[:, 1], **{scale: False},
                              **({"dscale": False, "dshift": False} if "scale" in case.values else {}))
        assert [name for name, value in alone._asdict().items() if value is not None] == ["dslope"]
        assert alone.dslope.base is given and (given[:, 0] == 7).all()
        assert numpy.array_equal(given[:, 1], gradients.dslope)
        assert case.backward(dslope=False).dslope is None


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("sizes", [(0, 6, 4, 4), (2, 6, 0, 4), (2, 0, 4, 4)])
def test_empty(operator, sizes):
    case = Case(operator, "float32", shape=(3, 6, 4, 4))
    x = numpy.empty(sizes, "f4")
    weight = numpy.ones(sizes[:2] if operator == "affine_per_sample" else sizes[1], "f4")
    running = {"running_mean": numpy.zeros(sizes[1]), "running_var": numpy.ones(sizes[1])}
    if operator == "group_norm":
        y = normfuse.group_norm(x, max(sizes[1] // 2, 1), weight, weight)
    elif operator.startswith("channel"):
        y, mean, rstd = normfuse.channel_norm(x, weight, weight, groups=max(sizes[1] // 2, 1), return_statistics=True,
                                              statistics=case.problem.statistics)
        assert rstd.shape == (sizes[0], max(sizes[1] // 2, 1), *sizes[2:])
        assert numpy.allclose(rstd, 1 / numpy.sqrt(1e-5)) and (mean is None or (mean == 0).all())
    elif operator.startswith("affine"):
        y = normfuse.channel_affine(x, weight, weight)
    elif operator.startswith("batch"):
        y = normfuse.batch_norm(x, weight=weight, training=not case.problem.evaluate, **running)
    else:
        y = normfuse.instance_norm(x, weight=weight, use_input_stats=not case.problem.evaluate, **running)
    assert y.shape == sizes
    assert (running["running_mean"] == 0).all() and (running["running_var"] == 1).all()
    for layout in ("nchw", "nhwc"):
        gradients = empty_gradients(operator, sizes, layout)
        assert gradients.dx.shape == numpy.moveaxis(x, 1, -1 if layout == "nhwc" else 1).shape
        names = (["dscale", "dbias"] if operator.startswith("affine") else ["dweight", "dbias"]
                 if operator.startswith("batch") else ["dweight", "dbias", "dscale", "dshift"])
        assert all((getattr(gradients, name) == 0).all() for name in names)


def empty_gradients(operator, sizes, layout):
    """All gradients of a tensor without elements."""
    n, c = sizes[:2]
    x = numpy.empty(sizes if layout == "nchw" else (n, *sizes[2:], c), "f4")
    weight = numpy.ones((n, c) if operator == "affine_per_sample" else c, "f4")
    if operator.startswith("affine"):
        return normfuse.channel_affine_backward(x, x, weight, weight, layout=layout)
    words = {"layout": layout, "running_mean": numpy.zeros(c), "running_var": numpy.ones(c)}
    if operator.startswith("batch"):
        saved = [None, None] if operator.endswith("eval") else [numpy.zeros(c, "f4"), numpy.ones(c, "f4")]
        words = words if operator.endswith("eval") else {"layout": layout}
        return normfuse.batch_norm_backward(x, x, *saved, weight, weight, training=not operator.endswith("eval"),
                                            **words)
    scale = numpy.ones((n, c), "f4")
    groups = max(c // 2, 1) if operator.startswith(("group", "channel")) else c
    if operator.startswith("channel"):
        saved = [numpy.zeros((n, groups, *sizes[2:]), "f4"), numpy.ones((n, groups, *sizes[2:]), "f4")]
        words = {} if operator == "channel_norm" else {"statistics": "mean_square"}
        return normfuse.channel_norm_backward(x, x, None if words else saved[0], saved[1], weight, weight,
                                              groups=groups, scale=scale, shift=scale, layout=layout, **words)
    saved = [numpy.zeros((n, groups), "f4"), numpy.ones((n, groups), "f4")]
    if operator == "group_norm":
        return normfuse.group_norm_backward(x, x, *saved, groups, weight, weight, scale=scale, shift=scale,
                                            layout=layout)
    if operator.endswith("eval"):
        saved = [None, None]
    else:
        words = {"layout": layout}
    return normfuse.instance_norm_backward(x, x, *saved, weight, weight, scale=scale, shift=scale,
                                           use_input_stats=not operator.endswith("eval"), **words)


@pytest.mark.parametrize("sizes", [(0, 6, 4, 4), (2, 6, 0, 4), (2, 0, 4, 4)])
def test_empty_parts(sizes):
    """Statistics of parts without values, their join, and what is made of them."""
    n, c = sizes[:2]
    x, groups = numpy.empty(sizes, "f4"), max(c // 2, 1)
    parts = [normfuse.group_norm_stats(x, groups) for _ in range(2)]
    joined = normfuse.stats_merge(parts)
    assert joined.shape == (n, groups, 3) and (joined == 0).all()
    y, mean, rstd = normfuse.group_norm_apply(x, joined, groups, numpy.ones(c), return_statistics=True)
    assert y.shape == sizes and mean.shape == rstd.shape == (n, groups)
    assert (mean == 0).all() and numpy.allclose(rstd, 1 / numpy.sqrt(1e-5))


# ---- backwards of u --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_backward_of_u_has_the_z_of_its_forward(layout):
    """u is rounded far more than x here: half of the signs of z are others without."""
    random = numpy.random.default_rng(5)
    shape = (4, 8, 3) if layout == "nchw" else (4, 3, 8)
    x, pre_add = ((0.02 * random.standard_normal(shape)).astype("f2") for _ in range(2))
    pre_bias, ones = (100 * random.standard_normal(8)).astype("f4"), numpy.ones(shape, "f2")
    words = {"activation": "relu", "layout": layout}
    for added in ({}, {"pre_add": pre_add}):
        y, u, mean, rstd = normfuse.group_norm(x, 8, numpy.ones(8), numpy.zeros(8), eps=1e-9, pre_bias=pre_bias,
                                               return_sum=True, return_statistics=True, **added, **words)
        positive = (y > 0).sum((0, 2) if layout == "nchw" else (0, 1))
        call = (mean, rstd, 8, numpy.ones(8), numpy.zeros(8))
        of_u = normfuse.group_norm_backward(ones, u, *call, **words)
        assert numpy.array_equal(of_u.dbias, positive)
        of_x = normfuse.group_norm_backward(ones, x, *call, pre_bias=pre_bias, **added, **words)
        # With pre_add a backward rounds as its forward did; pre_bias alone is not rounded.
        assert numpy.array_equal(of_x.dbias, positive) == bool(added)
        if added:
            assert numpy.array_equal(of_x.dx, of_u.dx)


# ---- gradients of each sample ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("wanted",
                         [("dscale",), ("dshift",), ("dscale", "dshift"), ("dscale", "dshift", "dweight", "dbias")],
                         ids="+".join)
def test_gradients_of_each_sample_in_evaluation(layout, dtype, wanted):
    """dscale and dshift of an evaluating instance norm, whether scale and shift are given or not, of any size."""
    random = numpy.random.default_rng(7)
    for n, c, s in itertools.product((1, 2, 5), (1, 2, 33), (1, 2, 3, 7, 16, 17, 49, 1000)):
        x, dy = (random.standard_normal((n, c, s)) for _ in range(2))
        x, dy = x.astype(dtype), dy.astype(dtype)
        mean, var, weight, bias = (random.uniform(0.5, 1.5, c) for _ in range(4))
        normalized = (x.astype("f8") - mean[:, None]) / numpy.sqrt(var[:, None] + 1e-5)
        for given in ((), ("scale",), ("shift",), ("scale", "shift")):
            values = {name: random.standard_normal((n, c)) for name in given}
            arrays = [numpy.ascontiguousarray(numpy.moveaxis(a, 1, 1 if layout == "nchw" else -1)) for a in (dy, x)]
            shapes = {"dscale": (n, c), "dshift": (n, c), "dweight": c, "dbias": c}
            out = normfuse.instance_norm_backward(
                *arrays, None, None, weight, bias, running_mean=mean, running_var=var, use_input_stats=False,
                layout=layout,
                **values, **{name: numpy.full(shapes[name], 777.0) if name in wanted else False for name in shapes})
            factor = 1 + values.get("scale", numpy.zeros((n, c)))
            sums, products = dy.astype("f8").sum(-1), (dy.astype("f8") * normalized).sum(-1)
            expected = {"dshift": sums, "dscale": weight * products + bias * sums,
                        "dweight": (factor * products).sum(0), "dbias": (factor * sums).sum(0)}
            for name in wanted:
                numpy.testing.assert_allclose(getattr(out, name), expected[name], rtol=1e-5,
                                              atol=1e-4 if dtype == "f4" else 1e-9,
                                              err_msg=f"{name} {n}x{c}x{s} {given}")


# ---- channel norm ----------------------------------------------------------------------------------------------------

CHANNEL_NORMS = [operator for operator in OPERATORS if operator.startswith("channel")]
OTHER_Y = [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float16"), ("float32", "bfloat16")]


@pytest.mark.parametrize("operator", CHANNEL_NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.6, 100.0])
def test_eps_of_the_norm(operator, dtype, eps):
    """No norm is clamped by the first two, some by the third, all by the last; the backward knows which."""
    for layout, extras in itertools.product(("contiguous", "nhwc"), (False, True)):
        case = Case(operator, dtype, layout, "silu", extras=extras, eps=eps, eps_kind="of_norm")
        y, *_, mean, rstd = case.forward(return_statistics=True)
        case.check_forward(y)
        case.check_statistics(mean, rstd)
        clamped = rstd >= rstd.dtype.type(numpy.sqrt(2) / eps) if eps else numpy.zeros(rstd.shape, bool)
        assert clamped.any() == (eps > 1) and clamped.all() == (eps == 100)
        assert case.check_backward(case.backward()) >= 3


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_normalize_of_zeros(layout):
    """As torch.nn.functional.normalize: 0, and the gradient of a division by eps; 0 / 0 where eps is 0."""
    x = numpy.random.default_rng(3).standard_normal((2, 5, 7))
    x[1, :, 2] = 0
    arrays = [numpy.ascontiguousarray(numpy.moveaxis(a, 1, 1 if layout == "nchw" else -1))
              for a in (x, numpy.ones_like(x))]
    words = {"statistics": "mean_square", "eps_kind": "of_norm", "eps": 1e-12, "layout": layout}
    y, mean, rstd = normfuse.channel_norm(arrays[0], return_statistics=True, **words)
    norms = numpy.sqrt((x * x).sum(1, keepdims=True))
    want = numpy.sqrt(5) * x / numpy.maximum(norms, 1e-12)
    y, dx = (numpy.moveaxis(a, 1 if layout == "nchw" else -1, 1)
             for a in (y, normfuse.channel_norm_backward(arrays[1], arrays[0], mean, rstd, **words).dx))
    assert mean is None and rstd.shape == (2, 1, 7) and (y[1, :, 2] == 0).all()
    numpy.testing.assert_allclose(y, want, rtol=1e-14)
    assert rstd[1, 0, 2] == numpy.sqrt(5) / 1e-12 and numpy.allclose(dx[1, :, 2], numpy.sqrt(5) / 1e-12, rtol=1e-14)
    others = numpy.arange(7) != 2
    with numpy.errstate(divide="ignore", invalid="ignore"):
        slope = numpy.sqrt(5) / norms * (1 - x * x.sum(1, keepdims=True) / norms**2)
    numpy.testing.assert_allclose(dx[0], slope[0], rtol=1e-12, atol=1e-13)
    numpy.testing.assert_allclose(dx[1][:, others], slope[1][:, others], rtol=1e-12, atol=1e-13)
    assert numpy.isnan(normfuse.channel_norm(arrays[0], **{**words, "eps": 0.0})).sum() == 5


@pytest.mark.parametrize("operator", CHANNEL_NORMS)
@pytest.mark.parametrize("dtype,other", OTHER_Y)
def test_y_of_another_dtype(operator, dtype, other):
    """y in f32 of 16-bit x, and the other way round: `out` says so; dpost_add is made as dy is."""
    for layout, activation in itertools.product(("contiguous", "nhwc", "slice_c_last"), (None, "gelu")):
        case = Case(operator, dtype, layout, activation, extras=True)
        for name in ("post_add", "dy"):
            case.values[name] = rounded(case.values[name], other)
        case.problem.post_add = case.values["post_add"].reshape(case.problem.x.shape)
        post_add, dy = (lay(case.values[name], other, layout) for name in ("post_add", "dy"))
        out = numpy.empty_like(post_add)
        y, mean, rstd = case.forward(post_add=post_add, out=out, return_statistics=True)
        assert y is out
        case.check_forward(y, dtype=other)
        case.check_statistics(mean, rstd)
        gradients = case.backward(dy=dy, post_add=post_add)
        assert gradients.dx.dtype == numpy_dtype(dtype) and gradients.dpost_add.dtype == numpy_dtype(other)
        assert gradients.dpost_add.strides == numpy.empty_like(gradients.dx, numpy_dtype(other)).strides
        assert case.check_backward(gradients, other) == 7
        with pytest.raises(TypeError, match="post_add must have the dtype of x"):  # of y, which is made with that
            case.forward(post_add=post_add)


@pytest.mark.parametrize("operator", CHANNEL_NORMS)
@pytest.mark.parametrize("eps_kind,eps", [("added", 0.1), ("of_norm", 0.1), ("of_norm", 100.0)])
def test_finite_differences(operator, eps_kind, eps):
    """Every gradient of every value that the forward is given is the central difference of sum(dy * y) + sum(du *
    u)."""
    case = Case(operator, "float64", "nhwc", "gelu", shape=(2, 6, 3), extras=True, eps=eps, eps_kind=eps_kind)
    arrays = {name: case.array(name) for name in
              ("x", "weight", "bias", "scale", "shift", "pre_add", "post_add", "pre_bias")}
    dy, du = case.array("dy"), case.array("du")

    def loss():
        y, u = case.forward(return_sum=True, **arrays)
        return (dy * y).sum() + (du * u).sum()

    y, u, mean, rstd = case.forward(return_sum=True, return_statistics=True, **arrays)
    words = {name: value for name, value in arrays.items() if name != "x"}
    gradients = normfuse.channel_norm_backward(dy, arrays["x"], mean, rstd, du=du, **words, **case.words)
    for name, array in arrays.items():
        got = gradients.dx if name == "pre_add" else getattr(gradients, "d" + name)
        want = numpy.empty_like(array)
        for at in numpy.ndindex(array.shape):
            value, sides = array[at], []
            for step in (1e-5, -1e-5):
                array[at] = value + step
                sides.append(loss())
            array[at] = value
            want[at] = (sides[0] - sides[1]) / 2e-5
        numpy.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_layers_of_torch(torch, layout, activation):
    """layer_norm, rms_norm and normalize, and their gradients."""
    functional = torch.nn.functional
    random = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, 6, 5, 24, dtype=torch.float64, generator=random) for _ in range(2))  # channels last
    x[0, 1, 2] = 0
    weight, bias = (torch.randn(24, dtype=torch.float64, generator=random) for _ in range(2))
    layers = {("mean_and_variance", "added", 1e-5): lambda x, weight,
              bias: functional.layer_norm(x, (24,), weight, bias), ("mean_square", "added", 1e-6): lambda x, weight,
              bias: functional.rms_norm(x, (24,), weight, 1e-6) + bias, ("mean_square", "of_norm", 1e-12):
                  lambda x, weight, bias: functional.normalize(x, dim=-1) * 24**0.5 * weight + bias}
    for (statistics, eps_kind, eps), layer in layers.items():
        inputs = [value.clone().requires_grad_() for value in (x, weight, bias)]
        want = layer(*inputs)
        want = want if activation is None else functional.silu(want)
        wants = torch.autograd.grad(want, inputs, dy)
        words = {"statistics": statistics, "eps_kind": eps_kind, "eps": eps, "activation": activation, "layout": layout}
        big = [value if layout == "nhwc" else value.movedim(-1, 1).contiguous() for value in (x, dy)]
        y, mean, rstd = normfuse.channel_norm(big[0], weight, bias, return_statistics=True, **words)
        gradients = normfuse.channel_norm_backward(big[1], big[0], mean, rstd, weight, bias, **words)
        y, dx = (value if layout == "nhwc" else value.movedim(1, -1) for value in (y, gradients.dx))
        for got, exact in zip((y, dx, gradients.dweight, gradients.dbias), (want.detach(), *wants)):
            torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seed", range(60))
def test_draws_of_channel_norm(seed):
    random = numpy.random.default_rng([seed, 11])

    def draw(choices):
        return choices[random.integers(len(choices))]

    groups = draw([1, 1, 2, 5])
    shape = (int(random.integers(1, 4)), groups * draw([1, 2, 7, 40, 150]),
             *(int(random.integers(1, 9)) for _ in range(random.integers(4))))
    layout = draw(["contiguous", "nhwc", "nhwc_contiguous", "slice_c", "slice_n", "slice_c_last"])
    case = Case(draw(CHANNEL_NORMS), draw(DTYPES), layout, draw(ACTIVATIONS), shape=shape, groups=groups, seed=seed,
                extras=draw([False, True]), parameter_dtype=draw(DTYPES), one_slope=draw([False, True]),
                eps=draw([1e-5, 0.1, 3.0]), eps_kind=draw(["added", "added", "of_norm"]))
    y, *_, mean, rstd = case.forward(return_statistics=True)
    case.check_forward(y)
    case.check_statistics(mean, rstd)
    assert case.check_backward(case.backward()) >= 3


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_threads_do_not_change_bits(layout):
    """Nor does whether positions are many or few: those of a slice have the bits that they have in the whole."""
    program = """
import hashlib, numpy, normfuse
random = numpy.random.default_rng(0)
x, dy = (random.standard_normal((3, 96, 700) if LAYOUT == "nchw" else (3, 700, 96)).astype("f4") for _ in range(2))
words = {"layout": LAYOUT, "activation": "silu", "groups": 2}
weight = random.standard_normal(96)
y, mean, rstd = normfuse.channel_norm(x, weight, weight, return_statistics=True, **words)
part = normfuse.channel_norm(x[1:2], weight, weight, **words)
assert part.tobytes() == y[1:2].tobytes()
gradients = normfuse.channel_norm_backward(dy, x, mean, rstd, weight, weight, **words)
print(hashlib.sha256(b"".join(a.tobytes() for a in (y, mean, rstd, *gradients[:3]))).hexdigest())
""".replace("LAYOUT", repr(layout))
    printed = [python(program, NORMFUSE_NUM_THREADS=threads) for threads in ("1", "2", "5")]
    assert all(done.returncode == 0 for done in printed), printed
    assert len({done.stdout for done in printed}) == 1 and len(printed[0].stdout) == 65


# ---- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_made_outputs_are_laid_out_as_x(operator, layout):
    case = Case(operator, "float16", layout)
    x = case.array("x")
    for made in (case.forward(), case.backward().dx):
        assert type(made) is numpy.ndarray and made.shape == x.shape
        order = sorted(range(4), key=lambda a: -made.strides[a])
        assert order == sorted(range(4), key=lambda a: -x.strides[a])
        assert made.transpose(order).flags.c_contiguous


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "nhwc"])
def test_given_outputs(operator, layout):
    """In another layout than x, sliced, of other dtypes; the array itself is returned and what lies around is kept."""
    case = Case(operator, "float32", layout, "relu", extras=True)
    shape = case.array("x").shape
    around = [numpy.full((*shape[:-1], shape[-1]), 9, "f4") for _ in range(2)]
    whole = numpy.full((2 * shape[0], *shape[1:]), 9, "f4")
    out, out_sum = whole[1::2], around[0]
    words = {"out": out, "out_sum": out_sum}
    if case.problem.has_statistics:
        sets = {"group": (3, case.problem.groups), "batch": (6,), "channel": (3, 3, 4, 5)}[case.problem.kind]
        words.update(out_mean=numpy.empty(sets, "f4"), out_rstd=numpy.empty(sets, "f4"))
        if case.problem.statistics == "mean_square":
            del words["out_mean"]
    results = case.forward(**words)
    for got, name in zip([result for result in results if result is not None], words):
        assert got is words[name]
    assert (whole[::2] == 9).all()
    case.check_forward(out)
    compare("u", dense(out_sum, layout), *reference.forward(case.problem)["u"], "float32")
    if case.problem.has_statistics:
        case.check_statistics(*results[2:], dtype="float32")
    other = {"contiguous": "channels_last", "channels_last": "contiguous", "nhwc": "nhwc_contiguous"}[layout]
    dx = lay(case.values["x"], "float32", other)
    parameter = "dscale" if operator.startswith("affine") else "dweight"
    wide = numpy.full((*case.values["weight"].shape, 2), 9, "f4")
    gradients = case.backward(dx=dx, dbias=False, dpost_add=True, **{parameter: wide[..., 1]})
    assert gradients.dx is dx and gradients.dbias is None and getattr(gradients, parameter).base is wide
    assert (wide[..., 0] == 9).all()
    assert case.check_backward(gradients) >= 3


@pytest.mark.parametrize("operator", OPERATORS)
def test_in_place(operator):
    case = Case(operator, "float32", "nhwc", "silu")
    plain, gradients = case.forward(), case.backward()
    x, dy = case.array("x"), case.array("dy")
    assert case.forward(x=x, out=x) is x and x.tobytes() == plain.tobytes()
    case.backward(dy=dy, dx=dy)
    assert dy.tobytes() == gradients.dx.tobytes()


@pytest.mark.parametrize("activation,act_param", [("relu", None), ("relu6", None), ("leaky_relu", 0.3)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_backward_of_y(operator, activation, act_param):
    """y in the place of post_add: the same derivative, so the same bits."""
    case = Case(operator, "float32", activation=activation, act_param=act_param, extras=True)
    y = case.forward()
    wants = case.backward()
    gradients = case.backward(post_add=None, y=y)
    for want, got in zip(wants, gradients):
        assert (want is None) == (got is None) and (want is None or want.tobytes() == got.tobytes())
    assert case.backward(post_add=None, y=y, dpost_add=False).dpost_add is None
    with pytest.raises(ValueError, match="y and .*post_add are given"):
        case.backward(y=y)
    with pytest.raises(ValueError, match="y is for relu, relu6 and leaky_relu"):
        case.backward(post_add=None, y=y, activation="silu", act_param=None)


def test_only_what_is_asked_for():
    case = Case("group_norm", "float32", extras=True)
    gradients = case.backward(dx=False, dweight=False, dscale=False, dpost_add=False)
    assert [name for name, value in gradients._asdict().items() if value is not None] == ["dbias", "dshift"]
    # Parameters that are not given: an implicit weight of 1 has a gradient, too.
    case = Case("batch_norm", "float32")
    case.values["weight"] = case.problem.weight = numpy.ones(6)
    gradients = normfuse.batch_norm_backward(case.array("dy"), case.array("x"), *case.statistics(), None,
                                             case.array("bias"), dweight=True)
    assert case.check_backward(gradients) == 3
    gradients = normfuse.batch_norm_backward(case.array("dy"), case.array("x"), *case.statistics())
    assert [name for name, value in gradients._asdict().items() if value is not None] == ["dx"]


@pytest.mark.parametrize("shape", [(6,), (3, 6)])
def test_affine_gradients_without_parameters(shape):
    case = Case("affine" if len(shape) == 1 else "affine_per_sample", "float32")
    case.problem.weight, case.problem.bias = numpy.ones(shape), numpy.zeros(shape)
    wanted = {} if len(shape) == 2 else {"dscale": True, "dbias": True}
    if len(shape) == 2:
        wanted = {"dscale": numpy.empty(shape, "f4"), "dbias": numpy.empty(shape, "f4")}
    gradients = normfuse.channel_affine_backward(case.array("dy"), case.array("x"), **wanted)
    assert case.check_backward(gradients) == 3


# ---- running statistics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["batch_norm", "instance_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("momentum", [0.25, None])
def test_running_statistics(operator, dtype, momentum):
    case = Case(operator, dtype, parameter_dtype="float32", momentum=momentum)
    running_mean, running_var = case.array("running_mean"), case.array("running_var")
    case.problem.momentum = 0.2 if momentum is None else momentum  # 1/(4 + 1)
    y = case.forward(running_mean=running_mean, running_var=running_var, batches_seen=4)
    case.check_forward(y)
    want = reference.forward(case.problem)
    compare("running_mean", running_mean, *want["running_mean"], "float32")
    compare("running_var", running_var, *want["running_var"], "float32")


@pytest.mark.parametrize("operator", ["batch_norm_eval", "instance_norm_eval"])
def test_evaluation_reads_only(operator):
    case = Case(operator, "float32")
    running = {name: case.array(name) for name in ("running_mean", "running_var")}
    for value in running.values():
        value.flags.writeable = False
    case.check_forward(case.forward(**running))
    case.check_backward(case.backward(**running))


# ---- what is refused ------------------------------------------------------------------------------------------------

X = numpy.ones((2, 4, 3, 3), "f4")
V = numpy.ones(4, "f4")
S = numpy.ones((2, 2))
R = S.astype("f4")


def read_only(like=X):
    y = numpy.empty_like(like)
    y.flags.writeable = False
    return y


@pytest.mark.parametrize("call,error,words", [
    (lambda: normfuse.group_norm(X, 3), ValueError, "num_groups is 3 and does not divide the 4 channels of x"),
    (lambda: normfuse.group_norm(X, 0), ValueError, "num_groups is 0"),
    (lambda: normfuse.group_norm(X, -2), ValueError, "num_groups is -2"),
    (lambda: normfuse.group_norm(X, 2.0), TypeError, "float"),
    (lambda: normfuse.group_norm(X, 2**64 + 2), OverflowError, "num_groups is 18446744073709551618"),
    (lambda: normfuse.group_norm(X, 2**63), OverflowError, "num_groups is 9223372036854775808"),
    (lambda: normfuse.group_norm(X, 2 - 2**64), OverflowError, "num_groups is -18446744073709551614"),
    (lambda: normfuse.group_norm(X, 2**40, return_statistics=True), ValueError, "num_groups is 1099511627776 and does"),
    (lambda: normfuse.group_norm_backward(X, X, S, S, 2**64 + 2), OverflowError, "num_groups is 18446744073709551618"),
    (lambda: normfuse.group_norm(X, 2, eps=10**400), OverflowError, "int too large"),
    (lambda: normfuse.group_norm(X, 2, activation="elu", act_param=10**400), OverflowError, "int too large"),
    (lambda: normfuse.group_norm(X, 2, activation=["relu"]), ValueError, "activation is ['relu']"),
    (lambda: normfuse.batch_norm(X, None, None, training=True, momentum=10**400), OverflowError, "int too large"),
    (lambda: normfuse.group_norm(X[0, 0, 0], 1), ValueError, "x has 1 axes"),
    (lambda: normfuse.group_norm(X.reshape(1, 2, 4, 3, 3, 1), 1), ValueError, "x has 6 axes"),
    (lambda: normfuse.group_norm(X.astype(int), 2), TypeError, "x has dtype int64"),
    (lambda: normfuse.group_norm(X.astype(">f4"), 2), TypeError, "x has dtype >f4"),
    (lambda: normfuse.group_norm(X.astype("c8"), 2), TypeError, "x has dtype complex64"),
    (lambda: normfuse.group_norm([[1.0, 2.0]], 1), TypeError, "x is a builtins.list"),
    (lambda: normfuse.group_norm(X[:, :, ::2], 2), TypeError, "strides of x"),
    (lambda: normfuse.group_norm(X, 2, activation="tanh"), ValueError, "activation is 'tanh'"),
    (lambda: normfuse.group_norm(X, 2, layout="NCHW"), ValueError, "layout is 'NCHW'"),
    (lambda: normfuse.group_norm(X, 2, activation="prelu"), ValueError, "slope is None, but required"),
    (lambda: normfuse.group_norm(X, 2, slope=V), ValueError, "slope is for prelu alone and must be None"),
    (lambda: normfuse.channel_affine(X, activation="relu", slope=V), ValueError, "slope is for prelu alone"),
    (lambda: normfuse.batch_norm_backward(X, X, V, V, dslope=True), ValueError, "dslope is for prelu alone"),
    (lambda: normfuse.group_norm(X, 2, activation="prelu", slope=numpy.ones(3)), ValueError,
     "slope has 3 elements along C, x has 4"),
    (lambda: normfuse.group_norm(X, 2, activation="prelu", slope=numpy.ones((2, 4))), ValueError, "slope has 2 axes"),
    (lambda: normfuse.channel_affine_backward(X, X, activation="prelu", slope=V, dslope=numpy.ones(1)), ValueError,
     "dslope has 1 elements along C, slope has 4"),
    (lambda: normfuse.channel_affine_backward(X, X, activation="prelu", slope=V, dslope=V), ValueError,
     "dslope, an output, overlaps slope"),
    (lambda: normfuse.channel_affine_backward(X, X, activation="prelu", slope=V, y=X), ValueError, "y is for relu"),
    (lambda: normfuse.group_norm(X, 2, weight=numpy.ones(3)), ValueError, "weight has 3 elements along C, x has 4"),
    (lambda: normfuse.group_norm(X, 2, weight=numpy.ones((2, 4))), ValueError, "weight has 2 axes"),
    (lambda: normfuse.group_norm(X, 2, V.astype("i4")), TypeError, "weight has dtype int32"),
    (lambda: normfuse.group_norm(X, 2, pre_add=X.astype("f8")), TypeError, "pre_add must have the dtype of x"),
    (lambda: normfuse.group_norm(X, 2, post_add=X[:1]), ValueError, "post_add has 1 elements along axis 0"),
    (lambda: normfuse.group_norm(X, 2, return_sum=True), ValueError, "out_sum needs pre_add or pre_bias"),
    (lambda: normfuse.group_norm(X, 2, out=read_only()), ValueError, "out is written to"),
    (lambda: normfuse.group_norm(X, 2, out=X[::-1]), ValueError, "out, an output, overlaps x"),
    (lambda: normfuse.group_norm(X, 2, out=numpy.broadcast_to(X[:1], X.shape)), ValueError, "out is written to"),
    (lambda: normfuse.group_norm(X, 2, out_mean=numpy.empty((2, 2), "f2")), TypeError, "out_mean must be f64 or f32"),
    (lambda: normfuse.group_norm(X, 2, out_mean=numpy.empty(3)), ValueError, "out_mean has 3 elements, expected 4"),
    (lambda: normfuse.group_norm_backward(X, X, None, None, 2), ValueError, "mean is None"),
    (lambda: normfuse.batch_norm(X, None, None), ValueError, "running_mean is None"),
    (lambda: normfuse.batch_norm(X, V.copy(), None, training=True), ValueError, "running_var is None"),
    (lambda: normfuse.batch_norm(X, read_only(V), V.copy(), training=True), ValueError, "running_mean is written to"),
    (lambda: normfuse.instance_norm(X, V.copy(), read_only(V)), ValueError, "running_var is written to"),
    (lambda: normfuse.batch_norm(X[:1, :, :1, :1], None, None, training=True), ValueError,
     "more than 1 value per channel"),
    (lambda: normfuse.batch_norm(X, None, None, training=True, eps=0), ValueError, "eps is 0"),
    (lambda: normfuse.batch_norm(X, V, V, return_statistics=True), ValueError, "out_mean is not taken"),
    (lambda: normfuse.batch_norm(X, V, V.astype("f8"), training=True, momentum=None, batches_seen=-1), ValueError,
     "batches_seen is -1"),
    (lambda: normfuse.batch_norm(X, V, V.astype("f8"), training=True, momentum=None, batches_seen=2**64), OverflowError,
     "batches_seen is 18446744073709551616"),
    (lambda: normfuse.instance_norm(X, V, V.astype("f8"), momentum=None, batches_seen=2**64 + 1), OverflowError,
     "batches_seen is 18446744073709551617"),
    (lambda: normfuse.group_norm(numpy.ma.masked_array(X, X > 0), 2), TypeError, "x has a mask"),
    (lambda: normfuse.group_norm(X, 2, out=numpy.ma.masked_array(X.copy())), TypeError, "out has a mask"),
    (lambda: normfuse.group_norm(X, 2, out=X.astype(">f4")), TypeError, "out has dtype >f4"),
    (lambda: normfuse.batch_norm(X, V.astype(">f8"), V.copy(), training=True), TypeError, "running_mean has dtype >f8"),
    (lambda: normfuse.group_norm(X, 2, out=as_strided(X.copy(), strides=(0, 36, 12, 4))), ValueError,
     "elements of out, an output, overlap each other"),
    (lambda: normfuse.batch_norm(X, as_strided(V.copy(), strides=(0,)), V.copy(), training=True), ValueError,
     "elements of running_mean, an output, overlap each other"),
    (lambda: normfuse.group_norm(numpy.zeros((2, 4, 9), [("a", "u1"), ("b", "f4")])["b"], 2), ValueError,
     "strides of (180, 45, 5) bytes"),
    (lambda: normfuse.group_norm(numpy.zeros(289, "u1")[1:].view("f4").reshape(X.shape), 2), ValueError,
     "x.data + byte_offset is not a multiple of 4"),
    (lambda: normfuse.instance_norm(X, use_input_stats=False), ValueError, "running_mean is None"),
    (lambda: normfuse.channel_affine(X, numpy.ones(5)), ValueError, "scale has 5 elements"),
    (lambda: normfuse.channel_norm(X, groups=3), ValueError, "groups is 3 and does not divide the 4 channels of x"),
    (lambda: normfuse.channel_norm(X, groups=3, return_statistics=True), ValueError, "groups is 3 and does not"),
    (lambda: normfuse.channel_norm(X, groups=-2, return_statistics=True), ValueError, "groups is -2, must be above 0"),
    (lambda: normfuse.channel_norm(X, groups=2**40, return_statistics=True), ValueError,
     "groups is 1099511627776 and does"),
    (lambda: normfuse.channel_norm(X, groups=2**64 + 2), OverflowError, "groups is 18446744073709551618"),
    (lambda: normfuse.channel_norm(X, groups=1.0), TypeError, "float"),
    (lambda: normfuse.channel_norm(X, statistics="rms"), ValueError,
     "statistics is 'rms', expected one of mean_and_variance, mean_square"),
    (lambda: normfuse.channel_norm(X, statistics=None), ValueError, "statistics is None, expected one of"),
    (lambda: normfuse.channel_norm(X, eps_kind="norm"), ValueError,
     "eps_kind is 'norm', expected one of added, of_norm"),
    (lambda: normfuse.channel_norm_backward(X, X, S, S, eps_kind=["added"]), ValueError, "eps_kind is ['added']"),
    (lambda: normfuse.channel_norm(X, activation="tanh"), ValueError,
     "activation is 'tanh', expected None or one of identity, relu"),
    (lambda: normfuse.channel_norm(X, eps=-1.0, eps_kind="of_norm"), ValueError,
     "eps is -1, eps_kind='of_norm' needs 0 or above"),
    (lambda: normfuse.channel_norm(X, layout="last"), ValueError, "layout is 'last'"),
    (lambda: normfuse.channel_norm(X, numpy.ones((2, 4))), ValueError, "weight has 2 axes"),
    (lambda: normfuse.channel_norm(X, scale=V), ValueError, "scale has 1 axes"),
    (lambda: normfuse.channel_norm(X[:, :, ::2]), TypeError, "strides of x"),
    (lambda: normfuse.channel_norm(X, out=X.astype("f8")), TypeError,
     "out must have the dtype of x, or one of them f32"),
    (lambda: normfuse.channel_norm(X.astype("f2"), out=X.astype(ml_dtypes.bfloat16)), TypeError,
     "out must have the dtype of x"),
    (lambda: normfuse.channel_norm(X, post_add=X.astype("f2")), TypeError, "post_add must have the dtype of x"),
    (lambda: normfuse.channel_norm(X, post_add=X, out=X.astype("f2")), TypeError,
     "post_add must have the dtype of out and dy"),
    (lambda: normfuse.channel_norm(X, pre_add=X.astype("f2")), TypeError, "pre_add must have the dtype of x"),
    (lambda: normfuse.channel_norm(X, statistics="mean_square", out_mean=numpy.empty((2, 1, 3, 3))), ValueError,
     "out_mean is not taken"),
    (lambda: normfuse.channel_norm(X, out_mean=numpy.empty((2, 1))), ValueError,
     "out_mean has 2 elements, expected 18"),
    (lambda: normfuse.channel_norm_backward(X, X, None, X[:, :1]), ValueError, "mean is None"),
    (lambda: normfuse.channel_norm_backward(X, X, X[:, :1], X[:, :1], statistics="mean_square"), ValueError,
     "mean is not taken"),
    (lambda: normfuse.channel_norm_backward(X, X, S, S), ValueError, "mean has 4 elements, expected 18"),
    (lambda: normfuse.channel_norm_backward(X.astype("f8"), X, R, R, groups=2, post_add=X), TypeError,
     "dy must have the dtype of x"),
    (lambda: normfuse.group_norm_backward(X.astype("f8"), X, R, R, 2, post_add=X), TypeError,
     "dy must have the dtype of x"),
    (lambda: normfuse.channel_affine_backward(X, X, V, dscale=V), ValueError, "dscale, an output, overlaps scale"),
])
def test_errors(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


class OnCuda:
    """X's memory as what a library on CUDA says of an array; refused before anybody looks at it."""

    def __init__(self, **more):
        self.__cuda_array_interface__ = {**X.__array_interface__, "version": 3, **more}


@pytest.mark.parametrize("more,error,words", [
    ({"shape": (2**64 + 2, 4, 3, 3)}, OverflowError, "(18446744073709551618, 4, 3, 3) is beyond 64 bits"),
    ({"strides": (144, 36, 12, 2**66)}, OverflowError, "is beyond 64 bits"),
    ({"data": (2**64 + 16, False)}, OverflowError, "address is 18446744073709551632"),
    ({"data": (-16, False)}, OverflowError, "address is -16"),
    ({"strides": (4,)}, ValueError, "x has 1 strides and 4 axes"),
    ({"mask": X}, TypeError, "x has a mask"),
    ({"stream": 7}, ValueError, "x is in use on CUDA stream 0x7 and this call runs on 0x1"),
])
def test_interfaces_that_are_refused(more, error, words):
    with pytest.raises(error) as caught:
        normfuse.channel_affine(OnCuda(**more), out=OnCuda())
    assert words in str(caught.value)


def test_a_mask_of_the_array_interface_is_refused():
    masked = Interface(X)
    masked.__array_interface__ = {**X.__array_interface__, "mask": Interface(X)}
    with pytest.raises(TypeError, match="x has a mask"):
        normfuse.group_norm(masked, 2)


def test_structs_hold_the_integers_they_are_given():
    from normfuse import _library
    for field, value in (("groups", 2**63), ("groups", -2**63 - 1), ("activation", 2**32 + 3), ("flags", -1),
                         ("set_values", 2**64)):
        with pytest.raises(OverflowError, match=f"{field} is {value}"):
            _library.GroupNormOptions(**{field: value})
    held = _library.GroupNormOptions(groups=2**63 - 1, activation=-2**31, flags=2**32 - 1)
    assert (held.groups, held.activation, held.flags) == (2**63 - 1, -2**31, 2**32 - 1)
    for device in (2**31, -2**32):
        with pytest.raises(OverflowError, match=f"device is {device}"):
            _library.make_tensor(16, 2, 32, (1, 1), None, _library.CUDA, device)


def test_negative_strides():
    x = numpy.random.default_rng(0).standard_normal((3, 4, 5, 5)).astype("f4")
    running, want = [numpy.zeros(4), numpy.ones(4)], [numpy.zeros(4), numpy.ones(4)]
    weight = numpy.arange(4.0)
    y = normfuse.batch_norm(x[::-1], *(r[::-1] for r in running), weight[::-1], training=True)
    assert y.tobytes() == normfuse.batch_norm(x[::-1].copy(), *want, weight[::-1].copy(), training=True).tobytes()
    assert all((r[::-1] == w).all() for r, w in zip(running, want))


def test_a_refused_call_writes_nothing():
    out, running = numpy.full_like(X, 5), numpy.full(4, 5.0)
    with pytest.raises(ValueError):
        normfuse.batch_norm(X, running, numpy.ones(3), training=True, out=out)
    assert (out == 5).all() and (running == 5).all()


# ---- failures in the middle -----------------------------------------------------------------------------------------


def interrupted_everywhere(call, error=KeyboardInterrupt):
    """Makes the call again and again, raising `error` at its 1st, 2nd, ... line of this package until it gets through;
    yields after each failure."""
    package = str(pathlib.Path(normfuse.__file__).parent)
    for line in itertools.count(1):
        left = line

        def trace(frame, event, argument):
            nonlocal left
            if not frame.f_code.co_filename.startswith(package):
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    raise error
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call()
            return
        except error:
            pass
        finally:
            sys.settrace(before)
        yield line


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("version", [True, False])
def test_a_call_that_is_interrupted_releases_its_arrays(error, version, no_collector):
    """At any line; each capsule is given back once, without the garbage collector."""
    x, weight, out, running = X.copy(), V.copy(), numpy.full_like(X, 5), [V.copy(), V.copy()]
    arrays = (x, weight, out, *running)
    before = [sys.getrefcount(array) for array in arrays]

    def call():
        exporters = [Exporter(array, version) for array in arrays]
        try:
            normfuse.batch_norm(exporters[0], *exporters[3:], exporters[1], None, True, out=exporters[2],
                                return_statistics=True)
        finally:
            assert all(exporter.exported <= 1 for exporter in exporters)

    lines = 0
    for lines in interrupted_everywhere(call, error):
        assert [sys.getrefcount(array) for array in arrays] == before, f"at line {lines}"
    assert lines > 50 and (out != 5).all()
    assert [sys.getrefcount(array) for array in arrays] == before


@pytest.mark.parametrize("status,error", [(41, MemoryError), (50, RuntimeError), (10, ValueError), (20, TypeError)])
def test_a_status_releases_the_arrays(status, error, monkeypatch, no_collector):
    from normfuse import _library
    monkeypatch.setattr(_library.library, "normfuse_group_norm_forward", lambda *arguments: status)
    x, out = X.copy(), numpy.full_like(X, 5)
    before = sys.getrefcount(x), sys.getrefcount(out)
    for wrap in (lambda a: a, Exporter, lambda a: Exporter(a, version=False), Interface):
        with pytest.raises(error):
            normfuse.group_norm(wrap(x), 2, out=wrap(out))
        assert (sys.getrefcount(x), sys.getrefcount(out)) == before and (out == 5).all()


def test_the_library_without_memory_is_a_memory_error(monkeypatch):
    """In the words of the library where it has some, else in those of the status."""
    from normfuse import _library
    monkeypatch.setattr(_library.library, "normfuse_last_error", lambda: b"")
    with pytest.raises(MemoryError, match="."):
        _library.call(41)


def test_outputs_without_memory(monkeypatch, no_collector):
    """Whichever of the outputs finds none: MemoryError, and what was given is as it was."""
    from normfuse import _arrays
    x, running = X.copy(), [V.copy(), V.copy()]
    empty, left = _arrays._empty, 0

    def failing(*arguments):
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError("no memory")
        return empty(*arguments)

    monkeypatch.setattr(_arrays, "_empty", failing)
    before = sys.getrefcount(x), *map(sys.getrefcount, running)
    for failed in range(1, 4):
        left = failed
        with pytest.raises(MemoryError, match="no memory"):
            normfuse.batch_norm(x, *running, training=True, return_statistics=True)
        assert (sys.getrefcount(x), *map(sys.getrefcount, running)) == before
        assert all((r == 1).all() for r in running)
    left = 4
    normfuse.batch_norm(x, *running, training=True, return_statistics=True)


def test_failures_leave_no_memory(no_collector):
    calls = [lambda: normfuse.group_norm(X, 3), lambda: normfuse.group_norm(X, 2**70),
             lambda: normfuse.group_norm(Exporter(X), 2, out=read_only()),
             lambda: normfuse.group_norm(X, 2, weight=[1]),
             lambda: normfuse.group_norm(Exporter(X.astype("i4")), 2), lambda: normfuse.group_norm(X, 2)]

    def all_of_them():
        for call in calls:
            try:
                call()
            except (ValueError, TypeError, OverflowError):
                pass

    for _ in range(20):
        all_of_them()
    tracemalloc.start()
    try:
        all_of_them()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(500):
            all_of_them()
        assert tracemalloc.get_traced_memory()[0] - before < 20000  # 7 bytes a call
    finally:
        tracemalloc.stop()


# ---- arrays of other libraries --------------------------------------------------------------------------------------


class Exporter:
    """Only DLPack, as a library that is not NumPy shows it; `version`: whether it knows of DLPack 1.0."""

    def __init__(self, array, version=True):
        self._array, self._version, self.exported = array, version, 0

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **words):
        if words and not self._version:
            raise TypeError("unexpected keyword argument")
        self.exported += 1
        return self._array.__dlpack__(**words)


class Interface:
    """Only NumPy's array interface."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.array = array


@pytest.mark.parametrize("wrap", [Exporter, lambda a: Exporter(a, version=False), Interface])
@pytest.mark.parametrize("layout", ["contiguous", "nhwc", "slice_c_last"])
def test_protocols(wrap, layout):
    case = Case("group_norm", "float16", layout, "gelu")
    out = numpy.empty_like(case.array("x"))
    results = case.forward(x=wrap(case.array("x")), out=wrap(out), weight=wrap(case.array("weight")))
    assert not isinstance(results, numpy.ndarray)  # the given one
    case.check_forward(out)
    made = case.forward(x=wrap(case.array("x")))
    assert isinstance(made, numpy.ndarray)
    case.check_forward(made)


def test_dlpack_memory_is_given_back():
    array = numpy.ones((2, 4, 3, 3), "f4")
    before = sys.getrefcount(array)
    for version in (True, False):
        normfuse.group_norm(Exporter(array, version), 2)
        with pytest.raises(ValueError):
            normfuse.group_norm(Exporter(array, version), 3)
    assert sys.getrefcount(array) == before


def test_dlpack_byte_offset():
    from normfuse import _arrays
    x = numpy.random.default_rng(0).standard_normal((2, 4, 3, 3)).astype("f4")

    class Shifted(Exporter):
        def __dlpack__(self, **words):
            capsule = super().__dlpack__(**words)
            pointer = _arrays._capsule_pointer(capsule, b"dltensor_versioned")
            tensor = _arrays._ManagedTensorVersioned.from_address(pointer).tensor
            tensor.data, tensor.byte_offset = tensor.data - 64, 64
            return capsule

    assert normfuse.group_norm(Shifted(x), 2).tobytes() == normfuse.group_norm(x, 2).tobytes()


def test_dlpack_memory_is_held_for_the_call():
    """That of an exporter which keeps nothing itself: it is there when the last array of the call is taken."""
    held = []

    class Fresh(Exporter):
        def __dlpack__(self, **words):
            made = self._array.copy()
            held.append(weakref.ref(made))
            return made.__dlpack__(**words)

    class Last(Exporter):
        def __dlpack__(self, **words):
            assert len(held) == 2 and all(reference() is not None for reference in held)
            return super().__dlpack__(**words)

    out = numpy.empty_like(X)
    normfuse.group_norm(Fresh(X), 2, Fresh(V), out=Last(out))
    assert all(reference() is None for reference in held) and (out == 0).all()


def test_read_only_exports_are_not_written_to():
    array = numpy.ones((2, 4, 3, 3), "f4")
    array.flags.writeable = False
    assert (normfuse.group_norm(Exporter(array), 2) == 0).all()
    with pytest.raises(ValueError, match="out is written to"):
        normfuse.group_norm(X, 2, out=Exporter(array))
    with pytest.raises(ValueError, match="out is written to"):
        normfuse.group_norm(X, 2, out=Interface(array))


def test_devices_and_capsules_that_are_refused():
    class Metal(Exporter):
        def __dlpack_device__(self):
            return 8, 0

    class Broken(Exporter):
        def __dlpack__(self, **words):
            return object()

    with pytest.raises(TypeError, match="DLPack's type 8"):
        normfuse.group_norm(Metal(X), 2)
    with pytest.raises(TypeError, match="no capsule"):
        normfuse.group_norm(Broken(X), 2)
    with pytest.raises(TypeError, match="x has dtype int64"):
        normfuse.group_norm(X.astype("i8"), 2)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_torch_tensors(torch, dtype, channels_last):
    case = Case("group_norm", dtype, "channels_last" if channels_last else "contiguous", "silu")

    def tensor(name):
        made = torch.tensor(case.values[name]).to(getattr(torch, dtype))
        return made.to(memory_format=torch.channels_last) if channels_last and made.ndim == 4 else made

    y, mean, rstd = normfuse.group_norm(tensor("x"), 3, tensor("weight"), tensor("bias"), activation="silu",
                                        return_statistics=True)
    assert isinstance(y, torch.Tensor) and y.dtype == tensor("x").dtype and y.stride() == tensor("x").stride()
    assert mean.dtype == torch.float64
    case.check_forward(y.double().numpy())
    gradients = normfuse.group_norm_backward(tensor("dy"), tensor("x"), *map(torch.tensor, case.statistics()), 3,
                                             tensor("weight"), tensor("bias"), activation="silu")
    case.check_backward(normfuse.Gradients(*(None if g is None else g.double().numpy() for g in gradients)))
    out = torch.empty(3, 6, 4, 5, dtype=tensor("x").dtype)
    assert normfuse.group_norm(tensor("x"), 3, tensor("weight"), tensor("bias"), activation="silu", out=out) is out
    assert torch.equal(out, y)


def test_torch_tensors_that_require_gradients_are_refused(torch):
    with pytest.raises(BufferError, match="gradient"):
        normfuse.group_norm(torch.ones(2, 4, requires_grad=True), 2)


def test_torch_tensors_on_cuda(torch):
    """In a stream of their own. The sums of these values are exact, so what remains are the roundings of rstd (6
    units), of the coefficient (8), and of each element's multiply-add and store: docs/numerics.md, "CUDA"."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for dtype, channels_last in itertools.product(DTYPES, (False, True)):
        values = torch.full((2, 8, 8, 8), 3.5)
        values[..., 1::2] = 4.5
        with torch.cuda.stream(torch.cuda.Stream()):
            x = values.to("cuda", getattr(torch, dtype))
            x = x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
            weight, bias = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
            y, mean, rstd = normfuse.group_norm(x, 2, weight, bias, return_statistics=True)
            gradients = normfuse.group_norm_backward(torch.ones_like(x), x, mean, rstd, 2, weight, bias)
            torch.cuda.current_stream().synchronize()
        assert y.device == x.device and y.dtype == x.dtype and y.stride() == x.stride()
        want = (values.double().numpy() - 4) / numpy.sqrt(0.25 + 1e-5)
        unit = 2.0**-53 if dtype == "float64" else 2.0**-24
        compare("y", y.double().cpu().numpy(), want, 16 * unit * abs(want), dtype)
        assert (mean == 4).all()
        assert (gradients.dbias == 2 * 64).all() and (gradients.dweight == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_arrays(dtype):
    jax = pytest.importorskip("jax")
    case = Case("batch_norm", dtype, activation="relu")
    x, weight, bias = (jax.numpy.asarray(case.array(name)) for name in ("x", "weight", "bias"))
    y = normfuse.batch_norm(x, None, None, weight, bias, training=True, activation="relu")
    assert isinstance(y, jax.Array) and y.dtype == x.dtype
    case.check_forward(y)
    with pytest.raises(ValueError, match="out is written to"):
        normfuse.batch_norm(x, None, None, training=True, out=x)


# A program of a process whose CUDA driver is the stand-in of tests/cuda/fake_driver.c: it notes launches and runs
# nothing, so the "device's" memory is NumPy's. `cupy` is what this package uses of CuPy.
CUDA_PROGRAM = """
import ctypes, linecache, sys, types
import numpy

ctypes.CDLL("libcuda.so.1").fake_driver_reset()  # the driver of one H200

class ndarray:
    __module__ = "cupy"
    streams = []
    def __init__(self, array):
        self.array = array
    device = property(lambda self: Device())
    shape = property(lambda self: self.array.shape)
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, *, stream, max_version):
        self.streams.append(stream)
        return self.array.__dlpack__(max_version=max_version)

class Device:
    entered = 0
    def __enter__(self):
        Device.entered += 1
    def __exit__(self, *error):
        pass

made = []
def empty(shape, dtype):
    made.append((shape, numpy.dtype(dtype).name))
    return ndarray(numpy.empty(shape, dtype))

cupy = types.ModuleType("cupy")
cupy.empty, cupy.ndarray = empty, ndarray
cupy.moveaxis = lambda a, source, destination: ndarray(numpy.moveaxis(a.array, source, destination))
cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=0x1230))
sys.modules["cupy"] = cupy

import normfuse
from normfuse._library import library

synced, stream_sync = [], library.normfuse_stream_sync
def recorded(device, stream, size):
    memory = stream_sync(device, stream, size)
    synced.append((device, stream, memory, size.value))
    return memory
library.normfuse_stream_sync = recorded

x = ndarray(numpy.ones((2, 8, 64, 64), "f4"))
y, mean, rstd = normfuse.group_norm(x, 2, weight := ndarray(numpy.ones(8, "f4")), return_statistics=True)
assert isinstance(y, ndarray) and y.shape == x.shape and mean.array.dtype == "f8" and rstd.array.dtype == "f4"
assert set(ndarray.streams) == {0x1230} and Device.entered
gradients = normfuse.group_norm_backward(x, x, mean, rstd, 2, weight)
assert isinstance(gradients.dx, ndarray) and gradients.dweight.shape == (8,)
# The backward's partial sums go through scratch memory, which is asked for in float64.
assert any(len(shape) == 1 and shape != (8,) and dtype == "float64" for shape, dtype in made), made

last = ndarray(numpy.moveaxis(numpy.ones((2, 16, 16, 8), "f4"), -1, 1))
assert normfuse.group_norm(last, 2).array.strides == last.array.strides

cupy.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=0)  # the default stream
ndarray.streams.clear()
normfuse.batch_norm(x, None, None, training=True)
assert set(ndarray.streams) == {1}, ndarray.streams
# Sync memory: one block for each of the two streams.
assert len(set(synced)) == 2 and [s[:2] for s in dict.fromkeys(synced)] == [(0, 0x1230), (0, None)], synced
assert all(memory and size == 65536 for _, _, memory, size in synced) and synced[0][2] != synced[-1][2]

for words, error in (({"weight": numpy.ones(8)}, TypeError), ({"out": numpy.empty(x.shape, "f4")}, TypeError)):
    try:
        normfuse.group_norm(x, 2, **words)
    except error as caught:
        assert "device (1, 0)" in str(caught), caught
    else:
        raise AssertionError("arrays of two devices were taken")

class Interface:
    def __init__(self, array, **more):
        self.__cuda_array_interface__ = {**array.__array_interface__, "version": 3, **more}

out = numpy.full(x.shape, 5, "f4")
try:
    normfuse.group_norm(Interface(x.array), 2)
except TypeError as caught:
    assert "are not made" in str(caught)
else:
    raise AssertionError("an output was made in host memory")
normfuse.channel_affine(Interface(x.array), out=Interface(out))
# Scratch of arrays that only have an interface: the driver's, given back when the call is enqueued, and when it fails.
scratch, take, give_back = [], library.normfuse_stream_scratch, library.normfuse_stream_scratch_free
def taken(device, stream, size, memory):
    take(device, stream, size, memory)
    scratch.append((device, stream, size.value, memory.value))
def given_back(device, stream, memory):
    assert (device, stream, memory.value) == (*scratch[-1][:2], scratch[-1][-1])
    give_back(device, stream, memory)
    scratch.append("given back")
library.normfuse_stream_scratch, library.normfuse_stream_scratch_free = taken, given_back
before = len(made)
image = numpy.zeros((1, 8, 128, 128), "f4")
normfuse.group_norm(Interface(image), 2, out=Interface(image.copy()))
assert len(made) == before and len(scratch) == 2 and scratch[0][:2] == (0, None) and scratch[0][2] > 0, scratch
assert scratch[0][3] % 64 == 0 and scratch[1] == "given back"
try:
    normfuse.group_norm(Interface(image), 2, out=Interface(image))  # in place, by several blocks: is it refused?
except (TypeError, ValueError):
    assert scratch[-1] == "given back"
# Interrupted at any line but the two that give it back: what was taken is given back.
package, line, written = normfuse.__path__[0], 0, image.copy()
while True:
    line, left, scratch[:] = line + 1, line + 1, []
    def trace(frame, event, argument):
        global left
        if not frame.f_code.co_filename.startswith(package):
            return None
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and source.strip() != "if pooled:" and "scratch_free(" not in source:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace
    sys.settrace(trace)
    try:
        normfuse.group_norm(Interface(image), 2, out=Interface(written))
        break
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        assert len(scratch) % 2 == 0 and scratch[1:] in ([], ["given back"]), (line, scratch)
assert line > 50 and len(scratch) == 2
def interrupted(*arguments):
    taken(*arguments)
    raise KeyboardInterrupt
library.normfuse_stream_scratch, scratch[:] = interrupted, []
try:
    normfuse.group_norm(Interface(image), 2, out=Interface(written))
except KeyboardInterrupt:
    assert scratch[1:] == ["given back"], scratch
library.normfuse_stream_scratch = lambda *arguments: None
try:
    normfuse.group_norm(Interface(image), 2, out=Interface(image.copy()))
except MemoryError as caught:
    assert "bytes of scratch memory on device 0" in str(caught)
else:
    raise AssertionError("a call had no scratch")
normfuse.channel_affine(Interface(x.array, stream=1), out=Interface(out))
try:
    normfuse.channel_affine(Interface(x.array, stream=0x77), out=Interface(out))
except ValueError as caught:
    assert "stream 0x77" in str(caught)
else:
    raise AssertionError("another stream was not noticed")
try:
    normfuse.channel_affine(Interface(x.array), out=Interface(out, data=(out.ctypes.data, True)))
except ValueError as caught:
    assert "out is written to" in str(caught)
else:
    raise AssertionError("read-only memory was written to")
print("done")
"""


def test_cuda_arrays_on_a_stand_in_for_the_driver():
    from normfuse import _library
    driver = _library.find().parent / "fake"
    if not (driver / "libcuda.so.1").exists():
        pytest.skip("the library was built without CUDA or without its tests")
    done = python(CUDA_PROGRAM, LD_LIBRARY_PATH=str(driver), NORMFUSE_VERBOSE="dispatch")
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr[-3000:]
    assert "group_norm" in done.stderr  # that something was launched


# ---- the library and the package ------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["group_norm", "channel_norm"])
def test_threads_of_python(operator):
    """Calls from several threads at once, each with the bits of one alone; errors are each thread's own."""
    case = Case(operator, "float32", "nhwc", "gelu", shape=(4, 8, 32, 32), groups=2)
    want, failures = case.forward().tobytes(), []

    def work(number):
        for _ in range(20):
            if case.forward().tobytes() != want:
                failures.append("other bits")
            try:
                normfuse.group_norm(numpy.ones((2, 2 * number + 3), "f4"), 2)
            except ValueError as error:
                if f"{2 * number + 3} channels" not in str(error):
                    failures.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def python(code, **environment):
    package = str(pathlib.Path(normfuse.__file__).parent.parent)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": package, **environment})


def test_library_is_named_by_the_environment(tmp_path):
    missing = python("import normfuse", NORMFUSE_LIBRARY=str(tmp_path / "none.so"))
    assert missing.returncode == 1 and "NORMFUSE_LIBRARY is" in missing.stderr and "ImportError" in missing.stderr
    (tmp_path / "empty.so").write_text("")
    broken = python("import normfuse", NORMFUSE_LIBRARY=str(tmp_path / "empty.so"))
    assert broken.returncode == 1 and "cannot be loaded" in broken.stderr
    from normfuse import _library
    good = python("import normfuse._library as l; print(l.library.path)", NORMFUSE_LIBRARY=str(_library.find()))
    assert good.stdout.strip() == str(_library.find())


def test_numpy_is_all_that_is_imported():
    done = python("import sys, normfuse; print([m for m in ('torch', 'jax', 'cupy', 'ml_dtypes') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_info():
    done = subprocess.run([sys.executable, "-m", "normfuse", "info"], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(pathlib.Path(normfuse.__file__).parent.parent)})
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["version"] == normfuse.__version__
    assert set(lines) >= {"library", "cpu", "isa", "threads", "compiler", "cuda", "python", "numpy", "torch"}
    refused = subprocess.run([sys.executable, "-m", "normfuse", "nothing"], capture_output=True, text=True, timeout=120,
                             env={**os.environ, "PYTHONPATH": str(pathlib.Path(normfuse.__file__).parent.parent)})
    assert refused.returncode == 2


def test_info_without_a_library():
    """It says which one is missing, and what else there is; an import is refused as always."""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(normfuse.__file__).parent.parent),
                   "NORMFUSE_LIBRARY": "/none"}
    done = subprocess.run([sys.executable, "-m", "normfuse", "info"], capture_output=True, text=True, timeout=120,
                          env=environment)
    assert done.returncode == 1 and done.stderr == ""
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["library"] == "normfuse: NORMFUSE_LIBRARY is '/none', which is not a file"
    assert set(lines) >= {"version", "python", "numpy", "torch"}
    refused = python("import normfuse", NORMFUSE_LIBRARY="/none")
    assert "ImportError: normfuse: NORMFUSE_LIBRARY is '/none'" in refused.stderr


def test_info_says_how_torch_is_bound(torch):
    done = subprocess.run([sys.executable, "-m", "normfuse", "info"], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(pathlib.Path(normfuse.__file__).parent.parent)})
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert re.fullmatch(rf"torch +{re.escape(torch.__version__)}; operators through (shim|ctypes): .+", line)


def test_examples_of_the_documentation():
    """Those of docs/python.md that need no PyTorch, one after the other."""
    text = (pathlib.Path(__file__).parent.parent.parent / "docs/python.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "torch" not in block]
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert names["gradients"].dx.shape == names["x"].shape
    assert abs(names["x"].reshape(2, 32, -1).mean(2)).max() < 1e-5  # was normalized in place
    assert (names["running_mean"] != 0).any()

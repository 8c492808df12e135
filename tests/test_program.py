# SPDX-License-Identifier: MIT
"""The program `normfuse` from outside: what it computes against a NumPy float64 reference of its own, the files that it
takes and refuses, and how it ends. NORMFUSE_PROGRAM names the binary; build/normfuse is the default.

Tolerances. A sum of 4096 values runs over 64 lanes, so no value goes through more than 64 + 6 additions in the
computing precision (u = 2^-24; 2^-53 for f64), and longer sums are joined in f64. With sum |x - k| over the set, k
near its mean, the mean is off by at most 70 u mean|x - mean|, in units of 1/rstd at most 70 u; the variance by 2 * 70 u
of itself, so rstd by 70 u. STATISTICS_U = 160 covers both with the roundings of the formula itself, for each unit of
|weight| * (1 + |xhat|); every further operation adds one u of what it yields, FORMULA_U = 12 with the activation's own
error of a few ulp. Storing adds half an ulp of the stored type. Backward sums have the same 70 additions."""

import ctypes
import json
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree

import numpy as np
import pytest

from terminal import default_signal, on_a_terminal

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = os.path.abspath(os.environ.get("NORMFUSE_PROGRAM", os.path.join(ROOT, "build", "normfuse")))

STATISTICS_U = 160
FORMULA_U = 12
# The largest slope of any of the activations (hardswish's 1.5) and the largest curvature (gelu's 0.8, doubled).
SLOPE = 1.5
CURVATURE = 1.6


def run(*words, **options):
    options.setdefault("timeout", 50)
    return subprocess.run([PROGRAM, *map(str, words)], capture_output=True, text=True, **options)


def succeed(*words, **options):
    result = run(*words, **options)
    assert result.returncode == 0, f"{words}: {result.stderr}"
    return result.stdout


def refuse(code, pattern, *words, **options):
    result = run(*words, **options)
    assert result.returncode == code, f"{words}: {result.returncode}, {result.stderr}"
    assert re.search(pattern, result.stderr), f"{words}: {result.stderr}"
    assert result.stderr.startswith("normfuse")
    return result.stderr


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def failing(tmp_path_factory):
    """An environment in which calls of the program fail: see fail_calls.c."""
    if b"/ld" not in open(PROGRAM, "rb").read():
        pytest.skip("the program is static, or a script that starts it: no library can be preloaded")
    library = tmp_path_factory.mktemp("preload") / "fail_calls.so"
    compiler = os.environ.get("CC") or shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler is installed")
    source = os.path.join(ROOT, "tests", "fail_calls.c")
    made = subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], capture_output=True,
                          text=True)
    if made.returncode != 0:
        pytest.skip(f"fail_calls.c needs glibc: {made.stderr.strip()}")

    def environment(calls="", **more):
        return {**os.environ, "LD_PRELOAD": str(library), "FAIL_CALLS": calls, **more}

    started = run("--version", env=environment())
    if started.returncode != 0:
        pytest.skip(f"the program does not start with a preloaded library (a sanitizer's build): {started.stderr.strip()}")
    return environment


def has_nameless_files(folder):
    try:
        os.close(os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o600))
        return True
    except OSError:
        return False


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def to_bf16(values):
    """float64 to the 16 bits of bf16, rounded once, to nearest even."""
    values = np.asarray(values, np.float64)
    mantissa, exponent = np.frexp(values)
    exponent = np.maximum(exponent - 1, -126)
    rounded = np.ldexp(np.rint(np.ldexp(values, 7 - exponent)), exponent - 7)
    return (rounded.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
SMALLEST = {"f64": 2.0**-1074, "f32": 2.0**-149, "f16": 2.0**-24, "bf16": 2.0**-133}
NUMPY_TYPE = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "bf16": "<u2"}


def pack(values, dtype):
    return to_bf16(values) if dtype == "bf16" else np.asarray(values).astype(NUMPY_TYPE[dtype])


def unpack(array, dtype):
    return from_bf16(array) if dtype == "bf16" else array.astype(np.float64)


def compute_roundoff(dtype):
    return ROUNDOFF["f64" if dtype == "f64" else "f32"]


# ---- the reference ---------------------------------------------------------------------------------------------------

erf = np.vectorize(math.erf, otypes=[np.float64])


def activation(name, z):
    """y and dy/dz."""
    if isinstance(name, np.ndarray):  # prelu's slopes
        slope = name.reshape(1, -1, 1)
        return np.where(z > 0, z, slope * z), np.where(z > 0, 1, slope)
    if name == "identity":
        return z, np.ones_like(z)
    if name == "relu":
        return np.maximum(z, 0), (z > 0) * 1.0
    if name == "leaky_relu":
        return np.where(z > 0, z, 0.01 * z), np.where(z > 0, 1, 0.01)
    if name == "silu":
        s = 1 / (1 + np.exp(-z))
        return z * s, s * (1 + z * (1 - s))
    if name == "gelu":
        cdf = 0.5 * (1 + erf(z / math.sqrt(2)))
        return z * cdf, cdf + z * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    if name == "gelu_tanh":
        t = np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
        slope = math.sqrt(2 / math.pi) * (1 + 0.134145 * z * z)
        return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * slope
    if name == "hardswish":
        return z * np.clip(z + 3, 0, 6) / 6, np.where(z <= -3, 0, np.where(z >= 3, 1, (2 * z + 3) / 6))
    if name == "elu":
        return np.where(z > 0, z, np.expm1(np.minimum(z, 0))), np.where(z > 0, 1, np.exp(np.minimum(z, 0)))
    if name == "relu6":
        return np.clip(z, 0, 6), (z > 0) * (z < 6) * 1.0
    t = np.tanh(np.log1p(np.exp(z)))  # mish
    return z * t, t + z * (1 - t * t) / (1 + np.exp(-z))


class Reference:
    """Every operator in float64 on arrays [N, C, S]; absent arrays are None. Results are (value, tolerance) pairs."""

    def __init__(self, op, x, dtype, groups=1, act="identity", eps=1e-5, weight=None, bias=None, scale=None, shift=None,
                 post_add=None, running=None):
        n, c, s = x.shape
        self.dtype, self.u = dtype, compute_roundoff(dtype)
        per_channel = lambda p, default: np.full((1, c, 1), default) if p is None else p.reshape(-1, c, 1)
        w, b = per_channel(weight, 1.0), per_channel(bias, 0.0)
        if op == "affine":
            mean, rstd = np.zeros((1, 1, 1)), np.ones((1, 1, 1))
            self.axes = None
        elif running is not None:
            mean, rstd = running[0].reshape(1, c, 1), 1 / np.sqrt(running[1].reshape(1, c, 1) + eps)
            self.axes = None
        else:
            if op == "batch_norm":
                self.shape, self.axes = (n, c, s), (0, 2)
            else:
                self.shape, self.axes = (n, groups, c // groups * s), (2,)
            sets = x.reshape(self.shape)
            self.count = x.size // max(1, np.prod([k for i, k in enumerate(self.shape) if i not in self.axes]))
            mean = sets.mean(self.axes, keepdims=True)
            self.var = ((sets - mean) ** 2).mean(self.axes, keepdims=True)
            rstd = 1 / np.sqrt(self.var + eps)
            self.mean, self.rstd = mean, rstd
            mean, rstd = self.spread(mean), self.spread(rstd)
        self.xhat = (x - mean) * rstd
        self.w, self.rstd_of = w, rstd
        self.has_statistics = self.axes is not None
        zero = np.zeros((1, 1, 1))
        self.factor = zero + 1 if scale is None else 1 + scale[:, :, None]
        shift = zero if shift is None else shift[:, :, None]
        post = zero if post_add is None else post_add
        self.affine = self.xhat * w + b
        self.z = self.affine * self.factor + shift + post
        statistics = STATISTICS_U * np.abs(w * self.factor) * (1 + np.abs(self.xhat)) if self.has_statistics else 0
        # Without statistics x - mean is rounded as x and mean are.
        inputs = 0 if self.has_statistics else np.abs(w * self.factor * rstd) * (np.abs(x) + np.abs(mean))
        formula = np.abs(self.xhat * w * self.factor) + np.abs(b * self.factor) + np.abs(shift) + np.abs(post) + inputs
        self.z_tolerance = self.u * (statistics + FORMULA_U * formula)
        y, self.slope = activation(act, self.z)
        self.curved = 0.0 if isinstance(act, np.ndarray) or act in ("identity", "relu", "leaky_relu", "relu6") else 1.0
        self.y = y, SLOPE * self.z_tolerance + self.stored(y) + FORMULA_U * self.u * np.abs(self.z)

    def spread(self, statistics):
        sets = np.broadcast_to(statistics, self.shape)
        return sets.reshape(self.xhat.shape if hasattr(self, "xhat") else self.full_shape())

    def full_shape(self):
        return self._full

    def stored(self, values, dtype=None):
        dtype = dtype or self.dtype
        return (ROUNDOFF[dtype] + 4 * self.u) * np.abs(values) + SMALLEST[dtype]

    def sets_mean(self, values):
        return self.spread(values.reshape(self.shape).mean(self.axes, keepdims=True))

    def backward(self, dy, du=None, weight_dtype=None, per_sample=False):
        g = dy * self.slope
        size = np.abs(g) + np.abs(dy) * CURVATURE * self.curved * self.z_tolerance / (STATISTICS_U * self.u)
        # size carries the error of dy' in units of STATISTICS_U u, beside those of the sums.
        size = size + np.abs(g)
        out = {"dpost_add": (g, STATISTICS_U * self.u * size + self.stored(g))}
        axes = 2 if per_sample else (0, 2)
        weight_dtype = weight_dtype or self.dtype
        centred = g * self.factor
        for name, term, weight in (("dweight", centred * self.xhat,
                                    np.abs(self.factor * self.xhat) + np.abs(self.factor)),
                                   ("dbias", centred, np.abs(self.factor) + 0 * self.xhat)):
            value = term.sum(axes)
            out[name] = value, STATISTICS_U * self.u * (size * weight).sum(axes) + self.stored(value, weight_dtype)
        value = (g * self.affine).sum(2)
        affine_size = np.abs(self.affine) + np.abs(self.w) * (1 + np.abs(self.xhat))
        out["dscale"] = value, STATISTICS_U * self.u * (size * affine_size).sum(2) + self.stored(value)
        value = g.sum(2)
        out["dshift"] = value, STATISTICS_U * self.u * size.sum(2) + self.stored(value)
        h = g * self.factor * self.w
        h_size = size * np.abs(self.factor * self.w)
        dx, dx_size = h, h_size
        if self.has_statistics:
            first, second = self.sets_mean(h), self.sets_mean(h * self.xhat)
            dx = h - first - self.xhat * second
            dx_size = (h_size + self.sets_mean(h_size)
                       + (1 + np.abs(self.xhat)) * self.sets_mean(h_size * (1 + np.abs(self.xhat))))
        dx = dx * self.rstd_of
        dx_size = dx_size * self.rstd_of
        extra = 0 if du is None else du
        dx = dx + extra
        out["dx"] = dx, STATISTICS_U * self.u * (dx_size + np.abs(extra)) + self.stored(dx)
        return out


def make_reference(op, x, dtype, **options):
    reference = Reference.__new__(Reference)
    reference._full = x.shape
    reference.__init__(op, x, dtype, **options)
    return reference


def check(name, got, expected):
    value, tolerance = expected
    got = got.reshape(np.shape(value))
    assert got.shape == np.shape(value), name
    used = np.max(np.abs(got - value) / tolerance) if got.size else 0
    assert used <= 1, f"{name}: {used * 100:.0f} % of the error budget"


def to_ncs(array, layout):
    if layout == "nhwc" and array.ndim > 2:
        array = np.moveaxis(array, -1, 1)
    return array.reshape(array.shape[0], array.shape[1], -1)


def file_shape(sizes, layout):
    n, c, *spatial = sizes
    return (n, *spatial, c) if layout == "nhwc" else tuple(sizes)


class Case:
    """Files of one problem in the current folder, and what the program should make of them."""

    def __init__(self, op, sizes, dtype="f32", layout="nchw", weight_dtype=None, seed=0, mean=0.5):
        random = np.random.default_rng(seed)
        self.op, self.dtype, self.layout, self.sizes = op, dtype, layout, sizes
        self.weight_dtype = weight_dtype or dtype
        n, c, s = sizes[0], sizes[1], int(np.prod(sizes[2:]))
        self.values = {}
        for name in ("x", "dy", "du", "pre_add", "post_add"):
            raw = random.standard_normal(file_shape(sizes, layout)) + (mean if name == "x" else 0)
            array = pack(raw, dtype)
            np.save(f"{name}.npy", array)
            self.values[name] = to_ncs(unpack(array, dtype), layout)
        small = {"weight": (c,), "bias": (c,), "scale": (n, c), "shift": (n, c), "pre_bias": (c,),
                 "sample_bias": (n, c), "slope": (c,), "one_slope": (1,)}
        if op == "affine_sample":
            small.update(weight=(n, c), bias=(n, c))
        for name, shape in small.items():
            array = pack(random.uniform(0.5, 1.5, shape), self.weight_dtype)
            np.save(f"{name}.npy", array)
            self.values[name] = unpack(array, self.weight_dtype)
        for name in ("running_mean", "running_var"):
            array = random.uniform(0.5, 1.5, c).astype("<f4")
            np.save(f"{name}.npy", array)
            self.values[name] = array.astype(np.float64)
        self.words = ["run", op.split("_sample")[0], "x.npy", f"layout={layout}"]
        if op == "affine_sample":
            self.words.append("per=sample")
        if dtype == "bf16":
            self.words.append("dtype=bf16")
        if self.weight_dtype != dtype:
            self.words.append(f"weight_dtype={self.weight_dtype}")

    def load(self, name, dtype=None):
        array = np.load(f"{name}.npy")
        dtype = dtype or self.dtype
        assert array.dtype == np.dtype(NUMPY_TYPE[dtype]), (name, array.dtype)
        return unpack(array, dtype)

    def load_big(self, name):
        array = self.load(name)
        assert array.shape == file_shape(self.sizes, self.layout), (name, array.shape)
        return to_ncs(array, self.layout)


ALL_BACKWARD = ["--backward", "dy.npy", "--dx", "dx.npy", "--dweight", "dweight.npy", "--dbias", "dbias.npy"]
PARAMETERS = ["--weight", "weight.npy", "--bias", "bias.npy"]


def check_plain(case, words, act, groups=1, running=None):
    """Forward and backward with weight and bias."""
    v = case.values
    op = case.op.split("_sample")[0]
    succeed(*case.words, *words, f"act={act}", "-o", "y.npy", *PARAMETERS, *ALL_BACKWARD)
    reference = make_reference(op, v["x"], case.dtype, groups=groups, act=act, weight=v["weight"], bias=v["bias"],
                               running=running)
    backward = reference.backward(v["dy"], weight_dtype=case.weight_dtype, per_sample=case.op == "affine_sample")
    check("y", case.load_big("y"), reference.y)
    check("dx", case.load_big("dx"), backward["dx"])
    for name in ("dweight", "dbias"):
        check(name, case.load(name, case.weight_dtype), backward[name])
    return reference


ACTIVATIONS = ["identity", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "elu", "mish", "relu6"]
SIZES = {2: (5, 12), 3: (3, 12, 17), 4: (2, 12, 5, 7), 5: (2, 12, 3, 2, 5)}


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("op",
                         ["group_norm", "instance_norm", "batch_norm", "batch_norm eval", "affine", "affine_sample"])
def test_operators_forward_and_backward(folder, op, layout, dtype):
    op, *evaluate = op.split()
    for rank, sizes in SIZES.items():
        if op == "instance_norm" and rank == 2:
            continue  # one value a set: covered by test_a_group_of_one_value
        act = ACTIVATIONS[(rank * 7 + len(op) + len(layout + dtype) * 3) % len(ACTIVATIONS)]
        case = Case(op, sizes, dtype, layout, seed=rank)
        v = case.values
        words, running = [], None
        groups = 4 if op == "group_norm" else sizes[1]
        if op == "group_norm":
            words = ["groups=4"]
        if evaluate:
            words = ["mode=eval", "--running-mean", "running_mean.npy", "--running-var", "running_var.npy"]
            running = v["running_mean"], v["running_var"]
        check_plain(case, words, act, groups, running)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(folder, act):
    for dtype in ("f64", "f32"):
        case = Case("group_norm", (3, 8, 40), dtype, seed=3)
        check_plain(case, ["groups=2"], act, 2)


def test_act_param_is_taken(folder):
    case = Case("affine", (2, 4, 9))
    succeed(*case.words, "act=leaky_relu", "act_param=0.25", "-o", "y.npy")
    x = case.values["x"]
    assert np.array_equal(case.load_big("y"), np.where(x > 0, x, 0.25 * x))


def test_weight_dtypes_may_differ(folder):
    check_plain(Case("group_norm", (2, 8, 33), "bf16", weight_dtype="f32"), ["groups=2"], "silu", 2)
    check_plain(Case("batch_norm", (4, 8, 33), "f32", weight_dtype="bf16"), [], "relu")
    check_plain(Case("affine", (4, 8, 33), "f16", weight_dtype="f32"), [], "identity")


def test_gradients_of_absent_parameters(folder):
    case = Case("group_norm", (2, 8, 33))
    succeed(*case.words, "groups=2", *ALL_BACKWARD)
    backward = make_reference("group_norm", case.values["x"], "f32", groups=2).backward(case.values["dy"])
    for name in ("dweight", "dbias"):
        check(name, case.load(name), backward[name])
    succeed(*case.words, "groups=2", "weight_dtype=f64", "--backward", "dy.npy", "--dbias", "db.npy")
    assert np.load("db.npy").dtype == np.float64


@pytest.mark.parametrize("bias", ["pre_bias", "sample_bias"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("op", ["group_norm", "instance_norm", "batch_norm"])
def test_everything_fused(folder, op, dtype, layout, bias):
    case = Case(op, (4, 8, 5, 6), dtype, layout)
    v = case.values
    adagn = op != "batch_norm"
    words = ["groups=4"] if op == "group_norm" else []
    words += ["act=silu", "-o", "y.npy", "--pre-add", "pre_add.npy", "--pre-bias", f"{bias}.npy", "--sum-out", "u.npy",
              "--post-add", "post_add.npy", "--du", "du.npy", "--dpost-add", "dpost_add.npy", "--dpre-bias",
              "dpre_bias.npy", *PARAMETERS, *ALL_BACKWARD]
    if adagn:
        words += ["--scale", "scale.npy", "--shift", "shift.npy", "--dscale", "dscale.npy", "--dshift", "dshift.npy"]
    succeed(*case.words, *words)
    x, pre_add, pre_bias = (v[name].astype(np.float32) for name in ("x", "pre_add", bias))
    u = unpack(pack((x + pre_bias.reshape(-1, 8, 1)) + pre_add, dtype), dtype)
    assert np.array_equal(case.load_big("u"), u)
    reference = make_reference(op, u, dtype, groups=4 if op == "group_norm" else 8, act="silu", weight=v["weight"],
                               bias=v["bias"], scale=v["scale"] if adagn else None,
                               shift=v["shift"] if adagn else None, post_add=v["post_add"])
    backward = reference.backward(v["dy"], du=v["du"])
    check("y", case.load_big("y"), reference.y)
    for name in ("dx", "dpost_add"):
        check(name, case.load_big(name), backward[name])
    for name in ("dweight", "dbias") + (("dscale", "dshift") if adagn else ()):
        check(name, case.load(name), backward[name])
    dx, axes = case.load_big("dx"), (0, 2) if bias == "pre_bias" else 2
    assert case.load("dpre_bias").shape == v[bias].shape
    check("dpre_bias", case.load("dpre_bias"), (dx.sum(axes), compute_roundoff(dtype) * np.abs(dx).sum(axes) * 16 +
                                                reference.stored(dx.sum(axes))))


@pytest.mark.parametrize("slope", ["slope", "one_slope"])
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("op", ["group_norm", "instance_norm", "batch_norm", "affine", "affine_sample"])
def test_prelu(folder, op, dtype, slope):
    """Slopes between 0.5 and 1.5; the sum of dy * z where z is below 0 has the bound of dbias with dy * z in dy's
    place."""
    case = Case(op, (4, 8, 5, 6), dtype)
    v = case.values
    words = ["groups=4"] if op == "group_norm" else []
    words += ["act=prelu", "--slope", f"{slope}.npy", "--dslope", "dslope.npy", "-o", "y.npy", *PARAMETERS,
              *ALL_BACKWARD]
    succeed(*case.words, *words)
    reference = make_reference(op.removesuffix("_sample"), v["x"], dtype, groups=4 if op == "group_norm" else 8,
                               act=v[slope], weight=v["weight"], bias=v["bias"])
    check("y", case.load_big("y"), reference.y)
    check("dx", case.load_big("dx"), reference.backward(v["dy"])["dx"])
    axes = (0, 2) if slope == "slope" else None
    terms = np.where(reference.z > 0, 0, reference.z * v["dy"])
    error = (np.abs(v["dy"]) * reference.z_tolerance * (reference.z <= reference.z_tolerance) + 64 * reference.u
             * np.abs(terms))
    want = terms.sum(axes).reshape(v[slope].shape)
    got = case.load("dslope")
    assert got.shape == v[slope].shape
    check("dslope", got, (want, error.sum(axes).reshape(want.shape) + reference.stored(want)))
    whole = open("dslope.npy", "rb").read()
    succeed(*case.words, *words, "--block-bytes", "1", "--threads", "1")
    assert open("dslope.npy", "rb").read() == whole


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
def test_statistics_are_written(folder, dtype):
    case = Case("group_norm", (3, 8, 50), dtype, mean=100.0)
    stored = "f64" if dtype == "f64" else "f32"
    u = compute_roundoff(dtype)
    for op, groups, shape in (("group_norm", 4, (3, 4)), ("instance_norm", 8, (3, 8)), ("batch_norm", 8, (8,))):
        words = ["groups=4"] if op == "group_norm" else []
        key = ["dtype=bf16"] if dtype == "bf16" else []
        succeed("run", op, "x.npy", *key, *words, "--mean", "mean.npy", "--rstd", "rstd.npy")
        reference = make_reference(op, case.values["x"], dtype, groups=groups)
        mean, rstd = case.load("mean", stored), case.load("rstd", stored)
        assert mean.shape == rstd.shape == shape
        deviation = (1 / reference.rstd).reshape(shape)
        expected = reference.mean.reshape(shape)
        check("mean", mean, (expected, STATISTICS_U * u * deviation + 2 * u * np.abs(expected)))
        expected = reference.rstd.reshape(shape)
        check("rstd", rstd, (expected, STATISTICS_U * u * expected))


def test_running_statistics(folder):
    case = Case("batch_norm", (6, 8, 20))
    v = case.values
    x = v["x"]
    batch = x.mean((0, 2)), x.var((0, 2), ddof=1)
    sample = x.mean(2).mean(0), x.var(2, ddof=1).mean(0)
    for op, new in (("batch_norm", batch), ("instance_norm", sample)):
        for keys, momentum in ((["momentum=0.1"], 0.1), ([], 1.0), (["seen=4"], 0.2)):
            for block in ([], ["--block-bytes", "1"]):
                succeed("run", op, "x.npy", *keys, *block, "--running-mean", "running_mean.npy", "--running-var",
                        "running_var.npy", "--new-running-mean", "new_mean.npy", "--new-running-var", "new_var.npy",
                        "-o", "y.npy")
                for name, old, value in (("new_mean", v["running_mean"], new[0]),
                                         ("new_var", v["running_var"], new[1])):
                    expected = (1 - momentum) * old + momentum * value
                    check(f"{op} {name}", case.load(name, "f32"),
                          (expected, STATISTICS_U * 2.0**-24 * (1 + np.abs(expected))))
    # In place of the old ones, and one of the two alone.
    succeed("run", "batch_norm", "x.npy", "momentum=1", "--running-mean", "running_mean.npy", "--running-var",
            "running_var.npy", "--new-running-mean", "running_mean.npy")
    check("in place", case.load("running_mean", "f32"), (batch[0], STATISTICS_U * 2.0**-24 * (1 + np.abs(batch[0]))))
    assert np.array_equal(np.load("running_var.npy"), v["running_var"].astype("<f4"))


def test_instance_norm_evaluation(folder):
    case = Case("instance_norm", (3, 8, 20))
    v = case.values
    check_plain(case, ["mode=eval", "--running-mean", "running_mean.npy", "--running-var", "running_var.npy"], "relu",
                8, (v["running_mean"], v["running_var"]))


def test_large_mean_keeps_its_digits(folder):
    # x is as f32 holds it: the reference starts from the same numbers, 10^4 standard deviations from 0.
    case = Case("group_norm", (2, 4, 5000), mean=1e4)
    check_plain(case, ["groups=2"], "identity", 2)


def test_a_group_of_one_value(folder):
    case = Case("instance_norm", (3, 4))
    succeed(*case.words, "-o", "y.npy", "--bias", "bias.npy")
    assert np.array_equal(np.load("y.npy"), np.broadcast_to(case.values["bias"], (3, 4)))


def test_nan_stays_in_its_group(folder):
    case = Case("group_norm", (2, 4, 9))
    x = np.load("x.npy")
    succeed(*case.words, "groups=2", "-o", "clean.npy")
    x[1, 3, 2] = np.nan
    np.save("x.npy", x)
    succeed(*case.words, "groups=2", "-o", "y.npy")
    clean, y = np.load("clean.npy"), np.load("y.npy")
    assert np.isnan(y[1, 2:]).all()
    assert np.array_equal(y[0], clean[0]) and np.array_equal(y[1, :2], clean[1, :2])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("words",
                         [[], ["stat=rms"], ["stat=rms", "eps_kind=norm"], ["groups=3"], ["stat=rms", "groups=3"],
                                   ["stat=rms", "eps_kind=norm", "eps=5"]], ids=" ".join)
def test_channel_norm(folder, words, layout):
    """f64 against NumPy, and by finite differences of its own; in one block of samples and in many."""
    rng = np.random.default_rng(3)
    n, c, spatial = 5, 12, (3, 7)
    axes = (0, 2, 3, 1) if layout == "nhwc" else (0, 1, 2, 3)
    x, dy = rng.normal(0.5, 1, (2, n, c, *spatial))
    weight, bias = rng.normal(1, 0.3, (2, c))
    scale, shift = rng.normal(0, 0.3, (2, n, c))
    for name, value in (("x", x.transpose(axes)), ("dy", dy.transpose(axes)), ("weight", weight), ("bias", bias),
                        ("scale", scale), ("shift", shift)):
        np.save(f"{name}.npy", value)
    keys = dict(word.split("=") for word in words)
    groups, eps = int(keys.get("groups", 1)), float(keys.get("eps", 1e-5))
    wide = lambda p: np.expand_dims(p, (2, 3) if p.ndim == 2 else (0, 2, 3))

    def normalize(u):
        values = u.reshape(n, groups, c // groups, *spatial)
        mean = values.mean(2, keepdims=True) * (keys.get("stat") != "rms")
        squares = ((values - mean) ** 2).sum(2, keepdims=True)
        d = c // groups
        rstd = math.sqrt(d) / np.maximum(np.sqrt(squares),
                                         eps) if keys.get("eps_kind") == "norm" else 1 / np.sqrt(squares / d + eps)
        return ((values - mean) * rstd).reshape(u.shape), mean[:, :, 0], rstd[:, :, 0]

    def forward(u, weight, bias, scale, shift):
        z = (normalize(u)[0] * wide(weight) + wide(bias)) * (1 + wide(scale)) + wide(shift)
        return z / (1 + np.exp(-z))

    inputs = {"x": x, "weight": weight, "bias": bias, "scale": scale, "shift": shift}
    names = ["dx", "dweight", "dbias", "dscale", "dshift", "rstd"] + ["mean"] * (keys.get("stat") != "rms")
    for block in ([], ["--block-bytes", "8K"]):
        succeed("run", "channel_norm", "x.npy", *words, "act=silu", f"layout={layout}", "-o", "y.npy", "--backward",
                "dy.npy", *block, *(word for name in inputs if name != "x" for word in (f"--{name}", f"{name}.npy")),
                *(word for name in names for word in (f"--{name}", f"{name}.npy")))
        back = np.argsort(axes)
        # a few hundred roundings of values of order 10
        assert np.abs(np.load("y.npy").transpose(back) - forward(*inputs.values())).max() < 1e-12
        _, mean, rstd = normalize(x)
        assert np.load("rstd.npy").shape == rstd.shape and np.abs(np.load("rstd.npy") / rstd - 1).max() < 1e-12
        assert "mean" not in names or np.abs(np.load("mean.npy") - mean).max() < 1e-12
        for name, value in inputs.items():
            gradient = np.load(f"d{name}.npy")
            gradient = gradient.transpose(back) if name == "x" else gradient
            direction = rng.normal(0, 1, value.shape)
            step = 1e-6  # errs by step^2 times third derivatives, and 2^-53 / step, of sums of some thousand values
            above, below = (np.sum(dy * forward(*(other + sign * step * direction if key == name else other
                                                  for key, other in inputs.items()))) for sign in (1, -1))
            assert abs((above - below) / (2 * step) - np.sum(gradient * direction)) < 1e-6, name
    if "stat=rms" in words:
        refuse(2, "stat=rms has no mean", "run", "channel_norm", "x.npy", *words, "--mean", "mean.npy")
    refuse(3, "not divisible by groups=5", "run", "channel_norm", "x.npy", "groups=5", f"layout={layout}", "-o",
           "y.npy")


@pytest.mark.parametrize("x_type, y_type", [("f16", "f32"), ("bf16", "f32"), ("f32", "f16"), ("f32", "bf16")])
def test_y_of_another_dtype(folder, x_type, y_type):
    """Channel norm: the values are those of f64 files with the same numbers, rounded to the dtypes of x and y."""
    rng = np.random.default_rng(5)
    x, dy, post = (pack(rng.normal(0, 1, (3, 16, 9)), dtype) for dtype in (x_type, y_type, y_type))
    for name, value, dtype in (("x", x, x_type), ("dy", dy, y_type), ("post", post, y_type)):
        np.save(f"{name}.npy", value)
        np.save(f"{name}64.npy", unpack(value, dtype))
    outputs = [("output", y_type), ("dpost-add", y_type), ("dx", x_type)]
    for wide, words in (("", [f"dtype={x_type}", f"y_dtype={y_type}"]), ("64", [])):
        succeed("run", "channel_norm", f"x{wide}.npy", "act=silu", *words, "--post-add", f"post{wide}.npy",
                "--backward", f"dy{wide}.npy",
                *(word for name, _ in outputs for word in (f"--{name}", f"{name}{wide}.npy")))
    for name, dtype in outputs:
        got, want = np.load(f"{name}.npy"), np.load(f"{name}64.npy")
        assert got.dtype == np.dtype(NUMPY_TYPE[dtype]), name
        assert np.abs(unpack(got, dtype) - want).max() < ROUNDOFF[dtype] * np.abs(want).max() + 100 * 2.0**-24, name
    refuse(3, "--backward: the file holds f64, y_dtype is", "run", "channel_norm", "x.npy",
           *([f"dtype={x_type}", f"y_dtype={y_type}"]), "--backward", "dy64.npy", "--dx", "dx.npy")
    refuse(3, "not timed", "bench", "channel_norm", "2x16x9", f"dtype={x_type}", f"y_dtype={y_type}")


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
@pytest.mark.parametrize("words",
                         [["group_norm", "groups=2"], ["instance_norm"], ["instance_norm", "running"], ["affine"],
                                   ["channel_norm"], ["channel_norm", "stat=rms"], ["batch_norm"],
                                   ["batch_norm", "running"], ["batch_norm", "mode=eval", "running"]],
                         ids=" ".join)
def test_empty(folder, words, shape):
    np.save("x.npy", np.zeros(shape, np.float32))
    np.save("mean.npy", np.zeros(shape[1]))
    np.save("var.npy", np.ones(shape[1]))
    op, *words = words
    if "running" in words:
        words.remove("running")
        words += ["--running-mean", "mean.npy", "--running-var", "var.npy"]
    for block in ([], ["--block-bytes", "1"]):
        succeed("run", op, "x.npy", *words, "-o", "y.npy", "--backward", "x.npy", "--dweight", "dw.npy", "--dx",
                "dx.npy", *block)
        assert np.load("y.npy").shape == np.load("dx.npy").shape == shape
        assert np.array_equal(np.load("dw.npy"), np.zeros(shape[1], np.float32))
        assert (np.load("mean.npy") == 0).all() and (np.load("var.npy") == 1).all()


def write_empty(shape):
    write_npy("x.npy", f"{{'descr': '<f2', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n")


@pytest.mark.parametrize("shape", [(2**36, 4, 0), (2**50, 0, 4), (2**62 - 1, 0), (0, 4096)], ids=str)
@pytest.mark.parametrize("op",
                         [["affine"], ["group_norm", "groups=1"], ["instance_norm"], ["batch_norm"], ["channel_norm"]],
                         ids=" ".join)
def test_many_samples_without_elements(folder, op, shape):
    """128 bytes, whose samples are too many to look at one by one."""
    write_empty(shape)
    outputs = ["-o", "y.npy", "--pre-add", "x.npy", "--sum-out", "u.npy", "--backward", "x.npy", "--dx", "dx.npy",
               "--dbias", "dbias.npy"]
    for block in ([], ["--block-bytes", "64K"]):
        succeed("run", *op, "x.npy", *outputs, *block, timeout=10)
        for name in ("y.npy", "u.npy", "dx.npy"):
            assert open(name, "rb").read() == open("x.npy", "rb").read()
        assert np.array_equal(np.load("dbias.npy"), np.zeros(shape[1], np.float16))


def test_sizes_beyond_any_memory(folder):
    """Files of 128 bytes without elements, whose sums of bytes, statistics or gradients pass 2^63. Refused, all of
    them, but what passes depends on the sizes; a sanitizer's build sees the sums that overflow."""
    for shape, words in [((0, 2**62 - 1), ["affine", "-o", "z.npy", "--pre-add", "x.npy", "--post-add", "x.npy"]),
                         ((0, 1, 2**60 - 1), ["group_norm", "groups=1", "-o", "z.npy", "--pre-add", "x.npy",
                                              "--post-add", "x.npy", "--backward", "x.npy", "--dx", "dx.npy"]),
                         ((2**62 - 1, 0), ["group_norm", "groups=4", "--mean", "z.npy"]),
                         ((4, 0, 3), ["group_norm", f"groups={2**62}", "--mean", "z.npy"]),
                         ((0, 2**62 - 1), ["affine", "--backward", "x.npy", "--dweight", "z.npy", "weight_dtype=f64"]),
                         ((0, 2**62 - 1), ["batch_norm", "--mean", "z.npy"]),
                         ((2**30, 2**30, 0), ["instance_norm", "--rstd", "z.npy"])]:
        write_empty(shape)
        result = run("run", words[0], "x.npy", *words[1:], timeout=10)
        assert result.returncode == 3, (shape, words, result)
        assert re.search("^normfuse: (x.npy|z.npy|memory): ", result.stderr), result.stderr
        assert os.listdir() == ["x.npy"]


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("fortran", [False, True])
def test_memory_order_and_byte_order(folder, layout, order, fortran):
    for dtype in ("f64", "f32", "f16", "bf16"):
        case = Case("batch_norm", (4, 6, 3, 5), dtype, layout)
        plain = [*case.words, *PARAMETERS, *ALL_BACKWARD, "--post-add", "post_add.npy"]
        succeed(*plain, "-o", "y.npy")
        names = ["y", "dx", "dweight", "dbias"]
        expected = {name: np.load(f"{name}.npy") for name in names}
        for name in ("x", "dy", "post_add", "weight"):
            array = np.load(f"{name}.npy")
            array = array.astype(array.dtype.newbyteorder(order))
            np.save(f"{name}.npy", np.asfortranarray(array) if fortran else array)
        for block in ([], ["--block-bytes", "1"]):
            succeed(*plain, "-o", "y.npy", *block)
            for name in names:
                got = np.load(f"{name}.npy")
                model = {"dweight": "weight", "dbias": "bias"}.get(name, "x")
                assert got.dtype == np.load(f"{model}.npy").dtype
                assert got.flags.c_contiguous
                assert np.array_equal(got, expected[name]), (dtype, name)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_header_versions(folder, version):
    case = Case("affine", (2, 4, 3))
    with open("v.npy", "wb") as file:
        np.lib.format.write_array(file, np.load("x.npy"), version=version)
    succeed("run", "affine", "v.npy", "-o", "y.npy")
    assert np.array_equal(np.load("y.npy"), np.load("x.npy"))


@pytest.mark.parametrize("descr", ["<u2", "<i2", "|V2", "<V2", ">u2", ">i2"])
def test_bf16_spellings(folder, descr):
    case = Case("affine", (2, 4, 3), "bf16")
    x = np.load("x.npy")
    data = x.astype(">u2").tobytes() if descr[0] == ">" else x.tobytes()
    write_npy("x.npy", f"{{'descr': '{descr}', 'fortran_order': False, 'shape': (2, 4, 3), }}", data)
    succeed("run", "affine", "x.npy", "dtype=bf16", "-o", "y.npy")
    written = open("y.npy", "rb").read()
    assert f"'descr': '{descr}'".encode() in written
    assert written.endswith(data)
    refuse(3, "x.npy: x: .*dtype=bf16", "run", "affine", "x.npy", "-o", "y.npy")


def test_written_header_is_numpys(folder):
    for shape in ((2, 3), (1, 2, 3, 4, 5)):
        np.save("x.npy", np.ones(shape, np.float32))
        succeed("run", "affine", "x.npy", "-o", "y.npy")
        raw = open("y.npy", "rb").read()
        assert raw[:8] == b"\x93NUMPY\x01\x00"
        assert (10 + int.from_bytes(raw[8:10], "little")) % 64 == 0
        assert raw == open("x.npy", "rb").read()


def write_npy(path, header, data=b"", version=1, length=None):
    header = header.encode("latin1") if isinstance(header, str) else header
    length = len(header) if length is None else length
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY" + bytes([version, 0]))
        file.write(length.to_bytes(2 if version == 1 else 4, "little"))
        file.write(header + data)


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n"

HOSTILE = [
    ("structured", GOOD.replace("'<f4'", "[('a', '<f4'), ('b', '<i4')]"), "structured"),
    ("object", GOOD.replace("<f4", "|O"), "Python objects"),
    ("complex", GOOD.replace("<f4", "<c8"), "dtype '<c8' is not read"),
    ("long double", GOOD.replace("<f4", "<f16"), "dtype '<f16' is not read"),
    ("string", GOOD.replace("<f4", "<U7"), "dtype '<U7' is not read"),
    ("int32", GOOD.replace("<f4", "<i4"), "dtype '<i4' is not read"),
    ("empty descr", GOOD.replace("<f4", ""), "is not read"),
    ("long descr", GOOD.replace("<f4", "<f4" * 40), "longer than any"),
    ("escape", GOOD.replace("<f4", "\\x3cf4"), "0x5c"),
    ("negative", GOOD.replace("(2, 3)", "(2, -3)"), "-3 is negative"),
    ("overflow of a size", GOOD.replace("(2, 3)", "(2, 99999999999999999999)"), "63 bits"),
    ("overflow of the product", GOOD.replace("(2, 3)", "(4294967296, 4294967296)"), "overflows"),
    ("overflow of the bytes", GOOD.replace("(2, 3)", "(2305843009213693952, 3)"), "overflows"),
    ("overflow behind a zero", GOOD.replace("(2, 3)", "(0, 4294967296, 4294967296)"), "overflows"),
    ("more than the file", GOOD.replace("(2, 3)", "(2000000, 3)"), "truncated"),
    ("one byte short", GOOD.replace("(2, 3)", "(5, 5)"), "truncated"),
    ("float sizes", GOOD.replace("(2, 3)", "(2.0, 3)"), "tuple of whole numbers"),
    ("no tuple", GOOD.replace("(2, 3)", "(6)"), "tuple of whole numbers"),
    ("list", GOOD.replace("(2, 3)", "[2, 3]"), "tuple of whole numbers"),
    ("many axes", GOOD.replace("(2, 3)", "(" + "1, " * 65 + ")"), "more than 64 axes"),
    ("rank 0", GOOD.replace("(2, 3)", "()"), "rank 0"),
    ("rank 1", GOOD.replace("(2, 3)", "(6,)"), "rank 1"),
    ("rank 6", GOOD.replace("(2, 3)", "(1, 1, 1, 1, 2, 3)"), "rank 6"),
    ("no shape", "{'descr': '<f4', 'fortran_order': False}\n", "'shape' is missing"),
    ("no descr", "{'fortran_order': False, 'shape': (2, 3)}\n", "'descr' is missing"),
    ("empty dict", "{}\n", "'descr' is missing"),
    ("another key", GOOD.replace("'descr'", "'dtype'"), "unknown key 'dtype'"),
    ("a key twice", GOOD.replace("{", "{'shape': (2, 3), "), "'shape' twice"),
    ("order 1", GOOD.replace("False", "1"), "neither True nor False"),
    ("code", "__import__('os').system('touch hacked')\n", "not a dict"),
    ("unclosed dict", GOOD.replace("}", ""), "bad .npy header"),
    ("unclosed string", "{'descr': '<f4", "does not end"),
    ("unclosed tuple", "{'shape': (2, 3", "tuple of whole numbers"),
    ("a dict and more", GOOD + "{}", "follows the dict"),
    ("nothing", "", "not a dict"),
    ("zeros", b"\0" * 70, "not a dict"),
    ("nested", "{" * 200, "string was expected"),
]


@pytest.mark.parametrize("name,header,message", HOSTILE, ids=[row[0] for row in HOSTILE])
def test_hostile_headers(folder, name, header, message):
    for version in (1, 2):
        write_npy("x.npy", header, bytes(99 if name == "one byte short" else 24), version)
        error = refuse(3, re.escape(message), "run", "affine", "x.npy", "-o", "y.npy")
        assert error.startswith("normfuse: x.npy: x: ")
    assert sorted(os.listdir()) == ["x.npy"]


def test_hostile_beginnings(folder):
    write_npy("long1.npy", GOOD, length=65535)
    write_npy("long2.npy", GOOD, version=2, length=0xFFFFFFFF)
    write_npy("version.npy", GOOD, version=4)
    with open("big_header.npy", "wb") as file:
        header = GOOD.encode().rstrip() + b" " * 3_000_000 + b"\n"
        file.write(b"\x93NUMPY\2\0" + len(header).to_bytes(4, "little") + header + bytes(24))
    open("empty.npy", "wb").close()
    open("short.npy", "wb").write(b"\x93NUM")
    open("prefix.npy", "wb").write(b"\x93NUMPY\1\0\x10")
    open("text.npy", "w").write("hello world, this is text")
    np.savez("archive.npz", a=np.ones(3))
    np.save("object.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    os.mkdir("folder.npy")
    os.mkfifo("pipe.npy")
    for path, message in [("long1.npy", "past the end"), ("long2.npy", "past the end"), ("version.npy", "version 4.0"),
                          ("big_header.npy", "longer than"), ("empty.npy", "not a .npy"), ("short.npy", "not a .npy"),
                          ("prefix.npy", "truncated"), ("text.npy", "not a .npy"), ("archive.npz", "archive"),
                          ("object.npy", "Python objects"), ("folder.npy", "directory"), ("pipe.npy", "regular file"),
                          ("absent.npy", "No such file"), ("/dev/null", "regular file")]:
        refuse(3, f"^normfuse: {path}: x: .*{message}", "run", "affine", path, "-o", "y.npy")
        assert not os.path.exists("y.npy")


def test_odd_headers_that_numpy_reads(folder):
    for header in ('{"shape":(2,3),"fortran_order":False,"descr":"<f4"}', GOOD.replace("(2, 3)", "(2L, 3L,)"),
                   GOOD.replace("<f4", "=f4"),
                   "  {  'descr' : '<f4' , 'fortran_order':False,\n'shape':( 2 , 3 ) } \n\n"):
        data = np.arange(6, dtype="<f4").tobytes()
        write_npy("x.npy", header, data)
        succeed("run", "affine", "x.npy", "-o", "y.npy")
        assert np.array_equal(np.load("y.npy"), np.arange(6, dtype="<f4").reshape(2, 3))


def test_mutated_headers_never_crash(folder):
    """What the fuzzer does at length, here for a moment: any of the documented codes, never a signal."""
    random = np.random.default_rng(7)
    good = bytearray(b"\x93NUMPY\1\0" + len(GOOD).to_bytes(2, "little") + GOOD.encode() + bytes(24))
    for _ in range(150):
        mutated = bytearray(good)
        for _ in range(random.integers(1, 4)):
            mutated[random.integers(0, len(mutated) - 24)] = random.integers(0, 256)
        open("x.npy", "wb").write(mutated)
        result = run("run", "affine", "x.npy", "-o", "y.npy")
        assert result.returncode in (0, 3), (bytes(mutated), result)


def test_shapes_that_contradict(folder):
    case = Case("group_norm", (2, 6, 5))
    np.save("wrong.npy", np.zeros((2, 6, 4), np.float32))
    np.save("vector.npy", np.zeros(5, np.float32))
    np.save("double.npy", np.zeros((2, 6, 5)))
    words = ["run", "group_norm", "x.npy", "groups=3", "-o", "y.npy"]
    refuse(3, r"wrong.npy: --pre-add: the shape is \(2, 6, 4\), it must be \(2, 6, 5\)", *words, "--pre-add",
           "wrong.npy")
    refuse(3, r"vector.npy: --weight: the shape is \(5,\), it must be \(6,\)", *words, "--weight", "vector.npy")
    refuse(3, r"vector.npy: --scale: the shape is \(5,\), it must be \(2, 6\)", *words, "--scale", "vector.npy")
    refuse(3, "double.npy: --post-add: the file holds f64, x holds f32", *words, "--post-add", "double.npy")
    refuse(3, "wrong.npy: --backward: the shape", *words, "--backward", "wrong.npy", "--dx", "dx.npy")
    refuse(3, "x.npy: x: C = 6 is not divisible by groups=4", "run", "group_norm", "x.npy", "groups=4", "-o", "y.npy")
    refuse(3, "x.npy: x: the file holds f32 .*, dtype=f64", *words, "dtype=f64")
    refuse(3, "weight.npy: --weight: the file holds f32 .*, weight_dtype=f16", *words, "weight_dtype=f16", *PARAMETERS)
    np.save("one.npy", np.zeros((1, 4), np.float32))
    refuse(3, "one.npy: x: batch_norm in training needs more than one value", "run", "batch_norm", "one.npy", "-o",
           "y.npy")
    refuse(2, "eps=0: batch_norm in training needs eps above 0", "run", "batch_norm", "x.npy", "eps=0", "-o", "y.npy")
    assert not os.path.exists("y.npy")


# ---- blocks ----------------------------------------------------------------------------------------------------------


def outputs_of(names):
    return {name: open(f"{name}.npy", "rb").read() for name in names}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("op",
                         ["group_norm", "instance_norm", "batch_norm", "batch_norm eval", "affine", "affine_sample"])
def test_blocks_and_threads_give_the_same_bits(folder, op, layout):
    op, *evaluate = op.split()
    # 128 * 128 positions are so many that sums over samples may be cut after every few of them; with fewer positions
    # normfuse_sample_quantum allows no cut and only the operators without such sums are.
    for dtype, sizes in (("f32", (9, 4, 128, 128)), ("bf16", (37, 6, 70)), ("f64", (29, 6))):
        if op == "instance_norm" and len(sizes) == 2:
            continue
        case = Case(op, sizes, dtype, layout)
        names = ["y", "dx", "dweight", "dbias", "dpost_add"]
        words = [*case.words, *PARAMETERS, *ALL_BACKWARD, "-o", "y.npy", "--post-add", "post_add.npy", "--dpost-add",
                 "dpost_add.npy", "--pre-bias", "sample_bias.npy" if op.endswith("sample") else "pre_bias.npy",
                 "--dpre-bias", "dpre_bias.npy"]
        names += ["dpre_bias"]
        if dtype == "bf16":
            words += ["act=silu"]
        else:
            words += ["act=prelu", "--slope", "slope.npy" if dtype == "f32" else "one_slope.npy", "--dslope",
                      "dslope.npy"]
            names += ["dslope"]
        if op == "group_norm":
            words += ["groups=2", "--scale", "scale.npy", "--dscale", "dscale.npy"]
            names += ["dscale"]
        if not op.startswith("affine"):
            words += ["--pre-add", "pre_add.npy"]
        if op in ("batch_norm", "instance_norm"):
            words += ["--running-mean", "running_mean.npy", "--running-var", "running_var.npy"]
        if evaluate:
            words += ["mode=eval"]
        elif not op.startswith("affine"):
            words += ["--mean", "mean.npy", "--rstd", "rstd.npy", "--sum-out", "u.npy"]
            names += ["mean", "rstd", "u"]
            if op != "group_norm":
                words += ["--new-running-mean", "new_mean.npy", "--new-running-var", "new_var.npy"]
                names += ["new_mean", "new_var"]
        succeed(*words)
        whole = outputs_of(names)
        for block, threads in (("1", "3"), ("20K", "1"), ("100K", "2"), ("2M", "3")):
            succeed(*words, "--block-bytes", block, "--threads", threads)
            got = outputs_of(names)
            different = [name for name in names if got[name] != whole[name]]
            assert not different, (dtype, block, threads, different)


def test_a_file_larger_than_the_address_space(folder):
    """32 samples of 8 MiB under a limit of 160 MiB: neither x nor y fits. The file is sparse: its values are 0."""
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (32, 8, 512, 512), }"
    write_npy("x.npy", header.ljust(117) + "\n")
    with open("x.npy", "r+b") as file:
        file.truncate(128 + 32 * 8 * 512 * 512 * 4)
    np.save("bias.npy", np.arange(8, dtype=np.float32))

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (160 << 20, 160 << 20))

    started = subprocess.run([PROGRAM, "--version"], capture_output=True, preexec_fn=limit)
    if started.returncode != 0:
        pytest.skip("the program does not even start in this address space (a sanitizer's shadow memory)")
    for op in (["group_norm", "groups=2"], ["batch_norm"]):
        succeed("run", *op, "x.npy", "--bias", "bias.npy", "-o", "y.npy", "--threads", "2", preexec_fn=limit)
        y = np.load("y.npy", mmap_mode="r")
        assert np.array_equal(y[::31, :, ::511, 0], np.broadcast_to(np.arange(8.0)[None, :, None], (2, 8, 2)))


# ---- outputs ---------------------------------------------------------------------------------------------------------


def test_an_output_may_replace_an_input(folder):
    case = Case("affine", (9, 4, 100))
    succeed(*case.words, "-o", "once.npy", "--bias", "bias.npy")
    os.chmod("x.npy", 0o640)
    succeed(*case.words, "-o", "x.npy", "--bias", "bias.npy", "--block-bytes", "1")
    assert open("x.npy", "rb").read() == open("once.npy", "rb").read()
    assert os.stat("x.npy").st_mode & 0o777 == 0o640


@pytest.mark.parametrize("calls", ["", "tmpfile:1+:95"], ids=["without names", "named"])
def test_the_mode_of_outputs(folder, failing, calls):
    """New ones follow the umask; replaced ones keep their permissions, without setuid, setgid and sticky bits."""
    case = Case("affine", (2, 4, 3))
    for before, after in ((None, 0o640), (0o4755, 0o755), (0o2775, 0o775), (0o1606, 0o606), (0o200, 0o200)):
        if before is not None:
            os.chmod("y.npy", before)
        succeed(*case.words, "-o", "y.npy", env=failing(calls), preexec_fn=lambda: os.umask(0o027))
        assert stat.S_IMODE(os.stat("y.npy").st_mode) == after, oct(before or 0)
    os.chmod("y.npy", 0o640)
    refuse(3, "y.npy: cannot be written: Operation not permitted", *case.words, "-o", "y.npy", "--dx", "dx.npy",
           "--backward", "dy.npy", env=failing("mode:1:1"), preexec_fn=lambda: os.umask(0o077))
    assert not [name for name in os.listdir() if "normfuse" in name or name == "dx.npy"]


def test_symbolic_links_are_followed(folder):
    Case("affine", (2, 4, 3))
    os.mkdir("there")
    os.mkdir("here")
    os.symlink("there/y.npy", "link.npy")
    os.symlink("../link.npy", "here/link.npy")
    os.symlink("round.npy", "round.npy")
    os.symlink("nowhere/y.npy", "lost.npy")
    x = open("x.npy", "rb").read()
    for old in (None, b"old"):  # a link that leads to nothing first
        for link in ("link.npy", "here/link.npy"):
            if old is None and os.path.exists("there/y.npy"):
                os.remove("there/y.npy")
            if old is not None:
                open("there/y.npy", "wb").write(old)
            succeed("run", "affine", "x.npy", "-o", link)
            assert os.path.islink(link) and os.path.islink("link.npy")
            assert open("there/y.npy", "rb").read() == x and os.listdir("there") == ["y.npy"]
    refuse(3, "round.npy: cannot be written: (Too many levels|Symbolic link loop)", "run", "affine", "x.npy", "-o",
           "round.npy")
    refuse(3, "lost.npy: cannot be written: No such file", "run", "affine", "x.npy", "-o", "lost.npy")
    refuse(3, "there/: cannot be written: is a directory", "run", "affine", "x.npy", "-o", "there/")
    assert os.path.islink("round.npy") and os.path.islink("lost.npy")
    refuse(2, "same file", "run", "affine", "x.npy", "-o", "link.npy", "--backward", "dy.npy", "--dx", "there/y.npy")


def test_devices_and_pipes_are_written_to(folder):
    Case("affine", (2, 4, 3))
    x = open("x.npy", "rb").read()
    os.symlink("/dev/null", "null.npy")
    os.mkfifo("pipe.npy")
    for name in ("/dev/null", "null.npy"):
        succeed("run", "affine", "x.npy", "-o", name)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and os.path.islink("null.npy")
    got = []
    reader = threading.Thread(target=lambda: got.append(open("pipe.npy", "rb").read()))
    reader.start()
    succeed("run", "affine", "x.npy", "-o", "pipe.npy")
    reader.join(20)
    assert got == [x] and stat.S_ISFIFO(os.stat("pipe.npy").st_mode)


def test_open_files_are_written_where_they_stand(folder):
    """-o /dev/stdout >>log appends to log, as a program that writes to standard output does."""
    Case("affine", (2, 4, 3))
    x = open("x.npy", "rb").read()
    os.symlink("/dev/stdout", "link.npy")
    for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link.npy"):
        for mode in ("ab", "wb"):
            open("log", "wb").write(b"old")
            inode = os.stat("log").st_ino
            with open("log", mode) as log:
                log.write(b"er, ")
                log.flush()
                subprocess.run([PROGRAM, "run", "affine", "x.npy", "-o", name], stdout=log, check=True, timeout=20)
            assert open("log", "rb").read() == (b"older, " if mode == "ab" else b"er, ") + x, (name, mode)
            assert os.stat("log").st_ino == inode
    with open("log", "ab") as log:
        refuse(2, "same file", "run", "affine", "x.npy", "-o", f"/dev/fd/{log.fileno()}", "--backward", "dy.npy",
               "--dx", "log", pass_fds=[log.fileno()])
    with open("log", "rb") as log:
        for number, message in ((log.fileno(), "Bad file"), (999, "Bad file"), (2**32 + 1, "Bad file")):
            refuse(3, f"/dev/fd/{number}: cannot be written: {message}", "run", "affine", "x.npy", "-o",
                   f"/dev/fd/{number}", pass_fds=[log.fileno()])


def test_a_pipe_that_does_not_block(folder):
    Case("affine", (64, 4, 500))
    read, write = os.pipe()
    os.set_blocking(write, False)
    child = subprocess.Popen([PROGRAM, "run", "affine", "x.npy", "-o", "/dev/stdout"], stdout=write)
    os.close(write)
    time.sleep(0.1)
    with open(read, "rb") as pipe:
        assert pipe.read() == open("x.npy", "rb").read()
    assert child.wait(20) == 0


def test_closed_standard_files(folder):
    """An output does not get the number, and so the messages, of a standard file that is closed."""
    Case("affine", (2, 4, 3))
    x = open("x.npy", "rb").read()
    environment = {**os.environ, "NORMFUSE_VERBOSE": "dispatch"}
    for closed in ("<&- >&- 2>&-", ">&- 2>&-", "2>&-", "<&- 2>&-", ">&-"):
        script = f'exec "$@" {closed}'
        words = ["sh", "-c", script, "sh", PROGRAM, "run", "affine", "x.npy", "-o", "y.npy"]
        assert subprocess.run(words, env=environment, timeout=20).returncode == 0, closed
        assert open("y.npy", "rb").read() == x, closed
        os.remove("y.npy")
        for command in (["info"], ["--help"], ["check", "affine", "1x4"]):
            result = subprocess.run(["sh", "-c", script, "sh", PROGRAM, *command], capture_output=True, timeout=20)
            assert result.returncode == (3 if ">&-" in closed.replace("2>&-", "") else 0), (closed, command)


@pytest.mark.parametrize("calls", ["", "tmpfile:1+:95"], ids=["without names", "named"])
def test_sync(folder, failing, calls):
    """Files are flushed before their names change, and the folder after that; without --sync nothing is."""
    case = Case("affine", (2, 4, 3))
    words = [*case.words, "-o", "y.npy", "--backward", "dy.npy", "--dx", "dx.npy"]
    for sync in ([], ["--sync"]):
        succeed(*words, *sync, env=failing(calls, TRACE_CALLS="log"))
        log = [line.split("/")[-1] for line in open("log").read().splitlines() if not line.startswith("link")]
        files, folders = (["flush file"] * 2, ["flush folder"] * 2) if sync else ([], [])
        assert log == [*files, "y.npy", "dx.npy", *folders]
        os.remove("log")
        os.remove("y.npy")
    refuse(3, "y.npy: cannot be written: Input/output error", *words, "--sync", env=failing("flush:1:5"))
    assert not os.path.exists("y.npy") and not [name for name in os.listdir() if "normfuse" in name]
    refuse(3, "y.npy: is written, but may not be on the disk yet: Input/output", *words, "--sync",
           env=failing("flush:3:5"))
    result = subprocess.run([PROGRAM, "run", "affine", "x.npy", "--sync", "-o", "/dev/stdout"], stdout=subprocess.PIPE)
    assert result.returncode == 0 and result.stdout == open("x.npy", "rb").read()


@pytest.mark.parametrize("calls", ["link:1:13", "link:2:28", "rename:1:13", "tmpfile:1:28"])
def test_the_last_steps_fail(folder, failing, calls):
    case = Case("affine", (2, 4, 3))
    words = [*case.words, "-o", "y.npy", "--backward", "dy.npy", "--dx", "dx.npy"]
    before = sorted(os.listdir())
    result = run(*words, env=failing(calls, FAIL_MARK="../mark"))
    if not os.path.exists("../mark"):
        pytest.skip("this file system has no files without names")
    os.remove("../mark")
    if calls.startswith("tmpfile"):  # the other file is written under a name
        assert result.returncode == 0
        assert sorted(os.listdir()) == sorted(before + ["y.npy", "dx.npy"])
    else:
        assert result.returncode == 3 and "cannot be written: " in result.stderr
        assert sorted(os.listdir()) == before


def test_an_output_to_a_pipe(folder):
    Case("affine", (2, 4, 3))
    result = subprocess.run([PROGRAM, "run", "affine", "x.npy", "-o", "/dev/stdout"], stdout=subprocess.PIPE,
                            timeout=20)
    assert result.returncode == 0
    assert result.stdout == open("x.npy", "rb").read()


def test_outputs_appear_whole_or_not_at_all(folder):
    case = Case("group_norm", (4, 4, 50))
    os.mkdir("full")
    before = sorted(os.listdir())
    words = ["run", "group_norm", "x.npy", "groups=2", "-o", "y.npy"]
    refuse(3, "nowhere/dx.npy: cannot be written: No such file", *words, "--backward", "dy.npy", "--dx",
           "nowhere/dx.npy")
    refuse(3, "full: cannot be written: is a directory", *words, "--mean", "full")
    refuse(3, "/dev/full: cannot be written: No space left", *words, "--mean", "/dev/full")
    refuse(3, "post_add", *words, "--post-add", "absent_post_add.npy")
    assert sorted(os.listdir()) == before
    open("y.npy", "w").write("old")
    refuse(3, "No space left", *words, "--rstd", "/dev/full")
    assert open("y.npy").read() == "old"


def test_a_file_size_limit(folder):
    case = Case("affine", (64, 4, 500))

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    refuse(3, "y.npy: cannot be written: File too large", *case.words, "-o", "y.npy", preexec_fn=limit)
    assert not [name for name in os.listdir() if "y.npy" == name or "normfuse" in name]


def test_a_full_disk(folder, failing):
    os.mkdir("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", "disk"], capture_output=True,
                             text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        case = Case("affine", (20, 4, 800))
        refuse(3, "disk/y.npy: cannot be written: No space left", *case.words, "-o", "disk/y.npy")
        refuse(3, "disk/y.npy: cannot be written: No space left", *case.words, "-o", "disk/y.npy", "--block-bytes", "1")
        assert os.listdir("disk") == []
        open("disk/y.npy", "w").write("old")
        case = Case("affine", (10, 4, 800))  # one of two fits
        for calls in ("", "tmpfile:1+:95"):  # y's place, which is reserved, is free again
            refuse(3, "disk/u.npy: cannot be written: No space left", *case.words, "-o", "disk/y.npy", "--pre-add",
                   "pre_add.npy", "--sum-out", "disk/u.npy", env=failing(calls))
            assert os.listdir("disk") == ["y.npy"] and open("disk/y.npy").read() == "old"
    finally:
        subprocess.run(["umount", "disk"], check=True)


def start_that_waits(*words, **options):
    """The program, y.npy open, as it waits for somebody to read the rest of u.npy; and u.npy."""
    if not os.path.exists("x.npy"):
        np.save("x.npy", np.zeros((3, 16, 100_000), np.float32))
    os.mkfifo("u.npy")
    before = sorted(os.listdir())
    child = subprocess.Popen([PROGRAM, "run", "group_norm", "x.npy", "groups=2", "--pre-add", "x.npy", "-o", "y.npy",
                              "--sum-out", "u.npy", "--block-bytes", "1", *words], **options)
    pipe = open("u.npy", "rb")
    # A pipe holds less than one sample: the program stays behind what is read here.
    assert pipe.read(8) == b"\x93NUMPY\1\0"
    return child, pipe, before


ENDING = ["SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU",
          "SIGSEGV", "SIGABRT", "SIGIO", "SIGPWR", "SIGSYS", "SIGRTMIN"]


@pytest.mark.parametrize("calls", ["", "tmpfile:1+:95"], ids=["without names", "named"])
def test_a_signal_leaves_nothing_behind(folder, failing, calls):
    def start():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        default_signal(number)

    for name in ENDING:
        number = getattr(signal, name)
        child, pipe, before = start_that_waits(env=failing(calls), preexec_fn=start)
        if calls:
            assert any(name.startswith(".normfuse-") for name in os.listdir())
        child.send_signal(number)
        pipe.close()
        assert child.wait(10) == -number, name
        assert sorted(os.listdir()) == before, name
        os.remove("u.npy")


def test_ignored_signals_stay_ignored(folder):
    child, pipe, before = start_that_waits(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    child.send_signal(signal.SIGHUP)
    while pipe.read(1 << 16):
        pass
    pipe.close()
    assert child.wait(20) == 0
    assert sorted(os.listdir()) == sorted(before + ["y.npy"])


def test_a_kill_leaves_nothing_where_files_need_no_names(folder):
    if not has_nameless_files("."):
        pytest.skip("this file system has no files without names")
    child, pipe, before = start_that_waits()
    child.kill()
    pipe.close()
    child.wait(10)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("calls", ["", "tmpfile:1+:95"], ids=["without names", "named"])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_input_that_shrinks(folder, failing, threads, calls):
    child, pipe, before = start_that_waits("--threads", str(threads), stderr=subprocess.PIPE, env=failing(calls))
    # The first thread finds its half of the second sample whole.
    os.truncate("x.npy", 128 + 16 * 100_000 * 4 * 3 // 2)
    while pipe.read(1 << 16):
        pass
    pipe.close()
    _, error = child.communicate(timeout=20)
    assert child.returncode == 3, (child.returncode, error)
    assert error.count(b"became shorter") == 1
    assert sorted(os.listdir()) == before


# ---- the command line ------------------------------------------------------------------------------------------------


def test_options_and_words_in_any_order(folder):
    case = Case("group_norm", (4, 4, 50))
    succeed("run", "group_norm", "x.npy", "groups=2", "act=silu", "-o", "y.npy", "--weight", "weight.npy")
    expected = open("y.npy", "rb").read()
    for words in (["run", "--weight=weight.npy", "act=silu", "x.npy", "-oz.npy", "groups=2", "group_norm"],
                  ["--output=z.npy", "run", "groups=2", "--wei", "weight.npy", "group_norm", "act=silu", "--", "x.npy"],
                  ["run", "-w", "weight.npy", "-o", "z.npy", "--threads=2", "--", "group_norm", "x.npy", "groups=2",
                   "act=silu"],
                  ["run", "group_norm", "./x.npy", "groups=2", "act=silu", "--output", "z.npy", "--weight",
                   "weight.npy", "-q"]):
        if os.path.exists("z.npy"):
            os.remove("z.npy")
        succeed(*words)
        assert open("z.npy", "rb").read() == expected, words


USAGE = [
    (["run"], "no operator"),
    (["run", "group_norm"], "no input file"),
    (["run", "x.npy", "-o", "y.npy"], "no operator"),
    (["run", "layer_norm", "x.npy", "-o", "y.npy"], "one operator and one file"),
    (["run", "group_norm", "x.npy", "-o", "y.npy"], "groups"),
    (["run", "group_norm", "x.npy", "groups=2"], "no output"),
    (["run", "group_norm", "x.npy", "groups=0", "-o", "y.npy"], "groups"),
    (["run", "group_norm", "x.npy", "groups=-2", "-o", "y.npy"], "groups"),
    (["run", "group_norm", "x.npy", "groups=2", "groups=4", "-o", "y.npy"], "twice"),
    (["run", "group_norm", "x.npy", "x.npy", "groups=2", "-o", "y.npy"], "one operator and one file"),
    (["run", "group_norm", "x.npy", "groups=2", "colour=red", "-o", "y.npy"], "colour"),
    (["run", "group_norm", "x.npy", "groups=2", "act=swish2", "-o", "y.npy"], "act=swish2"),
    (["run", "group_norm", "x.npy", "groups=2", "dtype=f8", "-o", "y.npy"], "dtype=f8"),
    (["run", "group_norm", "x.npy", "groups=2", "layout=chwn", "-o", "y.npy"], "layout"),
    (["run", "group_norm", "x.npy", "groups=2", "eps=abc", "-o", "y.npy"], "eps"),
    (["run", "group_norm", "x.npy", "groups=2", "momentum=0.1", "-o", "y.npy"], "momentum"),
    (["run", "group_norm", "x.npy", "groups=2", "dir=bwd", "-o", "y.npy"], "dir=bwd"),
    (["run", "group_norm", "x.npy", "groups=2", "act_param=1", "-o", "y.npy"], "act_param"),
    (["run", "batch_norm", "x.npy", "momentum=big", "-o", "y.npy"], "momentum"),
    (["run", "batch_norm", "x.npy", "momentum=0.1", "seen=3", "-o", "y.npy"], "seen"),
    (["run", "batch_norm", "x.npy", "seen=-1", "-o", "y.npy"], "seen"),
    (["run", "batch_norm", "x.npy", "mode=eval", "-o", "y.npy"], "--running-mean"),
    (["run", "batch_norm", "x.npy", "-o", "y.npy", "--running-mean", "m.npy"], "go together"),
    (["run", "batch_norm", "x.npy", "--new-running-mean", "m.npy"], "--running-mean"),
    (["run", "batch_norm", "x.npy", "-o", "y.npy", "--scale", "s.npy"], "does not take"),
    (["run", "affine", "x.npy", "--mean", "m.npy"], "does not take"),
    (["run", "affine", "x.npy", "-o", "y.npy", "--dx", "dx.npy"], "--backward"),
    (["run", "affine", "x.npy", "-o", "y.npy", "--backward", "dy.npy"], "no gradient"),
    (["run", "group_norm", "x.npy", "groups=2", "-o", "y.npy", "--sum-out", "u.npy"], "--pre-add"),
    (["run", "affine", "x.npy", "--backward", "dy.npy", "--dpre-bias", "d.npy"], "--dx"),
    (["run", "affine", "x.npy", "act=prelu", "-o", "y.npy"], "act=prelu needs --slope"),
    (["run", "affine", "x.npy", "act=relu", "--slope", "s.npy", "-o", "y.npy"], "option '--slope' is for act=prelu"),
    (["run", "affine", "x.npy", "--backward", "dy.npy", "--dslope", "s.npy"], "option '--dslope' is for act=prelu"),
    (["run", "affine", "x.npy", "act=prelu", "act_param=0.1", "--slope", "s.npy", "-o", "y.npy"], "act_param is for"),
    (["run", "group_norm", "x.npy", "groups=2", "-o", "y.npy", "--mean", "./y.npy"], "same file"),
    (["run", "affine", "x.npy", "-o"], "needs a value"),
    (["run", "affine", "x.npy", "--output="], "empty"),
    (["run", "affine", "x.npy", "--nonsense"], "unknown option '--nonsense'"),
    (["run", "affine", "x.npy", "-z"], "unknown option '-z'"),
    (["run", "affine", "x.npy", "--quiet=1", "-o", "y.npy"], "takes no value"),
    (["run", "affine", "x.npy", "--d", "y.npy"], "ambiguous"),
    (["run", "affine", "x.npy", "-o", "y.npy", "--threads", "0"], "between 1 and"),
    (["run", "affine", "x.npy", "-o", "y.npy", "--threads", "two"], "not a number"),
    (["run", "affine", "x.npy", "-o", "y.npy", "--block-bytes", "12Q"], "not a number of bytes"),
    (["run", "affine", "x.npy", "-o", "y.npy", "--block-bytes", "0"], "between"),
    ([], "example:  normfuse check group_norm"),
    (["walk"], "unknown command 'walk': info, run, check, bench or compile\n"),
    (["bnech"], "unknown command 'bnech': info, run, check, bench or compile, did you mean bench?"),
    (["bench", "affine", "2x8x5", "--jsno"], "unknown option '--jsno', did you mean --json?"),
    (["--walk"], "unknown option '--walk'"),
    (["info", "group_norm"], "takes no words"),
    (["check"], "no problem"),
    (["bench"], "no problem"),
    (["bench", "group_norm", "1x4", "groups=3"], "divide"),
    (["bench", "layer_norm", "1x4"], "layer_norm"),
    (["bench", "group_norm", "4", "groups=2"], "2 to 5"),
    (["bench", "group_norm", "1x-4", "groups=2"], "1x-4"),
    (["bench", "group_norm", "99999999999x99999999999", "groups=1"], "overflow"),
    (["bench", "group_norm", "1x4", "groups=2", "wibble=3"], "wibble"),
    (["bench", "group_norm", "1x4", "groups=2", "--samples", "0"], "between"),
    (["check", "batch_norm", "1x4", "mode=maybe"], "mode"),
    (["check", "group_norm", "4x0x5", f"groups={2**62}"], "statistics overflow"),
    (["run", "affine", "x.npy", "-o", "y.npy", "--sync=1"], "takes no value"),
    (["check", "batch_norm", "1x4", "+scale"], "not batch_norm"),
    (["bench", "--random", "0"], "between"),
    (["bench", "--random", "3", "group_norm"], "no problem and no word but device="),
    (["check", "--random", "3", "device=tpu"], "cpu, cuda"),
    (["check", "--random", "3", "--min-bytes", "2MiB", "--max-bytes", "1MiB"], "must rise"),
    (["check", "--random", "3", "--min-bytes", "1K"], "between 16384"),
    (["check", "--random", "3", "--max-bytes", "1MiX"], "not a number of bytes"),
    (["bench", "affine", "1x4", "--max-bytes", "1M"], "need --random"),
    (["compile", "affine", "1x4"], "--gpu is missing"),
    (["compile", "affine", "1x4", "--gpu", "7.5"], "--gpu 7.5 is none of"),
    (["compile", "--gpu", "9.0"], "no problem"),
]


@pytest.mark.parametrize("words,message", USAGE, ids=[" ".join(row[0]) or "nothing" for row in USAGE])
def test_usage_errors(folder, words, message):
    Case("group_norm", (2, 4, 3))
    before = sorted(os.listdir())
    error = refuse(2, re.escape(message), *words)
    assert "--help" in error
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("command", ["info", "run", "check", "bench", "compile"])
def test_help(command):
    text = succeed(command, "--help")
    assert text == succeed(command, "some", "words", "-h") == succeed("--help", command)
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "EXIT STATUS"):
        assert f"\n{heading}\n" in "\n" + text, heading
    assert max(map(len, text.splitlines())) <= 96
    # Every long option is in the manual page and the completion too.
    manual = open(os.path.join(ROOT, "docs", "normfuse.1")).read().replace("\\-", "-")
    completion = open(os.path.join(ROOT, "cli", "completion", "normfuse.bash.in")).read()
    for option in set(re.findall(r"--[a-z][a-z-]+", text.split("\nOPTIONS\n")[1].split("\nEXIT STATUS\n")[0])):
        assert option in manual, option
        assert option in completion, option


def test_main_help_and_version():
    text = succeed("--help")
    for word in ("info", "run", "check", "bench", "compile", "NORMFUSE_CACHE_DIR", "EXIT STATUS", "groups=G", "@FILE"):
        assert word in text
    header = open(os.path.join(ROOT, "include", "normfuse.h")).read()
    version = ".".join(re.search(rf"VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))
    assert succeed("--version") == f"normfuse {version}\n"


# ---- info, check, bench ----------------------------------------------------------------------------------------------


def test_info():
    row = json.loads(succeed("info", "--json"))
    assert set(row) == {"version", "commit", "isas_built", "isas_usable", "isa", "threads", "l1_bytes", "l2_bytes",
                        "llc_bytes", "cpu", "compiler", "cuda", "nvrtc", "kernel_cache", "kernel_cache_problem",
                        "kernel_cache_kernels", "kernel_cache_bytes", "gpu", "driver", "cc", "gpu_l2_bytes",
                        "gpu_memory_bytes"}
    assert row["isa"] in row["isas_usable"] and set(row["isas_usable"]) <= set(row["isas_built"])
    assert "scalar" in row["isas_built"]
    text = succeed("info")
    assert row["version"] in text and row["cuda"] in text
    environment = {**os.environ, "NORMFUSE_MAX_ISA": "scalar", "NORMFUSE_NUM_THREADS": "3"}
    row = json.loads(succeed("info", "--json", env=environment))
    assert row["isa"] == "scalar" and row["threads"] == 3
    assert "ignored" not in succeed("info", env=environment)


def test_unknown_isa_is_said():
    isa = json.loads(succeed("info", "--json"))["isa"]
    for cap in ("avx513", "scala", "scalar avx2"):
        environment = {**os.environ, "NORMFUSE_MAX_ISA": cap, "NORMFUSE_VERBOSE": "dispatch"}
        line = f"NORMFUSE_MAX_ISA={cap} is ignored"
        assert line in succeed("info", env=environment)
        result = run("info", "--json", env=environment)
        assert json.loads(result.stdout)["isa"] == isa and line in result.stderr
        result = run("check", "affine", "1x4x2x2", env=environment)
        assert result.returncode == 0 and result.stderr.count(line) == 1
        del environment["NORMFUSE_VERBOSE"]
        assert line not in run("check", "affine", "1x4x2x2", env=environment).stderr
    for cap in ("", "scalar"):
        environment = {**os.environ, "NORMFUSE_MAX_ISA": cap, "NORMFUSE_VERBOSE": "dispatch"}
        assert "ignored" not in run("check", "affine", "1x4x2x2", env=environment).stderr


FIELDS = ["problem", "op", "shape", "groups", "dtype", "layout", "act", "dir", "device", "isa", "threads", "cache",
          "samples", "median_us", "p10_us", "p90_us", "floor_us", "ratio", "bytes", "gbps", "version", "commit",
          "compiler", "cpu", "date"]


def test_bench_rows(folder):
    open("problems.txt", "w").write("# comment\n\nbatch_norm 4x8x10 dir=bwd dtype=bf16 # and\n")
    lines = succeed("bench", "group_norm", "2x8x4x4", "groups=2", "act=silu", "affine 2x8x5 per=sample layout=nhwc",
                    "@problems.txt", "instance_norm", "2x4x6", "batch_norm 4x8x10 mode=eval dtype=f16", "--json",
                    "--samples=5", "--threads", "2", "--warm").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["problem"] for row in rows] == [
        "group_norm 2x8x4x4 groups=2 act=silu", "affine 2x8x5 layout=nhwc per=sample",
        "batch_norm 4x8x10 dtype=bf16 dir=bwd", "instance_norm 2x4x6", "batch_norm 4x8x10 dtype=f16 mode=eval"]
    for row in rows:
        assert list(row) == FIELDS
        assert row["samples"] == 5 and row["threads"] == 2 and row["cache"] == "warm" and row["device"] == "cpu"
        assert row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["ratio"] == pytest.approx(row["median_us"] / row["floor_us"], rel=0.1)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["date"])
    assert rows[0] | {"op": "group_norm", "shape": "2x8x4x4", "groups": 2, "act": "silu", "dir": "fwd"} == rows[0]
    assert rows[0]["bytes"] == 2 * 2 * 8 * 16 * 4
    assert rows[2]["bytes"] == 3 * 4 * 8 * 10 * 2 and rows[2]["dir"] == "bwd" and rows[2]["dtype"] == "bf16"
    # Cold rows walk through memory of several last-level caches, which may take seconds.
    row = json.loads(succeed("bench", "group_norm", "2x8x4x4", "groups=2", "--json", "--samples", "3"))
    assert row["cache"] == "cold"
    table = succeed("bench", "group_norm", "2x8x4x4", "groups=2", "--samples", "3", "--warm").splitlines()
    assert len(table) == 2 and "median us" in table[0] and table[1].endswith("group_norm 2x8x4x4 groups=2")


CHECK_FIELDS = ["problem", "ok", "budget_used", "tensor", "index", "got", "want", "compared", "beyond", "seed", "isa",
                "threads", "message"]


def test_check(folder):
    problems = ["group_norm 2x8x5x5 groups=2 act=silu", "batch_norm 4x8x10 dtype=bf16 dir=bwd",
                "instance_norm 2x8x30 layout=nhwc", "affine 3x8x7 dtype=f16 per=sample act=relu",
                "batch_norm 4x8x10 mode=eval"]
    lines = succeed("check", *problems, "--seed", "3", "--threads", "2").splitlines()
    assert len(lines) == len(problems)
    for line in lines:
        assert re.match(r"ok +\d+\.\d % ", line), line
    rows = [json.loads(line) for line in succeed("check", *problems, "--json").splitlines()]
    for row in rows:
        assert list(row) == CHECK_FIELDS
        assert row["ok"] is True and 0 < row["budget_used"] <= 1 and row["compared"] > 0 and row["message"] is None
    assert rows[0]["problem"] == problems[0]


def traffic(words):
    """Tensors of x's size that a problem must read and write."""
    backward, pre_add, u, post_add = (word in words for word in ("dir=bwd", "+pre_add", "+u", "+post_add"))
    if not backward:
        return 2 + pre_add + post_add + u
    gated = post_add and any(word.startswith("act=") for word in words)
    return 3 + (pre_add and not u) + u + 2 * gated


def test_bench_counts_additions(folder):
    additions = ["+pre_add", "+pre_add +u", "+post_add", "+pre_add +u +post_add", "+scale +pre_add +post_add"]
    problems = [f"group_norm 2x8x5x5 groups=2{act}{direction} {words}" for act in ("", " act=silu")
                for direction in ("", " dir=bwd") for words in additions]
    rows = [json.loads(line) for line in succeed("bench", *problems, "--warm", "--json", "--samples", "1").splitlines()]
    assert [set(row["problem"].split()) for row in rows] == [set(problem.split()) for problem in problems]
    for row in rows:
        assert row["bytes"] == 2 * 8 * 25 * 4 * traffic(row["problem"].split()), row["problem"]
    assert [traffic(problem.split()) for problem in problems] == [3, 4, 3, 5, 4, 4, 4, 3, 4, 4,
                                                                  3, 4, 3, 5, 4, 4, 4, 5, 6, 6]


SMALL = ["--min-bytes", "16KiB", "--max-bytes", "64k"]


def test_random_lists(folder):
    """One list for both commands, but for pre_bias, which check alone draws, on every instruction set; the longer
    begins as the shorter does, and it is the same for each device, but for norms over more than 1024 channels, which
    are the CPU's."""
    listed, checked = (succeed(command, "--random", "50", "--list") for command in ("bench", "check"))
    assert checked == succeed("check", "--random", "50", "--seed", "1", "--list",
                              env={**os.environ, "NORMFUSE_MAX_ISA": "scalar"})
    more = [set(words.split()) - set(line.split()) for line, words in zip(listed.splitlines(), checked.splitlines())]
    assert [line for line,
            words in zip(listed.splitlines(), checked.splitlines())
            if not set(line.split()) <= set(words.split())] == []
    assert {word for words in more for word in words} == {"+pre_bias", "+pre_bias=sample",
                                                          "+u"} and "+pre_bias" not in listed
    assert all(len(words & {"+pre_bias", "+pre_bias=sample"}) == 1 for words in more
               if words) and 3 <= len([*filter(None, more)]) <= 15
    assert succeed("bench", "--random", "80", "--list").startswith(listed)
    assert not succeed("bench", "--random", "50", "--seed", "2", "--list").startswith(listed[:40])
    every, on_device = (succeed("bench", "--random", "200", *words, "--list").splitlines() for words in ([], ["device=cuda"]))
    assert 1 <= listed.count("act=prelu") <= 8
    others = [(cuda.replace(" device=cuda", ""), cpu) for cuda, cpu in zip(on_device, every)
              if cuda.replace(" device=cuda", "") != cpu]
    assert 1 <= len(others) <= 10 and sum(line.startswith("channel_norm") for line in on_device) >= 5
    assert all(cpu.startswith("channel_norm") and int(cpu.split()[1].split("x")[1]) > 1024 and
               not cuda.startswith("channel_norm") for cuda, cpu in others)
    assert all(" device=cuda" in line for line in on_device)
    open("drawn.txt", "w").write(listed)
    assert succeed("check", "@drawn.txt", "--list") == listed
    assert succeed("check", "affine 2x3 dtype=f32", "--list") == "affine 2x3\n"


def test_random_bench(folder):
    words = ["bench", "--random", "6", "--seed", "4", "--warm", *SMALL]
    *rows, forward, backward = [json.loads(line) for line in succeed(*words, "--json", "--samples", "3").splitlines()]
    assert "".join(row["problem"] + "\n" for row in rows) == succeed(*words, "--list")
    for direction, summary in (("fwd", forward), ("bwd", backward)):
        assert list(summary) == ["summary", "seed", "dir", "problems", "geomean", "p90", "worst", "worst_problem",
                                 "over_us", "min_bytes", "max_bytes", "device", "isa", "threads", "cache", "commit",
                                 "cpu", "date"]
        mine = [row for row in rows if row["dir"] == direction]
        ratios = [row["ratio"] for row in mine]
        worst = max(mine, key=lambda row: row["ratio"])
        assert (summary["summary"], summary["seed"], summary["dir"], summary["problems"]) == ("random", 4, direction, 3)
        assert (summary["min_bytes"], summary["max_bytes"]) == (16384, 65536)
        assert summary["geomean"] == pytest.approx(math.prod(ratios) ** (1 / 3), rel=1e-3)
        assert summary["p90"] == pytest.approx(np.quantile(ratios, 0.9), rel=1e-3)
        assert summary["worst"] == pytest.approx(worst["ratio"], rel=1e-3)
        assert summary["worst_problem"] == worst["problem"]
        assert summary["over_us"] == pytest.approx(max(row["median_us"] - 4 * row["floor_us"] for row in mine),
                                                   abs=0.05)
        for row in mine:
            item = {"f64": 8, "f32": 4}.get(row["dtype"], 2)
            elements = math.prod(map(int, row["shape"].split("x")))
            assert row["bytes"] == elements * item * traffic(row["problem"].split())
    text = succeed(*words, "--samples", "3").splitlines()
    assert len(text) == 9 and "3 fwd: geometric mean" in text[-2] and "3 bwd: geometric mean" in text[-1]


def page_tables(path):
    """{id: rows of cells} of the tables of a page of bench --html, which is well-formed, fetches nothing and has no
    program."""
    text = open(path, encoding="utf-8").read()
    page = xml.etree.ElementTree.fromstring(text)
    assert not {element.tag.split("}")[1] for element in page.iter()} & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"\b(href|src|on\w+)=|url\(|@import", text) and set(re.findall(r"https?://[^\"]+", text)) == {
        "http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in text
    return {table.get("id"): [["".join(cell.itertext()) for cell in row]
                              for row in table.iter("{http://www.w3.org/1999/xhtml}tr")]
            for table in page.iter("{http://www.w3.org/1999/xhtml}table")}, page


def page_points(page):
    return [(point[0].text, point[-1].get("class"))
            for point in page.iter("{http://www.w3.org/2000/svg}g") if point.get("class") == "point"]


def compare_page(path, lines):
    """The page has the numbers of the JSON rows, digit for digit."""
    tables, page = page_tables(path)
    rows = [row for row in (json.loads(line, parse_float=str, parse_int=str) for line in lines) if "problem" in row]
    head, *body = tables["rows"]
    assert body == [[row.get(name, "") for name in head] for row in rows]
    assert set(head) >= {"problem", "median_us", "p10_us", "p90_us", "floor_us", "ratio", "gbps", "bytes", "samples"}
    assert page_points(page) == [(row["problem"], row["dir"]) for device in ("cpu", "cuda") for row in rows
                                 if row["device"] == device]
    facts = dict(tables["machine"])
    assert [facts[name] for name in ("CPU", "compiler", "caches")] == [rows[0][key] for key in ("cpu", "compiler", "cache")]
    assert facts["normfuse"] == f"{rows[0]['version']}, commit {rows[0]['commit']}"
    return tables, facts, rows


def test_bench_page(folder):
    name = "a <b>&\"c\"'d'é\udcff\x01.txt"  # a byte that is no UTF-8, and one that no page may hold
    open(name, "w").write("batch_norm 4x8x10 dir=bwd dtype=bf16\naffine 2x8x5 act=leaky_relu act_param=0.25\n")
    lines = succeed("bench", "@" + name, "group_norm 2x8x4x4 groups=2 act=silu", "--json", "--samples", "3",
                    "--threads", "2", "--warm", "--html", "report.html").splitlines()
    tables, facts, rows = compare_page("report.html", lines)
    assert facts["instruction set"] == f"{rows[0]['isa']}, 2 threads"
    assert facts["command"] == ("normfuse bench '@a <b>&\"c\"'\\''d'\\''é\ufffd\ufffd.txt' 'group_norm 2x8x4x4 groups=2 act=silu' "
                                "--json --warm --samples 3 --threads 2 --html report.html")
    ratios = [float(row["ratio"]) for row in rows if row["dir"] == "fwd"]
    forward, backward = tables["summary"][1:]
    assert forward[:3] == ["cpu", "fwd", "2"] and backward[:3] == ["cpu", "bwd", "1"]
    assert float(forward[3]) == pytest.approx(math.prod(ratios)**0.5,
                                              rel=1e-3) and backward[3] == backward[5] == rows[0]["ratio"]
    # The table of the terminal is the same with a page and without; tensors without elements are in no roofline.
    table = succeed("bench", "affine 2x0x3", "affine 2x8x5", "--samples", "3", "--html", "report.html").splitlines()
    assert len(table) == 3 and table[2].endswith("affine 2x8x5")
    tables, page = page_tables("report.html")
    assert len(tables["rows"]) == 3 and page_points(page) == [("affine 2x8x5", "fwd")]


def test_bench_page_of_random_problems(folder):
    lines = succeed("bench", "--random", "6", "--seed", "4", "--warm", *SMALL, "--json", "--samples", "3", "--html",
                    "report.html").splitlines()
    tables, facts, _ = compare_page("report.html", lines)
    summaries = [json.loads(line, parse_float=str, parse_int=str) for line in lines[6:]]
    head, *body = tables["summary"]
    assert body == [[row[name] for name in head] for row in summaries]
    assert "--random 6 --seed 4" in facts["command"]


def test_bench_page_on_a_stand_in_for_a_gpu(folder):
    problems = ["group_norm 2x32x16x16 groups=8 dtype=f16 layout=nhwc act=silu device=cuda", "affine 3x8x7",
                "batch_norm 4x8x10 dir=bwd device=cuda"]
    lines = succeed("bench", *problems, "--json", "--samples", "1", "--warm", "--html", "report.html",
                    env=stand_in()).splitlines()
    tables, facts, rows = compare_page("report.html", lines)
    assert facts["GPU"] == rows[0]["gpu"] == "NVIDIA H200" and facts["driver"] == rows[0]["driver"]
    assert facts["compute capability"] == rows[0]["cc"] and tables["rows"][2][-3:] == ["", "", ""]


def test_bench_page_appears_whole_or_not_at_all(folder):
    os.mkdir("taken")
    for path, message in (("absent/report.html", "absent/report.html: cannot be written: No such file"),
                          ("taken", "taken: cannot be written: is a directory"),
                          ("/dev/full", "/dev/full: cannot be written: No space left")):
        result = run("bench", "affine", "2x8x5", "--samples", "1", "--warm", "--html", path)
        assert result.returncode == 3 and f"normfuse: {message}" in result.stderr
        # A path that cannot be opened is refused before anything is timed.
        assert (result.stdout == "") == (path != "/dev/full")
    refuse(2, "needs a value: FILE", "bench", "affine", "2x8x5", "--html")
    open("report.html", "w").write("before")
    with open("/dev/full", "w") as full:
        result = subprocess.run([PROGRAM, "bench", "affine", "2x8x5", "--warm", "--html", "report.html"], stdout=full,
                                stderr=subprocess.PIPE)
    assert result.returncode == 3
    child = subprocess.Popen([PROGRAM, "bench", "affine 2x8x5", "group_norm 2x64x64x64 groups=8", "--samples",
                              "1000000", "--html", "report.html"],
                             stdout=subprocess.DEVNULL, preexec_fn=lambda: default_signal(signal.SIGINT))
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == -signal.SIGINT
    assert open("report.html").read() == "before" and sorted(os.listdir()) == ["report.html", "taken"]
    # One that is interrupted after its first problem writes the page of that one.
    child = subprocess.Popen([PROGRAM, "bench", "affine 2x8x5", "group_norm 4x64x256x256 groups=8", "--samples", "2000",
                              "--warm", "--html", "part.html"],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             preexec_fn=lambda: default_signal(signal.SIGINT))
    assert "median" in child.stdout.readline() and "affine 2x8x5" in child.stdout.readline()
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT and error == "normfuse bench: interrupted, 1 of 2 problems are timed\n"
    page = open("part.html").read()
    assert "affine 2x8x5" in page and page.rstrip().endswith("</html>")
    assert sorted(os.listdir()) == ["part.html", "report.html", "taken"]
    succeed("bench", "affine", "2x8x5", "--list", "--html", "report.html")
    assert open("report.html").read() == "before"


def test_random_check(folder):
    words = ["check", "--random", "30", "--seed", "4", *SMALL]
    *rows, summary = [json.loads(line) for line in succeed(*words, "--json").splitlines()]
    assert "".join(row["problem"] + "\n" for row in rows) == succeed(*words, "--list")
    assert all(row["ok"] and row["seed"] == 4 for row in rows)
    assert list(summary) == ["summary", "seed", "problems", "failed", "budget_used", "worst_problem", "min_bytes",
                             "max_bytes"]
    assert summary["problems"] == 30 and summary["failed"] == 0
    assert summary["budget_used"] == max(row["budget_used"] for row in rows)
    text = succeed(*words).splitlines()
    assert len(text) == 31 and text[-1].startswith("30 random problems, seed 4: 0 failed")


def test_a_draw_that_does_not_fit_is_refused_at_once(folder):
    refuse(3, "free memory", "bench", "--random", "1", "--min-bytes", "512G", "--max-bytes", "512G")


def test_problem_files(folder):
    open("bad.txt", "w").write("group_norm 1x4 groups=2\ngroup_norm 1x4 groups=3\n")
    open("empty.txt", "w").write("# nothing\n")
    refuse(3, "^normfuse: bad.txt: line 2: .*divide", "bench", "@bad.txt")
    refuse(3, "^normfuse: empty.txt: the file holds no problem", "check", "@empty.txt")
    refuse(3, "^normfuse: absent.txt: No such file", "check", "@absent.txt")


# ---- device=cuda -----------------------------------------------------------------------------------------------------


def has_gpu():
    return json.loads(succeed("info", "--json"))["gpu"] is not None


def test_cuda_is_refused_without_a_gpu(folder):
    if has_gpu():
        pytest.skip("this machine has a GPU")
    np.save("x.npy", np.zeros((1, 4), np.float32))
    message = "normfuse: .*CUDA"
    refuse(3, message, "bench", "group_norm", "1x4", "groups=2", "device=cuda")
    refuse(3, message, "check", "group_norm", "1x4", "groups=2", "device=cuda")
    refuse(3, message, "check", "group_norm 1x4 groups=2", "group_norm 1x4 groups=2 device=cuda")
    refuse(3, message, "run", "group_norm", "x.npy", "groups=2", "device=cuda", "-o", "y.npy")
    assert os.listdir() == ["x.npy"]


# ---- compile ---------------------------------------------------------------------------------------------------------

NVRTC = os.path.join(ROOT, "build/release/fake/libnvrtc.so.13")


@pytest.mark.skipif(not os.path.exists(NVRTC), reason="needs build/release/fake/libnvrtc.so.13")
def test_compile(folder):
    environment = {"NORMFUSE_NVRTC": NVRTC, "NORMFUSE_CACHE_DIR": os.path.abspath("cache")}
    problems = ["batch_norm 1x64x64", "group_norm 2x8x4x4 groups=2 dir=bwd act=silu +post_add dtype=bf16",
                "affine 2x8x16 layout=nhwc"]

    def counts(*words, env=environment):
        found = re.fullmatch(r"(\S+) holds (\d+) kernels, (\d+) of them new, \S+ MiB\n",
                             succeed("compile", *words, env=env))
        return found[1], int(found[2]), int(found[3])

    where, kernels, new = counts(*problems, "--gpu", "9.0", "-o", "here")
    assert where == "here" and kernels == new == len(list(pathlib.Path("here").glob("*.kernel")))
    # A kernel that is there is not compiled again, and needs no NVRTC.
    assert counts(*problems, "--gpu", "9.0", "-o", "here", env={"NORMFUSE_NVRTC": ""}) == ("here", kernels, 0)
    where, of_another, new = counts(*problems, "--gpu", "8.0", "-o", "here")
    assert of_another == kernels + new
    assert counts(*problems, "--gpu", "9.0")[0] == os.path.abspath("cache")
    assert counts("--random", "30", "--max-bytes", "1MiB", "--gpu", "12.0")[0] == os.path.abspath("cache")
    assert succeed("compile", "--list", "affine 2x8x16", "--gpu", "9.0") == "affine 2x8x16\n"
    row = json.loads(succeed("info", "--json", env=environment))
    assert row["nvrtc"] == f"NVRTC 13.0, {NVRTC}" and row["kernel_cache"] == os.path.abspath("cache")
    assert row["kernel_cache_kernels"] >= kernels and row["kernel_cache_problem"] == ""
    assert f"NVRTC          NVRTC 13.0, {NVRTC}\n" in succeed("info", env=environment)
    os.mkdir("open")
    os.chmod("open", 0o777)
    refuse(3, "open: can be written by other users", "compile", *problems, "--gpu", "9.0", "-o", "open",
           env=environment)
    assert "can be written by other users" in succeed("info", env={**environment, "NORMFUSE_CACHE_DIR": "open"})
    refuse(3, "NORMFUSE_CACHE_DIR: there is none", "compile", *problems, "--gpu", "9.0",
           env={**environment, "NORMFUSE_CACHE_DIR": ""})
    if kernels:
        refuse(3, "NVRTC", "compile", *problems, "--gpu", "9.0", "-o", "other", env={"NORMFUSE_NVRTC": ""})


def stand_in():
    """The environment in which CUDA is tests/cuda/fake_gpu.c: it computes nothing, in a time of its own."""
    folder = os.path.join(os.path.dirname(os.path.realpath(PROGRAM)), "fake", "gpu")
    if not os.path.exists(os.path.join(folder, "libcuda.so.1")):
        pytest.skip("the program was built without CUDA or without its tests")
    return {**os.environ, "LD_LIBRARY_PATH": folder}


@pytest.mark.parametrize("name, least", [("bars-cuda.txt", 50), ("heldout-cuda.txt", 50), ("training-cuda.txt", 28),
                                         ("sizes-cuda.txt", 40)])
def test_cuda_problem_files(folder, name, least):
    """Every line is a problem, and none is there twice."""
    path = os.path.join(ROOT, "bench", name)
    problems = [line for line in open(path).read().splitlines() if line and not line.startswith("#")]
    assert len(problems) == len(set(problems)) and len(problems) >= least
    assert all(line.endswith(" device=cuda") for line in problems)
    assert sum(" dir=bwd" in line for line in problems) * 2 == len(problems)
    if not has_gpu():
        refuse(3, re.escape(problems[0]), "bench", "@" + path)


def test_cuda_info(folder):
    if not has_gpu():
        pytest.skip("no GPU")
    row = json.loads(succeed("info", "--json"))
    assert re.fullmatch(r"\d+\.\d", row["cc"]) and row["gpu_l2_bytes"] > 0 and row["gpu_memory_bytes"] > 0
    text = succeed("info")
    assert row["gpu"] in text and row["driver"] in text and row["cc"] in text


def test_cuda_check_and_bench(folder):
    if not has_gpu():
        pytest.skip("no GPU")
    problems = ["group_norm 2x32x16x16 groups=8 dtype=f16 layout=nhwc act=silu device=cuda",
                "batch_norm 4x8x10 dir=bwd device=cuda", "affine 3x8x7 act=relu per=sample device=cuda"]
    for line in succeed("check", *problems, "--json").splitlines():
        row = json.loads(line)
        assert list(row) == CHECK_FIELDS and row["ok"] is True and row["isa"] == "cuda" and row["compared"] > 0
    rows = [json.loads(line) for line in succeed("bench", *problems, "--json", "--samples", "15").splitlines()]
    assert [row["problem"] for row in rows] == problems
    for row in rows:
        assert list(row) == FIELDS[:-1] + ["gpu", "driver", "cc", "kernel", "floor_kernel", "host_us", "impl", "date"]
        assert row["device"] == "cuda" and row["samples"] == 15 and row["cache"] == "cold" and row["impl"] == "normfuse"
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"] and row["floor_us"] > 0 and row["host_us"] > 0
        assert row["kernel"]


@pytest.mark.parametrize("op", [["group_norm", "groups=2", "act=silu"], ["instance_norm"], ["affine"],
                                ["batch_norm"], ["batch_norm", "mode=eval"]], ids=" ".join)
def test_cuda_runs_as_the_cpu_does(folder, op):
    """f64, so that both devices are near the exact result; in one block and in many."""
    if not has_gpu():
        pytest.skip("no GPU")
    rng = np.random.default_rng(7)
    for name in ("x", "dy", "pre_add"):
        np.save(f"{name}.npy", rng.normal(0.5, 1, (40, 6, 5, 7)))
    for name in ("weight", "bias", "rm"):
        np.save(f"{name}.npy", rng.normal(0.5, 1, 6))
    np.save("rv.npy", rng.uniform(0.5, 2, 6))
    evaluates = "mode=eval" in op
    names = ["y", "u", "dx", "dweight", "dbias"]
    if not evaluates and op[0] != "affine":
        names += ["mean", "rstd"]
    options = ["--weight", "weight.npy", "--bias", "bias.npy", "--pre-add", "pre_add.npy", "--backward", "dy.npy"]
    if op[0] in ("batch_norm", "instance_norm") and (evaluates or op[0] == "batch_norm"):
        options += ["--running-mean", "rm.npy", "--running-var", "rv.npy"]
        if not evaluates:
            names += ["new-running-mean", "new-running-var"]
    spelled = {"y": "output", "u": "sum-out"}
    results = {}
    for label, words in [("cpu", []), ("cuda", ["device=cuda"]),
                         ("blocks", ["device=cuda", "--block-bytes", "8K"])]:
        outputs = [word for name in names for word in (f"--{spelled.get(name, name)}", f"{label}-{name}.npy")]
        succeed("run", *op, "x.npy", *words, *options, *outputs)
        results[label] = {name: np.load(f"{label}-{name}.npy") for name in names}
    for name in names:
        cpu, cuda = results["cpu"][name], results["cuda"][name]
        # sums of some thousand products, each of a few roundings
        bound = 4096 * 2.0 ** -53 * (1 + np.abs(cpu).max())
        assert cpu.dtype == cuda.dtype
        assert np.abs(cpu - cuda).max() <= bound, name
        assert np.abs(results["blocks"][name] - cuda).max() <= bound, name


@pytest.mark.parametrize("words", [["info"], ["info", "--json"], ["--help"], ["--version"], ["run", "--help"],
                                   ["bench", "group_norm", "1x4", "groups=2", "--samples", "3"],
                                   ["check", "group_norm", "1x4", "groups=2"]], ids=" ".join)
def test_closed_and_full_outputs(words):
    read, write = os.pipe()
    os.close(read)
    for stdout, message in ((write, "Broken pipe"), (os.open("/dev/full", os.O_WRONLY), "No space left")):
        result = subprocess.run([PROGRAM, *words], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=20)
        os.close(stdout)
        assert result.returncode == 3, result
        assert f"normfuse: standard output: {message}" in result.stderr


@pytest.mark.parametrize("words", [["info"], ["--help"], ["bench", "affine", "1x4", "--samples", "3", "--warm"],
                                   ["check", "affine", "1x4"]], ids=" ".join)
def test_a_file_size_limit_of_standard_output(folder, words):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))

    with open("log", "wb") as log:
        result = subprocess.run([PROGRAM, *words], stdout=log, stderr=subprocess.PIPE, text=True, preexec_fn=limit)
    assert result.returncode == 3 and "normfuse: standard output: File too large" in result.stderr


@pytest.mark.parametrize("trap", ["", "trap '' PIPE;"], ids=["SIGPIPE", "ignored"])
def test_a_reader_that_stops(folder, trap):
    """normfuse ... | head -1: the command ends at its next line, with a message and a code, not with all its work
    done."""
    open("problems.txt", "w").write("affine 1x4\n" * 2 + "group_norm 4x64x64x64 groups=8\n" * 1000)
    np.save("x.npy", np.zeros((64, 64, 50), np.float32))
    for words, reader, least in ((["check", "@problems.txt"], "head -1", 1),
                                 (["bench", "@problems.txt", "--warm", "--samples", "3"], "head -1", 1),
                                 (["info"], "true", 0),
                                 (["run", "affine", "x.npy", "-o", "/dev/stdout"], "head -c 100", 1)):
        script = f'{trap} {{ "$@"; echo $? >&2; }} | {reader}'
        result = subprocess.run(["sh", "-c", script, "sh", PROGRAM, *words], capture_output=True, timeout=20)
        lines = result.stderr.decode().splitlines()
        # info's few lines may fit into the pipe before its reader is gone.
        fits = not least and len(lines) == 1
        assert lines == ["0"] if fits else lines[-1] == "3" and "Broken pipe" in lines[0], lines


# ---- without memory --------------------------------------------------------------------------------------------------


WITHOUT_MEMORY = {
    "info": ["info"],
    "group_norm": ["run", "group_norm", "x.npy", "groups=2", "--pre-add", "fortran.npy", "--post-add", "swapped.npy",
                   "--sum-out", "u.npy", "--weight", "weight.npy", "--backward", "swapped.npy", "-o", "y.npy",
                   "--mean", "mean.npy", "--dx", "dx.npy", "--dweight", "dweight.npy", "--threads", "3"],
    "batch_norm": ["run", "batch_norm", "x.npy", "-o", "y.npy", "--running-mean", "weight.npy", "--running-var",
                   "weight.npy", "--new-running-mean", "new.npy", "--backward", "fortran.npy", "--dbias", "dbias.npy",
                   "--block-bytes", "1"],
    "instance_norm": ["run", "instance_norm", "x.npy", "-o", "link.npy", "--running-mean", "weight.npy",
                      "--running-var", "weight.npy", "--new-running-var", "new.npy", "--block-bytes", "1"],
    "check": ["check", "affine", "2x4x3", "@problems.txt", "--threads", "3", "--json"],
    "bench": ["bench", "affine", "2x4x3", "@problems.txt", "--warm", "--samples", "1", "--threads", "2", "--html",
              "page.html"],
}


def same_files(name, new, made):
    """The page of bench has other times in it, but is whole."""
    if name != "bench":
        return new == made
    return sorted(new) == sorted(made) and all(xml.etree.ElementTree.fromstring(page) is not None
                                               for page in new.values())


def write_without_memory():
    x = np.random.default_rng(0).standard_normal((4, 16, 32, 32)).astype("<f4")
    np.save("x.npy", x)
    np.save("fortran.npy", np.asfortranarray(x))
    np.save("swapped.npy", x.astype(">f4"))
    np.save("weight.npy", np.ones(16, np.float32))
    os.symlink("behind.npy", "link.npy")
    open("problems.txt",
         "w").write("group_norm 2x8x64x64 groups=2 dir=bwd # " + "longer than the first memory for a line " * 9)


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_every_allocation_fails(folder, failing, name):
    """The k-th allocation, mapping or thread fails, or all from the k-th on: the results are the same, or there is a
    message, code 3 and nothing else. `info` says of what it cannot find out that it is unknown."""
    write_without_memory()
    words = WITHOUT_MEMORY[name]
    before = set(os.listdir())
    good = succeed(*words)
    made = {path: open(path, "rb").read() for path in set(os.listdir()) - before}
    for path in made:
        os.remove(path)
    refused = 0
    for calls, mode, step in (("allocate", "", 1), ("allocate", "+", 5), ("map", "", 1), ("map", "+", 2),
                              ("thread", "", 1), ("thread", "+", 1)):
        for k in range(1, 1000, step):
            named = "tmpfile:1+:95," if k % 2 else ""
            environment = failing(f"{named}{calls}:{k}{mode}:{11 if calls == 'thread' else 12}", FAIL_MARK="../mark")
            result = run(*words, env=environment)
            where = calls, k, mode, result
            new = {path: open(path, "rb").read() for path in set(os.listdir()) - before}
            for path in new:
                os.remove(path)
            if result.returncode == 0:
                assert same_files(name, new, made), where
                lines = len(good.splitlines())
                same = result.stdout == good if name not in ("info", "bench") else \
                    len(result.stdout.splitlines()) == lines
                assert same, where
            else:
                refused += 1
                assert result.returncode == 3 and not new, where
                assert re.match(r"normfuse: .*(memory|threads cannot be started)", result.stderr), where
                assert result.stderr.count("\n") == 1, where
            if not os.path.exists("../mark"):
                break
            os.remove("../mark")
    assert refused > 5 or name == "info"


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_memory_limits(folder, name):
    write_without_memory()
    words = WITHOUT_MEMORY[name]
    before = set(os.listdir())
    made = None
    for mebibytes in (1000, 100, 40, 30, 20, 15, 12, 10, 9, 8, 7, 6, 5):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))

        if run("--version", preexec_fn=limit).returncode != 0:
            break
        result = run(*words, preexec_fn=limit)
        new = {path: open(path, "rb").read() for path in set(os.listdir()) - before}
        for path in new:
            os.remove(path)
        where = mebibytes, result
        if made is None:
            assert result.returncode == 0, where
            made = new
        if result.returncode == 0:
            assert same_files(name, new, made), where
        else:
            assert result.returncode == 3 and not new, where
            assert re.match(r"normfuse: .*(memory|threads cannot be started)", result.stderr), where
    if made is None:
        pytest.skip("the program does not even start in 1000 MiB (a sanitizer's shadow memory)")


def test_a_closed_pipe_as_an_output_file(folder):
    case = Case("affine", (64, 4, 500))
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([PROGRAM, *case.words, "-o", "/dev/stdout"], stdout=write, stderr=subprocess.PIPE,
                            text=True)
    os.close(write)
    assert result.returncode == 3
    assert "/dev/stdout: cannot be written: Broken pipe" in result.stderr


def test_bench_says_where_it_is(folder):
    """On a terminal alone, and takes the line away before each row."""
    words = [PROGRAM, "bench", "affine 2x8x5", "affine 2x8x6", "--warm", "--samples", "3"]
    status, shown = on_a_terminal(words, 60, stdout=subprocess.DEVNULL)
    assert status == 0
    assert shown.decode().split("\r\x1b[K") == ["", "1/2 affine 2x8x5", "", "2/2 affine 2x8x6", ""]
    assert subprocess.run(words, capture_output=True, timeout=60).stderr == b""
    assert on_a_terminal([*words[:3], *words[4:]], 60, stdout=subprocess.DEVNULL) == (0, b"")


def test_progress_is_shown_on_a_terminal_only(folder):
    np.save("x.npy", np.zeros((1500, 16, 400), np.float32))
    words = [PROGRAM, "run", "batch_norm", "x.npy", "-o", "y.npy", "--block-bytes", "1K", "act=mish", "--threads", "1"]
    for quiet in ([], ["--quiet"]):
        status, shown = on_a_terminal(words + quiet, 30)
        assert status == 0
        assert (b"[" in shown and b" %" in shown) == (not quiet), shown
    assert run(*words[1:]).stderr == ""


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))

# SPDX-License-Identifier: MIT
"""normfuse.jax: outputs and gradients within the bounds of docs/numerics.md, from float64; jit, vmap, second
derivatives, two devices; Flax's layers beside those in their place; errors while tracing. NORMFUSE_TEST_DEVICE is where
the arrays are:
"cpu", which is four devices here, or "cuda"."""
import os
import re
import sys

import numpy
import pytest
from device import DEVICE, ON_CUDA

if "jax" not in sys.modules:
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4").strip()
    os.environ["JAX_PLATFORMS"] = DEVICE
jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import normfuse.jax as nfj  # noqa: E402
import reference  # noqa: E402
from pages import wants_huge_pages  # noqa: E402

ACTIVATIONS = ["identity", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "elu", "mish", "relu6"]
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def values(seed, shape, dtype="float32", scale=1.0, shift=0.0):
    return jnp.asarray(numpy.random.default_rng(seed).standard_normal(shape) * scale + shift, dtype)


def same(got, want):
    """Of another number of samples: the same bits on the CPU, and on CUDA another schedule within the bounds."""
    if ON_CUDA:
        numpy.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
    else:
        numpy.testing.assert_array_equal(got, want)


def wide(array):
    return None if array is None else numpy.asarray(array, "float64")


def big(array, layout):
    """[N, C, S] in float64."""
    if array is None:
        return None
    array = wide(array)
    if layout == "nhwc":
        array = numpy.moveaxis(array, -1, 1)
    return array.reshape(*array.shape[:2], -1)


OPERATORS = {
    "group": lambda a, **k: nfj.group_norm(a.pop("x"), 4, **a, **k),
    "instance": lambda a, **k: nfj.instance_norm(a.pop("x"), **a, **k),
    "batch": lambda a, **k: nfj.batch_norm(a.pop("x"), training=True, **a, **k),
    "evaluate": lambda a, **k: nfj.batch_norm(a.pop("x"), training=False, **a, **k),
    "affine": lambda a, **k: nfj.channel_affine(a.pop("x"), a.pop("weight", None), **a, **k),
    "channel": lambda a, **k: nfj.channel_norm(a.pop("x"), groups=CHANNEL_GROUPS, **a, **k),
    "mean_square": lambda a, **k: nfj.channel_norm(a.pop("x"), statistics="mean_square", eps_kind="of_norm", **a, **k),
}
CHANNEL_NORMS = ("channel", "mean_square")
CHANNEL_GROUPS = 2
SAMPLES, CHANNELS, SPATIAL = 3, 8, (5, 6)


def arguments(operator, dtype, layout, parameter_dtype="float32", additions=True):
    shape = (SAMPLES, *SPATIAL, CHANNELS) if layout == "nhwc" else (SAMPLES, CHANNELS, *SPATIAL)
    given = {"x": values(0, shape, dtype, 2, 0.5), "weight": values(1, CHANNELS, parameter_dtype, 0.3, 1),
             "bias": values(2, CHANNELS, parameter_dtype)}
    per_sample = ("group", "instance", *CHANNEL_NORMS)
    if additions:
        bias = (SAMPLES, CHANNELS) if operator in (*per_sample, "evaluate") and operator != "instance" else CHANNELS
        given.update(pre_add=values(3, shape, dtype), pre_bias=values(10, bias, parameter_dtype),
                     post_add=values(4, shape, dtype))
    if additions and operator in per_sample:
        given.update(scale=values(5, (SAMPLES, CHANNELS), parameter_dtype, 0.3),
                     shift=values(6, (SAMPLES, CHANNELS), parameter_dtype))
    if operator in ("batch", "evaluate"):
        given.update(running_mean=values(7, CHANNELS, "float32", 0.2), running_var=abs(values(8, CHANNELS)) + 0.5)
    return given


assert ON_CUDA == (jax.default_backend() == "gpu"), "jax was imported before, with another device"


def problem_of(operator, given, layout, activation="identity", act_param=None):
    x = given["x"]
    kind = {"group": "group", "instance": "group", "affine": "affine", **dict.fromkeys(CHANNEL_NORMS, "channel")}.get(
        operator, "batch")
    of_channels = {"statistics": "mean_square", "eps_kind": "of_norm"} if operator == "mean_square" else {}
    return reference.Problem(
        kind, x.dtype.name, big(x, layout), columns=layout == "nhwc", **of_channels,
        groups={"group": 4, "instance": CHANNELS, "channel": CHANNEL_GROUPS, "mean_square": 1}.get(operator, 0),
        pre_add=big(given.get("pre_add"), layout), post_add=big(given.get("post_add"), layout),
        evaluate=operator == "evaluate", activation=activation, act_param=act_param, on_cuda=ON_CUDA,
        **{name: wide(given.get(name))
           for name in ("weight", "bias", "pre_bias", "scale", "shift", "running_mean", "running_var")})


def compare(name, got, want, layout, dtype):
    target, error = want
    got = big(got, layout) if numpy.ndim(target) == 3 else wide(got)
    reference.compare(name, got, target, error, dtype)


def check(operator, given, layout, jit=True, activation="identity", act_param=None):
    """One call and all of its gradients, beside float64."""
    words = {"activation": activation, "act_param": act_param, "layout": layout}
    with numpy.errstate(all="ignore"):
        problem = problem_of(operator, given, layout, activation, act_param)
        want = reference.forward(problem)
    dtype = given["x"].dtype.name
    dy = values(9, given["x"].shape, dtype)
    constant = {name: value for name, value in given.items() if name.startswith("running")}
    leaves = {name: value for name, value in given.items() if name not in constant}

    def function(leaves):
        return OPERATORS[operator]({**leaves, **constant}, **words)

    def both(leaves, dy):
        made, pull = jax.vjp(function, leaves)
        upstream = (dy, *map(jnp.zeros_like, made[1:])) if isinstance(made, tuple) else dy
        return made, pull(upstream)[0]
    made, gradients = (jax.jit(both) if jit else both)(leaves, dy)
    made = made if isinstance(made, tuple) else (made,)
    names = ("y", "running_mean", "running_var")[:len(made)]
    assert len(made) == (3 if operator == "batch" else 1)
    for name, got in zip(names, made):
        assert got.dtype == (given["x"] if name == "y" else given[name]).dtype
        compare(name, got, want[name], layout, got.dtype.name)
    statistics = (want["mean"][0], want["rstd"][0]) if "mean" in want else (None, None)
    want = reference.backward(problem, big(dy, layout), *statistics)
    # The reference's statistics here are exact, the library's are rounded: that is the second term.
    slack = 4 * reference.UNIT["float64" if dtype == "float64" else "float32"]
    if "pre_bias" in given:  # the sum of dx as it was written, in its compute type
        axes, dx = (2,) if given["pre_bias"].ndim == 2 else (0, 2), big(gradients["x"], layout)
        unit = reference.UNIT["float64" if dtype == "float64" else "float32"]
        want["dpre_bias"] = dx.sum(axes), (dx.size // given["pre_bias"].size + 8) * unit * abs(dx).sum(axes)
    for name, got in gradients.items():
        target, error = want["dx" if name in ("x", "pre_add") else "d" + name]
        assert got.dtype == given[name].dtype and got.shape == given[name].shape
        compare("d" + name, got, (target, error + slack * (abs(target) + abs(target).max(initial=0))), layout,
                got.dtype.name)


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators(operator, dtype, layout):
    check(operator, arguments(operator, dtype, layout), layout, activation="silu")


@pytest.mark.parametrize("operator", OPERATORS)
def test_float64(operator, x64):
    check(operator, arguments(operator, "float64", "nhwc", "float64"), "nhwc", activation="gelu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("operator", ["group", "channel"])
def test_activations(operator, activation):
    check(operator, arguments(operator, "float32", "nhwc", additions=False), "nhwc", activation=activation)


@pytest.mark.parametrize("activation, act_param", [("leaky_relu", 0.2), ("elu", 0.7)])
def test_act_param(activation, act_param):
    check("affine", arguments("affine", "float32", "nhwc"), "nhwc", activation=activation, act_param=act_param)


@pytest.mark.parametrize("operator", OPERATORS)
def test_without_jit(operator):
    check(operator, arguments(operator, "float32", "nhwc", additions=False), "nhwc", jit=False)


@pytest.mark.parametrize("parameter_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("operator", ["group", *CHANNEL_NORMS])
def test_parameters_of_another_dtype(operator, parameter_dtype):
    check(operator, arguments(operator, "bfloat16", "nhwc", parameter_dtype), "nhwc")


def test_large_tensor_runs_on_several_threads():
    """More elements than one thread is given."""
    x = values(0, (2, 64, 64, 32))
    got = jax.jit(lambda x: nfj.group_norm(x, 8))(x)
    want = reference.forward(reference.Problem("group", "float32", big(x, "nhwc"), groups=8, columns=True,
                                               on_cuda=ON_CUDA))
    compare("y", got, want["y"], "nhwc", "float32")


def test_large_mean_keeps_its_digits():
    """The mean is saved in float64 though jax_enable_x64 is off."""
    given = {"x": values(0, (2, 8, 8, 8), scale=1, shift=1e4), "weight": jnp.ones(8), "bias": jnp.zeros(8)}
    dy = values(1, given["x"].shape)
    weight = jax.jit(jax.grad(lambda w: jnp.vdot(nfj.group_norm(given["x"], 4, w, given["bias"]), dy)))(given["weight"])
    problem = problem_of("group", given, "nhwc")
    want = reference.forward(problem)
    target, _ = reference.backward(problem, big(dy, "nhwc"), want["mean"][0], want["rstd"][0])["dweight"]
    numpy.testing.assert_allclose(wide(weight), target, rtol=0, atol=2e-5 * abs(target).max())


@pytest.mark.parametrize("bias", [None, 8, (2, 8)])
@pytest.mark.parametrize("adds", [True, False])
def test_sum_is_returned_and_differentiated(bias, adds):
    """u is rounded where it is returned; dpre_bias is that of what was normalized."""
    x, weight = values(0, (2, 4, 4, 8)), values(2, 8)
    more = {"pre_add": values(1, (2, 4, 4, 8))} if adds else {}
    more.update({} if bias is None else {"pre_bias": values(3, bias)})
    if not more:
        return

    def loss(function):
        def value(x, weight, more):
            y, u = function(x, weight, more)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(u))
        return value
    def plain(x, weight, more):
        u = x + more.get("pre_add", 0)
        u = u if bias is None else u + more["pre_bias"].reshape(-1, 1, 1, 8)
        return nfj.group_norm(u, 2, weight), u
    ours = loss(lambda x, w, more: nfj.group_norm(x, 2, w, return_sum=True, **more))
    got, want = (jax.tree.leaves(jax.grad(f, (0, 1, 2))(x, weight, more)) for f in (ours, loss(plain)))
    for a, b in zip(got, want):
        numpy.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("bias", [8, (4, 8)])
def test_only_the_gradient_of_pre_bias(bias):
    """It takes dx, which nobody else asks for; parameters of 16 bits."""
    x, dy, pre_bias = values(0, (4, 3, 5, 8)), values(1, (4, 3, 5, 8)), values(2, bias, "bfloat16")
    function = lambda b: jnp.vdot(nfj.batch_norm(x, training=True, pre_bias=b, activation="silu"), dy)  # noqa: E731
    dx = jax.grad(lambda x: jnp.vdot(nfj.batch_norm(x, training=True, pre_bias=pre_bias, activation="silu"), dy))(x)
    got = jax.jit(jax.grad(function))(pre_bias)
    want = wide(dx).sum((1, 2) if pre_bias.ndim == 2 else (0, 1, 2))
    assert got.dtype == jnp.bfloat16 and got.shape == pre_bias.shape
    numpy.testing.assert_allclose(wide(got), want, atol=1e-6, rtol=2.0**-8)


def test_six_axes_and_two():
    for function in (lambda x: nfj.group_norm(x, 2), nfj.channel_norm):
        assert function(jnp.zeros((0, 3, 2, 2, 3, 8))).shape == (0, 3, 2, 2, 3, 8)
    x = values(0, (2, 3, 2, 2, 3, 8))
    numpy.testing.assert_array_equal(nfj.group_norm(x, 2).reshape(2, -1, 8), nfj.group_norm(x.reshape(2, -1, 8), 2))
    assert nfj.batch_norm(values(1, (5, 8)), training=True).shape == (5, 8)


def test_empty():
    x = jnp.zeros((0, 4, 4, 8))
    assert nfj.group_norm(x, 2).shape == x.shape
    gradient = jax.grad(lambda w: nfj.group_norm(x, 2, w).sum())(jnp.ones(8))
    numpy.testing.assert_array_equal(gradient, numpy.zeros(8))


# ---- channel norm ---------------------------------------------------------------------------------------------------


def formula_of_channels(x, weight=None, bias=None, groups=1, statistics="mean_and_variance", eps=1e-5,
                        eps_kind="added"):
    """Channels last."""
    v = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    v = v - v.mean(-1, keepdims=True) if statistics == "mean_and_variance" else v
    if eps_kind == "added":
        v = v / jnp.sqrt((v * v).mean(-1, keepdims=True) + eps)
    else:
        v = v * v.shape[-1]**0.5 / jnp.maximum(jnp.linalg.norm(v, axis=-1, keepdims=True), eps)
    return v.reshape(x.shape) * (1 if weight is None else weight) + (0 if bias is None else bias)


@pytest.mark.parametrize("dtype, other", [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"),
                                          ("float32", "float16")])
@pytest.mark.parametrize("statistics", ["mean_and_variance", "mean_square"])
def test_y_of_another_dtype(statistics, dtype, other):
    """y, post_add and their gradients are in it; u has x's, and a loss of u alone has no dy."""
    x, weight, post_add = values(0, (3, 5, 8), dtype, 2, 1), values(1, 8), values(2, (3, 5, 8), other)

    def function(x, weight, post_add):
        return nfj.channel_norm(x, weight, statistics=statistics, activation="silu", pre_add=x, post_add=post_add,
                                dtype=other, return_sum=True)

    def plain(x, weight, post_add):
        u = x + x
        z = formula_of_channels(u.astype("float32"), weight, statistics=statistics) + post_add.astype("float32")
        return jax.nn.silu(z).astype(other), u
    (y, u), (want, _) = jax.jit(function)(x, weight, post_add), plain(x, weight, post_add)
    assert (y.dtype, u.dtype) == (jnp.dtype(other), jnp.dtype(dtype))
    numpy.testing.assert_allclose(wide(y), wide(want), rtol=reference.UNIT[other] * 4, atol=1e-5)
    losses = (lambda y, u: jnp.sum(jnp.sin(y.astype("float32"))), lambda y, u: jnp.sum(jnp.sin(u.astype("float32"))))
    for loss in losses:
        got, want = (jax.grad(lambda *a, f=f: loss(*f(*a)), (0, 1, 2))(x, weight, post_add) for f in (function, plain))
        assert [g.dtype for g in got] == [v.dtype for v in (x, weight, post_add)]
        for a, b in zip(got, want):
            numpy.testing.assert_allclose(wide(a), wide(b), rtol=0.02, atol=0.02 * float(abs(wide(b)).max()))
    with pytest.raises(TypeError, match="post_add"):
        function(x, weight, post_add.astype(dtype))


def test_clamped_norms(x64):
    """Where the norm is at most eps rstd is a constant: derivatives of both orders beside the formula, which has NaN
    where x is 0."""
    x = values(0, (2, 3, 8), "float64").at[0, 1].multiply(1e-3)
    words = {"statistics": "mean_square", "eps_kind": "of_norm", "eps": 0.1}

    def both(function, x):
        first = jax.grad(lambda x: jnp.sum(jnp.sin(function(x, **words))))
        return function(x, **words), first(x), jax.grad(lambda x: jnp.sum(jnp.cos(first(x))))(x)
    for got, want in zip(both(nfj.channel_norm, x), both(formula_of_channels, x)):
        numpy.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    y, first, second = both(nfj.channel_norm, jnp.zeros_like(x))
    numpy.testing.assert_allclose(first, jnp.full_like(x, 8**0.5 / 0.1), rtol=1e-12)
    assert not y.any() and not second.any()


@pytest.mark.parametrize("shape", [(7, 8), (2, 7, 8), (2, 2, 2, 2, 3, 8), (0, 8), (2, 0, 8)])
def test_tokens(shape):
    x, weight = values(0, shape), values(1, 8)
    got, want = (jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), (0, 1)))(x, weight)
                 for f in (nfj.channel_norm, formula_of_channels))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        numpy.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


# ---- transformations ------------------------------------------------------------------------------------------------


def counted(function, *arrays):
    """How many calls of the library the program has, loops counted once."""
    return jax.jit(function).lower(*arrays).as_text().count("stablehlo.custom_call @normfuse(")


def test_unwanted_gradients_are_not_computed():
    x, w = values(0, (2, 4, 4, 8)), values(1, 8)
    text = jax.jit(jax.grad(lambda x: nfj.group_norm(x, 2, w).sum())).lower(x).as_text()
    from normfuse.jax._call import _mask
    outputs = re.findall(r"integers = dense<\[\d+, \d+, (\d+), ", text)
    assert outputs == [str(_mask(["y", "mean", "rstd"])), str(_mask(["dx"]))]


def test_attributes_that_are_all_equal():
    """MLIR has one value for an array of equal ones."""
    x = values(0, (2, 4, 4, 8), scale=2, shift=0.5)
    groups = wide(x).reshape(2, 16, 2, 4)
    want = (groups - groups.mean((1, 3), keepdims=True)) / groups.std((1, 3), keepdims=True)
    numpy.testing.assert_allclose(jax.jit(lambda x: nfj.group_norm(x, 2, eps=0.0))(x), want.reshape(x.shape), atol=1e-5)


@pytest.mark.parametrize("operator", OPERATORS)
def test_second_derivative(operator, x64):
    given = arguments(operator, "float64", "nhwc", "float64", additions=False)
    given["pre_bias"] = values(10, CHANNELS if operator == "batch" else (SAMPLES, CHANNELS), "float64")
    constant = {name: value for name, value in given.items() if name.startswith("running")}
    leaves = {name: value for name, value in given.items() if name not in constant}

    def function(leaves):
        made = OPERATORS[operator]({**leaves, **constant}, activation="silu")
        return made[0] if isinstance(made, tuple) else made

    def first(leaves):
        return sum(jnp.sum(jnp.sin(g))
                   for g in jax.tree.leaves(jax.grad(lambda l: jnp.sum(jnp.cos(function(l))))(leaves)))
    gradients = jax.jit(jax.grad(first))(leaves)
    for name, gradient in gradients.items():
        direction = values(11, leaves[name].shape, "float64")
        step = 1e-5
        ends = [first({**leaves, name: leaves[name] + sign * step * direction}) for sign in (1, -1)]
        numpy.testing.assert_allclose(jnp.vdot(gradient, direction), (ends[0] - ends[1]) / (2 * step), rtol=1e-5,
                                      atol=1e-6)


@pytest.mark.parametrize("operator, mapped, calls", [
    ("group", "x", "folded"), ("group", "weight", "sequential"), ("instance", "x", "folded"),
    ("evaluate", "x", "folded"),
    ("batch", "x", "sequential"), ("affine", "x", "folded"), ("group", "scale", "folded"),
    ("group", "pre_bias", "folded"), ("affine", "pre_bias", "sequential"), ("channel", "x", "folded"),
    ("mean_square", "weight", "sequential")])
def test_vmap(operator, mapped, calls):
    given = arguments(operator, "float32", "nhwc", additions=operator == "group" or mapped == "pre_bias")
    batch = jnp.stack([given[mapped] * (1 + 0.5 * i) for i in range(3)])

    def function(value):
        made = OPERATORS[operator]({**given, mapped: value}, activation="silu")
        return made[0] if isinstance(made, tuple) else made
    got = jax.vmap(function)(batch)
    same(got, jnp.stack([function(value) for value in batch]))
    text = jax.jit(jax.vmap(function)).lower(batch).as_text()
    assert ("stablehlo.while" in text) == (calls == "sequential")


def test_vmap_of_gradients_and_gradients_of_vmap():
    x, weight = values(0, (3, 2, 4, 4, 8)), values(1, 8)

    def loss(x, weight):
        return jnp.sum(jnp.sin(nfj.group_norm(x, 2, weight, activation="silu")))
    each = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(x, weight)
    whole = jax.grad(lambda x, w: jax.vmap(loss, (0, None))(x, w).sum(), (0, 1))(x, weight)
    for i in range(3):
        want = jax.grad(loss, (0, 1))(x[i], weight)
        numpy.testing.assert_allclose(each[0][i], want[0], atol=1e-6)
        numpy.testing.assert_allclose(each[1][i], want[1], atol=1e-5)
        numpy.testing.assert_allclose(whole[0][i], want[0], atol=1e-6)
    numpy.testing.assert_allclose(whole[1], each[1].sum(0), atol=1e-5)
    of_bias = jax.grad(lambda bias, x: jnp.sum(jnp.sin(nfj.group_norm(x, 2, pre_bias=bias))))
    mapped = jax.vmap(of_bias, (None, 0))(weight, x)
    numpy.testing.assert_allclose(mapped, jnp.stack([of_bias(weight, each) for each in x]), atol=1e-5)
    nested = jax.vmap(jax.vmap(loss, (0, None)), (0, None))(x[None], weight)
    numpy.testing.assert_allclose(nested[0], jax.vmap(loss, (0, None))(x, weight), rtol=1e-6, atol=1e-5)


def test_scan_and_checkpoint():
    x, weight = values(0, (2, 4, 4, 8)), values(1, (3, 8))

    def step(x, weight):
        return jax.checkpoint(lambda x, w: nfj.group_norm(x, 2, w, activation="silu"))(x, weight), None
    scanned = jax.jit(jax.grad(lambda x, w: jax.lax.scan(step, x, w)[0].sum(), (0, 1)))(x, weight)

    def unrolled(x, w):
        for each in w:
            x = nfj.group_norm(x, 2, each, activation="silu")
        return x.sum()
    for got, want in zip(scanned, jax.grad(unrolled, (0, 1))(x, weight)):
        numpy.testing.assert_allclose(got, want, atol=1e-5)


def test_running_statistics_of_the_caller_stay():
    mean = jnp.zeros(8)
    _, new, _ = jax.jit(lambda x, m: nfj.batch_norm(x, m, jnp.ones(8), training=True))(values(0, (4, 8), shift=3), mean)
    assert not mean.any() and new.all()


# ---- several devices ------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    if len(jax.devices()) < 2:
        pytest.skip("one GPU" if ON_CUDA else "one device: jax was imported before this file set XLA_FLAGS")
    return Mesh(numpy.array(jax.devices()[:2]), ("data",))


def collectives(compiled):
    return {word for word in COLLECTIVES if word + "(" in compiled.as_text() or word + "-start(" in compiled.as_text()}


@pytest.mark.parametrize("operator", ["group", "instance", "affine", "evaluate", *CHANNEL_NORMS])
def test_sharded_batch_without_communication(operator, mesh):
    given = arguments(operator, "float32", "nhwc")
    given = {k: jnp.concatenate([v, v[:1] * 2]) if v.shape[0] == SAMPLES else v for k, v in given.items()}
    function = jax.jit(lambda given: OPERATORS[operator](dict(given), activation="silu"))
    placed = {k: jax.device_put(v, NamedSharding(mesh, PartitionSpec("data") if v.shape[0] == SAMPLES + 1 else
                                                 PartitionSpec())) for k, v in given.items()}
    compiled = function.lower(placed).compile()
    assert not collectives(compiled)
    got = compiled(placed)
    assert got.sharding.spec[0] == "data"
    same(got, function(given))

    names = ("x", "weight", "pre_bias")
    gradient = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(function({**given, **dict(zip(names, a))}))), (0, 1, 2)))
    compiled = gradient.lower(*(placed[name] for name in names)).compile()
    assert collectives(compiled) == {"all-reduce"}  # of dweight and dpre_bias, and nothing else
    for got, want in zip(compiled(*(placed[name] for name in names)), gradient(*(given[name] for name in names))):
        numpy.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias_shape", [8, (4, 8)])
def test_sharded_batch_norm(mesh, bias_shape):
    x, weight, bias = values(0, (4, 6, 5, 8), scale=2, shift=3), values(1, 8), values(2, 8)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    pre_bias = values(3, bias_shape)

    def function(x, weight, bias, pre_bias):
        return nfj.batch_norm(x, jnp.zeros(8), jnp.ones(8), weight, bias, True, activation="silu", pre_bias=pre_bias)
    for got, want in zip(jax.jit(function)(placed, weight, bias, pre_bias), function(x, weight, bias, pre_bias)):
        numpy.testing.assert_allclose(got, want, atol=2e-6, rtol=2e-6)
    gradient = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a)[0] * (1 + x))), (0, 1, 2, 3)))
    for got, want in zip(gradient(placed, weight, bias, pre_bias), gradient(x, weight, bias, pre_bias)):
        numpy.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)


def test_shared_statistics_under_shard_map(mesh):
    """Gradients of parameters are a device's share where JAX does not know what is the same on all devices: their sum
    is the gradient of one device that has the whole batch, as that of the formula. test_jax_devices.py has more."""
    x, weight = values(0, (4, 6, 5, 8), scale=2, shift=3), values(1, 8)

    def function(x, weight, axis):
        y, mean, _ = nfj.batch_norm(x, jnp.zeros(8), jnp.ones(8), weight, training=True, axis_name=axis)
        return y, mean
    rows, all_ = PartitionSpec("data"), PartitionSpec()
    for check in (False, True):
        shared = jax.jit(jax.shard_map(lambda x, w: function(x, w, "data"), mesh=mesh, in_specs=(rows, all_),
                                       out_specs=(rows, all_), check_vma=check))
        for got, want in zip(shared(x, weight), function(x, weight, None)):
            numpy.testing.assert_allclose(got, want, atol=2e-6, rtol=2e-6)

    def formula(x, weight, pre_bias, axis):
        u = x + pre_bias
        mean = u.mean((0, 1, 2)) if axis is None else jax.lax.pmean(u.mean((0, 1, 2)), axis)
        variance = jnp.square(u - mean).mean((0, 1, 2))
        variance = variance if axis is None else jax.lax.pmean(variance, axis)
        return (u - mean) / jnp.sqrt(variance + 1e-5) * weight

    def ours(x, weight, pre_bias, axis):
        return nfj.batch_norm(x, weight=weight, pre_bias=pre_bias, training=True, axis_name=axis)

    def gradients(function, axis):
        return jax.grad(lambda x, *a: jnp.sum(jnp.sin(function(x, *a, axis)) * x), (1, 2))
    want = gradients(formula, None)(x, weight, weight)
    for check in (False, True):  # whether JAX knows what is the same on all devices, and sums what is not
        for function in (formula, ours):
            def step(*a, function=function, check=check):
                made = gradients(function, "data")(*a)
                return made if check else jax.lax.psum(made, "data")
            shared = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(rows, all_, all_), out_specs=(all_, all_),
                                           check_vma=check))
            for got, value in zip(shared(x, weight, weight), want):
                numpy.testing.assert_allclose(got, value, atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize("adds", [True, False])
def test_shared_statistics_with_the_sum(mesh, adds):
    """y is normalized of the u that is returned, in 16 bits; gradients of both reach pre_bias."""
    x, pre_bias = values(0, (4, 6, 5, 8), "bfloat16", scale=2, shift=3), values(1, 8)

    def function(x, pre_bias, axis):
        words = {"pre_add": x} if adds else {}
        return nfj.batch_norm(x, training=True, pre_bias=pre_bias, return_sum=True, axis_name=axis, **words)

    def gradient(x, pre_bias, axis):
        loss = lambda b: sum(jnp.sum(jnp.sin(value.astype("float32"))) for value in function(x, b, axis))  # noqa: E731
        made = jax.grad(loss)(pre_bias)  # of one device, the share
        return made if axis is None else jax.lax.psum(made, axis)
    rows, all_ = PartitionSpec("data"), PartitionSpec()
    for call, out in ((function, (rows, rows)), (gradient, all_)):
        shared = jax.jit(jax.shard_map(lambda *a: call(*a, "data"), mesh=mesh, in_specs=(rows, all_), out_specs=out,
                                       check_vma=False))
        for got, want in zip(jax.tree.leaves(shared(x, pre_bias)), jax.tree.leaves(call(x, pre_bias, None))):
            numpy.testing.assert_allclose(wide(got), wide(want), atol=2e-2, rtol=2.0**-8)


@pytest.mark.parametrize("operator", ["group", "channel"])
def test_sharded_channels_are_gathered(operator, mesh):
    x = values(0, (2, 4, 4, 8))
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, None, "data")))
    function = jax.jit(lambda x: OPERATORS[operator]({"x": x}))
    numpy.testing.assert_array_equal(function(placed), function(x))


def test_sharded_positions_of_a_channel_norm(mesh):
    """Nothing is exchanged but sums of parameters' gradients, those of each sample, too."""
    x, weight = values(0, (2, 4, 6, 8)), values(1, 8)
    scale = values(2, (2, 8))
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, "data")))
    function = jax.jit(lambda x: nfj.channel_norm(x, weight, scale=scale, activation="silu"))
    compiled = function.lower(placed).compile()
    assert not collectives(compiled) and compiled(placed).sharding.spec == PartitionSpec(None, None, "data")
    same(compiled(placed), function(x))

    def loss(x, weight, scale):
        return jnp.sum(jnp.sin(nfj.channel_norm(x, weight, scale=scale, activation="silu")))
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    compiled = gradient.lower(placed, weight, scale).compile()
    assert collectives(compiled) == {"all-reduce"}
    for got, want in zip(compiled(placed, weight, scale), gradient(x, weight, scale)):
        numpy.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, error, words", [
    (lambda x: nfj.group_norm(x, 3), ValueError, "num_groups is 3 and does not divide the 8 channels"),
    (lambda x: nfj.group_norm(x, 2, jnp.ones(7)), ValueError, "weight has 7 elements along C, x has 8"),
    (lambda x: nfj.group_norm(x, 2, pre_add=x[:1]), ValueError, "pre_add"),
    (lambda x: nfj.group_norm(x, 2, scale=jnp.ones(8)), ValueError, "scale"),
    (lambda x: nfj.group_norm(x, 2, activation="tanh"), ValueError, "activation is 'tanh'"),
    (lambda x: nfj.group_norm(x, 2, layout="hwcn"), ValueError, "layout is 'hwcn'"),
    (lambda x: nfj.group_norm(x, 2, return_sum=True), ValueError, "return_sum needs pre_add or pre_bias"),
    (lambda x: nfj.group_norm(x, 2, pre_bias=jnp.ones(7)), ValueError, "pre_bias"),
    (lambda x: nfj.batch_norm(x), ValueError, "running_mean"),
    (lambda x: nfj.batch_norm(x[:1, :1, :1], training=True), ValueError, "more than 1 value per channel"),
    (lambda x: nfj.instance_norm(x[:, :1, :1], running_mean=jnp.ones(8), running_var=jnp.ones(8)), ValueError,
     "more than 1 value per channel"),
    (lambda x: nfj.batch_norm(x, jnp.ones(8), training=True), ValueError, "running"),
    (lambda x: nfj.group_norm(x[0, 0, 0], 2), ValueError, "x"),
    (lambda x: nfj.group_norm(x.astype(jnp.int32), 2), TypeError, "dtype"),
    (lambda x: nfj.group_norm(x, 2.5), TypeError, "integer"),
    (lambda x: nfj.channel_norm(x, groups=3), ValueError,
     "channel_norm forward: groups is 3 and does not divide the 8 channels"),
    (lambda x: nfj.channel_norm(x, statistics="mean"), ValueError,
     "statistics is 'mean', expected one of mean_and_variance"),
    (lambda x: nfj.channel_norm(x, eps_kind="of norm"), ValueError, "eps_kind is 'of norm', expected one of added"),
    (lambda x: nfj.channel_norm(x, eps=-1, eps_kind="of_norm"), ValueError, "eps"),
    (lambda x: nfj.channel_norm(x, dtype="int32"), TypeError, "y"),
    (lambda x: nfj.channel_norm(x.astype("float16"), dtype="bfloat16"), TypeError, "y must have"),
    (lambda x: nfj.channel_norm(x[0, 0, 0]), ValueError, "x"),
])
def test_errors_while_tracing(call, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        jax.jit(call).trace(values(0, (2, 4, 4, 8)))


# ---- Flax -----------------------------------------------------------------------------------------------------------


def compare_layers(stock, ours, x, atol):
    """Outputs, new statistics and gradients of two functions (parameters, x) -> (y, statistics)."""
    (parameters, theirs), (_, mine) = stock, ours
    (a, a_stats), (b, b_stats) = theirs(parameters, x), mine(parameters, x)
    assert a.dtype == b.dtype
    numpy.testing.assert_allclose(wide(b), wide(a), atol=atol, rtol=atol)
    jax.tree.map(lambda p, q: numpy.testing.assert_allclose(p, q, atol=atol, rtol=atol), b_stats, a_stats)

    def gradients(function):
        return jax.grad(lambda p, x: jnp.sum(jnp.sin(function(p, x)[0].astype("float32"))), (0, 1))(parameters, x)
    def close(p, q):
        bound = max(20 * atol, 2.0**-6 if p.dtype == jnp.bfloat16 else 0)
        numpy.testing.assert_allclose(wide(p), wide(q), atol=bound, rtol=bound)
    jax.tree.map(close, gradients(mine), gradients(theirs))


LAYERS = [("GroupNorm", dict(num_groups=4)), ("GroupNorm", dict(num_groups=None, group_size=2, use_bias=False)),
          ("InstanceNorm", dict()), ("InstanceNorm", dict(use_scale=False, epsilon=1e-3)),
          ("BatchNorm", dict(use_running_average=False)), ("BatchNorm", dict(use_running_average=True)),
          ("BatchNorm", dict(use_running_average=False, momentum=0.7, axis=1)),
          ("LayerNorm", dict()),
          ("LayerNorm", dict(use_bias=False, epsilon=1e-3, reduction_axes=(3,), feature_axes=[-1])),
          ("LayerNorm", dict(reduction_axes=1, feature_axes=-3, use_fast_variance=False)),
          ("RMSNorm", dict()), ("RMSNorm", dict(use_scale=False))]


@pytest.mark.sampled()
@pytest.mark.parametrize("dtype, result", [("float32", None), ("bfloat16", None), ("bfloat16", "bfloat16"),
                                           ("float32", "bfloat16")])
@pytest.mark.parametrize("name, options", LAYERS)
def test_linen(name, options, dtype, result):
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    from normfuse.jax import linen as nfl
    x = values(0, (3, 8, 5, 8), dtype, 2, 0.5)
    layers = [getattr(module, name)(**options, dtype=result) for module in (linen, nfl)]
    variables = [layer.init(jax.random.key(0), x) for layer in layers]
    assert jax.tree.map(lambda v: (v.shape, v.dtype), variables[0]) == \
        jax.tree.map(lambda v: (v.shape, v.dtype), variables[1])
    params = jax.tree.map(lambda v: v + values(1, v.shape, v.dtype, 0.2), variables[0].get("params", {}))
    stats = {k: v for k, v in variables[0].items() if k != "params"}

    def function(layer):
        return params, lambda params, x: layer.apply({"params": params, **stats}, x, mutable=["batch_stats"])
    # An ulp of bfloat16 at the largest values, where the result is stored in it.
    compare_layers(*map(function, layers), x, 2.0**-6 if result == "bfloat16" else 3e-5)


@pytest.mark.sampled()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, options", LAYERS)
def test_nnx(name, options, dtype):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    from normfuse.jax import nnx as nfx
    x = values(0, (3, 8, 5, 8), dtype, 2, 0.5)
    made = []
    for module in (nnx, nfx):
        graph, params, rest = nnx.split(getattr(module, name)(8, **options, rngs=nnx.Rngs(0)), nnx.Param, ...)

        def function(params, x, graph=graph, rest=rest):
            layer = nnx.merge(graph, params, rest, copy=True)
            y = layer(x)
            return y, nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))
        made.append((params, function))
    compare_layers(*made, x, 3e-5)


def test_layers_fuse():
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    from normfuse.jax import linen as nfl
    x, residual = values(0, (2, 4, 4, 8)), values(1, (2, 4, 4, 8))
    layer = nfl.GroupNorm(4, activation="relu")
    variables = layer.init(jax.random.key(0), x)
    want = jax.nn.relu(linen.GroupNorm(4).apply(variables, x) + residual)
    numpy.testing.assert_allclose(layer.apply(variables, x, post_add=residual), want, atol=1e-5)
    for name in ("LayerNorm", "RMSNorm"):
        variables = getattr(linen, name)().init(jax.random.key(0), x)
        want = jax.nn.silu(getattr(linen, name)().apply(variables, x) + residual)
        got = getattr(nfl, name)(activation="silu").apply(variables, x, post_add=residual)
        numpy.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.sampled()
@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype, result", [("float64", None), ("float64", "float32"), ("float16", "float64"),
                                           ("float16", "bfloat16"), ("float32", "float64")])
def test_layers_of_two_dtypes(name, library, dtype, result, x64):
    """Those of x and of the result, where there may be no kernel for both."""
    flax = pytest.importorskip(f"flax.{library}", reason="flax is not installed")
    from normfuse.jax import linen, nnx
    x = values(0, (3, 4, 5, 8), dtype, 2, 0.5)
    options = dict(dtype=result, param_dtype=result or dtype, use_fast_variance=False)
    made = []
    for module in (flax, linen if library == "linen" else nnx):
        if library == "linen":
            layer = getattr(module, name)(**options)
            made.append(layer.apply(layer.init(jax.random.key(0), x), x))
        else:
            made.append(getattr(module, name)(8, **options, rngs=flax.Rngs(0))(x))
    assert made[0].dtype == made[1].dtype
    unit = max(reference.UNIT[made[0].dtype.name], 1e-9)
    numpy.testing.assert_allclose(wide(made[1]), wide(made[0]), rtol=4 * unit, atol=4 * unit)


@pytest.mark.parametrize("name, options, words", [
    ("GroupNorm", dict(num_groups=4, reduction_axes=(2, 3)), "reduction_axes"),
    ("GroupNorm", dict(num_groups=4, axis_name="i"), "axis_name"),
    ("InstanceNorm", dict(feature_axes=(2, 3)), "feature_axes"),
    ("BatchNorm", dict(use_running_average=False, axis_index_groups=[[0]]), "axis_index_groups"),
    ("BatchNorm", dict(use_running_average=False, force_float32_reductions=False), "force_float32_reductions"),
    ("BatchNorm", dict(use_running_average=False, axis=2), "axis"),
    ("LayerNorm", dict(reduction_axes=(1, 2, 3)), "reduction_axes"),
    ("LayerNorm", dict(reduction_axes=2, feature_axes=2), "reduction_axes"),
    ("LayerNorm", dict(feature_axes=1), "feature_axes"),
    ("RMSNorm", dict(reduction_axes=(-2, -1)), "reduction_axes"),
    ("RMSNorm", dict(feature_axes=(-2, -1)), "feature_axes"),
    ("RMSNorm", dict(axis_name="i"), "axis_name"),
    ("LayerNorm", dict(force_float32_reductions=False), "force_float32_reductions"),
])
def test_options_without_a_kernel(name, options, words):
    pytest.importorskip("flax.linen", reason="flax is not installed")
    from normfuse.jax import linen as nfl
    with pytest.raises(NotImplementedError, match=words):
        getattr(nfl, name)(**options).init(jax.random.key(0), values(0, (2, 4, 4, 8)))


@pytest.mark.skipif(ON_CUDA, reason="is about the CPU")
def test_large_results_have_huge_pages():
    y = jax.block_until_ready(nfj.group_norm(values(0, (2, 64, 64, 1280)), 32))  # more than glibc ever keeps
    assert wants_huge_pages(y.unsafe_buffer_pointer() + y.nbytes // 2)


def test_mask_is_refused():
    pytest.importorskip("flax.linen", reason="flax is not installed")
    from normfuse.jax import linen as nfl
    x = values(0, (2, 4, 4, 8))
    with pytest.raises(NotImplementedError, match="mask"):
        nfl.InstanceNorm().init(jax.random.key(0), x, mask=x > 0)

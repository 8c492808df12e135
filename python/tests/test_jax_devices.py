# SPDX-License-Identifier: MIT
"""normfuse.jax where several devices share a call: under pmap, shard_map, vmap with an axis's name, and jit of a
sharded batch. What is right is what formulas in jax.numpy and Flax's own layers give on the same devices, in float64.

test_random draws options, ways and shapes; NORMFUSE_RANDOM_JAX is how many cases (6), NORMFUSE_RANDOM_SEED the
first."""
import os
import subprocess
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

DEVICES = 4
PER_SAMPLE = ("group", "instance", "channel")  # operators that take scale and shift
several_devices = pytest.mark.skipif(len(jax.devices()) < DEVICES, reason="needs four devices")


@pytest.fixture(autouse=True)
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def values(seed, shape, dtype="float64", scale=1.0, shift=0.0):
    return jnp.asarray(numpy.random.default_rng(seed).standard_normal(shape) * scale + shift, dtype)


def compare(got, want, tolerance=1e-9):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = numpy.asarray(a, "float64"), numpy.asarray(b, "float64")
        numpy.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, abs(b).max(initial=0)))


# ---- formulas -------------------------------------------------------------------------------------------------------

ACTIVATIONS = {None: lambda z: z, "silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu, "mish": jax.nn.mish}


def plain(operator, x, weight=None, bias=None, *, groups=2, running_mean=None, running_var=None, momentum=0.1, eps=1e-5,
          activation=None, pre_bias=None, pre_add=None, post_add=None, scale=None, shift=None, axis_name=None,
          layout="nhwc", statistics="mean_and_variance", eps_kind="added"):
    """(y, new running statistics) of an operator, whose statistics are shared along axis_name."""
    channel = x.ndim - 1 if layout == "nhwc" else 1

    def spread(value):
        shape = [1] * x.ndim
        shape[channel] = x.shape[channel]
        if value.ndim == 2:
            shape[0] = x.shape[0]
        return value.reshape(shape)

    def shared(mean):
        return mean if axis_name is None else jax.lax.pmean(mean, axis_name)
    u = x + (0 if pre_bias is None else spread(pre_bias)) + (0 if pre_add is None else pre_add)
    running, z = (), u
    if operator == "evaluate":
        z = (u - spread(running_mean)) / jnp.sqrt(spread(running_var) + eps)
    elif operator == "channel":
        grouped = jnp.moveaxis(u, channel, -1)
        grouped = grouped.reshape(*grouped.shape[:-1], groups, -1)
        grouped = grouped - (grouped.mean(-1, keepdims=True) if statistics == "mean_and_variance" else 0)
        if eps_kind == "added":
            z = grouped / jnp.sqrt(jnp.square(grouped).mean(-1, keepdims=True) + eps)
        else:
            squares = jnp.square(grouped).sum(-1, keepdims=True)  # whose root has no derivative at 0
            is_small = squares < eps**2
            z = grouped * grouped.shape[-1]**0.5 / jnp.where(is_small, eps, jnp.sqrt(jnp.where(is_small, 1, squares)))
        z = jnp.moveaxis(z.reshape(*z.shape[:-2], -1), -1, channel)
    elif operator != "affine":
        each = 1 if operator == "instance" else x.shape[channel] // groups
        if operator == "batch":
            axes, grouped = tuple(a for a in range(x.ndim) if a != channel), u
        else:
            grouped = jnp.moveaxis(u, channel, 1).reshape(x.shape[0], -1, each, *numpy.delete(x.shape, [0, channel]))
            axes = tuple(range(2, grouped.ndim))
        mean = shared(grouped.mean(axes, keepdims=True))
        variance = shared(jnp.square(grouped - mean).mean(axes, keepdims=True))
        z = (grouped - mean) / jnp.sqrt(variance + eps)
        z = z if operator == "batch" else jnp.moveaxis(z.reshape(x.shape[0], x.shape[channel], *z.shape[3:]), 1,
                                                       channel)
        if running_mean is not None:
            count = grouped.size // mean.size * (1 if axis_name is None else jax.lax.psum(1, axis_name))
            new = (v.reshape(-1, x.shape[channel]).mean(0) for v in (mean, variance * count / (count - 1)))
            running = tuple((1 - momentum) * old + momentum * value for old,
                            value in zip((running_mean, running_var), new))
    z = z * (1 if weight is None else spread(weight)) + (0 if bias is None else spread(bias))
    z = z * (1 if scale is None else 1 + spread(scale)) + (0 if shift is None else spread(shift))
    return ACTIVATIONS[activation](z + (0 if post_add is None else post_add)), running


def ours(operator, x, weight=None, bias=None, *, groups=2, running_mean=None, running_var=None, axis_name=None,
         **words):
    """The same of normfuse.jax."""
    running = dict(running_mean=running_mean, running_var=running_var)
    if operator == "group":
        return nfj.group_norm(x, groups, weight, bias, **words), ()
    if operator == "channel":
        return nfj.channel_norm(x, weight, bias, groups=groups, **words), ()
    if operator == "affine":
        return nfj.channel_affine(x, weight, bias, **words), ()
    if operator == "instance":
        made = nfj.instance_norm(x, weight, bias, **running, **words)
    else:
        made = nfj.batch_norm(x, weight=weight, bias=bias, training=operator == "batch", axis_name=axis_name, **running,
                              **words)
    return (made[0], made[1:]) if isinstance(made, tuple) else (made, ())


# ---- ways to run a step on several devices ---------------------------------------------------------------------------


def mapped(function, names, sizes):
    """vmap with an axis of each name, over one axis of the arrays for all; results of the second kind are the same
    everywhere, and JAX knows it."""
    for name, size in reversed(list(zip(names, sizes))):
        function = jax.vmap(function, (None, 0), (0, None), axis_name=name, axis_size=size)
    size = numpy.prod(sizes)

    def run(shared, each):
        each = jax.tree.map(lambda a: a.reshape(*sizes, *a.shape[1:]), each)
        own, common = function(shared, each)
        return jax.tree.map(lambda a: a.reshape(size, *a.shape[len(sizes):]), own), common
    return run


def on_shards(function, names, sizes, check_vma):
    mesh = Mesh(numpy.array(jax.devices()[:DEVICES]).reshape(sizes), names)
    rows = PartitionSpec(names)

    def one(shared, each):
        own, common = function(shared, jax.tree.map(lambda a: a[0], each))
        return jax.tree.map(lambda a: a[None], own), common
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=(rows, PartitionSpec()),
                                 check_vma=check_vma))


WAYS = {
    "pmap": lambda f: jax.pmap(f, axis_name="i", in_axes=(None, 0), out_axes=(0, None)),
    "shard_map": lambda f: on_shards(f, ("i",), (4,), False),
    "shard_map, check_vma": lambda f: on_shards(f, ("i",), (4,), True),
    "vmap": lambda f: mapped(f, ("i",), (4,)),
    "two axes": lambda f: on_shards(f, ("i", "j"), (2, 2), False),
    "two axes, check_vma": lambda f: on_shards(f, ("i", "j"), (2, 2), True),
    "vmap, two axes": lambda f: mapped(f, ("i", "j"), (2, 2)),
}
each_way = pytest.mark.parametrize("way", [
    pytest.param(way, marks=() if way.startswith("vmap") else several_devices) for way in WAYS])


def axis_of(way):
    return ("i", "j") if "two axes" in way else "i"


def on_each(loss, way):
    """The loss's values on each device and the gradients there, which are the device's share of those of all losses.
    loss: (parameters, x) -> a number, and what is the same on all devices."""
    def here(parameters, x):
        (value, common), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, x)
        return (value, gradients), common
    return WAYS[way](here)


def of_all(loss, way):
    """Gradients of the sum of all devices' losses, and gradients of those."""
    def total(parameters, x):
        return jnp.sum(WAYS[way](lambda p, x: (loss(p, x)[0], ()))(parameters, x)[0])

    def first(parameters, x):
        made = jax.grad(total, (0, 1))(parameters, x)
        return sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(made)), made
    return jax.grad(first, (0, 1), has_aux=True)


SHAPE = (DEVICES, 3, 5, 4)  # of each device: [3, 5, 4]


def batches():
    """A batch for each device, of another scale and mean."""
    devices = jnp.arange(DEVICES)[:, None, None, None]
    return values(0, SHAPE) * (1.0 + devices) + devices


@pytest.mark.sampled()
@each_way
@pytest.mark.parametrize("make", [on_each, of_all])
def test_functions_with_axis_name(make, way):
    """Beside the formula with pmean on the same devices; the gradient of the sum of all losses is beside that of one
    device which has the whole batch."""
    parameters = {"weight": values(1, 4, shift=1), "bias": values(2, 4), "pre_bias": values(3, 4)}
    words = dict(running_mean=values(4, 4), running_var=abs(values(5, 4)), activation="silu")

    def loss(operator, axis):
        def value(parameters, x):
            y, running = operator("batch", x, **parameters, **words, axis_name=axis)
            return jnp.sum(jnp.sin(y) * jnp.cos(x)), running
        return value
    got, want = (jax.jit(make(loss(operator, axis_of(way)), way))(parameters, batches()) for operator in (ours, plain))
    compare(got, want)
    if make is of_all:
        whole = jax.grad(lambda *a: loss(plain, None)(*a)[0], (0, 1))(parameters, batches().reshape(-1, 5, 4))
        compare(jax.tree.map(lambda g, w: g.reshape(w.shape), got[1], whole), whole)


@pytest.mark.sampled()
@each_way
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_layers_with_axis_name(library, way):
    """Beside Flax's own layer on the same devices."""
    flax = pytest.importorskip(f"flax.{library}", reason="flax is not installed")
    from normfuse.jax import linen, nnx
    parameters = {"scale": values(1, 4, shift=1), "bias": values(2, 4)}
    statistics = {"mean": values(3, 4), "var": abs(values(4, 4))}
    options = dict(use_running_average=False, axis_name=axis_of(way), use_fast_variance=False, param_dtype="float64")

    def loss(module):
        def of_linen(parameters, x):
            y, new = module.BatchNorm(**options).apply({"params": parameters, "batch_stats": statistics}, x,
                                                       mutable=["batch_stats"])
            return jnp.sum(jnp.sin(y) * jnp.cos(x)), new["batch_stats"]

        def of_nnx(parameters, x):
            layer = module.BatchNorm(4, **options, rngs=flax.Rngs(0))
            for name, value in {**parameters, **statistics}.items():
                setattr(layer, name, type(getattr(layer, name))(value))
            y = layer(x)
            return jnp.sum(jnp.sin(y) * jnp.cos(x)), {"mean": layer.mean[...], "var": layer.var[...]}
        return of_linen if library == "linen" else of_nnx
    module = linen if library == "linen" else nnx
    got, want = (on_each(loss(module), way)(parameters, batches()) for module in (module, flax))
    compare(got, want, 1e-7)  # Flax's epsilon is of float32


# ---- jit of a sharded batch -----------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    return Mesh(numpy.array(jax.devices()[:DEVICES]), ("data",))


CUTS = {"[:6]": lambda x: x[:6], "[1:]": lambda x: x[1:], "[::3]": lambda x: x[::3], "[:2]": lambda x: x[:2],
        "pad": lambda x: jnp.pad(x, ((0, 3), *((0, 0),) * (x.ndim - 1))),
        "concatenate": lambda x: jnp.concatenate([x, x[:1]])}


@pytest.mark.sampled(times=2)
@several_devices
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("operator", ["group", "instance", "batch", "evaluate", "affine", "channel"])
def test_samples_that_the_devices_do_not_divide(mesh, operator, cut):
    """Values and gradients beside formulas of one device: XLA pads the samples, and no sum may have the padding."""
    rows = {"x": values(0, (8, 3, 2, 4), shift=1), "post_add": values(1, (8, 3, 2, 4))}
    parameters = {"weight": values(2, 4), "bias": values(3, 4), "pre_bias": values(4, 4)}
    if operator in PER_SAMPLE:
        rows["scale"] = values(5, (8, 4))
    running = {} if operator in ("group", "affine", "channel") else {"running_mean": values(6, 4),
                                                                     "running_var": abs(values(7, 4))}

    def function(make):
        def loss(rows, parameters):
            given = jax.tree.map(lambda a: CUTS[cut](a) * 1.5, rows)
            made = make(operator, given.pop("x"), activation="silu", **given, **parameters, **running)
            return jnp.sum(jnp.sin(made[0])), made
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    placed = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
    compare(function(ours)(placed, parameters), function(plain)(rows, parameters))


@pytest.mark.sampled(times=2)
@several_devices
@pytest.mark.parametrize("spec",
                         [(None, "data", None), ("data", "model"), (None, ("data", "model")), ("model", None, "data")],
                         ids=str)
@pytest.mark.parametrize("sizes", [(8, 6, 4, 4), (8, 5, 4, 4), (6, 8, 3, 4)], ids=str)
def test_sharded_positions_of_a_channel_norm(sizes, spec):
    """Values and gradients beside the formula of one device, of positions that the devices divide and that they do
    not."""
    mesh = Mesh(numpy.array(jax.devices()[:DEVICES]).reshape(2, 2), ("data", "model"))
    x = values(0, sizes, shift=1)
    given = {"weight": values(1, 4), "bias": values(2, 4), "pre_bias": values(3, 4), "scale": values(4, (sizes[0], 4)),
             "shift": values(5, (sizes[0], 4))}

    def function(make):
        def loss(x, given):
            made = make("channel", x, activation="silu", groups=1, **given)[0]
            return jnp.sum(jnp.sin(made)), made
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    fits = all(size % (4 if isinstance(axes, tuple) else 2) == 0 for size, axes in zip(sizes, spec) if axes is not None)
    if not fits:  # sharded inside, where XLA pads it
        whole, cut = values(0, (8, 8, 8, 4), shift=1), tuple(map(slice, sizes))
        placed = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))

        def of_cut(make):
            step = function(make)
            return jax.jit(lambda whole, given: step(whole[cut] * 1.5, given))
        compare(of_cut(ours)(placed, given), of_cut(plain)(whole, given))
        return
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    compare(function(ours)(placed, given), function(plain)(x, given))


@pytest.mark.skipif(ON_CUDA, reason="is about XLA's partitioner, on the CPU here")
def test_the_partitioner_before_shardy():
    """It is refused nothing, and does not end the process; x is gathered. Beside Shardy's result, in a process of its
    own, since it would end."""
    program = """if True:
        import jax, jax.numpy as jnp, numpy
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        import normfuse.jax as nfj
        def function(x, weight):
            return nfj.batch_norm(nfj.group_norm(x[:, :3], 2, weight), training=True)[::-1].reshape(4, 6, 3, 4)
        rows = NamedSharding(Mesh(numpy.array(jax.devices()), ("data",)), PartitionSpec("data"))
        x, weight = jnp.asarray(numpy.random.default_rng(0).standard_normal((8, 4, 3, 4)), "float32"), jnp.arange(4.0)
        made = []
        for shardy, given in ((True, x), (False, jax.device_put(x, rows))):
            jax.config.update("jax_use_shardy_partitioner", shardy)
            step = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(function(*a))), (0, 1)))
            made.append(jax.tree.leaves(step(given, weight)))
        for got, want in zip(*made):
            numpy.testing.assert_allclose(got, want, atol=1e-5)
        print("done")"""
    flags = "--xla_force_host_platform_device_count=4"
    path = os.pathsep.join([str(os.path.dirname(os.path.dirname(nfj.__path__[0]))), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path})
    assert done.stdout == "done\n", done.stderr[-2000:]


# ---- Flax's layers, where a channel has one value or none ------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 4), (1, 1, 1, 4), (0, 3, 4), (0, 4)])
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_batch_norm_of_one_value_and_of_none(library, shape):
    """init, results, new statistics and gradients in training, beside Flax's own layer; of no values the gradients are
    0, sums of nothing, where Flax multiplies them by NaN."""
    flax = pytest.importorskip(f"flax.{library}", reason="flax is not installed")
    from normfuse.jax import linen, nnx
    x, parameters = values(0, shape, "float32"), {"scale": values(1, 4, "float32"), "bias": values(2, 4, "float32")}

    def step(module):
        if library == "linen":
            layer = module.BatchNorm(use_running_average=False)
            statistics = layer.init(jax.random.key(0), x)["batch_stats"]

            def loss(parameters, x):
                y, new = layer.apply({"params": parameters, "batch_stats": statistics}, x, mutable=["batch_stats"])
                return jnp.sum(jnp.sin(y)), (y, new["batch_stats"])
        else:
            def loss(parameters, x):
                layer = module.BatchNorm(4, use_running_average=False, rngs=flax.Rngs(0))
                for name, value in parameters.items():
                    setattr(layer, name, type(getattr(layer, name))(value))
                y = layer(x)
                return jnp.sum(jnp.sin(y)), (y, layer.mean[...], layer.var[...])
        return jax.grad(loss, (0, 1), has_aux=True)(parameters, x)
    (got, made), (want, stock) = map(step, (linen if library == "linen" else nnx, flax))
    compare(made, stock, 1e-6)
    compare(got, want if x.size else jax.tree.map(jnp.zeros_like, want), 1e-6)


def test_one_set_of_statistics_for_a_lifted_vmap():
    """flax.linen.vmap with batch_stats: None, beside Flax's own layer."""
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    from normfuse.jax import linen as nfl
    x = values(0, (6, 5, 4), "float32") * jnp.arange(1.0, 7, dtype="float32")[:, None, None]

    def step(module):
        layer = linen.vmap(module.BatchNorm, variable_axes={"params": None, "batch_stats": None},
                           split_rngs={"params": False}, axis_name="b")(use_running_average=False, axis_name="b")
        return layer.apply(layer.init(jax.random.key(0), x), x, mutable=["batch_stats"])
    compare(step(nfl), step(linen), 2e-6)


def test_one_value_over_all_devices_is_refused():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        jax.vmap(lambda x: nfj.batch_norm(x, training=True, axis_name="i"), axis_name="i")(jnp.ones((1, 1, 4)))


# ---- jax.export -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_CUDA, reason="is about the CPU")
@pytest.mark.parametrize("operator", ["group", "instance", "batch", "evaluate", "affine", "channel"])
def test_export_with_symbolic_shapes(operator):
    """Values and gradients of an exported program, at a shape that it did not know, beside the formula."""
    from jax import export
    running = {"running_mean": values(1, 4), "running_var": abs(values(2, 4))} \
        if operator in ("instance", "batch", "evaluate") else {}

    def function(make):
        def loss(x, weight):
            made = make(operator, x, weight, activation="silu", **running)
            return jnp.sum(jnp.sin(made[0])), made
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    shapes = [jax.ShapeDtypeStruct(shape, "float64") for shape in (export.symbolic_shape("n, h, 4"), (4,))]
    exported = export.export(function(ours),
                             disabled_checks=[export.DisabledSafetyCheck.custom_call("normfuse")])(*shapes)
    given = values(3, (5, 3, 4)), values(4, 4)
    compare(exported.call(*given), function(plain)(*given))


@pytest.mark.parametrize("shape, function, words", [
    ("3, 2, c", lambda x: nfj.instance_norm(x), "number of channels"),
    ("n, 3, 4", jax.vmap(lambda x: nfj.batch_norm(x, training=True, axis_name="i"), axis_name="i"), "axis_name"),
    ("4, n, 4", jax.vmap(lambda x: nfj.batch_norm(x, training=True, axis_name="i"), axis_name="i"), "axis_name"),
])
def test_export_refuses(shape, function, words):
    from jax import export
    with pytest.raises(NotImplementedError, match=words):
        export.export(jax.jit(function))(jax.ShapeDtypeStruct(export.symbolic_shape(shape), "float32"))


# ---- random cases ---------------------------------------------------------------------------------------------------


def random_case(seed):
    """An operator with random options in a random way: (name, function of an implementation, arguments)."""
    random = numpy.random.default_rng(seed)
    few = len(jax.devices()) < DEVICES

    def pick(*choices):
        return choices[random.integers(len(choices))]
    operator = pick("group", "instance", "batch", "batch", "evaluate", "affine", "channel", "channel")
    way = pick("jit", "vmap", "vmap, two axes") if few else pick("jit", "sharded", "sharded", *WAYS)
    samples, channels, layout = pick(1, 2, 3, 4, 4, 5, 8, 8), pick(2, 4, 6), pick("nhwc", "nchw")
    spatial = tuple(random.integers(1, 5, random.integers(0, 4)).tolist())
    axis = pick(None, axis_of(way)) if operator == "batch" and way in WAYS else None
    if isinstance(axis, tuple):
        axis = pick(axis, axis[::-1], axis[0], axis[1])
    if operator in ("batch", "instance") and not spatial:
        spatial = (3,)  # more than one value a channel
    if operator == "batch" and samples * numpy.prod(spatial) == 1:
        samples = 2
    if operator == "instance" and numpy.prod(spatial) == 1:
        spatial = (2, *spatial[1:])
    shape = (samples, *spatial, channels) if layout == "nhwc" else (samples, channels, *spatial)
    copies = (DEVICES,) if way in WAYS else ()
    seeds = iter(random.integers(1 << 30, size=20).tolist())
    each = {"x": values(next(seeds), copies + shape, scale=2, shift=random.integers(4))}
    shared = {name: values(next(seeds), channels, shift=1) for name in ("weight", "bias") if random.random() < 0.7}
    if operator == "affine" and len(shared) == 1:
        shared = {}
    for name in ("pre_add", "post_add"):
        if random.random() < 0.3:
            each[name] = values(next(seeds), copies + shape)
    for name in ("pre_bias", "scale", "shift"):
        if random.random() < 0.3 and (name == "pre_bias" or operator in PER_SAMPLE):
            if name == "pre_bias" and random.random() < 0.5:
                shared[name] = values(next(seeds), channels)
            else:
                each[name] = values(next(seeds), (*copies, samples, channels))
    if way == "pmap" and not shared:
        # JAX 0.10's pmap takes the second argument for an array of all devices where the first has none
        way = "shard_map"
    words = {"activation": pick(*ACTIVATIONS), "layout": layout}
    if operator != "affine":
        words["eps"] = pick(1e-5, 1e-2)
    if operator == "evaluate" or (operator in ("batch", "instance") and random.random() < 0.5):
        running = {"running_mean": values(next(seeds), channels),
                   "running_var": abs(values(next(seeds), channels)) + 0.1}
    else:
        running = {}
    if operator in ("group", "channel"):
        words["groups"] = pick(*(g for g in (1, 2, 3, 6) if channels % g == 0 and (g == 1 or operator in PER_SAMPLE)))
    if operator == "channel":
        words["statistics"] = pick("mean_and_variance", "mean_square")
        words["eps_kind"] = pick("added", "of_norm")
    if operator in ("batch", "instance"):
        words["momentum"] = pick(0.1, 1.0)
    if axis is not None:
        words["axis_name"] = axis
    is_outer = way in WAYS and random.random() < 0.5
    cut = int(random.integers(1, samples + 1)) if way == "sharded" and random.random() < 0.4 else samples
    if operator == "batch" and cut * numpy.prod(spatial) == 1:
        cut = samples

    def function(make):
        def loss(shared, each):
            given = {name: value[:cut] for name, value in each.items()} if way == "sharded" else dict(each)
            y, new = make(operator, given.pop("x"), **shared, **given, **running)
            return jnp.sum(jnp.sin(y)) + jnp.sum(y), (y, new)

        def step(shared, each):
            (value, (y, new)), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(shared, each)
            return (value, y, new, gradients), ()
        if way not in WAYS:
            return jax.jit(step)
        if not is_outer:
            return WAYS[way](step)
        total = WAYS[way](lambda *given: (loss(*given)[0], ()))
        return jax.grad(lambda *given: jnp.sum(total(*given)[0]), (0, 1))
    placed = each
    if way == "sharded":
        mesh = Mesh(numpy.array(jax.devices()[:DEVICES]).reshape(2, 2), ("i", "j"))

        def place(value):
            """Mostly along the samples, over one axis or both."""
            dims, axes = [None] * value.ndim, pick(("i", "j"), ("i", "j"), ("i",), ("j",), ("j", "i"))
            at = 0 if random.random() < 0.8 else int(random.integers(value.ndim))
            if value.shape[at] % numpy.prod([mesh.shape[axis] for axis in axes]) == 0:
                dims[at] = axes
            return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*dims)))
        placed = {name: place(value) for name, value in each.items()}
    outer = ", gradient of all" if is_outer else ""
    name = f"{operator} {shape} {way}{outer} {words} {sorted(shared)} {sorted(each)} {sorted(running)} cut {cut}"
    return name, function, (shared, placed), (shared, each)


@pytest.mark.parametrize("seed", range(int(os.environ.get("NORMFUSE_RANDOM_SEED", "0")),
                                       int(os.environ.get("NORMFUSE_RANDOM_SEED", "0")) +
                                       int(os.environ.get("NORMFUSE_RANDOM_JAX", "6"))))
def test_random(seed):
    name, function, ours_given, plain_given = random_case(seed)
    print(name)
    compare(function(ours)(*ours_given), function(plain)(*plain_given), 1e-8)

# SPDX-License-Identifier: MIT
"""normfuse.jax in programs that XLA makes CUDA graphs of (its command buffers): several calls in a graph, a graph with
new buffers, a loop, gradients, beside the same program on the CPU. A handler between XLA and the library's says of each
call whether its stream was captured."""
import collections
import ctypes
import os
import sys

import numpy
import pytest
from device import ON_CUDA

if not ON_CUDA:
    pytest.skip("needs a GPU: NORMFUSE_TEST_DEVICE is not cuda", allow_module_level=True)
if "jax" in sys.modules:
    pytest.skip("jax was imported before this file set XLA_FLAGS", allow_module_level=True)
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1 "
                           "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL,WHILE,CONDITIONAL").strip()
os.environ["JAX_PLATFORMS"] = "cuda,cpu"
jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from normfuse._library import library  # noqa: E402

# ---- which calls are captured ---------------------------------------------------------------------------------------

HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
METADATA, API, CONTEXT, STREAM_GET = 1, 2, 3, 10  # an extension's type; words of XLA's call frame, and of its functions


class StreamArguments(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("context", ctypes.c_void_p),
                ("stream", ctypes.c_void_p)]


calls = collections.Counter()
handler = HANDLER(ctypes.cast(library.normfuse_xla_cuda, ctypes.c_void_p).value)


def words_of(address):
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_size_t))


def is_captured(frame):
    words = words_of(frame)
    get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(StreamArguments))(words_of(words[API])[STREAM_GET])
    arguments = StreamArguments(ctypes.sizeof(StreamArguments), None, words[CONTEXT], None)
    failure, status = get(ctypes.byref(arguments)), ctypes.c_int()
    assert not failure
    assert ctypes.CDLL("libcuda.so.1").cuStreamIsCapturing(ctypes.c_void_p(arguments.stream), ctypes.byref(status)) == 0
    return status.value == 1


@HANDLER
def counting(frame):
    extension = words_of(frame)[1]
    if not extension or words_of(extension)[1] & 0xffffffff != METADATA:
        try:
            calls["captured" if is_captured(frame) else "enqueued"] += 1
        except Exception as error:  # ctypes would print it and go on
            calls[f"failed: {error!r}"] += 1
    return handler(frame)


library.normfuse_xla_cuda = counting
import normfuse.jax as nfj  # noqa: E402

CPU, GPU = jax.devices("cpu")[0], jax.devices("cuda")[0]


@pytest.fixture(autouse=True)
def count():
    """What a test needs of `calls` is counted from its start."""
    calls.clear()
    yield
    assert set(calls) <= {"captured", "enqueued"}, calls


def values(seed, shape, scale=1.0, shift=0.0):
    return (numpy.random.default_rng(seed).standard_normal(shape) * scale + shift).astype("float32")


def on(device, function, *arrays):
    """The program's results there; its arrays are new ones."""
    return jax.tree.map(numpy.asarray, jax.jit(function)(*(jax.device_put(a, device) for a in arrays)))


def compare(got, want, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        numpy.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(abs(b).max()))


# ---- programs -------------------------------------------------------------------------------------------------------


def four_calls(x, weight, bias):
    """Each reads what the one before it wrote, between operations of XLA's own."""
    u = nfj.group_norm(x, 4, weight, bias, activation="silu") * 1.5
    y, mean, var = nfj.batch_norm(u, jnp.zeros(x.shape[-1]), jnp.ones(x.shape[-1]), weight, training=True, post_add=x)
    y = nfj.instance_norm(y + 1, activation="gelu")
    return nfj.channel_affine(y, weight, bias), mean, var


# Norm groups of one thread block; of some; of 4 MiB, which the whole grid shares with a barrier in sync memory.
SHAPES = [(3, 5, 6, 8), (4, 32, 32, 64), (2, 128, 128, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_four_calls(shape):
    function, kept = jax.jit(four_calls), []
    for seed in range(6):  # kept arrays: XLA's buffers are elsewhere each time, and the graph is updated
        given = [values(seed, shape, 2, 0.5), values(seed + 10, shape[-1], 0.3, 1), values(seed + 20, shape[-1])]
        kept.append((given, function(*(jax.device_put(a, GPU) for a in given))))
    for given, got in kept:
        compare(got, on(CPU, four_calls, *given), 1e-5)
    assert calls["captured"] >= 4, calls


@pytest.mark.parametrize("shape", SHAPES)
def test_replays_have_the_same_bits(shape):
    function = jax.jit(four_calls)
    given = [jax.device_put(a, GPU) for a in (values(0, shape, 2), values(1, shape[-1]), values(2, shape[-1]))]
    first = function(*given)
    for _ in range(20):
        again = function(*given)
        jax.tree.map(numpy.testing.assert_array_equal, again, first)
    assert calls["captured"] >= 4, calls


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape):
    def loss(x, weight, bias):
        return jnp.sum(jnp.sin(four_calls(x, weight, bias)[0]))
    gradient = jax.grad(loss, (0, 1, 2))
    function, kept = jax.jit(gradient), []
    for seed in range(4):
        given = [values(seed, shape, 2, 0.5), values(seed + 10, shape[-1], 0.3, 1), values(seed + 20, shape[-1])]
        kept.append((given, function(*(jax.device_put(a, GPU) for a in given))))
    for given, got in kept:
        compare(got, on(CPU, gradient, *given), 2e-5)
    assert calls["captured"] >= 8, calls


def test_loop():
    def loop(x, weights):
        return jax.lax.scan(lambda x, w: (nfj.group_norm(x, 4, w, activation="silu") + x, x.mean()), x, weights)
    given = values(0, (4, 16, 16, 32)), values(1, (5, 32), 0.3, 1)
    compare(on(GPU, loop, *given), on(CPU, loop, *given), 1e-5)
    assert calls["captured"] + calls["enqueued"] >= 1, calls


def test_programs_in_turn():
    """Two programs on one stream keep apart what their graphs share between thread blocks."""
    shape = SHAPES[2]
    x, weight, bias = (jax.device_put(a, GPU) for a in (values(0, shape), values(1, shape[-1]), values(2, shape[-1])))
    functions = [jax.jit(lambda x, w, b, groups=groups: nfj.group_norm(nfj.group_norm(x, groups, w, b) + x, 2, b))
                 for groups in (1, 4)]
    first = [function(x, weight, bias) for function in functions]
    results = [function(x, weight, bias) for _ in range(10) for function in functions]
    for i, result in enumerate(results):
        numpy.testing.assert_array_equal(result, first[i % 2])
    assert calls["captured"] >= 4, calls


def test_no_samples():
    x = jnp.zeros((0, 4, 4, 8))
    got = on(GPU, jax.grad(lambda w, x: nfj.group_norm(x, 2, w).sum()), numpy.ones(8, "float32"), x)
    numpy.testing.assert_array_equal(got, numpy.zeros(8))

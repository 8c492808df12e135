# SPDX-License-Identifier: MIT
"""Times normfuse beside what one would run instead: PyTorch (eager and compiled), JAX, ONNX Runtime and oneDNN on the CPU,
and with device=cuda PyTorch, apex and gnNHWC on a GPU.

    python3 bench/peers.py                                the problems of bench/bars.txt and bench/more.txt
    python3 bench/peers.py @bench/heldout.txt             a file of problems
    python3 bench/peers.py 'group_norm 8x64x56x56 groups=8 act=silu dir=bwd' --peers torch

The first run installs the peers (bench/requirements.txt) into build/peers; one that cannot be installed is named and
left out. --installed takes what the Python that runs this has, of any version; `make bench-peers` does so. Each library
runs in a process of its own, because idle threads of one spin while another works. Problem by problem, runs of `normfuse bench` and of the peers take turns, and a peer's floor is the mean of the copy floors that
normfuse measured right before and after it. Every call takes the next of several sets of tensors, together more than
four times the last-level cache, so that all read and write cold memory. glibc is told to keep freed memory: otherwise
each large output of a framework is a new mapping, and its page faults would be timed as the framework's.

What a backward is: dx, dweight and dbias, with +pre_bias also its gradient. normfuse and PyTorch's own operators take
the saved statistics; with an activation or +pre_bias PyTorch runs its autograd graph; JAX recomputes the statistics. ONNX
Runtime has no backward.

On a GPU a time is that of a CUDA graph that holds a call for each set of tensors, by the number of sets. A call that
cannot be captured (autograd) is timed eagerly, and its note says so. That part has not run on a GPU yet.

Rows go to bench/results/peers-<date>.jsonl: those of `normfuse bench --json` with `impl` added, the peers' likewise."""
import argparse
import datetime
import gc
import importlib.metadata
import json
import math
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / "build/peers"
REQUIREMENTS = ROOT / "bench/requirements.txt"
# worker: (implementations it measures, packages it needs)
WORKERS = {
    "torch": (("torch", "torch_compile", "apex", "gnnhwc"), ("numpy", "torch")),
    "jax": (("jax",), ("numpy", "jax", "jaxlib")),
    "onnxruntime": (("onnxruntime",), ("numpy", "onnx", "onnxruntime")),
    "onednn": (("onednn",), ("numpy",)),
}
PINNED = "torch,torch_compile,jax,onnxruntime"  # what bench/requirements.txt has
ALL = [implementation for implementations, _ in WORKERS.values() for implementation in implementations]
ACTIVATIONS = ("identity", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "elu", "mish", "relu6")
# Large requests stay in the heap, and the heap is never given back.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26),
               "MALLOC_ARENA_MAX": "1"}


class Unsupported(Exception):
    """This peer has no operator for the problem."""


# ---- problems -------------------------------------------------------------------------------------------------------

def parse(line, additions=False):
    """additions: also what no peer has, the words +pre_add, +u, +post_add, +scale, weight_dtype=, prelu with +one_slope, and
    channel_norm with stat=, eps_kind= and y_dtype="""
    words = line.split()
    keys = {"dtype": "f32", "layout": "nchw", "act": "identity", "dir": "fwd", "eps": "1e-5", "mode": "train",
            "per": "channel", "act_param": "", "groups": "", 
            **({"weight_dtype": "", "stat": "layer", "eps_kind": "added", "y_dtype": ""} if additions else
               {"device": "cpu"})}
    names = ("pre_add", "u", "post_add", "scale", "one_slope") if additions else ()
    more = {name: f"+{name}" in words[2:] for name in names}
    pre_bias = {"+pre_bias": "channel", "+pre_bias=sample": "sample"}
    for word in words[2:]:
        if word in pre_bias or word.startswith("+") and word[1:] in more:
            continue
        key, equals, value = word.partition("=")
        if not equals or key not in keys:
            raise SystemExit(f"peers.py: {line!r}: {word!r} is not a key that peers understand")
        keys[key] = value
    shape = [int(size) for size in words[1].split("x")]
    op = words[0]
    groups = int(keys["groups"] or 1) if op == "channel_norm" else \
        int(keys["groups"]) if op == "group_norm" else shape[1]
    activations = (*ACTIVATIONS, "prelu") if additions else ACTIVATIONS
    operators = ("group_norm", "instance_norm", "batch_norm", "affine", *(["channel_norm"] if additions else []))
    if op not in operators or keys["act"] not in activations:
        raise SystemExit(f"peers.py: {line!r}: unknown operator or activation")
    parameter = float(keys["act_param"] or {"leaky_relu": 0.01, "elu": 1.0}.get(keys["act"], 0.0))
    return {"line": " ".join(words), "op": op, "shape": shape, "groups": groups, "dtype": keys["dtype"],
            "layout": keys["layout"], "act": keys["act"], "act_param": parameter, "backward": keys["dir"] == "bwd",
            "eps": float(keys["eps"]), "evaluate": keys["mode"] == "eval", "per_sample": keys["per"] == "sample",
            "device": keys.get("device", "cpu"),
            "weight_dtype": keys.get("weight_dtype") or keys["dtype"], "y_dtype": keys.get("y_dtype") or keys["dtype"],
            "statistics": {"layer": "mean_and_variance", "rms": "mean_square"}[keys.get("stat", "layer")],
            "eps_kind": {"added": "added", "norm": "of_norm"}[keys.get("eps_kind", "added")],
            "pre_bias": next((pre_bias[word] for word in words[2:] if word in pre_bias), None), **more}


def bias_shape(problem):
    """The shape of pre_bias, to be broadcast to [N, C, spatial...]; None: there is none."""
    shape = problem["shape"]
    samples = shape[0] if problem["pre_bias"] == "sample" else 1
    return problem["pre_bias"] and [samples, shape[1]] + [1] * (len(shape) - 2)


def read_problems(arguments, additions=False):
    lines = []
    for argument in arguments or ["@" + str(ROOT / "bench/bars.txt"), "@" + str(ROOT / "bench/more.txt")]:
        if argument.startswith("@"):
            text = pathlib.Path(argument[1:]).read_text()
            lines += [line for line in (row.split("#")[0].strip() for row in text.splitlines()) if line]
        else:
            lines.append(argument)
    return [parse(line, additions) for line in dict.fromkeys(lines)]


# ---- the workers: one library each ----------------------------------------------------------------------------------

def set_count(problem, llc_bytes, most=1024):
    """How many sets of tensors are more than four times the cache: at least two, and at most 1024, beyond which a call
    costs its overhead and not its memory."""
    values = 1
    for size in problem["shape"]:
        values *= size
    each = values * {"f64": 8, "f32": 4}.get(problem["dtype"], 2) * (3 if problem["backward"] else 2)
    return min(most, max(2, -(-4 * llc_bytes // max(each, 1)) + 1))


class Ring:
    """Keeps the outputs of the last calls, one a set, so that outputs rotate through memory as inputs do."""

    def __init__(self, sets):
        self.held = [None] * sets

    def call(self, i, function):
        self.held[i] = None
        self.held[i] = function(i)


def torch_worker(problem, sets, threads):
    """{implementation: (call(i), note)} of PyTorch."""
    import torch
    import torch.nn.functional as functional
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape, groups, eps = problem["shape"], problem["groups"], problem["eps"]
    samples, channels = shape[0], shape[1]
    positions = 1
    for size in shape[2:]:
        positions *= size
    dtype = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[problem["dtype"]]
    if problem["layout"] == "nhwc" and len(shape) not in (4, 5):
        raise Unsupported("channels-last needs two or three spatial axes")
    memory = torch.contiguous_format if problem["layout"] == "nchw" else \
        torch.channels_last if len(shape) == 4 else torch.channels_last_3d

    device = problem["device"]

    def big():
        return torch.randn(shape, device=device).to(dtype).contiguous(memory_format=memory)

    xs = [big() for _ in range(sets)]
    dys = [big() for _ in range(sets)] if problem["backward"] else []
    per = (samples, channels) + (1,) * (len(shape) - 2) if problem["per_sample"] else \
        (channels,) if problem["op"] != "affine" else (1, channels) + (1,) * (len(shape) - 2)
    weight, bias = torch.rand(per).to(device, dtype) + 0.5, torch.randn(per).to(device, dtype)
    pre_bias = [torch.randn(bias_shape(problem)).to(device, dtype)] if problem["pre_bias"] else []
    running_mean, running_var = torch.randn(channels).to(device, dtype), torch.rand(channels).to(device, dtype) + 0.5
    slope = problem["act_param"]
    activate = {
        "identity": lambda z: z, "relu": functional.relu, "silu": functional.silu, "gelu": functional.gelu,
        "leaky_relu": lambda z: functional.leaky_relu(z, slope), "hardswish": functional.hardswish,
        "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"), "elu": lambda z: functional.elu(z, slope),
        "mish": functional.mish, "relu6": functional.relu6}[problem["act"]]

    def forward(x, weight, bias, *pre_bias):
        for value in pre_bias:
            x = x + value
        if problem["op"] == "affine":
            z = torch.addcmul(bias, x, weight)
        elif problem["op"] == "batch_norm":
            z = functional.batch_norm(x, running_mean, running_var, weight, bias, not problem["evaluate"], 0.1, eps)
        else:
            z = functional.group_norm(x, groups, weight, bias, eps)
        return activate(z)

    def graph(function):
        """Backward through autograd, of a graph made once."""
        inputs = [(x.detach().requires_grad_(), *(t.detach().clone().requires_grad_()
                                                      for t in (weight, bias, *pre_bias))) for x in xs]
        outputs = [function(*each) for each in inputs]
        return lambda i: torch.autograd.grad(outputs[i], inputs[i], dys[i], retain_graph=True)

    def no_grad(function):
        def call(i):
            with torch.no_grad():
                return function(xs[i], weight, bias, *pre_bias)
        return call

    def eager():
        if not problem["backward"]:
            return no_grad(forward), ""
        aten = torch.ops.aten
        if problem["act"] != "identity" or problem["op"] == "affine" or pre_bias:
            return graph(forward), "autograd"
        if problem["op"] == "batch_norm":
            train = not problem["evaluate"]
            saved = [aten.native_batch_norm(x, weight, bias, running_mean.clone(), running_var.clone(), train, 0.1,
                                            eps)[1:] for x in xs]
            return lambda i: aten.native_batch_norm_backward(
                dys[i], xs[i], weight, running_mean, running_var, *saved[i], train, eps, [True] * 3), "aten"
        saved = [aten.native_group_norm(x, weight, bias, samples, channels, positions, groups, eps)[1:] for x in xs]
        return lambda i: aten.native_group_norm_backward(
            dys[i], xs[i], *saved[i], weight, samples, channels, positions, groups, [True] * 3), "aten"

    def compiled():
        import torch._functorch.config
        torch._functorch.config.donated_buffer = False  # the compiled graph is run backward many times
        torch._dynamo.reset()
        function = torch.compile(forward, fullgraph=True, dynamic=False)
        return (graph(function) if problem["backward"] else no_grad(function)), "inductor"

    def layer(make):
        """A layer that is channels-last group norm with an activation, on a GPU."""
        if device != "cuda" or problem["op"] != "group_norm" or problem["layout"] != "nhwc" or len(shape) != 4:
            raise Unsupported("group norm channels-last on a GPU only")
        module = make().to(device, dtype)
        run = graph if problem["backward"] else no_grad
        return (run(lambda x, weight, bias, *pre_bias: module(x + pre_bias[0] if pre_bias else x)),
                type(module).__module__)

    def apex():
        from apex.contrib.group_norm import GroupNorm
        if problem["act"] not in ("identity", "silu"):
            raise Unsupported("SiLU or no activation only")
        return layer(lambda: GroupNorm(groups, channels, eps, act="silu" if problem["act"] == "silu" else ""))

    def gnnhwc():
        from gnnhwc import GN_NHWC
        if problem["act"] not in ("identity", "relu", "silu", "gelu", "gelu_tanh"):
            raise Unsupported("not this activation")
        return layer(lambda: GN_NHWC(groups, channels, problem["act"], eps=eps))

    return {"torch": eager, "torch_compile": compiled, "apex": apex, "gnnhwc": gnnhwc}, torch.__version__


def on_cpu(problem):
    if problem["device"] != "cpu":
        raise Unsupported("measured on the CPU only")


def jax_worker(problem, sets, threads):
    on_cpu(problem)
    import numpy
    import jax
    import jax.numpy as jnp
    if problem["dtype"] == "f64":
        jax.config.update("jax_enable_x64", True)
    shape, groups, eps, slope = problem["shape"], problem["groups"], problem["eps"], problem["act_param"]
    last = problem["layout"] == "nhwc"
    axes = [shape[0], *shape[2:], shape[1]] if last else shape
    channel_axis = len(shape) - 1 if last else 1
    dtype = {"f64": jnp.float64, "f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}[problem["dtype"]]
    random = numpy.random.default_rng(0)

    def array(sizes, offset=0.0):
        return jnp.asarray(random.standard_normal(sizes, dtype=numpy.float32) * 0.5 + offset, dtype=dtype)

    xs = [array(axes) for _ in range(sets)]
    dys = [array(axes) for _ in range(sets)] if problem["backward"] else []
    broadcast = [1] * len(shape)
    broadcast[channel_axis] = shape[1]
    if problem["per_sample"]:
        broadcast[0] = shape[0]
    weight, bias = array(broadcast, 1.0), array(broadcast)
    mean, variance = array(broadcast), abs(array(broadcast)) + 0.5
    pre_bias = []
    if problem["pre_bias"]:
        sizes = bias_shape(problem)
        pre_bias = [array([sizes[0], *sizes[2:], sizes[1]] if last else sizes)]
    activate = {
        "identity": lambda z: z, "relu": jax.nn.relu, "silu": jax.nn.silu, "hardswish": jax.nn.hard_swish,
        "gelu": lambda z: jax.nn.gelu(z, approximate=False), "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
        "leaky_relu": lambda z: jax.nn.leaky_relu(z, slope), "elu": lambda z: jax.nn.elu(z, slope),
        "mish": jax.nn.mish, "relu6": jax.nn.relu6}[problem["act"]]

    def normalize(v, over):
        # As flax does it: both moments from one read.
        center = v.mean(over, keepdims=True)
        spread = jnp.maximum(0, (v * v).mean(over, keepdims=True) - center * center)
        return (v - center) * jax.lax.rsqrt(spread + eps)

    def forward(x, weight, bias, *pre_bias):
        for value in pre_bias:
            x = x + value
        v = x if problem["dtype"] == "f64" else x.astype(jnp.float32)
        weight, bias = weight.astype(v.dtype), bias.astype(v.dtype)
        if problem["op"] == "batch_norm":
            v = (v - mean) * jax.lax.rsqrt(variance + eps) if problem["evaluate"] else \
                normalize(v, tuple(k for k in range(v.ndim) if k != channel_axis))
        elif problem["op"] != "affine" and last:
            grouped = v.reshape(*axes[:-1], groups, axes[-1] // groups)
            v = normalize(grouped, (*range(1, v.ndim - 1), v.ndim)).reshape(v.shape)
        elif problem["op"] != "affine":
            grouped = v.reshape(axes[0], groups, -1)
            v = normalize(grouped, (2,)).reshape(v.shape)
        return activate(v * weight + bias).astype(x.dtype)

    def make():
        if problem["backward"]:
            backward = jax.jit(lambda dy, *inputs: jax.vjp(forward, *inputs)[1](dy))
            return lambda i: jax.block_until_ready(backward(dys[i], xs[i], weight, bias, *pre_bias)), "vjp, statistics recomputed"
        function = jax.jit(forward)
        return lambda i: jax.block_until_ready(function(xs[i], weight, bias, *pre_bias)), "jit"

    return {"jax": make}, jax.__version__


def onnxruntime_worker(problem, sets, threads):
    on_cpu(problem)
    import numpy
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper
    if problem["backward"]:
        raise Unsupported("no backward")
    if problem["dtype"] != "f32" or problem["layout"] != "nchw":
        raise Unsupported("f32 and NCHW only")
    if problem["op"] == "batch_norm" and not problem["evaluate"]:
        raise Unsupported("no training")
    shape, channels = problem["shape"], problem["shape"][1]
    per = [shape[0] if problem["per_sample"] else 1, channels] + [1] * (len(shape) - 2) \
        if problem["op"] == "affine" else [channels]
    random = numpy.random.default_rng(0)
    names = {"weight": per, "bias": per, "mean": [channels], "variance": [channels], "pre_bias": bias_shape(problem)}
    kept = {"weight", "bias"} | ({"mean", "variance"} if problem["op"] == "batch_norm" else set()) | \
        ({"pre_bias"} if problem["pre_bias"] else set())
    constants = [helper.make_tensor(name, TensorProto.FLOAT, sizes,
                                    (random.random(sizes, dtype=numpy.float32) + 0.5).ravel())
                 for name, sizes in names.items() if name in kept]
    if problem["act"] == "relu6":
        constants += [helper.make_tensor(name, TensorProto.FLOAT, [], [v]) for name, v in (("zero", 0), ("six", 6))]
    eps, u = problem["eps"], "u" if problem["pre_bias"] else "x"
    nodes = [helper.make_node("Add", ["x", "pre_bias"], ["u"])] if problem["pre_bias"] else []
    nodes += {
        "group_norm": lambda: [helper.make_node("GroupNormalization", [u, "weight", "bias"], ["z"], epsilon=eps,
                                                num_groups=problem["groups"])],
        "instance_norm": lambda: [helper.make_node("InstanceNormalization", [u, "weight", "bias"], ["z"],
                                                   epsilon=eps)],
        "batch_norm": lambda: [helper.make_node("BatchNormalization", [u, "weight", "bias", "mean", "variance"],
                                                ["z"], epsilon=eps)],
        "affine": lambda: [helper.make_node("Mul", [u, "weight"], ["t"]),
                           helper.make_node("Add", ["t", "bias"], ["z"])],
    }[problem["op"]]()
    slope = problem["act_param"]
    nodes += {
        "identity": lambda: [helper.make_node("Identity", ["z"], ["y"])],
        "silu": lambda: [helper.make_node("Sigmoid", ["z"], ["s"]), helper.make_node("Mul", ["z", "s"], ["y"])],
        "relu": lambda: [helper.make_node("Relu", ["z"], ["y"])],
        "leaky_relu": lambda: [helper.make_node("LeakyRelu", ["z"], ["y"], alpha=slope)],
        "elu": lambda: [helper.make_node("Elu", ["z"], ["y"], alpha=slope)],
        "gelu": lambda: [helper.make_node("Gelu", ["z"], ["y"])],
        "gelu_tanh": lambda: [helper.make_node("Gelu", ["z"], ["y"], approximate="tanh")],
        "hardswish": lambda: [helper.make_node("HardSwish", ["z"], ["y"])],
        "mish": lambda: [helper.make_node("Mish", ["z"], ["y"])],
        "relu6": lambda: [helper.make_node("Clip", ["z", "zero", "six"], ["y"])],
    }[problem["act"]]()
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    model = helper.make_model(helper.make_graph(nodes, "problem", value[:1], value[1:], constants),
                              opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    bindings = []
    for _ in range(sets):
        binding = session.io_binding()
        x = onnxruntime.OrtValue.ortvalue_from_numpy(random.standard_normal(shape, dtype=numpy.float32))
        y = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.zeros(shape, numpy.float32))
        binding.bind_ortvalue_input("x", x)
        binding.bind_ortvalue_output("y", y)
        bindings.append((binding, x, y))

    def run(i):
        session.run_with_iobinding(bindings[i][0])

    run.arrays = bindings  # tests read them
    return {"onnxruntime": lambda: (run, "bound outputs")}, onnxruntime.__version__


def open_onednn():
    """libdnnl of version 3, where the dynamic loader or the Python's own prefix has it; None: it is not there."""
    import ctypes
    for path in ("libdnnl.so.3", os.path.join(sys.prefix, "lib/libdnnl.so.3")):
        try:
            return ctypes.CDLL(path)
        except OSError:
            pass
    return None


def onednn_worker(problem, sets, threads):
    """oneDNN's C interface; numbers are those of its enumerations."""
    on_cpu(problem)
    import ctypes
    import numpy
    if problem["act"] != "identity" or problem["op"] == "affine" or problem["pre_bias"]:
        raise Unsupported("norms without an activation or an addition only")
    if problem["dtype"] != "f32":
        raise Unsupported("measured in f32 only")
    library, batch = open_onednn(), problem["op"] == "batch_norm"
    if problem["backward"] and not batch:  # with 3.6.2 dweight and dbias were autograd's, and dx was not
        raise Unsupported("backward of batch norm only")
    kind = "batch_normalization" if batch else "group_normalization"
    if not hasattr(library, f"dnnl_{kind}_forward_primitive_desc_create"):
        raise Unsupported("this version has no group normalization")

    class Argument(ctypes.Structure):
        _fields_ = [("index", ctypes.c_int), ("memory", ctypes.c_void_p)]

    def call(name, *arguments):
        status = getattr(library, "dnnl_" + name)(*arguments)
        if status:
            raise RuntimeError(f"dnnl_{name}: status {status}")

    def made(name, *arguments):
        handle = ctypes.c_void_p()
        call(name, ctypes.byref(handle), *arguments)
        return handle

    engine = made("engine_create", 1, ctypes.c_size_t(0))  # the CPU
    stream = made("stream_create", engine, 0)

    def describe(sizes, last=False):
        order = [0, *range(2, len(sizes)), 1] if last else range(len(sizes))
        strides, step = [0] * len(sizes), 1
        for axis in reversed(list(order)):
            strides[axis], step = step, step * sizes[axis]
        axes = ctypes.c_int64 * len(sizes)
        return made("memory_desc_create_with_strides", len(sizes), axes(*sizes), 3, axes(*strides))  # f32

    random, shape, arrays = numpy.random.default_rng(0), problem["shape"], []

    def tensor(description, count, offset=0.0):
        arrays.append(random.standard_normal(count, dtype=numpy.float32) * 0.5 + numpy.float32(offset))
        return made("memory_create", description, engine, ctypes.c_void_p(arrays[-1].ctypes.data))

    channels, count = shape[1], math.prod(shape)
    big, small = describe(shape, problem["layout"] == "nhwc"), describe([channels])
    sets_of_statistics = channels if batch else shape[0] * problem["groups"]
    statistic = describe([channels] if batch else [shape[0], problem["groups"]])
    options = [ctypes.c_float(problem["eps"]), ctypes.c_uint(2 | 4 | problem["evaluate"])]  # scale, shift, global statistics
    if not batch:
        options.insert(0, ctypes.c_int64(problem["groups"]))
    forward = made(f"{kind}_forward_primitive_desc_create", engine, 64, big, big, *options, None)  # training
    primitive = made("primitive_create", forward)
    weight, bias = tensor(small, channels, 1.0), tensor(small, channels)
    mean, variance = tensor(statistic, sets_of_statistics), tensor(statistic, sets_of_statistics, 10.0)
    common = {49: mean, 50: variance, 51: weight}  # DNNL_ARG_MEAN, _VARIANCE, _SCALE
    each = [{**common, 1: tensor(big, count), 17: tensor(big, count), 52: bias} for _ in range(sets)]  # _SRC, _DST, _SHIFT

    def execute(primitive, tensors):
        arguments = (Argument * len(tensors))(*((index, memory.value) for index, memory in tensors.items()))

        def run():
            call("primitive_execute", primitive, stream, len(arguments), arguments)
            call("stream_wait", stream)
        return run

    calls = [execute(primitive, one) for one in each]
    if problem["backward"]:
        calls[0]()  # its statistics are given to all sets
        backward = made(f"{kind}_backward_primitive_desc_create", engine, 128, big, big, big, *options, forward, None)
        primitive = made("primitive_create", backward)
        gradients = {255: tensor(small, channels), 256: tensor(small, channels)}  # _DIFF_SCALE, _DIFF_SHIFT
        calls = [execute(primitive, {**common, **gradients, 1: one[1], 145: tensor(big, count), 129: one[17]})  # _DIFF_DST, _DIFF_SRC
                 for one in each]

    def run(i):
        calls[i]()

    class Version(ctypes.Structure):
        _fields_ = [(name, ctypes.c_int) for name in ("major", "minor", "patch")]

    library.dnnl_version.restype = ctypes.POINTER(Version)
    version = library.dnnl_version().contents
    run.arrays = arrays  # live as long as the call; tests read them
    return {"onednn": lambda: (run, "memory of its own")}, f"{version.major}.{version.minor}.{version.patch}"


def cuda_graph(function, sets, stream=None):
    """A CUDA graph of a call for each set, whose outputs rotate through memory, too. `stream` is where it is captured: the
    backward of an autograd graph, only where its forward ran."""
    import torch
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Nothing of an earlier graph is freed during a capture: that may end it with an error, and all later ones.
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream):
            held = [function(i) for i in range(sets)]  # noqa: F841
    finally:
        gc.enable()
    return graph


def cuda_us(run):
    """Microseconds of what run() launches."""
    import torch
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def measure_cuda(function, sets, samples, budget_s):
    """Microseconds of each call, and how: replays of a graph of a call for each set, or eager calls where none is captured."""
    import torch
    how, stream = "CUDA graph", torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(sets):
            function(i)
    torch.cuda.synchronize()
    try:
        replay = cuda_graph(function, sets).replay
    except RuntimeError:
        torch.cuda.synchronize()
        how, ring = "eager, not captured", Ring(sets)

        def replay():
            for i in range(sets):
                ring.call(i, function)
    times, end = [], time.perf_counter() + budget_s
    while len(times) < samples and (time.perf_counter() < end or len(times) < 3):
        times.append(cuda_us(replay) / sets)
    return times, how


def measure(function, sets, samples, budget_s):
    """Microseconds of each call, cold; fewer than `samples` where they would take longer than the budget."""
    ring = Ring(sets)
    for i in range(sets):  # every set's memory is mapped, and compilers have run
        ring.call(i, function)
    times, spent, i = [], 0.0, 0
    while len(times) < samples and (spent < budget_s or len(times) < 3):
        start = time.perf_counter()
        ring.call(i % sets, function)
        elapsed = time.perf_counter() - start
        times.append(elapsed * 1e6)
        spent += elapsed
        i += 1
    return times


def worker_main(name, settings):
    """Reads one problem a line on standard input, answers one JSON line: {implementation: times, note or error}."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like
    make = {"torch": torch_worker, "jax": jax_worker, "onnxruntime": onnxruntime_worker, "onednn": onednn_worker}[name]
    for line in sys.stdin:
        problem = json.loads(line)
        answer = {}
        on_gpu = problem["device"] == "cuda"
        sets = set_count(problem, settings["l2_bytes"], 32) if on_gpu else set_count(problem, settings["llc_bytes"])
        try:
            makers, version = make(problem, sets, settings["threads"])
            for implementation, maker in makers.items():
                if implementation not in settings["implementations"]:
                    continue
                try:
                    function, note = maker()
                    if on_gpu:
                        times, how = measure_cuda(function, sets, settings["samples"], settings["budget_s"])
                        note = f"{note}, {how}" if note else how
                    else:
                        times = measure(function, sets, settings["samples"], settings["budget_s"])
                    answer[implementation] = {"times": times, "note": note, "version": version}
                except Unsupported as error:
                    answer[implementation] = {"unsupported": str(error)}
                except Exception as error:  # a peer's failure is a result: it is named in the table
                    answer[implementation] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
                function = None
            makers = maker = None  # the tensors, before the next problem's are made
        except Unsupported as error:
            answer = {implementation: {"unsupported": str(error)} for implementation in WORKERS[name][0]}
        except Exception as error:
            answer = {implementation: {"error": f"{type(error).__name__}: {str(error)[:200]}"}
                      for implementation in WORKERS[name][0]}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    def __init__(self, name, settings, python):
        environment = {**os.environ, **KEEP_MEMORY, "OMP_NUM_THREADS": str(settings["threads"]),
                       "JAX_PLATFORMS": "cpu", "TORCHINDUCTOR_COMPILE_THREADS": "1",
                       "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build/peers-cache"),
                       "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true", "TF_CPP_MIN_LOG_LEVEL": "2"}
        self.name = name
        log = open(ROOT / f"build/peers-{name}.log", "w")
        command = [python, __file__, "--worker", name, "--settings", json.dumps(settings)]
        # JAX sizes its pool by the CPUs it may run on.
        cpus = sorted(os.sched_getaffinity(0))[:settings["threads"]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                                        env=environment, preexec_fn=lambda: os.sched_setaffinity(0, cpus))

    def answer(self, problem):
        try:
            self.process.stdin.write(json.dumps(problem) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        code = self.process.wait()
        return {implementation: {"error": f"the process ended with {code}; see build/peers-{self.name}.log"}
                for implementation in WORKERS[self.name][0]}

    def close(self):
        self.process.kill()  # between problems it waits, and an interrupted one is not worth waiting for
        self.process.wait()


# ---- the run --------------------------------------------------------------------------------------------------------

def install(names):
    """Makes build/peers hold the wanted peers; returns those that it holds."""
    if not (VENV / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    held = []
    for name in names:
        modules = WORKERS[name][1]
        probe = [str(VENV / "bin/python"), "-c",
                 "import importlib.metadata as m, re, sys\n"
                 f"pins = dict(re.findall(r'^([a-z]+)==([0-9.]+)', open({str(REQUIREMENTS)!r}).read(), re.M))\n"
                 f"sys.exit(any(m.version(p).split('+')[0] != pins[p] for p in {modules!r}))"]
        if subprocess.run(probe, stderr=subprocess.DEVNULL).returncode != 0:
            print(f"peers.py: installing {', '.join(modules)} into build/peers", file=sys.stderr)
            subprocess.run([str(VENV / "bin/python"), "-m", "pip", "install", "--quiet", "--retries", "1",
                            "--disable-pip-version-check", "-c", str(REQUIREMENTS), *modules], check=False)
        if subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0:
            held.append(name)
        else:
            print(f"peers.py: {name} could not be installed and is left out", file=sys.stderr)
    return held


def installed(wanted):
    """(workers, implementations) of those that the Python that runs this has; each other is named, with what it lacks."""
    packages = {"apex": ("apex",), "gnnhwc": ("gnnhwc",)}
    held = []
    for name, (implementations, needs) in WORKERS.items():
        for implementation in implementations:
            missing = []
            for package in (*needs, *packages.get(implementation, ())):
                try:
                    importlib.metadata.version(package)
                except importlib.metadata.PackageNotFoundError:
                    missing.append(f"{package} is not installed")
            if implementation == "onednn" and not open_onednn():
                missing.append("libdnnl.so.3 is not found")
            if implementation in wanted and missing:
                print(f"peers.py: {implementation} is left out: {', '.join(missing)}", file=sys.stderr)
            elif implementation in wanted:
                held.append((name, implementation))
    return list(dict.fromkeys(name for name, _ in held)), [implementation for _, implementation in held]


def llc_bytes():
    best = 0
    for index in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            text = (index / "size").read_text().strip()
            best = max(best, int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]])
        except (OSError, ValueError, KeyError):
            pass
    return best or 32 << 20


def information():
    return json.loads(subprocess.run([str(ROOT / "build/normfuse"), "info", "--json"], stdout=subprocess.PIPE,
                                     check=True).stdout)


def normfuse_bench(problem, samples, threads):
    result = subprocess.run([str(ROOT / "build/normfuse"), "bench", problem["line"], "--json", "--samples",
                             str(samples), "--threads", str(threads)], stdout=subprocess.PIPE, text=True,
                            stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise SystemExit(f"peers.py: normfuse bench {problem['line']} ended with {result.returncode}")
    return json.loads(result.stdout.splitlines()[-1])


def percentile(times, share):
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help="quoted problem lines and @files")
    parser.add_argument("--peers", help=f"of {', '.join(ALL)}; default: {PINNED}, with --installed all")
    parser.add_argument("--installed", action="store_true", help="install nothing: take what this Python has")
    parser.add_argument("--only", default="", metavar="REGEX", help="problems whose line matches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=30, help="calls of each implementation; default: %(default)s")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of calls; default: %(default)s")
    parser.add_argument("--out", help="default: bench/results/peers-<date>.jsonl")
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker_main(args.worker, json.loads(args.settings))

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted = (args.peers or (",".join(ALL) if args.installed else PINNED)).split(",")
    unknown = set(wanted) - set(ALL)
    if unknown:
        raise SystemExit(f"peers.py: --peers: unknown: {', '.join(sorted(unknown))}")
    if args.installed:
        held, wanted = installed(wanted)
    else:
        held = install([name for name, (implementations, _) in WORKERS.items() if set(implementations) & set(wanted)])
    if args.install_only:
        return 0
    settings = {"threads": args.threads, "samples": args.samples, "budget_s": args.budget, "llc_bytes": llc_bytes(),
                "l2_bytes": information()["gpu_l2_bytes"] or 0, "implementations": wanted}
    out = pathlib.Path(args.out) if args.out else \
        ROOT / "bench/results" / f"peers-{datetime.date.today().isoformat()}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    problems = [problem for problem in read_problems(args.problems) if re.search(args.only, problem["line"])]
    python = sys.executable if args.installed else str(VENV / "bin/python")
    workers = {name: Worker(name, settings, python) for name in held}
    shown = [name for name in ALL if name in wanted]
    print("| problem | floor us | normfuse | " + " | ".join([*shown, "fastest peer over normfuse"]) + " |")
    print("|---|---|---|" + "---|" * len(shown) + "---|", flush=True)
    done, slower = 0, []
    try:
        with out.open("a") as file:
            for problem in problems:
                gain = compare(problem, workers, wanted, shown, args, file)
                done += 1
                if gain is not None and gain < 1:
                    slower.append(problem["line"])
    except KeyboardInterrupt:
        print("peers.py: interrupted; the rows so far are written", file=sys.stderr)
    finally:
        for worker in workers.values():
            worker.close()
    print(f"\n{done} of {len(problems)} problems; rows: {out}", file=sys.stderr)
    if slower:
        print("slower than a peer:\n  " + "\n  ".join(slower), file=sys.stderr)
    return 0 if done == len(problems) else 130


def compare(problem, workers, wanted, shown, args, file):
    """Measures a problem, writes each row when it is there and prints the problem's line; the fastest peer over normfuse,
    None without a peer."""
    samples = max(5, args.samples // (len(workers) + 1))
    own, cells = [normfuse_bench(problem, samples, args.threads)], {}

    def write(row):
        file.write(json.dumps(row) + "\n")
        file.flush()

    try:
        for name, worker in workers.items():
            answer = worker.answer(problem)
            time.sleep(0.1)  # its threads stop spinning
            own.append(normfuse_bench(problem, samples, args.threads))
            floor_us = (own[-2]["floor_us"] + own[-1]["floor_us"]) / 2
            for implementation, result in answer.items():
                if implementation not in wanted:
                    continue
                row = {key: own[0][key] for key in own[0] if key not in (
                    "isa", "bytes", "gbps", "commit", "compiler", "kernel", "floor_kernel", "host_us")}
                row.update(impl=implementation, version=result.get("version", ""))
                if "times" in result:
                    times = result["times"]
                    median_us = statistics.median(times)
                    row.update(samples=len(times), median_us=round(median_us, 2),
                               p10_us=round(percentile(times, 0.1), 2), p90_us=round(percentile(times, 0.9), 2),
                               floor_us=round(floor_us, 2), ratio=round(median_us / floor_us, 3), note=result["note"])
                    cells[implementation] = row["ratio"]
                else:
                    for key in ("samples", "median_us", "p10_us", "p90_us", "floor_us", "ratio"):
                        row.pop(key, None)
                    row.update({key: result[key] for key in ("error", "unsupported") if key in result})
                    if "error" in result:
                        print(f"peers.py: {implementation}: {problem['line']}: {result['error']}", file=sys.stderr)
                write(row)
    finally:
        # The middle one of normfuse's own runs, not the best.
        best = sorted(own, key=lambda row: row["ratio"])[len(own) // 2]
        write({**best, "impl": "normfuse"})
    fastest = min(cells, key=cells.get, default=None)
    gain = cells[fastest] / best["ratio"] if fastest else None
    print(f"| {problem['line']} | {best['floor_us']:.0f} | {best['ratio']:.2f} | "
          + " | ".join([*(f"{cells[name]:.2f}" if name in cells else "-" for name in shown),
                        f"{fastest} {gain:.2f}" if fastest else "-"]) + " |", flush=True)
    return gain


if __name__ == "__main__":
    sys.exit(main())

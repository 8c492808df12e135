# SPDX-License-Identifier: MIT
"""normfuse.onnx: the operators in ONNX Runtime within the bounds of docs/numerics.md, from float64; ONNX's own node
cases; errors; what a rewrite replaces, leaves and keeps; a UNet that PyTorch exported, rewritten."""
import ctypes
import importlib
import os
import pathlib
import re
import subprocess
import sys
import threading

import numpy
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import normfuse  # noqa: E402
import normfuse.onnx  # noqa: E402
import reference  # noqa: E402
from normfuse.onnx import _rewrite  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ACTIVATIONS = ["identity", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "elu", "mish", "relu6"]
KINDS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
         "float64": TensorProto.DOUBLE}
SAMPLES, CHANNELS, GROUPS, SPATIAL = 3, 8, 4, (5, 6)


def session(model, threads=2, custom=True):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if custom:
        options.register_custom_ops_library(normfuse.onnx.library_path())
    serialized = model if isinstance(model, bytes) else model.SerializeToString()
    return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def values(seed, shape, dtype="float32", scale=1.0, shift=0.0):
    """Drawn, and representable in dtype; bfloat16 as float32."""
    drawn = numpy.random.default_rng(seed).standard_normal(shape) * scale + shift
    if dtype == "bfloat16":
        return reference.rounded(drawn, "bfloat16").astype("float32")
    return drawn.astype(dtype)


def one_node(operator, attributes, inputs, dtype="float32", outputs=1, domain="normfuse", sizes=None):
    """A model of that node, whose inputs and outputs are of NumPy's dtypes: bfloat16 is cast from float32 and back.
    `sizes` is x's shape where the model says it."""
    names = list(inputs)
    half = dtype == "bfloat16"
    nodes = [helper.make_node("Cast", ["x"], ["x_"], to=KINDS[dtype])] if half else []
    if half and "skip" in inputs:
        nodes.append(helper.make_node("Cast", ["skip"], ["skip_"], to=KINDS[dtype]))
    made = [f"y{i}" for i in range(outputs)]
    nodes.append(helper.make_node(operator, [name + "_" if half and name in ("x", "skip") else name for name in names],
                                  [name + "_" if half else name for name in made], "norm", domain=domain, **attributes))
    if half:
        nodes += [helper.make_node("Cast", [name + "_"], [name], to=TensorProto.FLOAT) for name in made]
    kind = TensorProto.FLOAT if half else KINDS[dtype]
    graph = helper.make_graph(nodes, "graph", [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype),
                                      sizes if name == "x" else None)
        for name, array in inputs.items()], [helper.make_tensor_value_info(name, kind, None) for name in made])
    return model_of(graph, 21)


def model_of(graph, opset, ir=10):
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("normfuse", 1)],
                             ir_version=ir)


def run(operator, attributes, inputs, dtype="float32", outputs=1, **words):
    made = session(one_node(operator, attributes, inputs, dtype, outputs, **words)).run(None, inputs)
    return made[0] if outputs == 1 else made


def big(array, last):
    """[N, C, S] in float64."""
    array = numpy.asarray(array, "float64")
    if last:
        array = numpy.moveaxis(array, -1, 1)
    return array.reshape(*array.shape[:2], -1)


def shape_of(last, samples=SAMPLES, channels=CHANNELS, spatial=SPATIAL):
    return (samples, *spatial, channels) if last else (samples, channels, *spatial)


OPERATORS = {"GroupNorm": "group", "SkipGroupNorm": "group", "InstanceNorm": "group", "BatchNorm": "batch",
             "ChannelNorm": "channel", "ChannelAffine": "affine"}


def arguments(operator, dtype, last, parameters="float32"):
    given = {"x": values(0, shape_of(last), dtype, 2, 0.5), "scale": values(1, CHANNELS, parameters, 0.3, 1),
             "bias": values(2, CHANNELS, parameters)}
    if operator == "SkipGroupNorm":
        given["skip"] = values(3, shape_of(last), dtype)
    if operator == "BatchNorm":
        given.update(mean=values(4, CHANNELS, parameters, 0.2), var=abs(values(5, CHANNELS, parameters)) + 0.5)
    return given


def problem_of(operator, given, dtype, last, **words):
    if "skip" in given:
        words["pre_add"] = big(given["skip"], last)
    if "mean" in given:
        words.update(running_mean=given["mean"].astype("f8"), running_var=given["var"].astype("f8"), evaluate=True)
    groups = {"GroupNorm": GROUPS, "SkipGroupNorm": GROUPS, "InstanceNorm": CHANNELS, "ChannelNorm": 1}.get(operator, 0)
    groups = words.pop("groups", groups)
    return reference.Problem(OPERATORS[operator], dtype, big(given["x"], last), groups=groups, columns=last,
                             weight=given["scale"].astype("f8"), bias=given["bias"].astype("f8"),
                             **{"eps": float(numpy.float32(1e-5)), **words})


def compare(name, got, want, last, dtype):
    reference.compare(name, big(got, last), *want, dtype)


# ---- operators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators(operator, dtype, last):
    given = arguments(operator, dtype, last, "float64" if dtype == "float64" else "float32")
    attributes = {"activation": "silu", "channels_last": int(last)}
    if "Group" in operator:
        attributes["groups"] = GROUPS
    want = reference.forward(problem_of(operator, given, dtype, last, activation="silu"))
    compare("y", run(operator, attributes, given, dtype), want["y"], last, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    given = arguments("GroupNorm", "float32", False)
    for parameter in (None, 0.25):
        if parameter is not None and activation not in ("leaky_relu", "elu"):
            continue
        attributes = {"groups": GROUPS, "activation": activation}
        attributes.update({} if parameter is None else {"act_param": parameter})
        problem = problem_of("GroupNorm", given, "float32", False, activation=activation, act_param=parameter)
        compare("y", run("GroupNorm", attributes, given), reference.forward(problem)["y"], False, "float32")


@pytest.mark.parametrize("words", [{"groups": 2}, {"statistics": "mean_square"}, {"eps_kind": "of_norm", "eps": 1.0},
                                   {"statistics": "mean_square", "eps_kind": "of_norm", "eps": 0.0,
                                    "groups": 4}], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_channel_norm(last, words):
    given = arguments("ChannelNorm", "float32", last)
    attributes = {{"eps": "epsilon"}.get(name, name): value for name, value in words.items()}
    want = reference.forward(problem_of("ChannelNorm", given, "float32", last, activation="gelu", **words))
    y = run("ChannelNorm", {"activation": "gelu", "channels_last": int(last), **attributes}, given)
    compare("y", y, want["y"], last, "float32")


@pytest.mark.parametrize("shape", [(5, CHANNELS), (2, 5, CHANNELS), (2, 2, 3, 2, 2, 2, CHANNELS)], ids=str)
def test_tokens(shape):
    given = {**arguments("ChannelNorm", "float32", True), "x": values(0, shape)}
    want = reference.forward(problem_of("ChannelNorm", given, "float32", True))
    compare("y", run("ChannelNorm", {"channels_last": 1}, given), want["y"], True, "float32")


@pytest.mark.parametrize("parameters", ["float16", "float32", "float64"])
def test_parameters_of_another_type(parameters):
    given = arguments("BatchNorm", "float32", False, parameters)
    want = reference.forward(problem_of("BatchNorm", given, "float32", False))
    compare("y", run("BatchNorm", {}, given), want["y"], False, "float32")


@pytest.mark.parametrize("spatial", [(), (7,), (5, 6), (2, 3, 4), (2, 3, 2, 2), (2, 1, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_ranks(spatial, last):
    x = values(0, shape_of(last, spatial=spatial))
    given = {**arguments("GroupNorm", "float32", last), "x": x}
    want = reference.forward(problem_of("GroupNorm", given, "float32", last))
    y = run("GroupNorm", {"groups": GROUPS, "channels_last": int(last)}, given)
    assert y.shape == x.shape
    compare("y", y, want["y"], last, "float32")


@pytest.mark.parametrize("shape", [(0, CHANNELS, 4, 4), (2, CHANNELS, 0, 4)], ids=str)
def test_empty(shape):
    given = {**arguments("GroupNorm", "float32", False), "x": values(0, shape)}
    assert run("GroupNorm", {"groups": GROUPS}, given).shape == shape


SKIPS = {"c": (CHANNELS,), "nc": (SAMPLES, CHANNELS), "nc11": (SAMPLES, CHANNELS, 1, 1), "1c11": (1, CHANNELS, 1, 1),
         "c11": (CHANNELS, 1, 1), "nchw": (SAMPLES, CHANNELS, *SPATIAL), "n11c": (SAMPLES, 1, 1, CHANNELS),
         "11c": (1, 1, CHANNELS), "nhwc": (SAMPLES, *SPATIAL, CHANNELS)}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("skip", SKIPS)
def test_skip(skip, outputs, dtype):
    last = skip.endswith("c") and len(SKIPS[skip]) > 2
    given = arguments("SkipGroupNorm", dtype, last)
    given["skip"] = values(3, SKIPS[skip], dtype)
    made = run("SkipGroupNorm", {"groups": GROUPS, "channels_last": int(last)}, given, dtype, outputs)
    spread, words = given["skip"], {}
    if skip == "nc" or skip == "c":
        spread = spread.reshape(-1, CHANNELS, 1, 1)
    full = {**given, "skip": numpy.broadcast_to(spread, given["x"].shape)}
    if spread.size < given["x"].size:  # a part of the mean: x + skip is rounded where it is an output
        words = {"pre_bias": spread.reshape(-1, CHANNELS).astype("f8"), "writes_u": outputs == 2}
    problem = {name: value for name, value in full.items() if not words or name != "skip"}
    want = reference.forward(problem_of("SkipGroupNorm", problem, dtype, last, **words))
    compare("y", made if outputs == 1 else made[0], want["y"], last, dtype)
    if outputs == 2:
        numpy.testing.assert_array_equal(made[1], given["x"] + full["skip"])


@pytest.mark.parametrize("operator,shape", [("GroupNorm", (CHANNELS, 1, 1)), ("GroupNorm", (1, CHANNELS, 1, 1)),
                                            ("InstanceNorm", (CHANNELS, 1, 1)), ("ChannelAffine", (CHANNELS, 1, 1)),
                                            ("ChannelAffine", (SAMPLES, CHANNELS)),
                                            ("ChannelAffine", (SAMPLES, CHANNELS, 1, 1))], ids=str)
def test_shapes_of_parameters(operator, shape):
    """Those that a Mul would broadcast, and [N, C] of the affine."""
    given = arguments(operator, "float32", False)
    given.update(scale=values(1, shape), bias=values(2, shape))
    flat = {name: (array.reshape(-1, CHANNELS) if SAMPLES in shape else array.reshape(-1)) if name != "x" else array
            for name, array in given.items()}
    want = reference.forward(problem_of(operator, flat, "float32", False))
    compare("y", run(operator, {"groups": GROUPS} if operator == "GroupNorm" else {}, given), want["y"], False,
            "float32")


@pytest.mark.parametrize("operator,groups", [("GroupNorm", "groups"), ("GroupNormalization", "num_groups")])
def test_scale_by_group(operator, groups):
    """Version 18 of GroupNormalization: a scale and a bias for each group."""
    given = {"x": values(0, shape_of(False)), "scale": values(1, GROUPS), "bias": values(2, GROUPS)}
    by_channel = {**given, **{name: numpy.repeat(given[name], CHANNELS // GROUPS) for name in ("scale", "bias")}}
    want = reference.forward(problem_of("GroupNorm", by_channel, "float32", False))
    compare("y", run(operator, {groups: GROUPS}, given), want["y"], False, "float32")


def test_batch_norm_without_channels():
    x, one = values(0, 7), numpy.ones(1, "float32")
    for operator in ("BatchNormalization", "BatchNorm"):
        y = run(operator, {"epsilon": 0.0}, {"x": x, "scale": 2 * one, "bias": one, "mean": 3 * one, "var": 4 * one})
        numpy.testing.assert_allclose(y, (x - 3) + 1, rtol=1e-6)


def node_cases():
    """Those of three modules. ONNX's collect_testcases makes the cases of all operators, in ten seconds."""
    from onnx.backend.test.case import node
    for module in ("groupnormalization", "instance_normalization", "batch_normalization"):
        importlib.import_module(f"{node.__name__}.{module}")
    wanted = {"GroupNormalization", "InstanceNormalization", "BatchNormalization"}
    return [pytest.param(case, id=case.name) for case in node._NodeTestCases
            if wanted & {node.op_type for node in case.model.graph.node}]


@pytest.mark.parametrize("case", node_cases())
def test_node_cases(case):
    """ONNX's own, with their operators moved to the domain."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    model.ir_version = 10
    model.opset_import.append(helper.make_opsetid("normfuse", 1))
    for node in model.graph.node:
        node.domain = "normfuse"
    compiled = session(model)
    assert case.data_sets
    for inputs, outputs in case.data_sets:
        made = compiled.run(None, {value.name: array for value, array in zip(model.graph.input, inputs)})
        for got, want in zip(made, outputs):
            numpy.testing.assert_allclose(got, want, rtol=case.rtol, atol=case.atol)


@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize("dtype,statistics", [("float32", "float32"), ("float16", "float32"), ("float32", "float64"),
                                              ("float64", "float64"), ("float32", "float16")], ids=str)
def test_training(dtype, statistics, outputs):
    given = arguments("BatchNorm", dtype, False)
    given.update((name, given[name].astype(statistics)) for name in ("mean", "var"))
    model = one_node("BatchNormalization", {"training_mode": 1, "momentum": 0.75}, given, dtype, outputs)
    for value in model.graph.output[1:]:
        value.type.tensor_type.elem_type = KINDS[statistics]
    made = session(model).run(None, given)
    problem = problem_of("BatchNorm", {name: given[name] for name in ("x", "scale", "bias")}, dtype, False)
    compare("y", made[0], reference.forward(problem)["y"], False, dtype)
    x = big(given["x"], False)
    for got, old, new in zip(made[1:], (given["mean"], given["var"]), (x.mean((0, 2)), x.var((0, 2)))):
        assert got.dtype == statistics
        numpy.testing.assert_allclose(got, 0.75 * old.astype("f8") + 0.25 * new,
                                      rtol=2e-3 if statistics == "float16" else 1e-6)


def test_statistics_of_an_evaluation():
    given = arguments("BatchNorm", "float32", False)
    with pytest.raises(Exception, match="new statistics are outputs of training only"):
        run("BatchNormalization", {}, given, outputs=3)


def test_shape_inference():
    given = arguments("SkipGroupNorm", "float32", False)
    made = session(one_node("SkipGroupNorm", {"groups": GROUPS}, given, outputs=2, sizes=["n", CHANNELS, 5, 6]))
    assert [value.shape for value in made.get_outputs()] == [["n", CHANNELS, 5, 6]] * 2
    made = session(one_node("GroupNorm", {"groups": GROUPS}, arguments("GroupNorm", "float32", False),
                            sizes=[None, CHANNELS, 5, 6]))
    assert made.run(None, arguments("GroupNorm", "float32", False))[0].shape == (SAMPLES, CHANNELS, 5, 6)


def test_input_that_others_use_stays():
    """y may take x's memory, where nothing else reads x."""
    given = {"x": values(0, (2, CHANNELS, 64, 64)), "scale": values(1, CHANNELS), "bias": values(2, CHANNELS)}
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["twice"]),
         helper.make_node("GroupNorm", ["twice", "scale", "bias"], ["norm"], domain="normfuse", groups=GROUPS),
         helper.make_node("Sub", ["norm", "twice"], ["y"])], "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in given.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, given["x"].shape)])
    want = normfuse.group_norm(2 * given["x"], GROUPS, given["scale"], given["bias"]) - 2 * given["x"]
    numpy.testing.assert_array_equal(session(model_of(graph, 21)).run(None, given)[0], want)


# ---- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_of_the_library(threads):
    given = {"x": values(0, (2, 32, 64, 64)), "scale": values(1, 32), "bias": values(2, 32)}
    compiled = session(one_node("GroupNorm", {"groups": 8, "activation": "silu"}, given), threads)
    want = normfuse.group_norm(given["x"], 8, given["scale"], given["bias"], eps=float(numpy.float32(1e-5)),
                               activation="silu")
    numpy.testing.assert_array_equal(compiled.run(None, given)[0], want)


def test_calls_at_once():
    given = {"x": values(0, (2, 32, 64, 64)), "scale": values(1, 32), "bias": values(2, 32)}
    compiled = session(one_node("GroupNorm", {"groups": 8}, given))
    want = compiled.run(None, given)[0]
    wrong = []

    def repeat():
        wrong.extend(i for i in range(20) if not numpy.array_equal(compiled.run(None, given)[0], want))
    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_threads_of_its_own():
    """The tasks run on ONNX Runtime's threads: a call starts none."""
    code = """
import os, sys, numpy
sys.path[:0] = {path!r}
import test_onnx
given = {{"x": test_onnx.values(0, (2, 32, 128, 128)), "scale": test_onnx.values(1, 32), "bias": test_onnx.values(2, 32)}}
compiled = test_onnx.session(test_onnx.one_node("GroupNorm", {{"groups": 8}}, given), 3)
before = len(os.listdir("/proc/self/task"))
compiled.run(None, given)
print(len(os.listdir("/proc/self/task")) - before)
import normfuse
normfuse.group_norm(given["x"], 8)
print(len(os.listdir("/proc/self/task")) - before)
""".format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "NORMFUSE_NUM_THREADS": "2"}, text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1"]  # the second call is the library's own pool


# ---- errors ---------------------------------------------------------------------------------------------------------


REFUSED = {
    "groups that do not divide": ("GroupNorm", {"groups": 3}, {}, "groups is 3 and does not divide the 8 channels"),
    "no groups": ("GroupNorm", {}, {}, "groups is missing"),
    "groups of 0": ("GroupNorm", {"groups": 0}, {}, "groups is 0, must be above 0"),
    "groups of a float": ("GroupNorm", {"groups": 2.0}, {}, "groups is not an integer"),
    "an activation": ("GroupNorm", {"groups": 4, "activation": "swoosh"}, {}, "activation is not a name"),
    "an activation's number": ("GroupNorm", {"groups": 4, "activation": 1}, {}, "activation is not a name"),
    "epsilon": ("GroupNorm", {"groups": 4, "epsilon": 1}, {}, "epsilon is not a float"),
    "channels_last": ("GroupNorm", {"groups": 4, "channels_last": 7}, {}, "channels_last is neither 0 nor 1"),
    "act_param": ("GroupNorm", {"groups": 4, "act_param": 1.0}, {}, "act_param means nothing"),
    "scale of another size": ("GroupNorm", {"groups": 4}, {"scale": (3,)}, "tensors.weight has 3 elements"),
    "bias of another size": ("InstanceNorm", {}, {"bias": (9,)}, "tensors.bias has 9 elements"),
    "too many axes": ("GroupNorm", {"groups": 4}, {"scale": (1, 1, 1, 1, 1, 8)}, "more than 5 axes"),
    "an x of one axis": ("GroupNorm", {"groups": 4}, {"x": (8,)}, "tensors.x"),
    "a mean of another size": ("BatchNorm", {}, {"mean": (7,)}, "tensors.running_mean"),
    "a skip": ("SkipGroupNorm", {"groups": 4}, {"skip": (3, 8, 5, 1)}, "skip has neither the shape of X"),
    "a skip of other samples": ("SkipGroupNorm", {"groups": 4}, {"skip": (2, 8)}, "tensors.pre_bias has 2 elements"),
    "training": ("BatchNormalization", {"training_mode": 2}, {}, "training_mode is neither 0 nor 1"),
    "training of one value": ("BatchNormalization", {"training_mode": 1}, {"x": (1, 8, 1, 1)}, "more than 1 value"),
    "momentum": ("BatchNormalization", {"training_mode": 1, "momentum": 1}, {}, "momentum is not a float"),
    "groups of channels": ("ChannelNorm", {"groups": 3}, {}, "groups is 3 and does not divide the 8 channels"),
    "statistics": ("ChannelNorm", {"statistics": "mean"}, {},
                   "statistics is neither mean_and_variance nor mean_square"),
    "statistics of a number": ("ChannelNorm", {"statistics": 1}, {}, "statistics is neither mean_and_variance nor"),
    "eps_kind": ("ChannelNorm", {"eps_kind": "of norm"}, {}, "eps_kind is neither added nor of_norm"),
    "an eps below 0": ("ChannelNorm", {"eps_kind": "of_norm", "epsilon": -1.0}, {}, "eps"),
    "no num_groups": ("GroupNormalization", {"groups": 4}, {}, "num_groups is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    operator, attributes, shapes, text = REFUSED[name]
    given = arguments({"BatchNormalization": "BatchNorm"}.get(operator, operator), "float32", False)
    given.update((key, values(0, shape)) for key, shape in shapes.items())
    with pytest.raises(Exception, match=re.escape(text)):
        run(operator, attributes, given)


def test_refused_types():
    given = arguments("GroupNorm", "float32", False)
    with pytest.raises(Exception, match="tensors.weight"):
        run("GroupNorm", {"groups": 4}, {**given, "scale": numpy.ones(CHANNELS, "int64")})
    for dtype in ("int32", "bool", "int8"):
        with pytest.raises(Exception, match="GroupNorm"):
            run("GroupNorm", {"groups": 4}, {**given, "x": numpy.ones(shape_of(False), dtype)}, "float32")
    with pytest.raises(Exception, match="dtype of tensors.x"):
        run("SkipGroupNorm", {"groups": 4}, {**given, "skip": numpy.ones(shape_of(False), "float64")})


@pytest.mark.parametrize("inputs", [["x"], ["x", "scale"], ["x", "scale", ""], ["", "scale", "bias"],
                                    ["x", "scale", "bias", ""], ["x", "scale", "bias", "scale"]], ids=str)
def test_refused_inputs(inputs):
    given = arguments("GroupNorm", "float32", False)
    model = one_node("GroupNorm", {"groups": 4}, given)
    del model.graph.node[0].input[:]
    model.graph.node[0].input.extend(inputs)
    with pytest.raises(Exception, match="GroupNorm"):
        session(model)


def test_an_error_ends_one_run_only():
    given = arguments("GroupNorm", "float32", False)
    compiled = session(one_node("GroupNorm", {"groups": GROUPS}, given))
    want = compiled.run(None, given)[0]
    for _ in range(3):
        with pytest.raises(Exception, match="tensors.weight"):
            compiled.run(None, {**given, "scale": numpy.ones(5, "float32")})
        numpy.testing.assert_array_equal(compiled.run(None, given)[0], want)


# ---- the interface --------------------------------------------------------------------------------------------------


def test_slots():
    """The functions of ONNX Runtime's table, by the numbers that src/bindings/onnxruntime.c gives them."""
    found = sorted(pathlib.Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    if not found:
        pytest.skip("this onnxruntime has no libonnxruntime.so beside its module")
    library = ctypes.CDLL(str(found[0]))
    library.OrtGetApiBase.restype = ctypes.POINTER(ctypes.c_void_p)
    base = library.OrtGetApiBase()
    version = ctypes.CFUNCTYPE(ctypes.c_char_p)(base[1])()
    assert version.decode() == onnxruntime.__version__
    get_api = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint32)(base[0])
    table = get_api(18)
    assert table
    source = (ROOT / "src/bindings/onnxruntime.c").read_text()
    slots = {name: int(number) for number, name in re.findall(r'^SLOT\((\d+), \w+, "(\w+)"\)', source, re.M)}
    assert len(slots) == 28 and max(slots.values()) == slots["KernelContext_ParallelFor"]
    assert all(table[number] for number in slots.values())
    pointer = ctypes.c_void_p

    def function(number, result, *kinds):
        return ctypes.CFUNCTYPE(result, *kinds)(table[number])
    create, release = (function(slots["CreateStatus"], pointer, ctypes.c_int, ctypes.c_char_p),
                       function(slots["ReleaseStatus"], None, pointer))
    status = create(9, b"some text")
    assert function(slots["GetErrorCode"], ctypes.c_int, pointer)(status) == 9
    assert function(slots["GetErrorMessage"], ctypes.c_char_p, pointer)(status) == b"some text"
    release(status)
    # A tensor in CPU memory, which the table makes too: slots 69 (CreateCpuMemoryInfo) and 49 (CreateTensorWithData).
    memory, value, data = pointer(), pointer(), numpy.arange(6, dtype="float32")
    assert not function(69, pointer, ctypes.c_int, ctypes.c_int, pointer)(0, 0, ctypes.addressof(memory))
    sizes = (ctypes.c_int64 * 2)(2, 3)
    assert not function(49, pointer, pointer, pointer, ctypes.c_size_t, pointer, ctypes.c_size_t, ctypes.c_int,
                        pointer)(
        memory, data.ctypes.data, data.nbytes, ctypes.addressof(sizes), 2, 1, ctypes.addressof(value))
    shape, rank, kind, of_value, address, device = pointer(), ctypes.c_size_t(), ctypes.c_int(), pointer(), pointer(), \
        ctypes.c_int(7)
    read, names = (ctypes.c_int64 * 2)(), (ctypes.c_char_p * 2)()

    def call(name, *words):
        assert not function(slots[name], pointer, *[pointer] * len(words))(*words), name
    call("GetTensorTypeAndShape", value, ctypes.addressof(shape))
    call("GetDimensionsCount", shape, ctypes.addressof(rank))
    call("GetTensorElementType", shape, ctypes.addressof(kind))
    assert not function(slots["GetDimensions"], pointer, pointer, pointer, ctypes.c_size_t)(
        shape, ctypes.addressof(read), 2)
    assert not function(slots["GetSymbolicDimensions"], pointer, pointer, pointer, ctypes.c_size_t)(
        shape, ctypes.addressof(names), 2)
    call("GetTensorMutableData", value, ctypes.addressof(address))
    call("GetTensorMemoryInfo", value, ctypes.addressof(of_value))
    call("MemoryInfoGetId", of_value, ctypes.addressof(device))
    assert (rank.value, kind.value, list(read), list(names)) == (2, 1, [2, 3], [b"", b""])
    assert (address.value, device.value) == (data.ctypes.data, 0)
    function(slots["ReleaseTensorTypeAndShapeInfo"], None, pointer)(shape)


def test_library_path(tmp_path, monkeypatch):
    path = pathlib.Path(normfuse.onnx.library_path())
    assert path.name == "libnormfuse_onnxruntime.so" and path.is_file()
    elsewhere = tmp_path / "libnormfuse.so"
    elsewhere.write_bytes(b"")
    monkeypatch.setenv("NORMFUSE_LIBRARY", str(elsewhere))
    with pytest.raises(ImportError, match="libnormfuse_onnxruntime.so is not a file"):
        normfuse.onnx.library_path()


# ---- graphs as exporters make them ----------------------------------------------------------------------------------


class Builder:
    """Nodes, initializers and inputs that become a model."""

    def __init__(self, opset=17, sizes=(2, CHANNELS, 6, 10), dtype="float32"):
        self.nodes, self.initializers, self.opset, self.dtype = [], {}, opset, dtype
        self.sizes, self.kind = list(sizes), KINDS[dtype]

    def add(self, operator, inputs, name=None, domain="", **attributes):
        output = name or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], f"{operator}_{output}", domain=domain,
                                           **attributes))
        return output

    def constant(self, array, name=None):
        name = name or f"c{len(self.initializers)}"
        self.initializers[name] = numpy.asarray(array)
        return name

    def vector(self, seed, shape=(CHANNELS,)):
        return self.constant(values(seed, shape, self.dtype, 0.5, 1))

    def group_norm(self, x, groups=GROUPS, before=None, after=None, ones=1.0, zeros=0.0, scale=None, bias=None,
                   epsilon=1e-3, swapped=False):
        """What PyTorch makes of GroupNorm; the words change it."""
        reshaped = self.add("Reshape", [x, self.constant(numpy.array([0, groups, -1] if before is None else before))])
        factors, addends = (self.constant(numpy.full(groups, value, self.dtype)) for value in (ones, zeros))
        norm = self.add("InstanceNormalization", [reshaped, factors, addends], epsilon=epsilon)
        shape = self.add("Shape", [x]) if after is None else self.constant(numpy.array(after))
        back = self.add("Reshape", [norm, shape])
        scale = scale or self.vector(1, (CHANNELS, 1, 1))
        bias = bias or self.vector(2, (CHANNELS, 1, 1))
        product = self.add("Mul", [scale, back] if swapped else [back, scale])
        return self.add("Add", [bias, product] if swapped else [product, bias])

    def reduce(self, operator, x, axis, **words):
        """Axes are an attribute before version 18."""
        if self.opset < 18:
            words["axes"] = [axis]
            return self.add(operator, [x], **words)
        return self.add(operator, [x, self.constant(numpy.array([axis]))], **words)

    def scalar(self, value, shape=()):
        return self.constant(numpy.full(shape, value, self.dtype))

    def channel_chain(self, x, axis=1, statistics="mean_and_variance", square="Pow", quotient="Div", twice=False,
                      swapped=False, shape=(), epsilon=0.125, scale=None, bias=None):
        """A norm of channels as models write it; the words change it."""
        v = [x, x]
        if statistics == "mean_and_variance":
            mean = self.reduce("ReduceMean", x, axis)
            v = [self.add("Sub", [x, mean]) for _ in range(1 + twice)] * (2 - twice)
        squares = self.add("Mul", [v[0], v[0]]) if square == "Mul" else self.add("Pow", [v[0], self.scalar(2, shape)])
        sum_ = [self.reduce("ReduceMean", squares, axis), self.scalar(epsilon, shape)]
        root = self.add("Sqrt", [self.add("Add", sum_[::-1] if swapped else sum_)])
        if quotient == "Div":
            y = self.add("Div", [v[1], root])
        else:
            inverse = self.add("Reciprocal",
                               [root]) if quotient == "Reciprocal" else self.add("Div", [self.scalar(1, shape), root])
            y = self.add("Mul", [inverse, v[1]] if swapped else [v[1], inverse])
        for operation, parameter in (("Mul", scale), ("Add", bias)):
            if parameter is not None:
                y = self.add(operation, [parameter, y] if swapped else [y, parameter])
        return y

    def normalize(self, x, axis=1, epsilon=0.5, factor=None, expand="Shape"):
        """torch.nn.functional.normalize, multiplied."""
        norm = self.add("Clip", [self.reduce("ReduceL2", x, axis), self.scalar(epsilon)])
        if expand is not None:
            sizes = self.add("Shape", [x]) if expand == "Shape" else self.constant(numpy.array(expand))
            norm = self.add("Expand", [norm, sizes])
        y = self.add("Div", [x, norm])
        return self.add("Mul", [y, self.scalar(CHANNELS**0.5 if factor is None else factor)])

    def silu(self, x):
        return self.add("Mul", [x, self.add("Sigmoid", [x])])

    def model(self, *outputs, sizes=None, ir=8):
        inputs = [helper.make_tensor_value_info("x", self.kind, self.sizes if sizes is None else sizes)]
        graph = helper.make_graph(self.nodes, "graph", inputs,
                                  [helper.make_tensor_value_info(name, self.kind, None) for name in outputs],
                                  [numpy_helper.from_array(array, name) for name, array in self.initializers.items()])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=ir)
        inferred = model if any(node.domain for node in self.nodes) else onnx.shape_inference.infer_shapes(model)
        for value, known in zip(graph.output, inferred.graph.output):
            rank = len(known.type.tensor_type.shape.dim) or 4
            shape = helper.make_tensor_value_info(value.name, self.kind, [None] * rank)
            model.graph.output[list(outputs).index(value.name)].CopyFrom(shape)
        return model


def rewrite(model, folder=None):
    made, changes = normfuse.onnx.rewrite(model.SerializeToString(), folder)
    parsed = onnx.ModelProto.FromString(made)
    onnx.checker.check_model(parsed)
    return parsed, changes


def operators(model):
    return [node.op_type for node in model.graph.node]


def check_equal(before, after, sizes=(2, CHANNELS, 6, 10), dtype="float32", tolerance=4e-6):
    """Outputs of both, beside those of the first in float64, as onnx's own evaluator computes them."""
    from onnx.reference import ReferenceEvaluator
    x = values(0, sizes, dtype, 2, 0.5)
    double = onnx.ModelProto()
    double.CopyFrom(before)
    for value in (*double.graph.input, *double.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in double.graph.initializer:
        if tensor.data_type in KINDS.values():
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("f8"), tensor.name))
    wanted = ReferenceEvaluator(double).run(None, {"x": x.astype("f8")})
    for want, got in zip(wanted, session(after).run(None, {"x": x})):
        assert got.shape == want.shape and got.dtype == x.dtype
        assert abs(got - want).max() <= tolerance * abs(want).max()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("activation", ["none", "silu", "silu swapped", "relu"])
def test_group_norm_is_found(activation, swapped):
    graph = Builder()
    y = graph.group_norm("x", swapped=swapped)
    if activation == "silu":
        y = graph.silu(y)
    elif activation == "silu swapped":
        y = graph.add("Mul", [graph.add("Sigmoid", [y]), y])
    elif activation == "relu":
        y = graph.add("Relu", [y])
    before = graph.model(y)
    after, changes = rewrite(before)
    assert operators(after) == ["GroupNorm"] and len(after.graph.initializer) == 2
    node = after.graph.node[0]
    assert node.domain == "normfuse" and list(node.output) == [y]
    settings = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert settings.pop("activation", b"none").decode() == activation.split()[0]
    assert settings == {"groups": GROUPS, "epsilon": numpy.float32(1e-3)}
    assert len(changes) == 1 and str(changes[0]).startswith("replaced InstanceNormalization_")
    check_equal(before, after)


@pytest.mark.parametrize("after", [None, [2, CHANNELS, 6, 10]], ids=["Shape", "sizes"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("bias", ["embedding", "nc11", "1c11", "c11"])
def test_a_bias_before_a_group_norm(bias, swapped, after):
    graph = Builder()
    other = graph.add("GlobalAveragePool", ["x"]) if bias == "embedding" else graph.vector(
        5, {**SKIPS, "nc11": (2, CHANNELS, 1, 1)}[bias])
    total = graph.add("Add", [other, "x"] if swapped else ["x", other])
    y = graph.silu(graph.group_norm(total, after=after))
    before = graph.model(y)
    made, changes = rewrite(before)
    assert operators(made) == [*(["GlobalAveragePool"] if bias == "embedding" else []), "SkipGroupNorm"]
    assert made.graph.node[-1].input[0] == "x" and made.graph.node[-1].input[3] == other
    assert "SkipGroupNorm of 4 groups with silu for " in str(changes[0])
    check_equal(before, made)


@pytest.mark.parametrize("name",
                         ["used", "output", "samples", "shape", "row", "constant behind a Conv", "by group", "Sub",
                                  "unknown samples", "Shape that is used"])
def test_an_addition_that_stays(name):
    """The sum is used elsewhere, or is not of x's shape, or is no bias of samples and channels."""
    opset = 18 if name == "by group" else 17
    graph, x = Builder(opset, (1, CHANNELS, 6, 10) if name == "samples" else (2, CHANNELS, 6, 10)), "x"
    shape = {"samples": (2, CHANNELS, 1, 1), "row": (CHANNELS, 6, 1),
             "shape": (2, CHANNELS, 6, 10)}.get(name, (CHANNELS, 1, 1))
    if "Conv" in name:
        x = graph.add("Conv", [x, graph.vector(6, (CHANNELS, CHANNELS, 1, 1))])
    other = graph.vector(5, shape)
    if name == "unknown samples":
        other = graph.add("Reshape",
                          [graph.add("GlobalAveragePool", ["x"]), graph.constant(numpy.array([-1, CHANNELS, 1, 1]))])
    total = graph.add("Sub" if name == "Sub" else "Add", [x, other])
    if name == "by group":
        y = graph.add("GroupNormalization", [total, graph.vector(1, (GROUPS,)), graph.vector(2, (GROUPS,))],
                      num_groups=GROUPS)
    else:
        y = graph.group_norm(total)
    outputs = [y, graph.add("Relu", [total])] if name == "used" else [y, total] if name == "output" else [y]
    if name == "Shape that is used":
        shape, = (node.output[0] for node in graph.nodes if node.op_type == "Shape")
        outputs.append(graph.add("Reshape", [graph.add("Relu", [y]), shape]))
    before = graph.model(*outputs, sizes=["n", CHANNELS, 6, 10] if name == "unknown samples" else None,
                         ir=9 if opset == 18 else 8)
    made, _ = rewrite(before)
    assert operators(made).count("GroupNorm") == 1 and "SkipGroupNorm" not in operators(made)
    assert operators(made).count("Sub" if name == "Sub" else "Add") == 1
    if name != "by group":  # which onnx's own evaluator takes for by channel
        check_equal(before, made, (2, CHANNELS, 6, 10) if name != "samples" else (1, CHANNELS, 6, 10))


def settings_of(node):
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


CHAINS = [{}, {"square": "Mul"}, {"quotient": "Reciprocal"}, {"quotient": "Div of 1"}, {"twice": True},
          {"swapped": True},
          {"swapped": True, "quotient": "Reciprocal"}, {"shape": (1,)}, {"statistics": "mean_square"},
          {"statistics": "mean_square", "quotient": "Reciprocal", "square": "Mul", "shape": (1,)}]


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("last", [False, True], ids=["second axis", "last axis"])
@pytest.mark.parametrize("words", CHAINS, ids=str)
def test_channel_norms_that_models_write(words, last, opset):
    graph = Builder(opset, (2, 6, 10, CHANNELS) if last else (2, CHANNELS, 6, 10))
    scale, bias = (graph.vector(seed, (CHANNELS,) if last else (CHANNELS, 1, 1)) for seed in (1, 2))
    y = graph.silu(graph.channel_chain("x", (-1 if opset == 13 else 3) if last else 1, scale=scale, bias=bias, **words))
    before = graph.model(y, ir=8)
    after, changes = rewrite(before)
    assert operators(after) == ["ChannelNorm"] and len(after.graph.initializer) == 2, list(map(str, changes))
    settings = settings_of(after.graph.node[0])
    assert settings.pop("channels_last", 0) == last and settings.pop("statistics",
                                                                     b"mean_and_variance").decode() == words.get(
        "statistics", "mean_and_variance")
    assert settings == {"epsilon": 0.125, "activation": b"silu"}
    assert len(changes) == 1 and changes[0].kind == "ReduceMean"
    check_equal(before, after, tuple(graph.sizes))


@pytest.mark.parametrize("scale", [None, "number", (CHANNELS, 1, 1), (1, CHANNELS, 1, 1)], ids=str)
@pytest.mark.parametrize("bias", [None, "number", (CHANNELS, 1, 1), (1, CHANNELS, 1, 1)], ids=str)
def test_parameters_of_a_channel_norm(scale, bias):
    graph = Builder()
    scale, bias = (None if shape is None else graph.scalar(0.3 + seed) if shape == "number"
                   else graph.vector(seed, shape) for seed, shape in enumerate((scale, bias)))
    before = graph.model(graph.channel_chain("x", scale=scale, bias=bias))
    after, _ = rewrite(before)
    assert operators(after) == ["ChannelNorm"]
    check_equal(before, after)


@pytest.mark.parametrize("scale", [(CHANNELS,), (1, 1, CHANNELS), (1, 1, 1, CHANNELS)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_of_the_last_axis(scale, transposed):
    """Between Transposes those of one axis are of the second axis, too."""
    graph = Builder(17, (2, CHANNELS, 6, 10) if transposed else (2, 6, 10, CHANNELS))
    x = graph.add("Transpose", ["x"], perm=[0, 2, 3, 1]) if transposed else "x"
    y = graph.channel_chain(x, 3, scale=graph.vector(1, scale), bias=graph.vector(2))
    before = graph.model(graph.add("Transpose", [y], perm=[0, 3, 1, 2]) if transposed else y)
    after, _ = rewrite(before)
    assert operators(after) == (["Transpose", "ChannelNorm", "Transpose"] if transposed and len(scale) > 1
                                else ["ChannelNorm"])
    check_equal(before, after, tuple(graph.sizes))


@pytest.mark.parametrize("words",
                         [{}, {"expand": None}, {"expand": [2, CHANNELS, 6, 10]}, {"expand": [1, CHANNELS, 6, 1]},
                                   {"epsilon": 0.0}, {"epsilon": 100.0}], ids=str)
@pytest.mark.parametrize("scale", [False, True])
def test_normalize_is_found(words, scale):
    graph = Builder(17)
    y = graph.normalize("x", **words)
    y = graph.add("Mul", [y, graph.vector(1, (CHANNELS, 1, 1))]) if scale else y
    before = graph.model(y)
    after, _ = rewrite(before)
    assert operators(after) == ["ChannelNorm"]
    assert settings_of(after.graph.node[0]) == {"epsilon": words.get("epsilon", 0.5), "statistics": b"mean_square",
                                                "eps_kind": b"of_norm"}
    check_equal(before, after)


def layer_norm(graph, x, operator="LayerNormalization", bias=True, outputs=1, size=CHANNELS, **words):
    inputs = [x, *(graph.vector(seed, (size,)) for seed in range(1, 3 if bias else 2))]
    y = graph.add(operator, inputs, epsilon=0.125, **words)
    graph.nodes[-1].output.extend(f"more{i}" for i in range(1, outputs))
    return y


@pytest.mark.parametrize("operator,bias", [("LayerNormalization", True), ("LayerNormalization", False),
                                           ("RMSNormalization", False)])
@pytest.mark.parametrize("around",
                         ["nothing", "Transposes", "Transposes that others use", "Transpose", "activation inside"])
@pytest.mark.parametrize("axis", [{}, {"axis": 3}], ids=str)
def test_layer_normalization_is_found(axis, around, operator, bias):
    graph = Builder(23, (2, 6, 10, CHANNELS) if around == "nothing" else (2, CHANNELS, 6, 10))
    x = "x" if around == "nothing" else graph.add("Transpose", ["x"], perm=[0, 2, 3, 1])
    y = layer_norm(graph, x, operator, bias, **axis)
    y = graph.silu(y) if around == "activation inside" else y
    y = graph.add("Transpose", [y], perm=[0, 3, 1, 2]) if around not in ("nothing", "Transpose") else y
    y = graph.add("Relu", [y]) if around == "Transposes" else y
    outputs = [y, graph.add("Neg", [x])] if around == "Transposes that others use" else [y]
    before = graph.model(*outputs, ir=11)
    after, changes = rewrite(before)
    left = {"Transpose": ["Transpose", "ChannelNorm"],
            "Transposes that others use": ["Transpose", "ChannelNorm", "Neg"]}
    assert operators(after) == left.get(around, ["ChannelNorm"]), list(map(str, changes))
    node = next(node for node in after.graph.node if node.domain)
    assert settings_of(node).get("channels_last", 0) == (around in ("nothing", "Transpose"))
    activations = {"Transposes": b"relu", "activation inside": b"silu"}
    assert settings_of(node).get("activation", b"") == activations.get(around, b"")
    check_equal(before, after, tuple(graph.sizes))


def chain_that_is_used(graph, at):
    y = graph.channel_chain("x")
    return y, graph.add("Neg", [graph.nodes[at].output[0]])


def mean_of_another(graph):
    """Layer norm whose numerator is of another mean."""
    y = graph.channel_chain("x")
    quotient = graph.nodes.pop()
    quotient.input[0] = graph.add("Sub", ["x", graph.reduce("ReduceMean", "x", 2, name="another")], name="numerator")
    graph.nodes.append(quotient)
    return y,


def roots(graph, squares, numerator="x", epsilon=None):
    total = graph.add("Add", [graph.reduce("ReduceMean", squares, 1), epsilon or graph.scalar(1000)])
    return graph.add("Div", [numerator, graph.add("Sqrt", [total])]),


NO_CHANNEL_NORMS = {
    **{f"the value of node {at} is used": lambda graph, at=at: chain_that_is_used(graph, at) for at in range(6)},
    "positions": lambda graph: (graph.channel_chain("x", 2),),
    "a cube": lambda graph: roots(graph, graph.add("Pow", ["x", graph.scalar(3)])),
    "a product of two": lambda graph: roots(graph, graph.add("Mul", ["x", graph.add("Abs", ["x"])])),
    "another numerator": lambda graph: roots(graph, graph.add("Mul", ["x", "x"]), graph.add("Abs", ["x"])),
    "a mean of another axis": mean_of_another,
    "an epsilon by channel": lambda graph: roots(graph, graph.add("Mul", ["x", "x"]),
                                                 epsilon=graph.vector(5, (CHANNELS, 1, 1))),
    "normalize that is not multiplied": lambda graph: (graph.normalize("x", factor=1.0),),
    "normalize to another shape": lambda graph: (graph.normalize("x", expand=[3, 1, 1, 1, 1]),),
    "a norm of positions": lambda graph: (graph.normalize("x", 2),),
    "several axes": lambda graph: (graph.add("LayerNormalization",
                                             ["x", graph.vector(1, (6, 10)), graph.vector(2, (6, 10))], axis=2),),
    "a mean that is used": lambda graph: (layer_norm(graph, "x", outputs=2, size=10), graph.add("Neg", ["more1"])),
}


@pytest.mark.parametrize("name", NO_CHANNEL_NORMS)
def test_what_is_no_channel_norm(name):
    graph = Builder(17)
    before = graph.model(*NO_CHANNEL_NORMS[name](graph))
    after, changes = rewrite(before)
    assert operators(after) == operators(before)
    assert all("the rewritten graph would not have" not in change.note for change in changes)  # which is the last check


def test_an_epsilon_that_float32_does_not_hold():
    """The attribute is of float32; in float64 another epsilon is another result."""
    for epsilon, found in ((0.1, False), (0.125, True)):
        graph = Builder(17, dtype="float64")
        before = graph.model(graph.channel_chain("x", epsilon=epsilon))
        after, changes = rewrite(before)
        assert operators(after) == (["ChannelNorm"] if found else operators(before))
        assert found or "float32" in str(changes[0])
        check_equal(before, after, dtype="float64", tolerance=1e-14)


def test_factors_of_float64():
    """One number for all channels, which float32 does not hold."""
    graph = Builder(17, dtype="float64")
    before = graph.model(graph.channel_chain("x", scale=graph.scalar(0.1), bias=graph.scalar(0.3)))
    after, _ = rewrite(before)
    assert operators(after) == ["ChannelNorm"]
    check_equal(before, after, dtype="float64", tolerance=1e-14)


@pytest.mark.parametrize("opset,scale", [(18, GROUPS), (21, CHANNELS)])
def test_group_normalization_is_found(opset, scale):
    graph = Builder(opset)
    y = graph.silu(graph.add("GroupNormalization", ["x", graph.vector(1, (scale,)), graph.vector(2, (scale,))],
                             num_groups=GROUPS))
    before = graph.model(y, ir=10)
    after, _ = rewrite(before)
    assert operators(after) == ["GroupNorm"]
    if opset == 21:
        check_equal(before, after)
    x = values(0, (2, CHANNELS, 6, 10), scale=2, shift=0.5)
    numpy.testing.assert_allclose(session(after).run(None, {"x": x})[0], session(before).run(None, {"x": x})[0],
                                  rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator,words", [
    ("Relu", {}), ("LeakyRelu", {"alpha": 0.2}), ("LeakyRelu", {}), ("Elu", {"alpha": 0.5}), ("HardSwish", {}),
    ("Mish", {}), ("Gelu", {}), ("Gelu", {"approximate": "tanh"}), ("Clip", {})], ids=str)
def test_activations_are_found(operator, words):
    graph = Builder(20)
    y = graph.add("InstanceNormalization", ["x", graph.vector(1), graph.vector(2)])
    more = [graph.constant(numpy.float32(limit)) for limit in (0, 6)] if operator == "Clip" else []
    y = graph.add(operator, [y, *more], **words)
    before = graph.model(y, ir=9)
    after, _ = rewrite(before)
    assert operators(after) == ["InstanceNorm"]
    assert "activation" in {attribute.name for attribute in after.graph.node[0].attribute}
    check_equal(before, after)


def test_batch_norm_is_found():
    graph = Builder()
    y = graph.add("BatchNormalization", ["x", graph.vector(1), graph.vector(2), graph.vector(3), graph.vector(4)])
    before = graph.model(graph.add("Relu", [y]))
    after, changes = rewrite(before)
    assert operators(after) == ["BatchNorm"] and "BatchNorm with relu for 2 nodes" in str(changes[0])
    check_equal(before, after)


def test_batch_norm_behind_a_convolution_is_left(tmp_path):
    graph = Builder()
    y = graph.add("Conv", ["x", graph.vector(5, (CHANNELS, CHANNELS, 1, 1))])
    y = graph.add("BatchNormalization", [y, *(graph.vector(seed) for seed in range(4))])
    before = graph.model(graph.add("Relu", [y]))
    made, changes = normfuse.onnx.rewrite(before.SerializeToString())
    assert made == before.SerializeToString()
    assert [str(change) for change in changes] == [
        "left BatchNormalization_v1 (BatchNormalization): ONNX Runtime folds it into the Conv before it"]
    options = onnxruntime.SessionOptions()  # whether it does
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 4
    onnxruntime.InferenceSession(made, options)
    assert "BatchNormalization" not in operators(onnx.load(tmp_path / "optimized.onnx"))


# Changes that keep a group norm from being one; it is then an instance norm, and the words say why.
NOT_GROUP_NORMS = {
    "scale": ({"ones": 2.0}, "scale and bias are not 1 and 0"),
    "bias": ({"zeros": 1.0}, "scale and bias are not 1 and 0"),
    "groups": ({"groups": 3, "before": [0, 3, -1]}, "does not divide the 8 channels"),
    "samples": ({"before": [4, GROUPS, -1], "after": [2, CHANNELS, 6, 10]}, "changes the samples"),
    "back": ({"after": [2, CHANNELS, 10, 6], "bias": None}, "not known to give the shape"),
    "back, two": ({"after": [2, CHANNELS, -1, 6]}, "not known to give the shape"),
}


@pytest.mark.parametrize("name", NOT_GROUP_NORMS)
def test_what_is_no_group_norm(name):
    words, reason = NOT_GROUP_NORMS[name]
    graph = Builder(sizes=(2, CHANNELS, 6, 12) if name == "groups" else (2, CHANNELS, 6, 10))
    before = graph.model(graph.group_norm("x", **words))
    after, changes = rewrite(before)
    assert "GroupNorm" not in operators(after) and operators(after).count("InstanceNorm") == 1
    assert reason in str(changes[0])
    check_equal(before, after, graph.sizes)


@pytest.mark.parametrize("after",
                         [[0, CHANNELS, 6, 10], [2, CHANNELS, 6, 10], [2, CHANNELS, -1, 10], [-1, CHANNELS, 6, 10]],
                         ids=str)
def test_constant_shapes(after):
    graph = Builder()
    before = graph.model(graph.group_norm("x", before=[2, GROUPS, -1] if after[0] else [0, GROUPS, 120], after=after))
    made, _ = rewrite(before)
    assert operators(made) == ["GroupNorm"]
    check_equal(before, made)


def test_named_sizes():
    graph = Builder()
    before = graph.model(graph.silu(graph.group_norm("x")), sizes=["n", CHANNELS, "h", "w"])
    after, _ = rewrite(before)
    assert operators(after) == ["GroupNorm"]
    for sizes in ((1, CHANNELS, 4, 4), (3, CHANNELS, 7, 5)):
        check_equal(before, after, sizes)
    graph = Builder()
    after, changes = rewrite(graph.model(graph.group_norm("x"), sizes=["n", "c", "h", "w"]))
    assert "GroupNorm" not in operators(after) and "channels of its input are not known" in str(changes[0])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (1, CHANNELS, 1, 1)], ids=str)
def test_scale_of_other_shapes(shape, dtype):
    """Without affine parameters exporters multiply by 1 and add 0. A new initializer takes their place."""
    graph = Builder(dtype=dtype)
    y = graph.group_norm("x", scale=graph.constant(values(7, shape, dtype)),
                         bias=graph.constant(values(8, shape, dtype)))
    before = graph.model(y)
    after, _ = rewrite(before)
    assert operators(after) == ["GroupNorm"] and len(after.graph.initializer) == 2
    if dtype == "float32":
        check_equal(before, after)
    else:
        single = Builder()
        single.nodes, single.initializers = graph.nodes, {
            name: array.astype("float32") if array.dtype == "float16" else array
            for name, array in graph.initializers.items()}
        x = values(0, (2, CHANNELS, 6, 10), dtype, 2, 0.5)
        want = session(single.model(y)).run(None, {"x": x.astype("float32")})[0]
        numpy.testing.assert_allclose(session(after).run(None, {"x": x})[0], want, rtol=1e-2, atol=1e-2)


def test_scale_for_each_sample_is_left():
    graph = Builder()
    y = graph.group_norm("x", scale=graph.vector(1, (2, CHANNELS, 1, 1)), bias=graph.vector(2, (1, 1, 6, 10)))
    before = graph.model(y)
    after, _ = rewrite(before)
    assert operators(after) == ["GroupNorm", "Mul", "Add"]
    check_equal(before, after)


USED = {"norm": 1, "reshaped": 0, "back": 3, "product": 4, "sum": 5, "sigmoid": 6}


@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("how", ["node", "output"])
def test_what_others_use_stays(name, how):
    graph = Builder()
    y = graph.silu(graph.group_norm("x"))
    used = graph.nodes[USED[name]].output[0]
    outputs = [y, used if how == "output" else graph.add("Neg", [used])]
    before = graph.model(*outputs)
    after, _ = rewrite(before)
    assert sum(node.domain == "normfuse" for node in after.graph.node) == 1
    check_equal(before, after)


def test_what_a_subgraph_uses_stays():
    graph = Builder()
    norm = graph.group_norm("x")
    y = graph.silu(norm)
    branch = helper.make_graph([helper.make_node("Neg", [norm], ["negative"])], "branch", [],
                               [helper.make_tensor_value_info("negative", TensorProto.FLOAT, None)])
    other = helper.make_graph([helper.make_node("InstanceNormalization", [norm, "one", "zero"], ["inner"])], "other",
                              [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)])
    for name, value in (("one", 1), ("zero", 0)):
        graph.constant(numpy.full(CHANNELS, value, "float32"), name)
    z = graph.add("If", [graph.constant(numpy.array(True))], then_branch=branch, else_branch=other)
    before = graph.model(y, z)
    after, changes = rewrite(before)
    assert operators(after) == ["GroupNorm", "Sigmoid", "Mul", "If"]
    assert "it is in a subgraph" in str(changes[1])
    assert {"one", "zero"} <= {tensor.name for tensor in after.graph.initializer}
    check_equal(before, after)


def test_sigmoid_of_another_value():
    graph = Builder()
    norm = graph.group_norm("x")
    other = graph.add("Mul", [norm, graph.add("Sigmoid", ["x"])])
    before = graph.model(other, graph.add("Sigmoid", [norm]))
    after, _ = rewrite(before)
    assert operators(after).count("Mul") == 1
    check_equal(before, after)


def test_a_shape_that_two_norms_share():
    """One Reshape's shape, 1, 0 and Shape for a norm that is replaced and for nodes that stay."""
    graph = Builder()
    y = graph.silu(graph.group_norm("x"))
    shape, ones = graph.nodes[0].input[1], graph.nodes[1].input[1]
    kept = graph.add("ReduceSum", [graph.add("Mul", [graph.add("Reshape", [y, shape]), graph.add("Reshape", [
        ones, graph.constant(numpy.array([1, GROUPS, 1]))])]), graph.constant(numpy.array([1]))])
    size = graph.add("Cast", [graph.nodes[2].output[0]], to=TensorProto.FLOAT)
    before = graph.model(graph.add("Reshape", [kept, graph.constant(numpy.array([2, -1]))]), size)
    after, _ = rewrite(before)
    assert "GroupNorm" in operators(after) and "Shape" in operators(after)
    check_equal(before, after)


def test_initializers_that_are_inputs_stay():
    graph = Builder()
    before = graph.model(graph.group_norm("x"))
    for name in ("c1", "c3"):  # the scale of the instance norm, which a caller may then set, and that of the Mul
        before.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT,
                                                                graph.initializers[name].shape))
    after, changes = rewrite(before)
    assert "GroupNorm" not in operators(after) and "scale and bias are not 1 and 0" in str(changes[0])
    check_equal(before, after)


def test_norms_in_functions_are_left():
    graph = Builder()
    before = graph.model(graph.add("F", ["x"], domain="local"))
    before.opset_import.append(helper.make_opsetid("local", 1))
    before.functions.append(helper.make_function("local", "F", ["a"], ["b"], [
        helper.make_node("InstanceNormalization", ["a", "a", "a"], ["b"], "inside")], [helper.make_opsetid("", 17)]))
    made, changes = normfuse.onnx.rewrite(before.SerializeToString())
    assert made == before.SerializeToString()
    assert [str(change) for change in changes] == ["left inside (InstanceNormalization): it is in the function F"]


# ---- what is kept ---------------------------------------------------------------------------------------------------


def unknown(text):
    """A field that no version of ONNX has."""
    return _rewrite._encode(1000, text)


def large_model():
    graph = Builder(21)
    y = graph.add("Conv", ["x", graph.vector(3, (CHANNELS, CHANNELS, 1, 1))])
    y = graph.silu(graph.group_norm(y))
    y = graph.add("Conv", [y, graph.vector(4, (CHANNELS, CHANNELS, 1, 1))])
    model = graph.model(y)
    model.producer_name, model.doc_string = "a producer", "a text"
    helper.set_model_props(model, {"key": "value"})
    model.graph.doc_string = "another text"
    model.graph.node[0].doc_string = "a node"
    return graph, model


def test_bytes_are_kept():
    """Every field but those of the replaced nodes, in the order and with the bytes that it had, unknown ones too."""
    _, model = large_model()
    fields = list(_rewrite._fields(memoryview(model.SerializeToString())))
    inside = next(payload for number, _, payload in fields if number == _rewrite.MODEL_GRAPH)
    parts = [bytes(field) for _, field, _ in _rewrite._fields(inside)]
    parts.insert(0, unknown(b"in the graph"))  # in front of known fields, where a parser would not write it
    first = next(i for i, part in enumerate(parts) if part[:1] == b"\x0a")
    payload = next(p for n, _, p in _rewrite._fields(memoryview(parts[first])))
    parts[first] = _rewrite._encode(_rewrite.GRAPH_NODE, unknown(b"in a node") + bytes(payload))
    source = unknown(b"in the model") + _rewrite._encode(_rewrite.MODEL_GRAPH, b"".join(parts)) + b"".join(
        bytes(field) for number, field, _ in fields if number != _rewrite.MODEL_GRAPH)
    made, changes = normfuse.onnx.rewrite(source)
    assert [change.operator for change in changes] == ["GroupNorm of 4 groups with silu"]
    before, after = ([(n, bytes(f), bytes(p)) for n, f, p in _rewrite._fields(memoryview(data))]
                     for data in (source, made))
    assert [field for number, field, _ in before if number != _rewrite.MODEL_GRAPH] == \
        [field for number, field, _ in after if number != _rewrite.MODEL_GRAPH][:-1]
    assert onnx.OperatorSetIdProto.FromString(after[-1][2]).domain == "normfuse"
    old, new = ([bytes(f) for _, f, _ in _rewrite._fields(memoryview(payload))] for data in (before, after)
                for number, _, payload in data if number == _rewrite.MODEL_GRAPH)
    added = [field for field in new if field not in old]
    assert len(added) == 1 and b"GroupNorm" in added[0]
    kept = [field for field in new if field in old]
    assert kept == [field for field in old if field in kept]
    gone = [field for field in old if field not in new]
    # Seven nodes with the Shape, and three initializers: the Reshape's shape, 1 and 0.
    assert len(gone) == 8 + 3 and all(field[:1] in (b"\x0a", b"\x2a") for field in gone)
    assert unknown(b"in the graph") in kept and any(b"in a node" in field for field in kept)


def test_nothing_to_do_is_a_copy():
    graph = Builder()
    model = graph.model(graph.silu("x"))
    source = unknown(b"first") + model.SerializeToString()
    assert normfuse.onnx.rewrite(source) == (source, [])


def test_a_second_rewrite_is_a_copy():
    graph = Builder()
    made, _ = normfuse.onnx.rewrite(graph.model(graph.silu(graph.group_norm("x"))).SerializeToString())
    assert normfuse.onnx.rewrite(made) == (made, [])


@pytest.mark.parametrize("cut", range(0, 100, 7))
def test_files_that_are_cut_off(cut):
    graph = Builder()
    source = graph.model(graph.silu(graph.group_norm("x"))).SerializeToString()
    for data in (source[:len(source) * cut // 100], source[:-1 - cut]):
        with pytest.raises(ValueError, match="not a serialized ONNX model"):
            normfuse.onnx.rewrite(data)


def external_model(folder):
    """All but shapes, which ONNX Runtime wants in the model."""
    _, model = large_model()
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            onnx.external_data_helper.set_external_data(tensor, "weights.bin")
    onnx.save_model(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_external_data_stays_outside(tmp_path):
    path = external_model(tmp_path)
    weights = (tmp_path / "weights.bin").read_bytes()
    x = values(0, (2, CHANNELS, 6, 10))
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(normfuse.onnx.library_path())
    want = onnxruntime.InferenceSession(str(path), options).run(None, {"x": x})[0]
    changes = normfuse.onnx.rewrite_file(path, tmp_path / "rewritten.onnx")
    assert [change.operator for change in changes] == ["GroupNorm of 4 groups with silu"]
    assert (tmp_path / "weights.bin").read_bytes() == weights and len(list(tmp_path.iterdir())) == 3
    made = onnx.load(tmp_path / "rewritten.onnx", load_external_data=False)
    assert len(made.graph.initializer) == 4
    assert all(tensor.data_location == TensorProto.EXTERNAL for tensor in made.graph.initializer)
    got = onnxruntime.InferenceSession(str(tmp_path / "rewritten.onnx"), options).run(None, {"x": x})[0]
    numpy.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="weights.bin"):
        normfuse.onnx.rewrite_file(path, tmp_path / "other/model.onnx")
    assert not list((tmp_path / "other").iterdir())
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        normfuse.onnx.rewrite_file(path, tmp_path / "rewritten.onnx")


def command(*words, folder):
    return subprocess.run([sys.executable, "-m", "normfuse.onnx", *map(str, words)], cwd=folder, text=True, timeout=120,
                          capture_output=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})


def test_command(tmp_path):
    graph = Builder()
    y = graph.silu(graph.group_norm("x"))
    z = graph.add("InstanceNormalization", ["x", graph.vector(1), graph.vector(2)])
    (tmp_path / "model.onnx").write_bytes(graph.model(y, z).SerializeToString())
    done = command("rewrite", "model.onnx", "-o", "out.onnx", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "replaced InstanceNormalization_v1 (InstanceNormalization): GroupNorm of 4 groups with silu for 7 nodes",
        "replaced InstanceNormalization_v8 (InstanceNormalization): InstanceNorm for 1 node", "2 replaced, 0 left"]
    assert operators(onnx.load(tmp_path / "out.onnx")) == ["GroupNorm", "InstanceNorm"]
    assert command("rewrite", "out.onnx", "-o", "out.onnx", folder=tmp_path).stdout == "0 replaced, 0 left\n"
    assert command("library", folder=tmp_path).stdout.strip() == normfuse.onnx.library_path()
    for words in (["rewrite", "missing.onnx", "-o", "y.onnx"], ["rewrite", "noise", "-o", "y.onnx"]):
        (tmp_path / "noise").write_bytes(b"\xff" * 100)
        done = command(*words, folder=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("normfuse.onnx: ") and not (tmp_path / "y.onnx").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "noise", "out.onnx"]


# ---- a model --------------------------------------------------------------------------------------------------------


def unet():
    import torch

    class Block(torch.nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.norms = torch.nn.ModuleList([torch.nn.GroupNorm(8, inputs), torch.nn.GroupNorm(8, outputs)])
            self.convs = torch.nn.ModuleList([torch.nn.Conv2d(inputs, outputs, 3, padding=1),
                                              torch.nn.Conv2d(outputs, outputs, 3, padding=1)])
            self.embed = torch.nn.Linear(16, outputs)
            self.short = torch.nn.Conv2d(inputs, outputs, 1) if inputs != outputs else torch.nn.Identity()

        def forward(self, x, time):
            h = self.convs[0](torch.nn.functional.silu(self.norms[0](x)))
            h = h + self.embed(time)[:, :, None, None]
            return self.short(x) + self.convs[1](torch.nn.functional.silu(self.norms[1](h)))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv2d(4, 32, 3, padding=1)
            self.down, self.middle, self.up = Block(32, 64), Block(64, 64), Block(96, 32)
            self.last = torch.nn.Sequential(torch.nn.GroupNorm(8, 32), torch.nn.SiLU(),
                                            torch.nn.Conv2d(32, 4, 3, padding=1))

        def forward(self, x, time):
            a = self.first(x)
            b = self.middle(self.down(torch.nn.functional.avg_pool2d(a, 2), time), time)
            b = torch.nn.functional.interpolate(b, scale_factor=2.0, mode="nearest")
            return self.last(self.up(torch.cat([a, b], 1), time))
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return net


@pytest.mark.sampled()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter,opset", [("torchscript", 17), ("dynamo", 18), ("dynamo", 21)])
@pytest.mark.parametrize("named", [False, True], ids=["sizes", "names"])
def test_unet_of_pytorch(exporter, opset, named, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript, which torch.onnx.export needs, is not installed")
    net = unet()
    inputs = torch.randn(2, 4, 32, 32), torch.randn(2, 16)
    words = {}
    if named and exporter == "dynamo":
        words["dynamic_shapes"] = {"x": {0: "n", 2: "h", 3: "w"}, "time": {0: "n"}}
    elif named:
        words["dynamic_axes"] = {"x": {0: "n", 2: "h", 3: "w"}, "time": {0: "n"}}
    torch.onnx.export(net, inputs, str(tmp_path / "unet.onnx"), input_names=["x", "time"], opset_version=opset,
                      dynamo=exporter == "dynamo", external_data=False, **words)
    changes = normfuse.onnx.rewrite_file(tmp_path / "unet.onnx", tmp_path / "rewritten.onnx")
    # torch.export knows that the embedding has the samples of what it is added to.
    skips = 3 if exporter == "dynamo" else 0
    found = [change.operator for change in changes]
    assert sorted(found) == ["GroupNorm of 8 groups with silu"] * (7 - skips) + \
        ["SkipGroupNorm of 8 groups with silu"] * skips, list(map(str, changes))
    before, after = (onnx.load(tmp_path / name) for name in ("unet.onnx", "rewritten.onnx"))
    onnx.checker.check_model(after)
    left = {"InstanceNormalization", "GroupNormalization", "Sigmoid"} & set(operators(after))
    assert not left and operators(after).count("GroupNorm") == 7 - skips
    for sizes in ((2, 32), (1, 48)) if named else ((2, 32),):
        x, time = torch.randn(sizes[0], 4, sizes[1], sizes[1]), torch.randn(sizes[0], 16)
        with torch.no_grad():
            want = net.double()(x.double(), time.double()).numpy()
        stock, got = (session(model).run(None, {"x": x.numpy(), "time": time.numpy()})[0] for model in (before, after))
        largest = abs(want).max()
        assert abs(got - want).max() <= 1e-5 * largest
        # No further from float64 than ONNX Runtime's own, but for what chance gives.
        assert abs(got - want).max() <= 2 * abs(stock - want).max() + 1e-7 * largest


def layer_of_channels(name):
    import torch
    functional = torch.nn.functional

    class OfChannels(torch.nn.Module):
        """Norms of the second axis, as models write them."""

        def __init__(self):
            super().__init__()
            self.weight, self.bias = (torch.nn.Parameter(torch.randn(32)) for _ in range(2))

        def forward(self, x):
            if name == "permuted":
                y = functional.layer_norm(x.permute(0, 2, 3, 1), (32,), self.weight, self.bias, 1e-6)
                return y.permute(0, 3, 1, 2)
            if name == "normalize":
                return functional.normalize(x, dim=1) * 32**0.5 * self.weight[:, None, None]
            if name == "mean square":
                x = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
            else:
                mean = x.mean(1, keepdim=True)
                x = (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + 1e-6)
            return self.weight[:, None, None] * x + self.bias[:, None, None]
    if name in ("permuted", "written", "normalize", "mean square"):
        return OfChannels()
    if name == "RMSNorm":
        return torch.nn.RMSNorm(32, eps=1e-6)
    if name == "LayerNorm":
        return torch.nn.LayerNorm(32)
    from test_models import load, load_torchvision
    torchvision = load_torchvision()
    if name == "torchvision's block":
        return torchvision.models.convnext.CNBlock(32, 1.0, 0.0)
    if name == "torchvision's LayerNorm2d":
        return torchvision.models.convnext.LayerNorm2d(32)
    timm = load("timm")
    if name == "timm's block":
        return timm.models.convnext.ConvNeXtBlock(32, conv_mlp=True)
    return getattr(timm.layers, name)(32)


@pytest.mark.sampled(times=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter,opset", [("torchscript", 13), ("torchscript", 17), ("dynamo", 18), ("dynamo", 23)])
@pytest.mark.parametrize("name",
                         ["permuted", "written", "mean square", "normalize", "LayerNorm", "RMSNorm", "LayerNorm2d",
                          "RmsNorm2d",
                                  "timm's block", "torchvision's LayerNorm2d", "torchvision's block"])
def test_channel_norms_of_pytorch(name, exporter, opset, tmp_path):
    """With SiLU behind them, with sizes that only the running program knows."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript, which torch.onnx.export needs, is not installed")
    if name == "RMSNorm" and exporter == "torchscript":
        pytest.skip("PyTorch's TorchScript exporter has no rms_norm")
    torch.manual_seed(0)
    layer = torch.nn.Sequential(layer_of_channels(name), torch.nn.SiLU()).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    is_last = name in ("LayerNorm", "RMSNorm")
    # dynamo expands normalize's norm to sizes that it computes; those of a fixed shape are constants.
    is_named = not (name == "normalize" and exporter == "dynamo")
    sizes = (2, 9, 11, 32) if is_last else (2, 32, 9, 11)
    axes = {0: "n", 1: "h", 2: "w"} if is_last else {0: "n", 2: "h", 3: "w"}
    words = {"dynamic_shapes": (axes,)} if exporter == "dynamo" else {"dynamic_axes": {"x": axes}}
    torch.onnx.export(layer, (torch.randn(sizes),), str(tmp_path / "layer.onnx"), input_names=["x"],
                      opset_version=opset,
                      dynamo=exporter == "dynamo", external_data=False, **(words if is_named else {}))
    changes = normfuse.onnx.rewrite_file(tmp_path / "layer.onnx", tmp_path / "rewritten.onnx")
    before, after = (onnx.load(tmp_path / file) for file in ("layer.onnx", "rewritten.onnx"))
    onnx.checker.check_model(after)
    of = " of mean squares" if name in ("mean square", "normalize", "RMSNorm", "RmsNorm2d") else ""
    with_ = "" if "block" in name else " with silu"
    assert [change.operator for change in changes] == [f"ChannelNorm{of}{with_}"], list(map(str, changes))
    if "torchvision's block" not in name:
        assert "Transpose" not in operators(after) and ("block" in name or operators(after) == ["ChannelNorm"])
    for samples, positions in ((3, (7, 5)), (1, (4, 6))) if is_named else ((2, (9, 11)),):
        x = torch.randn((samples, *positions, 32) if is_last else (samples, 32, *positions)) * 2 + 0.5
        with torch.no_grad():
            want = layer.double()(x.double()).numpy()
        stock, got = (session(model).run(None, {"x": x.numpy()})[0] for model in (before, after))
        largest = abs(want).max()
        assert abs(got - want).max() <= 1e-5 * largest
        # No further from float64 than ONNX Runtime's own, but for what chance gives.
        assert abs(got - want).max() <= 2 * abs(stock - want).max() + 3e-7 * largest


def test_example(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "examples/onnx_rewrite.py", "--rounds", "2"], cwd=tmp_path, text=True,
                          capture_output=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 replaced, 0 left" in done.stdout
    assert float(re.search(r"largest difference (\S+)", done.stdout)[1]) < 1e-4

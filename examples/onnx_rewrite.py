#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Puts normfuse's operators into an ONNX model, and runs it beside the original in ONNX Runtime on the CPU. Without a
model it takes two residual blocks as PyTorch exports them: group norm is InstanceNormalization between Reshapes, with
Mul and Add behind it, SiLU is Sigmoid and Mul.

    python examples/onnx_rewrite.py [MODEL.onnx] [--rounds 20] [--threads 2]

Needs `pip install normfuse[onnx]`."""
import argparse
import pathlib
import statistics
import tempfile
import time

import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import normfuse.onnx

CHANNELS, GROUPS, SIZE = 128, 32, 64


def add_group_norm_silu(nodes, weights, x, name):
    draw = numpy.random.default_rng(len(nodes))
    given = {"shape": numpy.array([0, GROUPS, -1]), "one": numpy.ones(GROUPS, "float32"),
             "zero": numpy.zeros(GROUPS, "float32"), "scale": draw.random((CHANNELS, 1, 1), "float32") + 0.5,
             "bias": draw.random((CHANNELS, 1, 1), "float32")}
    weights += [numpy_helper.from_array(array, f"{name}.{key}") for key, array in given.items()]
    for operator, inputs, output in (("Reshape", [x, "shape"], "groups"),
                                     ("InstanceNormalization", ["groups", "one", "zero"], "norm"),
                                     ("Shape", [x], "x_shape"), ("Reshape", ["norm", "x_shape"], "back"),
                                     ("Mul", ["back", "scale"], "scaled"), ("Add", ["scaled", "bias"], "shifted"),
                                     ("Sigmoid", ["shifted"], "sigmoid"), ("Mul", ["shifted", "sigmoid"], "silu")):
        inputs = [one if one == x else f"{name}.{one}" for one in inputs]
        nodes.append(helper.make_node(operator, inputs, [f"{name}.{output}"], f"{name}.{output}"))
    return f"{name}.silu"


def add_convolution(nodes, weights, x, name):
    draw = numpy.random.default_rng(len(nodes))
    weights.append(numpy_helper.from_array((draw.random((CHANNELS, CHANNELS, 1, 1), "float32") - 0.5) / 10,
                                           name + ".weight"))
    nodes.append(helper.make_node("Conv", [x, name + ".weight"], [name], name))
    return name


def make_model(path):
    nodes, weights, x = [], [], "x"
    for block in range(2):
        y = x
        for part in range(2):
            y = add_group_norm_silu(nodes, weights, y, f"block{block}.norm{part}")
            y = add_convolution(nodes, weights, y, f"block{block}.conv{part}")
        nodes.append(helper.make_node("Add", [x, y], [f"block{block}"], f"block{block}"))
        x = f"block{block}"
    sizes = [2, CHANNELS, SIZE, SIZE]
    graph = helper.make_graph(nodes, "blocks", [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)],
                              [helper.make_tensor_value_info(x, TensorProto.FLOAT, sizes)], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def make_inputs(session):
    """Random numbers for each input; sizes without a number are 1."""
    draw = numpy.random.default_rng(0)
    kinds = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}
    return {given.name: draw.standard_normal([size if isinstance(size, int) else 1 for size in given.shape]).astype(
        kinds[given.type]) for given in session.get_inputs()}


def run(path, threads, rounds):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(normfuse.onnx.library_path())
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs, seconds = make_inputs(session), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        outputs = session.run(None, inputs)
        seconds.append(time.perf_counter() - start)
    return outputs, statistics.median(seconds[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = words.model or pathlib.Path(folder) / "blocks.onnx"
        if words.model is None:
            make_model(path)
        rewritten = path.with_name(path.stem + "-normfuse.onnx")
        changes = normfuse.onnx.rewrite_file(path, rewritten)
        print(*changes, sep="\n")
        replaced = sum(change.operator is not None for change in changes)
        print(f"{replaced} replaced, {len(changes) - replaced} left")
        (before, stock), (after, ours) = (run(model, words.threads, words.rounds) for model in (path, rewritten))
    difference = max((abs(a - b).max() for a, b in zip(before, after) if a.size), default=0)
    print(f"before {stock * 1e3:.2f} ms, after {ours * 1e3:.2f} ms, largest difference {difference:.2g}")


if __name__ == "__main__":
    main()

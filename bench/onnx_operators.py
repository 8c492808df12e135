#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times normalizations in ONNX Runtime on the CPU as PyTorch exports them, beside the same model rewritten by
normfuse.onnx: single layers, and a UNet where PyTorch is installed. Rows, JSON a line, go to standard output.

Both sessions are in this process and have threads of their own, which spin for a while behind each run. So they take
turns in blocks of calls with a pause in front, and the first calls of a block are not counted. Inputs and outputs are
bound: memory is neither allocated nor copied. A row has the medians and their ratio.

    build/venv-torch/bin/python bench/onnx_operators.py >bench/results/DATE-MACHINE-onnx-operators.jsonl
"""
import argparse
import io
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python/tests")]

import numpy  # noqa: E402
import onnxruntime  # noqa: E402

import normfuse.onnx  # noqa: E402
import test_onnx  # noqa: E402

BLOCK, UNCOUNTED, PAUSE_SECONDS = 20, 5, 0.05


def machine(threads):
    with open("/proc/cpuinfo") as text:
        cpu = next((line.split(":")[1].strip() for line in text if line.startswith("model name")), platform.machine())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=ROOT).stdout.strip()
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "threads": threads,
            "onnxruntime": onnxruntime.__version__, "commit": commit}


def bound(model, inputs, threads):
    """A call of a session with its tensors bound."""
    session = test_onnx.session(model, threads)
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    outputs = session.run(None, inputs)
    for value, array in zip(session.get_outputs(), outputs):
        binding.bind_ortvalue_output(value.name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    return outputs, lambda: session.run_with_iobinding(binding)


def in_blocks(calls, rounds):
    """Median seconds of each."""
    times = [[] for _ in calls]
    for _ in range(rounds):
        for call, seconds in zip(calls, times):
            time.sleep(PAUSE_SECONDS)
            for i in range(BLOCK):
                start = time.perf_counter()
                call()
                if i >= UNCOUNTED:
                    seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def compare(problem, model, inputs, threads, rounds):
    rewritten, changes = normfuse.onnx.rewrite(model)
    assert all(change.operator is not None for change in changes), list(map(str, changes))
    (before, stock), (after, ours) = (bound(one, inputs, threads) for one in (model, rewritten))
    for a, b in zip(before, after):
        assert abs(a - b).max() <= 1e-4 * abs(a).max()
    b, a = in_blocks([stock, ours], rounds)
    return {"problem": problem, "normfuse_ms": round(a * 1e3, 4), "onnxruntime_ms": round(b * 1e3, 4),
            "ratio": round(a / b, 3)}


def group_norm(sizes, groups, opset, bias=False):
    test_onnx.CHANNELS = channels = sizes[1]
    graph = test_onnx.Builder(opset, sizes)
    u = graph.add("Add", ["x", graph.vector(3, (*sizes[:2], 1, 1))]) if bias else "x"
    if opset >= 21:
        y = graph.add("GroupNormalization", [u, graph.vector(1, (channels,)), graph.vector(2, (channels,))],
                      num_groups=groups)
    else:
        y = graph.group_norm(u, groups)
    return graph.model(graph.silu(y), ir=10)


def other_norm(operator, sizes):
    test_onnx.CHANNELS = channels = sizes[1]
    graph = test_onnx.Builder(17, sizes)
    vectors = [abs(test_onnx.values(seed, (channels,))) + 0.5 for seed in range(4 if operator.startswith("B") else 2)]
    y = graph.add(operator, ["x", *map(graph.constant, vectors)])
    return graph.model(graph.add("Relu", [y]))


def layers(tiny):
    shapes = ((2, 320, 64, 64), (2, 640, 32, 32), (2, 1280, 16, 16), (2, 1280, 8, 8), (1, 128, 256, 256))
    for sizes in ((2, 64, 4, 4),) if tiny else shapes:
        for opset in (17, 21):
            yield (f"group_norm {'x'.join(map(str, sizes))} groups=32 act=silu, opset {opset}",
                   lambda: group_norm(sizes, 32, opset), sizes)
        yield (f"group_norm {'x'.join(map(str, sizes))} groups=32 act=silu +pre_bias=sample, opset 17",
               lambda: group_norm(sizes, 32, 17, True), sizes)
    for operator, name, sizes in (("InstanceNormalization", "instance_norm", (2, 64, 128, 128)),
                                  ("BatchNormalization", "batch_norm evaluate", (8, 64, 56, 56))):
        yield f"{name} {'x'.join(map(str, sizes))} act=relu", lambda: other_norm(operator, sizes), sizes


def unet_problem(threads, rounds):
    try:
        import torch
    except ImportError:
        return
    net, file = test_onnx.unet(), io.BytesIO()
    inputs = {"x": torch.randn(2, 4, 64, 64), "time": torch.randn(2, 16)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, tuple(inputs.values()), file, input_names=list(inputs), opset_version=17, dynamo=False)
    yield compare("the UNet of python/tests/test_onnx.py, 2x4x64x64", file.getvalue(),
                  {name: tensor.numpy() for name, tensor in inputs.items()}, threads, rounds)


def rows(threads, rounds, tiny):
    for problem, make, sizes in layers(tiny):
        x = numpy.random.default_rng(0).standard_normal(sizes, "float32")
        yield compare(problem, make().SerializeToString(), {"x": x}, threads, rounds)
    if not tiny:
        yield from unet_problem(threads, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tiny", action="store_true", help="small layers, one round: a dry run")
    words = parser.parse_args()
    where = {**machine(words.threads), "tiny": words.tiny}
    for row in rows(words.threads, 1 if words.tiny else words.rounds, words.tiny):
        print(json.dumps({**row, **where}), flush=True)

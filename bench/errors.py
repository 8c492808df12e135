#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The largest error of group norm over mean/sigma, on the CPU in f32, beside those of PyTorch (eager and compiled), flax
and ONNX Runtime that are installed. Rows, JSON a line, go to standard output; what is left out is said on standard error.

    build/venv-torch/bin/python bench/errors.py >bench/results/DATE-MACHINE-errors.jsonl

x is bell-shaped with sigma 1 about a mean, rounded to f32; weight 1, bias 0. Results are compared with those of the
rounded x in double precision: y, and dx for a bell-shaped dy. "nan": a result is no number. null: there is no backward. Takes a minute, and needs no quiet machine."""
import argparse
import datetime
import importlib.util
import json
import math
import pathlib
import sys

import numpy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
GROUPS, EPS = 32, 1e-5


def exact(x, dy):
    def groups(values):
        return values.astype(numpy.float64).reshape(x.shape[0], GROUPS, -1)

    d = groups(x) - groups(x).mean(2, keepdims=True)
    rstd = 1 / numpy.sqrt((d * d).mean(2, keepdims=True) + EPS)
    h, g = d * rstd, groups(dy)
    dx = rstd * (g - g.mean(2, keepdims=True) - h * (g * h).mean(2, keepdims=True))
    return h.reshape(x.shape), dx.reshape(x.shape)


def ours(x, dy, weight, bias):
    import normfuse
    y, mean, rstd = normfuse.group_norm(x, GROUPS, weight, bias, EPS, return_statistics=True)
    return y, normfuse.group_norm_backward(dy, x, mean, rstd, GROUPS, weight, bias, dx=True).dx


def torch_norm(compiled):
    def run(x, dy, weight, bias):
        import torch
        x, dy, weight, bias = map(torch.from_numpy, (x, dy, weight, bias))
        function = torch.nn.functional.group_norm
        function = torch.compile(function, dynamic=False) if compiled else function
        y = function(x.requires_grad_(), GROUPS, weight, bias, EPS)
        return y.detach().numpy(), torch.autograd.grad(y, x, dy)[0].numpy()
    return run


def flax_norm(x, dy, weight, bias):
    import flax.linen
    import jax
    layer = flax.linen.GroupNorm(GROUPS, epsilon=EPS)
    y, backward = jax.vjp(jax.jit(lambda x: layer.apply({"params": {"scale": weight, "bias": bias}}, x)),
                          numpy.moveaxis(x, 1, -1))
    return tuple(numpy.moveaxis(numpy.asarray(value), -1, 1) for value in (y, *backward(numpy.moveaxis(dy, 1, -1))))


def onnx_norm(x, dy, weight, bias):
    import onnx
    import onnxruntime
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, x.shape) for name in ("x", "y")]
    node = onnx.helper.make_node("GroupNormalization", ["x", "weight", "bias"], ["y"], epsilon=EPS, num_groups=GROUPS)
    constants = [onnx.numpy_helper.from_array(array, name) for array, name in ((weight, "weight"), (bias, "bias"))]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "norm", value[:1], value[1:], constants),
                                   opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0], None


# name: (packages that it needs, the one whose version is told, the function)
IMPLEMENTATIONS = {"normfuse": ((), "normfuse", ours), "torch": (("torch",), "torch", torch_norm(False)),
                   "torch_compile": (("torch",), "torch", torch_norm(True)),
                   "jax": (("jax", "flax"), "flax", flax_norm),
                   "onnxruntime": (("onnx", "onnxruntime"), "onnxruntime", onnx_norm)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4x256x28x28", help="N, C and spatial; default: %(default)s")
    parser.add_argument("--only", default=",".join(IMPLEMENTATIONS), metavar="NAMES", help="default: %(default)s")
    arguments = parser.parse_args()
    shape = tuple(map(int, arguments.shape.split("x")))
    random = numpy.random.default_rng(0)
    drawn, dy = random.standard_normal(shape), random.standard_normal(shape).astype("f4")
    weight, bias = numpy.ones(shape[1], "f4"), numpy.zeros(shape[1], "f4")
    for name in arguments.only.split(","):
        needs, package, function = IMPLEMENTATIONS[name]
        missing = [module for module in needs if importlib.util.find_spec(module) is None]
        if missing:
            print(f"errors.py: {name} is left out: {', '.join(missing)} not installed", file=sys.stderr)
            continue
        for mean in (0, *(10**k for k in range(7))):
            x = (drawn + mean).astype("f4")
            got, want = function(x.copy(), dy, weight, bias), exact(x, dy)
            errors = [None if g is None else float(abs(g - w).max()) for g, w in zip(got, want)]
            errors = ["nan" if error is not None and not math.isfinite(error) else error for error in errors]
            print(json.dumps({"problem": f"group_norm {arguments.shape} groups={GROUPS}", "impl": name,
                              "mean_over_sigma": mean, "y_error": errors[0], "dx_error": errors[1],
                              "version": sys.modules[package].__version__,
                              "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}"}),
                  flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

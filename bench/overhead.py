#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Host time of one eager call on a tiny tensor, normfuse.torch beside torch's own layers in one run; and torch's own
layers under nft.install() beside the same calls without.

    python bench/overhead.py [--json] [--device cpu|cuda] [--seconds 0.3]

Rows: case, device, ours_us, stock_us, ratio. Each case calls both in turn, in blocks, and takes the fastest block of
each: what is left when nothing else runs. On CUDA the time is the host's, for work that is only enqueued: the stream is
drained between blocks. One thread.
"""
import argparse
import contextlib
import json
import pathlib
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import normfuse.torch as nft  # noqa: E402
from normfuse.torch import functional  # noqa: E402
from normfuse.torch._operators import binding  # noqa: E402

SHAPE, GROUPS = (1, 32, 4, 4), 8


def cases(device):
    """Name, whether gradients are recorded, (ours, stock): calls without arguments, and whether ours is stock's call
    under install()."""
    channels = SHAPE[1]
    x = torch.randn(SHAPE, device=device)
    weight, bias = torch.ones(channels, device=device), torch.zeros(channels, device=device)
    mean, var = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    dy = torch.randn(SHAPE, device=device)

    def step(module):
        leaf = x.clone().requires_grad_()
        parameters = [leaf, *module.parameters()]

        def call():
            for parameter in parameters:
                parameter.grad = None
            module(leaf).backward(dy)
        return call

    class Layer(torch.nn.Module):
        """The module that a user has where there is no fused module: the norm and its activation."""

        def __init__(self, norm, activation):
            super().__init__()
            self.norm, self.activation = norm, activation

        def forward(self, x):
            return self.activation(self.norm(x))

    yield "group_norm + silu, no grad", False, (
        lambda: functional.group_norm(x, GROUPS, weight, bias, activation="silu"),
        lambda: F.silu(F.group_norm(x, GROUPS, weight, bias))), False
    yield "batch_norm + relu, evaluation, no grad", False, (
        lambda: functional.batch_norm(x, mean, var, weight, bias, activation="relu"),
        lambda: F.relu(F.batch_norm(x, mean, var, weight, bias))), False
    yield "batch_norm + relu, training, no grad", False, (
        lambda: functional.batch_norm(x, mean, var, weight, bias, True, activation="relu"),
        lambda: F.relu(F.batch_norm(x, mean, var, weight, bias, True))), False
    yield "GroupNorm + SiLU, forward and backward", True, (
        step(nft.GroupNorm(GROUPS, channels, activation="silu").to(device)),
        step(Layer(torch.nn.GroupNorm(GROUPS, channels), torch.nn.SiLU()).to(device))), False
    yield "BatchNorm2d + ReLU, forward and backward", True, (
        step(nft.BatchNorm2d(channels, activation="relu").to(device)),
        step(Layer(torch.nn.BatchNorm2d(channels), torch.nn.ReLU()).to(device))), False
    for name, with_grad, call in (
            ("group_norm, no grad", False, lambda: F.group_norm(x, GROUPS, weight, bias)),
            ("batch_norm, evaluation, no grad", False, lambda: F.batch_norm(x, mean, var, weight, bias)),
            ("batch_norm, training, no grad", False, lambda: F.batch_norm(x, mean, var, weight, bias, True)),
            ("GroupNorm, forward and backward", True, step(torch.nn.GroupNorm(GROUPS, channels).to(device))),
            ("BatchNorm2d, forward and backward", True, step(torch.nn.BatchNorm2d(channels).to(device)))):
        yield "install: " + name, with_grad, (call, call), True


def fastest(calls, contexts, seconds, drain):
    """Microseconds of one call of each, in its context: the least mean of their blocks, which alternate."""
    best, block, end = [float("inf")] * len(calls), 50, time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end:
        for i, (call, context) in enumerate(zip(calls, contexts)):
            with context():
                for _ in range(10):
                    call()
                drain()
                start = time.perf_counter()
                for _ in range(block):
                    call()
                best[i] = min(best[i], (time.perf_counter() - start) / block)
                drain()
    return [1e6 * b for b in best]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--device", choices=("cpu", "cuda"), action="append",
                        help="default: cpu, and cuda where there is one")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each side of each case (default: %(default)s)")
    arguments = parser.parse_args()
    devices = arguments.device or (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Warning only once for all operators")  # what install() overrides
    rows = []
    for device in devices:
        drain = torch.cuda.synchronize if device == "cuda" else lambda: None
        for name, with_grad, calls, is_installed in cases(device):
            contexts = (nft.install if is_installed else contextlib.nullcontext, contextlib.nullcontext)
            with torch.set_grad_enabled(with_grad):
                ours, stock = fastest(calls, contexts, arguments.seconds, drain)
            rows.append({"case": name, "device": device, "ours_us": round(ours, 2), "stock_us": round(stock, 2),
                         "ratio": round(ours / stock, 3)})
    if arguments.json:
        json.dump({"torch": torch.__version__, "binding": binding()[0], "rows": rows}, sys.stdout, indent=1)
        print()
        return
    print(f"torch {torch.__version__}, binding: {binding()[0]}")
    for row in rows:
        print(f"{row['case']:46} {row['device']:5} {row['ours_us']:8.2f} us {row['stock_us']:8.2f} us "
              f"{row['ratio']:6.2f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times normfuse.jax beside flax.linen on the CPU: group norm with SiLU, channels last, under jit, forward and value and
gradients, also with a bias added before the norm; and the host time of a jitted call on a tiny array beside a jitted
identity's and beside XLA's own operation of the same three arrays. Rows, JSON a line, go to standard output.

All run in this process, call by call in turn; a row has the medians and their ratio, and the minima.

Results above 32 MiB are fresh memory of the system in every call, for both; MALLOC_MMAP_THRESHOLD_=1073741824
MALLOC_TRIM_THRESHOLD_=4294967296 in the environment leaves that time out, and rows say so.

    build/venv-torch/bin/python bench/jax_operators.py >bench/results/DATE-MACHINE-jax-operators.jsonl
"""
import argparse
import functools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax  # noqa: E402
import flax.linen  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import normfuse.jax  # noqa: E402

GROUPS = 32


def in_turn(functions, rounds, calls=1):
    """Seconds of each round and function."""
    times = [[] for _ in functions]
    for function in functions:
        jax.block_until_ready(function())
    for _ in range(rounds):
        for function, seconds in zip(functions, times):
            start = time.perf_counter()
            for _ in range(calls):
                result = function()
            jax.block_until_ready(result)
            seconds.append((time.perf_counter() - start) / calls)
    return times


def figures(unit, scale, digits, **times):
    """Medians and minima, and normfuse's ratios to the second."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    minima = {name: min(seconds) for name, seconds in times.items()}
    row = {f"{name}_{unit}": round(median * scale, digits) for name, median in medians.items()}
    row.update((f"{name}_{unit}_min", round(least * scale, digits)) for name, least in minima.items())
    other = list(times)[1]
    return {**row, "ratio": round(medians["normfuse"] / medians[other], 3),
            "ratio_min": round(minima["normfuse"] / minima[other], 3)}


def machine():
    with open("/proc/cpuinfo") as text:
        cpu = next((line.split(":")[1].strip() for line in text if line.startswith("model name")), platform.machine())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=pathlib.Path(__file__).parent).stdout.strip()
    return {"cpu": cpu, "threads": len(os.sched_getaffinity(0)), "jax": jax.__version__, "flax": flax.__version__,
            "commit": commit, "mmap_threshold": os.environ.get("MALLOC_MMAP_THRESHOLD_")}


def problems(rounds, shape):
    stock = flax.linen.GroupNorm(GROUPS, epsilon=1e-5, dtype=None)
    for dtype, word in (("float32", ""), ("bfloat16", ""), ("float32", " +pre_bias")):
        x, dy = (jax.random.normal(jax.random.key(i), shape, dtype) for i in range(2))
        weight, bias = jnp.ones(shape[-1], dtype), jnp.zeros(shape[-1], dtype)

        arrays = (x, weight, bias, *([jnp.ones(shape[-1], dtype)] if word else []))

        def theirs(x, weight, bias, *pre_bias):
            x = x + pre_bias[0] if pre_bias else x
            return jax.nn.silu(stock.apply({"params": {"scale": weight, "bias": bias}}, x))

        def ours(x, weight, bias, *pre_bias):
            return normfuse.jax.group_norm(x, GROUPS, weight, bias, activation="silu",
                                           pre_bias=pre_bias[0] if pre_bias else None)

        def gradients(function):
            def loss(*arrays):
                return jnp.sum(function(*arrays).astype(jnp.float32) * dy)
            return jax.value_and_grad(loss, tuple(range(len(arrays))))
        for direction, wrap in (("forward", lambda function: function), ("value_and_grad", gradients)):
            mine, others = (jax.jit(wrap(function)) for function in (ours, theirs))
            a, b = in_turn([lambda: mine(*arrays), lambda: others(*arrays)], rounds)
            yield {"problem": f"group_norm {shape[0]}x{shape[3]}x{shape[1]}x{shape[2]} groups=32 layout=nhwc act=silu dtype={dtype}{word}",
                   "direction": direction, **figures("ms", 1e3, 3, normfuse=a, flax=b)}


def host(rounds):
    x = jnp.ones((2, 4, 4, 8))
    weight, bias = jnp.ones(8), jnp.zeros(8)
    functions = {
        "normfuse": lambda x, weight, bias: normfuse.jax.group_norm(x, 4, weight, bias, activation="silu"),
        "identity": lambda x, weight, bias: x + 0,
        "affine": lambda x, weight, bias: x * weight + bias}
    calls = [functools.partial(jax.jit(function), x, weight, bias) for function in functions.values()]
    times = dict(zip(functions, in_turn(calls, rounds, 200)))
    yield {"problem": "host time of a jitted call, group_norm 2x8x4x4 groups=4 layout=nhwc act=silu",
           **figures("us", 1e6, 2, **times)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="a small array, three rounds: a dry run")
    words = parser.parse_args()
    rounds = 3 if words.tiny else words.rounds
    where = {**machine(), "tiny": words.tiny}
    for rows in (problems(rounds, (2, 4, 4, 64) if words.tiny else (8, 64, 64, 320)), host(20 * rounds)):
        for row in rows:
            print(json.dumps({**row, **where}), flush=True)

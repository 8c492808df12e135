#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times normfuse.jax beside flax.linen: group norm with SiLU, channels last, under jit, forward and value and gradients,
also with a bias added before the norm; and the host time of a jitted call on a tiny array beside a jitted identity's and
beside XLA's own operation of the same three arrays. Rows, JSON a line, go to standard output.

All run in this process in turn; a row has the medians and their ratio, and the minima.

On the CPU a time is that of one call. On a GPU it is a share of some 64 calls in a row, from before the first is
dispatched until the last has its result: the slower one of dispatch and device. dispatch_ms is the share of the time until
all are dispatched. Inputs and results rotate through sets of arrays that exceed four times the L2 cache. Rows with
`programs` "one" have a program for all sets, whose calls follow one another, so the host has less to dispatch; rows with
"each" have a program for each call. A host time is such a share, too, of 200 calls.

Results above 32 MiB are fresh memory of the system in every call, for both; MALLOC_MMAP_THRESHOLD_=1073741824
MALLOC_TRIM_THRESHOLD_=4294967296 in the environment leaves that time out, and rows say so.

    build/venv-torch/bin/python bench/jax_operators.py [--device cuda] >bench/results/DATE-MACHINE-jax-operators.jsonl
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import flax  # noqa: E402
import flax.linen  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import normfuse.jax  # noqa: E402

GROUPS = 32
CALLS = 64
CACHE_BYTES = 64 << 20  # at least the L2 of an H100 and an H200


def in_turn(functions, sets, rounds, calls):
    """By function of the number of a set, the seconds of a call in each round: until its result is there, and until it is
    dispatched."""
    times = {name: ([], []) for name in functions}
    held = {name: [function(i) for i in range(sets)] for name, function in functions.items()}
    jax.block_until_ready(held)
    for _ in range(rounds):
        for name, function in functions.items():
            results = held[name]
            start = time.perf_counter()
            for i in range(calls):
                results[i % sets] = function(i % sets)
            dispatched = time.perf_counter()
            jax.block_until_ready(results)
            times[name][0].append((time.perf_counter() - start) / calls)
            times[name][1].append((dispatched - start) / calls)
    return times


def in_one_program(function):
    """Calls of all sets, which XLA neither joins nor puts side by side."""
    def every(*sets):
        results = []
        for arrays in sets:
            if results:
                results[-1], arrays = jax.lax.optimization_barrier((results[-1], arrays))
            results.append(function(*arrays))
        return results
    return jax.jit(every)


def figures(unit, scale, digits, times):
    """Medians and minima, and normfuse's ratios to the second."""
    medians = {name: statistics.median(seconds) for name, (seconds, _) in times.items()}
    minima = {name: min(seconds) for name, (seconds, _) in times.items()}
    row = {f"{name}_{unit}": round(median * scale, digits) for name, median in medians.items()}
    if on_gpu():
        row.update((f"{name}_dispatch_{unit}", round(statistics.median(seconds) * scale, digits))
                   for name, (_, seconds) in times.items())
    row.update((f"{name}_{unit}_min", round(least * scale, digits)) for name, least in minima.items())
    other = list(times)[1]
    return {**row, "ratio": round(medians["normfuse"] / medians[other], 3),
            "ratio_min": round(minima["normfuse"] / minima[other], 3)}


def on_gpu():
    return jax.default_backend() == "gpu"


def machine():
    with open("/proc/cpuinfo") as text:
        cpu = next((line.split(":")[1].strip() for line in text if line.startswith("model name")), platform.machine())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=pathlib.Path(__file__).parent).stdout.strip()
    common = {"cpu": cpu, "threads": len(os.sched_getaffinity(0)), "jax": jax.__version__, "flax": flax.__version__,
              "commit": commit}
    if not on_gpu():
        return {**common, "mmap_threshold": os.environ.get("MALLOC_MMAP_THRESHOLD_")}
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
                            capture_output=True, text=True).stdout.strip()
    return {**common, "gpu": jax.devices()[0].device_kind, "driver": driver,
            "xla": jax.devices()[0].client.platform_version, "xla_flags": os.environ.get("XLA_FLAGS")}


def problems(rounds, calls, shape):
    stock = flax.linen.GroupNorm(GROUPS, epsilon=1e-5, dtype=None)
    for dtype, word in (("float32", ""), ("bfloat16", ""), ("float32", " +pre_bias")):
        dy = jax.random.normal(jax.random.key(1), shape, dtype)
        sets = 4 * CACHE_BYTES // dy.nbytes + 1 if on_gpu() else 1
        weight, bias = jnp.ones(shape[-1], dtype), jnp.zeros(shape[-1], dtype)

        arrays = [(jax.random.normal(jax.random.key(2 + i), shape, dtype), weight, bias,
                   *([jnp.ones(shape[-1], dtype)] if word else [])) for i in range(sets)]

        def theirs(x, weight, bias, *pre_bias):
            x = x + pre_bias[0] if pre_bias else x
            return jax.nn.silu(stock.apply({"params": {"scale": weight, "bias": bias}}, x))

        def ours(x, weight, bias, *pre_bias):
            return normfuse.jax.group_norm(x, GROUPS, weight, bias, activation="silu",
                                           pre_bias=pre_bias[0] if pre_bias else None)

        def gradients(function):
            def loss(*arrays):
                return jnp.sum(function(*arrays).astype(jnp.float32) * dy)
            return jax.value_and_grad(loss, tuple(range(len(arrays[0]))))
        for direction, wrap in (("forward", lambda function: function), ("value_and_grad", gradients)):
            row = {"problem": f"group_norm {shape[0]}x{shape[3]}x{shape[1]}x{shape[2]} groups=32 layout=nhwc act=silu "
                              f"dtype={dtype}{word}", "direction": direction}
            mine, others = (jax.jit(wrap(function)) for function in (ours, theirs))
            times = in_turn({"normfuse": lambda i: mine(*arrays[i]), "flax": lambda i: others(*arrays[i])}, sets,
                            rounds, calls)
            yield {**row, **({"programs": "each"} if on_gpu() else {}),
                   **figures("ms", 1e3, 4 if on_gpu() else 3, times)}
            if on_gpu():
                mine, others = (in_one_program(wrap(function)) for function in (ours, theirs))
                times = in_turn({"normfuse": lambda _: mine(*arrays), "flax": lambda _: others(*arrays)}, 2, rounds,
                                max(2, calls // sets))
                yield {**row, "programs": "one", **figures("ms", 1e3 / sets, 4, times)}


def host(rounds):
    x = jnp.ones((2, 4, 4, 8))
    weight, bias = jnp.ones(8), jnp.zeros(8)
    functions = {
        "normfuse": lambda x, weight, bias: normfuse.jax.group_norm(x, 4, weight, bias, activation="silu"),
        "identity": lambda x, weight, bias: x + 0,
        "affine": lambda x, weight, bias: x * weight + bias}
    compiled = {name: jax.jit(function) for name, function in functions.items()}
    times = in_turn({name: lambda _, call=call: call(x, weight, bias) for name, call in compiled.items()}, 1, rounds,
                    200)
    yield {"problem": "host time of a jitted call, group_norm 2x8x4x4 groups=4 layout=nhwc act=silu",
           **figures("us", 1e6, 2, times)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="a small array, three rounds: a dry run")
    words = parser.parse_args()
    rounds = 3 if words.tiny else words.rounds
    jax.config.update("jax_platforms", words.device)
    where = {**machine(), "tiny": words.tiny}
    calls = CALLS if words.device == "cuda" else 1
    for rows in (problems(rounds, calls, (2, 4, 4, 64) if words.tiny else (8, 64, 64, 320)), host(20 * rounds)):
        for row in rows:
            print(json.dumps({**row, **where}), flush=True)

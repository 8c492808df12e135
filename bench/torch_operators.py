#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times the operators of normfuse.torch beside PyTorch's own, eager and compiled, as calls from Python; on a GPU replayed
from graphs.

    python3 bench/torch_operators.py                             the problems of bench/bars.txt
    python3 bench/torch_operators.py 'group_norm 8x64x56x56 groups=8 act=silu dir=bwd' --json rows.jsonl
    python3 bench/torch_operators.py --tiny --variants eager,normfuse
    python3 bench/torch_operators.py --random 100 --seed 3       problems that `normfuse bench --random` draws
    python3 bench/torch_operators.py --device cuda --random 100  the same on a GPU

bench/peers.py has the same problems through the C library. Here each problem has a process of its own. Its three variants
run on PyTorch's threads and take turns, a call at a time; each call takes the next of several sets of tensors, together more
than four times the last-level cache. If the process dies, each variant is run alone, and the row of one that dies again
says so. A backward is torch.autograd.grad of x, weight, bias and what is added, on a graph made once. PyTorch adds, scales and activates in
separate calls, which torch.compile joins. Outputs and gradients
are compared with eager's in f64 first: ours may be twice as far as PyTorch's in the problem's type. On a GPU each variant has a CUDA graph of one
call for every set of tensors, backwards without their forwards, and the replays take turns.

Rows (--json FILE, appended): problem, variant, median_us, p10_us, p90_us, samples, of_eager and of_compiled (ratios of
medians), error and eager_error (Euclidean norm, relative), torch, cpu or gpu, threads, date."""
from __future__ import annotations

import argparse
import concurrent.futures.process
import datetime
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any, Callable, Optional

import peers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
VARIANTS = ("eager", "compiled", "normfuse")
TINY = ("group_norm 2x8x6x6 groups=4 act=silu", "group_norm 2x8x6x6 groups=4 layout=nhwc dtype=bf16 dir=bwd",
        "instance_norm 2x4x4x4x4 act=leaky_relu dir=bwd", "batch_norm 4x8x5x5 dir=bwd", "batch_norm 4x8x5x5 mode=eval",
        "batch_norm 4x8x5x5 act=prelu dir=bwd", "affine 4x8x5x5 act=prelu +one_slope",
        "affine 4x8x5x5 per=sample", "affine 4x8x5x5 per=sample layout=nhwc dir=bwd", "group_norm 2x8x6x6 groups=4 +pre_bias dir=bwd",
        "batch_norm 4x8x5x5 +pre_bias=sample dir=bwd", "channel_norm 2x8x6x6 layout=nhwc dir=bwd",
        "channel_norm 2x8x6x6 stat=rms eps_kind=norm eps=1e-12 act=silu +post_add dir=bwd",
        "channel_norm 4x8x3 stat=rms groups=2 +pre_add +u +scale dtype=bf16 y_dtype=f32 dir=bwd")


class Problem:
    """The tensors of one problem and, for each variant, call(i): with the i-th set of them."""

    def __init__(self, problem: dict[str, Any], sets: int, device: str) -> None:
        import torch
        import torch._functorch.config
        torch._functorch.config.donated_buffer = False  # a compiled graph is run backward many times
        torch.manual_seed(0)
        self.problem, self.sets = problem, sets
        shape = problem["shape"]
        types = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        self.dtype, small, self.y_dtype = (types[problem[name]] for name in ("dtype", "weight_dtype", "y_dtype"))

        def big(dtype: Any = self.dtype) -> Any:
            value = torch.randn(shape, device=device).to(dtype)
            return value.movedim(1, -1).contiguous().movedim(-1, 1) if problem["layout"] == "nhwc" else value

        self.xs = [big() for _ in range(sets)]
        # Factors of the result and, with +u, of the sum, backwards.
        self.dys = [(big(self.y_dtype), big()) if problem.get("u") else (big(self.y_dtype),)
                    for _ in range(sets)] if problem["backward"] else []
        added = {name: dtype for name, dtype in (("pre_add", self.dtype), ("post_add", self.y_dtype))
                 if problem.get(name)}
        self.added = [{name: big(dtype) for name, dtype in added.items()} for _ in range(sets)]
        if problem.get("scale"):
            for each in self.added:
                each.update({name: (0.3 * torch.randn(shape[:2], device=device)).to(small) for name in ("scale", "shift")})
        if problem["pre_bias"]:
            sizes = shape[:2] if problem["pre_bias"] == "sample" else shape[1:2]
            for each in self.added:
                each["pre_bias"] = torch.randn(sizes, device=device).to(small)
        if problem["act"] == "prelu":
            for each in self.added:
                each["slope"] = torch.rand(1 if problem["one_slope"] else shape[1], device=device).to(small)
        parameters = shape[:2] if problem["per_sample"] else shape[1:2]
        one = {"device": device, "dtype": torch.float32}
        self.weight = (torch.rand(parameters, **one) + 0.5).to(small)
        self.bias = torch.randn(parameters, **one).to(small)
        self.running = [torch.randn(shape[1], **one).to(small), (torch.rand(shape[1], **one) + 0.5).to(small)]

    @staticmethod
    def sum(x: Any, added: dict[str, Any]) -> Any:
        """x + pre_bias + pre_add as PyTorch adds, in x's type."""
        if "pre_bias" in added:
            value = added["pre_bias"]
            x = (x + value.reshape(-1, x.shape[1], *[1] * (x.dim() - 2))).to(x.dtype)
        return x + added["pre_add"] if "pre_add" in added else x

    def stock(self, x: Any, weight: Any, bias: Any, mean: Any, var: Any, added: dict[str, Any]) -> Any:
        import torch
        import torch.nn.functional as F
        problem, slope = self.problem, self.problem["act_param"]
        u = self.sum(x, added)
        if problem["op"] == "affine":
            if not problem["per_sample"]:
                weight, bias = weight[None], bias[None]
            weight, bias = (t.reshape(*t.shape, *[1] * (x.dim() - 2)) for t in (weight, bias))
            z = torch.addcmul(bias, u, weight) if bias.dtype == u.dtype else (u * weight + bias).to(u.dtype)
        elif problem["op"] == "batch_norm":
            z = F.batch_norm(u, mean, var, weight, bias, not problem["evaluate"], 0.1, problem["eps"])
        elif problem["op"] == "channel_norm":
            z = self.stock_channel_norm(u, weight, bias)
        else:
            z = F.group_norm(u, problem["groups"], weight, bias, problem["eps"])
        if "scale" in added:
            scale, shift = (added[name].reshape(*x.shape[:2], *[1] * (x.dim() - 2)) for name in ("scale", "shift"))
            z = (z * (1 + scale) + shift).to(z.dtype)
        if "post_add" in added:
            z = z + added["post_add"]
        y = {"identity": lambda: z, "relu": lambda: F.relu(z), "silu": lambda: F.silu(z), "gelu": lambda: F.gelu(z),
                "leaky_relu": lambda: F.leaky_relu(z, slope), "hardswish": lambda: F.hardswish(z),
                "gelu_tanh": lambda: F.gelu(z, approximate="tanh"), "elu": lambda: F.elu(z, slope),
                "mish": lambda: F.mish(z), "relu6": lambda: F.relu6(z),
                "prelu": lambda: F.prelu(z, added["slope"])}[problem["act"]]()
        return (y, u) if problem.get("u") else y

    def stock_channel_norm(self, u: Any, weight: Any, bias: Any) -> Any:
        """By layer_norm, rms_norm or normalize, in the result's type from there on."""
        import torch.nn.functional as F
        groups, eps, layer = self.problem["groups"], self.problem["eps"], self.problem["statistics"] == "mean_and_variance"
        each = u.shape[1] // groups
        y_dtype = u.dtype if u.dtype.itemsize == 8 else self.y_dtype  # that of the reference
        v = u.movedim(1, -1)
        v = v if groups == 1 else v.unflatten(-1, (groups, each))
        whole = groups == 1 and weight.dtype == u.dtype == bias.dtype
        if self.problem["eps_kind"] == "of_norm":
            v = v - v.mean(-1, keepdim=True) if layer else v
            z, whole = F.normalize(v, dim=-1, eps=eps) * each**0.5, False
        elif layer:
            z = F.layer_norm(v, (each,), *((weight, bias) if whole else ()), eps=eps)
        else:
            z = F.rms_norm(v, (each,), weight if whole else None, eps)
            z = z + bias if whole else z
        z = z if groups == 1 else z.flatten(-2)
        return (z if whole else z * weight + bias).to(y_dtype).movedim(-1, 1)

    def ours(self, x: Any, weight: Any, bias: Any, mean: Any, var: Any, added: dict[str, Any]) -> Any:
        import normfuse.torch as nft
        problem = self.problem
        act = None if problem["act"] == "identity" else problem["act"]
        options = {"activation": act, "act_param": problem["act_param"] if act in ("leaky_relu", "elu") else None}
        if problem["op"] == "affine":  # whose function adds nothing before the weight
            u = self.sum(x, added)
            y = nft.channel_affine(u, weight, bias, post_add=added.get("post_add"), slope=added.get("slope"), **options)
            return (y, u) if problem.get("u") else y
        options.update(added, return_sum=bool(problem.get("u")))
        if problem["op"] == "batch_norm":
            return nft.batch_norm(x, mean, var, weight, bias, not problem["evaluate"], 0.1, problem["eps"], **options)
        if problem["op"] == "channel_norm":
            return nft.channel_norm(x, weight, bias, dtype=self.y_dtype, **{
                name: problem[name] for name in ("groups", "statistics", "eps", "eps_kind")}, **options)
        return nft.group_norm(x, problem["groups"], weight, bias, problem["eps"], **options)

    def calls(self, variant: str) -> Callable[[int], Any]:
        import torch
        function = self.ours if variant == "normfuse" else self.stock
        if variant == "compiled":
            function = torch.compile(function, fullgraph=True, dynamic=False)
        if not self.problem["backward"]:
            def forward(i: int) -> Any:
                with torch.no_grad():
                    return function(self.xs[i], self.weight, self.bias, *self.running, self.added[i])
            return forward
        leaves = [tuple(t.detach().clone().requires_grad_() for t in (x, self.weight, self.bias, *added.values()))
                  for x, added in zip(self.xs, self.added)]
        # Each graph has running statistics of its own: updating those of another would spoil it.
        outputs = [function(*each[:3], *(t.clone() for t in self.running), dict(zip(self.added[0], each[3:])))
                   for each in leaves]
        return lambda i: torch.autograd.grad(outputs[i], leaves[i], self.dys[i], retain_graph=True)

    def exact(self) -> list[Any]:
        import torch
        leaves = [t.double().requires_grad_() for t in (self.xs[0], self.weight, self.bias, *self.added[0].values())]
        running = [t.clone().double() for t in self.running]
        with torch.set_grad_enabled(self.problem["backward"]):
            results = self.stock(*leaves[:3], *running, dict(zip(self.added[0], leaves[3:])))
        if not self.problem["backward"]:
            return list(results) if isinstance(results, tuple) else [results]
        return list(torch.autograd.grad(results, leaves, [dy.double() for dy in self.dys[0]]))


def distance(got: Any, want: list[Any]) -> float:
    got = list(got) if isinstance(got, tuple) else [got]
    return max(float((g.double() - w).norm() / w.norm().clamp_min(1e-300)) for g, w in zip(got, want))


def times_in_turn(calls: dict[str, Callable[[int], Any]], sets: int, samples: int,
                  budget_s: float) -> dict[str, list[float]]:
    """Microseconds of each call, by variant."""
    rings = {variant: peers.Ring(sets) for variant in calls}
    for variant, call in calls.items():
        for i in range(sets):  # its outputs' memory is mapped
            rings[variant].call(i, call)
    times: dict[str, list[float]] = {variant: [] for variant in calls}
    end = time.perf_counter() + budget_s * len(calls)
    i = 0
    while i < samples and (i < 5 or time.perf_counter() < end):
        for variant, call in calls.items():
            start = time.perf_counter()
            rings[variant].call(i % sets, call)
            times[variant].append(1e6 * (time.perf_counter() - start))
        i += 1
    return times


def graph_times_in_turn(calls: dict[str, Callable[[int], Any]], sets: int, samples: int,
                        budget_s: float) -> dict[str, list[float]]:
    """Microseconds a call, by variant, of replays of graphs that have one for each set."""
    import torch
    graphs = {variant: peers.cuda_graph(call, sets, torch.cuda.current_stream()) for variant, call in calls.items()}
    times: dict[str, list[float]] = {variant: [] for variant in calls}
    end = time.perf_counter() + budget_s * len(calls)
    i = -3  # the first ones warm up
    while i < samples and (i < 5 or time.perf_counter() < end):
        for variant, graph in graphs.items():
            us = peers.cuda_us(graph.replay) / sets
            if i >= 0:
                times[variant].append(us)
        i += 1
    return times


def measure(problem: dict[str, Any], variants: list[str], samples: int, budget_s: float, llc: int, device: str,
            threads: int) -> list[dict[str, Any]]:
    import torch
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    sets = peers.set_count(problem, llc)
    made = Problem(problem, sets, device)
    want = made.exact()
    units = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
    unit = max(units[problem["dtype"]], units[problem["y_dtype"]])
    eager_error = distance(made.calls("eager")(0), want)
    # In f64 eager is what is compared with. A z within its rounding of a kink has the derivative of either side.
    allowed = (64 if problem["dtype"] == "f64" else 4) * unit
    if problem["backward"] and problem["act"] in ("relu", "relu6", "leaky_relu", "elu", "hardswish", "prelu"):
        allowed += 4 / math.sqrt(max(1, math.prod(problem["shape"])))
    rows, calls = {}, {}
    for variant in variants:
        rows[variant] = {"problem": problem["line"], "variant": variant}
        try:
            call = made.calls(variant)
            error = distance(call(0), want)
            for i in range(1, sets):  # what fails inside a capture spoils all later captures of the process
                call(i)
            rows[variant].update(error=error, eager_error=eager_error)
            if variant == "normfuse" and not error <= 2 * eager_error + allowed:
                rows[variant]["failed"] = "differs from f64 by more than twice what eager does"
        except Exception as error:  # a variant's failure is a result
            rows[variant]["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        calls[variant] = call
    times = (graph_times_in_turn if device == "cuda" else times_in_turn)(calls, sets, samples, budget_s)
    for variant, each in times.items():
        cuts = statistics.quantiles(each, n=10, method="inclusive")
        rows[variant].update(median_us=round(statistics.median(each), 2), p10_us=round(cuts[0], 2),
                             p90_us=round(cuts[8], 2), samples=len(each))
    for row in rows.values():
        for other in ("eager", "compiled"):
            beside = rows.get(other, {}).get("median_us")
            row[f"of_{other}"] = round(row["median_us"] / beside, 4) if beside and "median_us" in row else None
    return list(rows.values())


def measure_apart(problem: dict[str, Any], variants: list[str], *options: Any) -> list[dict[str, Any]]:
    """measure() in a process of its own: a peer that overwrites memory ends that process only."""
    try:
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(measure, problem, variants, *options).result()
    except concurrent.futures.process.BrokenProcessPool:
        if len(variants) == 1:
            return [{"problem": problem["line"], "variant": variants[0], "failed": "its process died"}]
        print(f"{problem['line']}: the process of all variants died; each is run alone", file=sys.stderr)
        return [row for variant in variants for row in measure_apart(problem, [variant], *options)]


def drawn(count: int, seed: str, least: str, most: str) -> list[str]:
    root = pathlib.Path(__file__).resolve().parent.parent
    program = os.environ.get("NORMFUSE_PROGRAM") or str(root / "build/release/normfuse")
    words = [program, "bench", "--random", str(count), "--seed", seed, "--min-bytes", least, "--max-bytes", most, "--list"]
    listed = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help="quoted problem lines and @files")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=30, help="calls of each variant; default: %(default)s")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of calls of each; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="rows are added to the end of FILE")
    parser.add_argument("--random", type=int, metavar="N", help="problems drawn by `normfuse bench --random N`, by the "
                        "program in build/release or NORMFUSE_PROGRAM")
    parser.add_argument("--seed", default="1", help="of --random; default: %(default)s")
    parser.add_argument("--min-bytes", default="64KiB", help="of x, for --random; default: %(default)s")
    parser.add_argument("--max-bytes", default="64MiB", help="of x, for --random; default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small problems of every kind: a dry run")
    arguments = parser.parse_args()
    variants = arguments.variants.split(",")
    if not set(variants) <= set(VARIANTS):
        parser.error(f"--variants: there are {', '.join(VARIANTS)}")
    # As in bench/peers.py: without it each large output is a new mapping, and its page faults are timed.
    missing = {key: value for key, value in peers.KEEP_MEMORY.items() if os.environ.get(key) != value}
    if missing:
        # Kernels in Inductor's cache that runs with other settings had left there overwrote memory.
        settings = f"{arguments.threads}-{os.environ.get('ATEN_CPU_CAPABILITY', 'default')}"
        cache = pathlib.Path(__file__).resolve().parent.parent / "build" / f"inductor-{settings}"
        os.execve(sys.executable, [sys.executable, *sys.argv],
                  {"TORCHINDUCTOR_CACHE_DIR": str(cache), **os.environ, **missing,
                   "OMP_NUM_THREADS": str(arguments.threads)})
    import torch
    from models import error_text, processor
    if arguments.random:
        arguments.problems += drawn(arguments.random, arguments.seed, arguments.min_bytes, arguments.max_bytes)
    lines = arguments.problems or (list(TINY) if arguments.tiny else
                                   ["@" + str(pathlib.Path(__file__).resolve().parent / "bars.txt")])
    on_gpu = arguments.device == "cuda"
    machine = {"gpu": torch.cuda.get_device_name()} if on_gpu else {"cpu": processor()}
    cache = torch.cuda.get_device_properties(0).L2_cache_size if on_gpu else peers.llc_bytes()
    common = {"torch": torch.__version__, **machine, "threads": arguments.threads, "tiny": arguments.tiny}
    failures = 0
    gains: list[tuple[float, str]] = []
    print(f"{'problem':72} " + " ".join(f"{variant + ' us':>12}" for variant in variants) + f" {'gain':>6}")
    for problem in peers.read_problems(lines, additions=True):
        try:
            rows = measure_apart(problem, variants, arguments.samples, arguments.budget,
                                 1 if arguments.tiny else cache, arguments.device, arguments.threads)
        except Exception as error:
            print(f"{problem['line']:72} FAILED: {error_text(error)}", flush=True)
            failures += 1
            continue
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        if arguments.json:
            with open(arguments.json, "a") as file:
                file.writelines(json.dumps({**row, **common, "date": date}) + "\n" for row in rows)
        medians = {row["variant"]: row.get("median_us") for row in rows}
        others = [m for v, m in medians.items() if v != "normfuse" and m]
        gain: Optional[float] = min(others) / medians["normfuse"] if others and medians.get("normfuse") else None
        gains += [(gain, problem["line"])] if gain is not None else []
        cells = [f"{medians[v]:12.1f}" if medians[v] else f"{'-':>12}" for v in variants]
        print(f"{problem['line']:72} {' '.join(cells)} " + (f"{gain:6.2f}" if gain else f"{'-':>6}"), flush=True)
        for row in rows:
            if "failed" in row:
                failures += 1
                print(f"    {row['variant']} FAILED: {row['failed']}", flush=True)
    if gains:
        mean = math.exp(sum(math.log(gain) for gain, _ in gains) / len(gains))
        print(f"{len(gains)} problems: faster than both on {sum(gain > 1 for gain, _ in gains)}, slower by more than 5 % on "
              f"{sum(gain < 1 / 1.05 for gain, _ in gains)}, {mean:.2f} times the faster of them in geometric mean, "
              f"{min(gains)[0]:.2f} at least: {min(gains)[1]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The CUDA kernels on the CPU: builds tests/emulator/, a libcuda.so.1 that runs them and a libnvrtc.so.13 that compiles
those of run time, and compares what they compute with the double reference. Case files and random cases of everything
as they are planned, then random problems by each schedule alone. Names the kernels that no problem ran, as skipped.
Closes with `N passed, N failed, N skipped`.

    tests/check_emulator.py [--jobs 2] [--cmake cmake] [--cases 24] [--seed 1] [BUILD_FOLDER]
    tests/check_emulator.py [--schedule general] [--geometry 2] --case "group_norm 2x8x5x5 groups=2 device=cuda" [BUILD_FOLDER]

BUILD_FOLDER is build/release. What the emulator sees, and what it cannot see, is in docs/testing.md."""
import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from typing import List, Optional, Set, Tuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.M)
RUN_SECONDS = 400  # a kernel that waits for ever is noticed by the emulator itself
# Of tests/cases what random cases seldom have: each so many-th, since most cases have a kernel of their own to compile.
FILES = ["special", "options", "operators"]
EVERY = "128"
# What few random problems of the size are: norm groups that a whole grid shares, small ones, layers.
CASES = ["group_norm 2x64x{24x24,41x40} groups={8,1} layout=nhwc dtype={f32,f16,bf16} dir={fwd,bwd}",
         "instance_norm 40x16x{8x8,24x24} layout={nchw,nhwc} dtype={f32,f16,bf16} dir={fwd,bwd}",
         "instance_norm 40x16x{7x7,4x4} layout=nchw dtype={f64,f32,f16,bf16} dir={fwd,bwd} +post_add",
         "group_norm {2x16x24x24,1x8x3000} groups=2 layout=nchw dtype={f32,f16} dir={fwd,bwd} +pre_bias +data=large_mean",
         "batch_norm 9x16x{19,67} layout=nchw dtype={f32,f16} dir={fwd,bwd} +pre_add +data={nan,wide}",
         "{batch_norm 5x33x67 mode=eval,instance_norm 5x33x67} weight_dtype=f64 dtype={f32,f16} layout={nchw,nhwc} +pre_bias",
         "group_norm 17x4101 groups=1 layout=nhwc dtype={f32,f16,bf16} dir={fwd,bwd} act=relu",
         "batch_norm 2x64x24x24 layout=nhwc dtype={f32,f16,bf16} dir={fwd,bwd}",
         "batch_norm {24x40x7x7,9x24x14x14} layout=nchw dtype={f32,f16,bf16} dir={fwd,bwd} {+pre_bias,act=gelu +post_add}",
         "{batch_norm 2x64x24x24,group_norm 2x64x41x40 groups=8} layout=nhwc dtype={f32,f16,bf16} dir={fwd,bwd} act=relu "
         "+post_add",
         "{batch_norm 2x64x24x24,group_norm 2x64x24x24 groups=8} layout=nhwc dtype={f32,f16} dir=bwd +pre_add",
         "batch_norm 2x64x8x8 mode=eval layout=nhwc dtype={f32,f16,bf16} dir={fwd,bwd} +post_add"]
# Copies to other strides: vectors and elements, rows and whole planes, several tiles of each axis, no tile at all.
COPIES = ("affine {2x200x7x7,3x72x14x14,1x24x33x33,2x5x28x28,70x3x2x2,2x300x15x15,1x8x100x100,3000x7} dtype={f64,f32,f16} "
          "layout={nchw,nhwc} dir=bwd act=relu +post_add device=cuda "
          "{+mixed=inputs,+mixed=outputs,+mixed +slice_c,+mixed=inputs +slice_n,+mixed=outputs +misaligned,"
          "+expanded}")
# More partial statistics than a block joins, of more norm groups than a GPU has blocks for.
MANY_PARTS = "group_norm 260x4100x8 groups=1 dtype=f16 device=cuda +pre_add"
# Norm groups of more blocks than a warp asks for the parts of at once.
MANY_BLOCKS = "{batch_norm 1x1x330x500,group_norm 1x1x300x500 groups=1} device=cuda"
SLOPES = ["{group_norm 3x12x67 groups=2,instance_norm 3x12x67,batch_norm 3x12x67,affine 3x12x67} act=prelu "
          "layout={nchw,nhwc} dtype={f32,f16} dir={fwd,bwd} {,+one_slope,+post_add,+pre_add +one_slope}",
          "batch_norm 21x11x7x9 act=prelu layout={nchw,nhwc} dir=bwd +accumulate {,+one_slope}",
          "{group_norm 0x6x5 groups=2,group_norm 2x6x0 groups=2,affine 3x0x5} act=prelu dir={fwd,bwd} {,+one_slope}",
          "{group_norm 2x12x7x9 groups=4,batch_norm 3x12x7x9} act=prelu layout={nchw,nhwc} dir={fwd,bwd} +sharded"]
# Without samples, channels or positions.
EMPTY = ["{group_norm 0x6x4 groups=3,group_norm 2x6x0 groups=3,group_norm 2x0x4 groups=3,instance_norm 0x6x4,"
         "instance_norm 2x6x0,instance_norm 2x0x4,batch_norm 0x6x4,batch_norm 2x6x0,batch_norm 2x0x4} "
         "layout={nchw,nhwc} dir={fwd,bwd} {,+sharded,+pre_bias}",
         "{instance_norm,batch_norm} {0x6x4,2x6x0,2x0x4} layout={nchw,nhwc} {+running,+running +sharded}",
         "batch_norm {0x6x4,2x6x0,2x0x4} mode=eval layout={nchw,nhwc} dir={fwd,bwd}",
         "affine {0x6x4,2x6x0,2x0x4} per={channel,sample} layout={nchw,nhwc} dir={fwd,bwd}",
         "batch_norm 2x20000x0 act=prelu dir=bwd +one_slope"]
# What is large for one multiprocessor: rows of so many unaligned vectors that registers hold some; norm groups that begin
# at even and at odd elements.
LARGE = ["instance_norm 1x2x60013 dtype={f16,bf16} dir={fwd,bwd} act={relu,mish} {,+scale,+data=nan}",
         "instance_norm 1x2x30011 dtype=f32 dir={fwd,bwd} act={relu,mish} {,+scale,+data=nan}",
         "group_norm {401x655 groups=1,402x655 groups=5,3001x77 groups=7,34x8191 groups=1,34x8190 groups=2,401x656 "
         "groups=1} dtype={f16,bf16} dir={fwd,bwd} act={identity,silu}",
         "group_norm {401x655 groups=1,61x21x7x13 groups=7} dtype=f16 dir={fwd,bwd} act=relu "
         "{+pre_add +u,+post_add,+pre_add +post_add,+scale,+slice_c,+slice_n,+misaligned}",
         "group_norm {402x655 groups=5,67x7x5x9 groups=1} dtype=bf16 dir={fwd,bwd} act=mish "
         "{+pre_add +u,+post_add,+pre_add +post_add,+scale,+slice_c,+slice_n,+misaligned}",
         "group_norm {401x655 groups=5,61x21x7x13 groups=7,77x21x7x3 groups=1} dtype={f32,f16} dir={fwd,bwd} act=prelu "
         "{,+one_slope,+post_add}",
         "group_norm {2401x330 groups=11,403x1470 groups=49} dtype={f16,bf16} dir={fwd,bwd} act=silu +scale",
         "group_norm 77x21x7x3 groups=1 layout=nhwc dtype={f16,bf16} dir={fwd,bwd} act=silu {,+inplace,+data=nan}",
         "{affine 3x24x1023,batch_norm 2x5x8192,group_norm 1x24x6000 groups=3} layout=nhwc dtype={f32,f16,bf16} dir={fwd,bwd} "
         "act={prelu,silu} {+post_add,+pre_add +u,+pre_add +data=nan}"]
# Of each kind of matrix that `single` holds: what is added, parameters of samples, gradients that go to memory.
SINGLE = ["group_norm 5x12x7x9 groups=4 layout={nchw,nhwc} dtype=f32 dir=bwd act=prelu",
          "{group_norm 5x12x7x9 groups=4,instance_norm 5x12x7x9} layout={nchw,nhwc} dtype=bf16 dir={fwd,bwd} act=silu "
          "+pre_bias=sample +scale",
          "{group_norm 5x12x3x13 groups=4,batch_norm 5x12x3x13} layout={nchw,nhwc} dtype={f64,f16} dir={fwd,bwd} act=gelu "
          "+pre_add +u +post_add",
          "{group_norm 5x12x3x13 groups=4,batch_norm 5x12x3x13} layout={nchw,nhwc} dtype=f16 dir={fwd,bwd} {+slice_c +inplace,"
          "+slice_n}",
          "batch_norm 5x12x3x13 layout={nchw,nhwc} dtype=f16 dir=bwd +slice_n +accumulate",
          "{batch_norm 5x12x7x9,batch_norm 9x40x1} layout={nchw,nhwc} dtype=f32 dir={fwd,bwd} act=prelu",
          "{batch_norm 5x12x7x9,batch_norm 9x40x1,instance_norm 5x12x7x9} layout={nchw,nhwc} dtype=f16 +running",
          "{batch_norm 5x12x7x9 mode=eval,affine 5x12x7x9,affine 5x12x7x9 per=sample} layout={nchw,nhwc} dtype=f32 "
          "dir={fwd,bwd} act=silu +pre_bias",
          "group_norm {6x12 groups=12,6x24 groups=2,33x6 groups=3} dtype=f32 dir={fwd,bwd} act=silu"]

# Of the small bodies that are compiled at run time. Sharded cases have the work `merge`, too, whose calls print no line.
BODIES = {"finish_shares_f64", "finish_statistics_f64", "finish_statistics_f32", "finish_running_f32", "finish_parts_f64",
          "finish_gradients_f64", "finish_gradients_f32", "transpose_f64", "transpose_f32", "transpose_f16"}


totals = [0, 0, 0]


def count(name: str, passed: int, failed: int, skipped: int, note: str = "") -> None:
    for k, n in enumerate((passed, failed, skipped)):
        totals[k] += n
    word = "FAIL" if failed else "skip" if skipped and not passed else "ok"
    print(f"{word:4}  {name}: {passed} passed, {failed} failed, {skipped} skipped  ({note})", flush=True)


class Emulator:
    def __init__(self, build: pathlib.Path) -> None:
        self.build = build
        # The library's cache keeps what was compiled, by the device's text; here by the emulator's, too.
        text = b"".join((ROOT / "tests/emulator" / name).read_bytes()
                        for name in ("emulator.h", "language.h", "nvrtc.c", "ptx.h"))
        self.env = {**os.environ, "LD_LIBRARY_PATH": str(build / "emulator"), "NORMFUSE_VERBOSE": "dispatch",
                    "NORMFUSE_NUM_THREADS": "1", "NORMFUSE_NVRTC": str(build / "emulator/libnvrtc.so.13"),
                    "NORMFUSE_CACHE_DIR": str(build / "emulator/kernels" / hashlib.sha256(text).hexdigest()[:16])}
        # Folders of the cache are the user's own, whatever the umask is.
        pathlib.Path(self.env["NORMFUSE_CACHE_DIR"]).mkdir(mode=0o755, parents=True, exist_ok=True)

    def run(self, program: str, *words: str, **env: str) -> Tuple[Optional[int], str, float]:
        begin = time.monotonic()
        try:
            done = subprocess.run([str(self.build / program), *words], env={**self.env, **env}, cwd=ROOT,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  timeout=RUN_SECONDS)
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, output = None, error.stdout or b""
        return code, output.decode("utf-8", "replace"), time.monotonic() - begin

    def schedules(self) -> List[str]:
        """The names of all, which the planner prints for a problem of each layout."""
        _, output, _ = self.run("test_operators", "--case", "group_norm 2x8x6x6 groups=2 layout={nchw,nhwc} device=cuda",
                                NORMFUSE_VERBOSE="plan")
        return list(dict.fromkeys(re.findall(r"^normfuse: plan: [^:]*: ([a-z_, ]+): ", output, re.M)))


def kernels_in(output: str) -> Set[str]:
    found: Set[str] = set()
    for line in re.findall(r"^normfuse: dispatch: [^:]*: (.*)$", output, re.M):
        found.update(word.split()[0] for word in line.split(" + ") if word)
    return found


def all_kernels() -> Set[str]:
    return set(re.findall(r"^normfuse_(\w+) ", (ROOT / "src/cuda/limits.txt").read_text(), re.M))


def report(name: str, code: Optional[int], output: str, seconds: float, note: str = "") -> None:
    passed = failed = skipped = 0
    for counts in CLOSING.findall(output):
        passed, failed, skipped = (int(n) for n in counts)
    if not failed and (code != 0 or passed + skipped == 0):
        failed = 1
    if failed:
        shown = [line for line in output.splitlines() if line.startswith(("FAIL", "emulator:"))]
        print("\n".join(shown[:20] or output.splitlines()[-20:]))
    count(name, passed, failed, skipped, ("ran past its time, " if code is None else "") + note + f"{seconds:.0f} s")


def check(emulator: Emulator, jobs: int, cases: int, seed: int) -> None:
    names = emulator.schedules()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        tasks = {}
        for name in FILES:
            tasks[f"{name}.txt"] = pool.submit(
                emulator.run, "test_operators", "--with", "device=cuda", "--every", EVERY, f"tests/cases/{name}.txt",
                NORMFUSE_EMULATED_MULTIPROCESSORS="4")
        for k in range(jobs):
            tasks[f"as planned, seed {seed + k}"] = pool.submit(
                emulator.run, "test_operators", "--with", "device=cuda +twice", "--seed", str(seed + k), "--random",
                str(cases))
        tasks["without sync memory"] = pool.submit(
            emulator.run, "test_operators", "--with", "device=cuda +no_sync", "--seed", str(seed), "--random",
            str(cases // 2))
        tasks["copies"] = pool.submit(emulator.run, "test_operators", "--every", "4", "--case", COPIES)
        tasks["many parts"] = pool.submit(emulator.run, "test_operators", "--schedule", "two_pass", "--case", MANY_PARTS)
        tasks["many blocks"] = pool.submit(emulator.run, "test_operators", "--case", MANY_BLOCKS,
                                           NORMFUSE_EMULATED_MULTIPROCESSORS="132")
        tasks["slopes"] = pool.submit(emulator.run, "test_operators", "--with", "device=cuda", "--every", "3",
                                      *(word for case in SLOPES for word in ("--case", case)))
        tasks["empty"] = pool.submit(emulator.run, "test_operators", "--with", "device=cuda",
                                     *(word for case in EMPTY for word in ("--case", case)))
        tasks["large for the GPU"] = pool.submit(
            emulator.run, "test_operators", "--with", "device=cuda", "--every", "3",
            *(word for case in LARGE for word in ("--case", case)),
            NORMFUSE_EMULATED_MULTIPROCESSORS="1")
        for k in range(jobs):
            # Small problems have few cheapest geometries.
            anyhow = ("--schedule", "single", "--geometry", str(seed + k), "--with", "device=cuda")
            tasks[f"single by any geometry, random, seed {seed + k}"] = pool.submit(
                emulator.run, "test_operators", *anyhow, "--seed", str(seed + k), "--drawn", str(cases // 2))
            tasks[f"single by any geometry, cases, seed {seed + k}"] = pool.submit(
                emulator.run, "test_operators", *anyhow, *(word for case in SINGLE[k::jobs] for word in ("--case", case)))
        for k, name in enumerate(names):
            # Few multiprocessors: what one cluster cannot hold is small, and goes to the whole grid.
            env = {"NORMFUSE_EMULATED_MULTIPROCESSORS": "4"}
            alone = ("--schedule", name, "--with", "device=cuda")
            tasks[f"{name} alone, random"] = pool.submit(
                emulator.run, "test_operators", *alone, "--seed", str(seed + k), "--drawn", str(cases), **env)
            if name != "single":
                tasks[f"{name} alone, cases"] = pool.submit(
                    emulator.run, "test_operators", *alone,
                    *(word for case in CASES for word in ("--case", case)), **env)
        ran: Set[str] = set()
        for name, task in tasks.items():
            code, output, seconds = task.result()
            kernels = kernels_in(output)
            ran |= kernels
            report(name, code, output, seconds, f"{len(kernels)} kernels, ")
    wanted = all_kernels() | BODIES
    never = sorted(wanted - ran)
    if never:
        print("skip  no problem ran " + ", ".join(never))
    count("kernels that ran", len(wanted) - len(never), 0, len(never), f"of {len(wanted)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", type=pathlib.Path, default=ROOT / "build/release", metavar="BUILD_FOLDER")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--cases", type=int, default=24, help="random problems of each schedule")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", action="append", metavar="CASE", help="only these cases of test_operators")
    parser.add_argument("--schedule", metavar="NAME", help="run these cases by one schedule alone")
    parser.add_argument("--geometry", metavar="SEED", help="run these cases by any geometry of `single`")
    parser.add_argument("--multiprocessors", metavar="N", help="run these cases by a GPU of so many")
    args = parser.parse_args()
    build = args.build.resolve()
    if platform.machine() != "x86_64":
        count("emulator", 0, 0, 1, f"it has no switch of stacks for {platform.machine()}")
    else:
        begin = time.monotonic()
        made = subprocess.run([args.cmake, "--build", str(build), "--target", "emulator", "-j", str(args.jobs)],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if made.returncode != 0:
            print("\n".join(made.stdout.splitlines()[-40:]))
        count("build", int(made.returncode == 0), int(made.returncode != 0), 0, f"{time.monotonic() - begin:.0f} s")
        emulator = Emulator(build)
        if made.returncode == 0 and args.case:
            words = [word for case in args.case for word in ("--case", case)]
            env = {"NORMFUSE_EMULATED_MULTIPROCESSORS": args.multiprocessors} if args.multiprocessors else {}
            alone = ["--schedule", args.schedule] if args.schedule else []
            alone += ["--geometry", args.geometry] if args.geometry else []
            report("cases", *emulator.run("test_operators", *alone, *words, **env))
        elif made.returncode == 0:
            check(emulator, args.jobs, args.cases, args.seed)
    print(f"{totals[0]} passed, {totals[1]} failed, {totals[2]} skipped")
    return 1 if totals[1] or not sum(totals) else 0


if __name__ == "__main__":
    sys.exit(main())

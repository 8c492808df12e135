#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The CUDA kernels on the CPU: builds tests/cuda/emulator/, a libcuda.so.1 that runs them and a libnvrtc.so.13 that
compiles those of run time, and compares what they compute with the double reference. Case files and random cases of
everything as they are planned, then each schedule alone, with its own geometry and with drawn ones. A kernel, an
exchange, or a body with a layout and an option (WANTED) that no problem ran has failed.
Closes with `N passed, N failed, N skipped`.

    tests/cuda/check_emulator.py [--jobs 2] [--cmake cmake] [--full] [--seed 1] [BUILD_FOLDER]

--full runs four times the cases: `make check FULL=1`.
    tests/cuda/check_emulator.py [--schedule held] [--geometry 2] --case "group_norm 2x8x5x5 groups=2 device=cuda"
    [BUILD_FOLDER]

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

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.M)
RUN_SECONDS = 400  # a kernel that waits for ever is noticed by the emulator itself
# Case files of what random cases seldom have: each so many-th, since most cases have a kernel of their own to compile.
FILES = ["special", "options", "operators"]
EVERY = "800"
# The shapes that `held` and `stream` walk through: rows and columns, folded and unaligned rows, strides, parameters of
# samples and of rows, what is added, norm groups of one block, of a cluster, of the grid, more of them than there are
# at a time.
WALKS = ["group_norm 5x12x7x9 groups=4 layout={nchw,nhwc} dtype={f32,f16} dir={fwd,bwd} act=silu",
         "batch_norm 5x12x3x13 layout={nchw,nhwc} dtype=bf16 dir={fwd,bwd} act=gelu +pre_add +u +post_add",
         "{group_norm 5x12x3x13 groups=4,batch_norm 5x12x3x13} layout={nchw,nhwc} dtype=f64 dir={fwd,bwd} act=relu +pre_add",
         "instance_norm 40x16x8x8 layout={nchw,nhwc} dtype=f16 dir={fwd,bwd} act=relu +post_add +inplace",
         "batch_norm 9x16x67 dtype=f16 dir={fwd,bwd} +pre_bias +data=large_mean",
         "{group_norm 2x64x24x24 groups=8,batch_norm 2x64x24x24} layout=nhwc dtype={f16,f32} dir={fwd,bwd}",
         "group_norm {1x8x6000 groups=2,2x6x4097 groups=3} dtype={f32,f16} dir={fwd,bwd} act=mish",
         "{group_norm 3x12x67 groups=2,batch_norm 3x12x67} act=prelu layout={nchw,nhwc} dtype=f32 dir=bwd {,+one_slope}",
         "group_norm 5x12x7x9 groups=4 layout={nchw,nhwc} dtype=f32 dir={fwd,bwd} act=silu +scale +pre_bias=sample",
         "group_norm 5x12x7x9 groups=4 layout={nchw,nhwc} dtype=f16 dir={fwd,bwd} {+slice_c,+slice_n,+misaligned}",
         "group_norm 5x12x7x9 groups=4 layout={nchw,nhwc} dtype=f16 dir={fwd,bwd} +pre_add +u +inplace",
         "{batch_norm 5x12x7x9,instance_norm 5x12x7x9} layout={nchw,nhwc} dtype=f32 +running"]
# By each schedule, so that each body has each layout with each option.
OPTIONS_OF_BODIES = ["group_norm 5x12x7x9 groups=4 layout={nchw,nhwc} dtype=bf16 dir={fwd,bwd} act=prelu +pre_add +u +post_add "
                     "+pre_bias +scale",
                     "group_norm 5x12x7x9 groups=4 layout={nchw,nhwc} dtype=f32 dir={fwd,bwd} act=silu"]
# Copies to other strides: vectors and elements, rows and whole planes, several tiles of each axis, no tile at all.
COPIES = ("affine {2x200x7x7,3x72x14x14,1x24x33x33,2x5x28x28,70x3x2x2,2x300x15x15,1x8x100x100,3000x7} dtype={f64,f32,f16} "
          "layout={nchw,nhwc} dir=bwd act=relu +post_add "
          "{+mixed=inputs,+mixed=outputs,+mixed +slice_c,+mixed=inputs +slice_n,+mixed=outputs +misaligned,"
          "+expanded}")
# More partial statistics than a block joins, of more norm groups than a GPU has blocks for.
MANY_PARTS = "group_norm 260x4100x8 groups=1 dtype=f16 +pre_add"
# Sums of x and what is added that u rounds: of equal values the variance is 0, whatever the sums were.
ROUNDED = "{instance_norm 128x1x5,batch_norm 5x64x1,instance_norm 40x3x9} dtype=f16 {+pre_add +u,+pre_add +pre_bias} +data=large_mean"
# More sums of channels of a norm group than a block joins at once.
MANY_SUMS = "group_norm 1x569x20x40 groups=1 layout=nhwc dir=bwd"
# A norm group of more blocks than the lanes that join them.
MANY_BLOCKS = "batch_norm 1x1x330x500"
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
# Each kind of matrix that `single` holds: what is added, parameters of samples, gradients that go to memory.
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
          "group_norm {6x12 groups=12,6x24 groups=2,33x6 groups=3} dtype=f32 dir={fwd,bwd} act=silu",
          "channel_norm {3x24x35,1x200x9,150x17} stat=rms eps_kind=norm layout=nhwc dtype={f32,bf16} dir={fwd,bwd} act=silu",
          "channel_norm {3x24x56,2x200x96} groups=2 {stat=rms,} dtype={f32,bf16} dir={fwd,bwd} act=silu +scale +pre_bias=sample"]
# Tiles of positions that blocks walk over: through shared memory, and (the last line) short vectors through registers.
TILES = ["channel_norm {2x24x2080,1x40x3136} {stat=rms,} dtype={bf16,f32} dir={fwd,bwd} act=silu",
         "channel_norm 2x24x2080 groups=2 dtype={f16,f64} dir={fwd,bwd} act=prelu +pre_add +u +post_add",
         "channel_norm 2x24x2080 stat=rms eps_kind=norm dtype=f16 y_dtype=f32 dir={fwd,bwd} act=relu +post_add +scale +slice_n",
         "channel_norm 2x24x2081 dtype={bf16,f32} dir={fwd,bwd} act=silu +pre_add"]

# Kernels, and what the blocks of `held` exchange through. Sharded cases have the work `merge`, too, whose calls print
# no line.
WANTED = {f"{body}_{direction}_{dtype}" for body in ("single", "held", "stream")
          for direction in ("forward", "backward") for dtype in ("f64", "f32", "f16", "bf16")}
WANTED |= {"finish_shares_f64", "finish_statistics_f64", "finish_statistics_f32", "finish_running_f32",
           "finish_parts_f64",
           "finish_gradients_f64", "finish_gradients_f32", "transpose_f64", "transpose_f32", "transpose_f16",
           "held through parts", "held through cluster", "held through grid"}
# Bodies, the map of their threads, which the layout is, and what is added or read besides.
OPTIONS = ["+pre_add", "+post_add", "+pre_bias", "+u", "+scale", "act=prelu", "act=silu"]
WANTED |= {f"{body}_{direction} {layout} {option}" for body in ("single", "held", "stream")
           for direction in ("forward", "backward") for layout in ("nchw", "nhwc") for option in OPTIONS}

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
        text = b"".join((ROOT / "tests/cuda/emulator" / name).read_bytes()
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


def kernels_in(output: str) -> Set[str]:
    found: Set[str] = set()
    for line in re.findall(r"^normfuse: dispatch: [^:]*: (.*)$", output, re.M):
        found.update(word.split()[0] for word in line.split(" + ") if word)
    found.update(f"held through {way}" for way in re.findall(r" held_\w+ \d+x\d+ (\w+)=", output))
    # The kernels of a case are printed ahead of the case.
    bodies: Set[str] = set()
    for line in output.splitlines():
        if line.startswith("normfuse: dispatch: "):
            bodies.update(re.findall(r"\b(single_[a-z]+|held_[a-z]+|stream_[a-z]+)_", line))
        elif re.match(r" *[\d.]+ %  ", line):
            words = line.replace('"', " ").split()
            layout = "nhwc" if "layout=nhwc" in words else "nchw"
            found.update(f"{body} {layout} {option}" for body in bodies for option in OPTIONS
                         if any(word.partition("=")[0] == option or word == option for word in words))
            bodies.clear()
    return found


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


def check(emulator: Emulator, jobs: int, more: int, seed: int) -> None:
    def words(cases: List[str]) -> List[str]:
        return [word for case in cases for word in ("--case", case)]

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        tasks = {}

        def add(name: str, *arguments: str, multiprocessors: int = 4, given: str = "device=cuda") -> None:
            if "--every" in arguments:  # of cases that are run by default
                at = arguments.index("--every") + 1
                arguments = (*arguments[:at], str(max(1, int(arguments[at]) // more)), *arguments[at + 1:])
            tasks[name] = pool.submit(emulator.run, "test_operators", "--verbose", "--with", given, *arguments,
                                      NORMFUSE_EMULATED_MULTIPROCESSORS=str(multiprocessors))

        for name in FILES:
            add(f"{name}.txt", "--every", EVERY, f"tests/cases/{name}.txt")
        add("as planned", "--seed", str(seed), "--random", str(12 * more), given="device=cuda +twice")
        add("without sync memory", "--seed", str(seed), "--random", str(6 * more), given="device=cuda +no_sync")
        add("channel.txt", "--every", "250", "tests/cases/channel.txt")
        add("copies", "--every", "24", "--case", COPIES)
        for schedule in ("stream", "held"):
            add(f"rounded sums, {schedule}", "--schedule", schedule, "--case", ROUNDED)
        add("many parts", "--schedule", "stream", "--case", MANY_PARTS)
        add("many sums", "--schedule", "stream", "--case", MANY_SUMS, multiprocessors=132)
        add("many blocks", "--schedule", "held", "--geometry", "12", "--case", MANY_BLOCKS, multiprocessors=44)
        for schedule in ("single", "stream", "held"):
            add(f"options by {schedule}", "--schedule", schedule, *words(OPTIONS_OF_BODIES))
        add("slopes", "--every", "18", *words(SLOPES))
        add("empty", "--every", "2", *words(EMPTY))
        add("single by any geometry", "--schedule", "single", "--geometry", str(seed), "--every", "6", *words(SINGLE))
        add("tiles", "--every", "2", *words(TILES), multiprocessors=2)
        add("held", "--schedule", "held", "--every", "4", *words(WALKS))
        # More norm groups than there are at a time; other geometries than the cheapest, which small problems have few
        # of.
        add("held on one multiprocessor", "--schedule", "held", "--every", "10", *words(WALKS), multiprocessors=1)
        for k in range(2):
            add(f"held by any geometry, seed {seed + k}", "--schedule", "held", "--geometry", str(seed + k), "--every",
                "6", *words(WALKS[k:]))
        add("held without sync memory", "--schedule", "held", "--every", "14", *words(WALKS),
            given="device=cuda +no_sync")
        add("stream", "--schedule", "stream", "--every", "4", *words(WALKS[1:]))
        ran: Set[str] = set()
        for name, task in tasks.items():
            code, output, seconds = task.result()
            kernels = kernels_in(output)
            ran |= kernels
            report(name, code, output, seconds, f"{len(kernels)} kernels, ")
    never = sorted(WANTED - ran)
    if never:
        print("FAIL  no problem ran " + ", ".join(never))
    count("kernels that ran", len(WANTED) - len(never), len(never), 0, f"of {len(WANTED)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", type=pathlib.Path, default=ROOT / "build/release", metavar="BUILD_FOLDER")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--full", action="store_true", help="run four times the cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", action="append", metavar="CASE", help="only these cases of test_operators")
    parser.add_argument("--schedule", metavar="NAME", help="run these cases by one schedule alone")
    parser.add_argument("--geometry", metavar="SEED", help="run these cases by any geometry that a schedule has")
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
            check(emulator, args.jobs, 4 if args.full else 1, args.seed)
    print(f"{totals[0]} passed, {totals[1]} failed, {totals[2]} skipped")
    return 1 if totals[1] or not sum(totals) else 0


if __name__ == "__main__":
    sys.exit(main())

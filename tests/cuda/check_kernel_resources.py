#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""check_kernel_resources.py [--write] NVRTC [BUILD_FOLDER] - registers and stack of the CUDA kernels of drawn problems,
as the library at the path NVRTC compiles them for compute capability 9.0, against the limits in tests/cuda/limits.txt:
one for each body, direction and type. --write makes the figures of this build the limits. BUILD_FOLDER is build/release."""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LIMITS = ROOT / "tests/cuda/limits.txt"
PROBLEMS = "60"
SEED = "1"  # the same problems on every machine
FOUND = re.compile(r"^normfuse: compile: normfuse_(\w+): (\d+) registers, (\d+) bytes of stack", re.M)
COMPILER = re.compile(r"by NVRTC (\d+\.\d+)")

counts = [0, 0, 0]


def check(what, passed):
    counts[not passed] += 1
    if not passed:
        print(f"FAIL {what}")


def compile_problems(nvrtc, build):
    """{kernel: (most registers, most bytes of stack: spills, and arrays in local memory)}, and the compiler's
    version."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([build / "normfuse", "compile", "--random", PROBLEMS, "--seed", SEED, "--gpu", "9.0",
                               "-o", folder],
                              env={**os.environ, "NORMFUSE_NVRTC": str(nvrtc), "NORMFUSE_VERBOSE": "compile"},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"normfuse compile ended with {done.returncode}:\n{done.stdout[-2000:]}")
    most = {}
    for kernel, *used in FOUND.findall(done.stdout):
        most[kernel] = tuple(max(a, int(b)) for a, b in zip(most.get(kernel, (0, 0)), used))
    return most, COMPILER.search(done.stdout)[1]


def limits():
    rows = (line.split() for line in LIMITS.read_text().splitlines() if line.strip() and not line.startswith("#"))
    return {kernel: (int(registers), int(stack)) for kernel, registers, stack in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the figures of this build the limits")
    parser.add_argument("nvrtc", type=pathlib.Path)
    parser.add_argument("build", nargs="?", type=pathlib.Path, default=ROOT / "build/release")
    args = parser.parse_args()
    kernels, version = compile_problems(args.nvrtc, args.build.resolve())
    if args.write:
        LIMITS.write_text(f"# What kernels of {PROBLEMS} drawn problems may use on sm_90, by NVRTC {version}: "
                          "tests/cuda/check_kernel_resources.py\n"
                          "# --write makes this file.\n# kernel registers stack_bytes\n" +
                          "".join(f"{kernel} {used[0]} {used[1]}\n" for kernel, used in sorted(kernels.items())))
    allowed = limits()
    check(f"{LIMITS.name} has other kernels: {sorted(kernels.keys() ^ allowed.keys())}",
          kernels.keys() == allowed.keys())
    for kernel in sorted(kernels.keys() & allowed.keys()):
        for what, used, most in zip(("registers", "bytes of stack"), kernels[kernel], allowed[kernel]):
            check(f"{kernel}: {used} {what}, the limit is {most}", used <= most)
    print(f"{len(kernels)} kernels: at most {max(used[0] for used in kernels.values())} registers, "
          f"{sum(used[1] > 0 for used in kernels.values())} with a stack")
    print(f"{counts[0]} passed, {counts[1]} failed, {counts[2]} skipped")
    sys.exit(counts[1] > 0)


main()

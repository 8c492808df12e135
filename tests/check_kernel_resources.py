# SPDX-License-Identifier: MIT
"""check_kernel_resources.py [--write] FOLDER - registers and spills of every CUDA kernel, as ptxas reported them when
the build made the fatbins in FOLDER (build/release/cuda), against the limits in src/cuda/limits.txt; and that the
kernels compiled are those that src/cuda/kernels.def lists. --write makes the figures of this build the limits."""
import argparse
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = ROOT / "src/cuda/limits.txt"
# Limits are for one architecture, the one that development builds make; others differ by a few registers.
ARCHITECTURE = "sm_90a"
HEAD = f"""# SPDX-License-Identifier: MIT
#
# What each kernel may use on {ARCHITECTURE}, checked by tests/check_kernel_resources.py, whose --write makes this file.
# kernel registers spill_bytes
"""

counts = [0, 0, 0]


def check(rule, offenders):
    counts[bool(offenders)] += 1
    for offender in sorted(offenders):
        print(f"FAIL {rule}: {offender}")


def reported(folder):
    """{(kernel, architecture): (registers, bytes of spill stores and loads)}"""
    kernels, key, spills = {}, None, 0
    for path in sorted(folder.glob("*.resources")):
        for line in path.read_text().splitlines():
            if found := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
                key, spills = found.groups(), 0
            elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
                spills = int(found[1]) + int(found[2])
            elif (found := re.search(r"Used (\d+) registers", line)) and key:
                kernels[key] = int(found[1]), spills
                key = None
    return kernels


def listed():
    """The kernels of kernels.def, as the C preprocessor sees them."""
    source = ('#include "kernels.def"\n#define ROW(layout, schedule, direction, type, elements, vectors, registers) '
              "@normfuse_##layout##_##schedule##_##direction##_##type##_##elements##x##vectors@\nNORMFUSE_KERNELS(ROW)\n")
    text = subprocess.run([os.environ.get("CC") or "cc", "-E", "-P", f"-I{ROOT / 'src/cuda'}", "-x", "c", "-"],
                          input=source, stdout=subprocess.PIPE, text=True, check=True).stdout
    return set(re.findall(r"@(\w+)@", text))


def limits():
    rows = (line.split() for line in LIMITS.read_text().splitlines() if line.strip() and not line.startswith("#"))
    return {name: (int(registers), int(spills)) for name, registers, spills in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write src/cuda/limits.txt from this build")
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    kernels = reported(args.folder)
    ours = {name: used for (name, architecture), used in kernels.items() if architecture == ARCHITECTURE}
    if args.write:
        if not ours:
            sys.exit(f"no kernel in {args.folder} was compiled for {ARCHITECTURE}")
        LIMITS.write_text(HEAD + "".join(f"{name} {used[0]} {used[1]}\n" for name, used in sorted(ours.items())))

    if not kernels:
        print(f"skipped: {args.folder} holds PTX only, or nothing")
        counts[2] += 1
    else:
        names = {name for name, _ in kernels}
        check("a kernel of kernels.def was not compiled", listed() - names)
        check("a kernel that was compiled is not in kernels.def", names - listed())
    if not ours:
        print(f"skipped: limits are for {ARCHITECTURE}, which was not compiled")
        counts[2] += 1
    else:
        allowed = limits()
        check(f"no limit in {LIMITS.name}", ours.keys() - allowed.keys())
        check(f"{LIMITS.name} names a kernel that is not there", allowed.keys() - ours.keys())
        for name in sorted(ours.keys() & allowed.keys()):
            for what, used, most in zip(("registers", "bytes of spills"), ours[name], allowed[name]):
                check(f"{name} on {ARCHITECTURE}", {f"{used} {what}, the limit is {most}"} if used > most else set())
    if ours:
        print(f"{len(ours)} kernels: at most {max(used[0] for used in ours.values())} registers, "
              f"{sum(used[1] > 0 for used in ours.values())} with spills")
    print(f"{counts[0]} passed, {counts[1]} failed, {counts[2]} skipped")
    sys.exit(counts[1] > 0)


main()

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""check_functions.py [FILE...] - no function of src/cuda has more than 100 lines between its braces, members of structs
and kernels among them. Functions are found by their braces, which clang-format puts on lines of their own. The last
line is `N passed, N failed, N skipped`."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LONGEST = 100


def functions(text):
    """(name, lines between the braces) of each block whose braces have a line of their own."""
    lines, opened = text.splitlines(), []
    for number, line in enumerate(lines):
        if brace := re.fullmatch(r"( *)\{", line):
            opened.append((len(brace[1]), number))
        elif opened and re.match(r"\}", line[opened[-1][0]:]) and not line[:opened[-1][0]].strip():
            indent, first = opened.pop()
            head = first - 1
            while head > 0 and not re.match(rf" {{{indent}}}\S", lines[head]):
                head -= 1
            name = re.search(r"(\w+)\(", lines[head])
            yield name[1] if name else f"line {first + 1}", number - first - 1


def main():
    paths = [pathlib.Path(word) for word in sys.argv[1:]] or sorted(
        path for path in (ROOT / "src/cuda").iterdir() if path.suffix in (".c", ".h", ".cu", ".cuh"))
    passed = failed = 0
    for path in paths:
        for name, count in functions(path.read_text()):
            passed += count <= LONGEST
            if count > LONGEST:
                failed += 1
                print(f"FAIL {path.name}: {name} has {count} lines, {LONGEST} are allowed")
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(failed > 0 or passed == 0)


main()

# SPDX-License-Identifier: MIT
"""python -m normfuse.onnx rewrite MODEL -o OUTPUT: puts operators of the domain "normfuse" in the place of a model's
normalizations, and says what became of each of them."""
import argparse
import sys

from . import library_path, rewrite_file
from .._program import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m normfuse.onnx", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("rewrite", help="replace a model's normalizations")
    command.add_argument("model")
    command.add_argument("-o", "--output", required=True, help="may be MODEL itself")
    commands.add_parser("library", help="print the path of the library for register_custom_ops_library")
    words = parser.parse_args()
    try:
        if words.command == "library":
            lines = [library_path()]
        else:
            changes = rewrite_file(words.model, words.output)
            replaced = sum(change.operator is not None for change in changes)
            lines = [*changes, f"{replaced} replaced, {len(changes) - replaced} left"]
    except (ImportError, OSError, ValueError) as error:
        print(f"normfuse.onnx: {error}", file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    run(main)

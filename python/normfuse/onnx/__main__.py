# SPDX-License-Identifier: MIT
"""python -m normfuse.onnx rewrite MODEL -o OUTPUT: puts operators of the domain "normfuse" in the place of a model's
normalizations, and says what became of each of them."""
import argparse
import sys

from . import library_path, rewrite_file


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
            print(library_path())
            return 0
        changes = rewrite_file(words.model, words.output)
    except (ImportError, OSError, ValueError) as error:
        print(f"normfuse.onnx: {error}", file=sys.stderr)
        return 2
    for change in changes:
        print(change)
    replaced = sum(change.operator is not None for change in changes)
    print(f"{replaced} replaced, {len(changes) - replaced} left")
    return 0


if __name__ == "__main__":
    sys.exit(main())

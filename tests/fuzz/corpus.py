# SPDX-License-Identifier: MIT
"""corpus.py FOLDER: writes FOLDER/<target>_seed_corpus.zip of each fuzz target, from fuzz/<target>.txt (replay.c has
the format) and, for the operator calls, choices drawn at random. The same bytes every time.
corpus.py --line FILE: an input, as a fuzzing engine leaves it, as a line of such a text."""
import pathlib
import random
import re
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|n|\\)")


def unescape(line):
    return ESCAPE.sub(lambda m: {b"n": b"\n", b"\\": b"\\"}.get(m[1]) or bytes.fromhex(m[1][1:].decode()), line)


def inputs(path):
    lines = path.read_bytes().split(b"\n")
    return [unescape(line) for line in lines if line and not line.startswith(b"# ")]


def random_calls():
    """Calls of each of the four operators. Short inputs, whose further choices are 0, and bytes that are not 63 modulo
    64 (rarely() in fuzz_calls.c), are calls that are accepted: of 400 bytes of any value all calls of a norm over
    channels were refused."""
    for operator in range(4):
        for call in range(8):
            for seed in range(4):
                drawn = random.Random(seed * 64 + operator * 8 + call).randbytes(16 * 3**seed)
                yield bytes([operator, call]) + bytes(byte - (byte % 64 == 63) for byte in drawn)


def line_of(seed):
    text = "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in seed.replace(b"\\", b"\\\\"))
    return text.replace("\\x0a", "\\n") if not text.startswith("# ") else "\\x23" + text[1:]


if sys.argv[1] == "--line":
    sys.exit(print(line_of(pathlib.Path(sys.argv[2]).read_bytes())))
for path in sorted(HERE.glob("fuzz_*.txt")):
    seeds = inputs(path) + (list(random_calls()) if path.stem == "fuzz_calls" else [])
    with zipfile.ZipFile(pathlib.Path(sys.argv[1]) / f"{path.stem}_seed_corpus.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for number, seed in enumerate(seeds):
            file.writestr(zipfile.ZipInfo(f"{number:04}"), seed)

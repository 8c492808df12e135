# SPDX-License-Identifier: MIT
"""check_abi.py [--write] SHARED - compares the binary interface with tests/abi.txt: the functions of include/normfuse.h
that the shared library exports, the layout of every struct and the value of every constant. The layout is what the C
compiler (CC, or cc) says on this machine; it is the same on every 64-bit Linux. --write makes tests/abi.txt anew."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = ROOT / "include/normfuse.h"
KNOWN = ROOT / "tests/abi.txt"
COMMENT = "# The binary interface of libnormfuse.so. tests/check_abi.py compares it, and writes it with --write.\n"


def tool(*command):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True).stdout


def split_field(declaration):
    """("const int64_t *", "sizes") of "const int64_t *sizes"; a pointer to a function keeps its whole declaration."""
    pointer = re.search(r"\(\*(\w+)\)", declaration)
    if pointer:
        return declaration, pointer.group(1)
    name = re.search(r"(\w+)(\[\w+\])?$", declaration)
    return (declaration[:name.start()].strip() + (name.group(2) or "")), name.group(1)


def unnamed(parameter):
    words = re.match(r"(.*[\s*])\w+$", parameter)
    return words.group(1).strip() if words else parameter


def interface(library):
    """{what: how it is}, in the header's order: "function NAME", "constant NAME", "struct NAME", "field
    STRUCT.NAME"."""
    text = re.sub(r"/\*.*?\*/", " ", HEADER.read_text(), flags=re.S)
    text = " ".join(re.sub(r"^#.*$", "", text, flags=re.M).split())
    exported = {line.split()[-1].split("@")[0]: line.split()[-1]
                for line in tool("nm", "-D", "--defined-only", "--with-symbol-versions", library).splitlines()}
    found = {}
    for result, name, parameters in re.findall(r"NORMFUSE_API ([^;(]*?)(\w+)\(([^;]*)\);", text):
        if name in exported:
            version = exported[name][len(name):]
            parameters = ", ".join(unnamed(parameter.strip()) for parameter in parameters.split(","))
            found[f"function {name}"] = f"{result.strip()}({parameters}){version and ' ' + version}"

    # Sizes and offsets that only a compiler knows, printed by a program.
    prints = []
    for body in re.findall(r"enum(?: \w+)? \{(.*?)\}", text):
        for name in re.findall(r"(NORMFUSE_\w+) =", body):
            prints.append(f'printf("constant {name}\\t%lld\\n", (long long){name});')
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text):
        prints.append(f'printf("struct {name}\\t%zu bytes, aligned to %zu\\n", sizeof({name}), _Alignof({name}));')
        for declaration in filter(None, (part.strip() for part in body.split(";"))):
            kind, field = split_field(declaration)
            prints.append(f'printf("field {name}.{field}\\tat %zu, %zu bytes: {kind}\\n", offsetof({name}, {field}), '
                          f'sizeof((({name} *)0)->{field}));')
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "layout.c"
        source.write_text("#include <normfuse.h>\n#include <stdio.h>\nint main(void)\n{\n    " + "\n    ".join(prints) +
                          "\n    return 0;\n}\n")
        tool(os.environ.get("CC") or "cc", "-std=c11", f"-I{ROOT / 'include'}", source, "-o", source.with_suffix(""))
        found.update(line.split("\t") for line in tool(source.with_suffix("")).splitlines())
    return found


def struct_bytes(known, name):
    return int(known[f"struct {name}"].split()[0])


def grows(old, new, what):
    """Whether a struct that says its size, or a field behind all that it had, is an addition that a caller built
    against the old struct does not notice."""
    name = what.split()[1].split(".")[0]
    if f"struct {name}" not in old:
        return True
    if f"field {name}.struct_bytes" not in old or struct_bytes(new, name) <= struct_bytes(old, name):
        return False
    if what.startswith("field "):
        return int(re.match(r"at (\d+)", new[what]).group(1)) >= struct_bytes(old, name)
    return new[what].split(", ")[1] == old[what].split(", ")[1]


def compare(old, new):
    """The lines that break callers, and those that do not."""
    breaks = [f"{what} is removed ({old[what]})" for what in old if what not in new]
    additions = []
    for what in new:
        if what not in old:
            fits = what.split()[0] != "field" or grows(old, new, what)
            (additions if fits else breaks).append(f"{what} is added ({new[what]})")
        elif old[what] != new[what]:
            fits = what.startswith("struct ") and grows(old, new, what)
            (additions if fits else breaks).append(f"{what} was {old[what]}; is {new[what]}")
    return breaks, additions


def main(words):
    write = "--write" in words
    new = interface(next(word for word in words if word != "--write"))
    if write:
        KNOWN.write_text(COMMENT + "".join(f"{what}\t{how}\n" for what, how in new.items()))
    old = dict(line.split("\t") for line in KNOWN.read_text().splitlines() if not line.startswith("#"))
    breaks, additions = compare(old, new)
    for line in breaks:
        print(f"FAIL {line}")
    if breaks:
        print("#    Programs that were built against tests/abi.txt break. Restore it; or raise the minor version (from 1.0 on the "
              "major),\n#    say so in CHANGELOG.md, and run tests/check_abi.py --write.")
    for line in additions:
        print(f"FAIL {line}")
    if additions:
        print("#    Additions break no program, where the library goes on taking the old struct_bytes of a struct that grew. A "
              "patch version\n#    has none. Name them in CHANGELOG.md, and run tests/check_abi.py --write.")
    print(f"{len(new)} lines of the binary interface")
    print(f"{2 - bool(breaks) - bool(additions)} passed, {bool(breaks) + bool(additions)} failed, 0 skipped")
    return bool(breaks or additions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

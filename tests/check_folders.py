# SPDX-License-Identifier: MIT
"""check_folders.py [ROOT] - no two folders of sources include or import one another, by whatever way round."""
import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
# Folders that an #include is looked up in, after the file's own, as the targets in CMakeLists.txt have them.
SEARCHED = [ROOT / name for name in ("include", "src", "cli", "tests/ref", ".")]
FOLDERS = ("src", "include", "cli", "tests/ref", "bench")
PACKAGE = ROOT / "python/normfuse"


def included(path):
    for name in re.findall(r'^ *# *include "([^"]+)"', path.read_text(), re.M):
        found = [folder / name for folder in (path.parent, *SEARCHED) if (folder / name).is_file()]
        if found:
            yield found[0].resolve()


def file_of(module):
    return next((file for file in (module.with_suffix(".py"), module / "__init__.py") if file.is_file()), None)


def imported(path):
    """Modules of the package that are imported where the file begins; functions may import what they need later."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            start = path.parents[node.level - 1] if node.level else ROOT / "python"
            module = start.joinpath(*(node.module or "").split("."))
            yield from (file_of(module / name.name) or file_of(module) or module for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (file_of(ROOT / "python" / name.name.replace(".", "/")) or ROOT / name.name
                        for name in node.names)


def arrows():
    """Each folder, and the folders that its files need, with a file that does."""
    made = {}
    for root, suffixes, needed in (*((ROOT / name, (".c", ".h", ".inl", ".cuh", ".hpp"), included) for name in FOLDERS),
                                   (PACKAGE, (".py",), imported)):
        for path in sorted(p for p in root.rglob("*") if p.suffix in suffixes):
            for other in needed(path):
                if other.is_file() and other.parent != path.parent:
                    made.setdefault(path.parent, {}).setdefault(other.parent, path)
    return made


def circle(made):
    """Folders of which each needs the next one, and the last the first; None: there are none."""
    done = set()

    def walk(folder, way):
        if folder in way:
            return way[way.index(folder):] + [folder]
        if folder in done:
            return None
        for other in made.get(folder, {}):
            found = walk(other, way + [folder])
            if found:
                return found
        done.add(folder)
        return None

    return next(filter(None, (walk(folder, []) for folder in sorted(made))), None)


def main():
    made = arrows()
    found = circle(made)
    if found:
        for folder, other in zip(found, found[1:]):
            print(f"FAIL {folder.relative_to(ROOT)} needs {other.relative_to(ROOT)}: "
                  f"{made[folder][other].relative_to(ROOT)}")
    print(f"{0 if found else len(made)} passed, {int(bool(found))} failed, 0 skipped")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

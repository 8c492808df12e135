#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Plants the bugs of tests/mutants/*.patches, one at a time, in a copy of the tree, and expects the check that each
patch
names to fail. Before that every check must pass without a bug. Closes with `N passed, N failed, N skipped`: a mutant
that its check does not notice has failed. Needs nothing but the standard library.

The copy is build/mutants, its build folder build/mutants/build/release. Logs: build/logs/.

A file has the patches of one part of the tree. A patch begins with its name, what is planted and what must notice it;
then comes a unified diff:

    === small-rows
    planted: one line
    check: test_operators --case "group_norm 2x8x5x5 groups=2"
    needs: gpu

A check is a test program of the build with its arguments, `pytest FILE [-k WORDS]`, check_symbols.py, or
check_emulator.py with its arguments, which runs CUDA kernels on the CPU. `needs: gpu` marks those that only a GPU runs;
pytest's need NORMFUSE_TEST_DEVICE=cuda there. pytest runs the cases that `make check` runs. Each hunk's old lines must
be in their file exactly once; line numbers do
not count.
"""
import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from typing import Dict, List, NamedTuple, Optional, Tuple

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
PATCHES = ROOT / "tests/mutants"
PAGE = ROOT / "docs/testing.md"
TABLE = re.compile(r"(?<=<!-- tests/mutants -->\n).*?(?=<!-- end -->)", re.S)
CHECK_SECONDS = 300  # without a bug; with one: a minute and ten times what it took

totals = [0, 0, 0]


def report(word: str, name: str, note: str) -> None:
    totals[("ok", "FAIL", "skip").index(word)] += 1
    print(f"{word:4}  {name}: {note}", flush=True)


# ---- patches --------------------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    name: str
    planted: str
    check: str
    gpu: bool
    hunks: List[Tuple[str, str, str]]  # path, old lines, new lines


def read_mutants() -> List[Mutant]:
    """All, in the order of their names."""
    mutants: Dict[str, Mutant] = {}
    for path in sorted(PATCHES.glob("*.patches")):
        for text in re.split(r"^=== ", path.read_text(), flags=re.M)[1:]:
            mutant = read_mutant(*text.split("\n", 1))
            if mutant.name in mutants:
                raise ValueError(f"{path.name}: there are two mutants {mutant.name}")
            mutants[mutant.name] = mutant
    return [mutants[name] for name in sorted(mutants)]


def read_mutant(title: str, text: str) -> Mutant:
    head, _, diff = text.partition("--- a/")
    fields = dict(re.findall(r"^(planted|check|needs): (.+)$", head, re.M))
    hunks: List[Tuple[str, str, str]] = []
    name = ""
    for line in ("--- a/" + diff).splitlines(keepends=True):
        if line.startswith("--- a/"):
            name = line[6:].strip()
        elif line.startswith("@@"):
            hunks.append((name, "", ""))
        elif line[0] in " +-" and not line.startswith("+++ "):
            file, old, new = hunks[-1]
            hunks[-1] = (file, old + line[1:] * (line[0] != "+"), new + line[1:] * (line[0] != "-"))
    if set(fields) - {"needs"} != {"planted", "check"} or fields.get("needs", "gpu") != "gpu" or not hunks:
        raise ValueError(f"{title} needs the lines planted: and check:, and a diff")
    return Mutant(title, fields["planted"], fields["check"], "needs" in fields, hunks)


def mutated(mutant: Mutant, tree: pathlib.Path) -> Dict[pathlib.Path, str]:
    """What the files become. ValueError where old lines are not there, or more than once."""
    texts: Dict[pathlib.Path, str] = {}
    for name, old, new in mutant.hunks:
        path = tree / name
        text = texts.get(path) or (path.read_text() if path.is_file() else "")
        found = len(re.findall("^" + re.escape(old), text, re.M))
        if found != 1:
            raise ValueError(f"no longer applies: its lines are in {name} {found} times")
        at = re.search("^" + re.escape(old), text, re.M).start()
        texts[path] = text[:at] + new + text[at + len(old):]
    return texts


def table(mutants: List[Mutant]) -> str:
    def cell(text):
        return text.replace("|", "\\|")
    rows = [f"| {m.name} | {cell(m.planted)} | `{cell(m.check)}`{' (GPU)' if m.gpu else ''} |\n" for m in mutants]
    return "| name | planted | caught by |\n|---|---|---|\n" + "".join(rows)


def verify(mutants: List[Mutant], write: bool) -> None:
    """What `make check` runs: every patch applies, and the page has the table of them."""
    for mutant in mutants:
        try:
            mutated(mutant, ROOT)
            report("ok", mutant.name, "applies")
        except ValueError as error:
            report("FAIL", mutant.name, str(error))
    text = PAGE.read_text()
    if write:
        PAGE.write_text(TABLE.sub(lambda _: table(mutants), text))
    shown = TABLE.search(PAGE.read_text())
    good = shown is not None and shown.group() == table(mutants)
    report("ok" if good else "FAIL", "docs/testing.md",
           "has the table" if good else "its table is not that of the patches; tests/mutants/run.py --write makes it")


# ---- the copy -------------------------------------------------------------------------------------------------------


class Tree:
    def __init__(self, jobs: str, cmake: str) -> None:
        self.root, self.release = BUILD / "mutants", BUILD / "mutants/build/release"
        self.jobs, self.cmake = jobs, cmake

    def copy(self) -> None:
        """The tracked files as they are now. Files that did not change keep their time, so that little is built."""
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE,
                               text=True).stdout.split("\0")[:-1]
        wanted = {self.root / name for name in names if (ROOT / name).is_file()}
        for path in self.root.rglob("*"):
            if path.is_file() and path not in wanted and self.root / "build" not in path.parents:
                path.unlink()
        for path in wanted:
            source = ROOT / path.relative_to(self.root)
            if not path.exists() or path.read_bytes() != source.read_bytes():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, path)

    def configure(self) -> bool:
        return execute("mutants: configure", [self.cmake, "-S", self.root, "-B", self.release,
                                              "-DCMAKE_BUILD_TYPE=Release"]) == 0

    def build(self, name: str, target: str) -> bool:
        return execute(f"mutants: build {name}", [self.cmake, "--build", self.release, "-j", self.jobs, "--target",
                                                  *target.split()], 900) == 0

    def targets(self, check: str) -> str:
        """What a check needs built; "" for a check that this build does not have."""
        words = shlex.split(check)
        if words[0] == "pytest":
            return "normfuse_program" if words[1] == "tests/test_program.py" else "normfuse normfuse_onnxruntime"
        if words[0] == "check_symbols.py":
            return "normfuse normfuse_onnxruntime normfuse_static"
        has_cuda = (self.release / "tests/CMakeFiles/test_compile.dir").is_dir()
        if words[0] == "check_emulator.py":
            return "test_operators normfuse_program emulator" if has_cuda else ""
        return "" if words[0].startswith("test_cuda") and not has_cuda else words[0]

    def command(self, check: str, release: Optional[pathlib.Path] = None) -> List[str]:
        words = shlex.split(check)
        release = release or self.release
        if words[0] == "pytest":
            # Files without PyTorch and JAX run where `make check` runs them.
            torch = words[1] not in ("tests/test_program.py", "python/tests/test_arrays.py")
            python = BUILD / ("venv-torch" if torch
                              else "venv") / "bin/python" if release == self.release else sys.executable
            return [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words[1:]]
        if words[0] == "check_symbols.py":
            return [sys.executable, str(self.root / "tests/check_symbols.py"), str(release / "libnormfuse.so"),
                    str(release / "libnormfuse.a")]
        if words[0] == "check_emulator.py":
            return [sys.executable, str(self.root / "tests/cuda/check_emulator.py"), "--cmake", self.cmake, *words[1:],
                    str(release)]
        return [str(release / words[0]), *words[1:]]

    def check(self, name: str, check: str, seconds: float = CHECK_SECONDS,
              release: Optional[pathlib.Path] = None) -> Optional[int]:
        env = {"NORMFUSE_PROGRAM": str(self.release / "normfuse"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
               "PYTHONDONTWRITEBYTECODE": "1", "NORMFUSE_TEST_SAMPLED": "1"}
        if release is not None:
            env["NORMFUSE_LIBRARY"] = str(release / "libnormfuse.so")
        return execute(f"mutants: {name}", self.command(check, release), seconds, env,
                       self.root if release is None else ROOT)


def execute(name, command, timeout=CHECK_SECONDS, env=None, cwd=ROOT) -> Optional[int]:
    """Its exit code; None past its time."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / (re.sub(r"[^A-Za-z0-9]+", "-", name) + ".txt")
    with open(log, "w") as output:
        output.write(f"$ {shlex.join(map(str, command))}\n")
        output.flush()
        process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: Optional[int] = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = None
        output.write(f"\nexit code {code}\n")
    return code


# ---- mutants --------------------------------------------------------------------------------------------------------


def outcome(check: str, code: Optional[int]) -> Tuple[bool, str]:
    """Whether the check failed as a check: pytest has other codes for tests that it could not run."""
    if code is None:
        return True, "caught: past its time"
    if check.startswith("pytest") and code > 1:
        return False, f"pytest ran no tests (exit code {code})"
    return code != 0, f"caught: exit code {code}" if code else "not caught"


def has_gpu() -> bool:
    return bool(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def run(mutants: List[Mutant], tree: Tree, export: Optional[pathlib.Path]) -> None:
    tree.copy()
    if not tree.configure():
        report("FAIL", "configure", f"see {LOGS.relative_to(ROOT)}/mutants-configure.txt")
        return
    runnable = []
    for mutant in mutants:
        if not tree.targets(mutant.check):
            report("skip", mutant.name, "the build has no CUDA backend")
        elif mutant.gpu and not has_gpu() and not export:
            report("skip", mutant.name, "needs a GPU")
        elif not export and mutant.check.startswith("pytest") and not shutil.which(tree.command(mutant.check)[0]):
            report("skip", mutant.name, f"{tree.command(mutant.check)[0]} is not there; make check makes it")
        else:
            runnable.append(mutant)

    targets = " ".join(sorted({word for m in runnable for word in tree.targets(m.check).split()}))
    if runnable and not tree.build("without a bug", targets):
        report("FAIL", "without a bug", "does not build")
        return
    limit: Dict[str, float] = {}  # of checks that pass
    for mutant in runnable:
        if mutant.check not in limit:
            start = time.monotonic()
            code = 0 if export else tree.check("without a bug", mutant.check)
            seconds = time.monotonic() - start
            limit[mutant.check] = 60 + 10 * seconds if code == 0 else 0
            report("ok" if code == 0 else "FAIL", f"without a bug: {mutant.check}",
                   f"{seconds:.0f} s" if code == 0 else f"exit code {code}")
    if export:
        save(runnable, tree, export / "without a bug")

    for mutant in runnable:
        start = time.monotonic()
        if not limit[mutant.check]:
            report("FAIL", mutant.name, "its check fails without it")
            continue
        try:
            texts = mutated(mutant, tree.root)
        except ValueError as error:
            report("FAIL", mutant.name, str(error))
            continue
        before = {path: path.read_text() for path in texts}
        try:
            for path, text in texts.items():
                path.write_text(text)
            targets = tree.targets(mutant.check)
            # Python and pages are not built, and their bugs are in no library.
            if all(path.suffix in (".py", ".md") for path in texts):
                targets = ""
            if targets and not tree.build(mutant.name, targets):
                report("FAIL", mutant.name, "does not build")
            elif export:
                save([mutant], tree, export / mutant.name)
                report("ok", mutant.name, f"built, {time.monotonic() - start:.0f} s")
            else:
                caught, note = outcome(mutant.check, tree.check(mutant.name, mutant.check, limit[mutant.check]))
                report("ok" if caught else "FAIL", mutant.name, f"{note}, {time.monotonic() - start:.0f} s")
        finally:
            for path, text in before.items():
                path.write_text(text)


def save(mutants: List[Mutant], tree: Tree, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for program in {shlex.split(mutant.check)[0] for mutant in mutants}:
        shutil.copy(tree.release / ("libnormfuse.so" if program == "pytest" else program), folder)


def run_exported(mutants: List[Mutant], tree: Tree, folder: pathlib.Path) -> None:
    """What --export left, on the machine with the GPU."""
    for mutant in mutants:
        if not (folder / mutant.name).is_dir():
            report("skip", mutant.name, f"is not in {folder}")
            continue
        code = tree.check("without a bug", mutant.check, release=folder / "without a bug")
        if code != 0:
            report("FAIL", f"without a bug: {mutant.check}", f"exit code {code}")
            continue
        caught, note = outcome(mutant.check, tree.check(mutant.name, mutant.check,
                                                          release=folder / mutant.name))
        report("ok" if caught else "FAIL", mutant.name, note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="mutants, or the beginning of their names; default: all")
    parser.add_argument("--list", action="store_true", help="print the mutants")
    parser.add_argument("--verify", action="store_true", help="only see that every patch applies and docs/testing.md "
                                                              "has them")
    parser.add_argument("--write", action="store_true",
                        help="the same, once the table of docs/testing.md is written anew")
    parser.add_argument("--export", type=pathlib.Path, metavar="FOLDER",
                        help="build the mutants that need a GPU into FOLDER, and run none")
    parser.add_argument("--exported", type=pathlib.Path, metavar="FOLDER", help="run those, on a machine with a GPU")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--cmake", default="cmake")
    args = parser.parse_args()
    if "/" in args.cmake:
        args.cmake = str(pathlib.Path(args.cmake).resolve())
    mutants = read_mutants()
    unknown = [name for name in args.names if not any(m.name.startswith(name) for m in mutants)]
    if unknown:
        parser.error(f"no mutant is named {', '.join(unknown)}")
    chosen = [m for m in mutants if not args.names or any(m.name.startswith(name) for name in args.names)]
    tree = Tree(args.jobs, args.cmake)
    if args.list:
        for m in chosen:
            print(f"{m.name}{' (GPU)' if m.gpu else ''}: {m.planted}\n    {m.check}")
        return 0
    if args.verify or args.write:
        verify(mutants, args.write)
    elif args.exported:
        run_exported([m for m in chosen if m.gpu], tree, args.exported.resolve())
    else:
        run([m for m in chosen if m.gpu] if args.export else chosen, tree, args.export and args.export.resolve())
    print(f"{totals[0]} passed, {totals[1]} failed, {totals[2]} skipped")
    return 1 if totals[1] or not totals[0] else 0


if __name__ == "__main__":
    sys.exit(main())

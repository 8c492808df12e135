#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""run_peers.py [PROBLEM...] - times normfuse beside what the Python that runs this has: what `make bench-peers` runs.

The steps are bench/peers.py, torch_operators.py, jax_operators.py and onnx_operators.py. What is not installed is left
out and named, at the end and in the table. Problems are quoted lines and @files for the first two steps; without any,
bench/bars.txt and, for the first step where there is a GPU, bench/bars-cuda.txt.

A new folder in build/bench-peers, or --folder, gets a file of rows for each step, the step's log, and table.md. Rows are
written as they come: what ends this early, Ctrl-C too, loses the problem that was being measured and nothing else."""
import argparse
import collections
import datetime
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import peers

BENCH = pathlib.Path(__file__).resolve().parent


def steps(problems, gpu, arguments):
    """(name, the packages that it needs, its words, lines of its output that are no result, results; None: not known)"""
    cpu = problems or [f"@{BENCH / 'bars.txt'}"]
    everything = problems or cpu + ([f"@{BENCH / 'bars-cuda.txt'}"] if gpu else [])
    on_cpu = [problem for problem in peers.read_problems(cpu) if problem["device"] == "cpu"]
    samples = ["--samples", str(arguments.samples)] if arguments.samples else []
    tiny = ["--tiny"] if arguments.tiny else []
    quick = {"peers": ["--budget", "0.2", "--peers", ",".join(name for name in peers.ALL if name not in ("torch_compile", "jax"))],
             "torch_operators": ["--tiny", "--variants", "eager,normfuse"]} if arguments.tiny else {}
    threads = ["--threads", str(arguments.threads)]
    yield ("peers", (), ["--installed", "--out", "{rows}", *samples, *threads, *quick.get("peers", ()), *everything], 2,
           len(peers.read_problems(everything)))
    yield ("torch_operators", ("numpy", "torch"), ["--json", "{rows}", *samples, *threads,
                                                   *quick.get("torch_operators", ()),
                                                   *(problem["line"] for problem in on_cpu)], 1, len(on_cpu))
    yield ("jax_operators", ("numpy", "jax", "flax"), tiny, 0, None)
    yield ("onnx_operators", ("numpy", "onnx", "onnxruntime", "pytest"), [*threads, *tiny], 0, None)


class Bar:
    """Shows what is done, on the last line of a terminal; nothing elsewhere."""

    def __init__(self):
        self.shown = sys.stderr.isatty()

    def show(self, step, done, total, words):
        if self.shown:
            width = shutil.get_terminal_size().columns - 1
            count = f"{done}/{total}" if total else str(done)
            filled = round(20 * min(done / total, 1)) if total else 0
            sys.stderr.write("\r\x1b[K" + f"[{'#' * filled:20}] {step} {count} {words}"[:width])
            sys.stderr.flush()

    def clear(self):
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def missing(packages):
    def has(package):
        try:
            return bool(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            return False
    return [package for package in packages if not has(package)]


def run(name, words, folder, heads, total, bar):
    """One step; what it printed as a result. Its rows are in the folder when this ends, however it ends."""
    rows, results = folder / f"{name}.jsonl", 0
    command = [sys.executable, "-u", str(BENCH / f"{name}.py"),
               *(str(rows) if word == "{rows}" else word for word in words)]
    bar.show(name, 0, total, "")
    with open(folder / f"{name}.log", "w") as log, \
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, stdin=subprocess.DEVNULL) as child:
        try:
            for number, line in enumerate(child.stdout):
                if line.startswith("{"):  # a step that prints its rows
                    with rows.open("a") as file:
                        file.write(line)
                    line = json.loads(line)["problem"]
                log.write(line if line.endswith("\n") else line + "\n")
                log.flush()
                results += number >= heads and not line.startswith(" ")
                bar.show(name, min(results, total or results), total, line.strip(" |\n"))
            return child.wait()
        except KeyboardInterrupt:
            # A terminal sends the signal to both; a second one does no harm.
            child.send_signal(signal.SIGINT)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
            raise


def table(rows):
    """A Markdown table of the rows of one step: a line a problem, a column an implementation."""
    columns, lines = [], collections.defaultdict(dict)
    for row in rows:
        problem = " ".join(filter(None, (row["problem"], row.get("direction"))))
        if "impl" in row:
            found = {row["impl"]: row.get("ratio", "-")}
        elif "variant" in row:
            found = {row["variant"] + " us": row.get("median_us", "-")}
        else:
            found = {key: value for key, value in row.items() if key.endswith(("_ms", "_us")) or key == "ratio"}
        columns += [column for column in found if column not in columns]
        lines[problem].update(found)
    columns.sort(key=lambda column: not column.startswith("normfuse"))
    yield "| problem | " + " | ".join(columns) + " |"
    yield "|---|" + "---|" * len(columns)
    for problem, found in lines.items():
        yield f"| `{problem}` | " + " | ".join(str(found.get(column, "")) for column in columns) + " |"


TITLES = {"peers": "times the floor, a copy of the tensors: the C library beside the others", "torch_operators": "calls of PyTorch, microseconds",
          "jax_operators": "calls of JAX under jit", "onnx_operators": "models of ONNX Runtime, before and after normfuse.onnx"}


def write_table(folder, skipped, info):
    machine = [info["cpu"], info["isa"], *([info["gpu"]] if info["gpu"] else []), f"normfuse {info['version']} {info['commit']}"]
    text = ["# normfuse beside what is installed", "", ", ".join(machine), ""]
    for name, title in TITLES.items():
        path = folder / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if rows:
            text += [f"## {title}", "", *table(rows), ""]
    text += ["## Left out", "", *(f"- {reason}" for reason in skipped or ["nothing"]), ""]
    (folder / "table.md").write_text("\n".join(text))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", metavar="PROBLEM")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, help="calls of each implementation; without it each step's own number")
    parser.add_argument("--tiny", action="store_true", help="a dry run: small arrays where a step chooses them, and few things that compile")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    info = peers.information()
    now = datetime.datetime.now()
    folder = arguments.folder or BENCH.parent / "build/bench-peers" / f"{now:%Y-%m-%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    bar, skipped, code = Bar(), [], 0
    try:
        for name, packages, words, heads, total in steps(arguments.problems, info["gpu"], arguments):
            lacks = missing(packages)
            if lacks:
                skipped.append(f"{name}: {', '.join(lacks)} not installed")
                continue
            if total == 0:
                skipped.append(f"{name}: no problem on the CPU")
                continue
            if run(name, words, folder, heads, total, bar) != 0:
                skipped.append(f"{name}: ended with an error, or without all of its results: {name}.log")
                code = 1
    except KeyboardInterrupt:
        skipped.append(f"{name}: interrupted, and the steps behind it")
        code = 130
    bar.clear()
    log = folder / "peers.log"
    skipped += [line.removeprefix("peers.py: ") for line in (log.read_text().splitlines() if log.exists() else [])
                if " is left out: " in line]
    write_table(folder, skipped, info)
    print((folder / "table.md").read_text())
    print(f"rows and table: {os.path.relpath(folder)}")
    return code


if __name__ == "__main__":
    sys.exit(main())

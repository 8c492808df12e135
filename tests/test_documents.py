# SPDX-License-Identifier: MIT
"""The pages: sentences (check_sentences.py sees what it should), links and their anchors, every block of code, and the
site, built. The library is build/release, or what NORMFUSE_BUILD names.

A fenced block says its language, and each language has a test:
  python   the blocks of a page run one after the other; <!-- python: ... --> holds what a page does not show
  output   what the python blocks of the page print, all of it: numbers with a point within 2 % or both below 1e-4;
  "..."
           stands for anything in a line, alone for any lines
  c, cpp   a program (it has a main) is compiled and run, one that includes <cuda.h> on the stand-in for a GPU
           (fake_gpu.c), which computes nothing; anything else stands line for line in a file that the page links to
  cmake    stands line for line in a project of tests/consumers
  sh       normfuse and python -m normfuse run (bench, check and compile as --list). A block with cc runs whole, in a
  home where the
           library is installed, and so does what it compiled. make knows the target and files that are named exist;
           make, pip and cmake themselves run in the checks of wheels, of an installed tree and of a release
  console  lines after "$ " run, and print what follows; a line "..." stands for any lines
  text     no code: formulas, messages, output
Needs the standard library and pytest; Python pages need what they import, and are skipped without it."""
import ast
import html.parser
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import xml.etree.ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = (ROOT / "bench/results").is_dir()
NO_ROWS = "bench/results, which a source archive leaves out, is not here"
BUILD = pathlib.Path(os.environ.get("NORMFUSE_BUILD", ROOT / "build/release"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")] + \
    sorted((ROOT / "docs").rglob("*.md"))
LANGUAGES = {"python", "output", "c", "cpp", "cmake", "sh", "console", "text"}
# Words that begin a line that somebody would type.
COMMAND = re.compile(r"\s*(\$ |(build/)?normfuse (run|check|bench|compile|info)|make |pip |python3? |cmake |g?cc |cargo )")


def name_of(page):
    return str(page.relative_to(ROOT))


def parts(page):
    """(language, text) of each block of code and (None, line) of every other line; "hidden python" of comments."""
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        fence = re.match(r"\s*(```+)(\S*)", line)
        hidden = re.match(r"<!-- python:$", line)
        if fence or hidden:
            end = next(k for k in range(at + 1, len(lines)) if lines[k].strip() == (fence.group(1) if fence else "-->"))
            indent = len(line) - len(line.lstrip())
            yield (fence.group(2) if fence else "python"), "\n".join(text[indent:] for text in lines[at + 1:end]) + "\n"
            at = end
        else:
            yield None, line
        at += 1


def blocks(page, *languages):
    return [text for language, text in parts(page) if language in languages]


def with_blocks(*languages):
    return [pytest.param(page, id=name_of(page)) for page in PAGES if blocks(page, *languages)]


# ---- the script that counts sentences -------------------------------------------------------------------------------


def sentences(*words):
    process = subprocess.run([sys.executable, ROOT / "tests/check_sentences.py", *words], stdout=subprocess.PIPE,
                             text=True)
    return process.returncode, process.stdout


@pytest.mark.parametrize("text, passes", [
    ("Short. It is short.", True),
    ("word " * 40 + "end. Two words.", False),                                 # 41 words
    ("word " * 39 + "end. " + "Two words. " * 4, True),                        # 40, and 9.6 on average
    ("word " * 18 + "end. " + "word " * 18 + "end.", False),                   # 19 on average
    ("word " * 17 + "end. " + "word " * 17 + "end.", True),                    # 18
    ("Short.\n\n| " + "cell " * 50 + "|\n|---|\n", True),                      # a table
    ("Short.\n\n```text\n" + "output " * 50 + "\n```\n", True),                # quoted output
    ("Short.\n\n    " + "output " * 50 + "\n", True),
    ("Short:\n\n- " + "word " * 50 + "\n", False),                             # an item of a list
    ("Short:\n\n- one\n  goes on " + "word " * 40 + "\n", False),
    ("Short `a b c " + "d " * 60 + "`.", True),                                # code is one word
    ("[" + "word " * 50 + "](a.md)", False),                                   # the words of a link count
    ("Short, see [it](" + "a" * 50 + ".md#b-c-d).", True),
    ("<!-- " + "word " * 50 + " -->\nShort.", True),
    ("1.5 of 2.0 are " + "word " * 35 + "end. " + "Two words. " * 4, True)])                        # a point in a number ends nothing
def test_sentences_are_counted(tmp_path, text, passes):
    page = tmp_path / "page.md"
    text = "\n".join(line if re.match(r"[|<]|    |output", line) else textwrap.fill(line, 100)
                     for line in text.split("\n"))
    page.write_text("# Title\n\n" + text + "\n")
    code, output = sentences(page)
    assert (code == 0) == passes, output
    assert output.splitlines()[-1] == ("1 passed, 0 failed, 0 skipped" if passes else "0 passed, 1 failed, 0 skipped")


@pytest.mark.parametrize("last, passes", [
    ("Short.", True), ("Short.\nShort.", False), ("Short. " * 30, False), ("| " + "cell " * 30 + "|", True)])
def test_records_are_one_screen(tmp_path, last, passes):
    """60 lines; a row of a table is one, however long."""
    (tmp_path / "decisions").mkdir()
    record = tmp_path / "decisions/0001-x.md"
    record.write_text("Short.\n" * 59 + last + "\n")
    code, output = sentences(record)
    assert (code == 0) == passes, output


@pytest.mark.parametrize("line, passes", [
    ("Word. " * 16, True), ("Word. " * 17, False), ("| " + "Word. " * 20 + "|", True), ("    " + "Word. " * 20, True),
    ("```text\n" + "Word. " * 20 + "\n```", True), ("<!-- " + "Word. " * 20 + "-->", True), ("w" * 120, True)])
def test_prose_has_100_columns(tmp_path, line, passes):
    (tmp_path / "page.md").write_text(f"# Title\n\n{line}\n")
    code, output = sentences(tmp_path / "page.md")
    assert (code == 0) == passes, output


@pytest.mark.parametrize("line, passes", [
    ("/* The place of a row. */", True), ("    /* Where a row is. */", False), (" * What it holds.", False),
    ("// Of a row.", False),
    ("int whether;  // Whether", True), ("/* Offset of a row. */", True)])
def test_comments_begin_with_a_noun(tmp_path, line, passes):
    (tmp_path / "file.c").write_text(line + "\n")
    code, output = sentences(tmp_path / "file.c")
    assert (code == 0) == passes, output


def test_the_sentence_script_counts_all_pages():
    counted = re.findall(r"^      (\S+): \d+ sentences", sentences("--list")[1], re.M)
    assert {"README.md", "CONTRIBUTING.md", "docs/numerics.md", "docs/decisions/0001-lanes.md"} <= set(counted)
    assert not any("history" in name for name in counted)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


# ---- links ----------------------------------------------------------------------------------------------------------


def anchors(page):
    """As GitHub and the site make them of headings."""
    found = set()
    for language, line in parts(page):
        heading = language is None and re.match(r"#+ (.*)", line)
        if heading:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1)).replace("`", "")
            found.add(re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in PAGES])
def test_links(page):
    wrong = []
    for language, line in parts(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", line) if language is None else []:
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            to = (page.parent / path).resolve() if path else page
            if not ROWS and ROOT / "bench/results" in [to, *to.parents]:
                continue
            if not to.exists() or ROOT not in [to, *to.parents]:
                wrong.append(target)
            elif anchor and anchor not in anchors(to):
                wrong.append(target)
    assert not wrong


# ---- code -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page",
                         [pytest.param(page, id=name_of(page)) for page in PAGES if "history" not in page.parts])
def test_blocks_say_what_they_are(page):
    """A block of a language that no test runs, or a command in a block without one, would be code that nothing runs."""
    wrong = [language for language, _ in parts(page) if language is not None and language not in LANGUAGES]
    lines = [line for language, line in parts(page) if language is None]
    wrong += [line for before, line in zip(["", *lines], lines) if line.startswith("    ") and COMMAND.match(line)]
    wrong += [line for text in blocks(page, "text") for line in text.splitlines() if COMMAND.match(line)]
    assert not wrong


def environment(tmp_path):
    library = BUILD / "libnormfuse.so"
    if not library.exists():
        pytest.skip(f"{library} is not built")
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    if not (tools / "normfuse").exists():
        (tools / "normfuse").symlink_to(BUILD / "normfuse")
    return {**os.environ, "NORMFUSE_LIBRARY": str(library), "PYTHONPATH": str(ROOT / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": f"{tools}:{os.environ['PATH']}", "NORMFUSE_NUM_THREADS": "2", "TMPDIR": str(tmp_path),
            "OMP_NUM_THREADS": "1"}  # on busy cores its threads wait for one another


NUMBER = re.compile(r"-?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?!\d|\.\.\.)")


def prints(shown, printed):
    """Whether a program printed what a page shows."""
    def pattern(line):
        return r"(?:.*\n)*?" if line.strip() == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n"

    def near(a, b):
        return abs(a - b) <= 0.02 * abs(a) or max(abs(a), abs(b)) < 1e-4

    lines = NUMBER.sub("\0", shown.strip() + "\n").splitlines()
    wanted = "".join(map(pattern, lines)).replace("\0", f"({NUMBER.pattern})")
    match = re.fullmatch(wanted, printed.strip() + "\n")
    return match is not None and all(near(float(a), float(b)) for a, b in zip(NUMBER.findall(shown), match.groups()))


@pytest.mark.parametrize("shown, printed, passes", [
    ("a 1\nb\n", "a 1\nb\n\n", True),
    ("a 1", "a 2", False),
    ("a 1", "a 1\nb", False),                                                 # all of it
    ("a 0.500 b 2.0", "a 0.509 b 2.03", True),
    ("a 0.500 b 2.0", "a 0.509 b 2.05", False),
    ("a 0.500", "a 0.5x", False),
    ("a 0.5...", "a 0.57", True),
    ("a 0.5...", "a 0.6", False),
    ("differs by 3.1e-07", "differs by 9e-06", True),                          # roundings
    ("differs by 3.1e-07", "differs by 2.5e-04", False),
    ("took ... s\n...\nend", "took 0.1 s\n1\n2.5\nend", True),
    ("took ... s\n...\nend", "took 0.1 s\nend", True),
    ("took ... s\nend", "took 0.1 s\n1\nend", False)])
def test_output_is_compared(shown, printed, passes):
    assert prints(shown, printed) == passes


def imported(code):
    return {name.split(".")[0] for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])}


@pytest.mark.parametrize("page", with_blocks("python"))
def test_python(page, tmp_path):
    code = blocks(page, "python")
    needs = set().union(*map(imported, code)) - {"normfuse"}
    needs |= {"torch"} if any("normfuse.torch" in text for text in code) else set()
    needs |= {"numpy"}
    missing = sorted(name for name in needs if importlib.util.find_spec(name) is None)
    if missing:
        pytest.skip("not installed: " + ", ".join(missing))
    program = tmp_path / "page.py"
    program.write_text("\n".join(code))
    done = subprocess.run([sys.executable, program], cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    shown = "".join(blocks(page, "output"))
    assert not shown or prints(shown, done.stdout), done.stdout[-3000:]


def lines_of(text):
    return [re.sub(r"\s*(#|//|/\*).*", "", line).strip() for line in text.splitlines()]


def stand_in():
    """The compiler's options for a program that calls the CUDA driver."""
    folder = re.search(r"^NORMFUSE_TEST_CUDA_H:PATH=(.+(?<!NOTFOUND))$", (BUILD / "CMakeCache.txt").read_text(), re.M)
    if not folder or not (BUILD / "fake/gpu/libcuda.so").exists():
        pytest.skip(f"{BUILD} was built without CUDA or without its tests, or there is no cuda.h")
    return ["-isystem", folder.group(1), f"-L{BUILD / 'fake/gpu'}", "-lcuda"]


@pytest.mark.parametrize("page", with_blocks("c", "cpp"))
def test_c(page, tmp_path):
    text = page.read_text()
    linked = [page.parent / path for path in re.findall(r"\]\(([^)#\s]+\.(?:c|h|cpp|hpp))\)", text)]
    quoted = [set(lines_of(path.read_text())) for path in linked]
    for language, code in parts(page):
        if language not in ("c", "cpp"):
            continue
        if "int main(" not in code:
            wanted = [line for line in lines_of(code) if line]
            missing = min(([line for line in wanted if line not in lines] for lines in quoted), key=len, default=wanted)
            assert not missing, "in no file that the page links to"
            continue
        env = environment(tmp_path)
        compiler, standard = {"c": (env.get("CC", "cc"), "c11"), "cpp": (env.get("CXX", "c++"), "c++17")}[language]
        if not shutil.which(compiler):
            pytest.skip(f"{compiler} is not installed")
        source, program = tmp_path / f"page.{language}", tmp_path / "program"
        source.write_text(code)
        cuda = stand_in() if "#include <cuda.h>" in code else []
        if cuda:
            env["LD_LIBRARY_PATH"] = str(BUILD / "fake/gpu")
        subprocess.run([compiler, f"-std={standard}", "-Wall", "-Wextra", "-Werror", source, f"-I{ROOT / 'include'}",
                        f"-L{BUILD}",
                        f"-Wl,-rpath,{BUILD}", *cuda, "-lnormfuse", "-lm", "-o", program], check=True, timeout=120)
        subprocess.run([program], check=True, cwd=tmp_path, env=env, timeout=60)


@pytest.mark.parametrize("page", with_blocks("cmake"))
def test_cmake(page):
    known = {line for path in (ROOT / "tests/consumers").rglob("CMakeLists.txt") for line in lines_of(path.read_text())}
    known |= {line.replace("consumer_c ", "app ") for line in known}
    for code in blocks(page, "cmake"):
        assert [line for line in lines_of(code) if line and line not in known] == []


def arrays(folder):
    """What the pages' commands read: x, dy, weight and bias as .npy files, written without NumPy."""
    import struct

    def write(name, shape, values):
        header = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
        header += b" " * (-(len(header) + 11) % 64) + b"\n"
        (folder / name).write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
                                    + struct.pack(f"<{len(values)}f", *values))

    values = [(k * 7919 % 1000) / 500 - 1 for k in range(2 * 64 * 8 * 8)]
    for name in ("x.npy", "dy.npy", "residual.npy"):
        write(name, (2, 64, 8, 8), values)
    for name in ("w.npy", "b.npy", "running_mean.npy"):
        write(name, (64,), values[:64])
    write("running_var.npy", (64,), [abs(value) + 0.5 for value in values[:64]])


def commands(text):
    """The commands of a block of sh: continued lines joined, comments and redirections left out."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def compiles(text, tmp_path):
    """Runs a block with cc as one who has done `make install PREFIX=$HOME/.local`, and the programs that it made."""
    home = tmp_path / "home"
    cmake = re.search(r"^CMAKE_COMMAND:INTERNAL=(.+)$", (BUILD / "CMakeCache.txt").read_text(), re.M).group(1)
    subprocess.run([cmake, "--install", BUILD, "--prefix", home / ".local"], check=True, stdout=subprocess.DEVNULL,
                   timeout=60)
    for name in ("app.c", "group_norm.c"):
        shutil.copy(ROOT / "examples/group_norm.c", tmp_path / name)
    programs = [words[words.index("-o") + 1] for words in commands(text) if words[0] == "cc"]
    script = "set -e\n" + text + "".join(f"\n./{program}" for program in programs)
    clean = {key: value for key, value in os.environ.items() if key not in ("PKG_CONFIG_PATH", "LD_LIBRARY_PATH")}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env={**clean, "HOME": str(home)},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == 0 and "y = -0.2669" in done.stdout, done.stdout[-2000:]


def onnx_model(path):
    """A group norm."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 8, 4, 4]) for name in "xy")
    ones = [onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [8], [1.0] * 8) for name in ("w", "b")]
    node = onnx.helper.make_node("GroupNormalization", ["x", "w", "b"], ["y"], num_groups=2)
    graph = onnx.helper.make_graph([node], "g", [x], [y], ones)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), path)


@pytest.mark.parametrize("page", with_blocks("sh"))
def test_sh(page, tmp_path):
    arrays(tmp_path)
    for text in blocks(page, "sh"):
        if re.search("^cc ", text, re.M):
            if not shutil.which("pkg-config") or not shutil.which("cc"):
                pytest.skip("pkg-config or cc is not installed")
            compiles(text, tmp_path)
    for words in (words for text in blocks(page, "sh") for words in commands(text)):
        program, *rest = words
        for word in rest:
            if re.fullmatch(r"@?(bench|tests|examples|cmake|python|docs|src)/[\w./-]+", word) and "*" not in word:
                assert (ROOT / word.lstrip("@")).exists(), f"{word}: no such file"
        if program in ("normfuse", "build/normfuse"):
            if "device=cuda" in rest and rest[0] == "run":
                continue
            rest = [word if not word.startswith("@") else f"@{ROOT / word[1:]}" for word in rest
                    if not word.startswith(">")]
            rest += ["--list"] if rest and rest[0] in ("bench", "check", "compile") else []
            done = subprocess.run(["normfuse", *rest], cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, timeout=60)
            assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-500:]}"
        elif program == "make":
            targets = [word for word in rest if "=" not in word]
            known = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M).group(1).split()
            assert set(targets) <= set(known), f"make has no {targets}"
        elif program == "python" and rest[0] == "-m" and rest[1].startswith("normfuse"):
            if importlib.util.find_spec("numpy") is None:
                pytest.skip("not installed: numpy")
            if rest[1] == "normfuse.onnx":
                onnx_model(tmp_path / "unet.onnx")
            done = subprocess.run([sys.executable, *rest], cwd=tmp_path, env=environment(tmp_path),
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
            assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-500:]}"
        elif "/" in program:
            assert (ROOT / program).exists() or program.startswith("build/"), f"{program}: no such file"
        else:
            assert program in ("cc", "cmake", "pip", "python", "python3", "man", "export", "cd", "git", "sha256sum",
                               "tar"), f"{program} has no test"


@pytest.mark.parametrize("page", with_blocks("console"))
def test_console(page, tmp_path):
    arrays(tmp_path)
    for text in blocks(page, "console"):
        for shown in re.split(r"^\$ ", text, flags=re.M)[1:]:
            command, _, expected = shown.partition("\n")
            done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment(tmp_path),
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
            pattern = "\n".join(re.escape(line) if line.strip() != "..." else r"(?:.*\n?)*?"
                                for line in expected.strip().split("\n"))
            assert re.fullmatch(pattern, done.stdout.strip()), f"$ {command}\n{done.stdout}"


def test_drawings_are_what_the_script_makes(tmp_path):
    subprocess.run([sys.executable, ROOT / "docs/site/drawings.py", tmp_path], check=True)
    made = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert made and made == {path.name: path.read_text() for path in (ROOT / "docs/drawings").glob("*.svg")}


# ---- the figures ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plot():
    if not ROWS:
        pytest.skip(NO_ROWS)
    spec = importlib.util.spec_from_file_location("plot", ROOT / "bench/plot.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not ROWS, reason=NO_ROWS)
def test_figures_are_what_the_rows_give():
    done = subprocess.run([sys.executable, ROOT / "bench/plot.py", "--check"], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, f"run make figures: {done.stdout}"


def classes(svg):
    return {name for element in xml.etree.ElementTree.fromstring(svg).iter()
            for name in element.get("class", "").split()}


def test_figures_are_read_in_both_schemes(plot):
    """Every class has its colour in both schemes, three times as light or dark as the card (WCAG), and no two in one
    figure are told apart by colour alone. Every figure is on a page."""
    def luminance(colour):
        parts = [int(colour[k:k + 2], 16) / 255 for k in (1, 3, 5)]
        return sum(share * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055)**2.4)
                   for part, share in zip(parts, (0.2126, 0.7152, 0.0722)))

    def contrast(a, b):
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    cards = re.findall(r"\.card { fill: (#\w{6}) }", plot.Drawing(1, 1, "").svg())
    assert len(cards) == 2
    assert [(name, card) for name, both in plot.COLOURS.items() for colour,
            card in zip(both, cards) if contrast(colour, card) < 3] == []
    figures = sorted((ROOT / "docs/figures").glob("*.svg"))
    shown = "\n".join(page.read_text() for page in PAGES)
    assert len(figures) >= 8 and [path.name for path in figures if f"figures/{path.name})" not in shown] == []
    for path in figures:
        text = path.read_text()
        for name in classes(text) - {"small", "thin", "dashes", "pale", "head"}:  # those have no colour
            assert text.count(f".{name} {{") == 2, f"{path.name}: {name}"
        names = [name for name, (words, _, shape) in plot.NAMES.items() if f">{words}<" in text and shape]
        assert len({plot.NAMES[name][1:] for name in names}) == len(names), path.name


def test_figures_of_rows_to_come(plot, tmp_path):
    """Rows of times over sizes, and of errors: a mark a row, where its numbers are."""
    rows = [{"problem": f"group_norm 1x256x{n}x{n} groups=32{words}", "shape": f"1x256x{n}x{n}", "dtype": "f32",
             "dir": direction, "impl": name, "median_us": us * n,
             "floor_us": n} for n in (2, 16, 1024) for words, direction in (("", "fwd"), (" dir=bwd", "bwd"))
            for name, us in (("normfuse", 2), ("torch", 9))]
    path = tmp_path / "a-cpu-sizes.jsonl"

    def marks(function, rows):
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
        figure = xml.etree.ElementTree.fromstring(function("Title", path).svg())
        return [element.get("transform") for element in figure.iter() if "transform" in element.attrib]

    first = marks(plot.sizes, rows)
    assert len(first) == len(rows) + 2 == len(set(first))  # two in the legend
    rows[5]["median_us"] *= 2
    assert len(set(first) ^ set(marks(plot.sizes, rows))) == 2
    rows = [{"impl": name, "mean_over_sigma": mean, "y_error": error,
             "dx_error": None if name == "torch" else error / 2}
            for name in ("normfuse", "torch") for mean,
            error in ((0, 1e-7), (1, 1e-6), (1000, 1e-3 if name == "normfuse" else "nan"))]
    assert len(marks(plot.errors, rows)) == 2 + 5 + 3 + 1  # the last beside the words of the NaN
    assert ">NaN from 1000<" in plot.errors("Title", path).svg()


def test_rows_that_nothing_reads_are_named(plot, tmp_path, monkeypatch):
    """Files of rows are there for a page, a figure or a table; a figure without its rows is refused by name."""
    shutil.copytree(ROOT / "bench/results", tmp_path / "bench/results")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(plot, "ROOT", tmp_path)
    assert plot.unread_rows() == []
    (tmp_path / "bench/results/2027-01-01-h200-nobody.jsonl").write_text("{}\n")
    assert [path.name for path in plot.unread_rows()] == ["2027-01-01-h200-nobody.jsonl"]
    (tmp_path / "bench/results/2026-11-23-epyc-errors.jsonl").unlink()
    with pytest.raises(SystemExit, match="bench/results lacks 2026-11-23-epyc-errors.jsonl"):
        plot.made()


# ---- the site -------------------------------------------------------------------------------------------------------


class References(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.targets, self.ids = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for key, value in attributes:
            if key == "id" or key == "name":
                self.ids.add(value)
            elif key in ("href", "src") and value:
                self.targets.append(value)


def test_site(tmp_path):
    """Builds without a warning and without the network; every link inside of it leads somewhere, and all is in it."""
    python = ROOT / "build/venv-docs/bin/python"
    python = str(python) if python.exists() else sys.executable
    if subprocess.run([python, "-c", "import mkdocs, material"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("MkDocs Material is not installed: docs/site/requirements.txt")
    site = tmp_path / "site"
    done = subprocess.run([python, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d", site],
                          cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout[-3000:]
    pages = {page: References(page.read_text()) for page in site.rglob("*.html")}
    assert len(pages) >= len([page for page in PAGES if "history" not in page.parts])
    wrong, outside = [], []
    for page, found in pages.items():
        for target in found.targets:
            if re.match(r"(https?:)?//", target):
                outside.append(target)
                continue
            if re.match(r"[a-z]+:", target) or page.name == "404.html":
                continue
            path, _, anchor = target.partition("#")
            to = (page.parent / path.split("?")[0]).resolve() if path else page
            to = to / "index.html" if to.is_dir() else to
            if not to.exists() or (anchor and to in pages and anchor not in pages[to].ids
                                   and not anchor.startswith("__")):
                wrong.append(f"{page.relative_to(site)}: {target}")
    assert not wrong
    # Nothing is fetched: no script, style or font of another place.
    assert [target for target in outside if re.search(r"\.(js|css|woff2?)\b|fonts", target)] == []
    assert (site / "search/search_index.js").exists() or (site / "search/search_index.json").exists()


# ---- what pages say of the code -------------------------------------------------------------------------------------


def test_one_address():
    """The repository's address is that of pyproject.toml wherever it stands, and an index can follow the links of its
    page."""
    spec = importlib.util.spec_from_file_location("description", ROOT / "cmake/description.py")
    description = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(description)
    address = description.repository()
    for name in ("mkdocs.yml", "CITATION.cff", "docs/help.md", "integrations/comfyui/pyproject.toml", "pyproject.toml"):
        found = re.findall(r"https://github\.com/[\w-]+/normfuse\b", (ROOT / name).read_text())
        assert found and set(found) == {address}, name
    page = description.dynamic_metadata("readme", {})["text"]
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        assert target.startswith(f"{address}/"), target
        path = target.removeprefix(f"{address}/").split("/", 2)[2].partition("#")[0]
        assert (ROOT / path).exists(), target
    assert "<!--" not in page and f"]({address}/raw/main/docs/figures/" in page


def test_messages_are_those_of_the_code():
    """Each message of docs/errors.md is somewhere in the sources, but for what its <...> stand for."""
    text = "\n".join(path.read_text() for folder in ("src", "cli", "python/normfuse")
                     for path in sorted((ROOT / folder).rglob("*.*")) if path.suffix in (".c", ".h", ".py"))
    text = re.sub(r'"\s*PRI\w+\s*"', "", text)
    text = re.sub(r'"\s*\+?\s*\n\s*f?"', "", text)  # literals that go on in the next line
    text = re.sub(r"%[a-z]+|%", "", text).replace('\\"', '"')
    missing = []
    for message in re.findall(r"^\| `([^`]*)` \|", (ROOT / "docs/errors.md").read_text(), re.M):
        if message.startswith("NORMFUSE_") and " " not in message:
            continue
        missing += [part for part in (part.strip() for part in re.split(r"<[^>]*>", message)) if len(part) > 6
                    and part not in text]
    assert not missing


def test_statuses_are_those_of_the_header():
    header = dict(re.findall(r"^    (NORMFUSE_[A-Z_]+) = (\d+)", (ROOT / "include/normfuse.h").read_text(), re.M))
    table = re.findall(r"^\| `(NORMFUSE_[A-Z_]+)` \| (\d+) \|", (ROOT / "docs/errors.md").read_text(), re.M)
    assert len(table) == 12 and all(header[name] == number for name, number in table)


def test_environment_variables_are_on_their_page():
    """Every variable that code asks for; those of a build for tuning begin with NORMFUSE_TUNE_."""
    page = (ROOT / "docs/environment.md").read_text()
    asked = set()
    for folder in ("src", "cli", "python/normfuse", "tests", "python/tests"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".c", ".h", ".py", ".cpp"):
                asked |= set(re.findall(r'(?:getenv\(|environ\.get\(|environ\[)\s*"(NORMFUSE_\w+)"', path.read_text()))
    assert "NORMFUSE_MAX_ISA" in asked
    assert sorted(name for name in asked if f"`{name}`" not in page) == []


def test_files_of_recipes():
    """Every file that a recipe's table names is there, with the words in the second column that are names of code."""
    tables = re.findall(r"^### (.*?)\n(.*?)(?=^#|^\*\*|\Z)", (ROOT / "docs/developing/recipes.md").read_text(),
                        re.M | re.S)
    assert {name for name, _ in tables} == {"An instruction set", "An operator", "An addition", "An activation"}
    for name, table in tables:
        rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.M)
        assert len(rows) >= 5, name
        for files, words in rows:
            text = "".join((ROOT / path).read_text() for path in re.findall(r"`([^`]*)`", files))
            for word in re.findall(r"`((?:NORMFUSE|normfuse)_\w+|[A-Z]\w+)`", words):
                assert word in text, (name, files, word)
    activation = next(table for name, table in tables if name == "An activation")
    for path in re.findall(r"`([\w/.]+)`", "".join(re.findall(r"^\| (`.*?) \|", activation, re.M))):
        assert "mish" in (ROOT / path).read_text().lower(), path


def test_versions_agree():
    """The header's version, and the date of its section in the changelog, wherever a release repeats them."""
    header = (ROOT / "include/normfuse.h").read_text()
    version = ".".join(re.findall(r"^#define NORMFUSE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", header, re.M))
    noted, date = re.search(r"^## (\S+), (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M).groups()
    assert noted == version and (date == "unreleased" or re.fullmatch(r"20\d\d-\d\d-\d\d", date))
    citation = dict(re.findall(r"^([\w-]+): (.*)$", (ROOT / "CITATION.cff").read_text(), re.M))
    assert date == "unreleased" or (citation["version"], citation["date-released"]) == (version, date)
    debian = (ROOT / "debian/changelog").read_text()
    assert debian.startswith(f"normfuse ({version}-") and (date == "unreleased"
                                                           or f"{date[8:]} " in debian.split("\n --")[1])
    assert f"**Status: {version}" in (ROOT / "README.md").read_text()
    assert f"version = {{{version}}}" in (ROOT / "docs/help.md").read_text()
    assert f'version = "{version}"' in (ROOT / "integrations/comfyui/pyproject.toml").read_text()
    assert version in subprocess.run(["make", "-s", "version"], cwd=ROOT, stdout=subprocess.PIPE,
                                     text=True).stdout.split()

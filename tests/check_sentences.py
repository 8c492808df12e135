#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""check_sentences.py [FILE...] - counts the words of each sentence of README.md, its neighbours and docs/.

A page passes when its sentences have 18 words on average at most, and none has more than 40, and when its lines have
100 columns at most. A record of docs/decisions/ is one screen besides: 60 lines, where a row of a table is one line.
Tables, code, quoted output, headings and HTML comments are left out, and docs/history/, which is kept as it was
written; `code` and a link's text count as the words one reads. Comments of the library, the program, the packages, the
tests and the build, and docstrings outside of tests, begin with the noun that they are about, not with Of, What, Where, Whether
or Those. Code has 120 columns at most; a string or a comment that ends a line may reach further. The last line is `N
passed, N failed, N skipped`. --long prints the sentences that are too long, --list the numbers of all pages."""
import argparse
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
AVERAGE, LONGEST = 18.0, 40
LINES, COLUMNS = 60, 100
CODE_COLUMNS = 120
# Tables of src/cpu with a function a line.
WIDER = {f"vec_{isa}.h" for isa in ("avx2", "avx512", "neon", "scalar")}


def blocks(text):
    """The text of each paragraph and list item."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^---\n.*?^---\n", "", text, flags=re.S | re.M) if text.startswith("---\n") else text
    found, current, fence, blank = [], [], None, True
    in_list = False

    def close():
        if current:
            found.append(" ".join(current))
            current.clear()

    for line in text.splitlines():
        stripped = line.strip()
        mark = re.match(r"(```+|~~~+)", stripped)
        if fence:
            if mark and stripped.startswith(fence) and stripped.strip(fence[0]) == "":
                fence = None
            continue
        if mark:
            close()
            fence = mark.group(1)
            continue
        if not stripped:
            close()
            blank = True
            continue
        # Four spaces behind an empty line are code, but in a list, where they go on with an item.
        if blank and line.startswith("    ") and not in_list and not current:
            continue
        item = re.match(r"(?:[-*+]|\d+\.)\s+(.*)", stripped)
        if stripped.startswith(("|", "#", "<", "!!!", "???", "===", "![")) or re.fullmatch(r"[-=*_ ]{3,}", stripped):
            close()
            in_list = False if stripped.startswith("#") else in_list
        elif item:
            close()
            in_list = True
            current.append(item.group(1))
        else:
            if not line.startswith(" "):
                in_list = in_list and not blank
            current.append(stripped)
        blank = False
    close()
    return found


def plain(block):
    """What one reads of it: no marks, a span of code as one word."""
    block = re.sub(r"`+[^`]*`+", "code", block)
    block = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
    block = re.sub(r"\[([^\]]*)\]\[[^\]]*\]", r"\1", block)
    return re.sub(r"\*\*|__|(?<!\w)[*_]|[*_](?!\w)", "", block)


def sentences(text):
    for block in blocks(text):
        for sentence in re.split(r"(?<=[.!?])[)\"']*\s+(?=[\w(\"'`+-])", plain(block)):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if words:
                yield len(words), sentence


def lines_on_screen(text):
    return sum(1 if line.startswith("|") else max(1, len(textwrap.wrap(line, COLUMNS))) for line in text.splitlines())


def wide_lines(text):
    """Numbers of the lines of prose that are wider than COLUMNS and could be broken there."""
    text = re.sub(r"^(\s*)(```+).*?^\1\2$|<!--.*?-->", lambda match: "\n" * match[0].count("\n"), text,
                  flags=re.S | re.M)
    return [number for number, line in enumerate(text.splitlines(), 1)
            if len(line) > COLUMNS and " " in line[:COLUMNS].strip() and not re.match(r"\s*[|<!]|    |#", line)]


def pages():
    yield ROOT / "README.md"
    yield ROOT / "CONTRIBUTING.md"
    yield ROOT / "SECURITY.md"
    yield ROOT / "CODE_OF_CONDUCT.md"
    yield from (page for page in sorted((ROOT / "docs").rglob("*.md")) if "history" not in page.parts)


FOLDERS = ("src", "include", "cli", "cmake", "bench", "python/normfuse", "hub", "integrations", "examples", "tests",
           "python/tests")
SUFFIXES = {".c", ".cpp", ".h", ".hpp", ".inl", ".def", ".cuh", ".cu", ".py", ".cmake", ".sh"}


def headless_comments(path):
    """Numbers of the lines where a comment begins without the noun that it is about."""
    docstring = '"""' if path.suffix == ".py" and "tests" not in path.parts else "//"
    return [number for number, line in enumerate(path.read_text().splitlines(), 1)
            if re.match(rf"\s*(//|/\*|\*|#|{docstring}) ?(Of|What|Where|Whether|Those)\b", line)]


STRINGS = r'"""(?s:.*?)"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''


def wide_code(path):
    """Numbers of the lines whose code is wider than CODE_COLUMNS. Strings and comments that end a line do not count."""
    if path.parent.name == "cpu" and path.name in WIDER:
        return []
    comments = r"#[^\n]*" if path.suffix in (".py", ".cmake", ".sh", ".txt") else r"/\*(?s:.*?)\*/|//[^\n]*"
    text = re.sub(f"{STRINGS}|{comments}", lambda match: re.sub(r"[^\n]", " ", match[0]), path.read_text())
    return [number for number, line in enumerate(text.splitlines(), 1) if len(line.rstrip(" \\,;:)]}")) > CODE_COLUMNS]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    passed = failed = 0
    for page in [page for page in args.pages if page.suffix not in SUFFIXES] if args.pages else pages():
        page = page.resolve()
        name = str(page.relative_to(ROOT)) if ROOT in page.parents else str(page)
        counted = list(sentences(page.read_text()))
        average = sum(n for n, _ in counted) / len(counted) if counted else 0.0
        longest = max((n for n, _ in counted), default=0)
        record = page.parent.name == "decisions" and page.name[0].isdigit()
        lines = lines_on_screen(page.read_text()) if record else 0
        wide = wide_lines(page.read_text())
        good = average <= AVERAGE and longest <= LONGEST and lines <= LINES and not wide
        figures = f"{average:.1f} words a sentence, {longest} in the longest"
        if args.list:
            print(f"      {name}: {len(counted)} sentences, {figures}")
        if args.long:
            for n, sentence in counted:
                if n > LONGEST:
                    print(f"      {name}: {n} words: {sentence}")
        if good:
            passed += 1
        else:
            failed += 1
            print(f"FAIL  {name}: {figures}; at most {AVERAGE:g} and {LONGEST}" + f"; {lines} lines of {LINES}" * record
                  + f"; wider than {COLUMNS} columns: line {', '.join(map(str, wide))}" * bool(wide))
            for n, sentence in counted:
                if n > LONGEST:
                    print(f"      {n} words: {sentence[:150]}")
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))
             if path.suffix in SUFFIXES or path.name == "CMakeLists.txt"]
    for path in [page for page in args.pages if page.suffix in SUFFIXES] if args.pages else files:
        found = {"comments begin with Of, What, Where, Whether or Those": headless_comments(path),
                 f"code is wider than {CODE_COLUMNS} columns": wide_code(path)}
        passed += not any(found.values())
        failed += any(found.values())
        for what, lines in found.items():
            if lines:
                print(f"FAIL  {path}: {what}: line {', '.join(map(str, lines))}")
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())

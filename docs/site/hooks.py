# SPDX-License-Identifier: MIT
"""What MkDocs does not do by itself: README.md and its neighbours become pages, so do the references of C and Python, and so
does every source file that a page links to. A link that leads nowhere stays as it is, and MkDocs warns of it."""
import ast
import pathlib
import posixpath
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Files outside of docs/ that are pages.
NEIGHBOURS = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
              "CHANGELOG.md": "changelog.md", "CODE_OF_CONDUCT.md": "conduct.md"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
LANGUAGES = {".h": "c", ".c": "c", ".hpp": "cpp", ".cpp": "cpp", ".inl": "c", ".cu": "cuda", ".cuh": "cuda", ".py": "python",
             ".sh": "sh", ".cmake": "cmake"}
# The functions and classes of each module, and the files that define them.
MODULES = {
    "normfuse": ["__init__.py"],
    "normfuse.torch": ["torch/modules.py", "torch/functional.py", "torch/convert.py", "torch/install.py"],
    "normfuse.jax": ["jax/__init__.py"],
    "normfuse.jax.linen": ["jax/linen.py"],
    "normfuse.jax.nnx": ["jax/nnx.py"],
    "normfuse.onnx": ["onnx/__init__.py"],
}


def page_of(path):
    """The page of a file or folder of the repository, None if there is none."""
    if path in NEIGHBOURS:
        return NEIGHBOURS[path]
    if (ROOT / path / "README.md").is_file() and path.startswith("docs/"):
        path += "/README.md"
    if path == "docs/normfuse.1":
        return "program.md"
    if path.startswith("docs/"):
        return path[5:] if (ROOT / path).is_file() else None
    if path.startswith("bench/results") and not (ROOT / "bench/results").is_dir():
        return "performance.md"  # in a source archive, which leaves the rows out
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}.md" if (ROOT / path).is_file() else None


def outside_code(text, change):
    """`change` of each line that is not in a fenced block."""
    fence, lines = None, []
    for line in text.split("\n"):
        mark = re.match(r"\s*(```+)", line)
        if mark:
            fence = None if fence == mark.group(1) else fence or mark.group(1)
        lines.append(line if fence or mark else change(line))
    return "\n".join(lines)


def targets(path):
    """The paths in the repository that a page links to."""
    found = set()

    def collect(line):
        for match in LINK.finditer(line):
            if not re.match(r"[a-z]+:", match.group(2)):
                found.add(posixpath.normpath(posixpath.join(posixpath.dirname(path), match.group(2))))
        return line

    outside_code((ROOT / path).read_text(), collect)
    return found


def rewritten(text, path, uri):
    """The links of a page of the repository as those of a page of the site."""
    def replace(match):
        if re.match(r"[a-z]+:", match.group(2)):
            return match.group(0)
        to = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), match.group(2))))
        if to is None:
            return match.group(0)
        return f"{match.group(1)}{posixpath.relpath(to, posixpath.dirname(uri) or '.')}{match.group(3) or ''}{match.group(4)}"

    return outside_code(text, lambda line: LINK.sub(replace, line))


def fenced(text, language):
    fence = "`" * max(3, 1 + max((len(mark) for mark in re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def source_page(path):
    head = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n"
    if (ROOT / path).is_dir():
        names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in (ROOT / path).iterdir()
                       if not entry.name.startswith((".", "__pycache__")))
        return head + fenced("\n".join(names), "text")
    return head + fenced((ROOT / path).read_text(), LANGUAGES.get(pathlib.Path(path).suffix, "text"))


# ---- the references -------------------------------------------------------------------------------------------------


def marked(text):
    """Plain text as Markdown: nothing in it is a mark."""
    return re.sub(r"([\\`*_>\[\]#])", r"\\\1", text.replace("&", "&amp;")).replace("<", "&lt;").replace("|", "&#124;")


def escaped(text):
    """Plain text as Markdown: nothing in it is a mark but `code`, and pages of docs/ are links."""
    parts = re.split(r"(`[^`]*`|docs/[a-z-]+\.md)", text)
    for k, part in enumerate(parts):
        if k % 2 == 0:
            parts[k] = marked(part)
        elif part.startswith("docs/") and (ROOT / part).exists():
            parts[k] = f"[{part[5:]}]({part[5:]})"
    return "".join(parts)


def named(lines):
    """The rows of a paragraph in which each line is a name and what it means, or goes on; None for others."""
    rows = []
    for line in lines:
        row = re.match(r"( *\S.*?) {2,}(\S.*)$", line)
        if row and not row.group(1).startswith("    ") and "=" not in row.group(1):
            rows.append([row.group(1).strip(), row.group(2)])
        elif rows and line.startswith("        "):
            rows[-1][1] += " " + line.strip()
        else:
            return None
    return rows


def prose(text):
    """Plain text of a comment or docstring: paragraphs, tables of names, and as it stands what is otherwise indented or aligned."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.split("\n")
        rows = named(lines)
        if rows:
            found.append("| | |\n|---|---|\n" + "".join(f"| {escaped(name)} | {escaped(words)} |\n"
                                                             for name, words in rows))
        elif any(line.startswith(" ") or re.search(r"\S {2,}\S", line) for line in lines):
            found.append(fenced("\n".join(lines), "text"))
        else:
            found.append(escaped(" ".join(lines)) + "\n")
    return "\n".join(found)


def comment_text(comment):
    lines = [re.sub(r"^\s*(/\*+|\*/|\*)? ?", "", line) for line in comment.rstrip().removesuffix("*/").split("\n")]
    return "\n".join(line.rstrip() for line in lines)


def c_reference():
    """include/normfuse.h: a section for each of its sections, an item for each comment and what it is about."""
    text = (ROOT / "include/normfuse.h").read_text()
    top, _, body = text.partition("#ifndef NORMFUSE_H")
    page = ["# C reference\n", "Made from [include/normfuse.h](source/include/normfuse.h.md), which is the whole interface of C.\n",
            prose(comment_text(top.replace("SPDX-License-Identifier: MIT", "")))]
    parts = re.split(r"/\* -{4} (.*?) -+ \*/", body)
    for title, section in zip(parts[1::2], parts[2::2]):
        page.append(f"\n## {title[0].upper()}{title[1:]}\n")
        section = re.sub(r"#ifdef __cplusplus.*", "", section, flags=re.S)
        for comment, declarations in re.findall(r"(?:^(/\*(?:(?!\*/).)*\*/)\n)?((?:^(?!/\*)[^\n]*\n)*)", section,
                                                re.M | re.S):
            declarations = declarations.strip("\n")
            bare = re.sub(r"/\*.*?\*/", "", declarations, flags=re.S)
            names = re.findall(r"\b(normfuse_\w+)\(", bare) or \
                re.findall(r"^(?:typedef )?(?:struct|enum) (\w+)", bare, re.M)
            if names:
                page.append("\n### " + ", ".join(f"`{name}`" for name in dict.fromkeys(names)) + "\n")
            if comment:
                page.append(prose(comment_text(comment)))
            if declarations:
                page.append(fenced(declarations.replace("NORMFUSE_API ", ""), "c"))
    return "\n".join(page)


def signature(text, node):
    """A definition's source up to its colon."""
    lines = text.split("\n")[node.lineno - 1:node.body[0].lineno]
    definition, depth = "", 0
    for character in "\n".join(lines):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if character == ":" and depth == 0:
            break
        definition += character
    return definition


def exported(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
    return []


def python_reference():
    page = ["# Python reference\n", "Made from the docstrings.\n"]
    for module, paths in MODULES.items():
        page.append(f"\n## {module}\n")
        package = ROOT / "python/normfuse" / module.replace("normfuse", "", 1).strip(".").replace(".", "/")
        first = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
        page.append(prose(ast.get_docstring(ast.parse(first.read_text())) or ""))
        for path in paths:
            text = (ROOT / "python/normfuse" / path).read_text()
            tree = ast.parse(text)
            names = exported(tree)
            for node in tree.body:
                if getattr(node, "name", None) not in names or not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    continue
                page.append(f"\n### `{module}.{node.name}`\n")
                page.append(fenced(signature(text, node), "python"))
                page.append(prose(ast.get_docstring(node) or ""))
                for method in node.body if isinstance(node, ast.ClassDef) else []:
                    if isinstance(method, ast.FunctionDef) and (method.name in ("__init__", "forward", "__call__")):
                        page.append(fenced(signature(text, method).strip(), "python"))
                        page.append(prose(ast.get_docstring(method) or ""))
    return "\n".join(page)


def manual():
    """docs/normfuse.1: its macros are few."""
    def inline(text, bare=False):
        text = text.replace("\\-", "-").replace("\\e", "\\")
        if bare:
            return re.sub(r"\\f[BIR]", "", text)
        parts = re.split(r"(\\f[BI].*?\\fR)", text)
        return "".join(f"`{part[3:-3]}`" if part.startswith("\\f") else marked(part) for part in parts).replace("``", "")

    def words(text):
        """The words of a macro such as .BR: quotes hold words together."""
        return [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', text)]

    def macro(line):
        name, _, rest = line[1:].partition(" ")
        found = words(rest)
        if name in ("B", "I"):
            return f"\\fB{' '.join(found)}\\fR"
        return f"\\fB{''.join(found)}\\fR"

    page, tag, raw = [], None, None
    for line in (ROOT / "docs/normfuse.1").read_text().split("\n"):
        if raw is not None:
            if line == ".fi":
                page.append("\n" + fenced("\n".join(raw), "text"))
                raw = None
            else:
                raw.append(inline(line, bare=True))
        elif line.startswith((r'.\"', ".TH")):
            continue
        elif line == ".nf":
            raw = []
        elif line.startswith((".SH", ".SS")):
            title = " ".join(words(line[3:]))
            page.append(f"\n{'##' if line[2] == 'H' else '###'} {title.capitalize() if title.isupper() else title}\n")
        elif line == ".PP":
            page.append("")
        elif line == ".TP":
            tag = True
        else:
            text = inline(macro(line) if re.match(r"\.[BI]", line) else line)
            page.append(f"\n**{text}**<br>" if tag else text)
            tag = None
    return "# The program\n\nThis is the manual page, `man normfuse`.\n" + "\n".join(page) + "\n"


# Pages whose files in docs/ only say where they come from.
MADE = {"api-c.md": c_reference, "api-python.md": python_reference, "program.md": manual}


# ---- what MkDocs calls ----------------------------------------------------------------------------------------------


def on_files(files, config):
    def add(uri, content):
        files.append(File.generated(config, uri, content=content))

    repository = [*NEIGHBOURS, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    for path in sorted(set().union(*map(targets, repository))):
        uri = page_of(path)
        if uri and uri.startswith("source/"):
            add(uri, source_page(path))
    for path, uri in NEIGHBOURS.items():
        add(uri, rewritten((ROOT / path).read_text(), path, uri))
    return files


def on_post_page(output, page, config):
    """The theme asks another server for a stand-in of Worker, which pages that are opened as files need: ours is beside them."""
    shim = posixpath.relpath("site/worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", shim)


def on_post_template(output_content, template_name, config):
    return output_content.replace("https://unpkg.com/iframe-worker/shim", "site/worker.js")


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri in MADE:
        return MADE[page.file.src_uri]()
    if page.file.generated_by:
        return markdown
    return rewritten(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)

# SPDX-License-Identifier: MIT
"""The text of a function, where it is known to be what runs, and which variables are read after each statement."""
from __future__ import annotations

import __future__
import ast
import functools
import inspect
import linecache
import pickle
import re
import tokenize
import types
from typing import Any, Callable, Iterable, Optional

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
          ast.GeneratorExp)
# Functions that reach the variables of their caller, or the frames above it.
_REFLECTION = frozenset({"eval", "exec", "locals", "vars", "dir"})
# A call of what a file imports is compiled otherwise than one of its own names.
_IMPORT = re.compile(r"^(?:import|from)\s(?:[^(\n#\\]|\\\n)*(?:\([^)]*\))?[^\n]*\n", re.MULTILINE)
_FRAMES = frozenset({"stacklevel", "_getframe", "currentframe", "stack", "extract_stack", "print_stack"})


class Left(Exception):
    """A function that is left as it is; the text says why."""


# ---- where the text is ----------------------------------------------------------------------------------------------


def tree_of(function: types.FunctionType) -> ast.FunctionDef:
    """A function's tree, which may be changed, with the text of its file as `lines`. Raises Left where its text,
    compiled, is not what runs, and where it has statements that are not rewritten."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise Left("its source is not available")
    # The file as a whole where the function alone compiles to something else: a lambda, and what reads variables of
    # functions around it in ways that its name does not tell.
    whole = "".join(lines)
    for text in (_alone(lines, function), whole):
        found = _found(code, text)
        if found is not None:
            break
    else:
        raise Left("its source is not what runs: the file was changed, or the function made by other code")
    tree = pickle.loads(found)
    if isinstance(tree, ast.Lambda):
        tree = ast.copy_location(ast.FunctionDef("<lambda>", tree.args, [ast.copy_location(
            ast.Return(tree.body), tree.body)], [], type_params=[]), tree)
    tree.decorator_list, tree.returns, tree.lines = [], None, whole
    _check(tree, function)
    return tree


def _alone(lines: list[str], function: types.FunctionType) -> str:
    """A file that has the function in its lines, and besides it what decides how it is compiled: the classes and
    functions around it, and what is imported."""
    code = function.__code__
    try:
        block = inspect.getblock(lines[code.co_firstlineno - 1:])
    except (SyntaxError, tokenize.TokenError):
        return ""
    around = _IMPORT.findall("".join(lines))
    scopes = function.__qualname__.replace(".<locals>", "()").split(".")[:-1] if block[0][:1].isspace() else []
    given = ", ".join(set(code.co_freevars) - {"__class__"})
    around += [" " * depth + (f"def {scope[:-2]}({given}):\n" if scope.endswith("()") else f"class {scope}:\n")
               for depth, scope in enumerate(scopes)]
    above = "".join(around)
    return "\n" * (code.co_firstlineno - 1 - above.count("\n")) + above + "".join(block)


@functools.lru_cache(maxsize=128)
def _found(code: types.CodeType, text: str) -> Optional[bytes]:
    """The tree of the function in a text that compiles to this code, pickled; None where there is not one such."""
    flags = code.co_flags & __future__.annotations.compiler_flag
    try:
        module = ast.parse(text)
        waiting = [compile(text, code.co_filename, "exec", flags, True)]  # not the tree: constants would be others
    except (SyntaxError, ValueError, RecursionError):
        return None
    for other in waiting:
        waiting += [constant for constant in other.co_consts if isinstance(constant, types.CodeType)]
    if code not in waiting:  # compares all but the names of files
        return None
    place = code.co_name, code.co_firstlineno
    trees = [node for node in ast.walk(module) if place == (
        ("<lambda>", node.lineno) if isinstance(node, ast.Lambda) else
        (node.name, min(d.lineno for d in (node, *node.decorator_list)))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None)]
    trees = [tree for tree in trees if not isinstance(tree, ast.Lambda) or _is_of(tree, code)]
    return pickle.dumps(trees[0]) if len(trees) == 1 else None


def uses_frames(tree: ast.FunctionDef) -> bool:
    """Does it look at the frames above it, or say which of them a warning is about?"""
    return any(name in _FRAMES for node in ast.walk(tree) for name in (
        getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "arg", None))
        if name != "stack" or not isinstance(node, ast.Attribute) or names(node.value) == ["inspect"])  # torch.stack


def _is_of(tree: ast.Lambda, code: types.CodeType) -> bool:
    """Is this the lambda, of several in a line? All instructions lie in its body, and not all in a lambda inside it."""
    if not hasattr(code, "co_positions"):
        return False
    places = [(line, column, end, last) for line, end, column, last in code.co_positions() if last]
    return all(_around(tree.body, place) for place in places) and not any(
        isinstance(inner, ast.Lambda) and inner is not tree and all(_around(inner.body, place) for place in places)
        for inner in ast.walk(tree))


def _around(node: ast.expr, place: tuple[int, int, int, int]) -> bool:
    line, column, end, last = place
    return (node.lineno, node.col_offset) <= (line, column) and (end, last) <= (node.end_lineno, node.end_col_offset)


def _check(tree: ast.FunctionDef, function: types.FunctionType) -> None:
    if function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise Left("it is a generator or a coroutine")
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2].lstrip("_")
    for node in ast.walk(tree):
        if isinstance(node, ast.Match) or type(node).__name__ == "TryStar":
            raise Left(f"it has a statement {'match' if isinstance(node, ast.Match) else 'try with except*'}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _REFLECTION and (
                not node.args or node.func.id in ("eval", "exec")):
            raise Left(f"it calls {node.func.id}(), which reaches its variables")
        for field in ("attr", "id"):  # private names, as the body of a class has them
            name = getattr(node, field, "")
            if name.startswith("__") and not name.endswith("__"):
                setattr(node, field, f"_{owner}{name}")
    first = [*tree.args.posonlyargs, *tree.args.args][:1]
    if not first or tree.args.posonlyargs or first[0].arg in names(tree, (ast.Store, ast.Del)):
        raise Left("its first argument is not a name that stays")


# ---- what is read later ---------------------------------------------------------------------------------------------


def names(node: ast.AST, kind: Any = ast.Load) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, kind)]


def note_liveness(tree: ast.FunctionDef, passes: Callable[[ast.With], bool] = lambda s: False) -> None:
    """Gives each statement `kept`, the variables that may be read after its own expressions have been, and `escape`,
    those of them that may be read where an exception leads. passes: do all exceptions pass through a context?"""
    def live(statements: list[ast.stmt], after: set[str], at_break: set[str], at_continue: set[str],
             escape: set[str]) -> set[str]:
        """Notes it for statements; gives what may be read from the first one on."""
        for s in reversed(statements):
            kept = after
            if isinstance(s, (ast.Break, ast.Continue)):
                after = at_break if isinstance(s, ast.Break) else at_continue
            elif isinstance(s, ast.If):
                kept = (live(s.body, after, at_break, at_continue, escape)
                        | live(s.orelse, after, at_break, at_continue, escape))
                after = kept | set(names(s.test))
            elif isinstance(s, (ast.For, ast.While)):
                kept = live(s.orelse, after, at_break, at_continue, escape)
                kept |= set(names(s.test)) if isinstance(s, ast.While) else set()
                size = -1
                while size != len(kept):
                    size = len(kept)
                    kept = kept | live(s.body, kept, after, kept, escape)
                after = kept | set(names(s.iter) if isinstance(s, ast.For) else ())
            elif isinstance(s, ast.With):
                swallowed = set() if passes(s) else after
                kept = live(s.body, after, at_break, at_continue, escape | swallowed)
                after = kept | swallowed | {name for item in s.items for name in names(item)}
            elif isinstance(s, ast.Try):
                outside = live(s.finalbody, escape, at_break, at_continue, escape)  # and the exception goes on
                last = live(s.finalbody, after, at_break, at_continue, escape)
                caught = set(outside)
                for handler in s.handlers:
                    caught |= live(handler.body, last, at_break, at_continue, outside)
                    caught |= set(names(handler.type) if handler.type else ())
                kept = live(s.orelse, last, at_break, at_continue, outside)
                after = kept = live(s.body, kept, at_break, at_continue, caught)
            else:
                if isinstance(s, SCOPES):
                    for inner in ast.walk(s):
                        if isinstance(inner, ast.stmt):
                            inner.kept = inner.escape = everything  # type: ignore[attr-defined]
                killed = {target.id for target in getattr(s, "targets", ()) if isinstance(target, ast.Name)
                          and isinstance(s, ast.Assign)}
                read = set(names(s)) | set(names(s.target, ast.Store) if isinstance(s, ast.AugAssign) else ())
                if isinstance(s, (ast.Return, ast.Raise)):
                    kept, after = set(), read
                else:
                    after = (after - killed) | read
            s.kept, s.escape, after = kept | escape, escape, after | escape  # type: ignore[attr-defined]
        return after

    everything = set(names(tree))
    live(tree.body, set(), set(), set(), set())


def names_of_scopes(tree: ast.AST) -> Iterable[str]:
    """The names in functions, lambdas and comprehensions inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, SCOPES) and node is not tree:
            yield from names(node, (ast.Load, ast.Store, ast.Del))

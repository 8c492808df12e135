# SPDX-License-Identifier: MIT
"""The text of a function, where it is known to be what runs, and which variables are read after each statement."""
from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import types
from typing import Any, Iterable, Union

Function = Union[ast.FunctionDef, ast.Lambda]
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
          ast.GeneratorExp)
# Functions that reach the variables of their caller, or the frames above it.
_REFLECTION = frozenset({"eval", "exec", "locals", "vars", "dir"})
_FRAMES = frozenset({"stacklevel", "_getframe", "currentframe", "stack", "extract_stack", "print_stack"})


class Left(Exception):
    """A function that is left as it is; the text says why."""


# ---- where the text is ----------------------------------------------------------------------------------------------


def tree_of(function: types.FunctionType) -> ast.FunctionDef:
    """A copy of a function's tree that may be changed. Raises Left where the text of its file, compiled, is not what
    runs, and where it has statements that are not rewritten."""
    code = function.__code__
    lines = tuple(linecache.getlines(code.co_filename, function.__globals__))
    if not lines:
        raise Left("its source is not available")
    codes, trees = _parsed(code.co_filename, lines)
    place = code.co_name, code.co_firstlineno
    if code not in codes.get(place, ()):  # compares all but the names of files
        raise Left("its source is not what runs: the file was changed, or the function made by other code")
    found = [tree for tree in trees.get(place, ()) if not isinstance(tree, ast.Lambda) or _is_of(tree, code)]
    if len(found) != 1:
        raise Left("its source is not available")
    tree = copy.deepcopy(found[0])
    if isinstance(tree, ast.Lambda):
        tree = ast.copy_location(ast.FunctionDef("<lambda>", tree.args, [ast.copy_location(
            ast.Return(tree.body), tree.body)], [], type_params=[]), tree)
    tree.decorator_list, tree.returns = [], None
    _check(tree, function)
    return tree


def uses_frames(tree: ast.FunctionDef) -> bool:
    """Does it look at the frames above it, or say which of them a warning is about?"""
    return any(name in _FRAMES for node in ast.walk(tree) for name in (
        getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "arg", None)))


@functools.lru_cache(maxsize=64)
def _parsed(name: str, lines: tuple[str, ...]) -> tuple[dict[Any, list[types.CodeType]], dict[Any, list[ast.AST]]]:
    """The code and the trees of all functions of a file, by name and first line."""
    codes: dict[Any, list[types.CodeType]] = {}
    trees: dict[Any, list[ast.AST]] = {}
    try:
        module = ast.parse("".join(lines))
        waiting = [compile("".join(lines), name, "exec", 0, True)]  # not the tree: constants would be others
    except (SyntaxError, ValueError, RecursionError):
        return codes, trees
    for code in waiting:
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            trees.setdefault((node.name, min(d.lineno for d in (node, *node.decorator_list))), []).append(node)
        elif isinstance(node, ast.Lambda):
            trees.setdefault(("<lambda>", node.lineno), []).append(node)
    return codes, trees


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


def note_liveness(tree: ast.FunctionDef) -> None:
    """Gives each statement `kept`: the variables that may be read after its own expressions have been."""
    _live(tree.body, set(), set(), set(), set(names(tree)))


def _live(statements: list[ast.stmt], after: set[str], at_break: set[str], at_continue: set[str],
          everything: set[str]) -> set[str]:
    """Notes it for statements; gives what may be read from the first one on."""
    for s in reversed(statements):
        s.kept = after  # type: ignore[attr-defined]
        if isinstance(s, (ast.Break, ast.Continue)):
            after = at_break if isinstance(s, ast.Break) else at_continue
        elif isinstance(s, ast.If):
            s.kept = (_live(s.body, after, at_break, at_continue, everything)
                      | _live(s.orelse, after, at_break, at_continue, everything))
            after = s.kept | set(names(s.test))
        elif isinstance(s, (ast.For, ast.While)):
            head = _live(s.orelse, after, at_break, at_continue, everything)
            head |= set(names(s.test)) if isinstance(s, ast.While) else set()
            size = -1
            while size != len(head):
                size = len(head)
                head = head | _live(s.body, head, after, head, everything)
            s.kept, after = head, head | set(names(s.iter) if isinstance(s, ast.For) else ())
        elif isinstance(s, ast.With):
            s.kept = _live(s.body, after, at_break, at_continue, everything)
            for inner in ast.walk(s):  # an exception may lead from anywhere to what follows
                if isinstance(inner, ast.stmt) and inner is not s:
                    inner.kept = inner.kept | after if hasattr(inner, "kept") else everything
            after = after | s.kept | {name for item in s.items for name in names(item)}
        elif isinstance(s, ast.Try):
            for inner in ast.walk(s):  # an exception may lead from anywhere to the handlers
                if isinstance(inner, ast.stmt):
                    inner.kept = everything
            after = everything
        else:
            killed = {target.id for target in getattr(s, "targets", ()) if isinstance(target, ast.Name)
                      and isinstance(s, ast.Assign)}
            read = set(names(s)) | set(names(s.target, ast.Store) if isinstance(s, ast.AugAssign) else ())
            if isinstance(s, (ast.Return, ast.Raise)):
                s.kept, after = set(), read
            else:
                after = (after - killed) | read
    return after


def names_of_scopes(tree: ast.AST) -> Iterable[str]:
    """The names in functions, lambdas and comprehensions inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, SCOPES) and node is not tree:
            yield from names(node, (ast.Load, ast.Store, ast.Del))

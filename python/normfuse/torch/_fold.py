# SPDX-License-Identifier: MIT
"""Which batch norms read a convolution's output that nothing else reads, proved from the text of a model's code.

Each of convolution and norm must be called at one place, one after the other, and no other code may reach them."""
from __future__ import annotations

import ast
import collections
import functools
import inspect
import types
from typing import Any, Iterator, Optional

from torch import nn

from ._rules import hooked, plain_class
from ._text import Left, names, note_liveness, tree_of

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Functions that reach the children of a module by other ways than their names.
_BY_OTHER_WAYS = frozenset({"children", "named_children", "modules", "named_modules", "_modules", "__dict__", "apply",
                            "get_submodule", "getattr", "vars", "items", "values", "__getattr__"})


def runs_as_sequential(module: nn.Module) -> bool:
    return _forward_of(plain_class(type(module))) is nn.Sequential.forward


def _forward_of(kind: type) -> Any:
    """The function; None of a ScriptModule's class, which has none and raises AttributeError."""
    return getattr(kind, "forward", None)


@functools.lru_cache(maxsize=512)
def _texts(kind: type) -> tuple[ast.FunctionDef, ...]:
    """The trees of a class's forward and of the methods that it may call. Raises Left."""
    trees, waiting = [], ["forward"]
    for name in waiting:
        static = inspect.getattr_static(kind, name, None)
        if isinstance(static, property):
            static = static.fget
        if isinstance(static, (staticmethod, classmethod)):
            static = static.__func__
        static = inspect.unwrap(static) if isinstance(static, types.FunctionType) else None
        if static is None or static.__module__ == "torch.nn.modules.module":
            if name == "forward":
                raise Left("its forward is no function of Python")
            continue
        trees.append(tree_of(static))
        waiting += [n.attr for n in ast.walk(trees[-1]) if isinstance(n, ast.Attribute) and n.attr not in waiting
                    and n.attr not in vars(nn.Module)]
    return tuple(trees)


def _child(node: Optional[ast.AST], me: str) -> Optional[str]:
    """The name in self.name(one argument)."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords \
            and isinstance(node.func, ast.Attribute) \
            and isinstance(node.func.value, ast.Name) and node.func.value.id == me:
        return node.func.attr
    return None


@functools.lru_cache(maxsize=512)
def _pairs(kind: type) -> tuple[tuple[str, str], ...]:
    """The names of children that the class's code calls one after the other, each at this place alone. Raises Left."""
    mentioned: collections.Counter[str] = collections.Counter()
    found = []
    for tree in _texts(kind):
        me = tree.args.args[0].arg
        note_liveness(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                mentioned[node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                mentioned[node.value] += 1
            elif isinstance(node, ast.Name) and node.id in ("getattr", "vars"):
                mentioned[node.id] += 1
            first, second = _child(node.args[0] if _child(node, me) else None, me), _child(node, me)
            if first:
                found.append((first, second))
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):
                    found += [pair for a, b in zip(statements, statements[1:]) for pair in _successive(a, b, me)]
    if any(mentioned[name] for name in _BY_OTHER_WAYS):
        return ()
    return tuple((a, b) for a, b in found if mentioned[a] == 1 == mentioned[b])


def _successive(a: ast.stmt, b: ast.stmt, me: str) -> Iterator[tuple[str, str]]:
    """(x, y) of v = self.x(...) and then w = self.y(v), or w = f(self.y(v)), where nothing else reads v."""
    if isinstance(a, ast.Assign) and isinstance(b, (ast.Assign, ast.Return)) and len(a.targets) == 1 and isinstance(
            a.targets[0], ast.Name) and _child(a.value, me) and b.value is not None:
        v = a.targets[0].id
        outer = [b.value, *(b.value.args if isinstance(b.value, ast.Call) else ())]
        calls = [n for n in outer if _child(n, me) and isinstance(n.args[0], ast.Name) and n.args[0].id == v]
        killed = isinstance(b, ast.Assign) and any(isinstance(t, ast.Name) and t.id == v for t in b.targets)
        if calls and names(b).count(v) == 1 and v not in b.escape and (  # type: ignore[attr-defined]
                killed or v not in b.kept):  # type: ignore[attr-defined]
            yield _child(a.value, me), _child(calls[0], me)


class Proofs:
    """The facts proved of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.owners: dict[nn.Module, list[tuple[nn.Module, str]]] = collections.defaultdict(list)
        for module in model.modules():
            for name, child in module._modules.items():
                if child is not None:
                    self.owners[child].append((module, name))
        self.unread: dict[str, str] = {}  # classes whose code cannot be read
        self.foreign: set[str] = set()  # attributes that code reads of other objects than its own
        self.takes_apart = False  # does code take apart what a loop gives it?
        for kind in {plain_class(type(module)) for module in model.modules()}:
            if kind.__module__.startswith("torch.nn.") or _forward_of(kind) in (nn.Module.forward, None):
                continue
            try:
                self._read(kind)
            except Left as left:
                self.unread[kind.__name__] = str(left)

    def _read(self, kind: type) -> None:
        for tree in _texts(kind):
            me, loops = tree.args.args[0].arg, set()
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == me):
                    self.foreign.add(node.attr)
                if isinstance(node, (ast.For, ast.comprehension)):
                    loops |= set(names(node.target, ast.Store))
            for node in ast.walk(tree):
                taken = node.iter if isinstance(node, (ast.For, ast.comprehension)) else node.value if isinstance(
                    node, (ast.Subscript, ast.Starred)) else None
                if taken is not None and (loops & set(names(taken)) or isinstance(taken, ast.Subscript)):
                    self.takes_apart = True

    def convolution_before(self, layer: nn.Module) -> tuple[Optional[nn.Module], Optional[str]]:
        """The module whose output the layer reads, and nothing else does; or why that is not proved."""
        places = self.owners.get(layer, ())
        if len(places) != 1:
            return None, f"it stands in {len(places)} places" if places else "it stands alone"
        block, name = places[0]
        if self.unread:
            kind, why = next(iter(self.unread.items()))
            return None, f"the code of {kind} cannot be read: {why}"
        if runs_as_sequential(block):
            children = list(block._modules.values())
            before = children.index(layer) - 1
            while before >= 0 and type(children[before]) is nn.Identity and not hooked(children[before]):
                before -= 1
            if before < 0:
                return None, "nothing stands before it"
            return (None, why) if (why := self._apart(block)) else (children[before], None)
        kind = plain_class(type(block))
        first = [a for a, b in _pairs(kind) if b == name] if "forward" not in block.__dict__ else []
        if len(first) != 1 or block._modules.get(first[0]) is None:
            return None, (f"the code of {kind.__name__} does not call it at one place, right after the layer that it "
                          "reads, with nothing else between")
        if self.foreign & {first[0], name}:
            return None, f"other code reads an attribute named {first[0] if first[0] in self.foreign else name}"
        return block._modules[first[0]], None

    def _apart(self, sequential: nn.Module) -> Optional[str]:
        """Why it is not proved that the nn.Sequential runs whole wherever it runs."""
        for owner, name in self.owners.get(sequential, ()):
            kind = plain_class(type(owner))
            if type(owner) in _CONTAINERS or runs_as_sequential(owner):
                if self.takes_apart and not runs_as_sequential(owner):
                    return "code takes apart what a loop gives it"
                if runs_as_sequential(owner) and (why := self._apart(owner)):
                    return why if self.takes_apart else None
                continue
            if name in self.foreign:
                return f"other code reads an attribute named {name}"
            for tree in _texts(kind):
                called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)} | {
                    id(n.left) for n in ast.walk(tree) if isinstance(n, ast.Compare)} | {
                    id(n.test) for n in ast.walk(tree) if isinstance(n, (ast.If, ast.IfExp))}
                if any(isinstance(n, ast.Attribute) and n.attr == name and id(n) not in called
                       or isinstance(n, ast.Constant) and n.value == name or isinstance(n, ast.Name)
                       and n.id in ("getattr", "vars") for n in ast.walk(tree)):
                    return f"the code of {kind.__name__} does more with {name} than call it"
        return None

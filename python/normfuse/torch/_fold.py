# SPDX-License-Identifier: MIT
"""Which batch norms read a convolution's output that nothing else reads, proved from the text of a model's code.

Each of convolution and norm must be called at one place, one after the other, and no other code may reach them."""
from __future__ import annotations

import ast
import collections
import functools
import inspect
import types
from typing import Iterator, Optional

from torch import nn

from ._rules import hooked, plain_class
from ._text import Left, names, note_liveness, tree_of

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Functions that reach the children of a module by other ways than their names.
_BY_OTHER_WAYS = frozenset({"children", "named_children", "modules", "named_modules", "_modules", "__dict__", "apply",
                            "get_submodule", "getattr", "vars", "items", "values", "__getattr__"})


def runs_as_sequential(module: nn.Module) -> bool:
    return getattr(plain_class(type(module)), "forward", None) is nn.Sequential.forward


def _has_forward(kind: type) -> bool:
    """Containers have none; to ask a ScriptModule's class raises AttributeError."""
    return getattr(kind, "forward", None) not in (nn.Module.forward, None)


def _texts(kind: type) -> Iterator[ast.FunctionDef]:
    """The trees of a class's forward and of the methods that it may call. Raises Left."""
    waiting = ["forward"]
    for name in waiting:
        static = inspect.getattr_static(kind, name, None)
        static = static.fget if isinstance(static, property) else getattr(static, "__func__", static)
        static = inspect.unwrap(static) if isinstance(static, types.FunctionType) else None
        if static is not None and static.__module__ != "torch.nn.modules.module":
            tree = tree_of(static)
            yield tree
            waiting += [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr not in waiting
                        and n.attr not in vars(nn.Module)]
        elif name == "forward":
            raise Left("its forward is no function of Python")


class _Facts:
    """The facts of a class's code, by the names of children and attributes. pairs: children that it calls one after the
    other, each at this place alone. foreign: what it reads of other objects than its own. more: attributes with which it
    does more than call and ask for them. takes_apart: does it take apart what a loop gives it? Raises Left."""

    def __init__(self, kind: type) -> None:
        mentioned: collections.Counter[str] = collections.Counter()
        pairs: list[tuple[str, str]] = []
        self.foreign: set[str] = set()
        self.more: set[str] = set()
        self.takes_apart = False
        for tree in _texts(kind):
            note_liveness(tree)
            me, nodes = tree.args.args[0].arg, list(ast.walk(tree))
            loops = {name for n in nodes if isinstance(n, (ast.For, ast.comprehension))
                     for name in names(n.target, ast.Store)}
            asked = {id(part) for n in nodes for part in (n.func if isinstance(n, ast.Call) else n.left if isinstance(
                n, ast.Compare) else n.test if isinstance(n, (ast.If, ast.IfExp)) else None,)}
            for n in nodes:
                name = (n.attr if isinstance(n, ast.Attribute) else n.value if isinstance(n, ast.Constant) else
                        n.id if isinstance(n, ast.Name) and n.id in ("getattr", "vars") else None)
                if isinstance(name, str):
                    mentioned[name] += 1
                    if not (isinstance(n, ast.Attribute) and id(n) in asked):
                        self.more.add(name)
                if isinstance(n, ast.Attribute) and not (isinstance(n.value, ast.Name) and n.value.id == me):
                    self.foreign.add(n.attr)
                taken = n.iter if isinstance(n, (ast.For, ast.comprehension)) else n.value if isinstance(
                    n, (ast.Subscript, ast.Starred)) else None
                self.takes_apart |= taken is not None and (bool(loops & set(names(taken))) or isinstance(
                    taken, ast.Subscript))
                if first := _child(n.args[0] if _child(n, me) else None, me):
                    pairs.append((first, _child(n, me)))
                for field in ("body", "orelse", "finalbody"):
                    statements = getattr(n, field, None)
                    if isinstance(statements, list):
                        pairs += [pair for a, b in zip(statements, statements[1:]) for pair in _successive(a, b, me)]
        reached = any(mentioned[name] for name in _BY_OTHER_WAYS)
        self.pairs = [(a, b) for a, b in pairs if not reached and mentioned[a] == 1 == mentioned[b]]


_facts = functools.lru_cache(maxsize=512)(_Facts)


def _child(node: Optional[ast.AST], me: str) -> Optional[str]:
    """The name in self.name(one argument)."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords \
            and isinstance(node.func, ast.Attribute) \
            and isinstance(node.func.value, ast.Name) and node.func.value.id == me:
        return node.func.attr
    return None


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
        facts = []
        for kind in {plain_class(type(module)) for module in model.modules()}:
            if not kind.__module__.startswith("torch.nn.") and _has_forward(kind):
                try:
                    facts.append(_facts(kind))
                except Left as left:
                    self.unread[kind.__name__] = str(left)
        self.foreign = set().union(*(of_kind.foreign for of_kind in facts))
        self.takes_apart = any(of_kind.takes_apart for of_kind in facts)

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
        called = _has_forward(kind) and "forward" not in block.__dict__
        first = [a for a, b in _facts(kind).pairs if b == name] if called else []
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
            if {name, "getattr", "vars"} & _facts(kind).more:
                return f"the code of {kind.__name__} does more with {name} than call it"
        return None

# SPDX-License-Identifier: MIT
"""The fusions that may happen when a model runs, found by following rewritten texts over its modules, for convert's
report.
Nothing of the model is called. Where a text asks what only a call can tell, both answers are followed.

A value is a tuple of alternatives: Known objects, Waiting calls, and None for all else, such as tensors."""
from __future__ import annotations

import ast
import builtins
import collections.abc
import operator
import types
from typing import Any, Callable, Iterable, NamedTuple, Optional

import torch
from torch import nn

from . import _activations, _calls
from ._pending import (ACTIVATIONS, ARITHMETIC, ARITHMETIC_METHODS, CALLABLES, DROPOUTS, FUNCTIONS, INNER_FUNCTIONS,
                       CONTAINERS, PLAIN, SCALING, VIEWS)
from ._rewrite import FRAME, done
from ._rules import (BLOCK, KINDS, NORM, OURS, has_own_activation, hooked, is_channel_norm, takes_activation,
                     takes_modulation)
from ._text import SCOPES

_COMPARISONS = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
                ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
                ast.NotIn: lambda a, b: a not in b}
# Checks of the frame, and for which alternatives of a value they settle nothing.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("force", "iter", "each", "classes"), lambda v: True),
    "safe": lambda v: v is None or type(v.value) in PLAIN,
    "compared": lambda v: v is None or type(v.value) in PLAIN - CONTAINERS,
    "owner": lambda v: v is None or type(v.value) in PLAIN or isinstance(v.value, nn.Module),
    "callee": lambda v: v is not None and isinstance(v.value, CALLABLES) and v.value in FUNCTIONS,
    "tensor": lambda v: v is None,
    "settled": lambda v: False,
}
# Functions of which the results are known where the arguments are.
_COMPUTED = (isinstance, hasattr, len, enumerate, zip, reversed, list, tuple)
_DEPTH = 80
NOTHING = "what reads its output is no activation"
UNKNOWN: tuple[Any, ...] = (None,)


class Known(NamedTuple):
    value: Any


class Waiting(NamedTuple):
    """A call of `layer` at a place in a text (0: of no norm), and what it has taken. convolutions: those whose biases
    are not added yet."""
    layer: Any
    site: Any
    what: str = ""
    dropout: bool = False
    inplace: bool = False
    convolutions: frozenset[nn.Module] = frozenset()


_PRELU = _activations.choice("prelu", slope=None)
_ONE_PLUS = Waiting(None, 0, "one plus")
_FRAME = types.SimpleNamespace(open=True, add=operator.add, multiply=operator.mul, divide=operator.truediv)


class _Jump(Exception):
    """Ends a list of statements."""


class Survey:
    """fused: layer -> place -> what may become of a call there. why: likewise, why nothing may. moved: convolutions
    whose biases norms or sums add; kept: those whose biases something else reads."""

    def __init__(self) -> None:
        self.fused: dict[nn.Module, dict[Any, set[str]]] = {}
        self.why: dict[nn.Module, dict[Any, str]] = {}
        self.moved: set[nn.Module] = set()
        self.kept: set[nn.Module] = set()
        self.visited: dict[nn.Module, Any] = {}
        self.open: set[Waiting] = set()
        self.env: dict[str, Any] = {}
        self.globals: dict[str, Any] = {}
        self.block: Optional[nn.Module] = None
        self.returned: list[Any] = []
        self.lines = ""  # of the file
        self.depth = 0
        self.reader = NOTHING  # why what is read is not fused, where nothing else is known

    # ---- functions ----

    def visit(self, block: nn.Module, given: Any = UNKNOWN) -> Any:
        """Follows a block's forward. Gives its value."""
        plain = not any(isinstance(v, Waiting) for v in given)
        if plain and block in self.visited:
            self.open.update(v for v in self.visited[block] if isinstance(v, Waiting))
            return self.visited[block]
        self.visited.setdefault(block, UNKNOWN)
        value = self.function(type(block)._normfuse_tree, type(block)._normfuse_globals, block, given)
        if plain:
            self.visited[block] = value
        return value

    def function(self, tree: ast.FunctionDef, scope: dict[str, Any], me: Optional[nn.Module], first: Any) -> Any:
        if self.depth > _DEPTH:
            return UNKNOWN
        before = self.env, self.globals, self.block, self.returned, self.lines
        names = [a.arg for a in tree.args.args if a.arg != FRAME]
        self.env = {a.arg: UNKNOWN for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
        self.env |= {FRAME: (Known(_FRAME),), **dict(zip(names, [(Known(me),), first] if me is not None else [first]))}
        self.globals, self.block, self.returned, self.lines = scope, me or self.block, [], tree.lines
        self.depth += 1
        try:
            self.run(tree.body)
            self.returned.append((UNKNOWN, self.open))
        except _Jump:
            pass
        found = self.returned
        self.env, self.globals, self.block, self.returned, self.lines = before
        self.depth -= 1
        self.open = set().union(*(still for _, still in found)) if found else self.open
        return _joined(value for value, _ in found) if found else UNKNOWN

    # ---- statements ----

    def run(self, statements: list[ast.stmt]) -> None:
        for s in statements:
            self.statement(s)

    def fork(self, *ways: list[ast.stmt]) -> None:
        """Follows each of several lists of statements from here, and joins what they leave."""
        env, still, ends = self.env, self.open, []
        for way in ways:
            if way and isinstance(way[-1], ast.Raise):
                continue
            self.env, self.open = dict(env), set(still)
            try:
                self.run(way)
                ends.append((self.env, self.open))
            except _Jump:
                pass
        if not ends:
            raise _Jump
        self.env = {name: _joined(end[name] for end, _ in ends if name in end) for end, _ in ends for name in end}
        self.open = set().union(*(left for _, left in ends))

    def statement(self, s: ast.stmt) -> None:
        if isinstance(s, ast.Expr):
            self.force(self.value(s.value))
        elif isinstance(s, (ast.Assign, ast.AnnAssign)) and s.value is not None:
            targets = s.targets if isinstance(s, ast.Assign) else [s.target]
            if getattr(s.value, "seen", False):
                self.reader = "an exception may lead to code that reads its variable"
                if not isinstance(targets[0], ast.Name):
                    self.reader = f"its output is stored in `{self.text(targets[0])}`"
            value, self.reader = self.value(s.value), NOTHING
            for target in targets:
                self.store(target, value)
        elif isinstance(s, ast.AugAssign):
            self.value(s.value)
            self.store(s.target, UNKNOWN)
        elif isinstance(s, ast.Return):
            self.returned.append((UNKNOWN if s.value is None else self.value(s.value), self.open))
            raise _Jump
        elif isinstance(s, (ast.Raise, ast.Break, ast.Continue)):
            raise _Jump
        elif isinstance(s, ast.If):
            self.fork(*self.ways(s.test, s.body, s.orelse))
        elif isinstance(s, ast.For):
            items = self.items(self.value(s.iter))
            for item in [UNKNOWN, UNKNOWN] if items is None else items:
                self.store(s.target, item)
                self.fork(s.body, *([] if items is not None and not _jumps(s.body) else [[]]))
        elif isinstance(s, ast.While):
            for _ in range(2):
                self.value(s.test)
                self.fork(s.body, [])
        elif isinstance(s, ast.With):
            for item in s.items:
                self.force(self.value(item.context_expr))
            self.fork(s.body)
        elif isinstance(s, ast.Try):
            self.fork(s.body + s.orelse, *(h.body for h in s.handlers), *([[]] if not s.handlers else []))
            self.run(s.finalbody)

    def store(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            known = _object(value)
            parts = known if type(known) is tuple and len(known) == len(target.elts) else None
            for i, part in enumerate(target.elts):
                self.store(part, UNKNOWN if parts is None else (Known(parts[i]),))

    def items(self, value: Any) -> Optional[list[Any]]:
        """The values that a loop goes over, where they are known."""
        listed = _listed(_object(value))
        return [(Known(v),) for v in listed] if type(listed) in (list, tuple, range, dict) else None

    def ways(self, test: ast.expr, yes: Any, no: Any) -> list[Any]:
        """Returns which of the two may be gone."""
        truths = _truths(self.value(test))
        return [way for way, truth in ((yes, True), (no, False)) if truth in truths]

    # ---- expressions ----

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return (Known(node.value),)
        if isinstance(node, ast.Name):
            if node.id in self.env:
                return self.env[node.id]
            return _known(self.globals.get(node.id, getattr(builtins, node.id, None)))
        if isinstance(node, ast.Attribute):
            return _joined(_attribute(v.value, node.attr) if isinstance(v, Known) else UNKNOWN
                           for v in self.value(node.value))
        if isinstance(node, ast.Subscript):
            if isinstance(node.value, ast.Tuple) and done(node.value.elts[0]) == "settle":
                self.settle(node.value.elts[1])
                return self.value(node.value.elts[1])
            return _computed(operator.getitem, self.force(self.value(node.value)), self.value(node.slice))
        if isinstance(node, ast.IfExp):
            return _joined([self.value(way) for way in self.ways(node.test, node.body, node.orelse)])
        if isinstance(node, ast.Call):
            what = done(node)
            if what in _CHECKS:
                return self.check(node, node.args[0])
            return getattr(self, f"_{what}")(node, *node.args) if what else self.called(node)
        if isinstance(node, ast.NamedExpr):
            value = self.env[node.target.id] = self.value(node.value)
            return value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return tuple(Known(not truth) for truth in _truths(self.value(node.operand)))
        if isinstance(node, ast.BoolOp):
            ends, found = isinstance(node.op, ast.Or), []
            for part in node.values:
                found.append(self.value(part))
                if _truths(found[-1]) == {ends}:
                    break
                if _truths(found[-1]) == {not ends} and part is not node.values[-1]:
                    found.pop()
            return _joined(found)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.value(node.left), self.value(node.comparators[0])
            if isinstance(node.ops[0], (ast.Is, ast.IsNot)) and right == (Known(None),):
                return tuple(v and Known((v == Known(None)) is isinstance(node.ops[0], ast.Is)) for v in left)
            return _computed(_COMPARISONS.get(type(node.ops[0])), self.force(left), self.force(right))
        before, found = self.reader, []
        if isinstance(node, (ast.Tuple, ast.List, ast.Dict)):
            self.reader = f"its output is put into a {type(node).__name__.lower()}"
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and not isinstance(node, SCOPES):
                found.append(self.force(self.value(child)))
        self.reader = before
        known = isinstance(node, (ast.Tuple, ast.List)) and all(isinstance(_only(v), Known) for v in found)
        return (Known(tuple(_only(v).value for v in found)),) if known else UNKNOWN

    def called(self, node: ast.Call) -> Any:
        """A call that is made as it is."""
        fs, given = self.value(node.func), [*node.args, *(k.value for k in node.keywords)]
        values = [self.force(self.value(argument)) for argument in given]
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("items", "values", "keys") and not given:
            return _computed(getattr(dict, node.func.attr), self.value(node.func.value))
        return _computed(_object(fs), *values) if not node.keywords and _object(fs) in _COMPUTED else UNKNOWN

    # ---- what is pending ----

    def force(self, value: Iterable[Any], why: Optional[str] = None) -> Any:
        for v in value:
            self.close(v, why or self.reader)
        return tuple(None if isinstance(v, Waiting) else v for v in value)

    def close(self, v: Any, why: str) -> None:
        """Something but what may take it reads v."""
        if self.is_open(v):
            self.open.discard(v)
            self.kept |= v.convolutions
            if v.what == "scale + shift" or v.what == "add" and is_channel_norm(type(v.layer)):
                self.note(v, v.what)
            elif v.site:
                self.why.setdefault(v.layer, {}).setdefault(v.site, why)

    def note(self, v: Waiting, what: str) -> None:
        self.fused.setdefault(v.layer, {}).setdefault(v.site, set()).add(what)
        self.open.discard(v)

    def opened(self, v: Waiting, instead: Any = None) -> Waiting:
        self.open.discard(instead)
        self.open.add(v)
        return v

    def settle(self, node: ast.AST) -> None:
        why = self.reader if done(node) == "settle" else (
            f"`{self.text(node)}` runs between it and what reads its output") if self.open else ""
        for v in list(self.open):
            self.close(v, why)

    def text(self, node: ast.AST) -> str:
        """The text that an expression was rewritten from, shortened."""
        text = ast.get_source_segment(self.lines, node) or ""
        try:
            return ast.unparse(ast.parse(f"({text})", mode="eval"))[:60]
        except SyntaxError:  # inside a formatted string: before Python 3.12 its parts have no places of their own
            return " ".join(text.split())[:60]

    def check(self, node: ast.Call, argument: ast.expr) -> Any:
        value = self.force(self.value(argument), "its output is read more than once" if getattr(node, "again", False)
                           else None)
        if not all(map(_CHECKS[done(node)], value)):
            self.settle(argument)
        return value

    def _stored(self, node: ast.Call, argument: ast.expr, *others: ast.expr) -> Any:
        value = self.force(self.value(argument))
        for v in [v for v in self.open if not v.convolutions]:
            self.close(v, self.reader)
        return value

    def _settle(self, node: ast.Call) -> Any:
        self.settle(node)
        return UNKNOWN

    def _type(self, node: ast.Call, argument: ast.expr) -> Any:
        self.value(argument)
        return UNKNOWN

    def _module(self, node: ast.Call, owner: ast.expr, name: Any) -> Any:
        return self.value(ast.Attribute(owner, name.value))

    def _in_place(self, node: ast.Call, argument: ast.expr, method: Any, callee: ast.expr, *rest: ast.expr) -> Any:
        x, f = self.value(argument), _object(self.value(callee))
        others = [self.force(self.value(other)) for other in [*rest, *(k.value for k in node.keywords)]]
        if not any(map(self.is_norm, x)):
            return self.unknown(node, x)
        if method.value == "add_":
            return self.sum(x, *others, True)
        if method.value or isinstance(f, CALLABLES) and f in ACTIVATIONS:
            return self.activation(x, _activations.choice("relu"))
        return self.activation(x, f if getattr(f, "inplace", False) is True else None)

    # ---- calls ----

    def _call(self, node: ast.Call, callee: ast.expr, *given: ast.expr) -> Any:
        fs, x = self.value(callee), self.value(given[0]) if given else UNKNOWN
        others = [self.force(self.value(other)) for other in [*given[1:], *(k.value for k in node.keywords)]]
        me, inner = self.inner_of(callee)
        if inner is not None:
            return self.function(inner._normfuse_tree, inner.__globals__, me,
                                 x if inner._normfuse_takes else self.force(x))
        f = _object(fs)
        if isinstance(f, CALLABLES) and f in ACTIVATIONS:
            if ACTIVATIONS[f] == "prelu":
                return self.activation(x, _PRELU)
            known = [v[0].value if isinstance(v[0], Known) else 0.0 for v in others]
            return self.activation(x, _activations.of_call(f, tuple(known[:len(given) - 1]), {
                k.arg: v for k, v in zip(node.keywords, known[len(given) - 1:])}))
        if _is_of_super(callee):
            return self.convolution(node, self.block, x)
        if (len(given) != 1 or node.keywords) and KINDS.get(type(f)) != BLOCK:
            return self.unknown(callee, x)
        return self.modules(node, callee, fs, x)

    _go = _above = _call

    def inner_of(self, callee: ast.expr) -> tuple[Optional[nn.Module], Any]:
        """The form of a function or method that shares its caller's frame, and the module that it is a method of."""
        me = None
        if isinstance(callee, ast.Attribute):
            of_super = _is_of_super(callee)
            me = self.block if of_super else _object(self.value(callee.value))
            inners = getattr(type(me), "_normfuse_inner", {})
            static = getattr(getattr(type(me), "_normfuse_original", None), callee.attr, None)
            if of_super:
                static = next((f for f in inners if f.__name__ == callee.attr and f is not static), None)
            if static in inners:
                return me, inners[static]
        f = _object(self.value(callee))
        return None, INNER_FUNCTIONS.get(f) if isinstance(f, CALLABLES) else None

    def _run(self, node: ast.Call, fs: ast.expr, argument: ast.expr) -> Any:
        x, items = self.value(argument), self.items(self.value(fs))
        for item in [UNKNOWN, UNKNOWN] if items is None else items:
            before = x
            x = self.modules(node, fs, item, x)
            if items is None:
                x = _joined([before, x])
        return x

    def unknown(self, node: ast.expr, x: Any) -> Any:
        self.force(x)
        self.settle(node)
        return UNKNOWN

    def modules(self, node: ast.Call, callee: ast.expr, fs: Any, x: Any) -> Any:
        """f(x), for each alternative f."""
        return _joined([self.module(node, f.value, x) if isinstance(f, Known) else self.unknown(callee, x) for f in fs])

    def module(self, node: ast.Call, f: Any, x: Any) -> Any:
        kind = KINDS.get(type(f))
        if kind is None:
            if isinstance(f, CALLABLES) and f in ACTIVATIONS:
                return self.activation(x, _activations.of_call(f, (), {}))
            return self.unknown(node.args[0], x)
        if hooked(f):
            self.force(x, "its activation has hooks, so it is called by itself" if _activations.of_module(f) else None)
            if kind == NORM:
                self.why.setdefault(f, {}).setdefault((id(node), self.block), "it has hooks, so it is called by itself")
            return UNKNOWN
        if kind == BLOCK:
            inner = type(f)._normfuse_inner.get(type(f)._normfuse_original.forward)
            value = self.visit(f, x if inner is not None and inner._normfuse_takes else self.force(x))
            return value if inner is not None else self.force(value)
        if kind == NORM:
            if type(f) in OURS or is_channel_norm(type(f)):
                self.move(x)
            self.force(x)
            return UNKNOWN if has_own_activation(f) else (self.opened(Waiting(f, (id(node), self.block))),)
        if type(f) is nn.Identity:
            return x
        if type(f) in DROPOUTS:
            return tuple(self.dropped(v, f) for v in x)
        return self.convolution(node, f, x) if _calls.has_bias_to_move(f) else self.activation(x, f)

    def convolution(self, node: ast.Call, f: nn.Module, x: Any) -> Any:
        """f(x), which may wait for its bias."""
        self.force(x)
        if not _calls.has_bias_to_move(f):
            return UNKNOWN
        return (self.opened(Waiting(None, 0, str(id(node)), convolutions=frozenset({f}))),)

    def move(self, value: Any) -> None:
        """Biases of convolutions are added by what reads these."""
        for v in value:
            if self.is_open(v) and v.convolutions:
                self.moved |= v.convolutions
                self.open.discard(v)

    def is_open(self, v: Any) -> bool:
        return isinstance(v, Waiting) and v in self.open

    def is_norm(self, v: Any) -> bool:
        return self.is_open(v) and bool(v.site)

    def dropped(self, v: Any, f: nn.Module) -> Any:
        if not isinstance(v, Waiting) or v.site and (f.p == 0 or v.what == "scale"):
            return v
        if not self.is_norm(v) or v.dropout:
            self.close(v, NOTHING)
            return None
        return self.opened(v._replace(dropout=True, inplace=f.inplace), v)

    def activation(self, x: Any, f: Any) -> Any:
        """f of x, where f may be an activation: a module, or what a function computes."""
        chosen = _activations.of_module(f) if isinstance(f, nn.Module) else f
        if chosen is not None:
            for v in filter(self.is_norm, x):
                name = chosen["activation"]
                if v.dropout and (name not in SCALING or v.inplace and v.what):
                    self.close(v, "a dropout stands between it and its activation")
                elif "slope" in chosen and not takes_activation(type(v.layer), chosen):
                    self.close(v, "its rule takes no slope")
                elif v.what != "scale":
                    self.note(v, f"{v.what} + {name}" if v.what else name)
        self.force(x)
        return UNKNOWN

    # ---- arithmetic ----

    def sum(self, a: Any, b: Any, in_place: bool = False) -> Any:
        for side, other in ((a, b),) if in_place else ((a, b), (b, a)):
            norms = [v for v in side if self.is_norm(v) and not v.dropout and v.what in ("", "scale")]
            if norms and not any(isinstance(v, Known) for v in other):
                self.force(other)
                made = tuple(self.opened(v._replace(what="scale + shift" if v.what else "add"), v) for v in norms)
                self.force(side)
                return made
        if not any(isinstance(v, Known) for v in (*a, *b)):
            self.move((*a, *b))
        self.force(a), self.force(b)
        return UNKNOWN

    def product(self, a: Any, b: Any) -> Any:
        for x, factor in ((a, b), (b, a)):
            norms = [v for v in x if self.is_norm(v) and takes_modulation(type(v.layer)) and not v.what
                     and not v.dropout]
            if norms and _ONE_PLUS in factor:
                return tuple(self.opened(v._replace(what="scale"), v) for v in norms)
        self.force(a), self.force(b)
        return UNKNOWN

    def combined(self, what: Optional[str], a: Any, b: Any, in_place: bool = False) -> Any:
        if what in ("add", "multiply"):
            return self.sum(a, b, in_place) if what == "add" else self.product(a, b)
        self.force(a), self.force(b)
        return UNKNOWN

    def _iadd(self, node: ast.Call, a: ast.expr, b: ast.expr) -> Any:
        return self.sum(self.value(a), self.value(b), True)

    def _arithmetic(self, node: ast.Call, reader: ast.expr, callee: ast.expr, a: ast.expr, b: ast.expr) -> Any:
        x, y, what = self.value(a), self.value(b), ARITHMETIC.get(_object(self.value(callee)))
        if what == "add" and reader.value == "factor":  # type: ignore[attr-defined]
            self.force(x), self.force(y)
            return (_ONE_PLUS,)
        return self.combined(what, x, y)

    def _method(self, node: ast.Call, argument: ast.expr, name: ast.expr, *rest: ast.expr) -> Any:
        x, others = self.value(argument), [self.value(r) for r in rest]
        name = name.value  # type: ignore[attr-defined]
        if name in ("relu", "relu_", "prelu"):
            return self.activation(x, _PRELU if name == "prelu" else _activations.choice("relu"))
        if name in ARITHMETIC_METHODS:
            return self.combined(ARITHMETIC_METHODS[name], x, *others, name == "add_")
        for value in others:
            self.force(value)
        waits = tuple(v for v in x if self.is_norm(v) and not v.what and not v.dropout
                      and is_channel_norm(type(v.layer))) if name in VIEWS else ()
        return (*waits, *self.force(tuple(v for v in x if v not in waits)))


def _is_of_super(callee: ast.expr) -> bool:
    """Is it super().name?"""
    return isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Call) and not done(callee.value)


def _only(value: Any) -> Any:
    """The alternative, where there is one."""
    return value[0] if len(value) == 1 else None


def _object(value: Any) -> Any:
    """The object that an expression stands for, where that is one that is known."""
    only = _only(value)
    return only.value if isinstance(only, Known) else None


def _known(found: Any) -> Any:
    return UNKNOWN if found is None or isinstance(found, torch.Tensor) else (Known(found),)


def _truths(value: Any) -> set[bool]:
    answers = {bool(v.value) if isinstance(v, Known) and type(v.value) in PLAIN
               else True if isinstance(v, Known) and isinstance(v.value, nn.Module) and "__len__" not in dir(v.value)
               else None for v in value}
    return {True, False} if None in answers else answers


def _listed(value: Any) -> Any:
    """A container of modules as a list or dict; anything else as it is."""
    if isinstance(value, nn.ModuleDict):
        return dict(value._modules)
    return list(value._modules.values()) if isinstance(value, (nn.ModuleList, nn.Sequential)) else value


def _computed(f: Any, *operands: Any) -> Any:
    """f of values, where they are known and that runs no code of the model's."""
    given = [v.value if isinstance(v := _only(operand), Known) else UNKNOWN for operand in operands]
    if not (f in (isinstance, hasattr) and isinstance(given[0], nn.Module)):
        given = list(map(_listed, given))
        if f is None or UNKNOWN in given or not all(type(v) in PLAIN for v in given):
            return UNKNOWN
    try:
        found = f(*given)
    except Exception:
        return UNKNOWN
    if isinstance(found, (collections.abc.Iterator, collections.abc.MappingView)):
        found = list(found)
    return UNKNOWN if isinstance(found, torch.Tensor) else (Known(found),)


def _jumps(statements: list[ast.stmt]) -> bool:
    return any(isinstance(node, (ast.Break, ast.Continue)) for s in statements for node in ast.walk(s))


def _joined(values: Iterable[Any]) -> Any:
    return tuple({id(v) if isinstance(v, Known) and not isinstance(v.value, nn.Module) else
                  (id(v.value),) if isinstance(v, Known) else v: v for value in values for v in value}.values())


def _attribute(base: Any, name: str) -> Any:
    """An attribute that can be read without running code of the model's, and that no call changes."""
    if isinstance(base, nn.Module) and name != "training":
        for place in (base.__dict__, base._modules):
            if name in place:
                found = place[name]
                return UNKNOWN if isinstance(found, torch.Tensor) else (Known(found),)
        found = next((vars(kind)[name] for kind in type(base).__mro__ if name in vars(kind)), None)
        return UNKNOWN if hasattr(type(found), "__get__") else _known(found)
    if name == "training" or isinstance(base, (type, torch.Tensor)):
        return UNKNOWN
    return _known(getattr(base, name, None) if isinstance(base, types.ModuleType) else
                  getattr(base, "__dict__", {}).get(name))

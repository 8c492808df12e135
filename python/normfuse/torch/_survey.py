# SPDX-License-Identifier: MIT
"""The fusions that may happen when a model runs, found by following rewritten texts over its modules, for convert's
report.
Nothing of the model is called. Where a text asks what only a call can tell, both answers are followed.

A value is a tuple of alternatives: Known objects, Waiting calls, and None for all else, such as tensors."""
from __future__ import annotations

import ast
import builtins
import operator
import types
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import nn

from . import _activations, _calls
from ._pending import (ACTIVATIONS, ARITHMETIC, ARITHMETIC_METHODS, CALLABLES, DROPOUTS, FUNCTIONS, INNER_FUNCTIONS,
                       PLAIN, SCALING, VIEWS)
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
    **dict.fromkeys(("safe", "compared"), lambda v: v is None or type(v.value) in PLAIN),
    "owner": lambda v: v is None or type(v.value) in PLAIN or isinstance(v.value, nn.Module),
    "callee": lambda v: v is not None and isinstance(v.value, CALLABLES) and v.value in FUNCTIONS,
    "tensor": lambda v: v is None,
    "settled": lambda v: False,
}
# Functions of which the survey knows the results, where it knows the arguments.
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
        self.closed: dict[Waiting, str] = {}
        self.env: dict[str, Any] = {}
        self.globals: dict[str, Any] = {}
        self.block: Optional[nn.Module] = None
        self.depth, self.waiting = 0, set()
        self.returned: list[Any] = []
        self.lines = ""  # of the file
        self.reader = NOTHING  # why what is read is not fused, where nothing else is known

    # ---- functions ----

    def visit(self, block: nn.Module, given: Any = UNKNOWN) -> Any:
        """Follows a block's forward. Gives its value."""
        plain = not any(isinstance(v, Waiting) for v in given)
        if plain and block in self.visited:
            for waiting in self.visited[block]:
                self.closed.pop(waiting, None)
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
        self.env[FRAME] = (Known(_FRAME),)
        if me is not None:
            self.env[names.pop(0)] = (Known(me),)
        if names:
            self.env[names[0]] = first
        self.globals, self.block, self.returned, self.lines = scope, me or self.block, [], tree.lines
        self.depth += 1
        try:
            self.run(tree.body)
            self.returned.append((UNKNOWN, self.closed, self.waiting))
        except _Jump:
            pass
        found = self.returned
        self.env, self.globals, self.block, self.returned, self.lines = before
        self.depth -= 1
        if found:
            self.join(found)
        return _joined([value for value, _, _ in found]) if found else UNKNOWN

    def join(self, ends: list[Any]) -> None:
        """Goes on from several places: what is closed wherever it was opened is closed."""
        self.closed = {v: why for _, closed, _ in ends for v, why in closed.items()
                       if all(v in other or v not in waiting for _, other, waiting in ends)}
        self.waiting = set().union(*(waiting for _, _, waiting in ends))

    # ---- statements ----

    def run(self, statements: list[ast.stmt]) -> None:
        for s in statements:
            self.statement(s)

    def fork(self, *ways: list[ast.stmt]) -> None:
        """Follows each of several lists of statements from here, and joins what they leave."""
        env, closed, waiting, ends = self.env, self.closed, self.waiting, []
        for way in ways:
            if way and isinstance(way[-1], ast.Raise):
                continue
            self.env, self.closed, self.waiting = dict(env), dict(closed), set(waiting)
            try:
                self.run(way)
                ends.append((self.env, self.closed, self.waiting))
            except _Jump:
                pass
        if not ends:
            raise _Jump
        self.join(ends)
        self.env = {name: _joined([e[name] for e, _, _ in ends if name in e]) for e, _, _ in ends for name in e}

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
            self.returned.append((UNKNOWN if s.value is None else self.value(s.value), self.closed, self.waiting))
            raise _Jump
        elif isinstance(s, (ast.Raise, ast.Break, ast.Continue)):
            raise _Jump
        elif isinstance(s, ast.If):
            truth = self.truth(s.test)
            self.fork(*([s.body] if truth else [s.orelse] if truth is False else [s.body, s.orelse]))
        elif isinstance(s, ast.For):
            items = self.items(s.iter)
            for item in [UNKNOWN, UNKNOWN] if items is None else items:
                self.store(s.target, item)
                self.fork(s.body, *([] if items is not None and not _jumps(s.body) else [[]]))
        elif isinstance(s, ast.While):
            for _ in range(2):
                self.truth(s.test)
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
            known = value[0].value if len(value) == 1 and isinstance(value[0], Known) else None
            parts = known if type(known) is tuple and len(known) == len(target.elts) else None
            for i, part in enumerate(target.elts):
                self.store(part, UNKNOWN if parts is None else (Known(parts[i]),))

    def items(self, node: ast.expr) -> Optional[list[Any]]:
        """The values that a loop goes over, where they are known."""
        node = _plain(node)
        if isinstance(node, (ast.Tuple, ast.List)) and not any(isinstance(e, ast.Starred) for e in node.elts):
            return [self.force(self.value(e)) for e in node.elts]
        value = _listed(self.only(node))
        return [(Known(v),) for v in value] if type(value) in (list, tuple, range, dict) else None

    # ---- questions ----

    def only(self, node: ast.expr) -> Any:
        """The object that an expression stands for, where that is one that is known."""
        value = self.value(node)
        return value[0].value if len(value) == 1 and isinstance(value[0], Known) else None

    def truth(self, node: ast.expr) -> Optional[bool]:
        node = _plain(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            truth = self.truth(node.operand)
            return None if truth is None else not truth
        if isinstance(node, ast.BoolOp):
            ends = isinstance(node.op, ast.Or)
            found = []
            for v in node.values:
                found.append(self.truth(v))
                if found[-1] is ends:
                    return ends if None not in found else None
            return None if None in found else not ends
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = (self.value(_plain(n)) for n in (node.left, node.comparators[0]))
            if isinstance(node.ops[0], (ast.Is, ast.IsNot)) and right == (Known(None),):
                answers = {None if v is None else isinstance(v, Known) and v.value is None for v in left}
                answer = answers.pop() if len(answers) == 1 else None
                return answer if answer is None or isinstance(node.ops[0], ast.Is) else not answer
            both = [v[0].value for v in (left, right) if len(v) == 1 and isinstance(v[0], Known)]
            if len(both) == 2 and all(type(v) in PLAIN for v in both) and type(node.ops[0]) in _COMPARISONS:
                try:
                    return bool(_COMPARISONS[type(node.ops[0])](*both))
                except Exception:
                    return None
            return None
        value = self.value(node)
        answers = {bool(v.value) if isinstance(v, Known) and type(v.value) in PLAIN
                   else True if isinstance(v, Known) and isinstance(v.value, nn.Module)
                   and "__len__" not in dir(v.value)
                   else None for v in value}
        return answers.pop() if len(answers) == 1 else None

    # ---- expressions ----

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return (Known(node.value),)
        if isinstance(node, ast.Name):
            if node.id in self.env:
                return self.env[node.id]
            found = self.globals.get(node.id, getattr(builtins, node.id, None))
            return UNKNOWN if found is None or isinstance(found, torch.Tensor) else (Known(found),)
        if isinstance(node, ast.Attribute):
            return _joined([_attribute(v.value, node.attr) if isinstance(v, Known) else UNKNOWN
                            for v in self.value(node.value)])
        if isinstance(node, ast.Subscript):
            if isinstance(node.value, ast.Tuple) and done(node.value.elts[0]) == "settle":
                self.settle(node.value.elts[1])
                return self.value(node.value.elts[1])
            base, index = _listed(self.only(node.value)), self.only(node.slice)
            self.force(self.value(node.value))
            if type(base) in (list, tuple, dict) and type(index) in (int, str):
                try:
                    return (Known(base[index]),)
                except LookupError:
                    return UNKNOWN
            return UNKNOWN
        if isinstance(node, ast.IfExp):
            truth = self.truth(node.test)
            return _joined([self.value(way) for way in ([node.body] if truth else [node.orelse] if truth is False
                                                        else [node.body, node.orelse])])
        if isinstance(node, ast.Call):
            what = done(node)
            if what in _CHECKS:
                return self.check(node, node.args[0])
            return getattr(self, f"_{what}")(node, *node.args) if what else self.called(node)
        if isinstance(node, ast.NamedExpr):
            value = self.env[node.target.id] = self.value(node.value)
            return value
        if not isinstance(node, SCOPES):
            before = self.reader
            if isinstance(node, (ast.Tuple, ast.List, ast.Dict)):
                self.reader = f"its output is put into a {type(node).__name__.lower()}"
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.force(self.value(child))
            self.reader = before
        return UNKNOWN

    def called(self, node: ast.Call) -> Any:
        """A call that is made as it is."""
        fs = self.value(node.func)
        for argument in [*node.args, *(k.value for k in node.keywords)]:
            self.force(self.value(argument.value if isinstance(argument, ast.Starred) else argument))
        for f in fs:
            if isinstance(f, Known) and isinstance(f.value, nn.Module) and KINDS.get(type(f.value)) == BLOCK:
                self.force(self.visit(f.value))
        f = fs[0].value if len(fs) == 1 and isinstance(fs[0], Known) else None
        arguments = [self.only(_plain(a)) for a in node.args]
        try:
            if f in (isinstance, hasattr) and (isinstance(arguments[0], nn.Module) and arguments[1] is not None):
                return (Known(f(*arguments)),)
            listed = list(map(_listed, arguments))
            if f in _COMPUTED and not node.keywords and all(type(a) in PLAIN and a is not None for a in listed):
                found = f(*listed)
                return (Known(found if type(found) in PLAIN else list(found)),)
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("items", "values", "keys") and not arguments:
                base = _listed(self.only(_plain(node.func.value)))
                return (Known(list(getattr(base, node.func.attr)())),) if type(base) is dict else UNKNOWN
        except Exception:
            pass
        return UNKNOWN

    # ---- what is pending ----

    def force(self, value: Any, why: Optional[str] = None) -> Any:
        for v in value:
            if isinstance(v, Waiting) and v is not _ONE_PLUS:
                self.close(v, why or self.reader)
        return tuple(None if isinstance(v, Waiting) else v for v in value)

    def close(self, v: Waiting, why: str) -> None:
        if v not in self.closed:
            self.closed[v] = why
            self.kept |= v.convolutions
            if v.site:
                if v.what == "scale + shift" or v.what == "add" and is_channel_norm(type(v.layer)):
                    self.note(v, v.what)
                else:
                    self.why.setdefault(v.layer, {}).setdefault(v.site, why)

    def note(self, v: Waiting, what: str) -> None:
        self.fused.setdefault(v.layer, {}).setdefault(v.site, set()).add(what)
        self.closed[v] = ""

    def settle(self, node: ast.AST) -> None:
        if any(v not in self.closed for v in self.waiting):
            why = self.reader if done(node) == "settle" else (
                f"`{self.text(node)}` runs between it and what reads its output")
            for v in self.waiting:
                self.close(v, why)
        self.waiting.clear()

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

    def _settle(self, node: ast.Call) -> Any:
        self.settle(node)
        return UNKNOWN

    def _in_place(self, node: ast.Call, argument: ast.expr, method: Any, callee: ast.expr, *rest: ast.expr) -> Any:
        x, f = self.value(argument), self.only(callee)
        others = [self.force(self.value(other)) for other in [*rest, *(k.value for k in node.keywords)]]
        if not any(isinstance(v, Waiting) and v.site and v not in self.closed for v in x):
            return self.unknown(node, x)
        if method.value == "add_":
            return self.sum(x, *others, True)
        if method.value or isinstance(f, CALLABLES) and f in ACTIVATIONS:
            return self.activation(x, _activations.choice("relu"))
        return self.activation(x, f if getattr(f, "inplace", False) is True else None)

    def _type(self, node: ast.Call, argument: ast.expr) -> Any:
        self.value(argument)
        return UNKNOWN

    # ---- calls ----

    def _call(self, node: ast.Call, callee: ast.expr, *given: ast.expr) -> Any:
        fs, x = self.value(callee), self.value(given[0]) if given else UNKNOWN
        others = [self.force(self.value(other)) for other in [*given[1:], *(k.value for k in node.keywords)]]
        me, inner = self.inner_of(callee)
        if inner is not None:
            return self.function(inner._normfuse_tree, inner.__globals__, me,
                                 x if inner._normfuse_takes else self.force(x))
        f = fs[0].value if len(fs) == 1 and isinstance(fs[0], Known) else None
        if isinstance(f, CALLABLES) and f in ACTIVATIONS:
            if ACTIVATIONS[f] == "prelu":
                return self.activation(x, _PRELU)
            known = [v[0].value if isinstance(v[0], Known) else 0.0 for v in others]
            return self.activation(x, _activations.of_call(f, tuple(known[:len(given) - 1]), {
                k.arg: v for k, v in zip(node.keywords, known[len(given) - 1:])}))
        if len(given) != 1 or node.keywords:
            return self.unknown(callee, x)
        return _joined([self.module(node, f.value, x) if isinstance(f, Known) else self.unknown(callee, x) for f in fs])

    _go = _above = _call

    def inner_of(self, callee: ast.expr) -> tuple[Optional[nn.Module], Any]:
        """The form of a function or method that shares its caller's frame, and the module that it is a method of."""
        me = None
        if isinstance(callee, ast.Attribute):
            of_super = isinstance(callee.value, ast.Call)
            me = self.block if of_super else self.only(callee.value)
            inners = getattr(type(me), "_normfuse_inner", {})
            static = getattr(getattr(type(me), "_normfuse_original", None), callee.attr, None)
            if of_super:
                static = next((f for f in inners if f.__name__ == callee.attr and f is not static), None)
            if static in inners:
                return me, inners[static]
        f = self.only(callee)
        return None, None if f is None else INNER_FUNCTIONS.get(f) if isinstance(f, CALLABLES) else None

    def _run(self, node: ast.Call, fs: ast.expr, argument: ast.expr) -> Any:
        x, items = self.value(argument), self.items(fs)
        for item in [UNKNOWN, UNKNOWN] if items is None else items:
            before = x
            x = _joined([self.module(node, f.value, x) if isinstance(f, Known) else self.unknown(fs, x) for f in item])
            if items is None:
                x = _joined([before, x])
        return x

    def unknown(self, node: ast.expr, x: Any) -> Any:
        self.force(x)
        self.settle(node)
        return UNKNOWN

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
            for v in x:
                if isinstance(v, Waiting) and v.convolutions and type(f) in OURS and v not in self.closed:
                    self.moved |= v.convolutions
                    self.closed[v] = ""
            self.force(x)
            return UNKNOWN if has_own_activation(f) else (self.opened(Waiting(f, (id(node), self.block))),)
        if type(f) is nn.Identity:
            return x
        if type(f) in DROPOUTS:
            return tuple(self.dropped(v, f) for v in x)
        if _calls.has_bias_to_move(f):
            self.force(x)
            return (self.opened(Waiting(None, 0, str(id(node)), convolutions=frozenset({f}))),)
        return self.activation(x, f)

    def opened(self, v: Waiting, instead: Any = None) -> Waiting:
        if instead is not None:
            self.closed[instead] = ""
        self.closed.pop(v, None)
        self.waiting.add(v)
        return v

    def dropped(self, v: Any, f: nn.Module) -> Any:
        if not isinstance(v, Waiting) or v.site and (f.p == 0 or v.what == "scale"):
            return v
        if not v.site or v.dropout or v in self.closed:
            self.close(v, NOTHING)
            return None
        return self.opened(v._replace(dropout=True, inplace=f.inplace), v)

    def activation(self, x: Any, f: Any) -> Any:
        """f of x, where f may be an activation: a module, or what a function computes."""
        chosen = _activations.of_module(f) if isinstance(f, nn.Module) else f
        for v in x:
            if isinstance(v, Waiting) and v.site and chosen is not None:
                name = chosen["activation"]
                if self.closed.get(v):
                    self.why.setdefault(v.layer, {})[v.site] = self.closed[v]
                elif v.dropout and (name not in SCALING or v.inplace and v.what):
                    self.close(v, "a dropout stands between it and its activation")
                elif "slope" in chosen and not takes_activation(type(v.layer), chosen):
                    self.close(v, "its rule takes no slope")
                elif v.what != "scale" and v not in self.closed:
                    self.note(v, f"{v.what} + {name}" if v.what else name)
        self.force(x)
        return UNKNOWN

    # ---- arithmetic ----

    def sum(self, a: Any, b: Any, in_place: bool) -> Any:
        norms = [[v for v in side if isinstance(v, Waiting) and v.site and v not in self.closed and not v.dropout
                  and v.what in ("", "scale")] for side in (a, b)]
        for mine, other in ((norms[0], b), ([] if in_place else norms[1], a)):
            if mine and not any(isinstance(v, Known) for v in other):
                self.force(other)
                made = tuple(self.opened(v._replace(what="add" if not v.what else "scale + shift"), v) for v in mine)
                self.force(tuple(v for v in (a if other is b else b) if v not in mine))
                return made
        convolutions = frozenset().union(*(v.convolutions for v in (*a, *b) if isinstance(v, Waiting)
                                           and v not in self.closed))
        if convolutions and not any(isinstance(v, Known) for v in (*a, *b)):
            self.moved |= convolutions
            for v in (*a, *b):
                if isinstance(v, Waiting) and v.convolutions:
                    self.closed[v] = ""
            self.force(a), self.force(b)
            return UNKNOWN
        for side in (a, b):
            for v in side:
                if isinstance(v, Waiting) and v.site and self.closed.get(v):
                    self.why.setdefault(v.layer, {})[v.site] = self.closed[v]
        self.force(a), self.force(b)
        return UNKNOWN

    def _iadd(self, node: ast.Call, a: ast.expr, b: ast.expr) -> Any:
        return self.sum(self.value(a), self.value(b), True)

    def product(self, a: Any, b: Any) -> Any:
        for x, factor in ((a, b), (b, a)):
            norms = [v for v in x if isinstance(v, Waiting) and v.site and takes_modulation(type(v.layer))
                     and v not in self.closed and not v.what and not v.dropout]
            if norms and _ONE_PLUS in factor:
                return tuple(self.opened(v._replace(what="scale"), v) for v in norms)
        self.force(a), self.force(b)
        return UNKNOWN

    def combined(self, what: Optional[str], a: Any, b: Any, in_place: bool = False) -> Any:
        if what == "add":
            return self.sum(a, b, in_place)
        if what == "multiply":
            return self.product(a, b)
        self.force(a), self.force(b)
        return UNKNOWN

    def _arithmetic(self, node: ast.Call, reader: ast.expr, callee: ast.expr, a: ast.expr, b: ast.expr) -> Any:
        x, y, what = self.value(a), self.value(b), ARITHMETIC.get(self.only(callee))
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
        if name in VIEWS:
            for value in others:
                self.force(value)
            waits = tuple(v for v in x if isinstance(v, Waiting) and v.site and not v.what and not v.dropout
                          and v not in self.closed and is_channel_norm(type(v.layer)))
            return (*waits, *self.force(tuple(v for v in x if v not in waits)))
        for value in (x, *others):
            self.force(value)
        return UNKNOWN


def _plain(node: ast.expr) -> ast.expr:
    """The expression without the checks around it."""
    while True:
        if isinstance(node, ast.IfExp) and done(ast.Call(node.test, [], [])) == "open":
            node = node.orelse
        elif done(node) in _CHECKS:
            node = node.args[0]  # type: ignore[attr-defined]
        else:
            return node


def _listed(value: Any) -> Any:
    """A container of modules as a list or dict; anything else as it is."""
    if isinstance(value, nn.ModuleDict):
        return dict(value._modules)
    return list(value._modules.values()) if isinstance(value, (nn.ModuleList, nn.Sequential)) else value


def _jumps(statements: list[ast.stmt]) -> bool:
    return any(isinstance(node, (ast.Break, ast.Continue)) for s in statements for node in ast.walk(s))


def _joined(values: list[Any]) -> Any:
    return tuple({id(v) if isinstance(v, Known) and not isinstance(v.value, nn.Module) else
                  (id(v.value),) if isinstance(v, Known) else v: v for value in values for v in value}.values())


def _attribute(base: Any, name: str) -> Any:
    """An attribute that can be read without running code of the model's, and that no call changes."""
    if name == "training":
        return UNKNOWN
    if isinstance(base, types.ModuleType):
        found = getattr(base, name, None)
    elif isinstance(base, nn.Module):
        for place in (base.__dict__, base._modules):
            if name in place:
                found = place[name]
                return UNKNOWN if isinstance(found, torch.Tensor) else (Known(found),)
        found = next((vars(kind)[name] for kind in type(base).__mro__ if name in vars(kind)), None)
        if found is None or hasattr(type(found), "__get__"):
            return UNKNOWN
    else:
        found = getattr(base, "__dict__", {}).get(name) if not isinstance(base, (type, torch.Tensor)) else None
    return UNKNOWN if found is None or isinstance(found, torch.Tensor) else (Known(found),)

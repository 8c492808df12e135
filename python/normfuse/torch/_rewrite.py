# SPDX-License-Identifier: MIT
"""Forwards that are rewritten from their text, so that values may wait for what reads them (see _pending.py).

Every statement stays, and real tensors flow. Only calls, sums, products and quotients go through the frame, the
variable `_normfuse`, and other reads of variables that may be pending compute them. A forward data flow says which
variables these are, and where anything may be pending at all; elsewhere nothing is asked.

What is rewritten takes its caller's frame, and may take and return a pending value. A forward has an outer form, too,
which is called as the forward itself is: it makes a frame, and computes what is returned."""
from __future__ import annotations

import __future__
import ast
import collections
import contextlib
import functools
import inspect
import sys
import types
from typing import Any, Callable, Mapping, Optional

import torch
from torch import nn

from ._calls import FORWARDS
from ._pending import (ACTIVATIONS, ARITHMETIC, ARITHMETIC_METHODS, CALLABLES, FUNCTIONS, FUSED, INNER_FUNCTIONS,
                       METHODS, PLAIN, VIEWS, Frame, Pending, Shared)
from ._rules import BLOCK, KINDS
from ._text import SCOPES, Left, names, names_of_scopes, note_liveness, tree_of, uses_frames

FRAME = "_normfuse"
# Parts of the frame that may give a pending value.
_WAITS = frozenset({"call", "go", "above", "run", "arithmetic", "iadd", "in_place"})
_WAITING_METHODS = frozenset({"add", "add_", "contiguous", "mul", *VIEWS})
_PENDING_METHODS = frozenset({"relu", "relu_", "prelu", "add", "add_", "contiguous", "mul", "div"})
_OPERATORS = {ast.Add: "add", ast.Mult: "multiply", ast.Div: "divide"}
# Names that no module is looked for under: Dynamo knows no type of a list's method.
_OF_CONTAINERS = frozenset(name for kind in (list, dict, set) for name in vars(kind))
_READERS = {"multiply": "factor", "divide": "dividend"}  # of what is in it
# Contexts that let every exception pass.
_PASSING = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode, torch.autocast,
            torch.autograd.profiler.record_function, torch.device, contextlib.nullcontext, torch.random.fork_rng,
            *(vars(module)["autocast"] for module in (torch.cuda.amp, torch.cpu.amp) if "autocast" in vars(module)))
_KNOWN_GETATTR = ("diffusers.models.modeling_utils",)  # where a __getattr__ of modules is that reads and no more
_KNOWN_BUILTINS = {"isinstance": isinstance, "len": len, "int": int, "float": float, "type": type, "hasattr": hasattr,
                   "getattr": getattr}


def _of_frame(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(FRAME, ast.Load()), name, ast.Load())


def _do(name: str, *args: ast.expr, keywords: Any = ()) -> ast.Call:
    return ast.Call(_of_frame(name), list(args), list(keywords))


def done(node: Any) -> str:
    """Which function of the frame an expression calls; "" for none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) \
            and node.func.value.id == FRAME:
        return node.func.attr
    return ""


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value == 1


class _Rewriter:
    """Rewrites the body of one function. owner: the class that it is a method of, or None."""

    def __init__(self, function: types.FunctionType, tree: ast.FunctionDef, owner: Optional[type],
                 can_share: Callable[[types.FunctionType, Optional[type]], bool]) -> None:
        code = function.__code__
        self.globals, self.owner = function.__globals__, owner
        self.me = tree.args.args[0].arg if owner is not None else None
        self.function, self.can_share = function, can_share
        self.plain_reads = owner is not None and owner.__getattribute__ is object.__getattribute__ and (
            owner.__getattr__ is nn.Module.__getattr__ or owner.__getattr__.__module__ in _KNOWN_GETATTR)
        self.locals = set(code.co_varnames) | set(code.co_cellvars) | set(code.co_freevars)
        self.own = set(code.co_varnames) - set(code.co_cellvars)  # variables that no other code sees
        self.tracked = self.own - {self.me, *names_of_scopes(tree)}
        # Variables that are functions made here: Dynamo before PyTorch 2.13 knows no hash of them.
        self.functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} | {
            target.id for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)
            for target in node.targets if isinstance(target, ast.Name)}
        note_liveness(tree, self._passes)
        first = [arg.arg for arg in tree.args.args[owner is not None:][:1]]
        self.takes = bool(first) and first[0] in self.tracked and _may_take(tree.body, first[0])
        self.pending = set(first) if self.takes else set()  # variables that may be
        self.open = True  # may anything be?
        self.every = names(tree, (ast.Load, ast.Store, ast.Del))
        self.reads: collections.Counter[str] = collections.Counter()
        self.kept: set[str] = set()
        self.inside = 0  # contexts and tries
        self.readers: dict[str, str] = {}  # of variables: "factor" or "dividend", as below
        for node in ast.walk(tree):
            what, operands = self._arithmetic(node)
            for operand in operands[:1 if what == "divide" else 2]:
                if what in _READERS and isinstance(operand, ast.Name) and self.readers.get(operand.id) != "factor":
                    self.readers[operand.id] = _READERS[what]
        # The reader of the expression that is rewritten: "factor", "dividend" or nothing known. raw: may it be pending?
        self.role, self.raw = "", False

    # ---- expressions ----

    def of(self, node: ast.expr, raw: bool = False, role: str = "") -> ast.expr:
        """The expression's value, computed. raw: it may be pending, and nothing else reads it."""
        if isinstance(node, ast.Name):
            if node.id not in self.pending or raw and self.reads[node.id] == 1 and node.id not in self.kept:
                return node
            made = ast.copy_location(_do("force", node), node)
            made.again = raw  # type: ignore[attr-defined]
            return made
        before, self.role, self.raw = (self.role, self.raw), role if raw else "", raw
        made = node if isinstance(node, ast.Constant) else ast.copy_location(self._of(node), node)
        self.role, self.raw = before
        return made if raw or not self._may_wait(made) else ast.copy_location(_do("force", made), node)

    def _may_wait(self, made: ast.expr) -> bool:
        if isinstance(made, ast.IfExp):
            return self._may_wait(made.body) or self._may_wait(made.orelse)
        what = done(made)
        return isinstance(made, ast.Name) and made.id in self.pending or what in _WAITS or (
            what == "method" and made.args[1].value in _WAITING_METHODS)

    def safe(self, node: ast.expr, how: str = "safe") -> ast.expr:
        made = self.of(node)
        plain = isinstance(node, (ast.Constant, ast.Compare, ast.BoolOp)) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))  # of what was safe
        return made if plain else ast.copy_location(self._check(how, made), node)

    def _check(self, how: str, made: ast.expr, *others: ast.expr) -> ast.expr:
        """frame.how(made), where anything may be pending; asked for only then, where to read it twice is to read it."""
        if not self.open:
            return made
        checked = _do(how, made, *others)
        if isinstance(made, ast.Name) or self._is_own(made):
            return ast.IfExp(_of_frame("open"), checked, made)
        return checked

    def _waits(self, made: ast.expr) -> ast.expr:
        self.open = True
        return made

    def _settled(self, node: ast.expr) -> ast.expr:
        """The expression, of which nothing is known, with nothing pending before it."""
        if not self.open or isinstance(node, (ast.Starred, ast.FormattedValue, ast.Slice)):
            return node
        return ast.Subscript(ast.Tuple([_do("settle"), node], ast.Load()), ast.Constant(1), ast.Load())

    def _of(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.UnaryOp):
            return ast.UnaryOp(node.op, self.safe(node.operand))
        if isinstance(node, ast.Compare):
            if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
                if isinstance(node.left, ast.Name) and all(isinstance(c, ast.Constant) for c in node.comparators):
                    return node  # computed or not, it is not None
                return ast.Compare(self.of(node.left), node.ops, self._in_turn(self.of, node.comparators))
            return ast.Compare(self.safe(node.left, "compared"), node.ops,
                               self._in_turn(lambda c: self.safe(c, "compared"), node.comparators))
        if isinstance(node, ast.BoolOp):
            return ast.BoolOp(node.op, self._in_turn(self.safe, node.values))
        if isinstance(node, ast.IfExp):
            raw, role, test = self.raw, self.role, self.safe(node.test)
            return ast.IfExp(test, *self._branches(lambda way: self.of(way, raw, role), node.body, node.orelse))
        if isinstance(node, ast.Subscript):
            plain = not any(isinstance(n, (ast.Call, ast.Attribute)) or isinstance(n, ast.Name) and n.id in self.tracked
                            for n in ast.walk(node.slice))
            made = ast.Subscript(self.safe(node.value), node.slice if plain else self.safe(node.slice)
                                 if not isinstance(node.slice, (ast.Slice, ast.Tuple)) else self.of(node.slice),
                                 ast.Load())
            return made if plain or not isinstance(node.slice, (ast.Slice, ast.Tuple)) else self._settled(made)
        if isinstance(node, (ast.Tuple, ast.List)) and not any(isinstance(e, ast.Starred) for e in node.elts):
            return type(node)([self.of(e) for e in node.elts], ast.Load())
        if not isinstance(node, SCOPES):
            for field, value in ast.iter_fields(node):
                if field == "format_spec" and value is not None:
                    value.values = [self.of(v) for v in value.values]
                elif isinstance(value, ast.expr) and field != "target":
                    setattr(node, field, self.of(value))
                elif isinstance(value, list):
                    setattr(node, field, [self.of(v) if isinstance(v, ast.expr) else v for v in value])
        return self._settled(node)

    def _branches(self, of: Callable[[Any], Any], *ways: Any) -> list[Any]:
        """Ways of which one is gone."""
        open, pending, made, ends = self.open, self.pending, [], []
        for way in ways:
            self.open, self.pending = open, set(pending)
            made.append(of(way))
            ends.append((self.open, self.pending))
        self.open, self.pending = any(end for end, _ in ends), set().union(*(left for _, left in ends))
        return made

    def _in_turn(self, of: Callable[[ast.expr], ast.expr], nodes: list[ast.expr]) -> list[ast.expr]:
        """Expressions of which the latter may not be reached."""
        made, ends = [], []
        for node in nodes:
            made.append(of(node))
            ends.append(self.open)
        self.open = any(ends)
        return made

    def _is_own(self, node: ast.expr) -> bool:
        """Is it self.name?"""
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.me

    def _attribute(self, node: ast.Attribute) -> ast.expr:
        if self._is_own(node):
            static = inspect.getattr_static(self.owner, node.attr, None)
            plain = not hasattr(type(static), "__get__") or isinstance(static, types.FunctionType)
            return node if self.plain_reads and plain else self._settled(node)
        if isinstance(self.known(node.value), types.ModuleType) or isinstance(self._of_super(node), types.FunctionType):
            return node
        value = self.of(node.value)
        return ast.Attribute(self._check("owner", value, ast.Constant(node.attr)), node.attr, ast.Load())

    def _binary(self, node: ast.BinOp) -> ast.expr:
        what = _OPERATORS.get(type(node.op))
        if what is None:
            return ast.BinOp(self.safe(node.left), node.op, self.safe(node.right))
        return self._combined(what, _of_frame(what), node.left, node.right,
                              lambda a, b: ast.BinOp(self._checked(a), node.op, self._checked(b)))

    def _checked(self, made: ast.expr) -> ast.expr:
        return made if isinstance(made, ast.Constant) else self._check("safe", made)

    def _combined(self, what: str, f: ast.expr, a: ast.expr, b: ast.expr,
                  otherwise: Callable[[ast.expr, ast.expr], ast.expr]) -> ast.expr:
        """f(a, b), which adds, multiplies or divides. otherwise: makes it of operands that cannot be pending."""
        reader, inner = self.role if what == "add" else "", _READERS.get(what, "")
        if reader == "factor" and not (_is_one(a) or _is_one(b)):
            reader = ""
        left, right = self.of(a, True, inner), self.of(b, what != "divide", inner)
        if reader or self._may_wait(left) or self._may_wait(right):
            return self._waits(_do("arithmetic", ast.Constant(reader), f, left, right))
        return otherwise(left, right)

    # ---- calls ----

    def known(self, node: ast.expr) -> Any:
        """The object that a name that is not local, or a chain of attributes of Python modules, stands for now."""
        if isinstance(node, ast.Name):
            if node.id in self.locals:
                return None
            return self.globals.get(node.id, _KNOWN_BUILTINS.get(node.id))
        base = self.known(node.value) if isinstance(node, ast.Attribute) else None
        return getattr(base, node.attr, None) if isinstance(base, types.ModuleType) else None

    def _arithmetic(self, node: ast.AST) -> tuple[Optional[str], list[ast.expr]]:
        """The operation and the operands of what adds, multiplies or divides."""
        if isinstance(node, ast.BinOp):
            return _OPERATORS.get(type(node.op)), [node.left, node.right]
        known = self.known(node.func) if isinstance(node, ast.Call) else None
        plain = isinstance(known, CALLABLES) and len(node.args) == 2 and not node.keywords and not any(
            isinstance(a, ast.Starred) for a in node.args)
        return (ARITHMETIC.get(known), node.args) if plain else (None, [])

    def _shares(self, f: ast.expr) -> bool:
        """Is it a function or method that has a form which shares its caller's frame?"""
        if self._is_own(f):
            static = inspect.getattr_static(self.owner, f.attr, None)
            return isinstance(static, types.FunctionType) and f.attr not in vars(nn.Module) and \
                self.can_share(static, self.owner)
        above = self._of_super(f)
        if above is not None:
            return above in FORWARDS or isinstance(above, types.FunctionType) and self.can_share(above, self.owner)
        known = self.known(f)
        return isinstance(known, types.FunctionType) and self.can_share(known, None)

    def _of_super(self, f: ast.expr) -> Any:
        """The attribute super().name, of the owner's classes above the one that the method stands in; None: not
        that."""
        if not (isinstance(f, ast.Attribute) and isinstance(f.value, ast.Call) and isinstance(f.value.func, ast.Name)
                and f.value.func.id == "super" and not f.value.args and self.owner is not None):
            return None
        order = self.owner.__mro__
        for i, kind in enumerate(order):
            if self.function in [inspect.unwrap(f) for f in vars(kind).values() if isinstance(f, types.FunctionType)]:
                return next((vars(base)[f.attr] for base in order[i + 1:] if f.attr in vars(base)), None)
        return None

    def _call(self, node: ast.Call) -> ast.expr:
        f, args, keywords, known = node.func, node.args, node.keywords, self.known(node.func)
        if isinstance(f, ast.Name) and f.id == "super":
            return node
        plain = not any(isinstance(a, ast.Starred) for a in args) and all(k.arg for k in keywords)
        known = known if isinstance(known, CALLABLES) else None
        if known is type and plain and len(args) == 1 and not keywords:
            return _do("type", self.of(args[0]))
        if plain and known in (hasattr, getattr, isinstance) and not keywords and len(args) > 1 and (
                known is isinstance or isinstance(args[1], ast.Constant)):
            first, second, *rest = map(self.of, args)
            if known is isinstance:
                owner, second = self._check("owner", first, ast.Constant("__class__")), self._check("classes", second)
            else:
                owner = self._check("owner", first, second)
            return ast.Call(self.of(f), [owner, second, *rest], [])
        if plain and args and known in ACTIVATIONS:
            callee, value = self.of(f), self.of(args[0], True)
            rest, named = list(map(self.of, args[1:])), self._keywords(keywords)
            may_be_in_place = rest or named or known.__name__.endswith("_")
            if may_be_in_place and not self._may_wait(value):
                return self._closed_call(callee, [value, *rest], named)
            return _do("go", callee, value, *rest, keywords=named)
        what, operands = self._arithmetic(node)
        if what:
            callee = self.of(f)
            return self._combined(what, callee, *operands, lambda *ab: self._harmless(callee, [*ab], []))
        raw, own = self.raw, self._is_own(f)
        if plain and not keywords and isinstance(f, ast.Attribute) and known is None and not own and (
                f.attr in VIEWS or f.attr in _PENDING_METHODS and len(args) < 2):
            reader = _READERS.get(ARITHMETIC_METHODS.get(f.attr, ""), "")
            operands = [self.of(f.value, True, reader), *(self.of(a, f.attr != "div", reader) for a in args)]
            if any(map(self._may_wait, operands)) or raw and f.attr == "contiguous":
                made = _do("method", operands[0], ast.Constant(f.attr), *operands[1:])
                return self._waits(made) if f.attr in _WAITING_METHODS else made
            if f.attr.endswith("_"):
                return self._closed_call(ast.Attribute(operands[0], f.attr, ast.Load()), operands[1:], [])
            return self._harmless(operands[0], operands[1:], [], f.attr)
        if plain and self._shares(f):
            return self._go("above" if self._of_super(f) else "go", self.of(f), args, keywords)
        method = isinstance(f, ast.Attribute) and not own and f.attr in METHODS and known is None
        if plain and args and not method and self._may_be_module(f):
            callee = self.of(f)
            if len(args) > 1 or keywords:
                return self._go("go", callee, args, keywords)
            if callee is f and own and not hasattr(self.owner, f.attr) and (
                    self.owner.__getattr__ is nn.Module.__getattr__):
                callee = ast.copy_location(_do("module", f.value, ast.Constant(f.attr)), f)
            return self._waits(_do("call", callee, self.of(args[0], True)))
        if plain and not any(k.arg in ("out", "inplace") for k in keywords) and (known in FUNCTIONS or method):
            callee = self.of(f.value if method else f)
            args, keywords = list(map(self.of, args)), self._keywords(keywords)
            return self._harmless(callee, args, keywords, f.attr if method else "")
        return self._closed_call(self.of(f), list(map(self.of, args)), self._keywords(keywords))

    def _go(self, how: str, callee: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> ast.expr:
        """A call, of which the first argument may be pending."""
        return self._waits(_do(how, callee, *(self.of(a, i == 0) for i, a in enumerate(args)),
                               keywords=self._keywords(keywords)))

    def _may_be_module(self, f: ast.expr) -> bool:
        """Is it a variable, or an attribute or element of one's, and no method?"""
        if isinstance(f, ast.Attribute) and (
                hasattr(type(inspect.getattr_static(self.owner, f.attr, None)), "__get__") if self._is_own(f) else
                f.attr in _OF_CONTAINERS or
                hasattr(torch.Tensor, f.attr) and f.attr != "norm" and self.me not in names(f)):
            return False
        while isinstance(f, (ast.Attribute, ast.Subscript)):
            f = f.value
        return isinstance(f, ast.Name) and f.id in self.locals and f.id not in self.functions

    def _keywords(self, keywords: list[ast.keyword]) -> list[ast.keyword]:
        return [ast.keyword(k.arg, self.of(k.value)) for k in keywords]

    def _harmless(self, f: ast.expr, args: list[ast.expr], keywords: list[ast.keyword],
                  method: str = "") -> ast.expr:
        """A call of a function, or of a value's method, that writes nothing."""
        f = ast.Attribute(self._check("tensor", f), method, ast.Load()) if method else self._check("callee", f)
        named = [ast.keyword(k.arg, self._checked(k.value)) for k in keywords]
        return ast.Call(f, list(map(self._checked, args)), named)

    def _closed_call(self, callee: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> ast.expr:
        """A call of which nothing is known: nothing is pending when it is made."""
        if self.open:
            last = keywords[-1] if keywords else args[-1] if args else None
            if last is None and isinstance(callee, ast.Attribute):  # Dynamo knows no type of a tensor's method
                callee.value = _do("settled", callee.value)
            elif last is None:
                callee = _do("settled", callee)
            elif isinstance(last, (ast.keyword, ast.Starred)):
                last.value = _do("settled", last.value)
            else:
                args[-1] = _do("settled", last)
        self.open = False
        return ast.Call(callee, args, keywords)

    # ---- statements ----

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for s in statements:
            made += [new if new is s else ast.copy_location(new, s) for new in self.statement(s)]
        return made

    def _settle(self) -> list[ast.stmt]:
        was, self.open = self.open, False
        return [ast.Expr(_do("settle"))] if was else []

    def _begin(self, s: Any, *expressions: Optional[ast.AST], kills: list[str] = []) -> None:
        self.reads = sum((_reads(e) for e in expressions if e is not None), collections.Counter())
        self.kept = s.kept - set(kills) | s.escape

    def _passes(self, s: ast.With) -> bool:
        """Do its contexts let every exception pass?"""
        called = [self.known(getattr(item.context_expr, "func", ast.Constant(None))) for item in s.items]
        return all(isinstance(known, CALLABLES) and known in _PASSING for known in called)

    def _unseen(self, s: Any, *targets: ast.expr) -> bool:
        """Are what it stores to variables of which no code sees that a norm before it has raised instead?"""
        stored = [t for target in targets for t in getattr(target, "elts", [target])]
        return all(isinstance(t, ast.Name) and t.id in self.own - s.escape for t in stored)

    def _closed(self, node: ast.expr) -> ast.expr:
        """The value, with nothing pending after it."""
        made = self.of(node)
        if self.open and done(made) == "force":
            return _do("settled", made.args[0])  # type: ignore[attr-defined]
        return self._check("settled", made)

    def statement(self, s: ast.stmt) -> list[ast.stmt]:
        if isinstance(s, (ast.Assign, ast.AnnAssign)) and s.value is not None:
            return self._assign(s)
        if isinstance(s, ast.AugAssign):
            return self._augmented(s)
        if isinstance(s, ast.Expr):
            name = self._overwritten(s.value)
            if name is not None and name.id in self.pending:
                return self._in_place(s, name)
            self._begin(s, s.value)
            s.value = self.of(s.value)
        elif isinstance(s, ast.Return):
            self._begin(s, s.value)
            if s.value is not None and not self.inside:
                s.value = self.of(s.value, True)
            else:
                s.value = self._closed(s.value or ast.Constant(None))
            self.open, self.pending = False, set()  # of what would follow
        elif isinstance(s, ast.If):
            self._begin(s, s.test)
            s.test = self.safe(s.test)
            s.body, s.orelse = self._branches(self.block, s.body, s.orelse)
        elif isinstance(s, (ast.For, ast.While)):
            return self._loop(s)
        elif isinstance(s, ast.With):
            self._begin(s, *(item.context_expr for item in s.items))
            for item in s.items:
                item.context_expr = self._closed(item.context_expr)
            before, pending = self._settle(), set(self.pending)
            s.body = self._inside(s.body)
            self.pending |= pending  # where an exception is swallowed
            return [*before, s]
        elif isinstance(s, ast.Try):
            before, pending = self._settle(), set(self.pending)
            for part in (s, *s.handlers):
                for field in ("body", "orelse", "finalbody") if part is s else ("body",):
                    setattr(part, field, self._inside(getattr(part, field)))
                    self.pending |= pending
                    pending |= self.pending
            return [*before, s]
        elif isinstance(s, (ast.Break, ast.Continue)):
            return [*(self._settle() if self.inside else ()), s]
        elif not isinstance(s, (ast.Pass, ast.Global, ast.Nonlocal, ast.AnnAssign)):  # raise, import, def, ...
            before = self._settle()
            if isinstance(s, (ast.Raise, ast.Assert)):
                self._begin(s, *ast.iter_child_nodes(s))
                parts = [(field, value) for field, value in ast.iter_fields(s) if isinstance(value, ast.expr)]
                for (field, _), made in zip(parts, self._in_turn(self.of, [value for _, value in parts])):
                    setattr(s, field, made)
            return [*before, s]
        return [s]

    def _inside(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Statements in a context or a try: all that is pending is computed at their end, and before an exception
        passes."""
        self.inside += 1
        body = self.block(statements) + self._settle()
        self.inside -= 1
        if not _may_begin(body):
            return body
        made = ast.parse(f"try:\n    pass\nexcept BaseException:\n    {FRAME}.settle()\n    raise").body[0]
        made.body = body  # type: ignore[attr-defined]
        return [made]

    def _assign(self, s: Any) -> list[ast.stmt]:
        targets = s.targets if isinstance(s, ast.Assign) else [s.target]
        apart = self._taken_apart(s, targets)
        if apart:
            return [made for part in apart for made in self._assign(part)]
        kills = [t.id for t in targets if isinstance(t, ast.Name)]
        unseen = self._unseen(s, *targets)
        self._begin(s, s.value, *targets, kills=kills)
        if len(targets) == 1 and kills and unseen:
            name = kills[0]
            s.value = self.of(s.value, name in self.tracked, self.readers.get(name, ""))
            waits = self._may_wait(s.value)  # before: it may be of the name itself
            self.pending = self.pending | {name} if waits else self.pending - {name}
            return [s]
        stored = None if unseen or len(targets) > 1 else self._stored(targets[0], s.value)
        if unseen:
            s.value = self.safe(s.value)
        elif stored is not None:
            s.value = stored
        else:
            s.value = self._closed(s.value)
            s.value.seen = True
            self.open = False
        for t in targets:
            if isinstance(t, (ast.Attribute, ast.Subscript)):
                t.value = self.of(t.value)
                if isinstance(t, ast.Subscript):
                    t.slice = self.of(t.slice) if stored is None else self.safe(t.slice)
        self.pending -= set(names(ast.Tuple(targets), ast.Store))
        return [s]

    def _stored(self, target: ast.expr, value: ast.expr, *key: ast.expr) -> Optional[ast.expr]:
        """The value of a statement that stores it in an item of a variable, or adds it; None: the target is no such."""
        if self.inside or not (isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)
                               and isinstance(target.slice, (ast.Name, ast.Constant))
                               and target.value.id in self.tracked and not self.pending & set(names(target))):
            return None
        value = self._check("stored", self.of(value), target.value, *key)
        value.seen = True  # type: ignore[attr-defined]
        return value

    def _taken_apart(self, s: Any, targets: list[Any]) -> list[ast.stmt]:
        """`a, b = c, d` as an assignment of each, where that is the same."""
        if not (len(targets) == 1 and isinstance(targets[0], ast.Tuple) and isinstance(s.value, ast.Tuple)
                and len(targets[0].elts) == len(s.value.elts) and self._unseen(s, *targets)):
            return []
        made: list[ast.stmt] = []
        stored = [t.id for t in targets[0].elts]
        kept = s.kept
        for i in reversed(range(len(stored))):
            value = s.value.elts[i]
            if isinstance(value, ast.Starred) or stored[i] not in self.tracked or set(stored[:i]) & {
                    stored[i], *names(value)}:
                return []
            part = ast.copy_location(ast.Assign([targets[0].elts[i]], value), s)
            part.kept, part.escape = kept, s.escape  # type: ignore[attr-defined]
            made.insert(0, part)
            kept = kept - {stored[i]} | set(names(value)) | s.escape
        return made

    def _augmented(self, s: ast.AugAssign) -> list[ast.stmt]:
        if not isinstance(s.target, ast.Name):
            self._begin(s, s.value, s.target)
            stored = self._stored(s.target, s.value, s.target.slice) if isinstance(s.op, ast.Add) and isinstance(
                s.target, ast.Subscript) else None
            if stored is not None:
                s.value = stored
                return [s]
            before = self._settle()
            for field in ("value", "slice"):
                if hasattr(s.target, field):
                    setattr(s.target, field, self.of(getattr(s.target, field)))
            s.value = self._closed(s.value)
            self.open = False
            return [*before, s]
        name = s.target.id
        load, store = ast.Name(name, ast.Load()), ast.Name(name, ast.Store())
        self._begin(s, s.value, load, kills=[name])
        if isinstance(s.op, ast.Add) and name in self.tracked and self._unseen(s, s.target):
            left, right = self.of(load, True), self.of(s.value, True)
            if self._may_wait(left) or self._may_wait(right):
                self.pending.add(name)
                return [ast.Assign([store], self._waits(_do("iadd", left, right)))]
        first = [ast.Assign([store], _do("force", load))] if name in self.pending else []
        s.value = self._closed(s.value)
        self.open = False
        self.pending -= {name}
        return [*first, s]

    def _overwritten(self, node: ast.expr) -> Optional[ast.Name]:
        """x in f(x), which may be an activation in place, and in x.add_(y)."""
        if not isinstance(node, ast.Call):
            return None
        f, count, known = node.func, len(node.args), self.known(node.func)
        first = None
        if isinstance(known, CALLABLES) and known in ACTIVATIONS:
            first = node.args[0] if count else None
        elif not node.keywords and isinstance(f, ast.Attribute) and (f.attr, count) in (("relu_", 0), ("add_", 1)):
            first = f.value
        elif not node.keywords and count == 1 and self._may_be_module(f):
            first = node.args[0]
        return first if isinstance(first, ast.Name) else None

    def _in_place(self, s: ast.Expr, name: ast.Name) -> list[ast.stmt]:
        """Such a call, of what may be pending, as an assignment of what the variable is then."""
        call, f = s.value, s.value.func  # type: ignore[attr-defined]
        method = call.args[:1] != [name]
        self._begin(s, call, kills=[name.id])
        value = self.of(name, True)
        what = [ast.Constant(f.attr), ast.Constant(None)] if method else [ast.Constant(""), self.of(f)]
        rest = map(self.of, call.args if method else call.args[1:])
        made = _do("in_place", value, *what, *rest, keywords=self._keywords(call.keywords))
        return [ast.Assign([ast.Name(name.id, ast.Store())], self._waits(made))]

    def _loop(self, s: Any) -> list[ast.stmt]:
        if (run := self._run(s)) is not None:
            return [run]
        self._begin(s, s.iter if isinstance(s, ast.For) else None)
        if isinstance(s, ast.For):
            s.iter = self.of(s.iter)
        calls = any(isinstance(n, (ast.Call, ast.BinOp)) for n in ast.walk(s))
        stored = {name for inner in ast.walk(s) if isinstance(inner, (ast.Assign, ast.AnnAssign, ast.AugAssign))
                  for name in names(inner, ast.Store)} & self.tracked
        if calls:  # of an earlier turn
            self.open = True
            self.pending |= stored
        if isinstance(s, ast.For):
            if self.open and self._unseen(s, s.target):
                s.iter = _do("iter", s.iter, ast.Constant(not isinstance(s.target, ast.Name)))
            elif self.open:
                s.iter = _do("each", s.iter)
        else:
            self._begin(s, s.test)
            s.test = self.safe(s.test)
        before = set(self.pending)
        s.body, open, pending = self.block(s.body), self.open or calls, self.pending | before
        self.open, self.pending = open, pending | (stored if calls else set())
        s.orelse = self.block(s.orelse)
        self.open, self.pending = self.open or open, self.pending | pending
        return [s]

    def _run(self, s: Any) -> Optional[ast.stmt]:
        """`for f in fs: x = f(x)` as one call; None for all other loops."""
        if not isinstance(s, ast.For) or s.orelse or len(s.body) > 1 or not isinstance(s.target, ast.Name):
            return None
        body, f = s.body[0], s.target.id
        if not (isinstance(body, ast.Assign) and len(body.targets) == 1 and isinstance(body.targets[0], ast.Name)):
            return None
        x = body.targets[0].id
        if not ({f, x} <= self.tracked and f != x and ast.unparse(body.value) == f"{f}({x})" and self._unseen(
                s, s.target, *body.targets) and self.every.count(f) == 2 and x not in names(s.iter)):
            return None
        self._begin(s, s.iter, body.value.args[0], kills=[x])
        fs = self.of(s.iter)
        body.value = self._waits(_do("run", fs, self.of(body.value.args[0], True)))
        self.pending.add(x)
        return body


def _reads(node: ast.AST) -> collections.Counter[str]:
    """How often an expression reads each variable, at most."""
    if isinstance(node, ast.IfExp):
        return _reads(node.test) + (_reads(node.body) | _reads(node.orelse))
    if isinstance(node, ast.Name):
        return collections.Counter([node.id] if isinstance(node.ctx, ast.Load) else [])
    return sum(map(_reads, ast.iter_child_nodes(node)), collections.Counter())


def _may_take(statements: list[ast.stmt], name: str) -> bool:
    """Is a variable first read where nothing else reads its value?"""
    for s in statements:
        if isinstance(s, ast.If) and name not in names(s.test):
            if name in names(s):
                return _may_take(s.body, name) or _may_take(s.orelse, name)
        elif name in names(s):
            return isinstance(s, (ast.For, ast.While)) or names(s).count(name) == 1 and (
                name not in s.kept or name in names(s, ast.Store))  # type: ignore[attr-defined]
    return False


def _may_begin(statements: list[ast.stmt]) -> bool:
    """Do they make what waits?"""
    return any(done(node) in (*_WAITS, "method") for s in statements for node in ast.walk(s))


# ---- functions and classes ------------------------------------------------------------------------------------------

_LIBRARIES = frozenset({"torch", "numpy", __name__.partition(".")[0], *sys.stdlib_module_names} - {"__main__"})


def _compiled(function: types.FunctionType, tree: ast.FunctionDef, given: dict[str, Any]) -> types.FunctionType:
    """The function made of a tree in the place of another one, with that one's free variables and those given."""
    code, free = function.__code__, function.__code__.co_freevars
    outer = ast.parse(f"def outer({', '.join([*free, *given])}):\n    pass")
    outer.body[0].body = [tree]  # type: ignore[attr-defined]
    flags = code.co_flags & __future__.annotations.compiler_flag
    made = compile(ast.fix_missing_locations(outer), code.co_filename, "exec", flags, True)
    for name in ("outer", tree.name):
        made = next(c for c in made.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    if hasattr(made, "co_qualname"):
        made = made.replace(co_qualname=code.co_qualname)
    cells = dict(zip(free, function.__closure__ or ())) | {name: types.CellType(value) for name, value in given.items()}
    return _copied(function, made, tuple(cells[name] for name in made.co_freevars))


def _copied(function: types.FunctionType, code: types.CodeType, cells: tuple[Any, ...]) -> types.FunctionType:
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function).__dict__.pop("__wrapped__")
    return made


_OUTER = """
def forward({given}):
    if {frame}_type({value}) is {frame}_Shared:
        return {frame}_inner({me}, {value}.frame, {value}.value{others})
    if {frame}_original.forward is not {frame}_function:
        return {frame}_super({frame}_class, {me}).forward({passed})
    {frame} = {frame}_Frame({me})
    try:
        {frame}_value = {frame}_inner({me}, {frame}{comma}{passed})
        if not {frame}.open and {frame}_type({frame}_value) is not {frame}_Pending:
            return {frame}_value
        return {frame}.settled({frame}_value)
    except {frame}_BaseException:
        {frame}.settle()
        raise
"""


def _outer(function: types.FunctionType, inner: types.FunctionType, given: dict[str, Any]) -> types.FunctionType:
    """The outer form of a forward."""
    arguments = inner._normfuse_tree.args  # type: ignore[attr-defined]
    me, _, *rest = [argument.arg for argument in arguments.args]
    stars = [[prefix + a.arg] if a else [] for prefix, a in (("*", arguments.vararg), ("**", arguments.kwarg))]
    only = [argument.arg for argument in arguments.kwonlyargs]
    passed = [*rest, *stars[0], *(f"{name}={name}" for name in only), *stars[1]]
    text = _OUTER.format(frame=FRAME, me=me, value=rest[0] if rest else "None", passed=", ".join(passed),
                         comma=", " if passed else "", others="".join(f", {name}" for name in passed[1:]),
                         given=", ".join([me, *rest, *(stars[0] or ["*"] if only else stars[0]), *only, *stars[1]]))
    tree = ast.parse(text).body[0]
    tree.name = inner._normfuse_tree.name  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = inner._normfuse_tree.lineno  # type: ignore[attr-defined]
    return _compiled(function, tree, {f"{FRAME}_{name}": value for name, value in {
        "type": type, "super": super, "Shared": Shared, "Frame": Frame, "Pending": Pending,
        "BaseException": BaseException, "inner": inner, **given}.items()})


class _Maker:
    """Makes the rewritten class of a class. inners: its methods -> the forms that share the frame of their caller."""

    def __init__(self, original: type) -> None:
        self.original = original
        self.inners: dict[types.FunctionType, Any] = {}
        self.waiting: list[Any] = []

    def can_share(self, function: types.FunctionType, owner: Optional[type]) -> bool:
        """Has a method of the owner's, or a function, a form that shares its caller's frame?"""
        known = self.inners if owner is not None else INNER_FUNCTIONS
        if function not in known:
            known[function] = None
            if not hasattr(function, "__wrapped__") and (
                    owner is not None or function.__module__.partition(".")[0] not in _LIBRARIES):
                try:
                    tree = tree_of(function)
                except Left:
                    return False
                if not uses_frames(tree) and (owner is not None or _calls_arguments(tree)):
                    known[function] = function  # until it is rewritten
                    self.waiting.append((function, owner, tree))
        return known[function] is not None

    def rewrite_waiting(self) -> None:
        for function, owner, tree in self.waiting:
            known = self.inners if owner is not None else INNER_FUNCTIONS
            known[function] = self.inner(function, owner, tree)

    def inner(self, function: types.FunctionType, owner: Optional[type], tree: ast.FunctionDef) -> types.FunctionType:
        rewriter = _Rewriter(function, tree, owner, self.can_share)
        tree.body = rewriter.block(tree.body)
        tree.args.args.insert(owner is not None, ast.arg(FRAME))
        made = _compiled(function, tree, {})
        made._normfuse_takes, made._normfuse_tree = rewriter.takes, tree  # type: ignore[attr-defined]
        return made

    def made(self) -> type:
        original, forward = self.original, self.original.forward
        if not isinstance(forward, types.FunctionType):
            raise Left("its forward is no function of Python")
        function = inspect.unwrap(forward)
        if function is forward and original.__call__ is nn.Module.__call__ and self.can_share(forward, original):
            self.rewrite_waiting()
            inner = self.inners[forward]
        else:
            tree = tree_of(function)
            if uses_frames(tree):
                raise Left("it looks at the frames of its callers")
            inner = self.inner(function, original, tree)
            self.rewrite_waiting()
        kind = type(original.__name__, (Rewritten, original), {
            "__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__,
            "_normfuse_original": original, "_normfuse_tree": inner._normfuse_tree,
            "_normfuse_globals": function.__globals__,
            "_normfuse_inner": {f: inner for f, inner in self.inners.items() if inner is not None}})
        kind.forward = _decorated(forward, function, _outer(
            function, inner, {"original": original, "function": forward, "class": kind}))
        kind._normfuse_names = [vars(base) for base in kind.__mro__ if base not in (nn.Module, object)]
        KINDS[kind] = BLOCK
        if original in PLAIN:
            PLAIN.add(kind)
        return kind


class Rewritten:
    """Mixin of blocks whose forward is rewritten."""

    _normfuse_original: type
    _normfuse_inner: dict[types.FunctionType, types.FunctionType]  # of the forward and of methods that it calls
    _normfuse_names: list[Mapping[str, Any]]  # of its classes, as they change

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Code that makes another one of its class, such as the slices of nn.Sequential, gets one that is not rewritten.
        object.__setattr__(self, "__class__", self._normfuse_original)
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = list(super().__reduce_ex__(protocol))
        if isinstance(reduced[2], dict):
            reduced[2] = {name: value for name, value in reduced[2].items() if name != FUSED}
        return (_new, (self._normfuse_original,), *reduced[2:])


def _new(original: type) -> nn.Module:
    try:
        kind = class_of(original)
    except Left:  # where it was unpickled
        kind = original
    return kind.__new__(kind)


_classes: dict[tuple[type, Any], type] = {}


def class_of(original: type) -> type:
    """The subclass whose forward is rewritten. Raises Left."""
    key = original, original.forward
    if key not in _classes:
        _classes[key] = _Maker(original).made()
    return _classes[key]


def _decorated(outermost: types.FunctionType, wrapped: types.FunctionType,
               made: types.FunctionType) -> types.FunctionType:
    """The function as its decorators made it, around what was made of the one that they wrap."""
    if outermost is wrapped:
        return made
    below = outermost.__wrapped__  # type: ignore[attr-defined]
    cells = outermost.__closure__ or ()
    if not any(cell.cell_contents is below for cell in cells):
        raise Left("its decorator keeps it where it is not found")
    new = types.CellType(_decorated(below, wrapped, made))
    cells = tuple(new if cell.cell_contents is below else cell for cell in cells)
    result = _copied(outermost, outermost.__code__, cells)
    result.__wrapped__ = new.cell_contents  # type: ignore[attr-defined]
    return result


def _calls_arguments(tree: ast.FunctionDef) -> bool:
    """Does a function call what it is given, or an attribute of that which is no method of tensors?"""
    given = {argument.arg for argument in tree.args.args}
    return any(isinstance(node, ast.Call) and (
        isinstance(node.func, ast.Name) and node.func.id in given
        or isinstance(node.func, ast.Attribute) and given & set(names(node.func))
        and (not hasattr(torch.Tensor, node.func.attr) or node.func.attr == "norm")) for node in ast.walk(tree))


def is_rewritten(module: nn.Module) -> bool:
    """Is its class a rewritten one, and not one that someone derived from it since?"""
    return "_normfuse_original" in vars(type(module))


def rewrite(block: nn.Module) -> None:
    """Gives the block a rewritten forward. Raises Left."""
    if "forward" in block.__dict__:
        raise Left("its forward was replaced on the object")
    if isinstance(block, torch.jit.ScriptModule):
        raise Left("it is a ScriptModule")
    if isinstance(block, Rewritten):
        raise Left("its class was replaced after it was converted: revert first")
    object.__setattr__(block, "__class__", class_of(type(block)))


def restore(block: nn.Module) -> None:
    """Undoes rewrite."""
    block.__dict__.pop(FUSED, None)
    object.__setattr__(block, "__class__", type(block)._normfuse_original)

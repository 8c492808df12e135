# SPDX-License-Identifier: MIT
"""What a module's forward does with its children, by torch.fx or its text; and modules whose forward was rewritten.

A *block* is a module with code of its own that calls normalization layers: a ResNet's Bottleneck, say, or an
nn.Sequential. Each block is traced alone, with its children as leaves, so that the trace is about the block's own code
and nothing else. (Containers that end in a layer are traced through: what follows them follows the layer.) A trace
holds for calls of one kind only (which arguments are tensors, None, left at their defaults or, of True and False, the
opposite; training or not), so blocks are traced once for each kind, and a rewritten block does with any other call what
its own class does.

A rewritten block is an instance of a subclass of its own class, of the same name: its parameters, children, hooks and
state_dict are untouched, `isinstance` holds, and deepcopy and pickle work. In each call it checks that what the trace
assumed is still so (see _watch.py), and runs the forward of its own class if it is not.
"""
from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
import textwrap
import types
import warnings
import weakref
from typing import Any, Callable, Iterator, NamedTuple, Optional

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ._watch import Assumptions, ByName, Stopped, Watch, hooked, plain_class

# (training, how each parameter of forward is given): the kind of call that a trace is true of.
CallKind = tuple[bool, tuple[str, ...]]
TENSOR, NONE, DEFAULT, OPPOSITE = "tensor", "None", "default", "opposite"  # the last one: of a default True or False
# Parameters beyond this many that may be None or a tensor are taken to be tensors (or left out), and beyond this many
# flags are left out: 2^n kinds, but that a flag and more than one of the others are no kind.
_MOST_OPTIONAL, _MOST_FLAGS = 3, 2
_PLAIN = (bool, int, float, str, type(None))
_Parameter = inspect.Parameter


class Untraceable(Exception):
    """A forward that torch.fx cannot follow; the text says why."""


# ---- tracing --------------------------------------------------------------------------------------------------------


class _Value(torch.fx.Proxy):
    """Stands for a value. torch.fx's own proxies take `x += y` for `x = x + y`, which leaves other names of x alone."""


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    def method(self: torch.fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


for _name in ("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
              "ilshift", "irshift"):
    setattr(_Value, f"__{_name}__", _in_place(_name))


class _Argument(_Value):
    """Stands for an argument that is a tensor, and says so to code that asks."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return torch.Tensor


class _Tracer(torch.fx.Tracer):
    traced_func_name = "_normfuse_traced"
    proxy_buffer_attributes = True  # a buffer that forward updates is not updated by tracing it

    def __init__(self, watch: Watch, inlined: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.watch, self.inlined = watch, inlined
        self.containers: dict[nn.Module, None] = {}  # those that were traced through

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self.containers

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.inlined(m):
            self.containers[m] = None
            forward = functools.partial(plain_class(type(m)).forward, m)
        return super().call_module(m, forward, args, kwargs)

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        with self.watch.paused():
            return super().create_proxy(*args, **kwargs)

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        made = (_Argument if node.op == "placeholder" else _Value)(node, self)
        self.watch.stand_ins.append(weakref.ref(made))
        return made

    def create_arg(self, a: Any) -> Any:
        if issubclass(type(a), torch.fx.Proxy):
            return a.node
        # torch.fx makes a plain dict or list of every kind of them.
        if type(a) is collections.OrderedDict:
            pairs = [(key, self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", collections.OrderedDict, (pairs,), {})
        if isinstance(a, dict) and dataclasses.is_dataclass(a):  # what diffusers and transformers return
            values = {field.name: self.create_arg(getattr(a, field.name)) for field in dataclasses.fields(a)}
            return self.create_node("call_function", type(a), (), values)
        if isinstance(a, (dict, list)) and type(a) not in (dict, list):
            raise Untraceable(f"it makes a {type(a).__name__}")
        return super().create_arg(a)


class Signature:
    """The parameters of a block's forward, and how a call gives them."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        self.has_rest = any(p.kind in (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD) for p in parameters)
        parameters = [p for p in parameters if p.kind not in (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD)]
        self.names = tuple(p.name for p in parameters)
        self.positional = sum(p.kind is not _Parameter.KEYWORD_ONLY for p in parameters)
        self.defaults = {p.name: p.default for p in parameters if p.default is not _Parameter.empty}

    def kinds(self) -> Iterator[tuple[str, ...]]:
        """The kinds of call to trace, the plainest first: required arguments are tensors, the others left out."""
        choices = []
        left = {TENSOR: _MOST_OPTIONAL, OPPOSITE: _MOST_FLAGS}
        for i, name in enumerate(self.names):
            if name in self.defaults:
                default = self.defaults[name]
                first, second = DEFAULT, TENSOR if default is None else OPPOSITE if type(default) is bool else None
            else:
                first, second = TENSOR, NONE if i > 0 else None
            counted = OPPOSITE if second == OPPOSITE else TENSOR
            if second is not None:
                left[counted] -= 1
            choices.append((first,) if second is None or left[counted] < 0 else (first, second))
        plainest = tuple(choice[0] for choice in choices)
        return (kind for kind in itertools.product(*choices)
                if OPPOSITE not in kind or sum(map(operator.ne, kind, plainest)) <= 2)

    def kind_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[tuple[tuple[str, ...], list[Any]]]:
        """The kind of this call and its tensors in order; None where no trace can speak for it."""
        if len(args) > self.positional:
            return None
        kinds, tensors, used = [], [], len(args)
        for i, name in enumerate(self.names):
            if i < len(args):
                value = args[i]
            elif name in kwargs:
                value = kwargs[name]
                used += 1
            elif name in self.defaults:
                kinds.append(DEFAULT)
                continue
            else:
                return None
            if isinstance(value, torch.Tensor):
                kinds.append(TENSOR)
                tensors.append(value)
            elif name not in self.defaults:
                if value is not None:
                    return None
                kinds.append(NONE)
            elif type(value) in _PLAIN and type(value) is type(self.defaults[name]) and value == self.defaults[name]:
                kinds.append(DEFAULT)
            elif type(value) is bool and type(self.defaults[name]) is bool:
                kinds.append(OPPOSITE)
            else:
                return None
        return (tuple(kinds), tensors) if used == len(args) + len(kwargs) else None


def _no_attributes(self: nn.Module, name: str, value: Any) -> None:
    raise Untraceable(f"its forward sets its attribute {name!r}")


class Trace(NamedTuple):
    """graph: what a forward does. assumptions: while what is so."""
    graph: torch.fx.Graph
    assumptions: Assumptions


def trace(block: nn.Module, training: bool, kind: tuple[str, ...], inlined: Callable[[nn.Module], bool]) -> Trace:
    """The graph of the block's forward for one kind of call. Raises Untraceable."""
    current, original = type(block), plain_class(type(block))
    signature = Signature(original.forward)
    tensors = [name for name, how in zip(signature.names, kind) if how == TENSOR]
    given = ", ".join(f"{name}={name if how == TENSOR else None if how == NONE else not signature.defaults[name]}"
                      for name, how in zip(signature.names, kind) if how != DEFAULT)
    source = f"def _normfuse_traced({', '.join(['self', *tensors])}):\n    return forward(self, {given})\n"
    scope: dict[str, Any] = {"forward": original.forward, "__name__": __name__}
    exec(source, scope)
    traced = type(original.__name__, (original,), {"_normfuse_traced": scope["_normfuse_traced"],
                                                   "__setattr__": _no_attributes})
    with _all_in_mode(block, training):
        watch = Watch(block, original.forward)
        tracer = _Tracer(watch, inlined)
        object.__setattr__(block, "__class__", traced)
        try:
            with watch:
                graph = tracer.trace(block)
            if watch.asked_grad_mode:
                with torch.set_grad_enabled(not torch.is_grad_enabled()), watch:
                    other = _Tracer(watch, inlined).trace(block)
                if other.python_code("self").src != graph.python_code("self").src:
                    raise Untraceable("does something else where is_grad_enabled() is not what it is now")
        except (Exception, Stopped) as error:  # what a forward raises when it is given proxies can be anything
            text = watch.stopped or (str(error).strip() or type(error).__name__).splitlines()[0]
            watch.restore()
            raise Untraceable(text) from error
        finally:
            object.__setattr__(block, "__class__", current)
        containers = tracer.containers
        del tracer
        problem = watch.problem()
        if problem is not None:
            raise Untraceable(problem)
        assumptions = Assumptions(block)
        assumptions.read(watch, original.forward)
    for container in containers:
        assumptions.no_hooks(container)
        assumptions.is_a(container)
    return Trace(graph, assumptions)


@contextlib.contextmanager
def _all_in_mode(block: nn.Module, training: bool) -> Iterator[None]:
    modes = {module: module.training for module in block.modules()}
    try:
        for module in modes:
            module.__dict__["training"] = training
        yield
    finally:
        for module, mode in modes.items():
            module.__dict__["training"] = mode


def traces(block: nn.Module, training: tuple[bool, ...] = (True, False),
           inlined: Callable[[nn.Module], bool] = lambda module: False) -> dict[CallKind, Trace]:
    """The traces of all kinds of call that can be traced. Raises Untraceable where the plainest kind cannot.

    inlined: which of the modules that it calls are traced through."""
    if "forward" in block.__dict__:
        raise Untraceable("its forward was replaced on the object")
    if isinstance(block, torch.jit.ScriptModule):
        raise Untraceable("it is a ScriptModule")
    found: dict[CallKind, Trace] = {}
    for mode in training:
        for i, kind in enumerate(Signature(plain_class(type(block)).forward).kinds()):
            try:
                found[mode, kind] = trace(block, mode, kind, inlined)
            except Untraceable:
                if i == 0:
                    raise
    return found


# ---- reading graphs -------------------------------------------------------------------------------------------------

_ADDITIONS = {operator.add: False, operator.iadd: True, torch.add: False}  # is the first operand overwritten?
_IN_PLACE = frozenset(getattr(operator, f"__{name}__") for name in (
    "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift",
    "irshift", "setitem", "delitem"))
# What gives a tensor of its own.
_FRESH_MODULES = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_FRESH_FUNCTIONS = frozenset({operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, torch.add,
                              torch.sub, torch.mul, torch.cat, torch.tanh, torch.sigmoid})


def called_module(block: nn.Module, node: torch.fx.Node) -> Optional[nn.Module]:
    return block.get_submodule(str(node.target)) if node.op == "call_module" else None


def caller_of(node: torch.fx.Node) -> str:
    """The path of the module whose code makes this call of a module: the block itself, or what was traced through."""
    stack = [path for path, _ in node.meta["nn_module_stack"].values()]
    return stack[-2] if len(stack) > 1 else ""


def plain_input(node: torch.fx.Node) -> Optional[torch.fx.Node]:
    """The one argument of a call that has no other."""
    if len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], torch.fx.Node):
        return node.args[0]
    return None


def only_reader(block: nn.Module, node: torch.fx.Node, passed: list[torch.fx.Node],
                through: tuple[type, ...] = (nn.Identity,)) -> Optional[torch.fx.Node]:
    """What reads this node's value where nothing else does, looking through modules of some classes, which go to
    `passed`."""
    while len(node.users) == 1:
        reader = next(iter(node.users))
        module = called_module(block, reader)
        if type(module) not in through or hooked(module) or plain_input(reader) is None:
            return None if reader.op == "output" else reader
        passed.append(reader)
        node = reader
    return None


def last_call(block: nn.Module) -> Optional[str]:
    """The name of the child whose output is what the block's forward, of one argument, gives, read by nothing else."""
    signature = Signature(plain_class(type(block)).forward)
    if signature.has_rest or len(signature.names) != 1:
        return None
    names = set()
    for mode in (True, False):
        try:
            (graph, _), = traces(block, (mode,)).values()
        except (Untraceable, ValueError):  # or more than one kind of call
            return None
        value = next(node for node in graph.nodes if node.op == "output").args[0]
        while isinstance(value, torch.fx.Node) and len(value.users) == 1 and plain_input(value) is not None and type(
                called_module(block, value)) is nn.Identity:
            value = value.args[0]
        if not isinstance(value, torch.fx.Node) or value.op != "call_module" or len(value.users) != 1:
            return None
        names.add(str(value.target))
    name = names.pop() if len(names) == 1 else ""
    return name if name in block._modules else None


def addend(node: torch.fx.Node, value: torch.fx.Node) -> Optional[torch.fx.Node]:
    """What `node` adds to `value`, where it is an addition that leaves the other operand alone."""
    overwrites = None
    if node.op == "call_function":
        overwrites = _ADDITIONS.get(node.target)
    elif node.op == "call_method" and node.target in ("add", "add_"):
        overwrites = node.target == "add_"
    if overwrites is None or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    if first is second or not isinstance(first, torch.fx.Node) or not isinstance(second, torch.fx.Node):
        return None
    if first is value:
        return second
    return first if second is value and not overwrites else None


def is_divided_by_one(node: torch.fx.Node, value: torch.fx.Node) -> bool:
    """Is this node value / 1?"""
    divides = (node.target in (operator.truediv, torch.div, torch.true_divide) if node.op == "call_function"
               else node.op == "call_method" and node.target == "div")
    return (divides and not node.kwargs and len(node.args) == 2 and node.args[0] is value
            and type(node.args[1]) in (int, float) and node.args[1] == 1)


def scale_and_shift(node: torch.fx.Node) -> Optional[tuple[torch.fx.Node, ...]]:
    """(scale, shift, 1 + scale, the sum) of `node * (1 + scale) + shift`."""
    product = next(iter(node.users)) if len(node.users) == 1 else None
    if product is None or product.target not in (operator.mul, operator.imul, torch.mul, "mul") or product.kwargs \
            or len(product.args) != 2 or len(product.users) != 1:
        return None
    factor = product.args[0] if product.args[1] is node else product.args[1]
    if product.target is operator.imul and factor is product.args[0]:
        return None  # what it overwrites may be read elsewhere
    if factor is node or not isinstance(factor, torch.fx.Node) or factor.target not in (operator.add, torch.add, "add") \
            or len(factor.args) != 2 or factor.kwargs:
        return None
    scale = next((other for one, other in (factor.args, factor.args[::-1])
                  if type(one) in (int, float) and one == 1 and isinstance(other, torch.fx.Node)), None)
    total = next(iter(product.users))
    shift = addend(total, product)
    return None if scale is None or shift is None else (scale, shift, factor, total)


def overwrites(node: torch.fx.Node) -> bool:
    """Could this call of a function or method change a tensor in place?"""
    if node.op == "call_method":
        name = str(node.target)
        if name.startswith("__"):
            return getattr(operator, name, None) in _IN_PLACE
        return name.endswith("_")
    if node.op != "call_function":
        return False
    name, module = getattr(node.target, "__name__", ""), getattr(node.target, "__module__", None) or ""
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        overloads = [node.target] if isinstance(node.target, torch._ops.OpOverload) else [
            getattr(node.target, overload) for overload in node.target.overloads()]
        return any(overload._schema.is_mutable for overload in overloads)
    if module.startswith(__package__):
        return False
    if module.partition(".")[0] not in ("torch", "_operator", "operator", "math", "builtins", ""):
        return True  # code that torch.fx was told not to look into
    flags = [v for k, v in node.kwargs.items() if k == "inplace"]
    flags += node.args[1:] if module == "torch.nn.functional" else ()  # F.relu(x, True)
    return node.target in _IN_PLACE or name.endswith("_") or "out" in node.kwargs or any(v is True for v in flags)


class Effects(NamedTuple):
    """overwrites: a call may change what it is given. aliases: it may give it back, or a view of it."""
    overwrites: bool
    aliases: bool


_UNKNOWN = Effects(True, True)
_OUTSIDE = "outside"  # where the memory of arguments comes from


def effects(module: nn.Module, known: dict[nn.Module, Effects]) -> Effects:
    """Of calls of a module. known: those that were found before."""
    if module not in known:
        known[module] = _UNKNOWN  # while it is looked at
        known[module] = _effects(module, known)
    return known[module]


def _effects(module: nn.Module, known: dict[nn.Module, Effects]) -> Effects:
    kind = plain_class(type(module))
    if hooked(module):
        return _UNKNOWN
    if kind.forward is nn.Sequential.forward:
        found = [effects(child, known) for child in module._modules.values()]
        kept = list(itertools.takewhile(lambda effect: effect.aliases, found))
        return Effects(any(effect.overwrites for effect in found[:len(kept) + 1]), len(kept) == len(found))
    if isinstance(module, _FRESH_MODULES) and kind.forward in (base.forward for base in kind.__mro__[1:]
                                                              if base.__module__.startswith("torch.nn.modules.")):
        return Effects(False, False)
    if kind.__module__.startswith(("torch.nn.modules.", __package__ + ".")):
        inplace = bool(getattr(module, "inplace", False))
        fresh = isinstance(module, _FRESH_MODULES) or (not inplace and isinstance(module, _FRESH_ACTIVATIONS))
        return Effects(inplace, not fresh)
    signature = Signature(kind.forward)
    try:
        found = traces(module)
    except Untraceable:
        return _UNKNOWN
    if signature.has_rest or len(found) < 2 * len(list(signature.kinds())):
        return _UNKNOWN
    overwrite = alias = False
    for graph in (trace.graph for trace in found.values()):
        homes = memory(module, graph, known)
        for node in graph.nodes:
            child = called_module(module, node)
            changed: tuple[Any, ...] = ()
            if overwrites(node) and (node.op == "call_method" or node.target in _IN_PLACE):
                changed = node.args[:1]
            elif overwrites(node) or (child is not None and effects(child, known).overwrites):
                changed = tuple(node.all_input_nodes)
            overwrite |= any(_OUTSIDE in homes[n] for n in changed if isinstance(n, torch.fx.Node))
            alias |= node.op == "output" and any(_OUTSIDE in homes[n] for n in node.all_input_nodes)
    return Effects(overwrite, alias)


_FRESH_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.ELU, nn.Mish, nn.Sigmoid, nn.Tanh,
                      nn.ReLU6, nn.PReLU)


def memory(block: nn.Module, graph: torch.fx.Graph,
           known: dict[nn.Module, Effects]) -> dict[torch.fx.Node, set[Any]]:
    """For each node, whose memory its value may be in: the nodes' that made it, or outside, which is that of all
    arguments. Parameters and buffers are named."""
    homes: dict[torch.fx.Node, set[Any]] = {}
    for node in graph.nodes:
        given = set().union(*(homes[n] for n in node.all_input_nodes)) if node.all_input_nodes else set()
        child = called_module(block, node)
        if node.op == "placeholder":
            homes[node] = {_OUTSIDE}
        elif node.op == "get_attr":
            homes[node] = {str(node.target)}
        elif (child is not None and not effects(child, known).aliases) or (
                node.op == "call_function" and node.target in _FRESH_FUNCTIONS and "out" not in node.kwargs):
            homes[node] = {node}
        else:
            homes[node] = given | {node}
    return homes


def why_not_later(block: nn.Module, graph: torch.fx.Graph, node: torch.fx.Node, layer: nn.Module, end: torch.fx.Node,
                  gone: set[torch.fx.Node], known: dict[nn.Module, Effects], assumptions: Assumptions,
                  factor: Optional[torch.fx.Node] = None) -> Optional[str]:
    """Why the call of a layer (and `factor`, which reads another value) cannot be made at a later node: something
    between changes what they read, or reads or changes the layer's statistics. None where nothing does; `assumptions`
    then has what that rests on."""
    homes = memory(block, graph, known)
    buffers = {id(buffer) for buffer in layer.buffers()}
    own = {name for name, buffer in block.named_buffers(remove_duplicate=False) if id(buffer) in buffers}
    own |= {name for name, module in block.named_modules(remove_duplicate=False) if module is layer}
    moved = [n for n in graph.nodes if n is node or n is factor]
    values = [value for n in moved for value in n.all_input_nodes]
    source, trusted = set().union(*(homes[value] for value in values)), [called_module(block, v) for v in values]
    between = moved[0].next
    while between is not end:
        module = called_module(block, between)
        given = set().union(*(homes[n] for n in between.all_input_nodes)) if between.all_input_nodes else set()
        if between in gone or between.op == "get_attr":
            pass
        elif given & own or (module is not None and any(
                m is layer or any(id(b) in buffers for b in m._buffers.values()) for m in module.modules())):
            return f"{between.name}, between it and its activation, uses its statistics, too"
        elif module is None and overwrites(between) or module is not None and given & source and effects(
                module, known).overwrites:
            return f"{between.name}, between it and its activation, may overwrite what it reads"
        elif module is not None:
            trusted.append(module)
        between = between.next
    for module in trusted:
        for part in [] if module is None else module.modules():
            assumptions.is_a(part)
            if hasattr(part, "inplace"):
                assumptions.attribute(part, "inplace")
    return None


# ---- reading text ---------------------------------------------------------------------------------------------------


def successive_calls(block: nn.Module) -> list[tuple[str, str]]:
    """The children (a, b) of which the forward's text has `x = self.a(...)` and, as the next statement,
    `x = self.b(x)`: nothing else sees what a gave. For forwards that torch.fx cannot trace."""
    tree = None if "forward" in block.__dict__ else _text(plain_class(type(block)).forward)
    return [] if tree is None else [names for _, _, names in _successive(tree)]


def with_both_called(forward: Callable[..., Any], pairs: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    """The forward with self._normfuse_call_both(a, b, ...) in place of these two statements, for each pair; the same
    one where there is no text any more."""
    tree, function = _text(forward), inspect.unwrap(forward)
    if tree is None:
        return forward
    for statements, i, names in reversed(list(_successive(tree))):
        if names in pairs:
            call = statements[i].value
            call.func.attr = "_normfuse_call_both"
            call.args[:0] = [ast.copy_location(ast.Constant(name), call) for name in names]
            del statements[i + 1]
    # Inside a function that has its free variables, __class__ for super() among them.
    free = function.__code__.co_freevars
    decorators, tree.decorator_list = tree.decorator_list, []
    outer = ast.parse(f"def outer({', '.join(free)}):\n    pass")
    outer.body[0].body = [tree]
    flags = function.__code__.co_flags & annotations.compiler_flag
    code = compile(ast.fix_missing_locations(outer), function.__code__.co_filename, "exec", flags, True)
    for name in ("outer", function.__code__.co_name):
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    cells = dict(zip(free, function.__closure__ or ()))
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__,
                              tuple(cells[name] for name in code.co_freevars))
    made.__kwdefaults__ = function.__kwdefaults__
    for decorator in reversed(decorators):
        decorate = compile(ast.Expression(decorator), function.__code__.co_filename, "eval", flags, True)
        made = eval(decorate, function.__globals__)(made)
    return made


def _text(forward: Callable[..., Any]) -> Optional[ast.FunctionDef]:
    """The text of a function and its decorators; None where it is not known to be what runs."""
    function, wrappers = forward, 0
    while hasattr(function, "__wrapped__"):
        function, wrappers = function.__wrapped__, wrappers + 1
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef) or tree.name != function.__code__.co_name or any(
            isinstance(node, ast.Attribute) and node.attr.startswith("__") and not node.attr.endswith("__")
            for node in ast.walk(tree)) or len(tree.decorator_list) != wrappers:
        return None
    return ast.increment_lineno(tree, start - 1)


def _successive(tree: ast.AST) -> Iterator[tuple[list[ast.stmt], int, tuple[str, str]]]:
    """The statements lists and places in them where two such calls stand, and the two names."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if not isinstance(statements, list):  # a lambda's body
                continue
            for i, (first, second) in enumerate(zip(statements, statements[1:])):
                a, b = _called_into(first), _called_into(second)
                if a and b and a[1] == b[1] and len(second.value.args) == 1 \
                        and isinstance(second.value.args[0], ast.Name) and second.value.args[0].id == a[1]:
                    yield statements, i, (a[0], b[0])


def _called_into(statement: ast.stmt) -> Optional[tuple[str, str]]:
    """(a, x) of `x = self.a(...)`."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 \
            and isinstance(statement.targets[0], ast.Name) \
            and isinstance(statement.value, ast.Call) and not statement.value.keywords \
            and isinstance(statement.value.func, ast.Attribute) and isinstance(statement.value.func.value, ast.Name) \
            and statement.value.func.value.id == "self":
        return statement.value.func.attr, statement.targets[0].id
    return None


# ---- rewritten blocks -----------------------------------------------------------------------------------------------


class Body(NamedTuple):
    """What runs for one kind of call. ready: are there no hooks and such; holds: is what the trace read what it was.
    None: yes."""
    forward: Callable[..., Any]
    ready: Optional[Callable[[nn.Module], bool]]
    holds: Optional[Callable[[nn.Module], bool]]


@dataclasses.dataclass(frozen=True)
class Sources:
    """What a rewritten class is made of. texts: kind of call -> text, and the names in it that are not its own; pairs:
    of children whose calls were merged in the text of its own forward; values: what each condition is about."""
    texts: dict[CallKind, tuple[str, dict[str, Any]]]
    pairs: tuple[tuple[str, str], ...]
    values: dict[CallKind, dict[str, str]]

    def __deepcopy__(self, memo: Any) -> Sources:
        return self


# One class for each original class and its sources, shared by all blocks that are alike: torch.compile compiles once.
_classes: dict[Any, type] = {}


class RewrittenBlock:
    """Mixin of rewritten blocks. Calls of a kind that has a body run it, while what it assumes holds; others run the
    original class's forward."""

    _normfuse_original: type
    _normfuse_sources: Sources
    _normfuse_signature: Signature
    _normfuse_tensors: dict[int, tuple[str, ...]]  # the kind of a call with so many tensors and nothing else
    _normfuse_bodies: dict[CallKind, Body]
    _normfuse_forward: Callable[..., Any]  # the original class's, but for calls that were merged in its text

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Code that makes another one of its class, such as the slices of nn.Sequential, gets one that is not rewritten.
        object.__setattr__(self, "__class__", self._normfuse_original)
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for value in args if not kwargs else (None,):
            if not isinstance(value, Tensor):
                call = self._normfuse_signature.kind_of(args, kwargs)
                break
        else:  # the usual call, at a third of the time
            call = self._normfuse_tensors.get(len(args)), args
        body = None if call is None else self._normfuse_bodies.get((self.training, call[0]))
        if body is None or _has_any_global_hook() or (body.ready is not None and not body.ready(self)):
            return self._normfuse_forward(*args, **kwargs)
        if body.holds is not None and not body.holds(self):
            if not torch.compiler.is_compiling():
                self._normfuse_warn((self.training, call[0]))
            return self._normfuse_forward(*args, **kwargs)
        return body.forward(self, *call[1])

    def _normfuse_call_both(self, first: str, second: str, *args: Any) -> Any:
        from ._calls import call_both
        return call_both(getattr(self, first), getattr(self, second), *args)

    def _normfuse_warn(self, kind: CallKind) -> None:
        if "_normfuse_warned" not in self.__dict__:
            self.__dict__["_normfuse_warned"] = True
            scope = self._normfuse_bodies[kind].forward.__globals__
            what = next((about for text, about in self._normfuse_sources.values[kind].items()
                         if not _true(text, self, scope)), "something")
            warnings.warn(f"{type(self).__name__}.{what} changed after convert(): the block runs its own forward, "
                          "without what was folded, while that is so; convert the model once more to fold it",
                          stacklevel=4)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        return (_new_rewritten, (self._normfuse_original, self._normfuse_sources), *reduced[2:])


def _true(text: str, block: nn.Module, scope: dict[str, Any]) -> bool:
    try:
        return bool(eval(text, {**scope, "self": block}))
    except (AttributeError, LookupError, TypeError):
        return False


def _new_rewritten(original: type, sources: Sources) -> nn.Module:
    rewritten = _rewritten_class(original, sources)
    return rewritten.__new__(rewritten)


def _rewritten_class(original: type, sources: Sources) -> type:
    def known(value: Any) -> Any:
        if isinstance(value, ByName):
            return value.module, value.name, value.get()
        return repr(value) if isinstance(value, (list, dict, set)) else value

    key = (original, sources.pairs, tuple((kind, text, tuple((name, type(value), known(value))
                                                             for name, value in scope.items()))
                                          for kind, (text, scope) in sources.texts.items()))
    try:
        if key in _classes:
            return _classes[key]
    except TypeError:  # an unhashable constant among the globals
        key = None
    bodies = {}
    for kind, (text, scope) in sources.texts.items():
        namespace = {name: value.get() if isinstance(value, ByName) else value for name, value in scope.items()}
        exec(compile(text, f"<{original.__qualname__}, rewritten>", "exec"), namespace)
        bodies[kind] = Body(namespace["forward"], namespace.get("_ready"), namespace.get("_holds"))
    forward = with_both_called(original.forward, sources.pairs) if sources.pairs else original.forward
    signature = Signature(original.forward)
    tensors = {n: kind[0] for n in range(signature.positional + 1)
               if (kind := signature.kind_of((torch.empty(0),) * n, {})) is not None}
    # With the signature and the arguments' names of its own, for torch.export, torch.fx and inspect.
    called = types.FunctionType(RewrittenBlock.forward.__code__, RewrittenBlock.forward.__globals__)
    functools.update_wrapper(called, original.forward)
    rewritten = type(original.__name__, (RewrittenBlock, original), {
        "forward": called,
        "__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__,
        "_normfuse_original": original, "_normfuse_sources": sources, "_normfuse_forward": forward,
        "_normfuse_signature": signature, "_normfuse_tensors": tensors, "_normfuse_bodies": bodies})
    if key is not None:
        _classes[key] = rewritten
    return rewritten


def rewrite(block: nn.Module, found: dict[CallKind, Trace], pairs: tuple[tuple[str, str], ...] = ()) -> None:
    """Makes the block run these graphs for the calls that they are of, and the rest with calls of pairs merged."""
    texts, values = {}, {}
    for kind, (graph, assumptions) in found.items():
        graph.lint()
        code = graph.python_code("self")
        function = next(c for c in compile(code.src, "", "exec").co_consts if isinstance(c, types.CodeType))
        scope = {name: ByName(value.__name__) if isinstance(value, types.ModuleType) else value
                 for name, value in code.globals.items() if name in function.co_names}
        texts[kind] = (f"{code.src}\n{_condition('_ready', assumptions.states)}"
                       f"{_condition('_holds', assumptions.values)}", {**scope, **assumptions.scope})
        values[kind] = assumptions.values
    object.__setattr__(block, "__class__", _rewritten_class(type(block), Sources(texts, pairs, values)))
    block.__dict__.pop("_normfuse_warned", None)


def _condition(name: str, terms: dict[str, str]) -> str:
    if not terms:
        return ""
    text = "\n            and ".join(terms)
    return (f"def {name}(self):\n    try:\n        return ({text})\n"
            "    except (AttributeError, LookupError, TypeError):\n        return False\n")


def is_rewritten(module: nn.Module) -> bool:
    """Is its class a rewritten one, and not one that someone derived from it since?"""
    return "_normfuse_original" in vars(type(module))


def restore(block: nn.Module) -> None:
    """Undoes rewrite."""
    block.__dict__.pop("_normfuse_warned", None)
    object.__setattr__(block, "__class__", type(block)._normfuse_original)

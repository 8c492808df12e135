# SPDX-License-Identifier: MIT
"""What a forward does while torch.fx traces it, beyond what the graph holds.

A trace holds which operations run on which tensors. Two things are missing from it:

- what only happened once, at trace time: a context that was entered, a random number, a list that was appended to. A
  `Watch` stops the trace there, with the reason, and puts back what changed.
- what was true at trace time: the attributes, list elements and globals that the code read. A `Watch` notes them, and
  `Assumptions` writes them as conditions for a rewritten block, which checks them in each call.
"""
from __future__ import annotations

import collections
import contextlib
import dis
import enum
import functools
import gc
import importlib
import logging
import pickle
import random
import sys
import threading
import time
import types
import weakref
from typing import Any, Callable, Iterator, Optional

import torch
import torch.fx
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (bool, int, float, str, type(None))
# Compared by value as well; the rest are compared by identity.
_VALUES = (complex, bytes, slice, range, torch.device, torch.Size)
_SINGLE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, torch.dtype, torch.layout,
           torch.memory_format, enum.Enum, torch.jit.ScriptFunction)
_MOST_CONTAINERS = 2000  # more that a block refers to are not looked at
_DEPTH = 5
# Frames of these packages are no code of the model.
_LIBRARIES = frozenset({"torch", "numpy", __name__.partition(".")[0], *sys.stdlib_module_names} - {"__main__"})


class Stopped(BaseException):
    """Ends a trace from inside; no `except Exception` of the traced code keeps it. The text says why."""


# Functions that ask or change what no graph holds: of these the model's own calls count, of the second group all.
_ASKING = (
    torch.is_inference_mode_enabled, torch.is_autocast_enabled, torch.is_autocast_cache_enabled,
    torch.get_autocast_dtype, torch.is_anomaly_enabled, torch.get_default_dtype, torch._C._get_tracing_state,
    torch.jit.is_tracing, torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting,
    torch.onnx.is_in_onnx_export, *([torch.distributed.is_initialized] if torch.distributed.is_available() else []),
    time.time, time.perf_counter, time.monotonic, print)
_SETTING = (torch._C._set_grad_enabled, torch.set_autocast_enabled, torch.set_autocast_dtype,
            torch.utils.checkpoint.checkpoint, torch.utils.checkpoint.checkpoint_sequential,
            torch.autograd.Function.apply)


def _by_code(functions: tuple[Any, ...]) -> dict[Any, str]:
    """What functions are known by while they run: their code, those of C themselves."""
    found = {}
    for function in functions:
        name = getattr(function, "__qualname__", function.__name__)
        while hasattr(function, "__wrapped__"):  # what decorates it has code that others share
            function = function.__wrapped__
        found[getattr(function, "__code__", None) or id(function)] = f"calls {name}"
    return found


_ASKED, _SET = _by_code(_ASKING), _by_code(_SETTING)
# Contexts that matter where a library enters them, such as the decorator that torch.no_grad() is.
_MODES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode, torch.autocast,
          torch.autograd.profiler.record_function)


def _package(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _is_tracer(name: str) -> bool:
    return name.startswith("torch.fx.") or name == "torch.fx" or name.startswith(_OURS)


_OURS = __name__.rpartition(".")[0] + "._"  # this file and the tracer


class _Operations(TorchDispatchMode):
    """Operations on tensors that exist: they run now, and only now."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Stopped("draws random numbers")
        if func._schema.is_mutable:
            raise Stopped("overwrites a tensor of its own")
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise Stopped("reads the value of a tensor")
        return func(*args, **(kwargs or {}))


# ---- what changes ---------------------------------------------------------------------------------------------------


def _attributes(value: Any) -> Optional[dict[str, Any]]:
    """The attributes of an object of Python's. A logger keeps a cache of its levels, which is no state of a model."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType, torch.Tensor, torch.fx.Proxy, nn.Module,
                          logging.Logger)):
        return None
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else None


class _Snapshot:
    """The lists, dicts, sets and objects that modules and globals refer to, and what is in them."""

    def __init__(self, roots: list[Any]) -> None:
        self.containers: list[tuple[Any, Any]] = []
        self.generators: list[tuple[Any, bytes]] = []
        seen: set[int] = set()
        waiting: collections.deque[Any] = collections.deque(roots)
        if "numpy" in sys.modules:
            waiting.append(sys.modules["numpy"].random.mtrand._rand)
        while waiting and len(seen) < _MOST_CONTAINERS:
            value = waiting.popleft()
            if id(value) in seen or isinstance(value, _PLAIN):
                continue
            if isinstance(value, (dict, list, set, tuple, collections.deque)):
                seen.add(id(value))
                if type(value) is not tuple:
                    self.containers.append((value, dict(value) if isinstance(value, dict) else list(value)))
                waiting.extend(value.values() if isinstance(value, dict) else value)
            elif hasattr(type(value), "bit_generator") or hasattr(type(value), "_bit_generator"):
                self.generators.append((value, pickle.dumps(self._bits(value).state)))
            attributes = _attributes(value)
            if attributes:
                waiting.append(attributes)

    @staticmethod
    def _bits(generator: Any) -> Any:
        return getattr(generator, "bit_generator", None) or generator._bit_generator

    def restore(self) -> Optional[str]:
        """Puts back what changed; what that was."""
        changed = None
        for value, before in self.containers:
            now = dict(value) if isinstance(value, dict) else list(value)
            if len(now) == len(before) and (
                    all(k in now and now[k] is v for k, v in before.items()) if isinstance(value, dict)
                    else all(a is b for a, b in zip(now, before))):
                continue
            changed = "keeps or changes what it did not make"
            value.clear()
            value.update(before) if isinstance(value, (dict, set)) else value.extend(before)
        for generator, before in self.generators:
            if pickle.dumps(self._bits(generator).state) != before:
                changed = "draws random numbers"
                self._bits(generator).state = pickle.loads(before)
        return changed


# ---- watching -------------------------------------------------------------------------------------------------------

_current: Optional[Watch] = None


def _getattribute(self: nn.Module, name: str) -> Any:
    """nn.Module's while a trace is watched."""
    if _current is not None and _current.thread == threading.get_ident() and not name.startswith("__"):
        _current._read(self, name, sys._getframe(1))
    return object.__getattribute__(self, name)


class Watch:
    """Watches one trace: `with watch: ...`, then watch.problem().

    scopes: the functions that ran, but for those of libraries, and their globals. reads: (module, attribute) that they
    read. asked_grad_mode: whether they asked for it. stand_ins: what the tracer made for tensors; the tracer notes
    them. stopped: why the trace was stopped from inside."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self.scopes: dict[types.CodeType, dict[str, Any]] = {}
        self.reads: dict[tuple[nn.Module, str], None] = {}
        self.stand_ins: list[weakref.ref[torch.fx.Proxy]] = []
        self.asked_grad_mode = False
        self._caught: Optional[str] = None
        self.stopped: Optional[str] = None
        self.thread = threading.get_ident()
        function = getattr(forward, "__wrapped__", forward)
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        scope = getattr(function, "__globals__", {})
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _filled(cell)]
        self._globals = scope, {name: scope[name] for name in names if name in scope}
        self._snapshot = _Snapshot([*(vars(module) for module in block.modules()), *self._globals[1].values(), *cells])

    def __enter__(self) -> Watch:
        global _current
        self._before = _current, sys.gettrace(), sys.getprofile()
        # A collection may come at any allocation, and what it calls (JAX and profilers have themselves called) is no
        # part of the forward.
        self._collects = gc.isenabled()
        gc.disable()
        self._operations = _Operations()
        self._operations.__enter__()
        _current = self
        nn.Module.__getattribute__ = _getattribute  # type: ignore[method-assign]
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        global _current
        sys.setprofile(None)
        sys.settrace(None)
        _current, trace, profile = self._before
        if _current is None:
            del nn.Module.__getattribute__
        self._operations.__exit__(None, None, None)
        if self._collects:
            gc.enable()
        sys.settrace(trace)
        sys.setprofile(profile)

    def restore(self) -> Optional[str]:
        """Puts back what the forward changed; what that was."""
        changed = self._snapshot.restore()
        scope, before = self._globals
        if any(scope.get(name) is not value for name, value in before.items()):
            scope.update(before)
            changed = "sets a global"
        return changed

    def problem(self) -> Optional[str]:
        """What the forward did that a graph does not hold. To be asked after the trace, whose objects are gone."""
        problem = self.restore() or self._caught
        # Stand-ins in cycles are young. A full collection walks every object of the process, so it is the last resort.
        for generation in range(3) if problem is None else ():
            if self._kept():
                gc.collect(generation)
        if problem is None and self._kept():
            problem = "keeps or changes what it did not make"
        return self.stopped or problem

    def _kept(self) -> bool:
        return any(reference() is not None for reference in self.stand_ins)

    def _stop(self, why: str) -> None:
        self.stopped = self.stopped or why
        raise Stopped(why)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While the tracer works: it makes most of the calls."""
        sys.setprofile(None)
        sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(self._trace)
            sys.setprofile(self._profile)

    def _profile(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            key, caller, entered = id(arg), frame, None
            self.asked_grad_mode |= arg is torch.is_grad_enabled
            if isinstance(getattr(arg, "__self__", None), random.Random):
                self._stop("draws random numbers")
        elif event == "call":
            key, caller = frame.f_code, frame.f_back
            entered = frame.f_locals.get(key.co_varnames[0]) if key.co_name == "__enter__" and key.co_argcount else None
        else:
            return
        if not (entered is not None or key in _SET or key in _ASKED) or caller is None or _is_tracer(_package(caller)):
            return
        own = _package(caller).partition(".")[0] not in _LIBRARIES
        if key in _SET or (own and key in _ASKED):
            self._stop(_SET.get(key) or _ASKED[key])
        if isinstance(entered, _MODES) or (own and not isinstance(entered, (type(None), contextlib.nullcontext))):
            self._stop(f"enters {getattr(getattr(entered, 'func', None), '__name__', type(entered).__name__)}")

    def _trace(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if _package(frame).partition(".")[0] in _LIBRARIES:
            return None
        self.scopes.setdefault(frame.f_code, frame.f_globals)
        frame.f_trace_lines = False
        return self._within

    def _within(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "exception" and not issubclass(arg[0], (StopIteration, GeneratorExit, Stopped)):
            self._caught = f"catches an exception, {arg[0].__name__}, that came of tracing it or would come then too"
        return self._within

    def _read(self, module: nn.Module, name: str, frame: Optional[types.FrameType]) -> None:
        called = None
        while frame is not None and _package(frame).startswith("torch.nn."):
            called, frame = frame.f_code.co_name, frame.f_back
        if frame is not None and (not _is_tracer(_package(frame)) or called == "forward"):
            self.reads[module, name] = None


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


# ---- assumptions ----------------------------------------------------------------------------------------------------


class ByName:
    """A constant of generated code that pickle takes by name: a module of Python, or a global of it."""

    def __init__(self, module: str, name: Optional[str] = None, value: Any = None) -> None:
        self.module, self.name, self.value = module, name, value

    def get(self) -> Any:
        module = importlib.import_module(self.module)
        return module if self.name is None else getattr(module, self.name) if self.value is None else self.value

    def __reduce__(self) -> Any:
        return ByName, (self.module, self.name)


def plain_class(kind: type) -> type:
    """The class that a module was made of, where its class is one of ours that has no name to be imported by."""
    return getattr(kind, "_normfuse_original", getattr(kind, "_normfuse_stock", kind))


def hooked(module: nn.Module) -> bool:
    """Does anyone watch or replace the calls of this module?"""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks or "forward" in module.__dict__)


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class Assumptions:
    """What a graph of a block was made for, as expressions of `self` that a rewritten block evaluates in each call.

    values: expression -> what it is about; false where the program is another than it was. states: likewise, of what
    comes and goes (hooks, modes of children). scope: the constants in the expressions."""

    def __init__(self, block: nn.Module) -> None:
        self.values: dict[str, str] = {}
        self.states: dict[str, str] = {}
        self.scope: dict[str, Any] = {}
        self._block = block
        self._paths = {module: path for path, module in block.named_modules()}
        self._names: frozenset[str] = frozenset()
        self._open: list[int] = []

    def no_hooks(self, module: nn.Module) -> None:
        self.states[f"not {self._constant(ByName(__name__, 'hooked'))}({self._module(module)})"] = "hooks"

    def is_a(self, module: nn.Module, exactly: bool = False) -> None:
        """That the module stays of its class; exactly: of no subclass."""
        kind = self._constant(plain_class(type(module)))
        text = f"type({self._module(module)}) is {kind}" if exactly else f"isinstance({self._module(module)}, {kind})"
        self.values[text] = self._paths[module]

    def attribute(self, module: nn.Module, name: str) -> None:
        """That an attribute of a module stays what it is."""
        where, label = self._module(module), f"{self._paths[module]}.{name}".lstrip(".")
        if name == "training":
            if module is not self._block:
                self.states[f"{where}.training is {module.training}"] = label
        elif name in ("_modules", "_parameters", "_buffers"):
            self.values[f"tuple({where}.{name}) == {tuple(getattr(module, name))!r}"] = label
            if name == "_modules":
                for child in module._modules:
                    self._child(module, child, False)
        elif name in module._modules:
            self._child(module, name, True)
        elif name in module._parameters or name in module._buffers:
            self.values[f"(getattr({where}, {name!r}, None) is None) is {getattr(module, name) is None}"] = label
        elif name not in _MODULE_ATTRIBUTES:
            on_class = next((vars(base)[name] for base in type(module).__mro__ if name in vars(base)), None)
            if name not in module.__dict__ and (callable(on_class) or hasattr(on_class, "__get__")):
                return  # code, whose own reads are noted
            try:
                value = getattr(module, name)
            except AttributeError:
                self.values[f"not hasattr({where}, {name!r})"] = label
            else:
                self._value(f"{where}.{name}", value, label)

    def read(self, watch: Watch, forward: Callable[..., Any]) -> None:
        """All that a trace read."""
        self._names = frozenset(name for code in watch.scopes for name in code.co_names)
        for module, name in watch.reads:
            if module in self._paths:
                self.attribute(module, name)
        for code, scope in watch.scopes.items():
            home = sys.modules.get(scope.get("__name__", ""))
            if home is None or vars(home) is not scope:
                continue
            where = self._constant(ByName(home.__name__))
            for name in _globals_read(code):
                value = scope.get(name, self)
                if isinstance(value, _SINGLE):
                    if getattr(value, "__module__", "").partition(".")[0] not in _LIBRARIES:
                        constant = self._constant(ByName(home.__name__, name, value))
                        self.values[f"{where}.{name} is {constant}"] = f"{home.__name__}.{name}"
                elif value is not self:
                    self._value(f"{where}.{name}", value, f"{home.__name__}.{name}")
        function = getattr(forward, "__wrapped__", forward)
        cells = zip(getattr(getattr(function, "__code__", None), "co_freevars", ()),
                    getattr(function, "__closure__", None) or ())
        for name, cell in cells:
            if name != "__class__" and _filled(cell):
                self._value(f"{self._constant(cell)}.cell_contents", cell.cell_contents, name)

    def _module(self, module: nn.Module) -> str:
        path = self._paths[module]
        return "self" + "".join(f"._modules[{step!r}]" for step in path.split(".") if path)

    def _constant(self, value: Any) -> str:
        for name, known in self.scope.items():
            if known is value or (type(value) is type(known) is ByName and vars(known) == vars(value)):
                return name
        name = f"_known{len(self.scope)}"
        self.scope[name] = value
        return name

    def _child(self, module: nn.Module, name: str, asked: bool) -> None:
        child, text = module._modules[name], f"{self._module(module)}._modules[{name!r}]"
        label = f"{self._paths[module]}.{name}".lstrip(".")
        if child is None:
            self.values[f"{text} is None"] = label
        elif text != self._module(child):  # the graph calls it by the first of its names
            self.values[f"{text} is {self._module(child)}"] = label
        elif asked and self._names & {"isinstance", "type", "issubclass", "__class__"}:
            self.is_a(child)
        elif asked:
            self.values[f"{text} is not None"] = label

    def _value(self, text: str, value: Any, label: str) -> None:
        kind = type(value)
        if id(value) in self._open or len(self._open) > _DEPTH:
            return
        if value is None or kind is bool:
            self.values[f"{text} is {value}"] = label
        elif isinstance(value, _SINGLE):
            self.values[f"{text} is {self._constant(value)}"] = label
        elif kind in _PLAIN or kind in _VALUES or _all_plain(value):
            constant = self._constant(pickle.loads(pickle.dumps(value)) if _all_plain(value) else value)
            self.values[f"type({text}) is {self._constant(kind)} and {text} == {constant}"] = label
        elif isinstance(value, nn.Module):
            if value in self._paths:
                self.values[f"{text} is {self._module(value)}"] = label
        elif isinstance(value, types.MethodType):
            self.values[f"{text}.__func__ is {self._constant(value.__func__)}"] = label
        elif isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _LIBRARIES:
                self._members(text, value, label)
        else:
            self.values[f"isinstance({text}, {self._constant(plain_class(kind))})"] = label
            self._members(text, value, label)

    def _members(self, text: str, value: Any, label: str) -> None:
        self._open.append(id(value))
        if isinstance(value, (list, tuple, collections.deque)):
            self.values[f"len({text}) == {len(value)}"] = label
            for i, element in enumerate(value):
                self._value(f"{text}[{i}]", element, f"{label}[{i}]")
        elif isinstance(value, dict) and _all_plain(tuple(value)):
            self.values[f"tuple({text}) == {self._constant(tuple(value))}"] = label
            for key, element in value.items():
                self._value(f"{text}[{self._constant(key) if type(key) is float else repr(key)}]", element,
                            f"{label}[{key!r}]")
        names = {"func", "args", "keywords"} if isinstance(value, functools.partial) else self._names
        slots = {name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())}
        if not isinstance(value, torch.Tensor):
            for name in sorted(names & (set(getattr(value, "__dict__", ())) | slots)):
                if hasattr(value, name):
                    self._value(f"{text}.{name}", getattr(value, name), f"{label}.{name}")
        self._open.pop()


def _all_plain(value: Any) -> bool:
    """Is it a list, tuple, set or dict of numbers, texts and None?"""
    if type(value) is dict:
        return all(type(v) in _PLAIN for pair in value.items() for v in pair)
    return type(value) in (list, tuple, set, frozenset) and all(type(v) in _PLAIN for v in value)


def _globals_read(code: types.CodeType) -> Iterator[str]:
    yield from dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")

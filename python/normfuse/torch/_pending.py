# SPDX-License-Identifier: MIT
"""The run time of rewritten forwards: values that wait to be computed with what reads them.

A norm that is called gives a Pending in the place of a tensor. An activation, an addition or a modulation takes it into
one call; anything else that reads it computes the plain layer. A convolution likewise gives its output without bias.

The rule for time: while something is pending, only what is known to be harmless runs. That is what writes nothing,
draws no random numbers and does not read the statistics that a pending norm will update. Before anything else all that
is pending is computed, in order."""
from __future__ import annotations

import collections
import itertools
import operator
import types
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as _module

from . import _activations, _calls, functional
from ._calls import Biased, complete, fused_call
from ._rules import (BLOCK, KINDS, NORM, OURS, REPLACEMENTS, channel_axis, has_own_activation, is_channel_norm,
                     plain_class, result_type, takes_activation, takes_modulation)

_TENSORS = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)
# For exactly these types truth, comparisons, attributes and items run no code of a model's.
PLAIN = {bool, int, float, str, type(None), tuple, list, dict, torch.Size, torch.dtype, torch.device, range, slice,
         collections.OrderedDict, nn.ModuleList, nn.ModuleDict, nn.Sequential}
CONTAINERS = frozenset({tuple, list, dict, collections.OrderedDict})
_ITERABLE = frozenset({tuple, list, dict, range, torch.Size, collections.OrderedDict}
                      | {type(view) for d in ({}, collections.OrderedDict())
                         for view in (d.items(), d.values(), d.keys())})
# Functions and methods that write nothing and draw no random numbers.
ACTIVATIONS = _activations.FUNCTIONS
_IN_PLACE = frozenset(f for f in ACTIVATIONS if f.__name__.endswith("_"))
FUNCTIONS = frozenset({f for f in ACTIVATIONS if f not in _IN_PLACE} | {
    torch.cat, torch.chunk, torch.split, torch.flatten, torch.reshape, torch.sigmoid, torch.tanh, torch.mean,
    torch.permute, torch.mul, torch.add, torch.div, torch.is_tensor, F.interpolate, F.pad, F.avg_pool2d,
    F.adaptive_avg_pool2d, F.max_pool2d, F.linear, F.conv1d, F.conv2d, F.conv3d, isinstance, len, int, float})
METHODS = frozenset({"contiguous", "view", "reshape", "permute", "transpose", "chunk", "size", "dim", "flatten",
                     "mean", "unsqueeze", "squeeze", "expand", "numel", "split", "mul", "sub", "div", "is_contiguous",
                     "to", "add", "sum", "amax", "amin", "abs", "neg", "exp", "sqrt", "square", "clone", "detach",
                     "float", "double", "half", "type", "tanh", "sigmoid", "movedim", "unbind", "unflatten"})
VIEWS = ("movedim", "permute", "transpose")  # through which a norm over channels meets what follows it
ARITHMETIC = {torch.add: "add", torch.mul: "multiply", torch.div: "divide", torch.true_divide: "divide",
              torch.multiply: "multiply", torch.divide: "divide", operator.add: "add", operator.mul: "multiply",
              operator.truediv: "divide"}
ARITHMETIC_METHODS = {"add": "add", "add_": "add", "mul": "multiply", "div": "divide"}
CALLABLES = (types.FunctionType, types.BuiltinFunctionType, type)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# Activations with f(c z) = c f(z) for c >= 0: before such a dropout they are what they are after it.
SCALING = ("relu", "leaky_relu", "prelu")
_LEAVES = (nn.Linear, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.Upsample,
           nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.Flatten, nn.Sigmoid, nn.Hardsigmoid,
           nn.Tanh, nn.Identity, *DROPOUTS, *_activations.MODULES)
_LEAF, _CONVOLUTION = "leaf", "convolution"
KINDS.update(dict.fromkeys(_LEAVES, _LEAF) | dict.fromkeys(_calls.CONVOLUTIONS, _CONVOLUTION))

# While compiling, the stock forwards of norms behind an activation, which Inductor computes in fewer passes; and where.
_STOCK_NORMS = {ours: stock for stock, ours in REPLACEMENTS.items() if stock is not nn.SyncBatchNorm}
LEFT_DEVICES = {"cuda"}

FUSED, MOVES = "_normfuse_fused", "_normfuse_moves_bias"  # in the __dict__ of blocks and of convolutions
_CONVOLVED, _COPIED, _ONE_PLUS, _TOTAL = "convolved", "copied", "one plus", "total"
_NOT_PENDING, _NO_ACTIVATION = object(), _activations.choice(None)
INNER_FUNCTIONS: dict[Any, Any] = {}  # function -> its form that shares the frame of its caller
_NO_FUNCTIONS: dict[Any, Any] = {}
_count = itertools.count()
_is_dynamo_compiling, _compiler = functional._is_dynamo_compiling, functional._compiler
_is_tracing, _is_profiling = torch._C._get_tracing_state, torch.autograd._profiler_enabled


def _watched(module: nn.Module) -> bool:
    """Does anyone watch or replace the calls of this module, or of all modules? This is asked for each layer of each
    call: so it calls nothing itself."""
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
                or own["_backward_pre_hooks"] or "forward" in own or own.get("_compiled_call_impl") is not None
                or _module._global_forward_hooks or _module._global_forward_pre_hooks
                or _module._global_backward_hooks or _module._global_backward_pre_hooks)


def _may_wait(layer: nn.Module) -> bool:
    """May a norm's call be made later?"""
    return not (_watched(layer) or "activation" in layer.__dict__ and has_own_activation(layer))


class Shared:
    """An argument, and the frame of the caller that passes it."""

    def __init__(self, frame: Frame, value: Any) -> None:
        self.frame, self.value = frame, value


class Pending:
    """dropout(layer(input) * (1 + scale) + shift + added), not computed yet. layer is one of the words above for what
    is no norm: input + bias, of a Biased; input.contiguous(); 1 + input; and a sum, which is there already. order: of a
    norm over channels, how the axes are permuted before the dropout; what is added is as before that. factor: scale as
    it was given. waits: whether it is a norm's that is not computed yet."""

    def __init__(self, frame: Frame, layer: Any, input: Any) -> None:
        self.frame = frame
        self.layer = layer
        self.input = input
        self.waits = type(layer) is not str
        # Not in the class: a norm and its activation would take 2.5 us of this module, not 2.1.
        self.added = self.scale = self.factor = self.shift = self.dropout = self.value = self.order = None
        self.in_place = self.consumed = False
        frame.open.append(self)

    def close(self) -> Any:
        self.frame.open.remove(self)
        self.consumed, self.waits, input, self.input = True, False, self.input, None
        return input

    def compute(self) -> Any:
        if self.value is None:
            if self.consumed:
                raise RuntimeError("normfuse: a value is read that became part of a fused call; please report it, and "
                                   "call normfuse.torch.revert(model) until then")
            if type(self.layer) is str:
                input = self.close()
                self.value = (complete(input) if self.layer is _CONVOLVED else input.contiguous()
                              if self.layer is _COPIED else 1 + input)
                return self.value
            adds = self.added is not None and not is_channel_norm(type(self.layer))
            value = self._called({}, None if adds else self.added)
            if self.scale is not None and self.shift is None:
                value = value * (1 + self.factor)
            if adds and self.in_place:
                value += self.added
            elif adds:
                value = value + self.added
            self.value, self.added = value if self.dropout is None else self.dropout(value), None
        return self.value

    def activated(self, chosen: _activations.Choice) -> Any:
        """activation(this), where nothing else reads this; _NOT_PENDING where that is no one call."""
        if type(self.layer) is str or (self.dropout is not None or self.scale is not None
                                       or chosen["activation"] == "prelu") and not self._may_end_in(chosen):
            return _NOT_PENDING
        value = self._called(chosen, self.added)
        self.added = self.scale = self.shift = None
        return value if self.dropout is None else self.dropout(value)

    def _may_end_in(self, chosen: _activations.Choice) -> bool:
        """Is activation(this) one call, with a dropout, a scale or prelu?"""
        layer, dropout, name = self.layer, self.dropout, chosen["activation"]
        if (self.scale is None) != (self.shift is None) or dropout is not None and (
                name not in SCALING or self.added is not None and dropout.inplace):
            return False
        if name != "prelu":
            return True
        slope = chosen["slope"]
        if type(slope) not in _TENSORS or not takes_activation(type(layer), {"slope": None}):
            return False
        return not is_channel_norm(type(layer)) or slope.shape == (1,) or (
            slope.shape == self.shape()[1:2] and self.before(1) == channel_axis(layer, self.input))

    def _called(self, chosen: _activations.Choice, added: Optional[Tensor]) -> Any:
        """The norm's call with scale and shift, what is added and the activation; permuted."""
        frame, layer, input, name = self.frame, self.layer, self.close(), chosen.get("activation", "")
        others, taken = {}, ""
        if self.shift is not None:
            others, taken = {"scale": self.scale, "shift": self.shift}, "scale + shift"
        elif added is not None:
            others, taken = {"post_add": added}, "add"
        if frame.fused is not None:
            frame.fused.append((layer, f"{taken} + {name}" if taken and name else taken or name))
        if type(input) is Biased or name == "prelu" and not is_channel_norm(type(layer)):
            value = fused_call(layer, input, chosen, **others)
        else:
            value = (layer if frame.scoped else layer.forward)(input, **others, **chosen)
        return value if self.order is None else value.permute(self.order)

    def before(self, axis: int) -> int:
        """Which axis of the norm's output it is."""
        return axis if self.order is None else self.order[axis]

    def tensor(self) -> Tensor:
        """The input, without a bias that is not added yet."""
        return self.input.value if type(self.input) is Biased else self.input

    def shape(self) -> tuple[int, ...]:
        """The output's shape."""
        shape = self.tensor().shape
        return shape if self.order is None else tuple(shape[axis] for axis in self.order)

    def permuted(self, name: str, rest: tuple[Any, ...]) -> Optional[Pending]:
        """this.name(*rest), one of VIEWS, still pending; None where that cannot be."""
        axes = self.input.dim() if type(self.input) in _TENSORS else 0
        moved = _moved(name, rest, axes) if is_channel_norm(type(self.layer)) and axes else None
        if moved is None or self.dropout is not None or self.added is not None or self.scale is not None:
            return None
        self.order = tuple(self.before(axis) for axis in moved)
        return self

    def is_modulation(self, parameter: Tensor) -> bool:
        """Is it scale or shift of samples and channels?"""
        shape, x = self.shape(), self.tensor()
        axis = channel_axis(self.layer, x)
        at = axis if self.order is None else self.order.index(axis)
        if at == 0 or self.before(0) != 0:
            return False
        expected = [size if i in (0, at) else 1 for i, size in enumerate(shape)]
        return (parameter.shape == tuple(expected) and parameter.dtype == result_type(self.layer, x)
                and parameter.device == x.device)

    def plus(self, other: Any, in_place: bool) -> Any:
        """this + other, still pending; None where that cannot be."""
        x = self.tensor()
        if self.added is not None or self.shift is not None or self.dropout is not None \
                or type(other) not in _TENSORS or other.device != x.device:
            return None
        if self.scale is not None:
            if not self.is_modulation(other):
                return None
            self.shift = other.reshape(self.scale.shape)
        elif other.shape == (x.shape if self.order is None else self.shape()) and (
                other.dtype == result_type(self.layer, x)):
            if self.order is not None:
                other = other.permute(sorted(range(other.dim()), key=self.order.__getitem__))
            self.added, self.in_place = other, in_place
        else:
            return None
        return self


def _moved(name: str, rest: tuple[Any, ...], axes: int) -> Optional[list[int]]:
    """The permutation that a method of tensors is; None where its arguments are not known."""
    if name == "permute" and len(rest) == 1 and type(rest[0]) in (tuple, list):
        rest = tuple(rest[0])
    if any(type(axis) is not int or not -axes <= axis < axes for axis in rest):
        return None
    at = [axis % axes for axis in rest]
    order = list(range(axes))
    if name == "permute":
        return at if sorted(at) == order else None
    if len(at) != 2:
        return None
    if name == "movedim":
        order.insert(at[1], order.pop(at[0]))
    else:
        order[at[0]], order[at[1]] = at[1], at[0]
    return order


def _is_open(value: Any) -> bool:
    return type(value) is Pending and value.value is None and not value.consumed


def force(value: Any) -> Any:
    return value.compute() if type(value) is Pending else value


class Frame:
    """The list of what is pending in one call of a block, and in the blocks and functions that share its frame.

    scoped: whether calls of modules go through Module.__call__ for a tool that looks there. fused: what became of norms
    that were called, for `fused`; None while compiling. activated: while compiling, what an activation gave last."""

    compiling = False
    activated: Optional[Tensor] = None
    fused: Optional[list[tuple[nn.Module, str]]] = None

    def __init__(self, module: nn.Module) -> None:
        self.open: list[Pending] = []
        if _is_dynamo_compiling() or _compiler._is_compiling_flag:
            self.compiling = self.scoped = True
        else:
            self.scoped = _is_tracing() is not None or _is_profiling()
            self.fused = []
            module.__dict__[FUSED] = next(_count), self.fused

    # Operations of rewritten text on values that may be pending.

    force = staticmethod(force)

    def type(self, value: Any) -> Any:
        """The class that it has without convert."""
        return getattr(value, "_normfuse_converted_from", None) or plain_class(type(value)) if isinstance(
            value, nn.Module) else type(value)

    def settle(self) -> None:
        """Computes all that is pending, in order."""
        try:
            while self.open:
                self.open[0].compute()
        except BaseException:
            self.open.clear()  # what was called after a call that fails
            raise

    def settled(self, value: Any) -> Any:
        """Gives the value back; nothing is pending then."""
        value = force(value)
        if self.open:
            self.settle()
        return value

    def safe(self, value: Any) -> Any:
        """Gives the value back. What is done with it next must not run code of the model's or see old statistics."""
        if type(value) is Pending:
            value = value.compute()
        if self.open and not (self._apart(value) if type(value) in _TENSORS else type(value) in PLAIN and all(
                self._apart(v) for v in (value if type(value) in (tuple, list) else ()) if type(v) in _TENSORS)):
            self.settle()
        return value

    def owner(self, value: Any, name: str) -> Any:
        """Gives the value back, of which an attribute is read next."""
        if self.open and isinstance(value, nn.Module):
            kind = type(value)
            found = getattr(kind, name, None) if type(name) is str else self
            if kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__ and (
                    type(found) is types.FunctionType or not hasattr(type(found), "__get__")):
                return value
        return self.safe(value)

    def stored(self, value: Any, container: Any, *key: Any) -> Any:
        """Gives the value back, which goes into a container next. key: of the number there that it is added to. Biases
        of convolutions may wait for that: nothing but a tensor's memory can be written in their place."""
        value = force(value)
        if self.open and not (all(p.layer is _CONVOLVED for p in self.open) and type(container) in CONTAINERS and (
                not key or type(key[0]) in (int, str) and type(container[key[0]]) in (int, float))):
            self.settle()
        return value

    def classes(self, value: Any) -> Any:
        """Gives the value back, which isinstance asks of next what it is of."""
        if self.open and not all(type(kind) is type for kind in (value if type(value) is tuple else [value])):
            self.settle()
        return value

    def compared(self, value: Any) -> Any:
        """Gives the value back, which is compared next: of containers that compares what is in them."""
        if type(value) in CONTAINERS:
            self.settle()
        return self.safe(value)

    def callee(self, f: Any) -> Any:
        """Gives a function back that is called next, with arguments that were `safe`."""
        if self.open and not (type(f) in CALLABLES and f in FUNCTIONS):
            self.settle()
        return f

    def tensor(self, value: Any) -> Any:
        """Gives the value back, of which a method of tensors is called next that writes nothing: one of METHODS."""
        if type(value) is Pending:
            value = value.compute()
        if self.open and not (type(value) in _TENSORS and self._apart(value)):
            self.settle()
        return value

    def iter(self, value: Any, unpacked: bool) -> Any:
        """The values to iterate over. unpacked: whether each value will be."""
        kind = type(value)
        if kind in (_ITEMS if unpacked else _ITERABLE) or not unpacked and getattr(kind, "__iter__", None) in (
                nn.Sequential.__iter__, nn.ModuleList.__iter__):
            return value
        return self.each(value)

    def each(self, values: Any) -> Any:
        self.settle()
        for value in values:
            yield value
            self.settle()

    def _apart(self, tensor: Tensor) -> bool:
        """Is a tensor none of the statistics that pending layers will update, nor a view of them?"""
        for pending in self.open:
            layer = pending.layer
            if type(layer) is str or not layer.training or layer._buffers.get("running_mean") is None:
                continue
            if self.compiling:
                if not tensor.requires_grad:
                    return False
            elif any(b is not None and torch._C._is_alias_of(tensor, b) for b in layer._buffers.values()):
                return False
        return True

    # Calls.

    def module(self, owner: nn.Module, name: str) -> Any:
        """owner.name, which is likely a module: torch.nn.Module's search would take 0.7 us."""
        own = owner.__dict__
        found = None if self.compiling or name in own else own["_modules"].get(name)
        if found is None:
            return getattr(owner, name)
        for of_class in type(owner)._normfuse_names:
            if name in of_class:
                return getattr(owner, name)
        return found

    def call(self, f: Any, x: Any) -> Any:
        """f(x). x may be pending, and then nothing else reads it; what this gives may be."""
        kind = KINDS.get(type(f))
        if type(x) is Pending:
            if x.value is None:
                chosen = _activations.SIMPLE.get(type(f))
                given = self._take(f, kind, x) if chosen is None or _watched(f) else x.activated(chosen)
                if given is not _NOT_PENDING:
                    return given
            x = x.compute()
        elif not self.open and (kind is _LEAF or kind is _CONVOLUTION and MOVES not in f.__dict__):
            return self._noted(f, f(x)) if self.compiling else f(x)
        if kind is None or kind is BLOCK or type(x) not in _TENSORS:
            inner = self._inner_of(f)
            if inner is not None:
                return self._share(inner, f, x)
            if self.open and not (type(f) in CALLABLES and type(x) in _TENSORS and self._apart(x) and (
                    f in FUNCTIONS)):
                self.settle()
            return self._noted(f, f(x)) if self.compiling else f(x)
        if kind is NORM:
            if _may_wait(f):
                if x is self.activated and type(f) in _STOCK_NORMS:
                    return _STOCK_NORMS[type(f)].forward(f, self.settled(x))
                return self._wait(f, x) if self.open else Pending(self, f, x)
        elif kind is _CONVOLUTION and self._moves(f, x) and not _watched(f):
            return self._convolved(f, self.safe(x), type(f).forward)
        if self.open and (kind is NORM or getattr(f, "inplace", False) or _watched(f)
                          or not self._apart(x) or (type(f) in DROPOUTS and any(p.dropout for p in self.open))):
            self.settle()
        return self._noted(f, f(x)) if self.compiling else f(x)

    def _noted(self, f: Any, value: Any) -> Any:
        """Gives what f gave back, while compiling; notes it where f is an activation."""
        if (type(f) in _activations.MODULES or type(f) in CALLABLES and f in ACTIVATIONS) and (
                type(value) in _TENSORS and value.device.type in LEFT_DEVICES):
            self.activated = value
        return value

    def _moves(self, f: nn.Module, x: Tensor) -> bool:
        """Is the bias of a convolution of x left to what reads its output?"""
        return MOVES in f.__dict__ and not self.compiling and x.device.type in _calls.BIAS_DEVICES

    def _convolved(self, *given: Any) -> Any:
        """A convolution's output, of _calls.convolve, pending while its bias is apart."""
        biased = _calls.convolve(*given)
        return biased.value if biased.bias is None else Pending(self, _CONVOLVED, biased)

    def go(self, f: Any, *given: Any, **named: Any) -> Any:
        """f(...), of an activation, of what may be a module, or of a function or method that could share the frame when
        the text was rewritten. The first argument may be pending."""
        if given and type(f) in CALLABLES and f in ACTIVATIONS:
            value = self._activated(f, *given, **named) if _is_open(given[0]) else _NOT_PENDING
            if value is not _NOT_PENDING:
                return value
            if len(given) == 1 and not named and f not in _IN_PLACE:
                value = f(self.safe(given[0]))
                return self._noted(f, value) if self.compiling else value
        inner = self._inner_of(f)
        if inner is not None:
            return self._share(inner, f, *given, **named)
        value = self._alone(f, *given, **named)
        return self._noted(f, value) if self.compiling else value

    def above(self, f: Any, *given: Any, **named: Any) -> Any:
        """f(...), of a method of super(): Dynamo knows neither its type nor its hash."""
        if self.compiling:
            return self._alone(f, *given, **named)
        if len(given) == 1 and not named and type(f) is types.MethodType and f.__func__ in _calls.FORWARDS:
            x = self.safe(given[0])
            if type(x) in _TENSORS and self._moves(f.__self__, x):
                return self._convolved(f.__self__, x, f.__func__)
        return self.go(f, *given, **named)

    def _alone(self, f: Any, *given: Any, **named: Any) -> Any:
        given = tuple(map(force, given))
        self.settle()
        return f(*given, **named)

    def run(self, fs: Any, x: Any) -> Any:
        """x through what fs gives, one after the other. x may be pending, and so may what this gives."""
        given = self.iter(fs, False)
        layer = None  # a norm of x, which is called with what follows it
        for f in given:
            if layer is not None:
                y = self._at_once(f, layer, x)
                x = self.call(f, Pending(self, layer, x)) if y is _NOT_PENDING else y
                layer = None
            elif given is fs and KINDS.get(type(f)) is NORM and not self.open and type(x) in _TENSORS \
                    and x is not self.activated and _may_wait(f):
                layer = f
            else:
                x = self.call(f, x)
        return x if layer is None else Pending(self, layer, x)

    def _at_once(self, f: Any, layer: nn.Module, x: Tensor) -> Any:
        """f(layer(x)) in one call, where the layer may wait; _NOT_PENDING where that cannot be."""
        chosen = _activations.SIMPLE.get(type(f)) or _activations.of_module(f)
        if chosen is None or "slope" in chosen or _watched(f):
            return _NOT_PENDING
        if self.fused is not None:
            self.fused.append((layer, chosen["activation"]))
        return (layer if self.scoped else layer.forward)(x, **chosen)

    def _inner_of(self, f: Any) -> Any:
        """The form of a block, method or function that shares its caller's frame; None: it has none."""
        if KINDS.get(type(f)) is BLOCK:
            return None if _watched(f) else type(f)._normfuse_inner.get(type(f)._normfuse_original.forward)
        if type(f) is types.MethodType:
            return getattr(type(f.__self__), "_normfuse_inner", _NO_FUNCTIONS).get(f.__func__)
        return INNER_FUNCTIONS.get(f) if type(f) is types.FunctionType else None

    def _share(self, inner: Any, f: Any, *given: Any, **named: Any) -> Any:
        """f(...) of a block, method or function. Of what it leaves pending only what it gives stays so."""
        before = len(self.open)
        if len(given) > 0 and type(given[0]) is Pending:  # bool() of a tuple would break graphs before PyTorch 2.13
            before -= _is_open(given[0])
            if not inner._normfuse_takes:
                given = given[0].compute(), *given[1:]
        if type(f) is types.MethodType:
            value = inner(f.__self__, self, *given, **named)
        elif type(f) is types.FunctionType:
            value = inner(self, *given, **named)
        elif not self.scoped:
            value = inner(f, self, *given, **named)
        elif len(inner._normfuse_tree.args.args) > 2:
            value = f(Shared(self, given[0]), *given[1:], **named)
        else:  # of *arguments alone
            value = self._alone(f, *given, **named)
        if len(self.open) > before + _is_open(value) and any(p is not value for p in self.open[before:]):
            self.settle()
        return value

    def _wait(self, layer: nn.Module, x: Any) -> Pending:
        if self.open:
            self.safe(x.value if type(x) is Biased else x)
            mean = layer._buffers.get("running_mean")
            for p in self.open:
                if p.layer is layer or (mean is not None and type(p.layer) is not str
                                        and mean is p.layer._buffers.get("running_mean")):
                    self.settle()
                    break
        return Pending(self, layer, x)

    def _take(self, f: Any, what: Any, x: Pending) -> Any:
        """f(x) of what is pending, in one call or pending as well; _NOT_PENDING where it cannot be. what: of KINDS."""
        kind = type(f)
        if kind in CALLABLES or kind is types.MethodType or what is BLOCK:
            if kind in CALLABLES and f in ACTIVATIONS:
                return self._activated(f, x)
            inner = self._inner_of(f)
            return _NOT_PENDING if inner is None else self._share(inner, f, x)
        if what is None or _watched(f):
            return _NOT_PENDING
        if kind is nn.Identity:
            return x
        layer = x.layer
        if type(layer) is str:
            if layer is _CONVOLVED and (kind in OURS or what is NORM and is_channel_norm(kind)
                                        and channel_axis(f, x.input.value) == 1):
                if not has_own_activation(f):
                    return self._wait(f, x.close())
                return fused_call(f, x.close(), _NO_ACTIVATION)
            if layer is _COPIED and what is _CONVOLUTION and MOVES in f.__dict__:
                return self._convolved(f, x.close(), kind.forward, True)
            return _NOT_PENDING
        if kind in DROPOUTS:
            if x.dropout is None and (x.scale is None or x.shift is not None) and not any(
                    p.dropout is not None for p in self.open):
                x.dropout = f if f.training and f.p > 0 else None
                return x
            return _NOT_PENDING
        chosen = _activations.SIMPLE.get(kind) or _activations.of_module(f)
        return _NOT_PENDING if chosen is None else x.activated(chosen)

    def _activated(self, f: Any, x: Pending, *rest: Any, **named: Any) -> Any:
        chosen = _activations.of_call(f, rest, named)
        return _NOT_PENDING if chosen is None else x.activated(chosen)

    def in_place(self, x: Any, method: str, f: Any, *rest: Any, **named: Any) -> Any:
        """x after the statement f(x, ...); after x.method(...), where there is one."""
        given: Any = _NOT_PENDING
        if type(x) is Pending and x.waits:
            if method == "add_":
                given = self._sum(x, *rest, True)
            elif method or type(f) in CALLABLES and f in ACTIVATIONS and (
                    f in _IN_PLACE or named.get("inplace") is True or rest[-1:] == (True,)):
                given = self._activated(F.relu if method else f, x, *rest, **named)
            elif type(f) in _activations.MODULES and getattr(f, "inplace", None) is True:
                given = self._take(f, _LEAF, x)
        if given is not None and given is not _NOT_PENDING:
            return given
        x, rest = self.settled(x), tuple(map(self.settled, rest))
        getattr(x, method)(*rest) if method else f(x, *rest, **named)
        return x

    # Arithmetic.

    add, multiply, divide = operator.add, operator.mul, operator.truediv

    def arithmetic(self, reader: str, f: Any, a: Any, b: Any) -> Any:
        """f(a, b), of a function that was one of ARITHMETIC when the text was rewritten. reader: of a sum that may be a
        "factor" or a "dividend" next."""
        what = ARITHMETIC.get(f) if type(f) in CALLABLES else None
        value = self._combined(what, a, b) if type(a) is Pending or type(b) is Pending else None
        if value is None and reader == "factor" and what == "add":
            a, b = force(a), force(b)
            value = self._one_plus(a, b)
        if value is None:
            checked = self.settled if what is None else self.safe
            value = f(checked(a), checked(b))
        if reader == "dividend" and type(value) in _TENSORS:
            pending = Pending(self, _TOTAL, None)
            pending.close()
            pending.value = value
            return pending
        return value

    def _combined(self, what: Optional[str], a: Any, b: Any, in_place: bool = False) -> Any:
        """a and b added, multiplied or divided, where one of them is pending; None where that is no one call."""
        return (self._sum(a, b, in_place) if what == "add" else self._product(a, b) if what == "multiply" else
                self._quotient(a, b) if what == "divide" else None)

    def method(self, x: Any, name: str, *rest: Any) -> Any:
        """x.name(...)."""
        given: Any = None
        if name in ("relu", "relu_", "prelu"):
            given = self._activated(F.prelu if name == "prelu" else F.relu, x, *rest) if _is_open(x) and len(
                rest) == (name == "prelu") else None
            given = None if given is _NOT_PENDING else given
        elif name in VIEWS:
            given = x.permuted(name, rest) if type(x) is Pending and x.waits else None
        elif name == "contiguous":
            if type(x) in _TENSORS and not rest and not self.compiling and x.device.type in _calls.BIAS_DEVICES:
                return Pending(self, _COPIED, self.safe(x))
        elif len(rest) == 1:
            given = self._combined(ARITHMETIC_METHODS[name], x, *rest, name == "add_")
        if given is not None:
            return given
        x, rest = force(x), [force(other) for other in rest]
        if self.open and (name.endswith("_") or type(x) not in _TENSORS):
            self.settle()
        for other in rest:
            self.safe(other)
        return getattr(self.safe(x), name)(*rest)

    def _sum(self, a: Any, b: Any, in_place: bool) -> Any:
        if type(a) is Pending and a.waits:
            return a.plus(b.compute() if type(b) is Pending else b, in_place)
        if type(b) is Pending and b.waits:
            return None if in_place else b.plus(a.compute() if type(a) is Pending else a, False)
        if any(_is_open(v) and v.layer is _CONVOLVED for v in (a, b)):
            a, b = (v.close() if _is_open(v) and v.layer is _CONVOLVED else force(v) for v in (a, b))
            if self.open and (in_place or any(type(v) not in _TENSORS and type(v) is not Biased for v in (a, b))):
                self.settle()
            total = _calls.add_with_biases(a, b, in_place)
            return total.value if total.bias is None else Pending(self, _CONVOLVED, total)
        return None

    def _one_plus(self, a: Any, b: Any) -> Any:
        for one, other in ((a, b), (b, a)):
            if type(one) in (int, float) and one == 1 and type(other) in _TENSORS and other.is_floating_point():
                return Pending(self, _ONE_PLUS, self.safe(other))
        return None

    def iadd(self, a: Any, b: Any) -> Any:
        given = self._sum(a, b, True) if type(a) is Pending or type(b) is Pending else None
        if given is None:
            given, b = force(a), force(b)
            if self.open and type(given) not in (int, float):
                self.settle()
            given += b
        return given

    def _product(self, a: Any, b: Any) -> Any:
        for x, factor in ((a, b), (b, a)):
            if type(x) is Pending and x.waits and _is_open(factor) and factor.layer is _ONE_PLUS and takes_modulation(
                    type(x.layer)) and x.added is x.scale is x.dropout is None:
                scale = factor.input
                if x.is_modulation(scale):
                    factor.close()
                    x.factor, x.scale = scale, scale.reshape(scale.shape[0], -1)
                    return x
        return None

    def _quotient(self, a: Any, b: Any) -> Any:
        if type(a) is Pending and a.layer is _TOTAL and type(b) in (int, float) and b == 1 \
                and a.value.is_floating_point():
            return a.value
        return None


_ITEMS = frozenset({type({}.items()), type(collections.OrderedDict().items())})

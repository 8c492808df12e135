# SPDX-License-Identifier: MIT
"""Which layers convert knows, and what becomes of each.

A layer of a stock class gets the class of ours of that name. A layer of another package, known here by module and name
so that nothing is imported for it, or by a rule that the caller of convert gives, gets a subclass of its own class with
the same name: `isinstance`, children, buffers and hooks stay, and so do deepcopy and pickle.
"""
from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any, Callable, Mapping, Optional, Union

import torch
from torch import Tensor, nn

from . import functional, modules
from ._activations import Choice, apply, choice, of_module
from .modules import _Activated, is_traced, leaf

# A stock class that a subclass of it computes the same as, or a function in the place of a class's forward.
Rule = Union[type, Callable[..., Tensor]]

_REPLACEMENTS: dict[type, type] = {getattr(nn, name): getattr(modules, name) for name in (
    "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "SyncBatchNorm")}
OURS = frozenset(_REPLACEMENTS.values())

# What a rewritten forward does with a call of a module of exactly this class: see _pending.py.
NORM, BLOCK = "norm", "block"
KINDS: dict[type, str] = dict.fromkeys(OURS, NORM)


def plain_class(kind: type) -> type:
    """The class that a module was made of, where its class is one of ours that has no name to be imported by."""
    return getattr(kind, "_normfuse_original", getattr(kind, "_normfuse_stock", kind))


def hooked(module: nn.Module) -> bool:
    """Does anyone watch or replace the calls of this module?"""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks or "forward" in module.__dict__)


# ---- what layers of other packages become ---------------------------------------------------------------------------


class _Foreign:
    """Mixin of what such layers become."""

    _normfuse_stock: type
    _normfuse_rule: Optional[Rule] = None  # the caller's

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        return (_new_foreign, (self._normfuse_stock, self._normfuse_rule), *reduced[2:])


class _WithOwnActivation(_Foreign):
    """A norm, then what the class calls of its own, in one call where that is the same. Of a class of ours, whose
    forward is called, or as `_normalized` says."""

    _normfuse_base: type
    _normfuse_then: tuple[str, ...] = ("drop", "act")  # children

    def _normalized(self, x: Tensor, **fused: Any) -> Tensor:
        return self._normfuse_base.forward(self, x, **fused)

    def _following(self) -> list[nn.Module]:
        children = (self._modules.get(name) for name in self._normfuse_then)
        return [child for child in children if child is not None and (type(child) is not nn.Identity or hooked(child))]

    def _own_activation(self) -> Optional[Choice]:
        following = self._following()
        return of_module(following[0]) if len(following) == 1 and not hooked(following[0]) else None

    def forward(self, x: Tensor) -> Tensor:
        if is_traced(self, x):
            return leaf(self, x)
        chosen = self._own_activation()
        if chosen is not None:
            return self._normalized(x, **chosen)
        x = self._normalized(x)
        for child in self._following():
            x = child(x)
        return x


class _BitGroupNorm(_WithOwnActivation):
    """`activation` is a child here: what our group norm calls so must not stand in its place."""

    _normfuse_then = ("activation",)

    def _normalized(self, x: Tensor, **fused: Any) -> Tensor:
        return functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, **fused)


class _Frozen(_Foreign, _Activated):
    """A batch norm that always evaluates, with all four of its tensors in buffers. Its result has the wider of the
    types of input and buffers, but under autocast."""

    eps = 1e-5  # where the class has none of its own

    def forward(self, x: Tensor, *, post_add: Optional[Tensor] = None, activation: Optional[str] = None,
                act_param: Optional[float] = None, slope: Optional[Tensor] = None) -> Tensor:
        if is_traced(self, x):
            return leaf(self, x, post_add=post_add, activation=activation, act_param=act_param, slope=slope)
        activation, act_param, slope = self._of_this_call(activation, act_param, slope)
        if self._keeps_type(x):
            return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0,
                                         self.eps, activation=activation, act_param=act_param, slope=slope,
                                         post_add=post_add)
        output = self._normfuse_stock.forward(self, x)
        if post_add is not None:
            output = output + post_add
        return apply(output, choice(activation, act_param, slope=slope))

    def _keeps_type(self, x: Tensor) -> bool:
        return x.dtype == self.weight.dtype or torch.is_autocast_enabled(x.device.type)


class _FrozenOfInputType(_Frozen):
    """Its result always has the type of its input."""

    def _keeps_type(self, x: Tensor) -> bool:
        return True


class _FrozenWithOwnActivation(_WithOwnActivation, _Frozen):
    _normfuse_base = _Frozen


class _ComfyGroupNorm(_Foreign, modules.GroupNorm):
    """Casts its parameters to the input's type and device, and patches them, in each call."""

    def forward(self, x: Tensor, *, post_add: Optional[Tensor] = None, scale: Optional[Tensor] = None,
                shift: Optional[Tensor] = None, activation: Optional[str] = None,
                act_param: Optional[float] = None, slope: Optional[Tensor] = None) -> Tensor:
        fused = {"post_add": post_add, "scale": scale, "shift": shift, "activation": activation,
                 "act_param": act_param, "slope": slope}
        if is_traced(self, x):
            return leaf(self, x, **fused)
        ops = sys.modules["comfy.ops"]
        if hasattr(ops, "run_every_op"):
            ops.run_every_op()
        if not (self.comfy_cast_weights or self.weight_function or self.bias_function):
            return super().forward(x, **fused)
        if not hasattr(ops, "uncast_bias_weight"):
            return functional.group_norm(x, self.num_groups, *ops.cast_bias_weight(self, x), self.eps, **fused)
        weight, bias, offloaded = ops.cast_bias_weight(self, x, offloadable=True)
        output = functional.group_norm(x, self.num_groups, weight, bias, self.eps, **fused)
        ops.uncast_bias_weight(self, weight, bias, offloaded)
        return output


class _ComfyGroupNormSpatial(_ComfyGroupNorm):
    """Of each frame of [B, C, T, H, W]. All frames are one call: chunk_size bounds the memory of the class's own."""

    def forward(self, x: Tensor, *, chunk_size: int = 8, post_add: Optional[Tensor] = None,
                scale: Optional[Tensor] = None, shift: Optional[Tensor] = None, **fused: Any) -> Tensor:
        if is_traced(self, x):
            return leaf(self, x, chunk_size=chunk_size, post_add=post_add, scale=scale, shift=shift, **fused)
        samples, frames = x.shape[0], x.shape[2]
        of_frames = [None if t is None else t.transpose(1, 2).flatten(0, 1) for t in (x, post_add)]
        of_samples = [None if t is None else t.repeat_interleave(frames, 0) for t in (scale, shift)]
        y = super().forward(of_frames[0], post_add=of_frames[1], scale=of_samples[0], shift=of_samples[1], **fused)
        return y.unflatten(0, (samples, frames)).transpose(1, 2)


class _ByRule(_Foreign):
    """The caller's function in the place of forward."""

    def forward(self, x: Tensor, **fused: Any) -> Any:
        if is_traced(self, x):
            return leaf(self, x, **fused)
        return type(self)._normfuse_rule(self, x, **fused)


# Attributes that must be false for the class to be what is said here.
_SWITCHES = {("timm.layers.norm", "GroupNorm"): ("fast_norm", "_fast_norm"),
             ("timm.layers.norm_act", "GroupNormAct"): ("_fast_norm",)}
# Their forward is the stock class's. They become layers of the stock class's replacement itself.
_SAME_AS_STOCK: dict[tuple[str, str], type] = {("timm.layers.norm", "GroupNorm"): nn.GroupNorm}
# Their forward is the stock class's, then their children drop and act.
_WITH_OWN_ACTIVATION: dict[tuple[str, str], type] = {("timm.layers.norm_act", "BatchNormAct2d"): nn.BatchNorm2d,
                                                     ("timm.layers.norm_act", "SyncBatchNormAct"): nn.SyncBatchNorm,
                                                     ("timm.layers.norm_act", "GroupNormAct"): nn.GroupNorm}
_BY_MIXIN: dict[tuple[str, str], type] = {
    ("comfy.ldm.genmo.vae.model", "GroupNormSpatial"): _ComfyGroupNormSpatial,
    ("comfy.ops", "disable_weight_init.GroupNorm"): _ComfyGroupNorm,
    ("comfy.ops", "manual_cast.GroupNorm"): _ComfyGroupNorm,
    ("detectron2.layers.batch_norm", "FrozenBatchNorm2d"): _FrozenOfInputType,
    ("timm.layers.norm_act", "FrozenBatchNormAct2d"): _FrozenWithOwnActivation,
    ("torchvision.ops.misc", "FrozenBatchNorm2d"): _Frozen,
    ("transformers.models.bit.modeling_bit", "BitGroupNormActivation"): _BitGroupNorm,
}
_LAYER_NORMS = {("timm.layers.norm", "LayerNorm2d"), ("torchvision.models.convnext", "LayerNorm2d")}


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _mixin(kind: type) -> Optional[type]:
    # DetrFrozenBatchNorm2d and its copies in a dozen models, all with the same code and a constant for eps.
    if kind.__module__.startswith("transformers.models.") and kind.__qualname__.endswith("FrozenBatchNorm2d"):
        return _Frozen
    return _BY_MIXIN.get(_name(kind))


@functools.cache
def _foreign_class(stock: type, rule: Optional[Rule] = None) -> type:
    """Our subclass of another package's class, or of one that the caller has a rule for."""
    members: dict[str, Any] = {"__module__": stock.__module__, "__qualname__": stock.__qualname__,
                               "__doc__": stock.__doc__, "_normfuse_stock": stock}
    if isinstance(rule, type):
        members["_normfuse_rule"] = rule
        bases: tuple[type, ...] = (_Foreign, _REPLACEMENTS[rule])
    elif rule is not None:
        members["_normfuse_rule"] = staticmethod(rule)
        bases = (_ByRule,)
    elif _name(stock) in _WITH_OWN_ACTIVATION:
        bases = (_WithOwnActivation, _REPLACEMENTS[_WITH_OWN_ACTIVATION[_name(stock)]])
        members["_normfuse_base"] = bases[1]
    else:
        bases = (_mixin(stock),)
    made = type(stock.__name__, (*bases, stock), members)
    if takes_activation(made):
        KINDS[made] = NORM
    return made


def _new_foreign(stock: type, rule: Optional[Rule]) -> nn.Module:
    ours = _foreign_class(stock, rule)
    return ours.__new__(ours)


def synchronized_class(kind: type, plain: type) -> Optional[type]:
    """What SyncBatchNorm.convert_sync_batchnorm makes of a batch norm of this class: `plain`, or a subclass of ours
    that keeps what the class does after the norm. None where the class has code that no other has."""
    stock = plain_class(kind)
    if _WITH_OWN_ACTIVATION.get(_name(stock)) in (nn.BatchNorm2d, nn.SyncBatchNorm):
        return _foreign_class(getattr(importlib.import_module(stock.__module__), "SyncBatchNormAct"))
    known = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm, *OURS)
    return plain if kind.forward in [base.forward for base in known] else None


# ---- for convert ----------------------------------------------------------------------------------------------------


def check(rules: Mapping[type, Rule]) -> None:
    for kind, rule in rules.items():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"rules: {kind!r} is not a class of modules")
        if isinstance(rule, type) and not (rule in _REPLACEMENTS and issubclass(kind, rule)):
            raise TypeError(f"rules: {kind.__qualname__} must be a subclass of what it is said to compute the same as, "
                            f"and that one of {', '.join(stock.__name__ for stock in _REPLACEMENTS)}, but that is "
                            f"{rule.__qualname__}")
        if not callable(rule):
            raise TypeError(f"rules: what {kind.__qualname__} becomes is neither a stock class nor a function")


def is_ours(kind: type) -> bool:
    """Is it a class that convert gives layers, and not one that someone derived from it?"""
    return kind in OURS or "_normfuse_stock" in vars(kind)


def is_normalization(module: nn.Module, rules: Mapping[type, Rule]) -> bool:
    kind = type(module)
    return (isinstance(module, (nn.GroupNorm, nn.modules.batchnorm._NormBase, _Foreign)) or kind in rules
            or _mixin(kind) is not None or _name(kind) in _LAYER_NORMS)


def convert_layer(module: nn.Module, rules: Mapping[type, Rule]) -> tuple[bool, tuple[str, ...], Optional[str]]:
    """Changes the layer's class, if it is known. For its report: whether that was done, what it does itself after the
    norm, and why it was left or has nothing else folded into it."""
    kind = type(module)
    if is_ours(kind):
        return True, *_own(module)
    if "_normfuse_converted_from" in module.__dict__:
        return True, (), "its class was replaced after it was converted"
    name, rule = _name(kind), rules.get(kind)
    on = [switch for switch in _SWITCHES.get(name, ()) if rule is None and getattr(module, switch, False)]
    if on:
        return False, (), f"its {on[0]} is on"
    if rule is not None or name in _WITH_OWN_ACTIVATION or _mixin(kind) is not None:
        ours = functools.partial(_foreign_class, kind, rule)
    elif kind in _REPLACEMENTS or name in _SAME_AS_STOCK:
        ours = functools.partial(_REPLACEMENTS.get, _SAME_AS_STOCK.get(name, kind))
    elif name in _LAYER_NORMS:
        return False, (), "it is a layer norm over channels, with statistics of each position, which normfuse has not"
    elif isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return False, (), "it is lazy: convert after the first forward"
    else:
        return False, (), (f"{kind.__module__}.{kind.__qualname__} is a subclass, whose code may differ: convert takes "
                           "rules for such")
    if "forward" in module.__dict__:
        return False, (), "its forward was replaced on the object"
    module.__class__ = ours()
    module.__dict__["_normfuse_converted_from"] = kind
    return True, *_own(module)


def _own(module: nn.Module) -> tuple[tuple[str, ...], Optional[str]]:
    """What a layer does with an activation of its own, for its report."""
    if isinstance(module, _ByRule) and not takes_activation(type(module)):
        return (), "its rule takes neither post_add nor activation"
    if not isinstance(module, _WithOwnActivation):
        return (), None
    chosen = module._own_activation()
    if chosen is not None:
        return (chosen["activation"],), None
    after = module._following()
    return (), f"its own {type(after[0]).__name__} runs after it" if after else "it has no activation of its own"


@functools.cache
def _rule_takes(rule: Rule, *keywords: str) -> bool:
    parameters = inspect.signature(rule).parameters
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or set(keywords) <= set(parameters)


def takes_activation(kind: type, chosen: Choice = choice(None)) -> bool:
    """Whether calls of layers of this class take post_add and the keywords of this activation."""
    if issubclass(kind, _ByRule):
        return _rule_takes(kind._normfuse_rule, "post_add", *chosen)
    return issubclass(kind, _Activated) and not issubclass(kind, _WithOwnActivation)


def has_own_activation(layer: nn.Module) -> bool:
    """Does a layer that takes an activation apply one already?"""
    return layer.__dict__.get("activation") is not None and not isinstance(layer, _ByRule)


def takes_bias(module: Optional[nn.Module]) -> bool:
    """Whether its call takes pre_bias, with no one who watches what it gets."""
    return type(module) in OURS and not hooked(module)

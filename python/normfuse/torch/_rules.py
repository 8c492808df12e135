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
import re
import sys
from typing import Any, Callable, Mapping, Optional, Union

import torch
from torch import Tensor, nn

from . import functional, modules
from ._activations import Choice, apply, choice, of_module
from .modules import _Activated, is_traced, leaf

# A stock class that a subclass of it computes the same as, or a function in the place of a class's forward.
Rule = Union[type, Callable[..., Tensor]]
_Keywords = dict[str, Any]

REPLACEMENTS: dict[type, type] = {getattr(nn, name): getattr(modules, name) for name in (
    "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "SyncBatchNorm")}
OURS = frozenset(REPLACEMENTS.values())
_CHANNEL_NORMS = (modules.ChannelNorm, modules.LayerNorm2d, modules.RMSNorm2d)  # which have no stock class of torch's

# A rewritten forward's treatment of a call of a module of exactly this class: see _pending.py.
NORM, BLOCK = "norm", "block"
KINDS: dict[type, str] = dict.fromkeys((*OURS, *_CHANNEL_NORMS), NORM)


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
    """A norm, as the next base computes it, then what the class calls of its own, in one call where that is the
    same."""

    _normfuse_then: tuple[str, ...] = ("drop", "act")  # children

    def _normalized(self, x: Tensor, **fused: Any) -> Tensor:
        return super().forward(x, **fused)  # type: ignore[misc]

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
    _normfuse_of_input_type = False  # does its result always have the type of its input?

    def forward(self, x: Tensor, **fused: Any) -> Tensor:
        if is_traced(self, x):
            return leaf(self, x, **fused)
        if self._normfuse_of_input_type or x.dtype == self.weight.dtype or torch.is_autocast_enabled(x.device.type):
            return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0,
                                         self.eps, **fused)
        return _followed(self, self._normfuse_stock.forward(self, x), **fused)


class _FrozenOfInputType(_Frozen):
    _normfuse_of_input_type = True


class _ComfyGroupNorm(_Foreign, modules.GroupNorm):
    """Casts its parameters to the input's type and device, and patches them, in each call."""

    def forward(self, x: Tensor, **fused: Any) -> Tensor:
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


class _OfChannels(_Foreign, _Activated):
    """A norm over the channels of each position. Where channel norm does not compute what the class does, such as for
    other types, the class's own forward runs, and what follows it after that."""

    _normfuse_how: Callable[[nn.Module, Tensor], Optional[_Keywords]]

    def _normfuse_words(self, x: Tensor) -> Optional[_Keywords]:
        if not isinstance(x, Tensor) or x.dtype not in _TYPES or x.device.type not in _DEVICES:
            return None
        how = self._normfuse_how(x)
        if how is None or how.get("dim", 1) == 1 and x.dim() < 2:
            return None
        if x.device.type == "cuda" and not _is_held(x, how.get("dim", 1)):
            return None
        dtype = how.get("dtype")
        return None if dtype is not None and dtype != x.dtype and (x.dtype, dtype) not in _OTHER_RESULTS else how

    def forward(self, x: Tensor, *others: Any, pre_bias: Optional[Tensor] = None, post_add: Optional[Tensor] = None,
                scale: Optional[Tensor] = None, shift: Optional[Tensor] = None, activation: Optional[str] = None,
                act_param: Optional[float] = None, slope: Optional[Tensor] = None, **named: Any) -> Tensor:
        if is_traced(self, x):
            return leaf(self, x, pre_bias=pre_bias, post_add=post_add, scale=scale, shift=shift, activation=activation,
                        act_param=act_param, slope=slope)
        how = None if others or named else self._normfuse_words(x)
        if how is not None:
            return functional.channel_norm(x, **how, pre_bias=pre_bias, post_add=post_add, scale=scale, shift=shift,
                                           activation=activation, act_param=act_param, slope=slope)
        if pre_bias is not None:
            x = functional.channel_affine(x, None, pre_bias).to(x.dtype)
        return _followed(self, self._normfuse_stock.forward(self, x, *others, **named), post_add, scale, shift,
                         **choice(activation, act_param, slope=slope))


def _followed(layer: nn.Module, output: Tensor, post_add: Optional[Tensor] = None, scale: Optional[Tensor] = None,
              shift: Optional[Tensor] = None, activation: Optional[str] = None, act_param: Optional[float] = None,
              slope: Optional[Tensor] = None) -> Tensor:
    """The output of a class's own forward, and after it what is folded into the layer's call."""
    if scale is not None:
        output = output * (1 + _spread(scale, output, layer)) + _spread(shift, output, layer)
    if post_add is not None:
        output = output + post_add
    return apply(output, choice(activation, act_param, slope=slope))


def _is_held(x: Tensor, axis: int) -> bool:
    """True if any GPU's registers hold the channels of a position: docs/operators/channel-norm.md."""
    return x.shape[axis] <= (4096 if x.stride(axis) == 1 else 1024)


_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DEVICES = ("cpu", "cuda", "meta")
_OTHER_RESULTS = {(x, y) for sixteen in (torch.float16, torch.bfloat16) for x, y in (
    (sixteen, torch.float32), (torch.float32, sixteen))}


def _spread(parameter: Tensor, output: Tensor, layer: nn.Module) -> Tensor:
    """[N, C] to be broadcast to a layer's output."""
    ones = (1,) * (output.dim() - 2)
    n, c = parameter.shape
    return parameter.reshape((n, c, *ones) if channel_axis(layer, output) == 1 else (n, *ones, c))


def channel_axis(layer: nn.Module, x: Tensor) -> int:
    """The axis of x that a layer takes for the channels."""
    if isinstance(layer, _OfChannels):
        how = layer._normfuse_how(x)
        return 1 if how is None or how.get("dim", 1) == 1 else x.dim() - 1
    return 1 if not isinstance(layer, modules._ChannelNorm) or layer.dim == 1 else x.dim() - 1


def result_type(layer: nn.Module, x: Tensor) -> Optional[torch.dtype]:
    """The type of a norm's output; None where that is not known before it is called."""
    if type(layer) in OURS or not is_channel_norm(type(layer)):
        return x.dtype
    if isinstance(layer, modules._ChannelNorm):
        return functional._result_type(x, None) or x.dtype
    how = layer._normfuse_words(x)
    return None if how is None else how.get("dtype") or functional._result_type(x, None) or x.dtype


def is_channel_norm(kind: type) -> bool:
    return issubclass(kind, (_OfChannels, modules._ChannelNorm))


def takes_modulation(kind: type) -> bool:
    """True if calls of layers of this class take scale and shift."""
    return issubclass(kind, (modules.GroupNorm, _OfChannels, modules._ChannelNorm))


def _wider(dtype: torch.dtype, *parameters: Any) -> torch.dtype:
    """The type of arithmetic with a tensor of this type and what is given."""
    return functools.reduce(torch.promote_types, [p.dtype for p in parameters if isinstance(p, Tensor)], dtype)


def _promoted(x: Tensor, *parameters: Any) -> torch.dtype:
    """The same with x. Under autocast such classes compute some steps in f32."""
    return _wider(functional._result_type(x, None) or x.dtype, *parameters)


def _wan_rms_norm(self: nn.Module, x: Tensor) -> Optional[_Keywords]:
    """normalize(x).to(x.dtype) * sqrt(C) * gamma + bias."""
    gamma, bias = self.gamma, self.bias
    if self.scale != gamma.numel() ** 0.5 or not isinstance(bias, Tensor) and bias not in (0, None):
        return None
    return {"weight": gamma.reshape(-1), "bias": bias.reshape(-1) if isinstance(bias, Tensor) else None,
            "statistics": "mean_square", "eps": 1e-12, "eps_kind": "of_norm", "dim": 1 if self.channel_first else -1,
            "dtype": _wider(x.dtype, gamma, bias)}


def _comfy_rms_norm(self: nn.Module, x: Tensor) -> Optional[_Keywords]:
    """The same with parameters that are cast to the input's type and device in each call."""
    how = _wan_rms_norm(self, x)
    if how is not None:
        how |= {name: how[name].to(x) for name in ("weight", "bias") if how[name] is not None}
        how["dtype"] = _promoted(x)
    return how


def _diffusers_rms_norm(self: nn.Module, x: Tensor) -> Optional[_Keywords]:
    """RMS norm over the last axis. Without a weight the result has the input's type, with one of 16 bits the weight's,
    and else the wider one, f32 at least."""
    weight, bias = self.weight, self.bias
    if len(self.dim) != 1 or "torch_npu" in sys.modules:
        return None
    how = {"statistics": "mean_square", "eps": self.eps, "dim": -1, "dtype": x.dtype}
    if weight is not None:
        narrow = weight.dtype in (torch.float16, torch.bfloat16)
        dtype = weight.dtype if narrow else torch.promote_types(x.dtype, torch.float32)
        how |= {"weight": weight, "bias": bias, "dtype": _wider(dtype, weight, bias)}
    return how


def _per_channel_rms_norm(self: nn.Module, x: Tensor) -> Optional[_Keywords]:
    """LTX-2's: x / sqrt(mean(x^2) + eps)."""
    if self.channel_dim not in (1, -1, x.dim() - 1):
        return None
    return {"statistics": "mean_square", "eps": self.eps, "dim": 1 if self.channel_dim == 1 else -1,
            "dtype": _promoted(x)}


def _rms_norm_2d(self: nn.Module, x: Tensor) -> Optional[_Keywords]:
    """timm's."""
    if x.dim() != 4:
        return None
    return {"weight": self.weight, "statistics": "mean_square", "eps": self.eps, "dtype": _promoted(x, self.weight)}


def _layer_norm(self: nn.Module, x: Tensor, **more: Any) -> _Keywords:
    return {"weight": self.weight, "bias": self.bias, "eps": self.eps, **more}


def _layer_norm_of_tokens(self: nn.Module, x: Tensor) -> Optional[_Keywords]:
    """torch.nn.LayerNorm over one axis, in blocks that permute their input before it. Its result is contiguous."""
    return _layer_norm(self, x, dim=-1, channels_last=True) if len(self.normalized_shape) == 1 else None


def _layer_norm_2d(self: nn.Module, x: Tensor) -> Optional[_Keywords]:
    """timm's and torchvision's: layer norm of a permuted input, which makes a channels-last result."""
    return _layer_norm(self, x, channels_last=True) if x.dim() == 4 and len(self.normalized_shape) == 1 else None


def _written_out(self: nn.Module, x: Tensor) -> Optional[_Keywords]:
    """Segment Anything's: in the wider of the types."""
    return _layer_norm(self, x, dtype=_promoted(x, self.weight, self.bias))


def _layer_norm_of_format(self: nn.Module, x: Tensor) -> Optional[_Keywords]:
    """transformers': `data_format` says where the channels are. A subclass of torch.nn.LayerNorm, and in older versions
    written out for channels_first, where the statistics are of f32 and the result is of the wider type."""
    if self.data_format != "channels_first":
        return _layer_norm(self, x, dim=-1, channels_last=True)
    if x.dim() != 4:
        return None
    return _layer_norm(self, x, channels_last=True) if isinstance(self, nn.LayerNorm) else _written_out(self, x)


class _ComfyGroupNormSpatial(_ComfyGroupNorm):
    """A group norm of each frame of [B, C, T, H, W]. All frames are one call: chunk_size bounds the memory of the
    class's own."""

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


# timm's attributes that must be false for a class to be what is said here.
_SWITCHES = ("fast_norm", "_fast_norm")
# Patterns of modules and names -> the class of ours that their layers become, bases of a class for them, or how
# functional.channel_norm computes the same: its keywords for a layer and an input; None where it does not.
_KNOWN: dict[str, Any] = {
    r"comfy.ldm.wan.vae.RMS_norm": _comfy_rms_norm,
    r"comfy.ldm.genmo.vae.model.GroupNormSpatial": (_ComfyGroupNormSpatial,),
    r"comfy.ops.(disable_weight_init|manual_cast).GroupNorm": (_ComfyGroupNorm,),
    r"detectron2.layers.batch_norm.FrozenBatchNorm2d": (_FrozenOfInputType,),
    r"diffusers.models.autoencoders.autoencoder_kl_ltx2.PerChannelRMSNorm": _per_channel_rms_norm,
    r"diffusers.models.autoencoders.autoencoder_kl_\w+."
    r"(HunyuanImageRefiner|HunyuanVideo15|QwenImage|QwenImage21|Wan)RMS_norm": _wan_rms_norm,
    r"diffusers.models.normalization.RMSNorm": _diffusers_rms_norm,
    r"(sam2.modeling.sam2_utils|segment_anything.modeling.common).LayerNorm2d": _written_out,
    r"timm.layers.norm.GroupNorm": modules.GroupNorm,
    r"timm.layers.norm.LayerNorm2d|torchvision.models.convnext.LayerNorm2d": _layer_norm_2d,
    r"timm.layers.norm.RmsNorm2d": _rms_norm_2d,
    r"timm.layers.norm_act.BatchNormAct2d": (_WithOwnActivation, modules.BatchNorm2d),
    r"timm.layers.norm_act.FrozenBatchNormAct2d": (_WithOwnActivation, _Frozen),
    r"timm.layers.norm_act.GroupNormAct": (_WithOwnActivation, modules.GroupNorm),
    r"timm.layers.norm_act.SyncBatchNormAct": (_WithOwnActivation, modules.SyncBatchNorm),
    r"torchvision.ops.misc.FrozenBatchNorm2d": (_Frozen,),
    r"transformers.models.bit.modeling_bit.BitGroupNormActivation": (_BitGroupNorm,),
    # DetrFrozenBatchNorm2d and its copies in a dozen models, all with the same code and a constant for eps.
    r"transformers.models.(\w+.)*\w*FrozenBatchNorm2d": (_Frozen,),
    r"transformers.models.(\w+.)*((Sam|Sam2|SamHQ|EdgeTam)LayerNorm|ConvNext(V2)?LayerNorm)": _layer_norm_of_format,
}
# Layer norms over the last axis, which are those of channels in the blocks below alone.
_OF_TOKENS = ("timm.layers.norm.LayerNorm", "torch.nn.modules.normalization.LayerNorm")

_LTX_BLOCK = r"diffusers.models.autoencoders.autoencoder_kl_(ltx.LTXVideo|ltx2.LTX2Video)ResnetBlock3d"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.lru_cache(maxsize=1024)
def _known(kind: type) -> Any:
    return next((what for pattern, what in _KNOWN.items() if re.fullmatch(pattern, _name(kind))), None)


def norms_of_tokens(model: nn.Module) -> set[nn.Module]:
    """The layer norms of ConvNeXt's and LTX's blocks, which permute their input to channels-last before."""
    found = set()
    for module in model.modules():
        name = _name(plain_class(type(module)))
        if name == "torchvision.models.convnext.CNBlock" and isinstance(module._modules.get("block"), nn.Sequential):
            found |= {child for before, child in zip(module.block, list(module.block)[1:])
                      if _name(type(before)) == "torchvision.ops.misc.Permute" and before.dims == [0, 2, 3, 1]}
        elif name == "timm.models.convnext.ConvNeXtBlock" and not module.use_conv_mlp:
            found.add(module.norm)
        elif re.fullmatch(_LTX_BLOCK, name) and module.norm3 is not None:
            found.add(module.norm3)
    return {layer for layer in found if _name(plain_class(type(layer))) in _OF_TOKENS}


@functools.cache
def _foreign_class(stock: type, rule: Optional[Rule] = None) -> type:
    """Our subclass of another package's class, or of one that the caller has a rule for."""
    members: dict[str, Any] = {"__module__": stock.__module__, "__qualname__": stock.__qualname__,
                               "__doc__": stock.__doc__, "_normfuse_stock": stock}
    if isinstance(rule, type):
        members["_normfuse_rule"] = rule
        bases: tuple[type, ...] = (_Foreign, REPLACEMENTS[rule])
    elif rule is not None:
        members["_normfuse_rule"] = staticmethod(rule)
        bases = (_ByRule,)
    else:
        known = _layer_norm_of_tokens if _name(stock) in _OF_TOKENS else _known(stock)
        bases = known if isinstance(known, tuple) else (_OfChannels,)
        members |= {} if isinstance(known, tuple) else {"_normfuse_how": known}
    made = type(stock.__name__, (*bases, stock), members)
    if takes_activation(made):
        KINDS[made] = NORM
    return made


def _new_foreign(stock: type, rule: Optional[Rule]) -> nn.Module:
    ours = _foreign_class(stock, rule)
    return ours.__new__(ours)


def synchronized_class(kind: type, plain: type) -> Optional[type]:
    """The class that SyncBatchNorm.convert_sync_batchnorm makes of a batch norm of this class: `plain`, or a subclass
    of ours that keeps what the class does after the norm. None where the class has code that no other has."""
    stock = plain_class(kind)
    if _known(stock) in ((_WithOwnActivation, base) for base in (modules.BatchNorm2d, modules.SyncBatchNorm)):
        return _foreign_class(getattr(importlib.import_module(stock.__module__), "SyncBatchNormAct"))
    known = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm, *OURS)
    return plain if kind.forward in [base.forward for base in known] else None


# ---- for convert ----------------------------------------------------------------------------------------------------


def check(rules: Mapping[type, Rule]) -> None:
    for kind, rule in rules.items():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"rules: {kind!r} is not a class of modules")
        if isinstance(rule, type) and not (rule in REPLACEMENTS and issubclass(kind, rule)):
            raise TypeError(f"rules: {kind.__qualname__} must be a subclass of what it is said to compute the same as, "
                            f"and that one of {', '.join(stock.__name__ for stock in REPLACEMENTS)}, but that is "
                            f"{rule.__qualname__}")
        if not callable(rule):
            raise TypeError(f"rules: what {kind.__qualname__} becomes is neither a stock class nor a function")


def is_ours(kind: type) -> bool:
    """Is it a class that convert gives layers, and not one that someone derived from it?"""
    return kind in OURS or kind in _CHANNEL_NORMS or "_normfuse_stock" in vars(kind)


def is_normalization(module: nn.Module, rules: Mapping[type, Rule]) -> bool:
    """Beside norms_of_tokens."""
    kind = type(module)
    return (isinstance(module, (nn.GroupNorm, nn.modules.batchnorm._NormBase, modules._ChannelNorm, _Foreign))
            or kind in rules or _known(kind) is not None)


def convert_layer(module: nn.Module, rules: Mapping[type, Rule],
                  of_tokens: bool = False) -> tuple[bool, tuple[str, ...], Optional[str]]:
    """of_tokens: one of norms_of_tokens. Changes the layer's class, if it is known. For its report: whether that was
    done, what it does itself after the norm, and why it was left or has nothing else folded into it."""
    kind = type(module)
    if is_ours(kind):
        return True, *_own(module)
    if "_normfuse_converted_from" in module.__dict__:
        return True, (), "its class was replaced after it was converted"
    rule, known = rules.get(kind), REPLACEMENTS.get(kind) or _known(kind)
    on = [switch for switch in _SWITCHES if rule is None and kind.__module__.startswith("timm.")
          and getattr(module, switch, False)]
    if on:
        return False, (), f"its {on[0]} is on"
    if rule is not None or of_tokens or known is not None:
        ours = known if known in OURS and rule is None else _foreign_class(kind, rule)
    elif isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return False, (), "it is lazy: convert after the first forward"
    else:
        return False, (), f"{_name(kind)} is a subclass, whose code may differ: convert takes rules for such"
    if "forward" in module.__dict__:
        return False, (), "its forward was replaced on the object"
    module.__class__ = ours
    module.__dict__["_normfuse_converted_from"] = kind
    return True, *_own(module)


def _own(module: nn.Module) -> tuple[tuple[str, ...], Optional[str]]:
    """The use that a layer makes of an activation of its own, for its report."""
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
    """True if calls of layers of this class take post_add and the keywords of this activation."""
    if issubclass(kind, _ByRule):
        return _rule_takes(kind._normfuse_rule, "post_add", *chosen)
    return issubclass(kind, _Activated) and not issubclass(kind, _WithOwnActivation)


def has_own_activation(layer: nn.Module) -> bool:
    """Does a layer that takes an activation apply one already?"""
    return layer.__dict__.get("activation") is not None and not isinstance(layer, _ByRule)

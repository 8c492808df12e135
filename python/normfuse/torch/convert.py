# SPDX-License-Identifier: MIT
"""convert and revert: a model's stock normalization layers become normfuse's, in place; fold_batch_norm: evaluating
batch norms go into the convolutions before them.

A layer is converted by changing its class. It stays the same object with the same parameters, buffers and hooks, so
optimizers, wrappers and whatever else refers to it go on as before.

Then what follows a layer is folded into its call, where it is proved that nothing else reads what lies between:

- in an nn.Sequential, the activation that comes next. The layer gets it as its `activation`, and a FoldedActivation
  that does nothing takes its place.
- in a module with code of its own ("block"), the activation, or an addition and the activation after it, wherever
  torch.fx traces the code. The block's forward is rewritten; layers and activations stay as they are. The layer may
  also be the last one in a container that the block calls, such as nn.Sequential(convolution, norm).
- in a block that torch.fx does not trace, the activation that the next statement applies, `x = self.norm(x)` and
  `x = self.act(x)`, where the class calls neither anywhere else. As in an nn.Sequential.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, Iterator, Optional, Union

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from . import _blocks, functional, modules
from .modules import _Activated

__all__ = ["ConversionReport", "FoldedActivation", "FoldedBatchNorm", "LayerReport", "convert", "fold_batch_norm",
           "revert"]

_REPLACEMENTS: dict[type, type] = {getattr(nn, name): getattr(modules, name) for name in (
    "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "SyncBatchNorm")}
_OURS = frozenset(_REPLACEMENTS.values())
_STOCK_BASES = (nn.GroupNorm, nn.modules.batchnorm._NormBase)
# Classes of other packages by module and name, so that nothing is imported for them.
# Subclasses whose forward is the stock class's as long as the attributes named here are false.
_SAME_AS_STOCK = {("timm.layers.norm", "GroupNorm"): (nn.GroupNorm, ("fast_norm", "_fast_norm"))}
# Subclasses whose forward is the stock class's, then their children drop and act; likewise.
_WITH_OWN_ACTIVATION = {
    ("timm.layers.norm_act", "BatchNormAct2d"): (nn.BatchNorm2d, ()),
    ("timm.layers.norm_act", "SyncBatchNormAct"): (nn.SyncBatchNorm, ()),
    ("timm.layers.norm_act", "GroupNormAct"): (nn.GroupNorm, ("_fast_norm",)),
}
# Batch norms that always evaluate, with buffers weight, bias, running_mean, running_var and an attribute eps; the
# second also has drop and act.
_FROZEN = {("torchvision.ops.misc", "FrozenBatchNorm2d"): False, ("timm.layers.norm_act", "FrozenBatchNormAct2d"): True}

# ---- report ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class LayerReport:
    """What became of one layer. name: its path in the model. kind: its class. done: the layer itself was converted
    (fold_batch_norm: folded). folded: what went into its call, such as "silu" or "add + relu", once for each call of it
    that had something to fold. reason: why it was left, or why nothing (more) was folded."""
    name: str
    kind: str
    done: bool
    folded: tuple[str, ...] = ()
    reason: Optional[str] = None

    def __str__(self) -> str:
        folded = f", with {' and '.join(self.folded)}" if self.folded else ""
        reason = f"; {self.reason}" if self.reason else ""
        return f"{self.name or '(the model)'} ({self.kind}): {'done' if self.done else 'left'}{folded}{reason}"


@dataclasses.dataclass
class ConversionReport:
    """layers: one LayerReport for each normalization layer of the model, in the order of named_modules()."""
    layers: list[LayerReport]

    @property
    def converted(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.done]

    @property
    def folded(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.folded]

    @property
    def left(self) -> list[LayerReport]:
        return [layer for layer in self.layers if not layer.done]

    def __str__(self) -> str:
        return "\n".join([f"{len(self.layers)} layers: {len(self.converted)} done, {len(self.folded)} of them with "
                          f"what follows, {len(self.left)} left", *map(str, self.layers)])


# ---- activations ----------------------------------------------------------------------------------------------------

_Choice = tuple[str, Optional[float]]  # activation, act_param


def _module_activation(module: Optional[nn.Module]) -> Optional[_Choice]:
    """What an activation module computes; None for any other."""
    kind = type(module)
    if kind in _MODULES:
        return _MODULES[kind], None
    if kind is nn.LeakyReLU:
        return "leaky_relu", float(module.negative_slope)
    if kind is nn.ELU:
        return "elu", float(module.alpha)
    if kind is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh", None
    return None


_MODULES = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish", nn.Mish: "mish"}
_FUNCTIONS = {F.relu: "relu", F.relu_: "relu", torch.relu: "relu", torch.relu_: "relu", F.silu: "silu",
              F.hardswish: "hardswish", F.mish: "mish", F.gelu: "gelu", F.leaky_relu: "leaky_relu",
              F.leaky_relu_: "leaky_relu", F.elu: "elu", F.elu_: "elu"}
_METHODS = {"relu": "relu", "relu_": "relu"}
# The parameter of each function, by name and position.
_PARAMETERS = {"leaky_relu": "negative_slope", "elu": "alpha"}


def _function_activation(node: torch.fx.Node) -> Optional[_Choice]:
    """What a call of an activation function computes; None for any other, or where an argument is not a constant."""
    name = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(node.op, {}).get(node.target)
    if name is None:
        return None
    rest, kwargs = list(node.args[1:]), dict(node.kwargs)
    kwargs.pop("inplace", None)
    if name == "gelu":
        approximate = kwargs.pop("approximate", "none")
        return ({"none": "gelu", "tanh": "gelu_tanh"}[approximate], None) if not rest and not kwargs else None
    if name in _PARAMETERS:
        parameter = rest.pop(0) if rest else kwargs.pop(_PARAMETERS[name], None)
        rest = rest[1:]  # inplace
        if rest or kwargs or not isinstance(parameter, (int, float, type(None))):
            return None
        return name, None if parameter is None else float(parameter)
    return (name, None) if len(rest) <= 1 and not kwargs else None


def _apply_activation(z: Tensor, activation: Optional[str], act_param: Optional[float]) -> Tensor:
    return z if activation is None else functional.channel_affine(z, None, None, activation=activation,
                                                                  act_param=act_param)


def fused_call(layer: nn.Module, input: Tensor, post_add: Optional[Tensor],
               activation: Union[nn.Module, _Choice]) -> Tensor:
    """activation(layer(input) [+ post_add]), in one call where that is the same: what a rewritten block does.

    That the modules are still what they were is looked up in each call. They are called one after the other where
    someone has hooked or replaced one of them since, or where the addition would broadcast or promote."""
    module = isinstance(activation, nn.Module)
    choice = _module_activation(activation) if module else activation
    fits = post_add is None or (isinstance(post_add, Tensor) and post_add.shape == input.shape
                                and post_add.dtype == input.dtype and post_add.device == input.device)
    if (fits and choice is not None and isinstance(layer, _Activated) and layer.activation is None
            and not _blocks.hooked(layer) and not (module and _blocks.hooked(activation))):
        return layer(input, post_add=post_add, activation=choice[0], act_param=choice[1])
    output = layer(input)
    if post_add is not None:
        output = output + post_add
    return activation(output) if module else _apply_activation(output, *activation)


# Where a layer ends a container, and which one: a step of the path for each container, outermost first; None into the
# last child of an nn.Sequential, a name into the child that a container passes its input to.
_Path = tuple[Optional[str], ...]


def _but_identities(block: nn.Sequential) -> list[nn.Module]:
    """The children of an nn.Sequential without the nn.Identity at its end."""
    children = list(block._modules.values())
    while children and type(children[-1]) is nn.Identity and not _blocks.hooked(children[-1]):
        children.pop()
    return children


def _at_the_end(container: nn.Module, path: _Path) -> Optional[nn.Module]:
    """What ends the container; None where nothing does any more, or someone watches or replaced a container's call."""
    module: Optional[nn.Module] = container
    for step in path:
        if module is None or _blocks.hooked(module) or "forward" in module.__dict__:
            return None
        if step is None:
            children = _but_identities(module)
            module = children[-1] if children else None
        else:
            module = module._modules.get(step)
    return module


def call_up_to_end(container: nn.Module, path: _Path, input: Tensor) -> Tensor:
    """container(input) without the layer that ends it: what a rewritten block does."""
    if _at_the_end(container, path) is None:
        return container(input)
    for step in path:
        if step is None:
            *children, container = _but_identities(container)
            for child in children:
                input = child(input)
        else:
            container = container._modules[step]
    return input


def fused_end(container: nn.Module, path: _Path, input: Tensor, post_add: Optional[Tensor],
              activation: Union[nn.Module, _Choice]) -> Tensor:
    """activation(layer(input) [+ post_add]) with the layer that ends the container and what call_up_to_end gave."""
    layer = _at_the_end(container, path)
    if layer is not None:
        return fused_call(layer, input, post_add, activation)
    output = input if post_add is None else input + post_add
    return activation(output) if isinstance(activation, nn.Module) else _apply_activation(output, *activation)


class FoldedActivation(nn.Identity):
    """Stands where an activation was, in an nn.Sequential or a module whose forward calls it right after a layer, that
    the layer now applies. `replaced` is that activation: revert puts it back."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.__dict__["replaced"] = replaced  # not a child: it must not show up among the model's modules

    def extra_repr(self) -> str:
        return repr(self.__dict__["replaced"])


# ---- layers of other packages ---------------------------------------------------------------------------------------


class _Foreign:
    """Mixin of what such layers become: a subclass of their own class, of the same name."""

    _normfuse_stock: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        return (_new_foreign, (self._normfuse_stock,), *reduced[2:])


class _WithOwnActivation(_Foreign):
    """A layer of ours, then what the class has of its own: drop and act, in one call where that is the same."""

    _normfuse_base: type

    def _own_activation(self) -> Optional[_Choice]:
        drop, act = getattr(self, "drop", None), getattr(self, "act", None)
        if drop is not None and (type(drop) is not nn.Identity or _blocks.hooked(drop)):
            return None
        return None if act is None or _blocks.hooked(act) else _module_activation(act)

    def forward(self, x: Tensor) -> Tensor:
        choice = self._own_activation()
        if choice is not None:
            return self._normfuse_base.forward(self, x, activation=choice[0], act_param=choice[1])
        x = self._normfuse_base.forward(self, x)
        for name in ("drop", "act"):
            child = getattr(self, name, None)
            x = x if child is None else child(x)
        return x


class _Frozen(_Foreign, _Activated):
    """A batch norm that always evaluates, with all four of its tensors in buffers."""

    def forward(self, x: Tensor, *, post_add: Optional[Tensor] = None, activation: Optional[str] = None,
                act_param: Optional[float] = None) -> Tensor:
        activation, act_param = self._of_this_call(activation, act_param)
        if x.dtype == self.weight.dtype or torch.is_autocast_enabled(x.device.type):
            return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0,
                                         self.eps, activation=activation, act_param=act_param, post_add=post_add)
        output = self._normfuse_stock.forward(self, x)  # in the wider of the two types
        if post_add is not None:
            output = output + post_add
        return _apply_activation(output, activation, act_param)


class _FrozenWithOwnActivation(_WithOwnActivation, _Frozen):
    _normfuse_base = _Frozen


@functools.cache
def _foreign_class(stock: type) -> type:
    """Our subclass of another package's class."""
    known = (stock.__module__, stock.__qualname__)
    members: dict[str, Any] = {"__module__": stock.__module__, "__qualname__": stock.__qualname__,
                               "__doc__": stock.__doc__, "_normfuse_stock": stock}
    if known in _FROZEN:
        return type(stock.__name__, (_FrozenWithOwnActivation if _FROZEN[known] else _Frozen, stock), members)
    base = _REPLACEMENTS[_WITH_OWN_ACTIVATION[known][0]]
    return type(stock.__name__, (_WithOwnActivation, base, stock), {**members, "_normfuse_base": base})


def _new_foreign(stock: type) -> nn.Module:
    ours = _foreign_class(stock)
    return ours.__new__(ours)


def _is_normalization(module: nn.Module) -> bool:
    return isinstance(module, (*_STOCK_BASES, _Frozen)) or _known_as(module) in _FROZEN


def _known_as(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__


# ---- convert --------------------------------------------------------------------------------------------------------


def convert(model: nn.Module) -> ConversionReport:
    """Makes normfuse layers of the model's stock normalization layers, in place, and folds what follows them.

    model: any module, a single layer included. Its layers of exactly the stock classes GroupNorm, BatchNorm1d/2d/3d,
        InstanceNorm1d/2d/3d and SyncBatchNorm become those of normfuse.torch: the same objects, parameters, buffers
        and hooks. So do timm's GroupNorm, and its norms with an activation of their own (BatchNormAct2d,
        SyncBatchNormAct, GroupNormAct, FrozenBatchNormAct2d), and torchvision's FrozenBatchNorm2d. Other subclasses
        with code of their own are left.
    Returns a ConversionReport: print it, or look at .converted, .folded, .left and each layer's .reason.

    A following activation (ReLU, LeakyReLU, SiLU, GELU, Hardswish, ELU, Mish, with their parameters; as a module or a
    function), and an addition between the two, become part of the layer's call where nothing else reads the values
    between them: in an nn.Sequential where they are neighbours, elsewhere where torch.fx traces the forward of the
    module that calls them, or that calls a container which ends in the layer; where it does not, an activation that
    the next statement of the forward applies. What has hooks is not folded, nor is a layer of a Sequential that is
    called from several places. PReLU is not: its slope is learned.

    Converting again folds what can be folded now. revert(model) undoes it.
    """
    layers = {}  # in the order of named_modules()
    for name, module in list(model.named_modules()):
        if isinstance(module, _blocks.RewrittenBlock):
            _blocks.restore(module)  # and folded anew below, as its attributes are now
        if _is_normalization(module):
            layers[module] = LayerReport(name, type(module).__name__, *_convert_layer(module))
    owners = _owners(model)
    for block in _callers(layers, owners):
        if _runs_as_sequential(block):
            _fold_sequential(block, layers, owners)
        else:
            _fold_block(block, layers, owners)
    for module, layer in layers.items():
        if layer.done and not layer.folded and layer.reason is None and _takes_activation(module):
            layer.reason = "nothing that can be folded follows it in the code that calls it"
    return ConversionReport(list(layers.values()))


def revert(model: nn.Module) -> None:
    """Undoes convert, in place: layers, activations and blocks are what they were. Parameters and buffers keep the
    values that they have now. Layers that were made as normfuse's stay so, and so does what fold_batch_norm did."""
    for module in list(model.modules()):
        if isinstance(module, _blocks.RewrittenBlock):
            _blocks.restore(module)
        if "_normfuse_converted_from" in module.__dict__:
            module.__class__ = module.__dict__.pop("_normfuse_converted_from")
        for name, child in list(module._modules.items()):
            if isinstance(child, FoldedActivation):
                _unfold(module, name, child)


def _convert_layer(module: nn.Module) -> tuple[bool, tuple[str, ...], Optional[str]]:
    kind = type(module)
    if kind in _OURS or issubclass(kind, _Foreign):
        return True, *_own(module)
    stock = kind
    known = _SAME_AS_STOCK.get(_known_as(module)) or _WITH_OWN_ACTIVATION.get(_known_as(module))
    if known is not None:
        stock, switches = known
        on = [switch for switch in switches if getattr(module, switch, False)]
        if on:
            return False, (), f"its {on[0]} is on"
    if stock not in _REPLACEMENTS and _known_as(module) not in _FROZEN:
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            return False, (), "it is lazy: convert after the first forward"
        return False, (), f"{kind.__module__}.{kind.__qualname__} is a subclass, whose code may differ"
    if "forward" in module.__dict__:
        return False, (), "its forward was replaced on the object"
    if _known_as(module) in _WITH_OWN_ACTIVATION or _known_as(module) in _FROZEN:
        module.__class__ = _foreign_class(kind)
    else:
        module.__class__ = _REPLACEMENTS[stock]
    module.__dict__["_normfuse_converted_from"] = kind
    return True, *_own(module)


def _own(module: nn.Module) -> tuple[tuple[str, ...], Optional[str]]:
    """What a layer does with an activation of its own, for its report."""
    if not isinstance(module, _WithOwnActivation):
        return (), None
    choice = module._own_activation()
    if choice is not None:
        return (choice[0],), None
    after = [child for child in (getattr(module, "drop", None), getattr(module, "act", None))
             if child is not None and type(child) is not nn.Identity]
    return (), f"its own {type(after[0]).__name__} runs after it" if after else "it has no activation of its own"


def _takes_activation(module: nn.Module) -> bool:
    return isinstance(module, _Activated) and module.activation is None and not isinstance(module, _WithOwnActivation)


def _runs_as_sequential(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward


def _owners(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """For each module, the modules nearest above it that have a forward: one for each place where it stands."""
    owners: dict[nn.Module, list[nn.Module]] = {}
    paths = dict(model.named_modules(remove_duplicate=False))
    for path, module in paths.items():
        while path:
            path = path.rpartition(".")[0]
            if type(paths[path]).forward is not nn.Module.forward:  # as nn.ModuleList's is
                owners.setdefault(module, []).append(paths[path])
                break
    return owners


def _callers(layers: dict[nn.Module, LayerReport], owners: dict[nn.Module, list[nn.Module]]) -> list[nn.Module]:
    """The modules that call layers, and those that call containers which end in one."""
    found: dict[nn.Module, None] = {}
    waiting = list(layers)
    for module in waiting:
        for owner in owners.get(module, ()):
            if owner not in found:
                found[owner] = None
                if _end_of(owner, layers) is not None:
                    waiting.append(owner)
    return list(found)


def _end_of(container: nn.Module, layers: dict[nn.Module, LayerReport]) -> Optional[tuple[_Path, nn.Module]]:
    """The layer that ends a container, and the way to it, where the layer can take an activation."""
    path: list[Optional[str]] = []
    module: Optional[nn.Module] = container
    while module is not None and module not in layers:
        if _blocks.hooked(module) or "forward" in module.__dict__:
            return None
        if _runs_as_sequential(module):
            step, children = None, _but_identities(module)
            child = children[-1] if children else None
        else:
            # Only what holds another container or a layer is worth a trace.
            step = _blocks.passes_through(module) if any(_may_end(c, layers) for c in module.children()) else None
            child = None if step is None else module._modules[step]
        path.append(step)
        module = child
    if module is None or not path or not layers[module].done or not _takes_activation(module):
        return None
    return tuple(path), module


def _may_end(module: nn.Module, layers: dict[nn.Module, LayerReport]) -> bool:
    return module in layers or (_runs_as_sequential(module) and any(child in layers for child in module.modules()))


def _fold_sequential(block: nn.Sequential, layers: dict[nn.Module, LayerReport],
                     owners: dict[nn.Module, list[nn.Module]]) -> None:
    children = list(block._modules.items())
    for i, (_, layer) in enumerate(children):
        report = layers.get(layer)
        if report is None or not report.done or not _takes_activation(layer):
            continue
        following = i + 1
        dropouts = []
        while following < len(children) and (type(children[following][1]) is nn.Identity
                                             or type(children[following][1]) in _DROPOUTS):
            dropouts += [children[following][1]] * (type(children[following][1]) is not nn.Identity)
            following += 1
        choice = None if following == len(children) else _module_activation(children[following][1])
        if choice is None:
            if following < len(children) and _why_not(children[following][1]):
                report.reason = _why_not(children[following][1])
            continue
        name, activation = children[following]
        # The block itself may stand in several places; other modules may hold the layer and not call it.
        places = sum(child is layer for _, child in children) + sum(
            owner is not block and _blocks.may_call(owner, layer) for owner in dict.fromkeys(owners[layer]))
        if places > 1:
            report.reason = f"it stands in {places} places, so its activation was not folded"
        elif choice[0] not in _SCALING and any(dropout.p > 0 for dropout in dropouts):
            report.reason = "a dropout stands between it and its activation"
        elif any(_blocks.hooked(child) for _, child in children[i:following + 1]):
            report.reason = "it or its activation has hooks, so they were not folded"
        elif "forward" in block.__dict__:
            report.reason = "the forward of its nn.Sequential was replaced on the object"
        else:
            layer._set_activation(*choice)
            block._modules[name] = FoldedActivation(activation)
            report.folded += (choice[0],)


# Set values to 0 and multiply the others by the same number, all but at p = 0, where they do nothing.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# Activations with f(c z) = c f(z) for c >= 0: before such a dropout they are what they are after it.
_SCALING = ("relu", "leaky_relu")


def _why_not(activation: nn.Module) -> Optional[str]:
    if type(activation) is nn.PReLU:
        return "the PReLU after it has a learned slope, and what a layer applies has a fixed one"
    return None


def _layer_before(block: nn.Module, activation: nn.Module) -> Optional[nn.Module]:
    before = list(block._modules.values())
    return next((layer for layer in reversed(before[:before.index(activation)])
                 if isinstance(layer, _STOCK_BASES + (FoldedBatchNorm,))), None)


def _unfold(block: nn.Module, name: str, child: FoldedActivation) -> None:
    layer = _layer_before(block, child)
    if layer is not None:
        layer.__dict__.pop("activation", None)
        layer.__dict__.pop("act_param", None)
    block._modules[name] = child.__dict__["replaced"]


def _fold_block(block: nn.Module, layers: dict[nn.Module, LayerReport],
                owners: dict[nn.Module, list[nn.Module]]) -> None:
    try:
        graphs = _blocks.traces(block)
    except _blocks.Untraceable as error:
        for layer in _called_layers(block, layers):
            layers[layer].reason = f"torch.fx cannot trace {type(block).__name__}: {error}"
        _fold_statements(block, layers, owners)
        return
    rewritten = {}
    folded: dict[nn.Module, tuple[str, ...]] = {}
    for kind, graph in graphs.items():
        found = _fold_graph(block, graph, layers)
        if found:
            rewritten[kind] = graph
            for layer, what in found.items():
                folded[layer] = max(folded.get(layer, ()), what, key=len)
    if rewritten:
        _blocks.rewrite(block, rewritten)
        for layer, what in folded.items():
            layers[layer].folded += what
            layers[layer].reason = None


def _fold_statements(block: nn.Module, layers: dict[nn.Module, LayerReport],
                     owners: dict[nn.Module, list[nn.Module]]) -> None:
    """Folds as in an nn.Sequential what the text of the block's forward calls one after the other."""
    for name, following in _blocks.successive_calls(block):
        layer, activation = block._modules.get(name), block._modules.get(following)
        choice = _module_activation(activation)
        if layer not in layers or not layers[layer].done or not _takes_activation(layer) or choice is None:
            continue
        if len(owners[layer]) > 1:
            layers[layer].reason = f"it stands in {len(owners[layer])} places, so its activation was not folded"
        elif _blocks.hooked(layer) or _blocks.hooked(activation):
            layers[layer].reason = "it or its activation has hooks, so they were not folded"
        elif _layer_before(block, activation) is layer:  # or revert would not find it
            layer._set_activation(*choice)
            block._modules[following] = FoldedActivation(activation)
            layers[layer].folded += (choice[0],)
            layers[layer].reason = None


def _called_layers(block: nn.Module, layers: dict[nn.Module, LayerReport]) -> Iterator[nn.Module]:
    """The layers that are the block's own: below it with nothing that has a forward in between."""
    for layer, owners in _owners(block).items():
        if layer in layers and layers[layer].done and any(owner is block for owner in owners):
            yield layer


def _fold_graph(block: nn.Module, graph: torch.fx.Graph,
                layers: dict[nn.Module, LayerReport]) -> dict[nn.Module, tuple[str, ...]]:
    """Folds what can be in one graph: the layers and, for each, what went into its calls."""
    folded: dict[nn.Module, tuple[str, ...]] = {}
    for node in list(graph.nodes):
        layer = _blocks.called_module(block, node)
        path: _Path = ()
        if layer is not None and layer not in layers:
            path, layer = _end_of(layer, layers) or ((), None)
        if layer is None or not layers[layer].done or not _takes_activation(layer):
            continue
        result = _fold_node(block, graph, node, layer, path)
        if result.startswith("because "):
            layers[layer].reason = result.removeprefix("because ")
        elif result:
            folded[layer] = folded.get(layer, ()) + (result,)
    return folded


def _fold_node(block: nn.Module, graph: torch.fx.Graph, node: torch.fx.Node, layer: nn.Module, path: _Path) -> str:
    """Folds what follows this call of a layer, or of a container that ends in it. Returns what that was; "" where
    nothing follows that could be; "because ..." where something does and must not."""
    source = _blocks.plain_input(node)
    passed: list[torch.fx.Node] = []
    last = _blocks.only_reader(block, node, passed)
    if source is None or last is None:
        return "because its output is read more than once" if len(node.users) > 1 else ""
    other = _blocks.addend(last, (passed or [node])[-1])
    addition = None
    if other is not None:
        addition, last = last, _blocks.only_reader(block, last, passed)
        if last is None:
            return "because the sum after it is read more than once" if len(addition.users) > 1 else ""
    module = _blocks.called_module(block, last)
    chosen = _module_activation(module) or _function_activation(last)
    if chosen is None or (module is not None and _blocks.plain_input(last) is None):
        reason = None if module is None else _why_not(module)
        return "" if reason is None else f"because {reason}"
    if _blocks.hooked(layer) or (module is not None and _blocks.hooked(module)):
        return "because it or its activation has hooks, so they were not folded"
    gone = {node, addition, last, *passed}
    if addition is not None:
        # The call of the layer moves down to where both operands are known: nothing on the way may change them.
        between = node.next
        while between is not last:
            if between not in gone and _blocks.may_overwrite(block, between, (source, other)):
                return f"because {between.name}, between it and its activation, may overwrite what it reads"
            between = between.next
    with graph.inserting_before(node):
        called = graph.create_node("get_attr", str(node.target))
        if path:
            # What comes before the layer stays where it was: it may draw random numbers.
            source = graph.call_function(call_up_to_end, (called, path, source))
    with graph.inserting_before(node if addition is None else last):
        activation = chosen if module is None else graph.create_node("get_attr", str(last.target))
        if path:
            call = graph.call_function(fused_end, (called, path, source, other, activation))
        else:
            call = graph.call_function(fused_call, (called, source, other, activation))
    last.replace_all_uses_with(call)
    for old in reversed(list(graph.nodes)):
        if old in gone:
            graph.erase_node(old)
    return chosen[0] if addition is None else f"add + {chosen[0]}"


# ---- fold_batch_norm ------------------------------------------------------------------------------------------------

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, modules.BatchNorm1d,
                modules.BatchNorm2d, modules.BatchNorm3d, modules.SyncBatchNorm)


class FoldedBatchNorm(_Activated, nn.Module):
    """Stands where a batch norm was that is now part of the convolution before it, and applies what had been folded
    into the batch norm: activation(input [+ post_add]); without these it gives its input back."""

    def __init__(self, activation: Optional[str] = None, act_param: Optional[float] = None,
                 axes: Optional[int] = None) -> None:
        super().__init__()
        self._set_activation(activation, act_param)
        self.axes = axes  # how many the input must have; None: any

    def forward(self, input: Tensor, *, post_add: Optional[Tensor] = None, activation: Optional[str] = None,
                act_param: Optional[float] = None) -> Tensor:
        if self.axes is not None and input.dim() != self.axes:
            raise ValueError(f"the batch norm here was folded into a linear layer, for input of {self.axes} axes; "
                             f"this one has {input.dim()}")
        activation, act_param = self._of_this_call(activation, act_param)
        if activation is None and post_add is None:
            return input
        return functional.channel_affine(input, None, None, post_add=post_add, activation=activation,
                                         act_param=act_param)

    def extra_repr(self) -> str:
        return self._activation_repr().removeprefix(", ")


def fold_batch_norm(model: nn.Module) -> ConversionReport:
    """Folds evaluating batch norms into the convolutions or linear layers before them, in place, for inference.

    weight' = weight * w * rstd and bias' = (bias - running_mean) * w * rstd + b, with the batch norm's w, b and
    rstd = 1/sqrt(running_var + eps), are computed in double and rounded once to the convolution's dtype (Jacob et al.
    2017, arXiv:1712.05877, section 3.2). A FoldedBatchNorm takes the batch norm's place.

    model: call .eval() first: a batch norm that is training is left, and so is one that has no running statistics, has
        hooks (or whose convolution has), is used in several places, or whose input is not proved to be a convolution's
        output that nothing else reads (neighbours in an nn.Sequential, or what torch.fx traces).
    Returns a ConversionReport. There is no way back: fold a copy.deepcopy to keep the model.
    """
    owners = _owners(model)
    parameters = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    reports = []
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            reason = _fold_into_convolution(module, name, model, owners, parameters)
            reports.append(LayerReport(name, type(module).__name__, reason is None, (), reason))
    return ConversionReport(reports)


def _fold_into_convolution(layer: nn.Module, name: str, model: nn.Module, owners: dict[nn.Module, list[nn.Module]],
                           parameters: list[int]) -> Optional[str]:
    """Folds one batch norm; the reason where it is left."""
    if type(layer) not in _BATCH_NORMS:
        return f"{type(layer).__module__}.{type(layer).__qualname__} is a subclass, whose code may differ"
    if layer.training:
        return "it is training: call .eval() first"
    if layer.running_mean is None or layer.running_var is None:
        return "it has no running statistics"
    if len(owners.get(layer, ())) != 1:
        return "it stands alone" if layer not in owners else f"it stands in {len(owners[layer])} places"
    block = owners[layer][0]
    try:
        convolution = _sequential_source(block, layer) if _runs_as_sequential(block) else _traced_source(block, layer)
    except _blocks.Untraceable as error:
        return f"torch.fx cannot trace {type(block).__name__}: {error}"
    if convolution is None:
        return "what it reads is not proved to be a convolution's output that nothing else reads"
    if len(owners[convolution]) != 1:
        return f"the convolution before it stands in {len(owners[convolution])} places"
    if _blocks.hooked(layer) or _blocks.hooked(convolution) or "forward" in layer.__dict__:
        return "it or the convolution before it has hooks"
    if any(parameters.count(id(parameter)) > 1 for parameter in convolution.parameters()):
        return "the convolution before it shares its parameters"
    if _out_features(convolution) != layer.num_features:
        return f"the layer before it has {_out_features(convolution)} outputs, not {layer.num_features}"
    _rescale(convolution, layer)
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._modules[child] = FoldedBatchNorm(
        getattr(layer, "activation", None), getattr(layer, "act_param", None),
        2 if isinstance(convolution, nn.Linear) else None).train(layer.training)
    return None


def _sequential_source(block: nn.Module, layer: nn.Module) -> Optional[nn.Module]:
    children = list(block._modules.values())
    before = children.index(layer) - 1
    while before >= 0 and type(children[before]) is nn.Identity and not _blocks.hooked(children[before]):
        before -= 1
    return children[before] if before >= 0 and type(children[before]) in _CONVOLUTIONS else None


def _traced_source(block: nn.Module, layer: nn.Module) -> Optional[nn.Module]:
    """The convolution that every traced call of the block runs just before the batch norm, once."""
    found = set()
    for graph in _blocks.traces(block, training=(False,)).values():
        called = [(node, _blocks.called_module(block, node)) for node in graph.nodes]
        before = [module for node, module in called if type(module) in _CONVOLUTIONS
                  and _blocks.called_module(block, _blocks.only_reader(block, node, []) or node) is layer]
        if len(before) != 1 or any(sum(module is m for _, module in called) != 1 for m in (layer, before[0])):
            return None
        found.add(before[0])
    return found.pop() if len(found) == 1 else None


def _out_features(convolution: nn.Module) -> int:
    return convolution.out_features if isinstance(convolution, nn.Linear) else convolution.out_channels


@torch.no_grad()
def _rescale(convolution: nn.Module, layer: nn.Module) -> None:
    factor = (layer.running_var.double() + layer.eps).rsqrt()
    if layer.weight is not None:
        factor = factor * layer.weight.double()
    bias = -layer.running_mean.double()
    if convolution.bias is not None:
        bias = bias + convolution.bias.double()
    bias = bias * factor
    if layer.bias is not None:
        bias = bias + layer.bias.double()
    old = convolution.weight
    if getattr(convolution, "transposed", False):  # [in, out/groups, ...]: a group's outputs are those of its inputs
        groups = convolution.groups
        weight = old.double().unflatten(0, (groups, -1))
        weight = (weight * factor.view(groups, 1, -1, *[1] * (old.dim() - 2))).flatten(0, 1)
    else:
        weight = old.double() * factor.view(-1, *[1] * (old.dim() - 1))
    memory_format = torch.channels_last if old.dim() == 4 and old.is_contiguous(
        memory_format=torch.channels_last) else torch.preserve_format
    convolution.weight = nn.Parameter(weight.to(old.dtype, memory_format=memory_format), old.requires_grad)
    convolution.bias = nn.Parameter(bias.to(old.dtype), old.requires_grad)

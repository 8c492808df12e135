# SPDX-License-Identifier: MIT
"""convert and revert: a model's stock normalization layers become normfuse's, in place; fold_batch_norm: evaluating
batch norms go into the convolutions before them.

A layer is converted by changing its class. It stays the same object with the same parameters, buffers and hooks, so
optimizers, wrappers and whatever else refers to it go on as before.

Then what follows a layer is folded into its call, where it is proved that nothing else reads what lies between:

- in an nn.Sequential, the activation that comes next. The layer gets it as its `activation`, and a FoldedActivation
  that does nothing takes its place.
- in a module with code of its own ("block"), the activation, or an addition and the activation after it, wherever
  torch.fx traces the code. The block's forward is rewritten; layers and activations stay as they are.
"""
from __future__ import annotations

import dataclasses
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
# Subclasses whose forward is the stock class's as long as the attributes named here are false.
_SAME_AS_STOCK = {("timm.layers.norm", "GroupNorm"): (nn.GroupNorm, ("fast_norm", "_fast_norm"))}

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


class FoldedActivation(nn.Identity):
    """Stands in an nn.Sequential where an activation was that the layer before it now applies. `replaced` is that
    activation: revert puts it back."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.__dict__["replaced"] = replaced  # not a child: it must not show up among the model's modules

    def extra_repr(self) -> str:
        return repr(self.__dict__["replaced"])


# ---- convert --------------------------------------------------------------------------------------------------------


def convert(model: nn.Module) -> ConversionReport:
    """Makes normfuse layers of the model's stock normalization layers, in place, and folds what follows them.

    model: any module, a single layer included. Its layers of exactly the stock classes GroupNorm, BatchNorm1d/2d/3d,
        InstanceNorm1d/2d/3d and SyncBatchNorm become those of normfuse.torch: the same objects, parameters, buffers
        and hooks. Subclasses with code of their own are left.
    Returns a ConversionReport: print it, or look at .converted, .folded, .left and each layer's .reason.

    A following activation (ReLU, LeakyReLU, SiLU, GELU, Hardswish, ELU, Mish, with their parameters; as a module or a
    function), and an addition between the two, become part of the layer's call where nothing else reads the values
    between them: in an nn.Sequential where they are neighbours, elsewhere where torch.fx traces the forward of the
    module that calls them. What has hooks is not folded, nor is a layer of a Sequential that stands in several places.

    Converting again folds what can be folded now. revert(model) undoes it.
    """
    layers = {}  # in the order of named_modules()
    for name, module in list(model.named_modules()):
        if isinstance(module, _blocks.RewrittenBlock):
            _blocks.restore(module)  # and folded anew below, as its attributes are now
        if isinstance(module, _STOCK_BASES):
            layers[module] = LayerReport(name, type(module).__name__, *_convert_layer(module))
    owners = _owners(model)
    for block in dict.fromkeys(owner for layer in layers for owner in owners.get(layer, ())):
        if _runs_as_sequential(block):
            _fold_sequential(block, layers, owners)
        else:
            _fold_block(block, layers)
    for module, layer in layers.items():
        if layer.done and not layer.folded and layer.reason is None and module.activation is None:
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
    if kind in _OURS:
        return True, (), None
    stock = kind
    known = _SAME_AS_STOCK.get((kind.__module__, kind.__qualname__))
    if known is not None:
        stock, switches = known
        on = [switch for switch in switches if getattr(module, switch, False)]
        if on:
            return False, (), f"its {on[0]} is on"
    if stock not in _REPLACEMENTS:
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            return False, (), "it is lazy: convert after the first forward"
        return False, (), f"{kind.__module__}.{kind.__qualname__} is a subclass, whose code may differ"
    if "forward" in module.__dict__:
        return False, (), "its forward was replaced on the object"
    module.__class__ = _REPLACEMENTS[stock]
    module.__dict__["_normfuse_converted_from"] = kind
    return True, (), None


def _runs_as_sequential(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward


def _owners(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """For each module, the modules nearest above it that have a forward: one for each place where it stands."""
    containers = (nn.ModuleList, nn.ModuleDict)
    owners: dict[nn.Module, list[nn.Module]] = {}
    paths = dict(model.named_modules(remove_duplicate=False))
    for path, module in paths.items():
        while path:
            path = path.rpartition(".")[0]
            if not isinstance(paths[path], containers):
                owners.setdefault(module, []).append(paths[path])
                break
    return owners


def _fold_sequential(block: nn.Sequential, layers: dict[nn.Module, LayerReport],
                     owners: dict[nn.Module, list[nn.Module]]) -> None:
    children = list(block._modules.items())
    for i, (_, layer) in enumerate(children):
        report = layers.get(layer)
        if report is None or not report.done or layer.activation is not None:
            continue
        following = i + 1
        while following < len(children) and type(children[following][1]) is nn.Identity:
            following += 1
        if following == len(children) or _module_activation(children[following][1]) is None:
            continue
        name, activation = children[following]
        if len(owners[layer]) > 1:
            report.reason = f"it stands in {len(owners[layer])} places, so its activation was not folded"
        elif any(_blocks.hooked(child) for _, child in children[i:following + 1]):
            report.reason = "it or its activation has hooks, so they were not folded"
        elif "forward" in block.__dict__:
            report.reason = "the forward of its nn.Sequential was replaced on the object"
        else:
            chosen, parameter = _module_activation(activation)
            layer._set_activation(chosen, parameter)
            block._modules[name] = FoldedActivation(activation)
            report.folded += (chosen,)


def _unfold(block: nn.Module, name: str, child: FoldedActivation) -> None:
    before = list(block._modules.values())
    for layer in reversed(before[:before.index(child)]):
        if isinstance(layer, _STOCK_BASES + (FoldedBatchNorm,)):
            layer.__dict__.pop("activation", None)
            layer.__dict__.pop("act_param", None)
            break
    block._modules[name] = child.__dict__["replaced"]


def _fold_block(block: nn.Module, layers: dict[nn.Module, LayerReport]) -> None:
    try:
        graphs = _blocks.traces(block)
    except _blocks.Untraceable as error:
        for layer in _called_layers(block, layers):
            layers[layer].reason = f"torch.fx cannot trace {type(block).__name__}: {error}"
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
        if layer is None or layer not in layers or not layers[layer].done or layer.activation is not None:
            continue
        result = _fold_node(block, graph, node, layer)
        if result.startswith("because "):
            layers[layer].reason = result.removeprefix("because ")
        elif result:
            folded[layer] = folded.get(layer, ()) + (result,)
    return folded


def _fold_node(block: nn.Module, graph: torch.fx.Graph, node: torch.fx.Node, layer: nn.Module) -> str:
    """Folds what follows this call of a layer. Returns what that was; "" where nothing follows that could be;
    "because ..." where something does and must not."""
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
        return ""
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
    with graph.inserting_before(node if addition is None else last):
        reference = graph.create_node("get_attr", str(node.target))
        activation = chosen if module is None else graph.create_node("get_attr", str(last.target))
        call = graph.call_function(fused_call, (reference, source, other, activation))
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

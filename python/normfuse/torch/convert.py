# SPDX-License-Identifier: MIT
"""convert and revert: a model's stock normalization layers become normfuse's, in place; fold_batch_norm: evaluating
batch norms go into the convolutions before them.

A layer is converted by changing its class. It stays the same object with the same parameters, buffers and hooks, so
optimizers, wrappers and whatever else refers to it go on as before.

Then what follows a layer is folded into its call: an activation, or an addition and the activation after it. It must be
proved that nothing else reads what lies between. Layers and activations stay what they are. What changes is the code
that calls them, a module with a forward of its own or an nn.Sequential (a block). Its forward is rewritten from what
torch.fx traces, or from its text where two statements in a row call the layer and its activation. The layer may also be
the last one in a container that the block calls, such as nn.Sequential(convolution, norm).

In the same graphs biases of convolutions are handed on to what reads the convolutions (see _calls.py).
"""
from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import Mapping, Optional

import torch
import torch.fx
from torch import Tensor, nn

from . import _activations, _blocks, _rules, functional, modules
from ._calls import add_with_biases, complete, convolve, fused_adaptive_call, fused_call, has_bias_to_move, over_one
from ._rules import Rule, takes_activation, takes_bias
from ._watch import hooked, plain_class
from .modules import _Activated

__all__ = ["ConversionReport", "FoldedBatchNorm", "LayerReport", "convert", "fold_batch_norm", "revert"]

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
    """layers: one LayerReport for each normalization layer of the model, in the order of named_modules(). biases: the
    convolutions whose biases what follows them adds on CUDA, by their paths in the model."""
    layers: list[LayerReport]
    biases: list[str] = dataclasses.field(default_factory=list)

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
        biases = f"; biases moved on CUDA: {len(self.biases)}" if self.biases else ""
        return "\n".join([f"{len(self.layers)} layers: {len(self.converted)} done, {len(self.folded)} of them with "
                          f"what follows, {len(self.left)} left{biases}", *map(str, self.layers)])


# ---- convert --------------------------------------------------------------------------------------------------------


def convert(model: nn.Module, rules: Mapping[type, Rule] = {}) -> ConversionReport:
    """Makes normfuse layers of the model's stock normalization layers, in place, and folds what follows them.

    model: any module, a single layer included. Its layers of exactly the stock classes GroupNorm, BatchNorm1d/2d/3d,
        InstanceNorm1d/2d/3d and SyncBatchNorm become those of normfuse.torch: the same objects, parameters, buffers
        and hooks. So do known layers of ComfyUI, detectron2, timm, torchvision and transformers, which docs/pytorch.md
        lists. Other subclasses with code of their own are left.
    rules: class -> what layers of exactly this class become: a stock class that it computes the same as, or a function
        in the place of its forward, rule(layer, input, *, post_add=None, activation=None, act_param=None, slope=None).
        A function without these keywords has nothing folded into its calls; one without slope no PReLU.
    Returns a ConversionReport: print it, or look at .converted, .folded, .left and each layer's .reason.

    An activation that follows becomes part of the layer's call, and so does an addition between the two, where nothing
    else reads the values between. It may be ReLU, ReLU6, LeakyReLU, PReLU, SiLU, GELU, Hardswish, ELU or Mish with its
    parameters, as a module or a function. `* (1 + scale) + shift` after a group norm is folded, too. What has hooks is
    not folded.

    On CUDA biases of convolutions move into the calls of the layers that they feed, or into the residual additions
    after them: `norm(conv(x) + embedding)` and `conv(x) + residual` are a convolution without bias and one pass each.

    This is seen where torch.fx traces the forward of the module or nn.Sequential that calls them, or that calls a
    container which ends in the layer. Where torch.fx does not trace it, an activation is folded that the next statement
    of the forward applies. A forward that does what no trace holds is left as it is: grad mode, autocast, checkpoint,
    random numbers, ...

    Layers and activations stay what they are, and may be replaced, hooked or called by themselves later. A module whose
    forward was rewritten runs its own again while something that the forward reads is not what it was, and warns once.
    Converting again folds what can be folded now. revert(model) undoes it.
    """
    _rules.check(rules)
    layers = {}  # in the order of named_modules()
    for name, module in list(model.named_modules()):
        if _blocks.is_rewritten(module):
            _blocks.restore(module)  # and folded anew below, as its attributes are now
        if _rules.is_normalization(module, rules):
            layers[module] = LayerReport(name, type(module).__name__, *_rules.convert_layer(module, rules))
    owners, fold = _owners(model), _Folding(layers)
    for block in fold.callers(owners):
        fold.block(block)
    for (module, _), what in fold.found.items():
        layers[module].folded += what
        layers[module].reason = None
    for module, layer in layers.items():
        if layer.done and not layer.folded and layer.reason is None and takes_activation(module):
            layer.reason = "nothing that can be folded follows it in the code that calls it"
    return ConversionReport(list(layers.values()), [name for name, module in model.named_modules()
                                                    if module in fold.moved])


def revert(model: nn.Module) -> None:
    """Undoes convert, in place: layers, activations and blocks are what they were. Parameters and buffers keep the
    values that they have now. Layers that were made as normfuse's stay so, and so does what fold_batch_norm did.

    Raises RuntimeError, before anything is changed, where a module got another class since, as in parametrize and
    fully_shard."""
    for name, module in model.named_modules():
        if (isinstance(module, _blocks.RewrittenBlock) and not _blocks.is_rewritten(module)
                or "_normfuse_converted_from" in module.__dict__ and not _rules.is_ours(type(module))):
            raise RuntimeError(f"{name or 'the model'} became a {type(module).__name__} after convert(), as happens in "
                               "parametrize and fully_shard: undo that first, or revert before it")
    for module in list(model.modules()):
        if _blocks.is_rewritten(module):
            _blocks.restore(module)
        if "_normfuse_converted_from" in module.__dict__:
            module.__class__ = module.__dict__.pop("_normfuse_converted_from")


def _runs_as_sequential(module: nn.Module) -> bool:
    return plain_class(type(module)).forward is nn.Sequential.forward


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


# Set values to 0 and multiply the others by the same number, all but at p = 0, where they do nothing.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# Activations with f(c z) = c f(z) for c >= 0: before such a dropout they are what they are after it. One in place must
# not write over the result of an addition and an activation, which the backward takes.
_SCALING = ("relu", "leaky_relu", "prelu")


class _Folding:
    """One convert's search for what can be folded. found: (layer, the module whose code calls it) -> what was. moved:
    the convolutions whose biases what follows them adds."""

    def __init__(self, layers: dict[nn.Module, LayerReport]) -> None:
        self.layers = layers
        self.found: dict[tuple[nn.Module, nn.Module], tuple[str, ...]] = {}
        self.moved: set[nn.Module] = set()
        self._ends: dict[nn.Module, Optional[nn.Module]] = {}
        self._effects: dict[nn.Module, _blocks.Effects] = {}

    def callers(self, owners: dict[nn.Module, list[nn.Module]]) -> list[nn.Module]:
        """The modules that call layers, and those that call containers which end or begin with one."""
        callers: dict[nn.Module, None] = {}
        waiting = list(self.layers)
        for module in waiting:
            for owner in owners.get(module, ()):
                if owner not in callers:
                    callers[owner] = None
                    if self._end_of(owner) is not None or any(owner in self._fed(above)
                                                              for above in owners.get(owner, ())):
                        waiting.append(owner)
        return list(callers)

    def block(self, block: nn.Module) -> None:
        """Rewrites the block where something can be folded."""
        inlined = {module for module in block.modules() if module is not block and self._end_of(module) is not None}
        inlined |= self._fed(block)
        own = {layer for layer, owners in _owners(block).items()
               if self._foldable(layer) and any(owner is block for owner in owners)}
        pairs: tuple[tuple[str, str], ...] = ()
        traces: dict[_blocks.CallKind, _blocks.Trace] = {}
        folded: dict[tuple[nn.Module, nn.Module], tuple[str, ...]] = {}
        try:
            if isinstance(block, _blocks.RewrittenBlock):
                raise _blocks.Untraceable("its class was replaced after it was converted: revert first")
            traces = _blocks.traces(block, inlined=inlined.__contains__)
        except _blocks.Untraceable as error:
            for layer in own:
                self.layers[layer].reason = f"torch.fx cannot trace {type(block).__name__}: {error}"
            if not isinstance(block, _blocks.RewrittenBlock):
                pairs = self._statements(block, folded)
        for kind, trace in list(traces.items()):
            what = self._graph(block, trace)
            moved = _move_biases(block, trace.graph)
            self.moved |= moved
            if not what and not moved:
                del traces[kind]
            for key, folds in what.items():
                folded[key] = max(folded.get(key, ()), folds, key=len)
        if traces or pairs:
            _blocks.rewrite(block, traces, pairs)
        for key, what in folded.items():
            self.found[key] = max(self.found.get(key, ()), what, key=len)

    def _foldable(self, layer: Optional[nn.Module]) -> bool:
        return layer in self.layers and self.layers[layer].done and takes_activation(layer)

    def _end_of(self, container: nn.Module) -> Optional[nn.Module]:
        """The layer that ends a container, where the layer can take an activation."""
        if container not in self._ends:
            self._ends[container] = None
            if container not in self.layers and not hooked(container):
                children = [child for child in container._modules.values() if child is not None]
                if _runs_as_sequential(container):
                    while children and type(children[-1]) is nn.Identity and not hooked(children[-1]):
                        children.pop()
                elif any(self._may_end(child) for child in children):  # only then is it worth a trace
                    children = [container._modules.get(_blocks.last_call(container))]
                else:
                    children = []
                last = children[-1] if children else None
                self._ends[container] = last if last is None or self._foldable(last) else self._end_of(last)
        return self._ends[container]

    def _fed(self, block: nn.Module) -> set[nn.Module]:
        """Of an nn.Sequential, the nn.Sequentials in it that begin with a layer, behind a convolution whose bias can
        move: MONAI's convolutions are such."""
        if not _runs_as_sequential(block):
            return set()
        children = [child for child in block._modules.values() if child is not None]
        return {after for before, after in zip(children, children[1:]) if has_bias_to_move(before)
                and _runs_as_sequential(after) and not hooked(after)
                and any(takes_bias(child) for child in itertools.islice(after._modules.values(), 1))}

    def _may_end(self, module: nn.Module) -> bool:
        return module in self.layers or (_runs_as_sequential(module)
                                         and any(child in self.layers for child in module.modules()))

    def _statements(self, block: nn.Module,
                    folded: dict[tuple[nn.Module, nn.Module], tuple[str, ...]]) -> tuple[tuple[str, str], ...]:
        """The children that the text of the block's forward calls one after the other, and that are folded there."""
        pairs = []
        for name, following in _blocks.successive_calls(block):
            layer, activation = block._modules.get(name), block._modules.get(following)
            chosen = _activations.of_module(activation)
            if not self._foldable(layer) or chosen is None or not takes_activation(layer, chosen):
                continue
            if hooked(layer) or hooked(activation):
                self.layers[layer].reason = "it or its activation has hooks, so they were not folded"
            else:
                pairs.append((name, following))
                folded[layer, block] = folded.get((layer, block), ()) + (chosen["activation"],)
        return tuple(pairs)

    def _graph(self, block: nn.Module, trace: _blocks.Trace) -> dict[tuple[nn.Module, nn.Module], tuple[str, ...]]:
        """Folds what can be in one graph: the layers with what calls them and, for each, what went into its calls."""
        folded: dict[tuple[nn.Module, nn.Module], tuple[str, ...]] = {}
        for node in list(trace.graph.nodes):
            layer = _blocks.called_module(block, node)
            if not self._foldable(layer):
                continue
            result = self._node(block, trace, node, layer)
            if result.startswith("because "):
                self.layers[layer].reason = result.removeprefix("because ")
            elif result:
                caller = block.get_submodule(_blocks.caller_of(node))
                folded[layer, caller] = folded.get((layer, caller), ()) + (result,)
        return folded

    def _adaptive(self, block: nn.Module, trace: _blocks.Trace, node: torch.fx.Node, layer: nn.Module,
                  scale: torch.fx.Node, shift: torch.fx.Node, factor: torch.fx.Node, total: torch.fx.Node) -> str:
        """_node where `layer(source) * (1 + scale) + shift` follows, the last of it `total`."""
        graph, assumptions = trace
        passed: list[torch.fx.Node] = []
        last = _blocks.only_reader(block, total, passed)
        module = None if last is None else _blocks.called_module(block, last)
        chosen = None if last is None else _activations.of_module(module) or _activations.of_node(last)
        if last is None or chosen is None or (module is not None and (hooked(module)
                                                                      or _blocks.plain_input(last) is None)) \
                or (module is None and "slope" in chosen):  # which may not be known before it
            last, module, chosen, passed = total, None, _activations.choice(None), []
        if hooked(layer):
            return "because it has hooks, so nothing was folded"
        gone = {node, *node.users, total, last, *passed}
        reason = _blocks.why_not_later(block, graph, node, layer, total, gone, self._effects, assumptions, factor)
        if reason is not None:
            return f"because {reason}"
        for identity in passed:
            assumptions.is_a(_blocks.called_module(block, identity), exactly=True)
            assumptions.no_hooks(_blocks.called_module(block, identity))
        with graph.inserting_before(node):
            called = graph.create_node("get_attr", str(node.target))
        with graph.inserting_before(total):
            activation = chosen if module is None else graph.create_node("get_attr", str(last.target))
            call = graph.call_function(fused_adaptive_call, (called, node.args[0], scale, shift, activation))
        last.replace_all_uses_with(call)
        for old in reversed(list(graph.nodes)):
            if old in gone:
                graph.erase_node(old)
        return "scale + shift" if chosen["activation"] is None else f"scale + shift + {chosen['activation']}"

    def _node(self, block: nn.Module, trace: _blocks.Trace, node: torch.fx.Node, layer: nn.Module) -> str:
        """Folds what follows this call of a layer. Returns what that was; "" where nothing follows that could be;
        "because ..." where something does and must not."""
        graph, assumptions = trace
        source = _blocks.plain_input(node)
        if source is not None and isinstance(layer, modules.GroupNorm):
            adaptive = _blocks.scale_and_shift(node)
            if adaptive is not None:
                return self._adaptive(block, trace, node, layer, *adaptive)
        passed: list[torch.fx.Node] = []
        last = _blocks.only_reader(block, node, passed, (nn.Identity, *_DROPOUTS))
        if source is None or last is None:
            return "because its output is read more than once" if len(node.users) > 1 else ""
        other = _blocks.addend(last, (passed or [node])[-1])
        addition = None
        before = len(passed)
        if other is not None:
            addition, last = last, _blocks.only_reader(block, last, passed, (nn.Identity, *_DROPOUTS))
            if last is None:
                return "because the sum after it is read more than once" if len(addition.users) > 1 else ""
        module = _blocks.called_module(block, last)
        chosen = _activations.of_module(module) or _activations.of_node(last)
        if chosen is None or (module is not None and _blocks.plain_input(last) is None):
            return ""
        if not takes_activation(layer, chosen):
            return "because its rule takes no slope"
        if hooked(layer) or (module is not None and hooked(module)):
            return "because it or its activation has hooks, so they were not folded"
        between = [_blocks.called_module(block, passing) for passing in passed]
        dropouts = [passing for passing, m in zip(passed, between) if type(m) in _DROPOUTS]
        # The call is made where both operands are known, and a slope that is no module's.
        is_last = module is None and "slope" in chosen
        end = last if is_last else addition
        random = [m for i, m in enumerate(between) if type(m) in _DROPOUTS
                  and (chosen["activation"] not in _SCALING or is_last
                       or (addition is not None and (i < before or m.inplace)))]
        if any(m.p > 0 for m in random):
            return "because a dropout stands between it and its activation"
        gone = {node, addition, last, *passed} - {None, *dropouts}
        if end is not None:
            reason = _blocks.why_not_later(block, graph, node, layer, end, gone | set(dropouts), self._effects,
                                           assumptions, addition if is_last else None)
            if reason is not None:
                return f"because {reason}"
        for m in between:
            assumptions.is_a(m, exactly=True)
            assumptions.no_hooks(m)
        for m in random:
            assumptions.attribute(m, "p")
        if module is not None and len(dropouts) > len(random):
            assumptions.is_a(module, exactly=True)
        for m in (m for m in between if addition is not None and type(m) in _DROPOUTS):
            assumptions.attribute(m, "inplace")  # over a result that is saved
        with graph.inserting_before(node):
            called = graph.create_node("get_attr", str(node.target))
        with graph.inserting_before(node if end is None else end):
            activation = chosen if module is None else graph.create_node("get_attr", str(last.target))
            call = graph.call_function(fused_call, (called, source, other, activation))
        value = call
        for dropout in dropouts:  # those that do something come after the activation
            if _blocks.called_module(block, dropout) in random:
                gone.add(dropout)
            else:
                dropout.args = (value,)
                value = dropout
        last.replace_all_uses_with(value)
        for old in reversed(list(graph.nodes)):
            if old in gone:
                graph.erase_node(old)
        return chosen["activation"] if addition is None else f"add + {chosen['activation']}"


def _move_biases(block: nn.Module, graph: torch.fx.Graph) -> set[nn.Module]:
    """Has biases of convolutions added by what reads these alone, in one graph; of which convolutions. Nothing is called
    at another place than it was."""
    moved = set()
    for node in list(graph.nodes):
        convolution = _blocks.called_module(block, node)
        if has_bias_to_move(convolution) and _blocks.plain_input(node) is not None and _takes_biased(block, node):
            moved.add(convolution)
            source = node.args[0]
            copied = (node.prev is source and source.op == "call_method" and source.target == "contiguous"
                      and _blocks.plain_input(source) is not None and len(source.users) == 1)
            with graph.inserting_before(node):
                called = graph.create_node("get_attr", str(node.target))
                call = graph.call_function(convolve, (called, source.args[0] if copied else source, copied))
                node.replace_all_uses_with(call)
            graph.erase_node(node)
            if copied:
                graph.erase_node(source)
    return moved


def _takes_biased(block: nn.Module, value: torch.fx.Node) -> bool:
    """Whether what reads a value can take it as a Biased. It does then, and its own reader gets what it got before."""
    graph, reader = value.graph, next(iter(value.users), None)
    if len(value.users) != 1:
        return False
    if reader.target is add_with_biases:  # of another convolution
        return True
    if reader.target in (fused_call, fused_adaptive_call):
        layer, source, *others = reader.args
        return source is value and source not in others and takes_bias(block.get_submodule(str(layer.target)))
    if takes_bias(_blocks.called_module(block, reader)) and _blocks.plain_input(reader) is value:
        with graph.inserting_before(reader):
            called = graph.create_node("get_attr", str(reader.target))
            call = graph.call_function(fused_call, (called, value, None, _activations.choice(None)))
            reader.replace_all_uses_with(call)
        graph.erase_node(reader)
        return True
    if _blocks.addend(reader, value) is None:
        return False
    in_place = reader.target in (operator.iadd, "add_")
    with graph.inserting_before(reader):
        total = graph.call_function(add_with_biases, (*reader.args, in_place))
    reader.replace_all_uses_with(total)
    graph.erase_node(reader)
    if not _takes_biased(block, total):
        readers = list(total.users)
        with graph.inserting_after(total):
            tensor = graph.call_function(complete, (total,))
        for later in readers:
            later.replace_input_with(total, tensor)
        if not in_place and len(readers) == 1 and _blocks.is_divided_by_one(readers[0], tensor):
            readers[0].op, readers[0].target, readers[0].args = "call_function", over_one, (tensor,)
    return True


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
                act_param: Optional[float] = None, slope: Optional[Tensor] = None) -> Tensor:
        if self.axes is not None and input.dim() != self.axes:
            raise ValueError(f"the batch norm here was folded into a linear layer, for input of {self.axes} axes; "
                             f"this one has {input.dim()}")
        activation, act_param, slope = self._of_this_call(activation, act_param, slope)
        if activation is None and post_add is None:
            return input
        return functional.channel_affine(input, None, None, post_add=post_add, activation=activation,
                                         act_param=act_param, slope=slope)

    def extra_repr(self) -> str:
        return self._activation_repr().removeprefix(", ")


def fold_batch_norm(model: nn.Module) -> ConversionReport:
    """Folds evaluating batch norms into the convolutions or linear layers before them, in place, for inference.

    weight' = weight * w * rstd and bias' = (bias - running_mean) * w * rstd + b, with the batch norm's w, b and
    rstd = 1/sqrt(running_var + eps), are computed in double and rounded once to the convolution's dtype (Jacob et al.
    2017, arXiv:1712.05877, section 3.2). A FoldedBatchNorm takes the batch norm's place.

    model: call .eval() first: a batch norm that is training is left. So is one that has no running statistics, one that
        has hooks or whose convolution has, and one that is used in several places. Its input must be proved to be a
        convolution's output that nothing else reads: neighbours in an nn.Sequential, or what torch.fx traces.
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
    if hooked(layer) or hooked(convolution) or "forward" in layer.__dict__:
        return "it or the convolution before it has hooks"
    if any(parameters.count(id(parameter)) > 1 for parameter in convolution.parameters()):
        return "the convolution before it shares its parameters"
    if _out_features(convolution) != layer.num_features:
        return f"the layer before it has {_out_features(convolution)} outputs, not {layer.num_features}"
    _rescale(convolution, layer)
    parent, _, child = name.rpartition(".")
    folded = FoldedBatchNorm(getattr(layer, "activation", None), getattr(layer, "act_param", None),
                             2 if isinstance(convolution, nn.Linear) else None).train(layer.training)
    if folded.activation == "prelu":
        folded.slope = layer.slope
    model.get_submodule(parent)._modules[child] = folded
    return None


def _sequential_source(block: nn.Module, layer: nn.Module) -> Optional[nn.Module]:
    children = list(block._modules.values())
    before = children.index(layer) - 1
    while before >= 0 and type(children[before]) is nn.Identity and not hooked(children[before]):
        before -= 1
    return children[before] if before >= 0 and type(children[before]) in _CONVOLUTIONS else None


def _traced_source(block: nn.Module, layer: nn.Module) -> Optional[nn.Module]:
    """The convolution that every traced call of the block runs just before the batch norm, once."""
    found = set()
    for graph, _ in _blocks.traces(block, training=(False,)).values():
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

# SPDX-License-Identifier: MIT
"""convert and revert: a model's stock normalization layers become normfuse's, in place; fold_batch_norm: evaluating
batch norms go into the convolutions before them.

A layer is converted by changing its class: it stays the same object with the same parameters, buffers and hooks. What
follows it goes into its call by the modules above it, whose forwards are rewritten from their texts (see _rewrite.py
and _pending.py)."""
from __future__ import annotations

import collections
import dataclasses
from typing import Mapping, Optional

import torch
from torch import Tensor, nn

from . import _calls, _checks, _registries, _rewrite, _rules, functional, modules
from ._fold import Proofs, runs_as_sequential
from ._pending import FUSED, MOVES
from ._rules import Rule, hooked
from ._survey import Survey
from ._text import Left
from .modules import _Activated

__all__ = ["ConversionReport", "FoldedBatchNorm", "LayerReport", "convert", "fold_batch_norm", "fused", "revert"]

# ---- report ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class LayerReport:
    """The outcome for one layer. name: its path in the model. kind: its class. done: the layer itself was converted
    (fold_batch_norm: folded). folded: what may be fused with it, such as "silu" or "add + relu", once for each call of
    it that has something to fuse. reason: why it was left, or why nothing is fused with it."""
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
    convolutions whose biases what follows them adds on CUDA, by their paths in the model. blocks: modules whose code
    was not rewritten, by their paths, and why. hints: what its user can do."""
    layers: list[LayerReport]
    biases: list[str] = dataclasses.field(default_factory=list)
    blocks: dict[str, str] = dataclasses.field(default_factory=dict)
    hints: list[str] = dataclasses.field(default_factory=list)
    done: str = "converted"

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
        """Two lines: what was done, and what can be done. details() has a line for each layer."""
        if not self.layers:
            return "\n".join(["no norm of this model is one that normfuse has", *self.hints])
        fused = f"; {len(self.folded)} fused with what follows" if self.done == "converted" else ""
        biases = f"; {len(self.biases)} biases of convolutions moved on CUDA" if self.biases else ""
        left = [f"{len(reasons)} left, the first one because {reasons[0]}" for reasons in [
            [layer.reason for layer in self.left if layer.reason]] if reasons]
        return (f"{len(self.converted)} of {len(self.layers)} norms {self.done}{fused}{biases}\n"
                + "; ".join([*left, *self.hints] or ["report.details() has a line for each"]))

    def details(self) -> str:
        """A line for each layer: what became of it, what may be fused with it, and why nothing. Then the modules whose
        code was left as it is."""
        return "\n".join([*map(str, self.layers), *(f"{name or '(the model)'}: its code is left as it is; {why}"
                                                    for name, why in self.blocks.items())])


# ---- convert --------------------------------------------------------------------------------------------------------


def convert(model: nn.Module, rules: Mapping[type, Rule] = {}) -> ConversionReport:
    """Makes normfuse layers of the model's stock normalization layers, in place, and folds what follows them.

    model: any module, a single layer included. Its layers of exactly the stock classes GroupNorm, BatchNorm1d/2d/3d,
        InstanceNorm1d/2d/3d and SyncBatchNorm become those of normfuse.torch: the same objects, parameters, buffers
        and hooks. So do known layers of ComfyUI, detectron2, diffusers, Segment Anything, timm, torchvision and
        transformers, norms over channels among them, which docs/pytorch.md lists. Other subclasses with code of their
        own are left.
    rules: class -> what layers of exactly this class become: a stock class that it computes the same as, or a function
        in the place of its forward, rule(layer, input, *, post_add=None, activation=None, act_param=None, slope=None).
        A function without these keywords has nothing folded into its calls; one without slope no PReLU.
    Returns a ConversionReport: print it, or look at .converted, .folded, .left and each layer's .reason.

    An activation that follows becomes part of the layer's call, and so does an addition between the two, where nothing
    else reads the values between. It may be ReLU, ReLU6, LeakyReLU, PReLU, SiLU, GELU, Hardswish, ELU or Mish with its
    parameters, as a module or a function. `* (1 + scale) + shift` after a group norm or a norm over channels is folded,
    too; after a norm over channels also an addition alone, and what follows behind movedim, permute or transpose. What
    has hooks is not folded. On CUDA biases of convolutions move into the calls of the layers that they feed, or into
    the residual additions after them.

    What is fused is decided in each call; `fused(model)` says what was in the last one. Everything else in a forward
    runs as it is written, in order, and modules, attributes and functions may be replaced and hooked later. Code
    without a text is left: the report names it in `blocks`. revert(model) undoes it.
    """
    _checks.module(model, "convert")
    _rules.check(rules)
    _registries.add_classes()  # of what was imported since
    layers = {}  # in the order of named_modules()
    of_tokens = _rules.norms_of_tokens(model)
    for name, module in list(model.named_modules()):
        if _rewrite.is_rewritten(module):
            _rewrite.restore(module)  # and rewritten anew below, as its class is now
        if module in of_tokens or _rules.is_normalization(module, rules):
            layers[module] = LayerReport(name, type(module).__name__,
                                         *_rules.convert_layer(module, rules, module in of_tokens))
    blocks = _rewritten(model, layers)
    survey = Survey()
    for block in blocks:  # from the outermost on
        if _rewrite.is_rewritten(block) and block not in survey.visited:
            survey.force(survey.visit(block))
    for module, layer in layers.items():
        sites = survey.fused.get(module, {})
        layer.folded += tuple(max(sorted(what), key=len) for what in sites.values())
        if sites:
            layer.reason = None
        elif layer.done and layer.reason is None and not layer.folded:
            left = [f"the code of {type(block).__name__} is left as it is: {blocks[block]}" for block in blocks
                    if blocks[block] and module in block.children()]
            layer.reason = next(iter([*survey.why.get(module, {}).values(), *left]), "no code that was read calls it")
    names = {module: name for name, module in model.named_modules()}
    moved = [module for module in names if module in survey.moved - survey.kept]
    for module in names:
        module.__dict__.pop(MOVES, None)
    for module in moved:
        module.__dict__[MOVES] = True
    others = collections.Counter(type(module).__name__ for module in model.modules()
                                 if isinstance(module, (nn.LayerNorm, nn.RMSNorm)))
    not_taken = ", ".join(f"{count} {name}" for name, count in others.items())
    evaluates = any(isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.training
                    and module.running_mean is not None for module in layers)
    return ConversionReport(list(layers.values()), [names[module] for module in moved],
                            {names[block]: why for block, why in blocks.items() if why},
                            [*dict.fromkeys(f"the code of {type(block).__name__} is left as it is: {why}"
                                            for block, why in blocks.items() if why),
                             *(["eval mode: nft.fold_batch_norm would remove its batch norms"] if evaluates else []),
                             *([f"not taken: {not_taken}"] if not_taken and not layers else [])])


def _rewritten(model: nn.Module, layers: dict[nn.Module, LayerReport]) -> dict[nn.Module, Optional[str]]:
    """Rewrites the modules above converted layers, the outermost first. Gives them, each with the reason if it is left.
    Every nn.Sequential beside them is rewritten, too, since it may run while a norm waits, and modules with code around a
    convolution, whose bias may move."""
    paths = dict(model.named_modules(remove_duplicate=False))
    above: set[nn.Module] = set()
    for path, module in paths.items():
        if module in layers and layers[module].done:
            while path:
                path = path.rpartition(".")[0]
                above.add(paths[path])
    above = {block for block in above if type(block).forward is not nn.Module.forward and block not in layers}
    beside = {child for block in above for child in block.children()
              if (runs_as_sequential(child) or _calls.ends_in_convolution(child)) and "forward" not in child.__dict__}
    blocks: dict[nn.Module, Optional[str]] = {}
    for block in dict.fromkeys(paths.values()):
        if block in above | beside:
            try:
                _rewrite.rewrite(block)
                blocks[block] = None
            except Left as left:
                if block in above:
                    blocks[block] = str(left)
    return blocks


def fused(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The fusions made when a converted model was last called: for each layer that its rewritten code called, by its
    path, what went into each of its calls, such as "silu" or "add + relu", and "" for nothing.

    Compiled calls are not counted: what runs then was made by an earlier one. See what convert says may be fused."""
    _checks.module(model, "fused")
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, tuple[str, ...]] = {}
    for _, calls in sorted((module.__dict__[FUSED] for module in names if FUSED in module.__dict__),
                           key=lambda record: record[0]):
        latest: dict[str, tuple[str, ...]] = {}
        for layer, what in calls:
            if layer in names:
                latest[names[layer]] = latest.get(names[layer], ()) + (what,)
        found |= latest
    return {name: found[name] for name in names.values() if name in found}


def revert(model: nn.Module) -> None:
    """Undoes convert, in place: layers, activations and blocks are what they were. Parameters and buffers keep the
    values that they have now. Layers that were made as normfuse's stay so, and so does what fold_batch_norm did.

    Raises RuntimeError, before anything is changed, where a module got another class since, as in parametrize and
    fully_shard."""
    _checks.module(model, "revert")
    for name, module in model.named_modules():
        if (isinstance(module, _rewrite.Rewritten) and not _rewrite.is_rewritten(module)
                or "_normfuse_converted_from" in module.__dict__ and not _rules.is_ours(type(module))):
            raise RuntimeError(f"{name or 'the model'} became a {type(module).__name__} after convert(), as happens in "
                               "parametrize and fully_shard: undo that first, or revert before it")
    for module in list(model.modules()):
        module.__dict__.pop(MOVES, None)
        if _rewrite.is_rewritten(module):
            _rewrite.restore(module)
        if "_normfuse_converted_from" in module.__dict__:
            module.__class__ = module.__dict__.pop("_normfuse_converted_from")


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
        convolution's output that nothing else reads: neighbours in an nn.Sequential, or calls one after the other in
        the text of a forward that names each of them once.
    Returns a ConversionReport. There is no way back: fold a copy.deepcopy to keep the model.
    """
    _checks.module(model, "fold_batch_norm")
    proofs = Proofs(model)
    parameters = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    reports = []
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            reason = _fold_into_convolution(module, name, model, proofs, parameters)
            reports.append(LayerReport(name, type(module).__name__, reason is None, (), reason))
    return ConversionReport(reports, done="folded into the layers before them")


def _fold_into_convolution(layer: nn.Module, name: str, model: nn.Module, proofs: Proofs,
                           parameters: list[int]) -> Optional[str]:
    """Folds one batch norm; the reason where it is left."""
    if type(layer) not in _BATCH_NORMS:
        return f"{type(layer).__module__}.{type(layer).__qualname__} is a subclass, whose code may differ"
    if layer.training:
        return "it is training: call .eval() first"
    if layer.running_mean is None or layer.running_var is None:
        return "it has no running statistics"
    convolution, reason = proofs.convolution_before(layer)
    if reason is not None:
        return reason
    if type(convolution) not in _CONVOLUTIONS:
        return f"what it reads is the output of a {type(convolution).__name__}, which is no convolution or linear layer"
    if len(proofs.owners[convolution]) != 1:
        return f"the convolution before it stands in {len(proofs.owners[convolution])} places"
    if hooked(layer) or hooked(convolution):
        return "it or the convolution before it has hooks"
    if any(parameters.count(id(parameter)) > 1 for parameter in convolution.parameters()):
        return "the convolution before it shares its parameters"
    outputs = convolution.out_features if isinstance(convolution, nn.Linear) else convolution.out_channels
    if outputs != layer.num_features:
        return f"the layer before it has {outputs} outputs, not {layer.num_features}"
    _rescale(convolution, layer)
    parent, _, child = name.rpartition(".")
    folded = FoldedBatchNorm(getattr(layer, "activation", None), getattr(layer, "act_param", None),
                             2 if isinstance(convolution, nn.Linear) else None).train(layer.training)
    if folded.activation == "prelu":
        folded.slope = layer.slope
    model.get_submodule(parent)._modules[child] = folded
    return None


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

# SPDX-License-Identifier: MIT
"""What convert knows of other packages' layers and code, and what its caller tells it. Packages that are not installed
are stood in for by classes of the same module, name and arithmetic. Models are f64: see test_convert.py."""
import copy
import pickle
import sys
import types

import pytest

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from device import default_device, seeded_f64  # noqa: E402, F401
from test_convert import Of, both, check_same, folded, reasons, shuffled  # noqa: E402
from test_models import load  # noqa: E402
from torch import nn  # noqa: E402

X = (2, 4, 5, 5)


# ---- packages -------------------------------------------------------------------------------------------------------


class FrozenBase(nn.Module):
    def __init__(self, n, eps=None):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(n) + 0.5)
        if eps is not None:
            self.eps = eps


class OfTransformers(FrozenBase):
    """As DetrFrozenBatchNorm2d: a constant eps, the wider of the types."""

    def forward(self, x):
        scale = (self.weight * (self.running_var + 1e-5).rsqrt()).reshape(1, -1, 1, 1)
        return x * scale + (self.bias.reshape(1, -1, 1, 1) - self.running_mean.reshape(1, -1, 1, 1) * scale)


class OfDetectron2(FrozenBase):
    """Two ways, both of the input's type."""

    def forward(self, x):
        if not x.requires_grad:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1).to(x.dtype) + bias.reshape(1, -1, 1, 1).to(x.dtype)


class BitGroupNorm(nn.GroupNorm):
    def __init__(self, activation):
        super().__init__(2, 4)
        self.activation = activation

    def forward(self, hidden_state):
        return self.activation(F.group_norm(hidden_state, self.num_groups, self.weight, self.bias, self.eps))


class Cast:
    comfy_cast_weights, weight_function, bias_function = False, [], []


class ComfyGroupNorm(nn.GroupNorm, Cast):
    def forward(self, *args, **kwargs):
        ops = sys.modules["comfy.ops"]
        ops.run_every_op()
        if not (self.comfy_cast_weights or len(self.weight_function) > 0 or len(self.bias_function) > 0):
            return super().forward(*args, **kwargs)
        weight, bias, offloaded = ops.cast_bias_weight(self, args[0], offloadable=True)
        y = F.group_norm(args[0], self.num_groups, weight, bias, self.eps)
        ops.uncast_bias_weight(self, weight, bias, offloaded)
        return y


class ManualGroupNorm(ComfyGroupNorm):
    comfy_cast_weights = True


def published(monkeypatch, kind, module, qualname, **more):
    """The class as that of another package."""
    kind = type(kind.__name__, (kind,), {"__module__": module, "__qualname__": qualname})
    home = types.ModuleType(module)
    vars(home).update(more)
    owner = home
    *outer, name = qualname.split(".")
    for part in outer:
        vars(owner).setdefault(part, types.SimpleNamespace())
        owner = getattr(owner, part)
    setattr(owner, name, kind)
    monkeypatch.setitem(sys.modules, module, home)
    while "." in module:
        module = module.rpartition(".")[0]
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    return kind


@pytest.mark.parametrize("kind,module,qualname,arguments", [
    (OfDetectron2, "detectron2.layers.batch_norm", "FrozenBatchNorm2d", (4, 1e-3)),
    (OfTransformers, "transformers.models.detr.modeling_detr", "DetrFrozenBatchNorm2d", (4,)),
    (OfTransformers, "transformers.models.rt_detr.modeling_rt_detr", "RTDetrFrozenBatchNorm2d", (4,))],
    ids=["detectron2", "detr", "rt_detr"])
def test_frozen_batch_norms(monkeypatch, kind, module, qualname, arguments):
    kind = published(monkeypatch, kind, module, qualname)
    model, stock, report = both(nn.Sequential(nn.Conv2d(4, 4, 1), kind(*arguments), nn.ReLU()))
    assert folded(report) == {"1": ("relu",)} and isinstance(model[1], kind)
    check_same(model, stock, torch.randn(X))
    x = torch.randn(X).bfloat16()
    wider, y = copy.deepcopy(model[1]).float()(x), copy.deepcopy(stock[1]).float()(x)
    assert wider.dtype == y.dtype == (x.dtype if kind.__name__ == "OfDetectron2" else torch.float32)
    # Stock rounds thrice to bf16 where its result is of that type.
    assert torch.allclose(wider.float(), y.float(), rtol=2.0 ** -7, atol=2.0 ** -6)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.fx.symbolic_trace(model)):
        check_same(other, stock, torch.randn(X))
    nft.revert(model)
    assert type(model[1]) is kind


@pytest.mark.parametrize("activation,done", [(nn.ReLU(), ("relu",)), (nn.Identity(), ()), (nn.Tanh(), ())], ids=str)
def test_group_norm_of_transformers_bit(monkeypatch, activation, done):
    kind = published(monkeypatch, BitGroupNorm, "transformers.models.bit.modeling_bit", "BitGroupNormActivation")
    model, stock, report = both(shuffled(nn.Sequential(nn.Conv2d(4, 4, 1), kind(activation))))
    assert report.layers[0].done and report.layers[0].folded == done
    assert type(model[1].activation) is type(activation)
    check_same(model, stock, torch.randn(X))
    model[1].activation = stock[1].activation = nn.SiLU()
    check_same(model, stock, torch.randn(X))


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("offloads", [True, False])
def test_group_norm_of_comfy(monkeypatch, casts, offloads):
    """Whose weights are cast, and patched, in each call."""
    seen = []

    def cast(layer, x, offloadable=False):
        weight, bias = layer.weight.to(x), layer.bias.to(x)
        for function in layer.weight_function:
            weight = function(weight)
        seen.append("cast")
        return (weight, bias, "stream") if offloadable else (weight, bias)

    more = {"cast_bias_weight": cast, "run_every_op": lambda: seen.append("op"),
            "uncast_bias_weight": lambda layer, weight, bias, stream: seen.append(stream)}
    kind = published(monkeypatch, ManualGroupNorm if casts else ComfyGroupNorm, "comfy.ops",
                     f"{'manual_cast' if casts else 'disable_weight_init'}.GroupNorm", **more)
    model, stock, report = both(shuffled(nn.Sequential(nn.Conv2d(4, 4, 1), kind(2, 4), nn.SiLU())))
    assert folded(report) == {"1": ("silu",)} and isinstance(model[1], kind)
    if not offloads:
        for name in ("uncast_bias_weight", "run_every_op"):
            stock[1].forward = lambda x: F.group_norm(x, 2, *cast(stock[1], x), stock[1].eps)
            monkeypatch.delattr(sys.modules["comfy.ops"], name)
    check_same(model, stock, torch.randn(X))
    for m in (model, stock):
        m[1].weight_function = [lambda weight: 2 * weight]
    seen.clear()
    y = model(torch.randn(X))
    assert seen == (["op", "cast", "stream"] if offloads else ["cast"])
    assert y.shape == X
    check_same(model, stock, torch.randn(X))


# ---- rules ----------------------------------------------------------------------------------------------------------


class GroupNorm32(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.double()).type(x.dtype)


class Standardized(nn.Module):
    """A group norm that is a subclass of nothing."""

    def __init__(self, groups):
        super().__init__()
        self.groups, self.gain = groups, nn.Parameter(torch.rand(4) + 0.5)
        self.activation = "an attribute of its own"

    def forward(self, x):
        return F.group_norm(x, self.groups, self.gain)


def standardized(layer, x, **fused):
    return nft.group_norm(x, layer.groups, layer.gain, **fused)


def standardized_alone(layer, x):
    return nft.group_norm(x, layer.groups, layer.gain)


def test_rules():
    stock = shuffled(nn.Sequential(nn.Conv2d(4, 4, 1), GroupNorm32(2, 4), nn.SiLU(), Standardized(2), nn.ReLU()))
    plain, model, alone = (copy.deepcopy(stock) for _ in range(3))
    report = nft.convert(plain)
    assert "convert takes rules" in reasons(report)["1"] and len(report.layers) == 1
    rules = {GroupNorm32: nn.GroupNorm, Standardized: standardized}
    report = nft.convert(model, rules)
    assert folded(report) == {"1": ("silu",), "3": ("relu",)} and nft.convert(model) == report
    assert isinstance(model[1], (GroupNorm32, nft.GroupNorm)) and isinstance(model[3], Standardized)
    check_same(model, stock, torch.randn(X))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.fx.symbolic_trace(model)):
        check_same(other, copy.deepcopy(stock), torch.randn(X))
    nft.revert(model)
    assert [type(layer) for layer in model] == [type(layer) for layer in stock]
    report = nft.convert(alone, rules={Standardized: standardized_alone})
    assert not report.folded and "its rule takes neither" in reasons(report)["3"]
    check_same(alone, stock, torch.randn(X))


def test_rules_and_prelu():
    """A rule without slope, as all were written before there was one, has no PReLU folded."""
    def before(layer, x, *, post_add=None, activation=None, act_param=None):
        return standardized(layer, x, post_add=post_add, activation=activation, act_param=act_param)

    stock = shuffled(nn.Sequential(Standardized(2), nn.PReLU(4), Standardized(2), nn.ReLU()))
    for rule, what in ((standardized, ("prelu",)), (before, ())):
        model = copy.deepcopy(stock)
        report = nft.convert(model, rules={Standardized: rule})
        assert folded(report) == {**({"0": what} if what else {}), "2": ("relu",)}
        assert what or reasons(report)["0"] == "its rule takes no slope"
        check_same(model, stock, torch.randn(X))
    model[3] = stock[3] = nn.PReLU()
    check_same(model, stock, torch.randn(X))


def test_rules_of_what_is_known_come_first():
    class Half(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.GroupNorm(2, 4), Half(4))
    report = nft.convert(model, {nn.GroupNorm: lambda layer, x: x / 2, Half: nn.BatchNorm2d})
    x = torch.randn(X)
    assert report.layers[0].done and torch.equal(model[0](x), x / 2) and type(model[1]) is not Half
    assert isinstance(model[1], nft.BatchNorm2d)


@pytest.mark.parametrize("rules,message", [
    ({nn.Linear: nn.GroupNorm}, "Linear must be a subclass"), ({GroupNorm32: nn.LayerNorm}, "that is LayerNorm"),
    ({"GroupNorm": nn.GroupNorm}, "'GroupNorm' is not a class"), ({GroupNorm32: "GroupNorm"}, "neither a stock class")],
    ids=str)
def test_bad_rules(rules, message):
    model = nn.Sequential(nn.GroupNorm(2, 4))
    with pytest.raises(TypeError, match=message):
        nft.convert(model, rules)
    assert type(model[0]) is nn.GroupNorm


# ---- code -----------------------------------------------------------------------------------------------------------


def conv_layer(activation):
    """As transformers' ResNetConvLayer: an Identity where there is no activation."""
    act = nn.ReLU() if activation else nn.Identity()
    return Of(lambda s, x: s.act(s.norm(s.conv(x))), norm=nn.BatchNorm2d(4), act=act)


BASIC_LAYER = "residual = x; x = s.layer(x); residual = s.shortcut(residual); x += residual; return s.act(x)"


def test_residual_behind_an_identity():
    layers = [Of(BASIC_LAYER, norm=None, conv=None, shortcut=nn.Identity(), act=nn.ReLU(), layer=nn.Sequential(
        conv_layer(True), conv_layer(False))) for _ in range(2)]
    model, stock, report = both(shuffled(nn.Sequential(nn.Conv2d(4, 4, 1), *layers)))
    assert set(folded(report).values()) == {("relu",), ("add + relu",)} and len(report.folded) == 4
    check_same(model, stock, torch.randn(X))
    for m in (model, stock):
        m[1].layer[1].act = nn.Softplus()
    check_same(model, stock, torch.randn(X))
    nft.revert(model)
    check_same(model, stock, torch.randn(X))


class Adaptive(nn.Module):
    def __new__(cls, code=None, act=None):
        return super().__new__(type("Adaptive", (cls,), {"code": code}) if code is not None else cls)

    def __init__(self, code, act=None):
        super().__init__()
        self.embed, self.norm, self.act = nn.Linear(3, 8), nn.GroupNorm(2, 4), act

    def forward(self, x, t):
        scale, shift = self.embed(t)[:, :4, None, None].clone(), self.embed(t)[:, 4:, None, None]
        return self.code(x, scale, shift)


ADAPTIVE = {
    "diffusers": (lambda s, x, scale, shift: s.act(s.norm(x) * (1 + scale) + shift), "scale + shift + silu"),
    "other order": (lambda s, x, scale, shift: F.relu(shift + (scale + 1) * s.norm(x)), "scale + shift + relu"),
    "torch": (lambda s, x, scale, shift: torch.add(torch.mul(s.norm(x), torch.add(scale, 1.0)), shift),
              "scale + shift"),
    "alone": (lambda s, x, scale, shift: s.norm(x) * (1 + scale) + shift, "scale + shift"),
    "read twice": (lambda s, x, scale, shift: (lambda y: y * y.tanh())(s.norm(x) * (1 + scale) + shift),
                   "scale + shift"),
}
NOT_ADAPTIVE = {
    "another constant": lambda s, x, scale, shift: s.norm(x) * (2 + scale) + shift,
    "no constant": lambda s, x, scale, shift: s.norm(x) * scale + shift,
    "the product is read twice": lambda s, x, scale, shift: (lambda y: y + shift + y)(s.norm(x) * (1 + scale)),
    "the norm is read twice": lambda s, x, scale, shift: (lambda y: y * (1 + scale) + shift + y)(s.norm(x)),
    "shift by the scaled": lambda s, x, scale, shift: s.norm(x) * (1 + scale) - shift,
    "overwritten before": lambda s, x, scale, shift: (lambda f: (scale.mul_(2), s.norm(x) * f + shift)[1])(1 + scale),
    "overwritten": lambda s, x, scale, shift: (lambda y, f: (scale.mul_(2), y * f + shift)[1])(s.norm(x), 1 + scale),
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_group_norms(name):
    code, what = ADAPTIVE[name]
    stock = shuffled(Adaptive(code, nn.SiLU()))
    model = copy.deepcopy(stock)
    assert folded(nft.convert(model)) == {"norm": (what,)}
    check_same(model, stock, torch.randn(X), torch.randn(2, 3))
    # Scales of all samples broadcast, which is not what the layer does.
    check_same(model, stock, torch.randn(X), torch.randn(1, 3))


@pytest.mark.parametrize("name", NOT_ADAPTIVE)
def test_what_is_no_adaptive_group_norm(name):
    model, stock, _ = both(shuffled(Adaptive(NOT_ADAPTIVE[name])))
    assert not any("scale" in what for layer in nft.convert(model).layers for what in layer.folded)
    check_same(model, stock, torch.randn(X), torch.randn(2, 3))


def test_adaptive_group_norm_of_diffusers():
    resnet = load("diffusers.models.resnet")
    stock = shuffled(resnet.ResnetBlock2D(in_channels=32, temb_channels=8, groups=4, time_embedding_norm="scale_shift"))
    model = copy.deepcopy(stock)
    assert folded(nft.convert(model)) == {"norm1": ("silu",), "norm2": ("scale + shift + silu",)}
    check_same(model, stock, torch.randn(2, 32, 5, 5), torch.randn(2, 8))

# SPDX-License-Identifier: MIT
"""convert, revert, fold_batch_norm: what is folded and what must not be, on models that compute the same before and
after. Models are f64: what convert does to the sums' order is then some 1e-14, what a wrong graph does is not."""
import collections
import copy
import dataclasses
import gc
import linecache
import pickle
import sys
import textwrap
import traceback
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from device import DEVICE, default_device, hardswish, seeded_f64  # noqa: E402, F401
from normfuse.torch.convert import FoldedBatchNorm  # noqa: E402
from torch import nn  # noqa: E402


X = (2, 4, 5, 5)


def shuffled(model):
    """With parameters and running statistics that show where they are."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return model


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-12)


def check_same(model, stock, *inputs):
    """Outputs, gradients of input and parameters, and buffers, training and evaluating."""
    for training in (True, False):
        model.train(training), stock.train(training)
        results = []
        for m in (model, stock):
            m.zero_grad()
            x = [t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t in inputs]
            torch.manual_seed(1)
            y = m(*x)
            y.square().sum().backward()
            results.append([y, *(t.grad for t in x if isinstance(t, torch.Tensor)),
                            *(p.grad for _, p in m.named_parameters()), *(b.double() for b in m.buffers())])
        for a, b in zip(*results):
            assert (a is None) == (b is None)
            # A sum that cancels errs by its terms, which are as large as what is beside it.
            assert a is None or torch.allclose(a, b, rtol=1e-10, atol=1e-12 * max([100, *b.abs().flatten().tolist()]))


def both(model):
    """The model, converted, a copy of it as it was, and the report."""
    stock = copy.deepcopy(model)
    return model, stock, nft.convert(model)


def reasons(report):
    return {layer.name: layer.reason for layer in report.layers}


def folded(report):
    return {layer.name: layer.folded for layer in report.layers if layer.folded}


class Block(nn.Module):
    """A Bottleneck with the activation shared, as torchvision has it."""

    def __init__(self, norm=nn.BatchNorm2d, inplace=True, down=False):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 1), norm(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), norm(4)
        self.relu = nn.ReLU(inplace)
        self.down = nn.Sequential(nn.Conv2d(4, 4, 1), norm(4)) if down else None

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.down is not None:
            identity = self.down(x)
        out += identity
        return self.relu(out)


def forward_of(text, arguments="s, x", scope=globals()):
    """A function whose statements are the text's lines, or stand between "; ", as in a file of its own."""
    body = textwrap.indent(textwrap.dedent(text).strip("\n").replace("; ", "\n"), "    ")
    text, file, made = f"def forward({arguments}):\n{body}\n", f"<program {len(linecache.cache)}>", {}
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    exec(compile(text, file, "exec"), scope, made)
    return made["forward"]


class Of(nn.Module):
    """Layers, and a forward given by a test: a function, or a text."""

    @staticmethod
    def _layers():
        return {"conv": nn.Conv2d(4, 4, 1), "norm": nn.GroupNorm(2, 4), "act": nn.SiLU()}

    def __new__(cls, code=None, **children):
        code = forward_of(code, scope=vars(sys.modules[cls.__module__])) if isinstance(code, str) else code
        return super().__new__(type(cls.__name__, (cls,), {"forward": code}) if code is not None else cls)

    def __init__(self, code=None, **children):
        super().__init__()
        for name, child in {**self._layers(), **children}.items():
            setattr(self, name, child)


# ---- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,arguments", [
    ("GroupNorm", (2, 4)), ("BatchNorm1d", (4,)), ("BatchNorm2d", (4,)), ("BatchNorm3d", (4,)),
    ("InstanceNorm1d", (4,)), ("InstanceNorm2d", (4,)), ("InstanceNorm3d", (4,)), ("SyncBatchNorm", (4,))])
def test_a_layer_stays_the_same_object(kind, arguments):
    layer = getattr(nn, kind)(*arguments)
    model = nn.Sequential(layer)
    parameters, text, state = list(layer.parameters()), repr(model), layer.state_dict()
    report = nft.convert(model)
    assert model[0] is layer and type(layer) is getattr(nft, kind)
    assert all(a is b for a, b in zip(layer.parameters(), parameters))
    assert layer.state_dict().keys() == state.keys() and repr(model) == text
    assert [(r.name, r.kind, r.done) for r in report.layers] == [("0", kind, True)]
    nft.revert(model)
    assert type(layer) is getattr(nn, kind) and vars(layer).keys() == vars(getattr(nn, kind)(*arguments)).keys()


def test_the_model_may_be_a_layer():
    layer = nn.GroupNorm(2, 4)
    assert str(nft.convert(layer).layers[0]).startswith("(the model) (GroupNorm): done")
    assert type(layer) is nft.GroupNorm


def test_what_is_left_and_why():
    class Mine(nn.BatchNorm2d):
        pass

    replaced = nn.GroupNorm(2, 4)
    replaced.forward = lambda x: x
    parametrized = nn.utils.parametrizations.weight_norm(nn.GroupNorm(2, 4))
    model = nn.ModuleDict({"mine": Mine(4), "lazy": nn.LazyBatchNorm2d(), "replaced": replaced,
                           "other": nn.LayerNorm(4), "parametrized": parametrized})
    report = nft.convert(model)
    why = reasons(report)
    assert len(report.left) == 4 and not report.converted
    assert "Mine is a subclass" in why["mine"] and "lazy" in why["lazy"] and "forward was replaced" in why["replaced"]
    assert "is a subclass" in why["parametrized"]
    assert str(report).startswith("0 of 4 norms converted; 0 fused with what follows\n4 left, the first one because ")
    assert report.details().splitlines()[0].startswith("mine (Mine): left; ")
    assert len(report.details().splitlines()) == 4


# ---- Sequential -----------------------------------------------------------------------------------------------------


class Hardswish(nn.Module):
    forward = staticmethod(hardswish)


@pytest.mark.parametrize("activation,name,parameter", [
    (nn.ReLU(True), "relu", None), (nn.LeakyReLU(0.3), "leaky_relu", 0.3), (nn.SiLU(), "silu", None),
    (nn.GELU(), "gelu", None), (nn.GELU("tanh"), "gelu_tanh", None), (nn.Hardswish(), "hardswish", None),
    (nn.ELU(0.4), "elu", 0.4), (nn.Mish(), "mish", None), (nn.ReLU6(True), "relu6", None),
    (nn.PReLU().double(), "prelu", None), (nn.PReLU(4).double(), "prelu", None)], ids=str)
def test_neighbours_in_a_sequential(activation, name, parameter):
    model = shuffled(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Identity(), activation.to(DEVICE)))
    model, stock, report = both(model)
    assert folded(report) == {"1": (name,)}
    assert model[1].activation is None and type(model[3]) is type(activation) and repr(model) == repr(stock)
    calls, other = [], copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        forward = nft.BatchNorm2d.forward
        patch.setattr(nft.BatchNorm2d, "forward", lambda *a, **k: calls.append(k) or forward(*a, **k))
        other(torch.randn(X))
    assert [(call["activation"], call["act_param"]) for call in calls] == [(name, parameter)]
    assert calls[0].get("slope") is (other[3].weight if name == "prelu" else None)
    exact = copy.deepcopy(stock)
    if name == "hardswish":
        exact[3] = Hardswish()
    check_same(model, exact, torch.randn(X))
    nft.revert(model)
    assert model[3] is activation and repr(model) == repr(stock)
    assert model[1].__dict__.keys() == stock[1].__dict__.keys()


@pytest.mark.parametrize("follower", [nn.AlphaDropout(), nn.Sigmoid(), nn.Hardtanh()], ids=str)
def test_other_neighbours_are_left(follower):
    model = nn.Sequential(nn.GroupNorm(2, 4), follower, nn.ReLU())
    report = nft.convert(model)
    assert not folded(report) and model[1] is follower and "no activation" in reasons(report)["0"]


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("where", [0, 1])
def test_hooks_are_left_alone(hook, where):
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU())
    seen = []
    getattr(model[where], hook)(lambda *a: seen.append(a) or None)
    report = nft.convert(model)
    assert type(model[0]) is nft.GroupNorm and not folded(report) and "hooks" in reasons(report)["0"]
    model(torch.randn(X).requires_grad_()).sum().backward()
    assert len(seen) == 1


def test_a_layer_that_is_held_and_not_called():
    """nnU-Net's: the layer is an attribute beside the nn.Sequential that calls it."""
    model = nn.ModuleList()
    for calls in (False, True):
        norm = nn.InstanceNorm2d(4, affine=True)
        all = nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.LeakyReLU(0.1))
        model.append(Of(lambda s, x: s.all(s.norm(x) if s.calls else x), norm=norm, all=all, calls=calls))
    model.append(model[0])
    model, stock, report = both(model)
    assert folded(report) == {f"{i}.norm": ("leaky_relu",) for i in (0, 1)}
    for a, b in zip(model, stock):
        check_same(a, b, torch.randn(X))


@pytest.mark.parametrize("dropout", [nn.Dropout, nn.Dropout2d])
@pytest.mark.parametrize("activation,p,folds", [
    (nn.ReLU(True), 0.5, True), (nn.LeakyReLU(0.3), 0.5, True), (nn.SiLU(), 0.5, False), (nn.SiLU(), 0.0, True),
    (nn.ELU(), 1.0, False), (nn.PReLU(), 0.5, True), (nn.PReLU(4), 0.5, True)])
def test_dropouts_between(dropout, activation, p, folds):
    norm = nn.GroupNorm(2, 4)
    model, stock, report = both(shuffled(nn.Sequential(norm, dropout(p), copy.deepcopy(activation).to(norm.weight))))
    assert bool(folded(report)) == folds and (folds or "dropout stands between" in reasons(report)["0"])
    check_same(model, stock, torch.randn(X))
    nft.revert(model)
    assert repr(model) == repr(stock)


def test_another_activation_behind_a_dropout():
    """It need not be what it was before the dropout."""
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.Dropout(0.5), nn.LeakyReLU(0.1))
    stock = copy.deepcopy(model)
    assert folded(nft.convert(model))
    for m in (model, stock):
        m[2] = nn.SiLU()
    check_same(model, stock, torch.randn(X))


@pytest.mark.parametrize("slopes", [1, 4])
def test_prelus_of_a_model(slopes):
    """One behind several layers and an addition, one of its own, a frozen one, one that is hooked later: keys, objects,
    steps of an optimizer and copies are what they are without convert."""
    forward = "x = s.prelu(s.norm(s.conv(x))); x = s.prelu(s.norm2(x) + x)"
    forward += "; return s.hooked(s.norm3(s.frozen(s.norm4(s.own(s.norm3(x))))))"
    model = shuffled(Of(forward, norm2=nn.BatchNorm2d(4), norm3=nn.InstanceNorm2d(4), norm4=nn.BatchNorm2d(4),
                        **{name: nn.PReLU(slopes) for name in ("prelu", "own", "frozen", "hooked")}))
    model.frozen.requires_grad_(False)
    stock = copy.deepcopy(model)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m in (model, stock)]
    keys, parameters = list(model.state_dict()), list(model.parameters())
    report = nft.convert(model)
    assert folded(report) == {"norm": ("prelu",), "norm2": ("add + prelu",), "norm3": ("prelu", "prelu"),
                              "norm4": ("prelu",)}
    assert list(model.state_dict()) == keys and all(a is b for a, b in zip(model.parameters(), parameters))
    x = torch.randn(X)
    check_same(model, stock, x)
    assert model.frozen.weight.grad is None and model.prelu.weight.grad.shape == (slopes,)
    for m, optimizer in zip((model, stock), optimizers):
        m.zero_grad()
        m(x).square().sum().backward()
        optimizer.step()
    check_same(model, stock, x)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    check_same(averaged.module, copy.deepcopy(stock), x)
    for m in (model, stock):
        m.hooked.register_forward_hook(lambda module, args, y: 2 * y)
        m.own.weight = nn.Parameter(torch.full((slopes,), 0.7))
    check_same(model, stock, x)
    nft.revert(model)
    check_same(model, stock, x)
    assert type(model.norm) is nn.GroupNorm and list(model.state_dict()) == keys


def test_prelu_of_other_channels():
    """What stock refuses is refused as stock does it."""
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU(3))
    assert folded(nft.convert(model))
    with pytest.raises(RuntimeError, match="Mismatch of parameter numbers"):
        model(torch.randn(X))


@pytest.mark.parametrize("width", [torch.bfloat16, torch.float16])
def test_prelu_under_autocast(width):
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU(4)).float()
    nft.convert(model)
    x = torch.randn(X, dtype=width)
    with torch.autocast(x.device.type, width):
        y = model(x)
    y.sum().backward()
    assert y.dtype == width and model[1].weight.grad.dtype == torch.float32


# Models, what is fused, and the shape of an input.
CONVERTED = {
    "a layer in three places": (lambda: (lambda n: nn.Sequential(
        nn.Sequential(n, nn.ReLU()), nn.Sequential(n, nn.SiLU()), n))(nn.GroupNorm(2, 4)), {"0.0": ("relu", "silu")},
        X),
    "an activation in two places": (lambda: (lambda act: nn.Sequential(
        nn.GroupNorm(2, 4), act, nn.Conv2d(4, 4, 1), act))(nn.SiLU()), {"0": ("silu",)}, X),
    # PReLU's channels are then along another axis than the layer's.
    **{f"{slopes} slopes without a batch axis": (lambda slopes=slopes: shuffled(nn.Sequential(
        nn.InstanceNorm2d(4), nn.PReLU(slopes))), {"0": ("prelu",)}, (4, 4, 5)) for slopes in (1, 4)},
    "training is looked up in each call": (lambda: Of(
        lambda s, x: F.dropout(F.relu(s.norm(x)), 0.5, s.training), norm=nn.BatchNorm2d(4)), {"norm": ("relu",)}, X),
    "layers in a list are of the code above": (lambda: Of(
        "for norm in s.norms:\n    x = F.mish(norm(x))\nreturn x", norms=nn.ModuleList([nn.GroupNorm(2, 4),
                                                                                   nn.GroupNorm(1, 4)])),
        {"norms.0": ("mish",), "norms.1": ("mish",)}, X),
    "a layer called twice": (lambda: Of(lambda s, x: s.norm(F.relu(s.norm(x)))), {"norm": ("relu",)}, X),
    "other code uses the layers of a block": (
        lambda: shuffled(Of(lambda s, x: s.block(x) + s.block.bn1(x), block=Block())),
        {"block.bn1": ("relu",), "block.bn2": ("add + relu",)}, X),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_models_of_layers_and_code(name):
    make, what, shape = CONVERTED[name]
    model, stock, report = both(make())
    assert folded(report) == what and repr(model) == repr(stock)
    check_same(model, stock, torch.randn(shape))


# ---- code -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda c: nn.GroupNorm(2, c), lambda c: nn.InstanceNorm2d(c,
                                                                                                         affine=True)])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("down", [True, False])
def test_residual_blocks(norm, inplace, down):
    model = shuffled(nn.Sequential(Block(norm, inplace, down), Block(norm, inplace)))
    stock = copy.deepcopy(model)
    keys = list(model.state_dict())
    report = nft.convert(model)
    assert folded(report) == {f"{i}.{n}": (w,) for i in (0, 1) for n, w in (("bn1", "relu"), ("bn2", "add + relu"))}
    assert isinstance(model[0], Block) and type(model[0]).__name__ == "Block" and list(model.state_dict()) == keys
    check_same(model, stock, torch.randn(X))
    nft.revert(model)
    assert type(model[0]) is Block and repr(model) == repr(stock)
    check_same(model, stock, torch.randn(X))


def line_of(error):
    return [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__][-1]


def two_statements(s, x):
    y = s.norm(x)
    y = s.act(y)
    return y


@pytest.mark.parametrize("change", [
    lambda m: delattr(m, "act"), lambda m: setattr(m, "act", nn.PReLU(3)),
    lambda m: setattr(m, "norm", nn.BatchNorm2d(5))], ids=["no activation", "its channels", "the norm's channels"])
def test_errors_of_the_next_statement(change):
    """The norm has been called all the same, and the error is of the line that it is of without convert."""
    model, stock, report = both(Of(two_statements, norm=nn.BatchNorm2d(4)))
    assert folded(report) == {"norm": ("silu",)}
    errors = []
    for m in (model, stock):
        change(m)
        with pytest.raises((AttributeError, RuntimeError)) as caught:
            m(torch.ones(X) * 3)
        errors.append((type(caught.value), line_of(caught.value)))
    assert errors[0] == errors[1] and close(model.norm.running_mean, stock.norm.running_mean)


def test_one_call_does_it_all(monkeypatch):
    """The fused call is really made: nothing is added or activated outside it."""
    model = Block()
    nft.convert(model)
    for name in ("relu", "relu_"):
        monkeypatch.setattr(F, name, None)
    monkeypatch.setattr(nn.ReLU, "forward", None)
    with torch.no_grad():
        assert (model(torch.randn(X)) >= 0).all()


FUNCTIONS = {
    "F.silu": (lambda s, x: F.silu(s.norm(x)), "silu"),
    "inplace": (lambda s, x: F.relu(s.norm(x), inplace=True), "relu"),
    "relu_": (lambda s, x: torch.relu_(s.norm(x)), "relu"),
    "method": (lambda s, x: s.norm(x).relu(), "relu"),
    "slope": (lambda s, x: F.leaky_relu(s.norm(x), 0.2), "leaky_relu"),
    "slope by name": (lambda s, x: F.leaky_relu(s.norm(x), negative_slope=0.2, inplace=True), "leaky_relu"),
    "default slope": (lambda s, x: F.leaky_relu(s.norm(x)), "leaky_relu"),
    "alpha": (lambda s, x: F.elu(s.norm(x), 0.3), "elu"),
    "tanh": (lambda s, x: F.gelu(s.norm(x), approximate="tanh"), "gelu_tanh"),
    "module": (lambda s, x: s.act(s.norm(x)), "silu"),
    "between": (lambda s, x: (s.conv(x), s.act(s.norm(x)))[1], "silu"),
    "add": (lambda s, x: s.act(s.norm(x) + x), "add + silu"),
    "add before": (lambda s, x: s.act(x + s.norm(s.conv(x))), "add + silu"),
    "torch.add": (lambda s, x: s.act(torch.add(s.norm(x), x)), "add + silu"),
    "add_": (lambda s, x: s.act(s.norm(x).add_(x)), "add + silu"),
    "broadcast": (lambda s, x: s.act(s.norm(x) + x[:1, :, :1]), "add + silu"),
    "promotion": (lambda s, x: s.act(s.norm(x.float()) + x), "add + silu"),
    "other name": ("c = s.conv(x); same = c; c *= 2; return F.relu(s.norm(x)) + same", "relu"),
    "identity": (lambda s, x: s.act(s.nothing(s.norm(x))), "silu"),
    "prelu": (lambda s, x: F.prelu(s.norm(x), s.slope), "prelu"),
    "prelu by name": (lambda s, x: torch.prelu(s.norm(x), weight=s.slope), "prelu"),
    "prelu of a module": (lambda s, x: s.prelu(s.norm(x)) + F.prelu(s.norm2(x), s.prelu.weight), "prelu"),
    "prelu method": (lambda s, x: s.norm(x).prelu(s.slope), "prelu"),
    "prelu of no axes": (lambda s, x: F.prelu(s.norm(x), s.number), "prelu"),
    "prelu of a computed slope": (lambda s, x: F.prelu(s.norm(x), s.slope.abs()), "prelu"),
    "prelu later": ("y = s.norm(x); z = s.conv(x); return F.prelu(y, s.slope) + z", "prelu"),
    "in a branch": (lambda s, x: s.act(s.norm(x)) if x.shape[0] > 1 else s.norm(x), "silu"),
    "add + prelu": (lambda s, x: F.prelu(x + s.norm(x), s.slope), "add + prelu"),
    "add + prelu, dropout of 0": (lambda s, x: F.prelu(s.nodrop(s.norm(x)) + s.conv(x), s.slope), "add + prelu"),
    "sum of norms": (lambda s, x: s.act(s.norm(x) + s.norm2(x)), "add + silu"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_code_folds(name):
    code, what = FUNCTIONS[name]
    model = Of(code, nothing=nn.Identity(), norm2=nn.GroupNorm(1, 4), prelu=nn.PReLU(4), nodrop=nn.Dropout(0.0),
               slope=nn.Parameter(torch.rand(4)), number=nn.Parameter(torch.tensor(0.3)))
    if name == "promotion":
        model.norm.float()
    model, stock, report = both(model)
    assert folded(report) == {"norm": (what,), **({"norm2": (what,)} if name == "prelu of a module" else {})}
    x = torch.randn(X)
    if name == "promotion":
        assert model(x).dtype == torch.float64 and torch.allclose(model(x), stock(x), atol=1e-5)
        return
    check_same(model, stock, x)


LEFT = {
    "slope overwritten": ("y = s.norm(x); s.table.mul_(2); return F.prelu(y, s.table)", "runs between"),
    "slope of itself": (lambda s, x: F.prelu(x, s.norm(x).mean().reshape(1)), "no activation"),
    "dropout before prelu": (lambda s, x: F.prelu(F.dropout(s.norm(x), 0.5, s.training), s.table),
                             "no activation"),
    "read twice": ("y = s.norm(x); return s.act(y) + y", "read more than once"),
    "sum read twice": ("y = s.norm(x) + x; return s.act(y) + y", "read more than once"),
    "in place, then read": ("y = s.norm(x); return F.relu(y, inplace=True) + y", "read more than once"),
    "stored": ("s.__dict__['seen'] = y = s.norm(x); return s.act(y)", "stored in `s.__dict__['seen']`"),
    "asked": ("y = s.norm(x)\nif y.shape[0] > 2:\n    y = s.act(y)\nreturn y", "no activation"),
    "another value": ("c = s.conv(x); y = s.norm(x); return s.act(c) + y", "no activation"),
    "returned": (lambda s, x: s.norm(x), "no activation"),
    "scaled sum": (lambda s, x: s.act(torch.add(s.norm(x), x, alpha=2)), "no activation"),
    "scalar": (lambda s, x: s.act(s.norm(x) + 1), "no activation"),
    "doubled": (lambda s, x: s.act((lambda y: y + y)(s.norm(x))), "no activation"),
    "overwritten": ("c = s.conv(x); y = s.norm(c); c.add_(1); return s.act(y + c)", "runs between"),
    "identity overwritten": ("c = s.conv(x); c += s.norm(x); return s.act(c)", "no activation"),
    "other activation": (lambda s, x: torch.sigmoid(s.norm(x)), "no activation"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_code_must_not_fold(name):
    code, why = LEFT[name]
    model = Of(code, drop=nn.Dropout(0.5))
    model.register_buffer("table", torch.tensor([0.5, -0.25, 2.0, 0.1]))
    model, stock, report = both(model)
    assert not folded(report) and type(model.norm) is nft.GroupNorm
    assert why in reasons(report)["norm"], reasons(report)
    if name == "overwritten":  # not even stock has a backward of it
        with torch.no_grad():
            x = torch.randn(X)
            assert close(model(x), stock(x))
        return
    check_same(model, stock, torch.randn(X))


class EndOfUNet(nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        self.conv_in = nn.Conv2d(4, 4, 1)
        self.conv_norm_out, self.conv_act = (nn.GroupNorm(2, 4), nn.SiLU()) if norm else (None, None)
        self.conv_out = nn.Conv2d(4, 4, 1)


class OpenEnd(EndOfUNet):
    """As diffusers' UNet2DConditionModel ends."""

    def forward(self, sample):
        sample = self.conv_in(sample)
        if sample.sum() > 1e9:
            return sample
        if self.conv_norm_out is not None:
            sample = self.conv_norm_out(sample)
            sample = self.conv_act(sample)
        return self.conv_out(sample)


def test_successive_statements():
    model = shuffled(OpenEnd())
    act, stock = model.conv_act, copy.deepcopy(model)
    report = nft.convert(model)
    assert folded(report) == {"conv_norm_out": ("silu",)} and reasons(report) == {"conv_norm_out": None}
    assert isinstance(model, OpenEnd) and model.conv_act is act and model.conv_norm_out.activation is None
    check_same(model, stock, torch.randn(X))
    check_same(pickle.loads(pickle.dumps(copy.deepcopy(model))), stock, torch.randn(X))
    nft.convert(model)
    check_same(model, stock, torch.randn(X))
    nft.revert(model)
    assert model.conv_act is act and type(model.conv_norm_out) is nn.GroupNorm
    check_same(model, stock, torch.randn(X))
    assert not nft.convert(OpenEnd(norm=False)).layers


class NormElsewhere(OpenEnd):
    def forward(self, sample):
        sample = super().forward(sample)
        return self.conv_norm_out(sample)


class Decorated(EndOfUNet):
    scale = 2.0

    @torch.no_grad()
    def forward(self, sample, *, shift=1.0):
        if sample.sum() > 1e9:
            return super().forward(sample)
        try:
            sample = self.conv_norm_out(sample)
            sample = self.conv_act(sample)
        finally:
            sample = sample + shift
        return self.conv_out(sample) * self.scale


@pytest.mark.parametrize("make", [NormElsewhere, Decorated])
def test_statements_are_folded_where_they_stand(make):
    """But where the end of a try statement reads what is between."""
    model = shuffled(make())
    stock = copy.deepcopy(model)
    assert folded(nft.convert(model)) == ({} if make is Decorated else {"conv_norm_out": ("silu",)})
    if make is Decorated:
        x = torch.randn(X)
        assert close(model(x, shift=2.0), stock(x, shift=2.0)) and not model(x).requires_grad
        model.scale = stock.scale = 3.0
        assert close(model(x), stock(x))
        return
    check_same(model, stock, torch.randn(X))


def test_a_forward_without_text_is_left():
    text = "def forward(self, sample):\n    if sample.sum() > 1e9:\n        return sample\n"
    text += "    sample = self.conv_norm_out(sample)\n    sample = self.conv_act(sample)\n    return sample\n"
    scope = {}
    exec(text, scope)
    model = type("NoText", (EndOfUNet,), {"forward": scope["forward"]})()
    stock = copy.deepcopy(model)
    assert not folded(nft.convert(model))
    check_same(model, stock, torch.randn(X))


@pytest.mark.parametrize("replaced", [False, True])
def test_statements_that_must_not_be_folded(replaced):
    """Where the activation has a hook, and where the forward was replaced on the object."""
    model = shuffled(OpenEnd())
    stock = copy.deepcopy(model)
    for m in (model, stock):
        if replaced:
            m.forward = lambda sample, m=m: m.conv_out(m.conv_norm_out(sample))
        else:
            m.conv_act.register_forward_hook(lambda *_: None)
    report = nft.convert(model)
    assert not folded(report) and report.layers[0].reason and type(model.conv_act) is nn.SiLU
    check_same(model, stock, torch.randn(X))


def test_statements_of_a_layer_that_stands_twice():
    pair = nn.ModuleDict({"a": OpenEnd(), "b": OpenEnd()})
    pair["b"].conv_norm_out = pair["a"].conv_norm_out
    assert folded(nft.convert(pair)) == {"a.conv_norm_out": ("silu", "silu")}


def test_convert_leaves_no_marks():
    class Counts(Of):
        calls = 0

        def forward(self, x):
            self.seen.add_(1)
            self.calls += 1
            return F.relu(self.norm(x))

    model = Counts()
    model.register_buffer("seen", torch.zeros(()))
    report = nft.convert(model)
    assert folded(report) == {"norm": ("relu",)} and model.calls == 0 and model.seen == 0 and model.training
    model(torch.randn(X))
    assert model.calls == 1 and model.seen == 1


def optional(self, x, temb, skip=None, double=False, *args, **kwargs):
    """As diffusers' ResnetBlock2D: what it does depends on what it is given."""
    if args or kwargs:
        raise TypeError("no more")
    y = self.act(self.norm1(x))
    if temb is not None:
        y = y + self.act(temb)
    if skip is not None:
        return self.norm2(y), skip
    z = self.norm2(y)
    if not torch.is_tensor(temb):
        return z
    return self.act(z) * (self.scale if double else 1)


def of_options():
    return Of(optional, norm1=nn.GroupNorm(2, 4), norm2=nn.GroupNorm(2, 4), norm=None, scale=2.0)


def test_kinds_of_call():
    model, stock, report = both(of_options())
    assert folded(report) == {"norm1": ("silu",), "norm2": ("silu",)}
    x, t, skip = torch.randn(X), torch.randn(X), torch.randn(X)
    for call in (lambda m: m(x, t), lambda m: m(x, None), lambda m: m(x, temb=t), lambda m: m(temb=t, x=x),
                 lambda m: m(x, t, None), lambda m: m(x, t, None, True), lambda m: m(x, t, double=True)):
        for training in (True, False):
            assert close(call(model.train(training)), call(stock.train(training)))
    for a, b in zip(model(x, t, skip), stock(x, t, skip)):
        assert close(a, b)
    for bad in (lambda m: m(x), lambda m: m(x, t, None, False, 1), lambda m: m(x, t, more=1)):
        with pytest.raises(TypeError):
            bad(model)


def test_changed_attributes():
    model, x, t = of_options(), torch.randn(X), torch.randn(X)
    stock = copy.deepcopy(model)
    nft.convert(model)
    model.scale = 2.0  # as it was
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train(), model.eval(), model.to(torch.float64), model.requires_grad_(False)
    model.scale = stock.scale = 3.0  # which only calls with double=True read
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert close(model(x, t), stock(x, t))
    assert close(model(x, t, double=True), stock(x, t, double=True))
    assert folded(nft.convert(model)) == {"norm1": ("silu",), "norm2": ("silu",)}
    assert close(model(x, t, double=True), stock(x, t, double=True))
    model.act = stock.act = nn.ReLU()
    assert close(model(x, t), stock(x, t))
    type(stock).act = nn.Sigmoid()  # Python finds it before the module of that name
    assert close(model(x, t), stock(x, t))
    for m in (model, stock):
        m.__dict__["act"] = nn.Tanh()
    assert close(model(x, t), stock(x, t))
    del type(stock).act


def test_a_dict_of_modules_may_have_code():
    """As torchvision's IntermediateLayerGetter, which gives an OrderedDict of what is between, too."""
    class Getter(nn.ModuleDict):
        def __init__(self, kind):
            super().__init__({"norm": nn.GroupNorm(2, 4), "relu": nn.ReLU()})
            self.kind = kind

        def forward(self, x):
            found = self.kind()
            for name, module in self.items():
                found[name] = x = module(x)
            del found["norm"]
            return found

    class Other(collections.OrderedDict):
        pass

    for kind in (collections.OrderedDict, dict, Other):
        model = Getter(kind)
        stock = copy.deepcopy(model)
        assert not folded(nft.convert(model))
        x = torch.randn(X)
        assert type(model(x)) is kind and list(model(x)) == ["relu"] and close(model(x)["relu"], stock(x)["relu"])


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """As diffusers' BaseOutput and transformers' ModelOutput."""
    sample: torch.Tensor
    rest: tuple = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


def test_outputs_with_names_stay_what_they_are():
    model = Of(lambda s, x: Output(s.act(s.norm(x)), rest=(x, 1)))
    stock = copy.deepcopy(model)
    assert folded(nft.convert(model)) == {"norm": ("silu",)}
    x = torch.randn(X)
    got = model(x)
    assert type(got) is Output and list(got) == ["sample", "rest"] and got.rest[0] is x and got.rest[1] == 1
    assert close(got["sample"], stock(x).sample) and got.sample is got["sample"]


# ---- containers that end in a layer ---------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """nnU-Net's ConvDropoutNormReLU."""

    def __init__(self, norm, *after):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), norm(4)
        self.all_modules = nn.Sequential(self.conv, nn.Dropout(0.5), self.norm, *after)

    def forward(self, x):
        return self.all_modules(x)


class Residual(nn.Module):
    """nnU-Net's BasicBlockD, with dropouts in both branches."""

    def __init__(self, norm=nn.BatchNorm2d, skip=True):
        super().__init__()
        self.conv1, self.conv2 = Wrapped(norm, nn.LeakyReLU(0.1, True)), Wrapped(norm)
        self.skip = nn.Sequential(nn.Dropout(0.5), Wrapped(norm)) if skip else nn.Identity()
        self.act = nn.LeakyReLU(0.1, True)

    def forward(self, x):
        out = self.conv2(self.conv1(x))
        out += self.skip(x)
        return self.act(out)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d, lambda c: nn.GroupNorm(2, c)])
@pytest.mark.parametrize("skip", [True, False])
def test_containers_that_end_in_a_layer(norm, skip):
    model = shuffled(nn.Sequential(Residual(norm, skip), Residual(norm, skip)))
    stock = copy.deepcopy(model)
    keys = list(model.state_dict())
    report = nft.convert(model)
    want = {f"{i}.conv{k}.norm": (w,) for i in (0, 1) for k, w in ((1, "leaky_relu"), (2, "add + leaky_relu"))}
    assert folded(report) == want and list(model.state_dict()) == keys
    check_same(model, stock, torch.randn(X))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)) if norm is nn.BatchNorm2d else model):
        check_same(other, copy.deepcopy(stock), torch.randn(X))
    nft.revert(model)
    assert type(model[0]) is Residual and repr(model) == repr(stock)
    check_same(model, stock, torch.randn(X))


CONTAINERS = {
    "sequential": (lambda n: nn.Sequential(nn.Conv2d(4, 4, 1), n), True),
    "the layer alone": (lambda n: nn.Sequential(n), True),
    "identities": (lambda n: nn.Sequential(n, nn.Identity(), nn.Identity()), True),
    "nested": (lambda n: nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(n)), nn.Identity()), True),
    "activation of its own": (lambda n: nn.Sequential(n, nn.ReLU()), False),
    "something after": (lambda n: nn.Sequential(n, nn.Conv2d(4, 4, 1)), False),
    "empty end": (lambda n: nn.Sequential(n, nn.Sequential()), True),
    "hooked": (lambda n: hooked(nn.Sequential(n)), False),
    "replaced forward": (lambda n: replaced(nn.Sequential(n)), False),
    "code that does more": (lambda n: Of(lambda s, x: s.norm(x) * 2, norm=n), False),
    "code that drops it": (lambda n: Of(lambda s, x: (s.norm(x), x)[1], norm=n), False),
    "code that calls it twice": (lambda n: Of(lambda s, x: s.norm(s.norm(x)), norm=n), True),
    "code that does more before": (lambda n: Of(lambda s, x: s.norm(s.conv(x) * 2), norm=n), True),
    "code with an identity after it": (lambda n: Of(lambda s, x: s.act(s.norm(x)), norm=n, act=nn.Identity()), True),
    "code that reads it again": (lambda n: Of(lambda s, x: (lambda y: (y, y * 2)[0])(s.norm(x)), norm=n), False),
}


def hooked(module):
    module.register_forward_hook(lambda module, args, y: 2 * y)
    return module


def replaced(module):
    module.forward = lambda x: 2 * type(module).forward(module, x)
    return module


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("adds", [True, False])
def test_what_ends_in_a_layer(name, adds):
    make, ends = CONTAINERS[name]
    model = Of((lambda s, x: s.act(s.branch(x) + x)) if adds else (lambda s, x: s.act(s.branch(x))),
               branch=make(nn.GroupNorm(2, 4)), norm=nn.Identity())
    model = shuffled(model)
    stock = copy.deepcopy(model)
    if name == "replaced forward":
        replaced(stock.branch)  # a copy's is bound to the original
    report = nft.convert(model)
    mine = next(iter(folded(report).values()), ())
    assert mine == ((("add + silu" if adds else "silu"),) if ends else ("relu",) if "own" in name else ())
    check_same(model, stock, torch.randn(X))


CHANGES = {
    "a hook on the container": lambda m, seen: m.branch.register_forward_hook(lambda *a: seen.append(a[2].clone())),
    "a hook inside": lambda m, seen: m.branch[1].register_forward_hook(lambda *a: seen.append(a[2].clone())),
    "a hook on the layer": lambda m, seen: m.branch[1][0].register_forward_hook(lambda *a: seen.append(a[2].clone())),
    "one more child": lambda m, seen: m.branch[1].append(nn.Tanh()),
    "another layer": lambda m, seen: m.branch[1].__setitem__(0, nn.Tanh()),
    "a layer less": lambda m, seen: m.branch[1].__delitem__(0),
    "another forward": lambda m, seen: setattr(m.branch, "forward", lambda x: 3 * x),
}


@pytest.mark.parametrize("name", CHANGES)
def test_containers_that_change_later(name):
    model = Of(lambda s, x: s.act(s.branch(x) + x), norm=nn.Identity(),
               branch=nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.GroupNorm(2, 4))))
    stock = copy.deepcopy(model)
    assert folded(nft.convert(model)) == {"branch.1.0": ("add + silu",)}
    seen = ([], [])
    CHANGES[name](model, seen[0]), CHANGES[name](stock, seen[1])
    x = torch.randn(X)
    assert close(model(x), stock(x)) and len(seen[0]) == len(seen[1]) == ("hook" in name)
    assert all(close(a, b) for a, b in zip(*seen))


def test_the_fused_call_of_a_container_is_made(monkeypatch):
    model = Residual(skip=False)
    nft.convert(model)
    monkeypatch.setattr(nn.LeakyReLU, "forward", None)
    model(torch.randn(X))


def test_batch_norms_at_the_end_of_containers_fold_into_convolutions():
    model = shuffled(nn.Sequential(Of(lambda s, x: s.act(s.branch(x) + x), norm=nn.Identity(),
                                      branch=nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))))
    assert folded(nft.convert(copy.deepcopy(model))) == {"0.branch.1": ("add + silu",)}
    check_folds(model, torch.randn(X))


# ---- copies, compilers ----------------------------------------------------------------------------------------------


def test_copies_of_a_converted_model():
    model, stock, _ = both(nn.Sequential(Block(), Block(), nn.GroupNorm(2, 4), nn.ELU(0.2)))
    x = torch.randn(X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check_same(other, copy.deepcopy(stock), x)
        assert other[0] is not model[0] and type(other[0]) is type(model[0]) is type(model[1])
        nft.revert(other)
        assert type(other[0]) is Block and repr(other) == repr(stock)
    assert "Block" not in repr(type(model[1])) or isinstance(model[1], Block)
    reference = weakref.ref(model[0])
    del model
    gc.collect()
    assert reference() is None


def test_converting_again():
    model = nn.Sequential(Block(), nn.GroupNorm(2, 4), nn.ReLU())
    stock = copy.deepcopy(model)
    first = nft.convert(model)
    again = nft.convert(model)
    assert len(again.converted) == 3 and folded(again) == folded(first) and str(again) == str(first)
    check_same(model, stock, torch.randn(X))
    nft.revert(model), nft.revert(model)
    assert repr(model) == repr(stock)


def test_layers_made_as_ours_stay_ours():
    model = nn.Sequential(nft.GroupNorm(2, 4), nn.SiLU(), nft.GroupNorm(2, 4, activation="relu"), nn.ReLU())
    stock = copy.deepcopy(model)
    assert folded(nft.convert(model)) == {"0": ("silu",)}
    check_same(model, stock, torch.randn(X))
    nft.revert(model)
    assert type(model[0]) is nft.GroupNorm and model[0].activation is None and model[2].activation == "relu"


def test_a_converted_model_compiles_whole():
    model = nn.Sequential(Block(), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.SiLU(), Residual(skip=False).eval(),
                          nn.GroupNorm(2, 4), nn.PReLU(4),
                          Of(lambda s, x: F.prelu(s.norm(x), s.slope), slope=nn.Parameter(torch.rand(4))))
    nft.convert(model)
    x, graphs = torch.randn(X), []
    torch._dynamo.reset()

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    torch.compile(model, fullgraph=True, backend=backend)(x)
    assert "torch.prelu" not in graphs[0] and "PReLU" not in graphs[0] and len(graphs) == 1
    torch._dynamo.reset()
    check_same(torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager"), model, x)


def test_an_optimizer_made_before_goes_on():
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nft.convert(model)
    before = model.bn1.weight.clone()
    model(torch.randn(X)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.bn1.weight)


# ---- fold_batch_norm ------------------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "Conv1d": (lambda: nn.Conv1d(4, 6, 2, bias=False), nn.BatchNorm1d, (2, 4, 5)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 2, groups=2), nn.BatchNorm2d, (2, 4, 5, 5)),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 2), nn.BatchNorm3d, (2, 4, 3, 3, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 2, bias=False), nn.BatchNorm1d, (2, 4, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d, (2, 4, 5, 5)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 6, 2, groups=2), nn.SyncBatchNorm, (2, 4, 3, 3, 3)),
    "Linear": (lambda: nn.Linear(4, 6), nn.BatchNorm1d, (5, 4)),
}


def check_folds(model, x, converted=True):
    """All batch norms of the model are folded, and it computes the same."""
    want = model.eval()(x)
    if converted:
        nft.convert(model)
    report = nft.fold_batch_norm(model)
    assert report.converted and not report.left and torch.allclose(model(x), want, rtol=1e-12, atol=1e-12)
    return want


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("converted", [True, False])
def test_batch_norm_folds_into(kind, affine, converted):
    make, norm, shape = CONVOLUTIONS[kind]
    model = shuffled(nn.Sequential(make(), norm(6, affine=affine), nn.LeakyReLU(0.3)))
    x = torch.randn(shape)
    want = check_folds(model, x, converted)
    assert type(model[1]) is FoldedBatchNorm and not list(model[1].parameters())
    nft.revert(model)
    assert torch.allclose(model(x), want, rtol=1e-12, atol=1e-12) and model[2].negative_slope == 0.3


@pytest.mark.parametrize("own", [True, False])
def test_batch_norm_with_prelu_folds(own):
    """The slope of a layer of ours goes with it; that of a module stays there."""
    norm = nft.BatchNorm2d(4, activation="prelu", num_parameters=4) if own else nn.BatchNorm2d(4)
    model = shuffled(nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Identity() if own else nn.PReLU(4)))
    check_folds(model, torch.randn(X))
    assert type(model[1]) is FoldedBatchNorm and list(model[1].state_dict()) == (["slope"] if own else [])
    assert not own or model[1].slope is norm.slope


@pytest.mark.parametrize("converted", [True, False])
def test_batch_norms_of_blocks_fold(converted):
    model = shuffled(nn.Sequential(Block(down=True), Block()))
    check_folds(model, torch.randn(X), converted)
    assert sum(type(module) is FoldedBatchNorm for module in model.modules()) == 5


def test_folding_rounds_once():
    model = shuffled(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, eps=1e-3))).float().eval()
    exact = copy.deepcopy(model).double()
    nft.fold_batch_norm(model), nft.fold_batch_norm(exact)
    for a, b in zip(model.parameters(), exact.parameters()):
        assert torch.equal(a, b.float())


def test_linear_with_positions_is_refused():
    """BatchNorm1d of [N, C, L] has its channels where a linear layer has positions: only a call can tell."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval()
    nft.fold_batch_norm(model)
    with pytest.raises(ValueError, match="input of 2 axes; this one has 3"):
        model(torch.randn(2, 6, 4))



FOLD_LEFT = {
    "training": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).train(), "it is training"),
    "no statistics": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).eval(),
                      "no running statistics"),
    "activation between": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)).eval(),
                           "output of a ReLU"),
    "first": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)).eval(), "nothing stands before"),
    "read twice": (lambda: Of(lambda s, x: (lambda c: s.bn(c) + c)(s.conv(x)), bn=nn.BatchNorm2d(4)).eval(),
                   "does not call it at one place"),
    "two convolutions": (lambda: Of(lambda s, x: s.bn(s.conv(x)) + s.bn(s.conv2(x)), bn=nn.BatchNorm2d(4),
                                    conv2=nn.Conv2d(4, 4, 1)).eval(), "does not call it at one place"),
    "called twice": (lambda: Of(lambda s, x: s.conv(s.bn(s.conv(x))), bn=nn.BatchNorm2d(4)).eval(), "does not call it at one place"),
    "alone": (lambda: nn.BatchNorm2d(4).eval(), "stands alone"),
    "in a list": (lambda: Of(lambda s, x: s.norms[0](s.conv(x)), norms=nn.ModuleList([nn.BatchNorm2d(4)])).eval(),
                  "does not call it at one place"),
}


@pytest.mark.parametrize("name", FOLD_LEFT)
def test_batch_norms_that_must_stay(name):
    make, why = FOLD_LEFT[name]
    model = shuffled(make())
    stock = copy.deepcopy(model)
    report = nft.fold_batch_norm(model)
    assert all(why in layer.reason for layer in report.left) and report.left and not report.converted
    x = torch.randn(X)
    assert torch.equal(model(x), stock(x))


def test_shared_convolutions_stay():
    conv, norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    other = nn.Conv2d(4, 4, 1)
    other.weight = nn.Parameter(torch.randn(4, 4, 1, 1))
    last = nn.Conv2d(4, 4, 1)
    last.weight = other.weight
    hooked = nn.Conv2d(4, 4, 1)
    hooked.register_forward_hook(lambda *a: None)
    model = shuffled(nn.Sequential(
        nn.Sequential(conv, nn.BatchNorm2d(4)), nn.Sequential(conv), nn.Sequential(nn.Conv2d(4, 4, 1), norm),
        nn.Sequential(nn.Conv2d(4, 4, 1), norm), nn.Sequential(other, nn.BatchNorm2d(4)), last,
        nn.Sequential(hooked, nn.BatchNorm2d(4)))).eval()
    stock = copy.deepcopy(model)
    why = reasons(nft.fold_batch_norm(model))
    assert "convolution before it stands in 2 places" in why["0.1"] and "it stands in 2 places" in why["2.1"]
    assert "shares its parameters" in why["4.1"] and "hooks" in why["6.1"]
    x = torch.randn(X)
    assert torch.equal(model(x), stock(x))

# SPDX-License-Identifier: MIT
"""convert keeps what a program means: each case is a model as it was beside its converted copy, treated alike before or
after convert. Compared: outputs, whether they need gradients, gradients, buffers, and which operators ran how often."""
import collections
import contextlib
import copy
import logging
import operator
import pickle
import random
import types
import warnings

import pytest

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
import numpy as np  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from device import DEVICE, default_device, of_the_cpu  # noqa: E402, F401
from normfuse.torch import _calls  # noqa: E402
from test_convert import Of, both, folded, forward_of  # noqa: E402
from test_models import load, load_torchvision  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

X = (2, 4, 5, 5)


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    monkeypatch.setattr(_calls, "BIAS_DEVICES", {"cpu", "cuda"})  # what moves there must mean the same, too
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Operators(TorchDispatchMode):
    """Counts operators. Convolutions count as "biased" or "bare"; those of ours with pre_bias have "+bias" after their
    names."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name == "convolution":
            name = "bare" if args[2] is None else "biased"
        elif func.namespace == "normfuse":
            given = dict(zip((argument.name for argument in func._schema.arguments), args))
            name += "+bias" if given.get("pre_bias") is not None else ""
        self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def convolutions(self):
        return self.counts["bare"] + self.counts["biased"]


def step(model, x, training, context=contextlib.nullcontext):
    """What one step of a model does, as a list of things to compare."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    model.train(training).zero_grad()
    x = x.clone().requires_grad_()
    with Operators() as operators, context():
        y = model(x)
        if y.requires_grad:
            (y.double() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach().double(), y.dtype, y.requires_grad, x.grad, *(p.grad for p in model.parameters()),
            *(b.double() for b in model.buffers()), operators.convolutions()]


def check_same(model, stock, x=None, context=contextlib.nullcontext, modes=(True, False, True)):
    x = torch.randn(X) if x is None else x
    for training in modes:
        for a, b in zip(step(model, x, training, context), step(stock, x, training, context), strict=True):
            if isinstance(b, torch.Tensor):
                assert a is not None
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
            else:
                assert a == b


class Block(Of):
    @staticmethod
    def _layers():
        return {"conv": nn.Conv2d(4, 4, 1), "bn": nn.BatchNorm2d(4), "act": nn.ReLU()}


# ---- what a forward does beside -------------------------------------------------------------------------------------


class Decorated(Block):
    @torch.no_grad()
    def features(self, x):
        return self.conv(x)

    def forward(self, x):
        return F.relu(self.bn(self.features(x)))


class Checkpointed(Block):
    def body(self, x):
        return self.conv(x).tanh()

    def forward(self, x):
        return checkpoint(self.body, F.relu(self.bn(self.conv(x))), use_reentrant=False)


def draws(self, x):
    return F.relu(self.bn(x)) * self.draw()


GENERATOR = random.Random(3)


class Bare(list):
    """A context that is false."""

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


def logs(self, x):
    y = F.relu(self.bn(x))
    if isinstance(self.log, dict):
        self.log["y"] = y
    else:
        self.log.append(y)
    return y


class Store:
    def __init__(self):
        self.last, self.count = None, 0

    def append(self, y):
        self.last = y
        self.count += 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


BESIDE = {
    "no_grad": lambda: Block("""
        with torch.no_grad():
            x = s.conv(x)
        return F.relu(s.bn(x))"""),
    "no_grad as a decorator": Decorated,
    "set_grad_enabled and back": lambda: Block("""
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(s.training)
        y = F.relu(s.bn(s.conv(x)))
        torch.set_grad_enabled(before)
        return y"""),
    "inference_mode": lambda: Block("""
        with torch.inference_mode():
            scale = s.conv(x).mean()
        return F.relu(s.bn(x)) * float(1) + scale.clone()"""),
    "autocast": lambda: Block("""
        with torch.autocast(DEVICE, enabled=False):
            x = s.conv(x.to(s.conv.weight.dtype))
        return F.relu(s.bn(x))"""),
    "checkpoint": Checkpointed,
    "random": lambda: Block(draws, draw=random.random),
    "random's generator": lambda: Block(draws, draw=GENERATOR.random),
    "numpy's random": lambda: Block(draws, draw=np.random.rand),
    "torch's random": lambda: Block(draws, draw=lambda: torch.rand(1).item()),
    "is_grad_enabled": lambda: Block(lambda s, x: F.relu(s.bn(x)) * (2 if torch.is_grad_enabled() else 3)),
    "is_autocast_enabled": lambda: Block(lambda s, x: F.relu(s.bn(x)) * (2 if torch.is_autocast_enabled(DEVICE) else 3)),
    "is_compiling": lambda: Block(lambda s, x: F.relu(s.bn(x)) * (2 if torch.compiler.is_compiling() else 3)),
    "is_tracing": lambda: Block(lambda s, x: F.relu(s.bn(x)) * (2 if torch.jit.is_tracing() else 3)),
    "record_function": lambda: Block("""
        with torch.profiler.record_function("mine"):
            x = s.conv(x)
        return F.relu(s.bn(x))"""),
    "a context that is false": lambda: Block("""
        with Bare():
            x = s.conv(x)
        return F.relu(s.bn(x))"""),
    "try": lambda: Block("""
        y = F.relu(s.bn(x))
        try:
            large = bool(y.max() > 1e-6)
        except Exception:
            large = False
        return y * 2 if large else y"""),
    "list": lambda: Block(logs, log=[]),
    "dict": lambda: Block(logs, log={}),
    "deque": lambda: Block(logs, log=collections.deque()),
    "object": lambda: Block(logs, log=Store()),
    "autograd.Function": lambda: Block(lambda s, x: F.relu(s.bn(Doubled.apply(x)))),
}


LOGGER = logging.getLogger("normfuse's tests of convert")


def test_a_logger_keeps_nothing_of_a_model():
    model, stock, report = both(Block("""
        if LOGGER.isEnabledFor(logging.DEBUG):
            LOGGER.debug("block")
        return F.relu(s.bn(s.conv(x)))"""))
    assert folded(report) == {"bn": ("relu",)}  # isEnabledFor fills a cache of the logger's
    check_same(model, stock)


@pytest.mark.parametrize("name", BESIDE)
def test_what_a_forward_does_beside(name):
    model = BESIDE[name]()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), GENERATOR.getstate()
    model, stock, report = both(model)
    assert folded(report) == {"bn": ("relu",)}
    assert states[:2] == (random.getstate(), np.random.get_state()[1].tolist()) and states[3] == GENERATOR.getstate()
    assert torch.equal(states[2], torch.get_rng_state()) and torch.is_grad_enabled()
    if "draw" in vars(model):
        results = [float(step(model, torch.ones(X), False)[0].sum()) for _ in range(2)]
        assert (results[0] == results[1]) == (name != "random's generator")  # which `step` does not seed
        assert not torch.equal(model(torch.ones(X)), model(torch.ones(X)))
        return
    check_same(model, stock)
    if name in ("autocast", "is_autocast_enabled"):
        check_same(model, stock, context=lambda: torch.autocast(DEVICE, torch.bfloat16), modes=(False, True))
    if name == "is_grad_enabled":
        with torch.no_grad():
            check_same(model, stock)
    if name == "is_compiling":
        torch._dynamo.reset()
        compiled = [torch.compile(m, backend="eager") for m in (model, stock)]
        check_same(*compiled, modes=(False,))
    if name == "is_tracing":
        x = torch.randn(X)
        a, b = (torch.jit.trace(m.eval().requires_grad_(False), x)(x) for m in (model, stock))
        torch.testing.assert_close(a, b)
    if name == "record_function":
        with torch.profiler.profile() as profile:
            model(torch.randn(X))
        assert "mine" in {event.key for event in profile.key_averages()}
    if name in ("list", "deque"):
        assert len(model.log) == len(stock.log) == 3 and all(type(y) is torch.Tensor for y in model.log)


def test_grad_mode_set_in_a_forward():
    model, stock, _ = both(Block("torch.set_grad_enabled(s.training); return F.relu(s.bn(s.conv(x)))"))
    assert torch.is_grad_enabled()
    for m in (model, stock):
        try:
            assert not m.eval()(torch.randn(X).requires_grad_()).requires_grad
        finally:
            torch.set_grad_enabled(True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_checkpointing_stays(when):
    load_torchvision()
    stock = load("timm").create_model("resnet18", layers=(1, 1, 1, 1), channels=(8, 8, 8, 8), num_classes=3)
    for module in stock.modules():  # stock updates running statistics once more in each backward: see test_tools.py
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = module.num_batches_tracked = None
    model = copy.deepcopy(stock)
    if when == "before":
        for m in (model, stock):
            m.set_grad_checkpointing()
    nft.convert(model)
    if when == "after":
        for m in (model, stock):
            m.set_grad_checkpointing()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(model, stock, torch.randn(2, 3, 32, 32), modes=(True,))


def test_checkpointing_of_an_autoencoder_stays():
    load_torchvision()
    stock = load("diffusers").AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",), block_out_channels=(32,))
    stock.enable_gradient_checkpointing()
    model = copy.deepcopy(stock)
    report = nft.convert(model)
    assert {"encoder.conv_norm_out", "decoder.conv_norm_out"} <= folded(report).keys()
    x = torch.randn(1, 3, 8, 8)
    counts = []
    for m in (model.train(), stock.train()):
        with Operators() as operators:
            m.decode(m.encode(x, return_dict=False)[0].mean, return_dict=False)[0].sum().backward()
        counts.append(operators.convolutions())
    assert counts[0] == counts[1]


# ---- what changes after convert -------------------------------------------------------------------------------------


class Settings:
    def __init__(self):
        self.double, self.nested = False, types.SimpleNamespace(factor=2.0)


SWITCH = False
FACTORS = {"a": 2.0, "b": [1, 2]}


def helper(y):
    return y * 3


class Reads(Block):
    """A forward that ends in code given by a test."""

    def __new__(cls, code=None):
        return nn.Module.__new__(type("Reads", (cls,), {"code": code}) if code is not None else cls)

    def __init__(self, code):
        super().__init__()
        self.settings, self.factors, self.flags = Settings(), [2.0, 3.0], {"on": True}
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.Tanh()])
        self.parts = nn.ModuleDict({"drop": nn.Dropout(0.0)})
        self.second = self.act

    def forward(self, x):
        return self.code(self.act(self.bn(x)))


THROUGH_LAYERS = forward_of("for layer in s.layers:\n    y = layer(y)\nreturn y", "s, y")
READ = {
    "flag of an object": (lambda s, y: y * (2 if s.settings.double else 1),
                          lambda m: setattr(m.settings, "double", True)),
    "flag of an object's object": (lambda s, y: y * s.settings.nested.factor,
                                   lambda m: setattr(m.settings.nested, "factor", 5.0)),
    "element of a list": (lambda s, y: y * s.factors[0], lambda m: operator.setitem(m.factors, 0, 5.0)),
    "elements of a list": (lambda s, y: sum(y * f for f in s.factors), lambda m: m.factors.append(5.0)),
    "value of a dict": (lambda s, y: y * 2 if s.flags["on"] else y, lambda m: m.flags.update(on=False)),
    "global": (lambda s, y: y * 2 if SWITCH else y, lambda m: globals().update(SWITCH=True)),
    "global dict": (lambda s, y: y * FACTORS["a"], lambda m: globals().update(FACTORS={"a": 4.0})),
    "global function": (lambda s, y: helper(y), lambda m: globals().update(helper=lambda y: y * 4)),
    "attribute of a child": (lambda s, y: y[:, :, ::s.conv.stride[0]], lambda m: setattr(m.conv, "stride", (2, 2))),
    "attribute of a child's child": (lambda s, y: y * (1 + s.parts["drop"].p),
                                     lambda m: setattr(m.parts["drop"], "p", 0.25)),
    "list of modules": (THROUGH_LAYERS, lambda m: m.layers.append(nn.Tanh())),
    "module of a list": (THROUGH_LAYERS, lambda m: operator.setitem(m.layers, 1, nn.Sigmoid())),
    "one module by two names": (lambda s, y: s.second(s.conv(y)), lambda m: setattr(m, "second", nn.Tanh())),
    "_modules": (lambda s, y: y, lambda m: m._modules.update(act=nn.SiLU())),
    "__dict__": (lambda s, y: y * s.factors[0], lambda m: vars(m).update(factors=[7.0])),
}


@pytest.fixture
def same_globals():
    before = dict(globals())
    yield
    globals().update(before)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("copied", [False, True])
def test_what_changes_after_convert_is_seen(name, copied, same_globals):
    code, change = READ[name]
    model = Reads(code)
    stock = copy.deepcopy(model)
    assert folded(nft.convert(model)) == {"bn": ("relu",)}
    if copied:
        model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same(model, stock)
        change(model), change(stock)
        check_same(model, stock)
    assert set(nft.fused(model).values()) == {("relu",)} or name == "_modules"
    assert folded(nft.convert(model))
    check_same(model, stock)


def test_own_mode_of_a_child():
    model = Reads(lambda s, y: y * 2 if s.parts.training else y)
    stock = copy.deepcopy(model)
    assert folded(nft.convert(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same(model, stock)
        for m in (model, stock):
            m.train()
            m.parts.eval()
        x = torch.randn(X)
        torch.testing.assert_close(model(x), stock(x))


def reads_much(s, y):
    if isinstance(s.conv, nn.Conv2d) and SWITCH is False and not hasattr(s, "nothing"):
        y = helper(y)
    for layer, factor in zip(s.layers, s.factors):
        y = layer(y) * factor
    return y * s.settings.nested.factor * FACTORS["a"] if s.flags["on"] else y


class ReadsMuch(Reads):
    def code(s, y):
        return reads_much(s, y)


@pytest.mark.parametrize("how", ["compile", "export", "export strict", "pickle"])
def test_blocks_compile_export_and_pickle(how, same_globals):
    stock = nn.Sequential(ReadsMuch(None), sequential(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    model = copy.deepcopy(stock)
    assert [what for layer in nft.convert(model).layers for what in layer.folded] == ["relu", "relu", "silu", "relu"]
    x = torch.randn(X)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(model))
        assert [type(a) for a in other.modules()] == [type(a) for a in model.modules()]
    elif how == "compile":
        torch._dynamo.reset()
        other = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        other = torch.export.export(model, (x,), strict="strict" in how).module()
    torch.testing.assert_close(other(x), stock(x), rtol=1e-9, atol=1e-9)
    if "export" not in how:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for m in (model, stock, *([other] if how == "pickle" else [])):
                m[0].factors.append(5.0)
                m[0].settings.nested.factor = 5.0
            globals().update(helper=lambda y: y * 4)
            torch.testing.assert_close(other(x), stock(x), rtol=1e-9, atol=1e-9)


def replaced_forward(self, x):
    return 3 * self.bn(x)


def test_a_forward_that_is_replaced_in_its_class():
    class Own(Block):
        def forward(self, x):
            return self.act(self.bn(x))

    model, stock, _ = both(nn.Sequential(nn.Conv2d(4, 4, 1), Own()))
    check_same(model, stock)
    Own.forward = replaced_forward
    check_same(model, stock)
    nft.convert(model)
    check_same(model, stock)


class Statements(Block):
    def shapes(self, y, z):
        return z * y.shape[0] + y.mean()

    def log(self, x):
        return float(self.bn.num_batches_tracked) > 1e9


# Programs, with what is fused, or what the report says of the norm; None: not told.
STATEMENTS = {
    "in a try": ("""
        try:
            y = s.bn(s.conv(x))
            y = s.act(y)
        except ValueError:
            y = x
        return y""", "relu"),
    "before finally": ("""
        try:
            y = s.bn(x)
            y += x
            return s.act(y)
        finally:
            s.step = 8""", "add + relu"),
    "in a context": ("""
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            y = s.bn(x)
            y = s.act(y)
        return y + x""", "relu"),
    "in a try in a loop": ("""
        for _ in range(2):
            try:
                y = s.bn(x)
                x = s.act(y + x)
                continue
            except (ValueError, IndexError):
                break
        return x""", "add + relu"),
    "in place by a method": ("y = s.bn(x); y.relu_(); return y", "relu"),
    "in place by functions": ("y = s.bn(x); y.add_(x); F.relu(y, inplace=True); return y", "add + relu"),
    "in place by a module": ("y = s.bn(s.conv(x)); s.inplace(y); return y * 2", "relu"),
    "taken apart": ("y, z = s.bn(x), s.conv(x); y += z; return s.act(y)", "add + relu"),
    "module not in place": ("y = s.bn(x); s.act(y); return y", "no activation"),
    "in place and read before": ("y = s.bn(x); z = y; y.relu_(); return y + z", "read more than once"),
    "in a tuple": ("y = (s.bn(x), x); return s.act(y[0])", "put into a tuple"),
    "in a dict": ('y = {}; y["norm"] = s.bn(x); return s.act(y["norm"])', "stored in `y['norm']`"),
    "read by a handler": ("""
        y = x
        try:
            y = s.bn(x)
            y = s.act(y)
        except ValueError:
            y = y * 2
        return y""", "an exception may lead"),
    "swallowed": ("""
        y = s.bn(x)
        try:
            x[9]
            y = 1
        except IndexError:
            pass
        return torch.atleast_1d(y)""", None),
    "assigned to itself": ("y = s.bn(x); y = y; return torch.stack([y, x]).sum(0)", None),
    "swallowed in a context": ("""
        y = s.bn(x)
        with contextlib.suppress(IndexError):
            x[9]
            y = 1
        return torch.atleast_1d(y)""", None),
    "read by finally": ("""
        y = s.bn(x)
        try:
            if s.training:
                return s.act(y) * 2
            y = x
        finally:
            s.kept = float(y.sum())
        return y * s.kept""", None),
    "statistics of a loop": ("""
        for _ in range(2):
            y = s.bn(x)
            x = s.conv(x) * s.bn.running_mean.view(1, 4, 1, 1)
        return s.act(y) + x""", None),
    "asks for its class": ("""
        right = type(s.bn) is nn.BatchNorm2d and type(s).__name__ == "Statements"
        return s.act(s.bn(x)) * (1 if right else 2)""", None),
    "reads its locals": ('y = s.bn(x); return s.act(y) + locals()["y"]', None),
    "added in a context": ("""
        y = x * 2
        z = s.bn(x)
        with contextlib.nullcontext():
            y += z
        return s.act(y) * z""", None),
    "passed from a context": ("""
        y = s.bn(x)
        z = s.act(s.conv(x))
        with contextlib.nullcontext():
            z = s.shapes(y, z)
        return z""", None),
    "computed by a branch": ("y = s.bn(x); z = y.sum() if s.log(x) or s.training else x; return s.act(y) + z", None),
    "norm of other axes": ("""
        y = x
        with contextlib.suppress(ValueError):
            y = s.bn(y[0])
            y = s.act(y)
        return y""", None),
    "variable of a norm that raises": ("""
        z = x
        try:
            y = s.bn(x[0])
            z = x * 2
            y = s.act(y)
        except ValueError as error:
            y = z * len(str(error))
        return y + z""", None),
    "global of a norm that raises": ("""
        global GLOBAL
        GLOBAL = 1
        try:
            y = s.bn(x[0])
            GLOBAL = 2
            return s.act(y)
        except ValueError:
            return x * GLOBAL""", None),
    "attribute of a norm that raises": ("""
        try:
            y = s.bn(x[0])
            for s.step in range(2):
                pass
            return s.act(y)
        except ValueError:
            return x * s.step""", None),
    "handler of a call that raises": ("""
        y = s.bn(x)
        try:
            y = s.act(y) + y[9]
        except IndexError:
            y = y * 2
        return y""", None),
    "finally after a norm that raises": ("""
        y = z = x
        for i in range(2):
            try:
                y = s.bn(x[0])
                z = x * 3
                y = s.act(y)
            finally:
                x = x + z
                break
        return x + y""", None),
    "an item by its output": ("y, z = s.bn(x), [0, 0]; z[int(y.sum() > 1e9)] += 3; return s.act(y) + z[0]", None),
    "two at once": ("y = s.bn(x); y, x = s.act(x), s.act(y); x, y = y, x; return x * 2 + y", None),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements(name):
    text, what = STATEMENTS[name]
    model, stock, report = both(Statements(text, inplace=nn.ReLU(inplace=True), step=7))
    assert (name == "reads its locals") == ("locals()" in str(report))
    check_same(model, stock)
    if what is not None:
        fused = what if what in ("relu", "add + relu") else ""
        assert folded(report) == ({"bn": (fused,)} if fused else {})
        assert fused or what in report.details(), report.details()
        assert set(nft.fused(model)["bn"]) == {fused}


class Starred(Block):
    def forward(self, *xs):
        return self.bn(xs[0])


def test_arguments_by_a_star_in_a_profile():
    model, stock, _ = both(nn.Sequential(Starred(), nn.ReLU()))
    with torch.autograd.profiler.profile():
        check_same(model, stock)


def warns(x):
    warnings.warn("of a model", stacklevel=2)
    return x


class Warns(Block):
    def forward(self, x):
        return self.act(self.bn(warns(x)))


def test_warnings_are_about_the_model():
    model = Warns()
    nft.convert(model)
    with pytest.warns(UserWarning, match="of a model") as caught:
        model(torch.randn(X))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("forward,why", [
    ('warnings.warn("of a model", stacklevel=2); return s.act(s.bn(x))', "frames of its callers"),
    ("return s.act(s.bn(torch.stack([x, x]).sum(0)))", None)])
def test_a_forward_that_looks_at_frames_is_left(forward, why):
    model, stock, report = both(Block(forward))
    assert (why or "relu") in report.details()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_same(model, stock)
    assert not caught if why is None else all(w.filename.endswith("module.py") for w in caught)


def test_what_may_be_fused_is_fused():
    model = nn.Sequential(*sequential(), Reads(READ["elements of a list"][0]))
    report = nft.convert(model)
    assert nft.fused(model) == {}
    model(torch.randn(X))
    assert nft.fused(model) == {layer.name: layer.folded for layer in report.layers}
    model[2].register_forward_hook(lambda *a: None)
    model(torch.randn(X))
    assert nft.fused(model)["1"] == ("",) and nft.fused(model)["4"] == ("silu",)


# ---- nn.Sequential --------------------------------------------------------------------------------------------------


def sequential():
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4),
                         nn.Identity(), nn.SiLU())


def to_sync(m):
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)


def fuse(m):
    m.eval()
    m[0] = torch.nn.utils.fuse_conv_bn_eval(m[0], m[1])
    m[1] = nn.Identity()


def freeze(m):
    load_torchvision()
    load("timm")
    from timm.utils.model import freeze_batch_norm_2d
    return freeze_batch_norm_2d(m)


def replace_layers(m):
    for name, child in m.named_children():
        if isinstance(child, nn.BatchNorm2d):
            new = nn.GroupNorm(2, 4)
            new.weight, new.bias = child.weight, child.bias
            setattr(m, name, new)


def swap_activations(m):
    for name, child in m.named_children():
        if isinstance(child, nn.ReLU):
            setattr(m, name, nn.LeakyReLU(0.3))


def forward_of_it(m):
    forward = nn.Sequential.forward
    m.forward = lambda x: forward(m, x) * 2


def iterates(body, x):
    outputs = []
    for layer in body:
        x = layer(x)
        outputs.append(x)
    return sum(outputs)


def double(module, args, y):
    return 2 * y


CHANGED = {
    "nothing": lambda m: m,
    "convert_sync_batchnorm": to_sync,
    "fuse_conv_bn_eval": fuse,
    "freeze_batch_norm_2d": freeze,
    "replaced layers": replace_layers,
    "swapped activations": swap_activations,
    "slice": lambda m: m[:2],
    "slice from the activation": lambda m: m[2:],
    "slice of all": lambda m: m[:],
    "sum": lambda m: m + nn.Sequential(nn.Tanh()),
    "product": lambda m: m * 2,
    "set item": lambda m: operator.setitem(m, 2, nn.GELU()),
    "set what is between": lambda m: operator.setitem(m, 5, nn.Tanh()),
    "append": lambda m: m.append(nn.Tanh()),
    "delete": lambda m: operator.delitem(m, 2),
    "insert": lambda m: m.insert(2, nn.Tanh()),
    "pop": lambda m: (m.pop(2), m)[1],
    "hook on the norm": lambda m: m[1].register_forward_hook(double),
    "hook on the activation": lambda m: m[2].register_forward_hook(double),
    "hook between": lambda m: m[5].register_forward_hook(double),
    "pre hook": lambda m: m[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "backward hook": lambda m: m[1].register_full_backward_hook(lambda module, dx, dy: (3 * dx[0],)),
    "forward of a norm": lambda m: setattr(m[1], "forward", lambda x: 2 * x),
    "forward of an activation": lambda m: setattr(m[2], "forward", lambda x: 2 * x),
    "forward of it": forward_of_it,
    "one activation twice": lambda m: operator.setitem(m, 2, m[6]),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("nested", [False, True])
def test_a_sequential_that_changes_later(name, nested):
    stock = sequential()
    model = copy.deepcopy(stock)
    holder = nn.ModuleList([model])
    if nested:
        holder = nn.Sequential(model)
    assert list(folded(nft.convert(holder)).values()) == [("relu",), ("silu",)]
    assert [type(child) for child in model] == [nn.Conv2d, nft.BatchNorm2d, nn.ReLU, nn.Conv2d, nft.BatchNorm2d,
                                                nn.Identity, nn.SiLU] and repr(model) == repr(stock)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a, b = (new if isinstance(new := CHANGED[name](m), nn.Module) else m for m in (model, stock))
        if nested and a is model:
            a = holder
        modes = (False,) if name in ("convert_sync_batchnorm", "fuse_conv_bn_eval") else (True, False, True)
        check_same(a, b, modes=modes)
    assert not [w for w in caught if "convert" in str(w.message)]


def test_slices_are_plain():
    model = sequential()
    nft.convert(model)
    for part in (model[:2], model[1:], model + model, model * 2, type(model)(nn.ReLU())):
        assert type(part) is nn.Sequential
    assert isinstance(model, nn.Sequential) and isinstance(model, type(model))


@of_the_cpu
def test_mkldnn_takes_the_layers():
    model, stock, _ = both(sequential()[:3].float().eval())
    from torch.utils import mkldnn
    x = torch.randn(X, dtype=torch.float32)
    torch.testing.assert_close(mkldnn.to_mkldnn(model)(x.to_mkldnn()).to_dense(),
                               mkldnn.to_mkldnn(stock)(x.to_mkldnn()).to_dense(), rtol=1e-4, atol=1e-5)


def test_efficientnet_with_sync_batch_norms():
    """Of torchvision, whose blocks are Sequentials of Sequentials."""
    torchvision = load_torchvision()
    stock = torchvision.models.efficientnet_b0(weights=None, num_classes=3).eval()
    model = copy.deepcopy(stock)
    assert len(folded(nft.convert(model))) == 33
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b = to_sync(model), to_sync(stock)
        x = torch.randn(1, 3, 32, 32)
        torch.testing.assert_close(a(x), b(x), rtol=1e-9, atol=1e-9)


APART = {
    "index": lambda b, x: b[2](b[1](b[0](x))),
    "index, but not the activation": lambda b, x: b[1](b[0](x)),
    "iterate": iterates,
    "slice": lambda b, x: b[:2](x),
    "slice and all": lambda b, x: b[:2](x) + b(x),
    "two slices": lambda b, x: b[2:](b[:2](x)),
    "from the norm": lambda b, x: b[1:](x),
}


@pytest.mark.parametrize("name", APART)
def test_forwards_that_take_their_sequential_apart(name):
    model, stock, _ = both(Block(lambda s, x: s.apart(s.body, x), apart=APART[name], body=sequential()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same(model, stock)


def test_hooks_see_what_stock_shows_and_outlive_revert():
    """As Grad-CAM has them, on the norm; and on the activation, through revert."""
    model, stock, _ = both(sequential())
    seen = collections.defaultdict(list)
    for m in (model, stock):
        m[1].register_forward_hook(lambda module, args, y, m=m: seen[m].append(y.clone()))
        m[2].register_forward_hook(lambda module, args, y, m=m: seen[m].append(y.clone()))
    x = torch.randn(X)
    for revert in (False, True):
        if revert:
            nft.revert(model)
        model(x), stock(x)
    assert len(seen[model]) == len(seen[stock]) == 4
    for a, b in zip(seen[model], seen[stock]):
        torch.testing.assert_close(a, b)


# ---- layers with drop and act ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("converted", [False, True])
def test_sync_batch_norms_keep_drop_and_act(converted):
    load_torchvision()
    load("timm")
    from timm.layers.norm_act import BatchNormAct2d
    model = nn.Sequential(nn.Conv2d(4, 4, 1), BatchNormAct2d(4, act_layer=nn.SiLU, drop_layer=lambda: nn.Dropout(0.5)))
    stock = copy.deepcopy(model).eval()
    if converted:
        nft.convert(model)
    model = nft.SyncBatchNorm.convert_sync_batchnorm(model).eval()
    assert isinstance(model[1], nft.SyncBatchNorm) and type(model[1].drop) is nn.Dropout
    check_same(model, stock, modes=(False,))
    nft.convert(model)
    check_same(model, stock, modes=(False,))


def test_sync_batch_norms_refuse_code_they_would_drop():
    class Scaled(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(TypeError, match="Scaled"):
        nft.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(Scaled(4)))


# ---- order ----------------------------------------------------------------------------------------------------------


class Overwrites(nn.Module):
    """Overwrites its input, and no attribute says so."""

    def forward(self, x):
        x.mul_(1.5)
        return x


class OverwritesInCode(nn.Module):
    def forward(self, x):
        x += 1
        return x * 2


class Order(Block):
    @staticmethod
    def _layers():
        layers = Block._layers()
        return {**layers, "nothing": nn.Identity(), "drop": nn.Dropout(0.0), "inplace": nn.ReLU(True),
                "over": Overwrites(), "over2": OverwritesInCode(), "chain": nn.Sequential(nn.Identity(), Overwrites()),
                "other": nn.Conv2d(4, 4, 1), "twice": nn.Sequential(layers["bn"])}


def order(between):
    """act(bn(c) + between(c)), with what `between` does before the addition."""
    def code(s, x):
        c = s.conv(x)
        y = s.bn(c)
        z = between(s, c)
        return s.act(y + z)
    return code


ORDER = {
    "identity": order(lambda s, c: s.inplace(s.nothing(c))),
    "dropout": order(lambda s, c: s.inplace(s.drop(c))),
    "view": order(lambda s, c: s.inplace(c.view(X))),
    "detach": order(lambda s, c: s.inplace(c.detach())),
    "method of operators": order(lambda s, c: c.__iadd__(1)),
    "module without inplace": order(lambda s, c: s.over(c)),
    "module whose code is in place": order(lambda s, c: s.over2(c)),
    "module in a container": order(lambda s, c: s.chain(c)),
    "out": order(lambda s, c: torch.mul(c, 2, out=c.detach())),
    "second call": order(lambda s, c: s.bn(c * 3)),
    "second call in a container": order(lambda s, c: s.twice(c * 3)),
    "statistics read": order(lambda s, c: s.bn.running_mean.view(1, 4, 1, 1) * c),
}


@pytest.mark.parametrize("name", ORDER)
def test_a_call_stays_before_what_it_must(name):
    model, stock, report = both(Order(ORDER[name]))
    if "second" not in name:  # whose own call need not move
        assert not any("add" in what for layer in report.layers for what in layer.folded)
    x = torch.randn(X)
    for training in (True, False, True):
        with torch.no_grad():
            torch.testing.assert_close(model.train(training)(x), stock.train(training)(x), rtol=1e-9, atol=1e-9)
    for a, b in zip(model.buffers(), stock.buffers()):
        torch.testing.assert_close(a, b)


BETWEEN = {
    "convolution": (lambda s, x: s.act(s.bn(s.conv(x)) + s.other(x)), True),
    "identity": (lambda s, x: s.act(s.bn(s.conv(x)) + s.nothing(x)), True),
    "method": (lambda s, x: s.act(s.bn(s.conv(x)) + x.contiguous()), True),
    "shape": (lambda s, x: s.act(s.bn(s.conv(x)) + x.view(x.shape)), True),
    "attribute of a module": (lambda s, x: s.act(s.bn(s.conv(x)) + x.to(s.other.weight.dtype)), True),
    "in-place module": (lambda s, x: s.act(s.bn(s.conv(x)) + s.inplace(s.other(x))), False),
    "code": (lambda s, x: s.act(s.bn(s.conv(x)) + s.over(s.other(x))), False),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_may_stand_between(name):
    code, fuses = BETWEEN[name]
    model, stock, _ = both(Order(code))
    check_same(model, stock)
    assert nft.fused(model)["bn"] == (("add + relu",) if fuses else ("",))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_dropout_between_an_addition_and_its_activation(inplace):
    """The activation moves before it; one in place would write over what the backward takes."""
    model = Order(lambda s, x: s.act(s.drop(s.bn(s.conv(x)) + x)))
    model.drop = nn.Dropout(0.3, inplace)
    stock = copy.deepcopy(model)
    assert folded(nft.convert(model)) == ({} if inplace else {"bn": ("add + relu",)})
    check_same(model, stock)
    model.drop.inplace = stock.drop.inplace = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the block runs its own forward
        check_same(model, stock)


CHANGES = {
    "none": lambda m: None,
    "another activation": lambda m: setattr(m, "act", nn.Tanh()),
    "a function in its place": lambda m: m.__dict__.__setitem__("act", torch.tanh),
    "another norm": lambda m: setattr(m, "norm", nn.InstanceNorm2d(4)),
    "a hook that changes what it gives": lambda m: m.act.register_forward_hook(lambda f, x, y: 2 * y),
    "a hook of the norm": lambda m: m.norm.register_forward_hook(lambda f, x, y: m.seen.append("norm")) and None,
    "a hook of the activation": lambda m: m.act.register_forward_hook(lambda f, x, y: m.seen.append("act")) and None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_norm_and_its_activation_in_statements_of_their_own(name):
    """The call sees what became of the two since."""
    model, stock, _ = both(Block("x = s.norm(x); x = s.act(x); return x", norm=nn.BatchNorm2d(4), seen=[]))
    for m in (stock, model):
        CHANGES[name](m)
    check_same(model, stock)
    assert model.seen == stock.seen and (nft.fused(model) == {"norm": ("relu",)}) == (name == "none")

# SPDX-License-Identifier: MIT
"""convert has the biases of convolutions added by what follows them. Models are f64 and compared with the same model as
it was: outputs, gradients, buffers. Which tensors the operators got says what moved. Biases move on CUDA alone by
default; here also on the CPU."""
import contextlib
import copy
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torch.nn.utils.prune  # noqa: E402
from device import DEVICE, ON_CUDA, default_device, of_the_cpu  # noqa: E402, F401
from normfuse.torch import _calls  # noqa: E402
from test_convert import Of, both as of_model, check_same as check_steps  # noqa: E402
from test_convert_channel_norm import exact  # noqa: E402
from test_convert_meaning import Operators, check_same  # noqa: E402
from test_models import compared, images, load, load_torchvision  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

X = (2, 4, 5, 5)
BY_DEFAULT = frozenset(_calls.BIAS_DEVICES)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(_calls, "BIAS_DEVICES", {"cpu", "cuda"})
    yield
    torch.set_default_dtype(torch.float32)


def operators(model, *inputs, call=lambda m, *x: m(*x)):
    with Operators() as found, torch.no_grad():
        call(model, *inputs)
    return found.counts


def random(model):
    """With parameters and running statistics that show where they are."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.3, 1.2)
    return model


def both(model):
    return of_model(random(model))


class Block(Of):
    @staticmethod
    def _layers():
        return {"conv": nn.Conv2d(4, 4, 3, padding=1), "norm": nn.GroupNorm(2, 4), "act": nn.SiLU(),
                "other": nn.Conv2d(4, 4, 1), "embed": nn.Linear(25, 4)}


def embedding(s, x):
    """[N, C, 1, 1]."""
    return s.embed(x[:, 0].flatten(1))[:, :, None, None]


# ---- what moves -----------------------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "1d": nn.Conv1d(4, 6, 3), "2d": nn.Conv2d(4, 6, 3), "3d": nn.Conv3d(4, 6, 3),
    "transposed 1d": nn.ConvTranspose1d(4, 6, 3), "transposed 2d": nn.ConvTranspose2d(4, 6, 3),
    "transposed 3d": nn.ConvTranspose3d(4, 6, 3),
    "options": nn.Conv2d(4, 6, 3, stride=2, padding=(2, 1), dilation=(1, 2), groups=2),
    "transposed options": nn.ConvTranspose2d(4, 6, 3, stride=3, padding=1, output_padding=(1, 2), groups=2, dilation=2),
    "reflect": nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), "same": nn.Conv1d(4, 6, 4, padding="same"),
}
NORMS = ["GroupNorm", "BatchNorm", "InstanceNorm", "SyncBatchNorm"]


def norm_of(kind, channels, spatial):
    if kind == "GroupNorm":
        return nn.GroupNorm(2, channels)
    if kind == "InstanceNorm":
        return getattr(nn, f"{kind}{spatial}d")(channels, affine=True, track_running_stats=True)
    return nn.SyncBatchNorm(channels) if kind == "SyncBatchNorm" else getattr(nn, f"{kind}{spatial}d")(channels)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_convolution_before_every_norm(name, norm):
    convolution = copy.deepcopy(CONVOLUTIONS[name]).to(DEVICE, torch.float64)
    spatial = convolution.weight.dim() - 2
    model, stock, report = both(nn.Sequential(convolution, norm_of(norm, 6, spatial), nn.ReLU()))
    assert report.biases == ["0"] and "; 1 biases of convolutions moved on CUDA\n" in str(report)
    x = torch.randn(2, 4, *(5,) * spatial)
    check_same(model, stock, x)
    for training in (True, False):
        counts = operators(model.train(training), x)
        assert counts["bare"] == 1 and counts["biased"] == 0
        assert sum(n for name, n in counts.items() if name.endswith("+bias")) == 1


CHAINS = {
    "norm": lambda s, x: s.norm(s.conv(x)),
    "norm, activation": lambda s, x: s.act(s.norm(s.conv(x))),
    "norm, addition, activation": lambda s, x: s.act(s.norm(s.conv(x)) + x),
    "norm, addition of another": lambda s, x: F.relu(s.norm(s.conv(x)) + s.other(x)),
    "norm, dropout, activation": lambda s, x: F.relu(F.dropout(s.norm(s.conv(x)), 0.0)),
    "norm, shift and scale": lambda s, x: s.act(s.norm(s.conv(x)) * (1 + embedding(s, x)) + embedding(s, x)),
    "embedding": lambda s, x: s.act(s.norm(s.conv(x) + embedding(s, x))),
    "embedding first": lambda s, x: s.norm(embedding(s, x) + s.conv(x)),
    "two embeddings": lambda s, x: s.norm(s.conv(x) + embedding(s, x) + embedding(s, 2 * x)),
    "embedding, then shift and scale": lambda s, x: s.norm(s.conv(x) + embedding(s, x)) * (1 + embedding(s, x))
    + embedding(s, x),
}


@pytest.mark.parametrize("norm", ["group", "batch", "instance"])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_to_a_norm(name, norm):
    layer = {"group": nn.GroupNorm(2, 4), "batch": nn.BatchNorm2d(4), "instance": nn.InstanceNorm2d(4)}[norm]
    model, stock, report = both(Block(CHAINS[name], norm=layer))
    check_same(model, stock)
    counts = operators(model.eval(), torch.randn(X))
    assert report.biases == ["conv"] and counts["bare"] == 1 and counts["biased"] == ("other" in name)
    assert sum(n for name, n in counts.items() if name.endswith("+bias")) == 1
    if "embedding" in name:  # [N, C] alone is added
        assert counts["channel_affine"] == 0


SUMS = {
    "residual": lambda s, x: s.conv(s.norm(x)) + x,
    "residual first": lambda s, x: x + s.conv(s.norm(x)),
    "in place": lambda s, x: s.conv(s.norm(x)).add_(x),
    "operator in place": "y = s.conv(s.norm(x)); y += x; return y",
    "function": lambda s, x: torch.add(s.conv(s.norm(x)), x),
    "method": lambda s, x: s.conv(s.norm(x)).add(x),
    "embedding and residual": lambda s, x: s.conv(s.norm(x)) + embedding(s, x) + x,
    "over 1.0": lambda s, x: (s.conv(s.norm(x)) + x) / 1.0,
    "over 1": lambda s, x: (x + s.conv(s.norm(x))) / 1,
    "div": lambda s, x: torch.div(x + s.conv(s.norm(x)), 1.0),
    "true_divide": lambda s, x: torch.true_divide(x + s.conv(s.norm(x)), 1.0),
    "method div": lambda s, x: (x + s.conv(s.norm(x))).div(1),
    "two convolutions": lambda s, x: s.other(x) + s.conv(s.norm(x)),
    "two convolutions over 1.0": lambda s, x: (s.other(x) + s.conv(s.norm(x))) / 1.0,
    "before a norm": lambda s, x: s.norm(s.conv(x) + x),
}


def iadd(a, b):
    a += b
    return a


@pytest.mark.parametrize("name", SUMS)
def test_sums(name):
    model, stock, report = both(Block(SUMS[name]))
    check_same(model, stock)
    counts, two = operators(model, torch.randn(X)), "two" in name
    assert report.biases == ["conv", "other"][:1 + two] and counts["bare"] == 1 + two
    assert counts["channel_affine"] == 1 and counts["div"] == counts["biased"] == counts["add_"] == 0
    assert counts["add"] == (two or "embedding" in name)  # [C] of biases, [N, C]


@pytest.mark.parametrize("name,code", {
    "2.0": lambda y: y / 2.0, "backwards": lambda y: 1.0 / y, "rounded": lambda y: torch.div(y, 1.0, rounding_mode="floor"),
    "in place": lambda y: y.div_(1.0), "true": lambda y: y / True,
    "product": lambda y: y * 1.0}.items())
def test_other_divisions_stay(name, code):
    model, stock, report = both(Block(lambda s, x: code(s.conv(s.norm(x)) + x)))
    check_same(model, stock)
    y, z = model(torch.full(X, 2.0)), stock(torch.full(X, 2.0))
    torch.testing.assert_close(y, z)
    assert report.biases == ["conv"] and operators(model, torch.randn(X))["channel_affine"] == 1


def test_a_sum_that_is_read_twice_is_divided():
    model, stock, report = both(Block("y = s.conv(s.norm(x)) + x; return y / 1.0, y"))
    a, b = model(torch.randn(X))
    assert a.data_ptr() != b.data_ptr() and report.biases == ["conv"]


def test_a_divisor_that_changes():
    model, stock, _ = both(Block(lambda s, x: (s.conv(s.norm(x)) + x) / s.factor, factor=1.0))
    check_same(model, stock)
    model.factor = stock.factor = 1.5
    check_same(model, stock)


def test_a_container_that_ends_in_a_norm():
    model, stock, report = both(Block(lambda s, x: s.act(s.part(x) + x), part=nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Identity())))
    check_same(model, stock)
    assert report.biases == ["part.0"] and operators(model, torch.randn(X))["bare"] == 1
    assert operators(model.part, torch.randn(X))["bare"] == 1


def test_a_container_that_begins_with_a_norm():
    model, stock, report = both(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.InstanceNorm2d(4), nn.Dropout(0.2),
                                                                                nn.PReLU())))
    check_same(model, stock)
    assert report.biases == ["0"] and operators(model.eval(), torch.randn(X))["bare"] == 1
    seen = []
    model[1].register_forward_hook(lambda module, arguments, output: seen.append(arguments[0]))
    x = torch.randn(X)
    torch.testing.assert_close(model(x), stock.eval()(x))
    torch.testing.assert_close(seen, [stock[0](x)])
    for behind in (nn.Sequential(nn.Tanh(), nn.GroupNorm(2, 4)), nn.Sequential(), nn.Sequential(nn.GELU())):
        model, stock, report = both(nn.Sequential(nn.Conv2d(4, 4, 1), behind, nn.GroupNorm(2, 4)))
        check_same(model, stock)
        assert report.biases == ([] if len(behind) else ["0"])


def test_a_norm_with_an_activation_of_its_own():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nft.GroupNorm(2, 4, activation="silu"))
    stock = copy.deepcopy(nn.Sequential(model[0], nn.GroupNorm(2, 4), nn.SiLU()))
    assert nft.convert(model).biases == ["0"]
    check_same(model, stock)
    assert operators(model, torch.randn(X))["bare"] == 1


def test_shared_modules():
    """A convolution that is called twice, one that stands in two blocks, and convolutions that share a bias."""
    shared = nn.Conv2d(4, 4, 1)
    model = nn.Sequential(nn.Sequential(shared, nn.GroupNorm(2, 4), nn.SiLU(), shared, nn.GroupNorm(4, 4)),
                          nn.Sequential(shared, nn.BatchNorm2d(4)),
                          nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)))
    model[2][0].bias = shared.bias
    model, stock, report = both(model)
    check_same(model, stock)
    assert report.biases == ["0.0", "2.0"] and operators(model, torch.randn(X))["bare"] == 4


# ---- code around convolutions ---------------------------------------------------------------------------------------


class Causal(nn.Conv2d):
    """As in the autoencoders of videos."""

    def forward(self, x, before=None):
        x = F.pad(x, (1, 1, 2, 0)) if before is None else F.pad(torch.cat([before, x], 2), (1, 1, 0, 0))
        return super().forward(x)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x, before=None, *, bottom=0):
        return self.conv(F.pad(x if before is None else x + before.mean(), (1, 1, 2 - bottom, bottom)))


class Grown(nn.ConvTranspose2d):
    def forward(self, x, before=None):
        return super().forward(x)


AROUND = {"subclass": (Causal(4, 4, 3), ""), "wrapper": (Wrapped(), ".conv"), "transposed": (Grown(4, 4, 1), "")}
AROUND_CODE = {
    "norm": "return s.act(s.norm(s.conv(x)))",
    "two arguments": "return s.act(s.norm(s.conv(x, x[:, :, :2])))",
    "keyword": "return s.act(s.norm(s.conv(x, before=None)))",
    "residual": "return s.conv(s.act(s.norm(x)), x[:, :, :2]) + x",
    "stored": "at, kept = [0], {}; y = s.conv(x, None); kept[1] = x; at[0] += 1; return s.act(s.norm(y)) * at[0]",
    "an item of a list": "at, i = [x, None], 0; y = s.conv(x, at[i]); at[i] = x * 2; return s.norm(y)",
}


@pytest.mark.parametrize("code", AROUND_CODE)
@pytest.mark.parametrize("name", AROUND)
def test_code_around_a_convolution(name, code):
    module, path = AROUND[name]
    convolution = copy.deepcopy(module).to(DEVICE, torch.float64)
    model, stock, report = both(Block(AROUND_CODE[code], conv=convolution))
    check_same(model, stock)
    x = torch.randn(X)
    assert report.biases == [f"conv{path}"] and operators(model, x)["bare"] == 1 and operators(model, x)["biased"] == 0
    with torch.autograd.profiler.profile():
        torch.testing.assert_close(model(x), stock(x))
    seen = []
    for hooked in (model, stock):
        hooked.conv.register_forward_hook(lambda m, given, output: seen.append(output))
    check_same(model, stock)
    torch.testing.assert_close(seen[0], seen[3])


def test_a_compiled_subclass():
    model, stock, _ = both(Block(AROUND_CODE["two arguments"], conv=Causal(4, 4, 3)))
    x = torch.randn(X)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), stock(x))


STORED = {  # between a convolution and a norm, where y must not wait
    "the bias": "b, y = s.conv.bias.detach(), s.conv(x); b[0] = 3.0; return s.norm(y)",
    "added to the bias": "b, y = s.conv.bias.detach(), s.conv(x); b[0] += 3.0; return s.norm(y)",
    "added to the bias in a list": "b, y = [s.conv.bias.detach()], s.conv(x); b[0] += 3.0; return s.norm(y)",
    "an object that writes": "b, y = Writes(s.conv.bias.detach()), s.conv(x); b[0] = 3.0; return s.norm(y)",
    "a key that writes": "b, y = {}, s.conv(x); k = Writes(s.conv.bias.detach()); b[k] = 3.0; return s.norm(y)",
}


class Writes:
    def __init__(self, tensor):
        self.tensor = tensor

    def __setitem__(self, key, value):
        self.tensor[key] = value

    def __hash__(self):
        self.tensor[0] = 3.0
        return 0


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_behind_a_convolution(name):
    model, stock, _ = both(Block(STORED[name], conv=Causal(4, 4, 3)))
    x = torch.randn(X)
    for _ in range(2):
        torch.testing.assert_close(model(x), stock(x))


@pytest.mark.parametrize("file,kind,channels,biases", [
    ("autoencoder_kl_wan", "WanResidualBlock", 8, ["conv1", "conv2"]),
    ("autoencoder_kl_qwenimage", "QwenImageResidualBlock", 8, ["conv1", "conv2"]),
    ("autoencoder_kl_ltx", "LTXVideoResnetBlock3d", 8, ["conv2.conv"]),  # movedim follows the first
    ("autoencoder_kl_hunyuan_video", "HunyuanVideoResnetBlockCausal3D", 32, ["conv1.conv", "conv2.conv"])])
def test_blocks_of_videos(file, kind, channels, biases):
    load_torchvision()
    make = getattr(load("diffusers.models.autoencoders." + file), kind)
    model, stock, report = both(make(channels, channels, dropout=0.0))
    stock = exact(stock)
    x = torch.randn(2, channels, 3, 6, 5)
    assert report.biases == biases
    check_same(model, stock, x)
    counts = operators(model, x)
    assert counts["bare"] == len(biases) and counts["biased"] == 2 - len(biases) and counts["channel_affine"] == 1
    if "feat_cache" in make.forward.__code__.co_varnames:
        cached, other = [None, None], [None, None]
        for _ in range(3):
            torch.testing.assert_close(model(x, cached, [0]), stock(x, other, [0]), rtol=1e-12, atol=1e-12)
        assert operators(model, x, call=lambda m, x: m(x, cached, [0]))["bare"] == 2
        torch.testing.assert_close(cached, other)
        model.norm2.scale = stock.norm2.scale = 3.0  # which the layer computes itself
        check_same(model, stock, x)


# ---- what does not --------------------------------------------------------------------------------------------------


class Subclass(nn.Conv2d):
    pass


class Doubled(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


class OfItsOwn(nn.Conv2d):
    def forward(self, x):
        return super().forward(x)

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight, bias) + bias.sum()


LEFT = {
    "no bias": Block(CHAINS["norm"], conv=nn.Conv2d(4, 4, 1, bias=False)),
    "subclass": Block(CHAINS["norm"], conv=Subclass(4, 4, 1)),
    "subclass with more after it": Block(CHAINS["norm"], conv=Doubled(4, 4, 1)),
    "subclass with code below": Block(CHAINS["norm"], conv=OfItsOwn(4, 4, 1)),
    "parametrized": Block(CHAINS["norm"], conv=nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))),
    "spectral norm": Block(CHAINS["norm"], conv=nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))),
    "linear": Block(lambda s, x: s.norm(s.linear(x.movedim(1, 3)).movedim(3, 1)), linear=nn.Linear(4, 4)),
    "read twice": Block("c = s.conv(x); return s.norm(c) + c.tanh()"),
    "read twice by one call": Block("c = s.conv(x); return s.act(s.norm(c) + c)"),
    "something between": Block(lambda s, x: s.norm(s.conv(x).tanh())),
    "a product": Block(lambda s, x: s.norm(s.conv(x) * x)),
    "alpha": Block(lambda s, x: s.norm(torch.add(s.conv(x), x, alpha=2))),
    "a number": Block(lambda s, x: s.norm(s.conv(x) + 1.5)),
    "twice itself": Block(lambda s, x: s.norm(double(s.conv(x)))),
    "added to another in place": Block(lambda s, x: s.norm(iadd(x * 1, s.conv(x)))),
    "layer norm": Block(lambda s, x: s.layer(s.conv(x)), layer=nn.LayerNorm(5)),
    "in a post_add": Block(lambda s, x: s.act(s.norm(x) + s.conv(x))),
    "an output size": Block(lambda s, x: s.norm(s.conv(x, x.shape[2:])), conv=nn.ConvTranspose2d(4, 4, 1)),
}


def double(c):
    return c + c


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name):
    model, stock, report = both(copy.deepcopy(LEFT[name]).to(DEVICE, torch.float64))
    assert report.biases == [] and "biases" not in str(report)
    if name in ("parametrized", "spectral norm"):
        model, stock = model.eval(), stock.eval()
    check_same(model, stock, modes=(False,) if "norm" in name or name == "parametrized" else (True, False, True))
    assert operators(model, torch.randn(X))["bare"] == (name == "no bias")


def test_a_value_that_is_returned():
    model, stock, report = both(Block("c = s.conv(x); return s.norm(c), c"))
    x = torch.randn(X)
    for a, b in zip(model(x), stock(x)):
        torch.testing.assert_close(a, b)
    assert report.biases == []


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
         "register_full_backward_pre_hook"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("where", [0, 1])
def test_hooked_convolutions_and_norms_are_left(hook, where):
    model, seen = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.ReLU()), []
    getattr(model[where], hook)(lambda *a: seen.append(a) or None)
    model, stock, report = both(model)
    assert report.biases == []
    check_same(model, stock)
    assert len(seen) == 6  # three steps of each


def test_other_layers_take_no_bias():
    class Mine(nn.GroupNorm):
        pass

    def rule(layer, x, **fused):
        return nft.group_norm(x, 2, layer.weight, layer.bias, **fused)

    for layer, rules in ((Mine(2, 4), {}), (Mine(2, 4), {Mine: rule}), (nn.LocalResponseNorm(2), {})):
        model = nn.Sequential(nn.Conv2d(4, 4, 1), layer, nn.ReLU())
        stock = copy.deepcopy(model)
        assert nft.convert(model, rules).biases == []
        check_same(model, stock)


# ---- shapes, types and devices --------------------------------------------------------------------------------------

ADDENDS = {
    "[N, C, 1, 1]": lambda x: x[:, :, :1, :1], "[N, C, H, W]": lambda x: x, "[1, C, 1, 1]": lambda x: x[:1, :, :1, :1],
    "[C, 1, 1]": lambda x: x[0, :, :1, :1], "[N, 1, 1, 1]": lambda x: x[:, :1, :1, :1], "[]": lambda x: x.mean(),
    "[N, C, H, 1]": lambda x: x[..., :1], "[H, W]": lambda x: x[0, 0], "[N, 1, H, W]": lambda x: x[:, :1],
    "[1, N, C, 1, 1]": lambda x: x[None, :, :, :1, :1],
    "other layout": lambda x: x.permute(0, 1, 3, 2), "strided": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "f32": lambda x: x.float(), "f32, [N, C, 1, 1]": lambda x: x[:, :, :1, :1].float(),
    "integers": lambda x: x.long(),
}


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", ADDENDS)
def test_addends_of_other_shapes_and_types(name, single):
    """Batches of one too: [N, C, 1, 1] and [1, C, 1, 1] are the same then."""
    def last(s, x):
        addend = ADDENDS[name](x)
        return s.conv(s.norm(x)) + addend

    for code in (last, lambda s, x: ADDENDS[name](x) + s.conv(s.norm(x))):
        model, stock, report = both(Block(code))
        assert report.biases == ["conv"]
        check_addends(model, stock, torch.randn(1, *X[1:]) if single else torch.randn(X))
    if not name.startswith("[1, N"):
        model, stock, _ = both(Block(lambda s, x: s.norm(s.conv(x) + ADDENDS[name](x))))
        check_addends(model, stock, torch.randn(1, *X[1:]) if single else torch.randn(X))


def check_addends(model, stock, x):
    check_same(model, stock, x)
    a, b = model(x), stock(x)
    assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def flagged(s, x, added=None, as_tuple=True, doubled=False):
    """With flags, as diffusers' blocks have return_dict."""
    y = F.relu(s.norm(s.conv(x)))
    if added is not None:
        y = y + added
    if doubled:
        y = y * 2
    return (y,) if as_tuple else y


@pytest.mark.parametrize("given", [(), (None, False), (None, True, True), (None, False, True), ("added", False),
                                   ("added", True, False), ("added", False, True), (None, 0), (None, True, 1)], ids=str)
def test_flags_of_calls(given):
    model, stock, _ = both(Block(flagged))
    x = torch.randn(X)
    given = [torch.randn(X) if value == "added" else value for value in given]
    a, b = model(x, *given), stock(x, *given)
    assert type(a) is type(b)
    if isinstance(b, tuple):
        (a,), (b,) = a, b
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    counts = operators(model, x, *given)
    assert counts["bare"] == 1 and counts["relu"] == 0


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_images_of_one_position(format):
    """An addend [N, C, 1, 1] has the sum's shape there."""
    model, stock, _ = both(Block(lambda s, x: s.conv(s.norm(x)) + x))
    check_addends(model, stock, torch.randn(3, 4, 1, 1).contiguous(memory_format=format))


def test_channels_last():
    model, stock, _ = both(Block(lambda s, x: s.conv(s.act(s.norm(s.other(x) + embedding(s, x)))) + x))
    for m in (model, stock):
        m.to(memory_format=torch.channels_last)
    x = torch.randn(X).contiguous(memory_format=torch.channels_last)
    check_addends(model, stock, x)
    if ON_CUDA and not stock(x).is_contiguous(memory_format=torch.channels_last):
        pytest.skip("this cuDNN's convolutions of channels-last tensors are channels-first, stock's too")
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    assert operators(model, x)["bare"] == 2 and operators(model, x)["channel_affine"] == 1


# As transformers over images, which go back to channels-first for a convolution.
CONVOLVED_COPY = "return s.conv(x.permute(0, 2, 3, 1).neg().permute(0, 3, 1, 2).contiguous()) + x"


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [1, 3])
def test_copies_before_convolutions(size, format):
    block = Block(CONVOLVED_COPY, conv=nn.Conv2d(4, 4, size, padding=size // 2)).to(memory_format=format)
    model, stock, report = both(nn.Sequential(block, nn.GroupNorm(2, 4)))
    assert report.biases == ["0.conv"]
    x = torch.randn(X).contiguous(memory_format=format)
    check_same(model, stock, x)
    assert model(x).stride() == stock(x).stride()
    assert operators(stock, x)["clone"] == (format == torch.channels_last)
    assert operators(model, x)["clone"] == 0


def test_copies_that_others_see():
    x = torch.randn(X).contiguous(memory_format=torch.channels_last)

    def both_of(code):
        return both(nn.Sequential(Block(code).to(memory_format=torch.channels_last), nn.GroupNorm(2, 4)))

    last = "y = x.permute(0, 2, 3, 1).neg(); c = y.permute(0, 3, 1, 2).contiguous()"
    for code in (f"{last}; return s.conv(c) + c", f"{last}; y += 1.0; return s.conv(c) + x"):
        model, stock, report = both_of(code)
        assert report.biases == ["0.conv"]
        check_same(model, stock, x)
        assert operators(model, x)["clone"] == 1
    # A convolution that is hooked later sees what it saw before.
    model, _, _ = both_of(CONVOLVED_COPY)
    seen = []
    model[0].conv.register_forward_pre_hook(lambda module, args: seen.append(args[0].is_contiguous()))
    model(x)
    assert seen == [True]


@pytest.mark.parametrize("convolution,norm,shape", [
    (nn.Conv1d(4, 6, 1), nn.BatchNorm1d(5), (4, 5)), (nn.Conv1d(4, 6, 1), nn.InstanceNorm1d(6, affine=True), (4, 5)),
    (nn.Conv2d(4, 6, 1), nn.InstanceNorm2d(6, affine=True), (4, 5, 5)),
    (nn.Conv2d(4, 6, 1), nn.GroupNorm(5, 5), (4, 5, 5)),
    (nn.ConvTranspose3d(4, 6, 1), nn.InstanceNorm3d(6), (4, 5, 5, 5))], ids=str)
def test_inputs_without_a_batch_axis(convolution, norm, shape):
    """Channels are the first axis of what a convolution gives then. BatchNorm1d and GroupNorm take that for the batch."""
    layers = nn.Sequential(copy.deepcopy(convolution), copy.deepcopy(norm))
    model, stock, report = both(layers.to(DEVICE, torch.float64))
    assert report.biases == ["0"]
    check_same(model, stock, torch.randn(shape))
    model, stock, report = both(Block(lambda s, x: s.conv(x) + x))
    assert report.biases == ["conv"]
    check_same(model, stock, torch.randn(4, 5, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_16_bits_are_no_farther_from_the_truth(dtype, autocast):
    """Than stock's are, in the Euclidean norm: there is a rounding less for each bias and each sum."""
    code = lambda s, x: (s.other(s.act(s.norm(s.conv(x) + embedding(s, x)))) + x) / 1.0  # noqa: E731
    torch.set_default_dtype(torch.float32)
    model, stock, _ = both(Block(code))
    exact = copy.deepcopy(stock).double()
    x = torch.randn(8, *X[1:])
    if not autocast:
        model, stock, x = model.to(dtype), stock.to(dtype), x.to(dtype)
        exact = copy.deepcopy(stock).double()
    with torch.autocast(DEVICE, dtype) if autocast else contextlib.nullcontext():
        y, z = model(x), stock(x)
        counts = operators(model, x)
    want = exact(x.double())
    assert y.dtype == z.dtype and counts["bare"] == 2 and counts["biased"] == 0
    assert (y.double() - want).norm() <= 1.02 * (z.double() - want).norm()


def test_sums_keep_their_type_where_norms_give_f32():
    torch.set_default_dtype(torch.float32)
    model, stock, _ = both(Block("zero = s.conv.weight.new_zeros(()); return s.other(s.conv(s.norm(x)) + x) + zero"))
    before = nft.functional.autocast_to_float32(True)
    try:
        with torch.autocast(DEVICE, torch.bfloat16):
            x = torch.randn(X).bfloat16()
            with Operators() as found:
                y = model(x)
            assert y.dtype == stock(x).dtype == torch.bfloat16 and found.counts["channel_affine"] == 2
    finally:
        nft.functional.autocast_to_float32(before)


def test_sums_of_biases_are_not_rounded_to_16_bits():
    """256 + 1 is 256 in bf16."""
    value, one = torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16), torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    bias = torch.tensor([256.0], dtype=torch.bfloat16)
    sum = _calls.add_with_biases(_calls.Biased(value, bias), one, False)
    assert sum.value is value and float(sum.bias) == 257.0
    sum = _calls.add_with_biases(_calls.Biased(value - 256, bias), _calls.Biased(value, one.flatten()), False)
    assert sum.bias is None and float(sum.value.amin()) == float(sum.value.amax()) == 1.0


def test_biases_of_another_type_are_stocks_affair():
    """Stock refuses a bias in f32 with a weight in f64."""
    model, stock, _ = both(nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)))
    for m in (model, stock):
        m[0].bias.data = m[0].bias.data.float()
        with pytest.raises(RuntimeError, match="should be the same"):
            m(torch.randn(X))


@of_the_cpu
@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex_convolutions():
    model = Block(lambda s, x: (s.conv(x) + x) / 1.0)
    model.conv.to(torch.complex128)
    stock = copy.deepcopy(model)
    assert nft.convert(model).biases == ["conv"]
    x = torch.randn(X, dtype=torch.complex128)
    torch.testing.assert_close(model(x), stock(x))


def test_by_default_on_cuda_alone(monkeypatch):
    """Asked in each call: a model may move."""
    assert BY_DEFAULT == {"cuda"}
    model, stock, report = both(Block(lambda s, x: (s.other(s.norm(s.conv(x) + embedding(s, x))) + x) / 1.0))
    assert report.biases == ["conv", "other"]
    x = torch.randn(X)
    for devices, moved in (({"elsewhere"}, 0), ({torch.device(DEVICE).type}, 2), ({"elsewhere"}, 0)):
        monkeypatch.setattr(_calls, "BIAS_DEVICES", devices)
        counts = operators(model, x)
        assert counts["bare"] == moved and counts["biased"] == 2 - moved and counts["div"] == 0
        check_same(model, stock)


def test_a_model_that_moves(monkeypatch):
    """The device of a meta tensor stands for another one."""
    monkeypatch.setattr(_calls, "BIAS_DEVICES", {"meta"})
    model, stock, _ = both(nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.SiLU()))
    check_same(model, stock)
    assert operators(model, torch.randn(X))["bare"] == 0
    moved = copy.deepcopy(model).to("meta")
    x = torch.randn(X).to("meta")
    assert operators(moved, x)["bare"] == 1 and moved(x).shape == X
    assert operators(model, torch.randn(X))["bare"] == 0


# ---- what changes later ---------------------------------------------------------------------------------------------


def whole():
    return Block(lambda s, x: (s.other(s.act(s.norm(s.conv(x) + embedding(s, x)))) + x) / 1.0)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("where", ["conv", "norm", "act", "other"])
def test_hooks_that_come_later(hook, where):
    """They are called with stock's values."""
    model, stock, report = both(whole())
    assert report.biases == ["conv", "other"]
    seen = {}
    for m in (model, stock):
        values = seen[m] = []
        getattr(getattr(m, where), hook)(lambda module, *a, values=values: values.append(a) or None)
    check_same(model, stock)
    assert len(seen[model]) == len(seen[stock]) == 3
    for a, b in zip(seen[model], seen[stock]):
        for u, v in zip(a, b):
            for s, t in zip(*((w if isinstance(w, tuple) else (w,)) for w in (u, v))):
                torch.testing.assert_close(s, t)
    getattr(model, where).__dict__[{"register_forward_hook": "_forward_hooks", "register_forward_pre_hook":
                                    "_forward_pre_hooks", "register_full_backward_hook": "_backward_hooks",
                                    "register_full_backward_pre_hook": "_backward_pre_hooks"}[hook]].clear()
    assert operators(model, torch.randn(X))["bare"] == 2


class Lora(nn.Conv2d):
    """As PEFT wraps layers."""

    def __init__(self, base):
        nn.Module.__init__(self)
        self.base, self.bias = base, base.bias

    def forward(self, x):
        return self.base(x) + x


def prune(m):
    torch.manual_seed(3)
    nn.utils.prune.random_unstructured(m.conv, "bias", 0.5)
    nn.utils.prune.random_unstructured(m.other, "weight", 0.5)


def old_weight_norm(m):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(m.conv)


def tiled(x, weight, bias):
    """As seamless tiling has convolutions."""
    return F.conv2d(F.pad(x, (1,) * 4, mode="circular"), weight, bias)


CHANGES = {
    "bias is removed": (lambda m: setattr(m.conv, "bias", None), 2),
    "another bias": (lambda m: setattr(m.conv, "bias", nn.Parameter(torch.randn(4))), 2),
    "forward on the object": (lambda m: setattr(m.conv, "forward", lambda x: 2 * nn.Conv2d.forward(m.conv, x)), 1),
    "a convolution of its own": (lambda m: setattr(m.conv, "_conv_forward", tiled), 2),
    "identity": (lambda m: setattr(m, "conv", nn.Identity()), 1),
    "another convolution": (lambda m: setattr(m, "conv", random(nn.Conv2d(4, 4, 1))), 1),
    "a wrapper": (lambda m: setattr(m, "conv", Lora(m.conv)), 1),
    "weights of another size": (lambda m: setattr(m, "norm", random(nn.GroupNorm(4, 4))), 2),
    "a norm of another package": (lambda m: setattr(m, "norm", nn.LayerNorm((4, 5, 5))), 2),
    "no norm": (lambda m: setattr(m, "norm", nn.Identity()), 2),
    "pruned": (prune, 0),
    "parametrized": (lambda m: nn.utils.parametrizations.weight_norm(m.conv), 1),
    "weight_norm": (old_weight_norm, 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_modules_that_change_later(name):
    model, stock, _ = both(whole())
    change, bare = CHANGES[name]
    for m in (model, stock):
        torch.manual_seed(5)
        change(m)
    check_same(model, stock)
    assert operators(model, torch.randn(X))["bare"] == bare
    nft.revert(model) if name != "parametrized" else None
    check_same(model, stock)


def test_global_hooks():
    model, stock, _ = both(whole())
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *a: seen.append(type(module)))
    try:
        model(torch.randn(X))
    finally:
        handle.remove()
    assert seen.count(nn.Conv2d) == 2 and seen.count(nft.GroupNorm) == 1


def test_converting_again():
    model, stock, report = both(whole())
    model.conv = nn.Conv2d(4, 4, 1, bias=False)
    model.other.register_forward_hook(lambda *a: None)
    assert nft.convert(model).biases == []
    model.other._forward_hooks.clear()
    assert nft.convert(model).biases == ["other"]


# ---- around it ------------------------------------------------------------------------------------------------------


def test_copies_and_undoing():
    model, stock, report = both(whole())
    assert list(model.state_dict()) == list(stock.state_dict()) and repr(model.other) == repr(stock.other)
    assert type(model.conv) is nn.Conv2d and vars(model.conv).keys() == vars(stock.conv).keys() | {"_normfuse_moves_bias"}
    x = torch.randn(X)
    module = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))
    pair = copy.deepcopy(module)
    nft.convert(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.load_state_dict(pair.state_dict())
        check_same(other, pair)
        assert operators(other, x)["bare"] == 1
    nft.revert(module)
    assert type(module) is nn.Sequential and operators(module, x)["biased"] == 1
    check_same(module, pair)
    nft.revert(model)
    assert type(model) is type(stock) and repr(model) == repr(stock) and operators(model, x)["biased"] == 2


def test_optimizers_and_averages_go_on():
    model, stock, _ = both(whole())
    for m in (model, stock):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        average = torch.optim.swa_utils.AveragedModel(m)
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            (m(torch.randn(X)) ** 2).mean().backward()
            optimizer.step()
            average.update_parameters(m)
        m.average = list(average.parameters())
    for a, b in zip([*model.parameters(), *model.average], [*stock.parameters(), *stock.average], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_frozen_parameters():
    model, stock, _ = both(whole())
    for m in (model, stock):
        m.conv.bias.requires_grad_(False), m.other.weight.requires_grad_(False), m.norm.requires_grad_(False)
    check_steps(model, stock, torch.randn(X))
    for m in (model, stock):
        m.requires_grad_(False)
    with torch.inference_mode():
        x = torch.randn(X)
        torch.testing.assert_close(model(x), stock(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    model, stock, _ = both(nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.SiLU()))

    check_same(*(Of(lambda s, x: checkpoint(s.body, x, use_reentrant=reentrant), body=m) for m in (model, stock)))


def test_compile():
    model, stock, _ = both(whole())
    check_steps(torch.compile(model, backend="aot_eager", fullgraph=True), stock, torch.randn(X))


def test_export_and_traces():
    model, stock, _ = both(whole().eval())
    x = torch.randn(X)
    want = stock(x)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    assert "pre_bias" not in [node.op for node in program.graph.nodes]
    convolutions = [node for node in program.graph.nodes if "conv2d" in str(node.target)]
    assert len(convolutions) == 2 and all(node.args[2] is not None for node in convolutions)  # left to the compiler
    larger = torch.randn(5, *X[1:])
    torch.testing.assert_close(program.module()(larger), stock(larger))
    torch.testing.assert_close(program.run_decompositions().module()(x), want)
    torch.testing.assert_close(torch.jit.trace(model, (x,))(x), want)
    pair = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))
    want = pair(x)
    nft.convert(pair)
    torch.testing.assert_close(torch.fx.symbolic_trace(pair)(x), want)


def test_function_transforms():
    model, stock, _ = both(whole())
    x = torch.randn(3, *X)
    torch.testing.assert_close(torch.vmap(model)(x), torch.stack([stock(part) for part in x]))
    parameters = {name: p.detach() * 1.1 for name, p in stock.named_parameters()}

    def loss(parameters, module):
        return (torch.func.functional_call(module, parameters, (x[0],)) ** 2).sum()

    for a, b in zip(torch.func.grad(loss)(parameters, model).values(),
                    torch.func.grad(loss)(parameters, stock).values()):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    _, a = torch.func.jvp(model, (x[0],), (x[1],))
    _, b = torch.func.jvp(stock, (x[0],), (x[1],))
    torch.testing.assert_close(a, b)


def test_second_derivatives():
    model, stock, _ = both(whole())
    results = []
    for m in (model, stock):
        x = torch.linspace(-1, 1, 200).view(X).requires_grad_()
        first = torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()], create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), [x, *m.parameters()],
                                           allow_unused=True))
    for a, b in zip(*results):
        assert (a is None) == (b is None)
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8) if a is not None else None


def test_data_parallel_training(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    torch.distributed.init_process_group("nccl" if ON_CUDA else "gloo", init_method=f"file://{tmp_path}/store", rank=0,
                                         world_size=1)
    try:
        model, stock, _ = both(whole())
        check_same(nn.parallel.DistributedDataParallel(model), stock)
        assert operators(model, torch.randn(X))["bare"] == 2
    finally:
        torch.distributed.destroy_process_group()


def test_folding_batch_norms_afterwards():
    """The convolution has a new bias then, and what is left of the batch norm takes a tensor."""
    model, stock, _ = both(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval())
    assert not nft.fold_batch_norm(model).left
    for _ in range(2):
        x = torch.randn(X)
        torch.testing.assert_close(model(x), stock(x), rtol=1e-10, atol=1e-10)
        nft.convert(model)


def test_gradients_in_f32():
    """Of every parameter and the input, beside f64: no farther than twice stock's distance and a few roundings."""
    model, stock, _ = both(whole())
    exact = copy.deepcopy(stock)
    model, stock = model.float(), stock.float()
    x = torch.randn(16, *X[1:])
    results = []
    for m, t in ((model, x.float()), (stock, x.float()), (exact, x.float().double())):
        t = t.clone().requires_grad_()
        y = m(t)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
        results.append([y.detach(), t.grad, *(p.grad for p in m.parameters())])
    for ours, stocks, want in zip(*results):
        unit = 2.0**-24 * want.norm() * 8
        assert (ours.double() - want).norm() <= 2 * (stocks.double() - want).norm() + unit


@pytest.mark.parametrize("name", ["residual", "embedding and residual", "over 1.0"])
def test_nothing_more_is_kept_for_the_backward(name):
    """Of the tensors that are as large as the input. Under a checkpoint, what is kept last also decides how much is
    computed again."""
    model, stock, _ = both(Block(SUMS[name]))
    kept = []
    for m in (model, stock):
        memory = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: memory.setdefault(t.data_ptr(), t), lambda t: t):
            m(torch.randn(X))
        kept.append(sum(t.numel() >= 200 for t in memory.values()))
    assert kept == [2, 2]  # the norm's input, and the convolution's


# ---- diffusers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def diffusers():
    load_torchvision()  # which diffusers imports
    return load("diffusers")


@pytest.mark.parametrize("options,counts", [
    ({}, {"channel_affine": 1}), ({"out_channels": 16}, {"channel_affine": 1}),
    ({"temb_channels": None}, {"channel_affine": 1}), ({"skip_time_act": True}, {"channel_affine": 1}),
    ({"time_embedding_norm": "scale_shift"}, {"channel_affine": 1}),
    ({"output_scale_factor": 2**0.5}, {"channel_affine": 1, "div": 1}), ({"dropout": 0.2}, {"channel_affine": 1})],
    ids=str)
def test_resnet_block(diffusers, options, counts):
    from diffusers.models.resnet import ResnetBlock2D
    block = random(ResnetBlock2D(**{"in_channels": 8, "temb_channels": 12, "groups": 4, **options}).double())
    stock, report = copy.deepcopy(block), nft.convert(block)
    assert report.biases == ["conv1", "conv2", *["conv_shortcut"] * ("out_channels" in options)]
    x, temb = torch.randn(2, 8, 5, 5), torch.randn(2, 12) if options.get("temb_channels", 1) else None
    check_steps(block, stock, x, temb)
    found = operators(block, x, temb)
    assert found["bare"] == len(report.biases) and found["biased"] == 0
    assert found["group_norm_inference+bias"] == 1
    for name in ("channel_affine", "div"):
        assert found[name] == counts.get(name, 0)


def stable_diffusion_vae(diffusers, **options):
    return diffusers.AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 4,
                                   up_block_types=("UpDecoderBlock2D",) * 4,
                                   block_out_channels=(32, 32, 64, 64), layers_per_block=2, **options)


@pytest.mark.parametrize("options", [{"latent_channels": 4}, {"latent_channels": 16, "use_quant_conv": False,
                                                              "use_post_quant_conv": False}], ids=["SD, SDXL", "FLUX"])
def test_decoders(diffusers, options):
    def decode(m, z):
        return m.decode(z, return_dict=False)[0]

    latents = images(1, options["latent_channels"], 4, 4)
    report = compared(lambda: stable_diffusion_vae(diffusers, **options), latents, call=decode, training=(True, False))
    moved = [name for name in report.biases if name.startswith("decoder")]
    # Two in each of 14 residual blocks, one in the shortcut of the one that changes its width.
    assert len(moved) == 29
    stock = stable_diffusion_vae(diffusers, **options).double().eval()
    model = copy.deepcopy(stock)
    nft.convert(model)
    before, after = (operators(m, latents, call=decode) for m in (stock, model))
    # Left are the first, those behind the upsamplings, the last.
    assert after["bare"] == 29 and after["biased"] == before["biased"] - 29 == 5 + (options["latent_channels"] == 4)
    assert after["channel_affine"] == 14 and before["div"] - after["div"] == 14


def test_monai_unet():
    monai_nets = load("monai.networks.nets")
    report = compared(lambda: monai_nets.UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16),
                                              strides=(2, 2), num_res_units=2), images(2, 1, 16, 16))
    # All but that of the last unit's last convolution, and those of its shortcut.
    assert len(report.biases) == len(report.layers) + 3 and not report.left


def test_unet(diffusers):
    """Training: gradients of embeddings and of biases."""
    inputs = images(2, 4, 8, 8), torch.tensor([3, 500]), images(2, 5, 16)

    def make():
        return diffusers.UNet2DConditionModel(sample_size=8, block_out_channels=(32, 64), cross_attention_dim=16,
                                              attention_head_dim=8, layers_per_block=1,
                                              down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                                              up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))

    def call(m, x, t, e):
        return m(x, t, e, return_dict=False)[0]

    report = compared(make, *inputs, call=call)
    blocks = {name.rsplit(".", 1)[0] for name in report.biases if "resnets" in name}
    assert len(blocks) == 8 and all(f"{block}.conv{i}" in report.biases for block in blocks for i in (1, 2))
    assert sum("proj_out" in name for name in report.biases) == 4  # the sums behind attentions
    model = make().double().eval()
    nft.convert(model)
    assert operators(model, *inputs, call=call)["group_norm_inference+bias"] == 8

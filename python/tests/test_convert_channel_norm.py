# SPDX-License-Identifier: MIT
"""convert and norms over channels: layers of diffusers, timm, torchvision, Segment Anything, transformers and ComfyUI, and
what follows them, beside stock in f64; types and layouts of results; views between a norm and what reads it. Packages
that are not installed are stood in for by classes of the same module, name and arithmetic."""
import copy
import itertools
import pickle
import re
import types

import pytest

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from device import DEVICE, default_device, seeded_f64  # noqa: E402, F401
from normfuse.torch import _rules  # noqa: E402
from test_convert import Of, both, check_same, folded, forward_of  # noqa: E402
from test_models import load, load_torchvision  # noqa: E402
from test_rules import published  # noqa: E402
from torch import nn  # noqa: E402

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def shuffled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4).add_(0.3)
    return model


# ---- classes of packages that may not be installed -------------------------------------------------------------------------


class ComfyRMS(nn.Module):
    """Parameters of any type and device, cast to the input's."""

    def __init__(self, dim, channel_first=True, images=True, bias=False):
        super().__init__()
        shape = (dim, *((1, 1) if images else (1, 1, 1))) if channel_first else (dim,)
        self.channel_first, self.scale = channel_first, dim ** 0.5
        self.gamma = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, x):
        y = F.normalize(x, dim=1 if self.channel_first else -1) * self.scale * self.gamma.to(x)
        return y + (0 if self.bias is None else self.bias.to(x))


class WrittenOut(nn.Module):
    """Segment Anything's."""

    def __init__(self, channels, eps=1e-6):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels)), eps

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class OfFormat(nn.LayerNorm):
    """transformers'."""

    def __init__(self, channels, eps=1e-6, data_format="channels_last"):
        super().__init__(channels, eps)
        self.data_format = data_format

    def forward(self, x):
        if self.data_format == "channels_first":
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


class OlderOfFormat(WrittenOut):
    """The same before it was a subclass; in the type of its input here, where there it was f32."""

    def __init__(self, channels, eps=1e-6, data_format="channels_last"):
        super().__init__(channels, eps)
        self.data_format = data_format

    def forward(self, x):
        if self.data_format == "channels_first":
            return super().forward(x)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def known(monkeypatch, name):
    """One layer, and the shape of an input of it."""
    if name.startswith("comfy"):
        kind = published(monkeypatch, ComfyRMS, "comfy.ldm.wan.vae", "RMS_norm")
        return kind(6, "last" not in name, bias="bias" in name), (2, 4, 5, 6) if "last" in name else (2, 6, 4, 5)
    if name in ("segment_anything", "sam2"):
        module = {"sam2": "sam2.modeling.sam2_utils", "segment_anything": "segment_anything.modeling.common"}[name]
        return published(monkeypatch, WrittenOut, module, "LayerNorm2d")(6), (2, 6, 4, 5)
    if name.startswith("transformers"):
        _, age, word = name.split()
        kind = published(monkeypatch, OfFormat if age == "new" else OlderOfFormat, "transformers.models.sam.modeling_sam",
                         "SamLayerNorm")
        return kind(6, data_format=word), (2, 6, 4, 5) if word == "channels_first" else (2, 4, 5, 6)
    load_torchvision()
    if name.startswith("timm"):
        return getattr(load("timm.layers"), name.split()[1])(6, affine="alone" not in name), (2, 6, 4, 5)
    if name == "torchvision":
        return load("torchvision.models.convnext").LayerNorm2d(6, eps=1e-6), (2, 6, 4, 5)
    _, file, kind, *words = name.split()
    kind = getattr(load("diffusers.models." + file), kind)
    if kind.__name__ == "RMSNorm":
        return kind(6, 1e-5, elementwise_affine="alone" not in words, bias="bias" in words), (2, 4, 5, 6)
    if kind.__name__ == "PerChannelRMSNorm":
        return kind(channel_dim=-1 if "last" in words else 1), (2, 4, 5, 6) if "last" in words else (2, 6, 3, 4)
    layer = kind(6, channel_first="last" not in words, images="video" not in words, bias="bias" in words)
    return layer, (2, 4, 5, 6) if "last" in words else (2, 6, 2, 4, 5) if "video" in words else (2, 6, 4, 5)


KNOWN = ["comfy", "comfy bias", "comfy last", "segment_anything", "sam2", "transformers new channels_first",
         "transformers new channels_last", "transformers older channels_first", "transformers older channels_last",
         "timm LayerNorm2d", "timm RmsNorm2d", "timm RmsNorm2d alone", "torchvision",
         *(f"diffusers autoencoders.autoencoder_kl_{file} {kind}{words}" for file, kind, words in (
             ("wan", "WanRMS_norm", " video"), ("wan", "WanRMS_norm", " bias"), ("wan", "WanRMS_norm", " last"),
             ("qwenimage", "QwenImageRMS_norm", ""), ("qwenimage21", "QwenImage21RMS_norm", ""),
             ("hunyuanvideo15", "HunyuanVideo15RMS_norm", " video"),
             ("hunyuanimage_refiner", "HunyuanImageRefinerRMS_norm", " bias"), ("ltx2", "PerChannelRMSNorm", ""),
             ("ltx2", "PerChannelRMSNorm", " last"))),
         "diffusers normalization RMSNorm", "diffusers normalization RMSNorm bias", "diffusers normalization RMSNorm alone"]


# One of each class of ours, for torch.compile.
COMPILED = {"comfy bias", "sam2", "transformers new channels_last", "transformers older channels_first",
            "timm LayerNorm2d", "timm RmsNorm2d", "diffusers autoencoders.autoencoder_kl_wan WanRMS_norm bias",
            "diffusers autoencoders.autoencoder_kl_ltx2 PerChannelRMSNorm", "diffusers normalization RMSNorm bias"}


def exact(layer):
    """The layer, with statistics of the input's type where its class has them in f32 alone."""
    for module in layer.modules():
        if type(module).__name__ == "RMSNorm" and type(module).__module__ == "diffusers.models.normalization":
            module.forward = types.MethodType(_exact_rms, module)
    return layer


def _exact_rms(self, x):
    y = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()  # laid out as x, as a dropout's mask will be
    y = y if self.weight is None else y * self.weight
    return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("name", KNOWN)
def test_layers_with_an_activation_and_a_residual(monkeypatch, name):
    layer, shape = known(monkeypatch, name)

    def forward(s, x):
        y = s.act(s.first(x))
        y = F.relu(s.second(y) + x)
        y = s.third(y) + y
        return s.fourth(y).mul(2)

    layers = {name: copy.deepcopy(layer) for name in ("first", "second", "third", "fourth")}
    block = Of(forward, conv=None, norm=None, **layers)
    stock = shuffled(block)
    model, x = copy.deepcopy(stock), torch.randn(shape)
    report = nft.convert(model)
    assert [r.done for r in report.layers] == [True] * 4
    assert folded(report) == {"first": ("silu",), "second": ("add + relu",), "third": ("add",)}
    check_same(model, exact(copy.deepcopy(stock)), x)
    assert nft.fused(model) == {"first": ("silu",), "second": ("add + relu",), "third": ("add",), "fourth": ("",)}
    kind = type(layer)
    assert isinstance(model.first, kind) and repr(model.first) == repr(stock.first)
    copied = [copy.deepcopy(model), torch.fx.symbolic_trace(model)]
    for other in copied:
        torch.testing.assert_close(other(x), model(x), rtol=1e-12, atol=1e-12)
    if "." in kind.__module__ and not name.startswith(("comfy", "sam2", "segment", "transformers")):
        again = pickle.loads(pickle.dumps(model.first))
        assert torch.equal(again(x), model.first(x)) and type(again) is type(model.first)
    if name in COMPILED:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-13, atol=1e-13)
    nft.revert(model)
    assert type(model.first) is kind and torch.equal(model(x), stock(x))


@pytest.mark.parametrize("name", KNOWN)
def test_types_and_layouts_of_results(monkeypatch, name):
    """As stock's, for every type of the input and of the parameters that stock takes, alone and with what follows: one
    rounding where stock has several."""
    layer, shape = known(monkeypatch, name)
    shuffled(layer)
    for dtype, parameters, last in itertools.product(DTYPES, DTYPES, (False, True)):
        stock = copy.deepcopy(layer).to(parameters)
        x = torch.randn(shape).to(dtype)
        if last and len(shape) == 4 and shape[1] == 6:
            x = x.to(memory_format=torch.channels_last)
        try:
            want = stock(x)
        except RuntimeError:  # types that it does not mix
            continue
        blocks = [nn.Sequential(copy.deepcopy(stock), nn.SiLU()), copy.deepcopy(stock)]
        for block in blocks:
            nft.convert(block)
        got = blocks[1](x)
        assert (got.dtype, got.stride()) == (want.dtype, want.stride()), (dtype, parameters, last)
        exact_y = exact(copy.deepcopy(layer).to(parameters).double())(x.double())
        near = UNIT[want.dtype] + 2.0**-19 if want.dtype != torch.float64 else 2.0**-21  # f32 statistics of stock's
        if dtype != want.dtype and (dtype, want.dtype) not in _rules._OTHER_RESULTS:
            near = 8 * max(UNIT[dtype], UNIT[want.dtype])  # its own forward runs
        torch.testing.assert_close(got.double(), exact_y, rtol=2 * near, atol=2 * near)
        fused = blocks[0](x)
        assert fused.dtype == want.dtype
        torch.testing.assert_close(fused.double(), F.silu(exact_y), rtol=4 * near, atol=4 * near)


@pytest.mark.parametrize("name", ["timm LayerNorm2d", "timm RmsNorm2d"])
def test_fast_norms_are_left(monkeypatch, name):
    layer, _ = known(monkeypatch, name)
    layer._fast_norm = True
    report = nft.convert(layer)
    assert report.left[0].reason == "its _fast_norm is on"


def test_what_a_layer_cannot_do_its_own_forward_does(monkeypatch):
    """Of other types, with arguments of its own, and where an attribute was changed: what stock computes."""
    layer, shape = known(monkeypatch, "diffusers autoencoders.autoencoder_kl_wan WanRMS_norm")
    model, stock, _ = both(shuffled(nn.Sequential(layer, nn.ReLU())))
    x = torch.randn(shape)
    for value in (2.0, layer.scale):
        model[0].scale = stock[0].scale = value
        check_same(model, stock, x)
    mixed = x.float()  # f64 of f32, which is no result of channel norm
    assert model(mixed).dtype == stock(mixed).dtype == torch.float64
    torch.testing.assert_close(model(mixed), stock(mixed), rtol=0, atol=0)
    layer, shape = known(monkeypatch, "diffusers autoencoders.autoencoder_kl_ltx2 PerChannelRMSNorm")
    model = copy.deepcopy(layer)
    nft.convert(model)
    x = torch.randn(shape)
    torch.testing.assert_close(model(x, channel_dim=1), layer(x, channel_dim=1), rtol=0, atol=0)
    model.channel_dim = layer.channel_dim = 2
    torch.testing.assert_close(model(x), layer(x), rtol=0, atol=0)


def test_autocast(monkeypatch):
    """Types are stock's there, too."""
    for name in KNOWN:
        layer, shape = known(monkeypatch, name)
        stock = shuffled(layer).float()
        model, x = copy.deepcopy(stock), torch.randn(shape).bfloat16()
        nft.convert(model)
        with torch.autocast(DEVICE, torch.bfloat16):
            want, got = stock(x), model(x)
        assert got.dtype == want.dtype, name
        torch.testing.assert_close(got, want, rtol=2.0**-6, atol=2.0**-5)


# ---- blocks of packages -----------------------------------------------------------------------------------------------------


def diffusers(file, kind, *arguments, **words):
    load_torchvision()
    return getattr(load("diffusers.models.autoencoders." + file), kind)(*arguments, **words)


VIDEO, IMAGE, TIME = (2, 8, 3, 6, 5), (2, 8, 6, 5), (2, 32, 1, 1, 1)
SILU = {"norm1": ("silu",), "norm2": ("silu",)}
MODULATED = {"norm1": ("scale + shift + silu",), "norm2": ("scale + shift + silu",)}
BLOCKS = {
    "wan": (lambda: diffusers("autoencoder_kl_wan", "WanResidualBlock", 8, 12), [VIDEO], SILU),
    "wan attention": (lambda: diffusers("autoencoder_kl_wan", "WanAttentionBlock", 8), [VIDEO], {}),
    "qwen-image": (lambda: diffusers("autoencoder_kl_qwenimage", "QwenImageResidualBlock", 8, 12), [VIDEO], SILU),
    "hunyuan video": (lambda: diffusers("autoencoder_kl_hunyuanvideo15", "HunyuanVideo15ResnetBlock", 8, 12), [VIDEO],
                      SILU),
    "hunyuan refiner": (lambda: diffusers("autoencoder_kl_hunyuanimage_refiner", "HunyuanImageRefinerResnetBlock",
                                           8, 12),
                        [VIDEO], SILU),
    "ltx": (lambda: diffusers("autoencoder_kl_ltx", "LTXVideoResnetBlock3d", 8, 12, elementwise_affine=True), [VIDEO],
            SILU),
    "ltx of a time": (lambda: diffusers("autoencoder_kl_ltx", "LTXVideoResnetBlock3d", 8, 8,
                                        timestep_conditioning=True),
                      [VIDEO, TIME], MODULATED),
    "ltx 2": (lambda: diffusers("autoencoder_kl_ltx2", "LTX2VideoResnetBlock3d", 8, 12), [VIDEO], SILU),
    "ltx 2 of a time": (lambda: diffusers("autoencoder_kl_ltx2", "LTX2VideoResnetBlock3d", 8, 8,
                                          timestep_conditioning=True), [VIDEO, TIME], MODULATED),
    "dc": (lambda: diffusers("autoencoder_dc", "ResBlock", 8, 8, "rms_norm", "silu"), [IMAGE], {"norm": ("add",)}),
    "dc vit": (lambda: diffusers("autoencoder_dc", "EfficientViTBlock", 8, attention_head_dim=4, norm_type="rms_norm"),
               [IMAGE], {"conv_out.norm": ("add",)}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_diffusers(name):
    make, shapes, expected = BLOCKS[name]
    stock = shuffled(make())
    model, inputs = copy.deepcopy(stock), [torch.randn(shape) for shape in shapes]
    report = nft.convert(model)
    assert folded(report) == expected and all(layer.done for layer in report.layers)
    check_same(model, exact(copy.deepcopy(stock)), *inputs)
    assert {path: what for path, what in nft.fused(model).items() if what != ("",)} == expected
    if name in ("wan", "wan attention", "ltx", "ltx of a time", "dc", "dc vit"):  # the others compute the same
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-12, atol=1e-12)


def test_convnext_of_torchvision():
    """The layer norms of its blocks, too, whose input is permuted; nn.LayerNorm elsewhere is none of ours."""
    load_torchvision()
    convnext = load("torchvision.models.convnext")
    settings = [convnext.CNBlockConfig(8, 12, 1), convnext.CNBlockConfig(12, None, 1)]
    model, stock, report = both(shuffled(convnext.ConvNeXt(settings, stochastic_depth_prob=0.0, num_classes=5)))
    assert [layer.kind for layer in report.layers] == ["LayerNorm2d", "LayerNorm", "LayerNorm2d", "LayerNorm", "LayerNorm2d"]
    assert all(layer.done for layer in report.layers)
    for x in (torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)):
        check_same(model, stock, x)
    norm = model.features[1][0].block[2]
    x = torch.randn(2, 8, 4, 4).permute(0, 2, 3, 1)
    assert norm(x).is_contiguous() and isinstance(norm, nn.LayerNorm)
    assert torch.equal(pickle.loads(pickle.dumps(norm))(x), norm(x))
    torch._dynamo.reset()
    x = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)
    nft.revert(model)
    assert type(model.features[1][0].block[2]) is nn.LayerNorm
    assert not nft.convert(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))).layers


@pytest.mark.parametrize("conv_mlp", [False, True])
def test_convnext_of_timm(conv_mlp):
    load_torchvision()
    stock = shuffled(load("timm").create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 12, 12),
                                               conv_mlp=conv_mlp, num_classes=5))
    model = copy.deepcopy(stock)
    report = nft.convert(model)
    assert len(report.layers) == 9 and all(layer.done for layer in report.layers)
    check_same(model, stock, torch.randn(2, 3, 32, 32))


def test_neck_of_sam(monkeypatch):
    """timm's encoder, and the neck as its authors have it: two convolutions with norms."""
    load_torchvision()
    stock = shuffled(load("timm").create_model("samvit_base_patch16", img_size=32, patch_size=16, embed_dim=16, depth=1,
                                               num_heads=2, neck_chans=8, num_classes=0, global_attn_indexes=()))
    model = copy.deepcopy(stock)
    report = nft.convert(model)
    assert [layer.name for layer in report.layers] == ["neck.1", "neck.3"]
    assert all(layer.done for layer in report.layers)
    check_same(model, stock, torch.randn(2, 3, 32, 32))


class Causal(nn.Conv3d):
    def forward(self, x, cache=None):
        return super().forward(x if cache is None else torch.cat([cache, x], 2))


def comfy_block(s, x, caches=None):
    """A loop over an nn.Sequential that looks at each layer, as ComfyUI's ResidualBlock."""
    old = x
    for layer in s.residual:
        if isinstance(layer, Causal) and caches is not None:
            x = layer(x, caches[0])
        else:
            x = layer(x)
    return x + s.shortcut(old)


def test_block_of_comfy(monkeypatch):
    kind = published(monkeypatch, ComfyRMS, "comfy.ldm.wan.vae", "RMS_norm")
    stock = shuffled(Of(comfy_block, conv=None, norm=None, shortcut=nn.Identity(), residual=nn.Sequential(
        kind(8, images=False), nn.SiLU(), Causal(8, 8, (1, 3, 3), padding=(0, 1, 1)), kind(8, images=False), nn.SiLU(),
        nn.Dropout(0.0), Causal(8, 8, 1))))
    model = copy.deepcopy(stock)
    assert folded(nft.convert(model)) == {"residual.0": ("silu", "silu"), "residual.3": ("silu", "silu")}  # two calls
    check_same(model, stock, torch.randn(VIDEO))
    assert nft.fused(model) == {"residual.0": ("silu",), "residual.3": ("silu",)}


# ---- what follows, through views --------------------------------------------------------------------------------------------


def program(code, norm):
    code = forward_of(code, "s, x, other, scale, shift") if isinstance(code, str) else code
    model = Of(code, norm=norm, act=nn.GELU(), prelu=nn.PReLU(6), one=nn.PReLU(), drop=nn.Dropout(0.5))
    del model.conv
    with torch.no_grad():
        model.prelu.weight.uniform_(0.1, 0.6)
    return model


PROGRAMS = {
    "movedim": (lambda s, x, *more: s.act(s.norm(x.movedim(1, -1)).movedim(-1, 1)), "gelu"),
    "permute": ("""
        y = s.norm(x.permute(0, 2, 3, 1))
        y = y.permute((0, 3, 1, 2))
        return F.relu(y + other)""", "add + relu"),
    "permute twice": (lambda s, x, *more: F.silu(s.norm(x.permute(0, 2, 3, 1)).transpose(1, 3).transpose(-1, 2)),
                      "silu"),
    "sum": (lambda s, x, other, *more: s.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + other, "add"),
    "modulated": ("""
        y = s.norm(x.movedim(1, -1)).movedim(-1, 1)
        y = y * (1 + scale) + shift
        return s.act(y)""", "scale + shift + gelu"),
    "scaled": (lambda s, x, other, scale, shift: s.norm(x.movedim(1, -1)).movedim(-1, 1) * (1 + scale), ""),
    "prelu": (lambda s, x, *more: s.prelu(s.norm(x.movedim(1, -1)).movedim(-1, 1)), "prelu"),
    "one slope": (lambda s, x, *more: s.one(s.norm(x.movedim(1, -1))), "prelu"),
    "dropout": (lambda s, x, *more: F.relu(s.drop(s.norm(x.movedim(1, -1)).movedim(-1, 1))), "relu"),
    "view of a dropout": (lambda s, x, *more: F.relu(s.drop(s.norm(x.movedim(1, -1))).movedim(-1, 1)), ""),
    "in place": ("y = s.norm(x.movedim(1, -1)).movedim(-1, 1); y += other; return y.relu_()", "add + relu"),
    "modulated tokens": ("""
        tokens = s.norm(x.movedim(1, -1))
        return tokens * (1 + scale.movedim(1, -1)) + shift.movedim(1, -1)""", "scale + shift"),
    "view of a sum": (lambda s, x, *more: F.relu((s.norm(x.movedim(1, -1)) + x.movedim(1, -1)).movedim(-1, 1)), "add"),
    "another view": (lambda s, x, *more: F.relu(s.norm(x.movedim(1, -1)).flatten(1, 2)), ""),
    "read twice": ("y = s.norm(x.movedim(1, -1)); return F.relu(y.movedim(-1, 1)).sum() + y.sum()", ""),
    "samples moved": ("""
        y = s.norm(x.movedim(1, -1)).transpose(0, 1)
        return y * (1 + scale[:1].movedim(1, -1)) + shift[:1].movedim(1, -1)""", ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_views(name):
    load_torchvision()
    code, fuses = PROGRAMS[name]
    norm = load("diffusers.models.normalization").RMSNorm(6, 1e-5, bias=True)
    model, stock, report = both(shuffled(program(code, norm)))
    inputs = [torch.randn(2, 6, 4, 5), torch.randn(2, 6, 4, 5), torch.randn(2, 6, 1, 1), torch.randn(2, 6, 1, 1)]
    check_same(model, exact(copy.deepcopy(stock)), *inputs)
    model.train(), stock.train()
    assert model(*inputs).stride() == stock(*inputs).stride()
    assert nft.fused(model) == {"norm": (fuses,)}
    said = folded(report).get("norm", ("",))[0]
    assert said == fuses or name == "samples moved", said  # which shapes decide
    model.eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-12, atol=1e-12)


def test_types_that_do_not_fit_are_added_apart():
    """A 16-bit result of an f32 input and an f32 residual: stock's sum is f32."""
    load_torchvision()

    model, stock, _ = both(program(lambda s, x, other: F.relu(s.norm(x) + other),
                                   load("diffusers.models.normalization").RMSNorm(6, 1e-5).bfloat16()))
    for x, other, what in ((torch.float32, torch.float32, ""), (torch.float32, torch.bfloat16, "add + relu"),
                           (torch.bfloat16, torch.bfloat16, "add + relu"), (torch.bfloat16, torch.float32, "")):
        inputs = torch.randn(2, 4, 6).to(x), torch.randn(2, 4, 6).to(other)
        got, want = model(*inputs), stock(*inputs)
        assert got.dtype == want.dtype and nft.fused(model) == {"norm": (what,)}
        torch.testing.assert_close(got, want, rtol=2.0**-6, atol=2.0**-6)


def test_layers_of_ours():
    """nft.LayerNorm2d, RMSNorm2d and ChannelNorm in a model: what follows is fused."""
    stock = nn.Sequential(nn.Conv2d(3, 6, 1), nft.LayerNorm2d(6), nn.GELU(), nft.RMSNorm2d(6), nn.ReLU(),
                          nft.ChannelNorm(6, groups=2, eps_kind="of_norm", activation="silu"), nn.ReLU())
    model = copy.deepcopy(stock)
    assert folded(nft.convert(model)) == {"1": ("gelu",), "3": ("relu",)}
    check_same(model, stock, torch.randn(2, 3, 4, 5))


def test_classes_are_listed_once():
    assert not [name for name in _rules._OF_TOKENS if any(re.fullmatch(known, name) for known in _rules._KNOWN)]


@pytest.mark.parametrize("channels, last, held", [(1024, False, True), (1025, False, False), (4096, True, True),
                                                  (4097, True, False)])
def test_channels_that_a_gpu_holds(channels, last, held):
    """Of norms over more channels the class's own forward runs."""
    x = torch.empty(1, channels, 2, 2, device="meta")
    assert _rules._is_held(x.to(memory_format=torch.channels_last) if last else x, 1) is held
    assert _rules._is_held(torch.empty(3, 4097, device="meta"), -1) is False

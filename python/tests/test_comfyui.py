# SPDX-License-Identifier: MIT
"""The nodes for ComfyUI (integrations/comfyui). ComfyUI is stood in for by classes of the same modules, names and
arithmetic, and by a ModelPatcher that patches objects as its own does."""
import asyncio
import copy
import importlib.util
import pathlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from device import DEVICE, default_device, seeded_f64  # noqa: E402, F401
from test_rules import ComfyGroupNorm, published  # noqa: E402
from torch import nn  # noqa: E402

PACK = pathlib.Path(__file__).resolve().parent.parent.parent / "integrations/comfyui"


class Spatial:
    """GroupNormSpatial: each frame, in chunks of eight."""

    def forward(self, x, *, chunk_size=8):
        b, c, t, h, w = x.shape
        x = x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w)
        y = torch.empty_like(x)
        for first in range(0, b * t, chunk_size):
            y[first:first + chunk_size] = super().forward(x[first:first + chunk_size])
        return y.reshape(b, t, c, h, w).permute(0, 2, 1, 3, 4)


class RMS_norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.channel_first, self.bias = True, None
        self.scale, self.gamma = n ** 0.5, nn.Parameter(torch.rand(n, 1, 1))

    def forward(self, x):
        return F.normalize(x, dim=1 if self.channel_first else -1) * self.scale * self.gamma.to(x) + 0


class PixelNorm(nn.Module):
    def forward(self, x):
        return x / torch.sqrt(torch.mean(x ** 2, dim=1, keepdim=True) + 1e-8)


class Block(nn.Module):
    def __init__(self, norm, n):
        super().__init__()
        self.norm1, self.conv1 = norm(2, n), nn.Conv2d(n, n, 3, padding=1)
        self.norm2, self.conv2 = norm(2, n), nn.Conv2d(n, n, 3, padding=1)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class Coder(nn.Module):
    def __init__(self, norm, over_channels):
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm, 4) for _ in range(2))
        self.last = nn.Sequential(*over_channels, norm(2, 4), nn.SiLU())

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Network(nn.Module):
    """A first_stage_model: ComfyUI calls its methods encode and decode."""

    def __init__(self, norm, over_channels=()):
        super().__init__()
        self.encoder, self.decoder = Coder(norm, []), Coder(norm, over_channels)

    def decode(self, z):
        return self.decoder(z)


class ModelPatcher:
    """What ComfyUI's does with objects: set when the model is loaded, put back when it is unloaded; clones share what
    is to be put back."""

    def __init__(self, model):
        self.model, self.object_patches, self.object_patches_backup = model, {}, {}

    def clone(self):
        other = ModelPatcher(self.model)
        other.object_patches, other.object_patches_backup = self.object_patches.copy(), self.object_patches_backup
        return other

    def add_object_patch(self, name, value):
        self.object_patches[name] = value

    def load(self):
        self.unload()
        for name, value in self.object_patches.items():
            old = set_attr(self.model, name, value)
            self.object_patches_backup.setdefault(name, old)

    def unload(self):
        for name, value in self.object_patches_backup.items():
            set_attr(self.model, name, value)
        self.object_patches_backup.clear()


def set_attr(owner, name, value):
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    old = getattr(owner, last)
    setattr(owner, last, value)
    return old


@pytest.fixture
def norm(monkeypatch):
    return published(monkeypatch, ComfyGroupNorm, "comfy.ops", "disable_weight_init.GroupNorm",
                     run_every_op=lambda: None)


def imported(monkeypatch, name="normfuse_nodes_of_comfyui"):
    """As ComfyUI imports a folder of custom nodes."""
    spec = importlib.util.spec_from_file_location(name, PACK / "__init__.py", submodule_search_locations=[str(PACK)])
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    for part in [part for part in sys.modules if part.startswith(name + ".")]:
        monkeypatch.setitem(sys.modules, part, sys.modules[part])
    return module


@pytest.fixture
def pack(monkeypatch):
    return imported(monkeypatch)


def classes(model):
    return {path: type(module) for path, module in model.named_modules()}


def vae_of(network):
    return types.SimpleNamespace(first_stage_model=network, patcher=ModelPatcher(network))


def test_vae(pack, norm):
    """Converted while it is loaded, by another object than the one that was given; unloaded it is what it was."""
    network, z = Network(norm), torch.randn(2, 4, 5, 5)
    own, expected = classes(network), network.decode(z)
    vae = vae_of(network)
    converted, report = pack.NODE_CLASS_MAPPINGS["NormfuseConvertVAE"]().execute(vae)
    assert report.startswith("10 of 10 norms converted; 10 fused")
    assert classes(network) == own and not vae.patcher.object_patches and converted is not vae
    assert not any(name.startswith("_normfuse_") for module in network.modules() for name in module.__dict__)
    converted.patcher.load()
    assert type(network.decoder.last[0]) is not own["decoder.last.0"]
    assert torch.allclose(network.decode(z), expected, rtol=1e-10, atol=1e-12)
    assert nft.fused(network)
    vae.patcher.load()  # a workflow without the node, on the same model
    assert classes(network) == own and torch.equal(network.decode(z), expected)


def test_again_while_it_is_loaded(pack, norm):
    """The node runs anew on a model that is loaded with its patches: the same patches, and the model stays loaded."""
    network = Network(norm)
    node = pack.NODE_CLASS_MAPPINGS["NormfuseConvertVAE"]()
    first, _ = node.execute(vae_of(network))
    first.patcher.load()
    loaded = classes(network)
    again, report = node.execute(first)
    assert classes(network) == loaded and report.startswith("10 of 10 norms converted")
    assert again.patcher.object_patches == first.patcher.object_patches
    again.patcher.load()
    assert classes(network) == loaded
    again.patcher.unload()
    assert {kind.__name__ for kind in classes(network).values()} >= {"Network", "Coder", "Block"}
    assert nft.convert(copy.deepcopy(network)).converted


def test_stock_layers(pack):
    """Of models whose layers are PyTorch's own."""
    network = Network(nn.GroupNorm)
    node = pack.NODE_CLASS_MAPPINGS["NormfuseConvertVAE"]()
    first, _ = node.execute(vae_of(network))
    first.patcher.load()
    again, _ = node.execute(first)
    assert again.patcher.object_patches == first.patcher.object_patches
    assert type(network.decoder.last[0]) is nft.GroupNorm
    again.patcher.unload()
    assert type(network.decoder.last[0]) is nn.GroupNorm


def test_model(pack, norm):
    """A MODEL is a ModelPatcher whose model has its network at diffusion_model."""
    model = nn.Module()
    model.diffusion_model = Coder(norm, [])
    x, own = torch.randn(2, 4, 5, 5), classes(model)
    expected = model.diffusion_model(x)
    patcher = ModelPatcher(model)
    converted, report = pack.NODE_CLASS_MAPPINGS["NormfuseConvertModel"]().execute(patcher)
    assert report.startswith("5 of 5 norms converted; 5 fused")
    assert all(name.startswith("diffusion_model.") for name in converted.object_patches)
    converted.load()
    assert torch.allclose(model.diffusion_model(x), expected, rtol=1e-10, atol=1e-12)
    converted.unload()
    assert classes(model) == own


def test_failure_leaves_the_model(pack, norm, monkeypatch):
    network = Network(norm)
    own = classes(network)

    def fails(model):
        convert(model)
        raise RuntimeError("in the midst")

    convert = nft.convert
    monkeypatch.setattr(nft, "convert", fails)
    with pytest.raises(RuntimeError, match="in the midst"):
        pack.NODE_CLASS_MAPPINGS["NormfuseConvertVAE"]().execute(vae_of(network))
    assert classes(network) == own


def test_norms_over_channels_are_counted(pack, norm, monkeypatch):
    """Those that convert leaves, beside what it does with the others."""
    rms = published(monkeypatch, RMS_norm, "comfy.ldm.wan.vae", "RMS_norm")
    pixel = published(monkeypatch, PixelNorm, "comfy.ldm.lightricks.vae.pixel_norm", "PixelNorm")
    network, z = Network(norm, [rms(4), pixel()]), torch.randn(2, 4, 5, 5)
    expected = network.decode(z)
    converted, report = pack.NODE_CLASS_MAPPINGS["NormfuseConvertVAE"]().execute(vae_of(network))
    paths = [f"decoder.last.{k}.__class__" for k in (0, 1)]
    left = sum(path not in converted.patcher.object_patches for path in paths)
    assert (f"{left} norms over channels" in report) is (left > 0)
    converted.patcher.load()
    assert torch.allclose(network.decode(z), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("casts", [False, True])
def test_group_norm_spatial(norm, monkeypatch, casts):
    """One call over all frames, with the activation and the addition that follow; weights are cast as the class
    does."""
    ops = sys.modules["comfy.ops"]
    ops.cast_bias_weight = lambda layer, x, offloadable=False: (2 * layer.weight.to(x), layer.bias.to(x), None)
    ops.uncast_bias_weight = lambda layer, weight, bias, offloaded: None
    kind = published(monkeypatch, type("GroupNormSpatial", (Spatial, norm), {}), "comfy.ldm.genmo.vae.model",
                     "GroupNormSpatial")
    monkeypatch.setitem(sys.modules, "comfy.ops", ops)
    stock = nn.Sequential(kind(2, 4), nn.SiLU())
    nn.init.normal_(stock[0].weight)
    stock[0].comfy_cast_weights = casts
    x = torch.randn(3, 4, 5, 6, 7)  # 15 frames are two of stock's chunks
    model = copy.deepcopy(stock)
    assert str(nft.convert(model)).startswith("1 of 1 norms converted; 1 fused")
    y = model(x)
    assert torch.allclose(y, stock(x), rtol=1e-10, atol=1e-12) and y.stride() == stock(x).stride()
    added = torch.randn_like(x)
    assert torch.allclose(model[0](x, post_add=added, activation="relu"), F.relu(stock[0](x) + added), rtol=1e-10,
                          atol=1e-12)
    assert torch.allclose(model[0](x, chunk_size=2), stock[0](x), rtol=1e-10, atol=1e-12)
    scale, shift = torch.randn(2, 3, 4, 1, 1, 1)
    assert torch.allclose(model[0](x, scale=scale, shift=shift), stock[0](x) * (1 + scale) + shift, rtol=1e-10,
                          atol=1e-12)


# ---- what ComfyUI and its registry read -----------------------------------------------------------------------------


def test_nodes_of_the_older_interface(pack):
    """Without comfy_api: ComfyUI's checks of a class of nodes."""
    assert not hasattr(pack, "comfy_entrypoint")
    assert set(pack.NODE_CLASS_MAPPINGS) == set(pack.NODE_DISPLAY_NAME_MAPPINGS)
    for node, kind in zip(pack.NODE_CLASS_MAPPINGS.values(), ("VAE", "MODEL")):
        assert node.INPUT_TYPES() == {"required": {kind.lower(): (kind,)}}
        assert node.RETURN_TYPES == (kind, "STRING") and len(node.RETURN_NAMES) == 2
        assert callable(getattr(node, node.FUNCTION)) and node.CATEGORY == "normfuse" and node.DESCRIPTION


def test_nodes_of_the_newer_interface(monkeypatch, norm):
    """comfy_entrypoint gives an extension whose nodes have the same names, inputs, outputs and results."""
    def kind_of(word):
        return types.SimpleNamespace(Input=lambda name: (word, name),
                                     Output=lambda display_name=None: (word, display_name))

    class ComfyExtension:
        pass

    class ComfyNode:
        pass

    io = types.SimpleNamespace(
        ComfyNode=ComfyNode, Schema=lambda **fields: types.SimpleNamespace(**fields), NodeOutput=lambda *values: values,
        Vae=kind_of("VAE"), Model=kind_of("MODEL"), String=kind_of("STRING"))
    latest = types.ModuleType("comfy_api.latest")
    latest.ComfyExtension, latest.io = ComfyExtension, io
    package = types.ModuleType("comfy_api")
    package.latest = latest
    monkeypatch.setitem(sys.modules, "comfy_api", package)
    monkeypatch.setitem(sys.modules, "comfy_api.latest", latest)
    pack = imported(monkeypatch, "normfuse_nodes_of_a_newer_comfyui")
    extension = asyncio.run(pack.comfy_entrypoint())
    assert isinstance(extension, ComfyExtension)
    nodes = asyncio.run(extension.get_node_list())
    for node, word, (name, older) in zip(nodes, ("vae", "model"), pack.NODE_CLASS_MAPPINGS.items(), strict=True):
        schema = node.define_schema()
        assert issubclass(node, ComfyNode) and schema.node_id == name
        assert schema.display_name == pack.NODE_DISPLAY_NAME_MAPPINGS[name]
        assert schema.inputs == [(word.upper(), word)]
        assert schema.outputs == [(kind, title) for kind, title in zip(older.RETURN_TYPES, older.RETURN_NAMES)]
    network = Network(norm)
    converted, report = nodes[0].execute(vae=vae_of(network))
    assert converted.patcher.object_patches and report.startswith("10 of 10 norms")


def test_metadata_of_the_registry():
    """What the registry requires: a name without "ComfyUI", a version of three numbers, a publisher."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read TOML")
    about = tomllib.loads((PACK / "pyproject.toml").read_text())
    project, comfy = about["project"], about["tool"]["comfy"]
    assert project["name"].isidentifier() and "comfy" not in project["name"].lower() and len(project["name"]) < 100
    assert [part.isdigit() for part in project["version"].split(".")] == [True] * 3
    assert set(project["license"]) <= {"file", "text"} and project["urls"]["Repository"].startswith("https://")
    assert comfy["PublisherId"] and comfy["DisplayName"]
    requirements = (PACK / "requirements.txt").read_text().split()
    assert requirements == project["dependencies"]

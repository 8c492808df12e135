# SPDX-License-Identifier: MIT
"""torch.compile of converted models: as many graphs as stock's, in one where stock's is one, and none more when they are
called again. Whole models of other packages, from their configurations, in evaluation and training.

`make check-torch-versions` runs this file with other versions of PyTorch."""
import copy
import importlib.util
import warnings

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
import normfuse.torch as nft  # noqa: E402
from normfuse.torch import _pending  # noqa: E402
from device import DEVICE, default_device  # noqa: E402, F401
from test_models import load, load_torchvision, random_norms  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def resnet():
    """Each stage has a block with a shortcut that is a convolution, and the last one a block without."""
    of = load_torchvision().models.resnet
    return of.ResNet(of.Bottleneck, [1, 1, 1, 2], num_classes=7), (torch.randn(2, 3, 33, 33),)


def mobilenet():
    """Its first blocks: with ReLU and hardswish, with and without squeeze-and-excitation, with and without a sum."""
    of = load_torchvision().models.mobilenetv3
    blocks, last = of._mobilenet_v3_conf("mobilenet_v3_small")
    return of.MobileNetV3(blocks[:6], last, num_classes=7), (torch.randn(2, 3, 33, 33),)


def load_diffusers():
    """It imports torchvision where there is one."""
    if importlib.util.find_spec("torchvision") is not None:
        load_torchvision()
    return load("diffusers")


def unet():
    model = load_diffusers().UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), layers_per_block=1, cross_attention_dim=16,
        attention_head_dim=8)
    return model, (torch.randn(2, 4, 8, 8), torch.tensor([3, 500]), torch.randn(2, 5, 16))


def autoencoder():
    model = load_diffusers().AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 64), latent_channels=4)
    return model, (torch.randn(1, 3, 16, 16),)


MODELS = {"ResNet": resnet, "MobileNetV3": mobilenet, "UNet": unet, "AutoencoderKL": autoencoder}


class Graphs:
    """A backend of torch.compile that counts what it is given, and runs it as it is."""

    def __init__(self):
        self.count = self.nodes = 0

    def __call__(self, graph, inputs):
        self.count += 1
        self.nodes += len(graph.graph.nodes)
        return graph.forward


def first_tensor(output):
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


def graphs(model, inputs, training, fullgraph):
    """How many there are after one call and after another, and the last output with the first parameters' gradients. A
    message where there is not one graph and fullgraph asks for one."""
    torch._dynamo.reset()
    backend = Graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    counts, found = [], []
    for _ in range(2):
        torch.manual_seed(1)
        model.zero_grad()
        with torch.set_grad_enabled(training), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                output = first_tensor(compiled(*inputs))
            except torch._dynamo.exc.Unsupported as error:
                return str(error).splitlines()[0], None
            if training:
                output.square().mean().backward()
        counts.append(backend.count)
        found = [output.detach(), *(p.grad for p in list(model.parameters())[:3])]
    return counts, found


def pair(name, training):
    model, inputs = MODELS[name]()
    stock = random_norms(model.double()).train(training)
    converted = copy.deepcopy(stock)
    nft.convert(converted)
    return stock, converted, tuple(t.double() if t.is_floating_point() else t for t in inputs)


def assert_same(found, expected):
    for a, b in zip(found, expected):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-9, atol=1e-9))


@pytest.mark.sampled()
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_as_many_graphs_as_stock(name, training):
    """In one, as fullgraph=True asks, where stock's is one."""
    stock, converted, inputs = pair(name, training)
    want, expected = graphs(stock, inputs, training, True)
    fullgraph = not isinstance(want, str)
    if not fullgraph:
        want, expected = graphs(stock, inputs, training, False)
    got, found = graphs(converted, inputs, training, fullgraph)
    assert got == want
    assert_same(found, expected)


class MethodWhileANormWaits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Sequential(torch.nn.Identity(), torch.nn.BatchNorm2d(4))

    def forward(self, x):
        y = self.part(x)
        z = x * (1 + x.mean((2, 3), keepdim=True)) + x.amax((2, 3), keepdim=True)
        return torch.nn.functional.leaky_relu(y + z, 0.1)


class StatementsInATry(MethodWhileANormWaits):
    def forward(self, x):
        try:
            y, z = self.part(x), x * 2
            y.add_(z)
            y.relu_()
        except ValueError:
            y = x
        return y


@pytest.mark.parametrize("kind", [MethodWhileANormWaits, StatementsInATry])
def test_code_while_a_norm_waits(kind):
    model, x = kind().eval(), torch.randn(2, 4, 3, 3)
    want = model(x)
    assert "add + " in nft.convert(model).details()
    counts, found = graphs(model, (x,), False, True)
    assert counts == [1, 1] and torch.allclose(found[0], want, atol=1e-5)


class Decoder(MethodWhileANormWaits):
    """As those that give a list of results; a method of super(), a statement in place, a builtin method in a variable."""

    def forward(self, x):
        results = [x]
        add = results.append
        for _ in range(2):
            y = super().forward(x)
            torch.nn.functional.relu(y, inplace=True)
            results.append(self.part(y))
            x = self.part(x) + y
            x = torch.add(x, x)
            x.relu_()
        results.extend([x])
        return sum(results[::-1])


@pytest.mark.parametrize("training", [False, True])
def test_a_decoder_is_one_graph(training):
    stock = Decoder().double().train(training)
    converted, inputs = copy.deepcopy(stock), (torch.randn(2, 4, 3, 3, dtype=torch.float64),)
    nft.convert(converted)
    (want, expected), (got, found) = (graphs(model, inputs, training, True) for model in (stock, converted))
    assert got == want == [1, 1]
    assert_same(found, expected)


STOCK_NORMS = {"group_norm", "batch_norm", "instance_norm"}


@pytest.mark.parametrize("devices, left", [({DEVICE}, 2), (set(), 0)])
@pytest.mark.parametrize("form", ["sequential", "modules", "functions"])
def test_a_norm_after_an_activation_is_left_to_the_compiler(form, devices, left, monkeypatch):
    """It computes both in the passes of the norm alone. On devices that are not in LEFT_DEVICES, as the CPU, none is left."""
    monkeypatch.setattr(_pending, "LEFT_DEVICES", devices)

    class Modules(torch.nn.Sequential):
        def forward(self, x):
            x = self[2](self[1](self[0](x)))
            return self[5](self[4](self[3](x)))

    class Functions(torch.nn.Sequential):
        def forward(self, x):
            x = F.prelu(self[0](x), self[1].weight)
            x = F.silu(torch.clone(F.relu(self[2](x))))
            return self[5](x)

    nn = torch.nn
    stock = {"sequential": nn.Sequential, "modules": Modules, "functions": Functions}[form](
        nn.Conv2d(4, 4, 1), nn.PReLU(), nn.BatchNorm2d(4), nn.ReLU(), nn.SiLU(), nn.GroupNorm(2, 4))
    stock, x = random_norms(stock.double()), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    converted, called = copy.deepcopy(stock), []
    nft.convert(converted)

    def backend(graph, inputs):
        called.extend(getattr(node.target, "__name__", "") for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    assert torch.allclose(torch.compile(converted, backend=backend, fullgraph=True)(x), stock(x), rtol=1e-9, atol=1e-9)
    assert sum(name in STOCK_NORMS for name in called) == left
    assert torch.allclose(converted(x), stock(x), rtol=1e-9, atol=1e-9)
    for a, b in zip(converted.buffers(), stock.buffers()):
        assert torch.allclose(a, b)


def test_what_breaks_a_graph_is_counted():
    """The counter sees a break, a recompilation, and what fullgraph says of them."""
    class Breaks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nft.BatchNorm2d(4)

        def forward(self, x):
            x = self.norm(x)
            torch._dynamo.graph_break()
            return x * 2

    model, inputs = Breaks().eval(), (torch.randn(2, 4, 3, 3),)
    assert graphs(model, inputs, False, False)[0] == [2, 2]
    assert isinstance(graphs(model, inputs, False, True)[0], str)

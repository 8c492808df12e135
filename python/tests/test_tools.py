# SPDX-License-Identifier: MIT
"""What PyTorch's tools make of layers and of converted models: torch.export and its decompositions, ONNX, torch.fx,
torch.jit, torch.ao, checkpointing, parametrizations, FSDP, hooks, functionalize,
compiled autograd. Models are f64: see test_convert.py."""
import contextlib
import copy
import io
import sys
import types
import warnings
from typing import Optional

import pytest

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
from device import DEVICE, ON_CUDA, default_device, of_the_cpu, seeded_f64  # noqa: E402, F401
from test_models import load_torchvision  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*(LeafSpec|torch.jit|deprecated).*")


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.conv2, self.norm2, self.act = nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.SiLU()

    def forward(self, x, scale: Optional[torch.Tensor] = None):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if scale is not None:
            y = y * scale
        return self.act(y + x)


def shuffled(model):
    """With parameters and running statistics that show where they are."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return model


def model():
    return shuffled(nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.SiLU(), Block(), nn.BatchNorm2d(4),
                                  nn.LeakyReLU(0.3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)))


def pair(training=False):
    """A model that is converted, and stock's."""
    stock = model().train(training)
    converted = copy.deepcopy(stock)
    nft.convert(converted)
    return converted, stock


def image(n=2, size=5):
    return torch.randn(n, 3, size, size)


def close(a, b, bound=1e-10):
    return torch.allclose(a, b, rtol=bound, atol=bound)


def names_of(program):
    return {f"{node.target} {node.args}" for node in program.graph.nodes if node.op == "call_function"}


def is_ours(program):
    return any("normfuse" in name for name in names_of(program))


# ---- torch.export ---------------------------------------------------------------------------------------------------


class EveryOperator(nn.Module):
    """Each operator with all that can be fused into it."""

    def __init__(self, dtype=None):
        super().__init__()
        self.group = nft.GroupNorm(2, 4, activation="silu", dtype=dtype)
        self.batch = nft.BatchNorm2d(4, activation="leaky_relu", act_param=0.3, dtype=dtype)
        self.instance = nft.InstanceNorm2d(4, affine=True, track_running_stats=True, activation="mish", dtype=dtype)
        self.affine = nft.ChannelAffine(4, activation="hardswish", dtype=dtype)
        self.plain = nft.InstanceNorm2d(4, activation="gelu_tanh")
        self.prelu = nft.GroupNorm(2, 4, activation="prelu", num_parameters=4, dtype=dtype)
        shuffled(self)

    def forward(self, x, more, scale, shift):
        y, u = self.group(x, pre_bias=shift, pre_add=more, return_sum=True, scale=scale, shift=shift, post_add=more)
        y, u = self.batch(y, post_add=u, pre_bias=self.affine.bias, return_sum=True)
        y, u = self.instance(y, pre_bias=scale, pre_add=u, return_sum=True)
        y = self.plain(y, pre_bias=self.affine.weight)
        return self.prelu(self.plain(self.affine(y, post_add=u)), post_add=more)


def arguments(n, size, dtype=None):
    return (torch.randn(n, 4, size, size, dtype=dtype) + 3, torch.randn(n, 4, size, size, dtype=dtype),
            torch.randn(n, 4, dtype=dtype), torch.randn(n, 4, dtype=dtype))


@pytest.mark.sampled()
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_decompositions(training, gradients):
    """run_decompositions() leaves aten's operators alone, which compute the same, running statistics included."""
    module = EveryOperator().train(training).requires_grad_(gradients)
    n, height, width = (torch.export.Dim(name, min=2) for name in "nhw")
    sizes = {**dict.fromkeys(("x", "more"), {0: n, 2: height, 3: width}), **dict.fromkeys(("scale", "shift"), {0: n})}
    exported = torch.export.export(module, arguments(3, 5), dynamic_shapes=sizes)
    assert is_ours(exported)
    program = exported.run_decompositions()
    assert not is_ours(program) and is_ours(exported)
    inputs = arguments(2, 4)
    decomposed = program.module()
    assert close(decomposed(*inputs), module(*inputs))
    for name, tensor in module.state_dict().items():
        assert close(decomposed.state_dict()[name].double(), tensor.double()), name


def test_decompositions_are_kept_out():
    exported = torch.export.export(EveryOperator().train(), arguments(3, 5))
    table = torch.export.default_decompositions()
    del table[torch.ops.normfuse.decomposition.default]
    for kept in (exported.run_decompositions(table), exported.run_decompositions({})):
        assert sum("normfuse" in name for name in names_of(kept)) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decompositions_lose_no_digits_to_a_large_mean(dtype):
    """The bound of docs/numerics.md, "Exported programs"; bf16 is computed in f32 and rounded once."""
    u = 2.0 ** -24
    layer = nft.GroupNorm(2, 4, activation="relu", dtype=dtype)
    example = torch.randn(2, 4, 64, 64, dtype=dtype)
    decomposed = torch.export.export(layer, (example,)).run_decompositions().module()
    for offset in (0.0, 1e3, 1e5):
        x = (torch.randn(2, 4, 64, 64) + offset).to(dtype)
        if dtype == torch.bfloat16 and offset:
            x = (torch.randn(2, 4, 64, 64).to(dtype) * 256 + 2.0 ** 15)
        got = decomposed(x).double()
        exact = torch.nn.functional.group_norm(x.double(), 2, eps=1e-5)
        want = exact.relu()
        sums = 64 * u
        bound = sums + (sums + 8 * u) * exact.abs() + (2.0 ** -8 if dtype == torch.bfloat16 else u) * want
        assert ((got - want).abs() <= bound).all(), offset


def test_exported_by_the_names_of_arguments():
    converted, stock = (m[3].eval() for m in pair())
    x = torch.randn(3, 4, 5, 5)
    for shapes in ({"x": {0: torch.export.Dim("n", min=2)}}, ({0: torch.export.Dim("n", min=2)},)):
        program = torch.export.export(converted, (x,), dynamic_shapes=shapes)
        assert close(program.module()(x[:2]), stock(x[:2]))
        assert close(program.run_decompositions().module()(x[:2]), stock(x[:2]))


@pytest.mark.parametrize("training", [True, False])
def test_whole_models_are_exported(training):
    converted, stock = pair(training)
    exported = torch.export.export(converted, (image(3),), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    program = exported.run_decompositions()
    assert is_ours(exported) and not is_ours(program)
    x = image()
    decomposed = program.module()
    assert close(decomposed(x), stock(x))
    for name, tensor in stock.state_dict().items():
        assert close(decomposed.state_dict()[name].double(), tensor.double()), name


@of_the_cpu
def test_onnx(tmp_path):
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    onnx = pytest.importorskip("onnx.reference", reason="onnx is not installed")
    converted, stock = (m.float() for m in pair())
    x = image().float()
    torch.onnx.export(converted, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnx.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    got = torch.from_numpy(session.run(None, {session.input_names[0]: x.numpy()})[0])
    # f32 both: three norms of sums of some 50 values.
    assert close(got, stock(x), 1e-5)


# ---- torch.fx -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,layer", [
    ("GroupNorm", (2, 4)), ("BatchNorm2d", (4,)), ("InstanceNorm2d", (4,)), ("SyncBatchNorm", (4,)),
    ("ChannelAffine", (4,))])
def test_layers_are_leaves_of_fx(kind, layer):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = shuffled(getattr(nft, kind)(*layer))

        def forward(self, x, more):
            return self.layer(x * 2, post_add=more, activation="relu")

    holder = Holder().eval()
    traced = torch.fx.symbolic_trace(holder)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["layer"]
    assert traced.layer is holder.layer
    x = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    assert torch.equal(traced(*x), holder(*x))


@pytest.mark.parametrize("training", [True, False])
def test_converted_models_are_traced_by_fx(training):
    converted, stock = pair(training)
    x = image()
    traced = torch.fx.symbolic_trace(converted)
    expected = torch.fx.symbolic_trace(stock)
    assert [(n.op, n.target) for n in traced.graph.nodes] == [(n.op, n.target) for n in expected.graph.nodes]
    assert close(traced(x), expected(x))
    x = torch.randn(1, 4, 5, 5), torch.tensor(0.5)
    assert close(torch.fx.symbolic_trace(converted[3])(*x), stock[3](*x))


def test_feature_extractor():
    load_torchvision()
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    converted, stock = pair()
    x = image()
    names = {"1": "norm", "3.bn1": "bn1", "3.act": "block", "6": "last"}
    got, want = (extraction.create_feature_extractor(m, names)(x) for m in (converted, stock))
    assert list(got) == list(want) and all(close(got[name], want[name]) for name in got)


@of_the_cpu
def test_quantization_by_fx():
    quantization = pytest.importorskip("torch.ao.quantization.quantize_fx")
    from torch.ao.quantization import get_default_qconfig_mapping
    converted, stock = (m.float() for m in pair())
    x = image().float()
    prepared = quantization.prepare_fx(converted, get_default_qconfig_mapping("fbgemm"), (x,))
    assert close(prepared(x), stock(x), 1e-5)


# ---- torch.jit ------------------------------------------------------------------------------------------------------


@of_the_cpu
@pytest.mark.parametrize("training", [True, False])
def test_jit_trace(training):
    """With parameters that require gradients; saved and loaded; derivatives."""
    converted, stock = pair(training)
    x = image()
    traced = torch.jit.trace(copy.deepcopy(converted), x, check_trace=not training)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    traced = torch.jit.load(file)
    traced.load_state_dict(stock.state_dict())
    y, z = traced(x), stock(x)
    assert close(y, z)
    y.square().sum().backward(), z.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in traced.named_parameters()}
    for name, parameter in stock.named_parameters():
        assert close(gradients[name], parameter.grad, 1e-8), name
    for name, tensor in stock.state_dict().items():
        assert close(traced.state_dict()[name].double(), tensor.double()), name


def scripted(model):
    """torch.jit.script of a copy. It knows builtins by their addresses, of which some are of functions that are gone:
    an attribute that lies at one is taken for it. Another copy lies elsewhere."""
    copies = []
    while True:
        copies.append(copy.deepcopy(model))
        try:
            return torch.jit.script(copies[-1])
        except RuntimeError as error:
            if "builtin cannot be used as a value" not in str(error) or len(copies) == 5:
                raise


def test_jit_script_says_what_to_do():
    converted, stock = pair()
    for m in (converted, converted[3], nft.GroupNorm(2, 4), nn.Sequential(nft.BatchNorm2d(4))):
        with pytest.raises(RuntimeError, match="script cannot compile .*torch.jit.trace or torch.export.*revert"):
            torch.jit.script(m)
    nft.revert(converted)
    x = image()
    assert close(scripted(converted)(x), stock(x))


# ---- checkpoints ----------------------------------------------------------------------------------------------------

NORMS = {"BatchNorm2d": {}, "InstanceNorm2d": {"affine": True, "track_running_stats": True}, "SyncBatchNorm": {}}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("reentrant", [True, False])
def test_running_statistics_under_checkpoint(kind, momentum, reentrant):
    """Updated once, though the layer runs twice: as without the checkpoint."""
    stock = nn.Sequential(nn.Conv2d(3, 4, 1), getattr(nn, kind)(4, momentum=momentum, **NORMS[kind]), nn.ReLU())
    models = [copy.deepcopy(stock), stock]
    nft.convert(models[0])
    x = image().requires_grad_()
    calls = []
    models[0][0].register_forward_hook(lambda *a: calls.append(1))
    for _ in range(3):
        checkpoint(models[0], x, use_reentrant=reentrant).square().sum().backward()
        stock(x).square().sum().backward()
    assert len(calls) == 6
    for (name, got), want in zip(models[0].state_dict().items(), stock.state_dict().values()):
        assert close(got.double(), want.double()), name
    for got, want in zip(models[0].parameters(), stock.parameters()):
        assert close(got.grad, want.grad)


# ---- what others do to modules --------------------------------------------------------------------------------------


def test_forward_that_is_replaced_on_a_converted_layer():
    converted, stock = pair()
    for m in (converted, stock):
        m[1].forward = lambda x: x * 2
        m[3].bn1.forward = lambda x: x + 1
    x = image()
    assert close(converted(x), stock(x))
    nft.convert(converted)
    assert close(converted(x), stock(x))


def test_global_hooks_see_what_stock_shows():
    converted, stock = pair()
    x, seen = image(), []
    with_hooks = []
    for m in (converted, stock):
        names = {module: name for name, module in m.named_modules()}
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, y: seen.append((names[module], y.detach().clone())))
        with_hooks.append(m(x))
        handle.remove()
    half = len(seen) // 2
    assert [name for name, _ in seen[:half]] == [name for name, _ in seen[half:]]
    assert all(close(a, b) for (_, a), (_, b) in zip(seen[:half], seen[half:]))
    assert close(with_hooks[0], converted(x))


def test_converting_twice_reports_the_same():
    for m in (model(), nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), Block()):
        first, second = nft.convert(m), nft.convert(m)
        assert first == second and first.folded


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_parametrizations_between_convert_and_revert():
    converted, stock = pair()
    x = image()
    for m in (converted, stock):
        for layer in (m[1], m[3].norm2):
            nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    assert close(converted(x), stock(x))
    state = {name: type(module) for name, module in converted.named_modules()}
    with pytest.raises(RuntimeError, match="^1 became a ParametrizedGroupNorm after convert.*revert before it"):
        nft.revert(converted)
    assert state == {name: type(module) for name, module in converted.named_modules()}
    report = nft.convert(converted)
    assert not report.left and close(converted(x), stock(x))
    for m in (converted, stock):
        for layer in (m[1], m[3].norm2):
            nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    nft.revert(converted)
    assert {type(module) for module in converted.modules()} == {type(module) for module in stock.modules()}
    assert close(converted(x), stock(x))


@of_the_cpu
def test_fully_shard_between_convert_and_revert(tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not torch.distributed.is_available():
        pytest.skip("torch is built without torch.distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0,
                                         world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        converted, stock = pair()
        for m in (converted[1], converted[3], converted):
            fsdp.fully_shard(m, mesh=mesh)
        x = image()
        y, z = converted(x), stock(x)
        y.square().sum().backward(), z.square().sum().backward()
        assert close(y, z)
        assert all(close(p.grad.to_local(), q.grad) for p, q in zip(converted.parameters(), stock.parameters()))
        with pytest.raises(RuntimeError, match="became a FSDP.* after convert.*fully_shard.*revert before it"):
            nft.revert(converted)
        assert not nft.convert(converted).left and close(converted(x), stock(x))
    finally:
        torch.distributed.destroy_process_group()


# ---- hooks on saved tensors, torch.func.functionalize, compiled autograd --------------------------------------------


def to_8_bits(tensor):
    largest = tensor.abs().max() if tensor.numel() else tensor.sum()
    return tensor.dtype, largest, (tensor / largest.clamp(min=1e-30) * 127).round().to(torch.int8)


def from_8_bits(packed):
    dtype, largest, values = packed
    return (values.double() / 127 * largest.double()).to(dtype)


LAYERS = {"group norm": lambda nn: nn.GroupNorm(2, 8), "batch norm": lambda nn: nn.BatchNorm2d(8),
          "evaluation": lambda nn: nn.BatchNorm2d(8).eval(),
          "instance norm": lambda nn: nn.InstanceNorm2d(8, affine=True),
          "with statistics": lambda nn: nn.InstanceNorm2d(8, affine=True, track_running_stats=True)}


def gradients_with_hooks(layer, pack, unpack):
    torch.manual_seed(3)
    x = torch.randn(4, 8, 6, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = layer.to(DEVICE)(x.to(DEVICE))
    (y * torch.linspace(0, 1, y.numel(), device=DEVICE).view_as(y)).sum().backward()
    return [x.grad.cpu(), *(p.grad.cpu() for p in layer.parameters())]


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_that_round_saved_tensors(name):
    """Mean and rstd are tensors of their own: rounded, they are off by what 8 bits are, as stock's."""
    ours, stock = LAYERS[name](nft), LAYERS[name](nn)
    exact = gradients_with_hooks(stock, lambda t: t, lambda t: t)
    stock.zero_grad()
    theirs = gradients_with_hooks(stock, to_8_bits, from_8_bits)
    rounded = gradients_with_hooks(ours, to_8_bits, from_8_bits)
    for want, stocks, got in zip(exact, theirs, rounded):
        assert (got - want).norm() <= 1.1 * (stocks - want).norm() + 0.01 * want.norm()


@pytest.mark.parametrize("back", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["group norm", "batch norm", "instance norm"])
def test_hooks_that_give_another_dtype_back(name, back):
    """Statistics may come back as any floating-point type."""
    layer = LAYERS[name](nft).float()
    with default_dtype(torch.float32):
        want = gradients_with_hooks(layer, lambda t: t, lambda t: t)
        layer.zero_grad()
        got = gradients_with_hooks(layer, lambda t: t if t.numel() > 64 or t.requires_grad else t.to(back), lambda t: t)
    for a, b in zip(want, got):
        assert close(a, b, 1e-2 if back == torch.float16 else 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_functionalize(name):
    """Statistics among the inputs and outside, with a gradient inside and around."""
    functional = torch.func.functionalize
    ours, stock = LAYERS[name](nft).to(DEVICE), LAYERS[name](nn).to(DEVICE)
    x = torch.randn(3, 8, 5, 5, device=DEVICE)
    weights = torch.linspace(0, 1, x.numel(), device=DEVICE).view_as(x)
    # torch.func.grad refuses the counter of a batch norm, stock's too.
    for transform in (functional, *(() if name == "batch norm" else (
            lambda layer: functional(torch.func.grad(lambda t: (layer(t) * weights).sum())),
            lambda layer: torch.func.grad(functional(lambda t: (layer(t) * weights).sum()))))):
        assert close(transform(ours)(x), transform(stock)(x))
        assert all(close(a, b) for a, b in zip(ours.state_dict().values(), stock.state_dict().values()))
    for layer in (ours, stock):
        state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        assert close(functional(lambda s, t: torch.func.functional_call(layer, s, (t,)))(state, x), layer(x))
    assert all(close(a, b) for a, b in zip(ours.state_dict().values(), stock.state_dict().values()))


ADDED = {"nothing": {}, "post_add": {"post_add": (2, 8, 5, 5)}, "pre_add": {"pre_add": (2, 8, 5, 5)},
         "pre_bias": {"pre_bias": (8,)}}


COMPILED = [*LAYERS, "affine"]
ACTIVATED = [None, "relu", "silu", "prelu"]


@pytest.mark.parametrize("activation", ACTIVATED)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_autograd(name, activation):
    """The backward of an eager forward in one graph: the gradients have the bits of eager ones. Any two of a layer, an
    activation and an addition meet in a case, since each case compiles for seconds."""
    make = {**LAYERS, "affine": lambda nft: nft.ChannelAffine(8)}[name]
    added = [*ADDED][(COMPILED.index(name) + ACTIVATED.index(activation)) % len(ADDED)]
    if name == "affine" and added.startswith("pre"):
        added = "post_add"
    shapes, found = ADDED[added], []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        layer = make(nft)
        layer._set_activation(activation, None, 8 if activation == "prelu" else 1, 8)
        leaves = [torch.randn(shape).to(DEVICE).requires_grad_() for shape in ((2, 8, 5, 5), *shapes.values())]
        layer = layer.to(DEVICE)
        y = layer(leaves[0], **dict(zip(shapes, leaves[1:])))
        loss = (y * torch.linspace(0, 1, y.numel(), device=DEVICE).view_as(y)).sum()
        if compiled:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
                loss.backward()
        else:
            loss.backward()
        found.append([*(leaf.grad for leaf in leaves), *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found)), added


# ---- what reads a norm or looks its class up ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"])
def test_evaluation_does_not_ask_for_the_counter(kind):
    layer, stock = getattr(nft, kind)(4).eval(), getattr(nn, kind)(4).eval()
    x = torch.randn(2, 4, *(3,) * (int(kind[-2]) - (kind[-2] == "1")))
    for norm in (layer, stock):
        del norm.num_batches_tracked
    assert close(layer(x), stock(x))
    for norm in (layer.train(), stock.train()):
        with pytest.raises(AttributeError, match="num_batches_tracked"):
            norm(x)
    for norm in (layer, stock):
        norm.track_running_stats = False
    assert close(layer(x), stock(x))


MAKERS = {"fuse_conv_bn_eval": lambda norm: nn.utils.fusion.fuse_conv_bn_eval(nn.Conv2d(4, 4, 1).eval(), norm),
          "convert_sync_batchnorm": nn.SyncBatchNorm.convert_sync_batchnorm}


@pytest.mark.parametrize("name", MAKERS)
def test_makers_of_layers_refuse_an_activation(name):
    """They read a batch norm's parameters and would leave its activation out."""
    for activation in ("relu", "prelu"):
        with pytest.raises(TypeError, match=f"{name} knows nothing of the activation, '{activation}'"):
            MAKERS[name](nft.BatchNorm2d(4, activation=activation).eval())
    norm = shuffled(nft.BatchNorm2d(4)).eval()
    made = MAKERS[name](norm)
    assert made is not norm
    relu = nft.BatchNorm2d(4, eps=0.25, activation="relu")
    assert relu.eps == 0.25 and copy.deepcopy(relu).eps == 0.25
    relu.eps = 0.5
    x = torch.randn(2, 4, 3, 3)
    assert close(relu(x), torch.relu(nn.BatchNorm2d(4, eps=0.5)(x)))


def test_linear_layers_refuse_an_activation():
    with pytest.raises(TypeError, match="fuse_linear_bn_eval"):
        nn.utils.fusion.fuse_linear_bn_eval(nn.Linear(3, 4).eval(), nft.BatchNorm1d(4, activation="relu").eval())


def test_tables_of_exact_classes_have_ours(monkeypatch):
    """torch.ao's, where they have stock's; and those of another tool, made for this test as Opacus has them."""
    from torch.ao.quantization import fuser_method_mappings, quantization_mappings

    from normfuse.torch import _registries

    class ModuleValidator:
        VALIDATORS = {nn.BatchNorm2d: lambda layer: ["no"], nn.Linear: lambda layer: []}
        FIXERS = {nn.BatchNorm2d: lambda layer, **options: nn.GroupNorm(2, layer.num_features)}

    name = "opacus.validators.module_validator"
    module = types.ModuleType(name)
    module.ModuleValidator = ModuleValidator
    monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):
        _registries.add_classes()
        static = quantization_mappings.DEFAULT_STATIC_QUANT_MODULE_MAPPINGS
        for kind in ("BatchNorm2d", "GroupNorm", "InstanceNorm3d"):
            assert static[getattr(nft, kind)] is static[getattr(nn, kind)]
        fused = fuser_method_mappings._DEFAULT_OP_LIST_TO_FUSER_METHOD
        assert fused[nn.Conv2d, nft.BatchNorm2d, nn.ReLU] is fused[nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
        assert nft.BatchNorm2d in quantization_mappings.get_default_qconfig_propagation_list()
        assert ModuleValidator.VALIDATORS[nft.BatchNorm2d](None) == ["no"]
        assert set(ModuleValidator.VALIDATORS) == {nn.BatchNorm2d, nft.BatchNorm2d, nn.Linear}
        fix = ModuleValidator.FIXERS[nft.BatchNorm2d]
        assert type(fix(nft.BatchNorm2d(4), num_groups=2)) is nn.GroupNorm
        with pytest.raises(TypeError, match="knows nothing of the activation"):
            fix(nft.BatchNorm2d(4, activation="relu"))


@pytest.mark.skipif(ON_CUDA, reason="the same on a GPU")
@pytest.mark.parametrize("training", [False, True])
def test_observers_of_a_converted_model(training):
    from torch.ao import quantization
    found = []
    for made in pair(training):
        default = quantization.get_default_qat_qconfig if training else quantization.get_default_qconfig
        made.qconfig = default("fbgemm")
        prepared = (quantization.prepare_qat if training else quantization.prepare)(made)
        found.append(sorted(name for name, _ in prepared.named_modules() if "activation_post_process" in name))
    assert found[0] == found[1] and any("bn1" in name for name in found[0])


@pytest.mark.skipif(ON_CUDA, reason="the same on a GPU")
def test_convolutions_of_a_converted_model_are_fused():
    from torch.ao import quantization
    converted, stock = pair()
    x = image()
    for made in (converted, stock):
        quantization.fuse_modules(made[3], ["conv1", "bn1", "relu"], inplace=True)
    assert type(converted[3].bn1) is nn.Identity
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a block that was changed may say so
        assert close(converted(x), stock(x))

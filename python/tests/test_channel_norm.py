# SPDX-License-Identifier: MIT
"""Channel norm in PyTorch: layers and the function beside torch's layer_norm, rms_norm and normalize in f64; dtypes of
results, tokens, autocast, torch.compile, export, decompositions, meta tensors; what is refused."""

import copy
import itertools
import pickle

import pytest

torch = pytest.importorskip("torch")

import normfuse.torch as nft  # noqa: E402
from device import DEVICE, ON_CUDA, hardswish, of_the_cpu  # noqa: E402
from normfuse.torch import functional  # noqa: E402
from normfuse.torch._operators import ops  # noqa: E402
from torch import nn  # noqa: E402

F = nn.functional
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
UNIT = {F64: 2.0**-53, F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
KINDS = [("mean_and_variance", "added", 1e-5), ("mean_and_variance", "of_norm", 1e-3), ("mean_square", "added", 1e-6),
         ("mean_square", "of_norm", 1e-12), ("mean_square", "of_norm", 5.0)]
ACTIVATIONS = {None: lambda z: z, "relu": F.relu, "leaky_relu": lambda z: F.leaky_relu(z, 0.25), "silu": F.silu,
               "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "hardswish": hardswish,
               "elu": lambda z: F.elu(z, 0.75), "mish": F.mish, "relu6": F.relu6, "prelu": None}
PARAMETERS = {"leaky_relu": 0.25, "elu": 0.75}


def tensor(*shape, dtype=F64, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def stock(x, weight=None, bias=None, *, groups=1, statistics="mean_and_variance", eps=1e-5, eps_kind="added", dim=1,
          activation=None, slope=None, pre_bias=None, pre_add=None, post_add=None, scale=None, shift=None):
    """By layer_norm, rms_norm and normalize, with the channels last; u."""
    def wide(parameter):
        return parameter.reshape(*parameter.shape[:-1], *[1] * (u.dim() - parameter.dim()), parameter.shape[-1])

    def last(big):
        return big if dim == -1 else big.movedim(1, -1)

    u = last(x)
    u = u if pre_bias is None else u + wide(pre_bias)
    u = u if pre_add is None else u + last(pre_add)
    v = u.unflatten(-1, (groups, -1))
    each = v.shape[-1]
    if eps_kind == "of_norm":
        v = v - v.mean(-1, keepdim=True) if statistics == "mean_and_variance" else v
        z = F.normalize(v, dim=-1, eps=eps) * each**0.5
    elif statistics == "mean_square":
        z = F.rms_norm(v, (each,), eps=eps)
    else:
        z = F.layer_norm(v, (each,), eps=eps)
    z = z.flatten(-2)
    z = z if weight is None else z * weight
    z = z if bias is None else z + bias
    z = z if scale is None else z * (1 + wide(scale))
    z = z if shift is None else z + wide(shift)
    z = z if post_add is None else z + last(post_add)
    if activation == "prelu":
        z = F.prelu(z.movedim(-1, 1), slope).movedim(1, -1)
    else:
        z = ACTIVATIONS[activation](z)
    return (z, u) if dim == -1 else (z.movedim(-1, 1), u.movedim(-1, 1))


def everything(shape, dtype=F64, groups=1, slopes=0, dim=1, seed=0):
    """All tensors that a call takes."""
    n, c = shape[0], shape[dim]
    made = {"x": shape, "weight": (c,), "bias": (c,), "scale": (n, c), "shift": (n, c), "pre_bias": (n, c),
            "pre_add": shape, "post_add": shape, **({"slope": (slopes,)} if slopes else {})}
    return {name: tensor(*size, dtype=dtype, seed=seed + i) for i, (name, size) in enumerate(made.items())}


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels-last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "slice of samples": lambda t: torch.cat([t, t])[:t.shape[0]],
    "slice of channels": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1]:2 * t.shape[1]],
    "slice of channels-last": lambda t: torch.cat([t, t], 1).movedim(1, -1).contiguous().movedim(-1, 1)[:, :t.shape[1]],
    "every second position": lambda t: torch.stack([t, t], -1)[..., 0],
}
SHAPES = [(2, 6), (3, 6, 5), (2, 12, 3, 4), (2, 6, 2, 3, 2), (2, 6, 2, 1, 3, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_beside_torch(kind, shape, layout):
    """Everything at once in f64, of one and of several groups: y, u and each gradient, from kernel and composite."""
    words = dict(zip(("statistics", "eps_kind", "eps"), kind))
    for groups, activation in ((1, "silu"), (3, "prelu"), (2, None)):
        given = everything(shape, groups=groups, slopes=shape[1] if activation == "prelu" else 0)
        if len(shape) > 2:
            given = {name: LAYOUTS[layout](t) if t.dim() > 2 else t for name, t in given.items()}
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        words.update(groups=groups, activation=activation)
        want = stock(**leaves, **words)
        leaves["input"] = leaves.pop("x")
        got = nft.channel_norm(**leaves, **words, return_sum=True)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            assert torch.equal(nft.channel_norm(**leaves, **words), got[0])
        directions = tensor(*shape, seed=20), tensor(*shape, seed=21)
        wants = torch.autograd.grad(want, list(leaves.values()), directions)
        for create_graph in (False, True):
            gradients = torch.autograd.grad(got, list(leaves.values()), directions, retain_graph=True,
                                            create_graph=create_graph)
            torch.testing.assert_close(gradients, wants, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("statistics", ["mean_and_variance", "mean_square"])
def test_activations(statistics, activation):
    given = everything((2, 8, 3, 5), slopes=1 if activation == "prelu" else 0)
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    want, _ = stock(**leaves, statistics=statistics, activation=activation)
    leaves["input"] = leaves.pop("x")
    got = nft.channel_norm(**leaves, statistics=statistics, activation=activation, act_param=PARAMETERS.get(activation))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    direction = tensor(2, 8, 3, 5, seed=20)
    gradients = [torch.autograd.grad(y, list(leaves.values()), direction) for y in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 4, 6), (2, 3, 4, 6), (2, 3, 2, 4, 6)], ids=str)
def test_tokens(shape):
    """[..., C], contiguous and with the channels before: results laid out as the input, or contiguous where asked."""
    for statistics, transposed in itertools.product(("mean_and_variance", "mean_square"), (False, True)):
        given = everything(shape if len(shape) > 1 else (1, *shape), dim=-1, slopes=6)
        if len(shape) == 1:
            given = {name: t[0] if name in ("x", "pre_add", "post_add") else t for name, t in given.items()}
        elif transposed and len(shape) > 2:
            for name in ("x", "pre_add", "post_add"):
                given[name] = given[name].movedim(-1, 1).contiguous().movedim(1, -1)
        whole = {name: t if len(shape) > 1 or name not in ("x", "pre_add", "post_add") else t[None]
                 for name, t in given.items()}
        want = stock(**whole, statistics=statistics, dim=-1, activation="prelu")
        want = want if len(shape) > 1 else tuple(t[0] for t in want)
        x = given.pop("x")
        got = nft.channel_norm(x, **given, statistics=statistics, dim=-1, activation="prelu", return_sum=True)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert got[0].stride() == x.stride()
        layer = nft.ChannelNorm(6, dim=-1, statistics=statistics, dtype=F64, device=DEVICE)
        torch.testing.assert_close(layer(x), stock(x if len(shape) > 1 else x[None], dim=-1, statistics=statistics)[0]
                                   .reshape(shape), rtol=1e-12, atol=1e-12)
        y = layer(x, channels_last=True)
        assert y.is_contiguous() and torch.equal(y, layer(x))
        if len(shape) > 2:  # of one axis more
            scale = tensor(shape[0], *[1] * (len(shape) - 2), 6, seed=30)
            torch.testing.assert_close(
                nft.channel_norm(x, dim=-1, scale=scale, pre_bias=scale, statistics=statistics),
                stock(x, dim=-1, scale=scale.reshape(shape[0], 6), pre_bias=scale.reshape(shape[0], 6),
                      statistics=statistics)[0], rtol=1e-12, atol=1e-12)


# x, y: every pair that there is.
PAIRS = [(F64, F64), (F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32), (F32, F16), (F32, BF16)]


@pytest.mark.parametrize("parameters", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("dtype, of_y", PAIRS, ids=str)
def test_dtypes(dtype, of_y, parameters):
    """y in another dtype than x: u, dx, dpre_add have x's, post_add and its gradient y's, parameters' theirs."""
    for (statistics, eps_kind, eps), layout in itertools.product(KINDS[::2], ("contiguous", "channels-last")):
        given = everything((2, 16, 3, 5), dtype)
        for name, t in given.items():
            kind = of_y if name == "post_add" else dtype if t.dim() > 2 else parameters
            given[name] = (LAYOUTS[layout](t) if t.dim() > 2 else t).to(kind)
        words = {"statistics": statistics, "eps_kind": eps_kind, "eps": eps, "activation": "gelu"}
        leaves = {name: t.requires_grad_() for name, t in given.items()}
        exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
        x = leaves.pop("x")
        y, u = nft.channel_norm(x, **leaves, **words, return_sum=True, dtype=of_y)
        assert (y.dtype, u.dtype, y.stride()) == (of_y, dtype, x.stride())
        summed = exact["x"] + exact["pre_bias"][..., None, None] + exact["pre_add"]
        torch.testing.assert_close(u.double(), summed, rtol=2 * UNIT[dtype],
                                   atol=8 * UNIT[dtype if dtype == F64 else F32])
        exact["x"] = u.detach().double().requires_grad_()  # as it was rounded
        summed = {name: t for name, t in exact.items() if name not in ("pre_bias", "pre_add")}
        want, _ = stock(**summed, **words)
        # Some dozen roundings of the compute type and of parameters read in it, then one of y's.
        near = 64 * max(UNIT[F32] if dtype != F64 else UNIT[F64], UNIT[F64])
        torch.testing.assert_close(y.double(), want, rtol=UNIT[of_y] + near, atol=UNIT[of_y] / 4 + near * 4)
        dy, du = tensor(*y.shape, dtype=of_y, seed=20), tensor(*y.shape, dtype=dtype, seed=21)
        wants = dict(zip(summed, torch.autograd.grad(want, list(summed.values()), dy.double())))
        wants["x"] = wants["pre_add"] = wants["x"] + du.double()
        for again in (False, True):
            gradients = dict(zip(("x", *leaves), torch.autograd.grad(
                (y, u), (x, *leaves.values()), (dy, du), retain_graph=True, create_graph=again)))
            for name, got in gradients.items():
                leaf = x if name == "x" else leaves[name]
                assert (got.dtype, got.shape) == (leaf.dtype, leaf.shape), name
                if name != "pre_bias":  # the sum of a rounded dx
                    torch.testing.assert_close(got.double(), wants[name], rtol=2 * UNIT[got.dtype] + 16 * near,
                                               atol=UNIT[got.dtype] + 16 * near)


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
def test_dtypes_that_are_refused(dtype):
    x = tensor(2, 4, 3, dtype=dtype)
    for result in (F64, F32, F16, BF16, torch.int32, torch.float8_e4m3fn):
        if (dtype, result) in PAIRS:
            assert nft.channel_norm(x, dtype=result).dtype == result
            continue
        with pytest.raises(RuntimeError, match="Expected the result to have the dtype of input, or one of them f32"):
            nft.channel_norm(x, dtype=result)


def test_autocast():
    """torch's rules: where layer_norm and rms_norm are f32 under autocast, results are f32 of 16-bit inputs. The input
    is not converted, and u and the input's gradient keep its dtype."""
    def casts(name, device):
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Autocast" + device)

    assert casts("layer_norm", "CUDA")
    casts_rms = casts("rms_norm", "CUDA")  # PyTorch 2.11 does not
    for device in ("CPU", "CUDA", "XPU", "MTIA", "MAIA"):
        for name in ("layer_norm", "rms_norm")[:1 + casts_rms]:
            assert casts(name, device) == (device.lower() in functional._AUTOCASTS_TO_FLOAT32)
    x, weight = tensor(2, 3, 8, dtype=BF16).requires_grad_(), tensor(8, dtype=F32, seed=1).requires_grad_()
    with torch.autocast(DEVICE, BF16):
        y = nft.channel_norm(x, weight, dim=-1, pre_add=x, post_add=tensor(2, 3, 8, dtype=F32, seed=2))
        assert y.dtype == F.layer_norm(x, (8,), weight).dtype
        assert not casts_rms or y.dtype == F.rms_norm(x, (8,), weight).dtype
        assert nft.channel_norm(x, weight, dim=-1, dtype=BF16).dtype == BF16
        assert nft.LayerNorm2d(8, device=DEVICE)(x.movedim(-1, 1)).dtype == y.dtype
        assert [g.dtype for g in torch.autograd.grad(y.sum(), (x, weight))] == [BF16, F32]
        assert nft.channel_norm(x.float(), weight, dim=-1).dtype == F32


@of_the_cpu
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast_to_float32(dtype, monkeypatch):
    """By the switch, and on devices of which torch says so: y is f32, and is what x in f32 gives, to the bit."""
    x, weight = tensor(2, 8, 3, dtype=dtype), tensor(8, dtype=F32, seed=1)
    post_add = tensor(2, 8, 3, dtype=dtype, seed=2)
    want = nft.channel_norm(x.float(), weight, post_add=post_add.float(), activation="silu")
    with torch.autocast("cpu", dtype):
        before = nft.autocast_to_float32(True)
        try:
            got = nft.channel_norm(x, weight, post_add=post_add, activation="silu")
        finally:
            nft.autocast_to_float32(before)
        assert got.dtype == F32 and torch.equal(got, want)
        assert nft.channel_norm(x, weight).dtype == dtype
        monkeypatch.setattr(functional, "_AUTOCASTS_TO_FLOAT32", frozenset(("cpu",)))
        assert torch.equal(nft.channel_norm(x, weight, post_add=post_add, activation="silu"), want)
        y, u = nft.channel_norm(x, weight, pre_add=x, return_sum=True)
        assert (y.dtype, u.dtype) == (F32, dtype)
    assert nft.channel_norm(x, weight).dtype == dtype


# ---- modules --------------------------------------------------------------------------------------------------------


def test_layers():
    """Named as timm's and torchvision's, with their parameters and results."""
    norm, rms = nft.LayerNorm2d(6), nft.RMSNorm2d(6)
    assert [*norm.state_dict()] == ["weight", "bias"] and [*rms.state_dict()] == ["weight"]
    assert norm.eps == rms.eps == 1e-6
    assert not [*nft.LayerNorm2d(6, affine=False).parameters()] and not [*nft.RMSNorm2d(6, affine=False).parameters()]
    x = tensor(2, 6, 3, 4, dtype=F32)
    for layer in (norm, rms):
        layer.to(DEVICE)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_()
    last = x.permute(0, 2, 3, 1)
    torch.testing.assert_close(norm(x), F.layer_norm(last, (6,), norm.weight, norm.bias, 1e-6).permute(0, 3, 1, 2))
    torch.testing.assert_close(rms(x), F.rms_norm(last, (6,), rms.weight, 1e-6).permute(0, 3, 1, 2))
    assert repr(norm) == "LayerNorm2d(6, eps=1e-06, affine=True)"
    assert repr(nft.RMSNorm2d(6, 1e-5, False,
                              activation="silu")) == "RMSNorm2d(6, eps=1e-05, affine=False, activation='silu')"
    layer = nft.ChannelNorm(6, groups=2, statistics="mean_square", eps_kind="of_norm", dim=-1, bias=False)
    assert repr(layer) == ("ChannelNorm(6, eps=1e-05, affine=True, groups=2, statistics='mean_square', eps_kind='of_norm', "
                           "dim=-1, bias=False)")
    for made in (norm, rms, layer.to(DEVICE)):
        for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert repr(copied) == repr(made) and torch.equal(copied(last),
                                                              made(last)) if made is layer else torch.equal(
                copied(x), made(x))


@pytest.mark.parametrize("arguments, message", [
    ({"groups": 4}, "groups must divide num_channels, but got 4 and 6"), ({"groups": 0}, "groups must divide"),
    ({"statistics": "rms"}, "statistics must be one of mean_and_variance, mean_square, but got 'rms'"),
    ({"eps_kind": None}, "eps_kind must be one of added, of_norm, but got None"),
    ({"dim": 2}, "dim must be 1 or -1, but got 2"),
    ({"activation": "swish"}, "activation must be None or one of"),
    ({"num_parameters": 6}, "num_parameters is prelu's"),
])
def test_constructors_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        nft.ChannelNorm(6, **arguments)


X = torch.zeros(2, 6, 3)
REFUSED = [
    ({"groups": 4}, RuntimeError, "groups must be greater than 0 and divide the number of channels, but are 4 of 6"),
    ({"groups": 2**40}, RuntimeError, "groups must be greater than 0 and divide"),
    ({"groups": -1}, RuntimeError, "groups must be greater than 0"),
    ({"weight": torch.zeros(5)}, RuntimeError,
     "Expected weight to be a vector of size equal to the number of channels"),
    ({"bias": torch.zeros(6, 1)}, RuntimeError, "Expected bias to be a vector"),
    ({"scale": torch.zeros(6)}, RuntimeError, r"Expected scale to be of shape \[N, C\] = \[2, 6\], but got \[6\]"),
    ({"pre_bias": torch.zeros(3, 6)}, RuntimeError, "Expected pre_bias to be of shape"),
    ({"pre_add": torch.zeros(2, 6, 4)}, RuntimeError, "Expected pre_add to have the shape of input"),
    ({"post_add": torch.zeros(2, 6)}, RuntimeError, "Expected post_add to have the shape of input"),
    ({"weight": torch.zeros(6, dtype=torch.int64)}, NotImplementedError,
     '"channel_norm" not implemented for \'int64\''),
    ({"statistics": "rms"}, ValueError, "statistics must be one of mean_and_variance, mean_square, but got 'rms'"),
    ({"eps_kind": 1}, ValueError, "eps_kind must be one of added, of_norm, but got 1"),
    ({"eps_kind": "of_norm", "eps": -1.0}, RuntimeError, "eps"),
    ({"activation": "swish"}, ValueError, "activation must be None or one of"),
    ({"activation": "relu", "act_param": 0.1}, ValueError, "act_param is leaky_relu's slope or elu's alpha"),
    ({"activation": "prelu"}, ValueError, "slope is None, but required"),
    ({"slope": torch.zeros(6)}, ValueError, "slope is for prelu alone"),
    ({"return_sum": True}, ValueError, "return_sum needs pre_add or pre_bias"),
    ({"dim": 0}, ValueError, "dim must be 1 or the last axis, but got 0 and an input of 3 axes"),
]


@pytest.mark.parametrize("words, exception, message", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
@pytest.mark.parametrize("device", [DEVICE, "meta"])
def test_refuses(device, words, exception, message):
    if device == "meta" and message == "eps":
        pytest.skip("a number, which the library checks")
    words = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in words.items()}
    with pytest.raises(exception, match=message):
        nft.channel_norm(X.to(device), **words)


def test_of_one_axis():
    x = tensor(4)
    assert torch.equal(nft.channel_norm(x, dim=0), nft.channel_norm(x, dim=-1))
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        nft.channel_norm(torch.zeros(4))


@pytest.mark.parametrize("shape", [(0, 6, 3), (2, 6, 0), (2, 0, 3), (0, 6)], ids=str)
def test_empty(shape):
    x = torch.zeros(shape, requires_grad=True)
    weight = torch.ones(shape[1], requires_grad=True)
    for words in ({}, {"channels_last": True}, {"dtype": BF16}, {"statistics": "mean_square", "activation": "silu"}):
        y = nft.channel_norm(x, weight, **words)
        fake = nft.channel_norm(x.to("meta"), weight.to("meta"), **words)
        assert (y.shape, y.stride(), y.dtype) == (x.shape, fake.stride(), fake.dtype)
        dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
        assert dx.shape == shape and not dweight.any()


def test_zeros_and_norms_at_eps():
    """normalize gives 0 for zeros, with a gradient of 1/eps; eps of 0 gives nan, as there."""
    x = torch.zeros(1, 4, 2, dtype=F64)
    x[0, :, 1] = torch.tensor([3.0, 4.0, 0.0, 0.0])
    x.requires_grad_()
    for eps in (1e-12, 0.5, 6.0):
        y = nft.channel_norm(x, statistics="mean_square", eps_kind="of_norm", eps=eps)
        want = F.normalize(x, dim=1, eps=eps) * 2
        torch.testing.assert_close(y, want, rtol=1e-14, atol=0)
        gradients = [torch.autograd.grad(each.square().sum() + each.sum(), x, retain_graph=True)[0]
                     for each in (y, want)]
        torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-14)
    y = nft.channel_norm(x.detach(), statistics="mean_square", eps_kind="of_norm", eps=0.0)
    assert y[0, :, 0].isnan().all() and not y[0, :, 1].isnan().any()


# ---- torch.compile, export, transformations -------------------------------------------------------------------------


def layers(x, weight, bias, of_sample, other):
    y, u = nft.channel_norm(x, weight, bias, activation="silu", scale=of_sample, shift=of_sample, pre_bias=bias,
                            pre_add=other, return_sum=True)
    y = nft.channel_norm(y, weight, statistics="mean_square", eps_kind="of_norm", groups=2, post_add=u,
                         activation="relu")
    y = nft.channel_norm(y.movedim(1, -1), weight, bias, dim=-1, channels_last=True, dtype=BF16)
    return nft.channel_norm(y, weight, dim=-1, dtype=F32, activation="prelu", slope=weight[:1],
                            statistics="mean_square")


def run(function, n=2, positions=5):
    sizes = (n, 4, positions), (4,), (4,), (n, 4), (n, 4, positions)
    inputs = [tensor(*size, dtype=F32, seed=i).requires_grad_() for i, size in enumerate(sizes)]
    y = function(*inputs)
    return (y.detach(), *torch.autograd.grad(y, inputs, tensor(*y.shape, dtype=F32, seed=9)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    torch._dynamo.reset()
    got, want = run(torch.compile(layers, fullgraph=True, backend=backend)), run(layers)
    # Gradients of shared parameters are added in another order, and those of bf16 are rounded before.
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def test_compile_dynamic_shapes():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    counted = torch.compile(layers, fullgraph=True, dynamic=True, backend=backend)
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ((2, 5), (3, 7), (6, 64), (5, 2)):
        torch.testing.assert_close(run(compiled, *sizes), run(layers, *sizes), rtol=2e-6, atol=2e-6)
        run(counted, *sizes)
    assert len(graphs) == 1


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rms = nft.LayerNorm2d(4, activation="silu"), nft.RMSNorm2d(4)
        self.tokens = nft.ChannelNorm(4, dim=-1, groups=2, statistics="mean_square", eps_kind="of_norm", eps=1e-12)

    def forward(self, x):
        y, u = self.norm(x, pre_add=x, return_sum=True)
        y = self.rms(y, post_add=u, activation="gelu")
        return self.tokens(y.movedim(1, -1), channels_last=True)


def test_export_and_decompositions():
    """Operators of ours in the exported program; none in the decomposed one, which computes the same."""
    module, x = Layers().to(DEVICE, F64), tensor(3, 4, 5, 2)
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2)}})
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("normfuse.channel_norm" in t for t in targets) == 3
    x = tensor(6, 4, 5, 2, seed=1)
    assert torch.equal(program.module()(x), module(x))
    decomposed = program.run_decompositions()
    assert not any("normfuse" in str(node.target) for node in decomposed.graph.nodes)
    got = decomposed.module()(x)
    torch.testing.assert_close(got, module(x), rtol=1e-10, atol=1e-10)
    assert got.stride() == module(x).stride()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_formula_of_decompositions(kind):
    """In f64 the operator to its last digits, statistics too."""
    from normfuse.torch._decompositions import formulas
    statistics, eps_kind, eps = kind
    numbers = (functional.STATISTICS[statistics], functional.EPS_KINDS[eps_kind], 3, 0.0, 0)
    for shape, groups in itertools.product(SHAPES, (1, 2)):
        given = everything(shape)
        args = (*given.values(), None, groups, eps, *numbers)
        for last in (False, True):
            got, want = formulas["channel_norm"](*args, last, True), ops.channel_norm(*args, last, True)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            assert [t.shape for t in got] == [t.shape for t in want] and got[0].stride() == want[0].stride()


def test_transformations():
    x, weight = tensor(3, 2, 4, 5), tensor(4, seed=1)
    loss = lambda x, weight: nft.channel_norm(x, weight, activation="silu").square().sum()  # noqa: E731
    stock_loss = lambda x, weight: stock(x, weight, activation="silu")[0].square().sum()  # noqa: E731
    for transform in (lambda f: torch.func.grad(f, (0, 1)), lambda f: torch.func.hessian(f, 1),
                      lambda f: torch.func.jacfwd(f, (0, 1)), torch.func.functionalize):
        torch.testing.assert_close(transform(loss)(x[0], weight), transform(stock_loss)(x[0], weight))
        torch.testing.assert_close(torch.func.vmap(transform(loss), (0, None))(x, weight),
                                   torch.func.vmap(transform(stock_loss), (0, None))(x, weight))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_third_derivative(kind):
    """Layer norm's beside its formula: torch's layer_norm takes mean and rstd for constants in its third one."""
    words = dict(zip(("statistics", "eps_kind", "eps"), kind))
    inputs = tensor(2, 4, 3).requires_grad_(), tensor(4, seed=1).requires_grad_()

    def third(function):
        value = function(*inputs, activation="silu", **words)
        value = value[0] if isinstance(value, tuple) else value
        for seed in (2, 3):
            gradients = torch.autograd.grad(value, inputs, tensor(*value.shape, seed=seed), create_graph=True)
            value = torch.cat([g.flatten() for g in gradients])
        return torch.autograd.grad(value, inputs, tensor(*value.shape, seed=4))

    def formula(x, weight, *, activation, statistics, eps_kind, eps):
        v = x - x.mean(1, keepdim=True)
        return F.silu(v * (v.square().mean(1, keepdim=True) + eps).rsqrt() * weight[:, None])

    reference = formula if kind[:2] == ("mean_and_variance", "added") else stock
    torch.testing.assert_close(third(nft.channel_norm), third(reference), rtol=1e-9, atol=1e-9)


def test_saves_one_tensor_of_the_inputs_size():
    """x or u, and a number or two for each position."""
    x = tensor(2, 64, 5, 7, dtype=F32).requires_grad_()
    for words, statistics in (({}, 2), ({"statistics": "mean_square"}, 1)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            nft.channel_norm(x, activation="gelu", **words)
        assert sorted(t.numel() for t in saved) == [2 * 5 * 7] * statistics + [x.numel()]


def test_fx_and_fake_tensors():
    traced = torch.fx.symbolic_trace(Layers())
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["norm", "rms", "tokens"]
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        x = torch.empty(2, 4, 5, 3, requires_grad=True)
        y = Layers()(x)
        y.sum().backward()
        assert y.shape == (2, 5, 3, 4) and y.is_contiguous() and x.grad.shape == x.shape


def test_what_cuda_refuses_raises():
    """The library's status reaches the caller, with its words; nothing is computed another way in silence."""
    if not ON_CUDA:
        pytest.skip("is about CUDA")
    with pytest.raises((RuntimeError, TypeError), match="too large to be held"):
        nft.channel_norm(tensor(1, 400000, 3), statistics="mean_square")

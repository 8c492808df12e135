# SPDX-License-Identifier: MIT
"""torch.func.vmap: beside one call for each slice, and that there was one call where there should be."""
import itertools

import pytest

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
from device import default_device  # noqa: E402, F401
from normfuse.torch import _vmap  # noqa: E402
from torch.func import functional_call, grad, jacfwd, vmap  # noqa: E402

B, N, C = 3, 2, 4
F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")


def tensor(*shape, dtype=F64, seed=0):
    return torch.randn(shape, dtype=F64, device="cpu", generator=torch.Generator("cpu").manual_seed(seed)).to(
        torch.get_default_device(), dtype)


@pytest.fixture
def looped(monkeypatch):
    """The calls that were made slice by slice."""
    seen, slices = [], _vmap._slices
    monkeypatch.setattr(_vmap, "_slices", lambda op, *rest: seen.append(str(op)) or slices(op, *rest))
    return seen


def sliced(function, in_dims, args):
    """What vmap is to give."""
    results = [function(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims))) for i in range(B)]
    return torch.stack(results) if isinstance(results[0], torch.Tensor) else tuple(map(torch.stack, zip(*results)))


def mapped(tensors, in_dims):
    """With an axis more at these places, and values that differ along it."""
    return [t if d is None else torch.stack([t * (1 + 0.5 * i) + i for i in range(B)], d)
            for t, d in zip(tensors, in_dims)]


def group_norm(x, weight, bias, scale, shift, pre_bias, pre_add, post_add):
    return nft.group_norm(x, 2, weight, bias, activation="silu", scale=scale, shift=shift, pre_bias=pre_bias,
                          pre_add=pre_add, post_add=post_add, return_sum=True)


def evaluating(x, weight, bias, mean, var, pre_bias, pre_add, post_add):
    return nft.batch_norm(x, mean, var.exp(), weight, bias, activation="relu", pre_bias=pre_bias, pre_add=pre_add,
                          post_add=post_add)


def biased(x, pre_bias):
    """A bias of channels may differ from slice to slice: it joins as one of samples."""
    return nft.group_norm(x, 2, activation="silu", pre_bias=pre_bias), nft.batch_norm(
        x, *(torch.ones(C, dtype=x.dtype, device=x.device) for _ in range(2)), pre_bias=pre_bias)


X, CHANNEL, SAMPLE = (N, C, 3, 2), (C,), (N, C)


def channel_norm(x, weight, bias, scale, shift, pre_bias, pre_add, post_add):
    return nft.channel_norm(x, weight, bias, activation="silu", scale=scale, shift=shift, pre_bias=pre_bias,
                            pre_add=pre_add, post_add=post_add, return_sum=True)


FUNCTIONS = {
    "group_norm": (group_norm, (X, CHANNEL, CHANNEL, SAMPLE, SAMPLE, SAMPLE, X, X)),
    "pre_bias of channels": (biased, (X, CHANNEL)),
    "pre_bias of samples": (biased, (X, SAMPLE)),
    "group_norm alone": (lambda x, weight, bias: nft.group_norm(x, 2, weight, bias), (X, CHANNEL, CHANNEL)),
    "group_norm without parameters": (lambda x: nft.group_norm(x, 2, activation="gelu"), (X,)),
    "instance_norm": (lambda x, weight, bias: nft.instance_norm(x, None, None, weight, bias), (X, CHANNEL, CHANNEL)),
    "evaluating": (evaluating, (X, CHANNEL, CHANNEL, CHANNEL, CHANNEL, SAMPLE, X, X)),
    "channel_norm": (channel_norm, (X, CHANNEL, CHANNEL, SAMPLE, SAMPLE, SAMPLE, X, X)),
    "channel_norm without parameters": (lambda x: nft.channel_norm(
        x, groups=2, statistics="mean_square", eps_kind="of_norm", activation="silu"), (X,)),
    "affine": (lambda *args: nft.channel_affine(*args[:3], activation="mish", post_add=args[3]),
               (X, CHANNEL, CHANNEL, X)),
    "group_norm with slope": (lambda x, slope: nft.group_norm(x, 2, activation="prelu", slope=slope), (X, CHANNEL)),
    "evaluating with slope": (lambda x, slope: nft.batch_norm(
        x, *(torch.ones(C, dtype=x.dtype, device=x.device) for _ in range(2)), activation="prelu", slope=slope),
                              (X, CHANNEL)),
    "one slope of channel_affine": (lambda x, slope: nft.channel_affine(x, None, None, activation="prelu",
                                                                        slope=slope[:1]), (X, CHANNEL)),
    "affine of samples": (lambda *args: nft.channel_affine(*args[:3], activation="mish", post_add=args[3]),
                          (X, SAMPLE, SAMPLE, X)),
}
# in_dims for x, then for what is of channels, of samples, of x's shape; whether calls join.
DIMS = [(0, None, 0, 0), (0, None, None, None), (1, None, 1, 0), (2, None, 0, 3), (0, 0, 0, 0), (None, None, 0, 0),
        (None, 0, None, None), (0, 1, 1, 1)]


def dims_of(shapes, dims):
    kinds = {X: dims[3], CHANNEL: dims[1], SAMPLE: dims[2]}
    return (dims[0], *(kinds[shape] for shape in shapes[1:]))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap(name, dims, looped):
    function, shapes = FUNCTIONS[name]
    in_dims = dims_of(shapes, dims)
    if all(d is None for d in in_dims):
        pytest.skip("nothing is mapped")
    args = mapped([tensor(*shape, seed=i) for i, shape in enumerate(shapes)], in_dims)
    got, want = vmap(function, in_dims)(*args), sliced(function, in_dims, args)
    torch.testing.assert_close(got, want)
    of_channels = any(d is not None for d, shape in zip(in_dims[1:], shapes[1:]) if shape == CHANNEL)
    joins = in_dims[0] is not None and (name.startswith("affine") or "pre_bias" in name or not of_channels)
    assert bool(looped) != joins, looped

    def loss(*args):
        results = function(*args)
        results = results if isinstance(results, tuple) else (results,)
        return sum((r * torch.arange(1.0, 1.0 + r.numel(), dtype=F64).view_as(r)).square().sum() for r in results)

    looped.clear()
    for numbers in ((0,), tuple(range(len(args)))):
        first = grad(loss, numbers)
        torch.testing.assert_close(vmap(first, in_dims)(*args), sliced(first, in_dims, args), rtol=1e-9, atol=1e-9)
        assert bool(looped) != joins, looped


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inside_and_outside(name):
    """Derivatives of mapped calls, two axes, derivatives of derivatives, forward mode."""
    function, shapes = FUNCTIONS[name]
    args = [tensor(*shape, seed=i) for i, shape in enumerate(shapes)]
    in_dims = (0, *(None,) * (len(args) - 1))
    args[0] = torch.stack([args[0] * (1 + i) for i in range(B)])

    def total(*args):
        results = function(*args)
        return (results[0] + results[1] if isinstance(results, tuple) else results).sin().sum()

    everything = tuple(range(len(args)))
    whole = grad(lambda *a: vmap(total, in_dims)(*a).square().sum(), everything)
    want = grad(lambda *a: sliced(total, in_dims, a).square().sum(), everything)(*args)
    torch.testing.assert_close(whole(*args), want)
    twice = lambda *a: grad(lambda *b: grad(total)(*b).square().sum(), everything)(*a)  # noqa: E731
    torch.testing.assert_close(vmap(twice, in_dims)(*args), sliced(twice, in_dims, args))
    penalty = lambda each: grad(lambda *a: each(grad(total, everything), in_dims, a)[-1].square().sum())  # noqa: E731
    torch.testing.assert_close(penalty(lambda f, d, a: vmap(f, d)(*a))(*args), penalty(sliced)(*args))
    two = args[0].unsqueeze(1).repeat(1, B, *(1,) * len(X)) * torch.arange(1.0, B + 1, dtype=F64).view(B, 1, 1, 1, 1)
    nested = vmap(vmap(grad(total, everything), in_dims), in_dims)(two, *args[1:])
    want = sliced(lambda *a: sliced(grad(total, everything), in_dims, a), in_dims, (two, *args[1:]))
    torch.testing.assert_close(nested, want)
    torch.testing.assert_close(vmap(jacfwd(total), in_dims)(*args), sliced(jacfwd(total), in_dims, args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_each_sample(dtype, looped):
    """As opacus and torch.func's tutorials make them: a model's parameters, one sample at a time."""
    # A convolution of 10 bits moves what ReLU sees by more than its distance from 0, now and then, in one of the two.
    flags = torch.backends.cudnn.flags(allow_tf32=False)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, C, 1), nft.GroupNorm(2, C, activation="relu"),
                                nft.InstanceNorm2d(C, affine=True)).to(torch.get_default_device(), dtype)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = tensor(B, 3, 5, 5, dtype=dtype)

    def loss(parameters, x):
        return functional_call(model, parameters, (x.unsqueeze(0),)).square().sum()

    with flags:
        got, want = vmap(grad(loss), (None, 0))(parameters, x), [grad(loss)(parameters, x[i]) for i in range(B)]
    assert not looped
    for name in parameters:
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
        torch.testing.assert_close(got[name], torch.stack([w[name] for w in want]), rtol=tolerance, atol=tolerance)


def test_layouts_and_copies():
    """The first and the second axis join without a copy, channels-last stays."""
    x = tensor(B, N, C, 5, 5).flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, (B, N))
    assert vmap(lambda x: nft.group_norm(x, 2))(x).flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    for dim in (0, 1):
        samples = _vmap._Samples(x.shape[dim], x, dim)
        assert samples.join(x, dim).data_ptr() == x.data_ptr()
    for shapes in itertools.permutations((B, N)):
        empty = torch.empty(*shapes, C, 0, device=x.device)
        assert vmap(lambda x: nft.group_norm(x, 2))(empty).shape == empty.shape


def train(x, running_mean=None, running_var=None, weight=None):
    return nft.batch_norm(x, running_mean, running_var, weight, training=True, activation="silu")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batched_gradients(name):
    function, shapes = FUNCTIONS[name]
    args = [tensor(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    y = function(*args)
    y = y[0] if isinstance(y, tuple) else y
    dy = tensor(B, *y.shape, seed=9)
    wanted = [a for a, shape in zip(args, shapes) if name != "evaluating" or a is not args[3] and a is not args[4]]
    got = torch.autograd.grad(y, wanted, dy, retain_graph=True, is_grads_batched=True)
    want = [torch.autograd.grad(y, wanted, dy[i], retain_graph=True) for i in range(B)]
    torch.testing.assert_close(got, tuple(map(torch.stack, zip(*want))))


def test_training_batch_norm():
    x, weight = tensor(B, N, C, 3), tensor(C, seed=1)
    torch.testing.assert_close(vmap(train)(x), sliced(train, (0,), (x,)))
    first = grad(lambda x, weight: train(x, None, None, weight).sin().sum(), (0, 1))
    torch.testing.assert_close(vmap(first, (0, None))(x, weight), sliced(first, (0, None), (x, weight)))


@pytest.mark.parametrize("call", [train, lambda x, m, v: nft.instance_norm(x, m, v)], ids=["batch", "instance"])
def test_running_statistics(call):
    """Mapped, each slice updates its own; where they are not, no slice may."""
    x, mean, var = tensor(B, N, C, 3), tensor(B, C, seed=1), tensor(B, C, seed=2).exp()
    means, variances = mean.clone(), var.clone()
    torch.testing.assert_close(vmap(call)(x, means, variances), sliced(call, (0, 0, 0), (x, mean, var)))
    torch.testing.assert_close((means, variances), (mean, var))
    with pytest.raises(RuntimeError, match="running statistics"):
        vmap(call, (0, None, None))(x, mean[0], var[0])
    torch.testing.assert_close((means, variances), (mean, var))

# SPDX-License-Identifier: MIT
"""The operators torch.ops.normfuse.*: that each is registered as torch wants it (opcheck), what it computes beside
formulas in f64, its gradients, layouts, memory, threads."""

import gc
import itertools
import os
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from pages import wants_huge_pages  # noqa: E402
from device import DEVICE, ON_CUDA, hardswish, of_the_cpu  # noqa: E402
from normfuse.torch import _operators  # noqa: E402
from normfuse.torch._operators import ACTIVATIONS, SCHEMAS, ops  # noqa: E402

F64, F32 = torch.float64, torch.float32
SILU, RELU, PRELU = ACTIVATIONS["silu"], ACTIVATIONS["relu"], ACTIVATIONS["prelu"]
OWN = 63 | _operators.WANT_SLOPE
ALL = OWN | _operators.WANT_PRE_BIAS
TAKES_SLOPE = [name for name, schema in SCHEMAS.items() if "slope" in schema]


def tensor(*shape, dtype=F64, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def arguments(name, dtype=F32, memory_format=torch.contiguous_format, requires_grad=False, activation=SILU):
    """A call of each operator with every tensor that it takes, slope with prelu alone."""
    n, c, groups = 2, 8, 4
    x = tensor(n, c, 3, 5, dtype=dtype, seed=1).to(memory_format=memory_format)
    big = lambda seed: tensor(n, c, 3, 5, dtype=dtype, seed=seed).to(memory_format=memory_format)  # noqa: E731
    weight, bias = tensor(c, dtype=dtype, seed=2), tensor(c, dtype=dtype, seed=3)
    scale, shift = tensor(n, c, dtype=dtype, seed=4), tensor(n, c, dtype=dtype, seed=5)
    running = (tensor(c, dtype=dtype, seed=6), tensor(c, dtype=dtype, seed=7).abs() + 0.5)
    pre_add, post_add, dy, du = big(8), big(9), big(10), big(11)
    slope = tensor(c, dtype=dtype, seed=14) if activation == PRELU else None
    of_samples, of_channels = tensor(n, c, dtype=dtype, seed=12), tensor(c, dtype=dtype, seed=13)  # pre_bias
    saved_dtype = F64 if dtype == F64 else F32
    wide = x.to(F64)
    by_group = wide.reshape(n, groups, -1)
    group_saved = (by_group.mean(2), (by_group.var(2, correction=0) + 1e-5).rsqrt().to(saved_dtype))
    position_saved = (wide.mean(1).reshape(n, 1, 15), (wide.var(1, correction=0) + 1e-5).rsqrt().to(
        saved_dtype).reshape(n, 1, 15))
    channel_saved = (wide.mean((0, 2, 3)), (wide.var((0, 2, 3), correction=0) + 1e-5).rsqrt().to(saved_dtype))

    def triples(mean, rstd, count):
        return torch.stack([torch.full_like(mean, count), mean, count * (rstd.double() ** -2 - 1e-5)], -1).contiguous()

    group_stats, channel_stats = triples(*group_saved, by_group.shape[2]), triples(*channel_saved, n * 15)
    if requires_grad:
        for value in (x, weight, bias, scale, shift, of_samples, of_channels, pre_add, post_add, dy, du, slope):
            if value is not None:
                value.requires_grad_()
    act = (activation, 0.0)
    return {
        "group_norm": (x, weight, bias, scale, shift, of_samples, pre_add, post_add, slope, groups, 1e-5, *act, True),
        "group_norm_inference": (x, weight, bias, scale, shift, of_channels, pre_add, post_add, slope, groups, 1e-5,
                                 *act),
        "group_norm_backward": (dy, du, x, *group_saved, weight, bias, scale, shift, of_samples, post_add, slope,
                                groups, 1e-5, *act, ALL),
        "instance_norm": (x, weight, bias, *running, of_channels, None, post_add, slope, 0.1, 1e-5, *act, False),
        "batch_norm": (x, weight, bias, *running, of_channels, None, post_add, slope, 0.1, 1e-5, *act, True),
        "batch_norm_backward": (dy, du, x, *channel_saved, weight, bias, of_channels, post_add, slope, 1e-5, *act, ALL),
        "batch_norm_evaluate": (x, weight, bias, *running, of_samples, pre_add, post_add, slope, 1e-5, *act, False),
        "batch_norm_inference": (x, weight, bias, *running, of_samples, pre_add, post_add, slope, 1e-5, *act),
        "batch_norm_evaluate_backward": (dy, du, x, *running, weight, bias, of_samples, post_add, slope, 1e-5, *act,
                                         ALL | _operators.FROM_U),
        "channel_norm": (x, weight, bias, scale, shift, of_samples, pre_add, post_add, slope, groups, 1e-5, 1, 1, *act,
                         0, True, True),
        "channel_norm_inference": (x, weight, bias, scale, shift, of_channels, pre_add, post_add, slope, groups, 1e-5,
                                   0, 0, *act, 0, False),
        "channel_norm_backward": (dy, du, x, *position_saved, weight, bias, scale, shift, of_samples, post_add, slope,
                                  1, 1e-5, 0, 0, *act, ALL),
        "channel_affine": (x, weight, bias, post_add, slope, *act),
        "channel_affine_backward": (dy, x, weight, bias, post_add, slope, *act, OWN),
        "group_norm_stats": (x, of_samples, pre_add, groups),
        "group_norm_apply": (x, torch.stack([group_stats, group_stats]), weight, bias, scale, shift, post_add, slope,
                             groups, 1e-5, *act),
        "group_norm_backward_sums": (dy, x, *group_saved, weight, bias, scale, shift, post_add, slope, groups, *act,
                                     OWN),
        "group_norm_backward_apply": (dy, du, x, *group_saved, tensor(n, c, 2), tensor(3, n, c, 2), group_stats, weight,
                                      bias, scale, shift, of_samples, post_add, slope, groups, *act,
                                      ALL | _operators.FROM_U),
        "batch_norm_stats": (x, of_channels, None),
        "batch_norm_apply": (x, torch.cat([channel_stats, channel_stats]), weight, bias, *running, post_add, slope, 0.1,
                             1e-5, *act),
        "batch_norm_backward_sums": (dy, x, *channel_saved, weight, bias, post_add, slope, *act, OWN),
        "batch_norm_backward_apply": (dy, du, x, *channel_saved, tensor(c, 2), tensor(3 * c, 2), channel_stats, weight,
                                      bias, of_channels, post_add, slope, *act, ALL),
        "lean_group_norm": (x, weight, bias, groups, 1e-5, *act),
        "lean_group_norm_inference": (x, weight, bias, groups, 1e-5, *act),
        "lean_group_norm_backward": (dy, x, *group_saved, weight, bias, groups, *act, 7),
        "lean_batch_norm": (x, weight, bias, *running, 0.1, 1e-5, *act),
        "lean_batch_norm_add": (x, weight, bias, post_add, *running, 0.1, 1e-5, *act),
        "lean_batch_norm_forward_only": (x, weight, bias, *running, 0.1, 1e-5, *act),
        "lean_batch_norm_inference": (x, weight, bias, *running, 1e-5, *act),
        "lean_batch_norm_backward": (dy, x, *channel_saved, weight, bias, *act, 7),
        "lean_batch_norm_add_backward": (dy, x, *channel_saved, weight, bias, post_add, *act, 39),
        "lean_batch_norm_evaluate_backward": (dy, x, *running, weight, bias, 1e-5, *act, 7),
        "lean_batch_norm_stats": (x,),
        "lean_batch_norm_apply": (x, torch.cat([channel_stats, channel_stats]), weight, bias, *running, 0.1, 1e-5,
                                  *act),
        "lean_batch_norm_backward_sums": (dy, x, *channel_saved, weight, bias, *act),
        "lean_batch_norm_backward_apply": (dy, x, *channel_saved, tensor(c, 2), tensor(3 * c, 2), channel_stats,
                                           weight, bias, *act, 7),
    }[name]


DIFFERENTIABLE = ("group_norm", "group_norm_inference", "group_norm_backward", "instance_norm", "batch_norm",
                  "batch_norm_backward", "batch_norm_evaluate", "batch_norm_inference", "batch_norm_evaluate_backward",
                  "channel_affine", "channel_affine_backward", "channel_norm", "channel_norm_inference",
                  "channel_norm_backward")


# ---- registration ---------------------------------------------------------------------------------------------------


CALLS = [(name, SILU) for name in SCHEMAS] + [(name, PRELU) for name in TAKES_SLOPE]


@pytest.mark.sampled()
@pytest.mark.parametrize("name, activation", CALLS)
def test_opcheck(name, activation):
    torch.library.opcheck(getattr(ops, name).default, arguments(name, activation=activation))


@pytest.mark.sampled()
@pytest.mark.parametrize("name, activation", [call for call in CALLS if call[0] in DIFFERENTIABLE])
def test_opcheck_with_gradients(name, activation):
    torch.library.opcheck(getattr(ops, name).default, arguments(name, F64, requires_grad=True, activation=activation))


@pytest.mark.parametrize("name, activation", CALLS)
def test_opcheck_channels_last_and_16_bits(name, activation):
    torch.library.opcheck(getattr(ops, name).default,
                          arguments(name, torch.bfloat16, torch.channels_last, activation=activation),
                          test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck_with_nothing_optional(name):
    schema = getattr(ops, name).default._schema
    args = [None if str(argument.type).startswith("Optional") and argument.name != "mean" else
            0 if argument.name == "wanted" else value for argument, value in zip(schema.arguments, arguments(name))]
    torch.library.opcheck(getattr(ops, name).default, tuple(args), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name, activation", CALLS)
def test_meta(name, activation):
    """Meta tensors give the shapes, dtypes and strides that the kernel gives."""
    args = arguments(name, F32, torch.channels_last, activation=activation)
    meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in args]
    got, want = getattr(ops, name)(*meta), getattr(ops, name)(*args)
    for g, w in zip((got,) if isinstance(got, torch.Tensor) else got, (want,) if isinstance(want, torch.Tensor) else
                    want):
        assert g.is_meta and (g.shape, g.dtype, g.stride()) == (w.shape, w.dtype, w.stride())


# ---- both bindings, the same bits -----------------------------------------------------------------------------------

_BITS = """
import sys, torch
sys.path.insert(0, {here!r})
from test_operators import CALLS, SCHEMAS, arguments, ops, layouts
from normfuse.torch import _operators
results = {{}}
from_y = [name for name in SCHEMAS if "backward" in name and "post_add" in SCHEMAS[name]]
for name, activation in CALLS:
    for dtype in (torch.float32, torch.float16):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            outputs = getattr(ops, name)(*arguments(name, dtype, memory_format, activation=activation))
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            results[name, activation, str(dtype), str(memory_format)] = [(o.clone(), o.stride()) for o in outputs]
            if name in from_y:
                *args, _, _, wanted = arguments(name, dtype, memory_format)
                outputs = getattr(ops, name)(*args, 1, 0.0, wanted | _operators.FROM_Y)
                results[name, "y", str(dtype), str(memory_format)] = [(o.clone(), o.stride()) for o in outputs]
assert len(from_y) == 10, from_y
for label, x in layouts().items():
    for last, statistics in ((False, 0), (True, 1)):
        results[label, last] = [(o.clone(), o.stride()) for o in ops.channel_norm(
            x, *[None] * 8, 2, 1e-5, statistics, 0, 3, 0.0, 0, last, False)]
    for dtype in (torch.float16, torch.bfloat16):
        y, _, mean, rstd = ops.channel_norm(x, *[None] * 8, 1, 1e-5, 0, 0, 3, 0.0, 2 if dtype is torch.float16 else 3,
                                            False, False)
        assert y.dtype is dtype
        gradients = ops.channel_norm_backward(y, None, x, mean, rstd, *[None] * 5, y, None, 1, 1e-5, 0, 0, 3, 0.0, 33)
        results[label, dtype] = [(o.clone(), o.stride()) for o in (y, mean, rstd, *gradients)]
    results[label] = [(o.clone(), o.stride()) for o in ops.group_norm(x, *[None] * 8, 2, 1e-5, 3, 0.0, False)]
torch.save((_operators.binding()[0], results), sys.argv[1])
"""


def layouts():
    x = tensor(4, 8, 6, 5, dtype=F32)
    return {
        "contiguous": x,
        "channels-last": x.to(memory_format=torch.channels_last),
        "rows": x[1:3],
        "channels": x[:, 2:6],
        "channels of channels-last": x.to(memory_format=torch.channels_last)[:, 2:6],
        "transposed": x.transpose(2, 3),
        "every second": x[..., ::2],
        "expanded": x[:1].expand(4, 8, 6, 5),
        "expanded positions": x[..., :1].expand(4, 8, 6, 5),
        "vectors": x[:, :, 0, 0],
        "sequence, channels last": x.reshape(4, 8, 30).transpose(1, 2).contiguous().transpose(1, 2),
        "volume, channels last": x.reshape(4, 8, 2, 3, 5).to(memory_format=torch.channels_last_3d),
        "six axes": x.reshape(4, 8, 2, 3, 5, 1),
        "overlapping rows": x.as_strided((4, 8, 15), (240, 1, 2)),
        "one channel": x.reshape(32, 1, 6, 5).expand(32, 2, 6, 5),
        "empty": x[:0],
        "no positions": x[..., :0],
    }


def test_bindings_agree(tmp_path):
    """The kernels in C and those over ctypes are the same to the bit, strides included."""
    here = os.path.dirname(os.path.abspath(__file__))
    found = {}
    for binding in ("shim", "ctypes"):
        path = str(tmp_path / binding)
        done = subprocess.run([sys.executable, "-c", _BITS.format(here=here), path], capture_output=True, text=True,
                              env={**os.environ, "NORMFUSE_TORCH_BINDING": binding,
                                   "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        if binding == "shim" and "NORMFUSE_TORCH_BINDING is 'shim', but" in done.stderr:
            pytest.skip(done.stderr.strip().splitlines()[-1])
        assert done.returncode == 0, done.stderr
        active, found[binding] = torch.load(path, weights_only=False)
        assert active == binding
    for key, outputs in found["shim"].items():
        for (a, a_strides), (b, b_strides) in zip(outputs, found["ctypes"][key]):
            assert a_strides == b_strides and a.dtype == b.dtype, key
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), key


@pytest.mark.parametrize("label", layouts())
def test_layouts(label):
    """Any strides: the result is the contiguous tensor's, and dense in the order of x's axes."""
    x = layouts()[label]
    y = ops.group_norm_inference(x, *[None] * 8, 2, 1e-5, SILU, 0.0)
    want = ops.group_norm_inference(x.double().contiguous(), *[None] * 8, 2, 1e-5, SILU, 0.0)
    # f32 sums of a few dozen values, one SiLU: a few dozen roundings of values below 4.
    assert y.numel() == 0 or (y - want).abs().max() <= 64 * 2.0**-24 * 4
    fake = ops.group_norm_inference(torch.empty_strided(x.shape, x.stride(), device="meta"), *[None] * 8, 2, 1e-5, SILU,
                                    0.0)
    assert fake.stride() == y.stride()
    if x.is_contiguous() or "last" in label and "of" not in label:
        assert y.stride() == x.stride()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("label", layouts())
def test_layouts_of_channel_norm(label, channels_last):
    x = layouts()[label]
    dtype = torch.bfloat16 if "sequence" in label else None
    args = (*[None] * 8, 2, 1e-5, 0, 0, SILU, 0.0, _operators.Y_DTYPES.index(dtype), channels_last)
    y = ops.channel_norm_inference(x, *args)
    wide = x.double().unflatten(1, (2, -1))
    wide = wide - wide.mean(2, keepdim=True)
    want = torch.nn.functional.silu(wide * (wide.square().mean(2, keepdim=True) + 1e-5).rsqrt()).flatten(1, 2)
    assert y.dtype is (dtype or F32)
    # Sums of four values and a SiLU: a few dozen roundings of values below 4, or one of bf16.
    assert y.numel() == 0 or (y - want).abs().max() <= (64 * 2.0**-24 if dtype is None else 2.0**-8) * 4
    fake = ops.channel_norm_inference(torch.empty_strided(x.shape, x.stride(), device="meta"), *args)
    assert (fake.stride(), fake.dtype) == (y.stride(), y.dtype)
    if channels_last:
        assert y.movedim(1, -1).is_contiguous()
    elif x.is_contiguous() or "last" in label and "of" not in label:
        assert y.stride() == x.stride()


# ---- values and gradients -------------------------------------------------------------------------------------------


def formula(x, weight, bias, scale, shift, pre_bias, pre_add, post_add, slope, eps, activation, act_param, average):
    u = x if pre_bias is None else x + pre_bias.reshape(-1, x.shape[1], *(1,) * (x.dim() - 2))
    u = u if pre_add is None else u + pre_add
    mean = average(u)
    z = (u - mean) * (average((u - mean).square()) + eps).rsqrt()
    per_channel = lambda p: p.reshape((-1,) + (1,) * (x.dim() - 2))  # noqa: E731
    per_sample = lambda p: p.reshape(p.shape + (1,) * (x.dim() - 2))  # noqa: E731
    z = z * (1 if weight is None else per_channel(weight)) + (0 if bias is None else per_channel(bias))
    z = z * (1 if scale is None else 1 + per_sample(scale)) + (0 if shift is None else per_sample(shift))
    return act(z if post_add is None else z + post_add, activation, act_param, slope), u


def act(z, activation, act_param, slope=None):
    functions = torch.nn.functional
    return {
        0: lambda: z, 1: lambda: functions.relu(z), 2: lambda: functions.leaky_relu(z, act_param),
        3: lambda: functions.silu(z), 4: lambda: functions.gelu(z), 5: lambda: functions.gelu(z, approximate="tanh"),
        6: lambda: hardswish(z), 7: lambda: functions.elu(z, act_param), 8: lambda: functions.mish(z),
        9: lambda: functions.relu6(z), 10: lambda: functions.prelu(z, slope),
    }[activation]()  # fmt: skip


def group_average(groups):
    return lambda x: (x.reshape(x.shape[0], groups, -1).mean(2, keepdim=True)
                      .expand(-1, groups, x[0].numel() // groups).reshape(x.shape))


def batch_average(x):
    return x.mean([0, *range(2, x.dim())], keepdim=True)


PARAMETER = {2: 0.2, 7: 0.7}


@pytest.mark.parametrize("activation, slopes", [*((activation, 0) for activation in range(10)), (PRELU, 4), (PRELU, 1)])
def test_group_norm_gradients(activation, slopes):
    """Every gradient beside autograd through the formula, in f64: only roundings of f64 between them."""
    args = [tensor(3, 4, 5, seed=seed) for seed in (1, 2, 3)]
    x, pre_add, post_add = (a.requires_grad_() for a in args)
    weight, bias, scale, shift, pre_bias = (p.requires_grad_() for p in (
        tensor(4, seed=4), tensor(4, seed=5), tensor(3, 4, seed=6), tensor(3, 4, seed=7), tensor(4, seed=10)))
    inputs = (x, weight, bias, scale, shift, pre_bias, pre_add, post_add)
    slope = tensor(slopes, seed=11).requires_grad_() if slopes else None
    parameter = PARAMETER.get(activation, 0.0)
    y, u, _, _ = ops.group_norm(*inputs, slope, 2, 1e-3, activation, parameter, True)
    want_y, want_u = formula(*inputs, slope, 1e-3, activation, parameter, group_average(2))
    inputs += (slope,) if slopes else ()
    dy, du = tensor(3, 4, 5, seed=8), tensor(3, 4, 5, seed=9)
    torch.testing.assert_close((y, u), (want_y, want_u), rtol=1e-13, atol=1e-13)
    want = torch.autograd.grad((want_y, want_u), inputs, (dy, du))
    torch.testing.assert_close(torch.autograd.grad((y, u), inputs, (dy, du), retain_graph=True), want, rtol=1e-12,
                               atol=1e-12)
    # The composite formula, which is differentiated again.
    torch.testing.assert_close(torch.autograd.grad((y, u), inputs, (dy, du), create_graph=True), want, rtol=1e-12,
                               atol=1e-12)


def test_parameters_of_f32_beside_f64():
    """The composite is as exact as the kernel: 1 + scale is made in f64."""
    x = tensor(3, 4, 5).requires_grad_()
    parameters = [tensor(*size, dtype=F32, seed=i).requires_grad_() for i,
                  size in enumerate(((4,), (4,), (3, 4), (3, 4)))]
    numbers = {"group_norm": (2, 1e-5, SILU, 0.0, False), "channel_norm": (1, 1e-5, 0, 0, SILU, 0.0, 0, False, False)}
    for name, rest in numbers.items():
        y = getattr(ops, name)(x, *parameters, *[None] * 4, *rest)[0]
        kernel, composite = (torch.autograd.grad(y, (x, *parameters), tensor(3, 4, 5, seed=9), create_graph=again,
                                                 retain_graph=True) for again in (False, True))
        torch.testing.assert_close(composite[0], kernel[0], rtol=1e-12, atol=1e-12)


def test_pre_add_alone_needs_a_gradient():
    x, pre_add = tensor(3, 4, 5), tensor(3, 4, 5, seed=2).requires_grad_()
    given = (x, *[None] * 5, pre_add, None, None)
    for y, average in ((ops.group_norm(*given, 2, 1e-3, SILU, 0.0, False)[0], group_average(2)),
                       (ops.batch_norm(*given, 0.1, 1e-3, SILU, 0.0, False)[0], batch_average)):
        want, _ = formula(*given, 1e-3, SILU, 0.0, average)
        torch.testing.assert_close(torch.autograd.grad(y, pre_add, x), torch.autograd.grad(want, pre_add, x),
                                   rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=str)
def test_pre_bias_alone_needs_a_gradient(shape, return_sum):
    """u is an output where it is asked for; dpre_bias is that of y, of u, and of both."""
    x, pre_bias = tensor(3, 4, 5), tensor(*shape, seed=2).requires_grad_()
    running = tensor(4, seed=4), tensor(4, seed=5).abs()
    given = (x, *[None] * 4, pre_bias, None, None, None)
    calls = ((ops.group_norm(*given, 2, 1e-3, SILU, 0.0, return_sum), group_average(2)),
             (ops.batch_norm(*given, 0.1, 1e-3, SILU, 0.0, return_sum), batch_average),
             (ops.batch_norm_evaluate(*given[:3], *running, *given[5:], 1e-3, SILU, 0.0, return_sum), None))
    for (y, u, *_), average in calls:
        if average is None:
            want_u = x + pre_bias.reshape(-1, 4, 1)
            z = (want_u - running[0][:, None]) * (running[1][:, None] + 1e-3).rsqrt()
            want_y = act(z, SILU, 0.0)
        else:
            want_y, want_u = formula(*given, 1e-3, SILU, 0.0, average)
        outputs, wants = ((y, u), (want_y, want_u)) if return_sum else ((y,), (want_y,))
        assert u.shape == (x.shape if return_sum else (0,))
        for some in (slice(0, 1), slice(1, 2), slice(0, 2)):
            if outputs[some]:
                got, want = (torch.autograd.grad(each[some], pre_bias, (x, x * x)[some], retain_graph=True)
                             for each in (outputs, wants))
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def gradient_cases():
    n, c = 3, 4
    names = ("x", "weight", "bias", "scale", "shift", "pre_bias", "pre_add", "post_add")
    others = ("x", "weight", "bias", "pre_bias", "pre_add", "post_add")
    shapes = {"x": (n, c, 3), "weight": (c,), "bias": (c,), "scale": (n, c), "shift": (n, c), "pre_add": (n, c, 3),
              "post_add": (n, c, 3), "pre_bias": (c,), "sample_bias": (n, c)}
    running = (tensor(c, seed=20), tensor(c, seed=21).abs() + 0.5)
    calls = {
        "group_norm": (names, lambda a, *act: ops.group_norm(*a, act[0], 2, 1e-3, *act[1:], False)[:2]),
        "instance_norm": (others, lambda a, *act: ops.instance_norm(
            *a[:3], running[0].clone(), running[1].clone(), *a[3:], act[0], 0.1, 1e-3, *act[1:], False)[:2]),
        "batch_norm": (others, lambda a, *act: ops.batch_norm(
            *a[:3], None, None, *a[3:], act[0], 0.1, 1e-3, *act[1:], False)[:2]),
        "batch_norm_evaluate": (others, lambda a, *act: ops.batch_norm_evaluate(
            *a[:3], *running, *a[3:], act[0], 1e-3, *act[1:], False)),
        # x with pre_bias alone: the backward adds again.
        "group_norm of x and pre_bias": (("x", "weight", "sample_bias"), lambda a, *act: ops.group_norm(
            *a[:2], None, None, None, a[2], None, None, act[0], 2, 1e-3, *act[1:], False)[0]),
        "batch_norm of x and pre_bias": (("x", "weight", "sample_bias"), lambda a, *act: ops.batch_norm(
            *a[:2], None, None, None, a[2], None, None, act[0], 0.1, 1e-3, *act[1:], False)[0]),
        "batch_norm_evaluate of x and pre_bias": (("x", "weight", "pre_bias"), lambda a, *act: ops.batch_norm_evaluate(
            *a[:2], None, *running, a[2], None, None, act[0], 1e-3, *act[1:], True)),
        "channel_norm": (names, lambda a,
                         *act: ops.channel_norm(*a, act[0], 2, 1e-3, 0, 0, *act[1:], 0, True, False)[:2]),
        "channel_norm rms": (names, lambda a, *act: ops.channel_norm(
            *a, act[0], 1, 1e-3, 1, 0, *act[1:], 0, False, True)[:2]),
        "channel_norm of_norm": (names, lambda a, *act: ops.channel_norm(  # some of these norms are clamped
            *a, act[0], 1, 1.5, 1, 1, *act[1:], 0, False, False)[:2]),
        "channel_norm of x and pre_bias": (("x", "weight", "sample_bias"), lambda a, *act: ops.channel_norm(
            *a[:2], None, None, None, a[2], None, None, act[0], 2, 1e-3, 0, 1, *act[1:], 0, False, False)[0]),
        "channel_affine": (("x", "weight", "bias", "post_add"), lambda a, *act: ops.channel_affine(*a, *act)),
        "channel_affine per sample": (("x", "scale", "shift", "post_add"),
                                      lambda a, *act: ops.channel_affine(*a, *act)),
    }
    activations = [*((activation, []) for activation in (0, 1, 2, 3, 4, 7, 9)), (PRELU, [(1,)]), (PRELU, [(c,)])]
    for (label, (taken, call)), (activation, slope) in itertools.product(calls.items(), activations):
        yield pytest.param(call, [shapes[name] for name in taken] + slope, activation,
                           id=f"{label} act={activation}{''.join(map(str, slope))}")


@pytest.mark.parametrize("call, shapes, activation", gradient_cases())
def test_gradcheck(call, shapes, activation):
    inputs = [tensor(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    parameter = PARAMETER.get(activation, 0.0)

    def function(*a):
        a, slope = (a[:-1], a[-1]) if activation == PRELU else (a, None)
        return call(a, slope, activation, parameter)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)
    # The composite that is differentiated again gives what the kernel gives.
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [o for o in outputs if o.requires_grad]
    directions = [tensor(*o.shape, seed=30 + i) for i, o in enumerate(outputs)]
    kernel, composite = (torch.autograd.grad(outputs, inputs, directions, create_graph=again, retain_graph=True)
                         for again in (False, True))
    torch.testing.assert_close(composite, kernel, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("needed", range(1, 16))
def test_only_what_is_asked_for(needed, monkeypatch):
    """A backward computes the gradients that are asked for, and gives the others none."""
    x, weight, bias, slope = tensor(2, 4, 3), tensor(4), tensor(4), tensor(1)
    asked = [t.requires_grad_(bool(needed >> i & 1)) for i, t in enumerate((x, weight, bias, slope))]
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is ops.group_norm_backward.default:
                seen.append(args[-1])
            return func(*args, **(kwargs or {}))

    y = ops.group_norm(x, weight, bias, *[None] * 5, slope, 2, 1e-5, PRELU, 0.0, False)[0]
    with Watch():
        y.sum().backward()
    assert seen == [needed & 7 | (_operators.WANT_SLOPE if needed & 8 else 0)]
    assert [t.grad is not None for t in asked] == [bool(needed >> i & 1) for i in range(4)]


@pytest.mark.parametrize("name", [name for name in SCHEMAS if "backward" in name])
def test_each_bit_of_wanted(name):
    """One bit, one gradient, and the same as among all of them."""
    args = arguments(name, F64, activation=PRELU if name in TAKES_SLOPE else SILU)
    everything = getattr(ops, name)(*args)
    names = _operators.OUTPUT_NAMES[name]
    bits = {"dx": 1, "dweight": 2, "dbias": 4, "dscale": 8, "dshift": 16, "dpost_add": 32,
            "dslope": _operators.WANT_SLOPE, "dpre_bias": 1 | _operators.WANT_PRE_BIAS}  # which is of dx
    for output in [name for name in names if name != "sums"]:
        for k, gradient in enumerate(getattr(ops, name)(*args[:-1], bits[output] | args[-1] & _operators.FROM_U)):
            if names[k] != output and names[k] != "sums" and not (names[k] == "dx" and output == "dpre_bias"):
                assert gradient.shape == (0,)
            elif ON_CUDA:  # other kernels, perhaps, with another order of sums of 30 products, in f64
                torch.testing.assert_close(gradient, everything[k], rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(gradient, everything[k])


def test_third_derivative():
    x = tensor(2, 4, 3).requires_grad_()
    function = lambda f: f(x).pow(3).sum()  # noqa: E731

    def third(f):
        value = function(f)
        for _ in range(3):
            gradient, = torch.autograd.grad(value, x, create_graph=True)
            value = (gradient * tensor(2, 4, 3, seed=3)).sum()
        return gradient.detach()

    ours = third(lambda x: ops.group_norm(x, *[None] * 8, 2, 1e-2, SILU, 0.0, False)[0])
    want = third(lambda x: formula(x, *[None] * 8, 1e-2, SILU, 0.0, group_average(2))[0])
    torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-9)


# ---- shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [SILU, PRELU])
def test_shards_of_batch_norm(activation):
    """Forward and backward in shards, one of them empty, are those of one call: f64, so but for roundings."""
    x, dy, post_add = tensor(6, 4, 5), tensor(6, 4, 5, seed=1), tensor(6, 4, 5, seed=2)
    weight, bias, pre_bias = tensor(4, seed=3), tensor(4, seed=4), tensor(4, seed=7)
    act, slope = (activation, 0.0), tensor(4, seed=8) if activation == PRELU else None
    running = [tensor(4, seed=5), tensor(4, seed=6).abs()]
    want_running = [r.clone() for r in running]
    y, _, mean, rstd = ops.batch_norm(x, weight, bias, *want_running, pre_bias, None, post_add, slope, 0.1, 1e-5, *act,
                                      False)
    wants = ops.batch_norm_backward(dy, None, x, mean, rstd, weight, bias, pre_bias, post_add, slope, 1e-5, *act, ALL)
    shards = [slice(0, 1), slice(1, 1), slice(1, 4), slice(4, 6)]
    stats, u = zip(*(ops.batch_norm_stats(x[s], pre_bias, None) for s in shards))
    x = torch.cat(u)
    sums, dpost_add, dslope = zip(*(ops.batch_norm_backward_sums(dy[s], x[s], mean, rstd, weight, bias, post_add[s],
                                                                 slope, *act, OWN) for s in shards))
    sums = torch.stack(sums)
    torch.testing.assert_close(torch.cat(dpost_add), wants[3], rtol=1e-12, atol=1e-12)
    if activation == PRELU:
        torch.testing.assert_close(sum(dslope), wants[5], rtol=1e-12, atol=1e-12)
    close = dict(rtol=1e-12, atol=1e-12)
    added = [0, 0, 0]
    for parts_of, sums_of, s, own in zip((torch.stack(stats), torch.cat(stats)) * 2, (sums, sums.flatten(0, 1)) * 2,
                                         shards, sums):
        mine = [r.clone() for r in running]
        part, part_mean, part_rstd, merged = ops.batch_norm_apply(x[s], parts_of, weight, bias, *mine, post_add[s],
                                                                  slope, 0.1, 1e-5, *act)
        assert torch.equal(merged[:, 0], torch.full((4,), 30, dtype=F64, device=DEVICE))
        torch.testing.assert_close((part, part_mean, part_rstd, *mine), (y[s], mean, rstd, *want_running), **close)
        dx, *of_shard = ops.batch_norm_backward_apply(
            dy[s], None, x[s], mean, rstd, own, sums_of, merged, weight, bias, pre_bias, post_add[s], slope, *act,
            7 | _operators.WANT_PRE_BIAS | _operators.FROM_U)
        added = [a + b for a, b in zip(added, of_shard)]
        torch.testing.assert_close(dx, wants[0][s], **close)
    torch.testing.assert_close(added, [*wants[1:3], wants[4]], **close)


@pytest.mark.parametrize("name", ["batch_norm_apply", "batch_norm_backward_apply"])
def test_parts_that_no_shards_gave_are_refused(name):
    names = [argument.name for argument in getattr(ops, name).default._schema.arguments]
    for wrong in (tensor(5, 2), tensor(6, 8, 2, dtype=torch.float32), tensor(8, 2, 6).transpose(0, 1)):
        args = list(arguments(name))
        args[names.index("parts")] = wrong
        for kernel in (_operators._ctypes_kernel(name), getattr(ops, name)):
            with pytest.raises(RuntimeError, match="parts is not what the shards gave"):
                kernel(*args)


@pytest.mark.parametrize("activation", [SILU, PRELU])
def test_strips_of_group_norm(activation):
    x, dy = tensor(2, 4, 6, 5), tensor(2, 4, 6, 5, seed=1)
    weight, bias = tensor(4, seed=3), tensor(4, seed=4)
    act, slope = (activation, 0.0), tensor(1, seed=8) if activation == PRELU else None
    y, _, mean, rstd = ops.group_norm(x, weight, bias, *[None] * 5, slope, 2, 1e-5, *act, False)
    dx, *_, want_dslope = ops.group_norm_backward(dy, None, x, mean, rstd, weight, bias, *[None] * 4, slope, 2, 1e-5,
                                                  *act, 1 | _operators.WANT_SLOPE)
    strips = [slice(0, 1), slice(1, 4), slice(4, 6)]
    stats = torch.cat([ops.group_norm_stats(x[:, :, s], None, None, 2)[0] for s in strips])
    sums, _, dslope = zip(*(ops.group_norm_backward_sums(
        dy[:, :, s], x[:, :, s], mean, rstd, weight, bias, None, None, None, slope, 2, *act, OWN) for s in strips))
    sums = torch.stack(sums)
    close = dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(dslope), want_dslope, **close)
    for s in strips:
        *part, merged = ops.group_norm_apply(x[:, :, s], stats, weight, bias, None, None, None, slope, 2,
                                             1e-5, *act)
        torch.testing.assert_close(tuple(part), (y[:, :, s], mean, rstd), **close)
        mine = ops.group_norm_backward_apply(dy[:, :, s], None, x[:, :, s], mean, rstd, sums[0], sums, merged, weight,
                                             bias, None, None, None, None, slope, 2, *act, 1)[0]
        torch.testing.assert_close(mine, dx[:, :, s], **close)


# ---- refusals, memory, threads --------------------------------------------------------------------------------------


def test_refusals_name_the_argument():
    x = tensor(2, 8, 3)
    with pytest.raises((RuntimeError, ValueError), match="weight has 3 elements along C"):
        ops.group_norm(x, x[0, :3, 0], *[None] * 7, 2, 1e-5, 0, 0.0, False)
    with pytest.raises((RuntimeError, ValueError), match="slope is NULL|slope is None"):
        ops.group_norm(x, *[None] * 8, 2, 1e-5, PRELU, 0.0, False)
    with pytest.raises((RuntimeError, ValueError), match="activation"):
        ops.group_norm(x, *[None] * 8, 2, 1e-5, 77, 0.0, False)
    with pytest.raises((RuntimeError, ValueError), match="f64, f32, f16 and bf16"):
        ops.group_norm(torch.ones(2, 8, 3, dtype=torch.int32, device=DEVICE), *[None] * 8, 2, 1e-5, 0, 0.0, False)


@pytest.mark.parametrize("name", ["group_norm", "group_norm_inference", "lean_group_norm_inference",
                                  "group_norm_backward", "channel_affine"])
def test_numbers_that_32_bits_do_not_hold(name):
    """2**32 + 3 is not SiLU's 3, whichever of the two kernels are registered."""
    call = list(arguments(name))
    place = [argument.name for argument in getattr(ops, name).default._schema.arguments].index("activation")
    for number in (2**32 + SILU, -2**32, 2**63 - 1):
        call[place] = number
        for kernel in (_operators._ctypes_kernel(name), getattr(ops, name)):
            with pytest.raises((RuntimeError, OverflowError), match="activation"):
                kernel(*call)


@pytest.mark.parametrize("name", ["group_norm", "lean_group_norm", "group_norm_stats", "group_norm_apply"])
@pytest.mark.parametrize("groups", [2**62, 2**40, 3, 0, -1])
def test_no_output_is_made_of_a_number_of_groups_that_is_refused(name, groups):
    call = list(arguments(name))
    call[[argument.name for argument in getattr(ops, name).default._schema.arguments].index("groups")] = groups
    for kernel in (_operators._ctypes_kernel(name), getattr(ops, name)):
        with pytest.raises(RuntimeError, match="groups must be greater than 0 and divide"):
            kernel(*call)


@pytest.mark.parametrize("name", SCHEMAS)
def test_tensors_on_several_devices_are_refused(name):
    """One of them meta, too: the fake kernel runs then, which fills nothing."""
    call = arguments(name)
    tensors = [place for place, value in enumerate(call) if isinstance(value, torch.Tensor)]
    for place in tensors[1:]:
        mixed = [value.to("meta") if k == place else value for k, value in enumerate(call)]
        with pytest.raises(RuntimeError, match="same device"):
            getattr(ops, name)(*mixed)


@pytest.mark.parametrize("name", ["group_norm", "group_norm_inference", "lean_group_norm", "lean_group_norm_inference",
                                  "batch_norm", "instance_norm", "channel_affine"])
@pytest.mark.parametrize("shape", [(), (6,)])
def test_kernels_over_ctypes_refuse_tensors_without_channels(name, shape):
    """As those in C do, whichever of the two are registered."""
    x = torch.ones(shape, dtype=F64, device=DEVICE)
    values = {"x": x, "groups": 1, "eps": 1e-5, "momentum": 0.1, "activation": 0, "act_param": 0.0}
    schema = torch._C.parse_schema("normfuse::" + name + SCHEMAS[name])
    call = [values.get(argument.name) for argument in schema.arguments]
    for kernel in (_operators._ctypes_kernel(name), getattr(ops, name)):
        with pytest.raises(RuntimeError, match="at least 2 dimensions"):
            kernel(*call)


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(ON_CUDA, reason="test_cuda.py looks at the device's memory")
def test_no_leaks():
    """Ten thousand calls, and ten thousand refusals, of 64 KiB tensors, copied ones among them, leave nothing."""
    x = tensor(2, 64, 16, 8, dtype=F32).transpose(2, 3).requires_grad_()
    weight, bias = tensor(64, dtype=F32).requires_grad_(), tensor(64, dtype=F32)
    args = (x.detach(), weight.detach(), bias, None, None, weight.detach(), x.detach(), None, None, 8, 1e-5, SILU, 0.0,
            True)

    def once():
        ops.group_norm(*args)
        y = ops.group_norm(x, weight, bias, None, None, weight, None, None, None, 8, 1e-5, SILU, 0.0, False)[0]
        torch.autograd.grad(y.sum(), (x, weight))
        with pytest.raises((RuntimeError, ValueError)):
            ops.group_norm(*args[:9], 7, 1e-5, SILU, 0.0, True)

    for _ in range(300):
        once()
    gc.collect()
    before = resident()
    for _ in range(3000):
        once()
    gc.collect()
    # One leaked output of 64 KiB a call would be 192 MiB, a leaked handle of 100 bytes 0.3 MiB.
    assert resident() - before < 4 << 20
    small, one = tensor(1, 4, 2, dtype=F32), tensor(1, 4, dtype=F32)
    small_args = (small, one[0], one[0], one, one, one[0], small, small, one[0], 2, 1e-5, PRELU, 0.0, True)
    before = resident()
    for _ in range(10000):
        ops.group_norm(*small_args)
    for _ in range(10000):
        try:
            ops.group_norm(*small_args[:9], 3, 1e-5, PRELU, 0.0, True)
        except (RuntimeError, ValueError):
            pass
    # A leaked handle or cell of 32 bytes a call would be 0.64 MB, and there are eight of each.
    assert resident() - before < 600_000


def test_threads():
    """Calls from several threads at once, forward and backward, give the bits of calls one after the other."""
    x = [tensor(4, 32, 16, 16, dtype=F32, seed=i) for i in range(8)]

    def compute(i):
        leaf = x[i].clone().requires_grad_()
        y = ops.group_norm(leaf, *[None] * 8, 8, 1e-5, SILU, 0.0, False)[0]
        return y.detach(), torch.autograd.grad(y, leaf, x[(i + 1) % 8])[0]

    wants = [compute(i) for i in range(8)]
    results, failures = [[None] * 20 for _ in range(8)], []

    def work(i):
        try:
            for k in range(20):
                results[i][k] = compute(i)
        except BaseException as error:  # noqa: BLE001: reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for i, want in enumerate(wants):
        for got in results[i]:
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@of_the_cpu
@pytest.mark.skipif(ON_CUDA, reason="of results on the CPU")
@pytest.mark.skipif(_operators.binding()[0] == "ctypes",
                    reason="the kernels over ctypes take torch's tensors as they are")
def test_large_results_have_huge_pages():
    y = ops.group_norm_inference(tensor(2, 1280, 64, 64, dtype=F32), *[None] * 8, 32, 1e-5, SILU, 0)
    assert wants_huge_pages(y.data_ptr() + y.nbytes // 2)  # more than glibc ever keeps


def test_number_of_threads_changes_no_bit():
    x = tensor(2, 64, 64, 64, dtype=F32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ops.group_norm(x, *[None] * 8, 8, 1e-5, SILU, 0.0, False))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def test_binding_says_which():
    active, why = _operators.binding()
    assert active in ("shim", "ctypes") and why

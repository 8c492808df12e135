# SPDX-License-Identifier: MIT
"""normfuse.torch.functional: torch's own samples for its norms, with errors bounded by docs/numerics.md; what torch
refuses; torch.compile, export, torch.func, autocast, meta tensors; additions, running statistics, layouts."""

import copy
import functools
import inspect
import itertools
import warnings

import numpy
import pytest

torch = pytest.importorskip("torch")

import reference  # noqa: E402
from device import DEVICE, ON_CUDA  # noqa: E402
from normfuse.torch import functional as nft  # noqa: E402
from normfuse.torch._operators import ops  # noqa: E402

stock = torch.nn.functional
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def tensor(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def wide(value):
    return value.detach().double().cpu().numpy() if isinstance(value, torch.Tensor) else value


def big(value):
    return None if value is None else wide(value).reshape(*value.shape[:2], value.shape[2:].numel())


def problem_of(name, input, running_mean=None, running_var=None, weight=None, bias=None, training=None, momentum=0.1,
               eps=1e-5, num_groups=0, use_input_stats=True, activation=None, act_param=None, slope=None, pre_bias=None,
               pre_add=None, post_add=None, scale=None, shift=None, return_sum=False):
    """A call of one of the three norms in the words of reference.py."""
    evaluate = not training if name == "batch_norm" else not use_input_stats
    return reference.Problem(
        "batch" if name == "batch_norm" or evaluate else "group", NAMES[input.dtype], big(input),
        groups=num_groups or input.shape[1], columns=input.dim() > 2 and not input.is_contiguous(), weight=wide(weight),
        bias=wide(bias), scale=wide(scale), shift=wide(shift), pre_bias=wide(pre_bias), pre_add=big(pre_add),
        post_add=big(post_add),
        running_mean=wide(running_mean), running_var=wide(running_var), evaluate=evaluate, momentum=momentum, eps=eps,
        activation=activation or "identity", act_param=act_param, slope=wide(slope), on_cuda=ON_CUDA,
        writes_u=return_sum)


def check(name, output, want, dtype):
    values, error = want
    reference.compare(name, wide(output).reshape(numpy.shape(values)), values, error, NAMES[dtype])


def bound_call(function, input, *args, **kwargs):
    bound = inspect.signature(function).bind(input, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def check_call(name, input, *args, **kwargs):
    """One call, its running statistics and its gradients, beside float64."""
    function = getattr(nft, name)
    call = bound_call(getattr(stock, name), input, *args, **kwargs)
    call.pop("training" if name != "batch_norm" else "", None)
    problem = problem_of(name, **call)
    running = [call.get("running_mean"), call.get("running_var")]
    leaves = {key: call[key].detach().clone().requires_grad_() for key in ("input", "weight", "bias")
              if call.get(key) is not None}
    call.update(leaves, **{key: value.clone() for key, value in zip(("running_mean", "running_var"), running)
                           if value is not None})
    y = function(**call)
    assert y.dtype == input.dtype and y.shape == input.shape and y.stride() == input.stride()
    if not input.numel():
        y.sum().backward()
        assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves.values())
        return
    with numpy.errstate(all="ignore"):
        want = reference.forward(problem)
    if not numpy.isfinite(want["y"][1]).all():  # eps cancels the variance or turns it negative
        theirs = getattr(stock, name)(**{key: value.double() if isinstance(value, torch.Tensor) else value
                                         for key, value in call.items()})
        assert torch.equal(y.isnan(), theirs.isnan())
        return
    check("y", y, want["y"], input.dtype)
    for key in ("running_mean", "running_var"):
        if call.get(key) is not None and key in want:
            check(key, call[key], want[key], call[key].dtype)
    dy = tensor(*input.shape, dtype=input.dtype, seed=9)
    gradients = dict(zip(leaves, torch.autograd.grad(y, tuple(leaves.values()), dy)))
    mean = rstd = None
    if problem.has_statistics:
        if problem.kind == "group":
            _, _, mean, rstd = ops.group_norm(input, *[None] * 8, problem.groups, problem.eps, 0, 0.0, False)
        else:
            _, _, mean, rstd = ops.batch_norm(input, *[None] * 8, 0.1, problem.eps, 0, 0.0, False)
    wants = reference.backward(problem, big(dy), wide(mean), wide(rstd))
    for key, output in (("input", "dx"), ("weight", "dweight"), ("bias", "dbias")):
        if key in leaves:
            assert gradients[key].dtype == leaves[key].dtype
            check(output, gradients[key], wants[output], leaves[key].dtype)


def op_infos():
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError:  # needs packages that torch does not install
        return []
    return [op for op in op_db if op.name in ("nn.functional.group_norm", "nn.functional.batch_norm",
                                              "nn.functional.instance_norm")]


OP_INFOS = op_infos()
needs_op_infos = pytest.mark.skipif(not OP_INFOS, reason="torch.testing._internal cannot be imported")


@needs_op_infos
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("op", OP_INFOS, ids=lambda op: op.name.split(".")[-1] + op.variant_test_name)
def test_torchs_samples(op, dtype):
    name = op.name.split(".")[-1]
    count = 0
    for sample in op.sample_inputs(DEVICE, dtype):
        if sample.input.dim() > 1:
            check_call(name, sample.input, *sample.args, **sample.kwargs)
        else:
            got, want = (f(sample.input, *sample.args, **sample.kwargs) for f in (getattr(nft, name), op.op))
            assert torch.equal(got, want)
        count += 1
    assert count >= 8


@needs_op_infos
@pytest.mark.parametrize("op", OP_INFOS, ids=lambda op: op.name.split(".")[-1] + op.variant_test_name)
def test_torchs_error_inputs(op):
    for error in op.error_inputs(DEVICE) if op.error_inputs_func else ():
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            getattr(nft, op.name.split(".")[-1])(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("name, rank", [(name, rank) for name in ("group_norm", "batch_norm", "instance_norm")
                                        for rank in range(3 if name == "instance_norm" else 2, 7)])
def test_ranks(name, rank):
    shape = (3, 4, 5, 2, 3, 2)[:rank]
    weight, bias = tensor(4, dtype=torch.float32, seed=1), tensor(4, dtype=torch.float32, seed=2)
    x = tensor(*shape, dtype=torch.float32)
    if name == "group_norm":
        check_call(name, x, 2, weight, bias)
    else:
        running = tensor(4, dtype=torch.float32, seed=3), tensor(4, dtype=torch.float32, seed=4).abs()
        check_call(name, x, *running, weight, bias, True)
        check_call(name, x, *running, weight, bias, False)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_running_statistics_in_the_dtype_of_x(dtype):
    """A .half() model: everything 16 bits wide."""
    running = tensor(6, dtype=dtype, seed=3), tensor(6, dtype=dtype, seed=4).abs()
    weight, bias = tensor(6, dtype=dtype, seed=1), tensor(6, dtype=dtype, seed=2)
    for name, on in (("batch_norm", True), ("batch_norm", False), ("instance_norm", True), ("instance_norm", False)):
        check_call(name, tensor(4, 6, 3, 3, dtype=dtype), *running, weight, bias, on, 0.3)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=NAMES.get)
def test_parameters_in_f32_beside_16_bits(dtype):
    running = tensor(6, dtype=torch.float32, seed=3), tensor(6, dtype=torch.float32, seed=4).abs()
    weight, bias = tensor(6, dtype=torch.float32, seed=1), tensor(6, dtype=torch.float32, seed=2)
    check_call("group_norm", tensor(2, 6, 4, dtype=dtype), 3, weight, bias)
    check_call("batch_norm", tensor(2, 6, 4, dtype=dtype), *running, weight, bias, True)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "elu", "mish",
                                        "relu6", "prelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_everything_at_once(dtype, activation):
    """Activation, additions, the sum, scale and shift, channels-last; forward and every gradient."""
    shape = (2, 6, 4, 5)
    call = {"input": tensor(*shape, dtype=dtype, seed=1).to(memory_format=torch.channels_last),
            "weight": tensor(6, dtype=dtype, seed=2), "bias": tensor(6, dtype=dtype, seed=3),
            "scale": tensor(2, 6, dtype=dtype, seed=4), "shift": tensor(2, 6, dtype=dtype, seed=5),
            "pre_bias": tensor(2, 6, dtype=dtype, seed=10), "pre_add": tensor(*shape, dtype=dtype, seed=6),
            "post_add": tensor(*shape, dtype=dtype, seed=7),
            **({"slope": tensor(6, dtype=dtype, seed=11)} if activation == "prelu" else {})}
    problem = problem_of("group_norm", num_groups=3, activation=activation, **call)
    for value in call.values():
        value.requires_grad_()
    y, u = nft.group_norm(num_groups=3, activation=activation, return_sum=True, **call)
    assert y.is_contiguous(memory_format=torch.channels_last)
    want = reference.forward(problem)
    check("y", y, want["y"], dtype)
    check("u", u, want["u"], dtype)
    dy, du = tensor(*shape, dtype=dtype, seed=8), tensor(*shape, dtype=dtype, seed=9)
    _, _, mean, rstd = ops.group_norm(*[call[key].detach() for key in (
        "input", "weight", "bias", "scale", "shift", "pre_bias", "pre_add", "post_add")], None, 3, 1e-5, 0, 0.0,
        False)
    wants = reference.backward(problem, big(dy), wide(mean), wide(rstd), big(du))
    gradients = dict(zip(call, torch.autograd.grad((y, u), tuple(call.values()), (dy, du))))
    for key, output in (("input", "dx"), ("pre_add", "dx"), ("weight", "dweight"), ("bias", "dbias"),
                        ("scale", "dscale"), ("shift", "dshift"), ("post_add", "dpost_add"), ("slope", "dslope")):
        if key in call:
            check(f"{output} ({key})", gradients[key], wants[output], dtype)
    check("dpre_bias", gradients["pre_bias"], sum_of(gradients["input"], gradients["pre_bias"]), dtype)


def sum_of(dx, like):
    """dpre_bias: the sum of dx as it was written, added in dx's compute type, and its bound."""
    dx, unit = big(dx), 2.0**-53 if dx.dtype == torch.float64 else 2.0**-24
    axes = (0, 2) if like.dim() == 1 else 2
    values = dx.size // like.numel()
    return dx.sum(axes).reshape(like.shape), (values + 8) * unit * abs(dx).sum(axes).reshape(like.shape)


@pytest.mark.parametrize("parameter_dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("name", ["group_norm", "instance_norm", "running", "batch_norm", "evaluating"])
def test_pre_bias(name, dtype, parameter_dtype):
    """Of channels and of samples, beside pre_add and alone, with the sum and without: forward and gradients. A bias of
    samples may have further axes of one position."""
    shape, running = (3, 6, 4, 5), [tensor(6, dtype=torch.float32, seed=3),
                                    tensor(6, dtype=torch.float32, seed=4).abs()]
    for of_sample, adds, return_sum, last in itertools.product((False, True), repeat=4):
        x, dy = (tensor(*shape, dtype=dtype, seed=seed).to(memory_format=torch.channels_last if last else
                                                         torch.contiguous_format) for seed in (1, 2))
        # In x's compute type, to which parameters are rounded.
        pre_bias = tensor(*((3, 6) if of_sample else (6,)), dtype=torch.promote_types(dtype, torch.float32), seed=5).to(
            parameter_dtype)
        pre_add = tensor(*shape, dtype=dtype, seed=6) if adds else None
        call = {"group_norm": {"num_groups": 2}, "instance_norm": {"use_input_stats": True}}.get(
            name, {"running_mean": running[0], "running_var": running[1]})
        call.update({"training": True} if name == "batch_norm" else {"training": False} if name == "evaluating" else {})
        function = {"group_norm": nft.group_norm, "running": nft.instance_norm, "instance_norm": nft.instance_norm}.get(
            name, nft.batch_norm)
        problem = problem_of(function.__name__, x, pre_bias=pre_bias, pre_add=pre_add, activation="silu",
                             return_sum=return_sum, **call)
        call.update({key: call[key].clone() for key in ("running_mean", "running_var") if key in call})
        leaves = {"input": x, "pre_bias": pre_bias[..., None, None] if of_sample else pre_bias,
                  **({"pre_add": pre_add} if adds else {})}
        leaves = {key: value.clone().requires_grad_() for key, value in leaves.items()}
        with torch.no_grad():
            inferred = function(**leaves, **{k: v.clone() if k[0] == "r" else v for k, v in call.items()},
                                activation="silu", return_sum=return_sum)
        results = function(**leaves, **call, activation="silu", return_sum=return_sum)
        y, u = results if return_sum else (results, None)
        want = reference.forward(problem)
        check("y", y, want["y"], dtype)
        assert torch.equal(inferred[0] if return_sum else inferred,
                           y) and (not return_sum or torch.equal(inferred[1], u))
        if return_sum:
            check("u", u, want["u"], dtype)
        gradients = dict(zip(leaves, torch.autograd.grad(y, tuple(leaves.values()), dy)))
        mean = rstd = None
        if problem.has_statistics:
            added = (pre_bias, pre_add, None, None)
            _, _, mean, rstd = ops.group_norm(x, *[None] * 4, *added, problem.groups, problem.eps, 0, 0.0, return_sum) \
                if problem.kind == "group" else \
                ops.batch_norm(x, *[None] * 4, *added, 0.1, problem.eps, 0, 0.0, return_sum)
            mean, rstd = wide(mean), wide(rstd)
        wants = reference.backward(problem, big(dy), mean, rstd)
        for key in ("input", "pre_add"):
            if key in leaves:
                check("dx", gradients[key], wants["dx"], dtype)
        assert gradients["pre_bias"].dtype == parameter_dtype
        assert gradients["pre_bias"].shape == leaves["pre_bias"].shape
        got = gradients["pre_bias"].reshape(pre_bias.shape)
        check("dpre_bias", got, sum_of(gradients["input"], got), parameter_dtype)


PRELU_CALLS = {
    "group_norm": {"num_groups": 2}, "batch_norm": {"training": True}, "batch_norm evaluating": {"training": False},
    "instance_norm": {}, "instance_norm running": {}, "instance_norm evaluating": {"use_input_stats": False},
    "channel_affine": {},
}


@pytest.mark.parametrize("slope_dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("name", PRELU_CALLS)
def test_prelu(name, dtype, slope_dtype):
    """A slope for each channel and one, of any dtype, with parameters and without, beside an addition and not: results
    with gradients and without, and the gradients of input and slope, which has the shape and dtype of the slope."""
    shape, function = (3, 6, 4, 5), getattr(nft, name.split()[0])
    running = tensor(6, dtype=torch.float32, seed=3), tensor(6, dtype=torch.float32, seed=4).abs()
    for slopes, is_affine, adds, last in itertools.product((1, 6), *((False, True),) * 3):
        layout = torch.channels_last if last else torch.contiguous_format
        x, dy = (tensor(*shape, dtype=dtype, seed=seed).to(memory_format=layout) for seed in (1, 2))
        # In x's compute type, to which parameters are rounded.
        slope = tensor(slopes, dtype=torch.promote_types(dtype, torch.float32), seed=5).to(slope_dtype)
        call = dict(PRELU_CALLS[name])
        if is_affine:
            call.update({"scale" if name == "channel_affine" else "weight": tensor(6, dtype=torch.float32, seed=7),
                         "bias": tensor(6, dtype=torch.float32, seed=8)})
        elif name == "channel_affine":
            call.update(scale=None, bias=None)
        if name.startswith("batch_norm") or " " in name:
            call.update(running_mean=running[0], running_var=running[1])
        if adds:
            call["post_add"] = tensor(*shape, dtype=dtype, seed=6).to(memory_format=layout)
        if name == "channel_affine":
            problem = reference.Problem(
                "affine", NAMES[dtype], big(x), columns=last, weight=wide(call["scale"]), bias=wide(call["bias"]),
                post_add=big(call.get("post_add")), activation="prelu", slope=wide(slope), on_cuda=ON_CUDA)
        else:
            problem = problem_of(function.__name__, x, activation="prelu", slope=slope, **call)
        call = {key: value.clone() if key.startswith("running") else value for key, value in call.items()}
        with torch.no_grad():
            inferred = function(x, **{key: value.clone() if key.startswith("running") else value
                                      for key, value in call.items()}, activation="prelu", slope=slope)
        leaves = x.clone().requires_grad_(), slope.clone().requires_grad_()
        y = function(leaves[0], **call, activation="prelu", slope=leaves[1])
        assert torch.equal(inferred, y) and y.stride() == x.stride()
        check("y", y, reference.forward(problem)["y"], dtype)
        dx, dslope = torch.autograd.grad(y, leaves, dy)
        mean = rstd = None
        if problem.has_statistics and problem.kind == "group":
            _, _, mean, rstd = ops.group_norm(x, *[None] * 8, problem.groups, problem.eps, 0, 0.0, False)
        elif problem.has_statistics:
            _, _, mean, rstd = ops.batch_norm(x, *[None] * 8, 0.1, problem.eps, 0, 0.0, False)
        wants = reference.backward(problem, big(dy), wide(mean), wide(rstd))
        check("dx", dx, wants["dx"], dtype)
        assert (dslope.dtype, dslope.shape) == (slope_dtype, slope.shape)
        check("dslope", dslope, wants["dslope"], slope_dtype)


def test_a_slope_that_needs_no_gradient():
    x, slope = tensor(3, 6, 4).requires_grad_(), tensor(6, seed=1)
    for frozen in (slope, torch.nn.Parameter(slope, requires_grad=False)):
        nft.group_norm(x, 2, activation="prelu", slope=frozen).sum().backward()
        assert frozen.grad is None and x.grad is not None
    leaf = slope.clone().requires_grad_()
    nft.group_norm(x.detach(), 2, activation="prelu", slope=leaf).sum().backward()
    x = x.detach()
    want, = torch.autograd.grad(stock.prelu(stock.group_norm(x, 2), leaf).sum(), leaf)
    torch.testing.assert_close(leaf.grad, want, rtol=1e-12, atol=1e-12)


# ---- refusals -------------------------------------------------------------------------------------------------------


X = tensor(2, 6, 3)
ONE = tensor(6).abs()
REFUSED = [
    ("group_norm", (tensor(6), 2)),
    ("group_norm", (X, 4)),
    ("group_norm", (X, -2)),
    ("group_norm", (X, 2.0)),
    ("group_norm", (X, 2, ONE[:5])),
    ("group_norm", (X, 2, ONE, ONE[None])),
    ("group_norm", (tensor(1, 6), 6)),
    ("group_norm", (X.int(), 2)),
    ("batch_norm", (X, ONE[:5], ONE)),
    ("batch_norm", (X, ONE, ONE[:4])),
    ("batch_norm", (X, ONE, ONE, ONE[:3])),
    ("batch_norm", (X, ONE, ONE, ONE, ONE[:3])),
    ("batch_norm", (X, None, None)),
    ("batch_norm", (X, ONE, None)),
    ("batch_norm", (X, ONE, None, None, None, True)),
    ("batch_norm", (X[:1, :, 0], None, None, None, None, True)),
    ("batch_norm", (X, None, None, None, None, True, 0.1, 0.0)),
    ("batch_norm", (X, ONE, ONE, None, None, False, 0.1, -1e-5)),
    ("batch_norm", (tensor(5), ONE, ONE)),
    ("batch_norm", (X.int(), None, None, None, None, True)),
    ("instance_norm", (X[..., :1],)),
    ("instance_norm", (X[..., 0],)),
    ("instance_norm", (X, ONE, None)),
    ("instance_norm", (X, None, None, None, None, False)),
]


@pytest.mark.parametrize("name, args", REFUSED)
def test_refuses_what_torch_refuses(name, args):
    with pytest.raises(Exception) as theirs:
        getattr(stock, name)(*args)
    with pytest.raises(type(theirs.value)) as ours:
        getattr(nft, name)(*args)
    # The same words, but for the names of dtypes and kernels.
    if theirs.type is not NotImplementedError:
        # Nor is what was given compared: torch gives weight's shape where bias is wrong.
        first, second = (str(error.value).split(", but got")[0] for error in (ours, theirs))
        # PyTorch says since 2.12 when eps must be what.
        assert first == second or first.startswith("batch_norm eps") and second == "batch_norm eps must be positive"


def on(x, values):
    """The tensors of a tuple or dict on x's device."""
    if isinstance(values, dict):
        return {key: value.to(x.device) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    return tuple(value.to(x.device) for value in values)


@pytest.mark.parametrize("call, exception, words", [
    (lambda: nft.group_norm(X, 2, activation="swish"), ValueError, "activation must be None or one of"),
    (lambda: nft.group_norm(X, 2, return_sum=True), ValueError, "return_sum needs pre_add or pre_bias"),
    (lambda: nft.group_norm(X, 2, pre_bias=ONE[:5]), RuntimeError,
     r"Expected pre_bias to be of shape \[C\] or \[N, C\]"),
    (lambda: nft.batch_norm(X, ONE, ONE, pre_bias=X), RuntimeError, "Expected pre_bias to be of shape"),
    (lambda: nft.instance_norm(X, pre_bias=ONE.int()), NotImplementedError, "instance_norm"),
    (lambda: nft.group_norm(X, 2, pre_add=X[:1]), RuntimeError, "Expected pre_add to have the shape of input"),
    (lambda: nft.group_norm(X, 2, scale=ONE), RuntimeError, "Expected scale to be of shape"),
    (lambda: nft.batch_norm(X, ONE, ONE, post_add=X[..., :2]), RuntimeError, "Expected post_add to have the shape"),
    (lambda: nft.instance_norm(X, weight=ONE[:5]), RuntimeError, "weight should contain 6 elements not 5"),
    (lambda: nft.channel_affine(X, ONE[:5], ONE), RuntimeError, "Expected scale to be of shape"),
    (lambda: nft.channel_affine(X, ONE, tensor(2, 6)), RuntimeError, "both"),
    *((lambda call=call, arguments=arguments: call(**arguments), exception, words) for arguments, exception, words in (
        ({"activation": "prelu"}, ValueError, "^slope is None, but required$"),
        ({"slope": ONE}, ValueError, "^slope is for prelu alone and must be None$"),
        ({"activation": "leaky_relu", "slope": ONE}, ValueError, "slope is for prelu alone and must be None"),
        ({"activation": "prelu", "slope": ONE[:5]}, ValueError, "slope has 5 elements along C, input has 6"),
        ({"activation": "prelu", "slope": tensor(2, 6)}, ValueError, r"slope has 2 axes, expected \[C\]"),
        ({"activation": "prelu", "slope": ONE[0]}, ValueError, r"slope has 0 axes, expected \[C\]"),
        ({"activation": "prelu", "slope": ONE.int()}, NotImplementedError, "prelu"),
        ({"activation": "prelu", "slope": 0.25}, TypeError, "slope is a float, expected a tensor"),
        ({"activation": "prelu", "slope": ONE, "act_param": 0.1}, ValueError, "act_param is leaky_relu's slope"),
    ) for x in (X, X.to("meta")) for call in (
        lambda x=x, **act: nft.group_norm(x, 2, **on(x, act)),
        lambda x=x, **act: nft.batch_norm(x, *on(x, (ONE, ONE, ONE, ONE)), **on(x, act)),
        lambda x=x, **act: nft.batch_norm(x, *on(x, (ONE, ONE, ONE, ONE)), True, **on(x, act)),
        lambda x=x, **act: nft.instance_norm(x, **on(x, act)),
        lambda x=x, **act: nft.channel_affine(x, None, None, **on(x, act)))),
])
def test_refuses_what_torch_does_not_have(call, exception, words):
    with pytest.raises(exception, match=words):
        call()


def test_a_refusal_changes_no_running_statistics():
    running = ONE.clone(), ONE.clone()
    with pytest.raises(RuntimeError):
        nft.batch_norm(X, *running, ONE[:5], None, True)
    assert torch.equal(running[0], ONE) and torch.equal(running[1], ONE)


@pytest.mark.parametrize("name, args", [case for case in REFUSED if isinstance(case[1][0], torch.Tensor)])
def test_refuses_meta_tensors_alike(name, args):
    """Where there is no data the fake kernels refuse."""
    meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in args]
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        getattr(nft, name)(*meta)


# ---- layouts of gradients, sharing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["expanded", "channels-last", "transposed", "every second", "one row"])
def test_gradients_of_any_layout(layout):
    x = tensor(3, 4, 6, 6, dtype=torch.float32).requires_grad_()
    dy = {"expanded": torch.ones((), device=DEVICE).expand(3, 4, 6, 6),
          "channels-last": tensor(3, 4, 6, 6, dtype=torch.float32).to(memory_format=torch.channels_last),
          "transposed": tensor(3, 4, 6, 6, dtype=torch.float32).transpose(2, 3),
          "every second": tensor(3, 4, 6, 12, dtype=torch.float32)[..., ::2],
          "one row": tensor(3, 4, 1, 6, dtype=torch.float32).expand(3, 4, 6, 6)}[layout]
    for like in (x, x.detach().to(memory_format=torch.channels_last).requires_grad_()):
        added = torch.ones_like(like).requires_grad_()
        for post_add in (None, added):
            inputs = [like] if post_add is None else [like, added]
            got, want = (torch.autograd.grad(nft.group_norm(like, 2, activation="silu", post_add=post_add), inputs,
                                             given)
                         for given in (dy, dy.contiguous()))
            for one, other in zip(got, want):
                assert one.stride() == like.stride()
                # The same formula in the two pictures of memory: f32 sums of 72 values below 4 in another order.
                assert (one - other).abs().max() <= 128 * 2.0**-24 * 4


def test_saves_one_tensor_of_the_inputs_size():
    """norm + activation keeps x (or the sum) and statistics; torch keeps x and the norm's result."""
    x, pre_add = tensor(2, 8, 16, 16).requires_grad_(), tensor(2, 8, 16, 16, seed=1).requires_grad_()
    weight, bias = tensor(8).requires_grad_(), tensor(8).requires_grad_()
    for call in (lambda: nft.group_norm(x, 2, weight, bias, activation="silu"),
                 lambda: nft.group_norm(x, 2, weight, bias, activation="silu", pre_add=pre_add),
                 lambda: nft.group_norm(x, 2, weight, bias, activation="silu", pre_bias=weight),
                 lambda: nft.group_norm(x, 2, weight, bias, activation="prelu", slope=weight),
                 lambda: nft.batch_norm(x, None, None, weight, bias, True, pre_bias=bias, pre_add=pre_add),
                 lambda: nft.batch_norm(x, None, None, weight, bias, True, activation="relu"),
                 lambda: nft.batch_norm(x, weight.detach().abs(), weight.detach().abs(), weight, bias, False)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            call()
        assert sum(t.numel() >= x.numel() for t in saved) == 1
        assert sum(t.nbytes for t in saved) <= x.nbytes + 64 * x.itemsize


def test_x_is_saved_where_pre_bias_alone_is_added():
    """The forward writes no u; with the sum it does, and u is what is saved."""
    x, pre_bias = tensor(2, 8, 16, 16).requires_grad_(), tensor(8).requires_grad_()
    for return_sum in (False, True):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            results = nft.group_norm(x, 2, pre_bias=pre_bias, return_sum=return_sum)
        kept, = (t for t in saved if t.numel() >= x.numel())
        assert kept.data_ptr() == (results[1] if return_sum else x).data_ptr()


def test_an_input_changed_in_place_is_noticed():
    x = tensor(2, 4, 3).requires_grad_()
    u = x * 1
    y = nft.group_norm(u, 2)
    u.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


WITH_ADDEND = {
    "group_norm": lambda x, r, **act: nft.group_norm(x, 2, post_add=r, **act),
    "batch_norm": lambda x, r, **act: nft.batch_norm(x, None, None, training=True, post_add=r, **act),
    "batch_norm_of_all": lambda x, r, **act: nft.batch_norm(x, ONE[:4].clone(), ONE[:4].clone(), ONE[:4], ONE[:4], True,
                                                            post_add=r, **act),
    "batch_norm_evaluate": lambda x, r, **act: nft.batch_norm(x, ONE[:4], ONE[:4], post_add=r, **act),
    "instance_norm": lambda x, r, **act: nft.instance_norm(x, post_add=r, **act),
    "instance_norm_running": lambda x, r,
    **act: nft.instance_norm(x, ONE[:4].clone(), ONE[:4].clone(), post_add=r, **act),
    "channel_affine": lambda x, r, **act: nft.channel_affine(x, ONE[:4], ONE[:4], post_add=r, **act),
}


@pytest.mark.parametrize("act", [{"activation": "relu"}, {"activation": "relu6"}, {"activation": "leaky_relu"},
                                 {"activation": "leaky_relu", "act_param": 2.0}], ids=str)
@pytest.mark.parametrize("name", WITH_ADDEND)
def test_what_was_added_may_be_overwritten(name, act):
    """As with torch's relu, which saves its result: the addend is free, the result is not."""
    x, r = tensor(3, 4, 5, 2).requires_grad_(), (3 * tensor(3, 4, 5, 2, seed=1)).requires_grad_()
    z = WITH_ADDEND[name](x, r)
    want = {"relu": stock.relu, "relu6": stock.relu6, "leaky_relu": stock.leaky_relu}[act["activation"]](
        z, *([act["act_param"]] if "act_param" in act else []))
    dy = tensor(3, 4, 5, 2, seed=2)
    wants = torch.autograd.grad(want, (x, r), dy)
    for again in (False, True):
        added = r * 1
        y = WITH_ADDEND[name](x, added, **act)
        with torch.no_grad():
            added.zero_()
        gradients = torch.autograd.grad(y, (x, r), dy, create_graph=again)
        torch.testing.assert_close(gradients, wants, rtol=1e-12, atol=1e-12)
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, dy)


@pytest.mark.parametrize("return_sum", [False, True])
@pytest.mark.parametrize("activation", [None, "silu", "relu"])
@pytest.mark.parametrize("name", ["group", "batch", "evaluate"])
def test_second_derivatives_with_additions(name, activation, return_sum):
    """Beside torch's own formula, in eager calls of one output and of two: the derivative of a gradient goes through
    the sum that the backward is given."""
    shape = (4, 6, 5, 3)
    x, more, post_add, dy, du = (tensor(*shape, seed=seed) for seed in range(5))
    weight, bias, pre_bias = (tensor(6, seed=seed) for seed in range(5, 8))
    mean, var = tensor(6, seed=8), tensor(6, seed=9).square() + 0.5
    inputs = [t.requires_grad_() for t in (x, more, post_add, weight, bias, pre_bias)]
    norm = {"group": lambda f, u, *a, **k: f.group_norm(u, 2, *a, **k),
            "batch": lambda f, u, *a, **k: f.batch_norm(u, None, None, *a, True, **k),
            "evaluate": lambda f, u, *a, **k: f.batch_norm(u, mean, var, *a, False, **k)}[name]

    def ours(x, more, post_add, weight, bias, pre_bias):
        return norm(nft, x, weight, bias, pre_bias=pre_bias, pre_add=more, post_add=post_add, activation=activation,
                    return_sum=return_sum)

    def plain(x, more, post_add, weight, bias, pre_bias):
        u = x + pre_bias[:, None, None] + more
        y = norm(torch.nn.functional, u, weight, bias) + post_add
        y = y if activation is None else getattr(torch.nn.functional, activation)(y)
        return (y, u) if return_sum else y

    results = []
    for function in (ours, plain):
        outputs = function(*inputs)
        directions = (dy, du) if return_sum else dy
        first = torch.autograd.grad(outputs, inputs, directions, create_graph=True)
        total = sum((g * torch.linspace(-1, 1, g.numel(), dtype=g.dtype).view_as(g)).sum() for g in first)
        second = torch.autograd.grad(total, inputs, allow_unused=True)
        results.append([*first, *(torch.zeros_like(t) if g is None else g for t, g in zip(inputs, second))])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("act", [{"activation": "silu"}, {"activation": "leaky_relu", "act_param": -0.5},
                                 {"activation": "leaky_relu", "act_param": 0.0},
                                 {"activation": "prelu", "slope": ONE[:1]}], ids=str)
@pytest.mark.parametrize("name", WITH_ADDEND)
def test_what_was_added_is_saved_where_y_is_not_enough(name, act):
    x, r = tensor(3, 4, 5, 2).requires_grad_(), tensor(3, 4, 5, 2, seed=1)
    for added in (r, None):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = WITH_ADDEND[name](x, added, **act)
        assert sum(t is r for t in saved) == (added is not None) and not any(t is y for t in saved)
    y = WITH_ADDEND[name](x, r, **act)
    r.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    try:
        x = tensor(4, 8, 5, dtype=torch.float32).requires_grad_()
        results = [torch.autograd.grad(nft.batch_norm(x, None, None, training=True, activation="gelu").sum(), x)[0]
                   for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*results)


# ---- torch.compile, export, torch.func, autocast --------------------------------------------------------------------


def layers(x, weight, bias, running_mean, running_var, pre_add):
    """Every layer once; gradients flow through all of them."""
    y, u = nft.group_norm(x, 2, weight, bias, activation="silu", pre_bias=x.mean(2), pre_add=pre_add, return_sum=True)
    y, v = nft.batch_norm(y, running_mean, running_var, weight, bias, True, activation="relu", pre_bias=bias,
                          return_sum=True, post_add=u)
    y = nft.instance_norm(y, running_mean, running_var, weight, bias, activation="leaky_relu", act_param=0.2,
                          pre_bias=weight, pre_add=v)
    y = nft.batch_norm(y, running_mean, running_var, weight, bias, False, pre_bias=bias, activation="prelu", slope=bias)
    y = nft.group_norm(y, 2, activation="prelu", slope=weight[:1])
    return nft.channel_affine(y, weight, bias, activation="gelu")


def layers_inputs(n=2, positions=5, seed=0):
    big = [tensor(n, 4, positions, dtype=torch.float32, seed=seed + i).requires_grad_() for i in range(2)]
    small = [tensor(4, dtype=torch.float32, seed=10 + i).requires_grad_() for i in range(2)]
    running = [tensor(4, dtype=torch.float32, seed=20), tensor(4, dtype=torch.float32, seed=21).abs()]
    return big[0], *small, *running, big[1]


def run_layers(function, *sizes):
    inputs = layers_inputs(*sizes)
    y = function(*inputs)
    leaves = [t for t in inputs if t.requires_grad]
    return (y.detach(), *torch.autograd.grad(y, leaves, tensor(*y.shape, dtype=y.dtype, seed=7)), *inputs[3:5])


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compile(backend):
    """fullgraph, forward and backward, running statistics: the bits of eager execution, whose kernels these are."""
    torch._dynamo.reset()
    got = run_layers(torch.compile(layers, fullgraph=True, backend=backend))
    for a, b in zip(got, run_layers(layers)):
        # Inductor adds the gradients of shared parameters in an order of its own.
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_compile_dynamic_shapes():
    """One graph for all sizes, and right for each: of other sizes, one sample, one position."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    counted = torch.compile(layers, fullgraph=True, dynamic=True, backend=backend)
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ((2, 5), (3, 7), (6, 64), (5, 2)):
        for a, b in zip(run_layers(compiled, *sizes), run_layers(layers, *sizes)):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        counted(*layers_inputs(*sizes))
    assert len(graphs) == 1
    with pytest.raises(Exception, match="more than 1 spatial element"):
        compiled(*layers_inputs(2, 1))


def test_compile_channels_last():
    torch._dynamo.reset()
    function = lambda x: nft.group_norm(x, 2, activation="silu")  # noqa: E731
    x = tensor(2, 4, 5, 3, dtype=torch.float32).to(memory_format=torch.channels_last)
    got = torch.compile(function, fullgraph=True)(x)
    assert got.is_contiguous(memory_format=torch.channels_last) and torch.equal(got, function(x))


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(tensor(4, dtype=torch.float32))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        y = nft.group_norm(x, 2, self.weight, activation="silu", pre_bias=self.weight, pre_add=x)
        return nft.batch_norm(y, self.mean, self.var, self.weight, None, self.training, post_add=x, activation="relu")


@pytest.mark.parametrize("training", [False, True])
def test_export(training):
    module = Layers().to(DEVICE).train(training)
    x = tensor(3, 4, 5, dtype=torch.float32)
    program = torch.export.export(copy.deepcopy(module), (x,), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2)}})
    targets = {str(node.target) for node in program.graph.nodes}
    assert any("normfuse.group_norm" in t for t in targets) and any("normfuse.batch_norm" in t for t in targets)
    x = tensor(6, 4, 5, dtype=torch.float32, seed=1)
    torch.testing.assert_close(program.module()(x), module(x), rtol=0, atol=0)


def test_torch_func():
    x, weight = tensor(3, 2, 4, 5), tensor(4, seed=1)
    loss = lambda x, weight: nft.group_norm(x, 2, weight, activation="silu").square().sum()  # noqa: E731
    want = torch.stack([loss(x[i], weight) for i in range(3)])
    torch.testing.assert_close(torch.func.vmap(loss, (0, None))(x, weight), want)
    stock_loss = lambda x, weight: stock.silu(stock.group_norm(x, 2, weight)).square().sum()  # noqa: E731
    for transform in (lambda f: torch.func.grad(f, (0, 1)), lambda f: torch.func.hessian(f, 1)):
        torch.testing.assert_close(transform(loss)(x[0], weight), transform(stock_loss)(x[0], weight))
        torch.testing.assert_close(torch.func.vmap(transform(loss), (0, None))(x, weight),
                                   torch.func.vmap(transform(stock_loss), (0, None))(x, weight))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=NAMES.get)
def test_autocast(dtype):
    """A 16-bit input stays one, beside f32 parameters and an f32 addition; the flag gives torch's f32 result."""
    x, weight = tensor(2, 4, 5, dtype=dtype).requires_grad_(), tensor(4, dtype=torch.float32, seed=1).requires_grad_()
    post_add = tensor(2, 4, 5, dtype=torch.float32, seed=2)
    with torch.autocast(DEVICE, dtype):
        pre_bias = tensor(4, dtype=torch.float32, seed=3).requires_grad_()
        y = nft.group_norm(x, 2, weight, pre_bias=pre_bias, post_add=post_add, activation="prelu", slope=weight)
        assert y.dtype == dtype
        assert [g.dtype for g in torch.autograd.grad(y.sum(), (x, weight, pre_bias))] == [dtype, *[torch.float32] * 2]
        before = nft.autocast_to_float32(True)
        try:
            assert before is False
            assert nft.group_norm(x, 2, weight).dtype == torch.float32
            assert nft.group_norm(x, 2, weight, pre_bias=pre_bias).dtype == torch.float32
            assert nft.batch_norm(x, None, None, weight, training=True).dtype == torch.float32
        finally:
            assert nft.autocast_to_float32(before) is True
    assert nft.group_norm(x, 2, weight).dtype == dtype


def test_under_a_fake_tensor_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        x, weight = (torch.empty(*shape, device=DEVICE, requires_grad=True) for shape in ((2, 4, 5), (4,)))
        y = nft.group_norm(x, 2, weight, activation="silu")
        y.sum().backward()
        assert y.shape == x.shape and weight.grad.shape == (4,)
        slope = torch.empty(1, device=DEVICE, requires_grad=True)
        nft.channel_affine(x, weight, None, activation="prelu", slope=slope).sum().backward()
        assert slope.grad.shape == (1,)
        with pytest.raises(RuntimeError, match="Expected weight to be a vector"):
            nft.group_norm(x, 2, torch.empty(3, device=DEVICE))


def test_torch_function_is_asked():
    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            called.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    called = []
    x = tensor(2, 4, 5).as_subclass(Logged)
    y = nft.group_norm(x, 2, activation="silu")
    assert called[0] is nft.group_norm and isinstance(y, Logged)
    for function in (lambda b: nft.group_norm(X, 2, pre_bias=b), lambda b: nft.batch_norm(X, ONE, ONE, pre_bias=b),
                     lambda b: nft.instance_norm(X, pre_bias=b),
                     *(lambda b, f=f: f(activation="prelu", slope=b) for f in (
                         functools.partial(nft.group_norm, X, 2), functools.partial(nft.batch_norm, X, ONE, ONE),
                         functools.partial(nft.instance_norm, X),
                         functools.partial(nft.channel_affine, X, None, None)))):
        assert isinstance(function(ONE.as_subclass(Logged)), Logged)
    want = nft.group_norm(x.as_subclass(torch.Tensor), 2, activation="silu")
    torch.testing.assert_close(y.as_subclass(torch.Tensor), want, rtol=0, atol=0)


def test_no_warnings():
    x = tensor(2, 4, 5).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nft.group_norm(x, 2, activation="silu").sum().backward(create_graph=False)
        with torch.no_grad():
            nft.group_norm(x, 2)


@pytest.mark.parametrize("name", ["group_norm", "batch_norm", "batch_norm_evaluate", "instance_norm", "channel_affine",
                                  "prelu", "one slope"])
def test_forward_mode(name):
    """Directional derivatives are the backward's, by <J v, w> = <v, J' w>; and so where the backward is
    differentiated."""
    x, v, w = tensor(3, 4, 5), tensor(3, 4, 5, seed=1), tensor(3, 4, 5, seed=2)
    weight, running = tensor(4, seed=3), (tensor(4, seed=4), tensor(4, seed=5).abs())
    function = {
        "group_norm": lambda x: nft.group_norm(x, 2, weight, activation="silu", pre_bias=x.sum(2), pre_add=x * x,
                                               post_add=x),
        "batch_norm": lambda x: nft.batch_norm(x, None, None, weight, training=True, activation="gelu",
                                               pre_bias=x.square().sum(2)),
        "batch_norm_evaluate": lambda x: nft.batch_norm(x, *running, weight, activation="mish", pre_bias=x.sum((0, 2))),
        "instance_norm": lambda x: nft.instance_norm(x, running[0].clone(), running[1].clone(), weight,
                                                     pre_bias=x.square().sum(2)),
        "channel_affine": lambda x: nft.channel_affine(x, weight, weight, activation="elu"),
        "prelu": lambda x: nft.group_norm(x, 2, weight, activation="prelu", slope=x.square().mean((0, 2)), post_add=x),
        "one slope": lambda x: nft.channel_affine(x, weight, weight, activation="prelu", slope=x.sum().reshape(1)),
    }[name]
    y, tangent = torch.func.jvp(function, (x,), (v,))
    torch.testing.assert_close(y, function(x))
    _, pullback = torch.func.vjp(function, x)
    torch.testing.assert_close((tangent * w).sum(), (v * pullback(w)[0]).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = function(torch.autograd.forward_ad.make_dual(x, v))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)


# ---- activations where numbers end ----------------------------------------------------------------------------------

STOCK_ACTIVATIONS = {
    "relu": stock.relu, "relu6": stock.relu6, "leaky_relu": stock.leaky_relu, "silu": stock.silu, "gelu": stock.gelu,
    "gelu_tanh": functools.partial(stock.gelu, approximate="tanh"), "hardswish": stock.hardswish, "elu": stock.elu,
    "mish": stock.mish, "prelu": lambda x: stock.prelu(x, torch.full((1,), 0.25, dtype=x.dtype, device=x.device))}
PRODUCTS = ("silu", "gelu", "gelu_tanh", "mish")  # with z, which is infinite


def values_and_gradients(function, value, dtype):
    """All y, and all gradients where dy is 2: torch's depend on where in a vector an element lies."""
    found = set(), set()
    for shape in ((1, 1, 1), (1, 1, 3), (1, 2, 16), (2, 3, 67), (2, 5, 4, 4), (7, 35)):
        x = torch.full(shape, value, dtype=dtype, device=DEVICE, requires_grad=True)
        y = function(x)
        y.backward(torch.full_like(y, 2))
        for of, result in zip(found, (y, x.grad)):
            of.update(result.detach().double().cpu().flatten().tolist())
    return found


def is_among(value, others, dtype):
    rtol = 16 * torch.finfo(dtype).eps
    return any((value != value and other != other) or value == other or abs(value - other) <= rtol * abs(other)
               for other in others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STOCK_ACTIVATIONS)
def test_activations_at_special_values(name, dtype):
    """Beside torch's, whose derivatives at NaN are not the same everywhere; docs/numerics.md says where ours differ."""
    words = {"slope": torch.full((1,), 0.25, dtype=dtype, device=DEVICE)} if name == "prelu" else {}

    def ours(x):
        return nft.channel_affine(x, None, None, activation=name, **words)

    for value in (float("nan"), float("inf"), -float("inf"), 0.0, -0.0):
        ys, gradients = values_and_gradients(ours, value, dtype)
        stock_ys, stock_gradients = values_and_gradients(STOCK_ACTIVATIONS[name], value, dtype)
        if abs(value) == float("inf") and name in PRODUCTS:
            stock_ys |= {0.0} if value < 0 else set()
            stock_gradients |= {0.0 if value < 0 else 2.0, float("inf"), -float("inf")}
        if value != value and name in ("leaky_relu", "prelu"):
            assert gradients == {2.0} and all(is_among(found, {2 * 0.01, 2 * 0.25}, dtype) for found in stock_gradients)
            stock_gradients = {2.0}
        assert all(is_among(found, stock_ys, dtype) for found in ys), (value, ys, stock_ys)
        assert all(is_among(found, stock_gradients, dtype) for found in gradients), (value, gradients, stock_gradients)
        if value != value:  # the same wherever an element lies
            passes = name in ("relu", "relu6", "leaky_relu", "prelu", "hardswish")
            assert gradients == {2.0} if passes else all(found != found for found in gradients)

# SPDX-License-Identifier: MIT
"""install and uninstall. Every test leaves aten as it was; that PyTorch warns of the override is its own test."""
import copy
import itertools
import os
import subprocess
import sys
import threading

import numpy
import pytest
import reference

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from device import DEVICE, ON_CUDA, default_device, of_the_cpu  # noqa: E402, F401
from normfuse.torch._operators import binding  # noqa: E402
from torch import nn  # noqa: E402

kernels = sys.modules["normfuse.torch.install"]
pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def is_installed():
    """Stock saves statistics of 16-bit tensors in 16 bits."""
    x = torch.ones(1, 2, 3).bfloat16()
    return torch.native_group_norm(x, None, None, 1, 2, 3, 1, 1e-5)[1].dtype == torch.float32


@pytest.fixture(autouse=True, params=["C", "Python"])
def language(request, monkeypatch):
    """Which kernels are installed: each test runs with both."""
    if request.param == "C" and binding()[0] != "shim":
        pytest.skip("this torch has no stable C interface")
    made_of = {"C": kernels._CKernels, "Python": kernels._PythonKernels}[request.param]
    monkeypatch.setattr(kernels, "_kernels", made_of())
    torch.manual_seed(0)
    yield request.param
    assert kernels._depth == 0 and not is_installed(), "a test left aten overridden"


@pytest.fixture(scope="module", autouse=True)
def profiler_that_began():
    """The first profiles of a process may show nothing of the device, or not the kernels of a module loaded
    meanwhile."""
    for _ in range(10 * ON_CUDA):
        x = torch.ones(1, 2, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
        with nft.install():
            if all(is_normfuse for _, is_normfuse in ran(lambda: F.group_norm(x, 1).sum().backward())):  # noqa: B023
                break


def ran(call):
    """The stock norms that `call` ran, in order, and whether they went to normfuse: by the names of the kernels on
    CUDA.
    On the CPU stock's own kernels make tensors by operators of torch, normfuse's from C by none, and from Python by
    operators of normfuse. cudnn's go by the names of the native ones."""
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * ON_CUDA
    with torch.profiler.profile(activities=activities) as profile:
        if ON_CUDA:  # a profiler that starts may miss what comes first
            torch.ones(1).add_(1)
            torch.cuda.synchronize()
        call()
        if ON_CUDA:
            torch.cuda.synchronize()
    found = []
    for event in profile.events():
        name = event.name.removeprefix("aten::")
        if name in kernels._KERNELS:
            name = name.replace("cudnn_", "native_")
            below = [child.name for child in event.cpu_children]
            launched = launched_by(event)
            found.append((name, any(n.startswith("normfuse::") for n in below)
                          or (all(n.startswith("normfuse_") for n in launched) if launched
                              else not any(n.startswith("aten::empty") for n in below))))
    return found


def launched_by(event):
    """Names of the kernels that the operator and those it called launched on the device."""
    return [kernel.name for kernel in event.kernels] + [
        name for child in event.cpu_children for name in launched_by(child)]


def array(t):
    return t.detach().double().cpu().numpy().copy()


def flat(t):
    return array(t).reshape(t.shape[0], t.shape[1], -1)


def parameters(dtype, *sizes):
    return [torch.randn(sizes, dtype=torch.float64).to(dtype) for _ in range(2)]


LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["group", "batch", "evaluate", "instance"])
def test_numbers(dtype, mixed, layout, kind):
    """y, dx, dweight, dbias within the bounds of docs/numerics.md, through stock's own autograd."""
    if kind == "instance" and layout == "channels_last" and dtype != torch.float32:
        return
    parameter_type = torch.float32 if mixed and dtype.itemsize == 2 else dtype
    weight, bias = (p.requires_grad_() for p in parameters(parameter_type, 4))
    running = [torch.full((4,), v, dtype=parameter_type) for v in (0.5, 2.0)]
    x = (torch.randn(3, 4, 5, 6) + 1).to(dtype).to(memory_format=LAYOUTS[layout]).requires_grad_()
    dy = torch.randn(3, 4, 5, 6).to(dtype)
    evaluate = kind == "evaluate"
    copied = kind == "group" and ON_CUDA  # torch makes it contiguous before its own kernel, too
    problem = reference.Problem(
        "group" if kind in ("group", "instance") else "batch", NAMES[dtype], flat(x),
        groups=2 if kind == "group" else 4, columns=layout == "channels_last" and not copied, evaluate=evaluate,
        weight=array(weight), bias=array(bias),
        running_mean=None if kind == "group" else array(running[0]),
        running_var=None if kind == "group" else array(running[1]), on_cuda=ON_CUDA)
    results = []

    def call():
        if kind == "group":
            y = F.group_norm(x, 2, weight, bias)
        elif kind == "instance":
            y = F.instance_norm(x, *running, weight, bias)
        else:
            y = F.batch_norm(x, *running, weight, bias, not evaluate)
        y.backward(dy)
        results.append(y)

    with nft.install():
        calls = ran(call)
    y = results[0]
    name = "native_group_norm" if kind == "group" else "native_batch_norm"
    assert calls == [(name, True), (name + "_backward", True)]
    want = reference.forward(problem)
    reference.compare("y", flat(y), *want["y"], NAMES[dtype])
    assert y.dtype == dtype
    if kind != "instance":  # which makes a tensor of its own
        assert y.stride() == (x.contiguous() if copied else x).stride()
    statistics = (None, None)
    if not evaluate:
        # In f32, like stock's own, and the gradients are those of what was saved.
        mean, rstd = want["mean"][0], want["rstd"][0]
        rounding = 2.0**-24 if dtype != torch.float64 else 2.0**-53
        statistics = (mean, rstd)
    gradients = reference.backward(problem, flat(dy), *statistics)
    slack = {"dx": 0.0, "dweight": 0.0, "dbias": 0.0}
    if not evaluate:
        # The reference has the exact statistics; the call's are off by their bound and by their rounding to f32.
        errors = [problem.spread(e + rounding * abs(v) if numpy.ndim(e) else e) for v, e in
                  ((mean, want["mean"][1]), (rstd, want["rstd"][1]))]
        relative = errors[1] / problem.spread(rstd)
        size = abs(flat(dy)).max() * abs(array(weight)).max()
        normalized = abs((problem.u - problem.spread(mean)[..., None]) * problem.spread(rstd)[..., None]).max()
        drift = (errors[0] * problem.spread(rstd) + relative * normalized).max()
        slack["dx"] = 4 * size * problem.spread(rstd).max() * (1 + normalized)**2 * drift
        slack["dweight"] = abs(flat(dy)).sum(axis=(0, 2)) * drift * 2
    if kind == "instance":
        # Stock's instance norm repeats weight and bias for each sample: gradients of each are rounded, then added up.
        normalized = (problem.u - problem.spread(mean)[..., None]) * problem.spread(rstd)[..., None]
        unit = reference.UNIT[NAMES[parameter_type]]
        for name, each in (("dweight", flat(dy) * normalized), ("dbias", flat(dy))):
            slack[name] = slack[name] + 2 * len(x) * unit * abs(each.sum(axis=2)).sum(axis=0)
    for name, got in (("dx", flat(x.grad)), ("dweight", array(weight.grad)), ("dbias", array(bias.grad))):
        value, error = gradients[name]
        reference.compare(name, got, value, error + slack[name], NAMES[dtype if name == "dx" else parameter_type])
    if kind in ("batch", "instance"):
        for name, got in (("running_mean", running[0]), ("running_var", running[1])):
            reference.compare(name, array(got), *want[name], NAMES[parameter_type])


def test_layouts_are_stocks():
    """And the kernel below keeps channels-last, on every device."""
    x = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    want = F.group_norm(x, 2).stride()
    with nft.install():
        assert F.group_norm(x, 2).stride() == want
        assert torch.native_group_norm(x, None, None, 3, 4, 30, 2, 1e-5)[0].stride() == x.stride()
        assert F.batch_norm(x, None, None, training=True).stride() == x.stride()


WITHOUT_OTHERS = [lambda x: F.group_norm(x, 2), lambda x: F.batch_norm(x, None, None, training=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", WITHOUT_OTHERS)
def test_no_other_operator_runs(layout, call, language):
    """Nothing is copied or converted, in either layout."""
    if language == "Python":
        pytest.skip("its kernels convert the means")
    if ON_CUDA and layout == "channels_last" and call is WITHOUT_OTHERS[0]:
        pytest.skip("torch makes the tensors of group norm contiguous there")
    x = torch.randn(3, 4, 5, 6).to(memory_format=LAYOUTS[layout]).requires_grad_()
    dy = torch.randn(3, 4, 5, 6).to(memory_format=LAYOUTS[layout])
    with nft.install(), torch.autograd.profiler.profile() as profile:
        call(x).backward(dy)
    names = {event.name for event in profile.function_events}
    assert not {n for n in names if n.startswith(("aten::copy", "aten::clone", "aten::contiguous", "aten::to"))}, names


@pytest.mark.parametrize("call", [
    lambda x, w, b: F.group_norm(x, 2, w, b), lambda x, w, b: F.group_norm(x, 2),
    lambda x, w, b: F.batch_norm(x, None, None, w, b, True), lambda x, w, b: F.batch_norm(x, None, None, w, None, True),
    lambda x, w, b: F.batch_norm(x, torch.arange(4).double(), torch.arange(1, 5).double(), w, b),
    lambda x, w, b: F.instance_norm(x, None, None, w, b)])
def test_gradients_of_two_orders(call):
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 4, 3), 4, 4))
    with nft.install():
        assert torch.autograd.gradcheck(call, (x, w, b))
        assert torch.autograd.gradgradcheck(call, (x, w, b))


UNUSUAL = {
    "eps 0": lambda x: F.instance_norm(x, eps=0.0),
    "eps below 0": lambda x: F.instance_norm(x, eps=-1e-9),
    "eps 0, running": lambda x: F.instance_norm(x, torch.zeros(4).double(), torch.ones(4).double(), eps=0.0),
    "one value": lambda x: torch.batch_norm(x[:1, :, :1], None, None, None, None, True, 0.1, 1e-5, False),
    "eps 0, many samples": lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 0.0, False),
    "eps 0, channels last": lambda x: torch.batch_norm(
        x.unsqueeze(3).contiguous(memory_format=torch.channels_last), None, None, None, None, True, 0.1, 0.0, False),
    "many axes": lambda x: F.group_norm(x.reshape(3, 4, 1, 5, 1, 1, 1), 2),
    "other shape": lambda x: torch.native_group_norm(x.reshape(-1), None, None, 3, 4, 5, 2, 1e-5)[0],
    "no samples": lambda x: F.group_norm(x[:0], 2),
    "expanded gradient": lambda x: F.group_norm(x, 2).sum(),
    "transposed": lambda x: F.group_norm(x.transpose(1, 2).contiguous().transpose(1, 2), 2),
    "unwanted": lambda x: F.group_norm(x.detach(), 2, torch.ones(4).double().requires_grad_()) + x * 0,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_calls_are_stocks(name):
    results = []
    for installed in (False, True):
        torch.manual_seed(0)
        x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
        if installed:
            with nft.install():
                y = UNUSUAL[name](x)
                y.sum().backward() if y.dim() == 0 else y.backward(torch.ones_like(y).cumsum(0))
        else:
            y = UNUSUAL[name](x)
            y.sum().backward() if y.dim() == 0 else y.backward(torch.ones_like(y).cumsum(0))
        results.append((y, x.grad))
    for a, b in zip(*results):
        # Sums of 5 to 15 values of a size near 1, both in double.
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


ONE_VALUE = [pytest.param((1, 4, 1), eps, marks=of_the_cpu) for eps in (1e-5, -1e-9)]


@pytest.mark.parametrize("shape, eps", [((2, 4, 5), 0.0), *ONE_VALUE])
def test_running_statistics_of_unusual_calls(shape, eps):
    x, results = torch.randn(shape, dtype=torch.float64), []
    for installed in (False, True):
        running = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        if installed:
            with nft.install():
                torch.batch_norm(x, None, None, *running, True, 0.3, eps, False)
        else:
            torch.batch_norm(x, None, None, *running, True, 0.3, eps, False)
        results.append(running)
    for a, b in zip(*results):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-15, equal_nan=True)


def test_empty_statistics_are_none():
    x, empty = torch.randn(2, 4, 5), torch.empty(0)
    with nft.install():
        got = torch.native_batch_norm(x, None, None, empty, empty, True, 0.1, 1e-5)
        want = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    assert all(map(torch.equal, got, want))


def statistics(*sizes, of=torch.float64):
    return torch.rand(sizes, dtype=torch.float64).to(of) + 0.5


ATEN = torch.ops.aten
# Each: a function of x, its gradient, and the running statistics, whose results are compared.
FAMILY = {
    "native_group_norm": lambda x, dy, w, m, v: ATEN.native_group_norm(x, w, w, 3, 4, 30, 2, 1e-5),
    "native_group_norm_backward": lambda x, dy, w, m, v: ATEN.native_group_norm_backward(
        dy, x, m[:2].expand(3, 2).contiguous(), v[:2].expand(3, 2).contiguous(), w, 3, 4, 30, 2, [True] * 3),
    "native_batch_norm": lambda x, dy, w, m, v: (*ATEN.native_batch_norm(x, w, w, m, v, True, 0.1, 1e-5), m, v),
    "native_batch_norm, evaluation": lambda x, dy, w, m, v: ATEN.native_batch_norm(x, w, None, m, v, False, 0.1, 1e-5),
    "native_batch_norm_backward": lambda x, dy, w, m, v: ATEN.native_batch_norm_backward(
        dy, x, w, m, v, m + 0.25, v + 0.5, True, 1e-5, [True] * 3),
    "native_batch_norm_backward, evaluation": lambda x, dy, w, m, v: ATEN.native_batch_norm_backward(
        dy, x, w, m, v, m[:0], v[:0], False, 1e-5, [True] * 3),
    "_native_batch_norm_legit": lambda x, dy, w, m, v: (
        *ATEN._native_batch_norm_legit(x, w, w, m, v, True, 0.1, 1e-5), m, v),
    "_native_batch_norm_legit, evaluation": lambda x, dy, w, m, v: ATEN._native_batch_norm_legit(
        x, w, w, m, v, False, 0.1, 1e-5),
    "_native_batch_norm_legit.no_stats": lambda x, dy, w, m, v: ATEN._native_batch_norm_legit.no_stats(
        x, w, w, True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": lambda x, dy, w, m, v: ATEN._native_batch_norm_legit_no_training(
        x, w, w, m, v, 0.1, 1e-5),
    "_batch_norm_with_update": lambda x, dy, w, m, v: (
        *ATEN._batch_norm_with_update(x, w, w, m, v, 0.1, 1e-5)[:3], m, v),
    "_batch_norm_no_update": lambda x, dy, w, m, v: ATEN._batch_norm_no_update(x, w, w, m, v, 0.1, 1e-5)[:3],
    "batch_norm_backward": lambda x, dy, w, m, v: ATEN.batch_norm_backward(
        dy, x, w, m, v, m + 0.25, v + 0.5, True, 1e-5, [True] * 3, torch.empty(0, dtype=torch.uint8)),
    "batch_norm_backward, evaluation": lambda x, dy, w, m, v: ATEN.batch_norm_backward(
        dy, x, w, m, v, m, v, False, 1e-5, [True] * 3, torch.empty(0, dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operator_has_stocks_contract(name, layout):
    """Values, shapes, dtypes and strides of all that they give back and update."""
    # On CUDA stock's group norm makes tensors contiguous above the operator, and its kernels take no others: there the
    # tensors of x's shape are to have x's strides.
    layouts, results = ["contiguous" if ON_CUDA else layout, layout], []
    for installed in (False, True):
        torch.manual_seed(0)
        x, dy = (torch.randn(3, 4, 5, 6, dtype=torch.float64).to(memory_format=LAYOUTS[layouts[installed]])
                 for _ in range(2))
        arguments = x, dy, statistics(4), statistics(4), statistics(4)
        with torch.backends.cudnn.flags(enabled=False):  # whose reserve stock's batch_norm_backward would ask for
            if installed:
                with nft.install():
                    calls = ran(lambda: results.append(FAMILY[name](*arguments)))
                assert calls and all(ours for _, ours in calls)
            else:
                try:
                    results.append(FAMILY[name](*arguments))
                except RuntimeError as error:
                    if not ON_CUDA:
                        raise
                    pytest.skip(f"stock's own kernel refuses it on CUDA: {error}")
    for stock, ours in zip(*results):
        if ON_CUDA and stock.numel() and not ours.numel():
            continue  # in evaluation stock makes statistics there that it does not fill
        # Sums of 90 values of a size near 2, both in double.
        assert torch.allclose(stock, ours, rtol=1e-12, atol=1e-12)
        assert stock.dtype == ours.dtype
        assert ours.stride() == (x if ours.shape == x.shape else stock).stride()


@pytest.mark.parametrize("mask", [list(mask) for mask in itertools.product((False, True), repeat=3)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_only_what_is_asked_for_is_computed(mask, weighted):
    x, dy, w = torch.randn(3, 4, 5), torch.randn(3, 4, 5), statistics(4, of=torch.float32) if weighted else None
    with nft.install():
        _, mean, rstd = ATEN.native_group_norm(x, w, None, 3, 4, 5, 2, 1e-5)
        group = ATEN.native_group_norm_backward(dy, x, mean, rstd, w, 3, 4, 5, 2, mask)
        _, mean, rstd = ATEN.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-5)
        batch = ATEN.native_batch_norm_backward(dy, x, w, None, None, mean, rstd, True, 1e-5, mask)
    for gradients in (group, batch):
        shapes = [None if g is None else tuple(g.shape) for g in gradients]
        assert shapes == [(3, 4, 5) if mask[0] else None, (4,) if mask[1] and weighted else None,
                          (4,) if mask[2] else None]
        if mask[2]:
            # Sums of 15 values of a size near 3.
            assert torch.allclose(gradients[2], dy.sum((0, 2)), atol=1e-5)


@pytest.mark.parametrize("call", [lambda x, b: F.group_norm(x, 2, None, b),
                                  lambda x, b: F.batch_norm(x, None, None, None, b, True)])
def test_bias_without_weight(call):
    """Stock's group norm has no backward of it."""
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with nft.install():
        assert torch.autograd.gradcheck(call, (x, b))


@pytest.mark.parametrize("call", [lambda: F.group_norm(torch.randn(2, 5, 3), 2),
                                  lambda: F.group_norm(torch.randn(2, 4, 3), 2, torch.randn(3)),
                                  lambda: F.batch_norm(torch.randn(2, 4, 3), None, None),
                                  lambda: F.batch_norm(torch.randn(2, 4, 3), torch.zeros(3), torch.ones(3)),
                                  lambda: F.batch_norm(torch.randn(1, 4), None, None, training=True)])
def test_messages_are_stocks(call):
    with pytest.raises((RuntimeError, ValueError)) as stock:
        call()
    with nft.install(), pytest.raises(stock.type) as ours:
        call()
    assert str(ours.value) == str(stock.value)


def test_models_run_unchanged():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4))
    stock = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8)
    results = []

    def call():
        results.append(model.double()(x.double()))
        results[0].square().sum().backward()

    with nft.install():
        calls = ran(call)
    y = results[0]
    batch, group = "native_batch_norm", "native_group_norm"
    assert [name for name, _ in calls] == [batch, group, batch, *(n + "_backward" for n in (batch, group, batch))]
    assert all(ours for _, ours in calls)
    z = stock.double()(x.double())
    z.square().sum().backward()
    assert torch.allclose(y, z, atol=1e-12)
    for a, b in zip([*model.parameters()], [*stock.parameters()]):
        assert torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-9)
    assert torch.allclose(model[1].running_var, stock[1].running_var, rtol=1e-13)


def test_forward_installed_backward_not():
    """What was saved has stock's types: a backward after uninstall is stock's own."""
    x = torch.randn(2, 4, 5, requires_grad=True)
    with nft.install():
        y = F.group_norm(x, 2) + F.batch_norm(x, None, None, training=True)
    y.square().sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_not_installed_backward_installed(dtype):
    """Also where stock saved statistics of 16 bits."""
    x, dy = (torch.randn(2, 4, 50).to(dtype) for _ in range(2))
    gradients = []
    for installed in (False, True):
        leaf = x.clone().requires_grad_()
        y = F.group_norm(leaf, 2) + F.batch_norm(leaf, None, None, training=True)
        if installed:
            with nft.install():
                y.backward(dy)
        else:
            y.backward(dy)
        gradients.append(leaf.grad.double())
    # Both from the same statistics; each of the two gradients that are added is rounded to dtype.
    assert torch.allclose(*gradients, rtol=8 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)


def test_nesting():
    x = torch.randn(2, 4, 5)
    nft.uninstall()
    nft.install()
    with nft.install():
        assert is_installed()
    assert is_installed()
    nft.install()
    nft.uninstall()
    before = F.group_norm(x, 2)
    assert not is_installed()
    with pytest.raises(ZeroDivisionError), nft.install():
        1 / 0
    assert torch.equal(F.group_norm(x, 2), before) and not is_installed()


def test_stock_is_back_to_the_bit():
    x = torch.randn(2, 4, 50)
    stock = F.group_norm(x, 2), F.batch_norm(x, None, None, training=True)
    with nft.install():
        pass
    assert all(map(torch.equal, stock, (F.group_norm(x, 2), F.batch_norm(x, None, None, training=True))))


def test_other_threads():
    results = []
    with nft.install():
        threads = [threading.Thread(target=lambda: results.append(is_installed())) for _ in range(4)]
        [t.start() for t in threads], [t.join() for t in threads]
    assert results == [True] * 4


def test_autocast():
    """Casts come before, and stay stock's (CUDA's are to f32; the CPU has none for these)."""
    x = torch.randn(2, 4, 5, dtype=torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16):
        want = F.group_norm(x, 2).dtype
        with nft.install():
            assert F.group_norm(x, 2).dtype == want
            assert ran(lambda: F.group_norm(x, 2)) == [("native_group_norm", True)]


def test_cudnn_operators_have_the_same_contract():
    """The Python kernels of cudnn's batch norm are called directly, since the CPU has none of them."""
    x, (w, b), dy = torch.randn(3, 4, 5), parameters(torch.float32, 4), torch.randn(3, 4, 5)
    running = torch.zeros(4), torch.ones(4)
    y, mean, rstd, reserve = kernels._cudnn_batch_norm(x, w, b, *running, True, 0.1, 1e-5)
    assert reserve.dtype == torch.uint8 and mean.dtype == rstd.dtype == torch.float32 and mean.shape == (4,)
    gradients = kernels._cudnn_batch_norm_backward(x, dy, w, *running, mean, rstd, 1e-5, reserve)
    want = torch.native_batch_norm(x, w, b, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5)
    expected = torch.ops.aten.native_batch_norm_backward(dy, x, w, *running, *want[1:], True, 1e-5, [True] * 3)
    # f32 both: sums of 15 values of a size near 2, some 20 roundings of 2^-24.
    for got, exact in zip((y, *gradients), (want[0], *expected)):
        assert torch.allclose(got, exact, atol=2e-5)
    empty = torch.empty(0)
    assert torch.equal(kernels._cudnn_batch_norm(x, w, b, empty, empty, True, 0.1, 1e-5)[0], y)


def test_what_torch_prints():
    code = ("import normfuse.torch as nft\nimport warnings\n"
            "with warnings.catch_warnings(record=True) as w:\n    warnings.simplefilter('always')\n"
            "    with nft.install(): pass\n    with nft.install(): pass\n"
            "print(len(w), nft.install())")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    assert out.stdout == ("0 <normfuse takes torch's group, batch and instance norms until normfuse.torch.uninstall()>\n")
    assert out.stderr == ""


def test_compiled_code_gives_the_same():
    f, x = torch.compile(lambda x: F.group_norm(x, 2).relu(), backend="aot_eager", fullgraph=True), torch.randn(2, 4, 5)
    with nft.install():
        # f32 both, see above.
        assert torch.allclose(f(x), F.group_norm(x, 2).relu(), atol=1e-5)

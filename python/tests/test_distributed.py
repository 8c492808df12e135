# SPDX-License-Identifier: MIT
"""Statistics over processes: 2 to 4 gloo processes on the CPU beside one process that has everything; with
NORMFUSE_TEST_DEVICE=cuda NCCL processes with a GPU each, 2 to as many as there are (4 at most), and 2 and 3 gloo
processes that share one.

Every test function runs as a "case": the processes start once for each number of them and work through all cases, and a
pytest test reads what became of one. Shards are uneven, and one is empty.
"""
import copy
import datetime
import faulthandler
import functools
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
import weakref

import numpy
import pytest
import reference
from device import DEVICE, ON_CUDA

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
CUTS = {2: [0, 4, 5], 3: [0, 2, 2, 5], 4: [0, 1, 1, 3, 5]}  # of 5 samples, or rows
CASES, OF_NCCL = {}, []
LIMIT = 200 if ON_CUDA else 250  # seconds for all cases over one number of processes; kernels are compiled in it


def case(function):
    CASES[function.__name__] = function
    return function


def case_of_nccl(function):
    """What only collectives that run on the device can do."""
    OF_NCCL.append(function.__name__)
    return case(function)


def cases(backend):
    return [name for name in CASES if backend == "nccl" or name not in OF_NCCL]


def array(t):
    return t.detach().double().cpu().numpy().copy()


def flat(t):
    return array(t).reshape(t.shape[0], t.shape[1], -1)


def sent(tensor):
    """Where the tests' own collectives take it."""
    return tensor.detach().cpu() if dist.get_backend() == "gloo" else tensor.detach()


def same_everywhere(*tensors):
    """Equal to the bit in all processes."""
    for tensor in tensors:
        bits = sent(tensor).contiguous().view(-1).view(torch.uint8)
        every = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
        dist.all_gather(every, bits)
        assert all(torch.equal(bits, other) for other in every)


def total(tensor):
    added = sent(tensor.double()).clone()
    dist.all_reduce(added)
    return added.to(tensor.device)


def mine(tensor, axis):
    rank, cuts = dist.get_rank(), CUTS[dist.get_world_size()]
    return tensor.narrow(axis, cuts[rank], cuts[rank + 1] - cuts[rank]).clone()


def problem_of(kind, x, layer, columns, **more):
    return reference.Problem(kind, NAMES[x.dtype], flat(x), weight=array(layer.weight), bias=array(layer.bias),
                             columns=columns, activation=layer.activation or "identity",
                             slope=array(layer.slope) if layer.activation == "prelu" else None, on_cuda=ON_CUDA,
                             **more)


def compare_gradients(problem, dy, want, got, dtype):
    """Beside the whole, whose statistics were not those that the processes saved, but the exact ones: what that changes
    is the statistics' bound times what the results move with them."""
    mean, rstd = want["mean"][0], want["rstd"][0]
    gradients = reference.backward(problem, flat(dy), mean, rstd)
    drift = float((want["mean"][1] * rstd + want["rstd"][1] / rstd).max()) + 2.0**-24
    normalized = abs((problem.u - problem.spread(mean)[..., None]) * problem.spread(rstd)[..., None]).max()
    steep = 2 * abs(flat(dy)).max() * (1 + abs(problem.weight).max())**2 * (1 + normalized)**3
    for name, value in got.items():
        exact, error = gradients[name]
        size = {"dx": problem.spread(rstd).max()}.get(name, problem.samples * problem.positions)
        reference.compare(name, value, exact, error + 8 * steep * size * drift, NAMES[dtype])


def sums_to(pre_bias, x):
    """The gradient of pre_bias is the sum of x's, of this process's part, in the compute type."""
    dx = array(x.grad)
    axes = (0, 2, 3) if pre_bias.dim() == 1 else (2, 3)
    values = dx.size // pre_bias.numel()
    assert numpy.all(abs(array(pre_bias.grad) - dx.sum(axes)) <= (values + 8) * 2.0**-24 * abs(dx).sum(axes))


@case
def batch_norm():
    for dtype in NAMES:
        for layout in (torch.contiguous_format, torch.channels_last):
            for activation in (None, "silu", "relu", "prelu"):
                torch.manual_seed(3)
                x, dy, more = ((torch.randn(5, 4, 3, 6) * 2 + 1).to(dtype).to(memory_format=layout) for _ in range(3))
                layer = nft.SyncBatchNorm(4, activation=activation, num_parameters=4 if activation == "prelu" else 1)
                pre_bias = torch.randn(4)
                with torch.no_grad():
                    layer.weight.uniform_(0.5, 2), layer.bias.normal_()
                problem = problem_of("batch", x, layer, layout is torch.channels_last, post_add=flat(more),
                                     pre_bias=array(pre_bias), writes_u=True,
                                     running_mean=numpy.zeros(4), running_var=numpy.ones(4))
                want = reference.forward(problem)
                shard, added = mine(x, 0).requires_grad_(), mine(more, 0).requires_grad_()
                y = layer(shard, pre_bias=pre_bias.requires_grad_(), post_add=added)
                y.backward(mine(dy, 0))
                sums_to(pre_bias, shard)
                assert y.dtype == dtype and y.shape == shard.shape
                same_everywhere(layer.running_mean, layer.running_var)
                # The results are put together again; parts of samples do not overlap.
                whole = functools.partial(torch.zeros, x.shape, dtype=torch.float64)
                parts = {"y": y, "dx": shard.grad, "dpost_add": added.grad}
                cuts, rank = CUTS[dist.get_world_size()], dist.get_rank()
                for name, part in parts.items():
                    full = whole()
                    full[cuts[rank]:cuts[rank + 1]] = part.detach().double()
                    parts[name] = total(full)
                reference.compare("y", flat(parts["y"]), *want["y"], NAMES[dtype])
                for name in ("running_mean", "running_var"):
                    reference.compare(name, array(getattr(layer, name)), *want[name], "float32")
                compare_gradients(problem, dy, want, {n: flat(parts[n]) for n in ("dx", "dpost_add")}, dtype)
                parts = {"dweight": layer.weight, "dbias": layer.bias}
                if activation == "prelu":
                    parts["dslope"] = layer.slope
                compare_gradients(problem, dy, want, {name: array(total(p.grad)) for name, p in parts.items()},
                                  torch.float32)


@case
def group_norm():
    for dtype in NAMES:
        for layout in (torch.contiguous_format, torch.channels_last):
            for axis, activation in ((2, "gelu"), (-1, "gelu"), (2, "prelu")):
                torch.manual_seed(4)
                x, dy, more = ((torch.randn(2, 4, 5, 5) + 1).to(dtype).to(memory_format=layout) for _ in range(3))
                layer = nft.GroupNorm(2, 4, activation=activation, sharded_dim=axis)
                scale, shift, pre_bias = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4)
                with torch.no_grad():
                    layer.weight.uniform_(0.5, 2), layer.bias.normal_()
                problem = problem_of("group", x, layer, layout is torch.channels_last, groups=2, pre_add=flat(more),
                                     pre_bias=array(pre_bias), scale=array(scale), shift=array(shift))
                want = reference.forward(problem)
                leaves = [t.requires_grad_() for t in (mine(x, axis), mine(more, axis), scale, shift)]
                y, u = layer(leaves[0], pre_bias=pre_bias.requires_grad_(), pre_add=leaves[1], return_sum=True,
                             scale=scale, shift=shift)
                wide = torch.promote_types(dtype, torch.float32)
                assert torch.equal(u, (leaves[0].to(wide) + pre_bias[..., None, None] + leaves[1].to(wide)).to(dtype))
                torch.autograd.backward([y, u], [mine(dy, axis), torch.zeros_like(u)])
                sums_to(pre_bias, leaves[0])
                assert torch.equal(leaves[0].grad, leaves[1].grad)
                parts = []
                for part in (y, leaves[0].grad):
                    full = torch.zeros(x.shape, dtype=torch.float64)
                    cuts, rank = CUTS[dist.get_world_size()], dist.get_rank()
                    full.narrow(axis, cuts[rank], cuts[rank + 1] - cuts[rank]).copy_(part.detach())
                    parts.append(total(full))
                reference.compare("y", flat(parts[0]), *want["y"], NAMES[dtype])
                compare_gradients(problem, dy, want, {"dx": flat(parts[1])}, dtype)
                parts = {"dweight": layer.weight, "dbias": layer.bias, "dscale": scale, "dshift": shift}
                if activation == "prelu":
                    parts["dslope"] = layer.slope
                compare_gradients(problem, dy, want, {name: array(total(p.grad)) for name, p in parts.items()},
                                  torch.float32)


@case
def gradient_of_the_sum():
    """du is added to dx, where only the sum is used, too."""
    torch.manual_seed(5)
    x, more, du = (mine(torch.randn(5, 4, 6, dtype=torch.float64), 0) for _ in range(3))
    for layer in (nft.SyncBatchNorm(4, dtype=torch.float64), nft.GroupNorm(2, 4, dtype=torch.float64, sharded_dim=2)):
        a, b = x.clone().requires_grad_(), more.clone().requires_grad_()
        if isinstance(layer, nft.GroupNorm) and dist.get_world_size() > 2:
            continue  # shards of samples do not fit
        if isinstance(layer, nft.GroupNorm):
            a, b = (torch.randn(2, 4, 3 + dist.get_rank(), dtype=torch.float64).requires_grad_() for _ in range(2))
        y, u = layer(a, pre_add=b, return_sum=True)
        gradient = torch.randn_like(u)
        u.backward(gradient, retain_graph=True)
        assert torch.equal(a.grad, gradient) and torch.equal(b.grad, gradient)
        (y.sum() * 0 + (u * gradient).sum()).backward()
        assert torch.allclose(a.grad, 2 * gradient, rtol=1e-13, atol=1e-13)


def penalized(call, x, dy, shared, added):
    """First derivatives, and those of a penalty on them, which is the sum of the processes' penalties: squares of what
    is cut, and of what is a sum over processes something linear."""
    leaves = [t.clone().requires_grad_() for t in (x, *shared, *added, dy)]
    y = call(*leaves[:-1])
    first = torch.autograd.grad((y * leaves[-1]).sum(), leaves[:-1], create_graph=True)
    linear = range(1, 1 + len(shared))
    penalty = sum((g * torch.arange(1.0, 1.0 + g.numel()).view_as(g)).sum() if i in linear else g.square().sum()
                  for i, g in enumerate(first))
    return [*first, *torch.autograd.grad(penalty, leaves, allow_unused=True, materialize_grads=True)]


@case
def second_derivatives():
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
        for activation in (None, "silu", "relu", "prelu"):
            torch.manual_seed(8)
            x, dy, more = (torch.randn(5, 4, 3, 2, dtype=dtype) + 0.5 for _ in range(3))
            weight, bias, pre_bias = torch.rand(4, dtype=dtype) + 0.5, *torch.randn(2, 4, dtype=dtype)
            scale, shift, of_samples = (torch.randn(5, 4, dtype=dtype) for _ in range(3))

            slope = [torch.randn(4, dtype=dtype)] if activation == "prelu" else []

            def plain(x, weight, bias, *slope, whole=False):
                running = torch.zeros(4), torch.ones(4)
                more = {"activation": activation, "slope": slope[0] if slope else None}
                if whole:
                    return nft.batch_norm(x, *running, weight, bias, True, **more)
                return nft.distributed.batch_norm(x, *running, weight, bias, **more)

            def fused(pre_bias, *slope, pre_add, post_add):
                return {"activation": activation, "slope": slope[0] if slope else None, "pre_bias": pre_bias,
                        "pre_add": pre_add, "post_add": post_add}

            def batch(x, weight, bias, *more, whole=False):
                more = fused(*more[:-2], pre_add=more[-2], post_add=more[-1])
                if whole:
                    return nft.batch_norm(x, None, None, weight, bias, True, **more)
                return nft.distributed.batch_norm(x, None, None, weight, bias, **more)

            def group(x, weight, bias, scale, shift, *more, whole=False):
                more = {"scale": scale, "shift": shift,
                        **fused(*more[:-2], pre_add=more[-2], post_add=more[-1])}
                return nft.group_norm(x, 2, weight, bias, **more) if whole else nft.distributed.group_norm(
                    x, 2, weight, bias, sharded_dim=2, **more)

            # Cut along the batch; along the rows of images that lie the other way round.
            for call, axis, given, shared in ((plain, 0, [x, dy], [weight, bias, *slope]),
                                              (batch, 0, [x, dy, more, dy.flip(0)],
                                               [weight, bias, pre_bias, *slope]),
                                              (group, 2, [t.transpose(0, 2).contiguous() for t in
                                                          (x, dy, more, dy.flip(0))],
                                               [weight, bias, scale[:3], shift[:3], of_samples[:3], *slope])):
                x, dy, *added = given
                want = penalized(functools.partial(call, whole=True), x, dy, shared, added)
                got = penalized(call, mine(x, axis), mine(dy, axis), shared, [mine(t, axis) for t in added])
                leaves = [t.clone().requires_grad_() for t in (mine(x, axis), *shared, *(mine(t, axis) for t in added))]
                plain = torch.autograd.grad((call(*leaves) * mine(dy, axis)).sum(), leaves)  # by the kernels
                for i, (a, b) in enumerate([*zip(got, want), *zip(plain, want)]):
                    i %= len(want)
                    a, b = (a, mine(b, axis)) if b.dim() == 4 else (total(a).to(dtype), b)
                    size = max(1.0, float(want[i].abs().max()))
                    assert (a - b).abs().max().item() <= tolerance * size if a.numel() else a.shape == b.shape, (
                        call.__name__, activation, i, a - b)


@case
def cumulative_average():
    torch.manual_seed(6)
    ours = nft.SyncBatchNorm(4, momentum=None, dtype=torch.float64)
    stock = nn.BatchNorm1d(4, momentum=None, dtype=torch.float64)
    for _ in range(3):
        x = torch.randn(5, 4, 3, dtype=torch.float64) + 2
        y, z = ours(mine(x, 0)), stock(x)
        assert torch.allclose(y, mine(z, 0), rtol=0, atol=1e-13)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            a, b = getattr(ours, name), getattr(stock, name)
            assert torch.allclose(a.double(), b.double(), rtol=1e-13)
            same_everywhere(a)
    ours.eval(), stock.eval()
    assert torch.allclose(ours(x), stock(x), rtol=0, atol=1e-13)


@case
def life():
    """Tracking off, no affine, evaluation without statistics; nothing is sent in evaluation."""
    torch.manual_seed(7)
    for arguments in ({"track_running_stats": False}, {"affine": False}, {"momentum": 1.0}):
        ours, stock = (c(4, dtype=torch.float64, **arguments) for c in (nft.SyncBatchNorm, nn.BatchNorm1d))
        x = torch.randn(5, 4, 3, dtype=torch.float64)
        assert torch.allclose(ours(mine(x, 0)), mine(stock(x), 0), rtol=0, atol=1e-13)
        ours.eval(), stock.eval()
        if dist.get_rank() == 0:  # alone: a collective would hang
            assert torch.allclose(ours(x), stock(x), rtol=0, atol=1e-13)


@case
def only_what_is_asked():
    layer = nft.SyncBatchNorm(4)
    layer.weight.requires_grad_(False)
    x = torch.randn(2 + dist.get_rank(), 4, 3)
    layer(x).sum().backward()  # no gradient of x: nothing is sent
    assert layer.weight.grad is None and layer.bias.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad


@case
def groups_of_processes():
    world, rank = dist.get_world_size(), dist.get_rank()
    halves = [dist.new_group(list(range(world // 2))), dist.new_group(list(range(world // 2, world)))]
    own = halves[rank >= world // 2]
    torch.manual_seed(8)
    x = torch.randn(world, 3, 4, 5, dtype=torch.float64)
    layer = nft.SyncBatchNorm(4, process_group=own, dtype=torch.float64)
    half = x[:world // 2] if rank < world // 2 else x[world // 2:]
    stock = nn.BatchNorm1d(4, dtype=torch.float64)
    want = stock(half.flatten(0, 1)).view_as(half)[rank if rank < world // 2 else rank - world // 2]
    assert torch.allclose(layer(x[rank]), want, rtol=0, atol=1e-13)
    assert torch.allclose(layer.running_var, stock.running_var, rtol=1e-13)
    strips = nft.GroupNorm(2, 4, process_group=own, sharded_dim=2, dtype=torch.float64)
    image = torch.cat(list(half), 2)
    want = nn.GroupNorm(2, 4, dtype=torch.float64)(image)
    place = rank if rank < world // 2 else rank - world // 2
    assert torch.allclose(strips(x[rank]), want[:, :, 5 * place:5 * place + 5], rtol=0, atol=1e-13)


@case
def compiled_whole():
    if dist.get_world_size() > 2:
        return  # compiling takes seconds in each process, and is the same
    torch._dynamo.reset()
    for layer in (nft.SyncBatchNorm(4, activation="relu"), nft.SyncBatchNorm(4, momentum=None),
                  nft.GroupNorm(2, 4, sharded_dim=2)):
        x = torch.randn(2, 4, 2 + dist.get_rank(), 3)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        eager = layer(a)
        eager.square().sum().backward()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(b)
        compiled.square().sum().backward()
        assert torch.equal(compiled, eager) and torch.equal(a.grad, b.grad)


# Kind, arguments, whether it trains, and what its call may be given beyond the input.
OF_DTENSORS = [("GroupNorm", (2, 4), True, ("pre_bias", "pre_add", "post_add", "scale")),
               ("BatchNorm2d", (4,), True, ("pre_bias", "pre_add", "post_add")),
               ("BatchNorm2d", (4,), False, ("pre_bias", "pre_add", "post_add")),
               ("InstanceNorm2d", (4, 1e-5, 0.1, True), True, ("post_add",)),
               ("InstanceNorm2d", (4, 1e-5, 0.1, True, True), True, ("post_add",)),
               ("ChannelAffine", (4,), True, ("post_add",))]


@case
def dtensors():
    """Replicated and cut along each axis of a mesh, evenly and not, beside the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    def whole(tensor):
        return getattr(tensor, "full_tensor", lambda: tensor)()

    world = dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (2, 2) if world == 4 else (world,))
    for kind, args, training, additions in OF_DTENSORS:
        calls = [(None, activation, axis, samples) for activation in (None, "prelu")
                 for axis, samples in ((None, 4), (0, 4), (0, 3), (1, 4), (2, 4))]
        calls += [(added, "silu", axis, 3) for added in additions for axis in (0, 1)]
        # Each redistributes some tensors ten times: of more processes every fourth, so that all axes have their turn.
        for added, activation, axis, samples in calls if world == 2 else calls[2::4]:
            torch.manual_seed(0)
            options = {"activation": activation, "num_parameters": 4 if activation == "prelu" else 1}
            layer = getattr(nft, kind)(*args, **options).double().to(DEVICE).train(training)
            for parameter in layer.parameters():
                nn.init.uniform_(parameter)
            stock = copy.deepcopy(layer)
            distribute_module(layer, mesh)
            given = {"input": torch.randn(samples, 4, 6, 5, dtype=torch.float64, device=DEVICE)}
            if added is not None:
                shape = {"pre_bias": (4,), "scale": (samples, 4)}.get(added, (samples, 4, 6, 5))
                given[added] = torch.randn(shape, dtype=torch.float64, device=DEVICE)
            dy = torch.randn_like(given["input"])
            cut = [Replicate() if axis is None else Shard(axis), *[Replicate()] * (mesh.ndim - 1)]
            parts = {name: distribute_tensor(t, mesh, cut if t.dim() == 4 else [Replicate()] * mesh.ndim)
                     for name, t in given.items()}
            for tensors in (given, parts):
                for tensor in tensors.values():
                    tensor.requires_grad_()
            y, want = layer(**parts), stock(**given)
            y.backward(distribute_tensor(dy, mesh, cut))
            want.backward(dy)
            found = [[output, *(t.grad for t in (*tensors.values(), *norm.parameters())), *norm.buffers()]
                     for output, tensors, norm in ((y, parts, layer), (want, given, stock))]
            for a, b in zip(*found):
                assert torch.allclose(whole(a), b, rtol=1e-11, atol=1e-11), (kind, training, added, activation)
            if kind in ("GroupNorm", "ChannelAffine") and axis == 0:
                assert y.placements[0] == Shard(0)
            with torch.no_grad():
                assert torch.allclose(whole(layer(**parts)), stock(**given), rtol=1e-11, atol=1e-11)
    layer = distribute_module(nft.BatchNorm2d(4), mesh)
    layer.running_mean = distribute_tensor(torch.zeros(4), mesh, [Shard(0)] * mesh.ndim)
    try:
        layer(distribute_tensor(torch.randn(2, 4, 3, 3), mesh, [Replicate()] * mesh.ndim))
    except RuntimeError as error:
        assert "running statistics that are DTensors" in str(error)
    else:
        raise AssertionError("running statistics in parts and whole were taken")


@case
def a_model_trains():
    """Gradients added up over the processes are those of one process with the whole batch."""
    torch.manual_seed(9)
    model, stock = (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).double() for _ in range(2))
    stock.load_state_dict(model.state_dict())
    model = nft.SyncBatchNorm.convert_sync_batchnorm(model)
    assert nft.convert(model).folded
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    model(mine(x, 0)).square().sum().backward()
    stock(x).square().sum().backward()
    for a, b in zip(model.parameters(), stock.parameters()):
        assert torch.allclose(total(a.grad), b.grad, rtol=1e-10, atol=1e-12)


@case
def distributed_data_parallel():
    """It takes models with this layer, made or converted, on the CPU too: gradients are those of one process with the
    whole batch over the number of processes, outputs and running statistics that process's."""
    torch.manual_seed(10)
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    stock = copy.deepcopy(made)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(made))
    nft.convert(converted)
    x, world = torch.randn(5, 3, dtype=torch.float64), dist.get_world_size()
    want = stock(x)
    want.square().sum().backward()
    for model in (nft.SyncBatchNorm.convert_sync_batchnorm(made), converted):
        model = nn.parallel.DistributedDataParallel(model)
        y = model(mine(x, 0))
        assert torch.allclose(y, mine(want, 0), rtol=0, atol=1e-13)
        y.square().sum().backward()
        for a, b in zip(model.parameters(), stock.parameters()):
            assert torch.allclose(a.grad * world, b.grad, rtol=0, atol=1e-12)
        for a, b in zip(model.buffers(), stock.buffers()):
            assert torch.allclose(a, b, rtol=0, atol=1e-13)
            same_everywhere(a)


@case
def refused():
    for layer, x, error in ((nft.SyncBatchNorm(4), torch.randn(4), ValueError),
                            (nft.SyncBatchNorm(0), torch.randn(2, 0, 3), ValueError),
                            (nft.SyncBatchNorm(4), torch.randn(2, 5, 3), RuntimeError),
                            (nft.SyncBatchNorm(4, eps=0.0), torch.randn(2, 4, 3), ValueError),
                            (functools.partial(nft.SyncBatchNorm(4), activation="prelu"), torch.randn(2, 4, 3),
                             ValueError),
                            (functools.partial(nft.GroupNorm(2, 4, sharded_dim=2), slope=torch.ones(4)),
                             torch.randn(2, 4, 3), ValueError),
                            (nft.GroupNorm(2, 4, sharded_dim=2), torch.randn(2, 4), IndexError),
                            (nft.GroupNorm(2, 4, sharded_dim=2), torch.randn(2, 5, 3), RuntimeError)):
        with pytest.raises(error):
            layer(x)


@case_of_nccl
def no_host_synchronization():
    """The host runs ahead: neither direction waits for the device, with uneven and empty shards."""
    layers = [nft.SyncBatchNorm(4, activation="relu"), nft.SyncBatchNorm(4, momentum=None),
              nft.GroupNorm(2, 4, sharded_dim=2)]
    x = torch.randn(5, 4, 5, 3)
    parts = [mine(x, 0).requires_grad_(), mine(x, 0).requires_grad_(), mine(x, 2).requires_grad_()]
    for synchronized in ("default", "error"):  # first what is made once: communicators, kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(synchronized)
        try:
            for layer, part in zip(layers, parts):
                y = layer(part)
                y.backward(torch.ones_like(y))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@case_of_nccl
def captured_graph():
    """A training step of SyncBatchNorm in a CUDA graph, collectives included, replayed: the bits of eager steps."""
    layer, eager = nft.SyncBatchNorm(4, activation="silu"), nft.SyncBatchNorm(4, activation="silu")
    x = torch.randn(2 + dist.get_rank(), 4, 6, 6).requires_grad_()

    def step(layer):
        x.grad = None
        y = layer(x)
        y.backward(torch.ones_like(y))
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that asks for events
        y = step(layer)
        gradient = x.grad
    layer.reset_running_stats()
    for _ in range(2):
        graph.replay()
        want = step(eager)
        assert torch.equal(y, want) and torch.equal(gradient, x.grad)
        assert torch.equal(layer.running_var, eager.running_var)


class Block(nn.Module):
    """What convert folds: batch norm + prelu, batch norm + addition + relu, group norm + silu."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.norm, self.act, self.prelu = nn.GroupNorm(2, 4), nn.SiLU(), nn.PReLU(8)

    def forward(self, x):
        y = self.prelu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)) + x)
        return self.act(self.norm(y))


def three_steps(stock, model, whole):
    """Of two models over all processes, with two samples each: outputs, full parameters and buffers are the same.
    whole: what makes a full tensor of a parameter."""
    torch.manual_seed(7)
    x = torch.randn(2 * dist.get_world_size(), 4, 6, 6, dtype=torch.float64)[2 * dist.get_rank():][:2]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9) for m in (stock, model)]
    for _ in range(3):
        outputs = []
        for m, optimizer in zip((stock, model), optimizers):
            optimizer.zero_grad()
            outputs.append(m(x))
            outputs[-1].square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
    for (name, a), b in zip(stock.named_parameters(), model.parameters(), strict=True):
        a, b = whole(a.detach()), whole(b.detach())
        same_everywhere(b)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    for (name, a), b in zip(stock.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def blocks():
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block()).double()


@case
def converted_and_replicated():
    stock, model = blocks(), blocks()
    report = nft.convert(model)
    found = sorted(f for layer in report.layers for f in layer.folded)
    assert found == 2 * ["add + relu"] + 2 * ["prelu"] + 2 * ["silu"]
    on = [torch.cuda.current_device()] if ON_CUDA else None
    three_steps(*(nn.parallel.DistributedDataParallel(m, device_ids=on) for m in (stock, model)), lambda t: t)
    nft.revert(model)
    assert repr(model) == repr(stock)


@case
def replicated_and_converted():
    stock, model = blocks(), blocks()
    on = [torch.cuda.current_device()] if ON_CUDA else None
    stock, model = (nn.parallel.DistributedDataParallel(m, device_ids=on) for m in (stock, model))
    report = nft.convert(model)
    assert not report.left and sum(bool(layer.folded) for layer in report.layers) == 6
    three_steps(stock, model, lambda t: t)


def sharded(convert_first):
    from torch.distributed.fsdp import fully_shard
    mesh = dist.init_device_mesh(DEVICE, (dist.get_world_size(),))
    stock, model = blocks(), blocks()
    if convert_first:
        assert not nft.convert(model).left
    for m in (stock, model):
        for block in m:
            fully_shard(block, mesh=mesh)
        fully_shard(m, mesh=mesh)
    if not convert_first:
        assert not nft.convert(model).left
    three_steps(stock, model, lambda t: t.full_tensor())


# fully_shard scatters by what gloo has for tensors of the CPU alone.
case_of_sharding = case_of_nccl if ON_CUDA else case


@case_of_sharding
def converted_and_sharded():
    sharded(True)


@case_of_sharding
def sharded_and_converted():
    sharded(False)


# ---- processes ------------------------------------------------------------------------------------------------------


def _process(rank, processes, folder, backend):
    # The place where a process died, or hangs: its parent shows it.
    stacks = open(f"{folder}/stacks.{rank}", "w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGTERM, stacks, chain=True)  # which those get that live when another dies
    faulthandler.dump_traceback_later(LIMIT - 10, file=stacks)
    torch.set_num_threads(1)
    if ON_CUDA:
        place = torch.device(DEVICE, rank if backend == "nccl" else 0)
        torch.cuda.set_device(place)
        torch.set_default_device(place)
    importlib.import_module("torch.distributed.nn")  # by torch.compile, later: its functions keep the group they find
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=processes,
                            timeout=datetime.timedelta(seconds=60))
    for name in cases(backend):
        stacks.write(f"{name}\n")
        stacks.flush()
        outcome = ""
        try:
            CASES[name]()
        except Exception:  # told to the test that asks for this case
            outcome = traceback.format_exc()
        with open(f"{folder}/{name}.{rank}", "w") as file:
            file.write(outcome)
        failed = sent(torch.tensor(float(bool(outcome))))
        dist.all_reduce(failed)  # a process that failed has left collectives out: the others' would hang
        dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


@functools.cache
def _outcomes(processes, backend):
    """What ended the processes before their time, and of each case what each process said that came to its end."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.spawn(_process, (processes, folder, backend), processes, join=False)
        error, deadline = "", time.monotonic() + LIMIT
        try:
            while not context.join(timeout=5):
                if time.monotonic() > deadline:
                    error = f"the processes did not end in {LIMIT} s"
                    break
        except Exception as exception:
            error = str(exception)
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
        if error:
            for rank in range(processes):
                if os.path.exists(f"{folder}/stacks.{rank}"):
                    with open(f"{folder}/stacks.{rank}") as file:
                        error += f"\nprocess {rank}, cases and stacks:\n{file.read()}"
        return error, _read(folder)


def _read(folder):
    outcomes = {}
    for name in CASES:
        files = [f for f in os.listdir(folder) if f.split(".")[0] == name]
        outcomes[name] = [open(os.path.join(folder, f)).read() for f in sorted(files)]
    return outcomes


if ON_CUDA:
    PROCESSES = [*((n, "nccl") for n in CUTS if n <= max(2, torch.cuda.device_count())), (2, "gloo"), (3, "gloo")]
else:
    # Each process more is another Python with PyTorch on the same cores.
    PROCESSES = [(n, "gloo") for n in CUTS if n < 4 or not os.environ.get("NORMFUSE_TEST_SAMPLED")]
_shown = set()


@pytest.mark.parametrize("processes, backend, name", [(*p, name) for p in PROCESSES for name in cases(p[1])])
def test_over_processes(processes, backend, name):
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.device_count() >= processes):
        pytest.skip(f"{processes} processes over NCCL need it, and {processes} GPUs; here are "
                    f"{torch.cuda.device_count()}")
    error, outcomes = _outcomes(processes, backend)
    failures = [text for text in outcomes[name] if text]
    if not failures and len(outcomes[name]) == processes:
        return
    if (processes, backend) in _shown:  # the whole of it once
        error = error.partition("\n")[0]
    _shown.add((processes, backend))
    pytest.fail("\n".join(filter(None, [error, *failures])) or "the processes did not come so far", pytrace=False)


@pytest.mark.parametrize("added", [False, True])
def test_a_group_gathers_itself(monkeypatch, added):
    """Without torch.compile, and but for gloo, one call of the group in each direction, which is waited for where it
    gives something to wait for. Here its two processes have the same: results are those of both batches in one."""
    from normfuse.torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore
    calls = []

    class Work:
        def __init__(self, *copied):
            self.copied = copied

        def wait(self):
            gathered, part = self.copied
            gathered.copy_(torch.cat([part, part]))

    def gather(group, gathered, part, options):
        assert group is dist.group.WORLD and not options.asyncOp
        calls.append(part.shape)
        work = Work(gathered, part)
        return work if len(calls) % 2 else work.wait()  # as NCCL: it is on this stream

    monkeypatch.setattr(distributed, "_all_gather", gather)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        torch.manual_seed(11)
        x, dy, more = (torch.randn(3, 4, 5, dtype=torch.float64, device=DEVICE) for _ in range(3))
        ours = nft.SyncBatchNorm(4, activation="silu", dtype=torch.float64, device=DEVICE)
        whole = nft.BatchNorm1d(4, activation="silu", dtype=torch.float64, device=DEVICE)
        a, b = x.clone().requires_grad_(), torch.cat([x, x]).requires_grad_()
        y = ours(a, post_add=more if added else None)
        y.backward(dy)
        assert calls == [(4, 3), (4, 2)]
        z = whole(b, post_add=torch.cat([more, more]) if added else None)
        z.backward(torch.cat([dy, dy]))
        close = dict(rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((y, a.grad), (z[:3], b.grad[:3]), **close)
        torch.testing.assert_close([2 * p.grad for p in ours.parameters()], [p.grad for p in whole.parameters()],
                                   **close)
        torch.testing.assert_close(list(ours.buffers()), list(whole.buffers()), **close)
        calls.clear()
        ours(x.requires_grad_(False)).sum().backward()  # nothing is sent back
        assert calls == [(4, 3)]
    finally:
        dist.destroy_process_group()


def _destroys(rank, folder):
    assert not {"torch.distributed.nn",
                "normfuse.torch.distributed"} & set(sys.modules), "loaded before there is a group"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=60))
    nft.SyncBatchNorm(4, device=DEVICE)(torch.randn(3, 4, 5, device=DEVICE, requires_grad=True)).sum().backward()
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    assert group() is None


def test_a_destroyed_group_is_gone(tmp_path):
    """Else gloo's threads live on, and abort a process that ends while they hold a tensor."""
    torch.multiprocessing.spawn(_destroys, (tmp_path,), 2)


def test_one_process_needs_no_group():
    layer, x = nft.SyncBatchNorm(4).to(DEVICE), torch.randn(2, 4, 3, device=DEVICE)
    assert torch.equal(layer(x), nft.BatchNorm1d(4).to(DEVICE)(x))


def test_one_process_has_cumulative_averages():
    x = torch.randn(5, 4, 3, dtype=torch.float64, device=DEVICE)
    stock = nn.BatchNorm1d(4, momentum=None, affine=False, dtype=torch.float64, device=DEVICE)
    running = [b.clone() for b in (stock.running_mean, stock.running_var)]
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    y = nft.distributed.batch_norm(leaves[0], *running, batches_tracked=torch.tensor(1, device=DEVICE))
    want = stock(leaves[1])
    for result in (y, want):
        (result * x.flip(0)).sum().backward()
    close = dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((y, leaves[0].grad, *running),
                               (want, leaves[1].grad, stock.running_mean, stock.running_var), **close)
    assert not nft.distributed.spans_processes()

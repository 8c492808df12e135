# SPDX-License-Identifier: MIT
"""What only a GPU can show of normfuse.torch and normfuse: CUDA graphs, streams and the memory that they share or do
not, autocast with a scaler, what the host waits for, kernels and memory counted, several devices, other libraries'
arrays.

What is computed is asked elsewhere (test_functional.py and others with NORMFUSE_TEST_DEVICE=cuda); here results are
compared with those of the same call made alone, to the bit, which docs/numerics.md promises.
"""
import contextlib
import copy
import ctypes
import gc
import itertools
import os
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU", allow_module_level=True)

import normfuse  # noqa: E402
import normfuse.torch as nft  # noqa: E402
from normfuse import _library  # noqa: E402
from normfuse.torch import _operators  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
# Name -> (call, shape). "whole grid" sets are shared by all blocks of a kernel, which wait for one another.
CALLS = {
    "group norm": (lambda x, w, b: nft.group_norm(x, 8, w, b, activation="silu"), (4, 32, 16, 16)),
    "group norm, all": (lambda x, w, b: nft.group_norm(
        x, 8, w, b, activation="gelu", pre_add=x * 0.5, post_add=x * 0.25, scale=x[:, :, 0, 0].float(),
        shift=x[:, :, 0, 1].float()), (4, 32, 16, 16)),
    "group norm, clusters": (lambda x, w, b: nft.group_norm(x, 32, w, b, activation="silu"), (2, 320, 64, 64)),
    "group norm, whole grid": (lambda x, w, b: nft.group_norm(x, 1, w, b, activation="silu"), (1, 64, 192, 192)),
    "batch norm": (lambda x, w, b: nft.batch_norm(x, None, None, w, b, True, activation="relu"), (8, 32, 14, 14)),
    "batch norm, whole grid": (lambda x, w, b: nft.batch_norm(x, None, None, w, b, True, activation="relu"),
                               (4, 8, 256, 256)),
    "batch norm, two passes": (lambda x, w, b: nft.batch_norm(x, None, None, w, b, True), (4, 3, 500, 500)),
    "instance norm": (lambda x, w, b: nft.instance_norm(x, None, None, w, b, activation="leaky_relu"), (4, 16, 32, 32)),
    "batch norm, prelu": (lambda x, w, b: nft.batch_norm(x, None, None, w, b, True, activation="prelu", slope=w),
                          (8, 32, 14, 14)),
    "instance norm, one slope": (lambda x, w,
                                 b: nft.instance_norm(x, None, None, w, b, activation="prelu", slope=b[:1]),
                                 (4, 16, 32, 32)),
    "channel affine": (lambda x, w, b: nft.channel_affine(x, w, b, activation="hardswish"), (4, 32, 16, 16)),
}
WHOLE_GRID = [name for name in CALLS if "whole grid" in name]
each_call = pytest.mark.parametrize("name", CALLS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def random(shape, dtype, seed, layout="contiguous", device="cuda"):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return values.to(memory_format=LAYOUTS[layout]) if values.dim() == 4 else values


class Job:
    """A call, its inputs, and its outputs: y, dx, dweight, dbias."""

    def __init__(self, name, dtype=HALF, layout="contiguous", seed=0, device="cuda"):
        self.call, shape = CALLS[name]
        self.x = random(shape, dtype, seed, layout, device).requires_grad_()
        self.dy = random(shape, dtype, seed + 1, layout, device)
        self.weight, self.bias = (random(shape[1:2], SINGLE, seed + i, device=device).requires_grad_() for i in (2, 3))

    def __call__(self):
        y = self.call(self.x, self.weight, self.bias)
        return (y.detach(), *torch.autograd.grad(y, (self.x, self.weight, self.bias), self.dy))


def same_bits(got, want, what=""):
    for name, a, b in zip(("y", "dx", "dweight", "dbias"), got, want):
        assert a.dtype == b.dtype and a.stride() == b.stride(), (what, name)
        assert torch.equal(a, b), f"{what} {name}: {(a != b).sum()} of {a.numel()} differ, by {(a - b).abs().max()}"


def copies(tensors):
    return [t.clone() for t in tensors]


def warmed_up(function, times=2):
    """Calls it on a stream of its own, as a capture wants it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def captured(function, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        outputs = function()
    return graph, outputs


def python(code, **environment):
    here = os.path.dirname(os.path.abspath(__file__))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, here])),
                               **environment})


def succeeds(code, **environment):
    done = python(code, **environment)
    if done.returncode == 0 and done.stdout.strip().endswith("is not here"):
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), (done.stdout + done.stderr)[-3000:]


@pytest.fixture(autouse=True)
def whole_device():
    """A test that left an error on the device says so itself, and lets its memory go."""
    yield
    torch.cuda.synchronize()
    gc.collect()


# ---- what there is --------------------------------------------------------------------------------------------------


def test_kernels_and_binding():
    """The library has kernels for this GPU, and the operators are those in C."""
    _library.call(_library.library.normfuse_prepare(torch.cuda.current_device()))
    assert _operators.binding()[0] == "shim", _operators.binding()


def test_devices_of_arguments():
    x = random((2, 8, 4, 4), SINGLE, 0)
    for call in (lambda: nft.group_norm(x, 2, torch.ones(8)), lambda: nft.group_norm(x, 2, pre_add=x.cpu()),
                 lambda: nft.batch_norm(x, torch.zeros(8), torch.ones(8)),
                 lambda: nft.group_norm(x.cpu(), 2, x[0, :, 0, 0])):
        with pytest.raises((RuntimeError, ValueError, TypeError), match="device"):
            call()
    assert torch.isfinite(nft.group_norm(x, 2)).all()


# ---- graphs ---------------------------------------------------------------------------------------------------------


@each_call
@each_layout
def test_graph(name, layout):
    """Forward and backward captured, replayed over other inputs: the bits of eager calls."""
    job, other = Job(name, layout=layout), Job(name, layout=layout, seed=10)
    warmed_up(job)
    graph, outputs = captured(job)
    for source in (other, Job(name, layout=layout, seed=20), other):
        with torch.no_grad():
            for mine, theirs in ((job.x, source.x), (job.dy, source.dy), (job.weight, source.weight),
                                 (job.bias, source.bias)):
                mine.copy_(theirs)
        for output in outputs:
            output.fill_(7)
        graph.replay()
        same_bits(outputs, source(), name)


def test_running_statistics_in_a_graph():
    layer = nft.BatchNorm2d(16, activation="relu").cuda()
    eager = copy.deepcopy(layer)
    x = random((4, 16, 8, 8), SINGLE, 0)
    warmed_up(lambda: layer(x))
    layer.reset_running_stats()
    graph, y = captured(lambda: layer(x))
    assert layer.num_batches_tracked == 0, "capturing ran something"
    for seed in range(3):
        x.copy_(random((4, 16, 8, 8), SINGLE, seed))
        graph.replay()
        assert torch.equal(y, eager(x))
        for ours, want in zip(layer.buffers(), eager.buffers()):
            assert torch.equal(ours, want)


def test_first_call_of_a_process_in_a_capture():
    """Nothing was called before: the kernels and the sync memory are got ready under the capture."""
    succeeds("""
import torch, normfuse.torch as nft
x = torch.randn(1, 64, 192, 192, device="cuda", dtype=torch.float16)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = nft.group_norm(x, 1, activation="silu")
y.fill_(7)
graph.replay()
assert torch.equal(y, nft.group_norm(x, 1, activation="silu"))
print("done")
""")


def test_make_graphed_callables():
    torch.manual_seed(0)
    model = nn.Sequential(nft.GroupNorm(4, 32, activation="silu"), nft.BatchNorm2d(32, activation="relu"),
                          nft.InstanceNorm2d(32, affine=True)).cuda()
    eager = copy.deepcopy(model)
    sample = random((4, 32, 16, 16), SINGLE, 0).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    model[1].reset_running_stats()
    for seed in range(3):
        results = []
        for m in (graphed, eager):
            x = random((4, 32, 16, 16), SINGLE, seed).requires_grad_()
            m.zero_grad()
            y = m(x)
            y.backward(random((4, 32, 16, 16), SINGLE, seed + 5))
            results.append([y.detach(), x.grad, *(p.grad.clone() for p in m.parameters())])
        for a, b in zip(*results):
            assert torch.equal(a, b)


def test_reduce_overhead():
    """torch.compile with CUDA graphs of its own, training: the layers are in them, and running statistics move."""
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nft.GroupNorm(4, 32, activation="silu"), nft.BatchNorm2d(32, activation="relu")).cuda()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for seed in range(6):
        results = []
        for m in (compiled, eager):
            torch.compiler.cudagraph_mark_step_begin()
            x = random((4, 32, 16, 16), SINGLE, seed).requires_grad_()
            m.zero_grad()
            y = m(x)
            y.backward(random((4, 32, 16, 16), SINGLE, seed + 5))
            results.append([y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in m.parameters())])
        for a, b in zip(*results):
            assert torch.equal(a, b)
    assert torch.equal(model[1].running_var, eager[1].running_var)
    assert counters["inductor"]["cudagraph_skips"] == 0, dict(counters["inductor"])


def test_arrays_in_a_graph():
    x = random((1, 64, 192, 192), HALF, 0)
    warmed_up(lambda: normfuse.group_norm(x, 1, activation="silu"))
    graph, y = captured(lambda: normfuse.group_norm(x, 1, activation="silu"))
    x.copy_(random((1, 64, 192, 192), HALF, 1))
    graph.replay()
    assert torch.equal(y, normfuse.group_norm(x, 1, activation="silu"))


# ---- sync memory ----------------------------------------------------------------------------------------------------


def sync_of(stream, device=0):
    size = _library.c_size_t()
    memory = _library.library.normfuse_stream_sync(device, stream.cuda_stream, size)
    assert memory and size.value == 65536 and memory % 64 == 0
    return memory


def test_sync_memory_of_streams_and_graphs():
    x = random((1, 64, 192, 192), HALF, 0)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    usual = torch.cuda.current_stream()
    before = [sync_of(stream) for stream in (usual, first, second)]
    assert len(set(before)) == 3 and before == [sync_of(stream) for stream in (usual, first, second)]
    held, graphs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=first):
            nft.group_norm(x, 1)
            held.append(sync_of(first))
            assert sync_of(first) == held[-1]
        graphs.append(graph)
    assert len({*before, *held}) == 5, "a graph shares memory"
    assert sync_of(first) == before[1]
    # Handed back when the graphs are gone, at some time after that.
    del graph
    graphs.clear()
    gc.collect()
    torch.cuda.synchronize()
    deadline, again = time.monotonic() + 10, set()
    while not again & set(held) and time.monotonic() < deadline:
        time.sleep(0.05)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=first):
            nft.group_norm(x, 1)
            again.add(sync_of(first))
        del graph
    assert again & set(held), "the memory of destroyed graphs was not given to a new one"


@contextlib.contextmanager
def short_lived_stream():
    """A stream that is destroyed at the end, while its work may still run; the driver gives its address to the next."""
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        yield torch.cuda.current_stream()
    assert driver.cuStreamDestroy_v2(handle) == 0


def test_destroyed_streams_share_no_memory_with_new_ones():
    job = Job("group norm, whole grid")
    want, results, memory, again, same = job(), [], {}, 0, 0
    torch.cuda.synchronize()
    while len(results) < 100 or (again <= 10 and len(results) < 2000):
        with short_lived_stream() as stream:
            torch.cuda._sleep(100_000)
            held, address = sync_of(stream), stream.cuda_stream
            again += address in memory
            same += memory.get(address) == held
            memory[address] = held
            results.append(job())
    # The driver gives addresses of destroyed streams to new ones, and what was freed of their memory now and then, too.
    assert again > 10 and same <= again // 2, "new streams have the memory of destroyed ones"
    torch.cuda.synchronize()
    for got in results:
        same_bits(got, want, "a stream that was destroyed")


def test_memory_of_destroyed_streams_is_freed():
    usual = sync_of(torch.cuda.current_stream())
    free = torch.cuda.mem_get_info()[0]
    for _ in range(1000):
        with short_lived_stream() as stream:
            sync_of(stream)
    assert free - torch.cuda.mem_get_info()[0] < 32 << 20  # 1000 blocks are 250 MiB
    assert sync_of(torch.cuda.current_stream()) == usual


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_memory_of_destroyed_streams_is_freed_during_a_capture(mode):
    x = random((1, 64, 192, 192), HALF, 0)
    warmed_up(lambda: nft.group_norm(x, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        for _ in range(100):
            with short_lived_stream() as stream:
                sync_of(stream)
        y = nft.group_norm(x, 1)
    graph.replay()
    assert torch.equal(y, nft.group_norm(x, 1))


@pytest.mark.parametrize("name", [*WHOLE_GRID, "group norm, clusters"])
@each_layout
def test_two_streams_at_once(name, layout):
    """Kernels whose blocks fill the GPU and wait for one another, in two streams, forward and backward."""
    jobs = [Job(name, layout=layout, seed=10 * i) for i in range(2)]
    wants = [job() for job in jobs]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in jobs], [[], []]
    for _ in range(40):
        for i, job in enumerate(jobs):
            with torch.cuda.stream(streams[i]):
                results[i].append(job())
    torch.cuda.synchronize()
    for i, want in enumerate(wants):
        for got in results[i]:
            same_bits(got, want, name)


@pytest.mark.parametrize("name", WHOLE_GRID)
@each_layout
def test_graph_beside_eager_calls_and_another_graph(name, layout):
    jobs = [Job(name, layout=layout, seed=10 * i) for i in range(3)]
    wants = [copies(job()) for job in jobs]
    streams = [torch.cuda.Stream() for _ in jobs]
    warmed_up(jobs[0])
    # Both are captured on the same stream; each is replayed on one of its own, and a third has eager calls.
    graphs = [captured(jobs[i], stream=streams[2]) for i in range(2)]
    torch.cuda.synchronize()
    eager = []
    for k in range(60):
        for i, (graph, _) in enumerate(graphs):
            with torch.cuda.stream(streams[i]):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager.append(jobs[2]())
        if k % 20 == 19:
            torch.cuda.synchronize()
            for i, (_, outputs) in enumerate(graphs):
                same_bits(outputs, wants[i], f"graph {i}")
                for output in outputs:
                    output.fill_(7)
            torch.cuda.synchronize()
    for got in eager:
        same_bits(got, wants[2], "eager")


def test_one_graph_of_two_streams():
    """A capture that forks: both branches run at once, and share nothing."""
    jobs = [Job(WHOLE_GRID[0], seed=10 * i) for i in range(2)]
    wants = [copies(job()) for job in jobs]
    for job in jobs:
        warmed_up(job)
    side = torch.cuda.Stream()

    def both():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = jobs[1]()
        first = jobs[0]()
        torch.cuda.current_stream().wait_stream(side)
        return first, second

    graph, outputs = captured(both)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(outputs, wants):
        same_bits(got, want)


def test_backward_of_another_streams_forward():
    job = Job(WHOLE_GRID[0])
    want = job()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(stream):
            y = job.call(job.x, job.weight, job.bias)
        torch.cuda.current_stream().wait_stream(stream)
        got = (y.detach(), *torch.autograd.grad(y, (job.x, job.weight, job.bias), job.dy))
        torch.cuda.synchronize()
        same_bits(got, want)


@pytest.mark.parametrize("own_streams", [True, False])
def test_threads(own_streams):
    names = [*CALLS][:8]
    jobs = [Job(name, seed=i) for i, name in enumerate(names)]
    wants = [job() for job in jobs]
    torch.cuda.synchronize()
    failures = []

    def work(i):
        try:
            stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                for _ in range(30):
                    got = jobs[i]()
                    stream.synchronize()
                    same_bits(got, wants[i], names[i])
        except BaseException as error:  # noqa: BLE001: reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# ---- autocast and scaling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@each_layout
def test_autocast(dtype, layout):
    """The convolution's 16 bits go straight in beside f32 parameters, and the bits of the call without autocast come
    out; the flag gives stock's f32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nft.GroupNorm(4, 32, activation="silu"),
                          nft.BatchNorm2d(32, activation="relu")).cuda().to(memory_format=LAYOUTS[layout])
    x = random((4, 8, 16, 16), SINGLE, 0, layout)
    seen = {}
    for i, layer in enumerate(model):
        layer.register_forward_hook(lambda module, args, y, i=i: seen.__setitem__(i, (args[0], y)))
    with torch.autocast("cuda", dtype):
        y = model(x)
    assert all(value.dtype == dtype for value in seen[1] + seen[2])
    assert torch.equal(seen[1][1], nft.group_norm(seen[1][0], 4, model[1].weight, model[1].bias, activation="silu"))
    y.float().square().mean().backward()
    assert all(p.grad.dtype == SINGLE and torch.isfinite(p.grad).all() for p in model.parameters())
    with torch.autocast("cuda", dtype):
        assert F.group_norm(seen[1][0], 4).dtype == SINGLE
        before = nft.autocast_to_float32(True)
        try:
            assert nft.group_norm(seen[1][0], 4).dtype == SINGLE
        finally:
            nft.autocast_to_float32(before)


def test_scaled_training():
    """GradScaler over f16: the loss falls as stock's does, and a step with an infinite gradient is left out."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(3, 16, 3), nft.BatchNorm2d(16, activation="relu"), nn.Conv2d(16, 16, 3),
                         nft.GroupNorm(4, 16, activation="silu"), nn.Flatten(), nn.Linear(16 * 64, 4)).cuda()
    x, target = random((32, 3, 12, 12), SINGLE, 0), torch.arange(32, device="cuda") % 4
    losses = []
    scaler, optimizer = torch.amp.GradScaler("cuda", init_scale=1024.0), torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", HALF):
            loss = F.cross_entropy(ours(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() == 1024.0 and losses[-1] < 0.1 * losses[0], losses
    before = copies(ours.parameters())
    with torch.autocast("cuda", HALF):
        loss = F.cross_entropy(ours(x), target) * float("inf")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0 and all(torch.equal(a, b) for a, b in zip(before, ours.parameters()))


# ---- the host -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def waiting_is_an_error():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_call
@each_layout
def test_the_host_does_not_wait(name, layout):
    job = Job(name, layout=layout)
    job()
    with waiting_is_an_error():
        job()


def test_layers_do_not_wait():
    layers = [nft.GroupNorm(4, 32, activation="silu"), nft.BatchNorm2d(32, activation="relu"),
              nft.InstanceNorm2d(32, affine=True, track_running_stats=True), nft.SyncBatchNorm(32),
              nft.ChannelAffine(32)]
    x = random((4, 32, 16, 16), SINGLE, 0).requires_grad_()
    model = nn.Sequential(*layers).cuda()

    def step():
        model.train()
        y = model(x)
        y.backward(torch.ones_like(y))
        with torch.no_grad():
            model.eval()
            model(x)

    step()
    with waiting_is_an_error():
        step()


def test_the_host_runs_ahead():
    """Calls return while the device is busy with something long."""
    job = Job("group norm, clusters")
    job()
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(2_000_000_000)  # about a second
    for _ in range(10):
        job()
    enqueued = time.perf_counter() - start
    torch.cuda.synchronize()
    finished = time.perf_counter() - start
    assert enqueued < 0.5 * finished, (enqueued, finished)


def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        for name, layout in itertools.product(CALLS, LAYOUTS):
            if name == "group norm, all":  # its own indexing has a backward that is not
                continue
            job = Job(name, layout=layout)
            same_bits(job(), job(), name)
    finally:
        torch.use_deterministic_algorithms(False)


# ---- kernels --------------------------------------------------------------------------------------------------------


# Events of the profiler itself.
OVERHEAD = ("Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource", "Lazy Function Loading",
            "Command Buffer Full", "Unrecognized")


def kernels_of(function):
    """Names of what ran on the device: kernels, copies, fills."""
    function()
    torch.cuda.synchronize()
    for _ in range(3):  # a profiler that starts may miss what comes first
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                                torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        names = [event.name for event in profile.events()
                 if event.device_type == torch.autograd.DeviceType.CUDA and event.name not in OVERHEAD]
        if names:
            return names
    raise AssertionError("the profiler shows nothing on the device")


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, SINGLE], ids=str)
@each_layout
@pytest.mark.parametrize("operator, shape", [("group norm", (2, 320, 64, 64)), ("group norm", (8, 512, 8, 8)),
                                             ("batch norm", (32, 64, 28, 28))], ids=str)
def test_kernels(operator, shape, layout, dtype):
    """norm + activation: one kernel forward, at most three backward, and nothing beside them, of the functional layers,
    in eager mode and under torch.compile."""
    x, dy = random(shape, dtype, 0, layout).requires_grad_(), random(shape, dtype, 1, layout)
    weight, bias = (random(shape[1:2], SINGLE, i).requires_grad_() for i in (2, 3))

    def forward(x, weight, bias):
        if operator == "group norm":
            return nft.group_norm(x, 32, weight, bias, activation="silu")
        return nft.batch_norm(x, None, None, weight, bias, True, activation="relu")

    names = kernels_of(lambda: forward(x, weight, bias))
    assert len(names) == 1 and names[0].startswith("normfuse_"), names
    with torch.no_grad():
        names = kernels_of(lambda: forward(x, weight, bias))
    assert len(names) == 1 and names[0].startswith("normfuse_"), names
    y = forward(x, weight, bias)
    names = kernels_of(lambda: torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True))
    assert len(names) <= 3 and all(name.startswith("normfuse_") for name in names), names


def test_kernels_of_a_compiled_step():
    torch._dynamo.reset()
    x, dy = random((2, 320, 64, 64), HALF, 0).requires_grad_(), random((2, 320, 64, 64), HALF, 1)
    weight, bias = (random((320,), SINGLE, i).requires_grad_() for i in (2, 3))
    compiled = torch.compile(lambda x, w, b: nft.group_norm(x, 32, w, b, activation="silu"), fullgraph=True)
    names = kernels_of(lambda: torch.autograd.grad(compiled(x, weight, bias), (x, weight, bias), dy))
    assert len(names) <= 4 and all(name.startswith("normfuse_") for name in names), names


def test_kernels_of_a_converted_model():
    """A block's norm, activation and addition are one kernel."""
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.GroupNorm(8, 64), nn.SiLU()

        def forward(self, x):
            return self.act(self.norm(x) + x)

    model = Block().cuda().half().to(memory_format=torch.channels_last)
    x = random((2, 64, 32, 32), HALF, 0, "channels-last")
    stock = copy.deepcopy(model).double()
    assert nft.convert(model).folded
    with torch.no_grad():
        names = kernels_of(lambda: model(x))
        assert len(names) == 1 and names[0].startswith("normfuse_"), names
        # Parameters, statistics and the result have 11 and more bits; z is below 8: a few units of 2^-11 of it.
        assert (model(x).double() - stock(x.double())).abs().max() < 8 * 4 * 2.0**-11


def test_kernels_under_install():
    """Stock's calls, both directions: ours beside the fill of dy and the mean's cast to stock's type, no copies."""
    x = random((8, 32, 28, 28), SINGLE, 0).requires_grad_()
    weight, bias = (random((32,), SINGLE, i).requires_grad_() for i in (2, 3))
    calls = {"group": lambda: F.group_norm(x, 4, weight, bias),
             "batch": lambda: F.batch_norm(x, None, None, weight, bias, True)}
    for name, call in calls.items():
        def step():
            return torch.autograd.grad(call(), (x, weight, bias), torch.ones_like(x))
        with nft.install():
            names = kernels_of(step)
        assert 2 <= sum(n.startswith("normfuse_") for n in names) <= 4 and len(names) <= 6, (name, names)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow():
    """Thousands of calls and refusals, copied inputs, scratch memory and optional arguments among them."""
    job, wide = Job("group norm, all"), Job("group norm, clusters", layout="channels-last")
    transposed = random((4, 32, 16, 16), HALF, 0).transpose(2, 3).requires_grad_()
    weight = job.weight.detach()

    def once():
        job()
        wide()
        torch.autograd.grad(nft.group_norm(transposed, 4, weight), transposed, torch.ones_like(transposed))
        with pytest.raises((RuntimeError, ValueError)):
            nft.group_norm(transposed, 5, weight, pre_add=transposed)

    for _ in range(50):
        once()
    torch.cuda.synchronize()
    gc.collect()
    before, resident_before = torch.cuda.memory_allocated(), resident()
    for _ in range(3000):
        once()
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    # Handles of 100 bytes of 30 tensors a call would be 9 MB.
    assert resident() - resident_before < 4 << 20


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@each_layout
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_peak_memory(dtype, layout):
    """norm + SiLU beside eager's, in units of x: what is kept for the backward, and the most of both directions where
    the result is not kept."""
    shape = (4, 64, 256, 256)
    x, dy = random(shape, dtype, 0, layout).requires_grad_(), random(shape, dtype, 1, layout)
    weight, bias = (random((64,), dtype, i).requires_grad_() for i in (2, 3))
    unit = x.numel() * x.element_size()

    def measure(function):
        kept, peak = [], []
        for _ in range(2):
            torch.cuda.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            edge = torch.autograd.graph.get_gradient_edge(function())
            kept.append((torch.cuda.memory_allocated() - base) / unit)
            gradients = torch.autograd.grad(edge, (x, weight, bias), dy)
            del edge, gradients
            peak.append((torch.cuda.max_memory_allocated() - base) / unit)
        return kept[-1], peak[-1]

    ours = measure(lambda: nft.group_norm(x, 8, weight, bias, activation="silu"))
    stock = measure(lambda: F.silu(F.group_norm(x, 8, weight, bias)))
    assert ours[0] < 0.01 and ours[1] <= 0.6 * stock[1], (ours, stock)


@each_layout
@pytest.mark.parametrize("adds", [False, True])
def test_memory_of_an_expanded_gradient(layout, adds):
    """That of an average over positions: it is copied to x's layout, and a gradient takes the copy's place."""
    x, addend = (random((4, 64, 256, 256), HALF, i, layout).requires_grad_() for i in range(2))
    dy = random((4, 64, 1, 1), HALF, 2, layout).expand_as(x)
    inputs = [x, addend] if adds else [x]
    for _ in range(2):
        y = nft.group_norm(x, 8, activation="relu", post_add=addend if adds else None)
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients = torch.autograd.grad(y, inputs, dy)
        del y, gradients
    assert (torch.cuda.max_memory_allocated() - base) / (x.numel() * x.element_size()) < len(inputs) + 0.1


# ---- devices --------------------------------------------------------------------------------------------------------


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_devices
@each_call
def test_the_device_that_is_not_current(name):
    first, second = Job(name, device="cuda:0"), Job(name, device="cuda:1")
    assert torch.cuda.current_device() == 0
    got = second()
    assert all(t.device == torch.device("cuda:1") for t in got) and torch.cuda.current_device() == 0
    same_bits([t.to("cuda:0") for t in got], first(), name)


@two_devices
def test_devices_at_once():
    jobs = [Job(WHOLE_GRID[0], seed=i, device=f"cuda:{i}") for i in range(2)]
    wants = [copies(job()) for job in jobs]
    results = [[job() for job in jobs] for _ in range(30)]
    for got in results:
        for i, want in enumerate(wants):
            same_bits(got[i], want)


@two_devices
def test_graph_of_the_device_that_is_not_current():
    job = Job(WHOLE_GRID[0], device="cuda:1")
    want = copies(job())
    with torch.cuda.device(1):
        warmed_up(job)
        graph, outputs = captured(job)
    graph.replay()
    torch.cuda.synchronize(1)
    same_bits(outputs, want)


@two_devices
def test_arrays_on_the_device_that_is_not_current():
    x = random((2, 8, 16, 16), SINGLE, 0, device="cuda:1")
    y = normfuse.group_norm(x, 2)
    assert y.device == x.device
    torch.cuda.synchronize(1)
    assert torch.equal(y, nft.group_norm(x, 2))


# ---- arrays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, groups", [("group norm, whole grid", 1), ("group norm, clusters", 32)])
@each_layout
def test_arrays_have_the_layers_bits(name, groups, layout):
    """Through DLPack, with sync memory as the operators have it, in a stream of its own."""
    job = Job(name, layout=layout)
    want = job()
    torch.cuda.synchronize()
    x, weight, bias = (t.detach() for t in (job.x, job.weight, job.bias))
    with torch.cuda.stream(torch.cuda.Stream()):
        y, mean, rstd = normfuse.group_norm(x, groups, weight, bias, activation="silu", return_statistics=True)
        gradients = normfuse.group_norm_backward(job.dy, x, mean, rstd, groups, weight, bias, activation="silu")
        torch.cuda.current_stream().synchronize()
    same_bits((y, gradients.dx, gradients.dweight, gradients.dbias), want, name)


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    x, dy = random((1, 64, 192, 192), SINGLE, 0), random((1, 64, 192, 192), SINGLE, 1)
    want = nft.group_norm(x, 1, activation="silu")
    torch.cuda.synchronize()
    x, dy = cupy.from_dlpack(x), cupy.from_dlpack(dy)
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.ptds):
        with stream:
            y, mean, rstd = normfuse.group_norm(x, 1, activation="silu", return_statistics=True)
            gradients = normfuse.group_norm_backward(dy, x, mean, rstd, 1, activation="silu")
            stream.synchronize()
        assert isinstance(y, cupy.ndarray) and isinstance(gradients.dx, cupy.ndarray)
        # Without sync memory, as in the per-thread stream, the sums may be in another order.
        torch.testing.assert_close(torch.from_dlpack(y), want, rtol=1e-5, atol=1e-5)
    assert mean.dtype == "float64" and cupy.isfinite(gradients.dx).all()


def test_jax_arrays():
    """In a process of its own: JAX would take the device's memory. Outputs are given, since JAX's cannot be written;
    scratch is the driver's, which has all of it back afterwards."""
    pytest.importorskip("jax")
    succeeds("""
import numpy, os
os.environ.pop("JAX_PLATFORMS", None)
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import torch
try:
    import jax
    gpu = jax.devices("cuda")[0]
except RuntimeError as error:
    print(f"{error}: JAX on CUDA is not here")
    raise SystemExit
import normfuse, normfuse.torch as nft
from normfuse import _library

taken, take = [], _library.library.normfuse_stream_scratch
def recorded(device, stream, size, memory):
    take(device, stream, size, memory)
    taken.append(memory.value)
_library.library.normfuse_stream_scratch = recorded

for shape, groups in (((2, 8, 16, 16), 2), ((1, 64, 192, 192), 1)):
    values = numpy.random.default_rng(0).normal(size=shape).astype("f4")
    x, dy = (jax.device_put(v, gpu) for v in (values, values[..., ::-1].copy()))
    out, dx = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda")
    mean, rstd = (torch.empty(shape[0], groups, dtype=t, device="cuda") for t in (torch.float64, torch.float32))
    given = normfuse.group_norm(x, groups, activation="silu", out=out, out_mean=mean, out_rstd=rstd)
    assert given[0] is out
    normfuse.group_norm_backward(dy, x, mean, rstd, groups, activation="silu", dx=dx)
    torch.cuda.synchronize()
    leaf = torch.from_numpy(values).cuda().requires_grad_()
    want = nft.group_norm(leaf, groups, activation="silu")
    assert torch.equal(out, want), shape
    want.backward(torch.from_numpy(numpy.asarray(dy)).cuda())
    assert torch.equal(dx, leaf.grad), shape
assert taken and all(taken)
for arguments, words in (({}, "are not made"), ({"out": x}, "read-only")):
    try:
        normfuse.group_norm(x, groups, **arguments)
    except (TypeError, ValueError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
print("done")
""")

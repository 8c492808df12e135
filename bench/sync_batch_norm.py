#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times nft.SyncBatchNorm over processes beside nft.BatchNorm2d, which sends nothing, and on CUDA beside
torch.nn.SyncBatchNorm: f32, contiguous, in training, the forward and the forward with its backward.

    python bench/sync_batch_norm.py [--device cuda] [--processes 2] [SHAPE ...] >bench/results/DATE-MACHINE-sync.jsonl
    python bench/sync_batch_norm.py --host >bench/results/DATE-MACHINE-sync-host.jsonl

On CUDA each process has a GPU, over NCCL; on the CPU gloo. Layers take turns. A time is a share of CALLS calls in a row,
which all processes begin together, until the device has done the last; rows have the median of process 0. How "graph":
the calls are replayed from one CUDA graph, collectives included. added_us is what the layer takes beyond
nft.BatchNorm2d. Before, all processes normalize the same batch: `failed` is in rows of layers whose gradients are not
those of nft.BatchNorm2d, and the exit status is 1.

With --host it times what the host does around its collectives: one process on the CPU, a tiny batch, and a group of two
whose collectives send nothing and give nothing ("fake"), so results are not compared.

Rows, JSON a line, go to standard output."""
import argparse
import datetime
import json
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import normfuse.torch as nft  # noqa: E402

SHAPES = ["8x64x32x32", "32x256x14x14", "64x256x56x56"]
HOST_SHAPE = "2x8x4x4"
CALLS = 20


def calls_of(layers, shape, device):
    """By direction and layer, a call without arguments."""
    x = torch.randn(shape, device=device).requires_grad_()
    dy = torch.randn(shape, device=device)

    def step(layer):
        return torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], dy)
    return {"forward": {name: lambda layer=layer: layer(x) for name, layer in layers.items()},
            "step": {name: lambda layer=layer: step(layer) for name, layer in layers.items()}}


def captured(call):
    """Replays of a graph of CALLS calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL's thread asks for events
        for _ in range(CALLS):
            call()
    return graph


def many(call):
    for _ in range(CALLS):
        call()


def in_turn(runs, rounds, device):
    """Microseconds of a call, by layer: the median over rounds."""
    drain = torch.cuda.synchronize if device == "cuda" else lambda: None
    meet = torch.zeros(1, device=device)
    times = {name: [] for name in runs}
    for i in range(-3, rounds):  # the first ones warm up
        for name, run in runs.items():
            dist.all_reduce(meet)
            drain()
            start = time.perf_counter()
            run()
            drain()
            if i >= 0:
                times[name].append(1e6 * (time.perf_counter() - start) / CALLS)
    return {name: statistics.median(each) for name, each in times.items()}


def compare(layers, shape, device):
    """The faults of a layer, by its name."""
    torch.manual_seed(0)  # the same in all processes
    failed = {}
    results = {name: call() for name, call in calls_of(layers, shape, device)["step"].items()}
    local = results.pop("local")
    for name, gradients in results.items():
        for got, want in zip(gradients, local):
            error = ((got - want).norm() / want.norm()).item()
            if not error <= 1e-5:
                failed[name] = f"differs from one process by {error:.2g}"
    return failed


def work(rank, words, folder):
    device = words.device
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    if words.host:
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=words.processes)
    else:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meet", rank=rank,
                                world_size=words.processes, timeout=datetime.timedelta(seconds=60))
    common = {"processes": words.processes, "backend": dist.get_backend(), "torch": torch.__version__,
              "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
    if device == "cuda":
        common.update(gpu=torch.cuda.get_device_name(), nccl=".".join(map(str, torch.cuda.nccl.version())))
    good = True
    for text in words.shapes:
        shape = [int(size) for size in text.split("x")]
        layers = {"local": nft.BatchNorm2d(shape[1]), "sync": nft.SyncBatchNorm(shape[1])}
        if device == "cuda":
            layers["stock"] = torch.nn.SyncBatchNorm(shape[1])
        layers = {name: layer.to(device) for name, layer in layers.items()}
        failed = {} if words.host else compare(layers, shape, device)
        good = good and not failed
        for direction, calls in calls_of(layers, shape, device).items():
            for how in ("eager", "graph")[:1 + (device == "cuda")]:
                if how == "graph":
                    calls = {name: call for name, call in calls.items() if name != "stock"}
                    graphs = {name: captured(call) for name, call in calls.items()}
                    runs = {name: graph.replay for name, graph in graphs.items()}
                else:
                    graphs, runs = {}, {name: lambda call=call: many(call) for name, call in calls.items()}
                times = in_turn(runs, words.rounds, device)
                runs.clear(), graphs.clear()  # before their communicator
                row = {"shape": text, "direction": direction, "how": how,
                       **{f"{name}_us": round(us, 2) for name, us in times.items()},
                       "added_us": round(times["sync"] - times["local"], 2),
                       "of_local": round(times["sync"] / times["local"], 3), **({"failed": failed} if failed else {})}
                if rank == 0:
                    print(json.dumps({**row, **common}), flush=True)
    dist.destroy_process_group()
    sys.exit(0 if good else 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE",
                        help=f"[N, C, H, W] of each process; default: {' '.join(SHAPES)}; with --host {HOST_SHAPE}")
    parser.add_argument("--host", action="store_true", help="the host's time alone, over collectives that send nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    words = parser.parse_args()
    words.shapes = words.shapes or ([HOST_SHAPE] if words.host else SHAPES)
    if words.host and words.device != "cpu":
        parser.error("--host is of the CPU")
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(work, (words, folder), 1 if words.host else words.processes)
        except torch.multiprocessing.ProcessExitedException as error:
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

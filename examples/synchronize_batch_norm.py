# SPDX-License-Identifier: MIT
"""Batch norm over processes: each of them trains on a part of every batch, parts of different sizes and even none, and
all end with the weights and running statistics of one process that has the whole batch.

    python examples/synchronize_batch_norm.py [--processes 3]

needs torch with gloo, and normfuse. (On GPUs wrap the model in DistributedDataParallel, which averages gradients. On the
CPU it refuses every SyncBatchNorm, so the gradients are added up by hand here.)
"""
import argparse
import tempfile

import normfuse.torch as nft
import torch
import torch.distributed as dist
from torch import nn

SAMPLES, STEPS = 12, 5


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
                         nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)).double()


def train(model, part, synchronize):
    """Some steps on the samples `part` of each batch. The loss is a sum, so the gradients of parts add up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(SAMPLES, 3, 10, 10, dtype=torch.float64, generator=data)
        labels = torch.randint(2, (SAMPLES,), generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), labels[part], reduction="sum").backward()
        if synchronize:
            for p in model.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()


def work(rank, processes, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}/meet", rank=rank, world_size=processes)
    torch.set_num_threads(1)
    # The last process gets nothing, the first what is left over.
    share = SAMPLES // max(processes - 1, 1)
    ends = [SAMPLES - share * max(processes - 2 - i, 0) for i in range(processes)]
    part = slice(0 if rank == 0 else ends[rank - 1], ends[rank])

    model = nft.SyncBatchNorm.convert_sync_batchnorm(network())
    report = nft.convert(model)
    train(model, part, synchronize=True)
    alone = network()
    train(alone, slice(None), synchronize=False)
    worst = max((a.double() - b.double()).abs().max().item()
                for a, b in zip(model.state_dict().values(), alone.state_dict().values()))
    if rank == 0:
        print(report)
    print(f"process {rank}, samples {part.start} to {part.stop}: differs from one process by {worst:.2g}", flush=True)
    dist.destroy_process_group()
    if worst > 1e-10:
        raise SystemExit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=3)
    processes = parser.parse_args().processes
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.spawn(work, (processes, meeting), processes)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: MIT
"""Trains a small convolutional network with group norm on scikit-learn's handwritten digits (1797 images of 8 x 8,
which come with the package), once with torch.nn.GroupNorm and once with normfuse's from the same weights, and compares.

    python examples/train_digits.py [--epochs 8] [--seeds 3]

needs torch, scikit-learn and normfuse. A line for each seed; the mean accuracies must agree within what seeds differ
by.
"""
import argparse
import copy
import statistics
import time

import normfuse.torch as nft
import torch
from sklearn.datasets import load_digits
from torch import nn


def network():
    def block(inputs, outputs, stride):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(8, outputs), nn.SiLU())

    return nn.Sequential(block(1, 32, 1), block(32, 64, 2), block(64, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(64, 10))


def train(model, images, labels, held_out, epochs, seed):
    """Accuracy on held_out and seconds."""
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=order).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        right = model(held_out[0]).argmax(1) == held_out[1]
    return right.double().mean().item(), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    images, labels, held_out = images[:1400], labels[:1400], (images[1400:], labels[1400:])

    accuracies = []
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        stock = network()
        ours = copy.deepcopy(stock)
        report = nft.convert(ours)
        if seed == 0:
            print(report)
        (a, a_seconds), (b, b_seconds) = (train(m, images, labels, held_out, arguments.epochs, seed)
                                          for m in (stock, ours))
        print(f"seed {seed}: stock {a:.4f} in {a_seconds:.1f} s, normfuse {b:.4f} in {b_seconds:.1f} s")
        accuracies.append((a, b))
    stock_mean, our_mean = (statistics.fmean(column) for column in zip(*accuracies))
    print(f"mean: stock {stock_mean:.4f}, normfuse {our_mean:.4f}")
    # 397 images are held out: one of them is 0.25 points, and two trainings that round differently end some apart.
    if abs(stock_mean - our_mean) > 0.02:
        raise SystemExit("the accuracies differ")


if __name__ == "__main__":
    main()

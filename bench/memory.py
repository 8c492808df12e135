#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Memory of norm and activation, forward and backward, and of whole training steps: normfuse beside stock.

    python3 bench/memory.py [--json [FILE]] [--only layers|models] [--tiny]

saved is what autograd keeps for the backward, inputs included, parameters left out. peak (CUDA) is the most
that the caching allocator held while one forward and backward ran: for layers, above their input and the gradient of
their output; for models (those of bench/models.py, with diffusers and timm), with the model and its inputs.

One layer alone holds its output and its input's gradient at the end whatever it does, so at best it takes two thirds of
what stock takes. A stack of four shows what every further layer adds. Rows: case, layers (of the stack), shape, dtype,
layout, x_mib, stock_saved_mib, saved_mib, stock_peak_mib, peak_mib, saved_ratio, peak_ratio, torch, gpu or cpu, date;
peaks are null on the CPU."""
from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import sys
import traceback
from typing import Any, Callable, Optional

import models
import torch
from models import error_text, processor
from torch import Tensor, nn

import normfuse.torch as nft

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# case: (norm of so many channels, activation, shape, dtype, layout, autocast). Under autocast parameters are f32.
LAYERS: dict[str, tuple[Callable[[int], nn.Module], type, tuple[int, ...], torch.dtype, str, bool]] = {
    "group norm + silu": (lambda c: nn.GroupNorm(32, c), nn.SiLU, (8, 320, 64, 64), F16, "nchw", False),
    "group norm + silu, channels-last": (lambda c: nn.GroupNorm(32, c), nn.SiLU, (8, 320, 64, 64), F16, "nhwc", False),
    "group norm + silu, large": (lambda c: nn.GroupNorm(32, c), nn.SiLU, (1, 128, 512, 512), F32, "nchw", False),
    "group norm + silu, autocast": (lambda c: nn.GroupNorm(32, c), nn.SiLU, (8, 320, 64, 64), BF16, "nchw", True),
    "batch norm + relu": (nn.BatchNorm2d, nn.ReLU, (32, 256, 56, 56), F16, "nchw", False),
    "batch norm + relu, channels-last": (nn.BatchNorm2d, nn.ReLU, (32, 256, 56, 56), F16, "nhwc", False),
    "instance norm + leaky_relu": (lambda c: nn.InstanceNorm3d(c, affine=True), nn.LeakyReLU, (2, 32, 64, 64, 64), F16,
                                   "nchw", False),
}
# case: a task of bench/models.py
MODELS = {
    "cuda": {"UNet training step": models.EXTRA["cuda"]["unet-train"],
             "ResNet-50 GroupNorm training step": models.MODELS["cuda"]["resnet50-gn-train"],
             "ResNet-50 BatchNorm training step": models.MODELS["cuda"]["resnet50-bn-train"]},
    "cpu": {"UNet training step": models.MODELS["cpu"]["unet-train"],
            "ResNet-50 GroupNorm training step": models.EXTRA["cpu"]["resnet50-gn-train-bf16"]},
}


class Saved:
    """Counts the bytes of the storages that autograd saves, once each, but for those of the given tensors."""

    def __init__(self, known: list[Tensor]) -> None:
        self.storages: dict[int, Tensor] = {}
        self.known = {t.untyped_storage().data_ptr() for t in known}

    def pack(self, tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self.known:
            self.storages[pointer] = tensor  # kept, so that nothing else comes to lie at its address
        return tensor

    def mib(self) -> float:
        return sum(t.untyped_storage().nbytes() for t in self.storages.values()) / 2**20


def saved_mib(forward: Callable[[], Tensor], known: list[Tensor]) -> float:
    saved = Saved(known)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        output = forward()
    result = saved.mib()
    del output
    return result


def layer_case(name: str, layers: int, device: str, tiny: bool) -> dict[str, Any]:
    norm, activation, shape, dtype, layout, autocast = LAYERS[name]
    if tiny:
        shape = (2, 32, *[8] * (len(shape) - 2))
    row: dict[str, Any] = {"case": name, "layers": layers, "shape": "x".join(map(str, shape)),
                           "dtype": str(dtype).removeprefix("torch.") + (" autocast" if autocast else ""),
                           "layout": layout}
    stock = nn.Sequential(*(nn.Sequential(norm(shape[1]), activation()) for _ in range(layers)))
    stock = stock.to(device, F32 if autocast else dtype)
    ours = copy.deepcopy(stock)
    report = nft.convert(ours)
    if len(report.folded) != layers:
        raise RuntimeError(f"not all was folded:\n{report}")
    x = torch.randn(shape, device=device, dtype=dtype)
    if layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    row["x_mib"] = x.numel() * x.element_size() / 2**20
    x.requires_grad_()
    for prefix, model in (("stock_", stock), ("", ours)):
        def forward() -> Tensor:
            with torch.autocast(device, dtype, enabled=autocast):
                return model(x)

        dy = torch.randn_like(forward())
        parameters = list(model.parameters())
        row[prefix + "saved_mib"] = saved_mib(forward, parameters)

        def step() -> None:
            forward().backward(dy)

        def clear() -> None:
            x.grad = None
            for parameter in parameters:
                parameter.grad = None

        step()
        clear()
        row[prefix + "peak_mib"] = None
        if device == "cuda":
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            row[prefix + "peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            clear()
        del dy
    return row


def model_case(name: str, device: str, tiny: bool) -> dict[str, Any]:
    package, make = MODELS[device][name]
    torch.manual_seed(0)
    task = make(device, tiny)
    row: dict[str, Any] = {"case": name, "layers": None, "dtype": str(task.dtype).removeprefix("torch."),
                           "shape": "x".join(map(str, task.inputs[0].shape)), "layout": task.layout,
                           "x_mib": task.inputs[0].numel() * task.inputs[0].element_size() / 2**20}
    for prefix in ("stock_", ""):
        if not prefix:
            nft.convert(task.model)

        def forward() -> Tensor:
            with task.context():
                return task.call(task.model, *task.inputs)

        row[prefix + "saved_mib"] = saved_mib(forward, list(task.model.parameters()))
        step = models.one_call(task, task.model)
        row[prefix + "peak_mib"] = None
        if device == "cuda":
            step()
            row[prefix + "peak_mib"] = models.peak_gib(task, step) * 2**10
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("layers", "models"))
    parser.add_argument("--tiny", action="store_true", help="small sizes that measure nothing: a dry run")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="rows, on standard output or at the end "
                        "of FILE; the table then goes to standard error or output")
    arguments = parser.parse_args()
    device = arguments.device
    torch.backends.cudnn.benchmark = True
    cases: list[tuple[str, Optional[int]]] = []
    if arguments.only != "models":
        cases += [(name, layers) for name in LAYERS for layers in (1, 4)]
    if arguments.only != "layers":
        cases += [(name, None) for name in MODELS[device]]
    common = {"device": device, "torch": torch.__version__, "tiny": arguments.tiny,
              **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {"cpu": processor()})}
    rows, failures = [], []
    for name, layers in cases:
        try:
            row = model_case(name, device, arguments.tiny) if layers is None else \
                layer_case(name, layers, device, arguments.tiny)
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{name}: {error_text(error)}")
            continue
        for kind in ("saved", "peak"):
            ours, stock = row[f"{kind}_mib"], row[f"stock_{kind}_mib"]
            row[f"{kind}_ratio"] = round(ours / stock, 4) if stock else None
        rows.append({**{key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()},
                     **common, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")})
    if arguments.json:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if arguments.json == "-":
            print(text, end="", flush=True)
        else:
            with open(arguments.json, "a") as file:
                file.write(text)
    out = sys.stderr if arguments.json == "-" else sys.stdout
    print(f"{'MiB':42} {'saved: stock':>12} {'normfuse':>9} {'ratio':>6} {'peak: stock':>12} {'normfuse':>9} "
          f"{'ratio':>6}", file=out)
    for row in rows:
        name = row["case"] + ("" if row["layers"] in (1, None) else f", {row['layers']} of them")
        numbers = [row["stock_saved_mib"], row["saved_mib"], row["saved_ratio"], row["stock_peak_mib"], row["peak_mib"],
                   row["peak_ratio"]]
        words = ["-" if n is None else f"{n:.3f}" if i % 3 == 2 else f"{n:.1f}" for i, n in enumerate(numbers)]
        print(f"{name:42} {words[0]:>12} {words[1]:>9} {words[2]:>6} {words[3]:>12} {words[4]:>9} {words[5]:>6}",
              file=out)
    for failure in failures:
        print(f"FAILED: {failure}", file=out)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

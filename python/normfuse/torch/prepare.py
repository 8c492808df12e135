# SPDX-License-Identifier: MIT
"""Compiles the CUDA kernels of a model ahead of its first step."""
from __future__ import annotations

import sys
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from . import _checks, _native
from .._library import PROGRESS, call as check, library

__all__ = ["prepare"]


def prepare(model: nn.Module, *inputs: Any, progress: Optional[bool] = None, **keywords: Any) -> int:
    """Compiles and loads the CUDA kernels of normfuse that ``model(*inputs, **keywords)`` needs, and where the model is
    in training and gradients are enabled those of its backward. Under ``torch.no_grad()`` it prepares steps that run
    there: a forward that keeps statistics for a backward is another kernel. Nothing is computed: the forward runs on
    fake tensors, which have shapes and no values, so parameters, buffers and running statistics keep theirs. Kernels
    are compiled side by side, on as many threads as normfuse uses, and kept on disk for other processes.

    inputs, keywords  as in a step of the model; tensors may be fake already
    progress          whether a bar is shown on standard error; None: where that is a terminal

    Returns how many kernels were compiled or read from disk now: 0 for a model without layers of normfuse on CUDA.
    Raises what the model's forward raises on fake tensors, such as where its control flow depends on values, and
    RuntimeError where the kernels cannot be compiled."""
    _checks.module(model, "prepare")
    preparation = _native.preparation
    if preparation.devices is not None:
        raise RuntimeError("prepare is called inside of prepare")
    preparation.devices = set()
    try:
        _step(model, inputs, keywords)
        devices = preparation.devices
    finally:
        preparation.devices = None
    shown = sys.stderr.isatty() if progress is None else progress
    return sum(_compile(device, shown) for device in sorted(devices))


def _step(model: nn.Module, inputs: Any, keywords: Any) -> None:
    """A forward, and in training a backward, on fake tensors."""
    named = dict(model.named_parameters())
    named.update(model.named_buffers())
    mode = detect_fake_mode((list(named.values()), inputs, keywords)) or FakeTensorMode()

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value

    state: Dict[str, Tensor] = {name: fake(tensor) for name, tensor in named.items()}
    inputs, keywords = pytree.tree_map(fake, (inputs, keywords))
    with mode:
        outputs = torch.func.functional_call(model, state, inputs, keywords)
        wanted: List[Tensor] = [value for value in pytree.tree_leaves(outputs)
                                if isinstance(value, Tensor) and value.requires_grad]
        if model.training and wanted:
            torch.autograd.backward(wanted, [torch.empty_like(value) for value in wanted])


def _bar(done: int, all: int) -> str:
    filled = 24 * done // all
    return f"normfuse: kernels [{'#' * filled}{' ' * (24 - filled)}] {done}/{all}"


def _compile(device: int, shown: bool) -> int:
    """Compiles what was noted for the device."""
    counts = [0]

    def report(context: Any, done: int, all: int) -> None:
        counts[0] = all
        if shown:
            sys.stderr.write("\r" + _bar(done, all))
            sys.stderr.flush()

    callback: Callable[..., None] = PROGRESS(report)
    try:
        check(library.normfuse_prepare_with(device, callback, None))
    finally:
        if shown and counts[0]:
            sys.stderr.write("\n")
    return counts[0]

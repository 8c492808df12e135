# SPDX-License-Identifier: MIT
"""Calls of the C library with torch tensors: what the kernels over ctypes are made of."""

from __future__ import annotations

from ctypes import byref, c_char_p, c_size_t, pointer
from typing import Any, Dict, Optional

import torch

from .._library import (CPU, CUDA, EVALUATE, HAS_ACT_PARAM, AffineOptions, BatchNormOptions, Exec, GroupNormOptions,
                        Tensor, Tensors, call as check, library, make_tensor)

__all__ = ["EVALUATE", "call", "install_shim", "merge", "register_shim", "uninstall_shim"]

library.normfuse_torch_register.restype, library.normfuse_torch_register.argtypes = c_char_p, []
library.normfuse_torch_install.restype, library.normfuse_torch_install.argtypes = c_char_p, []
library.normfuse_torch_uninstall.restype, library.normfuse_torch_uninstall.argtypes = None, []

PER_VALUE = 2  # set_values of sums that normfuse_sums_merge_per_value merged: torch.h

_DTYPES = {torch.float64: (2, 64), torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16)}
_BIG = {"x", "pre_add", "post_add", "y", "u", "dy", "du", "dx", "dpost_add"}


def register_shim() -> Optional[str]:
    """Registers the kernels of the C library; None, or why there are none."""
    why = library.normfuse_torch_register()
    return None if why is None else why.decode()


def install_shim() -> None:
    """Puts the kernels of the C library in the place of aten's."""
    why = library.normfuse_torch_install()
    if why is not None:
        raise RuntimeError(f"normfuse cannot be installed: {why.decode()}")


def uninstall_shim() -> None:
    library.normfuse_torch_uninstall()


def _tensor(tensor: torch.Tensor, is_big: bool = False) -> Tensor:
    shape, strides = tensor.shape, tensor.stride()
    if is_big and len(shape) > 5:
        # The spatial axes as one: torch has tensors of more axes than the library takes.
        positions, stride = 1, 0
        for size, step in zip(reversed(shape[2:]), reversed(strides[2:])):
            stride = step if size > 1 and stride == 0 else stride
            positions *= size
        shape, strides = (*shape[:2], positions), (*strides[:2], stride)
    if tensor.dtype not in _DTYPES:
        raise RuntimeError("normfuse is implemented for tensors of f64, f32, f16 and bf16 only")
    if tensor.is_cuda:
        return make_tensor(tensor.data_ptr(), *_DTYPES[tensor.dtype], shape, strides, CUDA, tensor.get_device())
    return make_tensor(tensor.data_ptr(), *_DTYPES[tensor.dtype], shape, strides, CPU, 0)


def _exec(x: torch.Tensor) -> Exec:
    if not x.is_cuda:
        return Exec(threads=torch.get_num_threads())
    execution = Exec(stream=torch.cuda.current_stream(x.device).cuda_stream)
    sync_bytes = c_size_t()
    execution.sync = library.normfuse_stream_sync(x.get_device(), execution.stream, byref(sync_bytes))
    execution.sync_bytes = sync_bytes.value
    return execution


def call(operator: str, direction: str, function: str, flags: int, numbers: Dict[str, Any],
         tensors: Dict[str, torch.Tensor]) -> None:
    """normfuse_<operator>_<function>; `direction`, forward or backward, says whose scratch memory it takes."""
    options: Any
    common = {"flags": flags | HAS_ACT_PARAM, "activation": numbers.get("activation", 0),
              "act_param": numbers.get("act_param", 0.0)}
    if operator == "affine":
        options = AffineOptions(**common)
    else:
        # Statistics are made before eps plays a part, and the sums of the backward have rstd instead.
        common.update(eps=numbers.get("eps", 1.0), momentum=numbers.get("momentum", 0.0),
                      set_values=numbers.get("set_values", 0))
        options = (GroupNormOptions(groups=numbers["groups"], **common) if operator == "group_norm" else
                   BatchNormOptions(**common))
    structs = Tensors(**{slot: pointer(_tensor(tensor, slot in _BIG)) for slot, tensor in tensors.items()})
    x = tensors["x"]
    execution = _exec(x)
    scratch = None
    if x.is_cuda:
        needed = c_size_t()
        check(getattr(library, f"normfuse_{operator}_{direction}_scratch_bytes")(
            byref(options), byref(structs), byref(execution), byref(needed)))
        if needed.value:
            # torch's allocator orders the reuse of freed memory by the stream it was allocated on, this call's.
            scratch = torch.empty(needed.value, dtype=torch.uint8, device=x.device)
            execution.scratch, execution.scratch_bytes = scratch.data_ptr(), needed.value
    check(getattr(library, f"normfuse_{operator}_{function}")(byref(options), byref(structs), byref(execution)))


def merge(name: str, parts: torch.Tensor, *others: torch.Tensor) -> None:
    check(getattr(library, f"normfuse_{name}")(*(byref(_tensor(t)) for t in (parts, *others)), byref(_exec(parts))))

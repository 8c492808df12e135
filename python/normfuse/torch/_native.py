# SPDX-License-Identifier: MIT
"""Calls of the C library with torch tensors: what the kernels over ctypes are made of."""

from __future__ import annotations

from ctypes import byref, c_char_p, c_size_t, pointer
from typing import Any, Dict, Optional, Set

import torch

from .._library import (CPU, CUDA, EVALUATE, HAS_ACT_PARAM, AffineOptions, BatchNormOptions, ChannelNormOptions, Exec,
                        GroupNormOptions, Tensor, Tensors, call as check, library, make_tensor)
from ._namespace import NAMESPACE

__all__ = ["EVALUATE", "call", "install_shim", "merge", "preparation", "register_shim", "uninstall_shim"]

library.normfuse_torch_register.restype, library.normfuse_torch_register.argtypes = c_char_p, [c_char_p]
library.normfuse_torch_install.restype, library.normfuse_torch_install.argtypes = c_char_p, []
library.normfuse_torch_uninstall.restype, library.normfuse_torch_uninstall.argtypes = None, []

PER_VALUE = 2  # set_values of sums that normfuse_sums_merge_per_value merged: torch.h

_DTYPES = {torch.float64: (2, 64), torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16)}


class _Preparation:
    """While `devices` is a set, calls on fake tensors note their kernels for normfuse_prepare, and their devices
    there."""
    devices: Optional[Set[int]] = None


preparation = _Preparation()
_PREPARE = 1  # of Exec.flags
_BIG = {"x", "pre_add", "post_add", "y", "u", "dy", "du", "dx", "dpost_add"}


def register_shim() -> Optional[str]:
    """Registers the kernels of the C library; None, or why there are none."""
    why = library.normfuse_torch_register(NAMESPACE.encode())
    return None if why is None else why.decode()


def install_shim() -> None:
    """Puts the kernels of the C library in the place of aten's."""
    why = library.normfuse_torch_install()
    if why is not None:
        raise RuntimeError(f"normfuse cannot be installed: {why.decode()}")


def uninstall_shim() -> None:
    library.normfuse_torch_uninstall()


def _tensor(tensor: torch.Tensor, is_big: bool = False, address: Optional[int] = None) -> Tensor:
    """address: of a fake tensor."""
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
    if address is not None:
        return make_tensor(address, *_DTYPES[tensor.dtype], shape, strides,
                           CUDA if tensor.device.type == "cuda" else CPU, tensor.device.index or 0)
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


def _addresses(tensors: Dict[str, torch.Tensor]) -> Dict[str, int]:
    """The addresses of fake tensors: each storage somewhere of its own, aligned as torch's allocator aligns."""
    places: Dict[int, int] = {}
    return {slot: (places.setdefault(tensor.untyped_storage()._cdata, len(places) + 1 << 40)
                   + tensor.storage_offset() * tensor.element_size())
            for slot, tensor in tensors.items()}


def call(operator: str, direction: str, function: str, flags: int, numbers: Dict[str, Any],
         tensors: Dict[str, torch.Tensor]) -> None:
    """normfuse_<operator>_<function>; `direction`, forward or backward, says whose scratch memory it takes."""
    options: Any
    common = {"flags": flags | HAS_ACT_PARAM, "activation": numbers.get("activation", 0),
              "act_param": numbers.get("act_param", 0.0)}
    if operator == "affine":
        options = AffineOptions(**common)
    elif operator == "channel_norm":
        options = ChannelNormOptions(**common, **{name: numbers[name] for name in (
            "groups", "eps", "statistics", "eps_kind")})
    else:
        # Statistics are made before eps plays a part, and the sums of the backward have rstd instead.
        common.update(eps=numbers.get("eps", 1.0), momentum=numbers.get("momentum", 0.0),
                      set_values=numbers.get("set_values", 0))
        options = (GroupNormOptions(groups=numbers["groups"], **common) if operator == "group_norm" else
                   BatchNormOptions(**common))
    x = tensors["x"]
    if preparation.devices is not None:
        _note(f"normfuse_{operator}_{function}", options, tensors)
        return
    structs = Tensors(**{slot: pointer(_tensor(tensor, slot in _BIG)) for slot, tensor in tensors.items()})
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


def _note(function: str, options: Any, tensors: Dict[str, torch.Tensor]) -> None:
    """Notes the kernels of a call on fake tensors, for normfuse_prepare. On the CPU it checks the arguments."""
    addresses, execution = _addresses(tensors), Exec(flags=_PREPARE)
    device = tensors["x"].device
    if device.type == "cuda":
        sync_bytes = c_size_t()
        check(library.normfuse_sync_bytes(device.index or 0, byref(sync_bytes)))
        execution.sync, execution.sync_bytes = 1 << 39, sync_bytes.value
    structs = Tensors(**{slot: pointer(_tensor(tensor, slot in _BIG, addresses[slot]))
                         for slot, tensor in tensors.items()})
    check(getattr(library, function)(byref(options), byref(structs), byref(execution)))
    if device.type == "cuda" and preparation.devices is not None:
        preparation.devices.add(device.index or 0)


def merge(name: str, parts: torch.Tensor, *others: torch.Tensor) -> None:
    if preparation.devices is not None:
        return
    check(getattr(library, f"normfuse_{name}")(*(byref(_tensor(t)) for t in (parts, *others)), byref(_exec(parts))))

# SPDX-License-Identifier: MIT
"""Calls of the C library with torch tensors, by ctypes: the alternative to the registration in src/torch.c."""

from __future__ import annotations

import ctypes
import os
import pathlib
from typing import Dict

import torch

EVALUATE = 2
HAS_ACT_PARAM = 1


class Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class TensorStruct(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", Device), ("ndim", ctypes.c_int32), ("dtype", DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


_SLOTS = (
    "x", "pre_add", "post_add", "weight", "bias", "scale", "shift", "y", "u", "mean", "rstd", "running_mean",
    "running_var", "dy", "du", "dx", "dweight", "dbias", "dscale", "dshift", "dpost_add", "stats", "sums",
)  # fmt: skip


class Tensors(ctypes.Structure):
    _fields_ = [("struct_bytes", ctypes.c_uint32), ("flags", ctypes.c_uint32)] + [
        (slot, ctypes.POINTER(TensorStruct)) for slot in _SLOTS
    ]


class GroupNormOptions(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("groups", ctypes.c_int64),
        ("eps", ctypes.c_double), ("activation", ctypes.c_int32), ("reserved", ctypes.c_int32),
        ("act_param", ctypes.c_double), ("momentum", ctypes.c_double), ("batches_seen", ctypes.c_int64),
        ("set_values", ctypes.c_int64),
    ]  # fmt: skip


class BatchNormOptions(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("eps", ctypes.c_double),
        ("activation", ctypes.c_int32), ("reserved", ctypes.c_int32), ("act_param", ctypes.c_double),
        ("momentum", ctypes.c_double), ("batches_seen", ctypes.c_int64), ("set_values", ctypes.c_int64),
    ]  # fmt: skip


class AffineOptions(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("activation", ctypes.c_int32),
        ("reserved", ctypes.c_int32), ("act_param", ctypes.c_double),
    ]  # fmt: skip


class Exec(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("stream", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p), ("scratch_bytes", ctypes.c_size_t), ("sync", ctypes.c_void_p),
        ("sync_bytes", ctypes.c_size_t), ("parallel_for", ctypes.c_void_p), ("pool", ctypes.c_void_p),
        ("threads", ctypes.c_int32), ("reserved", ctypes.c_int32),
    ]  # fmt: skip


def _load() -> ctypes.CDLL:
    named = os.environ.get("NORMFUSE_LIBRARY")
    here = pathlib.Path(__file__).resolve()
    candidates = [pathlib.Path(named)] if named else [
        here.parents[1] / "lib" / "libnormfuse.so", here.parents[3] / "build" / "release" / "libnormfuse.so"]
    for path in candidates:
        if path.exists():
            library = ctypes.CDLL(str(path))
            library.normfuse_last_error.restype = ctypes.c_char_p
            return library
    raise ImportError("libnormfuse.so was not found at " + " or ".join(map(str, candidates)))


library = _load()

_DTYPES = {torch.float64: (2, 64, 1), torch.float32: (2, 32, 1), torch.float16: (2, 16, 1),
           torch.bfloat16: (4, 16, 1)}
_EXCEPTIONS = {10: ValueError, 11: ValueError, 41: MemoryError}


def _check(status: int) -> None:
    if status != 0:
        message = library.normfuse_last_error().decode()
        raise _EXCEPTIONS.get(status, RuntimeError)(message)


def _tensor(tensor: torch.Tensor, shape=None, strides=None) -> TensorStruct:
    shape = tensor.shape if shape is None else shape
    strides = tensor.stride() if strides is None else strides
    axes = ctypes.c_int64 * len(shape)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise RuntimeError(f"normfuse: not implemented for {tensor.dtype}")
    is_cuda = tensor.is_cuda
    return TensorStruct(tensor.data_ptr(), Device(2 if is_cuda else 1, tensor.get_device() if is_cuda else 0),
                        len(shape), DType(*dtype), axes(*shape), axes(*strides), 0)


_BIG = {"x", "pre_add", "post_add", "y", "u", "dy", "du", "dx", "dpost_add"}


def _big(tensor: torch.Tensor) -> TensorStruct:
    """The spatial axes as one: torch has tensors of more axes than the library takes."""
    if tensor.dim() <= 5:
        return _tensor(tensor)
    positions = 1
    stride = 0
    for size, step in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:])):
        if size > 1 and stride == 0:
            stride = step
        positions *= size
    return _tensor(tensor, (*tensor.shape[:2], positions), (*tensor.stride()[:2], stride))


def call(function: str, flags: int, numbers: Dict[str, float], tensors: Dict[str, torch.Tensor], n: int,
         c: int) -> None:
    x = tensors["x"]
    kind = (BatchNormOptions if "batch_norm" in function else
            GroupNormOptions if "group_norm" in function else AffineOptions)
    options = kind(struct_bytes=ctypes.sizeof(kind), flags=flags | HAS_ACT_PARAM)
    options.activation = int(numbers.get("activation", 0))
    options.act_param = float(numbers.get("act_param", 0.0))
    if kind is not AffineOptions:
        # Statistics are made before eps plays a part, and the sums of the backward have rstd instead.
        options.eps = float(numbers.get("eps", 1.0))
        options.momentum = float(numbers.get("momentum", 0.0))
        options.set_values = int(numbers.get("set_values", 0))
    if kind is GroupNormOptions:
        options.groups = int(numbers["groups"])
    structs = Tensors(struct_bytes=ctypes.sizeof(Tensors))
    for slot, tensor in tensors.items():
        setattr(structs, slot, ctypes.pointer(_big(tensor) if slot in _BIG else _tensor(tensor)))
    execution = None
    scratch = None
    if x.is_cuda:
        execution = Exec(struct_bytes=ctypes.sizeof(Exec), stream=torch.cuda.current_stream(x.device).cuda_stream)
        needed = ctypes.c_size_t()
        direction = "backward" if "backward" in function else "forward"
        operator = function[len("normfuse_"):].split("_forward")[0].split("_backward")[0]
        operator = operator.replace("_stats", "").replace("_apply", "")
        _check(getattr(library, f"normfuse_{operator}_{direction}_scratch_bytes")(
            ctypes.byref(options), ctypes.byref(structs), ctypes.byref(execution), ctypes.byref(needed)))
        if needed.value:
            scratch = torch.empty(needed.value, dtype=torch.uint8, device=x.device)
            execution.scratch, execution.scratch_bytes = scratch.data_ptr(), needed.value
    _check(getattr(library, function)(ctypes.byref(options), ctypes.byref(structs),
                                      ctypes.byref(execution) if execution is not None else None))


def merge(function: str, parts: torch.Tensor, out: torch.Tensor) -> None:
    execution = None
    if parts.is_cuda:
        execution = Exec(struct_bytes=ctypes.sizeof(Exec), stream=torch.cuda.current_stream(parts.device).cuda_stream)
    _check(getattr(library, function)(ctypes.byref(_tensor(parts)), ctypes.byref(_tensor(out)),
                                      ctypes.byref(execution) if execution is not None else None))

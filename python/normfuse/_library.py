# SPDX-License-Identifier: MIT
"""The shared library libnormfuse.so through ctypes: where it is found, the structs of normfuse.h, and statuses as
exceptions. Everything in Python that calls C goes through this file.

Structs and constants have the names of normfuse.h without the prefix, functions the names they have there
(`library.normfuse_group_norm_forward`); `call` raises where a status is not 0. ctypes lets other Python threads run
for the length of a call.
"""
from __future__ import annotations

import ctypes
import operator
import os
import pathlib
import re
import sys
from ctypes import (POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64,
                    c_void_p)
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

# The version of normfuse.h that this file spells out. Before 1.0 a minor version may change the interface.
INTERFACE = (0, 1)

# ---- constants ------------------------------------------------------------------------------------------------------

CPU, CUDA = 1, 2
F64, F32, F16, BF16 = 0, 1, 2, 3
# DLPack's (code, bits) of each dtype; code 2 is an IEEE float, 4 a bfloat.
DTYPES = {(2, 64): F64, (2, 32): F32, (2, 16): F16, (4, 16): BF16}
MAX_AXES = 5

# Channel norm's
STATISTICS = {"mean_and_variance": 0, "mean_square": 1}
EPS_KINDS = {"added": 0, "of_norm": 1}

HAS_ACT_PARAM, EVALUATE, CUMULATIVE, ACCUMULATE = 1, 2, 4, 8
FOLD_TRANSPOSED = 1

# ---- structs --------------------------------------------------------------------------------------------------------

# ctypes takes integers modulo the width of what they are put into; here they are refused.
_RANGES = {kind: (-(1 << 8 * ctypes.sizeof(kind) - 1), (1 << 8 * ctypes.sizeof(kind) - 1) - 1)
           for kind in (c_int32, c_int64)}
_RANGES.update((kind, (0, (1 << 8 * ctypes.sizeof(kind)) - 1))
               for kind in (c_uint8, c_uint16, c_uint32, c_uint64, c_size_t, c_void_p))


def integer(name: str, value: Any, kind: type = c_int64) -> int:
    """The value as an int that a field of that C type holds; OverflowError where none does, TypeError where it is no
    integer."""
    number = operator.index(value)
    least, most = _RANGES[kind]
    if not least <= number <= most:
        raise OverflowError(f"{name} is {number}, beyond the range of {least} to {most}")
    return number


class Device(ctypes.Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Tensor(ctypes.Structure):
    """normfuse_tensor, which is DLPack's DLTensor."""
    _fields_ = [("data", c_void_p), ("device", Device), ("ndim", c_int32), ("dtype", DataType),
                ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("byte_offset", c_uint64)]


TENSOR_FIELDS = ("x", "pre_add", "post_add", "weight", "bias", "scale", "shift", "y", "u", "mean", "rstd",
                 "running_mean", "running_var", "dy", "du", "dx", "dweight", "dbias", "dscale", "dshift", "dpost_add",
                 "stats", "sums", "pre_bias", "dpre_bias", "slope", "dslope")


class Sized(ctypes.Structure):
    """A struct of normfuse.h that begins with its own size, which is filled in. OverflowError: an integer that its
    field does not hold."""
    _integers: Tuple[Tuple[str, type], ...] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._integers = tuple(field[:2] for field in cls._fields_ if field[1] in _RANGES)

    def __init__(self, **fields: Any) -> None:
        for name, kind in self._integers:
            if fields.get(name) is not None:
                fields[name] = integer(name, fields[name], kind)
        super().__init__(struct_bytes=ctypes.sizeof(self), **fields)


class Tensors(Sized):
    """The tensors of one call: `Tensors(x=pointer(tensor), ...)`; what is left out is NULL."""
    _fields_ = [("struct_bytes", c_uint32), ("flags", c_uint32), *((name, POINTER(Tensor)) for name in TENSOR_FIELDS)]


class GroupNormOptions(Sized):
    _fields_ = [("struct_bytes", c_uint32), ("flags", c_uint32), ("groups", c_int64), ("eps", c_double),
                ("activation", c_int32), ("reserved", c_int32), ("act_param", c_double), ("momentum", c_double),
                ("batches_seen", c_int64), ("set_values", c_int64)]


class BatchNormOptions(Sized):
    _fields_ = [("struct_bytes", c_uint32), ("flags", c_uint32), ("eps", c_double), ("activation", c_int32),
                ("reserved", c_int32), ("act_param", c_double), ("momentum", c_double), ("batches_seen", c_int64),
                ("set_values", c_int64)]


class ChannelNormOptions(Sized):
    _fields_ = [("struct_bytes", c_uint32), ("flags", c_uint32), ("groups", c_int64), ("eps", c_double),
                ("statistics", c_int32), ("eps_kind", c_int32), ("activation", c_int32), ("reserved", c_int32),
                ("act_param", c_double)]


class AffineOptions(Sized):
    _fields_ = [("struct_bytes", c_uint32), ("flags", c_uint32), ("activation", c_int32), ("reserved", c_int32),
                ("act_param", c_double)]


PROGRESS = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_int32)
PARALLEL_FOR = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_void_p, c_void_p)


class Exec(Sized):
    """The place where a call runs."""
    _fields_ = [("struct_bytes", c_uint32), ("flags", c_uint32), ("stream", c_void_p), ("scratch", c_void_p),
                ("scratch_bytes", c_size_t), ("sync", c_void_p), ("sync_bytes", c_size_t),
                ("parallel_for", PARALLEL_FOR), ("pool", c_void_p), ("threads", c_int32), ("reserved", c_int32)]


class Information(Sized):
    _fields_ = [("struct_bytes", c_uint32), ("threads", c_int32), ("version", c_char_p), ("isas_built", c_char_p),
                ("isas_usable", c_char_p), ("isa", c_char_p), ("l1_bytes", c_int64), ("l2_bytes", c_int64),
                ("llc_bytes", c_int64), ("cpu", c_char_p), ("compiler", c_char_p), ("cuda", c_char_p)]


class CompilerInformation(Sized):
    _fields_ = [("struct_bytes", c_uint32), ("version", c_int32), ("compiler", c_char_p), ("cache", c_char_p),
                ("cache_problem", c_char_p), ("cache_kernels", c_int64), ("cache_bytes", c_int64)]


def _axes(name: str, values: Sequence[int]) -> Any:
    array = (c_int64 * len(values))(*values)
    if array[:] != list(values):
        raise OverflowError(f"a {name} of {tuple(values)} is beyond 64 bits")
    return array


def make_tensor(address: int, code: int, bits: int, shape: Sequence[int], strides: Optional[Sequence[int]] = None,
                device_type: int = CPU, device_id: int = 0) -> Tensor:
    """A Tensor over memory that the caller keeps alive. `code` and `bits` are DLPack's, strides are in elements; None
    is row-major."""
    return Tensor(integer("address", address, c_void_p), Device(device_type, integer("device", device_id, c_int32)),
                  len(shape), DataType(code, bits, 1), _axes("size", shape),
                  None if strides is None else _axes("stride", strides), 0)


# ---- the library ----------------------------------------------------------------------------------------------------

_SIGNATURES = {
    "normfuse_status_text": (c_char_p, [c_int32]),
    "normfuse_last_error": (c_char_p, []),
    "normfuse_version": (c_char_p, []),
    "normfuse_info": (c_int32, [POINTER(Information)]),
    "normfuse_prepare": (c_int32, [c_int32]),
    "normfuse_prepare_with": (c_int32, [c_int32, PROGRESS, c_void_p]),
    "normfuse_use_compiler": (c_int32, [c_char_p]),
    "normfuse_compiler_info": (c_int32, [POINTER(CompilerInformation)]),
    "normfuse_sync_bytes": (c_int32, [c_int32, POINTER(c_size_t)]),
    # src/package.h
    "normfuse_activation_name": (c_char_p, [c_int32, POINTER(c_double)]),
    "normfuse_stream_sync": (c_void_p, [c_int32, c_void_p, POINTER(c_size_t)]),
    "normfuse_stream_scratch": (None, [c_int32, c_void_p, c_size_t, POINTER(c_void_p)]),
    "normfuse_stream_scratch_free": (None, [c_int32, c_void_p, c_void_p]),
    "normfuse_sums_merge_per_value": (c_int32, [POINTER(Tensor), POINTER(Tensor), POINTER(Tensor), POINTER(Exec)]),
    "normfuse_stats_merge": (c_int32, [POINTER(Tensor), POINTER(Tensor), POINTER(Exec)]),
    "normfuse_sums_merge": (c_int32, [POINTER(Tensor), POINTER(Tensor), POINTER(Exec)]),
    "normfuse_sample_quantum": (c_int32, [POINTER(Tensor), POINTER(c_int64)]),
    "normfuse_batch_norm_fold": (c_int32, [POINTER(Tensors), c_double, c_uint32, *[POINTER(Tensor)] * 4]),
}
for _operator, _options, _calls in (
        ("group_norm", GroupNormOptions, ("stats", "apply", "backward_sums", "backward_apply")),
        ("batch_norm", BatchNormOptions, ("stats", "apply", "backward_sums", "backward_apply")),
        ("channel_norm", ChannelNormOptions, ()),
        ("affine", AffineOptions, ())):
    for _call in ("forward", "backward", *_calls):
        _SIGNATURES[f"normfuse_{_operator}_{_call}"] = (c_int32, [POINTER(_options), POINTER(Tensors), POINTER(Exec)])
    for _call in ("forward", "backward"):
        _SIGNATURES[f"normfuse_{_operator}_{_call}_scratch_bytes"] = (
            c_int32, [POINTER(_options), POINTER(Tensors), POINTER(Exec), POINTER(c_size_t)])


def find() -> pathlib.Path:
    """The path of libnormfuse.so: what NORMFUSE_LIBRARY names; else normfuse/lib/ beside this file, as in a wheel; else
    build/release/ of the source tree that this file is part of."""
    named = os.environ.get("NORMFUSE_LIBRARY")
    if named:
        if not os.path.isfile(named):
            raise ImportError(f"normfuse: NORMFUSE_LIBRARY is {named!r}, which is not a file")
        return pathlib.Path(named)
    package = pathlib.Path(__file__).resolve().parent
    places = [package / "lib/libnormfuse.so"]
    tree = package.parent.parent
    if (tree / "include/normfuse.h").is_file():
        places.append(tree / "build/release/libnormfuse.so")
    for place in places:
        if place.is_file():
            return place
    raise ImportError("normfuse: libnormfuse.so is not at " + " nor at ".join(map(str, places)) +
                      "; install the wheel, run `make build` in a source tree, or name it in NORMFUSE_LIBRARY")


def _load() -> Any:
    path = find()
    try:
        loaded: Any = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"normfuse: {path} cannot be loaded: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise ImportError(f"normfuse: {path} has no function {name}; it is of another version") from None
        function.restype, function.argtypes = result, arguments
    version = loaded.normfuse_version().decode()
    if tuple(map(int, version.split(".")[:2])) != INTERFACE:
        raise ImportError(f"normfuse: {path} is version {version}; this package needs "
                          f"{INTERFACE[0]}.{INTERFACE[1]}")
    loaded.path = path
    return loaded


class Missing:
    """Stands for a library that cannot be loaded: each use of it raises why."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        raise self.error


def _load_or_stand_in() -> Any:
    """The library. `python -m normfuse info` is to say what is wrong with one that cannot be loaded, and the package is
    imported before it runs: sys.argv[0] is "-m" while Python looks for a module to run."""
    try:
        return _load()
    except ImportError as error:
        if sys.argv[:1] != ["-m"]:
            raise
        return Missing(error)


library = _load_or_stand_in()


version = "unknown" if isinstance(library, Missing) else str(library.normfuse_version().decode())



def _read_activations() -> tuple[dict[str, int], dict[str, float]]:
    """Numbers and defaults of act_param by name; an activation without act_param has none."""
    numbers, defaults, parameter = {}, {}, c_double()
    while not isinstance(library, Missing) and (
            name := library.normfuse_activation_name(len(numbers), ctypes.byref(parameter))) is not None:
        if parameter.value:
            defaults[name.decode()] = parameter.value
        numbers[name.decode()] = len(numbers)
    return numbers, defaults


ACTIVATIONS, DEFAULT_ACT_PARAM = _read_activations()

# NVRTC in the packages nvidia-cuda-nvrtc and nvidia-cuda-nvrtc-cu12, below a folder of sys.path.
_COMPILERS = ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")


def _name_compilers() -> None:
    """Tells the library where Python's packages have NVRTC, the newer one first: it takes what the driver takes."""
    found = [path for name in _COMPILERS for path in
             [next((path for path in (os.path.join(folder, name) for folder in sys.path if folder)
                    if os.path.isfile(path)), None)] if path is not None]
    for path in found if not isinstance(library, Missing) else ():
        library.normfuse_use_compiler(os.fsencode(path))  # refused only without CUDA or memory


_name_compilers()

# ---- statuses -------------------------------------------------------------------------------------------------------

# By the tens: 1x, what is wrong with an argument; 2x, no kernel for a dtype, device or strides; 3x and 5x, the driver
# and the device; 40, an error of this package's own.
_EXCEPTIONS = {10: ValueError, 11: ValueError, 12: ValueError, 13: ValueError, 20: TypeError, 41: MemoryError}


def call(status: int, names: Mapping[str, str] = {}) -> None:
    """Raises what a status means, with the library's words: ValueError (a bad argument, shape or pointer, or tensors
    that overlap), TypeError (a dtype, device or strides that the library has no kernel for), MemoryError, else
    RuntimeError. `names`: what arguments are called by the caller, where not as the fields of normfuse.h."""
    if status == 0:
        return
    text = library.normfuse_last_error().decode() or library.normfuse_status_text(status).decode()
    text = re.sub(r"\b(?:tensors|options|exec)\.(\w+)", lambda field: names.get(field[1], field[1]), text)
    text = text.replace("NULL", "None").replace("NORMFUSE_EPS_OF_NORM", "eps_kind='of_norm'")
    raise _EXCEPTIONS.get(status, RuntimeError)(text)

# SPDX-License-Identifier: MIT
"""Arrays of other libraries as tensors of libnormfuse.so, without a copy, and results as arrays of those libraries.

Read in this order: NumPy arrays themselves; `__dlpack__` (PyTorch, CuPy, JAX and others; on the CPU and on CUDA);
`__cuda_array_interface__`; `__array_interface__`. Made outputs are of the library of the array that they are like;
for libraries that are not named in `_FAMILIES` they are NumPy arrays.
"""
from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import POINTER, c_char_p, c_size_t, c_uint32, c_uint64, c_void_p, py_object
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy

from ._library import CPU, CUDA, Exec, Tensor, Tensors, call, library, make_tensor
from ._words import did_you_mean

# DLPack's (code, bits) of what the library computes in, and the names that NumPy, PyTorch and JAX share for them.
_CODES = {"float64": (2, 64), "float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16)}
_NAMES = {code: name for name, code in _CODES.items()}

# The first part of a module's name, and whose arrays its types are.
_FAMILIES = {"numpy": "numpy", "torch": "torch", "cupy": "cupy", "jax": "jax", "jaxlib": "jax"}
_ALLOCATING = ("torch", "cupy")  # what gives this package memory on CUDA


@functools.lru_cache(maxsize=256)
def _family(kind: type) -> str:
    """Whose arrays a type's are; "" for a library that is not known here. A subclass is its base's."""
    for base in kind.__mro__:
        family = _FAMILIES.get(base.__module__.partition(".")[0])
        if family:
            return family
    return ""


class Array(NamedTuple):
    """An array as the library sees it."""
    tensor: Tensor
    source: Any   # the array itself
    holder: Any   # what keeps its memory where the tensor says
    family: str


# ---- from other libraries -------------------------------------------------------------------------------------------


class _View(NamedTuple):
    """The facts that every protocol gives of an array: strides are in elements, None is row-major."""
    address: int
    code: int
    bits: int
    shape: Sequence[int]
    strides: Optional[Sequence[int]]
    device_type: int
    device_id: int
    writable: bool
    holder: Any


def _refuse_dtype(name: str, dtype: object) -> TypeError:
    return TypeError(f"{name} has dtype {dtype}; float64, float32, float16 and bfloat16 are supported, "
                     "in the byte order of this machine")


def _element_strides(name: str, strides: Sequence[int], shape: Sequence[int], itemsize: int) -> List[int]:
    """Strides of bytes in elements. Those of axes of one element, which may be anything, become 1."""
    if len(strides) != len(shape):
        raise ValueError(f"{name} has {len(strides)} strides and {len(shape)} axes")
    if any(stride % itemsize for stride, size in zip(strides, shape) if size > 1):
        raise ValueError(f"{name} has strides of {tuple(strides)} bytes, not multiples of its {itemsize}-byte elements")
    return [stride // itemsize if size > 1 else 1 for stride, size in zip(strides, shape)]


@functools.lru_cache(maxsize=64)
def _numpy_code(dtype: numpy.dtype) -> Optional[Tuple[int, int]]:
    # Other byte orders have other dtypes; bfloat16 is of the package ml_dtypes, which NumPy knows by its name only.
    return _CODES.get(dtype.name) if dtype.isnative else None


def _refuse_mask(name: str) -> TypeError:
    return TypeError(f"{name} has a mask, which would be ignored; pass what lies under it")


def _from_numpy(array: numpy.ndarray, name: str) -> _View:
    if type(array) is not numpy.ndarray and isinstance(array, numpy.ma.MaskedArray):
        raise _refuse_mask(name)
    code = _numpy_code(array.dtype)
    if code is None:
        raise _refuse_dtype(name, array.dtype.str if array.dtype.name in _CODES else array.dtype)
    address, read_only = array.__array_interface__["data"]
    strides = None if array.flags.c_contiguous else _element_strides(name, array.strides, array.shape, array.itemsize)
    return _View(address, *code, array.shape, strides, CPU, 0, not read_only, array)


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor: the capsule "dltensor" before DLPack 1.0."""
    _fields_ = [("tensor", Tensor), ("context", c_void_p), ("deleter", c_void_p)]


class _ManagedTensorVersioned(ctypes.Structure):
    """DLManagedTensorVersioned: the capsule "dltensor_versioned"."""
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("context", c_void_p), ("deleter", c_void_p),
                ("flags", c_uint64), ("tensor", Tensor)]


_READ_ONLY, _IS_COPIED = 1, 2
_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))

# Two of DLDeviceType: CUDA's pinned host memory is the CPU's to read, its managed memory the GPU's.
_DEVICES = {1: CPU, 2: CUDA, 3: CPU, 13: CUDA}


def _from_dlpack(source: Any, name: str, stream: int) -> _View:
    """The capsule is not consumed: it is kept, and gives the memory back when it goes."""
    device_type, device_id = map(int, source.__dlpack_device__())
    if device_type not in _DEVICES:
        raise TypeError(f"{name} is on a device of DLPack's type {device_type}; CPU (1) and CUDA (2) are supported")
    # 0 is CUDA's default stream to the driver and ambiguous to DLPack, whose name for it is 1.
    arguments: Dict[str, Any] = {"stream": stream or 1} if _DEVICES[device_type] == CUDA else {}
    try:
        capsule = source.__dlpack__(max_version=(1, 1), **arguments)
    except TypeError:  # a producer of before DLPack 1.0
        capsule = source.__dlpack__(**arguments)
    flags, major = 0, 0
    if _capsule_is(capsule, b"dltensor_versioned"):
        versioned = _ManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        tensor, flags, major = versioned.tensor, versioned.flags, versioned.major
    elif _capsule_is(capsule, b"dltensor"):
        tensor = _ManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
    else:
        raise TypeError(f"{name}: its __dlpack__ gave {capsule!r}, which is no capsule of a DLPack tensor")
    if major > 1:
        raise TypeError(f"{name}: its __dlpack__ gave a tensor of DLPack {major}, which is newer than 1")
    code, axes = (tensor.dtype.code, tensor.dtype.bits), range(tensor.ndim)
    if code not in _NAMES or tensor.dtype.lanes != 1:
        raise _refuse_dtype(name, getattr(source, "dtype", f"of code {code[0]}, {code[1]} bits"))
    return _View((tensor.data or 0) + tensor.byte_offset, *code, [tensor.shape[a] for a in axes],
                 [tensor.strides[a] for a in axes] if tensor.strides else None,
                 _DEVICES[device_type], device_id if _DEVICES[device_type] == CUDA else 0,
                 not flags & (_READ_ONLY | _IS_COPIED), capsule)


def _from_cuda_interface(source: Any, name: str, stream: int, device_id: int) -> _View:
    """Version 3 of the CUDA Array Interface, which does not say which device: it is taken to be x's."""
    interface = source.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise _refuse_mask(name)
    busy = interface.get("stream")
    if busy is not None and busy != (stream or 1):
        raise ValueError(f"{name} is in use on CUDA stream {busy:#x} and this call runs on {stream or 1:#x}; wait for "
                         "that stream and pass the array without it")
    dtype, shape = numpy.dtype(interface["typestr"]), interface["shape"]
    code = _numpy_code(dtype)
    if code is None:
        raise _refuse_dtype(name, interface["typestr"])
    strides = interface.get("strides")
    if strides is not None:
        strides = _element_strides(name, strides, shape, dtype.itemsize)
    address, read_only = interface["data"]
    return _View(address, *code, shape, strides, CUDA, device_id, not read_only, source)


def _view(source: Any, name: str, stream: int, device_id: int) -> _View:
    if isinstance(source, numpy.ndarray):
        return _from_numpy(source, name)
    if hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        if _family(type(source)) == "torch" and getattr(source, "is_cuda", False):
            cuda = sys.modules["torch"].cuda
            with cuda.device(source.device):  # torch exports from the current device only
                # -1: nothing to wait for, which torch would also do if it is told its own stream by address.
                return _from_dlpack(source, name, -1 if cuda.current_stream().cuda_stream == stream else stream)
        return _from_dlpack(source, name, stream)
    if hasattr(source, "__cuda_array_interface__"):
        return _from_cuda_interface(source, name, stream, device_id)
    if hasattr(source, "__array_interface__"):
        if source.__array_interface__.get("mask") is not None:
            raise _refuse_mask(name)
        return _from_numpy(numpy.asarray(source), name)
    raise TypeError(f"{name} is a {type(source).__module__}.{type(source).__qualname__}; expected a NumPy array, or an "
                    "array with __dlpack__, __cuda_array_interface__ or __array_interface__")


def _row_major(shape: Sequence[int]) -> List[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def _channels_second(axes: Sequence[Any]) -> List[Any]:
    """N, spatial, C as N, C, spatial."""
    return [axes[0], axes[-1], *axes[1:-1]]


# ---- to other libraries ---------------------------------------------------------------------------------------------


def _empty(like: Array, shape: Sequence[int], dtype: str) -> Any:
    """A row-major array of the library and on the device of `like`."""
    if like.family == "torch":
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=like.source.device)
    if like.family == "cupy":
        with like.source.device:
            return sys.modules["cupy"].empty(tuple(shape), _numpy_dtype(dtype))
    if like.tensor.device.device_type == CUDA:
        raise TypeError(f"outputs of {type(like.source).__module__} arrays on CUDA are not made, since this package "
                        "allocates memory through CuPy and PyTorch only; give them, or pass such an array")
    return numpy.empty(tuple(shape), _numpy_dtype(dtype))


def _numpy_dtype(name: str) -> numpy.dtype:
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError("NumPy arrays of bfloat16 need the package ml_dtypes") from None
        return numpy.dtype(ml_dtypes.bfloat16)
    return numpy.dtype(name)


def _result(array: Array, like: Array) -> Any:
    """The array that the caller is handed: JAX cannot write to its arrays, so theirs are filled as NumPy's."""
    if like.family == "jax" and array.family == "numpy":
        return sys.modules["jax"].numpy.asarray(array.source)
    return array.source


def stack(arrays: Sequence[Any]) -> Any:
    """One array of them all, in the library of the first; [arrays, ...]."""
    library_of = sys.modules[{"torch": "torch", "cupy": "cupy"}.get(_family(type(arrays[0])), "numpy")]
    return library_of.stack(list(arrays))


# ---- one call -------------------------------------------------------------------------------------------------------


_WHOLE = {"stats": "forward", "apply": "forward"}


class Call:
    """The arrays of one call of the library. x comes first: it decides device, stream and what outputs are like."""

    def __init__(self, operator: str, x: Any, layout: str, names: Dict[str, str]) -> None:
        if layout not in ("nchw", "nhwc"):
            raise ValueError(f"layout is {layout!r}, expected 'nchw' or 'nhwc'{did_you_mean(layout, ('nchw', 'nhwc'))}")
        self._operator, self._names = operator, names
        self._channels_last_axes = layout == "nhwc"
        self._arrays: Dict[str, Array] = {}
        self._made: Dict[str, Array] = {}  # what a made output is like
        self._stream = self._current_stream(x)
        self.x = self._add("x", x, has_positions=True)
        shape = self.x.tensor.shape
        if self.x.tensor.ndim < 2:
            raise ValueError(f"x has {self.x.tensor.ndim} axes, expected N, C and up to three spatial ones")
        self.samples, self.channels = shape[0], shape[1]

    @staticmethod
    def _current_stream(x: Any) -> int:
        """The stream where the library of x has the work on it: its current stream, or the default one."""
        family = _family(type(x))
        if family == "torch" and getattr(x, "is_cuda", False):
            return sys.modules["torch"].cuda.current_stream(x.device).cuda_stream
        if family == "cupy" and hasattr(x, "device"):
            with x.device:
                return sys.modules["cupy"].cuda.get_current_stream().ptr
        return 0

    def _add(self, name: str, source: Any, has_positions: bool, is_output: bool = False) -> Array:
        word = self._names.get(name, name)
        family = _family(type(source))
        view = _view(source, word, self._stream, self.x.tensor.device.device_id if name != "x" else 0)
        if is_output and (not view.writable or family == "jax"):
            raise ValueError(f"{word} is written to, and the given array is read-only")
        shape, strides = view.shape, view.strides
        if has_positions and self._channels_last_axes and len(shape) > 2:
            strides = _channels_second(_row_major(shape) if strides is None else strides)
            shape = _channels_second(shape)
        tensor = make_tensor(view.address, view.code, view.bits, shape, strides, view.device_type, view.device_id)
        array = self._arrays[name] = Array(tensor, source, view.holder, family or "numpy")
        return array

    def give(self, **sources: Any) -> None:
        """Inputs with x's axes; None is left out."""
        for name, source in sources.items():
            if source is not None:
                self._add(name, source, has_positions=True)

    def give_parameters(self, **sources: Any) -> None:
        """Inputs with axes of their own; None is left out."""
        for name, source in sources.items():
            if source is not None:
                self._add(name, source, has_positions=False)

    def update(self, **sources: Any) -> None:
        """Parameters that are read and written; None is left out."""
        for name, source in sources.items():
            if source is not None:
                self._add(name, source, has_positions=False, is_output=True)

    def take(self, name: str, given: Any, like: str = "x") -> None:
        """An output with x's axes: the given array, or one made with x's order of axes in memory and the dtype of the
        input `like`."""
        if given is None:
            given = self._empty_like_x(dtype_of(self._arrays[like]))
            self._made[name] = self.x
        self._add(name, given, has_positions=True, is_output=True)

    def take_parameter(self, name: str, given: Any, shape: Sequence[int], dtype: str = "", like: str = "x") -> None:
        """An output with axes of its own: the given array, or one made in the library and (where dtype is "") of the
        dtype of the input `like`."""
        if given is None:
            source = self._arrays.get(like, self.x)
            given = _empty(source, shape, dtype or dtype_of(source))
            self._made[name] = source
        self._add(name, given, has_positions=False, is_output=True)

    def _empty_like_x(self, dtype: str) -> Any:
        tensor = self.x.tensor
        sizes = tensor.shape[:tensor.ndim]
        positions = [a for a in range(2, tensor.ndim) if sizes[a] > 1]
        last = self._channels_last_axes
        if sizes[1] > 1 and positions:  # elsewhere both orders are the same memory
            strides = tensor.strides[:tensor.ndim] if tensor.strides else _row_major(sizes)
            last = strides[1] < min(strides[a] for a in positions)
        if not last:
            made = _empty(self.x, sizes, dtype)
            return _move_axis(made, 1, -1) if self._channels_last_axes else made
        made = _empty(self.x, [sizes[0], *sizes[2:], sizes[1]], dtype)
        return made if self._channels_last_axes else _move_axis(made, -1, 1)

    def merge(self, out: Any) -> Any:
        """x, the statistics of shards, [shards, ..., 3], joined in order; into `out`, or into a new array."""
        shape = self.shape_of("x")
        self.take_parameter("out", out, shape[1:], "float64")
        execution = Exec(stream=self._stream or None)
        call(library.normfuse_stats_merge(self.x.tensor, self._arrays["out"].tensor, execution), self._names)
        return self.output("out")

    def run(self, direction: str, options: Any) -> None:
        """`direction`: forward or backward, or a phase of the forward, whose scratch memory is the forward's."""
        tensors = Tensors(**{name: ctypes.pointer(array.tensor) for name, array in self._arrays.items()})
        function = f"normfuse_{self._operator}_{direction}"
        if self.x.tensor.device.device_type != CUDA:
            call(getattr(library, function)(options, tensors, None), self._names)
            return
        device, execution, bytes_ = self.x.tensor.device.device_id, Exec(stream=self._stream or None), c_size_t()
        # Calls that overlap are in different streams or graphs, each of which has sync memory of its own.
        execution.sync = library.normfuse_stream_sync(device, execution.stream, bytes_)
        execution.sync_bytes = bytes_.value
        whole = f"normfuse_{self._operator}_{_WHOLE.get(direction, direction)}"
        call(getattr(library, whole + "_scratch_bytes")(options, tensors, execution, bytes_), self._names)
        # Freed before the kernels have run, but in the order of the stream that it was allocated on.
        execution.scratch_bytes = bytes_.value
        if bytes_.value and self.x.family in _ALLOCATING:
            scratch = _empty(self.x, [bytes_.value // 8 + 8], "float64")
            execution.scratch = (_view(scratch, "scratch", self._stream, 0).address + 63) // 64 * 64
        pooled = c_void_p()
        try:  # from before the allocation on: an interrupt may follow it at once
            if bytes_.value and not execution.scratch:
                library.normfuse_stream_scratch(device, execution.stream, bytes_, pooled)
                if not pooled:
                    raise MemoryError(f"the CUDA driver gave no {bytes_.value} bytes of scratch memory on device "
                                      f"{device}")
                execution.scratch = pooled.value
            call(getattr(library, function)(options, tensors, execution), self._names)
        finally:
            if pooled:
                library.normfuse_stream_scratch_free(device, execution.stream, pooled)

    def shape_of(self, name: str) -> Tuple[int, ...]:
        """The shape of a parameter; () where it is not given."""
        array = self._arrays.get(name)
        return () if array is None else tuple(array.tensor.shape[:array.tensor.ndim])

    def output(self, name: str) -> Any:
        array = self._arrays.get(name)
        if array is None:
            return None
        return _result(array, self._made[name]) if name in self._made else array.source


def dtype_of(array: Array) -> str:
    return _NAMES[array.tensor.dtype.code, array.tensor.dtype.bits]


def _move_axis(array: Any, source: int, destination: int) -> Any:
    library_of = sys.modules[{"torch": "torch", "cupy": "cupy"}.get(_family(type(array)), "numpy")]
    return library_of.moveaxis(array, source, destination)

# SPDX-License-Identifier: MIT
"""One call of the library in JAX: its shapes and checks, its lowering to the handlers of src/bindings/xla.c, how it is
split over devices, and its rule of vmap. Gradients are in _gradients.py.

Programs are traced to custom_vmap of custom_partitioning of `handler_p`, the primitive that is lowered to XLA's custom
call: vmap sees the call before it is split over devices, and each device's part is a call again.
"""
from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import jax
import jax.custom_batching
import numpy
from jax.experimental.custom_partitioning import custom_partitioning
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from .. import _library
from .._library import library

# `enum call` of src/bindings/xla.c.
OPERATIONS = ("group_norm_forward", "group_norm_backward", "batch_norm_forward", "batch_norm_backward",
              "affine_forward", "affine_backward", "channel_norm_forward", "channel_norm_backward", "batch_norm_stats",
              "batch_norm_apply", "batch_norm_backward_sums", "batch_norm_backward_apply", "stats_merge", "sums_merge")
OPERATORS = ("group_norm", "batch_norm", "channel_norm", "affine")
SLOTS = _library.TENSOR_FIELDS
BIG = {"x", "pre_add", "post_add", "y", "u", "dy", "du", "dx", "dpost_add"}
PARAMETER_OF = {"dweight": "weight", "dbias": "bias", "dscale": "scale", "dshift": "shift", "dpre_bias": "pre_bias"}
# float64 whatever jax_enable_x64 is: uint32 with a last axis of 2.
WIDE = {"mean", "stats", "sums"}
TARGET = "normfuse"
# Names of axes of a mesh, pmap or vmap, and their sizes.
Axes = Tuple[Tuple[Any, int], ...]


class Call(NamedTuple):
    """The static part of a call. inputs and outputs are names of normfuse_tensors, in its order."""
    operation: str
    inputs: Tuple[str, ...]
    outputs: Tuple[str, ...]
    channels_last: bool
    groups: int = 0
    eps: float = 1e-5
    momentum: float = 0.0
    flags: int = 0
    activation: int = 0
    act_param: float = 0.0
    set_values: int = 0                 # values a channel has over all devices; 0: those of x
    has_wide_gradients: bool = False    # of parameters: in float32 at least, to be summed over devices
    statistics: int = 0
    eps_kind: int = 0
    y_dtype: str = ""                   # "": that of x

    @property
    def operator(self) -> str:
        return next(name for name in (*OPERATORS, "") if self.operation.startswith(name))

    @property
    def is_part(self) -> bool:
        """True if it is one of the calls that devices share a forward or a backward by."""
        return not self.operation.endswith(("forward", "backward"))

    @property
    def is_backward(self) -> bool:
        return "backward" in self.operation

    @property
    def evaluates(self) -> bool:
        return bool(self.flags & _library.EVALUATE)


def run(call: Call, arrays: Dict[str, Any]) -> Dict[str, Any]:
    """Makes the call; arrays has an array for each of its inputs."""
    return dict(zip(call.outputs, _bound(call)(*(arrays[name] for name in call.inputs))))


def ordered(names: Any) -> Tuple[str, ...]:
    return tuple(name for name in SLOTS if name in names)


# ---- shapes ---------------------------------------------------------------------------------------------------------


def _channels(call: Call, shape: Tuple[Any, ...]) -> Any:
    return shape[-1 if call.channels_last else 1] if len(shape) > 1 else 0


def _shapes(call: Call, avals: Sequence[Any]) -> List[Tuple[Tuple[int, ...], Any]]:
    """(shape, dtype) of each output."""
    given = dict(zip(call.inputs, avals))
    if call.operation.endswith("_merge"):
        return [(avals[0].shape[1:], avals[0].dtype)]
    x = given["x"]
    channels = _channels(call, x.shape)
    sets = (x.shape[0], call.groups) if call.operator in ("group_norm", "channel_norm") and x.ndim else (channels,)
    if call.operator == "channel_norm":
        sets += x.shape[1:-1] if call.channels_last else x.shape[2:]
    single = numpy.dtype("float64" if x.dtype == numpy.float64 else "float32")

    def one(name: str) -> Tuple[Tuple[int, ...], Any]:
        if name in ("y", "dpost_add"):
            return x.shape, given["dy"].dtype if name == "dpost_add" else numpy.dtype(call.y_dtype or x.dtype)
        if name in BIG:
            return x.shape, x.dtype
        if name in PARAMETER_OF:
            parameter = given[PARAMETER_OF[name]]
            is_wide = call.has_wide_gradients and parameter.dtype.itemsize < 4
            return parameter.shape, numpy.dtype("float32") if is_wide else parameter.dtype
        return {"mean": ((*sets, 2), numpy.dtype("uint32")), "rstd": (sets, single),
                "stats": ((channels, 3, 2), numpy.dtype("uint32")), "sums": ((channels, 2, 2), numpy.dtype("uint32"))
                }[name] if name not in given else (given[name].shape, given[name].dtype)
    return [one(name) for name in call.outputs]


def _numbers(avals: Sequence[Any]) -> List[Any]:
    """The arrays' shapes in numbers: each size that only the running program knows (jax.export) is a number of its own,
    for checks that hold for all. The library checks again when it runs."""
    sizes: Dict[Any, int] = {}

    def number(size: Any) -> int:
        return sizes.setdefault(size, 1009 + len(sizes)) if is_symbolic_dim(size) else size
    return [jax.ShapeDtypeStruct(tuple(map(number, aval.shape)), aval.dtype) for aval in avals]


def _describe(call: Call, avals: Sequence[Any], device_type: int) -> Tuple[_library.Tensors, List[Any]]:
    """Tensors of these shapes at addresses that nothing reads, and what keeps their memory alive."""
    names = list(zip(call.inputs, ((a.shape, a.dtype) for a in avals))) + list(zip(call.outputs, _shapes(call, avals)))
    tensors, alive, address, fields = _library.Tensors(), [], 1 << 20, {}
    for name, (shape, dtype) in names:
        if name in fields:  # running statistics, updated where they are
            continue
        bits = dtype.itemsize * 8
        if name in WIDE and dtype == numpy.uint32:
            shape, bits, code = shape[:-1], 64, 2
        elif dtype.name == "bfloat16":
            code = 4
        else:
            code = {"f": 2, "i": 0, "u": 1, "c": 5, "b": 6}.get(dtype.kind, 3)
        strides = [int(numpy.prod(shape[a + 1:], dtype=object)) for a in range(len(shape))]
        if name in BIG and call.channels_last and len(shape) > 1:
            shape, strides = ([v[0], v[-1], *v[1:-1]] for v in (list(shape), strides))
        fields[name] = _library.make_tensor(address, code, bits, shape, strides, device_type, 0)
        alive.append(fields[name])
        setattr(tensors, name, ctypes.pointer(fields[name]))
        address += (int(numpy.prod(shape, dtype=object)) * bits // 8 | 4095) + 1
    return tensors, alive


def _options(call: Call) -> Any:
    common = {"flags": call.flags, "activation": call.activation, "act_param": call.act_param}
    if call.operator == "affine":
        return _library.AffineOptions(**common)
    if call.operator == "channel_norm":
        return _library.ChannelNormOptions(groups=call.groups, eps=call.eps, statistics=call.statistics,
                                           eps_kind=call.eps_kind, **common)
    common.update(eps=call.eps, momentum=call.momentum, set_values=call.set_values)
    if call.operator == "batch_norm":
        return _library.BatchNormOptions(**common)
    return _library.GroupNormOptions(groups=call.groups, **common)


def _scratch_bytes(call: Call, avals: Sequence[Any], device_type: int) -> int:
    """Asks the library, which checks every argument on the way, and raises what it refuses."""
    tensors, alive = _describe(call, avals, device_type)
    direction = "backward" if call.is_backward else "forward"
    function = getattr(library, f"normfuse_{call.operator}_{direction}_scratch_bytes")
    most = 0
    for sync in ((None, 0), (4096, 65536))[:1 + (device_type == _library.CUDA)]:
        size = ctypes.c_size_t()
        where = _library.Exec(sync=sync[0], sync_bytes=sync[1])
        status = function(_options(call), ctypes.byref(tensors), ctypes.byref(where), ctypes.byref(size))
        try:
            _library.call(status, {"groups": "num_groups"} if call.operator == "group_norm" else {})
        except Exception as error:  # the question is of the arguments, not of scratch
            raise type(error)(str(error).replace("_scratch_bytes", "")) from None
        most = max(most, size.value)
    del alive
    return most


def varying_of(aval: Any) -> "frozenset[Any]":
    """The mesh axes that an array varies over under shard_map (JAX before 0.10 has another name for them)."""
    kind = getattr(aval, "manual_axis_type", None)
    return getattr(aval, "vma", frozenset()) if kind is None else kind.varying


def all_varying(arrays: Dict[str, Any]) -> Dict[str, Any]:
    """Arrays that vary over the mesh axes that any of them varies over. JAX then sums the gradient of an array that was
    the same on all devices."""
    varying = {name: varying_of(jax.typeof(value)) for name, value in arrays.items()}
    axes: "frozenset[Any]" = frozenset().union(*varying.values())
    return {name: jax.lax.pcast(value, tuple(axes - varying[name]), to="varying") if axes - varying[name] else value
            for name, value in arrays.items()}


def _abstract(*avals: Any, call: Call) -> List[Any]:
    if not call.is_part:
        _scratch_bytes(call, _numbers(avals), _library.CPU)
    varying = frozenset().union(*(varying_of(aval) for aval in avals))
    if not varying:
        return [jax.core.ShapedArray(shape, dtype) for shape, dtype in _shapes(call, avals)]
    like = next(aval for aval in avals if varying_of(aval))
    kind = getattr(like, "manual_axis_type", None)
    if kind is None:
        return [jax.core.ShapedArray(shape, dtype).update(vma=varying) for shape, dtype in _shapes(call, avals)]
    kind = type(kind)(varying=varying, unreduced=frozenset(), reduced=frozenset())
    return [jax.core.ShapedArray(shape, dtype, manual_axis_type=kind, sharding=like.sharding.update(
        spec=jax.sharding.PartitionSpec(*(None,) * len(shape)))) for shape, dtype in _shapes(call, avals)]


# ---- lowering -------------------------------------------------------------------------------------------------------


def _mask(names: Sequence[str]) -> int:
    return sum(1 << SLOTS.index(name) for name in names)


def _whole(call: Call) -> Call:
    """The forward or backward that a part of a sharded one has the scratch of."""
    if not call.is_part:
        return call
    if call.is_backward:
        wanted = set(call.outputs) - {"sums"} | {"dx"}
        return call._replace(operation="batch_norm_backward", outputs=ordered(wanted),
                             inputs=ordered(set(call.inputs) - {"sums"}))
    return call._replace(operation="batch_norm_forward",
                         outputs=ordered(set(call.outputs) - {"stats"} | {"y", "mean", "rstd"}),
                         inputs=ordered(set(call.inputs) - {"stats"}))


def _lower(ctx: Any, *operands: Any, call: Call, is_cuda: bool) -> Any:
    # `struct attributes` of src/bindings/xla.c.
    integers = [OPERATIONS.index(call.operation), _mask(call.inputs), _mask(call.outputs), call.channels_last,
                call.groups,
                call.flags, call.activation, call.set_values, call.statistics, call.eps_kind]
    reals = [call.eps, call.momentum, call.act_param]
    shared = {i: call.outputs.index(name) for i, name in enumerate(call.inputs) if name in call.outputs} \
        if not call.operation.endswith("_merge") else {}
    avals = list(ctx.avals_out)
    if is_cuda and not call.operation.endswith("_merge"):
        if any(is_symbolic_dim(size) for aval in ctx.avals_in for size in aval.shape):
            raise NotImplementedError("normfuse.jax: on CUDA scratch memory is of a fixed size; export a program for "
                                      "each shape, with numbers")
        whole = _whole(call)
        given = dict(zip(call.inputs, ctx.avals_in))
        size = _scratch_bytes(whole, [given[name] for name in whole.inputs], _library.CUDA)
        avals.append(jax.core.ShapedArray((size,), numpy.dtype("uint8")))
    rule = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=shared)
    return rule(ctx.replace(avals_out=avals), *operands, integers=numpy.array(integers, "int64"),
                reals=numpy.array(reals, "float64"))[:len(call.outputs)]


handler_p = Primitive("normfuse_handler")
handler_p.multiple_results = True
handler_p.def_abstract_eval(_abstract)
mlir.register_lowering(handler_p, functools.partial(_lower, is_cuda=False), platform="cpu")
mlir.register_lowering(handler_p, functools.partial(_lower, is_cuda=True), platform="cuda")

for _platform, _handler in (("cpu", library.normfuse_xla_cpu), ("CUDA", library.normfuse_xla_cuda)):
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handler), platform=_platform)


# ---- several devices ------------------------------------------------------------------------------------------------


def _axes(call: Call, name: str, rank: int) -> Tuple[str, ...]:
    """The meaning of each axis of an array: "n", the samples; "c"; a spatial one; or others."""
    if name in BIG:
        spatial = tuple(f"s{a}" for a in range(rank - 2))
        return ("n", *spatial, "c") if call.channels_last else ("n", "c", *spatial)
    if name in ("mean", "rstd") and call.operator == "channel_norm":
        spatial = tuple(f"s{a}" for a in range(rank - 2 - (name == "mean")))
        return ("n", "g", *spatial, "two")[:rank]
    if name in ("mean", "rstd") and call.operator == "group_norm":
        return ("n", "g", "two")[:rank]
    if name in ("mean", "rstd"):
        return ("c", "two")[:rank]
    return ("n", "c") if rank == 2 else ("c",)


def refuse_symbolic_axes() -> None:
    raise NotImplementedError("normfuse.jax: axis_name takes shapes that are known while tracing; export the program "
                              "with numbers")


def axes_of(axis_name: Any) -> Axes:
    """The names that a name, a tuple of names, or None says."""
    names = axis_name if isinstance(axis_name, (tuple, list)) else () if axis_name is None else (axis_name,)
    try:
        return tuple((name, jax.lax.psum(1, name)) for name in names)
    except jax.errors.InconclusiveDimensionOperation:
        return refuse_symbolic_axes()  # type: ignore[func-returns-value]


def index_along(axes: Axes) -> Any:
    """This device's position among those that share the statistics."""
    index = 0
    for name, size in axes:
        index = index * size + jax.lax.axis_index(name)
    return index


def _gathered(part: Any, axes: Axes, index: Any) -> Any:
    """[devices, ...]: the parts of all devices, the same everywhere, which JAX knows of a sum (and not of all_gather).
    Unlike all_gather, a sum needs no size of an axis: JAX does not have it in a backward under vmap(axis_name)."""
    own = jax.numpy.arange(math.prod(size for _, size in axes)) == index
    own = own.reshape(-1, *(1,) * part.ndim)
    return jax.lax.psum(jax.numpy.where(own, part, jax.numpy.zeros_like(part)), tuple(axis for axis, _ in axes))


def synchronized(call: Call, arrays: Dict[str, Any], axes: Axes, index: Any, sums_parameters: bool = False
                 ) -> Dict[str, Any]:
    """A batch norm in training over the samples of all devices along these axes: each computes the statistics of its
    part, and three (backward: two) numbers a channel are gathered. index: index_along(axes).

    Gradients of parameters are this device's share, of its own samples: their sum over the devices is the gradient.
    With sums_parameters dweight and dbias are that sum, which needs no further communication."""
    outputs: Dict[str, Any] = {}

    def part(operation: str, wanted: Any, given: Dict[str, Any], **changes: Any) -> None:
        if wanted:
            one = call._replace(operation=operation, inputs=ordered(given), outputs=ordered(wanted), **changes)
            outputs.update(run(one, given))

    def merged(name: str) -> Any:
        return run(Call(f"{name}_merge", (name,), (name,), False), {name: _gathered(outputs.pop(name), axes, index)})

    x, wanted = arrays["x"], set(call.outputs)
    if not call.is_backward:
        running = {"running_mean", "running_var"} & set(arrays)
        rest = {name: value for name, value in arrays.items() if name not in running}
        part("batch_norm_stats", {"stats"} | {"u"} & wanted,
             {name: rest[name] for name in ("x", "pre_add", "pre_bias") if name in rest})
        stats = merged("stats")
        if "u" in outputs:  # which has what was added, and is rounded
            rest["x"] = outputs["u"]
            rest = {name: value for name, value in rest.items() if name not in ("pre_add", "pre_bias")}
        part("batch_norm_apply", wanted - {"u"} - running, {**rest, **stats})
        # No samples: the updates depend on what is the same on all devices, and JAX sees it.
        none = jax.numpy.zeros((0, *x.shape[1:]), x.dtype)
        part("batch_norm_apply", running, {"x": none, **stats, **{name: arrays[name] for name in running}})
        return outputs

    values = x.size // max(_channels(call, x.shape), 1) * math.prod(size for _, size in axes)
    part("batch_norm_backward_sums", {"sums"} | {"dpost_add"} & wanted,
         {name: value for name, value in arrays.items() if name != "du"})
    of_parameters = set() if sums_parameters else {"dweight", "dbias"} & wanted
    part("batch_norm_backward_apply", of_parameters,
         {**{name: value for name, value in arrays.items() if name != "du"}, "sums": outputs["sums"]},
         set_values=values)
    part("batch_norm_backward_apply", wanted - of_parameters - {"dpost_add"}, {**arrays, **merged("sums")},
         set_values=values, has_wide_gradients=sums_parameters)
    return outputs


@functools.lru_cache(maxsize=None)
def _partitioned(call: Call, ranks: Tuple[Tuple[int, ...], Tuple[int, ...]], has_shardy: bool) -> Any:
    """The call as a function that XLA's partitioner may split along the samples, a channel norm along its positions
    too, and along nothing else. The partitioner before Shardy does not split it: JAX ends the process where that one's
    shardings have no names."""
    inputs = [_axes(call, name, rank) for name, rank in zip(call.inputs, ranks[0])]
    outputs = [_axes(call, name, rank) for name, rank in zip(call.outputs, ranks[1])]
    factors = dict.fromkeys(factor for axes in (*inputs, *outputs) for factor in axes)  # in order, as Shardy wants them
    trains = call.operator == "batch_norm" and not call.evaluates
    # Running statistics of instance norm are means over the batch.
    if call.is_part or (call.operator == "group_norm" and "running_mean" in call.outputs):
        separable = set()
    else:
        separable = {f for f in factors if f == "n" or call.operator == "channel_norm" and f.startswith("s")}
    # The factors that gradients of parameters are sums over.
    summed = {name: separable.difference(axes) for name, axes in zip(call.outputs, outputs) if name in PARAMETER_OF}

    @custom_partitioning
    def function(*arrays: Any) -> Any:
        return tuple(handler_p.bind(*arrays, call=call))

    def split(mesh: Any, arguments: Any) -> Dict[str, Tuple[str, ...]]:
        """The mesh axes that each factor is split along."""
        at = call.inputs.index("x" if "x" in call.inputs else call.inputs[0])
        x = arguments[at]
        found = {}
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else ()
        for factor, size, names in zip(inputs[at], x.shape, spec):
            names = () if names is None else names if isinstance(names, tuple) else (names,)
            # XLA pads what the devices do not divide, and the sums would be of the padding, too.
            is_sum = trains or any(factor in over for over in summed.values())
            if factor in separable and names and not (is_sum and size % math.prod(mesh.shape[name] for name in names)):
                found[factor] = names
        return found

    def placed(mesh: Any, found: Dict[str, Tuple[str, ...]], arrays: Any) -> Tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, PartitionSpec(*map(found.get, axes))) for axes in arrays)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        found = split(mesh, arguments)

        def part(*arrays: Any) -> Any:
            if not found:
                return tuple(handler_p.bind(*arrays, call=call))
            if trains:
                axes = tuple((name, mesh.shape[name]) for name in found["n"])
                made = synchronized(call, dict(zip(call.inputs, arrays)), axes, index_along(axes), sums_parameters=True)
            else:
                made = dict(zip(call.outputs, handler_p.bind(*arrays, call=call._replace(has_wide_gradients=True))))
            for name in ordered(summed.keys() - {"dweight", "dbias"} if trains else summed):
                axes = tuple(axis for factor, names in found.items() if factor in summed[name] for axis in names)
                made[name] = jax.lax.psum(made[name], axes) if axes else made[name]
            return tuple(made[name].astype(want[1]) for name, want in zip(call.outputs, _shapes(call, arrays)))
        return mesh, part, placed(mesh, found, outputs), placed(mesh, found, inputs)

    rule = ", ".join(map(" ".join, inputs)) + " -> " + ", ".join(map(" ".join, outputs))
    function.def_partition(partition, decode_shardings=has_shardy, sharding_rule=rule,
                           infer_sharding_from_operands=lambda mesh, arguments, results: placed(mesh, {}, outputs),
                           need_replication_factors=tuple(f for f in factors if f not in separable))
    return function


# ---- vmap -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _bound(call: Call) -> Any:
    """The call as a function of arrays. Batches become samples where samples do not share what is mapped over, and run
    one after the other elsewhere."""

    @jax.custom_batching.custom_vmap
    def function(*arrays: Any) -> Any:
        if call.is_part:
            return tuple(handler_p.bind(*arrays, call=call))
        ranks = (tuple(a.ndim for a in arrays), tuple(len(shape) for shape, _ in _shapes(call, arrays)))
        return _partitioned(call, ranks, bool(getattr(jax.config, "jax_use_shardy_partitioner", True)))(*arrays)

    @function.def_vmap
    def rule(size: int, is_mapped: Sequence[bool], *arrays: Any) -> Any:
        axes = [_axes(call, name, a.ndim - mapped) for name, a, mapped in zip(call.inputs, arrays, is_mapped)]
        if _are_samples(call, axes, is_mapped):
            at = call.inputs.index("x")
            samples = arrays[at].shape[int(is_mapped[at])]

            def fold(array: Any, mapped: bool, labels: Tuple[str, ...]) -> Any:
                if "n" not in labels:
                    return array
                if not mapped:
                    array = jax.numpy.broadcast_to(array, (size, *array.shape))
                return array.reshape(size * samples, *array.shape[2:])
            results = function(*map(fold, arrays, is_mapped, axes))
            results = tuple(r.reshape(size, samples, *r.shape[1:]) for r in results)
        else:
            def one(values: Any) -> Any:
                left = iter(values)
                return function(*(next(left) if mapped else a for a, mapped in zip(arrays, is_mapped)))
            results = jax.lax.map(one, tuple(a for a, mapped in zip(arrays, is_mapped) if mapped))
        return results, (True,) * len(results)

    return function


def _are_samples(call: Call, axes: Sequence[Tuple[str, ...]], is_mapped: Sequence[bool]) -> bool:
    """True if the samples of one call give what a call for each element of the batch gives."""
    if call.is_part or (call.operator == "batch_norm" and not call.evaluates):
        return False
    sums = [name for name in call.outputs if name.startswith("running") or (
        name in ("dweight", "dbias", "dpre_bias") and "n" not in axes[call.inputs.index(PARAMETER_OF[name])])]
    return not sums and all("n" in labels for labels, mapped in zip(axes, is_mapped) if mapped)


# ---- without jit ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _compiled(call: Call) -> Any:
    return jax.jit(functools.partial(handler_p.bind, call=call))


def _now(*arrays: Any, call: Call) -> Any:
    with jax.disable_jit(False):
        return _compiled(call)(*arrays)


handler_p.def_impl(_now)

# SPDX-License-Identifier: MIT
"""Finds what exporters make of normalizations in an ONNX graph, and replaces it by operators of the domain "normfuse".

A group norm is a GroupNormalization, or as before version 18 of ONNX

    Reshape [0, G, -1], InstanceNormalization with scale 1 and bias 0, Reshape to the shape of x, Mul, Add

with an activation behind it: one node, or Sigmoid and Mul for SiLU. An Add of what differs along N and C alone in front
of a group norm becomes its skip.

A channel norm is a LayerNormalization or an RMSNormalization of the last axis, or the nodes that these, or the norms of
channels that models write themselves, consist of: over the last axis or the second one

    ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div            layer norm
    Pow, ReduceMean, Add, Sqrt, Div                             RMS norm; also Reciprocal and Mul for Div
    ReduceL2, Clip, Expand, Div, Mul by the root of C           of_norm

with Mul and Add behind it. Between two Transposes, there and back, one of the last axis is one of the second. A node
belongs to one pattern at most. Graphs are read through onnx's protobuf classes and written as bytes: fields of the
model that are not replaced are copied, whatever they hold. A file may hold anything:
what is malformed is a ValueError, and memory and time grow with the file, not with the sizes that it claims.
"""
from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, Union

import numpy
import onnx
from onnx import numpy_helper

DOMAIN = "normfuse"
DEFAULT_DOMAINS = ("", "ai.onnx")
NORMS = ("InstanceNormalization", "GroupNormalization", "BatchNormalization", "LayerNormalization", "RMSNormalization")
# The nodes by which a norm that a model writes itself is found.
REDUCTIONS = ("ReduceMean", "ReduceL2")
# Nodes that are removed with a norm where nothing else uses their outputs.
CONSTANT_NODES = ("Constant", "ConstantOfShape", "Identity", "Shape")
# Larger initializers are no shapes; shape inference does not need their values.
SMALL_BYTES = 4096
# Constants of more elements are not read, and new initializers have no more together.
CONSTANT_ELEMENTS, FILLED_ELEMENTS = 1 << 16, 1 << 20
MOST_AXES = 32
# Shape inference enters a function at each of its calls.
CALLED_NODES = 1 << 20
# The first version whose operators mean what they mean here: Reshape's shape is an input, Mul and Add broadcast as
# NumPy.
FIRST_OPSET = 7
# From this version of the IR on, an initializer that is an input is a default. Before, every initializer is an input,
# and constant all the same.
FIRST_IR_OF_DEFAULTS = 4

# The fewest and the most inputs of the nodes that are looked at.
INPUTS = {"InstanceNormalization": (3, 3), "GroupNormalization": (3, 3), "BatchNormalization": (5, 5), "Conv": (2, 3),
          "Reshape": (2, 2), "Mul": (2, 2), "Add": (2, 2), "Clip": (1, 3), "Constant": (0, 0),
          "LayerNormalization": (2, 3), "RMSNormalization": (2, 2), "ReduceMean": (1, 2), "ReduceL2": (1, 2),
          **dict.fromkeys(("Sub", "Div", "Pow", "Expand"), (2, 2)),
          **dict.fromkeys(("Transpose", "Sqrt", "Reciprocal"), (1, 1)),
          **dict.fromkeys(("ConstantOfShape", "Identity", "Shape", "Sigmoid", "Relu", "LeakyRelu", "Elu", "HardSwish",
                           "Mish", "Gelu", "Swish"), (1, 1))}
# Which of them are vectors, and the fewest axes of the first one.
VECTORS = {"InstanceNormalization": (1, 2), "GroupNormalization": (1, 2), "BatchNormalization": (1, 2, 3, 4),
           "Reshape": (1,), "ConstantOfShape": (0,)}
AXES = {"InstanceNormalization": 2, "GroupNormalization": 2, "BatchNormalization": 1}

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
NUMBERS = (*FLOATS, onnx.TensorProto.INT32, onnx.TensorProto.INT64)

# Field numbers of onnx.proto.
MODEL_GRAPH, MODEL_OPSET = 7, 8
GRAPH_NODE, GRAPH_INITIALIZER, GRAPH_INPUT, GRAPH_VALUE_INFO = 1, 5, 11, 13


# ---- bytes ----------------------------------------------------------------------------------------------------------

def _varint(data: memoryview, at: int) -> Tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("not a serialized ONNX model: a number is cut off")


def _fields(data: memoryview) -> Iterator[Tuple[int, memoryview, memoryview]]:
    """(number, the field with its tag, its payload) of each field of a serialized message; number 0 for what is neither
    bytes nor a message, whatever its number."""
    at = 0
    while at < len(data):
        tag, begin = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            end = _varint(data, begin)[1]
        elif kind == 2:
            length, begin = _varint(data, begin)
            end = begin + length
        elif kind in (1, 5):
            end = begin + (8 if kind == 1 else 4)
        else:
            raise ValueError("not a serialized ONNX model: a field of an unknown kind")
        if end > len(data):
            raise ValueError("not a serialized ONNX model: a field is cut off")
        yield tag >> 3 if kind == 2 else 0, data[at:end], data[begin:end]
        at = end


def _encode_varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)


def _encode(number: int, payload: bytes) -> bytes:
    return _encode_varint(number << 3 | 2) + _encode_varint(len(payload)) + payload


# ---- the graph ------------------------------------------------------------------------------------------------------

def _label(node: Any) -> str:
    return node.name or next(filter(None, node.output), node.op_type)


def _is(node: Any, *types: str) -> bool:
    return node is not None and node.op_type in types and node.domain in DEFAULT_DOMAINS


def _subgraphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _nodes_within(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield node
        for inner in _subgraphs(node):
            yield from _nodes_within(inner.node)


def _names(graph: Any) -> Iterator[str]:
    """Every name of a value, those of subgraphs too."""
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        yield value.name
    for tensor in graph.sparse_initializer:
        yield tensor.values.name
    for node in graph.node:
        yield from node.input
        yield from node.output
        for inner in _subgraphs(node):
            yield from _names(inner)


def _norms_within(nodes: Any) -> Iterator[Any]:
    return (node for node in _nodes_within(nodes) if _is(node, *NORMS))


def _attribute(node: Any, name: str, kind: int, default: Any = None) -> Any:
    """ValueError where it is of another kind, or there twice."""
    found = [attribute for attribute in node.attribute if attribute.name == name]
    if not found:
        return default
    if len(found) > 1 or found[0].type != kind:
        raise ValueError(f"node {_label(node)!r}: the attribute {name} is there twice, or of another type "
                         "than ONNX says")
    return onnx.helper.get_attribute_value(found[0])


def _integer(node: Any, name: str, default: Any = None) -> Any:
    return _attribute(node, name, onnx.AttributeProto.INT, default)


def _float(node: Any, name: str, default: Any = None) -> Any:
    return _attribute(node, name, onnx.AttributeProto.FLOAT, default)


@dataclasses.dataclass
class Survey:
    """Who makes and who reads the values of a graph."""
    given: Set[str]  # inputs and initializers
    makers: Dict[str, int]  # the node that makes a value
    reads: List[Set[str]]  # of each node and its subgraphs
    outside: Set[str]  # what is read, and made by nothing in the graph
    is_sorted: bool  # whether nodes read only what is made before them


def _survey(graph: Any) -> Survey:
    """ValueError: a value is made twice, or needs itself."""
    tensors = [*(tensor.name for tensor in graph.initializer),
               *(tensor.values.name for tensor in graph.sparse_initializer)]
    inputs = [value.name for value in graph.input]
    for names in (inputs, tensors):
        if len(set(names)) != len(names):
            raise ValueError(f"the graph {graph.name!r} has two inputs or two initializers of one name")
    given, makers = {*inputs, *tensors}, {}
    for i, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in given or name in makers:
                raise ValueError(f"node {_label(node)!r}: its output {name!r} is made elsewhere too")
            makers[name] = i
    reads = [{*filter(None, node.input), *(name for inner in _subgraphs(node) for name in _survey(inner).outside)}
             for node in graph.node]
    is_sorted = all(makers.get(name, -1) < i for i, names in enumerate(reads) for name in names)
    if not is_sorted:
        _check_cycles(graph.node, makers, reads)
    outside = {name for names in (*reads, [value.name for value in graph.output]) for name in names
               if name not in given and name not in makers}
    return Survey(given, makers, reads, outside, is_sorted)


def _check_cycles(nodes: Any, makers: Dict[str, int], reads: Sequence[Set[str]]) -> None:
    needs = [{makers[name] for name in names if name in makers} for names in reads]
    needed_by: List[List[int]] = [[] for _ in needs]
    for i, others in enumerate(needs):
        for other in others:
            needed_by[other].append(i)
    left = [len(others) for others in needs]
    ready = [i for i, count in enumerate(left) if count == 0]
    for i in ready:  # which grows
        for user in needed_by[i]:
            left[user] -= 1
            if left[user] == 0:
                ready.append(user)
    stuck = {i for i, count in enumerate(left) if count}
    if stuck:
        i, passed = min(stuck), set()
        while i not in passed:
            passed.add(i)
            i = min(needs[i] & stuck)
        raise ValueError(f"node {_label(nodes[i])!r}: it needs its own output")


def _check_calls(model: Any) -> None:
    """ValueError: functions of the model call themselves, or one another so often that reading them would not end."""
    functions = {(function.domain, function.name, function.overload): function for function in model.functions}
    nodes_of: Dict[Tuple[str, str, str], int] = {}  # that a call becomes

    def calls(nodes: Any) -> Iterator[Tuple[str, str, str]]:
        return ((node.domain, node.op_type, node.overload) for node in _nodes_within(nodes))

    entered: Set[Tuple[str, str, str]] = set()
    stack = list(functions)
    while stack:
        key = stack[-1]
        called = [] if key in nodes_of else list(calls(functions[key].node))
        waiting = [other for other in called if other in functions and other not in nodes_of]
        if waiting and key in entered:
            raise ValueError(f"the function {key[1]!r} calls itself")
        if waiting:
            entered.add(key)
            stack += set(waiting)
            continue
        nodes_of.setdefault(key, sum(1 + nodes_of.get(other, 0) for other in called))
        stack.pop()
    if sum(nodes_of.get(key, 0) for key in calls(model.graph.node)) > CALLED_NODES or \
            any(count > CALLED_NODES for count in nodes_of.values()):
        raise ValueError(f"calls of the model's functions become more than {CALLED_NODES} nodes")


def _check_inputs(node: Any) -> None:
    fewest, most = INPUTS[node.op_type]
    if not fewest <= len(node.input) <= most or not all(node.input[:fewest]):
        inputs = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        raise ValueError(f"node {_label(node)!r}: {node.op_type} must have {inputs} inputs")
    if not node.output or not node.output[0]:
        raise ValueError(f"node {_label(node)!r}: {node.op_type} must have an output")


def _check_tensor(tensor: Any, owner: str) -> None:
    """That a tensor has as many elements as its sizes say."""
    if len(tensor.dims) > MOST_AXES or any(size < 0 for size in tensor.dims):
        raise ValueError(f"{owner} has more than {MOST_AXES} axes or a negative size")
    if tensor.data_type not in NUMBERS or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return
    if tensor.HasField("raw_data"):
        elements, rest = divmod(len(tensor.raw_data), _element_bytes(tensor.data_type))
    else:
        elements, rest = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type))), 0
    if elements != math.prod(tensor.dims) or rest:
        raise ValueError(f"{owner} cannot be read: it has {elements} elements of the sizes {list(tensor.dims)}")


def _element_bytes(kind: int) -> int:
    return onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize


class Graph:
    """A model's graph: who makes and who uses a value, its shape, and its value where that is constant."""

    def __init__(self, model: Any, folder: Optional[str]) -> None:
        graph = model.graph
        self.folder = folder
        self.nodes = graph.node
        self.opset = max((entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS), default=1)
        self.lists_initializers = model.ir_version < FIRST_IR_OF_DEFAULTS
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = {value.name for value in graph.input}
        self.outputs = [value.name for value in graph.output]
        self.obstacle = self._find_obstacle(model)  # why no node is replaced
        if self.opset >= FIRST_OPSET:
            for node in graph.node:
                if _is(node, *INPUTS):
                    _check_inputs(node)
        for tensor in graph.initializer:
            _check_tensor(tensor, f"the tensor {tensor.name!r}")
        self.survey = _survey(graph)
        self._check_outside()
        if not self.survey.is_sorted:
            self.obstacle = self.obstacle or "a node of the graph comes before what it reads"
        self.consumers: Dict[str, List[int]] = {}
        self.kept = {*self.outputs, *_names_beside(model)}  # used by what is no node of this graph
        for i, node in enumerate(graph.node):
            inputs = list(filter(None, node.input))
            for name in (*inputs, *self.survey.reads[i].difference(inputs)):
                self.consumers.setdefault(name, []).append(i)
        self.claimed: Set[int] = set()  # nodes of patterns that were found
        self.names = set(_names(graph))
        self.sources: Dict[str, str] = {}
        _check_calls(model)
        self.shapes, self.problem = _infer(model)
        if self.opset >= FIRST_OPSET:
            self._check_axes()

    def _find_obstacle(self, model: Any) -> Optional[str]:
        if self.opset < FIRST_OPSET:
            return f"before version {FIRST_OPSET} of ONNX operators have other meanings"
        if any(function.domain in DEFAULT_DOMAINS for function in model.functions):
            return "functions of the model take the place of ONNX's operators"
        return None

    def _check_outside(self) -> None:
        for node, names in zip(self.nodes, self.survey.reads):
            for name in sorted(names & self.survey.outside):
                raise ValueError(f"node {_label(node)!r}: nothing makes its input {name!r}")
        for name in self.survey.outside:
            raise ValueError(f"nothing makes the output {name!r} of the graph")

    def _check_axes(self) -> None:
        for node in self.nodes:
            if not _is(node, *VECTORS):
                continue
            for name in (node.input[i] for i in VECTORS[node.op_type]):
                shape = self.shape(name)
                if shape is not None and len(shape) != 1:
                    raise ValueError(f"node {_label(node)!r}: its input {name!r} has {len(shape)} axes, must have 1")
            shape = self.shape(node.input[0])
            if shape is not None and len(shape) < AXES.get(node.op_type, 0):
                raise ValueError(f"node {_label(node)!r}: its input {node.input[0]!r} has {len(shape)} axes, too few")

    def producer(self, name: str) -> Any:
        """The node that makes a value, if no pattern has it."""
        i = self.survey.makers.get(name)
        return None if i is None or i in self.claimed else self.nodes[i]

    def users(self, name: str) -> List[int]:
        """The nodes that use a value; none where something else uses it too, such as a pattern that was found."""
        users = self.consumers.get(name, [])
        return [] if name in self.kept or not self.claimed.isdisjoint(users) else users

    def claim(self, nodes: Iterable[int]) -> None:
        """A pattern has these nodes: no other one gets them."""
        self.claimed.update(nodes)

    def only_user(self, name: str) -> Optional[int]:
        users = self.users(name)
        return users[0] if len(users) == 1 else None

    def shape(self, name: str) -> Optional[List[Any]]:
        """Sizes, names of sizes, None where nothing is known of one; None where the rank is not known."""
        return self.shapes.get(name)

    def source(self, name: str) -> str:
        """The value that a chain of Identity copies."""
        passed = []
        while name not in self.sources and _is(self.producer(name), "Identity"):
            passed.append(name)
            name = self.producer(name).input[0]
        name = self.sources.get(name, name)
        self.sources.update(dict.fromkeys(passed, name))
        return name

    def is_constant(self, name: str) -> bool:
        """True if ONNX Runtime takes it for constant, without reading it."""
        name = self.source(name)
        if name in self.initializers:
            return self.lists_initializers or name not in self.inputs
        return _is(self.producer(name), "Constant")

    def constant(self, name: str) -> Optional[numpy.ndarray]:
        """The value of what is constant; None for large ones, which nothing here needs."""
        name = self.source(name)
        node = self.producer(name)
        if name in self.initializers:
            return self._read(self.initializers[name], f"the tensor {name!r}") if self.is_constant(name) else None
        if _is(node, "ConstantOfShape"):
            return self._fill_of(node)
        if not _is(node, "Constant"):
            return None
        if not node.attribute:
            raise ValueError(f"node {_label(node)!r}: Constant has no value")
        for key, kind in (("value_float", "FLOAT"), ("value_floats", "FLOATS"), ("value_int", "INT"),
                          ("value_ints", "INTS")):
            value = _attribute(node, key, onnx.AttributeProto.AttributeType.Value(kind))
            if value is not None:
                return numpy.asarray(value, numpy.float32 if "float" in key else numpy.int64)
        value = _attribute(node, "value", onnx.AttributeProto.TENSOR)
        return None if value is None else self._read(value, f"the tensor of node {_label(node)!r}")

    def _fill_of(self, node: Any) -> Optional[numpy.ndarray]:
        """The tensor that a ConstantOfShape makes, in the memory of one element."""
        sizes, given = self.constant(node.input[0]), _attribute(node, "value", onnx.AttributeProto.TENSOR)
        value = (numpy.zeros(1, numpy.float32) if given is None else
                 self._read(given, f"the value of node {_label(node)!r}"))
        if sizes is None or value is None:
            return None
        if sizes.ndim != 1 or sizes.dtype.kind != "i" or (sizes < 0).any() or value.size != 1:
            raise ValueError(f"node {_label(node)!r}: its input is no shape, or its value not one element")
        shape = tuple(map(int, sizes))
        if len(shape) > MOST_AXES or math.prod(shape) > CONSTANT_ELEMENTS:
            return None
        return numpy.broadcast_to(value.reshape(()), shape)

    def _read(self, tensor: Any, owner: str) -> Optional[numpy.ndarray]:
        _check_tensor(tensor, owner)
        if tensor.data_type not in NUMBERS or math.prod(tensor.dims) > CONSTANT_ELEMENTS:
            return None
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor = self._read_file(tensor, owner)
        try:
            return numpy_helper.to_array(tensor)
        except Exception as error:  # values beyond their type, of several classes
            raise ValueError(f"{owner} cannot be read: {error}") from error

    def _read_file(self, tensor: Any, owner: str) -> Any:
        """The tensor with its data from a file in the model's folder. No other file is opened, by links neither."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        size = math.prod(tensor.dims) * _element_bytes(tensor.data_type)
        try:
            if self.folder is None:
                raise ValueError("it is in a file, and no folder is given")
            folder = os.path.realpath(self.folder)
            path = os.path.realpath(os.path.join(folder, entries.get("location", "")))
            if os.path.commonpath([folder, path]) != folder or not os.path.isfile(path):
                raise ValueError(f"{entries.get('location', '')!r} is not a file in the model's folder")
            offset, length = int(entries.get("offset", 0)), int(entries.get("length", size))
            if length != size or not 0 <= offset <= os.path.getsize(path) - size:
                raise ValueError(f"it has {size} bytes, and does not lie in {path!r} at {offset} with {length} bytes")
            with open(path, "rb") as file:
                file.seek(offset)
                return onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=file.read(size))
        except (OSError, ValueError) as error:
            raise ValueError(f"{owner} cannot be read: {error}") from error

    def is_filled(self, name: str, value: float) -> Optional[int]:
        """How many elements the constant vector has, if all are `value`."""
        array = self.constant(name)
        return array.size if array is not None and array.ndim == 1 and (array == value).all() else None


def _names_beside(model: Any) -> Iterator[str]:
    """The names used by parts of a model that are no nodes."""
    for annotation in model.graph.quantization_annotation:
        yield annotation.tensor_name
        yield from (entry.value for entry in annotation.quant_parameter_tensor_names)
    for training in model.training_info:
        for graph in (training.initialization, training.algorithm):
            yield from _survey(graph).outside
        for entry in (*training.initialization_binding, *training.update_binding):
            yield from (entry.key, entry.value)


def _infer(model: Any) -> Tuple[Dict[str, List[Any]], Optional[str]]:
    """Shapes by name, and why there are no more than those that the model says."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    for tensor in light.graph.initializer:
        if tensor.ByteSize() > SMALL_BYTES:
            dims, kind, name = list(tensor.dims), tensor.data_type, tensor.name
            tensor.Clear()
            tensor.dims.extend(dims)
            tensor.data_type, tensor.name = kind, name
    problem = None
    try:
        light = onnx.shape_inference.infer_shapes(light)
    except Exception as error:  # of onnx's C++, of several classes
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
    shapes: Dict[str, List[Any]] = {tensor.name: list(tensor.dims) for tensor in light.graph.initializer}
    for value in (*light.graph.input, *light.graph.value_info, *light.graph.output):
        kind = value.type.tensor_type
        if kind.HasField("shape"):
            shapes.setdefault(value.name, [_size(dim) for dim in kind.shape.dim])
    return shapes, problem


def _size(dim: Any) -> Any:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    return dim.dim_param or None


# ---- patterns -------------------------------------------------------------------------------------------------------

class Left(Exception):
    """Why a pattern is not what it looks like."""


@dataclasses.dataclass
class Match:
    """A norm that is found, with the nodes that it replaces."""
    operator: str
    inputs: List[str]
    attributes: Dict[str, Any]
    output: str
    nodes: List[int]
    note: str = ""


@dataclasses.dataclass
class Change:
    """The outcome for a normalization: `operator` is None where it was left, and `note` says why."""
    name: str
    kind: str
    operator: Optional[str]
    nodes: int = 0
    note: str = ""

    def __str__(self) -> str:
        if self.operator is None:
            return f"left {self.name} ({self.kind}): {self.note}"
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        note = f"; {self.note}" if self.note else ""
        return f"replaced {self.name} ({self.kind}): {self.operator} for {nodes}{note}"


@dataclasses.dataclass
class Plan:
    """The changes that a rewrite makes to a graph."""
    changes: List[Change] = dataclasses.field(default_factory=list)
    replaced: Dict[int, Any] = dataclasses.field(default_factory=dict)  # the new node, at the place of a pattern's last
    removed: Set[int] = dataclasses.field(default_factory=set)
    filled: Dict[Tuple[int, int, float], Any] = dataclasses.field(default_factory=dict)  # new initializers
    room: int = FILLED_ELEMENTS  # that new initializers may still have
    unused: Set[str] = dataclasses.field(default_factory=set)  # initializers that go


def _is_by_channel(shape: Optional[Sequence[Any]], of: Sequence[Any], axis: int) -> bool:
    """Two answers: whether what has that shape, broadcast to what has the other one, differs along that axis alone; and
    whether the operators take it, which is [C], or has all axes or all but N."""
    if shape is None:
        return False
    missing = len(of) - len(shape)
    if missing == axis == len(of) - 1:
        return list(shape) == [of[axis]]
    return missing in (0, 1) and len(of) > 2 and missing <= axis and \
        all(size == (of[axis] if at == axis - missing else 1) for at, size in enumerate(shape))


def _check_groups(graph: Graph, reshape: Any) -> int:
    """The groups of a Reshape [0, G, -1]."""
    sizes = graph.constant(reshape.input[1])
    x = graph.shape(reshape.input[0])
    if sizes is None or sizes.shape != (3,) or sizes.dtype.kind != "i":
        raise Left("the Reshape before it has no constant shape of 3 axes")
    known = x is not None and len(x) <= MOST_AXES and all(isinstance(size, int) for size in x)
    samples, groups, rest = (int(size) for size in sizes)
    if not (samples == 0 and not _integer(reshape, "allowzero", 0) or x is not None and samples == x[0]):
        raise Left("the Reshape before it changes the samples")
    if rest != -1 and not (known and (samples or x[0]) * groups * rest == math.prod(x)):
        raise Left("the shape of the Reshape before it is not [0, groups, -1]")
    if x is None or len(x) < 3 or not isinstance(x[1], int):
        raise Left("the channels of its input are not known")
    if groups < 1 or x[1] % groups != 0:
        raise Left(f"the Reshape before it does not divide the {x[1]} channels into groups")
    return groups


def _check_back(graph: Graph, reshape: Any, x: str) -> None:
    """That a Reshape gives the shape of x again."""
    maker = graph.producer(reshape.input[1])
    if _is(maker, "Shape") and maker.input[0] == x and not _integer(maker, "start", 0) and \
            _integer(maker, "end") is None:
        return
    sizes, wanted = graph.constant(reshape.input[1]), graph.shape(x) or []
    if sizes is None or sizes.ndim != 1 or sizes.dtype.kind != "i" or len(sizes) != len(wanted):
        raise Left("the Reshape behind it is not known to give the shape of its input")
    equal = [int(size) == known for size, known in zip(sizes, wanted)]
    equal[0] |= int(sizes[0]) == 0 and not _integer(reshape, "allowzero", 0)
    if not all(equal) and not (equal.count(False) == 1 and int(sizes[equal.index(False)]) == -1):
        raise Left("the Reshape behind it is not known to give the shape of its input")


def _match_reshaped(graph: Graph, plan: Plan, index: int) -> Match:
    """Reshape, InstanceNormalization, Reshape, Mul, Add."""
    norm = graph.nodes[index]
    before = graph.survey.makers[norm.input[0]]
    if graph.only_user(norm.input[0]) is None:
        raise Left("what it normalizes is used elsewhere too")
    groups = _check_groups(graph, graph.nodes[before])
    if graph.is_filled(norm.input[1], 1) != groups or graph.is_filled(norm.input[2], 0) != groups:
        raise Left("its scale and bias are not 1 and 0")
    after = graph.only_user(norm.output[0])
    if after is None or not _is(graph.nodes[after], "Reshape"):
        raise Left("no Reshape is behind it")
    x = graph.nodes[before].input[0]
    _check_back(graph, graph.nodes[after], x)
    output, nodes, parameters = graph.nodes[after].output[0], [before, index, after], []
    for operation, neutral in (("Mul", 1.0), ("Add", 0.0)):
        found = _match_parameter(graph, output, operation, graph.shape(x), 1)
        parameters.append(neutral if found is None else found)
        if found is not None:
            nodes.append(graph.only_user(output))
            output = graph.nodes[nodes[-1]].output[0]
    attributes = {"groups": groups, "epsilon": _float(norm, "epsilon", 1e-5)}
    inputs = [x, *_fill(graph, plan, _type_of(graph, norm.input[1]), graph.shape(x)[1], parameters)]
    return Match("GroupNorm", inputs, attributes, output, nodes)


def _match_parameter(graph: Graph, value: str, operation: str, shape: Sequence[Any],
                     axis: int) -> Union[str, float, None]:
    """The other input of a Mul or an Add that is the value's only user: its name, if it is by channel, or one
    number."""
    user = graph.only_user(value)
    if user is None or not _is(graph.nodes[user], operation):
        return None
    first, second = graph.nodes[user].input
    other = second if first == value else first
    if _is_by_channel(graph.shape(other), shape, axis):
        return other
    return _number(graph, other, len(shape))


def _number(graph: Graph, name: str, most_axes: int) -> Optional[float]:
    """The value of a constant of one element, which does not add axes to what has so many."""
    number = graph.constant(name)
    if number is None or number.size != 1 or number.ndim > most_axes or number.dtype.kind not in "fVi":
        return None
    return float(number.reshape(()))


def _is_float32(value: float) -> bool:
    return abs(value) <= float(numpy.finfo(numpy.float32).max) and float(numpy.float32(value)) == value


def _type_of(graph: Graph, name: str) -> int:
    """The element type of a constant."""
    tensor = graph.initializers.get(graph.source(name))
    kind = onnx.helper.np_dtype_to_tensor_dtype(graph.constant(name).dtype) if tensor is None else tensor.data_type
    if kind not in FLOATS:
        raise Left("its scale is not of a floating-point type")
    return kind


def _fill(graph: Graph, plan: Plan, kind: int, channels: int, parameters: Sequence[Union[str, float]]) -> List[str]:
    """The names of parameters; for numbers, those of new initializers of that many elements."""
    wanted = dict.fromkeys((kind, channels, value) for value in parameters if not isinstance(value, str))
    new = [key for key in wanted if key not in plan.filled]
    if len(new) * channels > plan.room:
        raise Left(f"new initializers for {channels} channels would be too large")
    plan.room -= len(new) * channels
    for key in new:
        name = f"normfuse_filled_{len(plan.filled)}"
        while name in graph.names:
            name += "_"
        values = numpy.full(channels, key[2], onnx.helper.tensor_dtype_to_np_dtype(kind))
        plan.filled[key] = numpy_helper.from_array(values, name)
        graph.shapes[name] = [channels]
    return [value if isinstance(value, str) else plan.filled[kind, channels, value].name for value in parameters]


def _match_instance_norm(graph: Graph, plan: Plan, index: int) -> Match:
    norm = graph.nodes[index]
    note = ""
    if _is(graph.producer(norm.input[0]), "Reshape"):
        try:
            return _match_reshaped(graph, plan, index)
        except Left as reason:
            note = f"not GroupNorm: {reason}"
    return Match("InstanceNorm", list(norm.input), {"epsilon": _float(norm, "epsilon", 1e-5)}, norm.output[0],
                 [index], note)


def _match_group_norm(graph: Graph, plan: Plan, index: int) -> Match:
    norm = graph.nodes[index]
    groups = _integer(norm, "num_groups")
    if groups is None or groups < 1:
        raise ValueError(f"node {_label(norm)!r}: it has no num_groups above 0")
    return Match("GroupNorm", list(norm.input), {"groups": groups, "epsilon": _float(norm, "epsilon", 1e-5)},
                 norm.output[0], [index])


def _match_batch_norm(graph: Graph, plan: Plan, index: int) -> Match:
    norm = graph.nodes[index]
    if graph.opset < 9:
        raise Left("before version 9 of ONNX it has other meanings")
    if _integer(norm, "training_mode", 0) or len(list(filter(None, norm.output))) > 1:
        raise Left("it trains")
    before = graph.producer(norm.input[0])
    if _is(before, "Conv") and graph.only_user(norm.input[0]) is not None and \
            all(graph.is_constant(name) for name in (*before.input[1:], *norm.input[1:]) if name):
        raise Left("ONNX Runtime folds it into the Conv before it")
    return Match("BatchNorm", list(norm.input), {"epsilon": _float(norm, "epsilon", 1e-5)}, norm.output[0], [index])


# ---- channel norms --------------------------------------------------------------------------------------------------

def _match_last_axis(graph: Graph, plan: Plan, index: int) -> Match:
    """LayerNormalization and RMSNormalization."""
    norm = graph.nodes[index]
    is_layer_norm = norm.op_type == "LayerNormalization"
    first = 17 if is_layer_norm else 23
    if graph.opset < first:
        raise Left(f"before version {first} ONNX has no such operator")
    shape, axis = graph.shape(norm.input[0]), _integer(norm, "axis", -1)
    if shape is None:
        raise Left("the axes of its input are not known")
    if len(shape) < 2 or axis not in (-1, len(shape) - 1):
        raise Left("it normalizes over other axes than the last of several")
    if not isinstance(shape[-1], int) or graph.shape(norm.input[1]) != [shape[-1]]:
        raise Left("its scale is not known to have an element for each channel")
    if len(list(filter(None, norm.output))) > 1:
        raise Left("its mean or its deviation is used")
    bias: Union[str, float] = norm.input[2] if len(norm.input) > 2 and norm.input[2] else 0.0
    if isinstance(bias, str) and graph.shape(bias) != [shape[-1]]:
        raise Left("its bias is not known to have an element for each channel")
    attributes = {"epsilon": _float(norm, "epsilon", 1e-5), "channels_last": 1}
    if not is_layer_norm:
        attributes["statistics"] = "mean_square"
    parameters = _fill(graph, plan, onnx.TensorProto.FLOAT, shape[-1], [norm.input[1], bias])
    return Match("ChannelNorm", [norm.input[0], *parameters], attributes, norm.output[0], [index])


def _reduced_axis(graph: Graph, node: Any, x: str) -> Optional[int]:
    """The axis of channels, if a reduction of what has x's shape leaves it with size 1, and all others as they are."""
    shape = graph.shape(x)
    axes = graph.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else \
        _attribute(node, "axes", onnx.AttributeProto.INTS)
    if shape is None or axes is None or _integer(node, "keepdims", 1) != 1:
        return None
    axes = numpy.asarray(axes).reshape(-1)
    if axes.size != 1 or axes.dtype.kind != "i" or not -len(shape) <= axes[0] < len(shape):
        return None
    axis = int(axes[0]) % len(shape)
    return axis if len(shape) > 1 and axis in (1, len(shape) - 1) and isinstance(shape[axis], int) else None


def _squared(graph: Graph, name: str) -> Optional[str]:
    """The value whose square it is."""
    node = graph.producer(name)
    is_square = _is(node, "Mul") and node.input[0] == node.input[1] or \
        _is(node, "Pow") and _number(graph, node.input[1], 1) == 2
    return node.input[0] if is_square else None


def _only_node(graph: Graph, value: str, *types: str) -> Optional[int]:
    """The value's only user, if it is one of these nodes."""
    user = graph.only_user(value)
    return user if user is not None and _is(graph.nodes[user], *types) else None


def _other_input(node: Any, value: str) -> str:
    return node.input[1] if node.input[0] == value else node.input[0]


@dataclasses.dataclass
class Chain:
    """The nodes of a norm that a model writes itself: of x over an axis, up to what is normalized."""
    x: str
    axis: int
    nodes: List[int]
    attributes: Dict[str, Any]
    output: str


def _quotient(graph: Graph, root: str, numerators: Sequence[str]) -> Optional[List[int]]:
    """The nodes that divide one of the numerators by the root: Div, or Mul by Reciprocal or by Div of 1."""
    user = _only_node(graph, root, "Div", "Reciprocal")
    if user is None:
        return None
    node = graph.nodes[user]
    if _is(node, "Div") and node.input[0] in numerators and node.input[1] == root:
        return [user]
    if _is(node, "Div") and (node.input[1] != root or _number(graph, node.input[0], 1) != 1):
        return None
    product = _only_node(graph, node.output[0], "Mul")
    if product is None or _other_input(graph.nodes[product], node.output[0]) not in numerators:
        return None
    return [user, product]


def _find_mean_square(graph: Graph, index: int) -> Optional[Chain]:
    """The norm whose mean of squares is at that index."""
    reduce = graph.nodes[index]
    v = _squared(graph, reduce.input[0])
    axis = None if v is None else _reduced_axis(graph, reduce, v)
    add = _only_node(graph, reduce.output[0], "Add")
    root = None if add is None else _only_node(graph, graph.nodes[add].output[0], "Sqrt")
    if v is None or axis is None or add is None or root is None:
        return None
    eps = _number(graph, _other_input(graph.nodes[add], reduce.output[0]), 1)
    if eps is None:
        return None
    if not _is_float32(eps):
        raise Left("its epsilon is not one of float32")
    nodes = [graph.survey.makers[reduce.input[0]], index, add, root]
    attributes: Dict[str, Any] = {"epsilon": eps}
    x, numerators = v, [v]
    centred = graph.producer(v)
    mean = graph.producer(centred.input[1]) if _is(centred, "Sub") else None
    if _is(mean, "ReduceMean") and mean.input[0] == centred.input[0] and \
            _reduced_axis(graph, mean, mean.input[0]) == axis:
        x, users = centred.input[0], graph.consumers[mean.output[0]]
        if len(users) > 2:
            raise Left("a value between its nodes is used elsewhere too")
        differences = [i for i in users if _is(graph.nodes[i], "Sub") and graph.nodes[i].input == centred.input]
        numerators = [graph.nodes[i].output[0] for i in differences]
        nodes += [graph.survey.makers[mean.output[0]], *differences]
    else:
        attributes["statistics"] = "mean_square"
    last = _quotient(graph, graph.nodes[root].output[0], numerators)
    if last is None:
        raise Left("what is divided by the root is not what was squared")
    return Chain(x, axis, nodes + last, attributes, graph.nodes[last[-1]].output[0])


def _is_expanded(graph: Graph, sizes: str, x: str) -> bool:
    """True if an Expand of what has x's axes to these sizes gives x's shape."""
    maker = graph.producer(sizes)
    if _is(maker, "Shape") and maker.input[0] == x and not _integer(maker, "start", 0) and \
            _integer(maker, "end") is None:
        return True
    wanted, known = graph.constant(sizes), graph.shape(x)
    return wanted is not None and known is not None and wanted.ndim == 1 and len(wanted) == len(known) and \
        all(int(size) in (1, of) for size, of in zip(wanted, known))


def _find_clamped(graph: Graph, index: int) -> Optional[Chain]:
    """The norm whose L2 norm is at that index: torch.nn.functional.normalize. `output` is not yet multiplied by the
    root of C."""
    reduce = graph.nodes[index]
    x = reduce.input[0]
    axis, clip = _reduced_axis(graph, reduce, x), _only_node(graph, reduce.output[0], "Clip")
    if axis is None or clip is None or graph.opset < 11:
        return None
    limits = [*graph.nodes[clip].input[1:], "", ""][:2]
    is_below = limits[0] and not limits[1] and graph.nodes[clip].input[0] == reduce.output[0]
    eps = _number(graph, limits[0], 0) if is_below else None
    if eps is None:
        return None
    if eps < 0 or not _is_float32(eps):
        raise Left("its epsilon is not one of float32 above 0")
    nodes, norm = [index, clip], graph.nodes[clip].output[0]
    expand = _only_node(graph, norm, "Expand")
    if expand is not None and graph.nodes[expand].input[0] == norm and \
            _is_expanded(graph, graph.nodes[expand].input[1], x):
        nodes.append(expand)
        norm = graph.nodes[expand].output[0]
    last = _quotient(graph, norm, [x])
    if last is None:
        raise Left("what is divided by the norm is not what it is of, or may have another shape")
    return Chain(x, axis, nodes + last, {"epsilon": eps, "statistics": "mean_square", "eps_kind": "of_norm"},
                 graph.nodes[last[-1]].output[0])


def _rounding(graph: Graph, index: Optional[int]) -> float:
    """How far, relatively, a constant of that node may be from the number that it stands for."""
    kinds = [array.dtype for array in map(graph.constant, graph.nodes[index].input) if array is not None]
    return max((2.0**-7 if kind.kind == "V" else 4 * float(numpy.finfo(kind).eps) for kind in kinds
                if kind.kind in "fV"),
               default=0.0)


def _match_chain(graph: Graph, plan: Plan, index: int) -> Optional[Match]:
    """The norm that a ReduceMean or a ReduceL2 belongs to, if any."""
    node = graph.nodes[index]
    chain = _find_mean_square(graph, index) if _is(node, "ReduceMean") else _find_clamped(graph, index)
    if chain is None:
        return None
    shape = graph.shape(chain.x) or []
    for name in (name for i in chain.nodes for name in graph.nodes[i].output):
        users = graph.users(name)
        if name != chain.output and not (users and set(users) <= set(chain.nodes)):
            raise Left("a value between its nodes is used elsewhere too")
    nodes, output, attributes = list(chain.nodes), chain.output, dict(chain.attributes)

    def take() -> str:
        nodes.append(graph.only_user(output))  # type: ignore[arg-type]
        return graph.nodes[nodes[-1]].output[0]
    found = _match_parameter(graph, output, "Mul", shape, chain.axis)
    if attributes.get("eps_kind") == "of_norm":
        root = math.sqrt(shape[chain.axis])
        if not isinstance(found, float) or abs(found / root - 1) > _rounding(graph, graph.only_user(output)):
            raise Left("it is not multiplied by the root of the number of channels")
        output = take()
        found = _match_parameter(graph, output, "Mul", shape, chain.axis)
    weight: Union[str, float] = 1.0 if found is None else found
    output = output if found is None else take()
    found = _match_parameter(graph, output, "Add", shape, chain.axis)
    bias: Union[str, float] = 0.0 if found is None else found
    output = output if found is None else take()
    is_single = all(isinstance(value, str) or _is_float32(value) for value in (weight, bias))
    kind = onnx.TensorProto.FLOAT if is_single else onnx.TensorProto.DOUBLE
    parameters = _fill(graph, plan, kind, shape[chain.axis], [weight, bias])
    if chain.axis == len(shape) - 1:
        attributes["channels_last"] = 1
    return Match("ChannelNorm", [chain.x, *parameters], attributes, output, nodes)


def _fold_transposes(graph: Graph, match: Match) -> None:
    """A norm of the last axis between Transposes, there and back, is one of the second axis."""
    if match.operator != "ChannelNorm" or "channels_last" not in match.attributes:
        return
    before, after = graph.producer(match.inputs[0]), _only_node(graph, match.output, "Transpose")
    if not _is(before, "Transpose") or after is None:
        return
    there, back = (_attribute(node, "perm", onnx.AttributeProto.INTS, []) for node in (before, graph.nodes[after]))
    rank = len(there)
    if rank < 3 or list(there) != [0, *range(2, rank), 1] or list(back) != [0, rank - 1, *range(1, rank - 1)] or \
            any(len(graph.shape(name) or []) != 1 for name in match.inputs[1:]):
        return
    users = graph.users(match.inputs[0])
    if users and set(users) <= set(match.nodes):
        match.nodes.append(graph.survey.makers[match.inputs[0]])
    match.nodes.append(after)
    match.inputs[0], match.output = before.input[0], graph.nodes[after].output[0]
    del match.attributes["channels_last"]


_MATCHES: Dict[str, Callable[[Graph, Plan, int], Optional[Match]]] = {
    "InstanceNormalization": _match_instance_norm, "GroupNormalization": _match_group_norm,
    "BatchNormalization": _match_batch_norm, "LayerNormalization": _match_last_axis,
    "RMSNormalization": _match_last_axis,
    "ReduceMean": _match_chain, "ReduceL2": _match_chain}


# ---- additions ------------------------------------------------------------------------------------------------------

def _is_bias(shape: Optional[Sequence[Any]], of: Sequence[Any]) -> bool:
    """True if what has that shape differs along N and C alone, and may be added to what has the other one."""
    if shape is None or len(shape) not in (len(of), max(len(of) - 1, 3)):
        return False
    samples, *rest = shape if len(shape) == len(of) else (1, *shape)
    return (samples == 1 or samples is not None and samples == of[0]) and rest == [of[1], *[1] * (len(of) - 2)]


def _add_bias(graph: Graph, match: Match) -> None:
    """The Add of an embedding or a bias in front of a group norm, where nothing else uses the sum."""
    total = match.inputs[0]
    add = graph.producer(total)
    users, known = graph.users(total), [graph.shape(name) for name in match.inputs[1:]]
    if len(users) > 2:
        return
    # A Reshape behind the norm may get its sizes of the sum.
    others = [i for i in users if i not in match.nodes and not (
        _is(graph.nodes[i], "Shape") and graph.only_user(graph.nodes[i].output[0]) in match.nodes)]
    if match.operator != "GroupNorm" or not _is(add, "Add") or not users or others:
        return
    for x, bias in (tuple(add.input), tuple(add.input)[::-1]):
        shape = graph.shape(x)
        if shape is None or len(shape) < 3 or not isinstance(shape[1], int) or not _is_bias(graph.shape(bias), shape):
            continue
        if _is(graph.producer(x), "Conv") and graph.is_constant(bias):
            return  # ONNX Runtime folds it into the Conv
        if all(sizes is not None and shape[1] in sizes for sizes in known):  # and not by group
            match.operator, match.inputs = "SkipGroupNorm", [x, *match.inputs[1:], bias]
            match.nodes.append(graph.survey.makers[total])
        return


# ---- activations ----------------------------------------------------------------------------------------------------

def _one_node(graph: Graph, node: Any) -> Optional[Tuple[str, Optional[float]]]:
    """The activation that a node is, and its parameter."""
    if _is(node, "Relu", "HardSwish", "Mish"):
        return node.op_type.lower(), None
    if _is(node, "LeakyRelu"):
        return "leaky_relu", _float(node, "alpha", 0.01)
    if _is(node, "Elu"):
        return "elu", _float(node, "alpha", 1.0)
    if _is(node, "Gelu"):
        approximate = _attribute(node, "approximate", onnx.AttributeProto.STRING, b"none")
        return {b"none": ("gelu", None), b"tanh": ("gelu_tanh", None)}.get(approximate)
    if _is(node, "Swish") and _float(node, "alpha", 1.0) == 1:
        return "silu", None
    if _is(node, "Clip") and graph.opset >= 11 and len(node.input) == 3:
        limits = [graph.constant(name) if name else None for name in node.input[1:]]
        if all(limit is not None and limit.size == 1 for limit in limits) and \
                [float(v.reshape(())) for v in limits] == [0, 6]:
            return "relu6", None
    return None


def _add_activation(graph: Graph, match: Match) -> None:
    """The activation or sum that follows the norm, where nothing else uses what is between them."""
    users = graph.users(match.output)
    found: Optional[Tuple[str, Optional[float]]] = None
    if len(users) == 1:
        found = _one_node(graph, graph.nodes[users[0]])
    elif len(users) == 2:
        users = sorted(users, key=lambda i: not _is(graph.nodes[i], "Sigmoid"))
        sigmoid, product = (graph.nodes[i] for i in users)
        if _is(sigmoid, "Sigmoid") and _is(product, "Mul") and graph.only_user(sigmoid.output[0]) == users[1]:
            found = "silu", None
    if found is None:
        return
    match.attributes["activation"] = found[0]
    if found[1] is not None:
        match.attributes["act_param"] = found[1]
    match.nodes += users
    match.output = graph.nodes[users[-1]].output[0]


# ---- the rewrite ----------------------------------------------------------------------------------------------------

def _describe(match: Match) -> str:
    words = [match.operator]
    if "groups" in match.attributes:
        words.append(f"of {match.attributes['groups']} groups")
    if match.attributes.get("statistics") == "mean_square":
        words.append("of mean squares")
    if "activation" in match.attributes:
        words.append(f"with {match.attributes['activation']}")
    return " ".join(words)


def _replace(graph: Graph, plan: Plan, index: int) -> None:
    """Plans what becomes of the norm at that index, or of the one that a reduction there belongs to."""
    norm = graph.nodes[index]
    try:
        if graph.obstacle is not None:
            raise Left(graph.obstacle)
        match = _MATCHES[norm.op_type](graph, plan, index)
    except Left as reason:
        plan.changes.append(_left(norm, str(reason)))
        return
    if match is None:
        return
    _add_activation(graph, match)
    _fold_transposes(graph, match)
    if "activation" not in match.attributes:
        _add_activation(graph, match)
    _add_bias(graph, match)
    node = onnx.helper.make_node(match.operator, match.inputs, [match.output], name=norm.name, domain=DOMAIN,
                                 **match.attributes)
    plan.replaced[max(match.nodes)] = node
    graph.claim(match.nodes)
    plan.removed.update(match.nodes)
    plan.changes.append(Change(_label(norm), norm.op_type, _describe(match), len(match.nodes), match.note))


def _left(norm: Any, reason: str) -> Change:
    return Change(_label(norm), norm.op_type, None, 0, reason)


def _plan(model: Any, folder: Optional[str]) -> Tuple[Graph, Plan]:
    graph, plan = Graph(model, folder), Plan()
    for index, node in enumerate(graph.nodes):
        if _is(node, *NORMS) or graph.obstacle is None and _is(node, *REDUCTIONS) and index not in graph.claimed:
            _replace(graph, plan, index)
        for inner in _subgraphs(node):
            plan.changes += [_left(norm, "it is in a subgraph") for norm in _norms_within(inner.node)]
    for function in model.functions:
        plan.changes += [_left(norm, f"it is in the function {function.name}") for norm in _norms_within(function.node)]
    plan.unused = _unused(graph, plan)
    lost = _lost(graph, plan)
    if lost is not None:
        plan = Plan([change if change.operator is None else Change(change.name, change.kind, None, 0, lost)
                     for change in plan.changes])
    if graph.problem is not None:
        for change in plan.changes:
            change.note += ("; " if change.note else "") + f"shapes could not be inferred: {graph.problem}"
    return graph, plan


def _unused(graph: Graph, plan: Plan) -> Set[str]:
    """Initializers that nothing uses any more; plans the removal of nodes that only made constants of the patterns."""
    uses: Dict[str, int] = dict.fromkeys(graph.kept, 1)
    for i, names in enumerate(graph.survey.reads):
        if i not in plan.removed:
            for name in names:
                uses[name] = uses.get(name, 0) + 1
    for node in plan.replaced.values():
        for name in node.input:
            uses[name] = uses.get(name, 0) + 1
    freed = [name for i in sorted(plan.removed) for name in graph.survey.reads[i]]
    unused = set()
    for name in freed:  # which grows
        maker = graph.survey.makers.get(name)
        if uses.get(name, 0) > 0:
            continue
        if name in graph.initializers and (graph.lists_initializers or name not in graph.inputs):
            unused.add(name)
        if maker is None or maker in plan.removed or not _is(graph.nodes[maker], *CONSTANT_NODES):
            continue
        plan.removed.add(maker)
        for other in graph.survey.reads[maker]:
            uses[other] -= 1
            freed.append(other)
    return unused


def _lost(graph: Graph, plan: Plan) -> Optional[str]:
    """Why the plan's graph would not be one: a value that is used, and made by nothing before that; or made twice."""
    made = (graph.survey.given - plan.unused) | {tensor.name for tensor in plan.filled.values()}
    for i, node in enumerate(graph.nodes):
        reads = graph.survey.reads[i]
        if i in plan.replaced:
            node, reads = plan.replaced[i], set(plan.replaced[i].input)
        elif i in plan.removed:
            continue
        if not reads <= made or not made.isdisjoint(node.output):
            name = min((reads - made) | made.intersection(node.output))
            return f"the rewritten graph would not have the one value {name!r} that node {_label(node)!r} needs"
        made.update(filter(None, node.output))
    return next((f"the rewritten graph would not have its output {name!r}" for name in graph.outputs
                 if name not in made),
                None)


def _assemble(data: memoryview, graph: Graph, plan: Plan, proto: Any) -> bytes:
    """The serialized graph with the plan carried out; all other fields are copied."""
    gone = {name for i in plan.removed for name in graph.nodes[i].output} | plan.unused
    gone -= {name for node in plan.replaced.values() for name in node.output}
    named = {GRAPH_INITIALIZER: proto.initializer, GRAPH_INPUT: proto.input, GRAPH_VALUE_INFO: proto.value_info}
    counts = dict.fromkeys((GRAPH_NODE, *named), 0)
    made: List[Any] = []
    for number, field, _ in _fields(data):
        i = counts.get(number, -1)
        if i >= 0:
            counts[number] += 1
        if number == GRAPH_NODE and i in plan.replaced:
            made.append(_encode(GRAPH_NODE, plan.replaced[i].SerializeToString()))
        elif number == GRAPH_NODE and i in plan.removed or number in named and named[number][i].name in gone:
            continue
        else:
            made.append(field)
    for tensor in plan.filled.values():
        made.append(_encode(GRAPH_INITIALIZER, tensor.SerializeToString()))
        if graph.lists_initializers:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            made.append(_encode(GRAPH_INPUT, value.SerializeToString()))
    return b"".join(made)


def rewrite(model: bytes, folder: Optional[str] = None) -> Tuple[bytes, List[Change]]:
    data = memoryview(model)
    fields = list(_fields(data))
    if [number for number, _, _ in fields].count(MODEL_GRAPH) != 1:
        raise ValueError("not a serialized ONNX model of one graph")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(model)
    except Exception as error:  # of protobuf, whose class depends on its implementation
        raise ValueError(f"not a serialized ONNX model: {error}") from error
    graph, plan = _plan(proto, folder)
    if not plan.replaced:
        return bytes(model), plan.changes
    made = [_encode(MODEL_GRAPH, _assemble(payload, graph, plan, proto.graph)) if number == MODEL_GRAPH else field
            for number, field, payload in fields]
    if DOMAIN not in {entry.domain for entry in proto.opset_import}:
        made.append(_encode(MODEL_OPSET, onnx.helper.make_opsetid(DOMAIN, 1).SerializeToString()))
    return b"".join(made), plan.changes


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
        for inner in _subgraphs(node):
            yield from _tensors(inner)


def external_data(model: bytes) -> List[str]:
    """The files that hold tensors of a serialized model."""
    proto = onnx.ModelProto.FromString(model)
    return sorted({entry.value for tensor in _tensors(proto.graph) for entry in tensor.external_data
                   if entry.key == "location"})

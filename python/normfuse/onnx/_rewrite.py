# SPDX-License-Identifier: MIT
"""Finds what exporters make of normalizations in an ONNX graph, and replaces it by operators of the domain "normfuse".

A group norm is a GroupNormalization, or as before version 18 of ONNX

    Reshape [0, G, -1], InstanceNormalization with scale 1 and bias 0, Reshape to the shape of x, Mul, Add

with an activation behind it: one node, or Sigmoid and Mul for SiLU. An Add of what differs along N and C alone in front
of a group norm becomes its skip. Graphs are read through onnx's protobuf classes and
written as bytes: fields of the model that are not replaced are copied, whatever they hold.
"""
from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import numpy
import onnx
from onnx import numpy_helper

DOMAIN = "normfuse"
DEFAULT_DOMAINS = ("", "ai.onnx")
NORMS = ("InstanceNormalization", "GroupNormalization", "BatchNormalization")
# Nodes that are removed with a norm where nothing else uses their outputs.
CONSTANT_NODES = ("Constant", "ConstantOfShape", "Identity", "Shape")
# Larger initializers are no shapes; shape inference does not need their values.
SMALL_BYTES = 4096

# Field numbers of onnx.proto.
MODEL_GRAPH, MODEL_OPSET = 7, 8
GRAPH_NODE, GRAPH_INITIALIZER, GRAPH_VALUE_INFO = 1, 5, 13


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
    """(number, the field with its tag, its payload) of each field of a serialized message."""
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
        yield tag >> 3, data[at:end], data[begin:end]
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

def _subgraphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def _names_within(graph: Any) -> Iterator[str]:
    """What a subgraph reads, its own names too."""
    for node in graph.node:
        yield from node.input
        for inner in _subgraphs(node):
            yield from _names_within(inner)
    for output in graph.output:
        yield output.name


def _norms_within(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        if node.op_type in NORMS and node.domain in DEFAULT_DOMAINS:
            yield node
        for inner in _subgraphs(node):
            yield from _norms_within(inner.node)


def _attribute(node: Any, name: str, default: Any = None) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return onnx.helper.get_attribute_value(attribute)
    return default


def _is(node: Any, *types: str) -> bool:
    return node is not None and node.op_type in types and node.domain in DEFAULT_DOMAINS


class Graph:
    """A model's graph: who makes and who uses a value, its shape, and its value where that is constant."""

    def __init__(self, model: Any, folder: Optional[str]) -> None:
        graph = model.graph
        self.folder = folder or ""
        self.nodes = graph.node
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = {value.name for value in graph.input}
        self.opset = max((entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS), default=1)
        self.producers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
        self.consumers: Dict[str, List[int]] = {}
        self.kept = {value.name for value in graph.output}  # used by what is no node of this graph
        for i, node in enumerate(graph.node):
            for name in filter(None, node.input):
                self.consumers.setdefault(name, []).append(i)
            for inner in _subgraphs(node):
                self.kept.update(_names_within(inner))
        self.shapes, self.problem = _infer(model)

    def producer(self, name: str) -> Any:
        return self.nodes[self.producers[name]] if name in self.producers else None

    def users(self, name: str) -> List[int]:
        """The nodes that use a value; none where something else uses it too."""
        return [] if name in self.kept else self.consumers.get(name, [])

    def only_user(self, name: str) -> Optional[int]:
        users = self.users(name)
        return users[0] if len(users) == 1 else None

    def shape(self, name: str) -> Optional[List[Any]]:
        """Sizes, names of sizes, None where nothing is known of one; None where the rank is not known."""
        return self.shapes.get(name)

    def constant(self, name: str) -> Optional[numpy.ndarray]:
        tensor = self.initializers.get(name)
        if tensor is not None:
            return None if name in self.inputs else self._read(tensor)
        node = self.producer(name)
        if _is(node, "Identity"):
            return self.constant(node.input[0])
        if _is(node, "ConstantOfShape"):
            sizes = self.constant(node.input[0])
            value = _attribute(node, "value")
            return None if sizes is None else numpy.full(sizes, numpy.float32(0) if value is None else self._read(value)[0])
        if not _is(node, "Constant"):
            return None
        for key in ("value_float", "value_floats", "value_int", "value_ints"):
            value = _attribute(node, key)
            if value is not None:
                return numpy.asarray(value)
        value = _attribute(node, "value")
        return None if value is None else self._read(value)

    def _read(self, tensor: Any) -> numpy.ndarray:
        try:
            return numpy_helper.to_array(tensor, self.folder)
        except Exception as error:  # a file that is missing or too short, of several classes
            raise ValueError(f"the tensor {tensor.name!r} cannot be read: {error}") from error

    def is_filled(self, name: str, value: float) -> Optional[int]:
        """How many elements the constant vector has, if all are `value`."""
        array = self.constant(name)
        return array.size if array is not None and array.ndim == 1 and (array == value).all() else None


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
        problem = str(error).strip().splitlines()[0]
    shapes: Dict[str, List[Any]] = {tensor.name: list(tensor.dims) for tensor in light.graph.initializer}
    for value in (*light.graph.input, *light.graph.value_info, *light.graph.output):
        kind = value.type.tensor_type
        if kind.HasField("shape"):
            shapes.setdefault(value.name, [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
                                           for dim in kind.shape.dim])
    return shapes, problem


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
    """What became of a normalization: `operator` is None where it was left, and `note` says why."""
    name: str
    kind: str
    operator: Optional[str]
    nodes: int = 0
    note: str = ""

    def __str__(self) -> str:
        if self.operator is None:
            return f"left {self.name} ({self.kind}): {self.note}"
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"replaced {self.name} ({self.kind}): {self.operator} for {nodes}" + (f"; {self.note}" if self.note else "")


@dataclasses.dataclass
class Plan:
    """What a rewrite does to a graph."""
    changes: List[Change] = dataclasses.field(default_factory=list)
    replaced: Dict[int, Any] = dataclasses.field(default_factory=dict)  # the new node, at the place of a pattern's last
    removed: Set[int] = dataclasses.field(default_factory=set)
    filled: Dict[Tuple[int, int, float], Any] = dataclasses.field(default_factory=dict)  # new initializers


def _is_by_channel(shape: Optional[Sequence[Any]], rank: int, channels: Any) -> bool:
    """Whether what has that shape, broadcast to x, differs along C alone."""
    if shape is None or len(shape) not in (rank - 1, rank):
        return False
    channel = len(shape) - (rank - 1)
    return all(size == (channels if axis == channel else 1) for axis, size in enumerate(shape))


def _check_groups(graph: Graph, reshape: Any) -> int:
    """The groups of a Reshape [0, G, -1]."""
    sizes = graph.constant(reshape.input[1])
    x = graph.shape(reshape.input[0])
    if sizes is None or sizes.shape != (3,):
        raise Left("the Reshape before it has no constant shape of 3 axes")
    known = x is not None and all(isinstance(size, int) for size in x)
    samples, groups, rest = (int(size) for size in sizes)
    if not (samples == 0 and not _attribute(reshape, "allowzero", 0) or x is not None and samples == x[0]):
        raise Left("the Reshape before it changes the samples")
    if rest != -1 and not (known and (samples or x[0]) * groups * rest == numpy.prod(x)):
        raise Left("the shape of the Reshape before it is not [0, groups, -1]")
    if x is None or len(x) < 3 or not isinstance(x[1], int):
        raise Left("the channels of its input are not known")
    if groups < 1 or x[1] % groups != 0:
        raise Left(f"the Reshape before it does not divide the {x[1]} channels into groups")
    return groups


def _check_back(graph: Graph, reshape: Any, x: str) -> None:
    """That a Reshape gives the shape of x again."""
    maker = graph.producer(reshape.input[1])
    if _is(maker, "Shape") and maker.input[0] == x and not _attribute(maker, "start", 0) and \
            _attribute(maker, "end") is None:
        return
    sizes, wanted = graph.constant(reshape.input[1]), graph.shape(x) or []
    if sizes is None or sizes.ndim != 1 or len(sizes) != len(wanted):
        raise Left("the Reshape behind it is not known to give the shape of its input")
    equal = [int(size) == known for size, known in zip(sizes, wanted)]
    equal[0] |= int(sizes[0]) == 0 and not _attribute(reshape, "allowzero", 0)
    if not all(equal) and not (equal.count(False) == 1 and int(sizes[equal.index(False)]) == -1):
        raise Left("the Reshape behind it is not known to give the shape of its input")


def _match_reshaped(graph: Graph, plan: Plan, index: int) -> Match:
    """Reshape, InstanceNormalization, Reshape, Mul, Add."""
    norm = graph.nodes[index]
    before = graph.producers[norm.input[0]]
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
    kind = _type_of(graph, norm.input[1])
    for operation, neutral in (("Mul", 1.0), ("Add", 0.0)):
        name = _match_parameter(graph, plan, output, operation, x, kind)
        if name is None:
            parameters.append(_fill(graph, plan, kind, graph.shape(x)[1], neutral))
            continue
        nodes.append(graph.only_user(output))
        output = graph.nodes[nodes[-1]].output[0]
        parameters.append(name)
    attributes = {"groups": groups, "epsilon": _attribute(norm, "epsilon", 1e-5)}
    return Match("GroupNorm", [x, *parameters], attributes, output, nodes)


def _match_parameter(graph: Graph, plan: Plan, value: str, operation: str, x: str, kind: int) -> Optional[str]:
    """The other input of a Mul or an Add that is the value's only user, if it is by channel or one number."""
    user = graph.only_user(value)
    if user is None or not _is(graph.nodes[user], operation):
        return None
    first, second = graph.nodes[user].input
    other = second if first == value else first
    shape = graph.shape(x)
    if _is_by_channel(graph.shape(other), len(shape), shape[1]):
        return other
    number = graph.constant(other)
    if number is None or number.size != 1 or number.ndim > len(shape):
        return None
    return _fill(graph, plan, kind, shape[1], float(number.reshape(())))


def _type_of(graph: Graph, name: str) -> int:
    """The element type of a constant."""
    if name in graph.initializers:
        return graph.initializers[name].data_type
    return onnx.helper.np_dtype_to_tensor_dtype(graph.constant(name).dtype)


def _fill(graph: Graph, plan: Plan, kind: int, channels: int, value: float) -> str:
    """The name of a vector of that value, a new initializer."""
    if (kind, channels, value) not in plan.filled:
        taken = {*graph.producers, *graph.initializers, *graph.inputs, *graph.consumers, *graph.kept}
        name = f"normfuse_filled_{len(plan.filled)}"
        while name in taken:
            name += "_"
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
        plan.filled[kind, channels, value] = numpy_helper.from_array(numpy.full(channels, value, dtype), name)
    return plan.filled[kind, channels, value].name


def _match_instance_norm(graph: Graph, plan: Plan, index: int) -> Match:
    norm = graph.nodes[index]
    note = ""
    if _is(graph.producer(norm.input[0]), "Reshape"):
        try:
            return _match_reshaped(graph, plan, index)
        except Left as reason:
            note = f"not GroupNorm: {reason}"
    return Match("InstanceNorm", list(norm.input), {"epsilon": _attribute(norm, "epsilon", 1e-5)}, norm.output[0],
                 [index], note)


def _match_group_norm(graph: Graph, plan: Plan, index: int) -> Match:
    norm = graph.nodes[index]
    groups = _attribute(norm, "num_groups")
    if groups is None:
        raise Left("it has no num_groups")
    return Match("GroupNorm", list(norm.input), {"groups": groups, "epsilon": _attribute(norm, "epsilon", 1e-5)},
                 norm.output[0], [index])


def _is_constant(graph: Graph, name: str) -> bool:
    """Whether ONNX Runtime takes it for constant, without reading it."""
    if name in graph.initializers:
        return name not in graph.inputs
    return _is(graph.producer(name), "Constant") or \
        _is(graph.producer(name), "Identity") and _is_constant(graph, graph.producer(name).input[0])


def _match_batch_norm(graph: Graph, plan: Plan, index: int) -> Match:
    norm = graph.nodes[index]
    if graph.opset < 9:
        raise Left("before version 9 of ONNX it has other meanings")
    if _attribute(norm, "training_mode", 0) or len(list(filter(None, norm.output))) > 1:
        raise Left("it trains")
    before = graph.producer(norm.input[0])
    if _is(before, "Conv") and graph.only_user(norm.input[0]) is not None and \
            all(_is_constant(graph, name) for name in (*before.input[1:], *norm.input[1:]) if name):
        raise Left("ONNX Runtime folds it into the Conv before it")
    return Match("BatchNorm", list(norm.input), {"epsilon": _attribute(norm, "epsilon", 1e-5)}, norm.output[0], [index])


_MATCHES = {"InstanceNormalization": _match_instance_norm, "GroupNormalization": _match_group_norm,
            "BatchNormalization": _match_batch_norm}


# ---- additions ------------------------------------------------------------------------------------------------------

def _is_bias(shape: Optional[Sequence[Any]], of: Sequence[Any]) -> bool:
    """Whether what has that shape differs along N and C alone, and may be added to what has the other one."""
    if shape is None or len(shape) not in (len(of), max(len(of) - 1, 3)):
        return False
    samples, *rest = shape if len(shape) == len(of) else (1, *shape)
    return (samples == 1 or samples is not None and samples == of[0]) and rest == [of[1], *[1] * (len(of) - 2)]


def _add_bias(graph: Graph, match: Match) -> None:
    """The Add of an embedding or a bias in front of a group norm, where nothing else uses the sum."""
    total = match.inputs[0]
    add = graph.producer(total)
    users, known = graph.users(total), [graph.shape(name) for name in match.inputs[1:]]
    # A Reshape behind the norm may get its sizes of the sum.
    others = [i for i in users if i not in match.nodes and not (
        _is(graph.nodes[i], "Shape") and graph.only_user(graph.nodes[i].output[0]) in match.nodes)]
    if match.operator != "GroupNorm" or not _is(add, "Add") or not users or others:
        return
    for x, bias in (tuple(add.input), tuple(add.input)[::-1]):
        shape = graph.shape(x)
        if shape is None or len(shape) < 3 or not isinstance(shape[1], int) or not _is_bias(graph.shape(bias), shape):
            continue
        if _is(graph.producer(x), "Conv") and _is_constant(graph, bias):
            return  # ONNX Runtime folds it into the Conv
        if all(sizes is not None and shape[1] in sizes for sizes in known):  # and not by group
            match.operator, match.inputs = "SkipGroupNorm", [x, *match.inputs[1:], bias]
            match.nodes.append(graph.producers[total])
        return


# ---- activations ----------------------------------------------------------------------------------------------------

def _one_node(graph: Graph, node: Any) -> Optional[Tuple[str, Optional[float]]]:
    """The activation that a node is, and its parameter."""
    if _is(node, "Relu", "HardSwish", "Mish"):
        return node.op_type.lower(), None
    if _is(node, "LeakyRelu"):
        return "leaky_relu", _attribute(node, "alpha", 0.01)
    if _is(node, "Elu"):
        return "elu", _attribute(node, "alpha", 1.0)
    if _is(node, "Gelu"):
        return ("gelu_tanh" if _attribute(node, "approximate", b"none") == b"tanh" else "gelu"), None
    if _is(node, "Swish") and _attribute(node, "alpha", 1.0) == 1:
        return "silu", None
    if _is(node, "Clip") and graph.opset >= 11 and len(node.input) == 3:
        limits = [graph.constant(name) if name else None for name in node.input[1:]]
        if all(limit is not None and limit.size == 1 for limit in limits) and [float(v.reshape(())) for v in limits] == [0, 6]:
            return "relu6", None
    return None


def _add_activation(graph: Graph, match: Match) -> None:
    """What follows the norm, where nothing else uses what is between them."""
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
    if "activation" in match.attributes:
        words.append(f"with {match.attributes['activation']}")
    return " ".join(words)


def _replace(graph: Graph, plan: Plan, index: int) -> None:
    """Plans what becomes of the norm at that index."""
    norm = graph.nodes[index]
    name = norm.name or norm.output[0]
    try:
        match = _MATCHES[norm.op_type](graph, plan, index)
    except Left as reason:
        plan.changes.append(Change(name, norm.op_type, None, 0, str(reason)))
        return
    _add_activation(graph, match)
    _add_bias(graph, match)
    node = onnx.helper.make_node(match.operator, match.inputs, [match.output], name=norm.name, domain=DOMAIN,
                                 **match.attributes)
    plan.replaced[max(match.nodes)] = node
    plan.removed.update(match.nodes)
    plan.changes.append(Change(name, norm.op_type, _describe(match), len(match.nodes), match.note))


def _plan(model: Any, folder: Optional[str]) -> Tuple[Graph, Plan]:
    graph, plan = Graph(model, folder), Plan()
    for index, node in enumerate(graph.nodes):
        if _is(node, *NORMS):
            _replace(graph, plan, index)
        for inner in _subgraphs(node):
            plan.changes += [Change(norm.name or norm.output[0], norm.op_type, None, 0, "it is in a subgraph")
                             for norm in _norms_within(inner.node)]
    for function in model.functions:
        plan.changes += [Change(norm.name or norm.output[0], norm.op_type, None, 0, f"it is in the function {function.name}")
                         for norm in _norms_within(function.node)]
    if graph.problem is not None:
        for change in plan.changes:
            change.note += ("; " if change.note else "") + f"shapes could not be inferred: {graph.problem}"
    return graph, plan


def _used(graph: Graph, plan: Plan) -> Set[str]:
    """What is used once the plan is carried out."""
    used = set(graph.kept)
    for i, node in enumerate(graph.nodes):
        if i not in plan.removed:
            used.update(node.input)
    for node in plan.replaced.values():
        used.update(node.input)
    return used


def _unused(graph: Graph, plan: Plan) -> Set[str]:
    """Initializers that nothing uses any more; plans the removal of nodes that only made constants of the patterns."""
    while True:
        used = _used(graph, plan)
        freed = {name for i in plan.removed for name in graph.nodes[i].input} - used
        constants = {graph.producers[name] for name in freed if _is(graph.producer(name), *CONSTANT_NODES)}
        if constants <= plan.removed:
            return {name for name in freed if name in graph.initializers and name not in graph.inputs}
        plan.removed |= constants


def _assemble(data: memoryview, graph: Graph, plan: Plan, unused: Set[str], value_info: Sequence[Any],
              initializers: Sequence[Any]) -> bytes:
    """The serialized graph with the plan carried out; all other fields are copied."""
    gone = {name for i in plan.removed for name in graph.nodes[i].output}
    gone -= {name for node in plan.replaced.values() for name in node.output}
    counts = {GRAPH_NODE: 0, GRAPH_INITIALIZER: 0, GRAPH_VALUE_INFO: 0}
    made: List[Any] = []
    for number, field, _ in _fields(data):
        i = counts.get(number, -1)
        if i >= 0:
            counts[number] += 1
        if number == GRAPH_NODE and i in plan.replaced:
            made.append(_encode(GRAPH_NODE, plan.replaced[i].SerializeToString()))
        elif number == GRAPH_NODE and i in plan.removed or \
                number == GRAPH_INITIALIZER and initializers[i].name in unused or \
                number == GRAPH_VALUE_INFO and value_info[i].name in gone | unused:
            continue
        else:
            made.append(field)
    made += [_encode(GRAPH_INITIALIZER, tensor.SerializeToString()) for tensor in plan.filled.values()]
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
    unused = _unused(graph, plan)
    made = []
    for number, field, payload in fields:
        made.append(_encode(MODEL_GRAPH, _assemble(payload, graph, plan, unused, proto.graph.value_info,
                                                   proto.graph.initializer)) if number == MODEL_GRAPH else field)
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

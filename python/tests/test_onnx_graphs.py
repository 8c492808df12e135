# SPDX-License-Identifier: MIT
"""normfuse.onnx.rewrite of graphs that are drawn, beside the same graphs in ONNX Runtime; of malformed models and of
models with random bytes; and files that stay when something fails."""
import os

import numpy
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import normfuse.onnx  # noqa: E402
from normfuse.onnx import _rewrite  # noqa: E402
from test_onnx import Builder, operators, session  # noqa: E402

GRAPHS, SEED = int(os.environ.get("NORMFUSE_RANDOM_GRAPHS", "50")), int(os.environ.get("NORMFUSE_RANDOM_SEED", "0"))

def compare(before, after, x):
    """What ONNX Runtime makes of both."""
    for want, got in zip(*(session(model, 1).run(None, {"x": x}) for model in (before, after))):
        assert want.shape == got.shape and abs(want.astype("f8") - got).max() <= 2e-5 * abs(want).max()


def known_sizes(model):
    """A function that says whether onnx knows the size of a value's axis."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    shapes = {value.name: value.type.tensor_type.shape.dim
              for value in (*graph.input, *graph.value_info, *graph.output)}
    return lambda name, axis: len(shapes.get(name, ())) > 0 and shapes[name][axis].HasField("dim_value")


def is_valid(model):
    try:
        onnx.checker.check_model(model)
    except Exception:  # of onnx's C++, of several classes
        return False
    return True


def rewritten(model):
    made, changes = normfuse.onnx.rewrite(model.SerializeToString())
    after = onnx.ModelProto.FromString(made)
    if is_valid(model):
        onnx.checker.check_model(after)
    return after, changes


# ---- drawn graphs ---------------------------------------------------------------------------------------------------


class Drawn(Builder):
    """A graph of norms as exporters write them, activations, Mul, Add, Dropout, pooled values and branches. Values are
    of x's shape, or pooled: [N, C, 1, 1]. Later nodes mostly read what was made last, and sometimes anything."""

    def __init__(self, seed):
        self.draw = numpy.random.default_rng(seed)
        self.channels = self.pick(4, 6, 8)
        super().__init__(self.pick(9, 13, 17, 17, 18, 20, 21, 21),
                         (self.pick(1, 2), self.channels, *self.pick((3, 5), (4, 4), (1, 1))))
        self.ir = 10 if self.opset > 18 else self.pick(3, 8) if self.opset == 13 else 8
        self.full, self.pooled, self.chains = ["x"], [], []  # chains: what they normalize, and the axis
        for _ in range(self.draw.integers(3, 14)):
            step = self.pick(*[self.norm] * 9, *[self.channel_norm] * 5, *[self.activation] * 3, self.by_channel,
                             self.by_channel, self.sum, self.sum,
                             self.pool, self.pool, self.gate, self.copy, self.convolution, self.branch)
            self.full.append(step(self.value()))

    def pick(self, *options):
        return options[self.draw.integers(len(options))]

    def chance(self, part):
        return self.draw.random() < part

    def value(self):
        return self.full[-1] if self.chance(0.8) else self.pick(*self.full)

    def number(self, array, name=None):
        """A constant in one of the ways that models have them."""
        array = numpy.asarray(array)
        way = self.pick("initializer", "initializer", "node", "copy")
        if way == "node":
            return self.add("Constant", [], value=numpy_helper.from_array(array))
        name = self.constant(array)
        return self.add("Identity", [name]) if way == "copy" else name

    def scalar(self, value, shape=()):
        return self.number(numpy.full(shape, value, "float32"))

    def filled(self, size, value):
        if self.chance(0.2):
            return self.add("ConstantOfShape", [self.number([size])],
                            value=numpy_helper.from_array(numpy.float32([value])))
        return self.number(numpy.full(size, value, "float32"))

    def around(self, mean, shape):
        return self.number((0.3 * self.draw.standard_normal(shape) + mean).astype("float32"))

    def parameter(self, mean):
        c = self.channels
        return self.around(mean, self.pick(*[(c, 1, 1)] * 5, (1, c, 1, 1), (), (1,)))

    def two(self, operator, first, second):
        return self.add(operator, [first, second] if self.chance(0.5) else [second, first])

    def groups(self):
        return self.pick(*(groups for groups in range(1, self.channels + 1) if self.channels % groups == 0))

    def norm(self, x):
        y = self.plain_norm(x)
        return self.activation(y) if self.chance(0.3) else self.norm(y) if self.chance(0.3) else y

    def plain_norm(self, x):
        # large ones: rounding errors do not grow from norm to norm
        c, epsilon = self.channels, self.pick(0.1, 0.3, 1.0)
        kind = self.pick(*["reshaped"] * 5, "instance", "batch", "group" if self.opset >= 18 else "reshaped")
        if kind == "instance":
            return self.add("InstanceNormalization", [x, self.around(1, c), self.around(0, c)], epsilon=epsilon)
        if kind == "batch":
            spread = self.number((self.draw.random(c) + 0.5).astype("float32"))
            return self.add("BatchNormalization", [x, self.around(1, c), self.around(0, c), self.around(0, c), spread],
                            epsilon=epsilon)
        groups = self.groups()
        if kind == "group":
            size = c if self.opset >= 21 else groups
            return self.add("GroupNormalization", [x, self.around(1, size), self.around(0, size)], num_groups=groups,
                            epsilon=epsilon)
        reshaped = self.add("Reshape", [x, self.number([0, groups, -1])])
        normal = self.add("InstanceNormalization", [reshaped, self.filled(groups, 1), self.filled(groups, 0)],
                          epsilon=epsilon)
        y = self.add("Reshape", [normal, self.add("Shape", [x]) if self.chance(0.7) else self.number(self.sizes)])
        if self.chance(0.9):
            y = self.two("Mul", y, self.parameter(1))
        return self.two("Add", y, self.parameter(0)) if self.chance(0.9) else y

    def channel_norm(self, x):
        y = self.plain_channel_norm(x)
        return self.activation(y) if self.chance(0.4) else self.norm(y) if self.chance(0.3) else y

    def plain_channel_norm(self, x):
        """Of the second axis; Transposes, or one of their values, may be used elsewhere."""
        c, epsilon = self.channels, self.pick(0.125, 0.25, 1.0)
        kind = self.pick("chain", "chain", "normalize" if self.opset >= 11 else "chain",
                         *["layer"] * 3 * (self.opset >= 17))
        is_last = kind == "layer" or self.chance(0.4)
        if is_last:
            x = self.add("Transpose", [x], perm=[0, 2, 3, 1])
        inside = self.add("Neg", [x]) if self.chance(0.15) else None  # another reader of what is normalized
        if kind == "layer":
            inputs = [x, self.around(1, c), *([self.around(0, c)] if self.chance(0.7) else [])]
            y = self.add("LayerNormalization", inputs, epsilon=epsilon, **self.pick({}, {"axis": -1}, {"axis": 3}))
        else:
            axis = self.pick(3, -1) if is_last else self.pick(1, -3)
            self.chains.append((x, axis))
            if kind == "normalize":
                y = self.normalize(x, axis, epsilon, numpy.sqrt(c), self.pick("Shape", None))
            else:
                y = self.channel_chain(x, axis, self.pick("mean_and_variance", "mean_square"), self.pick("Pow", "Mul"),
                                       self.pick("Div", "Reciprocal", "Div of 1"), self.chance(0.3), self.chance(0.3),
                                       self.pick((), (1,)), epsilon)
            for operation, mean in (("Mul", 1), ("Add", 0)):
                if self.chance(0.7):
                    shape = self.pick((c,), (1, 1, c), ()) if is_last else self.pick((c, 1, 1), (1, c, 1, 1), ())
                    y = self.two(operation, y, self.around(mean, shape))
        y = self.two("Add", y, inside) if inside is not None else y
        if is_last:
            y = self.activation(y) if self.chance(0.2) else y
            y = self.add("Transpose", [y], perm=[0, 3, 1, 2])
        return y

    def activation(self, x):
        kind = self.pick("silu", "silu", "Relu", "LeakyRelu", "Elu", "Sigmoid", *["Clip"] * (self.opset >= 11),
                         *["HardSwish"] * (self.opset >= 14), *["Mish"] * (self.opset >= 18),
                         *["Gelu"] * (self.opset >= 20))
        if kind == "silu":
            return self.two("Mul", x, self.add("Sigmoid", [x]))
        if kind == "Clip":
            return self.add("Clip", [x, self.number(numpy.float32(0)), self.number(numpy.float32(6))])
        words = {"LeakyRelu": {"alpha": 0.2}, "Elu": {"alpha": 0.7}, "Gelu": {"approximate": self.pick("none", "tanh")}}
        return self.add(kind, [x], **words.get(kind, {}))

    def by_channel(self, x):
        return self.two(self.pick("Mul", "Add"), x, self.parameter(1))

    def sum(self, x):
        total = self.two("Add", x, self.pick(*self.full, *self.pooled * 3))
        return self.norm(total) if self.chance(0.4) else total

    def pool(self, x):
        self.pooled.append(self.add("GlobalAveragePool", [x]))
        return self.norm(self.two("Add", self.value(), self.pick(*self.pooled)))

    def gate(self, x):
        return self.two("Mul", self.value(), self.add("Sigmoid", [self.pick(x, *self.pooled * 3)]))

    def copy(self, x):
        return self.add(self.pick("Identity", "Dropout"), [x])

    def convolution(self, x):
        made = self.add("Conv", [x, self.around(0, (self.channels, self.channels, 1, 1))])
        return self.norm(made) if self.chance(0.5) else made

    def branch(self, x):
        name = f"branch{len(self.nodes)}"
        graphs = [helper.make_graph([helper.make_node(operator, [x], [f"{name}_{operator}"])], name, [], [
            helper.make_tensor_value_info(f"{name}_{operator}", TensorProto.FLOAT, None)])
            for operator in ("Relu", "Neg")]
        return self.add("If", [self.constant(numpy.array(self.chance(0.5)))], then_branch=graphs[0],
                        else_branch=graphs[1])

    def finish(self):
        names = [name for name in self.full[1:] if self.chance(0.15)]
        sizes = self.pick(*[self.sizes] * 4, ["n", self.channels, "h", "w"], [None] * 4)
        model = self.model(*dict.fromkeys([*names, self.full[-1]]), sizes=sizes, ir=self.ir)
        if self.ir == 3:
            model.graph.input.extend(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                                     for tensor in model.graph.initializer)
        return model


@pytest.mark.parametrize("seed", range(SEED, SEED + GRAPHS))
def test_drawn_graphs(seed):
    """NORMFUSE_RANDOM_GRAPHS: how many; NORMFUSE_RANDOM_SEED: the first one's seed."""
    graph = Drawn(seed)
    before = graph.finish()
    assert is_valid(before) or graph.opset in (18, 20) and "GroupNormalization" in operators(before)  # deprecated there
    after, changes = rewritten(before)
    # Over an unknown number of channels a chain of nodes is not known to be a norm.
    known = known_sizes(before)
    unknown = {node.name for node in before.graph.node if node.op_type == "LayerNormalization"
               and not known(node.input[0], -1)}
    assert all((change.operator is None) == (change.name in unknown) or "folds it into the Conv" in change.note
               for change in changes), list(map(str, changes))
    norms = len(list(_rewrite._norms_within(before.graph.node)))
    assert len(changes) == norms + sum(known(*chain) for chain in graph.chains)
    made = after.SerializeToString()
    assert normfuse.onnx.rewrite(made)[0] == made
    compare(before, after, graph.draw.standard_normal(graph.sizes).astype("float32"))


def test_what_is_drawn():
    """That graphs of the first seeds hold what the rewrite looks for, alone and one after another."""
    found = set()
    for seed in range(150):
        _, changes = normfuse.onnx.rewrite(Drawn(seed).finish().SerializeToString())
        found.update(change.operator.split()[0] + (" with" if " with " in change.operator else "")
                     for change in changes if change.operator is not None)
    norms = ("GroupNorm", "SkipGroupNorm", "InstanceNorm", "BatchNorm", "ChannelNorm")
    assert found == {*norms, *(f"{norm} with" for norm in norms)}


# ---- patterns that meet ---------------------------------------------------------------------------------------------


SIZES = (1, 8, 6, 10)
X = numpy.random.default_rng(0).standard_normal(SIZES).astype("float32")


@pytest.mark.parametrize("between", ["nothing", "Dropout", "Identity", "silu", "used"])
@pytest.mark.parametrize("second", ["reshaped", "GroupNormalization"])
def test_norms_in_a_row(second, between):
    """The first norm's Add is not the second one's skip."""
    graph = Builder(21, SIZES)
    first = y = graph.group_norm("x")
    if between == "silu":
        y = graph.silu(y)
    elif between in ("Dropout", "Identity"):
        y = graph.add(between, [y])
    y = graph.group_norm(y, groups=2) if second == "reshaped" else \
        graph.add(second, [y, graph.vector(3), graph.vector(4)], num_groups=2)
    before = graph.model(*[y, first] if between == "used" else [y], ir=10)
    after, changes = rewritten(before)
    assert [node.op_type for node in after.graph.node if node.domain] == ["GroupNorm"] * 2
    assert all(change.operator is not None for change in changes)
    compare(before, after, X)


def test_sums_of_pooled_norms():
    """With one sample a pooled norm is by channel: the Add is the first norm's bias, or the third one's skip."""
    graph = Builder(17, SIZES)
    one, two = (graph.group_norm("x", scale=graph.vector(seed, (8, 1, 1))) for seed in (1, 2))
    total = graph.add("Add", [graph.nodes[4].output[0], graph.add("GlobalAveragePool", [two])])
    before = graph.model(graph.group_norm(total),
                         graph.group_norm(graph.add("Add", [one, graph.add("GlobalAveragePool", [two])])))
    after, _ = rewritten(before)
    assert operators(after).count("InstanceNormalization") == 0
    compare(before, after, X)


@pytest.mark.sampled()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter,opset", [("torchscript", 17), ("dynamo", 18), ("dynamo", 21)])
@pytest.mark.parametrize("training", ["EVAL", "PRESERVE"])
def test_norms_in_a_row_of_pytorch(exporter, opset, training, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript, which torch.onnx.export needs, is not installed")
    layers = torch.nn.Sequential(torch.nn.GroupNorm(4, 8), torch.nn.Dropout(0.5), torch.nn.GroupNorm(2, 8),
                                 torch.nn.SiLU(),
                                 torch.nn.InstanceNorm2d(8), torch.nn.GroupNorm(8, 8, affine=False)).eval()
    words = {} if exporter == "dynamo" else {"training": getattr(torch.onnx.TrainingMode, training)}
    torch.onnx.export(layers, (torch.from_numpy(X),), str(tmp_path / "model.onnx"), input_names=["x"],
                      opset_version=opset, dynamo=exporter == "dynamo", **words)
    before = onnx.load(tmp_path / "model.onnx")
    after, changes = rewritten(before)
    assert len(changes) == 4 and not {"InstanceNormalization", "GroupNormalization"} & set(operators(after))
    compare(before, after, X)


def test_a_graph_that_would_lack_a_value(monkeypatch):
    """What is written is checked on its own: here patterns may share nodes."""
    graph = Builder(17, SIZES)
    model = graph.model(graph.group_norm(graph.group_norm("x"))).SerializeToString()
    monkeypatch.setattr(_rewrite.Graph, "claim", lambda graph, nodes: None)
    made, changes = normfuse.onnx.rewrite(model)
    assert made == model
    assert len(changes) == 2 and all("the rewritten graph would not have the one value" in str(change)
                                     for change in changes)


# ---- versions -------------------------------------------------------------------------------------------------------


def test_initializers_that_must_be_inputs(tmp_path):
    """Before version 4 of the IR every initializer is an input, and constant: new ones too, and what is removed
    goes."""
    graph = Builder(13, SIZES)
    y = graph.silu(graph.group_norm("x", scale=graph.constant(numpy.float32(2))))
    y = graph.add("Conv", [y, graph.vector(5, (8, 8, 1, 1))])
    y = graph.add("BatchNormalization",
                  [y, *(graph.vector(seed) for seed in range(3)), graph.constant(numpy.ones(8, "f"))])
    before = graph.model(y, ir=3)
    before.graph.input.extend(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                              for tensor in before.graph.initializer)
    onnx.checker.check_model(before)
    after, changes = rewritten(before)
    assert [change.operator for change in changes] == ["GroupNorm of 4 groups with silu", None]
    assert "folds it into the Conv" in changes[1].note
    assert {value.name for value in after.graph.input} == {"x", *(tensor.name for tensor in after.graph.initializer)}
    assert len(after.graph.initializer) == 2 + 1 + 4
    compare(before, after, X)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 4
    options.register_custom_ops_library(normfuse.onnx.library_path())
    onnxruntime.InferenceSession(after.SerializeToString(), options)
    assert "BatchNormalization" not in operators(onnx.load(tmp_path / "optimized.onnx"))


@pytest.mark.parametrize("opset", [1, 4, 5, 6])
def test_early_versions(opset):
    """Reshape's shape is an attribute before version 5; before version 7 Mul and Add do not broadcast."""
    graph = Builder(opset, SIZES)
    shape = {"shape": [0, 4, -1]} if opset < 5 else {}
    reshaped = graph.add("Reshape", ["x"] if opset < 5 else ["x", graph.constant([0, 4, -1])], **shape)
    y = graph.add("InstanceNormalization", [reshaped, graph.vector(1, (4,)), graph.vector(2, (4,))])
    model = graph.model(y, ir=3).SerializeToString()
    made, changes = normfuse.onnx.rewrite(model)
    assert made == model
    assert [change.note.split(";")[0]
            for change in changes] == ["before version 7 of ONNX operators have other meanings"]


def test_nodes_in_another_order():
    """ONNX Runtime sorts them; the rewrite leaves them."""
    graph = Builder(17, SIZES)
    model = graph.model(graph.group_norm("x"))
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    made, changes = normfuse.onnx.rewrite(model.SerializeToString())
    assert made == model.SerializeToString() and "comes before what it reads" in str(changes[0])


def test_functions_in_the_place_of_operators():
    graph = Builder(17, SIZES)
    model = graph.model(graph.add("InstanceNormalization", ["x", graph.vector(1), graph.vector(2)]))
    model.functions.append(helper.make_function("", "InstanceNormalization", ["a", "b", "c"], ["d"], [
        helper.make_node("Neg", ["a"], ["d"])], [helper.make_opsetid("", 17)]))
    made, changes = normfuse.onnx.rewrite(model.SerializeToString())
    assert made == model.SerializeToString() and "take the place of ONNX's operators" in str(changes[0])


# ---- malformed models -----------------------------------------------------------------------------------------------


def node(operator, inputs, outputs=("y",), name="bad", **attributes):
    return helper.make_node(operator, inputs, outputs, name, **attributes)


def malformed(nodes, *tensors, sizes=("N", 8, 6, 6), opset=17, annotated=None):
    """A graph of those nodes from x to y, without any check. annotated: a value and the sizes that the model says it
    has."""
    value = helper.make_tensor_value_info
    made = helper.make_graph(nodes, "graph", [value("x", TensorProto.FLOAT, sizes)],
                             [value("y", TensorProto.FLOAT, None)], [
        *(numpy_helper.from_array(numpy.asarray(array), name) for name, array in (
            ("s", numpy.int64([0, 2, -1])), ("one", numpy.ones(2, "f")), ("zero", numpy.zeros(2, "f")),
            ("w", numpy.ones(8, "f")), ("half", numpy.float32(0.5)))),
        *tensors])
    if annotated is not None:
        made.value_info.append(value(annotated[0], TensorProto.FLOAT, annotated[1]))
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def tensor(name="t", dims=(8,), kind=TensorProto.FLOAT, **words):
    return TensorProto(name=name, dims=dims, data_type=kind, **words)


def outside(location, **words):
    made = tensor(data_location=TensorProto.EXTERNAL, dims=(2,))
    for key, value in {"location": location, **words}.items():
        made.external_data.add(key=key, value=str(value))
    return made


def reshaped(scale="one", shape="s"):
    return [node("Reshape", ["x", shape], ["r"], "reshape"),
            node("InstanceNormalization", ["r", scale, "zero"], ["n"], "norm"),
            node("Shape", ["x"], ["k"], "shape"), node("Reshape", ["n", "k"], ["y"], "back")]


def chain(**words):
    """An RMS norm, whose mean has these attributes."""
    return [node("Mul", ["x", "x"], ["a"]), node("ReduceMean", ["a"], ["b"], "mean", **words),
            node("Add", ["b", "half"], ["c"]), node("Sqrt", ["c"], ["d"]), node("Div", ["x", "d"])]


def norm(x="x", **words):
    return node("InstanceNormalization", [x, "w", "w"], **words)


def of_size(count):
    return numpy_helper.from_array(numpy.int64(count), "count")


def typed(node, name, **words):
    node.attribute.append(onnx.AttributeProto(name=name, **words))
    return node


MALFORMED = {
    "Identity of itself": (malformed([node("Identity", ["c"], ["c"], "loop"), *reshaped("c")]), "node 'loop'"),
    "a cycle": (malformed([node("Mul", ["b", "x"], ["a"], "first"), node("Add", ["a", "x"], ["b"], "second"),
                           norm("b")]),
                "node 'first': it needs its own output"),
    "a cycle through a branch": (malformed([node("If", ["x"], ["a"], "branch", then_branch=helper.make_graph(
        [node("Neg", ["y"], ["inner"])], "then", [], [])), norm("a")]), "node '(bad|branch)': it needs its own output"),
    "a cycle in a branch": (malformed([node("If", ["x"], ["a"], "branch", then_branch=helper.make_graph(
        [node("Neg", ["p"], ["q"], "inner"), node("Neg", ["q"], ["p"])], "then", [],
        [])), norm()]), "node '(bad|inner)'"),
    "no inputs": (malformed([node("InstanceNormalization", [])]),
                  "node 'bad': InstanceNormalization must have 3 inputs"),
    "no outputs": (malformed([norm(outputs=[])]), "node 'bad': InstanceNormalization must have an output"),
    "no name and no outputs": (malformed([norm(outputs=[], name="")]), "node 'InstanceNormalization'"),
    "an output without a name": (malformed([norm(outputs=[""])]),
                                 "node 'bad': InstanceNormalization must have an output"),
    "an input without a name": (malformed([norm("")]), "node 'bad': InstanceNormalization must have 3 inputs"),
    "Reshape of one input": (malformed([node("Reshape", ["x"], ["r"]), *reshaped()[1:]]),
                             "node 'bad': Reshape must have 2 inputs"),
    "Mul of one input": (malformed([norm(outputs=["n"], name=""), node("Mul", ["n"])]),
                         "node 'bad': Mul must have 2 inputs"),
    "Add of three": (malformed([norm(outputs=["n"], name=""), node("Add", ["n", "n", "n"])]),
                     "node 'bad': Add must have 2 inputs"),
    "Clip of four": (malformed([norm(outputs=["n"], name=""), node("Clip", ["n"] * 4)]),
                     "node 'bad': Clip must have 1 to 3 inputs"),
    "Identity of nothing": (malformed([node("Identity", [], ["c"]), *reshaped("c")]),
                            "node 'bad': Identity must have 1 inputs"),
    "a batch norm of four": (malformed([node("BatchNormalization", ["x", "w", "w", "w"])]), "node 'bad'"),
    "an input that nothing makes": (malformed([norm("missing")]), "node 'bad': nothing makes its input 'missing'"),
    "a branch's input that nothing makes": (malformed([norm(),
                                                       node("If", ["x"], ["z"], "branch", then_branch=helper.make_graph(
        [node("Neg", ["missing"], ["q"])], "then", [], []))]), "node 'branch': nothing makes its input 'missing'"),
    "LayerNormalization of one input": (malformed([node("LayerNormalization", ["x"])]),
                                        "node 'bad': LayerNormalization must have 2 to 3"),
    "RMSNormalization of three": (malformed([node("RMSNormalization", ["x", "w", "w"])], opset=23),
                                  "node 'bad': RMSNormalization must"),
    "axis of a float": (malformed([node("LayerNormalization", ["x", "w"], axis=1.0)]),
                        "node 'bad': the attribute axis"),
    "ReduceMean of three": (malformed([node("ReduceMean", ["x", "s", "s"])], opset=18),
                            "node 'bad': ReduceMean must have 1 to 2"),
    "Sub of one input": (malformed([node("Sub", ["x"])]), "node 'bad': Sub must have 2 inputs"),
    "axes of an integer": (malformed(chain(axes=1)), "node 'mean': the attribute axes"),
    "keepdims of a float": (malformed(chain(axes=[1], keepdims=1.0)), "node 'mean': the attribute keepdims"),
    "perm of an integer": (malformed([node("Transpose", ["x"], ["a"], "there", perm=1),
                                      node("LayerNormalization", ["a", "t"], ["b"]),
                                      node("Transpose", ["b"], ["y"], "back",
                                           perm=[0, 3, 1, 2])], tensor(dims=(6,), raw_data=bytes(24)),
                                     annotated=("a", (1, 8, 6, 6))), "node 'there': the attribute perm"),
    "an output that nothing makes": (malformed([norm(outputs=["z"])]), "nothing makes the output 'y'"),
    "an output made twice": (malformed([norm(name="one"), norm(name="two")]),
                             "node 'two': its output 'y' is made elsewhere"),
    "an output that is an input": (malformed([norm(outputs=["x"])]), "node 'bad': its output 'x' is made elsewhere"),
    "two initializers of one name": (malformed([norm()], tensor("w", raw_data=bytes(32))), "two initializers"),
    "no num_groups": (malformed([node("GroupNormalization", ["x", "w", "w"])], opset=21),
                      "node 'bad': it has no num_groups"),
    "num_groups of -2": (malformed([node("GroupNormalization", ["x", "w", "w"], num_groups=-2)], opset=21),
                         "node 'bad'"),
    "num_groups of a float": (malformed([node("GroupNormalization", ["x", "w", "w"], num_groups=2.0)], opset=21),
                              "node 'bad': the attribute num_groups"),
    "epsilon of a text": (malformed([norm(epsilon="much")]), "node 'bad': the attribute epsilon"),
    "epsilon twice": (malformed([typed(norm(epsilon=1.0), "epsilon", type=onnx.AttributeProto.FLOAT, f=2.0)]),
                      "node 'bad': the attribute epsilon"),
    "epsilon without a type": (malformed([typed(norm(), "epsilon", f=2.0)]), "node 'bad': the attribute epsilon"),
    "alpha of an integer": (malformed([norm(outputs=["n"], name=""), node("LeakyRelu", ["n"], alpha=1)]), "node 'bad'"),
    "Constant without a value": (malformed([node("Constant", [], ["c"]), *reshaped("c")]),
                                 "node 'bad': Constant has no value"),
    "a scale of two axes": (malformed([node("InstanceNormalization", ["x", "t", "w"])],
                                      tensor(dims=(8, 1), raw_data=bytes(32))), "node 'bad': its input 't' has 2 axes"),
    "an x of one axis": (malformed([norm()], sizes=(8,)), "node 'bad': its input 'x' has 1 axes"),
    "a shape of no axes": (malformed(reshaped(shape="t"), tensor(dims=(), kind=TensorProto.INT64, raw_data=bytes(8))),
                           "node 'reshape': its input 't' has 0 axes"),
    "ConstantOfShape of a negative size": (malformed([node("ConstantOfShape", ["count"], ["c"]), *reshaped("c")],
                                                     of_size([-5])),
                                           "node 'bad'"),
    "ConstantOfShape of two values": (malformed([node("ConstantOfShape", ["count"], ["c"],
                                                      value=numpy_helper.from_array(
        numpy.ones(2, "f"))), *reshaped("c")], of_size([2])), "node 'bad'"),
    "data shorter than its sizes": (malformed([norm()], tensor(raw_data=bytes(12))),
                                    "the tensor 't' cannot be read: it has 3"),
    "data of half an element": (malformed([norm()], tensor(raw_data=bytes(34))), "the tensor 't' cannot be read"),
    "data longer than its sizes": (malformed([norm()], tensor(float_data=[1.0] * 9)),
                                   "the tensor 't' cannot be read: it has 9"),
    "no data": (malformed([norm()], tensor(dims=(1 << 40,))), "the tensor 't' cannot be read: it has 0"),
    "a product of sizes of 2^64": (malformed([norm()], tensor(dims=(1 << 32, 1 << 32))),
                                   "the tensor 't' cannot be read"),
    "a negative size": (malformed([norm()], tensor(dims=(-1, -8), raw_data=bytes(32))), "the tensor 't' has"),
    "a thousand axes": (malformed([norm()], tensor(dims=(2,) * 1000)), "the tensor 't' has more than 32 axes"),
    "a Constant whose data is short": (malformed([node("Constant", [], ["c"],
                                                       value=tensor(dims=(2,), raw_data=bytes(4))),
                                                  *reshaped("c")]), "the tensor of node 'bad' cannot be read"),
    "data of a folder above": (malformed(reshaped("t"), outside("../secret")), "the tensor 't' cannot be read"),
    "data of an absolute path": (malformed(reshaped("t"), outside("/proc/self/environ")),
                                 "the tensor 't' cannot be read"),
    "data of a link": (malformed(reshaped("t"), outside("link")), "the tensor 't' cannot be read"),
    "data of a folder": (malformed(reshaped("t"), outside(".")), "the tensor 't' cannot be read"),
    "data of a pipe": (malformed(reshaped("t"), outside("pipe")), "the tensor 't' cannot be read"),
    "data of no file": (malformed(reshaped("t"), outside("missing")), "the tensor 't' cannot be read"),
    "data of no location": (malformed(reshaped("t"), outside("")), "the tensor 't' cannot be read"),
    "data behind a file's end": (malformed(reshaped("t"), outside("data", offset=9)), "the tensor 't' cannot be read"),
    "data at a negative offset": (malformed(reshaped("t"), outside("data", offset=-8)),
                                  "the tensor 't' cannot be read"),
    "data of another length": (malformed(reshaped("t"), outside("data", length=1 << 50)),
                               "the tensor 't' cannot be read"),
    "data at a text": (malformed(reshaped("t"), outside("data", offset="far")), "the tensor 't' cannot be read"),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret").write_bytes(numpy.ones(2, "f").tobytes())
    (tmp_path / "models").mkdir()
    (tmp_path / "models/data").write_bytes(numpy.ones(4, "f").tobytes())
    (tmp_path / "models/link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "models/pipe")
    return tmp_path / "models"


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_models(name, folder):
    model, text = MALFORMED[name]
    with pytest.raises(ValueError, match=text):
        normfuse.onnx.rewrite(model.SerializeToString(), str(folder))


def test_data_in_a_file(folder):
    model = malformed(reshaped("t"), outside("data", offset=8, length=8)).SerializeToString()
    assert normfuse.onnx.rewrite(model, str(folder))[1][0].operator == "GroupNorm of 2 groups"
    with pytest.raises(ValueError, match="no folder is given"):
        normfuse.onnx.rewrite(model)


def test_sizes_that_are_only_claimed():
    """191 bytes that say 3.2 GB: a ConstantOfShape, which is not made, and channels, for which no scale is made."""
    import tracemalloc
    large = malformed([node("ConstantOfShape", ["count"], ["c"]), *reshaped("c")], of_size([3 << 28]))
    wide = malformed(reshaped(), sizes=(1, 1 << 40, 6, 6))
    reshaped_to = [node("Reshape", ["x", "s"], ["r"]), node("InstanceNormalization", ["r", "one", "zero"], ["n"]),
                   node("Reshape", ["n", "count"], ["y"])]
    constant = malformed(reshaped_to, of_size([1, 1 << 40, 6, 6]), sizes=(1, 1 << 40, 6, 6))
    for model in (large, wide, constant):
        data = model.SerializeToString()
        tracemalloc.start()
        _, changes = normfuse.onnx.rewrite(data)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 1 << 20 and changes[0].operator == "InstanceNorm" and "not GroupNorm" in changes[0].note


@pytest.mark.parametrize("functions,text", [(["F"], "calls itself"), (["G", "F"], "calls itself"),
                                            ([f"F{i}" for i in range(1, 40)] + ["Relu"], "become more than")], ids=str)
def test_functions_without_end(functions, text):
    """They call themselves, or each calls the next one twice."""
    model = malformed([node("F", ["x"], domain="local")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    for name, called in zip(["F", *functions], functions):
        domain = "" if called == "Relu" else "local"
        model.functions.append(helper.make_function("local", name, ["a"], ["b"], [
            helper.make_node(called, ["a"], ["c"], domain=domain),
            helper.make_node(called, ["c"], ["b"], domain=domain)], opsets))
    with pytest.raises(ValueError, match=text):
        normfuse.onnx.rewrite(model.SerializeToString())


def test_deep_branches():
    """Deeper than a message may be nested: protobuf refuses it."""
    inner = b""
    for _ in range(2000):  # a graph in the attribute of a node of a graph
        inner = _rewrite._encode(1, _rewrite._encode(5, _rewrite._encode(6, inner)))
    with pytest.raises(ValueError, match="not a serialized ONNX model"):
        normfuse.onnx.rewrite(_rewrite._encode(_rewrite.MODEL_GRAPH, inner))


def test_long_chains():
    chain = [node("Identity", [f"i{i}" if i else "one"], [f"i{i + 1}"]) for i in range(3000)]
    _, changes = normfuse.onnx.rewrite(malformed([*chain, *reshaped("i3000")]).SerializeToString())
    assert changes[0].operator == "GroupNorm of 2 groups"


@pytest.mark.parametrize("seed", range(SEED, SEED + max(4, GRAPHS // 10)))
def test_random_bytes(seed):
    """Whatever the bytes are: ValueError, or a model that is as valid as it was. Of each seed's graph 60 copies."""
    graph = Drawn(seed)
    source, draw = graph.finish().SerializeToString(), graph.draw
    for _ in range(60):
        data = bytearray(source)
        for _ in range(draw.integers(1, 6)):
            at = draw.integers(len(data))
            change = draw.integers(4)
            if change == 0:
                data[at] ^= 1 << draw.integers(8)
            elif change == 1:
                data[at] = draw.integers(256)
            elif change == 2:
                del data[at:at + draw.integers(1, 4)]
            else:
                data[at:at] = data[(other := draw.integers(len(data))):other + draw.integers(1, 60)]
        try:
            made, _ = normfuse.onnx.rewrite(bytes(data))
        except ValueError:
            continue
        if made != data and is_valid(onnx.ModelProto.FromString(bytes(data))):
            onnx.checker.check_model(onnx.ModelProto.FromString(made))


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    graph = Builder(17, SIZES)
    path = tmp_path / "model.onnx"
    path.write_bytes(graph.model(graph.group_norm("x")).SerializeToString())
    return path


def test_modes_of_files(path, monkeypatch):
    """That of the file that is replaced; of a new one what the umask leaves, which stays as it is at every moment."""
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the process's umask changes"))
        normfuse.onnx.rewrite_file(path, path.with_name("new.onnx"))
        path.chmod(0o604)
        normfuse.onnx.rewrite_file(path, path)
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert [file.stat().st_mode & 0o777 for file in (path.with_name("new.onnx"), path)] == [0o640, 0o604]
    assert path.read_bytes() == path.with_name("new.onnx").read_bytes() and len(list(path.parent.iterdir())) == 2


@pytest.mark.parametrize("failing", ["fsync", "replace", "fchmod"])
def test_a_failure_keeps_the_file(failing, path, monkeypatch):
    source = path.read_bytes()

    def fail(*words):
        raise OSError("no space left")
    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="no space left"):
        normfuse.onnx.rewrite_file(path, path)
    assert path.read_bytes() == source and list(path.parent.iterdir()) == [path]


def test_outputs_that_are_no_files(path):
    """A link stays one; a folder and a pipe are refused."""
    (path.parent / "folder").mkdir()
    link, pipe = path.with_name("link.onnx"), path.with_name("pipe")
    link.symlink_to(path.parent / "folder/target.onnx")
    normfuse.onnx.rewrite_file(path, link)
    assert link.is_symlink() and (path.parent / "folder/target.onnx").read_bytes() == link.read_bytes()
    os.mkfifo(pipe)
    for output in (pipe, path.parent / "folder"):
        with pytest.raises(ValueError, match="is not a file"):
            normfuse.onnx.rewrite_file(path, output)
    assert pipe.is_fifo()

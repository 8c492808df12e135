# SPDX-License-Identifier: MIT
"""The layers: numbers against float64 with the bounds of docs/numerics.md, on random configurations; beside stock's
layers everything else that a layer is (state, copies, messages)."""
import copy
import functools
import io
import pickle
import warnings

import numpy
import pytest
import reference

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")
import normfuse.torch as nft  # noqa: E402
from device import DEVICE, ON_CUDA, default_device, hardswish  # noqa: E402, F401
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
RANKS = {"1d": 3, "2d": 4, "3d": 5}
STOCK_ACTIVATIONS = {"relu": nn.ReLU(), "leaky_relu": nn.LeakyReLU(0.25), "silu": nn.SiLU(), "gelu": nn.GELU(),
                     "gelu_tanh": nn.GELU(approximate="tanh"), "hardswish": hardswish, "elu": nn.ELU(0.75),
                     "mish": nn.Mish(), "relu6": nn.ReLU6(), "prelu": None, None: nn.Identity()}
PARAMETERS = {"leaky_relu": 0.25, "elu": 0.75}  # exact in f32, in which they are used
settings = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)


def array(tensor):
    return None if tensor is None else tensor.detach().double().cpu().numpy().copy()


def flat(tensor):
    """As [N, C, S]."""
    return None if tensor is None else array(tensor).reshape(tensor.shape[0], tensor.shape[1], -1)


@st.composite
def calls(draw):
    """A layer of any kind with random state, and an input."""
    kind = draw(st.sampled_from(["GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d",
                                 "InstanceNorm2d", "InstanceNorm3d"]))
    dtype = draw(st.sampled_from(list(NAMES)))
    rank = RANKS.get(kind[-2:], draw(st.integers(3, 5)))
    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.integers(1, 3))
    shape = (draw(st.integers(1, 3)), channels, *(draw(st.integers(2, 4)) for _ in range(rank - 2)))
    activation = draw(st.sampled_from(list(STOCK_ACTIVATIONS)))
    stock_arguments = {"eps": draw(st.sampled_from([1e-5, 1e-3])), "affine": draw(st.booleans()), "dtype": dtype}
    fused = {"activation": activation, "act_param": PARAMETERS.get(activation)}
    if activation == "prelu":
        fused["num_parameters"] = draw(st.sampled_from([1, channels]))
    if kind == "GroupNorm":
        arguments = (groups, channels)
    else:
        arguments = (channels,)
        stock_arguments["momentum"] = draw(st.sampled_from([0.1, 1.0, 0.0, None] if kind[0] == "B" else [0.1, None]))
        stock_arguments["track_running_stats"] = draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 1000)))
    stock = getattr(nn, kind)(*arguments, **stock_arguments)
    ours = getattr(nft, kind)(*arguments, **stock_arguments, **fused)
    with torch.no_grad():
        for p in stock.parameters():
            p.copy_(torch.randn_like(p))
    missing = ours.load_state_dict(stock.state_dict(), strict=False).missing_keys
    assert missing == (["slope"] if activation == "prelu" else [])
    if activation == "prelu":
        assert torch.equal(ours.slope, torch.full_like(ours.slope, 0.25)) and ours.slope.dtype == dtype
        with torch.no_grad():
            ours.slope.normal_()
    channels_last = draw(st.booleans())
    offset = draw(st.sampled_from([0.0, 30.0]))
    x = [(torch.randn(shape) + offset).to(dtype) for _ in range(3)]
    if channels_last:
        x = [t.to(memory_format={3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}[rank])
             for t in x]
    training = [draw(st.booleans()) for _ in x]
    added = {name: torch.randn(shape).to(dtype) for name in ("pre_add", "post_add") if draw(st.booleans())}
    bias_shape = draw(st.sampled_from([None, shape[1:2], shape[:2]]))
    if bias_shape is not None:
        added["pre_bias"] = torch.randn(bias_shape).to(draw(st.sampled_from(list(NAMES))))
    return kind, stock, ours, groups, x, training, added


@settings
@hypothesis.given(calls())
def test_numbers_of_random_layers(call):
    """Three calls, each training or not: results, running statistics and their counter."""
    kind, stock, ours, groups, inputs, training, added = call
    dtype, exact = inputs[0].dtype, copy.deepcopy(stock).double()
    activation, slope = STOCK_ACTIVATIONS[ours.activation], getattr(ours, "slope", None)
    if slope is not None:
        activation = lambda z: nn.functional.prelu(z, slope.double())  # noqa: E731
    batches = 0
    for x, mode in zip(inputs, training):
        ours.train(mode)
        # The reference begins where the layer is: what is asked of each call is that call's.
        if getattr(stock, "running_mean", None) is not None:
            exact.load_state_dict({k: v.double() for k, v in ours.state_dict().items() if k != "slope"})
        exact.train(mode)
        tracks = getattr(stock, "track_running_stats", False)
        momentum = getattr(stock, "momentum", None)
        if kind[0] == "B" and mode and tracks:
            batches += 1
            momentum = 1 / batches if momentum is None else momentum
        evaluate = tracks and not mode
        problem = reference.Problem(
            "batch" if kind[0] == "B" else "group", NAMES[dtype], flat(x), activation=ours.activation or "identity",
            act_param=ours.act_param, slope=array(slope), groups=groups if kind == "GroupNorm" else x.shape[1],
            columns=x.shape[1] > 1 and not x.is_contiguous(), weight=array(ours.weight), bias=array(ours.bias),
            running_mean=array(ours.running_mean) if tracks else None,
            running_var=array(ours.running_var) if tracks else None, evaluate=evaluate, momentum=momentum or 0.0,
            eps=stock.eps, on_cuda=ON_CUDA, pre_add=flat(added.get("pre_add")),
            pre_bias=array(added.get("pre_bias")), post_add=flat(added.get("post_add")))
        if kind[0] == "B" and not evaluate and x.numel() == x.shape[1]:
            continue
        want = reference.forward(problem)
        u = torch.from_numpy(problem.u.reshape(x.shape)).to(DEVICE)
        z = exact(u) + (added["post_add"].double() if "post_add" in added else 0)
        numpy.testing.assert_allclose(array(activation(z)), want["y"][0].reshape(x.shape), rtol=1e-9, atol=1e-9)
        y = ours(x, **added)
        assert y.dtype == dtype and y.stride() == x.stride()
        reference.compare("y", flat(y), *want["y"], NAMES[dtype])
        if tracks and mode:
            for name in ("running_mean", "running_var"):
                numpy.testing.assert_allclose(array(getattr(exact, name)), want[name][0], rtol=1e-9, atol=1e-9)
                reference.compare(name, array(getattr(ours, name)), *want[name], NAMES[dtype])
        if tracks and kind[0] == "B":
            assert ours.num_batches_tracked == exact.num_batches_tracked == batches


@settings
@hypothesis.given(calls(), st.booleans())
def test_gradients_are_the_functional_layers(call, return_sum):
    """A layer adds nothing to the functional form: the same bits, gradients included."""
    kind, stock, ours, groups, inputs, _, added = call
    if return_sum and not {"pre_add", "pre_bias"} & set(added):
        return
    x = inputs[0]
    ours.train()
    running = [None if getattr(ours, n, None) is None else getattr(ours, n).clone()
               for n in ("running_mean", "running_var")]
    mine = (ours.weight, ours.bias, getattr(ours, "slope", None))
    *parameters, slope = [None if p is None else p.detach().clone().requires_grad_() for p in mine]
    fused = {"activation": ours.activation, "act_param": ours.act_param, "slope": slope, "return_sum": return_sum}
    inputs, theirs = ({name: t.clone().requires_grad_() for name, t in {"x": x, **added}.items()} for _ in range(2))
    y = ours(inputs["x"], return_sum=return_sum, **{k: v for k, v in inputs.items() if k != "x"})
    rest = {k: v for k, v in theirs.items() if k != "x"}
    if kind == "GroupNorm":
        z = nft.group_norm(theirs["x"], groups, *parameters, ours.eps, **fused, **rest)
    else:
        function = nft.batch_norm if kind[0] == "B" else nft.instance_norm
        momentum = ours.momentum if ours.momentum is not None else 1.0 if kind[0] == "B" else 0.0
        z = function(theirs["x"], *running, *parameters, True, momentum, ours.eps, **fused, **rest)
    y, z = (y, z) if return_sum else ((y,), (z,))
    for a, b in zip(y, z):
        assert torch.equal(a, b)
        gradient = torch.randn_like(a)
        a.backward(gradient, retain_graph=True)
        b.backward(gradient, retain_graph=True)
    for name in inputs:
        assert torch.equal(inputs[name].grad, theirs[name].grad), name
    for a, b in zip(mine, (*parameters, slope)):
        assert a is None or torch.equal(a.grad, b.grad)


LAYERS = [("GroupNorm", (2, 4), (2, 4, 3, 3)), ("BatchNorm1d", (4,), (2, 4, 3)), ("BatchNorm2d", (4,), (2, 4, 3, 3)),
          ("BatchNorm3d", (4,), (2, 4, 3, 3, 2)), ("InstanceNorm1d", (4,), (2, 4, 3)),
          ("InstanceNorm2d", (4,), (2, 4, 3, 3)), ("InstanceNorm3d", (4,), (2, 4, 3, 3, 2)),
          ("SyncBatchNorm", (4,), (2, 4, 3, 3))]
each_layer = pytest.mark.parametrize("kind,arguments,shape", LAYERS, ids=[layer[0] for layer in LAYERS])


@each_layer
@pytest.mark.parametrize("more", [{}, {"affine": True}, {"affine": False}, {"bias": False, "affine": True},
                                  {"track_running_stats": True}, {"track_running_stats": False}, {"eps": 1e-3},
                                  {"momentum": None}, {"dtype": torch.float64}, {"device": "meta"}], ids=str)
def test_same_constructor_state_and_repr(kind, arguments, shape, more):
    if kind == "GroupNorm" and {"momentum", "track_running_stats"} & set(more):
        return
    try:
        stock = getattr(nn, kind)(*arguments, **more)
    except TypeError:
        assert "bias" in more  # which older torch does not have
        with pytest.raises(TypeError):
            getattr(nft, kind)(*arguments, **more)
        return
    ours = getattr(nft, kind)(*arguments, **more)
    if kind == "SyncBatchNorm":  # DistributedDataParallel refuses stock's on the CPU
        assert isinstance(ours, nn.modules.batchnorm._BatchNorm) and not isinstance(ours, nn.SyncBatchNorm)
    else:
        assert isinstance(ours, getattr(nn, kind))
    assert repr(ours) == repr(stock)
    assert repr(getattr(nft, kind)(*arguments, **more, activation="elu", act_param=2)) == repr(stock)[:-1] + (
        ", activation='elu', act_param=2.0)")
    for ours_state, stock_state in ((ours.state_dict(), stock.state_dict()),
                                    (dict(ours.named_buffers()), dict(stock.named_buffers()))):
        assert list(ours_state) == list(stock_state)
        for name, tensor in stock_state.items():
            mine = ours_state[name]
            assert (mine.shape, mine.dtype, mine.device) == (tensor.shape, tensor.dtype, tensor.device)
            assert tensor.is_meta or torch.equal(mine, tensor)


@each_layer
def test_checkpoints_load_both_ways(kind, arguments, shape):
    stock, ours = getattr(nn, kind)(*arguments), getattr(nft, kind)(*arguments, activation="silu")
    for source, target in ((stock, ours), (ours, stock)):
        with torch.no_grad():
            for tensor in source.state_dict().values():
                tensor.copy_(torch.randint(1, 9, tensor.shape))
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        assert not any(target.load_state_dict(torch.load(file)))
        assert all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values()))


def test_checkpoint_from_before_the_counter():
    ours = nft.BatchNorm2d(3)
    ours.num_batches_tracked += 5
    state = {k: v for k, v in nn.BatchNorm2d(3).state_dict().items() if k != "num_batches_tracked"}
    ours.load_state_dict(state)
    assert ours.num_batches_tracked == 5


@each_layer
def test_copies(kind, arguments, shape):
    layer = getattr(nft, kind)(*arguments, activation="leaky_relu", act_param=0.3)
    x = torch.randn(shape)
    layer(x)
    layer.eval()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer) and repr(other) == repr(layer)
        assert torch.equal(other(x), layer(x))
        for a, b in zip(other.parameters(), layer.parameters()):
            assert a is not b and torch.equal(a, b)


@each_layer
@pytest.mark.parametrize("slopes", [1, 4])
def test_slope_is_a_parameter(kind, arguments, shape, slopes):
    """Saved, copied, cast, moved, reset, parametrized and frozen as every other; of meta layers, too."""
    make = functools.partial(getattr(nft, kind), *arguments, activation="prelu", num_parameters=slopes)
    layer, x = make(), torch.randn(shape)
    assert list(layer.state_dict())[-1] == "slope" or "num_batches_tracked" in layer.state_dict()
    assert dict(layer.named_parameters())["slope"] is layer.slope and layer.slope.shape == (slopes,)
    assert repr(layer).endswith(f", activation='prelu', num_parameters={slopes})")
    with torch.no_grad():
        layer.slope.normal_()
    layer(x), layer.eval()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), make().eval()):
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), layer(x)) and other.slope is not layer.slope
    want = nn.functional.prelu(getattr(nft, kind)(*arguments).eval()(x), layer.slope) if kind[0] in "GI" else None
    assert want is None or torch.allclose(layer(x), want, rtol=1e-5, atol=1e-6)
    assert copy.deepcopy(layer).double().slope.dtype == torch.float64 and copy.deepcopy(layer).to("meta").slope.is_meta
    parametrized = copy.deepcopy(layer)
    torch.nn.utils.parametrize.register_parametrization(parametrized, "slope", Doubled())
    with torch.no_grad():
        parametrized.parametrizations.slope.original.div_(2)
    assert torch.equal(parametrized(x), layer(x))
    materialized = make(device="meta").to_empty(device=x.device)
    materialized.reset_parameters()
    assert torch.equal(materialized.slope, torch.full((slopes,), 0.25))
    layer.train().slope.requires_grad_(False)
    layer(x.requires_grad_()).square().sum().backward()
    assert layer.slope.grad is None and x.grad is not None
    with pytest.raises(ValueError, match="slope was given to a layer that has its own, 'prelu'"):
        layer(x, slope=layer.slope)
    with pytest.raises(ValueError, match="activation='relu' was given to a layer that has its own, 'prelu'"):
        layer(x, activation="relu")


@each_layer
def test_slope_of_one_call(kind, arguments, shape):
    layer, x = getattr(nft, kind)(*arguments), torch.randn(shape)
    own = getattr(nft, kind)(*arguments, activation="prelu", num_parameters=4)
    assert torch.equal(layer(x, activation="prelu", slope=own.slope), own(x))
    for given in ({"slope": own.slope}, {"slope": own.slope, "activation": "relu"}):
        with pytest.raises(ValueError, match="slope is for prelu alone and must be None"):
            layer(x, **given)
    with pytest.raises(ValueError, match="slope is None, but required"):
        layer(x, activation="prelu")


@each_layer
def test_a_stock_layer_that_changes_class_works(kind, arguments, shape):
    """As pickles of layers do that were made by an older version, and as convert does."""
    layer = getattr(nn, kind)(*arguments)
    layer.__class__ = getattr(nft, kind)
    assert layer.activation is None and layer(torch.randn(shape)).shape == shape


def test_layers_are_cast_and_moved():
    layer = nft.BatchNorm2d(4, activation="relu").half()
    assert layer.running_mean.dtype == torch.float16 == layer(torch.randn(2, 4, 3, 3).half()).dtype
    assert layer.to("meta").weight.is_meta


BAD_INPUTS = [("BatchNorm1d", (4,), (2, 4, 3, 3)), ("BatchNorm2d", (4,), (2, 4, 3)), ("BatchNorm3d", (4,), (2, 4)),
              ("BatchNorm2d", (4,), (2, 5, 3, 3)), ("BatchNorm1d", (4,), (1, 4)), ("GroupNorm", (2, 4), (2, 5, 3)),
              ("GroupNorm", (2, 4), (2, 6, 3)), ("GroupNorm", (2, 4), (4,)), ("GroupNorm", (2, 2), (1, 2)),
              ("InstanceNorm2d", (4,), (2, 4)), ("InstanceNorm1d", (4,), (2, 4, 1)),
              ("SyncBatchNorm", (4,), (4,)), ("SyncBatchNorm", (0,), (2, 0, 3))]


@pytest.mark.parametrize("kind,arguments,shape", BAD_INPUTS, ids=str)
def test_what_stock_rejects_is_rejected(kind, arguments, shape):
    x = torch.randn(shape)
    stock, ours = getattr(nn, kind)(*arguments), getattr(nft, kind)(*arguments)
    try:
        stock(x)
    except (RuntimeError, ValueError) as error:
        expected = error
    else:
        ours(x)
        return
    with pytest.raises(type(expected)) as raised:
        ours(x)
    if isinstance(expected, ValueError):
        assert str(raised.value) == str(expected)


def test_messages_of_instance_norm_with_other_channels():
    x = torch.randn(2, 5, 3, 3)
    for affine in (True, False):
        messages = []
        for package in (nn, nft):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    package.InstanceNorm2d(4, affine=affine)(x)
                    messages.append(str(caught[0].message))
                except ValueError as error:
                    messages.append(str(error))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("kind,shape", [("InstanceNorm1d", (4, 5)), ("InstanceNorm2d", (4, 5, 3)),
                                        ("InstanceNorm3d", (4, 5, 3, 2))])
def test_instance_norm_without_a_batch_axis(kind, shape):
    x, more = torch.randn(shape), torch.randn(shape)
    layer = getattr(nft, kind)(4)
    y, u = layer(x, pre_add=more, return_sum=True)
    want, sums = layer(x[None], pre_add=more[None], return_sum=True)
    assert y.shape == u.shape == shape and torch.equal(y, want[0]) and torch.equal(u, sums[0])


@pytest.mark.parametrize("arguments,message", [
    ({"activation": "swish"}, "activation must be None or one of identity, relu"),
    ({"act_param": 0.1}, "act_param is leaky_relu's slope or elu's alpha"),
    ({"activation": "silu", "act_param": 0.1}, "act_param is leaky_relu's slope or elu's alpha"),
    ({"activation": "prelu", "act_param": 0.1}, "act_param is leaky_relu's slope or elu's alpha"),
    ({"activation": "prelu", "num_parameters": 3}, "num_parameters must be 1 or the number of channels, 4, but got 3"),
    ({"activation": "relu", "num_parameters": 4}, "num_parameters is prelu's, but activation is 'relu'"),
    ({"process_group": 1}, "process_group without sharded_dim"),
    ({"sharded_dim": 1}, "sharded_dim must be a spatial axis")], ids=str)
def test_bad_arguments_of_the_constructor(arguments, message):
    with pytest.raises(ValueError, match=message):
        nft.GroupNorm(2, 4, **arguments)


ACTIVATIONS = [(nn.SiLU(), "'silu'"), (nn.SiLU, "'silu'"), (torch.nn.functional.silu, "'silu'"), ("SiLU", "'silu'"),
               (nn.LeakyReLU(0.2), "'leaky_relu', act_param=0.2"), (nn.ELU(0.5), "'elu', act_param=0.5"),
               (nn.PReLU(4), "'prelu'"), (torch.prelu, "'prelu'"), (nn.GELU(), "'gelu'"),
               (nn.GELU("tanh"), "'gelu_tanh'"), (nn.Hardswish(), "'hardswish'")]


@pytest.mark.parametrize("activation,said", ACTIVATIONS, ids=str)
def test_activations_by_another_name_are_told_theirs(activation, said):
    x = torch.randn(2, 4, 3)
    for call in (lambda: nft.GroupNorm(2, 4, activation=activation),
                 lambda: nft.GroupNorm(2, 4)(x, activation=activation),
                 lambda: nft.group_norm(x, 2, activation=activation),
                 lambda: nft.channel_affine(x, None, None, activation=activation)):
        with pytest.raises(ValueError, match=f"activation must be None or .*: say activation={said}$"):
            call()
    with pytest.raises(ValueError, match="but got Tanh..$"):
        nft.GroupNorm(2, 4, activation=nn.Tanh())


@pytest.mark.parametrize("needs", [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_second_derivatives_of_batch_norm_with_an_addition(activation, needs):
    """Of each input alone, too, beside stock's layers."""
    layer, stock = nft.BatchNorm2d(4, dtype=torch.float64), nn.BatchNorm2d(4, dtype=torch.float64)
    layer(torch.randn(3, 4, 2, 3, dtype=torch.float64))  # the statistics are not those that both begin with
    stock.load_state_dict(layer.state_dict())
    tensors = [torch.randn(3, 4, 2, 3, dtype=torch.float64) for _ in range(4)]
    found = []
    for norm in (layer, stock):
        x, added = (t.clone() for t in tensors[:2])
        inputs = [t.requires_grad_(bool(need)) for t, need in zip((x, norm.weight, norm.bias, added), needs)]
        y = (layer(x, post_add=added, activation=activation) if norm is layer else
             STOCK_ACTIVATIONS[activation](stock(x) + added))
        inputs = [t for t in inputs if t.requires_grad]
        first = torch.autograd.grad((y * y * tensors[2]).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), inputs)
        found.append([y, *first, *second, norm.running_mean, norm.running_var])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("activation", [None, "identity", "relu", "silu"])
def test_act_param_that_means_nothing(activation):
    x, w = torch.randn(2, 4, 3), torch.ones(4)
    for call in (lambda: nft.GroupNorm(2, 4, activation=activation, act_param=0.1),
                 lambda: nft.GroupNorm(2, 4)(x, activation=activation, act_param=0.1),
                 lambda: nft.BatchNorm1d(4)(x, activation=activation, act_param=0.1),
                 lambda: nft.InstanceNorm1d(4)(x, activation=activation, act_param=0.1),
                 lambda: nft.ChannelAffine(4)(x, activation=activation, act_param=0.1),
                 lambda: nft.group_norm(x, 2, activation=activation, act_param=0.1),
                 lambda: nft.batch_norm(x, w, w, w, w, activation=activation, act_param=0.1),
                 lambda: nft.batch_norm(x, None, None, training=True, activation=activation, act_param=0.1),
                 lambda: nft.instance_norm(x, activation=activation, act_param=0.1),
                 lambda: nft.channel_affine(x, None, None, activation=activation, act_param=0.1)):
        with pytest.raises(ValueError, match="act_param is leaky_relu's slope or elu's alpha"):
            call()


@pytest.mark.parametrize("layer", [nft.GroupNorm(2, 4, activation="elu"), nft.BatchNorm1d(4, activation="elu")])
def test_act_param_of_one_call_needs_its_activation(layer):
    with pytest.raises(ValueError, match="act_param=0.1 was given to a layer that has its own, 'elu'"):
        layer(torch.randn(2, 4, 3), act_param=0.1)


@pytest.mark.parametrize("name", [name for name in nft.__all__ if isinstance(getattr(nft, name), type)
                                  and issubclass(getattr(nft, name), nn.Module)])
def test_faces_of_the_layers(name):
    """Messages name the public class; the documentation has shapes, the call, errors, and for what is not the same for
    another size of image, a source."""
    kind = getattr(nft, name)
    layer = kind(*((2, 4) if name == "GroupNorm" else (4,)))
    with pytest.raises(TypeError, match=rf"^{name}\.__init__\(\) missing"):
        kind()
    with pytest.raises(TypeError, match=rf"^{name}\.forward\(\) got an unexpected keyword argument 'no_such'"):
        layer(torch.randn(2, 4, 3), no_such=1)
    assert pickle.loads(pickle.dumps(layer.forward)).__name__ == "forward"
    text = " ".join(kind.__doc__.split()).lower()
    if "all else as of normfuse.torch" not in text:
        assert all(part in text for part in ("call", "raises", "[n, c", "act_param"))
    assert "arxiv" in text or name == "SyncBatchNorm"


def test_public_names():
    names = {"BatchNorm2d", "ChannelAffine", "ConversionReport", "GroupNorm", "SyncBatchNorm", "autocast_to_float32",
             "batch_norm", "channel_affine", "convert", "fold_batch_norm", "fused", "group_norm", "install", "revert"}
    assert names < set(nft.__all__) and len(set(nft.__all__)) == len(nft.__all__)
    exec("from normfuse.torch import *", space := {})
    assert set(space) - {"__builtins__"} == set(nft.__all__)


def test_activation_of_one_call():
    layer, x = nft.GroupNorm(2, 4), torch.randn(2, 4, 3)
    assert torch.equal(layer(x, activation="elu", act_param=0.5), nft.GroupNorm(2, 4, activation="elu",
                                                                              act_param=0.5)(x))
    with pytest.raises(ValueError, match="has its own, 'elu'"):
        nft.GroupNorm(2, 4, activation="elu")(x, activation="silu")


def test_adaptive_group_norm():
    layer, x = nft.GroupNorm(2, 4, activation="silu"), torch.randn(3, 4, 5)
    scale, shift = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(layer(x, scale=scale, shift=shift),
                       nft.group_norm(x, 2, layer.weight, layer.bias, scale=scale, shift=shift, activation="silu"))


def test_group_norm_without_processes_has_no_strips():
    layer = nft.GroupNorm(2, 4, sharded_dim=-1)
    x = torch.randn(2, 4, 6)
    assert torch.equal(layer(x), nft.GroupNorm(2, 4)(x)) and "sharded_dim=-1" in repr(layer)
    with pytest.raises(IndexError, match="sharded_dim must be a spatial axis of the input"):
        nft.GroupNorm(2, 4, sharded_dim=3)(x)


def test_channel_affine():
    layer = nft.ChannelAffine(4, activation="hardswish", dtype=torch.float64)
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    x, more = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    problem = reference.Problem("affine", "float64", array(x), weight=array(layer.weight), bias=array(layer.bias),
                                post_add=array(more), activation="hardswish", on_cuda=ON_CUDA)
    reference.compare("y", array(layer(x, post_add=more)), *reference.forward(problem)["y"], "float64")
    assert repr(layer) == "ChannelAffine(4, bias=True, activation='hardswish')"
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert nft.ChannelAffine(4, bias=False)(x.float()).equal(x.float())
    layer = nft.ChannelAffine(4, activation="prelu", num_parameters=4, dtype=torch.float64)
    assert list(layer.state_dict()) == ["weight", "bias", "slope"]
    with torch.no_grad():
        layer.slope.normal_()
    assert torch.equal(layer(x), nft.channel_affine(x, layer.weight, layer.bias, activation="prelu", slope=layer.slope))
    layer.reset_parameters()
    assert torch.equal(layer.slope, torch.full_like(layer.slope, 0.25))


def test_convert_sync_batchnorm():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nft.BatchNorm1d(4, momentum=None, activation="relu")),
                          nn.Linear(2, 2)).eval()
    first, second = model[0], model[1][0]
    made = nft.SyncBatchNorm.convert_sync_batchnorm(model)
    assert made is model and type(model[0]) is type(model[1][0]) is nft.SyncBatchNorm
    assert model[0].weight is first.weight and model[0].running_var is first.running_var and not model[0].training
    assert model[1][0].activation == "relu" and model[1][0].momentum is None
    assert type(nft.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(2))) is nft.SyncBatchNorm
    assert second.num_batches_tracked is model[1][0].num_batches_tracked
    slope = nft.BatchNorm1d(4, activation="prelu", num_parameters=4)
    made = nft.SyncBatchNorm.convert_sync_batchnorm(slope)
    assert made.activation == "prelu" and made.slope is slope.slope
    assert list(made.state_dict()) == list(slope.state_dict())


@pytest.mark.parametrize("kind,arguments,shape", [layer for layer in LAYERS if layer[0] != "SyncBatchNorm"])
def test_compiles_whole(kind, arguments, shape):
    layer = getattr(nft, kind)(*arguments, activation="silu")
    x = torch.randn(shape)
    want = copy.deepcopy(layer)(x)
    torch._dynamo.reset()
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind,rank", [("BatchNorm2d", 4), ("InstanceNorm2d", 4), ("SyncBatchNorm", 4)])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("switch", [None, "off", "removed"])
def test_running_statistics_over_a_life(kind, rank, momentum, switch):
    """Training, evaluation and training again; tracking switched off, or the statistics removed, on the way."""
    if switch == "removed" and kind[0] == "I":
        return  # stock's own instance norm has no evaluation without them
    arguments = {"momentum": momentum, "track_running_stats": True, "dtype": torch.float64}
    stock, ours = getattr(nn, kind)(3, **arguments), getattr(nft, kind)(3, **arguments)
    for step, training in enumerate([True, True, False, True, True, False]):
        if step == 3:
            for layer in (stock, ours):
                if switch == "off":
                    layer.track_running_stats = False
                elif switch == "removed":
                    layer.running_mean = layer.running_var = None
        x = torch.randn(4, 3, 5, 5, dtype=torch.float64) * 3 + 1
        a, b = stock.train(training)(x), ours.train(training)(x)
        # Both in double over 100 values of a size near 3: some hundred roundings of 2^-53 each.
        assert torch.allclose(a, b, rtol=0, atol=1e-13)
        for name, tensor in stock.state_dict().items():
            assert torch.allclose(tensor.double(), ours.state_dict()[name].double(), rtol=1e-13), name


@pytest.mark.parametrize("make", [lambda: nft.GroupNorm(2, 4, activation="relu"), lambda: nft.BatchNorm1d(4)])
def test_parameters_that_are_not_in_the_modules_dictionary(make):
    """A parametrization takes the place of the parameter, and so does a replica's plain attribute."""
    x = torch.randn(3, 4, 5)
    plain, changed, replica = make(), make(), make()
    plain.weight.data.fill_(2.0)
    torch.nn.utils.parametrize.register_parametrization(changed, "weight", Doubled())
    for name in ("weight", "bias"):
        parameter = replica._parameters.pop(name)
        setattr(replica, name, parameter.detach() * 2)
    for name, buffer in list(replica._buffers.items()):
        del replica._buffers[name]
        setattr(replica, name, buffer)
    want = plain(x)
    assert torch.equal(changed(x), want) and torch.equal(replica(x), want)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, getattr(replica, name))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("ours, stock", [(lambda: nft.GroupNorm(2, 4), lambda: nn.GroupNorm(2, 4)),
                                         (lambda: nft.BatchNorm1d(4), lambda: nn.BatchNorm1d(4))])
def test_tensors_that_torch_func_left_behind(ours, stock):
    """What a transformation wrapped is used after its end: torch takes what is wrapped, and so do the layers."""
    results = []
    for layer in (ours(), stock()):
        left, leaf = [], torch.linspace(-1, 1, 60).view(3, 4, 5).requires_grad_()
        torch.func.grad(lambda x: (left.append(x * x), x.sum())[1])(leaf)
        y = layer(left[0])
        (y * torch.arange(60).view(3, 4, 5)).sum().backward()
        results.append((y, layer.weight.grad, layer.bias.grad, leaf.grad))
    for a, b in zip(*results):
        assert (a is None) == (b is None)
        # f32 both: sums of 15 to 30 values of a size near 100.
        assert a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-3)
    assert results[0][3] is not None

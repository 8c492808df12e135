# SPDX-License-Identifier: MIT
"""Models of other packages, built from their configurations with random weights, converted and compared with the same
model as it was: output, gradients of the input and of every parameter, and running statistics, evaluating and in three
steps of training, and the parameters after them.

All in f64, where what convert does to the order of sums comes to 1e-12 or less at the depth of these models, and a
wrong graph to 1. A package that is missing is named in the reason for which its tests are skipped."""
import copy
import importlib
import pickle
import sys

import pytest

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402
from device import DEVICE, default_device  # noqa: E402, F401
from torch import nn  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def load(name):
    """A package; the tests that need it are skipped where it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")


_schemas = []


def load_torchvision():
    """torchvision, also where its operators are built for another PyTorch than the one here (PyPI's wheel needs CUDA):
    then it is enough, for models that use none of them, that two are declared."""
    try:
        return load("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.append(library)
    return load("torchvision")


def timm_model(name, **options):
    load_torchvision()
    return load("timm").create_model(name, pretrained=False, num_classes=7, **options)


def random_norms(model):
    """Weights and biases of norms away from 1 and 0: some models start with zeros, through which no gradient flows."""
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "eps") and getattr(module, "weight", None) is not None:
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(std=0.3)
    return model


def compared(make, *inputs, call=lambda m, *x: m(*x), training=(True, False)):
    """Converts a model and compares; gives what convert reported."""
    stock = random_norms(make().double())
    model = copy.deepcopy(stock)
    report = nft.convert(model)
    for mode in training:
        results = []
        for m in (model.train(mode), stock.train(mode)):
            given = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
            # At a rate of 1e-3 stock's own rounding grows fortyfold a step.
            optimizer = torch.optim.SGD(m.parameters(), lr=1e-5, momentum=0.9)
            torch.manual_seed(1)  # of dropouts
            for _ in range(3 if mode else 1):
                optimizer.zero_grad()
                y = call(m, *given)
                y.square().mean().backward()
                if mode:
                    optimizer.step()
            results.append([y.detach(), *(x.grad for x in given if x.is_floating_point()),
                            *(p.grad for p in m.parameters()), *(b.double() for b in m.buffers()),
                            *(p.detach() for p in m.parameters())])
            m.zero_grad()
        scale = max(float(g.abs().max()) for g in results[1][1:] if g is not None)
        for i, (a, b) in enumerate(zip(*results)):
            assert (a is None) == (b is None)
            # Gradients that are 0 but for rounding are compared at the size of the largest.
            assert a is None or (a - b).abs().max() <= 1e-10 * max(float(b.abs().max()), scale if i else 0.0), i
    nft.revert(model)
    assert repr(model) == repr(stock)
    return report


def counts(report):
    """How often what was folded, by what it was; layers with nothing under ""."""
    found = {}
    for layer in report.layers:
        for what in layer.folded or ("",):
            found[what] = found.get(what, 0) + 1
    return found


def images(*shape):
    return torch.randn(shape, dtype=torch.float64)


# ---- diffusers ------------------------------------------------------------------------------------------------------


def test_stable_diffusion_unet():
    load_torchvision()  # which diffusers imports
    diffusers = load("diffusers")
    report = compared(lambda: diffusers.UNet2DConditionModel(sample_size=8, block_out_channels=(32, 32, 64, 64),
                                                             cross_attention_dim=16, attention_head_dim=8),
                      images(2, 4, 8, 8), torch.tensor([3, 500]), images(2, 5, 16),
                      call=lambda m, x, t, e: m(x, t, e, return_dict=False)[0], training=(False,))
    # The 16 of the attentions are followed by nothing.
    assert counts(report) == {"silu": 45, "": 16} and not report.left
    assert {layer.reason for layer in report.layers if "attentions" in layer.name} == {
        "what reads its output is no activation"}


def test_stable_diffusion_vae():
    load_torchvision()  # which diffusers imports
    diffusers = load("diffusers")
    report = compared(lambda: diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 32, 64, 64), layers_per_block=2, latent_channels=4), images(1, 3, 32, 32),
        call=lambda m, x: m.decode(m.encode(x, return_dict=False)[0].mean, return_dict=False)[0], training=(True,))
    assert counts(report) == {"silu": 50, "": 2} and not report.left


# ---- timm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet50_gn", "resnet50"])
def test_resnet50(name):
    """ResNet-50's blocks, two in each stage, and half its width."""
    report = compared(lambda: timm_model(name, layers=(2, 2, 2, 2), channels=(32, 32, 64, 64)), images(2, 3, 64, 64))
    # The shortcuts of the first blocks have norms, too: the sum is folded into the other operand.
    assert counts(report) == {"relu": 17, "add + relu": 8, "": 4} and not report.left


def test_mobilenet_v2():
    """torchvision's, whose 17 projections have no activation."""
    report = compared(lambda: load_torchvision().models.mobilenet_v2(width_mult=0.25), images(2, 3, 64, 64))
    assert counts(report) == {"relu6": 35, "": 17} and not report.left


@pytest.mark.parametrize("name,options,folded", [
    ("test_efficientnet", {}, {"silu": 9, "": 4}), ("test_efficientnet_gn", {}, {"silu": 9, "": 4}),
    ("resnetv2_50d_gn", {"layers": (1, 1, 1, 1), "channels": (128, 128, 128, 128)}, {"relu": 15})])
def test_norms_with_an_activation_of_their_own(name, options, folded):
    report = compared(lambda: timm_model(name, **options), images(2, 3, 64, 64))
    assert counts(report) == folded and not report.left


def norm_act(name, *arguments, **options):
    load_torchvision()
    load("timm")
    return getattr(importlib.import_module("timm.layers.norm_act"), name)(*arguments, **options)


NORM_ACTS = {
    "BatchNormAct2d": (lambda **o: norm_act("BatchNormAct2d", 4, **o), nft.BatchNorm2d),
    "GroupNormAct": (lambda **o: norm_act("GroupNormAct", 4, 2, **o), nft.GroupNorm),
    "FrozenBatchNormAct2d": (lambda **o: norm_act("FrozenBatchNormAct2d", 4, **o), None),
}


@pytest.mark.parametrize("kind", NORM_ACTS)
@pytest.mark.parametrize("options,folded,reason", [
    ({}, ("relu",), None), ({"act_layer": nn.LeakyReLU, "act_kwargs": {"negative_slope": 0.3}}, ("leaky_relu",), None),
    ({"apply_act": False}, (), "it has no activation of its own"),
    ({"act_layer": nn.PReLU, "inplace": None}, ("prelu",), None),
    ({"act_layer": nn.Tanh, "inplace": None}, (), "its own Tanh runs after it"),
    ({"drop_layer": lambda: nn.Dropout(0.5)}, (), "its own Dropout runs after it")], ids=str)
def test_a_norm_with_an_activation_of_its_own(kind, options, folded, reason):
    make, base = NORM_ACTS[kind]
    if "inplace" in options:
        def model():
            layer = make(apply_act=False)
            layer.act = options["act_layer"]()
            return nn.Sequential(layer, nn.Conv2d(4, 4, 1))
    else:
        def model():
            return nn.Sequential(make(**options), nn.Conv2d(4, 4, 1))
    report = compared(model, images(2, 4, 5, 5))
    assert [(layer.done, layer.folded, layer.reason) for layer in report.layers] == [(True, folded, reason)]
    stock = model().double()
    ours = copy.deepcopy(stock)
    nft.convert(ours)
    assert isinstance(ours[0], type(stock[0])) and (base is None or isinstance(ours[0], base))
    x = images(2, 4, 5, 5)
    if "drop_layer" not in options:
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(other.eval()(x), ours.eval()(x)) and type(other[0]) is type(ours[0])
    # Whoever hooks act is called, and so is what takes its place.
    for m in (ours, stock):
        m.eval()[0].act.register_forward_hook(lambda module, args, y: y + 1)
    assert torch.allclose(ours(x), stock(x), rtol=0, atol=1e-12)
    for m in (ours, stock):
        m[0].act = nn.Tanh()
    assert torch.allclose(ours(x), stock(x), rtol=0, atol=1e-12)


def test_frozen_batch_norms():
    frozen = load_torchvision().ops.FrozenBatchNorm2d

    def model():
        layer = frozen(4, eps=1e-3)
        for name, values in (("running_mean", torch.randn(4)), ("running_var", torch.rand(4) + 0.5)):
            getattr(layer, name).copy_(values)
        return nn.Sequential(nn.Conv2d(4, 4, 1), layer, nn.ReLU(), frozen(4))

    report = compared(model, images(2, 4, 5, 5))
    assert [(layer.name, layer.done, layer.folded) for layer in report.layers] == [("1", True, ("relu",)),
                                                                                   ("3", True, ())]
    stock = random_norms(model())
    ours = copy.deepcopy(stock)
    nft.convert(ours)
    assert list(ours.state_dict()) == list(stock.state_dict())
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(pickle.loads(pickle.dumps(ours))(x), ours(x))
    # Buffers wider than the input: stock promotes, and so do we.
    for wide in (ours[1], copy.deepcopy(stock)[1]):
        assert wide(x.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(ours[1](x.bfloat16()), stock[1](x.bfloat16()), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-6, atol=1e-6)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert ours[1](x.bfloat16()).dtype == torch.bfloat16


def small_resnet(torchvision, norm):
    """ResNet-50's blocks, one in each stage."""
    from torchvision.models.resnet import Bottleneck
    return torchvision.models.ResNet(Bottleneck, [1, 1, 1, 1], num_classes=7, norm_layer=norm)


def test_a_resnet_with_frozen_batch_norms():
    torchvision = load_torchvision()
    report = compared(lambda: small_resnet(torchvision, torchvision.ops.FrozenBatchNorm2d), images(2, 3, 64, 64))
    assert counts(report) == {"relu": 9, "add + relu": 4, "": 4} and not report.left


def test_the_backbone_of_mask_rcnn():
    torchvision = load_torchvision()
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor

    def norm(channels):
        return nn.GroupNorm(32, channels)

    report = compared(lambda: _resnet_fpn_extractor(small_resnet(torchvision, norm), 5, norm_layer=norm),
                      images(1, 3, 64, 64), call=lambda m, x: torch.cat([y.flatten() for y in m(x).values()]))
    # The stem's values go into a dict of outputs.
    assert counts(report) == {"relu": 8, "add + relu": 4, "": 13} and not report.left


# ---- MONAI ----------------------------------------------------------------------------------------------------------


def test_unet_3d_with_instance_norm():
    nets = load("monai.networks.nets")
    report = compared(lambda: nets.UNet(3, 1, 2, (4, 8, 8), (2, 2), num_res_units=2, dropout=0.3,
                                        act=("leakyrelu", {"negative_slope": 0.1}),
                                        norm=("instance", {"affine": True})),
                      images(2, 1, 16, 16, 16))
    assert counts(report) == {"leaky_relu": 9} and not report.left


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}], ids=str)
def test_unet_3d_as_it_comes(options):
    """With PReLU."""
    nets = load("monai.networks.nets")
    report = compared(lambda: nets.UNet(3, 1, 2, (4, 8, 8), (2, 2), num_res_units=1, **options),
                      images(2, 1, 16, 16, 16))
    assert counts(report) == {"prelu": 6} and not report.left


def test_dynunet():
    nets = load("monai.networks.nets")
    report = compared(lambda: nets.DynUNet(3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), res_block=True, filters=(4, 8, 8),
                                           norm_name=("instance", {"affine": True})), images(2, 1, 16, 16, 16))
    assert counts(report) == {"leaky_relu": 7, "add + leaky_relu": 3, "": 3} and not report.left


# ---- nnU-Net --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,blocks,folded", [
    ("PlainConvUNet", "n_conv_per_stage", {"leaky_relu": 7}),
    ("ResidualEncoderUNet", "n_blocks_per_stage", {"leaky_relu": 8, "add + leaky_relu": 5, "": 1})])
def test_nnunet(kind, blocks, folded):
    unets = load("dynamic_network_architectures.architectures.unet")
    report = compared(lambda: getattr(unets, kind)(
        input_channels=1, n_stages=3, features_per_stage=(4, 8, 8), conv_op=nn.Conv3d, kernel_sizes=3,
        strides=(1, 2, 2), num_classes=2, n_conv_per_stage_decoder=(1, 1), conv_bias=True, norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True},
        **{blocks: (1, 2, 2)}), images(2, 1, 16, 16, 16))
    assert counts(report) == folded and not report.left

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times whole models as they come, compiled, converted by normfuse.torch.convert, and converted and compiled.

    python3 bench/models.py                                   every model of the device, all four variants
    python3 bench/models.py --only unet,resnet50-gn-train --variants stock,normfuse
    python3 bench/models.py --warm                            fills the compiler's cache, all models at once
    python3 bench/models.py --device cpu --tiny               a dry run in a minute or two

Models are built from their configurations with random weights: nothing is downloaded. They need diffusers, timm or
torchvision, as their rows say; a model whose package is missing is named and left out.

Each model has a process of its own, with a time limit. In it the variants take turns, a few calls at a time, and before
anything is timed each one's output (and gradients, for a training step) is compared with a reference: the stock model
in a wider type (f32 for 16 bits, f64 for f32). A variant may be twice as far from it as stock is, in the Euclidean
norm: both round as often, to the same type. (How far stock is: the most of a few runs, all but one of them on inputs
changed by a unit roundoff, because one ReLU that flips can outweigh all other rounding.) Gradients of deep models in 16
bits are mostly noise, so models of 16 bits are converted and compared in f32 as well.

Eager variants are timed before the others are compiled, and again with them, so that a compilation that fails or takes
too long loses nothing.

A model of several processes (PROCESSES) has a GPU in each, of one machine, in DistributedDataParallel over NCCL; all
make the same calls as often as the first one finds right, and the rows are its. On the CPU, over gloo, stock's
synchronized batch norm refuses: there --variants normfuse --unchecked is a dry run.

Times are per call, from an idle device to an idle device (CUDA: events around the call), median, p10 and p90.
peak_gib is the most that the caching allocator held during one call, without what belongs to the other variants.
Rows (--json [FILE], one JSON object a line): model, direction, variant, ms, p10_ms, p90_ms, samples, peak_gib, error
and stock_error (the comparison above, of the output or of the loss and the gradients; f32_error, f32_stock_error: in
f32), first_call_s (compilation included), torch, gpu or cpu, threads, date, ..."""
from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Optional

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import peers  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

VARIANTS = ("stock", "normfuse", "stock_compile", "normfuse_compile")
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of axes
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclasses.dataclass
class Task:
    """One model and what is done with it. call(model, *inputs) gives the output, or the loss of a training step."""
    model: nn.Module
    inputs: tuple[Any, ...]
    call: Callable[..., Tensor]
    training: bool
    dtype: torch.dtype                # that activations have
    layout: str
    autocast: bool = False
    graph: bool = False               # timed as a replayed CUDA graph
    # The call that is compared where it is another one: (inputs, call).
    compared: Optional[tuple[tuple[Any, ...], Callable[..., Tensor]]] = None
    compiles: bool = True             # in a time worth waiting for

    def context(self, wide: bool = False) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.training))
        if self.autocast and not wide:
            stack.enter_context(torch.autocast(device_of(self.model).type, self.dtype))
        return stack


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def randomized(model: nn.Module) -> nn.Module:
    """Weights and biases of norms away from 1 and 0: some models start with zeros, through which no gradient flows."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LayerNorm)) \
                    and module.weight is not None:
                module.weight.uniform_(0.8, 1.2)
                module.bias.normal_(std=0.1)
            elif type(module).__name__.endswith("RMS_norm"):
                module.gamma.uniform_(0.8, 1.2)
    return model


def placed(model: nn.Module, device: str, dtype: torch.dtype, layout: str, training: bool) -> nn.Module:
    model = randomized(model).to(device, dtype).train(training)
    for parameter in model.parameters() if layout == "nhwc" else ():
        if parameter.dim() in CHANNELS_LAST:
            parameter.data = parameter.data.contiguous(memory_format=CHANNELS_LAST[parameter.dim()])
    return model


def images(shape: tuple[int, ...], device: str, dtype: torch.dtype, layout: str) -> Tensor:
    x = torch.randn(shape, device=device, dtype=dtype)
    return x.contiguous(memory_format=CHANNELS_LAST[len(shape)]) if layout == "nhwc" else x


# ---- the models -----------------------------------------------------------------------------------------------------


def unet(device: str, tiny: bool, training: bool, layout: str, dtype: torch.dtype, batch: int, size: int,
         autocast: bool = False, graph: bool = False) -> Task:
    """Stable Diffusion 1.5's UNet."""
    from diffusers import UNet2DConditionModel
    widths, text = ((32, 64, 64, 64), 64) if tiny else ((320, 640, 1280, 1280), 768)
    size = 16 if tiny else size
    weights = torch.float32 if autocast else dtype
    with torch.device(device):
        model = UNet2DConditionModel(sample_size=size, block_out_channels=widths, cross_attention_dim=text,
                                     attention_head_dim=8)
    model = placed(model, device, weights, layout, training)
    latents = images((batch, 4, size, size), device, weights, layout)
    words = torch.randn(batch, 77, text, device=device, dtype=weights)
    step = torch.full((batch,), 500, device=device)
    if not training:
        return Task(model, (latents, step, words), lambda m, x, t, e: m(x, t, e, return_dict=False)[0], False, dtype,
                    layout, graph=graph)
    noise = images((batch, 4, size, size), device, weights, layout)
    return Task(model, (latents, step, words, noise),
                lambda m, x, t, e, n: F.mse_loss(m(x, t, e, return_dict=False)[0].float()
                                                 if x.dtype != torch.float64 else m(x, t, e, return_dict=False)[0], n),
                True, dtype, layout, autocast=autocast, graph=graph)


def sdxl_unet(device: str, tiny: bool, layout: str, dtype: torch.dtype, batch: int, size: int) -> Task:
    """SDXL's UNet, which is told the sizes of pictures beside the step."""
    from diffusers import UNet2DConditionModel
    size = 16 if tiny else size
    widths, layers, heads, text = ((32, 64, 64), (1, 1, 2), (2, 4, 4), 64) if tiny else \
        ((320, 640, 1280), (1, 2, 10), (5, 10, 20), 2048)
    pooled, times = (64, 16) if tiny else (1280, 256)
    with torch.device(device):
        model = UNet2DConditionModel(
            sample_size=size, block_out_channels=widths, cross_attention_dim=text, attention_head_dim=heads,
            transformer_layers_per_block=layers, use_linear_projection=True, addition_embed_type="text_time",
            addition_time_embed_dim=times, projection_class_embeddings_input_dim=pooled + 6 * times,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"))
    model = placed(model, device, dtype, layout, False)
    inputs = (images((batch, 4, size, size), device, dtype, layout), torch.full((batch,), 500, device=device),
              torch.randn(batch, 77, text, device=device, dtype=dtype),
              {"text_embeds": torch.randn(batch, pooled, device=device, dtype=dtype),
               "time_ids": torch.full((batch, 6), 8.0 * size, device=device, dtype=dtype)})
    return Task(model, inputs, lambda m, x, t, e, a: m(x, t, e, added_cond_kwargs=a, return_dict=False)[0], False,
                dtype, layout, graph=True)


def vae(device: str, tiny: bool, layout: str, dtype: torch.dtype, size: int, flux: bool = False) -> Task:
    """The decoder of Stable Diffusion's and SDXL's autoencoder, or of FLUX's; one image."""
    from diffusers import AutoencoderKL
    widths = (32, 32, 64, 64) if tiny else (128, 256, 512, 512)
    size = 64 if tiny else size
    with torch.device(device):
        model = AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
                              block_out_channels=widths, layers_per_block=2, latent_channels=16 if flux else 4,
                              use_quant_conv=not flux, use_post_quant_conv=not flux)
    model.encoder = model.quant_conv = None  # the decoder's weights alone
    model = placed(model, device, dtype, layout, False)
    latents = images((1, 16 if flux else 4, size // 8, size // 8), device, dtype, layout)
    return Task(Decoder(model), (latents,), lambda m, z: m(z), False, dtype, layout)


def hunyuan_vae(device: str, tiny: bool, dtype: torch.dtype, frames: int, size: int) -> Task:
    """The decoder of HunyuanVideo's autoencoder, whose group norms reach over frames; one tile of its tiled decode."""
    from diffusers import AutoencoderKLHunyuanVideo
    frames, size = (5, 32) if tiny else (frames, size)
    with torch.device(device):
        model = AutoencoderKLHunyuanVideo(**({"block_out_channels": (32, 32, 64, 64)} if tiny else {}))
    model.encoder = model.quant_conv = None  # the decoder's weights alone
    model = placed(model, device, dtype, "nchw", False)
    latents = images((1, 16, (frames - 1) // 4 + 1, size // 8, size // 8), device, dtype, "nchw")
    return Task(Decoder(model), (latents,), lambda m, z: m(z), False, dtype, "nchw")


class Decoder(nn.Module):
    """An autoencoder's decode as a forward, which is what torch.compile takes."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.post_quant_conv, self.decoder = autoencoder.post_quant_conv, autoencoder.decoder

    def forward(self, latents: Tensor) -> Tensor:
        return self.decoder(latents if self.post_quant_conv is None else self.post_quant_conv(latents))


class VideoDecoder(nn.Module):
    """Wan's and Qwen-Image's decode: one frame of latents after the other, with the last ones of each convolution kept;
    without the clamp, which would hide differences."""

    def __init__(self, autoencoder: nn.Module, says_first: bool) -> None:
        super().__init__()
        self.autoencoder, self.says_first = autoencoder, says_first

    def forward(self, latents: Tensor) -> Tensor:
        model = self.autoencoder
        model.clear_cache()
        latents, frames = model.post_quant_conv(latents), []
        for i in range(latents.shape[2]):
            model._conv_idx = [0]
            first = {"first_chunk": i == 0} if self.says_first else {}
            frames.append(model.decoder(latents[:, :, i:i + 1], feat_cache=model._feat_map, feat_idx=model._conv_idx,
                                        **first))
        model.clear_cache()
        return torch.cat(frames, 2)


def video_vae(kind: str, device: str, tiny: bool, layout: str, dtype: torch.dtype, frames: int, height: int,
              width: int) -> Task:
    """The decoder of Wan 2.1's autoencoder, or of Qwen-Image's, which is one of videos, too; RMS norm over channels."""
    import diffusers
    if tiny:
        frames, height, width = 5 if frames > 1 else frames, 32, 48
    with torch.device(device):
        model = getattr(diffusers, kind)(**({"base_dim": 16} if tiny else {}))
    latents = images((1, 16, (frames - 1) // 4 + 1, height // 8, width // 8), device, dtype, layout)
    model.encoder, model.quant_conv = nn.Identity(), None  # the decoder's weights alone; it counts both's convolutions
    decoder = VideoDecoder(placed(model, device, dtype, layout, False), kind == "AutoencoderKLWan")
    return Task(decoder, (latents,), lambda m, z: m(z), False, dtype, layout)


def sam_neck(device: str, tiny: bool, layout: str, dtype: torch.dtype, batch: int) -> Task:
    """The neck of Segment Anything's image encoder: two convolutions, each with a layer norm over channels."""
    import timm
    width, side = (32, 4) if tiny else (768, 64)
    model = timm.create_model("samvit_base_patch16", pretrained=False, num_classes=0, img_size=16 * side,
                              embed_dim=width, depth=1, num_heads=2, neck_chans=16 if tiny else 256,
                              global_attn_indexes=())
    return Task(placed(model.neck, device, dtype, layout, False),
                (images((2 if tiny else batch, width, side, side), device, dtype, layout),), lambda m, x: m(x), False,
                dtype, layout)


def resnet(name: str, device: str, tiny: bool, training: bool, layout: str, dtype: torch.dtype, batch: int,
           autocast: bool = False, synchronized: bool = False, **options: Any) -> Task:
    """ResNet or another of timm's models of images."""
    import timm
    batch, size = (4, 64) if tiny else (batch, 224)
    model = timm.create_model(name, pretrained=False, **options)
    if synchronized:
        from timm.layers import convert_sync_batchnorm
        model = convert_sync_batchnorm(model)
    model = placed(model, device, torch.float32 if autocast else dtype, layout, training)
    x = images((batch, 3, size, size), device, torch.float32 if autocast else dtype, layout)
    if not training:
        return Task(model, (x,), lambda m, x: m(x), False, dtype, layout)
    labels = torch.randint(0, 1000, (batch,), device=device)
    return Task(model, (x, labels), lambda m, x, y: F.cross_entropy(m(x), y), True, dtype, layout, autocast=autocast,
                compiles=not synchronized)


def mask_rcnn(device: str, tiny: bool, dtype: torch.dtype, batch: int) -> Task:
    """torchvision's Mask R-CNN with group norm in its ResNet-50 and its feature pyramid."""
    import torchvision
    from torchvision.models.detection import mask_rcnn as detection
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
    height, width = (96, 128) if tiny else (800, 1088)
    batch = 2 if tiny else batch
    sizes = {"min_size": height, "max_size": width, "rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 20,
             "box_batch_size_per_image": 8} if tiny else {}

    def norm(channels: int) -> nn.Module:
        return nn.GroupNorm(32, channels)

    backbone = _resnet_fpn_extractor(torchvision.models.resnet50(weights=None, norm_layer=norm), 5, norm_layer=norm)
    model = placed(detection.MaskRCNN(backbone, num_classes=91, **sizes), device, torch.float32, "nchw", True)
    pictures = [torch.rand(3, height, width, device=device) for _ in range(batch)]
    boxes = torch.tensor([[0.05, 0.08, 0.37, 0.62], [0.28, 0.25, 0.64, 0.87]], device=device)
    boxes = boxes * torch.tensor([width, height, width, height], device=device)
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2], device=device),
                "masks": torch.ones(2, height, width, dtype=torch.uint8, device=device)} for _ in range(batch)]
    probes: list[Tensor] = []

    def pyramid(m: nn.Module, x: Tensor) -> Tensor:
        # The heads behind the backbone rank and samples boxes, and a last digit changes which.
        features = list(m.backbone(x).values())
        if not probes:
            generator = torch.Generator(device).manual_seed(1)
            probes.extend(torch.randn(f.shape, device=device, generator=generator) for f in features)
        return sum((f.to(x.dtype) * p).mean() for f, p in zip(features, probes)) * len(features)

    return Task(model, (pictures, targets), lambda m, x, t: sum(m(x, t).values()), True, dtype, "nchw", autocast=True,
                compared=((torch.randn(batch, 3, height, width, device=device),), pyramid), compiles=False)


def convnext(device: str, tiny: bool, dtype: torch.dtype, batch: int, autocast: bool) -> Task:
    """ConvNeXt-T; its scales of layers at 1, through which more than a millionth of each block arrives."""
    small = {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)} if tiny else {}
    return resnet("convnext_tiny", device, tiny, True, "nhwc", dtype, batch, autocast, ls_init_value=1.0, **small)


def nnunet(device: str, tiny: bool, layout: str, dtype: torch.dtype, batch: int) -> Task:
    """nnU-Net's residual encoder (ResEnc M) on patches of 128 x 128 x 128 voxels, with deep supervision."""
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet
    widths, blocks = ((8, 16), (1, 2)) if tiny else ((32, 64, 128, 256, 320, 320), (1, 3, 4, 6, 6, 6))
    stages, side = len(widths), 16 if tiny else 128
    model = ResidualEncoderUNet(
        1, stages, widths, nn.Conv3d, 3, (1,) + (2,) * (stages - 1), blocks, 3, 1, conv_bias=True,
        norm_op=nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True}, deep_supervision=True)
    model = placed(model, device, torch.float32, layout, True)
    x = images((batch, 1, side, side, side), device, torch.float32, layout)
    labels = torch.randint(0, 3, (batch, side, side, side), device=device)

    def loss(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        outputs = m(x)
        return sum(F.cross_entropy(y, labels[:, ::2**i, ::2**i, ::2**i]) / 2**i for i, y in enumerate(outputs))

    return Task(model, (x, labels), loss, True, dtype, layout, autocast=True)


def conv_tasnet(device: str, tiny: bool, batch: int) -> Task:
    """Conv-TasNet, which separates voices of one microphone: group norms of one group over a whole recording."""
    import torchaudio
    model = torchaudio.models.ConvTasNet(**({"msk_num_feats": 16, "msk_num_hidden_feats": 16, "enc_num_feats": 32,
                                             "msk_num_layers": 2, "msk_num_stacks": 1} if tiny else {}))
    model = placed(model, device, torch.float32, "nchw", True)
    x = torch.randn(2 if tiny else batch, 1, 400 if tiny else 32000, device=device)
    want = torch.randn(x.shape[0], 2, x.shape[2], device=device)
    return Task(model, (x, want), lambda m, x, y: F.l1_loss(m(x), y), True, torch.float32, "nchw")


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# device: {name: (package, task(device, tiny))}
MODELS: dict[str, dict[str, tuple[str, Callable[[str, bool], Task]]]] = {
    "cuda": {
        "vae-decode-1024-nhwc": ("diffusers", lambda d, t: vae(d, t, "nhwc", F16, 1024)),
        "vae-decode-1024-nchw": ("diffusers", lambda d, t: vae(d, t, "nchw", F16, 1024)),
        "resnet50-gn-train": ("timm", lambda d, t: resnet("resnet50_gn", d, t, True, "nhwc", BF16, 256, True)),
        "resnet50-bn-train": ("timm", lambda d, t: resnet("resnet50", d, t, True, "nhwc", BF16, 256, True)),
        "unet": ("diffusers", lambda d, t: unet(d, t, False, "nhwc", F16, 2, 64, graph=True)),
        "mask-rcnn-train": ("torchvision", lambda d, t: mask_rcnn(d, t, F16, 4)),
        "wan-decode-480": ("diffusers", lambda d, t: video_vae("AutoencoderKLWan", d, t, "nchw", BF16, 17, 480, 832)),
        "qwen-image-decode-1024": ("diffusers",
                                   lambda d, t: video_vae("AutoencoderKLQwenImage", d, t, "nchw", BF16, 1, 1024,
                                                           1024)),
        "convnext-train": ("timm", lambda d, t: convnext(d, t, BF16, 256, True)),
        "sam-neck": ("timm", lambda d, t: sam_neck(d, t, "nhwc", F16, 8)),
    },
    "cpu": {
        "unet": ("diffusers", lambda d, t: unet(d, t, False, "nchw", F32, 1, 32)),
        "unet-train": ("diffusers", lambda d, t: unet(d, t, True, "nchw", F32, 1, 32)),
        "resnet50-gn": ("timm", lambda d, t: resnet("resnet50_gn", d, t, False, "nchw", F32, 8)),
        "resnet50-gn-train": ("timm", lambda d, t: resnet("resnet50_gn", d, t, True, "nchw", F32, 8)),
    },
}
# Not among the models by default.
EXTRA: dict[str, dict[str, tuple[str, Callable[[str, bool], Task]]]] = {
    "cuda": {
        "unet-eager": ("diffusers", lambda d, t: unet(d, t, False, "nhwc", F16, 2, 64)),
        "unet-nchw": ("diffusers", lambda d, t: unet(d, t, False, "nchw", F16, 2, 64, graph=True)),
        "unet-train": ("diffusers", lambda d, t: unet(d, t, True, "nhwc", BF16, 4, 64, autocast=True)),
        "unet-train-graph": ("diffusers",
                             lambda d, t: unet(d, t, True, "nhwc", BF16, 4, 64, autocast=True, graph=True)),
        "vae-decode-2048": ("diffusers", lambda d, t: vae(d, t, "nhwc", F16, 2048)),
        "flux-decode-1024": ("diffusers", lambda d, t: vae(d, t, "nhwc", BF16, 1024, flux=True)),
        "flux-decode-2048": ("diffusers", lambda d, t: vae(d, t, "nhwc", BF16, 2048, flux=True)),
        "sdxl-unet": ("diffusers", lambda d, t: sdxl_unet(d, t, "nhwc", F16, 2, 128)),
        "wan-decode-480-ndhwc": ("diffusers",
                                 lambda d, t: video_vae("AutoencoderKLWan", d, t, "nhwc", BF16, 17, 480, 832)),
        "hunyuan-video-decode": ("diffusers", lambda d, t: hunyuan_vae(d, t, F16, 17, 256)),
        "nnunet-train": ("dynamic_network_architectures", lambda d, t: nnunet(d, t, "nchw", F16, 2)),
        "nnunet-train-ndhwc": ("dynamic_network_architectures", lambda d, t: nnunet(d, t, "nhwc", F16, 2)),
        "conv-tasnet-train": ("torchaudio", lambda d, t: conv_tasnet(d, t, 8)),
        "resnet50-gn-train-nchw": ("timm", lambda d, t: resnet("resnet50_gn", d, t, True, "nchw", BF16, 256, True)),
        "resnet50-sync-train": ("timm", lambda d, t: resnet("resnet50", d, t, True, "nhwc", BF16, 128, True, True)),
    },
    "cpu": {
        "unet-nhwc": ("diffusers", lambda d, t: unet(d, t, False, "nhwc", F32, 1, 32)),
        "unet-train-nhwc": ("diffusers", lambda d, t: unet(d, t, True, "nhwc", F32, 1, 32)),
        "resnet50-gn-nhwc": ("timm", lambda d, t: resnet("resnet50_gn", d, t, False, "nhwc", F32, 8)),
        "resnet50-gn-train-nhwc": ("timm", lambda d, t: resnet("resnet50_gn", d, t, True, "nhwc", F32, 8)),
        # Models of the other device, for dry runs.
        "sdxl-unet": ("diffusers", lambda d, t: sdxl_unet(d, t, "nhwc", F32, 1, 64)),
        "hunyuan-video-decode": ("diffusers", lambda d, t: hunyuan_vae(d, t, F32, 5, 64)),
        "nnunet-train": ("dynamic_network_architectures", lambda d, t: nnunet(d, t, "nchw", BF16, 1)),
        "nnunet-train-ndhwc": ("dynamic_network_architectures", lambda d, t: nnunet(d, t, "nhwc", BF16, 1)),
        "conv-tasnet-train": ("torchaudio", lambda d, t: conv_tasnet(d, t, 1)),
        "wan-decode": ("diffusers", lambda d, t: video_vae("AutoencoderKLWan", d, t, "nchw", F32, 5, 128, 192)),
        "qwen-image-decode": ("diffusers",
                              lambda d, t: video_vae("AutoencoderKLQwenImage", d, t, "nchw", F32, 1, 256, 256)),
        "convnext-train": ("timm", lambda d, t: convnext(d, t, F32, 8, False)),
        "sam-neck": ("timm", lambda d, t: sam_neck(d, t, "nhwc", F32, 1)),
        "vae-decode": ("diffusers", lambda d, t: vae(d, t, "nhwc", F32, 256)),
        "vae-decode-2048": ("diffusers", lambda d, t: vae(d, t, "nhwc", F32, 2048)),
        "flux-decode": ("diffusers", lambda d, t: vae(d, t, "nhwc", F32, 256, flux=True)),
        "resnet50-gn-train-bf16": ("timm", lambda d, t: resnet("resnet50_gn", d, t, True, "nhwc", BF16, 8, True)),
        "resnet50-sync-train": ("timm", lambda d, t: resnet("resnet50", d, t, True, "nhwc", F32, 8, synchronized=True)),
        "resnet50-bn-train-bf16": ("timm", lambda d, t: resnet("resnet50", d, t, True, "nhwc", BF16, 8, True)),
        "mask-rcnn-train": ("torchvision", lambda d, t: mask_rcnn(d, t, BF16, 1)),
    },
}

# Processes of a model that is spread over several.
PROCESSES = {"resnet50-sync-train": 2}


# ---- comparing ------------------------------------------------------------------------------------------------------


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of nested lists and dicts in another type."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(v, dtype) for key, v in value.items()}
    return type(value)(cast(v, dtype) for v in value) if isinstance(value, (list, tuple)) else value


def nudged(value: Any, unit: float) -> Any:
    """The first tensor of a tuple of inputs, changed at random by one rounding."""
    first, *others = value
    return (first * (1 + unit * torch.randn_like(first)), *others)


def results(task: Task, model: nn.Module, wide: Optional[torch.dtype] = None, nudge: bool = False) -> list[Tensor]:
    """The tensors that are compared: the output, or the loss and the gradients of the first weight and of all parameters with one
    axis (norms' weights and all biases: every layer's gradient arrives at some of them, and they are small)."""
    inputs, call = task.compared or (task.inputs, task.call)
    if wide:
        inputs = cast(inputs, wide)
    if nudge:
        inputs = nudged(inputs, UNIT[wide or task.dtype])
    with task.context(wide is not None):
        output = call(model, *inputs)
        if not task.training:
            return [output.double()]
        # The first weight too: PyTorch 2.13's group norm for channels-last tensors on CPUs crashes in the backward
        # where the gradient of its input is not asked for.
        leaves = [p for i, p in enumerate(model.parameters()) if p.requires_grad and (i == 0 or p.dim() <= 1)]
        gradients = torch.autograd.grad(output, leaves, allow_unused=True)
    return [output.detach().double().reshape(1),
            torch.cat([g.double().reshape(-1) for g in gradients if g is not None])]


def wide_results(task: Task, model: nn.Module, wide: torch.dtype, nudge: bool = False) -> list[Tensor]:
    # Trying out cuDNN's algorithms takes longer than these few calls.
    torch.backends.cudnn.benchmark = False
    try:
        return results(task, model, wide, nudge)
    finally:
        torch.backends.cudnn.benchmark = True


def distances(got: list[Tensor], want: list[Tensor]) -> list[float]:
    """In the Euclidean norm, relative to what is wanted; NaN where a value is not finite."""
    return [float((g - w).norm() / w.norm().clamp_min(1e-300)) for g, w in zip(got, want)]


def too_far(error: list[float], stock_error: list[float], dtype: torch.dtype) -> bool:
    return not all(e <= 2 * s + 4 * UNIT[dtype] for e, s in zip(error, stock_error))


# ---- timing ---------------------------------------------------------------------------------------------------------


class Clock:
    """Milliseconds of one call, from an idle device to an idle device."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        if self.cuda:
            self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def ms(self, call: Callable[[], Any]) -> float:
        if not self.cuda:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        start, end = self.events
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def agreed(value: Any) -> Any:
    """The answer of the first of the processes."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def take_turns(calls: dict[str, Callable[[], Any]], clock: Clock, seconds: float) -> dict[str, list[float]]:
    """`seconds` for each call, in rounds of about a tenth of a second of each, in another order each time: what a call
    finds in the caches and in the allocator is the one before it's."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    each = agreed({name: max(1, min(50, int(100 / max(clock.ms(call), 1e-3)))) for name, call in calls.items()})
    start, rounds, order, generator = time.perf_counter(), 0, list(calls), random.Random(0)
    while agreed(rounds < 3 or time.perf_counter() - start < seconds * len(calls)):
        generator.shuffle(order)
        for name in order:
            times[name] += [clock.ms(calls[name]) for _ in range(each[name])]
        rounds += 1
    return times


def one_call(task: Task, model: nn.Module) -> Callable[[], Any]:
    """A call as it is timed: with the backward of a training step."""
    def infer() -> None:
        with task.context():
            task.call(model, *task.inputs)

    def train() -> None:
        with task.context():
            loss = task.call(model, *task.inputs)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return train if task.training else infer


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return peers.cuda_graph(lambda _: call(), 1).replay


def peak_gib(task: Task, call: Callable[[], Any]) -> Optional[float]:
    """The peak memory of one call, with the model and its inputs, in GiB; None on the CPU."""
    if device_of(task.model).type != "cuda":
        return None
    own = sum(t.numel() * t.element_size() for t in [*task.model.parameters(), *task.model.buffers()])

    def inputs(value: Any) -> int:
        if isinstance(value, Tensor):
            return value.numel() * value.element_size()
        return sum(map(inputs, value.values() if isinstance(value, dict) else value))

    own += inputs(task.inputs)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before + own) / 2**30


# ---- one model, in its own process ----------------------------------------------------------------------------------


def processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def error_text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def work(name: str, arguments: argparse.Namespace, report: Callable[[dict[str, Any]], None]) -> None:
    import traceback

    import normfuse
    import normfuse.torch as nft
    device = arguments.device
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    processes = PROCESSES.get(name, 1)
    if processes > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["RANK"]))
        importlib.import_module("torch.distributed.nn")  # its functions keep the group that is there when it is loaded
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=60))
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # of the reference; what is timed has 16 bits
    torch.manual_seed(0)
    package, make = {**MODELS[device], **EXTRA[device]}[name]
    started = time.perf_counter()
    task = make(device, arguments.tiny)
    row = {"model": name, "direction": "training" if task.training else "inference",
           "dtype": str(task.dtype).removeprefix("torch.") + (" autocast" if task.autocast else ""),
           "layout": task.layout, "graph": task.graph, "tiny": arguments.tiny, "device": device,
           "torch": torch.__version__, "package": f"{package} {importlib.metadata.version(package)}",
           "normfuse": normfuse.__version__, "threads": torch.get_num_threads(),
           **({"processes": processes} if processes > 1 else {}),
           **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {"cpu": processor()})}
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    variants = [v for v in VARIANTS if v in arguments.variants and (task.compiles or not v.endswith("compile")
                                                                    or arguments.compile_all)]
    if arguments.warm:
        variants = [v for v in variants if v.endswith("compile")]
    converted = None
    if any(v.startswith("normfuse") for v in variants):
        converted = copy.deepcopy(task.model)
        summary = str(nft.convert(converted)).splitlines()[0]
    print(f"{name}: built in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    want, comparison = None, {}
    if variants and not arguments.warm and not arguments.unchecked:
        started = time.perf_counter()
        wide = torch.float64 if task.dtype == torch.float32 else torch.float32
        model = copy.deepcopy(task.model).to(wide)
        want = wide_results(task, model, wide)
        runs = [distances(results(task, task.model, nudge=i > 0), want) for i in range(4)]
        stock_error = [max(errors) for errors in zip(*runs)]
        if wide == torch.float32 and converted is not None:
            spread = zip(*(distances(wide_results(task, model, wide, nudge=True), want) for _ in range(3)))
            nft.convert(model)
            comparison = {"f32_error": distances(wide_results(task, model, wide), want),
                          "f32_stock_error": [max(errors) for errors in spread]}
        del model
        print(f"{name}: reference in {time.perf_counter() - started:.1f} s", file=sys.stderr)

    def prepare(variant: str) -> None:
        rows[variant] = {**row, "variant": variant}
        model = task.model if variant.startswith("stock") else converted
        if variant.startswith("normfuse"):
            rows[variant]["converted"] = summary
        if variant.endswith("compile"):
            model = torch.compile(model, backend=arguments.backend)
        bare = model
        if processes > 1:
            model = nn.parallel.DistributedDataParallel(model)
        call = one_call(task, model)
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        rows[variant]["first_call_s"] = round(time.perf_counter() - started, 2)
        print(f"{name}: {variant}: first call in {rows[variant]['first_call_s']} s", file=sys.stderr)
        if arguments.warm:
            return
        if want is not None:
            error = runs[0] if variant == "stock" else distances(results(task, bare), want)
            rows[variant].update(error=error, stock_error=stock_error)
            if too_far(error, stock_error, task.dtype):
                rows[variant]["failed"] = "differs from the reference by more than twice what stock does"
            if variant == "normfuse" and comparison:
                rows[variant].update(comparison)
                if too_far(comparison["f32_error"], comparison["f32_stock_error"], torch.float32):
                    rows[variant]["failed"] = "differs from the reference by more than twice what stock does, in f32"
        call()
        peak = peak_gib(task, call)
        rows[variant]["peak_gib"] = None if peak is None else round(peak, 3)
        calls[variant] = captured(call) if task.graph and device == "cuda" else call

    def finish(last: bool) -> None:
        if not calls:
            return
        times = take_turns(calls, Clock(device), arguments.seconds if last else arguments.seconds / 2)
        for variant, samples in times.items():
            cuts = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else samples * 9
            rows[variant].update(ms=round(statistics.median(samples), 4), p10_ms=round(cuts[0], 4),
                                 p90_ms=round(cuts[8], 4), samples=len(samples),
                                 date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
            report(rows[variant])

    for group in (False, True):
        chosen = [v for v in variants if v.endswith("compile") == group]
        for variant in chosen:
            try:
                prepare(variant)
            except Exception as error:
                traceback.print_exc()
                calls.pop(variant, None)
                report({**rows[variant], "failed": error_text(error)})
        if chosen and not arguments.warm:
            finish(group or not any(v.endswith("compile") for v in variants))
    if processes > 1:
        dist.destroy_process_group()


# ---- all models -----------------------------------------------------------------------------------------------------


Worker = tuple[subprocess.Popen, Any]


def start(name: str, words: list[str], environment: dict[str, str]) -> list[Worker]:
    """A model's processes, which find one another by what torch.distributed reads of the environment, and their logs."""
    processes = PROCESSES.get(name, 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    workers = []
    for rank in range(processes):
        log = tempfile.TemporaryFile("w+")
        place = {**meet, "RANK": str(rank)} if processes > 1 else {}
        workers.append((subprocess.Popen([sys.executable, __file__, "--worker", name, *words], stdout=subprocess.PIPE,
                                         stderr=log, text=True, start_new_session=True,
                                         env={**os.environ, **environment, **place}), log))
    return workers


def collect(workers: list[Worker], limit: float, name: str, rows: dict[tuple[str, str], dict[str, Any]],
            verbose: bool) -> bool:
    """Waits for a model's processes and keeps the last row of each variant; whether all went well."""
    end = time.perf_counter() + limit
    try:
        return all([collect_one(*worker, max(1.0, end - time.perf_counter()), name, rows, verbose)
                    for worker in workers])
    finally:
        for process, _ in workers:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def collect_one(process: subprocess.Popen, log: Any, limit: float, name: str,
                rows: dict[tuple[str, str], dict[str, Any]], verbose: bool) -> bool:
    try:
        output, _ = process.communicate(timeout=limit)
        problem = None if process.returncode == 0 else f"its process ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the compiler's processes
        output, _ = process.communicate()
        problem = f"stopped after {limit:.0f} s"
    for line in output.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows[row["model"], row["variant"]] = row
    log.seek(0)
    lines = log.read().splitlines()
    if problem or verbose:
        print("\n".join(f"    {line}" for line in (lines if verbose else lines[-25:])), file=sys.stderr)
    if problem:
        print(f"models.py: {name}: {problem}", file=sys.stderr)
    return problem is None


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    lines = [f"{'model':26} {'variant':17} {'ms':>9} {'p10':>9} {'p90':>9} {'GiB':>7} {'of stock':>9} "
             f"{'of compiled':>11} {'of GiB':>7}"]
    for (model, variant), row in rows.items():
        if row.get("ms") is None:
            lines.append(f"{model:26} {variant:17} {row['failed']}")
            continue

        def beside(key: str, other: str) -> str:
            value = rows.get((model, other), {}).get(key)
            return f"{row[key] / value:.3f}" if value and row.get(key) else "-"

        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        lines.append(f"{model:26} {variant:17} {row['ms']:9.3f} {row['p10_ms']:9.3f} {row['p90_ms']:9.3f} {peak:>7} "
                     f"{beside('ms', 'stock'):>9} {beside('ms', 'stock_compile'):>11} "
                     f"{beside('peak_gib', 'stock'):>7}{'  FAILED: ' + row['failed'] if 'failed' in row else ''}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", action="append", metavar="NAME", help="these models (several: repeat, or commas)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing for each variant (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for each model (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of PyTorch on the CPU")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="rows, on standard output or at the end "
                        "of FILE; the table then goes to standard error or output")
    parser.add_argument("--tiny", action="store_true", help="small sizes that measure nothing: a dry run")
    parser.add_argument("--warm", action="store_true", help="only compile, all models at once")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager for a quick dry run")
    parser.add_argument("--unchecked", action="store_true", help="do not compare outputs")
    parser.add_argument("--compile-all", action="store_true", help="compile mask-rcnn-train as well, which takes long")
    parser.add_argument("--verbose", action="store_true", help="show what the models' processes say")
    parser.add_argument("--list", action="store_true", help="names of the models")
    parser.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = {**MODELS[arguments.device], **EXTRA[arguments.device]}
    if arguments.list:
        print("\n".join(f"{name} ({known[name][0]}){'' if name in MODELS[arguments.device] else ', only by name'}"
                        for name in known))
        return 0
    if arguments.worker:
        rows_out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print where they like
        arguments.variants = arguments.variants.split(",")
        is_first = arguments.worker not in PROCESSES or os.environ["RANK"] == "0"
        work(arguments.worker, arguments, lambda row: is_first and print(json.dumps(row), file=rows_out, flush=True))
        return 0

    names = [n for word in arguments.only or [] for n in word.split(",")] or list(MODELS[arguments.device])
    for kind, given, possible in (("model", names, known), ("variant", arguments.variants.split(","), VARIANTS)):
        for name in given:
            if name not in possible:
                parser.error(f"no {kind} {name!r}; there are {', '.join(possible)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("models.py: terminated"))  # as an exception, to end the workers
    words = [f"--device={arguments.device}", f"--variants={arguments.variants}", f"--seconds={arguments.seconds}",
             f"--backend={arguments.backend}"]
    words += [f"--threads={arguments.threads}"] * bool(arguments.threads)
    words += [f"--{flag.replace('_', '-')}" for flag in ("tiny", "warm", "unchecked", "compile_all")
              if getattr(arguments, flag)]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    problems = []
    present = []
    for name in names:
        if importlib.util.find_spec(known[name][0]) is None:
            print(f"models.py: {name} is left out: {known[name][0]} is not installed", file=sys.stderr)
            problems.append(name)
        elif arguments.device == "cuda" and torch.cuda.device_count() < PROCESSES.get(name, 1):
            print(f"models.py: {name} is left out: it needs {PROCESSES[name]} GPUs", file=sys.stderr)
            problems.append(name)
        else:
            present.append(name)
    if arguments.warm:
        # Few compiler processes each: the models compile side by side.
        each = str(max(1, (os.cpu_count() or 1) // max(1, len(present))))
        workers = {name: start(name, words, {"TORCHINDUCTOR_COMPILE_THREADS": each}) for name in present}
        end = time.perf_counter() + arguments.limit
        for name, of_model in workers.items():
            if not collect(of_model, end - time.perf_counter(), name, rows, arguments.verbose):
                problems.append(name)
    else:
        for name in present:
            began = time.perf_counter()
            if not collect(start(name, words, {}), arguments.limit, name, rows, arguments.verbose):
                problems.append(name)
            print(f"models.py: {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            if arguments.json:  # after each model: what is done stays if this process is stopped
                done = [json.dumps(row) + "\n" for (model, _), row in rows.items() if model == name]
                if arguments.json == "-":
                    print("".join(done), end="", flush=True)
                else:
                    with open(arguments.json, "a") as file:
                        file.writelines(done)
    if not arguments.warm:
        print("\n".join(table(rows)), file=sys.stderr if arguments.json == "-" else sys.stdout)
    failed = problems or any("failed" in row for row in rows.values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

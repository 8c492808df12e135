# SPDX-License-Identifier: MIT
"""Converts a Stable Diffusion UNet of diffusers, built from its configuration with random weights (nothing is
downloaded), and compares outputs and gradients with the model as it was.

    python examples/convert_unet.py [--size 16] [--full] [--device cuda] [--dtype float64]

needs torch, diffusers and normfuse. --full: the widths of Stable Diffusion 1.5 (860 million parameters); else a sixth.
"""
import argparse
import copy

import normfuse.torch as nft
import torch


def compare(name, ours, stock):
    difference = (ours - stock).abs().max().item()
    size = stock.abs().max().item()
    print(f"{name}: differs by {difference:.3g} of {size:.3g}")
    return difference / max(size, 1e-30)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=16, help="of the latents, a multiple of 8")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32"])
    arguments = parser.parse_args()
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    widths = (320, 640, 1280, 1280) if arguments.full else (64, 96, 128, 128)
    stock = UNet2DConditionModel(sample_size=arguments.size, block_out_channels=widths, cross_attention_dim=768,
                                 attention_head_dim=8).to(arguments.device, getattr(torch, arguments.dtype))
    ours = copy.deepcopy(stock)
    print(nft.convert(ours))

    options = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    latents = torch.randn(2, 4, arguments.size, arguments.size, **options)
    step, text = torch.tensor(500, device=arguments.device), torch.randn(2, 77, 768, **options)
    results = []
    for model in (ours, stock):
        x = latents.clone().requires_grad_()
        y = model(x, step, text).sample
        y.square().mean().backward()
        results.append((y.detach(), x.grad, model.conv_in.weight.grad))
    worst = max(compare(name, a, b) for name, a, b in zip(("output", "gradient of the latents",
                                                           "gradient of the first weight"), *results))
    # 61 layers deep, each rounding differently by a few units in the last place.
    if worst > {"float64": 1e-10, "float32": 1e-2}[arguments.dtype]:
        raise SystemExit("the models differ")
    nft.revert(ours)
    if repr(ours) != repr(stock):
        raise SystemExit("revert left something behind")


if __name__ == "__main__":
    main()

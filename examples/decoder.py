# SPDX-License-Identifier: MIT
"""Stable Diffusion's decoder, converted: an image by the model as it comes and by the converted one.

    python examples/decoder.py [--size 256]

needs PyTorch, normfuse and diffusers. The weights are random, so nothing is downloaded. On a GPU it decodes in 16 bits,
channels-last. Prints what convert did, and the largest difference, which must be below a limit of 16 or 32 bits.
"""
import argparse

import torch
from diffusers import AutoencoderKL

import normfuse.torch as nft


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="pixels of the image on each axis, a multiple of 8")
    size = parser.parse_args().size
    device, dtype, limit = ("cuda", torch.float16, 0.05) if torch.cuda.is_available() else ("cpu", torch.float32, 1e-3)

    # The ten lines. In a program of yours the model is pipe.vae, and latents come of the denoising.
    torch.manual_seed(0)
    vae = AutoencoderKL(up_block_types=("UpDecoderBlock2D",) * 4, down_block_types=("DownEncoderBlock2D",) * 4,
                        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4)
    vae = vae.eval().to(device, dtype, memory_format=torch.channels_last)
    latents = torch.randn(1, 4, size // 8, size // 8, device=device, dtype=dtype)
    with torch.inference_mode():
        stock = vae.decode(latents).sample
        report = nft.convert(vae)
        image = vae.decode(latents).sample

    print(str(report).splitlines()[0])
    difference = float((image - stock).abs().max() / stock.abs().max())
    print(f"{size} x {size} pixels on {device}: differs by {difference:.1e} of the largest value")
    if not difference < limit:
        raise SystemExit(f"the images differ by more than {limit}")


if __name__ == "__main__":
    main()

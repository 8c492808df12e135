# SPDX-License-Identifier: MIT
"""`make demo`: group norm with SiLU, forward and backward, of a photograph's feature maps, through build/normfuse; the
result checked against NumPy in double precision and timed beside a copy of the tensor and beside a plain C loop.

The photograph is the portrait of Grace Hopper (United States Navy, public domain) that matplotlib ships."""
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "build/demo"
PROGRAM = ROOT / "build/normfuse"
GROUPS = 8
U = 2.0 ** -24  # the largest relative error of one f32 rounding
SUM = 80 * U


def photograph():
    """Luminance in [0, 1], at half of the photograph's size."""
    package = pathlib.Path(importlib.util.find_spec("matplotlib").origin).parent
    image = Image.open(package / "mpl-data/sample_data/grace_hopper.jpg").convert("L")
    image = image.resize((image.width // 2, image.height // 2), Image.BOX)
    return numpy.asarray(image, dtype=numpy.float64) / 255


def feature_maps(image):
    """[1, 64, H, W] f32: the image through 64 Gabor filters, as a first layer of a network would see it: 8 directions,
    4 wavelengths, even and odd."""
    height, width = image.shape
    y, x = numpy.meshgrid(numpy.fft.fftfreq(height, 1 / height), numpy.fft.fftfreq(width, 1 / width), indexing="ij")
    spectrum = numpy.fft.fft2(image)
    maps = []
    for wavelength in (4, 8, 16, 32):
        envelope = numpy.exp(-(x * x + y * y) / (2 * (0.4 * wavelength) ** 2))
        envelope /= envelope.sum()
        for direction in numpy.arange(8) * numpy.pi / 8:
            phase = 2 * numpy.pi / wavelength * (x * numpy.cos(direction) + y * numpy.sin(direction))
            for wave in (numpy.cos(phase), numpy.sin(phase)):
                kernel = envelope * (wave - (envelope * wave).sum())  # an even surface gives 0
                maps.append(numpy.fft.ifft2(spectrum * numpy.fft.fft2(kernel)).real)
    return numpy.stack(maps)[None].astype(numpy.float32)


def reference(x, dy, weight, bias):
    """Double precision, by the definition; and for each output a bound of what f32 may add to it.

    A sum in f32 runs over at most 2048 values in 32 lanes, so each term takes up to 64 roundings and a few of joining
    and of its own: SUM. Values are centred near the mean before they are summed, so the terms of the mean are about one
    standard deviation, 1 where they are normalized, and rstd is half as far off as the variance. Then z takes 8
    roundings of its terms, and SiLU (exp, a division, a product) 4 of y."""
    n, c = x.shape[:2]
    per_channel = (1, c, 1, 1)
    x, dy, w, b = (v.astype(numpy.float64) for v in (x, dy, weight.reshape(per_channel), bias.reshape(per_channel)))
    group = (n, GROUPS, -1)

    def mean_of(v):
        """The mean of each group, at every value."""
        means = v.reshape(group).mean(2, keepdims=True)
        return numpy.broadcast_to(means, v.reshape(group).shape).reshape(v.shape)

    mean = mean_of(x)
    rstd = 1 / numpy.sqrt(mean_of((x - mean) ** 2) + 1e-5)
    hat = (x - mean) * rstd
    z = hat * w + b
    gate = 1 / (1 + numpy.exp(-z))
    y = z * gate
    slope = gate * (1 + z * (1 - gate))
    d = dy * slope
    dx = rstd * (d * w - mean_of(d * w) - hat * mean_of(d * w * hat))
    axes = (0, 2, 3)

    z_error = SUM * abs(w) * (1 + abs(hat) / 2) + 8 * U * (abs(hat * w) + abs(b))
    d_error = abs(dy) * (0.5 * z_error + 8 * U)  # 0.5 is above SiLU's largest second derivative
    results = {
        "y": (y, 1.1 * z_error + 4 * U * abs(y)),  # 1.1 is above SiLU's largest slope
        "dx": (dx, rstd * (abs(w) * d_error + mean_of(abs(w) * d_error) + abs(hat) * mean_of(abs(w * hat) * d_error)
                           + 8 * U * abs(d * w)
                           + SUM * (mean_of(abs(d * w)) + abs(hat) * mean_of(abs(d * w * hat))))),
        "dweight": ((d * hat).sum(axes), (abs(hat) * d_error).sum(axes) + SUM * abs(d * hat).sum(axes)),
        "dbias": (d.sum(axes), d_error.sum(axes) + SUM * abs(d).sum(axes)),
    }
    return results


def run(*words):
    result = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise SystemExit(f"demo: {' '.join(str(word) for word in words)} ended with {result.returncode}")
    return result.stdout


def normalize(layout, arrays):
    """One run of the program, both directions. Returns its outputs with the axes N, C, H, W."""
    folder = OUT / layout
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in arrays.items():
        if value.ndim == 4 and layout == "nhwc":
            value = numpy.ascontiguousarray(value.transpose(0, 2, 3, 1))
        numpy.save(folder / f"{name}.npy", value)
    start = time.monotonic()
    run(PROGRAM, "run", "group_norm", folder / "x.npy", f"groups={GROUPS}", "act=silu", f"layout={layout}",
        "--weight", folder / "weight.npy", "--bias", folder / "bias.npy", "-o", folder / "y.npy",
        "--mean", folder / "mean.npy", "--rstd", folder / "rstd.npy", "--backward", folder / "dy.npy",
        "--dx", folder / "dx.npy", "--dweight", folder / "dweight.npy", "--dbias", folder / "dbias.npy")
    seconds = time.monotonic() - start
    outputs = {name: numpy.load(folder / f"{name}.npy") for name in ("y", "dx", "dweight", "dbias")}
    if layout == "nhwc":
        for name in ("y", "dx"):
            outputs[name] = outputs[name].transpose(0, 3, 1, 2)
    return outputs, seconds


def picture(maps, normalized):
    """Eight maps, one of each group, before and after: weak ones become as visible as strong ones."""
    shown = list(range(0, 64, 8))
    height, width = maps.shape[2:]
    canvas = numpy.zeros((2 * height, len(shown) * width))
    before = 2 * abs(maps[0, shown]).max()
    for k, c in enumerate(shown):
        canvas[:height, k * width:(k + 1) * width] = maps[0, c] / before + 0.5
        canvas[height:, k * width:(k + 1) * width] = normalized[0, c] / 6 + 0.1
    image = Image.fromarray(numpy.uint8(255 * canvas.clip(0, 1)))
    image.resize((canvas.shape[1] // 2, canvas.shape[0] // 2)).save(OUT / "maps.png")


def bench(problem, threads=None):
    words = [PROGRAM, "bench", problem, "--json", "--samples", "15"]
    return json.loads(run(*words, *(["--threads", threads] if threads else [])).splitlines()[-1])


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    image = photograph()
    x = feature_maps(image)
    # The gradient that arrives from behind: the maps of the mirrored photograph.
    dy = feature_maps(image[:, ::-1])
    channels = numpy.arange(64, dtype=numpy.float32)
    arrays = {"x": x, "dy": dy, "weight": 1 + 0.25 * numpy.cos(channels), "bias": 0.25 * numpy.sin(channels)}
    sizes = "x".join(str(size) for size in x.shape)
    print(f"A photograph of {image.shape[1]} x {image.shape[0]} pixels through 64 filters: feature maps {sizes}, f32, "
          f"{x.nbytes / 1e6:.0f} MB.")
    print(f"Standard deviation of the maps, least and greatest: {x.std((0, 2, 3)).min():.4f}, "
          f"{x.std((0, 2, 3)).max():.4f}.\n")

    wanted = reference(x, dy, arrays["weight"], arrays["bias"])
    failed = False
    print("Group norm (8 groups) with SiLU, forward and backward, through `build/normfuse run`, "
          "against NumPy in double:")
    for layout in ("nchw", "nhwc"):
        outputs, seconds = normalize(layout, arrays)
        print(f"  {layout.upper()}, {seconds:.2f} s with reading and writing the files")
        for name, (value, bound) in wanted.items():
            error = abs(outputs[name] - value)
            used = float((error / bound).max())
            failed |= not used <= 1
            print(f"    {name:8} largest value {abs(value).max():9.3g}, largest error {error.max():.1e}, "
                  f"{100 * used:.0f} % of its bound{'' if used <= 1 else '  TOO LARGE'}")
        if layout == "nchw":
            picture(x, outputs["y"])

    print("\nTimes, cold memory; floor: a copy of the tensor (backward: read two, write one) in the same run:")
    threads = len(os.sched_getaffinity(0))
    plain = dict(zip(("fwd", "bwd"), run(ROOT / "build/release/plain_loop", *x.shape, GROUPS, 7).split()))
    for direction, name in (("fwd", "forward"), ("bwd", "backward")):
        tail = " dir=bwd" if direction == "bwd" else ""
        problem = f"group_norm {sizes} groups={GROUPS} act=silu"
        rows = [("normfuse", "NCHW", bench(problem + tail)),
                ("normfuse", "NHWC", bench(f"{problem} layout=nhwc{tail}"))]
        if threads > 1:
            rows.append(("normfuse", "NCHW", bench(problem + tail, 1)))
        for who, layout, row in rows:
            print(f"  {name:8}  {who:10} {layout}, {row['threads']} thread{'s' if row['threads'] > 1 else ' '} "
                  f"{row['median_us'] / 1e3:7.2f} ms, {row['ratio']:.2f} times the floor")
        own = float(plain[direction]) / 1e3
        single = rows[-1][2]["median_us"] / 1e3
        print(f"  {name:8}  plain loop NCHW, 1 thread  {own:7.2f} ms, {own / single:.1f} times normfuse on "
              f"{'one thread' if threads > 1 else 'the same'}")
    print(f"\nMaps before and after: {(OUT / 'maps.png').relative_to(ROOT)}; the .npy files are beside it.")
    if failed:
        print("An error was larger than its bound.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

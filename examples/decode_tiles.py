# SPDX-License-Identifier: MIT
"""Decodes a latent image in tiles through a small convolutional decoder with group norms, and has the image that the
decoder makes of the whole latent: every norm takes the statistics of the whole image, merged from those of the tiles.

    python examples/decode_tiles.py [--tile 16]

needs NumPy and normfuse. Prints the largest difference to the whole, which must be below the bound of docs/numerics.md,
and for comparison that of tiles which are normalized each by itself: these have seams.

A norm's statistics need the input of that norm on all tiles, so the tiles are run once for each norm, up to it, and
once to the end. Memory is that of one tile. A tile is run with a halo as wide as the convolutions look; statistics
leave the halo out, so that every position counts once.
"""
import argparse

import normfuse
import numpy

LATENT, HIDDEN, GROUPS, EPS = 4, 16, 4, 1e-5
SMALLEST = 8  # positions that a tile may have at least, by the sizes below
HALO = 2  # latent positions: one for each convolution before the upsampling, one for both behind it
STEEPEST = 1.0999  # slope of SiLU


def make_decoder(dtype):
    """Weights [outputs, inputs, 3, 3] of three convolutions, and weight and bias [HIDDEN] of two norms."""
    random = numpy.random.default_rng(1)
    kernels = [(random.standard_normal((o, i, 3, 3)) / (3 * i**0.5)).astype(dtype)
               for o, i in ((HIDDEN, LATENT), (HIDDEN, HIDDEN), (3, HIDDEN))]
    norms = [(random.uniform(0.5, 1.5, HIDDEN).astype(dtype), random.standard_normal(HIDDEN).astype(dtype))
             for _ in range(2)]
    return kernels, norms


def convolve(x, kernel):
    """[1, C, H, W] with zeros around it."""
    padded = numpy.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = numpy.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))  # [1, C, H, W, 3, 3]
    return numpy.ascontiguousarray(numpy.einsum("ncyxij,ocij->noyx", windows, kernel, optimize=True))


def run(latent, decoder, normalize, last=2):
    """The image of a latent, or, with last < 2, the input of norm number `last`. normalize(i, x) is norm i."""
    kernels, _ = decoder
    for i in range(3):
        x = latent if i == 0 else normalize(i - 1, x)
        if i == 1:
            x = x.repeat(2, axis=2).repeat(2, axis=3)
        x = convolve(x, kernels[i])
        if i == last:
            break
    return x


def scale_of(last):
    """Positions of the output of `run` for each of the latent, on an axis."""
    return 1 if last == 0 else 2


def tiles(height, width, size):
    """(rows, columns) of each tile, with its halo, and where in that the tile itself is."""
    for top in range(0, height, size):
        for left in range(0, width, size):
            outer, inner = [], []
            for start, end in ((top, height), (left, width)):
                stop = min(start + size, end)
                first = max(start - HALO, 0)
                outer.append(slice(first, min(stop + HALO, end)))
                inner.append(slice(start - first, stop - first))
            yield tuple(outer), tuple(inner)


def run_tile(latent, decoder, normalize, outer, inner, last=2):
    """`run` of one tile, without its halo."""
    x = run(latent[:, :, outer[0], outer[1]], decoder, normalize, last)
    rows, columns = (slice(s.start * scale_of(last), s.stop * scale_of(last)) for s in inner)
    return numpy.ascontiguousarray(x[:, :, rows, columns])


def decode_in_tiles(latent, decoder, size, exact=True):
    """The image, put together of tiles. exact=False: each tile has its own statistics."""
    norms, merged = decoder[1], []

    def normalize(i, x):
        if exact:
            return normfuse.group_norm_apply(x, merged[i], GROUPS, *norms[i], EPS, activation="silu")
        return normfuse.group_norm(x, GROUPS, *norms[i], EPS, activation="silu")

    cut = list(tiles(*latent.shape[2:], size))
    for i in range(2 if exact else 0):
        merged.append(normfuse.stats_merge([
            normfuse.group_norm_stats(run_tile(latent, decoder, normalize, *tile, last=i), GROUPS) for tile in cut]))
    image = numpy.empty((1, 3, 2 * latent.shape[2], 2 * latent.shape[3]), latent.dtype)
    for outer, inner in cut:
        top, left = (2 * (o.start + i.start) for o, i in zip(outer, inner))
        tile = run_tile(latent, decoder, normalize, outer, inner)
        image[:, :, top:top + tile.shape[2], left:left + tile.shape[3]] = tile
    return image


def decode_whole(latent, decoder):
    """The image, and the most that the image in tiles may differ from it."""
    kernels, norms = decoder
    unit = float(numpy.finfo(latent.dtype).eps) / 2
    error = 0.0  # of the input of the next convolution

    def normalize(i, x):
        nonlocal error
        weight, bias = norms[i]
        error = convolution_error(error, largest[-1], kernels[i], unit)
        y, mean, rstd = normfuse.group_norm(x, GROUPS, weight, bias, EPS, activation="silu", return_statistics=True)
        error = norm_error(error, x.astype("f8"), mean, rstd.astype("f8"), weight.astype("f8"), bias.astype("f8"), unit)
        largest.append(float(abs(y).max()))
        return y

    largest = [float(abs(latent).max())]
    image = run(latent, decoder, normalize)
    return image, convolution_error(error, largest[-1], kernels[2], unit)


def decode_plainly(latent, decoder):
    return run(latent, decoder,
               lambda i, x: normfuse.group_norm(x, GROUPS, *decoder[1][i], EPS, activation="silu"))


def convolution_error(error, largest, kernel, unit):
    """The bound for two convolutions, each of them summed in any order, on inputs that differ by `error` at most."""
    terms = kernel[0].size
    size = float(abs(kernel).reshape(len(kernel), -1).sum(1).max())
    return size * (error + 2.02 * terms * unit * (largest + error))


def norm_error(error, x, mean, rstd, weight, bias, unit):
    """The bound for two group norms with SiLU whose inputs differ by `error` at most: twice those of docs/numerics.md
    for rows (a difference of two results is within both), and how far inputs move statistics and results."""
    count = x[0].size // GROUPS
    m = max(256, 4096 / SMALLEST) + 5  # roundings on the way into a chunk's sum
    joins, grown = 16 + count / 32, (m + 2) * unit / (1 - (m + 2) * unit)
    channels = x.reshape(HIDDEN, -1)
    mean, rstd = (t[0].repeat(HIDDEN // GROUPS) for t in (mean, rstd))
    double = 2.0**-53
    m2 = count * (1 / rstd**2 - EPS)
    shift = 70 * unit * abs(mean)
    squares = 129 * m2 + 2 * count * shift**2  # T
    mean_error = grown * (squares / count)**0.5 + 2 * joins * double * (abs(mean) + (squares / count)**0.5)
    m2_error = (grown * (3 * squares + 2 * (m2 * squares)**0.5) + joins * double**2 * count * mean**2 +
                8 * joins * double * m2 + 8 * abs(mean) * double * (count * joins * m2)**0.5)
    lost = m2_error / count * rstd**2
    assert lost.max() < 1
    rho = 1 / (1 - lost)**0.5 - 1 + 4 * double
    centred = abs(channels - mean[:, None]).max(1)
    gain, z = abs(weight) * rstd, abs(weight) * rstd * centred + abs(bias)
    z_error = (gain * (mean_error + centred * rho) + 4 * unit * gain * (centred + mean_error + unit * abs(mean)) +
               unit * (abs(bias) + unit * abs(mean) * gain) + unit * z + 8 * unit * z)
    # Inputs within `error`: the mean moves by it, the standard deviation by it at most.
    moved = gain * (2 * error + centred * error * rstd * (1 + error * rstd))
    assert (error * rstd).max() < 0.1
    return float((STEEPEST * (2.02 * z_error + 1.2 * moved) + 14 * unit * z).max())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tile", type=int, default=16, help="latent positions of a tile on each axis, 6 or more")
    size = parser.parse_args().tile
    if size < 6:
        parser.error("--tile must be 6 or more")
    for dtype in ("float64", "float32"):
        decoder = make_decoder(dtype)
        rows, columns = numpy.mgrid[:40, :56]
        latent = numpy.random.default_rng(0).standard_normal((1, LATENT, 40, 56))
        latent += 3 * numpy.sin(rows / 9) + columns / 20
        latent = latent.astype(dtype)  # brighter to the right: tiles differ in their statistics
        whole, bound = decode_whole(latent, decoder) if dtype == "float64" else (decode_plainly(latent, decoder), None)
        difference = abs(decode_in_tiles(latent, decoder, size) - whole).max()
        seams = abs(decode_in_tiles(latent, decoder, size, exact=False) - whole).max()
        # Worst cases of three convolutions and two norms in a row say nothing in float32: seams are the measure there.
        limit, name = (bound, "bound") if bound is not None else (seams / 1000, "limit")
        print(f"{dtype}: values up to {abs(whole).max():.2f}; tiles differ from the whole by {difference:.2g}, {name} "
              f"{limit:.2g}; with statistics of each tile by {seams:.2g}")
        if not difference <= limit:
            raise SystemExit(f"the tiles differ from the whole by more than the {name}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: MIT
"""Group norm of an image in parts: group_norm_stats, stats_merge and group_norm_apply beside group_norm of the whole,
within the bounds of reference.py; layouts, dtypes, outputs, empty parts, what is refused; the example that decodes in
tiles."""
import importlib
import os
import pathlib
import re
import subprocess
import sys

import numpy
import pytest

import normfuse
import reference

ml_dtypes = pytest.importorskip("ml_dtypes")
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
NAMES = ["float64", "float32", "float16", "bfloat16"]
CUTS = [0, 3, 3, 9, 11]  # of 11 rows: parts of different sizes, one of them empty


def dtype_of(name):
    return numpy.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(name, seed, shape=(2, 6, 11, 5)):
    made = numpy.random.default_rng(seed).standard_normal(shape) + numpy.arange(11).reshape(1, 1, 11, 1)
    return made.astype("f4").astype(dtype_of(name))


def parts_of(x, layout):
    """The strips of x, N, C, H, W, in the axes and the memory of the layout."""
    strips = [x[:, :, a:b] for a, b in zip(CUTS, CUTS[1:])]
    if layout == "nchw":
        return [numpy.ascontiguousarray(s) for s in strips]
    return [numpy.ascontiguousarray(numpy.moveaxis(s, 1, -1)) for s in strips]


def whole_of(parts, layout):
    return numpy.concatenate([p if layout == "nchw" else numpy.moveaxis(p, -1, 1) for p in parts], axis=2)


def flat(a):
    return numpy.asarray(a).astype("f8").reshape(*a.shape[:2], -1)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("name", NAMES)
def test_parts_have_the_results_of_the_whole(name, layout):
    x, more, post = (values(name, seed) for seed in (1, 2, 3))
    random = numpy.random.default_rng(4)
    weight, bias = random.standard_normal(6), random.standard_normal(6).astype("f4")
    scale, shift = random.standard_normal((2, 6)), random.standard_normal((2, 6))
    each = [parts_of(t, layout) for t in (x, more, post)]
    found = [normfuse.group_norm_stats(p, 3, pre_add=m, return_sum=True, layout=layout) for p, m, _ in zip(*each)]
    merged = normfuse.stats_merge([stats for stats, _ in found])
    assert merged.shape == (2, 3, 3) and merged.dtype == numpy.float64 and (merged[..., 0] == 2 * 11 * 5).all()
    results = [normfuse.group_norm_apply(p, merged, 3, weight, bias, 1e-3, activation="silu", pre_add=m, post_add=a,
                                         scale=scale, shift=shift, layout=layout, return_statistics=True)
               for p, m, a in zip(*each)]
    problem = reference.Problem("group", name, flat(x), groups=3, columns=layout == "nhwc", weight=weight,
                                bias=bias.astype("f8"), scale=scale, shift=shift, pre_add=flat(more),
                                post_add=flat(post), eps=1e-3, activation="silu")
    want = reference.forward(problem)
    reference.compare("u", flat(whole_of([u for _, u in found], layout)), *want["u"], name)
    reference.compare("y", flat(whole_of([y for y, _, _ in results], layout)), *want["y"], name)
    for _, mean, rstd in results:
        reference.compare("mean", mean, *want["mean"], "float64")
        reference.compare("rstd", rstd.astype("f8"), *want["rstd"], "float64" if name == "float64" else "float32")
        assert (mean == results[0][1]).all() and (rstd == results[0][2]).all()  # the same bits in all parts


def test_outputs_are_written_where_they_are_asked_for():
    x = values("float32", 6)
    stats, y = numpy.empty((3, 2, 2, 3)), numpy.empty_like(x)
    for i in range(3):
        assert normfuse.group_norm_stats(x, 2, out=stats[i]) is not None
    first = stats[0].copy()
    want = normfuse.stats_merge(stats.copy())
    assert normfuse.stats_merge(stats, out=stats[0]) is not None and (stats[0] == want).all()
    assert (want[..., 0] == 3 * first[..., 0]).all() and numpy.allclose(want[..., 2], 3 * first[..., 2])
    assert normfuse.group_norm_apply(x, want, 2, out=y) is y
    in_place = x.copy()
    normfuse.group_norm_apply(in_place, want, 2, out=in_place)
    assert (in_place == y).all()


X = numpy.zeros((2, 6, 4), "f4")
STATS = numpy.ones((2, 3, 3))


@pytest.mark.parametrize("call, error, words", [
    (lambda: normfuse.group_norm_stats(X, 4), ValueError, "num_groups is 4"),
    (lambda: normfuse.group_norm_stats(X, 0), ValueError, "num_groups is 0"),
    (lambda: normfuse.group_norm_stats(X[:, :, ::2], 3), TypeError, "strides"),
    (lambda: normfuse.group_norm_stats(X, 3, out=numpy.empty((2, 3, 2))), ValueError,
     "out has 12 elements, expected 18"),
    (lambda: normfuse.group_norm_stats(X, 3, out=numpy.empty((2, 3, 3), "f4")), TypeError, "out must be f64"),
    (lambda: normfuse.stats_merge([]), ValueError, "stats is empty"),
    (lambda: normfuse.stats_merge(numpy.ones((0, 2, 3))), ValueError, r"\(0, 2, 3\), expected \[parts, ..., 3\]"),
    (lambda: normfuse.stats_merge(numpy.ones((4, 2, 2))), ValueError, r"expected \[parts, ..., 3\]"),
    (lambda: normfuse.stats_merge(numpy.ones(3)), ValueError, "stats has 1 axis"),
    (lambda: normfuse.stats_merge(numpy.ones((4, 2, 3), "f4")), TypeError, "stats has dtype float32, expected float64"),
    (lambda: normfuse.stats_merge([STATS, STATS[:1]]), ValueError, "same shape"),
    (lambda: normfuse.stats_merge(numpy.ones((4, 2, 3)), out=numpy.empty((3, 3))), ValueError, "out has 9 elements"),
    (lambda: normfuse.group_norm_apply(X, STATS[:1], 3), ValueError, "stats has 9 elements, expected 18"),
    (lambda: normfuse.group_norm_apply(X, None, 3), ValueError, "stats"),
    (lambda: normfuse.group_norm_apply(X, STATS.astype("f4"), 3), TypeError, "stats must be f64"),
    (lambda: normfuse.group_norm_apply(X, STATS, 3, activation="selu"), ValueError, "activation is 'selu'"),
])
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("channels_last", [False, True])
def test_torch_tensors_in_parts(channels_last):
    torch = pytest.importorskip("torch")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    torch.manual_seed(0)
    x = torch.randn(2, 6, 11, 5).to(memory_format=layout) + 3
    parts = [x[:, :, a:b].contiguous(memory_format=layout) for a, b in zip(CUTS, CUTS[1:])]
    merged = normfuse.stats_merge([normfuse.group_norm_stats(p, 3) for p in parts])
    assert isinstance(merged, torch.Tensor) and merged.dtype == torch.float64
    y = torch.cat([normfuse.group_norm_apply(p, merged, 3, activation="gelu") for p in parts], 2)
    want = torch.nn.functional.gelu(torch.nn.functional.group_norm(x.double(), 3))
    assert (y - want).abs().max() < 2e-6
    # The same bits as the operators under normfuse.torch.
    importlib.import_module("normfuse.torch")
    stats = torch.stack([torch.ops.normfuse.group_norm_stats(p, None, None, 3)[0] for p in parts])
    assert torch.equal(torch.ops.normfuse.group_norm_apply(x, stats, *[None] * 6, 3, 1e-5, 0, 0.0)[3], merged)


@pytest.mark.parametrize("tile", ["16", "9"])
def test_decode_tiles(tile):
    done = subprocess.run([sys.executable, ROOT / "examples/decode_tiles.py", "--tile", tile],
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(float\d+): .*differ from the whole by (\S+), (?:bound|limit) (\S+); .* by (\S+)$",
                       done.stdout, re.M)
    assert [line[0] for line in lines] == ["float64", "float32"]
    for _, difference, limit, seams in lines:
        assert float(difference) <= float(limit) < float(seams) / 100 and float(seams) > 0.1

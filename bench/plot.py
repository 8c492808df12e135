#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""plot.py [--check] - draws every figure of docs/figures/ from the rows in bench/results/, and puts those that there are
between the lines `<!-- figures: NAME... -->` and `<!-- end -->` of README.md and docs/. The tables of TABLES are written in
the same way, after `<!-- table: NAME -->`. `make figures` runs it.

FIGURES is the list: a name, the function that draws it, and the files of rows. The same rows give the same bytes; --check
writes nothing, names what differs, and rows that no page and no figure reads, and then ends with 1. docs/site/drawings.py has the pens. No library that draws is needed: none writes
colours for light and dark schemes, and the bytes of theirs change with their version."""
import argparse
import collections
import json
import math
import os
import pathlib
import re
import statistics
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs/site"))
from drawings import Drawing  # noqa: E402

RESULTS, FOLDER = "bench/results", "docs/figures"
PAGES = ["README.md", "docs/performance.md", "docs/numerics.md", "docs/torch-compile.md"]
# implementation: (its name, its colour and the shape of its marks): no two in one figure share both.
NAMES = {"normfuse": ("normfuse", "s0", "circle"), "torch": ("PyTorch", "s1", "square"),
         "torch_compile": ("PyTorch compiled", "s2", "diamond"), "jax": ("JAX", "s3", "up"),
         "onnxruntime": ("ONNX Runtime", "s4", "down"), "cudnn": ("cuDNN", "s3", "up"), "apex1": ("apex", "s4", "down"),
         "apex2": ("apex v2", "s4", "cross"), "gnnhwc": ("gnNHWC", "s5", "plus"), "stable_fast": ("stable-fast", "s5", "cross"),
         "onednn": ("oneDNN", "s5", "plus"), "floor": ("the floor, a copy", "s6", None)}
# Okabe and Ito's colours for all kinds of colour vision, darker for the light card and lighter for the dark one.
COLOURS = {"s0": ("#0067a5", "#64b5f6"), "s1": ("#c14a00", "#ff9a5c"), "s2": ("#8a6500", "#f2c744"),
           "s3": ("#007a58", "#4fd1a5"), "s4": ("#9a3f78", "#f0a3cf"), "s5": ("#4c5260", "#c3cad6"), "s6": ("#5a6270", "#aab2c0")}
STYLE = "<style>\n  .grid { stroke: #d5d9e0; stroke-width: 1; fill: none } .small { font-size: 11px }\n" + "".join(
    f"  .{name} {{ fill: {light}; stroke: {light} }}\n" for name, (light, _) in COLOURS.items()) + \
    "  @media (prefers-color-scheme: dark) {\n    .grid { stroke: #3b414c }\n" + "".join(
    f"    .{name} {{ fill: {dark}; stroke: {dark} }}\n" for name, (_, dark) in COLOURS.items()) + \
    "  }\n  .thin { fill: none; stroke-width: 1.5 } .dashes { stroke-dasharray: 5 4 } .pale { opacity: .45 }\n</style>"
SHAPES = {"circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z", "square": "M-4 -4h8v8h-8z", "diamond": "M0 -5.5L5.5 0L0 5.5L-5.5 0z",
          "up": "M0 -5.5L5 4h-10z", "down": "M0 5.5L5 -4h-10z", "plus": "M-1.5 -5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
          "cross": "M-5 -3.5L-3.5 -5L0 -1.5L3.5 -5L5 -3.5L1.5 0L5 3.5L3.5 5L0 1.5L-3.5 5L-5 3.5L-1.5 0z"}


class Figure(Drawing):
    def __init__(self, width, height, title):
        super().__init__(width, height, title, STYLE)
        self.text(24, 30, title, "head")

    def text(self, x, y, words, kind="", anchor="start"):
        super().text(round(x, 1), round(y, 1), words, kind, anchor)

    def mark(self, x, y, implementation):
        _, colour, shape = NAMES[implementation]
        self.parts.append(f'<path d="{SHAPES[shape]}" transform="translate({x:.1f} {y:.1f})" class="{colour}"/>')

    def path(self, points, kind):
        self.parts.append(f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" class="{kind}"/>')

    def bar(self, x, y, width, height, kind):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" rx="2" class="{kind}"/>')

    def legend(self, x, y, implementations):
        for implementation in implementations:
            name, colour, shape = NAMES[implementation]
            if shape:
                self.mark(x + 8, y - 4, implementation)
            else:
                self.path([(x, y - 4), (x + 18, y - 4)], f"{colour} thin dashes")
            self.text(x + 22, y, name, "small")
            x += 40 + 6.6 * len(name)


class Panel:
    """A rectangle of a figure with a scale in each direction; a scale is (lowest, highest, is it logarithmic)."""

    def __init__(self, figure, box, x, y=(0, 1, False)):
        self.figure, self.box, self.scales = figure, box, (x, y)

    def at(self, value, axis):
        low, high, logarithmic = self.scales[axis]
        low, high, value = (math.log(max(v, 1e-300)) if logarithmic else v for v in (low, high, value))
        left, top, width, height = self.box
        share = min(max((value - low) / (high - low), 0), 1)
        return left + share * width if axis == 0 else top + height - share * height

    def point(self, x, y):
        return self.at(x, 0), self.at(y, 1)

    def ticks(self, axis, values, words=str, heavy=None):
        left, top, width, height = self.box
        for value in values:
            at = self.at(value, axis)
            ends = [(at, top), (at, top + height)] if axis == 0 else [(left, at), (left + width, at)]
            self.figure.path(ends, "line" if value == heavy else "grid")
            if axis == 0:
                self.figure.text(at, top + height + 16, words(value), "dim", "middle")
            else:
                self.figure.text(left - 6, at + 4, words(value), "dim", "end")

    def title(self, words):
        self.figure.text(self.box[0], self.box[1] - 8, words, "small")


# ---- rows -----------------------------------------------------------------------------------------------------------


def find(name):
    path = ROOT / RESULTS / (name if name.endswith(".json") else name + ".jsonl")
    if not path.exists():
        raise SystemExit(f"plot.py: {RESULTS} lacks {path.name}")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def short(problem):
    """A problem line without what is said beside the figure or usual."""
    words = [word for word in problem.split() if word not in ("device=cuda", "dir=bwd", "groups=32")]
    return " ".join(word if word.startswith("per=") else word.split("=")[-1] for word in words)


def of_floor(paths):
    """{problem: {direction: {implementation: time over floor}}}, in the order of the rows. Rows of a file without
    floors of ours, which was measured on another day, are divided by normfuse's floor of the problem."""
    rows = [row for path in paths for row in read(path) if "median_us" in row]
    floors = {row["problem"]: row["floor_us"] for row in rows if "floor_us" in row}
    table = collections.defaultdict(lambda: collections.defaultdict(lambda: collections.defaultdict(list)))
    for row in rows:
        ratio = row.get("ratio") or row["median_us"] / floors[row["problem"]]
        table[short(row["problem"])][row["dir"]][row.get("impl", "normfuse")].append(ratio)
    return {problem: {direction: {name: statistics.median(each) for name, each in names.items()}
                      for direction, names in directions.items()} for problem, directions in table.items()}


def geomean(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


# ---- figures --------------------------------------------------------------------------------------------------------

DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def peers(title, *paths):
    """A line a problem: where each implementation stands over the floor."""
    table = of_floor(paths)
    present = [name for name in NAMES if any(name in names for each in table.values() for names in each.values())]
    highest = max(value for each in table.values() for names in each.values() for value in names.values())
    figure = Figure(900, 100 + 20 * len(table), title)
    figure.legend(24, 52, present)
    ticks = [2**k for k in range(math.ceil(math.log2(highest)) + 1)]
    for k, (direction, words) in enumerate(DIRECTIONS.items()):
        panel = Panel(figure, (300 + 300 * k, 78, 274, 20 * len(table)), (0.8, ticks[-1], True))
        panel.title(words + ", times the floor")
        panel.ticks(0, ticks, heavy=1)
        for row, (problem, directions) in enumerate(table.items()):
            y = 88 + 20 * row
            if k == 0:
                figure.text(24, y + 4, problem, "small")
            names = directions.get(direction, {})
            if names:
                figure.path([(panel.at(value, 0), y) for value in (min(names.values()), max(names.values()))], "grid")
            for name in reversed(present):  # normfuse in front
                if name in names:
                    figure.mark(panel.at(names[name], 0), y, name)
    return figure


def floor(title, cpu, gpu, gpu_peers):
    """Geometric means of the figures above. Peers count where they have every problem; else the best of them does."""
    groups = []
    for paths, words in (((cpu,), "two cores of a CPU"), ((gpu, gpu_peers), "one H200")):
        table = of_floor(paths)
        for direction, direction_words in DIRECTIONS.items():
            each = [names[direction] for names in table.values() if direction in names]
            whole = [name for name in NAMES if all(name in names for names in each)]
            bars = [(NAMES[name][0], NAMES[name][1], geomean(names[name] for names in each)) for name in whole]
            if whole == ["normfuse"]:
                best = geomean(min(v for n, v in names.items() if n != "normfuse") for names in each)
                bars.append(("the best other of each", "s1", best))
            groups.append((f"{words}, {direction_words}, {len(each)} problems", bars))
    figure, y, left = Figure(760, 0, title), 60, 220
    unit = 440 / max(value for _, bars in groups for _, _, value in bars)
    for words, bars in groups:
        figure.text(24, y, words, "small")
        top = y + 4
        for name, colour, value in bars:
            figure.text(left - 10, y + 20, name, "dim", "end")
            figure.bar(left, y + 8, unit * value, 16, colour)
            figure.text(left + unit * value + 8, y + 21, f"{value:.2f}", "small")
            y += 20
        figure.path([(left + unit, top), (left + unit, y + 8)], "line dashes")
        y += 28
    figure.text(left + unit, y, "dashes: a copy", "dim", "middle")
    figure.size = (760, y + 16)
    return figure


MODELS = {"vae-decode-1024-nhwc": "Stable Diffusion VAE, decode 1024 x 1024, f16 channels-last", "vae-decode-1024-nchw": "the same, channels-first",
          "vae-decode-2048": "the same decoder, 2048 x 2048, f16 channels-last", "flux-decode-1024": "FLUX's VAE, decode 1024 x 1024, bf16 channels-last",
          "hunyuan-video-decode": "HunyuanVideo's VAE, decode of one tile, 17 x 256 x 256, f16",
          "wan-decode-480": "Wan 2.1's VAE, decode of 17 frames of 480 x 832, bf16", "wan-decode-480-ndhwc": "the same, channels-last",
          "resnet50-gn-train": "ResNet-50 with group norm, training step", "resnet50-bn-train": "ResNet-50 with batch norm, training step",
          "unet": "Stable Diffusion 1.5 UNet, inference", "sdxl-unet": "SDXL's UNet, 1024 x 1024, inference", "mask-rcnn-train": "Mask R-CNN with group norm, training step",
          "nnunet-train": "nnU-Net's residual encoder (M), training step", "nnunet-train-ndhwc": "the same, channels-last",
          "conv-tasnet-train": "Conv-TasNet, training step", "convnext-train": "ConvNeXt-T, training step",
          "resnet50-gn": "ResNet-50 with group norm, inference", "resnet50-gn-nhwc": "the same, channels-last",
          "unet-train": "UNet, training step", "unet-train-graph": "the same in a CUDA graph",
          "resnet50-sync-train": "ResNet-50 with synchronized batch norm over two GPUs, training step"}
VARIANTS = {"stock": ("stock", "s1"), "normfuse": ("converted", "s0"), "stock_compile": ("stock, compiled", "s1 pale"),
            "normfuse_compile": ("converted, compiled", "s0 pale")}


def models(title, path):
    """A group a model, a bar a variant, as long as its part of the longest in the group."""
    table = collections.defaultdict(dict)
    for row in read(path):
        if "ms" in row and "failed" not in row:
            table[row["model"]].setdefault(row["variant"], row["ms"])
    figure, y, left, full = Figure(760, 0, title), 58, 170, 480
    for model in (name for name in MODELS if name in table):
        figure.text(24, y, MODELS[model], "small")
        for variant, (words, kind) in VARIANTS.items():
            if variant in table[model]:
                ms = table[model][variant]
                width = full * ms / max(table[model].values())
                figure.text(left - 10, y + 20, words, "dim", "end")
                figure.bar(left, y + 8, width, 16, kind)
                figure.text(left + width + 8, y + 21, f"{ms:.{1 if ms < 1000 else 0}f} ms", "small")
                y += 20
        y += 28
    figure.size = (760, y)
    return figure


def bytes_of(row):
    return math.prod(map(int, row["shape"].split("x"))) * {"f64": 8, "f32": 4}.get(row["dtype"], 2)


def in_bytes(value):
    return next(f"{value >> shift} {unit}iB" for shift, unit in ((30, "G"), (20, "M"), (10, "K")) if value >> shift)


def sizes(title, path):
    """Time over the bytes of x, a panel for each kind of problem; the floor is a line of its own."""
    panels = collections.defaultdict(lambda: collections.defaultdict(list))
    rows = [row for row in read(path) if "median_us" in row]
    for row in rows:
        kind = f"{short(row['problem'].replace(' ' + row['shape'], ''))}, {DIRECTIONS[row['dir']]}"
        panels[kind][row.get("impl", "normfuse")].append((bytes_of(row), row["median_us"]))
        if row.get("impl", "normfuse") == "normfuse":
            panels[kind]["floor"].append((bytes_of(row), row["floor_us"]))
    present = [name for name in NAMES if any(name in each for each in panels.values())]
    times = [us for each in panels.values() for points in each.values() for _, us in points]
    reach = [10**k for k in range(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))) + 1)]
    spread = [min(map(bytes_of, rows)), max(map(bytes_of, rows))]
    figure = Figure(900, 90 + 300 * math.ceil(len(panels) / 2), title)
    figure.legend(24, 52, present)
    for k, (kind, lines) in enumerate(panels.items()):
        panel = Panel(figure, (70 + 430 * (k % 2), 92 + 300 * (k // 2), 360, 230), (*spread, True),
                      (reach[0], reach[-1], True))
        panel.title(kind)
        panel.ticks(0, [4**j << 10 for j in range(1, 11) if spread[0] <= 4**j << 10 <= spread[1]][::2], in_bytes)
        panel.ticks(1, reach, lambda us: f"{us / 1e6:g} s" if us >= 1e6 else f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us")
        for name in reversed(present):
            points = [panel.point(*point) for point in sorted(lines.get(name, []))]
            if points:
                _, colour, shape = NAMES[name]
                figure.path(points, f"{colour} thin" + (" dashes" if not shape else ""))
                for point in points if shape else []:
                    figure.mark(*point, name)
    return figure


def errors(title, path):
    rows = read(path)
    figure = Figure(900, 400, title)
    figure.legend(24, 52, [name for name in NAMES if any(row["impl"] == name for row in rows)])
    figure.text(450, 388, "mean of x over its sigma; JAX is flax's layer with its default, the fast variance", "dim", "middle")
    values = [row[key] for row in rows for key in ("y_error", "dx_error") if row[key] not in (None, "nan")]
    reach = [10.0**k for k in range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)]
    means = sorted({row["mean_over_sigma"] for row in rows})
    for k, (key, words) in enumerate((("y_error", "forward: largest error of y, whose sigma is 1"), ("dx_error", "backward: largest error of dx, for a dy of sigma 1"))):
        # 0 has a place of its own, a decade before 1.
        panel = Panel(figure, (70 + 430 * k, 92, 360, 250), (0.1, means[-1], True), (reach[0], reach[-1], True))
        panel.title(words)
        panel.ticks(0, [mean or 0.1 for mean in means], lambda mean: "0" if mean < 1 else f"{mean:,.0f}"
                    if mean < 1e4 else f"{mean:.0e}".replace("e+0", "e"))
        panel.ticks(1, reach[::2] if len(reach) > 8 else reach,
                    lambda error: f"{error:.0e}".replace("e-0", "e-").replace("e+0", "e"))
        for name in reversed(NAMES):
            pairs = [(row["mean_over_sigma"] or 0.1, row[key]) for row in rows
                     if row["impl"] == name and row[key] is not None]
            points = [panel.point(*pair) for pair in pairs if pair[1] != "nan"]
            if points:
                figure.path(points, NAMES[name][1] + " thin")
                for point in points:
                    figure.mark(*point, name)
            for mean, _ in [pair for pair in pairs if pair[1] == "nan"][:1]:
                figure.text(panel.at(means[-1], 0), panel.box[1] + 52, f"NaN from {mean:g}", "dim", "end")
                figure.mark(panel.at(means[-1], 0) - 108, panel.box[1] + 48, name)
    return figure


def drawn(*paths):
    """{(lowest, highest bytes): {direction: (summary line, ratios)}}, the largest tensors first. A draw's rows are those
    right before its summary line; one of the same sizes in a later path replaces one of an earlier path."""
    found, ratios = collections.defaultdict(dict), collections.defaultdict(list)
    for row in (row for path in paths for row in read(path)):
        if "summary" in row:
            found[row["min_bytes"], row["max_bytes"]][row["dir"]] = (row, ratios.pop(row["dir"])[-row["problems"]:])
        else:
            ratios[row["dir"]].append(row["ratio"])
    return dict(sorted(found.items(), reverse=True))


def draws(title, *paths):
    """Histograms of time over floor, a row of panels a draw."""
    found = drawn(*paths)
    step = 2 ** 0.25
    highest = max(value for directions in found.values() for _, values in directions.values() for value in values)
    edges = [step**k for k in range(-2, math.ceil(math.log(highest, step)) + 1)]
    figure = Figure(900, 76 + 230 * len(found), title)
    for k, (spread, directions) in enumerate(found.items()):
        figure.text(24, 56 + 230 * k, f"tensors of {in_bytes(spread[0])} to {in_bytes(spread[1])}", "dim")
        for j, (direction, words) in enumerate(DIRECTIONS.items()):
            summary, values = directions[direction]
            counts = [sum(low <= value < low * step for value in values) for low in edges]
            panel = Panel(figure, (60 + 430 * j, 88 + 230 * k, 380, 150), (edges[0], edges[-1] * step, True),
                          (0, max(counts) * 1.1, False))
            panel.title(f"{words}, {len(values)} problems: geometric mean {summary['geomean']:.2f}, worst {summary['worst']:.1f}")
            every = max(1, math.ceil(max(counts) / 4))
            panel.ticks(1, range(0, max(counts) + 1, every))
            for low, count in zip(edges, counts):
                left, right, top = panel.at(low, 0), panel.at(low * step, 0), panel.at(count, 1)
                if count:
                    figure.bar(left + 1, top, right - left - 2, panel.at(0, 1) - top, "s0")
            panel.ticks(0, [2**e for e in range(math.ceil(math.log2(edges[-1])) + 1) if 2**e <= edges[-1] * step],
                        heavy=1)
    figure.text(480, figure.size[1] - 8, "time over the floor; 1 is a copy", "dim", "middle")
    return figure


FIGURES = {
    "floor": (floor, "Time over a copy of the tensors, geometric mean", ["2026-11-21-epyc-zen4-peers", "2026-11-30-h200-specialized-bars", "2026-11-21-h200-peers"]),
    "models-gpu": (models, "Whole models on one H200, before and after nft.convert(model)", ["2026-11-30-h200-models"]),
    "models-cpu": (models, "Whole models on two cores of an EPYC, before and after nft.convert(model)", ["2026-11-22-epyc-models"]),
    "peers-cpu": (peers, "Two cores of a CPU (EPYC, Zen 4): every problem beside the peers", ["2026-11-21-epyc-zen4-peers"]),
    "peers-gpu": (peers, "One H200: every problem beside the best other", ["2026-11-30-h200-specialized-bars", "2026-11-21-h200-peers"]),
    "sizes-cpu": (sizes, "Time over size on a CPU, cold", ["2026-11-23-epyc-cpu-sizes"]),
    "sizes-gpu": (sizes, "Time over size on a GPU, cold", ["2026-11-24-h200-cuda-sizes"]),
    "errors": (errors, "Group norm of f32 values with a large mean: the largest error", ["2026-11-23-epyc-errors"]),
    "draw-cpu": (draws, "Problems that nothing was tuned on: two cores of a Xeon, AVX-512", ["2026-11-23-xeon-avx512-random-150-all"]),
    "draw-gpu": (draws, "Problems that nothing was tuned on: one H200", ["2026-11-30-h200-specialized-drawn"]),
}


# ---- tables ---------------------------------------------------------------------------------------------------------


def markdown(head, lines):
    head, *lines = ["| " + " | ".join(cells) + " |" for cells in [head, *lines]]
    return [head, "|---" * head.count(" | ") + "|---|", *lines]


def figures3(us):
    """Three digits that count, and no exponent."""
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"


def best_other(names):
    return min((value, NAMES[name][0]) for name, value in names.items() if name != "normfuse")


def against_the_best(table):
    """A sentence: on how many problems, in both directions, normfuse takes less time over the floor than the best other."""
    gains = [best_other(names)[0] / names["normfuse"] for each in table.values() for names in each.values()]
    return ["", *textwrap.wrap(
        f"normfuse is faster than the best other on {sum(gain > 1 for gain in gains)} of {len(gains)}, "
        f"{geomean(gains):.2f} times in geometric mean, {min(gains):.2f} times at least.", 100)]


def peers_cpu(path):
    """Times the floor."""
    table = of_floor([path])
    lines = []
    for problem in SHOWN:
        cells = [f"`{problem}`"]
        for direction in DIRECTIONS:
            names = table[short(problem)].get(direction)
            cells += [f"{names['normfuse']:.2f}", "{:.2f} {}".format(*best_other(names))] if names else ["", ""]
        lines.append(cells)
    return markdown(["problem", "forward", "best other", "backward", "best other"], lines) + against_the_best(table)


def peers_gpu(path, others):
    """Microseconds, in brackets times the floor; the best other in microseconds of its own day."""
    rows, theirs = collections.defaultdict(dict), collections.defaultdict(dict)
    for row in read(path):
        rows[short(row["problem"])][row["dir"]] = row
    for row in read(others):
        theirs[short(row["problem"]), row["dir"]][NAMES[row["impl"]][0]] = row["median_us"]
    lines = []
    for problem, directions in rows.items():
        cells = [problem]
        for direction in DIRECTIONS:
            us, row = min(theirs[problem, direction].values()), directions[direction]
            cells += [f"{figures3(row['median_us'])} ({row['ratio']:.2f})", figures3(us)]
        lines.append(cells)
    return markdown(["problem", "forward", "best other", "backward", "best other"], lines) + \
        against_the_best(of_floor([path, others]))


def models_gpu(path):
    table = collections.defaultdict(dict)
    for row in read(path):
        if "ms" in row:
            table[row["model"]].setdefault(row["variant"], row)
    lines, shown = [], [variant for variant in VARIANTS if any(variant in each for each in table.values())]
    for model in (name for name in MODELS if name in table):
        each = table[model]
        times = [f"{each[variant]['ms']:.{1 if each[variant]['ms'] >= 20 else 2}f}" if variant in each else ""
                 for variant in shown]
        peaks = [figures3(each[variant]["peak_gib"]) for variant in ("stock", "normfuse")]
        lines.append([MODELS[model] + TERMS.get(model, ""), *times, *peaks])
    heads = dict(zip(VARIANTS, ("stock, ms", "converted, ms", "stock compiled", "converted compiled")))
    return markdown(["model", *(heads[variant] for variant in shown), "stock, GiB", "converted, GiB"], lines)


def draws_gpu(*paths):
    lines = []
    for (low, high), directions in drawn(*paths).items():
        for direction, words in DIRECTIONS.items():
            row, ratios = directions[direction]
            lines.append([f"{in_bytes(low)} to {in_bytes(high)}, {words}", str(len(ratios)),
                          *(f"{row[key]:.2f}" for key in ("geomean", "p90", "worst"))])
    return markdown(["drawn problems", "number", "geometric mean", "nine of ten, at most", "worst"], lines)


def host(*paths):
    """Parts of stock's host time, a line a case of bench/overhead.py, a column a file."""
    each = [{row["case"]: row["ratio"] for row in json.loads(path.read_text())["rows"]} for path in paths]
    return markdown(["", "CPU", "one H200"], [
        [case.replace("install: ", "under `nft.install()`: "), *(f"{ratios[case]:.2f}" for ratios in each)]
        for case in each[0]])


def times_of(rows):
    """{model: {variant: ms}}, the first row of each."""
    table = collections.defaultdict(dict)
    for row in rows:
        if "ms" in row:
            table[row["model"]].setdefault(row["variant"], row["ms"])
    return table


def four_ways(table, names, empty):
    """The models of a table of times, as they come, compiled, converted, and both."""
    ways = ("stock", "stock_compile", "normfuse", "normfuse_compile")
    return markdown(["milliseconds", "stock", "compiled", "converted", "converted, compiled"], [
        [MODELS[name] + TERMS.get(name, ""),
         *(f"{table[name][way]:.{1 if table[name][way] >= 20 else 2}f}" if way in table[name] else empty
           for way in ways)] for name in names])


def headline(path):
    return four_ways(times_of(read(path)), ["vae-decode-1024-nhwc", "unet", "resnet50-bn-train"], "not measured")


def compiled(path):
    """Models that were measured compiled."""
    table = times_of(read(path))
    return four_ways(table, [name for name in MODELS if "stock_compile" in table.get(name, ())], "")


# Problems, of the 62 of the rows, in the table of performance.md; the figure has them all.
SHOWN = ["group_norm 128x256x28x28 groups=32", "group_norm 128x256x28x28 groups=32 layout=nhwc", "group_norm 128x256x28x28 groups=32 dtype=f16",
         "group_norm 128x256x28x28 groups=32 dtype=bf16 layout=nhwc", "group_norm 1x512x128x128 groups=32 act=silu",
         "group_norm 1x512x128x128 groups=32 layout=nhwc act=silu", "group_norm 1x128x512x512 groups=32",
         "group_norm 1x128x512x512 groups=32 dtype=bf16 layout=nhwc act=silu", "instance_norm 2x32x64x96x96 act=leaky_relu",
         "batch_norm 32x512x28x28", "batch_norm 32x512x28x28 layout=nhwc", "batch_norm 64x1024x14x14", "batch_norm 32x10x200x200 layout=nhwc",
         "batch_norm 32x512x28x28 act=relu mode=eval", "affine 64x256x64x64 per=sample", "affine 64x256x64x64 layout=nhwc per=sample"]
TERMS = {"resnet50-gn-train": ", batch 256, bf16 autocast, channels-last", "resnet50-bn-train": ", batch 256, bf16 autocast, channels-last",
         "unet-train": ", batch 4, bf16 autocast, channels-last", "resnet50-sync-train": ", 128 a GPU, bf16 autocast, channels-last",
         "unet": ", batch 2, f16, channels-last, in a CUDA graph", "sdxl-unet": ", batch 2, f16, channels-last, in a CUDA graph",
         "nnunet-train": ", 2 x 128 x 128 x 128, f16 autocast", "nnunet-train-ndhwc": ", 2 x 128 x 128 x 128, f16 autocast",
         "conv-tasnet-train": ", 8 x 32000, f32", "convnext-train": ", batch 256, bf16 autocast, channels-last", "mask-rcnn-train": ", batch 4, f16 autocast"}
TABLES = {
    "peers-cpu": (peers_cpu, ["2026-11-21-epyc-zen4-peers"]),
    "peers-gpu": (peers_gpu, ["2026-11-30-h200-specialized-bars", "2026-11-21-h200-peers"]),
    "models-gpu": (models_gpu, ["2026-11-30-h200-models"]),
    "models-h100": (models_gpu, ["2026-11-25-h100-models"]),
    "draws-gpu": (draws_gpu, ["2026-11-30-h200-specialized-drawn"]),
    "host": (host, ["2026-11-25-epyc-overhead.json", "2026-11-22-h200-overhead.json"]),
    "headline": (headline, ["2026-11-30-h200-models"]),
    "compiled": (compiled, ["2026-11-30-h200-models"]),
}


def made():
    """{path from ROOT: text} of all figures whose rows are there, and of the pages that show them."""
    files = {}
    for name, (function, title, rows) in FIGURES.items():
        files[f"{FOLDER}/{name}.svg"] = function(title, *map(find, rows)).svg()
    for page in PAGES:
        def images(match):
            shown = [name for name in match[1].split() if f"{FOLDER}/{name}.svg" in files]
            lines = [f"![{FIGURES[name][1]}]({os.path.relpath(f'{FOLDER}/{name}.svg', os.path.dirname(page) or '.')})\n"
                     for name in shown]
            return f"<!-- figures: {match[1]} -->\n" + "\n".join(lines) + "<!-- end -->"

        def table(match):
            function, rows = TABLES[match[1]]
            return f"<!-- table: {match[1]} -->\n" + "\n".join(function(*map(find, rows))) + "\n<!-- end -->"

        text = re.sub(r"<!-- figures: ([\w -]+?) -->\n.*?<!-- end -->", images, (ROOT / page).read_text(), flags=re.S)
        files[page] = re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", table, text, flags=re.S)
    return files


def unread_rows():
    """Files of rows that no page and neither FIGURES nor TABLES name."""
    named = {find(name).name for *_, rows in [*FIGURES.values(), *TABLES.values()] for name in rows}
    pages = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
    return [path for path in sorted((ROOT / RESULTS).iterdir()) if path.name not in named and path.stem not in pages]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where a file is not what the rows give")
    arguments = parser.parse_args()
    files = made()
    wrong = [path for path, text in files.items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text]
    left = [path for path in (ROOT / FOLDER).glob("*.svg") if f"{FOLDER}/{path.name}" not in files]
    for path in [*wrong, *left]:
        print(path)
    if arguments.check:
        unread = unread_rows()
        for path in unread:
            print(f"{path.relative_to(ROOT)}: no page and no figure reads it")
        return 1 if wrong or left or unread else 0
    (ROOT / FOLDER).mkdir(exist_ok=True)
    for path in wrong:
        (ROOT / path).write_text(files[path])
    for path in left:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

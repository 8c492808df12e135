# SPDX-License-Identifier: MIT
"""plot.py ROWS.jsonl... -o CHART.png - bars of the time over the copy floor, one group a problem, one bar an
implementation. Needs matplotlib (build/venv has it)."""
import argparse
import collections
import json
import re
import statistics
import sys

import matplotlib
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (the backend is chosen before)

ORDER = ["normfuse", "torch", "torch_compile", "jax", "onnxruntime"]
COLORS = ["#1b6ca8", "#e07a3f", "#f2b880", "#6a9f58", "#8f7bb0"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--only", default="", metavar="REGEX", help="problems whose line matches")
    parser.add_argument("--highest", type=float, default=8.0, help="longer bars are cut and labelled; default: 8")
    args = parser.parse_args()
    table = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in args.rows:
        with open(path) as file:
            for line in file:
                row = json.loads(line)
                if "ratio" in row and re.search(args.only, row["problem"]):
                    table[row["problem"]][row.get("impl", "normfuse")].append(row["ratio"])
    if not table:
        raise SystemExit("plot.py: no row matches")
    present = [name for name in ORDER if any(name in ratios for ratios in table.values())]
    height = 0.8 / len(present)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(table) * max(2, len(present))), layout="constrained")
    for k, name in enumerate(present):
        for row, ratios in enumerate(table.values()):
            if name not in ratios:
                continue
            ratio = statistics.median(ratios[name])
            y = row + (k - (len(present) - 1) / 2) * height
            axes.barh(y, min(ratio, args.highest), height, color=COLORS[ORDER.index(name)],
                      label=name if name not in axes.get_legend_handles_labels()[1] else None)
            axes.text(min(ratio, args.highest) + 0.03, y, f"{ratio:.2f}", va="center", fontsize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(table)), list(table), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, args.highest * 1.08)
    axes.set_xlabel("time over the copy floor (1 = a copy of the tensor)")
    axes.legend(fontsize=7, loc="lower right")
    figure.savefig(args.output, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())

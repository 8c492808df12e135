#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""drawings.py [FOLDER] - makes the drawings of docs/reads-once.md in docs/drawings/; bench/plot.py draws its figures with
the same pens. Each has a background of its own and colours for light and dark schemes, so that it is read in both, also
where the page's scheme is not the system's."""
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "drawings"
STYLE = """<style>
  .card { fill: #f7f8fa } text { fill: #20242c; font: 13px system-ui, sans-serif } .dim { fill: #5a6270; font-size: 12px }
  .head { font-weight: 600; font-size: 14px } .a { fill: #7fb2f0 } .b { fill: #f3bd6b } .c { fill: #9bd3a5 } .none { fill: #dfe3ea }
  .line { stroke: #5a6270; stroke-width: 1.5; fill: none } .tip { fill: #5a6270 } .cell { stroke: #f7f8fa; stroke-width: 2 }
  .on { fill: #14181f; font-size: 12px }
  @media (prefers-color-scheme: dark) {
    .card { fill: #23272f } text { fill: #e7eaf0 } .dim { fill: #aab2c0 } .a { fill: #6aa3ea } .b { fill: #e0a850 }
    .c { fill: #7fbf8b } .none { fill: #444b57 } .line { stroke: #aab2c0 } .tip { fill: #aab2c0 } .cell { stroke: #23272f }
    .on { fill: #14181f }
  }
</style>"""


class Drawing:
    def __init__(self, width, height, title, style=""):
        self.size, self.title, self.style, self.parts = (width, height), title, STYLE + style, []

    def text(self, x, y, words, kind="", anchor="start"):
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{words}</text>')

    def box(self, x, y, width, height, kind, words="", radius=4):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" class="{kind} cell"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 4, words, "on" if kind in "abc" else "", "middle")

    def arrow(self, x0, y0, x1, y1):
        self.parts.append(f'<path d="M{x0} {y0} L{x1} {y1}" class="line" marker-end="url(#tip)"/>')

    def svg(self):
        width, height = self.size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
            f"<title>{self.title}</title>\n{self.style}\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" class="tip"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" rx="8" class="card"/>\n' + "\n".join(self.parts) + "\n</svg>\n")


def layouts():
    """One sample of 6 channels and 4 positions, three groups of two channels, in both orders."""
    channels, positions, cell = 6, 4, 26
    d = Drawing(720, 250, "Memory of one sample, channels first and channels last")
    kinds = ["a", "a", "none", "none", "none", "none"]
    left = 40
    d.text(left, 32, "Channels first (NCHW): rows", "head")
    for channel in range(channels):
        for position in range(positions):
            d.box(left + (channel * positions + position) * cell, 44, cell, 34, kinds[channel], str(channel), 0)
    d.text(left, 100, "The 4 positions of a channel are adjacent. The norm group of channels 0 and 1 is one stretch.", "dim")
    d.text(left, 148, "Channels last (NHWC): columns", "head")
    for position in range(positions):
        for channel in range(channels):
            d.box(left + (position * channels + channel) * cell, 160, cell, 34, kinds[channel], str(channel), 0)
    d.text(left, 216, "The 6 channels of a position are adjacent. The same norm group is two channels of every position.", "dim")
    d.text(left, 236, "Each cell is one value, in the order of memory; the number is its channel.", "dim")
    return d


def passes():
    d = Drawing(720, 312, "A group norm that reads x once, and one that reads it twice")
    unit, left = 150, 40

    def timeline(y, title, pieces, note):
        d.text(left, y, title, "head")
        x = left
        for kind, words, width in pieces:
            d.box(x, y + 12, width, 36, kind, words)
            x += width
        d.text(left, y + 68, note, "dim")

    timeline(34, "On chip: 1 + 1", [("a", "read x", unit), ("c", "join", 50), ("b", "write y", unit)],
             "x stays in registers, shared memory or a cache until the statistics are known.")
    timeline(130, "Two-pass: 2 + 1", [("a", "read x", unit), ("c", "join", 50), ("a", "read x again", unit), ("b", "write y", unit)],
             "The norm group is larger than the chip. The second pass begins with what was read last.")
    timeline(226, "A copy, the floor: 1 + 1", [("a", "read x", unit), ("b", "write y", unit)],
             "Reads and writes overlap in time where they can; a bar is bytes, not seconds.")
    return d


def exchange():
    """Four blocks that share a norm group."""
    d = Drawing(720, 330, "Four thread blocks exchange the sums of their norm group")
    names = ["block 0", "block 1", "block 2", "block 3"]
    width, gap, left = 140, 30, 36
    for k, name in enumerate(names):
        x = left + k * (width + gap)
        d.box(x, 30, width, 40, "a", f"{name}: read x", 4)
        d.arrow(x + width / 2, 72, x + width / 2, 96)
        d.box(x, 98, width, 34, "c", "n, mean, M2", 4)
        d.arrow(x + width / 2, 134, x + width / 2, 162)
        d.arrow(x + width / 2, 206, x + width / 2, 232)
        d.box(x, 234, width, 40, "b", "join all, write y", 4)
    d.box(left, 164, 4 * width + 3 * gap, 40, "none", "", 4)
    d.text(360, 189, "barrier: every block waits until all four triples are written", "", "middle")
    d.text(left, 300, "A cluster exchanges through mailboxes in distributed shared memory. The grid exchanges through scratch", "dim")
    d.text(left, 317, "memory, and counts blocks in synchronization memory. Each block holds its part of x on chip meanwhile.", "dim")
    return d


def make(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for function in (layouts, passes, exchange):
        (folder / f"{function.__name__}.svg").write_text(function().svg())


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)

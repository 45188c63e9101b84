#!/usr/bin/env python3
"""Draws the picture of the README from committed measurements, with Python's standard library only.

usage: tools/plot_measurements.py [ROOT]      writes docs/measurements/moe_layers.svg from
moe_layers.json beside it

A time is one number or the two ends of a range, in milliseconds, and names its source.
tools/docs.py fails when the picture is not the output of this program.
"""

import json
import sys
from html import escape

from sources import root_from_arguments

DATA = "docs/measurements/moe_layers.json"
PICTURE = "docs/measurements/moe_layers.svg"

# Pixels.
WIDTH, MARGIN, HEAD, FOOT_LINE = 820, 20, 66, 17
PANEL_WIDTH, PANEL_GAP, PANEL_HEAD, BAR_PITCH, BAR = 380, 20, 26, 23, 15
NAME_WIDTH, VALUE_WIDTH = 140, 106
SCALE_WIDTH = PANEL_WIDTH - NAME_WIDTH - VALUE_WIDTH

STYLE = """
    text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f }
    .title { font-size: 16px; font-weight: 600 } .panel { font-weight: 600 } .note { fill: #57606a; font-size: 11px }
    .page { fill: #ffffff } .bar { fill: #afb8c1 } .ours { fill: #0969da } .axis { stroke: #8c959f }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .note { fill: #9198a1 }
      .page { fill: #0d1117 } .bar { fill: #59636e } .ours { fill: #4493f8 } .axis { stroke: #656c76 }
    }
"""


def text(x, y, words, kind="", anchor="start"):
    return f'  <text x="{x}" y="{y}" text-anchor="{anchor}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(words)}</text>'


def label(ms):
    return " to ".join(f"{value:g}" for value in ms)


def bar(x, y, time, scale):
    """Draws the row of one program: its name, a bar to the slower end of its range, and the figure."""
    length = round(max(time["ms"]) * scale, 1)
    kind = "ours" if time["software"] == "Moebius" else "bar"
    return [text(x + NAME_WIDTH - 8, y + 12, time["software"], anchor="end"),
            f'  <rect x="{x + NAME_WIDTH}" y="{y}" width="{length}" height="{BAR}" class="{kind}"/>',
            text(round(x + NAME_WIDTH + length + 6, 1), y + 12, label(time["ms"]))]


def panel_height(layer):
    return PANEL_HEAD + BAR_PITCH * len(layer["times"]) + PANEL_GAP


def panel(x, y, layer):
    """Draws one layer. Each layer has a scale of its own, which begins at 0."""
    scale = SCALE_WIDTH / max(max(time["ms"]) for time in layer["times"])
    lines = [text(x + NAME_WIDTH, y + 14, layer["name"], "panel")]
    for row, time in enumerate(layer["times"]):
        lines += bar(x, y + PANEL_HEAD + BAR_PITCH * row, time, scale)
    axis, end = x + NAME_WIDTH, y + PANEL_HEAD + BAR_PITCH * len(layer["times"]) - BAR_PITCH + BAR
    return lines + [f'  <line x1="{axis}" y1="{y + PANEL_HEAD - 4}" x2="{axis}" y2="{end + 4}" class="axis"/>']


def check(data):
    for layer in data["layers"]:
        for time in layer["times"]:
            if time["source"] not in data["sources"] or not 1 <= len(time["ms"]) <= 2 or min(time["ms"]) <= 0:
                raise ValueError(f"{DATA}: {layer['name']}, {time['software']}: expected a source of the page's and one or "
                                 f"two times above 0; got {time}")


def notes(data):
    return ["A bar ends at the slower end of its range. Each panel has its own scale, from 0."] + \
        [f"{source['text']} ({source['command']})" for source in data["sources"].values()]


def picture(data):
    """Returns the SVG, a function of the measurements only."""
    check(data)
    layers, lines, y = data["layers"], [], HEAD
    for first in range(0, len(layers), 2):
        pair = layers[first:first + 2]
        for column, layer in enumerate(pair):
            lines += panel(MARGIN + column * (PANEL_WIDTH + PANEL_GAP), y, layer)
        y += max(map(panel_height, pair))
    for row, note in enumerate(notes(data)):
        lines.append(text(MARGIN, y + 10 + FOOT_LINE * row, note, "note"))
    height = y + 10 + FOOT_LINE * len(notes(data))
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"  <title>{escape(data['title'])}</title>", f"  <desc>{escape(data['subtitle'])}</desc>", f"  <style>{STYLE}  </style>",
            f'  <rect width="{WIDTH}" height="{height}" class="page"/>',
            text(MARGIN, 28, data["title"], "title"), text(MARGIN, 48, data["subtitle"])]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def drawn(root):
    return picture(json.loads((root / DATA).read_text(encoding="utf-8")))


def stale(root):
    """Yields a complaint when the picture is not that of the measurements."""
    if not (root / DATA).is_file():
        return
    file = root / PICTURE
    if not file.is_file() or file.read_text(encoding="utf-8") != drawn(root):
        yield f"{PICTURE} is not the picture of {DATA}; python3 tools/plot_measurements.py draws it anew"


def main():
    root = root_from_arguments()
    (root / PICTURE).write_text(drawn(root), encoding="utf-8")
    print(f"plot_measurements: wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

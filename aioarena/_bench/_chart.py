"""The results of `bench compare` as a picture: a panel of bars for each scenario, logarithmic, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from xml.sax.saxutils import escape

from aioarena._bench._result import Result, Section
from aioarena._bench._text import show_machine, show_seconds

_WIDTH = 860
_LEFT = 190
_RIGHT = 130
_BAR = 13
_GAP = 10
_PANEL = 46
# Grey that can be read on white and on black, and bars that can be told from both; one colour for each number of readers.
_TEXT = "#808080"
_COLOURS = ("#4c8fd6", "#d9822b", "#3da35d", "#b066c9")


def _rate(value: float) -> str:
    return f"{value:,.0f}/s"


def _share(value: float) -> str:
    return f"{value:.2%}"


# What the bars of a scenario are.
_MEANING: dict[str, tuple[str, Callable[[float], str]]] = {
    "small": ("median latency of a small message sent every 2 ms", show_seconds),
    "burst": ("small messages a second, more is better", _rate),
    "tensor": ("one tensor of 200 MiB, until all readers have touched it", show_seconds),
    "tensors": ("eight tensors of 16 MiB, until all readers have touched them", show_seconds),
    "objects": ("1 MB of Python objects, until all readers have them", show_seconds),
    "idle": ("CPU share of the busiest reader while nothing is sent", _share),
    "stall": ("worst delay of the sender's event loop in 200 MiB sends", show_seconds),
}


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{_TEXT}"{weight}>{escape(text)}</text>'


def length(value: float, least: float, most: float) -> float:
    """Share of the full width that a bar has: powers of ten are equally far apart, and the least is still seen."""
    low, high = math.floor(math.log10(least)), math.log10(most)
    return 1.0 if high <= low else max(0.01, (math.log10(value) - low) / (high - low))


def _panel(section: Section, colours: dict[int, str], top: float) -> tuple[list[str], float]:
    """A scenario's bars, from a height on; and where they end."""
    meaning, show = _MEANING[section.records[0]["scenario"]]
    # Something that took no time at all has no logarithm.
    shown = {id(record): max(record["value"], 1e-6) for record in section.records if "value" in record}
    parts = [_text(10, top + 14, meaning, size=13, bold=True)]
    y = top + 24
    least, most = min(shown.values(), default=1.0), max(shown.values(), default=1.0)
    for name in dict.fromkeys(record["alternative"] for record in section.records):
        records: list[dict[str, Any]] = [record for record in section.records if record["alternative"] == name]
        parts.append(_text(_LEFT - 8, y + len(records) * _BAR / 2 + 4, name, anchor="end"))
        for record in records:
            end = float(_LEFT)
            if id(record) in shown:
                width = length(shown[id(record)], least, most) * (_WIDTH - _LEFT - _RIGHT)
                place = f'x="{_LEFT}" y="{y:.1f}" width="{width:.1f}" height="{_BAR - 2}"'
                parts.append(f'<rect {place} fill="{colours[record["readers"]]}"/>')
                end += width
            label = show(record["value"]) if "value" in record else record["failure"]
            parts.append(_text(end + 5, y + _BAR - 4, label, size=10))
            y += _BAR
        y += _GAP / 2
    return parts, y + _GAP


def draw(result: Result) -> str:
    """An SVG document of all scenarios that were measured."""
    counts = sorted({record["readers"] for section in result.sections for record in section.records})
    colours = {readers: _COLOURS[index % len(_COLOURS)] for index, readers in enumerate(counts)}
    parts = [_text(10, 20, show_machine(), size=10)]
    x = 10.0
    for readers, colour in colours.items():
        label = f"{readers} reader{'s' if readers > 1 else ''}"
        parts += [f'<rect x="{x}" y="30" width="11" height="11" fill="{colour}"/>', _text(x + 16, 40, label)]
        x += 90
    parts.append(_text(_WIDTH - 10, 40, "logarithmic; less is better unless it says otherwise", anchor="end"))
    y = float(_PANEL + 6)
    for section in result.sections:
        panel, y = _panel(section, colours, y)
        parts += panel
    size = f'width="{_WIDTH}" height="{y:.0f}" viewBox="0 0 {_WIDTH} {y:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif">'
    return "\n".join([head, *parts, "</svg>", ""])

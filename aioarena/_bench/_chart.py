"""The results of `bench compare` as a picture: a panel of bars for each scenario, logarithmic, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    return f"{value:.2g}%" if (value := value * 100) < 1 else f"{value:.1f}%"


# What the bars of a scenario are.
_MEANING: dict[str, tuple[str, Callable[[float], str]]] = {
    "small": ("median latency", show_seconds),
    "burst": ("messages a second, more is better", _rate),
    "tensor": ("median, until all readers have touched it", show_seconds),
    "tensors": ("median, until all readers have touched them", show_seconds),
    "objects": ("median, until all readers have them", show_seconds),
    "idle": ("CPU share of the busiest reader", _share),
    "stall": ("worst delay of the sender's loop, median of the runs", show_seconds),
}


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{_TEXT}"{weight}>{escape(text)}</text>'


class Scale:
    """Where values are on a logarithmic axis that begins at the power of ten below the least of them.

    Attributes:
        powers: Exponents of ten that are on it.
    """

    def __init__(self, values: Sequence[float]) -> None:
        low = math.log10(min(values, default=1.0))
        self._low = math.floor(low) if low % 1 else math.floor(low) - 1  # a bar of no length would be none
        self._high = math.log10(max(values, default=1.0))
        self.powers = range(self._low, math.floor(self._high) + 1)

    def __call__(self, value: float) -> float:
        """Share of the axis up to a value."""
        return (math.log10(value) - self._low) / (self._high - self._low)


def _panel(section: Section, colours: dict[int, str], top: float) -> tuple[list[str], float]:
    """A scenario's bars, from a height on; and where they end."""
    meaning, show = _MEANING[section.records[0]["scenario"]]
    # Something that took no time at all has no logarithm.
    shown = {id(record): max(record["value"], 1e-6) for record in section.records if "value" in record}
    parts = [_text(10, top + 14, f"{section.title.splitlines()[0]}: {meaning}", size=13, bold=True)]
    y = top + 24
    scale, full = Scale(list(shown.values())), _WIDTH - _LEFT - _RIGHT
    for name in dict.fromkeys(record["alternative"] for record in section.records):
        records: list[dict[str, Any]] = [record for record in section.records if record["alternative"] == name]
        parts.append(_text(_LEFT - 8, y + len(records) * _BAR / 2 + 4, name, anchor="end"))
        for record in records:
            end = float(_LEFT)
            if id(record) in shown:
                width = scale(shown[id(record)]) * full
                place = f'x="{_LEFT}" y="{y:.1f}" width="{width:.1f}" height="{_BAR - 2}"'
                parts.append(f'<rect {place} fill="{colours[record["readers"]]}"/>')
                end += width
            label = show(record["value"]) if "value" in record else record["failure"]
            parts.append(_text(end + 5, y + _BAR - 4, label, size=10))
            y += _BAR
        y += _GAP / 2
    for power in scale.powers:
        x = _LEFT + scale(10.0**power) * full
        place = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top + 22:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {place} stroke="{_TEXT}" stroke-opacity="0.5" stroke-width="1"/>')
        parts.append(_text(x, y + 9, show(10.0**power), anchor="middle", size=8))
    return parts, y + 2 * _GAP


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

"""What a benchmark gives back: rows of plain numbers, and how to show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aioarena._bench._text import machine, show_machine, table


@dataclass(slots=True)
class Section:
    """One table.

    Attributes:
        title: What is measured, in a sentence or two.
        header: Of its columns.
        rows: Cells as text.
        records: The same, unrounded, for JSON: seconds and bytes.
        notes: Below the table.
    """

    title: str
    header: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """A benchmark's tables.

    Attributes:
        name: Of the benchmark.
        sections: In the order of reading.
        settings: What it was run with.
    """

    name: str
    sections: list[Section] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        parts = [show_machine()]
        for section in self.sections:
            parts += ["", section.title, "", table(section.header, section.rows), *section.notes]
        return "\n".join(parts)

    def json(self) -> str:
        sections = [{"title": section.title, "records": section.records} for section in self.sections]
        document = {"bench": self.name, "machine": machine(), "settings": self.settings, "sections": sections}
        return json.dumps(document, indent=2)

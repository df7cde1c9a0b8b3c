"""What `bench compare` measures, and the messages that it sends.

Every message is a step, as in `bench small`, and may carry a load. Its number, and the moment when it was sent, stand in
fields that a step has anyway. So a reader can tell what is missing, repeated or out of order, and how long it took.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from aioarena._bench import small
from aioarena._bench._ends import Message
from aioarena._bench._text import show_size

_PAGE = 4096
# Words between two that tell one message from another: one in 50 pages, and only words that a digest samples.
_STAMP = 50 * _PAGE // 4
_COLUMNS = 4096
# Bytes between samples where event loops are watched: a digest of all pages would hold them up itself.
_GLANCE = 256 * _STAMP


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing to measure.

    Attributes:
        name: For the command line.
        about: What is sent; the size of a tensor and the number of objects are filled in.
        way: How it is sent: ``paced`` by a clock, in a ``burst``, ``answered`` before the next is sent, or ``idle``.
        tensors: Number of tensors in a message.
        rows: Rows of each, of 16 KiB.
        objects: Python objects in a message.
        first: Messages that are sent before any other, on a channel that was never used.
        count: Messages of a round.
        seconds: How long to idle.
        stalls: Whether to watch the event loops; readers then touch nothing.
    """

    name: str
    about: str
    way: str
    tensors: int = 0
    rows: int = 0
    objects: int = 0
    first: int = 0
    count: int = 0
    seconds: float = 0.0
    stalls: bool = False

    @property
    def title(self) -> str:
        return self.about.format(size=show_size(self.rows * _COLUMNS * 4), objects=self.objects)

    @property
    def stride(self) -> int:
        """Bytes between those that a digest samples."""
        return _GLANCE if self.stalls else _PAGE

    @property
    def nbytes(self) -> int:
        """The most a message has."""
        return self.tensors * self.rows * _COLUMNS * 4 + self.objects * 200 + _PAGE * (16 if self.tensors else 1)

    def quick(self) -> Scenario:
        return replace(
            self,
            rows=self.rows // 8,
            objects=self.objects // 10,
            first=min(self.first, 2),
            count={"paced": 50, "burst": 1500, "answered": 2, "idle": 1}[self.way],
            seconds=min(self.seconds, 0.5),
        )


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("small", "A dict of 197 bytes every 2 ms", "paced", count=400),
        Scenario("burst", "Bursts of the same dict, until the last reader has the last", "burst", count=6000),
        Scenario("tensor", "One tensor of {size}", "answered", tensors=1, rows=12800, first=10, count=3),
        Scenario("tensors", "Eight tensors of {size} in one message", "answered", tensors=8, rows=1024, first=10, count=3),
        Scenario(
            "objects",
            "{objects:,} dicts of Python objects, pickled about 100 bytes each",
            "answered",
            objects=10000,
            first=10,
            count=10,
        ),
        Scenario("idle", "Nothing is sent", "idle", count=1, seconds=5.0),
        Scenario("stall", "Event loops while {size} are sent", "answered", tensors=1, rows=12800, count=2, stalls=True),
    )
}


# Messages ---------------------------------------------------------------------------------------------------------


def _rows(rows: int, start: int, number: int) -> torch.Tensor:
    """Rows of a tensor, from word ``start`` on, as it is in message ``number``. Pages differ where digests look."""
    words = torch.arange(start, start + rows * _COLUMNS, dtype=torch.int32)
    words += torch.div(words, _PAGE // 4, rounding_mode="floor") * 37
    words[-start % _STAMP :: _STAMP] = number
    return words.view(rows, _COLUMNS)


def _objects(count: int, number: int) -> list[dict[str, Any]]:
    return [
        {"id": f"cmpl-{index:08x}-{number:x}", "tokens": [index, number, index * 7, 15496 + index, 995, 770, 318, 11] * 3}
        for index in range(count)
    ]


class Source:
    """Makes the messages of a scenario; tensors are written once and changed from one message to the next."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._tensors = [_rows(scenario.rows, 0, index) for index in range(scenario.tensors)]

    def message(self, number: int) -> Message:
        message = small.message()
        message["step"] = number
        for index, tensor in enumerate(self._tensors):
            tensor.view(-1)[::_STAMP] = number + index
        if self._tensors:
            message["tensors"] = list(self._tensors)
        if self._scenario.objects:
            message["objects"] = _objects(self._scenario.objects, number)
        return message


def digest(message: Message, stride: int = _PAGE) -> int:
    """A checksum of what is sampled: of tensors dtype, shape and one byte of each page, which touches all of it."""
    value = int(message["step"]) * 31 + int(sum(message["token_ids"]))
    for tensor in message.get("tensors", ()):
        total = int(tensor.view(-1).view(torch.uint8)[::stride].sum())
        value = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)} {total}".encode(), value & 0xFFFFFFFF)
    for each in message.get("objects", ())[::64]:
        value += int(each["tokens"][-1]) + int(each["tokens"][0]) + len(each["id"])
    return value


def difference(message: Message, scenario: Scenario, number: int) -> str | None:
    """What of a message is not as it was sent, compared byte by byte; None if all of it is."""
    expected = {**small.message(), "step": number}
    if {**message, "temperature": 0, "tensors": 0, "objects": 0} != {
        **expected,
        "temperature": 0,
        "tensors": 0,
        "objects": 0,
    }:
        return "the step"
    if message.get("objects", []) != _objects(scenario.objects, number):
        return "the objects"
    tensors = message.get("tensors", [])
    if len(tensors) != scenario.tensors:
        return "the number of tensors"
    for index, tensor in enumerate(tensors):
        if tensor.dtype != torch.int32 or tensor.shape != (scenario.rows, _COLUMNS):
            return f"dtype or shape of tensor {index}"
        for row in range(0, scenario.rows, 1024):  # in parts, since all readers do this at once
            part = tensor[row : row + 1024]
            if not torch.equal(part, _rows(len(part), row * _COLUMNS, number + index)):
                return f"tensor {index} after row {row}"
    return None

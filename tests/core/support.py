"""Cores over one bytearray, as the tests here use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aioarena._core.layout import HEAD, Layout
from aioarena._core.receiver import ReceiverCore
from aioarena._core.ring import SMALL, RingReader, RingWriter
from aioarena._core.sender import PlacedMessage, SenderCore
from aioarena._core.words import fence, order

NONCE = bytes(range(16))


def make_control(layout: Layout) -> memoryview:
    """A formatted control segment."""
    control = memoryview(bytearray(layout.control_bytes))
    layout.format(control[: layout.ring_offset].cast("Q"), NONCE)
    return control


class Recording:
    """Words that remember what was loaded and stored, and may act on it: a memoryview with eyes.

    Attributes:
        loads: Indices of the words loaded.
        stores: (index, value) of the words stored.
        before_load: Called with the index before a load: what another process does just then.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.loads: list[int] = []
        self.stores: list[tuple[int, int]] = []
        self.before_load: Callable[[int], None] = lambda index: None

    def __getitem__(self, index: int) -> int:
        self.before_load(index)
        self.loads.append(index)
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.stores.append((index, value))
        self._words[index] = value


class Ring:
    """A ring with one writer and some readers, all of which are there from the start.

    Args:
        ring_bytes: Its capacity.
        readers: How many.
        start: Cursor at which it begins; everything before it counts as received.
        number: Messages published before.
    """

    def __init__(self, ring_bytes: int = 64, *, readers: int = 1, start: int = 0, number: int = 0) -> None:
        self.layout = layout = Layout(readers=readers, ring_bytes=ring_bytes, slots=0, slot_bytes=0)
        control = make_control(layout)
        self.words = control.cast("Q")
        self.data = control[layout.ring_offset :]
        self.writer = self.make_writer(self.words)
        self.writer.head = self.words[HEAD] = start
        self.writer.published = number
        self.readers = []
        for rank in range(readers):
            self.writer.add_reader(rank)
            reader = self.make_reader(rank, self.words)
            reader.start(start, number)
            self.readers.append(reader)

    def make_writer(self, words: Any) -> RingWriter:
        return RingWriter(words, self.data, self.layout, order, fence)

    def make_reader(self, rank: int, words: Any) -> RingReader:
        return RingReader(words, self.data, self.layout, rank, order, fence)

    @property
    def reader(self) -> RingReader:
        return self.readers[0]

    def put(self, body: bytes) -> bool:
        return self.writer.append(SMALL, body)

    def look(self, rank: int = 0) -> bytes | None:
        """The body of the next record of a reader, which does not move."""
        found = self.readers[rank].look()
        if found is None:
            return None
        kind, start, nbytes = found
        assert kind == SMALL
        return bytes(self.data[start : start + nbytes])

    def get(self, rank: int = 0) -> bytes | None:
        """The body of the next record of a reader, which moves on."""
        body = self.look(rank)
        if body is not None:
            self.readers[rank].advance()
        return body

    def get_all(self, rank: int = 0) -> list[bytes]:
        return list(iter(lambda: self.get(rank), None))


class Channel:
    """SenderCore and ReceiverCores over one bytearray, with an arena that is another.

    Args:
        joined: Whether all readers are seated from the start, rank r with incarnation r + 1.
        min_bytes, frame_budget: Of the sender.
        readers, ring_bytes, slots, slot_bytes: Sizes.
    """

    def __init__(
        self,
        *,
        readers: int = 1,
        ring_bytes: int = 1024,
        slots: int = 4,
        slot_bytes: int = 64,
        min_bytes: int = 32,
        frame_budget: int = 1 << 20,
        joined: bool = True,
    ) -> None:
        self.layout = layout = Layout(readers=readers, ring_bytes=ring_bytes, slots=slots, slot_bytes=slot_bytes)
        self.control = make_control(layout)
        self.words = self.control.cast("Q")
        self.arena = memoryview(bytearray(layout.arena_bytes))
        self.sender = SenderCore(self.control, layout, min_bytes=min_bytes, frame_budget=frame_budget)
        self.readers: list[ReceiverCore] = []
        if joined:
            self.readers = [self.join(rank, rank + 1) for rank in range(readers)]

    @property
    def reader(self) -> ReceiverCore:
        return self.readers[0]

    def make_reader(self, rank: int, incarnation: int) -> ReceiverCore:
        return ReceiverCore(self.control, self.layout, rank, incarnation)

    def join(self, rank: int, incarnation: int) -> ReceiverCore:
        """A reader that was seated and has started."""
        self.sender.join(rank, incarnation)
        reader = self.make_reader(rank, incarnation)
        assert reader.seated
        reader.start()
        return reader

    def publish(self, sizes: list[int], fill: int = 0) -> PlacedMessage:
        """Place and publish a message whose inline buffers have ``fill`` in every byte."""
        message = self.sender.place(sizes)
        assert self.sender.shortage(message) is None
        self.publish_placed(message, fill)
        return message

    def publish_placed(self, message: PlacedMessage, fill: int = 0) -> None:
        inline = []
        if message.frames:
            self.sender.number_frames(message)
        if message.pack is None:
            inline = [
                (offset, bytes([fill]) * placement.nbytes)
                for placement, offset in zip(message.placements, message.offsets, strict=True)
                if offset >= 0
            ]
        self.sender.publish(message, inline)

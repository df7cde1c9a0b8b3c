"""From the parts of a message (inline copies, spans, frames) to the object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import zmq

from aioarena._copying import ON_LOOP_BYTES, CopyPool, join
from aioarena._core.receiver import IncomingMessage, unpack
from aioarena._core.record import ARENA, FRAME, Placement, decode_table
from aioarena._devices import private_portions
from aioarena._platform.memory import address_of
from aioarena._platform.wire import ReceiverWire
from aioarena._release import SpanLedger
from aioarena.exceptions import InternalError


class Assembler:
    """Collects the buffers of messages for one receiver.

    Args:
        wire: Where frames arrive.
        ledger: The arena, None without one.
        private: Whether to give private copies instead of views of the arena.
        pool: Threads for large private copies.
        viewed: Called for every view of the arena that is given out.

    Attributes:
        arena_nbytes: Bytes received through the arena.
        frame_nbytes: Bytes received as frames.
        copy_seconds: Time that private copies took.
    """

    def __init__(
        self,
        wire: ReceiverWire,
        ledger: SpanLedger | None,
        private: bool,
        pool: CopyPool,
        viewed: Callable[[], None],
    ) -> None:
        self._wire = wire
        self._ledger = ledger
        self._private = private
        self._pool = pool
        self._viewed = viewed
        self.arena_nbytes = 0
        self.frame_nbytes = 0
        self.copy_seconds = 0.0

    def complete(self, taken: IncomingMessage) -> bool:
        """Whether all frames of a message are here."""
        return not taken.frame_number or self._wire.frames(taken.frame_number) is not None

    def ready(self, taken: IncomingMessage) -> bool:
        """Whether :meth:`buffers` can be called without waiting for anything."""
        return self.complete(taken) and not self.wants_copies(taken)

    def buffers(self, taken: IncomingMessage, copies: dict[int, memoryview] | None) -> list[memoryview]:
        """The pickled bytes and all buffers of a complete message. Its frames are used up.

        Args:
            taken: The message.
            copies: What :meth:`private_copies` made of its spans.

        Raises:
            InternalError: The parts do not fit together.
        """
        number = taken.frame_number
        frames = iter(self._wire.frames(number) or ()) if number else iter(())
        copies = copies or {}
        try:
            message = taken
            if taken.packed:
                message = unpack(self._buffer(taken.placements[0], copies.get(-1), frames))
            return [
                self._buffer(placement, copies.get(index), frames) if inline is None else memoryview(inline)
                for index, (placement, inline) in enumerate(zip(message.placements, message.inline, strict=True))
            ]
        finally:
            if number:
                self._wire.drop_frames(number)

    def _buffer(self, placement: Placement, copy: memoryview | None, frames: Iterator[zmq.Frame]) -> memoryview:
        if placement.where == FRAME:
            frame = next(frames, None)
            if frame is None or len(frame) != placement.nbytes:
                raise InternalError(f"a frame of {placement.nbytes} bytes is missing from its message")
            self.frame_nbytes += placement.nbytes
            return _aligned(frame.buffer)
        if placement.where != ARENA or self._ledger is None:
            raise InternalError(f"a buffer has the placement {placement.where}, which this channel does not have")
        self.arena_nbytes += placement.nbytes
        view = self._ledger.view(placement.slot, placement.generation, placement.start, placement.nbytes)
        if self._private:
            # The view ends here, and with it our hold on the span.
            return copy if copy is not None else self._copied(view)
        self._viewed()
        return view

    def _copied(self, view: memoryview) -> memoryview:
        began = time.perf_counter()
        copy = memoryview(bytearray(view))
        self.copy_seconds += time.perf_counter() - began
        return copy

    def wants_copies(self, taken: IncomingMessage) -> bool:
        """Whether :meth:`private_copies` has something to do."""
        return self._private and bool(self._large_spans(taken))

    def _large_spans(self, taken: IncomingMessage, above: int = ON_LOOP_BYTES) -> list[tuple[int, Placement]]:
        """Spans of a complete message that are too large to copy on the loop, by buffer index; -1 is the pack."""
        placements = dict(enumerate(taken.placements))
        if taken.packed:
            pack = placements.pop(0)
            if pack.where == ARENA and self._ledger is not None:
                body = self._ledger.mapping.view[pack.start : pack.start + pack.nbytes]
            else:
                body = (self._wire.frames(taken.frame_number) or [])[0].buffer
            placements = {-1: pack, **dict(enumerate(decode_table(body)[0]))}
        return [(i, place) for i, place in placements.items() if place.where == ARENA and place.nbytes > above]

    async def private_copies(self, taken: IncomingMessage) -> dict[int, memoryview]:
        """Private copies of the large spans, made in threads. Cancelling leaves the message where it is."""
        assert self._ledger is not None
        began = time.perf_counter()
        copies, portions = private_portions(self._ledger.mapping, self._large_spans(taken))
        job = self._pool.start(portions)
        await join([asyncio.wrap_future(job.done)], job.abort)
        self.copy_seconds += time.perf_counter() - began
        return copies


def _aligned(buffer: memoryview) -> memoryview:
    """The bytes of a frame where any dtype of up to 8 bytes may look at them."""
    if len(buffer) == 0 or address_of(buffer) % 8 == 0:
        return buffer
    return memoryview(bytearray(buffer))

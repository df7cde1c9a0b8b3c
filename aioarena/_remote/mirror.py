"""A channel that is fed from another one: what arrives is written where its readers will look at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aioarena._asyncio import Endpoint, State
from aioarena._codec import ChunksSource, Plan, Source
from aioarena._core.record import ARENA, INLINE, inline_offsets
from aioarena._core.sender import PlacedMessage
from aioarena._platform.memory import require_memory
from aioarena.exceptions import ArenaError, NoSpaceError
from aioarena.sender import Sender

# Bytes outside the arena from which on it is looked first whether there is that much memory.
_LARGE = 64 << 20


class ArrivingMessage:
    """A message whose buffers are being filled.

    Attributes:
        placed: Where they travel on the mirror.
        destinations: The memory of each.
        inline: Those that go through the ring, by index.
        frames: Those that travel as frames, in order.
    """

    __slots__ = ("destinations", "frames", "inline", "placed")

    def __init__(self, placed: PlacedMessage) -> None:
        self.placed = placed
        self.destinations: Sequence[memoryview] = []
        self.inline: dict[int, bytearray] = {}
        self.frames: list[np.ndarray[Any, Any]] = []


class Mirror(Sender):
    """The sender of a channel whose messages come from a :class:`~aioarena.Relay`, not from calls."""

    _changed_members: Callable[[], None] | None = None
    _orphaned: Callable[[], ArenaError] | None = None

    def attend(self, changed_members: Callable[[], None] | None) -> None:
        """Name what is called after every change of membership."""
        self._changed_members = changed_members

    def _membership_changed(self) -> None:
        super()._membership_changed()
        if self._changed_members is not None:
            self._changed_members()

    def orphan(self, orphaned: Callable[[], ArenaError] | None) -> None:
        """Nothing more will come. What is to be forwarded waits no longer for readers that have never attached, but raises
        this."""
        self._orphaned = orphaned
        self._notify()

    def _check(self) -> None:
        super()._check()
        if self._orphaned is not None and self._core.awaited:
            raise self._orphaned()

    @property
    def small_limit(self) -> int:
        """Bytes up to which a message is given to :meth:`forward` as bytes."""
        return self._core.small_limit

    @property
    def fault(self) -> ArenaError | None:
        """What keeps this channel from going on, None if nothing does."""
        return self._fault(self) if self._fault is not None else None

    def allocate(self, sizes: list[int]) -> ArrivingMessage:
        """Make room for a message.

        Raises:
            NoSpaceError: There is not enough memory.
        """
        message = ArrivingMessage(self._place(sizes))
        try:
            self._lay_out(message)
        except BaseException:
            self.drop(message)
            raise
        return message

    def _place(self, sizes: list[int]) -> PlacedMessage:
        placed = self._core.place(sizes)
        end = max((span.slot + span.slots for span in placed.spans.values()), default=0) * self._core.arena.slot_bytes
        if self._arena is not None and self._arena.needs_reserve(end):
            try:
                self._arena.reserve(end)
            except NoSpaceError as error:
                self._core.unplace(placed)
                self._filler.limit_to_reserved(error)
                return self._core.place(sizes)
        return placed

    def _lay_out(self, message: ArrivingMessage) -> None:
        placed = message.placed
        if placed.frame_nbytes >= _LARGE:
            require_memory(placed.frame_nbytes, on_shm=False)
        frames = {index: np.empty(self._frame_nbytes(placed, index), np.uint8) for index in placed.frames}
        message.frames = list(frames.values())
        pack: memoryview | None = None
        if placed.pack is not None:
            pack = frames[-1].data if -1 in frames else self._span(placed.pack.start, placed.pack.nbytes)
            table = placed.table
            pack[: len(table)] = table
        destinations = []
        for index, (placement, offset) in enumerate(zip(placed.placements, inline_offsets(placed.placements), strict=True)):
            if placement.where == ARENA:
                destinations.append(self._span(placement.start, placement.nbytes))
            elif placement.where != INLINE:
                destinations.append(frames[index].data)
            elif pack is not None:
                destinations.append(pack[offset : offset + placement.nbytes])
            else:
                message.inline[index] = bytearray(placement.nbytes)
                destinations.append(memoryview(message.inline[index]))
        message.destinations = destinations

    @staticmethod
    def _frame_nbytes(placed: PlacedMessage, index: int) -> int:
        return placed.body_nbytes if index < 0 else placed.placements[index].nbytes

    def _span(self, start: int, nbytes: int) -> memoryview:
        assert self._arena is not None
        return self._arena.mapping.view[start : start + nbytes]

    def drop(self, message: ArrivingMessage) -> None:
        """Give back the room of a message that will not be complete."""
        message.destinations = ()
        self._core.unplace(message.placed)

    def forward_now(self, pickled: bytes) -> bool:
        """Publish a small message; False if that has to wait."""
        core = self._core
        if self._fault is not None or core.awaited or not core.send_small(pickled):
            return False
        if sleepers := core.sleepers():
            self._wake(sleepers)
        return True

    async def forward(self, message: bytes | ArrivingMessage) -> None:
        """Publish a complete message, when all readers have attached and there is room.

        Raises:
            ReaderLostError, ClosedError: As :meth:`Sender.send`.
            ArenaError: It was orphaned before all have attached.
        """
        if isinstance(message, bytes):
            whole = self.allocate([len(message)])
            whole.destinations[0][:] = message
            message = whole
        placed = message.placed
        message.destinations = ()
        try:
            self._check()
            if self._core.awaited:
                await self._until_ready()
            await self._until_room(placed)
            self._check()
            sources: list[Source] = [
                ChunksSource([bytes(message.inline[index])] if index in message.inline else [])
                for index in range(len(placed.placements))
            ]
            self._publish(Plan(sources, 0), placed, message.frames)
        finally:
            self._core.unplace(placed)

    async def abort(self, reason: str) -> None:
        """End the channel without a good end: its readers get :class:`SenderLostError` once they have received all."""
        if self._state is not State.OPEN:
            await self.aclose()
            return
        self._state = State.CLOSING
        self._fault = Endpoint._closed
        self._notify_all()
        self._core.ring.abort()
        if self._serving is not None:
            self._serving.fail(reason)
        if self._wire is not None:
            self._wire.fail(reason)
        self._finish()

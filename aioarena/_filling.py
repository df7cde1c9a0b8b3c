"""Copying a placed message to where it travels, in threads when it is large; and saying so when the arena is short."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from aioarena._codec import MemorySource, Plan
from aioarena._copying import ON_LOOP_BYTES, CopyPool, Portion, join
from aioarena._core.arena import Arena, Loan
from aioarena._core.record import INLINE
from aioarena._core.sender import LARGER_THAN_ARENA, PlacedMessage, SenderCore
from aioarena._lending import Lender
from aioarena._platform.memory import Segment
from aioarena._warming import Prefault, trim
from aioarena.exceptions import NoSpaceError

logger = logging.getLogger("aioarena")

# Seconds between two log lines about the same kind of fallback.
_FALLBACK_LOG_INTERVAL = 60.0

Frames = list["np.ndarray[Any, Any]"]


class Filler:
    """Fills spans and frames of placed messages.

    Attributes:
        seconds: Time spent copying.
        prefault: Populates the arena in the background, if that was asked for.
        lender: Lends spans to the sender's own code; None without an arena.
    """

    def __init__(self, name: str, core: SenderCore, arena: Segment | None) -> None:
        self._name = name
        self._core = core
        self._arena = arena
        self._pool = CopyPool("copy")
        self.seconds = 0.0
        self._trimming = asyncio.Lock()
        self.prefault: Prefault | None = None
        self.lender = Lender(core.arena, arena.mapping) if arena is not None else None

    def start_prefault(self, nbytes: int) -> None:
        """Have the start of the arena populated in the background."""
        if self._arena is not None and nbytes:
            self.prefault = Prefault(f"channel {self._name!r}", self._arena.mapping, nbytes, self._arena)

    async def trim(self, check: Callable[[], None]) -> int:
        """Give memory that nobody uses back; how many bytes."""
        if self._arena is None:
            return 0
        async with self._trimming:  # the word that says so is one for all
            check()
            return await trim(self._core, self._arena, self._pool, check)

    def close(self) -> None:
        if self.prefault is not None:
            self.prefault.close()
        if self.lender is not None:
            self.lender.close()
        self._pool.close()

    # Memory behind the spans, which a shm arena takes as it grows ---------------------------------------------------

    def place(self, plan: Plan) -> PlacedMessage:
        """Place a message; what lies in lent memory is sent from there."""
        return self._core.place(plan.sizes, self.lender.lent(plan.sources) if self.lender is not None else None)

    async def lend(self, nbytes: int) -> memoryview | None:
        """Memory of the arena for the caller to fill, or None if there is none now."""
        lender, arena = self.lender, self._arena
        loan = lender.take(nbytes) if lender is not None else None
        if loan is None or lender is None or arena is None:
            return None
        try:
            end = (loan.slot + loan.slots) * self._core.arena.slot_bytes
            if arena.needs_reserve(end):
                await join([asyncio.wrap_future(self._pool.executor.submit(arena.reserve, end))])
        except NoSpaceError as error:
            self._core.arena.drop(loan)
            self.limit_to_reserved(error)
            return None
        except BaseException:
            self._core.arena.drop(loan)
            raise
        if lender.closed:  # meanwhile
            self._core.arena.drop(loan)
            return None
        return lender.lend(loan)

    def hold(self, plan: Plan) -> list[Loan]:
        """Note that a message with lent memory is being sent; its loans."""
        return self.lender.hold(plan.sources) if self.lender is not None else []

    async def back(self, plan: Plan, placed: PlacedMessage) -> PlacedMessage:
        """Make sure that memory is behind the spans; without it, the message placed anew in what there is."""
        end = self._end_of_spans(placed)
        if self._arena is None or not self._arena.needs_reserve(end):
            return placed
        try:
            await join([asyncio.wrap_future(self._pool.executor.submit(self._arena.reserve, end))])
        except NoSpaceError as error:
            return self._shrink(plan, placed, error)
        return placed

    def back_now(self, plan: Plan, placed: PlacedMessage) -> PlacedMessage:
        """The same, in the calling thread."""
        end = self._end_of_spans(placed)
        if self._arena is not None and self._arena.needs_reserve(end):
            try:
                self._arena.reserve(end)
            except NoSpaceError as error:
                return self._shrink(plan, placed, error)
        return placed

    def _end_of_spans(self, placed: PlacedMessage) -> int:
        return max((span.slot + span.slots for span in placed.spans.values()), default=0) * self._core.arena.slot_bytes

    def _shrink(self, plan: Plan, placed: PlacedMessage, error: NoSpaceError) -> PlacedMessage:
        self._core.unplace(placed)
        self.limit_to_reserved(error)
        return self.place(plan)

    def limit_to_reserved(self, error: NoSpaceError) -> None:
        """Go on with the part of the arena that there is memory for."""
        assert self._arena is not None
        slots = self._arena.reserved // self._core.arena.slot_bytes
        logger.warning(
            "channel %r: %s. Going on with an arena of %d slots; what does not fit travels as frames.",
            self._name,
            error,
            slots,
        )
        self._core.arena.limit_to(slots)

    # Copies ---------------------------------------------------------------------------------------------------------

    async def fill_spans(self, plan: Plan, placed: PlacedMessage) -> None:
        await self._run(
            self._span_portions(plan, placed), sum(span.nbytes for span in placed.spans.values() if span.loan is None)
        )

    async def fill_frames(self, plan: Plan, placed: PlacedMessage) -> Frames:
        frames, portions = self._frame_portions(plan, placed)
        await self._run(portions, placed.frame_nbytes)
        return frames

    def fill_now(self, plan: Plan, placed: PlacedMessage) -> Frames:
        """Fill spans and frames in the calling thread."""
        frames, portions = self._frame_portions(plan, placed)
        started = time.perf_counter()
        for portion in self._span_portions(plan, placed) + portions:
            portion.copy_all()
        self.seconds += time.perf_counter() - started
        return frames

    async def _run(self, portions: list[Portion], nbytes: int) -> None:
        started = time.perf_counter()
        if nbytes <= ON_LOOP_BYTES:
            for portion in portions:
                portion.copy_all()
        else:
            job = self._pool.start(portions)
            await join([asyncio.wrap_future(job.done)], job.abort)
        self.seconds += time.perf_counter() - started

    def _span_portions(self, plan: Plan, placed: PlacedMessage) -> list[Portion]:
        portions: list[Portion] = []
        for index, span in placed.spans.items():
            if span.loan is not None:
                continue  # its bytes are there
            assert self._arena is not None
            destination = self._arena.mapping.address + span.slot * self._core.arena.slot_bytes
            portions += _portions_into(destination, plan, placed, index)
        return portions

    def _frame_portions(self, plan: Plan, placed: PlacedMessage) -> tuple[Frames, list[Portion]]:
        # Memory of their own: libzmq reads frames after send returned, when the caller may have changed his.
        frames: Frames = []
        portions: list[Portion] = []
        for index in placed.frames:
            nbytes = placed.body_nbytes if index < 0 else placed.placements[index].nbytes
            frame = np.empty(nbytes, np.uint8)
            frames.append(frame)
            portions += _portions_into(frame.ctypes.data, plan, placed, index)
        return frames, portions


def _portions_into(destination: int, plan: Plan, placed: PlacedMessage, index: int) -> list[Portion]:
    """What to copy of one buffer, or of the pack (index -1), to an address."""
    if index >= 0:
        return plan.sources[index].portions(destination)
    portions = MemorySource.of(placed.table).portions(destination)
    for source, placement, offset in zip(plan.sources, placed.placements, placed.offsets, strict=True):
        if placement.where == INLINE and placement.nbytes:
            portions += source.portions(destination + offset)
    return portions


class FallbackLog:
    """Says, at most once a minute per reason, that something did not fit into the arena, and who fills it."""

    def __init__(self, name: str, arena: Arena) -> None:
        self._name = name
        self._arena = arena
        self._logged: dict[str, tuple[float, int]] = {}  # reason -> when last, and how many since

    def __call__(self, placed: PlacedMessage, now: float, held: Callable[[], object]) -> None:
        """Note one message with frames.

        Args:
            placed: The message.
            now: Time in seconds.
            held: What says how many spans each rank holds, asked only when a line is due.
        """
        reason = LARGER_THAN_ARENA if LARGER_THAN_ARENA in placed.fallbacks else "arena_full"
        logged, since = self._logged.get(reason, (now - _FALLBACK_LOG_INTERVAL, 0))
        if now - logged < _FALLBACK_LOG_INTERVAL:
            self._logged[reason] = (logged, since + 1)
            return
        self._logged[reason] = (now, 0)
        arena, more = self._arena, f" ({since} more since the last such line)" if since else ""
        if reason == LARGER_THAN_ARENA:
            logger.warning(
                "channel %r: %d bytes do not fit into the arena of %d bytes and were sent as a frame, at the cost of a "
                "copy per reader%s; raise ArenaConfig(slots=...)",
                self._name,
                placed.frame_nbytes,
                arena.slots * arena.slot_bytes,
                more,
            )
        else:
            logger.warning(
                "channel %r: no free span for %d bytes, which were sent as a frame, at the cost of a copy per reader%s; "
                "%d of %d slots are in use, spans held by rank: %s. Readers keep received tensors alive: drop or clone "
                "them, or raise ArenaConfig(slots=...)",
                self._name,
                placed.frame_nbytes,
                more,
                arena.used_slots,
                arena.slots,
                held(),
            )

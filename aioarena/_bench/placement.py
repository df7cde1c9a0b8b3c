"""`bench placement`: from which size on a buffer is better off in the arena, and how large a slot should be.

A buffer that goes INLINE is copied into the ring by the sender and out of it by each reader. One that goes to the ARENA is
copied once, and costs a span: claiming it, naming it in the record, viewing it, giving it back. Where the second costs less
CPU, summed over all processes, is where `ArenaConfig.min_bytes` belongs.

The sender sends a few messages while the readers are stopped, then each reader receives them in its turn, copies every
buffer once to private memory (as a GPU's driver would) and drops it. So nobody waits, nobody is woken, and no two processes
of ours compete. All memory was used before. What is compared takes turns, so that noise from elsewhere meets all alike.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

import aioarena
from aioarena._bench._result import Result, Section
from aioarena._bench._text import Progress, show_micros, show_size
from aioarena._bench._workers import Team, run
from aioarena._types import DEFAULT_MIN_BYTES, DEFAULT_RING_BYTES, DEFAULT_SLOT_BYTES

_SIZES = tuple(1024 << shift for shift in range(13))  # 1 KiB to 4 MiB
_SLOT_SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
_SLOT_BUFFERS = (64 << 10, 300 << 10, 3 << 20)
_CAPACITY = 2 << 30
# Spans that readers retain in the last column; half of the slots where there are fewer than twice as many.
_HELD = 1000
# Messages that a reader finds when its turn comes: an engine is rarely further ahead.
_BATCH = 4
_BATCHES = 150
# The pickled bytes of the message are fewer, every buffer has at least as many: forces buffers into the arena.
_ALWAYS = 1024
_NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """What the command line said.

    Attributes:
        readers: Readers of the channel.
        quick: A few sizes and messages, to see that it works.
    """

    readers: int = 4
    quick: bool = False

    @property
    def batches(self) -> int:
        return 3 if self.quick else _BATCHES


@dataclass(frozen=True, slots=True)
class _Way:
    """One of the channels that are compared.

    Attributes:
        min_bytes: ``_NEVER`` or ``_ALWAYS``.
        slot_bytes: Bytes of a slot.
        held: Spans that the readers retain.
    """

    min_bytes: int
    slot_bytes: int = DEFAULT_SLOT_BYTES
    held: int = 0

    @property
    def inline(self) -> bool:
        return self.min_bytes == _NEVER

    @property
    def arena(self) -> aioarena.ArenaConfig:
        slots = _CAPACITY // self.slot_bytes
        return aioarena.ArenaConfig(slots=slots, slot_bytes=self.slot_bytes, min_bytes=self.min_bytes)

    def ring_bytes(self, nbytes: int) -> int:
        # A record may be an eighth of the ring: the default ring where it can, a larger one for larger buffers.
        return max(DEFAULT_RING_BYTES, 16 * nbytes) if self.inline else DEFAULT_RING_BYTES


@dataclass(frozen=True, slots=True)
class _Cost:
    """CPU seconds for one message: of the sender, and of one reader to receive and drop it, and to copy from it."""

    sender: float
    reader: float
    copy: float

    def total(self, readers: int) -> float:
        return self.sender + readers * (self.reader + self.copy)


_PARTS = ("sender", "reader", "copy")


def _middle(costs: Sequence[_Cost]) -> _Cost:
    return _Cost(*(median(getattr(cost, part) for cost in costs) for part in _PARTS))


# Readers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Order:
    """What a reader is told: receive ``count`` messages from channel ``way``, and keep them or drop them."""

    way: int
    count: int
    nbytes: int
    keep: bool = False


def _read(rank: int, pipe: Connection[Any, Any]) -> None:
    while True:
        run(_receive(pipe.recv(), rank, pipe))


async def _receive(handles: list[aioarena.Handle], rank: int, pipe: Connection[Any, Any]) -> None:
    kept = []
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(aioarena.Receiver(handle, rank)) for handle in handles]
        while (order := pipe.recv()) is not None:
            channel = channels[order.way]
            private = torch.ones(order.nbytes, dtype=torch.uint8)
            receiving = copying = 0.0
            for _ in range(order.count):
                began = time.thread_time()
                step = await channel.recv()
                received = time.thread_time()
                private.copy_(step["x"])
                copied = time.thread_time()
                if order.keep:
                    kept.append(step)
                del step
                copying += copied - received
                receiving += received - began + time.thread_time() - copied
            pipe.send((receiving / order.count, copying / order.count))


# The sender ----------------------------------------------------------------------------------------------------------


class _Comparison:
    """Channels to the same readers, measured in turns."""

    def __init__(self, team: Team, channels: list[aioarena.Sender], nbytes: int) -> None:
        self._team = team
        self._channels = channels
        self._step = {"step": 1, "x": torch.ones(nbytes, dtype=torch.uint8)}
        self._nbytes = nbytes

    async def batch(self, way: int, count: int, *, keep: bool = False) -> _Cost:
        """A few messages to stopped readers, then each reader in its turn."""
        channel, step = self._channels[way], self._step
        began = time.process_time()
        for _ in range(count):
            await channel.send(step)
        sender = (time.process_time() - began) / count
        costs = []
        for worker in self._team.workers:
            worker.tell(_Order(way, count, self._nbytes, keep))
            costs.append(await worker.answer())
        return _Cost(sender, median(cost[0] for cost in costs), median(cost[1] for cost in costs))

    async def warm_up(self, way: int, ring_bytes: int) -> None:
        """Once round the ring."""
        record = self._nbytes + 512
        left = ring_bytes // record
        while left > 0:
            count = min(left, max(_BATCH, ring_bytes // 4 // record), 512)
            await self.batch(way, count)
            left -= count


async def _compare(team: Team, nbytes: int, ways: Sequence[_Way], options: PlacementOptions) -> list[_Cost]:
    """What a message with one buffer costs over each of several channels."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                aioarena.Sender(len(team.workers), name="bench", arena=way.arena, ring_bytes=way.ring_bytes(nbytes))
            )
            for way in ways
        ]
        team.tell([channel.handle for channel in channels])
        for channel in channels:
            await channel.wait_ready()
        comparison = _Comparison(team, channels, nbytes)
        for index, way in enumerate(ways):
            if way.held:
                await comparison.batch(index, way.held, keep=True)
            if way.inline and not options.quick:
                await comparison.warm_up(index, way.ring_bytes(nbytes))
        costs: list[list[_Cost]] = [[] for _ in ways]
        for turn in range(options.batches + 2):
            for index in range(len(ways)):
                cost = await comparison.batch(index, _BATCH)
                if turn >= 2:  # the first ones warm up
                    costs[index].append(cost)
        team.tell(None)
    return [_middle(cost) for cost in costs]


async def _measure_sizes(options: PlacementOptions, team: Team, progress: Progress) -> Section:
    section = Section(
        "One message with one buffer, in the ring and in the arena: CPU us of the sender, of each of "
        f"{options.readers} readers to\nreceive and drop it, and to copy the buffer out once; then the sum of all "
        "processes, for 1 and 4 readers.",
        [
            "buffer",
            *["ring: send", "recv", "copy", "arena: send", "recv", "copy"],
            *["ring, 1", "arena, 1", "ring, 4", "arena, 4"],
        ],
    )
    for nbytes in _SIZES[::6] if options.quick else _SIZES:
        progress.say("which buffers belong in the arena", show_size(nbytes))
        costs = await _compare(team, nbytes, [_Way(_NEVER), _Way(_ALWAYS)], options)
        section.rows.append(
            [show_size(nbytes)]
            + [show_micros(getattr(cost, part)) for cost in costs for part in _PARTS]
            + [show_micros(cost.total(readers)) for readers in (1, 4) for cost in costs]
        )
        record: dict[str, Any] = {"nbytes": nbytes}
        for name, cost in zip(("ring", "arena"), costs, strict=True):
            record |= {f"{name}_{part}": getattr(cost, part) for part in _PARTS}
            record |= {f"{name}_total_{readers}": cost.total(readers) for readers in (1, 4)}
        section.records.append(record)
    section.notes = [_crossing(section.records, readers) for readers in (1, 4)]
    section.notes.append(f"The default min_bytes is {show_size(DEFAULT_MIN_BYTES)}.")
    return section


def _crossing(records: list[dict[str, Any]], readers: int) -> str:
    """The size from which on the arena is cheaper, at it and at all larger ones."""
    cheaper = None
    for record in reversed(records):
        if record[f"arena_total_{readers}"] > record[f"ring_total_{readers}"]:
            break
        cheaper = record["nbytes"]
    where = "at no size measured" if cheaper is None else f"from {show_size(cheaper)} on"
    return f"With {readers} reader{'s' if readers > 1 else ''} the arena costs less CPU {where}."


async def _measure_slots(options: PlacementOptions, team: Team, progress: Progress) -> Section:
    names = [show_size(nbytes) for nbytes in _SLOT_BUFFERS]
    section = Section(
        f"Sizes of a slot, for an arena of {show_size(_CAPACITY)} and {options.readers} readers: CPU us of the sender for "
        "one buffer,\nalso while the readers hold many other spans; how much of its slots a buffer uses; how many fit; and "
        "the size of\nthe table that says who released what.",
        [
            "slot",
            *[f"send {name}" for name in names],
            "held",
            *[f"use {name}" for name in names],
            f"{names[0]} fit",
            "table",
        ],
    )
    slot_sizes = _SLOT_SIZES[::2] if options.quick else _SLOT_SIZES
    ways = [_Way(_ALWAYS, slot_bytes) for slot_bytes in slot_sizes]
    costs = []
    for nbytes in _SLOT_BUFFERS:
        progress.say("how large a slot should be", show_size(nbytes))
        costs.append(await _compare(team, nbytes, ways, options))
    progress.say("how large a slot should be", f"{names[0]}, others held")
    holding = [_Way(_ALWAYS, way.slot_bytes, min(_HELD, way.arena.slots // 2)) for way in ways]
    costs.append(await _compare(team, _SLOT_BUFFERS[0], holding, options))
    for index, way in enumerate(holding):
        slots, slot_bytes = way.arena.slots, way.slot_bytes
        senders = [cost[index].sender for cost in costs]
        shares = [nbytes / (-(-nbytes // slot_bytes) * slot_bytes) for nbytes in _SLOT_BUFFERS]
        fit, table = slots // -(-_SLOT_BUFFERS[0] // slot_bytes), slots * options.readers * 8
        section.rows.append(
            [show_size(slot_bytes), *map(show_micros, senders)]
            + [f"{share:.0%}" for share in shares]
            + [f"{fit:,}", show_size(table)]
        )
        section.records.append(
            {
                "slot_bytes": slot_bytes,
                "held": way.held,
                "sender_while_held": senders[-1],
                "fit": fit,
                "table_nbytes": table,
            }
            | {f"sender_{nbytes}": sender for nbytes, sender in zip(_SLOT_BUFFERS, senders, strict=False)}
        )
    section.notes = [
        f"'held' is send {names[0]} while the readers hold {_HELD} spans, or half of the slots.",
        f"The default slot is {show_size(DEFAULT_SLOT_BYTES)}.",
    ]
    return section


async def measure(options: PlacementOptions, progress: Progress) -> Result:
    result = Result("placement", settings={"readers": options.readers, "batches": options.batches, "batch": _BATCH})
    progress.say(f"starting {options.readers} readers")
    with Team(options.readers, _read) as team:
        result.sections.append(await _measure_sizes(options, team, progress))
        result.sections.append(await _measure_slots(options, team, progress))
    return result

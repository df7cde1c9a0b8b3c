"""`bench copy`: up to which size a copy is better made on the event loop than handed to a thread.

A copy on the loop keeps everything else on the loop waiting for as long as it takes. Handing it over costs the message the
way to the thread and back, whatever its size, and keeps the loop waiting only for the handing over.
`_copying.ON_LOOP_BYTES` is where one turns into the other. Warm pages are those that were written before; cold ones the
kernel has to find and clear first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from aioarena._bench._result import Result, Section
from aioarena._bench._text import Progress, show_micros, show_size
from aioarena._codec import MemorySource
from aioarena._copying import ON_LOOP_BYTES, CopyPool, default_threads, join
from aioarena._platform.memory import Segment

_SIZES = tuple(4096 << shift for shift in range(15))  # 4 KiB to 64 MiB
_SAMPLES = 60
# Up to here the copy itself is nothing beside handing it over.
_SMALL = 64 << 10
# Bytes of never touched memory that one size may use up.
_COLD_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """What the command line said."""

    quick: bool = False


_Copy = Callable[[int], Awaitable[None]]


async def _sample(copy: _Copy, addresses: list[int]) -> tuple[float, float]:
    """Median seconds of a copy to each address, and of CPU time of the loop's thread meanwhile."""
    walls, held = [], []
    for address in addresses:
        thread, began = time.thread_time(), time.perf_counter()
        await copy(address)
        walls.append(time.perf_counter() - began)
        held.append(time.thread_time() - thread)
        await asyncio.sleep(0)
    return median(walls), median(held)


async def _measure_size(nbytes: int, samples: int, pool: CopyPool) -> dict[str, Any]:
    array = np.ones(nbytes, np.uint8)
    source = MemorySource.of(array.data)

    async def on_loop(address: int) -> None:
        for portion in source.portions(address):
            portion.copy_all()

    async def in_threads(address: int) -> None:
        job = pool.start(source.portions(address))
        await join([asyncio.wrap_future(job.done)], job.abort)

    record: dict[str, Any] = {"nbytes": nbytes}
    for name, copy in (("loop", on_loop), ("threads", in_threads)):
        # A new segment each time, since only once is memory cold.
        count = max(3, min(samples, _COLD_BYTES // nbytes))
        segment = Segment.memfd("aioarena-bench", nbytes * count)
        addresses = [segment.mapping.address + nbytes * index for index in range(count)]
        record[f"{name}_cold"], held_cold = await _sample(copy, addresses)
        await _sample(copy, addresses[:1] * 3)
        record[f"{name}_warm"], held_warm = await _sample(copy, addresses[:1] * samples)
        if name == "threads":
            record |= {"held_cold": held_cold, "held_warm": held_warm}
        segment.close()
    return record


async def measure(options: CopyOptions, progress: Progress) -> Result:
    pool = CopyPool("bench")
    threads = default_threads()
    result = Result("copy", settings={"threads": threads, "on_loop_bytes": ON_LOOP_BYTES})
    section = Section(
        f"One copy into shared memory, made on the loop or handed to {threads} threads. Microseconds, medians.\n"
        "'held' is CPU time of the loop's thread when the copy is handed over.",
        ["size", "warm loop", "threads", "held", "cold loop", "threads", "held", "library"],
    )
    result.sections.append(section)
    try:
        await _measure_size(1 << 20, 5, pool)  # starts the threads
        for nbytes in _SIZES[::4] if options.quick else _SIZES:
            progress.say("copying", show_size(nbytes))
            record = await _measure_size(nbytes, 5 if options.quick else _SAMPLES, pool)
            columns = [f"{column}_{pages}" for pages in ("warm", "cold") for column in ("loop", "threads", "held")]
            place = "loop" if nbytes <= ON_LOOP_BYTES else "threads"
            section.rows.append([show_size(nbytes), *[show_micros(record[column]) for column in columns], place])
            section.records.append(record)
    finally:
        pool.close()
    handing = median(r["threads_warm"] - r["loop_warm"] for r in section.records if r["nbytes"] <= _SMALL)
    for pages in ("warm", "cold"):
        crossing = next(
            (show_size(r["nbytes"]) for r in section.records if r[f"loop_{pages}"] >= handing), "no size measured"
        )
        section.notes.append(f"Copying on the loop takes as long as handing over alone from {crossing} on, {pages}.")
    section.notes.insert(0, f"Handing over alone takes {show_micros(handing)} us (median up to {show_size(_SMALL)}).")
    return result

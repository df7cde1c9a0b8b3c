"""`bench small`: how many small messages a second, and what one costs.

A dict that pickles to about 200 bytes, on the asyncio front, pickling included. Two ways of looking:

*alone*: the sender bursts into the ring while the readers are stopped in a blocking call, then each reader in its turn
drains the ring while everybody else waits. This is what a message costs each side, with a core to itself.

*together*: the readers drain while the sender bursts. This is the rate of the channel; with more processes than CPUs they
take time from each other.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import aioarena
from aioarena._bench._result import Result, Section
from aioarena._bench._text import Progress, show_micros
from aioarena._bench._workers import Team, run

# Messages of a burst that has to fit into the ring: about half of its 8 MiB.
_ALONE = 20_000
_TOGETHER = 50_000
_QUICK = 2_000


@dataclass(frozen=True, slots=True)
class SmallOptions:
    """What the command line said.

    Attributes:
        readers: Numbers of readers to measure.
        runs: How often each is measured; one more to warm up.
        quick: A tenth of the messages, to see that it works.
        loop: Event loop of all processes.
    """

    readers: tuple[int, ...] = (1, 2, 4)
    runs: int = 5
    quick: bool = False
    loop: str = "asyncio"


def message() -> dict[str, Any]:
    """What an engine tells its workers each step; 200 bytes as a pickle."""
    return {
        "step": 1234,
        "request_ids": ["cmpl-7f3a9c42b", "cmpl-81d20e67f1"],
        "token_ids": [15496, 11, 995, 0, 770, 318],
        "positions": [511, 2047],
        "block_tables": [[17, 18, 19], [44, 45, 46, 47]],
        "temperature": 0.7,
    }


@dataclass(slots=True)
class _Side:
    """What one side took in each run, in seconds for one message."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, wall: float, cpu: float) -> None:
        self.wall.append(wall)
        self.cpu.append(cpu)


# Readers ----------------------------------------------------------------------------------------------------------


def _read(rank: int, pipe: Connection[Any, Any], loop: str) -> None:
    run(_drain(rank, pipe), loop)


async def _drain(rank: int, pipe: Connection[Any, Any]) -> None:
    handle = pipe.recv()
    async with aioarena.Receiver(handle, rank) as channel:
        while True:
            # A blocking call: until it is told to, this process does nothing at all.
            count = pipe.recv()
            pipe.send("go")
            cpu = time.process_time()
            await channel.recv()
            began = time.perf_counter()
            for _ in range(count - 1):
                await channel.recv()
            wall = time.perf_counter() - began
            pipe.send((wall / (count - 1), (time.process_time() - cpu) / count))


# The sender ----------------------------------------------------------------------------------------------------------


async def _burst(channel: aioarena.Sender, step: dict[str, Any], count: int) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        await channel.send(step)
    return (time.perf_counter() - began) / count, (time.process_time() - cpu) / count


async def _alone(channel: aioarena.Sender, team: Team, step: dict[str, Any], count: int) -> tuple[Any, list[Any]]:
    sender = await _burst(channel, step, count)
    readers = []
    for worker in team.workers:
        worker.tell(count)
        assert await worker.answer() == "go"
        readers.append(await worker.answer())
    return sender, readers


async def _together(channel: aioarena.Sender, team: Team, step: dict[str, Any], count: int) -> tuple[Any, list[Any]]:
    team.tell(count)
    await team.answers()
    sender = await _burst(channel, step, count)
    return sender, await team.answers()


async def _measure_one(
    options: SmallOptions, count: int, step: dict[str, Any], progress: Progress
) -> dict[str, tuple[_Side, _Side]]:
    """Both ways of looking, for one number of readers: sender and readers."""
    progress.say(f"small messages to {count} readers")
    found = {"alone": (_Side(), _Side()), "together": (_Side(), _Side())}
    with Team(count, _read, options.loop) as team:
        async with aioarena.Sender(count, name="bench") as channel:
            team.tell(channel.handle)
            await channel.wait_ready()
            for turn in range(options.runs + 1):
                progress.say(f"small messages to {count} readers", f"run {turn} of {options.runs}")
                for way, measure, messages in (
                    ("alone", _alone, _QUICK if options.quick else _ALONE),
                    ("together", _together, _QUICK if options.quick else _TOGETHER),
                ):
                    sender, readers = await measure(channel, team, step, messages)
                    if turn:  # the first one warms up
                        found[way][0].add(*sender)
                        found[way][1].add(median(wall for wall, _ in readers), median(cpu for _, cpu in readers))
    return found


def _pickle_alone(step: dict[str, Any]) -> tuple[float, float]:
    """Seconds of pickle alone for one message: what neither side can be below."""
    pickled = pickle.dumps(step, 5)

    def each(work: Any, argument: Any) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(5000):
                work(argument)
            times.append((time.perf_counter() - began) / 5000)
        return min(times)

    return each(lambda obj: pickle.dumps(obj, 5), step), each(pickle.loads, pickled)


async def measure(options: SmallOptions, progress: Progress) -> Result:
    step = message()
    nbytes = len(pickle.dumps(step, 5))
    dumps, loads = await asyncio.to_thread(_pickle_alone, step)
    result = Result("small", settings={"runs": options.runs, "pickled_nbytes": nbytes, "loop": options.loop})
    header = ["readers", "sends/s", "us", "CPU us", "receives/s", "us", "CPU us"]
    alone = Section(
        f"Each side alone: a burst of a {nbytes}-byte dict into the ring while the readers are stopped, then each reader "
        f"drains it.\nMedian of {options.runs} runs, {options.loop}, pickling included.",
        header,
        notes=[f"pickle alone: dumps {show_micros(dumps)} us, loads {show_micros(loads)} us"],
    )
    together = Section(
        "Together: readers drain while the sender bursts; receives/s is of each reader. CPU us is CPU time of the whole\n"
        "process for one message.",
        header,
    )
    result.sections = [alone, together]
    for count in options.readers:
        found = await _measure_one(options, count, step, progress)
        for section, way in ((alone, "alone"), (together, "together")):
            row, record = [str(count)], {"readers": count, "way": way, "pickle_dumps": dumps, "pickle_loads": loads}
            for name, side in zip(("sender", "reader"), found[way], strict=True):
                wall, cpu = median(side.wall), median(side.cpu)
                row += [f"{1 / wall:,.0f}", show_micros(wall), show_micros(cpu)]
                record |= {f"{name}_seconds": wall, f"{name}_cpu_seconds": cpu, f"{name}_runs": side.wall}
            section.rows.append(row)
            section.records.append(record)
    return result

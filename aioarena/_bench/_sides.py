"""The processes that `bench compare` measures: the sender and the readers of an alternative, and what they report.

Moments are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from aioarena._asyncio import wake
from aioarena._bench._ends import Alternative, NotPossibleError, ReadEnd, SendEnd, Setting
from aioarena._bench._scenarios import Scenario, Source, difference, digest
from aioarena._bench._stall import StallMeter
from aioarena._bench._workers import run

# Seconds between two messages of a paced scenario, and those for which an idle loop is watched, to compare.
_PACE = 0.002
_STILL = 0.25


@dataclass(frozen=True, slots=True)
class Job:
    """What the processes of one alternative are started with. ``answers`` leads from each reader to the sender."""

    alternative: type[Alternative]
    scenario: Scenario
    setting: Setting
    answers: list[tuple[Connection[Any, Any], Connection[Any, Any]]]


@dataclass(frozen=True, slots=True)
class Round:
    """Messages to send and to expect.

    Attributes:
        first: Number of the first.
        count: How many.
        full: Whether readers compare every byte.
    """

    first: int
    count: int
    full: bool = False


@dataclass(frozen=True, slots=True)
class NotPossible:
    """An answer: the alternative cannot do this."""

    why: str


@dataclass(slots=True)
class Report:
    """What a process tells of a round. Durations of messages count from the call of send.

    Attributes:
        count: Messages sent or received.
        digest: Sum of their digests.
        violation: What a reader got that was not to be.
        began: When the first was sent, or received.
        ended: When the last was.
        cpu: CPU seconds, of all threads.
        sends: How long each send took.
        latencies: Until each was received.
        done: Until the last reader had touched it all.
        stall: Longest delay of the event loop.
        still: The same, while the channel was idle.
    """

    count: int = 0
    digest: int = 0
    violation: str | None = None
    began: float = 0.0
    ended: float = 0.0
    cpu: float = 0.0
    sends: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    stall: float = 0.0
    still: float = 0.0


async def _next(pipe: Connection[Any, Any]) -> Any:
    """The next thing from a pipe; the loop goes on meanwhile."""
    if not pipe.poll():
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        loop.add_reader(pipe.fileno(), wake, arrived)
        try:
            await arrived
        finally:
            loop.remove_reader(pipe.fileno())
    return pipe.recv()


def work(rank: int, pipe: Connection[Any, Any], job: Job) -> None:
    """A worker: number 0 is the sender."""
    gc.freeze()  # so that looking for garbage between rounds does not go through all that was imported
    try:
        run(_read(rank - 1, pipe, job) if rank else _send(pipe, job))
    except NotPossibleError as error:
        pipe.send(NotPossible(str(error)))
        pipe.poll(None)


@asynccontextmanager
async def _watched(job: Job, report: Report) -> AsyncIterator[None]:
    """Watch the event loop, if that is the scenario: while nothing is done, and then during the block."""
    if not job.scenario.stalls:
        yield
        return
    async with StallMeter() as still:
        await asyncio.sleep(_STILL)
    async with StallMeter() as stalls:
        yield
    report.still, report.stall = still.worst(), stalls.worst()


async def _send(pipe: Connection[Any, Any], job: Job) -> None:
    # Not closed when the conductor is gone, or wants us to be: then nobody waits for us.
    end = await job.alternative.sender(job.setting)
    pipe.send(end.handle)
    await end.ready()
    source = Source(job.scenario)
    pipe.send("ready")
    while (order := await _next(pipe)) is not None:
        gc.collect()
        pipe.send(await _send_round(end, source, job, order))
    await end.aclose()


async def _send_round(end: SendEnd, source: Source, job: Job, order: Round) -> Report:
    report, scenario = Report(), job.scenario
    clock, answers = time.monotonic, [receiving for receiving, _ in job.answers]
    if scenario.way == "idle" and not order.full:
        cpu = time.process_time()
        await asyncio.sleep(scenario.seconds)
        report.cpu = time.process_time() - cpu
    async with _watched(job, report):
        cpu, report.began = time.process_time(), clock()
        for index in range(order.count):
            if scenario.way == "paced" and (wait := report.began + index * _PACE - clock()) > 0:
                await asyncio.sleep(wait)
            message = source.message(order.first + index)
            report.digest += digest(message, scenario.stride)
            if scenario.way != "answered":
                message["temperature"] = clock()
                await end.send(message)
                continue
            message = end.fresh(message)
            before, sent = time.process_time(), clock()
            message["temperature"] = sent
            await end.send(message)
            report.sends.append(clock() - sent)
            report.done.append(max([await _next(pipe) for pipe in answers]) - sent)
            report.cpu += time.process_time() - before
        report.ended = clock()
        if scenario.way in ("paced", "burst"):  # where nothing in between is to be left out
            report.cpu = time.process_time() - cpu
    report.count = order.count
    return report


async def _read(rank: int, pipe: Connection[Any, Any], job: Job) -> None:
    handle = await _next(pipe)
    end = await job.alternative.reader(job.setting, handle, rank)
    pipe.send("attached")
    while (order := await _next(pipe)) is not None:
        gc.collect()
        pipe.send("listening")
        pipe.send(await _read_round(end, rank, job, order))
    await end.aclose()
    pipe.send("closed")


async def _read_round(end: ReadEnd, rank: int, job: Job, order: Round) -> Report:
    report, scenario, clock = Report(), job.scenario, time.monotonic
    answer = job.answers[rank][1]
    async with _watched(job, report):
        cpu = time.process_time()
        for number in range(order.first, order.first + order.count):
            message = await end.recv()
            received = clock()
            sent = message["temperature"]
            if message["step"] != number:
                report.violation = f"got message {message['step']} instead of {number}"
                return report
            report.digest += digest(message, scenario.stride)
            touched = clock()
            if order.full and (what := difference(message, scenario, number)):
                report.violation = f"{what} of message {number} is not as it was sent"
                return report
            del message  # so that its memory can be used again
            if scenario.way == "answered":
                answer.send(touched)
            report.count += 1
            if scenario.way != "burst":  # where it is the length of a queue
                report.latencies.append(received - sent)
            report.began = report.began or received
        report.ended = clock()
        report.cpu = time.process_time() - cpu
    return report

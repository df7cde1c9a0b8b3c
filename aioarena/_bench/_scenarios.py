"""What `bench compare` measures, and the processes that it measures: one sender and its readers for each alternative.

Every message is a step, as in `bench small`, and may carry a load. Its number, and the moment when it was sent, stand in
fields that a step has anyway. So a reader can tell what is missing, repeated or out of order, and how long it took. Moments
are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import gc
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from aioarena._bench import small
from aioarena._bench._alternatives import Alternative, Message, NotPossibleError, ReadEnd, SendEnd, Setting
from aioarena._bench._stall import StallMeter
from aioarena._bench._workers import run

_PACE = 0.002
_PAGE = 4096
# Words between two that tell one message from another: one in 50 pages, and only words that a digest samples.
_STAMP = 50 * _PAGE // 4
_COLUMNS = 4096
# Bytes between samples where event loops are watched: a digest of all pages would hold them up itself.
_GLANCE = 256 * _STAMP
# Seconds for which an idle loop is watched, to compare.
_STILL = 0.25


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing to measure.

    Attributes:
        name: For the command line.
        title: Over its table.
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
    title: str
    way: str
    tensors: int = 0
    rows: int = 0
    objects: int = 0
    first: int = 0
    count: int = 0
    seconds: float = 0.0
    stalls: bool = False

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
            rows=self.rows // 10,
            objects=self.objects // 10,
            first=min(self.first, 2),
            count={"paced": 50, "burst": 1500, "answered": 2, "idle": 1}[self.way],
            seconds=min(self.seconds, 1.0),
        )


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("small", "A dict of 197 bytes every 2 ms", "paced", count=400),
        Scenario("burst", "Bursts of the same dict, until the last reader has the last", "burst", count=6000),
        Scenario("tensor", "One tensor of 200 MiB", "answered", tensors=1, rows=12800, first=10, count=3),
        Scenario("tensors", "Eight tensors of 16 MiB in one message", "answered", tensors=8, rows=1024, first=10, count=3),
        Scenario("objects", "1 MB of Python objects", "answered", objects=8000, first=10, count=10),
        Scenario("idle", "Nothing is sent", "idle", count=1, seconds=5.0),
        Scenario("stall", "Event loops while 200 MiB are sent", "answered", tensors=1, rows=12800, count=2, stalls=True),
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
    value = int(message["step"]) * 31 + sum(message["token_ids"])
    for tensor in message.get("tensors", ()):
        total = int(tensor.view(-1).view(torch.uint8)[::stride].sum())
        value = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)} {total}".encode(), value & 0xFFFFFFFF)
    objects = message.get("objects", ())
    return value + sum(each["tokens"][-1] + each["tokens"][0] + len(each["id"]) for each in objects[::64]) + len(objects)


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


# Processes --------------------------------------------------------------------------------------------------------


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
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pipe.fileno(), arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(pipe.fileno())
    return pipe.recv()


def work(rank: int, pipe: Connection[Any, Any], job: Job) -> None:
    """A worker: number 0 is the sender."""
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
            report.latencies.append(received - sent)
            report.began = report.began or received
        report.ended = clock()
        report.cpu = time.process_time() - cpu
    return report

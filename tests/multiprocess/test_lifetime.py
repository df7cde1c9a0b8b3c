"""Received memory outlives everything it came through, and goes with its last user; nothing piles up over generations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.multiprocess.harness import Farm, Worker
from tests.multiprocess.messages import CHANNEL
from tests.multiprocess.scripts import FORMS

# 800 KB, which fits into the arena of CHANNEL; summed up after its first element has been cut off.
NUMBERS = torch.arange(100_000, dtype=torch.int64)
SUM = int(NUMBERS.sum())

WAYS = ["closed", "never closed", "returned", "sender closed", "sender killed", "sender gone"]


def receive_and_keep(farm: Farm, kind: str, way: str, form: str, loop_kind: str, backing: str = "memfd") -> Worker:
    """Have a fresh process keep a form of a tensor while what it came through goes; returns the process."""
    sender, reader = farm.worker(), farm.worker(kind)
    sender.start("sender", 1, backing=backing, loop_kind=loop_kind, **CHANNEL)
    reader.start("outlive", sender.get(), way, form, loop_kind)
    assert reader.get() == "joined"
    sender.ask("send object", NUMBERS)
    assert reader.get() == "received"
    if way in ("sender closed", "sender gone"):
        sender.put("close")
        assert sender.result() == "closed"
        if way == "sender gone":
            assert sender.finish() == 0
    elif way == "sender killed":
        sender.kill()
        sender.wait()
    total, maps, after, before = reader.ask("go on")
    assert total == SUM
    assert any("arena" in line for line in maps)
    assert after == before, "something is left after the last user is gone"
    reader.put("go on")
    assert reader.result() == total
    return reader


@pytest.mark.parametrize(
    ("way", "form", "loop_kind"),
    [
        *((way, "slice", "asyncio") for way in WAYS),
        *((way, form, "uvloop") for way in ("never closed", "sender killed") for form in FORMS),
    ],
)
def test_memory_outlives(farm: Farm, way: str, form: str, loop_kind: str) -> None:
    """Whatever is closed, collected or killed, a form of a tensor keeps its bytes; with it go mapping and descriptor."""
    reader = receive_and_keep(farm, "fork", way, form, loop_kind)
    assert reader.finish() == 0
    assert reader.output == ""


@pytest.mark.parametrize("way", ["closed", "sender killed"])
def test_memory_outlives_an_unlinked_segment(farm: Farm, way: str) -> None:
    """The same with files in /dev/shm, whose names are gone as soon as all readers are in."""
    reader = receive_and_keep(farm, "fork", way, "slice", "asyncio", backing="shm")
    assert (reader.finish(), reader.output) == (0, "")


def test_memory_outlives_in_a_fresh_interpreter(farm: Farm) -> None:
    """Once more in a process that shares nothing with this one."""
    reader = receive_and_keep(farm, "subprocess", "sender killed", "slice", "asyncio")
    assert (reader.finish(), reader.output) == (0, "")


# Nothing piles up: B22 ---------------------------------------------------------------------------------------------------


def level(resources: dict[str, Any]) -> tuple[int, int]:
    return len(resources["descriptors"]), len(resources["maps"])


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_a_reader_of_many_channels(farm: Farm, loop_kind: str) -> None:
    """A reader that may open 64 files follows 12 senders, half of which are killed: it stays as it was after the first."""
    reader = farm.worker()
    reader.start("follow", 64, loop_kind=loop_kind)
    levels = []
    for generation in range(12):
        sender = farm.worker()
        sender.start("sender", 1, loop_kind=loop_kind, **CHANNEL)
        reader.put(sender.get())
        assert reader.get() == "joined"
        for _ in range(3):
            sender.ask("send object", [torch.full((1200,), generation) for _ in range(12)])
        reader.put("go on")
        assert reader.get() == 36 * 1200 * generation
        if generation % 2:
            sender.kill()
        else:
            sender.put("close")
            assert sender.result() == "closed"
        assert reader.get() == ("SenderLostError" if generation % 2 else "EndOfChannel")
        levels.append(level(reader.get()))
        sender.dispose()
    assert len(set(levels[1:])) == 1, f"(descriptors, mappings) after each channel: {levels}"
    assert levels[-1][1] == 0
    reader.put(None)
    assert reader.result() == "done"


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_a_sender_of_many_channels(farm: Farm, loop_kind: str) -> None:
    """A process that opens and closes 10 channels, half of whose readers are killed, stays as it was after the first."""
    sender = farm.worker()
    sender.start("send_generations", 10, loop_kind=loop_kind, **CHANNEL)
    levels = []
    for generation in range(10):
        reader = farm.worker()
        reader.start("reader", sender.get(), 0, loop_kind=loop_kind)
        assert reader.get() == "joined"
        assert reader.ask("hold", 3) == [0, 1, 2]
        if generation % 2:
            reader.kill()
        sender.put("go on")
        levels.append(level(sender.get()))
        reader.dispose()
    assert sender.result() == "done"
    assert len(set(levels[1:])) == 1, f"(descriptors, mappings) after each channel: {levels}"
    assert levels[-1][1] == 0


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_many_tensors_in_one_message(farm: Farm, loop_kind: str) -> None:
    """A reader that keeps a thousand tensors of a message, most of which did not fit the arena, opens nothing for them."""
    sender, reader = farm.several(2)
    sender.start("sender", 1, loop_kind=loop_kind, **CHANNEL)
    reader.start("keep_many", sender.get(), 64, loop_kind=loop_kind)
    assert reader.get() == "joined"
    sender.ask("send object", [torch.full((1200,), number) for number in range(1000)])
    before, during, total, after = reader.result()
    assert total == 1200 * sum(range(1000))
    assert before == during == after

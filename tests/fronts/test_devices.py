"""``to_device``: any nesting, with its tensors moved. Here to private memory; the GPU has its own tests."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from aioarena import ClosedError
from tests.conftest import OpenChannel
from tests.fronts.support import filled, in_arena, no_collector, shows, until


@dataclass
class Step:
    number: int
    pixels: torch.Tensor
    more: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FrozenStep:
    number: int
    pixels: torch.Tensor


class Named(NamedTuple):
    left: torch.Tensor
    right: int


Pair = namedtuple("Pair", "left right")


class Opaque:
    """Not a container that is looked into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


async def received(channel: Any, message: Any) -> Any:
    await channel.sender.send(message)
    return await channel.receiver.recv()


async def test_every_nesting(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        pixels = filled(7)
        message = await received(
            channel,
            {
                "list": [pixels, [1, (filled(8, 100), "x")]],
                "named": Named(filled(9, 10), 3),
                "pair": Pair(filled(10, 10), None),
                "step": Step(4, filled(11, 10), [filled(12, 10)]),
                "frozen": FrozenStep(5, filled(13, 10)),
                "ordered": OrderedDict(a=filled(14, 10), b=2),
                "default": defaultdict(list, a=[filled(15, 10)]),
                ("tuple", 1): torch.ones(2),
            },
        )
        moved = await channel.receiver.to_device(message, "cpu")
        assert list(moved) == list(message)
        for key, value in moved.items():
            assert type(value) is type(message[key]), key
        tensors = [
            moved["list"][0],
            moved["list"][1][1][0],
            moved["named"].left,
            moved["pair"].left,
            moved["step"].pixels,
            moved["step"].more[0],
            moved["frozen"].pixels,
            moved["ordered"]["a"],
            moved["default"]["a"][0],
        ]
        assert [int(tensor[0]) for tensor in tensors] == list(range(7, 16))
        assert moved["list"][1][0] == 1
        assert moved["list"][1][1][1] == "x"
        assert (moved["named"].right, moved["pair"].right, moved["step"].number, moved["frozen"].number) == (3, None, 4, 5)
        assert moved["default"]["new"] == []


async def test_the_copies_are_private_and_the_slot_is_free(open_channel: OpenChannel) -> None:
    """Small or large: writing to the copy changes neither the original nor what others see."""
    for size in (100_000, 2 << 20):
        async with open_channel(2) as channel:
            with no_collector():
                message = await received(channel, {"t": filled(7, size)})
                other = await channel.receivers[1].recv()
                moved = await channel.receiver.to_device(message, "cpu")
                assert in_arena(channel.receiver, message["t"])
                assert not in_arena(channel.receiver, moved["t"])
                moved["t"].zero_()
                assert shows(message["t"], 7)
                assert shows(other["t"], 7)
                del message, other
                await until(lambda: channel.slots_used == 0)  # a thread that copied lets go a little later


async def test_the_original_is_not_changed(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        message = await received(channel, {"a": [filled(1)], "s": Step(1, filled(2, 10))})
        a, s, pixels = message["a"], message["s"], message["s"].pixels
        await channel.receiver.to_device(message, torch.device("cpu"))
        assert message["a"] is a
        assert message["s"] is s
        assert s.pixels is pixels


async def test_a_tensor_that_occurs_twice_stays_one(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        tensor = filled(1)
        message = await received(channel, [tensor, {"again": tensor}])
        moved = await channel.receiver.to_device(message, "cpu")
        assert moved[1]["again"] is moved[0]


async def test_other_objects_are_passed_through(open_channel: OpenChannel) -> None:
    """The very same ones: nothing that holds no tensor is rebuilt into something else."""
    async with open_channel() as channel:
        others = [
            None,
            1,
            "text",
            np.arange(3),
            Opaque(torch.ones(1)),
            {1, 2},
            torch.float16,
            torch.Size([1, 2]),
            os.stat("/"),
            Counter("aab"),
            len,
            Step,
        ]
        moved = await channel.receiver.to_device([torch.ones(1), *others], "cpu")
        for value, other in zip(moved[1:], others, strict=True):
            assert type(value) is type(other)
            assert np.array_equal(value, other) if isinstance(other, np.ndarray) else value == other
        assert moved[5] is others[4]
        assert moved[9].st_mtime == others[8].st_mtime  # type: ignore[union-attr]


@pytest.mark.parametrize("obj", [None, 3, {}, [], (), {"a": [1, ("b",)]}])
async def test_objects_without_tensors(open_channel: OpenChannel, obj: Any) -> None:
    async with open_channel() as channel:
        assert await channel.receiver.to_device(obj, "cpu") == obj


async def test_a_tensor_by_itself(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        message = await received(channel, torch.arange(10).view(2, 5).T)
        moved = await channel.receiver.to_device(message, "cpu")
        assert torch.equal(moved, message)
        assert moved.data_ptr() != message.data_ptr()


async def test_without_an_arena(open_channel: OpenChannel) -> None:
    async with open_channel(arena=None) as channel:
        message = await received(channel, {"t": filled(7)})
        moved = await channel.receiver.to_device(message, "cpu")
        assert shows(moved["t"], 7)


async def test_a_move_can_be_cancelled(open_channel: OpenChannel) -> None:
    """It ends once its thread lets go of the tensor; the tensor and its slot are as before."""
    async with open_channel() as channel:
        with no_collector():
            message = await received(channel, filled(7, 4 << 20))
            task = asyncio.create_task(channel.receiver.to_device(message, "cpu"))
            await asyncio.sleep(0)  # its copy is under way
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert shows(message, 7)
            del message, task
            await until(lambda: channel.slots_used == 0)  # the thread lets go a little later


async def test_closing_during_a_move(open_channel: OpenChannel) -> None:
    """The move ends well, and the close waits for it."""
    async with open_channel() as channel:
        message = await received(channel, filled(7, 4 << 20))
        task = asyncio.create_task(channel.receiver.to_device(message, "cpu"))
        await asyncio.sleep(0)  # its copy is under way
        await channel.receiver.aclose()
        assert task.done()
        assert shows(await task, 7)
        with pytest.raises(ClosedError):
            await channel.receiver.to_device(message, "cpu")


async def test_an_impossible_device(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        message = await received(channel, filled(7))
        with pytest.raises(RuntimeError, match="no-such-device"):
            await channel.receiver.to_device(message, "no-such-device")
        assert shows(message, 7)

"""``Receiver(private=True)``: plain copies of one's own, and slots that are free at once."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from aioarena import Receiver
from tests.conftest import OpenChannel
from tests.fronts.support import filled, in_arena, no_collector, shows

PRIVATE = {"private": True}
SIZES = {"ring": 100, "arena": 100_000, "threads": 2 << 20, "frame": 5 << 20}


def message_of(size: int) -> dict[str, Any]:
    return {
        "tensor": filled(1, size),
        "array": np.full(size, 2, np.uint8),
        "buffer": pickle.PickleBuffer(bytearray(b"\3" * size)),
        "gathered": filled(4, 2 * size)[::2],
    }


def values_of(message: dict[str, Any]) -> list[int]:
    """The number that each part shows everywhere."""
    arrays = [np.asarray(part) for part in message.values()]
    assert all((array == array[0]).all() for array in arrays)
    return [int(array[0]) for array in arrays]


def overwrite(message: dict[str, Any]) -> None:
    for part in message.values():
        np.asarray(part)[...] = 0xEE


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_writing_reaches_nobody(open_channel: OpenChannel, size: int) -> None:
    """Neither another reader, private or not, nor a later message in the same slots."""
    async with open_channel(3, receiver=PRIVATE) as channel:
        await channel.receivers[2].aclose()
        async with Receiver(channel.sender.handle, 2) as sharing:
            for _ in range(3):
                await channel.sender.send(message_of(size))
                first = await channel.receivers[0].recv()
                overwrite(first)
                assert values_of(await channel.receivers[1].recv()) == [1, 2, 3, 4]
                assert values_of(await sharing.recv()) == [1, 2, 3, 4]
                assert values_of(first) == [0xEE] * 4


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("nowait", [False, True])
async def test_the_slots_are_free_at_once(open_channel: OpenChannel, size: int, nowait: bool) -> None:
    """While the message is there, and in use."""
    async with open_channel(receiver=PRIVATE) as channel:
        with no_collector():
            await channel.sender.send(filled(1, size))
            # Frames arrive when they arrive; what is in the ring and the arena is there.
            nowait &= size <= 4 << 20
            message = channel.receiver.recv_nowait() if nowait else await channel.receiver.recv()
            assert shows(message, 1)
            assert channel.slots_used == 0
            assert channel.receiver.statistics().spans_held == 0
            if size in (SIZES["arena"], SIZES["threads"]):
                assert not in_arena(channel.receiver, message)
                assert channel.receiver.statistics().arena_bytes == size


async def test_private_tensors_grow_no_slot_and_outlive_the_channel(open_channel: OpenChannel) -> None:
    kept = []
    async with open_channel(receiver=PRIVATE) as channel:
        for number in range(20):
            await channel.sender.send(filled(number, 1 << 20))
            kept.append(await channel.receiver.recv())
        assert channel.sender.statistics().slots_peak == 1
        assert channel.sender.statistics().frame_bytes == 0
    assert all(shows(tensor, number) for number, tensor in enumerate(kept))


@pytest.mark.parametrize("extra", [(), (1 << 20,), (2 << 20, 5 << 20)], ids=["pack", "pack and arena", "pack and frame"])
async def test_packs(open_channel: OpenChannel, extra: tuple[int, ...]) -> None:
    """Many small buffers, and more inline bytes than may be copied on the loop."""
    async with open_channel(receiver=PRIVATE) as channel:
        sizes = (15_000,) * 60 + extra
        await channel.sender.send([filled(number, size) for number, size in enumerate(sizes)])
        message = await channel.receiver.recv()
        assert channel.slots_used == 0
        assert [tensor.numel() for tensor in message] == list(sizes)
        assert all(shows(tensor, number) for number, tensor in enumerate(message))


async def test_a_message_of_several_large_buffers(open_channel: OpenChannel) -> None:
    """Each copy lands where it belongs."""
    async with open_channel(receiver=PRIVATE) as channel:
        message = [filled(1, 700_000), "text", np.full(900_000, 2, np.uint8), filled(3, 100_000), "x" * 600_000]
        await channel.sender.send(message)
        first, text, second, third, long = await channel.receiver.recv()
        assert shows(first, 1)
        assert (second == 2).all()
        assert shows(third, 3)
        assert (text, long) == ("text", "x" * 600_000)
        assert channel.slots_used == 0


async def test_receives_keep_their_order_while_copies_are_made(open_channel: OpenChannel) -> None:
    async with open_channel(receiver=PRIVATE) as channel:
        for number in range(3):
            await channel.sender.send(filled(number, 1 << 20))
        await channel.sender.send("last")
        *tensors, last = await asyncio.gather(*[channel.receiver.recv() for _ in range(4)])
        assert [int(tensor[0]) for tensor in tensors] == [0, 1, 2]
        assert last == "last"


async def test_without_privacy_readers_share_memory(open_channel: OpenChannel) -> None:
    """What the others' documentation warns of, and the reason for this option."""
    async with open_channel(2) as channel:
        await channel.sender.send(filled(1))
        first, second = [await receiver.recv() for receiver in channel.receivers]
        assert isinstance(first, torch.Tensor)
        first.fill_(9)
        assert shows(second, 9)

"""Memory of the arena lent to the sender's own code: sent without a copy, and free when nobody needs it any more."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from aioarena import ArenaConfig, ClosedError, Receiver, Sender
from aioarena._core.arena import _MOST_USES
from tests.conftest import ARENA, PATIENCE, RING_BYTES, Channel, OpenChannel
from tests.fronts.support import cancelled, fill_ring, filled, in_arena, no_collector, shows, turns

MIB = 1 << 20
SMALL_SLOTS = ArenaConfig(slots=64, slot_bytes=64 << 10, min_bytes=16 << 10)


def lent_bytes(channel: Channel) -> int:
    return channel.sender.statistics().lent_bytes


async def lend(channel: Channel, value: int, nbytes: int = MIB) -> torch.Tensor:
    tensor = await channel.sender.empty(nbytes, torch.uint8)
    return tensor.fill_(value)


# What it is -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64], ids=str)
async def test_a_lent_tensor_is_an_ordinary_tensor(open_channel: OpenChannel, dtype: torch.dtype) -> None:
    """As torch.empty makes it: contiguous, the only owner of its storage."""
    async with open_channel() as channel:
        lent = await channel.sender.empty((3, 512, 64), dtype)
        like = torch.empty((3, 512, 64), dtype=dtype)
        for one in (lent, like):
            assert (one.shape, one.dtype, one.stride(), one.is_contiguous()) == (like.shape, dtype, like.stride(), True)
            assert one._base is None
            assert one.untyped_storage().nbytes() == one.numel() * one.element_size()
            assert not one.requires_grad
        lent.copy_(torch.ones_like(like))
        await channel.sender.send(lent)
        received = await channel.receiver.recv()
        assert torch.equal(received, torch.ones_like(like))
        assert lent_bytes(channel) == lent.numel() * lent.element_size()
        assert channel.sender.statistics().copy_seconds < 0.001 or lent_bytes(channel)


async def test_shape_and_dtype_as_torch_takes_them(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        chan = channel.sender
        assert (await chan.empty(100_000)).shape == (100_000,)
        assert (await chan.empty([10, 10_000])).dtype == torch.get_default_dtype()
        assert (await chan.empty(torch.Size([20_000]), torch.float64)).dtype is torch.float64
        like = await chan.empty_like(torch.zeros(4, 5, 1000, dtype=torch.float16).transpose(0, 2))
        assert (like.shape, like.dtype, like.is_contiguous()) == ((1000, 5, 4), torch.float16, True)
        assert (await chan.empty_like(like, torch.float32)).dtype is torch.float32
        small_arrays = await chan.empty_array((10, 2000), np.dtype(("f4", (3,))))
        assert (small_arrays.shape, small_arrays.dtype) == ((10, 2000, 3), np.float32)
        await chan.reclaim(torch.eye(3).to_sparse())
        array = await chan.empty_array((100, 1000), np.int16)
        assert (array.shape, array.dtype, array.flags.c_contiguous, array.flags.writeable) == (
            (100, 1000),
            np.int16,
            True,
            True,
        )
        assert (await chan.empty_array(50_000)).dtype == np.float64


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("empty", (-1,), ValueError),
        ("empty", ((2, -1),), ValueError),
        ("empty", (1.5,), TypeError),
        ("empty", ("12",), TypeError),
        ("empty", (True,), TypeError),
        ("empty", (10, "float32"), TypeError),
        ("empty_like", (3,), TypeError),
        ("empty_array", (10, object), TypeError),
        ("empty_array", (10, "no such type"), TypeError),
        ("reclaim", ([1, 2],), TypeError),
    ],
)
async def test_what_makes_no_sense_is_refused(
    open_channel: OpenChannel, method: str, arguments: Any, error: type[Exception]
) -> None:
    async with open_channel() as channel:
        with pytest.raises(error):
            await getattr(channel.sender, method)(*arguments)
        assert channel.slots_used == 0


# How it travels ---------------------------------------------------------------------------------------------------------


async def test_sending_it_copies_nothing(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's tensor shows what the sender writes afterwards: it is the same memory."""
    async with open_channel() as channel:
        tensor = await lend(channel, 1)
        monkeypatch.setattr(channel.sender._filler._pool, "start", None)  # no copy in threads, either
        await channel.sender.send({"pixels": tensor, "step": 1})
        received = (await channel.receiver.recv())["pixels"]
        assert shows(received, 1)
        tensor[0] = 9
        assert received[0] == 9
        assert channel.slots_used == 1
        assert (lent_bytes(channel), channel.sender.statistics().arena_bytes) == (MIB, MIB)


async def test_views_and_arrays_over_it_travel_from_where_they_are(open_channel: OpenChannel) -> None:
    async with open_channel(arena=SMALL_SLOTS) as channel:
        tensor = (await channel.sender.empty((4, 64, 1024))).copy_(torch.arange(4 * 64 * 1024).view(4, 64, 1024))
        views = [
            tensor[1],
            tensor[1:3],
            tensor[2, 5:].T,
            tensor.view(torch.uint8),
            tensor.numpy()[1:],
            tensor.flatten()[7:],
        ]
        for number, view in enumerate(views):
            before = lent_bytes(channel)
            await channel.sender.send(view)
            received = await channel.receiver.recv()
            assert np.array_equal(np.asarray(received), np.asarray(view)), number
            assert tuple(received.shape) == tuple(view.shape)
            assert lent_bytes(channel) - before == np.asarray(view).nbytes, number
        gaps = tensor[:, ::2]  # to be gathered
        before = lent_bytes(channel)
        await channel.sender.send(gaps)
        assert torch.equal(await channel.receiver.recv(), gaps)
        assert lent_bytes(channel) == before


async def test_small_pieces_of_it_go_into_the_ring(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        tensor = await lend(channel, 1)
        await channel.sender.send(tensor[:100])
        assert shows(await channel.receiver.recv(), 1)
        assert lent_bytes(channel) == 0


async def test_two_channels(open_channel: OpenChannel) -> None:
    """On another channel it is a tensor like any other, and copied."""
    async with open_channel() as channel, open_channel() as other:
        tensor = await lend(channel, 1)
        await other.sender.send(tensor)
        received = await other.receiver.recv()
        tensor.fill_(2)
        assert shows(received, 1)
        assert (lent_bytes(channel), lent_bytes(other)) == (0, 0)


async def test_private_readers_get_copies(open_channel: OpenChannel) -> None:
    async with open_channel(receiver={"private": True}) as channel:
        tensor = (await channel.sender.empty((2, MIB), torch.uint8)).fill_(1)
        await channel.sender.send(tensor[1])
        received = await channel.receiver.recv()
        tensor.fill_(2)
        assert shows(received, 1)
        await channel.sender.reclaim(tensor)


# When it is free --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["sender first", "reader first"])
async def test_its_slots_are_free_once_both_sides_dropped_it(open_channel: OpenChannel, order: str) -> None:
    async with open_channel() as channel:
        with no_collector():
            tensor: Any = await lend(channel, 1)
            await channel.sender.send(tensor)
            received: Any = await channel.receiver.recv()
            if order == "sender first":
                del tensor
            else:
                del received
            assert channel.slots_used == 1
            tensor = received = None
            assert channel.slots_used == 0


async def test_dropped_unsent(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        with no_collector():
            tensors = [await lend(channel, number) for number in range(ARENA.slots)]
            assert channel.slots_used == ARENA.slots
            view = tensors[1][5:]
            del tensors[:3]
            assert channel.slots_used == 2
            del view, tensors
            assert channel.slots_used == 0


async def test_dropped_before_it_is_received(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        await channel.sender.send(await lend(channel, 1))
        for number in range(ARENA.slots - 1):
            await channel.sender.send(filled(10 + number))
        assert channel.sender.statistics().fallbacks["arena_full"] == 0
        assert channel.slots_used == ARENA.slots
        assert shows(await channel.receiver.recv(), 1)


async def test_dropped_in_another_thread(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        kept = [await lend(channel, 1)]
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
        assert channel.slots_used == 0


async def test_sent_again_and_again(open_channel: OpenChannel) -> None:
    """Every message is released by itself: the slots are free when the last one is, in whatever order."""
    async with open_channel(2, arena=SMALL_SLOTS) as channel:
        tensor: Any = await lend(channel, 1)
        for _ in range(3):
            await channel.sender.send([tensor, tensor[MIB // 2 :]])
        received = [[await receiver.recv() for _ in range(3)] for receiver in channel.receivers]
        assert channel.sender.statistics().spans_held == 6
        del tensor
        for rank, number in [(0, 1), (1, 2), (0, 0), (1, 0), (0, 2)]:
            received[rank][number] = None  # type: ignore[call-overload]
            gc.collect()
            assert channel.slots_used == 16
        assert all(shows(part, 1) for part in received[1][1])
        received.clear()
        assert channel.slots_used == 0
        assert lent_bytes(channel) == 3 * (MIB + MIB // 2)


async def test_more_uses_than_it_has_slots_are_copied(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:  # a slot is 1 MiB
        tensor = await lend(channel, 1)
        for _ in range(3):
            await channel.sender.send(tensor)
        assert lent_bytes(channel) == MIB
        assert channel.sender.statistics().arena_bytes == 3 * MIB
        assert channel.sender.statistics().fallbacks["lent_busy"] == 2
        received = [await channel.receiver.recv() for _ in range(3)]
        tensor.fill_(2)
        assert [int(one[0]) for one in received] == [2, 1, 1]
        received.clear()
        await channel.sender.send(tensor)
        assert lent_bytes(channel) == 2 * MIB


async def test_uses_are_bounded(open_channel: OpenChannel) -> None:
    async with open_channel(arena=ArenaConfig(slots=1024, slot_bytes=4096, min_bytes=4096)) as channel:
        tensor = await lend(channel, 1, (_MOST_USES + 10) * 4096)
        part = tensor[:4096]
        for _ in range(_MOST_USES + 5):
            await channel.sender.send(part)
        assert lent_bytes(channel) == _MOST_USES * 4096
        assert channel.sender.statistics().fallbacks["lent_busy"] == 5
        for _ in range(_MOST_USES + 5):
            assert shows(await channel.receiver.recv(), 1)


async def test_it_outlives_the_channel(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        tensor = await lend(channel, 1)
        await channel.sender.send(tensor)
        received = await channel.receiver.recv()
    tensor.fill_(2)
    assert shows(received, 2)
    with pytest.raises(ClosedError):
        await channel.sender.empty(MIB)
    with pytest.raises(ClosedError):
        await channel.sender.reclaim(tensor)


# When there is no room --------------------------------------------------------------------------------------------------


async def test_without_room_it_is_an_ordinary_tensor(open_channel: OpenChannel) -> None:
    """Nothing waits for the arena. Sending it copies it, and the statistics say why."""
    async with open_channel() as channel:
        tensors = [await lend(channel, number) for number in range(ARENA.slots + 1)]
        assert channel.sender.statistics().fallbacks["arena_full"] == 1
        tensors[-1].fill_(7)
        await channel.sender.send(tensors[-1])
        received = await channel.receiver.recv()
        tensors[-1].fill_(8)
        assert shows(received, 7)
        await channel.sender.reclaim(tensors[-1])
        huge = await channel.sender.empty(ARENA.capacity + 1, torch.uint8)
        assert huge.shape == (ARENA.capacity + 1,)
        assert channel.sender.statistics().fallbacks["larger_than_arena"] == 1


async def test_small_ones_and_channels_without_an_arena(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        small = (await channel.sender.empty(100)).fill_(1)
        none = await channel.sender.empty((0, 5))
        assert channel.slots_used == 0
        await channel.sender.send([small, none])
        received = await channel.receiver.recv()
        assert (received[0].sum(), received[1].shape) == (100, (0, 5))
    async with open_channel(arena=None) as channel:
        tensor = await lend(channel, 1)
        await channel.sender.send(tensor)
        assert shows(await channel.receiver.recv(), 1)
        await channel.sender.reclaim(tensor)


async def test_an_arena_in_dev_shm_is_reserved_first(open_channel: OpenChannel) -> None:
    async with open_channel(backing="shm") as channel:
        tensor = await lend(channel, 1, 2 * MIB)
        arena = channel.sender._arena
        assert arena is not None and arena.reserved >= 2 * MIB
        await channel.sender.send(tensor)
        received = await channel.receiver.recv()
        assert in_arena(channel.receiver, received)
        assert shows(received, 1)


# Cancelling, losing, reclaiming -----------------------------------------------------------------------------------------


async def test_a_send_of_it_that_is_cancelled_gives_it_back(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        count = fill_ring(channel.sender)
        tensor = await lend(channel, 1)
        sending = asyncio.create_task(channel.sender.send(tensor))
        await turns(5)
        reclaiming = asyncio.create_task(channel.sender.reclaim(tensor))
        await turns(5)
        assert not reclaiming.done()
        await cancelled(sending)
        async with asyncio.timeout(PATIENCE):
            await reclaiming
        assert lent_bytes(channel) == 0
        for _ in range(count):
            await channel.receiver.recv()
        await channel.sender.send(tensor)
        assert shows(await channel.receiver.recv(), 1)


async def test_reclaim_waits_for_all_readers_and_messages(open_channel: OpenChannel) -> None:
    async with open_channel(2, arena=SMALL_SLOTS) as channel:
        tensor = await lend(channel, 1)
        await channel.sender.reclaim(tensor)  # never sent
        await channel.sender.send(tensor)
        await channel.sender.send(tensor)
        reclaiming = asyncio.create_task(channel.sender.reclaim(tensor[5:]))
        received: list[Any] = []
        for receiver in channel.receivers:
            for _ in range(2):
                received.append(await receiver.recv())
                await turns(5)
                assert not reclaiming.done()
        while received:
            assert not reclaiming.done()
            received.pop()
            await turns(5)
        async with asyncio.timeout(PATIENCE):
            await reclaiming
        tensor.fill_(2)
        await channel.sender.send(tensor)
        assert shows(await channel.receivers[0].recv(), 2)


@pytest.mark.parametrize("waits_for", ["readers", "a breath", "frame budget"])
async def test_reclaim_waits_for_sends_under_way(waits_for: str) -> None:
    """However far they have come: they read the memory when they come to it."""
    readers: list[Receiver] = []
    # A slot is 1 MiB, so that only one message can be under way with it; the next are copied.
    async with Sender(1, arena=ARENA, ring_bytes=RING_BYTES, frame_budget=MIB) as sender:
        if waits_for != "readers":
            readers.append(Receiver(sender.handle, 0))
            await readers[0].start()
        tensor = await sender.empty(MIB, torch.uint8)
        tensor.fill_(1)
        sends = []
        if waits_for == "frame budget":
            fillers = [await sender.empty(MIB, torch.uint8) for _ in range(ARENA.slots - 1)]
            for _ in range(2):
                await sender.send(tensor)
            sends.append(asyncio.create_task(sender.send(tensor)))
            await turns(5)
            del fillers
        elif waits_for == "a breath":
            sender._credit = 0
            sends.append(asyncio.create_task(sender.send(tensor)))  # and the reclaim in the same turn
        else:
            sends.append(asyncio.create_task(sender.send(tensor)))
            await turns(3)
        assert not sends[0].done()
        count = 3 if waits_for == "frame budget" else 1
        reclaiming = asyncio.create_task(sender.reclaim(tensor))
        reclaiming.add_done_callback(lambda _: tensor.fill_(9))
        await turns(3)
        assert not reclaiming.done()
        if waits_for == "readers":
            readers.append(Receiver(sender.handle, 0))
            await readers[0].start()
        async with asyncio.timeout(PATIENCE):
            for _ in range(count):
                received = await readers[0].recv()
                assert shows(received, 1)
                del received
            await reclaiming
            await asyncio.gather(*sends)
        await readers[0].aclose()


async def test_a_reclaim_that_timed_out_says_who_holds_it(open_channel: OpenChannel) -> None:
    async with open_channel(2) as channel:
        tensor = await lend(channel, 1)
        await channel.sender.send(tensor)
        received = [await receiver.recv() for receiver in channel.receivers]
        del received[0]
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.01):
                await channel.sender.reclaim(tensor)
        (note,) = caught.value.__cause__.__notes__  # type: ignore[union-attr]
        assert "spans held by rank: {0: 0, 1: 1}" in note


async def test_a_reclaim_ends_with_the_channel(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        tensor = await lend(channel, 1)
        await channel.sender.send(tensor)
        received = await channel.receiver.recv()
        reclaiming = asyncio.create_task(channel.sender.reclaim(tensor))
        await turns(5)
        await channel.sender.aclose()
        with pytest.raises(ClosedError):
            async with asyncio.timeout(PATIENCE):
                await reclaiming
        assert shows(received, 1)


async def test_two_uses_are_both_kept_from_reuse_by_a_stream(open_channel: OpenChannel) -> None:
    """The receiver finds every span that a tensor's memory belongs to, and not only one of them."""
    async with open_channel(arena=SMALL_SLOTS) as channel:
        tensor = await lend(channel, 1)
        await channel.sender.send(tensor)
        await channel.sender.send(tensor[100:])
        received = [await channel.receiver.recv() for _ in range(2)]
        ledger = channel.receiver._ledger
        assert ledger is not None
        assert len(ledger.find(received[0].data_ptr())) == 1
        assert len(ledger.find(received[1].data_ptr())) == 2

"""Where messages travel: through the ring, the arena, or as frames; in order, unchanged, and counted."""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from aioarena import ArenaConfig, Receiver, Sender
from aioarena._codec import _DTYPES
from tests.conftest import ARENA, PATIENCE, RING_BYTES, OpenChannel
from tests.fronts.support import filled, in_arena, shows, turns, until

MIN_BYTES = ARENA.min_bytes


@dataclass(frozen=True)
class Path:
    """A way for a message to travel.

    Attributes:
        sizes: Bytes of each buffer.
        arena: Whether most bytes take the arena; else frames.
        options: Of the sender.
    """

    sizes: tuple[int, ...]
    arena: bool = False
    frames: bool = False
    options: dict[str, Any] = field(default_factory=dict)


PATHS = {
    "ring": Path((1000, 0, 7)),
    "arena": Path((100_000,), arena=True),
    "arena, copied in threads": Path((3 << 20,), arena=True),
    "frame": Path((300_000,), frames=True, options={"arena": None}),
    "frame, copied in threads": Path((3 << 20,), frames=True, options={"arena": None}),
    "larger than the arena": Path((5 << 20,), frames=True),
    "some too many": Path((1 << 20,) * 6, arena=True, frames=True),
    # More inline bytes than an eighth of the ring: they travel together, as one buffer.
    "pack": Path((9_000,) * 20, arena=True),
    "pack as a frame": Path((9_000,) * 20, frames=True, options={"arena": None}),
    "pack and arena": Path((9_000,) * 20 + (1 << 20,), arena=True),
    "pack and frame": Path((9_000,) * 20 + (5 << 20,), arena=True, frames=True),
    "everything": Path((10, *(9_000,) * 20, 100_000, 5 << 20, 0, 1 << 20), arena=True, frames=True),
}


def noise(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8).copy()


def torch_of(array: np.ndarray[Any, Any]) -> Any:
    return torch.from_numpy(array)


def gathered(array: np.ndarray[Any, Any]) -> Any:
    """The same bytes, in every other place of a larger tensor."""
    wide = torch.zeros(2 * array.size, dtype=torch.uint8)
    wide[::2] = torch.from_numpy(array)
    return wide[::2]


def strided(array: np.ndarray[Any, Any]) -> Any:
    wide = np.zeros(2 * array.size, np.uint8)
    wide[::2] = array
    return wide[::2]


KINDS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "tensors": torch_of,
    "gathered tensors": gathered,
    "arrays": lambda array: array,
    "gathered arrays": strided,
    "buffers": lambda array: pickle.PickleBuffer(array),
    "parameters": lambda array: torch.nn.Parameter(torch.from_numpy(array), requires_grad=False),
}


def overwrite(part: Any) -> None:
    """What a caller does that reuses its memory."""
    if isinstance(part, torch.Tensor):
        part.data.fill_(0xEE)
    else:
        np.asarray(part)[...] = 0xEE


def as_bytes(part: Any) -> bytes:
    return bytes(part.numpy().tobytes() if isinstance(part, torch.Tensor) else memoryview(part))


def check_path(sender: Sender, path: Path) -> None:
    """See that the message went where the test wanted it."""
    statistics = sender.statistics()
    total = sum(path.sizes)
    assert bool(statistics.arena_bytes) is path.arena
    assert bool(statistics.frame_bytes) is path.frames
    if path.arena or path.frames:
        assert statistics.arena_bytes + statistics.frame_bytes >= 0.9 * total
        assert statistics.ring_bytes < 5000
    else:
        assert statistics.ring_bytes >= total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PATHS)
async def test_the_caller_may_overwrite_its_memory_once_send_returned(
    open_channel: OpenChannel, name: str, kind: str
) -> None:
    """On every path: the message keeps the bytes that were there."""
    path = PATHS[name]
    async with open_channel(2, **path.options) as channel:
        originals = [noise(size, index) for index, size in enumerate(path.sizes)]
        message = [KINDS[kind](original.copy()) for original in originals]
        await channel.sender.send(message)
        for part in message:
            overwrite(part)
        check_path(channel.sender, path)
        for receiver in channel.receivers:
            received = await receiver.recv()
            assert [as_bytes(part) == original.tobytes() for part, original in zip(received, originals, strict=True)] == [
                True
            ] * len(originals)


@pytest.mark.parametrize("name", PATHS)
async def test_send_nowait_takes_the_same_paths(open_channel: OpenChannel, name: str) -> None:
    path = PATHS[name]
    async with open_channel(**path.options) as channel:
        originals = [noise(size, index) for index, size in enumerate(path.sizes)]
        message = [torch.from_numpy(original.copy()) for original in originals]
        channel.sender.send_nowait(message)
        for part in message:
            overwrite(part)
        check_path(channel.sender, path)
        received = await channel.receiver.recv()
        assert all(as_bytes(part) == original.tobytes() for part, original in zip(received, originals, strict=True))


async def test_large_pickled_bytes_leave_the_ring(open_channel: OpenChannel) -> None:
    """Text and bytes inside of an object, too."""
    async with open_channel() as channel:
        message = {"text": "ü" * 100_000, "data": b"x" * 100_000}
        await channel.sender.send(message)
        assert await channel.receiver.recv() == message
        statistics = channel.sender.statistics()
        assert statistics.arena_bytes > 300_000
        assert statistics.ring_bytes < 1000


async def test_a_large_tensor_requiring_grad_goes_through_the_arena(open_channel: OpenChannel) -> None:
    """With the pickled bytes that torch makes of it."""
    async with open_channel() as channel:
        await channel.sender.send(torch.ones(100_000, requires_grad=True))
        result = await channel.receiver.recv()
        assert result.requires_grad
        assert result.sum() == 100_000
        assert channel.sender.statistics().arena_bytes >= 400_000


# Every dtype, at every size, on every path ----------------------------------------------------------------------------


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("nbytes", [256, MIN_BYTES, 600_000], ids=["ring", "large", "copied in threads"])
async def test_every_dtype_on_every_path(open_channel: OpenChannel, arena: bool, nbytes: int) -> None:
    config = ArenaConfig(slots=100, slot_bytes=1 << 20, min_bytes=MIN_BYTES) if arena else None
    async with open_channel(arena=config, ring_bytes=1 << 20) as channel:
        sent = {name: torch.from_numpy(noise(nbytes)).view(dtype) for name, dtype in _DTYPES.items()}
        assert len(sent) > 20
        await channel.sender.send(sent)
        received = await channel.receiver.recv()
        for name, tensor in received.items():
            assert tensor.dtype is _DTYPES[name]
            assert tensor.view(torch.uint8).numpy().tobytes() == noise(nbytes).tobytes(), name
            assert tensor.data_ptr() % min(8, tensor.element_size()) == 0
            if arena and nbytes >= MIN_BYTES:
                assert in_arena(channel.receiver, tensor)
                assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("large", [False, True])
async def test_odd_shapes_in_one_message(open_channel: OpenChannel, large: bool) -> None:
    """With tensors of 3 and 7 bytes in between; and no large one falls back without a word."""
    length = 200_000 if large else 20
    base = torch.arange(8 * length, dtype=torch.float64)
    odd = {
        "empty": torch.empty(0),
        "empty in the middle": torch.empty(3, 0, 5),
        "0-dim": torch.tensor(2.5),
        "column": torch.arange(8).view(1, 8)[:, 3],
        "stray stride": base.as_strided((1, length), (3 * length + 1, 1)),
        "transposed": base[: 4 * length].view(4, -1).T,
        "gaps": base.view(8, -1)[::3],
        "expanded": base[:length].expand(1 << 20, length),
        "complex": torch.view_as_complex(base[: 2 * length].view(-1, 2)),
    }
    message: dict[str, torch.Tensor] = {}
    for name, tensor in odd.items():
        message |= {f"3 before {name}": filled(3, 3), name: tensor, f"7 after {name}": filled(7, 7)}
    async with open_channel(arena=ArenaConfig(slots=128, slot_bytes=1 << 18, min_bytes=MIN_BYTES)) as channel:
        await channel.sender.send(message)
        received = await channel.receiver.recv()
        assert list(received) == list(message)
        for name, tensor in message.items():
            result = received[name]
            assert (result.shape, result.dtype) == (tensor.shape, tensor.dtype)
            first = (slice(2),) if name == "expanded" else ()
            assert torch.equal(result[first], tensor[first]), name
            if large and tensor.dim() and tensor.shape[-1] > 100:
                assert in_arena(channel.receiver, result), name
                assert result.data_ptr() % 64 == 0
        assert torch.equal(received["complex"] * 2, odd["complex"] * 2)
        assert channel.sender.statistics().frame_bytes == 0


async def test_a_message_of_empty_tensors(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        await channel.sender.send([torch.empty(0), torch.empty(2, 0, dtype=torch.bfloat16), np.empty(0, np.int8)])
        first, second, third = await channel.receiver.recv()
        assert (first.shape, second.shape, third.shape) == ((0,), (2, 0), (0,))


# Order ----------------------------------------------------------------------------------------------------------------


def numbered(number: int, size: int) -> tuple[int, torch.Tensor]:
    return number, filled(number % 251, size)


async def receive_numbered(receiver: Receiver, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        got, tensor = await receiver.recv()
        assert got == number
        assert tensor.numel() == size
        assert shows(tensor, number % 251)


async def test_placements_mixed_on_one_channel_keep_order(open_channel: OpenChannel) -> None:
    pick = random.Random(7)
    sizes = [pick.choice([0, 100, 9_000, 20_000, 100_000, 600_000, 3 << 20, 5 << 20]) for _ in range(100)]
    async with open_channel(2) as channel, asyncio.timeout(PATIENCE):
        async with asyncio.TaskGroup() as group:
            for receiver in channel.receivers:
                group.create_task(receive_numbered(receiver, sizes))
            for number, size in enumerate(sizes):
                await channel.sender.send(numbered(number, size))
        statistics = channel.sender.statistics()
        assert statistics.arena_bytes
        assert statistics.frame_bytes
        assert statistics.ring_bytes
    assert channel.slots_used == 0


async def test_concurrent_senders_are_served_in_the_order_of_their_calls(open_channel: OpenChannel) -> None:
    """Whatever sizes they send; and all readers see one order."""
    pick = random.Random(8)
    calls: list[tuple[int, int]] = []

    async def send_some(sender: Sender, who: int) -> None:
        for number in range(40):
            size = pick.choice([10, 1000, 100_000, 1 << 20, 5 << 20] if number % 4 == 0 else [10, 1000])
            calls.append((who, number))
            await sender.send((who, number, filled(who, size)))
            await turns(pick.randrange(3))  # others get between

    async def receive_all(receiver: Receiver) -> list[tuple[int, int]]:
        order = []
        for _ in range(5 * 40):
            who, number, tensor = await receiver.recv()
            assert shows(tensor, who)
            order.append((who, number))
        return order

    async with open_channel(2) as channel, asyncio.timeout(PATIENCE):
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(receive_all(receiver)) for receiver in channel.receivers]
            for who in range(5):
                group.create_task(send_some(channel.sender, who))
        assert [task.result() for task in reading] == [calls, calls]


async def test_many_sends_at_once_keep_order(open_channel: OpenChannel) -> None:
    """Also those that give other tasks a turn on the way."""
    async with open_channel(ring_bytes=1 << 20) as channel:
        await asyncio.gather(*[channel.sender.send(number) for number in range(500)])
        assert [channel.receiver.recv_nowait() for _ in range(500)] == list(range(500))


async def test_many_receives_at_once_keep_order(open_channel: OpenChannel) -> None:
    async with open_channel(ring_bytes=1 << 20) as channel:
        for number in range(500):
            await channel.sender.send(number)
        assert await asyncio.gather(*[channel.receiver.recv() for _ in range(500)]) == list(range(500))


async def test_receives_that_wait_are_served_in_the_order_of_their_calls(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        waiting = [asyncio.create_task(channel.receiver.recv()) for _ in range(5)]
        await turns(2)  # until they wait
        for number in range(5):
            await channel.sender.send(number)
        assert await asyncio.gather(*waiting) == list(range(5))


@pytest.mark.parametrize("size", [100, 300_000])
async def test_sends_before_the_readers_came_keep_order(open_channel: OpenChannel, size: int) -> None:
    """They go on in any order once the last reader is there; those with frames, too, are found by the readers."""
    sender = Sender(1, arena=None, ring_bytes=RING_BYTES)
    async with sender, asyncio.timeout(PATIENCE):
        # Futures at addresses in no order, as in a process that has run for a while.
        loop = asyncio.get_running_loop()
        holes = [loop.create_future() for _ in range(300)]
        random.Random(1).shuffle(holes)
        del holes[::2]
        sending = [asyncio.create_task(sender.send(numbered(number, size))) for number in range(100)]
        await turns(2)  # until they wait
        async with Receiver(sender.handle, 0) as receiver:
            await receive_numbered(receiver, [size] * 100)
        await asyncio.gather(*sending)


async def test_one_send_does_not_overtake_a_larger_one(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        large = asyncio.create_task(channel.sender.send(filled(1, 4 << 20)))
        await turns(1)  # its copy is under way
        await channel.sender.send("small")
        assert large.done()
        assert shows(await channel.receiver.recv(), 1)
        assert await channel.receiver.recv() == "small"


# Sizes that are too large for something -------------------------------------------------------------------------------


async def test_a_buffer_larger_than_a_slot_takes_several(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        await channel.sender.send(filled(1, (2 << 20) + 1))
        tensor = await channel.receiver.recv()
        assert in_arena(channel.receiver, tensor)
        assert channel.slots_used == 3


async def test_a_buffer_as_large_as_the_arena_fits(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        for number in range(3):
            await channel.sender.send(filled(number, 4 << 20))
            assert shows(await channel.receiver.recv(), number)
        assert channel.sender.statistics().frame_bytes == 0


async def test_a_message_larger_than_ring_and_arena_together(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        message = [filled(number, 1 << 20) for number in range(12)]
        await channel.sender.send(message)
        for number, tensor in enumerate(await channel.receiver.recv()):
            assert shows(tensor, number)


async def test_without_an_arena_everything_passes(open_channel: OpenChannel) -> None:
    async with open_channel(arena=None) as channel:
        await channel.sender.send({"a": filled(1, 5 << 20), "b": 2})
        message = await channel.receiver.recv()
        assert shows(message["a"], 1)
        assert message["b"] == 2
        message["a"].add_(1)  # memory of its own
        assert channel.receiver.statistics().pinned == "no"
        assert channel.sender.statistics().slots == 0


async def test_thousands_of_buffers_in_one_message(open_channel: OpenChannel) -> None:
    """More than the ring could hold the table of."""
    async with open_channel() as channel:
        await channel.sender.send([torch.tensor(number) for number in range(5000)])
        assert [tensor.item() for tensor in await channel.receiver.recv()] == list(range(5000))


async def test_min_bytes_larger_than_the_ring(open_channel: OpenChannel) -> None:
    """What does not fit into the ring leaves it anyway."""
    async with open_channel(arena=ArenaConfig(slots=4, slot_bytes=1 << 20, min_bytes=1 << 30)) as channel:
        await channel.sender.send([filled(1, 200_000), "text" * 100_000])
        tensor, text = await channel.receiver.recv()
        assert shows(tensor, 1)
        assert text == "text" * 100_000


# Counters -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "arena", "expected"),
    [
        (lambda: filled(1, 100), ARENA, {"below_min_bytes": 1}),
        (lambda: [filled(1, 100)] * 2 + [filled(2, 100)], ARENA, {"below_min_bytes": 2}),
        (lambda: filled(1, 5 << 20), ARENA, {"larger_than_arena": 1}),
        (lambda: [filled(n) for n in range(6)], ARENA, {"arena_full": 2}),
        (lambda: filled(1, 200_000), None, {"arena_off": 1}),
        (lambda: [torch.ones(3, requires_grad=True), torch.ones(1)], ARENA, {"not_divertible": 1, "below_min_bytes": 1}),
        (lambda: [torch.ones(3).to_sparse()], ARENA, {"not_divertible": 1, "below_min_bytes": 2}),
        (lambda: [filled(1), {"step": 1}], ARENA, {}),
        (lambda: {"step": 1}, ARENA, {}),
        (lambda: "x" * 200_000, None, {"arena_off": 1}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*invariant")
async def test_each_reason_to_fall_back_is_counted(
    open_channel: OpenChannel, message: Callable[[], object], arena: ArenaConfig | None, expected: dict[str, int]
) -> None:
    async with open_channel(arena=arena) as channel:
        for times in (1, 2):
            await channel.sender.send(message())
            await channel.receiver.recv()
            counted = {reason: count for reason, count in channel.sender.statistics().fallbacks.items() if count}
            assert counted == {reason: times * count for reason, count in expected.items()}
        assert set(channel.sender.statistics().fallbacks) == {
            "arena_full",
            "larger_than_arena",
            "below_min_bytes",
            "arena_off",
            "not_divertible",
            "lent_busy",
        }


async def test_a_cancelled_send_counts_nothing(open_channel: OpenChannel) -> None:
    async with open_channel(frame_budget=1 << 20) as channel:
        await channel.sender.send([filled(1), filled(2, 5 << 20)])
        before = channel.sender.statistics()
        task = asyncio.create_task(channel.sender.send([filled(1), filled(2, 100), filled(3, 5 << 20)]))
        await until(lambda: channel.sender.statistics().waits)
        task.cancel()
        await asyncio.wait([task])
        after = channel.sender.statistics()
        for name in ("messages", "ring_bytes", "arena_bytes", "frame_bytes", "fallbacks", "slots_used"):
            assert getattr(after, name) == getattr(before, name), name
        await channel.receiver.recv()


async def test_the_senders_counters(open_channel: OpenChannel) -> None:
    async with open_channel(2) as channel:
        quiet = channel.sender.statistics()
        assert (quiet.messages, quiet.slots, quiet.slots_used, quiet.slots_peak, quiet.waits) == (0, 4, 0, 0, 0)
        await channel.sender.send([filled(1, 2 << 20), filled(2, 5 << 20), filled(3, 100)])
        await channel.sender.send("small")
        sent = channel.sender.statistics()
        assert (sent.messages, sent.arena_bytes, sent.frame_bytes) == (2, 2 << 20, 5 << 20)
        assert 100 < sent.ring_bytes < 1000
        assert sent.copy_seconds > 0
        assert (sent.slots_used, sent.spans_held, sent.frames_pending) == (2, 1, 5 << 20)
        assert sent.ring_capacity == RING_BYTES
        assert 0 < sent.ring_used < 1000
        for rank, reader in enumerate(sent.readers):
            assert (reader.rank, reader.state, reader.messages_behind) == (rank, "joined", 2)
            assert reader.bytes_behind == sent.ring_used
            assert reader.pid is not None
        assert sent.foreign_messages == 0
        held = [await receiver.recv() for receiver in channel.receivers]
        await channel.receiver.recv()
        received = channel.sender.statistics()
        assert [reader.messages_behind for reader in received.readers] == [0, 1]
        assert (received.slots_used, received.frames_pending) == (2, 0)
        assert [reader.spans_held for reader in received.readers] == [1, 1]
        held.clear()
        done = channel.sender.statistics()
        assert (done.slots_used, done.spans_held, done.slots_peak) == (0, 0, 2)
        assert [reader.spans_held for reader in done.readers] == [0, 0]


async def test_the_receivers_counters(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        receiver = channel.receiver
        await channel.sender.send([filled(1, 2 << 20), filled(2, 5 << 20), filled(3, 100)])
        assert receiver.statistics().bytes_behind == channel.sender.statistics().ring_used
        message = await receiver.recv()
        statistics = receiver.statistics()
        assert (statistics.messages, statistics.decode_errors, statistics.bytes_behind) == (1, 0, 0)
        assert (statistics.arena_bytes, statistics.frame_bytes) == (2 << 20, 5 << 20)
        assert (statistics.spans_held, statistics.bytes_held, statistics.spans_released) == (1, 2 << 20, 0)
        assert 0 < statistics.oldest_held < PATIENCE
        assert (statistics.spans_pending, statistics.spans_quarantined, statistics.pinned) == (0, 0, "no")
        parks = statistics.parks
        del message
        waiting = asyncio.create_task(receiver.recv())
        await until(lambda: receiver.statistics().parks > parks)
        await channel.sender.send(1)
        await waiting
        statistics = receiver.statistics()
        assert (statistics.spans_held, statistics.bytes_held, statistics.spans_released) == (0, 0, 1)
        assert (statistics.messages, statistics.oldest_held) == (2, 0.0)


async def test_sends_that_wait_are_counted(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        count = 0
        while not channel.sender.statistics().waits:
            last = asyncio.create_task(channel.sender.send(b"x" * 4000))
            await turns(2)  # sent, or waiting
            count += 1
        for _ in range(count):
            await channel.receiver.recv()
        await last
        assert channel.sender.statistics().waits == 1
        assert channel.sender.statistics().messages == count


async def test_wakeups_are_counted_and_few(open_channel: OpenChannel) -> None:
    """Nobody is woken who is not parked, and nobody twice."""
    async with open_channel() as channel:
        waiting = asyncio.create_task(channel.receiver.recv())
        await until(lambda: channel.receiver.statistics().parks)
        before = channel.sender.statistics().wakeups
        for number in range(50):
            channel.sender.send_nowait(number)
        assert channel.sender.statistics().wakeups == before + 1
        assert await waiting == 0


# The log of fallbacks -------------------------------------------------------------------------------------------------


async def test_the_log_names_who_fills_the_arena(open_channel: OpenChannel, caplog: pytest.LogCaptureFixture) -> None:
    """Once a minute at most, and for each reason by itself."""
    async with open_channel(2, name="tight") as channel:
        log = channel.sender._log_fallback
        offset = 0.0
        channel.sender._log_fallback = lambda placed, now, held: log(placed, now + offset, held)  # type: ignore[assignment]
        caplog.set_level(logging.WARNING, "aioarena")
        hoard = []
        for number in range(6):
            await channel.sender.send(filled(number))
            hoard.append(await channel.receivers[0].recv())
            await channel.receivers[1].recv()
        (line,) = caplog.messages
        assert "'tight'" in line
        assert f"no free span for {1 << 20} bytes" in line
        assert "4 of 4 slots are in use" in line
        assert "0: 4" in line
        assert "1: 4" not in line
        assert "drop or clone" in line
        assert "ArenaConfig(slots=" in line
        caplog.clear()
        await channel.sender.send(filled(1, 5 << 20))
        (line,) = caplog.messages
        assert f"{5 << 20} bytes do not fit into the arena of {4 << 20} bytes" in line
        assert "ArenaConfig(slots=" in line
        caplog.clear()
        offset = 59.0
        await channel.sender.send(filled(7))
        assert caplog.messages == []
        offset = 61.0
        await channel.sender.send(filled(8))
        assert len(caplog.messages) == 1
        assert "(2 more since the last such line)" in caplog.messages[0]


async def test_no_arena_is_a_choice_and_no_reason_to_log(
    open_channel: OpenChannel, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_channel(arena=None) as channel:
        await channel.sender.send(filled(1))
        await channel.receiver.recv()
        assert caplog.messages == []

"""What users see first: which arguments are refused, what objects look like, and what errors tell to do."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import pickle
import re
from typing import Any

import pytest

import aioarena
from aioarena import (
    ArenaConfig,
    ArenaError,
    BusyError,
    ClosedError,
    DecodeError,
    EncodeError,
    EndOfChannel,
    HandleError,
    NoSpaceError,
    PeerLostError,
    ReaderLostError,
    Receiver,
    Sender,
    SenderLostError,
    WouldBlock,
    WrongContextError,
)
from tests.conftest import ARENA, RING_BYTES, OpenChannel
from tests.fronts.support import fill_ring, filled, no_collector, parked, shows, turns, until

SMALL_CHANNEL: dict[str, Any] = {"arena": ARENA, "ring_bytes": RING_BYTES}


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"readers": 0}, ValueError, "readers must be at least 1, not 0"),
        ({"readers": -1}, ValueError, "readers"),
        ({"readers": True}, TypeError, "readers must be an int, not bool"),
        ({"readers": 1.0}, TypeError, "readers must be an int, not float"),
        ({"readers": "1"}, TypeError, "readers"),
        ({"ring_bytes": 1000}, ValueError, "ring_bytes must be at least 65536 .*, not 1000"),
        ({"ring_bytes": 1 << 32}, ValueError, "ring_bytes .* below 4 GiB"),
        ({"backing": "disk"}, ValueError, 'backing must be "memfd" or "shm", not \'disk\''),
        ({"on_reader_lost": "ignore"}, ValueError, 'on_reader_lost must be "raise" or "continue"'),
        ({"wake": "eventfd"}, ValueError, 'wake must be "zmq" or "pipe", not \'eventfd\''),
        ({"arena": 1 << 30}, TypeError, "arena must be an ArenaConfig or None, not int"),
        ({"no_such_option": 1}, TypeError, "no_such_option"),
    ],
    ids=str,
)
def test_senders_refuse(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Before anything is created; the fixtures look for what was."""
    with no_collector(), pytest.raises(error, match=message):
        Sender(**{"readers": 1, **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 2}, ValueError, "rank must be from 0 to 1, not 2: the channel has 2 readers"),
        ({"rank": -1}, ValueError, "rank must be from 0 to 1"),
        ({"rank": True}, TypeError, "rank must be an int, not bool"),
        ({"rank": "0"}, TypeError, "rank must be an int, not str"),
        ({"handle": "handle"}, TypeError, "handle must be the Handle of a Sender, not str"),
        ({"spin": -0.5}, ValueError, "spin must not be negative, not -0.5"),
        ({"pin": "on"}, ValueError, 'pin must be "auto" or "off", not \'on\''),
    ],
    ids=str,
)
def test_receivers_refuse(options: dict[str, Any], error: type[Exception], message: str) -> None:
    sender = Sender(2, **SMALL_CHANNEL)
    with no_collector(), pytest.raises(error, match=message):
        Receiver(**{"handle": sender.handle, "rank": 0, **options})


@pytest.mark.parametrize("end", [Sender, Receiver])
def test_options_are_keyword_only(end: type) -> None:
    parameters = list(inspect.signature(end).parameters.values())
    positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == {Sender: ["readers"], Receiver: ["handle", "rank"]}[end]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"slots": 0}, ValueError, "ArenaConfig.slots must be at least 1, not 0"),
        ({"slot_bytes": 5000}, ValueError, "ArenaConfig.slot_bytes must be a multiple of 4096, not 5000"),
        ({"min_bytes": 0}, ValueError, "ArenaConfig.min_bytes must be at least 1"),
        ({"slots": 1.5}, TypeError, "ArenaConfig.slots must be an int, not float"),
        ({"min_bytes": True}, TypeError, "ArenaConfig.min_bytes must be an int, not bool"),
    ],
    ids=str,
)
def test_arena_configs_refuse(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ArenaConfig(**options)


def test_arena_config() -> None:
    """2 GiB by default, frozen, and with its capacity."""
    assert ArenaConfig().capacity == 2 << 30
    assert ArenaConfig(slots=3, slot_bytes=8192).capacity == 3 * 8192
    with pytest.raises(dataclasses.FrozenInstanceError):
        ArenaConfig().slots = 3  # type: ignore[misc]


def test_a_channel_larger_than_the_machine_is_refused() -> None:
    """With both numbers and the remedy, in the text and as attributes."""
    with pytest.raises(NoSpaceError, match=r"ArenaConfig|arena=None") as caught:
        Sender(1, arena=ArenaConfig(slots=1 << 9, slot_bytes=1 << 30))
    assert caught.value.needed > 1 << 39 > caught.value.available
    assert isinstance(caught.value, OSError)
    assert re.search(r"up to 512\.0 GiB, .* has \d+\.\d [GM]iB left", str(caught.value))


async def test_any_name_will_do(open_channel: OpenChannel) -> None:
    for name in ("", "a/b", "ünïcode", "x" * 1000, "with space"):
        async with open_channel(name=name) as channel:
            assert repr(name) in repr(channel.sender)
            assert channel.sender.handle.name == name
            await channel.sender.send(1)
            assert await channel.receiver.recv() == 1


async def test_the_shm_backing(open_channel: OpenChannel) -> None:
    async with open_channel(2, backing="shm") as channel:
        for number in range(6):
            await channel.sender.send(filled(number))
            for receiver in channel.receivers:
                assert shows(await receiver.recv(), number)


# How things look ------------------------------------------------------------------------------------------------------


async def test_repr_shows_name_and_state() -> None:
    sender = Sender(2, name="steps", **SMALL_CHANNEL)
    receiver = Receiver(sender.handle, 1)
    ends = (sender, receiver)
    assert [repr(end) for end in ends] == ["<Sender 'steps' new>", "<Receiver 'steps' new>"]
    await sender.start()
    await receiver.start()
    assert [repr(end) for end in ends] == ["<Sender 'steps' open>", "<Receiver 'steps' open>"]
    await receiver.aclose()
    await sender.aclose()
    assert [repr(end) for end in ends] == ["<Sender 'steps' closed>", "<Receiver 'steps' closed>"]


def test_names_are_made_up_and_differ() -> None:
    first, second = Sender(1, **SMALL_CHANNEL), Sender(1, **SMALL_CHANNEL)
    assert first.handle.name != second.handle.name


def test_handles_pickle() -> None:
    """And tell nobody who looks at them what it takes to attach."""
    sender = Sender(2, name="steps", **SMALL_CHANNEL)
    handle = pickle.loads(pickle.dumps(sender.handle))
    assert handle == sender.handle
    assert copy.deepcopy(handle) == handle
    assert (handle.name, handle.readers) == ("steps", 2)
    assert handle.nonce.hex() not in repr(handle)
    assert repr(handle.nonce) not in repr(handle)
    assert "steps" in repr(handle)


async def test_a_pickled_handle_attaches(open_channel: OpenChannel) -> None:
    async with open_channel(2) as channel:
        await channel.receivers[1].aclose()
        async with Receiver(pickle.loads(pickle.dumps(channel.sender.handle)), 1) as receiver:
            await channel.sender.send(1)
            assert await receiver.recv() == 1


def test_a_handle_of_another_version_is_refused_by_name() -> None:
    handle = Sender(1, **SMALL_CHANNEL).handle
    data = pickle.dumps(dataclasses.replace(handle, version=handle.version + 1))
    with pytest.raises(HandleError, match=r"layout version .*: install one version of aioarena at both ends") as caught:
        pickle.loads(data)
    assert (caught.value.expected, caught.value.found) == (handle.version, handle.version + 1)


async def test_a_damaged_handle_is_refused() -> None:
    """Whatever is wrong with it, the error says so, and nothing of another channel is touched."""
    sender, other = Sender(1, **SMALL_CHANNEL), Sender(1, **SMALL_CHANNEL)
    handle = sender.handle
    damaged = [
        dataclasses.replace(handle, nonce=bytes(16)),
        dataclasses.replace(handle, control=other.handle.control),
        dataclasses.replace(handle, control=dataclasses.replace(handle.control, inode=1)),
        dataclasses.replace(handle, control=dataclasses.replace(handle.control, nbytes=4096)),
        dataclasses.replace(handle, arena=None),
        dataclasses.replace(handle, layout=dataclasses.replace(handle.layout, readers=2)),
    ]
    for bad in damaged:
        with pytest.raises(HandleError):
            await Receiver(bad, 0).start()


async def test_statistics_are_frozen_snapshots(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        for end in (channel.sender, channel.receiver):
            before = end.statistics()
            with pytest.raises(dataclasses.FrozenInstanceError):
                before.messages = 5  # type: ignore[misc]
            await channel.sender.send(1)
            channel.receiver.recv_nowait()
            assert (before.messages + 1, before.messages) == (end.statistics().messages, before.messages)


def test_the_public_names_exist_and_are_documented() -> None:
    for name in aioarena.__all__:
        assert inspect.getdoc(getattr(aioarena, name)), name


def test_errors_are_sorted_by_what_to_do() -> None:
    assert issubclass(ReaderLostError, PeerLostError)
    assert issubclass(SenderLostError, PeerLostError)
    for error in (ClosedError, EndOfChannel, PeerLostError, BusyError, WouldBlock, EncodeError, DecodeError, HandleError):
        assert issubclass(error, ArenaError)
    assert issubclass(EncodeError, TypeError)
    assert issubclass(NoSpaceError, OSError)
    assert issubclass(WrongContextError, RuntimeError)


# Names that users of vLLM's MessageQueue know -------------------------------------------------------------------------


async def test_enqueue_and_dequeue_are_the_same_calls(open_channel: OpenChannel) -> None:
    assert Sender.enqueue is Sender.send
    assert Receiver.dequeue is Receiver.recv
    async with open_channel() as channel:
        await channel.sender.enqueue({"step": 1})
        assert await channel.receiver.dequeue() == {"step": 1}


async def test_wait_ready(open_channel: OpenChannel) -> None:
    """Until every rank was taken, and not a moment longer."""
    async with Sender(2, **SMALL_CHANNEL) as sender:
        waiting = [asyncio.create_task(sender.wait_ready()) for _ in range(2)]
        async with Receiver(sender.handle, 1):
            await turns(5)  # one is not enough
            assert not any(task.done() for task in waiting)
            async with Receiver(sender.handle, 0):
                await asyncio.gather(*waiting)
                await sender.wait_ready()


# WouldBlock, for each reason ------------------------------------------------------------------------------------------


async def test_send_nowait_without_readers_says_who_is_missing() -> None:
    async with Sender(3, **SMALL_CHANNEL) as sender, Receiver(sender.handle, 1):
        with pytest.raises(WouldBlock, match=r"waiting for readers \[0, 2\] to attach"):
            sender.send_nowait(1)
        assert sender.statistics().messages == 0


@pytest.mark.parametrize("size", [100, 100_000, 5 << 20], ids=["ring", "arena", "frame"])
async def test_send_nowait_without_room_says_who_is_behind(open_channel: OpenChannel, size: int) -> None:
    async with open_channel(2) as channel:
        count = fill_ring(channel.sender)
        for _ in range(count):
            await channel.receivers[0].recv()
        with pytest.raises(WouldBlock, match=rf"no room: reader 1 \(pid \d+\).* {count} messages"):
            channel.sender.send_nowait(filled(1, size))
        assert channel.claimed_spans == 0
        assert channel.slots_used == 0
        assert channel.sender.statistics().messages == count


async def test_send_nowait_without_frame_budget(open_channel: OpenChannel) -> None:
    async with open_channel(arena=None, frame_budget=450_000) as channel:
        channel.sender.send_nowait(filled(1, 300_000))
        with pytest.raises(WouldBlock, match="no room"):
            channel.sender.send_nowait(filled(2, 300_000))
        assert shows(await channel.receiver.recv(), 1)
        channel.sender.send_nowait(filled(3, 300_000))
        assert shows(await channel.receiver.recv(), 3)


async def test_send_nowait_does_not_overtake(open_channel: OpenChannel) -> None:
    """While another send is under way there is no way past it."""
    async with open_channel() as channel:
        large = asyncio.create_task(channel.sender.send(filled(1, 4 << 20)))
        await turns(1)  # its copy is under way
        with pytest.raises(WouldBlock, match="busy"):
            channel.sender.send_nowait(2)
        await large
        channel.sender.send_nowait(3)
        assert shows(await channel.receiver.recv(), 1)
        assert await channel.receiver.recv() == 3


async def test_recv_nowait_without_a_message(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        with pytest.raises(WouldBlock, match=r"reader 0 of channel .*: no message"):
            channel.receiver.recv_nowait()
        await channel.sender.send(1)
        assert channel.receiver.recv_nowait() == 1


async def test_recv_nowait_does_not_overtake(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        waiting = asyncio.create_task(channel.receiver.recv())
        await parked(channel.receiver)
        channel.sender.send_nowait("for the one that waits")
        with pytest.raises(WouldBlock, match="another task is receiving"):
            channel.receiver.recv_nowait()
        assert await waiting == "for the one that waits"


async def test_recv_nowait_before_the_frames_are_there(open_channel: OpenChannel) -> None:
    """The message stays, and comes once they are."""
    async with open_channel(arena=None) as channel:
        receiver = channel.receiver
        drain = receiver._wire.drain  # type: ignore[union-attr]
        receiver._wire.drain = lambda: False  # type: ignore[union-attr, method-assign]
        await channel.sender.send(filled(7))
        with pytest.raises(WouldBlock, match="frames of the next message have not arrived yet"):
            receiver.recv_nowait()
        receiver._wire.drain = drain  # type: ignore[union-attr, method-assign]
        got = []

        def try_again() -> bool:
            try:
                got.append(receiver.recv_nowait())
            except WouldBlock:
                return False
            return True

        await until(try_again)
        assert shows(got[0], 7)


async def test_nowait_calls_work_without_ever_turning_the_loop(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        for number in range(1000):
            channel.sender.send_nowait((number, filled(number % 251, [10, 100_000][number % 2])))
            got, tensor = channel.receiver.recv_nowait()
            assert got == number
            assert shows(tensor, number % 251)
            del tensor


@pytest.mark.parametrize("option", ["frame_budget", "stall_after", "linger", "evict_after"])
def test_numbers_are_checked(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must not be negative, not -1"):
        aioarena.Sender(1, **{option: -1})
    with pytest.raises(TypeError, match=f"{option} must be a number, not str"):
        aioarena.Sender(1, **{option: "1"})


def test_names_are_checked() -> None:
    with pytest.raises(TypeError, match="name must be a str or None, not int"):
        aioarena.Sender(1, name=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zero character"):
        aioarena.Sender(1, name="a\0b")

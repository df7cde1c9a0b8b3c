"""A message that does not unpickle: an error for the reader it happens to, and nothing else changes for anybody."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioarena import BusyError, DecodeError, Receiver, WouldBlock
from tests.conftest import PATIENCE, Channel, OpenChannel
from tests.fronts.support import filled, no_collector, parked, shows, turns


class Sabotage(BaseException):
    """No Exception, so that `except Exception` does not see it."""


ERRORS: dict[str, type[BaseException]] = {
    "an exception": ValueError,
    "no exception": Sabotage,
    "a cancellation": asyncio.CancelledError,
    "end of the loop over messages": StopAsyncIteration,
}


def explode(kind: str, tensors: list[torch.Tensor]) -> str:
    """Rebuild a :class:`Bomb`: fails in the tasks of reader 0 only."""
    task = asyncio.current_task()
    assert task is not None
    if task.get_name() == "reader 0":
        raise ERRORS[kind](f"no {kind} today")
    return "rebuilt"


class Bomb:
    """Unpickles at every reader but 0."""

    def __init__(self, kind: str, tensors: list[torch.Tensor] | None = None) -> None:
        self.kind = kind
        self.tensors = tensors or []

    def __reduce__(self) -> Any:
        return explode, (self.kind, self.tensors)


def unimportable() -> tuple[object, Callable[[], None]]:
    """An object whose class only the sender can import, and how the class gets lost."""
    module = types.ModuleType("only_at_the_sender")
    cls = type("Ghost", (), {"__module__": module.__name__})
    module.Ghost = cls  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return cls(), lambda: sys.modules.pop(module.__name__, None) and None


SIZES = {"ring": 100, "arena": 600_000, "frame": 5 << 20}


async def as_reader(rank: int, coroutine: Any) -> Any:
    """Run in a task that bears the reader's name."""
    return await asyncio.create_task(coroutine, name=f"reader {rank}")


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("kind", ["an exception", "no exception"])
async def test_errors_and_messages_alternate(open_channel: OpenChannel, kind: str, private: bool) -> None:
    """Reader 0 sees error, good, error, good ...; reader 1 sees everything; nobody waits, and no slot is lost.

    The error is raised after the two tensors before it in the message were rebuilt, and holds others in its own frames.
    """
    expected = DecodeError if kind == "an exception" else Sabotage
    kept: list[BaseException] = []

    async def read(receiver: Receiver) -> None:
        for number in range(12):
            if receiver.rank == 0:
                with pytest.raises(expected) as caught:
                    await receiver.recv()
                kept.append(caught.value)
            else:
                first, second, third = await receiver.recv()
                assert shows(first, number)
                assert shows(second, number)
                assert third == "rebuilt"
                del first, second, third
            good, tensor = await receiver.recv()
            assert good == number
            assert shows(tensor, number)
            del tensor

    async with open_channel(2, receiver={"private": private}) as channel:
        with no_collector():
            reading = [asyncio.create_task(read(r), name=f"reader {r.rank}") for r in channel.receivers]
            for number in range(12):
                async with asyncio.timeout(PATIENCE):
                    held_by_error = [filled(3, 100_000), filled(4, 100)]
                    await channel.sender.send((filled(number), filled(number, 600_000), Bomb(kind, held_by_error)))
                    await channel.sender.send((number, filled(number, 100_000)))
                    await turns(2)  # readers need not keep up, but may
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*reading)
            # The errors are kept, and with them their tracebacks.
            assert len(kept) == 12
            assert channel.slots_used == 0
        assert [receiver.statistics().decode_errors for receiver in channel.receivers] == [12, 0]
        assert [receiver.statistics().messages for receiver in channel.receivers] == [24, 24]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("nowait", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
async def test_on_every_path(open_channel: OpenChannel, size: int, nowait: bool, waiting: bool) -> None:
    async with open_channel() as channel:

        async def receive() -> Any:
            return channel.receiver.recv_nowait() if nowait and not waiting else await channel.receiver.recv()

        with no_collector():
            reading = asyncio.create_task(receive(), name="reader 0") if waiting else None
            if reading is not None:
                await parked(channel.receiver)
            await channel.sender.send(Bomb("an exception", [filled(1, size)]))
            if reading is None:
                await frames_arrived(channel)
                reading = asyncio.create_task(receive(), name="reader 0")
            await asyncio.wait([reading])
            assert isinstance(reading.exception(), DecodeError)
            assert channel.slots_used == 0
            assert channel.sender.statistics().frames_pending == 0
            assert channel.receiver._wire is not None
            assert not channel.receiver._wire._frames
            await channel.sender.send(filled(2, size))
            assert shows(await channel.receiver.recv(), 2)


async def frames_arrived(channel: Channel) -> None:
    """Until the next message could be received without waiting."""
    receiver = channel.receiver
    while True:
        assert receiver._core is not None
        taken = receiver._core.take()
        if isinstance(taken, bytes) or (taken is not None and receiver._assembler.complete(taken)):
            return
        await turns(1)  # frames travel through sockets


async def test_large_pickled_bytes_are_given_back(open_channel: OpenChannel) -> None:
    """They lie in the arena themselves."""
    async with open_channel() as channel:
        with no_collector():
            await channel.sender.send(["x" * 600_000, Bomb("an exception")])
            assert channel.slots_used == 1
            with pytest.raises(DecodeError) as caught:
                await as_reader(0, channel.receiver.recv())
            assert channel.slots_used == 0
            assert caught.value.__cause__ is not None


async def test_a_class_that_cannot_be_imported(open_channel: OpenChannel) -> None:
    async with open_channel(2) as channel:
        ghost, lose = unimportable()
        await channel.sender.send([filled(1), ghost])
        await channel.sender.send("good")
        lose()
        for receiver in channel.receivers:
            with pytest.raises(DecodeError, match="ModuleNotFoundError: No module named 'only_at_the_sender'"):
                await receiver.recv()
            assert await receiver.recv() == "good"
        assert channel.slots_used == 0


@pytest.mark.parametrize("cut", [1, 10, 50])
async def test_truncated_content(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    async with open_channel() as channel:
        encode = channel.sender._encoder.encode
        with monkeypatch.context() as patch:
            patch.setattr(channel.sender._encoder, "encode", lambda obj: encode(obj)[:-cut])  # type: ignore[index]
            await channel.sender.send({"numbers": list(range(100))})
        await channel.sender.send("good")
        with pytest.raises(DecodeError) as caught:
            await channel.receiver.recv()
        assert isinstance(caught.value.__cause__, Exception)
        assert await channel.receiver.recv() == "good"


async def test_the_error_says_which_message_why_and_what_next(open_channel: OpenChannel) -> None:
    async with open_channel(name="steps") as channel:
        await channel.sender.send("first")
        await channel.receiver.recv()
        await channel.sender.send(Bomb("an exception"))
        with pytest.raises(DecodeError) as caught:
            await as_reader(0, channel.receiver.recv())
        text = str(caught.value)
        assert text.startswith(
            "message 2 of reader 0 of channel 'steps' does not unpickle here: ValueError: no an exception"
        )
        assert "the next receive gives the next message" in text
        assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("kind", ERRORS)
async def test_any_error_consumes_the_message(open_channel: OpenChannel, kind: str) -> None:
    """Even one that looks like a cancellation, or like the end of a loop over messages."""
    async with open_channel() as channel:
        await channel.sender.send(Bomb(kind))
        await channel.sender.send("good")
        task = asyncio.create_task(channel.receiver.recv(), name="reader 0")
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is not None
        assert await channel.receiver.recv() == "good"
        assert channel.receiver.statistics().decode_errors == 1


async def test_a_loop_over_messages_can_go_on_after_an_error(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        for message in (1, Bomb("an exception"), 2):
            await channel.sender.send(message)
        await channel.sender.aclose()

        async def read() -> list[Any]:
            got: list[Any] = []
            keep = got.append
            for _ in range(2):
                try:
                    async for message in channel.receiver:
                        keep(message)
                except DecodeError as error:
                    got.append(type(error.__cause__))
            return got

        assert await as_reader(0, read()) == [1, ValueError, 2]


async def test_the_sender_that_waited_for_room_goes_on(open_channel: OpenChannel) -> None:
    """A message that failed to decode makes room like any other."""
    async with open_channel() as channel:
        bombs = 0
        while True:
            try:
                channel.sender.send_nowait([Bomb("an exception"), b"x" * 7000])
            except WouldBlock:
                break
            bombs += 1
        held_up = asyncio.create_task(channel.sender.send(b"x" * 7000))
        await turns(3)  # it waits
        assert not held_up.done()

        async def read() -> Any:
            for _ in range(bombs):
                with pytest.raises(DecodeError):
                    await channel.receiver.recv()
            return await channel.receiver.recv()

        async with asyncio.timeout(PATIENCE):
            assert await as_reader(0, read()) == b"x" * 7000
            await held_up


# Receiving from inside of receiving -----------------------------------------------------------------------------------

inside: list[Any] = []


class Reentrant:
    """Receives while it is unpickled."""

    def __init__(self, swallow: bool, nowait: bool) -> None:
        self.swallow = swallow
        self.nowait = nowait

    def __setstate__(self, state: dict[str, Any]) -> None:
        receiver: Receiver = inside[0]
        try:
            if state["nowait"]:
                inside.append(receiver.recv_nowait())
            else:
                receiver.recv().send(None)  # as far as it gets without waiting
        except StopIteration as done:
            inside.append(done.value)
        except BusyError:
            inside.append(BusyError)
            if not state["swallow"]:
                raise


@pytest.mark.parametrize("nowait", [True, False])
@pytest.mark.parametrize("swallow", [True, False])
async def test_receiving_while_unpickling_is_refused(open_channel: OpenChannel, swallow: bool, nowait: bool) -> None:
    async with open_channel() as channel:
        inside[:] = [channel.receiver]
        await channel.sender.send(Reentrant(swallow, nowait))
        await channel.sender.send("next")
        if swallow:
            assert isinstance(await channel.receiver.recv(), Reentrant)
        else:
            with pytest.raises(DecodeError) as caught:
                await channel.receiver.recv()
            assert isinstance(caught.value.__cause__, BusyError)
        assert inside[1:] == [BusyError]
        inside.clear()
        assert await channel.receiver.recv() == "next"


class Unspeakable(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def speak_not() -> None:
    raise Unspeakable


class Mute:
    def __reduce__(self) -> Any:
        return speak_not, ()


async def test_an_error_that_cannot_be_shown_is_a_decode_error_too(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        await channel.sender.send(Mute())
        await channel.sender.send(1)
        with pytest.raises(DecodeError, match="does not unpickle here: Unspeakable: ") as caught:
            await channel.receiver.recv()
        assert isinstance(caught.value.__cause__, Unspeakable)
        assert await channel.receiver.recv() == 1

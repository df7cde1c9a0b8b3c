"""What is raised in the middle of a stream, as by a signal handler or for want of memory, tears no message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import zmq

from aioarena import EvictedError
from aioarena._remote.serving import Serving
from tests.fronts.support import filled, shows, until
from tests.remote.test_channel import opened


class Interrupt(BaseException):
    """As what a handler of SIGTERM raises."""


class Torn:
    """A socket whose next message of several parts breaks off behind some of them.

    Args:
        socket: The real one.
        parts: How many go out.
        error: Makes what is raised then. Made there, it is in no cycle with its traceback, which refers to memory.
    """

    def __init__(self, socket: zmq.Socket[bytes], parts: int, error: Callable[[], BaseException]) -> None:
        self._socket = socket
        self._parts = parts
        self._error: Callable[[], BaseException] | None = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_multipart(self, frames: Sequence[Any], copy: bool) -> None:
        error, self._error = self._error, None
        if error is None:
            self._socket.send_multipart(frames, copy=copy)
            return
        for number, frame in enumerate(frames[: self._parts]):
            self._socket.send(frame, zmq.SNDMORE if number + 1 < len(frames) else 0, copy=copy)
        raise error()


def tear(serving: Serving, parts: int, error: Callable[[], BaseException]) -> None:
    """Run what was to be run in the next turn, torn."""
    assert serving._runner is not None
    serving._runner.cancel()
    serving.wire._socket = Torn(serving.wire._socket, parts, error)
    serving._run()


@pytest.mark.parametrize("parts", [0, 1, 2, 99])
async def test_a_stream_that_was_interrupted_goes_on_whole(parts: int) -> None:
    """Wherever in a message of ZMQ: the reader sees a gap, connects again, and gets every message once."""
    async with opened() as channel:
        serving = channel.sender._serving
        await channel.sender.send(filled(1, 4 << 20))
        with pytest.raises(Interrupt):
            tear(serving, parts, Interrupt)
        await channel.sender.send(filled(2))
        for value in (1, 2):
            for end in (channel.local, channel.remote):
                received = await end.recv()
                assert shows(received, value)
                del received
        assert channel.remote._relay._feed._session == 2


async def test_an_interruption_loses_no_turn() -> None:
    """Nothing else is sent that would bring the stream on its way again."""
    async with opened() as channel:
        await channel.sender.send(filled(1))
        with pytest.raises(Interrupt):
            tear(channel.sender._serving, 1, Interrupt)
        assert shows(await channel.remote.recv(), 1)


async def test_what_cannot_be_sent_ends_its_reader_only(caplog: pytest.LogCaptureFixture) -> None:
    """And not in a log of the loop, while all wait for it."""
    async with opened(on_reader_lost="continue") as channel:
        await channel.sender.send(filled(1))
        tear(channel.sender._serving, 1, lambda: MemoryError("no more"))
        await until(lambda: channel.sender.statistics().readers[1].state == "lost")
        assert any("cannot be sent to: no more" in text for text in caplog.messages)
        with pytest.raises(EvictedError, match="the sender cannot send to it: no more"):
            await channel.remote.recv()
        await channel.sender.send(2)
        assert shows(await channel.local.recv(), 1)
        assert await channel.local.recv() == 2

"""A wire between hosts that the test holds in its hands: a TCP proxy on the running loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Self

from aioarena import Handle
from aioarena._platform.network import parse_endpoint


class Proxy:
    """Passes connections on to a sender, until it is told otherwise.

    Attributes:
        passed: Bytes that went down, from the sender.
        meddle: Given each piece that comes and whether it goes down: what is passed on instead.
    """

    def __init__(self, handle: Handle) -> None:
        assert handle.remote is not None
        self._target = parse_endpoint(handle.remote.endpoint)
        self._handle = handle
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.passed = 0
        self.meddle: Callable[[bytes, bool], bytes] = lambda data, down: data

    @property
    def handle(self) -> Handle:
        """The sender's, with our address."""
        assert self._server is not None and self._handle.remote is not None
        port = self._server.sockets[0].getsockname()[1]
        remote = dataclasses.replace(self._handle.remote, endpoint=f"tcp://127.0.0.1:{port}")
        return dataclasses.replace(self._handle, remote=remote)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        # A connection that asyncio accepts in the turn in which the server is closed would be left open (Python 3.11).
        asyncio.get_running_loop().remove_reader(self._server.sockets[0].fileno())
        for _ in range(10):  # turns in which one that was just accepted comes to be known here
            await asyncio.sleep(0)
        self._server.close()
        self._open.set()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # On Python 3.12 a server waits for its connections, which are over.
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if self._refuses:
                return
            above, upward = await asyncio.open_connection(*self._target)
            self._writers.add(upward)
            try:
                await asyncio.gather(self._pass(reader, upward, down=False), self._pass(above, writer, down=True))
            finally:
                self._writers.discard(upward)
                upward.close()
                with contextlib.suppress(OSError):
                    await upward.wait_closed()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, down: bool) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(self.meddle(data, down))
                await writer.drain()
                if down:
                    self.passed += len(data)
        except (OSError, RuntimeError):  # which uvloop raises for a connection that was cut
            pass
        finally:
            writer.close()

    def hold(self) -> None:
        """Pass nothing on, as a cable does that was pulled."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """End all connections; new ones may be made."""
        for writer in list(self._writers):
            writer.transport.abort()

    def refuse(self, refuses: bool = True) -> None:
        """End new connections, too."""
        self._refuses = refuses

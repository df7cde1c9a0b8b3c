"""What tests against remote readers attack with: sockets that a stranger, or a reader gone wrong, could make."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from aioarena import Handle
from aioarena._core.layout import VERSION
from aioarena._platform.network import RemoteRef
from tests.fronts.support import until

JOIN = struct.Struct("<cQIqI?QQIQQ")
ACK = struct.Struct("<cQIQQ")
LEAVE = struct.Struct("<cQ")
TOPIC = struct.Struct("<cQ")

NULL = "null"
PLAIN = "plain"
CURVE = "curve"

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Impostor:
    """A raw ZMQ socket in a reader's place. It says what it is told to, and takes whatever comes.

    Args:
        remote: Where to connect, and with which keys.
        mechanism: With CURVE by default.
        incarnation: Whose topic it subscribes to.

    Attributes:
        stood: Connections whose handshake succeeded.
        broken: Connections that ended, or never stood.
    """

    def __init__(self, remote: RemoteRef, mechanism: str = CURVE, incarnation: int = 77) -> None:
        self.incarnation = incarnation
        self.stood = self.broken = 0
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(zmq.XSUB)
        socket.linger = 0
        socket.sndhwm = 0  # at the default of 1000 it would drop what is too fast
        if mechanism == CURVE:
            socket.curve_serverkey = remote.server_key.encode()
            socket.curve_publickey = remote.public_key.encode()
            socket.curve_secretkey = remote.secret_key.encode()
        elif mechanism == PLAIN:
            socket.plain_username = b"reader"
            socket.plain_password = b"password"
        self._monitor = socket.get_monitor_socket(_BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._monitor.linger = 0
        socket.connect(remote.endpoint)
        self.send(b"\x01" + TOPIC.pack(b"R", incarnation))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def look(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self.stood += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.broken += event != zmq.EVENT_HANDSHAKE_SUCCEEDED

    async def until_broken(self) -> None:
        await until(lambda: (self.look(), self.broken)[1])

    async def until_stood(self) -> None:
        await until(lambda: (self.look(), self.stood)[1])

    def send(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    def take(self) -> list[bytes] | None:
        """A message that came, None if there is none."""
        with contextlib.suppress(zmq.Again):
            return self._socket.recv_multipart(zmq.NOBLOCK)
        return None

    async def receive(self) -> list[bytes]:
        found: list[list[bytes]] = []

        def look() -> bool:
            message = self.take()
            if message is not None:
                found.append(message)
            return message is not None

        await until(look)
        return found[0]

    def join(self, rank: int, **changes: Any) -> None:
        values = {
            "incarnation": self.incarnation,
            "version": VERSION,
            "rank": rank,
            "session": 1,
            "returning": False,
            "received": 0,
            "limit": 1 << 20,
            "pid": 1,
            "ticks": 1,
            "namespace": 1,
            **changes,
        }
        host = values.pop("host", b"elsewhere")
        self.send(JOIN.pack(b"J", *values.values()) + host)

    def ack(self, received: int, limit: int = 1 << 20, session: int = 1, incarnation: int | None = None) -> None:
        self.send(ACK.pack(b"A", self.incarnation if incarnation is None else incarnation, session, received, limit))

    def leave(self, reason: bytes = b"", incarnation: int | None = None) -> None:
        self.send(LEAVE.pack(b"L", self.incarnation if incarnation is None else incarnation) + reason)


class FakeSender:
    """Takes an address before its owner does, and gives every reader that listens a pickle of its own.

    Args:
        endpoint: The address.
        pickled: What it sends.
        keys: Public and secret key of the sender it pretends to be, None for none.
    """

    def __init__(self, endpoint: str, pickled: bytes, keys: tuple[str, str] | None) -> None:
        self._pickled = pickled
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(zmq.XPUB)
        socket.linger = 0
        if keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in keys)
        socket.bind(endpoint)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(0.001)  # looks at a socket that no loop watches
            if not self._socket.poll(0):
                continue
            message = self._socket.recv()
            if message[:2] != b"\x01R":
                continue
            topic = message[1:]
            self._socket.send(topic + struct.pack("<cIIQ", b"W", 0, 1, 0))
            stream = struct.pack("<IIQQ", 1, 0x4152_4E41, 0, len(self._pickled)) + self._pickled
            self._socket.send_multipart([topic + struct.pack("<cIQ", b"D", 1, 0), stream])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._socket.close()
        self._context.term()


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


def remote_of(handle: Handle) -> RemoteRef:
    assert handle.remote is not None
    return handle.remote


def listening() -> Iterator[tuple[str, int]]:
    """Address (hex, as the kernel writes it) and port of every TCP socket on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                yield address, int(port, 16)


LOOPBACK = f"{int.from_bytes(bytes([127, 0, 0, 1]), sys.byteorder):08X}"

"""The ways of sending one object to several processes that `bench compare` compares, each behind the same few methods.

Each is written as somebody who knows it would use it from asyncio: what may block goes to a thread, what has a queue gets
a bound of about a thousand messages, and what can do without a copy does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import multiprocessing
import os
import pickle
import queue
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.multiprocessing  # what makes queues send tensors
import zmq
import zmq.asyncio

import aioarena
from aioarena._bench._ends import WINDOW, Alternative, Message, ReadEnd, SendEnd, Setting, dumps, loads
from aioarena._copying import default_threads

# aioarena ---------------------------------------------------------------------------------------------------------


class _ArenaSend(SendEnd):
    def __init__(self, channel: aioarena.Sender) -> None:
        self.handle = channel.handle
        self._channel = channel

    async def ready(self) -> None:
        await self._channel.wait_ready()

    async def send(self, message: Message) -> None:
        await self._channel.send(message)

    async def aclose(self) -> None:
        await self._channel.aclose()


class _ArenaRead(ReadEnd):
    def __init__(self, channel: aioarena.Receiver) -> None:
        self._channel = channel

    async def recv(self) -> Message:
        message: Message = await self._channel.recv()
        return message

    async def aclose(self) -> None:
        await self._channel.aclose()


class Arena(Alternative):
    name = "aioarena"
    ours = True
    options: ClassVar[dict[str, Any]] = {}
    reader_options: ClassVar[dict[str, Any]] = {}

    @classmethod
    async def sender(cls, setting: Setting) -> SendEnd:
        channel = aioarena.Sender(setting.readers, name="bench-compare", **cls.options)
        await channel.start()
        return _ArenaSend(channel)

    @classmethod
    async def reader(cls, setting: Setting, handle: Any, rank: int) -> ReadEnd:
        channel = aioarena.Receiver(handle, rank, **cls.reader_options)
        await channel.start()
        return _ArenaRead(channel)


class ArenaSpin(Arena):
    name = "aioarena, spin"
    about = "Receiver(spin=0.01): a reader looks at the ring for 10 ms, letting other tasks run, before it parks."
    scenarios = frozenset({"small", "burst"})
    reader_options: ClassVar[dict[str, Any]] = {"spin": 0.01}


class ArenaOff(Arena):
    name = "aioarena, arena off"
    about = "Sender(arena=None): large buffers travel as ZMQ frames."
    options: ClassVar[dict[str, Any]] = {"arena": None}


class ArenaPipe(Arena):
    name = "aioarena, pipe"
    about = 'Sender(wake="pipe"): a parked reader is woken by a byte in a pipe.'
    scenarios = frozenset({"small", "burst", "idle"})
    options: ClassVar[dict[str, Any]] = {"wake": "pipe"}


# ZMQ --------------------------------------------------------------------------------------------------------------


class _ZmqSend(SendEnd):
    def __init__(self, setting: Setting) -> None:
        self.handle = [f"ipc://{setting.directory}/{name}" for name in ("messages", "acknowledgements")]
        self._context = zmq.asyncio.Context()
        # A PUB socket that can see who has subscribed.
        self._messages = self._context.socket(zmq.XPUB)
        self._messages.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._messages.setsockopt(zmq.SNDHWM, 0)
        self._messages.bind(self.handle[0])
        self._acknowledgements = self._context.socket(zmq.PULL)
        self._acknowledgements.bind(self.handle[1])
        self._sent = 0
        self._acknowledged = [0] * setting.readers

    async def ready(self) -> None:
        for _ in self._acknowledged:
            await self._messages.recv()

    async def send(self, message: Message) -> None:
        while self._sent - min(self._acknowledged) >= WINDOW:
            self._acknowledged[(await self._acknowledgements.recv())[0]] += WINDOW // 2
        self._sent += 1
        await self._messages.send_multipart(dumps(message), copy=False)

    async def aclose(self) -> None:
        self._context.destroy(linger=0)


class _ZmqRead(ReadEnd):
    def __init__(self, handle: list[str], rank: int) -> None:
        self._context = zmq.asyncio.Context()
        self._messages = self._context.socket(zmq.SUB)
        self._messages.setsockopt(zmq.RCVHWM, 0)
        self._messages.setsockopt(zmq.SUBSCRIBE, b"")
        self._messages.connect(handle[0])
        self._acknowledgements = self._context.socket(zmq.PUSH)
        self._acknowledgements.connect(handle[1])
        self._rank = bytes([rank])
        self._received = 0

    async def recv(self) -> Message:
        frames = await self._messages.recv_multipart(copy=False)
        self._received += 1
        if self._received % (WINDOW // 2) == 0:
            await self._acknowledgements.send(self._rank)
        return loads([frame.buffer for frame in frames])

    async def aclose(self) -> None:
        self._context.destroy(linger=0)


class Zmq(Alternative):
    name = "zmq.asyncio"
    about = (
        "PUB/SUB over a Unix socket, pickle 5 with tensors out of band, no high-water mark; every 500 messages are "
        f"acknowledged, and at most {WINDOW} are under way, so that a burst stays bounded."
    )

    @classmethod
    async def sender(cls, setting: Setting) -> SendEnd:
        return _ZmqSend(setting)

    @classmethod
    async def reader(cls, setting: Setting, handle: Any, rank: int) -> ReadEnd:
        return _ZmqRead(handle, rank)


# Queues of torch.multiprocessing ----------------------------------------------------------------------------------


class _QueueSend(SendEnd):
    def __init__(self, queues: list[Any]) -> None:
        self._queues = queues

    def fresh(self, message: Message) -> Message:
        # Sending moves the memory of a tensor into shared memory. A second send of the same tensor would copy nothing,
        # and readers of the first would see what is written for the second.
        if "tensors" not in message:
            return message
        return {**message, "tensors": [tensor.clone() for tensor in message["tensors"]]}

    async def send(self, message: Message) -> None:
        for each in self._queues:
            try:
                each.put_nowait(message)
            except queue.Full:
                await asyncio.get_running_loop().run_in_executor(None, each.put, message)

    async def aclose(self) -> None:
        for each in self._queues:
            each.cancel_join_thread()
            each.close()


class _QueueRead(ReadEnd):
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    async def recv(self) -> Message:
        message: Message = await asyncio.get_running_loop().run_in_executor(None, self._queue.get)
        return message

    async def aclose(self) -> None:
        self._queue.close()


class Queue(Alternative):
    name = "torch queue"
    about = (
        f"torch.multiprocessing.Queue({WINDOW}), one per reader, get() in a thread. Its send() returns before anything "
        "is pickled or copied; each message gets tensors of its own, made outside of what is timed."
    )

    @classmethod
    def inherit(cls, readers: int) -> Any:
        context = multiprocessing.get_context("forkserver")
        return [context.Queue(WINDOW) for _ in range(readers)]

    @classmethod
    async def sender(cls, setting: Setting) -> SendEnd:
        return _QueueSend(setting.inherited)

    @classmethod
    async def reader(cls, setting: Setting, handle: Any, rank: int) -> ReadEnd:
        return _QueueRead(setting.inherited[rank])


# The floor --------------------------------------------------------------------------------------------------------


class _FloorSend(SendEnd):
    def __init__(self, setting: Setting, threads: int) -> None:
        address = f"{setting.directory}/socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(setting.readers)
        self._listener.setblocking(False)
        self._fd = os.memfd_create("aioarena-bench-floor")
        os.ftruncate(self._fd, setting.nbytes)
        self._memory = mmap.mmap(self._fd, setting.nbytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self._address, 1, setting.nbytes)  # warm
        self.handle = (os.getpid(), self._fd, setting.nbytes, address)
        self._readers = setting.readers
        self._sockets: list[socket.socket] = []
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    async def ready(self) -> None:
        for _ in range(self._readers):
            connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            connection.setblocking(True)
            self._sockets.append(connection)

    async def send(self, message: Message) -> None:
        loop, target, copies, described = asyncio.get_running_loop(), self._address, [], []
        for tensor in message["tensors"]:
            nbytes = tensor.nbytes
            share = -(-nbytes // self._threads)
            for start in range(0, nbytes, share):
                part = (target + start, tensor.data_ptr() + start, min(share, nbytes - start))
                copies.append(loop.run_in_executor(self._pool, ctypes.memmove, *part))
            described.append((target - self._address, tensor.dtype, tuple(tensor.shape)))
            target += nbytes
        await asyncio.gather(*copies)
        word = pickle.dumps({**message, "tensors": described}, 5)
        for connection in self._sockets:
            connection.sendall(word)

    async def aclose(self) -> None:
        self._pool.shutdown()
        for connection in [*self._sockets, self._listener]:
            connection.close()
        os.close(self._fd)


class _FloorRead(ReadEnd):
    def __init__(self, memory: mmap.mmap, connection: socket.socket) -> None:
        self._memory = memory
        self._connection = connection

    async def recv(self) -> Message:
        message: Message = pickle.loads(await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16))
        message["tensors"] = [
            torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
            for offset, dtype, shape in ((offset, dtype, torch.Size(shape)) for offset, dtype, shape in message["tensors"])
        ]
        return message

    async def aclose(self) -> None:
        self._connection.close()
        with contextlib.suppress(BufferError):  # the last message may be there still
            self._memory.close()


class Floor(Alternative):
    name = "floor"
    about = (
        "Not a channel: one copy by memmove into shared memory that was used before, by as many threads as aioarena has, "
        "and a word to each reader over a Unix socket."
    )
    scenarios = frozenset({"tensor", "tensors"})
    threads: ClassVar[int] = default_threads()

    @classmethod
    async def sender(cls, setting: Setting) -> SendEnd:
        return _FloorSend(setting, cls.threads)

    @classmethod
    async def reader(cls, setting: Setting, handle: Any, rank: int) -> ReadEnd:
        pid, fd, nbytes, address = handle
        with Path(f"/proc/{pid}/fd/{fd}").open("r+b") as file:  # noqa: ASYNC230 - memory, not a disk
            memory = mmap.mmap(file.fileno(), nbytes)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(address)
        connection.setblocking(False)
        return _FloorRead(memory, connection)


class FloorAlone(Floor):
    name = "floor, one thread"
    about = (
        "The same with one thread. A memmove of more than the caches hold goes around them, which several of its parts "
        "may not do, and where other work runs one thread waits less. 'x floor' is to the lower of both."
    )
    threads = 1

"""`bench remote`: one large tensor to the readers of several hosts, with a relay on each host and without.

The hosts are processes of this machine. With ``namespaces`` each has a network of its own, and a bridge leads to the
sender's: what is counted went through it, with all headers. Otherwise everything goes over the loopback device, and with it
whatever else does so on this machine. Both are faster than any cable, so that times show what the CPUs can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import aioarena
from aioarena._bench._result import Result, Section
from aioarena._bench._text import Progress, show_bytes, show_seconds, show_size
from aioarena._bench._workers import Team, Worker, run

_SLOT_BYTES = 64 << 10
_CLONE_NEWNET = 0x40000000  # linux/sched.h
# For benchmarks of networks, RFC 2544: no host really has it.
_ADDRESS = "198.18.0.{}"


class WrongBytes(aioarena.ArenaError):
    """A reader saw something else than was sent."""


class NoNamespaces(aioarena.ArenaError):
    """This machine, or this user, cannot have network namespaces."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """What the command line said.

    Attributes:
        hosts: How many there are beside the sender's.
        readers: On each of them.
        mib: Size of the tensor.
        runs: How often it is sent each way, after a first time.
        namespaces: Whether each host gets a network of its own.
    """

    hosts: int = 2
    readers: int = 4
    mib: int = 200
    runs: int = 5
    namespaces: bool = False


@dataclass(slots=True)
class _Sent:
    """What was measured of each message, the first one first."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)


# On the hosts -----------------------------------------------------------------------------------------------------


def _work(rank: int, pipe: Connection[Any, Any]) -> None:
    """One process of a host: does as it is told, until its pipe ends."""
    tasks: dict[str, Callable[..., Any]] = {
        "unshare": _unshare,
        "enter": _enter,
        "read": lambda *said: run(_read(pipe, *said)),
        "relay": lambda *said: run(_pass_on(pipe, *said)),
        "take": lambda *said: _take(pipe, *said),
    }
    while True:
        what, *said = pipe.recv()
        pipe.send(tasks[what](*said))


async def _read(pipe: Connection[Any, Any], handle: aioarena.Handle, rank: int) -> int:
    """Tell of each message when it was there; in the end, how many there were."""
    async with aioarena.Receiver(handle, rank) as channel:
        pipe.send("attached")
        count = 0
        async for tensor in channel:
            seen = int(tensor[0]) + int(tensor[-1])
            del tensor
            pipe.send((seen, time.monotonic()))
            count += 1
    return count


async def _pass_on(pipe: Connection[Any, Any], handle: aioarena.Handle, readers: int) -> int:
    """Tell the relay's handle; in the end, how many bytes came over the network."""
    async with aioarena.Relay(handle, readers) as relay:
        pipe.send(relay.handle)
        await relay.wait_closed()
    return relay.received_bytes


def _take(pipe: Connection[Any, Any], address: tuple[str, int], nbytes: int, count: int) -> None:
    """Receive bare bytes over TCP into an array, and tell when they were there."""
    array = np.empty(nbytes, np.uint8)
    with socket.create_connection(address) as connection:
        for _ in range(count):
            left = array.data
            while left:
                received = connection.recv_into(left)
                if not received:
                    raise EOFError
                left = left[received:]
            pipe.send((int(array[0]) + int(array[-1]), time.monotonic()))


# Networks ---------------------------------------------------------------------------------------------------------


def _libc(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise NoNamespaces(
            f"network namespaces are not permitted here ({os.strerror(ctypes.get_errno())}): run this as root, or without "
            "--namespaces"
        )


def _unshare() -> int:
    """Move this thread, and all it will start, to a network of its own."""
    _libc("unshare", _CLONE_NEWNET)
    return os.getpid()


def _enter(pid: int) -> None:
    """Move this thread, and all it will start, to the network of another process."""
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        _libc("setns", fd, _CLONE_NEWNET)
    finally:
        os.close(fd)


def _ip(line: str) -> None:
    if shutil.which("ip") is None:
        raise NoNamespaces("--namespaces needs the command ip, from the package iproute2")
    done = subprocess.run(["ip", *line.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"`ip {line}` failed: {done.stderr.strip()}; run this without --namespaces")


@contextlib.contextmanager
def _own_network() -> Iterator[None]:
    """A network of its own for the sender, with a bridge to those of the hosts. It is gone with its processes."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _unshare()
        try:
            for line in ("link set lo up", "link add switch type bridge", "link set switch up"):
                _ip(line)
            _ip(f"addr add {_ADDRESS.format(1)}/24 dev switch")
            yield
        finally:
            _libc("setns", before, _CLONE_NEWNET)
    finally:
        os.close(before)


async def _plug_in(hosts: list[list[Worker]]) -> None:
    for number, (first, *others) in enumerate(hosts):
        first.tell(("unshare",))
        pid = await first.answer()
        port = f"port{number}"
        _ip(f"link add {port} type veth peer name eth0 netns {pid}")
        _ip(f"link set {port} master switch up")
        # Its end is set up from inside, by a command that enters.
        for line in (f"addr add {_ADDRESS.format(2 + number)}/24 dev eth0", "link set eth0 up", "link set lo up"):
            await asyncio.to_thread(_ip_inside, pid, line)
        for worker in others:
            worker.tell(("enter", pid))
            await worker.answer()


def _ip_inside(pid: int, line: str) -> None:
    _enter(pid)  # this thread alone, which does nothing else any more
    _ip(line)


def _sent_bytes(device: str) -> int:
    """Bytes that have left on the devices whose names begin so."""
    total = 0
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip().startswith(device):
            total += int(numbers.split()[8])
    return total


# The sender -------------------------------------------------------------------------------------------------------


class _Bench:
    """The hosts, and what is counted of them."""

    def __init__(self, options: RemoteOptions, team: Team) -> None:
        self.options = options
        size = options.readers + 1
        self.hosts = [team.workers[start : start + size] for start in range(0, len(team.workers), size)]
        self.readers = [worker for _, *readers in self.hosts for worker in readers]
        self.relays = [relay for relay, *_ in self.hosts]
        self.nbytes = options.mib << 20
        self.tensor = torch.full((self.nbytes,), 3, dtype=torch.uint8)
        self.address = _ADDRESS.format(1) if options.namespaces else "127.0.0.1"
        self._device = "port" if options.namespaces else "lo"
        # linux/posix-timers.h: the CPU clock of a process, all its threads included.
        self._clocks = [~worker.process.pid << 3 | 2 for worker in team.workers if worker.process.pid is not None]

    def sender(self, remote_readers: int) -> aioarena.Sender:
        return aioarena.Sender(
            0,
            name="bench-remote",
            arena=aioarena.ArenaConfig(slots=2 * -(-self.nbytes // _SLOT_BYTES), slot_bytes=_SLOT_BYTES),
            remote_readers=remote_readers,
            bind=f"tcp://{self.address}:0",
        )

    def cpu(self) -> float:
        return time.process_time() + sum(map(time.clock_gettime, self._clocks))

    @contextlib.asynccontextmanager
    async def count(self, sent: _Sent, workers: list[Worker]) -> AsyncIterator[None]:
        """Measure a message, which is sent inside, until all these have it."""
        wire, cpu, began = _sent_bytes(self._device), self.cpu(), time.monotonic()
        yield
        answers = [await worker.answer() for worker in workers]
        sent.seconds.append(max(when for _, when in answers) - began)
        sent.cpu.append(self.cpu() - cpu)
        sent.wire.append(_sent_bytes(self._device) - wire)
        if any(seen != 6 for seen, _ in answers):
            raise WrongBytes(f"readers saw {[seen for seen, _ in answers]}, expected 6 of each")

    async def send_all(self, sender: aioarena.Sender) -> _Sent:
        sent = _Sent()
        for _ in range(1 + self.options.runs):
            async with self.count(sent, self.readers):
                await sender.send(self.tensor)
        return sent

    async def direct(self) -> _Sent:
        """Every reader is a remote one."""
        async with self.sender(len(self.readers)) as sender:
            await self._attach(self.readers, sender.handle)
            sent = await self.send_all(sender)
        for worker in self.readers:
            await worker.answer()
        return sent

    async def relayed(self) -> tuple[_Sent, list[int]]:
        """A relay on every host; also the bytes that each of them received."""
        async with self.sender(len(self.hosts)) as sender:
            for relay, *readers in self.hosts:
                relay.tell(("relay", sender.handle, len(readers)))
                await self._attach(readers, await relay.answer())
            sent = await self.send_all(sender)
        received = [await relay.answer() for relay in self.relays]
        for worker in self.readers:
            await worker.answer()
        return sent, received

    async def _attach(self, readers: list[Worker], handle: aioarena.Handle) -> None:
        for rank, worker in enumerate(readers):
            worker.tell(("read", handle, rank))
        for worker in readers:
            await worker.answer()

    async def bare(self) -> _Sent:
        """The same bytes to one process of one host, by nothing but TCP."""
        sent, worker = _Sent(), self.readers[0]
        with socket.create_server((self.address, 0)) as listener:
            worker.tell(("take", listener.getsockname(), self.nbytes, 1 + self.options.runs))
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                for _ in range(1 + self.options.runs):
                    async with self.count(sent, [worker]):
                        connection.sendall(self.tensor.numpy().data)
        await worker.answer()
        return sent


async def measure(options: RemoteOptions, progress: Progress) -> Result:
    """Send the tensor each way."""
    result = Result("remote", settings={key: getattr(options, key) for key in RemoteOptions.__slots__})
    with contextlib.ExitStack() as stack:
        if options.namespaces:
            stack.enter_context(_own_network())
        progress.say("starting processes")
        multiprocessing.set_forkserver_preload(["aioarena._bench._preload"])
        team = stack.enter_context(Team(options.hosts * (options.readers + 1), _work, method="forkserver"))
        bench = _Bench(options, team)
        if options.namespaces:
            await _plug_in(bench.hosts)
        progress.say("without relays")
        direct = await bench.direct()
        progress.say("with relays")
        relayed, received = await bench.relayed()
        progress.say("bare TCP")
        bare = await bench.bare()
    where = "each in a network namespace of its own" if options.namespaces else "over the loopback device"
    section = Section(
        f"A tensor of {show_size(bench.nbytes)} to {options.hosts} hosts of {options.readers} readers, {where}, encrypted, "
        f"until the last reader has it;\nthe first time, and the median of {options.runs} later ones.",
        ["way", "streams", "sent on the wire", "of the tensor", "first", "later", "CPU of all processes"],
    )
    result.sections = [section]
    for way, streams, sent in (
        ("a remote reader for each", len(bench.readers), direct),
        ("a relay on each host", len(bench.hosts), relayed),
        ("bare TCP to one reader, not encrypted", 1, bare),
    ):
        wire, seconds, cpu = (median(values[1:]) for values in (sent.wire, sent.seconds, sent.cpu))
        section.rows.append(
            [
                way,
                str(streams),
                show_bytes(wire),
                f"{wire / bench.nbytes:.2f}",
                show_seconds(sent.seconds[0]),
                show_seconds(seconds),
                show_seconds(cpu),
            ]
        )
        section.records.append(
            {"way": way, "streams": streams, "wire": sent.wire, "seconds": sent.seconds, "cpu_seconds": sent.cpu}
        )
    section.records[1]["received_bytes"] = received
    ratios = [
        median(one[1:]) / median(other[1:])
        for one, other in (
            (direct.wire, relayed.wire),
            (direct.seconds, relayed.seconds),
            (direct.cpu, relayed.cpu),
        )
    ]
    each = sum(received) / len(received) / (1 + options.runs)
    section.notes = [
        "",
        "Without relays there are {:.1f} times the bytes, {:.1f} times the time and {:.1f} times the CPU.".format(*ratios),
        f"A relay received {show_bytes(each)} for each message.",
    ]
    return result

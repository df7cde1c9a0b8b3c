"""Hosts on one machine: network namespaces, joined by a switch.

Each host has a process that keeps its namespaces, and nothing of it is left when that process is gone, however the tests
end. Processes are put on a host by the nursery of :mod:`tests.multiprocess.harness`, which enters its namespaces before the
worker is forked: a system call, where ``ip netns exec`` takes a fresh interpreter that has to import torch.

Network namespaces alone leave /proc, /dev/shm and the file system shared. A host with ``own_memory`` has a pid namespace,
and /proc, /dev/shm and a TMPDIR of its own, so that nobody on another host can attach its memory or reach its Unix sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

_HERE = Path(__file__).parent
_CLONE_NEWNET = 0x40000000  # linux/sched.h

# For tests of networks, RFC 2544; no real host has it.
_ADDRESS = "198.18.0.{}"
_PREFIX = 24


class NotPermitted(Exception):
    """This machine, or this user, cannot have such hosts; the text says why."""


class Host:
    """A host of a :class:`Network`.

    Attributes:
        name: For messages.
        address: Its IPv4 address.
        pid: A process whose namespaces are the host's.
        own_memory: Whether it has memory of its own.
    """

    def __init__(self, network: Network, number: int, directory: Path | None) -> None:
        self.name = f"host{number}"
        self.address = _ADDRESS.format(number)
        self.own_memory = directory is not None
        self._network = network
        self._port = f"port{number}"
        self._holder = _Holder(directory)
        self._pump: subprocess.Popen[str] | None = None
        self.pid = self._holder.pid
        network._ip(
            f"link add {self._port} type veth peer name eth0 netns {self.pid}", f"link set {self._port} master switch up"
        )
        _ip(self.pid, f"addr add {self.address}/{_PREFIX} dev eth0", "link set eth0 up", "link set lo up")

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address}>"

    # The wire to the switch ----------------------------------------------------------------------------------------------

    def impair(self, *, delay: float = 0.0, loss: float = 0.0, rate: float = 0.0, seed: int = 0) -> None:
        """Make the wire of this host long, lossy or slow, in both directions; called again, it replaces what was.

        Args:
            delay: Seconds that each packet takes to the switch, and from there.
            loss: Probability that a packet is lost, each way.
            rate: Bytes a second at most, each way; 0 for no limit.
            seed: Of the losses.

        Raises:
            NotPermitted: There is no /dev/net/tun, or no tc.
        """
        if self._pump is None:
            if not os.path.exists("/dev/net/tun"):
                raise NotPermitted("delays and losses need /dev/net/tun")
            if shutil.which("tc") is None:
                raise NotPermitted("delays and losses need tc, from iproute2")
            ends = [f"{self.pid}:eth0", f"{self._network._holder.pid}:{self._port}"]
            self._pump = _script("pump.py", *ends)
        assert self._pump.stdin is not None and self._pump.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._pump.stdin.write(json.dumps({"delay": delay, "loss": loss, "rate": rate, "seed": seed}) + "\n")
            self._pump.stdin.flush()
        if self._pump.stdout.readline() != "ok\n":
            pump, self._pump = self._pump, None
            raise NotPermitted(f"delays and losses: {_end(pump)}")

    def repair(self) -> None:
        """Undo :meth:`impair`. Packets under way are lost."""
        if self._pump is not None:
            pump, self._pump = self._pump, None
            _end(pump)

    def cut(self) -> None:
        """Cut the wire. Nobody is told: packets vanish, as they do when a cable is pulled somewhere between two hosts."""
        self._network._ip(f"link set {self._port} nomaster")

    def mend(self) -> None:
        """Undo :meth:`cut`."""
        self._network._ip(f"link set {self._port} master switch")

    @property
    def sent_bytes(self) -> int:
        """Bytes that left on the wire, headers and all; loopback does not count."""
        return self._counters()[8]

    @property
    def received_bytes(self) -> int:
        """Bytes that came in from the wire, headers and all."""
        return self._counters()[0]

    def _counters(self) -> list[int]:
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            device, _, numbers = line.partition(":")
            if device.strip() == "eth0":
                return [int(number) for number in numbers.split()]
        raise AssertionError(f"{self} has no eth0")

    # Being there ---------------------------------------------------------------------------------------------------------

    def command(self, *command: str) -> list[str]:
        """A command line that runs another on this host."""
        there = ["--net", "--ipc", "--pid", "--mount"] if self.own_memory else ["--net"]
        return ["nsenter", "--target", str(self.pid), *there, f"--wd={os.getcwd()}", "--", *command]

    @contextlib.contextmanager
    def entered(self) -> Iterator[Self]:
        """Have what this thread opens inside, and what threads it starts inside open, be on this host's network."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        try:
            _setns(there)
            try:
                yield self
            finally:
                _setns(before)
        finally:
            os.close(there)
            os.close(before)

    def crash(self) -> None:
        """Power off: everything on the host is killed, and nobody hears a word. For hosts with memory of their own."""
        assert self.own_memory, "only a host with own_memory takes its processes with it"
        self.cut()
        self._holder.close()

    def close(self) -> None:
        self.repair()
        self._holder.close()


class Network:
    """A switch, and the hosts that are plugged into it.

    Args:
        directory: Becomes an empty directory of its own on each host with ``own_memory``: the TMPDIR of what runs there.

    Raises:
        NotPermitted: Not here.
    """

    def __init__(self, directory: Path | None = None) -> None:
        if reason := why_not():
            raise NotPermitted(reason)
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._holder = _Holder(None)
        self._stack.callback(self._holder.close)
        self._hosts = 0
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._ip("link add switch type bridge", "link set switch up")
            on_error.pop_all()

    def host(self, *, own_memory: bool = False) -> Host:
        """Plug in one more host."""
        return self.hosts(1, own_memory=own_memory)[0]

    def hosts(self, count: int, *, own_memory: bool = False) -> list[Host]:
        """Plug in more hosts."""
        assert self._directory is not None or not own_memory, "hosts with memory of their own need a directory"
        added = []
        for _ in range(count):
            self._hosts += 1
            host = Host(self, self._hosts, self._directory if own_memory else None)
            self._stack.callback(host.close)
            added.append(host)
        return added

    def _ip(self, *lines: str) -> None:
        _ip(self._holder.pid, *lines)

    def close(self) -> None:
        """Be rid of all of it."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@functools.cache
def why_not() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    for tool, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"network namespaces need {tool}, from {package}"
    try:
        holders = [_Holder(None), _Holder(Path(tempfile.gettempdir()))]
    except NotPermitted as error:
        return str(error)
    try:
        _ip(holders[0].pid, f"link add try0 type veth peer name try1 netns {holders[1].pid}", "link add try2 type bridge")
    except NotPermitted as error:
        return str(error)
    finally:
        for holder in holders:
            holder.close()
    return None


class _Holder:
    """The process that keeps the namespaces of a host."""

    def __init__(self, directory: Path | None) -> None:
        self._process: subprocess.Popen[str] | None = _script("holder.py", *([str(directory)] if directory else []))
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            process, self._process = self._process, None
            raise NotPermitted(f"namespaces cannot be made here: {_end(process)}")
        self.pid = int(answer)

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            _end(process)


def _script(name: str, *arguments: str) -> subprocess.Popen[str]:
    # Isolated and without site, which takes 15 ms to start instead of 80.
    command = [sys.executable, "-I", "-S", str(_HERE / name), *arguments]
    pipe: Any = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _end(process: subprocess.Popen[str]) -> str:
    """Close the stdin of one of our scripts, so that it ends: the last line that it complained."""
    with contextlib.suppress(BrokenPipeError):
        complaint = process.communicate()[1].strip()
    return complaint.splitlines()[-1] if complaint else f"it ended with {process.returncode}"


def _ip(pid: int, *lines: str) -> None:
    """Run lines of ip in the network namespace of a process."""
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", check=False, capture_output=True, text=True)
    if done.returncode:
        raise NotPermitted(f"ip {'; '.join(lines)}: {done.stderr.strip()}")


def _setns(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")

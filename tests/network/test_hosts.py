"""The hosts that the tests across hosts run on: that they are hosts indeed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import aioarena
from tests.multiprocess.harness import PATIENCE, Farm, Link, WorkerError, eventually
from tests.multiprocess.messages import CHANNEL
from tests.network import hosts
from tests.network.hosts import Host, Network

MIB = 1 << 20
SHM = Path("/dev/shm")


# Scripts -----------------------------------------------------------------------------------------------------------------


def listen(link: Link, address: str) -> int:
    """Say where it listens, take one connection, answer each chunk when all of it is there: how many bytes in all."""
    with socket.create_server((address, 0)) as server:
        link.put(server.getsockname()[1])
        connection, _ = server.accept()
    with connection, connection.makefile("rb") as incoming:
        total = 0
        while header := incoming.read(8):
            total += len(incoming.read(int.from_bytes(header)))
            connection.sendall(b"!")
        return total


def connect(link: Link, address: str, port: int) -> None:
    """Connect, and be told how large a chunk to send, the next when one is answered."""
    with socket.create_connection((address, port), timeout=PATIENCE) as connection:
        link.put("connected")
        while nbytes := link.get():
            connection.sendall(nbytes.to_bytes(8) + bytes(nbytes))
            assert connection.recv(1) == b"!"
            link.put("answered")


def look_around(link: Link) -> tuple[int, list[str], list[str], str]:
    """What a process sees of its host."""
    networks = Path("/proc/net/dev").read_text().splitlines()[2:]
    return os.getpid(), sorted(os.listdir(SHM)), [line.split(":")[0].strip() for line in networks], os.environ["TMPDIR"]


def leave_a_file(link: Link, path: str) -> None:
    Path(path).write_text("left")


def exists(link: Link, path: str) -> bool:
    return Path(path).exists()


async def receive(link: Link, handle: aioarena.Handle, rank: int) -> float:
    async with aioarena.Receiver(handle, rank) as chan:
        return float((await chan.recv()).sum())


async def attach(link: Link, handle: aioarena.Handle, rank: int) -> str:
    try:
        await aioarena.Receiver(handle, rank).start()
    except aioarena.HandleError as error:
        return str(error)
    return "attached"


async def send(link: Link, readers: int) -> None:
    async with aioarena.Sender(readers, **CHANNEL) as chan:
        link.put(chan.handle)
        await chan.send(torch.ones(MIB))


def sleep(link: Link) -> None:
    link.put("here")
    signal.pause()


# Tests -------------------------------------------------------------------------------------------------------------------


class Conversation:
    """A connection between two hosts."""

    def __init__(self, farm: Farm, one: Host, other: Host) -> None:
        self.server, self.client = farm.worker(host=other), farm.worker(host=one)
        self.server.start(listen, other.address)
        self.client.start(connect, other.address, self.server.get())
        assert self.client.get() == "connected"

    def round_trip(self, nbytes: int = 1) -> float:
        started = time.monotonic()
        assert self.client.ask(nbytes) == "answered"
        return time.monotonic() - started

    def end(self) -> int:
        self.client.put(0)
        self.client.result()
        total: int = self.server.result()
        return total


@pytest.mark.parametrize("own_memory", [False, True])
def test_hosts_reach_each_other(farm: Farm, network: Network, own_memory: bool) -> None:
    """Over TCP, at addresses of their own, and the bytes on the wire are counted."""
    one, other = network.hosts(2, own_memory=own_memory)
    talk = Conversation(farm, one, other)
    sent, received = one.sent_bytes, other.received_bytes
    talk.round_trip(50_000)
    assert 50_000 < one.sent_bytes - sent < 60_000
    assert 50_000 < other.received_bytes - received < 60_000
    assert talk.end() == 50_000


def test_what_stays_on_a_host_is_not_counted(farm: Farm, network: Network) -> None:
    """Loopback is no wire."""
    host = network.host()
    talk = Conversation(farm, host, host)
    sent = host.sent_bytes
    talk.round_trip(50_000)
    assert host.sent_bytes == sent
    talk.end()


def test_a_host_knows_nothing_of_other_networks(farm: Farm, network: Network) -> None:
    """It has a loopback and its wire, and does not reach the listeners of the machine."""
    host = network.host()
    assert farm.worker(host=host).call(look_around)[2] == ["lo", "eth0"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(WorkerError, match="refused"):
            farm.worker(host=host).call(connect, "127.0.0.1", server.getsockname()[1])
        with host.entered(), pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.getsockname())
        socket.create_connection(server.getsockname()).close()  # back where it was


def test_own_memory(farm: Farm, network: Network) -> None:
    """Pids, /proc, /dev/shm and TMPDIR are of the host; its processes share them, and the test sees them all the same."""
    one, other = network.hosts(2, own_memory=True)
    first, second = farm.several(2, host=one)
    pid, shm, _, directory = first.call(look_around)
    assert pid != first.pid
    assert shm == []
    for path in (f"{directory}/a-file", "/dev/shm/aioarena-test-of-hosts"):
        first.call(leave_a_file, path)
        assert second.call(exists, path)
        assert not farm.worker(host=other).call(exists, path)
        assert not Path(path).exists()
    assert second.call(exists, f"/proc/{pid}/fd")
    assert not farm.worker(host=other).call(exists, f"/proc/{first.pid}/fd")
    second.start(sleep)
    assert second.get() == "here"
    second.kill()
    assert second.wait() == -signal.SIGKILL


def test_channels_on_a_host_and_beyond(farm: Farm, network: Network) -> None:
    """Readers on the host of the sender attach its memory; another host cannot, where each has memory of its own."""
    one, other = network.hosts(2, own_memory=True)
    sender, *readers = farm.several(3, host=one)
    sender.start(send, 2)
    handle = sender.get()
    stranger = farm.worker(host=other).call(attach, handle, 0)
    assert "another container" in stranger
    for rank, reader in enumerate(readers):
        reader.start(receive, handle, rank)
    assert [reader.result() for reader in readers] == [MIB, MIB]
    assert sender.result() is None


def test_hosts_without_own_memory_share_it(farm: Farm, network: Network) -> None:
    """A network namespace alone keeps nobody from memory."""
    one, other = network.hosts(2)
    sender, reader = farm.worker(host=one), farm.worker(host=other)
    sender.start(send, 1)
    assert reader.call(receive, sender.get(), 0) == MIB
    assert sender.result() is None
    assert one.sent_bytes == other.sent_bytes == 0


def test_delay(farm: Farm, network: Network) -> None:
    """Each packet takes that long on the wire of a host, each way; a wire that is repaired does not."""
    one, other = network.hosts(2)
    talk = Conversation(farm, one, other)
    one.impair(delay=0.05)
    assert talk.round_trip() >= 0.1
    other.impair(delay=0.05)
    assert talk.round_trip() >= 0.2
    one.repair()
    assert talk.round_trip() >= 0.1
    other.impair()
    talk.round_trip()
    talk.end()


def test_rate(farm: Farm, network: Network) -> None:
    """No more than so many bytes a second get through."""
    one, other = network.hosts(2)
    one.impair(rate=200_000)
    talk = Conversation(farm, one, other)
    assert talk.round_trip(60_000) >= 0.25
    assert talk.end() == 60_000


def test_loss(farm: Farm, network: Network) -> None:
    """Packets are lost, and TCP brings all bytes over nevertheless."""
    one, other = network.hosts(2)
    talk = Conversation(farm, one, other)
    other.impair(loss=0.2, seed=7)
    sent, received = one.sent_bytes, other.received_bytes
    talk.round_trip(40_000)
    assert other.received_bytes - received < one.sent_bytes - sent
    assert talk.end() == 40_000


def test_cut_and_mend(farm: Farm, network: Network) -> None:
    """A cut is silent: nothing arrives and nobody is told. Mended in time, the connection goes on."""
    one, other = network.hosts(2)
    talk = Conversation(farm, one, other)
    talk.round_trip()
    other.cut()
    received, sent = other.received_bytes, one.sent_bytes
    talk.client.put(7)
    eventually(lambda: one.sent_bytes > sent + 7, "it does not try again")
    assert other.received_bytes == received
    assert not talk.client.link.connection.poll()
    other.mend()
    assert talk.client.get() == "answered"
    assert talk.end() == 8


def test_crash(farm: Farm, network: Network) -> None:
    """All processes of a host end at once, and the other side hears nothing."""
    one, other = network.hosts(2, own_memory=True)
    talk = Conversation(farm, one, other)
    received = one.received_bytes
    other.crash()
    assert talk.server.wait() == -signal.SIGKILL
    assert one.received_bytes == received
    talk.client.put(1)
    assert not talk.client.link.connection.poll()


async def test_scripts_run_on_the_loop_of_the_test(farm: Farm, network: Network) -> None:
    """Coroutine scripts, too, on hosts."""
    (host,) = network.hosts(1, own_memory=True)
    sender, reader = farm.several(2, host=host)
    sender.start(send, 1)
    assert await reader.acall(receive, await sender.aget(), 0) == MIB
    await sender.aresult()


def test_commands(network: Network) -> None:
    """Programs that are not scripts of ours run on a host by a command line."""
    one, other = network.host(), network.host(own_memory=True)
    for host in (one, other):
        command = host.command(sys.executable, "-S", "-c", "print(open('/proc/net/fib_trie').read())")
        assert host.address in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_nothing_is_left_when_the_tests_are_killed(tmp_path: Path) -> None:
    """The namespaces live in processes that end with the tests, and with the namespaces all that is in them."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    code = (
        "import sys, os, signal, pathlib\n"
        "from tests.network.hosts import Network\n"
        "network = Network(pathlib.Path(sys.argv[1]))\n"
        "one, other = network.host(), network.host(own_memory=True)\n"
        "try:\n    one.impair(delay=1)\nexcept Exception:\n    pass\n"
        "print(one.pid, other.pid, network._holder.pid, one._pump.pid if one._pump else one.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, stdout=subprocess.PIPE, env=environ, text=True
    )
    assert done.returncode == -signal.SIGKILL
    for pid in map(int, done.stdout.split()):
        eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"process {pid} is left")


def test_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be, the word says why."""
    for name, value, reason in [
        ("geteuid", lambda: 1000, "take root"),
        ("which", lambda tool: None if tool == "ip" else f"/usr/bin/{tool}", "need ip, from iproute2"),
    ]:
        hosts.why_not.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(os if name == "geteuid" else hosts.shutil, name, value)
            with pytest.raises(hosts.NotPermitted, match=reason):
                Network()
    hosts.why_not.cache_clear()

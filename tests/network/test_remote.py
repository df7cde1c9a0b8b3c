"""Channels between hosts: real processes on networks of their own, with wires that are long, lossy or cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aioarena
from aioarena import GroupError, Receiver, Relay, Sender, blocking, from_process_group
from tests.multiprocess.harness import SOON, Farm, Link, Worker, eventually, timed
from tests.multiprocess.messages import CHANNEL, KINDS, message, verify
from tests.multiprocess.scripts import describe
from tests.network.hosts import Host, Network

# Long enough that a busy machine is not taken for a cut wire, short enough to wait for.
TIMEOUT = 2.0


# Scripts -----------------------------------------------------------------------------------------------------------------


async def sender(link: Link, address: str, readers: int, remote_readers: int, **options: Any) -> None:
    """Send what it is told: a kind and a number; or say how it is."""
    channel = Sender(
        readers,
        **{**CHANNEL, "remote_timeout": TIMEOUT, **options},
        remote_readers=remote_readers,
        bind=f"tcp://{address}:0",
    )
    async with channel as chan:
        link.put(chan.handle)
        while True:
            match await link.aget():
                case "close":
                    return
                case "state":
                    link.put([status.state for status in chan.statistics().readers])
                case "slots":
                    link.put(chan.statistics().slots_used)
                case "resident":
                    link.put(resident())
                case (str(kind), int(number)):
                    await attempt(link, chan.send(message(kind, number)))
                case ("fill", float(seconds)):
                    sent = 0
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            while True:
                                await chan.send(message("arena", sent))
                                sent += 1
                    link.put(sent)


def resident() -> int:
    """Bytes of this process in memory, without what it shares."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


async def attempt(link: Link, call: Any) -> Any:
    try:
        result = await call
    except aioarena.ArenaError as error:
        link.put(describe(error))
        return None
    link.put("done")
    return result


async def reader(link: Link, handle: aioarena.Handle, rank: int) -> None:
    """Receive and check when told."""
    async with Receiver(handle, rank) as chan:
        link.put("joined")
        while (command := await link.aget()) != "close":
            count = command if isinstance(command, int) else 1
            for _ in range(count):
                try:
                    got = await chan.recv()
                except aioarena.ArenaError as error:
                    link.put(describe(error))
                    break
                verify(got)
                number = got["number"]
                del got
            else:
                link.put(number)


async def relay(link: Link, handle: aioarena.Handle, readers: int, **options: Any) -> Any:
    async with Relay(handle, readers, **options) as end:
        link.put(end.handle)
        try:
            await end.wait_closed()
        except aioarena.ArenaError as error:
            return describe(error)
        return end.received_bytes


def in_group(link: Link, rank: int, hosts: int, master: str, options: dict[str, Any], blocked: bool) -> Any:
    """One rank of a group over several hosts: which end it got, and what went through."""
    os.environ.update(MASTER_ADDR=master, MASTER_PORT="29500", GLOO_SOCKET_IFNAME="eth0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    try:
        if blocked:
            return use_blocking(blocking.from_process_group(src=1, sender={**CHANNEL, **options}))
        return asyncio.run(use(options))
    except GroupError as error:
        return describe(error)
    finally:
        dist.destroy_process_group()


async def use(options: dict[str, Any]) -> Any:
    end = await from_process_group(src=1, sender={**CHANNEL, **options})
    if isinstance(end, Sender):
        for number, kind in enumerate(KINDS):
            await end.send(message(kind, number))
        await end.aclose()
        return "sent"
    numbers = []
    async for got in end:
        verify(got)
        numbers.append(got["number"])
    rank, local = end.rank, end.rank < end.handle.local_readers
    await end.aclose()
    return rank, local, numbers


def use_blocking(end: Any) -> Any:
    if isinstance(end, blocking.Sender):
        for number, kind in enumerate(KINDS):
            end.send(message(kind, number))
        end.close()
        return "sent"
    numbers = []
    for got in end:
        verify(got)
        numbers.append(got["number"])
    rank, local = end.rank, end.rank < end.handle.local_readers
    end.close()
    return rank, local, numbers


# Tests -------------------------------------------------------------------------------------------------------------------


class Channel:
    """A sender with a reader on its own host and one on another."""

    def __init__(self, farm: Farm, network: Network, **options: Any) -> None:
        self.here, self.there = network.hosts(2, own_memory=True)
        self.sender, self.local = farm.several(2, host=self.here)
        self.remote = farm.worker(host=self.there)
        self.sender.start(sender, self.here.address, 1, 1, **options)
        self.handle = self.sender.get()
        self.local.start(reader, self.handle, 0)
        self.remote.start(reader, self.handle, 1)
        assert self.local.get() == self.remote.get() == "joined"

    def send(self, kind: str, number: int) -> Any:
        return self.sender.ask(kind, number)


def test_all_kinds_arrive(farm: Farm, network: Network) -> None:
    """On the host and beyond, whole and in order; and what is for readers here goes over no wire."""
    channel = Channel(farm, network)
    for number, kind in enumerate(KINDS * 3):
        assert channel.send(kind, number) == "done"
        assert channel.local.ask("receive") == number == channel.remote.ask("receive")
    channel.sender.put("close")
    for worker in (channel.local, channel.remote):
        assert worker.ask("receive")["type"] == "EndOfChannel"
    channel.sender.result()


def test_a_long_and_lossy_wire(farm: Farm, network: Network) -> None:
    """Delay and loss cost time, not messages."""
    channel = Channel(farm, network, remote_timeout=20.0)
    channel.there.impair(delay=0.01, loss=0.02, seed=3)
    channel.local.put(21)
    channel.remote.put(21)
    for number, kind in enumerate(KINDS * 3):
        assert channel.send(kind, number) == "done"
    assert channel.local.get() == channel.remote.get() == 20


def test_a_short_cut_leaves_no_gap(farm: Farm, network: Network) -> None:
    """Shorter than the time-out: the messages of the meantime come after it."""
    channel = Channel(farm, network, remote_timeout=30.0)
    assert channel.send("arena", 0) == "done"
    channel.there.cut()
    sent = channel.here.sent_bytes
    for number, kind in enumerate(KINDS, 1):
        assert channel.send(kind, number) == "done"
        assert channel.local.ask("receive") == number - 1
    eventually(lambda: channel.here.sent_bytes > sent, "it does not even try")
    channel.there.mend()
    assert channel.remote.ask(len(KINDS) + 1) == len(KINDS)


def test_a_pulled_cable_is_told(farm: Farm, network: Network) -> None:
    """To both sides, within the time-out; the slots come back, and a new reader takes the rank."""
    channel = Channel(farm, network)
    for number in range(3):
        assert channel.send("arena", number) == "done"
        assert channel.local.ask("receive") == number
    assert channel.remote.ask(3) == 2
    with timed(TIMEOUT + SOON):
        channel.there.cut()
        error = channel.remote.ask("receive")
        eventually(lambda: channel.sender.ask("state") == ["joined", "lost"], "it is not lost")
    assert error["type"] == "SenderLostError" and error["received"] == 3
    error = channel.send("small", 3)
    assert error["type"] == "ReaderLostError" and error["rank"] == 1 and "lost its connection" in error["text"]
    eventually(lambda: channel.sender.ask("slots") == 0, "slots are held for nobody")
    channel.there.mend()
    successor = farm.several(1, host=channel.there)[0]
    successor.start(reader, channel.handle, 1)
    assert successor.get() == "joined"
    assert channel.send("arena", 4) == "done"
    assert successor.ask("receive") == 4


@pytest.mark.parametrize("sign", ["kill", "crash"])
def test_a_reader_dies(farm: Farm, network: Network, sign: str) -> None:
    """Killed, or its host is gone."""
    channel = Channel(farm, network)
    assert channel.send("arena", 0) == "done"
    with timed(TIMEOUT + SOON):
        if sign == "kill":
            channel.remote.kill()
        else:
            channel.there.crash()
        eventually(lambda: channel.sender.ask("state") == ["joined", "lost"], "it is not lost")
    error = channel.send("small", 1)
    assert error["type"] == "ReaderLostError" and error["rank"] == 1 and "on host" in error["text"]
    assert channel.local.ask("receive") == 0
    eventually(lambda: channel.sender.ask("slots") == 0, "slots are held for the dead")


@pytest.mark.parametrize("sign", ["kill", "crash"])
def test_a_sender_dies(farm: Farm, network: Network, sign: str) -> None:
    """What was on its way is received, then the error."""
    channel = Channel(farm, network)
    for number in range(3):
        assert channel.send("arena", number) == "done"
    assert channel.remote.ask("receive") == 0
    with timed(TIMEOUT + SOON):
        if sign == "kill":
            channel.sender.kill()
        else:
            channel.here.crash()
        last = channel.remote.ask(3)
        assert last["type"] == "SenderLostError" and "not heard of any more" in last["text"]
    if sign == "kill":
        assert channel.local.ask(4)["type"] == "SenderLostError"


def test_a_stopped_reader_bounds_the_sender(farm: Farm, network: Network) -> None:
    """As a local one: sends wait, memory does not grow, and when it goes on there is no gap."""
    channel = Channel(farm, network, remote_timeout=60.0)
    channel.remote.stop()
    channel.local.put(100_000)
    before = channel.sender.ask("resident")
    sent = channel.sender.ask("fill", 1.0)
    assert channel.sender.ask("resident") - before < 100 << 20
    channel.remote.resume()
    assert channel.remote.ask(sent) == sent - 1


def relayed(farm: Farm, network: Network, readers: int) -> tuple[Worker, Worker, list[Worker], Host]:
    here, there = network.hosts(2, own_memory=True)
    source = farm.worker(host=here)
    source.start(sender, here.address, 0, 1)
    passing, *ends = farm.several(1 + readers, host=there)
    passing.start(relay, source.get(), readers)
    handle = passing.get()
    for rank, end in enumerate(ends):
        end.start(reader, handle, rank)
        assert end.get() == "joined"
    return source, passing, ends, there


def test_one_copy_for_each_host(farm: Farm, network: Network) -> None:
    """Three readers behind a relay cost the wire what one costs."""
    source, passing, ends, there = relayed(farm, network, 3)
    before, nbytes = there.received_bytes, 0
    for number in range(20):
        assert source.ask("arena", number) == "done"
        nbytes += 100_000
        for end in ends:
            assert end.ask("receive") == number
    assert nbytes < there.received_bytes - before < 1.5 * nbytes
    source.put("close")
    assert passing.result() > nbytes
    for end in ends:
        assert end.ask("receive")["type"] == "EndOfChannel"


def test_a_reader_behind_a_relay_dies(farm: Farm, network: Network) -> None:
    """The relay says so, its other readers hear of it, and the sender of both hosts."""
    source, passing, ends, _ = relayed(farm, network, 2)
    assert source.ask("arena", 0) == "done"
    assert [end.ask("receive") for end in ends] == [0, 0]
    ends[1].kill()
    error = passing.result()
    assert error["type"] == "ReaderLostError" and error["rank"] == 1
    error = ends[0].ask("receive")
    assert error["type"] == "SenderLostError" and "reader 1 (pid" in error["text"]
    eventually(lambda: source.ask("state") == ["lost"], "it is not lost")
    error = source.ask("small", 1)
    assert error["type"] == "ReaderLostError" and "reader 1 (pid" in error["text"]


def test_a_relay_dies(farm: Farm, network: Network) -> None:
    source, passing, ends, _ = relayed(farm, network, 2)
    assert source.ask("arena", 0) == "done"
    with timed(TIMEOUT + SOON):
        passing.kill()
        for end in ends:
            assert end.ask(2)["type"] == "SenderLostError"
        eventually(lambda: source.ask("state") == ["lost"], "it is not lost")


def test_a_sender_dies_before_a_relay(farm: Farm, network: Network) -> None:
    source, passing, ends, _ = relayed(farm, network, 2)
    assert source.ask("arena", 0) == "done"
    assert [end.ask("receive") for end in ends] == [0, 0]
    with timed(TIMEOUT + SOON):
        source.kill()
        assert passing.result()["type"] == "SenderLostError"
        for end in ends:
            error = end.ask("receive")
            assert error["type"] == "SenderLostError" and "not heard of any more" in error["text"]


def test_many_remote_readers_on_several_hosts(farm: Farm, network: Network) -> None:
    """Beside one here that relays nothing; each has its own pace."""
    here, *others = network.hosts(3, own_memory=True)
    source = farm.worker(host=here)
    source.start(sender, here.address, 0, 4)
    handle = source.get()
    ends = [worker for host in others for worker in farm.several(2, host=host)]
    for rank, end in enumerate(ends):
        end.start(reader, handle, rank)
        assert end.get() == "joined"
    for number, kind in enumerate(KINDS):
        assert source.ask(kind, number) == "done"
    for end in ends:
        assert end.ask(len(KINDS)) == len(KINDS) - 1


# Process groups ----------------------------------------------------------------------------------------------------------


def group(farm: Farm, here: Host, there: Host, options: dict[str, Any], blocked: bool = False) -> list[Any]:
    """What the ranks of a group get: 1, the source, and 3 on one host, 0, the master, and 2 on another."""
    ranks = [farm.worker(host=here if rank % 2 else there) for rank in range(4)]
    for rank, worker in enumerate(ranks):
        worker.start(in_group, rank, 2, there.address, options, blocked)
    return [worker.result() for worker in ranks]


@pytest.mark.parametrize("blocked", [False, True])
def test_a_group_over_two_hosts(farm: Farm, network: Network, blocked: bool) -> None:
    """Who shares the memory of the sender is a local reader, the others are remote ones."""
    here, there = network.hosts(2, own_memory=True)
    numbers = list(range(len(KINDS)))
    assert group(farm, here, there, {}, blocked) == [(1, False, numbers), "sent", (2, False, numbers), (0, True, numbers)]


def test_a_group_with_one_memory(farm: Farm, network: Network) -> None:
    """Networks of their own do not matter where the memory is one."""
    here, there = network.hosts(2)
    numbers = list(range(len(KINDS)))
    assert group(farm, here, there, {}) == [(0, True, numbers), "sent", (1, True, numbers), (2, True, numbers)]


def test_a_group_whose_sender_cannot_be_reached(farm: Farm, network: Network) -> None:
    """All ranks are told the same."""
    here, there = network.hosts(2, own_memory=True)
    outcomes = group(farm, here, there, {"bind": "tcp://127.0.0.1:0", "remote_timeout": 0.5})
    for outcome in outcomes:
        assert outcome["type"] == "GroupError" and "nobody answers at tcp://127.0.0.1" in outcome["text"]

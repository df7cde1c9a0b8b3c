"""Nothing is left behind, however processes end; nothing is removed too early, and never anything of a stranger."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import aioarena
from aioarena._platform.process import ProcessIdentity
from tests.multiprocess.conftest import SHM, leftovers
from tests.multiprocess.harness import PATIENCE, Farm, Worker, eventually, process_state
from tests.multiprocess.messages import CHANNEL, message, numbered
from tests.multiprocess.senders import attach

BACKINGS = pytest.mark.parametrize("backing", ["memfd", "shm"])


def segments_of(worker: Worker | None = None) -> list[Path]:
    """Files in /dev/shm that a worker, or this process, has made."""
    return [
        path for path in SHM.glob("aioarena-*") if path.name.split("-")[2] == str(worker.pid if worker else os.getpid())
    ]


# Not too early: B18 ------------------------------------------------------------------------------------------------------


@BACKINGS
async def test_readers_that_come_and_go(farm: Farm, backing: str) -> None:
    """Whatever earlier readers did, one that is declared can attach as long as the channel is open."""
    async with aioarena.Sender(3, backing=backing, on_reader_lost="continue", **CHANNEL) as chan:
        first, second, third = farm.several(3)
        first.start("reader", chan.handle, 0)
        assert await first.aget() == "joined"
        first.put("close")
        assert await first.aresult() == "closed"
        second.start("reader", chan.handle, 1)
        assert await second.aget() == "joined"
        second.kill()
        # All three have been there now, so that names in /dev/shm are gone: later readers still attach.
        third.start("reader", chan.handle, 2)
        assert await third.aget() == "joined"
        assert segments_of() == []
        await chan.send(message("mixed", 0))
        first.start("reader", chan.handle, 0)
        fourth = farm.worker()
        fourth.start("reader", chan.handle, 1)
        for worker in (first, fourth):
            assert await worker.aget() == "joined"
        for kind, number in numbered(7, first=1):
            await chan.send(message(kind, number))
        assert await third.aask("recv", 8) == list(range(8))
        for worker in (first, fourth):
            assert await worker.aask("recv", 7) == list(range(1, 8))
            assert worker.output == ""


@BACKINGS
def test_fresh_interpreters_that_attach_and_exit(farm: Farm, backing: str) -> None:
    """Readers with a resource tracker of their own attach, exit and are killed; the next one attaches all the same."""
    asyncio.run(_attach_and_exit(farm, backing))


async def _attach_and_exit(farm: Farm, backing: str) -> None:
    async with aioarena.Sender(3, backing=backing, on_reader_lost="continue", **CHANNEL) as chan:
        readers = farm.several(3, "subprocess")
        readers[0].start("reader", chan.handle, 0)
        assert await readers[0].aget() == "joined"
        readers[0].put("close")
        assert await readers[0].aresult() == "closed"
        assert readers[0].finish() == 0
        readers[1].start("reader", chan.handle, 1)
        assert await readers[1].aget() == "joined"
        readers[1].kill()
        readers[2].start("reader", chan.handle, 2)
        assert await readers[2].aget() == "joined"
        await chan.send(message("arena", 0))
        assert await readers[2].aask("recv", 1) == [0]
        assert [worker.output for worker in readers] == ["", "", ""]


async def test_names_in_shm_vanish_when_all_are_in(farm: Farm) -> None:
    """A file segment has a name, for this user only, until the last reader has attached, and none afterwards."""
    async with aioarena.Sender(2, backing="shm", **CHANNEL) as chan:
        names = segments_of()
        assert sorted(path.suffix for path in names) == [".arena", ".control"]
        assert {path.stat().st_mode & 0o777 for path in names} == {0o600}
        await attach(farm, chan.handle)
        assert segments_of() == []
    chan = aioarena.Sender(2, backing="shm", **CHANNEL)
    assert len(segments_of()) == 2
    await chan.aclose()
    assert segments_of() == []


async def test_the_socket_is_for_this_user_only_and_goes_with_the_sender(farm: Farm, tmpdir_for_sockets: Path) -> None:
    """The socket lies in a directory of mode 0700 and is removed on close."""
    directory = tmpdir_for_sockets / f"aioarena-{os.getuid()}"
    async with aioarena.Sender(1, **CHANNEL) as chan:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert [str(path) for path in directory.iterdir()] == [chan.handle.address]
    assert list(directory.iterdir()) == []


# Not too late: B19 -------------------------------------------------------------------------------------------------------


def start_group(farm: Farm, readers: int, **options: Any) -> tuple[Worker, list[Worker], aioarena.Handle]:
    """A sender and workers to be its readers, in a process group of their own."""
    sender = farm.worker(group=0)
    others = farm.several(readers, group=sender.pid)
    sender.start("sender", readers, **options)
    return sender, others, sender.get()


def kill_group(workers: list[Worker], reap: bool = True) -> None:
    os.killpg(workers[0].pid, signal.SIGKILL)
    for worker in workers:
        worker.untidy = True
        eventually(lambda worker=worker: process_state(worker.pid) == "Z", f"{worker} survived")
        if reap:
            worker.wait()


@BACKINGS
def test_a_group_killed_in_the_middle_of_transfers(farm: Farm, tmpdir_for_sockets: Path, backing: str) -> None:
    """What five channels leave that are killed with all their processes, the next start removes; a sixth, alive, stays."""
    undisturbed, its_reader = farm.several(2)
    undisturbed.start("sender", 2, backing=backing, **CHANNEL)
    its_handle = undisturbed.get()
    its_reader.start("reader", its_handle, 0)
    assert its_reader.get() == "joined"
    of_the_living = leftovers(tmpdir_for_sockets, {undisturbed.pid})
    assert len(of_the_living) == (3 if backing == "shm" else 1)  # its second reader is not in, so its names are there
    dead = set()
    for _ in range(5):
        sender, readers, handle = start_group(farm, 2, backing=backing, **CHANNEL)
        for rank, worker in enumerate(readers):
            worker.start("reader", handle, rank)
            assert worker.get() == "joined"
            worker.put("drain")
        sender.put("send forever", ("arena", "frame", "small"))
        assert sender.get() == "sending"
        kill_group([sender, *readers])
        dead |= {sender.pid}
    assert leftovers(tmpdir_for_sockets, dead)
    aioarena.Sender(1, arena=None)
    assert leftovers(tmpdir_for_sockets, dead) == {}
    assert leftovers(tmpdir_for_sockets, {undisturbed.pid}) == of_the_living
    late = farm.worker()
    late.start("reader", its_handle, 1)
    assert late.get() == "joined"
    undisturbed.ask("send", numbered(14))
    assert its_reader.ask("recv", 14) == late.ask("recv", 14) == list(range(14))
    undisturbed.put("close")
    assert undisturbed.result() == "closed"
    assert leftovers(tmpdir_for_sockets, {undisturbed.pid}) == {}


@pytest.mark.parametrize("reaped", [True, False])
def test_a_group_killed_while_it_starts(farm: Farm, tmpdir_for_sockets: Path, reaped: bool) -> None:
    """Killed before all readers are in, when names in /dev/shm exist: the next start of any sender removes them.

    Also if nobody has waited for the dead processes yet.
    """
    sender, readers, handle = start_group(farm, 2, backing="shm", **CHANNEL)
    readers[0].start("reader", handle, 0)
    assert readers[0].get() == "joined"
    kill_group([sender, *readers], reap=reaped)
    # A socket, and two segments unless another program of this user has just started a channel and swept them.
    assert 1 <= len(leftovers(tmpdir_for_sockets, {sender.pid})) <= 3
    aioarena.Sender(1, arena=None)
    assert leftovers(tmpdir_for_sockets, {sender.pid}) == {}


def test_what_a_start_leaves_alone(farm: Farm, tmpdir_for_sockets: Path) -> None:
    """Files of live processes, of other pid namespaces, of other users, and files that are not ours at all, stay."""
    me = ProcessIdentity.current()
    stranger = farm.worker()
    gone = farm.worker()
    identities = {worker: worker.call("identity") for worker in (stranger, gone)}
    gone.kill()
    gone.wait()
    dead = identities[gone]
    directory = tmpdir_for_sockets / f"aioarena-{os.getuid()}"
    directory.mkdir(mode=0o700)

    def name(identity: ProcessIdentity, suffix: str) -> str:
        return f"aioarena-{identity.pid_namespace}-{identity.pid}-{identity.start_ticks}-0badcafe.{suffix}"

    for where, suffix in ((SHM, "arena"), (SHM, "control"), (directory, "sock")):
        other_namespace = ProcessIdentity(dead.pid, dead.start_ticks, me.pid_namespace + 1)
        stay = [name(identities[stranger], suffix), name(me, suffix), name(other_namespace, suffix)]
        stay += [f"other-{name(dead, suffix)}", f"{name(dead, suffix)}.bak", "aioarena-notes.txt"]
        foreign = f"aioarena-{dead.pid_namespace}-{dead.pid}-{dead.start_ticks}-0badf00d.{suffix}"
        go = [name(dead, suffix)]
        paths = {where / one for one in [*stay, foreign, *go]}
        assert not any(path.exists() for path in paths)
        try:
            for path in paths:
                path.touch()
            if os.getuid() == 0:
                os.chown(where / foreign, 65534, 65534)
            else:
                (where / foreign).unlink()
            aioarena.Sender(1, arena=None)
            assert {path.name for path in paths if path.exists()} >= set(stay)
            assert os.getuid() != 0 or (where / foreign).exists()
            assert not any((where / one).exists() for one in go)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)


def test_a_pid_that_was_reused(farm: Farm, tmpdir_for_sockets: Path) -> None:
    """The start time tells a dead owner from the live process that has its pid now: that one's files stay, his go."""
    worker = farm.worker()
    now = worker.call("identity")
    before = ProcessIdentity(now.pid, now.start_ticks - 1, now.pid_namespace)
    assert now.alive
    assert not before.alive
    paths = {
        identity: SHM / f"aioarena-{identity.pid_namespace}-{identity.pid}-{identity.start_ticks}-0badcafe.arena"
        for identity in (now, before)
    }
    try:
        for path in paths.values():
            path.touch()
        aioarena.Sender(1, arena=None)
        assert paths[now].exists()
        assert not paths[before].exists()
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def test_a_directory_that_cannot_be_swept(farm: Farm, tmpdir_for_sockets: Path) -> None:
    """Sweeping never raises: a directory in place of a file, or a file that vanishes, is nothing to stop for."""
    gone = farm.worker()
    dead = gone.call("identity")
    gone.kill()
    gone.wait()
    directory = tmpdir_for_sockets / f"aioarena-{os.getuid()}"
    directory.mkdir(mode=0o700)
    odd = directory / f"aioarena-{dead.pid_namespace}-{dead.pid}-{dead.start_ticks}-0badcafe.sock"
    odd.mkdir()
    aioarena.Sender(1, arena=None)
    odd.rmdir()


def test_two_starts_at_once(farm: Farm, tmpdir_for_sockets: Path) -> None:
    """Senders that start side by side, sweeping the same leftovers, do not remove each other's."""
    sender, _, _ = start_group(farm, 1, backing="shm", **CHANNEL)
    kill_group([sender])
    senders = farm.several(6)
    for worker in senders:
        worker.start("start_and_close_many", 10)
    for worker in senders:
        assert worker.result(2 * PATIENCE) == 10
        assert worker.output == ""
    assert leftovers(tmpdir_for_sockets, {sender.pid, *(worker.pid for worker in senders)}) == {}

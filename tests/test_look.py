"""Looking from outside: which channels there are, what this machine allows, what dead processes left."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aioarena
from aioarena import Receiver, Sender, cli
from aioarena._core.layout import MAGIC, VERSION, Layout
from aioarena._core.sender import Membership
from aioarena._look import commands, doctor
from aioarena._look.channels import Channel, ChannelView, LookError, _descriptors, choose, find
from aioarena._platform.memory import owned_name
from aioarena._platform.process import ProcessIdentity, own_pid_namespace
from tests.conftest import ARENA, RING_BYTES, OpenChannel
from tests.fronts.support import filled, until
from tests.gpu_seam.fake import FakeGpu

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _leaves_nothing(no_leaks: None) -> None:
    pass


def view_of(sender: Sender) -> ChannelView:
    """The one channel that is this sender's, among all on the machine."""
    inode = sender.handle.control.inode
    (view,) = [channel.view() for channel in find()[0] if channel.inode == inode]
    return view


# Channels -------------------------------------------------------------------------------------------------------------


async def test_a_channel_is_found_with_its_readers(open_channel: OpenChannel) -> None:
    async with open_channel(2, name="engine") as channel:
        for number in range(3):
            await channel.sender.send(number)
        await channel.receivers[1].recv()
        view = view_of(channel.sender)
        assert (view.name, view.pid, view.backing, view.closed) == ("engine", os.getpid(), "memfd", False)
        assert (view.messages, view.ring_bytes, view.arena_bytes) == (3, RING_BYTES, ARENA.capacity)
        assert [(reader.rank, reader.pid, reader.seated) for reader in view.readers] == [
            (0, os.getpid(), True),
            (1, os.getpid(), True),
        ]
        assert [(reader.messages, reader.messages_behind) for reader in view.readers] == [(0, 3), (1, 2)]
        assert view.readers[0].bytes_behind > view.readers[1].bytes_behind > 0


async def test_readers_that_are_awaited_and_have_left(open_channel: OpenChannel) -> None:
    async with Sender(2, arena=None) as sender:
        async with Receiver(sender.handle, 1):
            pass
        awaited, left = view_of(sender).readers
        assert (awaited.pid, awaited.seated, awaited.process) == (None, False, "awaited")
        assert (left.pid, left.seated, left.messages_behind) == (os.getpid(), False, 0)


async def test_readers_on_other_hosts(open_channel: OpenChannel) -> None:
    """They have a seat, and no process that could be looked at."""
    async with Sender(1, arena=None) as sender:
        sender._core.join(0, 77)
        (remote,) = view_of(sender).readers
        assert (remote.pid, remote.seated, remote.state) == (None, True, "on another host")
        sender._core.unseat(0, Membership.LEFT)


async def test_memory_of_the_arena(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        assert view_of(channel.sender).arena_in_memory == 0
        await channel.sender.send(filled(1, 1 << 20))
        assert view_of(channel.sender).arena_in_memory == 1 << 20
    async with open_channel(arena=None) as channel:
        assert (view_of(channel.sender).arena_bytes, view_of(channel.sender).arena_in_memory) == (0, 0)


async def test_files_are_found_with_their_name_and_without(open_channel: OpenChannel) -> None:
    """That of a shm segment goes when all readers are in."""
    async with Sender(1, arena=ARENA, backing="shm", name="in a file") as sender:
        assert (view_of(sender).name, view_of(sender).backing) == ("in a file", "shm")
        async with Receiver(sender.handle, 0):
            assert not os.path.exists(sender.handle.control.path)
            assert view_of(sender).backing == "shm"
            assert view_of(sender).arena_in_memory == 0


async def test_processes_of_another_pid_namespace(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pids are somebody else's here, whatever the memory is."""
    async with open_channel() as channel, Sender(1, arena=None, backing="shm") as sender:
        here = own_pid_namespace()
        monkeypatch.setattr("aioarena._look.channels.own_pid_namespace", lambda: here + 1)
        assert view_of(channel.sender).process == "in another pid namespace"
        assert view_of(channel.sender).readers[0].process == "in another pid namespace"
        assert view_of(sender).process == "in another pid namespace"


async def test_files_of_processes_that_cannot_be_seen(
    open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As of containers that share /dev/shm. Files of our own namespace are somebody's whom /proc shows, or nobody's."""
    async with Sender(1, name="elsewhere", arena=None, backing="shm") as sender:
        monkeypatch.setattr("aioarena._look.channels._PROC", tmp_path)
        inode = sender.handle.control.inode
        assert inode not in [channel.inode for channel in find()[0]]
        here = own_pid_namespace()
        monkeypatch.setattr("aioarena._look.channels.own_pid_namespace", lambda: here + 1)
        view = view_of(sender)
        assert (view.name, view.pid, view.process) == ("elsewhere", os.getpid(), "in another pid namespace")
        assert inode not in [channel.inode for channel in find(pid=os.getpid())[0]]
        monkeypatch.setattr("aioarena._look.channels._INITIAL_NAMESPACE", here + 1)
        assert inode not in [channel.inode for channel in find()[0]]


@pytest.mark.parametrize("name", ["ä" * 100, "x" * 500, ""])
async def test_any_name(open_channel: OpenChannel, name: str) -> None:
    """A long one is cut off, between characters; none hides the channel."""
    async with open_channel(name=name) as channel:
        seen = view_of(channel.sender).name
        assert name.startswith(seen)
        assert len(seen.encode()) == min(48, len(name.encode()))


async def test_a_closed_one_whose_readers_are_there(open_channel: OpenChannel) -> None:
    sender = Sender(1, arena=None)
    await sender.start()
    async with Receiver(sender.handle, 0):
        await sender.aclose()
        assert view_of(sender).closed


async def test_looking_changes_nothing(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        (found,) = [one for one in find()[0] if one.inode == channel.sender.handle.control.inode]
        with pytest.raises(TypeError, match="read-only"):
            found._words[0] = 1


@pytest.fixture
def strange_memory() -> Iterator[Any]:
    """Makes memory that is named like a channel's, with words of the caller's."""
    descriptors: list[int] = []

    def make(*words: int, nbytes: int = 8192) -> int:
        fd = os.memfd_create("aioarena-strange-control")
        descriptors.append(fd)
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, b"".join(word.to_bytes(8, "little") for word in words), 0)
        return os.fstat(fd).st_ino

    def close() -> None:
        while descriptors:
            os.close(descriptors.pop())

    make.close = close  # type: ignore[attr-defined]
    yield make
    close()


@pytest.mark.parametrize(
    ("words", "nbytes", "why"),
    [
        ((), 64, "no channel, or one that is being made"),
        ((), 8192, "no channel, or one that is being made"),
        ((MAGIC, VERSION + 1), 8192, f"layout version {VERSION + 1}, this is {VERSION}"),
        ((MAGIC, VERSION, 0, 0, 4, 1 << 20, 0, 0), 8192, "its header does not fit its size"),
        ((MAGIC, VERSION, 0, 0, 1, 0, 0, 0), 8192, "its header makes no sense"),
        ((MAGIC, VERSION, 0, 0, 1, 64, 1, 0), 8192, "its header makes no sense"),
    ],
)
def test_what_cannot_be_read_is_said(strange_memory: Any, words: tuple[int, ...], nbytes: int, why: str) -> None:
    inode = strange_memory(*words, nbytes=nbytes)
    channels, refused = find()
    assert inode not in [channel.inode for channel in channels]
    assert (os.getpid(), why) in [(one.pid, one.why) for one in refused]


def test_a_channel_that_goes_while_it_is_looked_at() -> None:
    with pytest.raises(FileNotFoundError):
        Channel(Path("/proc/self/fd/99999"), "/memfd:aioarena-x-control")


def test_who_looks_keeps_no_channel_alive(strange_memory: Any) -> None:
    """Lookers have its memory open too, and are not taken for somebody who takes part."""
    layout = Layout(readers=1, ring_bytes=4096, slots=0, slot_bytes=0)
    words = memoryview(bytearray(layout.control_bytes)).cast("Q")
    layout.format(words, bytes(16))
    inode = strange_memory(*words, nbytes=layout.control_bytes)
    (found,) = [one for one in find()[0] if one.inode == inode]
    strange_memory.close()
    assert any("strange" in target for _, target in _descriptors(os.getpid()))
    assert inode not in [one.inode for one in find([found])[0]]


async def test_ps_prints_it(open_channel: OpenChannel, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_channel(2, name="to be printed") as channel:
        await channel.sender.send(1)
        await channel.receivers[0].recv()
        assert commands.ps(as_json=False, interval=0.01) == 0
        lines = capsys.readouterr().out.splitlines()
        at = next(index for index, line in enumerate(lines) if line.startswith("to be printed"))
        assert lines[0].split() == ["channel", "pid", "state", "messages", "a", "second", "bytes/s", "behind", "arena"]
        assert f"{os.getpid()}" in lines[at]
        assert lines[at].endswith("0.0 MiB of 4 MiB")
        assert lines[at + 1].split()[:3] == ["reader", "0", f"{os.getpid()}"]
        assert lines[at + 2].split()[-1] == "1"  # behind


async def test_ps_for_programs(open_channel: OpenChannel, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_channel(name="for programs") as channel:
        await channel.sender.send(1)
        assert commands.ps(as_json=True, interval=0.01) == 0
        document = json.loads(capsys.readouterr().out)
        (found,) = [one for one in document["channels"] if one["name"] == "for programs"]
        assert (found["messages"], found["messages_per_second"], found["readers"][0]["messages_behind"]) == (1, 0.0, 1)
        assert [found[f"{way}_bytes_per_second"] for way in ("ring", "arena", "frame")] == [0, 0, 0]
        assert (found["spans"], found["readers"][0]["messages_per_second"], found["readers"][0]["held_up_for"]) == (
            0,
            0,
            None,
        )
    assert "unreadable" in document


def test_ps_without_channels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(commands, "find", lambda: ([], []))
    assert cli.main(["ps"]) == 0
    assert capsys.readouterr().out == "no channels of this user\n"


async def test_ps_names_whom_a_send_waits_for(
    open_channel: OpenChannel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it takes its rates between two looks."""
    async with open_channel(2, name="held up") as channel:
        sends = [asyncio.create_task(channel.sender.send(bytes(5000))) for _ in range(20)]
        await until(lambda: view_of(channel.sender).waiting)
        for _ in range(channel.sender.statistics().messages):
            await channel.receivers[0].recv()
        slept = []
        monkeypatch.setattr("time.sleep", slept.append)
        assert cli.main(["ps", "--interval", "7"]) == 0
        assert slept == [7]
        assert "held up: a send waits for reader 1" in capsys.readouterr().out
        for task in sends:
            task.cancel()
        await asyncio.wait(sends)


async def test_other_users_channels_are_not_looked_at(open_channel: OpenChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by root, who could: what they have written is not to be trusted."""
    async with open_channel() as channel:
        inode = channel.sender.handle.control.inode
        assert inode in [found.inode for found in find()[0]]
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        assert inode not in [found.inode for found in find()[0]]
        with pytest.raises(LookError, match=rf"process {os.getpid()} belongs to user .*sudo -u .* inspect {os.getpid()}"):
            choose(str(os.getpid()))


async def test_another_process_sees_it(open_channel: OpenChannel) -> None:
    async with open_channel(name="seen from elsewhere") as channel:
        done = subprocess.run(
            [sys.executable, "-m", "aioarena", "ps", "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        (found,) = [one for one in json.loads(done.stdout)["channels"] if one["name"] == "seen from elsewhere"]
        assert found["pid"] == os.getpid()
        await channel.sender.send("undisturbed")
        assert await channel.receiver.recv() == "undisturbed"


def test_the_header_says_its_sizes() -> None:
    layout = Layout(readers=3, ring_bytes=64 << 10, slots=7, slot_bytes=4096)
    words = memoryview(bytearray(layout.control_bytes)).cast("Q")
    layout.format(words, bytes(16), pid=1234, name="name")
    assert Layout.read(words) == layout
    assert Layout.name(words) == "name"


# The machine ----------------------------------------------------------------------------------------------------------


def test_this_machine_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    """Tests run here, so channels do."""
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if not line.startswith(" ")]) == len(doctor._CHECKS)
    assert {line.split()[0] for line in lines} <= {"ok", "warn", "->"}
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [finding["grade"] for finding in findings if finding["what"] in ("system", "memfd", "pidfd", "sockets")] == [
        "ok"
    ] * 4


def test_what_fails_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def _refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", _refused)
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("fail  pidfd"))
    assert "Operation not permitted" in lines[at]
    assert lines[at + 1].strip().startswith("-> Linux 5.3 or later")


@pytest.mark.parametrize(("names", "says"), [([], "nothing is pinned, all works"), (["GPU 5000"], "GPU 5000: readers pin")])
def test_gpus(monkeypatch: pytest.MonkeyPatch, names: list[str], says: str) -> None:
    monkeypatch.setattr("aioarena._platform.accelerator.devices", lambda: names)
    monkeypatch.setattr("resource.getrlimit", lambda _: (1 << 20, 1 << 20))
    assert says in doctor._gpu().found
    assert doctor._locked_memory().grade == ("warn" if names else "ok")


@pytest.mark.parametrize("problem", [None, "CUDA error 2 (out of memory)"])
def test_pinning_is_tried(monkeypatch: pytest.MonkeyPatch, problem: str | None) -> None:
    """And what was pinned is let go."""
    runtime = FakeGpu(1)
    runtime.initialize()
    runtime.register_problem = problem
    monkeypatch.setattr("aioarena._platform.accelerator.devices", lambda: ["GPU 5000"])
    monkeypatch.setattr("aioarena._platform.accelerator._current", runtime)
    finding = doctor._pinning()
    assert len(runtime.registrations) == 1
    assert (runtime.registered, runtime.misuse) == ({}, [])
    assert finding.grade == ("warn" if problem else "ok")
    assert (problem or "pinned and let go") in finding.found
    assert ("ulimit -l" in finding.remedy) == bool(problem)


def test_nothing_is_pinned_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No runtime is asked for anything."""
    runtime = FakeGpu(1)
    monkeypatch.setattr("aioarena._platform.accelerator.devices", list)
    monkeypatch.setattr("aioarena._platform.accelerator._current", runtime)
    assert doctor._pinning().grade == "ok"
    assert runtime.calls == []


@pytest.mark.parametrize(
    ("text", "found", "remedy"),
    [
        ("always within_size advise [never] deny force\n", "shmem_enabled is never: fresh pages cost more", True),
        ("always [within_size] advise never deny force\n", "shmem_enabled is within_size", False),
        (None, "not for shared memory in this kernel", False),
    ],
)
def test_huge_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, found: str, remedy: bool) -> None:
    """Without them all works, and there is something to be had."""
    path = tmp_path / "shmem_enabled"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(doctor, "_SHMEM_ENABLED", path)
    finding = doctor._huge_pages()
    assert (finding.grade, finding.found) == ("ok", found)
    assert ("within_size" in finding.remedy) == remedy


@pytest.mark.parametrize(
    ("limits", "grade"), [((64, 4096), "warn"), ((1024, 4096), "ok"), ((-1, -1), "ok")], ids=["few", "enough", "no limit"]
)
def test_descriptors(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], grade: str) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    assert doctor._descriptors().grade == grade


@pytest.mark.parametrize(("left", "grade"), [(1 << 30, "warn"), (8 << 30, "ok"), (None, "ok")])
def test_memory(monkeypatch: pytest.MonkeyPatch, left: int | None, grade: str) -> None:
    """A container's limit counts as the machine's does."""
    monkeypatch.setattr("aioarena._platform.memory.available_memory", lambda: 64 << 30)
    monkeypatch.setattr("aioarena._platform.memory.cgroup_headroom", lambda: left)
    finding = doctor._free_memory()
    assert finding.grade == grade
    assert ("no limit by a cgroup" in finding.found) == (left is None)
    assert ("raise the limit" in finding.remedy) == (grade == "warn")


def test_a_small_mount_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers have it by default: nothing that the default backing minds."""

    class Status:
        f_frsize, f_blocks, f_bavail = 4096, (64 << 20) // 4096, (64 << 20) // 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Status)
    finding = doctor._shared_memory_mount()
    assert (finding.grade, finding.found) == ("warn", "/dev/shm: 64.0 MiB of 64.0 MiB free")
    assert 'backing="shm"' in finding.remedy


@pytest.mark.parametrize(
    ("kind", "fences", "grade"), [("libatomic", True, "ok"), ("lock", True, "ok"), ("lock", False, "warn")]
)
def test_fences(monkeypatch: pytest.MonkeyPatch, kind: str, fences: bool, grade: str) -> None:
    monkeypatch.setattr("aioarena._core.words._kind", kind)
    monkeypatch.setattr("aioarena._core.words.FENCES", fences)
    assert doctor._fence().grade == grade


def test_what_cannot_be_found_out_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _no_such_thing() -> doctor.Finding:
        raise RuntimeError("not here")

    monkeypatch.setattr(doctor, "_CHECKS", [_no_such_thing])
    (finding,) = doctor.examine()
    assert (finding.what, finding.grade) == ("no such thing", "warn")
    assert "not here" in finding.found


# What is left behind ----------------------------------------------------------------------------------------------------


@pytest.fixture
def leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """A socket of a dead process, and one of ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(doctor, "directories", lambda: [tmp_path / f"aioarena-{os.getuid()}"])
    directory = tmp_path / f"aioarena-{os.getuid()}"
    directory.mkdir()
    child = os.fork()
    if not child:
        os._exit(0)
    identity = ProcessIdentity.current()
    os.waitpid(child, 0)
    dead = directory / f"aioarena-{identity.pid_namespace}-{child}-{identity.start_ticks}-0123abcd.sock"
    own = directory / owned_name("sock")
    for path in (dead, own):
        path.touch()
    yield dead, own
    own.unlink()
    dead.unlink(missing_ok=True)


def test_clean_only_lists(leftovers: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    dead, own = leftovers
    assert cli.main(["clean"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [str(dead)]
    assert "--yes" in captured.err
    assert dead.exists()
    assert own.exists()
    assert doctor._left_behind().grade == "warn"


def test_clean_removes_what_the_dead_left(leftovers: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    dead, own = leftovers
    assert cli.main(["clean", "--yes"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"removed {dead}"]
    assert not dead.exists()
    assert own.exists()
    assert cli.main(["clean"]) == 0
    assert capsys.readouterr().out == "nothing of dead processes was found\n"
    assert doctor._left_behind().grade == "ok"


def test_what_cannot_be_removed_is_said(
    leftovers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an exit code that tells."""
    dead, _ = leftovers

    def refuse(path: str) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "unlink", refuse)
    assert cli.main(["clean", "--yes"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"aioarena: could not remove {dead}\n"
    monkeypatch.undo()


def test_where_it_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"aioarena-{os.getuid()}-1").mkdir()
    (tmp_path / f"aioarena-{os.getuid()}-2").symlink_to("/")
    assert tmp_path / f"aioarena-{os.getuid()}-1" in doctor.directories()
    assert tmp_path / f"aioarena-{os.getuid()}-2" not in doctor.directories()
    assert Path("/dev/shm") in doctor.directories()


def test_the_version_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"aioarena {aioarena.__version__}\n"

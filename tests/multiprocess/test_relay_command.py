"""`aioarena relay`: where its handles come from and go to, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aioarena
from aioarena import cli
from aioarena._relay_command import _HandleFile
from tests.multiprocess.harness import PATIENCE, Farm, Worker, eventually_async, running_loop_kind
from tests.multiprocess.messages import CHANNEL, message, verify

ROOT = Path(__file__).parents[2]
REMOTE: dict[str, Any] = {**CHANNEL, "remote_readers": 1, "bind": "tcp://127.0.0.1:0"}


def _save(path: Path, handle: aioarena.Handle, mode: int = 0o600) -> Path:
    path.write_text(handle.to_text())
    path.chmod(mode)
    return path


def _relay(farm: Farm, source: Path, *options: str, readers: int = 1) -> Worker:
    """The command, in a process of its own."""
    worker = farm.worker()
    worker.start("command", "relay", str(source), "--readers", str(readers), "--loop", running_loop_kind(), *options)
    return worker


async def _handle_in(path: Path, relay: Worker) -> aioarena.Handle:
    await eventually_async(lambda: path.exists() or not relay.alive, f"no handle appeared in {path}")
    return aioarena.Handle.from_text(path.read_text())


def _said(worker: Worker) -> list[str]:
    """What the command has said after it was admitted."""
    lines = worker.output.splitlines()
    if lines and "relays channel" in lines[0]:
        del lines[0]
    return lines


# In good order -----------------------------------------------------------------------------------------------------------


async def test_handle_comes_from_a_file_and_goes_to_one(farm: Farm, tmp_path: Path) -> None:
    """The file is for this user alone and gone with the relay; the relay passes on, and ends with the channel."""
    out = tmp_path / "out"
    out.write_text("of another time, and open to all")
    out.chmod(0o644)
    async with aioarena.Sender(0, name="far", **REMOTE) as chan:
        relay = _relay(farm, _save(tmp_path / "in", chan.handle), "--out", str(out), readers=2)
        await eventually_async(lambda: out.stat().st_size > 100 or not relay.alive, "no handle was written")
        assert stat.S_IMODE(out.stat().st_mode) == 0o600
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
        handle = aioarena.Handle.from_text(out.read_text())
        assert (handle.readers, handle.name, handle.sender.pid) == (2, "far", relay.pid)
        readers = farm.several(2)
        for rank, reader in enumerate(readers):
            reader.start("reader", handle, rank)
            assert await reader.aget() == "joined"
        for number, kind in enumerate(("small", "inline", "arena")):
            await chan.send(message(kind, number))
        for reader in readers:
            assert await reader.aask("recv", 3) == [0, 1, 2]
            reader.put("drain")
    for reader in readers:
        numbers, end, _ = await reader.aget()
        assert (numbers, end["type"]) == ([], "EndOfChannel")
    assert await relay.aresult() == 0
    assert relay.output == f"aioarena: relays channel 'far' from {chan.handle.remote.endpoint}, as its reader 0\n"
    assert not out.exists()


def test_handle_comes_from_standard_input_and_is_printed(no_leaks: None) -> None:
    """As in a pipe of commands, in a fresh interpreter."""

    async def scene() -> tuple[int, str]:
        async with aioarena.Sender(0, **REMOTE) as chan:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "aioarena", "relay", "-", "--readers", "1"),
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            process.stdin.write(f"{chan.handle.to_text()}\n".encode())
            process.stdin.close()
            handle = aioarena.Handle.from_text((await process.stdout.readline()).decode())
            async with aioarena.Receiver(handle, 0) as reader:
                await chan.send(message("arena", 5))
                assert verify(await reader.recv()) == 5
                closing = asyncio.create_task(chan.aclose())
                with pytest.raises(aioarena.EndOfChannel):
                    await reader.recv()
                await closing
            errors = (await process.stderr.read()).decode()
            assert await process.stdout.read() == b""
            return await process.wait(), errors

    code, errors = asyncio.run(asyncio.wait_for(scene(), 2 * PATIENCE))
    assert code == 0
    assert errors.count("\n") == 1, errors


async def test_relay_serves_further_hosts(farm: Farm, tmp_path: Path) -> None:
    """With --remote-readers a relay is one of a tree."""
    first, second = tmp_path / "first", tmp_path / "second"
    async with aioarena.Sender(0, **REMOTE) as chan:
        further = ("--remote-readers", "1", "--bind", "tcp://127.0.0.1:0", "--advertise", "localhost")
        root = _relay(farm, _save(tmp_path / "in", chan.handle), "--out", str(first), *further, readers=0)
        handle = await _handle_in(first, root)
        assert handle.remote is not None and handle.remote.endpoint.startswith("tcp://localhost:")
        leaf = _relay(farm, first, "--out", str(second), "--rank", "0")  # the file that the other wrote is private enough
        async with aioarena.Receiver(await _handle_in(second, leaf), 0) as reader:
            await chan.send(message("mixed", 3))
            assert verify(await reader.recv()) == 3
            closing = asyncio.create_task(chan.aclose())
            with pytest.raises(aioarena.EndOfChannel):
                await reader.recv()
            await closing
    assert [await relay.aresult() for relay in (root, leaf)] == [0, 0]


# Other ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_signal_closes_in_good_order(farm: Farm, tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """Both sides learn of it at once, and nothing is left."""
    out = tmp_path / "out"
    async with aioarena.Sender(0, **REMOTE) as chan:
        relay = _relay(farm, _save(tmp_path / "in", chan.handle), "--out", str(out))
        async with aioarena.Receiver(await _handle_in(out, relay), 0) as reader:
            await chan.send(message("small", 1))
            assert verify(await reader.recv()) == 1
            os.kill(relay.pid, sent)
            with pytest.raises(aioarena.SenderLostError, match="its relay was closed"):
                await reader.recv()
        await eventually_async(lambda: chan.statistics().readers[0].state != "joined", "the sender did not hear of it")
        assert chan.statistics().readers[0].state == "left"
    if sent is signal.SIGINT:
        assert await relay.aresult() == code
        assert _said(relay) == ["aioarena: interrupted"]
    else:
        assert relay.wait() == code
        assert _said(relay) == []
    assert not out.exists()


async def test_lost_sender_is_one_line_and_code_1(farm: Farm, tmp_path: Path) -> None:
    sender, out = farm.worker(), tmp_path / "out"
    sender.start("sender", 0, **REMOTE, remote_timeout=0.5)
    handle = await sender.aget()
    relay = _relay(farm, _save(tmp_path / "in", handle), "--out", str(out))
    async with aioarena.Receiver(await _handle_in(out, relay), 0) as reader:
        sender.kill()
        with pytest.raises(aioarena.SenderLostError):
            await reader.recv()
    assert await relay.aresult() == 1
    (line,) = _said(relay)
    assert line.startswith(f"aioarena: channel {handle.name!r}: its relay on this host ends: the sender of channel")
    assert not out.exists()


async def test_channel_that_is_gone_is_one_line_and_code_1(farm: Farm, tmp_path: Path) -> None:
    out = tmp_path / "out"
    async with aioarena.Sender(0, **REMOTE, remote_timeout=0.2) as chan:
        source = _save(tmp_path / "in", chan.handle)
    relay = _relay(farm, source, "--out", str(out))
    assert await relay.aresult() == 1
    (line,) = _said(relay)
    assert line.startswith("aioarena: error: nobody answers at tcp://127.0.0.1:")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("lost", ["raise", "continue"])
async def test_lost_reader_ends_the_relay_if_it_is_to(farm: Farm, tmp_path: Path, lost: str) -> None:
    out = tmp_path / "out"
    async with aioarena.Sender(0, **REMOTE) as chan:
        relay = _relay(farm, _save(tmp_path / "in", chan.handle), "--out", str(out), "--on-reader-lost", lost, readers=2)
        handle = await _handle_in(out, relay)
        reader, victim = farm.several(2)
        for rank, worker in enumerate((reader, victim)):
            worker.start("reader", handle, rank)
            assert await worker.aget() == "joined"
        await chan.send(message("small", 0))
        victim.kill()
        if lost == "raise":
            with pytest.raises(aioarena.ReaderLostError, match=f"pid {victim.pid}"):
                await _send_for_ever(chan)
            assert await relay.aresult() == 1
            assert f"reader 1 (pid {victim.pid})" in _said(relay)[-1]
            return
        await eventually_async(lambda: "reader 1" in relay.output, "the relay did not notice")
        await chan.send(message("small", 1))
        assert await reader.aask("recv", 2) == [0, 1]
        reader.put("drain")
    assert (await reader.aget())[1]["type"] == "EndOfChannel"
    assert await relay.aresult() == 0


async def _send_for_ever(chan: aioarena.Sender) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            await chan.send(message("small", 1))


def test_file_of_a_later_relay_stays(tmp_path: Path) -> None:
    """Where a relay's successor was started before it ended."""
    before, after = _HandleFile(tmp_path / "out"), _HandleFile(tmp_path / "out")
    before.write("first")
    after.write("second")
    before.remove()
    assert (tmp_path / "out").read_text() == "second\n"
    after.remove()
    assert list(tmp_path.iterdir()) == []


# Arguments ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def handle(no_leaks: None) -> aioarena.Handle:
    return aioarena.Sender(1, **REMOTE).handle


def _refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The last line of what it says to arguments that are wrong."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["relay", *map(str, arguments)])
    assert exit_.value.code == 2
    output, errors = capsys.readouterr()
    assert output == ""
    return errors.splitlines()[-1].removeprefix("aioarena relay: error: ")


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602])
def test_file_that_others_can_open_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, handle: aioarena.Handle, mode: int
) -> None:
    source = _save(tmp_path / "in", handle, mode)
    refusal = _refusal(capsys, source, "--readers", 1)
    assert refusal.startswith(f"{source} is open to other users (mode 0{mode:o}), and a handle is a secret: chmod 600 it")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_file_of_another_user_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, handle: aioarena.Handle
) -> None:
    source = _save(tmp_path / "in", handle)
    os.chown(source, 65534, 65534)
    assert "belongs to another user (uid 65534)" in _refusal(capsys, source, "--readers", 1)


def test_handle_on_the_command_line_is_refused_and_not_repeated(
    capsys: pytest.CaptureFixture[str], handle: aioarena.Handle
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["relay", handle.to_text(), "--readers", "1"])
    assert exit_.value.code == 2
    errors = capsys.readouterr().err
    assert "everybody on this host can read command lines" in errors
    assert handle.to_text()[20:40] not in errors


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--rank", "0"], "rank must be that of a remote reader, 1 to 1, not 0"),
        (["--remote-readers", "1"], "--remote-readers and --bind go together"),
        (["--bind", "tcp://127.0.0.1:0"], "--remote-readers and --bind go together"),
        (["--remote-readers", "1", "--bind", "tcp://*:0"], "is every interface of this host"),
        (["--on-reader-lost", "ignore"], "invalid choice: 'ignore'"),
        (["--out", "/nowhere/out"], "cannot write to /nowhere: No such file or directory"),
    ],
)
def test_wrong_options_are_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, handle: aioarena.Handle, options: list[str], why: str
) -> None:
    assert why in _refusal(capsys, _save(tmp_path / "in", handle), "--readers", 1, *options)


def test_what_is_no_handle_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, no_leaks: None) -> None:
    local = aioarena.Sender(1, **CHANNEL).handle
    assert "has no remote readers" in _refusal(capsys, _save(tmp_path / "local", local), "--readers", 1)
    (tmp_path / "cut").write_text(local.to_text()[:-9])
    (tmp_path / "cut").chmod(0o600)
    assert "this text is no handle, or only a part of one" in _refusal(capsys, tmp_path / "cut", "--readers", 1)
    missing = tmp_path / "missing"
    assert _refusal(capsys, missing, "--readers", 1) == f"cannot read {missing}: No such file or directory"
    assert _refusal(capsys, tmp_path, "--readers", 1) == f"cannot read {tmp_path}: Is a directory"
    assert "are required: --readers" in _refusal(capsys, tmp_path / "cut")

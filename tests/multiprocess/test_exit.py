"""However a program ends, with whatever still open and referenced: quickly, silently, with an exit code of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.conftest import PATIENCE
from tests.multiprocess.harness import Farm, Worker, eventually, timed
from tests.multiprocess.messages import CHANNEL, numbered
from tests.multiprocess.scripts import PLACES

ROLES = ["sender", "reader"]
PLACES_AND_LOOPS = pytest.mark.parametrize(
    ("place", "loop_kind"), [*((place, "asyncio") for place in PLACES), ("nowhere", "uvloop"), ("module", "uvloop")]
)
# Without an arena a tensor travels as a frame, and there is no log line that says so.
FRAMES = {**CHANNEL, "arena": None}


def assert_ends(worker: Worker) -> None:
    worker.untidy = True
    with timed():
        assert worker.finish() == 0
    assert worker.output == ""


@PLACES_AND_LOOPS
def test_a_program_that_ends_with_a_reader_open(farm: Farm, place: str, loop_kind: str) -> None:
    """A reader with tensors alive, neither closed nor dropped: a quick and silent exit, and the sender learns of it."""
    sender, reader = farm.several(2)
    sender.start("sender", 1, on_reader_lost="continue", loop_kind=loop_kind, **CHANNEL)
    reader.start("leave_a_reader_open", sender.get(), place, loop_kind)
    assert reader.get() == "joined"
    sender.ask("send", numbered(7))
    assert reader.result() == list(range(7))
    assert_ends(reader)
    eventually(lambda: sender.ask("statistics").readers[0].state == "lost", "the sender does not notice")
    statistics = sender.ask("statistics")
    assert statistics.slots_used == 0


@PLACES_AND_LOOPS
def test_a_program_that_ends_with_a_sender_open(farm: Farm, place: str, loop_kind: str) -> None:
    """A sender with frames still under way to a stopped reader: the same, and the reader sees it as lost."""
    sender, reader = farm.several(2)
    sender.start("leave_a_sender_open", place, loop_kind, **FRAMES)
    reader.start("reader", sender.get(), 0, loop_kind=loop_kind)
    assert reader.get() == "joined"
    reader.stop()
    sender.put("go on")
    assert sender.result() == "sent"
    assert_ends(sender)
    reader.resume()
    numbers, error, _ = reader.ask("drain")
    assert (numbers, error["type"]) == ([0, 1], "SenderLostError")


@pytest.mark.parametrize(("role", "kind"), [("reader", "subprocess"), ("sender", "spawn")])
def test_a_fresh_interpreter_that_ends_with_an_end_open(farm: Farm, kind: str, role: str) -> None:
    """The same in interpreters that share nothing with this one."""
    ends = {one: farm.worker(kind if one == role else "fork") for one in ROLES}
    if role == "reader":
        ends["sender"].start("sender", 1, on_reader_lost="continue", **CHANNEL)
        ends["reader"].start("leave_a_reader_open", ends["sender"].get(), "module", "asyncio")
        assert ends["reader"].get() == "joined"
        ends["sender"].ask("send", numbered(7))
        assert ends["reader"].result() == list(range(7))
    else:
        ends["sender"].start("leave_a_sender_open", "module", "asyncio", **FRAMES)
        ends["reader"].start("reader", ends["sender"].get(), 0)
        assert ends["reader"].get() == "joined"
        ends["sender"].put("go on")
        assert ends["sender"].result() == "sent"
    assert_ends(ends[role])


@pytest.mark.parametrize("thread", ["main", "daemon"])
def test_a_program_that_ends_with_frames_queued(farm: Farm, thread: str) -> None:
    """Their memory stays until the process is gone: the reader gets right bytes, and then an error."""
    sender, reader = farm.worker("subprocess"), farm.worker()
    sender.start("end_with_frames_queued", thread, **FRAMES)
    reader.start("reader", sender.get(), 0)
    assert reader.get() == "joined"
    reader.put("block")  # its loop; libzmq goes on receiving
    assert reader.get() == "blocked"
    sender.put("go on")
    assert sender.result() == "sent"
    assert_ends(sender)
    reader.put("go on")
    assert reader.get() == "going on"
    numbers, error, _ = reader.ask("drain")  # it compares every byte
    assert (numbers, error["type"]) == (list(range(len(numbers))), "SenderLostError")


def test_never_started_ends(farm: Farm) -> None:
    """Ends that were made and never started need no closing."""
    for backing in ("memfd", "shm"):
        worker = farm.worker()
        assert worker.call("make_and_forget", backing) == "made"
        assert_ends(worker)


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("role", ROLES)
def test_ctrl_c(farm: Farm, role: str, loop_kind: str) -> None:
    """SIGINT while an end waits ends the program at once, and the channel in good order."""
    sender, reader = farm.several(2)
    sender.start("sender", 1, loop_kind=loop_kind, **CHANNEL)
    reader.start("reader", sender.get(), 0, loop_kind=loop_kind)
    assert reader.get() == "joined"
    if role == "sender":
        reader.put("block")
        assert reader.get() == "blocked"
        sender.put("send until waiting", "inline")
        assert sender.get() == "waiting"
        interrupted = sender
    else:
        reader.put("drain")
        sender.ask("send", numbered(7))
        interrupted = reader
    os.kill(interrupted.pid, signal.SIGINT)
    with timed():
        assert interrupted.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in interrupted.output
    assert "Exception ignored" not in interrupted.output
    if role == "sender":
        reader.put("go on")
        assert reader.get() == "going on"
        numbers, error, _ = reader.ask("drain")
        assert (numbers, error["type"]) == (list(range(len(numbers))), "EndOfChannel")
        assert len(numbers) > 1
    else:
        assert sender.ask("statistics").readers[0].state == "left"


@pytest.mark.parametrize("state", ["new", "open", "closed"])
@pytest.mark.parametrize("module", ["aioarena", "aioarena.blocking"])
def test_a_program_that_ends_with_an_end_that_outlives_its_module(module: str, state: str) -> None:
    """As one that a module holds which was imported before: its finalizer runs when there is nothing left to call."""
    program = """
        import sys, threading
        from importlib import import_module
        module, state = import_module(sys.argv[1]), sys.argv[2]
        threading.kept = sender = module.Sender(1, arena=None)

        def drive(coroutine):
            if coroutine is not None:
                threading.loop.run_until_complete(coroutine)

        if state != "new":
            import asyncio
            threading.loop = asyncio.new_event_loop()
            drive(sender.start())
            if state == "closed":
                drive(sender.aclose() if module.__name__ == "aioarena" else sender.close())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), module, state], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""The sender is killed: readers get everything it had published, then an error at once, and never half a message."""

from __future__ import annotations

from typing import Any

import pytest

import aioarena
from tests.multiprocess.harness import PATIENCE, SOON, Farm, Worker, process_state, timed
from tests.multiprocess.messages import CHANNEL, numbered

pytestmark = pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])


def start_channel(
    farm: Farm, loop_kind: str, readers: int = 2, **options: Any
) -> tuple[Worker, list[Worker], aioarena.Handle]:
    """A sender and its readers, each in a process of its own."""
    sender, *others = farm.several(1 + readers)
    sender.start("sender", readers, loop_kind=loop_kind, **{**CHANNEL, **options})
    handle = sender.get()
    for rank, worker in enumerate(others):
        worker.start("reader", handle, rank, loop_kind=loop_kind)
        assert worker.get() == "joined"
    return sender, others, handle


def assert_lost(error: dict[str, Any], sender: Worker, received: int) -> None:
    assert (error["type"], error["pid"], error["received"]) == ("SenderLostError", sender.pid, received)
    assert f"(pid {sender.pid}) is gone without closing" in error["text"]
    assert "make a new channel" in error["text"]


@pytest.mark.parametrize("forked", [False, True])
def test_pending_receives_of_all_readers(farm: Farm, loop_kind: str, forked: bool, sleepers: list[int]) -> None:
    """Parked readers raise at once, also while a forked child of the sender lives that has inherited everything."""
    sender, readers, _ = start_channel(farm, loop_kind)
    if forked:
        sleepers.append(sender.ask("fork a sleeper"))
    for worker in readers:
        worker.put("drain")
    # All but frames, which may be in the sender's memory when it dies.
    sender.ask("send", numbered(7, kinds=("small", "inline", "arena", "packed", "pickled", "mixed")))
    sender.kill()
    with timed():
        for worker in readers:
            numbers, error, _ = worker.get()
            assert numbers == list(range(7))
            assert_lost(error, sender, received=7)
    if forked:
        assert process_state(sleepers[0]) in "SR"
    # They end by themselves.
    for worker in readers:
        worker.put("close")
        assert worker.result() == "closed"
        assert (worker.finish(), worker.output) == (0, "")


@pytest.mark.parametrize("forked", [False, True])
def test_messages_published_before_the_death(farm: Farm, loop_kind: str, forked: bool, sleepers: list[int]) -> None:
    """What readers had not looked at when the sender died still arrives, whole and in order, before the error."""
    sender, readers, _ = start_channel(farm, loop_kind)
    if forked:
        sleepers.append(sender.ask("fork a sleeper"))
    for worker in readers:
        worker.put("block")
        assert worker.get() == "blocked"
    sender.ask("send", numbered(10, kinds=("small", "inline", "arena", "packed", "pickled")))
    sender.kill()
    sender.wait()
    for worker in readers:
        worker.put("go on")
        assert worker.get() == "going on"
        numbers, error, seconds = worker.ask("drain")
        assert numbers == list(range(10))
        assert_lost(error, sender, received=10)
        assert seconds < SOON
        # And again: the channel does not come back.
        numbers, error, _ = worker.ask("drain")
        assert numbers == []
        assert_lost(error, sender, received=10)


@pytest.mark.parametrize("forked", [False, True])
def test_frames_under_way_at_the_death(farm: Farm, loop_kind: str, forked: bool, sleepers: list[int]) -> None:
    """A frame that the dead sender had queued but not transmitted never arrives in part: the error comes instead."""
    sender, readers, _ = start_channel(farm, loop_kind)
    if forked:
        sleepers.append(sender.ask("fork a sleeper"))
    for worker in readers:
        worker.stop()
    # Larger than what a Unix socket holds, so with the readers stopped most of it is in the sender's memory.
    sender.ask("send", [("small", 0), ("frame", 1), ("small", 2)])
    sender.kill()
    for worker in readers:
        worker.resume()
        with timed():
            numbers, error, _ = worker.ask("drain")
        assert numbers == [0]
        assert_lost(error, sender, received=1)


@pytest.mark.parametrize("forked", [False, True])
def test_frames_received_by_the_socket_before_the_death(
    farm: Farm, loop_kind: str, forked: bool, sleepers: list[int]
) -> None:
    """A frame that had been transmitted in full is delivered, though the sender died before the reader asked for it."""
    sender, (reader,), _ = start_channel(farm, loop_kind, 1)
    if forked:
        sleepers.append(sender.ask("fork a sleeper"))
    reader.put("take frames in")
    sender.ask("send", [("frame", 0), ("small", 1)])
    assert reader.get() == "framed"
    sender.kill()
    reader.put("go on")
    assert reader.get() == "going on"
    numbers, error, _ = reader.ask("drain")
    assert numbers == [0, 1]
    assert_lost(error, sender, received=2)


def test_killed_in_the_middle_of_a_copy(farm: Farm, loop_kind: str) -> None:
    """A message that was being copied into the arena is not seen by anybody; those before it are."""
    sender, readers, _ = start_channel(farm, loop_kind)
    for worker in readers:
        worker.put("drain")
    sender.ask("send", [("arena", 0)])
    sender.put("send and stick", "arena", 1)
    assert sender.get() == "stuck"
    sender.kill()
    for worker in readers:
        numbers, error, _ = worker.get()
        assert numbers == [0]
        assert_lost(error, sender, received=1)


@pytest.mark.parametrize("kinds", [("small",), ("arena", "mixed"), ("frame",), ("packed", "pickled", "small")])
def test_killed_at_any_moment_of_sending(farm: Farm, loop_kind: str, kinds: tuple[str, ...]) -> None:
    """Wherever the kill hits a sender that sends all the time, readers see a gap-free run of whole messages."""
    for _ in range(2):
        sender, readers, _ = start_channel(farm, loop_kind)
        for worker in readers:
            worker.put("drain")
        sender.put("send forever", kinds)
        assert sender.get() == "sending"
        sender.kill()
        with timed():
            for worker in readers:
                numbers, error, _ = worker.get()
                assert numbers == list(range(len(numbers)))
                # A frame may be in the sender's memory when its send returns; all else is where the readers find it.
                assert numbers or "frame" in kinds
                assert_lost(error, sender, received=len(numbers))


def test_tensors_outlive_the_sender(farm: Farm, loop_kind: str) -> None:
    """What readers hold of a dead sender's arena stays valid, also after their own end is closed."""
    sender, readers, _ = start_channel(farm, loop_kind)
    sender.ask("send", numbered(5, kinds=("arena", "mixed", "frame")))
    for worker in readers:
        assert worker.ask("hold", 5) == list(range(5))
    sender.kill()
    sender.wait()
    for worker in readers:
        numbers, error, _ = worker.ask("drain")
        assert numbers == []
        assert error["type"] == "SenderLostError"
        assert worker.ask("verify") == list(range(5))


def test_a_reader_that_waits_to_be_admitted(farm: Farm, loop_kind: str) -> None:
    """The sender dies before it started, or while it starts: start raises instead of waiting on."""
    sender, reader = farm.several(2)
    sender.start("sender", 1, start=False, loop_kind=loop_kind, **CHANNEL)
    handle = sender.get()
    reader.start("reader", handle, 0, announce=True, loop_kind=loop_kind)
    assert reader.get() == "asked"
    sender.kill()
    with timed():
        error = reader.result()
    assert_lost(error, sender, received=0)


@pytest.mark.parametrize("reaped", [False, True])
def test_the_handle_of_a_dead_sender(farm: Farm, loop_kind: str, reaped: bool) -> None:
    """Attaching raises at once, whether or not somebody has waited for the dead process yet."""
    sender, _, handle = start_channel(farm, loop_kind)
    late = farm.worker()
    sender.kill()
    if reaped:
        sender.wait()
    with timed():
        error = late.call("reader", handle, 1, loop_kind=loop_kind)
    assert_lost(error, sender, received=0)


def test_a_sender_that_is_stopped_is_not_dead(farm: Farm, loop_kind: str) -> None:
    """SIGSTOP is not death: readers wait, and go on when the sender does."""
    sender, (reader,), handle = start_channel(farm, loop_kind, 1)
    sender.ask("send", [("small", 0)])
    reader.put("recv", 2)
    sender.stop()
    late = farm.worker()
    late.start("reader", handle, 0, announce=True, loop_kind=loop_kind)
    assert late.get() == "asked"
    assert not reader.link.connection.poll(1.5)  # longer than every timer of the reader
    sender.resume()
    sender.ask("send", [("arena", 1)])
    assert reader.get() == [0, 1]
    assert late.result()["type"] == "HandleError"


def test_a_sender_that_was_forgotten(farm: Farm, loop_kind: str) -> None:
    """A process that lives on but lost its Sender without closing it: readers learn that nothing will come any more."""
    sender, reader = farm.several(2)
    sender.start("forget_a_sender", loop_kind=loop_kind, **CHANNEL)
    reader.start("reader", sender.get(), 0, loop_kind=loop_kind)
    assert reader.get() == "joined"
    reader.put("drain")
    sender.put("go on")
    assert "was never closed" in sender.result()
    with timed(SOON + PATIENCE / 8):
        numbers, error, _ = reader.get()
    assert numbers == [0]
    assert error["type"] == "SenderLostError"

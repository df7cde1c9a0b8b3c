"""A forked child inherits everything and owns nothing: what it drops, closes or uses changes nothing for its parent."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.multiprocess.harness import Farm, Worker, eventually
from tests.multiprocess.messages import CHANNEL
from tests.multiprocess.test_leftovers import segments_of

pytestmark = pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])


def reader_that_forks(farm: Farm, loop_kind: str, readers: int = 1) -> tuple[Worker, Worker, Any]:
    """A sender, and a reader at rank 0 that holds three messages of its arena."""
    sender, reader = farm.several(2)
    sender.start("sender", readers, on_reader_lost="continue", loop_kind=loop_kind, **CHANNEL)
    handle = sender.get()
    reader.start("forking_reader", handle, loop_kind)
    assert reader.get() == "joined"
    return sender, reader, handle


def hold(sender: Worker, reader: Worker) -> None:
    sender.ask("send", [("arena", 0), ("arena", 1), ("arena", 2)])
    assert reader.get() == "holding"
    assert sender.ask("statistics").readers[0].spans_held == 3


def assert_unharmed(sender: Worker, reader: Worker) -> None:
    """The parent still holds its slots with the right bytes, receives what comes next, and gives all slots back."""
    assert sender.ask("statistics").readers[0].spans_held == 3
    assert sender.ask("statistics").readers[0].state == "joined"
    sender.ask("send", [("arena", 3)])
    reader.put("done")
    assert reader.result() == [0, 1, 2, 3]
    eventually(lambda: sender.ask("statistics").slots_used == 0, "slots are lost")
    assert sender.ask("statistics").readers[0].state == "left"
    assert (reader.finish(), reader.output) == (0, "")


@pytest.mark.parametrize(("way", "outcome"), [("drop", None), ("sys.exit", 0), ("multiprocessing", 0)])
def test_a_child_that_drops_an_inherited_reader(farm: Farm, loop_kind: str, way: str, outcome: object) -> None:
    """Inherited receivers and tensors that are collected in a child, or at its exit, release nothing and close nothing."""
    sender, reader, _ = reader_that_forks(farm, loop_kind)
    hold(sender, reader)
    assert reader.ask(way) == outcome
    assert_unharmed(sender, reader)


def test_a_child_that_uses_an_inherited_reader(farm: Farm, loop_kind: str) -> None:
    """Every call raises WrongContextError, which says that the handle may be used."""
    sender, reader, _ = reader_that_forks(farm, loop_kind)
    hold(sender, reader)
    errors = reader.ask("use")
    assert set(errors) == {"recv", "recv_nowait", "start", "aclose", "async for"}
    for error in errors.values():
        assert error.startswith("WrongContextError: reader 0 of channel ")
        assert "was started by the parent of this forked process" in error
        assert "its handle can" in error
    assert reader.ask("use in the loop") == "WrongContextError"
    assert_unharmed(sender, reader)


def test_a_child_that_reads_inherited_tensors(farm: Farm, loop_kind: str) -> None:
    """Tensors may be read in a child for as long as the parent holds them."""
    sender, reader, _ = reader_that_forks(farm, loop_kind)
    hold(sender, reader)
    assert reader.ask("look") == [0, 1, 2]
    assert_unharmed(sender, reader)


def test_the_handle_works_in_a_child(farm: Farm, loop_kind: str) -> None:
    """A child of a process that reads at one rank attaches at another by itself."""
    sender, other, reader = farm.several(3)
    sender.start("sender", 2, on_reader_lost="continue", loop_kind=loop_kind, **CHANNEL)
    handle = sender.get()
    other.start("reader", handle, 1, loop_kind=loop_kind)
    assert other.get() == "joined"
    reader.start("forking_reader", handle, loop_kind)
    assert reader.get() == "joined"
    hold(sender, reader)
    assert other.ask("recv", 3) == [0, 1, 2]
    other.put("close")
    assert other.result() == "closed"
    reader.put("attach")
    assert reader.get() == "joined"
    sender.ask("send", [("arena", 3)])
    assert reader.get() == 3
    reader.put("done")
    assert reader.result() == [0, 1, 2, 3]
    eventually(lambda: sender.ask("statistics").slots_used == 0, "slots are lost")


def sender_that_forks(farm: Farm, loop_kind: str, **options: Any) -> tuple[Worker, Worker, str]:
    sender, reader = farm.several(2)
    sender.start("forking_sender", loop_kind, **CHANNEL, **options)
    handle = sender.get()
    return sender, reader, handle


@pytest.mark.parametrize("backing", ["memfd", "shm"])
@pytest.mark.parametrize(("way", "outcome"), [("drop", None), ("sys.exit", 0)])
def test_a_child_that_drops_an_inherited_sender(
    farm: Farm, loop_kind: str, way: str, outcome: object, backing: str
) -> None:
    """An inherited sender that is collected in a child removes neither socket nor segments: readers attach after."""
    sender, reader, handle = sender_that_forks(farm, loop_kind, backing=backing)
    sender.put("not yet")
    assert sender.get() == "open"
    assert sender.ask(way) == outcome
    assert os.path.exists(handle.address)
    assert len(segments_of(sender)) == (2 if backing == "shm" else 0)
    reader.start("reader", handle, 0, loop_kind=loop_kind)
    reader.put("drain")
    sender.put("done")
    assert reader.get() == "joined"
    numbers, error, _ = reader.get()
    assert (numbers, error["type"]) == ([1], "EndOfChannel")
    assert sender.result() == "closed"
    assert (sender.finish(), sender.output) == (0, "")


def test_a_child_that_uses_an_inherited_sender(farm: Farm, loop_kind: str) -> None:
    """Every call raises WrongContextError; a channel of the child's own works; the parent goes on."""
    sender, reader, handle = sender_that_forks(farm, loop_kind)
    reader.start("reader", handle, 0, loop_kind=loop_kind)
    sender.put("send")
    assert sender.get() == "open"
    assert reader.get() == "joined"
    errors = sender.ask("use")
    assert set(errors) == {"send", "send_nowait", "wait_ready", "start", "aclose"}
    for error in errors.values():
        assert error.startswith("WrongContextError: this Sender of channel ")
    assert sender.ask("another channel") == 5
    reader.put("drain")
    sender.put("done")
    numbers, error, _ = reader.get()
    assert (numbers, error["type"]) == ([0, 1], "EndOfChannel")
    assert sender.result() == "closed"
    assert sender.output == ""


def test_ends_that_were_not_started_before_the_fork(farm: Farm, loop_kind: str) -> None:
    """A receiver that was only made may be started in the child; a sender is its maker's alone."""
    refused, sent, received = farm.worker().call("fork_before_the_start", loop_kind, **CHANNEL)
    for error in refused.values():
        assert error.startswith("WrongContextError: this Sender of channel ")
    assert (sent, received) == ("sent", 3)


def test_a_fork_while_another_thread_attaches(farm: Farm, loop_kind: str) -> None:
    """A lock that some thread of the parent holds at that moment is not held for ever in the child."""
    sender, forker = farm.several(2)
    sender.start("sender", 1, loop_kind=loop_kind, **CHANNEL)
    forker.start("fork_while_a_thread_attaches", sender.get(), loop_kind)
    assert forker.get() == "joined"
    sender.ask("send", [("arena", 8)])
    assert forker.result() == 8

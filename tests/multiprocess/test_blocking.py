"""Blocking ends in real processes: with asyncio ends at the other side, with deaths, forks and exits."""

from __future__ import annotations

import os
import signal

import pytest

import aioarena
from aioarena import blocking
from tests.fronts.support import fill_ring
from tests.fronts.threads import Call, calls_wait
from tests.multiprocess.harness import Farm, eventually, is_parked, timed
from tests.multiprocess.messages import CHANNEL, KINDS, message, numbered, verify

COUNT = 10 * len(KINDS)


async def test_blocking_readers_of_an_asyncio_sender(farm: Farm) -> None:
    """Every kind of message, in order, beside an asyncio reader."""
    workers = farm.several(2)
    async with aioarena.Sender(2, **CHANNEL) as chan:
        workers[0].start("blocking_reader", chan.handle, 0)
        workers[1].start("reader", chan.handle, 1)
        for worker in workers:
            assert await worker.aget() == "joined"
            worker.put("drain")
        for kind, number in numbered(COUNT):
            await chan.send(message(kind, number))
    assert await workers[0].aget() == (list(range(COUNT)), "EndOfChannel")
    assert (await workers[1].aget())[0] == list(range(COUNT))


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_asyncio_readers_of_a_blocking_sender(farm: Farm, kind: str) -> None:
    """Every kind of message, in order, beside a blocking reader; fresh interpreters say nothing and exit with 0."""
    workers = farm.several(2, kind)
    with blocking.Sender(2, **CHANNEL) as chan:
        workers[0].start("reader", chan.handle, 0)
        workers[1].start("blocking_reader", chan.handle, 1)
        for worker in workers:
            assert worker.get() == "joined"
            worker.put("drain")
        for name, number in numbered(COUNT):
            chan.send(message(name, number))
    for worker in workers:
        assert worker.get()[0] == list(range(COUNT))
        worker.put("close")
        assert worker.result() == "closed"
        assert (worker.finish(), worker.output) == (0, "")


def test_a_sender_that_is_killed_ends_a_recv_that_waits(farm: Farm) -> None:
    """After what it had published."""
    worker = farm.worker()
    worker.start("sender", 1, **CHANNEL)
    with blocking.Receiver(worker.get(), 0) as chan:
        worker.ask("send", numbered(3))
        assert [verify(chan.recv()) for _ in range(3)] == [0, 1, 2]
        killing = Call(lambda: (calls_wait(chan), worker.kill()))
        with timed(), pytest.raises(aioarena.SenderLostError):
            chan.recv()
        killing.result()


def test_a_reader_that_is_killed_ends_a_send_that_waits(farm: Farm) -> None:
    """The message was not sent; another process may have the rank."""
    workers = farm.several(2)
    with blocking.Sender(1, **CHANNEL) as chan:
        workers[0].start("blocking_reader", chan.handle, 0)
        assert workers[0].get() == "joined"
        chan.wait_ready()
        killing = Call(lambda: (calls_wait(chan), workers[0].kill()))
        fill_ring(chan)
        with timed(), pytest.raises(aioarena.ReaderLostError):
            chan.send(message("inline", 0))
        killing.result()
        workers[1].start("blocking_reader", chan.handle, 0)
        assert workers[1].get() == "joined"
        chan.send(message("inline", 7))
        assert workers[1].ask("recv", None) == 7


def test_a_reader_that_is_killed_while_nobody_calls(farm: Farm) -> None:
    """It is noticed all the same."""
    worker = farm.worker()
    with blocking.Sender(1, **CHANNEL) as chan:
        worker.start("blocking_reader", chan.handle, 0)
        assert worker.get() == "joined"
        worker.kill()
        with timed():
            eventually(lambda: chan.statistics().readers[0].state == "lost", "nobody notices")
        with pytest.raises(aioarena.ReaderLostError):
            chan.send_nowait(1)


def test_an_interrupt_from_outside(farm: Farm) -> None:
    """SIGINT ends a recv that waits in the main thread of its process; the next one gets the message."""
    worker = farm.worker()
    with blocking.Sender(1, **CHANNEL) as chan:
        worker.start("blocking_reader", chan.handle, 0)
        assert worker.get() == "joined"
        for number in range(3):
            worker.put("recv", None)
            eventually(lambda: is_parked(chan._end, 0), "it does not wait")
            os.kill(worker.pid, signal.SIGINT)
            with timed():
                assert worker.get() == ("KeyboardInterrupt", "")
            eventually(lambda: not is_parked(chan._end, 0), "it still waits")
            chan.send(message("arena", number))
            assert worker.ask("recv", 0) == number
        worker.put("recv", 0.01)
        error, text = worker.get()
        assert error == "TimedOutError"
        assert f"from the sender (pid {os.getpid()})" in text


def test_a_forked_child(farm: Farm) -> None:
    """It may not use what it inherited, hangs on no lock, and disturbs nothing; a receiver not yet started works in it."""
    worker = farm.worker()
    with blocking.Sender(2, on_reader_lost="continue", **CHANNEL) as chan:
        worker.start("forking_blocking_reader", chan.handle)
        assert worker.get() == "joined"
        for _ in range(2):  # the second with the lock taken
            outcomes = worker.get()
            assert outcomes.pop("statistics") == "returned 0"
            assert set(outcomes) == {"recv", "recv_nowait", "start", "close", "for"}
            for outcome in outcomes.values():
                assert outcome.startswith("WrongContextError: "), outcome
        chan.send(message("arena", 0))
        assert worker.get() == 0
        assert worker.get() == 0  # the exit code of one that ends through the interpreter's exit
        assert worker.get() == "still works"
        chan.send(message("small", 1))
        assert worker.result() == [0, 1]
        assert (worker.finish(), worker.output) == (0, "")


@pytest.mark.parametrize("place", ["nowhere", "module"])
@pytest.mark.parametrize("kind", ["fork", "subprocess"])
def test_a_program_that_ends_with_ends_open(farm: Farm, kind: str, place: str) -> None:
    """A quick and silent exit, whatever thread waits; the sender learns of it and has its slots back."""
    worker = farm.worker(kind)
    with blocking.Sender(1, on_reader_lost="continue", **CHANNEL) as chan:
        worker.start("leave_blocking_ends_open", chan.handle, place)
        assert worker.get() == "joined"
        for number in range(3):
            chan.send(message("arena", number))
        assert worker.result() == [0, 1, 2]
        worker.untidy = True
        with timed():
            assert worker.finish() == 0
        assert worker.output == ""
        eventually(lambda: chan.statistics().readers[0].state in ("lost", "left"), "the sender does not notice")
        assert chan.statistics().slots_used == 0

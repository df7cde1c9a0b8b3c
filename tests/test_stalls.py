"""Who is blamed for a wait, for how long, and who is evicted: clocks turned by hand."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from aioarena import _stalls
from aioarena._asyncio import TICK
from aioarena._core.layout import Layout
from aioarena._core.receiver import ReceiverCore
from aioarena._core.sender import Membership, SenderCore
from aioarena._stalls import Stalls

BODY = b"x" * 1000


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Scene:
    """A sender's core with two readers, its stalls, and somebody who does what a Members would."""

    def __init__(
        self, clock: Clock, stall_after: float = 10.0, evict_after: float | None = None, join: bool = True
    ) -> None:
        layout = Layout(readers=2, ring_bytes=1 << 16, slots=0, slot_bytes=0)
        memory = memoryview(bytearray(layout.control_bytes))
        layout.format(memory[: layout.ring_offset].cast("Q"), b"x" * 16)
        self.clock = clock
        self.core = SenderCore(memory, layout, min_bytes=1 << 20, frame_budget=1 << 20)
        self.readers = [ReceiverCore(memory, layout, rank, rank + 1) for rank in range(2)]
        self.evicted: list[int] = []
        if join:
            for reader in self.readers:
                self.core.join(reader.rank, reader.incarnation)
                reader.start()
        self.stalls = Stalls("steps", self.core, self, stall_after, evict_after)  # type: ignore[arg-type]

    def describe_behind(self, rank: int) -> str:
        return f"reader {rank}"

    def evict(self, rank: int) -> None:
        self.evicted.append(rank)
        self.core.unseat(rank, Membership.EVICTED)

    def fill(self) -> None:
        while self.core.send_small(BODY):
            pass

    def need(self) -> None:
        """A send that finds no room."""
        tail = self.core.shortage(self.core.place([len(BODY)]))
        assert tail is not None
        self.stalls.need(tail)

    def drain(self, rank: int, count: int | None = None) -> None:
        reader = self.readers[rank]
        while count != 0 and reader.take() is not None:
            reader.advance()
            count = None if count is None else count - 1

    def wait(self, seconds: float) -> None:
        """Time goes by, with a tick each second."""
        for _ in range(round(seconds / TICK)):
            self.clock.now += TICK
            self.stalls.tick()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_stalls, "time", clock)
    return clock


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_the_warnings_become_rarer(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(clock)
    scene.fill()
    scene.drain(0)
    scene.need()
    scene.wait(100)
    assert lines(caplog) == [f"channel 'steps': a send has waited {n} s: reader 1" for n in (10, 20, 40, 80)]
    assert scene.stalls.waited_for(1) == 100
    assert scene.stalls.waited_for(0) == 0
    assert not scene.evicted


def test_time_counts_across_calls_that_give_up(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Sends with a time-out of their own, one after another: it is the reader that is stuck."""
    scene = Scene(clock, evict_after=15)
    scene.fill()
    scene.drain(0)
    for _ in range(14):
        scene.need()
        scene.wait(1)
        scene.stalls.need_no_more()
    assert lines(caplog) == ["channel 'steps': a send has waited 10 s: reader 1"]
    scene.wait(60)  # nobody sends: nobody is evicted
    assert scene.evicted == []
    assert scene.stalls.waited_for(1) == 74
    scene.need()
    assert scene.evicted == [1]
    assert scene.stalls.waited_for(1) == 0


def test_a_reader_that_moves_has_a_new_clock(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Slow is not stuck."""
    scene = Scene(clock, evict_after=5)
    scene.fill()
    scene.drain(0)
    scene.need()
    for _ in range(8):
        scene.wait(4)
        scene.drain(1, 1)
        assert scene.stalls.waited_for(1) == 0
    assert scene.evicted == []
    assert lines(caplog) == []
    scene.wait(6)
    assert scene.evicted == [1]


def test_only_those_in_the_way_are_blamed(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Not one that has read everything by the time we look, as when our own loop was held up."""
    scene = Scene(clock, evict_after=2)
    scene.fill()
    scene.need()
    scene.drain(0)
    scene.drain(1)
    scene.clock.now += 2.5
    scene.stalls.tick()
    assert scene.evicted == []
    assert lines(caplog) == []


def test_the_culprit_is_evicted_and_not_who_is_slowest_afterwards(clock: Clock) -> None:
    scene = Scene(clock, evict_after=3)
    scene.fill()
    scene.drain(0, 30)
    scene.need()
    scene.wait(2)
    scene.core.unseat(1, Membership.LOST)  # it died
    scene.wait(5)
    assert scene.evicted == []


def test_each_reader_has_its_own_time(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(clock, evict_after=10)
    scene.fill()
    scene.need()
    scene.wait(6)
    scene.drain(0, 1)  # and then no more
    scene.wait(5)
    assert scene.evicted == [1]
    scene.wait(4)
    assert scene.evicted == [1]
    scene.wait(3)
    assert scene.evicted == [1, 0]


def test_the_sleep_of_our_own_process_does_not_count(clock: Clock) -> None:
    """Stopped, or a machine that was suspended: the readers did not run either."""
    scene = Scene(clock, evict_after=10)
    scene.fill()
    scene.need()
    scene.wait(4)
    clock.now += 3600
    scene.stalls.tick()
    assert scene.evicted == []
    scene.wait(4)
    assert scene.evicted == []
    scene.wait(3)
    assert scene.evicted == [0, 1]


def test_ticks_that_were_rare_before_are_no_sleep(clock: Clock) -> None:
    """Where nothing was to be seen they may be half a minute apart; the time of a send that waits counts from its start."""
    for idle in (1.5, 2.5, 3.5, 30):
        scene = Scene(clock, evict_after=1)
        scene.stalls.tick()
        scene.fill()
        clock.now += idle
        scene.need()
        scene.wait(1)
        assert scene.evicted == [0, 1], idle


def test_nor_does_it_where_a_send_looks_before_the_next_tick(clock: Clock) -> None:
    scene = Scene(clock, evict_after=1)
    scene.fill()
    scene.need()
    clock.now += 5
    scene.need()
    assert scene.evicted == []
    scene.wait(2)
    assert scene.evicted == [0, 1]


def test_a_wait_for_seats_does_not_end_another(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Two calls wait for the first reader, and one of them gives up."""
    scene = Scene(clock, stall_after=10, evict_after=1, join=False)
    scene.stalls.wait_for_seats()
    scene.stalls.wait_for_seats()
    scene.wait(5)
    scene.stalls.wait_no_more()
    scene.wait(15)
    waiting: Any = "channel 'steps' is waiting for readers [0, 1] to attach"
    assert lines(caplog) == [f"channel 'steps': a send has waited {n} s: {waiting}" for n in (10, 20)]
    scene.stalls.wait_no_more()
    scene.wait(60)
    assert len(lines(caplog)) == 2
    assert scene.evicted == []


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "aioarena")

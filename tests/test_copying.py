"""Threads that share one copy: every item once, what an abort leaves, and failures."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from aioarena import _copying
from aioarena._copying import STEP_BYTES, CopyJob, CopyPool, Portion

PATIENCE = 60


class HandExecutor(Executor):
    """Runs what is submitted when told to, in the calling thread."""

    def __init__(self, threads: int = 1 << 30) -> None:
        self.submitted: list[Any] = []
        self._threads = threads

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted.append(work)
        if len(self.submitted) > self._threads:
            raise RuntimeError("can't start new thread")
        return Future()

    def run(self) -> None:
        for work in self.submitted:
            work()


class Record:
    """Portions whose copies are written down."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []

    def portion(self, name: str, items: int, unit: int = 1) -> Portion:
        return Portion(items, unit, lambda start, stop: self.steps.append((name, start, stop)))

    def items(self) -> Counter[tuple[str, int]]:
        return Counter((name, item) for name, start, stop in self.steps for item in range(start, stop))


def test_every_item_is_copied_once() -> None:
    record, pool = Record(), HandExecutor()
    sizes = {"a": 3, "b": 1, "empty": 0, "large": 40}
    job = CopyJob(pool, 2, [record.portion(name, items, STEP_BYTES // 4) for name, items in sizes.items()])
    assert not job.done.done()
    pool.run()
    job.done.result(0)
    assert record.items() == {(name, item): 1 for name, items in sizes.items() for item in range(items)}


def test_small_portions_are_taken_together_and_large_ones_divided() -> None:
    record, pool = Record(), HandExecutor()
    CopyJob(pool, 1, [record.portion(str(n), 100) for n in range(1000)])
    work = pool.submitted[0].__self__
    assert len(work._take(STEP_BYTES)) == 1000
    job = CopyJob(pool, 1, [record.portion("large", 5 * STEP_BYTES // 2)])
    ranges = [[step[1:] for step in job._take(STEP_BYTES)] for _ in range(4)]
    assert ranges == [
        [(0, STEP_BYTES)],
        [(STEP_BYTES, 2 * STEP_BYTES)],
        [(2 * STEP_BYTES, 5 * STEP_BYTES // 2)],
        [],
    ]


def test_an_item_larger_than_a_step_is_not_divided() -> None:
    record, pool = Record(), HandExecutor()
    job = CopyJob(pool, 4, [record.portion("rows", 3, 10 * STEP_BYTES)])
    pool.run()
    assert job.done.done()
    assert record.steps == [("rows", 0, 1), ("rows", 1, 2), ("rows", 2, 3)]


@pytest.mark.parametrize(("waits", "steps"), [(0.0, [1, 1, 1, 1]), (1.0, [1, 2, 4, 8])])
def test_steps_grow_while_a_thread_has_to_wait_for_the_gil(
    monkeypatch: pytest.MonkeyPatch, waits: float, steps: list[int]
) -> None:
    """Each end of a step may cost the switch interval of the GIL, and that many fewer there should be."""
    clock = 0.0

    class Time:
        @staticmethod
        def perf_counter() -> float:
            nonlocal clock
            clock += waits
            return clock

        @staticmethod
        def thread_time() -> float:
            return 0.0

    monkeypatch.setattr(_copying, "time", Time)
    record, pool = Record(), HandExecutor()
    CopyJob(pool, 1, [record.portion("large", 300 * STEP_BYTES)])
    pool.run()
    taken = [(stop - start) // STEP_BYTES for _, start, stop in record.steps]
    assert taken[:4] == steps
    assert sum(taken) == 300
    assert max(taken) * STEP_BYTES <= _copying._MOST_BYTES


def test_nothing_to_copy_is_done_at_once() -> None:
    pool = HandExecutor()
    assert CopyJob(pool, 2, []).done.result(0) is None
    assert CopyJob(pool, 2, [Record().portion("empty", 0)]).done.result(0) is None
    assert not pool.submitted


def test_an_abort_before_any_thread_came_is_the_end() -> None:
    record, pool = Record(), HandExecutor()
    job = CopyJob(pool, 2, [record.portion("large", 4 * STEP_BYTES)])
    job.abort()
    job.abort()
    assert job.done.result(0) is None
    pool.run()
    assert record.steps == []


def test_an_abort_waits_for_the_step_under_way() -> None:
    began, go_on = threading.Event(), threading.Event()
    copied: list[int] = []

    def copy(start: int, stop: int) -> None:
        began.set()
        assert go_on.wait(PATIENCE)
        copied.append(start)

    with ThreadPoolExecutor(1) as pool:
        job = CopyJob(pool, 1, [Portion(4 * STEP_BYTES, 1, copy)])
        assert began.wait(PATIENCE)
        job.abort()
        assert not job.done.done()
        go_on.set()
        assert job.done.result(PATIENCE) is None
    assert copied == [0]


def test_a_failure_drops_the_rest_and_is_told() -> None:
    pool = HandExecutor()
    calls: list[int] = []

    def fail(start: int, stop: int) -> None:
        calls.append(start)
        raise OSError("the memory is gone")

    job = CopyJob(pool, 2, [Portion(9 * STEP_BYTES, 1, fail)])
    pool.run()
    with pytest.raises(OSError, match="the memory is gone"):
        job.done.result(0)
    assert calls == [0]


def test_fewer_threads_than_wanted_will_do() -> None:
    record, pool = Record(), HandExecutor(threads=1)
    job = CopyJob(pool, 4, [record.portion("large", 4 * STEP_BYTES)])
    pool.run()
    assert job.done.result(0) is None
    assert sum(stop - start for _, start, stop in record.steps) == 4 * STEP_BYTES


def test_no_thread_at_all_is_an_error_and_nothing_is_copied_later() -> None:
    record, pool = Record(), HandExecutor(threads=0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        CopyJob(pool, 4, [record.portion("large", 4 * STEP_BYTES)])
    pool.run()
    assert record.steps == []


def test_closing_the_pool_aborts_its_copies() -> None:
    """It waits for the step under way, and for no more."""
    began, go_on = threading.Event(), threading.Event()
    copied: list[int] = []

    def copy(start: int, stop: int) -> None:
        began.set()
        assert go_on.wait(PATIENCE)
        copied.append(start)

    class LetsGo(CopyJob):
        def abort(self) -> None:
            super().abort()
            go_on.set()

    pool = CopyPool("test")
    pool._threads = 1
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(_copying, "CopyJob", LetsGo)
        job = pool.start([Portion(100 * STEP_BYTES, 1, copy)])
    assert began.wait(PATIENCE)
    pool.close()
    assert job.done.result(0) is None
    assert copied == [0]

"""Who runs the loop of a blocking end, with coroutines that wait for what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aioarena import TimedOutError
from aioarena._driver import LoopDriver, _Selector
from tests.conftest import PATIENCE
from tests.fronts.threads import Call, calls_wait, caretaker_leads, eventually


@pytest.fixture
def driver() -> Iterator[LoopDriver]:
    driver = LoopDriver("this test")
    yield driver
    driver.close()


def end_of(driver: LoopDriver) -> Any:
    """What calls_wait and others take."""
    return SimpleNamespace(_driver=driver)


async def wait_for(futures: dict[str, asyncio.Future[Any]], name: str) -> Any:
    futures[name] = asyncio.get_running_loop().create_future()
    return await futures[name]


def test_a_coroutine_runs_in_the_thread_that_calls(driver: LoopDriver) -> None:
    """Before and after it waits, whoever has the loop meanwhile."""
    futures: dict[str, asyncio.Future[Any]] = {}
    other = Call(driver.run, wait_for, (futures, "other"))
    calls_wait(end_of(driver))

    async def threads() -> list[threading.Thread]:
        before = threading.current_thread()
        await wait_for(futures, "it")
        return [before, threading.current_thread()]

    called: list[threading.Thread] = []

    def call() -> Any:
        called.append(threading.current_thread())
        return driver.run(threads)

    calling = Call(call)
    calls_wait(end_of(driver), 2)
    driver.call(futures["it"].set_result, None)
    assert calling.result() == called * 2
    driver.call(futures["other"].set_result, "done")
    assert other.result() == "done"


def test_a_time_out_beside_a_leader_that_has_none(driver: LoopDriver) -> None:
    """The leader sleeps without a timer, and is woken to set one."""
    futures: dict[str, asyncio.Future[Any]] = {}
    leader = Call(driver.run, wait_for, (futures, "leader"))
    calls_wait(end_of(driver))
    with pytest.raises(TimedOutError, match=r"this test timed out after 0\.01 s: waiting for other calls"):
        Call(driver.run, wait_for, (futures, "follower"), timeout=0.01).result()
    assert futures["follower"].cancelled()
    driver.call(futures["leader"].set_result, None)
    leader.result()


def test_the_main_thread_does_not_keep_a_lead_that_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others leave the lead to it, and it has what it waited for before it gets there."""
    monkeypatch.setattr("aioarena._driver.IDLE", 1000.0)  # or the caretaker would help
    driver = LoopDriver("this test")
    futures: dict[str, asyncio.Future[Any]] = {}
    other = Call(driver.run, wait_for, (futures, "other"))
    calls_wait(end_of(driver))

    async def done_in_the_last_turn_of_the_leader() -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future

    driver.run(done_in_the_last_turn_of_the_leader)
    calls_wait(end_of(driver))
    driver.call(futures["other"].set_result, None)
    other.result()
    driver.close()


def test_a_coroutine_that_waits_while_it_is_cancelled(driver: LoopDriver) -> None:
    """The call ends when that is over."""
    futures: dict[str, asyncio.Future[Any]] = {}

    async def clean_up_slowly() -> None:
        try:
            await wait_for(futures, "first")
        finally:
            await wait_for(futures, "second")

    calling = Call(driver.run, clean_up_slowly, timeout=0)
    eventually(lambda: "second" in futures)
    calls_wait(end_of(driver))
    driver.call(futures["second"].set_result, None)
    with pytest.raises(TimedOutError):
        calling.result()


def test_a_coroutine_that_ends_well_though_its_time_is_over(driver: LoopDriver) -> None:
    """What it returns is not thrown away."""

    async def succeed_anyway() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        return "done"

    assert driver.run(succeed_anyway, timeout=0) == "done"


class Alarm(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGUSR1 raises an Alarm."""

    def handler(number: int, frame: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    assert signal.getsignal(signal.SIGUSR1) is handler
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("alarm")
def test_a_signal_in_the_middle_of_a_callback(driver: LoopDriver) -> None:
    """The callback runs to its end and nothing else is skipped; then the call that waits raises."""
    futures: dict[str, asyncio.Future[Any]] = {}
    ran = []

    def callback() -> None:
        signal.raise_signal(signal.SIGUSR1)
        ran.append(1)

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(callback)
        loop.call_soon(ran.append, 2)
        await wait_for(futures, "never")

    with pytest.raises(Alarm):
        driver.run(wait)
    assert ran == [1, 2]
    assert futures["never"].cancelled()


def test_signals_wake_the_selector_while_the_main_thread_waits(driver: LoopDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """By themselves, as one may come just before it sleeps; unless the program has its own use of that."""
    found = []
    select = _Selector.select

    def look(self: _Selector, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if threading.current_thread() is threading.main_thread():
            fd = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(fd)
            found.append(fd)
        return select(self, timeout)

    monkeypatch.setattr(_Selector, "select", look)
    driver.run(asyncio.sleep, (0.001,))
    assert set(found) == {driver._loop.wake_fd}
    assert signal.set_wakeup_fd(-1) == -1
    found.clear()
    other = LoopDriver("another one")
    signal.set_wakeup_fd(other._loop.wake_fd)
    try:
        driver.run(asyncio.sleep, (0.001,))
    finally:
        mine = signal.set_wakeup_fd(-1)
    assert {*found, mine} == {other._loop.wake_fd}
    other.close()


def test_no_time_still_is_one_turn_of_the_loop(driver: LoopDriver) -> None:
    """What the turn brings is not missed, and what it does not bring is not waited for."""
    caretaker_leads(end_of(driver))

    async def one_turn_later() -> str:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_soon(future.set_result, "there")
        result: str = await future
        return result

    assert driver.run(one_turn_later, timeout=0) == "there"
    assert driver.run(one_turn_later, timeout=0) == "there"
    with pytest.raises(TimedOutError):
        driver.run(asyncio.sleep, (1000,), timeout=0)


def test_a_coroutine_that_only_gives_turns_has_a_time_out_too(driver: LoopDriver) -> None:
    """As one that looks at the ring for a while before it waits. What the first turn brings is not missed."""
    ends = time.monotonic() + PATIENCE
    turns = 0

    async def spin() -> None:
        nonlocal turns
        while time.monotonic() < ends:
            turns += 1
            await asyncio.sleep(0)

    for timeout in (0, 0.01):
        with pytest.raises(TimedOutError):
            driver.run(spin, timeout=timeout)
        assert time.monotonic() < ends
        turns, before = 0, turns
        assert before > 1
    driver.run(asyncio.sleep, (0,), timeout=0)


def test_a_signal_handler_of_a_thread_that_waits_takes_the_lock(driver: LoopDriver) -> None:
    """It comes while the selector has given that up, and another thread may be in the middle of something."""
    futures: dict[str, asyncio.Future[Any]] = {}
    seen: list[bool] = []
    busy = [False]
    before = signal.signal(signal.SIGUSR1, lambda number, frame: driver.call(lambda: seen.append(busy[0])))

    def strike() -> None:
        calls_wait(end_of(driver))
        with driver._lock:
            busy[0] = True
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]
            time.sleep(0.05)  # in which the handler would run
            busy[0] = False
        eventually(lambda: seen)
        driver.call(futures["it"].set_result, None)

    striking = Call(strike)
    try:
        driver.run(wait_for, (futures, "it"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    striking.result()
    assert seen == [False]

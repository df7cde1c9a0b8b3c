"""The ends for threads: the same promises without await, time-outs, several threads, signals, and who runs the loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import aioarena
from aioarena import (
    BusyError,
    ClosedError,
    EncodeError,
    EndOfChannel,
    TimedOutError,
    WouldBlock,
    WrongContextError,
    blocking,
)
from aioarena._driver import IDLE, LoopDriver, _Selector
from tests.conftest import ARENA, PATIENCE
from tests.fronts.support import fill_ring, filled, in_arena, shows
from tests.fronts.threads import Call, blocking_channel, calls_wait, caretaker_leads, eventually
from tests.multiprocess.messages import CHANNEL, KINDS, message, verify

MAIN = threading.main_thread().ident


# The same as the asyncio ends -----------------------------------------------------------------------------------


def test_every_kind_of_message_arrives() -> None:
    """Small, inline, arena, frame, packed and pickled, in order; then the end, as an exception and for iteration."""
    with blocking_channel(**CHANNEL) as (sender, receiver):
        sender.wait_ready()
        sending = Call(lambda: [sender.send(message(kind, number)) for number, kind in enumerate(KINDS * 3)])
        assert [verify(receiver.recv()) for _ in KINDS * 3] == list(range(3 * len(KINDS)))
        sending.result()
        sender.enqueue("last")
        sender.close()
        assert list(receiver) == ["last"]
        with pytest.raises(EndOfChannel):
            receiver.dequeue()


@pytest.mark.parametrize("name", ["Sender", "Receiver"])
def test_ends_have_the_options_and_methods_of_the_asyncio_ends(name: str) -> None:
    """What a diff of the two would show: time-outs, and names for what awaits."""
    ours, theirs = getattr(blocking, name), getattr(aioarena, name)
    parameters = inspect.signature(theirs).parameters.values()
    options = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    assert set(getattr(blocking, f"{name}Options").__annotations__) == options
    renamed = {"aclose": "close"}
    public = {renamed.get(method, method) for method in dir(theirs) if not method.startswith("_")}
    assert public <= {*dir(ours), *ours.__annotations__}
    for method in public:
        if inspect.iscoroutinefunction(getattr(theirs, method, None)) and method not in ("to_device", "aclose"):
            has = "timeout" in inspect.signature(getattr(ours, method)).parameters
            assert has or (name, method) == ("Sender", "start"), f"{method} has no time-out"


def test_tensors_outlive_the_channel() -> None:
    """A received tensor is valid after both ends are closed, and may be dropped then."""
    with blocking_channel() as (sender, receiver):
        sender.send(filled(7))
        tensor = receiver.recv()
        assert in_arena(receiver._end, tensor)
    assert shows(tensor, 7)
    del tensor


def test_lent_memory() -> None:
    """Lent tensors and arrays are sent as they lie; reclaim waits for the reader to drop them, and trim gives back."""
    with blocking_channel() as (sender, receiver):
        tensor = sender.empty(1 << 20, torch.uint8).fill_(3)
        assert sender.empty_like(tensor).shape == tensor.shape
        assert sender.empty_array(10, np.int64).shape == (10,)
        sender.send(tensor)
        received = receiver.recv()
        assert sender.statistics().lent_bytes == 1 << 20
        with pytest.raises(TimedOutError, match="spans held by rank"):
            sender.reclaim(tensor, timeout=0.01)
        waiting = Call(sender.reclaim, tensor)
        calls_wait(sender)
        assert shows(received, 3)
        del received
        waiting.result()
        del tensor
        assert sender.trim() >= 1 << 20


def test_to_device_of_the_cpu_makes_private_copies() -> None:
    """Small and large ones, made in a thread."""
    with blocking_channel() as (sender, receiver):
        sender.send([filled(1), filled(2, 100)])
        moved = receiver.to_device(receiver.recv(), "cpu")
        assert not in_arena(receiver._end, moved[0])
        assert shows(moved[0], 1)
        assert shows(moved[1], 2)
        receiver.record_stream(moved[0], None)  # not in the arena: ignored


# Life cycle -----------------------------------------------------------------------------------------------------


def test_an_end_that_is_not_started_says_so() -> None:
    """Without an event loop's words."""
    sender = blocking.Sender(1, arena=None)
    receiver = blocking.Receiver(sender.handle, 0)
    for call in (lambda: sender.send(1), sender.wait_ready, lambda: sender.send_nowait(1), receiver.recv):
        with pytest.raises(ClosedError, match=r"is not started: use `with`, or call start\(\) first"):
            call()
    assert sender.statistics().messages == 0
    assert receiver.statistics().messages == 0
    sender.close()
    sender.close()
    receiver.close()
    with pytest.raises(ClosedError):
        sender.send(1)
    with pytest.raises(ClosedError):
        sender.start()


def test_a_closed_end_says_so_and_leaves_no_thread() -> None:
    """Every call, also of statistics; closing twice is harmless."""
    with blocking_channel() as (sender, receiver):
        sender.send(1)
        receiver.recv()
    for call in (lambda: sender.send(1), sender.wait_ready, lambda: sender.send_nowait(1), receiver.recv, sender.start):
        with pytest.raises(ClosedError):
            call()
    assert (sender.statistics().messages, receiver.statistics().messages) == (1, 1)
    sender.close()
    receiver.close()
    assert sender._driver._loop.is_closed()
    assert not [thread for thread in threading.enumerate() if thread.name == "aioarena-caretaker"]


def test_a_start_that_times_out_leaves_nothing() -> None:
    """It says for whom it waited."""
    sender = blocking.Sender(1, arena=None)
    receiver = blocking.Receiver(sender.handle, 0)
    with pytest.raises(TimedOutError, match=f"is waiting for the sender .pid {os.getpid()}.*to start"):
        receiver.start(timeout=0.01)
    with pytest.raises(ClosedError):
        receiver.recv()
    sender.close()


def test_an_end_that_is_dropped_open_warns_and_closes() -> None:
    """In the background, since a finalizer cannot wait; the reader sees the end."""
    sender = blocking.Sender(1, arena=None)
    sender.start()
    with blocking.Receiver(sender.handle, 0) as receiver:
        sender.send("last")
        with pytest.warns(ResourceWarning, match="was never closed"):
            del sender
        assert list(receiver) == ["last"]
    eventually(lambda: "aioarena-caretaker" not in [thread.name for thread in threading.enumerate()])


def test_calls_in_an_event_loop_are_refused() -> None:
    """They would hold it up; those that do not wait go through."""
    with blocking_channel() as (sender, receiver):
        sender.wait_ready()

        async def call() -> None:
            for refused in (lambda: sender.send(1), receiver.recv, sender.close, blocking.Sender(1, arena=None).start):
                with pytest.raises(WrongContextError, match="use the asyncio Sender and Receiver"):
                    refused()
            sender.send_nowait(5)
            assert receiver.recv_nowait() == 5
            assert sender.statistics().messages == 1
            await asyncio.to_thread(sender.send, 6)

        asyncio.run(call())
        assert receiver.recv() == 6


class Calls:
    """Calls something while it is pickled."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return str, (str(self.call()),)


def test_a_call_from_inside_a_call() -> None:
    """Of the same end it is refused, of another one it works."""
    with blocking_channel() as (sender, receiver), blocking_channel() as (other, answers):
        for call in (lambda: sender.send(1), lambda: sender.send_nowait(1)):
            with pytest.raises(EncodeError) as caught:
                sender.send(Calls(call))
            assert isinstance(caught.value.__cause__, BusyError)
        sender.send(Calls(lambda: (other.send("inner"), answers.recv())[1]))
        assert receiver.recv() == "inner"
        sender.send(Calls(lambda: sender.statistics().messages))
        assert receiver.recv() == "1"


# Time-outs ------------------------------------------------------------------------------------------------------


def test_a_recv_that_times_out_says_whom_it_waited_for_and_loses_nothing() -> None:
    """TimedOutError is both kinds of error, and the message goes to the next call."""
    with blocking_channel() as (sender, receiver):
        for timeout in (0, 0.01):
            with pytest.raises(TimedOutError, match=f"waiting for a message from the sender .pid {os.getpid()}") as caught:
                receiver.recv(timeout)
            assert isinstance(caught.value, aioarena.ArenaError)
            assert isinstance(caught.value, TimeoutError)
            assert f"timed out after {timeout:g} s" in str(caught.value)
        sender.send("here")
        assert receiver.recv(0) == "here"


def test_a_message_that_is_there_is_received_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is the turn of others first. Frames come in though nobody else drives the loop."""
    with blocking_channel(arena=None) as (sender, receiver):
        sender.wait_ready()
        caretaker_leads(receiver)
        with monkeypatch.context() as patch:
            patch.setattr("aioarena._driver.IDLE", 1000.0)
            with pytest.raises(TimedOutError):
                receiver.recv(timeout=0.01)  # takes the lead from it
            for number in range(300):
                sender.send(number)
                assert receiver.recv(timeout=0) == number
            sender.send(filled(1))
            received: list[torch.Tensor] = []

            def arrived() -> bool:
                with contextlib.suppress(TimedOutError):
                    received.append(receiver.recv(timeout=0))
                return bool(received)

            eventually(arrived)
            assert shows(received[0], 1)


def test_a_send_that_times_out_sends_nothing() -> None:
    """Waiting for readers, for room in the ring, and behind others; with and without a span."""
    with blocking.Sender(1, arena=ARENA, ring_bytes=64 << 10) as sender:
        for obj in (1, filled(1)):
            with pytest.raises(TimedOutError, match=r"is waiting for readers \[0\] to attach"):
                sender.send(obj, timeout=0.01)
        with pytest.raises(TimedOutError, match="to attach"):
            sender.wait_ready(timeout=0)
        with blocking.Receiver(sender.handle, 0) as receiver:
            count = fill_ring(sender)
            with pytest.raises(TimedOutError, match=f"reader 0 .*is {count} messages"):
                sender.send(b"x" * 100, timeout=0.01)
            with pytest.raises(TimedOutError):  # while its copy is made, or later
                sender.send(filled(1), timeout=0.01)
            waiting = Call(sender.send, "first")
            calls_wait(sender)
            with pytest.raises(TimedOutError):
                sender.send("second", timeout=0.01)
            for _ in range(count):
                receiver.recv()
            waiting.result()
            sender.send("third")
            assert [receiver.recv(), receiver.recv()] == ["first", "third"]
            assert sender.statistics().slots_used == 0


@pytest.mark.parametrize(
    ("timeout", "error"), [("1", TypeError), (True, TypeError), (-1, ValueError), (float("nan"), ValueError)]
)
def test_time_outs_that_make_no_sense(timeout: Any, error: type[Exception]) -> None:
    """Are refused before anything happens."""
    with blocking_channel() as (sender, receiver):
        with pytest.raises(error, match="timeout must"):
            sender.send(1, timeout=timeout)
        with pytest.raises(error, match="timeout must"):
            receiver.recv(timeout)
        assert sender.statistics().messages == 0


# Several threads ------------------------------------------------------------------------------------------------


def test_close_wakes_calls_that_wait() -> None:
    """Every one of them, in other threads, raises ClosedError."""
    with blocking_channel() as (sender, receiver):
        tensor = sender.empty(1 << 20, torch.uint8)
        sender.send(tensor)
        held = receiver.recv()
        fill_ring(sender)
        sends = [Call(sender.send, b"x" * 4000), Call(sender.send, filled(1)), Call(sender.reclaim, tensor)]
        calls_wait(sender, 3)
        sender.close()
        for call in sends:
            with pytest.raises(ClosedError):
                call.result()
        del held, tensor
    with blocking_channel() as (_, receiver):
        receives = [Call(receiver.recv), Call(receiver.recv, timeout=1000)]
        calls_wait(receiver, 2)
        receiver.close()
        for call in receives:
            with pytest.raises(ClosedError):
                call.result()


def test_close_wakes_calls_that_wait_for_the_other_end() -> None:
    """wait_ready, and a reader's start."""
    with blocking.Sender(1, arena=None) as sender:
        waiting = Call(sender.wait_ready)
        calls_wait(sender)
        sender.close()
        with pytest.raises(ClosedError):
            waiting.result()
    sender = blocking.Sender(1, arena=None)
    receiver = blocking.Receiver(sender.handle, 0)
    starting = Call(receiver.start)
    eventually(lambda: receiver._driver is not None)
    calls_wait(receiver)
    receiver.close()
    with pytest.raises(ClosedError):
        starting.result()
    sender.close()


def test_two_threads_close() -> None:
    """Both return when it is closed."""
    with blocking_channel() as (sender, receiver):
        calls = [Call(end.close) for end in (sender, receiver, sender, receiver)]
        for call in calls:
            call.result()
        assert sender._driver._loop.is_closed()
        assert receiver._driver._loop.is_closed()


def test_two_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is too late, and leaves what the other started alone."""
    both = threading.Barrier(2)

    def make_driver(label: str) -> LoopDriver:
        driver = LoopDriver(label)
        both.wait(PATIENCE)
        return driver

    sender = blocking.Sender(1, arena=None)
    monkeypatch.setattr(blocking, "LoopDriver", make_driver)
    errors = []
    for starting in [Call(sender.start) for _ in range(2)]:
        try:
            starting.result()
        except ClosedError as error:
            errors.append(str(error))
    assert len(errors) == 1
    assert "was started before" in errors[0]
    with pytest.raises(TimedOutError):
        sender.wait_ready(timeout=0)
    sender.close()


def test_messages_of_several_threads_go_out_in_the_order_of_the_calls() -> None:
    """While the ring is full, one behind the other."""
    with blocking_channel() as (sender, receiver):
        count = fill_ring(sender)
        sends = []
        for number in range(5):
            sends.append(Call(sender.send, number))
            calls_wait(sender, number + 1)
        for _ in range(count):
            receiver.recv()
        assert [receiver.recv() for _ in sends] == list(range(5))
        for send in sends:
            send.result()


def test_each_message_goes_to_one_of_the_receiving_threads() -> None:
    """In the order of their calls; whoever has what it waited for hands the loop on to the others."""
    with blocking_channel() as (sender, receiver):
        receives = []
        for number in range(4):
            receives.append(Call(receiver.recv))
            calls_wait(receiver, number + 1)
        for number, receive in enumerate(receives):
            sender.send(number)
            assert receive.result() == number
            if number < 3:
                calls_wait(receiver, 3 - number)


def test_many_threads_at_both_ends() -> None:
    """Nothing is lost or doubled, and the order of each sending thread is kept."""
    senders, each = 3, 400
    with blocking_channel() as (sender, receiver):

        def receive() -> list[tuple[int, int]]:
            return list(receiver)

        def send(thread: int) -> None:
            for number in range(each):
                sender.send((thread, number) if number % 50 else (thread, number, filled(thread))[:2])

        def send_all() -> None:
            for call in [Call(send, thread) for thread in range(senders)]:
                call.result()
            sender.close()

        receives = [Call(receive) for _ in range(3)]
        sending = Call(send_all)
        received = [receive(), *(call.result() for call in receives)]  # the main thread, which leads, and others
        sending.result()
    assert sorted(itertools.chain(*received)) == [(thread, number) for thread in range(senders) for number in range(each)]
    for got in received:
        for thread in range(senders):
            numbers = [number for sent_by, number in got if sent_by == thread]
            assert numbers == sorted(numbers)


def test_calls_that_need_not_wait_go_through_beside_one_that_does() -> None:
    """The loop's lock is free while the leader sleeps."""
    with blocking_channel() as (sender, receiver):
        waiting = Call(receiver.recv)
        calls_wait(receiver)
        with pytest.raises(WouldBlock):
            receiver.recv_nowait()
        with pytest.raises(TimedOutError):
            receiver.recv(0.01)
        assert receiver.statistics().messages == 0
        assert not waiting.over
        sender.send(1)
        assert waiting.result() == 1


def test_a_thread_that_spins_lets_the_others_on() -> None:
    """``spin`` looks at the ring from the calling thread, beside a leader and alone."""
    with blocking_channel(receiver={"spin": 0.01}) as (sender, receiver):
        receives = [Call(receiver.recv) for _ in range(3)]
        calls_wait(receiver, 3)
        for _ in receives:
            sender.send(1)
        assert [receive.result() for receive in receives] == [1, 1, 1]


# Signals --------------------------------------------------------------------------------------------------------


class Alarm(Exception):
    pass


@pytest.fixture
def interrupt() -> Iterator[Callable[..., Call]]:
    """Has SIGINT raise KeyboardInterrupt and SIGUSR1 an Alarm, and sends one to this thread once it waits."""

    def alarm(number: int, frame: Any) -> None:
        raise Alarm

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, alarm),
    }
    handlers = {number: signal.getsignal(number) for number in before}

    def interrupt(end: Any, number: int, calls: int = 1) -> Call:
        def strike() -> None:
            calls_wait(end, calls)
            signal.pthread_kill(MAIN, number)  # type: ignore[arg-type]

        return Call(strike)

    yield interrupt
    assert {number: signal.getsignal(number) for number in before} == handlers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGUSR1, Alarm)])
@pytest.mark.parametrize("timeout", [None, 1000])
def test_a_signal_interrupts_a_call_that_waits(
    interrupt: Callable[..., Call], number: int, error: type[BaseException], timeout: float | None
) -> None:
    """What its handler raises comes out, nothing is lost or held, and the channel goes on."""
    with blocking_channel() as (sender, receiver):
        for _ in range(3):
            strike = interrupt(receiver, number)
            with pytest.raises(error):
                receiver.recv(timeout)
            strike.result()
        sender.send(1)
        assert receiver.recv() == 1
        count = fill_ring(sender)
        strike = interrupt(sender, number)
        with pytest.raises(error):
            sender.send(filled(1), timeout)
        strike.result()
        assert sender.statistics().slots_used == 0
        for _ in range(count):
            receiver.recv()
        sender.send("after")
        assert receiver.recv() == "after"


def test_a_signal_interrupts_a_call_beside_a_leader(interrupt: Callable[..., Call]) -> None:
    """The other thread's call goes on waiting."""
    with blocking_channel() as (sender, receiver):
        other = Call(receiver.recv)
        calls_wait(receiver)
        strike = interrupt(receiver, signal.SIGINT, 2)
        with pytest.raises(KeyboardInterrupt):
            receiver.recv()
        strike.result()
        assert not other.over
        sender.send(1)
        assert other.result() == 1


def test_a_child_that_is_forked_while_the_main_thread_waits_has_its_own_signals(interrupt: Callable[..., Call]) -> None:
    """Nobody waits in it who would raise what a handler raised: it could not even be interrupted."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}

    def fork() -> int:
        calls_wait(receiver)
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                same = {number: signal.getsignal(number) for number in handlers} == handlers
                os._exit(0 if same and signal.set_wakeup_fd(-1) == -1 else 1)
            os._exit(2)
        sender.send("forked")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with blocking_channel() as (sender, receiver):
        forking = Call(fork)
        assert receiver.recv() == "forked"
        assert forking.result() == 0


def test_the_main_thread_takes_the_lead() -> None:
    """Only what sleeps in the selector is sure to be woken by a signal."""
    with blocking_channel() as (sender, receiver):
        others = [Call(receiver.recv), Call(receiver.recv)]
        calls_wait(receiver, 2)
        leaders = []

        def send() -> None:
            eventually(lambda: sys._current_frames()[MAIN].f_code.co_name == "select")
            calls_wait(receiver, 3)
            leaders.append(receiver._driver._main_waits)
            for number in range(3):
                sender.send(number)

        sending = Call(send)
        assert receiver.recv() == 2
        sending.result()
        assert leaders == [True]
        assert sorted(call.result() for call in others) == [0, 1]


def test_a_signal_whose_handler_returns_interrupts_nothing(interrupt: Callable[..., Call]) -> None:
    """It runs while the call waits, and may set other handlers."""
    with blocking_channel() as (sender, receiver):
        seen = []

        def note(number: int, frame: Any) -> None:
            seen.append(number)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sending.append(Call(sender.send, "after"))

        sending: list[Call] = []
        signal.signal(signal.SIGINT, note)
        strike = interrupt(receiver, signal.SIGINT)
        assert receiver.recv() == "after"
        strike.result()
        sending[0].result()
        assert seen == [signal.SIGINT]


def test_a_signal_interrupts_closing(interrupt: Callable[..., Call]) -> None:
    """It closes at once then, though frames are under way."""
    with blocking_channel(arena=None, linger=1000) as (sender, _):
        sender.send(filled(1))
        strike = interrupt(sender, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            sender.close()
        strike.result()
        assert sender._driver._loop.is_closed()


# Who runs the loop ----------------------------------------------------------------------------------------------


def test_the_caretaker_sees_what_happens_while_nobody_calls() -> None:
    """A reader joins, and leaves."""
    with blocking.Sender(1, arena=None) as sender:
        with blocking.Receiver(sender.handle, 0):  # nobody at the sender drives its loop
            assert sender.statistics().readers[0].state == "joined"
        assert sender.statistics().readers[0].state == "left"


def test_calls_take_the_loop_from_the_caretaker() -> None:
    """One that waits, and one that only looks."""
    with blocking_channel() as (sender, receiver):
        for number in range(3):
            caretaker_leads(receiver)
            waiting = Call(receiver.recv)
            calls_wait(receiver)
            assert not receiver._driver._cared
            sender.send(number)
            assert waiting.result() == number
            caretaker_leads(sender)
            with pytest.raises(WouldBlock):
                receiver.recv_nowait()


def test_an_idle_channel_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the caretaker nor a call that waits looks at anything until something happens."""
    with blocking_channel() as (sender, receiver):
        waiting = Call(receiver.recv)
        calls_wait(receiver)
        caretaker_leads(sender)
        eventually(lambda: receiver._driver._asleep)
        turns = []
        select = _Selector.select

        def count(self: _Selector, timeout: float | None = None) -> Any:
            turns.append(timeout)
            return select(self, timeout)

        monkeypatch.setattr(_Selector, "select", count)
        leads = sender._driver._times_led, receiver._driver._times_led
        used = time.process_time()
        time.sleep(4 * IDLE)  # not to wait for something, but to see nothing
        used = time.process_time() - used
        assert turns == []
        assert (sender._driver._times_led, receiver._driver._times_led) == leads
        assert used < IDLE
        sender.send(1)
        waiting.result()


def test_an_event_of_a_descriptor_that_means_something_else_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the selector slept without the lock, the descriptor was closed and its number given to another."""
    lock = threading.Lock()
    selector = _Selector(lock)
    read, write = os.pipe()
    os.write(write, b"x")
    selector.register(read, selectors.EVENT_READ, "old")
    select = selectors.EpollSelector.select

    def select_and_replace(self: Any, timeout: float | None = None) -> Any:
        events = select(self, timeout)
        selector.modify(read, selectors.EVENT_READ, "new")
        return events

    with lock:
        assert [key.data for key, _ in selector.select(0)] == ["old"]
        monkeypatch.setattr(selectors.EpollSelector, "select", select_and_replace)
        assert selector.select(1) == []
        monkeypatch.undo()
        assert [key.data for key, _ in selector.select(1)] == ["new"]
    selector.close()
    os.close(read)
    os.close(write)

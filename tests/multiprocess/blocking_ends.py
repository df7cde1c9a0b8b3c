"""Scripts of processes that hold a blocking end: as those with the asyncio ends, without a loop."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import aioarena
from aioarena import _asyncio, _driver, blocking
from tests.multiprocess.forking import exit_in_child, in_child
from tests.multiprocess.harness import Link
from tests.multiprocess.messages import message, verify


def blocking_reader(link: Link, handle: aioarena.Handle, rank: int, **options: Any) -> str:
    """Attach, say "joined", then obey."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or it may be ignored, as in jobs in the background
    with blocking.Receiver(handle, rank, **options) as chan:
        link.put("joined")
        while True:
            match link.get():
                case ("recv", timeout):
                    try:
                        link.put(verify(chan.recv(timeout)))
                    except (aioarena.ArenaError, KeyboardInterrupt) as error:
                        link.put(type(error).__name__, str(error))
                case "drain":  # everything until an error: numbers, the error
                    numbers = []
                    while True:
                        try:
                            numbers.append(verify(chan.recv()))
                        except aioarena.ArenaError as error:
                            link.put(numbers, type(error).__name__)
                            break
                case "close":
                    return "closed"


def blocking_sender(link: Link, readers: int, **options: Any) -> str:
    """Make a channel, say its handle, then obey."""
    with blocking.Sender(readers, **options) as chan:
        link.put(chan.handle)
        while True:
            match link.get():
                case ("send", messages):
                    for kind, number in messages:
                        chan.send(message(kind, number))
                    link.put("sent")
                case "statistics":
                    link.put(chan.statistics())
                case "close":
                    return "closed"


def _outcome(function: Callable[[], Any]) -> str:
    try:
        return f"returned {function()!r}"
    except aioarena.ArenaError as error:
        return f"{type(error).__name__}: {error}"


def forking_blocking_reader(link: Link, handle: aioarena.Handle) -> list[int]:
    """Fork while a thread waits for a message and, once that has come, while the caretaker sleeps.

    Says what calls in the children came to, and returns the numbers of all messages.
    """
    _asyncio.TICK = 1000.0  # what is not woken is to hang, not to be late
    numbers: list[int] = []
    chan = blocking.Receiver(handle, 0)
    unstarted = blocking.Receiver(handle, 1)
    chan.start()
    assert chan._driver is not None
    driver = chan._driver
    link.put("joined")
    waiting = threading.Thread(target=lambda: numbers.append(verify(chan.recv())))
    waiting.start()
    _until_a_call_waits(driver)

    def use() -> dict[str, str]:
        calls = {"recv": chan.recv, "recv_nowait": chan.recv_nowait, "start": chan.start, "close": chan.close}
        outcomes = {name: _outcome(call) for name, call in calls.items()}
        outcomes["for"] = _outcome(lambda: next(chan))
        outcomes["statistics"] = _outcome(lambda: chan.statistics().messages)
        return outcomes

    def take_the_other_rank() -> int:
        with unstarted:
            return verify(unstarted.recv())

    link.put(in_child(use))
    # With its lock taken, as another thread may have it at the moment of the fork.
    with driver._lock:
        outlet, inlet = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(inlet, pickle.dumps(use()))
            os._exit(0)
    os.close(inlet)
    with os.fdopen(outlet, "rb") as answers:
        link.put(pickle.loads(answers.read()))
    os.waitpid(pid, 0)
    link.put(in_child(take_the_other_rank))
    waiting.join()
    while not driver._cared:
        time.sleep(0.001)
    # Nobody may lead now: a loop that runs, in whatever process, is not closed when it dies.
    _driver.IDLE = 1000.0
    with contextlib.suppress(aioarena.TimedOutError):
        chan.recv(timeout=0.01)
    code = exit_in_child(lambda: None)
    if code is None:
        # Threads that a fork took away keep the loop alive as it happens; were it not so, it would die here.
        driver._loop.__del__()
        sys.exit()
    link.put(code)
    waiting = threading.Thread(target=lambda: numbers.append(verify(chan.recv())))
    waiting.start()
    _until_a_call_waits(driver)
    with contextlib.suppress(aioarena.TimedOutError):
        chan.recv(timeout=0.01)  # wakes the other thread to have the loop
    link.put("still works")
    waiting.join()
    chan.close()
    return numbers


def _until_a_call_waits(driver: _driver.LoopDriver) -> None:
    while not (driver._led and not driver._cared and driver._loop._parking.parked):
        time.sleep(0.001)


def leave_blocking_ends_open(link: Link, handle: aioarena.Handle, place: str) -> list[int]:
    """Hold a reader and a sender of another channel, with a thread that waits, and end with all of it open."""
    chan = blocking.Receiver(handle, 0)
    chan.start()
    own = blocking.Sender(1)
    own.start()
    link.put("joined")
    received = [chan.recv() for _ in range(3)]
    threading.Thread(target=chan.recv, daemon=True).start()
    if place == "module":
        globals()["_kept"] = chan, own, received
    return [verify(one) for one in received]

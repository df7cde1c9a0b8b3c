"""Objects that live in the workers of the tests, and things that pickle in peculiar ways."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import aioarena.engine


class Recorder:
    """Does what it is told, and remembers."""

    def __init__(self, rank: int, size: int, *args: Any) -> None:
        self.rank = rank
        self.size = size
        self.args = args
        self.seen: list[Any] = []

    def who(self) -> tuple[int, int, int]:
        return self.rank, self.size, os.getpid()

    def made_with(self) -> tuple[Any, ...]:
        return self.args

    def echo(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self.rank, args, kwargs

    async def aecho(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        await asyncio.sleep(0)
        return self.rank, args, kwargs

    def see(self, number: int, *_: Any) -> int:
        self.seen.append(number)
        return number

    async def asee(self, number: int, *_: Any) -> int:
        for _ in range(3):
            await asyncio.sleep(0)
        return self.see(number)

    def all_seen(self) -> list[Any]:
        return self.seen

    def give(self, thing: Callable[[], Any]) -> Any:
        return thing()

    def fail(self, *ranks: int, error: Exception | None = None, **_: Any) -> int:
        if not ranks or self.rank in ranks:
            raise error or ValueError(f"rank {self.rank} fails")
        return self.rank

    def fail_in_a_cycle(self, *_: Any) -> None:
        error = ValueError("refers to itself")
        error.itself = error  # type: ignore[attr-defined]
        raise error

    def fail_with(self, make: Callable[[], BaseException]) -> None:
        raise make()

    def cancel_itself(self) -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return self.rank

    async def start_a_group(self) -> None:
        group = aioarena.engine.WorkerGroup(Recorder, 1, arena=None, reply_arena=None)
        await group.start()

    async def fail_or_wait(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError(f"rank {rank} fails")
        await asyncio.Event().wait()

    async def echo_or_wait_at(self, rank: int, gate: str, tensor: Any) -> Any:
        if self.rank == rank:
            return tensor
        return await self.wait_at(gate)

    async def wait_for_ever(self) -> None:
        await asyncio.Event().wait()

    async def wait_at(self, gate: str, *_: Any) -> int:
        self.seen.append("waits")
        await asyncio.to_thread(_pass, gate)
        return self.rank

    def block(self, deaf: bool = False) -> None:
        """Hold up the loop, for ever."""
        if deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()

    def exit(self, code: int) -> None:
        sys.exit(code)

    def exit_slowly(self) -> None:
        threading.Thread(target=threading.Event().wait).start()  # joined at the exit
        sys.exit(0)

    def exit_at_once(self, code: int) -> None:
        os._exit(code)

    def spans_held(self) -> int:
        return aioarena.engine.receiver().statistics().spans_held

    def loop(self) -> str:
        return type(asyncio.get_running_loop()).__module__


def _pass(gate: str) -> None:
    fd = os.open(gate, os.O_RDWR)
    assert os.read(fd, 1) == b"x"
    os.close(fd)


async def make_slowly(rank: int, size: int) -> Recorder:
    await asyncio.sleep(0)
    return Recorder(rank, size, "slowly")


def fail_at(rank: int, size: int, victim: int) -> Recorder:
    if rank == victim:
        raise LookupError(f"no model for rank {rank}")
    return Recorder(rank, size)


def block_in(rank: int, size: int, pid_path: str) -> None:
    """A factory that does not return."""
    with open(f"{pid_path}-{rank}", "w") as file:
        file.write(str(os.getpid()))
    Recorder(rank, size).block()


# What pickles in peculiar ways ------------------------------------------------------------------------------------


class OnlyIn:
    """Unpickles in one process alone."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return _only_in, (self.pid,)


def _only_in(pid: int) -> str:
    if os.getpid() != pid:
        raise RuntimeError("unpickled elsewhere")
    return "unpickled"


class Cancels:
    """Where it is unpickled, it looks as if the task was cancelled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _cancel, ()


def _cancel() -> None:
    raise asyncio.CancelledError("by what was unpickled")


def give_cancels() -> Cancels:
    return Cancels()


class GiveOnlyIn:
    """Makes an :class:`OnlyIn` where it is called."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __call__(self) -> OnlyIn:
        return OnlyIn(self.pid)


def a_lambda() -> Any:
    return lambda: None


class ComplicatedError(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def complicated() -> BaseException:
    return ComplicatedError(code=5)


def local() -> BaseException:
    class LocalError(Exception):
        pass

    return LocalError("of a class nobody can import")


class Panic(BaseException):
    """As those of extensions in Rust."""


def panic() -> BaseException:
    return Panic("at the disco")


def with_wrong_notes() -> BaseException:
    error = ValueError("whose notes are no list")
    error.__notes__ = ("a note",)  # type: ignore[assignment]
    return error


def cancelled() -> BaseException:
    return asyncio.CancelledError("by the method itself")

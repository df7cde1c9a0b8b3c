"""Processes for the tests: started, talked to over a pipe, killed at named points, and never left behind.

A :class:`Worker` is a process that runs functions of ``scripts.py`` by name and answers over a pipe. There are three kinds:

``fork``
    Forked from a *nursery*, a process that has imported everything and made nothing: no channel, loop or thread. It takes
    milliseconds where importing torch takes seconds. The worker is made a child of the test process, as a real one is.
``subprocess``, ``spawn``
    A fresh interpreter, by ``subprocess.Popen`` or by ``multiprocessing``.

Steps are handshakes: a script says where it is (:meth:`Link.put`) and waits to be told to go on (:meth:`Link.get`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

# The one time everything here is derived from: seconds until something that has to happen has not happened. Stretch it on a
# slow machine with AIOARENA_TEST_PATIENCE=3.
PATIENCE = 20.0 * float(os.environ.get("AIOARENA_TEST_PATIENCE", "1"))
# Until what is promised "within a second" counts as broken.
SOON = PATIENCE / 4
# For a whole test, as pytest-timeout counts.
TEST_TIMEOUT = 6 * PATIENCE

_PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
# From linux/sched.h.
_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_ROOT = Path(__file__).resolve().parents[2]


class WorkerError(Exception):
    """A script raised, or its process ended before it answered."""


# The pipe --------------------------------------------------------------------------------------------------------------


class Link:
    """One end of the pipe between a test and a script. Plain pickles: torch's sharing of tensors stays out of it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def put(self, *value: Any) -> None:
        """Say something: one value, or several as a tuple."""
        self.connection.send_bytes(pickle.dumps(value[0] if len(value) == 1 else value))

    def get(self, timeout: float | None = None) -> Any:
        """Wait, holding up the thread, for what the other side says.

        Raises:
            TimeoutError: Nothing came in time.
            EOFError: The other side is gone.
        """
        if timeout is not None and not self.connection.poll(timeout):
            raise TimeoutError(f"nothing came over the pipe in {timeout:.0f} s")
        return pickle.loads(self.connection.recv_bytes())

    async def aget(self) -> Any:
        """The same as a coroutine. Cancelling loses nothing."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self.connection.fileno(), lambda: readable.done() or readable.set_result(None))
        try:
            await readable
        finally:
            loop.remove_reader(self.connection.fileno())
            os.set_blocking(self.connection.fileno(), True)  # uvloop leaves it otherwise
        return self.get()


def running_loop_kind() -> str:
    """Which loop the calling test runs on; ``asyncio`` for tests without one."""
    with contextlib.suppress(RuntimeError):
        return "uvloop" if type(asyncio.get_running_loop()).__module__.startswith("uvloop") else "asyncio"
    return "asyncio"


def link_pair() -> tuple[Link, socket.socket]:
    """Our end as a link, the other as a socket to hand on."""
    ours, theirs = socket.socketpair()
    return Link(Connection(ours.detach())), theirs


# The worker's side -----------------------------------------------------------------------------------------------------


def serve(link: Link) -> None:
    """Say hello and run scripts until the test closes its end."""
    link.put("hello", os.getpid())
    _serve_greeted(link)


def _serve_greeted(link: Link) -> None:
    from tests.multiprocess import scripts

    while True:
        try:
            script, loop_kind, args, options = link.get()
        except (EOFError, ConnectionResetError):
            return
        try:
            if isinstance(script, str):
                script = getattr(scripts, script)
            outcome = script(link, *args, **options)
            if asyncio.iscoroutine(outcome):
                outcome = run_coroutine(outcome, loop_kind)
        except Exception:
            link.put("error", traceback.format_exc())
        else:
            link.put("result", outcome)
            del outcome


def run_coroutine(coroutine: Any, loop_kind: str) -> Any:
    """Run a coroutine on a new loop: ``asyncio`` or ``uvloop``."""
    if loop_kind == "uvloop":
        import uvloop

        return uvloop.run(coroutine)
    return asyncio.run(coroutine)


def open_loop(loop_kind: str) -> asyncio.AbstractEventLoop:
    """A new loop, for scripts that run one by hand."""
    if loop_kind == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def _serve_spawned(connection: Connection, output: str) -> None:
    """Where a worker of multiprocessing starts."""
    fd = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    serve(Link(connection))


def _serve_fd(fd: int) -> None:
    """Where a worker of subprocess starts."""
    serve(Link(Connection(fd)))


def nursery(fd: int) -> None:
    """The nursery: a request comes with two descriptors (pipe, output), and a worker goes out for each."""
    from tests.multiprocess import scripts  # noqa: F401 - imported here, so that no worker has to

    requests = socket.socket(fileno=fd)
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 4096, 2)
        if not message:
            return
        middle = os.fork()
        if middle == 0:
            requests.close()
            request = json.loads(message)
            if request["host"]:
                enter_host(*request["host"])
            if pid := os.fork():
                # Said here, because in a pid namespace of its own the worker does not know this number.
                Link(Connection(fds[0])).put("hello", pid)
                os._exit(0)  # the worker is adopted by the test process
            os.dup2(fds[1], 1)
            os.dup2(fds[1], 2)
            os.close(fds[1])
            os.environ.update(request["environ"])
            tempfile.tempdir = os.environ["TMPDIR"]
            if request["group"] is not None:
                os.setpgid(0, request["group"])
            _serve_greeted(Link(Connection(fds[0])))
            return  # out of the main program, as any interpreter ends
        for handed_on in fds:
            os.close(handed_on)
        os.waitpid(middle, 0)
        requests.sendall(b"!")


def enter_host(pid: int, own_memory: bool) -> None:
    """Move to the namespaces of a process; what this process forks is in its pid namespace, too."""
    flags = _CLONE_NEWNET | (_CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID if own_memory else 0)
    where = os.getcwd()
    pidfd = os.pidfd_open(pid)
    if ctypes.CDLL(None, use_errno=True).setns(pidfd, flags) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    os.close(pidfd)
    os.chdir(where)


def _command(function: str, fd: int) -> list[str]:
    """A Python that has our import path and calls one of the functions above."""
    start = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from tests.multiprocess import harness"
    return [sys.executable, "-c", f"{start}; harness.{function}({fd})", json.dumps([str(_ROOT), *sys.path])]


# The test's side -------------------------------------------------------------------------------------------------------

Script = str | Callable[..., Any]


class Host(Protocol):
    """Where a worker may live, see :mod:`tests.network.hosts`.

    Attributes:
        pid: A process whose namespaces are the host's.
        own_memory: Whether it has more than a network of its own.
    """

    pid: int
    own_memory: bool


class Worker:
    """A process that runs scripts for a test.

    Attributes:
        pid: Its process id.
        link: The pipe to it.
        exit_code: As ``subprocess`` counts, negative for a signal; None while it has not been waited for.
        untidy: Whether it was killed, or ended without closing: what it made may stay until the next start of a sender.

    Scripts that are coroutines run on a loop of the kind that the test runs on.
    """

    def __init__(self, link: Link, output: Any, reap: Callable[[], int | None] | None = None) -> None:
        self.link = link
        self.exit_code: int | None = None
        self.untidy = False
        self._output = output
        self._reap = reap if reap is not None else self._reap_by_pid
        self.pid = self._greet()
        self._pidfd = os.pidfd_open(self.pid)

    def _greet(self) -> int:
        try:
            greeting, pid = self.link.get(PATIENCE)
        except (EOFError, TimeoutError) as error:
            raise WorkerError(f"a worker did not start: {error!r}\n{self.output}") from None
        assert greeting == "hello"
        return pid

    def _reap_by_pid(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def __repr__(self) -> str:
        return f"<Worker {self.pid}>"

    # Talking ----------------------------------------------------------------------------------------------------------

    def start(self, script: Script, *args: Any, loop_kind: str | None = None, **options: Any) -> None:
        """Have a script begin, called with the link and these arguments: a function, or the name of one of scripts.py."""
        self.link.put(script, loop_kind or running_loop_kind(), args, options)

    def put(self, *value: Any) -> None:
        self.link.put(*value)

    def get(self, timeout: float = PATIENCE) -> Any:
        """The next thing the script says, holding up this thread. Raises WorkerError if it failed or died."""
        try:
            return self._checked(self.link.get(timeout))
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        except TimeoutError as error:
            raise WorkerError(f"{self}: {error}; output:\n{self.output}") from None

    async def aget(self, timeout: float = PATIENCE) -> Any:
        """The same as a coroutine."""
        try:
            async with asyncio.timeout(timeout):
                return self._checked(await self.link.aget())
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        except TimeoutError:
            raise WorkerError(f"{self}: nothing came over the pipe in {timeout:.0f} s; output:\n{self.output}") from None

    def _checked(self, message: Any) -> Any:
        if isinstance(message, tuple) and len(message) == 2 and message[0] == "error":
            raise WorkerError(f"{self}:\n{message[1]}{self.output}")
        return message

    def _died(self) -> WorkerError:
        return WorkerError(f"{self} ended ({self.wait()}) before it answered; output:\n{self.output}")

    def ask(self, *value: Any, timeout: float = PATIENCE) -> Any:
        """Say something and wait for the answer."""
        self.put(*value)
        return self.get(timeout)

    async def aask(self, *value: Any, timeout: float = PATIENCE) -> Any:
        self.put(*value)
        return await self.aget(timeout)

    def result(self, timeout: float = PATIENCE) -> Any:
        """What the script returned. It must have nothing else to say."""
        return self._result(self.get(timeout))

    async def aresult(self, timeout: float = PATIENCE) -> Any:
        return self._result(await self.aget(timeout))

    def _result(self, message: Any) -> Any:
        assert isinstance(message, tuple) and message[0] == "result", f"{self} said {message!r} instead of returning"
        return message[1]

    def call(self, script: Script, *args: Any, timeout: float = PATIENCE, **options: Any) -> Any:
        """Run a script from beginning to end: what it returned."""
        self.start(script, *args, **options)
        return self.result(timeout)

    async def acall(self, script: Script, *args: Any, timeout: float = PATIENCE, **options: Any) -> Any:
        self.start(script, *args, **options)
        return await self.aresult(timeout)

    # Life and death ----------------------------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        """Everything the process has written to stdout and stderr."""
        return os.pread(self._output.fileno(), 1 << 20, 0).decode(errors="replace")

    @property
    def alive(self) -> bool:
        return self.exit_code is None and not self._dead(0)

    def _dead(self, timeout: float) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout)[0])

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead. It stays a zombie until :meth:`wait`, as with a busy parent."""
        self.untidy = True
        os.kill(self.pid, signal.SIGKILL)
        assert self._dead(PATIENCE), f"{self} survived SIGKILL"

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: process_state(self.pid) == "T", f"{self} does not stop")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def finish(self) -> int:
        """Close the pipe, so that it ends by itself: its exit code."""
        self.link.connection.close()
        return self.wait()

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait until it has ended: its exit code."""
        if self.exit_code is None:
            if not self._dead(timeout):
                raise WorkerError(f"{self} does not end; output:\n{self.output}")
            self.exit_code = self._reap()
            assert self.exit_code is not None
            os.close(self._pidfd)
            self._pidfd = -1
        return self.exit_code

    def dispose(self) -> None:
        """Kill it if it still lives, and free everything of it on this side."""
        if self.exit_code is None:
            if not self._dead(0):
                self.kill()
            self.wait()
        self.link.connection.close()
        self._output.close()


class Farm:
    """Starts workers, and gets rid of all of them at the end.

    Args:
        tmpdir: TMPDIR of the workers, and so where their sockets are.
        nursery: Where workers of the kind ``fork`` come from.
    """

    def __init__(self, tmpdir: Path, nursery: Nursery) -> None:
        self._tmpdir = tmpdir
        self._nursery = nursery
        self.workers: list[Worker] = []

    def worker(
        self,
        kind: str = "fork",
        *,
        environ: dict[str, str] | None = None,
        group: int | None = None,
        host: Host | None = None,
    ) -> Worker:
        """Start one worker.

        Args:
            kind: ``fork``, ``subprocess`` or ``spawn``.
            environ: Environment variables that differ from ours.
            group: Process group to put it in, 0 for a new one; for ``fork`` only.
            host: Where it lives, if not on the host of the tests; for ``fork`` only.
        """
        return self.several(1, kind, environ=environ, group=group, host=host)[0]

    def several(
        self,
        count: int,
        kind: str = "fork",
        *,
        environ: dict[str, str] | None = None,
        group: int | None = None,
        host: Host | None = None,
    ) -> list[Worker]:
        """Start workers side by side; those of fresh interpreters take seconds each."""
        environ = {"TMPDIR": str(self._tmpdir), **(environ or {})}
        assert (group is None and host is None) or kind == "fork"
        start = {
            "fork": lambda: self._fork(environ, group, host),
            "subprocess": lambda: self._subprocess(environ),
            "spawn": lambda: self._spawn(environ),
        }[kind]
        greetings = [start() for _ in range(count)]
        workers = [greet() for greet in greetings]
        self.workers += workers
        return workers

    def _fork(self, environ: dict[str, str], group: int | None, host: Host | None) -> Callable[[], Worker]:
        link, theirs = link_pair()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._nursery.start(theirs, output, environ, group, host)
        theirs.close()
        return lambda: Worker(link, output)

    def _subprocess(self, environ: dict[str, str]) -> Callable[[], Worker]:
        link, theirs = link_pair()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        process = subprocess.Popen(
            _command("_serve_fd", theirs.fileno()),
            env={**os.environ, **environ},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        theirs.close()
        return lambda: Worker(link, output, process.wait)

    def _spawn(self, environ: dict[str, str]) -> Callable[[], Worker]:
        link, theirs = link_pair()
        output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed with the worker
        its_end = Connection(theirs.detach())
        process = multiprocessing.get_context("spawn").Process(target=_serve_spawned, args=(its_end, output.name))
        saved = {name: os.environ.get(name) for name in environ}
        os.environ.update(environ)
        try:
            process.start()
        finally:
            for name, value in saved.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
            its_end.close()

        def reap() -> int | None:
            process.join()
            code = process.exitcode
            process.close()
            return code

        return lambda: Worker(link, output, reap)

    def dispose(self) -> None:
        for worker in self.workers:
            worker.dispose()


class Nursery:
    """Our side of the nursery process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._requests = ours
        self._process = subprocess.Popen(
            _command("nursery", theirs.fileno()), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def start(
        self, pipe: socket.socket, output: Any, environ: dict[str, str], group: int | None, host: Host | None
    ) -> None:
        """Have a worker born, as a child of this process."""
        there = (host.pid, host.own_memory) if host is not None else None
        request = json.dumps({"environ": environ, "group": group, "host": there}).encode()
        set_subreaper(True)  # orphans of our descendants come to us
        try:
            socket.send_fds(self._requests, [request], [pipe.fileno(), output.fileno()])
            self._requests.settimeout(PATIENCE)
            assert self._requests.recv(1) == b"!", "the nursery is gone"
        finally:
            set_subreaper(False)

    def close(self) -> None:
        self._requests.close()
        assert self._process.wait(PATIENCE) == 0


def set_subreaper(on: bool) -> None:
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0


# Looking from outside --------------------------------------------------------------------------------------------------


def eventually(condition: Callable[[], Any], otherwise: str, timeout: float = PATIENCE) -> None:
    """Wait, holding up the thread, until a condition on some other process holds that nobody can be told of."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.005)


async def eventually_async(condition: Callable[[], Any], otherwise: str, timeout: float = PATIENCE) -> None:
    """The same as a coroutine."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, otherwise
        await asyncio.sleep(0.005)


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Bytes of memory that a process has in use."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int | str = "self") -> list[str]:
    """What the open descriptors of a process are."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sorted(found)


def channel_maps(pid: int | str = "self") -> list[str]:
    """Mappings of channel segments in a process, one string each."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "memfd:aioarena" in line or "/dev/shm/aioarena" in line]


def is_parked(sender: Any, rank: int) -> bool:
    """Whether a reader sleeps, waiting for the next message, as its sender sees it."""
    core = sender._core
    return core._words[core.layout.parked + rank] != 0


@contextlib.contextmanager
def timed(most: float = SOON) -> Any:
    """What happens inside has to be over by then."""
    started = time.monotonic()
    yield
    elapsed = time.monotonic() - started
    assert elapsed < most, f"took {elapsed:.1f} s, more than {most:.1f} s"

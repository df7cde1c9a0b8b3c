"""Fixtures of the tests of worker groups: quick processes, and the check that nothing is left of them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Protocol

import pytest

from aioarena import ArenaConfig
from aioarena.engine import WorkerGroup
from tests.engine.objects import Recorder
from tests.multiprocess.harness import PATIENCE, running_loop_kind

# Large enough for what the tests send, and quick to set up.
ARENA = ArenaConfig(slots=256)
OPTIONS: dict[str, Any] = {"arena": ARENA, "reply_arena": ARENA, "method": "forkserver", "grace": PATIENCE}


class OpenGroup(Protocol):
    def __call__(self, size: int = 2, *args: Any, **options: Any) -> AbstractAsyncContextManager[WorkerGroup]: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.multiprocess)
            item.add_marker(pytest.mark.timeout(6 * PATIENCE))


@pytest.fixture(scope="session", autouse=True)
def _helpers() -> None:
    """What multiprocessing starts once, and keeps. Torch is imported in the fork server, and by no worker."""
    resource_tracker.ensure_running()
    multiprocessing.set_forkserver_preload(["aioarena.engine"])
    forkserver.ensure_running()


@pytest.fixture
def open_group(no_leaks: None) -> Iterator[OpenGroup]:
    """``async with open_group(size, ...) as group`` of :class:`Recorder`; afterwards nothing is left, no child either."""
    started: list[int] = []

    @asynccontextmanager
    async def _open(size: int = 2, *args: Any, **options: Any) -> AsyncIterator[WorkerGroup]:
        factory = options.pop("factory", Recorder)
        async with WorkerGroup(factory, size, *args, **{"loop": running_loop_kind(), **OPTIONS, **options}) as group:
            started.extend(group.pids)
            yield group

    yield _open
    for pid in started:
        assert not _alive(pid), f"worker {pid} was left"
        assert not list(Path(tempfile.gettempdir()).glob(f"aioarena-*/*-{pid}-*")), f"worker {pid} left files"
    assert not multiprocessing.active_children()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Gate:
    """Where methods of workers wait until the test lets them pass.

    Attributes:
        path: What they are told.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._fd = os.open(path, os.O_RDWR)  # both ends, so that nobody sees the other missing

    def open(self, count: int) -> None:
        """Let so many pass, now or when they come."""
        os.write(self._fd, b"x" * count)

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()

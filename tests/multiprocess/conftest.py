"""Fixtures of the tests with processes: workers, and the check that nothing was left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

import aioarena
from tests.multiprocess.harness import TEST_TIMEOUT, Farm, Nursery

SHM = Path("/dev/shm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.multiprocess)
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    resource_tracker.ensure_running()  # multiprocessing starts it with the first process, and keeps it
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def tmpdir_for_sockets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR of the test and its workers: short, as socket paths have to be."""
    tmp_path_factory.getbasetemp()  # which pytest makes below the TMPDIR of the moment
    path = Path(tempfile.mkdtemp(prefix="a-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    """Processes that workers forked, to be ended."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def leftovers(tmpdir: Path, pids: set[int]) -> dict[Path, int]:
    """Sockets below a TMPDIR, and segments of these processes, with the process that made each."""
    paths = [*tmpdir.glob("aioarena-*/*"), *SHM.glob("aioarena-*")]
    owners = {path: int(path.name.split("-")[2]) for path in paths}
    return {path: owner for path, owner in owners.items() if owner in pids}


@pytest.fixture
def farm(nursery: Nursery, no_leaks: None, tmpdir_for_sockets: Path) -> Iterator[Farm]:
    """Starts workers. Afterwards they are dead, and nothing is left of their channels or of the test's own."""
    farm = Farm(tmpdir_for_sockets, nursery)
    try:
        yield farm
    finally:
        pids = {os.getpid(), *(worker.pid for worker in farm.workers)}
        untidy = {worker.pid for worker in farm.workers if worker.untidy or worker.alive}
        farm.dispose()
    left = leftovers(tmpdir_for_sockets, pids)
    assert set(left.values()) <= untidy, f"a process that closed its channels left something behind: {left}"
    if left:
        aioarena.Sender(1, arena=None)  # the next start of any sender removes it
        assert leftovers(tmpdir_for_sockets, pids) == {}

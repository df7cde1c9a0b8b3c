"""The fork server that programs of the documentation come from."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver, resource_tracker

import pytest


@pytest.fixture(scope="session", autouse=True)
def _helpers() -> None:
    # What multiprocessing starts once, and keeps; as the tests of worker groups do.
    resource_tracker.ensure_running()
    multiprocessing.set_forkserver_preload(["aioarena.engine"])
    forkserver.ensure_running()

"""Every test of remote readers has to leave nothing behind."""

from __future__ import annotations

import asyncio

import pytest


@pytest.fixture
async def _clean_loop(_clean_loop: None) -> None:
    """A uvloop opens /dev/null with its first server, and keeps it."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    server.close()
    await server.wait_closed()


@pytest.fixture(autouse=True)
def _leaves_nothing(no_leaks: None) -> None:
    pass

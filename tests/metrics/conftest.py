"""Every test of the integrations has to leave nothing behind, and nobody observing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aioarena import _observing


@pytest.fixture(autouse=True)
def _leaves_nothing(no_leaks: None) -> Iterator[None]:
    yield
    assert _observing._observers == ()


@pytest.fixture(autouse=True)
def _no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the fronts: a lost wake-up is a failure, not a delay."""
    monkeypatch.setattr("aioarena._asyncio.TICK", 1000.0)

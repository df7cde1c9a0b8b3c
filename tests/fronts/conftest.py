"""Every test of the fronts has to leave nothing behind, and to get by without the slow timer."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _leaves_nothing(no_leaks: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends look again once a second, in case a wake-up was lost. Here a lost wake-up is a failure, not a delay."""
    monkeypatch.setattr("aioarena._asyncio.TICK", 1000.0)

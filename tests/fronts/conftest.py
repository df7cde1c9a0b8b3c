"""Every test of the fronts has to leave nothing behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _leaves_nothing(no_leaks: None) -> None:
    pass

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from aioarena._platform import accelerator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def cuda() -> None:
    """Skips without CUDA. Only here, so that collecting these tests asks nothing of any driver."""
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None and torch.version.hip is None else "no device"
        pytest.skip(f"needs a CUDA device: {why} (torch {torch.__version__})")
    torch.ones(1, device="cuda").sum().item()


@pytest.fixture(autouse=True)
def healthy(cuda: None) -> Iterator[None]:
    """Afterwards all arenas are unregistered and no error is pending: a launch, a copy and a wait succeed."""
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while not accelerator._retired.empty() and time.monotonic() < deadline:
        time.sleep(0.001)
    ones = torch.ones(256, 256, device="cuda")
    assert (ones @ ones).sum().item() == 256**3
    torch.cuda.synchronize()


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a figure past pytest's capturing."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n    {line}")

    return say

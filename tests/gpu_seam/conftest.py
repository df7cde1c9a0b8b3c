from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from aioarena._platform import accelerator
from tests.gpu_seam.fake import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A fake runtime in place of CUDA. Afterwards all work is done, nothing is registered and no thread is left."""
    fake = FakeGpu()
    monkeypatch.setattr(accelerator, "_current", fake)
    threads = set(threading.enumerate())
    yield fake
    # An error that was raised remembers where, and with that what was alive there.
    fake.query_error = fake.record_error = fake.streams_error = fake.register_problem = None
    for event in fake.events:
        event.stream.finish()
    gc.collect()
    deadline = time.monotonic() + 5
    while (left := left_over(fake, threads)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not left
    assert not fake.misuse


def left_over(fake: FakeGpu, threads: set[threading.Thread]) -> list[object]:
    new = [thread for thread in threading.enumerate() if thread not in threads]
    return [*(thread for thread in new if thread.name.startswith("aioarena")), *fake.registered]

"""For tests with the sender in the test process."""

from __future__ import annotations

from typing import Any

import aioarena
from tests.multiprocess.harness import Farm, Worker


async def attach(farm: Farm, handle: aioarena.Handle, kind: str = "fork", **options: Any) -> list[Worker]:
    """A reader at every rank of a channel, joined."""
    readers = farm.several(handle.readers, kind)
    for rank, worker in enumerate(readers):
        worker.start("reader", handle, rank, **options)
    for worker in readers:
        assert await worker.aget() == "joined"
    return readers

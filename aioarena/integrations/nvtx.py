"""Ranges for NVIDIA's profilers (Nsight Systems): sends, copies, receives and copies to a device, named after the channel.

::

    from aioarena.integrations import nvtx
    nvtx.install()

Does nothing where torch comes without CUDA. A range begins and ends with the call, however many tasks take turns meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from aioarena import _observing
from aioarena._platform import accelerator
from aioarena._platform.accelerator import Accelerator
from aioarena.receiver import Receiver
from aioarena.sender import Sender

__all__ = ["Ranges", "install"]

logger = logging.getLogger("aioarena")


class Ranges(_observing.Observer):
    """Marks the ranges. Made by :func:`install`."""

    def __init__(self, runtime: Accelerator) -> None:
        self._runtime = runtime

    @contextlib.contextmanager
    def _range(self, name: str) -> Iterator[None]:
        mark = self._runtime.begin_range(name)
        try:
            yield
        finally:
            self._runtime.end_range(mark)

    def sending(self, sender: Sender, carrier: dict[str, str]) -> contextlib.AbstractContextManager[None]:
        return self._range(f"send {sender._name}")

    def copying(self, channel: str, nbytes: int) -> contextlib.AbstractContextManager[None]:
        return self._range(f"copy {channel} ({nbytes} bytes)")

    def receiving(self, receiver: Receiver, delivery: _observing.Delivery) -> contextlib.AbstractContextManager[None]:
        return self._range(f"receive {receiver._name}")

    def moving(self, receiver: Receiver) -> contextlib.AbstractContextManager[None]:
        return self._range(f"to_device {receiver._name}")

    def uninstall(self) -> None:
        """Mark no more ranges."""
        _observing.forget(self)


def install() -> Ranges:
    """Mark ranges for all ends of this process, those that are there and those to come.

    Returns:
        What marks them; its ``uninstall`` ends it.

    Raises:
        ValueError: It is on already.
    """
    if _observing.observing(Ranges):
        raise ValueError("ranges are on in this process; uninstall() what install() returned before installing them anew")
    runtime = accelerator.current()
    ranges = Ranges(runtime)
    if runtime.has_ranges():
        _observing.observe(ranges)
    else:
        logger.info("aioarena: this torch has no NVTX, so no ranges are marked")
    return ranges

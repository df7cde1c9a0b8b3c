"""Arena memory lent to the sender's own code, so that sending it copies nothing.

A lent tensor is an ordinary CPU tensor over a span of the arena. Its base is a lease, as of a received one: whatever keeps
the memory in use keeps the lease, and the slots are free again once the lease is gone and all readers have released what
was sent of it.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from aioarena._codec import GatherSource, MemorySource, Source
from aioarena._core.arena import Arena, Loan
from aioarena._platform.memory import Mapping


class _Lease:
    """Base of the array over lent slots; its end is the end of their use here."""

    __slots__ = ("__array_interface__", "_arena", "_loan", "_loans", "_mapping")

    def __init__(self, arena: Arena, loan: Loan, loans: dict[int, Loan], mapping: Mapping, address: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (loan.nbytes,), "typestr": "|u1", "version": 3}
        self._arena = arena
        self._loan = loan
        self._loans = loans
        self._mapping = mapping

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # May run in any thread, inside the collector, after close: it only leaves word. Nobody else can lend or send this
        # memory any more, so that taking it off the list is not missed by anybody either.
        if not exiting():
            self._loans.pop(self._loan.slot, None)
            self._arena.drop(self._loan)


class Lender:
    """Lends spans of one sender's arena.

    Args:
        arena: The ledger of spans.
        mapping: The arena's memory.
    """

    def __init__(self, arena: Arena, mapping: Mapping) -> None:
        self._arena = arena
        self._mapping: Mapping | None = mapping
        self._address = mapping.address
        self._end = mapping.address + mapping.nbytes
        self._loans: dict[int, Loan] = {}  # by first slot

    @property
    def closed(self) -> bool:
        return self._mapping is None

    def close(self) -> None:
        """Lend no more, and let go of the memory. What is lent stays valid."""
        self._mapping = None

    def take(self, nbytes: int) -> Loan | None:
        """Slots for at least one byte, or None if none are free."""
        return self._arena.lend(nbytes) if self._arena.fits(nbytes) else None

    def lend(self, loan: Loan) -> memoryview:
        """The memory of slots just taken; they go back when its last user is gone."""
        assert self._mapping is not None, "the lender is closed"
        self._loans[loan.slot] = loan
        address = self._address + loan.slot * self._arena.slot_bytes
        return np.asarray(_Lease(self._arena, loan, self._loans, self._mapping, address)).data

    def find(self, address: int, nbytes: int) -> tuple[Loan, int] | None:
        """The loan that memory lies in, and where it starts in the arena; None for any other memory."""
        if not self._address <= address < self._end:
            return None
        return self._find(sorted(self._loans), address, nbytes)

    def _find(self, slots: list[int], address: int, nbytes: int) -> tuple[Loan, int] | None:
        start = address - self._address
        position = bisect_right(slots, start // self._arena.slot_bytes) - 1
        # It may be gone since: a finalizer runs in any thread.
        loan = self._loans.get(slots[position]) if position >= 0 else None
        if loan is not None and start + nbytes <= loan.slot * self._arena.slot_bytes + loan.nbytes:
            return loan, start
        return None

    def hold(self, sources: Sequence[Source]) -> list[Loan]:
        """Note a send of lent memory, before any of it is claimed or copied.

        Returns:
            Its loans, whose ``pending`` is to be counted down when the send is over.
        """
        loans: list[Loan] = []
        if self._loans:
            slots = sorted(self._loans)
            for source in sources:
                # Gathered ones are copied, but their memory is read as well.
                address = source.address if isinstance(source, MemorySource | GatherSource) else 0
                if self._address <= address < self._end:
                    found = self._find(slots, address, 1)
                    if found is not None:
                        found[0].pending += 1
                        loans.append(found[0])
        return loans

    def lent(self, sources: Sequence[Source]) -> dict[int, tuple[Loan, int]] | None:
        """Which sources of a message lie in lent memory, by index; None for a message without any."""
        if not self._loans:
            return None
        found = {}
        slots = sorted(self._loans)
        for index, source in enumerate(sources):
            if isinstance(source, MemorySource) and self._address <= source.address < self._end:
                loan = self._find(slots, source.address, source.nbytes)
                if loan is not None:
                    found[index] = loan
        return found or None


def as_tensor(memory: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that owns its storage, as ``torch.empty`` makes it, over some memory."""
    tensor = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape))
    tensor.set_(tensor.untyped_storage(), 0, shape, torch.empty(shape, device="meta").stride())
    return tensor


def address_of(memory: Any) -> int:
    """Where the storage of a tensor, or the memory of an array, begins; 0 for a tensor without one."""
    if isinstance(memory, torch.Tensor):
        try:
            return memory.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # sparse ones and some subclasses
            return 0
    if isinstance(memory, np.ndarray):
        return int(memory.ctypes.data)
    raise TypeError(f"expected a torch.Tensor or a numpy.ndarray, not {type(memory).__name__}")


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape from an int or a sequence of ints.

    Raises:
        TypeError, ValueError: It is none.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence | torch.Size) else (shape,)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"shape must be an int or a sequence of ints, not {shape!r}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape must not have negative sizes: {shape!r}")
    return sizes

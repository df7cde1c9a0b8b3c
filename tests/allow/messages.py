"""A module that a receiver allows: what it defines may be received, what it imports may not."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, field
from os import system  # noqa: F401 - a name that an attacker would like to find here
from subprocess import Popen  # noqa: F401 - the same
from typing import Any, NamedTuple


class Kind(enum.Enum):
    PREFILL = 1
    DECODE = 2


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclass
class Step:
    number: int
    kind: Kind = Kind.DECODE
    tensors: list[Any] = field(default_factory=list)

    def valid(self) -> bool:
        return self.number >= 0


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    shape: tuple[int, ...]


class Pair(NamedTuple):
    left: object
    right: object


class Table(dict[str, object]):
    """A dict of its own kind, with attributes."""


class Outer:
    class Inner:
        def __init__(self, value: object) -> None:
            self.value = value

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Outer.Inner) and other.value == self.value

        __hash__ = None  # type: ignore[assignment]


class WithState:
    def __init__(self, value: int) -> None:
        self.value = value

    def __getstate__(self) -> tuple[int]:
        return (self.value,)

    def __setstate__(self, state: tuple[int]) -> None:
        (self.value,) = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithState) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


class Failure(Exception):
    """An error with more than its text."""


class ByFunction:
    """Rebuilt by a function, which has to be allowed by itself."""

    def __reduce__(self) -> Any:
        return rebuild, (7,)


def rebuild(value: int) -> tuple[str, int]:
    return "rebuilt", value


def remove(path: str) -> None:
    """A function of this module that takes a path: allowing the module must not make it callable."""
    os.remove(path)


SCRATCH = bytearray()


def overwrite(start: int, data: bytes) -> None:
    """As another process might, while the message that calls this is being unpickled."""
    SCRATCH[start : start + len(data)] = data

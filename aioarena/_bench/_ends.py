"""What `bench compare` wants of an alternative: a sender's end, a reader's end, and who makes them."""

from __future__ import annotations

import io
import pickle
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

# Messages that may be under way to a reader, where the alternative leaves that to its user.
WINDOW = 1000

Message = dict[str, Any]


class NotPossibleError(Exception):
    """An alternative cannot do what is asked; the message says why."""


class SendEnd(ABC):
    """The sender's end. ``handle`` is what readers need, and pickles."""

    handle: Any = None

    async def ready(self) -> None:  # noqa: B027 - most know when it is made
        """Wait until every reader has attached."""

    def fresh(self, message: Message) -> Message:
        """The message to send, where sending changes it; made outside of what is timed."""
        return message

    @abstractmethod
    async def send(self, message: Message) -> None: ...

    @abstractmethod
    async def aclose(self) -> None: ...


class ReadEnd(ABC):
    """A reader's end. A message is valid until the next one is received, at least."""

    @abstractmethod
    async def recv(self) -> Message: ...

    @abstractmethod
    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What an end is made for.

    Attributes:
        readers: Readers there will be.
        nbytes: The most that a message has, with something to spare.
        directory: For sockets; it is removed with all that is in it.
        inherited: What :meth:`Alternative.inherit` returned.
    """

    readers: int
    nbytes: int
    directory: str
    inherited: Any = None


class Alternative(ABC):
    """One way.

    Attributes:
        name: For tables.
        about: What a reader of the tables should know.
        scenarios: What it is for; None if for everything.
        modules: What its processes would take long to import.
        ours: Whether a failure is an error, and not a note.
    """

    name: ClassVar[str]
    about: ClassVar[str] = ""
    scenarios: ClassVar[frozenset[str] | None] = None
    modules: ClassVar[tuple[str, ...]] = ()
    ours: ClassVar[bool] = False

    @classmethod
    def missing(cls) -> str | None:
        """Why it cannot be run here; None if it can."""
        return None

    @classmethod
    def version(cls) -> str | None:
        """Of what it needs, if `machine` does not say it."""
        return None

    @classmethod
    def inherit(cls, readers: int) -> Any:
        """What its processes have to be given when they are started."""
        return None

    @classmethod  # noqa: B027 - most leave nothing
    def clean_up(cls) -> None:
        """Remove what killed processes may have left on the machine."""

    @classmethod
    @abstractmethod
    async def sender(cls, setting: Setting) -> SendEnd: ...

    @classmethod
    @abstractmethod
    async def reader(cls, setting: Setting, handle: Any, rank: int) -> ReadEnd: ...


# Pickling with tensors out of band --------------------------------------------------------------------------------


def _tensor(buffer: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is received may be read-only
        return torch.frombuffer(buffer, dtype=dtype).view(shape)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, torch.Tensor):
            flat: Any = obj.detach().contiguous().view(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(flat), obj.dtype, tuple(obj.shape))
        return NotImplemented


def dumps(message: Message) -> list[Any]:
    """The pickle, then the memory of each tensor, not copied."""
    if "tensors" not in message:
        return [pickle.dumps(message, 5)]
    buffers: list[Any] = []
    file = io.BytesIO()
    _Pickler(file, 5, buffer_callback=buffers.append).dump(message)
    return [file.getbuffer(), *(buffer.raw() for buffer in buffers)]


def loads(frames: Sequence[Any]) -> Message:
    message: Message = pickle.loads(frames[0], buffers=frames[1:])
    return message

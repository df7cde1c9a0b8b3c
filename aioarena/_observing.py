"""Telling others what the ends of this process do: for times, traces and profilers.

An end is observed by becoming an instance of a subclass whose methods tell of themselves. So one that nobody observes does
not run one line more for it, and messages get an envelope only where an observer wants one.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, cast

import numpy as np

from aioarena import _registry
from aioarena._asyncio import Endpoint, State
from aioarena._codec import Plan
from aioarena._copying import Portion
from aioarena._core.sender import PlacedMessage
from aioarena._envelope import Envelope, Postmark, take_postmark
from aioarena._filling import Filler
from aioarena.receiver import Receiver
from aioarena.sender import Sender


class Delivery:
    """A message that is being received.

    Attributes:
        postmark: What came with it; None until it is unpickled, and if nothing did.
    """

    __slots__ = ("postmark",)

    def __init__(self) -> None:
        self.postmark: Postmark | None = None


class Observer:
    """What each method returns is entered before, and left after, what it is named for. Runs on the ends' loops.

    Attributes:
        carries: Whether messages have to travel in an envelope.
    """

    carries = False

    def sending(self, sender: Sender, carrier: dict[str, str]) -> AbstractContextManager[object]:
        """A call that sends, waiting included. What is in the carrier once this is entered travels with the message."""
        return nullcontext()

    def copying(self, channel: str, nbytes: int) -> AbstractContextManager[object]:
        """Copies into the arena or into frames, within a call that sends."""
        return nullcontext()

    def receiving(self, receiver: Receiver, delivery: Delivery) -> AbstractContextManager[object]:
        """Unpickling a message that has arrived."""
        return nullcontext()

    def moving(self, receiver: Receiver) -> AbstractContextManager[object]:
        """A call of ``to_device``."""
        return nullcontext()


_observers: tuple[Observer, ...] = ()


def observe(observer: Observer) -> None:
    """Tell an observer of everything from now on, at all ends, those that are there and those to come."""
    global _observers
    _observers = (*_observers, observer)
    if _equip not in _registry._when_started:
        _registry.call_when_started(_equip)
    for end in _registry.ends():
        if end._state not in (State.NEW, State.CLOSED):
            _equip(end)


def forget(observer: Observer) -> None:
    """End that."""
    global _observers
    _observers = tuple(other for other in _observers if other is not observer)
    if not _observers:
        for end in _registry.ends():
            _strip(end)


def observing(kind: type[Observer]) -> bool:
    """Whether there is an observer of some kind."""
    return any(isinstance(observer, kind) for observer in _observers)


def _equip(end: Endpoint) -> None:
    if not _observers or isinstance(end, _TellingSender | _TellingReceiver) or not isinstance(end, Sender | Receiver):
        return
    end.__class__ = _telling(type(end))  # type: ignore[assignment]
    if isinstance(end, Sender):
        end._filler.__class__ = _TellingFiller


def _strip(end: Endpoint) -> None:
    if isinstance(end, _TellingSender | _TellingReceiver):
        end.__class__ = end._silent  # type: ignore[assignment]
        if isinstance(end, Sender):
            end._filler.__class__ = Filler


@functools.cache
def _telling(kind: type[Endpoint]) -> type[Endpoint]:
    """The subclass that tells, of the same name, of Sender or Receiver or what users have made of them."""
    tells = _TellingSender if issubclass(kind, Sender) else _TellingReceiver
    # Theirs first: what a user's send hands on to Sender's is what gets the envelope.
    bases = (tells,) if kind in (Sender, Receiver) else (kind, tells)
    return cast(
        type[Endpoint],
        types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(__module__=kind.__module__, _silent=kind)),
    )


def _entered(contexts: Iterable[AbstractContextManager[object]]) -> AbstractContextManager[object]:
    first, *others = contexts
    if not others:
        return first
    return _all([first, *others])


@contextlib.contextmanager
def _all(contexts: list[AbstractContextManager[object]]) -> Any:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class _TellingSender(Sender):
    _silent: type[Sender]

    async def send(self, obj: object) -> None:
        carrier: dict[str, str] = {}
        with _entered(observer.sending(self, carrier) for observer in _observers or _NOBODY):
            await super().send(_wrapped(obj, carrier))

    enqueue = send

    def send_nowait(self, obj: object) -> None:
        carrier: dict[str, str] = {}
        with _entered(observer.sending(self, carrier) for observer in _observers or _NOBODY):
            super().send_nowait(_wrapped(obj, carrier))


class _TellingReceiver(Receiver):
    _silent: type[Receiver]

    def _decode(self, pickled: bytes | memoryview, buffers: list[memoryview] | None = None) -> Any:
        delivery = Delivery()
        try:
            with _entered(observer.receiving(self, delivery) for observer in _observers or _NOBODY):
                take_postmark()  # of a message that nobody asked about
                obj = super()._decode(pickled, buffers)
                delivery.postmark = take_postmark()
                return obj
        finally:
            del pickled  # or the traceback of an error keeps it, and with it a span

    async def _move(self, obj: Any, device: Any, stream: Any) -> Any:
        with _entered(observer.moving(self) for observer in _observers or _NOBODY):
            return await super()._move(obj, device, stream)


class _TellingFiller(Filler):
    async def _run(self, portions: list[Portion], nbytes: int) -> None:
        if not nbytes:
            return  # all of it was lent
        with _entered(observer.copying(self._name, nbytes) for observer in _observers or _NOBODY):
            await super()._run(portions, nbytes)

    def fill_now(self, plan: Plan, placed: PlacedMessage) -> list[np.ndarray[Any, Any]]:
        nbytes = placed.frame_nbytes + sum(span.nbytes for span in placed.spans.values() if span.loan is None)
        if not nbytes:
            return super().fill_now(plan, placed)
        with _entered(observer.copying(self._name, nbytes) for observer in _observers or _NOBODY):
            return super().fill_now(plan, placed)


def _wrapped(obj: object, carrier: dict[str, str]) -> object:
    return Envelope(obj, carrier) if any(observer.carries for observer in _observers) else obj


# Whom to tell when the last observer has left between two lines.
_NOBODY = (Observer(),)

"""What may travel with a message: when it was pickled, and e.g. the context of a trace.

It is wrapped around the object inside the pickle, and comes off by unpickling. So every reader receives the object as it
was sent, whether anybody there asks for the rest or not, and a message without an envelope is none byte longer.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from aioarena._platform.process import clock_identity


class Postmark(NamedTuple):
    """What came with a message.

    Attributes:
        sent_ns: ``time.monotonic_ns()`` of the sender when it pickled the message.
        clock: Which clock that was.
        carrier: What was added, by name.
    """

    sent_ns: int
    clock: str
    carrier: dict[str, str]

    @property
    def age(self) -> float | None:
        """Seconds since it was pickled; None if the sender has another clock, being on another host."""
        if not self.clock or self.clock != clock_identity():
            return None
        return max(0, time.monotonic_ns() - self.sent_ns) * 1e-9


class Envelope:
    """A message with something around it.

    Attributes:
        message: The object to be sent.
        carrier: What travels with it, by name.
    """

    __slots__ = ("carrier", "message")

    def __init__(self, message: object, carrier: dict[str, str]) -> None:
        self.message = message
        self.carrier = carrier

    def __reduce__(self) -> tuple[object, ...]:
        return open_envelope, (self.message, time.monotonic_ns(), clock_identity(), self.carrier)


_opened = threading.local()


# This name is part of the wire format.
def open_envelope(message: Any, sent_ns: int, clock: str, carrier: dict[str, str]) -> Any:
    """Called by unpickling: the message, after putting aside what came with it."""
    # Not the message: that would keep it, and its slots, until the next one.
    _opened.postmark = Postmark(sent_ns, clock, carrier)
    return message


def take_postmark() -> Postmark | None:
    """What came with the message that this thread unpickled last, once; None if nothing did."""
    postmark: Postmark | None = getattr(_opened, "postmark", None)
    _opened.postmark = None
    return postmark

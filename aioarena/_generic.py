"""The type of a channel's messages, for type checkers: ``Sender[Step]`` takes them, ``Receiver[Step]`` gives them.

An end that does not say is one of Any. At run time this is plain ``typing.Generic``, and costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # typing's own has defaults from Python 3.13 on. Type checkers know this one whether it is installed or not.
    from typing_extensions import TypeVar

    Sent = TypeVar("Sent", contravariant=True, default=Any)
    Received = TypeVar("Received", covariant=True, default=Any)
else:
    from typing import TypeVar

    Sent = TypeVar("Sent", contravariant=True)
    Received = TypeVar("Received", covariant=True)

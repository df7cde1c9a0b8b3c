"""An asyncio-native broadcast channel for inference engines.

One sender process broadcasts a Python object per step to N reader processes; the bytes of large CPU tensors are copied
once, into shared memory, and every reader gets a zero-copy tensor over them.
"""

from aioarena._platform.support import check as _check

_check()

from aioarena._process_groups import from_process_group  # noqa: E402
from aioarena._types import ArenaConfig, Handle, ReaderStatus, ReceiverStatistics, SenderStatistics  # noqa: E402
from aioarena.exceptions import (  # noqa: E402
    ArenaError,
    BusyError,
    ClosedError,
    DecodeError,
    EncodeError,
    EndOfChannel,
    EvictedError,
    GroupError,
    HandleError,
    InternalError,
    NoSpaceError,
    NotAllowedError,
    PeerLostError,
    ReaderLostError,
    SenderLostError,
    TimedOutError,
    WorkerError,
    WorkerLostError,
    WouldBlock,
    WrongContextError,
)
from aioarena.receiver import Receiver  # noqa: E402
from aioarena.relay import Relay  # noqa: E402
from aioarena.sender import Sender  # noqa: E402

__all__ = [
    "ArenaConfig",
    "ArenaError",
    "BusyError",
    "ClosedError",
    "DecodeError",
    "EncodeError",
    "EndOfChannel",
    "EvictedError",
    "GroupError",
    "Handle",
    "HandleError",
    "InternalError",
    "NoSpaceError",
    "NotAllowedError",
    "PeerLostError",
    "ReaderLostError",
    "ReaderStatus",
    "Receiver",
    "ReceiverStatistics",
    "Relay",
    "Sender",
    "SenderLostError",
    "SenderStatistics",
    "TimedOutError",
    "WorkerError",
    "WorkerLostError",
    "WouldBlock",
    "WrongContextError",
    "from_process_group",
]

__version__ = "0.1.0"

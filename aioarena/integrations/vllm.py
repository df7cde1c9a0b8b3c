"""aioarena under vLLM's executors, in place of its message queue.

Installing the package registers :func:`register` as one of vLLM's general plugins, which does nothing unless the
environment has ``AIOARENA_VLLM=1``. With it, the engine core and all workers of one host talk over aioarena; vLLM's own
``--enable-shm-tensor-arena`` decides whether large tensors go through the arena. Queues with readers on other hosts stay
vLLM's own, and so does everything where vLLM's queue is not the one this was written for.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from types import ModuleType
from typing import Any

_logger = logging.getLogger("aioarena")

VARIABLE = "AIOARENA_VLLM"

# What we stand in for: every method that others call, and its parameters without self. vllm 0.32.
_INTERFACE = {
    "__init__": [
        "n_reader",
        "n_local_reader",
        "local_reader_ranks",
        "max_chunk_bytes",
        "max_chunks",
        "connect_ip",
        "enable_shm_tensor_arena",
    ],
    "export_handle": [],
    "create_from_handle": ["handle", "rank"],
    "wait_until_ready": [],
    "shutdown": [],
    "enqueue": ["obj", "timeout"],
    "dequeue": ["timeout", "indefinite"],
    "broadcast_object": ["obj"],
    "create_from_process_group": [
        "pg",
        "max_chunk_bytes",
        "max_chunks",
        "writer_rank",
        "external_writer_handle",
        "blocking",
    ],
    "create_from_process_group_single_reader": ["pg", "max_chunk_bytes", "max_chunks", "reader_rank", "blocking"],
}
# What only vLLM's own queue uses of itself.
_INTERNAL = frozenset({"acquire_read", "acquire_write", "recv", "ReadTimeoutWithWarnings"})


def register() -> None:
    """Put aioarena in place of vLLM's message queue in this process, if the environment asks for it."""
    if os.environ.get(VARIABLE) != "1":
        return
    _adopt_log_handlers()
    from vllm.distributed.device_communicators import shm_broadcast as module

    stock = module.MessageQueue
    if (difference := _difference(stock)) is not None:
        _logger.warning(
            "vLLM's own message queue stays in place: %s, and aioarena does not know that. Install a version of both that "
            "fit (vllm 0.32 does), or unset %s",
            difference,
            VARIABLE,
        )
        return
    from aioarena.integrations._vllm_queue import ArenaMessageQueue

    if stock is ArenaMessageQueue:
        return  # asked twice
    _replace(stock, ArenaMessageQueue, module)
    _logger.info("channels between vLLM's processes on this host are aioarena's")


def _difference(stock: Any) -> str | None:
    """In what a message queue is not the one we know; None if it is."""
    for name, expected in _INTERFACE.items():
        method = getattr(stock, name, None)
        if method is None:
            return f"its MessageQueue has no {name}()"
        found = [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
        if found != expected:
            return f"its MessageQueue.{name} takes ({', '.join(found)}) instead of ({', '.join(expected)})"
    unknown = {name for name in vars(stock) if not name.startswith("_")} - _INTERFACE.keys() - _INTERNAL
    return f"its MessageQueue has {', '.join(sorted(unknown))}" if unknown else None


def _replace(stock: Any, ours: Any, module: ModuleType) -> None:
    """In the module that defines it, for who imports it later, and in all that have done so."""
    module.MessageQueue = ours  # type: ignore[attr-defined]
    for name, other in list(sys.modules.items()):
        if name.startswith("vllm.") and getattr(other, "MessageQueue", None) is stock:
            other.MessageQueue = ours  # type: ignore[attr-defined]


def _adopt_log_handlers() -> None:
    """Let what aioarena says appear where vLLM's own lines do."""
    if not _logger.handlers:
        vllm = logging.getLogger("vllm")
        for handler in vllm.handlers:
            _logger.addHandler(handler)
        if vllm.handlers:
            _logger.setLevel(vllm.level)
            _logger.propagate = False

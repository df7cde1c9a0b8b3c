"""What the plugin needs of vLLM's module of the message queue, for machines without vLLM: the interface, and no queue.

``tests/vllm`` runs the plugin with the real one.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest

NAME = "vllm.distributed.device_communicators.shm_broadcast"


@dataclass
class Handle:
    local_reader_ranks: list[int] = field(default_factory=list)
    buffer_handle: tuple[int, int, int, str] | None = None
    local_subscribe_addr: str | None = None
    local_notify_addr: str | None = None
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False
    tensor_arena_handle: tuple[int, int, int, str] | None = None


def make_queue() -> type:
    """A class with the interface of vLLM's MessageQueue, that only notes what it was made with."""

    class MessageQueue:
        def __init__(
            self,
            n_reader: int,
            n_local_reader: int,
            local_reader_ranks: list[int] | None = None,
            max_chunk_bytes: int = 24 << 20,
            max_chunks: int = 10,
            connect_ip: str | None = None,
            enable_shm_tensor_arena: bool = False,
        ) -> None:
            self.made = (n_reader, n_local_reader, connect_ip)

        def export_handle(self) -> Handle:
            return Handle()

        @staticmethod
        def create_from_handle(handle: Any, rank: int) -> Any:
            queue = sys.modules[NAME].MessageQueue.__new__(sys.modules[NAME].MessageQueue)
            queue.made = (handle, rank)
            return queue

        def wait_until_ready(self) -> None: ...
        def shutdown(self) -> None: ...
        def acquire_write(self, timeout: float | None = None) -> None: ...
        def enqueue(self, obj: Any, timeout: float | None = None) -> None: ...
        def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any: ...

        def broadcast_object(self, obj: Any = None) -> Any:
            if self._is_writer:  # type: ignore[attr-defined]
                self.enqueue(obj)
                return obj
            return self.dequeue()

        @staticmethod
        def create_from_process_group_single_reader(
            pg: Any, max_chunk_bytes: int, max_chunks: int, reader_rank: int = 0, blocking: bool = False
        ) -> Any: ...

        @staticmethod
        def create_from_process_group(
            pg: Any,
            max_chunk_bytes: int,
            max_chunks: int,
            writer_rank: int = 0,
            external_writer_handle: Any = None,
            blocking: bool = True,
        ) -> Any: ...

    return MessageQueue


def install(monkeypatch: pytest.MonkeyPatch, queue: type | None = None) -> types.ModuleType:
    """Put the stand-in where vLLM's module is looked for."""
    parts = NAME.split(".")
    for index in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:index]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if index > 1:
            setattr(sys.modules[".".join(parts[: index - 1])], parts[index - 1], module)
    module.Handle = Handle  # type: ignore[attr-defined]
    module.MessageQueue = queue or make_queue()  # type: ignore[attr-defined]
    module.VLLM_RINGBUFFER_WARNING_INTERVAL = 60  # type: ignore[attr-defined]
    # Defined over the stand-in anew each time.
    monkeypatch.delitem(sys.modules, "aioarena.integrations._vllm_queue", raising=False)
    return module

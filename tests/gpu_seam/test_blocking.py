"""Blocking receivers with a pinned arena: the release goes on while nobody calls, streams are the calling thread's."""

from __future__ import annotations

import gc
from typing import Any

import torch

from aioarena import ArenaConfig, blocking
from tests.fronts.threads import Call, calls_wait, caretaker_leads, eventually
from tests.gpu_seam.channel import NBYTES, SLOTS, tensor
from tests.gpu_seam.fake import FakeGpu

OPTIONS: dict[str, Any] = {"arena": ArenaConfig(slots=SLOTS, slot_bytes=NBYTES, min_bytes=4096), "ring_bytes": 1 << 20}


def free(sender: blocking.Sender) -> bool:
    return sender.statistics().slots_used == 0


def receive_pinned(sender: blocking.Sender, receiver: blocking.Receiver) -> torch.Tensor:
    """A tensor of the arena, which is pinned by now."""
    sender.send(tensor())
    received: torch.Tensor = receiver.recv()
    eventually(lambda: receiver.statistics().pinned == "yes")
    return received


def test_a_span_is_released_while_nobody_calls(gpu: FakeGpu) -> None:
    """The caretaker asks the GPU, and also a call that waits does."""
    busy = gpu.default_streams[0]
    gpu.initialize()
    with blocking.Sender(1, **OPTIONS) as sender, blocking.Receiver(sender.handle, 0) as receiver:
        for waits in (False, True):
            received = receive_pinned(sender, receiver)
            call = Call(receiver.recv) if waits else None
            calls_wait(receiver) if waits else caretaker_leads(receiver)
            gpu.events.clear()
            busy.busy = True
            del received
            eventually(lambda: gpu.recorded_on(busy))
            assert not free(sender)
            busy.finish()
            eventually(lambda: free(sender))
            if call is not None:
                sender.send("last")
                assert call.result() == "last"


def test_a_span_dropped_after_close(gpu: FakeGpu) -> None:
    """It waits for the stream that was current where it was dropped, in a thread."""
    mine = gpu.stream("mine")
    gpu.initialize()
    with blocking.Sender(1, **OPTIONS) as sender:
        with blocking.Receiver(sender.handle, 0) as receiver:
            received = receive_pinned(sender, receiver)
        mine.busy = True
        with gpu.using(mine):
            del received
            gc.collect()
        eventually(lambda: gpu.recorded_on(mine))
        assert not free(sender)
        mine.finish()
        eventually(lambda: free(sender))


def test_to_device_uses_the_stream_of_the_calling_thread(gpu: FakeGpu) -> None:
    """Though the caretaker has the loop; the copy is complete when it returns."""
    mine = gpu.stream("mine")
    gpu.initialize()
    with blocking.Sender(1, **OPTIONS) as sender, blocking.Receiver(sender.handle, 0) as receiver:
        received = receive_pinned(sender, receiver)
        caretaker_leads(receiver)
        mine.busy = True

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            with gpu.using(mine):
                moved: torch.Tensor = receiver.to_device(tensor, "cuda:0")
                return moved

        copying = Call(copy, received)
        eventually(lambda: gpu.copies or copying.over)
        assert [stream for _, stream, _ in gpu.copies] == [mine]
        mine.finish()
        assert torch.equal(copying.result(), tensor())
        receiver.record_stream(received, mine)
        mine.busy = True
        del received
        eventually(lambda: receiver.statistics().spans_pending == 1)
        assert not free(sender)
        mine.finish()
        eventually(lambda: free(sender))

"""What ``statistics()`` of both ends tells. Only looks, and changes nothing: any thread may ask, also while others work."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from aioarena._asyncio import State
from aioarena._core.arena import snapshot
from aioarena._core.sender import Membership
from aioarena._platform.memory import Pin
from aioarena._types import ReaderStatus, ReceiverStatistics, SenderStatistics

if TYPE_CHECKING:
    from aioarena.receiver import Receiver
    from aioarena.sender import Sender

# Guards the one thing that is written here: the most that was ever seen in a ring.
_peaks = threading.Lock()


def of_sender(sender: Sender) -> SenderStatistics:
    core, filler, wire, serving = sender._core, sender._filler, sender._wire, sender._serving
    used, held = core.arena.census()
    # The head first: what is sent and received between the two looks must not count, or it would stay as the most ever.
    head = core.ring.head
    ring_used = max(0, head - core.ring.slowest_tail())
    with _peaks:
        sender._ring_peak = ring_peak = max(sender._ring_peak, core.ring.peak, ring_used)
    return SenderStatistics(
        messages=core.ring.published,
        ring_bytes=core.inline_nbytes,
        arena_bytes=core.arena_nbytes,
        lent_bytes=core.lent_nbytes,
        frame_bytes=core.framed_nbytes,
        prefaulted_bytes=filler.prefault.done if filler.prefault is not None else 0,
        fallbacks=dict(core.fallbacks),
        copy_seconds=filler.seconds,
        wakeups=sender._wakeups,
        waits=sender._waits,
        wait_seconds=sender._wait_seconds,
        ring_used=ring_used,
        ring_peak=ring_peak,
        ring_capacity=core.layout.ring_bytes,
        frames_pending=core.frames_pending,
        slots=core.arena.slots,
        slot_bytes=core.arena.slot_bytes,
        slots_used=used,
        slots_peak=core.arena.peak_slots,
        spans_held=len(held),
        readers=tuple(_reader(sender, rank) for rank in range(core.layout.readers)),
        foreign_messages=(wire.foreign if wire is not None else 0) + (serving.wire.foreign if serving is not None else 0),
    )


def _reader(sender: Sender, rank: int) -> ReaderStatus:
    core, members = sender._core, sender._members
    state = core.members[rank]
    member = members.by_rank.get(rank) if members is not None else None
    messages, nbytes = core.lag(rank) if state is Membership.JOINED else (0, 0)
    held = core.arena.held_by(member.holder) if member is not None else []
    now = time.monotonic()
    ages = tuple(max(0.0, now - span.since) for span in held)
    return ReaderStatus(
        rank=rank,
        state=state.value,
        pid=member.identity.pid if member is not None else None,
        host=member.host if member is not None else None,
        # It may receive between the looks at its words and at ours.
        messages_behind=max(0, messages),
        bytes_behind=max(0, nbytes),
        process=member.process_state() if member is not None else None,
        waited_for=sender._stalls.waited_for(rank) if sender._stalls is not None else 0.0,
        spans_held=len(held),
        bytes_held=sum(span.nbytes for span in held),
        oldest_held=max(ages, default=0.0),
        slots_held=tuple(span.slot for span in held),
        ages_held=ages,
    )


def of_receiver(receiver: Receiver) -> ReceiverStatistics:
    core, ledger, assembler = receiver._core, receiver._ledger, getattr(receiver, "_assembler", None)
    held = sorted(snapshot(ledger.held.values()), key=lambda span: span.slot) if ledger is not None else []
    now = time.monotonic()
    ages = tuple(max(0.0, now - span.since) for span in held)
    return ReceiverStatistics(
        messages=core.ring.received if core is not None else 0,
        decode_errors=receiver._decode_errors,
        ring_bytes=core.ring.cursor - core.ring.first if core is not None else 0,
        arena_bytes=assembler.arena_nbytes if assembler is not None else 0,
        frame_bytes=assembler.frame_nbytes if assembler is not None else 0,
        copy_seconds=receiver._move_seconds + (assembler.copy_seconds if assembler is not None else 0.0),
        bytes_behind=max(0, core.ring.lag) if core is not None and receiver._state is State.OPEN else 0,
        parks=receiver._parks,
        wakeups=receiver._wakeups,
        spans_held=len(held),
        bytes_held=sum(span.nbytes for span in held),
        oldest_held=max(ages, default=0.0),
        slots_held=tuple(span.slot for span in held),
        ages_held=ages,
        spans_released=ledger.released if ledger is not None else 0,
        spans_pending=ledger.pending if ledger is not None else 0,
        events_pending=ledger.pending_events if ledger is not None else 0,
        spans_quarantined=ledger.quarantined if ledger is not None else 0,
        pinned=ledger.mapping.pin.value if ledger is not None else Pin.NO.value,
        spans_changed=ledger.changed if ledger is not None else 0,
    )


def _after_fork_in_child() -> None:
    global _peaks
    _peaks = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)

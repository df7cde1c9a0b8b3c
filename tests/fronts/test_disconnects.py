"""What the sender makes of a connection that ended, in the order in which news of a death may come."""

from __future__ import annotations

import pytest

import aioarena
from aioarena import _membership
from aioarena._platform.wire import Disconnect
from aioarena.exceptions import EvictedError, ReaderLostError


def disconnect(sender: aioarena.Sender) -> _membership.Member:
    """Tell the sender that the connection of reader 0 ended, as libzmq does."""
    members = sender._members
    assert members is not None
    member = members.by_rank[0]
    members.handle(Disconnect(member.incarnation))
    return member


async def test_a_dying_reader_is_not_taken_for_a_live_one() -> None:
    """The kernel closes a process's sockets before its pidfd tells of the death: that news is waited for."""
    async with aioarena.Sender(1) as sender, aioarena.Receiver(sender.handle, 0):
        member = disconnect(sender)
        await sender.send("not lost yet")
        sender._members.tick()  # type: ignore[union-attr]
        assert sender.statistics().readers[0].state == "joined"
        sender._members._died(member)  # type: ignore[union-attr]
        with pytest.raises(ReaderLostError, match="died without closing"):
            await sender.send("lost")


async def test_a_reader_without_a_connection_is_lost_though_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be woken any more: after a moment it counts as lost, and learns so on its next call."""
    async with aioarena.Sender(1) as sender, aioarena.Receiver(sender.handle, 0) as reader:
        disconnect(sender)
        monkeypatch.setattr(_membership, "_DYING_SECONDS", 0.0)
        sender._members.tick()  # type: ignore[union-attr]
        with pytest.raises(ReaderLostError, match="its process lives"):
            await sender.send("lost")
        with pytest.raises(EvictedError):
            await reader.recv()

"""Readers on other hosts, looked at from outside of the channel."""

from __future__ import annotations

from aioarena._look.channels import ChannelView, find
from tests.fronts.support import filled, until
from tests.remote.test_channel import opened


def view_by(inode: int) -> ChannelView:
    (view,) = [channel.view() for channel in find()[0] if channel.inode == inode]
    return view


def held(view: ChannelView) -> list[tuple[int, ...]]:
    return [tuple(holder.rank for holder in span.holders) for span in view.spans]


async def test_a_remote_reader_is_seen_and_holds_nothing_once_it_is_lost() -> None:
    """What was on its way to it is not shown as held, though others still hold it."""
    async with opened(remote_timeout=0.4, on_reader_lost="continue") as channel:
        inode = channel.sender.handle.control.inode
        await channel.sender.wait_ready()
        remote = view_by(inode).readers[1]
        assert (remote.seated, remote.pid, remote.state) == (True, None, "on another host")
        channel.proxy.hold()
        await channel.sender.send(filled(1))
        kept = await channel.local.recv()
        assert held(view_by(inode)) == [(0, 1)]
        await until(lambda: channel.sender.statistics().readers[1].state == "lost")
        await until(lambda: held(view_by(inode)) == [(0,)])
        del kept

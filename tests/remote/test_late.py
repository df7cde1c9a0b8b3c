"""Loops that are held up, by a model that loads or a long step: being late is not being gone."""

from __future__ import annotations

import zmq

from aioarena._platform.wire import events_of
from tests.fronts.support import until
from tests.remote.test_channel import opened


async def test_a_receiver_that_was_held_up_looks_before_it_gives_the_sender_up() -> None:
    """Its timer may be called before it learns that the connection stands again."""
    async with opened(remote_timeout=30.0) as channel:
        relay = channel.remote._relay
        feed = relay._feed
        channel.proxy.refuse()
        channel.proxy.cut()
        await until(lambda: feed.down is not None)
        relay._unwatch(feed.wire.monitor_fd)
        channel.proxy.refuse(False)
        await until(lambda: channel.sender._serving._links[1].member.back)
        relay._give_up_sender()
        relay._watch(feed.wire.monitor_fd, relay._on_wire)
        await channel.sender.send(1)
        assert await channel.remote.recv() == 1


async def test_a_sender_that_was_held_up_looks_before_it_gives_a_reader_up() -> None:
    async with opened(remote_timeout=30.0) as channel:
        serving = channel.sender._serving
        link = serving._links[1]
        channel.proxy.cut()
        await until(lambda: link.member.cut is not None)
        channel.sender._unwatch(serving.wire.fd)
        await until(lambda: channel.remote._relay._feed._session == 2)
        await until(lambda: serving.wire.readable())
        serving._gone(link)
        channel.sender._watch(serving.wire.fd, serving.on_wire)
        await channel.sender.send(1)
        assert await channel.remote.recv() == 1


async def test_a_sender_that_was_held_up_answers_before_it_gives_a_reader_up() -> None:
    """No connection stands without it: the reader may have been waiting for that all the time."""
    async with opened(remote_timeout=30.0) as channel:
        serving = channel.sender._serving
        link = serving._links[1]
        channel.sender._unwatch(serving.wire.zap_fd)
        channel.proxy.cut()
        await until(lambda: link.member.cut is not None)
        await until(lambda: events_of(serving.wire._zap) & zmq.POLLIN)
        serving._gone(link)
        channel.sender._watch(serving.wire.zap_fd, serving.on_wire)
        await channel.sender.send(1)
        assert await channel.remote.recv() == 1


async def test_a_reader_whose_loop_is_held_up_is_not_lost_with_its_connection() -> None:
    """That is mended by libzmq meanwhile, which shows that the process lives; a local reader would be waited for, too."""
    async with opened(remote_timeout=4.0) as channel:
        relay = channel.remote._relay
        feed = relay._feed
        member = channel.sender._members.by_rank[1]
        relay._unwatch(feed.wire.monitor_fd)
        channel.proxy.cut()
        await until(lambda: member.back)
        assert not channel.sender._serving._timers
        assert "connected again from 127.0.0.1, but busy" in channel.sender.statistics().readers[1].process
        await channel.sender.send(1)
        assert await channel.local.recv() == 1
        relay._watch(feed.wire.monitor_fd, relay._on_wire)
        assert await channel.remote.recv() == 1
        assert channel.sender.statistics().readers[1].process.startswith("connected from")


async def test_a_reader_that_was_held_up_may_be_gone_after_all() -> None:
    async with opened(remote_timeout=4.0, on_reader_lost="continue") as channel:
        relay = channel.remote._relay
        relay._unwatch(relay._feed.wire.monitor_fd)
        channel.proxy.cut()
        await until(lambda: channel.sender._members.by_rank[1].back)
        channel.proxy.refuse()
        channel.proxy.cut()
        await until(lambda: channel.sender.statistics().readers[1].state == "lost")
        relay._watch(relay._feed.wire.monitor_fd, relay._on_wire)


async def test_a_wake_up_that_is_lost_is_made_up_for() -> None:
    """The sender looks at the socket of its remote readers from time to time, as at that of the local ones."""
    async with opened() as channel:
        sender = channel.sender
        serving = sender._serving
        await sender.send(0)
        assert await channel.remote.recv() == 0
        await until(lambda: sender.statistics().readers[1].messages_behind == 0)
        sender._unwatch(serving.wire.fd)
        await sender.send(1)
        assert await channel.remote.recv() == 1
        await until(lambda: serving.wire.readable())
        sender._tick()
        await until(lambda: sender.statistics().readers[1].messages_behind == 0)
        sender._watch(serving.wire.fd, serving.on_wire)

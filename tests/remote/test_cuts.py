"""Connections that break at the worst moment: every message arrives once, or an error says why not."""

from __future__ import annotations

from aioarena import Receiver, Relay
from tests.fronts.support import until
from tests.remote.proxy import Proxy
from tests.remote.test_channel import remote_sender


async def test_a_cut_while_a_message_waits_for_room_does_not_repeat_it() -> None:
    """It is in the reader's hands, and the new connection goes on behind it."""
    async with remote_sender(0, 1) as sender, Proxy(sender.handle) as proxy, Relay(proxy.handle, 1) as relay:
        for number in range(6):
            await sender.send(number)
        feed = relay._feed
        await until(lambda: feed.nbytes)  # no reader has attached, so the first message waits
        proxy.cut()
        await until(lambda: feed._session == 2)
        async with Receiver(relay.handle, 0) as end:
            for number in range(6):
                assert await end.recv() == number
            await sender.send("last")
            assert await end.recv() == "last"

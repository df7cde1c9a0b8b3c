"""Connections that break at the worst moment: every message arrives once, or an error says why not."""

from __future__ import annotations

from aioarena import Receiver, Relay, Sender
from tests.conftest import RING_BYTES
from tests.fronts.support import until
from tests.remote.proxy import Proxy
from tests.remote.test_channel import remote_sender

_MESSAGES = 3000  # small ones: the pieces of a stream that has to wait are full of them


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


async def test_a_cut_between_messages_that_arrived_together_repeats_none() -> None:
    """A relay whose ring is full has a piece of the stream in hand, and one of its messages half passed on."""
    async with (
        Sender(0, remote_readers=1, bind="tcp://127.0.0.1:0", arena=None) as sender,
        Proxy(sender.handle) as proxy,
        Relay(proxy.handle, 1, ring_bytes=RING_BYTES) as relay,
        Receiver(relay.handle, 0) as end,
    ):
        for number in range(_MESSAGES):
            await sender.send((number, b"x" * 200))
        await until(lambda: relay.statistics().waits > 0)
        for session in (2, 3):
            held = relay.received
            proxy.cut()
            await until(lambda expected=session: relay._feed._session == expected)
            await until(lambda: sender.statistics().readers[0].process.startswith("connected"))
            assert relay.received == held
        assert [(await end.recv())[0] for _ in range(_MESSAGES)] == list(range(_MESSAGES))
        await until(lambda: sender.statistics().readers[0].messages_behind == 0)
        assert relay.received == _MESSAGES

"""``handle`` of a sender with four local readers, which sends a message once the reader at rank 4 is there, and closes."""

import asyncio

import aioarena


async def read(handle, rank):
    async with aioarena.Receiver(handle, rank) as chan:
        assert [message async for message in chan] == ["hello"]


async def send(sender):
    await sender.send("hello")
    await sender.aclose()


async def main():
    sender = aioarena.Sender(4, remote_readers=1, bind="tcp://127.0.0.1:0", arena=None)
    await sender.start()
    handle = sender.handle
    others = [asyncio.create_task(read(handle, rank)) for rank in range(4)]
    sending = asyncio.create_task(send(sender))
    # block
    assert step == "hello"
    await asyncio.gather(sending, *others)


asyncio.run(main())

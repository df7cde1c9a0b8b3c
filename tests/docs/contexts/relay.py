"""``handle`` of a sender that closes once the relay's readers, which ``start_workers(handle)`` starts, have a message."""

import asyncio

import aioarena

reading = []


async def read(handle, rank):
    async with aioarena.Receiver(handle, rank) as chan:
        assert [message async for message in chan] == ["hello"]


def start_workers(handle):
    reading.extend(asyncio.create_task(read(handle, rank)) for rank in range(8))


async def send(sender):
    await sender.send("hello")
    await sender.aclose()


async def main():
    sender = aioarena.Sender(1, remote_readers=1, bind="tcp://127.0.0.1:0", arena=None)
    await sender.start()
    handle = sender.handle
    local = asyncio.create_task(read(handle, 0))
    sending = asyncio.create_task(send(sender))
    # block
    await asyncio.gather(local, sending, *reading)


asyncio.run(main())

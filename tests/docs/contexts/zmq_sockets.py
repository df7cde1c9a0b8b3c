"""A ``publisher`` and a ``subscriber`` that is connected, and ``pixels``; ``message`` in the end."""

import asyncio
import pickle

import torch
import zmq
import zmq.asyncio


async def main():
    pixels = torch.rand(1024, 1024)
    with zmq.asyncio.Context() as context:
        publisher, subscriber = context.socket(zmq.XPUB), context.socket(zmq.SUB)
        publisher.bind("inproc://steps")
        subscriber.connect("inproc://steps")
        subscriber.subscribe(b"")
        await publisher.recv()  # that there is one
        # block
        assert (message["pixel_values"] == pixels.numpy()).all()
        publisher.close(0)
        subscriber.close(0)


asyncio.run(main())

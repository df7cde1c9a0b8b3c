"""Both ranks of ``group``, with ``chan`` as what they get of a channel."""

import asyncio
import os
import sys

import torch.distributed as dist

import aioarena


async def main(group):
    # block
    if isinstance(chan, aioarena.Sender):
        await chan.send("hello")
    else:
        assert await chan.recv() == "hello"
    await chan.aclose()


other = os.fork()
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=0 if other else 1, world_size=2)
asyncio.run(main(dist.group.WORLD))
dist.destroy_process_group()
if other:
    assert os.waitpid(other, 0)[1] == 0
else:
    sys.stdout.flush()
    os._exit(0)

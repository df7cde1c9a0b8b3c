"""What a type checker makes of the two ends: read by test_typing.py, never run.

The comment at the end of a line is what mypy has to say there: the type that is revealed, or the code of its error.
"""

from dataclasses import dataclass
from typing import Any, reveal_type

import aioarena
from aioarena import blocking


@dataclass
class Step:
    number: int


@dataclass
class Prefill(Step):
    tokens: list[int]


async def send(handle: aioarena.Handle) -> None:
    async with aioarena.Sender[Step](readers=2) as chan:
        reveal_type(chan)  # Sender[Step]
        await chan.send(Step(1))
        await chan.send(Prefill(1, [2]))
        await chan.send("step")  # arg-type
        await chan.enqueue("step")  # arg-type
        chan.send_nowait("step")  # arg-type


async def receive(handle: aioarena.Handle) -> None:
    async with aioarena.Receiver[Step](handle, rank=0) as chan:
        reveal_type(chan)  # Receiver[Step]
        reveal_type(await chan.recv())  # Step
        reveal_type(await chan.dequeue())  # Step
        reveal_type(chan.recv_nowait())  # Step
        async for step in chan:
            reveal_type(step)  # Step


def send_blocking(chan: blocking.Sender[Step]) -> None:
    with chan as entered:
        reveal_type(entered)  # Sender[Step]
    chan.send(Prefill(1, [2]), timeout=5.0)
    chan.send("step")  # arg-type
    chan.enqueue("step")  # arg-type
    chan.send_nowait("step")  # arg-type


def receive_blocking(handle: aioarena.Handle) -> None:
    with blocking.Receiver[Step](handle, rank=0) as chan:
        reveal_type(chan.recv(timeout=5.0))  # Step
        reveal_type(chan.dequeue())  # Step
        reveal_type(chan.recv_nowait())  # Step
        for step in chan:
            reveal_type(step)  # Step


async def without_a_type(handle: aioarena.Handle, chan: aioarena.Sender) -> aioarena.Receiver:
    """Bare names are clean under --strict, and mean Any."""
    reveal_type(chan)  # Sender[Any]
    reveal_type(aioarena.Sender(readers=1))  # Sender[Any]
    await chan.send("anything")
    receiver = aioarena.Receiver(handle, rank=0)
    anything: Any = await receiver.recv()
    reveal_type(anything)  # Any
    twin = blocking.Receiver(handle, rank=0)
    reveal_type(twin.recv())  # Any
    return receiver


def pass_on(steps: aioarena.Sender[Step], prefills: aioarena.Receiver[Prefill], handle: aioarena.Handle) -> None:
    """Who takes any step takes a prefill; who gives prefills gives steps; not the other way round."""
    takes_prefills: aioarena.Sender[Prefill] = steps
    gives_steps: aioarena.Receiver[Step] = prefills
    takes_anything: aioarena.Sender[object] = steps  # assignment
    gives_nothing_else: aioarena.Receiver[Prefill] = gives_steps  # assignment
    from_context: aioarena.Receiver[Step] = aioarena.Receiver(handle, rank=0)
    del takes_prefills, takes_anything, gives_nothing_else, from_context

"""Looking from outside at readers that are processes of their own."""

from __future__ import annotations

import aioarena
from aioarena._look.channels import ChannelView, choose
from tests.multiprocess.harness import Farm, eventually_async
from tests.multiprocess.messages import CHANNEL, message
from tests.multiprocess.senders import attach


def look_by(pid: int) -> ChannelView:
    """The one channel that a process takes part in."""
    (channel,) = choose(str(pid))
    return channel.view()


def held(pid: int) -> list[tuple[int, ...]]:
    return [tuple(holder.rank for holder in span.holders) for span in look_by(pid).spans if span.holders]


async def test_a_reader_is_found_by_its_pid_and_holds_nothing_once_it_is_dead(farm: Farm) -> None:
    """What it held is not shown as held, though it never released it and others still hold the same."""
    async with aioarena.Sender(2, **CHANNEL, name="looked at") as chan:
        reader, victim = await attach(farm, chan.handle)
        await chan.send(message("arena", 0))
        assert await victim.aask("hold", 1) == [0]
        assert await reader.aask("hold", 1) == [0]
        assert look_by(victim.pid).name == look_by(reader.pid).name == "looked at"
        assert held(reader.pid) and all(ranks == (0, 1) for ranks in held(reader.pid))
        victim.kill()
        await eventually_async(lambda: chan.statistics().readers[1].state == "lost", "the death was not noticed")
        assert held(reader.pid) and all(ranks == (0,) for ranks in held(reader.pid))

"""Everything at once, from a seed: random messages, retained tensors, kills, restarts, stops, leaves and cancels.

Runs for ``AIOARENA_SOAK_SECONDS`` (30 by default). ``AIOARENA_SOAK_SEED`` repeats a run: the same sequence of messages and
faults, as far as the scheduler lets it be the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aioarena
from tests.soak.reader import digest

SECONDS = float(os.environ.get("AIOARENA_SOAK_SECONDS", "30"))
SEED = int(os.environ.get("AIOARENA_SOAK_SEED", str(time.time_ns() % 1_000_000)))
READERS = 3  # rank 0 is stopped but never killed: its log is the order of the channel
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex64, torch.bool]

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(SECONDS + 180)]


def random_part(rng: random.Random) -> Any:
    kind = rng.choices(["small", "bytes", "tensor", "strided", "many", "array", "huge"], [30, 10, 25, 8, 6, 10, 3])[0]
    if kind == "small":
        return {"step": rng.randrange(1 << 30), "requests": [rng.randrange(1000) for _ in range(rng.randrange(20))]}
    if kind == "bytes":
        return rng.randbytes(rng.choice([100, 5_000, 70_000, 900_000]))
    if kind == "many":
        return [random_tensor(rng, rng.randrange(1, 3000)) for _ in range(rng.randrange(1, 60))]
    if kind == "array":
        return np.frombuffer(rng.randbytes(8 * rng.choice([10, 20_000, 200_000])), np.uint64).copy()
    if kind == "huge":
        return random_tensor(rng, 10 << 20)  # larger than the arena
    tensor = random_tensor(rng, rng.choice([100_000, 500_000, 2_000_000, 4_000_000]))
    return tensor[: tensor.numel() // 64 * 64].reshape(-1, 64)[:, 3:50] if kind == "strided" else tensor


def random_tensor(rng: random.Random, nbytes: int) -> torch.Tensor:
    dtype = rng.choice(DTYPES)
    block = torch.frombuffer(bytearray(rng.randbytes(8192)), dtype=torch.uint8)
    if dtype is torch.bool:
        block = block % 2
    raw = block.repeat(-(-nbytes // 8192))[: nbytes // dtype.itemsize * dtype.itemsize or dtype.itemsize]
    return raw.clone().view(dtype)


class Reader:
    """A reader process and the record it keeps."""

    def __init__(self, rank: int, seed: int, log: Path, process: asyncio.subprocess.Process) -> None:
        self.rank = rank
        self.seed = seed
        self.log = log
        self.process = process

    @classmethod
    async def start(cls, handle: Path, rank: int, seed: int, directory: Path) -> Reader:
        log = directory / f"log-{rank}-{seed}"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("reader.py")),
            str(handle),
            str(rank),
            str(seed),
            str(log),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return cls(rank, seed, log, process)

    @property
    def ids(self) -> list[int]:
        data = self.log.read_bytes() if self.log.exists() else b""
        return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) // 8 * 8, 8)]

    async def outcome(self) -> str:
        """What went wrong in it, or an empty string."""
        _, stderr = await self.process.communicate()
        fine = self.process.returncode in (0, -signal.SIGKILL)
        return "" if fine else f"reader {self.rank} (seed {self.seed}): {self.process.returncode}: {stderr.decode()}"


class Chaos:
    """The sender's side: sends, and breaks things in between."""

    def __init__(self, chan: aioarena.Sender, rng: random.Random, directory: Path) -> None:
        self.chan = chan
        self.rng = rng
        self.directory = directory
        self.handle = directory / "handle"
        self.readers: dict[int, Reader] = {}
        self.retired: list[Reader] = []
        self.returned: list[int] = []  # ids whose send returned, in the order of the calls
        self.cancelled: list[int] = []
        self.next_id = 0
        self.lent: list[torch.Tensor] = []

    async def attach(self, rank: int) -> None:
        if rank in self.readers:
            self.retired.append(self.readers.pop(rank))
        self.readers[rank] = await Reader.start(self.handle, rank, self.rng.randrange(1 << 30), self.directory)

    async def everyone_attached(self) -> None:
        """Wait until the readers that were started last have joined, so that each is a reader and not a candidate."""
        pids = {reader.process.pid for reader in self.readers.values()}
        while {r.pid for r in self.chan.statistics().readers if r.state == "joined"} != pids:
            assert all(reader.process.returncode is None for reader in self.readers.values()), "a reader ended by itself"
            await asyncio.sleep(0.01)  # a poll, not a delay: nothing tells when a reader joins at a rank that was lost

    def message(self, parts: list[Any] | None = None, leave: int | None = None) -> dict[str, Any]:
        if parts is None:
            parts = [random_part(self.rng) for _ in range(self.rng.randrange(1, 4))]
        self.next_id += 1
        return {"id": self.next_id, "parts": parts, "digests": [digest(part) for part in parts], "leave": leave}

    async def send(self, message: dict[str, Any], give_up_after: float | None = None) -> None:
        try:
            async with asyncio.timeout(give_up_after):
                await self.chan.send(message)
        except TimeoutError:
            self.cancelled.append(message["id"])
        else:
            self.returned.append(message["id"])

    async def send_lent(self) -> None:
        """Send lent memory: new, sent before, or written anew once the readers let go of it."""
        rng, lent = self.rng, self.lent
        if not lent or rng.random() < 0.5:
            tensor = await self.chan.empty(rng.choice([130_000, 500_000, 2_000_000]), torch.uint8)
            tensor.copy_(torch.from_numpy(np.frombuffer(bytearray(rng.randbytes(tensor.numel())), np.uint8)))
            lent.append(tensor)
        else:
            tensor = rng.choice(lent)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.05):
                    await self.chan.reclaim(tensor)
                    tensor.copy_(torch.from_numpy(np.frombuffer(bytearray(rng.randbytes(tensor.numel())), np.uint8)))
        parts = [tensor, random_part(rng), tensor[rng.randrange(tensor.numel()) :]]
        await self.send(self.message(parts), None if rng.random() < 0.7 else rng.random() * 0.01)
        if len(lent) > 3 or rng.random() < 0.2:
            lent.pop(rng.randrange(len(lent)))

    async def step(self) -> None:
        rng = self.rng
        kinds = {"send": 60, "several": 12, "give up": 12, "lend": 8, "kill": 2, "stop": 4, "leave": 2, "bad": 3, "trim": 1}
        match rng.choices(list(kinds), list(kinds.values()))[0]:
            case "send":
                await self.send(self.message())
            case "several":
                await asyncio.gather(*[self.send(self.message()) for _ in range(rng.randrange(2, 5))])
            case "give up":
                await self.send(self.message(), rng.random() * 0.01)
            case "lend":
                await self.send_lent()
            case "trim":
                await self.chan.trim()
            case "kill":
                rank = rng.randrange(1, READERS)
                self.readers[rank].process.kill()
                await self.attach(rank)
            case "stop":
                victim = self.readers[rng.randrange(READERS)].process
                victim.send_signal(signal.SIGSTOP)
                try:
                    for _ in range(rng.randrange(1, 100)):
                        await self.send(self.message(), 0.05)
                finally:
                    if victim.returncode is None:
                        victim.send_signal(signal.SIGCONT)
            case "leave":
                rank = rng.randrange(1, READERS)
                await self.everyone_attached()
                await self.send(self.message(leave=rank))
                await self.readers[rank].process.wait()
                await self.attach(rank)
            case "bad":
                with pytest.raises(aioarena.EncodeError):
                    await self.chan.send({"parts": [random_part(rng), (x for x in ())]})


def check_order(chaos: Chaos) -> None:
    """Rank 0 has seen everything; every other reader a run of it without a gap; nothing twice, nothing out of order."""
    order = chaos.readers[0].ids
    assert len(set(order)) == len(order), "a message arrived twice"
    assert set(chaos.returned) <= set(order), "a message whose send returned did not arrive"
    assert set(order) <= set(chaos.returned) | set(chaos.cancelled), "a message arrived that nobody sent"
    position = {number: index for index, number in enumerate(order)}
    for reader in [*chaos.readers.values(), *chaos.retired]:
        ids = reader.ids
        if ids:
            start = position[ids[0]]
            assert ids == order[start : start + len(ids)], f"reader {reader.rank} has a gap, or another order"
    for reader in chaos.readers.values():
        assert reader.ids[-1:] == order[-1:] or not reader.ids, f"reader {reader.rank} missed the end"
    # Calls made one after the other are published in that order.
    ordered = [number for number in order if number in set(chaos.returned)]
    assert ordered == sorted(ordered), "messages are not in the order of the calls"


async def test_chaos(tmp_path: Path) -> None:
    """Whatever happens to readers and sends, order, exactly-once and every byte hold, and nothing is leaked."""
    print(f"soak: seed {SEED}, {SECONDS:g} s; repeat with AIOARENA_SOAK_SEED={SEED}")
    rng = random.Random(SEED)
    arena = aioarena.ArenaConfig(slots=32, slot_bytes=256 << 10)
    chan = aioarena.Sender(
        READERS,
        name="soak",
        arena=arena,
        ring_bytes=64 << 10,
        frame_budget=64 << 20,
        on_reader_lost="continue",
        wake=rng.choice(["zmq", "pipe"]),
    )
    async with chan:
        chaos = Chaos(chan, rng, tmp_path)
        chaos.handle.write_bytes(pickle.dumps(chan.handle))
        try:
            for rank in range(READERS):
                await chaos.attach(rank)
                assert chaos.readers[rank].process.stdout is not None
                joined = await chaos.readers[rank].process.stdout.readline()
                assert joined == b"joined\n", await chaos.readers[rank].outcome()
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                await chaos.step()
            chaos.lent.clear()
            await chaos.everyone_attached()
            await chaos.send({"id": chaos.next_id + 1, "parts": [], "digests": []})
            await chan.aclose()
            problems = [await reader.outcome() for reader in [*chaos.readers.values(), *chaos.retired]]
            assert not any(problems), f"seed {SEED}: " + "; ".join(filter(None, problems))
            check_order(chaos)
            statistics = chan.statistics()
            assert statistics.lent_bytes > 0
            assert statistics.spans_held == 0
            assert statistics.slots_used == 0
            assert statistics.frames_pending == 0
            assert chan._core.arena.claimed_spans == 0
            print(
                f"soak: {len(chaos.returned)} sent, {len(chaos.cancelled)} given up, {len(chaos.retired)} readers replaced"
            )
            print(f"soak: {statistics}")
        finally:
            for reader in [*chaos.readers.values(), *chaos.retired]:
                if reader.process.returncode is None:
                    reader.process.kill()
                    await reader.process.communicate()

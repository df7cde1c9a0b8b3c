"""The reader process of the soak test: receives, verifies, retains at random, and writes down what it received.

Run as ``python reader.py HANDLE_FILE RANK SEED LOG_FILE``. Every id received goes to the log at once, so that a reader
that is killed leaves a true record. Exits with 0 when the channel ends, with 3 and a message on the first thing wrong.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aioarena

RETAIN_MOST = 12  # messages retained at once; with the arena of the test that exhausts it now and then


def digest(part: Any) -> int:
    """CRC of the bytes of a part, whatever its type; of a tensor, of its elements in order."""
    if isinstance(part, torch.Tensor):
        return zlib.crc32(part.contiguous().reshape(-1).view(torch.uint8).numpy())
    if isinstance(part, np.ndarray):
        return zlib.crc32(part.tobytes())
    if isinstance(part, list):
        return zlib.crc32(str([digest(item) for item in part]).encode())
    return zlib.crc32(pickle.dumps(part))


def verify(message: dict[str, Any], when: str) -> None:
    for index, (part, expected) in enumerate(zip(message["parts"], message["digests"], strict=True)):
        found = digest(part)
        if found != expected:
            sys.stderr.write(f"message {message['id']}, part {index} ({type(part).__name__}): digest {when} is wrong\n")
            os._exit(3)


async def read(handle: aioarena.Handle, rank: int, seed: int, log: int) -> None:
    rng = random.Random(seed)
    retained: list[dict[str, Any]] = []
    async with aioarena.Receiver(handle, rank, private=rng.random() < 0.1) as chan:
        print("joined", flush=True)
        while True:
            try:
                if rng.random() < 0.1:  # a receive that gives up loses nothing
                    async with asyncio.timeout(rng.random() * 0.002):
                        message = await chan.recv()
                else:
                    message = await chan.recv()
            except TimeoutError:
                continue
            except aioarena.EndOfChannel:
                break
            os.write(log, message["id"].to_bytes(8, "little"))
            if message.get("leave") == rank:
                break
            verify(message, "on arrival")
            if rng.random() < 0.2:
                retained.append(message)
            while retained and (len(retained) > RETAIN_MOST or rng.random() < 0.1):
                verify(retained.pop(rng.randrange(len(retained))), "after retaining")
            del message
    for message in retained:
        verify(message, "after the channel closed")


def main() -> None:
    handle_file, rank, seed, log_file = sys.argv[1:]
    torch.set_num_threads(1)
    handle = pickle.loads(Path(handle_file).read_bytes())
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if int(seed) % 2:
        import uvloop

        uvloop.run(read(handle, int(rank), int(seed), log))
    else:
        asyncio.run(read(handle, int(rank), int(seed), log))


if __name__ == "__main__":
    main()

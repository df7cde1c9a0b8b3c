"""The server in examples/async_engine, as its users see it: over HTTP, with real workers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.multiprocess.harness import PATIENCE

ROOT = Path(__file__).parents[1]
ENDLESS = 1_000_000  # tokens that no test waits for

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(6 * PATIENCE)]


class Server:
    """A server process with its workers.

    Attributes:
        client: For plain requests.
        url: Where it is.
    """

    def __init__(self, workers: int, tmpdir: str) -> None:
        # PYTHONPATH, so that it is this source tree that it imports.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": tmpdir}
        self._process = subprocess.Popen(
            [sys.executable, ROOT / "examples/async_engine/server.py", "--workers", str(workers), "--port", "0"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._tmpdir = Path(tmpdir)
        self.url = ""

    def wait_ready(self) -> None:
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.url = found[0]
                self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)
                return
        raise AssertionError(f"the server did not start:\n{''.join(lines)}")

    def health(self, status: int = 200) -> dict[str, Any]:
        response = self.client.get("/health")
        assert response.status_code == status
        health: dict[str, Any] = response.json()
        return health

    def wait_for_requests(self, count: int) -> None:
        """Ask until it has so many."""
        while self.health()["requests"] != count:
            pass  # each look takes its turn in the server

    def stop(self) -> str:
        """SIGTERM; it ends in good order, with its workers and files: what it logged."""
        pids = self.client.get("/health").json()["workers"]
        workers = [os.pidfd_open(pid) for pid in pids if Path(f"/proc/{pid}").exists()]
        self.client.close()
        self._process.send_signal(signal.SIGTERM)
        _, log = self._process.communicate(timeout=PATIENCE)
        assert self._process.returncode == 0, log
        for pidfd in workers:
            assert select.select([pidfd], [], [], 0)[0], "a worker is left"
            os.close(pidfd)
        assert not [*self._tmpdir.glob("async-engine-*"), *self._tmpdir.glob("aioarena-*/*")]
        return log

    def kill(self) -> None:
        """Whatever the state."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()


@contextlib.contextmanager
def serve(*workers: int) -> Iterator[list[Server]]:
    """Servers with these numbers of workers; they log no error unless they are stopped before."""
    with tempfile.TemporaryDirectory(prefix="a-", dir="/tmp") as tmpdir:  # short, as socket paths have to be
        servers = [Server(count, tmpdir) for count in workers]
        try:
            for server in servers:
                server.wait_ready()
            yield servers
            for server in servers:
                if server._process.returncode is None:
                    log = server.stop()
                    assert "ERROR" not in log and "Traceback" not in log, log
        finally:
            for server in servers:
                server.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One with two workers, for the tests that leave it as it is."""
    with serve(2) as (server,):
        yield server


def picture(seed: int, height: int = 64, width: int = 96) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).random((3, height, width), np.float32)
    return {"height": height, "width": width, "data": base64.b64encode(pixels).decode()}


def new_client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, trust_env=False)


async def generate(client: httpx.AsyncClient, **request: Any) -> list[dict[str, Any]]:
    """All lines of an answer."""
    response = await client.post("/generate", json=request)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


# Six that only read, three that look; one picture of 12 MB.
REQUESTS: list[dict[str, Any]] = [
    *[{"prompt": f"Tell me {n} things" * (n + 1), "max_tokens": 10 + 3 * n} for n in range(6)],
    {"prompt": "What is this?", "image": picture(1), "max_tokens": 12},
    {"prompt": "What is this?", "image": picture(2), "max_tokens": 12},
    {"prompt": "What is this?", "image": picture(3, 1024, 1024), "max_tokens": 12},
]


def test_the_same_tokens_alone_and_in_company_whatever_the_number_of_workers(server: Server) -> None:
    """One worker answers one request after the other, two workers all at the same time."""

    async def alone(server: Server) -> list[Any]:
        async with new_client(server) as client:
            return [await generate(client, **request) for request in REQUESTS]

    async def together(server: Server) -> list[Any]:
        async with new_client(server) as client:
            return list(await asyncio.gather(*[generate(client, **request) for request in REQUESTS]))

    with serve(1) as (single,):
        answers = asyncio.run(alone(single))
    for request, answer in zip(REQUESTS, answers, strict=True):
        assert [set(line) for line in answer[:-1]] == [{"token", "text"}] * (len(answer) - 1)
        assert answer[-1]["finished"] == ("length" if len(answer) > request["max_tokens"] else "end")
    seen = [str(answer) for answer in answers[-3:]]
    assert len(set(seen)) == 3, "it does not look at the pictures"
    for _ in range(2):
        assert asyncio.run(together(server)) == answers


def test_a_client_that_goes_away(server: Server) -> None:
    """Its request is aborted; one that runs beside it goes on."""

    async def leave() -> tuple[list[Any], list[Any]]:
        async with new_client(server) as client:
            expected = await generate(client, prompt="I stay", max_tokens=60)
            staying = asyncio.create_task(generate(client, prompt="I stay", max_tokens=60))
            async with client.stream("POST", "/generate", json={"prompt": "I go", "max_tokens": ENDLESS}) as response:
                lines = response.aiter_lines()
                for _ in range(3):
                    assert "token" in json.loads(await anext(lines))
            return await staying, expected

    got, expected = asyncio.run(leave())
    assert got == expected
    server.wait_for_requests(0)


def test_a_client_that_goes_away_while_its_picture_is_looked_at(server: Server) -> None:
    async def leave() -> None:
        async with new_client(server) as client:
            request = {"prompt": "?", "max_tokens": ENDLESS, "image": picture(4, 1024, 1024)}
            early = asyncio.create_task(client.post("/generate", json=request))
            await asyncio.to_thread(server.wait_for_requests, 1)
            early.cancel()
            await asyncio.wait([early])

    asyncio.run(leave())
    server.wait_for_requests(0)


def test_wrong_requests(server: Server) -> None:
    """They are told so, and do no harm."""
    post = server.client.post
    for body in (b"{", b"[]", b'{"prompt": 5}', b'{"max_tokens": 3}', b'{"prompt": "x", "max_tokens": 1e999}'):
        assert post("/generate", content=body).status_code == 400
    for request in (
        {"prompt": ""},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x" * 4097},  # one that takes all memory would be the end of everybody's
        {"prompt": "x" * 4093, "image": picture(1, 32, 128)},
        {"prompt": "x", "image": picture(1, 64, 65)},
        {"prompt": "x", "image": {**picture(1), "height": 32}},
        {"prompt": "x", "image": {"height": 32, "width": 32, "data": "?"}},
    ):
        response = post("/generate", json=request)
        assert response.status_code == 400, request
        assert response.json()["error"]
    assert post("/elsewhere").status_code == 404
    server.wait_for_requests(0)


def test_a_worker_that_dies() -> None:
    """Streams end with an error that names it, later requests get 503, and the server still ends in good order."""
    with serve(2) as (server,):
        victim = server.health()["workers"][1]

        async def watch() -> list[dict[str, Any]]:
            async with new_client(server) as client:
                request = {"prompt": "Go on", "max_tokens": ENDLESS}
                async with client.stream("POST", "/generate", json=request) as response:
                    lines = []
                    async for line in response.aiter_lines():
                        if not lines:
                            os.kill(victim, signal.SIGKILL)
                        lines.append(json.loads(line))
                    return lines

        lines = asyncio.run(watch())
        assert all("token" in line for line in lines[:-1])
        assert f"worker 1 (pid {victim})" in lines[-1]["error"]
        assert "was killed by SIGKILL" in lines[-1]["error"]
        health = server.health(503)
        assert health["status"] == "dead"
        for image in (None, picture(1)):
            refused = server.client.post("/generate", json={"prompt": "More", "image": image})
            assert refused.status_code == 503
            assert "was killed by SIGKILL" in refused.json()["error"]
        server.stop()

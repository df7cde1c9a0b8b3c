"""Scripts of processes that hold an end of a channel, fork, and look at what their child did to it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import aioarena
from aioarena._platform import memory
from tests.multiprocess.harness import Link, open_loop, run_coroutine
from tests.multiprocess.messages import message, verify


def in_child(action: Callable[[], Any]) -> Any:
    """Run something in a raw forked child that ends without exit handlers: what it returned, or its error as text."""
    outlet, inlet = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = action()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(inlet, pickle.dumps(answer))
        os._exit(0)
    os.close(inlet)
    with os.fdopen(outlet, "rb") as answers:
        answer = answers.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return pickle.loads(answer) if answer and status == 0 else f"the child ended with {status}"


def exit_in_child(drop: Callable[[], Any]) -> int | None:
    """Fork a child that drops what it inherited and ends through ``sys.exit``: its exit code. None in the child."""
    pid = os.fork()
    if pid == 0:
        drop()
        return None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _leave_loop_alone(loop: asyncio.AbstractEventLoop) -> None:
    # A loop that dies in a child takes descriptors out of the epoll it shares with its parent: asyncio's own trouble.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(loop))


def _errors(calls: dict[str, Callable[[], Any]], loop_kind: str) -> dict[str, str]:
    """What each call raises, on a loop of the child's own."""

    async def call(function: Callable[[], Any]) -> Any:
        outcome = function()
        if asyncio.iscoroutine(outcome):
            async with asyncio.timeout(5):
                outcome = await outcome
        return outcome

    errors = {}
    for name, function in calls.items():
        try:
            errors[name] = f"returned {run_coroutine(call(function), loop_kind)!r}"
        except aioarena.ArenaError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def forking_reader(link: Link, handle: aioarena.Handle, loop_kind: str) -> Any:
    """Hold three messages at rank 0, and fork as told. Returns when told, after which messages still arrive."""
    loop = open_loop(loop_kind)
    chan = aioarena.Receiver(handle, 0)
    loop.run_until_complete(chan.start())
    link.put("joined")
    held = [loop.run_until_complete(chan.recv()) for _ in range(3)]

    def drop() -> None:
        nonlocal chan
        held.clear()
        del chan
        gc.collect()

    async def fork_in_the_loop() -> Any:
        def use() -> Any:
            with_running_loop: Any = chan.recv()
            try:
                with_running_loop.send(None)
            except aioarena.ArenaError as error:
                return type(error).__name__

        return in_child(use)

    link.put("holding")
    while (command := link.get()) != "done":
        match command:
            case "drop":
                link.put(in_child(drop))
            case "sys.exit":
                _leave_loop_alone(loop)
                code = exit_in_child(drop)
                if code is None:
                    sys.exit()
                link.put(code)
            case "multiprocessing":
                process = multiprocessing.get_context("fork").Process(target=drop)
                process.start()
                process.join()
                link.put(process.exitcode)
                process.close()
            case "use":
                calls: dict[str, Callable[[], Any]] = {
                    "recv": chan.recv,
                    "recv_nowait": chan.recv_nowait,
                    "start": chan.start,
                    "aclose": chan.aclose,
                    "async for": lambda: anext(aiter(chan)),
                }
                link.put(in_child(partial(_errors, calls, loop_kind)))
            case "use in the loop":
                link.put(loop.run_until_complete(fork_in_the_loop()))
            case "attach":
                link.put(in_child(lambda: run_coroutine(_attach_and_receive(link, handle, 1), loop_kind)))
            case "look":
                link.put(in_child(lambda: [verify(one) for one in held]))
    numbers = [verify(one) for one in held]
    held.clear()
    numbers.append(verify(loop.run_until_complete(chan.recv())))
    loop.run_until_complete(chan.aclose())
    loop.close()
    return numbers


async def _attach_and_receive(link: Link, handle: aioarena.Handle, rank: int) -> int:
    async with aioarena.Receiver(handle, rank) as chan:
        link.put("joined")
        return verify(await chan.recv())


def forking_sender(link: Link, loop_kind: str, **options: Any) -> Any:
    """Send a message, fork as told, and send another at the end."""
    loop = open_loop(loop_kind)
    chan = aioarena.Sender(1, **options)
    loop.run_until_complete(chan.start())
    link.put(chan.handle)
    if link.get() == "send":
        loop.run_until_complete(chan.send(message("arena", 0)))

    def drop() -> None:
        nonlocal chan
        del chan
        gc.collect()

    link.put("open")
    while (command := link.get()) != "done":
        match command:
            case "drop":
                link.put(in_child(drop))
            case "sys.exit":
                _leave_loop_alone(loop)
                code = exit_in_child(drop)
                if code is None:
                    sys.exit()
                link.put(code)
            case "use":
                calls = {
                    "send": lambda: chan.send("hello"),
                    "send_nowait": lambda: chan.send_nowait("hello"),
                    "wait_ready": chan.wait_ready,
                    "start": chan.start,
                    "aclose": chan.aclose,
                }
                link.put(in_child(partial(_errors, calls, loop_kind)))
            case "another channel":
                link.put(in_child(lambda: run_coroutine(_send_to_itself(options), loop_kind)))
    loop.run_until_complete(chan.send(message("mixed", 1)))
    loop.run_until_complete(chan.aclose())
    loop.close()
    return "closed"


async def _send_to_itself(options: dict[str, Any]) -> int:
    async with aioarena.Sender(1, **options) as chan, aioarena.Receiver(chan.handle, 0) as reader:
        await chan.send(message("mixed", 5))
        return verify(await reader.recv())


def fork_before_the_start(link: Link, loop_kind: str, **options: Any) -> Any:
    """Fork with ends that were made and not started: what the child can do with them, and then the parent."""
    sender = aioarena.Sender(1, **options)
    receiver = aioarena.Receiver(sender.handle, 0)

    async def receive() -> int:
        async with receiver:
            return verify(await receiver.recv())

    async def send() -> str:
        async with sender:
            await sender.send(message("arena", 3))
        return "sent"

    refused = in_child(lambda: _errors({"start": sender.start, "aclose": sender.aclose}, loop_kind))
    outlet, inlet = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(inlet, pickle.dumps(run_coroutine(receive(), loop_kind)))
        os._exit(0)
    os.close(inlet)
    sent = run_coroutine(send(), loop_kind)
    with os.fdopen(outlet, "rb") as answers:
        received = pickle.loads(answers.read())
    os.waitpid(pid, 0)
    return refused, sent, received


def fork_while_a_thread_attaches(link: Link, handle: aioarena.Handle, loop_kind: str) -> int:
    """Fork while another thread is in the middle of attaching: what a child receives that attaches by itself."""
    held, forked = threading.Event(), threading.Event()

    def attach() -> None:
        with memory._attach_lock:
            held.set()
            forked.wait()

    thread = threading.Thread(target=attach)
    thread.start()
    held.wait()
    outlet, inlet = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(inlet, pickle.dumps(run_coroutine(_attach_and_receive(link, handle, 0), loop_kind)))
        os._exit(0)
    forked.set()
    thread.join()
    os.close(inlet)
    with os.fdopen(outlet, "rb") as answers:
        received = pickle.loads(answers.read())
    os.waitpid(pid, 0)
    return received

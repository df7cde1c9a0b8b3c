"""Received memory: it never changes under its holder, and is free again when, and only when, the last user is gone."""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import pickle
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack

from aioarena import ArenaConfig
from tests.conftest import PATIENCE, Channel, LoopFactory, OpenChannel
from tests.fronts.support import filled, in_arena, no_collector, parked, shows, turns, until

TWO_SLOTS = ArenaConfig(slots=2, slot_bytes=1 << 20, min_bytes=16 << 10)
COUNT = (1 << 20) // 4  # float32 elements that fill a slot


def floats(value: float) -> torch.Tensor:
    return torch.full((COUNT,), float(value))


# Every form of holding a storage --------------------------------------------------------------------------------------


class SavedForBackward:
    """An autograd graph that saved the tensor; looking at it runs the graph backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.weight = torch.zeros(COUNT, requires_grad=True)
        self.loss = (self.weight * tensor).sum()

    def look(self) -> torch.Tensor:
        self.weight.grad = None
        self.loss.backward(retain_graph=True)
        assert self.weight.grad is not None
        return self.weight.grad


class Capsule:
    """A DLPack capsule that nobody has consumed. Looking at it consumes it and makes the next."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.capsule = torch.utils.dlpack.to_dlpack(tensor)

    def look(self) -> torch.Tensor:
        tensor = torch.utils.dlpack.from_dlpack(self.capsule)
        self.capsule = torch.utils.dlpack.to_dlpack(tensor)
        return tensor


def fail(tensor: torch.Tensor) -> None:
    raise ValueError


def failed(tensor: torch.Tensor) -> ValueError:
    """An exception whose traceback has the tensor in its frames."""
    try:
        fail(tensor)
    except ValueError as error:
        return error
    raise AssertionError


def look_in_traceback(error: ValueError) -> torch.Tensor:
    assert error.__traceback__ is not None and error.__traceback__.tb_next is not None
    tensor: torch.Tensor = error.__traceback__.tb_next.tb_frame.f_locals["tensor"]
    return tensor


def set_into_another(tensor: torch.Tensor) -> torch.Tensor:
    other = torch.empty(0)
    other.set_(tensor.untyped_storage(), 0, tensor.shape)
    return other


def in_inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor[3:]


def typed_storage(tensor: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return tensor.storage()


def look_typed_storage(storage: Any) -> torch.Tensor:
    return torch.empty(0).set_(storage.untyped(), 0, (COUNT,))


def module_with(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("buffer", tensor)
    return module


Form = tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]


def as_it_is(kept: Any) -> Any:
    return kept


FORMS: dict[str, Form] = {
    "the tensor": (lambda t: t, as_it_is),
    "slice": (lambda t: t[1000:2000], as_it_is),
    "one element": (lambda t: t[77], as_it_is),
    "last element": (lambda t: t[-1:], as_it_is),
    "empty slice and a full one": (lambda t: (t[:0], t[5:]), lambda kept: kept[1]),
    "detach": (lambda t: t.detach(), as_it_is),
    "data": (lambda t: t.data, as_it_is),
    "alias": (lambda t: torch.ops.aten.alias(t), as_it_is),
    "dtype view": (lambda t: t.view(torch.int32), lambda kept: kept.view(torch.float32)),
    "byte view": (lambda t: t.view(torch.uint8)[8:16], lambda kept: kept.clone().view(torch.float32)),
    "shape view": (lambda t: t.view(4, -1).T, as_it_is),
    "expand": (lambda t: t[:1].expand(1000), as_it_is),
    "unfold": (lambda t: t.unfold(0, 4, 4), as_it_is),
    "chunk": (lambda t: t.chunk(3)[1], as_it_is),
    "complex view": (lambda t: torch.view_as_complex(t.view(-1, 2)), lambda kept: torch.view_as_real(kept)),
    "as_strided": (lambda t: t.as_strided((10, 10), (1000, 7), 500), as_it_is),
    "set_ into another": (set_into_another, as_it_is),
    "parameter": (lambda t: torch.nn.Parameter(t), lambda kept: kept.data),
    "slice of a parameter": (lambda t: torch.nn.Parameter(t)[5:], lambda kept: kept.detach()),
    "subclass": (lambda t: t.as_subclass(torch.nn.Buffer), as_it_is),
    "module": (module_with, lambda kept: kept.buffer),
    "inference-mode view": (in_inference, as_it_is),
    "autograd graph": (SavedForBackward, lambda kept: kept.look()),
    "untyped storage": (lambda t: t.untyped_storage(), lambda kept: torch.empty(0).set_(kept, 0, (COUNT,))),
    "typed storage": (typed_storage, look_typed_storage),
    "numpy": (lambda t: t.numpy(), as_it_is),
    "numpy of a slice": (lambda t: t[500:900].numpy(), as_it_is),
    "slice of numpy": (lambda t: t.numpy()[::3], as_it_is),
    "numpy, back in torch": (lambda t: torch.from_numpy(t.numpy()[7:]), as_it_is),
    "array interface": (lambda t: np.asarray(t), as_it_is),
    "memoryview": (lambda t: memoryview(t.numpy()), np.asarray),
    "slice of a memoryview": (lambda t: memoryview(t.numpy())[10:20], np.asarray),
    "cast memoryview": (lambda t: memoryview(t.numpy()).cast("B"), lambda kept: np.frombuffer(kept, np.float32)),
    "pickle buffer": (lambda t: pickle.PickleBuffer(t.numpy()), lambda kept: np.frombuffer(kept, np.float32)),
    "dlpack to torch": (lambda t: torch.from_dlpack(t), as_it_is),
    "dlpack to numpy": (lambda t: np.from_dlpack(t), as_it_is),
    "dlpack capsule": (Capsule, lambda kept: kept.look()),
    "ctypes": (lambda t: np.ctypeslib.as_ctypes(t.numpy()), np.ctypeslib.as_array),
    "closure": (lambda t: lambda: t, lambda kept: kept()),
    "generator": (lambda t: (part for part in [t]), lambda kept: kept.gi_frame.f_locals[".0"].__reduce__()[1][0][0]),
    "traceback": (failed, look_in_traceback),
}


async def receive_only(channel: Channel, value: float, form: Callable[[Any], Any]) -> Any:
    """Receive a tensor and keep nothing but one form of it."""
    await channel.sender.send(floats(value))
    received = await channel.receiver.recv()
    assert in_arena(channel.receiver, received)
    return form(received)


async def send_others(channel: Channel) -> None:
    """Fill whatever slot is free with other values, six times."""
    for number in range(6):
        await channel.sender.send(floats(100 + number))
        await channel.receiver.recv()


@pytest.mark.parametrize("name", FORMS)
async def test_every_form_of_holding_a_tensor(open_channel: OpenChannel, name: str) -> None:
    """It shows what was received for as long as it is there; then the slot is free, without the collector."""
    form, look = FORMS[name]
    async with open_channel(arena=TWO_SLOTS) as channel:
        with no_collector():
            kept = await receive_only(channel, 7, form)
            await send_others(channel)
            assert (np.asarray(look(kept)) == 7).all()
            assert channel.slots_used == 1
            assert channel.receiver.statistics().spans_held == 1
            del kept
            assert channel.slots_used == 0
            assert channel.receiver.statistics().spans_held == 0


ARRAY_FORMS: dict[str, Form] = {
    "the array": (lambda a: a, as_it_is),
    "slice": (lambda a: a[5:100:3], as_it_is),
    "view": (lambda a: a.view(np.int32), lambda kept: kept.view(np.float32)),
    "transposed": (lambda a: a.reshape(4, -1).T, as_it_is),
    "torch": (lambda a: torch.from_numpy(a)[4:], as_it_is),
    "memoryview": (lambda a: memoryview(a), np.asarray),
    "flat": (lambda a: a.flat, lambda kept: kept.base),
}


@pytest.mark.parametrize("name", ARRAY_FORMS)
async def test_every_form_of_holding_an_array(open_channel: OpenChannel, name: str) -> None:
    form, look = ARRAY_FORMS[name]
    async with open_channel(arena=TWO_SLOTS) as channel:
        with no_collector():
            await channel.sender.send(floats(7).numpy())
            kept = form(await channel.receiver.recv())
            await send_others(channel)
            assert (np.asarray(look(kept)) == 7).all()
            assert channel.slots_used == 1
            del kept
            assert channel.slots_used == 0


BUFFER_FORMS: dict[str, Form] = {
    "the memory": (lambda b: b, np.asarray),
    "slice": (lambda b: b[100:200], np.asarray),
    "cast": (lambda b: b.cast("f"), lambda kept: np.asarray(kept).view(np.uint8)),
    "array": (lambda b: np.frombuffer(b, np.uint8), as_it_is),
    "tensor": (lambda b: torch.frombuffer(b, dtype=torch.uint8)[3:], as_it_is),
}


@pytest.mark.parametrize("name", BUFFER_FORMS)
async def test_every_form_of_holding_a_buffer(open_channel: OpenChannel, name: str) -> None:
    form, look = BUFFER_FORMS[name]
    async with open_channel(arena=TWO_SLOTS) as channel:
        with no_collector():
            await channel.sender.send(pickle.PickleBuffer(np.full(1 << 20, 7, np.uint8)))
            kept = form(await channel.receiver.recv())
            await send_others(channel)
            assert (np.asarray(look(kept)) == 7).all()
            assert channel.slots_used == 1
            del kept
            assert channel.slots_used == 0


async def test_a_cycle_is_free_after_one_collection(open_channel: OpenChannel) -> None:
    async with open_channel(arena=TWO_SLOTS) as channel:
        with no_collector():
            cycle: list[Any] = [await receive_only(channel, 7, as_it_is)]
            cycle.append(cycle)
            cycle[0].myself = cycle[0]
            await send_others(channel)
            assert shows(cycle[0], 7)
            del cycle
            assert channel.slots_used == 1
            gc.collect()
            assert channel.slots_used == 0


async def test_a_weak_reference_holds_nothing(open_channel: OpenChannel) -> None:
    async with open_channel(arena=TWO_SLOTS) as channel:
        with no_collector():
            reference = await receive_only(channel, 7, weakref.ref)
            assert channel.slots_used == 0
            assert reference() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.share_memory_(),
        lambda t: t.set_(torch.full((COUNT,), 7.0).untyped_storage(), 0, (COUNT,)),
        lambda t: setattr(t, "data", torch.full((COUNT,), 7.0)),
    ],
    ids=["share_memory_", "set_", "data"],
)
async def test_a_tensor_that_was_given_other_memory_holds_no_slot(
    open_channel: OpenChannel, change: Callable[[torch.Tensor], object]
) -> None:
    async with open_channel(arena=TWO_SLOTS) as channel:
        with no_collector():
            await channel.sender.send(floats(7))
            tensor = await channel.receiver.recv()
            change(tensor)
            assert channel.slots_used == 0
            await send_others(channel)
            assert shows(tensor, 7)


async def test_a_received_tensor_refuses_to_grow(open_channel: OpenChannel) -> None:
    """Rather than write past its slot."""
    async with open_channel() as channel:
        await channel.sender.send(floats(7))
        tensor = await channel.receiver.recv()
        same = tensor[:]
        with pytest.raises(RuntimeError, match="resizable"):
            tensor.resize_(2 * COUNT)
        assert shows(same, 7)


async def test_each_buffer_of_a_message_is_free_by_itself(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        with no_collector():
            await channel.sender.send([floats(1), floats(2), floats(3).numpy()])
            first, second, third = await channel.receiver.recv()
            assert channel.slots_used == 3
            del second
            assert channel.slots_used == 2
            await channel.sender.send(floats(4))
            fourth = await channel.receiver.recv()
            assert shows(first, 1)
            assert (third == 3).all()
            assert shows(fourth, 4)
            del first, third, fourth
            assert channel.slots_used == 0


async def test_a_slot_is_free_once_the_last_reader_let_go(open_channel: OpenChannel) -> None:
    async with open_channel(3, arena=TWO_SLOTS) as channel:
        with no_collector():
            await channel.sender.send(floats(7))
            held = [await receiver.recv() for receiver in channel.receivers]
            while held:
                assert channel.slots_used == 1
                held.pop()
            assert channel.slots_used == 0


@pytest.mark.parametrize("size", [100, 64 << 10])
async def test_what_is_kept_for_a_thousand_messages_never_changes(open_channel: OpenChannel, size: int) -> None:
    arena = ArenaConfig(slots=8, slot_bytes=64 << 10, min_bytes=16 << 10)
    async with open_channel(arena=arena) as channel:
        for value in (1, 2, 3):
            await channel.sender.send(filled(value, size))
        tensor = await channel.receiver.recv()
        part = (await channel.receiver.recv())[10:50]
        parameter = torch.nn.Parameter((await channel.receiver.recv()).view(torch.float32))
        before = parameter.detach().clone()
        held = channel.slots_used
        for number in range(1000):
            await channel.sender.send(filled(number % 200 + 10, size))
            assert shows(await channel.receiver.recv(), number % 200 + 10)
        assert channel.slots_used == held
        assert shows(tensor, 1)
        assert shows(part, 2)
        assert torch.equal(parameter, before)
        assert channel.sender.statistics().frame_bytes == 0
        del tensor, part, parameter
        assert channel.slots_used == 0


# A reader that hoards -------------------------------------------------------------------------------------------------


async def test_a_hoarder_holds_nobody_up(open_channel: OpenChannel) -> None:
    """What finds no slot comes as a frame, in order; and without a copy again once the hoard is gone."""
    async with open_channel(2) as channel, asyncio.timeout(PATIENCE):
        hoarder, other = channel.receivers
        hoard = []
        for number in range(20):
            await channel.sender.send((number, filled(number)))
            hoard.append(await hoarder.recv())
            got, tensor = await other.recv()
            assert got == number
            assert shows(tensor, number)
            del tensor
        assert [number for number, _ in hoard] == list(range(20))
        assert [number for number, tensor in hoard if in_arena(hoarder, tensor)] == [0, 1, 2, 3]
        assert all(shows(tensor, number) for number, tensor in hoard)
        assert channel.sender.statistics().fallbacks["arena_full"] == 16
        hoard.clear()
        await channel.sender.send(filled(99))
        assert in_arena(hoarder, await hoarder.recv())
        assert in_arena(other, await other.recv())
        assert channel.sender.statistics().fallbacks["arena_full"] == 16


async def test_a_message_with_more_tensors_than_slots_passes(open_channel: OpenChannel) -> None:
    async with open_channel(2) as channel, asyncio.timeout(PATIENCE):
        await channel.sender.send([filled(number) for number in range(6)])
        for receiver in channel.receivers:
            message = await receiver.recv()
            assert [in_arena(receiver, tensor) for tensor in message] == [True] * 4 + [False] * 2
            assert all(shows(tensor, number) for number, tensor in enumerate(message))


async def test_a_free_slot_between_held_ones_is_used(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        held = []
        for number in range(4):
            await channel.sender.send(filled(number))
            held.append(await channel.receiver.recv())
        del held[1]
        await channel.sender.send(filled(9))
        await channel.sender.send(filled(8))
        ninth, eighth = await channel.receiver.recv(), await channel.receiver.recv()
        assert in_arena(channel.receiver, ninth)
        assert not in_arena(channel.receiver, eighth)
        assert [int(tensor[0]) for tensor in (*held, ninth, eighth)] == [0, 2, 3, 9, 8]


async def test_free_slots_are_found_behind_many_that_are_held(open_channel: OpenChannel) -> None:
    arena = ArenaConfig(slots=100, slot_bytes=4096, min_bytes=1000)
    async with open_channel(arena=arena) as channel:
        held = []
        for number in range(100):
            await channel.sender.send(filled(number, 4096))
            held.append(await channel.receiver.recv())
        del held[90:]
        await channel.sender.send(filled(200, 4096))
        assert in_arena(channel.receiver, await channel.receiver.recv())
        assert all(shows(tensor, number) for number, tensor in enumerate(held))


# Finalizers, wherever they run ----------------------------------------------------------------------------------------


async def test_dropping_in_a_foreign_thread_frees_the_slot(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        with no_collector():
            box = [await receive_only(channel, 7, as_it_is)]
            thread = threading.Thread(target=box.clear)
            thread.start()
            thread.join()
            assert channel.slots_used == 0
            assert channel.receiver.statistics().spans_held == 0


async def test_dropping_inside_of_the_collector_at_any_time(open_channel: OpenChannel) -> None:
    """Collections at every few allocations, on this thread and another: no deadlock, and no slot is lost."""
    thresholds = gc.get_threshold()
    stop = threading.Event()

    def make_cycles() -> None:
        while not stop.is_set():
            for _ in range(100):
                cycle: list[Any] = []
                cycle.append(cycle)

    churning = threading.Thread(target=make_cycles)
    arena = ArenaConfig(slots=16, slot_bytes=64 << 10, min_bytes=16 << 10)
    async with open_channel(2, arena=arena) as channel, asyncio.timeout(PATIENCE):
        gc.set_threshold(3, 2, 2)
        churning.start()
        try:
            for number in range(60):
                await channel.sender.send({"n": number, "t": filled(number, 40_000), "u": filled(3, 40_000)})
                for receiver in channel.receivers:
                    message = await receiver.recv()
                    assert shows(message["t"], number)
                    message["itself"] = message
                    del message
        finally:
            gc.set_threshold(*thresholds)
            stop.set()
            churning.join()
        gc.collect()
        assert channel.slots_used == 0
        assert channel.sender.statistics().arena_bytes > 40_000 * 60


async def test_dropping_in_a_thread_while_the_loop_receives(open_channel: OpenChannel) -> None:
    """Each tensor dies in another thread than it was born in."""
    box: list[Any] = []
    stop = threading.Event()

    def drop() -> None:
        while not stop.is_set() or box:
            if box:
                box.pop()

    dropping = threading.Thread(target=drop)
    arena = ArenaConfig(slots=16, slot_bytes=64 << 10, min_bytes=16 << 10)
    async with open_channel(arena=arena) as channel, asyncio.timeout(PATIENCE):
        dropping.start()
        try:
            for number in range(300):
                await channel.sender.send(filled(number % 200, 40_000))
                tensor = await channel.receiver.recv()
                assert shows(tensor, number % 200)
                box.append(tensor)
                del tensor
        finally:
            stop.set()
            dropping.join()
        assert channel.slots_used == 0
        assert channel.receiver.statistics().spans_held == 0


@pytest.mark.parametrize("closed", ["receiver", "both", "loop"])
def test_dropping_after_close_is_safe(new_loop: LoopFactory, open_channel: OpenChannel, closed: str) -> None:
    """The tensor stays valid; its end troubles nobody, and the mapping goes with it."""

    async def receive() -> torch.Tensor:
        async with open_channel() as channel:
            await channel.sender.send(filled(7))
            tensor: torch.Tensor = await channel.receiver.recv()
            if closed == "receiver":
                await channel.receiver.aclose()
                assert shows(tensor, 7)
                assert channel.slots_used == 1
                del tensor
                assert channel.slots_used == 0
                return torch.full((10,), 7, dtype=torch.uint8)
            return tensor[5:]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        kept = runner.run(receive())
        if closed == "both":
            assert shows(kept, 7)
            del kept
            return
    gc.collect()
    assert shows(kept, 7)


# The library holds nothing --------------------------------------------------------------------------------------------


class Traced:
    """Something to refer to weakly."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("size", [100, 1 << 20, 5 << 20], ids=["ring", "arena", "frame"])
@pytest.mark.parametrize("then", ["nothing", "pending", "timeout", "cancelled", "closed", "error"])
async def test_nothing_is_held_of_a_received_message(open_channel: OpenChannel, size: int, then: str) -> None:
    """Whatever the receiver is doing next."""
    async with open_channel() as channel:
        receiver = channel.receiver
        with no_collector():
            await channel.sender.send(Traced(filled(7, size)))
            message = await receiver.recv()
            references = [weakref.ref(message), weakref.ref(message.tensor)]
            pending: asyncio.Task[Any] | None = None
            if then == "pending":
                pending = asyncio.create_task(receiver.recv())
                await parked(receiver)
            elif then == "timeout":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.001):
                        await receiver.recv()
            elif then == "cancelled":
                task = asyncio.create_task(receiver.recv())
                await parked(receiver)
                task.cancel()
                await asyncio.wait([task])
            elif then == "closed":
                await receiver.aclose()
            elif then == "error":
                with pytest.raises(Exception, match="no message"):
                    receiver.recv_nowait()
            del message
            assert [reference() for reference in references] == [None, None]
            assert channel.slots_used == 0
            if pending is not None:
                await channel.sender.send("next")
                assert await pending == "next"


async def test_nothing_is_held_when_the_message_was_waited_for(open_channel: OpenChannel) -> None:
    """Neither by the future that woke the receiver."""
    async with open_channel() as channel:
        with no_collector():
            for size in (100, 1 << 20, 5 << 20):
                receiving = asyncio.create_task(channel.receiver.recv())
                await parked(channel.receiver)
                await channel.sender.send(Traced(filled(7, size)))
                reference = weakref.ref(await receiving)
                assert reference() is not None  # the task has it
                del receiving
                await turns(1)  # the loop still has what woke this task
                assert reference() is None
            assert channel.slots_used == 0


async def test_a_loop_holds_the_current_message_only(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        with no_collector():
            for number in range(4):
                await channel.sender.send(filled(number))
            seen = 0
            async for message in channel.receiver:
                assert channel.slots_used == 4 - seen
                seen += 1
                del message
                if seen == 4:
                    break
            assert channel.slots_used == 0


@pytest.mark.parametrize("size", [100, 100_000, 2 << 20, 5 << 20], ids=["ring", "arena", "threads", "frame"])
@pytest.mark.parametrize("outcome", ["sent", "cancelled", "refused"])
async def test_the_sender_holds_nothing_of_what_it_sent(open_channel: OpenChannel, size: int, outcome: str) -> None:
    async with open_channel() as channel:
        with no_collector():
            tensor = filled(7, size)
            reference = weakref.ref(tensor)
            if outcome == "sent":
                await channel.sender.send([tensor, tensor[::2]])
                await channel.receiver.recv()
            elif outcome == "cancelled":
                fillers = 0
                while not channel.sender.statistics().waits:
                    filling = asyncio.create_task(channel.sender.send(b"x" * 900))
                    await turns(2)  # sent, or waiting
                    fillers += 1
                task = asyncio.create_task(channel.sender.send([tensor]))
                await turns(3)  # until it waits, too
                task.cancel()
                await asyncio.wait([task])
                del task
                for _ in range(fillers):
                    await channel.receiver.recv()
                await filling
                del filling
            else:
                with pytest.raises(TypeError):
                    await channel.sender.send([tensor, threading.Lock()])
            del tensor
            await until(lambda: reference() is None)  # pyzmq's thread lets go of frames a little later
            assert channel.slots_used == 0


# What was received is an ordinary object ------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda obj: pickle.loads(pickle.dumps(obj, 5)),
    "pickle 2": lambda obj: pickle.loads(pickle.dumps(obj, 2)),
    "deepcopy": copy.deepcopy,
    "clone": lambda obj: [part.clone() if isinstance(part, torch.Tensor) else part.copy() for part in obj],
    "torch.save": lambda obj: torch_saved(obj),
}


def torch_saved(obj: Any) -> Any:
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("size", [100, 1 << 20, 5 << 20], ids=["ring", "arena", "frame"])
async def test_copies_are_independent_of_slot_and_channel(open_channel: OpenChannel, name: str, size: int) -> None:
    async with open_channel() as channel:
        with no_collector():
            await channel.sender.send([filled(7, size), filled(8, size).numpy()])
            received = await channel.receiver.recv()
            tensor, array = COPIES[name](received)
            del received
            assert channel.slots_used == 0
            for number in range(6):
                await channel.sender.send(filled(number, size))
                await channel.receiver.recv()
    assert shows(tensor, 7)
    assert (array == 8).all()


@pytest.mark.parametrize("size", [100, 1 << 20, 5 << 20], ids=["ring", "arena", "frame"])
async def test_forwarding_on_another_channel(open_channel: OpenChannel, size: int) -> None:
    """One copy in the other arena, which outlives the first message."""
    async with open_channel() as first, open_channel(2) as second:
        with no_collector():
            await first.sender.send({"t": filled(7, size), "a": filled(8, size).numpy()})
            message = await first.receiver.recv()
            await second.sender.send(message)
            del message
            assert first.slots_used == 0
            for number in range(6):
                await first.sender.send(filled(number, size))
                await first.receiver.recv()
            for receiver in second.receivers:
                forwarded = await receiver.recv()
                assert shows(forwarded["t"], 7)
                assert (forwarded["a"] == 8).all()


async def test_sending_what_came_from_the_same_arena(open_channel: OpenChannel) -> None:
    """From slot to slot."""
    async with open_channel() as channel:
        await channel.sender.send(filled(7))
        for _ in range(10):
            message = await channel.receiver.recv()
            await channel.sender.send(message)
        message = await channel.receiver.recv()
        assert shows(message, 7)
        assert in_arena(channel.receiver, message)


async def test_one_object_sent_twice_is_two_messages(open_channel: OpenChannel) -> None:
    async with open_channel() as channel:
        obj = [filled(7), {"k": filled(8, 10)}]
        await channel.sender.send(obj)
        await channel.sender.send(obj)
        first, second = await channel.receiver.recv(), await channel.receiver.recv()
        first[0].zero_()
        first[1]["k"].zero_()
        assert shows(second[0], 7)
        assert shows(second[1]["k"], 8)


async def test_random_holding_and_dropping(open_channel: OpenChannel) -> None:
    """Two readers that keep tensors for random times; nothing held ever changes, and no slot is lost."""
    seed = 11
    pick = random.Random(seed)
    arena = ArenaConfig(slots=12, slot_bytes=64 << 10, min_bytes=16 << 10)
    async with open_channel(2, arena=arena) as channel:
        held: list[tuple[int, torch.Tensor]] = []
        for number in range(500):
            value = number % 251
            await channel.sender.send(filled(value, pick.choice([100, 30_000, 64 << 10, 150_000, 300_000])))
            for receiver in channel.receivers:
                tensor = await receiver.recv()
                if pick.random() < 0.5:
                    held.append((value, tensor[pick.randrange(50) :]))
                del tensor
            while held and pick.random() < 0.6:
                value, tensor = held.pop(pick.randrange(len(held)))
                assert shows(tensor, value), f"seed {seed}, message {number}"
                del tensor
        assert all(shows(tensor, value) for value, tensor in held), f"seed {seed}"
        assert channel.sender.statistics().fallbacks["arena_full"]
        held.clear()
        assert channel.slots_used == 0

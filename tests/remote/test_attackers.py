"""Whoever should not be there: the channel goes on for its readers, nobody else gets a byte in or out, and it is said."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pickle
import random
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq

from aioarena import HandleError, Receiver, Sender
from aioarena._core.layout import VERSION
from aioarena._platform.network import RemoteRef, parse_endpoint
from tests.conftest import ARENA, RING_BYTES
from tests.fronts.support import until
from tests.remote.proxy import Proxy
from tests.remote.support import (
    ACK,
    CURVE,
    JOIN,
    LEAVE,
    LOOPBACK,
    NULL,
    PLAIN,
    TOPIC,
    Evil,
    FakeSender,
    Impostor,
    listening,
    remote_of,
)
from tests.remote.test_channel import expect, message, remote_sender


@contextlib.asynccontextmanager
async def serving(remote_readers: int = 1, **options: object) -> AsyncIterator[tuple[Sender, Callable[[], object]]]:
    """A sender, and a call that sends something of every kind to a real reader at the lowest remote rank."""
    async with (
        remote_sender(0, remote_readers, on_reader_lost="continue", **options) as sender,
        Receiver(sender.handle, 0) as reader,
    ):
        sent = 0

        async def goes_on(count: int = 6) -> None:
            nonlocal sent
            reading = asyncio.create_task(expect(reader, sent, count))
            for number in range(sent, sent + count):
                await sender.send(message(number))
            await reading
            sent += count

        if remote_readers == 1:
            await goes_on()
        yield sender, goes_on
        await goes_on()


# Strangers --------------------------------------------------------------------------------------------------------


def other_client_keys(remote: RemoteRef) -> RemoteRef:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return dataclasses.replace(remote, public_key=public, secret_key=secret)


def other_server_key(remote: RemoteRef) -> RemoteRef:
    return dataclasses.replace(remote, server_key=zmq.curve_keypair()[0].decode())


def same_keys(remote: RemoteRef) -> RemoteRef:
    return remote


@pytest.mark.parametrize(
    ("mechanism", "keys"),
    [(CURVE, other_client_keys), (CURVE, other_server_key), (NULL, same_keys), (PLAIN, same_keys)],
    ids=["other client key", "other server key", "no keys", "a password"],
)
async def test_no_key_no_bytes(mechanism: str, keys: Callable[[RemoteRef], RemoteRef]) -> None:
    """Without both keys nobody gets past the handshake, whatever topic is asked for."""
    async with serving() as (sender, goes_on):
        with Impostor(keys(remote_of(sender.handle)), mechanism, sender._serving._links[0].member.incarnation) as stranger:
            stranger.leave()
            await stranger.until_broken()
            await goes_on()
            assert stranger.take() is None and not stranger.stood
        assert sender.statistics().readers[0].state == "joined"
        assert sender.statistics().foreign_messages == 0


async def test_strangers_are_told_of_and_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (sender, _):
        for _ in range(8):
            with Impostor(other_client_keys(remote_of(sender.handle))) as stranger:
                await stranger.until_broken()
        assert sender._serving.wire.strangers >= 8
        told = [text for text in caplog.messages if "connections whose keys are not those of its handle" in text]
        assert 1 <= len(told) < 6 and "refused 1 connections" in told[0]


# The start of ZMTP 3.1 (RFC 37): signature, version, mechanism, as no server, filler.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
LONG_COMMAND, LONG_MESSAGE = b"\x06", b"\x02"


@pytest.mark.parametrize(
    "garbage",
    [
        random.Random(1).randbytes(100_000),
        b"GET / HTTP/1.1\r\n\r\n" * 100,
        GREETING + random.Random(2).randbytes(1000),
        GREETING.replace(b"CURVE", b"NULL\0"),
        GREETING + LONG_COMMAND + struct.pack(">Q", 1 << 20),
        GREETING + LONG_COMMAND + struct.pack(">Q", 1 << 40),
        GREETING + LONG_MESSAGE + struct.pack(">Q", 1 << 40),
        GREETING + LONG_COMMAND + b"\xff" * 8,
    ],
    ids=["random", "HTTP", "after a greeting", "NULL", "1 MiB", "1 TiB", "1 TiB message", "more than that"],
)
async def test_garbage_ends_its_own_connection_only(garbage: bytes) -> None:
    """At once, and before memory is taken for what it says it will send."""
    async with serving() as (sender, goes_on):
        reader, writer = await asyncio.open_connection(*parse_endpoint(remote_of(sender.handle).endpoint))
        writer.write(garbage)
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
            assert len(answer) <= 64  # a greeting, as everybody gets
        await goes_on()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_half_open_connections_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers join and go on meanwhile."""
    monkeypatch.setattr("aioarena._platform.network._HANDSHAKE_SECONDS", 0.3)
    async with serving(2) as (sender, goes_on):
        address = parse_endpoint(remote_of(sender.handle).endpoint)
        ends = [await asyncio.open_connection(*address) for _ in range(50)]
        for number, (_, writer) in enumerate(ends):
            writer.write(GREETING[:number])
        async with Receiver(sender.handle, 1) as second:
            reading = asyncio.create_task(expect(second, 0, 6))
            await goes_on()
            await reading
        for reader, writer in ends:
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until the end
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


# Whoever takes the address ----------------------------------------------------------------------------------------


async def test_a_handle_of_a_closed_channel_at_the_port_of_another() -> None:
    old = remote_sender(0, 1)
    await old.aclose()
    async with remote_sender(0, 1, bind=remote_of(old.handle).endpoint) as sender:
        with pytest.raises(
            HandleError, match=r"does not accept this handle .* another channel, perhaps one that was closed"
        ):
            await Receiver(old.handle, 0).start()
        async with Receiver(sender.handle, 0) as reader:
            await sender.send(1)
            assert await reader.recv() == 1


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100, GREETING.replace(b"CURVE", b"NULL\0")]
)
async def test_a_handle_at_the_port_of_something_else(answer: bytes) -> None:
    """It is no sender of that channel, however it is not."""
    old = remote_sender(0, 1)
    await old.aclose()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        writer.close()

    host, port = parse_endpoint(remote_of(old.handle).endpoint)
    async with await asyncio.start_server(serve, host, port):
        with pytest.raises(HandleError, match="does not accept this handle"):
            await Receiver(old.handle, 0).start()


@pytest.mark.parametrize("keys", ["the sender's", "others", "none"])
async def test_a_fake_sender_has_nothing_unpickled(keys: str, tmp_path: Path) -> None:
    """Only whoever has the sender's own secret key could: that one is trusted, which shows that the attack works."""
    marker = tmp_path / "marker"
    real = remote_sender(0, 1)
    await real.aclose()
    pair = {
        "the sender's": (real._keys.server_public, real._keys.server_secret),
        "others": tuple(key.decode() for key in zmq.curve_keypair()),
        "none": None,
    }[keys]
    async with FakeSender(remote_of(real.handle).endpoint, pickle.dumps(Evil(marker)), pair):
        if keys == "the sender's":
            async with Receiver(real.handle, 0) as reader:
                await reader.recv()
            assert marker.exists()
        else:
            with pytest.raises(HandleError, match="does not accept this handle"):
                await Receiver(real.handle, 0).start()
            assert not marker.exists()


# In the middle ----------------------------------------------------------------------------------------------------


def flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def drop(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + data[start + 1 + chance.randrange(len(data) - start) :]


def repeat(data: bytes, _: random.Random) -> bytes:
    return data + data


def insert(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + chance.randbytes(20) + data[start:]


def swap(data: bytes, _: random.Random) -> bytes:
    half = len(data) // 2
    return data[half:] + data[:half]


@pytest.mark.parametrize("change", [flip, drop, repeat, insert, swap])
@pytest.mark.parametrize("down", [True, False], ids=["down", "up"])
async def test_what_is_changed_on_the_way_is_noticed(change: Callable[[bytes, random.Random], bytes], down: bool) -> None:
    """The connection ends, the next one goes on where the stream was whole, and no message is missing or wrong."""
    chance = random.Random(f"{change.__name__} {down}")
    async with (
        remote_sender(0, 1, remote_timeout=4.0) as sender,
        Proxy(sender.handle) as proxy,
        Receiver(proxy.handle, 0) as reader,
    ):
        changes = 0

        def meddle(data: bytes, downward: bool) -> bytes:
            nonlocal changes
            if downward is not down or len(data) < 2:
                return data
            proxy.meddle = lambda data, _: data
            changes += 1
            return change(data, chance)

        feed = reader._relay._feed
        met = 0  # the last connection that was meddled with
        reading = asyncio.create_task(expect(reader, 0, 40))
        for number in range(40):
            if number % 16 == 5:
                await until(lambda met=met: feed._session > met and feed._parser is not None)
                met = feed._session
                proxy.meddle = meddle
            await sender.send(message(number))
        await reading
        await until(lambda: feed._session > met)
        assert changes >= 2
        assert sender.statistics().readers[0].state == "joined"


@pytest.mark.parametrize("down", [True, False], ids=["down", "up"])
async def test_a_handshake_that_is_changed_is_made_again(down: bool) -> None:
    """In the greeting, and in each command after it."""
    async with remote_sender(0, 1) as sender, Proxy(sender.handle) as proxy:
        for piece in range(2):
            pieces = 0

            def meddle(data: bytes, downward: bool, piece: int = piece) -> bytes:
                nonlocal pieces
                pieces += downward is down
                if downward is not down or pieces != piece + 1:
                    return data
                return bytes(byte ^ 0x40 for byte in data)

            proxy.meddle = meddle
            async with Receiver(proxy.handle, 0) as reader:
                await sender.send(piece)
                assert await reader.recv() == piece
            assert pieces > piece


# Readers gone wrong -----------------------------------------------------------------------------------------------


async def refusal(impostor: Impostor) -> str:
    (text,) = await impostor.receive()
    assert text[:10] == TOPIC.pack(b"R", impostor.incarnation) + b"G"
    return text[18:].decode()


async def test_nonsense_is_ignored_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Of any length, with any first letter, in several parts."""
    chance = random.Random(3)
    async with serving() as (sender, goes_on):
        with Impostor(remote_of(sender.handle)) as impostor:
            await impostor.until_stood()
            count = 0
            for letter, size in ((b"J", JOIN.size), (b"A", ACK.size), (b"L", LEAVE.size)):
                for nbytes in range(size):
                    impostor.send(letter + chance.randbytes(max(0, nbytes - 1)))
                    count += 1
            for nbytes in (ACK.size + 1, 1000, 4000):
                impostor.send(b"A" + chance.randbytes(nbytes - 1))
                impostor.send(b"Z" + chance.randbytes(nbytes - 1))
                impostor.send(LEAVE.pack(b"L", 5), b"")
                impostor.send(b"", LEAVE.pack(b"L", 5))
                count += 4
            await until(lambda: sender.statistics().foreign_messages == count)
            await goes_on()
        told = [text for text in caplog.messages if "made no sense" in text]
        assert told and len(told) < 10


async def test_a_message_that_is_too_large_ends_its_connection() -> None:
    """Who has the keys may not make the sender take memory, either."""
    async with serving() as (sender, goes_on):
        with Impostor(remote_of(sender.handle)) as impostor:
            await impostor.until_stood()
            impostor.send(b"Z" * 8000)
            await impostor.until_broken()
            await goes_on()
        assert sender.statistics().foreign_messages == 0


@pytest.mark.parametrize(
    ("rank", "changes", "reason"),
    [
        (7, {}, "rank 7 is not for a remote reader: those have ranks 0 to 0"),
        (-2, {}, "rank -2 is not for a remote reader"),
        (1 << 62, {}, "is not for a remote reader"),
        (0, {}, "rank 0 is taken by reader 0"),
        (-1, {}, "rank 0 is taken by reader 0"),
        (0, {"version": VERSION + 1}, f"the sender speaks version {VERSION}, this reader {VERSION + 1}"),
        (0, {"received": 3}, "it has no seat any more"),
        (0, {"returning": True}, "it has no seat any more"),
        (-2, {"host": b"\xff\x1b[2J\n" * 100, "limit": (1 << 64) - 1, "pid": (1 << 32) - 1}, "rank -2 is not"),
    ],
)
async def test_joins_that_cannot_be(
    rank: int, changes: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(remote_timeout=2.0) as (sender, goes_on):
        with Impostor(remote_of(sender.handle)) as impostor:
            await impostor.until_stood()
            impostor.join(rank, **changes)
            assert reason in await refusal(impostor)
            await goes_on()
        assert any("refused a remote reader" in text and reason in text for text in caplog.messages)
        assert all(text.isprintable() for text in caplog.messages)


async def test_acknowledging_what_was_not_sent_changes_nothing() -> None:
    """Nor what is acknowledged for another connection, or for nobody."""
    async with serving(2) as (sender, goes_on):
        with Impostor(remote_of(sender.handle)) as impostor:
            await impostor.until_stood()
            impostor.join(1, limit=(1 << 64) - 1)
            await goes_on()
            link = sender._serving._links[1]
            await until(lambda: link.ahead.read == 6)
            for received in (7, 8, 1 << 40, (1 << 64) - 1):
                impostor.ack(received, limit=(1 << 64) - 1)
            impostor.ack(3, session=2)
            impostor.ack(3, incarnation=5)
            impostor.ack(1)
            await until(lambda: link.ahead.acknowledged)
            assert link.ahead.acknowledged == 1
            assert sender.statistics().readers[1].messages_behind == 5
            impostor.ack(0)
            impostor.ack(6)
            await until(lambda: sender.statistics().readers[1].messages_behind == 0)
            await until(lambda: sender.statistics().slots_used == 0)
            await goes_on()


async def test_a_reader_that_asks_for_nothing_is_sent_nothing() -> None:
    """It is behind like any that does not read."""
    async with serving(2) as (sender, goes_on):
        with Impostor(remote_of(sender.handle)) as impostor:
            await impostor.until_stood()
            impostor.join(1, limit=0)
            await goes_on()
            assert (await impostor.receive())[0][9:10] == b"W"
            assert impostor.take() is None
            assert sender.statistics().readers[1].messages_behind == 6


async def test_a_reader_that_joins_again_and_again() -> None:
    """Each time its stream begins where it says it is, in the middle of a message too."""
    async with serving(2) as (sender, goes_on):
        with Impostor(remote_of(sender.handle)) as impostor:
            await impostor.until_stood()
            impostor.join(1, limit=100)
            await goes_on()
            for session in range(2, 12):
                impostor.join(1, session=session, returning=True, limit=session * 10_000)
            link = sender._serving._links[1]
            await until(lambda: link._session == 11)
            await goes_on()
            impostor.leave()
            await until(lambda: sender.statistics().readers[1].state == "left")
            await until(lambda: sender.statistics().slots_used == 0)


async def test_leaving_for_others_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A number that nobody has; and what a reader says of itself is fit for a log."""
    async with serving(2) as (sender, goes_on):
        with Impostor(remote_of(sender.handle)) as impostor:
            await impostor.until_stood()
            for incarnation in (0, 1, (1 << 64) - 1):
                impostor.leave(incarnation=incarnation)
                impostor.send(b"\x00" + TOPIC.pack(b"R", incarnation))
            impostor.join(1)
            await goes_on()
            assert [reader.state for reader in sender.statistics().readers] == ["joined", "joined"]
            impostor.leave(b"bad\x1b[2J\nchannel 'x': all is well\xff")
            await until(lambda: sender.statistics().readers[1].state == "lost")
        assert any("gave up: bad" in text for text in caplog.messages)
        assert all(text.isprintable() for text in caplog.messages)


async def test_a_flood_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Others on the loop have their turns meanwhile, and the log does not fill."""
    async with serving() as (sender, goes_on):
        wire = sender._serving.wire
        drain, most = wire.drain, 0

        def measure() -> object:
            nonlocal most
            before = wire.foreign
            events = drain()
            most = max(most, wire.foreign - before)
            return events

        wire.drain = measure
        with Impostor(remote_of(sender.handle)) as impostor:
            await impostor.until_stood()
            for _ in range(20_000):
                impostor.send(b"Z")
            await goes_on()
            await until(lambda: sender.statistics().foreign_messages == 20_000)
        assert 0 < most <= 100
        assert sum("made no sense" in text for text in caplog.messages) < 20


# Sockets ----------------------------------------------------------------------------------------------------------


async def test_local_channels_listen_on_no_network() -> None:
    async with Sender(1, arena=ARENA, ring_bytes=RING_BYTES) as sender, Receiver(sender.handle, 0):
        assert list(listening()) == []


async def test_a_sender_listens_at_the_one_address_it_was_given() -> None:
    """From its making, so that the handle is true, until its end; a remote reader listens nowhere."""
    sender = remote_sender(0, 1)
    only = [(LOOPBACK, parse_endpoint(remote_of(sender.handle).endpoint)[1])]
    assert list(listening()) == only
    async with sender, Receiver(sender.handle, 0):
        assert list(listening()) == only
    assert list(listening()) == []

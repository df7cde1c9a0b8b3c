"""Addresses, handles and keys of remote readers."""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import gc
import json
import logging
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from aioarena import ArenaError, Handle, HandleError, Receiver, Relay, Sender, SenderLostError
from aioarena._core.layout import VERSION
from aioarena._platform import network
from aioarena._platform.network import Keys, Listener, RemoteRef, endpoint_of, parse_endpoint
from tests.fronts.support import until
from tests.remote.proxy import Proxy
from tests.remote.support import listening, remote_of
from tests.remote.test_channel import remote_sender

INTERFACES = Path("/proc/net/if_inet6")
NO_IPV6 = not (socket.has_ipv6 and INTERFACES.exists() and "0" * 31 + "1 " in INTERFACES.read_text())
IPV6 = pytest.mark.skipif(NO_IPV6, reason="this host has no ::1")


# Addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("tcp://10.0.0.5:0", "10.0.0.5", 0),
        ("tcp://10.0.0.5:65535", "10.0.0.5", 65535),
        ("tcp://[fd00::5]:77", "fd00::5", 77),
        ("tcp://[fe80::1%eth0]:77", "fe80::1%eth0", 77),
        ("tcp://*:77", "*", 77),
        ("tcp://node-1.cluster:77", "node-1.cluster", 77),
    ],
)
def test_addresses(endpoint: str, host: str, port: int) -> None:
    """There and back."""
    assert parse_endpoint(endpoint) == (host, port)
    assert endpoint_of(host, port) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "tcp://",
        "10.0.0.5:5",
        "tcp://10.0.0.5",
        "tcp://10.0.0.5:",
        "tcp://:5",
        "tcp://10.0.0.5:65536",
        "tcp://10.0.0.5:-1",
        "tcp://10.0.0.5:x",
        "tcp://10.0.0.5:5/path",
        "tcp://10.0.0.5:5?query",
        "tcp://10.0.0.5:5#fragment",
        "tcp://user@10.0.0.5:5",
        "tcp://user:password@10.0.0.5:5",
        "tcp://fd00::5:5",
        "tcp://[fd00::5:5",
        "ipc:///tmp/socket",
        "inproc://x",
        "udp://10.0.0.5:5",
        "http://10.0.0.5:5",
        "tcp://10.0.0.5:5\n",
        "tcp://10.0. 0.5:5",
        "tcp://10.0.0.5\0:5",
        "tcp://@10.0.0.5:5",
    ],
)
def test_what_is_no_address(endpoint: Any) -> None:
    """It is said what one looks like."""
    with pytest.raises(ValueError, match=r'no address like "tcp://10\.0\.0\.5:0"'):
        parse_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", [None, 5, b"tcp://10.0.0.5:5"])
def test_what_is_no_text(endpoint: Any) -> None:
    with pytest.raises(TypeError, match="an address must be a str"):
        parse_endpoint(endpoint)
    with pytest.raises(TypeError, match="advertise must be a str"):
        Listener("tcp://127.0.0.1:0", endpoint or 5, False)
    with pytest.raises(TypeError, match="an address must be a str"):
        remote_sender(0, 1, bind=endpoint or 5)


def listener(bind: str, advertise: str | None = None, any_interface: bool = False) -> str:
    """The endpoint of a listener, which is closed again."""
    made = Listener(bind, advertise, any_interface)
    try:
        assert len(list(listening())) == 1
        return made.endpoint
    finally:
        made.close()
        made.close()
        assert list(listening()) == []


def test_a_free_port_is_named() -> None:
    host, port = parse_endpoint(listener("tcp://127.0.0.1:0"))
    assert host == "127.0.0.1" and port > 0
    assert listener(f"tcp://127.0.0.1:{port}") == f"tcp://127.0.0.1:{port}"


def test_a_name_is_bound_and_stays_the_name() -> None:
    """Readers look it up for themselves."""
    assert parse_endpoint(listener("tcp://localhost:0"))[0] == "localhost"


@IPV6
@pytest.mark.parametrize(
    ("bind", "advertise", "host"),
    [("[::1]", None, "::1"), ("[::1]", "[fd00::5]", "fd00::5"), ("[::1]", "fd00::5", "fd00::5"), ("[::]", "::1", "::1")],
)
def test_ipv6(bind: str, advertise: str | None, host: str) -> None:
    assert parse_endpoint(listener(f"tcp://{bind}:0", advertise, any_interface=bind == "[::]"))[0] == host


@IPV6
async def test_a_channel_over_ipv6() -> None:
    async with remote_sender(0, 1, bind="tcp://[::1]:0") as sender, Receiver(sender.handle, 0) as reader:
        await sender.send(1)
        assert await reader.recv() == 1


def test_another_host_may_be_advertised() -> None:
    """Where readers reach this one by another address."""
    assert parse_endpoint(listener("tcp://127.0.0.1:0", "node-1.cluster"))[0] == "node-1.cluster"


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "0", "[::0]"])
def test_all_interfaces_have_to_be_asked_for_by_name(host: str) -> None:
    """Binding them is never an accident; and then it has to be said what to connect to."""
    if NO_IPV6 and host.startswith("["):
        pytest.skip("this host has no IPv6")
    with pytest.raises(ValueError, match=r"every interface .* any_interface=True"):
        Listener(f"tcp://{host}:0", "10.0.0.5", False)
    with pytest.raises(ValueError, match=r"no address to connect to: say with advertise="):
        Listener(f"tcp://{host}:0", None, True)
    assert list(listening()) == []
    assert parse_endpoint(listener(f"tcp://{host}:0", "10.0.0.5", any_interface=True))[0] == "10.0.0.5"


async def test_a_channel_on_all_interfaces() -> None:
    sender = remote_sender(0, 1, bind="tcp://*:0", any_interface=True, advertise="127.0.0.1")
    async with sender, Receiver(sender.handle, 0) as reader:
        await sender.send(1)
        assert await reader.recv() == 1


@pytest.mark.parametrize(
    "advertise", ["", "*", "0.0.0.0", "::", "[::]", "10.0.0.5:5", "tcp://10.0.0.5", "a b", "host/path", "user@host"]
)
def test_what_cannot_be_advertised(advertise: Any) -> None:
    with pytest.raises(ValueError, match=r"advertise must be a host that readers can connect to"):
        Listener("tcp://127.0.0.1:0", advertise, False)
    assert list(listening()) == []


def test_a_port_that_is_in_use() -> None:
    """Is an error at once, when the sender is made, which then leaves nothing."""
    first = remote_sender(0, 1)
    endpoint = remote_of(first.handle).endpoint
    with pytest.raises(ArenaError, match=rf"cannot bind {endpoint}: Address already in use; .* a free port, or port 0"):
        remote_sender(0, 1, bind=endpoint)
    del first
    gc.collect()
    assert list(listening()) == []


@pytest.mark.parametrize("host", ["203.0.113.7", "x" * 70])
def test_an_address_that_is_not_of_this_host(host: str) -> None:
    with pytest.raises(ArenaError, match=r"cannot bind .*; name an address of this host"):
        remote_sender(0, 1, bind=f"tcp://{host}:0")


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "ipc:///tmp/x", "tcp://0.0.0.0:0"])
def test_a_sender_refuses_what_it_cannot_bind(bind: Any) -> None:
    with pytest.raises(ValueError, match=r"no address like|every interface"):
        remote_sender(0, 1, bind=bind)


async def test_connections_made_early_wait() -> None:
    """However often their time is over before the sender starts: nobody says that it is another channel's."""
    accepted = 0

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        await reader.read()
        writer.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "_HANDSHAKE_SECONDS", 0.05)
        handle = remote_sender(0, 1).handle
        server = await asyncio.start_server(be_silent, "127.0.0.1", 0)
        endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        handle = dataclasses.replace(handle, remote=dataclasses.replace(remote_of(handle), endpoint=endpoint))
        receiver = Receiver(handle, 0)
        start = asyncio.create_task(receiver.start())
        await until(lambda: accepted > 5)
        assert not start.done()
        start.cancel()
        await asyncio.wait([start])
        assert start.cancelled()
        server.close()
        await server.wait_closed()


async def test_a_sender_that_is_gone_before_it_started() -> None:
    """Its readers were waiting for it, and are told."""
    sender = remote_sender(0, 1, remote_timeout=0.4)
    receiver = Receiver(sender.handle, 0)
    start = asyncio.create_task(receiver.start())
    await until(lambda: receiver._relay is not None and receiver._relay._feed is not None)
    connection = receiver._relay._feed.wire.connection
    await until(lambda: connection.reached)
    await sender.aclose()
    with pytest.raises(SenderLostError, match="nobody answers"):
        await start


async def test_a_cut_between_the_handshake_and_the_seat_loses_nothing() -> None:
    """The reader was never seated, so it has missed nothing and asks again."""
    async with remote_sender(0, 1) as sender, Proxy(sender.handle) as proxy:
        receiver = Receiver(proxy.handle, 0)
        start = asyncio.create_task(receiver.start())
        await until(lambda: receiver._relay is not None and receiver._relay._feed is not None)
        feed = receiver._relay._feed
        wire, join = feed.wire, feed.wire.join
        lost = []

        def lose(asked: Any) -> None:
            lost.append(asked)
            proxy.cut()
            wire.join = join

        wire.join = lose
        await start
        assert [asked.session for asked in lost] == [1] and feed._session > 1
        await sender.send(1)
        assert await receiver.recv() == 1
        await receiver.aclose()


# Handles ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def handle() -> Handle:
    return remote_sender(2, 3, remote_timeout=0.5).handle


def test_handles_travel(handle: Handle) -> None:
    """As text, by pickle and by copying, keys and all."""
    for other in (Handle.from_text(handle.to_text()), pickle.loads(pickle.dumps(handle)), copy.deepcopy(handle)):
        assert other == handle and hash(other) == hash(handle)
        assert remote_of(other).secret_key == remote_of(handle).secret_key
    assert (handle.readers, handle.local_readers, remote_of(handle).readers) == (5, 2, 3)


def test_local_handles_name_no_address() -> None:
    handle = Sender(1, arena=None).handle
    assert handle.remote is None and handle.local_readers == 1
    assert Handle.from_text(handle.to_text()) == handle


def values_of(text: str) -> dict[str, Any]:
    return dict(json.loads(base64.urlsafe_b64decode(text.partition(":")[2])))


def text_with(values: Any) -> str:
    return "aioarena-handle:" + base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


def test_a_text_cut_anywhere_is_none(handle: Handle) -> None:
    text = handle.to_text()
    for end in range(len(text)):
        with pytest.raises(HandleError, match="no handle, or only a part of one"):
            Handle.from_text(text[:end])


@pytest.mark.parametrize("text", [5, None, b"aioarena-handle:", "aioarena-handle:\xe4", "aioarena-handle:e30="])
def test_what_is_no_text_of_a_handle(text: Any) -> None:
    with pytest.raises(HandleError, match="no handle"):
        Handle.from_text(text)


@pytest.mark.parametrize("values", [5, None, [], "x", {}, {"version": VERSION}, {"version": VERSION, "sender": 5}])
def test_a_text_of_something_else(values: Any) -> None:
    with pytest.raises(HandleError, match="no handle"):
        Handle.from_text(text_with(values))


@pytest.mark.parametrize("name", ["name", "readers", "sender", "nonce", "layout", "control", "arena", "address", "remote"])
def test_a_text_that_lacks_something(handle: Handle, name: str) -> None:
    values = values_of(handle.to_text())
    del values[name]
    with pytest.raises(HandleError, match="no handle"):
        Handle.from_text(text_with(values))


@pytest.mark.parametrize("name", ["endpoint", "readers", "timeout", "server_key", "public_key", "secret_key"])
def test_a_text_that_lacks_something_of_its_address(handle: Handle, name: str) -> None:
    values = values_of(handle.to_text())
    del values["remote"][name]
    with pytest.raises(HandleError, match="no handle") as error:
        Handle.from_text(text_with(values))
    assert remote_of(handle).secret_key not in str(error.value)


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, "x", None])
def test_a_handle_of_another_version(handle: Handle, version: Any) -> None:
    """Is refused by name, whatever else it holds."""
    with pytest.raises(HandleError, match=f"has layout version {version}, this is {VERSION}"):
        Handle.from_text(text_with({"version": version, "news": 5}))
    with pytest.raises(HandleError, match=f"has layout version {version}, this is {VERSION}"):
        pickle.loads(pickle.dumps(dataclasses.replace(handle, version=version)))


@pytest.mark.parametrize(
    "damage",
    [
        {"endpoint": "ipc:///tmp/x"},
        {"endpoint": "tcp://127.0.0.1"},
        {"endpoint": 5},
        {"endpoint": None},
        {"endpoint": "tcp://127.0.0.1:0"},
        {"timeout": None},
        {"timeout": "x"},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"timeout": -1.0},
        {"server_key": ""},
        {"server_key": None},
        {"server_key": "x" * 39},
        {"server_key": "\xe4" * 40},
        {"server_key": '"' * 40},
        {"public_key": "y" * 41},
        {"secret_key": 5},
    ],
    ids=str,
)
async def test_a_damaged_handle_is_an_error_of_ours(handle: Handle, damage: dict[str, Any]) -> None:
    """Which does not show the keys, and leaves nothing."""
    remote = dataclasses.replace(remote_of(handle), **damage)
    for end in (
        Relay(dataclasses.replace(handle, remote=remote), 1, arena=None),
        Receiver(dataclasses.replace(handle, remote=remote), 4),
    ):
        with pytest.raises(HandleError, match="is damaged, pass it anew") as error:
            await end.start()
        assert not any(key in str(error.value) for key in keys_of(remote_of(handle)))


# Secrets ----------------------------------------------------------------------------------------------------------


def keys_of(remote: RemoteRef) -> tuple[str, str, str]:
    return remote.server_key, remote.public_key, remote.secret_key


def test_keys_are_fresh() -> None:
    keys = [Keys.fresh() for _ in range(3)]
    assert len({key for these in keys for key in dataclasses.astuple(these)}) == 12


def test_no_secret_is_in_a_repr(handle: Handle) -> None:
    keys = Keys.fresh()
    for secret in (keys.server_secret, keys.reader_secret):
        assert secret not in repr(keys) and secret not in str(keys)
    for thing in (handle, handle.remote):
        assert not any(key in text for key in keys_of(remote_of(handle)) for text in (repr(thing), str(thing), f"{thing}"))


async def test_no_secret_is_in_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """Nor is one of the sender's in the handle."""
    caplog.set_level(logging.DEBUG)
    sender = remote_sender(0, 2, remote_timeout=0.4)
    own = sender._keys.server_secret
    secrets = [own, *keys_of(remote_of(sender.handle))]
    assert own not in base64.urlsafe_b64decode(sender.handle.to_text().partition(":")[2]).decode()
    words = []
    async with sender, Relay(sender.handle, 1) as relay, Receiver(relay.handle, 0) as reader:
        words += [repr(end) for end in (sender, relay, reader)]
        stranger = dataclasses.replace(remote_of(sender.handle), secret_key=zmq.curve_keypair()[1].decode())
        secrets.append(stranger.secret_key)
        for handle, rank in (
            (dataclasses.replace(sender.handle, remote=stranger), 1),
            (sender.handle, relay.rank),
            (dataclasses.replace(sender.handle, version=VERSION + 1), 1),
        ):
            with pytest.raises(HandleError) as error:
                await Receiver(handle, rank).start()
            words += [str(error.value), repr(error.value)]
    with pytest.raises(SenderLostError) as gone:
        await Receiver(sender.handle, 1).start()
    words += [str(gone.value), *caplog.messages]
    assert not any(secret in text for secret in secrets for text in words)


def test_without_curve_there_are_no_remote_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes over a network in the clear."""
    monkeypatch.setattr(zmq, "has", lambda what: False)
    with pytest.raises(ArenaError, match="no CURVE"):
        remote_sender(0, 1)
    assert list(listening()) == []

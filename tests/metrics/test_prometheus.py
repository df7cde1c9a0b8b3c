"""Metrics as Prometheus gets them: scraped over HTTP from a registry, and parsed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
import torch
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from aioarena import ReaderStatus, Receiver, ReceiverStatistics, Relay, Sender, SenderStatistics, _envelope
from aioarena._asyncio import Endpoint
from aioarena.integrations import prometheus
from tests.conftest import ARENA, RING_BYTES, OpenChannel
from tests.fronts.support import filled
from tests.fronts.threads import blocking_channel
from tests.metrics.test_documents import Reading


class Scraped:
    """One scrape.

    Attributes:
        families: By name.
    """

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, sample: str, **labels: str) -> float | None:
        return self._values.get((sample, frozenset(labels.items())))

    def channels(self) -> set[str]:
        return {dict(labels)["channel"] for name, labels in self._values if name.startswith("aioarena_")}


class Exported:
    """What a server of metrics has."""

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        self.registry = registry
        self._url = f"http://127.0.0.1:{port}/metrics"

    def scrape(self) -> Scraped:
        with urllib.request.urlopen(self._url, timeout=20) as answer:
            return Scraped(answer.read().decode())


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def exported() -> Iterator[Exported]:
    registry = CollectorRegistry()
    # As start_http_server does, but that looks for its end twice a second only.
    server = make_server("127.0.0.1", 0, make_wsgi_app(registry), handler_class=Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Exported(registry, server.server_port)
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.contextmanager
def installed(registry: CollectorRegistry, **options: Any) -> Iterator[prometheus.ChannelCollector]:
    collector = prometheus.install(registry, **options)
    try:
        yield collector
    finally:
        collector.uninstall()


async def test_what_statistics_tell_is_scraped(open_channel: OpenChannel, exported: Exported) -> None:
    """Counters and states of the sender, of each rank, and of the receivers, each with its labels."""
    with installed(exported.registry):
        async with open_channel(2, name="steps") as channel:
            lent = await channel.sender.empty(100_000, torch.uint8)
            await channel.sender.send([filled(1), lent, filled(2, 5 << 20), filled(3, 100)])
            await channel.sender.send("small")
            kept = [await receiver.recv() for receiver in channel.receivers]
            await channel.receivers[0].recv()
            # In a thread: what is scraped comes from another one in any case.
            scraped = await asyncio.to_thread(exported.scrape)
            sent = channel.sender.statistics()
            assert scraped.channels() == {"steps"}

            def of_sender(name: str, **labels: str) -> float | None:
                return scraped.value(f"aioarena_sender_{name}", channel="steps", **labels)

            assert of_sender("messages_total") == 2
            assert of_sender("bytes_total", placement="ring") == sent.ring_bytes
            assert of_sender("bytes_total", placement="arena") == sent.arena_bytes == (1 << 20) + 100_000
            assert of_sender("bytes_total", placement="frame") == 5 << 20
            assert of_sender("lent_bytes_total") == 100_000
            assert {reason: of_sender("fallbacks_total", reason=reason) for reason in sent.fallbacks} == sent.fallbacks
            assert of_sender("copy_seconds_total") == pytest.approx(sent.copy_seconds)
            assert of_sender("wakeups_total") == sent.wakeups
            assert (of_sender("waits_total"), of_sender("wait_seconds_total"), of_sender("foreign_messages_total")) == (
                0,
                0,
                0,
            )
            assert of_sender("prefaulted_bytes_total") == 0
            assert of_sender("ring_used_bytes") == sent.ring_used > 0
            assert of_sender("ring_peak_bytes") == sent.ring_peak
            assert of_sender("ring_capacity_bytes") == sent.ring_capacity
            assert of_sender("frames_pending_bytes") == sent.frames_pending
            assert (of_sender("arena_slots"), of_sender("arena_slot_bytes")) == (4, 1 << 20)
            assert (of_sender("arena_slots_used"), of_sender("arena_slots_peak"), of_sender("spans_held")) == (2, 2, 2)

            def of_reader(name: str, rank: int, **labels: str) -> float | None:
                return scraped.value(f"aioarena_reader_{name}", channel="steps", rank=str(rank), **labels)

            assert [of_reader("messages_behind", rank) for rank in (0, 1)] == [0, 1]
            assert [of_reader("behind_bytes", rank) for rank in (0, 1)] == [0, sent.ring_used]
            assert [of_reader("state", 0, state=state) for state in ("joined", "lost")] == [1, 0]
            assert (of_reader("spans_held", 0), of_reader("held_bytes", 0)) == (2, sent.arena_bytes)
            assert 0 < (of_reader("oldest_held_seconds", 0) or 0) <= sent.readers[0].oldest_held
            assert of_reader("waited_for_seconds", 0) == 0

            def of_receiver(name: str, rank: int, **labels: str) -> float | None:
                return scraped.value(f"aioarena_receiver_{name}", channel="steps", rank=str(rank), **labels)

            received = channel.receivers[0].statistics()
            assert [of_receiver("messages_total", rank) for rank in (0, 1)] == [2, 1]
            assert of_receiver("bytes_total", 0, placement="ring") == received.ring_bytes
            assert of_receiver("bytes_total", 0, placement="arena") == sent.arena_bytes
            assert of_receiver("bytes_total", 0, placement="frame") == 5 << 20
            assert (of_receiver("decode_errors_total", 0), of_receiver("copy_seconds_total", 0)) == (0, 0)
            assert of_receiver("parks_total", 0) == received.parks
            assert of_receiver("wakeups_total", 0) == received.wakeups
            assert (of_receiver("spans_held", 0), of_receiver("held_bytes", 0)) == (2, sent.arena_bytes)
            assert 0 < (of_receiver("oldest_held_seconds", 0) or 0) <= received.oldest_held
            assert (of_receiver("spans_released_total", 0), of_receiver("spans_quarantined_total", 0)) == (0, 0)
            assert (of_receiver("spans_pending", 0), of_receiver("events_pending", 0)) == (0, 0)
            assert of_receiver("behind_bytes", 1) == sent.ring_used
            assert [of_receiver("pinned", 0, state=state) for state in ("no", "yes")] == [1, 0]
            kept.clear()


# Of the statistics: labels, what is no number, and numbers without end.
LEFT_OUT = {"readers", "rank", "pid", "host", "process", "slots_held", "ages_held"}


@pytest.mark.parametrize(
    ("metrics", "statistics"),
    [
        (prometheus._SENDER, SenderStatistics),
        (prometheus._READER, ReaderStatus),
        (prometheus._RECEIVER, ReceiverStatistics),
    ],
)
def test_every_field_of_the_statistics_is_exported(metrics: Iterable[Any], statistics: Any) -> None:
    fields = {field.name for field in dataclasses.fields(statistics)}
    reading = Reading()
    for metric in metrics:
        list(metric.read(reading))
    assert fields - set(reading.fields) == fields & LEFT_OUT


async def test_without_histograms_nothing_is_measured(open_channel: OpenChannel, exported: Exported) -> None:
    with installed(exported.registry):
        async with open_channel() as channel:
            assert (type(channel.sender), type(channel.receiver)) == (Sender, Receiver)
            await channel.sender.send(1)
            scraped = await asyncio.to_thread(exported.scrape)
            assert not [name for name in scraped.families if "duration" in name]


async def test_durations_are_histograms(open_channel: OpenChannel, exported: Exported) -> None:
    """Of each send that succeeded, each copy, and each delivery at each reader; gone a scrape after the channel."""
    with installed(exported.registry, histograms=True):
        async with open_channel(2, name="steps") as channel:
            for obj in ("small", filled(1), filled(2, 5 << 20)):
                await channel.sender.send(obj)
                await channel.receivers[0].recv()
            with pytest.raises(Exception, match="cannot pickle"):
                await channel.sender.send(lambda: 0)
            scraped = await asyncio.to_thread(exported.scrape)
            assert scraped.value("aioarena_send_duration_seconds_count", channel="steps") == 3
            assert scraped.value("aioarena_copy_duration_seconds_count", channel="steps") == 2
            assert scraped.value("aioarena_delivery_duration_seconds_count", channel="steps", rank="0") == 3
            assert scraped.value("aioarena_delivery_duration_seconds_count", channel="steps", rank="1") is None
            sends = scraped.value("aioarena_send_duration_seconds_sum", channel="steps")
            copies = scraped.value("aioarena_copy_duration_seconds_sum", channel="steps")
            assert sends is not None and copies is not None and sends > copies > 0
            assert copies >= channel.sender.statistics().copy_seconds
            assert scraped.value("aioarena_send_duration_seconds_bucket", channel="steps", le="+Inf") == 3
            assert scraped.value("aioarena_send_duration_seconds_bucket", channel="steps", le="2.5e-06") is not None
        last = await asyncio.to_thread(exported.scrape)
        assert last.value("aioarena_send_duration_seconds_count", channel="steps") == 3
        assert (await asyncio.to_thread(exported.scrape)).channels() == set()


async def test_sends_are_timed_from_the_call_to_the_return(
    open_channel: OpenChannel, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that advances while the object is pickled."""

    class Clock:
        now = 100.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()

    class Slow:
        def __reduce__(self) -> tuple[Any, ...]:
            clock.now += 0.3
            return int, ()

    monkeypatch.setattr(prometheus, "time", clock)
    with installed(exported.registry, histograms=True, buckets=(0.2, 0.4)):
        async with open_channel(name="steps") as channel:
            await channel.sender.send(Slow())
            await channel.receiver.recv()
            scraped = await asyncio.to_thread(exported.scrape)
            assert scraped.value("aioarena_send_duration_seconds_sum", channel="steps") == pytest.approx(0.3)
            buckets = [
                scraped.value("aioarena_send_duration_seconds_bucket", channel="steps", le=le)
                for le in ("0.2", "0.4", "+Inf")
            ]
            assert buckets == [0, 1, 1]


async def test_deliveries_are_timed_from_the_pickling_to_the_arrival(
    open_channel: OpenChannel, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 10**9

        def monotonic_ns(self) -> int:
            return self.now

    clock = Clock()
    monkeypatch.setattr(_envelope, "time", clock)
    with installed(exported.registry, histograms=True):
        async with open_channel(name="steps") as channel:
            await channel.sender.send(1)
            clock.now += 2_500_000_000
            await channel.receiver.recv()
            scraped = await asyncio.to_thread(exported.scrape)
            assert scraped.value("aioarena_delivery_duration_seconds_sum", channel="steps", rank="0") == 2.5


def test_blocking_ends_are_scraped_while_their_threads_wait(exported: Exported) -> None:
    with installed(exported.registry), blocking_channel(name="steps") as (sender, receiver):
        sender.send(1)
        receiver.recv()
        with sender._driver._lock, receiver._driver._lock:  # as another thread has it that is at work there
            scraped = exported.scrape()
        assert scraped.value("aioarena_sender_messages_total", channel="steps") == 1
        assert scraped.value("aioarena_receiver_messages_total", channel="steps", rank="0") == 1


async def test_ends_that_are_closed_are_gone(open_channel: OpenChannel, exported: Exported) -> None:
    with installed(exported.registry):
        unused = Sender(1, arena=None, name="never started")
        async with open_channel(name="one"):
            async with open_channel(name="other"):
                assert (await asyncio.to_thread(exported.scrape)).channels() == {"one", "other"}
            assert (await asyncio.to_thread(exported.scrape)).channels() == {"one"}
        await unused.aclose()


async def test_a_forked_child_has_none_of_its_parents(open_channel: OpenChannel, exported: Exported) -> None:
    """What it inherited is nothing that it does."""
    with installed(exported.registry):
        async with open_channel(name="steps") as channel:
            channel.sender._fault = Endpoint._forked  # as in a child
            scraped = await asyncio.to_thread(exported.scrape)
            channel.sender._fault = None
            assert scraped.value("aioarena_sender_messages_total", channel="steps") is None
            assert scraped.value("aioarena_receiver_messages_total", channel="steps", rank="0") == 0


async def test_channels_of_one_name_are_added_up(open_channel: OpenChannel, exported: Exported) -> None:
    """A second sample with the same labels would spoil the whole scrape. Of peaks the largest counts."""
    with installed(exported.registry):
        async with open_channel(name="steps") as one, open_channel(name="steps") as other:
            for channel, sends in ((one, 2), (other, 3)):
                for number in range(sends):
                    await channel.sender.send(filled(number, 100_000 * sends))
            scraped = await asyncio.to_thread(exported.scrape)
            assert scraped.value("aioarena_sender_messages_total", channel="steps") == 5
            assert scraped.value("aioarena_sender_arena_slots_used", channel="steps") == 5
            assert scraped.value("aioarena_sender_arena_slots_peak", channel="steps") == 3
            assert scraped.value("aioarena_reader_state", channel="steps", rank="0", state="joined") == 2


async def test_a_reader_over_the_network(exported: Exported) -> None:
    """Is a reader and a receiver, with what arrived; the channel that it has inside is nobody's business."""
    with installed(exported.registry, histograms=True):
        async with (
            Sender(
                0, remote_readers=1, bind="tcp://127.0.0.1:0", name="steps", arena=ARENA, ring_bytes=RING_BYTES
            ) as sender,
            Receiver(sender.handle, 0) as receiver,
        ):
            await sender.send(filled(1))
            await sender.send("small")
            assert [len(await receiver.recv()) for _ in range(2)] == [1 << 20, 5]
            scraped = await asyncio.to_thread(exported.scrape)
            assert scraped.value("aioarena_sender_messages_total", channel="steps") == 2
            assert scraped.value("aioarena_reader_state", channel="steps", rank="0", state="joined") == 1
            assert scraped.value("aioarena_receiver_messages_total", channel="steps", rank="0") == 2
            assert scraped.value("aioarena_remote_messages_total", channel="steps", rank="0") == 2
            assert (scraped.value("aioarena_remote_bytes_total", channel="steps", rank="0") or 0) > 1 << 20
            assert scraped.value("aioarena_delivery_duration_seconds_count", channel="steps", rank="0") == 2


async def test_a_relay_is_a_sender(exported: Exported) -> None:
    with installed(exported.registry):
        async with (
            Sender(
                0, remote_readers=1, bind="tcp://127.0.0.1:0", name="steps", arena=ARENA, ring_bytes=RING_BYTES
            ) as sender,
            Relay(sender.handle, 1, name="here") as relay,
            Receiver(relay.handle, 0) as receiver,
        ):
            await sender.send(1)
            assert await receiver.recv() == 1
            scraped = await asyncio.to_thread(exported.scrape)
            assert scraped.value("aioarena_remote_messages_total", channel="steps", rank="0") == 1
            assert scraped.value("aioarena_sender_messages_total", channel="here") == 1
            assert scraped.value("aioarena_receiver_messages_total", channel="here", rank="0") == 1


async def test_names_stay_what_they_are(open_channel: OpenChannel, exported: Exported) -> None:
    """Whatever a channel is called."""
    name = 'a "quoted"\\ name\nin two lines'
    with installed(exported.registry):
        async with open_channel(name=name):
            assert (await asyncio.to_thread(exported.scrape)).channels() == {name}


async def test_after_uninstalling_nothing_is_left(open_channel: OpenChannel, exported: Exported) -> None:
    async with open_channel() as channel:
        collector = prometheus.install(exported.registry, histograms=True)
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            prometheus.install(exported.registry, histograms=True)
        collector.uninstall()
        assert type(channel.sender) is Sender
        assert (await asyncio.to_thread(exported.scrape)).families == {}
        prometheus.install(exported.registry).uninstall()


def test_without_the_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "aioarena.integrations.prometheus")
    with pytest.raises(ImportError, match=r"pip install 'aioarena\[prometheus\]'"):
        importlib.import_module("aioarena.integrations.prometheus")

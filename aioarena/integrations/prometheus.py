"""Metrics for Prometheus: all channel ends of this process, asyncio and blocking, those that are there and those to come.

::

    from aioarena.integrations import prometheus
    prometheus.install()                  # counters and states: what statistics() tells, when somebody scrapes
    prometheus.install(histograms=True)   # and how long sends, copies and deliveries take, which is measured at each

Needs the extra ``prometheus``. All metrics are listed in docs/metrics.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "aioarena.integrations.prometheus needs prometheus_client: pip install 'aioarena[prometheus]'", name=error.name
    ) from error

from aioarena import _observing, _registry
from aioarena._asyncio import State
from aioarena._core.sender import Membership
from aioarena._platform.memory import Pin
from aioarena._types import ReaderStatus, ReceiverStatistics, SenderStatistics
from aioarena.receiver import Receiver
from aioarena.relay import Relay
from aioarena.sender import Sender

__all__ = ["BUCKETS", "ChannelCollector", "install"]

# Seconds. A small message takes microseconds, 200 MB tens of milliseconds, a send that waits for a reader any time.
BUCKETS = tuple(float(f"{base}e{power}") for power in range(-6, 1) for base in (1, 2.5, 5))

# Values of one metric of one object: those of the labels that only this metric has, and the number.
_Values = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class _Metric:
    """How a metric comes out of statistics.

    Attributes:
        name: Its name, without what Prometheus appends to counters.
        text: What it counts or is.
        read: Its values.
        counter: Whether it is a counter; else a gauge.
        labels: Labels that it has besides those that say where it comes from.
        most: Whether the largest counts where several objects have the same labels; else their sum.
    """

    name: str
    text: str
    read: Callable[[Any], _Values]
    counter: bool = False
    labels: tuple[str, ...] = ()
    most: bool = False


def _counter(name: str, text: str, read: Callable[[Any], float]) -> _Metric:
    return _Metric(name, text, lambda statistics: [((), read(statistics))], counter=True)


def _gauge(name: str, text: str, read: Callable[[Any], float], *, most: bool = False) -> _Metric:
    return _Metric(name, text, lambda statistics: [((), read(statistics))], most=most)


def _is_one_of(kinds: Iterable[str], kind: str) -> _Values:
    return [((each,), float(each == kind)) for each in kinds]


def _sender_bytes(sent: SenderStatistics) -> _Values:
    return [(("ring",), sent.ring_bytes), (("arena",), sent.arena_bytes), (("frame",), sent.frame_bytes)]


def _receiver_bytes(received: ReceiverStatistics) -> _Values:
    return [(("ring",), received.ring_bytes), (("arena",), received.arena_bytes), (("frame",), received.frame_bytes)]


def _fallbacks(sent: SenderStatistics) -> _Values:
    return [((reason,), count) for reason, count in sent.fallbacks.items()]


def _reader_state(reader: ReaderStatus) -> _Values:
    return _is_one_of([state.value for state in Membership], reader.state)


def _pinned(received: ReceiverStatistics) -> _Values:
    return _is_one_of([pin.value for pin in Pin], received.pinned)


# Of each sender; labelled with the channel.
_SENDER = (
    _counter("aioarena_sender_messages", "Messages sent.", lambda s: s.messages),
    _Metric("aioarena_sender_bytes", "Bytes sent.", _sender_bytes, counter=True, labels=("placement",)),
    _counter("aioarena_sender_lent_bytes", "Bytes of those that lay in lent memory.", lambda s: s.lent_bytes),
    _counter("aioarena_sender_prefaulted_bytes", "Bytes of the arena populated beforehand.", lambda s: s.prefaulted_bytes),
    _Metric(
        "aioarena_sender_fallbacks", "Buffers that did not take the arena.", _fallbacks, counter=True, labels=("reason",)
    ),
    _counter("aioarena_sender_copy_seconds", "Time that sends spent copying.", lambda s: s.copy_seconds),
    _counter("aioarena_sender_waits", "Sends that had to wait for a reader.", lambda s: s.waits),
    _counter("aioarena_sender_wait_seconds", "Time that those waited.", lambda s: s.wait_seconds),
    _counter("aioarena_sender_wakeups", "Wake-ups sent to readers.", lambda s: s.wakeups),
    _counter("aioarena_sender_foreign_messages", "Ignored messages on the socket.", lambda s: s.foreign_messages),
    _gauge("aioarena_sender_ring_used_bytes", "Bytes that the slowest reader has not received.", lambda s: s.ring_used),
    _gauge("aioarena_sender_ring_peak_bytes", "Most of those that were seen.", lambda s: s.ring_peak, most=True),
    _gauge("aioarena_sender_ring_capacity_bytes", "Bytes of the ring.", lambda s: s.ring_capacity),
    _gauge("aioarena_sender_frames_pending_bytes", "Bytes of frames not received by all.", lambda s: s.frames_pending),
    _gauge("aioarena_sender_arena_slots", "Slots of the arena.", lambda s: s.slots),
    _gauge("aioarena_sender_arena_slot_bytes", "Bytes of a slot.", lambda s: s.slot_bytes, most=True),
    _gauge("aioarena_sender_arena_slots_used", "Slots in use.", lambda s: s.slots_used),
    _gauge("aioarena_sender_arena_slots_peak", "Most slots in use at any time.", lambda s: s.slots_peak, most=True),
    _gauge("aioarena_sender_spans_held", "Spans that some reader has not released.", lambda s: s.spans_held),
)

# Of each rank, as its sender sees it; labelled with the channel and the rank.
_READER = (
    _Metric("aioarena_reader_state", "1 for the state the reader is in.", _reader_state, labels=("state",)),
    _gauge("aioarena_reader_messages_behind", "Messages sent and not received.", lambda r: r.messages_behind),
    _gauge("aioarena_reader_behind_bytes", "Ring bytes sent and not received.", lambda r: r.bytes_behind),
    _gauge("aioarena_reader_waited_for_seconds", "Time a send has waited for it.", lambda r: r.waited_for, most=True),
    _gauge("aioarena_reader_spans_held", "Spans that it has not released.", lambda r: r.spans_held),
    _gauge("aioarena_reader_held_bytes", "Bytes of those spans.", lambda r: r.bytes_held),
    _gauge("aioarena_reader_oldest_held_seconds", "Age of the oldest of them.", lambda r: r.oldest_held, most=True),
)

# Of each receiver in this process; labelled with the channel and the rank.
_RECEIVER = (
    _counter("aioarena_receiver_messages", "Messages received.", lambda r: r.messages),
    _counter("aioarena_receiver_decode_errors", "Messages that did not unpickle.", lambda r: r.decode_errors),
    _Metric("aioarena_receiver_bytes", "Bytes received.", _receiver_bytes, counter=True, labels=("placement",)),
    _counter("aioarena_receiver_copy_seconds", "Time of private copies and of to_device.", lambda r: r.copy_seconds),
    _counter("aioarena_receiver_parks", "Times it waited for a message.", lambda r: r.parks),
    _counter("aioarena_receiver_wakeups", "Wake-ups sent to the sender.", lambda r: r.wakeups),
    _counter("aioarena_receiver_spans_released", "Spans given back.", lambda r: r.spans_released),
    _counter(
        "aioarena_receiver_spans_quarantined",
        "Spans never given back.",
        lambda r: r.spans_quarantined,
    ),
    _counter("aioarena_receiver_spans_changed", "Writes into held memory that were found.", lambda r: r.spans_changed),
    _gauge("aioarena_receiver_behind_bytes", "Ring bytes sent and not received.", lambda r: r.bytes_behind),
    _gauge("aioarena_receiver_spans_held", "Spans that it holds.", lambda r: r.spans_held),
    _gauge("aioarena_receiver_held_bytes", "Bytes of those spans.", lambda r: r.bytes_held),
    _gauge("aioarena_receiver_oldest_held_seconds", "Age of the oldest of them.", lambda r: r.oldest_held, most=True),
    _gauge("aioarena_receiver_spans_pending", "Dropped spans that wait for GPU work.", lambda r: r.spans_pending),
    _gauge("aioarena_receiver_events_pending", "Events that those spans wait for.", lambda r: r.events_pending),
    _Metric("aioarena_receiver_pinned", "1 for whether the arena is pinned here.", _pinned, labels=("state",)),
)

# Of each relay in this process, and of each receiver of a channel of another host; labelled with the channel and the rank.
_REMOTE = (
    _counter("aioarena_remote_messages", "Messages that arrived over the network.", lambda relay: relay.received),
    _counter("aioarena_remote_bytes", "Bytes that arrived over the network.", lambda relay: relay.received_bytes),
)

_GROUPS = (
    (_SENDER, ("channel",)),
    (_READER, ("channel", "rank")),
    (_RECEIVER, ("channel", "rank")),
    (_REMOTE, ("channel", "rank")),
)


class ChannelCollector(Collector):
    """Collects from all ends of this process that are open. Made by :func:`install`."""

    def __init__(self, registry: CollectorRegistry, times: _Times | None) -> None:
        self._registry = registry
        self._times = times

    def describe(self) -> Iterable[Metric]:
        """All metrics, without values: what the registry needs to see that no other has the same names."""
        yield from _families().values()
        if self._times is not None:
            yield from self._times.describe()

    def collect(self) -> Iterable[Metric]:
        """All metrics. Any thread may ask; no end is held up."""
        samples: dict[_Metric, dict[tuple[str, ...], float]] = {}
        channels = set()
        ends = [
            end for end in _registry.ends() if end._state not in (State.NEW, State.CLOSED) and not end._born_elsewhere()
        ]
        # What a remote receiver has inside is no channel that anybody knows of.
        relays = [end._relay for end in ends if isinstance(end, Receiver) and end._relay is not None]
        inside = {relay._mirror for relay in relays}
        for end in ends:
            channels.add(end._name)
            if isinstance(end, Relay):
                if end.rank is not None:
                    _add(samples, _REMOTE, (end._name, str(end.rank)), end)
            elif isinstance(end, Sender):
                if end in inside:
                    continue
                sent = end.statistics()
                _add(samples, _SENDER, (end._name,), sent)
                for reader in sent.readers:
                    _add(samples, _READER, (end._name, str(reader.rank)), reader)
            elif isinstance(end, Receiver):
                _add(samples, _RECEIVER, (end._name, str(end.rank)), end.statistics())
        families = _families()
        for metric, values in samples.items():
            for labels, value in values.items():
                families[metric].add_metric(labels, value)
        yield from families.values()
        if self._times is not None:
            yield from self._times.collect(channels)

    def uninstall(self) -> None:
        """Take the metrics off the registry, and measure no more."""
        self._registry.unregister(self)
        if self._times is not None:
            _observing.forget(self._times)


def _families() -> dict[_Metric, CounterMetricFamily | GaugeMetricFamily]:
    return {
        metric: (CounterMetricFamily if metric.counter else GaugeMetricFamily)(
            metric.name, metric.text, labels=[*labels, *metric.labels]
        )
        for metrics, labels in _GROUPS
        for metric in metrics
    }


def _add(
    samples: dict[_Metric, dict[tuple[str, ...], float]],
    metrics: Iterable[_Metric],
    labels: tuple[str, ...],
    statistics: SenderStatistics | ReaderStatus | ReceiverStatistics | Relay,
) -> None:
    """Add one object's values; with those of another that has the same labels, as two channels of one name."""
    for metric in metrics:
        values = samples.setdefault(metric, {})
        for more, value in metric.read(statistics):
            key = (*labels, *more)
            known = values.get(key, 0.0)
            values[key] = max(known, value) if metric.most else known + value


class _Times(_observing.Observer):
    """How long things take, as histograms."""

    carries = True  # the time of pickling, for deliveries

    def __init__(self, buckets: Sequence[float]) -> None:
        def histogram(name: str, text: str, labels: Sequence[str]) -> Histogram:
            return Histogram(name, text, labels, registry=None, buckets=buckets)

        self._send = histogram("aioarena_send_duration_seconds", "From the call of a send to its return.", ["channel"])
        self._copy = histogram(
            "aioarena_copy_duration_seconds", "Copies of one message into the arena, or into frames.", ["channel"]
        )
        self._delivery = histogram(
            "aioarena_delivery_duration_seconds",
            "From the pickling of a message to its arrival, on one host.",
            ["channel", "rank"],
        )
        self._histograms = (self._send, self._copy, self._delivery)
        self._labels: dict[Histogram, set[tuple[str, ...]]] = {each: set() for each in self._histograms}

    def describe(self) -> Iterable[Metric]:
        for histogram in self._histograms:
            yield from histogram.describe()

    def collect(self, channels: set[str]) -> Iterator[Metric]:
        """All histograms; those of channels that are not open any more for the last time."""
        for histogram in self._histograms:
            yield from histogram.collect()
            for labels in [labels for labels in self._labels[histogram].copy() if labels[0] not in channels]:
                self._labels[histogram].discard(labels)
                with contextlib.suppress(KeyError):  # another thread scrapes too
                    histogram.remove(*labels)

    def _observe(self, histogram: Histogram, seconds: float, *labels: str) -> None:
        histogram.labels(*labels).observe(seconds)
        self._labels[histogram].add(labels)

    @contextlib.contextmanager
    def sending(self, sender: Sender, carrier: dict[str, str]) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._observe(self._send, time.perf_counter() - began, sender._name)

    @contextlib.contextmanager
    def copying(self, channel: str, nbytes: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._observe(self._copy, time.perf_counter() - began, channel)

    @contextlib.contextmanager
    def receiving(self, receiver: Receiver, delivery: _observing.Delivery) -> Iterator[None]:
        yield
        age = delivery.postmark.age if delivery.postmark is not None else None
        if age is not None:
            self._observe(self._delivery, age, receiver._name, str(receiver.rank))


def install(
    registry: CollectorRegistry = REGISTRY, *, histograms: bool = False, buckets: Sequence[float] = BUCKETS
) -> ChannelCollector:
    """Have a registry collect from all ends of this process.

    Args:
        registry: The registry; by default that of ``prometheus_client``.
        histograms: Whether to measure how long sends, copies and deliveries take. That takes some microseconds of each
            message. Deliveries show if this is on at both ends of a channel; the receiving process has the histogram.
        buckets: Upper bounds of the histograms, in seconds.

    Returns:
        The collector; its ``uninstall`` ends it.

    Raises:
        ValueError: The registry has these metrics already.
    """
    times = _Times(buckets) if histograms else None
    collector = ChannelCollector(registry, times)
    registry.register(collector)
    if times is not None:
        _observing.observe(times)
    return collector

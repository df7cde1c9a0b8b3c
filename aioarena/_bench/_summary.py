"""Tables of `bench compare`: what the rounds of an alternative come to."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from aioarena._bench._result import Section
from aioarena._bench._text import show_micros, show_seconds

if TYPE_CHECKING:
    from aioarena._bench._scenarios import Scenario
    from aioarena._bench._sides import Report
    from aioarena._bench.compare import Pair

# A message that takes so many times the median is counted as slow.
_SLOW = 3


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least so many percent of all are not above."""
    if not samples:
        raise ValueError("no samples")
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


def ratio(value: float | None, base: float | None) -> str:
    """How many times the base a value is, for tables; a dash where there is nothing to compare."""
    if value is None or base is None or base <= 0:
        return "-"
    times = value / base
    return f"{times:.2f}" if times < 10 else f"{times:,.0f}"


def slow(samples: Sequence[float]) -> int:
    """How many samples are more than ``_SLOW`` times the median."""
    limit = _SLOW * median(samples)
    return sum(sample > limit for sample in samples)


def _share(value: float) -> str:
    return f"{value:.1%}"


# One column: its header, the key of the record, and how to show it.
_Column = tuple[str, str, Callable[[Any], str]]

_COLUMNS: dict[str, list[_Column]] = {
    "paced": [
        ("p50", "value", show_seconds),
        ("p99", "p99", show_seconds),
        ("worst", "worst", show_seconds),
        ("CPU us: sender", "sender_cpu", show_micros),
        ("a reader", "reader_cpu", show_micros),
    ],
    "burst": [
        ("messages/s", "value", lambda value: f"{value:,.0f}"),
        ("slowest run", "worst", lambda value: f"{value:,.0f}"),
        ("CPU us: sender", "sender_cpu", show_micros),
        ("a reader", "reader_cpu", show_micros),
    ],
    "answered": [
        ("first", "first", show_seconds),
        ("first ones", "first_median", show_seconds),
        ("median", "value", show_seconds),
        ("worst", "worst", show_seconds),
        (f"over {_SLOW}x", "slow", str),
        ("send()", "send", show_seconds),
        ("CPU, all", "cpu", show_seconds),
    ],
    "idle": [("CPU: sender", "sender_cpu", _share), ("busiest reader", "value", _share)],
    "stall": [
        ("sender", "value", show_seconds),
        ("worst", "worst", show_seconds),
        ("reader", "reader", show_seconds),
        ("worst", "reader_worst", show_seconds),
        ("idle: sender", "sender_still", show_seconds),
        ("reader", "reader_still", show_seconds),
    ],
}

_EXPLAINED = {
    "paced": "Latency from the call of send until a reader has the message; CPU time of the whole process for one message, "
    "with the sender's timer.",
    "burst": "Median of the runs; CPU time of the whole process for one message.",
    "answered": "From the call of send until every reader has read a byte of each page; the next is sent only then. The "
    "first on a new channel, the median of the first ones, then median and worst of all others, and how many of them took "
    f"over {_SLOW} times the median; how long send() took; CPU time of all processes for one message, with the reading.",
    "idle": "CPU time by wall time, with the channel open and the readers waiting.",
    "stall": "How late a timer of 1 ms was at worst: median and worst of the runs, and median while nothing was sent. "
    "Readers receive, and read nearly nothing.",
}


def _kind(scenario: Scenario) -> str:
    return "stall" if scenario.stalls else scenario.way


def _record(pair: Pair) -> dict[str, Any]:
    """What came of a pair: the numbers of its row, then all samples."""
    record: dict[str, Any] = {
        "scenario": pair.scenario.name,
        "alternative": pair.alternative.name,
        "readers": pair.readers,
        "sent": pair.sent,
        "received": pair.received,
    }
    if pair.failure is not None:
        return record | {"failure": pair.failure[0], "why": pair.failure[1]}
    senders = [sender for sender, _ in pair.rounds]
    readers = [reports for _, reports in pair.rounds]
    record |= _NUMBERS[_kind(pair.scenario)](pair, senders, readers)
    rounds = [pair.first, *pair.rounds] if pair.first is not None else pair.rounds
    record["rounds"] = [
        {"sender": dataclasses.asdict(sender), "readers": [dataclasses.asdict(report) for report in reports]}
        for sender, reports in rounds
    ]
    return record


def _cpu(senders: list[Report], readers: list[list[Report]]) -> dict[str, float]:
    return {
        "sender_cpu": median(sender.cpu / sender.count for sender in senders),
        "reader_cpu": median(report.cpu / report.count for reports in readers for report in reports),
    }


def _paced(pair: Pair, senders: list[Report], readers: list[list[Report]]) -> dict[str, Any]:
    latencies = [latency for reports in readers for report in reports for latency in report.latencies]
    found = {"value": median(latencies), "p99": percentile(latencies, 99), "worst": max(latencies)}
    return found | _cpu(senders, readers)


def _burst(pair: Pair, senders: list[Report], readers: list[list[Report]]) -> dict[str, Any]:
    rates = [
        sender.count / (max(report.ended for report in reports) - sender.began)
        for sender, reports in zip(senders, readers, strict=True)
    ]
    return {"value": median(rates), "worst": min(rates)} | _cpu(senders, readers)


def _answered(pair: Pair, senders: list[Report], readers: list[list[Report]]) -> dict[str, Any]:
    assert pair.first is not None
    done = [each for sender in senders for each in sender.done]
    cpu = [
        (sender.cpu + sum(report.cpu for report in reports)) / sender.count
        for sender, reports in zip(senders, readers, strict=True)
    ]
    return {
        "first": pair.first[0].done[0],
        "first_median": median(pair.first[0].done),
        "value": median(done),
        "worst": max(done),
        "slow": slow(done),
        "count": len(done),
        "send": median(each for sender in senders for each in sender.sends),
        "cpu": median(cpu),
    }


def _idle(pair: Pair, senders: list[Report], readers: list[list[Report]]) -> dict[str, Any]:
    seconds = pair.scenario.seconds
    return {"sender_cpu": senders[0].cpu / seconds, "value": max(report.cpu for report in readers[0]) / seconds}


def _stall(pair: Pair, senders: list[Report], readers: list[list[Report]]) -> dict[str, Any]:
    worst = [max(report.stall for report in reports) for reports in readers]
    return {
        "value": median(sender.stall for sender in senders),
        "worst": max(sender.stall for sender in senders),
        "reader": median(worst),
        "reader_worst": max(worst),
        "sender_still": median(sender.still for sender in senders),
        "reader_still": median(max(report.still for report in reports) for reports in readers),
    }


_NUMBERS: dict[str, Callable[[Pair, list[Report], list[list[Report]]], dict[str, Any]]] = {
    "paced": _paced,
    "burst": _burst,
    "answered": _answered,
    "idle": _idle,
    "stall": _stall,
}


def section(pairs: Sequence[Pair]) -> Section:
    """The table of a scenario."""
    scenario = pairs[0].scenario
    kind = _kind(scenario)
    columns = _COLUMNS[kind]
    records = [_record(pair) for pair in pairs]
    floored = any(record["alternative"].startswith("floor") for record in records)
    compared = kind in ("paced", "burst", "answered")
    header = ["readers", *[header for header, _, _ in columns], *(["x floor" if floored else "x best"] if compared else [])]
    explained = textwrap.fill(_EXPLAINED[kind], 118)
    made = Section(f"{scenario.title}\n{explained}", [scenario.name, *header], records=records)
    before = None
    for record in records:
        readers = record["readers"]
        if before not in (None, readers):
            made.rows.append([])
        before = readers
        row = [record["alternative"], str(readers)]
        if "failure" in record:
            made.rows.append([*row, record["failure"], *["-"] * (len(header) - 2)])
            made.notes.append(f"{record['alternative']}, {readers} readers: {record['failure']}: {record['why']}")
            continue
        row += [show(record[key]) for _, key, show in columns]
        if compared:
            record["base"] = base = _base(records, readers, floored, most=kind == "burst")
            row.append(ratio(record["value"], base))
        made.rows.append(row)
    return made


def _base(records: list[dict[str, Any]], readers: int, floored: bool, *, most: bool) -> float | None:
    """What others are compared with: the lower floor, or the best."""
    values = [
        record["value"]
        for record in records
        if record["readers"] == readers and "value" in record and (not floored or record["alternative"].startswith("floor"))
    ]
    return (max if most else min)(values) if values else None

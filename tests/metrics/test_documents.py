"""The page and the dashboard name what the collector exports, and nothing else."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from aioarena.integrations import prometheus

DOCS = Path(__file__).parents[2] / "docs"
HISTOGRAMS = {
    "aioarena_send_duration_seconds": ("channel",),
    "aioarena_copy_duration_seconds": ("channel",),
    "aioarena_delivery_duration_seconds": ("channel", "rank"),
}
# What Prometheus adds to every sample.
ADDED = {"instance", "job"}


def exported() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and labels of every family that the collector exports, by name."""
    labels = {metric.name: (*common, *metric.labels) for metrics, common in prometheus._GROUPS for metric in metrics}
    collector = prometheus.install(CollectorRegistry(), histograms=True)
    families = list(collector.describe())
    collector.uninstall()
    return {family.name: (family.type, {**labels, **HISTOGRAMS}[family.name]) for family in families}


def samples() -> dict[str, set[str]]:
    """Labels of everything that can be asked for, by name."""
    found: dict[str, set[str]] = {}
    for name, (kind, labels) in exported().items():
        for ending in {"counter": ["_total"], "gauge": [""], "histogram": ["_count", "_sum"]}[kind]:
            found[name + ending] = {*labels, *ADDED}
        if kind == "histogram":
            found[name + "_bucket"] = {*labels, *ADDED, "le"}
    return found


def test_the_page_lists_every_metric_with_type_and_labels() -> None:
    rows = re.findall(r"^\| `(aioarena_\w+)` \| (\w+) \| ([^|]*) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    listed = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(rows) == len(listed)
    assert listed == {
        name + ("_total" if kind == "counter" else ""): (kind, labels) for name, (kind, labels) in exported().items()
    }


def test_the_page_says_which_fields_of_the_statistics_each_metric_is_made_of() -> None:
    rows = re.findall(r"^\| `(aioarena_\w+)` \|.*\| ([^|]*) \|$", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    listed = {name.removesuffix("_total"): re.findall(r"`(\w+)`", fields) for name, fields in rows}
    for metrics, _ in prometheus._GROUPS:
        for metric in metrics:
            reading = Reading()
            list(metric.read(reading))
            assert listed[metric.name] == reading.fields, metric.name


class Reading:
    """Stands in for statistics, and notes which fields are read."""

    def __init__(self) -> None:
        self.fields: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.fields.append(name)
        return {} if name == "fallbacks" else 0


# The dashboard --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((DOCS / "grafana" / "aioarena.json").read_text())
    return board


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """Expression and legend of each curve."""
    return [(target["expr"], target["legendFormat"]) for panel in panels(dashboard) for target in panel["targets"]]


def test_the_dashboard_has_what_grafana_loads(dashboard: dict[str, Any]) -> None:
    """A new dashboard of a known schema, each panel with a place and an id of its own."""
    assert dashboard["id"] is None and dashboard["uid"] and dashboard["title"] and dashboard["schemaVersion"] >= 36
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = []
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["y"] >= 0 and place["w"] > 0 < place["h"]
        places.append(place)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_every_panel_says_what_it_shows(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), panel["title"]


def test_every_expression_names_metrics_and_labels_that_there_are(dashboard: dict[str, Any]) -> None:
    """With their endings; what it is grouped by and what the legend says are labels of what it asks for."""
    known = samples()
    for expression, legend in queries(dashboard):
        names = re.findall(r"\baioarena_\w+", expression)
        assert names and set(names) <= known.keys(), expression
        labels = set.intersection(*(known[name] for name in names))
        grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")}
        matched = set(re.findall(r"(\w+)=~?\"", expression))
        shown = set(re.findall(r"{{(\w+)}}", legend))
        assert grouped | matched <= labels, expression
        assert shown == grouped - {"le"}, (expression, legend)


def test_every_counter_is_asked_for_its_rate_and_no_gauge(dashboard: dict[str, Any]) -> None:
    for expression, _ in queries(dashboard):
        for name in re.findall(r"\baioarena_\w+", expression):
            counts = name.endswith(("_total", "_bucket"))
            assert counts == bool(re.search(rf"rate\({name}{{[^}}]*}}\[\$__rate_interval\]\)", expression)), expression


def test_variables_are_known_and_used(dashboard: dict[str, Any]) -> None:
    """Each expression is bound to what is chosen, and every data source is the one chosen."""
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    text = json.dumps(dashboard)
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}
    assert used == set(variables)
    assert set(re.findall(r'"uid": "([^"]*)"', text)) == {"${datasource}", dashboard["uid"]}
    for expression, _ in queries(dashboard):
        for selector in re.findall(r"aioarena_\w+({[^}]*})", expression):
            assert all(f'{name}=~"${name}"' in selector for name in variables if name != "datasource"), expression
    for variable in variables.values():
        if variable["type"] == "query":
            (pattern,) = re.findall(r'__name__=~"([^"]*)"', variable["definition"])
            assert len([name for name in samples() if re.fullmatch(pattern, name)]) == 2


def test_the_dashboard_shows_every_histogram(dashboard: dict[str, Any]) -> None:
    asked = " ".join(expression for expression, _ in queries(dashboard))
    assert all(f"{name}_bucket" in asked for name in HISTOGRAMS)

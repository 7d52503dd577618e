"""The Grafana dashboard is valid, and the queries of dashboard and alerts name existing metrics."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from stillroom.telemetry.catalogue import SPECS

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
}
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"

LABELS = {
    name: {*spec.labels, "job", *({"le"} if name.endswith("_bucket") else set())}
    for spec in SPECS
    for name in (
        [f"{spec.name}_{part}" for part in ("bucket", "sum", "count")] if spec.kind == "histogram" else [spec.name]
    )
} | {"up": {"job"}}
"""Labels of each series."""


def panels(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DASHBOARDS[name]["panels"]
    return found


def variables(name: str) -> list[str]:
    """Return the queries of a dashboard's variables, which name one series each."""
    queries = [one["query"]["query"] for one in DASHBOARDS[name]["templating"]["list"] if one["type"] == "query"]
    return [re.sub(r"^label_values\((\w+), job\)$", r"\1", query) for query in queries]


def queries() -> Iterator[str]:
    for name in DASHBOARDS:
        yield from variables(name)
        for panel in panels(name):
            for target in panel.get("targets", ()):
                yield target["expr"].replace("$__rate_interval", "1m")
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
    page = (ROOT / "docs" / "metrics.md").read_text()
    for block in re.findall(r"```promql\n(.*?)```", page, re.DOTALL):
        yield from (query for query in block.split("\n") if query and not query.startswith("#"))


def selectors(query: str) -> list[tuple[str, set[str]]]:
    """Return the series of a query, with the labels that select them."""
    found = re.findall(r"\b((?:stillroom_\w+)|up)\b(?:\{([^}]*)\})?", query)
    return [(name, set(re.findall(r"(\w+)\s*[=!]~?", chosen))) for name, chosen in found]


def test_queries_of_dashboard_alerts_and_page_are_collected() -> None:
    assert list(DASHBOARDS) == ["cluster", "stillroom"] and len(list(queries())) > 50


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_query_is_valid_and_names_existing_series_and_labels(query: str) -> None:
    promql_parser.parse(query)  # raises

    found = selectors(query)
    assert found
    for name, chosen in found:
        assert name in LABELS, name
        assert chosen <= LABELS[name], (name, chosen)
    known = set().union(*(LABELS[name] for name, _ in found))
    for grouped in re.findall(r"\b(?:by|without|ignoring|on) \(([^)]*)\)", query):
        assert {label.strip() for label in grouped.split(",")} <= known, grouped


@pytest.mark.parametrize(("name", "uid"), [("stillroom", "stillroom-overview"), ("cluster", "stillroom-cluster")])
def test_dashboard_is_valid_for_grafana(name: str, uid: str) -> None:
    raw = DASHBOARDS[name]
    dashboard = Dashboard.from_json(raw)

    assert dashboard.uid == uid and dashboard.schema_version >= 39
    written = json.loads(json.dumps(dashboard.to_json(), default=lambda value: value.to_json()))
    assert {key for key, value in raw.items() if value} <= set(written), "a field that Grafana does not know"
    assert all(isinstance(panel, Panel) or panel.type_val == "row" for panel in dashboard.panels or ())


def test_metrics_of_engines_are_on_the_dashboard_of_the_cluster() -> None:
    shown = json.dumps(DASHBOARDS["cluster"])
    engines = {spec.name for spec in SPECS if "engine" in spec.labels}
    assert len(engines) > 10 and {name for name in engines if name not in shown} == set()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_distinct_ids_and_do_not_overlap(name: str) -> None:
    ids = [panel["id"] for panel in panels(name)]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in panels(name):
        at = panel["gridPos"]
        own = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not own & cells and at["x"] + at["w"] <= 24, panel["title"]
        cells |= own


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_uses_the_chosen_source_and_has_a_description(name: str) -> None:
    for panel in panels(name):
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"]
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)

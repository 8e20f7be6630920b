"""The dashboard for Grafana asks for nothing that a server does not tell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.process_collector import ProcessCollector

from cloud_server.core import Core
from cloud_server.telemetry import TOTALS, RequestCounts, ServerState

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "deploy" / "grafana" / "dashboards" / "isthmus.json"
ENDINGS = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
WORDS = re.compile(r"\b(?:isthmus|process)_\w+")


def reported() -> set[str]:
    """Names of all that a server's page may hold."""
    registry = CollectorRegistry()
    with Core([]) as core:
        registry.register(RequestCounts(core.engines))
        registry.register(ServerState(core, dict.fromkeys(TOTALS, int)))
        ProcessCollector(registry=registry)
        page = generate_latest(registry).decode()
    kinds = re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE)
    return {name + ending for name, kind in kinds for ending in ENDINGS[kind]}


def panels() -> list[dict[str, Any]]:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_each_metric_of_the_dashboard_is_reported() -> None:
    asked = {word for panel in panels() for target in panel["targets"] for word in WORDS.findall(target["expr"])}
    assert len(asked) > 30
    assert asked - reported() == set()


def test_the_dashboard_shows_all_there_is_to_see() -> None:
    asked = BOARD.read_text(encoding="utf-8")
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in reported() if name.startswith("isthmus_")}
    assert {name for name in families if name not in asked} == set()


def test_panels_can_be_distinguished_and_lie_beside_each_other() -> None:
    places: set[tuple[int, int]] = set()
    for panel in panels():
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & places and all(0 <= x < 24 for x, _ in cells), panel["title"]
        places |= cells
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in panels()}) == len({panel["title"] for panel in panels()}) == len(panels())

"""The page of a plan, in a headless browser: the graph, the cut through it, and what is won."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edge_client
from edge_client.planning.mincut import INPUTS, Best, CutGraph, CutNode, CutTensor
from edge_client.planning.page import drawn, render
from edge_client.tasks.plan import Planned
from shared_hooks.models import load_spec
from tests.edge_client.test_branches import served

SPEC = """
id = "stages"
factory = "tests.zoo.branching:TwoStages"
[example]
args = [{shape = [1, 3, 6, 6]}]
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planned]:
    path = tmp_path_factory.mktemp("stages") / "stages.toml"
    path.write_text(SPEC)
    with served(load_spec(path)) as address:
        yield edge_client.plan(address, str(path), uplink="1mbit", rtt="2ms", seconds=0.3, progress=False)


@pytest.mark.parametrize("dark", [False, True])
def test_page_is_readable_at_every_width(opened: Any, plan: Planned, tmp_path: Path, dark: bool) -> None:
    plan.write_page(tmp_path / "plan.html")
    assert plan.branches is not None
    shown = opened((tmp_path / "plan.html").read_text(), 1400, dark)
    assert shown.count("#figure-graph rect") == len(plan.branches.graph.nodes) + 1
    assert shown.count("tbody tr") == len(plan.candidates)
    shown.fits_everywhere()


def test_the_numbers_are_the_graphs(opened: Any, plan: Planned) -> None:
    shown = opened(render(plan.model, plan.decision, plan.candidates, plan.branches))
    with shown.page.expect_download() as download:
        shown.page.locator("#figure-graph [data-save=csv]").click()
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert {row["to"] for row in rows if row["from"] == "input"} == {"backbone.0"}
    assert sum(row["crosses"] == "yes" for row in rows) == shown.count("#figure-graph text.label")


def test_without_a_graph_there_are_the_ways(opened: Any, plan: Planned) -> None:
    shown = opened(render("<b>of data</b>", plan.decision, plan.candidates, None))
    assert shown.count("svg") == 0 and shown.count("tbody tr") == len(plan.candidates)
    assert "<b>of data</b>" in shown.page.locator("h1").inner_text()


def test_blocks_of_one_side_are_drawn_as_one_and_what_crosses_is_summed() -> None:
    nodes = [
        CutNode(f"stage.{at // 10}.layer{at % 10}", 10.0, 1.0, needs={at - 1} if at else set()) for at in range(60)
    ]
    tensors = [CutTensor(1.0, {at - 1 if at else INPUTS}, {at}, nbytes=100) for at in range(60)]
    best = Best(("stage.2",), 1.0, 100, (), graph=CutGraph(nodes, tensors), own=frozenset(range(25)))
    found = drawn(best)
    assert [(one["name"], one["edge"], one["count"]) for one in found["nodes"]] == [
        ("input", True, 0), ("stage.0", True, 10), ("stage.1", True, 10), ("stage.2", True, 5), ("stage.2", False, 5),
        ("stage.3", False, 10), ("stage.4", False, 10), ("stage.5", False, 10),
    ]  # fmt: skip
    assert [one["ns"] for one in found["nodes"]] == [0, 100, 100, 50, 5, 10, 10, 10]
    assert [(one["from"], one["to"]) for one in found["edges"] if one["crosses"]] == [(3, 4)]
    assert [one["level"] for one in found["nodes"]] == list(range(8))

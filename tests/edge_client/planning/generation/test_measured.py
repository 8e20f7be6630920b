"""What was measured is kept and read again, and answers the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_client.call import Load
from edge_client.planning.generation import KEY, MeasuredGeneration, Overhead, Workload, read_measured
from shared_hooks.errors import SpecError
from shared_hooks.profiling.decoding import LineFit
from tests.edge_client.planning.generation.decoder import decoder, link

MADE = MeasuredGeneration(
    decoder("edge", 5),
    decoder("edge", 6),
    decoder("cloud", 1),
    link(),
    Overhead(-300.0, LineFit(150, 1)),
    Load(1, 2, 5e5),
)


def test_the_same_is_predicted_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"model": "made", KEY: MADE.as_dict()}))
    found, work = read_measured(tmp_path / "plan.json"), Workload(300, 20)
    for one, other in zip(MADE.candidates(work), found.candidates(work), strict=True):
        assert other.reply.latency_ns == pytest.approx(one.reply.latency_ns)
        assert other.token.bytes_up == one.token.bytes_up


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "measured: missing"),
        ({KEY: {**MADE.as_dict(), "edge": {}}}, "measured.edge: no decoding profile"),
        ({KEY: {**MADE.as_dict(), "link": {"source": "x", "up_points": [[5]], "down_points": []}}}, "up_points"),
        ({KEY: {**MADE.as_dict(), "overhead": {}}}, "overhead"),
    ],
)
def test_another_file_is_refused_by_place(data: object, says: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(SpecError, match=says):
        read_measured(tmp_path / "plan.json")

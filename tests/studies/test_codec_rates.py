"""The study of codecs: what was kept reaches what is to be reached, and what it does is what an edge does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from studies.benchmarks.codec_maps import CUTS
from studies.codecs import rates

ROOT = Path(__file__).parents[2]
KEPT: list[dict[str, Any]] = json.loads((ROOT / "docs" / "results" / "codecs.json").read_text())["rates"]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("codec", "ratio", "points"), [("int1", 32, 1.0), ("int4", 8, 0.1), ("int3", 8, 0.1)])
def test_so_few_bytes_lose_so_little(cut: str, codec: str, ratio: float, points: float) -> None:
    found = [one for one in KEPT if (one["cut"], one["codec"]) == (cut, codec)]
    assert {one["images"] for one in found} == {"held out", "distorted"}
    for one in found:
        assert one["ratio"] >= ratio and one["loss_points"] < points


def test_a_short_study_finds_what_was_kept() -> None:
    found = rates.measure(copies=0, names=("sparse", "int2"), cuts=CUTS[2:3])
    for one in found:
        [kept] = [old for old in KEPT if all(old[name] == one[name] for name in ("images", "cut", "codec"))]
        assert one["ratio"] == pytest.approx(kept["ratio"], rel=0.05)
        assert one["agreement"] == pytest.approx(kept["agreement"], abs=0.006)

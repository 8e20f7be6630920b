"""What `prune` reports, as JSON and as a page. ``golden/report.json`` is what an earlier version wrote of the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from edge_client.pruning import page
from edge_client.pruning.data import Judged, MaskRow, Trial
from edge_client.pruning.page import PruneReport, Served, ServedWay, Smaller
from shared_hooks.selection import Mask
from shared_hooks.selection.capture import Captured

GOLDEN = Path(__file__).parent / "golden" / "report.json"


def trial() -> Trial:
    zeros = torch.zeros(4, dtype=torch.float64)
    captured = Captured("stem", 1, zeros, zeros, zeros, zeros, zeros.expand(2, 4), ("cat", None))

    def row(scoring: str, seed: int, keep: int, right: float, calibrated: float | None) -> MaskRow:
        judged = Judged(right, right / 2)
        own = None if calibrated is None else Judged(calibrated, 1.0)
        return MaskRow(scoring, seed, keep, judged, own, Mask("stem", 1, tuple(range(keep)), (0.0,) * 4))

    rows = (
        row("variance", 0, 1, 0.5, 0.625),
        row("variance", 0, 2, 0.75, 0.5),
        row("l1", 0, 1, 0.25, 0.625),
        row("l1", 0, 2, 0.5, 0.875),
        row("random", 0, 1, 0.25, None),
        row("random", 1, 1, 0.125, None),
        row("random", 0, 2, 0.375, None),
    )
    return Trial(captured, "stem", Judged(0.875, 1.0), rows, {"clusters": "no places"})


def report() -> PruneReport:
    folder = Path("out")
    return PruneReport(
        model="tiny",
        layer="stem",
        trial=trial(),
        calibration_inputs=8,
        inputs=16,
        random_seeds=2,
        smaller=(Smaller(2, "l1", Judged(0.5, 0.25), 0.375, 90, 120),),
        served=(
            Served(ServedWay("whole", 4, "stem", None), 400, 450, 2e6, (1e6, 3e6), 8, 7, 8),
            Served(
                ServedWay("mask", 2, "stem.select", folder / "mask-2.safetensors"),
                200,
                250,
                1e6,
                (5e5, 2e6),
                8,
                None,
                8,
            ),
        ),
        files=("out/mask-2.safetensors",),
    )


def test_the_json_is_as_it_was() -> None:
    assert json.dumps(report().as_dict(), indent=1) + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_names_are_text_on_the_page_whatever_things_are_called() -> None:
    plain = page.render(report())
    text = page.render(replace(report(), model="<script>x</script>", layer='"><img src=x>'))
    assert text.count("<script") == plain.count("<script") == 2 and "<img" not in text

"""The study of codecs, on few images: what it counts is what is sent, and frames do what each alone does in less."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from studies.codecs import basis, frames
from studies.codecs.__main__ import main
from studies.codecs.digits import bounds


def test_bounds_hold_the_share() -> None:
    assert bounds(0, 100)[0] == 0 and 0.03 < bounds(0, 100)[1] < 0.04
    assert bounds(50, 100)[0] < 0.5 < bounds(50, 100)[1]


def test_smaller_steps_send_more_and_lose_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(basis, "CUTS", ("stage2.0",))
    monkeypatch.setattr(basis, "STEPS", (0.5, 8.0))
    assert main(["basis", "--quick", "--json", str(tmp_path / "kept.json")]) == 0
    fine, coarse = json.loads((tmp_path / "kept.json").read_text())["basis"]
    assert fine["ratio"] < coarse["ratio"] and fine["differ"] < coarse["differ"]
    assert fine["ratio_with_header"] < fine["ratio"]
    assert "stage2.0.relu#2" in capsys.readouterr().out


def test_differences_of_frames_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "CUTS", ("stage2.0",) * 4)
    monkeypatch.setattr(frames, "STEPS", (1.0,))
    monkeypatch.setattr(frames, "MOTIONS", ((0.002, 0.0),))
    found = frames.run(argparse.Namespace(quick=True))
    assert len(found) == 2 and all(line["ratio"] > 1 for line in found)

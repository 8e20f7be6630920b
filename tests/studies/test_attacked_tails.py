"""A short part of the attacks on tails by name: outcomes, and no timings."""

from __future__ import annotations

from pathlib import Path

from studies.attacks.tails import tried


def test_every_request_is_refused_by_name_or_right(tmp_path: Path) -> None:
    row = tried(1.0, 40, 3, tmp_path)
    assert row["faults"] == [] and row["asked"] == 40 and row["answered as torch's tail"]
    assert {"InputMismatch", "BadFrame", "answered"} <= row["said"].keys()

"""The study of Ray Serve: its figures stand in the docs as they were kept."""

from __future__ import annotations

import json

from studies.chaos.served import ROOT
from studies.ray.table import table


def test_the_docs_have_the_kept_figures() -> None:
    kept = json.loads((ROOT / "docs" / "results" / "ray.json").read_text())
    page = (ROOT / "docs" / "results" / "ray.md").read_text()
    assert kept["command"]
    missing = [line for line in table(kept).splitlines() if line not in page]
    assert not missing

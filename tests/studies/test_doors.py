"""The study of doors: what a client brings back is looked at, and can fall short."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from studies.doors.process import ROOT
from studies.doors.scraping import WITHOUT, explained
from studies.doors.triton import checked

KEPT = json.loads((ROOT / "docs" / "results" / "doors.json").read_text())
UNKNOWN, ONE = '[404] UnknownModel: no model "nobody"', '[400] InputMismatch: no input "x"'
WELL = {
    "whole model, the same bits": True,
    "tail, the same bits": True,
    "models": ["digits", "digits@stage2.0.conv2"],
    "refused": [UNKNOWN, ONE],
}


def test_recorded_answers_are_reproduced() -> None:
    for kind in ("gRPC", "HTTP"):
        checked(kind, KEPT[f"tritonclient, {kind}"])
    assert set(KEPT["Prometheus"]["panels without"]) <= WITHOUT and KEPT["server's exit status"] == 0


@pytest.mark.parametrize(
    ("ill", "said"),
    [
        ({"whole model, the same bits": False}, "not whole model, the same bits"),
        ({"tail, the same bits": False}, "not tail, the same bits"),
        ({"models": []}, r"models are \[\]"),
        ({"models": ["digits", "mine"]}, "models are"),
        ({"refused": []}, "refused was"),
        ({"refused": [UNKNOWN]}, "refused was"),
        ({"refused": ["connection refused", ONE]}, "refused was"),
        ({"refused": [UNKNOWN, "connection refused"]}, "refused was"),
    ],
)
def test_an_answer_that_falls_short_is_reported(ill: Mapping[str, Any], said: str) -> None:
    assert checked("me", dict(WELL)) == WELL
    with pytest.raises(RuntimeError, match=f"me: {said}"):
        checked("me", {**WELL, **ill})


def test_only_two_panels_may_be_empty() -> None:
    explained({"Requests": 1, **dict.fromkeys(WITHOUT, 0)})
    with pytest.raises(RuntimeError, match="panels without data: Requests$"):
        explained({"Requests": 0, **dict.fromkeys(WITHOUT, 0)})
    with pytest.raises(RuntimeError, match="none at all"):
        explained({})

"""The study of cameras: what its machine's console tells, and the examples that it runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_client import sources
from studies.cameras.__main__ import line
from studies.cameras.v4l2 import CASES, COUNTED, EXPECTED, RUN, TAKEN, outcomes

EXAMPLES = Path(__file__).parents[2] / "examples"
KEPT = json.loads((Path(__file__).parents[2] / "docs" / "results" / "cameras.json").read_text())["cases"]
SOURCE = {"taken": 5, "answered": 5, "dropped": 9, "frames_per_second": 0.2}
FAULTS = [
    ("320x180", [180, 320, 3], [360, 320, 3]),
    ("333x111 gray", [111, 333, 3], "InputMismatch: /dev/video0: no"),
    ("another user", EXPECTED["another user"], [480, 640, 3]),
    (TAKEN, [0, 1, 5, 7, 10, 12, 15, 18], []),
    (TAKEN, [0, 1, 5, 7, 10, 12, 15, 18], [0, 1, 5, 7, 7, 12, 15, 18]),
    (COUNTED, [8, 12], [8, 0]),
    (RUN, [0, SOURCE], [1, SOURCE]),
    (RUN, [0, SOURCE], [0, {**SOURCE, "answered": 4}]),
    (RUN, [0, SOURCE], [0, {**SOURCE, "taken": 0, "answered": 0}]),
    ("the process in the machine", 0, 1),
]


def console(reported: dict[str, Any]) -> str:
    return "[    7.6] vivid-000: a V4L2 device\n" + "".join(f"outcome: {json.dumps(one)}\n" for one in reported.items())


def kept() -> dict[str, Any]:
    """What the machine reported in the run whose result is kept; the status of `run` was not."""
    cases = {one["case"].removeprefix("V4L2: "): one for one in KEPT if one["case"].startswith("V4L2: ")}
    texts = {case: one["reported"] for case, one in cases.items() if case != RUN}
    lists = {case: json.loads(text) if text[0] in "[0" else text for case, text in texts.items()}
    return {**lists, RUN: [0, cases[RUN]["source"]]}


def test_the_machine_that_was_run_reported_what_must_come() -> None:
    found = outcomes(console(kept()))
    assert {one.case.removeprefix("V4L2: ") for one in found} == set(CASES)
    assert not [one for one in found if one.fault]


@pytest.mark.parametrize(("case", "right", "wrong"), FAULTS)
def test_shortfalls_are_noticed(case: str, right: Any, wrong: Any) -> None:
    (well,) = [one for one in outcomes(console({**kept(), case: right})) if one.fault or one.case.endswith(case)]
    (ill,) = [one for one in outcomes(console({**kept(), case: wrong})) if one.fault]
    assert not well.fault and ill.case == f"V4L2: {case}" and "FALLS SHORT: expected" in line(ill)


def test_unreported_fields_are_noticed() -> None:
    reported = kept()
    del reported["1280x720 rgb24"]
    (none,) = [one for one in outcomes(console(reported)) if one.fault]
    assert none.case == "V4L2: 1280x720 rgb24" and none.status == 1
    assert outcomes("")[-1].fault == "the machine did not come to its end" and len(outcomes("")) == len(CASES) + 1


def test_a_run_is_a_line() -> None:
    (run,) = [one for one in outcomes(console({RUN: [3, SOURCE]})) if one.case.endswith(RUN)]
    assert "  3  FALLS SHORT: expected status 0" in line(run) and "5 taken, 9 dropped, 0.2 frames/s" in line(run)


class Picamera:
    """As much of picamera2 as the example calls."""

    open = 0

    def __init__(self) -> None:
        Picamera.open += 1

    def create_video_configuration(self, main: dict[str, Any]) -> dict[str, Any]:
        return main

    def configure(self, main: dict[str, Any]) -> None:
        assert main["format"] == "BGR888"
        self.size = main["size"]

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None:
        Picamera.open -= 1

    def capture_array(self, name: str) -> sources.Pixels:
        return np.full((self.size[1], self.size[0], 3), 7, np.uint8)


def test_the_example_for_picamera2_gives_frames_and_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("picamera2")
    stand_in.Picamera2 = Picamera  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "picamera2", stand_in)
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / "raspberry_pi_picamera2.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with sources.live(example.frames(64, 48), "picamera2") as source:
        assert source.first().pixels.shape == (48, 64, 3)  # type: ignore[union-attr]
    assert Picamera.open == 0

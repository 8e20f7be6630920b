"""The study of cameras: what its machine's console tells, and the examples that it runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_client import sources
from studies.cameras.__main__ import line
from studies.cameras.v4l2 import EXPECTED, outcomes

EXAMPLES = Path(__file__).parents[2] / "examples"
CONSOLE = """
[    7.6] vivid-000: V4L2 capture device registered as video0
outcome: ["320x180", [180, 320, 3]]
outcome: ["333x111 gray", "InputMismatch: /dev/video0: no"]
outcome: ["another user", "USER"]
outcome: ["edge-client run --input /dev/video0", [0, {"taken": 5, "dropped": 9, "frames_per_second": 0.2}]]
""".replace("USER", EXPECTED["another user"])


def test_what_the_machine_tells() -> None:
    size, none, user, run, end = outcomes(CONSOLE)
    assert not size.fault and not user.fault and not run.fault
    assert none.fault == "no picture" and "did not come to its end" in end.fault
    assert "5 taken, 9 dropped, 0.2 frames/s" in line(run) and "FALLS SHORT: no picture" in line(none)
    assert len(outcomes(CONSOLE + 'outcome: ["the process in the machine", 0]')) == 5


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

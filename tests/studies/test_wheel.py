"""The study of wheel and sdist: each is tried with each Python that is named, and what failed counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from studies import wheel


def test_wheel_and_sdist_are_tried_with_each_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.whl", "a.tar.gz"):
        (tmp_path / name).touch()
    asked: list[tuple[str, str]] = []

    def tried(folder: Path, interpreter: str, file: Path, flags: list[str]) -> dict[str, Any]:
        asked.append((interpreter, file.name))
        if (interpreter, file.suffix) == ("two", ".gz"):
            raise RuntimeError("no")
        return {"python": interpreter}

    monkeypatch.setattr(wheel, "tried", tried)
    monkeypatch.setattr(wheel, "compared", lambda *_: {})
    result = tmp_path / "wheel.json"
    words = [
        "--dist",
        str(tmp_path),
        "--python",
        "one",
        "--python",
        "two",
        "--pip-flags",
        "-q -q",
        "--json",
        str(result),
    ]
    monkeypatch.setattr(sys, "argv", ["wheel", *words])
    assert wheel.main() == 1
    assert asked == [("one", "a.whl"), ("one", "a.tar.gz"), ("two", "a.whl"), ("two", "a.tar.gz")]
    kept = json.loads(result.read_text())
    assert kept["command"].endswith(f"--python one --python two --pip-flags '-q -q' --json {result}")
    assert [one["of"] for one in kept["tried"] if "failed" in one] == ["sdist"]

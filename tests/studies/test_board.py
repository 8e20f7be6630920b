"""What is typed on the emulated board: the pages' own commands, and the looks at what a power cut left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from studies.board.__main__ import BLOCK, CHECK, CPUS, PICTURES, Following
from tests.docs.pages import ROOT

PAGES = {name: ROOT / "docs" / "jobs" / f"{name}.md" for name in CPUS}


class NoBoard:
    cpu, memory_mib = "none", 0


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_blocks_that_are_typed(name: str, tmp_path: Path) -> None:
    board: Any = NoBoard()
    one = Following(board, PAGES[name], "10.0.2.2:1", tmp_path / "found.json")
    assert {"install", "service", "log"} <= one.blocks.keys()
    text = PAGES[name].read_text(encoding="utf-8")
    assert text.count("studies/board types it") == len(BLOCK.findall(text)), "a note that no block follows"
    assert "--server 10.0.2.2:1 " in one.blocks["service"] and "HOST:PORT" not in one.blocks["service"]
    for path in one.blocks["service"].split():
        if path.startswith("deploy/"):
            assert (ROOT / path).is_file()


def test_a_step_that_fails_is_kept_and_the_next_is_tried(tmp_path: Path) -> None:
    board: Any = NoBoard()
    one = Following(board, PAGES["jetson"], "10.0.2.2:1", tmp_path / "found.json")

    def failing() -> str:
        raise AssertionError("no answer")

    one.step("first", failing)
    one.step("second", lambda: "well")
    found = json.loads((tmp_path / "found.json").read_text())["steps"]
    assert [step["good"] for step in found.values()] == [False, True]
    assert found["first"]["outcome"] == "AssertionError: no answer"


def test_files_after_a_power_cut_are_checked(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "outputs").mkdir()
    lines: list[Any] = [{"format": "isthmus run 1"}]
    for number in range(3):
        picture = tmp_path / "pictures" / f"{number}.png"
        picture.write_bytes(b"1")
        (tmp_path / "outputs" / f"{number}.json").write_text("{}")
        lines.append({"input": [str(picture), 1, 1, 1], "outcome": {}})

    def look() -> dict[str, Any]:
        (tmp_path / "journal").write_text("".join(json.dumps(line) + "\n" for line in lines))
        done = subprocess.run([sys.executable, "-c", CHECK], cwd=tmp_path, capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    whole = {"answered": 3, "twice": 0, "missing": 0, "outputs": 3, "empty files": [], "result": None}
    assert look() == whole
    lines.append(lines[-1])
    (tmp_path / "outputs" / "0.json").rename(tmp_path / "outputs" / "0.txt")
    (tmp_path / "empty").touch()
    assert look() == {**whole, "answered": 4, "twice": 1, "outputs": 2, "empty files": ["empty"]}
    del lines[1:3]
    assert look()["missing"] == 2
    assert len(list((ROOT / "shared_hooks/models/digits/images").iterdir())) == PICTURES

"""A run that is cut off continues where it stopped: no input is given twice, and none is left out."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_client.__main__ import main
from edge_client.commands.run_files import RunJournal
from shared_hooks.errors import InputMismatch, ServerUnavailable, SpecError
from shared_hooks.models import InputItem
from tests.edge_client.commands.test_commands import Captured
from tests.shipped import folder_of
from tests.starts import run

ROOT = Path(__file__).parents[3]
SETTINGS = {"model": "m", "weights": "w"}
KILLER = """
import os, signal

class Killer:
    def __init__(self):
        self.seen = 0

    def before_request(self, event):
        self.seen += 1
        if self.seen == 3:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "images", 6, "*_label*.png")


def words(images: Path, journal: Path) -> list[str]:
    run = ["run", "--split", "edge-only", "--input", str(images), "--journal", str(journal)]
    return [*run, "--threads", "1", "--no-progress"]


def entries(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()[1:]]


def process(
    words: list[str], limit: Callable[[], None] | None = None, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-m", "edge_client", *words], {**os.environ, "PYTHONPATH": str(ROOT)}
    if limit is None:
        return run(command, cwd=folder, env=env)
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, preexec_fn=limit, timeout=300)


def test_a_full_disk_a_kill_and_a_torn_line_lose_nothing(images: Path, tmp_path: Path, capsys: Captured) -> None:
    journal, out = tmp_path / "journal", tmp_path / "out.json"

    first = process(words(images, journal), lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)))
    reported = len(entries(journal))
    assert first.returncode == 2 and "--journal" in first.stderr and "cannot be written" in first.stderr
    assert 0 < reported < 6 and f"{reported} of {reported} inputs answered" in first.stdout
    assert journal.stat().st_size <= 3000 and journal.read_bytes().endswith(b"\n")

    (tmp_path / "killer.py").write_text(KILLER)
    (tmp_path / "edge.toml").write_text('[lifecycle]\nhooks = ["killer:Killer"]\n')
    second = process([*words(images, journal), "--config", str(tmp_path / "edge.toml")])
    assert second.returncode == -signal.SIGKILL
    assert len(entries(journal)) == min(reported + 2, 6)
    with journal.open("a") as file:
        file.write('{"input":["torn')

    assert main([*words(images, journal), "--json", str(out)]) == 0
    shown = capsys.readouterr()
    assert f"{min(reported + 2, 6)} inputs are in {journal} already" in shown.err
    paths = [Path(entry["input"][0]).name for entry in entries(journal)]
    assert sorted(paths) == sorted(path.name for path in images.iterdir())  # each once
    result = json.loads(out.read_text())
    assert result["answered"] == 6 and len(result["inputs"]) == 6 and result["accuracy"] is not None

    assert main(words(images, journal)) == 0  # nothing is left, and no line is reported twice
    assert "0 of 0 inputs" in capsys.readouterr().out and len(entries(journal)) == 6


def test_other_weights_or_another_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    RunJournal(str(path), SETTINGS).close()
    with pytest.raises(SpecError, match="another run .*'w' now.*give another file|another run"):
        RunJournal(str(path), {**SETTINGS, "weights": "v"})
    path.write_text('{"format":"isthmus sweep 1"}\n')
    with pytest.raises(SpecError, match="no journal of a run"):
        RunJournal(str(path), SETTINGS)
    path.write_text(f'{{"format":"isthmus run 1","settings":{json.dumps(SETTINGS)}}}\n{{"rows":1}}\n')
    with pytest.raises(SpecError, match="line 2"):
        RunJournal(str(path), SETTINGS)


def test_transient_errors_are_retried_and_changed_files_are_new_inputs(tmp_path: Path) -> None:
    path, file = tmp_path / "journal", tmp_path / "a.png"
    file.write_bytes(b"1")
    items = [InputItem(file), InputItem(file), InputItem(tmp_path / "missing.png")]
    journal = RunJournal(str(path), SETTINGS)
    left, known = journal.left(items)
    assert left == items and known == []
    journal.add(items[0], {"ok": True}, None)
    journal.add(items[1], {"ok": False}, ServerUnavailable("gone"))
    journal.add(items[2], {"ok": False}, InputMismatch("no file"))
    with pytest.raises(SpecError, match="another run is writing"):
        RunJournal(str(path), SETTINGS)
    journal.close()
    journal = RunJournal(str(path), SETTINGS)
    left, known = journal.left(items)
    assert left == [items[1]] and known == [{"ok": True}, {"ok": False}]
    journal.close()
    file.write_bytes(b"12")
    journal = RunJournal(str(path), SETTINGS)
    assert journal.left(items)[0] == items[:2]
    journal.close()

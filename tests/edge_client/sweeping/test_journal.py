"""The journal: at most one input is lost, and only this very sweep is resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.sweeping.settings import NAME, Journal, difference, open_journal
from shared_hooks.errors import SpecError

SETTINGS: dict[str, Any] = {"model": "toy", "repetitions": 3, "inputs": [["a.png", "1"], ["b.png", "2"]]}


def entry(index: int) -> dict[str, Any]:
    return {"index": index, "input": f"{index}.png", "repetitions": 3, "requests": {}, "rows": {}, "notes": []}


def started(folder: Path, entries: int = 0) -> Journal:
    journal = open_journal(folder)
    journal.begin(SETTINGS, fresh=False)
    for index in range(entries):
        journal.write(entry(index))
    return journal


def test_journal_is_read_back(tmp_path: Path) -> None:
    with started(tmp_path / "new" / "folder", 2) as journal:
        journal.write({"prediction": {"candidates": []}})
        journal.write({"skipped": "cloud-only-file", "why": "it cannot read"})
    with started(tmp_path / "new" / "folder") as journal:
        assert [one["input"] for one in journal.entries()] == ["0.png", "1.png"]
        contents = journal.read()
        assert contents.prediction == {"candidates": []} and contents.done == [0, 1]
        assert contents.skipped == {"cloud-only-file": "it cannot read"} and contents.settings == SETTINGS


@given(lost=st.integers(1, 400))
def test_an_end_that_was_cut_off_is_one_input_and_can_be_written_on(
    tmp_path_factory: pytest.TempPathFactory, lost: int
) -> None:
    folder = tmp_path_factory.mktemp("sweep")
    with started(folder, 3):
        pass
    path = folder / NAME
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(whole[: max(0, len(whole) - lost)])
    kept = sum(1 for end in range(2, 5) if len(b"".join(lines[:end])) <= len(whole) - lost)
    with started(folder) as journal:
        assert len(journal.read().done) == kept
        journal.write(entry(7))
        assert [one["index"] for one in journal.entries()] == journal.read().done == [*range(kept), 7]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "other"}, "model: toy then, other now"),
        ({"repetitions": 5}, "repetitions: 3 then, 5 now"),
        ({"inputs": [["a.png", "1"]]}, "inputs: 2 then, 1 now"),
        ({"inputs": [["a.png", "1"], ["b.png", "9"]]}, "inputs: b.png 2 then, b.png 9 now"),
        ({"codec": "lz4"}, "codec: nothing then, lz4 now"),
    ],
)
def test_another_sweep_is_not_gone_on_with(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with started(tmp_path, 1):
        pass
    with open_journal(tmp_path) as journal, pytest.raises(SpecError, match=f"{said}.*or fresh to"):
        journal.begin({**SETTINGS, **change}, fresh=False)
    with open_journal(tmp_path) as journal:
        assert len(journal.read().done) == 1
        journal.begin({**SETTINGS, **change}, fresh=True)
        assert journal.read().done == []


@given(st.dictionaries(st.sampled_from("abc"), st.one_of(st.integers(), st.lists(st.integers()), st.text())))
def test_nothing_differs_from_itself(settings: dict[str, Any]) -> None:
    assert difference(settings, json.loads(json.dumps(settings))) is None


def test_starting_over_takes_the_old_results_away_and_nothing_else(tmp_path: Path) -> None:
    with started(tmp_path, 1):
        pass
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    with open_journal(tmp_path) as journal:
        journal.begin(SETTINGS, fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, "notes.txt"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(SpecError, match=r"holds something else \(thesis.tex\)"):
        open_journal(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(SpecError, match="^output: .*file"):
            open_journal(out)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpecError, match="cannot be written"):
        open_journal(tmp_path)


def test_a_file_of_another_kind_or_damaged_in_the_middle_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / NAME
    for content in ('{"format": "something else"}\n', '{"rows": 3}\nnonsense\n{}\n', "[1]\n{}\n"):
        path.write_text(content)
        with open_journal(tmp_path) as journal:
            for fresh in (False, True):
                with pytest.raises(SpecError, match=NAME):
                    journal.begin(SETTINGS, fresh=fresh)
        assert path.read_text() == content


def test_two_at_once_are_reported(tmp_path: Path) -> None:
    with started(tmp_path), pytest.raises(SpecError, match="another sweep"):
        open_journal(tmp_path)
    with started(tmp_path):
        pass


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with started(tmp_path, 1) as journal:
        pass
    with (tmp_path / NAME).open("a") as file:
        file.write('nonsense\n{"index":1,"input"\n')
    with open_journal(tmp_path) as journal, pytest.raises(SpecError, match="line 3"):
        journal.begin(SETTINGS, fresh=False)


def test_a_disk_that_fills_up_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(file, data[:-10])

    with started(tmp_path, 1) as journal:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(SpecError, match="No space left"):
            journal.write({"prediction": {"candidates": []}})
        monkeypatch.undo()
        journal.write(entry(1))
        assert [one["index"] for one in journal.entries()] == [0, 1] and journal.read().prediction is None

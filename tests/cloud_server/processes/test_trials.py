"""Cuts tried cold: refused where another answer comes, tried once, bounded, and never in a client's hands."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from cloud_server.config import ModelEntry
from cloud_server.models import ServedModel
from cloud_server.models.engine import Identity
from cloud_server.processes.trials import Trials
from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from shared_hooks.errors import CutRefused
from shared_hooks.models import load_spec
from tests.edge_client.test_processes import CloudProcess
from tests.waiting import PATIENCE, eventually

MODELS = "tests.cloud_server.processes.kept"


def words(name: str) -> list[str]:
    return ["--model", f"{name}={MODELS}:{name}", "--example", f"{name}=1,4"]


def tried(trials: Trials, mine: Identity, cut: str) -> None:
    """Waits for the trial, and raises what came of it."""
    over = threading.Event()
    if trials.wait(mine, cut, 100, over.set):
        assert over.wait(PATIENCE)
    trials.check(mine, cut)


def identity(name: str) -> Identity:
    spec = load_spec(f"{name}={MODELS}:{name}", example="1,4")
    return ServedModel(ModelEntry(spec), torch.device("cpu")).identity


def test_a_cut_that_is_exact_is_tried_once_and_remembered(tmp_path: Path) -> None:
    mine = identity("doubled")
    trials = Trials(words("doubled"), folder=tmp_path)
    for cut in ("1", "0", "input", "2", "1"):
        tried(trials, mine, cut)
    assert trials.trials == 1
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == dict.fromkeys(["1", "input", "0", "2"], "exact")
    again = Trials(words("doubled"), folder=tmp_path)
    tried(again, mine, "1")
    for number in range(50):  # what a hostile client calls its layers starts nothing
        tried(again, mine, f"no such layer {number}")
    assert again.trials == 0


def test_names_that_are_no_layers_start_few_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trials, mine = Trials(words("doubled"), folder=tmp_path), identity("doubled")
    asked: list[str] = []
    monkeypatch.setattr(trials, "_trial", lambda model_id, cut, nbytes: asked.append(cut) or {})
    for number in range(1000):
        tried(trials, mine, f"made up {number}")
    assert len(asked) <= mine.layers + 1


def test_a_server_refuses_a_cut_whose_cold_tail_answers_otherwise(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server = CloudProcess(*words("counted"), "--trials", "auto")
    try:
        spec = load_spec(f"counted={MODELS}:counted", example="1,4")
        with (
            EdgeClient(server.address, ModelChoice(spec, device="cpu"), "first") as client,
            pytest.raises(CutRefused, match="tried in a process of its own"),
        ):
            client.infer(torch.ones(1, 4))
    finally:
        server.end()
    (file,) = (tmp_path / "isthmus" / "trials").iterdir()
    assert set(json.loads(file.read_text()).values()) == {"differs"}


@pytest.mark.parametrize("name", ["sleeps", "hungry"])
def test_a_trial_that_takes_too_much_is_ended_and_the_cut_served(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = identity(name)
    monkeypatch.setenv("ISTHMUS_TEST_SLEEPS", "1")
    trials = Trials(words(name), seconds=8.0 if name == "sleeps" else 30.0, folder=tmp_path)
    tried(trials, mine, "0")
    tried(trials, mine, "0")
    assert trials.trials == 1
    assert "could not be tried" in caplog.text


def test_which_cuts_are_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, library = identity("doubled"), Identity("m", "w", "s", "p", layers=3, packages=("timm", "torch"))
    silent = Identity("m", "w", "s", layers=3, packages=("mine",))
    for mode, wanted in (("auto", [own]), ("always", [own, library]), ("never", [])):
        trials, asked = Trials([], mode, folder=tmp_path / mode), list[str]()
        monkeypatch.setattr(trials, "_trial", lambda model_id, cut, nbytes: asked.append(model_id) or {cut: "exact"})  # noqa: B023
        for one in (own, library, silent):
            tried(trials, one, "0")
        assert asked == [one.model_id for one in wanted], mode


@pytest.mark.parametrize("kept", ["", "{", "[1]", '{"0": 3}', "null"])
def test_a_file_that_is_spoiled_is_none(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = identity("doubled")
    first = Trials([], folder=tmp_path)
    monkeypatch.setattr(first, "_trial", lambda *_: {"0": "exact"})
    tried(first, mine, "0")
    next(tmp_path.iterdir()).write_text(kept)
    second = Trials([], folder=tmp_path)
    monkeypatch.setattr(second, "_trial", lambda *_: {"0": "differs"})
    with pytest.raises(CutRefused):
        tried(second, mine, "0")


def test_a_folder_that_cannot_be_written_to_costs_another_trial_only(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials([], folder=Path("/dev/null/nowhere"))
    monkeypatch.setattr(trials, "_trial", lambda *_: {"0": "exact"})
    tried(trials, identity("doubled"), "0")


def test_a_trial_that_cannot_be_started_delays_no_request_for_good(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError("no process can be started")

    monkeypatch.setattr("cloud_server.processes.trials.subprocess.Popen", none)
    mine, trials = identity("doubled"), Trials([], folder=tmp_path)
    for _ in range(2):
        tried(trials, mine, "0")
    assert trials.trials == 1 and "no process can be started" in caplog.text


def test_requests_wait_for_a_running_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine, trials = identity("doubled"), Trials([], folder=tmp_path)
    begun, continues, over = threading.Event(), threading.Event(), list[int]()

    def trial(model_id: str, cut: str, nbytes: int) -> dict[str, str]:
        begun.set()
        assert continues.wait(PATIENCE)
        return dict.fromkeys(["input", "0", "1", "2"], "differs")

    monkeypatch.setattr(trials, "_trial", trial)
    before = threading.active_count()
    assert trials.wait(mine, "0", 100, lambda: over.append(0)) and begun.wait(PATIENCE)
    for number in range(1, 200):
        assert trials.wait(mine, "01"[number % 2], 100, lambda number=number: over.append(number))
    assert threading.active_count() <= before + 1 and not over
    continues.set()
    eventually(lambda: over == list(range(200)))
    assert not trials.wait(mine, "0", 100, lambda: over.append(-1))
    with pytest.raises(CutRefused):
        trials.check(mine, "0")


def test_a_set_of_calls_is_refused_where_any_cut_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine, trials = identity("doubled"), Trials([], folder=tmp_path)
    found = {"input": "exact", "0": "exact", "1": "differs", "2": "exact"}
    monkeypatch.setattr(trials, "_trial", lambda model_id, cut, nbytes: found)
    tried(trials, mine, "2")
    with pytest.raises(CutRefused, match='cut at "2"'):
        trials.check(mine, "2", along=True)
    found["1"] = "exact"
    other = Trials([], folder=tmp_path / "other")
    monkeypatch.setattr(other, "_trial", lambda model_id, cut, nbytes: found)
    tried(other, mine, "2")
    other.check(mine, "2", along=True)


def test_a_trial_ends_with_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = identity("sleeps")
    monkeypatch.setenv("ISTHMUS_TEST_SLEEPS", "1")
    trials, over = Trials(words("sleeps"), folder=tmp_path), threading.Event()
    assert trials.wait(mine, "0", 100, over.set)
    eventually(lambda: trials._process is not None)
    process = trials._process
    trials.close()
    assert over.wait(PATIENCE) and process is not None and process.wait(PATIENCE) != 0
    assert not trials.wait(mine, "1", 100, over.set)


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as of a user that no file of users names
    trials, mine = Trials([]), identity("doubled")
    monkeypatch.setattr(trials, "_trial", lambda *_: {"0": "exact"})
    tried(trials, mine, "0")
    assert not Path("~").exists()

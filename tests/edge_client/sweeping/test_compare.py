"""Two sweeps side by side: what differs is said, noise is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.__main__ import main
from edge_client.planning.objective import Objective
from edge_client.sweeping.compare import FEWEST, SUM, Sweep, compare, differences, read
from edge_client.sweeping.report import write
from edge_client.sweeping.settings import open_journal
from shared_hooks.errors import SpecError
from tests.edge_client.sweeping import synthetic

Captured = pytest.CaptureFixture[str]


def sweep(folder: Path, count: int = 4, ended: str | None = None, **more: Any) -> Path:
    """A folder of results of a sweep that nobody ran."""
    changed = more.pop("settings", {})
    ways = synthetic.ways(count)
    settings = {"model": "toy", "server": "started here", "repetitions": 12, "inputs": [["image.png", ""]]}
    settings["ways"] = [[way.name, way.mode] for way in ways]
    with open_journal(folder) as journal:
        journal.begin({**settings, **changed}, fresh=True)
        journal.write(synthetic.entry(0, ways, **{"repetitions": 12, **more}))
        write(journal, ways, ended, Objective())
    return folder


def verdicts(a: Path, b: Path, stage: str = SUM) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in compare(read(a), read(b)):
        if one.stage == stage:
            found[one.verdict] = found.get(one.verdict, 0) + 1
    return found


def test_noise_is_no_difference_and_twice_as_slow_is_one(tmp_path: Path) -> None:
    a = sweep(tmp_path / "a", seed=1)
    again = sweep(tmp_path / "again", seed=2)
    slow = sweep(tmp_path / "slow", seed=3, slower=2.0)
    assert verdicts(a, again) == {"no difference seen": 11}
    assert verdicts(a, slow) == {"slower": 11}
    assert verdicts(slow, a) == {"faster": 11}


def test_an_interval_holds_the_truth_and_few_requests_say_nothing() -> None:
    dice = np.random.default_rng(0)

    def measured(number: int, factor: float) -> Sweep:
        times = {SUM: 1e6 * factor * dice.lognormal(0, 0.1, number)}
        stages = dict.fromkeys(("prepare", "edge", "encode", "network", "queue", "tail", "finish"), np.zeros(number))
        return Sweep(Path(), {}, {(f"cut {way}", "networked"): {**stages, **times} for way in range(20)})

    for factor in (0.5, 1.0, 1.5):
        for one in compare(measured(25, 1.0), measured(25, factor)):
            assert one.low is not None and one.high is not None
            assert one.low <= factor <= one.high
    few = compare(measured(FEWEST - 1, 1.0), measured(FEWEST, 9.0))
    assert {one.verdict for one in few} == {"too few to say"} and few[0].low is None


def test_comparison_is_deterministic(tmp_path: Path) -> None:
    a, b = read(sweep(tmp_path / "a", seed=1)), read(sweep(tmp_path / "b", seed=2))
    assert compare(a, b) == compare(a, b)


def test_other_differences_are_listed(tmp_path: Path) -> None:
    a = read(sweep(tmp_path / "a"))
    b = read(sweep(tmp_path / "b", 6, "interrupted", settings={"model": "other", "torch": "3", "inputs": [["x", "1"]]}))
    said = "\n".join(differences(a, b))
    for words in ("model: toy / other", "torch: nothing / 3", "the inputs are not the same", "B is not complete"):
        assert words in said
    assert "only in B: features.4.conv, features.5.conv, features.4.conv (local)" in said
    assert differences(a, a) == []


def test_the_table_and_the_json(tmp_path: Path, capsys: Captured) -> None:
    a, b = sweep(tmp_path / "a", seed=1), sweep(tmp_path / "b", seed=2, slower=3.0)
    assert main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "of 11 ways: slower at 11" in out and "95% confidence" in out and "features.2.conv (local)" in out
    assert main(["compare", str(a), str(b), "--stages"]) == 0
    assert "network" in capsys.readouterr().out
    assert main(["compare", str(a), str(b), "--json", "-"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["ways"] == 11 and known["bytes"] == [] and len(known["best"]) == 2
    assert {one["verdict"] for one in known["compared"] if one["stage"] == SUM} == {"slower"}


def test_nothing_in_common_is_said(tmp_path: Path, capsys: Captured) -> None:
    a, b = sweep(tmp_path / "a"), sweep(tmp_path / "b", failing="edge-only")
    one, other = read(a), read(b)
    assert all(way != "edge-only" for way, _ in other.times)
    alone = Sweep(other.folder, other.summary, {})
    assert compare(one, alone) == []
    assert main(["compare", str(a), str(b)]) == 0
    assert "only in A: edge-only" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": "other"}', '{"format": "isthmus sweep summary 1"}'])
def test_invalid_sweep_file_is_named(tmp_path: Path, capsys: Captured, content: str | None) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(SpecError, match=str(tmp_path)):
        read(tmp_path)
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1

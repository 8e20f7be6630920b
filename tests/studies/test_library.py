"""The sweep itself, on what is at hand in a second or two: one architecture, one crash, one model that is no good."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from studies.library.check import Sample
from studies.library.report import causes, summary, table
from studies.library.subject import NotUsable, Prepared, Subject, equal_builds
from studies.library.sweep import Journal, look

GIB = 1 << 30


class Crashes(nn.Module):
    """Ends its process at the third call; the sweep must live."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Crashes.calls += 1
        if Crashes.calls > 2:
            os._exit(5)
        return x + 1


def _prepared(make: type[nn.Module] | functools.partial[nn.Module]) -> Prepared:
    build = equal_builds(make)
    return Prepared("here", build(), build, lambda seed: ((torch.full((1, 4), float(seed + 1)),), {}))


def _useless() -> Prepared:
    raise NotUsable("nothing to give it")


def test_the_sweep_counts_what_it_sees(tmp_path: Path) -> None:
    """Exact cuts, a worker that ends, a model that cannot be used; and the file brings all of it back."""
    subjects = [
        Subject("one", "linear", lambda: _prepared(functools.partial(nn.Linear, 4, 4))),
        Subject("one", "crashes", lambda: _prepared(Crashes)),
        Subject("two", "useless", _useless),
    ]
    journal = Journal(tmp_path / "found.json")
    for subject in subjects:
        journal.add(subject.key, look(subject, Sample(seconds=20), 64 * GIB))
    found = summary(Journal(tmp_path / "found.json").records)
    assert found["one"]["cuts"] == {"exact": 2, "refused": 0, "late": 0, "wrong": 0, "error": 0}
    assert (found["one"]["crash"], found["two"]["unusable"]) == (1, 1)
    assert any(cause.startswith("crash") for cause in causes(journal.records))
    assert len(table(found).splitlines()) == 3


def test_an_architecture_is_made_small_and_cut() -> None:
    """The way from a model type of transformers to its exact cuts."""
    pytest.importorskip("transformers")
    from studies.library import hub

    bert = next(one for one in hub.subjects(cache=False) if one.name == "bert")
    record = look(bert, Sample(cuts=3, seconds=60), 64 * GIB)
    assert record["status"] == "ran", record
    assert {cut["outcome"] for cut in record["cuts"].values()} == {"exact"}, record


def test_a_sample_has_both_ends_and_no_cut_twice() -> None:
    """And all cuts where a model has few."""
    assert Sample(cuts=8).of(range(3), "x") == ["input", 0, 1, 2]
    chosen = Sample(cuts=8).of(range(100), "x")
    assert len(chosen) == len(set(chosen)) == 8
    assert {"input", 0, 99} < set(chosen)

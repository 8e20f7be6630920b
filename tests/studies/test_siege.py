"""A short part of ``make siege``: hostile processes beside an honest one, outcomes and no timings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from studies.siege.cases import CASES, Case
from studies.siege.material import make
from studies.siege.overload import Crowd
from studies.siege.trial import AFTER, BEFORE, DURING, OTHER, Outcome, Phase, Siege
from tests.starts import forked


@pytest.fixture(autouse=True, scope="module")
def processes_are_forked() -> Iterator[None]:
    with forked("studies.siege.processes.subprocess"):
        yield


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    folder = tmp_path_factory.mktemp("siege")
    material = folder / "material.json"
    make(shapes=(1, 48)).write(material)
    with Siege(folder, material, honest=1) as made:
        yield made


AT_ONCE = ("silent-announcements", "stolen-ids", "forged-lines", "answers-unread", "cut-churn", "aborted-streams")


def test_an_honest_client_is_answered_beside_hostile_ones(siege: Siege) -> None:
    outcome = siege.run(Case(",".join(AT_ONCE), lambda _: None), OTHER, seconds=1.5)
    for phase in (BEFORE, DURING, AFTER):
        assert not outcome.phases[phase].wrong and not outcome.phases[phase].errors, (phase, outcome.phases)
    assert outcome.phases[AFTER].asked and outcome.status == 0, outcome
    assert outcome.peak <= 1.2 * outcome.allowed


def test_descriptions_of_cases() -> None:
    assert len(CASES) > 25
    for name, case in CASES.items():
        assert re.fullmatch("[a-z-]+", name) and case.does, name


def test_shortfalls_are_reported() -> None:
    outcome = Outcome("x", "", "", allowed=100.0, peak=90.0, health_seconds=0.1, status=0, bound="QuotaExceeded")
    outcome.phases = {name: Phase(100, 5.0, 10.0, 12.0) for name in (BEFORE, DURING, AFTER)}
    outcome.reported = [("QuotaExceeded: too much", 3)]
    assert outcome.faults == []
    outcome.phases[DURING] = Phase(100, 5.0, 31.0, 90.0, 2, {"DeadlineExceeded: late": 3})
    outcome.peak, outcome.reported, outcome.status = 121.0, [], 3
    reported = " | ".join(outcome.faults)
    for text in ("2 wrong", "3 honest errors", "3.1 times", "121 MiB", "no bound", "exit status 3"):
        assert text in reported
    assert Crowd.uneven([10, 10, 8, 12]) == 0.2


def test_the_material_is_read_as_it_was_written(siege: Siege, tmp_path: Path) -> None:
    from studies.siege.material import Material

    material = Material.read(siege.material)
    material.write(tmp_path / "again.json")
    assert Material.read(tmp_path / "again.json") == material

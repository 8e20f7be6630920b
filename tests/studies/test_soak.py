"""A short part of ``make soak``: real processes, connections reset, every answer compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from studies.soak.run import Result, soak
from studies.soak.slope import Slope
from tests.starts import forked


@pytest.fixture(autouse=True, scope="module")
def processes_are_forked() -> Iterator[None]:
    with forked("studies.siege.processes.subprocess"):
        yield


def test_requests_survive_reconnects(tmp_path: Path) -> None:
    result = soak(tmp_path, 150, 4, every=0.2)
    assert result.requests == 150 and result.wrong == 0 and not result.lost and result.status == 0, str(result)
    assert result.resets >= 1 and result.streams > result.clients
    assert {who for who, _ in result.slopes} >= {"server", "client"}


def test_a_slope_has_an_interval() -> None:
    noise = [0.3, -0.2, 0.1, -0.3, 0.2]
    flat = Slope.of([(k * 1000, 50 + noise[k % 5]) for k in range(100)])
    assert abs(flat.each) <= flat.margin and not flat.grows(1.0)
    steep = Slope.of([(k * 1000, 50 + 0.1 * k + noise[k % 5]) for k in range(100)])
    assert abs(steep.each - 10) <= steep.margin < 1 and steep.grows(5.0) and not steep.grows(10.0)
    assert math.isinf(Slope.of([(1, 5.0), (2, 6.0)]).margin)


def test_growth_is_reported_given_enough_requests() -> None:
    steep = {("server", "MiB"): Slope(20.0, 1.0, 100.0, 120.0, 121.0)}
    assert Result(requests=1000, slopes=steep).faults == []
    assert "server: MiB grow" in Result(requests=100_000, slopes=steep).faults[0]

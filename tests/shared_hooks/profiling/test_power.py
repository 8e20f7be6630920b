"""Energy is what meters saw over many runs, or a share by time, or absent with the reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from shared_hooks.metrics.energy import Integrated, Meters
from shared_hooks.metrics.records import Reading
from shared_hooks.metrics.sampler import Sampler
from shared_hooks.profiling.timers import PowerMeters, mean_reading

WATTS = 5.0


@contextmanager
def sampling(meters: Meters) -> Iterator[Sampler]:
    sampler = Sampler(find=lambda: meters)
    try:
        yield sampler
    finally:
        sampler.stop()


def test_work_is_repeated_until_the_sensor_has_seen_it() -> None:
    meter = Integrated("fake", "board", "board", lambda: WATTS, period_s=0.05)
    with sampling(Meters((meter,))) as sampler:
        power = PowerMeters(torch.device("cpu"), sampler)
        assert power.missing is None
        idle = power.idle()
        spent: list[float] = []

        def run() -> None:
            started = time.perf_counter()
            time.sleep(0.01)
            spent.append(time.perf_counter() - started)

        one = power.repeat(run, "naps")
    assert idle.value == pytest.approx(WATTS, rel=0.5)
    assert f"over {len(spent)} naps" in one.note
    assert one.value is not None
    assert one.value * len(spent) >= 0.5 * WATTS * sum(spent)
    share = power.share(1e9)
    assert share.status == "estimated"
    assert share.value == pytest.approx(WATTS, rel=0.5)
    assert "mean power" in share.note


def test_without_a_meter_nothing_runs_and_the_reason_is_given() -> None:
    with sampling(Meters((), (("RAPL", "no permission to read /sys/energy_uj"),))) as sampler:
        power = PowerMeters(torch.device("cpu"), sampler)
        runs: list[int] = []
        for reading in (power.idle(), power.repeat(lambda: runs.append(1), "runs"), power.share(1e9)):
            assert reading.status == "unavailable"
            assert "no permission to read /sys/energy_uj" in reading.note
    assert not runs


def test_no_share_before_anything_was_measured() -> None:
    meter = Integrated("fake", "board", "board", lambda: WATTS, period_s=0.05)
    with sampling(Meters((meter,))) as sampler:
        assert PowerMeters(torch.device("cpu"), sampler).share(1e9).status == "unavailable"


def test_a_mean_is_as_good_as_its_worst_part() -> None:
    measured, estimated, missing = (
        Reading.measured(2.0, "by"),
        Reading.estimated(4.0, "from"),
        Reading.unavailable("why"),
    )
    assert mean_reading([measured, measured]) == measured
    assert mean_reading([measured, estimated]) == Reading.estimated(3.0, "from")
    assert mean_reading([missing, measured]) == Reading.estimated(2.0, "by")
    assert mean_reading([missing, missing]) == missing

"""The thread that samples: it comes when asked for, goes when nobody asks, and nothing it meets stops a request."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared_hooks.metrics.energy import Gpu, Meters, MeterUnavailable, Scope
from shared_hooks.metrics.records import Reading
from shared_hooks.metrics.sampler import Sampler, Track, sampler
from tests.waiting import PATIENCE, eventually


class FakeMeter:
    """A joule at every reading, until asked to fail."""

    period_s = 0.001

    def __init__(self, scope: Scope = "package", unit: str = "") -> None:
        self.name = self.domain = f"fake {scope}"
        self.scope: Scope = scope
        self.unit = unit
        self.joules = 0.0
        self.failure: Exception | None = None

    def read(self) -> float:
        if self.failure is not None:
            raise self.failure
        self.joules += 1
        return self.joules


class FakeLevel:
    name = "fake utilisation"
    period_s = 0.001

    def read(self) -> float:
        return 50.0


@pytest.fixture
def made() -> Iterator[list[Sampler]]:
    """Samplers to be stopped at the end."""
    all_of_them: list[Sampler] = []
    yield all_of_them
    for one in all_of_them:
        one.stop()


def sampling(made: list[Sampler], *meters: FakeMeter, idle_s: float = 3600.0, **more: Any) -> Sampler:
    one = Sampler(lambda: Meters(tuple(meters)), period_s=0.001, idle_s=idle_s, **more)
    made.append(one)
    return one


def has_energy(one: Sampler, gpu: Gpu | None = None, count: int = 3) -> Callable[[], bool]:
    def enough() -> bool:
        track = one.window(0, gpu).energy
        return isinstance(track, Track) and len(track.times) >= count

    return enough


def test_nothing_runs_before_a_forward_does(made: list[Sampler]) -> None:
    one = sampling(made, FakeMeter())
    assert not one.running
    assert one.window(0).energy == Reading.unavailable("sensors are still being looked for")


def test_a_forward_starts_it_and_finds_its_samples(made: list[Sampler]) -> None:
    one = sampling(made, FakeMeter())
    start = time.perf_counter_ns()
    one.touch()
    eventually(has_energy(one))
    window = one.window(start)
    assert isinstance(window.energy, Track) and isinstance(window.resident, Track)
    assert window.energy.values == sorted(window.energy.values)
    assert min(window.resident.values) > 1 << 20
    assert window.gpu == Reading.unavailable("the model does not run on a GPU")
    eventually(lambda: one.window(start).memory.times)  # type: ignore[union-attr]
    eventually(lambda: one.window(start).cpu.times)  # type: ignore[union-attr]


def test_sampler_ends_when_idle_and_restarts(made: list[Sampler]) -> None:
    one = sampling(made, FakeMeter(), idle_s=0.0)
    one.touch()
    eventually(lambda: not one.running)
    one._idle_s = 3600.0
    one.touch()
    assert one.running
    eventually(has_energy(one))


def test_stopping_waits_for_the_thread(made: list[Sampler]) -> None:
    one = sampling(made, FakeMeter())
    one.touch()
    thread = one._thread
    assert thread is not None and thread.daemon
    one.stop()
    assert not thread.is_alive() and not one.running
    one.touch()
    eventually(has_energy(one))


def test_many_threads_start_one(made: list[Sampler]) -> None:
    one = sampling(made, FakeMeter())
    before = set(threading.enumerate())  # not their numbers, which are given again
    gate = threading.Barrier(8)

    def forward() -> None:
        gate.wait()
        one.touch()

    threads = [threading.Thread(target=forward) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    started = {thread for thread in threading.enumerate() if thread.name == "isthmus-sampler"} - before
    assert len(started) == 1


@pytest.mark.parametrize(
    ("failure", "text"),
    [(MeterUnavailable("fake: gone"), "fake: gone"), (ZeroDivisionError("oops"), "ZeroDivisionError: oops")],
)
def test_a_meter_that_fails_is_said_to_have_failed(made: list[Sampler], failure: Exception, text: str) -> None:
    meter = FakeMeter()
    one = sampling(made, meter)
    one.touch()
    eventually(has_energy(one))
    meter.failure = failure
    eventually(lambda: one.window(0).energy == Reading.unavailable(text))
    assert one.running and isinstance(one.window(0).resident, Track)


def test_a_thread_that_dies_is_replaced(made: list[Sampler], monkeypatch: pytest.MonkeyPatch) -> None:
    one = sampling(made, FakeMeter())
    monkeypatch.setattr(one, "_loop", lambda stop: None)
    one.touch()
    eventually(lambda: not one.running)
    monkeypatch.undo()
    one.touch()
    eventually(has_energy(one))


def test_without_meters_the_reason_is_reported(made: list[Sampler]) -> None:
    one = Sampler(lambda: Meters(missing=(("RAPL", "no permission"),)), period_s=0.001)
    made.append(one)
    one.touch()
    eventually(lambda: one.window(0).energy == Reading.unavailable("no energy meter: RAPL: no permission"))


def test_a_search_that_breaks_is_reported(made: list[Sampler]) -> None:
    def find() -> Meters:
        raise RuntimeError("driver")

    one = Sampler(find, period_s=0.001)
    made.append(one)
    one.touch()
    eventually(lambda: one.window(0).energy == Reading.unavailable("no energy meter: search: RuntimeError: driver"))


def test_a_request_does_not_wait_for_a_slow_sensor(made: list[Sampler]) -> None:
    gate, searching = threading.Event(), threading.Event()

    def find() -> Meters:
        searching.set()
        assert gate.wait(PATIENCE)
        return Meters((FakeMeter(),))

    one = Sampler(find, period_s=0.001)
    made.append(one)
    one.touch()
    assert searching.wait(PATIENCE)
    one.touch()
    assert one.window(0).energy == Reading.unavailable("sensors are still being looked for")
    gate.set()
    eventually(has_energy(one))


def test_a_gpu_has_its_own_sum(made: list[Sampler]) -> None:
    package, card = FakeMeter(), FakeMeter("gpu", "GPU-aa")
    one = sampling(made, package, card, utilisation=lambda gpu: FakeLevel())
    gpu = Gpu(0, "GPU-aa")
    one.touch(gpu)
    eventually(has_energy(one, gpu))
    window = one.window(0, gpu)
    assert isinstance(window.gpu, Track) and window.gpu.values[0] == 50.0
    assert isinstance(window.energy, Track)
    energy = window.energy.growth(window.energy.times[0], window.energy.times[-1])
    assert "fake package + fake gpu" in energy.note


def test_a_gpu_that_is_not_seen_has_no_energy(made: list[Sampler]) -> None:
    def utilisation(gpu: Gpu) -> FakeLevel:
        raise MeterUnavailable("NVML: Not Supported")

    one = sampling(made, FakeMeter(), utilisation=utilisation)
    gpu = Gpu(0, "GPU-aa")
    one.touch(gpu)
    eventually(lambda: one.window(0, gpu).gpu == Reading.unavailable("NVML: Not Supported"))
    assert one.window(0, gpu).energy == Reading.unavailable("no energy meter")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of what is tested here
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_after_a_fork_samples_for_itself() -> None:
    sampler.touch()
    assert sampler.running
    pid = os.fork()
    if pid == 0:  # nothing of pytest's may run in here
        code = 1
        try:
            clean = not sampler.running
            sampler.touch()
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                track = sampler.window(0).resident
                if isinstance(track, Track) and track.times:
                    code = 0 if clean else 2
                    break
                time.sleep(0.01)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_forwards_between_two_samples_share_a_window_and_its_levels() -> None:
    one = Sampler()
    one._sample()
    now = time.perf_counter_ns()
    window = one.window(now)
    assert one.window(now + 5) is window
    levels, until = window.levels(now + 1, now + 2)
    assert until > now + 2 and window.levels(now + 3, now + 4)[0] is levels
    assert window.levels(now + 3, until + 1)[0] is not levels, "beyond what the samples say"
    earlier = one.window(now - 5)
    assert earlier is not window and one.window(now) is earlier
    one._sample()
    assert one.window(now + 5) is not earlier

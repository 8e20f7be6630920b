"""What is recorded of a forward: layers and what lies outside them make up the whole, on the host and on a device."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import TensorShape, WrappedModel, runner
from shared_hooks.metrics import measurement
from shared_hooks.metrics.measurement import HostClock, Measurement, StreamClock, clock_for, gpu_of
from shared_hooks.metrics.records import FORWARD_READINGS, LAYER_READINGS, Reading, outputs_of
from shared_hooks.metrics.sampler import NO_GPU, SampleWindow, Series

MS = 1_000_000


class Net(nn.Module):
    """Layers, a function between them, a result of several tensors, a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.cell = nn.LSTM(4, 3, batch_first=True)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.first(x)) + 1
        out, (state, _) = self.cell(x)
        result: Tensor = self.last(out * 2).sum(1) + state[-1]
        return result


X = torch.randn(2, 5, 4)


@pytest.fixture
def wrapped() -> Iterator[WrappedModel]:
    with WrappedModel(Net().eval()) as made:
        yield made


def test_outputs_are_recorded_with_shape_and_dtype(wrapped: WrappedModel) -> None:
    wrapped.forward(X)
    first, again, cell, last = wrapped.get_layer_metrics()
    assert (first.name, again.name, cell.name, last.name) == ("first", "first#2", "cell", "last")
    assert first.outputs == (TensorShape("float32", (2, 5, 4)),)
    assert cell.outputs == tuple(TensorShape("float32", shape) for shape in [(2, 5, 3), (1, 2, 3), (1, 2, 3)])
    assert [layer.output_bytes for layer in (first, again, cell, last)] == [160, 160, 168, 120]
    assert str(first.outputs[0]) == "float32 2x5x4" and str(TensorShape("bool", ())) == "bool scalar"


def test_layers_and_what_is_outside_make_up_the_forward(wrapped: WrappedModel) -> None:
    assert wrapped.get_forward_metrics() is None
    wrapped.forward(X)
    early = wrapped.forward(X, end="cell")
    assert early.layer_name == "cell"
    for run in (lambda: wrapped.forward(X), lambda: wrapped.forward(X, end=1), lambda: wrapped.forward(early, start=2)):
        before = time.perf_counter_ns()
        run()
        around = time.perf_counter_ns() - before
        forward, layers = wrapped.get_forward_metrics(), wrapped.get_layer_metrics()
        assert forward is not None
        assert forward.layers_ns == sum(layer.inference_ns for layer in layers)
        assert 0 < forward.layers_ns < forward.total_ns < around
        assert forward.layers_ns + forward.outside_ns == forward.total_ns
        assert forward.layers_ns < sum(wrapped.durations().values()) < around
        assert forward.cpu_ns is not None and 0 < forward.cpu_ns < around


def test_processor_time_is_the_threads_own_with_one_thread(wrapped: WrappedModel) -> None:
    assert torch.get_num_threads() == 1
    assert Measurement(torch.device("cpu")).cpu is time.thread_time_ns
    torch.set_num_threads(2)
    try:
        assert Measurement(torch.device("cpu")).cpu is time.process_time_ns
    finally:
        torch.set_num_threads(1)
    wrapped.forward(X)
    assert all(layer.cpu_ns is not None and layer.cpu_ns >= 0 for layer in wrapped.get_layer_metrics())


def test_every_reading_says_how_it_was_come_by(wrapped: WrappedModel) -> None:
    wrapped.forward(X)
    forward = wrapped.get_forward_metrics()
    assert forward is not None
    for record, names in ((forward, FORWARD_READINGS), *((r, LAYER_READINGS) for r in wrapped.get_layer_metrics())):
        for name in names:
            reading = getattr(record, name)
            assert reading.note and (reading.value is None) == (reading.status == "unavailable")
        assert set(record.as_dict()) >= set(names)
    assert wrapped.get_layer_metrics()[0].gpu_utilisation == NO_GPU


def test_a_failed_forward_leaves_the_last_one(wrapped: WrappedModel) -> None:
    wrapped.forward(X)
    before = wrapped.get_forward_metrics()
    with pytest.raises(RuntimeError):
        wrapped.forward(torch.zeros(2, 5, 7))
    after = wrapped.get_forward_metrics()
    assert before is not None and after is not None and after.total_ns == before.total_ns


def test_without_metrics_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(*args: Any) -> None:
        raise AssertionError("the sampler was started")

    monkeypatch.setattr(measurement.sampler, "touch", touch)
    with WrappedModel(Net().eval(), metrics=False) as made:
        made.plan(X)
        made.forward(X)
        assert made.get_forward_metrics() is None and made.get_layer_metrics() == []


def window(energy: Series | Reading) -> SampleWindow:
    resident = Series("resident set of the process", 20 * MS)
    for at in range(0, 2000, 20):
        resident.append(at * MS, 1e6 + at)
    level = Series("level", 100 * MS)
    for at in range(0, 2000, 100):
        level.append(at * MS, 50.0)
    track = energy if isinstance(energy, Reading) else energy.since(0)
    return SampleWindow(track, resident.since(0), level.since(0), level.since(0), NO_GPU)


class FakeHost(HostClock):
    """A clock that shows what it is given."""

    def __init__(self, *marks_ms: int) -> None:
        self._marks = iter(marks_ms)
        self.mark = lambda: next(self._marks) * MS  # type: ignore[method-assign]


def test_long_layers_are_measured_and_short_ones_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    energy = Series("board", 20 * MS)
    for at in range(0, 2000, 20):
        energy.append(at * MS, 0.005 * at)  # 5 W
    monkeypatch.setattr(measurement.sampler, "window", lambda start, gpu: window(energy))
    monkeypatch.setattr(measurement, "clock_for", lambda device: FakeHost(100, 105, 110, 410, 411, 412, 500))
    with WrappedModel(nn.Sequential(nn.ReLU(), nn.Tanh()).eval()) as made:
        made.forward(X)
        long, short = made.get_layer_metrics()
        forward = made.get_forward_metrics()
    assert (long.energy.status, long.mean_power.status) == ("measured", "measured")
    assert (long.energy.value, long.mean_power.value) == (pytest.approx(1.5), pytest.approx(5.0))
    assert long.energy.note == "board, sampled every 20 ms"
    assert short.energy == Reading(pytest.approx(0.005), "estimated", "share by time of 20 ms samples of board")
    assert short.mean_power.value == pytest.approx(5.0)
    assert (long.memory_allocated.value, long.memory_allocated.status) == (1e6 + 420, "measured")
    assert long.cpu_utilisation.status == "measured" and short.cpu_utilisation.status == "estimated"
    assert forward is not None and forward.energy.value == pytest.approx(2.0)
    assert (forward.total_ns, forward.layers_ns, forward.outside_ns) == (400 * MS, 301 * MS, 99 * MS)


def test_no_energy_is_no_power(monkeypatch: pytest.MonkeyPatch) -> None:
    why = Reading.unavailable("no energy meter")
    monkeypatch.setattr(measurement.sampler, "window", lambda start, gpu: window(why))
    with WrappedModel(nn.Sequential(nn.ReLU())) as made:
        made.forward(X)
        assert {r for layer in made.get_layer_metrics() for r in (layer.energy, layer.mean_power)} == {why}


# -- CUDA, without one --------------------------------------------------------------------------------------------


class Device:
    """A GPU that is 1 ms behind, needs 2 ms between any two marks, and counts who waits for it."""

    def __init__(self) -> None:
        self.marks = 0
        self.waits = 0
        self.allocated = 1000
        self.peak = 5000


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:1"
            device.marks += 1
            self.at_ms = 2.0 * device.marks

        def synchronize(self) -> None:
            device.waits += 1

        def elapsed_time(self, other: Event) -> float:
            assert device.waits, "read before the device was done"
            return other.at_ms - self.at_ms

    def memory(index: int) -> dict[str, Any]:
        assert index == 1
        device.allocated += 100
        return {"allocated_bytes": {"all": {"current": device.allocated, "peak": device.peak}}}

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="aa-bb"))
    monkeypatch.setattr(runner.ModelRunner, "device", torch.device("cuda:1"))
    for module in (measurement, runner):
        monkeypatch.setattr(module, "gpu_of", gpu_of.__wrapped__)  # what a fake says must not be remembered
    monkeypatch.setattr(measurement.sampler, "touch", lambda gpu: None)
    return device


def test_on_cuda_events_are_read_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda(monkeypatch)
    asked: list[Any] = []
    monkeypatch.setattr(measurement.sampler, "touch", asked.append)
    model = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.ReLU()).eval()
    with WrappedModel(model) as made:
        made.plan(X)
        asked.clear()
        made.forward(X)
        assert device.waits == 1
        layers, forward = made.get_layer_metrics(), made.get_forward_metrics()
    assert device.waits == 1
    assert [gpu.uuid for gpu in asked] == ["GPU-aa-bb"]
    assert [layer.inference_ns for layer in layers] == [2 * MS] * 3
    # marks: the beginning, the container's, two a layer, the end
    assert forward is not None and (forward.total_ns, forward.layers_ns) == (16 * MS, 6 * MS)
    assert forward.outside_ns == 10 * MS


def test_on_cuda_memory_is_the_allocators_and_its_peak_is_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_cuda(monkeypatch)
    # numbers that the model's code reaches belong to its plan's key; the device's change at every look
    address = id(device)

    class Rises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ctypes.cast(address, ctypes.py_object).value.peak = 7000
            return x

    with WrappedModel(nn.Sequential(nn.ReLU(), Rises()).eval(), metrics=True) as made:
        made._planner.plans_if_possible((X,), {})
        device.allocated, device.peak = 1000, 5000
        made.forward(X)
        flat, rises = made.get_layer_metrics()
        forward = made.get_forward_metrics()
    assert (flat.memory_allocated.value, flat.memory_allocated.status) == (1200, "measured")
    assert (flat.memory_peak.value, flat.memory_peak.status) == (1200, "estimated")
    assert (rises.memory_peak.value, rises.memory_peak.status) == (7000, "measured")
    assert forward is not None and (forward.memory_peak.value, forward.memory_peak.status) == (7000, "measured")


def test_events_find_their_place_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    clock = StreamClock(torch.device("cuda:1"))
    began, middle, ended = clock.mark(), clock.mark(), clock.mark()
    before = time.perf_counter_ns()
    clock.settle(began, ended)
    assert before <= clock.at(ended) <= time.perf_counter_ns()
    assert clock.at(ended) - clock.at(middle) == clock.at(middle) - clock.at(began) == 2 * MS


def test_the_clock_is_the_devices() -> None:
    assert isinstance(clock_for(torch.device("cuda:0")), StreamClock)
    assert isinstance(clock_for(torch.device("cpu")), HostClock)


def test_outputs_are_found_in_anything() -> None:
    assert outputs_of(None) == ()
    assert outputs_of([torch.zeros(2), {"a": torch.zeros(1, 3, dtype=torch.int8)}, 5]) == (
        ((2,), torch.float32),
        ((1, 3), torch.int8),
    )

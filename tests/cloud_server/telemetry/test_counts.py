"""What a server counts of its requests, and that no client chooses a label."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cloud_server.config import read_config
from cloud_server.core import Core
from cloud_server.fleet import Fleet, ThisProcess
from cloud_server.limits import Limits
from cloud_server.models import Computed
from cloud_server.telemetry import BUCKETS, MAX_IDENTITIES, RequestCounts, ScaledHistogram, ServerState, bound
from shared_hooks import ForwardMetrics
from shared_hooks.errors import IsthmusError, QuotaExceeded, ServerUnavailable
from shared_hooks.lifecycle import About, Lifecycle, Stage
from shared_hooks.metrics import Reading
from tests.cloud_server.fakes import CoreClient, FakeEngine, cancel, header, make_crossing
from tests.cloud_server.fleet.served import entry
from tests.waiting import eventually


def thirteen(payload: memoryview) -> None:
    if payload and payload[0] == 13:
        raise ValueError("thirteen")


@pytest.fixture
def core() -> Iterator[Core]:
    with Core([FakeEngine(thirteen)], Limits(max_in_flight=4)) as core:
        yield core


@pytest.fixture
def registry(core: Core) -> CollectorRegistry:
    made, counts = CollectorRegistry(), RequestCounts(core.engines)
    core.lifecycle.register(counts)
    made.register(counts)
    made.register(ServerState(core))
    return made


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"isthmus_{name}", labels) or 0.0


def test_requests_by_model_identity_and_reason(core: Core, registry: CollectorRegistry) -> None:
    alice, nobody = CoreClient(core, identity="alice"), CoreClient(core)
    for id in (1, 2):
        alice.ask(id, b"0123456789")
        assert alice.answer(id).reply
    nobody.ask(1, bytes([13, 0]))
    nobody.ask(2, b"abc", payload_bytes=5)  # refused before it is taken in
    nobody.send(header(3, make_crossing(3)), cancel(3))
    for id in (1, 2, 3):
        assert nobody.answer(id).failed
    eventually(lambda: value(registry, "request_sent_bytes_total", model="fake", identity="alice") == 20)
    assert value(registry, "request_success_total", model="fake", identity="alice") == 2
    assert value(registry, "request_success_total", model="fake", identity="") == 0
    assert value(registry, "request_received_bytes_total", model="fake", identity="alice") == 20
    assert value(registry, "request_received_bytes_total", model="fake", identity="") == 2
    for reason in ("ModelFailed", "BadFrame", "Cancelled"):
        assert value(registry, "request_failure_total", model="fake", identity="", reason=reason) == 1, reason
    assert value(registry, "compute_duration_seconds_count", model="fake") == 2  # failures took what they took
    assert value(registry, "decode_duration_seconds_bucket", model="fake", le="0.0001") == 2
    assert value(registry, "sessions") == 2


def test_waiting_requests(registry: CollectorRegistry, core: Core) -> None:
    client = CoreClient(core)
    client.ask(1, b"")
    assert client.answer(1)
    client.send(header(2, make_crossing(100)))
    crossing = make_crossing(100)
    client.ask(2, b"", crossing, payload_bytes=100)
    eventually(lambda: value(registry, "requests_in_flight", state="receiving") == 1)
    assert value(registry, "requests_held_bytes") == 104
    assert value(registry, "queue_depth") == 0 and value(registry, "draining") == 0
    core.drain()
    assert value(registry, "draining") == 1


def test_refusals_by_the_limit_they_met(core: Core, registry: CollectorRegistry) -> None:
    client, crossing = CoreClient(core), make_crossing(100)
    client.ask(1, b"", crossing, payload_bytes=100)
    for id in range(2, 7):
        client.send(header(id, crossing))
    for id in (5, 6):
        assert client.answer(id).failed
    eventually(lambda: value(registry, "refusals_total", bound="max_in_flight") == 2)
    assert value(registry, "request_failure_total", model="fake", identity="", reason="ServerUnavailable") == 2


def test_a_refusal_names_its_limit() -> None:
    assert bound(QuotaExceeded("600 requests a minute")) == "per_minute"
    assert bound(ServerUnavailable("5 waiting, which is the limit (max_pending)")) == "max_pending"
    assert bound(ServerUnavailable("bytes_per_minute: 5")) == "bytes_per_minute"
    assert bound(IsthmusError("nothing of the kind")) == "" and bound(ValueError("max_pending")) == ""


def test_number_of_labels_is_bounded() -> None:
    counts, registry, lifecycle = RequestCounts(["a"]), CollectorRegistry(), Lifecycle("cloud")
    registry.register(counts)
    lifecycle.register(counts)
    for number in range(1000):
        about = About(1, 0, None, f"model {number}", f"client {number}", f"identity {number}")
        lifecycle.emit(Stage.AFTER_REQUEST, about, error=ServerUnavailable("no"), nbytes=1, reply=None, began_ns=0)
    lines = [sample for family in registry.collect() for sample in family.samples if "failure_total" in sample.name]
    assert len(lines) == MAX_IDENTITIES + 1
    assert sum(sample.value for sample in lines) == 1000
    assert {sample.labels["model"] for sample in lines} == {"unknown"}


def test_energy_where_it_was_read() -> None:
    counts, registry, lifecycle = RequestCounts(["a"]), CollectorRegistry(), Lifecycle("cloud")
    registry.register(counts)
    lifecycle.register(counts)
    for energy in (Reading.measured(2.0, "nvml"), Reading.estimated(1.0, "share"), Reading.unavailable("no meter")):
        reply = Computed.of(b"", (), 0, forward=ForwardMetrics(1, 1, energy=energy)).reply
        lifecycle.emit(Stage.AFTER_REQUEST, About(1, 0, None, "a"), error=None, nbytes=0, reply=reply, began_ns=0)
    assert value(registry, "energy_joules_total", model="a", status="measured") == 2
    assert value(registry, "energy_joules_total", model="a", status="estimated") == 1


def test_how_many_requests_were_computed_as_one() -> None:
    counts, registry, lifecycle = RequestCounts(["a"]), CollectorRegistry(), Lifecycle("cloud")
    registry.register(counts)
    lifecycle.register(counts)
    for batch_size in (0, 1, 3, 3, 3):
        reply = Computed.of(b"", (), 0, batch_size=batch_size).reply
        lifecycle.emit(Stage.AFTER_REQUEST, About(1, 0, None, "a"), error=None, nbytes=0, reply=reply, began_ns=0)
    assert value(registry, "batch_size_bucket", model="a", le="1") == 2
    assert (
        value(registry, "batch_size_bucket", model="a", le="4") == value(registry, "batch_size_count", model="a") == 5
    )
    assert value(registry, "batch_size_sum", model="a") == 11


def test_buckets_hold_what_is_at_most_their_bound() -> None:
    histogram = ScaledHistogram()
    for seconds in (0.0, BUCKETS[0], 2 * BUCKETS[0], 100.0, 101.0):
        histogram.add(round(seconds * 1e9))
    found = dict(histogram.buckets())
    assert (found["0.0001"], found["0.00025"], found["100.0"], found["+Inf"]) == (2, 3, 4, 5)
    assert histogram.total == pytest.approx(201.0003)


def test_a_models_series_begin_at_zero(tmp_path: Path) -> None:
    """The increase of a series that appears with its first event would leave that event out."""
    file = tmp_path / "server.toml"
    file.write_text(entry("one"))
    config = read_config(file)
    registry = CollectorRegistry()
    with Core(Fleet(ThisProcess(config), config.models), config.limits) as core:
        registry.register(ServerState(core))
        assert registry.get_sample_value("isthmus_model_evictions_total", {"model": "one"}) == 0
        assert registry.get_sample_value("isthmus_model_loads_total", {"model": "one"}) == 1
        for standing in ("compiling", "checking", "used", "refused"):
            found = {"model": "one", "standing": standing}
            assert registry.get_sample_value("isthmus_compiled_tails", found) == 0

"""One model on several devices: two replicas on the processor are two, and answer as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cloud_server.core import Core
from cloud_server.fleet import hosts
from cloud_server.fleet.on_devices import Replicated
from edge_client import EdgeClient
from shared_hooks.errors import Disagreement, SpecError
from shared_hooks.models import load_spec
from tests.cloud_server.fakes import CoreClient, FakeEngine
from tests.cloud_server.fleet.served import Small, edge_of, entry, fleet_of
from tests.cloud_server.small import SMALL, Gate

X = torch.arange(16.0).reshape(2, 8)


def test_the_least_loaded_takes_the_next() -> None:
    """While one replica is held, all else goes to the other."""
    gates = Gate(), Gate()
    engines = [FakeEngine(gate) for gate in gates]
    both = Replicated(engines)
    gates[1].opened.set()
    with Core([both], SMALL, workers=2) as core:
        client = CoreClient(core)
        client.ask(1, b"abc")
        gates[0].wait_entered()
        for id in (2, 3, 4):
            client.ask(id, b"abc")
            client.answer(id)
        assert [one.computed for one in engines] == [0, 3] and both.busy == (1, 0)
        gates[0].opened.set()
        client.answer(1)
        client.ask(5, b"abc")
        client.answer(5)
        assert engines[0].computed == 2, "of equals the next in turn"


def test_two_on_the_processor_answer_exactly(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('device = "cpu,cpu"\n' + entry("one") + entry("two", more='device = "cpu"'))
    with fleet_of(file) as (fleet, server), edge_of("one") as edge:
        assert isinstance(fleet["one"]._engine(), Replicated) and not isinstance(fleet["two"]._engine(), Replicated)
        assert fleet["one"].nbytes["cpu"] == 2 * fleet["two"].nbytes["cpu"]
        spec = load_spec(f"one={Small.__module__}:Small")
        with EdgeClient(f"127.0.0.1:{server.port}", spec) as client:
            for cut in ("first", "second"):
                assert all(torch.equal(client.infer(X + n, split=cut).output, edge.forward(X + n)) for n in range(4))


def test_replicas_must_be_one_model() -> None:
    other = FakeEngine()
    other.identity = type(other.identity)("fake", "other", "s1")
    with pytest.raises(Disagreement, match='"fake" is not the same on each device'):
        Replicated([FakeEngine(), other])


def test_devices_of_two_kinds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer would hang on where a request comes to."""
    from cloud_server.config import read_config

    file = tmp_path / "server.toml"
    file.write_text(entry("one"))
    monkeypatch.setattr(hosts, "pick_device", torch.device)
    monkeypatch.setattr(hosts, "kind", lambda device: {"kind": device.type})
    (one,) = read_config(file).models
    assert len(hosts.placed(one, "cuda:0, cuda:1")) == 2
    with pytest.raises(SpecError, match="one: device: one model on cpu and cuda"):
        hosts.placed(one, "cpu,cuda:0")

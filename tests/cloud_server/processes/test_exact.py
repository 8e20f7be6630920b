"""What comes out of a worker process is what comes out of the model: bits, errors, metrics, observations."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import pytest
import torch

from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.processes import Pool
from protos.frames import cut
from protos.isthmus.v1 import split_pb2
from shared_hooks import Parcel, WrappedModel
from shared_hooks.lifecycle.log import Log
from shared_hooks.modules.manifest import encode
from tests.cloud_server.fakes import CoreClient
from tests.cloud_server.processes import deadly
from tests.cloud_server.processes.conftest import SAMPLE, core_on
from tests.cloud_server.real import ask, greet, value
from tests.waiting import eventually
from tests.zoo import Case
from tests.zoo.compare import differences


@pytest.mark.parametrize("where", ["input", "first", "act", "second", "mood", "last"])
def test_every_cut_and_size(client: CoreClient, edge: WrappedModel, where: str) -> None:
    for id, rows in enumerate((2, 5, 4000)):  # the last answer is no longer inline
        x = torch.randn(rows, 8)
        ask(client, id, edge.forward(x, end=where), want_metrics=True)
        found, expected = value(client, id), edge.forward(x)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        reply = client.answer(id).reply
        assert reply is not None and reply.durations.compute_ns > 0 and reply.forward.total_ns > 0


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_the_zoo(zoo_pool: Pool, case: Case) -> None:
    args, kwargs = case.inputs()
    with WrappedModel(case.build()) as edge, core_on(zoo_pool) as core:
        plan = edge.plan(*args, **kwargs)
        client = CoreClient(core, greet=False)
        client.send(greet(edge, case.name))
        cuts = [layer.layer_id for layer in plan.layers if layer.can_split]
        for where in cuts[:: max(1, len(cuts) // 2)]:
            args, kwargs = case.inputs()
            ask(client, where, edge.forward(*args, end=where, **kwargs))
            args, kwargs = case.inputs()
            parcel = Parcel.of_value(edge.forward(*args, **kwargs))
            expected = Parcel.to_value(parcel.header, b"".join(parcel.buffers))
            assert not list(differences(value(client, where), expected)), where


def test_a_file(core: Core, client: CoreClient, edge: WrappedModel) -> None:
    x = torch.randn(3, 8)
    file = io.BytesIO()
    np.save(file, x.numpy())
    parcel = Parcel.of_tensors(None, [torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)])
    digest = core.engines["deadly"].identity.preprocess_digest
    what = split_pb2.FileInput(suffix=".npy", preprocess_digest=digest)
    header = split_pb2.RequestHeader(id=1, header=parcel.header, payload_bytes=parcel.nbytes, file=what)
    client.send(split_pb2.ClientFrame(request=header), *cut(1, parcel.buffers, 1000))
    assert torch.equal(value(client, 1)["logits"], edge.forward(x)["logits"])


@pytest.mark.parametrize(
    ("mood", "says"), [(deadly.RAISE, "ValueError: twenty-six"), (deadly.SYSTEM_EXIT, "SystemExit: 4")]
)
def test_errors_of_the_model(client: CoreClient, edge: WrappedModel, mood: int, says: str) -> None:
    ask(client, 1, edge.forward(torch.full((2, 8), float(mood)), end="second"))
    failed = client.answer(1).failed
    assert failed is not None and (failed.error, failed.message) == ("ModelFailed", says)
    ask(client, 2, edge.forward(torch.ones(2, 8), end="second"))
    value(client, 2)


def test_the_log_has_the_traceback_of_the_worker(
    core: Core, client: CoreClient, edge: WrappedModel, caplog: pytest.LogCaptureFixture
) -> None:
    core.lifecycle.register(Log("cloud_server"))
    with caplog.at_level("INFO", "cloud_server"):
        ask(client, 1, edge.forward(torch.full((2, 8), float(deadly.RAISE)), end="second"))
        client.answer(1)
        eventually(lambda: 'raise ValueError("twenty-six")' in caplog.text)


def test_a_cut_that_the_plan_denies(client: CoreClient, edge: WrappedModel) -> None:
    """Only a worker has the plan; it asks it before it computes."""
    early = edge.forward(torch.randn(2, 8), end="second")
    lying = dataclasses.replace(early, crossing=dataclasses.replace(early.crossing, layer_id=0))
    ask(client, 1, lying)
    failed = client.answer(1).failed
    assert failed is not None and failed.error == "Disagreement" and 'layer 0 is "first" here' in failed.message


def test_observers_look_in_the_worker(client: CoreClient, edge: WrappedModel) -> None:
    ask(client, 1, edge.forward(torch.randn(2, 8), end="second"), hooks=["activation"])
    reply = client.answer(1).reply
    assert reply is not None
    found = json.loads(reply.observations)
    assert {record["name"] for record in found["activation"]["records"]} >= {"last"}
    ask(client, 2, edge.forward(torch.randn(2, 8), end="second"))
    reply = client.answer(2).reply
    assert reply is not None and not reply.observations


def test_a_worker_tells_what_the_digests_are_made_of(core: Core, edge: WrappedModel) -> None:
    """Its model has a plan by its example, as a client's; beyond the operations both have the same facts."""
    client = CoreClient(core, greet=False)
    hello = greet(edge, "deadly")
    hello.hello.weights_hash = "another"
    other = {**edge.manifest(), ("set", "first", "scale"): "3"}
    hello.hello.manifest = encode(other)
    client.send(hello)
    eventually(lambda: client.session._error)
    assert str(client.session._error).count("first: scale: client 3, server has none") == 1
    assert "weights" not in str(client.session._error), "the facts stand in place of the digests"


def test_a_profile_with_progress_and_one_that_nobody_waits_for(
    core: Core, client: CoreClient, edge: WrappedModel
) -> None:
    asked = split_pb2.ProfileRequest(model_id="deadly", warmup=1, repetitions=2, seconds=5)
    *news, last = core.profiles.stream(asked, Caller("test"))
    assert any(one.progress.total for one in news) and json.loads(last.profile)
    asked.fresh = True
    left = core.profiles.stream(asked, Caller("test"))
    next(left)
    left.close()
    ask(client, 1, edge.forward(torch.ones(2, 8), end="second"))
    value(client, 1)

"""Where the user allows it, what the server does not answer is answered on the edge, and says so."""

from __future__ import annotations

import grpc
import pytest
import torch

from edge_client import ConnectionOptions, EdgeClient, ModelChoice
from edge_client.transport import connection
from edge_client.user_text import EDGE_ONLY
from shared_hooks.errors import Disagreement, ServerUnavailable, SpecError
from tests.edge_client import fake_server as fake
from tests.edge_client import small_models
from tests.edge_client.fake_server import FakeServer
from tests.edge_client.test_client import built, image
from tests.ports import free_port
from tests.waiting import eventually

OTHER_WEIGHTS = fake.refuse(grpc.StatusCode.FAILED_PRECONDITION, "weights: client 1, server 3")


def make_client(address: str, fallback: str | None = "edge", patience: float = 60.0) -> EdgeClient:
    return EdgeClient(
        address,
        ModelChoice(built(small_models.Residual), model_id="m"),
        "body",
        fallback=fallback,  # type: ignore[arg-type]
        connection=ConnectionOptions(patience=patience),
    )


def whole(seed: int) -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = built(small_models.Residual)(image(seed))
    return answer


def test_other_weights_are_reported_at_once_and_the_edge_answers() -> None:
    with FakeServer(OTHER_WEIGHTS) as server, make_client(server.address) as client:
        answers = [client.infer(image(seed)) for seed in range(3)]
        assert all(torch.equal(answer.output, whole(seed)) for seed, answer in enumerate(answers))
        assert {answer.split for answer in answers} == {EDGE_ONLY}
        assert all("weights: client 1, server 3" in answer.fallback for answer in answers)
        assert all(answer.times.end_to_end == answer.measured_ns for answer in answers)


def test_without_being_allowed_it_is_an_error() -> None:
    with (
        FakeServer(OTHER_WEIGHTS) as server,
        pytest.raises(Disagreement, match="weights"),
        make_client(server.address, fallback=None) as client,
    ):
        client.infer(image())
    with pytest.raises(SpecError, match="fallback='cloud'"):
        make_client("127.0.0.1:1", fallback="cloud")


def test_a_request_on_its_way_is_finished_here() -> None:
    scripts = fake.break_after(1), OTHER_WEIGHTS
    with FakeServer(*scripts) as server, make_client(server.address) as client:
        (answer,) = client.infer_many([image(4)])
        assert not isinstance(answer, Exception) and "Disagreement" in answer.fallback  # type: ignore[union-attr]
        assert torch.equal(answer.output, whole(4))  # type: ignore[union-attr]


def test_where_nobody_listens_a_request_waits_a_second_and_not_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fallback it does, for a server may come."""
    monkeypatch.setattr(connection, "REFUSED_SECONDS", 0.2)
    port = free_port()
    with make_client(f"127.0.0.1:{port}") as client:
        assert "Connection refused" in client.infer(image()).fallback
        with FakeServer(fake.tails(built(small_models.Residual)), port=port):
            eventually(lambda: client.infer(image()).fallback == "")
        answer = client.infer(image(3))
        assert torch.equal(answer.output, whole(3)) and "ServerUnavailable" in answer.fallback
    with (
        pytest.raises(ServerUnavailable, match=r"for 0\.4 s"),
        make_client(f"127.0.0.1:{port}", fallback=None, patience=0.4) as client,
    ):
        client.infer(image())


def test_lost_server_delays_one_request_and_its_return_is_noticed() -> None:
    port = free_port()
    with make_client(f"127.0.0.1:{port}", patience=0.3) as client:
        first = client.infer(image())
        assert "no server" in first.fallback
        attempts = client.counters.attempts
        assert "no server" in client.infer(image()).fallback
        eventually(lambda: client.counters.attempts > attempts or client.infer(image()) is None)  # called beside them
        with FakeServer(fake.tails(built(small_models.Residual)), port=port):
            eventually(lambda: client.infer(image()).fallback == "")
            assert client.infer(image(5)).split == "body"

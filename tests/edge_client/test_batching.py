"""Requests of several clients as one batch on the server: for those that allow it, and as each of them says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from cloud_server import Limits
from edge_client import Answer, EdgeClient
from edge_client.request.sending import Pending
from shared_hooks.batching import Ways
from shared_hooks.errors import CutRefused
from tests.edge_client.served import Served, Small, served
from tests.waiting import eventually

CUT = "first"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("served")
    with served(folder, limits=Limits(max_batch_size=8)) as server:
        with client(server) as one:
            for rows in (1, 2):
                one.infer(torch.ones(rows, 8))  # the first of a kind goes alone, and is looked at once it is answered
            one.infer(torch.ones(1, 8))
        yield server


def client(server: Served, **more: object) -> EdgeClient:
    words = {"split": CUT, "exact": False, "metrics": False, **more}
    return EdgeClient(server.address, server.spec, **words)  # type: ignore[arg-type]


def together(server: Served, asked: Sequence[tuple[EdgeClient, torch.Tensor, bool | None]]) -> list[Answer]:
    """What each is answered, when all of them wait in line before the server's worker takes the first."""
    server.gate.close()
    received = server.gate.received
    with client(server) as holder:
        hold = holder.submit(torch.ones(1, 8), exact=True)
        assert server.gate.entered.wait(60)
        pending: list[Pending] = [one.submit(x, exact=exact) for one, x, exact in asked]
        eventually(lambda: server.gate.received == received + 1 + len(asked))
        server.gate.opened.set()
        hold.result()
        return [one.result() for one in pending]


def test_clients_that_allow_it_are_one_batch_and_each_has_its_own_rows(server: Served) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(client(server)) for _ in range(4)]
        inputs = [torch.randn(1 + number % 2, 8) for number in range(4)]
        answers = together(server, [(one, x, None) for one, x in zip(clients, inputs, strict=True)])
    assert [answer.batch_size for answer in answers] == [4] * 4
    assert all("batch of 4" in repr(answer) for answer in answers)
    for x, answer in zip(inputs, answers, strict=True):
        torch.testing.assert_close(answer.output, Small()(x).detach())


def test_exact_request_is_not_batched(server: Served) -> None:
    with client(server) as one, client(server) as other, client(server, exact=True) as third:
        x = torch.randn(1, 8)
        answers = together(server, [(one, x, None), (other, x, None), (other, x, True), (third, x, None)])
    assert [answer.batch_size for answer in answers] == [2, 2, 1, 1]
    for answer in answers[2:]:
        assert torch.equal(answer.output, Small()(x))
        assert "batch" not in repr(answer)


def test_witnessed_request_is_exact(server: Served) -> None:
    with client(server, witness=1.0) as one, client(server) as other:
        answers = together(server, [(one, torch.randn(1, 8), None), (other, torch.randn(1, 8), None)])
    assert [answer.batch_size for answer in answers] == [1, 1]
    assert answers[0].witness is not None and answers[0].witness.same


def test_a_batchs_answer_has_no_records_of_layers(server: Served) -> None:
    with client(server, metrics=True) as one, client(server) as other:
        answers = together(server, [(one, torch.randn(1, 8), None), (other, torch.randn(1, 8), None)])
    assert [answer.batch_size for answer in answers] == [2, 2]
    assert answers[0].layers_edge and not answers[0].layers_cloud, "their times would be the batch's"


@pytest.fixture
def joining(server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether requests of two cuts are worth joining; both cuts and the way between them are known."""
    pays = [True]
    monkeypatch.setattr(Ways, "_pays", lambda *_: pays[0])
    with client(server) as one:
        for _ in range(3):  # proven, then the way tried, each after an answer
            one.infer(torch.ones(1, 8))
            one.infer(torch.ones(1, 8), split="second")
        one.infer(torch.ones(1, 8))
    yield pays


def mixed(server: Served, inputs: Sequence[torch.Tensor], exact: Sequence[bool | None]) -> list[Answer]:
    """The first half of the inputs is cut at `CUT`, the others one layer later."""
    half = len(inputs) // 2
    with ExitStack() as stack:
        clients = [
            stack.enter_context(client(server, split=CUT if number < half else "second"))
            for number in range(len(inputs))
        ]
        return together(server, list(zip(clients, inputs, exact, strict=True)))


def test_requests_of_two_cuts_are_one_batch_where_that_pays(server: Served, joining: list[bool]) -> None:
    inputs = [torch.randn(1, 8) for _ in range(4)]
    answers = mixed(server, inputs, [None] * 4)
    assert [answer.batch_size for answer in answers] == [4] * 4
    assert [answer.split for answer in answers] == [CUT, CUT, "second", "second"]
    for x, answer in zip(inputs, answers, strict=True):
        torch.testing.assert_close(answer.output, Small()(x).detach())
    joining[0] = False
    assert [answer.batch_size for answer in mixed(server, inputs, [None] * 4)] == [2] * 4


def test_exact_requests_of_an_earlier_cut_run_on_to_nothing(server: Served, joining: list[bool]) -> None:
    inputs = [torch.randn(1, 8) for _ in range(4)]
    answers = mixed(server, inputs, [True, None, None, None])
    assert [answer.batch_size for answer in answers] == [1, 3, 3, 3]
    assert torch.equal(answers[0].output, Small()(inputs[0]).detach())


def test_refused_middle_part_fails_alone(server: Served, joining: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise CutRefused("not this way")

    monkeypatch.setattr(Ways, "run", refuses)
    inputs = [torch.randn(1, 8) for _ in range(4)]
    answers = mixed(server, inputs, [None] * 4)
    assert [answer.batch_size for answer in answers[:2]] == [1, 1]
    for x, answer in zip(inputs, answers, strict=True):
        torch.testing.assert_close(answer.output, Small()(x).detach())

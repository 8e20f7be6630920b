"""Requests of several clients as one batch on the server: for those that allow it, and as each of them says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from cloud_server import Limits
from edge_client import Answer, EdgeClient
from edge_client.request.pending import Pending
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
    return EdgeClient(server.address, server.spec, CUT, **{"exact": False, "metrics": False, **more})  # type: ignore[arg-type]


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
    assert [answer.company for answer in answers] == [4] * 4
    assert all("batch of 4" in repr(answer) for answer in answers)
    for x, answer in zip(inputs, answers, strict=True):
        torch.testing.assert_close(answer.output, Small()(x).detach())


def test_who_wants_it_exact_goes_alone_and_has_the_models_own_bits(server: Served) -> None:
    with client(server) as one, client(server) as other, client(server, exact=True) as third:
        x = torch.randn(1, 8)
        answers = together(server, [(one, x, None), (other, x, None), (other, x, True), (third, x, None)])
    assert [answer.company for answer in answers] == [2, 2, 1, 1]
    for answer in answers[2:]:
        assert torch.equal(answer.output, Small()(x))
        assert "batch" not in repr(answer)


def test_what_a_witness_compares_is_exact(server: Served) -> None:
    with client(server, witness=1.0) as one, client(server) as other:
        answers = together(server, [(one, torch.randn(1, 8), None), (other, torch.randn(1, 8), None)])
    assert [answer.company for answer in answers] == [1, 1]
    assert answers[0].witness is not None and answers[0].witness.same


def test_a_batchs_answer_has_no_records_of_layers(server: Served) -> None:
    with client(server, metrics=True) as one, client(server) as other:
        answers = together(server, [(one, torch.randn(1, 8), None), (other, torch.randn(1, 8), None)])
    assert [answer.company for answer in answers] == [2, 2]
    assert answers[0].layers_edge and not answers[0].layers_cloud, "their times would be the batch's"

"""Workers that end in every way, under requests and between them: the others are answered, and exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.processes import Pool, PooledModel
from shared_hooks import WrappedModel
from shared_hooks.lifecycle import Lifecycle
from tests.cloud_server.fakes import CoreClient
from tests.cloud_server.processes import deadly
from tests.cloud_server.real import ask, greet, value
from tests.waiting import eventually

LIMITS = Limits(max_worker_requests=500)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(deadly.WORDS, 2, LIMITS) as pool:
        pool.start()
        yield pool


@pytest.fixture(scope="module")
def edge() -> Iterator[WrappedModel]:
    with WrappedModel(deadly.Deadly().eval()) as wrapped:
        wrapped.plan(torch.zeros(2, 8))
        yield wrapped


@pytest.fixture
def client(pool: Pool, edge: WrappedModel) -> Iterator[CoreClient]:
    eventually(lambda: pool.crew.warm == 2, "the workers of an earlier test are not replaced", 120)
    lifecycle = Lifecycle("cloud")
    with Core(
        [PooledModel(pool, one, lifecycle) for one in pool.crew.identities], workers=2, lifecycle=lifecycle
    ) as core:
        client = CoreClient(core, greet=False)
        client.send(greet(edge, "deadly", edge.plan(torch.zeros(2, 8)).digest))
        yield client


def told(first: float, rows: int = 2) -> torch.Tensor:
    x = torch.randn(rows, 8)
    x[0, 0] = first
    return x


@pytest.mark.parametrize("cut", ["input", "first", "act", "second", "mood", "last"])
def test_every_cut_is_exact(client: CoreClient, edge: WrappedModel, cut: str) -> None:
    for id in range(1, 4):
        x = torch.randn(1000 if id == 2 else 2, 8)
        ask(client, id, edge.forward(x, end=cut), want_metrics=True)
        found, expected = value(client, id), edge.forward(x)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("how", [deadly.EXIT, deadly.SEGV, deadly.KILL])
def test_a_request_that_ends_two_workers(pool: Pool, client: CoreClient, edge: WrappedModel, how: int) -> None:
    before = pool.crew.deaths
    ask(client, 1, edge.forward(told(0), end="second"))
    ask(client, 2, edge.forward(told(how), end="second"))
    failed = client.answer(2).failed
    while failed is not None and failed.retry:  # the first had begun to write to the payload
        ask(client, 2, edge.forward(told(how), end="second"))
        failed = client.answer(2, number=len(client.results[2]) + 1).failed
    assert failed is not None and failed.error == "WorkerLost", failed
    value(client, 1)
    eventually(lambda: pool.crew.deaths == before + 2)

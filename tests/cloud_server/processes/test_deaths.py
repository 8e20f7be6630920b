"""Workers that end in every way, under requests and between them: the others are answered, and exactly."""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
import signal

import pytest
import torch

from cloud_server.limits import Limits
from cloud_server.processes import Pool, crew
from shared_hooks import EarlyOutput, Parcel, WrappedModel
from shared_hooks.errors import WorkerLost
from tests.cloud_server.fakes import CoreClient, Result
from tests.cloud_server.processes import deadly
from tests.cloud_server.processes.conftest import STARTS
from tests.cloud_server.real import ask, value
from tests.waiting import eventually


def reported(first: float, rows: int = 2) -> torch.Tensor:
    x = torch.randn(rows, 8)
    x[0, 0] = first
    return x


def answered(client: CoreClient, id: int, early: EarlyOutput) -> Result:
    """Asked as often as the server asks for that, as an edge does: no worker may be warm in time."""
    ask(client, id, early)
    number = 1
    while (result := client.answer(id, number)).failed is not None and result.failed.retry:
        ask(client, id, early)
        number += 1
    return result


def exact(client: CoreClient, edge: WrappedModel, id: int) -> None:
    x = reported(0, 3)
    result = answered(client, id, edge.forward(x, end="second"))
    assert result.reply is not None, result.failed
    found = Parcel.to_value(result.reply.header, result.data)
    assert torch.equal(found["logits"], edge.forward(x)["logits"])


def test_a_request_that_ends_two_workers_and_who_sent_it(
    pool: Pool, client: CoreClient, edge: WrappedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pool.crew.deaths
    failed = answered(client, 1, edge.forward(reported(deadly.EXIT), end="second")).failed
    assert failed is not None and failed.error == "WorkerLost", failed
    assert "2 workers" in failed.message and "ended with status 3" in failed.message
    exact(client, edge, 2)
    eventually(lambda: pool.crew.deaths == before + 2)
    monkeypatch.setattr(pool._crashes, "_most", 2)
    failed = answered(client, 3, edge.forward(reported(0), end="second")).failed
    assert failed is not None and failed.error == "QuotaExceeded" and "ended 2 workers" in failed.message


def test_all_idle_workers_are_killed(pool: Pool, client: CoreClient, edge: WrappedModel) -> None:
    """Nobody computes until a new one is warm; a request waits for it, and health says so."""
    heard: list[bool] = []
    pool.crew.on_warm = heard.append
    killed = pool.crew.pids
    try:
        for pid, number in zip(killed, (signal.SIGKILL, signal.SIGSEGV), strict=True):
            os.kill(pid, number)
        exact(client, edge, 1)
        eventually(lambda: heard == [False, True])
        eventually(lambda: pool.crew.warm == 2, seconds=STARTS)
        assert not set(pool.crew.pids) & set(killed)
    finally:
        pool.crew.on_warm = lambda warm: None


def test_stopped_and_hanging_workers_are_replaced(
    pool: Pool, client: CoreClient, edge: WrappedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "STOPPED_SECONDS", 0.5)
    monkeypatch.setattr(crew, "LOOK_SECONDS", 0.1)
    stopped = pool.crew._idle[-1].pid  # the next to be asked
    os.kill(stopped, signal.SIGSTOP)
    exact(client, edge, 1)
    assert stopped not in pool.crew.pids
    monkeypatch.setattr(pool, "_patience", 0.5)
    ask(client, 2, edge.forward(reported(deadly.NAP), end="second"))
    failed = client.answer(2).failed
    assert failed is not None and failed.error == "TooLarge" and "without coming back to Python" in failed.message


def test_worker_is_replaced_after_its_number_of_requests(
    pool: Pool, client: CoreClient, edge: WrappedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact(client, edge, 1)
    old, deaths = set(pool.crew.pids), pool.crew.deaths
    monkeypatch.setattr(pool.crew, "_limits", dataclasses.replace(pool.crew._limits, max_worker_requests=1))
    pool.crew._look_now()
    eventually(lambda: any(one.leaving for one in pool.crew._workers))
    monkeypatch.undo()
    id = 1
    while set(pool.crew.pids) == old:
        assert len(pool.crew.pids) >= 2
        exact(client, edge, id := id + 1)
    eventually(lambda: len(set(pool.crew.pids) & old) <= 1 and pool.crew.warm == 2)
    assert pool.crew.deaths == deaths


def test_kept_payload_is_private(
    pool: Pool, client: CoreClient, edge: WrappedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook in the worker keeps what crossed: its memory is not used again until the hook lets go."""
    caplog.set_level(logging.INFO)  # a worker that goes now stays in what is kept of the log, and gives its page back
    pages = 2 * mmap.PAGESIZE  # where workers say what they are at, when none starts in place of another
    eventually(lambda: pool.memory.used_bytes == pages, "somebody has more memory than two workers", STARTS)
    for id in range(1, 5):
        ask(client, id, edge.forward(reported(deadly.KEEP, 1000), end="input"))
        value(client, id)
    assert pool.memory.used_bytes >= 4 * 32_000
    for id in range(5, 20):
        exact(client, edge, id)
        ask(client, 100 + id, edge.forward(reported(deadly.FORGET), end="input"))
        value(client, 100 + id)
    eventually(lambda: not any(one._kept for one in pool.crew._workers if one.is_warm) or not exact(client, edge, 200))


def test_an_error_while_workers_are_watched_is_logged_and_the_dead_are_replaced(
    pool: Pool,
    client: CoreClient,
    edge: WrappedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(self: crew.Crew, worker: object) -> None:
        raise RuntimeError("a file of /proc is gone")

    monkeypatch.setattr(crew.Crew, "_check_size", failing)
    with caplog.at_level(logging.ERROR):
        pool.crew._look_now()
        eventually(lambda: "a file of /proc is gone" in caplog.text)
    monkeypatch.undo()
    exact(client, edge, 1)
    before = pool.crew.deaths
    os.kill(pool.crew.pids[0], signal.SIGKILL)
    eventually(lambda: pool.crew.deaths == before + 1 and pool.crew.warm == 2)
    exact(client, edge, 2)


def test_a_start_that_fails_unexpectedly_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no pidfd here")

    monkeypatch.setattr(crew, "WorkerProcess", failing)
    with Pool(["--model=digits"], 1, Limits()) as pool, pytest.raises(WorkerLost, match="RuntimeError: no pidfd here"):
        pool.start()

"""Sessions in worker processes: each stays in one, and ends with it, by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from cloud_server import Core, Limits
from cloud_server.processes import Pool, PooledModel
from shared_hooks.lifecycle import Lifecycle
from tests.cloud_server.decoding.served import close, frame, join, ones, rows, said, send_large
from tests.cloud_server.fakes import CoreClient
from tests.cloud_server.small import failure
from tests.waiting import eventually

CONFIG = """
[models.small]
factory = "tests.edge_client.served:Small"
decoding = "tests.cloud_server.decoding.tail:Adding"
"""
STARTS = 120.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    file = tmp_path_factory.mktemp("pool") / "server.toml"
    file.write_text(CONFIG)
    with Pool([str(file), "--threads=1", "--device=cpu", "--log-level=warning"], 2, Limits()) as pool:
        pool.start()
        yield pool


@pytest.fixture
def core(pool: Pool) -> Iterator[Core]:
    eventually(lambda: pool.crew.warm == 2, "workers that ended are not replaced", STARTS)
    lifecycle = Lifecycle("cloud")
    models = [PooledModel(pool, one, lifecycle) for one in pool.crew.identities]
    with Core(models, workers=2, lifecycle=lifecycle) as core:
        yield core


@pytest.fixture
def client(core: Core) -> CoreClient:
    return join(core)


def test_sessions_stay_in_one_process_and_are_spread(client: CoreClient, core: Core, pool: Pool) -> None:
    places: dict[int, set[int]] = {}
    id = 0
    for number in range(4):
        for session in range(1, 5):
            id += 1
            client.send(frame(id, session, number, {}, [ones()]))
            assert rows(client, id) == (number + 1, 4.0 * (number + 1))
            places.setdefault(session, set()).add(said(client, id)["pid"])
    assert all(len(place) == 1 for place in places.values())
    assert sorted(pid for place in places.values() for pid in place) == sorted([*pool.crew.pids] * 2)
    assert core.decoding.nbytes == 4 * 4 * 8
    client.send(*(close(100 + session, session) for session in range(1, 5)))
    assert all(client.answer(100 + session).reply is not None for session in range(1, 5))
    assert [one.sessions for one in pool.crew._workers] == [0, 0]


def test_copies_and_large_payloads(client: CoreClient, pool: Pool) -> None:
    used = pool.memory.used_bytes
    send_large(client, 1, 7, 0, ones(500_000))
    assert rows(client, 1) == (1, 500_000.0)
    client.send(frame(2, 8, 0, {}, [ones(2)], fork=(7, 1)))
    assert rows(client, 2) == (2, 500_002.0)
    client.send(frame(3, 7, 1, {"echo": True}, [torch.ones(10_000)]))
    assert rows(client, 3) == (2, 510_000.0)
    client.send(frame(4, 9, 0, {"need": 1}, [], fork=(7, 2)))
    client.answer(4)
    client.send(frame(5, 9, 0, {}, [], fork=(7, 2)))
    assert rows(client, 5) == (2, 510_000.0)
    eventually(lambda: pool.memory.used_bytes <= used + 500_000)  # the answer may still be kept; no payload is


def test_refused_step_leaves_the_session_unchanged(client: CoreClient) -> None:
    client.send(frame(1, 7, 0, {}, [ones()]))
    rows(client, 1)
    for id, (asked, name) in enumerate({"refuse": "InputMismatch", "raise": "ModelFailed"}.items(), 2):
        client.send(frame(id, 7, 1, {"fail": asked}, [ones()]))
        assert failure(client, id)[0] == name
    client.send(frame(8, 9, 0, {}, [], cut="nowhere"))
    assert failure(client, 8)[0] == "UnknownLayer"
    client.send(frame(9, 7, 1, {}, [ones()]))
    assert rows(client, 9) == (2, 8.0)
    client.send(frame(10, 7, 2, {"fail": "exit"}, [ones()]))
    assert failure(client, 10)[0] == "ModelFailed"
    client.send(frame(11, 7, 2, {}, [ones()]))
    name, message = failure(client, 11)
    assert name == "SessionLost" and "SystemExit" in message


def test_a_worker_that_ends_takes_its_sessions_along_and_no_others(client: CoreClient, core: Core, pool: Pool) -> None:
    for session in (1, 2, 3, 4):
        client.send(frame(session, session, 0, {}, [ones()]))
        rows(client, session)
    pids = {session: said(client, session)["pid"] for session in (1, 2, 3, 4)}
    client.send(frame(10, 1, 1, {"fail": "kill"}, [ones()]))
    name, message = failure(client, 10)
    assert name == "SessionLost" and "SIGKILL" in message
    beside = next(session for session in (2, 3, 4) if pids[session] == pids[1])
    elsewhere = [session for session in (2, 3, 4) if pids[session] != pids[1]]
    eventually(lambda: len(core.decoding) == 2)  # nobody has asked for the one beside
    assert core.decoding.dropped == {"lost": 2}
    client.send(frame(11, beside, 1, {}, [ones()]))
    name, message = failure(client, 11)
    assert name == "SessionLost" and "worker process" in message
    for id, session in enumerate(elsewhere, 12):
        client.send(frame(id, session, 1, {}, [ones()]))
        assert rows(client, id) == (2, 8.0)
    client.send(frame(20, 1, 0, {}, [ones()]))  # made again, wherever there is a worker
    assert rows(client, 20) == (1, 4.0)


def test_an_idle_worker_is_killed(client: CoreClient, core: Core) -> None:
    client.send(frame(1, 7, 0, {}, [ones()]))
    rows(client, 1)
    os.kill(said(client, 1)["pid"], signal.SIGKILL)
    client.send(frame(2, 7, 1, {}, [ones()]))
    assert failure(client, 2)[0] == "SessionLost"
    assert len(core.decoding) == 0

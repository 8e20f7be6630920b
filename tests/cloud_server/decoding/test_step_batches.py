"""Steps of several sessions computed together: what goes wrong in one, the others do not hear of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cloud_server import Core, Limits
from protos.frames import cut as chunks
from protos.isthmus.v1 import split_pb2
from shared_hooks import Parcel
from tests.cloud_server.decoding.rows import Layers, Rows, stops
from tests.cloud_server.decoding.served import answered, frame, join, serving
from tests.cloud_server.decoding.tail import CUT
from tests.cloud_server.fakes import CoreClient, cancel
from tests.cloud_server.small import failure
from tests.waiting import eventually

Asked = dict[str, Any]
_ids = itertools.count(1)
_names = itertools.count()


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def core(limits: Limits) -> Iterator[Core]:
    with serving(limits, tail=Layers) as core:
        yield core
        for stop in stops.values():
            stop.opened.set()


@pytest.fixture
def client(core: Core) -> CoreClient:
    return join(core)


def row(number: int, rows: int = 1) -> torch.Tensor:
    return torch.linspace(-1, 1, 8 * rows).reshape(rows, 8) * (number + 1)


def step(client: CoreClient, session: int, number: int, asked: Asked | None = None, *, together: bool = True) -> int:
    """The request's id."""
    id = next(_ids)
    decoding = split_pb2.Decoding(cut=CUT, together=int(together))
    client.send(frame(id, session, number, asked, [row(session, 1 + session % 3)], decoding=decoding))
    return id


def reply(client: CoreClient, id: int) -> split_pb2.ReplyHeader:
    result = client.answer(id)
    assert result.reply is not None, result.failed
    return result.reply


def opened(client: CoreClient, *sessions: int) -> None:
    for session in sessions:
        reply(client, step(client, session, 0))


def held(core: Core, client: CoreClient) -> Any:
    """The worker has a step until it is opened; what comes meanwhile waits in line."""
    name = f"held {next(_names)}"
    step(client, 1000 + next(_names), 0, {"stop": name, "stop_at": 0}, together=False)
    stops[name].reached()
    return stops[name].opened


def asked_at_once(core: Core, client: CoreClient, steps: dict[int, Asked], number: int = 1) -> list[int]:
    """Steps of these sessions, all in line before a worker takes the first; their requests' ids."""
    hold = held(core, client)
    ids = [step(client, session, number, asked) for session, asked in steps.items()]
    eventually(lambda: len(core.scheduler._queue) == len(ids))
    hold.set()
    return ids


def test_batched_steps_report_it_and_differ_by_rounding_only(core: Core, client: CoreClient) -> None:
    opened(client, 1, 2, 3)
    alone = [client.answer(step(client, session, 1, together=False)) for session in (1, 2, 3)]
    ids = asked_at_once(core, client, {1: {}, 2: {}, 3: {}}, number=2)
    assert [reply(client, id).batch_size for id in ids] == [3, 3, 3]
    assert [one.reply.batch_size for one in alone if one.reply] == [1, 1, 1]
    for session, id in zip((1, 2, 3), ids, strict=True):
        reported, (found,) = answered(client, id)
        (wanted,) = answered(client, step(client, session, 3, together=False))[1]
        assert reported["steps"] == 3
        torch.testing.assert_close(found, wanted)


def test_exact_steps_are_not_batched(core: Core, client: CoreClient) -> None:
    opened(client, 1, 2, 3)
    hold = held(core, client)
    exact = step(client, 2, 1, together=False)
    others = [step(client, session, 1) for session in (1, 3)]
    eventually(lambda: len(core.scheduler._queue) == 3)
    hold.set()
    assert reply(client, exact).batch_size == 1
    assert [reply(client, id).batch_size for id in others] == [2, 2]


def test_first_steps_and_large_ones_are_computed_alone(core: Core, client: CoreClient) -> None:
    opened(client, 1, 2)
    hold = held(core, client)
    first = [step(client, session, 0) for session in (3, 4)]
    large = []
    for session in (1, 2):
        decoding = split_pb2.Decoding(cut=CUT, together=1)
        large.append(next(_ids))
        tensor = torch.ones(4000, 8)
        sent = frame(large[-1], session, 1, {}, [tensor], decoding=decoding, payload=b"")
        client.send(sent, *chunks(large[-1], Parcel.of_tensors({}, [tensor]).buffers, 100_000))
    eventually(lambda: len(core.scheduler._queue) == 4)
    hold.set()
    assert [reply(client, id).batch_size for id in [*first, *large]] == [1] * 4


def test_failed_step_leaves_all_sessions_unchanged(core: Core, client: CoreClient) -> None:
    opened(client, 1, 2, 3)
    ids = asked_at_once(core, client, {1: {}, 2: {"fail_at": 1}, 3: {}})
    assert failure(client, ids[1])[0] == "InputMismatch"
    assert [reply(client, id).batch_size for id in (ids[0], ids[2])] == [3, 3]
    again = asked_at_once(core, client, {2: {}})
    assert reply(client, again[0]).batch_size == 1


def test_step_out_of_order_is_refused_and_others_continue(core: Core, client: CoreClient) -> None:
    opened(client, 1, 2)
    hold = held(core, client)
    ids = [step(client, 1, 1), step(client, 2, 7), step(client, 99, 3)]
    eventually(lambda: len(core.scheduler._queue) == 3)
    hold.set()
    assert reply(client, ids[0]).batch_size == 1
    assert [failure(client, id)[0] for id in ids[1:]] == ["StepOutOfOrder", "SessionLost"]


def test_step_that_raises_system_exit_fails_alone(core: Core, client: CoreClient) -> None:
    opened(client, 1, 2, 3)
    ids = asked_at_once(core, client, {1: {}, 2: {"exit_at": 1}, 3: {}})
    assert failure(client, ids[1])[0] == "ModelFailed"
    assert [reply(client, id).batch_size for id in (ids[0], ids[2])] == [3, 3]
    assert failure(client, step(client, 2, 1))[0] == "SessionLost"


def test_cancelled_step_ends_between_layers_and_others_continue(core: Core, client: CoreClient) -> None:
    opened(client, 1, 2, 3)
    hold = held(core, client)
    slow = {"times": 6, "stop": "cancel", "stop_at": 2}
    ids = [step(client, 1, 1, {"times": 6, "name": "gone"}), step(client, 2, 1, slow), step(client, 3, 1, {"times": 6})]
    eventually(lambda: len(core.scheduler._queue) == 3)
    hold.set()
    stops["cancel"].reached()
    client.send(cancel(ids[0]))
    assert failure(client, ids[0])[0] == "Cancelled"
    stops["cancel"].opened.set()
    assert [reply(client, id).batch_size for id in ids[1:]] == [3, 3]
    assert Rows.done["gone"] == 2
    assert reply(client, step(client, 1, 1)).batch_size == 1, "its session is at the step before"


class TestTime:
    @pytest.fixture
    def limits(self) -> Limits:
        return Limits(max_compute_seconds=0.4)

    def test_overlong_step_ends_alone(self, core: Core, client: CoreClient) -> None:
        opened(client, 1, 2, 3)
        ids = asked_at_once(core, client, {1: {}, 2: {"spin_at": 1}, 3: {}})
        assert failure(client, ids[1])[0] == "TooLarge"
        assert [reply(client, id).batch_size for id in (ids[0], ids[2])] == [3, 3]
        assert failure(client, step(client, 2, 1))[0] == "SessionLost"


class TestSize:
    @pytest.fixture
    def limits(self) -> Limits:
        return Limits(max_batch_size=2)

    def test_no_more_than_that_many(self, core: Core, client: CoreClient) -> None:
        opened(client, *range(1, 6))
        ids = asked_at_once(core, client, {session: {} for session in range(1, 6)})
        assert sorted(reply(client, id).batch_size for id in ids) == [1, 2, 2, 2, 2]


class TestDelay:
    @pytest.fixture
    def limits(self) -> Limits:
        return Limits(max_batch_size=2, max_queue_delay_microseconds=1_000_000)

    def test_a_worker_with_nothing_else_to_do_waits_for_another(self, core: Core, client: CoreClient) -> None:
        opened(client, 1, 2)
        ids = [step(client, 1, 1), step(client, 2, 1)]
        assert [reply(client, id).batch_size for id in ids] == [2, 2]

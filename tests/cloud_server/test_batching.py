"""Requests of several clients as one batch: what a client can do to its neighbours, which is nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cloud_server import Core, Limits, ModelEntry, ServedModel
from cloud_server.executor import _let_go
from protos.isthmus.v1 import split_pb2
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.config import Table
from shared_hooks.lifecycle import Event, Lifecycle
from shared_hooks.models import spec_from_table
from tests.cloud_server.fakes import CoreClient, cancel
from tests.cloud_server.real import ask, greet, value
from tests.cloud_server.small import failure
from tests.edge_client.served import Gate
from tests.waiting import PATIENCE, eventually

WORDS = 20
_ids = itertools.count(1)


class Words(nn.Module):
    """Ids (n, 4), of which those from `WORDS` up have no row in the table of the tail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.words = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(32, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.mix(self.words(ids)).relu().flatten(1))
        return found


class Heard:
    """A hook that counts tails, and says whose stages it heard of."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []

    def before_tail(self, event: Event) -> None:
        self._add(event)

    def after_tail(self, event: Event) -> None:
        self._add(event)

    def _add(self, event: Event) -> None:
        assert event.request is not None, "a stage of no request"
        self.stages.append((event.stage.value, event.request.id))


class World:
    """A core whose one worker is held while requests come, and clients of it, each an account of its own."""

    def __init__(self, core: Core, gate: Gate, heard: Heard, edge: WrappedModel) -> None:
        self.core, self.gate, self.heard, self.edge = core, gate, heard, edge
        self._clients: dict[str, CoreClient] = {}

    def client(self, name: str) -> CoreClient:
        """``evil/2`` is another client of the account ``evil``."""
        if name not in self._clients:
            self._clients[name] = made = CoreClient(self.core, greet=False, identity=name.partition("/")[0])
            made.send(greet(self.edge, "words", self.edge.plan(example()).digest, client_id=name))
        return self._clients[name]

    def ask(self, name: str, early: EarlyOutput, **changes: Any) -> int:
        id = next(_ids)
        ask(self.client(name), id, early, **{"together": True, **changes})
        return id

    def known(self, early: EarlyOutput) -> None:
        """Requests of this cut may join afterwards."""
        for _ in range(2):  # the first is looked at once it is answered
            self.reply("first", self.ask("first", early))

    def reply(self, name: str, id: int) -> split_pb2.ReplyHeader:
        result = self.client(name).answer(id)
        assert result.reply is not None, result.failed
        return result.reply

    def at_once(self, asked: Sequence[tuple[str, EarlyOutput, dict[str, Any]]]) -> list[int]:
        """Requests that are all in line before the worker takes the first of them."""
        self.gate.close()
        hold = self.ask("holder", self.head(example()), together=False)
        assert self.gate.entered.wait(PATIENCE)
        waiting = len(self.core.scheduler._queue)
        ids = [self.ask(name, early, **changes) for name, early, changes in asked]
        eventually(lambda: len(self.core.scheduler._queue) == waiting + len(ids))
        self.heard.stages.clear()
        self.gate.opened.set()
        self.reply("holder", hold)
        return ids

    def head(self, ids: torch.Tensor, cut: str = "input") -> EarlyOutput:
        return self.edge.head(cut, ids)

    def sizes(self, names: Sequence[str], ids: Sequence[int]) -> list[int]:
        return [self.reply(name, id).batch_size for name, id in zip(names, ids, strict=True)]


def example() -> torch.Tensor:
    return torch.arange(8).reshape(2, 4)


def row(number: int, rows: int = 1) -> torch.Tensor:
    return (torch.arange(4 * rows).reshape(rows, 4) * 3 + number) % WORDS


@pytest.fixture
def limits() -> Limits:
    return Limits(max_batch_size=6)


@pytest.fixture
def world(limits: Limits) -> Iterator[World]:
    table = {"id": "words", "factory": f"{__name__}:Words"}
    source = {"shape": [2, 4], "dtype": "int64", "high": WORDS}
    spec = spec_from_table(Table({**table, "example": {"args": [source]}}, "test"), Path.cwd())
    lifecycle, gate, heard = Lifecycle("cloud"), Gate(), Heard()
    gate.opened.set()
    lifecycle.register(gate)
    lifecycle.register(heard)
    engine = ServedModel(ModelEntry(spec), torch.device("cpu"), lifecycle)
    with Core([engine], limits, observers=("activation",), lifecycle=lifecycle) as core, WrappedModel(Words()) as edge:
        edge.model.eval()
        yield World(core, gate, heard, edge)
        gate.opened.set()


def expected(world: World, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = Words().eval()(ids)
        return found


def test_an_input_that_fails_fails_alone_and_goes_alone_for_a_while(world: World) -> None:
    world.known(world.head(row(0)))
    names, inputs = ["a", "evil", "b"], [row(1), row(2), row(3)]
    inputs[1][0, 0] = WORDS + 5
    ids = world.at_once([(name, world.head(x), {}) for name, x in zip(names, inputs, strict=True)])
    assert failure(world.client("evil"), ids[1])[0] == "ModelFailed"
    for name, x, id in ((names[0], inputs[0], ids[0]), (names[2], inputs[2], ids[2])):
        assert world.reply(name, id).batch_size <= 1
        assert torch.equal(value(world.client(name), id), expected(world, x)), "computed again alone, it is exact"
    inputs[1] = row(2)
    ids = world.at_once([(name, world.head(x), {}) for name, x in zip(names, inputs, strict=True)])
    assert world.sizes(names, ids) == [2, 0, 2]


def test_changing_client_ids_spoil_two_batches_a_minute_at_most(world: World) -> None:
    world.known(world.head(row(0)))
    bad = row(2)
    bad[0, 0] = WORDS + 5
    for number in range(4):
        names = ["a", f"evil/{number}", "b"]
        ids = world.at_once([(name, world.head(bad if "evil" in name else row(1)), {}) for name in names])
        assert failure(world.client(names[1]), ids[1])[0] == "ModelFailed"
        sizes = [world.reply(name, id).batch_size for name, id in ((names[0], ids[0]), (names[2], ids[2]))]
        assert sizes == [0 if number < 2 else 2] * 2


def test_a_row_of_nan_and_its_neighbours(world: World) -> None:
    heads = [world.head(row(number), "mix") for number in range(3)]
    world.known(heads[0])
    poisoned = replace(heads[1], pieces=tuple(torch.full_like(piece, torch.nan) for piece in heads[1].pieces))
    names = ["a", "evil", "b"]
    ids = world.at_once(list(zip(names, [heads[0], poisoned, heads[2]], [{}] * 3, strict=True)))
    assert world.sizes(names, ids) == [3] * 3
    found = [value(world.client(name), id) for name, id in zip(names, ids, strict=True)]
    assert found[1].isnan().all()
    for number in (0, 2):
        torch.testing.assert_close(found[number], expected(world, row(number)))


def test_rows_count_and_one_of_too_many_goes_alone(world: World) -> None:
    for rows in (1, 4, 7):
        world.known(world.head(row(0, rows)))
    names = ["a", "b", "large", "c"]
    sizes = [1, 4, 7, 4]
    ids = world.at_once([(n, world.head(row(0, rows)), {}) for n, rows in zip(names, sizes, strict=True)])
    assert world.sizes(names, ids) == [2, 2, 0, 0]
    found = [value(world.client(name), id) for name, id in zip(names, ids, strict=True)]
    for rows, output in zip(sizes, found, strict=True):
        torch.testing.assert_close(output, expected(world, row(0, rows)))


def test_false_description_of_a_cut_is_not_batched(world: World) -> None:
    """It says that its inputs are larger than what crosses is of."""
    honest = world.head(row(0))
    world.known(honest)
    crossing = honest.crossing
    lying = replace(crossing, inputs=(replace(crossing.inputs[0], shape=(9, 4)),), plan_digest="", cache={})
    names = ["a", "evil", "b"]
    heads = [honest, replace(honest, crossing=lying), honest]
    ids = world.at_once([(name, early, {}) for name, early in zip(names, heads, strict=True)])
    assert [world.reply(name, id).batch_size for name, id in ((names[0], ids[0]), (names[2], ids[2]))] == [2, 2]
    assert world.client("evil").answer(ids[1]).failed is not None
    again = world.at_once([(name, early, {}) for name, early in zip(names, heads, strict=True)])
    assert world.reply("a", again[0]).batch_size == 2 and world.client("evil").answer(again[1]).failed is not None


def test_corrupted_request_fails_alone(world: World) -> None:
    early = world.head(row(0))
    world.known(early)
    names = ["a", "evil", "b"]
    altered = {"header": world.head(row(5)).pack().header}  # with another payload's checksum
    ids = world.at_once([(name, early, altered if name == "evil" else {}) for name in names])
    assert world.sizes(names[::2], ids[::2]) == [2, 2]
    assert failure(world.client("evil"), ids[1])[0] == "BadFrame"


def test_observed_and_exact_requests_are_not_batched(world: World) -> None:
    early = world.head(row(0))
    world.known(early)
    names = ["a", "looking", "b", "exact"]
    changes: list[dict[str, Any]] = [{}, {"hooks": ["activation"]}, {}, {"together": False}]
    ids = world.at_once([(name, early, change) for name, change in zip(names, changes, strict=True)])
    assert world.sizes(names, ids) == [2, 0, 2, 0]
    assert world.reply("looking", ids[1]).observations


def test_hooks_hear_of_each_request_by_itself(world: World) -> None:
    early = world.head(row(0))
    world.known(early)
    ids = world.at_once([(name, early, {}) for name in "ab"])
    assert world.sizes("ab", ids) == [2, 2]
    eventually(lambda: len(world.heard.stages) >= 5)
    own = [(stage, id) for stage, id in world.heard.stages if id in ids]
    assert own == [(stage, id) for id in ids for stage in ("before_tail", "after_tail")]


def test_cancelled_request_is_left_out_of_its_batch(world: World) -> None:
    early = world.head(row(0))
    world.known(early)
    world.gate.close()
    hold = world.ask("holder", early, together=False)
    assert world.gate.entered.wait(PATIENCE)
    ids = [world.ask(name, early) for name in "abc"]
    eventually(lambda: len(world.core.scheduler._queue) == 3)
    world.client("b").send(cancel(ids[1]))
    assert failure(world.client("b"), ids[1])[0] == "Cancelled"
    world.gate.opened.set()
    world.reply("holder", hold)
    assert world.sizes("ac", [ids[0], ids[2]]) == [2, 2]


def test_request_that_would_miss_its_deadline_in_a_batch_goes_first(world: World) -> None:
    early = world.head(row(0))
    world.known(early)
    world.gate.close()
    hold = world.ask("holder", early, together=False)
    assert world.gate.entered.wait(PATIENCE)
    names = ["a", "hurried", "b"]
    for name in names:
        for _ in range(8):  # such a request has taken so long of late
            world.core.scheduler._queue._costs.add((f"identity {name}", name), 30.0)
    ids = [world.ask(name, early, deadline_ms=50_000 if name == "hurried" else 0) for name in names]
    eventually(lambda: len(world.core.scheduler._queue) == 3)
    world.gate.opened.set()
    world.reply("holder", hold)
    assert world.sizes(names, ids) == [2, 0, 2]


class TestSmall:
    @pytest.fixture
    def limits(self) -> Limits:
        return Limits(max_request_bytes=100, max_batch_size=6)

    def test_no_more_are_decoded_together_than_one_request_may_be(self, world: World) -> None:
        early = world.head(row(0))  # 32 bytes
        world.known(early)
        ids = world.at_once([(name, early, {}) for name in "abcd"])
        assert world.sizes("abcd", ids) == [3, 3, 3, 0]


class TestQueue:
    @pytest.fixture
    def limits(self) -> Limits:
        return Limits(max_queue_size=2)

    def test_request_beyond_the_queue_limit_is_refused(self, world: World) -> None:
        early = world.head(row(0))
        world.gate.close()
        hold = world.ask("holder", early)
        assert world.gate.entered.wait(PATIENCE)
        ids = [world.ask(name, early) for name in "abc"]
        assert "max_queue_size" in failure(world.client("c"), ids[2])[1]
        world.gate.opened.set()
        for name, id in zip(["holder", "a", "b"], [hold, *ids[:2]], strict=True):
            world.reply(name, id)


def test_causes_that_go_round_in_a_circle_are_let_go_of() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    _let_go(first)
    assert first.__traceback__ is None

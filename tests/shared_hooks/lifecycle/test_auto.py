"""`AutoClient`: moves are reported, and a hedge is a request of its own at the same place of the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from edge_client import EdgeClient
from edge_client.adaptive import AutoClient
from edge_client.adaptive.controller import ChosenWay
from edge_client.model_choice import ModelChoice
from shared_hooks.errors import Cancelled, ServerUnavailable
from shared_hooks.lifecycle import Stage
from tests.edge_client import fake_server as fake
from tests.edge_client.adaptive.test_auto import CallReports
from tests.edge_client.fake_server import FakeServer
from tests.shared_hooks.lifecycle.service import Residual, Spy, image, whole
from tests.waiting import PATIENCE, eventually


class Moving(CallReports):
    """Says that it moves where the name is another one than before."""

    before = ""

    def choose(self, now: int) -> ChosenWay:
        choice = super().choose(now)
        moved, self.before = choice.candidate.name != self.before, choice.candidate.name
        return replace(choice, moved=moved)


@contextmanager
def auto(
    server: FakeServer, reported: CallReports, make: type[Residual] = Residual
) -> Iterator[tuple[AutoClient, Spy]]:
    spy = Spy("edge")
    example = (image(),), {}
    with (
        EdgeClient(
            server.address, ModelChoice(make().eval(), model_id="m", device="cpu", example=example), lifecycle=spy
        ) as client,
        AutoClient(client, reported) as one,  # type: ignore[arg-type]
    ):
        yield one, spy


def test_moves_are_reported_once() -> None:
    reported = Moving("body", network_ms=1e6)
    with FakeServer(fake.tails(Residual().eval())) as server, auto(server, reported) as (one, spy):
        for name in ("body", "body", "edge-only", "stem"):
            reported.name = name
            assert torch.equal(one.infer(image()).output, whole())
        moves = [(one.facts["old"], one.facts["new"]) for one in spy.of(Stage.ON_SPLIT_CHANGE)]
        assert moves == [(None, "body"), ("body", "edge-only"), ("edge-only", "stem")]
        assert spy.of(Stage.ON_SPLIT_CHANGE)[0].facts["reason"] == "reported"


def test_a_hedge_has_the_place_of_its_request() -> None:
    """The server takes and answers nothing: each input is begun twice, and answered here."""
    reported = CallReports("body")
    with FakeServer(fake.deaf) as server, auto(server, reported) as (one, spy):
        answers = list(one.infer_many([image(seed) for seed in range(3)]))
        assert all(torch.equal(answer.output, whole(image(seed))) for seed, answer in enumerate(answers))
        eventually(lambda: spy.count(Stage.AFTER_REQUEST) == 6)
        places = [(one.request.index, one.request.total) for one in spy.of(Stage.BEFORE_REQUEST) if one.request]
        assert sorted(places) == [(index, 3) for index in range(3) for _ in range(2)]
        ids = [one.request.id for one in spy.of(Stage.AFTER_REQUEST) if one.request]
        assert len(set(ids)) == 6 and spy.count(Stage.ON_ERROR) == 0
        ends = [type(one.facts["error"]) for one in spy.of(Stage.AFTER_REQUEST)]
        assert ends.count(Cancelled) == 3 and ends.count(type(None)) == 3
        hedged = {one.thread for one in spy.of(Stage.BEFORE_HEAD) if one.facts["split"] == "edge-only"}
        assert all(thread.startswith("edge-hedge") for thread in hedged)
        for stage in (Stage.BEFORE_HEAD, Stage.AFTER_HEAD, Stage.ON_RESULT):
            answered = [one.request.id for one in spy.of(stage) if one.request]
            assert len(set(answered)) == len(answered), "an event of one request was reported as another's"


def test_a_hedge_that_is_left_is_cancelled_and_no_error() -> None:
    entered = threading.Event()

    class Slow(Residual):
        def forward(self, image: Tensor) -> Tensor:
            stem = self.stem(image)
            if threading.current_thread().name.startswith("edge-hedge"):
                entered.set()
                while True:  # left by the hook at the next layer
                    self.relu(stem)
            return super().forward(image)

    def delay(_: int) -> float:
        assert entered.wait(PATIENCE)
        return 0.0

    reported = CallReports("input", network_ms=0.001)
    with FakeServer(fake.tails(Residual().eval(), delay=delay)) as server, auto(server, reported, Slow) as (one, spy):
        assert torch.equal(one.infer(image()).output, whole())
        eventually(lambda: spy.count(Stage.AFTER_REQUEST) == 2)
        assert spy.count(Stage.ON_ERROR) == 0
        errors = [one.facts["error"] for one in spy.of(Stage.AFTER_REQUEST)]
        assert sorted(type(error).__name__ for error in errors) == ["Cancelled", "NoneType"]


def test_a_server_that_fails_is_reported_and_answered_here() -> None:
    reported = CallReports("body", network_ms=1e6)
    with FakeServer(fake.fail("RemoteError", "on purpose")) as server, auto(server, reported) as (one, spy):
        assert torch.equal(one.infer(image()).output, whole())
        eventually(lambda: spy.count(Stage.AFTER_REQUEST) == 2)
        errors = [one.facts["error"] for one in spy.of(Stage.ON_ERROR)]
        assert len(errors) == 1 and "on purpose" in str(errors[0]) and not isinstance(errors[0], ServerUnavailable)


def test_ctrl_c_gives_the_request_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = CallReports("body", network_ms=1e6)
    with FakeServer(fake.tails(Residual().eval())) as server, auto(server, reported) as (one, spy):
        one.infer(image())

        def interrupted(*_: Any) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("edge_client.transport.exchange.Exchange.wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                one.infer(image())
        assert spy.count(Stage.AFTER_REQUEST) == spy.count(Stage.BEFORE_REQUEST) == 2
        for _ in range(5):
            one.infer(image())

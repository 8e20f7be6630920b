"""What comes when: one request's stages on both sides, and those around it; every stage and fact comes, none other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor, nn

from edge_client import Answer, Call, EdgeClient, Failure
from edge_client.model_choice import ModelChoice
from edge_client.probing import fetch_profile
from edge_client.transport.options import ConnectionOptions
from protos.isthmus.v1 import split_pb2
from shared_hooks import WrappedModel
from shared_hooks.errors import (
    Cancelled,
    DeadlineExceeded,
    HookRefused,
    InputMismatch,
    IsthmusError,
    ModelFailed,
    ServerUnavailable,
)
from shared_hooks.lifecycle import Event, Lifecycle, Stage, is_first, is_last
from shared_hooks.models import find_inputs, load_spec
from tests.edge_client import fake_server as fake
from tests.edge_client.fake_server import FakeServer
from tests.shared_hooks.lifecycle.service import (
    Residual,
    Service,
    Spy,
    everywhere,
    image,
    service,
    spec_of,
    too_much,
    whole,
)
from tests.shipped import IMAGES
from tests.waiting import eventually

EDGE = [
    *("before_request", "before_head", "before_bank", "after_bank", "after_head", "before_encode", "after_encode"),
    *("before_decode", "after_decode", "on_result", "after_request"),
]
LOCAL = ["before_request", "before_head", "after_head", "on_result", "after_request"]
CLOUD = [
    *("before_request", "before_receive", "after_receive", "before_decode", "after_decode", "before_inject"),
    *("after_inject", "before_tail", "after_tail", "before_encode", "after_encode", "on_result", "after_request"),
]
THREADS = ("send", "receive")


def without(names: list[str], *words: str) -> list[str]:
    return [name for name in names if not name.endswith(words)]


class TestOneRequest:
    def test_the_edge(self) -> None:
        with service() as both, both.client() as client:
            client.infer(image())
            answer = client.infer(image())
            own = both.edge.stages(answer.request_id)
            assert without(own, *THREADS) == EDGE
            eventually(lambda: "after_send" in both.edge.stages(answer.request_id))
            own = both.edge.stages(answer.request_id)
            assert sorted(set(own) - set(EDGE)) == ["after_receive", "after_send", "before_receive", "before_send"]
            assert len(own) == len(EDGE) + 4  # each once
            order = own.index
            assert order("after_encode") < order("before_send") < order("before_receive") < order("after_receive")
            assert order("after_receive") < order("before_decode") and order("before_send") < order("after_send")

    def test_the_cloud(self) -> None:
        with service() as both, both.client() as client:
            client.infer(image())
            answer = client.infer(image())
            eventually(lambda: "after_send" in both.cloud.stages(answer.request_id))
            eventually(lambda: "after_request" in both.cloud.stages(answer.request_id))
            own = both.cloud.stages(answer.request_id)
            assert without(own, "send") == CLOUD and len(own) == len(CLOUD) + 2
            assert own.index("on_result") < own.index("before_send") < own.index("after_send")

    def test_the_whole_model_here(self) -> None:
        with service() as both, both.client("edge-only") as client:
            client.infer(image())
            answer = client.infer(image())
            assert both.edge.stages(answer.request_id) == LOCAL and not both.cloud.count(Stage.AFTER_CONNECT)
            assert torch.equal(answer.output, whole())

    def test_a_file(self) -> None:
        with service(spec=load_spec("digits")) as both, both.client("cloud-only-file") as client:
            answer = client.infer(find_inputs(IMAGES)[0])
            eventually(lambda: "after_send" in both.cloud.stages(answer.request_id))
            eventually(lambda: "after_request" in both.cloud.stages(answer.request_id))
        heads = ("head", "bank", "inject")
        assert without(both.edge.stages(answer.request_id), *THREADS) == without(EDGE, *heads)
        assert without(both.cloud.stages(answer.request_id), "send") == without(CLOUD, "inject")

    def test_facts_are_the_live_values(self) -> None:
        with service() as both, both.client() as client:
            value = image()
            answer = client.infer(value)
            fact = {one.stage: one.facts for one in both.edge.emitted if one.request is not None}
            assert fact[Stage.BEFORE_REQUEST]["inputs"].args[0] is value
            assert fact[Stage.AFTER_BANK]["early"] is fact[Stage.AFTER_HEAD]["early"]
            assert fact[Stage.ON_RESULT]["answer"] is answer is fact[Stage.AFTER_REQUEST]["answer"]
            assert fact[Stage.AFTER_REQUEST]["error"] is None and fact[Stage.AFTER_HEAD]["split"] == "body"
            assert fact[Stage.BEFORE_SEND]["nbytes"] == answer.bytes_up
            assert fact[Stage.AFTER_RECEIVE]["nbytes"] == answer.bytes_down
            about = both.edge.of(Stage.ON_RESULT)[0].request
            eventually(lambda: both.cloud.count(Stage.AFTER_REQUEST) == 1)
            there = both.cloud.of(Stage.AFTER_REQUEST)[0].request
            assert about is not None and there is not None
            assert (about.id, about.client, about.model_id) == (there.id, there.client, there.model_id)


class TestPairs:
    """Whatever becomes of a request, it has one beginning and one end, on either side."""

    def test_the_tail_raises(self) -> None:
        with service() as both, both.client() as client:
            with pytest.raises(ModelFailed) as caught:
                client.infer(too_much())
            assert torch.equal(client.infer(image()).output, whole())
            both.paired()
            for spy in (both.edge, both.cloud):
                (one,) = spy.of(Stage.ON_ERROR)
                assert isinstance(one.facts["error"], ModelFailed) and one.facts["where"] == "request"
                assert spy.of(Stage.AFTER_REQUEST)[0].facts["error"] is one.facts["error"]
            assert both.edge.of(Stage.ON_ERROR)[0].facts["error"] is caught.value

    @pytest.mark.parametrize("split", ["body", "edge-only"])
    def test_the_input_is_wrong(self, split: str) -> None:
        with service() as both, both.client(split) as client:
            with pytest.raises(IsthmusError):
                client.infer(Call("nothing"))
            client.infer(image())
            both.paired()
            assert both.edge.count(Stage.ON_ERROR) == 1 and both.cloud.count(Stage.ON_ERROR) == 0

    def test_the_cut_is_wrong(self) -> None:
        with service() as both, both.client() as client:
            with pytest.raises(IsthmusError):
                client.infer(image(), split="nowhere")
            both.paired()

    @pytest.mark.parametrize("side", ["edge", "cloud"])
    def test_a_hook_refuses_it(self, side: str) -> None:
        with service() as both, both.client() as client:
            spy = both.edge if side == "edge" else both.cloud

            @spy.on("before_request", when=lambda event: event.request.index == 1)
            def refuse(event: Event) -> None:
                raise HookRefused("not this one")

            answers = list(client.infer_many([image(seed) for seed in range(3)], failures="return"))
            assert [isinstance(answer, Failure) for answer in answers] == [False, True, False]
            assert isinstance(answers[1], Failure) and isinstance(answers[1].error, HookRefused)
            both.paired()
            assert both.edge.count(Stage.ON_ERROR) == 1 and both.cloud.count(Stage.ON_ERROR) == (side == "cloud")
            heads = both.edge.count(Stage.BEFORE_HEAD)
            assert heads == (2 if side == "edge" else 3) and both.cloud.count(Stage.BEFORE_TAIL) == 2

    def test_the_deadline_is_over(self) -> None:
        go = threading.Event()
        with service() as both, both.client() as client:
            client.infer(image())

            @both.cloud.on("before_tail", name="slow")
            def slow(event: Event) -> None:
                assert go.wait(30)

            try:
                with pytest.raises(DeadlineExceeded):
                    client.infer(image(), deadline=0.2)
                (error,) = both.edge.of(Stage.ON_ERROR)
                assert isinstance(error.facts["error"], DeadlineExceeded)
                eventually(lambda: any(request.cancelled for request in both.server.core.requests._live.values()))
            finally:
                go.set()
            both.paired()
            ends = [one.facts["error"] for one in both.cloud.of(Stage.AFTER_REQUEST)]
            assert ends[0] is None and isinstance(ends[1], Cancelled)

    def test_the_iteration_is_left(self) -> None:
        with service() as both, both.client() as client:
            for _ in client.infer_many([image(seed) for seed in range(10)]):
                break
            both.paired()
            assert both.edge.count(Stage.BEFORE_RUN) == both.edge.count(Stage.AFTER_RUN) == 1
            ends = [one.facts["error"] for one in both.edge.of(Stage.AFTER_REQUEST)]
            assert any(isinstance(error, Cancelled) for error in ends) and both.edge.count(Stage.ON_ERROR) == 0
            assert without(both.edge.stages(), *THREADS)[-1] == "after_run"

    def test_the_client_is_closed_meanwhile(self) -> None:
        go = threading.Event()
        with service() as both:
            client = both.client().open()
            both.cloud.on("before_tail", name="slow")(lambda event: go.wait(30))
            errors: list[BaseException] = []

            def ask() -> None:
                try:
                    client.infer(image())
                except Cancelled as error:
                    errors.append(error)

            thread = threading.Thread(target=ask)
            thread.start()
            try:
                eventually(lambda: both.cloud.count(Stage.BEFORE_TAIL) == 1)
                client.close()
                thread.join(30)
            finally:
                go.set()
            assert len(errors) == 1
            both.paired()
            assert both.edge.count(Stage.ON_ERROR) == 0  # it was what the caller wanted

    def test_ctrl_c_is_a_cancellation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with service() as both, both.client() as client:
            client.infer(image())

            def interrupted(*_: object) -> bool:
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr("edge_client.transport.exchange.Exchange.wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    client.infer(image())
            both.paired()
            assert isinstance(both.edge.of(Stage.AFTER_REQUEST)[-1].facts["error"], Cancelled)
            assert both.edge.count(Stage.ON_ERROR) == 0
            for _ in range(5):  # its place is free again
                client.infer(image())


class Branching(nn.Module):
    """Another path for a negative sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4)
        self.plus = nn.Linear(4, 4)
        self.minus = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values)
        out: Tensor = self.minus(hidden) + values if hidden.sum().item() < 0 else self.plus(hidden)
        return out


def torn(server: FakeServer, frames: fake.Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
    """The stream breaks after an answer's header."""
    for frame in fake.tails(Residual().eval())(server, frames, context):
        yield frame
        if frame.WhichOneof("frame") == "reply":
            context.abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose")


def by_itself(address: str, spy: Spy, **options: Any) -> EdgeClient:
    example = (image(),), {}
    choice = ModelChoice(Residual().eval(), model_id="m", device="cpu", example=example)
    return EdgeClient(address, choice, "body", lifecycle=spy, **options)


class TestSentAgain:
    def test_a_path_that_the_plan_did_not_hold_is_one_request(self) -> None:
        """To the server it is two, under two ids."""
        module, ones = Branching().eval(), torch.ones(1, 4)
        with torch.no_grad():
            # the second kind reads the model's input late, which the first kind's frontier does not hold
            known, other = sorted((3 * ones, -3 * ones), key=lambda values: bool(module.first(values).sum() < 0))
            expected = module(other)
        low = int(known[0, 0])
        example = {"args": [{"shape": [1, 4], "dtype": "float32", "low": low, "high": low + 1}]}
        spec = spec_of("tests.shared_hooks.lifecycle.test_sequence:Branching", example)
        with service(spec=spec) as both, both.client("first") as client:
            client.infer(known)
            answer = client.infer(other)
            assert torch.equal(answer.output, expected)
            both.paired()
            (about,) = [one.request for one in both.edge.of(Stage.ON_RESULT) if one.facts["answer"] is answer]
            assert about is not None and answer.request_id == about.id + 1
            own = both.edge.stages(about.id)
            assert [own.count(name) for name in ("before_plan", "before_head", "before_send")] == [1, 2, 2]
            assert own.count("on_result") == own.count("after_request") == 1 and not both.edge.count(Stage.ON_ERROR)
            assert not both.edge.stages(answer.request_id) and both.cloud.count(Stage.BEFORE_REQUEST) == 3

    @pytest.mark.parametrize("script", [fake.break_after(2), torn])
    def test_a_stream_that_breaks(self, script: fake.Script) -> None:
        spy = Spy("edge")
        with FakeServer(script, fake.tails(Residual().eval())) as server:
            client = by_itself(server.address, spy)
            with client:
                answer = client.infer(image())
                assert torch.equal(answer.output, whole()) and answer.sends == 2
        own = spy.stages(answer.request_id)
        assert without(own, *THREADS) == EDGE and own.count("before_send") == 2
        assert own.count("after_receive") == 1  # a torn answer is none
        around = [name for name in spy.stages() if "connect" in name or "handshake" in name]
        stream = ["before_connect", "before_handshake", "after_handshake", "after_connect"]
        again = ["on_disconnect", "before_reconnect", *stream, "after_reconnect", "on_disconnect"]
        assert around == [*stream, *again]
        assert spy.of(Stage.BEFORE_RECONNECT)[0].facts["waiting"] == 1
        assert spy.of(Stage.AFTER_RECONNECT)[0].facts["resent"] == 1

    def test_a_server_that_is_not_there(self) -> None:
        spy = Spy("edge")
        with FakeServer(fake.echo) as server:
            address = server.address
        client = EdgeClient(
            address,
            ModelChoice(Residual().eval(), model_id="m", device="cpu"),
            "body",
            lifecycle=spy,
            connection=ConnectionOptions(patience=0.3),
        )
        with pytest.raises(ServerUnavailable):
            client.infer(image())
        client.close()
        assert spy.count(Stage.BEFORE_CONNECT) >= 1 and spy.count(Stage.AFTER_CONNECT) == 0
        assert spy.count(Stage.ON_DISCONNECT) == 0
        assert {one.facts["where"] for one in spy.of(Stage.ON_ERROR)} == {"request", "connection"}
        assert spy.count(Stage.BEFORE_REQUEST) == spy.count(Stage.AFTER_REQUEST) == 1


class TestRuns:
    def test_index_total_and_last(self) -> None:
        with service() as both, both.client() as client:
            firsts: list[Any] = []
            lasts: list[Any] = []
            both.edge.on("after_request", when=is_first, name="first")(lambda event: firsts.append(event.request))
            both.edge.on("after_request", when=is_last, name="last")(lambda event: lasts.append(event.request))
            list(client.infer_many([image(seed) for seed in range(4)]))
            list(client.infer_many(image(seed) for seed in range(2)))
            client.infer(image())
            client.infer(image())
            abouts = [one.request for one in both.edge.of(Stage.BEFORE_REQUEST)]
            places = [(about.index, about.total) for about in abouts if about is not None]
            assert places == [*((index, 4) for index in range(4)), (0, None), (1, None), (0, None), (1, None)]
            assert len({about.id for about in abouts if about is not None}) == 8
            assert [about.index for about in firsts] == [0, 0, 0] and [about.index for about in lasts] == [3]
            assert [one.facts for one in both.edge.of(Stage.BEFORE_RUN)] == [{"total": 4}, {"total": None}]
            eventually(lambda: both.cloud.count(Stage.AFTER_REQUEST) == 8)
            there = [one.request.index for one in both.cloud.of(Stage.BEFORE_REQUEST) if one.request]
            assert sorted(there) == list(range(8))

    def test_a_length_that_nobody_knows(self) -> None:
        class Loader:
            def __len__(self) -> int:
                raise TypeError("this data set has no length")

            def __iter__(self) -> Any:
                return iter([image()])

        with service() as both, both.client() as client:
            (answer,) = client.infer_many(Loader())
            assert torch.equal(answer.output, whole()) and both.edge.of(Stage.BEFORE_RUN)[0].facts == {"total": None}

    def test_inputs_that_end_with_an_error(self) -> None:
        def inputs() -> Any:
            yield image()
            raise OSError("the camera is gone")

        with service() as both, both.client() as client:
            with pytest.raises(OSError, match="camera"):
                list(client.infer_many(inputs()))
            both.paired()
            assert both.edge.count(Stage.AFTER_RUN) == 1

    def test_shutdown_comes_once(self) -> None:
        with service() as both:
            client = both.client().open()
            threads = [threading.Thread(target=client.close) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            client.close()
            both.server.stop(grace=1)
            both.server.stop(grace=1)
        for spy in (both.edge, both.cloud):
            assert spy.count(Stage.BEFORE_SHUTDOWN) == spy.count(Stage.AFTER_SHUTDOWN) == 1
            own = spy.stages()
            assert own.index("before_shutdown") < own.index("after_shutdown")
        assert both.cloud.count(Stage.BEFORE_DRAIN) == both.cloud.count(Stage.AFTER_DRAIN) == 1

    def test_a_change_of_the_cut(self) -> None:
        with service() as both, both.client() as client:
            client.split = "body"
            client.split = "stem"
            reported = [one.facts for one in both.edge.of(Stage.ON_SPLIT_CHANGE)]
            assert reported == [{"old": "body", "new": "stem", "reason": "it was set"}]

    def test_a_drain(self) -> None:
        go = threading.Event()
        with service() as both, both.client() as client:
            both.cloud.on("before_tail", name="slow")(lambda event: go.wait(30))
            answers: list[Answer] = []
            thread = threading.Thread(target=lambda: answers.append(client.infer(image())))
            thread.start()
            eventually(lambda: both.cloud.count(Stage.BEFORE_TAIL) == 1)
            both.server.drain()
            both.server.drain()
            eventually(lambda: both.edge.count(Stage.BEFORE_DRAIN) == 1)
            assert not both.server.core.wait_idle(0)
            go.set()
            thread.join(30)
            assert both.server.core.wait_idle(30) and torch.equal(answers[0].output, whole())
            client.close()
            both.server.stop(grace=5)
        own = both.cloud.stages()
        ends = ["before_drain", "after_request", "after_drain", "before_shutdown", "on_disconnect", "after_shutdown"]
        kept = [name for name in own if name in ends]
        kept.remove("on_disconnect")  # the client's, whenever it left
        assert kept == [name for name in ends if name != "on_disconnect"]
        assert both.cloud.of(Stage.AFTER_DRAIN)[0].facts == {"answered": True}


def test_hooks_are_called_before_a_drain_is_over() -> None:
    """A process that ends now would not tell how its last request ended."""
    go, entered = threading.Event(), threading.Event()
    with service() as both, both.client() as client:

        @both.cloud.on("after_request")
        def slow(event: Event) -> None:
            entered.set()
            assert go.wait(30)

        client.infer(image())
        assert entered.wait(30)
        both.server.drain()
        assert not both.server.core.wait_idle(0)
        go.set()
        assert both.server.core.wait_idle(30)


def everything() -> tuple[Service, WrappedModel]:
    """A run in which everything happens that has a stage."""
    spies = Spy("cloud"), Spy("edge")
    for spy in spies:
        everywhere(spy, lambda event: [getattr(event, name) for name in event.stage.facts])
    with service(*spies) as both:
        client = both.client().open()
        list(client.infer_many([image(), too_much()], failures="return"))
        client.infer(image(), split="edge-only")
        client.split = "stem"
        assert client._connection is not None and client._connection._stream is not None
        go = threading.Event()
        both.cloud.on("before_tail", name="slow")(lambda event: go.wait(30))
        thread = threading.Thread(target=client.infer, args=(image(),))
        thread.start()
        eventually(lambda: both.cloud.count(Stage.BEFORE_TAIL) == 3)
        client._connection._stream.cancel()  # as a network that breaks
        eventually(lambda: both.edge.count(Stage.AFTER_RECONNECT) == 1)
        go.set()
        thread.join(30)
        both.server.drain()
        eventually(lambda: both.edge.count(Stage.BEFORE_DRAIN) == 1)
        return both, client.wrapped


def test_every_stage_and_fact_comes_and_none_other() -> None:
    both, _ = everything()
    here = {one.stage for one in both.edge.emitted}
    there = {one.stage for one in both.cloud.emitted}
    assert {stage for stage in Stage if stage.edge} == here
    # the command alone knows of a run (tests/shared_hooks/lifecycle/test_processes.py)
    assert {stage for stage in Stage if stage.cloud} - {Stage.BEFORE_RUN, Stage.AFTER_RUN} == there
    reported: dict[Stage, set[str]] = {}
    for one in itertools.chain(both.edge.emitted, both.cloud.emitted):
        assert set(one.facts) <= set(one.stage.facts), one
        reported.setdefault(one.stage, set()).update(one.facts)
    only_in_the_command = {"address"}
    for stage in Stage:
        missing = set(stage.facts) - reported.get(stage, set())
        assert missing <= (only_in_the_command if stage in (Stage.BEFORE_RUN, Stage.AFTER_RUN) else set()), stage
    for spy in (both.edge, both.cloud):
        assert not any(one.failures for one in spy.listing())
        assert all(one.calls for one in spy.listing() if one.stage not in (Stage.BEFORE_RUN, Stage.AFTER_RUN))


def test_a_model_by_itself_has_the_stages_of_both() -> None:
    lifecycle, heard = Lifecycle(), []
    everywhere(lifecycle, lambda event: heard.append((event.stage.value, event.side, event.request)))
    with WrappedModel(Residual().eval(), lifecycle=lifecycle) as wrapped:
        output = wrapped.forward(wrapped.forward(image(), end="body"), start="body")
    assert torch.equal(output, whole())
    assert [name for name, _, _ in heard] == [
        *("before_head", "before_plan", "after_plan", "before_bank", "after_bank", "after_head"),
        *("before_inject", "after_inject", "before_tail", "after_tail"),
    ]
    assert {(side, request) for _, side, request in heard} == {("local", None)}


def test_a_profile_belongs_to_no_request() -> None:
    """It runs tails in the worker, after a request."""
    with service() as both, both.client() as client:
        client.infer(image())
        both.paired()
        tails = both.cloud.count(Stage.BEFORE_TAIL)
        fetch_profile(both.address, "m", 1, 2, 1.0)
        reported = both.cloud.of(Stage.BEFORE_TAIL)[tails:]
        assert reported and {one.request for one in reported} == {None}
        assert both.cloud.count(Stage.BEFORE_REQUEST) == 1


def test_a_file_that_is_not_there() -> None:
    with service() as both, both.client("cloud-only-file") as client:
        with pytest.raises(InputMismatch):
            client.infer(Path("/nowhere.png"))
        both.paired()

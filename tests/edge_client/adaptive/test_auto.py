"""``--split auto``: every request is answered, whatever becomes of link and server; and the controller hears of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from edge_client import Answer, EdgeClient, Failure
from edge_client.__main__ import main
from edge_client.adaptive import AutoClient
from edge_client.adaptive.beginning import _connector
from edge_client.adaptive.client import Flight, Hedge
from edge_client.adaptive.controller import ChosenWay
from edge_client.adaptive.monitor import Decisions
from edge_client.call import Call
from edge_client.model_choice import ModelChoice
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Candidate
from edge_client.process import local_server
from edge_client.request import Done
from edge_client.survey import SurveySources
from edge_client.transport.times import Stamps
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import Cancelled, DeadlineExceeded, ModelFailed, SpecError
from shared_hooks.metrics.records import Reading
from shared_hooks.models import find_inputs, load_spec
from shared_hooks.profiling import profile as profiles
from studies.experiments.relay import Relay
from tests.edge_client import fake_server as fake
from tests.edge_client import small_models
from tests.edge_client.fake_server import FakeServer
from tests.edge_client.test_client import built, image
from tests.edge_client.test_processes import cloud
from tests.ports import free_port
from tests.shipped import IMAGES
from tests.waiting import PATIENCE, eventually

NOTHING = Reading.unavailable("a test")


class CallReports:
    """A controller that does as instructed, and notes what it hears."""

    def __init__(self, name: str, network_ms: float = 1.0, probes: int | None = None) -> None:
        self.name, self.there = name, True
        self.network_ms, self.probes = network_ms, probes
        self.heard: list[str] = []
        self.links: list[Any] = []

    def choose(self, now: int) -> ChosenWay:
        name = self.name if self.there else "edge-only"
        stages = {"edge": 1e6, "network": self.network_ms * 1e6}
        return ChosenWay(
            Candidate(name, None, stages, 0, 0, NOTHING, NOTHING), False, "reported", {"predicted_ms": 1.0}
        )

    link = Link(Curve.line(1e6, 1e9), Curve.line(0.0, 1e9))

    def wants_probe(self, now: int) -> int | None:
        return self.probes

    def probe_sends(self, nbytes: int) -> None:
        assert nbytes == 3000

    def observe_link(self, now: int, link: Any, load: Any) -> None:
        self.links.append((link, load))

    def server_gone(self, now: int) -> None:
        self.there = False
        self.heard.append("gone")

    def server_found(self, now: int, cloud: Any, link: Any, load: Any) -> None:
        assert (cloud, link, load) == ("cloud", "link", "load")
        self.there = True
        self.heard.append("found")

    def server_back(self, now: int) -> None:
        self.there = True
        self.heard.append("back")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("observe_"):
            raise AttributeError(name)
        return lambda *_, **__: self.heard.append(name)


@contextmanager
def auto(
    server: FakeServer,
    reported: CallReports,
    make: Callable[[], torch.nn.Module] = small_models.Residual,
    **options: Any,
) -> Iterator[AutoClient]:
    with (
        EdgeClient(server.address, ModelChoice(built(make), model_id="m", device="cpu")) as client,
        AutoClient(client, reported, **options) as one,  # type: ignore[arg-type]
    ):
        yield one


def expected(make: Callable[[], torch.nn.Module] = small_models.Residual, *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = built(make)(*(inputs or (image(),)))
    return found


def kinds(one: AutoClient) -> list[str]:
    return [entry["kind"] for entry in one.decisions.all]


def right(answer: Answer | Failure, output: Tensor) -> bool:
    assert isinstance(answer, Answer), answer
    assert answer.times.end_to_end == answer.measured_ns == sum(ns for _, ns in answer.times.rows())
    return torch.equal(answer.output, output)


def test_requests_follow_the_controller_and_report_their_times() -> None:
    reported = CallReports("body", network_ms=1e6)
    with FakeServer(fake.tails(built(small_models.Residual))) as server, auto(server, reported) as one:
        answers = []
        for name in ("body", "edge-only", "input", "cloud-only"):
            reported.name = name
            answers.append(one.infer(image()))
    assert [answer.split for answer in answers] == ["body", "edge-only", "input", "input"]
    assert all(right(answer, expected()) for answer in answers)
    networked = ["observe_edge", "observe_server", "observe_transfer"]
    assert [name for name in reported.heard if name != "observe_slow"] == [*networked, "observe_edge", *networked * 2]
    assert [entry["candidate"] for entry in one.decisions.all if entry["kind"] == "choice"] == [
        *("body", "edge-only", "input", "cloud-only")
    ]


def test_a_cut_that_it_may_not_use_goes_another_way_and_the_server_counts_as_there() -> None:
    """The first request is begun before the server has answered; `fail` is asked once only."""
    allowed: list[Any] = []
    reported = CallReports("body", network_ms=1e6)  # so late that no request is hedged
    reported.allow = allowed.append  # type: ignore[attr-defined]
    welcome = {"cuts": split_pb2.Cuts(names=["input"])}
    choice = ModelChoice(built(small_models.Residual), model_id="m", device="cpu")
    with FakeServer(fake.fail("AccessRefused", "not this cut"), welcome=welcome) as server:
        client = EdgeClient(server.address, choice).prepare()
        with AutoClient(client, reported) as one:  # type: ignore[arg-type]
            answers = [one.infer(image()), one.infer(image())]
        client.close()
    assert all(right(answer, expected()) and answer.split == "edge-only" for answer in answers)
    assert allowed == [frozenset({"input", "cloud-only"})] and len(server.seen.requests) == 1
    assert "gone" not in kinds(one) and reported.heard.count("gone") == 0


def test_a_request_that_is_late_is_answered_here() -> None:
    reported = CallReports("body")
    with FakeServer(fake.deaf) as server, auto(server, reported) as one:
        answers = list(one.infer_many([image()] * 3))
        assert all(right(answer, expected()) and answer.split == "edge-only" for answer in answers)
        assert kinds(one).count("hedge") == 3 and "observe_slow" in reported.heard
        eventually(lambda: sorted(server.seen.cancelled) == sorted(server.seen.requests))


def test_a_server_that_falls_silent_is_not_waited_for() -> None:
    """Long before the request is late, and before the stream is given up."""
    reported = CallReports("body", network_ms=1e6)
    with FakeServer(fake.deaf, welcome={"heartbeat_ms": 1000}) as server, auto(server, reported) as one:
        assert right(one.infer(image()), expected())
        (why,) = [entry["reason"] for entry in one.decisions.all if entry["kind"] == "hedge"]
        assert "lives" in why and "gone" not in kinds(one)


def test_an_answer_that_comes_first_counts_and_the_hedge_is_left() -> None:
    """The model here waits for ever between two layers; the server's answers."""
    entered = threading.Event()

    class Slow(small_models.Residual):
        def forward(self, image: Tensor) -> Tensor:
            stem = self.stem(image)
            if threading.current_thread().name.startswith("edge-hedge"):
                entered.set()
                while True:  # left by the hook at the next layer
                    self.relu(stem)
            out: Tensor = self.head(self.relu(self.body(stem) + stem).mean((2, 3)))
            return out

    def delay(_: int) -> float:
        assert entered.wait(PATIENCE)
        return 0.0

    reported = CallReports("input", network_ms=0.001)
    with (
        FakeServer(fake.tails(built(small_models.Residual), delay=delay)) as server,
        auto(server, reported, Slow) as one,
    ):
        answer = one.infer(image())
        assert right(answer, expected()) and answer.split == "input"
        assert kinds(one) == ["choice", "hedge"]


def test_a_stream_that_breaks_loses_no_request() -> None:
    reported = CallReports("body", network_ms=1e6)
    with FakeServer(fake.break_after(2)) as server, auto(server, reported) as one:
        for _ in range(3):
            reported.there = True
            assert right(one.infer(image()), expected())
        assert "gone" in kinds(one)


def test_without_a_place_for_the_whole_model_the_server_is_waited_for() -> None:
    reported = CallReports("body")
    scripts = fake.break_after(2), fake.tails(built(small_models.Residual))
    with FakeServer(*scripts) as server, auto(server, reported, local=False) as one:
        answer = one.infer(image())
        assert right(answer, expected()) and answer.split == "body" and answer.sends == 2
        reported.there = False
        assert one.infer(image()).split == "body"
        assert "hedge" not in kinds(one)


def test_invalid_input_is_reported_and_the_run_continues() -> None:
    reported = CallReports("first", network_ms=1e6)
    values = [torch.ones(3), torch.full((3,), 200.0), torch.ones(3)]
    with FakeServer(fake.tails(built(small_models.Moody))) as server, auto(server, reported, small_models.Moody) as one:
        for name in ("first", "edge-only"):
            reported.name = name
            answers = list(one.infer_many(values, failures="return"))
            assert [isinstance(answer, Failure) for answer in answers] == [False, True, False]
            assert isinstance(answers[1], Failure) and isinstance(answers[1].error, ModelFailed)
            with pytest.raises(ModelFailed, match="too much"):
                one.infer(values[1])


def test_leaving_does_not_wait_for_a_first_profile() -> None:
    fetching = threading.Event()

    def connect(check: Callable[[], None]) -> Any:
        fetching.set()
        while True:  # until asked to stop
            check()
            time.sleep(0.01)

    reported = CallReports("body")
    reported.there = False
    with FakeServer(fake.tails(built(small_models.Residual))) as server, auto(server, reported, connect=connect) as one:
        one.monitor._prober.round = lambda *_: None  # type: ignore[method-assign,assignment,return-value]
        assert fetching.wait(PATIENCE)
    assert not one.monitor._thread.is_alive() and kinds(one) == []


@pytest.mark.parametrize("stage", ["fetch_profile", "probe"])
def test_start_up_can_be_interrupted(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of both is an occasion to leave."""

    def going_on(*_: Any, **__: Any) -> None:
        for one in (*_, *__.values()):
            if callable(one):
                one(0, 1, "a step")

    profile: Any = SimpleNamespace(answer_bytes=1, model=SimpleNamespace(weights_hash="aa"))
    monkeypatch.setattr("edge_client.adaptive.beginning.fetch_profile", lambda *_, **__: {})
    monkeypatch.setattr(profiles, "from_json", lambda *_: profile)
    monkeypatch.setattr(profiles, "check", lambda *_: None)
    monkeypatch.setattr("edge_client.adaptive.beginning.probe_sizes", lambda *_: (0,))
    monkeypatch.setattr(f"edge_client.adaptive.beginning.{stage}", going_on)
    loaded: Any = SimpleNamespace(spec=load_spec("digits"))

    def check() -> None:
        raise Cancelled("stopped")

    with pytest.raises(Cancelled, match="stopped"):
        _connector(loaded, SurveySources(server="127.0.0.1:1"), profile)(check)


def test_a_deadline_holds_where_nothing_runs_here() -> None:
    reported = CallReports("body", network_ms=1e6)
    with FakeServer(fake.deaf) as server, auto(server, reported, local=False) as one, pytest.raises(DeadlineExceeded):
        one.infer(image(), deadline=0.3)


def test_requests_are_distinguished_without_comparing_their_tensors() -> None:
    choice = CallReports("input").choose(0)
    flights = [
        Flight(call, call, choice, Stamps(), 0.0, Done(Answer.__new__(Answer)))
        for call in (Call((torch.zeros(3),)), Call((torch.zeros(3),)))
    ]
    left = list(flights)
    left.remove(flights[1])  # as when the second is answered first, in another thread
    assert left[0] is flights[0] and len(left) == 1


def test_a_hedge_remembers_nothing_and_leaves_nobody_waiting() -> None:
    begun, go = threading.Event(), threading.Event()
    answer = Answer.__new__(Answer)

    def work() -> Answer:
        begun.set()
        assert go.wait(PATIENCE)
        return answer

    hedge = Hedge()
    first, second = hedge.run(work), hedge.run(work)
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=hedge.close)
    closing.start()
    with pytest.raises(Cancelled):
        second.result(PATIENCE)
    go.set()
    closing.join(PATIENCE)
    assert first.result(PATIENCE) is answer
    hedge.abandon(first)
    assert not hedge._unwanted


def test_auto_needs_a_server() -> None:
    client = EdgeClient(None, ModelChoice(small_models.Residual(), model_id="m"), "edge-only")
    with client, pytest.raises(SpecError, match="server"):
        AutoClient(client, CallReports("body"))  # type: ignore[arg-type]


class TestHedge:
    def test_answers_and_errors_keep_their_order(self) -> None:
        hedge = Hedge()
        first, second = hedge.run(lambda: 1), hedge.run(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
        assert first.result(PATIENCE) == 1
        with pytest.raises(ZeroDivisionError):
            second.result(PATIENCE)
        hedge.close()

    def test_waiting_request_can_be_cancelled(self) -> None:
        hedge, gate, ran = Hedge(), threading.Event(), []
        first = hedge.run(lambda: gate.wait(PATIENCE))  # type: ignore[arg-type,return-value]
        second = hedge.run(lambda: ran.append(1))  # type: ignore[arg-type,func-returns-value,return-value]
        hedge.abandon(second)
        gate.set()
        assert first.result(PATIENCE)
        with pytest.raises(Cancelled):
            second.result(PATIENCE)
        assert not ran
        hedge.close()

    def test_a_request_that_is_late_when_it_is_closed_is_cancelled(self) -> None:
        hedge = Hedge()
        hedge.close()
        with pytest.raises(Cancelled):
            hedge.run(lambda: 1).result(PATIENCE)  # type: ignore[arg-type,return-value]


def test_decisions_may_be_read_while_others_are_made() -> None:
    decisions = Decisions()
    decisions.event("gone")
    for _ in decisions.all:
        decisions.event("back")
    assert [entry["kind"] for entry in decisions.all] == ["gone", "back"]


class TestProcesses:
    def test_a_server_that_dies_and_comes_back(self) -> None:
        spec = load_spec("digits")
        whole = spec.load_model("cpu")
        (value,) = spec.preprocess(find_inputs(IMAGES)[0])[0]
        with torch.no_grad():
            output = whole(value)
        reported = CallReports("stem.0", network_ms=1e6, probes=2000)
        with (
            cloud("--model", "digits", port=free_port()) as first,
            EdgeClient(first.address, ModelChoice(spec, device="cpu")) as client,
            AutoClient(client, reported) as one,  # type: ignore[arg-type]
        ):
            assert right(one.infer(value), output)
            eventually(lambda: bool(reported.links))
            link, load = reported.links[-1]
            assert [size for size, _ in link.up.points] == [0, 1000, 2000] and load.workers == 1
            first.end()
            heard = len(reported.heard)
            answers = [one.infer(value) for _ in range(5)]
            assert all(right(answer, output) for answer in answers) and answers[-1].split == "edge-only"
            with cloud("--model", "digits", port=first.port):
                eventually(lambda: "back" in reported.heard[heard:])
                answer = one.infer(value)
                assert right(answer, output) and answer.split == "stem.0"
            assert kinds(one).count("gone") >= 1

    def test_a_link_that_stands_still_loses_nothing(self) -> None:
        value = torch.randn(1, 1, 32, 32)
        reported = CallReports("stem.0", network_ms=100.0, probes=2000)
        with (
            cloud("--model", "digits") as process,
            Relay(("127.0.0.1", process.port), ("127.0.0.1", free_port())) as relay,
            EdgeClient(f"127.0.0.1:{relay.address[1]}", ModelChoice("digits", device="cpu")) as client,
            AutoClient(client, reported) as one,  # type: ignore[arg-type]
        ):
            output = one.infer(value).output
            for stop, go in ((relay.moving.clear, relay.moving.set), (relay.refuse, relay.accept)):
                heard = len(reported.heard)
                stop()
                assert all(right(one.infer(value), output) for _ in range(3))
                eventually(lambda heard=heard: "gone" in reported.heard[heard:])  # type: ignore[misc]
                assert one.infer(value).split == "edge-only"
                go()
                eventually(lambda heard=heard: "back" in reported.heard[heard:])  # type: ignore[misc]
                assert right(one.infer(value), output)

    def test_a_server_that_comes_later_is_found(self) -> None:
        reported = CallReports("stem.0", network_ms=1e6)
        reported.there = False
        with (
            cloud("--model", "digits") as process,
            EdgeClient(process.address, ModelChoice("digits", device="cpu")) as client,
        ):
            connect: Any = lambda check: ("cloud", "link", "load")  # noqa: E731
            auto = AutoClient(client, reported, connect=connect)  # type: ignore[arg-type]
            value = torch.zeros(1, 1, 32, 32)
            assert auto.infer(value).split == "edge-only"
            with auto:
                eventually(lambda: "found" in kinds(auto))
                assert auto.infer(value).split == "stem.0"
            assert "back" not in reported.heard

    def test_the_command(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        log = tmp_path / "decisions.jsonl"
        with local_server(ModelChoice("digits", device="cpu", threads=1)) as server:
            words = ["run", "--server", server, "--split", "auto", "--input", str(IMAGES), "--device", "cpu"]
            words += ["--profile-seconds", "0.5", "--no-progress", "--log-decisions", str(log), "--json", "-"]
            assert main(words) == 0
            known = json.loads(capsys.readouterr().out)
            assert known["answered"] == 40 and known["accuracy"] >= 0.95
            choices = [entry for entry in known["decisions"] if entry["kind"] == "choice"]
            assert len(choices) == 40 and {"candidate", "reason", "predicted_ms", "best", "best_ms"} <= set(choices[0])
            assert [json.loads(line) for line in log.read_text().splitlines()] == known["decisions"]
            assert main([*words, "--partitioner", "cycle"]) == 0
            known = json.loads(capsys.readouterr().out)
            names = {entry["candidate"] for entry in known["decisions"] if entry["kind"] == "choice"}
            assert known["answered"] == 40 and len(names) > 20

    def test_the_command_without_a_server(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["run", "--server", "127.0.0.1:1", "--split", "auto", "--input", str(IMAGES), "--device", "cpu"]
        words += ["--profile-seconds", "0.5", "--patience", "0.5", "--no-progress", "--json", "-"]
        assert main(words) == 0
        known = json.loads(capsys.readouterr().out)
        assert known["answered"] == 40 and known["layer_name"] == "edge-only"

    @pytest.mark.parametrize(
        "words", [["--objective", "speed"], ["--partitioner", "nobody"], ["--rate", "5"], ["--max-edge-memory", "much"]]
    )
    def test_the_commands_words_are_checked(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        base = ["run", "--server", "127.0.0.1:1", "--split", "auto", "--input", str(IMAGES)]
        assert main([*base, *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1

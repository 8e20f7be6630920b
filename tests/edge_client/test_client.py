"""`EdgeClient`: the model's own output, in the order asked for, with times that add up; every failure by its name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import edge_client
from edge_client import Answer, Call, EdgeClient, Failure, State
from edge_client.model_choice import ModelChoice
from edge_client.transport.options import ConnectionOptions
from shared_hooks.codecs import CODECS
from shared_hooks.errors import (
    Cancelled,
    CutRefused,
    DeadlineExceeded,
    Disagreement,
    InputMismatch,
    ModelFailed,
    ServerUnavailable,
    SpecError,
    TooLarge,
    UnknownLayer,
    UnknownModel,
)
from tests.edge_client import fake_server as fake
from tests.edge_client import small_models
from tests.edge_client.fake_server import FakeServer
from tests.waiting import PATIENCE, eventually


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make().eval()


def held(gates: dict[int, threading.Event]) -> Callable[[int], float]:
    """A server's delay: a request waits for its gate, if it has one."""

    def delay(request_id: int) -> float:
        assert request_id not in gates or gates[request_id].wait(PATIENCE)
        return 0.0

    return delay


@contextmanager
def pair(make: Callable[[], nn.Module], split: int | str, **options: Any) -> Iterator[tuple[EdgeClient, FakeServer]]:
    """A client and a server, each with its own instance of a model."""
    delay = options.pop("delay", lambda request_id: 0.0)
    with (
        FakeServer(fake.tails(built(make), delay=delay)) as server,
        EdgeClient(server.address, ModelChoice(built(make), model_id="m"), split, **options) as client,
    ):
        yield client, server


def image(seed: int = 0) -> Tensor:
    return torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("split", ["input", 0, "body", "relu", 3])
@pytest.mark.parametrize("codec", ["raw", "lz4", "sparse"])
def test_the_answer_is_the_models_own(split: int | str, codec: str) -> None:
    whole = built(small_models.Residual)
    with pair(small_models.Residual, split, codec=codec) as (client, _):
        answer = client.infer(image())
        with torch.no_grad():
            assert torch.equal(answer.output, whole(image()))
        assert client.codecs == tuple(CODECS)
    names = ["stem", "body", "relu", "head"]
    cut = -1 if split == "input" else names.index(split) if isinstance(split, str) else split
    assert (answer.layer_id, answer.split) == (cut, "input" if cut < 0 else names[cut])
    assert [layer.name for layer in answer.layers_edge] == names[: cut + 1]
    assert [layer.name for layer in answer.layers_cloud] == names[cut + 1 :]
    assert answer.bytes_up > 40 and answer.bytes_down > 40 and answer.sends == 1


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_a_codec_with_a_loss_gives_nearly_the_models_own_answer_for_fewer_bytes(codec: str) -> None:
    whole = built(small_models.Residual)
    with pair(small_models.Residual, "body") as (client, _):
        bytes_up = client.infer(image()).bytes_up
    with pair(small_models.Residual, "body", codec=codec) as (client, _), torch.no_grad():
        answer, expected = client.infer(image()), whole(image())
        error = (answer.output - expected).norm() / expected.norm()
        assert 0 < error < 0.1 and answer.bytes_up < 0.6 * bytes_up


def test_the_times_add_up_to_what_was_measured_outside() -> None:
    with pair(small_models.Residual, "body") as (client, _):
        client.infer(image())
        began = time.perf_counter_ns()
        answer = client.infer(image())
        ended = time.perf_counter_ns()
    assert answer.times.end_to_end == answer.measured_ns == sum(value for _, value in answer.times.rows())
    assert began <= answer.finished_ns - answer.measured_ns < answer.finished_ns <= ended
    assert all(value >= 0 for _, value in answer.times.rows())
    assert answer.times.server_compute > 0 and answer.times.edge_compute > 0


def test_other_cuts_may_be_asked_for_per_request() -> None:
    with pair(small_models.Residual, "body") as (client, server):
        outputs = [client.infer(image(), split=split).output for split in ("input", "stem", 2, "stem")]
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        assert len(server.seen.cuts) == 3


def test_keyword_inputs_and_dataclass_outputs() -> None:
    ids, mask = torch.arange(6).reshape(2, 3), torch.ones(2, 3)
    whole = built(small_models.Keywords)
    with pair(small_models.Keywords, "mix") as (client, _):
        answer = client.infer(ids=ids, mask=mask)
        with torch.no_grad():
            expected = whole(ids=ids, mask=mask)
        assert type(answer.output) is small_models.Scores
        assert torch.equal(answer.output.logits, expected.logits)
        assert torch.equal(answer.output.hidden[0], expected.hidden[0])
        many = list(client.infer_many([{"ids": ids, "mask": mask}, Call((), {"ids": ids, "mask": mask})]))
        assert all(torch.equal(one.output.logits, expected.logits) for one in many)


def test_nan_passes_through() -> None:
    with pair(small_models.Residual, "stem") as (client, _):
        assert torch.isnan(client.infer(image() * float("nan")).output).all()


def test_a_path_the_plan_did_not_hold_is_added_and_asked_for_again() -> None:
    whole = built(small_models.Branching)
    inputs = [torch.full((1, 4), 3.0), torch.full((1, 4), -3.0)]
    with torch.no_grad():
        # The second kind reads the model's input late, which the first kind's frontier does not hold.
        positive, negative = sorted(inputs, key=lambda values: bool(whole.first(values).sum() < 0))
        assert whole.first(positive).sum() >= 0 > whole.first(negative).sum()
        expected = [whole(positive), whole(negative)]
    with pair(small_models.Branching, "first") as (client, _):
        answers = [client.infer(positive), client.infer(negative), client.infer(positive), client.infer(negative)]
        for number, answer in enumerate(answers):
            assert torch.equal(answer.output, expected[number % 2])
            assert answer.times.end_to_end == answer.measured_ns
        assert answers[1].times.retry > 0 == answers[3].times.retry
        many = list(client.infer_many([negative, positive]))
        assert torch.equal(many[0].output, expected[1]) and torch.equal(many[1].output, expected[0])


def test_state_that_only_an_input_s_own_path_writes_refuses_that_input_by_name() -> None:
    """The plan's input does not take it: the server is the first to see it, and the client's new plan refuses it."""
    with pair(small_models.Counting, split="first") as (client, _):
        assert client.infer(-torch.ones(1, 4)).split == "first"
        with pytest.raises(CutRefused, match="counts"):
            client.infer(torch.ones(1, 4))


def test_many_answers_come_in_order_while_others_are_under_way() -> None:
    whole = built(small_models.Residual)
    with pair(
        small_models.Residual, "stem", connection=ConnectionOptions(max_in_flight=3), delay=lambda number: 0.02
    ) as (client, server):
        answers = list(client.infer_many(image(seed) for seed in range(12)))
        with torch.no_grad():
            assert all(torch.equal(one.output, whole(image(seed))) for seed, one in enumerate(answers))
        assert [one.request_id for one in answers] == list(range(1, 13))
        assert all(one.times.end_to_end == one.measured_ns for one in answers)
        assert server.seen.requests == list(range(1, 13))


def test_no_more_inputs_are_taken_than_fit_in_flight() -> None:
    taken = 0

    def inputs() -> Iterator[Tensor]:
        nonlocal taken
        for seed in range(10):
            taken += 1
            yield image(seed)

    with pair(
        small_models.Residual, "stem", connection=ConnectionOptions(max_in_flight=2), delay=lambda number: 0.05
    ) as (client, _):
        for done, _ in enumerate(client.infer_many(inputs()), 1):
            assert taken <= done + 2


def test_a_failing_input_leaves_the_others_alone() -> None:
    inputs = [torch.ones(2), torch.full((2,), 200.0), torch.ones(2), "not a tensor", torch.ones(2)]
    with pair(small_models.Moody, "first") as (client, _):
        results = list(client.infer_many(inputs, failures="return"))
        assert [type(one) for one in results] == [Answer, Failure, Answer, Failure, Answer]
        second, fourth = results[1], results[3]
        assert isinstance(second, Failure) and isinstance(second.error, ModelFailed) and second.index == 1
        assert "that is too much" in str(second.error)
        assert isinstance(fourth, Failure) and fourth.item == "not a tensor"
        iteration = client.infer_many(inputs)
        assert isinstance(next(iteration), Answer)
        with pytest.raises(ModelFailed, match="too much"):
            next(iteration)
        assert torch.equal(client.infer(torch.ones(2)).output, torch.full((2,), 2.0))


def test_preparing_belongs_to_its_input() -> None:
    def prepare(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if seed == 1:
            raise InputMismatch("seed 1 is no image")
        time.sleep(0.01)
        return (image(seed),), {}

    with pair(small_models.Residual, "stem") as (client, _):
        results = list(client.infer_many(range(3), prepare=prepare, failures="return"))
    first, second, third = results
    assert isinstance(first, Answer) and first.times.prepare >= 10_000_000 and isinstance(third, Answer)
    assert isinstance(second, Failure) and isinstance(second.error, InputMismatch)


def test_a_model_that_fails_in_the_head_is_named_here() -> None:
    with pair(small_models.Moody, "last") as (client, _):
        client.infer(torch.ones(2))
        with pytest.raises(ModelFailed, match="that is too much") as caught:
            client.infer(torch.full((2,), 200.0))
        assert isinstance(caught.value.__cause__, ValueError)


def test_leaving_the_iteration_cancels_what_is_under_way() -> None:
    begun, left = threading.Event(), threading.Event()

    def inputs() -> Iterator[Tensor]:
        for seed in range(20):
            if seed == 2:  # the first two are under way
                begun.set()
            yield image(seed)

    with pair(
        small_models.Residual, "stem", connection=ConnectionOptions(max_in_flight=3), delay=held({1: begun, 2: left})
    ) as (client, server):
        for _ in client.infer_many(inputs()):
            eventually(lambda: 2 in server.seen.requests)
            break
        left.set()
        eventually(lambda: 2 in server.seen.cancelled)
        assert client.infer(image()).output.shape == (1, 10)  # every place is free again


def test_threads_share_a_client() -> None:
    whole = built(small_models.Residual)
    wrong: list[int] = []

    def work(seed: int) -> None:
        with torch.no_grad():
            expected = whole(image(seed))
        for _ in range(5):
            if not torch.equal(client.infer(image(seed), split=seed % 4).output, expected):
                wrong.append(seed)

    with pair(small_models.Residual, "stem", connection=ConnectionOptions(max_in_flight=2)) as (client, _):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_words_that_name_nothing_are_refused_before_anything_is_sent() -> None:
    with pair(small_models.Residual, "stem") as (client, server):
        with pytest.raises(UnknownLayer, match="body"):
            client.infer(image(), split="bodi")
        with pytest.raises(UnknownLayer):
            client.infer(image(), split=99)
        assert not server.seen.requests
        assert client.infer(image()).sends == 1


def test_a_deadline_is_kept_and_the_client_continues() -> None:
    given_up = threading.Event()
    with pair(small_models.Residual, "stem", delay=held({2: given_up})) as (client, _):
        client.infer(image())
        with pytest.raises(DeadlineExceeded, match="request 2"):
            client.infer(image(), deadline=0.2)
        given_up.set()
        assert client.infer(image()).output.shape == (1, 10)


def test_a_deadline_without_a_server_says_that_there_is_none() -> None:
    server = FakeServer(fake.tails(built(small_models.Residual)))
    with EdgeClient(
        server.address,
        ModelChoice(built(small_models.Residual), model_id="m"),
        "stem",
        connection=ConnectionOptions(patience=30),
    ) as client:
        client.infer(image())
        server.stop()
        eventually(lambda: client.state is not State.READY)
        with pytest.raises(ServerUnavailable, match=server.address):
            client.infer(image(), deadline=0.5)


def test_an_answer_beyond_the_limit_is_not_taken() -> None:
    with (
        pair(small_models.Residual, "stem", connection=ConnectionOptions(max_answer_bytes=10)) as (client, _),
        pytest.raises(TooLarge, match="at most 10"),
    ):
        client.infer(image())


def test_a_client_says_who_it_is() -> None:
    model = built(small_models.Residual)
    with FakeServer(fake.tails(built(small_models.Residual))) as server:
        with EdgeClient(server.address, ModelChoice(model, model_id="m", example=((image(),), {}))) as client:
            assert client.state is State.READY
            hello = server.seen.hellos[0]
            assert hello.model_id == "m" and hello.protocol_version == 3 and hello.client_id
            assert hello.weights_hash == client.wrapped.weights_hash()
            assert hello.plan_digest == client.wrapped.plan(image()).digest
            assert dict(hello.environment) == client.wrapped.environment()
        assert client.state is State.CLOSED
        with pytest.raises(Cancelled):
            client.infer(image())
        assert not [name for module in model.modules() for name in vars(module) if name == "forward"]


def test_a_request_whose_records_cannot_be_made_is_not_left_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def records() -> Any:
        def make() -> Any:
            raise KeyboardInterrupt

        return make

    with (
        FakeServer(fake.deaf) as server,
        EdgeClient(
            server.address,
            ModelChoice(built(small_models.Residual), model_id="m"),
            "stem",
            connection=ConnectionOptions(max_in_flight=1),
        ) as client,
    ):
        monkeypatch.setattr(client.wrapped, "last_records", records)
        with pytest.raises(KeyboardInterrupt):
            client.infer(image())
        assert client._connection is not None and not client._connection._waiting
        assert client.requests.reservations.take("stem", 1, 0.0) is not None


def test_a_client_that_is_closed_while_it_opens_connects_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(fake.tails(built(small_models.Residual))) as server:
        client = EdgeClient(server.address, ModelChoice(built(small_models.Residual), model_id="m"))
        greeting = client._edge_model.greeting

        def closed_meanwhile(client_id: str) -> Any:
            client.close()  # as another thread does
            return greeting(client_id)

        monkeypatch.setattr(client._edge_model, "greeting", closed_meanwhile)
        for _ in range(2):
            with pytest.raises(Cancelled):
                client.open()
        assert client.state is State.CLOSED and client.counters.attempts == 0 and not server.seen.hellos


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (fake.refuse(fake.grpc.StatusCode.FAILED_PRECONDITION, "weights differ"), Disagreement),
        (fake.refuse(fake.grpc.StatusCode.NOT_FOUND, "no model m"), UnknownModel),
    ],
)
def test_a_client_that_does_not_agree_learns_it_at_once(script: fake.Script, error: type[Exception]) -> None:
    with (
        FakeServer(script) as server,
        pytest.raises(error, match=server.address),
        EdgeClient(server.address, ModelChoice(built(small_models.Residual), model_id="m")),
    ):
        pass


@pytest.mark.parametrize("server", ["", "host", "host:", ":50051", "host:http", "host:0", "host:70000"])
def test_addresses_are_checked(server: str) -> None:
    with pytest.raises(SpecError, match="HOST:PORT"):
        EdgeClient(server, ModelChoice(built(small_models.Residual), model_id="m"))


def test_arguments_that_make_no_sense_are_named() -> None:
    model = built(small_models.Residual)
    with pytest.raises(SpecError, match="model_id"):
        EdgeClient("127.0.0.1:1", model)
    with pytest.raises(SpecError, match="deadline"):
        EdgeClient("127.0.0.1:1", ModelChoice(model, model_id="m"), deadline=0)
    with pytest.raises(SpecError, match="codec"):
        EdgeClient("127.0.0.1:1", ModelChoice(model, model_id="m"), codec="zip")


def test_a_refused_cut_is_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(small_models.Residual, "stem") as (client, server):
        plan = client.wrapped.plan(image())
        plan.refuse("body", "because")
        with pytest.raises(CutRefused, match="because"):
            client.infer(image(), split="body")
        assert not server.seen.requests


def test_public_names_are_importable() -> None:
    for name in set(edge_client.__all__) - {"__version__", "aio"}:
        assert getattr(getattr(edge_client, name), "__name__", "CONNECTION_ERRORS") == name
    with pytest.raises(AttributeError):
        _ = edge_client.nothing


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e12])
def test_times_that_no_wait_can_take_are_refused(seconds: float) -> None:
    with pytest.raises(SpecError, match="deadline"):
        EdgeClient("127.0.0.1:1", "digits", deadline=seconds)
    with pytest.raises(SpecError, match="patience"):
        edge_client.ConnectionOptions(patience=seconds)
    with pytest.raises(SpecError, match="every"):
        edge_client.KeepAlive(every=seconds)
    with pair(small_models.Residual, "stem") as (client, _):
        with pytest.raises(SpecError, match="deadline"):
            client.infer(image(), deadline=seconds)
        with pytest.raises(SpecError, match="deadline"):
            client.infer_many([image()], deadline=seconds, failures="return")


def test_possible_last_bit_changes_are_stated(caplog: pytest.LogCaptureFixture) -> None:
    """And no note, which has no effect at all."""
    reported = {
        "notes": ["norm: groups: client 1, server has none"],
        "rounding": ["rope: the table freq: client 1, server 2"],
    }
    model = nn.Linear(2, 2)
    with (
        caplog.at_level("INFO", "edge_client"),
        FakeServer(fake.tails(model), welcome=reported) as server,
        EdgeClient(server.address, ModelChoice(model, model_id="m"), "input") as client,
    ):
        assert client.notes == tuple(reported["notes"]) and client.unlike == tuple(reported["rounding"])
    assert "without any effect on results: norm: groups" in caplog.text
    assert "without an effect but on last bits: rope: the table freq" in caplog.text


@pytest.mark.parametrize("how", ["in place", "a state dictionary", "another parameter", "another layer"])
def test_weights_that_change_after_the_server_agreed_are_refused(how: str) -> None:
    other = built(small_models.Residual)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    with pair(small_models.Residual, "relu") as (client, _):
        model = client.wrapped.model
        client.infer(image())
        model.load_state_dict(model.state_dict())  # the same
        client.infer(image())
        path, linear = next((path, one) for path, one in model.named_modules() if isinstance(one, nn.Conv2d))
        with torch.no_grad():
            if how == "in place":
                linear.weight.add_(1)
            elif how == "a state dictionary":
                model.load_state_dict(other.state_dict())
            elif how == "another parameter":
                linear.weight = nn.Parameter(linear.weight + 1)
            else:
                model.set_submodule(path, other.get_submodule(path))
        with pytest.raises(Disagreement, match="weights"):
            client.infer(image())


class Scaled(small_models.Residual):
    """Multiplies by a number that a plain object holds."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(scale=2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x) * self.settings.scale
        return found


def test_a_number_that_changes_after_the_server_agreed_is_refused() -> None:
    with pair(Scaled, "relu") as (client, _):
        model = client.wrapped.model
        client.infer(image())
        model.settings.scale = float("2.0")  # the same
        client.infer(image())
        model.settings.scale = 3.0
        with pytest.raises(Disagreement, match=r"settings\.scale"):
            client.infer(image())
        model.settings.scale = 2.0
        client.infer(image())

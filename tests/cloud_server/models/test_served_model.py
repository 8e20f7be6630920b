"""The engine of the server on real models: what it accepts, and that its tails are exact."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.models.served_model import ServedModel
from edge_client.transport.times import NO_TABLES, tail_metrics
from shared_hooks import EarlyOutput, WrappedModel, errors
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.models import Table, load_spec, spec_from_table
from tests.cloud_server.fakes import CoreClient
from tests.cloud_server.real import Residual, ask, greet, value

CPU = torch.device("cpu")


def entry(example: bool = True) -> ModelEntry:
    table = {"id": "residual", "factory": f"{Residual.__module__}:Residual"}
    if example:
        table["example"] = {"args": [{"shape": [2, 8]}]}  # type: ignore[assignment]
    return ModelEntry(spec_from_table(Table(table, "test"), Path.cwd()))


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return ServedModel(entry(), CPU)


@pytest.fixture
def edge() -> Iterator[WrappedModel]:
    with WrappedModel(Residual().eval()) as wrapped:
        yield wrapped


@pytest.fixture
def client(served: ServedModel, edge: WrappedModel) -> Iterator[CoreClient]:
    with Core([served]) as core:
        client = CoreClient(core, greet=False)
        client.send(greet(edge, "residual", edge.plan(torch.zeros(2, 8)).digest))
        yield client


CUTS = ["input", 0, "first", "second", 1, "mood", "last"]


@pytest.mark.parametrize("codec", ["raw", "lz4", "sparse"])
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_is_exact(client: CoreClient, edge: WrappedModel, cut: int | str, codec: str) -> None:
    x = torch.randn(2, 8)
    ask(client, 1, edge.forward(x, end=cut), codec)
    found, expected = value(client, 1), edge.forward(x)
    assert set(found) == {"logits", "hidden"}
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_digits_is_exact() -> None:
    spec = load_spec("digits")
    server = ServedModel(ModelEntry(spec), CPU)
    args, kwargs = spec.example(CPU)  # type: ignore[misc]
    with WrappedModel(spec.load_model(CPU)) as edge, Core([server]) as core:
        client = CoreClient(core, greet=False)
        client.send(greet(edge, "digits", edge.plan(*args, **kwargs).digest))
        whole = edge.forward(*args, **kwargs)
        for number in range(0, len(edge.layers), 5):
            ask(client, number, edge.forward(*args, end=number, **kwargs), want_metrics=True)
            assert torch.equal(value(client, number), whole)
            reply = client.answer(number).reply
            assert reply is not None
            layers = tail_metrics(reply, NO_TABLES, {})[0]
            assert layers[0].layer_id == number + 1
            assert all(layer.inference_ns > 0 and layer.name for layer in layers)
            durations = reply.durations
            assert min(durations.decode_ns, durations.inject_ns, durations.compute_ns, durations.encode_ns) > 0


def test_metrics_come_only_if_asked_for(client: CoreClient, edge: WrappedModel) -> None:
    ask(client, 1, edge.forward(torch.randn(2, 8), end=0))
    reply = client.answer(1).reply
    assert reply is not None and not reply.HasField("layers")


def test_other_shapes_than_the_example(client: CoreClient, edge: WrappedModel) -> None:
    x = torch.randn(5, 3, 8)
    ask(client, 1, edge.forward(x, end="second"))
    assert torch.equal(value(client, 1)["logits"], edge.forward(x)["logits"])


def test_nan_in_nan_out(client: CoreClient, edge: WrappedModel) -> None:
    ask(client, 1, edge.forward(torch.full((2, 8), float("nan")), end="first"))
    assert value(client, 1)["logits"].isnan().all()


def test_a_tail_that_raises(client: CoreClient, edge: WrappedModel) -> None:
    ask(client, 1, edge.forward(torch.full((2, 8), 13.0), end="second"))
    failed = client.answer(1).failed
    assert failed is not None and (failed.error, failed.message) == ("ModelFailed", "ValueError: thirteen")
    ask(client, 2, edge.forward(torch.ones(2, 8), end="second"))
    value(client, 2)


def test_failed_request_frees_its_memory_at_once(edge: WrappedModel) -> None:
    """8 KiB of Zstandard are 256 MiB decoded, which nobody counts once the request is over."""
    lifecycle, seen = Lifecycle("cloud"), []
    lifecycle.on(Stage.AFTER_DECODE)(lambda event: seen.append(weakref.ref(event.value)))
    served = ServedModel(entry(), CPU, lifecycle)
    edge.plan(torch.zeros(3, 8))
    raises, honest = edge.forward(torch.full((3, 8), 13.0), end="second"), edge.forward(torch.ones(3, 8), end="second")
    lies = dataclasses.replace(honest, crossing=dataclasses.replace(honest.crossing, marks=(), cache={}))
    with Core([served], lifecycle=lifecycle) as core:
        client = CoreClient(core, greet=False)
        client.send(greet(edge, "residual", edge.plan(torch.zeros(2, 8)).digest))
        gc.disable()
        try:
            for number, (early, name) in enumerate([(raises, "ModelFailed"), (lies, "CutRefused")]):
                ask(client, number, early)
                failed = client.answer(number).failed
                assert failed is not None and failed.error == name
            ask(client, 9, honest)  # the worker is through with the others
            value(client, 9)
            assert [one() for one in seen[:2]] == [None, None]
        finally:
            gc.enable()


class TestBadFrontiers:
    """Bytes that header, cut or plan do not vouch for."""

    @pytest.fixture
    def early(self, edge: WrappedModel) -> EarlyOutput:
        edge.plan(torch.zeros(2, 8))
        return edge.forward(torch.randn(2, 8), end="second")  # type: ignore[no-any-return]

    def refusal(self, served: ServedModel, early: EarlyOutput, header: bytes | None = None, size: int = -1) -> str:
        parcel = early.pack()
        with pytest.raises(errors.IsthmusError) as caught:
            served.admit(
                early.crossing, parcel.header if header is None else header, parcel.nbytes if size < 0 else size, 10**6
            )
        return f"{type(caught.value).__name__}: {caught.value}"

    def test_good_ones_pass(self, served: ServedModel, early: EarlyOutput) -> None:
        parcel = early.pack()
        served.admit(early.crossing, parcel.header, parcel.nbytes, 10**6)
        with pytest.raises(errors.TooLarge):
            served.admit(early.crossing, parcel.header, parcel.nbytes, 10)

    def test_truncated_and_altered_headers(self, served: ServedModel, early: EarlyOutput) -> None:
        header = early.pack().header
        for bad in (b"", header[:5], header[:-1], header[:20] + b"?" + header[21:], b"\x00" * 100):
            assert self.refusal(served, early, bad).startswith("BadFrame")

    def test_another_size_than_the_header_describes(self, served: ServedModel, early: EarlyOutput) -> None:
        assert "describes" in self.refusal(served, early, size=early.pack().nbytes + 1)

    def test_header_of_another_cut(self, served: ServedModel, edge: WrappedModel, early: EarlyOutput) -> None:
        other = edge.forward(torch.randn(9, 8), end="second").pack()
        assert "the cut" in self.refusal(served, early, other.header, other.nbytes)

    def test_crossing_of_another_layer_than_it_says(self, served: ServedModel, early: EarlyOutput) -> None:
        lying = dataclasses.replace(early, crossing=dataclasses.replace(early.crossing, layer_id=0))
        assert 'layer 0 is "first" here' in self.refusal(served, lying)
        lying = dataclasses.replace(early, crossing=dataclasses.replace(early.crossing, layer_id=99))
        assert "no layer 99" in self.refusal(served, lying)

    def test_crossing_that_sends_less_than_the_plan(self, served: ServedModel, early: EarlyOutput) -> None:
        crossing = dataclasses.replace(early.crossing, slots=early.crossing.slots[:1])
        pieces = early.pieces[: len(crossing.slots[0].pieces)]
        assert "bytes cross by this side's plan" in self.refusal(
            served, dataclasses.replace(early, crossing=crossing, pieces=pieces)
        )

    def test_payload_altered_on_the_way(self, client: CoreClient, edge: WrappedModel, early: EarlyOutput) -> None:
        parcel = early.pack()
        ask(client, 1, early, header=early.pack().header[:-2] + b"??")
        ask(
            client,
            2,
            dataclasses.replace(early, pieces=tuple(piece + 1 for piece in early.pieces)),
            header=parcel.header,
        )
        for id in (1, 2):
            failed = client.answer(id).failed
            assert failed is not None and failed.error == "BadFrame"


def test_other_weights_are_named(served: ServedModel) -> None:
    model = Residual()
    torch.nn.init.ones_(model.last.weight)
    with WrappedModel(model.eval()) as edge, Core([served]) as core:
        client = CoreClient(core, greet=False)
        client.send(greet(edge, "residual"))
        error = client.ended()
    assert isinstance(error, errors.Disagreement) and "weights" in str(error) and "structure" not in str(error)


def test_other_code_is_named(served: ServedModel) -> None:
    class Other(Residual):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(x * 1)

    with WrappedModel(Other().eval()) as edge, Core([served]) as core:
        client = CoreClient(core, greet=False)
        client.send(greet(edge, "residual", edge.plan(torch.zeros(2, 8)).digest))
        assert "plan" in str(client.ended())


def test_other_code_is_named_where_only_the_server_has_an_example() -> None:
    """A model that does not branch has one path for inputs of one shape."""
    served = ServedModel(_straight("build"), CPU)
    with WrappedModel(_straight("other").spec.load_model()) as edge, Core([served]) as core:
        client = CoreClient(core, greet=False)
        client.send(greet(edge, "straight"))
        ask(client, 1, edge.forward(torch.ones(2, 8), end=0))
        failed = client.answer(1).failed
    assert failed is not None and failed.error == "Disagreement" and "the code differs" in failed.message


def _straight(build: str) -> ModelEntry:
    table = {"id": "straight", "factory": f"{__name__}:{build}", "example": {"args": [{"shape": [2, 8]}]}}
    return ModelEntry(spec_from_table(Table(table, "test"), Path.cwd()))


class Straight(torch.nn.Module):
    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.after = [after]  # where no greeting looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after[0](self.layer(x))


def build() -> Straight:
    return Straight(torch.relu)


def other() -> Straight:
    return Straight(torch.tanh)


def test_a_model_without_an_example_serves_too(edge: WrappedModel) -> None:
    served = ServedModel(entry(example=False), CPU)
    assert served.identity.plan_digest == "" and served.identity.layers == 0
    with Core([served]) as core:
        client = CoreClient(core, greet=False)
        client.send(greet(edge, "residual"))
        ask(client, 1, edge.forward(torch.ones(2, 8), end=1))
        value(client, 1)

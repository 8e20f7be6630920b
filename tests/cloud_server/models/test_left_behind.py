"""A run takes a path that nobody rehearsed, and keeps something there: the next client's answer is the model's own."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cloud_server.config import ModelEntry
from cloud_server.models.engine import Computed, Identity, WeightsGuard
from cloud_server.models.served_model import ServedModel
from shared_hooks import EarlyOutput, Parcel, WrappedModel
from shared_hooks.errors import IsthmusError, ModelChanged, ServerUnavailable
from shared_hooks.models import Table, spec_from_table
from shared_hooks.modules import weights_hash

CPU = torch.device("cpu")
FAR = 1e6


class Keeps(nn.Module):
    """Large inputs lead it to `keep`; Python reads that before the first layer, between two, or after the last."""

    where = "after"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("offset", torch.zeros(8))
        self.offset: Tensor
        self.kept = {"scale": 1.0}
        self.table = torch.zeros(8)
        self.last: Tensor | None = None

    def keep(self, x: Tensor) -> None:
        raise NotImplementedError

    def look(self, here: str, x: Tensor) -> None:
        if here == self.where and float(x.abs().max()) > 1000:
            self.keep(x)

    def forward(self, x: Tensor) -> Tensor:
        self.look("before", x)
        hidden = self.first(x)
        self.look("between", hidden)
        out = self.second(torch.tanh(hidden)) * self.kept["scale"] + self.offset + self.table
        self.look("after", hidden)
        return out if self.last is None else out + self.last.mean()


class Halves(Keeps):
    def keep(self, x: Tensor) -> None:
        self.kept["scale"] /= 2


class Replaces(Keeps):
    def keep(self, x: Tensor) -> None:
        self.second.weight = nn.Parameter(self.second.weight * 2)


class Remembers(Keeps):
    def keep(self, x: Tensor) -> None:
        self.last = x.detach().clone()


class WritesABuffer(Keeps):
    def keep(self, x: Tensor) -> None:
        self.offset.add_(1)


class WritesWhatItKeeps(Keeps):
    """Neither a parameter nor a buffer: no file of weights has it."""

    def keep(self, x: Tensor) -> None:
        self.table[0] = 7


class Halved(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        plain = [one.as_subclass(Tensor) * 0.5 if isinstance(one, Halved) else one for one in args]
        return func(*plain, **(kwargs or {}))


class ChangesAClass(Keeps):
    def keep(self, x: Tensor) -> None:
        self.second.weight.__class__ = Halved


class SetsAFunction(Keeps):
    def keep(self, x: Tensor) -> None:
        torch.nn.functional.silu = torch.nn.functional.relu

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(super().forward(x))


class Flushes(Keeps):
    def keep(self, x: Tensor) -> None:
        torch.set_flush_denormal(True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e-38 * 1e-3 * 1e38


KINDS = [Halves, Replaces, Remembers, WritesABuffer, WritesWhatItKeeps, ChangesAClass, SetsAFunction, Flushes]
WHERE = ["before", "between", "after"]
X = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


def served(kind: type[Keeps], tmp_path: Path) -> ServedModel:
    table = {"id": "keeps", "factory": f"{__name__}:{kind.__name__}", "example": {"args": [{"shape": [2, 8]}]}}
    return ServedModel(ModelEntry(spec_from_table(Table(table, "test"), tmp_path)), CPU)


def value(computed: Computed, model: nn.Module) -> Tensor:
    payload = bytearray().join(computed.buffers)
    found = Parcel.to_value(computed.reply.header, payload, max_bytes=1 << 20)
    assert isinstance(found, Tensor)
    return found


def ask(server: ServedModel, early: EarlyOutput) -> Computed:
    parcel = early.pack()
    server.admit(early.crossing, parcel.header, parcel.nbytes, 1 << 20)
    return server.compute(early.crossing, parcel.header, memoryview(bytearray().join(parcel.buffers)), False)


def a_file(x: Tensor) -> tuple[bytes, memoryview]:
    data = io.BytesIO()
    np.save(data, x.numpy())
    parcel = Parcel.of_tensors(None, [torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)])
    return parcel.header, memoryview(bytearray().join(parcel.buffers))


def expected(kind: type[Keeps], x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = kind().eval()(x)
    return found


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    silu = torch.nn.functional.silu
    yield
    torch.nn.functional.silu = silu
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_leads_elsewhere(
    kind: type[Keeps], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody tampers: one input has large numbers."""
    monkeypatch.setattr(Keeps, "where", where)
    server = served(kind, tmp_path)
    for number in range(3):
        header, payload = a_file(X * FAR)
        with contextlib.suppress(ServerUnavailable):  # the model was loaded again
            server.compute_file(".npy", header, payload, False, 1 << 20)
        assert_right(server, kind, X + number)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_was_not_rehearsed(
    kind: type[Keeps], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edge sends what Python read before the cut; the recipe was made with another."""
    monkeypatch.setattr(Keeps, "where", where)
    server = served(kind, tmp_path)
    assert_right(server, kind, X)
    for cut in ("input", "first", "second"):
        with WrappedModel(kind().eval()) as edge:
            edge.plan(X)
            for x in (X, X * FAR):
                with contextlib.suppress(IsthmusError):
                    ask(server, edge.forward(x, end=cut))
        assert_right(server, kind, X)


def assert_right(server: ServedModel, kind: type[Keeps], x: Tensor) -> None:
    """An honest client, new: exact at every cut that it may use, and as a file."""
    whole = expected(kind, x)
    header, payload = a_file(x)
    assert torch.equal(
        value(server.compute_file(".npy", header, payload, False, 1 << 20), server._wrapped.model), whole
    )
    with WrappedModel(kind().eval()) as edge:
        for cut in ("input", "first", "second"):
            try:
                early = edge.forward(x, end=cut)
                found = ask(server, early)
            except (ServerUnavailable, ModelChanged):
                raise
            except IsthmusError:
                continue
            assert torch.equal(value(found, edge.model), whole), cut


@pytest.mark.parametrize("kind", KINDS)
def test_an_edge_alone(kind: type[Keeps]) -> None:
    """The whole model on the edge, by a path no plan has seen; then a head of another input."""
    with WrappedModel(kind().eval()) as edge, WrappedModel(kind().eval()) as cloud:
        if not edge.plan(X).layers[0].can_split:
            return  # it is a model with state, and runs whole as it would by itself
        refused = 0
        for x in (X, X * FAR, X + 1):
            try:
                found = edge.forward(x)
                assert torch.equal(found, expected(kind, x))
                found = cloud.forward(EarlyOutput.from_bytes(edge.forward(x, end="first").to_bytes()))
                assert torch.equal(found, expected(kind, x))
            except IsthmusError:
                refused += 1
        assert refused < 3


def test_unrecoverable_change_is_reported_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with WrappedModel(WritesABuffer().eval()) as edge:
        edge.plan(X)
        for x in (X * FAR, X):
            with pytest.raises(ModelChanged, match="has changed offset while it ran"):
                edge.forward(x)


class TestCustody:
    def test_a_model_that_changes_is_loaded_again(self) -> None:
        model, again = nn.Linear(2, 2), nn.Linear(2, 2)
        again.load_state_dict(model.state_dict())
        guard = WeightsGuard(Identity("m", weights_hash(model), ""), model, lambda: again)
        guard.check()
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(ServerUnavailable, match="had changed in memory and was loaded again"):
            guard.check()
        assert torch.equal(model.weight, again.weight) and guard.mended == 1
        guard.check()

    def test_other_memory_is_a_change(self) -> None:
        model, again = nn.Linear(2, 2), nn.Linear(2, 2)
        again.load_state_dict(model.state_dict())
        guard = WeightsGuard(Identity("m", weights_hash(model), ""), model, lambda: again)
        model.weight.data = model.weight.data * 2
        assert guard.mend() and torch.equal(model.weight, again.weight)

    def test_a_write_that_torch_does_not_count_is_a_change(self) -> None:
        model, again = nn.Linear(2, 2), nn.Linear(2, 2)
        again.load_state_dict(model.state_dict())
        guard = WeightsGuard(Identity("m", weights_hash(model), ""), model, lambda: copy.deepcopy(again))
        for write in (lambda: model.weight.data.add_(1), lambda: model.bias.detach().numpy().fill(3)):
            guard.check()
            write()
            assert guard.mend() and not guard.mend()
            assert torch.equal(model.weight, again.weight) and torch.equal(model.bias, again.bias)

    def test_other_weights_than_were_announced_serve_nobody(self) -> None:
        model = nn.Linear(2, 2)
        guard = WeightsGuard(Identity("m", weights_hash(model), ""), model, lambda: nn.Linear(2, 2))  # drawn: others
        with torch.no_grad():
            model.weight.add_(1)
        for _ in range(3):
            with pytest.raises(ServerUnavailable):
                guard.check()

"""Heads of models whose Python reads data, chooses by it, or takes any batch and length: exported, served, compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import edge_client
from cloud_server.models import ServedModel
from edge_client import LightClient, ModelChoice
from edge_client.light import Tensor
from shared_hooks.errors import InputMismatch, IsthmusError, SpecError
from tests.cloud_server.inference.served import entry, serving


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)


class Branches(_Small):
    """Python asks whether all of a mask is set, as language models do."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if not bool(mask.all()):
            hidden = hidden * mask[:, None]
        return self.last(self.second(hidden).relu())


class Counts(_Small):
    """A whole number that Python reads says how often a layer runs, and how much is kept."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for _ in range(int(mask.sum())):
            hidden = self.second(hidden).tanh()
        return self.last(hidden[: int(mask.sum())])


class Chooses(_Small):
    """How many rows there are behind the first layer depends on data."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(x)[mask])
        return self.last(hidden) / len(hidden)


class Compares(_Small):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if torch.equal(mask, torch.ones_like(mask)) or torch.allclose(x, torch.zeros_like(x)):
            return self.last(self.second(hidden).relu())
        return self.last(hidden)


class Lists(_Small):
    """Sizes of pieces come as a tensor and are read as a list."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        sizes = torch.stack([mask.sum(), (~mask).sum()]).tolist()
        one, other = self.first(x).split(sizes)
        return self.last(self.second(torch.cat([other, one])).relu())


class Tokens(nn.Module):
    """Takes any batch and any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.place = nn.Embedding(20, 8), nn.Embedding(64, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.last = nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])
        hidden = self.block(self.embed(ids) + self.place(places))
        return self.last(hidden[:, -1] * ids.shape[1] ** 0.0)


class InBfloat16(_Small):
    """onnxruntime computes nothing in it, numpy knows nothing of it, and it crosses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.second(self.first(x).relu())
        return self.last(hidden.float())


class InFloat64(nn.Module):
    """onnxruntime convolves in float32 alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Conv1d(4, 6, 3, padding=1).double(), nn.Linear(48, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.double()[None]).relu()
        return self.last(hidden.flatten(1)).float()


class InComplexNumbers(_Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.fft.rfft(self.first(x))
        return self.last(self.second(torch.fft.irfft(found * found.abs(), n=8)))


class Experts(_Small):
    """Rows go to experts by data, as in a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        chosen = hidden[:, :3].argmax(1)
        order = chosen.argsort(stable=True)
        ends = (chosen[:, None] <= torch.arange(3)).sum(0).to(torch.int32)
        found = nn.functional.grouped_mm(hidden[order], self.experts, offs=ends)
        return self.last(self.second(found[order.argsort()]).tanh())


class OfWeights(_Small):
    """What is made of weights alone is of functions that the exporter has no word for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.linalg.matrix_exp(self.second.weight - self.second.weight.T)
        return self.last(nn.functional.linear(self.first(x).relu(), turned))


MASK = torch.tensor([True, True, False, True])
X = torch.linspace(-1, 1, 32).reshape(4, 8)


@contextmanager
def served(model: type[nn.Module], example: dict[str, Any]) -> Iterator[str]:
    made = entry(model.__name__, __name__, example=example)
    with serving(ServedModel(replace(made, tails=("all",)), torch.device("cpu"))) as server:
        yield f"127.0.0.1:{server.port}"


@contextmanager
def reading(model: type[nn.Module], mask: torch.Tensor, folder: Path) -> Iterator[tuple[LightClient, list[str]]]:
    """A light client of a model of ``x`` and ``mask``, and the cuts that it may use."""
    fill = {"fill": float(mask.all())} if mask.all() or not mask.any() else {}
    example = {"args": [{"shape": [4, 8]}, {"shape": [4], "dtype": "bool", **fill}]}
    choice = ModelChoice(model().eval(), example=((X, mask), {}), model_id="residual")
    found = edge_client.export(choice, split="all", output=folder / "heads", vary="fixed")
    cuts = [one.cut for one in found.heads if not one.refused]
    assert found.ok, found.text()
    with served(model, example) as server, LightClient(server, folder / "heads", cuts[0]) as client:
        yield client, cuts


def _right(model: nn.Module, client: LightClient, cuts: list[str], *tensors: torch.Tensor) -> None:
    with torch.no_grad():
        wanted = model(*(one.clone() for one in tensors)).numpy()
    for cut in cuts:
        found = client.infer(*(one.numpy() for one in tensors), split=cut).output
        assert found.shape == wanted.shape and np.abs(found - wanted).max() < 1e-5, cut


@pytest.mark.parametrize("kind", [Branches, Counts, Chooses, Compares, Lists])
@pytest.mark.parametrize("every", [True, False])
def test_values_read_by_python_cross(kind: type[nn.Module], every: bool, tmp_path: Path) -> None:
    mask = torch.ones(4, dtype=torch.bool) if every else MASK
    model = kind().eval()
    with reading(kind, mask, tmp_path) as (client, cuts):
        _right(model, client, cuts, X, mask)
        _right(model, client, cuts, -2 * X.flip(0), mask)
        other = MASK if every else torch.tensor([False, True, False, False])
        refused = 0
        for cut in cuts:
            try:
                found = client.infer(X.numpy(), other.numpy(), split=cut).output
            except IsthmusError as error:
                refused += 1
                says = "for which the head was not made", "fails on this input", "expected", "path"
                assert any(word in f"{error}" for word in says), error
            else:
                with torch.no_grad():
                    wanted = model(X, other).numpy()
                assert found.shape == wanted.shape and np.abs(found - wanted).max() < 1e-5, cut
        assert refused or kind in (Branches, Compares)
        _right(model, client, cuts, X, mask)


@pytest.mark.parametrize(
    ("kind", "near"),
    [(InBfloat16, 2e-2), (InFloat64, 1e-5), (InComplexNumbers, 1e-4), (Experts, 1e-5), (OfWeights, 1e-5)],
)
def test_numbers_that_runtimes_know_nothing_of(kind: type[nn.Module], near: float, tmp_path: Path) -> None:
    model, example = kind().eval(), {"args": [{"shape": [4, 8]}]}
    found = edge_client.export(
        ModelChoice(model, example=((X,), {}), model_id="residual"),
        split="all",
        output=tmp_path / "heads",
        vary="fixed",
    )
    cuts = [one.cut for one in found.heads if not one.refused]
    assert found.ok and cuts, found.text()
    with served(kind, example) as server, LightClient(server, tmp_path / "heads", cuts[0]) as client:
        for cut in cuts:
            assert all(one.dtype != "bfloat16" for one in client.heads.head(cut).crossing)
            for x in (X, -2 * X.flip(0)):
                with torch.no_grad():
                    wanted = model(x).numpy()
                answer = client.infer(x.numpy(), split=cut)
                assert np.abs(answer.output - wanted).max() <= near * np.abs(wanted).max(), cut
                assert 0 < answer.tail_ns < answer.request_ns


class Picks(_Small):
    """Several indices at once, negative ones too."""

    def forward(self, x: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)[row, column]).relu())


def test_an_index_beyond_the_end_is_refused(tmp_path: Path) -> None:
    row, column = torch.tensor([[0], [-1], [3]]), torch.arange(8)
    choice = ModelChoice(Picks().eval(), example=((X, row, column), {}), model_id="residual")
    found = edge_client.export(choice, split="second", output=tmp_path, vary="fixed")
    assert found.ok, found.text()
    with LightClient("127.0.0.1:9", tmp_path) as client:
        (given,) = client.crossing(X.numpy(), row.numpy(), column.numpy() - 8).values()
        model = Picks().eval()
        with torch.no_grad():
            assert np.abs(given - model.second(model.first(X)[row, column - 8]).numpy()).max() < 1e-5
        for rows, columns in ((row + 1, column), (row - 4, column), (row, column + 1), (row, column - 9)):
            with pytest.raises(InputMismatch, match="fails on this input"):
                client.crossing(X.numpy(), rows.numpy(), columns.numpy())


def test_numbers_that_a_head_cannot_give_are_refused(tmp_path: Path) -> None:
    with reading(Branches, MASK, tmp_path) as (client, cuts):
        (cut,) = [one for one in cuts if one == "second"]
        head = client.heads.head(cut)
        crossing = client._run(head.file, head.inputs, {"x": X.numpy(), "mask": MASK.numpy()}, None)
        (read,) = [name for name in crossing if name.startswith("read.")]
        assert crossing[read].dtype == np.int64 and crossing[read].shape == () and not crossing[read]
        for value in (1, 2, -1, np.iinfo(np.int64).min):
            with pytest.raises(IsthmusError):
                client._outputs_of(client._request(head, {**crossing, read: np.array(value)})[0], 60.0)
        with pytest.raises(InputMismatch):
            client._outputs_of(client._request(head, {**crossing, read: np.array([0])})[0], 60.0)
        assert client._outputs_of(client._request(head, crossing)[0], 60.0)[0]


def test_any_batch(tmp_path: Path) -> None:
    choice = ModelChoice(Tokens().eval(), example=((torch.arange(10).reshape(2, 5),), {}), model_id="residual")
    found = edge_client.export(choice, split=["embed", "block.norm1", "last"], output=tmp_path, vary="batch")
    assert found.ok and {one["any"] for one in found.rows()} == {"batch"}, found.text()
    _any_size(tmp_path, [one.cut for one in found.heads], [(1, 5), (2, 5), (7, 5)], [(2, 6), (2, 4)])


def test_any_length(tmp_path: Path) -> None:
    choice = ModelChoice(Tokens().eval(), example=((torch.arange(10).reshape(2, 5),), {}), model_id="residual")
    some = ["embed", "block.norm1", *sorted(POOLED)]
    found = edge_client.export(choice, split=some, output=tmp_path, vary="length")
    assert found.ok and {one["cut"] for one in found.rows() if one["any"] is None} == POOLED, found.text()
    cuts = [one.cut for one in found.heads if one.cut not in POOLED]
    _any_size(tmp_path, cuts, [(2, 3), (2, 5), (2, 11)], [(1, 5), (3, 5)])


def test_any_batch_and_length(tmp_path: Path) -> None:
    choice = ModelChoice(Tokens().eval(), example=((torch.arange(10).reshape(2, 5),), {}), model_id="residual")
    some = ["embed", "block.dropout2", "last"]
    found = edge_client.export(choice, split=some, output=tmp_path, check=True)
    assert found.ok and found.checked == len(some), found.text()
    kinds = {one["cut"]: one["any"] for one in found.rows()}
    assert all(kind == ("batch" if cut in POOLED else "batch, length") for cut, kind in kinds.items()), kinds
    cuts = [cut for cut in kinds if cut not in POOLED]
    _any_size(tmp_path, cuts, [(1, 1), (2, 5), (7, 3), (3, 7), (30, 40)], [(36, 2), (2, 44)])


class Captions(nn.Module):
    """A picture, whose channels are no length, and tokens; a GRU, of which a kernel might choose by data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.see, self.embed = nn.Conv2d(3, 8, 3), nn.Embedding(20, 8)
        self.gru, self.last = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, image: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        seen = self.see(image).mean((2, 3))
        return self.last(self.gru(self.embed(ids) + seen[:, None])[0])


def test_a_picture_and_tokens(tmp_path: Path) -> None:
    image, ids = torch.rand(2, 3, 6, 6), torch.arange(8).reshape(2, 4)
    choice = ModelChoice(Captions().eval(), example=((image, ids), {}), model_id="residual")
    found = edge_client.export(choice, split=["see", "embed", "gru"], output=tmp_path)
    kinds = {one["cut"]: one["any"] for one in found.rows()}
    assert kinds["see"] == kinds["embed"] == "batch, length" and kinds["gru"] in ("batch", "batch, length"), (
        found.text()
    )
    example = {"args": [{"shape": [2, 3, 6, 6]}, {"shape": [2, 4], "dtype": "int64", "high": 20}]}
    with served(Captions, example) as server, LightClient(server, tmp_path, "embed") as client:
        model = Captions().eval()
        _right(model, client, ["see", "embed"], torch.rand(3, 3, 6, 6), torch.arange(21).remainder(20).reshape(3, 7))
        _right(model, client, ["see", "embed", "gru"], torch.rand(5, 3, 6, 6), torch.arange(20).reshape(5, 4))


class Means(nn.Module):
    """What crosses behind the first layer tells no length, and the tail divides by it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.embed, self.first, self.last = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.embed(ids).sum(1)) / ids.shape[1])


def test_a_length_that_no_shape_tells(tmp_path: Path) -> None:
    choice = ModelChoice(Means().eval(), example=((torch.arange(10).reshape(2, 5),), {}), model_id="residual")
    for vary, kinds in (("length", ["length", None, None]), ("both", ["batch, length", "batch", "batch"])):
        found = edge_client.export(choice, split="all", output=tmp_path, vary=vary)
        assert [one["any"] for one in found.rows()] == kinds, found.text()
    example = {"args": [{"shape": [2, 5], "dtype": "int64", "high": 20}]}
    with served(Means, example) as server, LightClient(server, tmp_path, "embed") as client:
        model = Means().eval()
        _right(model, client, ["embed"], torch.arange(21).remainder(20).reshape(3, 7))
        _right(model, client, ["embed", "first", "last"], torch.arange(15).reshape(3, 5))
        with pytest.raises(InputMismatch, match="expected int64 of shape"):
            client.infer(np.zeros((3, 7), np.int64), split="first")
    longer = ModelChoice(Means().eval(), example=((torch.arange(14).reshape(2, 7),), {}), model_id="residual")
    edge_client.export(longer, split="first", output=tmp_path / "longer")
    with served(Means, example) as server, LightClient(server, tmp_path / "longer") as client:
        with pytest.raises(InputMismatch, match=r"had the shape \[2, 7\]; this tail computes for \[2, 5\]"):
            client.infer(torch.arange(14).reshape(2, 7).numpy())
        ids = torch.arange(14).reshape(2, 7).numpy()
        head = client.heads.head("first")
        request, _ = client._request(head, client.crossing(ids), {"ids": ids})
        for text in ("", "[", "{}", '["a"]', '{"ids": [null]}', '{"ids": 7}', "7", "[" * 9000):
            request.parameters["isthmus_shapes"].string_param = text
            with pytest.raises(IsthmusError):
                client._outputs_of(request, 60.0)


def _any_size(folder: Path, cuts: list[str], taken: list[tuple[int, int]], refused: list[tuple[int, int]]) -> None:
    model = Tokens().eval()
    example = {"args": [{"shape": [2, 5], "dtype": "int64", "high": 20}]}
    with served(Tokens, example) as server, LightClient(server, folder, cuts[0]) as client:
        for shape in taken:
            _right(model, client, cuts, torch.arange(shape[0] * shape[1]).remainder(20).reshape(shape))
        for shape in refused:
            with pytest.raises(InputMismatch, match="expected int64 of shape"):
                client.infer(np.zeros(shape, dtype=np.int64))
        head = client.heads.head(cuts[-1])
        ids = np.zeros(taken[0], dtype=np.int64)
        crossing = client._run(head.file, head.inputs, {"ids": ids}, None)
        assert client._outputs_of(client._request(head, crossing)[0], 60.0)[0]
        cut = {name: np.ascontiguousarray(value[..., :-1]) for name, value in crossing.items()}
        with pytest.raises(IsthmusError):
            client._outputs_of(client._request(replace(head, crossing=_forms(cut)), cut)[0], 60.0)


def _forms(arrays: dict[str, Any]) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, one.dtype.name, one.shape) for name, one in arrays.items())


POOLED = {"block.norm2", "last"}
"""Cuts of `Tokens` behind which only the last token crosses."""


class Turns(nn.Module):
    """From a size on Python does something else, which no shape shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * min(len(x), 9))


def test_a_size_from_which_python_does_something_else(tmp_path: Path) -> None:
    choice = ModelChoice(Turns().eval(), example=((torch.rand(2, 8),), {}), model_id="residual")
    found = edge_client.export(choice, split="all", output=tmp_path)
    assert {row["cut"]: row["any"] for row in found.rows()} == {"first": "batch", "last": None}, found.text()
    with served(Turns, {"args": [{"shape": [2, 8]}]}) as server, LightClient(server, tmp_path, "first") as client:
        model = Turns().eval()
        for rows in (1, 2, 9, 30):
            _right(model, client, ["first"], torch.rand(rows, 8))
        with pytest.raises(InputMismatch, match="-1: up to 35"):
            client.infer(np.zeros((36, 8), np.float32))


class Pieces(Turns):
    """From a size on, more functions of no data run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(8)
        for _ in range(len(x) // 16):
            scale = scale + 1
        return self.last(self.first(x * scale))


def test_a_size_from_which_more_functions_run(tmp_path: Path) -> None:
    choice = ModelChoice(Pieces().eval(), example=((torch.rand(2, 8),), {}), model_id="residual")
    found = edge_client.export(choice, split="first", output=tmp_path)
    assert found.ok and found.rows()[0]["any"] is None, found.text()


def test_sizes_that_are_fixed(tmp_path: Path) -> None:
    choice = ModelChoice(Tokens().eval(), example=((torch.arange(10).reshape(2, 5),), {}), model_id="residual")
    found = edge_client.export(choice, split=["embed", "last"], output=tmp_path, vary="fixed")
    assert found.ok and {one["any"] for one in found.rows()} == {None}
    with pytest.raises(SpecError, match="vary"):
        edge_client.export(choice, split="all", output=tmp_path, vary="bach")

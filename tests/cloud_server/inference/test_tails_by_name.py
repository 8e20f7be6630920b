"""Tails behind named cuts as models of the Open Inference Protocol: what crosses comes as tensors by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from cloud_server.config import read_config
from cloud_server.limits import MIB, Limits
from cloud_server.models import ServedModel, admission
from cloud_server.transport import CloudServer
from protos.inference import inference_pb2 as pb
from shared_hooks import WrappedModel
from shared_hooks.crossing import named_crossing
from shared_hooks.errors import CutRefused, SpecError, UnknownLayer
from tests.cloud_server.inference.served import Asker, entry, outputs, serving, tail
from tests.cloud_server.real import Residual

CODE = grpc.StatusCode
MODEL = Residual().eval()
X = torch.linspace(-1, 1, 16).reshape(2, 8)


@pytest.fixture(scope="module")
def server() -> Iterator[CloudServer]:
    served = ServedModel(replace(entry(), tails=("all",)), torch.device("cpu"))
    with serving(served, limits=Limits(max_request_bytes=MIB)) as server:
        yield server


@pytest.fixture(scope="module")
def asker(server: CloudServer) -> Iterator[Asker]:
    with Asker(server.port) as asker:
        yield asker


@pytest.fixture(scope="module")
def wrapped() -> Iterator[WrappedModel]:
    with WrappedModel(MODEL) as wrapped:
        wrapped.plan(X)
        yield wrapped


def tensors(wrapped: WrappedModel, cut: str, x: torch.Tensor = X) -> dict[str, torch.Tensor]:
    early = wrapped.head(cut, x)
    return {one.name: one.tensor_of(early.pieces[one.piece]) for one in named_crossing(early.crossing, ["x"]).tensors}


def cuts(wrapped: WrappedModel) -> list[str]:
    """Those before the model reads a number from its data."""
    names = [one.name for one in wrapped.cuts if one.can_split]
    assert names == ["first", "second", "mood", "last"]
    return names[:2]


def test_every_cut_is_a_model_and_exact(asker: Asker, wrapped: WrappedModel) -> None:
    listed = [one.name for one in asker.call("RepositoryIndex").models]
    assert listed == ["residual", *(f"residual@{cut}" for cut in cuts(wrapped))]
    with torch.no_grad():
        wanted = MODEL(X)
    for cut in cuts(wrapped):
        given = tensors(wrapped, cut)
        known = asker.call("ModelMetadata", pb.ModelMetadataRequest(name=f"residual@{cut}"))
        assert known.name == f"residual@{cut}"
        shapes = [(one.name, list(one.shape)) for one in known.inputs]
        assert shapes == [(name, [-1, *value.shape[1:]]) for name, value in given.items()]
        answer = asker.infer(tail(cut, given))
        assert answer.model_name == f"residual@{cut}"
        found = outputs(answer)
        assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert asker.call("ModelReady", pb.ModelReadyRequest(name=f"residual@{cut}")).ready
    (counted,) = asker.call("ModelStatistics", pb.ModelStatisticsRequest(name="residual@first")).model_stats
    assert counted.name == "residual" and counted.inference_count >= 2
    refused(asker, tail("mood", given), CODE.FAILED_PRECONDITION, "reads a number with a fraction from data")


def refused(asker: Asker, request: pb.ModelInferRequest, code: grpc.StatusCode, says: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        asker.infer(request)
    assert (error.value.code(), says in error.value.details()) == (code, True), error.value.details()


def test_hostile_requests_to_tails(asker: Asker, wrapped: WrappedModel) -> None:
    cut = cuts(wrapped)[0]
    given = tensors(wrapped, cut)
    name, value = next(iter(given.items()))
    refused(asker, tail("nope", given), CODE.NOT_FOUND, "no tail behind")
    refused(asker, tail("", given), CODE.NOT_FOUND, "no tail behind")
    refused(asker, tail(cut, {}), CODE.INVALID_ARGUMENT, "is missing")
    refused(asker, tail(cut, {**given, "other": value}), CODE.INVALID_ARGUMENT, "no input")
    refused(asker, tail(cut, {**given, name: value[:1]}), CODE.INVALID_ARGUMENT, "do not belong together")
    refused(asker, tail(cut, {**given, name: value[:, :7]}), CODE.INVALID_ARGUMENT, "this tail takes")
    refused(asker, tail(cut, {one: value[:0] for one, value in given.items()}), CODE.INVALID_ARGUMENT, "no size")
    refused(asker, tail(cut, {**given, name: value.reshape(-1)}), CODE.INVALID_ARGUMENT, "sizes came")
    wrong = tail(cut, given)
    wrong.inputs[0].datatype = "FP64"
    refused(asker, wrong, CODE.INVALID_ARGUMENT, "the model takes FP32")
    wrong = tail(cut, given)
    wrong.raw_input_contents[0] = wrong.raw_input_contents[0][:-4]
    refused(asker, wrong, CODE.INVALID_ARGUMENT, "bytes came")
    wrong = tail(cut, given)
    wrong.inputs[0].shape[0] = 1 << 62
    refused(asker, wrong, CODE.RESOURCE_EXHAUSTED, "absurd size")
    wrong = tail(cut, given)
    wrong.parameters["isthmus_weights"].string_param = "0" * 32
    refused(asker, wrong, CODE.FAILED_PRECONDITION, "other weights")
    missing = asker.call
    with pytest.raises(grpc.RpcError) as error:
        missing("ModelMetadata", pb.ModelMetadataRequest(name="residual@nope"))
    assert error.value.code() is CODE.NOT_FOUND
    # values that are none of a sane head's are the model's own business, and the next request is exact
    asker.infer(tail(cut, {one: torch.full_like(tensor, float("nan")) for one, tensor in given.items()}))
    with torch.no_grad():
        wanted = MODEL(X)
    found = outputs(asker.infer(tail(cut, given)))
    assert all(torch.equal(found[one], wanted[one]) for one in wanted)


@pytest.mark.parametrize("rows", [1, 2, 3, 35])
def test_any_batch_is_exact(asker: Asker, wrapped: WrappedModel, rows: int) -> None:
    x = torch.randn(rows, 8)
    with torch.no_grad():
        wanted = MODEL(x)
    for cut in cuts(wrapped):
        found = outputs(asker.infer(tail(cut, tensors(wrapped, cut, x))))
        assert all(torch.equal(found[one], wanted[one]) for one in wanted)


def test_tails_are_not_served_unless_asked() -> None:
    with (
        serving(ServedModel(entry(), torch.device("cpu"))) as server,
        Asker(server.port) as asker,
        WrappedModel(MODEL) as wrapped,
    ):
        wrapped.plan(X)
        cut = cuts(wrapped)[0]
        refused(asker, tail(cut, tensors(wrapped, cut)), CODE.NOT_FOUND, "none is (`tails`")


def test_names_that_are_no_cut_are_refused_when_the_server_starts() -> None:
    with pytest.raises(UnknownLayer):
        ServedModel(replace(entry(), tails=("nope",)), torch.device("cpu"))


def test_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    table = '[models.residual]\nfactory = "tests.cloud_server.real:Residual"\n'
    file.write_text(table + 'tails = ["all"]\n')
    assert read_config(file).models[0].tails == ("all",)
    file.write_text(table + 'tails = "all"\n')
    with pytest.raises(SpecError, match="tails"):
        read_config(file)
    served = replace(entry(), tails=("all",))
    spec = replace(served.spec, _example=None)
    with pytest.raises(SpecError, match="tails: its spec has no example"):
        ServedModel(replace(served, spec=spec), torch.device("cpu"))


def test_a_cut_that_tensors_alone_do_not_make() -> None:
    with pytest.raises(CutRefused, match="a number with a fraction from data"):
        ServedModel(replace(entry(), tails=("mood",)), torch.device("cpu"))
    found = ServedModel(replace(entry(), tails=("all",)), torch.device("cpu"))
    assert "a number with a fraction from data" in found.identity.form["tails"]["mood"]["refused"]


def test_tails_of_a_model_without_names_are_refused_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_form_of", lambda *_: {"refused": "two of its inputs have one name"})
    assert "refused" in ServedModel(entry(), torch.device("cpu")).identity.form
    with pytest.raises(CutRefused, match="have no names: two of its inputs"):
        ServedModel(replace(entry(), tails=("all",)), torch.device("cpu"))


def test_only_a_part_of_a_tensor_crosses() -> None:
    x = torch.linspace(-2, 2, 32).reshape(4, 8)
    served = ServedModel(replace(entry("Dropping", __name__), tails=("all",)), torch.device("cpu"))
    example = torch.zeros(2, 8)
    with serving(served) as server, Asker(server.port) as asker, WrappedModel(Dropping().eval()) as wrapped:
        wrapped.plan(example)
        for part in (x[:2], x[2:]):
            given = tensors(wrapped, "first", part)
            assert sum(one.numel() for one in given.values()) == 8, "half of it"
            with torch.no_grad():
                wanted = wrapped.model(part)
            assert torch.equal(outputs(asker.infer(tail("first", given)))["output"], wanted)


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[:, :4])

"""The Open Inference Protocol by gRPC, on a real server: what it answers, and what it refuses, in which words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch

from cloud_server.access import entry as identity
from cloud_server.access import hash_of, new_token
from cloud_server.limits import MIB, Limits
from cloud_server.transport import CloudServer, servicer
from protos.inference import inference_pb2 as pb
from tests.cloud_server.fakes import FakeEngine
from tests.cloud_server.inference.served import Asker, asked, crossing, engine, outputs, serving, tail, typed
from tests.cloud_server.real import Residual
from tests.waiting import eventually

SMALL = Limits(max_request_bytes=MIB, max_clients=4, max_in_flight=3)
CODE = grpc.StatusCode
MODEL = Residual().eval()  # made once: that draws from the process's generators, which the server watches


@pytest.fixture(scope="module")
def server() -> Iterator[CloudServer]:
    with serving(engine(), FakeEngine(model_id="nameless"), limits=SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def asker(server: CloudServer) -> Iterator[Asker]:
    with Asker(server.port) as asker:
        yield asker


def whole(x: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        found: dict[str, torch.Tensor] = MODEL(x)
    return found


def same(answer: pb.ModelInferResponse, x: torch.Tensor) -> None:
    found = outputs(answer)
    assert list(found) == ["logits", "hidden"]
    assert all(torch.equal(value, found[name]) for name, value in whole(x).items())


def refused(asker: Asker, request: Any, code: grpc.StatusCode, says: str, name: str = "ModelInfer") -> None:
    with pytest.raises(grpc.RpcError) as error:
        asker.call(name, request)
    assert (error.value.code(), says in error.value.details()) == (code, True), error.value.details()


class TestAnswers:
    def test_health(self, asker: Asker) -> None:
        assert asker.call("ServerLive").live and asker.call("ServerReady").ready
        assert asker.call("ModelReady", pb.ModelReadyRequest(name="residual", version="1")).ready

    def test_served_models_and_metadata(self, asker: Asker) -> None:
        assert asker.call("ServerMetadata").name == "isthmus"
        assert [one.name for one in asker.call("RepositoryIndex").models] == ["nameless", "residual"]
        found = asker.call("ModelMetadata", pb.ModelMetadataRequest(name="residual"))
        assert [(one.name, one.datatype, list(one.shape)) for one in found.inputs] == [("x", "FP32", [-1, 8])]
        assert [(one.name, list(one.shape)) for one in found.outputs] == [("logits", [-1, 3]), ("hidden", [-1, 8])]
        config = asker.call("ModelConfig", pb.ModelConfigRequest(name="residual")).config
        assert config.input[0].data_type == pb.ModelConfig.TYPE_FP32 and list(config.output[1].dims) == [-1, 8]

    @pytest.mark.parametrize("rows", [0, 1, 2, 5])
    def test_the_whole_model_exactly(self, asker: Asker, rows: int) -> None:
        x = torch.randn(rows + 1, 8)[1:] if rows else torch.ones(1, 8)
        same(asker.infer(asked(x)), x)
        answer = asker.infer(typed(x))
        same(answer, x)
        assert answer.id == "mine" and not answer.raw_output_contents and answer.model_version == "1"

    def test_some_outputs(self, asker: Asker) -> None:
        request = asked(torch.ones(1, 8))
        request.outputs.add(name="hidden")
        assert list(outputs(asker.infer(request))) == ["hidden"]

    def test_many_at_once(self, server: CloudServer) -> None:
        wrong: list[object] = []

        def ask(number: int) -> None:
            x = torch.full((1 + number, 8), float(number))
            try:
                with Asker(server.port) as own:
                    for _ in range(5):
                        same(own.infer(asked(x)), x)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        core = server.core
        eventually(lambda: core.clients == 0 and core.requests.kept() == (0, 0) and core.requests.held_bytes == 0)
        assert server.inference.held.nbytes == 0


def changed(change: Callable[[pb.ModelInferRequest], object], contents: bool = False) -> pb.ModelInferRequest:
    request = typed(torch.ones(2, 8)) if contents else asked(torch.ones(2, 8))
    change(request)
    return request


def shape(*sizes: int) -> Callable[[pb.ModelInferRequest], None]:
    def change(request: pb.ModelInferRequest) -> None:
        request.inputs[0].shape[:] = sizes

    return change


BAD = CODE.INVALID_ARGUMENT
REFUSALS: dict[str, tuple[Any, grpc.StatusCode, str]] = {
    "no message of this kind": (b"\xff\xff\xff", BAD, "BadFrame: a message that is no ModelInferRequest"),
    "empty": (pb.ModelInferRequest(), CODE.NOT_FOUND, 'no model ""'),
    "unknown model": (pb.ModelInferRequest(model_name="x" * 10_000), CODE.NOT_FOUND, "there is: nameless, residual"),
    "unknown version": (changed(lambda r: setattr(r, "model_version", "2")), CODE.NOT_FOUND, "there is: 1"),
    "no names": (pb.ModelInferRequest(model_name="nameless"), CODE.FAILED_PRECONDITION, "no example"),
    "no input": (pb.ModelInferRequest(model_name="residual"), BAD, 'the input "x" is missing'),
    "unknown input": (changed(lambda r: setattr(r.inputs[0], "name", "y")), BAD, 'no input "y"; the model takes x'),
    "the same input twice": (
        changed(lambda r: (r.inputs.append(r.inputs[0]), r.raw_input_contents.append(r.raw_input_contents[0]))),
        BAD,
        "one name",
    ),
    "the same output twice": (
        changed(lambda r: (r.outputs.add(name="hidden"), r.outputs.add(name="hidden"))),
        BAD,
        "have one name",
    ),
    "unknown output": (changed(lambda r: r.outputs.add(name="z")), BAD, 'no output "z"; it has logits, hidden'),
    "unknown datatype": (changed(lambda r: setattr(r.inputs[0], "datatype", "FP31")), BAD, "datatype 'FP31'"),
    "bytes": (changed(lambda r: setattr(r.inputs[0], "datatype", "BYTES")), BAD, "datatype 'BYTES'"),
    "another datatype": (changed(lambda r: setattr(r.inputs[0], "datatype", "FP64")), BAD, "the model takes FP32"),
    "another rank": (changed(shape(16)), BAD, "1 sizes came; the model takes 2"),
    "negative": (changed(shape(-2, 8)), BAD, "not negative"),
    "-1 as in the metadata": (changed(shape(-1, 8)), BAD, "not negative"),
    "2 GB": (changed(shape(1 << 26, 8)), CODE.RESOURCE_EXHAUSTED, "max_request_bytes"),
    "2^62": (changed(shape(1 << 31, 1 << 31)), CODE.RESOURCE_EXHAUSTED, "absurd size"),
    "2^126": (changed(shape((1 << 63) - 1, (1 << 63) - 1)), CODE.RESOURCE_EXHAUSTED, "absurd size"),
    "zero times 2^62": (changed(shape(0, 1 << 62)), CODE.RESOURCE_EXHAUSTED, "absurd size"),
    "nothing of a shape": (changed(shape(0, 8)), BAD, "64 bytes came; FP32 of shape [0, 8] has 0"),
    "too few bytes": (changed(shape(3, 8)), BAD, "64 bytes came; FP32 of shape [3, 8] has 96"),
    "a shape the model does not take": (changed(shape(4, 4)), BAD, "the model does not take these shapes"),
    "too many raw": (changed(lambda r: r.raw_input_contents.append(b"")), BAD, "2 raw_input_contents came for 1"),
    "raw and typed": (changed(lambda r: r.inputs[0].contents.fp32_contents.append(1)), BAD, "came, too"),
    "the wrong contents": (changed(lambda r: r.inputs[0].contents.int_contents.append(1), True), BAD, "int_contents"),
    "too few contents": (changed(lambda r: r.inputs[0].contents.fp32_contents.pop(), True), BAD, "60 bytes came"),
    "shared memory": (
        changed(lambda r: setattr(r.inputs[0].parameters["shared_memory_region"], "string_param", "/etc/passwd")),
        BAD,
        "not served",
    ),
    "a sequence": (changed(lambda r: setattr(r.parameters["sequence_id"], "int64_param", 3)), BAD, "sequences"),
    "a time that is none": (changed(lambda r: setattr(r.parameters["timeout"], "string_param", "x")), BAD, "timeout"),
    "more time than there is": (
        changed(lambda r: setattr(r.parameters["timeout"], "int64_param", 1 << 62)),
        BAD,
        "timeout",
    ),
    "2,000 inputs": (pb.ModelInferRequest(inputs=[pb.ModelInferRequest.InferInputTensor()] * 2000), BAD, "1024"),
    "the model raises": (asked(torch.full((2, 8), 13.0)), CODE.INTERNAL, "ModelFailed: ValueError: thirteen"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_each_refusal_has_its_own_words(asker: Asker, what: str) -> None:
    request, code, says = REFUSALS[what]
    refused(asker, request, code, says)
    x = torch.ones(1, 8)
    same(asker.infer(asked(x)), x)


def test_unsupported_methods(asker: Asker) -> None:
    with pytest.raises(grpc.RpcError) as error:
        asker.channel.unary_unary("/inference.GRPCInferenceService/SystemSharedMemoryStatus")(b"", timeout=60)
    assert error.value.code() is CODE.UNIMPLEMENTED


NAMES = ("alice", "bob", "carol")
POLICIES = """
[identities.alice]
requests_per_minute = 6
[identities.bob]
cuts = ["second"]
[identities.carol]
models = []
"""


class TestBounds:
    """What protects the native service protects it from this one, too."""

    def test_identities(self, tmp_path: Any) -> None:
        alice, bob, carol = new_token(), new_token(), new_token()
        tokens = [identity(name, hash_of(one), None) for name, one in zip(NAMES, (alice, bob, carol), strict=True)]
        path = tmp_path / "identities.toml"
        path.write_text("\n".join([*tokens, POLICIES]))
        with serving(engine(tails=("second",)), identities=path) as server:
            x = torch.ones(1, 8)
            with Asker(server.port) as stranger:
                assert stranger.call("ServerLive").live and stranger.call("ServerReady").ready
                for name in ("ServerMetadata", "RepositoryIndex", "ModelInfer", "ModelReady"):
                    refused(stranger, None, CODE.UNAUTHENTICATED, "NotAuthenticated", name)
            with Asker(server.port, bob) as asker:
                refused(asker, asked(x), CODE.PERMISSION_DENIED, 'may not use the cut "input"')
                same(asker.infer(tail("second", crossing(MODEL, "second", x))), x)
            with Asker(server.port, carol) as asker:
                refused(asker, asked(x), CODE.NOT_FOUND, "there is: none")
                assert not asker.call("RepositoryIndex").models
            with Asker(server.port, alice) as asker:
                same(asker.infer(asked(x)), x)
                refused(asker, asked(x), CODE.RESOURCE_EXHAUSTED, "QuotaExceeded")

    def test_places(self) -> None:
        """Calls that compute hold the server's places; one who gives up leaves nothing."""
        entered, opened = threading.Event(), threading.Event()

        served = engine()
        compute = served.compute

        def slow(*args: Any) -> Any:
            entered.set()
            assert opened.wait(60)
            return compute(*args)

        served.compute = slow  # type: ignore[method-assign]
        limits = Limits(max_clients=2, max_in_flight=2)
        with serving(served, limits=limits) as server, Asker(server.port) as asker:
            method = asker.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            data = asked(torch.ones(1, 8)).SerializeToString()
            first = method.future(data, timeout=60)
            assert entered.wait(60)
            second = method.future(data, timeout=60)
            eventually(lambda: server.core.requests.pending() == 2)
            refused(asker, data, CODE.UNAVAILABLE, "max_clients")
            second.cancel()
            eventually(lambda: server.core.requests.pending() == 1 and server.core.clients == 1)
            with pytest.raises(grpc.RpcError) as late:
                asker.infer(data, timeout=0.3)
            assert late.value.code() is CODE.DEADLINE_EXCEEDED
            opened.set()
            assert outputs(pb.ModelInferResponse.FromString(first.result()))
            eventually(lambda: server.core.clients == 0 and server.core.requests.kept() == (0, 0))

    def test_size_of_an_answer_in_typed_fields(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It counts before it is made; beyond `MAX_VALUES` elements together it goes as bytes."""
        x = torch.ones(3, 8)  # 33 elements come back
        with serving(engine(), limits=Limits(max_inference_bytes=1000)) as server, Asker(server.port) as asker:
            same(asker.infer(asked(x)), x)
            same(asker.infer(typed(x[:2])), x[:2])
            refused(asker, typed(x), CODE.RESOURCE_EXHAUSTED, "max_inference_bytes")
            monkeypatch.setattr(servicer, "MAX_VALUES", 32)
            answer = asker.infer(typed(x))
            same(answer, x)
            assert answer.raw_output_contents

    def test_a_draining_server_is_not_ready(self) -> None:
        with serving(engine()) as server, Asker(server.port) as asker:
            server.drain()
            assert asker.call("ServerLive").live and not asker.call("ServerReady").ready
            refused(asker, asked(torch.ones(1, 8)), CODE.UNAVAILABLE, "draining")


def test_statistics_are_of_the_models_a_caller_may_use(asker: Asker, server: CloudServer) -> None:
    def counted(name: str = "") -> dict[str, int]:
        answer = asker.call("ModelStatistics", pb.ModelStatisticsRequest(name=name), pb.ModelStatisticsResponse)
        return {one.name: one.inference_count for one in answer.model_stats}

    before = counted()
    assert before.keys() == {"residual", "nameless"}
    same(asker.infer(asked(torch.ones(1, 8))), torch.ones(1, 8))
    eventually(lambda: counted("residual") == {"residual": before["residual"] + 1})
    refused(asker, pb.ModelStatisticsRequest(name="nowhere"), CODE.NOT_FOUND, "no model", "ModelStatistics")

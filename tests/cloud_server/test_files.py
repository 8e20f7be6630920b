"""Requests that bring an input file, through the core and a real model: exact, or refused by name; the server lives."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.models.served_model import ServedModel
from edge_client.transport.times import NO_TABLES, tail_metrics
from protos.frames import cut
from protos.isthmus.v1 import split_pb2
from shared_hooks import Parcel, WrappedModel
from shared_hooks import picture as pictures
from shared_hooks.models import load_spec
from tests.cloud_server.fakes import CoreClient, Result
from tests.cloud_server.real import greet
from tests.waiting import PATIENCE, eventually

IMAGE = next((Path(__file__).parents[2] / "shared_hooks" / "models" / "digits" / "images").glob("*.png"))
SPEC = load_spec("digits")


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    limits = Limits(max_request_bytes=1 << 20)
    with Core([ServedModel(ModelEntry(SPEC), torch.device("cpu"))], limits) as core:
        yield core


@pytest.fixture(scope="module")
def hello() -> split_pb2.ClientFrame:
    with WrappedModel(SPEC.load_model("cpu")) as wrapped:
        return greet(wrapped, "digits")


@pytest.fixture
def client(core: Core, hello: split_pb2.ClientFrame) -> Iterator[CoreClient]:
    client = CoreClient(core, greet=False)
    client.send(hello)
    yield client
    client.leave()


def send(client: CoreClient, id: int, *tensors: torch.Tensor, announced: int | None = None, **file: Any) -> Result:
    parcel = Parcel.of_tensors(None, list(tensors))
    known = {"suffix": ".png", "preprocess_digest": SPEC.preprocess_digest(), **file}
    header = split_pb2.RequestHeader(
        id=id,
        header=parcel.header,
        payload_bytes=parcel.nbytes if announced is None else announced,
        want_metrics=True,
        file=split_pb2.FileInput(**known),
    )
    number = len(client.results.get(id, [])) + 1
    client.send(split_pb2.ClientFrame(request=header), *cut(id, parcel.buffers, 1000))
    return client.answer(id, number)


def data(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def test_the_answer_is_the_whole_models_and_says_what_it_took(client: CoreClient) -> None:
    result = send(client, 101, data(IMAGE.read_bytes()))
    assert result.reply is not None, result.failed
    with torch.no_grad():
        expected = SPEC.load_model("cpu")(*SPEC.preprocess(IMAGE)[0])
    assert torch.equal(Parcel.to_value(result.reply.header, result.data), expected)
    spent = result.reply.durations
    assert spent.decode_ns > 0 and spent.compute_ns > 0 and spent.inject_ns == 0
    assert len(tail_metrics(result.reply, NO_TABLES, {})[0]) > 20


IMAGE_BYTES = data(IMAGE.read_bytes())
HOSTILE: list[tuple[tuple[torch.Tensor, ...], dict[str, Any], str]] = [
    ((IMAGE_BYTES,), {"suffix": ".exe"}, "InputMismatch"),
    ((IMAGE_BYTES,), {"suffix": ""}, "InputMismatch"),
    ((IMAGE_BYTES,), {"suffix": ".npy"}, "InputMismatch"),
    ((IMAGE_BYTES,), {"preprocess_digest": "other"}, "Disagreement"),
    ((IMAGE_BYTES,), {"preprocess_digest": ""}, "Disagreement"),
    ((IMAGE_BYTES, IMAGE_BYTES), {}, "BadFrame"),
    ((IMAGE_BYTES.float(),), {}, "BadFrame"),
    ((IMAGE_BYTES.reshape(1, -1),), {}, "BadFrame"),
    ((), {}, "BadFrame"),
    ((IMAGE_BYTES,), {"announced": 1}, "BadFrame"),
    ((data(b"garbage"),), {}, "InputMismatch"),
    ((torch.empty(0, dtype=torch.uint8),), {}, "InputMismatch"),
    ((torch.zeros(2 << 20, dtype=torch.uint8),), {}, "TooLarge"),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_invalid_input_file_is_refused_by_name(client: CoreClient, number: int) -> None:
    tensors, changes, error = HOSTILE[number]
    result = send(client, 200 + number, *tensors, **changes)
    assert result.failed is not None and result.failed.error == error and not result.failed.retry
    assert send(client, 300 + number, IMAGE_BYTES).reply is not None


ELEMENTS = sum(tensor.numel() for tensor in (SPEC.example() or ((), {}))[0])


def picture(width: int, height: int, kind: str, **options: Any) -> torch.Tensor:
    """A file of one colour: it is small, and large once decoded."""
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, kind, **options)
    return data(file.getvalue())


def tensor_file(*shape: int) -> torch.Tensor:
    file = io.BytesIO()
    np.save(file, np.zeros(shape, dtype=np.uint8))
    return data(file.getvalue())


@pytest.mark.parametrize(
    ("content", "suffix", "bound"),
    [
        (picture(5001, 5000, "PNG"), ".png", "5001 x 5000 pixels; at most 262144"),
        (picture(16000, 2000, "WEBP", lossless=True), ".webp", "16000 x 2000 pixels; at most 262144"),
        (tensor_file(64 * ELEMENTS + 1), ".npy", f"{64 * ELEMENTS + 1} elements, the model's example {ELEMENTS}"),
    ],
    ids=["png", "webp", "npy"],
)
def test_expensive_input_file_is_refused_early(
    client: CoreClient, content: torch.Tensor, suffix: str, bound: str
) -> None:
    began = time.process_time()  # the server is in this process
    result = send(client, 500 + len(bound), content, suffix=suffix)
    assert result.failed is not None and result.failed.error == "TooLarge" and bound in result.failed.message
    assert time.process_time() - began < 5
    assert send(client, 600 + len(bound), IMAGE_BYTES).reply is not None


def test_as_many_examples_as_are_allowed_are_taken(client: CoreClient) -> None:
    result = send(client, 700, tensor_file(64 * ELEMENTS), suffix=".npy")
    assert result.failed is not None and result.failed.error == "ModelFailed"  # it takes no rows of pixels


def test_an_id_that_comes_again_is_answered_from_memory_and_not_for_another_kind(client: CoreClient) -> None:
    first = send(client, 400, IMAGE_BYTES)
    again = send(client, 400, IMAGE_BYTES)
    assert first.reply is not None and again.reply is not None
    parcel = Parcel.of_tensors(None, [IMAGE_BYTES])
    file = split_pb2.FileInput(suffix=".jpg", preprocess_digest=SPEC.preprocess_digest())
    header = split_pb2.RequestHeader(
        id=400, header=parcel.header, payload_bytes=parcel.nbytes, want_metrics=True, file=file
    )
    client.send(split_pb2.ClientFrame(request=header))
    assert "other content" in str(client.answer(400, 3).failed)


def test_no_worker_waits_while_a_process_decodes(
    core: Core, hello: split_pb2.ClientFrame, client: CoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that takes long: files of tensors are read and answered meanwhile, and the image is at last."""
    entered, opened = threading.Event(), threading.Event()
    decode = pictures.decode

    def slow(*given: Any) -> Any:
        entered.set()
        assert opened.wait(PATIENCE)
        return decode(*given)

    monkeypatch.setattr(pictures, "decode", slow)
    other = CoreClient(core, greet=False)
    other.send(hello)
    late: list[Result] = []
    thread = threading.Thread(target=lambda: late.append(send(other, 900, data(IMAGE.read_bytes()))))
    thread.start()
    assert entered.wait(PATIENCE)
    file = io.BytesIO()
    np.save(file, np.zeros((1, 1, 32, 32), np.float32))
    assert send(client, 901, data(file.getvalue()), suffix=".npy").reply and not late
    opened.set()
    thread.join(PATIENCE)
    took = late[0].reply.durations
    assert 0 <= took.queue_ns < took.decode_ns  # it was read meanwhile, and is not said to have waited, too
    other.leave()


def test_a_client_that_goes_while_its_file_is_decoded_leaves_nothing(
    core: Core, hello: split_pb2.ClientFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, opened = threading.Event(), threading.Event()
    decode = pictures.decode

    def slow(*given: Any) -> Any:
        entered.set()
        assert opened.wait(PATIENCE)
        return decode(*given)

    monkeypatch.setattr(pictures, "decode", slow)
    other = CoreClient(core, greet=False)
    other.send(hello)
    parcel = Parcel.of_tensors(None, [data(IMAGE.read_bytes())])
    file = split_pb2.FileInput(suffix=".png", preprocess_digest=SPEC.preprocess_digest())
    header = split_pb2.RequestHeader(id=902, header=parcel.header, payload_bytes=parcel.nbytes, file=file)
    other.send(split_pb2.ClientFrame(request=header), *cut(902, parcel.buffers, 1000))
    assert entered.wait(PATIENCE)
    other.send(split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=902)))
    opened.set()
    eventually(lambda: core.requests.pending(None) == 0)
    other.leave()

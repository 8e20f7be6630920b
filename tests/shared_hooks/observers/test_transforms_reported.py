"""Every answer says whose output transforms change, on either side; and that says nothing where there are none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.models.served_model import ServedModel
from cloud_server.transport.server import CloudServer
from edge_client import EdgeClient
from edge_client.__main__ import main
from protos.isthmus.v1 import split_pb2
from shared_hooks import WrappedModel
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.models import load_spec
from shared_hooks.observers import Transform, transforms
from tests.shared_hooks.observers.left import hooks_left
from tests.shared_hooks.observers.small import Residual, image

RESIDUAL = "m=tests.shared_hooks.observers.small:Residual"
IMAGE = sorted((Path(__file__).parents[3] / "shared_hooks" / "models" / "digits" / "images").glob("*.png"))[0]


def doubled(name: str) -> Transform:
    return Transform(lambda *given: given[2] * 2, name)


@contextmanager
def server(spec: str, lifecycle: Lifecycle | None = None) -> Iterator[tuple[str, WrappedModel]]:
    """Its address, and the model that it serves. Nothing may be left on that."""
    served = ServedModel(ModelEntry(load_spec(spec)), torch.device("cpu"), lifecycle)
    server = CloudServer(Core([served], Limits(), lifecycle=lifecycle), "127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{server.port}", served._wrapped
    finally:
        server.stop(grace=1)
        served._wrapped.detach()
        assert not hooks_left(served._wrapped.model)


@pytest.mark.parametrize("split", ["body.1", "input", "cloud-only"])
def test_transforms_of_the_server_are_in_the_answer(split: str) -> None:
    with server(RESIDUAL) as (address, cloud), EdgeClient(address, RESIDUAL, split) as client:
        plain = client.infer(image())
        assert plain.transforms == ()
        with doubled("classifier").attach(cloud):
            answer = client.infer(image())
            assert answer.transforms == ("classifier",) and torch.equal(answer.output, plain.output * 2)
            with doubled("stem").attach(client.wrapped):
                assert client.infer(image()).transforms == ("stem", "classifier")  # here, then there
            assert client.infer(image(), split="edge-only").transforms == ()
        assert client.infer(image()).transforms == ()


def test_transforms_are_reported_for_files_and_by_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with server("digits") as (address, cloud):
        argv = ["run", "--server", address, "--split", "cloud-only-file", "--input", str(IMAGE)]
        assert main(argv) == 0
        assert "not the model's own" not in capsys.readouterr().out
        with doubled("classifier").attach(cloud):
            assert main(argv) == 0
        assert "not the model's own answers: transforms change classifier" in capsys.readouterr().out


@pytest.mark.parametrize(("side", "split"), [("cloud", "stem"), ("edge", "stem"), ("edge", "edge-only")])
def test_a_transform_for_one_forward_is_reported_too(side: str, split: str) -> None:
    """A hook attaches it before the head or the tail, and takes it away after."""
    before, after, name = (
        (Stage.BEFORE_TAIL, Stage.AFTER_TAIL, "classifier")
        if side == "cloud"
        else (Stage.BEFORE_HEAD, Stage.AFTER_HEAD, "stem")
    )
    models: list[WrappedModel] = []
    attached: list[Any] = []
    lifecycle = Lifecycle(side)

    @lifecycle.on(before)
    def attach(event: Any) -> None:
        attached.append(doubled(name).attach(models[0], this_thread=True))

    @lifecycle.on(after)
    def detach(event: Any) -> None:
        attached.pop().detach()

    there, here = (lifecycle, None) if side == "cloud" else (None, lifecycle)
    with (
        server(RESIDUAL, there) as (address, cloud),
        EdgeClient(address, RESIDUAL, split, lifecycle=here) as client,
    ):
        models.append(cloud if side == "cloud" else client.wrapped)
        for _ in range(2):
            assert client.infer(image()).transforms == (name,)
        assert not attached and transforms.active(models[0]) == ()


def elsewhere(what: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(what()))
    thread.start()
    thread.join(30)
    return found[0]


def test_a_transform_of_another_thread_is_not_this_ones() -> None:
    with WrappedModel(Residual()) as wrapped, doubled("stem").attach(wrapped, this_thread=True):
        assert transforms.active(wrapped) == ("stem",)
        assert elsewhere(lambda: transforms.active(wrapped)) == ()


def test_without_transforms_nothing_travels() -> None:
    assert split_pb2.ReplyHeader(transforms=()).ByteSize() == 0
    with WrappedModel(Residual()) as wrapped, transforms.during(wrapped) as changed:
        wrapped.forward(image())
        assert changed() == ()

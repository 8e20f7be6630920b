"""A second of each flood that took gigabytes, on one server process: its memory stays, and it answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edge_client.client import EdgeClient
from edge_client.model_choice import ModelChoice
from studies.attacks.http2.beside import Server
from studies.attacks.http2.floods import FLOODS
from studies.attacks.http2.frames import END_HEADERS, HEADERS, frame, headers
from tests.starts import forked

ALLOWED_MIB = 250
"""Above what the server takes by itself. Without the bounds a second of each took some hundreds. Pings are left out:
nothing bounds what they take (docs/decisions/0013-floods.md).
"""


@pytest.fixture(autouse=True, scope="module")
def processes_are_forked() -> Iterator[None]:
    with forked("studies.attacks.http2.beside.subprocess"):
        yield


def test_floods_take_no_memory(tmp_path: Path) -> None:
    server = Server(tmp_path / "server.log")
    try:
        choice = ModelChoice("digits", device="cpu", threads=1)
        with EdgeClient(server.address, choice, "input") as client:
            (image,), _ = choice.spec().example()  # type: ignore[misc]
            wanted = client.infer(image).output
            before = server.rss
            for name in ("rapid reset", "half closed calls", "open streams", "bombs of gzip"):
                FLOODS[name](server.address, time.monotonic() + 0.4)
                assert server.status("VmHWM") < before + ALLOWED_MIB, name
                assert torch.equal(client.infer(image).output, wanted), name
    finally:
        status = server.close()
    assert status == 0
    assert (tmp_path / "server.log").stat().st_size < 200_000


def test_frames_are_as_the_standard_has_them() -> None:
    made = frame(HEADERS, END_HEADERS, 5, b"abc")
    assert made == b"\x00\x00\x03\x01\x04\x00\x00\x00\x05abc"
    assert headers("ListModels") == headers("ListModels")  # touches no table

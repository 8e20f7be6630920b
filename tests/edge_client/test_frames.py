"""Frames sent as differences: the answers of frames sent alone, in fewer bytes, whatever is lost on either side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edge_client import EdgeClient
from shared_hooks.crossing import books_of
from tests.edge_client.served import Served, served

ROWS = 64


def frames(count: int) -> list[torch.Tensor]:
    """A scene of which a little changes from one to the next."""
    dice = torch.Generator().manual_seed(1)
    scene = torch.randn(ROWS, 8, generator=dice)
    return [scene + 0.02 * number * torch.randn(ROWS, 8, generator=dice) for number in range(count)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as running:
        yield running


def client(server: Served, codec: str, split: str = "first") -> EdgeClient:
    made = EdgeClient(server.address, server.spec, split=split, codec=codec)
    heads = [made.wrapped.forward(frame, end=split) for frame in frames(10)]
    made.books[split] = books_of(heads, 0.3)
    return made


def test_the_same_answers_in_fewer_bytes(server: Served) -> None:
    with client(server, "basis") as alone, client(server, "frames") as differences:
        apart = [alone.infer(frame) for frame in frames(8)]
        found = [differences.infer(frame) for frame in frames(8)]
    assert all(torch.equal(one.output, other.output) for one, other in zip(apart, found, strict=True))
    assert sum(one.bytes_up for one in found[1:]) < 0.8 * sum(one.bytes_up for one in apart[1:])
    raw = 4 * ROWS * 8
    assert all(one.bytes_up < raw for one in apart)


def test_several_under_way_refer_to_what_was_answered(server: Served) -> None:
    with client(server, "basis") as alone, client(server, "frames") as differences:
        apart = [one.output for one in alone.infer_many(frames(20))]
        found = [one.output for one in differences.infer_many(frames(20))]
    assert all(torch.equal(one, other) for one, other in zip(apart, found, strict=True))


def test_a_server_that_forgot_gets_the_frame_whole(tmp_path: Path) -> None:
    with served(tmp_path, frames_bytes=1) as forgetful, client(forgetful, "frames") as one:
        other = client(forgetful, "frames")
        with other:
            for first, second in zip(frames(6), reversed(frames(6)), strict=True):
                expected = one.wrapped.whole(first)
                assert torch.allclose(one.infer(first).output, expected, atol=0.5)  # type: ignore[arg-type]
                other.infer(second)  # its frame takes the place of the other's


def test_frames_of_another_size_are_key_frames(server: Served) -> None:
    with client(server, "frames") as one:
        for rows in (ROWS, ROWS // 2, ROWS):
            assert one.infer(torch.randn(rows, 8)).output.shape == (rows, 8)


def test_unlearnt_tensor_is_sent_raw(server: Served) -> None:
    with EdgeClient(server.address, server.spec, split="first", codec="frames") as one:
        frame = frames(1)[0]
        assert torch.equal(one.infer(frame).output, one.wrapped.whole(frame))
        one.books["first"] = (None, None, None)  # of other pieces than cross
        assert torch.equal(one.infer(frame).output, one.wrapped.whole(frame))

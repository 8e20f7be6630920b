"""Hidden states with fewer bits: near, small, the same everywhere, and refused where they are not what they say."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shared_hooks.errors import BadFrame, IsthmusError, SpecError, TooLarge
from shared_hooks.generation import DecodingTail, InProcess, SplitForward
from shared_hooks.generation.hidden import CODECS, decoded, encoded
from tests.shared_hooks.generation.small import cut_of, in_process, make, prompt
from tests.shared_hooks.generation.test_sessions import Flaky

ROOM = 1 << 30


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    size=st.sampled_from([1e-6, 1.0, 300.0]),
)
@settings(max_examples=120, deadline=None)
def test_a_round_trip_is_near(shape: list[int], codec: str, dtype: torch.dtype, size: float) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * size).to(dtype)
    data = encoded(tensor, codec)
    if data is None:
        return
    assert data.numel() < tensor.nbytes
    found = decoded(data, ROOM)
    assert found.shape == tensor.shape
    assert found.dtype == dtype
    # what four and five bits clip of normal values is little, and what rounding to the dtype leaves away is less
    allowed = {"int8": 0.02, "int6": 0.06, "int5": 0.12, "int4": 0.25}[codec]
    assert float((found.float() - tensor.float()).norm() / tensor.float().norm()) < allowed


def test_a_token_of_width_4096_is_a_quarter() -> None:
    token = torch.randn(1, 1, 4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    data = encoded(token, "int4")
    assert data is not None
    assert data.numel() < 2000


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_tensor_without_a_scale_is_sent_raw(bad: float) -> None:
    tensor = torch.zeros(1, 256)
    tensor[0, 3] = bad
    assert encoded(tensor, "int8") is None
    assert encoded(torch.zeros(1, 8), "int8") is None
    assert encoded(torch.arange(500), "int8") is None


def test_zeros_stay_zeros() -> None:
    data = encoded(torch.zeros(3, 256), "int4")
    assert data is not None
    assert not decoded(data, ROOM).any()


def test_hostile_bytes_are_refused() -> None:
    token = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    good = encoded(token, "int6")
    assert good is not None
    for cut in (0, 1, 10, 20, 25, len(good) - 1):
        with pytest.raises(IsthmusError):
            decoded(good[:cut].clone(), ROOM)
    for place in range(0, len(good), 3):
        bad = good.clone()
        bad[place] ^= 0xFF
        try:
            assert decoded(bad, ROOM).numel() <= 1 << 28
        except IsthmusError:
            continue
    for said in (
        ["int6", "float32", [1 << 20, 1 << 20], [2, 300, 1, 1, 0, 0]],
        ["int6", "float32", [1 << 40] * 8, [2, 300, 1, 1, 0, 0]],
    ):
        with pytest.raises(TooLarge):
            decoded(_forged(said, bytes(100)), ROOM)
    for said in (
        ["int6", "float32", [2, 300], [2, 300, 1, 1, 10**9, 0]],
        ["int6", "float32", [2, 300], [2, 7, 1, 1, 0, 0]],
        ["int6", "float32", [], []],
        ["int6", "float32", [-2, 300], [2, 300, 1, 1, 0, 0]],
        ["int6", "float32", [2.0, 300], [2, 300, 1, 1, 0, 0]],
        ["int6", "int64", [2, 300], [2, 300, 1, 1, 0, 0]],
        ["lz4", "float32", [2, 300], []],
        [["int6"], "float32", [2, 300], []],
        "text",
        {"a": 1},
        [1, 2],
    ):
        with pytest.raises(BadFrame):
            decoded(_forged(said, bytes(good[40:])), ROOM)
    with pytest.raises(BadFrame):
        decoded(_forged("[" * 60000, b"")[:60000], ROOM)
    with pytest.raises(BadFrame):
        decoded(good.to(torch.float32), ROOM)
    with pytest.raises(BadFrame):
        decoded(torch.cat([good, torch.zeros(5, dtype=torch.uint8)]), ROOM)


def _forged(said: object, data: bytes) -> torch.Tensor:
    head = json.dumps(said).encode()[:65535]
    return torch.frombuffer(bytearray(len(head).to_bytes(2, "little") + head + data), dtype=torch.uint8)


@pytest.mark.parametrize("name", ["llama", "t5", "hybrid"])
def test_a_generation_with_fewer_bits_runs_and_is_near(name: str) -> None:
    model = make(name)
    call = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    whole = model.generate(**prompt(rows=3), **call)  # type: ignore[operator]
    sizes = {}
    for codec in (None, "int8", "int4"):
        with SplitForward(model, cut_of(name), in_process(name), codec=codec) as split:
            found = model.generate(**prompt(rows=3), **call)  # type: ignore[operator]
        sizes[codec] = split.records[0].bytes_up
        off = (found.logits[0] - whole.logits[0]).abs().max() / whole.logits[0].abs().max()
        assert off == 0 if codec is None else 0 < off < 0.3
    assert sizes["int4"] < sizes["int8"] < sizes[None]


def test_a_lost_session_gives_the_same_tokens() -> None:
    model = make("llama")

    def tokens(link: InProcess) -> torch.Tensor:
        with SplitForward(model, cut_of("llama"), link, codec="int5"):
            return model.generate(**prompt(rows=3), max_new_tokens=10, do_sample=False)  # type: ignore[operator,no-any-return]

    assert torch.equal(tokens(in_process("llama")), tokens(Flaky("llama", lost={5})))


def test_a_codec_that_there_is_not() -> None:
    with pytest.raises(SpecError, match="int4"):
        SplitForward(
            make("llama"), cut_of("llama"), InProcess(DecodingTail(make("llama"), cut_of("llama"))), codec="int3"
        )

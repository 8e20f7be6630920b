"""Hostile bytes: `EarlyOutput.from_bytes` gives what was sent, or `BadFrame` (`TooLarge`), before memory is spent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.codecs import CODECS
from shared_hooks.errors import BadFrame, TooLarge
from tests.shared_hooks.cutting import case_of
from tests.shared_hooks.hostile import DATA, EARLY, refused, sample
from tests.zoo.compare import same

# --- what is sent is what arrives


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec.lossless])
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("residual", 3),
        ("mixed_types", 2),
        ("complex_numbers", 1),
        ("non_finite_input", 1),
        ("zero_dim_tensor", 0),
        ("zero_size_batch", 0),
        ("hf_bert", 8),
        ("branch_on_item", 2),
        ("constant_output", "b"),
        ("eight_bit_floats", 1),
    ],
)
def test_round_trip(name: str, cut: int | str, codec: str) -> None:
    early = sample(name, cut)
    data = early.to_bytes(codec)
    for received in (bytes(data), bytearray(data), memoryview(data)):
        back = EarlyOutput.from_bytes(received)
        assert same(list(back.pieces), list(early.pieces))
        assert back.crossing.to_bytes() == early.crossing.to_bytes()
        assert (back.layer_id, back.layer_name, back.nbytes) == (early.layer_id, early.layer_name, early.nbytes)
        assert back.to_bytes(codec) == data


GOLDEN = Path(__file__).parent / "golden" / "early-2.bin"


def test_golden_file() -> None:
    """What an earlier version wrote is read, and written again byte for byte. ISTHMUS_REWRITE_GOLDEN=1 renews it."""
    if os.environ.get("ISTHMUS_REWRITE_GOLDEN"):
        GOLDEN.write_bytes(DATA)
    golden = GOLDEN.read_bytes()
    early = EarlyOutput.from_bytes(golden)
    assert early.to_bytes() == golden
    assert (early.layer_id, early.layer_name) == (1, "b")
    assert same(list(early.pieces), list(EARLY.pieces))
    assert early.values == EARLY.values


def test_bytes_are_reproducible() -> None:
    assert sample().to_bytes() == DATA == sample().to_bytes()


@pytest.mark.parametrize("name", ["residual", "writes_into_its_input", "base_and_view_cross_then_write"])
def test_a_tail_never_writes_into_the_bytes(name: str) -> None:
    """Tensors lie in the received bytes without a copy; models work in place."""
    case = case_of(name)
    args, kwargs = case.inputs()
    edge, cloud = WrappedModel(case.build()), WrappedModel(case.build())
    expected = case.run(case.build())
    edge.plan(*args, **kwargs)
    for cut in ["input", *range(len(edge.layers))]:
        args, kwargs = case.inputs()
        data = bytearray(edge.forward(*args, end=cut, **kwargs).to_bytes())
        sent = bytes(data)
        assert same(cloud.forward(EarlyOutput.from_bytes(data), start=cut), expected)
        assert data == sent, cut


def test_a_limit_is_a_limit() -> None:
    payload = EARLY.pack().nbytes
    EarlyOutput.from_bytes(DATA, max_bytes=payload)
    refused(DATA, TooLarge, limit=payload - 1)


# --- truncated and altered


def test_every_truncation_is_refused() -> None:
    for size in [*range(200), *range(200, len(DATA), 7), len(DATA) - 1]:
        with pytest.raises(BadFrame):
            EarlyOutput.from_bytes(DATA[:size])


@pytest.mark.parametrize("extra", [b"\0", b"x" * 64, DATA])
def test_extensions_are_refused(extra: bytes) -> None:
    refused(DATA + extra)


@pytest.mark.parametrize(
    "data", [b"", b"I", b"ISTHMUS2", b"ISTHMUS1" + DATA[8:], b"\x80\x04." + DATA, b"PK\x03\x04" * 20]
)
def test_other_formats_are_refused(data: bytes) -> None:
    refused(data)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, len(DATA) * 8 - 1))
def test_every_flipped_bit_is_noticed_or_harmless(bit: int) -> None:
    """Padding between sections may differ; nothing else."""
    data = bytearray(DATA)
    data[bit // 8] ^= 1 << bit % 8
    try:
        early = EarlyOutput.from_bytes(bytes(data), max_bytes=1 << 20)
    except BadFrame:
        return
    assert same(list(early.pieces), list(EARLY.pieces))
    assert early.crossing.to_bytes() == EARLY.crossing.to_bytes()
    assert early.values == EARLY.values


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, len(DATA)), st.integers(0, 64), st.binary(max_size=64))
def test_spliced_bytes_are_noticed(start: int, removed: int, inserted: bytes) -> None:
    data = DATA[:start] + inserted + DATA[start + removed :]
    try:
        early = EarlyOutput.from_bytes(data, max_bytes=1 << 20)
    except BadFrame:
        return
    assert same(list(early.pieces), list(EARLY.pieces))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, b"ISTHMUS2" + noise):
        with pytest.raises(BadFrame):
            EarlyOutput.from_bytes(data)

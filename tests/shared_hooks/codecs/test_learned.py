"""Learned codecs: what is packed comes back, whatever a file or a stranger says; and for what they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_hooks.codecs import CODECS, Codec, Grain, by_wire, check, register, temporary
from shared_hooks.codecs.learned import Bottleneck, Design, LearnedCodec, LearnedFile, Piece, SymbolCoder, read
from shared_hooks.errors import SpecError

MAP = Design("map", 6, 8, 2, 3, 4, (8, 10), positive=True)
TOKENS = Design("tokens", 24, 16, 0, 5, 8)


def piece(design: Design, seed: int = 0) -> Piece:
    torch.manual_seed(seed)
    net = Bottleneck(design).requires_grad_(False).eval()
    counts = np.random.default_rng(seed).random((design.symbols, design.levels)) * 100
    return Piece(net, SymbolCoder.frequencies_of(counts))


def learned(*designs: Design | None, cut: str = "conv") -> LearnedCodec:
    made = tuple(None if one is None else piece(one) for one in designs)
    return LearnedCodec(LearnedFile("net", "w" * 64, cut, made, {"seed": 1}), "a test's")


def grain_of(tensor: torch.Tensor) -> Grain:
    return Grain.of(tuple(tensor.shape), tuple(tensor.stride()))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


@settings(deadline=None)
@given(
    st.integers(1, 5),
    st.integers(2, 9),
    st.integers(1, 3),
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
)
def test_symbols_come_back(symbols: int, levels: int, count: int, positions: int, seed: int) -> None:
    dice = np.random.default_rng(seed)
    coder = SymbolCoder(SymbolCoder.frequencies_of(dice.random((symbols, levels)) ** 8 * 1000))
    values = dice.integers(0, levels, (count, symbols, positions))
    data = coder.pack(values)
    assert (coder.unpack(data, values.shape) == values).all()
    with pytest.raises(ValueError):
        coder.unpack(data + b"\x01", values.shape)


@settings(deadline=None)
@given(st.binary(max_size=80), st.integers(1, 2), st.integers(1, 700))
def test_hostile_symbols_are_refused_or_are_symbols(data: bytes, count: int, positions: int) -> None:
    coder = SymbolCoder(SymbolCoder.frequencies_of(np.ones((2, 4))))
    try:
        found = coder.unpack(data, (count, 2, positions))
    except ValueError:
        return
    assert found.min() >= 0 and found.max() < 4
    assert coder.pack(found) == data, "one encoding of each"


def test_bytes_are_near_the_entropy() -> None:
    dice = np.random.default_rng(0)
    shares = np.array([0.7, 0.2, 0.07, 0.03])
    values = dice.choice(4, (1, 1, 5000), p=shares)
    coder = SymbolCoder(SymbolCoder.frequencies_of(np.bincount(values.ravel(), minlength=4)[None].astype(float)))
    entropy = 5000 * -(shares * np.log2(shares)).sum() / 8
    assert len(coder.pack(values)) < 1.05 * entropy + 40


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [(8, 10), (7, 9), (13, 5)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_maps_of_any_batch_and_size(batch: int, size: tuple[int, int], channels_last: bool) -> None:
    if channels_last and size != MAP.size:
        return  # its memory does not say how large one map is
    codec = learned(MAP).at("conv", 0)
    tensor = torch.randn(batch, 6, *size).relu()
    tensor = tensor.to(memory_format=torch.channels_last) if channels_last else tensor
    coded = codec.encode(flat(tensor), grain_of(tensor))
    assert coded is not None and len(coded.data) < tensor.numel()
    codec.check(coded.params, tensor.dtype, tensor.numel(), len(coded.data))
    decoded = codec.decode(coded.data, coded.params, tensor.dtype, tensor.numel())
    assert isinstance(decoded, torch.Tensor) and decoded.shape == (tensor.numel(),)
    back = decoded.as_strided(tensor.shape, tensor.stride())
    net = codec._piece.net  # type: ignore[attr-defined]
    wanted = net.values_of(net.levels_of(tensor).round(), size)
    assert torch.allclose(back, wanted, atol=1e-5) and float(back.min()) >= 0


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_tokens_of_any_number_type_and_memory(dtype: torch.dtype, transposed: bool) -> None:
    codec = learned(None, TOKENS).at("conv", 1)
    tensor = torch.randn(2, 24, 7).transpose(1, 2) if transposed else torch.randn(2, 7, 24)
    tensor = tensor.to(dtype)
    coded = codec.encode(flat(tensor), grain_of(tensor))
    assert coded is not None
    codec.check(coded.params, dtype, tensor.numel(), len(coded.data))
    decoded = codec.decode(coded.data, coded.params, dtype, tensor.numel())
    assert isinstance(decoded, torch.Tensor) and decoded.dtype is dtype and decoded.is_contiguous()
    net = codec._piece.net  # type: ignore[attr-defined]
    wanted = net.values_of(net.levels_of(tensor.float().reshape(-1, 24)).round(), (1, 1)).view(tensor.shape)
    back = decoded.as_strided(tensor.shape, tensor.stride()).float()
    assert torch.allclose(back, wanted, atol=0.02, rtol=0.02)


def test_tensor_unlike_the_training_is_sent_raw() -> None:
    whole = learned(MAP)
    tensor = torch.randn(1, 6, 8, 10)
    assert whole.at("another", 0) is whole and whole.at("conv", 1) is whole
    assert whole.encode(flat(tensor), grain_of(tensor)) is None
    own = whole.at("conv", 0)
    for other in (torch.randn(1, 5, 8, 10), torch.randn(6, 80), torch.full((1, 6, 8, 10), torch.nan)):
        assert own.encode(flat(other), grain_of(other)) is None
    large = torch.randn(1, 6, 400, 400)
    assert own.encode(flat(large), grain_of(large)) is None
    whole_numbers = torch.ones(1, 6, 8, 10, dtype=torch.int64)
    assert own.encode(flat(whole_numbers), grain_of(whole_numbers)) is None


def test_lies_are_refused() -> None:
    codec: Codec = learned(MAP, None)
    tensor = torch.randn(1, 6, 8, 10)
    coded = codec.at("conv", 0).encode(flat(tensor), grain_of(tensor))
    assert coded is not None
    lies = [
        (),
        ("0", 0, 1, 8, 10),
        (1, 0, 1, 8, 10),
        (9, 0, 1, 8, 10),
        (0, 2, 1, 8, 10),
        (0, 0, 2, 8, 10),
        (0, 0, 0, 8, 10),
        (1, 0, 20, 2, 1),
        (0, 0, 1, 80, 1),
        (0, 0, 1, 8.0, 10),
        (True, 0, 1, 8, 10),
        (-1, 0, 1, 8, 10),
    ]
    for params in lies:
        if params != (0, 0, 1, 80, 1):  # as many elements, in another form: allowed, and bounded alike
            with pytest.raises(ValueError):
                codec.check(params, torch.float32, 480, len(coded.data))
    with pytest.raises(ValueError):  # a few bytes for what would take seconds and gigabytes
        codec.check((0, 0, 100_000, 8, 10), torch.float32, 48_000_000, 5000)
    for dtype, elements, nbytes in ((torch.int64, 480, 9), (torch.float32, 481, 9), (torch.float32, 480, 1 << 20)):
        with pytest.raises(ValueError):
            codec.check(coded.params, dtype, elements, nbytes)


def test_a_file_comes_back_and_is_named_by_what_it_decodes(tmp_path: Path) -> None:
    file = tmp_path / "codec.safetensors"
    made = learned(MAP, None, TOKENS)
    made.file.write(file)
    found = read(file)
    assert found.name == made.name and found.file.cut == "conv" and found.file.provenance == {"seed": 1}
    LearnedFile("net", "w" * 64, "conv", made.file.pieces, {"seed": 2}).write(file)
    assert read(file).name == made.name, "where it comes from is no part of it"
    LearnedFile("net", "w" * 64, "other", made.file.pieces).write(file)
    assert read(file).name != made.name


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_hostile_file_is_refused_by_name(data: st.DataObject) -> None:
    whole = bytearray(learned(MAP).file.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole))) if data.draw(st.booleans()) else len(whole)
    try:
        found = LearnedFile.from_bytes(bytes(whole[:cut]), "evil.safetensors")
    except SpecError as error:
        assert "evil.safetensors" in str(error)
        return
    assert all(one is None or bool(torch.isfinite(one.net.state_dict()["mean"]).all()) for one in found.pieces)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": "other"}, "format"),
        ({"version": 2}, "format"),
        ({"pieces": []}, "pieces"),
        ({"pieces": [{"kind": "map"}]}, "piece 0"),
        ({"model": 3}, "texts"),
        ({"provenance": []}, "provenance"),
        ({"pieces": [None]}, "a tensor of no piece"),
    ],
)
def test_problem_of_a_file_is_stated(change: dict[str, object], word: str) -> None:
    data = learned(MAP).file.to_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["isthmus"] = json.dumps({**json.loads(header["__metadata__"]["isthmus"]), **change})
    text = json.dumps(header).encode()
    with pytest.raises(SpecError, match=word):
        LearnedFile.from_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :], "file")


def test_a_name_on_the_wire_loads_nothing(tmp_path: Path) -> None:
    made = learned(MAP)
    made.file.write(tmp_path / "codec.safetensors")
    assert by_wire(f"learned:{tmp_path}/codec.safetensors") is None and by_wire(made.name) is None
    with pytest.raises(SpecError, match="no such file"):
        check(made.name)
    with temporary(made):
        assert by_wire(made.name) is made and check(made.name) == made.name
    assert made.name not in CODECS


def test_the_same_file_may_be_registered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_hooks.codecs.registry._added", {})
    file = tmp_path / "codec.safetensors"
    learned(TOKENS).file.write(file)
    name = register(f"learned:{file}")
    try:
        assert register("learned:codec.safetensors", tmp_path) == name == check(f"learned:{file}")
    finally:
        del CODECS[name]
    with pytest.raises(SpecError, match="cannot be read"):
        register("learned:none.safetensors", tmp_path)

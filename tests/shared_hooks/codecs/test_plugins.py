"""Codecs of other packages: found by name, held to their word; and noise."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared_hooks.codecs import CODECS, RAW, Codec, Coded, Grain, by_wire, check, is_offered, offered, register
from shared_hooks.codecs.noise import Noise
from shared_hooks.codecs.registry import Guarded
from shared_hooks.crossing import Parcel
from shared_hooks.errors import BadFrame, CodecFailed, SpecError
from shared_hooks.profiling.profiler import ProfileOptions

TENSOR = torch.randn(64, generator=torch.Generator().manual_seed(0))
GRAIN = Grain.of((64,), (1,))


class Half(Codec):
    """Honest: 16 bits."""

    name = "acme:half"
    lossless = False

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Any:
        return Coded(memoryview(tensor.half().numpy().tobytes()), (1, "a"))

    def bound(self, dtype: torch.dtype, elements: int) -> int:
        return 2 * elements

    def check(self, params: Any, dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if nbytes != 2 * elements:
            raise ValueError("not a half")

    def decode(self, data: memoryview, params: Any, dtype: torch.dtype, elements: int) -> Any:
        return torch.frombuffer(bytearray(data), dtype=torch.float16).to(dtype)


class Raises(Half):
    def encode(self, tensor: torch.Tensor, grain: Grain) -> Any:
        raise RuntimeError("no such thing")


class Long(Half):
    def encode(self, tensor: torch.Tensor, grain: Grain) -> Any:
        return Coded(memoryview(bytes(3 * tensor.numel())))


class Writes(Half):
    def encode(self, tensor: torch.Tensor, grain: Grain) -> Any:
        tensor.numpy()[:] = 7.0  # which no version counts
        raise RuntimeError("and then gives up")


class Lies(Half):
    lossless = True


class Strange(Half):
    def encode(self, tensor: torch.Tensor, grain: Grain) -> Any:
        return b"bytes"


class Params(Half):
    def encode(self, tensor: torch.Tensor, grain: Grain) -> Any:
        return Coded(memoryview(bytes(128)), tuple(range(99)))


class Contradicts(Half):
    def encode(self, tensor: torch.Tensor, grain: Grain) -> Any:
        return Coded(memoryview(bytes(5)))


@pytest.mark.parametrize(
    ("codec", "word"),
    [
        (Raises, "RuntimeError: no such thing"),
        (Long, "promised 128"),
        (Writes, "and then gives up"),
        (Lies, "promises to keep every bit"),
        (Strange, "gives bytes, not Coded"),
        (Params, "parameters"),
        (Contradicts, "not a half"),
    ],
)
def test_tensor_is_sent_raw_if_a_plugin_fails(codec: type[Half], word: str, caplog: pytest.LogCaptureFixture) -> None:
    own = Guarded(codec())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            parcel = Parcel.of_tensors("", [TENSOR.clone()], own)
    assert parcel.codecs == ("raw",)
    _, [back] = Parcel.tensors(parcel.header, bytearray().join(parcel.buffers))
    assert torch.equal(back, TENSOR), "as it was, whatever the codec wrote"
    assert [word in one.getMessage() for one in caplog.records] == [True], "once for each reason"


class DecodesElse(Half):
    found: Any = None

    def decode(self, *args: Any) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    "found",
    [
        RuntimeError("broken"),
        ValueError("broken"),
        torch.zeros(63),
        torch.zeros(64, dtype=torch.float64),
        torch.zeros(8, 8),
        torch.zeros(64, device="meta"),
        memoryview(bytes(256)),
        memoryview(bytearray(255)),
        None,
    ],
    ids=range(9),
)
def test_wrong_decoding_by_a_plugin_is_named(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = DecodesElse()
    codec.found = found
    monkeypatch.setitem(CODECS, Half.name, Guarded(codec))
    parcel = Parcel.of_tensors("", [TENSOR], Guarded(Half()))
    assert parcel.codecs == (Half.name,)
    with pytest.raises(CodecFailed, match=Half.name):
        Parcel.tensors(parcel.header, bytearray().join(parcel.buffers))


class Whole(Half):
    name = "acme:whole"
    lossless = True

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Any:
        return Coded(memoryview(zlib.compress(tensor.numpy().tobytes())))

    def bound(self, dtype: torch.dtype, elements: int) -> None:
        return None

    def check(self, *args: Any) -> None:
        pass

    def decode(self, data: memoryview, params: Any, dtype: torch.dtype, elements: int) -> Any:
        return memoryview(bytearray(zlib.decompress(data)))


def test_plugin_may_declare_itself_lossless() -> None:
    assert Parcel.of_tensors("", [torch.zeros(64)], Guarded(Whole())).codecs == ("acme:whole",)


def test_plugin_works_and_a_side_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parcel = Parcel.of_tensors("", [TENSOR], Guarded(Half()))
    with pytest.raises(BadFrame, match="unknown codec 'acme:half'"):
        Parcel.tensors(parcel.header, bytearray().join(parcel.buffers))
    monkeypatch.setitem(CODECS, Half.name, Guarded(Half()))
    _, [back] = Parcel.tensors(parcel.header, bytearray().join(parcel.buffers))
    assert torch.equal(back, TENSOR.half().float())


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "their_codecs.py").write_text(
        "from shared_hooks.codecs import Codec\n"
        "from tests.shared_hooks.codecs.test_plugins import Half\n"
        "class Mine(Half):\n    name = 'acme:mine'\n"
        "class Other(Half):\n    name = 'acme:mine'\n"
        "class Plain(Half):\n    name = 'int8'\n"
        "class Ours(Half):\n    name = 'learned:abc'\n"
        "class Fails(Half):\n    name = 'acme:fails'\n    def __init__(self):\n        raise OSError('no licence')\n"
        "nothing = 3\n"
    )
    yield tmp_path
    CODECS.pop("acme:mine", None)


def test_by_module_and_class(module: Path) -> None:
    assert register("their_codecs:Mine", module) == "acme:mine" == register("their_codecs:Mine", module)
    assert check("acme:mine") == "acme:mine" and "acme:mine" in offered()
    with pytest.raises(SpecError, match="as another one does"):
        register("their_codecs:Other", module)
    for name, word in (
        ("Plain", "as in acme:topk"),
        ("Ours", "as in acme:topk"),
        ("Fails", "no licence"),
        ("nothing", "not something to call"),
        ("Nobody", "has no"),
    ):
        with pytest.raises(SpecError, match=word):
            register(f"their_codecs:{name}", module)


def test_unknown_codec_lists_known_ones() -> None:
    with pytest.raises(SpecError, match=r"learned:FILE, noise:SIGMA.*Did you mean int8"):
        check("int88")
    with pytest.raises(SpecError, match="cannot be loaded|not installed|no module"):
        register("no_such_module_at_all:Codec")


def test_noise_has_the_width_that_was_said_and_is_new_each_time() -> None:
    tensor = 3 * torch.randn(20000)
    codec = Noise(0.5)
    first, second = (codec.encode(tensor, GRAIN) for _ in range(2))
    assert first is not None and second is not None and bytes(first.data) != bytes(second.data)
    noise = torch.frombuffer(bytearray(first.data), dtype=torch.float32) - tensor
    assert abs(float(noise.std()) / float(tensor.std()) - 0.5) < 0.02 and abs(float(noise.mean())) < 0.05
    parcel = Parcel.of_tensors("", [tensor], codec)
    assert parcel.codecs == ("noise:0.5",), "though it saves nothing"
    _, [back] = Parcel.tensors(parcel.header, bytearray().join(parcel.buffers))
    assert back.dtype is torch.float32 and not torch.equal(back, tensor)


def test_noise_leaves_alone_what_it_cannot_change_and_the_models_dice() -> None:
    before = torch.random.get_rng_state()
    assert Noise(1.0).encode(torch.arange(9), Grain.of((9,), (1,))) is None
    odd = torch.tensor([1.0, torch.inf, torch.nan, -3.0])
    made = Noise(1.0).added(odd, np.random.default_rng(0))
    assert torch.isinf(made[1]) and torch.isnan(made[2]) and bool(torch.isfinite(made[[0, 3]]).all())
    largest = torch.tensor([65504.0, -65504.0], dtype=torch.float16)
    assert bool(torch.isfinite(Noise(1.0).added(largest, np.random.default_rng(0))).all())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("text", ["noise:", "noise:0", "noise:-1", "noise:nan", "noise:inf", "noise:x", "noise:1e9"])
def test_noise_of_no_width(text: str) -> None:
    with pytest.raises(SpecError, match="expected a width above 0"):
        check(text)
    assert by_wire(text) is None


def test_noise_is_offered_as_a_family() -> None:
    assert is_offered("noise:0.25", offered()) and by_wire("noise:0.25") is not None
    assert not is_offered("noise:0.25", ["raw"]) and not is_offered("acme:x", offered())
    assert RAW.at("any", 3) is RAW


def test_profile_request_registers_no_codec() -> None:
    assert ProfileOptions(codecs=("noise:0.125",)).codecs == ("noise:0.125",)
    parcel = Parcel.of_tensors("", [TENSOR], "noise:0.125")
    assert parcel.codecs == ("noise:0.125",) and "noise:0.125" not in CODECS
    with pytest.raises(SpecError, match="no such file"):
        ProfileOptions(codecs=("learned:0123456789ab",))

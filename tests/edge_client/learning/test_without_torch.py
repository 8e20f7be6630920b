"""A learned codec's encoder in numpy: the same symbols, and a real server that decodes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edge_client import LightClient, export, local_server
from edge_client.light_codecs import LearnedCodecFile as LightLearned
from edge_client.model_choice import ModelChoice
from shared_hooks.codecs import Grain
from shared_hooks.codecs.learned import Bottleneck, Design, LearnedCodec, LearnedFile, Piece, SymbolCoder
from shared_hooks.errors import SpecError
from shared_hooks.models import load_spec


def piece(design: Design) -> Piece:
    torch.manual_seed(1)
    counts = np.random.default_rng(0).random((design.symbols, design.levels)) * 50
    return Piece(Bottleneck(design).requires_grad_(False).eval(), SymbolCoder.frequencies_of(counts))


DESIGNS = [
    (Design("map", 6, 8, 2, 3, 4, (8, 10)), (2, 6, 8, 10)),
    (Design("map", 6, 8, 1, 9, 4, (8, 10)), (1, 6, 7, 9)),
    (Design("map", 4, 8, 0, 2, 16, (6, 6)), (1, 4, 6, 6)),
    (Design("map", 1, 8, 3, 40, 4, (16, 16)), (2, 1, 16, 16)),
    (Design("tokens", 24, 16, 0, 5, 8), (2, 7, 24)),
]


@pytest.mark.parametrize(("design", "shape"), DESIGNS)
def test_the_same_symbols(design: Design, shape: tuple[int, ...], tmp_path: Path) -> None:
    made = LearnedFile("net", "w" * 64, "conv", (None, piece(design)), {"seed": 1})
    made.write(tmp_path / "codec.safetensors")
    ours, theirs = LightLearned(tmp_path / "codec.safetensors"), LearnedCodec(made, "a test's")
    assert ours.name == theirs.name and ours.cut == "conv"
    dice = torch.Generator().manual_seed(0)
    alike = 0
    for _ in range(8):
        tensor = torch.randn(shape, generator=dice)
        coded = theirs.at("conv", 1).encode(tensor.reshape(-1), Grain.of(tuple(shape), tensor.stride()))
        light = ours.encode(1, tensor.numpy())
        assert coded is not None and light is not None and tuple(light[1]) == coded.params
        theirs.check(tuple(light[1]), torch.float32, tensor.numel(), len(light[0]))
        theirs.decode(memoryview(light[0]), tuple(light[1]), torch.float32, tensor.numel())
        alike += light[0] == bytes(coded.data)
    assert alike >= 6, "but for a rounding at the border of two symbols"
    assert ours.encode(0, tensor.numpy()) is None and ours.encode(9, tensor.numpy()) is None
    assert ours.encode(1, np.full(shape, np.nan, np.float32)) is None
    assert ours.encode(1, np.ones(shape, np.int64)) is None


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nothing")
    for name in ("x", "y"):
        with pytest.raises(SpecError, match=name):
            LightLearned(tmp_path / name)


def test_a_server_decodes_what_a_device_without_torch_encodes(tmp_path: Path) -> None:
    choice = ModelChoice("digits", device="cpu", threads=1)
    heads = tmp_path / "heads"
    export(choice, split=["stage2"], output=heads, vary="fixed")
    from shared_hooks import WrappedModel

    with WrappedModel(load_spec("digits").load_model("cpu")) as wrapped:
        weights = wrapped.weights_hash()
    design = Design("map", 32, 32, 1, 8, 4, (8, 8), positive=True)
    file = tmp_path / "codec.safetensors"
    LearnedFile("digits", weights, "stage2.1.relu#2", (piece(design),)).write(file)
    image = np.random.default_rng(0).standard_normal((1, 1, 32, 32)).astype(np.float32)
    with (
        local_server(choice, arguments=["--tails", "stage2", "--codec", f"learned:{file}"]) as address,
        LightClient(address, heads, codec=f"learned:{file}") as client,
    ):
        answer = client.infer(image)
        assert answer.bytes_up < 200 and answer.outputs["output"].shape == (1, 10)
    LearnedFile("digits", "0" * 64, "stage2.1.relu#2", (piece(design),)).write(file)
    with pytest.raises(SpecError, match="other weights"):
        LightClient("127.0.0.1:1", heads, codec=f"learned:{file}")
    LearnedFile("digits", weights, "stem.2", (piece(design),)).write(file)
    with pytest.raises(SpecError, match=r"is for the cut after stem\.2"):
        LightClient("127.0.0.1:1", heads, codec=f"learned:{file}")

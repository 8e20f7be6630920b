"""Blocks: found in the names of layers, as far down as they are blocks of several."""

from __future__ import annotations

import pytest

from edge_client.pages import blocks

RESNET = [
    f"encoder.stages.{stage}.layers.{block}.layer.{part}.{kind}"
    for stage in range(4)
    for block in range(3)
    for part in range(3)
    for kind in ("convolution", "normalization")
]
BERT = [f"encoder.layer.{number}.{part}" for number in range(12) for part in ("query", "key", "value", "dense", "norm")]


def test_neither_stages_nor_single_convolutions() -> None:
    found = blocks([*RESNET, "embedder", "classifier.1"])
    assert len(set(found.values())) == 4 * 3 + 2
    assert found[RESNET[-1]] == "encoder.stages.3.layers.2" and found["classifier.1"] == "classifier"
    assert found["embedder"] == "embedder"


def test_each_transformer_layer_is_a_block() -> None:
    assert list(dict.fromkeys(blocks(BERT).values())) == [f"encoder.layer.{number}" for number in range(12)]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["layer1.0.relu#2", "layer1.1.relu#2"], ["layer1.0", "layer1.1"]),
        (["features.0", "features.1"], ["features", "features"]),
        (["block.attn.qkv", "block.attn.proj", "head"], ["block.attn", "block.attn", "head"]),
        (["a#b", ""], ["a#b", ""]),
        ([], []),
    ],
)
def test_names_of_other_kinds(names: list[str], wanted: list[str]) -> None:
    assert list(blocks(names).values()) == wanted

"""A decoding profile names the decoder's blocks, and says what they hold, keep and give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.profiling.decoding import (
    LEAST_ROUNDS,
    DecodingMeasurement,
    DecodingProfile,
    blocks_of,
    fitting_lengths,
    weights_bytes,
    words_at_random,
)
from tests.shared_hooks.generation.small import MODELS, make

LISTS = {
    "llama": "model.layers",
    "gpt2": "transformer.h",
    "experts": "model.layers",
    "mamba": "backbone.layers",
    "hybrid": "model.layers",
    "t5": "decoder.block",
}


def measured(model: nn.Module, name: str) -> DecodingProfile:
    measurement = DecodingMeasurement(model, name, "edge", lengths=(8, 32))
    for _ in range(LEAST_ROUNDS):
        measurement.round()
    return measurement.result()


@pytest.mark.parametrize("name", LISTS)
def test_blocks_are_the_decoders_own(name: str) -> None:
    model = make(name)
    found = [path for path, _ in blocks_of(model, words_at_random(model))]
    assert found == [f"{LISTS[name]}.{at}" for at in range(len(found))]
    assert MODELS[name][2] in found


def test_a_llama_is_known_to_the_byte() -> None:
    model = make("llama")
    profile = measured(model, "llama")
    embeddings, norm = 120 * 32 * 4, 32 * 4
    assert (profile.before.weights_bytes, profile.after.weights_bytes) == (embeddings, embeddings + norm)
    assert (profile.words, profile.word_bytes, profile.lengths) == (120, 4, (8, 32))
    keys_and_values = 2 * 2 * 8 * 4  # of two heads, eight wide, float32
    for block in profile.blocks:
        assert block.weights_bytes == weights_bytes(model.model.layers[0])  # type: ignore[union-attr,index]
        assert block.hidden_bytes == 32 * 4
        assert block.state_bytes.at(100) == pytest.approx(100 * keys_and_values)
    assert all(part.step.at(50) > 0 and part.prefill.at(50) > 0 for part in profile.parts)


def test_a_recurrent_state_does_not_grow() -> None:
    profile = measured(make("mamba"), "mamba")
    assert profile.blocks[0].state_bytes.slope == 0
    assert profile.blocks[0].state_bytes.fixed > 0


def test_nothing_stays_on_the_model() -> None:
    model = make("gpt2")
    measurement = DecodingMeasurement(model, "gpt2", "edge", lengths=(8,))
    measurement.round()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_prompts_that_do_not_fit_are_left_out() -> None:
    model = make("llama")  # 128 positions
    assert fitting_lengths(model, (16, 100, 512)) == [16, 100]
    with pytest.raises(SpecError, match="128 positions"):
        fitting_lengths(model, (512,))


def test_prompts_are_drawn_alike_every_time() -> None:
    prompt = words_at_random(make("llama"))
    assert torch.equal(prompt(20)["input_ids"], prompt(20)["input_ids"])


def test_models_that_are_not_called_step_by_step_are_refused() -> None:
    with pytest.raises(SpecError, match="has no generate"):
        DecodingMeasurement(nn.Linear(2, 2), "linear", "edge")


def test_a_model_without_blocks_is_refused() -> None:
    model = make("llama")
    model.model.layers = model.model.layers[:1]  # type: ignore[union-attr,index]
    model.config.num_hidden_layers = 1  # type: ignore[union-attr]
    with pytest.raises(CutRefused, match="no list of blocks"):
        blocks_of(model, words_at_random(model))

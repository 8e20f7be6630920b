"""transformers' generate(), unchanged, gives with a cut what it gives without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared_hooks.errors import CutRefused
from shared_hooks.generation import DecodingTail, InProcess, SplitForward, state_name
from shared_hooks.tensors import identical
from tests.covering import crossed
from tests.shared_hooks.generation.small import MODELS, both, make, prompt

MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "beam samples": {"num_beams": 2, "do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "several answers": {"num_return_sequences": 2, "do_sample": True},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
DETAILS = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_sampled_with_padding(name: str) -> None:
    whole, split, how = both(name, prompt())
    assert torch.equal(whole, split)
    assert len(how.records) == 16
    whole, split, _ = both(name, prompt(rows=3), do_sample=True)
    assert torch.equal(whole, split)


@pytest.mark.parametrize(("name", "mode"), crossed(["llama", "sliding", "hybrid", "t5"], [*MODES]))
def test_modes(name: str, mode: str) -> None:
    whole, split, how = both(name, prompt(rows=2), **MODES[mode])
    assert torch.equal(whole, split)
    assert len(how.records) > 3


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_prompt_lookup_verifies_several_tokens_in_one_step(name: str) -> None:
    whole, split, how = both(name, prompt(), max_new_tokens=40, prompt_lookup_num_tokens=3)
    assert torch.equal(whole, split)
    assert len(how.records) < 40


def test_a_small_model_drafts() -> None:
    small = make("llama")

    def run(model: Any) -> Any:
        return model.generate(**prompt(), assistant_model=small, max_new_tokens=24, do_sample=True)

    whole, split, how = both("llama", prompt(), run)
    assert torch.equal(whole, split)
    assert len(how.records) < 24


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "sliding"])
def test_scores_and_hidden_states_come_out_bit_for_bit(name: str) -> None:
    whole, split, _ = both(name, prompt(rows=2), **DETAILS, output_hidden_states=True)
    assert whole.keys() == split.keys()
    for part in whole.keys() - {state_name()}:
        assert identical(whole[part], split[part]), part


def test_attention_comes_out_from_both_sides() -> None:
    def run(model: Any) -> Any:
        model.set_attn_implementation("eager")
        return model.generate(**prompt(), max_new_tokens=5, return_dict_in_generate=True, output_attentions=True)

    import tests.shared_hooks.generation.small as small
    from shared_hooks.generation import DecodingTail, InProcess, SplitForward

    model, there = make("llama"), make("llama")
    whole = run(model)
    there.set_attn_implementation("eager")  # type: ignore[operator]
    with SplitForward(model, small.cut_of("llama"), InProcess(DecodingTail(there, small.cut_of("llama")))):
        split = run(model)
    assert len(split.attentions) == len(whole.attentions) == 5
    assert identical(whole.attentions, split.attentions)


def test_a_conversation_continues_from_its_state() -> None:
    def run(model: Any) -> Any:
        first = model.generate(**prompt(), max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        more = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)
        return model.generate(
            more, past_key_values=first.past_key_values, max_new_tokens=6, do_sample=True, pad_token_id=0
        )

    whole, split, how = both("llama", {}, run)
    assert torch.equal(whole, split)
    assert len(how.records) == 12


@pytest.mark.parametrize("rows", [1, 3])
def test_pictures_and_speech_with_words(rows: int) -> None:
    dice = torch.Generator().manual_seed(2)
    words = prompt(rows)
    words["input_ids"][:, 3:7] = 5  # the places of a picture's four patches
    words["attention_mask"][:] = 1
    picture = {**words, "pixel_values": torch.randn(rows, 3, 16, 16, generator=dice)}
    for name, inputs in (("sees", picture), ("hears", {"input_features": torch.randn(rows, 8, 40, generator=dice)})):
        whole, split, how = both(name, inputs, do_sample=True)
        assert torch.equal(whole, split), name
        assert len(how.records) > 8


def test_tokens_are_streamed_as_they_come() -> None:
    from transformers.generation import BaseStreamer

    class CallReports(BaseStreamer):
        def __init__(self) -> None:
            self.reported: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.reported += value.flatten().tolist()

        def end(self) -> None:
            self.reported.append(-1)

    def run(model: Any) -> Any:
        streamer = CallReports()
        model.generate(**prompt(), max_new_tokens=8, do_sample=False, streamer=streamer)
        return streamer.reported

    whole, split, _ = both("llama", {}, run)
    assert whole == split
    assert len(whole) == 11 + 8 + 1


def test_half_precision() -> None:
    import tests.shared_hooks.generation.small as small
    from shared_hooks.generation import DecodingTail, InProcess, SplitForward

    here, there = make("llama").to(torch.bfloat16), make("llama").to(torch.bfloat16)
    whole = here.generate(**prompt(), max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    with SplitForward(here, small.cut_of("llama"), InProcess(DecodingTail(there, small.cut_of("llama")))) as how:
        split = here.generate(**prompt(), max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert torch.equal(whole, split)
    assert how.records[-1].bytes_up < 64 + 400  # a hidden state of 32 numbers, and what is said of it


def test_the_model_is_afterwards_as_it_was() -> None:
    model = make("gpt2")
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    both_ways = model.generate(**prompt(), max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    from shared_hooks.generation import SplitForward
    from tests.shared_hooks.generation.small import cut_of, in_process

    with SplitForward(model, cut_of("gpt2"), in_process("gpt2")):
        model.generate(**prompt(), max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before
    again = model.generate(**prompt(), max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    assert torch.equal(both_ways, again)


@pytest.mark.parametrize("cut", ["shared", "encoder.block.0", "encoder", "encoder.block.1.layer.0"])
def test_a_cut_that_no_step_calls_is_refused(cut: str) -> None:
    """``generate()`` runs the encoder outside of the model's forward: all would run here, and nobody would say so."""
    model = make("t5")
    with (
        SplitForward(model, cut, InProcess(DecodingTail(make("t5"), cut))),
        pytest.raises(CutRefused, match="is not called in this step"),
    ):
        model.generate(**prompt(), max_new_tokens=4, do_sample=False)
    assert torch.equal(
        model.generate(**prompt(), max_new_tokens=4, do_sample=False),
        make("t5").generate(**prompt(), max_new_tokens=4, do_sample=False),
    ), "it is whole again"

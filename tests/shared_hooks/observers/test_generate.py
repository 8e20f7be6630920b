"""Inside `generate()`: every step is kept, with and without a cut, and the text stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared_hooks import WrappedModel
from shared_hooks.observers import ActivationStats, AttentionCapture, NonFiniteGuard, TopTokens
from tests.shared_hooks.observers.left import hooks_left
from tests.shared_hooks.observers.small import gpt2

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
STEPS = 4


class Letters:
    """A tokenizer as far as it is needed."""

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


def generated(model: Any, cache: bool = True) -> list[int]:
    tokens = model.generate(PROMPT, max_new_tokens=STEPS, do_sample=False, use_cache=cache)
    return tokens[0, PROMPT.shape[1] :].tolist()


def split(edge: WrappedModel, cloud: WrappedModel, cut: str) -> Any:
    """A GPT-2 whose every forward goes through a cut."""
    model = gpt2()

    def forward(*args: Any, **kwargs: Any) -> Any:
        return cloud.forward(edge.forward(*args, end=cut, **kwargs), start=cut)

    forward.__signature__ = __import__("inspect").signature(type(model).forward.__get__(model))  # type: ignore[attr-defined]
    model.forward = forward
    return model


@pytest.mark.parametrize("cache", [True, False])
def test_tokens_and_statistics_of_every_step(cache: bool) -> None:
    model = gpt2()
    expected = generated(model, cache)
    observers = TopTokens(k=3, tokenizer=Letters()), ActivationStats("lm_head"), AttentionCapture("*.1.attn")
    tokens, stats, attention = observers
    with (
        tokens.attach(model),
        stats.attach(model),
        attention.attach(model),
        NonFiniteGuard(action="raise").attach(model),
    ):
        assert generated(model, cache) == expected
    assert [record.step for record in tokens.records] == list(range(STEPS))
    # greedy: the likeliest is what was taken
    assert [record.ids[0] for record in tokens.records] == expected
    assert [record.text[0] for record in tokens.records] == [f"<{token}>" for token in expected]
    assert [record.step for record in stats.records] == list(range(STEPS))
    keys = [record.shape[-2:] for record in attention.records]
    assert keys == [(5, 5), (1, 6), (1, 7), (1, 8)] if cache else keys == [(n, n) for n in range(5, 9)]
    assert not hooks_left(model)


def test_the_logits_are_those_of_the_steps() -> None:
    model = gpt2()
    with TopTokens(k=2).attach(model) as tokens, ActivationStats("lm_head").attach(model) as stats:
        out = model.generate(
            PROMPT, max_new_tokens=STEPS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    for record, logits in zip(tokens.records, out.logits, strict=True):
        top = logits[0].topk(2)
        assert list(record.ids) == top.indices.tolist()
        assert record.logits == pytest.approx(top.values.tolist())
        assert record.probabilities == pytest.approx(logits[0].softmax(-1)[top.indices].tolist())
    assert stats.records[0].max == pytest.approx(max(stats.records[0].max, tokens.records[0].logits[0]))


def test_both_sides_of_a_cut_are_observed_at_every_step() -> None:
    expected = generated(gpt2(), cache=False)
    cut = "transformer.h.0.mlp.act"
    with WrappedModel(gpt2()) as edge, WrappedModel(gpt2()) as cloud:
        heads, tails, tokens = ActivationStats("transformer.h.*.ln_1"), ActivationStats("*.h.*.ln_1"), TopTokens()
        attention = AttentionCapture()
        with heads.attach(edge), tails.attach(cloud), tokens.attach(cloud), attention.attach(cloud):
            assert generated(split(edge, cloud, cut), cache=False) == expected
    for stats, name in ((heads, "transformer.h.0.ln_1"), (tails, "transformer.h.1.ln_1")):
        assert [(record.name, record.step) for record in stats.records] == [(name, step) for step in range(STEPS)]
        assert [record.shape[1] for record in stats.records] == [5, 6, 7, 8]
    assert [record.ids[0] for record in tokens.records] == expected
    assert [(record.name, record.step) for record in attention.records] == [
        ("transformer.h.1.attn", step) for step in range(STEPS)
    ]
    assert not hooks_left(edge.model) and not hooks_left(cloud.model)


def test_sampling_is_by_steps() -> None:
    model = gpt2()
    with ActivationStats(every_n=2).attach(model) as stats, TopTokens(every_n=3).attach(model) as tokens:
        generated(model)
    assert {record.step for record in stats.records} == {0, 2}
    assert [record.step for record in tokens.records] == [0, 3]


def test_an_encoder_that_generate_calls_by_itself_belongs_to_the_first_step() -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    with ActivationStats(["encoder.block.0", "decoder.block.0"]).attach(model) as stats:
        model.generate(PROMPT, max_new_tokens=2, do_sample=False)
    steps = [(record.name, record.step) for record in stats.records if record.part in ("", "0")]
    assert steps == [("encoder.block.0", 0), ("decoder.block.0", 0), ("decoder.block.0", 1)]

"""Observers inside generate(): each call is seen on exactly one side of the cut, as it is without a cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared_hooks.generation import DecodingTail, InProcess, SplitForward, state_name
from shared_hooks.observers import ActivationStats, AttentionCapture, NonFiniteFound, NonFiniteGuard, TopTokens
from tests.shared_hooks.generation.small import cut_of, make, prompt


def generate(model: Any) -> torch.Tensor:
    return model.generate(**prompt(), max_new_tokens=4, do_sample=False)  # type: ignore[no-any-return]


def places(records: Any) -> list[tuple[int, str]]:
    return [(record.step, record.name) for record in seen(records)]


def seen(records: Any) -> list[Any]:
    """But for the state among a model's outputs, of which each side has its own part."""
    return [record for record in records if state_name() not in str(getattr(record, "part", ""))]


@pytest.mark.parametrize("before", [True, False], ids=["attached before the split", "attached within"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_both_sides_together_see_what_the_whole_model_sees(name: str, before: bool) -> None:
    here, there = make(name), make(name)
    with ActivationStats("*").attach(here) as whole:
        words = generate(here)
    split = SplitForward(here, cut_of(name), InProcess(DecodingTail(there, cut_of(name))))
    edge, cloud = ActivationStats("*"), ActivationStats("*")
    if before:
        with edge.attach(here), cloud.attach(there), split:
            assert torch.equal(generate(here), words)
    else:
        with split, edge.attach(here), cloud.attach(there):
            assert torch.equal(generate(here), words)
    assert not set(places(edge.records)) & set(places(cloud.records))
    assert sorted(places(edge.records) + places(cloud.records)) == sorted(places(whole.records))
    means = {(one.step, one.name, one.part): one.mean for one in seen([*edge.records, *cloud.records])}
    assert means == {(one.step, one.name, one.part): one.mean for one in seen(whole.records)}
    assert cut_of(name) in {one.name for one in edge.records}


def test_attention_on_both_sides() -> None:
    here, there = make("llama"), make("llama")
    with AttentionCapture().attach(here) as whole:
        generate(here)
    with (
        SplitForward(here, cut_of("llama"), InProcess(DecodingTail(there, cut_of("llama")))),
        AttentionCapture().attach(here) as edge,
        AttentionCapture().attach(there) as cloud,
    ):
        generate(here)
    assert {one.name for one in edge.records} == {f"model.layers.{number}.self_attn" for number in (0, 1)}
    assert {one.name for one in cloud.records} == {f"model.layers.{number}.self_attn" for number in (2, 3)}
    assert sorted(places(edge.records) + places(cloud.records)) == sorted(places(whole.records))


def test_the_likeliest_words_are_seen_where_they_are_made() -> None:
    here, there = make("llama"), make("llama")
    with (
        SplitForward(here, cut_of("llama"), InProcess(DecodingTail(there, cut_of("llama")))),
        TopTokens(k=2).attach(here) as edge,
        TopTokens(k=2).attach(there) as cloud,
    ):
        words = generate(here)
    assert not edge.records
    assert [one.ids[0] for one in cloud.records] == words[0, -4:].tolist()


def test_numbers_that_are_none_end_a_step_by_name() -> None:
    here, there = make("llama"), make("llama")
    with torch.no_grad():
        there.get_parameter("model.layers.3.mlp.down_proj.weight").fill_(float("nan"))
    with (
        SplitForward(here, cut_of("llama"), InProcess(DecodingTail(there, cut_of("llama")))),
        NonFiniteGuard(action="raise").attach(there),
        pytest.raises(NonFiniteFound, match=r"layers\.3"),
    ):
        generate(here)

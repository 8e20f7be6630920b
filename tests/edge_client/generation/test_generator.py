"""generate() through a server in another process says what it says without a cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from edge_client import EdgeClient, ModelChoice
from edge_client.generation import SplitGenerator, Words, split_model
from edge_client.generation.survey import best_generation_cut
from shared_hooks.errors import CutRefused, Disagreement, SpecError, UnknownLayer
from shared_hooks.generation import DecodingTail, InProcess
from tests.edge_client.generation.speaking import CUT, inputs, whole

WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_those_without_a_cut(client: EdgeClient, way: str) -> None:
    asked: dict[str, Any] = {**inputs(client), **WAYS[way], "max_new_tokens": 12}
    expected = whole(client, **asked)
    with client.generating(cut=CUT) as model:
        torch.manual_seed(0)
        assert torch.equal(model.generate(**asked), expected)
    assert torch.equal(whole(client, **asked), expected), "the model is its own again"


def test_a_padded_batch(client: EdgeClient) -> None:
    asked = {**inputs(client, "the first layers", "a prompt that is longer"), "max_new_tokens": 8, "do_sample": False}
    generator = SplitGenerator(client, CUT)
    assert torch.equal(generator.generate(**asked), whole(client, **asked))
    assert generator.summary is not None
    assert (generator.summary.rows, generator.summary.tokens) == (2, 8)


def test_the_summary_adds_up(client: EdgeClient) -> None:
    generator = SplitGenerator(client, CUT)
    assert generator.summary is None
    generator.generate(**inputs(client), max_new_tokens=6, do_sample=False)
    summary, records = generator.summary, generator.records
    assert summary is not None
    assert (summary.tokens, summary.round_trips) == (6, 6) == (len(records), summary.round_trips)
    assert summary.bytes_up == sum(one.bytes_up for one in records)
    assert summary.bytes_down == sum(one.bytes_down for one in records)
    assert summary.first_token_ns is not None
    assert records[0].total_ns <= summary.first_token_ns <= summary.total_ns
    assert sum(one.total_ns for one in records) <= summary.total_ns
    assert 0 < summary.server_ns < summary.total_ns
    assert "6 tokens" in repr(summary) and "6 tokens" in repr(generator)
    assert set(summary.as_dict()) >= {"tokens", "tokens_per_second", "bytes_up", "server_ns"}


def test_drafts_need_fewer_round_trips_than_tokens(client: EdgeClient) -> None:
    asked = inputs(client, "so so so so so so so so so so")
    generator = SplitGenerator(client, CUT)
    generator.generate(**asked, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=4)
    assert generator.summary is not None
    assert generator.summary.tokens == 40
    assert generator.summary.round_trips <= 40


def test_a_state_continues_in_the_next_call(client: EdgeClient) -> None:
    asked = inputs(client)
    longer = whole(client, **asked, max_new_tokens=10, do_sample=False)
    with SplitGenerator(client, CUT) as generator:
        first = generator.generate(**asked, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        again = generator.generate(
            first.sequences, past_key_values=first.past_key_values, max_new_tokens=6, do_sample=False
        )
    assert torch.equal(again, longer)
    assert generator.summary is not None
    assert generator.summary.tokens == 6


def test_a_model_of_the_same_weights_may_be_given(client: EdgeClient) -> None:
    mine = copy.deepcopy(client.wrapped.model)
    asked = {**inputs(client), "max_new_tokens": 5, "do_sample": False}
    with split_model(mine, client, CUT) as model:
        assert model is mine
        assert torch.equal(model.generate(**asked), whole(client, **asked))
    with torch.no_grad():
        mine.get_input_embeddings().weight[0, 0] += 1
    with pytest.raises(Disagreement, match="language-model"), split_model(mine, client, CUT):
        pass


@pytest.mark.parametrize(
    ("cut", "error", "says"),
    [
        ("model.layer.2", UnknownLayer, "model.layers.2"),
        ("entirely.wrong", UnknownLayer, "model.layers.0 to model.layers.5"),
        ("model.layers", CutRefused, "model.layers.0"),
        ("input", CutRefused, "model.layers.0 to model.layers.5"),
        ("edge-only", CutRefused, "token ids stay here"),
        ("", SpecError, "by its path"),
    ],
)
def test_a_cut_that_there_is_not(client: EdgeClient, cut: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        SplitGenerator(client, cut)


def test_the_best_cut_is_chosen_by_measuring(client: EdgeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(best_generation_cut.__kwdefaults__ or {}, "seconds", 0.1)
    asked = {**inputs(client), "max_new_tokens": 4, "do_sample": False}
    expected = whole(client, **asked)
    with SplitGenerator(client, "auto") as generator:
        assert generator.cut in {f"model.layers.{number}" for number in range(6)}
        assert generator.model is client.wrapped.model
        assert torch.equal(generator.generate(**asked), expected)


def test_one_model_is_split_once_at_a_time(client: EdgeClient) -> None:
    asked = {**inputs(client), "max_new_tokens": 4, "do_sample": False}
    first, second = SplitGenerator(client, CUT), SplitGenerator(client, "model.layers.4")
    with first, pytest.raises(CutRefused, match="split already"):
        second.generate(**asked)
    assert torch.equal(second.generate(**asked), whole(client, **asked))
    assert torch.equal(first.generate(**asked), whole(client, **asked)), "the second one has given the model back"


def test_a_model_that_writes_no_text() -> None:
    choice = ModelChoice(torch.nn.Linear(2, 2), model_id="plain")
    with EdgeClient(None, choice, split="edge-only") as client, pytest.raises(SpecError, match=r"no generate\(\)"):
        SplitGenerator(client, "0")


def test_another_link_in_place_of_the_connection(client: EdgeClient) -> None:
    tail = DecodingTail(copy.deepcopy(client.wrapped.model), CUT)
    asked = {**inputs(client), "max_new_tokens": 5, "do_sample": False}
    generator = SplitGenerator(client, CUT, link=InProcess(tail))
    assert torch.equal(generator.generate(**asked), whole(client, **asked))


def test_a_criterion_of_ones_own_still_stops(client: EdgeClient) -> None:
    from transformers import StoppingCriteriaList

    def after_three(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= start + 3)

    asked = inputs(client)
    start = asked["input_ids"].shape[1]
    generator = SplitGenerator(client, CUT)
    found = generator.generate(
        **asked, max_new_tokens=9, do_sample=False, stopping_criteria=StoppingCriteriaList([after_three])
    )
    assert found.shape[1] == start + 3
    assert generator.summary is not None
    assert generator.summary.tokens == 3


def test_as_little_as_is_needed_comes_back(client: EdgeClient) -> None:
    asked = {**inputs(client), "max_new_tokens": 6, "do_sample": False}
    down = []
    for answer in (None, ("least",)):
        generator = SplitGenerator(client, CUT, answer=answer)
        assert torch.equal(generator.generate(**asked), whole(client, **asked))
        assert generator.summary is not None
        down.append(generator.summary.bytes_down)
    assert down[1] < down[0] - 6 * 1000, "384 numbers of four bytes each, and one"


def test_observers_of_the_client_see_the_heads(client: EdgeClient) -> None:
    from shared_hooks.observers import ActivationStats

    observer = ActivationStats("model.layers.0.mlp.up_proj")
    with observer.attach(client.wrapped):
        SplitGenerator(client, CUT).generate(**inputs(client), max_new_tokens=3, do_sample=False)
    assert len(observer.records) == 3


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_codec_spares_bytes_and_says_so(client: EdgeClient, codec: str) -> None:
    asked = {**inputs(client), "max_new_tokens": 6, "do_sample": False}
    plain, coded = SplitGenerator(client, CUT), SplitGenerator(client, CUT, codec=codec)
    assert plain.generate(**asked).shape == coded.generate(**asked).shape
    assert {record.codec for record in plain.records} == {""}
    assert coded.records[0].codec == codec
    assert plain.summary is not None and coded.summary is not None
    assert coded.summary.bytes_up < plain.summary.bytes_up
    again = coded.generate(**asked)
    with client.generating(cut=CUT, codec=codec) as model:
        assert torch.equal(model.generate(**asked), again)
    with pytest.raises(SpecError, match="int3"), client.generating(cut=CUT, codec="int3"):
        pass


def test_stop_strings_with_a_tokenizer(client: EdgeClient) -> None:
    asked = {**inputs(client), "max_new_tokens": 24, "do_sample": False, "tokenizer": Words.of(client.spec).tokenizer}
    expected = whole(client, **asked, stop_strings=["le"])
    assert torch.equal(SplitGenerator(client, CUT).generate(**asked, stop_strings=["le"]), expected)


def test_generate_batch_is_refused_before_it_begins(client: EdgeClient) -> None:
    with client.generating(cut=CUT) as model, pytest.raises(CutRefused, match="generate_batch"):
        model.generate_batch([[1, 2, 3]])


def test_a_cut_behind_the_logits_is_refused_for_that(client: EdgeClient) -> None:
    with pytest.raises(CutRefused, match="lm_head, which gives the logits"):
        SplitGenerator(client, "lm_head").generate(**inputs(client), max_new_tokens=2, do_sample=False)

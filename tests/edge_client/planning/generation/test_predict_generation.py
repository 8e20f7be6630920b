"""What a generation takes at a cut adds up, and grows and falls with what it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.call import Load
from edge_client.planning.generation import (
    GenerationCandidate,
    Overhead,
    PredictedDrafting,
    Workload,
    decide_generation,
    predict_generation,
)
from edge_client.planning.objective import Constraints, Objective
from edge_client.planning.predict import GivenPower
from edge_client.user_text import EDGE_ONLY
from shared_hooks.errors import SpecError
from shared_hooks.profiling.decoding import LineFit
from tests.edge_client.planning.generation.decoder import MS, WORDS, decoder, link

EDGE, CLOUD = decoder("edge", 10), decoder("cloud", 1)
SHORT = Workload(prompt_tokens=100, new_tokens=50)


def named(found: list[GenerationCandidate]) -> dict[str, GenerationCandidate]:
    return {one.name: one for one in found}


def test_there_is_a_candidate_after_every_block_and_one_without_a_server() -> None:
    found = predict_generation(EDGE, CLOUD, link(), SHORT)
    assert [one.name for one in found] == [EDGE_ONLY, *(f"layers.{at}" for at in range(8))]
    assert [one.name for one in predict_generation(EDGE, None, None, SHORT)] == [EDGE_ONLY]


def test_a_token_takes_its_blocks_here_the_link_and_the_rest_there() -> None:
    one = named(predict_generation(EDGE, CLOUD, link(), SHORT, load=Load(queue_ns=2 * MS)))["layers.2"].token
    longer = 1 + 125 / 10_000  # the mean of the 50 tokens after 100
    assert one.stages_ns["edge"] == pytest.approx((1 + 3 * 10) * MS * longer)
    assert one.stages_ns["tail"] == pytest.approx((0.1 + 5 * 1 + 1) * MS * longer)
    assert one.stages_ns["queue"] == 2 * MS
    assert one.bytes_up == 1024 + 200
    assert one.bytes_down == WORDS * 4 + 200
    assert one.stages_ns["network"] == pytest.approx(10 * MS + (1224 + 4200) * 1e3)


def test_the_first_token_takes_the_whole_prompt_across() -> None:
    one = named(predict_generation(EDGE, CLOUD, link(), SHORT))["layers.2"].first
    assert one.stages_ns["edge"] == pytest.approx((1 + 30) * MS * 11)
    assert one.bytes_up == 100 * 1024 + 200
    assert one.bytes_down == WORDS * 4 + 200


def test_a_reply_is_its_first_token_and_the_others() -> None:
    for one in predict_generation(EDGE, CLOUD, link(), SHORT):
        assert one.reply.latency_ns == pytest.approx(one.first.latency_ns + 49 * one.token.latency_ns)
        assert one.tokens_per_second == pytest.approx(1e9 / one.token.latency_ns)


def test_memory_of_both_sides_adds_up() -> None:
    found = predict_generation(EDGE, CLOUD, link(), SHORT)
    whole = found[0]
    for one in found[1:]:
        assert one.edge_state_bytes + one.cloud_state_bytes == pytest.approx(whole.edge_state_bytes)
        assert one.edge_weights_bytes < whole.edge_weights_bytes
    assert whole.edge_state_bytes == 8 * 512 * 150


def test_measured_overheads_count() -> None:
    known = Overhead(2 * MS, LineFit(100, 8), LineFit(50, 16), LineFit(70), LineFit(90))
    plain = named(predict_generation(EDGE, CLOUD, link(), SHORT))["layers.0"]
    one = named(predict_generation(EDGE, CLOUD, link(), SHORT, overhead=known))["layers.0"]
    fewer = (one.token.bytes_up + one.token.bytes_down - plain.token.bytes_up - plain.token.bytes_down) * 1e3
    assert one.token.stages_ns["network"] == pytest.approx(plain.token.stages_ns["network"] + 2 * MS + fewer)
    assert one.token.bytes_up == 1024 + 100 + 8 * 125
    assert one.first.bytes_up == 100 * (1024 + 16) + 50
    assert one.first.bytes_down == WORDS * 4 + 90


@given(rate=st.floats(1e3, 1e10), more=st.floats(1.01, 100))
def test_no_cut_is_slower_on_a_link_with_more_bandwidth(rate: float, more: float) -> None:
    slow, fast = (predict_generation(EDGE, CLOUD, link(10, one), SHORT) for one in (rate, rate * more))
    for before, after in zip(slow[1:], fast[1:], strict=True):
        for goal in ("token", "first-token", "reply"):
            assert after.of(goal).latency_ns < before.of(goal).latency_ns
    assert slow[0] == fast[0]


@given(rtt=st.floats(0, 500), more=st.floats(1, 100))
def test_a_longer_round_trip_adds_itself_to_every_token(rtt: float, more: float) -> None:
    near, far = (predict_generation(EDGE, CLOUD, link(one), SHORT) for one in (rtt, rtt + more))
    for before, after in zip(near[1:], far[1:], strict=True):
        assert after.token.latency_ns - before.token.latency_ns == pytest.approx(more * MS)


@given(shorter=st.integers(1, 5000), more=st.integers(1, 5000))
def test_more_tokens_before_it_never_make_a_token_faster(shorter: int, more: int) -> None:
    first, second = (
        predict_generation(EDGE, CLOUD, link(), replace(SHORT, prompt_tokens=one)) for one in (shorter, shorter + more)
    )
    for before, after in zip(first, second, strict=True):
        assert after.token.latency_ns > before.token.latency_ns
        assert after.first.latency_ns > before.first.latency_ns
        assert (after.token.edge_memory.value or 0) > (before.token.edge_memory.value or 0)


@given(tokens=st.integers(0, 20), acceptance=st.floats(0, 1))
def test_a_round_gives_between_one_token_and_all_that_were_drafted(tokens: int, acceptance: float) -> None:
    expected = PredictedDrafting(tokens, acceptance).tokens_per_round
    assert 1 <= expected <= tokens + 1
    assert PredictedDrafting(tokens + 1, acceptance).tokens_per_round >= expected
    if acceptance < 0.99:
        assert expected == pytest.approx((1 - acceptance ** (tokens + 1)) / (1 - acceptance))


@given(tokens=st.integers(1, 8))
def test_drafts_that_are_never_right_only_cost_and_those_that_are_always_right_share_the_round_trip(
    tokens: int,
) -> None:
    far = link(rtt_ms=200)

    def token_ns(drafting: PredictedDrafting) -> float:
        found = predict_generation(EDGE, CLOUD, far, replace(SHORT, drafting=drafting))
        return named(found)["layers.0"].token.latency_ns

    plain = token_ns(PredictedDrafting())
    assert token_ns(PredictedDrafting(tokens, 0.0)) > plain
    assert token_ns(PredictedDrafting(tokens, 1.0)) < plain
    assert token_ns(PredictedDrafting(tokens, 1.0, token_ns=1e9)) > plain


@pytest.mark.parametrize(
    ("answer", "down"), [(None, 4000), (("top", 10), 10 * 8), (("top", 5000), 1000 * 8), (("token",), 8)]
)
def test_returned_logits_are_those_requested(answer: tuple[str] | tuple[str, int] | None, down: int) -> None:
    found = named(predict_generation(EDGE, CLOUD, link(), replace(SHORT, answer=answer)))
    assert found["layers.3"].token.bytes_down == down + 200
    drafted = replace(SHORT, answer=answer, drafting=PredictedDrafting(3, 0.0))
    assert named(predict_generation(EDGE, CLOUD, link(), drafted))["layers.3"].token.bytes_down == 4 * down + 200


def test_a_slow_edge_near_a_fast_server_is_cut_early_and_a_far_server_is_not_asked() -> None:
    near = decide_generation(predict_generation(EDGE, CLOUD, link(1), SHORT))
    assert near.winner.name == "layers.0"
    far = decide_generation(predict_generation(EDGE, CLOUD, link(2000), SHORT))
    assert far.winner.name == EDGE_ONLY


def test_goals_may_have_different_winners() -> None:
    narrow = link(rtt_ms=1, bytes_per_second=1e4)  # a prompt takes 10 s to cross, a token's hidden state 0.1 s
    found = predict_generation(
        decoder("edge", 100), CLOUD, narrow, replace(SHORT, prompt_tokens=400, answer=("token",))
    )
    assert decide_generation(found, "token").winner.name == "layers.0"
    assert decide_generation(found, "first-token").winner.name == EDGE_ONLY


def test_a_limit_on_the_edges_memory_rejects_cuts_that_keep_more_here() -> None:
    found = predict_generation(EDGE, CLOUD, link(2000), SHORT)
    limit = named(found)["layers.3"].token.edge_memory.value
    decision = decide_generation(found, constraints=Constraints(max_edge_memory=limit))
    assert set(decision.rejected) == {EDGE_ONLY, "layers.4", "layers.5", "layers.6", "layers.7"}
    assert "edge memory" in decision.rejected[EDGE_ONLY]


def test_energy_is_by_the_watts_that_are_given_or_refused_by_name() -> None:
    one = named(predict_generation(EDGE, CLOUD, link(), SHORT, power=GivenPower(10, 2)))["layers.0"].token
    work = one.stages_ns["edge"]
    assert one.edge_energy.value == pytest.approx((10 * work + 2 * (one.latency_ns - work)) / 1e9)
    with pytest.raises(SpecError, match="objective energy: unavailable"):
        decide_generation(predict_generation(EDGE, CLOUD, link(), SHORT), objective=Objective({"energy": 1.0}))


def test_profiles_of_different_models_are_refused() -> None:
    with pytest.raises(SpecError, match="made has 8 blocks from layers.0 on the edge, made has 7 from"):
        predict_generation(EDGE, decoder("cloud", 1, blocks=7), link(), SHORT)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Workload(prompt_tokens=0),
        lambda: Workload(new_tokens=0),
        lambda: Workload(answer=("top", 0)),
        lambda: Workload(answer=("all",)),
        lambda: PredictedDrafting(-1),
        lambda: PredictedDrafting(1, 1.5),
        lambda: PredictedDrafting(1, float("nan")),
        lambda: PredictedDrafting(1, 0.5, -1.0),
        lambda: decide_generation(predict_generation(EDGE, CLOUD, link(), SHORT), "speed"),
    ],
)
def test_invalid_arguments_are_refused(wrong: object) -> None:
    with pytest.raises(SpecError):
        wrong()  # type: ignore[operator]

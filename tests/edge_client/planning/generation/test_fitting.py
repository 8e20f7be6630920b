"""From steps at two cuts come the numbers that they were made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.planning.generation import (
    StepSample,
    Workload,
    cloud_profile,
    head_profile,
    overhead_of,
    predict_generation,
)
from shared_hooks.profiling.decoding import DecodingProfile
from tests.edge_client.planning.generation.decoder import MS, WORDS, decoder, link

EDGE = decoder("edge", 10)
LAST = len(EDGE.blocks) - 1
LINK = link(8)


def samples(head: DecodingProfile, cloud: DecodingProfile, network_ns: float = 0.0) -> list[StepSample]:
    """What steps would take if they took just that: 120 bytes and one a token beside what must cross."""
    found = []
    for cut in (0, LAST):
        for prompt in (True, False):
            for tokens in (16, 128, 512):
                here, there = (head.before, *head.blocks[: cut + 1]), (*cloud.blocks[cut + 1 :], cloud.after)
                edge, server = (
                    sum((part.prefill if prompt else part.step).at(tokens) for part in parts) for parts in (here, there)
                )
                up = (tokens if prompt else 1) * 1024 + 120 + tokens
                down = WORDS * 4 + 90
                wait = server + LINK.network_ns(up, down) + network_ns
                found.append(StepSample(cut, prompt, tokens, edge, wait, server, up, down))
    return found


@given(slower=st.floats(1, 5), server_ms=st.floats(0.1, 20))
def test_both_sides_profiles_come_back_whatever_the_edge_takes_alone(slower: float, server_ms: float) -> None:
    head, cloud = EDGE.times(slower), decoder("cloud", server_ms)
    taken = samples(head, cloud)
    found_head, found_cloud = head_profile(EDGE, taken), cloud_profile(EDGE, taken, {})
    for made, found in ((head, found_head), (cloud, found_cloud)):
        for tokens in (50, 300):
            for cut in range(LAST + 1):
                here = (found.before, *found.blocks[: cut + 1]), (made.before, *made.blocks[: cut + 1])
                there = (*found.blocks[cut + 1 :], found.after), (*made.blocks[cut + 1 :], made.after)
                got, true = here if made is head else there
                for what in ("step", "prefill"):
                    is_, was = (sum(getattr(part, what).at(tokens) for part in parts) for parts in (got, true))
                    assert is_ == pytest.approx(was, rel=1e-3)


def test_a_prediction_from_samples_of_two_cuts_is_that_of_the_whole_profiles() -> None:
    cloud = decoder("cloud", 2)
    taken, work = samples(EDGE, cloud, 0.5 * MS), Workload(100, 20)
    known = overhead_of(EDGE, taken, LINK, lambda tokens: tokens * WORDS * 4)
    found = predict_generation(
        EDGE, cloud_profile(EDGE, taken, {}), LINK, work, head=head_profile(EDGE, taken), overhead=known
    )
    for one in found[1:]:
        at = one.token.layer_id
        assert at is not None
        parts = (EDGE.before, *EDGE.blocks[: at + 1], *cloud.blocks[at + 1 :], cloud.after)
        compute = sum(part.step.at(110) for part in parts)
        network = LINK.network_ns(1024 + 120 + 110, WORDS * 4 + 90) + 0.5 * MS
        assert one.token.latency_ns == pytest.approx(compute + network, rel=1e-3)


def test_other_crossing_tensors_are_fitted() -> None:
    known = overhead_of(EDGE, samples(EDGE, decoder("cloud", 1)), None, lambda tokens: tokens * WORDS * 4)
    assert known.step_up.at(300) == pytest.approx(420, rel=1e-3)
    assert known.prefill_up.at(300) == pytest.approx(420, rel=1e-3)
    assert known.step_down.at(300) == pytest.approx(90)
    assert known.network_ns == 0


def test_steps_at_one_cut_only_are_too_few() -> None:
    taken = [one for one in samples(EDGE, decoder("cloud", 1)) if one.cut == 0]
    with pytest.raises(ValueError, match="both cuts"):
        cloud_profile(EDGE, taken, {})

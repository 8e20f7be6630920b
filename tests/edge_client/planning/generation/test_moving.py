"""Moving the cut of a running session: what crosses, and when it has paid."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.planning.generation import moving
from tests.edge_client.planning.generation.decoder import decoder, link

EDGE, CLOUD = decoder("edge", 10), decoder("cloud", 1)
BLOCKS = st.integers(0, 7)


@given(old=BLOCKS, new=BLOCKS, tokens=st.integers(1, 10_000))
def test_carrying_costs_by_the_blocks_between_and_replaying_does_not(old: int, new: int, tokens: int) -> None:
    found = moving(EDGE, CLOUD, link(), old, new, tokens, 1e6)
    assert found.carried_bytes == abs(old - new) * 512 * tokens
    assert found.replayed_bytes == 1024 * tokens + 200


def test_a_move_to_the_server_goes_up_the_link() -> None:
    from edge_client.planning.link import Curve, Link

    slow_up = Link(Curve.line(0, 1e3), Curve.line(0, 1e9))
    up, down = moving(EDGE, CLOUD, slow_up, 5, 2, 100, 1e6), moving(EDGE, CLOUD, slow_up, 2, 5, 100, 1e6)
    assert up.carry_ns > 100 * down.carry_ns


def test_a_move_pays_after_as_many_tokens_as_its_cost_is_of_the_gain() -> None:
    found = moving(EDGE, CLOUD, link(), 5, 2, 100, 2e6)
    assert found.pays_after == pytest.approx(min(found.carry_ns, found.replay_ns) / 2e6)


def test_a_move_to_a_slower_cut_never_pays() -> None:
    found = moving(EDGE, CLOUD, link(), 5, 2, 100, -1.0)
    assert found.pays_after == math.inf
    assert found.as_dict()["pays_after"] is None

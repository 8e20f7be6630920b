"""Which ways a sweep tries, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.sweeping.records import choose, rotated, ways_of
from shared_hooks.errors import CutRefused, SpecError, UnknownLayer
from shared_hooks.planning import LayerInfo
from tests.edge_client.sweeping import synthetic


def layers(*refused: str) -> list[LayerInfo]:
    def info(number: int, name: str) -> LayerInfo:
        why = "it keeps state" if name in refused else None
        return LayerInfo(
            layer_id=number,
            name=name,
            layer_type="Linear",
            output_bytes=4,
            frontier_bytes=4,
            can_split=why is None,
            reason=why,
        )

    return [info(number, name) for number, name in enumerate(["stem", "body.0", "body.0#2", "body.1", "head"])]


def test_all_cuts_that_are_allowed() -> None:
    assert choose(layers("body.1"), every=1) == [("stem", 0), ("body.0", 1), ("body.0#2", 2), ("head", 4)]


def test_by_default_the_ends_of_blocks_and_where_other_bytes_cross() -> None:
    assert choose(layers()) == [("stem", 0), ("body.1", 3)], "stem is the first; body ends after body.1"
    found = layers()
    found[2] = replace(found[2], frontier_bytes=8)
    assert [name for name, _ in choose(found)] == ["stem", "body.0#2", "body.1"]
    found[1] = replace(found[1], is_block=True)
    assert [name for name, _ in choose(found)] == ["stem", "body.0", "body.0#2", "body.1"]


def test_every_other_cut() -> None:
    assert choose(layers("body.0"), every=2) == [("stem", 0), ("body.1", 3)]
    assert choose(layers(), every=99) == [("stem", 0)]


def test_named_ones_in_the_order_of_the_layers() -> None:
    assert choose(layers(), "head, body.0#2,0,edge-only,input") == [("stem", 0), ("body.0#2", 2), ("head", 4)]


def test_sets_that_are_named_come_where_they_end() -> None:
    known = {"head + stem": LayerInfo(4, "stem + head", "set", 0, 8, True), "x + y": LayerInfo(1, "x", "", 0, 8, False)}
    found = choose(layers(), "head + stem,head,body.1", along=known.get)
    assert found == [("body.1", 3), ("head", 4), ("stem + head", 4)]
    with pytest.raises(CutRefused, match="after x"):
        choose(layers(), "x + y", along=known.get)
    with pytest.raises(UnknownLayer, match='no layer "no \\+ yes"'):
        choose(layers(), "no + yes", along=known.get)


@pytest.mark.parametrize("words", ["bod.1", "body.9", "", "stem,,head", "17"])
def test_an_unknown_cut_is_named(words: str) -> None:
    with pytest.raises(UnknownLayer, match="^cuts: no layer"):
        choose(layers(), words)


def test_near_matches_are_shown_and_refused_cuts_say_why() -> None:
    with pytest.raises(UnknownLayer, match="body.1"):
        choose(layers(), "bodi.1")
    with pytest.raises(CutRefused, match="it keeps state"):
        choose(layers("stem"), "stem")
    with pytest.raises(SpecError, match="not both"):
        choose(layers(), "stem", 2)


def test_a_sweep_without_files_sends_none_and_without_local_splits_has_none() -> None:
    names = [str(way) for way in ways_of([("stem", 0)], files=True, local=True)]
    assert names == ["edge-only", "cloud-only", "cloud-only-file", "stem", "stem (local)"]
    assert [str(way) for way in ways_of([("stem", 0)], files=False, local=False)] == ["edge-only", "cloud-only", "stem"]


@given(st.integers(0, 40), st.integers(1, 60))
def test_every_round_has_every_way_once_and_begins_elsewhere(cuts: int, rounds: int) -> None:
    ways = synthetic.ways(cuts)
    firsts = []
    for number in range(rounds):
        turn = rotated(ways, number, rounds)
        assert sorted(map(str, turn)) == sorted(map(str, ways))
        firsts.append(ways.index(turn[0]))
    assert firsts == sorted(firsts) and len(set(firsts)) == min(rounds, len(ways))

"""Requests that were cut earlier run on to a later cut and join its batch: where that was measured to be worth it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from shared_hooks import EarlyOutput
from shared_hooks.batching import Joinable, LaterCut, Ways
from shared_hooks.batching.proof import Seconds
from shared_hooks.errors import CutRefused
from shared_hooks.sharing import SharedCache
from tests.shared_hooks.batching.test_batches import INDEPENDENT, Sides
from tests.zoo.compare import same


def known(sides: Sides, ways: Ways, early: EarlyOutput) -> Joinable:
    sides.batches.learn(early.crossing)
    found = sides.batches.of(early.crossing)
    assert found is not None
    ways.record(found)
    return found


def learnt(sides: Sides, first: EarlyOutput, last: EarlyOutput) -> tuple[Ways, Joinable, Joinable, LaterCut]:
    ways = Ways(sides.batches)
    a, b = known(sides, ways, first), known(sides, ways, last)
    assert ways.way(a, b.batch_key) is None
    assert ways.learn(a) and not ways.learn(a) and not ways.learn(b)
    way = ways.way(a, b.batch_key)
    assert way is not None and ways.way(b, a.batch_key) is None
    return ways, a, b, way


@pytest.mark.parametrize(("name", "cuts"), [(name, cuts) for name, (_, _, cuts) in INDEPENDENT.items()], ids=str)
def test_joined_cuts_continue_each_heads_values(name: str, cuts: tuple[str, ...]) -> None:
    make, inputs, _ = INDEPENDENT[name]
    sides = Sides(make, inputs)
    asked = [inputs(1), inputs(1), inputs(2)]
    for first in cuts[:-1]:
        here, there = [sides.head(first, *one) for one in asked], [sides.head(cuts[-1], *one) for one in asked]
        ways, _, b, way = learnt(sides, here[0], there[0])
        before = [piece.clone() for piece in here[0].pieces]
        brought = ways.run(way, here[0], 1, b.proof)
        assert same(list(here[0].pieces), before), "it may have to go alone"
        assert same(list(brought.pieces), list(there[0].pieces))
        late = known(sides, ways, there[2])
        made = sides.batches.run([brought, there[1], there[2]], [b, b, late])
        assert [one.batch_size for one in made] == [3, 3, 3]
        assert all(sides.alike(one.output, own) for one, own in zip(made, asked, strict=True))


def test_more_rows_than_were_tried_have_no_way() -> None:
    sides = Sides(*INDEPENDENT["convolutions"][:2])
    ways = Ways(sides.batches)
    a = known(sides, ways, sides.head("a", torch.randn(4, 3, 8, 8)))
    b = known(sides, ways, sides.head("b", torch.randn(1, 3, 8, 8)))
    assert ways.learn(a) and not ways.learn(a), "it is tried once"
    assert ways.way(a, b.batch_key) is None


class Fixed(Seconds):
    """So long for a batch, and for each of its rows."""

    def __init__(self, each: float, once: float) -> None:
        super().__init__()
        self.each, self.once = each, once

    def of(self, rows: int) -> float | None:
        return self.once + self.each * rows


@pytest.mark.parametrize(
    ("once", "middle", "waiting", "joins"),
    [
        (10.0, 1.0, (3, 3), True),  # a tail that costs the same for one row and for many
        (10.0, 1.0, (1, 1), True),
        (10.0, 20.0, (1, 1), False),  # running on costs more than a tail of their own
        (0.0, 1.0, (3, 3), False),  # nothing to gain from rows
        (10.0, 1.0, (0, 3), False),  # nobody there
        (10.0, 1.0, (8, 8), False),  # each fills a batch
    ],
)
def test_cuts_join_if_faster(once: float, middle: float, waiting: tuple[int, int], joins: bool) -> None:
    sides = Sides(*INDEPENDENT["convolutions"][:2])
    x = torch.randn(1, 3, 8, 8)
    ways, a, b, way = learnt(sides, sides.head("a", x), sides.head("b", x))
    a.proof.seconds, b.proof.seconds = Fixed(1.0 + 1.0, once), Fixed(1.0, once)
    object.__setattr__(way, "seconds", Fixed(0.0, middle))
    rows = dict(zip((a.batch_key, b.batch_key), waiting, strict=True))
    assert ways.compatible_keys(a.batch_key, rows.__getitem__, 8) == [b.batch_key] * joins
    assert ways.compatible_keys(b.batch_key, rows.__getitem__, 8) == [a.batch_key] * joins
    assert ways.compatible_keys(-1, rows.__getitem__, 8) == []


def test_without_measurements_nothing_joins() -> None:
    sides = Sides(*INDEPENDENT["convolutions"][:2])
    x = torch.randn(1, 3, 8, 8)
    ways, a, b, _ = learnt(sides, sides.head("a", x), sides.head("b", x))
    assert a.proof.seconds.of(5) is not None, "it was timed where it was proven"
    a.proof.seconds = Seconds()
    assert ways.compatible_keys(b.batch_key, lambda batch_key: 2, 8) == []


def test_proofs_are_not_kept_for_a_way() -> None:
    sides = Sides(*INDEPENDENT["convolutions"][:2])
    x = torch.randn(1, 3, 8, 8)
    ways, a, b, _ = learnt(sides, sides.head("a", x), sides.head("b", x))
    gone, batch_key = weakref.ref(b.proof), a.batch_key
    sides.batches._proofs = SharedCache(1, 0)
    del a, b
    gc.collect()
    assert gone() is None and ways.compatible_keys(batch_key, lambda batch_key: 3, 8) == []


def test_a_way_to_another_cut_than_the_batch_is_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(*INDEPENDENT["convolutions"][:2])
    x = torch.randn(1, 3, 8, 8)
    ways, _, b, _ = learnt(sides, sides.head("a", x), sides.head("b", x))
    monkeypatch.setattr(b.proof.cut, "is_at", lambda crossing, rows: False)
    with pytest.raises(CutRefused, match="another cut"):
        ways.run(LaterCut(), sides.head("a", x), 1, b.proof)


def test_seconds_lie_on_lines_between_what_was_measured() -> None:
    seconds = Seconds()
    assert seconds.of(1) is None
    seconds.add(2, 4.0)
    assert seconds.of(2) == 4.0 and seconds.of(3) is None
    seconds.add(4, 6.0)
    assert [seconds.of(rows) for rows in (1, 3, 8)] == [3.0, 5.0, 10.0]
    for took in (6.2, 5.8, 60.0):
        seconds.add(4, took)
    assert seconds.of(4) in (6.0, 6.2), "one bad moment does not count"
    seconds.add(8, 5.0)
    assert seconds.of(16) == seconds.of(4), "more rows take no less"

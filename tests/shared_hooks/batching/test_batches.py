"""Frontiers of several requests as one batch: where it is proven, what each gets, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks import EarlyOutput, RehearsalLimits, WrappedModel
from shared_hooks.batching import Batches
from shared_hooks.batching.proof import agree
from shared_hooks.errors import CutRefused, InputMismatch
from shared_hooks.tensors import flatten
from tests.shared_hooks.batching.models import (
    Capturing,
    Chooses,
    Conv,
    Meets,
    Mixes,
    OneRowIsSpecial,
    Sequence,
    Waits,
    Words,
)
from tests.zoo.branching import made

Inputs = Callable[[int], tuple[torch.Tensor, ...]]

INDEPENDENT: dict[str, tuple[Callable[[], nn.Module], Inputs, tuple[str, ...]]] = {
    "convolutions": (Conv, lambda n: (torch.randn(n, 3, 8, 8),), ("input", "a", "b")),
    "tokens": (
        Words,
        lambda n: (torch.randint(20, (n, 5)), torch.arange(5).repeat(n, 1)),
        ("input", "words", "layers.layers.0"),
    ),
    "sequences": (Sequence, lambda n: (torch.randn(5, n, 8),), ("input", "lstm", "layers.layers.0")),
    "channels last": (
        Conv,
        lambda n: (torch.randn(n, 3, 8, 8).contiguous(memory_format=torch.channels_last),),
        ("input", "b"),
    ),
    "chosen by data": (Chooses, lambda n: (torch.randn(n, 3, 8, 8),), ("input", "a")),
    "one row is special": (OneRowIsSpecial, lambda n: (torch.randn(n, 8),), ("input", "a")),
}


class Sides:
    """An edge and a server of one model, whose example has two rows."""

    def __init__(self, make: Callable[[], nn.Module], inputs: Inputs) -> None:
        torch.manual_seed(0)
        self.model = make().eval()
        self.edge, self.server = WrappedModel(self.model), WrappedModel(self.model)
        self.batches = Batches(self.server, lambda: (inputs(2), {}), seconds_a_minute=1e9)

    def head(self, cut: str, *inputs: torch.Tensor) -> EarlyOutput:
        return self.edge.head(cut, *inputs)

    def run(self, earlies: list[EarlyOutput], end: str = "") -> list[Any]:
        """Their outputs, or what crosses at ``end``, out of one batch."""
        known = []
        for early in earlies:
            self.batches.learn(early.crossing, end)
            found = self.batches.of(early.crossing, end)
            assert found is not None, self.batches.reason(early.crossing, end)
            known.append(found)
        made = self.batches.run(earlies, known)
        assert [one.batch_size for one in made] == [len(earlies)] * len(earlies)
        return [one.output for one in made]

    def alike(self, output: Any, inputs: tuple[torch.Tensor, ...]) -> bool:
        """Whether it is the model's own, but for rounding."""
        with torch.no_grad():
            (structure, found), (wanted_structure, wanted) = flatten(output), flatten(self.model(*inputs))
        return structure == wanted_structure and all(map(agree, found, wanted))


@pytest.mark.parametrize(
    ("name", "cut"), [(name, cut) for name, (_, _, cuts) in INDEPENDENT.items() for cut in cuts], ids=str
)
def test_batched_answers_equal_single_ones(name: str, cut: str) -> None:
    make, inputs, _ = INDEPENDENT[name]
    sides = Sides(make, inputs)
    asked = [inputs(rows) for rows in (1, 3, 1, 4)]  # 4 was never planned, nor 9 together
    outputs = sides.run([sides.head(cut, *one) for one in asked])
    assert all(sides.alike(output, one) for output, one in zip(outputs, asked, strict=True))


MIDDLES = [
    ("convolutions", "a", "b"),
    ("convolutions", "input", "a"),
    ("tokens", "words", "layers.layers.0"),
    ("tokens", "input", "layers.layers.0"),
    ("sequences", "lstm", "layers.layers.0"),
    ("channels last", "input", "b"),
    ("one row is special", "input", "a"),
]


@pytest.mark.parametrize(("name", "cut", "end"), MIDDLES)
def test_middle_parts_give_what_each_gives_alone(name: str, cut: str, end: str) -> None:
    make, inputs, _ = INDEPENDENT[name]
    sides = Sides(make, inputs)
    asked = [inputs(rows) for rows in (1, 3, 1, 4)]
    crossed = sides.run([sides.head(cut, *one) for one in asked], end)
    for one, early in zip(asked, crossed, strict=True):
        alone = sides.edge.forward(sides.head(cut, *one), end=end)
        assert early.crossing.to_bytes() == alone.crossing.to_bytes(), "the next server sees no difference"
        assert all(map(agree, early.pieces, alone.pieces))
        assert sides.alike(sides.edge.tail(EarlyOutput.from_bytes(early.to_bytes())), one)


def test_tails_and_middle_parts_are_no_batch_together() -> None:
    sides = Sides(*INDEPENDENT["convolutions"][:2])
    early = sides.head("a", torch.randn(1, 3, 8, 8))
    known = []
    for end in ("", "b"):
        sides.batches.learn(early.crossing, end)
        known.append(sides.batches.of(early.crossing, end))
    assert known[0] is not None and known[1] is not None and known[0].batch_key != known[1].batch_key
    with pytest.raises(InputMismatch, match="no batch"):
        sides.batches.run([early, early], known)  # type: ignore[arg-type]


def test_a_middle_part_in_which_rows_meet_goes_alone() -> None:
    sides = Sides(lambda: Mixes("mean"), lambda n: (torch.randn(n, 8),))
    early = sides.head("a", torch.randn(1, 8))
    sides.batches.learn(early.crossing, "b")
    assert sides.batches.of(early.crossing, "b") is None and sides.batches.reason(early.crossing, "b")
    sides.batches.learn(early.crossing, "nowhere")
    assert "nowhere" in sides.batches.reason(early.crossing, "nowhere")


def test_cuts_along_branches_join_as_single_cuts_do() -> None:
    sides = Sides(lambda: made("two towers"), lambda n: (torch.randn(n, 8), torch.randn(n, 8)))
    asked = [(torch.randn(rows, 8), torch.randn(rows, 8)) for rows in (1, 3, 1, 4)]
    outputs = sides.run([sides.head("left.0 + right.0", *one) for one in asked])
    assert all(sides.alike(output, one) for output, one in zip(outputs, asked, strict=True))
    early = sides.head("left.0 + right.0", *asked[0])
    assert early.crossing.later
    sides.batches.learn(early.crossing, "head")
    assert "not along branches" in sides.batches.reason(early.crossing, "head")


def test_a_row_of_nan_stays_alone_and_the_others_bits_do_not_change() -> None:
    sides = Sides(*INDEPENDENT["convolutions"][:2])
    asked = [torch.randn(1, 3, 8, 8) for _ in range(3)]
    before = sides.run([sides.head("a", x) for x in asked])
    asked[1] = torch.full_like(asked[1], torch.nan)
    after = sides.run([sides.head("a", x) for x in asked])
    assert after[1]["scores"].isnan().all()
    for number in (0, 2):
        assert torch.equal(before[number]["scores"], after[number]["scores"])


def test_a_foretold_frontier_whose_storages_are_whole_joins_planned_ones() -> None:
    sides = Sides(*INDEPENDENT["tokens"][:2])
    _, inputs, _ = INDEPENDENT["tokens"]
    asked = [inputs(rows) for rows in (1, 2, 3, 5)]
    earlies = [sides.head("words", *one) for one in asked]
    assert not earlies[-1].crossing.plan_digest, "it was to be predicted"
    outputs = sides.run([earlies[-1], earlies[0]])
    assert sides.alike(outputs[0], asked[-1]) and sides.alike(outputs[1], asked[0])


def test_values_outside_rows_must_be_equal_in_a_batch() -> None:
    sides = Sides(*INDEPENDENT["tokens"][:2])
    ids, one, other = torch.randint(20, (2, 5)), torch.arange(5)[None], torch.arange(1, 6)[None]
    first, same = (sides.head("input", ids, one) for _ in range(2))
    assert sides.alike(sides.run([first, same])[0], (ids, one))
    with pytest.raises(InputMismatch, match="belongs to no row"):
        sides.run([first, sides.head("input", ids, other)])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("mean", "do not give what they give alone"),
        ("hardly", "changes other rows"),
        ("scale", "do not give what they give alone"),
        ("reads", "decides by what it reads"),
        ("draws", "random numbers"),
        ("total", "an output has no dimension of its rows"),
    ],
)
def test_no_batch_where_rows_influence_each_other_or_may_do_so(how: str, reason: str) -> None:
    sides = Sides(lambda: Mixes(how), lambda n: (torch.randn(n, 8),))
    early = sides.head("a", torch.randn(1, 8))
    sides.batches.learn(early.crossing)
    assert sides.batches.of(early.crossing) is None
    assert reason in sides.batches.reason(early.crossing)


def test_behind_what_mixes_rows_of_one_request_others_may_join() -> None:
    sides = Sides(lambda: Mixes("mean"), lambda n: (torch.randn(n, 8),))
    asked = [torch.randn(2, 8), torch.randn(3, 8)]
    outputs = sides.run([sides.head("b", x) for x in asked])
    assert all(sides.alike(output, (x,)) for output, x in zip(outputs, asked, strict=True))


def test_each_new_size_is_tried_before_it_is_used() -> None:
    """Seven rows were no part of the proof, and are where this model begins to mix them."""
    sides = Sides(lambda: Mixes("large"), lambda n: (torch.randn(n, 8),))
    early = sides.head("a", torch.randn(1, 8))
    sides.run([early] * 6)
    with pytest.raises(CutRefused, match="7 rows together do not give what they give alone"):
        sides.run([early] * 7)
    assert sides.batches.of(early.crossing) is None, "it is not tried again at once"


def test_state_built_before_the_plan_does_not_prevent_batching() -> None:
    """The edge's plan saw it come, the server's does not."""
    sides = Sides(Capturing, lambda n: (torch.randn(n, 8),))
    x = torch.randn(1, 8)
    early = sides.head("a", x)
    assert early.crossing.leaves
    assert sides.alike(sides.run([early, early])[0], (x,))


def test_frontiers_of_two_cuts_are_no_batch() -> None:
    sides = Sides(*INDEPENDENT["convolutions"][:2])
    x = torch.randn(1, 3, 8, 8)
    one, other = sides.head("a", x), sides.head("b", x)
    sides.run([one, one]), sides.run([other, other])
    with pytest.raises(InputMismatch, match="several cuts"):
        sides.run([one, other])


def test_a_cut_that_this_side_would_not_make_is_not_joined() -> None:
    """Its forms are believed by nobody: a crossing that says something else of the same inputs is another cut."""
    sides = Sides(*INDEPENDENT["convolutions"][:2])
    early = sides.head("a", torch.randn(1, 3, 8, 8))
    lying = replace(early.crossing, marks=(*early.crossing.marks, early.crossing.marks[0]), cache={})
    sides.batches.learn(lying)
    assert sides.batches.of(lying) is None and "another cut" in sides.batches.reason(lying)


def test_a_batch_that_would_take_too_much_memory_is_made_in_parts() -> None:
    make, inputs, _ = INDEPENDENT["convolutions"]
    sides = Sides(make, inputs)
    sides.batches = Batches(sides.server, max_bytes=7 * 8 * 64 * 4)
    earlies = [sides.head("a", *inputs(1)) for _ in range(8)]
    sides.batches.learn(earlies[0].crossing)
    known = sides.batches.of(earlies[0].crossing)
    assert known is not None
    made = sides.batches.run(earlies, [known] * 8)
    assert [one.batch_size for one in made] == [4] * 8


def test_inputs_of_which_the_model_would_make_too_much_are_not_run() -> None:
    """What crosses late is small, whatever a client says that its inputs were."""
    make, inputs, _ = INDEPENDENT["convolutions"]
    sides = Sides(make, inputs)
    limits = RehearsalLimits(elements=500)
    sides.batches = Batches(WrappedModel(sides.model, rehearsals=limits))
    early = sides.head("head", *inputs(1))
    sides.batches.learn(early.crossing)
    assert "dimension 0: on inputs of this form the model computes too many" in sides.batches.reason(early.crossing)


def test_unbounded_loop_is_not_run_on_random_inputs() -> None:
    """A loop until the data says so: the example shows it, and without one nobody foresees its end."""
    for example in (lambda: ((torch.ones(2, 8),), {}), lambda: None):
        sides = Sides(Waits, lambda n: (torch.ones(n, 8),))
        early = sides.head("b", torch.ones(1, 8))
        sides.batches = Batches(sides.server, example)
        sides.batches.learn(early.crossing)
        reason = sides.batches.reason(early.crossing)
        assert "decides by what it reads" in reason or "cannot be foreseen" in reason


def test_proofs_take_no_more_of_a_minute_than_they_may() -> None:
    make, inputs, _ = INDEPENDENT["convolutions"]
    sides = Sides(make, inputs)
    sides.batches = Batches(sides.server, seconds_a_minute=1e-9)
    one, other = sides.head("a", *inputs(1)), sides.head("b", *inputs(1))
    assert sides.batches.learn(one.crossing) and not sides.batches.learn(one.crossing)
    assert not sides.batches.learn(other.crossing) and sides.batches.of(other.crossing) is None


@pytest.mark.parametrize("how", ["capacity", "the sizes of experts", "an order", "a table by rows", "a word", "counts"])
def test_no_batch_where_chosen_rows_could_meet_though_random_ones_do_not(how: str) -> None:
    sides = Sides(lambda: Meets(how), lambda n: (torch.randn(n, 8),))
    early = sides.head("a", torch.randn(1, 8))
    sides.batches.learn(early.crossing)
    assert sides.batches.of(early.crossing) is None
    assert sides.batches.reason(early.crossing)


def test_a_spot_check_that_fails_ends_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_hooks.batching.batches.SPOT", 2)
    sides = Sides(*INDEPENDENT["convolutions"][:2])
    asked = [torch.randn(1, 3, 8, 8) for _ in range(3)]
    for _ in range(4):
        sides.run([sides.head("a", one) for one in asked])
    assert sides.batches.spot_checks == 2
    monkeypatch.setattr("shared_hooks.batching.batches.agree", lambda *_: False)
    early = sides.head("a", asked[0])
    known = sides.batches.of(early.crossing)
    assert known is not None
    sides.run([sides.head("a", one) for one in asked])
    with pytest.raises(CutRefused, match="this model takes no batches"):
        sides.batches.run([early, early], [known, known])
    assert sides.batches.of(early.crossing) is None and not sides.batches.learn(early.crossing)

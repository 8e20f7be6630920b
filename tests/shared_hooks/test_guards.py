"""Guards whose absence nothing else would notice: faults that went unseen (`python -m studies.mutation`)."""

from __future__ import annotations

import dis
import itertools
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.batching.proof import Seconds
from shared_hooks.crossing.description import TensorForm
from shared_hooks.crossing.parcel import parameters_of
from shared_hooks.errors import BadFrame
from shared_hooks.metrics.measurement import NO_TIME, _energy
from shared_hooks.metrics.records import Reading
from shared_hooks.purity import is_pure
from shared_hooks.state import PoisonRead, Settings, agree, first_few
from shared_hooks.state.probes import probe_of
from shared_hooks.state.python_state import Poison, remains
from shared_hooks.state.reach import MISSING, Container, steps_of


def test_bytes_of_a_form_are_elements_times_their_size() -> None:
    assert TensorForm((2, 3), (3, 1), torch.float64).nbytes == 48
    assert TensorForm((2, 3), (0, 0), torch.int16).nbytes == 12
    assert TensorForm((), (), torch.bool).nbytes == 1


def test_times_between_and_beyond_what_was_measured() -> None:
    times = Seconds()
    assert times.of(1) is None
    for rows, seconds in ((2, 0.2), (4, 0.4), (8, 0.6)):
        times.add(rows, seconds)
    assert [times.of(rows) for rows in (2, 3, 6, 8)] == pytest.approx([0.2, 0.3, 0.5, 0.6])
    assert [times.of(rows) for rows in (1, 16)] == pytest.approx([0.1, 1.0])


@pytest.mark.parametrize("parameter", [1 << 63, -(1 << 63) - 1, math.nan, "x" * 10_000, None, [1]])
def test_a_codecs_parameters_are_numbers_of_64_bits_and_short_texts(parameter: Any) -> None:
    assert parameters_of([(1 << 63) - 1, -(1 << 63), 0.5, "x"])
    with pytest.raises(BadFrame):
        parameters_of([parameter])


def test_power_of_no_time_is_none() -> None:
    track: Any = SimpleNamespace(growth=lambda start, stop: Reading.measured(2.0, "a meter"))
    assert _energy(track, 5, 5) == (Reading.measured(2.0, "a meter"), NO_TIME)
    assert _energy(track, 6, 5)[1] == NO_TIME
    assert _energy(track, 0, 1_000_000_000)[1].value == 2.0


def test_names_are_reported_to_the_third() -> None:
    assert [first_few("abcd"[:count]) for count in (1, 3, 4)] == ["a", "a, b, c", "a, b, c and 1 more"]
    assert first_few("aaaa") == "a"


def test_values_agree_to_their_depth_and_in_their_kinds() -> None:
    same, other = [[[[1, torch.ones(2)]]]], [[[[1, torch.ones(2)]]]]
    assert agree(same, other, lambda _: False)
    assert not agree(same, other, lambda value: isinstance(value, torch.Tensor))
    assert not agree([[[[[[1]]]]]], [[[[[[1]]]]]], lambda _: False)  # deeper than is looked
    for before, now in ((0.0, -0.0), (1, True), ([1], (1,)), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (1, 2)):
        assert not agree(before, now, lambda _: False), (before, now)
    assert agree(math.nan, math.nan, lambda _: False) and not agree(MISSING, MISSING, lambda _: False)


def test_a_set_that_shrinks_has_changed() -> None:
    held = [1, 2, 3]
    place = Container("held", held, held, lambda one: None)
    held.pop()
    (change,) = place.changes()
    assert (change.before, change.now) == (3, 2)
    held += [7, 8]
    assert [one.now for one in place.changes()] == [7, 8]


def test_poison_is_found_where_it_lies() -> None:
    assert remains(Poison()) and remains([{"a": (Poison(),)}])
    assert not remains([{"a": (1, "b")}]) and not remains(1)


def test_torch_finds_nothing_in_poison_that_it_takes_for_a_generator() -> None:
    """It takes an object for one if ``isinstance`` raises; what it read there ended a process on Python 3.13."""
    with pytest.raises(SystemError) as caught:
        torch.rand(8, generator=Poison())
    assert isinstance(caught.value.__cause__, PoisonRead)


def test_instructions_that_python_has_fused_are_two_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.13 and 3.14 compile ``self, x = ...; self.a = x``, in whichever this is."""
    found = [
        ("STORE_FAST_STORE_FAST", ("self", "x"), "self, x"),
        ("LOAD_FAST_BORROW_LOAD_FAST_BORROW", ("x", "self"), "x, self"),
        ("STORE_ATTR", "a", "a"),
        ("CACHE", None, ""),
        ("LOAD_CONST", (1, 2), "(1, 2)"),
    ]
    monkeypatch.setattr(
        dis,
        "get_instructions",
        lambda code: [SimpleNamespace(opname=name, argval=value, argrepr=text) for name, value, text in found],
    )
    names = [(step.opname, step.argval) for step in steps_of(test_poison_is_found_where_it_lies.__code__)]
    assert names == [
        ("STORE_FAST", "self"),
        ("STORE_FAST", "x"),
        ("LOAD_FAST", "x"),
        ("LOAD_FAST", "self"),
        ("STORE_ATTR", "a"),
        ("LOAD_CONST", (1, 2)),
    ]


def test_a_generator_is_where_it_was_only_before_its_first_value_and_after_its_last() -> None:
    steps = (number for number in range(3))
    probe = probe_of(steps)
    assert probe is not None
    unstarted = probe.now()
    assert probe.now() == unstarted
    next(steps)
    between = probe.now()
    assert between != unstarted and probe.now() != between
    assert list(steps) == [1, 2]
    ended = probe.now()
    assert probe.now() == ended and ended != unstarted


def test_settings_that_a_run_leaves_are_seen_and_put_back() -> None:
    relu, settings = nn.functional.relu, Settings()
    assert not settings.changed()
    nn.functional.relu = torch.tanh
    try:
        assert settings.changed()
        settings.restore()
        assert nn.functional.relu is relu and not settings.changed()
    finally:
        nn.functional.relu = relu
    if torch.set_flush_denormal(True):
        try:
            assert sys.float_info.min / 2 == 0.0 and settings.changed()
            settings.restore()
            assert sys.float_info.min / 2 != 0.0
        finally:
            torch.set_flush_denormal(False)


class Indexed(nn.Module):
    """Takes one of two modules by a number that is in its source."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        pair = (self.inner, values)
        return pair[0](pair[1]) + pair[1]


class IndexedBeyond(Indexed):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        pair = (self.inner, values)
        return pair[2] + values


def test_an_index_of_a_tuple_says_what_is_taken() -> None:
    assert is_pure(Indexed())
    assert not is_pure(IndexedBeyond())  # it fails, whatever it would have been


def test_times_of_one_size_are_bounded() -> None:
    times = Seconds()
    for rows in itertools.chain(range(1, 2000), range(1, 2000)):
        times.add(rows, 1.0)
    assert len(times._seen) < 1000

"""The arithmetic of the row `overlap`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from studies.benchmarks.overlap import Section, one_after_the_other, section_by_section

RATE = 1e6
TAIL = 0.5
durations = some.floats(0, 1)
several = some.lists(some.tuples(durations, durations, some.integers(0, 10**6), durations), min_size=1, max_size=5)


def sections_of(each: list[tuple[float, float, int, float]]) -> list[Section]:
    """Of (head since the section before, encode, bytes, decode)."""
    ready, found = 0.0, []
    for head, encode, nbytes, decode in each:
        ready += head
        found.append(Section(ready, encode, nbytes, decode))
    return found


@given(several)
def test_sections_gain_never_more_than_all_that_is_not_slowest_and_lose_nothing(
    each: list[tuple[float, float, int, float]],
) -> None:
    sections = sections_of(each)
    then, now = section_by_section(sections, RATE, TAIL), one_after_the_other(sections, RATE, TAIL)
    edge = sections[-1].ready + sum(one.encode for one in sections)
    link, decoding = sum(one.nbytes for one in sections) / RATE, sum(one.decode for one in sections)
    assert max(edge, link, decoding) + TAIL <= then + 1e-9
    assert then <= now + 1e-9


def test_one_section_gains_nothing_and_an_early_one_travels_beside_the_head() -> None:
    one = [Section(1.0, 0.25, 2_000_000, 0.125)]
    assert section_by_section(one, RATE, TAIL) == one_after_the_other(one, RATE, TAIL) == pytest.approx(3.875)
    two = [Section(1.0, 0.0, 2_000_000, 0.0), Section(4.0, 0.0, 1_000_000, 0.0)]
    assert one_after_the_other(two, RATE, TAIL) == pytest.approx(7.5)
    assert section_by_section(two, RATE, TAIL) == pytest.approx(5.5)

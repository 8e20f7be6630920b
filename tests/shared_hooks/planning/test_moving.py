"""Whole numbers that move with a length, or with a batch and a length, are found from a few sizes."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from shared_hooks.planning import MovingSizes, Size

NUMBERS = st.integers(0, 9)


def numbers(terms: tuple[int, ...], batch: int, length: int) -> int:
    """``terms``: of 1, L, L^2, and of B times each."""
    return sum(factor * length**power for power, factor in enumerate(terms[:3])) + batch * sum(
        factor * length**power for power, factor in enumerate(terms[3:])
    )


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 40))
def test_a_length(rows: list[tuple[int, int]], first: int, asked: int) -> None:
    lengths = [first + more for more in range(3)]
    moving = MovingSizes.of([[a * length * length + b * length for a, b in rows] for length in lengths], lengths)
    assert moving is not None
    assert moving.at(asked) == [a * asked * asked + b * asked for a, b in rows]


@given(
    st.lists(st.tuples(*[NUMBERS] * 6), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 9),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
)  # fmt: skip
def test_a_batch_and_a_length(rows: list[tuple[int, ...]], batch: int, length: int, asked: tuple[int, int]) -> None:
    for row in rows:  # a square of a length has no constant beside it: that is no rule of a model's sizes
        for part in (row[:3], row[3:]):
            assume(not (part[0] and part[2]))
        assume(not (row[2] + row[5]) or not (row[0] + row[3]))
    sizes: list[Size] = [(batch + more, length + one) for more in range(2) for one in range(3)]
    made = [[numbers(row, *size) for row in rows] for size in sizes if isinstance(size, tuple)]
    moving = MovingSizes.of(made, sizes)
    assert moving is not None
    assert moving.at(asked) == [numbers(row, *asked) for row in rows]


def test_irregular_sizes_are_not_predicted() -> None:
    lengths = [2, 3, 4]
    moving = MovingSizes.of([[1], [2], [4]], lengths)
    assert moving is not None and moving.at(5) is None
    odd = MovingSizes.of([[size // 2] for size in lengths], lengths)
    assert odd is not None and odd.at(6) is None
    pairs: list[Size] = [(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (3, 4)]
    two = MovingSizes.of([[0], [0], [0], [1], [2], [4]], pairs)
    assert two is not None and two.at((4, 4)) is None
    assert MovingSizes.of([[1], [1, 2], [1]], lengths) is None

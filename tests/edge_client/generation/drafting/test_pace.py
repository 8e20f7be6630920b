"""How many tokens are drafted, against a simulated server: close to the best constant number, whatever it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from edge_client.generation.drafting import AGAIN, Measured, Pace, Worth

STEPS = 600


class Simulated:
    """Steps of ``base`` + ``slope`` n seconds, with noise, and ``begin`` more where anything is drafted; the i-th token
    is accepted with ``rates[i]``.
    """

    def __init__(self, rates: Sequence[float], base: float, slope: float, begin: float = 0.0, *, seed: int = 0) -> None:
        self.rates, self.base, self.slope, self.begin = rates, base, slope, begin
        self._random = random.Random(seed)

    def rate(self, tokens: int) -> float:
        """Tokens a second with so many drafted, in the mean."""
        expected = reached = 1.0
        for number in range(tokens):
            reached *= self.rates[min(number, len(self.rates) - 1)]
            expected += reached
        return expected / self.seconds(tokens)

    def seconds(self, tokens: int) -> float:
        return self.base + self.slope * tokens + self.begin * (tokens > 0)

    def best(self, most: int = 32) -> float:
        return max(self.rate(tokens) for tokens in range(most + 1))

    def run(self, pace: Pace, steps: int = STEPS) -> float:
        """Tokens a second that were expected, over the later half."""
        seconds = tokens = 0.0
        for step in range(steps):
            asked = pace.choose()
            accepted = 0
            while accepted < asked and self._random.random() < self.rates[min(accepted, len(self.rates) - 1)]:
                accepted += 1
            pace.step(asked, asked, accepted, self.seconds(asked) * self._random.uniform(0.9, 1.1))
            if 2 * step >= steps:
                mean = self.seconds(asked)
                seconds, tokens = seconds + mean, tokens + self.rate(asked) * mean
        return tokens / seconds


PLACES = {
    "long round trip, good drafts": ([0.9], 0.060, 0.002),
    "long round trip, bad drafts": ([0.2], 0.060, 0.002),
    "drafts are copies or nothing": ([0.4, 0.98], 0.060, 0.002),
    "tokens cost as much as steps": ([0.8], 0.010, 0.010),
    "drafts that never hold and cost": ([0.02], 0.010, 0.005),
    "drafts are slow to begin and pay": ([0.8], 0.040, 0.002, 0.020),
    "drafts are too slow to begin": ([0.3], 0.010, 0.001, 0.020),
    "nothing costs": ([0.99], 0.050, 0.0001),
}


@pytest.mark.parametrize("place", PLACES)
def test_close_to_the_best_constant_number(place: str) -> None:
    for seed in range(3):
        world = Simulated(*PLACES[place], seed=seed)
        assert world.run(Measured()) > 0.9 * world.best()


def test_draft_length_follows_changes() -> None:
    pace = Measured()
    before = Simulated([0.05], 0.01, 0.008)
    assert before.run(pace) > 0.9 * before.best()
    after = Simulated([0.9], 0.08, 0.001)
    assert after.run(pace, 300) > 0.9 * after.best()
    assert before.run(pace, 300) > 0.9 * before.best()


@pytest.mark.parametrize(
    ("longer", "shorter"),
    [(([0.9], 0.1, 0.004), ([0.5], 0.1, 0.004)), (([0.8], 0.2, 0.004), ([0.8], 0.02, 0.004))],
)
def test_better_drafts_and_longer_round_trips_give_longer_drafts(
    longer: tuple[list[float], float, float], shorter: tuple[list[float], float, float]
) -> None:
    def chosen(place: tuple[list[float], float, float]) -> int:
        pace = Measured()
        Simulated(*place).run(pace)
        return pace.choose()

    assert chosen(longer) > chosen(shorter)


def test_drafts_that_did_not_pay_are_tried_again_now_and_then() -> None:
    pace, asked = Measured(), []
    for _ in range(300):
        asked.append(pace.choose())
        pace.step(asked[-1], asked[-1], 0, 0.01 + 0.002 * asked[-1])
    assert asked[60:].count(0) > 180
    assert max(asked[60:]) > 0


@pytest.mark.parametrize("seconds", [lambda asked: None, lambda asked: 0.0, lambda asked: 1e-12])
def test_times_that_tell_nothing(seconds: Callable[[int], float | None]) -> None:
    pace = Measured(most=8)
    for _ in range(20):
        asked = pace.choose()
        assert 0 <= asked <= 8
        pace.step(asked, min(asked, 2), min(asked, 1), seconds(asked))


def test_a_search_that_finds_nothing_is_no_rejection() -> None:
    pace = Measured()
    before = pace.rates()
    for _ in range(50):
        pace.step(4, 0, 0, 0.05)
    assert pace.rates() == before


def test_steps_ahead_are_left_where_they_are_slower_and_tried_again() -> None:
    worth = Worth()
    assert worth.pays
    for _ in range(4):
        worth.step(False, 2, 0.1)
        worth.step(True, 3, 0.1)
    assert worth.pays
    for _ in range(40):
        worth.step(True, 2, 0.3)
    assert not worth.pays
    for _ in range(AGAIN):
        worth.step(False, 2, 0.1)
    assert worth.pays  # the processor may be free again

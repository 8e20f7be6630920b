"""When the link is probed, and how: little where it is slow, and never for what would change nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.adaptive.controller import SECOND, Probing
from edge_client.adaptive.monitor import FIRST, probed
from edge_client.planning.link import FLOOR
from shared_hooks.errors import ServerUnavailable

LARGEST = 128 << 10
MS = 1_000_000


class Bucket:
    """A link of ``rate`` bytes a second behind a bucket of ``burst``; ``stalls``: what the next take more (ns)."""

    def __init__(self, rate: float, burst: int = 0, stalls: tuple[float, ...] = ()) -> None:
        self.rate, self.tokens, self.stalls = rate, burst, list(stalls)
        self.sent: list[int] = []

    def __call__(self, large: int, small: int) -> tuple[float, float]:
        self.sent += [large, small]
        took = []
        for nbytes in (large, small):
            free = min(self.tokens, nbytes)
            self.tokens -= free
            took.append((nbytes - free) / self.rate * 1e9)
        stall = self.stalls.pop(0) if self.stalls else 0.0
        return took[1] + stall, sum(took) + stall


def rate_of(link: Bucket, believed: float = 12.5e6, largest: int = LARGEST) -> float:
    return probed(link, 20.0 * MS, largest, 1e9 / believed, 1.5e9).up.bytes_per_second


@given(mbit=st.floats(0.1, 2000), burst=st.integers(0, FIRST), largest=st.integers(2, 1 << 20))
def test_probe_finds_the_rate_behind_a_small_bucket(mbit: float, burst: int, largest: int) -> None:
    rate = mbit * 125_000
    found = rate_of(Bucket(rate, min(burst, largest)), largest=largest)
    assert found >= 0.99 * min(rate, 1e9)
    if largest >= FIRST:
        assert found <= 1.7 * rate


def test_probes_are_small_on_a_slow_link() -> None:
    slow = Bucket(125_000)
    assert rate_of(slow) == pytest.approx(125_000)
    assert sum(slow.sent) <= 3 * FIRST  # twice, for the first was a surprise
    again = Bucket(125_000)
    assert rate_of(again, believed=125_000) == pytest.approx(125_000)
    assert sum(again.sent) <= 1.5 * FIRST


def test_probe_grows_within_a_large_bucket() -> None:
    link = Bucket(125_000, 48 << 10)
    assert rate_of(link) == pytest.approx(125_000, rel=0.01)
    assert max(link.sent) == 4 * FIRST


def test_a_stall_is_not_the_link() -> None:
    assert rate_of(Bucket(12.5e6, stalls=(60.0 * MS,))) == pytest.approx(12.5e6, rel=0.01)


def test_lost_probe_bounds_the_speed() -> None:
    def never(large: int, small: int) -> tuple[float, float]:
        raise ServerUnavailable("late")

    assert rate_of(never) == pytest.approx(1.5 * FIRST / 1.5)  # type: ignore[arg-type]


class Asked:
    """A schedule, and how often it asked what a better link would gain."""

    def __init__(self, gain: float = 0.5, largest: int = LARGEST) -> None:
        self.probing, self.gain, self.looked = Probing(largest), gain, 0

    def __call__(
        self, now: float, *, doubtful: bool = False, shared: bool = True, congested: bool = False
    ) -> int | None:
        return self.probing.wants(
            int(now * SECOND),
            doubtful=doubtful,
            congested=congested,
            shared=shared,
            goodput=12.5e6,
            gain=self._gain,
        )

    def _gain(self) -> float:
        self.looked += 1
        return self.gain

    def probes(self, seconds: float, took: float = 0.05, **more: bool) -> list[float]:
        found, at = [], 0.0
        while at < seconds:
            if self(at, **more) is not None:
                found.append(at)
                self.probing.ended(int((at + took) * SECOND), news=False)
            at += 0.05
        return found


def test_a_link_that_could_not_move_the_choice_is_not_probed() -> None:
    asked = Asked(gain=0.0)
    assert asked.probes(60) == [] and asked.probes(60, doubtful=True) == []
    assert asked.looked <= 130  # once a second: to look costs a millisecond
    asked.probing.moved(60 * SECOND)
    assert asked(60.1) is None and asked.looked <= 131
    assert asked(200, congested=True, doubtful=True) is not None  # for what came late says more than a prediction


@pytest.mark.parametrize(("gain", "least", "most"), [(0.9, 20, 32), (0.15, 8, 20)])
def test_probes_are_rarer_with_less_to_gain(gain: float, least: int, most: int) -> None:
    assert least <= len(Asked(gain).probes(60)) <= most


def test_probe_of_an_idle_link_may_take_longer() -> None:
    assert len(Asked(0.15).probes(60, took=0.5, shared=False)) > 20
    assert len(Asked(0.15).probes(60, took=0.5)) < 4


def test_doubts_are_looked_into_soon_and_then_more_and_more_rarely() -> None:
    found = Asked().probes(60, took=0.2, doubtful=True)
    gaps = [late - early for early, late in itertools.pairwise(found)]
    assert gaps[0] <= 1.5 and 5 < len(found) < 40


def test_traffic_beside_a_probe_is_counted() -> None:
    asked = Asked()
    probing = asked.probing
    assert asked(0.0) == LARGEST and not probing.was_behind(0) and probing.shared_with(0)
    probing.sends(1000)
    probing.sends(500)
    assert probing.under_way == 1500
    probing.ended(SECOND, news=True)
    assert probing.under_way == 0 and probing.was_behind(SECOND - 1) and not probing.shared_with(SECOND)
    assert asked(30.0) is not None
    probing.gave_up()
    assert probing.under_way == 0 and not probing.shared_with(31 * SECOND)


def test_moves_that_requests_revoke_make_probes_larger_and_not_without_end() -> None:
    probing = Probing(1 << 20)
    sizes = []
    for at in range(0, 60 * SECOND, 4 * SECOND):
        asked = probing.wants(at, doubtful=False, congested=False, shared=False, goodput=1.0, gain=lambda: 1.0)
        assert asked is not None
        sizes.append(asked)
        probing.ended(at + MS, news=True)
        probing.moved(at + 2 * MS)
        probing.moved(at + SECOND)
    assert sizes[0] == FLOOR and sizes[-1] == 8 * FLOOR

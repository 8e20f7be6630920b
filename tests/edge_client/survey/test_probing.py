"""What a probe makes of its rounds, on links in virtual time: fast, slow, behind a token bucket."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace, TracebackType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client import probing
from edge_client.call import Load
from edge_client.planning.link import Link
from edge_client.probing import Round
from shared_hooks.errors import TooLarge


class VirtualLink:
    """Rounds take what a link of ``mbit`` behind a bucket of ``burst`` bytes makes of them; time is virtual."""

    def __init__(self, mbit: float, burst: int = 0, rtt_ms: float = 10.0, most: int = 1 << 30) -> None:
        self.rate, self.burst, self.rtt, self.most = mbit * 125_000, burst, rtt_ms / 1e3, most
        self.now = self.filled_at = 0.0
        self.tokens = float(burst)
        self.largest = 0

    def __enter__(self) -> VirtualLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def round(self, nbytes: int, answer_bytes: int, patience: float) -> Round:
        if nbytes > self.most:
            raise TooLarge("a round of too many bytes")
        began, self.largest = self.now, max(self.largest, nbytes)
        self.tokens = min(float(self.burst), self.tokens + (self.now - self.filled_at) * self.rate)
        free = min(float(nbytes), self.tokens)
        self.tokens -= free
        self.now += self.rtt + (nbytes - free + answer_bytes) / self.rate
        self.filled_at = self.now
        took = round((self.now - began) * 1e9)
        return Round(nbytes, answer_bytes, took, 0, 0, 0, Load())


SIZES = (183, 8_339, 16_410, 16_531, 65_536)


def probed(
    link: VirtualLink, monkeypatch: pytest.MonkeyPatch, seconds: float = 2.0, sizes: Sequence[int] = SIZES
) -> Link:
    monkeypatch.setattr(probing, "LinkProber", lambda server, credentials=None: link)
    monkeypatch.setattr(probing, "_compute", link.compute)
    monkeypatch.setattr(probing, "time", SimpleNamespace(monotonic=lambda: link.now))
    found, _ = probing.probe("here:1", sizes, [162, 648], seconds)
    return found


@pytest.mark.parametrize("mbit", [0.5, 5.0, 50.0, 1000.0])
@pytest.mark.parametrize("burst", [0, 1])
def test_the_speed_is_the_links_behind_a_bucket_of_ten_milliseconds_too(
    mbit: float, burst: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = burst * max(16 << 10, round(mbit * 125_000 * 0.010))
    link = VirtualLink(mbit, bucket)
    found = probed(link, monkeypatch).speed_up
    if found.value is not None:
        assert found.value == pytest.approx(mbit * 125_000, rel=0.25)
    else:  # 1 MiB within what a bucket of 1.25 MB forgives tells nothing
        assert bucket > 1 << 20


def test_speed_probes_are_not_in_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    link = VirtualLink(1000.0)
    found = probed(link, monkeypatch)
    assert link.largest > 65_536 and found.up.points[-1][0] == 65_536
    assert [size for size, _ in found.up.points] == [0, 183, 8_339, 16_410, 16_531, 32_768, 65_536]


def test_a_slow_link_is_not_asked_for_more_than_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    link = VirtualLink(1.0)
    assert probed(link, monkeypatch).speed_up.value == pytest.approx(125_000, rel=0.01)
    assert link.largest <= 65_536 and link.now < 5.0


def test_a_server_that_takes_no_such_round_ends_the_looking_and_not_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probed(VirtualLink(1000.0, most=65_536), monkeypatch)
    assert found.speed_up.value == pytest.approx(125e6, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(
    mbit=st.sampled_from([5.0, 50.0, 1000.0, 6000.0]),
    sizes=st.sets(st.integers(1, 300_000), min_size=1, max_size=5),
    seed=st.integers(0, 1 << 20),
    spread=st.floats(0.0, 0.3),
    hiccups=st.floats(0.0, 0.1),
)
def test_a_curve_is_as_its_rounds_and_continues_as_announced(
    mbit: float, sizes: set[int], seed: int, spread: float, hiccups: float
) -> None:
    class Noisy(VirtualLink):
        """``spread`` above the truth, and 20 ms more now and then."""

        def round(self, nbytes: int, answer_bytes: int, patience: float) -> Round:
            one = super().round(nbytes, answer_bytes, patience)
            more = round(one.total_ns * chance.uniform(0, spread)) + 20_000_000 * (chance.random() < hiccups)
            self.now += more / 1e9
            return replace(one, total_ns=one.total_ns + more)

    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patched:
        found = probed(Noisy(mbit, rtt_ms=1.0), patched, 8.0, sorted({*sizes, 65_536}))
    up = found.up
    assert sizes <= {size for size, _ in up.points}  # none is left out: there is time for all
    assert [ns for _, ns in up.points] == sorted(ns for _, ns in up.points)
    for size in sizes:
        true = 1e6 + size / (mbit * 125_000) * 1e9
        assert 0.999 * true <= up.ns(size) <= 1.001 * (1 + spread) * true + (20e6 if hiccups else 0)
    last, reported = up.points[-1][0], found.speed_up
    more = (up.ns(last + (1 << 20)) - up.ns(last)) / (1 << 20)
    assert more >= 0 and (reported.low is None or more <= 1.001e9 / reported.low)
    assert reported.high is None or more >= 0.999e9 / reported.high


def test_few_bytes_that_took_long_once_tell_nothing_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended a curve at 185 bytes: one slow round of these, taken for the link's speed."""

    class Hiccup(VirtualLink):
        def round(self, nbytes: int, answer_bytes: int, patience: float) -> Round:
            one = super().round(nbytes, answer_bytes, patience)
            return replace(one, total_ns=one.total_ns + 5_000_000) if nbytes in (92, 185) else one

    found = probed(Hiccup(5000.0, rtt_ms=0.5), monkeypatch, sizes=[0, 185, 196_735])
    assert found.up.points[-1][0] == 196_735

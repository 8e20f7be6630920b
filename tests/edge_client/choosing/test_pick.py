"""The choice of codecs, from numbers alone; what is learnt of them, and of the link."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.choosing.chooser import AGAIN, RAW, SOON, Belief, Cost, Speeds, TensorKind, pick, total
from edge_client.planning.link import Curve, Link

COSTS = st.builds(Cost, st.floats(0, 1e7), st.floats(1, 1e6), st.floats(0, 1e7))
TENSOR = st.dictionaries(st.sampled_from(["lz4", "zstd", "int8"]), COSTS, max_size=3).flatmap(
    lambda others: st.floats(1, 1e6).map(lambda nbytes: {RAW: Cost(0, nbytes, 0), **others})
)


@given(st.lists(TENSOR, max_size=4), st.floats(1e4, 1e10))
def test_on_a_link_of_one_rate_nothing_is_faster_than_the_choice(tensors: list[dict[str, Cost]], rate: float) -> None:
    up = Curve.line(1e6, rate).ns
    chosen = pick(tensors, up)
    ways = itertools.product(*tensors)
    assert total(tensors, chosen, up) <= min((total(tensors, way, up) for way in ways), default=0.0) * (1 + 1e-9) + 1


@given(st.lists(TENSOR, min_size=1, max_size=4), st.lists(st.floats(0, 1e8), min_size=1, max_size=4))
def test_on_any_link_the_choice_is_no_slower_than_raw(tensors: list[dict[str, Cost]], more: list[float]) -> None:
    points = [(0, 1e6)]
    for at, ns in enumerate(more, 1):
        points.append((at * 100_000, points[-1][1] + ns))
    up = Curve(tuple(points)).ns
    assert total(tensors, pick(tensors, up), up) <= total(tensors, [RAW] * len(tensors), up)


def test_codec_is_chosen_for_each_tensor() -> None:
    sparse = {RAW: Cost(0, 100_000, 0), "lz4": Cost(1e5, 10_000, 1e5)}
    noise = {RAW: Cost(0, 100_000, 0), "lz4": Cost(1e5, 100_000, 0)}
    assert pick([sparse, noise], Curve.line(1e6, 1e7).ns) == ("lz4", RAW)
    assert pick([sparse, noise], Curve.line(1e6, 1e10).ns) == (RAW, RAW)
    assert pick([], Curve.line(0, 1e6).ns) == ()


def test_times_apply_to_a_size_class_and_ratios_to_a_slot() -> None:
    speeds, kind = Speeds(), TensorKind.of("float32", 100_000)
    assert kind == TensorKind.of("float32", 200_000) != TensorKind.of("float32", 1000)
    speeds.encoded("lz4", ("conv", 0), kind, 100_000, 50_000, 1e6)
    speeds.decoded("lz4", kind, 100_000, 4e5)
    assert speeds.cost("lz4", ("conv", 0), kind, 200_000) == pytest.approx(Cost(2e6, 100_000, 8e5))
    assert speeds.cost("lz4", ("other", 0), kind, 100_000) is None
    assert speeds.least_ns("lz4", kind, 100_000) == pytest.approx(1.4e6)
    for _ in range(5):
        speeds.encoded("lz4", ("conv", 0), kind, 100_000, 50_000, 4e6)
        speeds.observe(4e5 * speeds.server_factor, 1.2e6)
    later = speeds.cost("lz4", ("conv", 0), kind, 100_000)
    assert later is not None and later.encode_ns == pytest.approx(4e6, rel=0.3)
    assert later.decode_ns == pytest.approx(1.2e6, rel=0.3), "the server reported how long it takes there"


def link(rtt: float, rate: float) -> Link:
    return Link(Curve.line(rtt, rate), Curve.line(0.0, rate))


def test_longer_requests_do_not_count_as_a_slower_link() -> None:
    belief = Belief()
    assert not belief.known
    belief.take(link(1e6, 1e8), 0.0)
    for _ in range(20):
        belief.observe(20_000, 100, 9e6)
    assert belief.link.up.bytes_per_second == pytest.approx(1e8)
    assert not belief.wants_probe(AGAIN - 1) and belief.wants_probe(AGAIN + 1)


def test_a_sudden_change_asks_for_a_probe_and_is_believed_then() -> None:
    belief = Belief()
    belief.take(link(1e6, 1e8), 0.0)
    for _ in range(5):
        belief.observe(100_000, 100, 3e6)
    assert not belief.wants_probe(2 * SOON)
    for _ in range(2):
        belief.observe(100_000, 100, 300e6)
    assert belief.wants_probe(2 * SOON)
    belief.take(link(1e6, 4e5), 2 * SOON)
    assert belief.link.up.bytes_per_second == pytest.approx(4e5)
    assert max(belief.sizes()) <= 0.1 * 4e5
    assert not belief.wants_probe(2.5 * SOON)
    belief.take(None, 99.0)
    assert belief.link.up.bytes_per_second == pytest.approx(4e5), "a probe that failed says nothing"


def test_one_request_that_is_very_late_asks_for_a_small_probe() -> None:
    belief = Belief()
    belief.take(link(1e6, 6e6), 0.0)
    for _ in range(5):
        belief.observe(150_000, 100, 27e6)
    assert max(belief.sizes()) == 128 << 10 and not belief.wants_probe(2 * SOON)
    belief.observe(150_000, 100, 90e6)  # noise
    assert not belief.wants_probe(2 * SOON)
    belief.observe(150_000, 100, 27e6)
    belief.observe(150_000, 100, 1200e6)
    assert belief.wants_probe(2 * SOON) and max(belief.sizes()) == 32 << 10
    belief.take(link(1e6, 6e6), 2 * SOON)
    assert max(belief.sizes()) == 128 << 10 and not belief.wants_probe(4 * SOON)


def test_without_any_probe_answers_tell() -> None:
    belief = Belief()
    belief.take(None, 0.0)
    for _ in range(6):
        belief.observe(200_000, 100, 400e6)
    assert belief.link.up.ns(200_000) == pytest.approx(400e6, rel=0.3)
    assert not belief.wants_probe(1e9)

"""Open loop, and what is made of what became of the requests. No server, and no clock but the generator's."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.benching.generator import GONE, Fired, Generator
from edge_client.benching.load import ABANDONED, FEWEST, Ended, Over, Shot, estimate, quantile
from edge_client.benching.results import compare, differences, knee, read, step
from shared_hooks.errors import SpecError


class Slow:
    """A client whose server answers nothing until all has been sent; or fails each at once."""

    def __init__(self, count: int, error: str = "") -> None:
        self.count, self.error = count, error
        self.held: list[tuple[Shot, float, Over]] = []
        self.sent = 0

    def begin(self) -> None: ...

    def tick(self) -> None: ...

    def close(self) -> None: ...

    def send(self, shot: Shot, intended: float, over: Over) -> None:
        self.sent += 1
        if self.error:
            return over(Ended(shot.number, 0, 1, self.error))
        self.held.append((shot, intended, over))
        if len(self.held) == self.count:
            for one, at, then in self.held:
                then(Ended(one.number, 0, int(1e9 * (time.monotonic() - at))))
        return None


def some_shots(count: int, gap: float = 0.002) -> list[Shot]:
    return [Shot(number, number * gap, 0, 0, 0) for number in range(count)]


def test_requests_do_not_wait_for_answers_and_count_from_their_own_time() -> None:
    lane = Slow(30)
    fired = Generator([lane]).fire(some_shots(30), time.monotonic(), 5.0)
    assert lane.sent == 30 and fired.why is None
    took = [one.took_ns for one in sorted(fired.ended, key=lambda one: one.number)]
    assert took[0] - took[-1] >= 0.002 * 29 * 1e9 * 0.99, "the first has waited longest, by what lies between them"


def test_requests_in_progress_at_the_end_are_not_losses() -> None:
    generator = Generator([Slow(100)])
    generator.stop.set()
    assert generator.fire(some_shots(3), time.monotonic() - 1, 5.0).why == "interrupted"
    generator.stop.clear()
    fired = generator.fire(some_shots(3), time.monotonic() - 1, -10.0)  # nobody waits
    assert [one.error for one in fired.ended] == [ABANDONED] * 3
    figures = made(fired.ended)
    assert (figures["requests"], figures["lost"], figures["abandoned"]) == (0, 0, 3)


def test_a_server_that_is_gone_is_asked_no_more() -> None:
    lane = Slow(0, "ServerUnavailable")
    fired = Generator([lane]).fire(some_shots(1000, 0.0), time.monotonic(), 5.0)
    assert fired.why == "the server was gone" and lane.sent == GONE
    other = Slow(0, "ModelFailed")
    assert Generator([other]).fire(some_shots(100, 0.0), time.monotonic(), 5.0).why is None
    assert other.sent == 100, "the next request may well be answered"


def made(ended: list[Ended], rate: float = 10.0, warmup: float = 0.0, **words: Any) -> dict[str, Any]:
    shots = [Shot(one.number, one.number / rate, one.number % 2, 0, 0) for one in ended]
    seconds = len(ended) / rate - warmup
    settings: dict[str, Any] = {"machine": 0.2, "recorded": True, "ways": ["a", "b"], "deadline": 1.0, **words}
    return step(rate, shots, [Fired(ended, 0.1, 10.0)], warmup=warmup, seconds=seconds, **settings)


def answered(count: int, ms: float, seed: int = 0) -> list[Ended]:
    dice = np.random.default_rng(seed)
    return [Ended(number, 1000, int(1e6 * ms * dice.gamma(8, 1 / 8))) for number in range(count)]


def test_refusals_losses_and_late_answers_are_distinguished() -> None:
    ended = answered(100, 20)
    for number, (error, put_offs) in enumerate(
        [("QuotaExceeded", 0), ("DeadlineExceeded", 3), ("DeadlineExceeded", 0), ("ServerUnavailable", 0)]
    ):
        ended[number].error, ended[number].put_offs = error, put_offs
    ended[10].took_ns = int(3e9)
    figures = made(ended)
    assert [figures[key] for key in ("answered", "in_time", "late", "refused", "lost")] == [96, 95, 1, 2, 2]
    assert figures["put_off"] == 3
    assert figures["errors"] == {"DeadlineExceeded": 2, "QuotaExceeded": 1, "ServerUnavailable": 1}
    assert figures["goodput"]["value"] == pytest.approx(9.5)
    assert [way["requests"] for way in figures["ways"]] == [50, 50]


def test_a_request_without_an_answer_is_slower_than_any_with_one() -> None:
    ended = answered(100, 20)
    for one in ended[:5]:
        one.error = "DeadlineExceeded"
    latency = made(ended)["latency"]
    assert latency["p99"]["value"] is None and latency["p90"]["value"] is not None
    assert latency["p90"]["value"] >= sorted(one.took_ns for one in ended[5:])[84], "and they are not left out of it"
    assert made(ended)["cdf"][-1][1] == pytest.approx(0.95)


def test_warming_up_counts_for_nothing() -> None:
    ended = answered(200, 20)
    for one in ended[:100]:
        one.took_ns = int(5e9)
    figures = made(ended, warmup=10.0)
    assert figures["requests"] == 100 and figures["late"] == 0
    assert figures["offered"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("words", "late_ns", "said"),
    [({}, 1000, None), ({}, 50_000_000, "too late"), ({"machine": 0.97}, 1000, "97% busy")],
)
def test_a_generator_that_was_the_bottleneck_says_so(words: dict[str, Any], late_ns: int, said: str | None) -> None:
    ended = answered(100, 20)
    for one in ended[:10]:
        one.late_ns = late_ns
    found = made(ended, **words)["generator"]["bottleneck"]
    assert found is None if said is None else said in found


def test_the_knee_is_the_last_rate_before_the_first_that_falls_short() -> None:
    def at(rate: float, in_time: int) -> dict[str, Any]:
        return {"rate": rate, "requests": 100, "in_time": in_time}

    assert knee([at(40, 99), at(10, 100), at(20, 90)]) == 10
    assert knee([at(10, 10)]) is None and knee([]) is None


def test_interval_covers_the_quantile_given_enough_requests() -> None:
    held = 0
    for seed in range(40):
        values = np.random.default_rng(seed).exponential(1.0, 2000)
        found = estimate(values, lambda some: quantile(some, 0.9), seed)
        assert found.low is not None and found.high is not None
        held += found.low <= -math.log(0.1) <= found.high
    assert held >= 34, "of 40, 95 % of the time"
    assert estimate(np.ones(FEWEST - 1), lambda some: quantile(some, 0.9)).low is None


def whole(ms: float, seed: int, **settings: Any) -> dict[str, Any]:
    steps = [made(answered(2000, ms, seed), rate) for rate in (10.0, 20.0)]
    known = {"format": "isthmus bench 1", "settings": {"clients": 4, **settings}, "knee": 20.0, "ended": None}
    return {**known, "steps": steps}


def test_two_runs_of_the_same_show_no_difference_and_a_slower_one_does() -> None:
    same = compare(whole(20, 1), whole(20, 2))
    assert {one["verdict"] for one in same} == {"no difference seen"}
    slower = {(one["rate"], one["figure"]): one for one in compare(whole(20, 1), whole(24, 2))}
    assert slower[10.0, "p50"]["verdict"] == "higher" and slower[10.0, "in time"]["verdict"] == "no difference seen"
    assert slower[20.0, "p50"]["ratio"] == pytest.approx(1.2, rel=0.05)


def test_other_differences_are_listed() -> None:
    other = {**whole(20, 1, clients=8), "ended": "interrupted"}
    other["steps"] = other["steps"][:1]
    found = differences(whole(20, 1), other)
    assert found == ["clients: 4 / 8", "only in A: 20 a second", "B is not complete: interrupted"]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": "isthmus bench 9"}', '{"format": "isthmus bench 1", "steps": [{}]}']
)
def test_invalid_bench_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(SpecError, match=r"a\.json"):
        read(file)
    file.write_text(json.dumps(whole(20, 1)))
    assert len(read(file)["steps"]) == 2

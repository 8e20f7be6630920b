"""When requests begin, and what each is: drawn alike for the same seed, refused by name where it makes no sense."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from edge_client.benching.load import arrivals, at_rate, codecs_of, cuts_of, mean_rate, shots, trace, weighted
from shared_hooks.codecs import CODECS
from shared_hooks.errors import SpecError


def dice(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_poisson_arrivals_have_the_rate_and_gaps_that_know_nothing_of_each_other() -> None:
    times = arrivals("poisson", 50, 400, dice())
    gaps = np.diff(times)
    assert (gaps >= 0).all() and times[-1] < 400
    assert len(times) / 400 == pytest.approx(50, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.05), "as an exponential distribution has"
    assert np.array_equal(times, arrivals("poisson", 50, 400, dice()))


@given(some.floats(0.1, 500), some.floats(0.1, 50))
def test_constant_arrivals_are_even_and_stay_within_their_time(rate: float, seconds: float) -> None:
    times = arrivals("constant", rate, seconds, dice())
    assert times[0] == 0 and times[-1] < seconds + 1e-9
    assert np.allclose(np.diff(times), 1 / rate)


def test_a_trace_is_read_from_its_first_time_and_stretched_to_a_rate(tmp_path: Path) -> None:
    file = tmp_path / "times"
    file.write_text("# of yesterday\n100\n100.5\n\n102\n")
    times = trace(str(file))
    assert times is not None and times.tolist() == [0, 0.5, 2]
    assert mean_rate(at_rate(times, 10)) == pytest.approx(10)
    assert trace("poisson") is None


@pytest.mark.parametrize("text", ["1\n0.5\n", "1\nx\n", "1\nnan\n", "1\n", "", "2\n2\n"])
def test_invalid_trace_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "times"
    file.write_text(text)
    with pytest.raises(SpecError, match="arrivals="):
        trace(str(file))


def test_a_word_that_is_no_kind_of_arrivals_is_answered_with_a_near_one() -> None:
    with pytest.raises(SpecError, match="Did you mean poisson"):
        trace("poison")


def test_requests_are_mixed_by_weight_and_spread_over_clients() -> None:
    cuts = cuts_of("stage2=0.7,stage3=0.3")
    made = shots(np.arange(20_000.0), cuts, 3, 4, dice())
    share = sum(one.cut == 0 for one in made) / len(made)
    assert share == pytest.approx(0.7, abs=0.02)
    assert {one.client for one in made} == {0, 1, 2, 3} and {one.input for one in made} == {0, 1, 2}
    assert [one.number for one in made] == list(range(20_000))


@given(some.dictionaries(some.sampled_from("abcdef"), some.floats(0.01, 100), min_size=1))
def test_weights_are_shares_that_add_up(weights: dict[str, float]) -> None:
    found = weighted("split", ",".join(f"{word}={weight!r}" for word, weight in weights.items()))
    assert sum(one.share for one in found) == pytest.approx(1)
    assert [one.word for one in found] == list(weights)


def test_a_client_has_one_codec_by_its_share() -> None:
    assert codecs_of("raw=3,int8=1", 8, CODECS).count("raw") == 6
    assert sorted(codecs_of("raw=99,lz4=1", 2, CODECS)) == ["lz4", "raw"], "each has a client"


@pytest.mark.parametrize(
    ("text", "said"),
    [("a=0", "above 0"), ("a=-1", "above 0"), ("a=x", "above 0"), ("a=inf", "above 0"), ("", "NAME"), ("a,a", "twice"),
     ("edge-only", "is no cut"), ("auto=0.5,a=0.5", "is no cut")],
)  # fmt: skip
def test_weights_and_cuts_that_make_no_sense_are_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        cuts_of(text)


def test_codecs_that_are_not_there_or_too_many_are_refused() -> None:
    with pytest.raises(SpecError, match="Did you mean int8"):
        codecs_of("int9", 4, CODECS)
    with pytest.raises(SpecError, match="basis goes by a calibration"):
        codecs_of("raw,basis", 4, CODECS, ["basis"])
    with pytest.raises(SpecError, match="2 codecs for 1 client"):
        codecs_of("raw,lz4", 1, CODECS)

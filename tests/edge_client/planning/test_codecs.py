"""A cut and a codec are one candidate: which may be used, and what each takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge_client.planning.codecs import Codecs, CutLosses, LossTable
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Candidate, Constraints, decide
from edge_client.planning.partitioners import Situation, find_partitioner
from edge_client.planning.predict import predict
from edge_client.user_text import CLOUD_ONLY
from shared_hooks.errors import SpecError
from shared_hooks.profiling import profile as profiles
from shared_hooks.profiling.profile import ModelIdentity
from tests.edge_client.planning.made import MS, Layer, loss, profile, with_codecs

LAYERS = [Layer(5, 1, 100_000), Layer(5, 1, 50_000), Layer(5, 1, 40)]
EDGE, CLOUD = with_codecs(profile("edge", LAYERS)), with_codecs(profile("cloud", LAYERS))


def link(bytes_per_second: float) -> Link:
    return Link(Curve.line(10 * MS, bytes_per_second), Curve.line(0, 1e9))


TABLE = LossTable(
    ModelIdentity("made", "aa", "bb", "cc"),
    *("classes", 100, 0, 0.95, 0.01, None, "now"),
    (
        CutLosses("input", -1, 1, (loss("int8", 0.5),)),
        CutLosses("layer0", 0, 1, (loss("int8", 0.004), loss("int4", 0.03))),
        CutLosses("layer1", 1, 1, (loss("int8", None),)),
    ),
)


def candidates(chosen: Codecs, rate: float = 1e6, **more: Any) -> dict[str, Candidate]:
    return {one.key: one for one in predict(EDGE, CLOUD, link(rate), codecs=chosen, **more)}


def test_lossy_codecs_are_candidates_where_the_table_shows_the_loss_and_nowhere_else() -> None:
    lossless = candidates(Codecs.of("auto") or pytest.fail())
    assert {one.codec for one in lossless.values()} == {"", "raw", "lz4"}  # the profiles have no others
    found = candidates(Codecs.of("auto", TABLE, "0.5%") or pytest.fail())
    lossy = {key: one.accuracy for key, one in found.items() if one.codec.startswith("int")}
    assert lossy == {"layer0 + int8": pytest.approx(0.996)}
    more = candidates(Codecs.of("auto", TABLE, 0.03) or pytest.fail())
    assert {key for key in more if "int" in key} == {"layer0 + int8", "layer0 + int4"}


def test_encoding_bytes_and_decoding_are_those_of_the_codec() -> None:
    found = candidates(Codecs.of("auto", TABLE, 0.03) or pytest.fail())
    raw, small = found["layer0 + raw"], found["layer0 + int4"]
    assert small.bytes_up == round(raw.bytes_up * 0.12)
    assert small.stages_ns["encode"] - raw.stages_ns["encode"] == pytest.approx(1.9 * MS)
    assert small.stages_ns["tail"] - raw.stages_ns["tail"] == pytest.approx(0.65 * MS)
    assert small.stages_ns["network"] < raw.stages_ns["network"]
    assert f"{CLOUD_ONLY} + lz4" in found


@pytest.mark.parametrize(("rate", "codec"), [(1e9, "raw"), (60e6, "lz4"), (1e6, "int4")])
def test_best_codec_depends_on_the_link(rate: float, codec: str) -> None:
    chosen = Codecs.of("auto", TABLE, 0.03)
    here = predict(EDGE, CLOUD, link(rate), codecs=chosen, only=("layer0",))
    assert decide(here).winner.codec == codec


def test_a_constraint_on_accuracy_counts_the_bound() -> None:
    found = predict(EDGE, CLOUD, link(1e5), codecs=Codecs.of("auto", TABLE, 0.03))
    decision = decide(found, constraints=Constraints(min_accuracy=0.99))
    assert "layer0 + int4" in decision.rejected and "layer0 + int8" not in decision.rejected


def test_one_codec_for_all_has_candidates_as_before_with_its_own_decoding() -> None:
    plain = {one.key for one in predict(EDGE, CLOUD, link(1e6))}
    assert plain == {"edge-only", "cloud-only", "layer0", "layer1", "layer2"}
    fixed = replace(EDGE, settings={"codec": "int8"})
    small = next(one for one in predict(fixed, CLOUD, link(1e6)) if one.name == "layer0")
    raw = next(one for one in predict(EDGE, CLOUD, link(1e6)) if one.name == "layer0")
    assert small.stages_ns["tail"] - raw.stages_ns["tail"] == pytest.approx(0.45 * MS)


def test_observed_bytes_replace_the_profiles() -> None:
    chosen = Codecs.of("auto")
    found = candidates(chosen or pytest.fail(), bytes_up={"layer0 + lz4": 500_000.0})
    assert found["layer0 + lz4"].bytes_up == 500_000
    assert found["layer0 + lz4"].stages_ns["network"] == pytest.approx(link(1e6).network_ns(500_000, 500))


def test_a_partitioner_takes_the_best_codec_of_a_cut_that_is_named() -> None:
    found = predict(EDGE, CLOUD, link(1e6), codecs=Codecs.of("auto", TABLE, 0.03))
    fixed = find_partitioner("fixed")
    assert fixed.decide(Situation(found, option="layer0")).winner.key == "layer0 + int4"
    assert fixed.decide(Situation(found, option="layer0 + raw")).winner.codec == "raw"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("auto", None, "0.5%"), "max_loss='0.5%' needs calibration"),
        (("auto", TABLE, None), "calibration needs max_loss"),
        (("int8", TABLE, None), "calibration is for codec='auto'; int8 is used whatever it loses"),
        (("lz4", None, 0.1), "max_loss is for codec='auto'"),
        (("auto", TABLE, 1.0), "from 0 to less than 1"),
        (("auto", TABLE, -0.1), "from 0 to less than 1"),
        (("zip", None, None), "must be one of raw"),
        (("auto", "no-such-file.json", 0.1), "cannot be read"),
    ],
)
def test_words_that_do_not_go_together_are_refused(words: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Codecs.of(*words)


def test_a_table_of_other_weights_is_refused_by_name() -> None:
    chosen = Codecs.of("auto", TABLE, 0.03)
    assert chosen is not None
    chosen.check("aa", "bb")
    with pytest.raises(SpecError, match="is of other weights: aa... in the calibration, zz... here"):
        chosen.check("zz", "bb")


def test_profiles_keep_their_codecs_in_files() -> None:
    for one in (EDGE, CLOUD):
        assert profiles.from_json(profiles.to_json(one)).cuts == one.cuts

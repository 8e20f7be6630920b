"""A prediction is the sum of what the profiles, the link and the load say, and tells what it does not know."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.call import Load
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Candidate
from edge_client.planning.predict import Correction, GivenPower, RequestSample, predict
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from shared_hooks.errors import SpecError
from shared_hooks.profiling.profile import FileInput
from tests.edge_client.planning.made import MS, Layer, exactly, funnel, profile

LAYERS = [Layer(10, 1, 40_000), Layer(20, 2, 10_000), Layer(30, 3, 400)]
LINK = Link(Curve.line(10 * MS, 1e6), Curve.line(0, 1e6))  # 10 ms and 1 us a byte
PNG = FileInput("a.png", ".png", 7_000, exactly(4 * MS))


def named(candidates: list[Candidate]) -> dict[str, Candidate]:
    return {one.name: one for one in candidates}


def test_there_is_a_candidate_for_every_cut_and_for_either_side_alone() -> None:
    found = predict(profile("edge", LAYERS), profile("cloud", LAYERS), LINK, Load())
    assert [one.name for one in found] == [EDGE_ONLY, CLOUD_ONLY, "layer0", "layer1", "layer2"]
    assert [one.layer_id for one in found] == [None, -1, 0, 1, 2]


def test_a_cut_takes_head_encoding_network_queue_and_tail() -> None:
    one = named(predict(profile("edge", LAYERS), profile("cloud", LAYERS), LINK, Load(queue_ns=7 * MS)))["layer1"]
    assert one.bytes_up == 10_200
    assert one.stages_ns["edge"] == 30 * MS
    assert one.stages_ns["encode"] == pytest.approx(0.1 * MS)
    assert one.stages_ns["network"] == pytest.approx(10 * MS + 10.2 * MS + 0.5 * MS)
    assert one.stages_ns["queue"] == 7 * MS
    assert one.stages_ns["tail"] == pytest.approx(3.1 * MS)
    assert one.latency_ns == pytest.approx(sum(one.stages_ns.values()))


def test_preparing_draws_what_the_whole_model_draws_as_a_request_runs_it() -> None:
    measured = profile("edge", LAYERS, energy=True, idle=1.0)
    edge = replace(measured, whole_ns=exactly(2 * measured.whole_ns.middle), bare_ns=measured.whole_ns)
    (only,) = predict(edge, None, None, file=PNG)
    assert only.edge_energy.value == pytest.approx(2.0 * 64e-3)  # 2 W over 60 ms and 4 ms


def test_without_a_server_or_a_link_there_is_the_edge_alone() -> None:
    edge = profile("edge", LAYERS)
    for cloud, link in ((None, LINK), (profile("cloud", LAYERS), None)):
        (only,) = predict(edge, cloud, link)
        assert (only.name, only.latency_ns, only.bytes_up) == (EDGE_ONLY, 60 * MS, 0)


def test_the_input_file_counts_its_preparation_where_it_is_prepared() -> None:
    found = named(predict(profile("edge", LAYERS), profile("cloud", LAYERS), LINK, file=PNG))
    assert found[EDGE_ONLY].latency_ns == 64 * MS
    assert found["layer0"].stages_ns["prepare"] == 4 * MS
    file = found[CLOUD_FILE]
    assert file.stages_ns.get("prepare", 0) == 0
    assert file.bytes_up == 7_000
    assert file.stages_ns["tail"] == pytest.approx(6 * MS + 4 * MS + 0.05 * MS)
    assert "estimated" in file.notes[0]


def test_the_servers_own_reading_of_a_file_is_believed_where_known() -> None:
    cloud = profile("cloud", LAYERS, files=(FileInput("b.png", ".png", 9_000, exactly(1 * MS)),))
    file = named(predict(profile("edge", LAYERS), cloud, LINK, file=PNG))[CLOUD_FILE]
    assert file.stages_ns["tail"] == pytest.approx(6 * MS + 1 * MS + 0.05 * MS)
    assert file.notes == ()


def test_between_processors_the_reading_of_a_file_is_as_much_faster_as_the_model() -> None:
    edge, cloud = (replace(profile(side, LAYERS), machine={"device": "cpu"}) for side in ("edge", "cloud"))
    file = named(predict(edge, cloud, LINK, file=PNG))[CLOUD_FILE]
    assert file.stages_ns["tail"] == pytest.approx(6 * MS + 4 * MS * 6 / 60 + 0.05 * MS)
    assert "estimated" in file.notes[0] and "0.10" in file.notes[0]


def test_turning_the_answer_into_tensors_counts_where_it_was_measured() -> None:
    edge = replace(profile("edge", LAYERS), finish_ns=exactly(2 * MS))
    found = named(predict(edge, profile("cloud", LAYERS), LINK, edge_factor=2.0))
    assert found["layer0"].stages_ns["finish"] == 4 * MS
    assert "finish" not in found[EDGE_ONLY].stages_ns


def test_a_file_that_the_server_cannot_read_does_not_cross() -> None:
    found = predict(profile("edge", LAYERS), profile("cloud", LAYERS), LINK, file=PNG, file_crosses=False)
    assert CLOUD_FILE not in named(found)


def test_energy_is_the_heads_and_the_waiting() -> None:
    edge = profile("edge", LAYERS, energy=True, idle=0.5)
    found = named(predict(edge, profile("cloud", LAYERS), LINK))
    assert (found[EDGE_ONLY].edge_energy.value, found[EDGE_ONLY].edge_energy.status) == (
        pytest.approx(0.12),
        "measured",
    )
    one = found["layer1"]
    waiting = (one.stages_ns["network"] + one.stages_ns["tail"]) / 1e9
    assert one.edge_energy.value == pytest.approx(2 * 0.030 + 0.5 * waiting)
    assert one.edge_energy.status == "estimated"


def test_energy_that_nobody_knows_is_unavailable_with_the_reason() -> None:
    cloud = profile("cloud", LAYERS)
    assert {one.edge_energy.note for one in predict(profile("edge", LAYERS), cloud, LINK)} == {"no sensor"}
    only_heads = named(predict(profile("edge", LAYERS, energy=True), cloud, LINK))
    assert only_heads["layer0"].edge_energy.note == "idle power: no sensor"
    assert only_heads[EDGE_ONLY].edge_energy.value is not None


def test_given_watts_make_an_estimate_that_says_so() -> None:
    one = named(predict(profile("edge", LAYERS), profile("cloud", LAYERS), LINK, power=GivenPower(5, 1)))["layer0"]
    work, waiting = 10.1 * MS, one.stages_ns["network"] + one.stages_ns["tail"]
    assert one.edge_energy.value == pytest.approx((5 * work + waiting) / 1e9)
    assert (one.edge_energy.status, "given: 5 W" in one.edge_energy.note) == ("estimated", True)
    with pytest.raises(SpecError, match="idle <= active"):
        GivenPower(1, 2)


def test_memory_is_the_peak_and_the_weights() -> None:
    one = named(predict(profile("edge", LAYERS), profile("cloud", LAYERS), LINK))["layer1"]
    assert one.edge_memory.value == 1e6 + 10_000 + 10_000_000


def test_throughput_is_the_slowest_parts() -> None:
    edge, cloud = profile("edge", LAYERS), profile("cloud", LAYERS)
    found = named(predict(edge, cloud, LINK, Load(workers=2)))
    assert found["layer1"].throughput == pytest.approx(1 / 0.0301)  # the edge
    assert found[CLOUD_ONLY].throughput == pytest.approx(1 / 0.1502)  # the link, its round trip not counted
    assert found[EDGE_ONLY].throughput == pytest.approx(1 / 0.060)


def test_correction_adds_the_median_of_what_was_missing() -> None:
    fitted = Correction.fit([RequestSample("a", 10, 12), RequestSample("b", 10, 15), RequestSample("c", 10, 100)])
    assert fitted.overhead_ns == 5
    edge, cloud = profile("edge", LAYERS), profile("cloud", LAYERS)
    plain, added = named(predict(edge, cloud, LINK)), named(predict(edge, cloud, LINK, correction=fitted))
    assert added["layer0"].latency_ns - plain["layer0"].latency_ns == pytest.approx(5)
    assert added[EDGE_ONLY] == plain[EDGE_ONLY]
    with pytest.raises(ValueError, match="no requests"):
        Correction.fit([])


def test_profiles_of_different_models_are_refused() -> None:
    with pytest.raises(SpecError, match="weights"):
        predict(profile("edge", LAYERS), profile("cloud", LAYERS, weights_hash="zz"), LINK)
    with pytest.raises(SpecError, match="edge's profile and a cloud's"):
        predict(profile("cloud", LAYERS), profile("edge", LAYERS), LINK)


@given(edge=st.floats(0.1, 10), server=st.floats(0.1, 10), more=st.floats(1.0, 5.0), rate=st.floats(1e4, 1e9))
def test_nothing_gets_better_when_a_side_gets_slower(edge: float, server: float, more: float, rate: float) -> None:
    layers, link = funnel(), Link(Curve.line(5 * MS, rate), Curve.line(0, rate))
    here, there = profile("edge", layers), profile("cloud", layers)
    before = predict(here, there, link, edge_factor=edge, server_factor=server)
    slower = predict(here, there, link, edge_factor=edge * more, server_factor=server * more)
    assert all(a.latency_ns <= b.latency_ns * (1 + 1e-9) for a, b in zip(before, slower, strict=True))


def test_between_devices_of_two_kinds_agreement_is_unknown() -> None:
    edge, cloud = profile("edge", LAYERS), profile("cloud", LAYERS)
    edge = replace(edge, machine={**edge.machine, "device": "cpu"})
    for device, agreement in (("cpu", 1.0), ("cuda:0", None)):
        there = replace(cloud, machine={**cloud.machine, "device": device})
        found = named(predict(edge, there, LINK, Load(), file=PNG))
        assert found[EDGE_ONLY].accuracy == 1.0
        assert {found[name].accuracy for name in (CLOUD_FILE, CLOUD_ONLY, "layer1")} == {agreement}

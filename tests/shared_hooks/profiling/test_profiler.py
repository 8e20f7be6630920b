"""A profile has every layer and every cut of the plan, measured as a request runs, or says how it was estimated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_hooks import WrappedModel
from shared_hooks.crossing import books_of
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.models import load_spec
from shared_hooks.profiling.profile import CutProfile, Profile
from shared_hooks.profiling.profiler import ProfileOptions, _known, estimated_codec, profile_cloud, profile_edge
from shared_hooks.profiling.timers import HeadTimer, Inputs, TimedCodec, TimedRun, WholeForwards
from tests.covering import crossed
from tests.shipped import IMAGES
from tests.zoo import CASES

ONCE = ProfileOptions(warmup=1, repetitions=1, seconds=600, pause=0.0)
AWKWARD = """
no_layer_called single_linear_root branch_on_item writes_into_its_input counts_its_calls monte_carlo_dropout
scripted_submodule lstm packed_sequence_lstm one_module_several_times shared_submodule dataclass_inputs zero_size_batch
in_place_residual_sum unet_skips hf_bert module_returns_closure sparse_product training_mode_norms threads_inside
""".split()
BY_NAME = {case.name: case for case in CASES}
MEASURE = {"edge": profile_edge, "cloud": profile_cloud}


@pytest.mark.parametrize(("name", "side"), crossed(AWKWARD, ["edge", "cloud"]))
def test_every_layer_and_every_cut(name: str, side: str) -> None:
    case = BY_NAME[name]
    args, kwargs = case.inputs()
    with case.setting(), WrappedModel(case.build()) as wrapped:
        found = MEASURE[side](wrapped, case.name, args, kwargs, ONCE)
        plan = wrapped.plan(*args, **kwargs)
    assert [layer.name for layer in found.layers] == [layer.name for layer in plan.layers]
    can = [layer.layer_id for layer in found.layers if layer.can_split]
    layers = [cut for cut in found.cuts if cut.layer_id >= 0 and cut.name == found.layers[cut.layer_id].name]
    assert [cut.layer_id for cut in layers] == can
    blocks = [block.name for block in plan.blocks if block.can_split]
    assert [cut.name for cut in found.cuts if cut.layer_id >= 0 and cut not in layers] == blocks
    refused = [layer for layer in found.layers if not layer.can_split]
    assert all(layer.reason for layer in refused)
    for cut in found.cuts:
        assert list(cut.stages) == (["head", "encode"] if side == "edge" else ["decode", "inject", "compute", "encode"])
        assert cut.estimated == ""
        assert cut.wire_bytes >= cut.frontier_bytes
        assert cut.cpu_ns is not None
    assert found.model.plan_digest == plan.digest


def digits(side: str = "edge", options: ProfileOptions = ONCE, **more: Any) -> Profile:
    spec = load_spec("digits")
    example = spec.example()
    assert example is not None
    with WrappedModel(spec.load_model()) as wrapped:
        return MEASURE[side](wrapped, "digits", *example, options, **more)


def test_layers_and_what_is_outside_add_up_to_the_whole() -> None:
    found = digits()
    layers = sum(layer.inference_ns.median for layer in found.layers)
    assert layers + found.outside_ns.median == pytest.approx(found.whole_ns.median)


def test_the_middles_of_the_layers_and_of_what_is_outside_add_up_to_the_wholes() -> None:
    found = digits(options=dataclasses.replace(ONCE, repetitions=9))
    parts = sum(layer.inference_ns.middle for layer in found.layers) + found.outside_ns.middle
    assert parts == pytest.approx(found.whole_ns.middle, rel=1e-9)


def test_as_many_repetitions_as_were_asked_for() -> None:
    found = digits(options=dataclasses.replace(ONCE, repetitions=4))
    assert found.whole_ns.n == 4
    assert {cut.stages["head"].n for cut in found.cuts} == {4}
    assert {layer.inference_ns.n for layer in found.layers} == {4}


@pytest.mark.parametrize("side", ["edge", "cloud"])
def test_without_time_most_cuts_are_estimated_and_say_so(side: str) -> None:
    found = digits(side, ProfileOptions(warmup=0, repetitions=50, seconds=1e-6))
    assert found.whole_ns.n == 1  # once in any case
    exact = digits(side)
    assert [cut.layer_id for cut in found.cuts] == [cut.layer_id for cut in exact.cuts]
    measured = [cut for cut in found.cuts if not cut.estimated]
    assert {found.cuts[0].layer_id, found.cuts[-1].layer_id} <= {cut.layer_id for cut in measured}
    assert min(exact.cuts, key=lambda cut: cut.frontier_bytes).name in {cut.name for cut in measured}
    assert len(measured) < len(found.cuts) / 2
    for cut, same in zip(found.cuts, exact.cuts, strict=True):
        assert {stage.n for stage in cut.stages.values()} == ({0} if cut.estimated else {1})
        assert all(0 <= stage.q1 <= stage.median <= stage.q3 for stage in cut.stages.values())
        assert cut.frontier_bytes == same.frontier_bytes
        assert cut.wire_bytes == pytest.approx(same.wire_bytes, abs=128)  # padding and digits of a header


def test_wire_bytes_are_what_a_client_sends() -> None:
    spec = load_spec("digits")
    args, kwargs = spec.example() or ((), {})
    with WrappedModel(spec.load_model()) as wrapped:
        parcel = wrapped.forward(*args, end=20, **kwargs).pack()
        name = wrapped.layers[20].name
    found = digits().cut(name)
    assert found is not None
    assert found.wire_bytes == len(parcel.header) + parcel.nbytes


def test_memory_grows_with_the_head_and_ends_at_the_whole() -> None:
    found = digits()
    peaks = [cut.memory_peak.value or 0.0 for cut in found.cuts]
    assert peaks == sorted(peaks)
    assert found.whole_memory_peak.value == peaks[-1]
    assert "weights not" in found.cuts[0].memory_peak.note


def test_the_inputs_are_left_alone() -> None:
    case = BY_NAME["writes_into_its_input"]
    args, kwargs = case.inputs()
    before = args[0].clone()
    with WrappedModel(case.build()) as wrapped:
        profile_edge(wrapped, case.name, args, kwargs, ONCE)
    assert torch.equal(args[0], before)


@pytest.mark.parametrize("metrics", [True, False])
def test_the_setting_of_layer_metrics_is_put_back_and_named(metrics: bool) -> None:
    spec = load_spec("digits")
    args, kwargs = spec.example() or ((), {})
    with WrappedModel(spec.load_model(), metrics=metrics) as wrapped:
        found = profile_edge(wrapped, "digits", args, kwargs, ONCE)
        assert wrapped.metrics_enabled is metrics
    assert found.settings["metrics"] is False  # what was asked for, whatever the model had before
    assert len(found.layers) == 49


def test_a_cut_that_fails_when_it_runs_is_left_out_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = HeadTimer.run

    def run(self: HeadTimer, layer_id: int, codecs: tuple[str, ...] = ()) -> Any:
        if layer_id == 7:
            raise CutRefused("another path")
        return plain(self, layer_id)

    monkeypatch.setattr(HeadTimer, "run", run)
    found = digits()
    assert found.cut(found.layers[7].name) is None
    assert not found.layers[7].can_split
    assert "another path" in found.layers[7].reason


def test_a_model_that_never_takes_its_path_is_refused() -> None:
    spec = load_spec("digits")
    args, kwargs = spec.example() or ((), {})
    with WrappedModel(spec.load_model()) as wrapped:
        forwards = WholeForwards(wrapped, Inputs(wrapped, args, kwargs), ["other layers"])
        forwards.run()
        with pytest.raises(CutRefused, match="another path"):
            forwards.take()


def test_progress_is_reported_and_may_end_it() -> None:
    class Enough(Exception):
        pass

    seen: list[tuple[int, int, str]] = []

    def on_progress(done: int, total: int, what: str) -> None:
        seen.append((done, total, what))
        if len(seen) == 3:
            raise Enough

    with pytest.raises(Enough):
        digits(on_progress=on_progress)
    assert all(0 <= done <= total and what for done, total, what in seen)


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[int, int]] = []
    digits(
        options=ProfileOptions(warmup=2, repetitions=3),
        on_progress=lambda done, total, what: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert all(done <= total for done, total in seen)


def test_before_every_measurement_the_edge_does_what_a_client_does_before_a_head() -> None:
    path = sorted(IMAGES.glob("*.png"))[0]
    read: list[Path] = []
    found = digits(options=dataclasses.replace(ONCE, repetitions=2), files=[path], prepare=read.append)
    rounds = 2 * (2 + len(found.cuts)) + len(found.cuts)  # two that count, and every cut once to warm up
    assert read == [path] * rounds
    assert found.files[0].prepare_ns.n == rounds
    assert found.finish_ns is not None and found.finish_ns.n == rounds
    assert digits("cloud").finish_ns is None


def test_the_middles_of_a_cuts_stages_are_of_the_same_runs() -> None:
    wild = [TimedRun({"head": 100, "encode": 1}, 0, 8), *[TimedRun({"head": 10, "encode": n}, 0, 8) for n in (2, 3, 4)]]
    stages = _known(0, 8, wild).stages
    assert stages["head"].middle + stages["encode"].middle == 13.5
    assert stages["encode"].median == 2.5


def test_files_are_prepared_and_timed() -> None:
    spec = load_spec("digits")
    path = sorted(IMAGES.glob("*.png"))[0]
    found = digits(files=[path], prepare=spec.preprocess)
    assert [(file.name, file.suffix, file.nbytes) for file in found.files] == [(path.name, ".png", path.stat().st_size)]
    with pytest.raises(SpecError, match="cannot be read"):
        digits(files=[path.with_name("missing.png")], prepare=spec.preprocess)


def test_model_error_is_raised() -> None:
    spec = load_spec("digits")
    with WrappedModel(spec.load_model()) as wrapped, pytest.raises(ValueError, match="expected 4D"):
        profile_edge(wrapped, "digits", (torch.zeros(1, 2, 3),), {}, ONCE)


def test_large_frontiers_are_made_again_instead_of_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from shared_hooks.profiling import timers

    monkeypatch.setattr(timers, "KEEP_BYTES", 0)
    found = digits("cloud")
    assert all(isinstance(cut, CutProfile) and cut.stages["compute"].n == 1 for cut in found.cuts)


@pytest.mark.parametrize(
    "wrong",
    [
        {"warmup": -1},
        {"warmup": True},
        {"repetitions": 0},
        {"repetitions": 1.5},
        {"seconds": 0.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"pause": -1.0},
        {"pause": float("nan")},
        {"codec": "zip"},
    ],
)
def test_nonsense_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        ProfileOptions(**wrong)


@pytest.mark.parametrize("side", ["edge", "cloud"])
def test_several_codecs_are_measured_on_the_frontiers_of_the_same_heads(side: str) -> None:
    found = digits(side, dataclasses.replace(ONCE, codecs=("raw", "lz4", "int8")))
    assert found.settings["codecs"] == ["raw", "lz4", "int8"]
    for cut in found.cuts:
        assert set(cut.codecs) == {"lz4", "int8"}, "raw is what the stages are of"
        assert all(one.ns.middle > 0 and one.ns.n for one in cut.codecs.values())
        assert cut.frontier_bytes < 1000 or cut.codecs["int8"].wire_bytes < cut.wire_bytes / 2


def test_codecs_at_a_cut_without_time_are_drawn_between_those_that_were_measured() -> None:
    times = [TimedCodec(100, 500)]
    known = [(0, 1000, 500, times), (4, 3000, 600, [TimedCodec(300, 600)])]
    drawn = estimated_codec(2, 2000, known)
    assert drawn.wire_bytes == pytest.approx(2000 * (0.5 + 0.2) / 2)
    assert drawn.ns.middle == pytest.approx(200) and drawn.ns.n == 0


def test_codecs_with_books_are_measured_only() -> None:
    spec = load_spec("digits")
    args, kwargs = spec.example() or ((), {})
    with WrappedModel(spec.load_model()) as wrapped:
        cut = wrapped.plan(*args, **kwargs).layers[20].name
        heads = [wrapped.forward(args[0] * share, end=20, **kwargs) for share in (0.5, 0.75, 1.0)]
    options = ProfileOptions(
        warmup=0, repetitions=1, seconds=600, pause=0.0, codecs=("lz4", "basis"), books={cut: books_of(heads, 1.0)}
    )
    found = digits(options=options)
    assert [one.layer_id for one in found.cuts if "basis" in one.codecs] == [20]
    assert all("lz4" in one.codecs for one in found.cuts)
    measured = found.cut(cut)
    assert measured is not None and measured.codecs["basis"].ns.n == 1
    assert measured.codecs["basis"].wire_bytes < measured.wire_bytes / 4
    cloud = digits("cloud", dataclasses.replace(options, books={}))
    assert not any("basis" in one.codecs for one in cloud.cuts)

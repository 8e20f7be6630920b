"""What was learnt and what leaks, in plans, in `split="auto"`, in calibrations and in a sweep's report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import edge_client
from edge_client import EdgeClient, local_server
from edge_client.adaptive import AutoOptions
from edge_client.adaptive.controller import SplitController
from edge_client.model_choice import ModelChoice
from edge_client.planning.leakage import CutLeakage, LeakageTable, Spread, bound_of, write
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Constraints
from edge_client.user_text import EDGE_ONLY
from shared_hooks import WrappedModel
from shared_hooks.codecs import CODECS, learned
from shared_hooks.codecs.learned import Bottleneck, Design, LearnedFile, Piece, SymbolCoder
from shared_hooks.errors import BadFrame, SpecError
from shared_hooks.models import load_spec
from shared_hooks.profiling.profile import ModelIdentity
from tests.edge_client.planning.made import SHAPES, profile

IMAGES = Path("shared_hooks/models/digits/images").resolve()
CUT = "stage2.1.relu#2"
CHOICE = ModelChoice("digits", device="cpu", threads=1)
QUICK: Any = {"repetitions": 1, "seconds": 0.3, "progress": False}


def table(weights: str, leaks: dict[str, float]) -> LeakageTable:
    cuts = [
        CutLeakage(cut, number, "raw", Spread(value, value, value, (value,)), {})
        for number, (cut, value) in enumerate(leaks.items())
    ]
    who = ModelIdentity("digits", weights, "s", "p", None)
    return LeakageTable(who, "pictures", "small", 3, 10, 3, 0, "now", {"ssim": 0.2}, {"ssim": 1.0}, tuple(cuts))


@pytest.fixture(scope="module")
def weights() -> str:
    with WrappedModel(load_spec("digits").load_model("cpu")) as wrapped:
        return wrapped.weights_hash()


@pytest.fixture(scope="module")
def codec(weights: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    design = Design("map", 32, 32, 1, 8, 4, (8, 8), positive=True)
    often = SymbolCoder.frequencies_of(np.ones((8, 4)))
    file = tmp_path_factory.mktemp("codec") / "codec.safetensors"
    LearnedFile("digits", weights, CUT, (Piece(Bottleneck(design).requires_grad_(False).eval(), often),)).write(file)
    return f"learned:{file}"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(CODECS)
    monkeypatch.setattr("shared_hooks.codecs.registry._added", {})
    yield
    CODECS.clear()
    CODECS.update(before)


@pytest.fixture(scope="module")
def server(codec: str) -> Iterator[str]:
    with local_server(CHOICE, arguments=["--codec", codec]) as address:
        yield address


def test_the_controller_never_crosses_the_bound_whatever_the_link() -> None:
    layers = SHAPES["funnel"]
    edge, cloud = profile("edge", layers), profile("cloud", layers)
    names = [cut.name for cut in edge.cuts]
    leaks = {name: 1 - number / len(names) for number, name in enumerate(names)}
    bound = bound_of(0.5, table("w", leaks))
    allowed = {EDGE_ONLY, *(name for name, value in leaks.items() if value <= 0.5)}
    for mbit in (0.5, 5, 50, 500):
        ns = 8e9 / (mbit * 1e6)
        curve = Curve(((0, 1e6), (1 << 20, 1e6 + ns * (1 << 20))))
        one = SplitController(edge, cloud, Link(curve, curve), constraints=Constraints(leakage=bound))
        for at in range(5):
            assert one.choose(at * 10**9).candidate.name in allowed


def test_a_plan_with_a_learned_codec_and_a_bound(server: str, codec: str, weights: str, tmp_path: Path) -> None:
    file = tmp_path / "leakage.json"
    write(table(weights, {CUT: 0.2, "stem.2": 0.9}), file)
    how = {**QUICK, "seconds": 20.0}  # every cut is measured: bytes of others would be raw ones
    planned = edge_client.plan(server, CHOICE, codec=codec, leakage=file, max_leakage=0.3, **how)
    assert planned.best in (CUT, EDGE_ONLY)
    by = {one.name: one for one in planned.candidates}
    assert by[CUT].bytes_up < 400 < by["stem.2"].bytes_up, "raw elsewhere"
    assert "leakage unknown" in planned.decision.rejected["stage1.0.relu#2"]
    assert planned.as_dict()["constraints"]["max_leakage"] == 0.3
    with pytest.raises(SpecError, match="of other weights"):
        edge_client.plan(server, CHOICE, leakage=table("0" * 64, {CUT: 0.2}), max_leakage=0.3, **QUICK)


def test_a_calibration_judges_it_and_auto_may_choose_it(server: str, codec: str) -> None:
    images = [torch.randn(1, 1, 32, 32) for _ in range(12)]
    found = edge_client.calibrate(
        CHOICE, images, codecs=f"int8,noise:0.5,{codec}", cuts=f"{CUT},stem.2", progress=False
    )
    name = next(one for one in CODECS if one.startswith("learned:"))
    here, elsewhere = (next(one for one in found.table.cuts if one.name == cut) for cut in (CUT, "stem.2"))
    assert {one.codec for one in here.codecs} == {"raw", "int8", "noise:0.5", name}
    assert name not in {one.codec for one in elsewhere.codecs}, "it makes nothing smaller there"
    made = [replace(one, loss=0.0, low=0.0, high=0.0) if one.codec == name else one for one in here.codecs]
    good = replace(found.table, cuts=(replace(here, codecs=tuple(made)),))
    with EdgeClient(server, CHOICE, split=CUT, codec="auto", calibration=good, max_loss=0.01) as client:
        client.codec_link(lambda: Link(Curve(((0, 1e6), (1 << 20, 9e9))), Curve(((0, 1e6), (1 << 20, 9e9)))))
        answers = [client.infer(images[0]) for _ in range(3)]
    assert answers[-1].codecs == (name,)


def test_along_a_chain_it_is_used_at_the_crossing_it_was_learnt_for(server: str, codec: str, tmp_path: Path) -> None:
    picture = torch.randn(1, 1, 32, 32)
    gateway = ["--next", f"gpu={server}"]
    cuts = ["stem.2", CUT]
    with (
        local_server(CHOICE, arguments=gateway) as without,
        local_server(CHOICE, arguments=[*gateway, "--codec", codec]) as address,
    ):
        with EdgeClient([address, "gpu"], CHOICE, cuts) as client:
            raw = client.infer(picture)
        for given in (codec, ["raw", codec], ["int8", codec]):
            with EdgeClient([address, "gpu"], CHOICE, cuts, codec=given) as client:
                answer = client.infer(picture)
                assert answer.parts[0].bytes_up < raw.parts[0].bytes_up / 4
                assert (answer.bytes_up < raw.bytes_up / 2) == (given[0] == "int8")
        with EdgeClient([address, "gpu"], CHOICE, [CUT, "stage3.0"], codec=codec) as client:
            answer = client.infer(picture)
            assert answer.bytes_up < raw.parts[0].bytes_up / 4 < answer.parts[0].bytes_up, "raw at other cuts"
        unknown = pytest.raises(BadFrame, match="no codec is called 'learned:")
        with EdgeClient([without, "gpu"], CHOICE, cuts, codec=["raw", codec]) as client, unknown:
            client.infer(picture)
        with pytest.raises(SpecError, match="one for each of its 2 crossings"):
            EdgeClient([address, "gpu"], CHOICE, cuts, codec=["raw", "raw", codec])
        strange = tmp_path / "codec.safetensors"
        known = learned.read(Path(codec.removeprefix("learned:"))).file
        replace(known, weights_hash="0" * 64).write(strange)
        other = pytest.raises(SpecError, match="learnt with other weights")
        with EdgeClient([address, "gpu"], CHOICE, cuts, codec=["raw", f"learned:{strange}"]) as client, other:
            client.infer(picture)


def test_split_auto_keeps_to_a_bound(server: str, weights: str) -> None:
    options = AutoOptions(
        constraints=Constraints(leakage=bound_of(0.3, table(weights, {CUT: 0.2, "stem.2": 0.9}))),
        profile_seconds=0.5,
        progress=False,
    )
    with EdgeClient(server, CHOICE, split="auto", auto=options) as client:
        assert {client.infer(torch.randn(1, 1, 32, 32)).split for _ in range(4)} <= {CUT, EDGE_ONLY}


def test_a_sweeps_report_draws_latency_against_leakage(server: str, weights: str, tmp_path: Path) -> None:
    leaks = table(weights, {CUT: 0.2, "stem.2": 0.9})
    how: Any = {"cuts": f"{CUT},stem.2", "repetitions": 1, "layer_repetitions": 0, "local": False, "predict": False}
    inputs = [str(next(IMAGES.glob("*.png")))]
    found = edge_client.sweep(server, CHOICE, inputs, output=tmp_path, leakage=leaks, progress=False, **how)
    assert found.summary is not None
    page = (tmp_path / "report.html").read_text()
    assert 'id="figure-front-leakage"' in page
    known = json.loads((tmp_path / "summary.json").read_text())["leakage"]
    assert known[CUT] == 0.2 and known["stem.2"] == 0.9 and known[EDGE_ONLY] == 0.0

"""Heads in other engines than eager PyTorch: timed for a plan, asked by a sweep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import edge_client
from edge_client import ModelChoice, local_server
from edge_client.tasks.engines import ENGINES, engines_of
from shared_hooks.errors import SpecError
from tests.shipped import IMAGES as FOLDER

IMAGES = sorted(FOLDER.glob("*.png"))
SMALL = ModelChoice("digits", threads=1)


def test_engines_by_name() -> None:
    assert engines_of("torch, onnxruntime,torch") == ("torch", "onnxruntime")
    assert engines_of(list(ENGINES)) == ENGINES
    with pytest.raises(SpecError, match="must be of torch, onnxruntime"):
        engines_of("onnx")
    with pytest.raises(SpecError, match="not with edge_profile"):
        edge_client.plan("own", SMALL, engine="onnxruntime", edge_profile="x.json")
    with pytest.raises(SpecError, match="plan times others"):
        edge_client.sweep("own", SMALL, output="x", engine="torch,compile")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with local_server(SMALL, arguments=["--tails", "stem.2,pool"]) as address:
        yield address


def test_a_plan_has_a_decision_for_each_engine(server: str) -> None:
    found = edge_client.plan(
        server, SMALL, IMAGES[0], engine="torch,onnxruntime", repetitions=2, seconds=2, correct=False, progress=False
    )
    one = found.engines["onnxruntime"]
    cuts = [each.name for each in one.candidates if each.is_cut]
    assert not one.refused and set(cuts) == {each.name for each in found.candidates if each.is_cut}
    assert one.decision.best_cut is not None and one.differences.keys() >= set(cuts)
    assert all(value < 1e-5 for value in one.differences.values())
    torchs = {each.name: each for each in found.candidates}
    for each in one.candidates:
        known = torchs[each.name]
        assert (each.bytes_up, each.server_ns) == (known.bytes_up, known.server_ns)
        if each.is_cut:
            assert each.stages_ns["edge"] != known.stages_ns["edge"] and each.edge_energy.value is None
    assert "heads in onnxruntime" in found.text()
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize("engine", ["compile", "aotinductor"])
def test_compiled_heads_are_timed_and_compared(engine: str) -> None:
    """The model is small, because compiling one head takes seconds."""
    tiny = ModelChoice("tests.edge_client.small_models:Residual", threads=1, example="1,3,16,16")
    found = edge_client.plan("own", tiny, engine=engine, repetitions=1, seconds=0.5, correct=False, progress=False)
    one = found.engines[engine]
    assert one.differences and all(value < 1e-4 for value in one.differences.values())
    assert one.refused and all("no time left" in why for why in one.refused.values())


def test_a_sweep_asks_with_heads_in_an_engine(server: str, tmp_path: Path) -> None:
    for engine in ("torch", "torch,onnxruntime", "torch,onnxruntime"):  # named later, and measured once
        found = edge_client.sweep(
            server, SMALL, IMAGES[:2], output=tmp_path, cuts="stem.2,stage2.0.conv2,pool", repetitions=1, predict=False,
            local=False, engine=engine, progress=False,
        )  # fmt: skip
    assert (tmp_path / "journal.jsonl").read_text().count('"engine"') == 1
    known = json.loads((tmp_path / "summary.json").read_text())["engines"]["onnxruntime"]
    assert list(known["cuts"]) == ["stem.2", "pool"] and list(known["refused"]) == ["stage2.0.conv2"]
    assert "no tail behind" in known["refused"]["stage2.0.conv2"]
    for one in known["cuts"].values():
        assert 0 < one["head_ns"] < one["latency_ns"] and one["difference"] < 1e-5 and one["requests"] == 2
    assert "heads in onnxruntime" in found.text()
    page = (tmp_path / "report.html").read_text()
    assert "Heads in onnxruntime" in page and "The second bar of a cut" in page

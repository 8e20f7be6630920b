"""codec="auto": a real client and server, on a link that is what the test says it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_client import AutoOptions, EdgeClient, ModelChoice, calibrate, choosing
from edge_client.planning.codecs import LossTable
from edge_client.planning.link import Curve, Link
from shared_hooks.codecs import CODECS
from shared_hooks.errors import SpecError
from tests.edge_client.served import Served, served

SPEC = """
id = "wide"
factory = "tests.edge_client.choosing.test_choosing:Wide"
[example]
args = [{shape = [1, 4, 32, 32]}]
"""
SLOW, FAST = 1e5, 1e12


class Wide(torch.nn.Module):
    """Its second layer's output is half zeros; input (1, 4, 32, 32), output (1, 5)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.relu = torch.nn.ReLU()
        self.last = torch.nn.Linear(8 * 32 * 32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.relu(self.conv(x)).flatten(1))
        return out


def image(seed: int) -> torch.Tensor:
    return torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), text=SPEC) as one:
        yield one


@pytest.fixture(scope="module")
def table() -> LossTable:
    images = [image(seed) for seed in range(40)]
    found = calibrate(Wide().eval(), images, codecs="int8,int2", kind="tensors", max_loss=0.5, progress=False)
    return found.table


def client(server: Served, rate: float, monkeypatch: pytest.MonkeyPatch, **words: Any) -> EdgeClient:
    link = Link(Curve.line(1e6, rate), Curve.line(0.0, rate))
    monkeypatch.setattr(choosing, "probed", lambda server, credentials, sizes: link)
    return EdgeClient(server.address, ModelChoice(server.spec), "relu", codec="auto", **words)


def test_slow_link_prefers_small_lossless_codecs(
    server: Served, table: LossTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Wide().eval()
    with client(server, SLOW, monkeypatch) as lossless, torch.no_grad():
        answers = [lossless.infer(image(seed)) for seed in range(4)]
        assert all(torch.equal(one.output, model(image(seed))) for seed, one in enumerate(answers))
        assert all(set(one.codecs) - {"raw"} for one in answers)
        assert all(CODECS[name].lossless for one in answers for name in one.codecs)
    with client(server, SLOW, monkeypatch, calibration=table, max_loss="20%") as lossy:
        small = lossy.infer(image(0))
        assert small.codecs == ("int8",) or small.codecs == ("int2",)
        assert small.bytes_up < answers[0].bytes_up
        assert small.codecs[0] in repr(small)


def test_on_a_fast_link_raw_is_fastest(server: Served, table: LossTable, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(server, FAST, monkeypatch, calibration=table, max_loss=0.2) as fast:
        assert {fast.infer(image(seed)).codecs for seed in range(3)} == {("raw",)}


def test_at_a_cut_that_the_table_does_not_know_nothing_is_lost(
    server: Served, table: LossTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = replace(table, cuts=tuple(cut for cut in table.cuts if cut.name != "relu"))
    with client(server, SLOW, monkeypatch, calibration=known, max_loss="20%") as careful:
        assert all(CODECS[name].lossless for seed in range(3) for name in careful.infer(image(seed)).codecs)
    assert caplog.text.count("the calibration has no cut after relu") == 1


def test_a_table_of_other_weights_is_refused_when_it_is_opened(
    server: Served, table: LossTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(table, model=replace(table.model, weights_hash="ab" * 32))
    with (
        pytest.raises(SpecError, match="is of other weights"),
        client(server, SLOW, monkeypatch, calibration=other, max_loss="20%"),
    ):
        pass


def test_a_witness_judges_only_what_lost_nothing(
    server: Served, table: LossTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(server, SLOW, monkeypatch, calibration=table, max_loss="20%", witness=1.0) as lossy:
        answer = lossy.infer(image(0))
        assert not all(CODECS[name].lossless for name in answer.codecs)
        assert answer.witness is None and not lossy.refused


def test_several_requests_at_once_are_answered_in_order(
    server: Served, table: LossTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Wide().eval()
    with client(server, SLOW, monkeypatch) as one, torch.no_grad():
        answers = list(one.infer_many([(image(seed),) for seed in range(8)]))
        assert all(torch.equal(answer.output, model(image(seed))) for seed, answer in enumerate(answers))


def test_with_the_cut_the_codec_is_chosen_and_both_are_named(server: Served, table: LossTable, tmp_path: Path) -> None:
    options = AutoOptions(profile_seconds=10.0, partitioner="fixed", option="relu + int8")
    words: dict[str, Any] = {"calibration": table, "max_loss": "20%", "auto": options}
    with EdgeClient(server.address, ModelChoice(server.spec), "auto", codec="auto", **words) as auto:
        answers = [auto.infer(image(seed)) for seed in range(3)]
        assert {one.split for one in answers} == {"relu"}
        chosen = [entry for entry in auto.decisions if entry["kind"] == "choice"]
        assert {(entry["candidate"], entry["codec"]) for entry in chosen} == {("relu", "int8")}
        assert {one.codecs for one in answers} <= {("int8",), ("raw",)}, "a tensor that is there sooner raw goes raw"

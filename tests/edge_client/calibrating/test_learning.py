"""The codec "basis" in a calibration: what is learnt, which step is kept, and that clients go by the table's books."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from edge_client import EdgeClient, calibrate
from edge_client.calibrating.inputs import LossTally
from edge_client.calibrating.outputs import ComparedRow
from edge_client.calibrating.study import MOST, STEPS, coarsest, set_apart
from edge_client.planning import codecs
from edge_client.tasks.calibrate import Calibrated
from shared_hooks.errors import SpecError
from tests.edge_client.served import Small, served

DICE = torch.Generator().manual_seed(1)
WAYS = torch.randn(2, 8, generator=DICE)
INPUTS = [torch.randn(32, 2, generator=DICE) @ WAYS for _ in range(60)]


def study(**words: object) -> Calibrated:
    settings = {"codecs": "basis", "cuts": "first", "max_loss": "20%", "kind": "tensors", "progress": False}
    return calibrate(Small().eval(), INPUTS, **{**settings, **words})  # type: ignore[arg-type]


def test_inputs_to_learn_from_are_spread_and_judge_nothing() -> None:
    assert set_apart(100, None) == list(range(0, 100, 4))
    assert set_apart(20, None) == [] and set_apart(100, 0) == []
    assert len(set_apart(10_000, None)) == MOST and len(set_apart(10, 9)) == 9
    assert study().table.inputs == 45
    assert study(learn=12).table.inputs == 48


def test_the_coarsest_step_is_kept_that_is_within_the_loss(tmp_path: Path) -> None:
    found = study(output=tmp_path)
    row = found.table.of("first", "basis")
    assert row is not None and row.high is not None and row.high <= 0.2 and row.measures["step"] in STEPS
    finer = study(max_loss="2%").table.of("first", "basis")
    assert finer is not None and finer.measures["step"] < row.measures["step"] and finer.bytes_up > row.bytes_up
    back = codecs.read(tmp_path / "calibration.json")
    assert [book.to_json() if book else None for book in back.books["first"]] == [
        book.to_json() if book else None for book in found.table.books["first"]
    ]


def test_nothing_is_learnt_where_that_is_wanted() -> None:
    found = study(learn=0)
    assert not found.table.books and found.table.of("first", "basis") is None


def test_after_a_step_that_loses_too_much_no_coarser_one_is_kept() -> None:
    def tally(step: float, losses: list[float]) -> LossTally:
        made = LossTally("basis", False, False, 0.95, step)
        made.take([ComparedRow(loss) for loss in losses])
        return made

    fine, middle, coarse = tally(0.25, [0.0] * 20), tally(0.5, [0.5] * 20), tally(1.0, [0.0] * 20)
    assert coarsest([fine, middle, coarse], 0.1) is fine
    assert coarsest([fine, tally(0.5, [0.05] * 20)], 0.1) is not fine
    assert coarsest([], 0.1) is None


@pytest.mark.parametrize("codec", ["basis", "frames"])
def test_a_client_goes_by_its_books(tmp_path: Path, codec: str) -> None:
    table = study().table
    with (
        served(tmp_path) as server,
        EdgeClient(server.address, server.spec, split="first", codec=codec, calibration=table) as client,
    ):
        answer = client.infer(INPUTS[0])
        assert set(answer.codecs) == {codec}
        assert float((answer.output - client.wrapped.whole(INPUTS[0])).norm()) < 0.3 * float(answer.output.norm())


def test_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    other = Small()
    torch.nn.init.zeros_(other.last.weight)
    with served(tmp_path) as server:
        foreign = calibrate(other.eval(), INPUTS, codecs="basis", cuts="first", kind="tensors", progress=False).table
        with (
            pytest.raises(SpecError, match="other weights"),
            EdgeClient(server.address, server.spec, split="first", codec="basis", calibration=foreign) as client,
        ):
            client.infer(INPUTS[0])
        for codec, wrong, said in (("basis", study(learn=0).table, "has no books"), ("int8", foreign, "is for")):
            with pytest.raises(SpecError, match=said):
                EdgeClient(server.address, server.spec, codec=codec, calibration=wrong)
    with pytest.raises(SpecError, match="learn"):
        study(learn=-1)
    path = tmp_path / "table.json"
    data = study().table.as_dict()
    data["books"]["first"][0]["size"] = [1 << 30, 1, 1, 1]
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError, match="books"):
        codecs.read(path)


@pytest.mark.parametrize("codec", ["basis", "frames"])
def test_at_a_cut_of_which_nothing_was_learnt_it_goes_raw_and_that_is_said_once(
    tmp_path: Path, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    with served(tmp_path) as server, EdgeClient(server.address, server.spec, split="first", codec=codec) as client:
        assert {client.infer(one).codecs for one in INPUTS[:3]} == {("raw",)}
    assert caplog.text.count(f"codec {codec}: nothing was learnt of the cut after first") == 1

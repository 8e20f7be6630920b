"""The study as users run it: head, codec, tail; what is written, what is read back, and bad inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_client import calibrate
from edge_client.__main__ import main
from edge_client.calibrating.inputs import inputs_of
from edge_client.calibrating.study import SIMILAR
from edge_client.planning.codecs import DOMINATED, loss_of, read
from edge_client.tasks.calibrate import Calibrated
from shared_hooks.codecs import CODECS
from shared_hooks.errors import IsthmusError, SpecError
from shared_hooks.models import load_spec
from tests.edge_client.calibrating.rounding import COARSE, FINE, Rounded
from tests.edge_client.small_models import Branching, Residual

INPUTS = [torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(number)) for number in range(60)]
LABELLED = [(image, str(number % 10)) for number, image in enumerate(INPUTS)]


class Reversed(Rounded):
    """What comes out is the opposite of what went in."""

    def decode(self, *args: Any) -> Any:
        return -super().decode(*args)


@pytest.fixture(autouse=True)
def codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    for codec in (FINE, COARSE):
        monkeypatch.setitem(CODECS, codec.name, codec)


def model() -> Residual:
    torch.manual_seed(0)
    return Residual().eval()


def study(**words: Any) -> Calibrated:
    settings: dict[str, Any] = {"codecs": "lz4,test-fine,test-coarse", "cuts": "input,stem,relu", "progress": False}
    return calibrate(model(), words.pop("inputs", LABELLED), **{**settings, **words})


def test_every_codec_is_judged_at_every_cut_and_bounds_hold_what_was_counted() -> None:
    found = study(max_loss="10%")
    assert [cut.name for cut in found.table.cuts] == ["input", "stem", "relu"]
    for cut in found.table.cuts:
        known = {one.codec: one for one in cut.codecs}
        assert set(known) - {"lz4"} == {"raw", "test-fine", "test-coarse"}, "lz4 makes noise no smaller"
        assert known["raw"].loss == 0 and known["raw"].n == 0
        assert known["test-fine"].bytes_up < known["raw"].bytes_up / 2
        for one in known.values():
            assert one.high is not None and one.low <= one.loss <= one.high
    stem = found.table.of("stem", "test-fine")
    assert stem is not None and stem.n == 60 and stem.loss < 0.2 and stem.accuracy is not None
    rough = found.table.of("stem", "test-coarse")
    assert rough is not None and rough.measures["kl"] > stem.measures["kl"]


def test_the_loss_of_a_codec_is_what_the_model_says_with_it() -> None:
    """Worked out once more, without the study."""
    whole = model()
    errors = []
    with torch.no_grad():
        for image in INPUTS:
            stem = whole.stem(image)
            steps = float(stem.abs().max())
            rounded = (stem / steps).round() * steps
            other = whole.head(whole.relu(whole.body(rounded) + rounded).mean((2, 3)))
            errors.append(float((other - whole(image)).norm() / whole(image).norm()))
    known = study(max_loss=0.99, cuts="stem", kind="tensors").table.of("stem", "test-coarse")
    assert known is not None and known.loss == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_too_lossy_codec_is_abandoned_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "test-coarse", Reversed("test-coarse", 127))
    known = study(max_loss="1%", kind="tensors").table.of("stem", "test-coarse")
    assert known is not None and known.stopped and known.n < 60 and not known.within(0.02)


def test_too_few_inputs_for_the_loss_are_reported_and_allow_nothing_lossy() -> None:
    few = study(max_loss="0.5%")
    assert any("0.5 % needs 598" in text for text in few.warnings)
    assert not any(one.within(0.005) for cut in few.table.cuts for one in cut.codecs if not one.lossless)
    assert study(max_loss="10%").warnings == ()
    assert any("10 at least" in text for text in study(inputs=INPUTS[:4], kind="tensors").warnings)


def test_the_file_comes_back_and_is_bound_to_its_weights(tmp_path: Path) -> None:
    found = study(max_loss="10%", output=tmp_path)
    again = read(tmp_path / "calibration.json")
    assert again == found.table
    assert "rate" in (tmp_path / "report.html").read_text()
    again.check(found.table.model.weights_hash, found.table.model.structure_digest)
    with pytest.raises(SpecError, match=r"calibration.json is of other weights.*edge-client calibrate"):
        again.check("0" * 64, found.table.model.structure_digest)
    assert again.allows("stem", "lz4", None) and again.allows("nowhere", "raw", None)
    assert not again.allows("stem", "test-fine", None)
    assert not again.allows("nowhere", "test-fine", 0.9)
    assert again.allows("stem", "test-fine", 0.9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format="x"), "no calibration of codecs"),
        (lambda data: data.update(version=2), "this Isthmus reads 1"),
        (lambda data: data["cuts"][1]["codecs"][2].update(loss=-1), "number of at least 0"),
        (lambda data: data["cuts"][1]["codecs"][0].update(loss=0.1), "a lossless codec that loses"),
        (lambda data: data["cuts"][1]["codecs"][0].update(codec="int1"), "int1 is not"),
        (lambda data: data["cuts"][1]["codecs"][2].update(low=0.9, high=0.1), "more than the upper bound"),
        (lambda data: data.pop("model"), "missing"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_place(change: Any, message: str, tmp_path: Path) -> None:
    study(output=tmp_path)
    file = tmp_path / "calibration.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(SpecError, match=message):
        read(file)


def by_default(**words: Any) -> Calibrated:
    return study(**{"codecs": None, "cuts": None, "max_loss": "20%", **words})


def test_dominated_codecs_are_skipped_unless_named() -> None:
    found = by_default()
    rows = {(row["name"], row["codec"]): row for row in found.rows()}
    left = [key for key, row in rows.items() if row["stopped"] == DOMINATED]
    assert left and all(rows[key]["n"] < 60 for key in left)
    for name, codec in left:
        mine = rows[name, codec]
        assert any(
            other["bytes_up"] <= SIMILAR * mine["bytes_up"] and other["loss"] <= mine["loss"]
            for other in rows.values()
            if other is not mine and other["layer_id"] <= mine["layer_id"]
        ), (name, codec)
    best = found.smallest
    assert best is not None and best[1].n == 45, "a quarter is learnt from, and all the others are used"
    assert {cut.name for cut in found.table.cuts} == {cut.name for cut in by_default(every=1).table.cuts}


def test_named_codec_is_measured_on_every_input() -> None:
    rows = study(codecs="int8,int4,fp16", cuts="stem,relu", max_loss=0.99, kind="tensors").rows()
    assert {row["n"] for row in rows if not row["lossless"]} == {60}


class Interrupting(Rounded):
    """Ctrl-C comes while the n-th tensor is encoded."""

    left = 10**9

    def encode(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().encode(*args)


@pytest.mark.parametrize("tensors", [6, 40, 70])
def test_an_interrupted_study_keeps_what_it_has_and_continues(
    tensors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = Interrupting("test-fine", 127)
    monkeypatch.setitem(CODECS, "test-fine", codec)

    def run(folder: Path, **words: Any) -> Calibrated:
        return study(codecs="int4,basis,test-fine", cuts="stem,relu", max_loss="20%", output=folder, **words)

    whole = run(tmp_path / "whole")
    codec.left = tensors
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts")
    known = read(tmp_path / "parts" / "calibration.json")
    assert 0 < known.inputs < 45
    assert "interrupted" in (tmp_path / "parts" / "report.html").read_text()
    lines: list[str] = []
    rest = run(tmp_path / "parts", say=lines.append)
    assert [{**row, "kl": None} for row in rest.rows()] == [{**row, "kl": None} for row in whole.rows()]
    assert lines == [f"{tmp_path / 'parts'}: continuing after {known.inputs} inputs"]
    lines.clear()
    run(tmp_path / "parts", say=lines.append)
    assert lines == [f"{tmp_path / 'parts'}: all is measured already; fresh measures it again"]


def test_a_folder_of_another_study_is_left_alone_unless_it_is_to_start_over(tmp_path: Path) -> None:
    study(output=tmp_path, inputs=LABELLED[:20])
    before = (tmp_path / "calibration.json").read_bytes()
    with pytest.raises(SpecError, match=r"holds another calibration \(inputs: 20 then, 60 now\).*fresh"):
        study(output=tmp_path)
    assert (tmp_path / "calibration.json").read_bytes() == before
    assert study(output=tmp_path, fresh=True).table.inputs == 60
    with pytest.raises(SpecError, match="fresh is for output"):
        study(fresh=True)


@pytest.mark.parametrize("value", ["-1%", "100%", 1.0, -0.1, "nan", "much", True])
def test_a_loss_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match="max_loss"):
        loss_of(value)
    assert loss_of("0.5%") == pytest.approx(0.005) and loss_of(0) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"inputs": []}, "no input"),
        ({"codecs": "zip"}, '"zip" is not one of raw'),
        ({"cuts": "steem"}, "stem"),
        ({"kind": "words"}, "must be one of classes"),
        ({"max_loss": "100%"}, "max_loss"),
    ],
)
def test_bad_words_are_refused_by_name(words: dict[str, Any], message: str) -> None:
    with pytest.raises(IsthmusError, match=message):
        study(**words)


def test_a_cut_that_an_input_refuses_is_reported_and_the_others_are_measured() -> None:
    torch.manual_seed(1)
    forks = Branching().eval()
    inputs = sorted((torch.randn(1, 4) for _ in range(12)), key=lambda one: -float(forks.first(one).sum().detach()))
    found = calibrate(forks, inputs, codecs="test-fine", cuts="first,plus", kind="tensors", progress=False)
    refused = {cut.name: cut.refused for cut in found.table.cuts}
    assert refused["first"] == "" and "UnknownLayer" in refused["plus"]
    assert "refused: plus" in found.text()


def test_labels_of_a_csv_file_reach_their_inputs_and_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = sorted((load_spec("digits").folder).rglob("*_label*.png"))[:3]
    for number, image in enumerate(images):
        (tmp_path / f"{number}.png").write_bytes(image.read_bytes())
    truths = [image.stem[-1] for image in images]
    labels = tmp_path / "labels.csv"
    labels.write_text("file,label\n" + "".join(f"{number}.png,{truth}\n" for number, truth in enumerate(truths)))
    words = ["calibrate", "--input", str(tmp_path), "--labels", str(labels), "--cuts", "stem.0", "--no-progress"]
    assert main([*words, "--codecs", "test-fine", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["labelled"] == 3 and found["whole_accuracy"] == 1.0
    assert "598" not in capsys.readouterr().err
    labels.write_text("9.png,1\n")
    assert main(words) == 2
    assert "1 of 1 labels are of no input" in capsys.readouterr().err
    labels.write_text("0.png,eight\n")
    assert main([*words, "--codecs", "test-fine"]) == 0
    assert '"eight" is no label of the model' in capsys.readouterr().err
    labels.write_text("one,two,three\n")
    assert main(words) == 2
    assert "found 3 columns" in capsys.readouterr().err


def test_a_label_for_files_of_one_name_asks_which_is_meant(tmp_path: Path) -> None:
    image = next(iter(load_spec("digits").folder.rglob("*_label*.png")))
    for kind in ("1", "8"):
        (tmp_path / "in" / kind).mkdir(parents=True)
        (tmp_path / "in" / kind / "same.png").write_bytes(image.read_bytes())
    labels = tmp_path / "labels.csv"
    labels.write_text("same.png,1\n")
    with pytest.raises(SpecError, match="as well as .*name them in full"):
        inputs_of(tmp_path / "in", labels)
    labels.write_text(f"{tmp_path / 'in' / '8' / 'same.png'},3\n")
    assert [one.truth for one in inputs_of(tmp_path / "in", labels)] == ["1", "3"]

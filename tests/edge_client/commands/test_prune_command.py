"""``edge-client prune`` on the shipped model, and both sides with what it wrote; bad words in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from edge_client import EdgeClient
from edge_client.__main__ import main
from edge_client.model_choice import ModelChoice
from edge_client.process import local_server
from edge_client.pruning import data
from shared_hooks.errors import Disagreement, SpecError
from shared_hooks.models import load_spec
from shared_hooks.models.digits import train
from shared_hooks.models.digits import train as digits
from tests.shared_hooks.selection.networks import image

NETWORKS = "tests.shared_hooks.selection.networks"
IMAGES = Path(train.__file__).parent / "images"
LAYER = "stage2.0.relu#2"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 of the images the model was trained with; the shipped ones are held out."""
    folder = tmp_path_factory.mktemp("training")
    for one in digits.load_images()[0][:160]:
        Image.fromarray(one.pixels).save(folder / one.file_name)
    return folder


@pytest.fixture(scope="module")
def made(training: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("made")
    words = ["--input", str(IMAGES), "--choose-by", str(training), "--split", LAYER, "--keep", "8,16", "--seeds", "3"]
    words += ["--structural", "--requests", "8", "--output", str(out), "--json", str(out / "report.json")]
    assert main(["prune", *words, "--threads", "1", "--no-progress"]) == 0
    return out, json.loads((out / "report.json").read_text())


def accuracy(report: dict[str, Any], scoring: str, keep: int) -> list[float]:
    return [row["accuracy"] for row in report["rows"] if (row["scoring"], row["keep"]) == (scoring, keep)]


def test_half_of_the_channels_suffice(made: tuple[Path, dict[str, Any]]) -> None:
    _, report = made
    assert (report["channels"], report["inputs"], report["calibration_inputs"]) == (32, 40, 160)
    chosen = report["chosen"]["16"]
    assert chosen != "random"
    (best,) = accuracy(report, chosen, 16)
    assert report["whole"]["accuracy"] - best <= 0.01
    control = accuracy(report, "random", 16)
    assert len(control) == 3 and best > max(control)


def test_half_of_the_bytes_cross(made: tuple[Path, dict[str, Any]]) -> None:
    served = {(one["kind"], one["keep"]): one for one in made[1]["served"]}
    assert set(served) == {("whole", 32), ("mask", 8), ("mask", 16), ("pruned", 8), ("pruned", 16)}
    for kind in ("mask", "pruned"):
        for keep in (8, 16):
            one, whole = served[kind, keep], served["whole", 32]
            assert one["frontier_bytes"] * 32 == whole["frontier_bytes"] * keep
            assert whole["bytes_up"] - one["bytes_up"] >= 0.99 * (whole["frontier_bytes"] - one["frontier_bytes"])
            assert one["exact"] == one["requests"] == 8


def test_the_page_holds_it_all_and_asks_for_nothing(made: tuple[Path, dict[str, Any]]) -> None:
    out, report = made
    text = (out / "report.html").read_text()
    assert text.count('class="figure"') == 3 and "src=" not in text and "default-src 'none'" in text
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    for row in report["rows"]:
        assert row["scoring"] in text
    assert "Cut out of the model" in text


def test_both_sides_take_the_file_and_another_mask_is_refused(made: tuple[Path, dict[str, Any]]) -> None:
    out, report = made
    spec = load_spec("digits", selection=out / "mask-16.safetensors")
    example = spec.example()
    assert example is not None
    with torch.no_grad():
        wanted = spec.load_model()(*example[0])
    with local_server(ModelChoice("digits", selection=out / "mask-16.safetensors", device="cpu", threads=1)) as address:
        with EdgeClient(address, ModelChoice(spec, device="cpu", threads=1), report["split"]) as client:
            assert torch.equal(client.infer(*example[0]).output, wanted)
        words = [
            "--server",
            address,
            "--model",
            "digits",
            "--device",
            "cpu",
            "--input",
            str(IMAGES / "0011_label1.png"),
        ]
        mine = ["--selection", str(out / "mask-16.safetensors")]
        assert main(["run", *words, *mine, "--split", report["split"], "--no-progress", "--threads", "1"]) == 0
        for other in (out / "mask-8.safetensors", out / "pruned-16.safetensors", None):
            with (
                pytest.raises(Disagreement),
                EdgeClient(
                    address,
                    ModelChoice(load_spec("digits", selection=other), device="cpu"),
                    "stem.0",
                ),
            ):
                pass


def test_without_labels_it_is_agreement_and_half_of_the_data_calibrates(
    training: Path, tmp_path: Path, capsys: Captured
) -> None:
    for index, path in enumerate(sorted(training.iterdir())[:24]):
        shutil.copy(path, tmp_path / f"{index:02}.png")
    words = ["--input", str(tmp_path), "--split", "24", "--keep", "16", "--seeds", "1", "--no-serve", "--json", "-"]
    assert main(["prune", *words, "--no-progress", "--threads", "1", "--scores", "variance,separability"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["metric"], report["layer"], report["inputs"], report["calibration_inputs"]) == (
        "agreement",
        LAYER,
        12,
        12,
    )
    assert report["whole"] == {"accuracy": None, "agreement": 1.0} and report["served"] == [] == report["files"]
    assert {row["scoring"] for row in report["rows"]} == {"variance", "separability", "random"}


def test_objects_alone_can_be_looked_at(training: Path, tmp_path: Path, capsys: Captured) -> None:
    names = sorted(path.name for path in training.iterdir())[:30]
    truths = {name: [[8, 8, 24, 24, name[-5]]] for name in names}
    found = {name: [[8, 8, 24, 23, name[-5], 0.9], [0, 0, 8, 8, name[-5], 0.8]] for name in names[:20]}
    for name, value in (("truths", truths), ("found", found)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    words = ["--input", str(IMAGES), "--choose-by", str(training), "--split", LAYER, "--keep", "16", "--seeds", "1"]
    words += ["--boxes", str(tmp_path / "truths.json"), "--predictions", str(tmp_path / "found.json"), "--no-serve"]
    assert main(["prune", *words, "--json", "-", "--no-progress", "--threads", "1", "--scores", "separability"]) == 0
    assert json.loads(capsys.readouterr().out)["places"] == 20


def test_a_folder_is_a_class(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "1.png")
    assert [item.truth for item in data.find(str(tmp_path), "--input")] == ["cat", "dog"]
    (tmp_path / "cat" / "1.png").unlink()
    (tmp_path / "dog" / "1.png").unlink()
    with pytest.raises(SpecError, match="--input: .*holds no input"):
        data.find(str(tmp_path), "--input")


def test_no_file_is_judged_that_was_chosen_by(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 4)):
        (tmp_path / name).mkdir()
        for index in range(count):
            Image.new("L", (4, 4), 10 * index + len(name) * (name == "b") * index).save(
                tmp_path / name / f"{index}.png"
            )
    with pytest.raises(SpecError, match="is also in choose_by"):
        data.separate(str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(SpecError, match="too few"):
        data.separate(str(tmp_path / "a"), None)
    chosen, judged = data.separate(str(tmp_path / "b"), None)
    assert len(chosen) == len(judged) == 2 and not {one.origin for one in chosen} & {one.origin for one in judged}


def test_either_half_of_the_data_has_all_classes(tmp_path: Path) -> None:
    """Also where the classes take turns in the names."""
    for index in range(12):
        np.save(tmp_path / f"{index:02}_label{index % 2}.npy", image(index).numpy())
    for half in data.separate(str(tmp_path), None):
        assert sorted(item.truth or "" for item in half) == ["0"] * 3 + ["1"] * 3


def test_boxes_that_cannot_be_looked_into_name_their_file(tmp_path: Path, capsys: Captured) -> None:
    for folder in ("data", "calibration"):
        (tmp_path / folder).mkdir()
        for index in range(2):
            np.save(tmp_path / folder / f"{index}.npy", image(index + len(folder)).numpy())
    words = ["--input", str(tmp_path / "data"), "--choose-by", str(tmp_path / "calibration"), "--split", "relu"]
    words += ["--model", f"{NETWORKS}:Chain", "--boxes", str(tmp_path / "boxes.json"), "--no-serve"]
    for boxes, says in (
        ({"1.npy": [[20, 0, 30, 5, "cat"]]}, "1.npy: the box (20.0, 0.0, 30.0, 5.0) lies outside"),
        ({"one.npy": [[0, 0, 3, 5, "cat"]]}, "names one.npy, but no input to choose by such as 0.npy"),
        ({"1.npy": [[0, 0, 10**400, 5, "cat"]]}, "boxes.json: 1.npy: "),
    ):
        (tmp_path / "boxes.json").write_text(json.dumps(boxes))
        assert main(["prune", *words, "--no-progress", "--threads", "1"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and says in error


@pytest.mark.parametrize(
    ("model", "layer", "why"), [("Grouped", "left", "cat (node cat)"), ("Counting", "stem", "computes something else")]
)
def test_a_structure_that_cannot_be_cut_is_refused_before_anything_is_judged(
    model: str, layer: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for index in range(4):
        np.save(tmp_path / f"{index}.npy", image(index).numpy())
    monkeypatch.setattr("edge_client.tasks.prune.try_all", lambda *args: pytest.fail("it was tried"))
    words = ["--input", str(tmp_path), "--model", f"{NETWORKS}:{model}", "--split", layer, "--structural"]
    assert main(["prune", *words, "--no-serve", "--no-progress", "--threads", "1"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--split", LAYER, "--keep", "33"], "--keep 33: expected numbers from 1 to 32"),
        (["--split", LAYER, "--keep", "0,4"], "expected numbers from 1 to 32"),
        (["--split", LAYER, "--scores", "varianz"], 'no scoring "varianz"'),
        (["--split", "stage2.0.conv9"], "Did you mean stage2.0.conv"),
        (["--split", "input"], "no layer runs before it"),
        (["--split", "stage2.0.relu"], "runs 2 times"),
        (["--split", LAYER, "--predictions", "x.json"], "--predictions needs --boxes"),
        (["--split", LAYER, "--boxes", "absent.json"], "absent.json cannot be read"),
        (["--split", LAYER, "--choose-by", "absent"], "--choose-by: no such input"),
        (["--split", LAYER, "--selection", "mask.safetensors"], "prune begins with the whole model"),
        (["--split", LAYER, "--output", "/dev/null/x"], "cannot be written"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], says: str, capsys: Captured) -> None:
    assert main(["prune", "--input", str(IMAGES), *words, "--no-serve", "--no-progress", "--threads", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["prune", "--input", str(IMAGES), "--split", LAYER, "--no-serve", "--no-progress"]) == 2
    assert 'pip install "isthmus[prune]"' in capsys.readouterr().err


def test_the_digits_can_be_written_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    training, held_out = digits.load_images()
    monkeypatch.setattr(train, "load_images", lambda: (training[:3], held_out[:2]))
    assert train.main(["--images", str(tmp_path)]) == 0
    assert len(list((tmp_path / "training").iterdir())) == 3
    assert {path.name for path in (tmp_path / "held_out").iterdir()} == {one.file_name for one in held_out[:2]}


def test_a_layer_that_no_mask_can_stand_behind_is_refused(tmp_path: Path, capsys: Captured) -> None:
    """The model calls it by a reference of its own."""
    for index in range(4):
        np.save(tmp_path / f"{index}.npy", image(index).numpy())
    words = ["--input", str(tmp_path), "--model", f"{NETWORKS}:OwnList", "--split", "stem", "--no-serve"]
    assert main(["prune", *words, "--no-progress", "--threads", "1"]) == 2
    assert "would not run" in capsys.readouterr().err

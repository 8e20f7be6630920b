"""`edge-client hierarchy`: tree, JSON, GraphML, ONNX files, and an exit status that tells."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from edge_client.__main__ import main
from shared_hooks.mapping import onnx_halves

Captured = pytest.CaptureFixture[str]


def complaint(capsys: Captured) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("edge-client: error: ") and err.count("\n") == 1
    return err


def test_the_tree_and_the_coverage_report(capsys: Captured, tmp_path: Path) -> None:
    graph = tmp_path / "map.graphml"
    assert main(["hierarchy", "--model", "digits", "--graphml", str(graph)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "DigitsNet"
    assert any("ReLU  stage1.0.relu  layers 5, 9  2 calls" in line for line in lines)
    assert "modules: 56, of them 56 ran" in lines
    assert any(line.startswith("only dynamic: 7 operations between modules (add ×6") for line in lines)
    assert graph.read_text().startswith("<?xml")


def test_json_is_alone_on_standard_output(capsys: Captured) -> None:
    assert main(["hierarchy", "--model", "digits", "--json", "-", "--depth", "1"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["format"] == "isthmus-hierarchy" and known["model"] == "digits" and "onnx" not in known
    assert [entry["tag"] for entry in known["modules"]][:2] == ["/DigitsNet", "/DigitsNet/Sequential.stem"]


def test_files_are_written_and_checked(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small.toml"
    small.write_text('id = "small"\nfactory = "torch.nn:ReLU"\n[[example.args]]\nshape = [1, 4]\n', encoding="utf-8")
    whole, head, tail = (str(tmp_path / name) for name in ("d.onnx", "head.onnx", "tail.onnx"))
    files = ["--onnx", whole, "--validate", "--split", "stage2.0.conv2", "--head-onnx", head, "--tail-onnx", tail]
    assert main(["hierarchy", "--model", "digits", *files, "--json", str(tmp_path / "map.json")]) == 0
    out = capsys.readouterr().out
    assert (
        "crossing after stage2.0.conv2: relu_4 float32[1, 16, 16, 16], conv2d_6 float32[1, 32, 8, 8], 24.0 KiB" in out
    )
    assert "WRONG" not in out and out.count("ok     ") == 16
    made = json.loads((tmp_path / "map.json").read_text())["onnx"]
    assert made["head"]["crossing_bytes"] == 24576 and made["whole"]["rules"]["scope"] == 52
    assert all(check["ok"] for check in made["checks"]) and len(made["checks"]) == 16
    side = json.loads((tmp_path / "tail.onnx.json").read_text())
    assert side["half"] == "tail" and side["inputs"] == ["relu_4", "conv2d_6"] and side["late_inputs"] == []
    wrong = onnx_halves.HalvesCheck("runs, as torch", False, "planted")
    monkeypatch.setattr(onnx_halves, "check_run", lambda *_: wrong)
    assert main(["hierarchy", "--model", str(small), "--onnx", whole, "--validate"]) == 1
    assert "WRONG  d.onnx: runs, as torch: planted" in capsys.readouterr().out


def test_a_full_disk_leaves_the_files_of_before(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "d.onnx"
    file.write_bytes(b"a good one")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)  # of the second file
    assert main(["hierarchy", "--model", "digits", "--onnx", str(file)]) == 2
    assert "cannot be written: No space left on device" in complaint(capsys)
    assert [one.name for one in tmp_path.iterdir()] == ["d.onnx"] and file.read_bytes() == b"a good one"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--validate"], "--validate needs a file to check"),
        (["--split", "stem.0"], "--split goes together with --head-onnx, --tail-onnx or both"),
        (["--head-onnx", "h.onnx"], "--split goes together with"),
        (["--split", "input", "--head-onnx", "h.onnx"], "nothing runs before it"),
        (["--split", "stem.9", "--head-onnx", "h.onnx"], "no such layer"),
        (["--split", "stemm", "--head-onnx", "h.onnx"], "Did you mean stem"),
        (["--model", "tests.shared_hooks.selection.networks:Chains"], "Chains"),
        (["--onnx", "a.onnx", "--split", "stem.0", "--tail-onnx", "./a.onnx"], "must be different files"),
        (["--onnx", "none/a.onnx"], "there is no folder"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], reason: str, capsys: Captured) -> None:
    assert main(["hierarchy", "--model", "digits", *words]) == 2
    assert reason in complaint(capsys)


def test_a_cut_that_cannot_be_vouched_for_is_refused_by_name(capsys: Captured, tmp_path: Path) -> None:
    spec = tmp_path / "noise.toml"
    text = 'id = "noise"\nfactory = "tests.shared_hooks.mapping.noise:Noise"\n[[example.args]]\nshape = [1, 4]\n'
    spec.write_text(text, encoding="utf-8")
    assert main(["hierarchy", "--model", str(spec), "--split", "first", "--head-onnx", str(tmp_path / "h.onnx")]) == 2
    assert "cannot be cut after layer 0: the model" in complaint(capsys)

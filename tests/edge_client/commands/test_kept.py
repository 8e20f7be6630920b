"""``run --output``: an output comes back from its files as it was; what the spec says how to draw is drawn."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from edge_client.__main__ import main
from edge_client.commands.run_files import KeptFiles
from shared_hooks.errors import SpecError
from shared_hooks.models import InputItem, load_spec
from tests.edge_client.commands.test_commands import Captured
from tests.shipped import IMAGES

Pair = namedtuple("Pair", "small large")


def test_small_tensors_are_read_and_large_ones_are_kept_bit_for_bit(tmp_path: Path) -> None:
    large, odd = torch.randn(10, 10, dtype=torch.bfloat16), torch.tensor([float("nan"), 1.0])
    output = {"pair": Pair(torch.tensor([[0.1, 2.0]]), large.t()), "list": [odd, None, "word"], "z": torch.ones(1) * 1j}
    kept = KeptFiles(str(tmp_path / "new" / "folder"), load_spec("digits"))
    kept.write(7, InputItem(Path("some/a b.png")), output, [])
    reported = json.loads((kept.folder / "0007_a_b.png.json").read_text())
    assert reported["output"]["pair"]["small"]["values"] == torch.tensor([[0.1, 2.0]]).tolist()
    assert reported["output"]["pair"]["large"] == {"shape": [10, 10], "dtype": "bfloat16", "tensor": "pair.large"}
    assert reported["output"]["list"][1:] == [None, "word"] and reported["output"]["z"]["values"] == [[0.0, 1.0]]
    tensors = load_file(kept.folder / reported["tensors"])
    assert torch.equal(tensors["pair.large"], large.t()) and tensors["list.0"].isnan().tolist() == [True, False]
    assert kept.summary() == f"outputs: 1 in {kept.folder}"


def test_a_run_keeps_what_it_answers(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "out"
    words = ["run", "--split", "edge-only", "--warmup", "2", "--output", str(folder), "--in-flight", "2"]
    images = [str(image) for image in sorted(IMAGES.glob("*_label*.png"))[:3]]
    assert main([*words, "--input", *images]) == 0
    out = capsys.readouterr().out
    assert "latency: median" in out and "(3 requests, up to 2 in flight)" in out and "throughput: " in out
    assert out.endswith(f"outputs: 3 in {folder}\n") and "first request" not in out
    reported = json.loads((folder / "0001_0011_label1.png.json").read_text())
    assert reported["predictions"][0]["label"] == "1" and len(reported["output"]["values"][0]) == 10


def test_a_folder_that_cannot_be(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").touch()
    words = ["run", "--split", "edge-only", "--input", str(IMAGES / "0011_label1.png")]
    assert main([*words, "--output", str(tmp_path / "file")]) == 2
    assert "--output: " in capsys.readouterr().err


def test_a_disk_that_fills_is_reported_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptFiles(str(tmp_path), load_spec("digits"))
    shutil.rmtree(tmp_path)
    kept.write(1, InputItem(Path("a.png")), torch.ones(2), [])
    with pytest.raises(SpecError, match="cannot be written"):
        kept.summary()


def test_boxes_are_drawn_on_what_the_model_saw(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text(
        """
id = "finder"
factory = "torch.nn:Identity"
[preprocess]
size = [20, 40]
[draw]
boxes = "boxes"
"""
    )
    Image.new("RGB", (400, 100), "white").save(tmp_path / "photo.png")
    kept = KeptFiles(str(tmp_path / "out"), load_spec(tmp_path / "net.toml"))
    kept.write(1, InputItem(tmp_path / "photo.png"), {"boxes": torch.tensor([[5.0, 5.0, 30.0, 15.0]])}, [])
    kept.write(2, InputItem(tmp_path / "photo.png"), {"boxed": 1}, [])
    with Image.open(tmp_path / "out" / "0001_photo.png.drawn.png") as drawn:
        assert drawn.size == (40, 20) and drawn.getpixel((30, 10)) != (255, 255, 255) == drawn.getpixel((38, 18))
    assert kept.summary().startswith(f"outputs: 2 in {tmp_path / 'out'}, 1 drawn (not drawn: photo.png: draw:")

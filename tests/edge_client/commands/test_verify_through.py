"""``verify --server`` and what `run` says of unlike machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edge_client import EdgeClient
from edge_client.__main__ import main
from shared_hooks.errors import CutRefused
from shared_hooks.models import load_spec
from tests.edge_client import fake_server as fake
from tests.edge_client.fake_server import FakeServer

IMAGE = sorted((Path(__file__).parents[3] / "shared_hooks" / "models" / "digits" / "images").glob("*_label*.png"))[0]
UNLIKE = {"torch": "2.4.0"}
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_SERVER", raising=False)


def digits(by: float = 0.0) -> nn.Module:
    """The shipped model, its last bias moved."""
    model = load_spec("digits").load_model("cpu")
    bias = list(model.parameters())[-1]
    with torch.no_grad():
        bias[0] += by
    return model


def verified(capsys: Captured, by: float = 0.0, about: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the command against a server whose model is moved ``by`` so much."""
    with FakeServer(fake.tails(digits(by)), welcome={"about": dict(about or {})}) as server:
        status = main(["verify", "--server", server.address, "--json", "-", "--no-progress"])
    return status, json.loads(capsys.readouterr().out)


def test_alike_and_exact(capsys: Captured) -> None:
    status, found = verified(capsys)
    assert status == 0 and found["ok"] and found["sides"]["bits"] and found["unlike"] == [] and found["limit"] == 0
    assert len(found["cuts"]) > 3 and all(one["exact"] or one["refused"] for one in found["cuts"])
    assert found["largest"] == 0 and found["top1"] == 1


def test_between_unlike_machines_a_small_difference_passes_and_is_reported(capsys: Captured) -> None:
    status, found = verified(capsys, 1e-4, UNLIKE)
    assert status == 0 and found["ok"] and not found["sides"]["bits"]
    assert 0 < found["sides"]["largest"] <= found["limit"] and "torch" in found["unlike"][0]
    assert found["largest"] == found["sides"]["largest"], "each tail ends with the server's bias"


def test_between_unlike_machines_a_large_difference_is_wrong(capsys: Captured) -> None:
    status, found = verified(capsys, 5.0, UNLIKE)
    # what is computed whole on the server is, by its own word, right: the sides themselves are too far apart
    assert status == 1 and not found["ok"] and found["sides"]["largest"] > found["limit"]


def test_as_text(capsys: Captured) -> None:
    with FakeServer(fake.tails(digits(5.0)), welcome={"about": UNLIKE}) as server:
        assert main(["verify", "--server", server.address, "--no-progress"]) == 1
    out = capsys.readouterr().out
    assert out.rstrip().endswith("NOT OK") and "torch 2." in out
    said = out[out.index("up to ") :].splitlines()
    assert "not promised" in " ".join(map(str.strip, said)) and all(len(line) <= 80 for line in said)
    with FakeServer(fake.tails(digits())) as server:
        assert main(["verify", "--server", server.address, "--no-progress"]) == 0
    out = capsys.readouterr().out
    assert "the whole model gives the same bits on both sides" in out and out.rstrip().endswith("ok")


def test_run_says_once_that_bits_are_not_promised(capsys: Captured) -> None:
    def reported(about: Mapping[str, str], split: str) -> tuple[str, list[str]]:
        with FakeServer(fake.tails(digits()), welcome={"about": dict(about)}) as server:
            command = ["run", "--server", server.address, "--split", split, "--input", str(IMAGE), "--no-progress"]
            assert main(command) == 0
            text = capsys.readouterr().out
            assert main([*command, "--json", "-"]) == 0
        return text, json.loads(capsys.readouterr().out)["unlike"]

    text, unlike = reported(UNLIKE, "stage2.0.conv1")
    assert text.count("not promised between these machines") == 1 and "2.4.0 there" in unlike[0]
    text, unlike = reported({}, "stage2.0.conv1")
    assert "not promised" not in text and unlike == []


def test_where_nothing_may_be_cut_before_the_first_layer(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    infer = EdgeClient.infer

    def refusing(self: EdgeClient, *args: Any, split: int | str | None = None, **kwargs: Any) -> Any:
        if split == "input":
            raise CutRefused("not here")
        return infer(self, *args, split=split, **kwargs)

    monkeypatch.setattr(EdgeClient, "infer", refusing)
    status, found = verified(capsys, about=UNLIKE)
    assert status == 0 and found["sides"] is None and found["cuts"][0]["refused"]
    status, found = verified(capsys, 5.0)
    assert status == 1 and not found["ok"]

"""``--example``: the same words on both sides give the same input, in place of the spec's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cloud_server.arguments import parser
from cloud_server.config import configure
from edge_client.__main__ import main
from edge_client.commands.arguments import make_parser
from edge_client.commands.feed import choice_of
from edge_client.model_choice import ModelChoice
from edge_client.request.edge_model import EdgeModel
from shared_hooks.errors import SpecError
from shared_hooks.models import load_spec
from tests.edge_client.commands.test_commands import Captured

RESIDUAL = "tests.edge_client.small_models:Residual"


@pytest.mark.parametrize(
    ("model", "words", "shape", "dtype"),
    [
        (RESIDUAL, "1,3,16,16", (1, 3, 16, 16), torch.float32),
        (RESIDUAL, "1x3x16x16:float64", (1, 3, 16, 16), torch.float64),
        ("digits", "2,1,32,32", (2, 1, 32, 32), torch.float32),
    ],
)
def test_both_sides_build_the_same_example(model: str, words: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    both = ["--model", model, "--example", words]
    edge = choice_of(make_parser().parse_args(["layers", *both])).spec().example()
    cloud = configure(parser().parse_args(both)).models[0].spec.example()
    assert edge is not None and cloud is not None
    assert torch.equal(edge[0][0], cloud[0][0]) and edge[0][0].shape == shape and edge[0][0].dtype == dtype


def test_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 3, 16, 16), dtype=np.float32))
    monkeypatch.chdir(tmp_path)
    assert load_spec(RESIDUAL, example="x.npy").example()[0][0].sum() == 768  # type: ignore[index]
    own = EdgeModel(ModelChoice(nn.Linear(4, 2).eval(), "mine", example="1,4"))
    own.plan_example()
    assert [layer.name for layer in own.wrapped.layers] == ["(model)"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("1,3,a", "example 1,3,a: expected sizes such as 1,3,224,224"),
        ("", "expected sizes"),
        ("1,3:flot32", "flot32 is no dtype: float32, "),
        ("missing.npy", "example missing.npy: no such file"),
        ("1,99999999999", "at most"),
        ("nowhere:make", 'cannot import "nowhere"'),
    ],
)
def test_wrong_words(words: str, said: str, capsys: Captured) -> None:
    assert main(["layers", "--model", RESIDUAL, "--example", words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_module_reads_no_image(tmp_path: Path) -> None:
    (tmp_path / "x.png").touch()
    with pytest.raises(SpecError, match="it is unknown how to read an image"):
        EdgeModel(ModelChoice(nn.Linear(4, 2).eval(), "mine", example=str(tmp_path / "x.png")))

"""The matrix of releases: what an edge is, the models' weights, and the table."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

from shared_hooks.models import load_spec
from studies.matrix import models
from studies.matrix.cell import ROOT, SPECS, Cell
from studies.matrix.edges import Edge
from studies.matrix.table import as_text


def test_an_edge_is_a_command(tmp_path: Path) -> None:
    """Also one that joins its words for a shell elsewhere, as ssh does."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    edge = Edge.of(f"pi={ssh} pi cd '{tmp_path}' && {sys.executable} -X dev")
    assert edge.python == (str(ssh), "pi", "cd", str(tmp_path), "&&", sys.executable, "-X", "dev")
    about = edge.about()
    assert (about["torch"], about["transformers"]) == (torch.__version__, metadata.version("transformers"))
    with pytest.raises(RuntimeError, match="broken: .*SyntaxError|broken: .*No such|broken: "):
        Edge.of(f"broken={sys.executable} -c nonsense:").about()


WEIGHT = [
    [-0.464691162109375, 0.891845703125, -0.922882080078125],
    [0.47802734375, -0.22003173828125, -0.7840576171875],
]
BIAS = [-0.23465728759765625, 0.1971435546875]


@pytest.mark.parametrize("text", ["", "pi", "=python3", "pi= "])
def test_and_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=COMMAND"):
        Edge.of(text)


def test_weights_are_the_same_everywhere() -> None:
    made = models.filled(nn.Linear(3, 2))
    assert made.weight.tolist() == WEIGHT and made.bias.tolist() == BIAS, "bits that every machine must have"


@pytest.mark.parametrize("name", SPECS)
def test_outputs_are_neither_flat_nor_wild(name: str) -> None:
    spec = load_spec(str(ROOT / SPECS[name]) if Path(SPECS[name]).suffix else SPECS[name])
    call = spec.example(torch.device("cpu"))
    assert call is not None
    with torch.no_grad():
        output = spec.load_model("cpu")(*call[0], **call[1])
    logits = output if isinstance(output, torch.Tensor) else output[0]
    assert logits.std() > 1e-3 and logits.abs().max() < 1e3


def test_the_table_tells_what_failed() -> None:
    cells = [
        Cell("a", "m", True, 9, 8, 8, 1, 0.0),
        Cell("a", "n", True, 9, 9, 9, 0, 1e-6, notes=("x",)),
        Cell("b", "m", False, error="refused: a | b"),
        Cell("b", "n", False, 9, 9, 3, 0, 0.5),
    ]
    text = as_text({"a": {"torch": "2.4"}, "b": {}}, cells)
    assert "| 8 of 8, 1 refused; same bits | 9 of 9; 1.0e-06, 1 notes |" in text
    assert "**no**: refused: a / b" in text and "**WRONG** 9 of 9; 5.0e-01" in text

"""Which model: made once of the words of the command line, and handed on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import edge_client
from edge_client import EdgeClient, ModelChoice
from edge_client.commands.arguments import make_parser
from edge_client.commands.feed import choice_of
from edge_client.process import _words_of, local_server
from shared_hooks.errors import SpecError
from shared_hooks.models import load_spec
from tests.shipped import IMAGES


def test_the_words_of_the_command_line_are_one_choice() -> None:
    words = "--model mine=digits --weights a --weights b --selection c --depth 2 --device cpu --threads 3".split()
    choice = choice_of(make_parser().parse_args(["layers", *words]))
    assert choice == ModelChoice("mine=digits", weights=("a", "b"), selection="c", depth=2, device="cpu", threads=3)
    assert choice_of(make_parser().parse_args(["verify"])) == ModelChoice()


def test_a_server_of_ones_own_gets_the_same() -> None:
    choice = ModelChoice("digits", weights=("a", "b"), selection=Path("c"), depth=2, device="cpu", threads=3)
    words = "--model digits --device cpu --weights a --weights b --selection c --threads 3".split()
    assert _words_of(choice) == words
    with (
        pytest.raises(SpecError, match="by its name or file, not Identity"),
        local_server(ModelChoice(torch.nn.Identity())),
    ):
        pass


def test_the_spec_of_a_choice() -> None:
    spec = ModelChoice("mine=digits", weights=("w.safetensors",)).spec()
    assert spec.model_id == "mine" and [path.name for path in spec.weights] == ["w.safetensors"]
    settled = ModelChoice("digits", weights=("w.safetensors",), selection="s", device="cpu", threads=2).with_spec(spec)
    assert settled == ModelChoice(spec, device="cpu", threads=2) and settled.spec() is spec
    with pytest.raises(SpecError, match="a module has no spec"):
        ModelChoice(torch.nn.Identity()).spec()


def test_model_choice_is_made_of_other_forms() -> None:
    choice, spec = ModelChoice("digits", device="cpu"), load_spec("digits")
    assert ModelChoice.of(choice) is choice and ModelChoice.of(spec) == ModelChoice(spec)


@pytest.fixture(scope="module")
def digits_server() -> Iterator[str]:
    with local_server(ModelChoice("digits", threads=1)) as address:
        yield address


@pytest.mark.parametrize("depth", [None, 0, 1, 2])
def test_a_server_serves_clients_of_any_depth(depth: int | None, digits_server: str) -> None:
    """It limits what is shown and tried, not where a model may be cut."""
    choice = ModelChoice("digits", device="cpu", depth=depth)
    with EdgeClient(digits_server, choice, "stage2.0.conv2") as client:
        answer = client.infer(IMAGES / "0011_label1.png")
        assert answer.result[0].label == "1"
    checked = edge_client.verify(digits_server, choice)
    assert checked.ok and len(checked.cuts) == {None: 50, 0: 1, 1: 7}.get(depth, len(checked.cuts))
    rows = edge_client.layers(choice).rows()
    names = [row["name"] for row in rows]
    assert depth != 1 or names == ["stem", "stage1", "stage2", "stage3", "pool", "classifier"]
    assert all(depth is None or name.count(".") < depth for name in names)

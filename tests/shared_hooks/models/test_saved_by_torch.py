"""State dictionaries that `torch.save` wrote are weights; code in such files never runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.errors import SpecError
from shared_hooks.models.weights import MappedWeights, load_weights

save: Any = vars(torch)["save"]  # the product never writes such files


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("suffix", "legacy"),
    [("pt", False), ("pth", False), ("ckpt", False), ("weights", False), ("pt", True), ("pth", True), ("bin", True)],
)
@pytest.mark.parametrize(
    "form",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"lr": 0.1}},
        lambda state: {f"module.{name}": value for name, value in state.items()},
    ],
)
def test_a_state_dictionary_is_loaded(tmp_path: Path, form: Any, suffix: str, legacy: bool) -> None:
    trained, fresh = net(), net()
    file = tmp_path / f"net.{suffix}"
    save(form(trained.state_dict()), file, _use_new_zipfile_serialization=not legacy)
    load_weights(fresh, [file], "net.toml")
    assert same(trained, fresh)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (BOMB,)


BOMB = ""


def test_code_in_a_file_never_runs(tmp_path: Path) -> None:
    global BOMB
    BOMB = str(tmp_path / "ran")
    for content in (Bomb(), {"0.weight": Bomb()}, {"state_dict": {"0.weight": Bomb()}}):
        save(content, tmp_path / "net.pt")
        with pytest.raises(SpecError, match=r"could run code.*safetensors"):
            load_weights(net(), [tmp_path / "net.pt"], "net.toml")
    assert not Path(BOMB).exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (net, r"pickled model .* only a state dictionary is read"),
        (lambda: torch.ones(3), "holds a Tensor, not a state dictionary"),
        (lambda: {"0.weight": 3.0}, "0.weight: not a tensor"),
        (lambda: [torch.ones(2)], "holds a list"),
        (lambda: {"0.weight": torch.ones(4, 3)}, "of the model's tensors missing"),
        (lambda: {**net().state_dict(), "0.bias": torch.ones(7)}, r"0.bias has shape \(7,\)"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "net.pth"
    save(content(), file)
    with pytest.raises(SpecError, match=message) as error:
        load_weights(net(), [file], "net.toml")
    assert str(file) in str(error.value)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x02.", b"nonsense" * 100])
def test_bytes_of_nothing_are_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "net.pt"
    file.write_bytes(data)
    with pytest.raises(SpecError, match=r"net.pt"):
        load_weights(net(), [file], "net.toml")


def test_such_a_file_cannot_stay_on_disk(tmp_path: Path) -> None:
    file = tmp_path / "net.pt"
    save(net().state_dict(), file)
    with pytest.raises(SpecError, match="only safetensors files can stay on disk"):
        MappedWeights(net(), [file], "net.toml")

"""Code of installed libraries is not looked into for state, wherever it was installed to; the user's own is."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.state.reach import is_installed

COUNTS = "SEEN = [0]\n\n\ndef note(x):\n    SEEN[0] += 1\n    return x if SEEN[0] else -x\n"


class Notes(nn.Module):
    """Calls a helper that counts its calls, and looks at the count."""

    def __init__(self, helper: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.note = helper.note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.note(self.a(x)))


def _record(folder: Path, name: str, *files: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text("".join(f"{file},sha256=x,9\n" for file in files) + f'"{info.name}/RECORD",,\n')


def test_the_interpreters_libraries_are_installed() -> None:
    for module in (torch, nn.functional, json, pytest):
        assert is_installed(str(module.__file__)), module
    assert is_installed("/elsewhere/lib/python3.9/site-packages/some/thing.py")
    assert is_installed("/usr/lib/python3/dist-packages/some/thing.py")


def test_a_users_own_code_is_not() -> None:
    assert not is_installed(__file__)
    assert not is_installed("<string>")
    assert not is_installed("relative/site-packages.py")
    assert not is_installed("/home/somebody/my-site-packages-notes/model.py")


def test_packages_installed_into_a_folder_are_recognised(tmp_path: Path) -> None:
    """As ``pip install --target libs``."""
    _record(tmp_path, "thing", "thing/__init__.py", "thing/deep/part.py", "single.py")
    assert is_installed(str(tmp_path / "thing" / "deep" / "part.py"))
    assert is_installed(str(tmp_path / "single.py"))
    assert not is_installed(str(tmp_path / "mine.py"))
    assert not is_installed(str(tmp_path / "thing" / "mine.py"))


def test_editable_installation_counts_as_the_users_code(tmp_path: Path) -> None:
    """The record lists a pointer to the sources, or stands beside them and has no list (``.egg-info``)."""
    (tmp_path / "src" / "thing.egg-info").mkdir(parents=True)
    (tmp_path / "src" / "thing.egg-info" / "SOURCES.txt").write_text("thing/__init__.py\n")
    _record(tmp_path / "venv", "thing", "__editable__.thing-1.0.pth")
    assert not is_installed(str(tmp_path / "src" / "thing" / "__init__.py"))


@pytest.mark.parametrize("recorded", [True, False])
def test_state_of_installed_code_refuses_no_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """Such a count is the library's own affair; in a file of the user's it may be a model's state."""
    name = f"helper_of_mine_{recorded}"
    (tmp_path / f"{name}.py").write_text(COUNTS)
    if recorded:
        _record(tmp_path, "helper", f"{name}.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = importlib.import_module(name)
    try:
        wrapped = WrappedModel(Notes(helper).eval())
        wrapped.plan(torch.ones(2, 8))
        assert [layer.can_split for layer in wrapped.layers] == [recorded] * 2
    finally:
        del sys.modules[name]

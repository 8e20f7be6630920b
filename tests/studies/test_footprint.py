"""The study of what an edge takes: another machine's Python, and answers that are compared as they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from studies.footprint import heads, imports


def test_another_machines_python_is_asked_as_ssh_would_pass_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')  # what follows the host is joined for a shell over there
    ssh.chmod(0o755)
    monkeypatch.setitem(imports.STATEMENTS, "fractions", "import fractions")
    (row,) = imports.measured([str(ssh), "pi", sys.executable], 1, ["fractions"])
    assert row.name == "fractions" and row.seconds > 0 and row.mib > 1 and row.modules > 10


def test_answers_that_differ_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = {"VmRSS": 1.0, "VmHWM": 1.0}
    reported = iter(["same", "same", "same", "other"])
    monkeypatch.setattr(heads, "_edge", lambda *_: (mib, next(reported)))
    model, spec = nn.Sequential(nn.Linear(1, 1)), Path("spec.toml")
    heads._of(model, "0", "", spec, 64, 1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="0: the answers differ"):
        heads._of(model, "0", "", spec, 64, 1)  # type: ignore[arg-type]

"""The first ten minutes with an accelerator, where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from studies import gpu
from tests.docs.pages import ROOT


def test_without_an_accelerator_it_says_what_it_would_do(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "studies.gpu", "--device", "cpu", "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "no accelerator" in done.stdout
    assert all(f"  {name} " in done.stdout for name in gpu.SECTIONS)
    assert not (tmp_path / "gpu.json").exists()


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "studies.gpu", "--device", "cuda:77", "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stderr.startswith("gpu: device 'cuda:77' is not available")


def test_missing_wheel_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "NEEDED", {"no_such_module": "no-such-package"})
    said = gpu.prepared(None)
    assert said is not None and "pip download" in said and "no-such-package" in said and "--wheels" in said
    monkeypatch.setattr(gpu, "NEEDED", {"json": "json"})
    assert gpu.prepared(None) is None


def test_a_page_of_what_was_found() -> None:
    found = {
        "machine": {"device": "Board 9", "seconds": 0.1},
        "staging": {"1 MB": {"to host": 0.5}, "pinned": True},
        "energy": {"error": "RuntimeError: no"},
        "when": "2026-11-25",
    }
    text = gpu.page(found)
    assert text.startswith("# Board 9\n") and "2026-11-25" in text
    assert "## staging\n" in text and "| 1 MB: to host | 0.5 |" in text and "| pinned | True |" in text
    assert "| error | RuntimeError: no |" in text and "## tails" not in text

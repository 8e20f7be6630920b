"""--device and --threads."""

from __future__ import annotations

import pytest
import torch

from shared_hooks.errors import SpecError
from shared_hooks.models import pick_device, set_threads


def test_names() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:", "CPU", "", "cuda:-1"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(SpecError, match="is not known; expected"):
        pick_device(name)


def test_absent_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(SpecError, match="device 'cuda' is not available"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda:0")
    with pytest.raises(SpecError, match=r"this machine has 1 CUDA device\(s\)"):
        pick_device("cuda:1")


def test_threads() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(None) == before
        assert set_threads(1) == 1 == torch.get_num_threads()
        with pytest.raises(SpecError, match="1 to 1024, not 0"):
            set_threads(0)
    finally:
        torch.set_num_threads(before)

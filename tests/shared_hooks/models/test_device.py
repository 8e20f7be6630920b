"""--device and --threads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shared_hooks import devices
from shared_hooks.errors import SpecError
from shared_hooks.models import load_spec, pick_device, set_threads


def test_names() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:", "CPU", "", "cuda:-1"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(SpecError, match=r"is not available: .*; there are auto, cpu|expected"):
        pick_device(name)


def test_absent_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(SpecError, match="device 'cuda' is not available"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda:0")
    with pytest.raises(SpecError, match="this machine has 1 of them, counted from 0"):
        pick_device("cuda:1")
    with pytest.raises(SpecError, match='expected "cuda" or "cuda:N"'):
        pick_device("cuda:x")
    monkeypatch.setattr(torch.mps, "is_available", lambda: True, raising=False)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert devices.kinds() == ("cuda", "mps", "cpu") and pick_device("mps") == torch.device("mps:0")


def test_numbers_that_a_device_does_not_have_are_refused_before_it_is_used(tmp_path: Path) -> None:
    file = tmp_path / "wide.toml"
    sizes = "[factory_kwargs]\nin_features = 2\nout_features = 2\n"
    file.write_text(f'id = "wide"\nfactory = "torch.nn:Linear"\ndtype = "float64"\n{sizes}')
    with pytest.raises(SpecError, match=r'weight is torch.float64, which mps does not have; dtype = "float32"'):
        load_spec(file).load_model("mps")


def test_threads() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(None) == before
        assert set_threads(1) == 1 == torch.get_num_threads()
        with pytest.raises(SpecError, match="1 to 1024, not 0"):
            set_threads(0)
    finally:
        torch.set_num_threads(before)


def test_used_memory_is_read_from_the_device_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.in_use(torch.device("cpu")) is None
    kind = SimpleNamespace(mem_get_info=lambda device: (300, 1000))
    monkeypatch.setattr(devices, "_module", lambda device: kind)
    assert devices.in_use(torch.device("cuda:0")) == 700
    monkeypatch.setattr(devices, "_module", lambda device: SimpleNamespace())
    assert devices.in_use(torch.device("mps")) is None

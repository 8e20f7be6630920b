"""Weights files as the system gives them; what is in them: test_spec."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shared_hooks.errors import SpecError
from shared_hooks.models.weights import load_weights


def test_a_file_that_may_not_be_read_is_not_called_missing(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"weight": torch.ones(3, 4), "bias": torch.zeros(3)}, file)
    file.chmod(0)
    user = os.geteuid()
    if user == 0:  # who reads everything
        os.seteuid(65534)
    try:
        with pytest.raises(SpecError, match=r"here: .*w\.safetensors cannot be read: permission; .*chmod"):
            load_weights(nn.Linear(4, 3), [file], "here")
    finally:
        os.seteuid(user)

"""Names of version 0.1 go on for one version, with a warning that says what they are called now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cloud_server.config import read_config
from shared_hooks import WrappedModel


def test_a_limit_by_its_old_name(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("[limits]\nmax_recipe_bytes = 4096\n")
    with pytest.warns(FutureWarning, match=r"limits.max_recipe_bytes is called max_cuts_bytes now"):
        assert read_config(file).limits.max_cuts_bytes == 4096
    file.write_text("[limits]\nmax_recipe_bytes = 4096\nmax_cuts_bytes = 8192\n")
    with pytest.warns(FutureWarning):
        assert read_config(file).limits.max_cuts_bytes == 8192


def test_the_recipe_of_an_early_output() -> None:
    with WrappedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))) as wrapped:
        early = wrapped.head("0", torch.randn(1, 4))
        with pytest.warns(DeprecationWarning, match="EarlyOutput.crossing"):
            assert early.recipe is early.crossing

"""What the three packages show of themselves: their public names, each of which is there, and one version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import cloud_server
import edge_client
import shared_hooks

PACKAGES = (edge_client, cloud_server, shared_hooks)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one.__name__)
def test_dir_shows_the_public_names_and_no_others(package: ModuleType) -> None:
    shown = [name for name in dir(package) if not name.startswith("__")]
    assert shown == sorted(set(package.__all__) - {"__version__"})
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_there_is_one_version() -> None:
    assert {package.__version__ for package in PACKAGES} == {shared_hooks.__version__}
    assert shared_hooks.__version__[0].isdecimal()


def test_the_names_are_shown_without_torch() -> None:
    code = "import sys, edge_client, cloud_server, shared_hooks; print([*map(dir, (edge_client, cloud_server))] and 0)"
    code += "; print('torch' in sys.modules)"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False"]

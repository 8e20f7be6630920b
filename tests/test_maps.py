"""The maps in docstrings and in docs/design.md name what is in the folders: all of it, and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import edge_client
from edge_client.commands.arguments import make_parser
from edge_client.commands.tasks import COMMANDS as TASKS

ROOT = Path(__file__).parents[1]
TOPS = ("shared_hooks", "edge_client", "cloud_server")
PACKAGES = sorted(file.parent.relative_to(ROOT) for top in TOPS for file in (ROOT / top).rglob("__init__.py"))

(parsers,) = (action for action in make_parser()._actions if action.dest == "command")
COMMANDS = set(parsers.choices or ())


def rooms(folder: Path) -> set[str]:
    """Modules and packages of a folder, as a map names them."""
    modules = {file.stem for file in folder.glob("*.py") if not file.stem.startswith("__")}
    return modules | {file.parent.name for file in folder.glob("*/__init__.py")}


def named(text: str, known: set[str]) -> set[str]:
    """The words at the beginning of lines that are rooms."""
    found = set()
    for line in text.splitlines():
        for word in re.split(r",? +", line.strip()):
            if word not in known:
                break
            found.add(word)
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_a_package_says_what_is_in_it(package: Path) -> None:
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))) or ""
    known = rooms(ROOT / package)
    if package == Path("edge_client/commands"):
        assert known > COMMANDS - TASKS.keys() - {"generate", "chat", "serve"}, "those are in `speaking`"
        known -= COMMANDS  # the parser lists them
    assert named(text, known) == known, "docstring and folder differ"


def test_the_design_names_every_package() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("```")[1]
    for top in TOPS:
        known = {name for name in rooms(ROOT / top) if (ROOT / top / name).is_dir()}
        block = text[text.index(f"\n{top}") :]
        missing = known - set(re.findall(r"^  (\w+)/", block, re.MULTILINE))
        assert not missing, f"docs/design.md does not name {missing}"


@pytest.mark.parametrize("name", edge_client.__all__)
def test_exports_of_edge_client_exist(name: str) -> None:
    assert getattr(edge_client, name) is not None

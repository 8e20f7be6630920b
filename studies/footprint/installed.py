"""What pip puts on a disk for an edge and for a server, by the files of the distributions that are installed here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from shared_hooks.config import Table

ROOT = Path(__file__).parents[2]


def sizes(extra: str = "") -> dict[str, int]:
    """Bytes on disk by distribution, with all that each needs in turn: of the extra "edge", or what another adds.

    Distributions that are not installed here are left out.
    """
    base = closure(declared() + declared("edge"))
    return {name: sum(_files(name)) for name in (closure(declared(extra)) - base if extra else base)}


def declared(extra: str = "") -> list[str]:
    """The requirements of the base, or of an extra alone."""
    project: Any = Table.read(ROOT / "pyproject.toml").rest()["project"]
    return list(project["optional-dependencies"][extra] if extra else project["dependencies"])


def own() -> dict[str, int]:
    """Bytes of the project's own packages."""
    return {
        top: sum(file.stat().st_size for file in (ROOT / top).rglob("*") if file.is_file() and file.suffix != ".pyc")
        for top in ("shared_hooks", "edge_client", "cloud_server", "protos")
    }


def closure(requirements: list[str]) -> set[str]:
    """Names of what these requirements install, by the metadata of what is installed here."""
    found: set[str] = set()
    waiting = [(line, "") for line in requirements]
    while waiting:
        line, extra = waiting.pop()
        one = Requirement(line)
        name = one.name.lower().replace("_", "-")
        if name == "isthmus":
            continue
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        if name not in found or one.extras:
            found.add(name)
            waiting += [(need, wanted) for need in needs for wanted in ("", *one.extras)]
    return found


def _files(name: str) -> Iterator[int]:
    for file in metadata.files(name) or []:
        path = Path(str(file.locate()))
        if path.is_file() and path.suffix != ".pyc":
            yield path.stat().st_size

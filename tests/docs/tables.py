"""TOML as pages show it, read by what reads it in earnest."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

from cloud_server.access import read_identities
from cloud_server.config import read_config
from edge_client.planning import partitioners
from edge_client.settings import server_of
from shared_hooks.lifecycle import registry
from shared_hooks.models import load_spec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GROUPS = {registry.GROUP, partitioners.GROUP}


def read(text: str, folder: Path) -> None:
    """Raises what a reader raises. Which one it is, its keys say; files that it names lie in ``folder``."""
    known = tomllib.loads(text)
    file = folder / "shown.toml"
    file.write_text(text, encoding="utf-8")
    if "project" in known:
        for group, entries in known["project"]["entry-points"].items():
            assert group in GROUPS, f"nobody reads entry points of {group}"
            assert all(":" in EntryPoint(name, value, group).value for name, value in entries.items())
    elif {"tokens", "identities"} & set(known):
        read_identities(file)
    elif "factory" in known:
        load_spec(file)
    elif "client" in known:
        server_of(config=file)
    else:
        read_config(file)

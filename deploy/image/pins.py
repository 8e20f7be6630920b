"""What pip is held to in an image: ``python pins.py constraints.txt [TORCH]`` prints it.

The file of pins, but for two things. A base image that brings a torch keeps it, and the NumPy that it was built with:
NVIDIA's for a Jetson is on no index, and another one would know nothing of its GPU. ``TORCH`` is another version than
the pinned one, such as 2.13.0+cpu.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path

KEPT = ("torch", "numpy")
"""NumPy only beside a torch: torch is built for one of its binary interfaces."""


def pins(lines: Iterable[str], there: Mapping[str, str], torch: str = "") -> Iterator[str]:
    """The constraints for a base that has the packages ``there`` (name: version). ValueError: both have a torch."""
    if torch and "torch" in there and there["torch"] != torch:
        raise ValueError(f"the base image brings torch {there['torch']}, so it cannot be {torch}: take another base")
    held = {name: there[name] for name in KEPT if name in there} if "torch" in there else {}
    if torch:
        held["torch"] = torch
    yield from (f"{name}=={version}" for name, version in held.items())
    for line in lines:
        if _name(line) not in held:
            yield line


def _name(line: str) -> str:
    found = re.match(r"[\w.-]+", line)
    return _canonical(found.group()) if found else ""


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(file: str, torch: str = "") -> int:
    """The command line; returns the exit status."""
    there = {_canonical(one.metadata["Name"]): one.version for one in distributions() if one.metadata["Name"]}
    try:
        found = list(pins(Path(file).read_text(encoding="utf-8").splitlines(), there, torch))
    except ValueError as error:
        print(f"pins: {error}", file=sys.stderr)
        return 1
    print("\n".join(found))
    if "torch" in there:
        print(f"pins: the base image's torch {there['torch']} stays", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""What is in an image: ``python sbom.py [FOLDER ...]`` prints the Python packages that this interpreter finds.

A bill of materials as CycloneDX 1.5 JSON, which scanners read; ``FOLDER``: packages that it does not find yet. The
system's own packages are listed by the base image itself (dpkg, apk).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from typing import Any


def sbom(found: Iterable[Distribution]) -> dict[str, Any]:
    """The document. Of two distributions of one name the first counts, as it does for imports."""
    known: dict[str, Distribution] = {}
    for one in found:
        known.setdefault(one.metadata["Name"].lower().replace("_", "-"), one)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "components": [_component(name, one) for name, one in sorted(known.items())],
    }


def _component(name: str, one: Distribution) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{one.version}"
    component = {"type": "library", "bom-ref": purl, "name": name, "version": one.version, "purl": purl}
    if "License-Expression" in one.metadata:
        return {**component, "licenses": [{"expression": one.metadata["License-Expression"]}]}
    return component


if __name__ == "__main__":
    json.dump(sbom(distributions(path=[*sys.argv[1:], *sys.path])), sys.stdout, indent=1)
    print()

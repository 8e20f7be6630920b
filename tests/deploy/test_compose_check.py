"""What `make compose` claims of an image, with what an engine would say in its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.compose_check import CLOUD, EDGE, SERVERS, Check
from deploy.engine import ComposeProject, EngineFailed

PACKAGES = {"isthmus", "torch"}


class Engineless(ComposeProject):
    """An image without compilers, caches and tests, that lists these packages."""

    def __init__(self, packages: set[str]) -> None:
        components = [{"name": name, "version": "1"} for name in sorted(packages)]
        self.answers = {"cat": json.dumps({"components": components}), "python3": "1"}

    def inspect(self, name: str) -> Any:
        return {"Size": 0, "Config": {"Labels": {"io.isthmus.sbom": "/sbom"}}}

    def docker(self, *words: str, timeout: float = 0) -> str:
        return self.answers.get(words[words.index("--entrypoint") + 1], "")


def test_each_image_has_the_packages_of_its_side() -> None:
    Check(Engineless(PACKAGES)).image(EDGE)
    Check(Engineless(PACKAGES | SERVERS)).image(CLOUD)


@pytest.mark.parametrize(
    ("image", "packages"),
    [(EDGE, PACKAGES | SERVERS), (EDGE, PACKAGES | {"prometheus-client"}), (CLOUD, PACKAGES), (EDGE, {"isthmus"})],
)
def test_an_image_of_the_other_side_is_noticed(image: str, packages: set[str]) -> None:
    with pytest.raises(EngineFailed, match=f"not so: {image}: "):
        Check(Engineless(packages)).image(image)

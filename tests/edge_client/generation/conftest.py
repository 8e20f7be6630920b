from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge_client import EdgeClient
from tests.edge_client.generation.speaking import connected


@pytest.fixture(scope="package")
def client() -> Iterator[EdgeClient]:
    """A client of the example's language model, whose server is another process."""
    with connected() as made:
        yield made

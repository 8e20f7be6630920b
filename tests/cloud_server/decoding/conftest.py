from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloud_server import Core
from tests.cloud_server.decoding.served import join, serving
from tests.cloud_server.decoding.tail import Gate
from tests.cloud_server.fakes import CoreClient


@pytest.fixture
def workers() -> int:
    return 1


@pytest.fixture
def core(workers: int) -> Iterator[Core]:
    Gate.entered.clear()
    Gate.opened.clear()
    with serving(workers=workers) as core:
        yield core
        Gate.opened.set()


@pytest.fixture
def client(core: Core) -> CoreClient:
    return join(core)

"""An engine without torch work, and a core with narrow limits around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloud_server.core import Core
from tests.cloud_server.fakes import FakeEngine
from tests.cloud_server.small import SMALL


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def core(engine: FakeEngine) -> Iterator[Core]:
    with Core([engine], SMALL) as core:
        yield core

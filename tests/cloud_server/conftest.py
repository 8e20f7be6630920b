"""An engine without torch work, and a core with narrow limits around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloud_server.core import Core
from tests.cloud_server.fakes import FakeEngine
from tests.cloud_server.small import SMALL
from tests.starts import forked


@pytest.fixture(autouse=True, scope="session")
def workers_are_forked() -> Iterator[None]:
    """Those of pools in this process; a server that is a process starts interpreters."""
    with forked("cloud_server.processes.worker_process.subprocess"):
        yield


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def core(engine: FakeEngine) -> Iterator[Core]:
    with Core([engine], SMALL) as core:
        yield core

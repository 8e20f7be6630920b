"""A core with narrow limits, and what holds its workers."""

from __future__ import annotations

import threading

from cloud_server.limits import Limits
from tests.cloud_server.fakes import CoreClient
from tests.waiting import PATIENCE

SMALL = Limits(
    max_request_bytes=100_000,
    max_pending_bytes=300_000,
    max_in_flight=4,
    max_clients=3,
    max_pending=6,
    chunk_bytes=1000,
    max_cuts=8,
    deadline_seconds=600,
    hello_seconds=600,
    idle_seconds=600,
)


class Gate:
    """Holds workers until it is opened, and counts those that came."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self, payload: memoryview) -> None:
        self.entered.release()
        assert self.opened.wait(PATIENCE)

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE)


def failure(client: CoreClient, id: int, number: int = 1) -> tuple[str, str]:
    failed = client.answer(id, number).failed
    assert failed is not None
    return failed.error, failed.message

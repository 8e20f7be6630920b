"""`Aside`: what hooks hand over is worked on in a thread of its own, so that no request waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

log = logging.getLogger(__name__)

Item = TypeVar("Item")
MOST: Final = 1024
"""Items that wait; what comes then is left out."""


class Aside(Generic[Item]):
    """Calls ``work`` with one item after the other. An item that raises costs itself; the first such is logged."""

    def __init__(self, name: str, work: Callable[[Item], None], most: int = MOST) -> None:
        self.left_out = 0
        """Items that found no place."""
        self.failures = 0
        self._name = name
        self._work = work
        self._most = most
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()  # its `put` waits for no lock
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Never waits."""
        if self._closed:
            return
        if self._items.qsize() < self._most:
            self._items.put(item)
        else:
            self.left_out += 1

    def close(self) -> None:
        """Returns when what waits is done. May be called again."""
        if not self._closed:
            self._closed = True
            self._items.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._work(item)
            except Exception as error:
                self.failures += 1
                if self.failures == 1:
                    log.warning("%s failed, and continues: %s: %s", self._name, type(error).__name__, error)
            del item

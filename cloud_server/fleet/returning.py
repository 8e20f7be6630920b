"""Models whose weights are not in memory, and are asked for: loaded again one after the other, by one thread.

Whose loads have taken the least time is served first. After each it rests for as long as it took: no more than half of
the time is spent on loading.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from cloud_server.fleet.version import Version

log = logging.getLogger("cloud_server")

LOOK_SECONDS = 0.1
"""Between two looks whether there is room, while some wait."""
ACCOUNTS = 1024
"""Whose loads are counted; of more the counts begin anew."""


class Returning:
    """``bring(version, account)`` loads one, and says whether it is there, or will not be; False: not yet."""

    def __init__(self, bring: Callable[[Version, str], bool]) -> None:
        self._bring = bring
        self._changed = threading.Condition()
        self._wanted: dict[Version, str] = {}
        """In the order in which they were asked for, with the account that asked first."""
        self._seconds: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, version: Version, account: str) -> None:
        """From now on it is tried, while somebody waits for it."""
        with self._changed:
            self._wanted.setdefault(version, account)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="isthmus-returning", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is loaded; waits for the one that is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._wait():
            for version, account in self._order():
                began = time.monotonic()
                try:
                    done = not version.waiting or self._bring(version, account)
                except BaseException as error:  # this thread serves everybody
                    log.error("loading a model again", exc_info=error)
                    done = False
                if done:
                    self._done(version, account, time.monotonic() - began)
                    self._rest(time.monotonic() - began)
                    break
            else:
                self._rest(LOOK_SECONDS)

    def _wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closed)
            return not self._closed

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def _order(self) -> list[tuple[Version, str]]:
        with self._changed:
            return sorted(self._wanted.items(), key=lambda item: self._seconds[item[1]])

    def _done(self, version: Version, account: str, seconds: float) -> None:
        with self._changed:
            del self._wanted[version]
            if version.waiting and not version.is_resident and not self._closed:
                self._wanted[version] = account  # asked for again meanwhile
            if len(self._seconds) > ACCOUNTS:
                self._seconds.clear()
            self._seconds[account] += seconds  # type: ignore[assignment]

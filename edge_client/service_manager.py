"""What a service manager hears of a run, by systemd's protocol (sd_notify(3)): ready, alive, about to end.

Without ``NOTIFY_SOCKET`` in the environment all of it does nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

EVERY_SECONDS: Final = 1.0


class ServiceManager:
    """Says READY=1 with the first answer, and WATCHDOG=1 with later ones: a run that answers no more is restarted."""

    def __init__(self, environ: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic) -> None:
        where = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{where[1:]}" if where.startswith("@") else where
        self._clock = clock
        self._last: float | None = None

    def answered(self, status: str) -> None:
        """An input has its answer; ``status``: one line for ``systemctl status``. At most every second is sent."""
        now = self._clock()
        if not self._address or (self._last is not None and now - self._last < EVERY_SECONDS):
            return
        self._send(f"{'READY=1' if self._last is None else 'WATCHDOG=1'}\nSTATUS={status}")
        self._last = now

    def stopping(self) -> None:
        """What is under way is finished, and nothing else is begun."""
        if self._address:
            self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as plug:
                plug.sendto(text.encode(), self._address)
        except OSError:  # a manager that hears nothing ends the run by its watchdog: that is its business
            pass

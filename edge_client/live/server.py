"""A thread with uvicorn in it, on a port of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from typing import Final

import uvicorn

from edge_client.live.application import Application
from edge_client.live.board import Board
from shared_hooks.config import is_loopback
from shared_hooks.errors import SpecError

log = logging.getLogger(__name__)

CONNECTIONS: Final = 64
BACKLOG: Final = 16
TELL_SECONDS: Final = 1.0
"""For open pages to hear of the end."""
STOP_SECONDS: Final = 10.0


class PageServer:
    """On ``listen``, [HOST:]PORT, taken at once; the host is 127.0.0.1 where none is given, port 0 takes a free one.

    Raises SpecError for a port that cannot be had.
    """

    def __init__(self, board: Board, listen: str) -> None:
        host, port = address_of(listen)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise SpecError(f"dashboard: {listen} cannot be listened on: {error.strerror or error}") from error
        self.port = int(self._socket.getsockname()[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        if not is_loopback(host):
            log.warning("dashboard: whoever reaches %s sees the page: there is no password", self.url)
        self.application = Application(board, host)
        config = uvicorn.Config(
            self.application,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,  # a line for every reader who leaves says nothing
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="isthmus-dashboard", daemon=True)
        self._thread.start()

    @property
    def readers(self) -> int:
        """Pages that are open."""
        return self.application.events.readers

    def close(self) -> None:
        """Tells the pages that are open that it is over, and ends."""
        self.application.events.end()
        until = time.monotonic() + TELL_SECONDS
        while self.readers and time.monotonic() < until:
            time.sleep(0.02)
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


def address_of(listen: str) -> tuple[str, int]:
    """Of [HOST:]PORT. Raises SpecError."""
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16) or (":" in host and not host.startswith("[")):
        raise SpecError(f'dashboard: expected [HOST:]PORT, such as 8050, found "{listen[:100]}"')
    return host.strip("[]") or "127.0.0.1", int(port)

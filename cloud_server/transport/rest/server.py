"""A thread that runs uvicorn: HTTP/1.1 on a port of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from functools import partial
from pathlib import Path

from cloud_server.access import Tls
from cloud_server.inference import Inference
from cloud_server.transport.active_calls import ActiveCalls, WaitingCalls
from cloud_server.transport.authentication import server_context
from cloud_server.transport.rest.pages import Pages
from shared_hooks.errors import SpecError

log = logging.getLogger(__name__)

HEADER_BYTES = 32 << 10
START_SECONDS = 30.0
BACKLOG = 128


class RestServer:
    """A server on ``address``, HOST:PORT, which is bound at once and served from `start` on. ``port`` is the real one.

    ``tls``: None for plain text. Raises SpecError for the port, for certificates, and without uvicorn.
    """

    def __init__(
        self,
        inference: Inference,
        active_calls: ActiveCalls,
        address: str,
        tls: Tls | None = None,
        reuse_port: bool = False,
        pages: Path | None = None,
    ) -> None:
        """``reuse_port``: other servers may share the port, and a draining one stops listening. ``pages``: a folder
        that is served under ``/try``.
        """
        try:
            import uvicorn

            from cloud_server.transport.rest.application import RestApplication
            from cloud_server.transport.rest.connections import (
                IDLE_SECONDS,
                MAX_WAITING_CONNECTIONS,
                SWEEP_SECONDS,
                RestConnection,
            )
        except ImportError as error:
            text = f'rest: {error.name} is not installed: pip install "isthmus[rest]"'
            raise SpecError(text) from error
        self._waiting = WaitingCalls(MAX_WAITING_CONNECTIONS, IDLE_SECONDS)
        self._application = RestApplication(inference, active_calls, None if pages is None else Pages(pages))
        self._sweep_seconds = SWEEP_SECONDS
        config = uvicorn.Config(
            self._application,  # type: ignore[arg-type, unused-ignore]
            http=partial(RestConnection, self._waiting, inference.core.pace),  # type: ignore[arg-type, unused-ignore]
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,  # a log line for every stranger's mistake is useless
            access_log=False,
            proxy_headers=False,  # clients cannot claim another address
            server_header=False,
            timeout_keep_alive=75,  # `connections` ends it sooner
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        config.load()
        config.ssl = None if tls is None else server_context(tls)
        self._server = uvicorn.Server(config)
        self._reuse_port = reuse_port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket = _listening(address, reuse_port)
        self.port = int(self._socket.getsockname()[1])
        self.address = f"http{'s' if tls else ''}://{address.rpartition(':')[0]}:{self.port}"
        self._thread = threading.Thread(target=self._run, name="isthmus-rest", daemon=True)

    def start(self) -> None:
        """Start serving in a thread."""
        self._thread.start()
        log.info("Open Inference Protocol on %s/v2", self.address)

    def drain(self) -> None:
        """Stop listening, so that new connections reach another server on the port."""
        if self._reuse_port and self._loop is not None:
            for one in self._server.servers:
                self._loop.call_soon_threadsafe(one.close)

    def stop(self) -> None:
        """End the connections."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(START_SECONDS)
        self._application.close()
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        sweeping = asyncio.create_task(self._sweep())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            sweeping.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_seconds)
            self._waiting.sweep()


def _listening(address: str, reuse_port: bool) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, int(port)), family=family, backlog=BACKLOG, reuse_port=reuse_port)
        # Accepted connections inherit this. Otherwise an answer's second packet waits 40 ms for the first to be
        # acknowledged.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made
    except OSError as error:
        raise SpecError(f"rest: {address} cannot be used: {error.strerror or error}") from error

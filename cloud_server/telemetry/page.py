"""Metrics in Prometheus's text format over HTTP/1.1, on a port of their own.

Anybody who reaches the port may read it, so it is on loopback unless another address is given. Whatever comes to it
costs little: `MAX_READERS` connections at a time, each with one request of at most 64 KiB a line and `SECONDS` for all
it sends; what comes beyond is closed.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from shared_hooks.config import why_not
from shared_hooks.errors import SpecError

log = logging.getLogger(__name__)

MAX_READERS: Final = 8
SECONDS: Final = 5.0
PATH: Final = "/metrics"


class MetricsPage:
    """On ``address``, HOST:PORT, which is taken at once (SpecError if it cannot be) and answers from `serve` on.

    Use as a context manager.
    """

    def __init__(self, address: str, *, reuse_port: bool = False) -> None:
        """``reuse_port``: others may answer there, too, who say the same."""
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port), reuse_port)
        except OSError as error:
            raise SpecError(f"metrics: {address} cannot be used: {error.strerror or error}") from error
        self.address = f"{host}:{self._server.server_port}"

    def serve(self, registry: CollectorRegistry) -> None:
        """Answers with what ``registry`` collects, in threads of its own, until the end of the block."""
        self._server.registry = registry
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="isthmus-metrics", daemon=True).start()
        log.info("metrics on http://%s%s", self.address, PATH)

    def __enter__(self) -> MetricsPage:
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the port back."""
        if self._server.registry is not None:
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    registry: CollectorRegistry | None = None

    def __init__(self, host: str, port: int, reuse_port: bool) -> None:
        self._reuse_port = reuse_port
        self._places = threading.BoundedSemaphore(MAX_READERS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As the base class, without its look-up of the host's name, which may wait for a name server."""
        if self._reuse_port:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.socket.getsockname()[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A socket's own time limit starts again with every byte; one who sends a byte a second is closed by the clock.
        clock = threading.Timer(SECONDS, _close, [request])
        clock.daemon = True
        clock.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            clock.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a reader of the metrics", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.0"  # one request a connection
    server_version, sys_version = "isthmus", ""

    def do_GET(self) -> None:
        if why := why_not(self.headers.get("Host"), self.connection.getsockname()[0], self.headers.get("Origin"), ""):
            self.send_error(HTTPStatus.FORBIDDEN, explain=why)
            return
        if urllib.parse.urlsplit(self.path).path != PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        assert self.server.registry is not None
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.server.registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for every scrape says nothing."""


def _close(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass

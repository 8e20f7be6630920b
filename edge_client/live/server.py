"""A thread that runs uvicorn, on a port of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_client.live.board import Board
from shared_hooks.config import is_loopback, is_own
from shared_hooks.errors import SpecError

# What a browser may fetch: the page, its script and style, and the stream of updates; and from where.
#
# The page is for users of this machine. A foreign `Host` would be DNS rebinding
# (https://owasp.org/www-community/attacks/DNS_Rebinding), an `Origin` or `Sec-Fetch-Site` of another site would be
# its script: both are refused. The stream is server-sent events
# (https://html.spec.whatwg.org/multipage/server-sent-events.html): first "whole", then "more" for every update, until
# "ended".

FOLDER: Final = Path(__file__).parent
FILES: Final = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css")} | {
    f"/{name}": (name, "text/javascript") for name in ("page.js", "charts.js")
}
EVERY_SECONDS: Final = 0.25
MOST_READERS: Final = 16
STALLED_SECONDS: Final = 20.0
"""A reader that takes nothing for so long is dropped."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class DashboardApplication:
    """The ASGI application of the page. ``host``: the address listened on. `end` ends the streams."""

    def __init__(self, board: Board, host: str) -> None:
        self.events = Events(board)
        routes = [Route(path, _file(*known)) for path, known in FILES.items()]
        self._app: ASGIApp = Starlette(routes=[*routes, Route("/events", self.events)])
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        why = self._refused(Headers(scope=scope), str(scope["path"]))
        if why is not None:
            await PlainTextResponse(f"{why}\n", 403, HEADERS)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refused(self, headers: Headers, path: str) -> str | None:
        """Return why a request is refused, or None."""
        host = headers.get("host", "")
        if not is_own(host, self._host):
            return f"this page is not served to the host {host[:100]!r}: open it by its address"
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if origin not in (None, f"http://{host}"):
            return "another origin may not read this page"
        followed = path == "/" and headers.get("sec-fetch-dest") == "document"  # a link that was clicked
        if site not in ("none", "same-origin") and not followed:
            return "another site may not read this page"
        return None


def _file(name: str, kind: str) -> Any:
    async def answer(request: Request) -> Response:
        return Response((FOLDER / name).read_bytes(), media_type=kind, headers=HEADERS)

    return answer


class Events:
    """The event stream of one board, for up to `MOST_READERS` readers; nothing is kept per reader."""

    def __init__(self, board: Board) -> None:
        self.readers = 0
        self._board = board
        self._ended = threading.Event()

    def end(self) -> None:
        """Send each reader a last event, and end its stream."""
        self._ended.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.readers >= MOST_READERS:
            text = f"{MOST_READERS} pages are open already\n"
            await PlainTextResponse(text, 503, HEADERS)(scope, receive, send)
            return
        self.readers += 1
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            with suppress(asyncio.TimeoutError):
                await self._stream(send, gone)
        finally:
            gone.cancel()
            self.readers -= 1

    async def _stream(self, send: Send, gone: asyncio.Future[None]) -> None:
        headers = {**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"}
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})
        number, whole = self._board.whole()
        await _send_event(send, "whole", whole)
        while not gone.done():
            ended = self._ended.is_set()  # before the items: everything added until then is sent
            number, more = self._board.since(number)
            if more:
                await _send_event(send, "more", more)
            if ended:
                await _send_event(send, "ended", {})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            await asyncio.wait([gone], timeout=EVERY_SECONDS)


async def _send_event(send: Send, kind: str, data: Any) -> None:
    body = f"event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
    await asyncio.wait_for(send({"type": "http.response.body", "body": body, "more_body": True}), STALLED_SECONDS)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


log = logging.getLogger(__name__)

CONNECTIONS: Final = 64
BACKLOG: Final = 16
EVENT_SECONDS: Final = 1.0
"""How long open pages have to receive the last event."""
STOP_SECONDS: Final = 10.0


class WebServer:
    """An ASGI application on ``listen``, [HOST:]PORT, bound at once; the default host is 127.0.0.1, port 0 is a free
    one. ``name``: for messages.

    Raises SpecError for an unavailable port.
    """

    def __init__(self, application: Callable[[str], ASGIApp], listen: str, name: str) -> None:
        """``application``: creates it for the host."""
        self.host, port = address_of(listen, name)
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            self._socket = socket.create_server((self.host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise SpecError(f"{name}: {listen} cannot be listened on: {error.strerror or error}") from error
        self.port = int(self._socket.getsockname()[1])
        self.url = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"
        config = uvicorn.Config(
            application(self.host),
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,  # a log line for every reader that leaves is useless
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name=f"isthmus-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; requests in progress have a second."""
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


class PageServer(WebServer):
    """The dashboard's web server. Arguments and errors: `WebServer`."""

    def __init__(self, board: Board, listen: str) -> None:
        self.application: DashboardApplication

        def made(host: str) -> ASGIApp:
            self.application = DashboardApplication(board, host)
            return self.application

        super().__init__(made, listen, "dashboard")
        if not is_loopback(self.host):
            log.warning("dashboard: every machine that reaches %s sees the page: there is no password", self.url)

    @property
    def readers(self) -> int:
        """The number of open pages."""
        return self.application.events.readers

    def close(self) -> None:
        """Inform open pages, and stop."""
        self.application.events.end()
        until = time.monotonic() + EVENT_SECONDS
        while self.readers and time.monotonic() < until:
            time.sleep(0.02)
        super().close()


def address_of(listen: str, name: str) -> tuple[str, int]:
    """Return the address in [HOST:]PORT. Raises SpecError."""
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16) or (":" in host and not host.startswith("[")):
        raise SpecError(f'{name}: expected [HOST:]PORT, such as 8050, found "{listen[:100]}"')
    return host.strip("[]") or "127.0.0.1", int(port)

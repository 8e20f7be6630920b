"""What each path answers: an ASGI application (https://asgi.readthedocs.io), without a framework, for there are ten.

    GET  /v2                                      the server           (both also by POST, as Triton's clients ask:)
    GET  /v2/health/live, /v2/health/ready        200, or 400/503      POST /v2/repository/index
    GET  /v2/models/NAME[/versions/V]             a model
    GET  /v2/models/NAME[/versions/V]/ready       200, or 404/503
    GET  /v2/models/NAME[/versions/V]/config      ... in Triton's words
    GET  /v2/models[/NAME[/versions/V]]/stats     how many requests it answered, and their times
    POST /v2/models/NAME[/versions/V]/infer       a request
    POST /v2/repository/models/NAME/load, .../unload               (for who may)

A request's work is done in a thread, which lasts until its answer is fetched.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import unquote

from cloud_server import wire
from cloud_server.access import CallCredentials, Caller, token_in
from cloud_server.inference import Inference, InferenceCall, ModelInfo, TensorInfo
from cloud_server.inference.service import Hold
from cloud_server.transport.active_calls import ActiveCalls
from cloud_server.transport.rest import messages
from cloud_server.transport.rest.connections import PEER, Peer
from cloud_server.transport.rest.pages import HEADERS, Pages
from shared_hooks.config import why_not
from shared_hooks.errors import (
    AccessRefused,
    BadFrame,
    Cancelled,
    DeadlineExceeded,
    IsthmusError,
    QuotaExceeded,
    TooLarge,
)
from shared_hooks.lifecycle import Stage, on_behalf_of
from shared_hooks.sharing import Owner

# Answers on their way.

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PIECE_BYTES = 256 << 10


async def send_whole(
    send: Send,
    peer: Peer,
    status: int,
    body: bytes,
    *headers: tuple[bytes, bytes],
    kind: bytes = b"application/json",
) -> None:
    """Send an answer in one piece, of JSON or another ``kind``. If the request's body is incomplete, the rest is not
    read and the connection ends.

    Sending may take any time: a client that does not fetch it counts as waiting (`connections`).
    """
    length = str(len(body)).encode()
    known = [(b"content-type", kind), (b"content-length", length), *headers]
    is_last = peer.is_sending
    if is_last:
        known.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": known})
    await send({"type": "http.response.body", "body": body, "more_body": is_last})
    if is_last:
        await peer.ignored()
        await send({"type": "http.response.body", "body": b""})


class Delivery:
    """Sends one answer, from another thread. ``fetched`` is called, in the loop, when all but its end has been sent."""

    def __init__(self, send: Send, peer: Peer, fetched: Callable[[], object], seconds: float) -> None:
        """``seconds``: the time limit for all of it."""
        self._send = send
        self._peer = peer
        self._fetched = fetched
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()

    def __call__(self, head: list[bytes], behind: list[memoryview]) -> None:
        """Send the answer, and return when the client has fetched it. Raises Cancelled if it does not."""
        asyncio.run_coroutine_threadsafe(self._within(head, behind), self._loop).result()

    async def _within(self, head: list[bytes], behind: list[memoryview]) -> None:
        try:
            await asyncio.wait_for(self._deliver(head, behind), self._seconds)
        except asyncio.TimeoutError:
            raise Cancelled(f"the answer was not fetched within {self._seconds:g} s") from None

    async def _deliver(self, head: list[bytes], behind: list[memoryview]) -> None:
        json_bytes = sum(map(len, head))
        nbytes = json_bytes + sum(one.nbytes for one in behind)
        kind = b"application/octet-stream" if behind else b"application/json"
        headers = [(b"content-type", kind), (b"content-length", str(nbytes).encode())]
        if behind:
            headers.append((b"inference-header-content-length", str(json_bytes).encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in _pieces([*head, *behind]):
            await self._put(piece, more=True)
        await self._put(b"", more=True)  # returns when the last chunk has been sent
        if self._peer.is_closed:
            raise Cancelled("the caller left")
        self._fetched()
        await self._put(b"", more=False)

    async def _put(self, piece: bytes | bytearray, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})


def _pieces(buffers: list[bytes | memoryview]) -> Iterator[bytearray]:
    """Yield the bytes of all buffers, with small ones joined."""
    piece = bytearray()
    for buffer in buffers:
        for at in range(0, len(buffer), PIECE_BYTES):
            piece += buffer[at : at + PIECE_BYTES]
            if len(piece) >= PIECE_BYTES:
                yield piece
                piece = bytearray()
    yield piece


# An HTTP request in its thread, from the complete body to the fetched answer.

Deliver = Callable[[list[bytes], list[memoryview]], object]
"""Sends the answer's JSON and the bytes after it, and returns when they are fetched."""


class Work:
    """A request's work in a thread. ``request``: its key in `ActiveCalls`."""

    def __init__(
        self, inference: Inference, active_calls: ActiveCalls, request: Hashable, caller: Caller, peer: Peer
    ) -> None:
        self._inference = inference
        self._active_calls = active_calls
        self._request = request
        self._caller = caller
        self._peer = peer
        self._lock = threading.Lock()
        self._asking: InferenceCall | None = None
        self._gone = False

    def gone(self) -> None:
        """The client left. Thread-safe."""
        with self._lock:
            self._gone = True
            if self._asking is not None:
                self._asking.gone()

    def run(self, model: str, version: str, body: memoryview, json_bytes: int | None, deliver: Deliver) -> None:
        """Compute and deliver the answer. Raises the request's error."""
        inference, leave = self._inference, self._peer.leave
        with on_behalf_of(self._caller.account), inference.asking(self._caller, leave) as asking:
            self._peer.works()
            with self._lock:
                self._asking = asking
                if self._gone:
                    asking.gone()
            self._active_calls.when_sent_away(self._request, asking.refuse)
            query, wanted = asking.read(partial(messages.read, model, version, body, json_bytes))
            result = inference.infer(asking, query)
            del body, query
            with inference.held.hold(asking.owner, leave) as hold:
                hold.more(messages.answer_bytes(result, wanted))
                head, behind = asking.read(partial(messages.answer, result, wanted))
                deliver(head, behind)


# A request's body while it arrives: counted before it is kept.

Receive = Callable[[], Awaitable[Any]]

STEP = 1 << 20
"""A body of unknown length is charged in steps of so many bytes."""


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, hold: Hold, most: int, record_activity: Callable[[], object]
) -> memoryview:
    """Read the body, of at most ``most`` bytes; ``record_activity`` is called for each piece.

    Raises TooLarge, and ServerUnavailable without room for it.
    """
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding != b"identity":
        raise BadFrame(f"a body in {encoding[:40]!r}: bodies are taken as they are")
    announced = _number(headers, b"content-length")
    _check(announced or 0, most)
    counted = announced or 0
    hold.more(counted)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the caller left")
        record_activity()
        body += message.get("body", b"")
        _check(len(body), most)
        if len(body) > counted:
            hold.more(STEP)
            counted += STEP
        if not message.get("more_body", False):
            return memoryview(body).toreadonly()


def json_bytes(headers: Mapping[bytes, bytes]) -> int | None:
    """Return how many bytes of the body are JSON; None: all."""
    return _number(headers, b"inference-header-content-length")


def _check(nbytes: int, most: int) -> None:
    if nbytes > most:
        raise TooLarge(f"a body of {nbytes} bytes; at most {most} are taken (max_request_bytes)")


def _number(headers: Mapping[bytes, bytes], name: bytes) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isdigit() and len(text) < 20):
        raise BadFrame(f"the header {name.decode()} is no number")
    return int(text)


log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]

STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 413,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP's status for each of gRPC's; an exhausted quota is 429."""
CHUNK_BYTES = 256 << 10
"""A page's file is sent in pieces of this size."""
CHANGE_SECONDS = 5.0
MAX_CHANGE_BYTES = 64 << 10
"""Most bytes of the body of a load or unload request, and of its objects."""
REQUEST_SECONDS = 0.001
"""What parsing a request's header in Python is charged as."""


class NoSuchPath(IsthmusError):
    """Nothing is served at this path."""

    status = "NOT_FOUND"


class RestApplication:
    """The REST application of one server. ``active_calls``: shared with gRPC."""

    def __init__(self, inference: Inference, active_calls: ActiveCalls, pages: Pages | None = None) -> None:
        self._inference = inference
        self._active_calls = active_calls
        self._pages = pages
        # As for gRPC: as many as there are places, and as many that wait for one, or lost theirs.
        threads = 2 * inference.core.limits.max_clients
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="isthmus-rest")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        peer: Peer = scope["state"][PEER]
        if peer.is_closed:
            return
        headers = dict(reversed(scope["headers"]))  # the first of several headers of one name
        caller, request, pace = Caller(peer.name), peer.begins(), self._inference.core.pace
        try:
            # Before authentication: the last credentials on this connection are charged, at first its address.
            await asyncio.sleep(pace.wait(peer.account))
            pace.spent(peer.account, REQUEST_SECONDS)
            peer.account = caller.account
            host, origin, kind = (headers.get(name) for name in (b"host", b"origin", b"content-type"))
            reported = [None if one is None else one.decode("latin-1") for one in (host, origin)]
            if why := why_not(
                reported[0], (scope.get("server") or ("",))[0], reported[1], (kind or b"").decode("latin-1")
            ):
                raise AccessRefused(why)
            path = [unquote(part) for part in scope["raw_path"].decode("ascii", "replace").split("/")[1:]]
            if path[:2] == ["v2", "health"]:
                await self._health(path[2:], send, peer)
                return
            if path[:1] == ["try"] and self._pages is not None:
                await self._page(path[1:], scope["method"], send, peer)
                return
            caller = self._enter(request, scope["headers"], peer)
            peer.account = caller.account
            await self._answer(request, scope["method"], path, caller, headers, receive, send, peer)
        except Exception as error:
            peer.waits(request)
            await self._refuse(scope, caller, peer, error, send)
        finally:
            self._active_calls.left(request)
            peer.waits(request)

    def _enter(self, request: object, headers: Sequence[tuple[bytes, bytes]], peer: Peer) -> Caller:
        """Authenticate the request. Raises NotAuthenticated."""
        shown = [(name.decode("latin-1"), value) for name, value in headers]
        names = peer.names if self._active_calls.register.certificates else ()
        return self._active_calls.enter(request, peer.name, CallCredentials(token_in(shown), names), peer.leave)

    async def _health(self, path: list[str], send: Send, peer: Peer) -> None:
        """Answer health checks, without authentication, because orchestrators have no credentials."""
        if path == ["live"]:
            await send_whole(send, peer, 200, messages.text({"live": True}))
        elif path == ["ready"]:
            ready = self._inference.ready
            await send_whole(send, peer, 200 if ready else 503, messages.text({"ready": ready}))
        else:
            raise NoSuchPath("health is asked for at /v2/health/live and /v2/health/ready")

    async def _page(self, path: list[str], method: str, send: Send, peer: Peer) -> None:
        """Serve a static file. No credentials are needed; the page's own requests to the models need them."""
        assert self._pages is not None
        if not path:  # the file names objects beside it
            await send_whole(send, peer, 308, b"", (b"location", b"/try/"))
            return
        found = await asyncio.get_running_loop().run_in_executor(self._threads, self._pages.find, path)
        if found is None or method != "GET":
            raise NoSuchPath(f"there is no page /try/{'/'.join(path)[:80]}")
        kind, body = found
        length = str(len(body)).encode()
        headers = [(b"content-type", kind), (b"content-length", length), *HEADERS, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        # each chunk waits for the one before, so a slow reader holds little memory
        for at in range(0, len(body), CHUNK_BYTES):
            await send({"type": "http.response.body", "body": body[at : at + CHUNK_BYTES], "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _answer(
        self,
        request: object,
        method: str,
        path: list[str],
        caller: Caller,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        send: Send,
        peer: Peer,
    ) -> None:
        inference = self._inference
        if path in (["v2"], ["v2", ""]):
            await send_whole(send, peer, 200, messages.text(inference.server()))
            return
        if path == ["v2", "repository", "index"]:
            await send_whole(send, peer, 200, messages.text(inference.index(caller)))
            return
        if path[:3] == ["v2", "repository", "models"] and len(path) == 5 and path[4] in ("load", "unload"):
            if method != "POST":
                raise BadFrame("a model is loaded or unloaded by POST")
            await self._change(path[3], path[4], caller, headers, receive, peer)
            await send_whole(send, peer, 200, messages.text({}))
            return
        if path == ["v2", "models", "stats"] and "stats" not in inference.core.engines_for(caller):
            await send_whole(send, peer, 200, messages.text({"model_stats": inference.statistics(caller)}))
            return
        if path[:2] != ["v2", "models"] or len(path) < 3:
            raise NoSuchPath("there are /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME and .../NAME/infer")
        name, rest, version = path[2], path[3:], ""
        if rest[:1] == ["versions"] and len(rest) > 1:
            version, rest = rest[1], rest[2:]
        if rest == ["infer"]:
            if method != "POST":
                raise BadFrame("a request is sent by POST")
            await self._infer(request, name, version, caller, headers, receive, send, peer)
        elif rest == ["ready"]:
            inference.engine(caller, name, version)
            ready = inference.ready
            await send_whole(send, peer, 200 if ready else 503, messages.text({"ready": ready}))
        elif rest == ["stats"]:
            found = inference.statistics(caller, name, version)
            await send_whole(send, peer, 200, messages.text({"model_stats": found}))
        elif rest in ([], ["config"]):
            info = inference.describe(caller, name, version)
            await send_whole(send, peer, 200, messages.text(_config(info) if rest else _metadata(info)))
        else:
            raise NoSuchPath(
                f"of a model there are its metadata, ready, config, stats and infer, not {'/'.join(rest)[:80]!r}"
            )

    async def _change(
        self, name: str, what: str, caller: Caller, headers: Mapping[bytes, bytes], receive: Receive, peer: Peer
    ) -> None:
        """Load or unload a model in a thread; returns when that is done."""
        with self._inference.held.hold(Owner(caller.account, peer.name), peer.leave) as hold:
            reading = read_body(headers, receive, hold, MAX_CHANGE_BYTES, peer.record_activity)
            try:
                body = await asyncio.wait_for(reading, CHANGE_SECONDS)
            except asyncio.TimeoutError:
                raise DeadlineExceeded(f"the body did not come within {CHANGE_SECONDS:g} s") from None
        messages.read_change(body)
        change = self._inference.load if what == "load" else self._inference.unload
        peer.works()
        await asyncio.get_running_loop().run_in_executor(self._threads, change, caller, name)

    async def _infer(
        self,
        request: object,
        name: str,
        version: str,
        caller: Caller,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        send: Send,
        peer: Peer,
    ) -> None:
        inference, loop = self._inference, asyncio.get_running_loop()
        inference.core.check_open()
        inference.engine(caller, name, version)
        limits = inference.core.limits
        with inference.held.hold(Owner(caller.account, peer.name), peer.leave) as hold:
            length = json_bytes(headers)
            if (length or 0) > limits.max_message_bytes:
                raise TooLarge(
                    f"JSON of {length} bytes; at most {limits.max_message_bytes} are taken (max_message_bytes)"
                )
            most = caller.max_request_bytes(limits) + limits.max_message_bytes
            most = most if length is not None else limits.max_message_bytes
            seconds = limits.deadline_seconds
            try:
                body = await asyncio.wait_for(read_body(headers, receive, hold, most, peer.record_activity), seconds)
            except asyncio.TimeoutError:
                raise DeadlineExceeded(f"the body did not come within {seconds:g} s (deadline_seconds)") from None
            hold.more(messages.MEMORY * (body.nbytes if length is None else length))
            work = Work(inference, self._active_calls, request, caller, peer)
            watch = loop.create_task(_watch(receive, work.gone))
            # uvicorn reports a disconnect at the end of an answer, too
            deliver = Delivery(send, peer, watch.cancel, limits.answer_seconds)
            try:
                await loop.run_in_executor(self._threads, work.run, name, version, body, length, deliver)
            finally:
                watch.cancel()

    async def _refuse(self, scope: Scope, caller: Caller, peer: Peer, error: Exception, send: Send) -> None:
        known = error if isinstance(error, IsthmusError) else None
        with on_behalf_of(caller.account):
            if known is None:
                log.error("%s %s", scope["method"], scope["path"], exc_info=error)
                known = IsthmusError("the server failed while it answered; see its log")
            where = f"{scope['method']} {scope['path'][:256]} of {caller.peer}"
            self._inference.core.lifecycle.emit(Stage.ON_ERROR, where=where, error=known)
        if isinstance(known, Cancelled):
            peer.leave()
            return
        status = 429 if isinstance(known, QuotaExceeded) else STATUS.get(known.status, 500)
        more = []
        if known.retry_after_seconds:
            more.append((b"retry-after", str(math.ceil(known.retry_after_seconds)).encode()))
        if status == 401:
            more.append((b"www-authenticate", b"Bearer"))
        body = messages.text({"error": f"{type(known).__name__}: {wire.message(known)}"})
        try:
            await send_whole(send, peer, status, body, *more)
        except RuntimeError:  # the answer had begun
            peer.leave()


async def _watch(receive: Receive, gone: Callable[[], object]) -> None:
    """Call ``gone`` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()


def _metadata(info: ModelInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "versions": info.versions,
        "platform": info.platform,
        "inputs": [_tensor(one) for one in info.inputs],
        "outputs": [_tensor(one) for one in info.outputs],
    }


def _tensor(info: TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "datatype": info.datatype, "shape": info.shape}


def _config(info: ModelInfo) -> dict[str, Any]:
    """Return the configuration as Triton describes it. ``max_batch_size`` is 0 because shapes include the batch."""

    def kind(one: TensorInfo) -> dict[str, Any]:
        return {"name": one.name, "data_type": f"TYPE_{one.datatype}", "dims": one.shape}

    found = {"name": info.name, "platform": info.platform, "backend": info.platform, "max_batch_size": 0}
    return {**found, "input": [kind(one) for one in info.inputs], "output": [kind(one) for one in info.outputs]}

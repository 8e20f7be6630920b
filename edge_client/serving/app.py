"""Serve OpenAI's routes over a split language model, to applications on this machine or with the key."""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_client.generation import TextStream
from edge_client.live.server import WebServer
from edge_client.serving import protocol
from edge_client.serving.chats import Chats, TextTask, WrittenText
from edge_client.serving.protocol import Pieces, ProtocolError, TextRequest
from edge_client.serving.sampling import Chosen
from shared_hooks.config import is_loopback, is_own
from shared_hooks.errors import SpecError

MOST_BODY: Final = 8 << 20
THREADS: Final = 64
LOOK_SECONDS: Final = 0.25
"""Seconds between checks whether a waiting application has disconnected."""

Emit = Callable[[dict[str, Any]], None]


class Endpoint:
    """Serves ``chats`` at ``listen``, [HOST:]PORT, on loopback by default. Use as a context manager.

    With a ``key`` each request must have it ("Authorization: Bearer KEY"). Without one only this machine is served, and
    no page of another site in its browser. Raises SpecError for another address without a key, and for a port in use.
    """

    def __init__(self, chats: Chats, listen: str = "8080", key: str = "") -> None:
        host = listen.rpartition(":")[0].strip("[]") or "127.0.0.1"
        if not (is_loopback(host) or key):
            raise SpecError(f"serve: every machine that reaches {listen} could use the model: give a key (--key-file)")
        self._chats = chats
        self._key = key.encode()
        self._threads = ThreadPoolExecutor(THREADS, "isthmus-serve")
        self.model = chats.client.model_id
        self._web = WebServer(self._application, listen, "serve")
        self.url = f"{self._web.url}v1"

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving."""
        self._web.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _application(self, host: str) -> ASGIApp:
        def route(path: str, answer: Callable[[Request], Any], *methods: str) -> Route:
            async def guarded(request: Request) -> Response:
                try:
                    self._check(request, host)
                    found: Response = await answer(request)
                    return found
                except Exception as error:
                    return _failed(error)

            return Route(path, guarded, methods=list(methods))

        async def not_found(request: Request, error: Exception) -> Response:
            return _failed(ProtocolError(f"there is no {request.method} {request.url.path} here", 404))

        routes = [
            route("/v1/models", self._models, "GET"),
            route("/v1/models/{name:path}", self._model, "GET"),
            route("/v1/chat/completions", self._chat, "POST"),
            route("/v1/completions", self._text, "POST"),
            route("/v1/embeddings", self._embeddings, "POST"),
            Route("/health", _well),
        ]
        return Starlette(routes=routes, exception_handlers={404: not_found, 405: not_found})

    def _check(self, request: Request, host: str) -> None:
        """Raise `ProtocolError` if a request may not be served."""
        if self._key:
            given = request.headers.get("authorization", "").partition(" ")[2].strip().encode()
            if not hmac.compare_digest(given, self._key):
                raise ProtocolError(
                    "the key is missing or wrong (Authorization: Bearer KEY)", 401, code="invalid_api_key"
                )
            return
        named, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not is_own(named, host):
            raise ProtocolError(f"not served to the host {named[:100]!r}: use the endpoint's address", 403)
        if origin is not None and not is_own(origin.partition("://")[2], host):
            raise ProtocolError("pages of other sites are not answered without a key (--key-file)", 403)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "isthmus", "cut": list(self._chats.cuts)}

    def _check_model(self, name: Any) -> None:
        if name != self.model:
            text = f'no model "{name!s:.100}" is served here; there is "{self.model}"'
            raise ProtocolError(text, 404, param="model", code="model_not_found")

    async def _body(self, request: Request) -> dict[str, Any]:
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > MOST_BODY:
                raise ProtocolError(f"a request has at most {MOST_BODY >> 20} MiB", 413)
        try:
            body = json.loads(bytes(data))
        except (ValueError, RecursionError):
            raise ProtocolError("the body is no JSON") from None
        if not isinstance(body, dict):
            raise ProtocolError("the body is a JSON object")
        self._check_model(body.get("model"))
        return body

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._answered(request, await self._off(protocol.chat_request, body, self._chats))

    async def _text(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._answered(request, await self._off(protocol.text_request, body, self._chats))

    async def _off(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call in a thread, as tokenizers and grammars are slow."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def _answered(self, request: Request, requested: TextRequest) -> Response:
        if (texts := len(requested.prompts) * requested.choices) > protocol.MOST_TEXTS:
            raise ProtocolError(f"{texts} texts are asked for; at most {protocol.MOST_TEXTS} are written", param="n")
        if requested.streams:
            return await self._streamed(request, requested)
        gone = threading.Event()
        return JSONResponse(await self._waited(request, gone, self._write, requested, lambda piece: None, gone))

    async def _waited(self, request: Request, gone: threading.Event, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of ``call`` in a thread; ``gone`` is set as soon as the application disconnects."""
        running = asyncio.ensure_future(self._off(call, *args))
        try:
            await self._watched(request, running, gone)
            return running.result()
        finally:
            gone.set()

    @staticmethod
    async def _watched(request: Request, coming: asyncio.Future[Any], gone: threading.Event) -> None:
        """Wait; set ``gone`` if the application disconnects meanwhile."""
        while not (await asyncio.wait({coming}, timeout=LOOK_SECONDS))[0]:
            if await request.is_disconnected():
                gone.set()

    async def _streamed(self, request: Request, requested: TextRequest) -> Response:
        """Return server-sent events; an error before the first has its own status."""
        loop, gone = asyncio.get_running_loop(), threading.Event()
        queue: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

        def emit(piece: dict[str, Any] | Exception | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, piece)

        def work() -> None:
            try:
                self._write(requested, emit, gone)
                emit(None)
            except Exception as error:
                emit(error)

        loop.run_in_executor(self._threads, work)
        coming = asyncio.ensure_future(queue.get())
        try:
            await self._watched(request, coming, gone)
        except BaseException:
            gone.set()
            raise
        first = coming.result()
        if isinstance(first, Exception):
            raise first

        async def events() -> AsyncIterator[bytes]:
            piece: dict[str, Any] | Exception | None = first
            try:
                while piece is not None:
                    failed = isinstance(piece, Exception)
                    reported = ProtocolError.of(piece).as_dict() if isinstance(piece, Exception) else piece
                    yield b"data: " + json.dumps(reported, allow_nan=False).encode() + b"\n\n"
                    if failed:
                        return
                    piece = await queue.get()
                yield b"data: [DONE]\n\n"
            finally:
                gone.set()

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    def _write(self, requested: TextRequest, emit: Emit, gone: threading.Event) -> dict[str, Any]:
        """Generate all texts of a request, in turn; ``emit`` receives each piece."""
        choices, texts, prompts = [], [], 0
        for number, prompt in enumerate(requested.prompts):
            prompts += len(prompt)
            for nth in range(requested.choices):
                index = number * requested.choices + nth
                text, written = self._one(requested, prompt, nth, index, emit, gone)
                texts.append(written)
                choices.append(protocol.choice(requested, index, text, written, self._chats.words))
        usage = protocol.usage_of(prompts, texts, self._chats)
        if requested.reports_usage:
            emit(protocol.chunk(requested, self.model, None, usage=usage))
        return protocol.answer(requested, self.model, choices, usage)

    def _one(
        self, requested: TextRequest, prompt: tuple[int, ...], nth: int, index: int, emit: Emit, gone: threading.Event
    ) -> tuple[str, WrittenText]:
        words, pieces = self._chats.words, Pieces(requested)
        new: list[Chosen] = []
        first = True

        def emit_chunk(text: str | None, **more: Any) -> None:
            nonlocal new, first
            logprobs, new = protocol.logprobs_of(new, words, requested) if new else None, []
            emit(protocol.chunk(requested, self.model, index, text, role=first, logprobs=logprobs, **more))
            first = False

        def on_text(text: str) -> None:
            if given := pieces.add(text):
                emit_chunk(given)

        stream = TextStream(words, on_text)

        def on_token(chosen: Chosen) -> bool:
            new.append(chosen)
            stream.add([chosen.id])
            return pieces.is_stopped

        written = self._chats.write(
            TextTask(prompt, requested.most, requested.sampling, nth), on_token, lambda: not gone.is_set()
        )
        stream.end()
        if requested.streams:
            self._end(requested, index, pieces, written, emit_chunk)
        return pieces.text, written

    def _end(
        self, requested: TextRequest, index: int, pieces: Pieces, written: WrittenText, emit_chunk: Callable[..., None]
    ) -> None:
        left = pieces.end()
        _, calls = protocol.calls_in(pieces.text, requested)
        left = left or ("" if calls else pieces.withheld)
        if left:
            emit_chunk(left)
        emit_chunk(None, calls=calls, reason="tool_calls" if calls else written.reason)

    async def _embeddings(self, request: Request) -> Response:
        body = await self._body(request)
        if body.get("encoding_format") not in (None, "float", "base64"):
            raise ProtocolError("encoding_format: float or base64", param="encoding_format")
        if body.get("dimensions") is not None:
            raise ProtocolError("dimensions: these have as many as the model's states", param="dimensions")
        prompts = await self._off(protocol.prompts_of, body.get("input"), self._chats.words, "input")
        gone = threading.Event()

        def work() -> list[list[float]]:
            return [self._chats.embed(prompt, lambda: not gone.is_set()) for prompt in prompts]

        found = await self._waited(request, gone, work)
        return JSONResponse(protocol.embeddings(self.model, found, sum(map(len, prompts)), body.get("encoding_format")))


async def _well(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _failed(error: Exception) -> Response:
    refused = ProtocolError.of(error)
    return JSONResponse(refused.as_dict(), refused.status)

"""`EdgeClient` for asyncio: heads and waiting in threads of its own, so that the event loop continues.

    from edge_client import aio

    async with aio.EdgeClient("127.0.0.1:50051", "digits", split="auto") as client:
        answer = await client.infer("photo.png")
        async for answer in client.infer_many("photos/"):
            ...


May import client, call, answer.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeVar, overload

from torch import nn

import edge_client.client
from edge_client.answer import Answer, Failure
from edge_client.model_choice import Inputs, ModelChoice
from edge_client.request import Cut, Pending
from edge_client.transport import State
from shared_hooks.errors import Cancelled, DeadlineExceeded
from shared_hooks.models import ModelSpec
from shared_hooks.showing import summary_of

__all__ = ["EdgeClient"]


# `EdgeClient` for asyncio.

# One request that a task awaits in a thread, and may abandon at any time.

WHY = "the task that waited for it was cancelled"


class HeldRequest:
    """A request whose ``run`` is in a thread; `leave` is called from the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: Pending | None = None
        self._left = False

    def run(self, begin: Callable[[], Pending]) -> Answer:
        """Begin and wait. Raises Cancelled if it was left."""
        self._check()
        pending = begin()
        with self._lock:
            self._pending = pending
            left = self._left
        if left:  # while its head ran
            pending.cancel(WHY)
        return pending.result()

    def leave(self) -> None:
        """Cancel it: the server is informed, and `run` ends."""
        with self._lock:
            self._left = True
            pending = self._pending
        if pending is not None:
            pending.cancel(WHY)

    def _check(self) -> None:
        with self._lock:
            if self._left:
                raise Cancelled(WHY)


# The inputs of an asynchronous iterator, one at a time, for the thread that runs heads.

_END: Final = object()


class Fed:
    """Live inputs (`edge_client.request.sending.LiveInputs`): the next is requested when there is a place for it."""

    live = True

    def __init__(self, inputs: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._inputs = inputs.__aiter__()
        self._loop = loop
        self._next: Future[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        while True:
            item = self._requested().result()
            self._next = None
            if item is _END:
                return
            yield item

    def wait_for_input(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the next input or the end; returns whether it is there."""
        return bool(wait([self._requested()], timeout=seconds).done)

    def stop(self) -> None:
        """Give the thread no further input."""
        if self._next is not None:
            self._next.cancel()

    def _requested(self) -> Future[Any]:
        if self._next is None:
            self._next = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        return self._next

    async def _take(self) -> Any:
        try:
            return await self._inputs.__anext__()
        except StopAsyncIteration:
            return _END


Result = TypeVar("Result")
LEAST_THREADS: Final = 8


class EdgeClient:
    """`edge_client.EdgeClient` with ``async with``, ``await`` and ``async for``; it takes the same arguments.

    The model is loaded by `open` (or ``async with``), in a thread. A task that is cancelled, or an iteration that is
    left, cancels its requests: the server is informed, and computes none that it has not begun. It belongs to the event
    loop that opened it. `client` is the underlying client.
    """

    def __init__(
        self, server: str | None, model: str | ModelSpec | nn.Module | ModelChoice, split: Cut = "input", **options: Any
    ) -> None:
        self._arguments = (server, model, split)
        self._options = options
        self._client: edge_client.client.EdgeClient | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def __repr__(self) -> str:
        server, _, split = self._arguments
        found = self._client
        return (
            summary_of(self, repr(found))
            if found is not None
            else summary_of(self, f"server={server}", f"split={split!r}")
        )

    @property
    def client(self) -> edge_client.client.EdgeClient:
        """The underlying client. Raises Cancelled before `open` and after `close`."""
        if self._closed:
            raise Cancelled("the client is closed")
        if self._client is None:
            raise Cancelled("the client is not open: async with edge_client.aio.EdgeClient(...) as client")
        return self._client

    @property
    def state(self) -> State:
        """The state of the connection."""
        return State.UNOPENED if self._client is None else self._client.state

    async def open(self) -> EdgeClient:
        """Load the model, plan and connect; with ``split="auto"`` measure. Raises as `edge_client.EdgeClient`."""
        if self._client is None:
            await asyncio.to_thread(self._make)
        made = self.client
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max(LEAST_THREADS, 2 * made.max_in_flight), "edge-aio")
        await asyncio.to_thread(made.open)
        return self

    def _make(self) -> None:
        """Runs in a thread, which continues when the task that waits for it is cancelled: a late client is
        closed here.
        """
        made = edge_client.client.EdgeClient(*self._arguments, **self._options)
        self._client = made
        if self._closed:
            made.close()

    async def close(self) -> None:
        """Close the connection; waiting requests end with Cancelled."""
        self._closed = True
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
        if self._threads is not None:
            self._threads.shutdown(wait=False)  # threads waiting in the queue find the client closed

    async def __aenter__(self) -> EdgeClient:
        try:
            return await self.open()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def infer(
        self,
        *args: Any,
        split: Cut | None = None,
        deadline: float | None = None,
        exact: bool | None = None,
        **kwargs: Any,
    ) -> Answer:
        """As `edge_client.EdgeClient.infer`. The deadline counts from here, the wait for a thread included."""
        client, held = self.client, HeldRequest()
        until = client.until(deadline)

        def begin() -> Pending:
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded("too many requests are under way: this one was not begun before its deadline")
            return client.submit(*args, split=split, deadline=left, exact=exact, **kwargs)

        assert self._threads is not None
        try:
            return await _in(self._threads, lambda: held.run(begin))
        except asyncio.CancelledError:
            held.leave()
            raise

    @overload
    def infer_many(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any] | str | Path,
        *,
        split: Cut | None = None,
        deadline: float | None = None,
        exact: bool | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        failures: Literal["raise"] = "raise",
    ) -> AsyncIterator[Answer]: ...
    @overload
    def infer_many(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any] | str | Path,
        *,
        split: Cut | None = None,
        deadline: float | None = None,
        exact: bool | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        failures: Literal["return"],
    ) -> AsyncIterator[Answer | Failure]: ...
    async def infer_many(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any] | str | Path,
        *,
        split: Cut | None = None,
        deadline: float | None = None,
        exact: bool | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        failures: Literal["raise", "return"] = "raise",
    ) -> AsyncIterator[Answer | Failure]:
        """As `edge_client.EdgeClient.infer_many`; ``inputs`` may come asynchronously, too.

        Inputs that do not are gone through in a thread. To leave early at once, and not when the iterator is collected,
        use `contextlib.aclosing`.
        """
        client = self.client
        fed = Fed(inputs, asyncio.get_running_loop()) if isinstance(inputs, AsyncIterable) else None
        under_way: deque[Pending] = deque(maxlen=client.connection.max_pipelined)
        left = threading.Event()

        def begun(pending: Pending) -> None:
            under_way.append(pending)
            if left.is_set():  # while its head ran
                pending.cancel(WHY)

        answers: Iterator[Answer | Failure] = client.iterate(
            inputs if fed is None else fed,
            split=split,
            deadline=deadline,
            exact=exact,
            prepare=prepare,
            failures=failures,
            begun=begun,
        )
        thread = ThreadPoolExecutor(1, "edge-aio-many")
        try:
            while (answer := await _in(thread, lambda: next(answers, _END))) is not _END:
                assert isinstance(answer, (Answer, Failure))
                yield answer
        finally:
            left.set()
            if fed is not None:
                fed.stop()
            for pending in list(under_way):  # the request that its thread may be waiting for
                pending.cancel(WHY)
            thread.submit(_close, answers)
            thread.shutdown(wait=False)


async def _in(threads: Executor, work: Callable[[], Result]) -> Result:
    """``work()`` in a thread, with this task's context."""
    return await asyncio.get_running_loop().run_in_executor(threads, contextvars.copy_context().run, work)


def _close(answers: Any) -> None:
    answers.close()

"""Inputs of an asynchronous iterator, one at a time, for the thread that runs heads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Final

_END: Final = object()


class Fed:
    """Live inputs (`edge_client.request.many.LiveInputs`): the next is asked for when there is a place for it."""

    live = True

    def __init__(self, inputs: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._inputs = inputs.__aiter__()
        self._loop = loop
        self._next: Future[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        while True:
            item = self._asked().result()
            self._next = None
            if item is _END:
                return
            yield item

    def wait_for_input(self, seconds: float) -> bool:
        """Whether the next input (or the end) is there, or comes within so long."""
        return bool(wait([self._asked()], timeout=seconds).done)

    def stop(self) -> None:
        """The thread gets no further input."""
        if self._next is not None:
            self._next.cancel()

    def _asked(self) -> Future[Any]:
        if self._next is None:
            self._next = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        return self._next

    async def _take(self) -> Any:
        try:
            return await self._inputs.__anext__()
        except StopAsyncIteration:
            return _END

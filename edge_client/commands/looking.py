"""``--dashboard`` and ``--sink`` of a run: what looks on. Loads neither page nor sinks unless asked to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_client.client import EdgeClient
from edge_client.commands.common import say

if TYPE_CHECKING:
    from edge_client.adaptive import AutoClient
    from edge_client.live import Dashboard, ToSinks
    from shared_hooks.sinks import Sink


class Looking:
    """The observers of one command; `close` it after the client. Raises SpecError for a sink that cannot be had."""

    def __init__(self, sinks: Sequence[str], listen: str | None) -> None:
        """``listen``: of the page, [HOST:]PORT; None = no page."""
        self._listen = listen
        self._page: Dashboard | None = None
        self._to_sinks: ToSinks | None = None
        self._opened: list[Sink] = []
        if sinks:
            from shared_hooks.sinks import open_sink

            try:
                for text in sinks:
                    self._opened.append(open_sink(text))
            except BaseException:
                self.close()
                raise

    @property
    def wanted(self) -> bool:
        """Whether anything looks on: then layers are measured."""
        return self._listen is not None or bool(self._opened)

    def begin(self, client: EdgeClient) -> None:
        """The page, from now on."""
        if self._listen is not None:
            from edge_client.live import Dashboard

            self._page = Dashboard(client, self._listen)
            say(f"dashboard at {self._page.url}")

    def count(self, client: EdgeClient) -> None:
        """The sinks, from now on: what was before warmed up."""
        if self._opened:
            from edge_client.live import ToSinks

            self._to_sinks = ToSinks(*self._opened)
            client.lifecycle.register(self._to_sinks)

    def follow(self, chooser: AutoClient) -> None:
        """What decides where requests run."""
        if self._page is not None:
            self._page.follow(chooser)

    def close(self) -> None:
        """Sinks have all of it when this returns."""
        if self._page is not None:
            self._page.close()
        if self._to_sinks is None:
            for sink in self._opened:
                sink.close()
            return
        self._to_sinks.close()
        if number := self._to_sinks.left_out:
            say(f"--sink: {number} answers were left out, for a sink was too slow")
        if number := self._to_sinks.failures:
            say(f"--sink: {number} answers could not be written")

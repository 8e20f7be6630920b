"""`Dashboard`: a page in the browser that shows one client at work.

    with EdgeClient("127.0.0.1:50051", "digits", split="stage2.0.conv2") as client, Dashboard(client) as page:
        print(page.url)

Hooks of the client's life cycle hand over what happens, and a thread beside the requests makes of it what the page is
told. The page itself asks for nothing that costs a request anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final

from edge_client.adaptive import AutoClient
from edge_client.client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.dial import check_address
from edge_client.live import entries
from edge_client.live.aside import Aside
from edge_client.live.board import Board
from edge_client.live.link import LinkWatch
from edge_client.live.machine import Machine
from edge_client.live.telling import Telling
from edge_client.modes import AUTO
from shared_hooks.errors import SpecError
from shared_hooks.metrics import gpu_of

LOOK_SECONDS: Final = 1.0


class Dashboard:
    """The page of ``client``, at `url` until `close`; ``listen``: [HOST:]PORT, a free port of loopback for "0".

    Where the cut is chosen (``split="auto"``, an `AutoClient`), the page shows the decisions, too. An address in place
    of a client: the link to that server, its load, and this machine; ``credentials`` are for that. ``title`` is the
    page's; None = the model's, or the address. Raises SpecError without the extra ``dashboard``, and for a port that
    cannot be had.
    """

    def __init__(
        self,
        client: EdgeClient | AutoClient | str,
        listen: str = "0",
        *,
        title: str | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        try:
            from edge_client.live.server import PageServer
        except ImportError as error:
            text = f'the dashboard needs {error.name}, which is not installed: pip install "isthmus[dashboard]"'
            raise SpecError(text) from error
        own = client.client if isinstance(client, AutoClient) else client
        self._client = own if isinstance(own, EdgeClient) else None
        server = check_address(own) if isinstance(own, str) else own.server
        model = "" if isinstance(own, str) else _name_of(own)
        self.board = Board(
            {
                "title": entries.said(title or model or server),
                "model": entries.said(model),
                "server": server,
                "device": str(self._client.device) if self._client else "",
                "auto": False,
                "stages": entries.stages(),
            }
        )
        self._server = PageServer(self.board, listen)
        self._aside: Aside[Callable[[], None]] = Aside("dashboard", lambda job: job())
        self._chooser: AutoClient | None = None
        self._link: LinkWatch | None = None
        self._machine = Machine(gpu_of(self._client.device) if self._client else None)
        self._hooks: Telling | None = None
        if self._client is not None:
            credentials = self._client.connection.credentials
            self._hooks = Telling(self.board, self._client, self._aside)
            self._client.lifecycle.register(self._hooks)
        if isinstance(client, AutoClient):
            self.follow(client)
        elif server is not None and not (self._client and self._client.split == AUTO):
            self._link = LinkWatch(server, credentials, self.board, lambda: self._server.readers > 0)
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="isthmus-dashboard-ticks", daemon=True)
        self._ticker.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        return self._server.url

    @property
    def readers(self) -> int:
        """Pages that are open."""
        return self._server.readers

    def follow(self, chooser: AutoClient) -> None:
        """Show the decisions of what chooses for this client; its own numbers of the link take the place of probes."""
        assert self._hooks is not None
        self._chooser, self._hooks.chosen = chooser, True
        self.board.set("about", {**self.board.about, "auto": True})
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._hooks.follow(chooser)

    def close(self) -> None:
        """The pages that are open keep what they show. May be called again."""
        if self._closed.is_set():
            return
        self._closed.set()
        if (link := self._link) is not None:
            link.close()
        self._ticker.join()  # it may have begun to follow a chooser
        if self._hooks is not None and self._client is not None:
            if self._chooser is not None:
                self._chooser.decisions.forget(self._hooks.decided)
            with suppress(SpecError):  # somebody else has removed it
                self._client.lifecycle.remove(self._hooks)
        self._aside.close()
        self._server.close()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tick(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self.board.add("edge", self._machine.look())
            self.board.counts["left_out"] = self._aside.left_out
            if self._chooser is None and self._client is not None and (found := self._client.chooser) is not None:
                self.follow(found)
            if (link := self._link) is not None:
                link.look()


def _name_of(client: EdgeClient) -> str:
    return client.spec.model_id if client.spec else type(client.wrapped.model).__name__

"""`LightDashboard`: the page of a `LightClient`, without PyTorch.

with LightClient("10.0.0.2:50051", "heads/", "stage2.0.conv2") as client, LightDashboard(client) as page:
    print(page.url)
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final

import psutil

from edge_client.light import LightAnswer, LightClient
from edge_client.live import board
from edge_client.live.board import Board, Entry
from shared_hooks.errors import IsthmusError, SpecError

LOOK_SECONDS: Final = 1.0
STAGES: Final = (
    {"label": "head, in onnxruntime", "group": "edge"},
    {"label": "network, both ways", "group": "transit"},
    {"label": "server queue", "group": "queue"},
    {"label": "tail", "group": "tail"},
)


class LightDashboard:
    """The page of ``client``, at `url` until `close`; ``listen``: [HOST:]PORT, a free port of loopback for "0".

    It shows requests, failures, round trips and this machine; this protocol has no figures of the server's machine.
    Raises SpecError without the extra ``dashboard``, and for an unavailable port.
    """

    def __init__(self, client: LightClient, listen: str = "0") -> None:
        try:
            from edge_client.live.server import PageServer
        except ImportError as error:
            text = f'the dashboard needs {error.name}, which is not installed: pip install "isthmus[dashboard]"'
            raise SpecError(text) from error
        self._client, self._process = client, psutil.Process()
        self.board = Board(
            {
                "title": board.short_line(client.heads.model),
                "model": board.short_line(client.heads.model),
                "server": client.server,
                "device": f"onnxruntime, {client.provider}",
                "auto": False,
                "stages": list(STAGES),
            }
        )
        self._server = PageServer(self.board, listen)
        self._cut = client.split
        self._gone = ""
        client.listeners.append(self._record)
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="isthmus-dashboard-ticks", daemon=True)
        self._ticker.start()

    @property
    def url(self) -> str:
        """The address of the page."""
        return self._server.url

    def close(self) -> None:
        """Stop; open pages keep what they show. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._client.listeners.remove(self._record)
            self._ticker.join()
            self._server.close()

    def __enter__(self) -> LightDashboard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, what: LightAnswer | IsthmusError) -> None:
        """Record an answer or a failure, in the requesting thread."""
        if isinstance(what, IsthmusError):
            self.board.count("failed")
            self.board.add("events", board.event("failed", f"{type(what).__name__}: {what}"))
            return
        number = self.board.count("answered")
        if what.split != self._cut:
            self.board.add("events", board.event("moved", "by the caller", old=self._cut, new=what.split))
            self._cut = what.split
        self.board.add("requests", _request(what, number))
        if what.fallback:
            self.board.add("events", board.event("fallback", what.fallback))

    def _tick(self) -> None:
        self._process.cpu_percent()
        psutil.cpu_percent()  # starts the interval
        while not self._closed.wait(LOOK_SECONDS):
            self.board.add("edge", self._machine())
            if self._server.readers:
                self._ping()

    def _machine(self) -> Entry:
        """Return this machine's figures since the last call."""
        return {
            "at": round(time.time(), 3),
            "cpu": [psutil.cpu_percent(), "measured", ""],
            "gpu": None,
            "memory": [psutil.virtual_memory().percent, "measured", ""],
            "process": [self._process.memory_info().rss, "measured", ""],
            "power": None,
        }

    def _ping(self) -> None:
        try:
            self.board.add("link", board.link(None, None, self._client.ping() / 1e6, "probe"))
            if self._gone:
                self.board.add("events", board.event("back", "the server answers again"))
            self._gone = ""
        except IsthmusError as error:
            if not self._gone:
                self.board.add("events", board.event("gone", f"{error}"))
            self._gone = f"{error}"


def _request(answer: LightAnswer, number: int) -> Entry:
    between = max(0, answer.request_ns - answer.queue_ns - answer.tail_ns)
    return {
        "number": number,
        "at": round(time.time(), 3),
        "cut": board.short_line(answer.split),
        "layer": None,
        "ms": answer.end_to_end_ns / 1e6,
        "rows": [round(ns / 1e6, 4) for ns in (answer.head_ns, between, answer.queue_ns, answer.tail_ns)],
        "up": answer.bytes_up,
        "down": answer.bytes_down,
        "sends": 1,
        "fallback": board.short_line(answer.fallback),
        "energy": [None, None],
    }

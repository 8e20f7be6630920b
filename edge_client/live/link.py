"""The link and the server's load where no controller measures them: small probes, only while somebody looks.

A round of nothing every two seconds tells the round trip and the load. Every ten seconds two rounds back to back tell
the rate, as `edge_client.adaptive.monitor` does it; they take the link for a tenth of a second at most, as far as its
last rate tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from edge_client.credentials import Credentials
from edge_client.live import entries
from edge_client.live.board import Board
from edge_client.survey.prober import LinkProber
from shared_hooks.errors import IsthmusError

PING_EVERY: Final = 2.0
TRAIN_EVERY: Final = 10.0
SECONDS: Final = 1.5
"""What a round may take."""
LARGEST, LEAST = 256 << 10, 8 << 10
"""Bytes of a train's first round; the second has half of them."""
SHARE_SECONDS: Final = 0.1


class LinkWatch:
    """`look` is called once a second, by one thread; it may take as long as a probe."""

    def __init__(
        self, server: str, credentials: Credentials | None, board: Board, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self._prober = LinkProber(server, credentials=credentials)
        self._board = board
        self._wanted = wanted
        self._up: float | None = None
        self._pinged = self._trained = -TRAIN_EVERY
        self._complaint = ""
        self._closed = False

    def look(self) -> None:
        """Probe, if it is time."""
        now = time.monotonic()
        if not self._wanted() or now - self._pinged < PING_EVERY:
            return
        self._pinged = now
        try:
            ping = min((self._prober.round(0, 0, SECONDS) for _ in range(2)), key=lambda one: one.network_ns)
            if now - self._trained >= TRAIN_EVERY:
                self._trained = now
                self._up = self._rate(ping.network_ns)
        except IsthmusError as error:
            if self._closed:
                return
            if (kind := type(error).__name__) != self._complaint:  # once for each kind of reason
                self._complaint = kind
                self._board.add("events", entries.event("gone", f"probe: {error}"))
            return
        if self._complaint:
            self._complaint = ""
            self._board.add("events", entries.event("back", "the server answers probes again"))
        self._board.add("link", entries.link(self._up, None, ping.network_ns / 1e6, "probe"))
        self._board.add("cloud", entries.load(ping.load))

    def _rate(self, rtt_ns: int) -> float:
        """Bytes a second up: by the second round's way in, on the server's clock, or by the whole train if slower."""
        large = LARGEST if self._up is None else int(min(LARGEST, max(LEAST, SHARE_SECONDS * self._up)))
        small = large // 2
        _, times = self._prober.train([(large, 0), (small, 0)], SECONDS)
        ns_per_byte = max(times.receive_ns / small, (times.total_ns - rtt_ns) / (large + small), 1 / small)
        return 1e9 / ns_per_byte

    def close(self) -> None:
        """Ends a probe that is under way."""
        self._closed = True
        self._prober.close()

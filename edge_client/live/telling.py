"""What happens to a client, told to the board: answers, failures, moves of the cut, connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from edge_client.adaptive import AutoClient
from edge_client.answer import Answer
from edge_client.client import EdgeClient
from edge_client.live import entries
from edge_client.live.aside import Aside
from edge_client.live.board import RINGS, Board
from edge_client.modes import AUTO
from shared_hooks.errors import Cancelled
from shared_hooks.lifecycle import Event

NUMBERS_SECONDS: Final = 0.4
"""Between two entries of what is asked more often than anybody can see."""


class Telling:
    """Hooks of a client's life cycle, and a listener to a controller's decisions. Each call hands over and returns."""

    name = "dashboard"
    built_in = True
    priority = "LOWEST"

    def __init__(self, board: Board, client: EdgeClient, aside: Aside[Callable[[], None]]) -> None:
        self.chosen = False
        """A controller tells why the cut moves."""
        self._board = board
        self._client = client
        self._aside = aside
        self._told: dict[str, float] = {}
        self._began = time.time()
        """Of the decisions' ``seconds``."""
        self._about()  # it may be connected already

    # -- of the life cycle

    def after_request(self, event: Event) -> None:
        """Answered, failed, or left."""
        if event.answer is not None:
            self._aside.put(partial(self._answered, replace(event.answer, output=None)))
        elif isinstance(event.error, Cancelled):
            self._board.count("cancelled")
        else:
            self._board.count("failed")
            self._event("failed", f"{type(event.error).__name__}: {event.error}")

    def on_split_change(self, event: Event) -> None:
        """By the user's hand, or a controller's: that says more by itself."""
        if not self.chosen and self._client.split != AUTO:
            self._event("moved", event.reason, old=str(event.old), new=str(event.new))

    def after_connect(self, event: Event) -> None:
        """There is a stream; what the server said of itself is known."""
        self._event("connected", f"to {event.address}")
        self._about()

    def on_disconnect(self, event: Event) -> None:
        """It ended."""
        self._event("disconnected", event.reason)

    def before_drain(self, event: Event) -> None:
        """The server takes nothing new."""
        self._event("draining", "the server finishes what it has, and takes nothing new")

    # -- of a controller

    def follow(self, chooser: AutoClient) -> None:
        """All that it decides; of what was before, what is told as an event."""
        self._began = time.time() - time.monotonic() + chooser.decisions.began
        before = chooser.decisions.listen(self.decided)
        events = [one for one in before if one.get("moved", True) and one["kind"] != "probe"][-RINGS["events"] :]
        for one in events:
            self._aside.put(partial(self._decided, dict(one)))

    def decided(self, entry: Mapping[str, Any]) -> None:
        """A choice, or an event (`edge_client.adaptive.decisions`)."""
        self._aside.put(partial(self._decided, dict(entry)))

    # -- beside the requests

    def _about(self) -> None:
        self._board.set("server", {key: entries.said(one) for key, one in self._client.server_about.items()})

    def _answered(self, answer: Answer) -> None:
        number = self._board.count("answered")
        self._board.add("requests", entries.request(answer, number))
        if answer.fallback:
            self._board.add("events", entries.event("fallback", answer.fallback))
        if self._due("cloud") and (known := entries.cloud(answer)) is not None:
            self._board.add("cloud", known)
        if answer.observations and self._due("observed"):
            self._board.set("observed", entries.observed(answer, number))

    def _decided(self, entry: dict[str, Any]) -> None:
        kind, reason, at = entry.pop("kind"), entry.pop("reason", ""), round(self._began + entry.pop("seconds"), 3)
        if kind == "choice":
            self._chose(entry, str(reason), at)
        elif kind == "probe":
            self._board.add("link", entries.link(entry.get("up_bytes_per_second"), None, entry.get("rtt_ms"), "probe"))
        elif kind == "allowed":
            cuts = entry.get("cuts")
            text = "every cut" if cuts is None else ", ".join(map(str, cuts)) or "no cut"
            self._board.add("events", entries.event("allowed", f"the server lets this side use {text}", at=at))
        else:
            where = entry.get("candidate") or entry.get("cut") or ""
            self._board.add("events", entries.event(kind, reason, new=str(where), at=at))

    def _chose(self, entry: dict[str, Any], reason: str, at: float) -> None:
        up, down, rtt = (entry.get(key) for key in ("up_bytes_per_second", "down_bytes_per_second", "rtt_ms"))
        moved = bool(entry["moved"])
        if moved:
            numbers = {
                key: entry.get(key) for key in ("held_ms", "best_ms", "queue_ms", "edge_factor", "server_factor")
            }
            held, new = entry.get("held"), entry["candidate"]
            self._board.add(
                "events",
                entries.event("moved", reason, old=held, new=new, up=up, down=down, rtt=rtt, at=at, **numbers),
            )
        if self._due("choice") or moved:
            self._board.set("choice", entries.event("choice", reason, **entry))
            if up is not None:
                self._board.add("link", entries.link(up, down, rtt, "controller"))

    def _event(self, kind: str, text: object, **known: Any) -> None:
        self._aside.put(lambda: self._board.add("events", entries.event(kind, text, **known)))

    def _due(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._told.get(what, 0.0) < NUMBERS_SECONDS:
            return False
        self._told[what] = now
        return True

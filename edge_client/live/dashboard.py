"""`Dashboard`: a page in the browser that shows one client at work.

    with EdgeClient("127.0.0.1:50051", "digits", split="stage2.0.conv2") as client, Dashboard(client) as page:
        print(page.url)

Hooks of the client's life cycle pass on what happens, and a thread beside the requests converts it for the page, which
itself causes no cost to requests.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final

from edge_client.adaptive import AutoClient
from edge_client.answer import Answer
from edge_client.client import EdgeClient
from edge_client.core import ClientCore
from edge_client.credentials import Credentials
from edge_client.dial import check_address
from edge_client.live import board
from edge_client.live.board import RINGS, Aside, Board, Entry, reading
from edge_client.planning.link import Speed, speed_of
from edge_client.probing import LinkProber
from edge_client.transport.times import TIME_ROWS
from edge_client.user_text import AUTO
from shared_hooks.errors import Cancelled, IsthmusError, SpecError
from shared_hooks.lifecycle import Event
from shared_hooks.metrics import Reading, Track, gpu_of
from shared_hooks.metrics.energy import Gpu
from shared_hooks.metrics.sampler import sampler

# One request on the page: its times by row.

GROUPS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("prepare", "retry"), "prepare"),
    **dict.fromkeys(("wait", "edge_other", "edge_compute"), "edge"),
    **dict.fromkeys(("encode", "send_wait"), "encode"),
    **dict.fromkeys(("upload",), "upload"),
    **dict.fromkeys(("in_transit",), "transit"),
    **dict.fromkeys(("server_queue",), "queue"),
    **dict.fromkeys(("server_decode", "server_inject", "server_compute", "server_encode", "onward"), "tail"),
    **dict.fromkeys(("download",), "download"),
    **dict.fromkeys(("turn", "edge_decode", "postprocess"), "finish"),
}
"""Row of `Times` -> how it is drawn."""


def stages() -> list[Entry]:
    """Return the rows of every request, in the order of `request`'s ``rows``."""
    return [{"label": label, "group": GROUPS[name]} for name, label in TIME_ROWS.items()]


def request(answer: Answer, number: int) -> Entry:
    """Return the entry of one request, with times in milliseconds."""
    edge, cloud = answer.forward_edge, answer.forward_cloud
    return {
        "number": number,
        "at": round(time.time(), 3),
        "cut": board.short_line(answer.split),
        "layer": answer.layer_id,
        "ms": answer.times.end_to_end / 1e6,
        "rows": [round(getattr(answer.times, name) / 1e6, 4) for name in TIME_ROWS],
        "up": answer.bytes_up,
        "down": answer.bytes_down,
        "sends": answer.sends,
        "fallback": board.short_line(answer.fallback),
        "energy": [board.reading(edge.energy if edge else None), board.reading(cloud.energy if cloud else None)],
    }


# Reports a client's events to the board: answers, failures, moves of the cut, connections.

NUMBERS_SECONDS: Final = 0.4
"""The least time between two entries of frequent events."""


class Telling:
    """Hooks of a client's life cycle, and a listener to a controller's decisions. Each call only passes on its data."""

    name = "dashboard"
    built_in = True
    priority = "LOWEST"

    def __init__(self, board: Board, client: EdgeClient, aside: Aside[Callable[[], None]]) -> None:
        self.chosen = False
        """Whether a controller reports why the cut moves."""
        self._board = board
        self._client = client
        self._aside = aside
        self._sent_at: dict[str, float] = {}
        self._began = time.time()
        """The start of the decisions' ``seconds``."""
        self._about()  # it may be connected already

    # -- the life cycle's

    def after_request(self, event: Event) -> None:
        """A request was answered, failed, or cancelled."""
        if event.answer is not None:
            self._aside.put(partial(self._answered, replace(event.answer, output=None)))
        elif isinstance(event.error, Cancelled):
            self._board.count("cancelled")
        else:
            self._board.count("failed")
            self._event("failed", f"{type(event.error).__name__}: {event.error}")

    def on_split_change(self, event: Event) -> None:
        """The cut was changed by the user, or by a controller, which reports more itself."""
        if not self.chosen and self._client.split != AUTO:
            self._event("moved", event.reason, old=str(event.old), new=str(event.new))

    def after_connect(self, event: Event) -> None:
        """A stream was opened, and the server's description is known."""
        self._event("connected", f"to {event.address}")
        self._about()

    def on_disconnect(self, event: Event) -> None:
        """The stream has ended."""
        self._event("disconnected", event.reason)

    def before_drain(self, event: Event) -> None:
        """The server accepts no new requests."""
        self._event("draining", "the server finishes what it has, and takes nothing new")

    # -- a controller's

    def follow(self, chooser: AutoClient) -> None:
        """Show all decisions of a chooser, and earlier ones that are shown as events."""
        self._began = time.time() - time.monotonic() + chooser.decisions.began
        before = chooser.decisions.listen(self.decided)
        events = [one for one in before if one.get("moved", True) and one["kind"] != "probe"][-RINGS["events"] :]
        for one in events:
            self._aside.put(partial(self._decided, dict(one)))

    def decided(self, entry: Mapping[str, Any]) -> None:
        """Show a choice, or an event (`edge_client.adaptive.monitor`)."""
        self._aside.put(partial(self._decided, dict(entry)))

    # -- beside the requests

    def _about(self) -> None:
        self._board.set("server", {key: board.short_line(one) for key, one in self._client.server_about.items()})

    def _answered(self, answer: Answer) -> None:
        number = self._board.count("answered")
        self._board.add("requests", request(answer, number))
        if answer.fallback:
            self._board.add("events", board.event("fallback", answer.fallback))
        if self._due("cloud") and (known := board.cloud(answer)) is not None:
            self._board.add("cloud", known)
        if answer.observations and self._due("observed"):
            self._board.set("observed", board.observed(answer, number))

    def _decided(self, entry: dict[str, Any]) -> None:
        kind, reason, at = entry.pop("kind"), entry.pop("reason", ""), round(self._began + entry.pop("seconds"), 3)
        if kind == "choice":
            self._chose(entry, str(reason), at)
        elif kind == "probe":
            self._board.add("link", board.link(entry.get("up_bytes_per_second"), None, entry.get("rtt_ms"), "probe"))
        elif kind == "allowed":
            cuts = entry.get("cuts")
            text = "every cut" if cuts is None else ", ".join(map(str, cuts)) or "no cut"
            self._board.add("events", board.event("allowed", f"the server lets this side use {text}", at=at))
        else:
            where = entry.get("candidate") or entry.get("cut") or ""
            self._board.add("events", board.event(kind, reason, new=str(where), at=at))

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
                board.event("moved", reason, old=held, new=new, up=up, down=down, rtt=rtt, at=at, **numbers),
            )
        if self._due("choice") or moved:
            self._board.set("choice", board.event("choice", reason, **entry))
            if up is not None:
                self._board.add("link", board.link(up, down, rtt, "controller"))

    def _event(self, kind: str, text: object, **known: Any) -> None:
        self._aside.put(lambda: self._board.add("events", board.event(kind, text, **known)))

    def _due(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._sent_at.get(what, -math.inf) < NUMBERS_SECONDS:
            return False
        self._sent_at[what] = now
        return True


# Load and energy of this machine, over the time since the last look: from the sampler that every forward uses.

LAG_NS: Final = 300_000_000
"""The delay of a sample, so that slow meters have readings on both sides of it; otherwise it is an estimate."""


class MachineFigures:
    """This machine's figures. ``gpu``: the one that the model runs on, None: the processor."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        self._gpu = gpu
        self._since = time.perf_counter_ns() - LAG_NS
        sampler.touch(gpu)

    def look(self) -> Entry:
        """Return the figures since the last call: per cent, bytes of this process, watts. Keeps the sampler running for
        some seconds.
        """
        since, self._since = self._since, time.perf_counter_ns() - LAG_NS
        window = sampler.window(since, self._gpu)
        sampler.touch(self._gpu)
        return {
            "at": round(time.time(), 3),
            "cpu": reading(_mean(window.cpu, since, self._since)),
            "gpu": None if self._gpu is None else reading(_mean(window.gpu, since, self._since)),
            "memory": reading(_mean(window.memory, since, self._since)),
            "process": reading(_mean(window.resident, since, self._since)),
            "power": reading(_power(window.energy, since, self._since)),
        }


def _mean(track: Track | Reading, start: int, stop: int) -> Reading:
    return track if isinstance(track, Reading) else track.mean(start, stop)


def _power(track: Track | Reading, start: int, stop: int) -> Reading:
    """Watts: the increase of energy over time."""
    if isinstance(track, Reading):
        return track
    grown = track.growth(start, stop)
    if grown.value is None or stop <= start:
        return grown
    return Reading(grown.value / ((stop - start) / 1e9), grown.status, grown.note)


# The link and the server's load where no controller measures them: small probes, only while the page is open.
#
# Empty rounds every two seconds give the round trip and the load. Every ten seconds a few rounds with bytes give the
# rate, as a plan estimates it (`planning.link.speed_of`): by how much longer they take than empty rounds, with its
# interval. They begin small, and grow while they take no measurable time.

PING_EVERY: Final = 2.0
TRAIN_EVERY: Final = 10.0
SECONDS: Final = 1.5
"""The time limit of a round."""
LARGEST, LEAST, GROWTH = 256 << 10, 8 << 10, 4
"""The sizes of rounds in bytes."""
MEASURABLE_NS: Final = 20e6
"""Rounds grow until one takes this much longer than an empty round."""
ROUNDS: Final = 3
"""How often each size is sent, every `TRAIN_EVERY`; the newest `KEPT` count."""
KEPT: Final = 9


class LinkWatch:
    """Measures the link. `look` is called once per second, by one thread; it may take as long as a probe."""

    def __init__(
        self, server: str, credentials: Credentials | None, board: Board, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self._prober = LinkProber(server, credentials=credentials)
        self._board = board
        self._wanted = wanted
        self._speed: Speed | None = None
        self._size = LEAST
        self._rounds: dict[int, deque[float]] = {0: deque(maxlen=KEPT), LEAST: deque(maxlen=KEPT)}
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
                self._speed = self._measured(ping.network_ns)
        except IsthmusError as error:
            if self._closed:
                return
            if (kind := type(error).__name__) != self._complaint:  # once per kind of reason
                self._complaint = kind
                self._board.add("events", board.event("gone", f"probe: {error}"))
            return
        if self._complaint:
            self._complaint = ""
            self._board.add("events", board.event("back", "the server answers probes again"))
        speed = self._speed
        up = None if speed is None else speed.value or speed.low
        bounds = "" if speed is None else speed.bounds
        self._board.add("link", board.link(up, None, ping.network_ns / 1e6, "probe", bounds))
        self._board.add("cloud", board.load(ping.load))

    def _measured(self, rtt_ns: int) -> Speed:
        """Return the upward speed, from the newest rounds."""
        for _ in range(ROUNDS):
            self._rounds[0].append(self._prober.round(0, 0, SECONDS).network_ns)
            took = self._prober.round(self._size, 0, SECONDS).network_ns
            self._rounds[self._size].append(took)
        if took - rtt_ns < MEASURABLE_NS and self._size < LARGEST:
            speed = speed_of(self._rounds)
            self._size = min(LARGEST, GROWTH * self._size)
            self._rounds = {0: self._rounds[0], self._size: deque(maxlen=KEPT)}
            self._trained = -TRAIN_EVERY  # again with the next ping
            return speed
        return speed_of(self._rounds)

    def close(self) -> None:
        """End a probe in progress."""
        self._closed = True
        self._prober.close()


LOOK_SECONDS: Final = 1.0


class Dashboard:
    """The page of ``client``, at `url` until `close`; ``listen``: [HOST:]PORT, a free port of loopback for "0".

    If the cut is chosen (``split="auto"``, an `AutoClient`), the page also shows the decisions. With an address instead
    of a client it shows the link to that server, its load, and this machine; ``credentials`` are for that. ``title``:
    of the page; None: the model's name, or the address. Raises SpecError without the extra ``dashboard``, and for an
    unavailable port.
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
                "title": board.short_line(title or model or server),
                "model": board.short_line(model),
                "server": server,
                "device": str(self._client.device) if self._client else "",
                "auto": False,
                "stages": stages(),
            }
        )
        self._server = PageServer(self.board, listen)
        self._aside: Aside[Callable[[], None]] = Aside("dashboard", lambda job: job())
        self._chooser: AutoClient | None = None
        self._link: LinkWatch | None = None
        self._machine = MachineFigures(gpu_of(self._client.device) if self._client else None)
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
        """The address of the page."""
        return self._server.url

    @property
    def readers(self) -> int:
        """The number of open pages."""
        return self._server.readers

    def follow(self, chooser: AutoClient) -> None:
        """Show the decisions of this client's chooser, whose own estimates of the link replace probes."""
        assert self._hooks is not None
        self._chooser, self._hooks.chosen = chooser, True
        self.board.set("about", {**self.board.about, "auto": True})
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._hooks.follow(chooser)

    def close(self) -> None:
        """Stop; open pages keep what they show. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        if (link := self._link) is not None:
            link.close()
        self._ticker.join()  # it may have started to follow a chooser
        if self._hooks is not None and self._client is not None:
            if self._chooser is not None:
                self._chooser.decisions.forget(self._hooks.decided)
            with suppress(SpecError):  # removed by other code
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


def _name_of(client: ClientCore) -> str:
    return client.spec.model_id if client.spec else type(client.wrapped.model).__name__

"""`Board`: the content of the page, in rings that drop the oldest entries. Does not load torch."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from edge_client.call import Load
from edge_client.screen import finite, one_line, tables

if TYPE_CHECKING:
    from edge_client.answer import Answer
    from shared_hooks.metrics import LayerMetrics, Reading

# `Aside`: processes what hooks pass on in a thread of its own, so that requests do not wait for it.


log = logging.getLogger(__name__)

Item = TypeVar("Item")
MOST: Final = 1024
"""The maximum number of waiting items; further ones are dropped."""


class Aside(Generic[Item]):
    """Calls ``work`` with one item after the other, in a thread. An item that raises is dropped; the first such is
    logged.
    """

    def __init__(self, name: str, work: Callable[[Item], None], most: int = MOST) -> None:
        self.left_out = 0
        """The number of dropped items."""
        self.failures = 0
        self._name = name
        self._work = work
        self._most = most
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()  # its `put` takes no lock
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Add an item without blocking."""
        if self._closed:
            return
        if self._items.qsize() < self._most:
            self._items.put(item)
        else:
            self.left_out += 1

    def close(self) -> None:
        """Finish the waiting items. Idempotent."""
        if not self._closed:
            self._closed = True
            self._items.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._work(item)
            except Exception as error:
                self.failures += 1
                if self.failures == 1:
                    log.warning("%s failed, and continues: %s: %s", self._name, type(error).__name__, error)
            del item


# What the page shows of an answer, a decision, a reading: short, and ready for JSON.


TEXT: Final = 400
"""Most characters of a message, which may come from a server."""
PICTURES: Final = 24
TABLE_ROWS: Final = 40
Entry = dict[str, Any]


def short_line(text: object) -> str:
    """Return the text as a single, short line."""
    line = one_line(str(text))
    return line if len(line) <= TEXT else f"{line[: TEXT - 1]}…"


def reading(one: Reading | None) -> list[Any] | None:
    """[value, status, note]."""
    return None if one is None else [finite(one.value), one.status, short_line(one.note)]


def cloud(answer: Answer) -> Entry | None:
    """Return the server's machine according to this answer, or None."""
    if answer.load is None and answer.forward_cloud is None:
        return None
    last: LayerMetrics | None = answer.layers_cloud[-1] if answer.layers_cloud else None
    forward = answer.forward_cloud
    return {
        **load(answer.load),
        "cpu": reading(last.cpu_utilisation if last else None),
        "gpu": reading(last.gpu_utilisation if last else None),
        "memory": reading(last.memory_utilisation if last else None),
        "process": reading(forward.memory_peak if forward else None),
        "power": reading(forward.mean_power if forward else None),
    }


def load(known: Load | None) -> Entry:
    """Return a server's reported load."""
    now = {"at": round(time.time(), 3)}
    if known is None:
        return now
    return {**now, "pending": known.pending, "workers": known.workers, "queue_ms": known.queue_ns / 1e6}


def link(up: float | None, down: float | None, rtt_ms: float | None, by: str, speed: str = "") -> Entry:
    """Return bytes per second each way, and milliseconds; None: unknown. ``speed``: the text for ``up``, by default the
    number.
    """
    found: Entry = finite({"at": round(time.time(), 3), "up": up, "down": down, "rtt": rtt_ms, "by": by, "said": speed})
    return found


def event(kind: str, text: object = "", **known: Any) -> Entry:
    """Return an event: ``kind`` is "moved", "hedge", "gone", "back", "failed" and the like."""
    shown = {key: short_line(one) if isinstance(one, str) else one for key, one in known.items()}
    found: Entry = finite({"at": round(time.time(), 3), "kind": kind, "text": short_line(text), **shown})
    return found


def observed(answer: Answer, number: int) -> Entry:
    """Return what observers found in it: tables of text, and pictures of attention as PNG in base64 (checked on
    arrival).
    """
    shown = [
        {"title": one.title, "headers": ["side", "module", *one.headers[2:]], "rows": one.rows, "notes": one.notes}
        for one in tables(answer.observations, TABLE_ROWS, "sinks and the JSON have them")
    ]
    pictures = [
        {"side": side, "name": short_line(record["name"]), "png": record["picture"]}
        for side, found in answer.observations.items()
        for record in found.get("attention", {"records": []})["records"]
        if record.get("picture")
    ]
    return {"number": number, "cut": short_line(answer.split), "tables": shown, "pictures": pictures[:PICTURES]}


RINGS: Final[Mapping[str, int]] = {"requests": 240, "events": 200, "link": 600, "edge": 600, "cloud": 600}
"""The sizes of the rings: for requests the newest, for what is sampled once per second ten minutes."""


class Board:
    """Entries for readers. Thread-safe.

    A reader passes a number and gets what was added since. Nothing is kept per reader, so a slow one misses what has
    left its ring meanwhile, and costs nothing.
    """

    def __init__(self, about: Entry) -> None:
        self.about = about
        self.counts = {"answered": 0, "failed": 0, "cancelled": 0, "left_out": 0}
        self._rings: dict[str, deque[tuple[int, Entry]]] = {name: deque(maxlen=most) for name, most in RINGS.items()}
        self._latest: dict[str, tuple[int, Any]] = {}
        self._number = 0
        self._lock = threading.Lock()

    def add(self, ring: str, entry: Entry) -> None:
        """Add an entry to a ring."""
        with self._lock:
            self._number += 1
            self._rings[ring].append((self._number, entry))

    def set(self, name: str, value: Any) -> None:
        """Set a value of which only the latest counts, such as what observers saw."""
        with self._lock:
            self._number += 1
            self._latest[name] = self._number, value

    def count(self, name: str) -> int:
        """Increment a count; returns its previous value."""
        with self._lock:
            before = self.counts[name]
            self.counts[name] = before + 1
            return before

    def since(self, number: int) -> tuple[int, Entry]:
        """Return what was added after ``number`` (0: everything kept), and the next number to pass."""
        with self._lock:
            found: Entry = {}
            for name, ring in self._rings.items():
                new: list[Entry] = []
                for added, entry in reversed(ring):
                    if added <= number:
                        break
                    new.append(entry)
                if new:
                    found[name] = new[::-1]
            found.update({name: value for name, (added, value) in self._latest.items() if added > number})
            if found:
                found["counts"] = dict(self.counts)
            return self._number, found

    def whole(self) -> tuple[int, Entry]:
        """Everything kept, including constant values."""
        number, found = self.since(0)
        return number, {
            "now": round(time.time(), 3),
            "about": self.about,
            "counts": dict(self.counts),
            "kept": dict(RINGS),
            **{name: [] for name in self._rings},
            **found,
        }

"""The figures of a bench as a page: rate against latency, goodput, the distribution; one file that asks no network."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from edge_client.benching.load import Ended, Load, Over, Shot
from edge_client.benching.results import KEPT, knee
from edge_client.client import EdgeClient
from edge_client.pages import counted, duration, stem
from edge_client.pages import render as page_of
from edge_client.request import Pending
from edge_client.screen.text import printable, size
from shared_hooks.errors import DeadlineExceeded

TEMPLATE: Final = Path(__file__).parent / "page.html.j2"
CONTENTS: Final = (
    ("latency", "latency against rate"),
    ("goodput", "goodput"),
    ("distribution", "distribution"),
    ("rates", "every rate"),
    ("generator", "the generator"),
    ("settings", "how it was measured"),
)


def render(known: Mapping[str, Any]) -> str:
    """HTML, of what `Benched.as_dict` gives."""
    steps, how = known["steps"], known["settings"]
    model = printable(known["model"])
    busy = [one for one in steps if one["generator"]["bottleneck"]]
    notes = [f"It is not complete: {printable(known['ended'])}."] if known["ended"] else []
    notes += [
        f"At {one['rate']:g} a second the generator was a bottleneck: {one['generator']['bottleneck']}." for one in busy
    ]
    return page_of(
        TEMPLATE,
        (),
        {
            "file": stem(f"{model}-bench"),
            "model": model,
            "deadline_ns": 1e9 * how["deadline"],
            "steps": [_drawn(one) for one in steps],
        },
        title=f"{model}: bench",
        kicker="Isthmus bench",
        heading=f"{model}: an open load of {counted(how['clients'], 'client')}",
        lead=f"{how['arrivals']} arrivals; cuts {printable(how['split'])}; codec {printable(how['codec'])}; "
        + ("frontiers recorded before." if how["recorded"] else "heads run here."),
        partial=" ".join(notes) or None,
        contents=CONTENTS,
        cards=_cards(known),
        kept=f"{KEPT:.0%}",
        deadline=duration(1e9 * how["deadline"]),
        rates=_rates(known),
        outcomes=_outcomes(known),
        ways=_ways(known),
        errors=[[f"{one['rate']:g}", name, f"{count}"] for one in steps for name, count in one["errors"].items()],
        generator=_generator(known),
        facts=[{"title": "Settings", "rows": [(key, printable(str(value))) for key, value in how.items()]}],
    )


def _drawn(one: Mapping[str, Any]) -> dict[str, Any]:
    quantiles = {
        name: {key: one["latency"][name][key] for key in ("value", "low", "high", "beyond")}
        for name in ("p50", "p90", "p99")
    }
    plain = {key: one[key] for key in ("rate", "offered", "throughput", "goodput", "cdf", "requests", "answered")}
    return {**plain, **quantiles}


def _cards(known: Mapping[str, Any]) -> list[dict[str, str]]:
    steps, limit = known["steps"], duration(1e9 * known["settings"]["deadline"])
    if not steps:
        return [{"title": "Rates measured", "figure": "0", "name": "", "text": ""}]
    cards = []
    found = knee(steps)
    figure = "none" if found is None else f"{found:g}/s"
    name = f"{KEPT:.0%} answered within {limit}, up to this rate"
    cards.append({"title": "The knee", "figure": figure, "name": "", "text": name})
    best = max(steps, key=lambda one: one["goodput"]["value"])
    text = f"at {best['rate']:g}/s offered"
    cards.append({"title": "Most goodput", "figure": f"{best['goodput']['value']:.1f}/s", "name": "", "text": text})
    at = next((one for one in steps if one["rate"] == found), steps[0])
    p50, p99 = at["latency"]["p50"], at["latency"]["p99"]
    text = f"p50 {duration(p50['value'])}; {counted(p99['beyond'], 'request')} beyond p99"
    figure = duration(p99["value"])
    cards.append({"title": f"p99 at {at['rate']:g}/s", "figure": figure, "name": "", "text": text})
    return cards


def _rates(known: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    headers = ["rate", "offered", "throughput", "goodput", "p50", "p90", "p99", "p99 between", "beyond p99"]
    rows = []
    for one in known["steps"]:
        quantiles, p99 = one["latency"], one["latency"]["p99"]
        unsure = p99["low"] is None or p99["high"] is None
        rows.append(
            [
                f"{one['rate']:g}",
                *(f"{value:.1f}" for value in (one["offered"], one["throughput"], one["goodput"]["value"])),
                *(duration(quantiles[name]["value"]) for name in ("p50", "p90", "p99")),
                "–" if unsure else f"{duration(p99['low'])} and {duration(p99['high'])}",
                f"{p99['beyond']}",
            ]
        )
    return headers, rows


def _outcomes(known: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    keys = ("requests", "in_time", "late", "refused", "lost", "put_off")
    headers = ["rate", *(key.replace("_", " ") for key in keys), "pending there", "computed together"]
    rows = []
    for one in known["steps"]:
        said = [one["server"][key] for key in ("pending_mean", "company")]
        shown = ["–" if value is None else f"{value:.1f}" for value in said]
        rows.append([f"{one['rate']:g}", *(f"{one[key]}" for key in keys), *shown])
    return headers, rows


def _ways(known: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    headers = ["cut after", "rate", "requests", "answered", "p50", "p90", "p99", "bytes up"]
    rows = [
        [
            printable(way["name"]),
            f"{one['rate']:g}",
            f"{way['requests']}",
            f"{way['answered']}",
            *(duration(way[f"{name}_ns"]) for name in ("p50", "p90", "p99")),
            "–" if way["bytes_up"] is None else size(round(way["bytes_up"])),
        ]
        for at in range(max((len(one["ways"]) for one in known["steps"]), default=0))
        for one in known["steps"]
        for way in one["ways"][at : at + 1]
    ]
    return headers, rows


def _generator(known: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    headers = ["rate", "late p50", "late p99", "late at most", "of a processor", "machine busy", "bottleneck"]
    rows = []
    for one in known["steps"]:
        its = one["generator"]
        late = [duration(its[key]) for key in ("late_p50_ns", "late_p99_ns", "late_max_ns")]
        shares = [f"{its[key]:.0%}" for key in ("processor", "machine")]
        rows.append([f"{one['rate']:g}", *late, *shares, its["bottleneck"] or "no"])
    return headers, rows


# A client that runs its heads: an `EdgeClient`, asked by as many threads as it may have requests under way.


Order = tuple[Shot, float, int, Over]


class LiveLane:
    """What is due while all threads are busy waits here: its time continues from when it was to begin."""

    def __init__(self, load: Load, client: int) -> None:
        self._load = load
        self._client = EdgeClient(
            load.server,
            load.choice,
            load.cuts[0],
            codec=load.codecs[client],
            metrics=False,
            exact=load.exact,
            deadline=load.give_up,
            connection=load.connection(),
        )
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        self._client.open()
        for cut in self._load.cuts:
            self._client.infer(self._load.calls[0], split=cut, deadline=60.0)
        for _ in range(self._load.in_flight):
            self._threads.append(threading.Thread(target=self._work, name="bench", daemon=True))
            self._threads[-1].start()

    def send(self, shot: Shot, intended: float, over: Over) -> None:
        self._orders.put((shot, intended, int(1e9 * (time.monotonic() - intended)), over))

    def tick(self) -> None:
        pass  # each request has its deadline, and a thread that waits for it

    def close(self) -> None:
        for _ in self._threads:
            self._orders.put(None)
        self._client.close()
        for thread in self._threads:
            thread.join(1.0)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            shot, intended, late_ns, over = order
            ended = self._ask(shot, intended)
            ended.late_ns = late_ns
            over(ended)

    def _ask(self, shot: Shot, intended: float) -> Ended:
        pending: Pending | None = None
        error, company, bytes_up, load = "", 1, 0, None
        try:
            left = intended + self._load.give_up - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded("it waited here, behind others, until then")
            pending = self._client.submit(self._load.calls[shot.input], split=self._load.cuts[shot.cut], deadline=left)
            answer = pending.result()
            company, bytes_up, load = answer.company, answer.bytes_up, answer.load
        except Exception as failed:  # whatever it is, it is counted
            error = type(failed).__name__
        took_ns = int(1e9 * (time.monotonic() - intended))
        exchange = None if pending is None else getattr(pending.request, "exchange", None)
        ended = Ended(shot.number, 0, took_ns, error, 0 if exchange is None else exchange.put_offs, bytes_up)
        ended.company = company
        if load is not None:
            ended.pending, ended.workers, ended.queue_ns = load.pending, load.workers, int(load.queue_ns)
        return ended

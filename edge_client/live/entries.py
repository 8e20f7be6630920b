"""What the page shows of an answer, a decision, a reading: JSON-able, and short."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from edge_client.answer import Answer
from edge_client.load import Load
from edge_client.screen.observation_table import tables
from edge_client.screen.text import finite, one_line
from edge_client.transport import Times
from shared_hooks.metrics import LayerMetrics, Reading

TEXT: Final = 400
"""Characters of a message, which may come from a server."""
PICTURES: Final = 24
TABLE_ROWS: Final = 40
GROUPS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("prepare", "retry"), "prepare"),
    **dict.fromkeys(("wait", "edge_other", "edge_compute"), "edge"),
    **dict.fromkeys(("encode", "send_wait"), "encode"),
    **dict.fromkeys(("upload",), "upload"),
    **dict.fromkeys(("in_transit",), "transit"),
    **dict.fromkeys(("server_queue",), "queue"),
    **dict.fromkeys(("server_decode", "server_inject", "server_compute", "server_encode"), "tail"),
    **dict.fromkeys(("download",), "download"),
    **dict.fromkeys(("turn", "edge_decode", "postprocess"), "finish"),
}
"""Row of `Times` -> what it is drawn as."""

Entry = dict[str, Any]


def stages() -> list[Entry]:
    """The rows of every request, in the order of `request`'s ``rows``."""
    return [{"label": row.metadata["label"], "group": GROUPS[row.name]} for row in fields(Times)]


def said(text: object) -> str:
    """As one line that is not long."""
    line = one_line(str(text))
    return line if len(line) <= TEXT else f"{line[: TEXT - 1]}…"


def reading(one: Reading | None) -> list[Any] | None:
    """Value, status, note."""
    return None if one is None else [finite(one.value), one.status, said(one.note)]


def request(answer: Answer, number: int) -> Entry:
    """Times in milliseconds."""
    edge, cloud = answer.forward_edge, answer.forward_cloud
    return {
        "number": number,
        "at": round(time.time(), 3),
        "cut": said(answer.split),
        "layer": answer.layer_id,
        "ms": answer.times.end_to_end / 1e6,
        "rows": [round(getattr(answer.times, row.name) / 1e6, 4) for row in fields(Times)],
        "up": answer.bytes_up,
        "down": answer.bytes_down,
        "sends": answer.sends,
        "fallback": said(answer.fallback),
        "energy": [reading(edge.energy if edge else None), reading(cloud.energy if cloud else None)],
    }


def cloud(answer: Answer) -> Entry | None:
    """The server's machine, as this answer shows it; None for an answer that shows nothing of it."""
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
    """How busy a server says it is."""
    now = {"at": round(time.time(), 3)}
    if known is None:
        return now
    return {**now, "pending": known.pending, "workers": known.workers, "queue_ms": known.queue_ns / 1e6}


def link(up: float | None, down: float | None, rtt_ms: float | None, by: str) -> Entry:
    """Bytes a second each way, milliseconds; None = unknown."""
    found: Entry = finite({"at": round(time.time(), 3), "up": up, "down": down, "rtt": rtt_ms, "by": by})
    return found


def event(kind: str, text: object = "", **known: Any) -> Entry:
    """Something that happened: ``kind`` is "moved", "hedge", "gone", "back", "failed" and such."""
    shown = {key: said(one) if isinstance(one, str) else one for key, one in known.items()}
    found: Entry = finite({"at": round(time.time(), 3), "kind": kind, "text": said(text), **shown})
    return found


def observed(answer: Answer, number: int) -> Entry:
    """What observers found in it: tables of text, and pictures of attention as PNG in base64 (checked on arrival)."""
    shown = [
        {"title": one.title, "headers": ["side", "module", *one.headers[2:]], "rows": one.rows, "notes": one.notes}
        for one in tables(answer.observations, TABLE_ROWS, "sinks and the JSON have them")
    ]
    pictures = [
        {"side": side, "name": said(record["name"]), "png": record["picture"]}
        for side, found in answer.observations.items()
        for record in found.get("attention", {"records": []})["records"]
        if record.get("picture")
    ]
    return {"number": number, "cut": said(answer.split), "tables": shown, "pictures": pictures[:PICTURES]}

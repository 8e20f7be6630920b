"""The columns of a sweep's two tables. A name ends in its unit: _ns nanoseconds, _j joules, _w watts, _bytes, _percent.

``requests``: one row per request. Measuring layers takes time, and sending what was measured takes more: a request
either asks for its layers (``layers`` is true; it has rows in the other table, and its forwards' energy) or counts for
the latency. ``rows``: one row per request, side and layer, and one more per side for what lies
outside layers (no ``layer_id``, the type "outside"). A value that was not measured is null; its ``_status`` says
whether it was measured, estimated or unavailable, and the note why.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final, Literal

from edge_client.planning.candidate import STAGES
from edge_client.transport import Times

Kind = Literal["text", "integer", "number", "flag"]
Columns = dict[str, Kind]

TIMES: Final = tuple(row.name for row in fields(Times))
OUTSIDE: Final = "outside layers"
LAYER_READINGS: Final = {
    "energy": "energy_j",
    "mean_power": "mean_power_w",
    "memory_allocated": "memory_allocated_bytes",
    "memory_peak": "memory_peak_bytes",
    "cpu_utilisation": "cpu_utilisation_percent",
    "gpu_utilisation": "gpu_utilisation_percent",
    "memory_utilisation": "memory_utilisation_percent",
}
"""Field of `LayerMetrics` -> column."""

_KEY: Final[Columns] = {
    "input": "text",
    "input_index": "integer",
    "cut": "text",  # edge-only, cloud-only, cloud-only-file, or the layer after which the model was cut
    "mode": "text",  # networked, or local: head and tail (or the whole model) in the edge's process
    "repetition": "integer",  # from 0
}


def status_of(column: str) -> str:
    """The column beside a reading's: "energy_j" -> "energy_status"."""
    return f"{column.rpartition('_')[0]}_status"


def _requests() -> Columns:
    columns: Columns = {**_KEY, "layers": "flag", "sequence": "integer", "layer_id": "integer"}
    columns |= {f"{name}_ns": "integer" for name in (*TIMES, "end_to_end", "measured")}
    columns |= {"bytes_up": "integer", "bytes_down": "integer", "sends": "integer"}
    for side in ("edge", "cloud"):
        columns |= {f"{side}_forward_ns": "integer", f"{side}_layers_ns": "integer", f"{side}_cpu_ns": "integer"}
        columns |= {f"{side}_energy_j": "number", f"{side}_energy_status": "text", f"{side}_energy_note": "text"}
        columns |= {f"{side}_memory_peak_bytes": "number"}
    columns |= {"codecs": "text"}  # what tensors travelled with; null of local ones
    columns |= {"exact": "flag", "top1": "text", "top1_agrees": "flag", "truth": "text", "error": "text"}
    return columns


def _rows() -> Columns:
    columns: Columns = {**_KEY, "side": "text", "layer_id": "integer", "layer": "text", "layer_type": "text"}
    columns |= {"inference_ns": "integer", "cpu_ns": "integer"}
    for column in LAYER_READINGS.values():
        columns |= {column: "number", status_of(column): "text"}
    columns |= {"energy_note": "text", "output_bytes": "integer", "dtype": "text", "shape": "text"}
    return columns


REQUESTS: Final = _requests()
ROWS: Final = _rows()
PREDICTED: Final[Columns] = {
    "predicted_latency_ns": "number",
    **{f"predicted_{stage}_ns": "number" for stage in STAGES},
    "predicted_bytes_up": "integer",
    "predicted_bytes_down": "integer",
    "predicted_edge_energy_j": "number",
}
"""Added to ``requests`` when the tables are written: what the plan said of this way before the sweep."""

SEGMENTS: Final = {
    "prepare": ("prepare",),
    "edge": ("retry", "wait", "edge_other", "edge_compute"),
    "encode": ("encode",),
    "upload": ("send_wait", "upload"),
    "transit": ("in_transit",),
    "queue": ("server_queue",),
    "tail": ("server_decode", "server_inject", "server_compute", "server_encode"),
    "download": ("download",),
    "finish": ("turn", "edge_decode", "postprocess"),
}
"""The pieces of a bar -> the rows of `Times` in it. All rows are in one piece, so the pieces add up to the whole."""

STAGE_SEGMENTS: Final = {
    stage: ("upload", "transit", "download") if stage == "network" else (stage,) for stage in STAGES
}
"""A plan's stage -> the pieces that measure it."""

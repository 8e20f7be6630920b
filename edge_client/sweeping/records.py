"""Turn answers into rows of the two tables, stored by column in the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from edge_client.planning.objective import STAGES
from edge_client.transport.times import TIME_ROWS, Times
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY, option
from shared_hooks.errors import CutRefused, SpecError, UnknownLayer, near_path
from shared_hooks.metrics import ForwardMetrics, LayerMetrics
from shared_hooks.modules import call_parts
from shared_hooks.planning import LayerInfo, blocks, last_layer, members

# The ways to run a request that a sweep tries, in order.


Mode = Literal["networked", "local"]
WHOLE: Final = (EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a request. ``name`` is what ``--split`` takes. Local: without a server."""

    name: str
    layer_id: int | None
    mode: Mode

    @property
    def networked(self) -> bool:
        return self.mode == "networked"

    def __str__(self) -> str:
        return f"{self.name} (local)" if self.mode == "local" and self.name != EDGE_ONLY else self.name


def choose(
    places: Sequence[LayerInfo],
    cuts: str | None = None,
    every: int | None = None,
    along: Callable[[str], LayerInfo | None] = lambda cut: None,
) -> list[tuple[str, int]]:
    """Choose the cuts to try, of `Plan.cuts`, as (name, layer id).

    They are the named ones, every n-th of the allowed ones, or by default the ends of blocks and the layers after which
    other bytes cross than after the layer before. ``along``: `Plan.resolve`, for cuts along branches ("a + b"), which
    are tried only by name.

    Raises SpecError for invalid options, UnknownLayer (with similar names) and CutRefused for a named cut.
    """
    if cuts is not None and every is not None:
        raise SpecError(f"{option('cuts')} or {option('every')}, not both")
    if cuts is None:
        allowed = [number for number, one in enumerate(places) if one.can_split]
        if every is None:
            allowed = [number for at, number in enumerate(allowed) if _differs(places, allowed[:at], number)]
        return [(places[number].name, places[number].layer_id) for number in allowed[:: every or 1]]
    by_name = {one.name: one for one in places}
    by_id = {str(one.layer_id): one for one in places if not one.is_block}
    chosen: dict[str, int] = {}
    for word in (word.strip() for word in cuts.split(",")):
        if word in ("input", *WHOLE):
            continue  # always tried
        layer = by_name.get(word) or by_id.get(word) or (along(word) if members(word) else None)
        if layer is None and (last := last_layer(word, {one.name: at for at, one in enumerate(places)})) is not None:
            layer = places[last]
        if not word or layer is None:
            raise UnknownLayer(
                f'{option("cuts")}: no layer "{word}".{near_path(word, [*by_name, *blocks(by_name)])} '
                "(edge-client layers lists them)"
            )
        if not layer.can_split:
            raise CutRefused(f"{option('cuts')}: the model cannot be cut after {layer.name}: {layer.reason}")
        chosen[layer.name] = layer.layer_id
    order = {name: (at, False) for at, name in enumerate(by_name)}
    ends = {one.layer_id: (at, True) for at, one in enumerate(places)}
    return sorted(chosen.items(), key=lambda cut: order.get(cut[0]) or ends.get(cut[1], (len(places), True)))


def _differs(places: Sequence[LayerInfo], before: Sequence[int], number: int) -> bool:
    """Return whether a block ends there, or other bytes cross than at the last of those ``before``."""
    one = places[number]
    block = call_parts(one.name)[0].rpartition(".")[0]
    ends = bool(block) and not any(each.name.startswith(f"{block}.") for each in places[number + 1 : number + 2])
    return one.is_block or ends or not before or places[before[-1]].frontier_bytes != one.frontier_bytes


def ways_of(cuts: Sequence[tuple[str, int]], *, files: bool, local: bool) -> list[Way]:
    """Return all ways: everything here, everything there (as a file, too, for file inputs), the cuts; local
    cuts, too.
    """
    ways = [Way(EDGE_ONLY, None, "local"), Way(CLOUD_ONLY, -1, "networked")]
    if files:
        ways.append(Way(CLOUD_FILE, None, "networked"))
    ways += [Way(name, layer_id, "networked") for name, layer_id in cuts]
    if local:
        ways += [Way(name, layer_id, "local") for name, layer_id in cuts]
    return ways


def rotated(ways: Sequence[Way], round_number: int, rounds: int) -> list[Way]:
    """Return all ways, starting with another one in each of ``rounds``, so that no way gains from warm-up."""
    first = round_number * len(ways) // max(1, rounds) % len(ways)
    return [*ways[first:], *ways[:first]]


# The columns of a sweep's two tables. A name ends in its unit: _ns nanoseconds, _j joules, _w watts, _bytes,
# _percent.
#
# ``requests``: one row per request. Measuring layers takes time, and sending the measurements takes more: a request
# either measures its layers (``layers`` is true; it has rows in the other table, and its forwards' energy) or counts
# for the latency. ``rows``: one row per request, side and layer, and one more per side for the time outside layers
# (no ``layer_id``, the type "outside"). A value that was not measured is null; its ``_status`` is "measured",
# "estimated" or "unavailable", and the note has the reason.


Kind = Literal["text", "integer", "number", "flag"]
Columns = dict[str, Kind]

TIMES: Final = tuple(TIME_ROWS)
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
    """Return the status column of a reading's column: "energy_j" -> "energy_status"."""
    return f"{column.rpartition('_')[0]}_status"


def _requests() -> Columns:
    columns: Columns = {**_KEY, "layers": "flag", "sequence": "integer", "layer_id": "integer"}
    columns |= {f"{name}_ns": "integer" for name in (*TIMES, "end_to_end", "measured")}
    columns |= {"bytes_up": "integer", "bytes_down": "integer", "sends": "integer"}
    for side in ("edge", "cloud"):
        columns |= {f"{side}_forward_ns": "integer", f"{side}_layers_ns": "integer", f"{side}_cpu_ns": "integer"}
        columns |= {f"{side}_energy_j": "number", f"{side}_energy_status": "text", f"{side}_energy_note": "text"}
        columns |= {f"{side}_memory_peak_bytes": "number"}
    columns |= {"codecs": "text"}  # the codecs of tensors; null for local ones
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
"""Columns added to ``requests`` when the tables are written: the plan's prediction of this way."""

SEGMENTS: Final = {
    "prepare": ("prepare",),
    "edge": ("retry", "wait", "edge_other", "edge_compute"),
    "encode": ("encode",),
    "upload": ("send_wait", "upload"),
    "transit": ("in_transit",),
    "queue": ("server_queue",),
    "tail": ("server_decode", "server_inject", "server_compute", "server_encode", "onward"),
    "download": ("download",),
    "finish": ("turn", "edge_decode", "postprocess"),
}
"""Segments of a bar -> the rows of `Times` in each. Every row is in one segment, so they add up to the whole."""

STAGE_SEGMENTS: Final = {
    stage: ("upload", "transit", "download") if stage == "network" else (stage,) for stage in STAGES
}
"""A plan's stage -> the segments that measure it."""


Table = dict[str, list[Any]]


class Answered(Protocol):
    """What a row needs of an answer: `edge_client.answer.Answer`, or a local one."""

    @property
    def layer_id(self) -> int | None: ...
    @property
    def times(self) -> Times: ...
    @property
    def layers_edge(self) -> Sequence[LayerMetrics]: ...
    @property
    def layers_cloud(self) -> Sequence[LayerMetrics]: ...
    @property
    def forward_edge(self) -> ForwardMetrics | None: ...
    @property
    def forward_cloud(self) -> ForwardMetrics | None: ...
    @property
    def bytes_up(self) -> int: ...
    @property
    def bytes_down(self) -> int: ...
    @property
    def sends(self) -> int: ...
    @property
    def codecs(self) -> Sequence[str]: ...


class Records:
    """The measurements of one input."""

    def __init__(self, input_name: str, input_index: int) -> None:
        self.requests: Table = {column: [] for column in REQUESTS}
        self.rows: Table = {column: [] for column in ROWS}
        self.notes: Counter[tuple[str, str, str]] = Counter()
        """(column, status, note) of the readings -> count; rows have room for the energy's note only."""
        self._input = {"input": input_name, "input_index": input_index}

    def __len__(self) -> int:
        return len(self.requests["input"])

    def add(self, way: Way, repetition: int, sequence: int, answer: Answered, known: Mapping[str, Any]) -> None:
        """Add an answered request; ``known``: columns that the answer does not hold."""
        key = self._key(way, repetition)
        cells = {**key, **known, "sequence": sequence, "layer_id": way.layer_id, "sends": answer.sends}
        cells |= {f"{name}_ns": getattr(answer.times, name) for name in (*TIMES, "end_to_end")}
        cells |= {"bytes_up": answer.bytes_up, "bytes_down": answer.bytes_down}
        cells["codecs"] = "+".join(dict.fromkeys(answer.codecs)) or None
        for side, forward in (("edge", answer.forward_edge), ("cloud", answer.forward_cloud)):
            cells |= _forward(side, forward)
        _append(self.requests, cells)
        sides = (
            ("edge", answer.layers_edge, answer.forward_edge),
            ("cloud", answer.layers_cloud, answer.forward_cloud),
        )
        for side, layers, forward in sides:
            for layer in layers:
                _append(self.rows, {**key, "side": side, **self._layer(layer)})
            if forward is not None:
                outside = {"layer": OUTSIDE, "layer_type": "outside", "inference_ns": forward.outside_ns}
                _append(self.rows, {**key, "side": side, **outside})

    def fail(self, way: Way, repetition: int, sequence: int, error: str, known: Mapping[str, Any]) -> None:
        """Add a failed request."""
        cells = {**self._key(way, repetition), **known, "sequence": sequence, "layer_id": way.layer_id, "error": error}
        _append(self.requests, cells)

    def _key(self, way: Way, repetition: int) -> dict[str, Any]:
        return {**self._input, "cut": way.name, "mode": way.mode, "repetition": repetition}

    def _layer(self, layer: LayerMetrics) -> dict[str, Any]:
        cells: dict[str, Any] = {
            "layer_id": layer.layer_id,
            "layer": layer.name,
            "layer_type": layer.layer_type,
            "inference_ns": layer.inference_ns,
            "cpu_ns": layer.cpu_ns,
            "output_bytes": layer.output_bytes,
            "dtype": ";".join(output.dtype for output in layer.outputs) or None,
            "shape": ";".join("x".join(map(str, output.shape)) for output in layer.outputs) or None,
            "energy_note": layer.energy.note or None,
        }
        for field, column in LAYER_READINGS.items():
            reading = getattr(layer, field)
            cells[column], cells[status_of(column)] = reading.value, reading.status
            self.notes[column, reading.status, reading.note] += 1
        return cells


def _forward(side: str, forward: ForwardMetrics | None) -> dict[str, Any]:
    if forward is None:
        return {}
    return {
        f"{side}_forward_ns": forward.total_ns,
        f"{side}_layers_ns": forward.layers_ns,
        f"{side}_cpu_ns": forward.cpu_ns,
        f"{side}_energy_j": forward.energy.value,
        f"{side}_energy_status": forward.energy.status,
        f"{side}_energy_note": forward.energy.note or None,
        f"{side}_memory_peak_bytes": forward.memory_peak.value,
    }


def _append(table: Table, cells: Mapping[str, Any]) -> None:
    if unknown := cells.keys() - table.keys():
        raise KeyError(f"no such column: {', '.join(sorted(unknown))}")
    for column, values in table.items():
        values.append(cells.get(column))

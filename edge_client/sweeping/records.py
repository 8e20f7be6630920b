"""An answer as rows of the two tables, column by column: how the journal keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from edge_client.sweeping.columns import LAYER_READINGS, OUTSIDE, REQUESTS, ROWS, status_of
from edge_client.sweeping.ways import Way
from edge_client.transport import Times
from shared_hooks.metrics import ForwardMetrics, LayerMetrics

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
    """What was measured on one input."""

    def __init__(self, input_name: str, input_index: int) -> None:
        self.requests: Table = {column: [] for column in REQUESTS}
        self.rows: Table = {column: [] for column in ROWS}
        self.notes: Counter[tuple[str, str, str]] = Counter()
        """(column, status, note) of the readings -> how often: rows have room for the energy's note only."""
        self._input = {"input": input_name, "input_index": input_index}

    def __len__(self) -> int:
        return len(self.requests["input"])

    def add(self, way: Way, repetition: int, sequence: int, answer: Answered, known: Mapping[str, Any]) -> None:
        """An answered request; ``known``: columns that it does not hold."""
        key = self._key(way, repetition)
        cells = {**key, **known, "sequence": sequence, "layer_id": way.layer_id, "sends": answer.sends}
        cells |= {f"{name}_ns": ns for name, ns in answer.times.as_dict().items()}
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
        """A request without an answer."""
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

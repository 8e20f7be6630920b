"""One side's layers as a table: mean over the inputs, what lies outside the layers, and the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edge_client.commands.output import table
from edge_client.screen.text import milliseconds, printable, size
from shared_hooks import ForwardMetrics, LayerMetrics
from shared_hooks.metrics import Reading


def layer_table(records: Iterable[Sequence[LayerMetrics]], forwards: Iterable[ForwardMetrics | None] = ()) -> str:
    """A row a layer call. The last rows add up: the layers, "outside layers" (Python and functions between them, and
    what a cut takes), and the forward as a whole. Energy, where there is any, in millijoules; ~ marks an estimate.
    """
    by_layer: dict[tuple[int, str], list[LayerMetrics]] = {}
    latest: Sequence[LayerMetrics] = ()
    for latest in records:
        for layer in latest:
            by_layer.setdefault((layer.layer_id, layer.name), []).append(layer)
    whole = [forward for forward in forwards if forward is not None]
    if not by_layer and not whole:
        return "(none)"
    energies = [layer.energy for seen in by_layer.values() for layer in seen] + [forward.energy for forward in whole]
    with_energy = any(energy.value is not None for energy in energies)
    rows = [
        [
            str(layer_id),
            printable(name),
            printable(seen[0].layer_type),
            _mean_ms([layer.inference_ns for layer in seen]),
            _mean_ms([layer.cpu_ns for layer in seen]),
            *([_millijoules([layer.energy for layer in seen])] if with_energy else []),
            size(seen[0].output_bytes),
        ]
        for (layer_id, name), seen in sorted(by_layer.items())
    ]
    if whole:
        none = [""] if with_energy else []
        rows.append(["", "outside layers", "", _mean_ms([one.outside_ns for one in whole]), "", *none, ""])
        rows.append(
            [
                "",
                "whole forward",
                "",
                _mean_ms([one.total_ns for one in whole]),
                _mean_ms([one.cpu_ns for one in whole]),
                *([_millijoules([one.energy for one in whole])] if with_energy else []),
                "",
            ]
        )
    headers = ["id", "name", "type", "mean ms", "cpu ms", *(["mJ"] if with_energy else []), "output"]
    # of the last input: the sensors may not have been found yet when the first one ran
    readings = [layer.energy for layer in latest] + [forward.energy for forward in whole[-1:]]
    notes = dict.fromkeys(f"energy: {printable(energy.note)}" for energy in readings if energy.note)
    return "\n".join([table(headers, rows, right=(0, *range(3, len(headers)))), *notes])


def _mean_ms(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return milliseconds(sum(known) / len(known)) if known else "-"


def _millijoules(energies: Sequence[Reading]) -> str:
    known = [energy.value for energy in energies if energy.value is not None]
    if not known:
        return "-"
    mark = "" if all(energy.status == "measured" for energy in energies) else "~"
    return f"{mark}{1e3 * sum(known) / len(known):.3f}"

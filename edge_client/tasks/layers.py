"""`layers`: a model's layers in the order in which they run, and where it can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.screen.text import printable, size, table
from edge_client.survey.loading import cut_of
from edge_client.tasks.subject import Model, Row, Tabular, subject_of
from shared_hooks.errors import UnknownLayer, near_path
from shared_hooks.explanation import Explanation
from shared_hooks.metrics import TensorShape
from shared_hooks.planning import LayerInfo, blocks, last_layer
from shared_hooks.profiling.inspection import Inspection, inspect
from shared_hooks.tensors import copied


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer call. Sizes in bytes; ``parameters`` of its module, in elements; ``macs``: multiply-accumulates, None
    where torch cannot count them. ``reason``: why the model cannot be cut after it.
    """

    layer_id: int
    name: str
    layer_type: str
    outputs: tuple[TensorShape, ...]
    parameters: int | None
    macs: int | None
    output_bytes: int
    frontier_bytes: int
    can_split: bool
    reason: str
    is_block: bool = False
    """A block behind whose last layer (``layer_id``) something still runs: the cut after it has returned."""

    @property
    def shape(self) -> str:
        """Shape of its outputs, such as "1x16x32x32"."""
        return ", ".join("x".join(map(str, one.shape)) or "scalar" for one in self.outputs) or "-"


@dataclass(frozen=True, repr=False)
class Layers(Tabular):
    """`edge_client.layers` returns it: a sequence of layers, and of the blocks that end at places of their own, in the
    order in which they end. A row is a layer or a block.

    ``parameters``: of the whole model, each once, in elements; ``weight_bytes``: those and the buffers.
    """

    model: str
    plan_digest: str
    layers: Sequence[Layer]
    parameters: int
    weight_bytes: int

    shown = {  # noqa: RUF012
        "layer_id": "id",
        "name": "name",
        "layer_type": "type",
        "shape": "output",
        "parameters": "parameters",
        "macs": "MACs",
        "frontier_bytes": "bytes that cross",
        "can_split": "can be cut",
        "reason": "",
        "is_block": "block",
    }

    drawn = "frontier_bytes"

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, which: int | str) -> Layer:
        """By number in this sequence, or by name; of what only holds modules, the last inside. Raises IndexError, and
        UnknownLayer with near names.
        """
        if isinstance(which, str):
            ids = {layer.name: number for number, layer in enumerate(self.layers)}
            number = ids.get(which, last_layer(which, ids))
            if number is None:
                raise UnknownLayer(f"no layer or block {which!r:.80}.{near_path(which, [*ids, *blocks(ids)])}")
            return self.layers[number]
        return self.layers[which]

    @property
    def cuts(self) -> list[Layer]:
        """Those after which the model can be cut."""
        return [layer for layer in self.layers if layer.can_split]

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all layers, as far as they are known; not of functions that no layer calls."""
        return sum(layer.macs or 0 for layer in self.layers)

    def title(self) -> str:
        count = sum(not one.is_block for one in self.layers)
        return (
            f"{self.model}: {count} layers, {len(self.cuts)} cuts, {self.parameters:,} parameters, "
            f"{size(self.weight_bytes)} of weights, {self.macs:,} multiply-accumulates in layers"
        )

    def rows(self) -> list[Row]:
        return [
            {
                "layer_id": one.layer_id,
                "name": one.name,
                "layer_type": one.layer_type,
                "shape": one.shape,
                "dtype": ", ".join(shape.dtype for shape in one.outputs) or None,
                "parameters": one.parameters,
                "macs": one.macs,
                "output_bytes": one.output_bytes,
                "frontier_bytes": one.frontier_bytes,
                "can_split": one.can_split,
                "reason": one.reason or None,
                "is_block": one.is_block,
            }
            for one in self.layers
        ]

    def text(self) -> str:
        rows = [
            [
                "" if one.is_block else str(one.layer_id),
                printable(one.name),
                printable(one.layer_type),
                one.shape,
                "-" if one.parameters is None else f"{one.parameters:,}",
                "-" if one.macs is None else f"{one.macs:,}",
                size(one.frontier_bytes),
                "yes" if one.can_split else f"no: {printable(one.reason)}",
            ]
            for one in self.layers
        ]
        headers = ["id", "name", "type", "output", "parameters", "MACs", "crosses", "cut"]
        return f"{table(headers, rows, right=(0, 4, 5, 6))}\n\n{self.title()}"


def layers(model: Model, inputs: Any = None) -> Layers:
    """Plan ``model`` on the first of ``inputs``, or its example, and say what runs (`plan` says what both may be).

        edge_client.layers(module, image)["layer3.0.conv1"].frontier_bytes

    Raises SpecError, UnknownModel, InputMismatch, and what planning raises.
    """
    loaded = subject_of(model, inputs).load(on_inputs=True)
    with loaded.wrapped as wrapped:
        plan = wrapped.plan(*loaded.args, **loaded.kwargs)
        try:
            seen = inspect(wrapped.model, wrapped.modules, *copied(loaded.args, dict(loaded.kwargs)))
        except Exception:  # a model that cannot be looked into is listed without its shapes
            seen = None
        known = [_layer(info, seen, len(plan.layers)) for info in plan.cuts]
        parameters = sum(one.numel() for one in wrapped.model.parameters())
        weights = sum(one.nbytes for one in (*wrapped.model.parameters(), *wrapped.model.buffers()))
    return Layers(loaded.spec.model_id, loaded.plan_digest, known, parameters, weights)


def explain(model: Model, cut: str | int, inputs: Any = None) -> Explanation:
    """What crosses at one cut and why, and what the tail does with it; print it. Raises UnknownLayer, CutRefused."""
    loaded = subject_of(model, inputs).load(on_inputs=True)
    with loaded.wrapped as wrapped:
        return wrapped.explain(cut_of(str(cut), wrapped, "cut"), *loaded.args, **loaded.kwargs)


def _layer(info: LayerInfo, seen: Inspection | None, count: int) -> Layer:
    is_seen = seen is not None and len(seen.layers) == count and not info.is_block
    found = seen.layers[info.layer_id] if seen is not None and is_seen else None
    macs = found.features.get("macs") if found else None
    return Layer(
        layer_id=info.layer_id,
        name=info.name,
        layer_type=info.layer_type,
        outputs=found.outputs if found else (),
        parameters=int(found.features["parameters"]) if found else None,
        macs=None if macs is None else int(macs),
        output_bytes=info.output_bytes,
        frontier_bytes=info.frontier_bytes,
        can_split=info.can_split,
        reason=info.reason,
        is_block=info.is_block,
    )

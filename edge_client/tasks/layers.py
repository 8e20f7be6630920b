"""List a model's layers in the order in which they run, and where it can be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edge_client.screen import Row, Tabular, printable, size, table
from edge_client.tasks.subject import Model, subject_of
from edge_client.user_input import cut_of
from shared_hooks.errors import UnknownLayer, near_path
from shared_hooks.explaining import Explanation
from shared_hooks.metrics import TensorShape
from shared_hooks.modules import call_parts
from shared_hooks.planning import LayerInfo, blocks, last_layer
from shared_hooks.profiling.timers import Inspection, inspect
from shared_hooks.tensors import copied


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer call. Sizes in bytes; ``parameters`` of its module, in elements; ``macs``: multiply-accumulates, None
    if torch cannot count them. ``reason``: why the model cannot be cut after it.
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
    """Whether it is a block with code after its last layer (``layer_id``): the cut lies after the block has
    returned.
    """

    @property
    def shape(self) -> str:
        """Shape of its outputs, such as "1x16x32x32"."""
        return ", ".join("x".join(map(str, one.shape)) or "scalar" for one in self.outputs) or "-"


@dataclass(frozen=True, repr=False)
class Layers(Tabular):
    """Result of `edge_client.layers`: a sequence of layers, and of blocks whose end is a cut of its own, in the order
    in which they end. A row is a layer or a block.

    ``parameters``: elements of the whole model, each counted once; ``weight_bytes``: parameters and buffers.
    """

    model: str
    plan_digest: str
    layers: Sequence[Layer]
    parameters: int
    weight_bytes: int
    containers: Mapping[str, str] = field(default_factory=dict)
    """Class names of the modules that hold layers, by path."""
    depth: int | None = None
    """Levels of modules that `text` and `rows` show; None: all."""

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
        """Return a layer by its index here, or by name; for a container, the last layer inside.

        Raises IndexError, and UnknownLayer with similar names.
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
        """Layers after which the model can be cut."""
        return [layer for layer in self.layers if layer.can_split]

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all layers that are known; functions outside of layers are not counted."""
        return sum(layer.macs or 0 for layer in self.layers)

    def title(self) -> str:
        count = sum(not one.is_block for one in self.layers)
        return (
            f"{self.model}: {count} layers, {len(self.cuts)} cuts, {self.parameters:,} parameters, "
            f"{size(self.weight_bytes)} of weights, {self.macs:,} multiply-accumulates in layers"
        )

    def _shows(self, name: str) -> bool:
        return self.depth is None or name.count(".") < self.depth

    def rows(self) -> list[Row]:
        worse = self.dominated
        ends = {end: name for name, end in self._ends.items() if self._shows(name)}
        shown = [
            one if self._shows(one.name) else replace(one, name=ends[number], layer_type=self.containers[ends[number]])
            for number, one in enumerate(self.layers)
            if self._shows(one.name) or number in ends
        ]
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
                "worse": one.name in worse,
            }
            for one in shown
        ]

    @property
    def dominated(self) -> set[str]:
        """Names of cuts inside a block that are worse than its end on any link up to `LINK` and any edge from `EDGE`
        on.

        There more bytes cross, and running to the end takes less time than sending them.
        """
        found: set[str] = set()
        for block, end in self._ends.items():
            last = self.layers[end]
            macs: float = 0
            for number in range(end - 1, -1, -1):
                one = self.layers[number]
                if not one.name.startswith(f"{block}."):
                    break
                macs += self.layers[number + 1].macs or 0
                more = one.frontier_bytes - last.frontier_bytes
                if one.can_split and last.can_split and more > 0 and macs / EDGE < 8 * more / LINK:
                    found.add(one.name)
        return found

    @property
    def _ends(self) -> dict[str, int]:
        """The index here of each block's end."""
        found: dict[str, int] = {}
        own: set[str] = set()
        for number, one in enumerate(self.layers):
            path, call = call_parts(one.name)
            if one.is_block and call == 1:
                found[path] = number
                own.add(path)
            for parent in _parents(path):
                if parent not in own:
                    found[parent] = number
        return found

    def text(self) -> str:
        """Format the modules as a tree, calls in the order in which they run. A block's own row describes its end."""
        ends, worse = self._ends, self.dominated
        rows: list[list[str]] = []
        shown: list[str] = []
        printed: set[int] = set()
        for number, one in enumerate(self.layers):
            path, _ = call_parts(one.name)
            parents = _parents(path)
            common = 0
            while common < min(len(shown), len(parents)) and shown[common] == parents[common]:
                common += 1
            for depth in range(common, len(parents)):
                parent = parents[depth]
                if not self._shows(parent):
                    break
                rows.append(self._row(parent, depth, self.layers[ends[parent]], worse, is_header=True))
                printed.add(ends[parent])
            shown = parents
            if (one.is_block and number in printed) or not self._shows(one.name):  # its row stands above its layers
                continue
            rows.append(self._row(one.name, len(parents), one, worse, is_header=False))
        headers = ["id", "name", "type", "output", "parameters", "MACs", "crosses", "cut"]
        lines = [table(headers, rows, right=(0, 4, 5, 6)), "", self.title()]
        if any(map(self._shows, worse)):
            lines.append(
                "worse: more bytes cross than at the end of the block, and sending them takes longer than running to\n"
                "there (up to 1 Gbit/s, on an edge of 1 G multiply-accumulates a second or more)"
            )
        return "\n".join(lines)

    def _row(self, name: str, depth: int, one: Layer, worse: set[str], *, is_header: bool) -> list[str]:
        inside = [layer for layer in self.layers if layer.name.startswith(f"{name}.")] if is_header else [one]
        kind = self.containers.get(name, "") if is_header else one.layer_type
        own = is_header and not (one.is_block and one.name == name)
        cut = "yes" if one.can_split else f"no: {printable(one.reason)}"
        if own and self._shows(one.name):
            cut = f"= {printable(one.name)}" if one.can_split else "no"
        elif one.name in worse:
            cut = "worse"
        known = {(call_parts(layer.name)[0], layer.parameters) for layer in inside if layer.parameters is not None}
        parameters = sum(count or 0 for _, count in known)
        macs = sum(layer.macs or 0 for layer in inside)
        return [
            "" if one.is_block or is_header else str(one.layer_id),
            "  " * depth + printable(name.rpartition(".")[2]),
            printable(kind),
            one.shape if not is_header or own else "-",
            f"{parameters:,}" if known else "-",
            f"{macs:,}" if any(layer.macs is not None for layer in inside) else "-",
            size(one.frontier_bytes),
            cut,
        ]


LINK = 1e9
"""The fastest link that `Layers.dominated` covers, in bits per second."""
EDGE = 1e9
"""The slowest edge that it covers, in multiply-accumulates per second."""


def _parents(path: str) -> list[str]:
    """Return ``a``, ``a.b`` of ``a.b.c``."""
    parts = path.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts) - 1)]


def layers(model: Model, inputs: Any = None) -> Layers:
    """Plan ``model`` on the first of ``inputs``, or its example, and list its layers (arguments as for `plan`).

        edge_client.layers(module, image)["layer3.0.conv1"].frontier_bytes

    Raises SpecError, UnknownModel, InputMismatch, and what planning raises.
    """
    loaded = subject_of(model, inputs).load(on_inputs=True)
    with loaded.wrapped as wrapped:
        plan = wrapped.plan(*loaded.args, **loaded.kwargs)
        try:
            seen = inspect(wrapped.model, wrapped.modules, *copied(loaded.args, dict(loaded.kwargs)))
        except Exception:  # a model that cannot be inspected is listed without its shapes
            seen = None
        known = [_layer(info, seen, len(plan.layers)) for info in plan.cuts]
        parameters = sum(one.numel() for one in wrapped.model.parameters())
        containers = {path: type(one).__name__ for path, one in wrapped.model.named_modules()}
        weights = sum(one.nbytes for one in (*wrapped.model.parameters(), *wrapped.model.buffers()))
    shown = loaded.choice.depth
    return Layers(loaded.spec.model_id, loaded.plan_digest, known, parameters, weights, containers, shown)


def explain(model: Model, cut: str | int, inputs: Any = None) -> Explanation:
    """Explain what crosses at a cut and why, and what the tail does with it; print the result.

    Raises UnknownLayer, CutRefused.
    """
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

"""`export`: heads of a model as ONNX files, for devices without PyTorch."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from edge_client.screen.text import one_line, printable, size
from edge_client.screen.text import table as text_table
from edge_client.spoken import option
from edge_client.survey.loading import Loaded
from edge_client.tasks.hierarchy import cut_at
from edge_client.tasks.subject import Model, Row, Subject, Tabular, subject_of
from shared_hooks.crossing import NamedTensor, by_parameter, described, early_of, leaves, named_tensors
from shared_hooks.errors import CutRefused, InputMismatch, IsthmusError, SpecError
from shared_hooks.files import write_json
from shared_hooks.mapping import map_of, onnx_export
from shared_hooks.mapping.onnx_export import Exported, ExportFailed, check, outputs_of
from shared_hooks.mapping.onnx_halves import halve, run
from shared_hooks.models.images import ImagePreprocess
from shared_hooks.models.predictions import TopK
from shared_hooks.tensors import dtype_name, flatten, own_class, unflatten

if TYPE_CHECKING:
    import onnx_ir

FORMAT: Final = "isthmus-heads"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
WEIGHTS: Final = "weights.bin"
WHOLE: Final = "whole.onnx"
SAME: Final = 1e-3
"""How far a graph's tensor may be from torch's, as a share of the largest magnitude, to be taken for the same."""
MOST_INPUTS: Final = 32
"""Inputs of the user on which answers are compared."""


@dataclass(frozen=True)
class Head:
    """One head that was written, or why it was not (``refused``).

    ``difference``: the largest of the answer's elements between this head before torch's tail and the whole model, as a
    share of the largest magnitude; ``labels``: rows whose highest score is another; both over ``compared`` inputs.
    """

    cut: str
    file: str = ""
    crossing: tuple[NamedTensor, ...] = ()
    difference: float = 0.0
    labels: int = 0
    compared: int = 0
    refused: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that cross, raw."""
        return sum(one.view.numel * one.dtype.itemsize for one in self.crossing)


@dataclass(frozen=True, repr=False)
class ExportedHeads(Tabular):
    """`edge_client.export` returns it. A row is a cut."""

    folder: Path
    model: str
    heads: Sequence[Head]
    weights_bytes: int

    shown = {  # noqa: RUF012
        "cut": "cut",
        "file": "file",
        "crossing_bytes": "crosses",
        "difference": "difference",
        "labels": "labels changed",
        "refused": "refused",
    }

    @property
    def ok(self) -> bool:
        """Whether every head was written."""
        return not any(head.refused for head in self.heads)

    def title(self) -> str:
        written = sum(not head.refused for head in self.heads)
        return (
            f"{self.model}: {written} of {len(self.heads)} heads in {self.folder}, {size(self.weights_bytes)} weights"
        )

    def rows(self) -> list[Row]:
        return [
            {
                "cut": one.cut,
                "file": one.file or None,
                "crossing_bytes": None if one.refused else one.nbytes,
                "difference": None if one.refused else one.difference,
                "labels": None if one.refused else one.labels,
                "refused": one.refused or None,
            }
            for one in self.heads
        ]

    def text(self) -> str:
        rows = [
            [one.cut, one.file, size(one.nbytes), f"{one.difference:.1e}", f"{one.labels} of {one.compared}"]
            for one in self.heads
            if not one.refused
        ]
        lines = [printable(self.title())]
        if rows:
            lines += ["", text_table(["cut", "file", "crosses", "difference", "labels changed"], rows, right=(2, 3, 4))]
        lines += [one_line(f"refused: {one.cut}: {one.refused}") for one in self.heads if one.refused]
        return "\n".join(lines)


def export(
    model: Model,
    inputs: Any = None,
    *,
    split: str | Sequence[str],
    output: str | Path,
    whole: bool = False,
) -> ExportedHeads:
    """Write heads of ``model``, up to the cuts ``split``, as ONNX files (docs/jobs/edge-without-pytorch.md).

    Needs the extra "onnx".

        edge_client.export("digits", split=["stem", "stage2.0.conv2"], output="heads")

    ``output``: a folder, made if need be: a file for each cut, `WEIGHTS` of all of them, and a manifest that says what
    goes in, what crosses, and how far answers are from the whole model's, measured on ``inputs`` (at most
    `MOST_INPUTS`; none: the spec's example). ``split``: names, or "all". ``whole``: the whole model, too, for a device
    that the server is out of reach of. Sizes are those of the example; weights do not depend on them.

    A cut that cannot be exported is refused in its row, with the reason. Raises SpecError, UnknownModel, UnknownLayer,
    InputMismatch, ExportFailed for a model that torch cannot export, and what planning raises.
    """
    check("onnxruntime")
    subject = subject_of(model, inputs)
    subject = replace(subject, choice=replace(subject.choice, device="cpu"))
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"{option('output')}: {folder} cannot be a folder: {error.strerror}") from error
    loaded = subject.load(shallow=True)
    with loaded.wrapped as wrapped:
        plan = wrapped.plan(*loaded.args, **loaded.kwargs)
        names = [split] if isinstance(split, str) else list(split)
        if names == ["all"]:
            names = [one.name for one in plan.cuts if one.can_split]
        names = list(dict.fromkeys(cut_at(name, loaded).name for name in names))
        try:
            return _Writer(loaded, subject, folder).write(names, whole)
        except IsthmusError:
            raise
        except Exception as error:  # of an exporter that took the model apart, or of the model after that
            raise ExportFailed(
                f"the model cannot be exported: {one_line(f'{type(error).__name__}: {error}')}"
            ) from error


class _Writer:
    """The files of one folder."""

    def __init__(self, loaded: Loaded, subject: Subject, folder: Path) -> None:
        self.loaded, self.folder, self.wrapped = loaded, folder, loaded.wrapped
        self.plan = self.wrapped.plan(*loaded.args, **loaded.kwargs)
        self.structure, tensors = flatten((loaded.args, dict(loaded.kwargs)))
        named = leaves(by_parameter(self.wrapped.model, self.structure), "")
        self.inputs = [name for name, node in named if node[0] == "t"]
        if len(self.inputs) != len(tensors):
            raise InputMismatch("two of the inputs of its example are one tensor, or have one name")
        self.samples = [tensors, *self._given(subject, tensors)]
        args, kwargs = self._call(tensors)
        given = leaves(outputs_of(self.wrapped.whole(*args, **kwargs))[0])
        self.outputs = [name for name, node in given if node[0] == "t"]

    def write(self, names: Sequence[str], whole: bool) -> ExportedHeads:
        made = onnx_export.export(self.wrapped.model, self.plan, self.loaded.args, self.loaded.kwargs)
        self.known = map_of(self.wrapped.model, self.plan, self.loaded.spec.model_id)
        onnx_export.tag_nodes(made.model, made.labels, self.known)
        if list(made.layers) != [one.name for one in self.plan.layers]:
            raise CutRefused("cannot cut the ONNX graph: while it was exported, the model took another path")
        graphs: dict[str, onnx_ir.Model] = {}
        crossings: dict[str, tuple[NamedTensor, ...]] = {}
        refused: dict[str, str] = {}
        for name in names:
            try:
                crossings[name] = named_tensors(self.plan.cutting(name)[1], self.inputs)
                graphs[name] = self._head(made, name, crossings[name])
            except IsthmusError as error:
                refused[name] = f"{error}"
        if whole:
            graphs[WHOLE] = made.model
        files = self._save(graphs, list(made.tensors))
        heads = []
        for name in names:
            try:
                if name in refused:
                    raise CutRefused(refused[name])
                heads.append(self._measured(name, files[name], crossings[name]))
            except IsthmusError as error:
                heads.append(Head(name, refused=f"{error}"))
        self._manifest(heads, self._whole_difference() if whole else None)
        weights = self.folder / WEIGHTS
        return ExportedHeads(
            self.folder, self.loaded.spec.model_id, heads, weights.stat().st_size if weights.exists() else 0
        )

    def _call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments, of copies: it may write to them."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(
            self.structure, [one.clone() for one in tensors], own_class
        )
        return found

    def _given(self, subject: Subject, example: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
        """Inputs to compare on: the user's that are of the example's form, else the example with its elements moved."""
        found = []
        for one in subject.inputs[:MOST_INPUTS]:
            args, kwargs = one.read(self.loaded.spec)
            structure, tensors = flatten((tuple(args), dict(kwargs)))
            if structure != self.structure or [t.shape for t in tensors] != [t.shape for t in example]:
                raise InputMismatch(f"{one.name}: its form is not the example's, for which heads are exported")
            found.append(tensors)
        generator = torch.Generator().manual_seed(0)
        moved = [one.flatten()[torch.randperm(one.numel(), generator=generator)].reshape(one.shape) for one in example]
        return found or [moved]

    def _head(self, made: Exported, name: str, crossing: Sequence[NamedTensor]) -> onnx_ir.Model:
        """The graph up to a cut, whose outputs are what crosses, by name and in order.

        Which of the graph's tensors is which of the model's is found by their values, on two inputs: an exporter
        renames as it likes.
        """
        import onnx_ir
        from onnx_ir.convenience import extract

        half = halve(made.model, cut_at(name, self.loaded), self.known, {}).head
        graph, scratch = half.graph, self.folder / ".head.onnx"
        wanted = {(dtype_name(one.dtype), (one.source or one.view).shape) for one in crossing}
        inside = [value for node in graph for value in node.outputs if _form(value) in wanted]
        there = {value.name: value for value in graph.inputs}
        passed = [  # an input that is read behind the cut only is none of the half's yet
            there.get(value.name) or onnx_ir.Value(name=value.name, type=value.type, shape=value.shape)
            for value in made.model.graph.inputs
            if _form(value) in wanted
        ]
        pairs: list[tuple[dict[str, torch.Tensor], list[torch.Tensor]]] = []
        try:
            graph.outputs[:] = inside
            onnx_ir.save(half, scratch)
            for tensors in self.samples[:2]:
                feeds = dict(zip(made.tensors, tensors, strict=True))
                args, kwargs = self._call(tensors)
                early = self.wrapped.head(name, *args, **kwargs)
                ours = [one.tensor_of(early.pieces[one.piece]) for one in crossing]
                pairs.append(({**feeds, **(_ran(scratch, feeds) if inside else {})}, ours))
        finally:
            scratch.unlink(missing_ok=True)
        outputs: list[onnx_ir.Value] = []
        for number, one in enumerate(crossing):
            best, chosen = SAME, None
            for candidate in (*inside, *passed):
                if _form(candidate) != (dtype_name(one.dtype), (one.source or one.view).shape):
                    continue
                given = [(one.part_of(found[candidate.name or ""]), ours[number]) for found, ours in pairs]
                apart = max(_apart(theirs, own) for theirs, own in given)
                if apart <= best:  # of equal ones the last: it is what the others became
                    best, chosen = apart, candidate
            if chosen is None:
                raise CutRefused(f"the graph has no tensor with the values of {one.name}, which crosses here")
            if chosen in passed and chosen.name not in there:
                graph.inputs.append(chosen)
                there[chosen.name] = chosen
            if one.source is not None:
                chosen = _part(graph, chosen, one)
            elif chosen in outputs or chosen in passed:
                chosen = _node(graph, "Identity", [chosen], one)
            outputs.append(chosen)
        half.graph = extract(graph, list(graph.inputs), outputs)
        _name(half.graph, list(half.graph.outputs), [one.name for one in crossing])
        return half

    def _save(self, graphs: Mapping[str, onnx_ir.Model], keys: Sequence[str]) -> dict[str, str]:
        """Each graph as a file beside one file of all weights; names of the files."""
        import onnx_ir
        from onnx_ir.external_data import convert_tensors_to_external

        held = [value for graph in graphs.values() for value in graph.graph.initializers.values()]
        large = {id(one.const_value): one.const_value for one in held if one.const_value and _is_large(one.const_value)}
        (self.folder / WEIGHTS).unlink(missing_ok=True)
        kept = dict(zip(large, convert_tensors_to_external(list(large.values()), self.folder, WEIGHTS), strict=True))
        files: dict[str, str] = {}
        for name, graph in graphs.items():
            for value in graph.graph.initializers.values():
                if id(value.const_value) in kept:  # halves of one graph share its weights
                    value.const_value = kept[id(value.const_value)]
            inputs = [value for value in graph.graph.inputs if value.name in keys]
            _name(graph.graph, inputs, [self.inputs[list(keys).index(value.name or "")] for value in inputs])
            stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name)
            stem = f"{stem}_" if f"{stem}.onnx" in (*files.values(), WHOLE) else stem
            files[name] = WHOLE if name == WHOLE else f"{stem}.onnx"
            if name == WHOLE:
                _name(graph.graph, list(graph.graph.outputs), self.outputs)
            onnx_ir.save(graph, self.folder / files[name])
        return files

    def _measured(self, name: str, file: str, crossing: tuple[NamedTensor, ...]) -> Head:
        """The head in onnxruntime, then torch's tail, against the whole model."""
        described_by = self.plan.cutting(name)[1]
        difference, labels, rows = 0.0, 0, 0
        for tensors in self.samples:
            given = _ran(self.folder / file, dict(zip(self.inputs, tensors, strict=True)))
            args, kwargs = self._call(tensors)
            wanted = outputs_of(self.wrapped.whole(*args, **kwargs))[1]
            found = outputs_of(self.wrapped.forward(early_of(described_by, crossing, given)))[1]
            difference = max([difference, *(_apart(a, b) for a, b in zip(found, wanted, strict=True))])
            if len(wanted) == 1 and wanted[0].dim() == 2 and wanted[0].is_floating_point():
                labels += int((found[0].argmax(1) != wanted[0].argmax(1)).sum())
                rows += len(wanted[0])
        if difference > SAME:
            (self.folder / file).unlink()
            return Head(name, refused=f"its answer differs from the model's by {difference:.1e} of the largest element")
        return Head(name, file, crossing, difference, labels, rows)

    def _whole_difference(self) -> float:
        """The same of the whole model in onnxruntime. Raises ExportFailed where its answer is another one."""
        found = 0.0
        for tensors in self.samples:
            given = _ran(self.folder / WHOLE, dict(zip(self.inputs, tensors, strict=True)))
            args, kwargs = self._call(tensors)
            wanted = outputs_of(self.wrapped.whole(*args, **kwargs))[1]
            found = max([found, *(_apart(a, b) for a, b in zip(given.values(), wanted, strict=True))])
        if found > SAME:
            raise ExportFailed(f"the whole model in onnxruntime differs by {found:.1e} of the largest element")
        return found

    def _manifest(self, heads: Sequence[Head], whole_difference: float | None) -> None:
        spec = self.loaded.spec
        pictures, ranks = spec._preprocess, spec._postprocess
        found: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model": spec.model_id,
            "weights": self.wrapped.weights_hash(),
            "structure": self.wrapped.structure_digest(),
            "torch": torch.__version__,
            "inputs": [
                [name, dtype_name(one.dtype), list(one.shape)]
                for name, one in zip(self.inputs, self.samples[0], strict=True)
            ],
            "outputs": self.outputs,
            "labels": list(spec.labels),
            "preprocess": _as_json(pictures) if isinstance(pictures, ImagePreprocess) else None,
            "postprocess": _as_json(ranks) if isinstance(ranks, TopK) else None,
            "heads": [
                {
                    "cut": one.cut,
                    "file": one.file,
                    "crossing": described(one.crossing),
                    "bytes": one.nbytes,
                    "difference": one.difference,
                    "labels_changed": one.labels,
                    "compared": one.compared,
                }
                for one in heads
                if not one.refused
            ],
            "refused": {one.cut: one.refused for one in heads if one.refused},
            "whole": None if whole_difference is None else WHOLE,
            "whole_difference": whole_difference or 0.0,
        }
        written = [*(one.file for one in heads if not one.refused), *([] if whole_difference is None else [WHOLE])]
        written += [WEIGHTS] if (self.folder / WEIGHTS).exists() else []
        found["sha256"] = {name: hashlib.sha256((self.folder / name).read_bytes()).hexdigest() for name in written}
        write_json(self.folder / MANIFEST, found, option("output"))


def _is_large(weight: Any) -> bool:
    return bool(weight.nbytes >= 1024)


def _node(graph: onnx_ir.Graph, kind: str, inputs: Sequence[onnx_ir.Value], one: NamedTensor) -> onnx_ir.Value:
    """A node's only output, with the form of ``one``."""
    import onnx_ir

    node = onnx_ir.node(kind, inputs, name=f"node_{kind}_{one.name}:{len(graph)}")
    graph.append(node)
    made = node.outputs[0]
    made.type = onnx_ir.TensorType(onnx_ir.DataType.from_numpy(np.dtype(dtype_name(one.dtype))))
    made.shape = onnx_ir.Shape(one.shape)
    return made


def _part(graph: onnx_ir.Graph, value: onnx_ir.Value, one: NamedTensor) -> onnx_ir.Value:
    """The elements of a part, picked out of the tensor that holds it."""
    import onnx_ir

    def constant(name: str, numbers: Sequence[int]) -> onnx_ir.Value:
        held = onnx_ir.tensor(np.asarray(numbers, dtype=np.int64), name=f"{one.name}:{name}")
        made = onnx_ir.Value(name=held.name, type=onnx_ir.TensorType(onnx_ir.DataType.INT64), const_value=held)
        made.shape = onnx_ir.Shape([len(numbers)])
        graph.register_initializer(made)
        return made

    flat = _node(graph, "Reshape", [value, constant("flat", [-1])], one)
    flat.shape, flat.name = None, f"{one.name}:flattened"
    picked = _node(graph, "Gather", [flat, constant("places", one.places)], one)
    picked.shape, picked.name = None, f"{one.name}:picked"
    return _node(graph, "Reshape", [picked, constant("shape", one.shape)], one)


def _ran(path: Path, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A graph in onnxruntime. Raises CutRefused for one that it does not take, such as of bfloat16."""
    try:
        return run(path, feeds)
    except Exception as error:  # onnxruntime has no class of its own for all that may be
        raise CutRefused(f"onnxruntime does not run this head: {one_line(str(error))[:200]}") from error


def _form(value: onnx_ir.Value) -> tuple[str, tuple[Any, ...]] | None:
    """Dtype and shape, where both are known."""
    if value.dtype is None or value.shape is None:
        return None
    return str(value.dtype.numpy()), tuple(value.shape)


def _name(graph: onnx_ir.Graph, values: Sequence[onnx_ir.Value], names: Sequence[str]) -> None:
    """Give values these names; another value that has one of them gets another."""
    wanted = dict(zip(names, values, strict=True))
    for node in graph.all_nodes():
        for other in node.outputs:
            if other.name in wanted and wanted[other.name] is not other:
                other.name = f"{other.name}:inner"
    for value in graph.inputs:
        if value.name in wanted and wanted[value.name] is not value:
            value.name = f"{value.name}:inner"
    for name, value in wanted.items():
        value.name = name


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference as a share of the largest magnitude; infinite for other shapes, dtypes and NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not other.numel() or torch.equal(one, other):
        return 0.0
    if not other.is_floating_point():
        return float("inf")
    a, b = one.double(), other.double()
    apart = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30)
    return apart if apart == apart else float("inf")


def _as_json(one: Any) -> dict[str, Any]:
    known = dataclasses.asdict(one)
    return {name: dtype_name(value) if isinstance(value, torch.dtype) else value for name, value in known.items()}

"""Export heads of a model as ONNX files, for devices without PyTorch."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from edge_client.light import EXAMPLE, VERSION, HeadFolder, LightClient, elements
from edge_client.light_codecs import ROUNDING
from edge_client.options import ExportOptions
from edge_client.screen import Row, Tabular, one_line, printable, size
from edge_client.screen import table as text_table
from edge_client.tasks.hierarchy import cut_at
from edge_client.tasks.subject import Model, Subject, subject_of
from edge_client.user_input import LoadedModel
from edge_client.user_text import option
from shared_hooks.batching.sizes import BATCH, BOTH, LENGTH, OtherSizes
from shared_hooks.codecs import CODECS, RAW
from shared_hooks.crossing import (
    Crossing,
    EarlyOutput,
    NamedCrossing,
    NamedTensor,
    as_sent,
    by_parameter,
    leaves,
    named_crossing,
)
from shared_hooks.errors import CutRefused, InputMismatch, IsthmusError, SpecError
from shared_hooks.files import write_json, write_whole
from shared_hooks.mapping import onnx_export
from shared_hooks.mapping.onnx_export import ExportFailed, Free, outputs_of
from shared_hooks.mapping.onnx_export import check as needs
from shared_hooks.mapping.onnx_halves import opened, run_in
from shared_hooks.mapping.onnx_heads import TapedHead, graphs_of, in_float32, of_any_size, rename, tape_head
from shared_hooks.models.drawing import TopK
from shared_hooks.models.images import ImagePreprocess
from shared_hooks.options import takes
from shared_hooks.planning import Plan
from shared_hooks.tensors import copied, dtype_name, flatten, own_class, unflatten

if TYPE_CHECKING:
    import onnx_ir

FORMAT: Final = "isthmus-heads"
MANIFEST: Final = "manifest.json"
WEIGHTS: Final = "weights.bin"
WHOLE: Final = "whole.onnx"
FIXED: Final = "fixed"
VARIES: Final = (BOTH, BATCH, LENGTH, FIXED)
MEASURED: Final = ROUNDING
"""Codecs whose effect on answers is measured."""
SAME: Final = 1e-3
"""Largest difference of a graph's tensor from torch's, as a share of the largest magnitude, that counts as equal."""
NO_SERVER: Final = "127.0.0.1:9"
"""No server."""
MOST_INPUTS: Final = 32
"""Maximum number of user inputs on which answers are compared."""


@dataclass(frozen=True)
class HeadCodecLoss:
    """Answers with what crosses encoded: `ExportedHead.difference` and `ExportedHead.labels` under a codec, and the
    most bytes that crossed.
    """

    difference: float
    labels: int
    nbytes: int

    @property
    def bound(self) -> float:
        """Expected bound of the difference on similar inputs: twice what was measured."""
        return 2 * self.difference


@dataclass(frozen=True)
class ExportedHead:
    """One exported head, or why it was ``refused``.

    ``difference``: the largest error of the answer, of this head with torch's tail against the whole model, as a share
    of the largest magnitude; ``labels``: rows whose top score changed; both over ``compared`` inputs.
    """

    cut: str
    file: str = ""
    crossing: NamedCrossing = field(default_factory=lambda: NamedCrossing(()))
    difference: float = 0.0
    labels: int = 0
    compared: int = 0
    free: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Inputs whose size may vary along these axes."""
    largest: Mapping[int, int] = field(default_factory=dict)
    """Maximum size, by axis."""
    codecs: Mapping[str, HeadCodecLoss] = field(default_factory=dict)
    """Effect of lossy codecs on answers (`MEASURED`); those that change answers too much are left out."""
    shapes: Sequence[Sequence[int]] = ()
    """Shapes of what crosses, with -1 for sizes that vary."""
    refused: str = ""

    @property
    def nbytes(self) -> int:
        """Raw bytes that cross."""
        return self.crossing.nbytes


@dataclass(frozen=True, repr=False)
class ExportedHeads(Tabular):
    """Result of `edge_client.export`. A row is a cut."""

    folder: Path
    model: str
    heads: Sequence[ExportedHead]
    weights_bytes: int
    checked: int | None = None
    """Number of answers compared by heads read from the folder as a device reads it; None: not requested."""

    shown = {  # noqa: RUF012
        "cut": "cut",
        "file": "file",
        "any": "any",
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
                "any": _any(one) or None,
                "crossing_bytes": None if one.refused else one.nbytes,
                "difference": None if one.refused else one.difference,
                "labels": None if one.refused else one.labels,
                "refused": one.refused or None,
            }
            for one in self.heads
        ]

    def text(self) -> str:
        rows = [
            [one.cut, one.file, _any(one), size(one.nbytes), f"{one.difference:.1e}", f"{one.labels} of {one.compared}"]
            for one in self.heads
            if not one.refused
        ]
        lines = [printable(self.title())]
        if rows:
            lines += [
                "",
                text_table(["cut", "file", "any", "crosses", "difference", "labels changed"], rows, right=(3, 4, 5)),
            ]
        lines += [one_line(f"refused: {one.cut}: {one.refused}") for one in self.heads if one.refused]
        if self.checked is not None:
            lines += ["", f"checked: {self.checked} answers by the files as a device reads them, all within {SAME:g}"]
        return "\n".join(lines)


@takes(ExportOptions)
def export(model: Model, inputs: Any = None, *, options: ExportOptions) -> ExportedHeads:
    """Export heads of ``model``, up to the cuts ``split``, as ONNX files (docs/jobs/edge-without-pytorch.md).

    Needs the extra "onnx".

        edge_client.export("digits", split=["stem", "stage2.0.conv2"], output="heads")

    ``output``: a folder, created if missing: a file per cut, `WEIGHTS` shared by all, and a manifest that describes the
    inputs, what crosses, and how far answers are from the whole model's, measured on ``inputs`` (at most `MOST_INPUTS`;
    none: the spec's example). ``split``: names, or "all". ``whole``: also the whole model, for a device that cannot
    reach the server. ``vary``: "batch", "length" (the second axis of token inputs) or "both": axes of heads that may
    have any size, if plans of the model show how other sizes depend on them and the exporter follows; if both cannot,
    the batch alone may; "fixed": the example's sizes. ``check``: read the folder as a device does, run every head in
    onnxruntime and its tail in torch on all inputs, and compare whole answers.

    A cut that cannot be exported is refused in its row, with the reason. Raises SpecError, UnknownModel, UnknownLayer,
    InputMismatch, ExportFailed for a model that torch cannot export, and what planning raises.
    """
    needs("onnxruntime")
    if options.vary not in VARIES:
        raise SpecError(f"{option('vary')}={options.vary!r}: expected one of {', '.join(VARIES)}")
    subject = subject_of(model, inputs)
    subject = replace(subject, choice=replace(subject.choice, device="cpu"))
    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"{option('output')}: {folder} cannot be a folder: {error.strerror}") from error
    loaded = subject.load(shallow=True)
    with loaded.wrapped as wrapped:
        plan = wrapped.plan(*loaded.args, **loaded.kwargs)
        names = [options.split] if isinstance(options.split, str) else list(options.split)
        if names == ["all"]:
            names = [one.name for one in plan.cuts if one.can_split]
        else:
            known = {one.name for one in plan.cuts}
            names = list(dict.fromkeys(name if name in known else cut_at(name, loaded).name for name in names))
        try:
            writer = Writer(loaded, subject, folder)
            found = writer.write(names, options.whole, options.vary)
            return replace(found, checked=writer.checked()) if options.check else found
        except IsthmusError:
            raise
        except Exception as error:  # of an exporter that disassembled the model, or of the model after that
            raise ExportFailed(
                f"the model cannot be exported: {one_line(f'{type(error).__name__}: {error}')}"
            ) from error


class Writer:
    """Writes the files of one folder. Raises InputMismatch for inputs without names."""

    def __init__(self, loaded: LoadedModel, subject: Subject, folder: Path) -> None:
        self.loaded, self.folder, self.wrapped = loaded, folder, loaded.wrapped
        self.plan = self.wrapped.plan(*loaded.args, **loaded.kwargs)
        self.structure, tensors = flatten((loaded.args, dict(loaded.kwargs)))
        named = leaves(by_parameter(self.wrapped.model, self.structure), "")
        self.inputs = [name for name, node in named if node[0] == "t"]
        if len(self.inputs) != len(tensors):
            raise InputMismatch("two of the inputs of its example are one tensor, or have one name")
        self.moved = self._moved()
        self.given = list(self._given(subject, tensors)) or [tensors]
        """The user's inputs, at most `MOST_INPUTS`; else the example."""
        self.nudged = [one * 0.995 if one.is_floating_point() else one for one in tensors]
        """The example, slightly changed: a model may take another branch on moved elements."""
        self.samples = [tensors, self.moved, *(self.given if self.given[0] is not tensors else [])]
        self._open: tuple[str, Any] | None = None
        self._wholes: dict[int, list[torch.Tensor]] = {}
        args, kwargs = self.call(tensors)
        given = leaves(outputs_of(self.wrapped.whole(*args, **kwargs))[0])
        self.outputs = [name for name, node in given if node[0] == "t"]

    def feeds(self) -> dict[str, Any]:
        """Return the example as numpy arrays by name."""
        return {name: as_sent(one).contiguous().numpy() for name, one in zip(self.inputs, self.samples[0], strict=True)}

    def write(self, names: Sequence[str], whole: bool, vary: str) -> ExportedHeads:
        """Write heads at these cuts, and the manifest. Raises ExportFailed for a whole model that cannot be
        exported.
        """
        self.refused: dict[str, str] = {}
        self.graphs: dict[str, onnx_ir.Model] = {}
        self.taped: dict[str, TapedHead] = {}
        self.single: set[str] = set()
        heads: dict[str, ExportedHead] = {}
        rest = [*names]
        for kind in (BOTH, BATCH) if vary == BOTH else (vary,):
            self.sizes = self._other_sizes(kind)
            if self.sizes is not None:
                taped = [head for name in rest if (head := self._taped_for_any_size(name, self.sizes)) is not None]
                self._make(taped, self.sizes.inputs(self.sizes.sizes[-2]), self.sizes.free)
                heads |= self._written(rest)
            self.refused.clear()
            rest = [name for name in names if name not in heads]
        self._make([head for name in rest if (head := self._taped(name)) is not None], self.samples[0])
        if whole:
            self.graphs[WHOLE] = onnx_export.export(
                self.wrapped.model, self.plan, self.loaded.args, self.loaded.kwargs
            ).model
        written = {
            **heads,
            **self._written(rest),
            **{name: ExportedHead(name, refused=why) for name, why in self.refused.items()},
        }
        self._manifest([written[name] for name in names], self._whole_difference() if whole else None)
        weights = self.folder / WEIGHTS
        return ExportedHeads(
            self.folder,
            self.loaded.spec.model_id,
            [written[name] for name in names],
            weights.stat().st_size if weights.exists() else 0,
        )

    def checked(self) -> int:
        """Compare answers of heads read from the folder, and return how many; 0 without heads.

        Raises ExportFailed for a wrong one.
        """
        read, compared = HeadFolder(self.folder), 0
        for cut in read.cuts:
            crossing = self.plan.cutting(cut)[1]
            named = named_crossing(crossing, self.inputs)
            with LightClient(NO_SERVER, read, cut) as client:
                for tensors in self.given:
                    given = client.crossing(*(as_sent(one).contiguous().numpy() for one in tensors))
                    early = named.early(crossing, {name: torch.from_numpy(one) for name, one in given.items()})
                    wanted = self._whole(tensors)
                    found = outputs_of(self.wrapped.forward(early))[1]
                    off = max((apart(a, b) for a, b in zip(found, wanted, strict=True)), default=0.0)
                    if off > SAME:
                        raise ExportFailed(f"{cut}: read from {self.folder}, its answer is off by {off:.1e}")
                    compared += 1
        return compared

    def _other_sizes(self, vary: str) -> OtherSizes | None:
        if vary == FIXED:
            return None
        try:
            return OtherSizes(self.wrapped, self.structure, self.samples[0], vary)
        except IsthmusError:
            return None

    def _make(self, taped: Sequence[TapedHead], tensors: Sequence[torch.Tensor], moving: Free | None = None) -> None:
        """Make graphs of heads."""
        for head, graph in graphs_of(taped, self.inputs, tensors, moving):
            self.taped[head.cut] = head
            if isinstance(graph, IsthmusError):
                self.refused[head.cut] = f"{graph}"
            else:
                self.graphs[head.cut] = graph

    def _written(self, names: Sequence[str]) -> dict[str, ExportedHead]:
        """Write all graphs so far and return what was measured of them. A head that fails in float64 is written in
        float32.
        """
        from onnx_ir import DataType

        files = self._save(self.graphs)
        found = {}
        for name in names:
            if name not in files:
                continue
            file = files[name]
            try:
                found[name] = self._measured(self.taped[name], file)
            except IsthmusError as error:
                if name not in self.single and in_float32(self.graphs[name], DataType.DOUBLE):
                    self.single.add(name)
                    found |= self._written([name])
                else:
                    del self.graphs[name]
                    self.refused[name] = f"{error}"
        return found

    def _taped(self, name: str) -> TapedHead | None:
        try:
            return self.taped_head(name)
        except Exception as error:  # ours, or torch's for a tensor of a kind that has no bytes
            self.refused[name] = f"{error}" if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"
            return None

    def taped_head(self, name: str) -> TapedHead:
        """Return the tape of a head on the example. Raises CutRefused."""
        args, kwargs = copied(self.loaded.args, dict(self.loaded.kwargs))  # which may share memory
        return self._listened(name, self.plan, args, kwargs)

    def _taped_for_any_size(self, name: str, sizes: OtherSizes) -> TapedHead | None:
        """Return a tape for any size, or None if sizes are fixed; then the head is made for the example's."""
        try:
            sizes.crossing(name)
            taped = [
                self._listened(name, plan, *self.call(sizes.inputs(other)))
                for plan, other in zip(sizes.plans, sizes.sizes, strict=True)
            ]
        except Exception:  # ours, or torch's for a tensor of a kind that has no bytes
            return None
        return of_any_size(taped, sizes.sizes, sizes.places)

    def _listened(self, name: str, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TapedHead:
        named = named_crossing(plan.cutting(name)[1], self.inputs)
        tensors = flatten((args, kwargs))[1]
        return tape_head(
            self.wrapped.model, plan, name, named, tensors, lambda: self.wrapped.head(name, *args, **kwargs)
        )

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the model's arguments, as copies that it may write to."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(
            self.structure, [one.clone() for one in tensors], own_class
        )
        return found

    def _moved(self) -> list[torch.Tensor]:
        """Return the example with its elements permuted: other values of the same kind, with shared memory kept."""
        generator = torch.Generator().manual_seed(0)
        found = flatten(copied(self.loaded.args, dict(self.loaded.kwargs)))[1]
        for one in found:
            if torch._debug_has_internal_overlap(one) != 1:
                one.copy_(one.flatten()[torch.randperm(one.numel(), generator=generator)].reshape(one.shape))
        return found

    def _given(self, subject: Subject, example: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
        """Yield the user's inputs. Raises InputMismatch for one with another structure than the example's."""
        for one in subject.inputs[:MOST_INPUTS]:
            args, kwargs = one.read(self.loaded.spec)
            structure, tensors = flatten((tuple(args), dict(kwargs)))
            if structure != self.structure or [t.shape for t in tensors] != [t.shape for t in example]:
                raise InputMismatch(f"{one.name}: its form is not the example's, for which heads are exported")
            yield tensors

    def _save(self, graphs: Mapping[str, onnx_ir.Model]) -> dict[str, str]:
        """Save each graph as a file that refers to a shared file of weights; return the files' names."""
        self._open = None
        import onnx_ir
        from onnx_ir.external_data import convert_tensors_to_external

        held = [value.const_value for graph in graphs.values() for value in graph.graph.initializers.values()]
        large = {_key(one): one for one in held if one is not None and _is_large(one)}
        (self.folder / WEIGHTS).unlink(missing_ok=True)
        kept = dict(zip(large, convert_tensors_to_external(list(large.values()), self.folder, WEIGHTS), strict=True))
        files: dict[str, str] = {}
        for name, graph in graphs.items():
            inside = {value: value.const_value for value in graph.graph.initializers.values()}
            for value, weight in inside.items():
                if weight is not None and _is_large(weight):
                    value.const_value = kept[_key(weight)]
            stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name)
            stem = f"{stem}_" if f"{stem}.onnx" in (*files.values(), WHOLE) else stem
            files[name] = WHOLE if name == WHOLE else f"{stem}.onnx"
            if name == WHOLE:
                rename(graph.graph, list(graph.graph.inputs), self.inputs)
                rename(graph.graph, list(graph.graph.outputs), self.outputs)
            onnx_ir.save(graph, self.folder / files[name])
            for value, weight in inside.items():
                value.const_value = weight
        return files

    def _measured(self, head: TapedHead, file: str) -> ExportedHead:
        """Compare the head in onnxruntime, followed by torch's tail, with the whole model.

        Raises CutRefused and removes the file if answers differ.
        """
        difference, crossing_off, labels, rows, compared, other = 0.0, 0.0, 0, 0, 0, ""
        twice = not head.has_strangers
        for tensors, crossing in self._cases(head):
            if tensors is self.nudged and twice:
                continue
            named = named_crossing(crossing, self.inputs)
            try:
                args, kwargs = self.call(tensors)
                given = self._ran(file, tensors)
                early = named.early(crossing, given)
                crosses = None
                if any(tensors is one for one in (self.moved, self.nudged)):
                    # not a realistic input: it is enough that what crosses agrees
                    own = self.wrapped.head(head.cut, *args, **kwargs)
                    if own.crossing.slots != crossing.slots:
                        continue
                    crosses = max(_off_in_units(one, given, own) for one in named.tensors)
                if crosses is None or crosses > SAME:
                    found = outputs_of(self.wrapped.forward(early))[1]
                    wanted = self._whole(tensors)
            except Exception as error:  # the model rejects such data, or takes another path
                other = f"{error}" if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"
                continue
            if crosses is not None and crosses <= SAME:
                twice = True
                continue
            off = max((apart(a, b) for a, b in zip(found, wanted, strict=True)), default=0.0)
            if crosses is not None:
                crossing_off = max(crossing_off, 0.0 if off <= SAME else crosses)
                continue
            twice = twice or tensors is not self.samples[0]
            difference = max(difference, off)
            if not any(tensors is one for one in (self.samples[0], *self.samples[2:])):
                continue  # another size than the example's
            compared += 1
            labels += _labels_changed(found, wanted)
            rows += len(wanted[0]) if _are_scores(wanted) else 0
        if compared and not twice:
            compared, other = 0, "it takes tensors that no torch function made, and may make them of its inputs"
        if compared and difference > SAME:
            compared, other = 0, f"its answer differs from the model's by {difference:.1e} of the largest element"
        if compared and crossing_off > SAME:
            compared, other = 0, f"what crosses differs by {crossing_off:.1e} of the largest element, on other data"
        if not compared:
            (self.folder / file).unlink()
            raise CutRefused(other)
        named = named_crossing(self.plan.cutting(head.cut)[1], self.inputs)
        free: dict[str, Sequence[int]] = {}
        largest: Mapping[int, int] = {}
        shapes = [list(one.shape) for one in named]
        if head.sizes and self.sizes is not None:
            free = {self.inputs[at]: axes for at, axes in self.sizes.free.items()}
            shapes, largest = self.sizes.shapes(head.cut, self.inputs), self.sizes.largest
        codecs = {codec: loss for codec, loss in self._losses(head, file).items() if math.isfinite(loss.difference)}
        return ExportedHead(head.cut, file, named, difference, labels, rows, free, largest, codecs, shapes)

    def _losses(self, head: TapedHead, file: str) -> dict[str, HeadCodecLoss]:
        found = dict.fromkeys(MEASURED, HeadCodecLoss(0.0, 0, 0))
        crossing = self.plan.cutting(head.cut)[1]
        named = named_crossing(crossing, self.inputs)
        for tensors in (self.samples[0], *self.samples[2:]):
            try:
                early = named.early(crossing, self._ran(file, tensors))
            except IsthmusError:  # not compared without a codec, either
                continue
            wanted = self._whole(tensors)
            for codec, so_far in found.items():
                parcel = early.pack([CODECS[codec] if one.is_flat else RAW for one in named.tensors])
                again = EarlyOutput.unpack(crossing, parcel.header, bytearray(b"".join(parcel.buffers)))
                given = outputs_of(self.wrapped.forward(again))[1]
                found[codec] = HeadCodecLoss(
                    max([so_far.difference, *(apart(a, b) for a, b in zip(given, wanted, strict=True))]),
                    so_far.labels + _labels_changed(given, wanted),
                    max(so_far.nbytes, parcel.nbytes),
                )
        return found

    def _ran(self, file: str, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run a file in onnxruntime. Raises CutRefused if it cannot be loaded or run."""
        feeds = {name: as_sent(one) for name, one in zip(self.inputs, tensors, strict=True)}
        try:
            if self._open is None or self._open[0] != file:
                self._open = file, opened(self.folder / file)
            return run_in(self._open[1], feeds)
        except Exception as error:  # onnxruntime has no single class for its failures
            raise CutRefused(f"onnxruntime does not run this head: {one_line(str(error))[:200]}") from error

    def _whole(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole model's output, computed once for each of the `samples`."""
        if id(tensors) not in self._wholes:
            args, kwargs = self.call(tensors)
            found = outputs_of(self.wrapped.whole(*args, **kwargs))[1]
            if not any(tensors is one for one in self.samples):
                return found
            self._wholes[id(tensors)] = [one.clone() for one in found]
        return self._wholes[id(tensors)]

    def _cases(self, head: TapedHead) -> Iterator[tuple[Sequence[torch.Tensor], Crossing]]:
        """Yield the inputs to compare answers on, and what crosses for them."""
        described_by = self.plan.cutting(head.cut)[1]
        yield from ((tensors, described_by) for tensors in self.samples)
        if any(one.is_floating_point() for one in self.nudged):
            yield self.nudged, described_by
        if not head.sizes or self.sizes is None:
            return
        sized = self.sizes.crossing(head.cut)
        for other in self.sizes.others():
            crossing = sized.at(other)
            if crossing is None:
                raise CutRefused(f"nothing is known of size {other}")
            yield self.sizes.inputs(other), crossing

    def _whole_difference(self) -> float:
        """Compare the whole model in onnxruntime with torch. Raises ExportFailed if its answer differs."""
        found = 0.0
        for tensors in self.samples:
            given = self._ran(WHOLE, tensors)
            wanted = self._whole(tensors)
            found = max([found, *(apart(a, b) for a, b in zip(given.values(), wanted, strict=True))])
        if found > SAME:
            raise ExportFailed(f"the whole model in onnxruntime differs by {found:.1e} of the largest element")
        return found

    def _manifest(self, heads: Sequence[ExportedHead], whole_difference: float | None) -> None:
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
                for name, one in zip(self.inputs, map(as_sent, self.samples[0]), strict=True)
            ],
            "outputs": self.outputs,
            "labels": list(spec.labels),
            "preprocess": _as_json(pictures) if isinstance(pictures, ImagePreprocess) else None,
            "postprocess": _as_json(ranks) if isinstance(ranks, TopK) else None,
            "heads": [
                {
                    "cut": one.cut,
                    "file": one.file,
                    "crossing": [
                        [known.name, dtype_name(known.dtype), list(shape)]
                        for known, shape in zip(one.crossing, one.shapes, strict=True)
                    ],
                    "free": {name: list(axes) for name, axes in one.free.items()},
                    "largest": {str(axis): most for axis, most in one.largest.items()},
                    "flat": [known.name for known in one.crossing.tensors if known.is_flat],
                    "codecs": {
                        name: {
                            "difference": loss.difference,
                            "bound": loss.bound,
                            "labels_changed": loss.labels,
                            "bytes": loss.nbytes,
                        }
                        for name, loss in one.codecs.items()
                    },
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
        self._save_example([name for name in written if name != WEIGHTS])
        written.append(EXAMPLE)
        found["sha256"] = {name: hashlib.sha256((self.folder / name).read_bytes()).hexdigest() for name in written}
        write_json(self.folder / MANIFEST, found, option("output"))

    def _save_example(self, files: Sequence[str]) -> None:
        """Save the example and what each file gives for it, by which a device proves its runtime (`light.EXAMPLE`)."""
        found = {f"input/{number}": array for number, array in enumerate(self.feeds().values())}
        for file in files:
            with suppress(CutRefused):  # it fails on the example, as the model does
                for number, given in enumerate(self._ran(file, self.samples[0]).values()):
                    found[f"{file}/{number}.at"], found[f"{file}/{number}"] = elements(given.numpy())
        write_whole(self.folder / EXAMPLE, lambda path: _savez(path, found), option("output"))


def _savez(path: Path, arrays: Mapping[str, Any]) -> None:
    with path.open("wb") as file:  # by name, another suffix is added
        np.savez_compressed(file, **arrays)


def _off_in_units(one: NamedTensor, given: Mapping[str, torch.Tensor], own: EarlyOutput) -> float:
    """Return `apart` of what crosses here and in torch, in units of its dtype if that is coarse."""
    off = apart(given[one.name], one.tensor_of(own.pieces[one.piece]))
    number = one.held.is_floating_point or one.held.is_complex
    return off / max(1.0, 8 * torch.finfo(one.held).eps / SAME) if number else off


def _are_scores(tensors: Sequence[torch.Tensor]) -> bool:
    return len(tensors) == 1 and tensors[0].dim() == 2 and tensors[0].is_floating_point() and tensors[0].numel() > 0


def _labels_changed(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> int:
    return int((found[0].argmax(1) != wanted[0].argmax(1)).sum()) if _are_scores(wanted) else 0


def _any(head: ExportedHead) -> str:
    """Format which sizes of a head's inputs may vary."""
    return ", ".join({0: BATCH, 1: LENGTH}[axis] for axis in head.largest)


def _is_large(weight: Any) -> bool:
    return bool(weight.nbytes >= 1024)


def _key(weight: Any) -> tuple[str, str]:
    """Return a key for a weight that occurs in several graphs: its form and its bytes."""
    return f"{weight.dtype}{weight.shape}", hashlib.blake2b(weight.tobytes()).hexdigest()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest magnitude; infinite for other shapes, dtypes, and
    positions of non-finite values.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not other.numel() or torch.equal(one, other):
        return 0.0
    if not other.is_floating_point():
        return float("inf")
    there = other.isfinite()
    if not torch.equal(one[~there].nan_to_num(), other[~there].nan_to_num()) or not bool(one[there].isfinite().all()):
        return float("inf")
    a, b = one[there].double(), other[there].double()
    return float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30) if len(b) else 0.0


def _as_json(one: Any) -> dict[str, Any]:
    known = dataclasses.asdict(one)
    return {name: dtype_name(value) if isinstance(value, torch.dtype) else value for name, value in known.items()}

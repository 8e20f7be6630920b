"""Map a model's modules, show which of them ran, and write ONNX files with every node tagged."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_client.options import HierarchyOptions
from edge_client.screen import Row, Tabular, one_line, size
from edge_client.tasks.subject import Model, coverage_text, print_tree, subject_of
from edge_client.user_input import LoadedModel, cut_of
from edge_client.user_text import option
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.mapping import Coverage, HierarchyMap, coverage_of, map_of, onnx_export, onnx_halves
from shared_hooks.mapping.map_file import to_json, write_graphml
from shared_hooks.mapping.onnx_export import check as check_extra
from shared_hooks.mapping.onnx_export import export
from shared_hooks.mapping.onnx_halves import HalvesCheck, halve, tags_of_half
from shared_hooks.options import takes
from shared_hooks.planning import LayerInfo, Plan

# The ONNX files of a model, whole or cut, every node tagged; optionally read and run again.


@dataclass(frozen=True)
class WrittenFiles:
    """The ONNX files written: as JSON data, as lines, and the results of --validate."""

    facts: Mapping[str, Any]
    lines: list[str]
    checks: list[tuple[str, HalvesCheck]]


@dataclass(frozen=True)
class OnnxFiles:
    """The ONNX files to write, and whether to validate them."""

    whole: str | None
    head: str | None
    tail: str | None
    validate: bool

    @property
    def paths(self) -> list[str]:
        return [path for path in (self.whole, self.head, self.tail) if path]

    def check(self) -> None:
        """Raise SpecError for an impossible combination, before anything is loaded."""
        if self.validate and not self.paths:
            raise SpecError(
                f"{option('validate')} needs a file to check: {option('onnx')}, or {option('split')} with "
                f"{option('head_onnx')} and {option('tail_onnx')}"
            )
        if len({Path(path).resolve() for path in self.paths}) != len(self.paths):
            raise SpecError(
                f"{option('onnx')}, {option('head_onnx')} and {option('tail_onnx')} must be different files"
            )
        if not self.paths:
            return
        check_extra()
        for path in self.paths:
            if not Path(path).absolute().parent.is_dir():
                raise SpecError(f"{path} cannot be written: there is no folder {Path(path).absolute().parent}")


def cut_at(split: str, loaded: LoadedModel) -> LayerInfo:
    found = loaded.wrapped.plan(*loaded.args, **loaded.kwargs).resolve(cut_of(split, loaded.wrapped))
    if found is None:
        raise CutRefused(
            f"{option('split', 'input')}: nothing runs before it; the tail is the whole model, and {option('onnx')} "
            "writes that"
        )
    return found


def write_onnx(
    onnx: OnnxFiles, loaded: LoadedModel, plan: Plan, known: HierarchyMap, layer: LayerInfo | None
) -> WrittenFiles:

    model = loaded.wrapped.model
    made = export(model, plan, loaded.args, loaded.kwargs)
    tags = onnx_export.tag_nodes(made.model, made.labels, known)
    facts = {"isthmus.model": known.model, "isthmus.plan": known.plan_digest}
    made.model.metadata_props.update(facts)
    side = onnx_export.sidecar(made.model, tags, known)
    report: dict[str, Any] = {}
    lines: list[str] = []
    checks: list[tuple[str, HalvesCheck]] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        whole = Path(onnx.whole or scratch / "whole.onnx")
        onnx_export.write(made.model, side, whole)
        if onnx.whole:
            report["whole"] = {"file": str(whole), "rules": side["rules"], "inputs": side["inputs"]}
            lines.append(f"{whole}: {_described(side)}")
        wanted = onnx_halves.expected(model, loaded.args, loaded.kwargs) if onnx.validate else []
        if onnx.validate and onnx.whole:
            checks += [(whole.name, check) for check in onnx_halves.check_file(whole, known)]
            checks.append((whole.name, onnx_halves.check_run(whole, made.tensors, wanted)))
        if layer is not None:
            if list(made.layers) != [one.name for one in plan.layers]:
                raise CutRefused(
                    f"cannot cut the ONNX graph after {layer.name}: while it was exported, the model took another path"
                )
            halves = halve(made.model, layer, known, facts)
            paths = [Path(onnx.head or scratch / "head.onnx"), Path(onnx.tail or scratch / "tail.onnx")]
            for path, half, role in zip(paths, (halves.head, halves.tail), ("head", "tail"), strict=True):
                cut = {"half": role, "cut": layer.name, "layer_id": layer.layer_id, **halves.as_dict()}
                side = onnx_export.sidecar(half, tags_of_half(half, tags), known, **cut)
                onnx_export.write(half, side, path)
                if path.parent != scratch:
                    report[role] = {"file": str(path), "rules": side["rules"], "inputs": side["inputs"], **cut}
                    lines.append(f"{path}: {role}, {_described(side)}")
                    if onnx.validate:
                        checks += [(path.name, check) for check in onnx_halves.check_file(path, known)]
            late = f"; inputs that the tail takes, too: {', '.join(halves.late)}" if halves.late else ""
            crossing = ", ".join(f"{one.name} {one.dtype}{list(one.shape)}" for one in halves.crossing)
            total = size(sum(one.nbytes for one in halves.crossing))
            lines.append(f"crossing after {layer.name}: {crossing}, {total}{late}")
            if onnx.validate:
                chain = onnx_halves.check_chain(paths[0], paths[1], whole, made.tensors, wanted)
                checks += [(f"{paths[0].name}, {paths[1].name}", check) for check in chain]
    return WrittenFiles(report, lines, checks)


def _described(side: Mapping[str, Any]) -> str:
    nodes, rules = len(side["nodes"]), side["rules"]
    by_rule = ", ".join(f"{count} by {rule}" for rule, count in rules.items() if count)
    return f"{nodes} nodes, all tagged ({by_rule}); takes {', '.join(side['inputs'])}"


@dataclass(frozen=True, repr=False)
class Mapped(Tabular):
    """Result of `edge_client.hierarchy`. A row is a module, in the order of definition, parents first.

    ``map``: modules, calls and operations; ``coverage``: which of them ran; ``files``: the ONNX files written;
    ``checks``: the results of validating them, (file, `HalvesCheck`).
    """

    map: HierarchyMap
    coverage: Coverage
    files: Sequence[Path]
    checks: Sequence[tuple[str, HalvesCheck]]
    written: WrittenFiles | None = None

    shown = {  # noqa: RUF012
        "tag": "tag",
        "class_name": "class",
        "layers": "layers",
        "calls": "calls",
        "parameters": "parameters",
    }

    @property
    def ok(self) -> bool:
        """Whether every validated file is correct; True if none was validated."""
        return all(check.ok for _, check in self.checks)

    def title(self) -> str:
        ran = len(self.coverage.both)
        return f"{self.map.model}: {self.coverage.modules} modules, of them {ran} ran, in {len(self.map.calls)} calls"

    def rows(self) -> list[Row]:
        layers: dict[str, list[int]] = {}
        for call in self.map.calls:
            if call.layer_id is not None:
                layers.setdefault(call.path, []).append(call.layer_id)
        return [
            {
                "path": one.path,
                "tag": one.tag,
                "class_name": one.class_name,
                "parent": one.parent,
                "parameters": one.parameters,
                "calls": one.calls,
                "layers": ", ".join(map(str, layers.get(one.path, ()))) or None,
                "holder": one.holder,
            }
            for one in self.map.modules
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        checks = [{"file": file, **check.as_dict()} for file, check in self.checks]
        return {**to_json(self.map), **({"onnx": {**self.written.facts, "checks": checks}} if self.written else {})}

    def text(self) -> str:
        out = io.StringIO()
        print_tree(self.map, out)
        return out.getvalue() + "\n" + "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Format what follows the tree: coverage, files and the results of validation."""
        found = [coverage_text(self.coverage)]
        found += [one_line(line) for line in (self.written.lines if self.written else ())]
        for file, check in self.checks:
            found.append(f"{'ok' if check.ok else 'WRONG':5}  {one_line(f'{file}: {check.what}: {check.found}')}")
        return found


@takes(HierarchyOptions)
def hierarchy(model: Model, inputs: Any = None, *, options: HierarchyOptions) -> Mapped:
    """Map ``model`` on its example, or on the first of ``inputs`` (docs/hierarchy.md; arguments as for `plan`).

        print(edge_client.hierarchy(module, image))                      # the tree, and what ran of it
        edge_client.hierarchy("digits", onnx="digits.onnx", validate=True).ok

    ``graphml``: a file for the map as a graph. ``onnx``: a file for the model with every node tagged; ``split`` with
    ``head_onnx`` and ``tail_onnx``: files for its two halves (extra "onnx"). ``validate``: read the files, run them,
    and compare with torch.

    Raises SpecError, UnknownModel, UnknownLayer, CutRefused, InputMismatch, and what planning raises.
    """
    whole, head, tail = (
        None if one is None else str(one) for one in (options.onnx, options.head_onnx, options.tail_onnx)
    )
    files = OnnxFiles(whole, head, tail, options.validate)
    if (options.split is not None) != bool(files.head or files.tail):
        raise SpecError(f"{option('split')} goes together with {option('head_onnx')}, {option('tail_onnx')} or both")
    files.check()
    subject = subject_of(model, inputs)
    if subject.choice.device == "auto":  # one forward: another device makes nothing faster here
        subject = replace(subject, choice=replace(subject.choice, device="cpu"))
    loaded = subject.load(on_inputs=True, shallow=True)
    with loaded.wrapped as wrapped:
        layer = None if options.split is None else cut_at(str(options.split), loaded)
        plan = wrapped.plan(*loaded.args, **loaded.kwargs)
        known = map_of(wrapped.model, plan, loaded.spec.model_id)
        if options.graphml is not None:
            write_graphml(known, str(options.graphml))
        written = write_onnx(files, loaded, plan, known, layer) if files.paths else None
    checks = written.checks if written else []
    return Mapped(known, coverage_of(known), [Path(path) for path in files.paths], checks, written)

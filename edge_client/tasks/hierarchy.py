"""`hierarchy`: what a model is made of, what of it ran, and its ONNX files with every node tagged."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_client.screen.text import one_line
from edge_client.spoken import option
from edge_client.tasks.onnx_files import OnnxFiles, Written, cut_at, write_onnx
from edge_client.tasks.subject import Model, subject_of
from edge_client.tasks.tabular import Row, Tabular
from edge_client.tasks.tree_text import coverage_text, print_tree
from shared_hooks.errors import SpecError
from shared_hooks.mapping import Coverage, HierarchyMap, coverage_of, map_of
from shared_hooks.mapping.map_file import to_json, write_graphml
from shared_hooks.mapping.onnx_check import Check


@dataclass(frozen=True, repr=False)
class Mapped(Tabular):
    """`edge_client.hierarchy` returns it. A row is a module, in the order of definition, parents first.

    ``map``: modules, calls and operations; ``coverage``: what ran of them; ``files``: the ONNX files that were written;
    ``checks``: what was found when they were read again, (file, `Check`).
    """

    map: HierarchyMap
    coverage: Coverage
    files: Sequence[Path]
    checks: Sequence[tuple[str, Check]]
    written: Written | None = None

    shown = {  # noqa: RUF012
        "tag": "tag",
        "class_name": "class",
        "layers": "layers",
        "calls": "calls",
        "parameters": "parameters",
    }

    @property
    def ok(self) -> bool:
        """Whether every file is what it should be; True where none was checked."""
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
        """JSON-able."""
        checks = [{"file": file, **check.as_dict()} for file, check in self.checks]
        return {**to_json(self.map), **({"onnx": {**self.written.facts, "checks": checks}} if self.written else {})}

    def text(self) -> str:
        out = io.StringIO()
        print_tree(self.map, out)
        return out.getvalue() + "\n" + "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Below the tree: what ran, what was written, what was found."""
        found = [coverage_text(self.coverage)]
        found += [one_line(line) for line in (self.written.lines if self.written else ())]
        for file, check in self.checks:
            found.append(f"{'ok' if check.ok else 'WRONG':5}  {one_line(f'{file}: {check.what}: {check.found}')}")
        return found


def hierarchy(
    model: Model,
    inputs: Any = None,
    *,
    graphml: str | Path | None = None,
    onnx: str | Path | None = None,
    split: str | int | None = None,
    head_onnx: str | Path | None = None,
    tail_onnx: str | Path | None = None,
    validate: bool = False,
) -> Mapped:
    """Map ``model`` on its example, or the first of ``inputs`` (docs/hierarchy.md; `plan` says what both may be).

        print(edge_client.hierarchy(module, image))                      # the tree, and what ran of it
        edge_client.hierarchy("digits", onnx="digits.onnx", validate=True).ok

    ``graphml``: the map as a graph, to this file. ``onnx``: the model, every node tagged; ``split`` with ``head_onnx``
    and ``tail_onnx``: its two halves (extra "onnx"). ``validate``: they are read again, run, and compared with torch.

    Raises SpecError, UnknownModel, UnknownLayer, CutRefused, InputMismatch, and what planning raises.
    """
    whole, head, tail = (None if one is None else str(one) for one in (onnx, head_onnx, tail_onnx))
    files = OnnxFiles(whole, head, tail, validate)
    if (split is not None) != bool(files.head or files.tail):
        raise SpecError(f"{option('split')} goes together with {option('head_onnx')}, {option('tail_onnx')} or both")
    files.check()
    subject = subject_of(model, inputs)
    if subject.choice.device == "auto":  # one forward: nothing here gets faster elsewhere
        subject = replace(subject, choice=replace(subject.choice, device="cpu"))
    loaded = subject.load(on_inputs=True)
    with loaded.wrapped as wrapped:
        layer = None if split is None else cut_at(str(split), loaded)
        plan = wrapped.plan(*loaded.args, **loaded.kwargs)
        known = map_of(wrapped.model, plan, loaded.spec.model_id)
        if graphml is not None:
            write_graphml(known, str(graphml))
        written = write_onnx(files, loaded, plan, known, layer) if files.paths else None
    checks = written.checks if written else []
    return Mapped(known, coverage_of(known), [Path(path) for path in files.paths], checks, written)

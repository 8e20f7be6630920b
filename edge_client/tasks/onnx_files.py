"""The ONNX files of a model, whole or cut, every node tagged; read and run again where that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_client.screen.text import size
from edge_client.spoken import option
from edge_client.survey.loaded import Loaded
from edge_client.survey.loading import cut_of
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.mapping import HierarchyMap, onnx_check, onnx_tags
from shared_hooks.mapping.onnx_check import Check
from shared_hooks.mapping.onnx_export import export
from shared_hooks.mapping.onnx_halves import halve, tags_of_half
from shared_hooks.mapping.onnx_needs import check as check_extra
from shared_hooks.planning import LayerInfo, Plan


@dataclass(frozen=True)
class Written:
    """What became of the ONNX files: for JSON, in lines, and what --validate found."""

    facts: Mapping[str, Any]
    lines: list[str]
    checks: list[tuple[str, Check]]


@dataclass(frozen=True)
class OnnxFiles:
    """What is to be written, where there is a path, and whether it is read and run again."""

    whole: str | None
    head: str | None
    tail: str | None
    validate: bool

    @property
    def paths(self) -> list[str]:
        return [path for path in (self.whole, self.head, self.tail) if path]

    def check(self) -> None:
        """SpecError for what cannot be, before anything is loaded."""
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


def cut_at(split: str, loaded: Loaded) -> LayerInfo:
    found = loaded.wrapped.plan(*loaded.args, **loaded.kwargs).resolve(cut_of(split, loaded.wrapped))
    if found is None:
        raise CutRefused(
            f"{option('split', 'input')}: nothing runs before it; the tail is the whole model, and {option('onnx')} "
            "writes that"
        )
    return found


def write_onnx(onnx: OnnxFiles, loaded: Loaded, plan: Plan, known: HierarchyMap, layer: LayerInfo | None) -> Written:

    model = loaded.wrapped.model
    made = export(model, plan, loaded.args, loaded.kwargs)
    tags = onnx_tags.tag_nodes(made.model, made.labels, known)
    facts = {"isthmus.model": known.model, "isthmus.plan": known.plan_digest}
    made.model.metadata_props.update(facts)
    side = onnx_tags.sidecar(made.model, tags, known)
    report: dict[str, Any] = {}
    lines: list[str] = []
    checks: list[tuple[str, Check]] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        whole = Path(onnx.whole or scratch / "whole.onnx")
        onnx_tags.write(made.model, side, whole)
        if onnx.whole:
            report["whole"] = {"file": str(whole), "rules": side["rules"], "inputs": side["inputs"]}
            lines.append(f"{whole}: {_described(side)}")
        wanted = onnx_check.expected(model, loaded.args, loaded.kwargs) if onnx.validate else []
        if onnx.validate and onnx.whole:
            checks += [(whole.name, check) for check in onnx_check.check_file(whole, known)]
            checks.append((whole.name, onnx_check.check_run(whole, made.tensors, wanted)))
        if layer is not None:
            if list(made.layers) != [one.name for one in plan.layers]:
                raise CutRefused(
                    f"cannot cut the ONNX graph after {layer.name}: while it was exported, the model took another path"
                )
            halves = halve(made.model, layer.layer_id, layer.name, facts)
            paths = [Path(onnx.head or scratch / "head.onnx"), Path(onnx.tail or scratch / "tail.onnx")]
            for path, half, role in zip(paths, (halves.head, halves.tail), ("head", "tail"), strict=True):
                cut = {"half": role, "cut": layer.name, "layer_id": layer.layer_id, **halves.as_dict()}
                side = onnx_tags.sidecar(half, tags_of_half(half, tags), known, **cut)
                onnx_tags.write(half, side, path)
                if path.parent != scratch:
                    report[role] = {"file": str(path), "rules": side["rules"], "inputs": side["inputs"], **cut}
                    lines.append(f"{path}: {role}, {_described(side)}")
                    if onnx.validate:
                        checks += [(path.name, check) for check in onnx_check.check_file(path, known)]
            late = f"; inputs that the tail takes, too: {', '.join(halves.late)}" if halves.late else ""
            crossing = ", ".join(f"{one.name} {one.dtype}{list(one.shape)}" for one in halves.crossing)
            total = size(sum(one.nbytes for one in halves.crossing))
            lines.append(f"crossing after {layer.name}: {crossing}, {total}{late}")
            if onnx.validate:
                chain = onnx_check.check_chain(paths[0], paths[1], whole, made.tensors, wanted)
                checks += [(f"{paths[0].name}, {paths[1].name}", check) for check in chain]
    return Written(report, lines, checks)


def _described(side: Mapping[str, Any]) -> str:
    nodes, rules = len(side["nodes"]), side["rules"]
    by_rule = ", ".join(f"{count} by {rule}" for rule, count in rules.items() if count)
    return f"{nodes} nodes, all tagged ({by_rule}); takes {', '.join(side['inputs'])}"

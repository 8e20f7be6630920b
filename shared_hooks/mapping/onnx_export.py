"""Export a model as an ONNX graph whose nodes have origins.

torch's exporter runs the model's Python once. Our shims take part in that run as in any other, and label what is traced
with the running call and with the number of finished layers; torch's own labels do not distinguish a module's calls.
The graph is not fused: each node belongs to one call, and runtimes fuse it when they load a file.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.fx import traceback

from shared_hooks import devices
from shared_hooks.errors import IsthmusError, SpecError
from shared_hooks.forward import Session
from shared_hooks.mapping.map_file import HierarchyMap, parent_of
from shared_hooks.modules import ROOT, ModuleInfo, attach, call_name, fast_path_off, holder_modules, tables
from shared_hooks.planning import Plan
from shared_hooks.tensors import Buffers, Structure, UnknownHolder, classes_of, copied, flatten, tensors_in, unflatten

if TYPE_CHECKING:
    import onnx_ir


# The libraries needed only for ONNX files, and the error where they are missing or an export fails.


NEEDED: Final = ("onnx", "onnx_ir", "onnxscript", "onnxruntime")


class ExportFailed(SpecError):
    """The model cannot be exported to ONNX, or not in this way; the message gives the reason."""


def check(*names: str) -> None:
    """Raise SpecError before any work if a package is missing, with how to install it."""
    missing = [name for name in names or NEEDED if find_spec(name) is None]
    if missing:
        raise SpecError(f'{" and ".join(missing)} missing: pip install "isthmus[onnx]"')
    if not hasattr(traceback, "annotate"):
        raise SpecError("this torch cannot label what it exports: ONNX files need torch 2.9 or newer")


# A model in the exporter's form: tensors in, tensors out, each with a name. ONNX has no nested values.


class FlatModel(nn.Module):
    """Calls the model on the nested value of its tensors, and returns its output's tensors, depth first.

    ``names`` are those of the inputs: the argument's, then keys and indices (``past.0``). ``output_names``: the
    output's, once it has been called.
    """

    PREFIX: Final = "model."
    """Prefix of the model's parameter names here."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._find = classes_of(holder_modules(model))
        self._structure, self.tensors = flatten((args, dict(kwargs)))
        self.names = _unique(_input_names(model, self._structure, len(self.tensors)))
        self._seen = SimpleNamespace(output_names=[])  # the exporter undoes assignments to the module

    @property
    def output_names(self) -> list[str]:
        """Names of the last call's outputs."""
        found: list[str] = self._seen.output_names
        return found

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = unflatten(self._structure, list(tensors), self._find)
        structure, found = outputs_of(self.model(*args, **kwargs))
        names = _names(structure, "", len(found), "output")
        self._seen.output_names = _unique([f"output.{name}" if name in self.names else name for name in names])
        # a value that passes through unchanged would have one name for two things
        return tuple(tensor.clone() if any(tensor is one for one in tensors) else tensor for tensor in found)


def outputs_of(value: Any) -> tuple[Structure, list[torch.Tensor]]:
    """Return the tensors of a model's output, depth first, including those in holders that cannot be rebuilt."""
    try:
        return flatten(value)
    except UnknownHolder:
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            entries: list[Structure] = []
            tensors: list[torch.Tensor] = []
            for key, item in value.items():
                inner = list(dict.fromkeys(tensors_in(item)))
                places = [["t", len(tensors) + number] for number in range(len(inner))]
                entries.append([["v", key], places[0] if isinstance(item, torch.Tensor) else ["list", places]])
                tensors += inner
            return ["dict", entries], tensors
        found = list(dict.fromkeys(tensors_in(value)))
        return ["list", [["t", number] for number in range(len(found))]], found


def _input_names(model: nn.Module, structure: Structure, count: int) -> list[str]:
    args, kwargs = structure[1]
    places = list(inspect.signature(model.forward).parameters.values())
    named: list[list[Any]] = [[["v", key[1]], item] for key, item in kwargs[1]]
    for number, item in enumerate(args[1]):
        known = number < len(places) and places[number].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        named.append([["v", places[number].name if known else f"input.{number}"], item])
    return _names(["dict", named], "", count, "input")


def _names(structure: Structure, prefix: str, count: int, alone: str) -> list[str]:
    """Return the name of every tensor of a structure; ``alone`` if it has no path."""
    found: dict[int, str] = {}

    def down(node: Structure, path: str) -> None:
        kind = node[0]
        if kind == "t":
            found.setdefault(node[1], path or alone)
        elif kind in ("list", "tuple"):
            for number, item in enumerate(node[1]):
                down(item, f"{path or alone}.{number}")
        elif kind == "named":
            for number, item in enumerate(node[2]):
                down(item, f"{path or alone}.{number}")
        elif kind in ("dict", "map", "data"):
            for key, item in node[1] if kind == "dict" else node[2]:
                name = str(key[1]) if isinstance(key, list) else str(key)
                down(item, f"{path}.{name}" if path else name)

    down(structure, prefix)
    return [found.get(number, f"{alone}.{number}") for number in range(count)]


def _unique(names: list[str]) -> list[str]:
    taken: set[str] = set()
    found = []
    for name in names:
        while name in taken:
            name += "_"
        taken.add(name)
        found.append(name)
    return found


KEY: Final = "isthmus"
SMALL: Final = 1 << 16
"""Maximum elements of a constant folded from others in the export; larger ones stay operations."""


@dataclass(frozen=True)
class Label:
    """The call that was running when an operation was traced, the number of layers finished by then, the operation."""

    call: str
    done: int
    operation: str


@dataclass(frozen=True)
class Exported:
    """An exported graph. ``labels``: by node, of those that have one. ``tensors``: the inputs, by name."""

    model: onnx_ir.Model
    labels: Mapping[onnx_ir.Node, Label]
    tensors: Mapping[str, torch.Tensor]
    layers: tuple[str, ...]


def export(model: nn.Module, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exported:
    """Export a model for inputs of these shapes. Raises `ExportFailed`, and SpecError without the extra."""
    check()
    modules = tables.walk(model, plan.depth)
    flat = FlatModel(model, *copied(args, dict(kwargs))).eval()
    labeller = _Labeller(modules)
    random_state, buffers = devices.rng_state(), Buffers(model)
    for module in modules:
        attach.attach(module)
    try:
        with _quiet(), torch.no_grad(), fast_path_off():  # kernels, and so strides, depend on both until the end
            with _running(labeller), traceback.preserve_node_meta():
                program = torch.export.export(flat, tuple(flat.tensors), strict=False)
            _forget_others_notes(program)
            if not flat.output_names:
                raise ExportFailed("the model's output holds no tensor")
            made = _onnx_of(program, flat.names, flat.output_names)
            labels = _labels(made)
            _tidy(made.model)
    except IsthmusError:
        raise
    except Exception as error:
        raise ExportFailed(f"torch cannot export this model to ONNX: {_first_words(error)}") from error
    finally:
        for module in modules:
            attach.detach(module)
        buffers.restore()
        devices.set_rng_state(random_state)
    inputs = [value.name or "" for value in made.model.graph.inputs]
    if inputs != flat.names:
        raise ExportFailed(f"the exported graph takes {', '.join(inputs)}, where {', '.join(flat.names)} was expected")
    return Exported(made.model, labels, dict(zip(flat.names, flat.tensors, strict=True)), tuple(labeller.layers))


Free = Mapping[int, Sequence[int]]


def converted(
    module: nn.Module,
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[str],
    outputs: Sequence[str],
    free: Free | None = None,
) -> onnx_ir.Model:
    """Export a module from tensors to tensors, with these names. ``free``: by input, axes of any size.

    Raises `ExportFailed`.
    """
    check()
    free = free or {}
    sizes = tuple(dict.fromkeys(free[at], torch.export.Dim.AUTO) if at in free else None for at in range(len(tensors)))
    try:
        with _quiet(), torch.no_grad(), fast_path_off():
            program = torch.export.export(
                module, tuple(tensors), strict=False, dynamic_shapes=(sizes,) if free else None
            )
            made = _onnx_of(program, inputs, outputs)
            _tidy(made.model)
    except IsthmusError:
        raise
    except Exception as error:
        raise ExportFailed(f"torch cannot export this model to ONNX: {_first_words(error)}") from error
    found: onnx_ir.Model = made.model
    return found


def _onnx_of(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    made = torch.onnx.export(
        program,
        dynamo=True,
        optimize=False,
        verbose=False,
        input_names=list(inputs),
        output_names=list(outputs),
    )
    if made is None:
        raise ExportFailed("torch's exporter returned nothing")
    return made


class _Labeller(Session):
    """The exporter's session, which labels every traced operation."""

    banks = True

    def __init__(self, modules: dict[nn.Module, ModuleInfo]) -> None:
        super().__init__(modules, None)
        self.layers: list[str] = []
        self._annotation: AbstractContextManager[None] | None = None

    def run(self, info: ModuleInfo, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.stack:  # a run of its own: the last one counts
            self.counts.clear()
            self.layers.clear()
            self.next_layer = 0

        def labelled(*args: Any, **kwargs: Any) -> Any:
            self._label()
            return forward(*args, **kwargs)

        try:
            return super().run(info, labelled, args, kwargs)
        finally:
            self._label()

    def layer_done(self, info: ModuleInfo, call: int, output: Any) -> None:
        self.layers.append(call_name(info.path, call))

    def _label(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self.stack:
            info, call = self.stack[-1]
            label = (call_name(info.path, call), self.next_layer)
            self._annotation = traceback.annotate({KEY: label})
            self._annotation.__enter__()


def _forget_others_notes(program: torch.export.ExportedProgram) -> None:
    """Remove torch's own notes, which travel with our labels and break later steps of the exporter."""
    for node in program.graph.nodes:
        notes = node.meta.pop("custom", None) or {}
        if KEY in notes:
            node.meta["custom"] = {KEY: notes[KEY]}


def _labels(made: Any) -> dict[onnx_ir.Node, Label]:
    """Return the labels of ONNX nodes, through the traced operations that they were made of."""
    traced = {node.name: node for node in made.exported_program.graph.nodes}
    found = {}
    for node in made.model.graph.all_nodes():
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
        origin = traced.get(scopes.rpartition("'")[0].rpartition("'")[2])
        label = None if origin is None else (origin.meta.get("custom") or {}).get(KEY)
        if origin is not None and label is not None:
            found[node] = Label(label[0], label[1], str(origin.target))
    return found


def _tidy(model: onnx_ir.Model) -> None:
    """Fold constants and drop unused nodes, without fusing any."""
    import onnx_ir.passes.common as passes
    from onnxscript.optimizer import fold_constants

    fold_constants(model, input_size_limit=SMALL, output_size_limit=SMALL)
    for step in (
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.NameFixPass(),
    ):
        step(model)
    weights = model.graph.initializers
    for value in [value for name, value in weights.items() if name.startswith(FlatModel.PREFIX)]:
        name = (value.name or "").removeprefix(FlatModel.PREFIX)  # in the model's call
        value.name = value.name if name in weights else name
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # paths of this machine, and scopes that our own replace
    model.metadata_props.clear()


def _first_words(error: BaseException) -> str:
    """Return the innermost reason: the exporter wraps it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


@contextmanager
def _running(session: Session) -> Iterator[None]:
    token = attach.running.set(session)
    try:
        yield
    finally:
        attach.running.reset(token)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which warns of missing libraries and its own calls, and prints graphs when it fails."""
    noisy = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in noisy]
    try:
        for logger in noisy:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)


# Tags on the nodes of an ONNX graph, and the sidecar that lists them. Every node gets one.
#
# By four rules, in this order: ``scope``, the label of the call that was running when the node was traced;
# ``parent``, where the map does not have that call, the nearest module above that it has; ``operation``, for a node
# that the exporter made of others, the innermost call that holds all nodes that read it, else all that it reads;
# ``root``, the model.


FORMAT: Final = "isthmus-onnx-tags"
VERSION: Final = 1
RULES: Final = ("scope", "parent", "operation", "root")
TAG, CALL, RULE, DONE = "isthmus.tag", "isthmus.call", "isthmus.rule", "isthmus.layers_done"
"""Keys of a node's ``metadata_props``."""
LARGE: Final = 1 << 30
"""Bytes of weights from which they are stored beside the file, which is limited to 2 GiB."""


@dataclass(frozen=True)
class NodeTag:
    """A node's origin, and the rule that found it. ``done``: number of layers finished before it ran."""

    call: str
    tag: str
    rule: str
    done: int
    operation: str = ""


def tag_nodes(
    model: onnx_ir.Model, labels: Mapping[onnx_ir.Node, Label], known: HierarchyMap
) -> dict[onnx_ir.Node, NodeTag]:
    """Tag every node of the graph and its subgraphs, in the nodes' metadata, too."""
    nodes = list(model.graph.all_nodes())
    calls: dict[onnx_ir.Node, str] = {}
    rules: dict[onnx_ir.Node, str] = {}
    for node in nodes:
        label = labels.get(node)
        if label is None:
            continue
        if label.call in known.by_call:
            calls[node], rules[node] = label.call, "scope"
        elif (above := _known_above(label.call, known)) is not None:
            calls[node], rules[node] = above, "parent"
    for node in reversed(nodes):
        if node not in calls and (readers := [calls[user] for user in _readers(node) if user in calls]):
            calls[node], rules[node] = _common(readers, known), "operation"
    for node in nodes:
        if node not in calls and (read := [calls[maker] for maker in _makers(node) if maker in calls]):
            calls[node], rules[node] = _common(read, known), "operation"
    root = ROOT if ROOT in known.by_call else known.calls[0].name
    found: dict[onnx_ir.Node, NodeTag] = {}
    done = 0
    for node in nodes:
        label, call = labels.get(node), calls.get(node, root)
        if label is not None:  # nodes are in the order in which they ran; a rebuilt view has its first label
            done = max(done, label.done)
        tag = NodeTag(
            call, known.by_call[call].tag, rules.get(node, "root"), done, "" if label is None else label.operation
        )
        node.metadata_props.update({TAG: tag.tag, CALL: tag.call, RULE: tag.rule, DONE: str(tag.done)})
        found[node] = tag
    return found


def _known_above(call: str, known: HierarchyMap) -> str | None:
    path: str | None = tables.call_parts(call)[0]
    while path is not None:
        if path in known.by_call and path != ROOT:
            return path
        path = parent_of(path)
    return None


def _common(calls: Iterable[str], known: HierarchyMap) -> str:
    """Return the innermost call that contains all of the calls."""
    chains = [[entry.name for entry in known.chain(call)] for call in set(calls)]
    shared = ""
    for names in zip(*chains, strict=False):
        if len(set(names)) > 1:
            break
        shared = names[0]
    return shared


def _readers(node: onnx_ir.Node) -> list[onnx_ir.Node]:
    return [usage.node for value in node.outputs for usage in value.uses()]


def _makers(node: onnx_ir.Node) -> list[onnx_ir.Node]:
    makers = [value.producer() for value in node.inputs if value is not None]
    return [maker for maker in makers if maker is not None]


def sidecar_path(path: str | Path) -> Path:
    """Return ``digits.onnx.json`` for ``digits.onnx``."""
    return Path(f"{path}.json")


def sidecar(
    model: onnx_ir.Model, tags: Mapping[onnx_ir.Node, NodeTag], known: HierarchyMap, **more: Any
) -> dict[str, Any]:
    """Return the sidecar of one ONNX file: its nodes in order, the number of tags by rule, and calls without a node."""
    rules = Counter(tag.rule for tag in tags.values())
    seen = {entry.name for tag in tags.values() for entry in known.chain(tag.call)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": known.model,
        "plan_digest": known.plan_digest,
        **more,
        "inputs": [value.name for value in model.graph.inputs],
        "outputs": [value.name for value in model.graph.outputs],
        "rules": {rule: rules.get(rule, 0) for rule in RULES},
        "calls_without_node": [entry.name for entry in known.calls if entry.name not in seen],
        "nodes": [
            {
                "name": node.name,
                "op_type": node.op_type,
                "tag": tag.tag,
                "call": tag.call,
                "rule": tag.rule,
                "operation": tag.operation,
            }
            for node, tag in tags.items()
        ],
    }


def write(model: onnx_ir.Model, side: Mapping[str, Any], path: str | Path) -> None:
    """Write the ONNX file (large weights beside it, in FILE.data) and its sidecar. Raises SpecError."""
    import onnx_ir

    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    target = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            made = Path(folder, target.name)
            onnx_ir.save(model, made, external_data=f"{target.name}.data" if weights > LARGE else None)
            sidecar_path(made).write_text(json.dumps(side, indent=1) + "\n", encoding="utf-8")
            for file in Path(folder).iterdir():
                os.replace(file, target.with_name(file.name))
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror or error}") from error

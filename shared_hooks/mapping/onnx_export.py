"""A model as an ONNX graph whose nodes know where they come from.

torch's exporter runs the model's Python once. Our shims stand in that run as in any other, and label what is traced
with the running call and with the number of layers that are done; torch's own labels forget which call of a module it
was. The graph is not fused: each node belongs to one call, and runtimes fuse by themselves when they load a file.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.fx import traceback

from shared_hooks.errors import IsthmusError
from shared_hooks.forward import Session, layer_name
from shared_hooks.mapping.onnx_flat import FlatModel
from shared_hooks.mapping.onnx_needs import ExportFailed, check
from shared_hooks.modules import ModuleInfo, attach, fast_path_off, hierarchy
from shared_hooks.planning import Plan
from shared_hooks.tensors import Buffers, copied

if TYPE_CHECKING:
    import onnx_ir

KEY: Final = "isthmus"
SMALL: Final = 1 << 16
"""Elements of a constant that may be made of others while exporting; larger ones stay operations."""


@dataclass(frozen=True)
class Label:
    """The call that was running when an operation was traced, the layers that were done by then, the operation."""

    call: str
    done: int
    operation: str


@dataclass(frozen=True)
class Exported:
    """``labels``: by node, of those that have one. ``tensors``: the inputs, by name."""

    model: onnx_ir.Model
    labels: Mapping[onnx_ir.Node, Label]
    tensors: Mapping[str, torch.Tensor]
    layers: tuple[str, ...]


def export(model: nn.Module, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exported:
    """The graph of a model on these inputs, of their shapes. Raises `ExportFailed`, and SpecError without the extra."""
    check()
    modules = hierarchy.walk(model, plan.depth)
    flat = FlatModel(model, *copied(args, dict(kwargs))).eval()
    labeller = _Labeller(modules)
    random_state, buffers = torch.get_rng_state(), Buffers(model)
    for module in modules:
        attach.attach(module)
    try:
        with _quiet(), torch.no_grad(), fast_path_off():  # kernels, and so strides, hang on both, to the end
            with _running(labeller), traceback.preserve_node_meta():
                program = torch.export.export(flat, tuple(flat.tensors), strict=False)
            _forget_others_notes(program)
            if not flat.output_names:
                raise ExportFailed("the model's output holds no tensor")
            made = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                input_names=flat.names,
                output_names=flat.output_names,
            )
            if made is None:
                raise ExportFailed("torch's exporter returned nothing")
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
        torch.set_rng_state(random_state)
    inputs = [value.name or "" for value in made.model.graph.inputs]
    if inputs != flat.names:
        raise ExportFailed(f"the exported graph takes {', '.join(inputs)}, where {', '.join(flat.names)} was expected")
    return Exported(made.model, labels, dict(zip(flat.names, flat.tensors, strict=True)), tuple(labeller.layers))


class _Labeller(Session):
    """The session of the exporter's run: every operation that is traced gets a label."""

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

    def layer_done(self, frame: Any, output: Any) -> None:
        self.layers.append(layer_name(frame))

    def _label(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self.stack:
            label = (layer_name(self.stack[-1]), self.next_layer)
            self._annotation = traceback.annotate({KEY: label})
            self._annotation.__enter__()


def _forget_others_notes(program: torch.export.ExportedProgram) -> None:
    """Torch's own notes travel with our labels, and the exporter's later steps trip over them."""
    for node in program.graph.nodes:
        notes = node.meta.pop("custom", None) or {}
        if KEY in notes:
            node.meta["custom"] = {KEY: notes[KEY]}


def _labels(made: Any) -> dict[onnx_ir.Node, Label]:
    """The labels of ONNX nodes, by way of the traced operation that each was made of."""
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
    """Constants made of constants are computed, nodes nobody reads are dropped; nothing is fused."""
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
        name = (value.name or "").removeprefix(FlatModel.PREFIX)  # as the model calls it
        value.name = value.name if name in weights else name
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # paths of this machine, and scopes that we know better
    model.metadata_props.clear()


def _first_words(error: BaseException) -> str:
    """The innermost reason: the exporter wraps it in pages of advice."""
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
    """The exporter warns of libraries that are not installed, of its own calls, and prints graphs when it fails."""
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

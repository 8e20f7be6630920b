"""Load a model and its inputs from what a user has: a name, a file or a module; files or arrays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import torch
from rich.console import Console
from rich.text import Text
from rich.tree import Tree
from torch import nn

from edge_client.credentials import Credentials
from edge_client.model_choice import Inputs, ModelChoice
from edge_client.screen import printable
from edge_client.settings import OWN, server_of
from edge_client.survey import models_of
from edge_client.user_input import LoadedModel, NamedInput, fails_on, name_of, named_inputs
from shared_hooks import WrappedModel
from shared_hooks.config import resolve
from shared_hooks.errors import IsthmusError, SpecError
from shared_hooks.mapping import Coverage, HierarchyMap, ModuleEntry
from shared_hooks.models import ModelSpec
from shared_hooks.models.inputs import inputs_of_text, to_device

if TYPE_CHECKING:
    pass


# The hierarchy map and its coverage report for the terminal.


WIDE = 1000
"""Columns where the output is no terminal, and lines may be long."""
LISTED = 8


def print_tree(known: HierarchyMap, stdout: TextIO) -> None:
    """Print the module tree: tag, name, the layers each module ran as, and the operations between its submodules."""
    layers: dict[str, list[int]] = defaultdict(list)
    for call in known.calls:
        if call.layer_id is not None:
            layers[call.path].append(call.layer_id)
    operations: dict[str, Counter[str]] = defaultdict(Counter)
    for operation in known.operations:
        operations[known.by_call[operation.call].path][operation.name] += 1
    trees: dict[str, Tree] = {}
    top: Tree | None = None
    for module in known.modules:
        row = _row(module, layers[module.path])
        tree = trees[module.path] = Tree(row) if module.parent is None else trees[module.parent].add(row)
        top = top or tree
        if module.path in operations:
            tree.add(Text(_counted(operations[module.path]), style="dim italic"))
    console = Console(file=stdout, highlight=False, width=None if stdout.isatty() else WIDE)
    if top is not None:
        console.print(top)


def _row(module: ModuleEntry, layers: list[int]) -> Text:
    row = Text(printable(module.tag.rpartition("/")[2]), style="bold" if module.calls else "dim", no_wrap=True)
    if module.parent is not None:
        row.append(f"  {printable(module.path)}", style="not bold dim")
    if len(layers) == 1:
        row.append(f"  layer {layers[0]}", style="not bold")
    elif layers:
        shown = ", ".join(map(str, layers[:LISTED])) + (", …" if len(layers) > LISTED else "")
        row.append(f"  layers {shown}", style="not bold")
    if module.calls > 1:
        row.append(f"  {module.calls} calls", style="not bold")
    if not module.calls and not module.holder:
        row.append("  never called", style="not dim")
    if module.names:
        row.append(f"  also {', '.join(map(printable, module.names))}", style="not bold dim")
    return row


def coverage_text(report: Coverage) -> str:
    """Format a coverage report, one line per item."""
    lines = [
        f"modules: {report.modules}, of them {len(report.both)} ran",
        f"only static: {_listed('never called', report.unused)}; {_listed('only hold others', report.holders)}",
        f"only dynamic: {sum(report.functional.values())} operations between modules"
        + (f" ({_counted(Counter(report.functional))})" if report.functional else ""),
        f"called again: {_listed('modules', [f'{path} ×{times}' for path, times in report.repeated.items()])}",
        "parents before children: "
        + (_listed("calls from elsewhere", report.from_elsewhere) if report.from_elsewhere else "yes, all calls"),
    ]
    return "\n".join(lines)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ×{times}" if times > 1 else name for name, times in counts.most_common())


def _listed(what: str, names: tuple[str, ...] | list[str]) -> str:
    if not names:
        return f"0 {what}"
    rest = f", … {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {what} ({', '.join(map(printable, names[:LISTED]))}{rest})"


Model = str | Path | ModelSpec | nn.Module | ModelChoice
"""A model's name, a TOML file, "module:callable", a module in eval mode, or a choice with device, threads and
weights.
"""


NO_EXAMPLE: Final = "no example input to plan on; give one with --input, in Python as inputs"


@dataclass(frozen=True)
class ModuleSpec(ModelSpec):
    """A user's module in the place of a spec."""

    module: nn.Module | None = None

    def load_model(self, device: torch.device | str = "cpu") -> nn.Module:
        """Return the module, moved to ``device``."""
        assert self.module is not None
        return self.module.to(device)


@dataclass(frozen=True)
class Subject:
    """A model and its inputs. ``server``: an address, or None for our own server or none."""

    choice: ModelChoice
    spec: ModelSpec
    inputs: Sequence[NamedInput]

    @property
    def by_name(self) -> bool:
        """Whether another process can load the model, too."""
        return isinstance(self.choice.model, str)

    @property
    def file(self) -> str | None:
        """The path of the first input, if it is a file."""
        item = self.inputs[0].item if self.inputs else None
        return None if item is None else str(item.path)

    def check_factory(self) -> None:
        """Raise SpecError if the model's factory cannot be found."""
        if not isinstance(self.spec, ModuleSpec):
            resolve(self.spec.factory, self.spec.folder, f"{self.spec.origin}: factory")

    def load(self, *, on_inputs: bool = False, shallow: bool = False) -> LoadedModel:
        """Load, wrap and plan the model.

        It is planned on the spec's example, which a server measures, too; without one, or with ``on_inputs``, on the
        first usable input. ``shallow``: layers are the choice's `depth` deep, for tasks without a server. Raises what
        reading or planning raises, and SpecError if there is nothing to plan on.
        """
        device = self.choice.set_up()
        example = None if on_inputs and self.inputs else self.spec.example(device)
        if example is None and not self.inputs:
            self.check_factory()
            raise SpecError(f"{self.spec.origin}: {NO_EXAMPLE}")
        wrapped = WrappedModel(self.spec.load_model(device), depth=self.choice.depth if shallow else None)
        problem: IsthmusError | None = None
        for each in [None] if example is not None else self.inputs:
            inputs: Inputs | None = None
            try:
                args, kwargs = example if each is None and example is not None else each.read(self.spec)  # type: ignore[union-attr]
                inputs = args, kwargs = to_device(args, device), to_device(kwargs, device)
                return LoadedModel(self.choice, self.spec, wrapped, args, kwargs, wrapped.plan(*args, **kwargs).digest)
            except IsthmusError as error:
                problem = problem or error
            except Exception as error:
                wrapped.detach()
                name = None if each is None else each.name
                raise fails_on(self.spec, name, error, wrapped.model, inputs) from error
            except BaseException:
                wrapped.detach()
                raise
        wrapped.detach()
        assert problem is not None
        raise problem


def address_of(server: str | None) -> str | None:
    """Resolve a server as all commands do (`edge_client.settings`): HOST:PORT, "own", or None.

    Raises SpecError for an invalid address.
    """
    try:
        return server_of(server, option="server").address
    except SpecError as error:
        if server is None:
            raise
        raise SpecError(
            f'{error}; the server comes first, then the model (None, "own" or "none" without one)'
        ) from None


def subject_of(
    model: Model, inputs: Any = None, server: str | None = None, credentials: Credentials | None = None
) -> Subject:
    """Make a subject without loading anything. A module without a `model_id` is the one model that ``server`` serves.

    Raises SpecError, UnknownModel, InputMismatch.
    """
    choice = ModelChoice.of(str(model) if isinstance(model, Path) else model)
    items = named_inputs(inputs)
    if not isinstance(choice.model, nn.Module):
        if not isinstance(choice.model, (str, ModelSpec)):
            raise SpecError(
                "a model is a name, a TOML file, a torch.nn.Module, a ModelSpec or a ModelChoice, not "
                f"{type(choice.model).__name__}"
            )
        spec = choice.spec()
        return Subject(choice, spec if choice.model_id is None else replace(spec, model_id=choice.model_id), items)
    if choice.model.training:
        raise SpecError("the module is in training mode: call its eval() first")
    name = choice.model_id or (_served(server, credentials) if server not in (None, OWN) else None)
    spec = ModuleSpec(
        name or type(choice.model).__name__,
        "the given module",
        Path.cwd(),
        f"{type(choice.model).__module__}:{type(choice.model).__qualname__}",
        module=choice.model,
    )
    held = next((one for one in items if one.item is None), None)
    example = inputs_of_text(choice.example) if isinstance(choice.example, str) else choice.example
    if example is not None:
        spec = replace(spec, _example=lambda: (example[0], dict(example[1])))
    elif held is not None:
        spec = replace(spec, _example=partial(held.read, spec))
    return Subject(replace(choice, model=spec, weights=(), selection=None, model_id=None, example=None), spec, items)


def _served(server: str | None, credentials: Credentials | None) -> str | None:
    assert server is not None
    names = sorted({name_of(one.model_id) for one in models_of(server, credentials)})
    if len(names) > 1:
        raise SpecError(
            f"{server} serves {', '.join(names)}: say which of them the module is: ModelChoice(module, model_id=...)"
        )
    return names[0] if names else None

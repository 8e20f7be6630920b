"""A recipe: what the tail does to get past the prefix of one cut. The tail's side makes it (`rehearsal`); never sent.

*Steps* say what the replay does at each module call and operation of the prefix that is not simply run again; a
*source* says where a tensor that a step gives comes from. `explain` prints both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shared_hooks.crossing import Crossing, Fill, TensorForm
from shared_hooks.modules import ROOT
from shared_hooks.showing import short
from shared_hooks.state import PythonState
from shared_hooks.tensors import Structure, View, dtype_name

# -- sources ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Injected:
    """A view of a slot. ``flags``: c = conjugated, n = negated view."""

    slot: int
    view: View
    dtype: torch.dtype
    flags: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Hole:
    """A placeholder: nothing of it is read after the cut."""

    form: TensorForm


@dataclass(frozen=True, slots=True)
class Argument:
    """The ``number``-th tensor argument itself."""

    number: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A view of the storage of the ``number``-th tensor argument, which depends on the inputs or is made before the
    cut.
    """

    number: int
    view: View
    dtype: torch.dtype
    flags: str = ""


Source = Injected | Hole | Argument | Alias

# -- steps ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enter:
    """A module call that is run by its own code. ``later``: wholly behind a branch cut, but not to be run unwatched."""

    path: str
    later: bool = False


@dataclass(frozen=True, slots=True)
class Skip:
    """A stub: the module's call is answered at once."""

    path: str
    structure: Structure
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """An operation that is not run. ``below``: a kernel that no torch function stands for; ``draws``: random numbers,
    which need no tensor of the prefix; ``fills``: slots whose content goes to an argument's storage now; ``taints``:
    arguments whose storage began as a constant and holds values that depend on the inputs from here on; ``inside``: the
    path of the module whose code calls it.
    """

    name: str
    structure: Structure
    sources: tuple[Source, ...]
    fills: tuple[Fill, ...] = ()
    taints: tuple[int, ...] = ()
    below: bool = False
    draws: bool = False
    inside: str = ""


@dataclass(frozen=True, slots=True)
class ReadValue:
    """A Python value that was read from data: the ``number``-th of those that came with the request."""

    name: str
    number: int
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """An operation that needs the form of its arguments only, and is run. ``below``: as of an `Answer`. ``later``: it
    is behind a branch cut, and runs on what is there; ``taints``: as of an `Answer`; ``hangs``: those of its results
    that depend on the inputs.
    """

    name: str
    inside: str = ""
    below: bool = False
    later: bool = False
    taints: tuple[int, ...] = ()
    hangs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Through:
    """A module call that is wholly behind a branch cut, though it comes before its end: it runs as it is. ``layer``:
    the id of its first layer; ``counts``: how often each module was called before it; ``hangs``: as of a `Run`.
    """

    path: str
    layer: int
    counts: tuple[tuple[str, int], ...]
    hangs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The cut layer returns."""

    path: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """What is due after the last step."""

    name: str = "nothing"


Step = Enter | Skip | Answer | ReadValue | Run | Through | End
NOTHING = Nothing()


def label(step: Step | Nothing) -> str:
    """What a step is about: ``"skip stem.0"``, ``"answer add"``."""
    name = step.path if isinstance(step, (Enter, Skip, Through, End)) else step.name
    return name if isinstance(step, Nothing) else f"{_VERBS[type(step)]} {name}"


_VERBS = {
    Enter: "enter",
    Skip: "skip",
    Answer: "answer",
    ReadValue: "read",
    Run: "run",
    Through: "run",
    End: "end",
}


@short
@dataclass(eq=False)
class Recipe:
    """How to resume after one cut. ``counts``: how often each module was called before it.

    ``cache``: what the replays of this recipe share, by device. ``state``: the model's Python state before a tail.
    ``is_open``: data may decide on the path, so that a tail may leave what nobody has seen before, be it Python state
    or what it writes into ``kept``, the tensors that are the model's. ``most``: bytes that what comes after the cut may
    take, where that could not be foreseen; None where it was.
    """

    crossing: Crossing
    inputs: tuple[Source, ...]
    steps: tuple[Step, ...]
    counts: dict[str, int]
    seconds: float = 0.0
    state: PythonState | None = field(default=None, repr=False)
    is_open: bool = True
    most: int | None = None
    kept: list[torch.Tensor] = field(default_factory=list, repr=False)
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def versions(self) -> list[int]:
        """How often each of the model's tensors was written; nothing where no tail writes what no plan has seen."""
        return [tensor._version for tensor in self.kept if not tensor.is_inference()] if self.is_open else []

    def explain(self) -> Iterator[str]:
        """The steps as text, a line each, indented by module."""
        for step in self.steps:
            path = step.path if isinstance(step, (Enter, Skip, Through, End)) else step.inside
            depth = 0 if path in ("", ROOT) else path.count(".") + 1
            sources = getattr(step, "sources", ())
            given = f": {', '.join(map(_said, sources))}" if sources else ""
            yield f"{'  ' * (depth + (not isinstance(step, (Enter, Skip, Through, End))))}{label(step)}{given}"


def _said(source: Source) -> str:
    if isinstance(source, Injected):
        return f"slot {source.slot} as {_shape(source.view.shape, source.dtype)}"
    if isinstance(source, Hole):
        return f"placeholder {_shape(source.form.shape, source.form.dtype)}"
    if isinstance(source, Argument):
        return f"its argument {source.number}"
    return f"a view of its argument {source.number}"


def _shape(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)}[{', '.join(map(str, shape))}]"

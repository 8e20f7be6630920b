"""What goes into a model and what comes out, by name: for those who ask without holding it themselves.

Names are the field's own: parameters of the model's ``forward``, keys and attributes of what it returns. A tensor
within a list or tuple has its number after a point (``states.0``); an output without a name is ``output``. Shapes are
those of the spec's example, with -1 for a size that may be another: that is tried, by running the model on its example
with that size doubled, in all inputs that have it at the same place.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shared_hooks import Plan
from shared_hooks.errors import CutRefused, InputMismatch
from shared_hooks.state import PythonState
from shared_hooks.tensors import Structure, dtype_name, flatten, unflatten

TRIALS_SECONDS = 1.0
"""No further size is tried beyond this; what was not tried is said to be fixed."""
OUTPUT = "output"

Form = dict[str, Any]
"""JSON-able. ``inputs``, ``outputs``: lists of [name, dtype, shape]; ``cut``: the description of the cut "input" on the
example. Or ``refused`` alone: why the model cannot be asked by names.
"""


def form_of(plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    """The form of a model's example, on which ``plan`` was made. Runs the model."""
    try:
        crossing = plan.cutting("input")[1]
        structure, tensors = flatten((args, kwargs))
        names = dict(leaves(_by_parameter(model, structure), ""))
        if [node[1] for node in names.values() if node[0] == "t"] != list(range(len(tensors))):
            raise InputMismatch("two of the inputs of its example are one tensor, or have one name")
        shapes, outputs = _tried(model, structure, tensors)
    except (CutRefused, InputMismatch) as error:
        return {"refused": str(error)}
    except Exception as error:  # a model's own code may raise anything; who brings a plan is served none the less
        return {"refused": f"it fails on its example, beside its plan: {type(error).__name__}: {error}"}
    named = [name for name, node in names.items() if node[0] == "t"]
    inputs = [[name, dtype_name(one.dtype), shape] for name, one, shape in zip(named, tensors, shapes, strict=True)]
    return {"inputs": inputs, "outputs": outputs, "cut": crossing.to_bytes().decode()}


def leaves(structure: Structure, root: str = OUTPUT) -> Iterator[tuple[str, Structure]]:
    """The leaves of a structure (`shared_hooks.tensors.trees`), tensors and literals, each with its name."""
    kind = structure[0]
    if kind in ("t", "v", "x", "enum"):
        yield root, structure
    elif kind in ("list", "tuple"):
        yield from _numbered(structure[1], root)
    elif kind == "named":
        yield from _numbered(structure[2], root)
    else:
        entries = structure[1] if kind == "dict" else [(["v", key], item) for key, item in structure[2]]
        inner = "" if root in ("", OUTPUT) else f"{root}."
        for key, item in entries:
            yield from leaves(item, f"{inner}{key[1]}")


def _numbered(items: list[Structure], root: str) -> Iterator[tuple[str, Structure]]:
    for number, item in enumerate(items):
        yield from leaves(item, f"{root}.{number}" if root else str(number))


def _by_parameter(model: nn.Module, structure: Structure) -> Structure:
    """The structure of (args, kwargs) as one dictionary, by the parameters of the model's forward."""
    _, ((_, args), (_, kwargs)) = structure
    parameters = list(inspect.signature(model.forward).parameters.values())
    entries: list[list[Any]] = []
    for number, item in enumerate(args):
        known = parameters[number] if number < len(parameters) else parameters[-1]
        rest = known.kind is known.VAR_POSITIONAL or number >= len(parameters)
        first = next((at for at, one in enumerate(parameters) if one.kind is one.VAR_POSITIONAL), 0)
        entries.append([["v", f"{known.name}.{number - first}" if rest else known.name], item])
    return ["dict", entries + kwargs]


def _tried(model: nn.Module, structure: Structure, tensors: list[torch.Tensor]) -> tuple[list[Any], list[list[Any]]]:
    """The inputs' shapes, and the outputs' names, dtypes and shapes, with -1 where a size was seen to be free."""
    began, state = time.monotonic(), PythonState(model)
    try:
        with buffers_kept(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs, results = _run(model, structure, tensors)
            shapes, given = [list(one.shape) for one in tensors], [list(one.shape) for one in results]
            for dim, size in sorted({(dim, size) for one in tensors for dim, size in enumerate(one.shape) if size}):
                if time.monotonic() - began > TRIALS_SECONDS:
                    break
                chosen = [n for n, one in enumerate(tensors) if one.dim() > dim and one.shape[dim] == size]
                wider = [torch.cat([one, one], dim) if n in chosen else one for n, one in enumerate(tensors)]
                try:
                    again, found = _run(model, structure, wider)
                except Exception:  # whatever a model raises for a size that it does not take
                    continue
                finally:
                    state.restore()
                if again != outputs or any(a.dim() != b.dim() for a, b in zip(results, found, strict=True)):
                    continue  # other outputs: it is not the same question
                for n in chosen:
                    shapes[n][dim] = -1
                for n, one in enumerate(found):
                    given[n] = [
                        -1 if a != b else kept for a, b, kept in zip(one.shape, results[n].shape, given[n], strict=True)
                    ]
    finally:
        state.restore()
    named = [(name, node[1]) for name, node in leaves(outputs) if node[0] == "t"]
    return shapes, [[name, dtype_name(results[n].dtype), given[n]] for name, n in named]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """What the model writes to its own memory in the block is put back: the other side did not run it so often."""
    before = [(one, one._version, one.detach().clone()) for one in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, version, kept in before:
                if one._version != version:
                    one.copy_(kept)


def _run(model: nn.Module, structure: Structure, tensors: list[torch.Tensor]) -> tuple[Structure, list[torch.Tensor]]:
    """The outputs on copies of these tensors: a model may write to its inputs."""
    args, kwargs = unflatten(structure, [one.clone() for one in tensors])
    return flatten(model(*args, **kwargs))

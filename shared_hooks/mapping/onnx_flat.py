"""A model as the exporter takes it: tensors in, tensors out, each with a name. ONNX knows no nested values."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from shared_hooks.modules import holder_modules
from shared_hooks.tensors import Structure, UnknownHolder, classes_of, flatten, tensors_in, unflatten


class FlatModel(nn.Module):
    """Calls the model on the nested value that its tensors stand for, and gives its output's tensors, depth first.

    ``names`` are those of the inputs: the argument's, then keys and places (``past.0``). ``output_names``: the
    output's, once it has been called.
    """

    PREFIX: Final = "model."
    """Before the names that the model's parameters have here."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._find = classes_of(holder_modules(model))
        self._structure, self.tensors = flatten((args, dict(kwargs)))
        self.names = _unique(_input_names(model, self._structure, len(self.tensors)))
        self._seen = SimpleNamespace(output_names=[])  # the exporter undoes what is assigned to the module

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
        # what passes through unchanged would have one name for two things
        return tuple(tensor.clone() if any(tensor is one for one in tensors) else tensor for tensor in found)


def outputs_of(value: Any) -> tuple[Structure, list[torch.Tensor]]:
    """The tensors of a model's output, depth first, through holders that nobody could rebuild, too."""
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
    """The name of every tensor of a structure; ``alone`` where there is nothing to name it by."""
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

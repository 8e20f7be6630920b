"""What a model gives, on the wire. A state in it is named, not sent; a tensor that the edge has is named, too.

["s", number]  the tensor of that number in the message        ["in", number]  an input
["call", path, count, number]  what a call before the cut gave      ["top" ...], ["token" ...], ["drawn" ...]  `wanted`
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shared_hooks.errors import MALFORMED, BadFrame
from shared_hooks.generation.holders import is_state
from shared_hooks.generation.remote_tensor import Origin, Part, RemoteTensor, value_of
from shared_hooks.tensors import ClassFinder, class_name, flatten, unflatten

STATE = 0


_DICTIONARIES = frozenset(map(class_name, (dict, OrderedDict, defaultdict)))
"""Classes of results that come as plain dictionaries."""


def _parts(output: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """What holds the parts (a class's name, or a kind), and the parts by key."""
    if isinstance(output, dict):
        return class_name(type(output)), list(output.items())
    if type(output) in (tuple, list):
        return type(output).__name__, list(enumerate(output))
    return "", [(0, output)]


def said(
    output: Any, inputs: list[torch.Tensor], short: Callable[[str, torch.Tensor], Any]
) -> tuple[Any, list[Any], list[torch.Tensor]]:
    """(structure, leaves, tensors). ``short`` gives, for a tensor and the name it has, what is said instead: a leaf and
    tensors, or None. Raises `RemoteRead` for what is not here and cannot be named.
    """
    holder, parts = _parts(output)
    given = {id(tensor): number for number, tensor in enumerate(inputs)}
    structure, leaves = [], []
    tensors: list[torch.Tensor] = []
    for key, value in parts:
        if is_state(value):
            structure.append([key, STATE])
            continue
        part, found = flatten(value)
        structure.append([key, part, len(found)])
        for tensor in found:
            leaves.append(_leaf(tensor, str(key), given, tensors, short))
    return [holder, structure], leaves, tensors


def _leaf(
    tensor: torch.Tensor,
    name: str,
    given: dict[int, int],
    tensors: list[torch.Tensor],
    short: Callable[[str, torch.Tensor], Any],
) -> Any:
    if id(tensor) in given:
        return ["in", given[id(tensor)]]
    if type(tensor) is RemoteTensor:
        origin = tensor.origin
        if isinstance(origin, Origin) and origin.kind == "call":
            return ["call", origin.path, origin.count, origin.number]
        if isinstance(origin, Part) or origin is None:
            tensor = value_of(tensor, f'"{name}" of the result')
        elif origin.kind == "input":
            return ["in", origin.number]
        else:
            value_of(tensor, f'"{name}" of the result')  # raises: it is part of a state, and is not given away
    instead = short(name, tensor)
    if instead is not None:
        leaf, extra = instead
        tensors += extra
        return [*leaf, len(tensors) - len(extra)]
    tensors.append(tensor)
    return ["s", len(tensors) - 1]


def heard(structure: Any, leaves: Any, find: ClassFinder, leaf: Callable[[Any], torch.Tensor], state: Any) -> Any:
    """The output on the edge. ``leaf`` finds the tensor of one leaf. Raises BadFrame."""
    try:
        holder, parts = structure
        values = iter([leaf(one) for one in leaves])
        found = [(key, state if rest[0] == STATE else _part(rest, values, find)) for key, *rest in parts]
    except (*MALFORMED, StopIteration) as error:
        raise BadFrame(f"malformed answer to a step: {error!s:.120}") from error
    if holder == "":
        return found[0][1]
    if holder in ("tuple", "list"):
        items = [value for _, value in found]
        return tuple(items) if holder == "tuple" else items
    cls = find(holder)
    if cls is None and holder not in _DICTIONARIES:
        raise BadFrame(f"the answer to a step is of a class that this model does not have: {holder!r:.80}")
    return dict(found) if cls is None else cls(**dict(found))


def _part(rest: Any, values: Iterator[torch.Tensor], find: ClassFinder) -> Any:
    part, count = rest
    return unflatten(part, [next(values) for _ in range(count)], find)

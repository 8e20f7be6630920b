"""Why a model raised, where its inputs say so: beside what its forward takes, and beside an example that it takes.

Asked only after it raised: models take more than their example shows, and nothing that one takes is ever refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from edge_client.inputs.swallowed import NEAR, OWN
from edge_client.model_choice import Inputs
from edge_client.screen.text import one_line
from shared_hooks.errors import InputMismatch, near

MOST: Final = 200
"""Characters of what the model said; the whole is the cause."""
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def unfit(model: nn.Module, inputs: Inputs, example: Inputs | None, error: Exception) -> InputMismatch | None:
    """In one line, what is wrong with ``inputs``, on which ``model`` raised ``error``; None where nothing seems to be.

    Wrong are names that its forward does not have, too many arguments or too few, and, beside the ``example``, another
    dtype or rank, or something that is no tensor where one belongs. A size may be any: `another_size`.
    """
    found = _misnamed(model, inputs, example) or next(_unlike(model, inputs, example), "") or _no_tensor(model, inputs)
    if not found:
        return None
    said = one_line(f"{type(error).__name__}: {error}")
    return InputMismatch(f"{found} (the model: {said if len(said) <= MOST else said[: MOST - 1] + '…'})")


def another_size(model: nn.Module, inputs: Inputs, example: Inputs | None) -> str:
    """For the end of a message: that the example's first input is missing, or which is of another size beyond the
    batch; "" where neither is so.
    """
    if example is None:
        return ""
    ours, theirs = _by_name(model, inputs), _by_name(model, example)
    if (first := next(iter(theirs), None)) is not None and first not in ours:
        return f" (the example gives {first})"
    for name, other in theirs.items():
        one = ours.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape[1:] != other.shape[1:]:
            return f" ({name} is {_form(one)}, in the example {_form(other)})"
    return ""


def _misnamed(model: nn.Module, inputs: Inputs, example: Inputs | None) -> str:
    """Names that forward lacks, or takes by ``**kwargs`` alone and are near to one that it has; the wrong number."""
    signature = _signature(model)
    if signature is None:
        return ""
    args, kwargs = inputs
    known = [one.name for one in signature.parameters.values() if one.kind in _NAMED]
    takes = f"it takes {', '.join(known)}"
    usual = {*known, *(example[1] if example is not None else ())}
    meant = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) else kwargs
    strange = [name for name in meant if isinstance(name, str) and name not in usual]
    missing = [name for name in known if name not in kwargs]
    for name in strange:
        if hint := near(name, missing) or near(name, OWN, NEAR):
            return f"the model has no argument {name!r:.60}: {takes}.{hint}"
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if strange:
            return f"the model has no argument {strange[0]!r:.60}: {takes}"
        return f"the model cannot be called so, {error}: {takes}"
    return ""


def _unlike(model: nn.Module, inputs: Inputs, example: Inputs | None) -> Iterator[str]:
    """What is of another kind, dtype or rank than in the example."""
    if example is not None:
        ours, theirs = _by_name(model, inputs), _by_name(model, example)
        for name, other in theirs.items():
            if name in ours:
                yield from _pairs(name, ours[name], other)


def _pairs(name: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(other, torch.Tensor):
        if not isinstance(one, torch.Tensor):
            yield f"{name} is {_kind(one)}, in the example {_form(other)}{_remedy(one)}"
        elif one.dtype != other.dtype or one.dim() != other.dim():
            yield f"{name} is {_form(one)}, in the example {_form(other)}"
    elif isinstance(other, (list, tuple)) and isinstance(one, (list, tuple)):
        for at, (ours, theirs) in enumerate(zip(one, other, strict=False)):
            yield from _pairs(f"{name}[{at}]", ours, theirs)
    elif isinstance(other, Mapping) and isinstance(one, Mapping):
        for key in other:
            if key in one:
                yield from _pairs(f"{name}[{key!r}]", one[key], other[key])
    elif isinstance(other, (list, tuple, Mapping)):
        yield f"{name} is {_kind(one)}, in the example {_kind(other)}"


def _no_tensor(model: nn.Module, inputs: Inputs) -> str:
    """Where no input is a tensor, or has one: a model computes with nothing else."""
    found = _by_name(model, inputs)
    plain = [name for name, value in found.items() if isinstance(value, (bool, int, float, complex, str, type(None)))]
    if not plain or len(plain) < len(found):
        return ""
    first = found[plain[0]]
    return f"{plain[0]} is {_kind(first)}, and no input is a tensor{_remedy(first)}"


def _by_name(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Every argument under the name that forward has for it; "argument 1", ... where it has none."""
    args, kwargs = inputs
    signature = _signature(model)
    parameters = () if signature is None else signature.parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY)]
    names += [f"argument {at}" for at in range(len(names) + 1, len(args) + 1)]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _signature(model: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):  # code that is not Python's says nothing
        return None


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _form(value)
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"a dictionary of {', '.join(map(str, value))}"[:MOST]
    return "text" if isinstance(value, str) else f"of type {type(value).__name__}"


def _remedy(value: Any) -> str:
    if isinstance(value, str):
        return ": give what the model's tokenizer makes of it"
    return ": give a tensor" if isinstance(value, (bool, int, float, list, tuple)) else ""

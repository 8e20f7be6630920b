"""Tails that are run before a model serves: recipes are worked out, kernels chosen, memory touched, at nobody's cost.

Each is the tail of the spec's example, from a head that runs here, too. What the model writes to its own memory
meanwhile is put back, and no hook hears of it: nobody asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cloud_server.entries import WarmUp
from cloud_server.models.form import buffers_kept
from shared_hooks import EarlyOutput, Plan, WrappedModel
from shared_hooks.errors import IsthmusError, SpecError
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.models.inputs import Inputs
from shared_hooks.state import PythonState
from shared_hooks.tensors import flatten, unflatten


def warm_up(wrapped: WrappedModel, plan: Plan, example: Inputs, wanted: WarmUp, origin: str) -> list[EarlyOutput]:
    """Runs the tails that ``wanted`` names, on ``plan``'s ``example`` and in its batch sizes; their heads.

    Without any that are wanted, that of the last cut, if there is one. Raises SpecError, beginning with ``origin``, for
    a cut or size that is wanted and cannot be had.
    """
    lifecycle, state = wrapped.lifecycle, PythonState(wrapped.model)
    wrapped.lifecycle = Lifecycle("cloud")
    heads: list[EarlyOutput] = []
    try:
        with buffers_kept(wrapped.model), torch.random.fork_rng(devices=[]):
            for size in wanted.batch_sizes or (0,):
                for cut in wanted.cuts or _last(plan):
                    args, kwargs = sized(example, size)  # a model may write to its inputs
                    early = wrapped.head(cut, *args, **kwargs)
                    wrapped.tail(early)
                    heads.append(early)
    except Exception as error:  # whatever the model raises for a size that it does not take
        if wanted == WarmUp() and isinstance(error, IsthmusError):
            return heads  # nobody asked for it; who cuts there hears the same
        why = str(error) if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"
        raise SpecError(f"{origin}: warm_up: {why}") from error
    finally:
        state.restore()
        wrapped.lifecycle = lifecycle
    return heads


def _last(plan: Plan) -> Iterator[int]:
    """The last layer that can be cut at, where no value is read from data: such a path may be this input's alone."""
    for layer in reversed(plan.layers):
        if layer.can_split:
            if not plan.cutting(layer.layer_id)[1].reads:
                yield layer.layer_id
            return


def sized(example: Inputs, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A copy of the example with ``size`` rows (0 = as it is): every tensor that has as many rows as the first is
    repeated, or cut off.
    """
    structure, tensors = flatten(example)
    rows = next((one.shape[0] for one in tensors if one.dim()), 0)
    args, kwargs = unflatten(structure, [_rows(one, rows, size) for one in tensors])
    return args, kwargs


def _rows(tensor: torch.Tensor, known: int, wanted: int) -> torch.Tensor:
    if not wanted or not known or not tensor.dim() or tensor.shape[0] != known:
        return tensor.clone()
    return tensor.repeat(-(-wanted // known), *[1] * (tensor.dim() - 1))[:wanted].clone()

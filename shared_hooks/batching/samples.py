"""Random inputs of a given form, like the model's example in what they hold: token ids that exist, masks of its
kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared_hooks.crossing import TensorForm
from shared_hooks.errors import CutRefused
from shared_hooks.tensors import dtype_name

MAX_VALUES = 4096
"""Most elements of an example's tensor among which integers are chosen."""


def order_of(form: TensorForm) -> tuple[int, ...]:
    """Its dimensions, from the one that lies widest apart in memory: of a channels-last image (0, 2, 3, 1). Strides of
    dimensions of size 1 say nothing: these stay before the next one.
    """
    axes = range(len(form.shape))
    found = sorted((axis for axis in axes if form.shape[axis] > 1), key=lambda axis: -form.stride[axis])
    for axis in axes:
        if axis not in found:
            found.insert(next((at for at, other in enumerate(found) if other > axis), len(found)), axis)
    return tuple(found)


class Samples:
    """Makes them for ``forms``, of which those with ``batched`` have their rows in dimension ``axis``.

    ``example``: the tensors of the model's own example, of inputs that are given alike; None where they are not.
    """

    def __init__(
        self,
        forms: Sequence[TensorForm],
        batched: Sequence[bool],
        axis: int,
        example: Sequence[torch.Tensor] | None,
        device: torch.device,
    ) -> None:
        self._forms = forms
        self._batched = batched
        self._axis = axis
        self._device = device
        self._example = example
        self._generator = torch.Generator().manual_seed(0)
        self._shared = [
            None if grows else self._drawn(number, form.shape) for number, (form, grows) in self._numbered()
        ]

    def _numbered(self) -> list[tuple[int, tuple[TensorForm, bool]]]:
        return list(enumerate(zip(self._forms, self._batched, strict=True)))

    def rows(self, count: int) -> list[torch.Tensor]:
        """New ones, of so many rows; tensors without rows are always the same. Raises CutRefused."""
        made = []
        for number, (form, _) in self._numbered():
            shared = self._shared[number]
            shape = (*form.shape[: self._axis], count, *form.shape[self._axis + 1 :])
            made.append(self._drawn(number, shape) if shared is None else shared.clone())
        return made

    def _drawn(self, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        """With its dimensions in memory in the order of the form's."""
        order = order_of(self._forms[number])
        drawn = self._contiguous(number, tuple(shape[axis] for axis in order))
        return drawn.permute([order.index(axis) for axis in range(len(shape))])

    def _contiguous(self, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = self._forms[number].dtype
        like = None if self._example is None else self._example[number].detach().cpu().reshape(-1)
        if dtype.is_floating_point:
            values = torch.randn(shape, generator=self._generator)
            if like is not None and like.numel() > 1:
                spread, middle = torch.std_mean(like.double())
                if bool(spread.isfinite()) and bool(spread > 0):
                    values = values * spread.item() + middle.item()
            return values.to(self._device, dtype)
        if like is None or not like.numel():
            raise CutRefused(f"no example says which values an input of {dtype_name(dtype)} may have")
        chosen = torch.randint(min(like.numel(), MAX_VALUES), shape, generator=self._generator)
        return like[chosen].to(self._device, dtype)

"""`NonFiniteGuard`: where NaN and Inf first appear, and what to do then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shared_hooks.errors import InputMismatch, IsthmusError
from shared_hooks.observers.base import Observer, Record
from shared_hooks.observers.deferred import Deferred
from shared_hooks.observers.values import parts
from shared_hooks.observers.watching import ObservedCall

log = logging.getLogger(__name__)


class NonFiniteFound(IsthmusError):
    """NaN or Inf came out of a module; ``records`` are the `NonFinite` of that forward, the first first."""

    status = "OUT_OF_RANGE"

    def __init__(self, message: str, records: tuple[NonFinite, ...] = ()) -> None:
        super().__init__(message)
        self.records = records


@dataclass(frozen=True)
class NonFinite(Record):
    """One tensor with NaN or Inf in it. ``where``: the index of the first; ``part``: its place in a nested output."""

    part: str
    shape: tuple[int, ...]
    nan: int
    inf: int
    where: tuple[int, ...]

    def __str__(self) -> str:
        place = f"{self.name}[{self.part}]" if self.part else self.name
        return f"{place} gave {self.nan} NaN and {self.inf} Inf, the first at {self.where} of {self.shape}"


class NonFiniteGuard(Observer):
    """One `NonFinite` for each tensor with NaN or Inf that comes out of a module; in the order of calls.

    ``action``: ``"report"`` logs the first of a forward, ``"raise"`` raises `NonFiniteFound` at the end of that
    forward, a callable is given the forward's records; if it raises an error of Isthmus' tree, so does the forward.
    The device is read once per forward.
    """

    def __init__(
        self,
        targets: Any = None,
        every_n: int = 1,
        max_records: int = 1000,
        action: str | Callable[[list[NonFinite]], Any] = "report",
        **more: Any,
    ) -> None:
        super().__init__(targets, every_n, max_records, **more)
        if action not in ("report", "raise") and not callable(action):
            raise InputMismatch(f'action is "report", "raise" or a function, not {action!r}')
        self.action = action
        self.total = 0
        """Non-finite elements seen so far."""

    @property
    def first(self) -> NonFinite | None:
        """Where they first appeared, of what is kept."""
        return next(iter(self.records), None)

    def observe(self, call: ObservedCall, name: str, step: int) -> list[Deferred]:
        found = []
        for part, tensor in parts(call.output):
            if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
                continue
            if tensor.is_nested or tensor.numel() == 0:
                continue
            key = (NonFiniteGuard, part)
            values = call.memo.get(key)
            if values is None:
                values = call.memo[key] = count(tensor)
            found.append(Deferred(values, _Maker(name, step, part, tuple(tensor.shape))))
        return found

    def forward_done(self, records: list[NonFinite], step: int) -> None:
        if not records:
            return
        self.total += sum(record.nan + record.inf for record in records)
        if callable(self.action):
            self.action(records)
            return
        more = f" (and {len(records) - 1} more after it)" if len(records) > 1 else ""
        if self.action == "raise":
            raise NonFiniteFound(f"step {step}: {records[0]}{more}", tuple(records))
        log.warning("step %d: %s%s", step, records[0], more)


class _Maker:
    __slots__ = ("name", "part", "shape", "step")

    def __init__(self, name: str, step: int, part: str, shape: tuple[int, ...]) -> None:
        self.name, self.step, self.part, self.shape = name, step, part, shape

    def __call__(self, values: torch.Tensor) -> NonFinite | None:
        nan, inf, first = map(int, values.tolist())
        if not nan and not inf:
            return None
        where = []
        for size in reversed(self.shape):
            where.append(first % size)
            first //= size
        return NonFinite(self.name, self.step, self.part, self.shape, nan, inf, tuple(reversed(where)))


def count(tensor: torch.Tensor) -> torch.Tensor:
    """[NaN, Inf, flat index of the first], int64, on the tensor's device. A complex element counts once."""
    x = tensor.detach()
    if x.dtype.itemsize == 1:
        x = x.float()  # nothing adds up numbers of eight bits
    # on the CPU the usual case, nothing there, is seen faster: sums of finite numbers of one sign may overflow, so it
    # is only a sieve
    if x.device.type == "cpu" and bool(torch.isfinite(x.sum())):
        return torch.zeros(3, dtype=torch.int64)
    nan = torch.isnan(x)
    bad = torch.isfinite(x).logical_not_()
    return torch.stack((nan.sum(), bad.sum() - nan.sum(), bad.reshape(-1).to(torch.uint8).argmax()))

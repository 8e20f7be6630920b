"""Assignments behind a constant flag: a model that has one is served, one whose flag can change is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.recording.outliving import is_unreachable


class Base(nn.Module):
    """Reads data, so that an attribute that may be set may be data."""

    def __init__(self, cached: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.cached = cached
        self.kept: Any = None

    def made(self, values: Tensor) -> float:
        return float(values.max())


class Guarded(Base):
    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        scale = self.kept
        if scale is None:
            scale = self.made(values)
            if self.cached:
                self.kept = scale
        return self.second(values) * scale


class Early(Base):
    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        values = values * self.made(values)
        if not self.cached:
            return self.second(values)
        if self.kept is None:
            self.kept = values.sum()
        return self.second(values) * self.kept


class Loop(Base):
    def forward(self, values: Tensor) -> Tensor:
        for _ in range(2):
            with torch.no_grad():
                values = self.first(values) * self.made(values)
                if self.cached and self.made(values) > 0:
                    self.kept = float(values.sum())
        return self.second(values) * (self.kept or 1)


class Raises(Base):
    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values) * self.made(values)
        try:
            if self.cached or False:
                self.kept = float(values.sum())
        finally:
            values = values + 1
        return self.second(values) * (self.kept or 1)


class Method(Base):
    def keep(self, values: Tensor) -> None:
        if self.cached:
            self.kept = float(values.sum())

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values) * self.made(values)
        self.keep(values)
        return self.second(values) * (self.kept or 1)


class Toggled(Guarded):
    """The flag is the model's own to set."""

    def forward(self, values: Tensor) -> Tensor:
        self.cached = float(values[0, 0]) > 1e6
        return super().forward(values)


class Inner(Base):
    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)

        def keep() -> None:
            self.kept = self.made(values)

        if self.made(values) > 1e6:
            keep()
        return self.second(values) * (self.kept or 1)


class Unflagged(Base):
    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        if self.made(values) > 1e6:
            self.kept = self.made(values)
        return self.second(values) * (self.kept or 1)


class Rebound(Base):
    """Its ``self`` is not what it was called with."""

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values) * self.made(values)
        for self in (self, self):  # noqa: B020
            if self.cached:
                self.kept = float(values.sum())
        return self.second(values) * (self.kept or 1)


@pytest.mark.parametrize("kind", [Guarded, Early, Loop, Raises, Method])
def test_code_behind_a_constant_flag_is_no_state(kind: type[Base]) -> None:
    report = WrappedModel(kind().eval()).verify(torch.randn(3, 6), cold=lambda: kind().eval())
    assert report.ok and not report.refused, report


@pytest.mark.parametrize("kind", [Toggled, Inner, Unflagged, Rebound])
def test_settable_flag_stays_refused(kind: type[Base]) -> None:
    report = WrappedModel(kind().eval()).verify(torch.randn(3, 6))
    assert len(report.refused) == 2 and not report.exact
    assert all("keeps state" in one.reason and "kept" in one.reason for one in report.refused)


def test_one_module_whose_flag_is_set_is_enough() -> None:
    model = nn.Sequential(Guarded(), Guarded(cached=True)).eval()
    report = WrappedModel(model).verify(torch.randn(3, 6))
    assert report.refused and not report.exact


def test_another_value_of_the_flag_is_another_plan() -> None:
    model = Guarded().eval()
    wrapped, values = WrappedModel(model), torch.randn(3, 6)
    assert not wrapped.verify(values).refused
    model.cached = True
    assert wrapped.verify(values).refused


def test_functions_other_than_methods_may_run() -> None:
    def forward(self: Any) -> None:
        if self.cached:
            self.kept = 1

    assert not is_unreachable(forward, "kept", [(Guarded, vars(Guarded()))], lambda name: False)
    made = Guarded()
    assert is_unreachable(Guarded.forward, "kept", [(Guarded, vars(made))], lambda name: False)
    assert not is_unreachable(Guarded.forward, "kept", [(Guarded, vars(made))], lambda name: name == "cached")
    assert not is_unreachable(Guarded.forward, "kept", [], lambda name: False)


class Described(Base):
    """The class has a property where the object has a flag."""

    def __init__(self) -> None:
        super().__init__()
        del self.__dict__["cached"]
        self.__dict__["flag"] = False

    @property
    def flag(self) -> bool:
        return True

    def forward(self, values: Tensor) -> Tensor:
        if self.flag:
            self.kept = float(values.max())
        return self.first(values)


class Caught(Base):
    """An exception takes the name of the module."""

    def forward(self, values: Tensor) -> Tensor:
        try:
            raise Found
        except Found as self:  # type: ignore[assignment]
            if self.cached:  # type: ignore[attr-defined]
                self.kept = float(values.max())  # type: ignore[attr-defined]
        return values


class Swapped(Base):
    """Two names are assigned at once, which is one instruction since Python 3.13."""

    def forward(self, values: Tensor) -> Tensor:
        self, values = values, self.first(values)  # type: ignore[assignment]
        if self.cached:
            self.kept = float(values.max())
        return values


class Found(Exception):
    cached = True


@pytest.mark.parametrize("kind", [Described, Caught, Swapped])
def test_flag_of_another_object_forbids_nothing(kind: type[Base]) -> None:
    assert not is_unreachable(kind.forward, "kept", [(kind, vars(kind()))], lambda name: False)

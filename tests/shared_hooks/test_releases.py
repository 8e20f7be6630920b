"""Head and tail under different releases of torch: kernels may be chosen in another way, precision may not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import Disagreement
from shared_hooks.forward import bounded, interruptible
from shared_hooks.modules.constants import code_digest
from shared_hooks.state import PythonState


def net() -> WrappedModel:
    torch.manual_seed(0)
    return WrappedModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """The default of torch 2.4."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def other_release(early: EarlyOutput, release: str = "2.4.1", **environment: str) -> EarlyOutput:
    """As an edge with another torch would have sent it."""
    context = early.crossing.context
    changed: dict[str, Any] = {**context, "torch": release, "environment": {**context["environment"], **environment}}
    return replace(early, crossing=replace(early.crossing, context=changed, cache={}))


def test_which_kernels_are_chosen_may_differ_between_releases_only() -> None:
    x = torch.randn(1, 4)
    with without_cudnn_attention():
        early = net().head(0, x)
        wanted = net().whole(x)
    with pytest.raises(Disagreement, match="attention_kernels"):
        net().tail(early)
    assert torch.equal(net().tail(other_release(early)), wanted)
    same = torch.__version__.partition("+")[0]
    for build in (same, f"{same}+cu130", f"{same}+cpu"):
        with pytest.raises(Disagreement, match="attention_kernels"):
            net().tail(other_release(early, build))


def test_precision_may_not() -> None:
    early = other_release(net().head(0, torch.randn(1, 4)), float32_matmul_precision="medium")
    with pytest.raises(Disagreement, match="float32_matmul_precision"):
        net().tail(early)


def test_settings_are_no_part_of_a_plan() -> None:
    x = torch.randn(1, 4)
    with without_cudnn_attention():
        there = net().plan(x)
    assert there.digest == net().plan(x).digest


class Annotated(nn.Module):
    kept: int

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def test_annotate_function_of_python_3_14_is_not_model_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a function among a class's own, whose variables hold all of the class."""
    before, here = code_digest(Annotated()), WrappedModel(Annotated()).environment()
    __classdict__ = {"kept": [1]}

    def __annotate__(form: int) -> dict[str, Any]:
        return {"kept": __classdict__}

    monkeypatch.setattr(Annotated, "__annotate_func__", __annotate__, raising=False)
    model = Annotated()
    assert (code_digest(model), WrappedModel(model).environment()) == (before, here)
    assert not any("__classdict__" in place.name for place in PythonState(model).places)


class Endless:
    """A limit that interrupts nothing by itself."""

    def interruptible(self, seconds: float) -> AbstractContextManager[None]:
        return nullcontext()

    def uninterrupted(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize("has_setter", [True, False])
def test_torch_functions_are_enabled_after_an_interruption(has_setter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.4 has no function that sets their state."""
    if not has_setter:
        for name in ("_get_torch_function_state", "_set_torch_function_state"):
            monkeypatch.delattr(torch._C, name, raising=False)
    disabled = torch._C.DisableTorchFunction()
    with bounded(Endless()):
        with pytest.raises(KeyboardInterrupt), interruptible():
            disabled.__enter__()
            raise KeyboardInterrupt  # as between the last line of a block and its exit
        assert torch._C._is_torch_function_enabled()
        with disabled, interruptible():
            pass
        assert torch._C._is_torch_function_enabled()
        with torch._C.DisableTorchFunction():
            with interruptible():
                pass
            assert not torch._C._is_torch_function_enabled()
    assert torch._C._is_torch_function_enabled()

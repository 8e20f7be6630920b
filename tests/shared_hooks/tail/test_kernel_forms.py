"""What kernels gave before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared_hooks.forward import Form, KernelForms, Same, Unforeseen, bytes_of_results, call_key, foreseen
from shared_hooks.forward.foresight import LARGEST
from shared_hooks.tail.meta_runner import Unknown

ADD = torch.ops.aten.add.Tensor


def key(*args: Any, func: Any = ADD) -> Any:
    return call_key(func, args, {})


class Asked:
    def __init__(self, found: Any = "form") -> None:
        self.times = 0
        self.found = found

    def __call__(self) -> Any:
        self.times += 1
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found


def test_the_same_forms_are_asked_for_once() -> None:
    forms, asked = KernelForms(), Asked()
    for _ in range(3):
        assert forms.get(ADD, key(torch.zeros(2, 3), 1), asked) == "form"
    assert asked.times == 1
    for other in (key(torch.zeros(3, 2), 1), key(torch.zeros(2, 3), 1.0), key(torch.zeros(2, 3), True)):
        forms.get(ADD, other, asked)
    assert asked.times == 4


def test_another_default_dtype_is_another_question() -> None:
    func = torch.ops.aten.full.default
    forms, asked = KernelForms(), Asked()
    forms.get(func, key([2], 1.5, func=func), asked)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        forms.get(func, key([2], 1.5, func=func), asked)
    finally:
        torch.set_default_dtype(before)
    assert asked.times == 2


def test_failures_other_peoples_kernels_and_long_lists_are_not_remembered() -> None:
    forms, asked = KernelForms(), Asked(Unknown("no kernel"))
    for _ in range(2):
        with pytest.raises(Unknown):
            forms.get(ADD, key(torch.zeros(2)), asked)
    assert asked.times == 2

    class Own:
        namespace = "mine"

    asked = Asked()
    for func, one in ((Own, ("mine", 1)), (ADD, key(list(range(LARGEST))))):
        forms.get(func, one, asked)
        forms.get(func, one, asked)
    assert asked.times == 4 and len(forms) == 0


def test_there_are_never_more_than_the_bound() -> None:
    forms, asked = KernelForms(4), Asked()
    for size in range(10):
        forms.get(ADD, key(torch.zeros(size)), asked)
        forms.get(ADD, key(torch.zeros(0)), asked)
    assert len(forms) == 4 and asked.times == 10, "what is used stays"


def test_a_result_is_sized_without_being_made() -> None:
    aten = torch.ops.aten
    assert bytes_of_results(aten.zeros.default, ([1 << 50],), {}) == 4 << 50
    assert bytes_of_results(aten.mm.default, (torch.ones(2, 3), torch.ones(3, 5)), {}) == 4 * 2 * 5
    assert bytes_of_results(aten.topk.default, (torch.ones(2, 9, dtype=torch.float16), 4), {}) == 2 * 4 * (2 + 8)
    assert bytes_of_results(aten.nonzero.default, (torch.ones(3),), {}) is None, "as many as there are"
    for _ in range(2):
        assert bytes_of_results(aten.mm.default, (torch.ones(2, 3), torch.ones(2, 5)), {}) is None, "it fails"


def test_results_are_forms_or_arguments_whichever_are_given_twice() -> None:
    aten = torch.ops.aten
    one, other, out = torch.ones(2), torch.ones(2), torch.ones(2)
    assert foreseen(aten.add.Tensor, (one, other), {}) == Form((2,), torch.float32, (1,))
    assert foreseen(aten.add_.Tensor, (one, other), {}) == Same(0)
    for _ in range(2):  # the same forms each time
        assert foreseen(aten.add.out, (out, out), {"out": out}) == Same(0)
        assert foreseen(aten.add.out, (one, other), {"out": out}) == Same(2)
        assert foreseen(aten.add.out, (one, out), {"out": out}) == Same(1)
    assert foreseen(aten.split.Tensor, (torch.ones(5, 2), 3), {}) == [
        Form((3, 2), torch.float32, (2, 1)),
        Form((2, 2), torch.float32, (2, 1)),
    ]
    assert isinstance(foreseen(aten.nonzero.default, (one,), {}), Unforeseen)

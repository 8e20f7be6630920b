"""Code before the cut that writes in place to what it has made: exact, or refused by name; never an older value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.errors import CutRefused
from shared_hooks.generation import DecodingTail, InProcess, SplitForward

Way = Callable[[torch.Tensor], torch.Tensor]


def set_part(h: torch.Tensor) -> torch.Tensor:
    made = h * 2
    made[:, 0] = 0.0
    return made


def add_to_part(h: torch.Tensor) -> torch.Tensor:
    made = h * 2
    made[:, 1:].add_(h[:, 1:])
    return made


def of_two_parts(h: torch.Tensor) -> torch.Tensor:
    made = h * 2
    first, _ = made.chunk(2, -1)
    first.mul_(3)
    return made


def through_an_alias(h: torch.Tensor) -> torch.Tensor:
    made = h * 2
    made.detach().transpose(0, 1).add_(1)
    return made


def by_a_mask(h: torch.Tensor) -> torch.Tensor:
    made = h * 2
    made.masked_fill_(torch.arange(h.shape[1])[None, :, None] > 2, 0.5)
    return made


def part_made_before(h: torch.Tensor) -> torch.Tensor:
    made = h * 2
    first = made[:, 0]
    made.mul_(3)
    return made + first[:, None]


def part_made_after(h: torch.Tensor) -> torch.Tensor:
    made = h * 2
    made[:, 0] = 0.0
    return h + made[:, :1]


def what_a_call_gave(h: torch.Tensor) -> torch.Tensor:
    h[:, 0] = 0.0
    return h * 1.5


def read_before_that(h: torch.Tensor) -> torch.Tensor:
    made, first = h * 2, h[:, 0]
    h[:, 1] = 0.0
    return made + first[:, None]


def into_a_new_one(h: torch.Tensor) -> torch.Tensor:
    made = h.new_zeros(h.shape)
    made[:, 0] = h[:, 0]
    return made


def into_several_new_ones(h: torch.Tensor) -> torch.Tensor:
    left, right = torch.empty(h.shape), torch.zeros_like(h)
    left[..., :4], left[..., 4:] = h[..., :4], 1.0
    right[:, 1] = left[:, 1]
    return right


def into_what_is_given(h: torch.Tensor) -> torch.Tensor:
    made = torch.ones(h.shape)
    same = torch.zeros(h.shape, out=made)
    same[:, 0] = h[:, 0]
    return made


def repeated(h: torch.Tensor) -> torch.Tensor:
    return h.repeat_interleave(2, dim=1)[:, ::2] * 2


def numbers_alone(h: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(h.shape)
    made[:, 0] = 1.0
    return h + made


WAYS: list[Way] = [
    *(set_part, add_to_part, of_two_parts, through_an_alias, by_a_mask, part_made_before, part_made_after),
    *(what_a_call_gave, read_before_that, into_a_new_one, into_several_new_ones, numbers_alone, repeated),
]


class Between(nn.Module):
    """``way`` runs between two calls; its result is used behind the cut, or not."""

    def __init__(self, way: Way, used: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50)
        self.way, self.used = way, used

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        made = self.way(hidden)
        found = self.block(hidden if self.used else made)
        return torch.as_tensor(self.head(found + made if self.used else found))


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_written_tensor_is_not_taken_for_the_old_one(way: Way, used: bool) -> None:
    steps = [torch.randint(0, 50, (1, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    here, there, whole = (Between(way, used) for _ in range(3))
    with torch.no_grad(), SplitForward(here, "block", InProcess(DecodingTail(there, "block"))):
        for ids in steps:
            try:
                found = here(input_ids=ids)
            except CutRefused as refused:
                assert used and way not in (numbers_alone, repeated) and re.search("writ|in place", str(refused)), (
                    refused
                )
                return
            assert torch.equal(found, whole(ids))
    # what nobody reads behind the cut may be written as one likes


class Circle(nn.Module):
    """Gives a call a list that holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = Taking(), nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        values: list[object] = [input_ids]
        values.append(values)
        return torch.as_tensor(self.block(self.embedding(values)))


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, values: list[torch.Tensor]) -> torch.Tensor:
        return torch.as_tensor(self.table(values[0]))


def test_a_list_that_holds_itself_is_refused() -> None:
    split = SplitForward(Circle(), "block", InProcess(DecodingTail(Circle(), "block")))
    with torch.no_grad(), split, pytest.raises(CutRefused, match="a list that holds itself"):
        split.model(input_ids=torch.zeros(1, 3, dtype=torch.int64))


class Three(nn.Module):
    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.step = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), step

    def forward(self, x: torch.Tensor, given: Any = None) -> Any:
        return self.step(self, x, given)


def steps(step: Callable[..., Any], cut: str, given: Callable[[], Any] = lambda: None) -> None:
    here, there, whole = (Three(step).eval() for _ in range(3))
    with torch.no_grad(), SplitForward(here, cut, InProcess(DecodingTail(there, cut))):
        for number in range(3):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(number))
            found, wanted = here(x, given=given()), whole(x, given=given())
            assert identical_leaves(found, wanted)


def identical_leaves(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(identical_leaves, found, wanted))
    return bool(torch.equal(found, wanted)) if isinstance(wanted, torch.Tensor) else bool(found == wanted)


def where_it_begins(model: Any, x: torch.Tensor, _: Any) -> Any:
    part = model.a(x)[1:]
    return model.c(model.b(part)) * (1 + part.storage_offset())


def how_much_there_is(model: Any, x: torch.Tensor, _: Any) -> Any:
    part = model.a(x)[1:]
    return model.c(model.b(part)) * part.untyped_storage().nbytes()


def rows_before_it(model: Any, x: torch.Tensor, _: Any) -> Any:
    part = model.a(x)[1:]
    other = model.b(part)
    return model.c(part.as_strided((2, 8), (8, 1), 0)) + other


@pytest.mark.parametrize("cut", ["a", "b", "c"])
@pytest.mark.parametrize("step", [where_it_begins, how_much_there_is, rows_before_it])
def test_sent_tensor_has_its_own_memory(step: Callable[..., Any], cut: str) -> None:
    steps(step, cut)


def appends(model: Any, x: torch.Tensor, given: Any) -> Any:
    given.append(model.a(x))
    given.append(model.b(given[0]))
    return model.c(given[-1]), len(given)


def replaces(model: Any, x: torch.Tensor, given: Any) -> Any:
    given["h"] = model.a(given["h"] + x)
    return model.c(model.b(given["h"]))


def of_its_own(model: Any, x: torch.Tensor, given: Any) -> Any:
    given = [*given, model.a(x)]
    return model.c(model.b(given[-1]) + given[0]), given


@pytest.mark.parametrize("cut", ["a", "b", "c"])
def test_a_list_that_is_changed_is_refused_and_one_of_its_own_is_not(cut: str) -> None:
    def ones() -> torch.Tensor:
        return torch.ones(3, 8)

    for step, given in ((appends, lambda: [ones()]), (replaces, lambda: {"h": ones()})):
        with pytest.raises(CutRefused, match="changes a list or dictionary that it is given"):
            steps(step, cut, given)
    steps(of_its_own, cut, lambda: [ones()])


def test_a_function_that_torch_compile_has_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is compiled is one layer, and may stay."""
    torch._dynamo.reset()
    doubled = torch.compile(lambda h: h * 2, backend="eager")
    monkeypatch.setitem(globals(), "DOUBLED", doubled)

    def of_a_global(model: Any, x: torch.Tensor, _: Any) -> Any:
        return model.c(DOUBLED(model.b(model.a(x))))  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(CutRefused, match="was made by torch.compile"):
        steps(of_a_global, "b")
    model = Three(lambda model, x, _: model.c(model.a(x)))
    model.a = torch.compile(model.a, backend="eager")  # type: ignore[assignment]
    SplitForward(model, "a", InProcess(DecodingTail(Three(model.step), "a")))


def adds_to_several(model: Any, x: torch.Tensor, _: Any) -> Any:
    h = model.a(x)
    other = model.b(h)
    torch._foreach_add_([h[:1], other[:1]], 2.0)
    return model.c(other) + h


def maps_modules(model: Any, x: torch.Tensor, _: Any) -> Any:
    return model.c(torch.vmap(lambda row: model.b(model.a(row)))(x))


@pytest.mark.parametrize("cut", ["a", "b", "c"])
def test_functions_of_lists_and_of_rows(cut: str) -> None:
    steps(adds_to_several, cut)
    with pytest.raises(CutRefused, match="torch.vmap"):
        steps(maps_modules, cut)

"""Code before the cut that writes in place to what it has made: exact, or refused by name; never an older value."""

from __future__ import annotations

import re
from collections.abc import Callable

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
def test_what_was_written_since_is_never_taken_for_what_was_there(way: Way, used: bool) -> None:
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

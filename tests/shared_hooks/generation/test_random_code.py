"""Models whose own code, before and behind the cut, is drawn: each step is the whole model's, or it is refused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

from shared_hooks.errors import IsthmusError
from shared_hooks.generation import DecodingTail, InProcess, SplitForward, register_state
from tests.covering import examples

WIDTH, LENGTH = 4, 5
T = torch.Tensor


def _assign(x: T, y: T) -> T:
    x[:, 1] = y[:, 0]
    return x


def _assign_number(x: T, y: T) -> T:
    x[..., 1:3] = 0.25
    return y


def _parts(x: T, y: T) -> T:
    first, second = x.chunk(2, -1)
    first.mul_(2)
    second.copy_(y[..., :2])
    return x * 1.0


def _new(x: T, y: T) -> T:
    made = x.new_zeros(x.shape)
    made[:, ::2] = y[:, ::2]
    return made


def _new_number(x: T, y: T) -> T:
    made = torch.full(x.shape, 0.5)
    made[:, 0] = 2.0
    return made


def _masked(x: T, y: T) -> T:
    return x.masked_fill_(torch.arange(LENGTH)[None, :, None] > 2, 0.5)


def _chosen(x: T, y: T) -> T:
    return torch.where(x > y, x, y)


def _read(x: T, y: T) -> T:
    return x * 2 if bool(y.sum() > 0) else x - 1


def _scaled(x: T, y: T) -> T:
    return x * float(y[0, 0, 0])


def _picked(x: T, y: T) -> T:
    found = y.reshape(-1, WIDTH)[x.reshape(-1, WIDTH)[:, 0] > 0]
    return x + found.sum(0)


def _gathered(x: T, y: T) -> T:
    return x.gather(1, y.argmax(1, keepdim=True).expand(-1, LENGTH, -1))


OPERATIONS: dict[str, Callable[[T, T], T]] = {
    "add": torch.add,
    "twice": lambda x, y: x * 2,
    "clone": lambda x, y: x.clone(),
    "alias": lambda x, y: x.detach(),
    "turned": lambda x, y: x.transpose(1, 2).contiguous().transpose(1, 2),
    "turned alias": lambda x, y: x.transpose(1, 2).transpose(1, 2),
    "row": lambda x, y: x[:, :1] + y,
    "flip": lambda x, y: x.flip(1),
    "cumulate": lambda x, y: x.cumsum(1),
    "concatenate": lambda x, y: torch.cat([x[:, :2], y[:, 2:]], 1),
    "add_": lambda x, y: x.add_(y),
    "relu_": lambda x, y: x.relu_(),
    "row_": lambda x, y: x[:, 1:].sub_(y[:, :1]),
    "index_add_": lambda x, y: x.index_add_(1, torch.tensor([0, 2]), y[:, :2]),
    "assign": _assign,
    "assign number": _assign_number,
    "parts": _parts,
    "new": _new,
    "new number": _new_number,
    "masked_": _masked,
    "choose": _chosen,
    "read": _read,
    "scale": _scaled,
    "pick": _picked,
    "gather": _gathered,
}


@register_state
class Memory:
    """What is kept between steps: written by code on either side of the cut."""

    def __init__(self) -> None:
        self.one: T | None = None
        self.other: T | None = None
        self.steps = 0
        self.log: list[T] = []


def _keep(memory: Memory, x: T, y: T) -> T:
    memory.one = x
    return y


def _copied(memory: Memory, x: T, y: T) -> T:
    memory.other = x.clone()
    return y


def _growing(memory: Memory, x: T, y: T) -> T:
    memory.other = x if memory.other is None else torch.cat([memory.other, x], 1)
    return memory.other[:, -LENGTH:] + y


def _into(memory: Memory, x: T, y: T) -> T:
    if memory.one is not None:
        memory.one.add_(x)
        return memory.one * 2
    return x


def _old(memory: Memory, x: T, y: T) -> T:
    return x if memory.one is None else x + memory.one


def _moved(memory: Memory, x: T, y: T) -> T:
    memory.one, memory.other = memory.other, memory.one
    return x


def _logged(memory: Memory, x: T, y: T) -> T:
    memory.log.append(x)
    return memory.log[0] + y


def _forgotten(memory: Memory, x: T, y: T) -> T:
    return memory.log.pop(0) if memory.log else x


def _counted(memory: Memory, x: T, y: T) -> T:
    memory.steps += 1
    return x * memory.steps


KEEPING: dict[str, Callable[[Memory, T, T], T]] = {
    "keep": _keep,
    "keep a copy": _copied,
    "grow": _growing,
    "into": _into,
    "old": _old,
    "move": _moved,
    "log": _logged,
    "forget": _forgotten,
    "count": _counted,
}


class Alias(nn.Module):
    """Gives a view of what it is given, what it is given, and something new."""

    def forward(self, x: T) -> dict[str, Any]:
        return {"view": x.transpose(1, 2).transpose(1, 2), "all": (x, x * 3)}


CALLS: dict[str, Callable[[Drawn, T], T]] = {
    "call": lambda model, x: model.mix(x),
    "call again": lambda model, x: model.mix(model.mix(x)),
    "call for a view": lambda model, x: model.alias(x)["view"],
    "call for itself": lambda model, x: model.alias(x)["all"][0],
    "call for more": lambda model, x: model.alias(x)["all"][1],
}


Line = tuple[str, int, int]


def _lines(names: list[str]) -> Any:
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 9), st.integers(0, 9)), max_size=7)


LINES = _lines([*sorted(OPERATIONS), *sorted(CALLS)])
WITH_STATE = _lines([*sorted(OPERATIONS), *sorted(KEEPING) * 3, *sorted(CALLS)])


class Drawn(nn.Module):
    """``before`` and ``behind``: lines of code around the block, on variables by their numbers. A result of another
    shape is dropped.
    """

    def __init__(self, before: list[Line], behind: list[Line]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mix = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block, self.head, self.alias = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 20), Alias()
        self.before, self.behind = before, behind

    def forward(self, input_ids: T, attention_mask: T, memory: Memory | None = None) -> T:
        variables = [self.embedding(input_ids), attention_mask[..., None].float().expand(1, LENGTH, WIDTH).clone()]
        self._run(self.before, variables, memory)
        variables.append(self.block(variables[-1]))
        self._run(self.behind, variables, memory)
        return torch.as_tensor(self.head(sum(variables[-3:])))

    def _run(self, lines: list[Line], variables: list[T], memory: Memory | None) -> None:
        for name, one, other in lines:
            x, y = variables[-1 - one % len(variables)], variables[-1 - other % len(variables)]
            if name in CALLS:
                found: Any = CALLS[name](self, x)
            elif name in OPERATIONS:
                found = OPERATIONS[name](x, y)
            else:
                assert memory is not None
                found = KEEPING[name](memory, x, y)
            if found.shape == variables[0].shape:
                variables.append(found)


def compared(before: list[Line], behind: list[Line], state: Callable[[], Any]) -> str:
    """What becomes of seven steps: "exact", "refused ...", or "fails" where the whole model does."""
    here, there, whole = (Drawn(before, behind) for _ in range(3))
    mask = torch.ones(1, LENGTH, dtype=torch.int64)
    one, other = state(), state()
    with torch.no_grad(), SplitForward(here, "block", InProcess(DecodingTail(there, "block"))):
        for seed in range(7):  # from the fifth on, modules that no step needed have no shim
            ids = torch.randint(0, 20, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
            try:
                expected = whole(ids, mask, other)
            except RuntimeError:  # of torch: what is read and what is written overlap
                return "fails"
            try:
                found = here(input_ids=ids, attention_mask=mask, memory=one)
            except IsthmusError as refused:
                return f"refused: {type(refused).__name__}: {refused}"
            assert torch.equal(found, expected)
    return "exact"


@settings(max_examples=examples(150), deadline=None)
@given(LINES, LINES)
def test_a_step_is_exact_or_refused(before: list[Line], behind: list[Line]) -> None:
    event(compared(before, behind, lambda: None)[:60])


@settings(max_examples=examples(150), deadline=None)
@given(WITH_STATE, WITH_STATE)
def test_a_step_with_a_state_is_exact_or_refused(before: list[Line], behind: list[Line]) -> None:
    event(compared(before, behind, Memory)[:60])


@pytest.mark.parametrize("state", [None, Memory])
def test_a_third_of_what_is_drawn_is_exact(state: type[Memory] | None) -> None:
    """Where all was refused, the two above could not fail."""
    dice = random.Random(3)
    names = [*sorted(OPERATIONS), *sorted(CALLS), *(sorted(KEEPING) if state else [])]
    found = Counter(
        compared(*([(dice.choice(names), dice.randrange(9), dice.randrange(9)) for _ in range(3)] for _ in "ab"), made)[
            :5
        ]
        for made in [state or (lambda: None)] * 60
    )
    assert found["exact"] >= 20, found

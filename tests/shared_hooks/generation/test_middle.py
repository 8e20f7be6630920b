"""A generation along a chain: each part keeps its share of the state, and the words are those of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.errors import BadFrame, CutRefused, SessionLost, UnknownLayer
from shared_hooks.generation import DecodingTail, InProcess, SplitForward, state_name
from shared_hooks.generation.middle import MiddleDecodingSession
from shared_hooks.tensors import identical
from tests.covering import crossed
from tests.shared_hooks.generation.small import MODELS, cut_of, make, prompt

NAMES = [*MODELS, "sees", "hears"]


def cuts_of(name: str, parts: int) -> list[str]:
    """So many blocks, one after the other; from the one before where there are few."""
    blocks = cut_of(name).rpartition(".")[0]
    return [f"{blocks}.{number}" for number in range(parts)]


def chain(name: str, cuts: list[str]) -> list[InProcess]:
    """Servers of a chain, the edge's own first; each has a model of its own."""
    links: list[InProcess] = []
    for number in reversed(range(len(cuts))):
        tail = DecodingTail(make(name), cuts[number])
        opened = partial(MiddleDecodingSession, tail, cuts[number + 1], links[0]) if links else None
        links.insert(0, InProcess(tail, None, opened))
    return links


def given(name: str, rows: int = 1) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(3)
    if name == "hears":
        return {"input_features": torch.randn(rows, 8, 40, generator=dice)}
    if name == "sees":
        ids = torch.randint(6, 120, (rows, 9), generator=dice)
        ids[:, 1:5] = 5
        pixels = torch.randn(rows, 3, 16, 16, generator=dice)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    return prompt(rows=rows)


def both(
    name: str, parts: int, run: Callable[[nn.Module], Any] | None = None, rows: int = 1, answer: Any = None, **how: Any
) -> tuple[Any, Any, list[InProcess]]:
    asked = {"max_new_tokens": 10, "do_sample": False, **how}

    def generate(model: Any) -> Any:
        torch.manual_seed(5)
        return run(model) if run else model.generate(**given(name, rows), **asked)

    model, cuts = make(name), cuts_of(name, parts)
    whole, links = generate(model), chain(name, cuts)
    with SplitForward(model, cuts[0], links[0], answer=answer):
        found = generate(model)
    assert [len(link.sessions) for link in links] == [0] * parts, "each is closed along the chain"
    return whole, found, links


@pytest.mark.parametrize(("name", "parts"), crossed(NAMES, [2, 3]))
def test_token_for_token(name: str, parts: int) -> None:
    parts = min(parts, 3 if name in ("t5", "hears") else 4)
    whole, found, _ = both(name, parts)
    assert torch.equal(whole, found)


STATIC, LOOKUP = {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3, "max_new_tokens": 24}
WAYS: list[dict[str, Any]] = [
    {"do_sample": True, "rows": 3},
    {"num_beams": 3},
    {"do_sample": True, "top_k": 20, "answer": ("sample",)},
    {"answer": ("token",)},
    STATIC,
    LOOKUP,
]
UNKNOWN = {"mamba": [STATIC, LOOKUP], "hybrid": [LOOKUP]}
"""Ways that transformers does not have for these models."""


@pytest.mark.parametrize(
    ("name", "how"),
    crossed(
        ["llama", "gpt2", "sliding", "hybrid", "mamba", "t5"],
        WAYS,
        where=lambda name, how: how not in UNKNOWN.get(name, []),
    ),
    ids=str,
)
def test_ways_to_generate(name: str, how: dict[str, Any]) -> None:
    whole, found, _ = both(name, 3, **how)
    assert torch.equal(whole, found)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_scores_and_hidden_states_of_every_part(name: str) -> None:
    details = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    whole, found, _ = both(name, 3, rows=2, **details)
    assert whole.keys() == found.keys()
    for part in whole.keys() - {state_name()}:
        assert identical(whole[part], found[part]), part


def test_a_copied_state_continues_by_itself_in_every_part() -> None:
    @torch.no_grad()
    def run(model: Any) -> Any:
        first = model(**given("llama"), use_cache=True)
        answers = []
        for word in (7, 8, 9):
            state, said = copy.deepcopy(first.past_key_values), []
            for _ in range(4):
                out = model(input_ids=torch.tensor([[word]]), past_key_values=state, use_cache=True)
                word = int(out.logits[0, -1].argmax())
                said.append(out.logits)
            answers.append(torch.cat(said))
        return torch.stack(answers)

    whole, found, _ = both("llama", 3, run)
    assert torch.equal(whole, found)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_part_that_has_lost_its_sessions_is_given_them_again(number: int) -> None:
    links: list[InProcess] = []

    def losing(link: InProcess) -> None:
        step, count = link.step, 0

        def steps(session: int, *rest: Any) -> Any:
            nonlocal count
            count += 1
            if count == 4:
                link.sessions.clear()
                link.steps.clear()
            if rest[0] and session not in link.sessions:
                raise SessionLost("the server was started again")
            return step(session, *rest)

        link.step = steps  # type: ignore[method-assign]

    model, cuts = make("llama"), cuts_of("llama", 3)
    whole = model.generate(**given("llama"), max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    links = chain("llama", cuts)
    losing(links[number])
    with SplitForward(model, cuts[0], links[0]):
        found = model.generate(**given("llama"), max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    assert torch.equal(whole, found)


class Reads(nn.Module):
    """Python reads data between the cuts, and the end needs what was made before the first one, and between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        third = self.blocks[2](second) * (2.0 if second.sum().item() > 0 else 3.0)
        fourth = self.blocks[3](third)
        return self.blocks[4](fourth) + first + second + third.mean()


def test_values_of_every_part_are_at_hand_behind_it() -> None:
    def made() -> Reads:
        return Reads().eval()

    last = InProcess(DecodingTail(made(), "blocks.3"))
    tail = DecodingTail(made(), "blocks.1")
    middle = InProcess(tail, None, partial(MiddleDecodingSession, tail, "blocks.3", last))
    model = made()
    for seed in range(4):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            whole = model(x)
        with SplitForward(model, "blocks.1", middle, private=frozenset({"x"})):
            assert torch.equal(model(x), whole)


def test_cuts_that_cannot_follow_are_refused() -> None:
    tail = DecodingTail(make("llama"), "model.layers.1")
    link = InProcess(DecodingTail(make("llama"), "model.layers.2"))
    for second, error, text in (
        ("model.layers.9", UnknownLayer, "no module"),
        ("lm_head", CutRefused, "the same list of"),
        ("model", CutRefused, "the same list of"),
    ):
        with pytest.raises(error, match=text):
            MiddleDecodingSession(tail, second, link)
    model = make("llama")
    middle = InProcess(tail, None, partial(MiddleDecodingSession, tail, "model.layers.0", link))
    with SplitForward(model, "model.layers.1", middle), pytest.raises(CutRefused, match="is not called behind"):
        model.generate(**given("llama"), max_new_tokens=2)  # type: ignore[operator]


@pytest.mark.parametrize("more", [5, [5], [[["m"]]], [1], [[]] * 17, "x", [[[["m", [2]], [["layers", 99]]]]]])
def test_changes_that_make_no_sense(more: Any) -> None:
    last = InProcess(DecodingTail(make("llama"), "model.layers.2"))
    step = last.step

    def lying(*asked: Any) -> Any:
        reply = step(*asked)
        reply.header["more"] = more
        return reply

    last.step = lying  # type: ignore[method-assign]
    tail = DecodingTail(make("llama"), "model.layers.1")
    middle = InProcess(tail, None, partial(MiddleDecodingSession, tail, "model.layers.2", last))
    model = make("llama")
    with SplitForward(model, "model.layers.1", middle), pytest.raises((BadFrame, SessionLost, CutRefused)):
        model.generate(**given("llama"), max_new_tokens=3)  # type: ignore[operator]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_state_that_the_model_makes_itself(name: str, parts: int) -> None:
    """The first block is the first that is given it, and the cut."""

    @torch.no_grad()
    def run(model: Any) -> Any:
        found = model(**given(name), use_cache=True)
        said = [found.logits]
        for word in (7, 9):
            step = {"input_ids": torch.tensor([[word]]), "past_key_values": found.past_key_values}
            said.append(model(**step, use_cache=True).logits)
        return torch.cat(said, dim=1)

    whole, found, _ = both(name, parts, run)
    assert torch.equal(whole, found)

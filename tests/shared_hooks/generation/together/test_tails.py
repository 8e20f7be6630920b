"""Steps of decoding sessions at one cut run together: what each answers is what it answers alone but for rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shared_hooks.generation import DecodingSession, DecodingTail, InProcess, SplitForward
from shared_hooks.generation.together import Lockstep
from tests.shared_hooks.generation.small import cut_of, make, prompt


class Recorded(InProcess):
    """Keeps all steps, in order."""

    def __init__(self, tail: DecodingTail) -> None:
        super().__init__(tail)
        self.asked: list[tuple[dict[str, Any], list[torch.Tensor]]] = []

    def step(self, session: int, number: int, header: dict[str, Any], tensors: list[torch.Tensor], *rest: Any) -> Any:
        self.asked.append((copy.deepcopy(header), [tensor.clone() for tensor in tensors]))
        return super().step(session, number, header, tensors, *rest)


@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding", "experts", "mamba", "hybrid", "t5"])
def test_steps_of_sessions_at_one_cut_run_together(name: str) -> None:
    here, there = make(name), make(name)
    tail = DecodingTail(there, cut_of(name))
    links = []
    for length in (4, 9, 6):
        links.append(link := Recorded(tail))
        with SplitForward(here, cut_of(name), link):
            here.generate(**prompt(1, length), max_new_tokens=8, do_sample=False)
    alone, shared = ([tail.open() for _ in links] for _ in range(2))
    met: list[int] = []
    with Lockstep(there) as together:
        for steps in zip(*(link.asked for link in links), strict=True):
            outcomes = together.run(
                [
                    lambda session=session, step=step: stepped(session, step)
                    for session, step in zip(shared, steps, strict=True)
                ]
            )
            for session, step, outcome in zip(alone, steps, outcomes, strict=True):
                (header, tensors), (wanted_header, wanted) = outcome.result(), stepped(session, step)
                assert header == wanted_header
                met.append(outcome.batch_size)
                for found, value in zip(tensors, wanted, strict=True):
                    torch.testing.assert_close(found, value, rtol=0, atol=1e-4 * float(value.abs().max()))
    # the generations that were recorded have been through this tail, so nothing is looked at for its size, and all meet
    assert met.count(len(links)) >= len(met) // 2
    tail.close()


def stepped(session: DecodingSession, step: tuple[dict[str, Any], list[torch.Tensor]]) -> Any:
    header, tensors = step
    return session.step(copy.deepcopy(header), [tensor.clone() for tensor in tensors])

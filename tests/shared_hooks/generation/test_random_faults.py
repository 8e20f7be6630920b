"""States stepped, copied, cropped and reordered at random over links that break and servers that forget, in the middle
of making a session again, too: every answer is the whole model's.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest
import torch

from shared_hooks.errors import DeadlineExceeded, ServerUnavailable, SessionLost, StepOutOfOrder
from shared_hooks.generation import InProcess, SplitForward
from tests.covering import crossed
from tests.shared_hooks.generation.small import WORDS, make
from tests.shared_hooks.generation.test_middle import chain, cuts_of

BREAKS = 0.08
"""So many steps' requests are lost; half as many answers; and for half as many steps a session, or all of them."""
TRIES = 60
WHAT = ["step"] * 6 + ["new", "copy", "crop", "reorder", "drop"]


def unreliable(link: InProcess, dice: random.Random, seen: Counter[str]) -> None:
    inner = link.step

    def step(session: int, number: int, header: Any, tensors: Any, fork: Any = None, *rest: Any) -> Any:
        happens = dice.random()
        if happens < BREAKS:
            seen["broken"] += 1
            raise ServerUnavailable("the request was lost")
        if link.sessions and happens < 1.8 * BREAKS:
            gone = [dice.choice(list(link.sessions))] if happens < 1.4 * BREAKS else list(link.sessions)
            for one in gone:
                link.sessions.pop(one), link.steps.pop(one)
            seen["forgotten"] += 1
        if fork is not None and link.steps.get(fork[0]) != fork[1]:
            raise SessionLost("gone")
        if number and session not in link.sessions:
            raise SessionLost("gone")
        if link.steps.get(session, number) != number:
            raise StepOutOfOrder("it was made")
        reply = inner(session, number, header, tensors, fork, *rest)
        if dice.random() < BREAKS / 2:
            seen["unanswered"] += 1
            raise DeadlineExceeded("the answer was lost")
        return reply

    link.step = step  # type: ignore[method-assign]


def answered(model: Any, call: dict[str, Any]) -> Any:
    """Its answer; None where the state is lost for good, which is said."""
    for _ in range(TRIES):
        try:
            return model(**call).logits
        except (ServerUnavailable, DeadlineExceeded):
            pass  # the step may be asked for again
        except SessionLost as error:
            if "in place" in str(error):
                return None
    return None


@pytest.mark.parametrize(
    ("name", "parts", "history"), crossed(["llama", "gpt2", "sliding", "hybrid"], [1, 3], [1 << 20, 1500])
)
def test_every_answer_is_the_whole_models(name: str, parts: int, history: int) -> None:
    from transformers import DynamicCache

    dice, seen = random.Random(f"{name}{parts}{history}"), Counter[str]()
    model: Any = make(name)
    whole: Any = make(name)
    cuts = cuts_of(name, parts)
    links = chain(name, cuts)
    for link in links:
        unreliable(link, dice, seen)
    states: list[tuple[Any, Any, int]] = []
    with SplitForward(model, cuts[0], links[0], history_bytes=history):
        while seen["exact"] < (30 if parts == 1 else 15):
            what = dice.choice(WHAT)
            if what == "new" or not states:
                states.append(
                    (DynamicCache(config=model.config), DynamicCache(config=model.config), dice.choice([1, 2]))
                )
                continue
            at = dice.randrange(len(states))
            own, theirs, rows = states[at]
            read = theirs.get_seq_length()
            if what == "drop" or read > 100:
                del states[at], own
            elif what == "copy":
                states.append((copy.deepcopy(own), copy.deepcopy(theirs), rows))
            elif what == "reorder" and read:
                order = torch.tensor([dice.randrange(rows) for _ in range(rows)])
                own.reorder_cache(order), theirs.reorder_cache(order)
            elif what == "crop" and read > 2 and name in ("llama", "gpt2"):
                gone = dice.randrange(1, read)
                own.crop(-gone), theirs.crop(-gone)
            elif what == "step":
                ids = torch.tensor([[dice.randrange(6, WORDS) for _ in range(dice.choice([1, 1, 2, 7]))]] * rows)
                with torch.no_grad():
                    expected = whole(input_ids=ids, past_key_values=theirs).logits
                found = answered(model, {"input_ids": ids, "past_key_values": own})
                if found is None:
                    del states[at]
                    seen["lost"] += 1
                    continue
                assert torch.equal(found, expected)
                seen["exact"] += 1
    assert seen["lost"] < seen["exact"] and seen["broken"] + seen["forgotten"] + seen["unanswered"] > 0

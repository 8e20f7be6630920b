"""Sessions: copies of a state go on by themselves, a lost session is made again, an error leaves all as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shared_hooks.errors import (
    CutRefused,
    DeadlineExceeded,
    IsthmusError,
    ServerUnavailable,
    SessionLost,
    StepOutOfOrder,
)
from shared_hooks.generation import DecodingTail, InProcess, SplitForward, StepReply
from tests.covering import crossed
from tests.shared_hooks.generation.small import both, cut_of, in_process, make, prompt


class Flaky(InProcess):
    """Loses all sessions before the calls numbered in ``lost``; breaks in those in ``broken``."""

    def __init__(self, name: str, lost: set[int] = frozenset(), broken: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        super().__init__(DecodingTail(make(name), cut_of(name)))
        self.calls = 0
        self._lost, self._broken = lost, broken

    def step(self, session: int, number: int, *rest: Any) -> StepReply:
        self.calls += 1
        if self.calls in self._lost:
            self.sessions.clear()
            self.steps.clear()
        if self.calls in self._broken:
            raise ServerUnavailable("the link is cut")
        if number and session not in self.sessions:
            raise SessionLost(f"session {session} is not here")
        return super().step(session, number, *rest)


SETTINGS: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"cache_implementation": "static"}]


def generate(model: Any, **settings: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(**prompt(), **{"max_new_tokens": 16, "do_sample": True, **settings})


@pytest.mark.parametrize(("name", "settings"), crossed(["llama", "sliding", "hybrid", "t5"], SETTINGS))
def test_a_session_lost_in_the_middle_is_made_again(name: str, settings: dict[str, Any]) -> None:
    model = make(name)
    whole = generate(model, **settings)
    link = Flaky(name, lost={4, 5, 12})
    with SplitForward(model, cut_of(name), link):
        assert torch.equal(generate(model, **settings), whole)
    assert link.calls > 20


@pytest.mark.parametrize(("broken", "history"), crossed([6, 7, 8, 9], [1 << 20, 300]))
def test_a_link_that_breaks_while_a_lost_session_is_made_again(broken: int, history: int) -> None:
    """The step fails, and asked again it is the next one after all of the steps before, not after some of them."""
    from transformers import DynamicCache

    def steps(model: Any) -> list[torch.Tensor]:
        state, found = DynamicCache(config=model.config), []
        for token in range(6, 14):
            call = {"input_ids": torch.tensor([[token]]), "past_key_values": state}
            try:
                found.append(model(**call).logits)
            except ServerUnavailable:
                found.append(model(**call).logits)
        return found

    model = make("llama")
    whole, link = steps(model), Flaky("llama", lost={5}, broken={broken})
    with SplitForward(model, cut_of("llama"), link, history_bytes=history):
        assert all(torch.equal(one, other) for one, other in zip(steps(model), whole, strict=True))
    assert link.calls > 12


@pytest.mark.parametrize(("name", "settings"), crossed(["llama", "sliding", "hybrid", "t5", "mamba"], SETTINGS))
def test_steps_that_took_too_much_memory_are_computed_again(name: str, settings: dict[str, Any]) -> None:
    model = make(name)
    whole = generate(model, **settings)
    with SplitForward(model, cut_of(name), Flaky(name, lost={6, 21}), history_bytes=2000):
        assert torch.equal(generate(model, **settings), whole)


def test_a_session_whose_inputs_were_written_to_cannot_be_made_again() -> None:
    from transformers import DynamicCache

    model = make("llama")
    state = DynamicCache(config=model.config)  # type: ignore[arg-type]
    many = torch.randint(6, 100, (1, 5000))
    model.config.max_position_embeddings = 6000  # type: ignore[union-attr]
    with SplitForward(model, cut_of("llama"), Flaky("llama", lost={2}), history_bytes=2000):
        model(input_ids=many, past_key_values=state, logits_to_keep=1)
        many[0, 0] = 7
        with pytest.raises(SessionLost, match="changed since"):
            model(input_ids=torch.tensor([[8]]), past_key_values=state)


def test_a_step_that_was_made_and_whose_answer_was_lost_is_made_again_in_another_session() -> None:
    class Forgets(InProcess):
        calls = 0

        def step(self, session: int, number: int, *rest: Any) -> StepReply:
            self.calls += 1
            if number < self.steps.get(session, 0):
                raise StepOutOfOrder(f"step {number} was made")
            reply = super().step(session, number, *rest)
            if self.calls in (1, 5):
                raise DeadlineExceeded("the answer did not come")
            return reply

    from transformers import DynamicCache

    def steps(model: Any, lost: bool) -> list[torch.Tensor]:
        state, found = DynamicCache(config=model.config), []
        for token in range(6, 16):
            call = {"input_ids": torch.tensor([[token]]), "past_key_values": state}
            try:
                found.append(model(**call).logits)
            except DeadlineExceeded:
                assert lost
                found.append(model(**call).logits)
        return found

    model = make("llama")
    whole = steps(model, lost=False)
    with SplitForward(model, cut_of("llama"), Forgets(DecodingTail(make("llama"), cut_of("llama")))):
        split = steps(model, lost=True)
    assert all(map(torch.equal, whole, split))


def test_sessions_that_nobody_has_any_more_are_closed() -> None:
    model, link = make("llama"), in_process("llama")
    with SplitForward(model, cut_of("llama"), link):
        for _ in range(5):
            generate(model, max_new_tokens=3)
        for _ in range(5):
            model(**prompt(), use_cache=False)
        assert len(link.sessions) <= 3
    assert not link.sessions


def test_after_a_broken_step_the_same_state_continues() -> None:
    """The step that failed is asked for again, and all is as if it had not."""
    from transformers import DynamicCache

    def steps(model: Any, broken: bool) -> list[torch.Tensor]:
        state, found = DynamicCache(config=model.config), []
        for token in range(6, 16):
            call = {"input_ids": torch.tensor([[token]]), "past_key_values": state}
            if broken and token == 10:
                with pytest.raises(ServerUnavailable):
                    model(**call)
            found.append(model(**call).logits)
        return found

    model = make("llama")
    whole = steps(model, broken=False)
    with SplitForward(model, cut_of("llama"), Flaky("llama", broken={5})):
        split = steps(model, broken=True)
    assert all(map(torch.equal, whole, split))


@torch.no_grad()
def test_copies_of_a_state_go_on_by_themselves() -> None:
    from transformers import DynamicCache

    def run(model: Any) -> list[torch.Tensor]:
        state = DynamicCache(config=model.config)
        found = [model(**prompt(), past_key_values=state).logits]
        copies = [copy.deepcopy(state) for _ in range(3)]
        copies.append(copy.deepcopy(copies[0]))
        for word, one in enumerate([*copies, state], start=20):
            for more in range(3):
                found.append(model(input_ids=torch.tensor([[word + more]]), past_key_values=one).logits)
            if word == 21:
                one.crop(-2)
                found.append(model(input_ids=torch.tensor([[word]]), past_key_values=one).logits)
                found.append(model(input_ids=torch.tensor([[word]]), past_key_values=copy.deepcopy(one)).logits)
        return found

    whole, split, how = both("llama", {}, run)
    assert len(whole) == len(split) == 1 + 5 * 3 + 2
    assert all(map(torch.equal, whole, split))
    assert len(how.records) == len(split)


def test_many_conversations_take_turns() -> None:
    from transformers import DynamicCache

    def run(model: Any) -> list[torch.Tensor]:
        states = [DynamicCache(config=model.config) for _ in range(4)]
        return [
            model(input_ids=torch.tensor([[6 + step + row, 9]]), past_key_values=state).logits
            for step in range(5)
            for row, state in enumerate(states)
        ]

    whole, split, _ = both("llama", {}, run)
    assert all(map(torch.equal, whole, split))


def test_methods_of_the_state_are_called_on_both_sides() -> None:
    from transformers import DynamicCache

    def run(model: Any) -> list[torch.Tensor]:
        state = DynamicCache(config=model.config)
        found = [model(**prompt(rows=2), past_key_values=state).logits]
        state.crop(-3)
        state.batch_repeat_interleave(2)
        found.append(model(input_ids=torch.tensor([[7], [8], [9], [10]]), past_key_values=state).logits)
        state.reorder_cache(torch.tensor([3, 0, 0, 1]))
        found.append(model(input_ids=torch.tensor([[7], [8], [9], [10]]), past_key_values=state).logits)
        state.batch_select_indices(torch.tensor([1, 3]))
        found.append(model(input_ids=torch.tensor([[7], [8]]), past_key_values=state).logits)
        return found

    whole, split, _ = both("llama", {}, run)
    assert all(map(torch.equal, whole, split))


@pytest.mark.parametrize("hand", ["crop", "replace"])
def test_the_other_sides_part_of_a_state_is_not_changed_by_hand(hand: str) -> None:
    from transformers import DynamicCache

    model = make("llama")
    state = DynamicCache(config=model.config)  # type: ignore[arg-type]
    with SplitForward(model, cut_of("llama"), in_process("llama")):
        model(**prompt(), past_key_values=state)
        if hand == "crop":
            state.layers[3].keys = state.layers[3].keys[..., :4, :]
        else:
            state.layers[3].keys = state.layers[3].keys * 2
        with pytest.raises(CutRefused, match=r"layers\.3\.keys"):
            model(input_ids=torch.tensor([[7]]), past_key_values=state)


def test_a_shadow_is_never_read_as_zeros() -> None:
    from transformers import DynamicCache

    model = make("llama")
    state = DynamicCache(config=model.config)  # type: ignore[arg-type]
    with SplitForward(model, cut_of("llama"), in_process("llama")):
        model(**prompt(), past_key_values=state)
    reads: list[Any] = [
        lambda keys: keys.sum().item(),
        lambda keys: keys.tolist(),
        lambda keys: keys.numpy(),
        lambda keys: bool(keys.any()),
    ]
    for read in reads:
        with pytest.raises(IsthmusError, match="other side"):
            read(state.layers[3].keys)
    with torch.no_grad():  # the whole model cannot go on from half a state
        logits = model(input_ids=torch.tensor([[7]]), past_key_values=state).logits
    with pytest.raises(IsthmusError, match="other side"):
        logits.tolist()


def test_a_broken_link_reaches_the_caller_by_name() -> None:
    model = make("llama")
    with SplitForward(model, cut_of("llama"), Flaky("llama", broken={3})), pytest.raises(ServerUnavailable):
        generate(model)

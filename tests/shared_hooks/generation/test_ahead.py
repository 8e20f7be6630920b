"""Steps that are sent while earlier ones are under way: whatever is foreseen, rightly or wrongly, and whatever breaks,
every answer is the whole model's.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.errors import BadFrame, CutRefused, DeadlineExceeded, ServerUnavailable, SessionLost, StepOutOfOrder
from shared_hooks.generation import DecodingTail, InProcess, SplitForward
from shared_hooks.generation.ahead import AnswerGrowth, NextCall, foresight
from shared_hooks.generation.session import MOST_KEPT
from tests.covering import crossed
from tests.shared_hooks.generation.small import WORDS, cut_of, in_process, make
from tests.shared_hooks.generation.test_middle import chain, cuts_of
from tests.shared_hooks.generation.test_random_faults import answered, unreliable

NAMES = ["llama", "gpt2", "sliding", "hybrid", "experts", "bloom"]


class Plan:
    """A `Foresight` that knows what will be called, and says so as often as ``right``; else something else."""

    def __init__(self, model: nn.Module, state: Any, dice: random.Random, right: float) -> None:
        self.model, self.state, self.dice, self.right = model, state, dice, right
        self.calls: list[tuple[int, list[int]]] = []
        """What comes next: how much is cropped, and the ids of the call."""
        self.tokens = 0
        self.asked = 0

    def next(self, after: int, saved_ns: int, compute_ns: int) -> NextCall | None:
        while len(self.calls) <= after:
            gone = self.dice.choice([0, 0, 0, 1])
            self.calls.append((gone, [self.dice.randrange(6, WORDS) for _ in range(self.dice.choice([1, 2, 3]))]))
        gone, ids = self.calls[after]
        if self.dice.random() > self.right:
            gone, ids = self.dice.choice([(gone, [ids[0] - 1, *ids[1:]]), (1 - gone, ids), (gone, [*ids, 7])])
        if self.dice.random() < 0.1:
            return None
        self.asked += 1
        self.state.crop(-gone)
        return NextCall({"input_ids": torch.tensor([ids]), "past_key_values": self.state}, len(ids))


def breaking(link: InProcess, dice: random.Random, seen: Counter[str]) -> None:
    """Steps that are sent ahead are lost, too, and so are answers; and sometimes the server has none of it."""
    begin = link.begin

    class Lost:
        is_over = False
        bytes_up = 10

        def __init__(self, error: Exception) -> None:
            self.error = error

        def result(self, meanwhile: Any = None) -> Any:
            raise self.error

        def cancel(self, why: Exception) -> None:
            seen["cancelled"] += 1

    def begun(session: int, number: int, header: Any, tensors: Any, branch: int) -> Any:
        happens = dice.random()
        if happens < 0.05:
            return Lost(ServerUnavailable("the request was lost"))
        if happens < 0.08:
            link.sessions.pop(session, None), link.steps.pop(session, None)
            return Lost(SessionLost("gone"))
        pending = begin(session, number, header, tensors, branch)
        if happens < 0.11:
            return Lost(DeadlineExceeded("the answer was lost"))
        return pending

    link.begin = begun  # type: ignore[method-assign]


def played(name: str, link: Any, dice: random.Random, right: float, cut: str = "", **settings: Any) -> Counter[str]:
    """A state stepped as planned, copied now and then, until it is lost; counts what came true."""
    from transformers import DynamicCache

    model: Any = make(name)
    whole: Any = make(name)
    seen: Counter[str] = Counter()
    with SplitForward(model, cut or cut_of(name), link, **settings) as split, torch.no_grad():
        true = split._come_true

        def come_true(*args: Any) -> Any:
            found = true(*args)
            seen["true" if found is not None else "wrong"] += 1
            return found

        split._come_true = come_true  # type: ignore[method-assign]
        own, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
        for state in (own, theirs):
            getattr(state, "activate_past_recording", lambda: None)()
        plan = Plan(model, own, dice, right)
        plan.calls = [(0, [7, 8, 9, 10, 11, 12])]
        while seen["exact"] < 25:
            if not plan.calls:
                plan.calls.append((dice.choice([0, 1]), [dice.randrange(6, WORDS)]))
            gone, ids = plan.calls.pop(0)
            if theirs.get_seq_length() > 100:
                break
            if theirs.get_seq_length():
                own.crop(-gone), theirs.crop(-gone)
            plan.tokens = len(ids)
            token = foresight.set(plan)
            try:
                found = answered(model, {"input_ids": torch.tensor([ids]), "past_key_values": own})
            finally:
                foresight.reset(token)
            if found is None:
                seen["lost"] += 1
                break
            assert torch.equal(found, whole(input_ids=torch.tensor([ids]), past_key_values=theirs).logits)
            seen["exact"] += 1
            if dice.random() < 0.1:  # the copy continues, and so does the other
                twin, its = copy.deepcopy(own), copy.deepcopy(theirs)
                given = {"input_ids": torch.tensor([[9, 3]])}
                found = answered(model, {**given, "past_key_values": twin})
                assert found is None or torch.equal(found, whole(**given, past_key_values=its).logits)
                seen["copies"] += found is not None
    return seen


@pytest.mark.parametrize(("name", "right"), crossed(NAMES, [1.0, 0.7, 0.2]))
def test_answers_are_the_whole_models_whatever_is_foreseen(name: str, right: float) -> None:
    seen = played(name, in_process(name), random.Random(f"{name}{right}"), right)
    if right == 1.0 and name != "sliding":  # which does not grow beyond its window
        assert seen["true"] > 10, seen
    assert seen["true"] + seen["wrong"] > 0 and not seen["lost"]


@pytest.mark.parametrize(("name", "history"), crossed(["llama", "gpt2"], [1 << 20, 1500]))
def test_over_links_that_break_and_servers_that_forget(name: str, history: int) -> None:
    dice, faults = random.Random(f"{name}{history}"), Counter[str]()
    seen: Counter[str] = Counter()
    while seen["exact"] < (12 if seen["true"] and seen["wrong"] and seen["copies"] else 60):
        link = in_process(name)
        unreliable(link, dice, faults)
        breaking(link, dice, faults)
        seen += played(name, link, dice, 0.8, history_bytes=history)
    assert seen["true"] and seen["wrong"] and seen["copies"] and faults["cancelled"], (seen, faults)


def test_refused_steps_ahead_are_computed_one_by_one() -> None:
    cuts = cuts_of("llama", 2)
    assert played("llama", chain("llama", cuts)[0], random.Random(3), 1.0, cuts[0])["exact"] == 25


def test_hooks_are_shown_no_call_that_was_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(SplitForward, "_look_ahead", lambda *_: sent.append(1))
    steps(make("llama"), make("llama"), in_process("llama"))
    assert sent
    sent.clear()
    model: Any = make("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    steps(model, make("llama"), in_process("llama"))
    assert not sent


def steps(model: nn.Module, plain: nn.Module, link: Any) -> None:
    from transformers import DynamicCache

    whole: Any = plain
    with SplitForward(model, cut_of("llama"), link), torch.no_grad():
        own, theirs = DynamicCache(config=whole.config), DynamicCache(config=whole.config)
        plan = Plan(model, own, random.Random(1), 1.0)
        for _ in range(6):
            plan.calls = plan.calls or [(0, [7])]
            plan.tokens = len(plan.calls[0][1])
            gone, ids = plan.calls.pop(0)
            if theirs.get_seq_length():
                own.crop(-gone), theirs.crop(-gone)
            token = foresight.set(plan)
            given = {"input_ids": torch.tensor([ids])}
            found = model(**given, past_key_values=own).logits
            foresight.reset(token)
            assert torch.equal(found, whole(**given, past_key_values=theirs).logits)


def test_the_generator_is_where_it_would_be() -> None:
    """A head that draws is not run in vain."""

    class Draws(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            torch.rand(1)
            return self.inner(*args, **kwargs)

    def drawing() -> Any:
        made: Any = make("llama")
        made.model.embed_tokens = Draws(made.model.embed_tokens)
        return made

    model, plain, tail = drawing(), drawing(), DecodingTail(drawing(), cut_of("llama"))
    torch.manual_seed(4)
    with torch.random.fork_rng():
        for _ in range(12):
            torch.rand(1)
        after = torch.rand(1)
    steps(model, plain, InProcess(tail))  # which draws in six calls of both
    assert torch.equal(torch.rand(1), after)


class TestTheServersSide:
    """A session whose steps are kept and taken back."""

    def session(self) -> Any:
        link = in_process("llama")
        made: list[Any] = []
        inner = link.step
        link.step = lambda *step: (made.append(step), inner(*step))[1]  # type: ignore[method-assign]
        from transformers import DynamicCache

        model: Any = make("llama")
        with SplitForward(model, cut_of("llama"), link), torch.no_grad():
            state = DynamicCache(config=model.config)
            for ids in ([5, 6, 7], [8], [9], [10], [11]):
                model(input_ids=torch.tensor([ids]), past_key_values=state)
        tail = DecodingTail(make("llama"), cut_of("llama"))
        last = {number: (header, tensors) for _, number, header, tensors, *_ in made}  # not those that lacked something
        return tail.open(), [last[number] for number in sorted(last)]

    def test_back_is_as_it_was(self) -> None:
        session, said = self.session()
        for number in (0, 1, 2):
            session.step(*said[number])
        answers = {}
        for number in (3, 4):
            header, tensors = said[number]
            answers[number] = session.step({**header, "keep": [number, 3]}, tensors)[1]
        kept = session.nbytes
        assert kept > 3 * session._mirror.form_bytes  # its own, and of both that are kept
        with pytest.raises(SessionLost, match="may be taken back"):
            session.fork()
        for back in (4, 3, 4, 4, 3):  # the second 4 is of a step that was not made: there is nothing to take back
            header, tensors = said[back]
            found = session.step({**header, "back": back, "keep": [back, 3]}, tensors)[1]
            assert torch.equal(found[0], answers[back][0])
        session.step({"still": 1}, [])
        assert session.nbytes < kept and not session._kept
        session.fork()

    def test_steps_not_kept_raise_session_lost(self) -> None:
        session, said = self.session()
        for number in (0, 1, 2):
            session.step(*said[number])
        header, tensors = said[3]
        session.step({**header, "keep": [3, 3]}, tensors)
        for number in (2, 9):
            with pytest.raises(SessionLost, match=f"before step {number}"):
                session.step({**said[4][0], "back": number}, said[4][1])

    @pytest.mark.parametrize(
        "said",
        [
            *({"keep": one} for one in (3, [1], ["a", 1], [MOST_KEPT + 1, 1], [0, 2**70], None, [1.5, 1])),
            *({"back": one} for one in ("a", 1.5, None, [1])),
        ],
    )
    def test_malformed(self, said: dict[str, Any]) -> None:
        session, steps = self.session()
        session.step(*steps[0])
        header, tensors = steps[1]
        expected = session.fork().step(header, tensors)[1]
        with pytest.raises(BadFrame):
            session.step({**header, **said}, tensors)
        assert torch.equal(session.step(header, tensors)[1][0], expected[0])

    def test_a_middle_part_takes_nothing_back(self) -> None:
        link = chain("llama", cuts_of("llama", 2))[0]
        session = link._open()
        with pytest.raises(CutRefused, match="other servers"):
            session.step({"keep": [1, 1]}, [])


@pytest.mark.parametrize("by", ["torch", "numpy"])
def test_inputs_that_are_written_to_after_they_were_foreseen_are_others(by: str) -> None:
    from transformers import DynamicCache

    class Same(Plan):
        def next(self, after: int, saved_ns: int, compute_ns: int) -> NextCall | None:
            return None if after else NextCall({"input_ids": ids, "past_key_values": self.state}, 1)

    model: Any = make("llama")
    whole: Any = make("llama")
    ids = torch.tensor([[7]])
    with SplitForward(model, cut_of("llama"), in_process("llama")), torch.no_grad():
        own, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
        plan = Same(model, own, random.Random(1), 1.0)
        plan.tokens = 1
        token = foresight.set(plan)
        for number in range(8):
            found = model(input_ids=ids, past_key_values=own).logits
            if number == 6:
                foresight.reset(token)  # what was foreseen is still checked
            assert torch.equal(found, whole(input_ids=ids, past_key_values=theirs).logits)
            if by == "torch":
                ids += 1
            else:
                ids.numpy()[0, 0] += 1


def test_bytes_that_were_sent_in_vain_are_counted() -> None:
    crossed: list[bytes] = []
    tail = DecodingTail(make("llama"), cut_of("llama"))
    model: Any = make("llama")
    with SplitForward(model, cut_of("llama"), InProcess(tail, crossed)) as split, torch.no_grad():
        from transformers import DynamicCache

        own = DynamicCache(config=model.config)
        plan = Plan(model, own, random.Random(1), 0.5)
        for _ in range(12):
            plan.calls = plan.calls or [(0, [7])]
            plan.tokens = len(plan.calls[0][1])
            gone, ids = plan.calls.pop(0)
            if own.get_seq_length():
                own.crop(-gone)
            token = foresight.set(plan)
            model(input_ids=torch.tensor([ids]), past_key_values=own)
            foresight.reset(token)
        model(input_ids=torch.tensor([[119]]), past_key_values=own)  # which was not foreseen
        up = sum(len(one) for one in crossed[::4]) + sum(len(one) for one in crossed[1::4])
        assert plan.asked > 5 and sum(one.bytes_up for one in split.records) == up


def test_growth_is_what_an_answer_changed_in_proportion_to_its_tokens() -> None:
    from transformers import DynamicCache

    from shared_hooks.generation.mirror import Mirror

    state = DynamicCache()
    for layer in range(2):
        state.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), layer)
    mirror = Mirror(state, torch.device("cpu"))
    before = mirror.snapshot()
    state.update(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4), 1)
    mirror.look()
    growth = AnswerGrowth.seen(mirror, before, 2)
    assert growth is not None and AnswerGrowth.seen(mirror, before, 0) is None
    assert growth.apply(mirror, 3)
    assert state.layers[1].keys.shape == (1, 2, 10, 4) and state.layers[0].keys.shape == (1, 2, 5, 4)
    odd = AnswerGrowth(3, growth.nodes_changed, growth.places)
    assert not odd.apply(mirror, 1) and state.layers[1].keys.shape == (1, 2, 10, 4)


def test_a_stale_branch_is_not_computed() -> None:
    link = in_process("llama")
    link.sessions[1], link.steps[1] = link._open(), 3
    with pytest.raises(BadFrame, match="number of a step"):
        link.begin(1, 3, {"back": "x"}, [], 1).result()
    with pytest.raises(StepOutOfOrder, match="taken back"):
        link.begin(1, 3, {}, [], 0).result()

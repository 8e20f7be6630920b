"""A session and hostile steps: refused by name, nothing large is made, and the honest step after them is right."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared_hooks.errors import BadFrame, CutRefused, IsthmusError, TooLarge, UnknownLayer
from shared_hooks.generation import DecodingSession, DecodingTail, InProcess, SplitForward, StepReply
from tests.shared_hooks.generation.small import cut_of, in_process, make, prompt

Step = tuple[dict[str, Any], list[torch.Tensor]]


class Kept(InProcess):
    """Keeps the steps as they came, and the answers."""

    def __init__(self, tail: DecodingTail) -> None:
        super().__init__(tail)
        self.kept: list[tuple[Step, StepReply]] = []

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        *rest: Any,
    ) -> StepReply:
        step = copy.deepcopy(header), [tensor.clone() for tensor in tensors]
        reply = super().step(session, number, header, tensors, *rest)
        self.kept.append((step, reply))
        return reply


@pytest.fixture(scope="module", params=["llama", "t5", "hybrid"])
def honest(request: pytest.FixtureRequest) -> tuple[DecodingTail, list[tuple[Step, StepReply]]]:
    name: str = request.param
    tail = DecodingTail(make(name), cut_of(name))
    link, model = Kept(tail), make(name)
    with SplitForward(model, cut_of(name), link):
        model.generate(**prompt(rows=2), max_new_tokens=6, num_beams=2, do_sample=False)  # type: ignore[operator]
    return tail, link.kept


def replayed(tail: DecodingTail, kept: list[tuple[Step, StepReply]], count: int) -> DecodingSession:
    session = tail.open()
    for (header, tensors), _ in kept[:count]:
        session.step(through(header), [tensor.clone() for tensor in tensors])
    return session


def through(header: dict[str, Any]) -> Any:
    """As JSON would bring it."""
    import json

    return json.loads(json.dumps(header))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


HOSTILE: list[Any] = [
    *(None, True, -1, 0, 3, 2**31, 2**63, 10**30, 1.5, "", "x", "__class__", [], {}, [[]], [None]),
    *(["v", 2**62], ["m", [2**40], [1], "float32"], ["m", [-1], [1], "float32"], ["c", "os:system"]),
    *(["o", "builtins:object", []], ["o", "torch.nn.modules.linear:Linear", []], ["l", "", [[0, ["l", "", []]]]]),
    *(["+m", [1, 1], [1, 1]], ["+v", 2**60], ["i", "int64", [1] * 100], ["t", [["v", 1]]], "float32", "cuda:99"),
    *(["=", [[["v", 1], [["layers"]]]]], ["crop", [10**9]], ["reorder_cache", [[99, -99]]], ["__init__", []]),
]


def altered(header: dict[str, Any], dice: random.Random) -> Any:
    """The header with something hostile in one place, or without something."""
    made = through(header)
    path = dice.choice([place for place in places(made) if place])
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    if dice.random() < 0.15:
        del holder[path[-1]]
    else:
        holder[path[-1]] = copy.deepcopy(dice.choice(HOSTILE))
    return made


def test_altered_steps_leave_the_session_as_it_was(honest: Any) -> None:
    tail, kept = honest
    dice = random.Random(7)
    refused = 0
    for count in (1, 3, 5):
        session = replayed(tail, kept, count)
        (header, tensors), answer = kept[count]
        for _ in range(60):
            try:
                session.fork().step(altered(header, dice), [tensor.clone() for tensor in tensors])
                bad = altered(header, dice)
                session.step(bad, [tensor.clone() for tensor in tensors])
            except Exception as error:  # whatever the model raises; the server calls it ModelFailed
                refused += isinstance(error, IsthmusError)
            else:
                session = replayed(tail, kept, count)  # it was accepted: it may have been another step
                continue
            with_honest = session.fork()
            found, made = with_honest.step(through(header), [tensor.clone() for tensor in tensors])
            assert found["o"] == answer.header["o"]
            assert all(map(torch.equal, made, answer.tensors))
    assert refused > 50


@pytest.mark.parametrize("header", [None, [], "step", 7, {}, {"in": []}, {"new": ["v", 1]}, {"new": ["l", "", []]}])
def test_invalid_step_is_refused(header: Any) -> None:
    session = DecodingTail(make("llama"), cut_of("llama")).open()
    with pytest.raises(IsthmusError):
        session.step(header, [])


def test_a_step_takes_no_more_memory_than_it_may() -> None:
    model = make("llama")
    with (
        SplitForward(
            model, cut_of("llama"), InProcess(DecodingTail(make("llama"), cut_of("llama"), step_bytes=10_000))
        ),
        pytest.raises(TooLarge, match="more than 0 MiB"),
    ):
        model.generate(**prompt(rows=2), max_new_tokens=6)  # type: ignore[operator]
    with SplitForward(
        model, cut_of("llama"), InProcess(DecodingTail(make("llama"), cut_of("llama"), step_bytes=1 << 20))
    ):
        model.generate(**prompt(rows=2), max_new_tokens=6)  # type: ignore[operator]


def test_a_static_cache_as_long_as_somebody_says_is_not_made() -> None:
    """2^30 places are 64 GiB of this process."""
    model = make("llama")
    tail = DecodingTail(make("llama"), cut_of("llama"))
    link = Kept(tail)
    with SplitForward(model, cut_of("llama"), link):
        model.generate(**prompt(), max_new_tokens=3, cache_implementation="static")  # type: ignore[operator]
    (header, tensors), _ = link.kept[0]
    text = through(header)
    (length,) = {one[1][1] for layer in text["new"][2][0][1][2] for one in layer[1][2] if one[0] == "max_cache_len"}

    def longer(value: Any) -> Any:
        if isinstance(value, list):
            return ["v", 1 << 30] if value == ["v", length] else [longer(one) for one in value]
        return {key: longer(one) for key, one in value.items()} if isinstance(value, dict) else value

    with pytest.raises(TooLarge):
        tail.open().step(longer(text), tensors)


def test_sizes_are_added_up_before_anything_is_made() -> None:
    from shared_hooks.generation.remote_tensor import StepAllowance

    with StepAllowance(1 << 20):
        torch.zeros(1 << 17)
        with pytest.raises(TooLarge, match="1 MiB"):
            torch.arange(1 << 30)
    with StepAllowance(1 << 20), pytest.raises(TooLarge):
        torch.zeros(1, 1).expand(1 << 16, 1 << 16).contiguous()


# Bad input, by name


def test_a_cut_that_is_not_there() -> None:
    with pytest.raises(UnknownLayer, match=r"model\.layers\.1"):
        SplitForward(make("llama"), "layers.1", in_process("llama"))
    with pytest.raises(CutRefused, match="list of modules"):
        SplitForward(make("llama"), "model.layers", in_process("llama"))
    for bad in ("", "#2", "model.layers.1#0", "model.layers.1#x"):
        with pytest.raises(UnknownLayer):
            SplitForward(make("llama"), bad, in_process("llama"))


def test_a_cut_inside_an_attention_block_is_exact_or_refused() -> None:
    inside = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "self_attn", "mlp.act_fn"]
    exact = 0
    for part in inside:
        cut, model = f"model.layers.1.{part}", make("llama")
        whole = model.generate(**prompt(), max_new_tokens=5, do_sample=False)  # type: ignore[operator]
        with SplitForward(model, cut, InProcess(DecodingTail(make("llama"), cut))):
            try:
                found = model.generate(**prompt(), max_new_tokens=5, do_sample=False)  # type: ignore[operator]
            except IsthmusError:
                continue
        assert torch.equal(whole, found), part
        exact += 1
    assert exact >= 3


def test_a_cache_of_an_unknown_kind_is_refused_by_name() -> None:
    from transformers import DynamicCache

    class Secret:
        pass

    model = make("llama")
    state = DynamicCache(config=model.config)  # type: ignore[arg-type]
    state.secret = Secret()  # type: ignore[attr-defined]
    with SplitForward(model, cut_of("llama"), in_process("llama")), pytest.raises(IsthmusError, match="Secret"):
        model(**prompt(), past_key_values=state)


def test_a_beam_out_of_range_is_refused_and_the_session_continues(honest: Any) -> None:
    tail, kept = honest
    count = next(n for n, ((header, _), _) in enumerate(kept) if n > 1 and "do" in header)
    session = replayed(tail, kept, count)
    (header, tensors), answer = kept[count]
    bad = through(header)
    bad["do"] = [["reorder_cache", [[0, 99, 0, 0]]]]
    with pytest.raises(BadFrame, match="reorder_cache"):
        session.step(bad, [tensor.clone() for tensor in tensors])
    _, made = session.step(through(header), [tensor.clone() for tensor in tensors])
    assert all(map(torch.equal, made, answer.tensors))


class Resizing(torch.nn.Module):
    """Takes another path from the fourth word on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = make("llama")
        self.extra = torch.nn.Linear(120, 120)

    def forward(self, input_ids: torch.Tensor, past_key_values: Any) -> Any:
        out = self.inner(input_ids=input_ids, past_key_values=past_key_values)
        return self.extra(out.logits) if past_key_values.get_seq_length() > 3 else out.logits


def test_a_model_that_changes_its_path_by_length_is_exact() -> None:
    from transformers import DynamicCache

    here, there = Resizing().eval(), Resizing().eval()

    def run() -> list[torch.Tensor]:
        state = DynamicCache(config=here.inner.config)  # type: ignore[arg-type]
        with torch.no_grad():
            return [here(input_ids=torch.tensor([[word]]), past_key_values=state) for word in range(6, 13)]

    whole = run()
    with SplitForward(here, "inner.model.layers.1", InProcess(DecodingTail(there, "inner.model.layers.1"))):
        split = run()
    assert all(map(torch.equal, whole, split))


def test_neither_words_nor_embeddings_of_the_prompt_cross() -> None:
    record: list[bytes] = []
    model = make("llama")
    given = prompt(rows=2, length=20)
    with SplitForward(model, cut_of("llama"), in_process("llama", record)):
        model.generate(**given, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    sent = b"".join(record)
    ids = given["input_ids"][0]
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        for start in range(len(ids) - 3):
            assert ids[start : start + 4].to(dtype).numpy().tobytes() not in sent or dtype == torch.uint8
    for text in (str(ids[:4].tolist()).strip("[]"), str(ids[:4].tolist()).strip("[]").replace(" ", "")):
        assert text.encode() not in sent
    rows = model.get_input_embeddings().weight[ids.unique()]  # type: ignore[operator]
    for row in rows:
        assert row.detach().numpy().tobytes()[:32] not in sent
    assert len(sent) > 20 * 2 * 32 * 4  # hidden states did


def test_a_layer_before_the_cut_that_takes_a_ghosts_memory_ends_no_process() -> None:
    """``made.data = given``: the first step learns that the layer cannot run on placeholders, and skips it."""

    def swapping(model: Any) -> Any:
        first = model.model.layers[0]

        class Swaps(type(first)):  # type: ignore[misc]
            def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                made = torch.zeros(hidden_states.shape)
                made.data = hidden_states * 1
                return super().forward(made, *args, **kwargs)

        first.__class__ = Swaps
        return model

    tail, model = DecodingTail(swapping(make("llama")), cut_of("llama")), swapping(make("llama"))
    expected = model.generate(**prompt(rows=1), max_new_tokens=4, do_sample=False)
    with SplitForward(model, cut_of("llama"), InProcess(tail)):
        assert torch.equal(model.generate(**prompt(rows=1), max_new_tokens=4, do_sample=False), expected)


@pytest.mark.parametrize(
    "header",
    [
        {"r": ["tuple", 5], "o": [["s", 0]]},
        {"r": ["os:system", []], "o": []},
        {"r": [True, []], "o": []},
        {"r": [["x"], [["k", "v", 1]]], "o": [["s", 0]]},
        {"o": [["s", 99]]},
        {"o": [{}]},
        {"o": 7},
        {"o": [["in", "x"]]},
        {"need": [{}]},
        {"need": [0, [], None]},
        {"d": [["m", 1]]},
    ],
)
def test_hostile_answers_raise_named_errors(header: dict[str, Any]) -> None:
    """Never the errors of Python that reading it raises."""

    class Lies(InProcess):
        def step(self, *given: Any) -> StepReply:
            reply = super().step(*given)
            return StepReply({**reply.header, **header}, reply.tensors)

    model = make("llama")
    with (
        SplitForward(model, cut_of("llama"), Lies(DecodingTail(make("llama"), cut_of("llama")))),
        pytest.raises(IsthmusError),
    ):
        model.generate(**prompt(rows=1), max_new_tokens=3, do_sample=False)  # type: ignore[operator]

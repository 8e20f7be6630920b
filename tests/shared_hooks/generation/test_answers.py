"""What comes back of the logits may be little, and generate() gives the same; else it is refused by name."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from shared_hooks.errors import BadFrame, CutRefused, TooLarge
from shared_hooks.generation import SplitForward
from shared_hooks.generation.asking import CallReports
from shared_hooks.generation.mirror import Mirror
from shared_hooks.generation.results import TailSampler, shortened, widened
from shared_hooks.tensors import class_name
from tests.shared_hooks.generation.small import WORDS, cut_of, in_process, make, prompt
from tests.shared_hooks.generation.test_sessions import Flaky

TOP = ("top", 50)
SAMPLES: dict[str, dict[str, Any]] = {
    "all words": {"top_k": 0},
    "warm": {"top_k": 0, "temperature": 1.7},
    "top k": {"top_k": 20},
    "top p": {"top_k": 0, "top_p": 0.8},
    "min p": {"top_k": 0, "min_p": 0.02},
    "together": {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
}


def generate(model: Any, rows: int = 1, **settings: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(**prompt(rows), **{"max_new_tokens": 12, "do_sample": False, **settings})


def whole_and_split(name: str, answer: Any, rows: int = 1, **settings: Any) -> tuple[Any, Any, SplitForward]:
    """Both results, and the state of the generator afterwards is the same."""
    model = make(name)
    whole, state = generate(model, rows, **settings), torch.get_rng_state()
    with SplitForward(model, cut_of(name), in_process(name), answer=answer) as split:
        found = generate(model, rows, **settings)
    assert torch.equal(torch.get_rng_state(), state)
    return whole, found, split


def down(split: SplitForward) -> int:
    """Bytes of a late step."""
    return split.records[-1].bytes_down


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mamba"])
def test_the_token_alone_is_enough_for_greedy_search(name: str) -> None:
    for rows in (1, 3):
        whole, found, split = whole_and_split(name, ("token",), rows)
        assert torch.equal(whole, found)
        assert down(split) < WORDS * 4  # and with what is said of the state


@pytest.mark.parametrize(
    ("name", "how"), [*(("llama", how) for how in SAMPLES), *((name, "together") for name in ("gpt2", "t5", "mamba"))]
)
def test_the_server_samples_as_this_side_would(name: str, how: str) -> None:
    for rows in (1, 3):
        whole, found, split = whole_and_split(name, ("sample",), rows, do_sample=True, **SAMPLES[how])
        assert torch.equal(whole, found)
        # the generator's state is sent once: 5,056 bytes
        assert [record.bytes_up > 5000 for record in split.records][1:] == [False] * 11
        assert down(split) < 400


def test_random_draw_by_another_thread_is_noticed() -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Draws(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            torch.rand(ids.shape[1] % 3)
            return torch.zeros(ids.shape[0], dtype=torch.bool)

    beside = StoppingCriteriaList([Draws()])
    whole, found, _ = whole_and_split("llama", ("sample",), 2, do_sample=True, stopping_criteria=beside)
    assert torch.equal(whole, found)


def test_rows_that_came_to_their_end() -> None:
    model = make("llama")
    end = int(generate(model, 3, do_sample=True)[1, 15])
    whole, found, _ = whole_and_split("llama", ("sample",), 3, do_sample=True, eos_token_id=end)
    assert torch.equal(whole, found)
    assert (whole == 0).any()


def test_a_lost_session_draws_the_same_words() -> None:
    model = make("llama")
    whole = generate(model, do_sample=True)
    with SplitForward(model, cut_of("llama"), Flaky("llama", lost={4, 9}), answer=("sample",)):
        assert torch.equal(generate(model, do_sample=True), whole)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True},
        {"do_sample": True, "top_k": 30, "top_p": 0.7, "typical_p": 0.9, "renormalize_logits": True},
        {"do_sample": True, "temperature": 0.01},
        {"do_sample": True, "min_new_tokens": 6, "eos_token_id": [3, 4], "top_k": 5},
        {"suppress_tokens": list(range(20, 40))},
        {"prompt_lookup_num_tokens": 3, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 4},
    ],
)
def test_the_likeliest_words_are_enough(settings: dict[str, Any]) -> None:
    for answer in (TOP, ("least",)):
        whole, found, _ = whole_and_split("llama", answer, **settings)
        assert torch.equal(whole, found)


def test_where_nothing_is_sampled_the_server_samples_nothing() -> None:
    for settings in ({}, {"repetition_penalty": 1.2}, {"prompt_lookup_num_tokens": 3}):
        whole, found, _ = whole_and_split("llama", ("sample",), **settings)
        assert torch.equal(whole, found)


def test_scores_behind_a_top_k_are_those_of_all_logits() -> None:
    details = {"do_sample": True, "top_k": 10, "return_dict_in_generate": True, "output_scores": True}
    whole, found, _ = whole_and_split("llama", TOP, 2, **details)
    assert all(map(torch.equal, whole.scores, found.scores))


@pytest.mark.parametrize(
    ("answer", "settings", "why"),
    [
        (TOP, {"num_beams": 2}, "beam search"),
        (TOP, {"repetition_penalty": 1.2}, "RepetitionPenalty"),
        (TOP, {"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
        (TOP, {"do_sample": True, "top_k": 0}, "without top_k"),
        (TOP, {"do_sample": True, "top_k": 0, "min_p": 0.1}, "MinP"),
        (TOP, {"do_sample": True, "top_k": 51}, "51 likeliest"),
        (TOP, {"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
        (TOP, {"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        (TOP, {"logits_processor": "own"}, "Own"),
        (TOP, {"custom_generate": lambda model, input_ids, **more: model(input_ids).logits}, "custom_generate"),
        (("token",), {"do_sample": True}, "50 likeliest"),
        (("token",), {"min_new_tokens": 3, "eos_token_id": 4}, "3 likeliest"),
        (("sample",), {"do_sample": True, "repetition_penalty": 1.2}, "RepetitionPenalty"),
        (("sample",), {"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper"),
        (("sample",), {"do_sample": True, "prompt_lookup_num_tokens": 3}, "drafts"),
    ],
)
def test_insufficient_answer_is_refused_by_name(answer: Any, settings: dict[str, Any], why: str) -> None:
    if settings.get("logits_processor") == "own":
        settings = {"logits_processor": [Own()]}
    model = make("llama")
    link = in_process("llama")
    with SplitForward(model, cut_of("llama"), link, answer=answer), pytest.raises(CutRefused, match=why):
        generate(model, **settings)
    whole, found, _ = (
        whole_and_split("llama", ("least",), **settings) if "custom_generate" not in settings else (0, 0, 0)
    )
    assert str(whole) == str(found)


class Own:
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return -scores


def test_a_model_that_generates_in_its_own_way_needs_all() -> None:
    model = make("llama")

    class Other(type(model)):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

    model.__class__ = Other
    with (
        SplitForward(model, cut_of("llama"), in_process("llama"), answer=TOP),
        pytest.raises(CutRefused, match=r"Other\.generate"),
    ):
        generate(model)


def test_calls_of_the_model_alone_get_all_logits_unless_asked_otherwise() -> None:
    for answer, all_come in ((("sample",), True), (("least",), True), (("top", 3), False)):
        model = make("llama")
        with SplitForward(model, cut_of("llama"), in_process("llama"), answer=answer):
            logits = model(**prompt()).logits
        assert bool(logits.isfinite().all()) is all_come


def test_the_model_is_afterwards_as_it_was() -> None:
    model = make("llama")
    before = set(vars(model))
    with SplitForward(model, cut_of("llama"), in_process("llama"), answer=("least",)):
        generate(model)
    assert set(vars(model)) == before


@pytest.mark.parametrize("answer", [("top", 0), ("top",), ("all",), (), ("top", "5")])
def test_an_answer_that_there_is_not(answer: Any) -> None:
    with pytest.raises(CutRefused, match="no such answer"):
        SplitForward(make("llama"), cut_of("llama"), in_process("llama"), answer=answer)


# On the wire


def there_and_back(logits: torch.Tensor, wanted: Any) -> torch.Tensor:
    found = shortened(wanted, TailSampler().draw)("logits", logits)
    return logits if found is None else widened([*found[0], 0], found[1], 1 << 16)


def test_ties_are_reported_as_they_are() -> None:
    logits = torch.full((2, 3, 400), -3.0)
    logits[:, :, [7, 9, 200, 301]] = 2.0
    logits[0, 1, 5] = 2.5
    top = there_and_back(logits, ["top", 2])
    assert torch.equal(top.topk(2).values, logits.topk(2).values)
    assert torch.equal(top > 0, logits > 0)  # all that tie with the second
    assert torch.equal(there_and_back(logits, ["token"]).argmax(-1), logits.argmax(-1))


def test_words_that_a_temperature_makes_equal_are_sent_too() -> None:
    numbers = torch.arange(4000, dtype=torch.int32) + torch.tensor(7.9).view(torch.int32)
    near = numbers.view(torch.float32)[torch.randperm(4000, generator=torch.Generator().manual_seed(0))][None, None]
    for most in range(40, 50):
        whole = near / 3.9
        kept = whole >= whole.topk(most).values[..., -1:]
        assert int(kept.sum()) in (most, most + 1)
        sent = there_and_back(near, ["top", most]) / 3.9
        assert torch.equal(sent >= sent.topk(most).values[..., -1:], kept)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none(value: float) -> None:
    logits = torch.randn(1, 2, 300, generator=torch.Generator().manual_seed(0))
    logits[..., 40:45] = value
    top = there_and_back(logits, ["top", 3])
    assert torch.equal(top.argmax(-1), logits.argmax(-1))
    assert torch.equal(there_and_back(logits, ["token"]).argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 1, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    top = there_and_back(logits, ["top", 20])
    assert top.dtype == dtype
    kth = logits.topk(20).values[..., -1:]
    assert torch.equal(top >= kth, logits >= kth)


STATE = torch.Generator().manual_seed(1).get_state().numpy().tobytes()


@pytest.mark.parametrize(
    "wanted",
    [
        ["top"],
        ["top", 0],
        ["top", True],
        ["token", 1],
        [],
        {},
        "top",
        ["best", 3],
        ["sample"],
        ["sample", 3],
        ["sample", [["Embedding", 9]]],
        ["sample", [["TemperatureLogitsWarper", 0.0]]],
        ["sample", [["TemperatureLogitsWarper"]]],
        ["sample", [["TopKLogitsWarper", "5"]]],
        ["sample", [["TopPLogitsWarper", 0.5, 0]]],
        ["sample", [7]],
        ["sample", [["TemperatureLogitsWarper", 1.0]] * 17],
    ],
)
def test_malformed_wishes(wanted: Any) -> None:
    sampler = TailSampler(STATE)
    with pytest.raises(BadFrame):
        shortened(wanted, sampler.draw)("logits", torch.zeros(1, 1, 5))
    assert sampler.state == STATE


def test_malformed_states_of_a_generator() -> None:
    import base64

    states: list[Any] = [
        7,
        None,
        "",
        "%%",
        base64.b64encode(STATE[:-8]).decode(),
        base64.b64encode(bytes(5056)).decode(),
    ]
    beyond = bytearray(STATE)
    beyond[8], beyond[16:18] = 200, (600).to_bytes(2, "little")
    for state in [*states, base64.b64encode(beyond).decode()]:
        with pytest.raises(BadFrame):
            TailSampler().take(state)
    with pytest.raises(BadFrame, match="no state"):
        TailSampler().draw([], torch.zeros(1, 5))


def test_answers_that_do_not_fit() -> None:
    for said, tensors in (
        (["token", [1, 1, 5], "float32", 0], [torch.tensor([[9]])]),
        (["top", [1, 5], "float32", 0], [torch.zeros(1, 2), torch.tensor([[1, -2]])]),
        (["token", [1 << 20, 1 << 20, 5], "float32", 0], [torch.tensor([[9]])]),
    ):
        with pytest.raises(BadFrame):
            widened(said, tensors, 1000)


def test_a_fork_draws_by_itself() -> None:
    """Sessions that go on from one state each have their own generator."""
    from transformers import DynamicCache

    def run(model: nn.Module) -> list[Any]:
        state = DynamicCache(config=model.config)  # type: ignore[arg-type]
        torch.manual_seed(3)
        ids = prompt()["input_ids"]
        first = model.generate(ids, past_key_values=state, max_new_tokens=4, do_sample=True)  # type: ignore[operator]
        twin = copy.deepcopy(state)
        return [
            model.generate(first, past_key_values=one, max_new_tokens=6, do_sample=True)  # type: ignore[operator]
            for one in (state, twin)
        ]

    model = make("llama")
    whole = run(model)
    with SplitForward(model, cut_of("llama"), in_process("llama"), answer=("sample",)):
        assert all(map(torch.equal, run(model), whole))


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, "x", None, [], 1 << 80])
def test_numbers_that_are_none_are_bad_frames(number: Any) -> None:
    """JSON has infinities, and Python's own errors are no answer to a stranger."""
    reports = CallReports(torch.device("cpu"))
    for call in (["a", number, ["t", 0], [], []], ["a", 1, ["t", 0], [[[number], [1], "float32"]], []]):
        with contextlib.suppress(BadFrame, TooLarge):
            reports.apply([call])
    form = ["o", class_name(DynamicCache), [["a", ["m", [1], [1], "float32"]], ["b", ["v", 1]]]]
    mirror = Mirror.built(form, torch.device("cpu"))
    for difference in (["+m", [number], [1]], ["+i", number], ["+v", number]):
        with contextlib.suppress(BadFrame, TooLarge):
            mirror.put(None, [[difference, [["a"]]]])
    with pytest.raises(BadFrame):
        reports.apply([["a", math.inf, ["t", 0], [], []]])

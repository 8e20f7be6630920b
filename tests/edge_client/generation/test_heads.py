"""Heads of several texts in lock-step: the tokens of each are those it has alone."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edge_client.generation.heads import SharedHeads, TextHeads
from shared_hooks import WrappedModel
from shared_hooks.generation import DecodingTail, InProcess, SplitForward, state_in
from tests.shared_hooks.generation.small import cut_of, make

TEXTS, TOKENS = 4, 16


def copies(model: Any) -> list[Any]:
    weights = {id(one): one for one in itertools.chain(model.parameters(), model.buffers())}
    return [copy.deepcopy(model, dict(weights)) for _ in range(TEXTS)]


def prompt(number: int) -> torch.Tensor:
    """They differ in length, so that no two texts are at the same place."""
    return torch.randint(6, 100, (1, 5 + 2 * number), generator=torch.Generator().manual_seed(number))


def generate(model: Any, number: int, **more: Any) -> torch.Tensor:
    ids = prompt(number)
    found: torch.Tensor = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, **more
    )
    return found


def at_once(
    name: str, models: list[Any], write: Callable[[Any, int, TextHeads], Any], cut: str | None = None
) -> tuple[list[Any], list[SplitForward], list[int]]:
    """What each text gives in a thread of its own, how it was split, and what its link heard of the others."""
    shared, cut = SharedHeads(models), cut or cut_of(name)
    links: list[Any] = [InProcess(DecodingTail(make(name), cut)) for _ in models]
    texts = [shared.of_text(link) for link in links]
    splits = [SplitForward(one, cut, link, heads=text) for one, link, text in zip(models, links, texts, strict=True)]
    start = threading.Barrier(len(models))

    def work(number: int) -> Any:
        start.wait(30)
        try:
            with splits[number]:
                return write(models[number], number, texts[number])
        except Exception as error:
            return error
        finally:
            texts[number].ended()

    with ThreadPoolExecutor(len(models)) as pool:
        found = list(pool.map(work, range(len(models))))
    shared.close()
    return found, splits, [getattr(link, "at_once", 0) for link in links]


@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding", "experts", "hybrid", "bloom"])
def test_tokens_are_those_of_each_text_alone(name: str) -> None:
    plain = [generate(make(name), number) for number in range(TEXTS)]
    models = copies(make(name))
    before = [{path: set(vars(module)) for path, module in one.named_modules()} for one in models]
    found, splits, sent = at_once(name, models, lambda model, number, text: generate(model, number))
    for number, (ids, wanted) in enumerate(zip(found, plain, strict=True)):
        assert torch.equal(ids, wanted), f"text {number}: {ids}"
    sizes = [record.batch_size for split in splits for record in split.records]
    assert max(sizes) == TEXTS and max(sent) > 1  # what was said last: others may have ended
    assert sum(size > 1 for size in sizes) > len(sizes) // 2, sizes
    assert all(split.records[0].batch_size == 1 for split in splits), "prompts are read alone"
    assert [{path: set(vars(module)) for path, module in one.named_modules()} for one in models] == before


@pytest.mark.parametrize("inside", ["mlp.up_proj", "mlp", "self_attn.o_proj", "self_attn", "input_layernorm"])
def test_a_cut_inside_what_several_share_is_found(inside: str) -> None:
    """Each text leaves at its own copy's module, whether its block is run for all or not."""
    plain = [generate(make("llama"), number) for number in range(TEXTS)]
    found, splits, _ = at_once(
        "llama", copies(make("llama")), lambda model, number, text: generate(model, number), f"model.layers.1.{inside}"
    )
    for number, (ids, wanted) in enumerate(zip(found, plain, strict=True)):
        assert torch.equal(ids, wanted), f"text {number}: {ids}"
    assert max(record.batch_size for split in splits for record in split.records) == TEXTS


def test_copies_of_a_wrapped_model_are_batched() -> None:
    """As those that an endpoint makes of its client's model."""
    plain = [generate(make("llama"), number) for number in range(TEXTS)]
    with WrappedModel(make("llama")) as wrapped:
        models = copies(wrapped.model)
        found, splits, _ = at_once("llama", models, lambda model, number, text: generate(model, number))
    for ids, wanted in zip(found, plain, strict=True):
        assert torch.equal(ids, wanted)
    assert max(record.batch_size for split in splits for record in split.records) == TEXTS


def test_error_of_one_text_does_not_affect_others() -> None:
    plain = [generate(make("llama"), number) for number in range(TEXTS)]
    models = copies(make("llama"))

    def breaks(module: Any, args: Any, kwargs: Any) -> None:
        if state_in(kwargs).get_seq_length() == prompt(1).shape[1] + 5:
            raise ValueError("in the head")

    models[1].model.layers[0].self_attn.register_forward_pre_hook(breaks, with_kwargs=True)
    found, _, _ = at_once("llama", models, lambda model, number, text: generate(model, number))
    assert isinstance(found[1], ValueError) and "in the head" in str(found[1])
    for number in (0, 2, 3):
        assert torch.equal(found[number], plain[number])


def test_late_text_delays_no_second_step() -> None:
    """A text whose step does not come back stops no other."""
    models, release = copies(make("llama")), threading.Event()
    plain = [generate(make("llama"), number) for number in range(TEXTS)]

    def write(model: Any, number: int, text: TextHeads) -> torch.Tensor:
        def pauses(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            if number == 0 and ids.shape[1] == prompt(0).shape[1] + 4:
                assert release.wait(60), "the others wait for this text"
            return torch.zeros(len(ids), dtype=torch.bool)

        try:
            return generate(model, number, stopping_criteria=[pauses])
        finally:
            if number == 1:
                release.set()

    found, _, _ = at_once("llama", models, write)
    for ids, wanted in zip(found, plain, strict=True):
        assert torch.equal(ids, wanted)


def test_interruption_ends_all_texts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedHeads(copies(make("llama")))
    text = shared.of_text(SimpleNamespace(at_once=1))  # type: ignore[arg-type]
    monkeypatch.setattr(shared._together, "run", lambda *_, **__: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        text.run(lambda: None)
    monkeypatch.undo()
    assert text.run(lambda: None) == 1, "and the next may run"
    monkeypatch.setattr(shared, "_enough", lambda: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        text.run(lambda: None)
    monkeypatch.undo()
    assert not shared._waiting and text.run(lambda: None) == 1, "also one that was interrupted while it waited"
    shared.close()

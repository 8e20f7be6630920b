"""Ways to another answer than the whole model's without a word: each gives the whole model's, or is refused by name."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.errors import CutRefused, ServerUnavailable, SessionLost, TooLarge
from shared_hooks.generation import DecodingTail, InProcess, SplitForward, StepReply, register_state
from shared_hooks.tensors import UnknownHolder
from tests.shared_hooks.generation.small import cut_of, make, prompt

Run = Callable[[Any], list[torch.Tensor]]


@register_state
class Seen:
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, state: Seen | None = None) -> torch.Tensor:
        if state is not None:
            if len(state.keys) == self.number:
                state.keys.append(x)
            else:
                state.keys[self.number] = torch.cat([state.keys[self.number], x], 1)
            x = x + state.keys[self.number].mean(1, keepdim=True)
        return x + torch.tanh(self.linear(x))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([Block(number) for number in range(3)])
        self.last = nn.Linear(16, 50)
        self.eval()

    def forward(self, input_ids: torch.Tensor, state: Any = None, mask: Any = None) -> Any:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, state)
        return self.last(x if mask is None else x * mask.sum())


def ids(*words: int) -> torch.Tensor:
    return torch.tensor([list(words)])


def steps(model: Any) -> list[torch.Tensor]:
    state = Seen()
    return [model(input_ids=ids(*words), state=state) for words in ((1, 2, 3), (4,), (5,))]


@torch.no_grad()
def compared(
    made: Callable[[], Any], cut: str, run: Run, link: Callable[[DecodingTail], InProcess] = InProcess
) -> None:
    """Raises what the split model raises; else it gives what the whole one gives."""
    whole = run(made())
    here = made()
    with SplitForward(here, cut, link(DecodingTail(made(), cut))):
        found = run(here)
    assert all(map(torch.equal, whole, found))


# Inputs that are written to


def masked(count: int, write: Callable[[torch.Tensor], Any], *, grows: bool) -> Run:
    def run(model: Any) -> list[torch.Tensor]:
        state, found = Seen(), []
        mask = torch.ones(1, count, dtype=torch.int64)
        for word in (1, 2, 3):
            found.append(model(input_ids=ids(word), state=state, mask=mask))
            write(mask)
            if grows:
                mask = torch.cat([mask, torch.ones(1, 1, dtype=torch.int64)], 1)
        return found

    return run


def by_numpy(mask: torch.Tensor) -> None:
    mask.numpy()[0, : int(mask.sum()) % 5 + 1] = 0


def by_torch(mask: torch.Tensor) -> None:
    mask[0, : int(mask.sum()) % 5 + 1] = 0


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("count", [10, 6000])
@pytest.mark.parametrize("write", [by_numpy, by_torch])
def test_a_mask_that_is_written_to_between_steps(write: Any, count: int, grows: bool) -> None:
    compared(Toy, "blocks.1", masked(count, write, grows=grows))


class Advances(Toy):
    before = True

    def forward(self, input_ids: torch.Tensor, state: Any = None, mask: Any = None) -> Any:
        if self.before:
            mask += 1
        found = super().forward(input_ids, state, mask)
        if not self.before:
            mask += 1
        return found


@pytest.mark.parametrize("before", [False, True])
def test_a_model_that_writes_to_its_inputs_is_refused(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advances, "before", before)
    with pytest.raises(CutRefused, match="writes in place to an input"):
        compared(Advances, "blocks.1", masked(4, lambda mask: None, grows=False))


# What is around the model


def test_autocast_around_one_side_is_around_both() -> None:
    class Elsewhere(InProcess):
        def step(self, *given: Any) -> StepReply:
            found: list[StepReply] = []
            thread = threading.Thread(target=lambda: found.append(InProcess.step(self, *given)))
            thread.start()
            thread.join()
            return found[0]

    def run(model: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return steps(model)

    compared(Toy, "blocks.1", run, Elsewhere)


def test_training_on_one_side_is_refused() -> None:
    def run(model: Any) -> list[torch.Tensor]:
        model.train()
        torch.manual_seed(3)
        return [model(input_ids=ids(7, 8, 9)).logits]

    with pytest.raises(CutRefused, match="in training at all modules, and this side's at no module"):
        compared(lambda: make("gpt2"), cut_of("gpt2"), run)


def doubled(_: Any, given: Any, found: Any = None) -> Any:
    return found * 2 if found is not None else (given[0] * 2, *given[1:])


def hooked(path: str, *, before: bool) -> Run:
    def run(model: Any) -> list[torch.Tensor]:
        module = model.get_submodule(path)
        hook = module.register_forward_pre_hook(doubled) if before else module.register_forward_hook(doubled)
        try:
            return steps(model)
        finally:
            hook.remove()

    return run


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("path", ["blocks.1", "last"])
def test_a_hook_on_this_side_that_the_other_would_have_to_run_is_refused(path: str, before: bool) -> None:
    with pytest.raises(CutRefused, match=f"doubled on {path} would have to run"):
        compared(Toy, "blocks.1", hooked(path, before=before))


@pytest.mark.parametrize("before", [False, True])
def test_a_hook_before_the_cut_runs(before: bool) -> None:
    compared(Toy, "blocks.1", hooked("blocks.0", before=before))


def test_a_hook_that_both_models_have_runs_once() -> None:
    def made() -> Any:
        model = Toy()
        for path in ("", "blocks.0", "blocks.1", "last"):
            model.get_submodule(path).register_forward_hook(doubled)
        return model

    compared(made, "blocks.1", steps)


def test_inference_mode() -> None:
    def run(model: Any) -> list[torch.Tensor]:
        with torch.inference_mode():
            found = model.generate(**prompt(rows=2), max_new_tokens=6, num_beams=2, do_sample=False)
        return [found.clone()]

    compared(lambda: make("llama"), cut_of("llama"), run)


# States


class Breaks(InProcess):
    """One step does not come through."""

    calls = 0

    def step(self, *given: Any) -> StepReply:
        self.calls += 1
        if self.calls == 4:
            raise ServerUnavailable("the link is broken")
        return super().step(*given)


@pytest.mark.parametrize(("name", "key"), [("mamba", "cache_params"), ("hybrid", "past_key_values")])
def test_a_step_that_fails_after_writing_in_place_is_never_made_twice(name: str, key: str) -> None:
    from transformers import DynamicCache

    def run(model: Any) -> list[torch.Tensor]:
        state = DynamicCache(config=model.config)
        for word in range(6, 12):
            call = {"input_ids": ids(word), key: state}
            try:
                model(**call)
            except ServerUnavailable:
                model(**call)
        return []

    with pytest.raises(SessionLost, match="written to its state in place"):
        compared(lambda: make(name), cut_of(name), run, Breaks)


def started(model: Any) -> Any:
    from transformers import DynamicCache

    state = DynamicCache(config=model.config)
    model(input_ids=ids(7, 8, 9), past_key_values=state)
    return state


def test_a_shallow_copy_of_a_state_is_refused() -> None:
    def run(model: Any) -> list[torch.Tensor]:
        state = started(model)
        twin = copy.copy(state)
        twin.layers = copy.deepcopy(state.layers)
        return [model(input_ids=ids(10), past_key_values=twin).logits]

    with pytest.raises(CutRefused, match="shallow copy"):
        compared(lambda: make("llama"), cut_of("llama"), run)


@torch.no_grad()
def test_a_state_of_another_split_model_is_refused() -> None:
    one, other = make("llama"), make("llama")
    cut = cut_of("llama")
    with (
        SplitForward(one, cut, InProcess(DecodingTail(make("llama"), cut))),
        SplitForward(other, cut, InProcess(DecodingTail(make("llama"), cut))),
        pytest.raises(CutRefused, match="another model"),
    ):
        other(input_ids=ids(10), past_key_values=started(one))


def test_copies_of_copies_whose_originals_are_gone() -> None:
    def run(model: Any) -> list[torch.Tensor]:
        state, found = started(model), []
        for word in range(10, 14):
            state = copy.deepcopy(copy.deepcopy(state))
            found.append(model(input_ids=ids(word), past_key_values=state).logits)
        first = copy.deepcopy(state)
        second = copy.deepcopy(first)
        for word, one in enumerate((state, second, first, state)):
            found.append(model(input_ids=ids(word), past_key_values=one).logits)
        return found

    compared(lambda: make("llama"), cut_of("llama"), run)


class Noisy(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(self.embedding, nn.Dropout())  # type: ignore[assignment]
        self.train()


@torch.no_grad()
def test_a_session_that_drew_random_numbers_is_not_made_again_with_others() -> None:
    class Forgets(InProcess):
        def step(self, session: int, number: int, *rest: Any) -> StepReply:
            if number == 2:
                self.sessions.clear()
                raise SessionLost("the server was started again")
            return super().step(session, number, *rest)

    here = Noisy()
    with (
        SplitForward(here, "blocks.1", Forgets(DecodingTail(Noisy(), "blocks.1")), history_bytes=10),
        pytest.raises(SessionLost, match="draws random numbers"),
    ):
        steps(here)


# Two names of one memory


class Alike(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :] if self.kind == "view" else x


def tangled(kind: str) -> Toy:
    class Tangled(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.alike = Alike(kind)

        def forward(self, input_ids: torch.Tensor, state: Any = None, mask: Any = None) -> Any:
            x = self.embedding(input_ids)
            doubled = x * 2
            if kind == "before":
                x[:, :1].add_(1)
            y = self.alike(x)
            if kind == "after":
                x.view_as(x).add_(1)
            elif kind != "before":
                y += 1
            return self.last(x + y + doubled)

    return Tangled()


@pytest.mark.parametrize("kind", ["view", "itself", "before", "after"])
def test_a_write_that_is_seen_under_another_name_is_refused(kind: str) -> None:
    with pytest.raises(CutRefused, match="in place|written to since"):
        compared(lambda: tangled(kind), "alike", steps)


@register_state
class Twice:
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.same = self.keys


def test_a_list_in_two_places_of_a_state_is_refused() -> None:
    with pytest.raises(UnknownHolder, match="in two places"):
        compared(Toy, "blocks.1", lambda model: [model(input_ids=ids(1), state=Twice())])


@register_state
class Ring:
    def __init__(self) -> None:
        self.whole: Any = None
        self.part: Any = None
        self.count = 0


class Rings(Toy):
    def forward(self, input_ids: torch.Tensor, state: Any = None, mask: Any = None) -> Any:
        x = self.blocks[1](self.blocks[0](self.embedding(input_ids)))
        if state.whole is None:
            state.whole = torch.zeros(1, 4, 16)
            state.part = state.whole[:, 1:3]
        state.whole[:, state.count % 4] = x[:, -1]
        state.count += 1
        return self.last(x + state.part.sum(1, keepdim=True))


def test_a_view_in_a_state_is_one_in_its_copy() -> None:
    def run(model: Any) -> list[torch.Tensor]:
        state = Ring()
        found = [model(input_ids=ids(word), state=state) for word in range(2)]
        twin = copy.deepcopy(state)
        return found + [model(input_ids=ids(word), state=one) for word in range(4) for one in (twin, state)]

    compared(Rings, "blocks.1", run)


@pytest.mark.parametrize("name", ["batch_repeat_interleave", "batch_select_indices", "reorder_cache"])
def test_a_strangers_rows_are_counted_before_they_are_made(name: str) -> None:
    from shared_hooks.generation.mirror import Mirror, apply

    with torch.no_grad():
        mirror = Mirror(started(make("llama")), torch.device("cpu"))
    rows = 100_000 if name == "batch_repeat_interleave" else [0] * 60_000
    with pytest.raises(TooLarge):
        apply(mirror, [[name, [rows]]], 1 << 20)
    assert sum(one.untyped_storage().nbytes() for one in mirror.real()) < 1 << 20

"""Blocks of a decoder that several texts go through as one: as alone but for rounding, or alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.generation.gates import LONGER, MOST_FORMS, TRIALS, BlockGate, _BlockCall
from shared_hooks.generation.together import Lockstep

transformers = pytest.importorskip("transformers")

WIDTH, HEADS = 16, 2
STEPS = 12
LENGTHS = [(1, 3), (1, 11), (2, 6), (1, 1)]
"""Rows and tokens of each text when it begins."""


class Attention(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: Any, attention_mask: Any, past_key_values: Any) -> torch.Tensor:
        parts = self.project(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        keys, values = past_key_values.update(parts[1], parts[2], self.layer_idx)
        found = self.attend(parts[0], keys, values, attention_mask, past_key_values)
        return found.transpose(1, 2).flatten(2)

    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


class Block(nn.Module):
    def __init__(self, layer_idx: int, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.attention = attention(layer_idx)
        self.after = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, hidden: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        hidden = hidden + self.attention(hidden, attention_mask, past_key_values)
        return hidden + self.after(hidden)


class Decoder(nn.Module):
    def __init__(self, block: type[Block], *more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block(number, *more) for number in range(3)])
        self.double().eval()

    def forward(self, hidden: torch.Tensor, state: Any, **more: Any) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden, past_key_values=state, **more)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return hidden


class Text:
    """A state and what it is given, step by step."""

    def __init__(self, model: Decoder, rows: int, length: int, given: Callable[[int], dict[str, Any]]) -> None:
        self.dice = torch.Generator().manual_seed(100 * rows + length)
        self.model, self.rows, self.given = model, rows, given
        self.state = transformers.DynamicCache()
        for layer in range(3):
            size = rows, HEADS, length, WIDTH // HEADS
            pair = [torch.randn(size, generator=self.dice, dtype=torch.float64) for _ in range(2)]
            self.state.update(*pair, layer)

    def step(self) -> torch.Tensor:
        hidden = torch.randn((self.rows, 1, WIDTH), generator=self.dice, dtype=torch.float64)
        return self.model(hidden, self.state, **self.given(self.state.layers[0].keys.shape[2] + 1))

    def kept(self) -> list[torch.Tensor]:
        return [one for layer in self.state.layers for one in (layer.keys, layer.values)]


def run(
    make: Callable[[], Decoder],
    monkeypatch: pytest.MonkeyPatch,
    given: Callable[[int], dict[str, Any]] = lambda length: {},
    steps: int = STEPS,
) -> int:
    """How often calls went through a block as one. Whatever is done, each text is as it is alone."""
    count = 0
    through = BlockGate.through

    def counted(self: BlockGate, several: Any) -> Any:
        nonlocal count
        found = through(self, several)
        count += found is not None
        return found

    monkeypatch.setattr(BlockGate, "through", counted)
    model, other = make(), make()
    texts, alone = ([Text(one, *size, given) for size in LENGTHS] for one in (model, other))
    with torch.no_grad(), Lockstep(model) as together:
        for number in range(steps):
            torch.manual_seed(number)
            outcomes = together.run([text.step for text in texts])
            for text, one, outcome in zip(texts, alone, outcomes, strict=True):
                wanted = raised(one.step)
                if isinstance(wanted, Exception):
                    assert type(outcome.error) is type(wanted)
                else:
                    close(outcome.result(), wanted)
                for found, kept in zip(text.kept(), one.kept(), strict=True):
                    close(found, kept)
                    assert found.untyped_storage().nbytes() == found.nbytes
    assert counters(model) == counters(other)
    return count


def raised(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except ArithmeticError as error:
        return error


def counters(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, vars(one).get("count")) for name, one in model.named_modules()]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def masked(length: int) -> dict[str, Any]:
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool)
    mask[..., :-6] = False
    return {"attention_mask": mask}


def added(length: int) -> dict[str, Any]:
    mask = torch.zeros(1, 1, 1, length, dtype=torch.float64)
    mask[..., 1::3] = -torch.inf
    return {"attention_mask": mask, "position": torch.tensor([[length]])}


@pytest.mark.parametrize(
    "given", [lambda length: {}, masked, added, lambda length: {"flag": True, "pair": (None, "word")}]
)
def test_rows_of_many_lengths_go_through_as_one(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(lambda: Decoder(Block), monkeypatch, given) == 3 * (STEPS - TRIALS)


def test_module_that_returns_a_pair_is_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(Block):
        def forward(self, hidden: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
            return super().forward(hidden, attention_mask, past_key_values), None

    assert run(lambda: Decoder(Pair), monkeypatch) == 3 * (STEPS - TRIALS)


@pytest.mark.parametrize("records", [False, True])
def test_windows_go_through_as_one(records: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some texts have filled their window, some have not. A layer that records its past keeps more than its window, and
    runs alone.
    """
    begins = Text.__init__

    def with_windows(self: Text, *args: Any) -> None:
        begins(self, *args)
        for number, layer in enumerate(self.state.layers):
            made = transformers.cache_utils.DynamicSlidingWindowLayer(sliding_window=8)
            made.record_past = records
            made.update(layer.keys, layer.values)
            self.state.layers[number] = made

    def kept(self: Text) -> list[torch.Tensor]:
        counts = [torch.tensor(layer.cumulative_length) for layer in self.state.layers]
        return [*(one.clone() for layer in self.state.layers for one in (layer.keys, layer.values)), *counts]

    monkeypatch.setattr(Text, "__init__", with_windows)
    monkeypatch.setattr(Text, "kept", kept)
    assert (run(lambda: Decoder(Block), monkeypatch) == 3 * (STEPS - TRIALS)) is not records


class GivesWeights(Block):
    """And a tensor of a fixed shape, which in one step is as long as the longest text."""

    def forward(self, hidden: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        hidden = super().forward(hidden, attention_mask, past_key_values)
        scores = hidden.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return hidden, (scores.sum(-1, keepdim=True) + attention_mask).softmax(-1), hidden[:, None]


def with_mask(length: int) -> dict[str, Any]:
    return {"attention_mask": torch.zeros(1, 1, 1, length, dtype=torch.float64)}


def test_weights_are_each_texts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_weights(self: Text) -> torch.Tensor:
        hidden = torch.randn((self.rows, 1, WIDTH), generator=self.dice, dtype=torch.float64)
        length = self.state.layers[0].keys.shape[2] + 1
        parts = []
        for block in self.model.blocks:
            hidden, weights, fixed = block(hidden, past_key_values=self.state, **self.given(length))
            assert weights.shape == (self.rows, HEADS, 1, length) and fixed.shape == (self.rows, 1, 1, WIDTH)
            parts += [hidden.flatten(), weights.flatten(), fixed.flatten()]
        return torch.cat(parts)

    monkeypatch.setattr(Text, "step", with_weights)
    monkeypatch.setattr("tests.shared_hooks.generation.together.test_blocks.LENGTHS", [(1, 5), (1, 12), (2, 7)])
    assert run(lambda: Decoder(GivesWeights), monkeypatch, with_mask) == 3 * (STEPS - TRIALS)


class AsksHowLong(Attention):
    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        length = past_key_values.get_seq_length(self.layer_idx)
        return super().attend(queries / length, keys, values, mask, past_key_values)


class SeesHowLong(Attention):
    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        return super().attend(queries / keys.shape[2], keys, values, mask, past_key_values)


class LooksAtMask(Attention):
    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        if mask is not None:
            queries = queries + 1
        return super().attend(queries, keys, values, mask, past_key_values)


class IgnoresMask(Attention):
    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        return super().attend(queries, keys, values, None, past_key_values)


class Draws(Attention):
    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        torch.rand(1)
        return super().attend(queries, keys, values, mask, past_key_values)


class DecidesByValue(Attention):
    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        sign = 1 if float(queries.sum()) > 0 else -1
        return super().attend(queries * sign, keys, values, mask, past_key_values)


class MixesRows(Attention):
    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        return super().attend(queries - queries.mean(0), keys, values, mask, past_key_values)


class WritesToAnotherLayer(Attention):
    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        other = past_key_values.layers[(self.layer_idx + 1) % 3]
        other.values = other.values + 1e-3
        return super().attend(queries, keys, values, mask, past_key_values)


class WritesToState(Attention):
    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        past_key_values.seen = getattr(past_key_values, "seen", 0) + 1
        return super().attend(queries * past_key_values.seen, keys, values, mask, past_key_values)


class WritesToKeys(Attention):
    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        keys.mul_(0.9)
        return super().attend(queries, keys, values, mask, past_key_values)


@pytest.mark.parametrize(
    "attention",
    [
        AsksHowLong, SeesHowLong, LooksAtMask, IgnoresMask, DecidesByValue, MixesRows,
        WritesToAnotherLayer, WritesToState, WritesToKeys,
    ],
)  # fmt: skip
def test_module_with_other_results_in_a_batch_runs_alone(
    attention: type[Attention], monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention is MixesRows:  # of its own rows
        monkeypatch.setattr("tests.shared_hooks.generation.together.test_blocks.LENGTHS", LENGTHS[:2])
    assert run(lambda: Decoder(Block, attention), monkeypatch) == 0


def test_random_module_runs_alone_with_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(lambda: Decoder(Block, Draws), monkeypatch) == 0
    model = Decoder(Block, Draws)
    texts = [Text(model, *size, lambda length: {}) for size in LENGTHS]
    with torch.no_grad(), Lockstep(model) as together:
        torch.manual_seed(0)
        together.run([text.step for text in texts])
        state = torch.random.get_rng_state()
        torch.manual_seed(0)
        for text in texts:
            text.step()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_batching_does_not_depend_on_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are the same at each length, whatever a block does with it; NaN agrees with nothing."""
    texts = Text.__init__

    def zeros(self: Text, *args: Any) -> None:
        texts(self, *args)
        for layer in self.state.layers:
            layer.keys.zero_()

    monkeypatch.setattr(Text, "__init__", zeros)
    assert run(lambda: Decoder(Block, SeesHowLong), monkeypatch) == 0
    gate = BlockGate(Block(0).double().eval(), (block := Block(0).double().eval()).forward, 0, (), 0)
    state = transformers.DynamicCache()
    state.update(*[torch.full((1, HEADS, 4, WIDTH // HEADS), torch.nan, dtype=torch.float64) for _ in range(2)], 0)
    hidden = torch.full((1, 1, WIDTH), torch.nan, dtype=torch.float64)
    calls = [_BlockCall(block.forward, (hidden, None, state), {}, 0, 1) for _ in range(2)]
    with torch.no_grad():
        assert [gate.through(calls) is None for _ in range(TRIALS + 1)] == [True] * TRIALS + [False]


def test_forms_without_end_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is another in each step makes a form of its own of each."""
    monkeypatch.setattr("tests.shared_hooks.generation.together.test_blocks.LENGTHS", [(1, 5)] * 3)
    gates: set[BlockGate] = set()
    through = BlockGate.through
    monkeypatch.setattr(BlockGate, "through", lambda self, several: gates.add(self) or through(self, several))
    run(lambda: Decoder(Block), monkeypatch, lambda length: {"step": length}, steps=MOST_FORMS + 5)
    assert {len(gate._tried) for gate in gates} == {MOST_FORMS}


class Counts(Block):
    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self.count = 0

    def forward(self, hidden: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        self.count += 1
        return super().forward(hidden, attention_mask, past_key_values)


class WritesToWhatItIsGiven(Block):
    def forward(self, hidden: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        hidden.add_(1)
        return super().forward(hidden, attention_mask, past_key_values)


class WritesToADictionary(Block):
    def forward(self, hidden: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        hidden = hidden * more["shared"].get("scale", 1)
        more["shared"]["scale"] = 2
        return super().forward(hidden, attention_mask, past_key_values)


@pytest.mark.parametrize("block", [WritesToWhatItIsGiven, WritesToADictionary])
def test_module_that_writes_its_input_runs_alone(block: type[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(lambda: Decoder(block), monkeypatch, lambda length: {"shared": {}}) == 0


def test_module_that_counts_calls_runs_alone() -> None:
    model, other = Decoder(Counts), Decoder(Counts)
    with torch.no_grad(), Lockstep(model) as together:
        texts, alone = ([Text(one, *size, lambda length: {}) for size in LENGTHS] for one in (model, other))
        for _ in range(4):
            outcomes = together.run([text.step for text in texts])
            for one, outcome in zip(alone, outcomes, strict=True):
                close(outcome.value, one.step()) if outcome.error is None else one.step()
    assert counters(model) == counters(other)


class FromSomeLengthOn(Attention):
    first = 0

    def attend(self, queries: Any, keys: Any, values: Any, mask: Any, past_key_values: Any) -> torch.Tensor:
        if keys.shape[2] >= self.first:
            queries = queries * 2
        return super().attend(queries, keys, values, mask, past_key_values)


@pytest.mark.parametrize("first", [13, 20, 47, 60, 150])
def test_module_whose_results_change_beyond_a_length_runs_alone(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a longer text would change what a shorter one gets."""
    monkeypatch.setattr(FromSomeLengthOn, "first", first)
    count = run(lambda: Decoder(Block, FromSomeLengthOn), monkeypatch, steps=60)
    assert count == 0 or first > 13 * LONGER


class Fails(Block):
    """After it has updated its state, in some steps."""

    def forward(self, hidden: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        found = super().forward(hidden, attention_mask, past_key_values)
        if more["fails"] and self.attention.layer_idx == 1:
            raise ZeroDivisionError("in a block")
        return found


def test_a_block_that_fails_has_updated_each_state_once() -> None:
    steps = itertools.count()

    def given(length: int) -> dict[str, Any]:
        return {"fails": next(steps) // (2 * len(LENGTHS)) % 4 == 3}

    model, other = Decoder(Fails), Decoder(Fails)
    texts, alone = ([Text(one, *size, given) for size in LENGTHS] for one in (model, other))
    failed = 0
    with torch.no_grad(), Lockstep(model) as together:
        for _ in range(STEPS):
            outcomes = together.run([text.step for text in texts])
            for text, one, outcome in zip(texts, alone, outcomes, strict=True):
                wanted = raised(one.step)
                if isinstance(wanted, Exception):
                    assert isinstance(outcome.error, ZeroDivisionError)
                    failed += 1
                else:
                    close(outcome.result(), wanted)
                for found, kept in zip(text.kept(), one.kept(), strict=True):
                    close(found, kept)
    assert failed == len(LENGTHS) * STEPS // 4


def test_short_texts_are_not_filled_up_to_one_that_is_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 1,000 tokens beside nine short ones would make ten of 1,000."""
    sizes = [(1, length) for length in (1000, *range(2, 11))]
    monkeypatch.setattr("tests.shared_hooks.generation.together.test_blocks.LENGTHS", sizes)
    assert run(lambda: Decoder(Block), monkeypatch, steps=TRIALS + 2) == 0


def test_a_block_that_takes_no_mask_goes_alone_where_lengths_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMask(Block):
        def forward(self, hidden: Any, past_key_values: Any) -> Any:  # type: ignore[override]
            return super().forward(hidden, None, past_key_values)

    assert run(lambda: Decoder(NoMask), monkeypatch) == 0

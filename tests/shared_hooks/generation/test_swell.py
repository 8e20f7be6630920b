"""Steps that would have a session, a step or the model become more than they may: refused before that, or counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.errors import BadFrame, CutRefused, TooLarge
from shared_hooks.generation import DecodingSession, DecodingTail, InProcess, SplitForward
from shared_hooks.generation.remote_tensor import Extents, RemoteTensor, SeenSteps, StepAllowance, magnitude
from shared_hooks.generation.results import widened
from tests.shared_hooks.generation.small import cut_of, make, prompt
from tests.shared_hooks.generation.test_hostile import Kept, Step

MOST = 32 << 20
HUGE = 300_000


class Made(TorchDispatchMode):
    """Bytes that kernels have made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        fresh = all(one.alias_info is None for one in func._schema.returns)
        for one in found if isinstance(found, (tuple, list)) and fresh else (found,) if fresh else ():
            if isinstance(one, torch.Tensor) and type(one) is not RemoteTensor and not one.is_meta:
                self.nbytes += one.untyped_storage().nbytes()
        return found


@pytest.fixture(scope="module")
def kept() -> list[Step]:
    link, model = Kept(DecodingTail(make("llama"), cut_of("llama"))), make("llama")
    with SplitForward(model, cut_of("llama"), link):
        model.generate(**prompt(rows=1), max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    return [step for step, _ in link.kept]


@pytest.fixture
def session(kept: list[Step]) -> DecodingSession:
    made = DecodingTail(make("llama"), cut_of("llama"), step_bytes=MOST).open()
    for number in range(2):
        step(made, *kept[number])
    return made


def step(session: DecodingSession, header: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
    return session.step(json.loads(json.dumps(header)), [one.clone() for one in tensors])


def more_inputs(kept: list[Step], forms: list[Any], tensors: list[torch.Tensor]) -> Step:
    """The third step, with inputs that the model takes and does not use."""
    header, own = json.loads(json.dumps(kept[2][0])), kept[2][1]
    reported = next(each["in"] for each, _ in reversed(kept[:3]) if "in" in each)
    base = next(each["f"] for each, _ in reversed(kept[:3]) if "f" in each)
    header["in"] = [*reported, *([f"unused_{n}", ["t", 0], 1] for n in range(len(forms)))]
    header["f"] = [*json.loads(json.dumps(header.get("f", base))), *forms]
    # tensors of the inputs come first; those of the step that there are anyway are the cut's
    return header, [*tensors, *own]


def test_unused_values_of_one_step_hide_nothing_in_the_next(kept: list[Step], session: DecodingSession) -> None:
    """A step with an input and a number that are huge, and lead to nothing; then the mask of both."""
    unused = ["p", [1, HUGE], [HUGE, 1], "int64", "unused"]
    header, tensors = more_inputs(kept, [unused], [])
    header.setdefault("d", [])
    if header["d"] == 1:
        header["d"] = next(each["d"] for each, _ in reversed(kept[:2]) if each.get("d", 1) != 1)
    header["d"] = [*header["d"], [["v", HUGE], [["unused"]]]]
    step(session, header, tensors)
    header = json.loads(json.dumps(kept[3][0]))
    keys = ["m", [1, 2, HUGE, 8], [16 * HUGE, 8 * HUGE, 8, 1], "float32"]
    header["d"] = [
        [keys, [["layers", 0, "keys"], ["layers", 0, "values"], ["layers", 1, "keys"], ["layers", 1, "values"]]]
    ]
    reported = next(each["in"] for each, _ in reversed(kept[:4]) if "in" in each)
    header["in"], header["f"] = (
        reported,
        [["p", [1, 1000], [1000, 1], "int64", "input_ids"], *[["="]] * (len(reported) - 2)],
    )
    with Made() as made, pytest.raises((TooLarge, BadFrame, CutRefused)):
        step(session, header, kept[3][1])
    assert made.nbytes < 1.2 * MOST


def test_the_order_of_magnitude_of_each_number_counts() -> None:
    seen = SeenSteps()

    def looked(*reported: Any, spent: int = 1 << 20) -> bool:
        extents = Extents(MOST, seen)
        extents.begin()
        with extents.around(*map(magnitude, reported)) as allowance:
            if allowance is not None:
                allowance.peak = spent
        extents.passed()
        return allowance is not None

    assert looked([1, 100], 7) and not looked([1, 127], 6) and looked([1, 128], 7)
    assert looked([100, 1], 7), "each by itself, not one maximum for all"
    assert looked([1, 100], 7.0) and looked([1, 100], True) and looked([1, 100], -7) and looked([1, 100], "7")
    for _ in range(2):
        assert looked([1, 1 << 20], spent=MOST // 2), "twice the sizes may be beyond it"


def test_memory_that_was_given_back_does_not_count() -> None:
    with StepAllowance(1 << 20) as allowance:
        for _ in range(20):
            torch.zeros(1 << 16)  # a quarter of what is allowed
        kept = [torch.zeros(1 << 16) for _ in range(3)]
        with pytest.raises(TooLarge, match="more than 1 MiB"):
            kept += [torch.zeros(1 << 16), torch.zeros(1 << 16)]
    assert allowance.peak > 1 << 20


def test_memory_of_seen_steps_does_not_depend_on_reports() -> None:
    seen = SeenSteps()
    key = magnitude(["x" * 1_000_000, *range(1000)])
    seen.add(key)
    assert seen.has(key) and not seen.has(key[:-1])
    assert all(len(one) == 16 for one in seen._known)


def test_inputs_that_nobody_uses_are_counted(kept: list[Step], session: DecodingSession) -> None:
    before = session.nbytes
    forms: list[Any] = [["s", n] for n in range(4)]
    step(session, *more_inputs(kept, forms, [torch.zeros(1 << 18) for _ in forms]))
    assert session.nbytes >= before + (4 << 20)
    assert session.fork().nbytes >= before + (4 << 20)


def test_reports_of_calls_are_counted(kept: list[Step], session: DecodingSession) -> None:
    before, (header, tensors) = session.nbytes, kept[2]
    calls = [["nothing", n, ["t", 0], [[[1], [1], "float32"]], []] for n in range(2000)]
    step(session, {**header, "t": calls}, tensors)
    assert session.nbytes >= before + 2000 * 2048


def test_a_large_form_of_a_state_is_counted() -> None:
    session = DecodingTail(make("llama"), cut_of("llama")).open()
    session._mirror = None
    from shared_hooks.generation.mirror import Mirror

    form = ["o", "transformers.cache_utils:DynamicCache", [["layers", ["l", "", [[n, ["v", n]] for n in range(5000)]]]]]
    session._mirror = Mirror.built(form, torch.device("cpu"))
    assert session.nbytes > 5000 * 1000


@pytest.mark.parametrize("name", ["batch_repeat_interleave", "reorder_cache", "get_seq_length", "update", "is_sliding"])
def test_an_attribute_hides_no_method(kept: list[Step], name: str) -> None:
    """Else a class would be called, with the sender's numbers."""
    session = DecodingTail(make("llama"), cut_of("llama")).open()
    header, tensors = json.loads(json.dumps(kept[0][0])), kept[0][1]
    header["new"][2].append([name, ["c", "transformers.cache_utils:LinearAttentionLayer"]])
    header["do"] = [[name, [5_000_000]]]
    with pytest.raises(BadFrame):
        step(session, header, tensors)


def test_calls_have_one_allowance(kept: list[Step], session: DecodingSession) -> None:
    header, tensors = kept[2]
    with Made() as made, pytest.raises(TooLarge):
        step(session, {**header, "do": [["batch_repeat_interleave", [64]]] * 4}, tensors)
    assert made.nbytes < 1.2 * MOST
    step(session, *kept[2])  # all is as it was


@pytest.mark.parametrize(
    "said",
    [
        ["token", [1, 1, 500_000_000], "float64", 0],
        ["token", [1, 4000, 120], "float32", 0],
        ["drawn", [9, 1, 120], "float32", 1],
        ["top", [1, 1, 121], "float32", 2],
        ["token", [1, 1, 0], "float32", 0],
        ["token", [], "float32", 0],
    ],
)
def test_an_answer_larger_than_the_models(said: list[Any]) -> None:
    """A hostile server: nothing is made for it."""
    tensors = [torch.tensor([[3]]), torch.tensor([3]), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2, dtype=torch.int64)]
    with Made() as made, pytest.raises((BadFrame, IndexError)):
        widened(said, tensors, 120)
    assert made.nbytes < 1 << 16


class Block(nn.Module):
    def __init__(self, keep: Callable[[Block, torch.Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = {"by": 1.0}
        self.memo: torch.Tensor | None = None
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.abs().max()) > 1000:
            self.keep(self, x)
        found = x + torch.tanh(self.linear(x)) * self.scale["by"]
        return found if self.memo is None else found + self.memo.mean()


def halves(block: Block, x: torch.Tensor) -> None:
    block.scale["by"] /= 8


def replaces(block: Block, x: torch.Tensor) -> None:
    block.linear.weight = nn.Parameter(block.linear.weight * 2)


def remembers(block: Block, x: torch.Tensor) -> None:
    block.memo = x.clone()


class Toy(nn.Module):
    """The embedding of the last word is large."""

    def __init__(self, keep: Callable[[Block, torch.Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        with torch.no_grad():
            self.embedding.weight[49] *= 1e6
        self.blocks = nn.ModuleList([Block(keep) for _ in range(3)])
        self.last = nn.Linear(16, 50)
        self.eval()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.last(x)
        return found


@pytest.fixture(params=[halves, replaces])
def keep(request: pytest.FixtureRequest) -> Iterator[Callable[[Block, torch.Tensor], None]]:
    yield request.param


@torch.no_grad()
def test_a_step_that_changes_the_model_is_refused_and_undone(keep: Callable[[Block, torch.Tensor], None]) -> None:
    """The first such step, too; and whoever comes next gets the model's own."""
    tail = DecodingTail(Toy(keep), "blocks.0")
    words, far = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 49, 3]])
    whole = Toy(keep)(words)
    for _ in range(3):
        here = Toy(keep)
        with (
            SplitForward(here, "blocks.0", InProcess(tail)),
            pytest.raises(CutRefused, match="from one call to the next"),
        ):
            here(input_ids=far)
        here = Toy(keep)
        with SplitForward(here, "blocks.0", InProcess(tail)):
            assert torch.equal(here(input_ids=words), whole)


@torch.no_grad()
def test_kept_state_is_private_to_a_session() -> None:
    tail = DecodingTail(Toy(remembers), "blocks.0")
    for _ in range(2):
        here, whole = Toy(remembers), Toy(remembers)
        with SplitForward(here, "blocks.0", InProcess(tail)):
            for words in ([[1, 2, 3]], [[1, 49, 3]], [[1, 2, 3]]):
                ids = torch.tensor(words)
                assert torch.equal(here(input_ids=ids), whole(ids))


@torch.no_grad()
def test_unread_state_of_a_step_is_restored() -> None:
    tail = DecodingTail(Toy(remembers), "blocks.0")
    memos = [block.memo for block in tail.model.blocks]  # type: ignore[union-attr]
    for words in ([[1, 2, 3]], [[1, 49, 3]]):
        with SplitForward(Toy(remembers), "blocks.0", InProcess(tail)) as split:
            assert torch.equal(split.model(input_ids=torch.tensor(words)), Toy(remembers)(torch.tensor(words)))
    assert [block.memo for block in tail.model.blocks] == memos  # type: ignore[union-attr]

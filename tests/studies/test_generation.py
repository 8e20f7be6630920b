"""The study of split generation itself: with an engine that splits nothing, and with some that do it wrong."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from shared_hooks.errors import CutRefused
from studies.generation import __main__ as command
from studies.generation import report
from studies.generation.blocks import decoder_blocks
from studies.generation.cases import Judge, generating, places
from studies.generation.engine import Engine, Watched, whole
from studies.generation.forked import Limits, OutOfTime, Tell, each, processor_time
from studies.generation.modes import MODES
from studies.generation.privacy import CONTROL, embedded, privacy, traces
from studies.generation.small import ENOUGH, NEW_TOKENS, built
from studies.generation.subject import Built, Subject, subjects

GPT2 = Subject("GPT2LMHeadModel", "gpt2", ("causal",))
T5 = Subject("T5ForConditionalGeneration", "t5", ("sequence-to-sequence",))


@pytest.fixture(scope="module")
def gpt2() -> Built:
    """Made small once."""
    return built(GPT2)


def _engine(change: Callable[[Any], Any], steps: int = 1) -> Engine:
    """One that changes what the module at the cut gives."""

    @contextlib.contextmanager
    def engine(here: nn.Module, there: nn.Module, cut: str) -> Iterator[Watched]:
        hook = here.get_submodule(cut).register_forward_hook(lambda _module, _inputs, output: change(output))
        try:
            yield Watched(steps=steps)
        finally:
            hook.remove()

    return engine


def _raises(error: Exception) -> Any:
    raise error


def _nudged(output: Any) -> Any:
    """The least that bits can tell, everywhere."""
    hidden = output[0] if isinstance(output, tuple) else output
    hidden = torch.nextafter(hidden, torch.full_like(hidden, torch.inf))
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _other(output: Any) -> Any:
    hidden = output[0] if isinstance(output, tuple) else output
    return (-hidden, *output[1:]) if isinstance(output, tuple) else -hidden


@pytest.mark.parametrize(
    ("engine", "outcome"),
    [
        (whole, "equal"),
        (_engine(_other), "different"),
        (_engine(lambda output: _raises(CutRefused("it says why"))), "refused"),
        (_engine(lambda output: _raises(KeyError("no name"))), "crashed"),
        (_engine(lambda output: output, steps=0), "unsplit"),
    ],
)
def test_an_outcome_is_what_it_is(gpt2: Built, engine: Engine, outcome: str) -> None:
    """Equal tokens of a model that was not split count for nothing."""
    call = generating(gpt2.inputs(3, 1), max_new_tokens=6)
    assert Judge(gpt2, engine).outcome("greedy", call, gpt2.blocks[1])["outcome"] == outcome


def test_unsplit_failures_are_not_judged(gpt2: Built) -> None:
    """It fails alone, or gives something else each time."""
    judge = Judge(gpt2, whole)
    assert (
        judge.outcome("unknown", generating(gpt2.inputs(1, 1), no_such=1), gpt2.blocks[0])["outcome"] == "local fails"
    )
    counted = iter(range(9))
    assert judge.outcome("counts", lambda model: next(counted), gpt2.blocks[0])["outcome"] == "local varies"


@pytest.mark.parametrize("name", ["beams", "assisted", "hidden states", "streamer", "two turns", "copies of a cache"])
def test_a_mode_that_splits_nothing_is_equal(gpt2: Built, name: str) -> None:
    """What is compared is the same from one run to the next."""
    inputs = gpt2.inputs(1, 1) | ({"assistant_model": gpt2.build()} if name == "assisted" else {})
    reported = Judge(gpt2, whole).outcome(name, lambda model: MODES[name](model, inputs), gpt2.blocks[1])
    assert reported["outcome"] == "equal", reported


def test_hidden_states_are_compared_to_the_bit(gpt2: Built) -> None:
    """Tokens are the same, tensors are not."""
    inputs = gpt2.inputs(3, 1)
    judge = Judge(gpt2, _engine(_nudged))
    reported = judge.outcome("hidden", lambda model: MODES["hidden states"](model, inputs), gpt2.blocks[1])
    assert reported["outcome"] == "different"
    assert "hidden_states" in reported["why"]


def test_a_small_model_says_many_things(gpt2: Built) -> None:
    """Four blocks, the same weights every time, rows of different lengths, text that continues to its end."""
    assert len(gpt2.blocks) == 4
    assert gpt2.distinct >= ENOUGH
    first, second = gpt2.build(), gpt2.build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    inputs = gpt2.inputs(3, 1)
    assert len(set(inputs["attention_mask"].sum(1).tolist())) == 3
    tokens = generating(inputs)(first)
    assert tokens.shape == (3, inputs["input_ids"].shape[1] + NEW_TOKENS)


def test_the_blocks_are_those_of_the_decoder() -> None:
    """Those of an encoder and a decoder, and not the experts in a block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((expert(x) for expert in self.experts), x)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
            self.then = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor, known: bool = False) -> torch.Tensor:
            for layer in [*(() if known else self.first), *self.then]:
                x = layer(x)
            return x

    model = Both()
    x = torch.ones(1, 2)
    found = decoder_blocks(model, lambda: (model(x), model(x, known=True)))
    assert found == ["then.0", "then.1", "then.2"]
    assert places(found) == {"first": "then.0", "last": "then.2"}
    assert places(found[:1]) == {"first": "then.0"}
    assert built(T5).blocks[0].startswith("decoder.")


def test_every_list_of_classes_is_there_once() -> None:
    """A class that is in two lists is one subject."""
    found = subjects()
    assert len({one.name for one in found}) == len(found) > 200
    assert {name for one in found for name in one.lists} == {"causal", "sequence-to-sequence", "speech", "image-text"}


def _work(subject: str, tell: Tell) -> None:
    tell({"at": "it"})
    if subject == "ends":
        os._exit(3)
    if subject == "hangs":
        while True:
            pass
    if subject == "raises":
        raise ValueError("no good")
    tell({"case": "it", "outcome": "equal"})


def test_a_process_that_is_lost_is_a_record() -> None:
    """Some at once; what a lost one was at is known."""
    subjects = ("fine", "ends", "hangs", "raises")
    found = dict(each(subjects, _work, jobs=4, limits=Limits(64 << 30, wall_seconds=1)))
    assert {name: record["status"] for name, record in found.items()} == {
        "fine": "ran", "ends": "crash", "hangs": "timeout", "raises": "unusable",
    }  # fmt: skip
    assert (found["ends"]["exit_code"], found["ends"]["at"]) == (3, "it")
    assert found["fine"]["cases"] == {"it": {"outcome": "equal"}}


def test_a_case_has_its_time() -> None:
    """The limit is on processor time."""
    with pytest.raises(OutOfTime), processor_time(0.05):
        while True:
            pass


def test_the_worst_case_is_the_verdict() -> None:
    """And a process that was lost is no success."""

    def record(*outcomes: str, **more: Any) -> dict[str, Any]:
        cases = {str(number): {"outcome": outcome} for number, outcome in enumerate(outcomes)}
        return {"status": "ran", "lists": ["causal"], "cases": cases, **more}

    records = {
        "equal": record("equal", "local fails"),
        "refused": record("equal", "refused"),
        "different": record("different", "crashed"),
        "failed": record("equal", "unsplit"),
        "lost": record("equal", status="crash", at="1"),
        "not counted": record("local fails"),
    }
    verdicts = {name: report.verdict(one) for name, one in records.items()}
    assert verdicts == {name: name for name in records} | {"lost": "failed"}
    assert report.summary(records)["all"]["counted"] == 5
    assert "1 x crash" in "\n".join(f"{len(where)} x {cause}" for cause, where in report.causes(records).items())


def test_traces_of_a_prompt_are_found() -> None:
    """Ids as integers of every width and as text, rows of the embedding whole or in part; noise is nothing."""
    torch.manual_seed(0)
    ids = torch.tensor([[0, 0, 0, 0, 91, 17, 44, 203, 8, 120]])
    embedding = nn.Embedding(256, 32)
    rows = embedded(embedding, ids)
    noise = os.urandom(999) + b"\0"  # a last byte of 91 would make a run of ids with what follows

    def found(data: bytes) -> int:
        return len(traces([noise, data], ids, rows))

    assert found(b"[0, 1, 2, 3, 4]" + torch.zeros(64).numpy().tobytes()) == 0
    for dtype in (torch.int64, torch.int32, torch.int16):
        assert found(ids[0, 5:9].to(dtype).numpy().tobytes()) == 1
    assert found(json.dumps(ids.tolist()).encode()) > 2
    assert found(b"[17,44,203,8]") == 1
    assert found(b"[17,44,203,80]") == 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        row = embedding.weight[44].detach().to(dtype)
        assert found(bytes(row.view(torch.uint8).numpy())[: len(row) * row.element_size() // 2]) > 0


def test_an_engine_that_sends_all_is_seen(gpt2: Built) -> None:
    """The inputs of every step, as an engine would that runs everything there."""

    @contextlib.contextmanager
    def naive(here: nn.Module, there: nn.Module, cut: str) -> Iterator[Watched]:
        watched = Watched()

        def send(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            watched.steps += 1
            watched.sent.append(kwargs["input_ids"].numpy().tobytes())

        hook = here.register_forward_pre_hook(send, with_kwargs=True)
        yield watched
        hook.remove()

    facts: list[dict[str, Any]] = []
    privacy(naive, GPT2, facts.append)
    reported = {fact["case"]: fact["outcome"] for fact in facts if "case" in fact}
    assert reported == {"first": "found", "middle": "found", "last": "found", CONTROL: "shown"}


def test_the_command_continues_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line a class; a second run adds none, and has the same to say."""
    path = tmp_path / "found.jsonl"
    summary = tmp_path / "summary.json"
    words = "generation architectures --engine whole --only GPT2LM --memory-gib 64 --mode greedy".split()
    monkeypatch.setattr("sys.argv", [*words, "--json", str(path), "--summary", str(summary)])
    assert command.main() == 0
    assert command.main() == 0
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert (record["key"], record["status"], len(record["cases"])) == ("GPT2LMHeadModel", "ran", 8)
    assert {one["outcome"] for one in record["cases"].values()} == {"equal"}
    assert json.loads(summary.read_text())["classes"]["causal"]["equal"] == 1

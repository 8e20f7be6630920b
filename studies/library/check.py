"""One model: planned, cut at a sample of its layers, and each answer compared bit for bit with one never cut."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import IsthmusError, PlanMismatch
from shared_hooks.modules.attach import fast_path_off
from studies.library.subject import Call, Prepared, Subject, seed_all
from tests.zoo.compare import bits, differences

MAX_BYTES = 1 << 30
SEEDS = (0, 1)  # the inputs: those that are planned on, and others
Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Sample:
    """How much of a model is looked at. ``cuts``: how many, "input" included; 0 is all. ``seconds`` of processor time:
    no cut is begun later than that after the start."""

    cuts: int = 8
    seed: int = 0
    seconds: float = 30.0

    def of(self, places: Sequence[int | str], name: str) -> list[int | str]:
        """ "input", the first, the last, and of the others half evenly spaced and half drawn."""
        count = len(places)
        if self.cuts == 0 or count + 1 <= self.cuts:
            return ["input", *places]
        chosen = {0, count - 1}
        even = max(0, (self.cuts - 3) // 2)
        chosen.update(count * (i + 1) // (even + 1) for i in range(even))
        rest = [i for i in range(count) if i not in chosen]
        random.Random(f"{self.seed} {name}").shuffle(rest)
        chosen.update(rest[: max(0, self.cuts - 1 - len(chosen))])
        return ["input", *(places[number] for number in sorted(chosen))]


def short(error: BaseException, limit: int = 400) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:limit]


def memory_of(model: nn.Module) -> list[bytes]:
    """Every bit of the parameters and buffers."""
    return [bits(tensor) for tensor in [*model.parameters(), *model.buffers()]]


def _whole(model: nn.Module, call: Call) -> Any:
    seed_all(7)
    with torch.no_grad(), fast_path_off():
        return copy.deepcopy(model(*call[0], **call[1]))


def check(subject: Subject, sample: Sample, tell: Tell) -> None:
    """Look at one model, telling facts as they are known, so that a worker that is stopped leaves what it had."""
    started = time.process_time()
    prepared = subject.prepare()
    reference = prepared.first
    tell({"label": prepared.label, "parameters": sum(p.numel() for p in reference.parameters())})
    before = memory_of(reference)
    expected = [_whole(reference, prepared.inputs(seed)) for seed in SEEDS]
    ready, forward = time.process_time(), time.perf_counter()
    again = _whole(reference, prepared.inputs(SEEDS[0]))
    tell({"forward_s": round(time.perf_counter() - forward, 4), "prepared_s": round(ready - started, 2)})
    keeps = next(differences(again, expected[0]), "")
    if not keeps and memory_of(reference) != before:
        keeps = "its weights or buffers have changed"
    if next(differences(expected[0], expected[1]), None) is None:
        tell({"insensitive": True})  # the second input shows nothing the first does not
    pair = _Pair(prepared)
    planning = time.perf_counter()
    try:
        places = pair.plan()
    except Exception as error:
        outcome = "refused" if isinstance(error, IsthmusError) else "error"
        tell({"stateful": keeps, "cut": "plan", "outcome": outcome, "why": short(error)})
        return
    tell({"layers": len(pair.edge.layers), "plan_s": round(time.perf_counter() - planning, 3), "stateful": keeps})
    for cut in sample.of(places, subject.key):
        tell({"at": str(cut)})  # where a worker ends that does not come back
        if time.process_time() - started > sample.seconds:
            tell({"out_of_time": True})
            return
        tell({"cut": cut, **pair.outcome(cut, expected)})
    if not keeps and not _is_one_of(memory_of(pair.cloud.model), memory_of(prepared.build()), before):
        tell({"cut": "all", "outcome": "wrong", "why": "the cloud's weights or buffers have changed"})
    tell({"at": "", "refused_layers": _refused(pair.edge, started + sample.seconds)})


def _is_one_of(now: list[bytes], unrun: list[bytes], run: list[bytes]) -> bool:
    """Whether every tensor is as in a model that never ran, or as in one that did: some build tables in buffers."""
    if len(unrun) != len(run):  # its first run registers a buffer
        return now in (unrun, run)
    return all(a in (b, c) for a, b, c in zip(now, unrun, run, strict=True))


def _refused(edge: WrappedModel, deadline: float) -> dict[str, Any]:
    """Return how many layers and blocks cannot be cut after, and why; as many are tried as there is time for."""
    reasons: Counter[str] = Counter()
    looked = 0
    for layer in edge.cuts:
        if time.process_time() > deadline:
            break
        looked += 1
        if not layer.can_split:
            reasons[layer.reason[:200]] += 1
    return {"looked_at": looked, "reasons": dict(reasons)}


class _Pair:
    """An edge and a cloud, each with an instance of its own."""

    def __init__(self, prepared: Prepared) -> None:
        self._inputs = prepared.inputs
        self.edge = WrappedModel(prepared.build(), metrics=False)
        self.cloud = WrappedModel(prepared.build(), metrics=False)

    def plan(self) -> list[int | str]:
        """Plan on the first inputs; the cuts after layers, by id, and after blocks, by name."""
        args, kwargs = self._inputs(SEEDS[0])
        seed_all(7)
        places = self.edge.plan(*args, **kwargs).cuts
        return [one.name if one.is_block else one.layer_id for one in places]

    def outcome(self, cut: int | str, expected: list[Any]) -> dict[str, Any]:
        """What becomes of a cut: exact, refused (planning says so), late (refused by head or tail), wrong or error."""
        for number, seed in enumerate(SEEDS):
            args, kwargs = self._inputs(seed)
            try:
                self.edge._planner.plans_for(*self._inputs(seed))[0].cutting(cut)
            except IsthmusError as error:
                return {"outcome": "refused", "input": number, "why": short(error)}
            except Exception as error:
                return {"outcome": "error", "input": number, "why": short(error), "at": _place(error)}
            try:
                found = next(differences(self._answer(cut, args, kwargs, number), expected[number]), None)
            except IsthmusError as error:
                return {"outcome": "late", "input": number, "why": short(error), "at": _place(error)}
            except Exception as error:
                return {"outcome": "error", "input": number, "why": short(error), "at": _place(error)}
            if found is not None:
                return {"outcome": "wrong", "input": number, "why": found[:300]}
        return {"outcome": "exact"}

    def _answer(self, cut: int | str, args: Any, kwargs: Any, number: int) -> Any:
        try:
            return self._once(cut, args, kwargs)
        except PlanMismatch:
            if number == 0:
                raise
        # as a client does: other inputs may take another path after the cut, so they are planned, and sent again
        args, kwargs = self._inputs(SEEDS[number])
        seed_all(7)
        self.edge.plan(*args, **kwargs)
        return self._once(cut, *self._inputs(SEEDS[number]))

    def _once(self, cut: int | str, args: Any, kwargs: Any) -> Any:
        seed_all(7)
        early = self.edge.head(cut, *args, **kwargs)
        data = early.to_bytes()
        seed_all(11)  # another process has other generators
        return self.cloud.tail(EarlyOutput.from_bytes(data, max_bytes=MAX_BYTES))


def _place(error: BaseException) -> str:
    """The innermost line of the engine's own, and the innermost of all."""
    lines = list(_frames(error))
    own = [line for line in lines if "shared_hooks" in line]
    return " < ".join(dict.fromkeys([*lines[-1:], *own[:-4:-1]]))


def _frames(error: BaseException) -> Iterator[str]:
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        for mark in ("site-packages/", "shared_hooks/", "tests/"):
            if mark in path:
                path = path[path.rindex(mark) :].removeprefix("site-packages/")
                break
        yield f"{path}:{trace.tb_lineno}"
        trace = trace.tb_next

"""One call of a model that generates, whole and split: do both give the same bits?"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import IsthmusError
from studies.generation.engine import Engine
from studies.generation.forked import Tell, processor_time
from studies.generation.small import NEW_TOKENS, built
from studies.generation.subject import Built, Subject
from studies.library.check import short
from studies.library.subject import seed_all
from tests.zoo.compare import differences

EQUAL, REFUSED, DIFFERENT, CRASHED, UNSPLIT = "equal", "refused", "different", "crashed", "unsplit"
LOCAL_FAILS, LOCAL_VARIES = "local fails", "local varies"
OUTCOMES = (EQUAL, REFUSED, DIFFERENT, CRASHED, UNSPLIT, LOCAL_FAILS, LOCAL_VARIES)
NOT_COUNTED = (LOCAL_FAILS, LOCAL_VARIES)
"""What a model does by itself says nothing of its halves."""
CASE_SECONDS = 90.0

Call = Callable[[Any], Any]
"""Takes a model, generates with it, and returns what must be equal."""
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.95},
}


@dataclass
class Judge:
    """Compares calls of one model. ``seconds`` of processor time for each run of a call."""

    found: Built
    engine: Engine
    seconds: float = CASE_SECONDS
    dtype: torch.dtype = torch.float32
    _whole: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._here, self._there = (self.found.build().to(self.dtype) for _ in range(2))

    @property
    def model(self) -> Any:
        """One of the two that are compared."""
        return self._here

    def outcome(self, name: str, call: Call, cut: str) -> dict[str, Any]:
        """``outcome``, with ``why`` where it is not equal. ``name`` tells calls apart: each runs whole only once."""
        if name not in self._whole:
            self._whole[name] = self._alone(call)
        trouble, expected = self._whole[name]
        if trouble:
            return {"outcome": trouble, "why": expected}
        return self._split(call, cut, expected)

    def _alone(self, call: Call) -> tuple[str, Any]:
        try:
            first, again = self._run(call, copy.deepcopy(self._here)), self._run(call, copy.deepcopy(self._here))
        except Exception as error:
            return LOCAL_FAILS, short(error)
        varies = next(differences(again, first), None)
        return ("", first) if varies is None else (LOCAL_VARIES, varies[:300])

    def _split(self, call: Call, cut: str, expected: Any) -> dict[str, Any]:
        here, there, part = copy.deepcopy(self._here), copy.deepcopy(self._there), self.found.part
        try:
            with self.engine(here.get_submodule(part), there.get_submodule(part), cut) as watched:
                got = self._run(call, here)
        except IsthmusError as error:
            return {"outcome": REFUSED, "why": short(error)}
        except Exception as error:
            return {"outcome": CRASHED, "why": short(error), "at": _place(error)}
        found = next(differences(got, expected), None)
        if found is not None:
            return {"outcome": DIFFERENT, "why": found[:300]}
        if not watched.steps:
            return {"outcome": UNSPLIT, "why": "equal, but no step was split"}
        return {"outcome": EQUAL, "steps": watched.steps}

    def _run(self, call: Call, model: Any) -> Any:
        seed_all(5)
        with torch.no_grad(), processor_time(self.seconds):
            return call(model)


def _place(error: BaseException) -> str:
    """The innermost line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f"{'/'.join(trace.tb_frame.f_code.co_filename.split('/')[-2:])}:{trace.tb_lineno}"


MIXER = re.compile("att|mixer|mamba|ssm|conv|rec|cell")


def inside(model: nn.Module, block: str) -> str:
    """A call inside a block: the last linear one of what mixes tokens there (what attention gives is projected); where
    nothing is called so, the first of the block's own modules.
    """
    found = model.get_submodule(block)
    children = [
        f"{path}.0" if isinstance(one, nn.ModuleList) and len(one) else path for path, one in found.named_children()
    ]
    mixers = [path for path in children if MIXER.search(path.lower()) or path.endswith(".0")]
    for path in mixers:
        linear = [
            name for name, one in found.get_submodule(path).named_modules() if isinstance(one, nn.Linear) and name
        ]
        projected = [name for name in linear if name.rpartition(".")[2] in PROJECTIONS] or linear
        if projected:
            return f"{block}.{path}.{projected[-1]}"
    return f"{block}.{(mixers or children)[0]}"


PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo", "o", "proj", "out_lin", "output_linear")


def places(blocks: list[str], model: nn.Module | None = None) -> dict[str, str]:
    """The first, the middle and the last block, each once. ``model``: the part that steps call; with a call inside the
    middle block, then.
    """
    middle = blocks[len(blocks) // 2 - 1 if len(blocks) > 1 else 0]
    named = {"first": blocks[0], "middle": middle, "last": blocks[-1]}
    if model is not None:
        named["inside"] = inside(model, middle)
    return {
        name: path for number, (name, path) in enumerate(named.items()) if path not in list(named.values())[:number]
    }


def facts(found: Built) -> dict[str, Any]:
    """What a record says of how a model was made."""
    return {
        "label": found.label,
        "distinct": found.distinct,
        "parameters": found.parameters,
        "part": found.part,
        "blocks": found.blocks,
    }


def generating(inputs: dict[str, Any], **settings: Any) -> Call:
    """A call of ``generate``: the tokens."""

    def call(model: Any) -> Any:
        return model.generate(**copy.deepcopy(inputs), **{"max_new_tokens": NEW_TOKENS, **settings})

    return call


@dataclass(frozen=True)
class Look:
    """How closely to look: at cases with ``only`` in their name, cut at these places."""

    engine: Engine
    only: str = ""
    cuts: tuple[str, ...] = ("first", "middle", "last", "inside")


def architecture(look: Look, subject: Subject, tell: Tell) -> None:
    """Greedy and sampled, one row and three, cut after the first, the middle and the last block and inside one."""
    found = built(subject)
    tell(facts(found))
    judge = Judge(found, look.engine)
    for rows, decoding in itertools.product((1, 3), DECODING):
        call = generating(found.inputs(rows, 1), **DECODING[decoding])
        for place, cut in places(found.blocks, judge.model.get_submodule(found.part)).items():
            case = f"{decoding}, {rows} @ {place}"
            if place not in look.cuts or look.only not in case:
                continue
            tell({"at": case})
            tell({"case": case, **judge.outcome(f"{decoding}, {rows}", call, cut)})

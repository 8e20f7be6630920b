"""Which answer each ``generate()`` of a split model asks for: never less than it needs.

``generate()`` prepares its processors by a method of the model; there it is seen what it will do. A call of the model
in a ``generate()`` that has not come so far gets all logits.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

from torch import nn

from shared_hooks.errors import CutRefused
from shared_hooks.generation.needed import Need, needed
from shared_hooks.generation.wanted import Answer
from shared_hooks.modules import put_instead

LEAST = ("least",)
SAMPLE = ("sample",)
_HOOKED = ("generate", "_get_logits_processor", "_get_candidate_generator")


class _Call:
    """One ``generate()`` under way."""

    def __init__(self, asking: Asking, assistant: Any, custom: Any) -> None:
        self.asking = asking
        self.assistant = assistant
        self.custom = custom
        self.answer: Answer = None


_call: ContextVar[_Call | None] = ContextVar("isthmus_generate", default=None)


class Asking:
    """``asked``: None, ``("top", k)``, ``("token",)``, ``("sample",)`` or ``("least",)``, as `SplitForward` says."""

    def __init__(self, asked: Answer) -> None:
        if asked is not None and not _is_answer(asked):
            raise CutRefused(
                f'no such answer: {asked!r:.60}; there are None, ("top", k), ("token",), ("sample",) and ("least",)'
            )
        self.asked = asked
        self._take_off = _nothing

    def attach(self, model: nn.Module) -> None:
        """From now on each ``generate()`` of the model says what it needs."""
        if self.asked is None or not all(hasattr(model, name) for name in _HOOKED):
            return
        generate: Any = model.generate
        prepare: Any = model._get_logits_processor
        candidates: Any = model._get_candidate_generator
        signature = inspect.signature(type(model).generate)  # type: ignore[attr-defined]

        def asking_generate(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(model, *args, **kwargs).arguments
            token = _call.set(_Call(self, given.get("assistant_model"), given.get("custom_generate")))
            try:
                return generate(*args, **kwargs)
            finally:
                _call.reset(token)

        def asking_prepare(generation_config: Any, *args: Any, **kwargs: Any) -> Any:
            processors = prepare(generation_config, *args, **kwargs)
            call = _call.get()
            if call is not None and call.asking is self:
                need = needed(generation_config, processors, model=model, assistant=call.assistant, custom=call.custom)
                call.answer = self._chosen(need)
            return processors

        def asking_candidates(*args: Any, **kwargs: Any) -> Any:
            if (self.now() or ("",))[0] == "sample":  # who put drafts there is not always seen from here
                raise CutRefused("the server draws one word a step, and this generate() verifies drafts of several")
            return candidates(*args, **kwargs)

        found = (asking_generate, asking_prepare, asking_candidates)
        self._take_off = put_instead(model, dict(zip(_HOOKED, found, strict=True)))

    def detach(self) -> None:
        """The model is as it was."""
        self._take_off()
        self._take_off = _nothing

    def now(self) -> Answer:
        """For the step that runs."""
        call = _call.get()
        if call is not None and call.asking is self:
            return call.answer
        return None if self.asked in (LEAST, SAMPLE) else self.asked

    def _chosen(self, need: Need) -> Answer:
        asked = self.asked
        if asked == LEAST:
            return need.answer
        if asked == SAMPLE:
            if need.processors is not None:
                return ("sample", need.processors)
            if not need.why_not:  # nothing is sampled
                return need.answer
            raise CutRefused(f'answer=("sample",): the server cannot sample for this generate(): {need.why_not}')
        assert asked is not None
        if need.answer is None or (need.answer[0] == "top" and (asked[0] != "top" or asked[1] < need.answer[1])):
            least = f"the {need.answer[1]} likeliest words" if need.answer else f"all logits ({need.why})"
            raise CutRefused(f"answer={asked} is not enough for this generate(), which needs {least}")
        return asked


def _nothing() -> None:
    """In place of taking off what is not there."""


def _is_answer(asked: Any) -> bool:
    if asked in (("token",), SAMPLE, LEAST):
        return True
    return len(asked) == 2 and asked[0] == "top" and type(asked[1]) is int and asked[1] > 0

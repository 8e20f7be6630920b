"""Which answer each ``generate()`` of a split model needs.

``generate()`` prepares its processors in a method of the model, where it becomes known what it will do. A call of the
model before that gets all logits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import MALFORMED, BadFrame, CutRefused
from shared_hooks.generation.inputs import check_sizes
from shared_hooks.generation.remote_tensor import Origin, RemoteTensor, magnitude, weight
from shared_hooks.generation.results import Answer, Processors, described, is_own
from shared_hooks.modules import put_replacement
from shared_hooks.tensors import ClassFinder, dtype_named, flatten, unflatten

# What the edge reports of the calls before the cut, and the remote tensors that stand for their results.


MAX_CALLS = 100_000
REMOTE_BYTES = 2048
"""The memory of a tensor without data, and of a call."""


@dataclass(frozen=True)
class CallReport:
    """One call: its result is rebuilt from ``structure`` and ``sources`` (remote tensors, or numbers of arguments).

    ``aliases``: whose memory each shares: an argument's, by its number, or an earlier source's (-1 is the first); None:
    its own.
    """

    path: str
    structure: Any
    sources: tuple[RemoteTensor | int, ...]
    inner: tuple[CallReport, ...]
    aliases: tuple[int | None, ...] = ()
    origins: tuple[Origin, ...] = ()

    @functools.cached_property
    def alone(self) -> RemoteTensor | None:
        """The result, if it is a single tensor and no argument."""
        is_one = self.structure == ["t", 0] and len(self.sources) == 1 and self.aliases == (None,)
        return self.sources[0] if is_one and isinstance(self.sources[0], RemoteTensor) else None

    def result(self, given: list[torch.Tensor], find: ClassFinder) -> Any:
        """Return the result as the module would return it. Raises BadFrame."""
        leaves: list[torch.Tensor] = []
        try:
            for number, (source, alias) in enumerate(zip(self.sources, self.aliases, strict=True)):
                if isinstance(source, int):
                    leaves.append(given[source])
                elif alias is None:
                    # one that an earlier step's code has written to is not passed again
                    leaves.append(source if not source.memory.writes else self._fresh(number, source))
                else:
                    base = given[alias] if alias >= 0 else leaves[-alias - 1]
                    made = self._fresh(number, source)
                    if isinstance(base, RemoteTensor):
                        made.memory, made.writes = base.memory, base.memory.writes
                    else:  # writes to a tensor of this side are not counted
                        made.origin = None
                    leaves.append(made)
        except IndexError:
            raise BadFrame(f"{self.path} is reported to return an argument that it does not have") from None
        return unflatten(self.structure, leaves, find)

    def _fresh(self, number: int, source: RemoteTensor) -> RemoteTensor:
        return RemoteTensor(source.shape, source.stride(), source.dtype, source.device, self.origins[number])

    def completed(self, output: Any, find: ClassFinder) -> Any:
        """Return what the module returned on remote tensors, with tensors whose values are known in their place."""
        structure, leaves = flatten(output)
        if len(leaves) != len(self.sources) or not any(type(leaf) is RemoteTensor for leaf in leaves):
            return output
        pairs = zip(leaves, self.sources, strict=True)
        swapped = []
        for number, (leaf, ours) in enumerate(pairs):
            if type(leaf) is RemoteTensor and isinstance(ours, RemoteTensor):
                made = self._fresh(number, ours)
                made.memory, made.writes = leaf.memory, leaf.memory.writes
                leaf = made
            swapped.append(leaf)
        return unflatten(structure, swapped, find)


class CallReports:
    """All calls of a step by path and count."""

    def __init__(self, here: torch.device) -> None:
        self._here = here
        self._left = 0
        self.calls: dict[tuple[str, int], CallReport] = {}
        self._sizes: dict[tuple[str, int], tuple[Any, int]] = {}

    def apply(self, reported: Any) -> None:
        """Process what has changed since the previous step. Raises BadFrame."""
        self._left = MAX_CALLS - len(self.calls)
        try:
            for one in reported:
                key = str(one[0]), int(one[1])
                self.calls[key] = self._call(one)
                self._sizes[key] = magnitude(one), 2 * weight(one) + REMOTE_BYTES * _count(self.calls[key])
        except MALFORMED as error:
            raise BadFrame(f"malformed forms of calls before the cut: {error!s:.120}") from error

    @property
    def nbytes(self) -> int:
        """The approximate bytes of memory that they take."""
        return sum([nbytes for _, nbytes in self._sizes.values()])

    def magnitude(self) -> Any:
        """See `remote_tensor.magnitude`."""
        return frozenset([(key, found) for key, (found, _) in self._sizes.items()])

    def copied(self) -> CallReports:
        """Return a copy for a step that may fail."""
        made = CallReports(self._here)
        made.calls, made._sizes = dict(self.calls), dict(self._sizes)
        return made

    def _call(self, reported: Any) -> CallReport:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many")
        path, count, structure, sources, inner = reported
        origins = tuple([Origin("call", str(path), int(count), number) for number in range(len(sources))])
        made = tuple(map(self._source, sources, origins))
        aliases = tuple([None if type(one) is int or len(one) < 4 else int(one[3]) for one in sources])
        return CallReport(str(path), structure, made, tuple([self._call(one) for one in inner]), aliases, origins)

    def _source(self, source: Any, origin: Origin) -> RemoteTensor | int:
        if type(source) is int:
            return source
        shape, stride, dtype = tuple(source[0]), tuple(source[1]), dtype_named(source[2])
        check_sizes(shape, stride)
        return RemoteTensor(shape, stride, dtype, self._here, origin)


def _count(call: CallReport) -> int:
    return 1 + len(call.sources) + sum(map(_count, call.inner))


# How much of the logits a ``generate()`` of transformers needs, so that its result is the same as with all of them.
#
# Known are greedy search and sampling, with or without drafted tokens, and the processors listed here. Anything else
# may read any of the logits (beams, penalties, custom processors, returned scores), so it needs all.

_METHODS = ("generate", "_sample", "_assisted_decoding")
_OTHER_DRAFTS = ("use_mtp", "speculation_type", "assistant_ensemble_weight")
_COLDEST, _HOTTEST = 1e-3, 1e3
"""The temperatures between which a division by them is exact but for its last bit."""


@dataclass(frozen=True)
class Need:
    """``answer``: the least that is enough; None: all, with the reason ``why``. ``processors``: with which the tail may
    sample instead of the edge; None if nothing is sampled, or for the reason ``why_not``.
    """

    answer: Answer
    why: str = ""
    processors: Processors | None = None
    why_not: str = ""


def needed(
    config: Any, processors: Iterable[Any], *, model: Any = None, assistant: Any = None, custom: Any = None
) -> Need:
    """Return what a ``generate()`` needs. ``config`` and ``processors``: as prepared by it
    (``model._get_logits_processor``); ``assistant``, ``custom``: its arguments assistant_model and custom_generate.
    """
    processors = list(processors)
    mode = str(getattr(config.get_generation_mode(assistant), "value", ""))
    why = _unknown(config, mode, model, custom)
    if why:
        return Need(None, why, why_not=why)
    given_back = bool(config.return_dict_in_generate)
    if given_back and config.output_logits:
        return Need(None, "output_logits gives them back", why_not="output_logits gives them back")
    answer, why = _least(bool(config.do_sample), processors)
    scores = "output_scores gives them back" if given_back and config.output_scores else ""
    # scores are returned as they are after the processors; after a top_k they are the same
    if scores and not (config.do_sample and answer):
        answer, why = None, scores
    if not config.do_sample:
        return Need(answer, why)
    drawn = described(processors)
    drafts = "it verifies drafts of several tokens" if mode == "assisted_generation" else ""
    other = "" if drawn is not None else f"a processor among {', '.join(type(one).__name__ for one in processors)}"
    why_not = scores or drafts or other
    return Need(answer, why, None if why_not else drawn, why_not)


def _unknown(config: Any, mode: str, model: Any, custom: Any) -> str:
    if mode not in ("greedy_search", "sample", "assisted_generation"):
        return mode.replace("_", " ")
    if custom is not None:
        return "custom_generate"
    for name in _OTHER_DRAFTS:
        if getattr(config, name, None) not in (None, False):
            return name
    if model is not None:
        from transformers import GenerationMixin

        for name in _METHODS:
            if getattr(type(model), name, None) is not getattr(GenerationMixin, name, None):
                return f"{type(model).__name__}.{name}, which is its own,"
    return ""


def _least(sampled: bool, processors: list[Any]) -> tuple[Answer, str]:
    """Return the least answer, or None and the reason."""
    banned = 0
    for one in processors:
        name = type(one).__name__
        ban = _ban(name, one)
        if enough := getattr(one, "enough_logits", 0):  # one of ours declares that it reads only the likeliest
            return ("top", enough + banned), ""
        if not is_own(type(one)):
            return None, f"the processor {name}"
        if ban is not None:
            banned += ban
        elif name == "TopKLogitsWarper" and one.filter_value == float("-inf"):
            # from here on everything is as if all logits had come, whatever the next processors are
            return ("top", one.top_k + banned), ""
        elif name != "TemperatureLogitsWarper" or not _COLDEST <= one.temperature <= _HOTTEST:
            return None, f"the processor {name}"
    if sampled:
        return None, "sampling without top_k"
    return (("top", 1 + banned) if processors else ("token",)), ""


def _ban(name: str, processor: Any) -> int | None:
    """Return how many tokens a processor may set to minus infinity, if it does nothing else; else None."""
    if name in ("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"):
        return _asking_count(processor.eos_token_id)
    if name == "SuppressTokensLogitsProcessor":
        return _asking_count(processor.suppress_tokens)
    if name == "SuppressTokensAtBeginLogitsProcessor":
        return _asking_count(processor.begin_suppress_tokens)
    return None


def _asking_count(words: Any) -> int:
    return int(words.numel()) if isinstance(words, torch.Tensor) else len(words)


LEAST = ("least",)
SAMPLE = ("sample",)
_HOOKED = ("generate", "_get_logits_processor", "_get_candidate_generator")
_BATCHES = ("generate_batch", "init_continuous_batching")
"""Methods that write in place to states of their own, which two sides cannot do."""


class _Call:
    """One ``generate()`` in progress."""

    def __init__(self, asking: Asking, assistant: Any, custom: Any) -> None:
        self.asking = asking
        self.assistant = assistant
        self.custom = custom
        self.answer: Answer = None


_call: ContextVar[_Call | None] = ContextVar("isthmus_generate", default=None)


class Asking:
    """Finds the answer of each call. ``asked``: None, ``("top", k)``, ``("token",)``, ``("sample",)`` or
    ``("least",)``; see `SplitForward`.
    """

    def __init__(self, requested: Answer) -> None:
        if requested is not None and not _is_answer(requested):
            raise CutRefused(
                f'no such answer: {requested!r:.60}; there are None, ("top", k), ("token",), ("sample",) and ("least",)'
            )
        self.asked = requested
        self._take_off = _nothing

    def attach(self, model: nn.Module) -> None:
        """Observe each ``generate()`` of the model from now on, and refuse ``generate_batch()``."""
        refused: dict[str, Any] = {name: partial(_refused, name) for name in _BATCHES if hasattr(model, name)}
        if self.asked is None or not all(hasattr(model, name) for name in _HOOKED):
            self._take_off = put_replacement(model, refused)
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
            if (self.now() or ("",))[0] == "sample":  # the code that added drafts is not always visible here
                raise CutRefused("the server draws one word a step, and this generate() verifies drafts of several")
            return candidates(*args, **kwargs)

        found = (asking_generate, asking_prepare, asking_candidates)
        self._take_off = put_replacement(model, {**dict(zip(_HOOKED, found, strict=True)), **refused})

    def detach(self) -> None:
        """Restore the model."""
        self._take_off()
        self._take_off = _nothing

    def now(self) -> Answer:
        """Return the answer for the current step."""
        call = _call.get()
        if call is not None and call.asking is self:
            return call.answer
        return None if self.asked in (LEAST, SAMPLE) else self.asked

    def _chosen(self, need: Need) -> Answer:
        requested = self.asked
        if requested == LEAST:
            return need.answer
        if requested == SAMPLE:
            if need.processors is not None:
                return ("sample", need.processors)
            if not need.why_not:  # nothing is sampled
                return need.answer
            raise CutRefused(f'answer=("sample",): the server cannot sample for this generate(): {need.why_not}')
        assert requested is not None
        if need.answer is None or (
            need.answer[0] == "top" and (requested[0] != "top" or requested[1] < need.answer[1])
        ):
            least = f"the {need.answer[1]} likeliest words" if need.answer else f"all logits ({need.why})"
            raise CutRefused(f"answer={requested} is not enough for this generate(), which needs {least}")
        return requested


def _refused(name: str, *_: Any, **__: Any) -> None:
    raise CutRefused(
        f"{name}() writes to one state of many texts in place, which cannot be in two halves: use generate(); of "
        "several texts at once with SplitGenerator(..., exact=False)"
    )


def _nothing() -> None:
    """Does nothing: there is nothing to detach."""


def _is_answer(requested: Any) -> bool:
    if requested in (("token",), SAMPLE, LEAST):
        return True
    return len(requested) == 2 and requested[0] == "top" and type(requested[1]) is int and requested[1] > 0

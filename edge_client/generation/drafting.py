"""Several tokens per round trip: this side drafts some, and the server verifies them in one step."""

from __future__ import annotations

import copy
import importlib
import inspect
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from shared_hooks.errors import CutRefused, InputMismatch, UnknownLayer
from shared_hooks.generation import is_state, state_in
from shared_hooks.generation.ahead import NextCall, foresight
from shared_hooks.modules import attach, put_replacement, running

__all__ = [
    "Assistant",
    "Constant",
    "DraftSource",
    "Drafting",
    "EarlyExit",
    "FirstLayers",
    "Lookup",
    "Measured",
    "Pace",
    "Worth",
]


# ``generate()`` with drafts: transformers' assisted decoding, with as many tokens a step as pay off. Greedy search
# gives the same tokens as without drafts, as far as a step over several tokens rounds as steps over one do. Sampling
# keeps the distribution; which tokens are drawn depends on how many are drafted, and that on timing. With a
# `Constant` pace the same seed gives the same tokens.

# Sources of drafts. Each is one of transformers' own; a source knows its arguments, and how many tokens to request.

# The first layers of a model with its own norm and output head, as a draft model.
#
# Every architecture's own code runs: after the last wanted layer, the remaining blocks of its list return their
# input. So the model's own final norm and output head see the hidden state of an early layer.

_OURS = (
    *("forward", "generate", "_get_logits_processor", "_get_candidate_generator"),
    "prepare_inputs_for_generation",
)


class EarlyExit:
    """``model`` up to its block ``last`` (a module's path, such as ``model.layers.5``). Inside a ``with`` block, `twin`
    is a model of the same class, with the same weights, whose ``generate()`` runs no later layer.

    Raises UnknownLayer, and CutRefused if ``last`` is no block of a list, or needed weights are not on this side.
    """

    def __init__(self, model: nn.Module, last: str) -> None:
        modules = dict(model.named_modules())
        if last not in modules:
            raise UnknownLayer(f'the model has no module "{last}" to leave it after')
        above, _, name = last.rpartition(".")
        blocks = modules[above]
        if not isinstance(blocks, nn.ModuleList) or not name.isdigit():
            raise CutRefused(f"{last} is not one of a list of blocks: drafts of the first layers end after a block")
        self._last = modules[last]
        self._rest = list(blocks)[int(name) + 1 :]
        if not self._rest:
            raise CutRefused(f"{last} is the last block: there is nothing to leave out for a draft")
        self._check(model, last)
        self.twin = self._made(model)

    def _check(self, model: nn.Module, last: str) -> None:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is None:
            raise CutRefused(f"{type(model).__name__} names no output head, which drafts of its first layers need")
        left_out = {id(weight) for block in self._rest for weight in block.parameters()}
        for name, weight in model.named_parameters():
            if weight.device.type == "meta" and id(weight) not in left_out:
                raise CutRefused(f"drafts of the layers up to {last} need {name}, which this side has not loaded")

    def _made(self, model: nn.Module) -> Any:
        twin: Any = object.__new__(type(model))
        twin.__dict__.update({name: value for name, value in vars(model).items() if name not in _OURS})
        settings = copy.deepcopy(twin.generation_config)
        # the number of drafted tokens is decided outside
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        twin.__dict__["generation_config"] = settings
        plain = type(model).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            token = running.set(_Leaving(self._last, frozenset(self._rest)))
            try:
                return plain(twin, *args, **kwargs)
            finally:
                running.reset(token)
                for value in kwargs.values():
                    _leave_unused(value)

        # transformers inspects the parameters of a forward
        forward.__signature__ = inspect.signature(types.MethodType(plain, twin))  # type: ignore[attr-defined]
        twin.__dict__["forward"] = forward
        return twin

    def __enter__(self) -> EarlyExit:
        for block in (self._last, *self._rest):
            attach.attach(block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for block in (self._last, *self._rest):
            attach.detach(block)


class _Leaving:
    """A `Runner` of one forward that skips the remaining blocks."""

    is_bare = False

    def __init__(self, last: nn.Module, rest: frozenset[nn.Module]) -> None:
        self._last = last
        self._rest = rest
        self._given: Any = None

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As `Runner.call`."""
        if module in self._rest:
            return self._given
        given = forward(*args, **kwargs)
        if module is self._last:
            self._given = given
        return given

    def failed(self, error: BaseException) -> None:
        """As `Runner.failed`."""


def _leave_unused(cache: Any) -> None:
    """Leave parts of a cache that belong to skipped layers empty, where some kinds of them cannot be cropped."""
    for part in (cache, getattr(cache, "self_attention_cache", None)):
        for layer in getattr(part, "layers", None) or ():
            if "crop" not in vars(layer) and not _holds_tensors(layer):
                vars(layer)["crop"] = _nothing


def _holds_tensors(layer: Any) -> bool:
    """Return whether a state contains tensors: a window's length is one without dimensions."""
    inside = [one for value in vars(layer).values() for one in (value if isinstance(value, list) else [value])]
    return any(isinstance(one, torch.Tensor) and one.dim() > 0 for one in inside)


def _nothing(tokens: int) -> None:
    """Does nothing, in place of ``crop``."""


class DraftSource(Protocol):
    """A source of drafts."""

    def ready(self, model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
        """Return a context in which the model can be drafted for; yields the arguments of ``generate()``."""

    def set_length(self, candidates: Any, tokens: int) -> None:
        """Set the maximum number of tokens, at least 1, that transformers' candidate generator drafts."""


@dataclass(frozen=True)
class Lookup:
    """Drafts what followed the last few tokens earlier in the prompt or answer. ``ngram``: how many tokens must match,
    at most.
    """

    ngram: int = 3

    @contextmanager
    def ready(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """As `DraftSource` says."""
        yield {"prompt_lookup_num_tokens": 1, "max_matching_ngram_size": self.ngram}

    def set_length(self, candidates: Any, tokens: int) -> None:
        """As `DraftSource` says."""
        candidates.num_output_tokens = tokens


@dataclass(frozen=True)
class Assistant:
    """A small model on this side, with the same vocabulary."""

    model: nn.Module

    @contextmanager
    def ready(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """As `DraftSource` says."""
        yield {"assistant_model": self.model}

    def set_length(self, candidates: Any, tokens: int) -> None:
        """As `DraftSource` says."""
        candidates.num_assistant_tokens = tokens


@dataclass(frozen=True)
class FirstLayers:
    """The model's own layers up to the block ``last``, with its own norm and output head (`EarlyExit`). They have a
    separate cache, so the head of a step is computed twice for each drafted token.
    """

    last: str

    @contextmanager
    def ready(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """As `DraftSource` says. Raises as `EarlyExit` does."""
        with EarlyExit(model, self.last) as early:
            yield {"assistant_model": early.twin}

    def set_length(self, candidates: Any, tokens: int) -> None:
        """As `DraftSource` says."""
        candidates.num_assistant_tokens = tokens


# How many tokens to draft: the number that gives the most tokens a second, estimated from the steps so far.
#
# A step that drafts n tokens gives 1 + p1 + p1 p2 + ... + p1...pn of them, where pi is how often the i-th is accepted
# when those before it were. It takes a + b n seconds: a is the round trip, the rest of a step and the beginning of a
# draft, b the cost of drafting, sending and verifying one token more. A step without drafts has a time of its own.
# All are estimated from steps, recent ones counting most.

FORGET = 0.95
"""The decay of an observation's weight per step."""
FIRST = 4
"""The number of tokens drafted before any times are known."""
AFTER, AGAIN = 5, 50
"""After so many steps with drafts, one without shows its duration: initially, and later."""
EXPECTED = 0.6
"""The assumed acceptance rate of a token before there are observations."""
FIRST_CHANCE = LEAST_CHANCE = 0.5
"""Less likely calls are not sent ahead: a wrong one costs more than the server's time."""
TRIED = 3
"""The number of steps with others ahead after which it is decided whether they pay."""
LEARN = 0.2
"""The weight of the last step in the prediction for the next."""
OWN_WEIGHT = 2.0
"""The number of tokens tried at a place from which its own rate has half the weight."""


class Pace(Protocol):
    """Decides how many tokens to draft."""

    def choose(self) -> int:
        """Return the number for the next step; 0 for none."""

    def step(self, requested: int, drafted: int, accepted: int, seconds: float | None) -> None:
        """Record a step: how many tokens were requested, drafted, and accepted. ``seconds``: of drafting and verifying;
        None for an unusual step (a prompt's).
        """


@dataclass
class DraftTally:
    """Counts drafts over all steps."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    ahead: int = 0
    """Steps whose drafts were made, and sent if the model is split, while earlier ones were verified."""
    ahead_in_vain: int = 0

    chance: float = field(default_factory=lambda: FIRST_CHANCE)
    """How often predictions after a step's drafts come true, with decaying weights."""

    def step(self, drafted: int, accepted: int) -> None:
        """Count a step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted

    def foreseen(self, comes: bool, weight: float = 1.0) -> None:
        """Record whether a prediction came true, or would have; ``weight``: of the observation."""
        self.chance += LEARN * weight * (comes - self.chance)

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that were accepted; None before the first."""
        return self.accepted / self.drafted if self.drafted else None


class Constant:
    """A constant number of tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def choose(self) -> int:
        """As `Pace.choose`."""
        return self._tokens

    def step(self, requested: int, drafted: int, accepted: int, seconds: float | None) -> None:
        """As `Pace.step`."""


class Measured:
    """The number that gives the most tokens per second, at most ``most``. One object may serve any number of
    generations and threads that take turns.
    """

    def __init__(self, most: int = 32) -> None:
        self.most = most
        self._tried = [0.0] * most
        self._kept = [0.0] * most
        self._times = _Line()
        self._alone = _Line()
        self._last = 0
        self._drafting = 0  # steps since the last one without drafts

    def choose(self) -> int:
        """As `Pace.choose`."""
        base, slope = self._times.base, self._times.slope
        if base is None:
            return min(FIRST, self.most)
        if self._drafting >= (AFTER if self._alone.base is None else AGAIN):
            return 0
        best, best_rate, tokens, reached = 0, 1.0 / (self._alone.base or base), 1.0, 1.0
        for number, rate in enumerate(self.rates(), start=1):
            reached *= rate
            tokens += reached
            if tokens / (base + slope * number) > best_rate:
                best, best_rate = number, tokens / (base + slope * number)
        # step by step: the estimate is reliable only near what was tried
        return min(best, 2 * self._last + 2)

    def rates(self) -> list[float]:
        """Return how often each place in a draft is accepted if those before it are."""
        tried, kept = sum(self._tried), sum(self._kept)
        before = (kept + EXPECTED) / (tried + 1.0)
        found = []
        for here, good in zip(self._tried, self._kept, strict=True):
            before = (good + OWN_WEIGHT * before) / (here + OWN_WEIGHT)
            found.append(before)
        return found

    def step(self, requested: int, drafted: int, accepted: int, seconds: float | None) -> None:
        """As `Pace.step`."""
        self._last = requested
        drafted = min(drafted, self.most)
        if drafted or not requested:  # where no draft was requested, the estimates of drafts age
            self._tried = [one * FORGET for one in self._tried]
            self._kept = [one * FORGET for one in self._kept]
        for place in range(drafted):
            if place > accepted:
                break
            self._tried[place] += 1.0
            self._kept[place] += place < accepted
        self._drafting = self._drafting + 1 if drafted else 0
        self._times.age()
        self._alone.age()
        if seconds is not None:
            (self._times if drafted else self._alone).add(drafted, seconds)


class _Line:
    """Seconds as a linear function of tokens, by least squares with decaying weights."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.slope = 0.0
        """Seconds per additional token; unchanged while all steps have the same number."""

    def age(self) -> None:
        """Age the observations by one step."""
        self._weight, self._x, self._y = self._weight * FORGET, self._x * FORGET, self._y * FORGET
        self._xx, self._xy = self._xx * FORGET, self._xy * FORGET

    def add(self, tokens: int, seconds: float) -> None:
        self._weight, self._x, self._y = self._weight + 1.0, self._x + tokens, self._y + seconds
        self._xx, self._xy = self._xx + tokens * tokens, self._xy + tokens * seconds
        spread = self._xx - self._x * self._x / self._weight
        together = self._xy - self._x * self._y / self._weight
        slope = (together + self.slope) / (spread + 1.0)  # a spread of less than a token carries little information
        most = 0.9 * self._y / self._x if self._x else slope  # a step without drafts takes some time, too
        self.slope = max(0.0, min(slope, most))

    @property
    def base(self) -> float | None:
        """The seconds at zero tokens; None before the first."""
        if not self._weight:
            return None
        return max((self._y - self.slope * self._x) / self._weight, 1e-9)


class Worth:
    """Whether drafts that are made and sent while others are verified give more tokens per second than one by one, as
    measured. They may not if both sides share a processor. One object may serve any number of generations.
    """

    def __init__(self) -> None:
        self._tokens, self._seconds, self._steps = [0.0, 0.0], [0.0, 0.0], [0, 0]

    def step(self, ahead: bool, tokens: int, seconds: float) -> None:
        """Record a step's tokens and seconds. ``ahead``: it was sent ahead, or others while it ran."""
        self._tokens[ahead] = FORGET * self._tokens[ahead] + tokens
        self._seconds[ahead] = FORGET * self._seconds[ahead] + seconds
        self._steps[ahead] += 1
        if not ahead and not self.pays and self._steps[False] % AGAIN == 0:
            self._tokens[True], self._seconds[True], self._steps[True] = 0.0, 0.0, 0  # it is measured again

    @property
    def pays(self) -> bool:
        """Whether it pays; also while that is unknown."""
        if self._steps[True] < TRIED or not self._steps[False]:
            return True
        return self._tokens[True] * self._seconds[False] >= self._tokens[False] * self._seconds[True]


_HOOKED = ("generate", "_get_candidate_generator", "prepare_inputs_for_generation")
_OLDEST = 5, 18
"""The first release of transformers whose drafts are right after a state that has read a part of the text: before, some
models wrote other tokens, in silence.
"""


class Drafting:
    """In the ``with`` block, ``model.generate()`` drafts with ``source``. The model may be whole or split; drafts are
    made on this side only. ``pace``: how many tokens; by default as measured. ``ahead``: for greedy search, make and
    send the next drafts while earlier ones are verified, if measurements show that this pays; or a `Worth` that
    measures over several generations.

    Raises InputMismatch for a model that is not transformers', or of a release before 5.18, and in ``generate()`` for
    several rows at once.
    """

    def __init__(
        self,
        model: nn.Module,
        source: DraftSource,
        *,
        pace: Pace | None = None,
        ahead: bool | Worth = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not all(hasattr(type(model), name) for name in _HOOKED):
            raise InputMismatch(f"{type(model).__name__} has no generate() of transformers that takes drafts")
        release = importlib.import_module("transformers").__version__
        if tuple(map(int, release.split(".")[:2])) < _OLDEST:
            raise InputMismatch(f"drafts need transformers {_OLDEST[0]}.{_OLDEST[1]} or later: {release} is installed")
        self.pace: Pace = Measured() if pace is None else pace
        self.tally = DraftTally()
        self._model = model
        self._source = source
        self._clock = clock
        self._ahead = Worth() if ahead is True else ahead or None
        self._stack = ExitStack()
        self._read = 0
        """The tokens of the current text that its given state has processed."""

    def __enter__(self) -> Drafting:
        arguments = self._stack.enter_context(self._source.ready(self._model))
        generate: Any = self._model.generate
        candidates_of: Any = self._model._get_candidate_generator
        inputs_of: Any = self._model.prepare_inputs_for_generation

        texts: list[_Candidates] = []

        def drafting_generate(*args: Any, **kwargs: Any) -> Any:
            texts.clear()
            token = foresight.set(_Sight(self._model, texts)) if self._ahead is not None else None
            try:
                return generate(*args, **{**arguments, **kwargs})
            finally:
                if token is not None:
                    foresight.reset(token)

        def drafting_candidates(*args: Any, **kwargs: Any) -> Any:
            rows = kwargs["input_ids"].shape[0]
            if rows != 1:
                raise InputMismatch(f"drafts are for one row, and generate() has {rows}")
            self._read = _read(kwargs["input_ids"], kwargs["generation_config"], kwargs["model_kwargs"])
            measured = self.pace, self.tally, self._ahead or Worth()
            made = _Candidates(candidates_of(*args, **kwargs), self._source, *measured, self._clock)
            # with sampling, the drawn tokens would depend on timing
            if self._ahead is not None and not kwargs["generation_config"].do_sample:
                texts.append(made)
            return made

        def drafting_inputs(
            input_ids: torch.Tensor, *args: Any, next_sequence_length: int | None = None, **kwargs: Any
        ) -> Any:
            # transformers' drafts read a prompt from its beginning, though the given state has read a part of it
            if kwargs.get("is_first_iteration") and self._read:
                next_sequence_length, self._read = input_ids.shape[1] - self._read, 0
            given = inputs_of(input_ids, *args, next_sequence_length=next_sequence_length, **kwargs)
            if texts:
                read = given.get("decoder_input_ids", given.get("input_ids"))
                texts[-1].calls(
                    _Inputs(self._model, inputs_of, input_ids, kwargs), 0 if read is None else read.shape[1]
                )
            return given

        ours = {
            "generate": drafting_generate,
            "_get_candidate_generator": drafting_candidates,
            "prepare_inputs_for_generation": drafting_inputs,
        }
        self._stack.callback(put_replacement(self._model, ours))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _read(ids: torch.Tensor, settings: Any, given: dict[str, Any]) -> int:
    """Return how many of the ids (1, length) the state given to ``generate()`` has processed: none without a state, and
    if the ids are only new ones, which the longer attention mask shows. Raises InputMismatch if none are left.
    """
    try:
        read = int(state_in(given).get_seq_length())
    except (AttributeError, TypeError, ValueError):  # there is none, or it counts nothing
        return 0
    mask = given.get("decoder_attention_mask", None if "encoder_outputs" in given else given.get("attention_mask"))
    masked = getattr(settings, "_mask_length", -1) if mask is None else mask.shape[1]
    if not read or masked != ids.shape[1] or given.get("inputs_embeds") is not None:
        return 0
    if read >= ids.shape[1]:
        raise InputMismatch(f"the state has read {read} tokens, and the text has {ids.shape[1]}: nothing to continue")
    return read


@dataclass(frozen=True)
class _Inputs:
    """What one call of the model is prepared from: the ids of the text with its drafts (1, length), and the rest."""

    model: Any
    prepare: Callable[..., dict[str, Any]]
    ids: torch.Tensor
    kwargs: dict[str, Any]

    def then(self, ids: torch.Tensor) -> _Inputs:
        """Return the same for the call after it, if all of its drafts are accepted."""
        kwargs, length = dict(self.kwargs, is_first_iteration=False), ids.shape[1]
        utils: Any = importlib.import_module("transformers.generation.utils")  # as its own loop does between two calls
        utils._prepare_attention_mask(kwargs, length, self.model.config.is_encoder_decoder)
        utils._prepare_token_type_ids(kwargs, length)
        utils._prepare_position_ids(kwargs, length, self.model.config.is_encoder_decoder)
        return _Inputs(self.model, self.prepare, ids, kwargs)

    def prepared(self, tokens: int) -> dict[str, Any]:
        """Return the arguments of a call that processes the last ``tokens`` ids."""
        given = self.prepare(self.ids, next_sequence_length=tokens, **self.kwargs)
        if "logits_to_keep" in given:
            given["logits_to_keep"] = tokens
        return given


@dataclass(frozen=True)
class _Ahead:
    """Drafts made before it is known what they follow. ``base``: the ids that they follow if all before them are
    accepted (1, length).
    """

    base: torch.Tensor
    inputs: _Inputs
    logits: torch.Tensor | None
    sure: list[float]
    """A model's confidence in each."""
    assistant: dict[str, Any] | None
    """The arguments of that model's next call, including its state."""


class _Sight:
    """The `Foresight` of the generations in progress."""

    def __init__(self, model: nn.Module, texts: list[_Candidates]) -> None:
        self.model = model
        self._texts = texts

    @property
    def tokens(self) -> int:
        """As `Foresight.tokens`."""
        return self._texts[-1].tokens if self._texts else 0

    def next(self, after: int, saved_ns: int, compute_ns: int) -> NextCall | None:
        """As `Foresight.next`."""
        return self._texts[-1].next(after, saved_ns, compute_ns) if self._texts else None


class _Candidates:
    """Wraps transformers' candidate generator: requests as many drafts as pay, and measures."""

    requires_model_outputs = False

    def __init__(
        self,
        candidates: Any,
        source: DraftSource,
        pace: Pace,
        tally: DraftTally,
        worth: Worth,
        clock: Callable[[], float],
    ) -> None:
        self._worth = worth
        self._with_others = False
        self._candidates = candidates
        self._source = source
        self._pace = pace
        self._tally = tally
        self._clock = clock
        self._asked = self._drafted = 0
        self._began: float | None = None
        self._first = True
        self._inputs: _Inputs | None = None
        self.tokens = 0
        """The tokens that the current call processes."""
        self._ahead: deque[_Ahead] = deque()

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids (1, length), followed by the drafted ones, and the drafts' logits if there are any."""
        self._began = None if self._first else self._clock()
        if self._ahead and torch.equal(self._ahead[0].base, input_ids):
            ready, self._with_others = self._ahead.popleft(), True
            found, logits = ready.inputs.ids, ready.logits
            self._sure.extend(ready.sure)
            self._tally.foreseen(True)
            if ready.assistant is not None:
                self._candidates.assistant_kwargs = ready.assistant
            self._asked = self._drafted = found.shape[1] - input_ids.shape[1]
            return found, logits
        self._with_others = bool(self._ahead)  # the server may still be computing one of them
        if self._ahead:
            self._tally.foreseen(False)
            self._tally.ahead_in_vain += len(self._ahead)
            self._ahead.clear()
        # a draft model takes the prompt in the first step; later it could not catch up with the text
        self._asked, found, logits = max(self._pace.choose(), int(self._first)), input_ids, None
        if self._asked:
            self._source.set_length(self._candidates, self._asked)
            found, logits = self._candidates.get_candidates(input_ids, **kwargs)
        self._drafted = found.shape[1] - input_ids.shape[1]
        return found, logits

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Record the end of a step; ``num_matches``: the accepted drafts."""
        accepted = min(int(num_matches), self._drafted)
        seconds = None if self._began is None else self._clock() - self._began
        self._first = False
        self._pace.step(self._asked, self._drafted, accepted, seconds)
        if seconds is not None:
            self._worth.step(self._with_others or bool(self._ahead), accepted + 1, seconds)
        self._tally.step(self._drafted, accepted)
        if self._drafted and not self._ahead:  # one token more than was drafted would have been foreseen
            self._tally.foreseen(accepted == self._drafted, 0.25)
        if self._asked:
            self._candidates.update_candidate_strategy(input_ids, scores, num_matches)

    # Drafts made while those before them are being verified

    @property
    def _sure(self) -> list[float]:
        """Where transformers keeps its model's confidence in each draft: as many as will be verified."""
        found: list[float] = getattr(self._candidates, "probs", [])
        return found

    def calls(self, inputs: _Inputs, tokens: int) -> None:
        """Record the model's next call, and how many tokens it processes."""
        self._inputs, self.tokens = inputs, tokens

    def next(self, after: int, saved_ns: int, compute_ns: int) -> NextCall | None:
        """As `Foresight.next`."""
        while len(self._ahead) > after:
            self._ahead.pop()
            self._tally.ahead_in_vain += 1
        tip = self._ahead[-1].inputs if self._ahead else self._inputs
        # the server computes further ones one after the other, and nothing is saved
        if tip is None or self._first or len(self._ahead) < after or after * compute_ns > saved_ns:
            return None
        if not self._worth.pays:
            return None
        chance = self._tally.chance ** (after + 1)
        if chance <= LEAST_CHANCE or chance * saved_ns <= (1 - chance) * max(0, compute_ns - saved_ns):
            return None
        found, logits, sure, assistant = self._drafts_after(tip.ids, 1 + max(1, self._pace.choose()))
        tokens = found.shape[1] - tip.ids.shape[1]
        if tokens < 2:  # only a guess
            return None
        state_in(tip.kwargs).crop(0)  # as after a step whose drafts were all accepted
        inputs = tip.then(found)
        logits = None if logits is None else logits[:, 1:]  # the first is not a draft
        self._ahead.append(_Ahead(found[:, : 1 - tokens or None], inputs, logits, sure[1:], assistant))
        self._tally.ahead += 1
        return NextCall(inputs.prepared(tokens), tokens)

    def _drafts_after(self, ids: torch.Tensor, most: int) -> tuple[Any, Any, list[float], dict[str, Any] | None]:
        """Ids and logits as in `get_candidates`, a model's confidence in each, and the arguments of its next call. The
        candidate generator is not changed.
        """
        candidates, known = self._candidates, len(self._sure)
        before: dict[str, Any] | None = getattr(candidates, "assistant_kwargs", None)
        if before is not None:
            tip = self._ahead[-1].assistant if self._ahead else before
            own = {name: copy.deepcopy(value) for name, value in (tip or before).items() if is_state(value)}
            candidates.assistant_kwargs = {**(tip or before), **own}
        try:
            self._source.set_length(candidates, most)
            found, logits = candidates.get_candidates(ids)
            return found, logits, self._sure[known:], getattr(candidates, "assistant_kwargs", None)
        finally:
            del self._sure[known:]
            if before is not None:
                candidates.assistant_kwargs = before

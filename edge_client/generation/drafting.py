"""Several tokens a round trip: this side drafts some, and the server verifies them in one step."""

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
from shared_hooks.generation.ahead import NextCall, foresight
from shared_hooks.modules import attach, put_instead, running

__all__ = [
    "Assistant",
    "Constant",
    "Drafting",
    "EarlyExit",
    "FirstLayers",
    "Lookup",
    "Measured",
    "Pace",
    "Source",
    "Worth",
]


# ``generate()`` with drafts: transformers' assisted decoding, with as many tokens a step as pay.
# Greedy search gives what it gives without drafts, as far as a step over several tokens rounds as steps over one do.
# Sampling keeps the distribution; which words are drawn depends on how many tokens are drafted, and that on times. With
# a `Constant` pace the same seed gives the same words.

# Where drafts come from. Each is one of transformers' own; a source says how it is asked for, and for how much.

# The first layers of a model with its own norm and output head, as a model that drafts.
#
# Every architecture's own code runs: behind the last layer that is wanted, the rest of the blocks in its list pass on
# what that one gave. So the model's own final norm and output head see the hidden state of an early layer.

_OURS = (
    *("forward", "generate", "_get_logits_processor", "_get_candidate_generator"),
    "prepare_inputs_for_generation",
)


class EarlyExit:
    """``model`` up to its block ``last`` (a module's path, such as ``model.layers.5``). Inside of a ``with`` block,
    `twin` is a model of the same class, with the same weights, whose ``generate()`` runs no layer behind that one.

    Raises UnknownLayer, and CutRefused where ``last`` is no block of a list, or weights that are needed are not on this
    side.
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
        # how much is drafted is decided outside
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

        # transformers reads what a forward takes
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
    """A `Runner` of one forward."""

    is_bare = False

    def __init__(self, last: nn.Module, rest: frozenset[nn.Module]) -> None:
        self._last = last
        self._rest = rest
        self._given: Any = None

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As the `Runner` says."""
        if module in self._rest:
            return self._given
        given = forward(*args, **kwargs)
        if module is self._last:
            self._given = given
        return given

    def failed(self, error: BaseException) -> None:
        """As the `Runner` says."""


def _leave_unused(cache: Any) -> None:
    """Parts of a cache that belong to layers left out stay empty, and some kinds of them cannot be cropped so."""
    for part in (cache, getattr(cache, "self_attention_cache", None)):
        for layer in getattr(part, "layers", None) or ():
            if "crop" not in vars(layer) and not _holds_tensors(layer):
                vars(layer)["crop"] = _nothing


def _holds_tensors(layer: Any) -> bool:
    """Whether a state holds tensors: a window's length is one without dimensions."""
    inside = [one for value in vars(layer).values() for one in (value if isinstance(value, list) else [value])]
    return any(isinstance(one, torch.Tensor) and one.dim() > 0 for one in inside)


def _nothing(tokens: int) -> None:
    """In place of ``crop``."""


class Source(Protocol):
    """One kind of drafts."""

    def ready(self, model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
        """While it lasts the model can be drafted for; gives the arguments by which ``generate()`` drafts so."""

    def set_length(self, candidates: Any, tokens: int) -> None:
        """Have transformers' generator of candidates draft so many tokens at most, at least 1."""


@dataclass(frozen=True)
class Lookup:
    """What followed the last few tokens when they came before, in the prompt or in the answer. ``ngram``: how many
    tokens must be the same, at most.
    """

    ngram: int = 3

    @contextmanager
    def ready(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """As `Source` says."""
        yield {"prompt_lookup_num_tokens": 1, "max_matching_ngram_size": self.ngram}

    def set_length(self, candidates: Any, tokens: int) -> None:
        """As `Source` says."""
        candidates.num_output_tokens = tokens


@dataclass(frozen=True)
class Assistant:
    """A small model on this side, with the same vocabulary."""

    model: nn.Module

    @contextmanager
    def ready(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """As `Source` says."""
        yield {"assistant_model": self.model}

    def set_length(self, candidates: Any, tokens: int) -> None:
        """As `Source` says."""
        candidates.num_assistant_tokens = tokens


@dataclass(frozen=True)
class FirstLayers:
    """The model's own layers up to the block ``last``, with its own norm and output head (`EarlyExit`). They have a
    cache of their own, so the head of a step is computed twice for each token that is drafted.
    """

    last: str

    @contextmanager
    def ready(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """As `Source` says. Raises as `EarlyExit` does."""
        with EarlyExit(model, self.last) as early:
            yield {"assistant_model": early.twin}

    def set_length(self, candidates: Any, tokens: int) -> None:
        """As `Source` says."""
        candidates.num_assistant_tokens = tokens


# How many tokens to draft: as many as give the most tokens a second, by what the steps so far have shown.
#
# A step that drafts n tokens gives 1 + p1 + p1 p2 + ... + p1...pn of them, where pi is how often the i-th is accepted
# when those before it were. It takes a + b n seconds: a is the round trip, the rest of a step and the beginning of a
# draft, b what one token more costs to be drafted, sent and verified. A step without drafts has a time of its own. All
# are estimated from steps, the last ones counting most.

FORGET = 0.95
"""What an observation counts for after one step more."""
FIRST = 4
"""Tokens drafted while nothing is known of times."""
AFTER, AGAIN = 5, 50
"""Steps with drafts after which one without shows what that takes: at first, and then."""
EXPECTED = 0.6
"""How often a token is taken to be accepted before there were any."""
FIRST_CHANCE = LEAST_CHANCE = 0.5
"""What is less likely to come is not sent ahead: in vain it costs more than the server's time."""
TRIED = 3
"""Steps with others ahead after which it is said whether they pay."""
LEARN = 0.2
"""How much the last step counts for what is thought of the next."""
OWN_WEIGHT = 2.0
"""Tokens that must have been tried at a place before its own rate counts half."""


class Pace(Protocol):
    """Says how many tokens to draft."""

    def choose(self) -> int:
        """For the next step; 0 for none."""

    def step(self, asked: int, drafted: int, accepted: int, seconds: float | None) -> None:
        """A step is over: so many tokens were asked for, found, and accepted. ``seconds``: of drafting and verifying;
        None where the step was no usual one (a prompt's).
        """


@dataclass
class Tally:
    """What was drafted, over all steps."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    ahead: int = 0
    """Steps whose drafts were made, and sent where the model is split, while those before them were verified."""
    ahead_in_vain: int = 0

    comes_true: float = field(default_factory=lambda: FIRST_CHANCE)
    """How often what is foreseen behind a step's drafts comes, the last steps counting most."""

    def step(self, drafted: int, accepted: int) -> None:
        """One step more."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted

    def foreseen(self, comes: bool, weight: float = 1.0) -> None:
        """Whether what was foreseen came, or would have; ``weight``: of an observation."""
        self.comes_true += LEARN * weight * (comes - self.comes_true)

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens; None before the first."""
        return self.accepted / self.drafted if self.drafted else None


class Constant:
    """Always the same number."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def choose(self) -> int:
        """As `Pace` says."""
        return self._tokens

    def step(self, asked: int, drafted: int, accepted: int, seconds: float | None) -> None:
        """As `Pace` says."""


class Measured:
    """What gives the most tokens a second, ``most`` at most. One object may serve any number of texts and threads that
    take turns.
    """

    def __init__(self, most: int = 32) -> None:
        self.most = most
        self._tried = [0.0] * most
        self._kept = [0.0] * most
        self._times = _Line()
        self._alone = _Line()
        self._last = 0
        self._drafting = 0  # steps since one without drafts

    def choose(self) -> int:
        """As `Pace` says."""
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
        # step by step: what is far from what was tried is not known
        return min(best, 2 * self._last + 2)

    def rates(self) -> list[float]:
        """How often each place in a draft is accepted if those before it are."""
        tried, kept = sum(self._tried), sum(self._kept)
        before = (kept + EXPECTED) / (tried + 1.0)
        found = []
        for here, good in zip(self._tried, self._kept, strict=True):
            before = (good + OWN_WEIGHT * before) / (here + OWN_WEIGHT)
            found.append(before)
        return found

    def step(self, asked: int, drafted: int, accepted: int, seconds: float | None) -> None:
        """As `Pace` says."""
        self._last = asked
        drafted = min(drafted, self.most)
        if drafted or not asked:  # where nothing was asked for, what is known of drafts grows old
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
    """Seconds as a line over tokens; of least squares, the last ones counting most."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.slope = 0.0
        """Seconds for one token more; as it was, while all steps have as many."""

    def age(self) -> None:
        """One step more has gone by."""
        self._weight, self._x, self._y = self._weight * FORGET, self._x * FORGET, self._y * FORGET
        self._xx, self._xy = self._xx * FORGET, self._xy * FORGET

    def add(self, tokens: int, seconds: float) -> None:
        self._weight, self._x, self._y = self._weight + 1.0, self._x + tokens, self._y + seconds
        self._xx, self._xy = self._xx + tokens * tokens, self._xy + tokens * seconds
        spread = self._xx - self._x * self._x / self._weight
        together = self._xy - self._x * self._y / self._weight
        slope = (together + self.slope) / (spread + 1.0)  # a spread of less than a token tells little
        most = 0.9 * self._y / self._x if self._x else slope  # a step without drafts takes some time
        self.slope = max(0.0, min(slope, most))

    @property
    def base(self) -> float | None:
        """Seconds without the tokens' share; None before the first."""
        if not self._weight:
            return None
        return max((self._y - self.slope * self._x) / self._weight, 1e-9)


class Worth:
    """Whether drafts that are made and sent while others are verified give more tokens a second than one by one, by
    what was measured. Where both sides share a processor they may not. One object may serve any number of texts.
    """

    def __init__(self) -> None:
        self._tokens, self._seconds, self._steps = [0.0, 0.0], [0.0, 0.0], [0, 0]

    def step(self, ahead: bool, tokens: int, seconds: float) -> None:
        """Records a step's tokens and seconds. ``ahead``: it was sent ahead, or others while it ran."""
        self._tokens[ahead] = FORGET * self._tokens[ahead] + tokens
        self._seconds[ahead] = FORGET * self._seconds[ahead] + seconds
        self._steps[ahead] += 1
        if not ahead and not self.pays and self._steps[False] % AGAIN == 0:
            self._tokens[True], self._seconds[True], self._steps[True] = 0.0, 0.0, 0  # it is tried again

    @property
    def pays(self) -> bool:
        """Also while that is not known."""
        if self._steps[True] < TRIED or not self._steps[False]:
            return True
        return self._tokens[True] * self._seconds[False] >= self._tokens[False] * self._seconds[True]


_HOOKED = ("generate", "_get_candidate_generator", "prepare_inputs_for_generation")


class Drafting:
    """While the ``with`` block runs, ``model.generate()`` drafts by ``source``. The model may be whole or split; drafts
    are made on this side alone. ``pace``: how many tokens; where nobody says, what gives most by what was measured.
    ``ahead``: of greedy search, the next drafts are made and sent while those before them are verified, where that pays
    by what was measured; a `Worth` to measure it over several texts.

    Raises InputMismatch for a model that is none of transformers', and in ``generate()`` for several rows at once.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        *,
        pace: Pace | None = None,
        ahead: bool | Worth = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not all(hasattr(type(model), name) for name in _HOOKED):
            raise InputMismatch(f"{type(model).__name__} has no generate() of transformers that takes drafts")
        self.pace: Pace = Measured() if pace is None else pace
        self.tally = Tally()
        self._model = model
        self._source = source
        self._clock = clock
        self._ahead = Worth() if ahead is True else ahead or None
        self._stack = ExitStack()
        self._read = 0
        """Tokens of the text under way that the state given with it has read."""

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
            # of words that are drawn, which they are would depend on times
            if self._ahead is not None and not kwargs["generation_config"].do_sample:
                texts.append(made)
            return made

        def drafting_inputs(
            input_ids: torch.Tensor, *args: Any, next_sequence_length: int | None = None, **kwargs: Any
        ) -> Any:
            # transformers' drafts read a prompt whole, though a state that is given has read some of it
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
        self._stack.callback(put_instead(self._model, ours))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _read(ids: torch.Tensor, settings: Any, given: dict[str, Any]) -> int:
    """How many of the ids (1, length) the state given to ``generate()`` has read: none where it has no state, and where
    the ids are new ones alone, which the longer attention mask shows. Raises InputMismatch where none are left.
    """
    try:
        read = int(given["past_key_values"].get_seq_length())
    except (KeyError, AttributeError, TypeError, ValueError):  # there is none, or it counts nothing
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
        """The same for the call after it, where all of its drafts are accepted."""
        kwargs, length = dict(self.kwargs, is_first_iteration=False), ids.shape[1]
        utils: Any = importlib.import_module("transformers.generation.utils")  # as its own loop does between two calls
        utils._prepare_attention_mask(kwargs, length, self.model.config.is_encoder_decoder)
        utils._prepare_token_type_ids(kwargs, length)
        utils._prepare_position_ids(kwargs, length, self.model.config.is_encoder_decoder)
        return _Inputs(self.model, self.prepare, ids, kwargs)

    def prepared(self, tokens: int) -> dict[str, Any]:
        """The arguments of a call that reads the last ``tokens`` ids."""
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
    """How sure a model was of each."""
    assistant: dict[str, Any] | None
    """What that model is to be called with after them, its state among it."""


class _Sight:
    """What `shared_hooks.generation.ahead` asks for the calls that will come: the text under way, if there is one."""

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
    """Stands for transformers' generator of candidates: asks it for as many as pay, and measures."""

    requires_model_outputs = False

    def __init__(
        self, candidates: Any, source: Source, pace: Pace, tally: Tally, worth: Worth, clock: Callable[[], float]
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
        """That the call under way reads."""
        self._ahead: deque[_Ahead] = deque()

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids (1, length), with the drafted ones behind them, and the drafts' logits where there are any."""
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
        self._with_others = bool(self._ahead)  # the server may still be at one of them
        if self._ahead:
            self._tally.foreseen(False)
            self._tally.ahead_in_vain += len(self._ahead)
            self._ahead.clear()
        # a model that drafts takes the prompt in the first step, or it does not find into the text later
        self._asked, found, logits = max(self._pace.choose(), int(self._first)), input_ids, None
        if self._asked:
            self._source.set_length(self._candidates, self._asked)
            found, logits = self._candidates.get_candidates(input_ids, **kwargs)
        self._drafted = found.shape[1] - input_ids.shape[1]
        return found, logits

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """The step is over; so many of the drafts were accepted."""
        accepted = min(int(num_matches), self._drafted)
        seconds = None if self._began is None else self._clock() - self._began
        self._first = False
        self._pace.step(self._asked, self._drafted, accepted, seconds)
        if seconds is not None:
            self._worth.step(self._with_others or bool(self._ahead), accepted + 1, seconds)
        self._tally.step(self._drafted, accepted)
        if self._drafted and not self._ahead:  # one token more would have been foreseen than was drafted
            self._tally.foreseen(accepted == self._drafted, 0.25)
        if self._asked:
            self._candidates.update_candidate_strategy(input_ids, scores, num_matches)

    # Drafts that are made while those before them are verified

    @property
    def _sure(self) -> list[float]:
        """Where transformers keeps how sure its model was of each draft: as many as will be verified."""
        found: list[float] = getattr(self._candidates, "probs", [])
        return found

    def calls(self, inputs: _Inputs, tokens: int) -> None:
        """Records what the model is called with, and how many tokens it reads."""
        self._inputs, self.tokens = inputs, tokens

    def next(self, after: int, saved_ns: int, compute_ns: int) -> NextCall | None:
        """As `Foresight.next`."""
        while len(self._ahead) > after:
            self._ahead.pop()
            self._tally.ahead_in_vain += 1
        tip = self._ahead[-1].inputs if self._ahead else self._inputs
        # of more the server computes one after the other, and nothing is saved
        if tip is None or self._first or len(self._ahead) < after or after * compute_ns > saved_ns:
            return None
        if not self._worth.pays:
            return None
        chance = self._tally.comes_true ** (after + 1)
        if chance <= LEAST_CHANCE or chance * saved_ns <= (1 - chance) * max(0, compute_ns - saved_ns):
            return None
        found, logits, sure, assistant = self._drafts_after(tip.ids, 1 + max(1, self._pace.choose()))
        tokens = found.shape[1] - tip.ids.shape[1]
        if tokens < 2:  # a guess alone
            return None
        tip.kwargs["past_key_values"].crop(0)  # as it is done behind a step whose drafts were all accepted
        inputs = tip.then(found)
        logits = None if logits is None else logits[:, 1:]  # the first is no draft
        self._ahead.append(_Ahead(found[:, : 1 - tokens or None], inputs, logits, sure[1:], assistant))
        self._tally.ahead += 1
        return NextCall(inputs.prepared(tokens), tokens)

    def _drafts_after(self, ids: torch.Tensor, most: int) -> tuple[Any, Any, list[float], dict[str, Any] | None]:
        """Ids and logits as `get_candidates` gives them, how sure a model was of each, and what it is called with next.
        The generator of candidates stays as it is.
        """
        candidates, known = self._candidates, len(self._sure)
        before: dict[str, Any] | None = getattr(candidates, "assistant_kwargs", None)
        if before is not None:
            tip = self._ahead[-1].assistant if self._ahead else before
            candidates.assistant_kwargs = {**(tip or before)}
            if (state := candidates.assistant_kwargs.get("past_key_values")) is not None:
                candidates.assistant_kwargs["past_key_values"] = copy.deepcopy(state)
        try:
            self._source.set_length(candidates, most)
            found, logits = candidates.get_candidates(ids)
            return found, logits, self._sure[known:], getattr(candidates, "assistant_kwargs", None)
        finally:
            del self._sure[known:]
            if before is not None:
                candidates.assistant_kwargs = before

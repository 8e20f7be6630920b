"""Generate several texts at a time with a split language model: copies that share its weights, each with a state.

A copy (`_Seat`) handles one request at a time. It keeps the states of its last texts on both sides, so that a chat's
next turn reads only what is new, and another chat with the same beginning continues from a fork of it.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from edge_client.client import EdgeClient
from edge_client.generation import SplitGenerator, Summary, Words
from edge_client.generation.drafting import Drafting, DraftSource, Measured, Pace, Worth
from edge_client.generation.link import SessionLink
from edge_client.serving.sampling import Chosen, Grammars, Sampling, SamplingProcessor
from shared_hooks.errors import Cancelled, InputMismatch, ServerUnavailable, SpecError
from shared_hooks.generation import state_name

if TYPE_CHECKING:
    from edge_client.generation.heads import SharedHeads, TextHeads

KEPT: Final = 4
"""States of earlier texts that a copy of the model keeps."""
WORTH_A_FORK: Final = 16
"""Minimum tokens of a common prefix for a fork; shorter ones are read again."""
LEAST: Final = ("least",)


@dataclass(frozen=True)
class TextTask:
    """A text to continue. ``most``: maximum tokens to write; None: the model's length. ``number``: of the choice, of
    several for one prompt.
    """

    prompt: tuple[int, ...]
    most: int | None
    sampling: Sampling
    number: int = 0


@dataclass(frozen=True)
class WrittenText:
    """A generated text. ``reason``: "stop" or "length". ``kept``: tokens of the prompt whose state was reused."""

    ids: tuple[int, ...]
    chosen: tuple[Chosen, ...]
    reason: str
    kept: int
    summary: Summary


@dataclass(eq=False)
class _State:
    ids: list[int]
    state: Any


@dataclass(eq=False)
class _Seat:
    generator: SplitGenerator
    pace: Pace
    heads: TextHeads | None = None
    worth: Worth = field(default_factory=Worth)
    """Whether drafts pay, over all of its texts."""
    states: list[_State] = field(default_factory=list)
    """Most recently used last."""

    def known(self, prompt: Sequence[int]) -> int:
        """Return the length of the longest prefix that a state has read."""
        return max((_common(one.ids, prompt) for one in self.states), default=0)


class _Ends:
    """A stopping criterion that reports each token, and stops on request."""

    def __init__(self, prompt: int, on_token: Callable[[int], bool], wanted: Callable[[], bool]) -> None:
        self._read = prompt
        self._on_token = on_token
        self._wanted = wanted
        self.is_stopped = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        for token in input_ids[0, self._read :].tolist():
            self._read += 1
            if not self.is_stopped:
                self.is_stopped = self._on_token(token)
        ends = self.is_stopped or not self._wanted()
        return torch.full((len(input_ids),), ends, dtype=torch.bool, device=input_ids.device)


class Chats:
    """Generates with the model of ``client``, cut after ``cut``, up to ``seats`` texts at a time. Thread-safe.

    ``exact=False`` lets the server compute steps of several texts together. ``drafts``: for greedy texts without
    penalties, schemas and ``logprobs``, up to ``most_drafted`` tokens are verified in one round trip. Raises SpecError
    for a model without a tokenizer or with two texts, and what `SplitGenerator` and drafts raise.
    """

    def __init__(
        self,
        client: EdgeClient,
        cut: str | Sequence[str],
        *,
        seats: int = 4,
        waiting: int = 64,
        exact: bool = True,
        codec: str | None = None,
        drafts: DraftSource | None = None,
        drafts_ahead: bool = True,
        most_drafted: int = 32,
    ) -> None:
        self._drafts = drafts
        self._drafts_ahead = drafts_ahead
        self.client = client
        self.words = Words.of(client.spec)
        self.grammars = Grammars(self.words.tokenizer)
        model: Any = client.wrapped.model
        self.config = getattr(model, "config", None)
        if getattr(self.config, "is_encoder_decoder", False):
            raise SpecError("a model that encodes one text and decodes another holds no chat")
        self._free: list[_Seat] = []
        self._changed = threading.Condition()
        self._waiting = 0
        self._most_waiting = waiting
        self._closed = False
        self._seats: list[_Seat] = []
        if drafts is not None:
            with Drafting(_with_shared_weights(model), drafts):
                pass  # raises here what it would raise in a request
        copies = [_with_shared_weights(model) for _ in range(seats)]
        self._heads = _shared_heads(copies) if seats > 1 and not exact else None
        for own in copies:
            first = SplitGenerator(client, cut, model=own, answer=LEAST, codec=codec) if not self._seats else None
            cuts = (first or self._seats[0].generator).cuts
            link = SessionLink(client, cuts, exact=exact)
            heads = None if self._heads is None else self._heads.of_text(link)
            chosen = list(cuts) if len(cuts) > 1 else cuts[0]
            made = SplitGenerator(client, chosen, model=own, answer=LEAST, codec=codec, link=link, heads=heads)
            self._seats.append(_Seat(made.__enter__(), Measured(most_drafted), heads))
        self._free.extend(self._seats)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Where the model is cut."""
        return self._seats[0].generator.cuts

    @property
    def most_tokens(self) -> int | None:
        """Maximum tokens of a text, including the prompt; None if the model does not say."""
        most = getattr(self.config, "max_position_embeddings", None)
        return int(most) if most else None

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a text."""
        settings = getattr(self.client.wrapped.model, "generation_config", None)
        found = getattr(settings, "eos_token_id", None)
        own = getattr(self.words.tokenizer, "eos_token_id", None)
        ids = found if isinstance(found, list) else [found]
        return frozenset(one for one in (*ids, own) if isinstance(one, int))

    @property
    def top_k(self) -> int:
        """The model's own default of top_k, 0 for no limit."""
        settings = getattr(self.client.wrapped.model, "generation_config", None)
        return int(getattr(settings, "top_k", None) or 0)

    def write(
        self, task: TextTask, on_token: Callable[[Chosen], bool], wanted: Callable[[], bool] = lambda: True
    ) -> WrittenText:
        """Generate the text that follows ``task.prompt``. ``on_token`` receives each token but those that end it, and
        returns True to stop. ``wanted`` is called at each token.

        Raises InputMismatch for a prompt that is too long, Cancelled if it is no longer wanted, ServerUnavailable if
        too many wait, and what generation raises.
        """
        most = self._room(task)
        seat = self._taken(task.prompt, wanted)
        try:
            return self._written(seat, task, most, on_token, wanted)
        finally:
            self._give_back(seat)

    def embed(self, ids: Sequence[int], wanted: Callable[[], bool] = lambda: True) -> list[float]:
        """Return the mean of a text's last hidden states, normalised to length 1. Raises SpecError if the model has
        none.
        """
        self._check_ids(ids)
        if self.most_tokens is not None and len(ids) > self.most_tokens:
            raise InputMismatch(f"{len(ids)} tokens; the model reads {self.most_tokens} at most")
        seat = self._taken((), wanted)
        try:
            given = torch.tensor([list(ids)], device=self.client.device)
            with torch.no_grad():
                output = seat.generator.model(
                    input_ids=given,
                    attention_mask=torch.ones_like(given),
                    output_hidden_states=True,
                    use_cache=False,
                    return_dict=True,
                )
        finally:
            self._give_back(seat)
        states = getattr(output, "hidden_states", None)
        if not states:
            raise SpecError(f'model "{self.client.model_id}" gives no hidden states, and so no embeddings')
        mean = states[-1][0].float().mean(0)
        made: list[float] = torch.nn.functional.normalize(mean, dim=0).tolist()
        return made

    def close(self) -> None:
        """Accept no more texts, and wait for the current ones."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._free) == len(self._seats), timeout=10)
        for seat in self._seats:
            seat.states.clear()
            seat.generator.__exit__(None, None, None)
        if self._heads is not None:
            self._heads.close()

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise InputMismatch("the prompt has no token")
        known = self.client.wrapped.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        if max(ids) >= known:
            raise InputMismatch(f"token id {max(ids)}; the model knows {known}")

    def _room(self, task: TextTask) -> int:
        self._check_ids(task.prompt)
        room = None if self.most_tokens is None else self.most_tokens - len(task.prompt)
        if room is not None and room < 1:
            raise InputMismatch(f"the prompt has {len(task.prompt)} tokens; prompt and text have {self.most_tokens}")
        if task.most is None:
            return 1024 if room is None else room
        return task.most if room is None else min(task.most, room)

    def _taken(self, prompt: Sequence[int], wanted: Callable[[], bool]) -> _Seat:
        """Take a free copy, with the longest common prefix. Raises ServerUnavailable and Cancelled."""
        with self._changed:
            if self._waiting >= self._most_waiting:
                raise ServerUnavailable(f"{self._waiting} requests wait for their turn: try again later")
            self._waiting += 1
            try:
                while not self._free and not self._closed:
                    self._changed.wait(0.2)
                    if not wanted():
                        raise Cancelled("the request is not wanted any more")
                if self._closed:
                    raise ServerUnavailable("the endpoint is closing")
                best = max(
                    self._free, key=lambda seat: max((_common(one.ids, prompt) for one in seat.states), default=0)
                )
                self._free.remove(best)
                return best
            finally:
                self._waiting -= 1

    def _give_back(self, seat: _Seat) -> None:
        if seat.heads is not None:
            seat.heads.ended()
        with self._changed:
            self._free.append(seat)
            self._changed.notify()

    def _written(
        self, seat: _Seat, task: TextTask, most: int, on_token: Callable[[Chosen], bool], wanted: Callable[[], bool]
    ) -> WrittenText:
        sampling, prompt, ends = task.sampling, list(task.prompt), self.ends
        state, kept = _continued(seat, prompt)
        grammar = self.grammars.of(sampling.grammar) if sampling.grammar else None
        choice = None if sampling.is_plain else SamplingProcessor(sampling, grammar, len(prompt), task.number)
        made: list[int] = []

        def take_token(token: int) -> bool:
            made.append(token)
            reported = Chosen(token) if choice is None else choice.chosen[len(made) - 1]
            return token not in ends and on_token(reported)

        stopping = _Ends(len(prompt), take_token, wanted)
        given = torch.tensor([prompt], device=self.client.device)
        options: dict[str, Any] = {} if state is None else {state_name(): state}
        if self.words.pad is not None:
            options["pad_token_id"] = self.words.pad
        if ends:
            options["eos_token_id"] = sorted(ends)
        try:
            with self._drafting(seat, choice):
                output = seat.generator.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    return_dict_in_generate=True,
                    max_new_tokens=most,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    logits_processor=[] if choice is None else [choice],
                    stopping_criteria=[stopping],
                    **options,
                )
        except BaseException:
            seat.states.clear()  # the server may have lost all of them
            raise
        if not wanted():
            raise Cancelled("the request is not wanted any more")
        _keep(seat, output.sequences[0].tolist(), getattr(output, state_name(), None))
        ended = stopping.is_stopped or bool(made and made[-1] in ends) or (grammar is not None and grammar.is_over)
        ids = tuple(made[:-1] if made and made[-1] in ends else made)
        chosen = tuple(choice.chosen[: len(ids)]) if choice is not None else tuple(map(Chosen, ids))
        summary = seat.generator.summary
        assert summary is not None
        return WrittenText(ids, chosen, "stop" if ended else "length", kept, summary)

    def _drafting(self, seat: _Seat, choice: SamplingProcessor | None) -> AbstractContextManager[Any]:
        """Return the context for drafts. A choice counts tokens one by one, and cannot take any back."""
        if self._drafts is None or choice is not None:
            return nullcontext()
        return Drafting(
            seat.generator.model, self._drafts, pace=seat.pace, ahead=seat.worth if self._drafts_ahead else False
        )


def _shared_heads(models: list[Any]) -> SharedHeads:
    from edge_client.generation.heads import SharedHeads  # imports greenlet, needed only here

    return SharedHeads(models)


def _with_shared_weights(model: Any) -> Any:
    """Return a copy of the model's modules with the same tensors."""
    return copy.deepcopy(model, {id(one): one for one in itertools.chain(model.parameters(), model.buffers())})


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _continued(seat: _Seat, prompt: list[int]) -> tuple[Any, int]:
    """Return a state with the longest known prefix of the prompt, and its length."""
    found = max(seat.states, key=lambda one: _common(one.ids, prompt), default=None)
    if found is None:
        return None, 0
    try:
        read = int(found.state.get_seq_length())
    except (AttributeError, ValueError, TypeError):  # a recurrent state does not count what it has read
        return None, 0
    keep = min(_common(found.ids, prompt), read, len(prompt) - 1)
    if keep < 1 or (keep < read and keep < WORTH_A_FORK):
        return None, 0
    if keep == read:  # the next turn of this text
        seat.states.remove(found)
        return found.state, keep
    try:
        state = copy.deepcopy(found.state)
        state.crop(keep - read)  # negative: so many tokens less
    except (
        AttributeError,
        ValueError,
        NotImplementedError,
        RuntimeError,
        TypeError,
    ):  # a sliding window that has moved on, ...
        return None, 0
    return state, keep


def _keep(seat: _Seat, ids: list[int], state: Any) -> None:
    if state is None:
        return
    seat.states.append(_State(ids, state))
    del seat.states[:-KEPT]

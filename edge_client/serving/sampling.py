"""Sample tokens: penalties, a grammar, temperature, ``top_k`` and ``top_p``, with a generator of its own.

``generate()`` draws from the process's generator, which all threads share, so a seed would have no effect with several
chats. Therefore `SamplingProcessor`, a logits processor, draws itself and leaves the chosen token as the only possible
one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from shared_hooks.errors import InputMismatch, SpecError

MOST_LOGPROBS: Final = 20
NOTHING: Final = float("-inf")
COLDEST: Final = 1e-4
"""Temperature below which sampling is greedy: probabilities would overflow."""


@dataclass(frozen=True)
class Sampling:
    """A request's sampling options. ``temperature`` 0: greedy. ``top_k`` 0 and ``top_p`` 1: no limit.

    ``logprobs``: number of top tokens to report beside the chosen one; None: no report. ``grammar``: in llguidance's
    form, empty for none. ``bias``: by token id, added to the logits.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    grammar: str = ""
    bias: dict[int, float] = field(default_factory=dict)

    @property
    def enough_logits(self) -> int:
        """Number of top logits needed; 0: all."""
        adds = self.presence_penalty or self.frequency_penalty or self.bias or self.grammar
        return 0 if adds or self.logprobs is not None or not self.temperature else max(0, self.top_k)

    @property
    def is_plain(self) -> bool:
        """Whether it is what ``generate()`` does greedily, which needs only the top token back."""
        return not (
            self.temperature
            or self.presence_penalty
            or self.frequency_penalty
            or self.logprobs is not None
            or self.grammar
            or self.bias
        )


@dataclass(frozen=True)
class Chosen:
    """A token, and natural log probabilities before temperature and limits, if requested."""

    id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class SamplingProcessor:
    """A logits processor of transformers for one sequence; `chosen` has its tokens.

    Shapes: ``input_ids`` [1, tokens], ``scores`` [1, words].
    """

    def __init__(self, sampling: Sampling, grammar: Grammar | None, prompt: int, number: int = 0) -> None:
        """``prompt``: its number of tokens, which are exempt from penalties. ``number``: of the choice; each has its
        own seed.
        """
        self.chosen: list[Chosen] = []
        self.enough_logits = sampling.enough_logits
        """Maximum number of logits the server must send (`shared_hooks.generation.asking`)."""
        self._sampling = sampling
        self._grammar = grammar
        self._prompt = prompt
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((sampling.seed + number) % 2**63)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of which one is finite."""
        requested, row = self._sampling, scores[0].float().cpu()
        reported = torch.log_softmax(row, dim=-1) if requested.logprobs is not None else None
        row = self._penalised(row.clone(), input_ids[0, self._prompt :].cpu())
        if self._grammar is not None:
            self._grammar.mask(row)
        token = self._drawn(row)
        if self._grammar is not None:
            self._grammar.take(token)
        self.chosen.append(self._reported(token, reported))
        only = torch.full_like(scores, NOTHING)
        only[0, token] = 0.0
        return only

    def _penalised(self, row: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        requested = self._sampling
        if (requested.presence_penalty or requested.frequency_penalty) and len(written):
            ids, counts = torch.unique(written, return_counts=True)
            row[ids] -= requested.presence_penalty + requested.frequency_penalty * counts
        for token, bias in requested.bias.items():
            if token < len(row):
                row[token] += bias
        return row

    def _drawn(self, row: torch.Tensor) -> int:
        requested = self._sampling
        if requested.temperature < COLDEST:
            return int(row.argmax())
        row = row / requested.temperature
        if 0 < requested.top_k < len(row):
            row[row < torch.topk(row, requested.top_k).values[-1]] = NOTHING
        probabilities = torch.softmax(row, dim=-1)
        if requested.top_p < 1:
            ordered, ids = torch.sort(probabilities, descending=True)
            beyond = torch.cumsum(ordered, 0) - ordered >= requested.top_p
            beyond[0] = False
            probabilities[ids[beyond]] = 0.0
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _reported(self, token: int, reported: torch.Tensor | None) -> Chosen:
        if reported is None:
            return Chosen(token)
        values, ids = torch.topk(reported, min(self._sampling.logprobs or 0, len(reported)))
        likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Chosen(token, float(reported[token]), likeliest)


class Grammars:
    """Grammars over a tokenizer's tokens, with the library llguidance."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._made: Any = None

    def of(self, text: str) -> Grammar:
        """Compile a grammar. Raises SpecError if the library or a transformers tokenizer is missing, InputMismatch if
        invalid.
        """
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise SpecError('schemas and forced tool calls need llguidance: pip install "isthmus[serve]"') from None
        if self._made is None:
            try:
                self._made = llguidance.hf.from_tokenizer(self._tokenizer)
            except Exception as error:
                raise SpecError(f"llguidance cannot use this tokenizer: {error!s:.200}") from error
        return Grammar(llguidance.LLMatcher(self._made, text))


class Grammar:
    """The state of one text in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        if matcher.is_error():
            raise InputMismatch(f"the schema cannot be followed: {matcher.get_error()!s:.300}")

    def mask(self, row: torch.Tensor) -> None:
        """Set the logits of forbidden tokens to minus infinity."""
        allowed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise InputMismatch(f"the schema cannot be followed: {self._matcher.get_error()!s:.300}")
        bits = (allowed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
        known = bits.reshape(-1)[: len(row)].bool()
        if not known.any():
            raise InputMismatch("the schema cannot be followed with the words of this model")
        row[: len(known)][~known] = NOTHING
        row[len(known) :] = NOTHING

    def take(self, token: int) -> None:
        """Advance by a token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())


def grammar_of_schema(schema: Any) -> str:
    """Return a JSON schema as a grammar. Raises InputMismatch if invalid or unsupported."""
    try:
        import llguidance
    except ImportError:
        raise SpecError('schemas and forced tool calls need llguidance: pip install "isthmus[serve]"') from None
    compact: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    try:
        text = str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=compact))
        problem = llguidance.LLMatcher.validate_grammar(text, None)
    except (ValueError, TypeError) as error:
        raise InputMismatch(f"no JSON schema: {error!s:.300}") from error
    if problem:
        raise InputMismatch(f"the schema cannot be followed: {problem!s:.300}")
    return text

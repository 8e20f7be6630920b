"""`Conversation`: turns of a chat, with the model's state kept between them on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edge_client.generation.generator import SplitGenerator
from edge_client.generation.summary import Summary
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.generation import state_name
from shared_hooks.models import ModelSpec
from shared_hooks.showing import short, summary_of

# Text to token ids and back, by the tokenizer that the model's spec names.


Message = Mapping[str, str]
"""{"role": "user", "content": ...}, as chat templates take it."""


class Words:
    """A tokenizer of transformers, or an object with ``encode(text)`` and ``decode(ids)``.

    Raises SpecError for one that cannot do both.
    """

    def __init__(self, tokenizer: Any, where: str = "tokenizer") -> None:
        self.tokenizer = tokenizer
        for name in ("encode", "decode"):
            if not callable(getattr(tokenizer, name, None)):
                raise SpecError(
                    f"{where}: {type(tokenizer).__name__} has no {name}(): it makes no text of ids and back"
                )

    @classmethod
    def of(cls, spec: ModelSpec | None) -> Words:
        """Return the tokenizer of a spec. Raises SpecError if it names none."""
        if spec is None:
            raise SpecError("a client made with a module has no spec, and so no tokenizer")
        tokenizer = spec.load_tokenizer()
        if tokenizer is None:
            raise SpecError(
                f"{spec.origin}: the spec names no tokenizer, so no text can be given to the model, nor read from it"
            )
        return cls(tokenizer, f"{spec.origin}: tokenizer")

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Token ids; ``first``: including what the tokenizer adds at the beginning of a text. Raises InputMismatch."""
        ids = self._encode(text) if first or not _is_of_transformers(self.tokenizer) else self._bare(text)
        if not all(isinstance(one, int) for one in ids):
            raise InputMismatch(f"the tokenizer gives {type(ids[0]).__name__} for token ids")
        return ids

    def _encode(self, text: str) -> list[int]:
        made = self.tokenizer.encode(text)
        return list(getattr(made, "ids", made))  # the tokenizers library returns an object

    def _bare(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        if _is_of_transformers(self.tokenizer):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return str(self.tokenizer.decode(list(ids)))

    @property
    def pad(self) -> int | None:
        """The padding id; the end token's if there is none."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if pad is not None else getattr(self.tokenizer, "eos_token_id", None)

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a chat up to the model's answer. ``tools``: functions that it may call, as templates take them.

        Raises SpecError for a template that fails.
        """
        given: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **given
            )
        except Exception as error:
            raise SpecError(f"the tokenizer's chat template raised {type(error).__name__}: {error}") from error
        return self._bare(text)  # the template already contains the special tokens


class TextStream:
    """A streamer for ``generate()`` (``put``, ``end``): writes text as soon as it is certain.

    A token may be part of a character, and its text may depend on the previous one. So a few tokens are decoded
    together, and their new text is written once it ends in a complete character.
    """

    def __init__(self, words: Words, write: Callable[[str], None]) -> None:
        self.ids: list[int] = []
        self._words = words
        self._write = write
        self._prompt = True
        self._begin = 0
        self._end = 0

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate``: the prompt first, then new tokens."""
        if self._prompt:
            self._prompt = False
            return
        if value.dim() > 1 and len(value) > 1:
            raise SpecError("text of one sequence is written as it comes, not of several")
        self.add(value.reshape(-1).tolist())

    def add(self, ids: Iterable[int]) -> None:
        """Add new tokens."""
        for one in ids:
            self.ids.append(one)
            known = self._words.decode(self.ids[self._begin : self._end])
            text = self._words.decode(self.ids[self._begin :])
            if len(text) > len(known) and not text.endswith("\ufffd"):
                self._write(text[len(known) :])
                self._begin, self._end = self._end, len(self.ids)

    def end(self) -> None:
        """Called by ``generate`` at the end: writes the remaining text."""
        known = self._words.decode(self.ids[self._begin : self._end])
        text = self._words.decode(self.ids[self._begin :])
        if len(text) > len(known):
            self._write(text[len(known) :])
        self._begin = self._end = len(self.ids)


def _is_of_transformers(tokenizer: Any) -> bool:
    return callable(getattr(tokenizer, "apply_chat_template", None))


@short
@dataclass(frozen=True, slots=True)
class Turn:
    """An answer. ``read``: the tokens of the prompt that the model has processed; its state contained those before
    them.
    """

    text: str
    read: int
    kept: int
    summary: Summary


class Conversation:
    """Turns of one chat.

        with SplitGenerator(client, "model.layers.3") as generator:
            chat = Conversation(generator, Words.of(client.spec), max_new_tokens=64)
            print(chat.say("Hello").text)

    A turn processes only new tokens: keys and values of earlier ones stay where they were computed. The tokenizer's
    chat template formats the turns; without one they follow each other, one per line. ``options`` are passed to every
    `SplitGenerator.generate`, which must be in its ``with`` block. Raises SpecError for an encoder-decoder.
    """

    def __init__(self, generator: SplitGenerator, words: Words, *, system: str = "", **options: Any) -> None:
        if getattr(getattr(generator.model, "config", None), "is_encoder_decoder", False):
            raise SpecError("a model that encodes one text and decodes another has no turns: use generate")
        if drafts := [name for name in ("prompt_lookup_num_tokens", "assistant_model") if options.get(name)]:
            raise SpecError(
                f"{drafts[0]}: transformers would read the whole conversation again, into a state that has it; "
                "drafts of a chat are made in a block of edge_client.generation.drafting.Drafting"
            )
        self.generator = generator
        self.words = words
        self.turns: list[Turn] = []
        self._system = system
        self._options = options
        self._ids: list[int] = []
        self._state: Any = None
        self._messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.turns.clear()
        self._ids, self._state = [], None
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str, write: Callable[[str], None] | None = None) -> Turn:
        """Return the answer to ``text``. ``write`` is called with each piece of it as it comes.

        Raises as `generate`; then the turn is dropped, and the next one processes everything again.
        """
        ids = self._prompt(text)
        state, kept = self._kept(ids)
        given = torch.tensor([ids], device=self.generator.client.device)
        options = dict(self._options)
        if state is not None:
            options[state_name()] = state
        if write is not None:
            options["streamer"] = TextStream(self.words, write)
        if self.words.pad is not None:
            options.setdefault("pad_token_id", self.words.pad)
        try:
            output = self.generator.generate(
                given, attention_mask=torch.ones_like(given), return_dict_in_generate=True, **options
            )
        except BaseException:
            self._state = None  # how far it got is unknown
            raise
        self._state = getattr(output, state_name(), None)
        self._ids = output.sequences[0].tolist()
        answer = self.words.decode(self._ids[len(ids) :])
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        summary = self.generator.summary
        assert summary is not None
        turn = Turn(answer, len(ids) - kept, kept, summary)
        self.turns.append(turn)
        return turn

    def __repr__(self) -> str:
        return summary_of(self, f"{len(self.turns)} turns", f"{len(self._ids)} tokens")

    def _prompt(self, text: str) -> list[int]:
        """Token ids of all turns and the new one."""
        if self.words.has_template:
            return self.words.chat([*self._messages, {"role": "user", "content": text}])
        if self._ids:
            return [*self._ids, *self.words.encode(f"\n{text}\n", first=False)]
        return self.words.encode(f"{self._system}\n{text}\n" if self._system else f"{text}\n")

    def _kept(self, ids: Sequence[int]) -> tuple[Any, int]:
        """Return the state of the longest prefix that ``ids`` share with what the model has processed, and its
        length.
        """
        state = self._state
        if state is None:
            return None, 0
        try:
            read = state.get_seq_length()
        except (AttributeError, ValueError):  # a recurrent state does not count what it has read
            return None, 0
        same = next((at for at, (a, b) in enumerate(zip(self._ids, ids, strict=False)) if a != b), len(self._ids))
        keep = min(same, read, len(ids) - 1)
        if keep <= 0:
            return None, 0
        if keep < read:  # a template may render an earlier turn differently later
            try:
                state.crop(keep - read)  # negative: so many tokens less
            # a sliding window that has moved on, ...
            except (AttributeError, ValueError, NotImplementedError, RuntimeError):
                return None, 0
        return state, keep

"""Text to token ids and back, by whatever the model's spec names as its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import ModelSpec

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
        """The words of a spec. Raises SpecError where it names none."""
        if spec is None:
            raise SpecError("a client made with a module has no spec, and so no tokenizer")
        tokenizer = spec.load_tokenizer()
        if tokenizer is None:
            raise SpecError(
                f"{spec.origin}: the spec names no tokenizer, so no text can be given to the model, nor read from it"
            )
        return cls(tokenizer, f"{spec.origin}: tokenizer")

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Token ids; ``first``: with what the tokenizer puts at a text's beginning. Raises InputMismatch."""
        ids = self._encode(text) if first or not _is_of_transformers(self.tokenizer) else self._bare(text)
        if not all(isinstance(one, int) for one in ids):
            raise InputMismatch(f"the tokenizer gives {type(ids[0]).__name__} for token ids")
        return ids

    def _encode(self, text: str) -> list[int]:
        made = self.tokenizer.encode(text)
        return list(getattr(made, "ids", made))  # the library tokenizers gives an object

    def _bare(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        if _is_of_transformers(self.tokenizer):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return str(self.tokenizer.decode(list(ids)))

    @property
    def pad(self) -> int | None:
        """The id that fills rows; the end's where there is no other."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if pad is not None else getattr(self.tokenizer, "eos_token_id", None)

    @property
    def has_template(self) -> bool:
        """Whether it knows how a chat is written."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat up to where the model answers. Raises SpecError for a template that fails."""
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise SpecError(f"the tokenizer's chat template raised {type(error).__name__}: {error}") from error
        return self._bare(text)  # the template has written the special tokens


class TextStream:
    """A streamer for ``generate()`` (``put``, ``end``): writes text as soon as it is certain.

    A token may be half a character, and what one looks like may hang on the one before it. So a few tokens are decoded
    together, and what they say beyond those already written is written once it ends in a whole character.
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
        """New tokens."""
        for one in ids:
            self.ids.append(one)
            known = self._words.decode(self.ids[self._begin : self._end])
            text = self._words.decode(self.ids[self._begin :])
            if len(text) > len(known) and not text.endswith("\ufffd"):
                self._write(text[len(known) :])
                self._begin, self._end = self._end, len(self.ids)

    def end(self) -> None:
        """Called by ``generate``: what was held back."""
        known = self._words.decode(self.ids[self._begin : self._end])
        text = self._words.decode(self.ids[self._begin :])
        if len(text) > len(known):
            self._write(text[len(known) :])
        self._begin = self._end = len(self.ids)


def _is_of_transformers(tokenizer: Any) -> bool:
    return callable(getattr(tokenizer, "apply_chat_template", None))

"""Ids of tokens as text, each by itself. A tokenizer is anybody's code: what it raises costs the text alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

REMEMBERED: Final = 1 << 16
"""Ids whose text is kept."""
LONGEST: Final = 200
"""Characters of one token's text."""


class Texts:
    """``tokenizer``: has ``decode([id])``, or ``convert_ids_to_tokens([id])``. Threads are served one at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # fast tokenizers are not for several threads
        self._text = lru_cache(REMEMBERED)(self._decoded)

    def of(self, ids: Sequence[int]) -> tuple[tuple[str, ...], str]:
        """The text of each id; or none at all, and why."""
        number = -1
        try:
            with self._lock:
                return tuple([self._text(number := one) for one in ids]), ""
        except Exception as error:
            return (), f"the tokenizer has no text for id {number}: {type(error).__name__}: {error}"[:300]

    def _decoded(self, number: int) -> str:
        decode = getattr(self._tokenizer, "decode", None)
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        text = decode([number]) if callable(decode) else None
        if not text and callable(convert):  # some decode what they do not know to nothing
            token = convert([number])[0]
            if token is None:
                raise LookupError("it is not in the vocabulary")
            text = token if text is None else text
        if not isinstance(text, str):
            raise TypeError(f"it gave {type(text).__name__}")
        return text[:LONGEST]

"""`Conversation`: turns of a chat, with the model's state kept between them on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edge_client.generation.generator import SplitGenerator
from edge_client.generation.summary import Summary
from edge_client.generation.words import Message, TextStream, Words
from shared_hooks.errors import SpecError
from shared_hooks.showing import short, summary_of


@short
@dataclass(frozen=True, slots=True)
class Turn:
    """An answer. ``read``: tokens of the prompt that went through the model; those before them were in its state."""

    text: str
    read: int
    kept: int
    summary: Summary


class Conversation:
    """Turns of one chat.

        with SplitGenerator(client, "model.layers.3") as generator:
            chat = Conversation(generator, Words.of(client.spec), max_new_tokens=64)
            print(chat.say("Hello").text)

    A turn reads only what is new: keys and values of the earlier ones stay where they were made. Where the tokenizer
    has a chat template the turns are written by it, else one after the other, a line each. ``options`` go to every
    `SplitGenerator.generate`, which must be in its ``with`` block. Raises SpecError for an encoder-decoder.
    """

    def __init__(self, generator: SplitGenerator, words: Words, *, system: str = "", **options: Any) -> None:
        if getattr(getattr(generator.model, "config", None), "is_encoder_decoder", False):
            raise SpecError("a model that encodes one text and decodes another has no turns: use generate")
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
        """Nothing was said."""
        self.turns.clear()
        self._ids, self._state = [], None
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str, write: Callable[[str], None] | None = None) -> Turn:
        """The answer to ``text``. ``write`` gets it piece by piece while it comes.

        Raises as `generate`; the turn then was not, and the next one reads everything again.
        """
        ids = self._prompt(text)
        state, kept = self._kept(ids)
        given = torch.tensor([ids], device=self.generator.client.device)
        options = dict(self._options)
        if state is not None:
            options["past_key_values"] = state
        if write is not None:
            options["streamer"] = TextStream(self.words, write)
        if self.words.pad is not None:
            options.setdefault("pad_token_id", self.words.pad)
        try:
            output = self.generator.generate(
                given, attention_mask=torch.ones_like(given), return_dict_in_generate=True, **options
            )
        except BaseException:
            self._state = None  # nobody knows how far it came
            raise
        self._state = getattr(output, "past_key_values", None)
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
        """The state of the longest beginning that ``ids`` share with what the model has read, and its length."""
        state = self._state
        if state is None:
            return None, 0
        try:
            read = state.get_seq_length()
        except (AttributeError, ValueError):  # a recurrent state does not know how much it has read
            return None, 0
        same = next((at for at, (a, b) in enumerate(zip(self._ids, ids, strict=False)) if a != b), len(self._ids))
        keep = min(same, read, len(ids) - 1)
        if keep <= 0:
            return None, 0
        if keep < read:  # a template may write an earlier turn otherwise than it was
            try:
                state.crop(keep - read)  # below 0: so many less
            except (AttributeError, ValueError, NotImplementedError, RuntimeError):  # a window that has moved on, ...
                return None, 0
        return state, keep

"""Sampling by the tail, as ``generate()`` samples: transformers' own processors, softmax, ``torch.multinomial``.

The edge sends the state of torch's generator once. It then draws from logits in which one word alone is possible: that
gives this word, and takes as many random numbers as the tail took. So both generators go on alike, and what the edge
finds afterwards is as if it had sampled by itself. After each step the tail tells a digest of its generator's state;
where the edge's own differs (somebody else drew from it), it sends the state again.

Who samples knows the words: with this the server knows the answer, where otherwise it knows how likely each word was.
It can be sampled on the CPU alone, because other devices have generators of their own.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import torch

from shared_hooks.crossing import torch_generator
from shared_hooks.errors import MALFORMED, BadFrame, CutRefused

Processors = tuple[tuple[Any, ...], ...]
PROCESSORS: dict[str, tuple[str, ...]] = {
    "TemperatureLogitsWarper": ("temperature",),
    "TopKLogitsWarper": ("top_k",),
    "TopPLogitsWarper": ("top_p", "min_tokens_to_keep"),
    "MinPLogitsWarper": ("min_p", "min_tokens_to_keep"),
}
"""Classes of transformers that look at the scores alone, and the numbers that they are made of."""
MOST_PROCESSORS = 16


def described(processors: Any) -> Processors | None:
    """Processors as their classes' names and numbers; None where one is of another kind."""
    found = []
    for one in processors:
        cls = type(one)
        if not is_own(cls) or cls.__name__ not in PROCESSORS or getattr(one, "filter_value", _LOWEST) != _LOWEST:
            return None
        numbers = [getattr(one, name) for name in PROCESSORS[cls.__name__]]
        if any(type(number) not in (int, float) for number in numbers):
            return None
        found.append((cls.__name__, *numbers))
    return tuple(found)


_LOWEST = float("-inf")


def is_own(cls: type) -> bool:
    """Whether it is one of transformers' processors and no class of that name or kind from elsewhere."""
    return cls.__module__ == "transformers.generation.logits_process"


def state_now() -> bytes:
    """The state of torch's CPU generator."""
    return torch.get_rng_state().numpy().tobytes()


def digest(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=8).hexdigest()


def written(state: bytes) -> str:
    """For JSON."""
    return base64.b64encode(state).decode()


class Sampler:
    """The tail's side: draws by the generator whose state the edge sent, and keeps the state after it."""

    def __init__(self, state: bytes | None = None) -> None:
        self.state = state
        self.drawn = False
        """Whether a step just done has drawn."""

    def take(self, reported: Any) -> None:
        """The edge's state. Raises BadFrame."""
        try:
            self.state = base64.b64decode(reported, validate=True)
            torch_generator(self.state)
        except (*MALFORMED, RuntimeError) as error:
            raise BadFrame(f"no state of a generator: {error!s:.120}") from error

    def draw(self, processors: Any, scores: torch.Tensor) -> torch.Tensor:
        """A word for each row of scores (rows, words). Raises BadFrame, CutRefused without transformers here."""
        if self.state is None:
            raise BadFrame("a word is to be drawn, and no state of a generator was sent")
        for one in _made(processors):
            scores = one(None, scores)
        generator = torch_generator(self.state)
        found = torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), 1, generator=generator)
        self.state, self.drawn = generator.get_state().numpy().tobytes(), True
        return found.squeeze(1)

    def copied(self) -> Sampler:
        """For a step that may fail."""
        return Sampler(self.state)


def _made(reported: Any) -> list[Any]:
    try:
        from transformers.generation import logits_process
    except ImportError as error:
        raise CutRefused(f"this side cannot sample: {error}") from error
    if not isinstance(reported, list) or len(reported) > MOST_PROCESSORS:
        raise BadFrame(f"no such processors: {reported!r:.60}")
    made = []
    for one in reported:
        name, *numbers = one if isinstance(one, list) and one and isinstance(one[0], str) else [""]
        names = PROCESSORS.get(name, ())
        if not names or len(names) != len(numbers) or any(type(number) not in (int, float) for number in numbers):
            raise BadFrame(f"no such processor: {one!r:.60}")
        try:
            made.append(getattr(logits_process, name)(**dict(zip(names, numbers, strict=True))))
        except MALFORMED as error:
            raise BadFrame(f"{name}: {error!s:.160}") from error
    return made

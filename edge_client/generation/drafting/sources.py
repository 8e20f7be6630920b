"""Where drafts come from. Each is one of transformers' own; a source says how it is asked for, and for how much."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from shared_hooks.errors import CutRefused, UnknownLayer
from shared_hooks.modules import attach, running

# The first layers of a model with its own norm and output head, as a model that drafts.
#
# Every architecture's own code runs: behind the last layer that is wanted, the rest of the blocks in its list pass on
# what that one gave. So the model's own final norm and output head see the hidden state of an early layer.

_OURS = ("forward", "generate", "_get_logits_processor", "_get_candidate_generator")


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
    """Of states: a window's length is one without dimensions."""
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

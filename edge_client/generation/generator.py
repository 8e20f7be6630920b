"""`SplitGenerator`: ``generate()`` of transformers with the first layers here and the rest at a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from edge_client.client import EdgeClient
from edge_client.generation.clock import Clock, criteria_with, prompt_length
from edge_client.generation.cuts import check_cut
from edge_client.generation.link import SessionLink
from edge_client.generation.summary import Summary
from edge_client.modes import AUTO
from shared_hooks.errors import Disagreement, SpecError
from shared_hooks.generation import Link, SplitForward, StepRecord
from shared_hooks.generation.split import HISTORY_BYTES
from shared_hooks.generation.wanted import Answer
from shared_hooks.modules import weights_hash
from shared_hooks.showing import told


class SplitGenerator:
    """Generates with the model of ``client``, cut after the module ``cut`` (its path, such as "model.layers.3").

        with EdgeClient(server, spec) as client, SplitGenerator(client, "model.layers.3") as generator:
            ids = generator.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=64)
            print(generator.summary)

    The tokens are those that ``model.generate`` gives without a cut, for the same arguments. Within a ``with`` block
    states live on from call to call (``past_key_values`` of an answer may be given to the next call); without one,
    every `generate` is by itself. One `generate` at a time.

    ``model``: a module of the same weights in place of the client's own, such as one made by ``from_pretrained``.
    ``answer``: what comes back of the logits of a step: None for all, ``("least",)`` for as little as each `generate`
    needs; `SplitForward` says what else there is, and what is too little raises CutRefused. ``history_bytes``: how much
    of what it has sent a session keeps, to be made again when the server has lost it. ``exact=False`` allows the
    server to compute steps together with those of other clients, whose last bits then differ. ``codec``: "int8",
    "int6", "int5" or "int4" send hidden states with so many bits a number, a loss. ``link``: in place of the
    client's connection.

    ``cut="auto"`` measures both sides and the link for some seconds, through the client: the block after which a token
    is there soonest (`edge_client.plan_generation` tells more). `cut` then says which.

    Raises UnknownLayer with near names, CutRefused, Disagreement for a model of other weights, and SpecError for one
    without ``generate`` and for an unknown codec.
    """

    def __init__(
        self,
        client: EdgeClient,
        cut: str,
        *,
        model: nn.Module | None = None,
        answer: Answer = None,
        history_bytes: int = HISTORY_BYTES,
        exact: bool = True,
        codec: str | None = None,
        link: Link | None = None,
    ) -> None:
        self.client = client
        self.model: Any = _model_of(client, model)
        self.cut = check_cut(self.model, _best(client, self.model, answer) if cut == AUTO else cut)
        link = SessionLink(client, self.cut, exact=exact) if link is None else link
        own = client.wrapped if self.model is client.wrapped.model else None  # whose observers look at the heads, too
        self._forward = SplitForward(
            self.model,
            self.cut,
            link,
            answer=answer,
            history_bytes=history_bytes,
            modules=None if own is None else own.modules,
            codec=codec,
        )
        self._one = threading.RLock()
        self._inside = 0
        self._summary: Summary | None = None

    @property
    def records(self) -> list[StepRecord]:
        """What every step of the last `generate` took."""
        return list(self._forward.records)

    @property
    def summary(self) -> Summary | None:
        """What the last `generate` took; None before the first one has ended."""
        return self._summary

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As ``model.generate``: all of its arguments, and what it returns.

        Raises what that raises, and what requests raise: DeadlineExceeded, ServerUnavailable, CutRefused, ...
        """
        with self._one, self:
            clock = Clock()
            if _is_of_transformers(self.model):
                kwargs["stopping_criteria"] = criteria_with(clock, kwargs.get("stopping_criteria"))
            self._forward.records.clear()
            output = self.model.generate(*args, **kwargs)
            ended = time.perf_counter_ns()
            sequences = output if isinstance(output, torch.Tensor) else getattr(output, "sequences", None)
            self._summary = Summary.of(
                self._forward.records,
                rows=len(sequences) if isinstance(sequences, torch.Tensor) else 1,
                tokens=clock.length - prompt_length(self.model, args, kwargs, clock),
                total_ns=ended - clock.began,
                first_token_ns=None if clock.first is None else clock.first - clock.began,
            )
            return output

    def __enter__(self) -> SplitGenerator:
        with self._one:
            self._forward.attach()
            self._inside += 1
            return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._one:
            self._inside -= 1
            if not self._inside:
                self._forward.detach()

    def __repr__(self) -> str:
        last = self._summary
        return told(self, f"model={self.client.model_id}", f"cut={self.cut!r}", "" if last is None else last.line)


@contextmanager
def split_model(
    model: nn.Module | None, client: EdgeClient, cut: str, *, answer: Answer = None, codec: str | None = None
) -> Iterator[Any]:
    """``model`` (None: the client's own) with its ``forward`` split as long as the block runs.

        with split_model(model, client, "model.layers.3"):
            ids = model.generate(**inputs)

    Whatever calls the model step by step is split: ``generate``, a pipeline of transformers, a loop of one's own.
    Arguments and errors: `SplitGenerator`.
    """
    with SplitGenerator(client, cut, model=model, answer=answer, codec=codec) as generator:
        yield generator.model


def _model_of(client: EdgeClient, model: nn.Module | None) -> nn.Module:
    own = client.wrapped.model
    if model is None:
        model = own
    elif not isinstance(model, nn.Module):
        raise SpecError(f"model: expected a module or None, found {type(model).__name__}")
    elif model is not own and weights_hash(model) != client.wrapped.weights_hash():
        raise Disagreement(f'the model given has other weights than "{client.model_id}", which the client agreed on')
    if not callable(getattr(model, "generate", None)):
        raise SpecError(
            f'model "{client.model_id}" ({type(model).__name__}) has no generate(): models of transformers that write '
            "text have one"
        )
    return model


def _best(client: EdgeClient, model: nn.Module, answer: Answer) -> str:
    """The cut that a plan chooses. Raises what plans raise."""
    from edge_client.planning.generation.workload import Workload  # few ask for it, and it loads what measures
    from edge_client.survey.generation import best_generation_cut

    short = answer is not None and answer[0] != "top"
    return best_generation_cut(client, Workload(answer=("token",) if short else answer), model=model)


def _is_of_transformers(model: nn.Module) -> bool:
    """Whether its ``generate`` takes stopping criteria."""
    return any(one.__module__.startswith("transformers.") and "generate" in vars(one) for one in type(model).__mro__)

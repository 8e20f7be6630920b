"""`SplitGenerator`: transformers' ``generate()`` with the first layers here and the rest at a server."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

import torch
from torch import nn

from edge_client.core import ClientCore
from edge_client.generation.link import SessionLink
from edge_client.generation.summary import Clock, Summary, criteria_with, prompt_length
from edge_client.user_text import AUTO, WORDS
from shared_hooks.errors import CutRefused, Disagreement, SpecError, UnknownLayer, near
from shared_hooks.generation import EdgeLink, SplitForward, StepRecord
from shared_hooks.generation.cut import GenerationCut, check_order
from shared_hooks.generation.results import Answer
from shared_hooks.generation.split import HISTORY_BYTES, HeadRunner
from shared_hooks.modules import GROUP, call_parts, groups_of, weights_hash
from shared_hooks.showing import summary_of

# The module after which a generation is cut, where the user names it.

TOWERS: Final = ("vision", "audio", "fusion")
"""Groups of modules (`shared_hooks.modules.tables`) whose results are inputs of a language model."""
MOST: Final = 3
"""The number of lists of blocks in a message."""
NEAR: Final = 0.6
"""The similarity from which a name is suggested."""


def check_cut(model: nn.Module, cut: object) -> str:
    """``cut``, a module's path (``#n`` for its n-th call), if a generation can be cut there according to its name; for
    "group:vision" and the like the result of `group_cut`.

    Raises SpecError for what is no name, UnknownLayer with similar names, CutRefused for words that mean no module.
    """
    if not isinstance(cut, str) or not cut:
        raise SpecError(f"a generation is cut after a module, by its path; found {cut!r:.60}.{_listed_blocks(model)}")
    if cut in (*WORDS, "input"):
        raise CutRefused(
            f'"{cut}" is no cut of a generation: the token ids stay here, and a module behind them gives what crosses.'
            f"{_listed_blocks(model)}"
        )
    if cut.startswith(GROUP):
        return group_cut(model, cut.removeprefix(GROUP))
    known = {path for path, module in model.named_modules() if path and not isinstance(module, _LISTS)}
    path = call_parts(cut)[0]
    if path not in known and path not in dict(model.named_modules()):  # for lists the engine's message has more detail
        found = near(path, known, NEAR)
        raise UnknownLayer(f'no layer "{cut}".{found or _listed_blocks(model)}')
    return cut


def check_cuts(model: nn.Module, cut: object, servers: int) -> tuple[str, ...]:
    """Return the cuts, checked by `check_cut`: as many as servers, and one without a server. Raises SpecError for
    another number, and CutRefused if a part cannot follow the previous one.
    """
    cuts = tuple(cut) if isinstance(cut, (list, tuple)) else (cut,)
    if len(cuts) != max(1, servers):
        number = f"{servers} servers" if servers > 1 else "one server"
        raise SpecError(f"cut={cut!r:.200}: {len(cuts)} for {number}: a chain has one for each, where its part begins")
    checked = tuple(check_cut(model, one) for one in cuts)
    for first, second in itertools.pairwise(GenerationCut.of(model, one) for one in checked if len(checked) > 1):
        check_order(first, second)
    return checked


def group_cut(model: nn.Module, group: str) -> str:
    """Return the cut that leaves a group of modules ("vision", "audio", "fusion") here and the language model there:
    after the first block of the language model, because before it the tokens themselves would cross.

    Raises UnknownLayer for a group that the model does not have, CutRefused for one that does not precede the language
    model.
    """
    found = groups_of(model)
    if group not in found:
        has = ", ".join(found) or "none"
        raise UnknownLayer(f'the model has no group "{group}" (it has: {has}).{_listed_blocks(model)}')
    if group not in TOWERS:
        raise CutRefused(f'"{GROUP}{group}" is not before the language model: {", ".join(TOWERS)} are')
    before = {path for tower in TOWERS for path in found.get(tower, ())}
    lists = [path for path, _ in blocks(model) if path not in before]
    if not lists:
        raise CutRefused(f"the model has no list of blocks behind its {group}: name the module to cut after")
    return f"{lists[0]}.0"


def blocks(model: nn.Module) -> list[tuple[str, int]]:
    """(path, length) of the lists of blocks in the model, the one with most parameters first."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and len({type(one) for one in module}) == 1:
            size = sum(parameter.numel() for parameter in module.parameters())
            found.append((size, path, len(module)))
    found = [one for one in found if not any(one[1].startswith(f"{other[1]}.") for other in found)]
    return [(path, count) for _, path, count in sorted(found, key=lambda one: -one[0])]


_LISTS: Final = (nn.ModuleList, nn.ModuleDict)


def _listed_blocks(model: nn.Module) -> str:
    """Return the existing names, for the end of a message."""
    reported = [f"{path}.0 to {path}.{count - 1}" for path, count in blocks(model)[:MOST]]
    return f" Its blocks are {', '.join(reported)}." if reported else ""


class SplitGenerator:
    """Generates with the model of ``client``, cut after the module ``cut`` (its path, such as "model.layers.3").

        with EdgeClient(server, spec) as client, SplitGenerator(client, "model.layers.3") as generator:
            ids = generator.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=64)
            print(generator.summary)

    The tokens equal those of ``model.generate`` without a cut, for the same arguments. Within a ``with`` block states
    persist from call to call (``past_key_values`` of an answer may be passed to the next call); without one, every
    `generate` is independent. One `generate` at a time.

    ``model``: a module with the same weights instead of the client's own, such as one created by ``from_pretrained``.
    ``answer``: what of a step's logits comes back: None for all, ``("least",)`` for as little as each `generate` needs;
    other values: see `SplitForward`. Too little raises CutRefused. ``history_bytes``: how much of what it has sent a
    session keeps, to be rebuilt if the server has lost it. ``exact=False`` allows the server to compute steps together
    with those of other clients, whose last bits then differ. ``codec``: "int8", "int6", "int5" or "int4" sends hidden
    states with that many bits per number, which is lossy. ``link``: instead of the client's connection. ``heads``: runs
    the heads of steps with others (`edge_client.generation.heads`).

    Along a chain of servers ``cut`` is a list, with one for each server: where its part begins (docs/chains.md).

    ``cut="auto"`` measures both sides and the link for some seconds, through the client, and takes the block with the
    least time per token (`edge_client.plan_generation` shows more). `cut` then is its name.

    Raises UnknownLayer with similar names, CutRefused, Disagreement for a model with other weights, and SpecError for
    one without ``generate`` and for an unknown codec.
    """

    def __init__(
        self,
        client: ClientCore,
        cut: str | Sequence[str],
        *,
        model: nn.Module | None = None,
        answer: Answer = None,
        history_bytes: int = HISTORY_BYTES,
        exact: bool = True,
        codec: str | None = None,
        link: EdgeLink | None = None,
        heads: HeadRunner | None = None,
    ) -> None:
        self.client = client
        self.model: Any = _model_of(client, model)
        if cut == AUTO and len(client.chain) > 1:
            raise SpecError('cut="auto" is for one server; a chain wants a list of blocks, one for each')
        self.cuts = check_cuts(self.model, _best(client, self.model, answer) if cut == AUTO else cut, len(client.chain))
        """Where each part of the model begins: the first server's, and for a chain those after it."""
        self.cut = self.cuts[0]
        link = SessionLink(client, self.cuts, exact=exact) if link is None else link
        own = client.wrapped if self.model is client.wrapped.model else None  # its observers watch the heads, too
        self._forward = SplitForward(
            self.model,
            self.cut,
            link,
            answer=answer,
            history_bytes=history_bytes,
            modules=None if own is None else own.modules,
            codec=codec,
            heads=heads,
        )
        self._one = threading.RLock()
        self._inside = 0
        self._summary: Summary | None = None

    @property
    def records(self) -> list[StepRecord]:
        """The records of every step of the last `generate`."""
        return list(self._forward.records)

    @property
    def summary(self) -> Summary | None:
        """A summary of the last `generate`; None before the first one has ended."""
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
        return summary_of(
            self, f"model={self.client.model_id}", f"cut={', '.join(self.cuts)!r}", "" if last is None else last.line
        )


@contextmanager
def split_model(
    model: nn.Module | None,
    client: ClientCore,
    cut: str | Sequence[str],
    *,
    answer: Answer = None,
    codec: str | None = None,
) -> Iterator[Any]:
    """``model`` (None: the client's own) with its ``forward`` split in the block.

        with split_model(model, client, "model.layers.3"):
            ids = model.generate(**inputs)

    Whatever calls the model step by step is split: ``generate``, a pipeline of transformers, your own loop. Arguments
    and errors: `SplitGenerator`.
    """
    with SplitGenerator(client, cut, model=model, answer=answer, codec=codec) as generator:
        yield generator.model


def _model_of(client: ClientCore, model: nn.Module | None) -> nn.Module:
    client.check_unchanged()
    own = client.wrapped.model
    if model is None:
        model = own
    elif not isinstance(model, nn.Module):
        raise SpecError(f"model: expected a module or None, found {type(model).__name__}")
    elif not _shares(model, own) and weights_hash(model) != client.wrapped.weights_hash():
        raise Disagreement(f'the model given has other weights than "{client.model_id}", which the client agreed on')
    elif others := client.wrapped.other_numbers(model):
        raise Disagreement(f'{others[0]} of the model given has another value than in "{client.model_id}"')
    if not callable(getattr(model, "generate", None)):
        raise SpecError(
            f'model "{client.model_id}" ({type(model).__name__}) has no generate(): models of transformers that write '
            "text have one"
        )
    return model


def _shares(model: nn.Module, other: nn.Module) -> bool:
    """Return whether both have the same tensors in memory under the same names, so that no hash is needed."""
    mine, theirs = ({name: id(one) for name, one in each.state_dict(keep_vars=True).items()} for each in (model, other))
    return mine == theirs


def _best(client: ClientCore, model: nn.Module, answer: Answer) -> str:
    """Return the cut that a plan chooses. Raises the errors of planning."""
    from edge_client.generation.survey import best_generation_cut
    from edge_client.planning.generation import Workload  # rarely used, and it imports what measures

    short = answer is not None and answer[0] != "top"
    return best_generation_cut(client, Workload(answer=("token",) if short else answer), model=model)


def _is_of_transformers(model: nn.Module) -> bool:
    """Return whether its ``generate`` accepts stopping criteria."""
    return any(one.__module__.startswith("transformers.") and "generate" in vars(one) for one in type(model).__mro__)

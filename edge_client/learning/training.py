"""Train an encoder and a decoder for what crosses a cut, so that the model's answers are preserved.

The model's weights do not change, and no labels are needed: the answers on the uncoded pieces are the target. Symbols
are rounded with a straight-through gradient; their expected bits, by a distribution learnt with them, are part of the
loss.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from edge_client.learning.examples import Examples, frozen
from shared_hooks import devices
from shared_hooks.codecs import Grain
from shared_hooks.codecs.learned import Bottleneck, Design, Piece, SymbolCoder, flat_of, rows_of

LEAST_ELEMENTS: Final = 16
"""A smaller piece is sent as it is."""
_FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PATIENCE: Final = 10
"""Epochs without a smaller validation loss after which training stops; at least a quarter of all epochs."""
_LEVELS: Final = 4
_RATE: Final = 0.01
"""Weight of a bit per symbol in the loss."""
_FEATURES: Final = 0.05
"""Weight of the pieces' own distance in the loss."""


@dataclass(frozen=True)
class TrainingTerms:
    """How an encoder is trained."""

    epochs: int = 60
    rate: float = 3e-3
    seed: int = 0
    classes: bool = False
    """Whether the first output is class scores, whose distribution is to be preserved."""


def ladder(examples: Examples, least: float = 2.0) -> list[tuple[Design | None, ...]]:
    """Return designs for all pieces of a cut, from few bytes to many: each with about twice as many symbols as the one
    before, up to two bits for each number that crosses.
    """
    forms = [_form(examples, number) for number in range(len(examples.pieces))]
    total = sum(grain.elements for grain, form in zip(examples.grains, forms, strict=True) if form is not None)
    found: list[tuple[Design | None, ...]] = []
    nbytes = least
    while total and nbytes <= total / 4:
        designs = tuple(
            None if form is None else _design(form, 8 * nbytes * grain.elements / total)
            for grain, form in zip(examples.grains, forms, strict=True)
        )
        if designs not in found:
            found.append(designs)
        nbytes *= 2
    return found


@dataclass(frozen=True)
class _Form:
    """A piece of one input: ``rows`` of tokens, or a map of ``size``."""

    kind: str
    channels: int
    rows: int
    size: tuple[int, int]
    positive: bool


def _form(examples: Examples, number: int) -> _Form | None:
    piece, grain = examples.pieces[number], examples.grains[number]
    if piece.dtype not in _FLOATS or grain.elements < LEAST_ELEMENTS or not bool(torch.isfinite(piece).all()):
        return None
    positive = bool(piece.min() >= 0)
    if not grain.is_map:
        return _Form("tokens", grain.channels, grain.outer * grain.inner, (1, 1), positive)
    height, width = grain.inner // grain.width, grain.width
    if grain.inner == 1 and grain.outer > 1:  # channels last: only the mark has the map's size
        return None
    return _Form("map", grain.channels, grain.outer, (height, width), positive)


def _design(form: _Form, bits: float) -> Design:
    """Return a design whose symbols take about ``bits`` before entropy coding."""
    each = math.log2(_LEVELS)
    hidden = min(max(32, form.channels), 64, max(16, 4 * form.channels))
    if form.kind == "tokens":
        symbols = max(1, min(form.channels, round(bits / each / form.rows)))
        return Design("tokens", form.channels, min(max(16, form.channels), 4 * form.channels, 256), 0, symbols, _LEVELS)
    halvings = 0
    while min(form.size) >> halvings + 1 >= 2 and halvings < 3 and bits / each < 4 * _positions(form, halvings):
        halvings += 1
    most = form.channels << 2 * halvings
    symbols = max(1, min(most, round(bits / each / _positions(form, halvings))))
    return Design("map", form.channels, hidden, halvings, symbols, _LEVELS, form.size, form.positive)


def _positions(form: _Form, halvings: int) -> int:
    factor = 1 << halvings
    return form.rows * -(-form.size[0] // factor) * -(-form.size[1] // factor)


def _size(design: Design, grain: Grain, count: int) -> tuple[int, int, int]:
    """Return the form of a batch's piece, as `Design.form_of` does."""
    if design.kind == "tokens":
        return count * grain.outer, 1, grain.inner
    return count * grain.outer, grain.inner // grain.width, grain.width


def _rows(piece: torch.Tensor, design: Design, grain: Grain) -> torch.Tensor:
    """Return a batch's piece as the net takes it."""
    return rows_of(piece.float().reshape(-1), design, _size(design, grain, len(piece)))


class _Rate(nn.Module):
    """Learnt frequencies of the levels of each symbol."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(design.symbols, design.levels))

    def bits(self, levels: torch.Tensor) -> torch.Tensor:
        """Return the mean bits of a symbol. ``levels``: (N, symbols, ...), before rounding: interpolated between two
        levels.
        """
        table = functional.log_softmax(self.scores, dim=1)
        flat = levels.transpose(0, 1).flatten(1)
        below = flat.detach().floor().clamp(0, table.shape[1] - 2).long()
        share = flat - below
        found = table.gather(1, below) * (1 - share) + table.gather(1, below + 1) * share
        return -found.mean() / math.log(2)


@dataclass
class Trained:
    """Trained nets. ``pieces``: see `shared_hooks.codecs.learned.LearnedFile`; ``loss``: on the validation inputs."""

    pieces: tuple[Piece | None, ...]
    loss: float
    epochs: int
    history: list[float] = field(default_factory=list)


class Trainer:
    """Trains one net for each piece of ``examples`` that has a design, jointly."""

    def __init__(self, examples: Examples, designs: Sequence[Design | None], terms: TrainingTerms) -> None:
        self._examples, self._terms = examples, terms
        with devices.forked(seed=terms.seed):
            self._nets = [None if one is None else Bottleneck(one) for one in designs]
            self._rates = [None if one is None else _Rate(one) for one in designs]
        self._spread: list[torch.Tensor] = []

    def run(
        self,
        learn: torch.Tensor,
        judge: torch.Tensor,
        on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
        until: float = math.inf,
    ) -> Trained:
        """Train. ``learn``, ``judge``: indices of examples. ``until``: a moment of `time.monotonic` at which training
        stops with what it has.
        """
        examples, terms = self._examples, self._terms
        self._normalise(learn)
        dice = torch.Generator().manual_seed(terms.seed)
        parameters = [one for net in (*self._nets, *self._rates) if net is not None for one in net.parameters()]
        steps = max(1, -(-len(learn) // examples.batch)) * terms.epochs
        optimiser = torch.optim.AdamW(parameters, terms.rate, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, terms.rate, total_steps=steps + 1, pct_start=0.1)
        best, kept, since, history = math.inf, self._state(), 0, []
        epoch = 0
        with frozen(examples.wrapped.model), torch.enable_grad():
            for epoch in range(1, terms.epochs + 1):
                self._train(True)
                for some in examples.batches(learn[torch.randperm(len(learn), generator=dice)]):
                    optimiser.zero_grad()
                    loss, bits = self._loss(some)
                    (loss + _RATE * bits).backward()
                    nn.utils.clip_grad_norm_(parameters, 1.0)
                    optimiser.step()
                    schedule.step()
                found = self._judged(judge)
                history.append(found)
                on_epoch(epoch, found)
                if found < best:
                    best, kept, since = found, self._state(), 0
                else:
                    since += 1
                if since >= max(PATIENCE, terms.epochs // 4) or time.monotonic() > until:
                    break
        self._restore(kept)
        return Trained(self._pieces(learn), best, epoch, history)

    def _train(self, wanted: bool) -> None:
        for net in self._nets:
            if net is not None:
                net.train(wanted)

    def _state(self) -> list[Any]:
        return [None if net is None else copy.deepcopy(net.state_dict()) for net in self._nets]

    def _restore(self, state: list[Any]) -> None:
        for net, own in zip(self._nets, state, strict=True):
            if net is not None:
                net.load_state_dict(own)

    def _normalise(self, learn: torch.Tensor) -> None:
        """Set the means and deviations of channels, and of outputs, from the training inputs."""
        for net, piece, grain in zip(self._nets, self._examples.pieces, self._examples.grains, strict=True):
            if net is not None:
                values = _rows(piece[learn], net.design, grain)
                axes = [axis for axis in range(values.dim()) if axis != 1]
                net.mean.copy_(values.mean(axes))
                net.scale.copy_(values.std(axes, correction=0).clamp(min=1e-3 * float(values.std() + 1e-12) + 1e-12))
        self._spread = [one[learn].float().var(correction=0).clamp(min=1e-12) for one in self._examples.outputs]

    def _coded(self, some: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Return the pieces after the nets, bits of a symbol, and the pieces' own distance."""
        made, bits, off = [], [], []
        for number, (net, rate) in enumerate(zip(self._nets, self._rates, strict=True)):
            piece = self._examples.pieces[number][some]
            if net is None or rate is None:
                made.append(piece)
                continue
            grain = self._examples.grains[number]
            values = _rows(piece, net.design, grain)
            levels = net.levels_of(values)
            bits.append(rate.bits(levels))
            found = net.values_of(levels + (levels.round() - levels).detach(), net.design.size)
            by_channel = net.scale.view(-1, *[1] * (values.dim() - 2))
            off.append((((found - values) / by_channel) ** 2).mean())
            made.append(flat_of(found, net.design, _size(net.design, grain, len(some))).view(len(some), -1))
        return made, torch.stack(bits).mean(), torch.stack(off).mean()

    def _loss(self, some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made, bits, off = self._coded(some)
        if not self._examples.outputs:
            return _FEATURES * off, bits
        return self._distance(self._examples.behind(made), some) + _FEATURES * off, bits

    def _distance(self, outputs: Sequence[torch.Tensor], some: torch.Tensor) -> torch.Tensor:
        """Return the distance of the answers from those on the uncoded pieces, in units of their spread; outputs
        without a gradient (selected boxes) are left out.
        """
        found = []
        for number, (output, spread) in enumerate(zip(outputs, self._spread, strict=True)):
            wanted = self._examples.outputs[number][some]
            if not output.requires_grad and torch.is_grad_enabled():
                continue
            output = output.float().reshape(wanted.shape)
            wanted = wanted.float()
            distance = ((output - wanted) ** 2).nan_to_num(0, 0, 0).mean() / spread
            if self._terms.classes and number == 0:
                target = torch.log_softmax(wanted.flatten(0, -2), dim=-1)
                scores = torch.log_softmax(output.flatten(0, -2), dim=-1)
                distance = 0.1 * distance + functional.kl_div(scores, target, log_target=True, reduction="batchmean")
            found.append(distance)
        return torch.stack(found).mean() if found else torch.zeros(())

    def _judged(self, judge: torch.Tensor) -> float:
        self._train(False)
        total = []
        with torch.no_grad():
            for some in self._examples.batches(judge):
                made, _, off = self._coded(some)
                found = _FEATURES * off
                if self._examples.outputs:
                    found = found + self._distance(self._examples.behind(made, gradients=False), some)
                total.append(float(found))
        return sum(total) / len(total)

    def _pieces(self, learn: torch.Tensor) -> tuple[Piece | None, ...]:
        """Return the nets with the frequencies of their symbols."""
        self._train(False)
        made: list[Piece | None] = []
        for net, piece, grain in zip(self._nets, self._examples.pieces, self._examples.grains, strict=True):
            if net is None:
                made.append(None)
                continue
            counts = np.zeros((net.design.symbols, net.design.levels))
            with torch.no_grad():
                for some in learn.split(256):
                    values = _rows(piece[some], net.design, grain)
                    rows = net.levels_of(values).round().long().transpose(0, 1).flatten(1)
                    counts += functional.one_hot(rows, net.design.levels).sum(1).numpy()
            own = Bottleneck(net.design)
            own.load_state_dict(net.state_dict())
            made.append(Piece(own.requires_grad_(False).eval(), SymbolCoder.frequencies_of(counts)))
        return tuple(made)


def parted(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return indices for training, validation and testing: 13, 3 and 4 of 20, in a fixed order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 + seed))
    judged = max(1, count // 5)
    chosen = max(1, 3 * count // 20)
    return order[judged + chosen :], order[judged : judged + chosen], order[:judged]

"""From tensors that crossed a cut during a calibration to a `Book`.

The basis is that of principal components (Karhunen-Loeve): the uncorrelated directions of the channels, those with the
most energy first; those whose symbols would all be zero are left out. One step for all of them gives the least squared
error for the bytes (reverse water-filling, Cover and Thomas, "Elements of Information Theory", section 10.3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shared_hooks.codecs.basis import cosine
from shared_hooks.codecs.basis.book import MAX_BOOK_BYTES, MAX_CHANNELS, MAX_COEFFICIENTS, MAX_SIDE, Book
from shared_hooks.codecs.grain import Grain
from shared_hooks.errors import SpecError

_BOUNDS = (1.0, 0.3, 0.05)
"""Mean magnitudes of symbols between the groups."""
_LEFT_OUT = 0.125
"""Standard deviation, in steps, below which a component is not sent: some six hundredths of a step's own error."""
_UNLIKE = 16.0
"""Times what remained outside of the basis during the calibration, at the most, a new input is still like those."""


def learn(tensors: Sequence[torch.Tensor], grain: Grain, step: float) -> Book:
    """``tensors``: flat, of one cut, each of another input and of ``grain`` (its number of tokens or maps may differ).

    ``step``: the width of a quantiser's cell in standard deviations of all elements; 0.25 keeps hidden states within
    a part in a thousand, 1 to 2 do for feature maps of classifiers. Raises SpecError for what cannot be learnt.
    """
    height, width = (grain.inner // grain.width, grain.width) if grain.is_map else (1, 1)
    blocks = [one.detach().float().cpu().reshape(-1, grain.channels, height * width) for one in tensors]
    _check(grain, height, width, blocks, step)
    mean, covariance, square = _moments(blocks)
    spread = float((square - mean.square()).mean().clamp_min(0).sqrt())
    if not spread > 0:
        raise SpecError("a basis is learnt from values that differ: all of these are the same")
    energies, vectors = torch.linalg.eigh(covariance)
    energies, vectors = energies.flip(0).clamp_min(0), vectors.flip(1)
    cell = step * spread
    rank = int((energies.sqrt() > _LEFT_OUT * cell).sum())
    rank = max(1, min(rank, MAX_BOOK_BYTES // (2 * grain.channels), MAX_COEFFICIENTS // (height * width)))
    is_positive = all(float(one.min()) >= 0 for one in blocks)
    basis = vectors[:, :rank].to(torch.float16)
    most = _UNLIKE * float(energies[rank:].sum()) / grain.channels + cell * cell
    rounding = 0.4 if grain.is_map else 0.5
    book = Book(
        mean.float(), basis, torch.zeros((rank, cosine.BANDS), dtype=torch.uint8), height, width,
        cell, rounding, is_positive, most,
    )  # fmt: skip
    return _grouped(book, blocks)


def _check(grain: Grain, height: int, width: int, blocks: list[torch.Tensor], step: float) -> None:
    if not 0 < step < float("inf"):
        raise SpecError(f"step={step}: a number above zero")
    if grain.channels > MAX_CHANNELS or max(height, width) > MAX_SIDE or 2 * grain.channels > MAX_BOOK_BYTES:
        raise SpecError(f"a basis of {grain.channels} channels on {height} x {width} is too large to travel")
    if grain.is_map and grain.inner == 1 and grain.channels > 1:
        raise SpecError("a basis is learnt from maps whose channels lie apart in memory: not channels-last")
    if sum(len(one) for one in blocks) * height * width < 2:
        raise SpecError("a basis is learnt from several tensors, or several tokens")
    if not all(bool(torch.isfinite(one).all()) for one in blocks):
        raise SpecError("a basis is learnt from finite numbers")


def _moments(blocks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and covariance of the channels, and the mean of their squares, float64."""
    channels = blocks[0].shape[1]
    total, products, count = torch.zeros(channels, dtype=torch.float64), torch.zeros(channels, channels).double(), 0
    for one in blocks:
        rows = one.transpose(1, 2).reshape(-1, channels).double()
        total += rows.sum(0)
        products += rows.T @ rows
        count += len(rows)
    mean = total / count
    return mean, products / count - mean[:, None] * mean, products.diagonal() / count


def _grouped(book: Book, blocks: list[torch.Tensor]) -> Book:
    """With its components and frequencies in groups, by the mean magnitude of their symbols."""
    shape = (book.rank, book.height, book.width)
    total, count = torch.zeros(shape, dtype=torch.float64), 0
    for one in blocks:
        parts = book.basis.float().T @ (one - book.mean[:, None])
        parts = parts.reshape(-1, *shape)
        parts = cosine.forward(parts) if book.height * book.width > 1 else parts
        total += (parts.abs() / book.step + book.rounding).floor().double().sum(0)
        count += len(parts)
    bands = cosine.bands(book.height, book.width).reshape(-1).long()
    sizes = torch.zeros(book.rank, cosine.BANDS, dtype=torch.float64).index_add(1, bands, total.reshape(book.rank, -1))
    sizes /= count * torch.bincount(bands, minlength=cosine.BANDS).clamp_min(1)
    groups = torch.stack([sizes < bound for bound in _BOUNDS]).sum(0).to(torch.uint8)
    return replace(book, groups=groups)

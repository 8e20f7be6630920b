"""`Codecs`: which codecs may be used at which cut, for the loss that a user allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_client.planning.loss_table import LossTable, loss_of, read
from edge_client.spoken import option
from shared_hooks import codecs
from shared_hooks.codecs import CODECS
from shared_hooks.codecs.basis import Basis, Frames
from shared_hooks.errors import SpecError
from shared_hooks.showing import short

AUTO: Final = "auto"
"""In place of a codec's name: chosen for every tensor, or with the cut."""


LEARNT: Final = (Basis.name, Frames.name)
"""Codecs that need what a calibration learnt of a cut."""


def learnt(codec: str, calibration: str | Path | LossTable | None) -> LossTable | None:
    """The table whose books a codec of `LEARNT` goes by; None for others, and where books are given otherwise.

    Raises SpecError for a table without books.
    """
    if codec not in LEARNT or calibration is None:
        return None
    table = calibration if isinstance(calibration, LossTable) else read(calibration)
    if not table.books:
        raise SpecError(f"{table.origin} has no books for {option('codec', codec)}: calibrate with more inputs")
    return table


def table_of(codec: str, calibration: str | Path | LossTable | None) -> LossTable | None:
    """As `learnt`, and for `AUTO` the table that is given, with books or without. Raises SpecError for other codecs."""
    if calibration is None or codec in LEARNT:
        return learnt(codec, calibration)
    if codec != AUTO:
        raise SpecError(f"{option('calibration')} is for {option('codec', AUTO)}, {' and '.join(LEARNT)}")
    return calibration if isinstance(calibration, LossTable) else read(calibration)


def chosen_from(table: LossTable | None = None) -> tuple[str, ...]:
    """All codecs but those that need the frame before, or what was learnt of a cut: unless ``table`` has books."""
    without = (Frames.name,) if table is not None and table.books else LEARNT
    return tuple(name for name in CODECS if name not in without)


@short
@dataclass(frozen=True)
class Codecs:
    """``names``: of `shared_hooks.codecs.CODECS`. ``table``: what they lose, None where nothing may be lost."""

    names: tuple[str, ...]
    table: LossTable | None = None
    max_loss: float | None = None

    @classmethod
    def of(
        cls, codec: str, calibration: str | Path | LossTable | None = None, max_loss: str | float | None = None
    ) -> Codecs | None:
        """As users write it; None for one codec by its name, whose loss the user knows. Raises SpecError."""
        if codec != AUTO:
            codecs.check(codec)
            wrong = "calibration" if calibration is not None else "max_loss" if max_loss is not None else None
            if wrong is not None and not (codec in LEARNT and wrong == "calibration"):
                raise SpecError(f"{option(wrong)} is for {option('codec', AUTO)}; {codec} is used whatever it loses")
            return None
        loss = None if max_loss is None else loss_of(max_loss)
        if loss and calibration is None:
            raise SpecError(
                f"{option('max_loss', max_loss)} needs {option('calibration')}: what codecs lose, as edge-client "
                "calibrate measured it"
            )
        table = calibration if isinstance(calibration, LossTable) or calibration is None else read(calibration)
        if table is not None and loss is None:
            raise SpecError(f"{option('calibration')} needs {option('max_loss')}: nothing may be lost without it")
        known = [name for name in chosen_from(table) if CODECS[name].lossless or (table is not None and loss)]
        return cls(tuple(known), table, loss)

    def check(self, weights_hash: str, structure_digest: str) -> None:
        """Raises SpecError where the table is of other weights."""
        if self.table is not None:
            self.table.check(weights_hash, structure_digest)

    def at(self, cut: str) -> Iterator[tuple[str, float | None]]:
        """(codec, agreement with the whole model at least) of those that may be used there; None: unknown.

        ``cut``: a layer's name, or "input".
        """
        for name in self.names:
            if CODECS[name].lossless:
                yield name, 1.0
            elif self.table is not None and self.table.allows(cut, name, self.max_loss):
                found = self.table.of(cut, name)
                assert found is not None and found.high is not None, "what is allowed is known"
                yield name, max(0.0, 1 - found.high)

    def allowed(self, cut: str) -> Sequence[str]:
        """By name, as `at`."""
        return [name for name, _ in self.at(cut)]

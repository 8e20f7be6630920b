"""`Codecs`: which codecs may be used at which cut, for the loss that a user allows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from edge_client.user_text import option
from shared_hooks import codecs
from shared_hooks.codecs import CODECS
from shared_hooks.codecs.basis import Basis, Book, Frames
from shared_hooks.errors import BadFrame, SpecError
from shared_hooks.files import write_json
from shared_hooks.profiling.profile import Fields, ModelIdentity
from shared_hooks.showing import short

# `LossTable`: the loss in answers of every codec at every cut, measured by ``edge-client calibrate``; a file.
#
# A codec may be used at a cut for a loss that a user allows if it is lossless, or if the upper bound of its measured
# loss there is no greater. docs/calibration.md.


FORMAT: Final = "isthmus-codec-losses"
VERSION: Final = 1
MAX_BYTES: Final = 64 << 20
TOO_LOSSY: Final = "too lossy"
DOMINATED: Final = "others send no more and lose no more"


@dataclass(frozen=True, slots=True)
class CodecLoss:
    """One codec at one cut. ``low`` and ``high``: bounds of the loss (docs/calibration.md); ``high`` None: unknown."""

    codec: str
    lossless: bool
    n: int
    """The number of rows compared; 0 if nothing can be lost."""
    bytes_up: float
    """Header and payload, the mean over all inputs."""
    loss: float
    low: float
    high: float | None
    accuracy: float | None
    """According to the labels, if there are any."""
    measures: Mapping[str, float]
    """Means of other measures: kl, cosine, relative_error, iou, found."""
    stopped: str
    """Why not all inputs were used: `TOO_LOSSY`, `DOMINATED`; empty: all were, or nothing can be lost."""

    def within(self, max_loss: float) -> bool:
        """Return whether its loss is shown to be at most ``max_loss``."""
        return self.lossless or (self.high is not None and self.high <= max_loss)


@dataclass(frozen=True, slots=True)
class CutLosses:
    """The losses at one cut; ``refused``: why nothing could be measured there, else empty."""

    name: str
    layer_id: int
    frontier_bytes: int
    codecs: tuple[CodecLoss, ...]
    refused: str = ""


@short
@dataclass(frozen=True)
class LossTable:
    """``kind``: of the output (docs/calibration.md); ``inputs``: the number of inputs, ``labelled``: of those with a
    label.
    """

    model: ModelIdentity
    kind: str
    inputs: int
    labelled: int
    confidence: float
    max_loss: float
    """Requested when it was made: codecs beyond twice as much were not measured to the end."""
    whole_accuracy: float | None
    created: str
    cuts: tuple[CutLosses, ...]
    books: Mapping[str, tuple[Book | None, ...]] = field(default_factory=dict, repr=False)
    """By cut, the books of "basis" and "frames" for its pieces."""
    origin: str = field(default="the calibration", compare=False)

    @cached_property
    def _by_place(self) -> Mapping[tuple[str, str], CodecLoss]:
        return {(cut.name, one.codec): one for cut in self.cuts for one in cut.codecs}

    def of(self, cut: str, codec: str) -> CodecLoss | None:
        """Return what is known of a codec at a cut ("input": before the first layer)."""
        return self._by_place.get((cut, codec))

    def allows(self, cut: str, codec: str, max_loss: float | None) -> bool:
        """Return whether a codec of this side may be used at a cut."""
        if CODECS[codec].lossless:
            return True
        known = self.of(cut, codec)
        return max_loss is not None and known is not None and known.within(max_loss)

    def check(self, weights_hash: str, structure_digest: str) -> None:
        """Raise SpecError for a table of other weights, or of another structure."""
        for what, theirs, ours in (
            ("weights", self.model.weights_hash, weights_hash),
            ("layers", self.model.structure_digest, structure_digest),
        ):
            if theirs != ours:
                raise SpecError(
                    f"{self.origin} is of other {what}: {theirs[:12]}... in the calibration, {ours[:12]}... here; "
                    "its losses do not apply to this model: edge-client calibrate makes a new one"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        known = asdict(replace(self, books={}))
        del known["origin"]
        if self.books:
            known["books"] = {
                cut: [None if one is None else one.to_json() for one in books] for cut, books in self.books.items()
            }
        return {"format": FORMAT, "version": VERSION, **known}


def read(path: str | Path) -> LossTable:
    """Read a table strictly. Raises SpecError that names the place."""
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: larger than any calibration ({MAX_BYTES} bytes)")
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    return from_json(data, str(path))


def write(table: LossTable, path: str | Path) -> None:
    """Write the table to a file. Raises SpecError if that fails."""
    write_json(path, table.as_dict())


def from_json(data: object, origin: str) -> LossTable:
    """Return the reverse of `LossTable.as_dict`. Raises SpecError; unknown keys are ignored."""
    top = Fields(data, origin)
    if top.data.get("format") != FORMAT:
        raise SpecError(f'{origin}: no calibration of codecs: "format" is not "{FORMAT}"')
    if type(top.data.get("version")) is not int or top.data["version"] != VERSION:
        raise SpecError(f"{origin}.version: this Isthmus reads {VERSION}, found {top.data.get('version')!r:.40}")
    model = top.inner("model")
    return LossTable(
        model=ModelIdentity(
            model.text("model_id"),
            model.text("weights_hash"),
            model.text("structure_digest"),
            model.text("plan_digest"),
            model.whole("depth") if model.has("depth") else None,
        ),
        kind=top.text("kind"),
        inputs=top.whole("inputs"),
        labelled=top.whole("labelled"),
        confidence=_share(top, "confidence"),
        max_loss=_share(top, "max_loss"),
        whole_accuracy=_share(top, "whole_accuracy") if top.has("whole_accuracy") else None,
        created=top.text("created"),
        cuts=tuple(_cut(item) for item in top.each("cuts")),
        books=_books(top),
        origin=origin,
    )


def _books(top: Fields) -> Mapping[str, tuple[Book | None, ...]]:
    found = top.data.get("books", {})
    if not isinstance(found, dict) or not all(isinstance(books, list) for books in found.values()):
        raise SpecError(f"{top.place}.books: expected a list for each cut")
    try:
        return {
            cut: tuple(None if one is None else Book.from_json(one) for one in books) for cut, books in found.items()
        }
    except BadFrame as error:
        raise SpecError(f"{top.place}.books: {error}") from error


def _cut(item: Fields) -> CutLosses:
    return CutLosses(
        item.text("name"),
        item.whole("layer_id", least=-1),
        item.whole("frontier_bytes"),
        tuple(_codec(one) for one in item.each("codecs")),
        item.text("refused"),
    )


def _codec(item: Fields) -> CodecLoss:
    measures = item.inner("measures")
    loss, low = item.number("loss"), item.number("low")
    high = item.number("high") if item.has("high") else None
    if high is not None and low > high:
        item.fail("low", "more than the upper bound")
    lossless, codec = item.flag("lossless"), item.text("codec")
    if lossless and codec in CODECS and not CODECS[codec].lossless:
        item.fail("lossless", f"{codec} is not")
    if lossless and (loss or high is None or high):
        item.fail("loss", "a lossless codec that loses")
    return CodecLoss(
        codec=codec,
        lossless=lossless,
        n=item.whole("n"),
        bytes_up=item.number("bytes_up"),
        loss=loss,
        low=low,
        high=high,
        accuracy=_share(item, "accuracy") if item.has("accuracy") else None,
        measures={key: measures.number(key, -math.inf) for key in measures.data},
        stopped=item.text("stopped"),
    )


def _share(item: Fields, key: str) -> float:
    value = item.number(key)
    if value > 1:
        item.fail(key, f"expected a share from 0 to 1, found {value:g}")
    return value


def loss_of(value: str | float, name: str = "max_loss") -> float:
    """Return an allowed loss, from 0 to below 1, given as 0.005 or "0.5%". Raises SpecError."""
    text = str(value).strip()
    try:
        found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        found = math.nan
    if isinstance(value, bool) or not 0 <= found < 1:  # rejects NaN, too
        meant = f". Did you mean {text}%?" if 1 <= found < 100 and not text.endswith("%") else ""
        raise SpecError(f"{option(name, value)}: expected a share from 0 to less than 1, such as 0.005 or 0.5%{meant}")
    return found


AUTO: Final = "auto"
"""Instead of a codec's name: chosen for every tensor, or with the cut."""


def named(codec: str) -> str:
    """`AUTO`, or the canonical name of a codec. Raises SpecError."""
    return codec if codec == AUTO else codecs.check(codec)


LEARNT: Final = (Basis.name, Frames.name)
"""Codecs that need a calibration's books for a cut."""


def learnt(codec: str, calibration: str | Path | LossTable | None) -> LossTable | None:
    """Return the table with the books of a codec in `LEARNT`; None for others, and if books are given otherwise.

    Raises SpecError for a table without books.
    """
    if codec not in LEARNT or calibration is None:
        return None
    table = calibration if isinstance(calibration, LossTable) else read(calibration)
    if not table.books:
        raise SpecError(f"{table.origin} has no books for {option('codec', codec)}: calibrate with more inputs")
    return table


def table_of(codec: str, calibration: str | Path | LossTable | None) -> LossTable | None:
    """As `learnt`, and for `AUTO` the given table, with or without books. Raises SpecError for other codecs."""
    if calibration is None or codec in LEARNT:
        return learnt(codec, calibration)
    if codec != AUTO:
        raise SpecError(f"{option('calibration')} is for {option('codec', AUTO)}, {' and '.join(LEARNT)}")
    return calibration if isinstance(calibration, LossTable) else read(calibration)


def chosen_from(table: LossTable | None = None) -> tuple[str, ...]:
    """Return all codecs except those that need the previous frame, or books: unless ``table`` has books, or measured
    them.
    """
    without = (Frames.name,) if table is not None and table.books else LEARNT
    measured = set() if table is None else {one.codec for cut in table.cuts for one in cut.codecs}
    return tuple(name for name, one in CODECS.items() if name not in without and (one.listed or name in measured))


@short
@dataclass(frozen=True)
class Codecs:
    """``names``: of `shared_hooks.codecs.CODECS`. ``table``: their losses, None if nothing may be lost."""

    names: tuple[str, ...]
    table: LossTable | None = None
    max_loss: float | None = None

    @classmethod
    def of(
        cls, codec: str, calibration: str | Path | LossTable | None = None, max_loss: str | float | None = None
    ) -> Codecs | None:
        """Parse the user's setting; None for one codec by its name, whose loss the user knows. Raises SpecError."""
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
        """Raise SpecError if the table belongs to other weights."""
        if self.table is not None:
            self.table.check(weights_hash, structure_digest)

    def at(self, cut: str) -> Iterator[tuple[str, float | None]]:
        """(codec, least agreement with the whole model or None) of those that may be used there.

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
        """Return the names as in `at`."""
        return [name for name, _ in self.at(cut)]

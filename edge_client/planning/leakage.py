"""`LeakageTable`: how much of an input can be reconstructed from what crosses at every cut; and a limit on it for
plans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY, option
from shared_hooks.codecs import by_wire
from shared_hooks.errors import SpecError
from shared_hooks.files import write_json
from shared_hooks.profiling.profile import Fields, ModelIdentity
from shared_hooks.showing import short

FORMAT: Final = "isthmus-leakage"
VERSION: Final = 1
MAX_BYTES: Final = 64 << 20
RAW: Final = "raw"


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over several seeds: the mean, its 95 % interval (Student's t), and each value."""

    mean: float
    low: float
    high: float
    each: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CutLeakage:
    """One codec at one cut ("input": before the first layer). ``leakage``: 0 for an attacker who knows only the average
    input, 1 for what the raw input gives. ``scores``: its components, by name. ``refused``: why nothing was measured,
    else empty.
    """

    cut: str
    layer_id: int
    codec: str
    leakage: Spread
    scores: Mapping[str, Spread]
    refused: str = ""


@short
@dataclass(frozen=True)
class LeakageTable:
    """The result of `edge_client.leakage`; a file. ``kind``: of the inputs, pictures, tokens or numbers. ``average``
    and ``raw``: the scores of an attacker who knows only the average, and of one who has the input.
    """

    model: ModelIdentity
    kind: str
    decoder: str
    seeds: int
    inputs: int
    attacked: int
    public: int
    created: str
    average: Mapping[str, float]
    raw: Mapping[str, float]
    cuts: tuple[CutLeakage, ...]
    origin: str = field(default="the leakage", compare=False)

    @cached_property
    def _by_place(self) -> Mapping[tuple[str, str], CutLeakage]:
        return {(one.cut, one.codec): one for one in self.cuts if not one.refused}

    def of(self, cut: str, codec: str = RAW) -> CutLeakage | None:
        """Return the measurement there; a lossless codec leaks what raw bytes do."""
        known = by_wire(codec)
        found = self._by_place.get((cut, codec))
        return self._by_place.get((cut, RAW)) if found is None and known is not None and known.lossless else found

    def check(self, weights_hash: str) -> None:
        """Raise SpecError for a table of other weights."""
        if self.model.weights_hash != weights_hash:
            raise SpecError(
                f"{self.origin} is of other weights ({self.model.weights_hash[:12]}..., here {weights_hash[:12]}...): "
                "edge-client leakage makes a new one"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        known = asdict(self)
        del known["origin"]
        return {"format": FORMAT, "version": VERSION, **known}


@dataclass(frozen=True)
class LeakageBound:
    """The maximum leakage, 0 to 1. ``codec``: of requests whose candidate names none; one that names a codec counts as
    the worse of that and raw, since some of its pieces may be sent raw.
    """

    table: LeakageTable
    most: float
    codec: str = RAW

    def of(self, cut: str, codec: str = "") -> float | None:
        """Return the upper bound of a candidate's leakage; None if it was not measured."""
        if cut == EDGE_ONLY:
            return 0.0
        if cut == CLOUD_FILE:
            return 1.0
        cut = "input" if cut == CLOUD_ONLY else cut
        found = [self.table.of(cut, one) for one in ({RAW, codec} if codec else {self.codec})]
        if cut == "input" and None in found:
            return 1.0
        return None if None in found else max(one.leakage.high for one in found if one is not None)


def bound_of(
    max_leakage: float | None, leakage: str | Path | LeakageTable | None, codec: str = RAW
) -> LeakageBound | None:
    """Parse the user's settings. Raises SpecError for one without the other, and for an invalid limit."""
    if max_leakage is None and leakage is None:
        return None
    if max_leakage is None or leakage is None:
        raise SpecError(
            f"{option('max_leakage')} and {option('leakage')} go together: a bound, and the file of edge-client leakage"
        )
    if isinstance(max_leakage, bool) or not 0 <= max_leakage <= 1:  # rejects NaN, too
        raise SpecError(f"{option('max_leakage', max_leakage)}: expected a share from 0 to 1")
    table = leakage if isinstance(leakage, LeakageTable) else read(leakage)
    return LeakageBound(table, float(max_leakage), RAW if codec == "auto" else codec)


def write(table: LeakageTable, path: str | Path) -> None:
    """Write the table to a file. Raises SpecError if that fails."""
    write_json(path, table.as_dict())


def read(path: str | Path) -> LeakageTable:
    """Read a table strictly. Raises SpecError that names the place."""
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: larger than any leakage file ({MAX_BYTES} bytes)")
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    return from_json(data, str(path))


def from_json(data: object, origin: str) -> LeakageTable:
    """Return the reverse of `LeakageTable.as_dict`. Raises SpecError; unknown keys are ignored."""
    top = Fields(data, origin)
    if top.data.get("format") != FORMAT:
        raise SpecError(f'{origin}: no leakage file: "format" is not "{FORMAT}"')
    if type(top.data.get("version")) is not int or top.data["version"] != VERSION:
        raise SpecError(f"{origin}.version: this Isthmus reads {VERSION}, found {top.data.get('version')!r:.40}")
    model = top.inner("model")
    return LeakageTable(
        model=ModelIdentity(
            model.text("model_id"),
            model.text("weights_hash"),
            model.text("structure_digest"),
            model.text("plan_digest"),
            model.whole("depth") if model.has("depth") else None,
        ),
        kind=top.text("kind"),
        decoder=top.text("decoder"),
        seeds=top.whole("seeds"),
        inputs=top.whole("inputs"),
        attacked=top.whole("attacked"),
        public=top.whole("public"),
        created=top.text("created"),
        average=_numbers(top.inner("average")),
        raw=_numbers(top.inner("raw")),
        cuts=tuple(_cut(one) for one in top.each("cuts")),
        origin=origin,
    )


def _numbers(item: Fields) -> Mapping[str, float]:
    return {key: item.number(key, least=float("-inf")) for key in item.data}


def _cut(item: Fields) -> CutLeakage:
    scores = item.inner("scores")
    leakage = _spread(item.inner("leakage"))
    if not 0 <= leakage.low <= leakage.mean <= leakage.high <= 1:
        item.fail("leakage", "expected low, mean and high in this order, from 0 to 1")
    return CutLeakage(
        item.text("cut"),
        item.whole("layer_id", least=-1),
        item.text("codec"),
        leakage,
        {name: _spread(scores.inner(name)) for name in scores.data},
        item.text("refused"),
    )


def _spread(item: Fields) -> Spread:
    least = float("-inf")
    each: Sequence[Any] = item.data.get("each", ())
    if not isinstance(each, list) or not all(type(one) in (int, float) for one in each):
        item.fail("each", "expected a list of numbers")
    return Spread(item.number("mean", least), item.number("low", least), item.number("high", least), tuple(each))

"""Every scoring at every number of channels, judged; and for each number the one that the calibration data prefer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from edge_client.pruning.data import Judged, answers, by_class, judge
from edge_client.spoken import option
from shared_hooks.errors import CutRefused, InputMismatch, SpecError
from shared_hooks.models import ModelSpec
from shared_hooks.selection import SCORINGS, Mask, Sample, best, capture, masked, score
from shared_hooks.selection.capture import Captured, hooked, place_of
from shared_hooks.selection.mask import unmasked
from shared_hooks.showing import short

RANDOM = "random"


@dataclass(frozen=True)
class Row:
    """One mask, judged. ``seed`` is for the random control, ``calibration`` None for it."""

    scoring: str
    seed: int
    keep: int
    judged: Judged
    calibration: Judged | None
    mask: Mask


@short
@dataclass(frozen=True)
class Trial:
    """Everything that was tried."""

    captured: Captured
    module: str
    whole: Judged
    rows: tuple[Row, ...]
    unavailable: Mapping[str, str]
    """Scorings that had nothing to go by, and why."""

    @property
    def split(self) -> str:
        """Where a masked model is cut."""
        return f"{self.module}.select"

    @property
    def keeps(self) -> list[int]:
        """The numbers of channels that were tried, ascending."""
        return sorted({row.keep for row in self.rows})

    def chosen(self, keep: int) -> Row | None:
        """The best on the calibration data, of equals the first tried; no random one, unless there is no other."""
        rows = [row for row in self.rows if row.keep == keep]
        known = [row for row in rows if row.calibration is not None]
        return max(
            known, key=lambda row: row.calibration.value if row.calibration else 0.0, default=next(iter(rows), None)
        )


def keeps_of(text: str | None, channels: int) -> list[int]:
    """``keep``: numbers from 1 to the layer's channels, ascending. Raises SpecError."""
    if text is None:
        return sorted({max(1, channels // 4), max(1, channels // 2), max(1, 3 * channels // 4)})
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= channels for part in parts):
        raise SpecError(f"{option('keep', text)}: expected numbers from 1 to {channels}, the layer's channels")
    return sorted({int(part) for part in parts})


def scorings_of(text: str | None) -> list[str]:
    """``scores``; the random control always comes along, last. Raises SpecError."""
    names = [name.strip() for name in text.split(",")] if text else list(SCORINGS)
    for name in names:
        if name not in SCORINGS:
            raise SpecError(f'{option("scores")}: no scoring "{name}"; there is {", ".join(SCORINGS)}')
    return [*dict.fromkeys(name for name in names if name != RANDOM), RANDOM]


def try_all(
    spec: ModelSpec,
    model: nn.Module,
    layer: str,
    calibration: Sequence[Sample],
    places: Sequence[Sample] | None,
    data: Sequence[Sample],
    scorings: Sequence[str],
    keeps: Callable[[int], list[int]],
    seeds: int,
    on_step: Callable[[int, int], None],
) -> Trial:
    """``places``: the calibration inputs with boxes, None to look everywhere; ``keeps`` is asked with the channels."""
    whole_calibration, whole = answers(spec, model, calibration), answers(spec, model, data)
    labelled = by_class(calibration, whole_calibration)
    module, dim = place_of(model, layer, labelled[0])
    captured = capture(model, layer, labelled if places is None else places)
    rows: list[Row] = []
    unavailable: dict[str, str] = {}
    numbers = keeps(captured.channels)
    _check_reached(model, Mask(module, dim, tuple(range(captured.channels)), (0.0,) * captured.channels), labelled[0])
    plans = [(name, seed) for name in scorings for seed in range(seeds if name == RANDOM else 1)]
    done = 0
    for name, seed in plans:
        try:
            scores = score(name, captured, model, calibration[0], seed)
        except (CutRefused, InputMismatch) as error:
            unavailable[name] = str(error)
            done += len(numbers)
            continue
        for keep in numbers:
            mask = Mask(module, dim, tuple(best(scores, keep)), tuple(captured.fill.float().tolist()))
            masked(model, mask)
            try:
                judged = judge(answers(spec, model, data), whole, data)
                own = None
                if name != RANDOM:
                    own = judge(answers(spec, model, calibration), whole_calibration, calibration)
            finally:
                unmasked(model)
            rows.append(Row(name, seed, keep, judged, own, mask))
            done += 1
            on_step(done, len(plans) * len(numbers))
    return Trial(captured, module, judge(whole, whole, data), tuple(rows), unavailable)


def _check_reached(model: nn.Module, mask: Mask, sample: Sample) -> None:
    """Raises CutRefused where the model calls the layer by a reference of its own, which no mask can stand behind."""
    seen: list[int] = []
    masked(model, mask)
    try:
        hooked(model, mask.split, lambda output: seen.append(output.dim()), sample)
    finally:
        unmasked(model)
    if not seen:
        raise CutRefused(
            f"layer {mask.module}: a mask after it would not run: the model keeps the layer in a list or the like"
            " that is not an nn.ModuleList, and calls it there"
        )

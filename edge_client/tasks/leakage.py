"""Measure how much of the inputs an attacker can reconstruct from what crosses, at every cut."""

from __future__ import annotations

import base64
import io
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import xxhash
from PIL import Image

from edge_client.calibrating.inputs import Data, inputs_of, student
from edge_client.learning.examples import Examples, examples_of
from edge_client.learning.inversion import (
    STEPS,
    WIDTHS,
    Feature,
    Split,
    as_array,
    crossing_features,
    embedding_of,
    explained,
    input_features,
    invert,
    label_share,
    picture_scores,
    target_of,
    tokens_recovered,
)
from edge_client.options import LeakageOptions
from edge_client.pages import counted, stem
from edge_client.pages import render as page_of
from edge_client.planning.leakage import CutLeakage, LeakageTable, Spread, write
from edge_client.screen import Row, Tabular, printable, table
from edge_client.screen import progress as bar
from edge_client.sweeping import settings
from edge_client.sweeping.records import choose
from edge_client.sweeping.settings import continued, installed
from edge_client.tasks.subject import Model, subject_of
from edge_client.user_input import LoadedModel, NamedInput
from edge_client.user_text import either, option
from shared_hooks.codecs import CODECS, check
from shared_hooks.errors import CutRefused, InputMismatch, IsthmusError, SpecError, near
from shared_hooks.files import JournalFile, make_folder, write_text
from shared_hooks.options import takes
from shared_hooks.profiling.profiler import identity

TEMPLATE: Final = Path(__file__).parent / "leakage.html.j2"
LEAST_SIDE: Final = 64
"""Minimum side of a picture on the page, in pixels."""


class Pictures:
    """Inputs and their reconstructions, one row each; saved in ``folder`` if there is one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._rows: dict[str, bytes] = {}
        self._span = (0.0, 1.0)
        if folder is not None:
            folder.mkdir(exist_ok=True)

    def begin(self, originals: torch.Tensor, average: torch.Tensor) -> None:
        """Save originals and average, (n, C, H, W) each."""
        self._span = float(originals.min()), float(originals.max())
        self.add("the inputs", originals)
        self.add("the average", average)

    def add(self, name: str, pictures: torch.Tensor) -> None:
        """Save reconstructions, (n, C, H, W)."""
        rows = as_array(pictures, self._span)
        rows = rows.repeat(3, axis=3) if rows.shape[3] == 1 else rows[..., :3]
        joined = Image.fromarray(rows.transpose(1, 0, 2, 3).reshape(rows.shape[1], -1, rows.shape[3]))
        factor = max(1, LEAST_SIDE // rows.shape[1])
        joined = joined.resize((joined.width * factor, joined.height * factor), Image.Resampling.NEAREST)
        made = io.BytesIO()
        joined.save(made, "PNG")
        self._rows[name] = made.getvalue()
        if self._folder is not None:
            (self._folder / f"{_slug(name)}.png").write_bytes(made.getvalue())

    def shown(self, name: str) -> str | None:
        """Return a row of pictures as a data URL, or None if it does not exist."""
        data = self._rows.get(name)
        if data is None and self._folder is not None and (file := self._folder / f"{_slug(name)}.png").is_file():
            data = file.read_bytes()
        return None if data is None else f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "_", name)


def render(known: LeakageTable, pictures: Pictures, caution: str) -> str:
    """Render the report as HTML."""
    model = printable(known.model.model_id)
    measured = [one for one in known.cuts if not one.refused]
    names = list(dict.fromkeys([*known.average, *(name for one in measured for name in one.scores)]))
    rows = [["only the average", "", "0 %", "", *(_number(known.average.get(name)) for name in names)]]
    for one in measured:
        reach = f"{one.leakage.low:.0%} to {one.leakage.high:.0%}"
        scores = [f"{_number(found.mean)} ± {_number(found.high - found.mean)}" for found in one.scores.values()]
        rows.append([printable(one.cut), one.codec, f"{one.leakage.mean:.0%}", reach, *scores])
    rows.append(["the raw input", "", "100 %", "", *(_number(known.raw.get(name)) for name in names)])
    shown = [(name, pictures.shown(name)) for name in ("the inputs", "the average")]
    shown += [(f"{printable(one.cut)}, {one.codec}", pictures.shown(f"{one.cut} {one.codec}")) for one in measured]
    return page_of(
        TEMPLATE,
        ("lines",),
        {"file": stem(f"{model}-leakage"), "model": model, "series": _series(known)},
        title=f"{model}: leakage",
        kicker="Isthmus leakage",
        heading=f"{model}: what crosses, and what it gives away",
        lead=f"{counted(known.attacked, 'input')} attacked, {counted(known.seeds, 'seed')}, a {known.decoder} decoder.",
        partial=None,
        contents=[("depth", "by depth"), ("given", "given back"), ("cuts", "every cut")],
        cards=_cards(known),
        caution=caution,
        pictures=[(name, data) for name, data in shown if data is not None],
        headers=["cut after", "codec", "leakage", "95 % of seeds", *names],
        rows=rows,
        refused=[(printable(one.cut), printable(one.refused)) for one in known.cuts if one.refused],
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _series(known: LeakageTable) -> list[dict[str, Any]]:
    found: dict[str, list[list[float]]] = {}
    for one in known.cuts:
        if not one.refused:
            found.setdefault(one.codec, []).append([one.layer_id, 100 * one.leakage.mean])
    return [{"name": name, "points": sorted(points)} for name, points in found.items()]


def _cards(known: LeakageTable) -> list[dict[str, str]]:
    measured = [one for one in known.cuts if not one.refused]
    if not measured:
        return []
    least, most = (pick(measured, key=lambda one: one.leakage.mean) for pick in (min, max))
    return [
        {
            "title": title,
            "figure": f"{one.leakage.mean:.0%}",
            "name": f"{printable(one.cut)}, {one.codec}",
            "text": f"{one.leakage.low:.0%} to {one.leakage.high:.0%} over the seeds",
        }
        for title, one in (("Gives away the least", least), ("Gives away the most", most))
    ]


FORMAT: Final = "isthmus leakage 1"
FILE: Final = "leakage.json"
REPORT: Final = "report.html"
JOURNAL: Final = "journal.jsonl"
PICTURES: Final = "pictures"
LEAST: Final = 16
MOST_ATTACKED: Final = 200
MOST_INPUTS: Final = 1200
SHOWN: Final = 6
"""Pictures in the report."""
CONFIDENCE: Final = 0.95
CAUTION: Final = "an attacker with more data, more time or a better decoder may read more: these are lower bounds"


@dataclass(frozen=True, repr=False)
class Leaked(Tabular):
    """Result of `edge_client.leakage`. A row is a codec at a cut.

    ``table``: the argument of `plan(leakage=...)`; ``folder``: where leakage.json and report.html are, None if not
    written.
    """

    table: LeakageTable
    folder: Path | None
    seconds: float
    warnings: tuple[str, ...] = ()

    shown = {"cut": "cut after", "codec": "codec", "leakage": "leakage", "high": "at most"}  # noqa: RUF012

    def title(self) -> str:
        known = self.table
        return (
            f"{known.model.model_id}: what {known.attacked} {known.kind} give away, {known.seeds} seeds, decoder "
            f'"{known.decoder}"'
        )

    @property
    def measures(self) -> list[str]:
        """The names of the scores, in order."""
        return list(dict.fromkeys([*self.table.average, *(name for one in self.table.cuts for name in one.scores)]))

    def rows(self) -> list[Row]:
        return [
            {
                "cut": one.cut,
                "layer_id": one.layer_id,
                "codec": one.codec,
                "leakage": one.leakage.mean,
                "low": one.leakage.low,
                "high": one.leakage.high,
                **{name: one.scores[name].mean if name in one.scores else None for name in self.measures},
                "refused": one.refused,
            }
            for one in self.table.cuts
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data: the table's file, and more about this run."""
        return {**self.table.as_dict(), "seconds": self.seconds, "warnings": list(self.warnings)}

    def text(self) -> str:
        """Format a line per cut and codec, and lines for attackers who know nothing and everything."""
        known = self.table
        lines = [["(only the average)", "", "0 %", "", *(_shown(known.average.get(name)) for name in self.measures)]]
        for one in known.cuts:
            if not one.refused:
                scores = [_shown(one.scores[name].mean) if name in one.scores else "-" for name in self.measures]
                reach = f"{_percent(one.leakage.low)} to {_percent(one.leakage.high)}"
                lines.append([printable(one.cut), one.codec, _percent(one.leakage.mean), reach, *scores])
        lines.append(["(the raw input)", "", "100 %", "", *(_shown(known.raw.get(name)) for name in self.measures)])
        headers = ["cut after", "codec", "leakage", "95 % of seeds", *self.measures]
        below = [
            f"leakage: from 0 %, what the average gives, to 100 %, what the raw input gives; {CAUTION}",
            *(f"refused: {printable(one.cut)}: {printable(one.refused)}" for one in known.cuts if one.refused),
        ]
        if self.folder is not None:
            file = self.folder / FILE
            used = either(f"--leakage {file} --max-leakage 0.3", f'leakage="{file}", max_leakage=0.3')
            below.append(f"written to {self.folder}: {FILE}, {REPORT}; plan and --split auto take {used}")
        return "\n".join([table(headers, lines, right=tuple(range(2, len(headers)))), "", *below])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


@takes(LeakageOptions)
def leakage(model: Model, inputs: Data, *, options: LeakageOptions) -> Leaked:
    """Measure how much of the inputs an attacker can read from what crosses each cut (docs/leakage.md).

    Runs in this process alone.

        found = edge_client.leakage("digits", "images/", splits="stem,stage2", codecs="raw,int4", output="leaked")
        edge_client.plan(server, "digits", leakage=found.table, max_leakage=0.3)

    ``inputs``: as for `calibrate`, at most 1,200; three of four train the attacker, the others (at most 200) are
    attacked; each seed chooses others. ``public``: other inputs to train it on instead. ``splits``: "all" or names,
    which may include "input"; ``every``: each n-th of all. ``codecs``: names; the attacker sees what each of them
    decodes to. ``labels``: a CSV file of a private attribute (a face's identity, a speaker): a probe's accuracy is then
    a score as well. ``decoder``: "small" or "large". ``steps`` of its training; None: 500. ``output``: a folder for
    leakage.json, report.html and a journal: the same call resumes an interrupted run, ``fresh`` starts over. The same
    seeds and inputs give the same results on the same machine.

    Raises SpecError (an invalid option, too few inputs, the folder of another study), UnknownLayer, InputMismatch.
    """
    codecs, decoder = options.codecs, options.decoder
    names = [check(name.strip()) for name in (codecs.split(",") if isinstance(codecs, str) else codecs)]
    if decoder not in WIDTHS:
        raise SpecError(f"{option('decoder', decoder)}: must be one of {', '.join(WIDTHS)}.{near(decoder, WIDTHS)}")
    for name, value in (("seeds", options.seeds), ("steps", STEPS if options.steps is None else options.steps)):
        if type(value) is not int or value < 1:
            raise SpecError(f"{option(name, value)}: expected a whole number of at least 1")
    items = inputs_of(inputs, options.labels)[:MOST_INPUTS]
    others = [] if options.public is None else inputs_of(options.public)[:MOST_INPUTS]
    if len(items) < (1 if others else LEAST):
        raise SpecError(f"{len(items)} inputs are too few to train an attacker and to attack: {LEAST} at least")
    settings.check("jinja2", "skimage")
    folder = None if options.output is None else make_folder(options.output, option("output"))
    subject = subject_of(model, items[:1])
    loaded = subject.load(on_inputs=subject.by_name is False)
    with loaded.wrapped, ExitStack() as stack:
        cuts = _cuts(loaded, options.splits, options.every)
        how = options.labels is not None, decoder, options.seeds, options.steps or STEPS
        meter = _Meter(loaded, items, others, names, *how)
        if folder is not None:
            file, lines = continued(folder / JOURNAL, "leakage", FORMAT, meter.settings(), options.fresh)
            meter.keep(stack.enter_context(file), lines, folder / PICTURES)
            if lines:
                options.say(f"{folder}: continuing after {len(lines)} attacks")
        found = meter.run(cuts, options.progress)
    if folder is not None:
        write(found, folder / FILE)
        write_text(folder / REPORT, render(found, meter.pictures, CAUTION))
    warnings = tuple(meter.warnings)
    return Leaked(found, folder, meter.seconds, warnings)


def _cuts(loaded: LoadedModel, splits: str, every: int | None) -> list[str]:
    names = [name.strip() for name in splits.split(",")]
    if names == ["all"]:
        return ["input", *(name for name, _ in choose(loaded.cuts, None, every or 1))]
    if every is not None:
        raise SpecError(f"{option('every')} is for {option('splits', 'all')}")
    chosen = [name for name in names if name != "input"]
    found = [name for name, _ in choose(loaded.cuts, ",".join(chosen), None, loaded.plan.resolve)] if chosen else []
    return ["input", *found] if "input" in names else found


Outcome = dict[str, float]


class _Meter:
    def __init__(
        self,
        loaded: LoadedModel,
        items: Sequence[NamedInput],
        others: Sequence[NamedInput],
        codecs: Sequence[str],
        labelled: bool,
        decoder: str,
        seeds: int,
        steps: int,
    ) -> None:
        self._loaded, self._items, self._others, self._codecs = loaded, items, others, list(dict.fromkeys(codecs))
        self._labelled, self._decoder, self._seeds, self._steps = labelled, decoder, seeds, steps
        self.warnings: list[str] = []
        self.pictures = Pictures()
        self.seconds = 0.0
        self._file: JournalFile | None = None
        self._known: dict[str, Any] = {}
        truths = sorted({one.truth for one in items if one.truth is not None}) if labelled else []
        self._numbers = {truth: number for number, truth in enumerate(truths)}
        if labelled and (len(truths) < 2 or any(one.truth is None for one in items)):
            raise SpecError(f"{option('labels')}: every input needs a label, and there must be two at least")
        if labelled and others:
            raise SpecError(f"{option('labels')}: not with {option('public')}, of which an attacker has no labels")

    def keep(self, file: JournalFile, lines: Sequence[Mapping[str, Any]], pictures: Path) -> None:
        """Record every attack in ``file``, and skip those in ``lines``."""
        self._file, self._known = file, {line["attack"]: line["scores"] for line in lines}
        self.pictures = Pictures(pictures)

    def _once(self, key: str, attack: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = attack()
            if self._file is not None:
                self._file.write({"attack": key, "scores": self._known[key]})
        return self._known[key]

    def settings(self) -> dict[str, Any]:
        """Return all that the results depend on. A run is resumed only if all of it is the same."""
        wrapped, together = self._loaded.wrapped, xxhash.xxh3_64()
        for item in (*self._items, *self._others):
            together.update(f"{item.name} {item.digest()} {item.truth if self._labelled else ''}\n".encode())
        return {
            "model": self._loaded.spec.model_id,
            "weights": wrapped.weights_hash(),
            "code": wrapped.environment().get("model_code"),
            "inputs": [len(self._items), len(self._others), together.hexdigest()],
            "labels": self._labelled,
            "decoder": self._decoder,
            "steps": self._steps,
            "torch": str(torch.__version__),
            "isthmus": installed("isthmus"),
        }

    def run(self, cuts: Sequence[str], progress: bool) -> LeakageTable:
        began = time.monotonic()
        found: list[CutLeakage] = []
        controls: list[tuple[Outcome, Outcome]] = []
        kind, count, public = "", 0, 0
        plan = self._loaded.wrapped.plan(*self._loaded.args, **self._loaded.kwargs)
        total = len(cuts) * len(self._codecs) * self._seeds
        with bar("attacks", total, progress) as advance:
            for cut in cuts:
                info = plan.resolve(cut) if cut != "input" else None
                number = -1 if info is None else info.layer_id
                try:
                    examples, public = self._examples(cut)
                except (InputMismatch, SpecError):
                    raise
                except IsthmusError as error:
                    nothing = Spread(0.0, 0.0, 0.0, ())
                    found += [CutLeakage(cut, number, name, nothing, {}, str(error)) for name in self._codecs]
                    continue
                kind, target = target_of(examples)
                if bool((target == target[:1]).all()):
                    raise SpecError("the inputs are all the same: there is nothing to read")
                count = len(examples) - public
                if not controls:
                    control = partial(self._controls, kind, target, examples, public)
                    controls = [self._once(f"control {n}", partial(control, n)) for n in range(self._seeds)]
                for name in self._codecs:
                    outcomes: list[Outcome] = []
                    for seed in range(self._seeds):
                        attack = partial(self._attacked, kind, target, examples, public, name, seed)
                        outcomes.append(self._once(f"{examples.cut} {name} {seed}", attack))
                        advance(f"{cut} {name}")
                    found.append(self._judged(kind, examples.cut, number, name, outcomes, controls))
        self.seconds = time.monotonic() - began
        if not controls:
            raise CutRefused("; ".join(dict.fromkeys(one.refused for one in found)) or "no cut was named")
        if self._labelled and any(raw["labels"] <= average["labels"] for average, raw in controls):
            self.warnings.append(
                "the probe reads no more labels from the raw input than the most frequent one: what is above it counts "
                "as all there is"
            )
        if self._seeds < 2:
            self.warnings.append("one seed shows no spread: bounds are the figures themselves")
        mean = [{key: statistics.fmean(one[at][key] for one in controls) for key in controls[0][at]} for at in (0, 1)]
        return LeakageTable(
            model=identity(self._loaded.wrapped, self._loaded.spec.model_id, self._loaded.plan_digest),
            kind=kind,
            decoder=self._decoder,
            seeds=self._seeds,
            inputs=count,
            attacked=len(Split.of(count + public, 0, MOST_ATTACKED, public).attacked),
            public=public,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            average=mean[0],
            raw=mean[1],
            cuts=tuple(found),
        )

    def _examples(self, cut: str) -> tuple[Examples, int]:
        """Return the examples of the inputs and then of the public ones, and the number of the latter."""
        examples = examples_of(self._loaded, cut, [*self._items, *self._others], answers=False)
        public = sum(number >= len(self._items) for number in examples.used)
        if len(examples) - public < 1 or (self._others and public < LEAST) or len(examples) < LEAST:
            raise CutRefused(f"after {cut} too few inputs cross in the first one's form: {len(examples)}")
        return examples, public

    def _controls(
        self, kind: str, target: torch.Tensor, examples: Examples, public: int, seed: int
    ) -> tuple[Outcome, Outcome]:
        """Return the scores of the average and of the raw input under the same attack."""
        parts = Split.of(len(examples), seed, MOST_ATTACKED, public)
        learn, attacked = parts.learn, parts.attacked
        own = input_features(kind, target)
        if kind == "pictures":
            mean = target[learn].mean(0, keepdim=True).expand(len(attacked), -1, -1, -1)
            made = invert(own, target, learn, seed=seed, decoder=self._decoder, steps=self._steps).given_back(attacked)
            if seed == 0:
                self.pictures.begin(target[attacked[:SHOWN]], mean[:SHOWN])
            average = picture_scores(mean, target[attacked], _span(target))
            raw = picture_scores(made, target[attacked], _span(target))
        elif kind == "tokens":
            values, counts = target[learn].unique(return_counts=True)
            share = float((target[attacked] == values[counts.argmax()]).float().mean())
            average = dict.fromkeys(("nearest", "probe", "recovered"), share)
            raw = self._tokens(own, target, parts)
        else:
            made = invert(own, target, learn, seed=seed, decoder=self._decoder, steps=self._steps).given_back(attacked)
            mean = target[learn].mean(0)
            average = {"explained": explained(mean.expand_as(made), target[attacked], mean)}
            raw = {"explained": explained(made, target[attacked], mean)}
        if self._labelled:
            labels = self._labels(examples)
            most = labels[learn].mode().values
            average["labels"] = float((labels[attacked] == most).float().mean())
            raw["labels"] = label_share(own, labels, learn, attacked, seed)
        return average, raw

    def _attacked(
        self, kind: str, target: torch.Tensor, examples: Examples, public: int, codec: str, seed: int
    ) -> Outcome:
        parts = Split.of(len(examples), seed, MOST_ATTACKED, public)
        learn, attacked = parts.learn, parts.attacked
        features = crossing_features(examples, CODECS[codec], np.random.default_rng(seed))
        if kind == "tokens":
            found = self._tokens(features, target, parts)
        else:
            made = invert(features, target, learn, seed=seed, decoder=self._decoder, steps=self._steps)
            given = made.given_back(attacked)
            if kind == "pictures":
                found = picture_scores(given, target[attacked], _span(target))
                if seed == 0:
                    self.pictures.add(f"{examples.cut} {codec}", given[:SHOWN])
            else:
                found = {"explained": explained(given, target[attacked], target[learn].mean(0))}
        if self._labelled:
            found["labels"] = label_share(features, self._labels(examples), learn, attacked, seed)
        return found

    def _tokens(self, features: Sequence[Feature], target: torch.Tensor, parts: Split) -> Outcome:
        embedding = embedding_of(self._loaded.wrapped.model, int(target.max()))
        return dict(tokens_recovered(features, target, embedding, parts.learn, parts.attacked))

    def _labels(self, examples: Examples) -> torch.Tensor:
        return torch.tensor([self._numbers[str(self._items[at].truth)] for at in examples.used])

    def _judged(
        self,
        kind: str,
        cut: str,
        number: int,
        codec: str,
        outcomes: Sequence[Outcome],
        controls: Sequence[tuple[Outcome, Outcome]],
    ) -> CutLeakage:
        what = {"pictures": "ssim", "tokens": "recovered", "numbers": "explained"}[kind]
        shares = [
            max(_between(one, control, name) for name in (what, "labels") if name in one)
            for one, control in zip(outcomes, controls, strict=True)
        ]
        scores = {name: _spread([one[name] for one in outcomes]) for name in outcomes[0]}
        return CutLeakage(cut, number, codec, _spread(shares, 0.0, 1.0), scores)


def _between(found: Outcome, controls: tuple[Outcome, Outcome], name: str) -> float:
    """Return a score's position between the average's, 0, and the raw input's, 1. If the raw input scores no better
    than the average (a probe cannot read the label from pixels), anything above it counts as 1.
    """
    low, high = controls[0][name], controls[1][name]
    if high <= low:
        return float(found[name] > low)
    return min(1.0, max(0.0, (found[name] - low) / (high - low)))


def _span(target: torch.Tensor) -> float:
    return float(target.max() - target.min()) or 1.0


def _spread(each: Sequence[float], least: float = float("-inf"), most: float = float("inf")) -> Spread:
    """Return the mean over seeds and its confidence bounds (Student's t)."""
    mean = statistics.fmean(each)
    reach = 0.0
    if len(each) > 1:
        reach = student((1 + CONFIDENCE) / 2, len(each) - 1) * statistics.stdev(each) / len(each) ** 0.5
    low, high = min(max(mean - reach, least), mean), max(min(mean + reach, most), mean)
    return Spread(mean, low, high, tuple(each))

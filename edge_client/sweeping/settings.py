"""Define what a sweep measures. An interrupted one is resumed only if all of this is the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from edge_client.call import Call
from edge_client.credentials import Credentials
from edge_client.options import SweepOptions
from edge_client.planning.explain import break_evens, explain
from edge_client.planning.objective import Objective, decide
from edge_client.survey import Gathered
from edge_client.sweeping.records import Way
from edge_client.user_input import LoadedModel, NamedInput, named, named_inputs
from edge_client.user_text import either, option
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.files import JournalFile
from shared_hooks.models import BUILT_IN, ModelSpec, find_inputs
from shared_hooks.profiling.machine import describe
from shared_hooks.version import __version__

# The libraries needed only by sweeps, so that a device that runs just the client stays light.


NEEDED: Final = ("polars", "jinja2")


def check(*names: str) -> None:
    """Raise SpecError before any work if a package is missing, with how to install it."""
    missing = [name for name in names or NEEDED if find_spec(name) is None]
    if missing:
        raise SpecError(f'{" and ".join(missing)} missing: pip install "isthmus[sweep]"')


Settings = dict[str, Any]
"""JSON data: what is measured (model, weights, machine, versions), on what (inputs, ways), how (repetitions, codec)."""

OUR_SERVER = "started here"


@dataclass(frozen=True, kw_only=True)
class Sweeping(SweepOptions):
    """How a sweep measures; constant during the sweep."""

    server: str | None = None
    """None: a temporary one on this machine."""
    engines: tuple[str, ...] = ()
    """Other engines than torch in which heads run, too."""

    def credentials_for(self, server: str) -> Credentials:
        """Return the credentials given, unless ``server`` is our own."""
        given = self.credentials if server == self.server else None
        return given or Credentials()


def settings_of(options: Sweeping, loaded: LoadedModel, inputs: Sequence[NamedInput], ways: Sequence[Way]) -> Settings:
    """Return the settings; hashes weights and inputs."""
    wrapped = loaded.wrapped
    machine = describe(wrapped.device)
    # only where there are any; files of results call observers "hooks"
    observers = {"hooks": list(options.observers)} if options.observers else {}
    return {
        "model": loaded.spec.model_id,
        "weights": wrapped.weights_hash(),
        "code": wrapped.environment().get("model_code"),
        "plan": loaded.plan_digest,
        "depth": loaded.choice.depth,
        "machine": f"{machine.get('name')} {machine.get('id')}",
        "device": str(wrapped.device),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "isthmus": installed("isthmus"),
        "server": options.server or OUR_SERVER,
        "codec": options.codec,
        "repetitions": options.repetitions,
        "layer repetitions": options.layer_repetitions,
        "warm-up": options.warmup,
        "ways": [[way.name, way.mode] for way in ways],
        "inputs": [[sweep_input.name, sweep_input.digest()] for sweep_input in inputs],
        **observers,
    }


def installed(name: str) -> str | None:
    """Return a package's version; None if it runs from a folder."""
    try:
        return __version__ if name == "isthmus" else version(name)
    except PackageNotFoundError:
        return None


def continued(
    path: Path, kind: str, form: str, settings: dict[str, Any], fresh: bool
) -> tuple[JournalFile, list[dict[str, Any]]]:
    """Open the journal of a study at ``path``, and return its lines so far.

    They are those of an interrupted study of the same ``settings``, which is begun if there are none. Raises SpecError
    for the journal of another study, or of another ``form``.
    """
    file = JournalFile(path, option("output"), kind)
    try:
        lines = [] if fresh else [file.parsed(*line) for line in file.lines()]
        if lines and lines[0].get("format") != form:
            raise SpecError(f'{path}: not a journal of this version ("{form}"); give another folder')
        if lines and (changed := difference(lines[0]["settings"], settings)):
            raise SpecError(
                f"{path.parent} holds another {kind} ({changed}); give another folder, or {option('fresh')} to start "
                "over"
            )
        if not lines:
            file.clear()
            file.write({"format": form, "settings": settings})
    except BaseException:
        file.close()
        raise
    return file, lines[1:]


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return the first difference in words; None if there is none."""
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if before != after:
            return f"{key}: {_differing(before, after)}"
    return None


def _differing(before: Any, after: Any) -> str:
    if isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return f"{len(before)} then, {len(after)} now"
        before, after = next(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    return f"{_short(before)} then, {_short(after)} now"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_short, value))
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# The inputs of a sweep: files, calls, the images that come with a model, or its example.


HANDFUL: Final = 5
"""Number of a model's shipped images used, spread over all of them."""


def handed_over(inputs: Any) -> list[NamedInput] | None:
    """Return the given inputs; None for None. Raises SpecError."""
    try:
        return None if inputs is None else named_inputs(inputs)
    except InputMismatch as error:
        raise SpecError(f"{either('--input', 'inputs')}: {error}") from error


def inputs_that_come_with(spec: ModelSpec) -> list[NamedInput]:
    """Return the shipped images, else the example. Raises SpecError if there is none."""
    images = spec.folder / "images"
    if images.is_dir() and spec.folder in {path.parent.resolve() for path in BUILT_IN.values()}:
        found = find_inputs(images)
        return named(found[:: max(1, len(found) // HANDFUL)][:HANDFUL])
    example = spec.example()
    if example is None:
        raise SpecError(f"{spec.origin}: the spec has no example input; give {either('inputs with --input', 'inputs')}")
    return [NamedInput("example", value=Call(*example), made=True)]


# The prediction for every way, made before anything is measured and kept in the journal, so that it stays a
# prediction.


def predicted(gathered: Gathered, objective: Objective) -> dict[str, Any]:
    """Return the prediction as JSON data: the candidates, the decision (None with a reason, if the objective's numbers
    are unavailable), machines, link and warnings.
    """
    candidates = gathered.candidates()
    decided = explanation = why_not = None
    try:
        decision = decide(candidates, objective)
        decided = decision.as_dict()
        explanation, _ = explain(
            decision, candidates, break_evens(decision, objective, gathered.link, gathered.candidates)
        )
    except SpecError as error:
        why_not = str(error)
    return {
        "candidates": [one.as_dict() for one in candidates],
        "decision": decided,
        "explanation": explanation,
        "idle_power": gathered.edge.idle_power.as_dict(),
        "why_not": why_not,
        "machines": {"edge": dict(gathered.edge.machine), "cloud": dict(gathered.cloud.machine)},
        "link": gathered.link.as_dict(),
        "warnings": list(gathered.warnings),
    }


# What a sweep has measured so far: one line of JSON per finished input, on the disk before the next one starts.
#
# The first line describes the sweep, the second (if there is one) the prediction. A line truncated by an interruption
# is dropped when the journal is read again: at most that one input is lost.


NAME: Final = "journal.jsonl"
FORMAT: Final = "isthmus sweep 1"
RESULTS: Final = (
    "rows.csv",
    "rows.parquet",
    "requests.csv",
    "requests.parquet",
    "summary.json",
    "report.html",
    "observations.jsonl",
)

Entry = dict[str, Any]
"""{"index", "input", "repetitions", "requests": columns, "rows": columns, "notes": [[column, status, note, count]]},
and "observed" with observers, with "picture" for one of the first inputs if it is an image.
"""


_OURS: Final = b'{"format":"isthmus sweep '
_ENTRY: Final = re.compile(rb'\{"index":(\d+),')
"""Prefix of an input's line."""


@dataclass
class Contents:
    """A journal's contents beside the measurements. ``done``: indices of measured inputs; ``skipped``: ways that this
    server does not support, and why; ``engines``: requests with heads in other engines than torch.
    """

    settings: Settings | None = None
    prediction: dict[str, Any] | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    engines: dict[str, Any] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)


class Journal:
    """The journal in a folder; made by `open_journal`. One process at a time (a lock that ends with the process)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME
        self._file = JournalFile(self.path, option("output"), "sweep")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Write one line, atomically; it is on the disk on return. Raises SpecError, as for a full disk."""
        self._file.write(record)

    def begin(self, settings: Settings, fresh: bool) -> Contents:
        """Start or resume, and return the contents. Raises SpecError that names what has changed, unless ``fresh``,
        which starts over.
        """
        if fresh:
            with self.path.open("rb") as file:
                if (first := file.readline()) and not first.startswith(_OURS):
                    raise SpecError(f"{option('output')}: {self.path} does not belong to a sweep and is left alone")
            self._file.clear()
            for name in RESULTS:
                (self.folder / name).unlink(missing_ok=True)
        contents = self.read()
        if contents.settings is None:
            self.write({"format": FORMAT, "settings": settings})
            return Contents(settings)
        if changed := difference(contents.settings, settings):
            raise SpecError(
                f"{self.folder} holds another sweep ({changed}); give another folder, or {option('fresh')} to start "
                "over"
            )
        return contents

    def read(self) -> Contents:
        """Read all but the measurements; a truncated end is removed. Raises SpecError for anything but a journal."""
        contents = Contents()
        for number, line in self._file.lines():
            if (entry := _ENTRY.match(line)) and contents.settings is not None:
                contents.done.append(int(entry.group(1)))
                continue
            record = self._file.parsed(number, line)
            if number == 1:
                if record.get("format") != FORMAT or not isinstance(record.get("settings"), dict):
                    raise SpecError(f'{self.path}: not a journal of this version ("{FORMAT}"); give another folder')
                contents.settings = record["settings"]
            elif "prediction" in record:
                contents.prediction = record["prediction"]
            elif "engine" in record:
                contents.engines[record["engine"]] = record["measured"]
            elif "skipped" in record:
                contents.skipped[record["skipped"]] = record["why"]
        return contents

    def entries(self) -> Iterator[Entry]:
        """Yield the measurements, one input at a time: a sweep may be larger than memory."""
        for number, line in self._file.lines():
            if _ENTRY.match(line):
                yield self._file.parsed(number, line)


def open_journal(folder: str | os.PathLike[str]) -> Journal:
    """Open the journal of a folder, which is created. Raises SpecError if that fails, or it holds something else."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        others = sorted(entry.name for entry in path.iterdir()) if not (path / NAME).exists() else []
    except OSError as error:
        raise SpecError(f"{option('output')}: {path} cannot be a folder of results: {error.strerror}") from error
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise SpecError(f"{option('output')}: {path} holds something else ({shown}); give an empty or a new folder")
    return Journal(path)

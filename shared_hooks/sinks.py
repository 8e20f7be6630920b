"""Write numbers of observers and metrics to TensorBoard, Weights & Biases, or a custom sink."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

from shared_hooks.config import resolve
from shared_hooks.errors import SpecError, near
from shared_hooks.observers import Observer, Record
from shared_hooks.observers.named import plain

__all__ = [
    "Histogram",
    "Picture",
    "Sink",
    "Value",
    "of_records",
    "open_sink",
    "write_records",
]


# `Sink`: takes named values, step after step.

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Histogram:
    """``counts`` of elements in equal bins from ``low`` to ``high``."""

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def edges(self) -> list[float]:
        """Edges of the bins, one more than there are bins."""
        width = (self.high - self.low) / len(self.counts)
        return [self.low + number * width for number in range(len(self.counts))] + [self.high]


@dataclass(frozen=True)
class Picture:
    """A PNG file's bytes."""

    png: bytes

    def image(self) -> Image.Image:
        """Decode the picture. Raises OSError for invalid PNG."""
        from PIL import Image

        return Image.open(io.BytesIO(self.png), formats=["PNG"])


Value: TypeAlias = float | str | Histogram | Picture
"""A sink's value. Numbers may be NaN and infinite. A sink skips what it does not support."""


class Sink(Protocol):
    """Interface of sinks, called by one thread. An exception is logged once and does not propagate."""

    def write(self, values: Mapping[str, Value], step: int) -> None:
        """Write the values of one step by name, a path with slashes such as "edge/activation/stem.0/mean". Steps
        increase.
        """

    def close(self) -> None:
        """Finish: what was written must be on the disk when this returns."""


# Sinks as named on a command line: ``tensorboard:DIR``, ``wandb:PROJECT``, ``module:callable[:TEXT]``.

# Weights & Biases, offline: a run's file on this disk; ``wandb sync`` uploads it on request.


class WandbSink:
    """Writes a run of ``project`` below ``folder`` (default: ``WANDB_DIR``, else here), named
    ``wandb/offline-run-...``.

    Always offline: it sends nothing and needs no account; hardware, packages, git and code are not recorded. Needs the
    extra ``wandb``. Use as a context manager, or call `close`. Raises SpecError without the package, and if no run can
    begin.
    """

    def __init__(self, project: str, folder: str | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            text = f'a W&B sink needs Weights & Biases ({error}): pip install "isthmus[wandb]"'
            raise SpecError(text) from error
        self._wandb = wandb
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        try:
            self._run: Any = wandb.init(
                project=project, dir=folder, mode="offline", settings=settings, reinit="create_new"
            )
        except Exception as error:  # its own errors, and OSError
            raise SpecError(f"wandb: no run of {project} can begin: {type(error).__name__}: {error}") from error
        # its own count of steps would drop values that come out of order
        self._run.define_metric("*", step_metric="step")
        self.folder = str(self._run.dir)
        """The folder of the run's files."""

    def write(self, values: Mapping[str, Value], step: int) -> None:
        """Write one line of the run's history."""
        self._run.log({"step": step, **{name: self._own(value) for name, value in values.items()}})

    def close(self) -> None:
        """End the run."""
        self._run.finish()

    def __enter__(self) -> WandbSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _own(self, value: Value) -> Any:
        if isinstance(value, Histogram):
            return self._wandb.Histogram(np_histogram=(np.asarray(value.counts), np.asarray(value.edges)))
        if isinstance(value, Picture):
            return self._wandb.Image(value.image())
        return value


# TensorBoard: event files, written by torch's own `SummaryWriter`.


class TensorBoardSink:
    """Writes event files to ``folder``: ``tensorboard --logdir FOLDER`` shows them. Needs the extra ``tensorboard``.

    Use as a context manager, or call `close`. Raises SpecError without TensorBoard, and for a folder that cannot be
    written.
    """

    def __init__(self, folder: str) -> None:
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            text = f'a TensorBoard sink needs TensorBoard ({error}): pip install "isthmus[tensorboard]"'
            raise SpecError(text) from error
        self._make: Any = Summary
        try:
            self._writer: Any = SummaryWriter(folder)
        except OSError as error:
            raise SpecError(f"tensorboard: {folder} cannot be written: {error.strerror or error}") from error

    def write(self, values: Mapping[str, Value], step: int) -> None:
        """Write scalars, histograms (by the bins' middles and counts), images and texts."""
        writer = self._writer
        scalars = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        if scalars:  # all in one event, which is far quicker than one for each
            found = [self._make.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            writer.file_writer.add_summary(self._make(value=found), step)
        for name, value in values.items():
            if isinstance(value, Histogram):
                writer.add_histogram_raw(name, **_raw(value), global_step=step)
            elif isinstance(value, Picture):
                writer.add_image(name, np.asarray(value.image().convert("L")), step, dataformats="HW")
            elif isinstance(value, str):
                writer.add_text(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _raw(value: Histogram) -> dict[str, object]:
    """Return the format's fields; sums use the bins' middles, as the elements are not kept."""
    edges, counts = np.asarray(value.edges), np.asarray(value.counts)
    middles = (edges[:-1] + edges[1:]) / 2
    return {
        "min": value.low,
        "max": value.high,
        "num": int(counts.sum()),
        "sum": float((middles * counts).sum()),
        "sum_squares": float((middles**2 * counts).sum()),
        "bucket_limits": edges[1:].tolist(),
        "bucket_counts": counts.tolist(),
    }


KINDS: Final[Mapping[str, Callable[[str], Sink]]] = {"tensorboard": TensorBoardSink, "wandb": WandbSink}
FORMS: Final = "tensorboard:DIR, wandb:PROJECT, or module:callable[:TEXT] of your own"


def open_sink(text: str) -> Sink:
    """Open a sink by its description. Raises SpecError for an unknown one, a missing package, and an
    unwritable target.
    """
    kind, _, rest = text.partition(":")
    if kind in KINDS:
        if not rest:
            raise SpecError(f'sink {text}: what comes after "{kind}:" is missing; there are {FORMS}')
        return KINDS[kind](rest)
    name, _, argument = rest.partition(":")
    hint = near(kind, KINDS)
    if hint or not name:
        raise SpecError(f'sink: no sink is called "{kind[:80]}".{hint} There are {FORMS}')
    make = resolve(f"{kind}:{name}", Path.cwd(), f"sink {text}")
    try:
        made = make(argument) if argument else make()
    except Exception as error:
        raise SpecError(f"sink {text}: making it raised {type(error).__name__}: {error}") from error
    missing = [method for method in ("write", "close") if not callable(getattr(made, method, None))]
    if missing:
        raise SpecError(f"sink {text}: what {name} returns has no method {' and no method '.join(missing)}")
    sink: Sink = made
    return sink


# The findings of observers, as a sink's values. A name is the module's and the field's: ``stem.0/mean``.

MOST: Final = 64
"""Maximum numbers of one list, such as one per head."""
NOT_NUMBERS: Final = ("nan", "inf", "-inf")
"""Texts of non-finite numbers, as `plain` writes them."""
PLACES: Final = ("name", "step", "part", "row", "of")
"""Fields that say where a record is from."""


def of_records(records: Iterable[Record | Mapping[str, Any]]) -> dict[str, Value]:
    """Return the values of one forward's records, an observer's own or as dictionaries from an answer.

    They are numbers and readings that have a value, the numbers of a list by index, histograms, pictures, and tokens'
    text. Fields that are no measurement (dtype, shape, where) are left out.
    """
    found: dict[str, Value] = {}
    for record in records:
        fields = record if isinstance(record, Mapping) else plain(record)
        where = _where(fields)
        for key, value in _values(fields):
            found[f"{where}/{key}"] = value
    return found


def write_records(sink: Sink, *observers: Observer, prefix: str = "") -> None:
    """Write all records that observers keep, step by step, of modules in this process."""
    steps: dict[int, list[Any]] = {}
    for record in (record for observer in observers for record in observer.records):
        steps.setdefault(record.step, []).append(record)
    for step, records in sorted(steps.items()):
        sink.write({f"{prefix}{name}": value for name, value in of_records(records).items()}, step)


def _where(fields: Mapping[str, Any]) -> str:
    part = str(fields.get("part", ""))
    name = f"{fields['name']}[{part}]" if part not in ("", "0") else str(fields["name"])
    name = f"{name}/gradient of {fields['of']}" if fields.get("of") else name
    return f"{name}/row {fields['row']}" if "row" in fields else name


def _values(fields: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    for key, value in fields.items():
        if key in PLACES or key in ("low", "high") or fields.get(key.removesuffix("_max")) == "":
            continue  # the last: the value shown as white in a picture that does not exist
        if key == "histogram":
            if (histogram := _histogram(fields)) is not None:
                yield key, histogram
        elif key == "picture":
            if (picture := _picture(value)) is not None:
                yield key, picture
        elif key == "text":
            if isinstance(value, list) and value:
                yield key, ", ".join(map(str, value))
        elif isinstance(value, list):
            if all(isinstance(one, float) or one in NOT_NUMBERS for one in value):
                yield from ((f"{key}/{place}", float(one)) for place, one in enumerate(value[:MOST]))
        else:
            number = value.get("value") if isinstance(value, dict) else value
            if number in NOT_NUMBERS or (isinstance(number, (int, float)) and not isinstance(number, bool)):
                yield key, _float(number)


def _float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond any float
        return math.inf


def _histogram(fields: Mapping[str, Any]) -> Histogram | None:
    counts, low, high = fields["histogram"], fields.get("low"), fields.get("high")
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high
    if not numbers or not isinstance(counts, list) or not all(isinstance(one, int) and one >= 0 for one in counts):
        return None
    return Histogram(_float(low), _float(high), tuple(counts)) if sum(counts) else None


def _picture(text: Any) -> Picture | None:
    try:
        return Picture(base64.b64decode(text, validate=True)) if text else None
    except (binascii.Error, TypeError, ValueError):
        return None

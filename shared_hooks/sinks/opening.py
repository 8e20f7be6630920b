"""Sinks by the words of a command line: ``tensorboard:DIR``, ``wandb:PROJECT``, ``module:callable[:TEXT]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np

from shared_hooks.config import resolve
from shared_hooks.errors import SpecError, near
from shared_hooks.sinks.sink import Histogram, Picture, Sink, Value

# Weights & Biases, offline: a run's file on this disk; ``wandb sync`` sends it, if and when somebody wants that.


class WandbSink:
    """A run of ``project`` below ``folder`` (default: ``WANDB_DIR``, else here), named ``wandb/offline-run-...``.

    Always offline: nothing is sent, and no account is needed; hardware, packages, git and code are not noted. Needs the
    extra ``wandb``. Use as a context manager, or call `close`. Raises SpecError without the package, and where no run
    can begin.
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
        self._run.define_metric("*", step_metric="step")  # its own count of steps would drop what comes out of order
        self.folder = str(self._run.dir)
        """Where the run's files are."""

    def write(self, values: Mapping[str, Value], step: int) -> None:
        """One line of the run's history."""
        self._run.log({"step": step, **{name: self._own(value) for name, value in values.items()}})

    def close(self) -> None:
        """Ends the run."""
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
    """Event files in ``folder``: ``tensorboard --logdir FOLDER`` shows them. Needs the extra ``tensorboard``.

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
        """Scalars, histograms (by their middles and counts), images, texts."""
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
        """Flushes."""
        self._writer.close()

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _raw(value: Histogram) -> dict[str, object]:
    """What the format keeps: sums are of the bins' middles, for the elements are gone."""
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
    """Raises SpecError: for words that name none, for a package that is not installed, for what cannot be written."""
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

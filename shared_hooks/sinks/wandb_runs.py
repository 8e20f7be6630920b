"""Weights & Biases, offline: a run's file on this disk; ``wandb sync`` sends it, if and when somebody wants that."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from shared_hooks.errors import SpecError
from shared_hooks.sinks.sink import Histogram, Picture, Value


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

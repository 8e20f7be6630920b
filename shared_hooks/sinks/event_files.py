"""TensorBoard: event files, written by torch's own `SummaryWriter`."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import numpy as np

from shared_hooks.errors import SpecError
from shared_hooks.sinks.sink import Histogram, Picture, Value


class TensorBoardSink:
    """Event files in ``folder``: ``tensorboard --logdir FOLDER`` shows them. Needs the extra ``tensorboard``.

    Use as a context manager, or call `close`. Raises SpecError without TensorBoard, and for a folder that cannot be
    written.
    """

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            text = f'a TensorBoard sink needs TensorBoard ({error}): pip install "isthmus[tensorboard]"'
            raise SpecError(text) from error
        try:
            self._writer = SummaryWriter(folder)
        except OSError as error:
            raise SpecError(f"tensorboard: {folder} cannot be written: {error.strerror or error}") from error

    def write(self, values: Mapping[str, Value], step: int) -> None:
        """Scalars, histograms (by their middles and counts), images, texts."""
        writer = self._writer
        for name, value in values.items():
            if isinstance(value, Histogram):
                writer.add_histogram_raw(name, **_raw(value), global_step=step)
            elif isinstance(value, Picture):
                pixels = np.asarray(value.image().convert("L"))
                writer.add_image(name, pixels, step, dataformats="HW")
            elif isinstance(value, str):
                writer.add_text(name, value, step)
            else:
                writer.add_scalar(name, value, step)

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

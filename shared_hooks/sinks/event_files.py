"""TensorBoard: event files, written by torch's own `SummaryWriter`."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

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

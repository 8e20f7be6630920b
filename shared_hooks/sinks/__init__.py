"""Where numbers of observers and metrics go: TensorBoard, Weights & Biases, or a sink of one's own.

sink         `Sink`, and what it is given: numbers, histograms, pictures, texts
records      what observers found, as a sink's values
opening      ``tensorboard:DIR``, ``wandb:PROJECT``, ``module:callable`` -> a sink
"""

from shared_hooks.sinks.opening import open_sink
from shared_hooks.sinks.records import of_records, write_records
from shared_hooks.sinks.sink import Histogram, Picture, Sink, Value

__all__ = [
    "Histogram",
    "Picture",
    "Sink",
    "Value",
    "of_records",
    "open_sink",
    "write_records",
]

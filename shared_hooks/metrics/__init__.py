"""Measure a forward, layer by layer.

records      the records of a layer and of a forward; each number names its source
measurement  turns the marks of one forward into records
sampler      the thread that reads sensors; throttling of processors and GPUs
energy       energy meters, one function per backend

May import modules, tensors, errors.
"""

from shared_hooks.metrics.measurement import Measurement, gpu_of
from shared_hooks.metrics.records import (
    CACHED_LAYERS,
    FORWARD_READINGS,
    LAYER_READINGS,
    NO_LAYERS,
    NOT_SAMPLED,
    STATUSES,
    ForwardMetrics,
    LayerColumns,
    LayerMetrics,
    LayerReadings,
    LayerTable,
    Reading,
    Status,
    TensorShape,
    output_bytes,
)
from shared_hooks.metrics.sampler import SEARCHING, Sampler, Track

__all__ = [
    "CACHED_LAYERS",
    "FORWARD_READINGS",
    "LAYER_READINGS",
    "NOT_SAMPLED",
    "NO_LAYERS",
    "SEARCHING",
    "STATUSES",
    "ForwardMetrics",
    "LayerColumns",
    "LayerMetrics",
    "LayerReadings",
    "LayerTable",
    "Measurement",
    "Reading",
    "Sampler",
    "Status",
    "TensorShape",
    "Track",
    "gpu_of",
    "output_bytes",
]

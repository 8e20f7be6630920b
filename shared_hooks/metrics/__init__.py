"""What a forward took, layer by layer.

records      the records: of a layer, of a forward; each number says where it comes from
measurement  marks of one forward -> its records
sampler      the thread that reads sensors, and what a layer had of that; what holds a processor or a GPU back
energy       meters, one file a backend

May import modules, tensors, errors.
"""

from shared_hooks.metrics.measurement import Measurement, gpu_of
from shared_hooks.metrics.records import (
    FORWARD_READINGS,
    LAYER_READINGS,
    NOT_SAMPLED,
    STATUSES,
    ForwardMetrics,
    LayerMetrics,
    Reading,
    Status,
    TensorShape,
    output_bytes,
)
from shared_hooks.metrics.sampler import SEARCHING, Sampler, Track

__all__ = [
    "FORWARD_READINGS",
    "LAYER_READINGS",
    "NOT_SAMPLED",
    "SEARCHING",
    "STATUSES",
    "ForwardMetrics",
    "LayerMetrics",
    "Measurement",
    "Reading",
    "Sampler",
    "Status",
    "TensorShape",
    "Track",
    "gpu_of",
    "output_bytes",
]

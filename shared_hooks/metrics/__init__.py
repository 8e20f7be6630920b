"""What a forward took, layer by layer.

records     the records: of a layer, of a forward
measurement marks of one forward -> its records
sampler     the thread that reads sensors
series      samples -> measured, estimated, nothing
reading     a number that says where it comes from
energy      meters, one file a backend

May import modules, tensors, errors.
"""

from shared_hooks.metrics.measurement import Allocated, CudaMemory, Measurement, gpu_of
from shared_hooks.metrics.reading import STATUSES, Reading, Status
from shared_hooks.metrics.records import (
    FORWARD_READINGS,
    LAYER_READINGS,
    NOT_SAMPLED,
    ForwardMetrics,
    LayerMetrics,
    TensorShape,
    output_bytes,
)
from shared_hooks.metrics.sampler import SEARCHING, Sampler
from shared_hooks.metrics.series import Track

__all__ = [
    "FORWARD_READINGS",
    "LAYER_READINGS",
    "NOT_SAMPLED",
    "SEARCHING",
    "STATUSES",
    "Allocated",
    "CudaMemory",
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

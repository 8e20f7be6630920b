"""The Open Inference Protocol without its transports: whole models and tails, for clients other than edge clients.

Every request is a stream in this process (`cloud_server.streams`), so that everything which limits and protects streams
applies: permissions, places, quotas, memory, rehearsals, fair shares, deadlines, draining.

service  what is served, and how a request is answered
sending  a request and its answer as the transports have them, and as an edge client would send them

May import core, streams, models, access, limits.
"""

from cloud_server.inference.sending import (
    MAX_VALUES,
    NAMES,
    NUMPY,
    VALUE_BYTES,
    InferenceResult,
    NamedElements,
    Query,
    Value,
    pack,
    unpack,
)
from cloud_server.inference.service import HeldBytes, Inference, InferenceCall, ModelInfo, TensorInfo, check_parameters

__all__ = [
    "MAX_VALUES",
    "NAMES",
    "NUMPY",
    "VALUE_BYTES",
    "HeldBytes",
    "Inference",
    "InferenceCall",
    "InferenceResult",
    "ModelInfo",
    "NamedElements",
    "Query",
    "TensorInfo",
    "Value",
    "check_parameters",
    "pack",
    "unpack",
]

"""What `EdgeClient` gives back: an answer, or a failure in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_client.load import Load
from edge_client.transport import Times
from edge_client.witness import Witness
from shared_hooks import LayerMetrics
from shared_hooks.metrics import ForwardMetrics
from shared_hooks.observers.named import Observations


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's output for one input, and what it took."""

    output: Any  # the model's own structure, tensors on the CPU
    request_id: int
    split: str  # name of the layer after which the model was cut; "input": before the first; or a mode without a cut
    layer_id: int | None  # ... its id; -1 for "input" and for an input file; None for "edge-only"
    times: Times  # rows that add up to `measured_ns`
    layers_edge: Sequence[LayerMetrics]
    layers_cloud: Sequence[LayerMetrics]
    bytes_up: int  # header and payload, without the wire's own framing; one sending
    bytes_down: int
    sends: int  # 1, and one more for each time it was sent again
    measured_ns: int  # from the call to the decoded answer, by two readings of one clock, without what witnesses took
    finished_ns: int  # the second reading, to continue measuring from (`times.now_ns`); with a witness, after it
    load: Load | None = None  # how busy the server was; None without a server, or if it does not say
    forward_edge: ForwardMetrics | None = None  # each side's forward as a whole; None without metrics
    forward_cloud: ForwardMetrics | None = None
    observations: Mapping[str, Observations] = field(default_factory=dict)  # "edge", "cloud": what observers found
    transforms: Sequence[str] = ()  # modules whose output is changed: the edge's, then the cloud's
    fallback: str = ""  # why it was answered on the edge, though it was to be split; empty: it was not
    witness: Witness | None = None  # the comparison with the whole model here; None: it was not compared


@dataclass(frozen=True, slots=True)
class Failure:
    """Takes the place of an answer: input number ``index`` (from 0) failed with ``error``."""

    index: int
    item: Any
    error: Exception

"""Head and tail in this one process, through bytes as on the wire: is it exact, and what does a split itself cost?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edge_client.transport import Times, now_ns
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.metrics import ForwardMetrics, LayerMetrics


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """As `Answer`, of a request that went nowhere. The cloud's rows are the tail's, run here."""

    output: Any
    layer_id: int
    times: Times
    layers_edge: Sequence[LayerMetrics]
    layers_cloud: Sequence[LayerMetrics]
    forward_edge: ForwardMetrics | None
    forward_cloud: ForwardMetrics | None
    bytes_up: int
    measured_ns: int
    finished_ns: int
    bytes_down: int = 0
    sends: int = 0
    codecs: Sequence[str] = ()


def split_here(
    wrapped: WrappedModel, args: tuple[Any, ...], kwargs: dict[str, Any], cut: str, codec: str, called: int
) -> LocalAnswer:
    """One request; ``called``: when it began (`now_ns`), before its input was read. Raises what the engine raises."""
    prepared = now_ns()
    early: EarlyOutput = wrapped.head(cut, *args, **kwargs)
    returned = now_ns()
    _wait(wrapped)
    head_ns = wrapped.durations().get("head", 0) + now_ns() - returned
    layers_edge, forward_edge = _metrics(wrapped)
    computed = now_ns()
    data = early.to_bytes(codec=codec)
    packed = now_ns()
    arrived = EarlyOutput.from_bytes(data, max_bytes=len(data) + (1 << 30))
    unpacked = now_ns()
    output = wrapped.tail(arrived)
    _wait(wrapped)
    finished = now_ns()
    inject_ns = wrapped.durations().get("inject", 0)
    layers_cloud, forward_cloud = _metrics(wrapped)
    times = Times(
        prepare=prepared - called,
        edge_other=computed - prepared - head_ns,
        edge_compute=head_ns,
        encode=packed - computed,
        server_decode=unpacked - packed,
        server_inject=inject_ns,
        server_compute=finished - unpacked - inject_ns,
    )
    return LocalAnswer(
        output=output,
        layer_id=early.layer_id,
        times=times,
        layers_edge=layers_edge,
        layers_cloud=layers_cloud,
        forward_edge=forward_edge,
        forward_cloud=forward_cloud,
        bytes_up=len(data),
        measured_ns=finished - called,
        finished_ns=finished,
    )


def _metrics(wrapped: WrappedModel) -> tuple[Sequence[LayerMetrics], ForwardMetrics | None]:
    return (wrapped.get_layer_metrics(), wrapped.get_forward_metrics()) if wrapped.metrics_enabled else ([], None)


def _wait(wrapped: WrappedModel) -> None:
    if wrapped.device.type == "cuda":  # else the device's time would count as what comes next
        torch.cuda.synchronize(wrapped.device)

"""A tail for who speaks the Open Inference Protocol to a server, and not the edge client's own: docs/doors.md."""

from __future__ import annotations

import base64

import numpy as np
import numpy.typing as npt
import torch

from edge_client.transport.wire import hello_frame
from shared_hooks import EarlyOutput, WrappedModel

INPUT = "isthmus_frontier"
"""The name of the request's only input."""


def tail_request(
    wrapped: WrappedModel, model_id: str, early: EarlyOutput, codec: str = "raw"
) -> tuple[npt.NDArray[np.uint8], dict[str, str]]:
    """What a request for the tail brings: the elements (UINT8) of its only input, `INPUT`, and its parameters.

    ``early`` is what a head of ``wrapped`` gave; ``model_id`` is what the server calls the model. The parameters say
    which model that was, so that a server with another one refuses.
    """
    greeting = hello_frame(
        client_id="",
        model_id=model_id,
        weights_hash=wrapped.weights_hash(),
        structure_digest=wrapped.structure_digest(),
        plan_digest="",
        environment=wrapped.environment(),
        about={"torch": torch.__version__},
    )
    hello = base64.b64encode(greeting.hello.SerializeToString(deterministic=True)).decode()
    parameters = {"isthmus_split": early.layer_name, "isthmus_hello": hello}
    return np.frombuffer(early.to_bytes(codec), dtype=np.uint8), parameters

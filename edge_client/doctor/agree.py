"""What a server serves, whether this side has the same, and whether a request comes back as the model's own answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import grpc
import torch

from edge_client.call import Call
from edge_client.client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.dial import dial
from edge_client.doctor.reach import clock
from edge_client.model_choice import ModelChoice
from edge_client.modes import EDGE_ONLY
from edge_client.transport import ConnectionOptions, verdict
from protos.isthmus.v1 import split_pb2
from protos.isthmus.v1.split_pb2_grpc import SplitStub
from shared_hooks.doctor import Finding, ok, warning, wrong
from shared_hooks.errors import AccessRefused, Disagreement, IsthmusError, NotAuthenticated, UnknownModel
from shared_hooks.tensors import identical

SECONDS: Final = 15.0
MEND: Final = {
    ": the tensor ": "the same weights (--weights FILE), of the same model, on both sides",
    ": class: ": "the same code and spec of the model on both sides",
    "code of ": "the same version of the model's code (or of the library it comes from) on both sides",
    "operation ": "the same code of the model, and versions of torch that do the same operations",
    "weights": "give both sides the same weights (--weights FILE)",
    "structure": "the same code, spec, --depth and --selection on both sides",
    "plan": "the same code of the model, and versions of torch that do the same operations",
    "setting": "the same setting on both sides: it changes kernels",
    "protocol": "the same version of Isthmus on both sides",
}
_DIFFERENCES: Final = re.compile(r"client and server differ in (.*?)(?: \(client: |$)", re.DOTALL)


def served(server: str, credentials: Credentials) -> Iterator[Finding]:
    """What `ListModels` says: models, versions, clock."""
    with dial(server, credentials=credentials) as channel:
        stub: Any = SplitStub(channel)
        try:
            reply = stub.ListModels(split_pb2.ListModelsRequest(), timeout=SECONDS)
        except grpc.RpcError as error:
            found = verdict.refusal(error, server, credentials)
            yield wrong("models", f"{found}", _mend(found))
            return
    if reply.unix_seconds:
        yield clock(reply.unix_seconds)
    if not reply.models:
        yield wrong("models", "none is served for this identity", "the server's [models], or `models` of the identity")
    for one in reply.models:
        yield ok("models", f"{one.model_id}: {one.layers} layers, weights {one.weights_hash}")
    about = _machine(reply)
    if about:
        names = ("isthmus", "torch", "python", "device", "threads", "cpu")
        yield ok("server", ", ".join(f"{name} {about[name]}" for name in names if about.get(name) is not None))


def greeted(server: str, credentials: Credentials, choice: ModelChoice) -> Iterator[Finding]:
    """The greeting, as every client begins; then one request, compared with the whole model here."""
    connection = ConnectionOptions(patience=SECONDS, credentials=credentials)
    client = EdgeClient(server, choice, "input", connection=connection)
    try:
        yield from _greeting(client)
    finally:
        client.close()


def _greeting(client: EdgeClient) -> Iterator[Finding]:
    try:
        client.open(SECONDS)
    except Disagreement as error:
        yield from differences(f"{error}")
        return
    except IsthmusError as error:
        yield wrong("greeting", f"{type(error).__name__}: {error}", _mend(error))
        return
    device = client.device
    yield ok("greeting", f"model, weights, structure and settings agree (here: torch {torch.__version__}, {device})")
    example = None if client.spec is None else client.spec.example(device)
    if example is None:
        yield warning("request", "none was tried: the spec has no example input", "give it one, or try edge-client run")
        return
    call = Call(*example)
    try:
        first = client.infer(*call.args, **call.kwargs)
        answer = client.infer(*call.args, **call.kwargs)  # the first one's tail is worked out for the first time
    except IsthmusError as error:
        yield wrong("request", f"{type(error).__name__}: {error}", _mend(error))
        return
    here = client.infer(*call.args, **call.kwargs, split=EDGE_ONLY).output
    took = f"{first.times.end_to_end / 1e6:.1f} ms, then {answer.times.end_to_end / 1e6:.1f} ms"
    if identical(answer.output, here):
        yield ok("request", f"the server's answer is this side's, bit for bit; {took}")
    else:
        says = f"the server's answer differs from this side's by some bits; {took}"
        yield warning("request", says, "right for two kinds of processor; else compare versions of torch and --threads")


def differences(text: str) -> Iterator[Finding]:
    """A refusal's text, one finding for each thing in which the two sides differ."""
    found = _DIFFERENCES.search(text)
    for each in found[1].split("; ") if found else [text]:
        mend = next((mend for name, mend in MEND.items() if name in each), "the server's log may say more")
        yield wrong("agreement", each, mend)


def _machine(reply: split_pb2.ListModelsReply) -> dict[str, Any]:
    try:
        found = json.loads(reply.models[0].machine) if reply.models else {}
    except (ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}


def _mend(error: IsthmusError) -> str:
    if isinstance(error, NotAuthenticated):
        return "--token-file, or --cert and --key, as the server wants them"
    if isinstance(error, AccessRefused):
        return "the identity's entry in the server's file of identities"
    if isinstance(error, UnknownModel):
        return "--model with one of these names, or serve it there"
    return "the server's log may say more"

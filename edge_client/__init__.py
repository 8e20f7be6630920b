"""The edge side: run a model up to a cut, stream what crosses it to a cloud server, get the model's own output.

client.py       `EdgeClient`: infer, infer_many
many.py         many inputs, several under way, answers in order
requests.py     head, request, answer; or everything here
half.py         the model's half on this side
answer.py       `Answer`, `Failure`, `Call`
times.py        where the time of a request went
connection.py   the standing connection, broken and mended
state.py        `State`: its life
witness.py      `Witness`: answers computed whole here, too
comparison.py   how far two outputs are apart
moment.py       what a forward may change, as it is at one moment
model_choice.py `ModelChoice`: which model, on what device; made once, handed on
old_keywords.py what `EdgeClient` took before
options.py      its limits; `KeepAlive`
verdict.py      what the end of a stream means
probing.py      what the link carries; the server's profile
prober.py       rounds of bytes on a stream of their own
local_server.py a cloud server of one's own on loopback
orphans.py      children of a process that is killed
waiting.py      who waits for a stream or an answer
dial.py         the one place that opens a channel
stream.py       one gRPC stream
inbox.py        what comes on it
outbox.py       what a stream has still to send; back-pressure
exchange.py     one request and its answer
backoff.py      delays between attempts
loaded.py       a model with an input to plan on
progress.py     how far it is, on standard error
observation_table.py  what observers found, as tables
text.py         numbers as text; text from elsewhere, made fit to be shown
wire.py         protobuf messages <-> frontiers
measured.py     layer metrics out of a reply
adaptive/       `AutoClient`: the cut chosen anew for every request
planning/       which cut is best, from profiles and the link
sweep/          every cut for real: tables, a page
pruning/        channel selection, judged
commands/       edge-client layers | verify | run | watch | hooks | profile | plan | sweep | compare | hierarchy | prune
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_client.adaptive import AutoClient
    from edge_client.answer import Answer, Call, Failure
    from edge_client.client import CONNECTION_ERRORS, EdgeClient
    from edge_client.model_choice import ModelChoice
    from edge_client.options import ConnectionOptions, KeepAlive
    from edge_client.state import State
    from edge_client.times import Times
    from edge_client.witness import Witness

_HOME = {
    "Answer": "answer",
    "AutoClient": "adaptive",
    "CONNECTION_ERRORS": "client",
    "Call": "answer",
    "ConnectionOptions": "options",
    "EdgeClient": "client",
    "Failure": "answer",
    "KeepAlive": "options",
    "ModelChoice": "model_choice",
    "State": "state",
    "Times": "times",
    "Witness": "witness",
}

__all__ = [
    "CONNECTION_ERRORS",
    "Answer",
    "AutoClient",
    "Call",
    "ConnectionOptions",
    "EdgeClient",
    "Failure",
    "KeepAlive",
    "ModelChoice",
    "State",
    "Times",
    "Witness",
]


def __getattr__(name: str) -> Any:
    """Public names, imported when used: the command line answers ``--help`` without loading torch."""
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"edge_client.{_HOME[name]}"), name)

"""The edge side: run a model up to a cut, stream what crosses it to a cloud server, get the model's own output.

client        `EdgeClient`: infer, infer_many
core          model, connection, the server's greeting, requests at a given cut
inputs        the arguments of infer, converted to a call
answer        `Answer`, `Failure`
call          a model's arguments; a server's reported load
user_input    one input, from a file or from memory
user_text        names of settings in messages; ways to run without a cut; parses sizes, rates, durations
sources       where inputs come from: files, videos, cameras
tracing       a trace for every request, for OpenTelemetry
model_choice  which model, on what device
dial          opens channels, and diagnoses failures
light         a client without PyTorch: heads as ONNX files
light_codecs  its codecs, in numpy
interrupts    Ctrl-C, never lost
intervention  activations changed on purpose
credentials   certificates and tokens for a server
options       options of tasks and commands, declared once
settings      the default server
choosing      the codec of every tensor
request       one request: head, transport, answer; or everything here
transport     the connection and its streams
witness       compares answers with the whole model's
probing       measures the link; fetches the server's profile
survey        gathers what a plan needs: link, server's profile, our own
planning      predicts and chooses the best cut
generation    split generation with generate() of transformers
adaptive      `AutoClient`: chooses the cut of every request
serving       a split language model behind OpenAI's protocol
live          a page in the browser, and sinks, while requests run
sweeping      measures every cut: tables and a report
pruning       evaluates channel selections
calibrating   the accuracy that codecs cost, at every cut
learning      trains codecs, and attacks on what crosses
benching      an open load on a server
tasks         the commands as functions: plan, profile, sweep, bench and others
process       a server that the client starts on loopback
screen        text, progress, tables
pages         shared parts of result pages: styles, charts
aio           `EdgeClient` for asyncio
doctor        diagnoses the way to a server
commands      the command line
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared_hooks.version import __version__

if TYPE_CHECKING:
    from edge_client import aio
    from edge_client.adaptive import AutoClient, AutoOptions
    from edge_client.answer import Answer, Failure
    from edge_client.benching.light import bench_heads
    from edge_client.call import Call
    from edge_client.client import EdgeClient
    from edge_client.core import CONNECTION_ERRORS
    from edge_client.credentials import Credentials
    from edge_client.generation import SplitGenerator, split_model
    from edge_client.light import LightClient
    from edge_client.model_choice import ModelChoice
    from edge_client.process import local_server
    from edge_client.request import Pending
    from edge_client.tasks.bench import bench
    from edge_client.tasks.calibrate import calibrate
    from edge_client.tasks.export import export
    from edge_client.tasks.hierarchy import hierarchy
    from edge_client.tasks.layers import layers
    from edge_client.tasks.leakage import leakage
    from edge_client.tasks.learn import learn
    from edge_client.tasks.plan import plan, plan_chain
    from edge_client.tasks.plan_generation import plan_generation
    from edge_client.tasks.profile import profile
    from edge_client.tasks.prune import prune
    from edge_client.tasks.sweep import sweep
    from edge_client.tasks.verify import verify
    from edge_client.transport import ConnectionOptions, KeepAlive, State, Times
    from edge_client.witness import Witness

_HOME = {
    "Answer": "answer",
    "AutoClient": "adaptive",
    "AutoOptions": "adaptive",
    "CONNECTION_ERRORS": "core",
    "Call": "call",
    "ConnectionOptions": "transport.options",
    "Credentials": "credentials",
    "EdgeClient": "client",
    "Failure": "answer",
    "KeepAlive": "transport.options",
    "LightClient": "light",
    "ModelChoice": "model_choice",
    "Pending": "request",
    "SplitGenerator": "generation",
    "State": "transport.options",
    "Times": "transport.times",
    "Witness": "witness",
    "bench": "tasks.bench",
    "bench_heads": "benching.light",
    "calibrate": "tasks.calibrate",
    "export": "tasks.export",
    "hierarchy": "tasks.hierarchy",
    "layers": "tasks.layers",
    "leakage": "tasks.leakage",
    "learn": "tasks.learn",
    "local_server": "process",
    "plan": "tasks.plan",
    "plan_chain": "tasks.plan",
    "plan_generation": "tasks.plan_generation",
    "profile": "tasks.profile",
    "prune": "tasks.prune",
    "split_model": "generation",
    "sweep": "tasks.sweep",
    "verify": "tasks.verify",
}

__all__ = [
    "CONNECTION_ERRORS",
    "Answer",
    "AutoClient",
    "AutoOptions",
    "Call",
    "ConnectionOptions",
    "Credentials",
    "EdgeClient",
    "Failure",
    "KeepAlive",
    "LightClient",
    "ModelChoice",
    "Pending",
    "SplitGenerator",
    "State",
    "Times",
    "Witness",
    "__version__",
    "aio",
    "bench",
    "bench_heads",
    "calibrate",
    "export",
    "hierarchy",
    "layers",
    "leakage",
    "learn",
    "local_server",
    "plan",
    "plan_chain",
    "plan_generation",
    "profile",
    "prune",
    "split_model",
    "sweep",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Public names, imported when used: the command line answers ``--help`` without loading torch."""
    from importlib import import_module

    if name == "aio":
        return import_module("edge_client.aio")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"edge_client.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, and what every module has."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

"""The cloud process of Isthmus: receives what crosses a cut, runs the tail of the model, answers with its output.

core        the server without its transport: frames in, frames out
executor    what a worker does with a batch: one request, several, or several steps
inference   the Open Inference Protocol, each request a stream of its own
streams     one client's stream; the link probed
requests    requests in progress, and how each ends
decoding    sessions that keep a model's state from step to step
models      the tail of a model; its profile
fleet       models loaded and unloaded, on several devices
scheduling  what the workers do next, and the threads that do it
processes   worker processes, in which tails are computed
wire        frames that answer no request
transport   gRPC, with health and reflection
chain       the next servers of chains: a part computed here, the rest by them
cluster     replicas on many machines, and fronts before them: Ray Serve
access      callers and their permissions
telemetry   metrics and traces
doctor      checks before serving
limits      every bound in one place
arguments   the command lines, and addresses in them
config      what is served and how: the TOML file, and the command line on top of it
cli         what the command does
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared_hooks.version import __version__

if TYPE_CHECKING:
    from cloud_server.config import ModelEntry, ServerConfig, read_config
    from cloud_server.core import Core
    from cloud_server.limits import Limits
    from cloud_server.models import ServedModel
    from cloud_server.transport import CloudServer

_HOME = {
    "CloudServer": "transport",
    "Core": "core",
    "Limits": "limits",
    "ModelEntry": "config",
    "ServedModel": "models",
    "ServerConfig": "config",
    "read_config": "config",
}

__all__ = [
    "CloudServer",
    "Core",
    "Limits",
    "ModelEntry",
    "ServedModel",
    "ServerConfig",
    "__version__",
    "read_config",
]


def __getattr__(name: str) -> Any:
    """Public names, imported when used: the command line answers ``--help`` without loading torch."""
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"cloud_server.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, and those that every module has."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

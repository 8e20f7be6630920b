"""Live views of requests: a page in the browser, and sinks for their numbers.

dashboard    `Dashboard`: the page of one client, served while it works
light       `LightDashboard`: the same for a client without PyTorch
board       what the page shows: requests, events, the link, both machines, observers; bounded
server       the thread of its web server
to_sinks     `ToSinks`: every answer's numbers to sinks
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_client.live.dashboard import Dashboard
    from edge_client.live.light import LightDashboard
    from edge_client.live.to_sinks import ToSinks

__all__ = ["Dashboard", "LightDashboard", "ToSinks"]

_HOME = {"Dashboard": "dashboard", "LightDashboard": "light", "ToSinks": "to_sinks"}


def __getattr__(name: str) -> Any:
    """Import lazily: sinks need no web server."""
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"edge_client.live.{_HOME[name]}"), name)

"""The server seen from outside.

page        both as Prometheus metrics, on a port of their own
traces      a trace for every request, for OpenTelemetry
served      switched on and off with the server

May import core, access, limits. Nothing of it runs unless it is asked for.
"""

from cloud_server.telemetry.page import MetricsPage
from cloud_server.telemetry.served import RequestCounts, counted, measured, traced

__all__ = [
    "MetricsPage",
    "RequestCounts",
    "counted",
    "measured",
    "traced",
]

"""OpenTelemetry traces (extra ``otel``): one for each request, across both sides.

export  spans to a collector
spans   made from durations that are measured anyway, when a request has ended

Nothing of OpenTelemetry is imported before it is asked for.
"""

from shared_hooks.tracing.export import Export as Export
from shared_hooks.tracing.export import endpoint_of as endpoint_of
from shared_hooks.tracing.export import exporting as exporting
from shared_hooks.tracing.spans import CARRIED as CARRIED
from shared_hooks.tracing.spans import Tracing as Tracing

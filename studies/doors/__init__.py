"""Each door tried by the client it is for, on a real server process. ``make doors``.

process     the server
material    an input, its answer, and what crosses a cut
triton      tritonclient, by gRPC and by HTTP; curl
triton_asks  ... the script that runs with a client's own interpreter
scraping    a real Prometheus: every metric, every panel of the dashboard
collecting  OpenTelemetry: spans of both sides at a collector's port
"""

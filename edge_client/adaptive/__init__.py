"""``--split auto``: where to run, chosen anew for every request.

client         `AutoClient`: asks the controller, runs, tells it what that took
controller     which way to run now: pure, observations and the time are passed in
link_estimate  what the link carries now, from real transfers
tracker        a number followed through noisy observations
hedge          the whole model here, beside a request that is late
monitor        probes and calls at the server, when no request tells
decisions      what was decided, with its numbers
"""

from edge_client.adaptive.client import AutoClient

__all__ = ["AutoClient"]

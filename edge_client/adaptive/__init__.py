"""``--split auto``: where to run, chosen anew for every request.

client.py     `AutoClient`: asks the controller, runs, tells it what that took
hedge.py      the whole model here, beside a request that is late
watch.py      probes and calls at the server, when no request tells
decisions.py  what was decided, with its numbers

The controller itself, which is pure, is `edge_client.planning.controller`.
"""

from edge_client.adaptive.client import AutoClient

__all__ = ["AutoClient"]

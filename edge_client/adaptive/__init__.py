"""``--split auto``: where to run, chosen for every request.

beginning      profiles, link and controller, and the client that uses them
client         `AutoClient`: asks the controller, runs, reports what that took
controller     which way to run now: pure, observations and the time are passed in
steadiness     when what is better is enough better to move to it
probing        when the link is probed
hedge          the whole model here, beside a request that is late
monitor        probes and calls the server, when no request shows the link
decisions      what was decided, with its numbers
"""

from edge_client.adaptive.beginning import AutoOptions
from edge_client.adaptive.client import AutoClient

__all__ = ["AutoClient", "AutoOptions"]

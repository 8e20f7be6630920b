"""``--split auto``: chooses where to run for every request.

beginning   profiles, link and controller, and the client that uses them
chain       the cuts of a chain of servers, moved as links change
client      `AutoClient`: asks the controller, runs, hedges, reports what that took
controller  what to run now: pure logic, given observations and the time
monitor     probes and contacts the server when no request shows the link
"""

from edge_client.adaptive.beginning import AutoOptions
from edge_client.adaptive.client import AutoClient

__all__ = ["AutoClient", "AutoOptions"]

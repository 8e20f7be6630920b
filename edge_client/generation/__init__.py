"""Generation cut in two: the first layers and their caches here, the rest and theirs in a session at the server.

link  one decoding session's way to the server
"""

from edge_client.generation.link import SessionLink

__all__ = [
    "SessionLink",
]

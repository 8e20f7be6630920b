"""Who calls, and what one may.

caller  one who calls, as the server knows it
policy  what it may do, and how much of it

May import nothing of the server but limits.
"""

from cloud_server.access.caller import Caller
from cloud_server.access.policy import EVERYTHING, Policy

__all__ = [
    "EVERYTHING",
    "Caller",
    "Policy",
]

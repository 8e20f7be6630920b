"""Who calls, and what one may.

caller  one who calls, as the server knows it
policy  what it may do, and how much of it
quota   what it has used of that in the last minute

May import nothing of the server but limits.
"""

from cloud_server.access.caller import Caller
from cloud_server.access.policy import EVERYTHING, Policy
from cloud_server.access.quota import Quotas

__all__ = [
    "EVERYTHING",
    "Caller",
    "Policy",
    "Quotas",
]

"""Threads that compute.

workers    first come, first served
overtime   ends what takes too long
load       how busy they are

May import nothing of the server.
"""

from cloud_server.work.load import QueueClock
from cloud_server.work.overtime import Overtime, Watchdog
from cloud_server.work.workers import Job, Workers

__all__ = [
    "Job",
    "Overtime",
    "QueueClock",
    "Watchdog",
    "Workers",
]

"""Threads that compute.

workers    threads, and what waits for them
line       the order: accounts share the time, in each of them its clients
flows      who has had least
payer      on whose behalf
overtime   ends what takes too long
load       how long one waits
trim       freed memory goes back to the system

May import nothing of the server.
"""

from cloud_server.work.line import Line
from cloud_server.work.load import QueueClocks
from cloud_server.work.overtime import Overtime, Watchdog
from cloud_server.work.payer import Payer
from cloud_server.work.trim import Trim, few_heaps
from cloud_server.work.workers import Did, Job, Workers

__all__ = [
    "Did",
    "Job",
    "Line",
    "Overtime",
    "Payer",
    "QueueClocks",
    "Trim",
    "Watchdog",
    "Workers",
    "few_heaps",
]

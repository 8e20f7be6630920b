"""What the workers do, and in which order.

scheduler   the next batch: whose tasks, which together, whether there is time; and the threads
fair_queue  the order: accounts share the time, in each of them its clients

May import nothing of the server.
"""

from cloud_server.scheduling.fair_queue import FairQueue, Payer, Task
from cloud_server.scheduling.scheduler import (
    BatchLimits,
    Overtime,
    Scheduler,
    TaskResult,
    Trim,
    Watchdog,
    Workers,
    few_heaps,
)

__all__ = [
    "BatchLimits",
    "FairQueue",
    "Overtime",
    "Payer",
    "Scheduler",
    "Task",
    "TaskResult",
    "Trim",
    "Watchdog",
    "Workers",
    "few_heaps",
]

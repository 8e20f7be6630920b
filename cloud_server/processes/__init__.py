"""Tails in separate processes: a crash ends one request, not the service.

pooled_model    the engine that delegates to workers
crew            the workers: started, watched, replaced
worker          the program of a worker
worker_process  a worker as the server sees it
ranks           the processes among which one worker's models are divided
channel         messages between the two, and memory for payloads that both see
trials          cuts tried in a separate process, before they are served

May import models, wire, work, options, config, limits.
"""

from cloud_server.processes.pooled_model import Pool, PooledModel, payload_memory
from cloud_server.processes.trials import Trials
from cloud_server.processes.worker_process import Part, WorkerShare

__all__ = [
    "Part",
    "Pool",
    "PooledModel",
    "Trials",
    "WorkerShare",
    "payload_memory",
]

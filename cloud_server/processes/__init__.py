"""Tails in processes of their own: what ends one of them ends one request's turn, not the service.

pooled_model    the engine that hands its work to workers
crew            the workers: warm, watched, replaced
worker          one worker's own program
worker_process  ... as the server sees it
ranks           the processes among which one worker's models are divided
channel         messages between the two, and memory for payloads that both see
trials          cuts tried in a process of their own, before they are served

May import models, wire, work, options, config, limits.
"""

from cloud_server.processes.pooled_model import Pool, PooledModel, payload_memory
from cloud_server.processes.trials import Trials
from cloud_server.processes.worker_process import Part, Share

__all__ = [
    "Part",
    "Pool",
    "PooledModel",
    "Share",
    "Trials",
    "payload_memory",
]

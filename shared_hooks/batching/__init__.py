"""Requests of several callers at one cut, computed as one batch.

batches  `Batches`: which may join, and one tail for those that do
proof    rows together compared with rows alone, on random data; what tails take, by rows
family   plans of 1, 2 and 3 rows, and the cut of any number of rows
sizes    plans of an example at other sizes, and cuts whose tensors come by name

May import wrapped, tail, planning, crossing, forward, modules, tensors, sharing, errors.
"""

from shared_hooks.batching.batches import BatchedResult, Batches, Joinable
from shared_hooks.batching.family import Growth
from shared_hooks.batching.proof import BatchPart, Proof, apart, joined
from shared_hooks.batching.sizes import LaterCut, Ways

__all__ = [
    "BatchPart",
    "BatchedResult",
    "Batches",
    "Growth",
    "Joinable",
    "LaterCut",
    "Proof",
    "Ways",
    "apart",
    "joined",
]

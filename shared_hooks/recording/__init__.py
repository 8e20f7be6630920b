"""One forward recorded: the facts that plans are made from.

recordings  recorded as often as it takes -> a trace
recorder    one run: calls of modules, and what outlives it
operations  calls of torch functions
trace       the facts
kernels     what is read, overwritten and written, below
ledger      storages and values met meanwhile
carried     what stays in memory afterwards
escapes     memory in the hands of code outside torch
outliving   which changes of Python state affect the next run
memory_kept weights put back after a run that answers no request
repeats     calls that need not be recorded in detail again
collector   delays the garbage collector

May import purity, forward, state, crossing, metrics, modules, tensors, errors.
"""

from shared_hooks.recording.memory_kept import MemoryKept
from shared_hooks.recording.outliving import Judge, Taint, depends
from shared_hooks.recording.recordings import record
from shared_hooks.recording.trace import NEVER, Event, ModuleCall, Op, Storage, Trace, Value

__all__ = [
    "NEVER",
    "Event",
    "Judge",
    "MemoryKept",
    "ModuleCall",
    "Op",
    "Storage",
    "Taint",
    "Trace",
    "Value",
    "depends",
    "record",
]

"""One recorded forward: the facts from which plans are made.

recorder    one run, recorded as often as needed -> a trace
operations  calls of torch functions
trace       the facts
kernels     what is read, overwritten and written, at the level below
ledger      storages and values met on the way
outliving   which changes of Python state affect the next run

May import purity, forward, state, crossing, metrics, modules, tensors, errors.
"""

from shared_hooks.recording.outliving import Judge, Taint, depends
from shared_hooks.recording.recorder import record
from shared_hooks.recording.trace import NEVER, DataEvent, ModuleCall, Op, Storage, Trace, Value

__all__ = [
    "NEVER",
    "DataEvent",
    "Judge",
    "ModuleCall",
    "Op",
    "Storage",
    "Taint",
    "Trace",
    "Value",
    "depends",
    "record",
]

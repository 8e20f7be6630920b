"""One forward of a model, whatever it runs for.

session     layers numbered, timed, banked; values that nobody may read
context     settings that change kernels
operations  what counts as an operation
foresight   which operations need no data to know their result's form
allowance   what a forward may take: memory, time, threads

May import metrics, modules, tensors, errors.
"""

from shared_hooks.forward.allowance import Allowance, bounded, interruptible, uninterrupted
from shared_hooks.forward.foresight import Foresight, KernelForms, bytes_of_results, call_key, forms_key, on_meta
from shared_hooks.forward.operations import (
    COPIES_BYTES,
    FORM_OF_OTHERS,
    FORM_ONLY,
    HEADS,
    LAYOUT,
    NOTHING,
    OTHER_MEMORY,
    OVERWRITES,
    REFLECTED,
    Kind,
    arguments_of,
    by_truth,
    is_dense,
    is_escape,
    is_foreign,
    is_form,
    is_made_from_numbers,
    is_mapped,
    kind_of,
    literals_of,
    name_of,
    shape_from_data,
    unreflected,
)
from shared_hooks.forward.session import (
    UNSEEN,
    Dataless,
    Frame,
    HookExitException,
    Placeholder,
    Session,
    check_real,
    dataless_in,
    layer_name,
    run_plain,
    swapped,
    uninitialised,
)

__all__ = [
    "COPIES_BYTES",
    "FORM_OF_OTHERS",
    "FORM_ONLY",
    "HEADS",
    "LAYOUT",
    "NOTHING",
    "OTHER_MEMORY",
    "OVERWRITES",
    "REFLECTED",
    "UNSEEN",
    "Allowance",
    "Dataless",
    "Foresight",
    "Frame",
    "HookExitException",
    "KernelForms",
    "Kind",
    "Placeholder",
    "Session",
    "arguments_of",
    "bounded",
    "by_truth",
    "bytes_of_results",
    "call_key",
    "check_real",
    "dataless_in",
    "forms_key",
    "interruptible",
    "is_dense",
    "is_escape",
    "is_foreign",
    "is_form",
    "is_made_from_numbers",
    "is_mapped",
    "kind_of",
    "layer_name",
    "literals_of",
    "name_of",
    "on_meta",
    "run_plain",
    "shape_from_data",
    "swapped",
    "uninitialised",
    "uninterrupted",
    "unreflected",
]

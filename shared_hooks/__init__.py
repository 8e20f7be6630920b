"""The engine of Isthmus: walk any ``torch.nn.Module``, stop it after any layer, resume it in another process.

wrapped       `WrappedModel`
errors        every error raised on purpose
sharing       fair eviction at a bound
devices       devices of any kind that torch has
tensors       values and memory
config        reads users' TOML tables
files         atomic writes, journals
command_line  the parser of both commands
options       options declared once: keyword arguments and command-line options
modules       the model's modules, shims and digests
codecs        encodings of tensors
crossing      what crosses a cut, as both sides see it
state         Python state, compared and restored
metrics       measurements of a forward
tracing       OpenTelemetry spans, and where they go
lifecycle     stages and their hooks
doctor        findings, and how to mend them
selection     channels scored, masked, cut out
models        specs, weights, inputs; the shipped model
forward       one forward: layers, operations, settings
purity        modules proven to write no state
recording     one forward recorded
planning      from a recording to cuts
generation    split generation: models with state between calls
head          a forward that stops early
tail          a forward that starts late
middle        a forward that starts late and stops early
mapping       the module tree with what ran; ONNX files
explaining    one cut explained
verification  every cut against the whole model
runner        forwards of one model: whole, heads, tails, middles
compiling     tails compiled with torch.compile
observers     observe modules on either side
batching      requests of several callers as one batch
profiling     layers and cuts measured
picture       image files decoded in a process with limits of memory and time
frames        frames of videos and cameras
showing       representations of objects: a line, a table, a small picture
version       of all three packages
sinks         destinations of observers' and metrics' numbers
...

print(wrapped.explain("layer3.0.conv1", x))  # what crosses and why, and what the tail does

This folder holds what a `WrappedModel` does. Each package may import those above it in this list:

"""

from typing import TYPE_CHECKING, Any

from shared_hooks.version import __version__

if TYPE_CHECKING:
    from shared_hooks import errors
    from shared_hooks.crossing import Crossing, EarlyOutput, Parcel
    from shared_hooks.explaining import Explanation
    from shared_hooks.forward import HookExitException
    from shared_hooks.metrics import ForwardMetrics, LayerMetrics, TensorShape
    from shared_hooks.planning import LayerInfo, Plan
    from shared_hooks.tail import Recipe, RehearsalLimits
    from shared_hooks.tensors import identical
    from shared_hooks.verification import Report
    from shared_hooks.wrapped import WrappedModel

_HOME = {
    "Crossing": "crossing",
    "EarlyOutput": "crossing",
    "Explanation": "explaining",
    "ForwardMetrics": "metrics",
    "HookExitException": "forward",
    "LayerInfo": "planning",
    "LayerMetrics": "metrics",
    "Parcel": "crossing",
    "Plan": "planning",
    "Recipe": "tail",
    "RehearsalLimits": "tail",
    "Report": "verification",
    "TensorShape": "metrics",
    "WrappedModel": "wrapped",
    "identical": "tensors",
}

__all__ = [
    "Crossing",
    "EarlyOutput",
    "Explanation",
    "ForwardMetrics",
    "HookExitException",
    "LayerInfo",
    "LayerMetrics",
    "Parcel",
    "Plan",
    "Recipe",
    "RehearsalLimits",
    "Report",
    "TensorShape",
    "WrappedModel",
    "__version__",
    "errors",
    "identical",
]


def __getattr__(name: str) -> Any:
    """Public names, imported when used: an edge that only runs heads loads no tails, and a message loads no torch."""
    from importlib import import_module

    if name == "errors":
        return import_module("shared_hooks.errors")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"shared_hooks.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, and what every module has."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

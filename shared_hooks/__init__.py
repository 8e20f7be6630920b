"""The engine of Isthmus: walk any ``torch.nn.Module``, stop it after any layer, resume it in another process.

wrapped       `WrappedModel`
errors        every error raised on purpose
sharing       who of many is evicted at a bound
devices       devices of any kind that torch has
tensors       values and memory
config        what users write
files         written whole or not at all
command_line  the parser of both commands
options       options that are declared once: keyword arguments and words of a command
modules       the model as it stands
codecs        how a tensor's bytes travel
crossing      what crosses a cut, as both sides see it
state         Python state, compared and put back
metrics       what a forward took
tracing       OpenTelemetry spans, and where they go
lifecycle     stages, and hooks at them
doctor        findings, and how to mend them
selection     channels scored, masked, cut out
models        specs, weights, inputs; the shipped model
forward       one forward: layers, operations, settings
purity        modules that provably write no state
recording     one forward recorded
planning      from a recording to cuts
generation    step by step: models that keep state between calls, each half with its own
head          a forward that stops early
tail          a forward that starts late
middle        and stops early, too; which runs in a process of its own
mapping       the module tree joined with what ran; ONNX files
explaining    one cut explained
verification  every cut against the whole model
runs          forwards of one model: whole, heads, tails, middles
compiling     tails whose modules torch.compile has made faster
observers     looks at modules on either side
batching      requests of several callers as one batch
profiling     layers and cuts measured
picture       image files decoded in a process with limits of memory and time
frames        frames of videos and cameras
showing       what objects say of themselves: a line, a table, a small picture
version       of all three packages
sinks         where numbers of observers and metrics go
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
    """The public names, and what every module has."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

"""Isthmus' engine: walk any ``torch.nn.Module``, stop it after any layer, resume it there in another process.

wrapped = WrappedModel(model)
early = wrapped.head("layer3.0.conv1", x)  # or forward(x, end="layer3.0.conv1")
data = early.to_bytes()  # the values that cross, and the description of the cut (`Crossing`)
...
output = other.tail(EarlyOutput.from_bytes(data))  # or forward(early); it works out by itself what its tail does

print(wrapped.explain("layer3.0.conv1", x))  # what crosses and why, and what the tail does
"""

from shared_hooks import errors
from shared_hooks.crossing import Crossing
from shared_hooks.early import EarlyOutput
from shared_hooks.explanation import Explanation
from shared_hooks.metrics import ForwardMetrics, LayerMetrics, TensorShape
from shared_hooks.parcel import Parcel
from shared_hooks.plan import LayerInfo, Plan
from shared_hooks.recipe import Recipe
from shared_hooks.recipe_book import RehearsalLimits
from shared_hooks.report import Report
from shared_hooks.session import HookExitException
from shared_hooks.wrapped import WrappedModel

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
    "errors",
]

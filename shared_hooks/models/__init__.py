"""Build, feed and read models by their specs.

spec         `ModelSpec`: how a model is built, fed and read
inputs       input files and their labels; the example that both sides plan on
images       image file -> tensor; pictures of videos; files that a client sends
drawing      boxes and masks drawn on a model's input image, as a spec says
weights      safetensors, .pt, .pth -> model, strictly, on a device, all or a part
digits       the model that ships
"""

from shared_hooks.config import Table
from shared_hooks.frames import Frame, FrameId
from shared_hooks.models.drawing import Prediction
from shared_hooks.models.inputs import InputItem, find_inputs, truth_of
from shared_hooks.models.spec import BUILT_IN, ModelSpec, load_spec, spec_from_table
from shared_hooks.models.weights import pick_device, set_threads

__all__ = [
    "BUILT_IN",
    "Frame",
    "FrameId",
    "InputItem",
    "ModelSpec",
    "Prediction",
    "Table",
    "find_inputs",
    "load_spec",
    "pick_device",
    "set_threads",
    "spec_from_table",
    "truth_of",
]

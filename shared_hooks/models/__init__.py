"""Which models there are, and how to build, feed and read them.

named        `load_spec`: from a name or a file to a spec; the TOML format of docs/model-spec.md
spec         `ModelSpec`: a model is built, fed and read
example      the input both sides plan on
inputs       input files and their true labels; tensors from .npy and .safetensors
frames       a picture of a video or a camera
images       image file -> tensor
picture      ... decoded in a process with limits of memory and time
uploads      input files that a client sends as bytes
tokenizers   the tokenizer that a spec names
predictions  output -> `Prediction`
drawing      boxes, masks and classes on the picture that a model saw
weights      safetensors -> model, strictly
mapped       ... parameters that stay in their files until they are needed
unfilled     ... and a model built without memory for them
device       --device and --threads
digits       the model that ships
"""

from shared_hooks.config import Table
from shared_hooks.models.device import pick_device, set_threads
from shared_hooks.models.frames import Frame, FrameId
from shared_hooks.models.inputs import InputItem, find_inputs, truth_of
from shared_hooks.models.named import BUILT_IN, load_spec, spec_from_table
from shared_hooks.models.predictions import Prediction
from shared_hooks.models.spec import ModelSpec

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

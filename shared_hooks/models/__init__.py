"""Which models there are, and how to build, feed and read them.

spec.py         `ModelSpec`, `load_spec`: the TOML format of docs/model-spec.md
example.py      the input both sides plan on
inputs.py       input files and their truth; tensors from .npy and .safetensors
images.py       image file -> tensor
predictions.py  output -> `Prediction`
weights.py      safetensors -> model, strictly
targets.py      "module:callable"
table.py        TOML tables with precise complaints
device.py       --device and --threads
digits/         the model that ships
"""

from shared_hooks.models.device import pick_device, set_threads
from shared_hooks.models.inputs import InputItem, find_inputs, truth_of
from shared_hooks.models.predictions import Prediction
from shared_hooks.models.spec import BUILT_IN, ModelSpec, load_spec, spec_from_table
from shared_hooks.models.table import Table

__all__ = [
    "BUILT_IN",
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

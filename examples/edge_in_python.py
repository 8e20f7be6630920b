"""An edge that shares no code with Isthmus: onnxruntime runs an exported head, tritonclient asks for its tail.

edge-client export --model digits --split stage2.0.conv2 --output heads     (where PyTorch is)
cloud-server --model digits --tails stage2.0.conv2
python examples/edge_in_python.py 127.0.0.1:50051 heads shared_hooks/models/digits/images/*.png

Needs onnxruntime, tritonclient[grpc], numpy and Pillow.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import tritonclient.grpc as triton
from PIL import Image

DATATYPES = {"float32": "FP32", "float64": "FP64", "float16": "FP16", "int64": "INT64", "int32": "INT32"}


def pixels(file: str, how: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A picture as the manifest's ``preprocess`` says, for one that needs no crop."""
    height, width = how["size"]
    filter = Image.Resampling[how["interpolation"].upper()]
    image = Image.open(file).convert(how["mode"])
    image = image if image.size == (width, height) else image.resize((width, height), filter)
    values = np.asarray(image, np.float32).reshape(height, width, -1) * np.float32(how["scale"] / 255)
    values = (values - np.float32(how["mean"])) / np.float32(how["std"])
    return np.ascontiguousarray(values.transpose(2, 0, 1))[None]


def main(server: str, folder: str, *files: str) -> None:
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
    head = manifest["heads"][0]
    session = onnxruntime.InferenceSession(str(Path(folder) / head["file"]))
    client = triton.InferenceServerClient(server)
    for file in files:
        image = pixels(file, manifest["preprocess"])
        names = [name for name, _, _ in head["crossing"]]
        crossing = session.run(names, {manifest["inputs"][0][0]: image})
        inputs = []
        for (name, dtype, _), array in zip(head["crossing"], crossing, strict=True):
            inputs.append(triton.InferInput(name, array.shape, DATATYPES[dtype]))
            inputs[-1].set_data_from_numpy(array)
        weights = {"isthmus_weights": manifest["weights"]}
        answer = client.infer(f"{manifest['model']}@{head['cut']}", inputs, parameters=weights)
        scores = answer.as_numpy(manifest["outputs"][0])
        print(Path(file).name, manifest["labels"][int(scores.argmax())])


if __name__ == "__main__":
    main(*sys.argv[1:])

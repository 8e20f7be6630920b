"""Run with an interpreter that has tritonclient and not Isthmus: ``triton_asks.py grpc|http ADDRESS FOLDER``; JSON."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

REQUESTS = 100


def main() -> None:
    kind, address, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    triton = importlib.import_module(f"tritonclient.{kind}")
    material = np.load(folder / "material.npz")
    images, answers = material["images"], material["answers"]
    crosses = {name.removeprefix("crosses:"): material[name] for name in material if name.startswith("crosses:")}
    parameters = json.loads((folder / "parameters.json").read_text())
    reported: dict[str, Any] = {"tritonclient": importlib.metadata.version("tritonclient")}
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("digits")
        index, model = client.get_model_repository_index(), client.get_model_metadata("digits")
        if kind == "grpc":
            reported["models"] = [one.name for one in index.models]
            reported["inputs"] = [[one.name, one.datatype, [int(n) for n in one.shape]] for one in model.inputs]
        else:
            reported["models"] = [one["name"] for one in index]
            reported["inputs"] = [[one["name"], one["datatype"], one["shape"]] for one in model["inputs"]]
        client.get_model_config("digits")

        def whole(**how: Any) -> Any:
            given = triton.InferInput("image", list(images.shape), "FP32")
            given.set_data_from_numpy(images, **how)
            return client.infer("digits", [given]).as_numpy("output")

        ways = [{}] if kind == "grpc" else [{"binary_data": True}, {"binary_data": False}]
        reported["whole model, the same bits"] = all(np.array_equal(whole(**how), answers) for how in ways)
        inputs = []
        for name, value in crosses.items():
            inputs.append(triton.InferInput(name, list(value.shape), "FP32"))
            inputs[-1].set_data_from_numpy(value)
        (tail,) = [name for name in reported["models"] if "@" in name]
        found = client.infer(tail, inputs, parameters=parameters).as_numpy("output")
        reported["tail, the same bits"] = bool(np.array_equal(found, answers))
        refusals = []
        for name in ("nobody", "digits"):
            try:
                client.infer(name, [triton.InferInput("x", [1], "FP32")])
            except Exception as error:
                refusals.append(str(error))
        reported["refused"] = refusals
        took = []
        for _ in range(REQUESTS):
            began = time.perf_counter()
            whole()
            took.append(time.perf_counter() - began)
        reported["ms a request, median"] = round(1e3 * sorted(took)[REQUESTS // 2], 2)
    print(json.dumps(reported))


if __name__ == "__main__":
    main()

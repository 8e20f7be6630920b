"""An edge does not load what it does not use: what only a server, a report or another command needs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from studies.footprint.installed import closure, declared

ROOT = Path(__file__).parents[2]

NOT_FOR_ERRORS = ("torch", "numpy")
NOT_FOR_A_CLIENT = (
    *("cloud_server", "deploy", "studies"),
    *(
        "prometheus_client",
        "grpc_reflection.v1alpha",
        "grpc_health.v1",
        "ray",
        "fastapi",
        "uvicorn",
        "starlette",
        "tritonclient",
    ),
    *("polars", "jinja2", "pandas", "matplotlib", "sklearn", "scipy", "networkx", "sympy", "onnx", "onnxruntime"),
    *("rich", "cryptography", "opentelemetry", "pynvml", "transformers", "PIL", "av"),
    *("torch._dynamo", "torch._inductor", "torch.onnx"),
    *("shared_hooks.tail", "shared_hooks.explaining", "shared_hooks.verification", "shared_hooks.mapping"),
    *("shared_hooks.selection", "shared_hooks.doctor", "shared_hooks.profiling.profiler"),
    *("edge_client.adaptive", "edge_client.planning", "edge_client.survey", "edge_client.sweeping"),
    *("edge_client.live", "shared_hooks.sinks", "tensorboard", "wandb"),
    *("edge_client.pruning", "edge_client.doctor", "edge_client.process"),
)
NOT_FOR_A_RUN = tuple(name for name in NOT_FOR_A_CLIENT if name != "PIL")  # it reads an image

STEPS = """
import json, sys
import torch
own = set(sys.modules)  # whatever torch loads of its own
def loaded(): print(json.dumps(sorted(set(sys.modules) - own)), flush=True)
from edge_client import EdgeClient
loaded()
from edge_client.__main__ import main
assert main(sys.argv[1:]) == 0
loaded()
"""


def python(*words: str) -> list[Any]:
    done = subprocess.run([sys.executable, "-c", *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def of(names: tuple[str, ...], loaded: list[str]) -> list[str]:
    return [module for module in loaded if any(module == name or module.startswith(f"{name}.") for name in names)]


def test_modules_loaded_by_client_and_run() -> None:
    image = "shared_hooks/models/digits/images/0011_label1.png"
    client, run = python(STEPS, *("run", "--model", "digits", "--split", "edge-only", "--input", image))
    assert of(NOT_FOR_A_CLIENT, client) == []
    assert of(NOT_FOR_A_RUN, run) == []

    needed = closure(declared() + declared("edge"))
    owners = packages_distributions()
    for module in {name.partition(".")[0] for name in run} & set(owners):
        names = {one.lower().replace("_", "-") for one in owners[module]}
        # gRPC looks for its sisters; where they are not installed, it goes without
        assert names & (needed | {"isthmus", "grpcio-reflection", "grpcio-tools"}), f"{module} is of {names}"


def test_a_server_needs_more_than_an_edge() -> None:
    assert closure(declared("cloud")) - closure(declared() + declared("edge")) >= {
        "prometheus-client",
        "grpcio-reflection",
    }


def test_errors_and_the_way_to_a_server_need_no_torch() -> None:
    (found,) = python("import json, sys, shared_hooks.errors, edge_client.dial; print(json.dumps(sorted(sys.modules)))")
    assert of(NOT_FOR_ERRORS, found) == []


def test_the_process_that_decodes_images_loads_pillow_and_nothing_large() -> None:
    steps = (
        "import json, sys, runpy; runpy.run_path(sys.argv[1]); import PIL.Image; print(json.dumps(sorted(sys.modules)))"
    )
    (found,) = python(steps, "shared_hooks/picture.py")
    assert of(("torch", "numpy", "shared_hooks"), found) == []

"""The extras "edge" and "cloud" are enough to run: nothing of another extra is imported before it is wanted."""

from __future__ import annotations

import subprocess
import sys

import pytest

OF_OTHERS = (
    *("accelerate", "av", "cryptography", "jinja2", "llguidance", "onnx", "onnx_ir", "onnxruntime", "onnxscript"),
    *("opentelemetry", "polars", "ray", "scipy", "shtab", "skimage", "sklearn", "starlette", "tensorboard"),
    *("transformers", "uvicorn", "wandb", "zeus"),
)
"""Modules of the other extras."""
PROGRAM = """
import importlib, sys
for name in {others!r}:
    sys.modules[name] = None  # importing it raises
for name in {modules!r}:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    "modules",
    [
        ["cloud_server", "cloud_server.cli", "cloud_server.transport", "cloud_server.doctor", "cloud_server.__main__"],
        ["edge_client", "edge_client.client", "edge_client.aio", "edge_client.adaptive", "edge_client.generation"],
        [
            "edge_client.commands.run",
            "edge_client.commands.watch",
            "edge_client.commands.tasks",
            "edge_client.__main__",
        ],
        ["edge_client.tasks.plan", "edge_client.tasks.verify", "edge_client.tasks.profile", "edge_client.tasks.layers"],
        [
            "shared_hooks",
            "shared_hooks.wrapped",
            "shared_hooks.observers",
            "shared_hooks.models",
            "shared_hooks.selection",
        ],
    ],
    ids=lambda modules: modules[0],
)
def test_nothing_of_another_extra_is_imported(modules: list[str]) -> None:
    program = PROGRAM.format(others=OF_OTHERS, modules=modules)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

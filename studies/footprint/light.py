"""The edge without PyTorch: what it takes to import, in memory and on disk; its heads' speed beside eager ones.

An environment of its own is made with what `LightClient` needs, and nothing else; its server runs in this one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from edge_client import ModelChoice, export, local_server
from studies.benchmarks.networks import AlexNet, ResNet18, ViT, built, image

ROOT = Path(__file__).resolve().parents[2]
ASKS = """
import json, resource, sys, time
began = time.perf_counter()
from edge_client import LightClient
LightClient
imported = time.perf_counter() - began
server, heads, picture = sys.argv[1:]
with LightClient(server, heads) as client:
    answer = client.infer_file(picture)
pages = int(open("/proc/self/statm").read().split()[1])
print(json.dumps({"import s": imported, "resident MiB": pages * resource.getpagesize() / 2**20,
    "label": answer.predictions[0].label, "torch": "torch" in sys.modules}))
"""
SPEED = """
import sys, time, statistics, json
import numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
shapes = {one.name: [size if isinstance(size, int) else 1 for size in one.shape] for one in session.get_inputs()}
feeds = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in shapes.items()}
took = []
for turn in range(int(sys.argv[2]) + 3):
    began = time.perf_counter()
    session.run(None, feeds)
    took.append(time.perf_counter() - began)
print(json.dumps(statistics.median(took[3:])))
"""


class Mobile(nn.Sequential):
    """As MobileNetV2 is made: narrow ends, wide depthwise middles, skips (Sandler et al. 2018, table 2, shortened)."""

    def __init__(self) -> None:
        blocks: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
        width = 32
        for expand, out, count, stride in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1)):
            for number in range(count):
                blocks.append(_Inverted(width, out, expand, stride if number == 0 else 1))
                width = out
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


class _Inverted(nn.Module):
    def __init__(self, width: int, out: int, expand: int, stride: int) -> None:
        super().__init__()
        inner = width * expand
        self.skips = stride == 1 and width == out
        self.layers = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return x + found if self.skips else found


def measured(tries: int) -> dict[str, Any]:
    """Import and memory: the least of ``tries``. Disk in MB (10^6 bytes), bytecode left out."""
    with tempfile.TemporaryDirectory() as folder:
        python = _environment(Path(folder) / "light")
        found: dict[str, Any] = {"disk MB": _size(python)}
        heads = Path(folder) / "heads"
        export("digits", split="stage2.0.conv2", output=heads)
        picture = next((ROOT / "shared_hooks/models/digits/images").glob("*.png"))
        with local_server(ModelChoice("digits"), arguments=["--tails", "stage2.0.conv2"]) as server:
            runs = []
            for _ in range(tries):
                words = [str(python), "-c", ASKS, server, str(heads), str(picture)]
                done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
                runs.append(json.loads(done.stdout))
        weights = sum(one.stat().st_size for one in heads.iterdir()) / 2**20
        assert not any(run["torch"] for run in runs) and all(run["label"] == picture.stem[-1] for run in runs)
        found["import s"] = round(min(run["import s"] for run in runs), 3)
        found["resident MiB"] = round(min(run["resident MiB"] for run in runs), 1)
        found["files of the heads MiB"] = round(weights, 1)
    return found


def speeds(rounds: int = 30) -> list[dict[str, Any]]:
    """Heads of onnxruntime against eager ones, on one thread, turn about; median seconds, and the ratio."""
    import statistics
    import time

    import torch

    from shared_hooks import WrappedModel

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for kind in (ResNet18, ViT, AlexNet, Mobile):
            model, given = built(kind), image()
            with WrappedModel(model, metrics=False) as wrapped, tempfile.TemporaryDirectory() as folder:
                plan = wrapped.plan(given)
                places = [one.name for one in plan.cuts if one.can_split]
                cut = places[2 * len(places) // 3]
                made = export(ModelChoice(model, example=((given,), {})), split=cut, output=folder)
                (head,) = made.heads
                if head.refused:
                    rows.append({"model": kind.__name__, "cut": cut, "refused": head.refused})
                    continue
                ratios, eager, other = [], [], []
                for _ in range(5):
                    took = []
                    for _ in range(rounds + 3):
                        began = time.perf_counter()
                        wrapped.head(cut, given)
                        took.append(time.perf_counter() - began)
                    words = [sys.executable, "-c", SPEED, str(Path(folder) / head.file), str(rounds)]
                    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
                    done = subprocess.run(words, capture_output=True, text=True, check=True, env=alone)
                    eager.append(statistics.median(took[3:]))
                    other.append(float(json.loads(done.stdout)))
                    ratios.append(other[-1] / eager[-1])
                rows.append(
                    {
                        "model": kind.__name__,
                        "cut": cut,
                        "eager ms": round(1e3 * statistics.median(eager), 2),
                        "onnxruntime ms": round(1e3 * statistics.median(other), 2),
                        "ratio": round(statistics.median(ratios), 3),
                        "difference": head.difference,
                    }
                )
    finally:
        torch.set_num_threads(before)
    return rows


def _environment(folder: Path) -> Path:
    """A Python with Isthmus and its extra "light", at the pinned versions."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), f"{ROOT}[light]"], check=True)
    return python


def _size(python: Path) -> float:
    """Return the size in MB of what is installed there, without pip and setuptools."""
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    left = re.compile(r"^(pip|setuptools|pkg_resources|_distutils_hack)([-.]|$)")
    files = [one for one in site.rglob("*") if one.is_file() and one.suffix != ".pyc"]
    counted = [one for one in files if not left.match(one.relative_to(site).parts[0])]
    return round(sum(one.stat().st_size for one in counted) / 1e6, 1)

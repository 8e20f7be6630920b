"""How soon `calibrate` says how long it takes, has a table one can use, and is done.

    python -m studies.calibration_time --images 600       about two minutes

A convolutional net of 14 million multiply-accumulates with 17 cuts, trained on the spot on ten kinds of noisy pictures,
and pictures of the same kinds as files. The command runs in a process of its own, as users run it: the first run is
watched to its end; a second one is interrupted after `--interrupt` seconds, which must leave a table that plans read.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from edge_client.planning.codecs import read
from studies.benchmarks.machine import facts

SIDE = 48
KINDS = 10
SPEC = f"""id = "net"
factory = "studies.calibration_time:Net"
weights = "weights.safetensors"
labels = {[f"kind{kind}" for kind in range(KINDS)]}

[[example.args]]
shape = [1, 3, {SIDE}, {SIDE}]
dtype = "float32"

[preprocess]
mode = "RGB"
size = [{SIDE}, {SIDE}]
mean = [0.5, 0.5, 0.5]
std = [0.5, 0.5, 0.5]
"""


class Net(nn.Module):
    """(N, 3, 48, 48) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        channels, layers = [3, 16, 16, 32, 32, 64], []
        for number, (a, b) in enumerate(itertools.pairwise(channels)):
            layers += [nn.Conv2d(a, b, 3, 2 if number in (2, 4) else 1, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels[-1], KINDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.pool(self.features(x)).flatten(1))
        return found


def pictures(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(count, 48, 48, 3) uint8 and their kinds: one coarse pattern a kind, moved, dimmed and under noise."""
    patterns = np.random.default_rng(0).uniform(0, 1, (KINDS, 6, 6, 3)).repeat(SIDE // 6, 1).repeat(SIDE // 6, 2)
    dice = np.random.default_rng(seed)
    kinds = dice.integers(0, KINDS, count)
    moved = np.stack([np.roll(patterns[kind], dice.integers(-6, 7, 2), (0, 1)) for kind in kinds])
    noisy = 0.5 + (moved - 0.5) * dice.uniform(0.3, 1, (count, 1, 1, 1)) + dice.normal(0, 0.25, moved.shape)
    return (255 * noisy.clip(0, 1)).astype(np.uint8), kinds


def train(steps: int = 150) -> Net:
    torch.manual_seed(0)
    net, (images, kinds) = Net(), pictures(3000, 1)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    y = torch.from_numpy(kinds)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(steps):
        at = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[at]), y[at]).backward()
        optimizer.step()
    return net.eval()


def prepare(folder: Path, count: int) -> None:
    """The spec with its weights, and the pictures, a folder for each kind."""
    save_file(train().state_dict(), folder / "weights.safetensors")
    (folder / "net.toml").write_text(SPEC)
    for number, (image, kind) in enumerate(zip(*pictures(count, 2), strict=True)):
        file = folder / "images" / f"kind{kind}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)


def watch(folder: Path, output: str, interrupt: float | None = None) -> tuple[list[tuple[float, str]], float, int]:
    """What the command wrote on standard error, with seconds; how long it took; what it returned."""
    command = [sys.executable, "-m", "edge_client", "calibrate", "--model", str(folder / "net.toml")]
    command += ["--input", str(folder / "images"), "--output", str(folder / output)]
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, PYTHONUNBUFFERED="1")
    )
    lines: list[tuple[float, str]] = []
    assert process.stderr is not None and process.stdout is not None

    def collect(stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            lines.append((time.monotonic() - began, line.rstrip()))

    readers = [threading.Thread(target=collect, args=(one,)) for one in (process.stderr, process.stdout)]
    for reader in readers:
        reader.start()
    try:
        returned = process.wait(interrupt)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        returned = process.wait(60)
    for reader in readers:
        reader.join()
    return lines, time.monotonic() - began, returned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--interrupt", type=float, default=25.0, help="seconds after which the second run is stopped")
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in facts().items() if name in ("cpu", "cores", "torch", "date")))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder, options.images)
        lines, took, returned = watch(folder, "whole")
        if returned:
            sys.exit("\n".join(text for _, text in lines))
        estimate = next(((at, text) for at, text in lines if re.search(r"\bleft\b", text)), None)
        table = read(str(folder / "whole" / "calibration.json"))
        print(f"{options.images} images, {len(table.cuts)} cuts: done after {took:.0f} s")
        print(f"first estimate: {f'after {estimate[0]:.1f} s: {estimate[1]}' if estimate else 'none'}")
        lines, took, returned = watch(folder, "stopped", options.interrupt)
        early = read(str(folder / "stopped" / "calibration.json"))
        rows = sum(len(cut.codecs) for cut in early.cuts)
        print(
            f"interrupted after {options.interrupt:g} s: ended {took - options.interrupt:.1f} s later, code {returned};"
        )
        print(f"its table: {len(early.cuts)} cuts, {rows} codecs at cuts, by {early.inputs} inputs")


if __name__ == "__main__":
    main()

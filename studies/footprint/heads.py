"""Memory of an edge at one cut, after some requests to a real server: with all weights, and with those of its head."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_model

from studies.footprint.network import ResNet50

ROOT = Path(__file__).parents[2]
CUTS = ("layer1.0.conv1", "layer2.3.conv3", "layer3.5.conv3")
REQUESTS = 5
SPEC = """
id = "resnet50"
factory = "studies.footprint.network:ResNet50"
weights = "weights.safetensors"
[[example.args]]
shape = [1, 3, {side}, {side}]
"""

_EDGE = """
import ctypes, hashlib, json, sys
import torch
from edge_client import EdgeClient, ModelChoice
server, spec, cut, only_head, channels, side, requests = sys.argv[1:]
choice = ModelChoice(spec, only_head=only_head or None, device="cpu", threads=1)
picture = torch.rand(1, int(channels), int(side), int(side), generator=torch.Generator().manual_seed(0))
with EdgeClient(server, choice, cut, metrics=False) as client:
    answers = [client.infer(picture).output for _ in range(int(requests))]
    ctypes.CDLL(None).malloc_trim(0)  # what is freed is nobody's
    status = dict(line.split(":") for line in open("/proc/self/status"))
    mib = {name: int(status[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon", "RssFile", "VmHWM")}
    print(json.dumps([mib, hashlib.sha256(b"".join(one.numpy().tobytes() for one in answers)).hexdigest()]))
"""


@dataclass(frozen=True)
class Heads:
    """MiB. ``base``: of the edge with all weights, without them. ``ratio``: what the other one has beyond the base, by
    the weights of its head. ``peak_*``: the most while it starts and runs; of ``only_head`` with pages of the file,
    which the system takes back where memory is short.
    """

    cut: str
    weights: float
    head: float
    whole: float
    only_head: float
    peak_whole: float
    peak_only_head: float

    @property
    def base(self) -> float:
        return self.whole - self.weights

    @property
    def ratio(self) -> float:
        return (self.only_head - self.base) / self.head


def measured(side: int, tries: int) -> list[Heads]:
    """Medians of so many processes each. RuntimeError if one bit of an answer is another one."""
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = ResNet50()
        save_model(model, str(Path(folder) / "weights.safetensors"))
        spec = Path(folder) / "resnet50.toml"
        spec.write_text(SPEC.format(side=side))
        with serving(str(spec)) as address:
            return [_of(model, cut, address, spec, side, tries) for cut in CUTS]


def _of(model: ResNet50, cut: str, address: str, spec: Path, side: int, tries: int) -> Heads:
    modules = dict(model.named_modules())
    before = [*modules][: [*modules].index(cut) + 1]
    head = sum(one.nbytes for name in before for one in modules[name].parameters(recurse=False))
    weights = sum(one.nbytes for one in model.parameters())
    whole, only = ([_edge(address, spec, cut, layer, side) for _ in range(tries)] for layer in ("", cut))
    if len({digest for _, digest in (*whole, *only)}) != 1:
        raise RuntimeError(f"{cut}: the answers differ")

    def middle(found: list[tuple[dict[str, float], str]], name: str) -> float:
        return statistics.median(mib[name] for mib, _ in found)

    resident = middle(whole, "VmRSS"), middle(only, "VmRSS")
    return Heads(cut, weights / 2**20, head / 2**20, *resident, middle(whole, "VmHWM"), middle(only, "VmHWM"))


def _edge(address: str, spec: Path, cut: str, only_head: str, side: int) -> tuple[dict[str, float], str]:
    """What it took, and the digest of its answers."""
    done = subprocess.run(
        [sys.executable, *words(address, str(spec), cut, only_head, side)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return printed(done.stdout)


def words(address: str, model: str, cut: str, only_head: str, side: int) -> list[str]:
    """Arguments of Python for an edge that makes `REQUESTS` of one picture."""
    channels = "1" if model == "digits" else "3"
    return ["-c", _EDGE, address, model, cut, only_head, channels, str(side), str(REQUESTS)]


def printed(output: str) -> tuple[dict[str, float], str]:
    """What an edge printed: its memory in MiB, and a digest of its answers."""
    mib, digest = json.loads(output.splitlines()[-1])
    return mib, digest


@contextmanager
def serving(model: str) -> Iterator[str]:
    options = ["--listen", "127.0.0.1:0", "--model", model, "--device", "cpu", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cloud_server", *options],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise RuntimeError("the server did not start")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

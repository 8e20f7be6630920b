"""An edge with little memory: requests in a control group of Linux with a bound, as root. Swap is no memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_model

from studies.footprint import heads
from studies.footprint.network import ResNet50

MIB = 2**20
BOUNDS = (2048, 1024, 512, 384, 256)
"""MiB."""
CUT = "layer2.3.conv3"
SIDE = 224


@dataclass(frozen=True)
class Limited:
    """``peak_mib``: the most that the group held, pages of files among it. ``trouble``: empty where all was answered,
    with the bits of an edge without a bound.
    """

    what: str
    bound_mib: int
    trouble: str
    peak_mib: float


class NoGroups(Exception):
    """This system or user has no control groups of memory."""


@contextmanager
def _group(nbytes: int) -> Iterator[Path]:
    root = Path("/sys/fs/cgroup")
    old = (root / "memory").is_dir()
    made = (root / "memory" if old else root) / f"isthmus-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(nbytes))
    except OSError as error:
        raise NoGroups(f"no control group of memory: {error}") from error
    try:
        yield made
    finally:
        made.rmdir()


def measured() -> list[Limited]:
    """Each edge under each bound. Raises NoGroups."""
    found = []
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        save_model(ResNet50(), str(Path(folder) / "weights.safetensors"))
        spec = Path(folder) / "resnet50.toml"
        spec.write_text(heads.SPEC.format(side=SIDE))
        for what, model, cut, only_head in (
            ("the shipped model", "digits", "stage2.0.conv2", ""),
            ("ResNet-50", str(spec), CUT, ""),
            ("ResNet-50, --only-head", str(spec), CUT, CUT),
        ):
            with heads.serving(model) as address:
                words = heads.words(address, model, cut, only_head, 32 if model == "digits" else SIDE)
                free = _edge(words, None)
                if free.returncode:
                    raise RuntimeError(f"{what}: {free.stderr[-300:]}")
                for bound in BOUNDS:
                    with _group(bound * MIB) as group:
                        done = _edge(words, group)
                        most = group / "memory.max_usage_in_bytes"
                        peak = int((most if most.exists() else group / "memory.peak").read_text()) / MIB
                    found.append(Limited(what, bound, _trouble(done, free), peak))
    return found


def _trouble(done: subprocess.CompletedProcess[str], free: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        return done.stderr.strip().splitlines()[-1][:120]
    same = heads.printed(done.stdout)[1] == heads.printed(free.stdout)[1]
    return "" if same else "other bits"


def _edge(words: list[str], group: Path | None) -> subprocess.CompletedProcess[str]:
    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.run(
        [sys.executable, *words],
        cwd=heads.ROOT,
        env=heads.environment(),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=enter,
    )

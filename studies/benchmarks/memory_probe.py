"""Peak memory of one edge process during heads or requests; run in a process of its own by `edge_memory`.

``python -m studies.benchmarks.memory_probe head|request ADDRESS MODEL ELEMENTS REPEATS`` prints JSON: resident bytes
before, and the highest since, per repeat. Linux only: the peak is VmHWM, which writing 5 to clear_refs resets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from studies.benchmarks.processes import target

PROCESS = Path("/proc/self")


def main() -> None:
    what, address, model, elements, repeats = sys.argv[1:]
    x = torch.randn(1, int(elements))
    before, peaks = [], []
    with EdgeClient(address, ModelChoice(target(model), device="cpu", threads=1), "before") as client:
        for _ in range(int(repeats)):
            before.append(status("VmRSS"))
            (PROCESS / "clear_refs").write_text("5")
            if what == "head":
                client.wrapped.forward(x, end="before")
            else:
                client.infer(x)
            peaks.append(status("VmHWM"))
    print(json.dumps({"before": before, "peaks": peaks}))


def status(name: str) -> int:
    """Bytes, from a line like ``VmHWM:  123 kB``."""
    line = next(line for line in (PROCESS / "status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()

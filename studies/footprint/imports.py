"""Imports, each in a process of its own, with its bytecode compiled before: as installed by pip, or from the second
start on.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

STATEMENTS = {
    "torch alone": "import torch",
    "EdgeClient": "from edge_client import EdgeClient",
    "edge-client run": "import edge_client.commands.run",
    "cloud-server": "import cloud_server.cli",
}

_PROBE = """
import json, sys, time
seconds, cpu = time.perf_counter(), time.process_time()
{statement}
seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
status = dict(line.split(":") for line in open("/proc/self/status"))
mib = int(status["VmRSS"].split()[0]) / 1024
print(json.dumps([seconds, cpu, mib, len(sys.modules)]))
"""


@dataclass(frozen=True)
class Import:
    """One import: the least of several tries. ``cpu`` is what the process itself took, whoever else is at work."""

    name: str
    seconds: float
    cpu: float
    mib: float
    modules: int


def measured(python: Sequence[str], tries: int, names: Sequence[str] = tuple(STATEMENTS)) -> list[Import]:
    """``python``: a command that runs one, here or elsewhere (``ssh pi python3``).

    Tries take turns, so that a slow minute meets all.
    """
    rows: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(tries + 1):
        for name in names:
            text = _run(python, _PROBE.format(statement=STATEMENTS[name])).stdout
            if turn:  # the first compiles
                rows[name].append(json.loads(text.splitlines()[-1]))
    least = {name: [min(column) for column in zip(*found, strict=True)] for name, found in rows.items()}
    return [Import(name, one[0], one[1], one[2], int(one[3])) for name, one in least.items()]


def by_file(python: Sequence[str], name: str, tries: int) -> Counter[str]:
    """Microseconds that each module takes for itself, once torch is there: the least of several tries.

    Python's own collector runs in some module or other, and its time counts there.
    """
    code = f"import sys, gc, torch; gc.disable(); print('from here', file=sys.stderr, flush=True); {STATEMENTS[name]}"
    found: dict[str, int] = {}
    for _ in range(tries):
        _, _, reported = _run(python, code, "-X", "importtime").stderr.partition("from here\n")
        for line in reported.splitlines():
            own, _, module = line.removeprefix("import time:").split("|")
            found[module.strip()] = min(int(own), found.get(module.strip(), int(own)))
    return Counter(found)


def _run(python: Sequence[str], program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """``program`` comes by its standard input: ssh would join its words for a shell over there."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [*python, *words, "-"]
    return subprocess.run(command, input=program, env=environment, capture_output=True, text=True, check=True)

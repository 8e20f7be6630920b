"""An edge of the matrix: a command that runs a Python in which `edge_client` and `studies` can be imported."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import dataclass
from typing import Any

SECONDS = 1800.0
"""For one command; an emulated processor is some thirty times slower."""

_ASK = """
import json, platform, torch
print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
                  "processor": torch.backends.cpu.get_cpu_capability()}))
"""


@dataclass(frozen=True)
class Edge:
    """``python``: the words before its arguments, such as ``chroot DIR env PYTHONPATH=... python3``."""

    name: str
    python: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Edge:
        """From ``NAME=COMMAND``. Raises ValueError."""
        name, equals, command = text.partition("=")
        if not (name and equals and command.strip()):
            raise ValueError(f"{text!r}: an edge is NAME=COMMAND, such as arm64='chroot /arm64 python3'")
        return cls(name, tuple(shlex.split(command)))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Raises subprocess.TimeoutExpired and OSError."""
        return subprocess.run([*self.python, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False)

    def about(self) -> dict[str, Any]:
        """Versions and processor. Raises RuntimeError with what it said instead."""
        done = self.run("-c", _ASK)
        try:
            found: dict[str, Any] = json.loads(done.stdout)
            return found
        except json.JSONDecodeError:
            raise RuntimeError(f"{self.name}: {done.stderr.strip()[-500:] or 'said nothing'}") from None

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
import importlib.metadata, json, platform, torch
transformers = [one.version for one in importlib.metadata.distributions(name="transformers")]
print(json.dumps({"torch": torch.__version__, "transformers": transformers[0] if transformers else None,
                  "python": platform.python_version(), "machine": platform.machine(),
                  "processor": torch.backends.cpu.get_cpu_capability()}))
"""


@dataclass(frozen=True)
class Edge:
    """``python``: the words before its arguments: ``chroot DIR env PYTHONPATH=... python3``, ``ssh pi python3``.

    A program comes by its standard input and arguments are plain words: ssh joins them for a shell over there.
    """

    name: str
    python: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Edge:
        """From ``NAME=COMMAND``. Raises ValueError."""
        name, equals, command = text.partition("=")
        if not (name and equals and command.strip()):
            raise ValueError(f"{text!r}: an edge is NAME=COMMAND, such as arm64='chroot /arm64 python3'")
        return cls(name, tuple(shlex.split(command)))

    def run(self, *arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
        """``program``: what ``-`` among the arguments stands for. Raises subprocess.TimeoutExpired and OSError."""
        words = [*self.python, *arguments]
        return subprocess.run(words, input=program, capture_output=True, text=True, timeout=SECONDS, check=False)

    def about(self) -> dict[str, Any]:
        """Versions (transformers None without it) and processor. Raises RuntimeError with what it said instead."""
        done = self.run("-", program=_ASK)
        try:
            found: dict[str, Any] = json.loads(done.stdout)
            return found
        except json.JSONDecodeError:
            raise RuntimeError(f"{self.name}: {done.stderr.strip()[-500:] or 'said nothing'}") from None

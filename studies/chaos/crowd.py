"""The clients' processes, and what they have written down so far."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from studies.chaos.served import ROOT

Known = dict[str, Any]
"""One request: see `asking`."""
KINDS: Final = ("small", "large", "mixed", "auto", "small+fallback")
"""Cuts, as `asking` takes them, and whether the edge may answer what the server does not."""
PATIENCE: Final = 600.0


@dataclass
class Member:
    """One client's process and its file, which is read as it grows."""

    kind: str
    file: Path
    process: subprocess.Popen[bytes]
    known: list[Known] = field(default_factory=list)
    _read: int = 0

    def look(self) -> list[Known]:
        """Everything that it has written down."""
        with self.file.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self.known.append({**json.loads(line), "kind": self.kind})
        return self.known

    def served(self, after: float) -> Known | None:
        """The first answer to come after this time."""
        return next((one for one in self.look() if one["came"] == "ok" and one["answered"] > after), None)


class Crowd:
    """One client of each of ``kinds`` over ``address``. ``arguments`` are more of `asking`'s."""

    def __init__(self, folder: Path, address: str, spec: Path, kinds: Sequence[str], arguments: Sequence[str]) -> None:
        self._folder, self._address, self._spec, self._arguments = folder, address, spec, list(arguments)
        self._made = 0
        self.members: list[Member] = []
        self.gone: list[Member] = []
        for kind in kinds:
            self.join(kind)

    def join(self, kind: str) -> Member:
        """One more; it may take some seconds until it asks."""
        self._made += 1
        file = self._folder / f"client{self._made}.jsonl"
        file.touch()
        cut, _, more = kind.partition("+")
        command = [sys.executable, "-m", "studies.chaos.asking", self._address, str(self._spec), cut, str(file)]
        command += [f"--{more}"] if more else []
        command += ["--seed", str(self._made), *self._arguments]
        with (self._folder / "clients.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        self.members.append(Member(kind, file, process))
        return self.members[-1]

    def kill(self, member: Member) -> None:
        """SIGKILL; another of its kind takes its place."""
        member.process.send_signal(signal.SIGKILL)
        member.process.wait()
        self.members.remove(member)
        self.gone.append(member)
        self.join(member.kind)

    def all_heard(self, after: float) -> None:
        """Wait until each has had an answer, or an error, to something that it asked after this time."""
        limit = time.monotonic() + PATIENCE
        for member in self.members:
            while not any(one["asked"] > after for one in member.look()[-1:]):
                if time.monotonic() > limit:
                    raise RuntimeError(f"the client {member.kind} hears nothing")
                time.sleep(0.02)

    def all_served(self, after: float, patience: float = PATIENCE) -> None:
        """Wait until each has had an answer after this time; RuntimeError for one that ended, or has none."""
        limit = time.monotonic() + patience
        for member in self.members:
            while member.served(after) is None:
                if member.process.poll() is not None or time.monotonic() > limit:
                    raise RuntimeError(f"the client {member.kind} has no answer; see {self._folder / 'clients.log'}")
                time.sleep(0.05)

    @property
    def known(self) -> list[Known]:
        """What all have written down, those included that are gone."""
        return [one for member in (*self.gone, *self.members) for one in member.look()]

    def close(self) -> None:
        """Ends all; what was under way is still answered or fails."""
        for member in self.members:
            if member.process.stdin is not None:
                member.process.stdin.close()
        for member in self.members:
            try:
                member.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()

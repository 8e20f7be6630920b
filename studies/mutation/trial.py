"""One fault at a time, put into a copy of the project, against the tests that run its line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from studies.mutation.covering import Covering
from studies.mutation.faults import Fault

NOTICED, HANGS, SURVIVED, NOT_RUN = "noticed", "noticed: hangs", "survived", "survived: no test runs the line"
COPIED: Final = ("cloud_server", "edge_client", "shared_hooks", "protos", "studies", "tests", "deploy", "docs")
FEW_SECONDS, MANY_SECONDS = 8.0, 25.0
"""What the tests of the first and of the second attempt may have taken in the measured run."""
SLACK_SECONDS = 45.0
_FAILED, _INTERRUPTED = 1, 2


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    fault: Fault
    result: str
    tests: int
    """How many were run at most."""
    seconds: float

    @property
    def noticed(self) -> bool:
        return self.result in (NOTICED, HANGS)

    def reported(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {**asdict(self.fault), "result": self.result, "tests": self.tests, "seconds": round(self.seconds, 1)}


class Copy:
    """A copy of the project in which faults are tried."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in COPIED:
            shutil.copytree(root / name, folder / name, ignore=ignored, dirs_exist_ok=True)
        for file in root.iterdir():
            if file.is_file():
                shutil.copy(file, folder)

    def tried(self, fault: Fault, covering: Covering) -> Outcome:
        """Few tests first; all that may be afforded if they pass."""
        file, began = self._folder / fault.path, time.monotonic()
        found = covering.tests(fault.path, fault.line)
        near = covering.near(fault.path, self._folder)
        original = file.read_text()
        try:
            file.write_text(fault.code(self._folder))
            done = 0
            for budget in (FEW_SECONDS, MANY_SECONDS):
                chosen = _afforded(found, covering, budget)[done:]
                result = self._run(chosen, budget) if chosen else SURVIVED
                done += len(chosen)
                if result != SURVIVED:
                    break
            if result == SURVIVED and near:
                chosen = _afforded(near, covering, MANY_SECONDS)
                result, done = self._run(chosen, MANY_SECONDS), done + len(chosen)
            if result == SURVIVED and not done:
                result = NOT_RUN
            return Outcome(fault, result, done, time.monotonic() - began)
        finally:
            file.write_text(original)

    def _run(self, tests: list[str], seconds: float) -> str:
        listed = self._folder / "tests-to-run.txt"
        listed.write_text("\n".join(tests) + "\n")
        command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", f"@{listed}"]
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=self._folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(3 * seconds + SLACK_SECONDS)
        except subprocess.TimeoutExpired:
            return HANGS
        finally:
            _end(process)
        return SURVIVED if status == 0 else NOTICED


def _end(process: subprocess.Popen[bytes]) -> None:
    """With whatever it started."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


def _afforded(tests: list[str], covering: Covering, seconds: float) -> list[str]:
    """From the front, as many as take so long together; one at least."""
    taken, total = [], 0.0
    for test in tests:
        total += covering.seconds.get(test, 0.0) + 0.005
        if taken and total > seconds:
            break
        taken.append(test)
    return taken

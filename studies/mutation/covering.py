"""Which tests run a line, by one run of the whole suite under coverage, and how long each of them took."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from coverage import CoverageData

_TOOK: Final = re.compile(r"^([0-9.]+)s (?:call|setup) +(\S.*)$", re.MULTILINE)
_PACKAGES: Final = ("cloud_server/", "edge_client/", "shared_hooks/")


class Covering:
    """What `measured` wrote."""

    def __init__(self, folder: Path) -> None:
        self._data = CoverageData(str(folder / ".coverage"))
        self._data.read()
        self._files = {_relative(name): name for name in self._data.measured_files()}
        self.seconds: dict[str, float] = {}
        for seconds, test in _TOOK.findall((folder / "suite.txt").read_text()):
            self.seconds[test] = self.seconds.get(test, 0.0) + float(seconds)

    def tests(self, path: str, line: int) -> list[str]:
        """Node ids: first those in the folder that mirrors the file's, the quickest first; then the others. Of a line
        that runs when the file is imported, is not the first of its statement or runs in other processes alone: the
        tests that run any line of the file.
        """
        file = self._files.get(path)
        if file is None:
            return []
        lines = self._data.contexts_by_lineno(file)
        found = lines.get(line, [])
        if not found or "" in found:
            found = [name for names in lines.values() for name in names]
        names = {name.rpartition("|")[0] for name in found if name}
        near = "tests/" + path.rpartition("/")[0]
        return sorted(names, key=lambda name: (not name.startswith(near), self.seconds.get(name, 0.0)))

    def near(self, path: str, root: Path) -> list[str]:
        """Files of tests in the folder that mirrors the file's, and those that import the module; the quickest first.
        For what runs where coverage sees nothing, in other processes, and for tests that were not measured.
        """
        module = path.removesuffix(".py").replace("/", ".")
        package, _, name = module.rpartition(".")
        imports = re.compile(rf"(import|from) {re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
        folder, found = root / "tests" / path.rpartition("/")[0], []
        for file in (root / "tests").rglob("test_*.py"):
            if file.parent == folder or imports.search(file.read_text()):
                name = str(file.relative_to(root))
                self.seconds.setdefault(name, sum(took for test, took in self.seconds.items() if test.startswith(name)))
                found.append(name)
        return sorted(found, key=lambda name: self.seconds[name])


def measured(root: Path, paths: Iterable[str], folder: Path, processes: int) -> None:
    """Run the suite in ``root`` and note which test runs which line of ``paths``. Raises OSError when it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = "".join(f"    */{path}\n" for path in paths)
    settings = folder / "coverage.ini"
    settings.write_text(f"[run]\ndata_file = {folder / '.coverage'}\ninclude =\n{listed}")
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", str(processes), "--dist", "worksteal", "--cov",
        f"--cov-config={settings}", "--cov-context=test", "--cov-report=", "--durations=0", "--durations-min=0.001",
        "-p", "no:cacheprovider", "-p", "studies.mutation.rearm",
    ]  # fmt: skip
    with (folder / "suite.txt").open("w") as file:
        environment = {**os.environ, "PYTHONPATH": str(root)}
        ended = subprocess.run(command, cwd=root, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    if ended.returncode not in (0, 1):
        raise OSError(f"the suite did not run: exit status {ended.returncode}, {folder / 'suite.txt'}")


def _relative(name: str) -> str:
    starts = [name.rfind("/" + package) + 1 for package in _PACKAGES if "/" + package in name]
    return name[max(starts, default=0) :]

"""Tries cuts before they are served: does a copy of the model that never ran give the whole model's answer?

A cold process shows what no analysis of code can promise (`trial`). One trial runs at a time; it starts with the
requested cut and continues with the others. Verdicts are kept in a file, so that a model is tried once for each state
of its code and of torch. A cut with another answer is refused; one that could not be tried in time is served as the
analysis allows, which is logged.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

import shared_hooks
from cloud_server.arguments import parser
from cloud_server.config import composed
from cloud_server.models import Identity
from cloud_server.processes.worker import die_with
from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, IsthmusError, ModelFailed, SpecError, logged
from shared_hooks.files import write_json
from shared_hooks.modules import INPUT
from shared_hooks.verification import DIFFERS, EXACT, REFUSED
from shared_hooks.version import __version__

# The program of a trial: every cut of one model, its tail run on a copy that never ran before.
#
# It prints a line of JSON for each cut and exits. Its time and memory are bounded here.


def main(words: Sequence[str], model_id: str, first: str, seconds: float, nbytes: int, server: int) -> int:
    """Run a trial, as its process; return 0 if every cut was tried.

    ``words``: the server's command line; ``first``: the cut that a request waits for; ``seconds`` of processor time and
    ``nbytes`` of memory limit each process. It ends with the process ``server``.
    """
    die_with(server)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output printed by the model is not part of the result
    _bounded(seconds, nbytes)
    torch.set_num_threads(1)
    try:
        entries = [one for one in composed(parser().parse_args(words)).models if one.spec.model_id == model_id]
        example = entries[0].spec.example("cpu") if entries else None
        if example is None:
            return 1
        args, kwargs = example
        make = partial(entries[0].spec.load_model, "cpu")

        def report(done: int, total: int, name: str, verdict: str) -> None:
            print(json.dumps([name, verdict]), file=out, flush=True)

        with WrappedModel(make(), metrics=False) as wrapped:
            plan = wrapped.plan(*args, **kwargs)
            try:
                plan.resolve(first)
            except IsthmusError:
                first = INPUT
            check = partial(wrapped.verify, *args, on_cut=report, cold=make, first=first, **kwargs)
            try:
                check(processes=True)
            except ModelFailed:  # its answer cannot be sent from one process to another
                check()
    except Exception as error:  # including the model's own; the server reads only what was printed
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _bounded(seconds: float, nbytes: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not available on every system
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


log = logging.getLogger("cloud_server")

TRIED: Final = frozenset({"torch", "torchvision", "timm", "transformers", "shared_hooks"})
"""Libraries whose models were all tried (docs/results/library.md): ``auto`` tries models with other modules."""
OVERHEAD_BYTES: Final = 2 << 30
COPIES: Final = 4
"""The memory of each of a trial's three processes: `OVERHEAD_BYTES` for Python and torch, and `COPIES` times the
weights.
"""


class Trials:
    """The trials of a server. Thread-safe."""

    def __init__(self, words: Sequence[str], mode: str = "auto", seconds: float = 60.0, folder: Path | None = None):
        """``words``: the server's command line; ``folder``: where verdicts are kept, by default in the user's cache."""
        self._words, self._mode, self._seconds = list(words), mode, seconds
        self._folder = folder or _cache()
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, str]] = {}
        self._tried: set[tuple[str, str]] = set()
        """(digest, cut) of finished trials."""
        self._waiting: deque[tuple[Identity, str, int, Callable[[], object]]] = deque()
        self._running = self._closed = False
        self._process: subprocess.Popen[str] | None = None
        self.trials = 0
        """The number of processes started."""

    def check(self, identity: Identity, cut: str, *, along: bool = False) -> None:
        """Raise CutRefused if a trial of this cut gave another answer than the whole model. Never blocks.

        ``along``: a cut along branches, which is not tried itself: refused if a trial of any of the model's cuts
        differed.
        """
        if self._verdict(identity, cut) == DIFFERS or (along and self.refuses(identity)):
            raise CutRefused(
                f'cut at "{cut}" of model "{identity.model_id}": tried in a process of its own, a model that had never '
                "run gave another answer than the whole model: what its code keeps does not cross "
                "(edge-client verify names such cuts)"
            )

    def refuses(self, identity: Identity) -> bool:
        """Return whether a trial of any of its cuts differed."""
        return self._wants(identity) and DIFFERS in self._known.get(_digest_of(identity), {}).values()

    def wait(self, identity: Identity, cut: str, nbytes: int, done: Callable[[], object]) -> bool:
        """Return whether a trial of this cut must be awaited; ``done`` is then called after it, in another thread.

        ``nbytes``: of the model's weights. Never blocks.
        """
        if not self._wants(identity) or self._verdict(identity, cut) is not None:
            return False
        with self._lock:
            if not self._is_open(identity, cut):
                return False
            self._waiting.append((identity, cut, nbytes, done))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="isthmus-trials", daemon=True).start()
        return True

    def close(self) -> None:
        """End a trial in progress."""
        with self._lock:
            self._closed, process = True, self._process
        if process is not None:
            process.kill()

    def _run(self) -> None:
        """Run one trial after the other, until none is waited for."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                identity, cut, nbytes, done = self._waiting.popleft()
                is_open = self._is_open(identity, cut)
            if is_open:
                with logged(log, f"a trial of cut {cut[:80]} of model {identity.model_id}"):
                    self._learn(identity, cut, nbytes)
            with logged(log, "a request that has waited for a trial"):
                done()

    def _verdict(self, identity: Identity, cut: str) -> str | None:
        return self._known.get(_digest_of(identity), {}).get(cut) if self._wants(identity) else None

    def _is_open(self, identity: Identity, cut: str) -> bool:
        """Return whether a trial may find out more.

        After a complete trial every cut is known, so another name is no layer; unknown names start no more trials than
        there are cuts.
        """
        digest = _digest_of(identity)
        if digest not in self._known:
            self._known[digest] = self._read(digest)
        known = self._known[digest]
        ended = sum(one == digest for one, _ in self._tried)
        known_all = max(len(known), ended) > identity.cuts
        return not (self._closed or known_all or cut in known or (digest, cut) in self._tried)

    def _wants(self, identity: Identity) -> bool:
        if self._mode == "never" or not identity.plan_digest:
            return False
        return self._mode == "always" or not TRIED.issuperset(identity.packages)

    def _learn(self, identity: Identity, cut: str, nbytes: int) -> None:
        digest = _digest_of(identity)
        found: dict[str, str] = {}
        try:
            found = self._trial(identity.model_id, cut, nbytes)
        finally:  # also if no process can be started: requests wait for the end of it
            with self._lock:
                self._tried.add((digest, cut))
                found = self._known[digest] = {**self._known[digest], **found}
        if cut not in found:
            what = "cut %s of model %s could not be tried: it is served as far as its code was understood"
            log.warning(what, cut[:80], identity.model_id)
        self._write(digest, found)

    def _trial(self, model_id: str, cut: str, nbytes: int) -> dict[str, str]:
        """Run a trial; returns the verdicts by cut, as far as there was time."""
        self.trials += 1
        began = time.monotonic()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from cloud_server.processes.trials import main\n"
            f"sys.exit(main({self._words!r}, {model_id!r}, {cut!r}, {self._seconds!r}, "
            f"{OVERHEAD_BYTES + COPIES * nbytes}, {os.getpid()}))"
        )
        with self._lock:
            if self._closed:
                return {}
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        try:
            printed, _ = process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
        self._process = None
        found: dict[str, str] = {}
        for line in printed.splitlines():
            with contextlib.suppress(ValueError):
                name, verdict = json.loads(line)
                found[name] = verdict
        wrong = [name for name, verdict in found.items() if verdict == DIFFERS]
        log.info(
            "model %s: %d cuts tried cold in %.1f s, %d gave another answer", model_id, len(found),
            time.monotonic() - began, len(wrong),
        )  # fmt: skip
        return found

    def _read(self, digest: str) -> dict[str, str]:
        try:
            found = json.loads((self._folder / f"{digest}.json").read_text())
            return {str(name): verdict for name, verdict in found.items() if verdict in (EXACT, REFUSED, DIFFERS)}
        except (OSError, ValueError, AttributeError):
            return {}

    def _write(self, digest: str, found: dict[str, str]) -> None:
        # if the folder cannot be written to, the trial is repeated at the next start
        with contextlib.suppress(OSError, SpecError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(self._folder / f"{digest}.json", found)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        home = os.devnull  # a user without a home, as in some containers: nothing is kept
    return Path(home) / "isthmus" / "trials"


@functools.cache
def _ours() -> tuple[tuple[Path, os.stat_result], ...]:
    """Return the files of this package, with their status."""
    return tuple((file, file.stat()) for file in sorted(Path(shared_hooks.__file__).parent.rglob("*.py")))


def _digest_of(identity: Identity) -> str:
    return _digest(identity.structure_digest, identity.plan_digest, identity.weights_hash)


@functools.lru_cache(maxsize=256)
def _digest(structure: str, plan: str, weights: str) -> str:
    """Return a digest that changes with the model's code, example and weights, with this package, and with torch and
    Python.
    """
    own = [(file.name, stat.st_size, stat.st_mtime_ns) for file, stat in _ours()]
    versions = torch.__version__, platform.python_version(), __version__
    return hashlib.sha256(json.dumps([structure, plan, weights, versions, own]).encode()).hexdigest()

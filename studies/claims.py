"""``make claims``: everything the documents promise that `make test` cannot show, each in a short form of some minutes.

    python -m studies.claims                              all rows, one after the other; docs/results/claims.json
    python -m studies.claims --only chaos soak            these rows; the others stay as they were
    python -m studies.claims --with compose "--base my/python:3.12"     more of that row's own arguments
    python -m studies.claims --show                       the table as it is kept, and which rows are out of date

A row is green where its command ended with status 0, fell short where it did not, and was not run where this machine
lacks what it needs. It is out of date where the code it speaks of has changed since the commit it was run at.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
RESULT: Final = ROOT / "docs" / "results" / "claims.json"
GREEN, SHORT, NOT_RUN = "green", "fell short", "not run"
PRODUCT = ("shared_hooks", "cloud_server", "edge_client", "protos", "pyproject.toml")
LINES: Final = 4


def _module(name: str, why: str) -> Callable[[], str]:
    return lambda: "" if importlib.util.find_spec(name) else f"{name} is not installed: {why}"


def _program(name: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"there is no {name}"


def _engine() -> str:
    if not shutil.which("docker"):
        return "there is no docker"
    asked = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
    return "" if asked.returncode == 0 else "no Docker engine answers"


def _root_on_linux() -> str:
    return "" if sys.platform == "linux" and os.geteuid() == 0 else "network namespaces want root, on Linux"


@dataclass(frozen=True)
class Claim:
    """One row: a command in its short form, and what it needs."""

    name: str
    says: str
    arguments: str
    """After ``python -m``."""
    minutes: float
    """A run that takes longer is ended, and falls short."""
    about: Sequence[str] = PRODUCT
    needs: Callable[[], str] = field(default=lambda: "")
    """Why it cannot be run here; "" if it can."""


SERVER = ("shared_hooks", "cloud_server", "protos")
HOOKS = ("shared_hooks",)
CLAIMS: Final = (
    Claim("wheel", "wheel and sdist install alone and work", "studies.wheel", 12),
    Claim("compose", "the containers build, run and answer", "deploy.compose_check", 30,
          (*PRODUCT, "deploy"), _engine),
    Claim("manifests", "Kubernetes, systemd and Compose take the files", "deploy.manifests_check", 3,
          ("deploy",), _module("kubernetes_validate", "pip install isthmus[manifests]")),
    Claim("doors", "tritonclient, curl, Prometheus and OpenTelemetry work", "studies.doors", 8, (*SERVER, "deploy")),
    Claim("ray", "Ray Serve answers, and replicas may die", "studies.ray --cases killed --times 1 --requests 50", 12,
          needs=_module("ray", "pip install isthmus[ray]")),
    Claim("matrix", "another torch, Python or processor agrees or is refused", "studies.matrix --models digits", 15),
    Claim("cameras", "cameras and streams before edge-client run", "studies.cameras", 8, ("edge_client",),
          _program("gst-launch-1.0")),
    Claim("chaos", "nothing is lost, wrong or computed twice when things die", "studies.chaos --requests 600", 8),
    Claim("attacks", "hostile requests: no crash, hang or wrong answer", "studies.attacks --minutes 4 --seed 24", 8,
          SERVER),
    Claim("pressure", "what one client's sessions, values, files and areas make a server hold",
          "studies.attacks.pressure --answers 200", 12, SERVER),
    Claim("files", "mutated input files, on a server and an edge",
          "studies.attacks.files --files 6000 --minutes 3 --seed 24", 9, SERVER),
    Claim("servers", "hostile servers: an edge ends each request by name", "studies.attacks.servers --minutes 1.5", 6,
          ("shared_hooks", "edge_client", "protos")),
    Claim("steps", "mutated decode steps: no crash, hang or wrong answer",
          "studies.attacks.steps --minutes 2 --seed 24", 6, HOOKS),
    Claim("siege", "honest clients beside a hostile one", "studies.siege --seconds 4 --loads --cases"
          " half-uploads recipe-churn answers-unread new-shapes big-files tiny-flood", 10, SERVER),
    Claim("soak", "nothing grows", "studies.soak --requests 4000", 8),
    Claim("fuzz", "random models, cut everywhere, a cold tail: exact or refused",
          "studies.fuzz --programs 400 --minutes 5 --seed 24 --results build/claims-fuzz", 8, HOOKS),
    Claim("awkward", "93 kinds of awkward models at three places: exact or refused", "studies.awkward", 6, HOOKS),
    Claim("library", "models of transformers, timm and torchvision: exact or refused",
          "studies.library --models 8 --seed 24 --json build/claims-library.jsonl", 12, HOOKS,
          _module("transformers", "pip install isthmus[dev]")),
    Claim("generation", "split generate() equals the one in one process, token for token",
          "studies.generation architectures --sample 8 --seed 24 --jobs 2", 12, HOOKS,
          _module("transformers", "pip install isthmus[dev]")),
    Claim("prompt privacy", "no token id crosses, nor its row of the embedding", "studies.generation privacy", 5,
          HOOKS, _module("transformers", "pip install isthmus[dev]")),
    Claim("prediction", "the plan's prediction on a shaped link", "studies.experiments prediction --quick", 12,
          ("shared_hooks", "edge_client"), _root_on_linux),
    Claim("mutation", "faults in the guarding code are noticed", "studies.mutation --faults 300 --minutes 0"
          " --covered build/covered --json docs/results/mutation.json", 3, (*SERVER, "edge_client", "tests"),
          lambda: _module("cosmic_ray", "pip install isthmus[mutation]")()
          or ("" if (ROOT / "build/covered/.coverage").exists() else "make mutation runs the suite once first")),
    Claim("footprint", "what an edge imports and holds", "studies.footprint imports --tries 2", 5),
    Claim("benchmarks", "what a request costs beside its layers",
          "studies.benchmarks --quick --only request --only tail --only loopback --only metrics", 12),
)  # fmt: skip


def main() -> int:
    """The exit status: 0 if no row that was run fell short."""
    options = _options()
    kept = json.loads(options.json.read_text())["rows"] if options.json.exists() else {}
    more = dict(options.more)
    unknown = {*options.only, *more} - {claim.name for claim in CLAIMS}
    if unknown:
        print(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in CLAIMS)}")
        return 2
    fell = False
    for claim in CLAIMS if not options.show else ():
        if options.only and claim.name not in options.only:
            continue
        print(f"-- {claim.name}: {claim.says}", flush=True)
        kept[claim.name] = _run(claim, more.get(claim.name, ""))
        fell |= kept[claim.name]["result"] == SHORT
        _write(options.json, kept)
    print(table(kept))
    return 1 if fell else 0


def _run(claim: Claim, more: str) -> dict[str, Any]:
    arguments = f"{claim.arguments} {more}".strip()
    row: dict[str, Any] = {
        "says": claim.says,
        "command": f"python -m {arguments}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "clean": not _git("status", "--porcelain", "--", *claim.about),
    }
    lacks = claim.needs()
    if lacks:
        return {**row, "result": NOT_RUN, "why": lacks}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *shlex.split(arguments)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=60 * claim.minutes)
        why = "" if process.returncode == 0 else f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        why = f"not done within {claim.minutes:g} minutes"
    lines = [line.rstrip() for line in (printed or "").splitlines() if line.strip()]
    row |= {"result": SHORT if why else GREEN, "seconds": round(time.monotonic() - began), "printed": lines[-LINES:]}
    return {**row, "why": why} if why else row


def table(kept: dict[str, dict[str, Any]]) -> str:
    """A line a row."""
    lines = [f"{'row':<16}{'result':<12}{'date':<12}{'commit':<14}{'s':>6}  about", "-" * 100]
    for claim in CLAIMS:
        row = kept.get(claim.name)
        if row is None:
            lines.append(f"{claim.name:<16}never run")
            continue
        age = changed_since(claim, row)
        said = "; ".join(part for part in (row.get("why", ""), age) if part) or claim.says
        took = row.get("seconds", "")
        lines.append(f"{claim.name:<16}{row['result']:<12}{row['date']:<12}{row['commit']:<14}{took:>6}  {said}")
    return "\n".join(lines)


def changed_since(claim: Claim, row: dict[str, Any]) -> str:
    """What makes a row out of date; "" if nothing does."""
    if not row["clean"]:
        return "run on a tree with changes that were not committed"
    if subprocess.run(["git", "cat-file", "-e", row["commit"]], cwd=ROOT, capture_output=True, check=False).returncode:
        return "out of date: its commit is not in this history"
    commits = _git("rev-list", "--count", f"{row['commit']}..HEAD", "--", *claim.about)
    return f"out of date: {commits} commits to {', '.join(claim.about)} since" if commits != "0" else ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _write(file: Path, kept: dict[str, dict[str, Any]]) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    rows = {claim.name: kept[claim.name] for claim in CLAIMS if claim.name in kept}
    file.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.claims", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help=", ".join(one.name for one in CLAIMS))
    parser.add_argument("--with", nargs=2, action="append", default=[], dest="more", metavar=("ROW", "ARGUMENTS"))
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, default=RESULT, help="default: docs/results/claims.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""``make wheel``: wheel and sdist are built, compared, and each installed in a clean environment and tried there.

    python -m studies.wheel                                     # this interpreter
    python -m studies.wheel --python python3.10 --python /opt/python3.13/bin/python --json docs/results/wheel.json
    python wheel.py --dist DIR --constraints constraints.txt    # what was built elsewhere: needs no checkout

Tried is what a person does first: the commands' help, a server of the shipped model, and an edge client that asks it
at a cut, from a folder that holds nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1800
PACKAGES = ("cloud_server", "edge_client", "protos", "shared_hooks")
WHERE = """
import json, platform, shared_hooks, torch
print(json.dumps([shared_hooks.__file__, torch.__version__, platform.python_version()]))
"""


def main() -> int:
    """The exit status: 0 if every installation passed."""
    parser = argparse.ArgumentParser(prog="python -m studies.wheel", description=__doc__.split("\n")[0])
    parser.add_argument("--python", action="append", metavar="PYTHON", help="an interpreter; may be repeated")
    parser.add_argument("--dist", type=Path, metavar="DIR", help="a wheel and an sdist that were built before")
    parser.add_argument(
        "--constraints", type=Path, default=ROOT / "constraints.txt", help="default: the tested versions"
    )
    parser.add_argument("--pip-flags", default="", help='for pip, e.g. "--index-url ..."')
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isthmus-wheel-") as name:
        folder = Path(name)
        dist = options.dist or build(folder)
        wheel, sdist = one(dist, "*.whl"), one(dist, "*.tar.gz")
        reported: dict[str, Any] = {"wheel": wheel.name, "sdist": sdist.name, **compared(wheel, sdist)}
        print(json.dumps(reported), flush=True)
        reported["tried"] = []
        failed = 0
        for python in options.python or [sys.executable]:
            for kind, file in (("wheel", wheel), ("sdist", sdist)):
                flags = ["-c", str(options.constraints.resolve()), *options.pip_flags.split()]
                with tempfile.TemporaryDirectory(prefix="isthmus-wheel-") as place:
                    began = time.monotonic()
                    try:
                        result = {"of": kind, **tried(Path(place), python, file, flags)}
                    except Exception as error:
                        failed += 1
                        result = {"of": kind, "python": python, "failed": f"{type(error).__name__}: {error}"[:2000]}
                result["seconds"] = round(time.monotonic() - began)
                reported["tried"].append(result)
                print(json.dumps(result), flush=True)
    if options.json:
        command = " ".join(["python -m studies.wheel", *map(shlex.quote, sys.argv[1:])])
        text = json.dumps({"date": time.strftime("%Y-%m-%d"), "command": command, **reported}, indent=1)
        options.json.write_text(text + "\n")
    return int(failed > 0)


def build(folder: Path) -> Path:
    """Wheel and sdist, by PyPA's front end in an environment of its own; the wheel is made from the sdist."""
    python = environment(folder / "build", sys.executable)
    run([python, "-m", "pip", "install", "-q", "build"])
    run([python, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)])
    return folder / "dist"


def compared(wheel: Path, sdist: Path) -> dict[str, Any]:
    """Their sizes. Raises RuntimeError where the wheel lacks a file of the packages, or has others."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    source = {name for name in names if name.partition("/")[0] in PACKAGES}
    if inside != source:
        raise RuntimeError(f"wheel and sdist differ in {sorted(inside ^ source)[:10]}")
    strays = [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".so")) or ".venv" in name]
    if strays:
        raise RuntimeError(f"the sdist holds {strays[:10]}")
    return {"files": len(inside), "wheel bytes": wheel.stat().st_size, "sdist bytes": sdist.stat().st_size}


def tried(folder: Path, interpreter: str, file: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Raises what goes wrong, with the output."""
    python = environment(folder / "venv", interpreter)
    run([python, "-m", "pip", "install", "-q", *flags, f"{file}[cloud]"])
    empty = folder / "empty"
    empty.mkdir()
    bin = Path(python).parent
    where, torch, version = json.loads(run([python, "-c", WHERE], empty))
    if not Path(where).is_relative_to(folder.resolve()):
        raise RuntimeError(f"what is tried is {where}")
    for command in ("edge-client", "cloud-server"):
        run([str(bin / command), "--help"], empty)
    images = Path(where).parent / "models" / "digits" / "images"
    log = (folder / "server.log").open("wb")
    words = [str(bin / "cloud-server"), "--model", "digits", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, cwd=empty, env=clean()) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if not line.startswith("listening on "):
                raise RuntimeError(f"the server did not start: {(folder / 'server.log').read_text()[-2000:]}")
            asked = ["run", "--server", line.split()[-1], "--split", "stage2.0.conv2", "--input", str(images)]
            reported = run([str(bin / "edge-client"), *asked], empty)
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(60)
    if status or "measured end to end" not in reported:
        raise RuntimeError(f"the server ended with {status}; the client said {reported[-1000:]}")
    return {"python": version, "torch": torch, "server's exit status": status, "client": "answers as it should"}


def environment(folder: Path, interpreter: str) -> str:
    """The interpreter of a new virtual environment."""
    run([interpreter, "-m", "venv", str(folder)])
    return str(folder / "bin" / "python")


def one(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise RuntimeError(f"{folder} holds {len(found)} of {pattern}")
    return found[0].resolve()


def clean() -> dict[str, str]:
    """An environment in which nothing of a checkout is found."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(words: Sequence[str], folder: Path | None = None) -> str:
    """What a command prints. Raises RuntimeError, with the end of it, where it fails."""
    made = subprocess.run(words, cwd=folder, env=clean(), capture_output=True, text=True, timeout=SECONDS)
    if made.returncode:
        raise RuntimeError(f"{' '.join(words)[:200]}: {(made.stdout + made.stderr)[-1500:]}")
    return made.stdout


if __name__ == "__main__":
    sys.exit(main())

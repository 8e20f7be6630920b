"""tritonclient from the registry, in an environment of its own, by gRPC and by HTTP; and curl."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from studies.doors.material import SPLIT
from studies.doors.process import Server

REFUSALS = ("UnknownModel", 'input "x"')
"""What the refusal of a model that there is not, and of an input that there is not, say."""
ASKS = Path(__file__).with_name("triton_asks.py")
SECONDS = 600


def interpreter(folder: Path) -> Path:
    """One that has tritonclient, and nothing of ours; made where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "tritonclient[grpc,http]", "numpy"]
        subprocess.run(pip, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=SECONDS)
    return python


def ask(python: Path, kind: str, address: str, material: Path) -> dict[str, Any]:
    """Raises RuntimeError with what the client said."""
    made = subprocess.run(
        [str(python), str(ASKS), kind, address, str(material)], capture_output=True, text=True, timeout=SECONDS
    )
    if made.returncode:
        raise RuntimeError(f"tritonclient by {kind}: {made.stderr[-2000:]}")
    return checked(f"tritonclient by {kind}", json.loads(made.stdout))


def checked(client: str, found: dict[str, Any]) -> dict[str, Any]:
    """``found`` if it is what must come. Raises RuntimeError."""
    for claim in ("whole model, the same bits", "tail, the same bits"):
        if found[claim] is not True:
            raise RuntimeError(f"{client}: not {claim}")
    if found["models"] != ["digits", f"digits@{SPLIT}"]:
        raise RuntimeError(f"{client}: models are {found['models']}")
    refused = found["refused"]
    if len(refused) != len(REFUSALS) or not all(map(str.__contains__, refused, REFUSALS)):
        raise RuntimeError(f"{client}: refused was {refused}")
    return found


def curl(server: Server) -> dict[str, Any]:
    """Plain JSON, as a person types it. Raises RuntimeError."""
    if shutil.which("curl") is None:
        raise RuntimeError("curl is not installed")
    one = {"name": "image", "datatype": "FP32", "shape": [1, 1, 28, 28], "data": [0.5] * 784}
    body, url = json.dumps({"inputs": [one]}), f"http://{server.rest}/v2"
    found = {
        "/v2/health/live": _curl(f"{url}/health/live"),
        "/v2/health/ready": _curl(f"{url}/health/ready"),
        "/v2/models/digits": _curl(f"{url}/models/digits"),
        "infer": _curl("-H", "Content-Type: application/json", "-d", body, f"{url}/models/digits/infer"),
    }
    healthy = found["/v2/health/live"] == {"live": True} and found["/v2/health/ready"] == {"ready": True}
    named = found["/v2/models/digits"]["name"] == "digits"
    if not healthy or not named or len(found["infer"]["outputs"][0]["data"]) != 10:
        raise RuntimeError(f"curl: {found}")
    return found


def _curl(*words: str) -> Any:
    return json.loads(
        subprocess.run(["curl", "-sS", "--fail", *words], capture_output=True, check=True, timeout=60).stdout
    )

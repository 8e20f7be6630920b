"""Faults planted on purpose in a copy of the product, and which of them the test device finds.

    python -m studies.device.faults --json docs/results/device_faults.json

Each is one line that a person could forget or get wrong. "Found": the service's run on the test device fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("shared_hooks", "edge_client", "cloud_server")
SECONDS = 240.0
"""The time limit of one run, after which it counts as hung, and so as found."""


class Fault(NamedTuple):
    """``before`` stands once in ``file``."""

    what: str
    file: str
    before: str
    after: str
    runs: tuple[tuple[str, ...], ...] = (("studies.device.service", "--only", "staging", "requests"),)


GENERATION = (("studies.device.service", "--only", "generation"),)
LOOKS = (("studies.device.service", "--only", "metrics and observers"),)
STAGING = "shared_hooks/tensors/staging.py"
FAULTS = (
    Fault("no wait before a copy to the host", STAGING, "    side.wait_stream(made_here)\n", ""),
    Fault("no wait after a copy to the host", STAGING, "    done.synchronize()\n", ""),
    Fault("a wait for the wrong stream", STAGING, "    done.record(side)\n", "    done.record(made_here)\n"),
    Fault("no wait after a copy to the device", STAGING, "    used_here.wait_stream(side)\n", ""),
    Fault("a wait the wrong way round", STAGING, "used_here.wait_stream(side)", "side.wait_stream(used_here)"),
    Fault("a copy's memory is not kept for its reader", STAGING, "    moved.record_stream(used_here)\n", ""),
    Fault(
        "pinned memory used again too early",
        STAGING,
        "        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)\n",
        "        _kept = vars(self).setdefault('kept', {})\n"
        "        if nbytes not in _kept:\n"
        "            _kept[nbytes] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)\n"
        "        return _kept[nbytes].view(-1)\n",
    ),
    Fault(
        "a host read of bytes without a copy",
        STAGING,
        "    flat = tensor.detach().cpu().resolve_conj()",
        "    flat = tensor.detach().resolve_conj()",
    ),
    Fault(
        "a payload read while it is copied",
        "shared_hooks/codecs/codec.py",
        "to_host(tensor).view(",
        'tensor.to("cpu", non_blocking=True).view(',
    ),
    Fault(
        "symbols read while they are copied",
        "shared_hooks/codecs/quantised.py",
        "to_host(packed(found.symbols, self.bits)).numpy()",
        'packed(found.symbols, self.bits).to("cpu", non_blocking=True).numpy()',
    ),
    Fault(
        "places read while they are copied",
        "shared_hooks/codecs/quantised.py",
        "where = found.places.cpu().numpy()",
        'where = found.places.to("cpu", non_blocking=True).numpy()',
    ),
    Fault(
        "the edge's output read while it is copied",
        "edge_client/request/edge_model.py",
        "[to_host(tensor) for tensor in tensors]",
        '[tensor.to("cpu", non_blocking=True) for tensor in tensors]',
        (("studies.device.service", "--only", "requests", "staging", "batches", "many under way"),),
    ),
    Fault(
        "a crossing value stays on the host",
        "shared_hooks/tail/recipe.py",
        "        moved = to_device(pieces[0].reshape(-1), device)\n",
        "        moved = pieces[0].reshape(-1)\n",
    ),
    Fault(
        "weights read by the host",
        "shared_hooks/modules/constants.py",
        "    tensor = tensor.detach().cpu()\n",
        "    tensor = tensor.detach()\n",
    ),
    Fault(
        "weights hashed while they are copied",
        "shared_hooks/modules/constants.py",
        "    tensor = tensor.detach().cpu()\n",
        '    tensor = tensor.detach().to("cpu", non_blocking=True)\n',
    ),
    Fault(
        "observed values read while they are copied",
        "shared_hooks/observers/watching.py",
        "torch.cat(list(row.values())).cpu()",
        'torch.cat(list(row.values())).to("cpu", non_blocking=True)',
        LOOKS,
    ),
    Fault(
        "an observer's thread on another stream",
        "shared_hooks/observers/kinds/activation.py",
        "        stream = devices.current_stream(device)\n",
        "        stream = None if devices.is_host(device) else devices.new_stream(device)\n",
        LOOKS,
    ),
    Fault(
        "times read before the device has passed",
        "shared_hooks/metrics/measurement.py",
        "        ended.synchronize()\n",
        "",
        LOOKS,
    ),
    Fault(
        "a wait for the first mark instead of the last",
        "shared_hooks/metrics/measurement.py",
        "        ended.synchronize()\n",
        "        began.synchronize()\n",
        LOOKS,
    ),
    Fault(
        "a step's inputs stay on the host",
        "cloud_server/models/decoding.py",
        "[to_device(tensor, tails.device) for tensor in tensors]",
        "list(tensors)",
        GENERATION,
    ),
    Fault(
        "a hidden state read by the host",
        "shared_hooks/generation/hidden.py",
        "data.detach().cpu().contiguous().numpy()",
        "data.detach().contiguous().numpy()",
        GENERATION,
    ),
    Fault(
        "the number of a device is lost",
        "shared_hooks/devices.py",
        "    return torch.device(kind, int(number or 0))\n",
        "    return torch.device(kind, 0)\n",
        (("studies.device.service", "--only", "requests", "replicas, unload, load"),),
    ),
)


def judged(fault: Fault) -> dict[str, Any]:
    """What became of a run with the fault: ``found``, and the line that says so."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in PRODUCT:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for other in ("studies", "tests", "examples", "protos", "pyproject.toml"):
            (folder / other).symlink_to(ROOT / other)
        file = folder / fault.file
        text = file.read_text()
        if text.count(fault.before) != 1:
            raise ValueError(f"{fault.what}: its line stands {text.count(fault.before)} times in {fault.file}")
        file.write_text(text.replace(fault.before, fault.after))
        for words in fault.runs:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", *words],
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return {"what": fault.what, "file": fault.file, "found": True, "by": f"hung for {SECONDS:.0f} s"}
            if done.returncode:
                failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
                by = failed[0] if failed else f"the process ended with status {done.returncode}"
                return {"what": fault.what, "file": fault.file, "found": True, "by": by[:240].replace(str(folder), "")}
    return {"what": fault.what, "file": fault.file, "found": False, "by": ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of faults, from 0")
    parser.add_argument("--json", help="write each fault's result there")
    options = parser.parse_args()
    chosen = [FAULTS[number] for number in options.only or range(len(FAULTS))]
    with ThreadPoolExecutor(2) as pool:
        found = []
        for one in pool.map(judged, chosen):
            found.append(one)
            print(f"{'found ' if one['found'] else 'MISSED'} {one['what']}: {one['by']}", flush=True)
    count = sum(one["found"] for one in found)
    print(f"{count} of {len(found)} found")
    if options.json:
        Path(options.json).write_text(
            json.dumps({"found": count, "planted": len(found), "faults": found}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

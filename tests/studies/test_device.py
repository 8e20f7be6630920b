"""The engine and the service on a device that is none, whose memory the host may not touch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from studies.device.faults import FAULTS
from tests.docs.pages import ROOT

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("ninja")), reason="needs a C++ compiler and ninja to build the device"
)
MODELS = [
    "residual",
    "hf_bert",
    "unet",
    "in_place_residual_sum",
    "channels_last",
    "transformer_encoder",
    "masked_fill_in_place",
    "vit_like",
]


@needs_compiler
@pytest.mark.parametrize(
    ("module", "cases", "printed"),
    [
        ("studies.device", MODELS, f"{len(MODELS)} exact"),
        ("studies.device.service", ["staging", "metrics and observers", "out of memory", "parts"], "by pinned memory"),
    ],
)
def test_heads_and_tails_on_two_devices_and_a_service_between(module: str, cases: list[str], printed: str) -> None:
    """In a process of its own, of which the first one builds the device, while others wait for it."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--only", *cases],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0 and printed in done.stdout, done.stdout + done.stderr


def test_the_page_has_the_kept_figures() -> None:
    results = ROOT / "docs" / "results"
    page = (results / "device.md").read_text()
    kept = json.loads((results / "device.json").read_text())
    counts = kept["counts"]
    assert set(counts) == {"exact", "left out"}
    assert f"| {len(kept['models'])} | {kept['cuts']:,} | {counts['exact']} | 0 | 0 | {counts['left out']} |" in page
    faults = json.loads((results / "device_faults.json").read_text())
    assert f"Found: {faults['found']} of {faults['planted']}." in page and faults["planted"] == len(FAULTS)
    for one in faults["faults"]:
        assert f"| {one['what']} | `{one['file']}` | {'yes' if one['found'] else '**no**'} |" in page


def test_each_fault_changes_one_line_of_the_product() -> None:
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.before) == 1, fault.what

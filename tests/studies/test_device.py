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
def test_heads_and_tails_on_two_devices_and_a_service_between() -> None:
    """One process after the other: the first one builds the device."""
    for words in (
        ["--only", *MODELS],
        ["--only", "staging", "metrics and observers", "out of memory", "parts"],
    ):
        module = "studies.device" if words[1] in MODELS else "studies.device.service"
        done = subprocess.run(
            [sys.executable, "-m", module, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        wanted = f"{len(MODELS)} exact" if module == "studies.device" else "by pinned memory"
        assert wanted in done.stdout, done.stdout


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

"""Every channel to a server is opened at one place, which anybody may load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from edge_client.dial import is_loopback

ROOT = Path(__file__).resolve().parents[2]


def test_channels_are_opened_in_one_place() -> None:
    files = [path for folder in ("edge_client", "deploy") for path in (ROOT / folder).rglob("*.py")]
    found = [path.name for path in files if "secure_channel(" in path.read_text()]
    assert found == ["dial.py"]


def test_dialling_needs_no_torch() -> None:
    code = (
        "import sys, edge_client.dial; edge_client.dial.dial('127.0.0.1:1').close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_loopback_addresses_are_known() -> None:
    assert is_loopback("127.0.0.1:1") and is_loopback("localhost:1") and is_loopback("[::1]:1")
    assert not is_loopback("10.0.0.1:1") and not is_loopback("edge.example:1")

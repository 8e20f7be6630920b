"""A run under a service manager, heard at the socket that systemd would open."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.commands.run import ServiceManager
from shared_hooks.models import digits

TIMEOUT = 120.0
IMAGES = Path(digits.__file__).parent / "images"


def opened(address: str) -> socket.socket:
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.bind(address)
    ear.settimeout(TIMEOUT)
    return ear


def heard(ear: socket.socket) -> list[str]:
    return ear.recv(4096).decode().splitlines()


@pytest.mark.parametrize("named", ["path", "abstract"])
def test_ready_then_alive_at_most_every_second(named: str, tmp_path: Path) -> None:
    address = str(tmp_path / "notify") if named == "path" else f"\0isthmus-{os.getpid()}"
    with opened(address) as ear:
        now = 10.0
        manager = ServiceManager({"NOTIFY_SOCKET": address.replace("\0", "@")}, lambda: now)
        manager.answered("1 answered")
        manager.answered("2 answered")
        now = 11.5
        manager.answered("3 answered")
        manager.stopping()
        assert [heard(ear) for _ in range(3)] == [
            ["READY=1", "STATUS=1 answered"],
            ["WATCHDOG=1", "STATUS=3 answered"],
            ["STOPPING=1"],
        ]


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere/notify"}])
def test_without_a_manager_nothing_happens(environ: dict[str, str]) -> None:
    manager = ServiceManager(environ)
    manager.answered("1 answered")
    manager.stopping()


def test_a_run_is_ready_with_its_first_answer_and_ends_at_sigint(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    command = [sys.executable, "-m", "edge_client", "run", "--split", "edge-only", "--no-progress"]
    with opened(address) as ear:
        run = subprocess.Popen(
            [*command, "--input", *[str(IMAGES)] * 500],
            env={**os.environ, "NOTIFY_SOCKET": address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            ready = heard(ear)
            assert ready[0] == "READY=1"
            assert ready[1].startswith("STATUS=1 answered, the last in ")
            alive = heard(ear)
            assert alive[0] == "WATCHDOG=1"
            run.send_signal(signal.SIGINT)
            while heard(ear) != ["STOPPING=1"]:
                pass
            printed, _ = run.communicate(timeout=TIMEOUT)
        finally:
            run.kill()
    assert run.returncode == 130, printed

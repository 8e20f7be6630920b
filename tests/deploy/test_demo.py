"""`make demo`'s script: what it prints, and that it leaves no process behind however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.demo import main
from tests.docs.pages import blocks
from tests.docs.reader import Output, difference
from tests.starts import forked

ROOT = Path(__file__).resolve().parents[2]
(SHOWN,) = (block for block in blocks(ROOT / "README.md") if block.text.startswith("$ make demo\n"))


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "deploy.demo", "--device", "cpu"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.terminate()
    process.communicate(timeout=60)


def test_the_demo_prints_what_the_readme_shows(demo: subprocess.Popen[str]) -> None:
    output, _ = demo.communicate(timeout=150)
    assert demo.returncode == 0, output
    wrong = difference(Output(SHOWN, f"$ make demo\n{output.replace('--device cpu', '--device auto')}"))
    assert wrong is None, wrong


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(demo: subprocess.Popen[str], number: signal.Signals) -> None:
    children: list[psutil.Process] = []
    limit = time.monotonic() + 60
    while not children and time.monotonic() < limit:
        children = psutil.Process(demo.pid).children(recursive=True)
        time.sleep(0.05)
    assert children
    demo.send_signal(number)
    demo.communicate(timeout=60)
    assert demo.returncode not in (0, None)
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_a_process_whose_parent_is_gone_before_it_begins_does_not_begin() -> None:
    lines = [
        "import os, subprocess, sys",
        "from edge_client.process import end_with_parent",
        "os.getpid = lambda: 1",
        "begun = [sys.executable, '-c', 'print(1)']",
        "sys.exit(subprocess.Popen(begun, preexec_fn=end_with_parent()).wait())",  # as if another had been the parent
    ]
    found = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert (found.returncode, found.stdout) == (128 + signal.SIGTERM, ""), found.stderr


def test_a_failing_demo_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with forked("deploy.demo.subprocess"):
            assert main(["--split", "stage9", "--device", "cpu"]) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    reported = capfd.readouterr().err
    assert "stage9" in reported and "demo: the edge client ended with status 2" in reported

"""``make demo``: the shipped model, cut inside a residual block, over two processes on this machine.

Starts a cloud server on a free port of the loopback device, sends the shipped test images through the cut with
``edge-client run``, and stops the server with SIGTERM. Exit status 0 only if every image was answered, the answers are
as accurate as the model is, and the server drained. Whatever happens, no process is left behind.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from edge_client.process import end_with_parent

ROOT = Path(__file__).resolve().parent.parent
IMAGES = Path("shared_hooks", "models", "digits", "images")
"""In `ROOT`, where both processes run."""
SPLIT = "stage2.0.conv2"
"""Inside a residual block: the branch and the block's input, which the shortcut still needs, both cross."""
LEAST_ACCURACY = 0.95
START_SECONDS, RUN_SECONDS, STOP_SECONDS = 120.0, 300.0, 30.0


class DemoFailed(Exception):
    """The demo did not do what it shows; the message is for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--split", default=SPLIT, help=f"where to cut, default {SPLIT}")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N, for both sides")
    parser.add_argument("--threads", type=int, default=1, help="of each side, default 1")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    both = ["--device", options.device, "--threads", str(options.threads)]
    try:
        with tempfile.TemporaryDirectory(prefix="isthmus-demo-") as folder:
            _demo(options.split, both, Path(folder))
    except DemoFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    return 0


def _demo(split: str, both: Sequence[str], folder: Path) -> None:
    began = time.monotonic()
    with _process(["cloud_server", "--listen", "127.0.0.1:0", "--model", "digits", *both], folder) as server:
        address = _address(server, folder)
        _say(f"cloud server: process {server.pid}, {address}, ready after {time.monotonic() - began:.1f} s")
        results = folder / "results.json"
        # One request at a time, so that the table shows one request and not a queue.
        command = ["edge_client", "run", "--server", address, "--model", "digits", "--split", split]
        command += ["--input", str(IMAGES), "--in-flight", "1", "--layers", *both]
        _say(f"edge client:  {shlex.join(['edge-client', *command[1:]])}\n")
        command += ["--json", str(results)]  # for us
        with _process(command) as client:
            try:
                status = client.wait(RUN_SECONDS)
            except subprocess.TimeoutExpired:
                raise DemoFailed(f"the edge client did not finish within {RUN_SECONDS:.0f} s") from None
        if status != 0:
            raise DemoFailed(f"the edge client ended with status {status}{_tail(folder)}")
        _check(json.loads(results.read_text(encoding="utf-8")))
        server.send_signal(signal.SIGTERM)
        try:
            status = server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"the server did not stop within {STOP_SECONDS:.0f} s{_tail(folder)}") from None
        if status != 0:
            raise DemoFailed(f"the server ended with status {status}{_tail(folder)}")
        _say(f"\ncloud server: stopped by SIGTERM, drained, status 0; all of it took {time.monotonic() - began:.1f} s")


@contextmanager
def _process(command: Sequence[str], output: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m command`` as a process of this demo, gone at the end of the block; its output goes to two files.

    It has a session of its own: Ctrl-C reaches only the demo, which then ends its processes in order.
    """
    stdout = stderr = None
    if output is not None:
        stdout, stderr = (output / "stdout").open("wb"), (output / "stderr").open("wb")
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
    finally:
        for file in (stdout, stderr):
            if file is not None:
                file.close()
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(server: subprocess.Popen[bytes], folder: Path) -> str:
    """HOST:PORT from the line that the server prints when it is ready."""
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit:
        status = server.poll()
        found = re.search(r"listening on (\S+:\d+)", (folder / "stdout").read_text(encoding="utf-8"))
        if status is not None:
            raise DemoFailed(f"the server ended with status {status} before it was ready{_tail(folder)}")
        if found:
            return found.group(1)
        time.sleep(0.05)
    raise DemoFailed(f"the server was not ready within {START_SECONDS:.0f} s{_tail(folder)}")


def _check(results: Any) -> None:
    """Every image answered, and as accurately as this model answers."""
    expected = len(list((ROOT / IMAGES).glob("*.png")))
    answered = [entry for entry in results["inputs"] if entry.get("error") is None]
    if len(answered) != expected:
        raise DemoFailed(f"{len(answered)} of {expected} images were answered")
    right = sum(entry["predictions"][0]["label"] == entry["truth"] for entry in answered)
    if right < LEAST_ACCURACY * expected:
        raise DemoFailed(f"only {right} of {expected} predictions are right: something is broken")


def _tail(folder: Path) -> str:
    """The last lines of the server's log, to follow a message."""
    lines = (folder / "stderr").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "".join(f"\n    {line}" for line in ["; the server's last words:", *lines]) if lines else ""


def _say(text: str) -> None:
    print(text, flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())

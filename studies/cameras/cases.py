"""One run of `edge-client run` before each sender, and what must come of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from studies.cameras import senders

ROOT = Path(__file__).parents[2]
TS = f"{senders.H264} ! mpegtsmux"
H264 = f"{senders.H264} ! h264parse ! video/x-h264,stream-format=byte-stream"
FRAMES = 90


@dataclass
class Outcome:
    """One case's exit status, its `source` by --json, its last line on standard error, and what falls short."""

    case: str
    status: int
    source: dict[str, Any]
    reported: str
    fault: str

    def json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


def run(
    case: str, words: list[str], status: int, reported: str = "", then: Callable[[], None] | None = None
) -> Outcome:
    """``edge-client run`` on the shipped model; ``then`` is called when the first ten frames are answered."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "run.json"
        command = [sys.executable, "-m", "edge_client", "run", "--split", "edge-only", "--threads", "1", *words]
        process = subprocess.Popen(
            [*command, "--no-progress", "--json", str(kept)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        timer = threading.Timer(120, process.kill)
        timer.start()
        for _ in range(10 if then else 0):
            process.stdout.readline()
        if then:
            then()
        _, error = process.communicate()
        timer.cancel()
        source = json.loads(kept.read_text())["source"] if kept.exists() else {}
    last = error.strip().splitlines()[-1] if error.strip() else ""
    fault = ""
    if process.returncode != status:
        fault = f"status {process.returncode}, not {status}"
    elif reported not in last:
        fault = f'"{reported}" was not said'
    elif "secret" in error or "secret" in json.dumps(source):
        fault = "the password was shown"
    elif source and source["taken"] != source["answered"]:
        fault = "a frame that was taken was not answered"
    return Outcome(case, process.returncode, source, last, fault)


def all_cases() -> list[Outcome]:
    """Every sender, one after the other."""
    many = ["--frames", str(FRAMES)]
    found = []
    for name, pipeline in (("MPEG-TS by TCP", TS), ("H.264 by TCP, as rpicam-vid --listen", H264)):
        port = senders.free_port()
        with senders.gstreamer(pipeline, port):
            found.append(run(name, ["--input", f"tcp://127.0.0.1:{port}", *many], 0))
    port = senders.free_port()
    with senders.udp(TS, port):
        found.append(run("MPEG-TS by UDP", ["--input", f"udp://127.0.0.1:{port}", *many], 0))
    port = senders.free_port()
    with senders.http(port):
        found.append(run("JPEGs by HTTP", ["--input", f"http://127.0.0.1:{port}/video", *many], 0))
    port = senders.free_port()
    with senders.rtsp(port) as sender:
        there = f"127.0.0.1:{port}"
        found.append(run("RTSP", ["--input", f"rtsp://me:secret@{there}/cam", *many], 0))
        found.append(run("RTSP, wrong password", ["--input", f"rtsp://me:secretly@{there}/cam"], 2, "401"))
        found.append(run("RTSP, wrong path", ["--input", f"rtsp://me:secret@{there}/none"], 2, "404"))
        found.append(
            run("RTSP, the server killed", ["--input", f"rtsp://me:secret@{there}/cam"], 1, "ended after", sender.kill)
        )
    port = senders.free_port()
    with senders.gstreamer(TS, port) as sender:
        stop = lambda: sender.send_signal(signal.SIGSTOP)  # noqa: E731
        found.append(run("the sender stopped", ["--input", f"tcp://127.0.0.1:{port}"], 1, "nothing came within", stop))
    found.append(example())
    return found


def example() -> Outcome:
    """`examples/jetson_gstreamer.py` with GStreamer's test picture in place of the camera."""
    with tempfile.TemporaryDirectory() as folder:
        # the system's bindings, and none of the other packages beside them
        (Path(folder) / "gi").symlink_to("/usr/lib/python3/dist-packages/gi")
        done = subprocess.run(
            [sys.executable, "examples/jetson_gstreamer.py", "--frames", str(FRAMES)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder}"},
            timeout=120,
        )
    last = (done.stdout or done.stderr).strip().splitlines()[-1]
    fault = "" if done.returncode == 0 and f"{FRAMES} answered" in last else "it failed"
    return Outcome("examples/jetson_gstreamer.py", done.returncode, {}, last, fault)

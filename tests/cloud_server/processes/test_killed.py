"""A server's workers are killed at random while several clients ask: every answer comes, and is the model's own.

``ISTHMUS_KILLS=20 ISTHMUS_REQUESTS=1000`` asks for more than a quick run does.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

from cloud_server.processes.channel import SharedMemory
from cloud_server.processes.worker_process import ALL, _boot
from edge_client import ConnectionOptions, EdgeClient
from edge_client.model_choice import ModelChoice
from tests.cloud_server.real import Process
from tests.starts import run, workers_of
from tests.waiting import PATIENCE, eventually

ROOT = Path(__file__).parents[3]
KILLS, REQUESTS = int(os.environ.get("ISTHMUS_KILLS", "1")), int(os.environ.get("ISTHMUS_REQUESTS", "150"))
CUTS = ("input", "stage1.0.conv1", "stage2.0.conv2")
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGKILL, signal.SIGKILL)


def workers(server: psutil.Process) -> list[psutil.Process]:
    return workers_of(server.pid)


def held(server: psutil.Process) -> tuple[int, int]:
    """Descriptors, and mappings of the shared memory."""
    return server.num_fds(), sum("memfd" in one.path for one in server.memory_maps(grouped=False))


def test_killed_at_random() -> None:
    process = Process("--workers", "2", "--device", "cpu", cwd=ROOT)
    orphans: list[psutil.Process] = []
    try:
        server = psutil.Process(process.process.pid)
        assert len(workers(server)) == 2
        inputs = [torch.randn(1 + number % 3, 1, 32, 32) for number in range(6)]
        wrong: list[str] = []
        asked = [0]
        over = threading.Event()
        start = threading.Barrier(len(CUTS) + 1)
        ready = threading.Barrier(len(CUTS) + 1)

        def ask(cut: str) -> None:
            choice = ModelChoice("digits", device="cpu", threads=1)
            options = ConnectionOptions(patience=PATIENCE)
            address = f"127.0.0.1:{process.port}"
            with EdgeClient(address, choice, cut, deadline=600.0, connection=options) as client:
                expected = [client.wrapped.forward(x) for x in inputs]
                number = 0
                while not over.is_set():
                    try:
                        answer = client.infer(inputs[number % len(inputs)])
                        if not torch.equal(answer.output, expected[number % len(inputs)]):
                            wrong.append(f"{cut}: other bits")
                    except Exception as error:
                        wrong.append(f"{cut}: {type(error).__name__}: {error}")
                    if number == 2 * len(inputs):
                        ready.wait()
                        start.wait()
                    asked[0] += 1
                    number += 1

        threads = [threading.Thread(target=ask, args=(cut,)) for cut in CUTS]
        for thread in threads:
            thread.start()
        ready.wait(10 * PATIENCE)
        before = held(server)
        start.wait()
        draw = random.Random(1)
        for number in range(KILLS):
            eventually(lambda number=number: process.log.count("is warm") == 2 + number, seconds=4 * PATIENCE)  # type: ignore[misc]
            time.sleep(draw.random() * 0.2)
            draw.choice(workers(server)).send_signal(SIGNALS[number % len(SIGNALS)])
        eventually(lambda: asked[0] >= REQUESTS or wrong, seconds=10 * PATIENCE)
        over.set()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:5]
        eventually(lambda: process.log.count("is warm") == 2 + KILLS, seconds=4 * PATIENCE)
        assert all(f"was ended by {one.name}" in process.log for one in SIGNALS[:KILLS])
        eventually(lambda: held(server)[0] <= before[0], "more descriptors than before")
        assert held(server)[1] == before[1] == 1
        orphans = workers(server)
        process.signal(signal.SIGKILL)
        process.wait()
        eventually(lambda: not any(one.is_running() and one.status() != "zombie" for one in orphans), "orphans live on")
    finally:
        process.close()
        for one in orphans:
            if one.is_running():
                one.kill()


def test_a_worker_that_starts_is_in_no_process_group_of_a_terminal() -> None:
    """So Ctrl-C, which ends or drains the server, does not reach it while it imports torch."""
    process = Process("--workers", "2", "--device", "cpu", cwd=ROOT)
    try:
        server = psutil.Process(process.process.pid)
        assert all(os.getpgid(one.pid) == one.pid != os.getpgid(server.pid) for one in workers(server))
    finally:
        process.close()


def test_a_server_that_stops_while_a_worker_starts_leaves_no_traceback() -> None:
    memory = SharedMemory(1 << 20)
    ours, theirs = socket.socketpair()
    ours.close()
    program = _boot(["--model", "digits", "--device", "cpu"], ALL, theirs.fileno(), memory, memory.allocate(8))
    ended = run([sys.executable, "-c", program], pass_fds=(theirs.fileno(), memory.fd))
    theirs.close()
    memory.close()
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr

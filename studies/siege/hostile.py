"""The hostile client's process: one case, for so many seconds.

    python -m studies.siege.hostile CASE[,CASE...] HOST:PORT MATERIAL SECONDS [options]

runs the cases at the same time. It prints ``ready``, waits for a line, and at the end prints JSON: what it sent, and
the answers it got.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import threading
from pathlib import Path

from studies.siege.cases import CASES
from studies.siege.material import Material
from studies.siege.stranger import Stranger

PIECE = 256 << 10


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases")
    parser.add_argument("address")
    parser.add_argument("material", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--token", default="")
    parser.add_argument("--source", default="")
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--victims", nargs="*", default=[])
    options = parser.parse_args()
    address = through(options.source, options.address) if options.source else options.address
    material = Material.read(options.material)
    for name in options.cases.split(","):
        CASES[name].prepare()
    print("ready", flush=True)
    sys.stdin.readline()
    _only_what_is_left()
    stranger = Stranger(address, material, options.seconds, options.token, options.victims)
    stranger.rate = options.rate
    runs = [CASES[name].run for name in options.cases.split(",")]
    stranger.together(len(runs), lambda number: runs[number](stranger))
    stranger.wait()  # also where it was stopped early: what it left behind stays that long
    print(json.dumps({"sent": stranger.sent, "reported": stranger.reported()[:12]}), flush=True)
    # its threads and channels need not end in order: whoever is hostile does not say goodbye
    os._exit(0)


def _only_what_is_left() -> None:
    """It gets the processor when nobody else wants it: a hostile client on another machine would take none of ours."""
    if hasattr(os, "sched_setscheduler"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def through(source: str, address: str) -> str:
    """An address here whose connections go on to ``address`` from ``source``, another loopback address."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection((host, int(port)), source_address=(source, 0))
            except OSError:
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=(one, other), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    sys.exit(main())

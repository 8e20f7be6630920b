"""``make doors``: tritonclient, curl, Prometheus and OpenTelemetry, each for real; a line each, JSON on request."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.doors import material, scraping, triton
from studies.doors.collecting import Collector, collect
from studies.doors.process import Server


def main() -> int:
    """The exit status: 0 if every client got what it came for."""
    parser = argparse.ArgumentParser(prog="python -m studies.doors", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument(
        "--venv", type=Path, help="tritonclient's environment, made where it is missing; default: none kept"
    )
    options = parser.parse_args()
    reported: dict[str, Any] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as name, Collector() as collector:
        folder = Path(name)
        made = material.make(folder)
        with Server(folder, OTEL_EXPORTER_OTLP_ENDPOINT=collector.address) as server:
            python = triton.interpreter(options.venv or folder / "venv")
            doors: dict[str, Callable[[], dict[str, Any]]] = {
                "tritonclient, gRPC": lambda: triton.ask(python, "grpc", server.grpc, made),
                "tritonclient, HTTP": lambda: triton.ask(python, "http", server.rest, made),
                "curl": lambda: triton.curl(server),
                "OpenTelemetry": lambda: collect(server, collector),
                "Prometheus": lambda: scraping.scrape(server, folder, _free_port()),
            }
            for door, attempt in doors.items():
                try:
                    reported[door] = attempt()
                except Exception as error:
                    failed += 1
                    reported[door] = {"failed": f"{type(error).__name__}: {error}"}
                print(f"{door}: {json.dumps(reported[door])}", flush=True)
            reported["server's exit status"] = status = server.end()
            if status:
                failed += 1
                print(f"the server ended with status {status}: {server.log()[-2000:]}", flush=True)
    print(f"{len(doors)} doors; {failed} failures")
    if options.json:
        command = " ".join(["python -m studies.doors", *sys.argv[1:]])
        text = json.dumps({"date": time.strftime("%Y-%m-%d"), "command": command, **reported}, indent=1)
        options.json.write_text(text + "\n")
    return int(failed > 0)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())

"""What a worker is reported of the caller, and what it keeps of it: bounds hold there as in the server."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from cloud_server.config import ServerConfig
from cloud_server.limits import Limits
from cloud_server.processes.channel import RequestTask
from cloud_server.processes.worker import WorkerLoop
from shared_hooks.crossing import decoded_bytes
from shared_hooks.lifecycle import About
from tests.cloud_server.fakes import make_crossing


def test_a_worker_knows_on_whom_its_log_lines_count() -> None:
    about = About(1, 2, None, "model", "client", "alice", "identity alice")
    task = RequestTask("model", about, about.account, None, ".png", b"", memoryview(b""), False, ())
    assert About(*json.loads(json.dumps(task.head()))["about"]) == about


class Cuts:
    """The server's end of the channel, where a worker asks for cuts."""

    def __init__(self) -> None:
        self.made = [make_crossing(5, f"layer{number}").to_bytes() for number in range(20)]
        self.wanted = 0
        self.asked: list[int] = []

    def send(self, head: dict[str, Any], *parts: bytes) -> None:
        assert head["is"] == "cut?"
        self.asked.append(self.wanted)

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        return {}, [self.made[self.wanted]]

    def array(self, start: int, nbytes: int) -> bytearray:
        return bytearray(nbytes)


def test_cuts_that_a_worker_keeps_count_as_what_they_become() -> None:
    """Lists of nothing take 24 times their size: a megabyte is soon a gigabyte in each worker."""
    cuts = Cuts()
    size = decoded_bytes(cuts.made[0])
    limits = dataclasses.replace(Limits(), max_cuts_bytes=5 * size + size // 2)
    config = ServerConfig(limits=limits)
    worker = WorkerLoop(config, {}, cuts, cuts, 0)  # type: ignore[arg-type]
    for cuts.wanted in [*range(20), 19, 18, 17, 16, 15, 14]:
        assert worker._crossing(str(cuts.wanted)).layer_name == f"layer{cuts.wanted}"
    assert cuts.asked == [*range(20), 14], "five fit, and the sixth is asked for again"

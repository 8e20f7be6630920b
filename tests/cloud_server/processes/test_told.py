"""What a worker is told of who asks, and what it keeps of it: bounds hold there as in the server."""

from __future__ import annotations

import dataclasses
import json

from cloud_server.limits import Limits
from cloud_server.processes.task import Task
from cloud_server.processes.worker import _Crossings
from shared_hooks.crossing import decoded_bytes
from shared_hooks.lifecycle import About
from tests.cloud_server.fakes import make_crossing


def test_a_worker_knows_on_whom_its_log_lines_count() -> None:
    about = About(1, 2, None, "model", "client", "alice", "identity alice")
    task = Task("model", about, about.account, None, ".png", b"", memoryview(b""), False, ())
    assert About(*json.loads(json.dumps(task.head()))["about"]) == about


def test_cuts_that_a_worker_keeps_count_as_what_they_become() -> None:
    """Lists of nothing take 24 times their size: a megabyte is soon a gigabyte in each worker."""
    data = [make_crossing(5, f"layer{number}").to_bytes() for number in range(20)]
    size = decoded_bytes(data[0])
    limits = dataclasses.replace(Limits(), max_cuts_bytes=5 * size + size // 2)
    kept = _Crossings(limits)
    for number, one in enumerate(data):
        assert kept.add(str(number), one).layer_name == f"layer{number}"
    assert len(kept._kept) <= 5 and kept.get("19") is not None

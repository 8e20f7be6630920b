"""Tokens a second of a server whose sessions' steps are computed together, over loopback.

One worker with one thread, which waits up to 10 ms for the steps of other sessions; the clients are another process on
the same machine. The model is cut after its first block, so nearly all of it runs at the server. Recorded steps, sent
again, show what the server can; `generate()` has the heads of all sessions in the clients' one process as well.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from studies.benchmarks.processes import cloud, probe
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.sessions_clients import LANGUAGE, LENGTHS
from studies.benchmarks.timing import pairwise, ratio

NETWORK, CUT = "language_16x768", "model.layers.0"
LIMIT = 0.5
DELAY = 10_000
"""Microseconds that the worker waits for the other sessions' steps."""


def measure(options: Options) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "server.toml")
        file.write_text(f"[limits]\nmax_queue_delay_microseconds = {DELAY}\n")
        with cloud(NETWORK, shape=None, module=LANGUAGE, threads=options.threads, words=[str(file)]) as address:
            words = address, NETWORK, CUT, f"{options.repeats(6)}"
            found = probe("sessions_clients", *words, threads=options.threads)
    lines, seconds, batch_size = [], found["seconds"], found["batch_size"]
    details = {}
    for kind, what in (("replayed", "recorded steps"), ("generated", "generate()")):
        alone = seconds[f"{kind} alone"]
        for way, limit in (("exact", None), ("together", LIMIT if kind == "replayed" else None)):
            own, met = seconds[f"{kind} {way}"], batch_size[f"{kind} {way}"]
            share = ratio(own, alone)
            note = (
                f"{1 / share:.2f} times the tokens a second: {1 / statistics.median(own):.1f} against "
                f"{1 / statistics.median(alone):.1f}; {statistics.mean(met):.1f} steps met on the average"
            )
            lines.append(Line(f"{what}, {len(LENGTHS)} sessions {way} / 1", share, "x", limit, note))
            details[f"{kind} {way}"] = pairwise(own, alone).as_dict()
    return Row(tuple(lines), details)

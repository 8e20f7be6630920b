"""``python -m studies.benchmarks``: measure, print a table, write JSON. Exit status 0 whatever is measured."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROWS = {
    "tail": ("tail_time", "CPU time of the tail"),
    "halves": ("halves", "CPU time of head and tail together"),
    "hooks": ("hook_cost", "hook cost per layer"),
    "bytes": ("bytes_cost", "to_bytes and from_bytes"),
    "codecs-speed": ("codecs_speed", "codecs: time a byte"),
    "codecs-lossless": ("codecs_lossless", "codecs without loss against lz4"),
    "loopback": ("loopback", "round trip over loopback"),
    "calls": ("python_calls", "Python calls of a request and of a token"),
    "request": ("request_cost", "a request beside its layers"),
    "stream": ("stream", "requests in a stream against their slowest stage"),
    "overlap": ("overlap", "one request, whose sections leave before its head has ended"),
    "frontier": ("frontier", "3.2 MB frontier against a bare gRPC echo"),
    "pipes": ("pipes", "ways between two processes"),
    "memory": ("edge_memory", "memory of the edge"),
    "layers": ("layer_sum", "layers and the whole forward"),
    "metrics": ("metrics_cost", "metrics on against off"),
    "observers": ("observer_cost", "100 observers"),
    "lifecycle": ("lifecycle_cost", "a stage of the life cycle"),
    "wire": ("wire_bytes", "bytes beside the tensors"),
    "tls": ("tls_cost", "TLS and a token against none"),
    "workers": ("workers", "worker processes against threads"),
    "lengths": ("lengths", "a new sequence length"),
    "decoding": ("decoding", "a token of a split generate()"),
    "together": ("together", "decode steps together"),
    "sessions": ("sessions", "sessions of one server together"),
    "batching": ("batching", "requests of several clients as a batch"),
    "compiled": ("compiled", "compiled tails"),
    "captured": ("captured", "a decode step as a graph, and compiled"),
    "drafting": ("drafting", "drafts over 40 ms"),
    "plan": ("plan_cost", "time and memory of planning"),
    "naive": ("naive", "baseline: naive resume"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.benchmarks", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}; repeatable"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured; - is standard output")
    parser.add_argument("--quick", action="store_true", help="fewer cuts and repeats: a look, not a result")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch's, on each side; default 1")
    arguments = parser.parse_args(argv)
    # before torch is imported: OpenMP reads it once
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)

    import torch

    from studies.benchmarks import machine
    from studies.benchmarks.row import Options
    from studies.benchmarks.table import heading, table

    to_screen = sys.stderr if arguments.json == Path("-") else sys.stdout
    options = Options(arguments.quick, arguments.threads, lambda text: print(text, file=sys.stderr, flush=True))
    facts = machine.facts()
    print(heading(facts, arguments.threads), file=to_screen, flush=True)
    results = {}
    for name in arguments.only or ROWS:
        module, title = ROWS[name]
        options.say(f"{title} ...")
        # the first three and the baseline count CPU time of one thread
        torch.set_num_threads(1)
        results[name] = importlib.import_module(f"studies.benchmarks.{module}").measure(options)
    print(table(line for row in results.values() for line in row.lines), file=to_screen)
    if arguments.json:
        report = {
            "machine": facts,
            "threads": arguments.threads,
            "quick": arguments.quick,
            "rows": {name: row.as_dict() for name, row in results.items()},
        }
        text = json.dumps(report, indent=1) + "\n"
        if arguments.json == Path("-"):
            sys.stdout.write(text)
        else:
            arguments.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

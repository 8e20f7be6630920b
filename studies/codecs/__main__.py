"""``python -m studies.codecs rates``: measure, print a table, write JSON. Exit status 0 whatever is measured."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.codecs", description=__doc__)
    parser.add_argument("what", choices=("rates",))
    parser.add_argument("--copies", type=int, default=10, metavar="N", help="distorted ones of an image (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes")
    options = parser.parse_args(argv)

    import torch

    from studies.benchmarks import machine
    from studies.codecs import rates

    torch.set_num_threads(1)
    found = rates.measure(options.copies)
    print(f"{'images':10} {'cut':17} {'codec':13} {'smaller':>8} {'+ header':>8} {'agree':>8} {'loss':>6}")
    for one in found:
        words = f"{one['images']:10} {one['cut']:17} {one['codec']:13}"
        sizes = f"{one['ratio']:7.1f}x {one['ratio_with_header']:7.1f}x"
        print(f"{words} {sizes} {100 * one['agreement']:7.2f}% {one['loss_points']:+6.2f}")
    if options.json:
        told = {
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["python -m studies.codecs", *(sys.argv[1:] if argv is None else argv)]),
            "machine": machine.facts(),
            "rates": found,
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

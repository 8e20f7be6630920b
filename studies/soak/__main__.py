"""``make soak``: 100,000 requests and 1,000 reconnects; memory, descriptors and threads of server and client."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from studies.soak.run import soak


def main() -> int:
    """The exit status: 0 if nothing grew, and no answer was wrong or lost."""
    parser = argparse.ArgumentParser(prog="python -m studies.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--reconnects", type=int, help="default: one for 100 requests")
    parser.add_argument("--workers", type=int, default=1, help="of the server")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    reconnects = options.requests // 100 if options.reconnects is None else options.reconnects
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), options.requests, reconnects, options.workers)
    print(result)
    if options.json:
        command = " ".join(["python -m studies.soak", *sys.argv[1:]])
        reported = {"date": time.strftime("%Y-%m-%d"), "command": command, **result.json()}
        options.json.write_text(json.dumps(reported, indent=1) + "\n")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())

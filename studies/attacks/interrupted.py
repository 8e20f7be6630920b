"""Ctrl-C at any moment of a start: ``python -m studies.attacks.interrupted --runs 60 server edge``.

Starts a command again and again, sends it SIGINT after a random time, and looks how it ends: at once and by name
(status 130, one line), drained (status 0) where the server was up already, or otherwise. The exit status is 0 if all
were well.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = str(ROOT / "shared_hooks" / "models" / "digits" / "images")
COMMANDS = {
    "server": ["-m", "cloud_server", "--listen", "127.0.0.1:0", "--threads", "1"],
    # port 9, discard: nobody is there, so that it waits once it is up
    "edge": [*"-m edge_client run --server 127.0.0.1:9 --split input --device cpu --input".split(), IMAGES],
}
WITHIN = 30.0
"""Seconds in which a process that was interrupted must be gone."""


def interrupted(command: Sequence[str], after: float) -> tuple[str, str]:
    """How a process ended that heard SIGINT so many seconds after its start, and what it said."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(after)
    early = process.poll()
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return "swallowed: it went on", err
    if early is not None:
        return "ended before", err
    if process.returncode == 130:
        return ("interrupted" if err.endswith(": interrupted\n") else "130, with other words"), err
    if process.returncode == 0 and "listening" in out:
        return "drained", err
    if process.returncode == -signal.SIGINT or err.startswith("Fatal Python error: init"):
        return "ended by the signal", err  # Python itself was not up, or on its way out
    return f"status {process.returncode}", err


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("commands", nargs="*", default=[*COMMANDS], metavar="COMMAND", help=f"of {[*COMMANDS]}")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--until", type=float, default=4.0, metavar="SECONDS", help="the latest interrupt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or the processes would not hear of it
    chance, bad = random.Random(options.seed), 0
    for name in options.commands:
        ends: Counter[str] = Counter()
        for _ in range(options.runs):
            after = chance.uniform(0.1, options.until)
            how, said = interrupted(COMMANDS[name], after)
            ends[how] += 1
            if how not in ("interrupted", "drained", "ended by the signal"):
                bad += 1
                print(f"{name}, after {after:.2f} s: {how}\n{said[-2000:]}", flush=True)
        print(f"{name}: {options.runs} starts: {dict(ends.most_common())}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m studies.soak.sessions``: decoding sessions opened and dropped, by the thousand, against a real server.

Each session writes a few words; one in four is left open, as by a client that went away, so that the server has to
drop it. All words are compared with those of the whole model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# freed memory goes back at once: what is left is what is held
os.environ.setdefault("MALLOC_ARENA_MAX", "2")

import psutil
import torch

from edge_client import EdgeClient
from edge_client.generation import SessionLink
from edge_client.model_choice import ModelChoice
from shared_hooks.generation import SplitForward
from studies.benchmarks.processes import cloud
from studies.soak.slope import Slope
from studies.soak.watch import Watch

NAME, MODULE, CUT = "language_8x256", "studies.benchmarks.language", "model.layers.3"
PROMPTS = 5
FLAT_MIB = 5.0
"""Growth in so many sessions that counts as nothing."""
LEFT_OPEN = 4
MOST = 16


class LeftOpen(SessionLink):
    """Closes no session."""

    def close(self, session: int) -> None:
        """Says nothing."""


def soak(sessions: int, words: int) -> dict[str, Any]:
    """What came of it."""
    done = wrong = 0
    with (
        tempfile.NamedTemporaryFile("w", suffix=".toml") as file,
        cloud(NAME, shape=None, module=MODULE, threads=1, words=(_written(file),)) as address,
        EdgeClient(address, ModelChoice(f"{NAME}={MODULE}:{NAME}", device="cpu", threads=1)) as client,
    ):
        model: Any = client.wrapped.model
        prompts = [torch.randint(6, 1000, (1, 4 + 3 * number)) for number in range(PROMPTS)]
        asked = {"max_new_tokens": words, "do_sample": False}
        expected = [model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked) for prompt in prompts]
        me = psutil.Process()
        server = next(one for one in me.children(recursive=True) if "cloud_server" in " ".join(one.cmdline()))
        watch = Watch({"server": server.pid}, lambda: done, 0.5)
        own: list[tuple[float, float]] = []
        began = time.monotonic()
        for number in range(sessions):
            link = (LeftOpen if number % LEFT_OPEN == 0 else SessionLink)(client, CUT)
            prompt = prompts[number % PROMPTS]
            with SplitForward(model, CUT, link):
                found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)
            wrong += not torch.equal(found, expected[number % PROMPTS])
            done += 1
            own.append((done, me.memory_info().rss / (1 << 20)))
            if done % 100 == 0:
                print(f"{done} sessions, {wrong} wrong", file=sys.stderr, flush=True)
        watch.stop()
    slopes = {"server": Slope.of(watch.looks["server", "MiB"]), "client": Slope.of(own)}
    return {
        "sessions": done,
        "words": done * words,
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
        "growth_mib": {who: round(one.each * done / 1e5, 3) for who, one in slopes.items()},
        "margin_mib": {who: _finite(one.margin * done / 1e5) for who, one in slopes.items()},
        "first_and_last_mib": {who: [one.first, one.last] for who, one in slopes.items()},
    }


def _written(file: Any) -> str:
    """The server's configuration: so few sessions that those left open have to go."""
    file.write(f"[limits]\nmax_sessions_per_account = {MOST}\n")
    file.flush()
    return str(file.name)


def _finite(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def main() -> int:
    """The exit status: 0 if no word was wrong and no memory grew."""
    parser = argparse.ArgumentParser(prog="python -m studies.soak.sessions", description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--words", type=int, default=10, help="of each")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    result = soak(options.sessions, options.words)
    result["grows"] = [
        who for who, growth in result["growth_mib"].items() if growth - (result["margin_mib"][who] or growth) > FLAT_MIB
    ]
    print(json.dumps(result, indent=1))
    if options.json:
        command = " ".join(["python -m studies.soak.sessions", *sys.argv[1:]])
        options.json.write_text(
            json.dumps({"date": time.strftime("%Y-%m-%d"), "command": command, **result}, indent=1) + "\n"
        )
    return 1 if result["wrong"] or result["grows"] else 0


if __name__ == "__main__":
    sys.exit(main())

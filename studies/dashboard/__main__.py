"""``python -m studies.dashboard --output FOLDER``: root, Linux, two cores, Chromium; about two minutes.

The edge is a quarter of a core, the link two token buckets with a relay of 10 ms each way between them
(`studies.experiments.testbed`). `edge-client dashboard` runs AlexNet on the edge, the cut chosen by the controller; the
link goes 100, 2, 100 Mbit/s, and away. After each phase the page is looked at, and a picture taken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from studies.experiments import images, needs
from studies.experiments.network import EDGE, inside
from studies.experiments.testbed import ROOT, SERVER, Testbed, reference

PORT = 8050
PHASES: tuple[tuple[str, float | None], ...] = (
    ("100-mbit", 100),
    ("2-mbit", 2),
    ("100-mbit-again", 100),
    ("gone", None),
)
LAST = (("360", "360", "light"), ("768", "768", "dark"))


def main() -> int:
    """Exit status 2 where this machine cannot, 1 where the cut did not move."""
    parser = argparse.ArgumentParser(prog="python -m studies.dashboard", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="pictures and looks.json go here")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of each phase (default: 15)")
    parser.add_argument("--model", default="alexnet", metavar="NAME", help="of the experiments (default: alexnet)")
    options = parser.parse_args()
    try:
        needs.check()
    except needs.Missing as missing:
        print(f"dashboard: {missing}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    scenes = images.write(options.output, 2, width=960, height=720)
    words = ["dashboard", "--server", SERVER, "--model", reference(options.model), "--device", "cpu", "--threads", "1"]
    words += ["--listen", str(PORT), "--every", "0.3", "--no-progress", "--profile-seconds", "5"]
    looks: dict[str, Any] = {}
    with Testbed([options.model]) as bed:
        bed.network.rate(100)
        with bed.edge("edge_client", *words, "--input", *map(str, scenes)) as process:
            bed.slow(process)
            with _browser(options.output) as browser:
                while not _ask(browser, "look")["events"][0].split()[1].startswith("moved"):
                    time.sleep(1)  # profiles are made
                for name, rate in PHASES:
                    if rate is None:
                        bed.relay("refuse")
                    else:
                        bed.network.rate(rate)
                    time.sleep(options.seconds)
                    _ask(browser, f"shot {name} 1400 light")
                    looks[name] = _ask(browser, "look")
                    print(f"{name}: {looks[name]['cut']}, {looks[name]['latency']}", flush=True)
                for name, width, scheme in LAST:
                    _ask(browser, f"shot {name} {width} {scheme}")
    for scene in scenes:
        scene.unlink()
    (options.output / "looks.json").write_text(json.dumps(looks, indent=1))
    for line in reversed(looks["gone"]["events"]):
        print(line)
    cuts = [look["cut"] for look in looks.values()]
    return 0 if cuts[0] == cuts[2] != cuts[1] and cuts[3] == "edge-only" else 1


def _browser(folder: Path) -> subprocess.Popen[str]:
    """In the edge's namespace, where the page is on loopback."""
    words = inside(EDGE, sys.executable, "-m", "studies.dashboard.browser", f"http://127.0.0.1:{PORT}/", str(folder))
    started = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    if not started.stdout.readline():
        raise OSError("no browser, or no page")
    return started


def _ask(browser: subprocess.Popen[str], order: str) -> Any:
    assert browser.stdin is not None and browser.stdout is not None
    browser.stdin.write(order + "\n")
    browser.stdin.flush()
    return json.loads(browser.stdout.readline())


if __name__ == "__main__":
    sys.exit(main())

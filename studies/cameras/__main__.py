"""``make cameras``: real senders before `edge-client run`. Linux, with GStreamer and its bindings (docs/sources.md)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from shared_hooks.errors import SpecError
from studies.cameras.cases import Outcome, all_cases
from studies.cameras.v4l2 import in_a_machine


def main() -> int:
    """The exit status: 0 if everything came as it must."""
    parser = argparse.ArgumentParser(prog="python -m studies.cameras", description=__doc__)
    parser.add_argument("--kernel", type=Path, help="a Debian package linux-image-...-amd64: V4L2 by its vivid")
    parser.add_argument("--only-v4l2", action="store_true", help="with --kernel, and nothing else")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    try:
        found = [] if options.only_v4l2 else all_cases()
        if options.kernel:
            found += in_a_machine(options.kernel)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for one in found:
        print(line(one))
    if options.json:
        command = " ".join(["python -m studies.cameras", *sys.argv[1:]])
        reported = {"date": time.strftime("%Y-%m-%d"), "command": command, "cases": [one.json() for one in found]}
        options.json.write_text(json.dumps(reported, indent=1) + "\n")
    return 1 if any(one.fault for one in found) else 0


def line(one: Outcome) -> str:
    """For people."""
    counts = ""
    if one.source:
        counts = "{taken} taken, {dropped} dropped, {frames_per_second:.1f} frames/s".format(**one.source)
    verdict = f"FALLS SHORT: {one.fault}" if one.fault else "ok"
    return f"{one.case:<38} {one.status:>3}  {verdict}  {counts}  {one.reported}".rstrip()


if __name__ == "__main__":
    sys.exit(main())

"""``cloud-server doctor [CONFIG.toml] [OPTIONS]``: takes what ``cloud-server`` takes, and looks instead of serving.

Exit status: 0 if nothing is wrong, 1 if anything is, 2 for a wrong command line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from cloud_server.doctor import looks
from cloud_server.options import parser
from shared_hooks.doctor import as_json, counts, report
from shared_hooks.lifecycle.log import show


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    made = parser()
    made.prog = "cloud-server doctor"
    made.description = "Looks at a configuration and this machine as a server would find them, and says what to mend."
    made.epilog = "Exit status: 0 nothing is wrong, 1 something is, 2 wrong command line."
    made.set_defaults(log_level="error")  # what it finds it prints itself
    made.add_argument("--json", action="store_true", help="the findings as JSON")
    options = made.parse_args(argv)
    show(options.log_level, options.log_format)
    found = report(looks.all_of(options), None if options.json else sys.stdout)
    if options.json:
        print(json.dumps(as_json(found), indent=2))
    return 1 if counts(found)["wrong"] else 0

"""``cloud-server doctor [CONFIG.toml] [OPTIONS]``: takes what ``cloud-server`` takes, and looks instead of serving.

Exit status: 0 if nothing is wrong, 1 if anything is, 2 for a wrong command line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from cloud_server.arguments import doctor
from cloud_server.doctor import looks
from shared_hooks.doctor import as_json, counts, report
from shared_hooks.lifecycle.log import show


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    options = doctor().parse_args(argv)
    show(options.log_level, options.log_format)
    found = report(looks.all_of(options), None if options.json else sys.stdout)
    if options.json:
        print(json.dumps(as_json(found), indent=2))
    return 1 if counts(found)["wrong"] else 0

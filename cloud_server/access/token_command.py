"""``cloud-server token NAME``: a new token in a file for the edge, and its hash for the server's file of identities."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from cloud_server.access.identities import NAME, hash_of, new_token
from cloud_server.arguments import token as token_parser

DAY = 86400.0
OK, FAILED, USAGE = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    """Prints what belongs into the file of identities; returns the exit status."""
    parser = token_parser()
    options = parser.parse_args(argv)
    if not NAME.fullmatch(options.identity):
        parser.error(f"an identity's name has 1 to 128 letters, digits and ._:/@+*-, found {options.identity!r}")
    if options.days is not None and not 0 < options.days <= 36500:
        parser.error(f"--days {options.days:g}: expected more than 0, and at most 36500")
    out: Path = options.output or Path(f"{options.identity.replace('/', '_')}.token")
    token = new_token()
    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        print(f"cloud-server token: {out} is there already: remove it, or give --output another name", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"cloud-server token: {out}: {error.strerror}", file=sys.stderr)
        return FAILED
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{token}\n")
    print(entry(options.identity, hash_of(token), options.days))
    print(f"cloud-server token: the token of {options.identity} is in {out}", file=sys.stderr)
    return OK


def entry(identity: str, sha256: bytes, days: float | None) -> str:
    """The lines for the file of identities."""
    lines = ["", "[[tokens]]", f'identity = "{identity}"', f'sha256 = "{sha256.hex()}"']
    if days is not None:
        when = datetime.fromtimestamp(time.time() + days * DAY, timezone.utc)
        lines.append(f"expires = {when.strftime('%Y-%m-%dT%H:%M:%SZ')}")
    return "\n".join(lines)

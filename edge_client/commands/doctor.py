"""Implement ``edge-client doctor HOST:PORT``: diagnose what keeps this machine from a server's answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from edge_client import doctor
from edge_client.commands import common
from edge_client.commands.common import check_json_target, credentials_of, needed, write_json
from edge_client.commands.feed import choice_of
from edge_client.credentials import Credentials
from edge_client.model_choice import ModelChoice
from edge_client.settings import OWN
from protos import PROTOCOL_VERSION
from shared_hooks import doctor as checks
from shared_hooks.doctor import CheckLevel, Finding, as_json, contained, counts, report
from shared_hooks.errors import SpecError
from shared_hooks.profiling.machine import describe


def main(options: argparse.Namespace) -> int:
    """Diagnose and print; return exit status 1 if anything is wrong."""
    options.server = options.server or options.named
    server = needed(options, chain=True)
    if server == OWN:
        raise SpecError(f"doctor looks at a server that runs already: give HOST:PORT in place of {OWN}")
    check_json_target(options.json)
    found = report(looks(server.split(","), credentials_of(options), choice_of(options)), sys.stdout)
    if options.json:
        write_json(as_json(found), options.json, options.stdout)
    return common.SOME_FAILED if counts(found)["wrong"] else common.OK


def looks(servers: Sequence[str], credentials: Credentials, choice: ModelChoice) -> Iterator[Finding]:
    """Yield findings on this machine, then the server, as far as it can be reached, then those behind it in a chain."""
    server, *following = servers
    yield checks.versions(PROTOCOL_VERSION)
    yield from contained("machine", _machine(choice))
    yield from contained("energy", checks.sensors())
    yield from contained("throttling", checks.held_back())
    yield from contained("clock", checks.clock())
    further = True
    yield from contained("credentials", doctor.own(credentials))
    for finding in contained("reach", doctor.way(server, credentials)):
        further = further and finding.level is not CheckLevel.WRONG
        yield finding
    for finding in contained("models", doctor.served(server, credentials)) if further else ():
        further = further and finding.level is not CheckLevel.WRONG
        yield finding
    if further:
        for finding in contained("greeting", doctor.greeted(server, credentials, choice)):
            further = further and finding.level is not CheckLevel.WRONG
            yield finding
    if further and following:
        yield from contained("chain", doctor.along(servers, credentials, choice))


def _machine(choice: ModelChoice) -> Iterator[Finding]:
    device = choice.set_up()
    yield from checks.processor(describe(device), torch.get_num_threads())
    yield from checks.memory(0, "")

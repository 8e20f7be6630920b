"""Checks what a server would find: its file, identities, ports, models and machine."""

from __future__ import annotations

import argparse
import json
import socket
import stat
import sys
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Final

from cloud_server.access import read_identities
from cloud_server.arguments import doctor, is_loopback
from cloud_server.config import ModelEntry, NextServer, ServerConfig, composed
from cloud_server.fleet import devices_of
from cloud_server.fleet.hosts import placed
from cloud_server.models import ServedModel
from edge_client import doctor as way
from protos import PROTOCOL_VERSION
from shared_hooks import devices
from shared_hooks import doctor as checks
from shared_hooks.doctor import CheckLevel, Finding, as_json, contained, counts, ok, report, warning, wrong
from shared_hooks.errors import IsthmusError
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.lifecycle.log import show
from shared_hooks.models import set_threads
from shared_hooks.profiling.machine import describe

SOON_SECONDS: Final = 14 * 86400.0


def all_of(options: argparse.Namespace) -> Iterator[Finding]:
    """Yield all findings, in the order in which a server would meet them."""
    yield checks.versions(PROTOCOL_VERSION)
    try:
        config = composed(options)
    except IsthmusError as error:
        yield wrong("config", f"{error}", "mend it: nothing further is looked at before")
        return
    where = options.config or "no file, the defaults"
    yield ok("config", f"{where}: {len(config.models)} model{'s' if len(config.models) > 1 else ''}")
    yield from contained("tls", _tls(config))
    yield from contained("identities", _identities(config))
    yield from contained("listen", _port("listen", config.listen))
    if config.metrics:
        yield from contained("metrics", _port("metrics", config.metrics))
    if config.rest:
        yield from contained("rest", _port("rest", config.rest))
    yield from contained("tracing", _collector(config.tracing))
    for server in config.next:
        yield from contained(f"next {server.name}", _next(server))
    yield from contained("device", _machine(config))
    for entry in config.models:
        yield from contained("model", _model(entry, config))
    yield from contained("energy", checks.sensors())
    yield from contained("throttling", checks.held_back())
    yield from contained("clock", checks.clock())


def _tls(config: ServerConfig) -> Iterator[Finding]:
    if config.tls is not None:
        yield from checks.pair("tls", config.tls.certificate, config.tls.key, server=True)
        if config.tls.client_ca is not None:
            yield from checks.authorities("client ca", config.tls.client_ca)
        config.tls.read()  # as the server does: only what OpenSSL accepts counts
        return
    if is_loopback(config.listen.rpartition(":")[0]):
        yield ok("tls", "none: in the clear, for this machine only")
    elif config.insecure:
        yield warning(
            "tls", f"none: any machine on the path to {config.listen} reads everything (--insecure)", "--cert, --key"
        )
    else:
        yield wrong("tls", f"none, and {config.listen} is open to other machines", "--cert and --key (make certs)")


def _identities(config: ServerConfig) -> Iterator[Finding]:
    path = config.identities
    if path is None:
        certified = config.tls is not None and config.tls.client_ca is not None
        if certified or is_loopback(config.listen.rpartition(":")[0]):
            who = "clients with a certificate of the client ca" if certified else "every user of this machine"
            yield ok("identities", f"no file: {who} may do everything")
        else:
            yield warning("identities", "no file: every client that reaches the port may do everything", "--identities")
        return
    found, now = read_identities(path), time.time()
    if path.stat().st_mode & stat.S_IWOTH:
        yield wrong("identities", f"{path}: every user may write to it", f"chmod 600 {path}")
    for token in found.tokens:
        left = None if token.expires is None or token.revoked else token.expires - now
        if left is not None and left < SOON_SECONDS:
            when = "expired" if left < 0 else f"expires in {left / 86400:.1f} days:"
            yield warning("identities", f"a token of {token.identity} {when}", "a new one: cloud-server token NAME")
    usable = sum(not one.revoked and (one.expires is None or one.expires > now) for one in found.tokens)
    many = "y" if len(found.policies) == 1 else "ies"
    says = f"{path}: {len(found.policies)} identit{many}, {usable} of {len(found.tokens)} tokens hold"
    if not found.policies:
        yield wrong("identities", f"{says}: no client is admitted", f"cloud-server token NAME >> {path}")
    else:
        yield ok("identities", says)


def _port(about: str, address: str) -> Iterator[Finding]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, int(port)), family=family):
            yield ok(about, f"{address} is free")
    except OSError as error:
        if error.errno is not None and "in use" in (error.strerror or ""):
            yield warning(
                about,
                f"{address} is in use",
                "fine if this server runs; otherwise stop the process that has it (ss -ltnp)",
            )
        else:
            mend = "an address of this machine, and a port above 1023"
            yield wrong(about, f"{address} cannot be used: {error.strerror or error}", mend)


def _collector(endpoint: str) -> Iterator[Finding]:
    if not endpoint:
        return
    parts = urllib.parse.urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 4317), timeout=3):
            yield ok("tracing", f"{endpoint} takes connections")
    except OSError as error:
        yield warning("tracing", f"{endpoint}: {error.strerror or error}", "start the collector; spans are dropped")


def _next(server: NextServer) -> Iterator[Finding]:
    """Yield the connection to each of its addresses, as far as it works."""
    ways = [list(way.way(address, server.credentials)) for address in server.addresses]
    reached = any(all(one.level is not CheckLevel.WRONG for one in found) for found in ways)
    for one in [*way.own(server.credentials), *(one for found in ways for one in found)]:
        # another address of the same server is enough
        level = CheckLevel.WARNING if reached and one.level is CheckLevel.WRONG else one.level
        yield Finding(level, f"next {server.name}", f"{one.about}: {one.says}", one.mend)
    if server.signer is None:
        yield ok(f"next {server.name}", "no sign_as: all that is handed on counts as this server's own")


def _machine(config: ServerConfig) -> Iterator[Finding]:
    used, limits = devices_of(config.device), config.limits
    for device in used:
        yield ok("device", f"{device}" + ("" if devices.is_host(device) else f", {devices.name_of(device)}"))
    threads, workers = set_threads(config.threads), config.workers * len(used)
    yield from checks.processor(describe(used[0]), threads * workers)
    needed = limits.max_pending_bytes + limits.max_answer_bytes + workers * limits.max_tail_bytes
    what = "the limits' requests (max_pending_bytes), answers (max_answer_bytes) and tails (max_tail_bytes)"
    yield from checks.memory(needed, what)


def _model(entry: ModelEntry, config: ServerConfig) -> Iterator[Finding]:
    """Load a model as the server does."""
    spec = entry.spec
    try:
        one = placed(entry, config.device)[0]
        model = ServedModel(one.entry, one.device, Lifecycle("cloud"), config.limits.rehearsals())
    except Exception as error:  # a model's own code may raise anything
        yield wrong("model", f"{spec.model_id}: {type(error).__name__}: {error}", "mend its spec, code or weights")
        return
    who = model.identity
    says = f"{who.model_id}: {who.layers} layers, weights {who.weights_hash}"
    if who.plan_digest:
        yield ok("model", says)
    else:
        mend = "give its spec an example, or --example: then both sides compare plans before the first request"
        yield warning("model", f"{says}; no example input", mend)


# ``cloud-server doctor [CONFIG.toml] [OPTIONS]``: takes the arguments of ``cloud-server``, and checks them instead of
# serving.
#
# Exit status: 0 if nothing is wrong, 1 if anything is, 2 for a wrong command line.


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    options = doctor().parse_args(argv)
    show(options.log_level, options.log_format)
    found = report(all_of(options), None if options.json else sys.stdout)
    if options.json:
        print(json.dumps(as_json(found), indent=2))
    return 1 if counts(found)["wrong"] else 0

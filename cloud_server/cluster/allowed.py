"""What a server can do on one machine and not behind Ray Serve: refused by name before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cloud_server.access import Caller, Credentials, Policy, Register
from cloud_server.access.identities import read_identities
from cloud_server.config import ServerConfig
from cloud_server.limits import NEVER
from shared_hooks.errors import AccessRefused, SpecError

COUNTED = ("max_in_flight", "max_bytes", "requests_per_minute", "bytes_per_minute")
"""Bounds of an identity, which one place has to count."""


def check(config: ServerConfig) -> None:
    """Raises SpecError, which names everything that cannot be had."""
    found = list(refused(config))
    if found:
        raise SpecError("--on ray: " + "; ".join(found))


def refused(config: ServerConfig) -> Iterator[str]:
    """One text for each thing that cannot be had, with what to do instead."""
    if config.worker_processes:
        yield "worker_processes: every replica is a process already; say how many with --replicas"
    if config.reuse_port:
        yield "reuse_port: an update is Ray Serve's, which drains replicas (docs/ray.md); leave it out"
    if config.rest:
        yield "rest: fronts speak gRPC alone, where they hand on this protocol, too (docs/ray.md); leave it out"
    if config.limits.max_model_bytes != NEVER:
        yield "limits.max_model_bytes: each replica has one model, which stays; say how many with --replicas"
    for name in ("max_worker_bytes", "max_worker_requests"):
        if getattr(config.limits, name) != NEVER:
            yield f"limits.{name}: there are no worker processes; Ray Serve replaces replicas that end"
    if config.device.startswith("cuda") and not config.scale.gpus:
        yield f"device {config.device}: Ray hides GPUs from a replica that asks for none; say gpus = 1 in [ray]"
    if config.scale.fronts > 1 and config.listen.endswith(":0"):
        yield "listen: several fronts share one port, so port 0 (any free one) cannot be had"
    if config.metrics.endswith(":0") and config.scale.fronts > 1:
        yield "metrics: port 0 (any free one) cannot be found by who scrapes several fronts"
    if config.identities is not None and len(config.models) > 1:
        yield from (
            f"identities: {name} has {bound}, and {several(config)}" for name, bound in bounds(config.identities)
        )


def several(config: ServerConfig) -> str:
    """Why nobody may have a bound."""
    return (
        f"{len(config.models)} models are served: each model's replicas count for themselves; serve one model to an "
        "application, or leave the bound out"
    )


def bounds(path: Path) -> Iterator[tuple[str, str]]:
    """(identity, the bound that it has) of those that have one."""
    for name, policy in read_identities(path).policies.items():
        if bound := counted(policy):
            yield name, bound


def counted(policy: Policy) -> str:
    """The first bound that has to be counted; empty where there is none."""
    return next((name for name in COUNTED if getattr(policy, name)), "")


class Uncounted(Register):
    """The register of a front of several models: an identity that gets a bound while it serves is refused, not counted
    wrong.
    """

    def __init__(self, config: ServerConfig, *, certificates: bool) -> None:
        super().__init__(config.identities, certificates=certificates)
        self._why = several(config) if len(config.models) > 1 else ""

    def caller(self, peer: str, shown: Credentials) -> Caller:
        """As `Register.caller`."""
        found = super().caller(peer, shown)
        if self._why and (bound := counted(found.policy)):
            raise AccessRefused(f'identity "{found.identity}" has {bound}, and {self._why}')
        return found

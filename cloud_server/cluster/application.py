"""What Ray Serve deploys: for each model, and each version of one, replicas that serve it; and fronts before them.

A Serve configuration file names `application` (docs/ray.md); ``cloud-server --on ray`` calls `build`.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
import xxhash
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from cloud_server.arguments import parser
from cloud_server.cluster import front, passport
from cloud_server.cluster.census import ReplicaPlace
from cloud_server.cluster.front import Front
from cloud_server.cluster.replica import PENDING, Replica
from cloud_server.config import ServerConfig, configure
from cloud_server.fleet import ThisProcess
from cloud_server.scheduling import few_heaps
from shared_hooks.errors import ServerUnavailable, SpecError
from shared_hooks.lifecycle.log import show
from shared_hooks.models import set_threads

ROUTER: Final = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
POLICY: Final = "cloud_server.cluster.replica:by_pending"
FRONT: Final = "front"
SPARE_SECONDS: Final = 15.0
"""Seconds after the drain until Ray Serve kills a replica that is still running."""
CALLS: Final = 1000
"""Concurrent calls of a replica's methods."""
SURGE_PERCENT: Final = 20
"""Per cent of all replicas that may be new at once, at least one, while as many old ones drain. A spare GPU is rare."""
QUIET: Final = {"enable_access_log": False}
"""Loggers of Ray Serve with a line for every call of a replica."""
CHECK_SECONDS: Final = 1.0
"""The interval of Ray Serve's health checks."""


@dataclass(frozen=True)
class Start:
    """How a server was started, for other processes: its command line and working folder."""

    words: tuple[str, ...]
    folder: str

    def config(self) -> ServerConfig:
        """Return the configuration, read in the server's folder, which becomes this process's. Raises SpecError without
        that folder.
        """
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise SpecError(f"{self.folder}: the server was started there, and it is not on this machine") from error
        if self.folder not in sys.path:  # models are named as module:callable
            sys.path.insert(0, self.folder)
        few_heaps()
        options = parser().parse_args(self.words)
        bounds = show(options.log_level, options.log_format)
        config = self.read()
        bounds.each, bounds.together = config.limits.log_lines_per_account, config.limits.log_lines_per_minute
        return config

    def read(self) -> ServerConfig:
        """Return the configuration according to its files now. Raises SpecError."""
        return configure(parser().parse_args(self.words))

    def stamp(self, config: ServerConfig, number: int | None = None) -> str:
        """Return a stamp of the files that a process reads when it starts: a model's replica (``number``), or a front.

        A new deployment replaces the processes whose files have changed.
        """
        found = xxhash.xxh3_128(repr(config.scale if number is None else number).encode())
        named = parser().parse_args(self.words).config
        paths = [] if named is None else [Path(self.folder) / named]
        if number is not None:
            spec = config.models[number].spec
            selection = [] if spec.selection is None else [spec.selection]
            paths += [Path(self.folder) / spec.origin, *spec.weights, *selection]
        for path in paths:
            if path.is_file():
                found.update(path.read_bytes())
        return found.hexdigest()


class Tails:
    """A replica of one model; Ray Serve creates it in a process of its own and calls its methods."""

    def __init__(self, start: Start, number: int, stamp: str) -> None:
        """``number``: of the model in the configuration. ``stamp``: of the files that it must find."""
        front.close()
        config = start.config()
        entry = config.models[number]
        if start.stamp(config, number) != stamp:
            raise SpecError(f"{entry.spec.model_id}: its files on this machine are not those that were deployed")
        set_threads(config.threads)
        (served,) = ThisProcess(config).load([entry])
        name = serve.get_replica_context().replica_id.to_full_id_str()
        self._replica = Replica(name, [served.engine], config, ray.util.get_node_ip_address())
        gc.collect()
        gc.freeze()  # the process belongs to this replica and its model stays loaded: later collections skip it

    def place(self, with_metrics: bool = False) -> Mapping[str, Any]:
        """`census.ReplicaPlace`."""
        return self._replica.place(with_metrics)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve; the input of its scaling policies."""
        return {PENDING: float(self._replica.pending())}

    def __del__(self) -> None:
        """Called by Ray Serve, which waits for it, when the replica gets no more clients."""
        replica = getattr(self, "_replica", None)
        if replica is not None:
            replica.drain()


class Doorway:
    """A front, in a process that Ray Serve watches."""

    def __init__(self, start: Start, stamp: str, groups: dict[str, Any]) -> None:
        """``stamp``: of its files, for new deployments; ``groups``: handles."""
        front.close()
        self._front = Front(start.config(), RayFinder(groups))
        # Ray Serve's handles must not be awaited in its event loop, where this is called.
        with ThreadPoolExecutor(1) as elsewhere:
            elsewhere.submit(self._front.start).result()

    def address(self) -> str:
        """HOST:PORT where it serves."""
        return self._front.address

    def __del__(self) -> None:
        """As for `Tails`."""
        front = getattr(self, "_front", None)
        if front is not None:
            front.drain()
            front.close()


def build(config: ServerConfig, start: Start) -> serve.Application:
    """Return the application. Raises SpecError for what is not supported (`refused`)."""
    passport.check(config)
    scale, wait = config.scale, config.limits.drain_seconds + SPARE_SECONDS
    replicas: dict[str, Any] = {"num_replicas": scale.min_replicas}
    if scale.varies:
        replicas = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scale.min_replicas,
                max_replicas=scale.max_replicas,
                target_ongoing_requests=scale.target_pending,
                upscale_delay_s=scale.upscale_seconds,
                downscale_delay_s=scale.downscale_seconds,
                look_back_period_s=max(1.0, scale.upscale_seconds / 2),
                policy=AutoscalingPolicy(policy_function=POLICY),
            )
        }
    tails = serve.deployment(Tails).options(  # type: ignore[attr-defined, unused-ignore]
        **replicas,
        max_ongoing_requests=CALLS,
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        logging_config=QUIET,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        graceful_shutdown_timeout_s=wait,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=0 if scale.gpus else SURGE_PERCENT,
        health_check_period_s=CHECK_SECONDS,
        max_constructor_retry_count=3,
    )
    groups = {
        name: tails.options(name=name).bind(start, number, start.stamp(config, number))
        for number, name in enumerate(group_names(config))
    }
    front = serve.deployment(Doorway).options(  # type: ignore[attr-defined, unused-ignore]
        name=FRONT,
        num_replicas=scale.fronts,
        logging_config=QUIET,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=wait,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=SURGE_PERCENT,
        health_check_period_s=CHECK_SECONDS,
        max_constructor_retry_count=3,
    )
    made: serve.Application = front.bind(start, start.stamp(config), groups)
    return made


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Build the application for a Serve configuration file: ``args: {config: /etc/isthmus/server.toml, options:
    [--log-format, json]}``.
    """
    unknown = set(arguments) - {"config", "options"}
    if unknown:
        raise SpecError(f"args: {', '.join(sorted(unknown))}: not known; there are config and options")
    named = [str(Path(arguments["config"]).resolve())] if "config" in arguments else []
    start = Start((*map(str, arguments.get("options") or ()), *named), os.getcwd())
    return build(start.config(), start)


def group_names(config: ServerConfig) -> list[str]:
    """Return the group of each configured model's replicas: the model's id, with ``-2`` for its second version."""
    names: list[str] = []
    for entry in config.models:
        base = re.sub(r"[^A-Za-z0-9_-]", "_", entry.spec.model_id) or "model"
        base = f"{base}_" if base == FRONT else base
        name, number = base, 1
        while name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names


# Finds a session's replica through Ray Serve: its session router (a consistent hash) picks the replica, which returns
# its address. One such lookup opens a stream; later traffic on that stream does not pass through Ray.

log = logging.getLogger(__name__)

SECONDS: Final = 1.5
"""How long a replica may take to answer: one on a lost machine never does, as long as Ray Serve lists it."""
_FAILURES: Final = (RayError, RayServeException, TimeoutError, FutureTimeout)


class RayFinder:
    """Finds replicas through Ray. ``handles``: of Ray Serve's deployments (`ray.serve.handle.DeploymentHandle`), by
    group.
    """

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._handles = handles

    @property
    def groups(self) -> Sequence[str]:
        return list(self._handles)

    def find(self, group: str, session: str) -> ReplicaPlace:
        """Return the replica for ``session``. Raises ServerUnavailable."""
        try:
            return ReplicaPlace.of(
                self._handles[group].options(session_id=session).place.remote().result(timeout_s=SECONDS)
            )
        except _FAILURES as error:
            raise ServerUnavailable(f"no replica of {group} answers: {_line(error)}") from error

    def all(self, group: str, metrics: bool) -> list[ReplicaPlace]:
        """Return all replicas that answer."""
        try:
            requested = self._handles[group].broadcast("place", metrics)
            reported = requested.results(timeout_s=SECONDS, return_exceptions=True)
        except _FAILURES as error:
            log.debug("%s: %s", group, _line(error))
            return []
        return [ReplicaPlace.of(one) for one in reported if not isinstance(one, BaseException)]


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

"""A front and its replicas in this process, without Ray: who is where is decided here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from cloud_server.cluster.census import ReplicaPlace
from cloud_server.cluster.front import Front
from cloud_server.cluster.replica import Replica
from cloud_server.config import ServerConfig
from cloud_server.models import Engine
from shared_hooks.errors import ServerUnavailable

NAMES = itertools.count()


class FakeRay:
    """A `Finder`. A session is at the first replica of its group; ``gone`` ones are named until `forget`."""

    def __init__(self) -> None:
        self.replicas: dict[str, list[Replica]] = {}
        self.asked: list[tuple[str, str]] = []
        self.silent: set[str] = set()
        """Groups in which a session's own replica is on a machine that is gone, and is still named."""
        self.mute: set[str] = set()
        """Groups of which nothing is heard."""

    @property
    def groups(self) -> Sequence[str]:
        return list(self.replicas)

    def find(self, group: str, session: str) -> ReplicaPlace:
        self.asked.append((group, session))
        if group in self.mute or (group in self.silent and "#" not in session):
            raise ServerUnavailable(f"no replica of {group} answers")
        for replica in self.replicas[group]:
            return ReplicaPlace.of(replica.place())
        raise ServerUnavailable(f"no replica of {group} answers")

    def all(self, group: str, metrics: bool) -> list[ReplicaPlace]:
        return [ReplicaPlace.of(replica.place(metrics)) for replica in self.replicas[group] if group not in self.mute]


def kill(replica: Replica) -> None:
    """Its streams break at once, as those of a process that is killed."""
    replica._server._listener.server.stop(0).wait(10)


class Cluster:
    """``front`` before the replicas of ``ray``."""

    def __init__(self, ray: FakeRay, front: Front) -> None:
        self.ray = ray
        self.front = front

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.front.address, options=[("grpc.use_local_subchannel_pool", 1)])


@contextmanager
def cluster(
    groups: Mapping[str, Iterable[Engine]], identities: Path | None = None, metrics: str = "", **options: Any
) -> Iterator[Cluster]:
    """A replica for each engine of each group."""
    config = ServerConfig(listen="127.0.0.1:0", identities=identities, metrics=metrics, **options)
    ray = FakeRay()
    with ExitStack() as stack:
        for group, engines in groups.items():
            ray.replicas[group] = []
            for engine in engines:
                replica = Replica(f"{group}#{next(NAMES)}", [engine], ServerConfig(**options), "127.0.0.1")
                stack.callback(replica.drain)
                ray.replicas[group].append(replica)
        with Front(config, ray) as front:
            yield Cluster(ray, front)

"""Where a session's replica is, asked of Ray Serve: its router for sessions (a consistent hash) picks the replica,
which says where it listens. One such question opens a stream; what flows on it afterwards does not pass Ray.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cloud_server.cluster.census import Place
from shared_hooks.errors import ServerUnavailable

log = logging.getLogger(__name__)

SECONDS: Final = 1.5
"""For a replica to say where it is: one on a machine that is gone says nothing, for as long as Ray Serve names it."""
_FAILURES: Final = (RayError, RayServeException, TimeoutError, FutureTimeout)


class RayFinder:
    """``handles``: of Ray Serve's deployments (`ray.serve.handle.DeploymentHandle`), by group."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._handles = handles

    @property
    def groups(self) -> Sequence[str]:
        return list(self._handles)

    def find(self, group: str, session: str) -> Place:
        """The replica where ``session`` belongs. Raises ServerUnavailable."""
        try:
            return Place.of(self._handles[group].options(session_id=session).place.remote().result(timeout_s=SECONDS))
        except _FAILURES as error:
            raise ServerUnavailable(f"no replica of {group} answers: {_line(error)}") from error

    def all(self, group: str, metrics: bool) -> list[Place]:
        """Every replica that answers."""
        try:
            asked = self._handles[group].broadcast("place", metrics)
            said = asked.results(timeout_s=SECONDS, return_exceptions=True)
        except _FAILURES as error:
            log.debug("%s: %s", group, _line(error))
            return []
        return [Place.of(one) for one in said if not isinstance(one, BaseException)]


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

"""How far a server is scaled out by Ray Serve (``--on ray``): the table ``[ray]`` of its file, and ``--replicas``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any

from shared_hooks.config import Table
from shared_hooks.errors import SpecError


@dataclass(frozen=True)
class Scale:
    """How many copies of each model serve. Raises SpecError, naming the field, for values that cannot work."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_pending: float = 2.0
    """Requests received, waiting or running in one replica, on the average, for which another one is started."""
    upscale_seconds: float = 10.0
    """How long there are more before one is started ..."""
    downscale_seconds: float = 300.0
    """... and fewer, before one is drained."""
    fronts: int = 1
    """Processes that listen for clients: one for each machine that clients may connect to."""
    cpus: float = 1.0
    """Processors that Ray sets aside for a replica; it limits nothing."""
    gpus: float = 0.0
    """GPUs that a replica may see; half of one is 0.5."""
    start_seconds: float = 300.0
    """For everything to be up; models are loaded meanwhile."""

    def __post_init__(self) -> None:
        for name in ("min_replicas", "max_replicas", "fronts"):
            if getattr(self, name) < 1:
                raise SpecError(f"ray.{name}: expected at least 1, found {getattr(self, name)}")
        if self.max_replicas < self.min_replicas:
            raise SpecError(
                f"ray.max_replicas: expected at least min_replicas ({self.min_replicas}), found {self.max_replicas}"
            )
        for name in ("target_pending", "start_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise SpecError(f"ray.{name}: expected a number above 0, found {getattr(self, name)}")
        for name in ("upscale_seconds", "downscale_seconds", "cpus", "gpus"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SpecError(f"ray.{name}: expected at least 0, found {getattr(self, name)}")

    @property
    def varies(self) -> bool:
        """Whether replicas come and go with the work there is."""
        return self.max_replicas > self.min_replicas

    def with_replicas(self, text: str) -> Scale:
        """As ``--replicas`` says: ``4``, or ``1-4``. Raises SpecError."""
        low, dash, high = text.partition("-")
        if not (low.isascii() and low.isdigit() and (not dash or (high.isascii() and high.isdigit()))):
            raise SpecError(f'--replicas: expected a number, or MIN-MAX such as 1-4, found "{text}"')
        try:
            return dataclasses.replace(self, min_replicas=int(low), max_replicas=int(high or low))
        except SpecError as error:
            raise SpecError(f"--replicas {text}: {error}") from error


def scale_of(table: Table) -> Scale:
    """What ``[ray]`` says: `Scale`'s fields; ``replicas = N`` for as many at any time. Raises SpecError."""
    replicas = table.take("replicas", int)
    values: dict[str, Any] = {each.name: table.take(each.name, type(each.default)) for each in fields(Scale)}
    table.done()
    given = {name: value for name, value in values.items() if value is not None}
    if replicas is not None:
        if "min_replicas" in given or "max_replicas" in given:
            table.fail("replicas", "stands for min_replicas and max_replicas: give either")
        given |= {"min_replicas": replicas, "max_replicas": replicas}
    elif "min_replicas" in given:
        given.setdefault("max_replicas", given["min_replicas"])
    return Scale(**given)

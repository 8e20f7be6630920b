"""Keywords that `EdgeClient` took once; they go with 0.3."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, TypedDict

from edge_client.model_choice import Inputs, ModelChoice
from edge_client.transport import ConnectionOptions, KeepAlive


class OldKeywords(TypedDict, total=False):
    """Where each is now: `ModelChoice` and `ConnectionOptions`; `hooks` is called ``observers``."""

    model_id: str | None
    example: Inputs | None
    device: str
    threads: int | None
    depth: int | None
    patience: float
    max_in_flight: int
    chunk_bytes: int
    max_answer_bytes: int
    keep_alive: KeepAlive | None
    hooks: Iterable[str]


OF_MODEL: Final = ("model_id", "example", "device", "threads", "depth")
OF_CONNECTION: Final = ("patience", "max_in_flight", "chunk_bytes", "max_answer_bytes", "keep_alive")


def taken_over(
    old: Mapping[str, Any], model: ModelChoice, connection: ConnectionOptions, observers: Iterable[str]
) -> tuple[ModelChoice, ConnectionOptions, Iterable[str]]:
    """All three with ``old`` in them, after a warning. Raises TypeError for a keyword that there never was."""
    for name in old:
        if name in OF_MODEL:
            new = f"EdgeClient(server, ModelChoice(model, {name}=...))"
        elif name in OF_CONNECTION:
            new = f"EdgeClient(..., connection=ConnectionOptions({name}=...))"
        elif name == "hooks":
            new = "EdgeClient(..., observers=...)"
        else:
            raise TypeError(f"EdgeClient() got an unexpected keyword argument {name!r}")
        warnings.warn(
            f"EdgeClient(..., {name}=...) is {new} now; the old one goes with version 0.3",
            DeprecationWarning,
            stacklevel=3,
        )
    given = {name: value for name, value in old.items() if name != "keep_alive" or value is not None}
    return (
        replace(model, **{name: given[name] for name in OF_MODEL if name in given}),
        replace(connection, **{name: given[name] for name in OF_CONNECTION if name in given}),
        given.get("hooks", observers),
    )

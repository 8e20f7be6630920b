"""What a hook is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared_hooks.lifecycle.stages import Stage


@dataclass(frozen=True, slots=True)
class About:
    """Which request an event belongs to.

    ``index`` counts from 0: on the edge within the run (`infer_many`), or within the client's single requests; on the
    cloud within the process (-1: it was not taken in). ``total``: how many the run has; None where nobody knows.
    ``id`` is the same on both sides, together with ``client``; but an input whose path the plan did not hold goes to
    the server once more under another (`Answer.request_id`).
    On the cloud, ``identity`` is the name that the client's credentials prove, empty without; ``account``: on whom
    the request is charged.
    ``carrier`` goes to the other side with the request: a hook at ``before_request`` on the edge may set its
    "traceparent".
    """

    id: int
    index: int
    total: int | None = None
    model_id: str = ""
    client: str = ""
    identity: str = ""
    account: str = ""
    carrier: dict[str, str] = field(default_factory=dict, compare=False, repr=False)


class Event:
    """One stage has come: ``stage``, ``side`` ("edge", "cloud", or "local" for a `WrappedModel` by itself),
    ``request`` (None where it belongs to none), and the stage's facts as attributes.
    """

    __slots__ = ("facts", "request", "side", "stage")

    def __init__(self, stage: Stage, side: str, request: About | None, facts: Mapping[str, Any]) -> None:
        self.stage = stage
        self.side = side
        self.request = request
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Event.__slots__:  # asked for while a copy is being made
            raise AttributeError(name)
        if name not in self.stage.facts:
            known = ", ".join(("stage", "side", "request", *self.stage.facts))
            raise AttributeError(f'an event of {self.stage.value} has no "{name}"; it has {known}')
        return self.facts.get(name)  # a fact of the other side alone is None

    def __repr__(self) -> str:
        return f"Event({self.stage.value}, {self.side}, {self.request}, {', '.join(self.facts)})"

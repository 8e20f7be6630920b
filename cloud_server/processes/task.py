"""What a worker is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared_hooks import Crossing
from shared_hooks.lifecycle import About


@dataclass(frozen=True)
class Task:
    """A complete request. Without a crossing its payload is an input file, of the kind ``suffix``."""

    model_id: str
    about: About
    """For hooks in the worker."""
    account: str
    """On whom rehearsals are charged."""
    crossing: Crossing | None
    suffix: str
    header: bytes
    payload: memoryview
    """In shared memory, or empty."""
    want_metrics: bool
    observers: tuple[str, ...]
    inexact: bool = False
    """Whether other last bits than the model's own are allowed."""

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes a request unique."""
        return self.account, self.about.client, self.about.id

    def head(self) -> dict[str, Any]:
        """What a message says of it."""
        about = self.about
        found = {
            "do": "compute" if self.crossing is not None else "file",
            "model": self.model_id,
            # with the account, on which the log lines count that a model writes there
            "about": [about.id, about.index, about.total, about.model_id, about.client, about.identity, about.account],
            "account": self.account,
            "metrics": self.want_metrics,
            "observers": self.observers,
            "inexact": self.inexact,
        }
        return {**found, "suffix": self.suffix} if self.crossing is None else {**found, "cut": self.crossing.digest}


@dataclass(frozen=True)
class ProfileTask:
    """A profile; the numbers are those of `Engine.profile`."""

    model_id: str
    warmup: int
    repetitions: int
    seconds: float
    codecs: tuple[str, ...] = ()

    def head(self) -> dict[str, Any]:
        found = {"do": "profile", "model": self.model_id, "warmup": self.warmup, "repetitions": self.repetitions}
        return {**found, "seconds": self.seconds, "codecs": self.codecs}


@dataclass(frozen=True)
class ManifestTask:
    """What a model's digests are made of."""

    model_id: str

    def head(self) -> dict[str, Any]:
        return {"do": "manifest", "model": self.model_id}


@dataclass(frozen=True)
class StepTask(Task):
    """The next step of a decoding session, which the worker numbers so."""

    session: int = 0

    def head(self) -> dict[str, Any]:
        return {**super().head(), "do": "step", "session": self.session}


@dataclass(frozen=True)
class SessionTask:
    """A new decoding session, the worker's number ``session``; a copy of number ``of``, or behind the layer ``cut``."""

    model_id: str
    session: int
    cut: str = ""
    of: int = 0

    def head(self) -> dict[str, Any]:
        return {"do": "session", "model": self.model_id, "session": self.session, "cut": self.cut, "of": self.of}

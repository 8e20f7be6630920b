"""How a case is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from studies.siege.stranger import Stranger

Run = Callable[[Stranger], None]


@dataclass(frozen=True)
class Case:
    """``reported``: a pattern that one of the texts the hostile client hears must match: the bound, by name.
    Empty where nothing needs to be refused. ``limits``: of the server, in place of `trial.LIMITS`.
    """

    name: str
    run: Run
    reported: str = ""
    limits: dict[str, Any] = field(default_factory=dict)
    forged: str = ""
    """What must not begin a line of the server's log."""
    prepare: Callable[[], Any] = lambda: None
    """Called before the hostile process says that it is ready."""
    killed: bool = False
    """The hostile process is killed in the middle, and the server drained at once."""

    @property
    def does(self) -> str:
        """In one line."""
        return " ".join((self.run.__doc__ or "").split())


CASES: dict[str, Case] = {}


def case(name: str, reported: str = "", limits: dict[str, Any] | None = None, **more: Any) -> Callable[[Run], Run]:
    """Registers a function as a case."""

    def register(run: Run) -> Run:
        assert name not in CASES
        CASES[name] = Case(name, run, reported, limits or {}, **more)
        return run

    return register

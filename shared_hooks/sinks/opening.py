"""Sinks by the words of a command line: ``tensorboard:DIR``, ``wandb:PROJECT``, ``module:callable[:TEXT]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from shared_hooks.config import resolve
from shared_hooks.errors import SpecError, near
from shared_hooks.sinks.event_files import TensorBoardSink
from shared_hooks.sinks.sink import Sink
from shared_hooks.sinks.wandb_runs import WandbSink

KINDS: Final[Mapping[str, Callable[[str], Sink]]] = {"tensorboard": TensorBoardSink, "wandb": WandbSink}
FORMS: Final = "tensorboard:DIR, wandb:PROJECT, or module:callable[:TEXT] of your own"


def open_sink(text: str) -> Sink:
    """Raises SpecError: for words that name none, for a package that is not installed, for what cannot be written."""
    kind, _, rest = text.partition(":")
    if kind in KINDS:
        if not rest:
            raise SpecError(f'sink {text}: what comes after "{kind}:" is missing; there are {FORMS}')
        return KINDS[kind](rest)
    name, _, argument = rest.partition(":")
    hint = near(kind, KINDS)
    if hint or not name:
        raise SpecError(f'sink: no sink is called "{kind[:80]}".{hint} There are {FORMS}')
    make = resolve(f"{kind}:{name}", Path.cwd(), f"sink {text}")
    try:
        made = make(argument) if argument else make()
    except Exception as error:
        raise SpecError(f"sink {text}: making it raised {type(error).__name__}: {error}") from error
    missing = [method for method in ("write", "close") if not callable(getattr(made, method, None))]
    if missing:
        raise SpecError(f"sink {text}: what {name} returns has no method {' and no method '.join(missing)}")
    sink: Sink = made
    return sink

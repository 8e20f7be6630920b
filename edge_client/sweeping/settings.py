"""What a sweep is of. An interrupted one continues only where all of this is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from edge_client.credentials import Credentials
from edge_client.given import Given
from edge_client.survey.loaded import Loaded
from edge_client.sweeping.ways import Way
from shared_hooks.profiling.machine import describe
from shared_hooks.version import __version__

Settings = dict[str, Any]
"""JSON-able: what is measured (model, weights, machine, versions), on what (inputs, ways), how (repetitions, codec)."""

OUR_SERVER = "started here"


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep measures; nothing of it changes on the way."""

    server: str | None = None
    """None: a temporary one on this machine."""
    credentials: Credentials = field(default_factory=Credentials)
    codec: str = "raw"
    repetitions: int = 3
    layer_repetitions: int = 1
    warmup: int = 1
    observers: tuple[str, ...] = ()
    seconds: float | None = None
    """No input is begun after as many; the same command continues."""
    deadline: float = 60.0
    patience: float = 15.0
    predict: bool = True
    profile_repetitions: int = 10
    profile_seconds: float = 20.0
    calibrate: bool = False
    progress: bool = True

    def credentials_for(self, server: str) -> Credentials:
        """Those that were given, unless ``server`` is our own."""
        return self.credentials if server == self.server else Credentials()


def settings_of(options: SweepOptions, loaded: Loaded, inputs: Sequence[Given], ways: Sequence[Way]) -> Settings:
    """Hashes weights and inputs."""
    wrapped = loaded.wrapped
    machine = describe(wrapped.device)
    # only where there are any; "hooks" is what the observers are called in files of results
    observers = {"hooks": list(options.observers)} if options.observers else {}
    return {
        "model": loaded.spec.model_id,
        "weights": wrapped.weights_hash(),
        "code": wrapped.environment().get("model_code"),
        "plan": loaded.plan_digest,
        "depth": loaded.choice.depth,
        "machine": f"{machine.get('name')} {machine.get('id')}",
        "device": str(wrapped.device),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "isthmus": installed("isthmus"),
        "server": options.server or OUR_SERVER,
        "codec": options.codec,
        "repetitions": options.repetitions,
        "layer repetitions": options.layer_repetitions,
        "warm-up": options.warmup,
        "ways": [[way.name, way.mode] for way in ways],
        "inputs": [[sweep_input.name, sweep_input.digest()] for sweep_input in inputs],
        **observers,
    }


def installed(name: str) -> str | None:
    """A package's version; None when it runs from a folder."""
    try:
        return __version__ if name == "isthmus" else version(name)
    except PackageNotFoundError:
        return None


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """What differs first, in words; None when nothing does."""
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if before != after:
            return f"{key}: {_differing(before, after)}"
    return None


def _differing(before: Any, after: Any) -> str:
    if isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return f"{len(before)} then, {len(after)} now"
        before, after = next(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    return f"{_short(before)} then, {_short(after)} now"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_short, value))
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""What changes between two looks at the operator's files, and what clients hear of it."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from cloud_server.entries import ModelEntry
from cloud_server.models import Identity
from shared_hooks.errors import Disagreement, IsthmusError, UnknownModel

Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Change:
    """Names of models, as a reload found them."""

    loaded: tuple[str, ...]
    unloaded: tuple[str, ...]
    kept: tuple[str, ...]

    def __str__(self) -> str:
        named = (("loaded", self.loaded), ("unloaded", self.unloaded), ("as they were", self.kept))
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in named if names) or "no models"


def stamp(entry: ModelEntry) -> Stamp:
    """Of a model's files: another one where one was replaced or written to."""
    found = []
    for path in (*entry.spec.weights, *([entry.spec.selection] if entry.spec.selection else [])):
        try:
            seen = path.stat()
        except OSError:
            continue  # loading it says more
        found.append((str(path), seen.st_ino, seen.st_size, seen.st_mtime_ns))
    return tuple(found)


def freeze() -> None:
    """What is loaded stays: a client's lists would else have every collection look at all of it. What was loaded
    before, and is not needed any more, goes.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def unloaded(name: str) -> IsthmusError:
    """What who asks for it hears."""
    return UnknownModel(f'model "{name}" was unloaded on this server; ask again when it is back')


def replaced(mine: Identity, theirs: Identity) -> IsthmusError:
    """What a client of the old one hears."""
    what = "weights" if mine.weights_hash != theirs.weights_hash else "structure, plan or settings"
    digests = f': client "{mine.weights_hash}", server "{theirs.weights_hash}"' if what == "weights" else ""
    return Disagreement(
        f'model "{mine.model_id}" was replaced on this server: client and server differ in {what}{digests}'
    )

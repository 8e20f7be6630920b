"""The ways to run a request that a sweep tries, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from edge_client.modes import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from edge_client.spoken import option
from shared_hooks.errors import CutRefused, SpecError, UnknownLayer, near_path
from shared_hooks.planning import LayerInfo, blocks, last_layer

Mode = Literal["networked", "local"]
WHOLE: Final = (EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE)


@dataclass(frozen=True, slots=True)
class Way:
    """``name`` is what ``--split`` takes. Local: without a server."""

    name: str
    layer_id: int | None
    mode: Mode

    @property
    def networked(self) -> bool:
        return self.mode == "networked"

    def __str__(self) -> str:
        return f"{self.name} (local)" if self.mode == "local" and self.name != EDGE_ONLY else self.name


def choose(layers: Sequence[LayerInfo], cuts: str | None = None, every: int | None = None) -> list[tuple[str, int]]:
    """(name, layer id) of the cuts to try: all that are allowed, the named ones ("a,b"), or every n-th.

    Raises SpecError for nonsense, UnknownLayer (with near matches) and CutRefused for a named cut.
    """
    if cuts is not None and every is not None:
        raise SpecError(f"{option('cuts')} or {option('every')}, not both")
    if cuts is None:
        allowed = [(layer.name, layer.layer_id) for layer in layers if layer.can_split]
        return allowed[:: every or 1]
    by_name = {layer.name: layer for layer in layers}
    by_id = {str(layer.layer_id): layer for layer in layers}
    chosen: dict[str, int] = {}
    for word in (word.strip() for word in cuts.split(",")):
        if word in ("input", *WHOLE):
            continue  # always tried
        layer = by_name.get(word) or by_id.get(word)
        if layer is None and (last := last_layer(word, {one.name: at for at, one in enumerate(layers)})) is not None:
            layer = layers[last]
        if not word or layer is None:
            raise UnknownLayer(
                f'{option("cuts")}: no layer "{word}".{near_path(word, [*by_name, *blocks(by_name)])} '
                "(edge-client layers lists them)"
            )
        if not layer.can_split:
            raise CutRefused(f"{option('cuts')}: the model cannot be cut after {layer.name}: {layer.reason}")
        chosen[layer.name] = layer.layer_id
    return sorted(chosen.items(), key=lambda cut: cut[1])


def ways_of(cuts: Sequence[tuple[str, int]], *, files: bool, local: bool) -> list[Way]:
    """Everything here, everything there (as a file, too, if the inputs are files), the cuts; each cut locally, too."""
    ways = [Way(EDGE_ONLY, None, "local"), Way(CLOUD_ONLY, -1, "networked")]
    if files:
        ways.append(Way(CLOUD_FILE, None, "networked"))
    ways += [Way(name, layer_id, "networked") for name, layer_id in cuts]
    if local:
        ways += [Way(name, layer_id, "local") for name, layer_id in cuts]
    return ways


def rotated(ways: Sequence[Way], round_number: int, rounds: int) -> list[Way]:
    """All ways, beginning elsewhere in each of ``rounds``, so that a machine that warms up favours none."""
    first = round_number * len(ways) // max(1, rounds) % len(ways)
    return [*ways[first:], *ways[:first]]

"""`bench_heads`: an open load on a server by clients without PyTorch, whose heads are ONNX files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_client import light_codecs
from edge_client.benching.generator import Alone, WaitingLane
from edge_client.benching.load import Ended, Shot, codecs_of
from edge_client.benching.run import Benched, Rates, Terms, measured
from edge_client.credentials import Credentials
from edge_client.light import RAW, Heads, LightClient
from edge_client.spoken import option
from shared_hooks.errors import SpecError

Arrays = tuple[np.ndarray[Any, Any], ...]


def bench_heads(
    server: str,
    heads: str | Path | Heads,
    inputs: Iterable[Any] | None = None,
    *,
    split: str | None = None,
    codec: str = RAW,
    provider: str = "cpu",
    threads: int | None = 1,
    rate: Rates = None,
    seconds: float | None = None,
    warmup: float = 2.0,
    clients: int = 4,
    arrivals: str = "poisson",
    deadline: float = 1.0,
    give_up: float = 10.0,
    in_flight: int = 4,
    seed: int = 0,
    patience: float = 5.0,
    credentials: Credentials | None = None,
    progress: bool = True,
) -> Benched:
    """What a server does under an open load of `LightClient`s (docs/bench.md): `edge_client.bench` without PyTorch.

        edge_client.bench_heads("cloud:50051", "heads/", ["a.png"], rate=[10, 20, 40], split="stem=0.7,stage2=0.3")

    ``inputs``: files, arrays or tuples of them; none: zeros of the heads' form. ``split``: cuts by weight (none: the
    only one, or all alike); ``codec``: of `LightClient`, by weight, in shares of clients; ``provider`` and ``threads``
    are of each client's heads; the rest is as for `edge_client.bench`. Raises SpecError, UnknownLayer, InputMismatch,
    and what a first request through each cut raises.
    """
    known = heads if isinstance(heads, Heads) else Heads(heads)
    terms = Terms(
        rate=rate,
        seconds=seconds,
        warmup=warmup,
        clients=clients,
        split=",".join(known.cuts) if split is None else split,
        codec=codec,
        arrivals=arrivals,
        deadline=deadline,
        give_up=give_up,
        in_flight=in_flight,
        seed=seed,
        patience=patience,
    )
    cuts = [one.word for one in terms.cuts]
    for cut in cuts:
        known.head(cut)
    codecs = codecs_of(codec, clients, light_codecs.NAMES)
    calls = [_arrays(known, one) for one in inputs or ()] or [known.zeros(cuts[0])]
    gang = Alone(
        _LightLane(
            LightClient(
                server,
                known,
                cuts[0],
                provider=provider,
                threads=threads,
                credentials=credentials,
                deadline=give_up,
                patience=patience,
                codec=one,
            ),
            cuts,
            calls,
            terms,
        )
        for one in codecs
    )
    try:
        about = {"server": server, "heads": str(known.folder), "provider": provider}
        return measured(terms, gang, known.model, len(calls), about, progress)
    finally:
        gang.close()


def _arrays(heads: Heads, one: Any) -> Arrays:
    if isinstance(one, (str, Path)):
        return heads.read(one)
    found = one if isinstance(one, tuple) else (one,)
    if not all(isinstance(array, np.ndarray) for array in found):
        raise SpecError(f"{option('inputs')}: files and arrays are inputs of heads, and tuples of arrays")
    return found


class _LightLane(WaitingLane):
    def __init__(self, client: LightClient, cuts: Sequence[str], calls: Sequence[Arrays], terms: Terms) -> None:
        super().__init__(terms.in_flight, terms.give_up)
        self._client, self._cuts, self._calls = client, cuts, calls

    def begin(self) -> None:
        for cut in self._cuts:
            self._client.infer(*self._calls[0], split=cut, deadline=60.0)
        super().begin()

    def disconnect(self) -> None:
        self._client.close()

    def ask(self, shot: Shot, left: float, ended: Ended) -> None:
        answer = self._client.infer(*self._calls[shot.input], split=self._cuts[shot.cut], deadline=left)
        ended.bytes_up = answer.bytes_up

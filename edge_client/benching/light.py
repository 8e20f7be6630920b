"""Put an open load on a server with clients without PyTorch, whose heads are ONNX files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from edge_client import light_codecs
from edge_client.benching.generator import Alone, WaitingLane
from edge_client.benching.load import Ended, Shot, codecs_of
from edge_client.benching.run import Benched, BenchTerms, measured
from edge_client.light import HeadFolder, LightClient
from edge_client.options import LightBenchOptions, LoadOptions
from edge_client.user_text import option
from shared_hooks.errors import SpecError
from shared_hooks.options import takes

Arrays = tuple[np.ndarray[Any, Any], ...]


@takes(LightBenchOptions)
def bench_heads(
    server: str, heads: str | Path | HeadFolder, inputs: Iterable[Any] | None = None, *, options: LightBenchOptions
) -> Benched:
    """Measure a server under an open load of `LightClient`s (docs/bench.md): `edge_client.bench` without PyTorch.

        edge_client.bench_heads("cloud:50051", "heads/", ["a.png"], rate=[10, 20, 40], split="stem=0.7,stage2=0.3")

    ``inputs``: files, arrays or tuples of them; None: zeros of the heads' form. ``split``: weighted cuts (None: the
    only one, or all equally); ``codec``: of `LightClient`, weighted, in shares of clients; ``provider`` and ``threads``
    of each client's heads; the rest is as for `edge_client.bench`. Raises SpecError, UnknownLayer, InputMismatch, and
    what a first request at each cut raises.
    """
    known = heads if isinstance(heads, HeadFolder) else HeadFolder(heads)
    load = {each.name: getattr(options, each.name) for each in fields(LoadOptions)}
    terms = BenchTerms(**{**load, "split": options.split or ",".join(known.cuts)})
    cuts = [one.word for one in terms.cuts]
    for cut in cuts:
        known.head(cut)
    codecs = codecs_of(options.codec, options.clients, light_codecs.NAMES)
    calls = [_arrays(known, one) for one in inputs or ()] or [known.zeros(cuts[0])]
    gang = Alone(
        _LightLane(
            LightClient(
                server,
                known,
                cuts[0],
                provider=options.provider,
                threads=options.threads,
                credentials=options.credentials,
                deadline=options.give_up,
                patience=options.patience,
                codec=one,
            ),
            cuts,
            calls,
            terms,
        )
        for one in codecs
    )
    try:
        about = {"server": server, "heads": str(known.folder), "provider": options.provider}
        return measured(terms, gang, known.model, len(calls), about, options.progress)
    finally:
        gang.close()


def _arrays(heads: HeadFolder, one: Any) -> Arrays:
    if isinstance(one, (str, Path)):
        return heads.read(one)
    found = one if isinstance(one, tuple) else (one,)
    if not all(isinstance(array, np.ndarray) for array in found):
        raise SpecError(f"{option('inputs')}: files and arrays are inputs of heads, and tuples of arrays")
    return found


class _LightLane(WaitingLane):
    def __init__(self, client: LightClient, cuts: Sequence[str], calls: Sequence[Arrays], terms: BenchTerms) -> None:
        super().__init__(terms.in_flight, terms.give_up)
        self._client, self._cuts, self._calls = client, cuts, calls

    def begin(self) -> None:
        for cut in self._cuts:
            self._client.infer(*self._calls[0], split=cut, deadline=60.0)
        super().begin()

    def disconnect(self) -> None:
        self._client.close()

    def request_within(self, shot: Shot, left: float, ended: Ended) -> None:
        answer = self._client.infer(*self._calls[shot.input], split=self._cuts[shot.cut], deadline=left)
        ended.bytes_up = answer.bytes_up

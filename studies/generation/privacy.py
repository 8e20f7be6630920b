"""What of a prompt can be found in the bytes that crossed: its token ids, and rows of the embedding."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared_hooks.errors import IsthmusError
from studies.generation.cases import CRASHED, REFUSED, facts, generating, places
from studies.generation.engine import Engine
from studies.generation.forked import Tell
from studies.generation.small import built
from studies.generation.subject import Built, Subject
from studies.library.check import short
from studies.library.subject import seed_all

RUN = 4
"""Consecutive ids that are no accident."""
VALUES = 8
"""Consecutive values of a row that are no accident."""
NOTHING, SHOWN, CONTROL = "nothing", "shown", "embedding (control)"
SILENT = "nothing crosses"
"""Where the embedding runs in an encoder, all of which is the edge's: there is nothing to look into."""
INTEGERS = ("<i8", "<i4", "<i2")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def traces(sent: list[bytes], ids: Tensor, rows: Tensor) -> list[str]:
    """What was found in ``sent``. ``ids`` (batch, length): the prompt's tokens; ``rows`` (n, width): what the embedding
    gave for them, or its weights there.
    """
    found = []
    data = b"\0".join(sent)
    for run in _runs(ids):
        for kind in INTEGERS:
            if np.array(run, dtype=kind).tobytes() in data:
                found.append(f"token ids {run} as {np.dtype(kind).name}")
        if re.search(rb"(?<!\d)" + rb"\s*,\s*".join(b"%d" % one for one in run) + rb"(?!\d)", data):
            found.append(f"token ids {run} as text")
    for row, dtype in itertools.product(rows, FLOATS):
        if any(part in data for part in _parts(row, dtype)):
            found.append(f"a row of the embedding, {row[:2].tolist()} ..., as {dtype}".replace("torch.", ""))
    return found


def _runs(ids: Tensor) -> Iterator[list[int]]:
    """All runs of ids that do not count up, as positions do, and have three different ones at least: padding and an end
    have fewer, and so does a mask, which looks like them.
    """
    for row in ids.tolist():
        for start in range(len(row) - RUN + 1):
            run = row[start : start + RUN]
            if len({after - before for before, after in itertools.pairwise(run)}) > 1 and len(set(run)) > 2:
                yield run


def _parts(row: Tensor, dtype: torch.dtype) -> Iterator[bytes]:
    """A row's bytes in pieces, so that a part that crosses is found too; constant ones show nothing."""
    cast = row.detach().to(dtype).contiguous()
    for start in range(0, len(cast) - VALUES + 1, VALUES):
        piece = cast[start : start + VALUES]
        if len(piece.unique()) > VALUES // 2:
            yield bytes(piece.view(torch.uint8).numpy())


def embedded(embedding: Any, ids: Tensor) -> Tensor:
    """Rows of an embedding's weights for ids, and what the module makes of them, as some scale."""
    used = ids.unique()
    with torch.no_grad():
        return torch.cat([embedding.weight[used].float(), embedding(used).float()])


def _given_by(found: Built, cut: str, inputs: Any) -> list[bytes]:
    """What the block at the cut gives in a generation that is not split."""
    whole, given = found.build(), list[bytes]()

    def keep(module: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        given.append(bytes(first.detach().contiguous().view(torch.uint8).numpy()))

    part: Any = whole.get_submodule(found.part)
    part.get_submodule(cut).register_forward_hook(keep)
    seed_all(5)
    generating(inputs, max_new_tokens=16, do_sample=False)(whole)
    return given


def privacy(engine: Engine, subject: Subject, tell: Tell) -> None:
    """Look into all that crosses, cut after blocks; and after the embedding itself, where rows of it must be found."""
    found = built(subject)
    tell(facts(found))
    inputs = found.inputs(3, 1)
    if "input_ids" not in inputs:
        return
    probe: Any = found.build().get_submodule(found.part)
    embedding = probe.get_input_embeddings()
    where = next(path for path, module in probe.named_modules() if module is embedding)
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    # a block gives the row of padding as it is, where its own part is masked away: that says nothing of the prompt
    rows = embedded(embedding, ids if mask is None else ids[mask.bool()])
    for place, cut in {**places(found.blocks), CONTROL: where}.items():
        tell({"at": place})
        here, there = found.build(), found.build()
        seed_all(5)
        try:
            with engine(here.get_submodule(found.part), there.get_submodule(found.part), cut) as watched:
                generating(inputs, max_new_tokens=16, do_sample=False)(here)
        except Exception as error:
            tell(
                {"case": place, "outcome": REFUSED if isinstance(error, IsthmusError) else CRASHED, "why": short(error)}
            )
            continue
        seen = traces(watched.sent, ids, rows)
        if seen and place != CONTROL:  # a block of random weights may add nothing to what it was given, here and there
            own = traces(_given_by(found, cut, inputs), ids, rows)
            seen = [one for one in seen if one not in own]
        if place == CONTROL:
            outcome = SHOWN if seen else "control shows nothing" if watched.sent else SILENT
        else:
            outcome = "found" if seen else NOTHING
        size = sum(len(one) for one in watched.sent)
        tell({"case": place, "outcome": outcome, "why": "; ".join(seen[:3]), "bytes": size, "steps": watched.steps})

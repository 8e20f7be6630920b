"""Chooses the codec of every tensor of a request: ``codec="auto"``.

chooser    `Chooser`: of one client; it measures, picks, and learns from answers

A client's settings of codecs become its `Chooser` here; only clients that choose load the rest. May import planning; of
the engine codecs and crossings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edge_client.credentials import Credentials
from edge_client.user_text import AUTO

if TYPE_CHECKING:
    from edge_client.choosing.chooser import Chooser
    from edge_client.planning.codecs import LossTable
    from edge_client.planning.link import Link

PROBE_SECONDS: Final = 0.4
PROBE_PATIENCE: Final = 2.0
"""How long to wait for the link at a fixed cut, in multiples of the expected time."""


def chooser_of(
    codec: str,
    calibration: str | Path | LossTable | None,
    max_loss: str | float | None,
    *,
    server: str | None,
    credentials: Credentials,
) -> tuple[Chooser | None, LossTable | None]:
    """None for a codec by name; and the table whose books belong to the cuts. ``server``: ``HOST:PORT``, to which the
    link is probed; None: it is learned from answers. Raises SpecError.
    """
    if codec != AUTO and calibration is None and max_loss is None:
        return None, None
    from edge_client.choosing.chooser import Chooser
    from edge_client.planning.codecs import Codecs, learnt

    chosen = Codecs.of(codec, calibration, max_loss)
    if chosen is None:
        return None, learnt(codec, calibration)
    return Chooser(chosen, None if server is None else partial(probed, server, credentials)), chosen.table


def probed(server: str, credentials: Credentials, sizes: Sequence[int]) -> Link:
    """Return the current link to a server, for requests of about these sizes. Raises ServerUnavailable."""
    from edge_client.probing import probe

    link, _ = probe(server, sizes, (0,), PROBE_SECONDS, patience=PROBE_PATIENCE, credentials=credentials)
    return link

"""Whether a running session should move its cut: what the move costs, and after how many tokens it has paid.

*Carrying* sends what the blocks between the two cuts keep (keys and values) to the other side. *Replaying* opens a new
session at the new cut: this side computes the head of all tokens so far once more, sends their hidden states, and the
server computes its tail of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from edge_client.planning.generation.overhead import HEADER_BYTES
from edge_client.planning.link import Link
from shared_hooks.profiling.decoding.profile import DecodingProfile, Part
from shared_hooks.showing import short


@short
@dataclass(frozen=True)
class Moving:
    """Bytes and ns of either way. ``gain_ns``: by how much a token is faster at the new cut; below 0 it is slower."""

    carried_bytes: float
    carry_ns: float
    replayed_bytes: float
    replay_ns: float
    gain_ns: float

    @property
    def pays_after(self) -> float:
        """Tokens after which the cheaper way has paid; infinite where no token is faster."""
        return min(self.carry_ns, self.replay_ns) / self.gain_ns if self.gain_ns > 0 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; null for what never pays."""
        pays = self.pays_after
        return {
            "carried_bytes": self.carried_bytes,
            "carry_ns": self.carry_ns,
            "replayed_bytes": self.replayed_bytes,
            "replay_ns": self.replay_ns,
            "gain_ns": self.gain_ns,
            "pays_after": pays if math.isfinite(pays) else None,
        }


def moving(
    edge: DecodingProfile, cloud: DecodingProfile, link: Link, old: int, new: int, tokens: int, gain_ns: float
) -> Moving:
    """From the cut after block number ``old`` to that after ``new``, with so many tokens in the session. ``gain_ns``:
    what a token takes at the old cut less what it takes at the new one.
    """
    first, last = sorted((old, new))
    between: list[Part] = list(edge.blocks[first + 1 : last + 1])
    carried = sum(block.state_bytes.at(tokens) for block in between)
    up = new < old
    carry = link.network_ns(carried if up else HEADER_BYTES, HEADER_BYTES if up else carried)
    replayed = float(tokens * edge.blocks[new].hidden_bytes + HEADER_BYTES)
    head, tail = (edge.before, *edge.blocks[: new + 1]), (*cloud.blocks[new + 1 :], cloud.after)
    again = sum(part.prefill.at(tokens) for part in (*head, *tail))
    return Moving(carried, carry, replayed, link.network_ns(replayed, HEADER_BYTES) + again, gain_ns)

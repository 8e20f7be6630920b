"""What `edge-client run --witness` tells: in its log, its summary and its JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edge_client.answer import Answer
from edge_client.screen.text import milliseconds, one_line, printable
from edge_client.spoken import CLOUD_FILE, EDGE_ONLY
from shared_hooks.errors import SpecError

LOGGER: Final = "edge_client.witness"


def check(share: float, split: str, log_level: str | None) -> None:
    """SpecError where nothing is split that could be compared; findings go to standard error."""
    if not share:
        return
    if split in (EDGE_ONLY, CLOUD_FILE):
        raise SpecError(f"--witness compares split requests with the whole model: --split {split} splits none")
    if log_level is None:  # else they are among its lines
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("edge-client: %(message)s"))
        logger = logging.getLogger(LOGGER)
        logger.handlers, logger.propagate = [handler], False


def differing(answers: Sequence[Answer]) -> int:
    """How many answers were not the whole model's."""
    return sum(one.witness is not None and not one.witness.same for one in answers)


def summary(answers: Sequence[Answer], refused: Mapping[str, str]) -> list[str]:
    """The lines of the run's summary."""
    seen = [one.witness for one in answers if one.witness is not None]
    wrong = differing(answers)
    head = f"witness: {len(seen)} of {len(answers)} answers computed whole, too"
    if not seen:
        return [f"{head}: none was split" if answers else head, *_out_of_use(refused)]
    if wrong:
        return [f"{head}: {wrong} DIFFER{'S' if wrong == 1 else ''}", *_out_of_use(refused)]
    if all(one.bits for one in seen):
        return [f"{head}: all the same bit for bit"]
    lowest = min((one.top1 for one in seen if one.top1 is not None), default=None)
    top1 = "" if lowest is None else f", top-1 the same in {'all' if lowest == 1 else f'{100 * lowest:.4g} % or more'}"
    largest, allowed = max(one.largest for one in seen), max(one.tolerance for one in seen)
    return [
        f"{head}: all the same as far as unlike machines give it",
        f"witness: at most {largest:.2g} of the output's scale apart, {allowed:.2g} may be{top1}",
    ]


def beside(answers: Sequence[Answer]) -> str | None:
    """The time of witnesses, which is in no row of the table of times."""
    spent = [one.witness.ns for one in answers if one.witness is not None]
    if not spent:
        return None
    return (
        f"beside these times: witnesses, mean {milliseconds(sum(spent) / len(spent))} ms, "
        f"total {milliseconds(sum(spent))} ms"
    )


def as_dict(answers: Sequence[Answer], share: float, refused: Mapping[str, str]) -> dict[str, Any]:
    """JSON-able; times in nanoseconds."""
    seen = [one.witness for one in answers if one.witness is not None]
    return {
        "share": share,
        "witnessed": len(seen),
        "same": sum(one.same for one in seen),
        "differing": differing(answers),
        "largest": max((one.largest for one in seen), default=None),
        "refused": dict(refused),
        "ns": sum(one.ns for one in seen),
    }


def _out_of_use(refused: Mapping[str, str]) -> list[str]:
    """``refused`` says "witness: request 4 differs ..."."""
    return [f"out of use: cut {printable(cut)}; {one_line(why.partition(': ')[2])}" for cut, why in refused.items()]

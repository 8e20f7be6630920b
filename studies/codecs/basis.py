"""Digits at its middle cuts, one image a request: bytes against float32, and the answers that are lost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from shared_hooks import EarlyOutput
from shared_hooks.crossing import books_of
from studies.codecs.digits import COPIES, CUTS, Digits, bounds

STEPS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each cut and step."""
    digits = Digits.load(1 if given.quick else COPIES)
    whole = digits.wrapped.whole(digits.judge).argmax(1)
    right = float((whole == digits.truths).float().mean())
    print(f"{len(whole)} images, {100 * right:.2f} % right by the whole model; books of {len(digits.learn)} others")
    print("cut                     step   bytes float32 / with header loss, points        differ (95 %)")
    found = []
    for cut in CUTS:
        learnt, judged = digits.heads(digits.learn, cut), digits.heads(digits.judge, cut)
        for step in STEPS:
            books = books_of(learnt, step)
            sent, headers, came = 0, 0, []
            for head in judged:
                early = replace(head, crossing=head.crossing.with_books(books))
                parcel = early.pack("basis")
                sent += parcel.nbytes
                headers += len(parcel.header)
                back = EarlyOutput.unpack(early.crossing, parcel.header, b"".join(parcel.buffers))
                came.append(back.pieces)
            answers, count = digits.answers(cut, came), len(judged)
            differ = int((answers != whole).sum())
            line = {
                "cut": judged[0].layer_name,
                "step": step,
                "images": count,
                "bytes": sent / count,
                "ratio": judged[0].nbytes * count / sent,
                "ratio_with_header": judged[0].nbytes * count / (sent + headers),
                "loss_points": 100 * (right - float((answers == digits.truths).float().mean())),
                "differ": differ / count,
                "differ_bounds": bounds(differ, count),
            }
            found.append(line)
            low, high = (100 * bound for bound in bounds(differ, count))
            print(
                f"{line['cut']:22} {step:5} {line['bytes']:7.0f} {line['ratio']:9.1f} "
                f"{line['ratio_with_header']:11.1f} {line['loss_points']:12.2f} "
                f"{100 * differ / count:6.2f} ({low:.2f} to {high:.2f}) %",
                flush=True,
            )
    return found

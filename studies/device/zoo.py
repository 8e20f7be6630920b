"""The zoo on a device that is none: heads on one, tails on the other, at some cuts of every model or at all.

    python -m studies.device                        # some minutes
    python -m studies.device --every --json docs/results/device.json

A model whose own forward does not run there (it makes tensors on the host, or uses a kernel that the device lacks) is
left out, and counted. A touch of the device's memory by the host ends the process that does it: it is counted as a
fault of its model, and the others run in another process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_CUTS = 6
SECONDS = 120.0
"""The time limit of one model, after which it counts as hung."""


def judged(
    number: int, every: bool, on: tuple[str, str] | None, ran: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """One model of the zoo. ``state``: "exact", "left out", "wrong", "error"; ``cuts``: how many were tried. ``ran`` is
    called when the plain model has run on the device. ``on``: the devices of head and tail; None: both test devices.
    """
    import torch

    import studies.device as device
    from shared_hooks import WrappedModel
    from shared_hooks.errors import CutRefused, IsthmusError
    from shared_hooks.models.inputs import to_device
    from tests.shared_hooks.cutting import through_bytes
    from tests.zoo import CASES
    from tests.zoo.compare import differences

    if on is None or device.NAME in on[0]:
        device.load()
    case = CASES[number]
    here, there = map(torch.device, on or (f"{device.NAME}:0", f"{device.NAME}:1"))
    found: dict[str, Any] = {"name": case.name, "cuts": 0, "refused": 0}

    def call(where: torch.device) -> Any:
        return to_device(case.inputs(), where)

    try:
        model = case.build().to(there)
        expected = case.run(model, call(there))
    except Exception as error:
        return found | {"state": "left out", "why": f"{type(error).__name__}: {error}"[:200]}
    ran()
    if not [*model.parameters(), *model.buffers()]:
        return found | {"state": "left out", "why": "no weight says which device it is on"}
    args, kwargs = call(here)
    with WrappedModel(case.build().to(here)) as edge, WrappedModel(case.build().to(there)) as cloud:
        try:
            with case.setting():
                edge.plan(*args, **kwargs)
            places = [one for one in edge.cuts if one.can_split]
            found["refused"] = len(edge.cuts) - len(places)
            for place in places if every else places[:: max(1, len(places) // MOST_CUTS)]:
                args, kwargs = call(here)
                with case.setting():
                    early = through_bytes(edge.forward(*args, end=place.name, **kwargs))
                    answer = cloud.forward(early, start=place.name)
                found["cuts"] += 1
                if texts := list(differences(answer, expected)):
                    return found | {"state": "wrong", "why": f"{place.name}: {texts[0]}"[:300]}
        except CutRefused as error:
            return found | {"state": "left out", "why": str(error)[:200]}
        except Exception as error:
            loud = case.loud and isinstance(error, IsthmusError)
            return found | {"state": "left out" if loud else "error", "why": f"{type(error).__name__}: {error}"[:300]}
    if here.type == device.NAME and (raced := device.races()):
        return found | {"state": "race", "why": raced[0]}
    return found | {"state": "exact"}


def _work(numbers: list[int], every: bool, on: tuple[str, str] | None, out: Any) -> None:
    for number in numbers:
        out.send(judged(number, every, on, lambda: out.send(None)))
    out.close()


def run(
    numbers: list[int], every: bool, say: Any, on: tuple[str, str] | None = None, seconds: float = float("inf")
) -> list[dict[str, Any]]:
    """In processes of their own, one after the other: each begins behind the model that ended the last. ``seconds``:
    after which no further model is tried.
    """
    from tests.zoo import CASES

    found: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    until = time.monotonic() + seconds
    while len(found) < len(numbers) and time.monotonic() < until:
        mine, its = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(numbers[len(found) :], every, on, its), daemon=True)
        process.start()
        its.close()
        ran = False
        try:
            while len(found) < len(numbers) and time.monotonic() < until:
                if not mine.poll(SECONDS):
                    process.kill()
                    raise EOFError
                ran = (one := mine.recv()) is None
                if one is not None:
                    found.append(one)
                    say(one)
            process.kill()
        except EOFError:
            process.join()
            code = process.exitcode or 0
            why = signal.Signals(-code).name if code < 0 else f"status {code}"
            ends = {"SIGSEGV": "fault", "SIGBUS": "fault", "SIGKILL": "hung"}.get(why, "died")
            state, why = (ends, why) if ran else ("left out", f"the plain model ends there, too: {why}")
            found.append({"name": CASES[numbers[len(found)]].name, "cuts": 0, "refused": 0, "state": state, "why": why})
            say(found[-1])
        process.join()
    return found


def main() -> int:
    from tests.zoo import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true", help="every cut of every model")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if unknown := sorted({*(options.only or ())} - {case.name for case in CASES}):
        parser.error(f"the zoo has no model {', '.join(unknown)}")
    numbers = [number for number, case in enumerate(CASES) if not options.only or case.name in options.only]

    def say(one: dict[str, Any]) -> None:
        if one["state"] not in ("exact", "left out"):
            print(f"{one['name']}: {one['state']}: {one['why']}", flush=True)

    found = run(numbers, options.every, say)
    counts = Counter(one["state"] for one in found)
    cuts = sum(one["cuts"] for one in found)
    print(f"{len(found)} models, {cuts} cuts: {', '.join(f'{count} {state}' for state, count in counts.most_common())}")
    if options.json:
        Path(options.json).write_text(json.dumps({"counts": counts, "cuts": cuts, "models": found}, indent=1) + "\n")
    return 0 if not counts.keys() - {"exact", "left out"} else 1

"""``python -m studies.replays``: could the replay of generations serve requests, too, in place of recipes?

A request's tail runs by a recipe (`shared_hooks.tail`), a generation's by running the model's own Python over
placeholders up to the cut (`shared_hooks.generation`). Here the second does the work of the first: every cut of every
model of the tests' zoo whose plan allows it, the answer compared bit for bit; and for some networks of the benchmarks
what a tail takes either way. docs/decisions/0050-two-replays.md says what follows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import IsthmusError
from shared_hooks.generation import DecodingTail, SplitForward
from shared_hooks.generation.edge_session import InProcess
from studies.benchmarks import networks
from tests.zoo import CASES, Case
from tests.zoo.compare import differences

TIMED = {"ResNet-18": networks.ResNet18, "AlexNet": networks.AlexNet, "UNet": networks.UNet}
ROUNDS = 15


KINDS = {
    "writes in place": "refused: writes in place",
    "writes, after the cut": "refused: writes in place",
    "changes a list or dict": "refused: writes in place",
    "reads the private input": "refused: code around the cut reads the input",
    "reads what the head": "refused: code around the cut reads the input",
    "the model's code keeps": "refused: keeps state of its own",
    "draws": "refused: draws random numbers",
    "is not called in this step": "refused: the cut is in a list of modules, or not called",
    "is never called": "refused: the cut is in a list of modules, or not called",
}
"""What a message says -> what became of the cut."""


def by_sessions(case: Case) -> Counter[str]:
    """What became of each cut that recipes serve."""
    with case.setting(), WrappedModel(case.build()) as wrapped:
        args, kwargs = case.inputs()
        cuts = [cut.name for cut in wrapped.plan(*args, **kwargs).cuts if cut.can_split and cut.name != "input"]
    expected = case.run(case.build())
    return Counter(_one(case, cut, expected) for cut in cuts)


def _one(case: Case, cut: str, expected: Any) -> str:
    if "#" in cut:
        return "not to be named: a later call of a module"
    edge, cloud = case.build(), case.build()
    try:
        tail = DecodingTail(cloud, cut)
    except IsthmusError as error:
        return _kind(error)
    try:
        with SplitForward(edge, cut, InProcess(tail)):
            wrong = list(differences(case.run(edge), expected))
    except (IsthmusError, TypeError) as error:
        return _kind(error)
    finally:
        tail.close()
    if any("bits differ" in one for one in wrong):
        return "DIFFERENT"
    return "exact, in a container of another class" if wrong else "exact"


def _kind(error: Exception) -> str:
    return next((kind for said, kind in KINDS.items() if said in f"{error}"), "refused: otherwise")


def timed(name: str) -> dict[str, Any]:
    """Milliseconds of a tail at three cuts: by its recipe, by a session, and of the same modules in the whole model."""

    def make() -> nn.Module:
        return networks.built(TIMED[name])

    rows: dict[str, dict[str, float | str]] = {}
    image, edge, cloud = networks.image(), make(), make()
    with WrappedModel(edge) as head, WrappedModel(cloud) as tail, torch.no_grad():
        cuts = [cut.name for cut in head.plan(image).cuts if cut.can_split and cut.name != "input"]
        for cut in (cuts[len(cuts) // 4], cuts[len(cuts) // 2], cuts[3 * len(cuts) // 4]):
            early = head.forward(image, end=cut)
            assert isinstance(early, EarlyOutput)
            rows[cut] = {"recipe ms": _median(lambda early=early: tail.forward(early))}
    for cut in rows:
        rows[cut]["session ms"] = _session(make(), make(), cut, image)
    return rows


def _session(edge: nn.Module, cloud: nn.Module, cut: str, image: torch.Tensor) -> float | str:
    """Or why it is refused."""
    tail, times = DecodingTail(cloud, cut), []
    session = type(tail.open())
    step = session.step

    def clocked(*given: Any) -> Any:
        began = time.perf_counter()
        try:
            return step(*given)
        finally:
            times.append(time.perf_counter() - began)

    session.step = clocked  # type: ignore[method-assign]
    try:
        with SplitForward(edge, cut, InProcess(tail)), torch.no_grad():
            for _ in range(ROUNDS):
                edge(image)
    except IsthmusError as error:
        return f"{error}"
    finally:
        session.step = step  # type: ignore[method-assign]
        tail.close()
    return 1000 * statistics.median(times[3:])


def _median(run: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times[3:])


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=len(CASES), help="of the zoo, the first so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    for case in CASES[: options.models]:
        total += by_sessions(case)
    found = {"models": options.models, "cuts": total.total(), "by a session": dict(total.most_common())}
    print(json.dumps({**found, "tails": {name: timed(name) for name in TIMED}}, indent=1))


if __name__ == "__main__":
    main()

"""Worker processes against threads of one process: what several clients get out of a server, and what one waits.

Four servers, all with one torch thread a worker: one and two workers, as threads and as processes. Four clients ask
each of them in turns, as fast as they are answered (`load`), for `digits` (the tail takes under a millisecond: what
counts is Python) and for ResNet-18 after the layers of its second stage. Ratios of median rates of one run. Then what
one client waits for an answer from one worker of either kind: the rows `loopback` and `frontier`, without their own
yardsticks.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

import torch

from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from shared_hooks import WrappedModel
from shared_hooks.models import load_spec
from studies.benchmarks.load import loads
from studies.benchmarks.networks import ResNet18, built, image
from studies.benchmarks.processes import cloud, target
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread, interleave, pairwise, ratio, spreads, wall_ns

CLIENTS = 4
SECONDS = 1.5
"""The duration of one turn at one server."""
BASE = "in-process, 1"
SERVERS = {
    BASE: ("--workers", "1", "--in-process"),
    "in-process, 2": ("--workers", "2", "--in-process"),
    "processes, 1": ("--workers", "1", "--worker-processes"),
    "processes, 2": ("--workers", "2", "--worker-processes"),
}
ELEMENTS = 64 * 112 * 112
WAITS = {
    "AlexNet": (image, 10, "loopback, AlexNet"),
    "Bare": (lambda: torch.randn(1, ELEMENTS), "before", "3.2 MB there, a small answer"),
    "BareBack": (lambda: torch.randn(1, ELEMENTS), "before", "3.2 MB there and back, in place"),
    "Spread": (lambda: torch.randn(1, ELEMENTS), "before", "3.2 MB there, a small answer, another layer"),
}


def measure(options: Options) -> Row:
    details: dict[str, Any] = {"rates": {}, "ms": {}}
    lines = [*_rates(options, details), *_waits(options, details)]
    return Row(tuple(lines), details)


def _rates(options: Options, details: dict[str, Any]) -> list[Line]:
    spec = load_spec("digits")
    example = spec.example()
    assert example is not None
    models = {
        "digits": (spec.load_model(), example[0], "stage2.0.conv2"),
        "ResNet18": (built(ResNet18), (image(),), "stages.1.1.bn2"),
    }
    lines = []
    with ExitStack() as stack:
        addresses = {
            name: stack.enter_context(
                cloud("ResNet18", shape=(1, 3, 224, 224), threads=1, words=("--model", "digits", *words))
            )
            for name, words in SERVERS.items()
        }
        for model_id, (model, args, where) in models.items():
            wrapped = stack.enter_context(WrappedModel(model))
            early = wrapped.forward(*args, end=where)
            found: dict[str, list[float]] = {name: [] for name in SERVERS}
            with loads(addresses, model_id, wrapped, early, CLIENTS) as clients:
                for turn in range(options.repeats(12) + 1):
                    for name, client in clients.items():
                        rate = client.rate(SECONDS)
                        if turn:  # the first tail at a cut is worked out in it
                            found[name].append(rate)
            details["rates"][model_id] = {name: Spread.of(rates).as_dict() for name, rates in found.items()}
            base = statistics.median(found[BASE])
            lines += [
                Line(
                    f"{model_id}, {CLIENTS} clients: {name} / {BASE}",
                    statistics.median(rates) / base,
                    "x",
                    note=f"{statistics.median(rates):.0f} /s against {base:.0f} /s",
                )
                for name, rates in found.items()
                if name != BASE
            ]
    return lines


def _waits(options: Options, details: dict[str, Any]) -> list[Line]:
    lines = []
    with ExitStack() as stack:
        for name, (make, where, what) in WAITS.items():
            x = make()
            kinds = {"processes": SERVERS["processes, 1"], "in-process": SERVERS[BASE]}
            clients = {}
            for kind, words in kinds.items():
                address = stack.enter_context(cloud(name, shape=tuple(x.shape), threads=1, words=words))
                choice = ModelChoice(target(name), device="cpu", threads=1)
                clients[kind] = stack.enter_context(EdgeClient(address, choice, where))
            run = {kind: lambda client=client, x=x: client.infer(x) for kind, client in clients.items()}
            measured = interleave(run, options.repeats(150), wall_ns, warm_up=10)
            found = spreads(measured, 1e-6)
            details["ms"][what] = {kind: one.as_dict() for kind, one in found.items()}
            known = pairwise(measured["processes"], measured["in-process"])
            note = (
                f"{found['processes'].median:.2f} ms against {found['in-process'].median:.2f} ms; neighbouring pairs "
                f"{known.low:.2f} to {known.high:.2f} x"
            )
            title = f"{what}: processes / in-process"
            lines.append(Line(title, ratio(measured["processes"], measured["in-process"]), "x", note=note))
    return lines

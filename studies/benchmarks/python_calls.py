"""Python calls of one request in steady state, beside those of torch.nn: all threads, both processes.

Counts do not depend on the load of the machine: `tests/studies/test_python_calls.py` holds them. The shipped model is
cut at ``stage2.0.conv2``; the decoder is Llama's with eight small blocks, cut after the first one, where one token is
the difference of two generations by their lengths, less the calls of a token of the whole model.
``python -m studies.benchmarks.python_calls`` prints where the calls are made.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from studies.benchmarks.processes import ROOT, listening, target
from studies.benchmarks.row import Line, Options, Row

NN = str(Path(torch.nn.__file__).parent)
CUT, SHAPE = "stage2.0.conv2", (1, 1, 16, 16)
LLAMA = "transformers.models.llama.modeling_llama"
LANGUAGE, NETWORK, LONGER = "studies.benchmarks.language", "language_8x64", "language_24x64"
FIRST, LATER, MORE = "model.layers.0", "model.layers.16", 16
"""Two cuts of the longer network, which has so many blocks more than the other, and so many between the two."""
CASES = (NETWORK, FIRST), (LONGER, FIRST), (LONGER, LATER)
WARM_UP, REQUESTS = 40, 50
SHORT, LONG = 8, 24
"""New tokens of the two generations whose difference is counted."""
LIMITS = {"edge": 300, "cloud": 400}
FIXED, PER_LAYER = 500, 15
STATIONS = 35
PRODUCT = ("edge_client/", "cloud_server/", "shared_hooks/", "protos/")

Counts = dict[str, float]
"""``file:line name`` -> calls of one request or token."""


class Calls:
    """Counts calls of functions outside torch.nn; a generator that is resumed counts as called."""

    def __init__(self) -> None:
        self._counting = False
        self._counts: Counter[CodeType] = Counter()

    def install(self) -> None:
        """In this thread and those that start later."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def start(self) -> None:
        self._counts.clear()
        self._counting = True

    def stop(self) -> Counts:
        """Calls since `start`."""
        self._counting = False
        found: Counter[str] = Counter()
        for code, count in self._counts.items():
            if not code.co_filename.startswith((NN, __file__)):
                name = getattr(code, "co_qualname", code.co_name)  # new in Python 3.11
                found[f"{code.co_filename.removeprefix(f'{ROOT}/')}:{code.co_firstlineno} {name}"] += count
        return dict(found)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._counting and event == "call":
            self._counts[frame.f_code] += 1


class BothSides:
    """Counts here and in a server that `serve` started."""

    def __init__(self, calls: Calls, server: int, path: Path) -> None:
        self._calls, self._server, self._path = calls, server, path

    def count(self, run: Callable[[], object], times: int = 1) -> dict[str, Counts]:
        self._path.unlink(missing_ok=True)
        os.kill(self._server, signal.SIGUSR1)
        time.sleep(0.3)
        self._calls.start()
        for _ in range(times):
            run()
        edge = self._calls.stop()
        os.kill(self._server, signal.SIGUSR2)
        while not self._path.exists():
            time.sleep(0.01)
        found = {"edge": edge, "cloud": json.loads(self._path.read_text())}
        return {side: {name: n / times for name, n in counts.items()} for side, counts in found.items()}


def serve(path: Path, words: list[str]) -> int:
    """A cloud server that counts from SIGUSR1 on, and at SIGUSR2 writes the counts to ``path``."""
    from cloud_server.__main__ import main

    _import_first("cloud_server.cli", *([LLAMA] if any(LANGUAGE in word for word in words) else []))
    calls = Calls()
    calls.install()

    def write(*_: object) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(calls.stop()))
        os.replace(part, path)

    signal.signal(signal.SIGUSR1, lambda *_: calls.start())
    signal.signal(signal.SIGUSR2, write)
    return main(words)


def _import_first(*modules: str) -> None:
    """Import what will be used, because imports take several times as long while calls are counted."""
    for module in modules:
        importlib.import_module(module)


@contextmanager
def _cloud(calls: Calls, *models: str) -> Iterator[tuple[str, BothSides]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.json"
        words = ["--listen", "127.0.0.1:0", "--threads", "1", "--log-level", "warning"]
        words += [word for model in models for word in ("--model", model)]
        with listening("studies.benchmarks.python_calls", "--serve", str(path), *words, threads=1) as (address, pid):
            yield address, BothSides(calls, pid, path)


def request(*, metrics: bool) -> dict[str, Counts]:
    """One request of the shipped model, by side."""
    from edge_client import EdgeClient
    from edge_client.model_choice import ModelChoice

    _import_first("edge_client.client")
    calls = Calls()
    calls.install()
    try:
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
        with (
            _cloud(calls, "digits") as (address, both),
            EdgeClient(address, ModelChoice("digits", device="cpu", threads=1), split=CUT, metrics=metrics) as client,
        ):
            for _ in range(WARM_UP):
                client.infer(x)
            return both.count(lambda: client.infer(x), REQUESTS)
    finally:
        _uninstall()


def token() -> dict[str, Counts]:
    """One token of split generation, by side, less the calls of a token in one process."""
    return _tokens((NETWORK, FIRST))[0]


def _tokens(*cases: tuple[str, str]) -> list[dict[str, Counts]]:
    """As `token`, of each network at a cut."""
    from edge_client import EdgeClient
    from edge_client.generation import SplitGenerator
    from edge_client.model_choice import ModelChoice
    from studies.benchmarks import language

    _import_first("edge_client.client", LLAMA)
    calls = Calls()
    calls.install()
    try:
        ids = torch.randint(6, 100, (1, 16), generator=torch.Generator().manual_seed(3))
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
        networks = list(dict.fromkeys(network for network, _ in cases))
        plain: dict[str, Counts] = {}
        found = []
        with _cloud(calls, *(target(network, LANGUAGE) for network in networks)) as (address, both):
            for network, cut in cases:
                if network not in plain:
                    plain[network] = _a_token(both, prompt, getattr(language, network)().generate)["edge"]
                choice = ModelChoice(target(network, LANGUAGE), device="cpu", threads=1)
                with EdgeClient(address, choice) as client:
                    split = _a_token(both, prompt, SplitGenerator(client, cut).generate)
                found.append({"edge": _less(split["edge"], plain[network]), "cloud": split["cloud"]})
        return found
    finally:
        _uninstall()


def _a_token(both: BothSides, prompt: dict[str, Any], generate: Callable[..., object]) -> dict[str, Counts]:
    """Calls of one more token of ``generate``, by side."""

    def short() -> object:
        return generate(**prompt, max_new_tokens=SHORT)

    def long() -> object:
        return generate(**prompt, max_new_tokens=LONG)

    long(), short()  # to a steady state
    few, many = both.count(short), both.count(long)
    return {side: _less(many[side], few[side], LONG - SHORT) for side in many}


def layers(counted: list[dict[str, Counts]]) -> dict[str, float]:
    """Calls of a token beyond those of a token in one process, both sides together: what a layer behind the cut adds,
    one before it, and the rest. ``counted``: `_tokens` of `CASES`.
    """
    first, longer, later = (sum(sum(side.values()) for side in one.values()) for one in counted)
    behind = (longer - first) / MORE
    before = (later - longer) / MORE + behind
    return {"fixed": first - before - 7 * behind, "behind": behind, "before": before}


def stations(counts: Counts) -> dict[str, int]:
    """Return how many files, classes and functions of the product one request or token passes. A function outside a
    class counts as its module's; what runs only now and then, such as a sensor's thread, is left out.
    """
    found: dict[str, set[tuple[str, ...]]] = {"files": set(), "classes": set(), "functions": set()}
    for name, count in counts.items():
        file, _, rest = name.partition(":")
        if count < 0.5 or not file.startswith(PRODUCT):
            continue
        function = rest.partition(" ")[2].partition(".<locals>")[0]
        found["files"].add((file,))
        found["classes"].add((file, function.rpartition(".")[0]))
        found["functions"].add((file, function))
    return {what: len(each) for what, each in found.items()}


def _uninstall() -> None:
    threading.setprofile(None)
    sys.setprofile(None)


def _less(counts: Counts, other: Counts, share: int = 1) -> Counts:
    return {name: (counts.get(name, 0) - other.get(name, 0)) / share for name in counts.keys() | other.keys()}


def measure(options: Options) -> Row:
    counted = _tokens(*CASES)
    found = {
        "a request": request(metrics=False),
        "... with records of layers": request(metrics=True),
        "a token, 8 blocks": counted[0],
    }
    lines = [
        Line(f"Python calls of {what}, {side}", sum(counts.values()), "", LIMITS[side] if what == "a request" else None)
        for what, sides in found.items()
        for side, counts in sides.items()
    ]
    passed = {
        what: {side: stations(counts) for side, counts in found[what].items()}
        for what in ("a request", "a token, 8 blocks")
    }
    for what, sides in passed.items():
        for side, each in sides.items():
            note = f"{each['functions']} functions, in {each['files']} files"
            lines.append(Line(f"classes and modules that {what} passes, {side}", each["classes"], "", STATIONS, note))
    parts = layers(counted)
    lines += [
        Line("Python calls of a token, both sides, without its layers", parts["fixed"], "", FIXED),
        Line("... of each layer behind the cut", parts["behind"], "", PER_LAYER),
        Line("... of each layer before it", parts["before"], "", PER_LAYER),
    ]
    return Row(tuple(lines), {**found, "layers": parts, "stations": passed})


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=("request", "metrics", "token", "layers"), default="request")
    parser.add_argument("--top", type=int, default=60, help="functions printed for each side")
    parser.add_argument("--files", action="store_true", help="by file instead of by function")
    parser.add_argument("--json", action="store_true", help="the sums alone")
    arguments = parser.parse_args()
    if arguments.what == "layers":
        print(json.dumps({what: round(count, 1) for what, count in layers(_tokens(*CASES)).items()}))
        return 0
    found = token() if arguments.what == "token" else request(metrics=arguments.what == "metrics")
    if arguments.json:
        print(json.dumps({side: round(sum(counts.values()), 1) for side, counts in found.items()}))
        return 0
    for side, counts in found.items():
        if arguments.files:
            files: Counter[str] = Counter()
            for name, count in counts.items():
                files[name.split(":")[0]] += count  # type: ignore[assignment]
            counts = dict(files)
        passed = stations(found[side])
        print(f"{side}: {sum(counts.values()):.1f}; {', '.join(f'{count} {what}' for what, count in passed.items())}")
        for name, count in sorted(counts.items(), key=lambda one: -one[1])[: arguments.top]:
            print(f"  {count:8.2f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

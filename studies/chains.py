"""Chains of servers, measured on loopback: what one more hop costs, how many a second go through, what faults do.

    python -m studies.chains hop [--json FILE]        # a chain of three beside one of two with the same parts joined
    python -m studies.chains stream [--json FILE]     # many inputs through a chain of three
    python -m studies.chains faults [--json FILE]     # 5,000 requests while hops are killed, stopped, cut, drained
    python -m studies.chains generations [--json FILE]  # 200 generations of the example's language model, likewise
    python -m studies.chains memory [--json FILE]     # of servers with the weights of a third each
    python -m studies.chains parts [--json FILE]      # one server with a part of a model on each of two devices
    python -m studies.chains plan [--json FILE]       # as root: ten placements on two shaped links, predicted

Every server is a process of its own. In ``faults`` each answer is compared with the whole model's, bit for bit, in
``generations`` each text, token for token.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil
import torch

from edge_client import ConnectionOptions, EdgeClient, ModelChoice
from edge_client.adaptive.chain import parts_of
from edge_client.generation import SplitGenerator
from edge_client.process import local_server
from edge_client.tasks.plan import plan_chain
from shared_hooks.errors import CutRefused, IsthmusError
from shared_hooks.models import load_spec
from shared_hooks.tensors import tensors_in
from studies.benchmarks.frontier import EchoClient
from studies.benchmarks.processes import echo
from studies.experiments.network import CLOUD, CLOUD_ADDRESS, EDGE, Network, inside
from studies.experiments.relay import Relay

ROOT = Path(__file__).parents[1]
CUTS = {"digits": ("stage1.0.conv2", "stage2.1.conv1"), "AlexNet": ("features.2", "features.8")}


def _choice(name: str) -> ModelChoice:
    model = "digits" if name == "digits" else f"{name}=studies.benchmarks.networks:{name}"
    example = None if name == "digits" else "1,3,224,224"
    return ModelChoice(model, device="cpu", threads=1, example=example)


@contextmanager
def _chain(choice: ModelChoice) -> Iterator[list[str]]:
    """The addresses that a client gives for a chain of two servers."""
    with (
        local_server(choice) as last,
        local_server(choice, arguments=["--next", f"last={last}"]) as first,
    ):
        yield [first, "last"]


def hop(options: argparse.Namespace) -> dict[str, Any]:
    """Requests of both chains in turn, and a bare echo of what crosses the second cut."""
    found = {}
    for name, (first, second) in CUTS.items():
        choice = _choice(name)
        with _chain(choice) as servers, EdgeClient(servers, choice, [first, second], metrics=False) as three:
            example = three._edge_model.example
            assert example is not None
            args = example[0]
            answer = three.infer(*args)
            with (
                EdgeClient(servers[0], choice, first, metrics=False) as two,
                echo("1", "4096") as address,
                EchoClient(address, 1) as plain,
            ):
                message = bytes(answer.parts[0].bytes_up)
                took: dict[str, list[float]] = {"three": [], "two": [], "echo": []}
                parts = []
                calls: dict[str, Callable[[], Any]] = {
                    "three": partial(three.infer, *args),
                    "two": partial(two.infer, *args),
                    "echo": partial(plain.send, [message]),
                }
                for number in range(options.requests + 10):
                    for kind, call in calls.items():
                        began = time.perf_counter()
                        given = call()
                        if number >= 10:
                            took[kind].append(time.perf_counter() - began)
                            if kind == "three":
                                one = given.parts[0].times
                                times = given.times
                                parts.append((times.edge_compute + times.server_compute + one.compute) / 1e6)
        ms = {kind: 1e3 * statistics.median(one) for kind, one in took.items()}
        found[name] = {
            "ms": ms,
            "three_over_two": ms["three"] / ms["two"],
            "hop_ms": ms["three"] - ms["two"],
            "hop_in_echoes": (ms["three"] - ms["two"]) / ms["echo"],
            "parts_ms": statistics.median(parts),
            "three_over_parts": ms["three"] / statistics.median(parts),
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def stream(options: argparse.Namespace) -> dict[str, Any]:
    """Many inputs; the slowest part is what each machine reports of itself, one request at a time."""
    found = {}
    for name, cuts in CUTS.items():
        choice = _choice(name)
        with _chain(choice) as servers, EdgeClient(servers, choice, cuts, metrics=False) as client:
            example = client._edge_model.example
            assert example is not None
            args = example[0]
            alone: dict[str, list[float]] = {"edge": [], "first": [], "last": []}
            for number in range(60):
                answer = client.infer(*args)
                if number >= 10:
                    times = answer.times
                    alone["edge"].append((times.edge_compute + times.encode) / 1e9)
                    alone["first"].append((times.server - times.onward - times.server_queue) / 1e9)
                    alone["last"].append((answer.parts[0].times.total - answer.parts[0].times.queue) / 1e9)
            slowest = max(statistics.median(one) for one in alone.values())
            total = sum(statistics.median(one) for one in alone.values())
            began = time.perf_counter()
            count = sum(1 for _ in client.infer_many([args] * options.requests))
            rate = count / (time.perf_counter() - began)
        cores = os.cpu_count() or 1
        bound = min(1 / slowest, cores / total)
        found[name] = {
            "parts_ms": {kind: 1e3 * statistics.median(one) for kind, one in alone.items()},
            "per_second": rate,
            "of_the_slowest_part": rate * slowest,
            "cores": cores,
            "of_what_the_cores_allow": rate / bound,
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


# Faults


class _Server:
    """A server that may be killed, stopped and started again at its port."""

    def __init__(self, model: str, port: int, *words: str) -> None:
        self._model = model
        self.port = port
        self._words = words
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        words = ["--model", self._model, "--threads", "1", "--log-level", "error", "--drain-seconds", "20"]
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "cloud_server", "--listen", f"127.0.0.1:{self.port}", *words, *self._words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            raise OSError("a server did not start")

    def end(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self, seconds: float) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _disturbed(model: str, options: argparse.Namespace) -> Iterator[tuple[list[str], Counter[str]]]:
    """The servers of a chain to which something happens every ``options.pause`` seconds, and how often what did."""
    last_port, first_port = _free_port(), _free_port()
    last = _Server(model, last_port)
    dice, done, made = random.Random(options.seed), threading.Event(), Counter[str]()
    with Relay(("127.0.0.1", last_port)) as between:
        first = _Server(model, first_port, "--next", f"last=127.0.0.1:{between.address[1]}")
        with Relay(("127.0.0.1", first_port)) as before:
            kinds: dict[str, Callable[[], None]] = {
                "the last server killed and started again": lambda: (last.end(signal.SIGKILL), last.start())[1],
                "the last server drained and started again": lambda: (last.end(signal.SIGTERM), last.start())[1],
                "the first server killed and started again": lambda: (first.end(signal.SIGKILL), first.start())[1],
                "the first server drained and started again": lambda: (first.end(signal.SIGTERM), first.start())[1],
                "the last server stopped for 2 s": lambda: last.stop(2),
                "the first server stopped for 2 s": lambda: first.stop(2),
                "the link between servers cut": between.reset,
                "the edge's link cut": before.reset,
                "the link between servers stalled for 2 s": lambda: _stalled(between, 2),
            }

            def disturb() -> None:
                while not done.wait(options.pause):
                    name = dice.choice(list(kinds))
                    made[name] += 1
                    kinds[name]()

            disturbing = threading.Thread(target=disturb)
            disturbing.start()
            try:
                yield [f"127.0.0.1:{before.address[1]}", "last"], made
            finally:
                done.set()
                disturbing.join()
        first.end(signal.SIGTERM)
    last.end(signal.SIGTERM)


def _counted(count: int, threads: int, each: Callable[[int], Counter[str]]) -> Counter[str]:
    """What ``each`` counts for the numbers below ``count``, called by several threads; its errors are counted, too."""
    numbers, lock, counts = iter(range(count)), threading.Lock(), Counter[str]()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                found = each(number)
            except IsthmusError as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                found = Counter({"failed": 1, f"failed: {type(error).__name__}": 1})
            with lock:
                counts.update(found)

    running = [threading.Thread(target=work) for _ in range(threads)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    return counts


def _found(options: argparse.Namespace, began: float, counts: Counter[str], made: Counter[str]) -> dict[str, Any]:
    took = time.perf_counter() - began
    found = {"requests": options.requests, "seconds": took, **counts, "faults": dict(made)}
    print(json.dumps(found), flush=True)
    return found


def faults(options: argparse.Namespace) -> dict[str, Any]:
    """Requests of several threads; one fault after the other, with a pause between."""
    spec = load_spec("digits")
    args, _ = spec.example() or ((), {})
    (value,) = args
    inputs = [value + 0.01 * number for number in range(16)]
    with torch.no_grad():
        model = spec.load_model()
        expected = [model(one) for one in inputs]
    with _disturbed("digits", options) as (server, made):
        connection = ConnectionOptions(patience=60, max_in_flight=8)
        choice, cuts = ModelChoice("digits", device="cpu", threads=1), ["stage1.0.conv2", "stage2.1.conv1"]
        with EdgeClient(server, choice, cuts, metrics=False, deadline=120, connection=connection) as client:

            def each(number: int) -> Counter[str]:
                time.sleep(options.gap)
                answer = client.infer(inputs[number % 16])
                same = torch.equal(next(iter(tensors_in(answer.output))), expected[number % 16])
                return Counter(
                    {
                        "exact" if same else "wrong": 1,
                        "sent again by the edge": answer.sends > 1,
                        "sent again between servers": any(part.sends > 1 for part in answer.parts),
                    }
                )

            began = time.perf_counter()
            return _found(options, began, _counted(options.requests, 4, each), made)


SPEAKER: Final = "examples/language_model.toml"


def generations(options: argparse.Namespace) -> dict[str, Any]:
    """Texts of two threads, beside the same faults."""
    model = load_spec(SPEAKER).load_model()
    asked = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens}
    cuts = ["model.layers.1", "model.layers.3"]
    lock = threading.Lock()
    with _disturbed(SPEAKER, options) as (server, made):
        connection = ConnectionOptions(patience=60, max_in_flight=8)
        with EdgeClient(server, ModelChoice(SPEAKER, threads=1), deadline=120, connection=connection) as client:
            idle = [copy.deepcopy(client.wrapped.model) for _ in range(2)]

            def each(number: int) -> Counter[str]:
                ids = torch.randint(5, 60, (1, 8), generator=torch.Generator().manual_seed(number))
                how = {**asked, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
                with lock:
                    expected = model.generate(**how, do_sample=False)
                    own = idle.pop()
                try:
                    found = SplitGenerator(client, cuts, model=own).generate(**how, do_sample=False)
                finally:
                    idle.append(own)
                return Counter({"exact" if torch.equal(found, expected) else "wrong": 1})

            began = time.perf_counter()
            return _found(options, began, _counted(options.requests, 2, each), made)


def _stalled(relay: Relay, seconds: float) -> None:
    relay.moving.clear()
    time.sleep(seconds)
    relay.moving.set()


# Memory

BLOCKS: Final = 18


def speaker(blocks: int, width: int) -> Any:
    """A Llama with random weights: 38 MiB of them in a block 768 wide."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=blocks,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _saved(folder: Path, name: str, blocks: int, width: int) -> Path:
    from safetensors.torch import save_model

    torch.manual_seed(0)
    save_model(speaker(blocks, width), str(folder / f"{name}.safetensors"))
    path = folder / f"{name}.toml"
    path.write_text(
        f'id = "{name}"\nfactory = "studies.chains:speaker"\nweights = "{name}.safetensors"\n'
        f"factory_kwargs = {{blocks = {blocks}, width = {width}}}\n"
        '[example]\nkwargs = {input_ids = {shape = [1, 8], dtype = "int64", high = 1000}}\n'
    )
    return path


def _resident(server: _Server) -> int:
    """Bytes, of the process, pages of files included."""
    assert server.process is not None
    return int(psutil.Process(server.process.pid).memory_info().rss)


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """What servers take that have a third of a language model each, beyond one with next to no weights; after texts."""
    cuts = [f"model.layers.{BLOCKS // 3 - 1}", f"model.layers.{2 * BLOCKS // 3 - 1}"]
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        small, large = _saved(folder, "small", BLOCKS, 16), _saved(folder, "large", BLOCKS, 768)

        def started(*words: str) -> _Server:
            server = _Server(words[0], _free_port(), *words[1:])
            stack.callback(server.end, signal.SIGTERM)
            return server

        found: dict[str, Any] = {}
        for path, parts in ((small, ((), ())), (large, ((), ())), (large, _parts_of(cuts))):
            last = started(str(path), *parts[1])
            gateway = started(str(path), "--next", f"last=127.0.0.1:{last.port}", *parts[0])
            ids = torch.randint(0, 1000, (1, 16), generator=torch.Generator().manual_seed(0))
            asked: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
            with EdgeClient([f"127.0.0.1:{gateway.port}", "last"], str(path)) as client:
                for _ in range(options.requests):
                    SplitGenerator(client, cuts).generate(**asked, max_new_tokens=32)
            kind = f"{path.stem}, {'parts' if parts[0] else 'whole'}"
            found[kind] = {"middle": _resident(gateway), "tail": _resident(last)}
    # of six blocks, and of six with the norm and the head
    block = sum(one.nbytes for one in speaker(1, 768).model.layers.parameters())
    weights = {"middle": block * BLOCKS // 3, "tail": block * BLOCKS // 3 + 4 * 768 * 1001}
    for part, nbytes in weights.items():
        taken = found["large, parts"][part] - found["small, whole"][part]
        found[f"{part}: weights, taken beyond the base, ratio"] = [nbytes, taken, taken / nbytes]
    print(json.dumps(found), flush=True)
    return found


def _parts_of(cuts: list[str]) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("--only-middle", ",".join(cuts)), ("--only-tail", cuts[1])


def parts(options: argparse.Namespace) -> dict[str, Any]:
    """One server's worker processes: one with the whole model, two with a copy each, two with a part each. Requests of
    64 tokens, several under way, and a text; every answer against the whole model's.
    """
    found: dict[str, Any] = {"cores": os.cpu_count()}
    ids = torch.randint(0, 1000, (1, 64), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    with TemporaryDirectory() as name:
        path = _saved(Path(name), "large", BLOCKS, 768)
        model = load_spec(path).load_model()
        with torch.no_grad():
            whole = model(**given).logits
        text = model.generate(**asked, max_new_tokens=32)  # type: ignore[operator]
        for kind, words in {
            "one worker": ["--device", "cpu"],
            "two copies": ["--device", "cpu,cpu"],
            "two parts": ["--device", "cpu,cpu", "--parts", "auto"],
        }.items():
            server = _Server(str(path), _free_port(), "--worker-processes", *words)
            try:
                assert server.process is not None
                with EdgeClient(f"127.0.0.1:{server.port}", str(path), "model.layers.0", metrics=False) as client:
                    same = [torch.equal(client.infer(**given).output["logits"], whole) for _ in range(3)]
                    began = time.perf_counter()
                    answers = [client.submit(**given) for _ in range(options.requests)]
                    same += [torch.equal(one.result().output["logits"], whole) for one in answers]
                    rate = options.requests / (time.perf_counter() - began)
                    began = time.perf_counter()
                    said = SplitGenerator(client, "model.layers.0").generate(**asked, max_new_tokens=32)
                    token_ms = 1e3 * (time.perf_counter() - began) / 32
                workers = psutil.Process(server.process.pid).children(recursive=True)
                found[kind] = {
                    "exact": all(same) and torch.equal(said, text),
                    "per_second": rate,
                    "token_ms": token_ms,
                    "resident_mb": [round(one.memory_info().rss / 1e6) for one in workers],
                }
            finally:
                server.end(signal.SIGTERM)
            print(kind, json.dumps(found[kind]), flush=True)
    found["wrong"] = sum(not one["exact"] for one in found.values() if isinstance(one, dict))
    return found


# Plans

GPU, GPU_ADDRESS = "isthmus-gpu", "10.213.78.2"
GATEWAY_ADDRESS = "10.213.78.1"
"""The gateway's address on its second cable; it is in the namespace `CLOUD`."""


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """The edge, a gateway and a last server, each in a network of its own, with a token bucket at every end."""
    found: dict[str, Any] = {"mbits": options.mbits}
    second = {CLOUD: GATEWAY_ADDRESS, GPU: GPU_ADDRESS}
    with Network() as near, Network(second, "isthmus1", [GPU]) as far:
        for cable, mbits in zip((near, far), options.mbits, strict=True):
            cable.rate(mbits)
        for name in CUTS:
            with ExitStack() as stack:
                stack.enter_context(_served(GPU, GPU_ADDRESS, name))
                stack.enter_context(_served(CLOUD, CLOUD_ADDRESS, name, "--next", f"gpu={GPU_ADDRESS}:50051"))
                words = [f"{CLOUD_ADDRESS}:50051,gpu", name, str(options.requests)]
                made = subprocess.run(
                    inside(EDGE, sys.executable, "-m", "studies.chains", "placements", *words),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
            found[name] = json.loads(made.stdout.splitlines()[-1])
            print(name, json.dumps(found[name]), flush=True)
    return found


@contextmanager
def _served(namespace: str, address: str, name: str, *more: str) -> Iterator[None]:
    words = ["--listen", f"{address}:50051", "--insecure", "--threads", "1", "--log-level", "error"]
    words += ["--model", "digits"] if name == "digits" else ["--model", str(_choice(name).model)]
    words += [] if name == "digits" else ["--example", "1,3,224,224"]
    with subprocess.Popen(
        inside(namespace, sys.executable, "-u", "-m", "cloud_server", *words, *more),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("listening on "):
                raise OSError("a server did not start")
            yield
        finally:
            process.terminate()


def placements(options: argparse.Namespace) -> dict[str, Any]:
    """What the edge of `plan` does: the plan of the chain, and ten pairs of cuts, each predicted and measured."""
    servers, choice = options.server.split(","), _choice(options.model)
    planned = plan_chain(servers, choice, progress=False)
    stations = planned.stations
    known = [{cut.name for cut in one.profile.cuts} for one in stations]
    names = [cut.name for cut in stations[0].profile.cuts if all(cut.name in one for one in known)]
    pairs = list(itertools.combinations(names, 2))
    chosen = [planned.cuts, *random.Random(0).sample([pair for pair in pairs if pair != planned.cuts], 9)]
    rows = []
    with EdgeClient(servers, choice, planned.cuts, metrics=False, deadline=600) as client:
        example = client._edge_model.example
        assert example is not None
        took: dict[tuple[str, ...], list[float]] = {cuts: [] for cuts in chosen}
        refused = {}
        for number in range(options.requests + 2):
            for cuts in chosen:
                if cuts in refused:
                    continue
                try:
                    answer = client.infer(*example[0], split=cuts)
                except CutRefused as error:
                    refused[cuts] = f"{error}"
                    continue
                if number >= 2:
                    took[cuts].append(answer.measured_ns / 1e6)
    for cuts in chosen:
        if cuts in refused:
            rows.append({"cuts": cuts, "refused": refused[cuts]})
            continue
        parts = parts_of(stations, cuts)
        predicted = (sum(one.network_ns + one.compute_ns for one in parts) + planned.besides_ns) / 1e6
        measured = statistics.median(took[cuts])
        rows.append({"cuts": cuts, "predicted_ms": predicted, "measured_ms": measured, "off": predicted / measured - 1})
    off = [abs(one["off"]) for one in rows if "off" in one]
    best = min((one for one in rows if "off" in one), key=lambda one: one["measured_ms"])
    return {
        "best": planned.cuts,
        "best_is_best": tuple(best["cuts"]) == planned.cuts,
        "besides_ms": planned.besides_ns / 1e6,
        "median_off": statistics.median(off),
        "worst_off": max(off),
        "placements": rows,
    }


def main(argv: list[str] | None = None) -> int:
    """Prints, and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m studies.chains", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    counts = {"hop": 300, "stream": 400, "faults": 5000, "generations": 200, "memory": 3, "parts": 40, "plan": 20}
    for name, count in counts.items():
        command = commands.add_parser(name)
        command.add_argument("--requests", type=int, default=count)
        command.add_argument("--json", type=Path)
        if name == "generations":
            command.add_argument("--tokens", type=int, default=48, help="of each")
        if name in ("faults", "generations"):
            command.add_argument("--pause", type=float, default=2.0, help="seconds between two faults")
            command.add_argument("--gap", type=float, default=0.05, help="seconds between two requests of a thread")
            command.add_argument("--seed", type=int, default=0)
        if name == "plan":
            command.add_argument("--mbits", type=float, nargs=2, default=[50, 100], help="of the two links")
    edge = commands.add_parser("placements", help="the edge of `plan`, in its network")
    edge.add_argument("server")
    edge.add_argument("model", choices=CUTS)
    edge.add_argument("requests", type=int)
    edge.set_defaults(json=None)
    options = parser.parse_args(argv)
    tasks = (hop, stream, faults, generations, memory, parts, plan, placements)
    kinds = {one.__name__: one for one in tasks}
    found = kinds[options.command](options)
    if options.command == "placements":
        print(json.dumps(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if found.get("wrong") or found.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())

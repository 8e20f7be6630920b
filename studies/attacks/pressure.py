"""What one hostile client makes a real server hold, and what an honest one beside it is answered.

    python -m studies.attacks.pressure --json FILE
    python -m studies.attacks.pressure --only unused-inputs forks --answers 100

Each attack gets a server of its own with small limits. Its resident memory (with all its children) is read all the
time, and compared with what it took before plus the limits that the attack can use. An honest client of the same model
asks at changing cuts until it has ``--answers`` answers, and compares each bit for bit. The hostile client comes from
another address, and sends by means of its own what `edge_client` would refuse to send.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from edge_client import EdgeClient
from edge_client.generation.link import SessionLink
from edge_client.model_choice import ModelChoice
from edge_client.transport import Stamps, wire
from edge_client.transport.outbox import SendArea
from protos.isthmus.v1 import split_pb2
from shared_hooks.crossing import Parcel
from shared_hooks.errors import IsthmusError
from shared_hooks.generation import SplitForward, StepReply
from shared_hooks.tensors import identical
from studies.attacks import pressure_models
from studies.siege.hostile import through
from studies.siege.processes import Server

MIB = 1 << 20
LIMITS: dict[str, Any] = {
    "max_request_bytes": 32 * MIB,
    "max_pending_bytes": 64 * MIB,
    "max_message_bytes": MIB,
    "chunk_bytes": 256 << 10,
    "max_answer_bytes": 32 * MIB,
    "max_cuts_bytes": 16 * MIB,
    "max_recipes": 64,
    "max_recipe_steps": 20_000,
    "max_constant_bytes": 16 * MIB,
    "max_tail_bytes": 128 * MIB,
    "max_session_bytes": 32 * MIB,
    "max_sessions_bytes": 64 * MIB,
    "max_clients": 16,
    "max_compute_seconds": 5,
    "max_file_pixels": 4_000_000,
}
KEPT_MIB = 64 + 32 + 16 + 16 + 128 + 16 * 2 + 10
"""Requests, answers, descriptions, constants, one tail, frames of each way, recipes."""
SESSIONS_MIB = 64
DECODER_MIB = 192 + 16 * 4 + 64
"""A decoder's address space beside an interpreter's with Pillow."""
CUT = "model.layers.1"
HUGE = 3_000_000
SECONDS = 240.0


class Attack(NamedTuple):
    """``run`` asks with the client until it is interrupted, and counts what came. ``mib``: of the limits it may use."""

    model: str
    run: Callable[[EdgeClient, Callable[[str], None]], Iterator[None]]
    mib: int = KEPT_MIB


ATTACKS: dict[str, Attack] = {}


def attack(name: str, model: str, mib: int = KEPT_MIB) -> Callable[[Any], Any]:
    def register(run: Any) -> Any:
        ATTACKS[name] = Attack(model, run, mib)
        return run

    return register


# -- decoding sessions


class _Recorder(SessionLink):
    """Keeps the steps that it sends."""

    def __init__(self, client: EdgeClient) -> None:
        super().__init__(client, CUT)
        self.kept: list[tuple[dict[str, Any], list[torch.Tensor]]] = []

    def step(self, session: int, number: int, header: Any, tensors: Any, *rest: Any) -> StepReply:
        self.kept.append((copy.deepcopy(header), [tensor.clone() for tensor in tensors]))
        return super().step(session, number, header, tensors, *rest)


class _Steps:
    """Sessions of recorded steps, to which anything may be sent next."""

    def __init__(self, client: EdgeClient, hear: Callable[[str], None]) -> None:
        self._client, self._hear = client, hear
        recorder = _Recorder(client)
        with SplitForward(client.wrapped.model, CUT, recorder):
            client.wrapped.model.generate(  # type: ignore[operator]
                torch.tensor([[5, 9, 7, 5, 9, 7]]), max_new_tokens=8, do_sample=False, pad_token_id=0
            )
        self.kept = recorder.kept
        self._numbers = itertools.count(1000)

    def opened(self, steps: int) -> int:
        session = next(self._numbers)
        for number in range(steps):
            self.send(session, number, *self.kept[number])
        return session

    def send(
        self,
        session: int,
        number: int,
        header: Any,
        tensors: list[torch.Tensor],
        fork: Any = (0, 0),
        codec: str = "zstd",
    ) -> bool:
        """Whether it was answered."""
        decoding = split_pb2.Decoding(cut=CUT, fork_of=fork[0], fork_step=fork[1])
        header = json.loads(json.dumps(header))

        def pack() -> wire.Outgoing:
            parcel = Parcel.of_tensors(header, tensors, "zstd")
            return wire.Outgoing(
                "", b"", parcel.header, parcel.buffers, parcel.nbytes, decoding=decoding, session=session, step=number
            )

        try:
            self._client.requests.begin_step(pack, CUT, Stamps(), self._client.until(20.0)).result()
        except IsthmusError as error:
            self._hear(type(error).__name__)
            return False
        self._hear("answered")
        return True

    def reported(self, key: str, number: int) -> Any:
        """What the steps up to this one say under a key."""
        found = [header[key] for header, _ in self.kept[: number + 1] if key in header and header[key] != 1]
        return copy.deepcopy(found[-1]) if found else []

    def with_inputs(self, number: int, forms: list[Any]) -> dict[str, Any]:
        """The header of that step, with inputs that the model takes and does not use."""
        header: dict[str, Any] = copy.deepcopy(self.kept[number][0])
        header["in"] = [*self.reported("in", number), *([f"unused_{n}", ["t", 0], 1] for n in range(len(forms)))]
        header["f"] = [*self.reported("f", number), *forms]
        return header


@attack("unused-inputs", "language", KEPT_MIB + SESSIONS_MIB)
def unused_inputs(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """steps of some kB that bring 16 MiB of zeros in inputs nobody uses (A2)"""
    steps, zeros = _Steps(client, hear), [torch.zeros(1 << 20) for _ in range(4)]
    while True:
        session, number = steps.opened(2), 2
        header = steps.with_inputs(2, [["s", n] for n in range(4)])
        while number < 12 and steps.send(session, number, header, [*zeros, *steps.kept[2][1]]):
            number += 1
            yield
        yield


@attack("huge-unused", "language", KEPT_MIB + SESSIONS_MIB)
def huge_unused(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """a huge input and number that lead to nothing, then the mask of both (A4)"""
    steps = _Steps(client, hear)
    while True:
        session = steps.opened(2)
        header = steps.with_inputs(2, [["p", [1, HUGE], [HUGE, 1], "int64", "unused"]])
        header["d"] = [*steps.reported("d", 2), [["v", HUGE], [["unused"]]]]
        steps.send(session, 2, header, steps.kept[2][1])
        header = copy.deepcopy(steps.kept[3][0])
        keys = ["m", [1, 2, HUGE, 8], [16 * HUGE, 8 * HUGE, 8, 1], "float32"]
        header["d"] = [[keys, [["layers", n, part] for n in range(4) for part in ("keys", "values")]]]
        header["in"] = steps.reported("in", 3)
        header["f"] = [["p", [1, 1000], [1000, 1], "int64", "input_ids"], *[["="]] * (len(header["in"]) - 2)]
        steps.send(session, 3, header, steps.kept[3][1])
        yield


@attack("called-class", "language", KEPT_MIB + SESSIONS_MIB)
def called_class(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """an attribute that bears a method's name and holds a class (A5)"""
    steps = _Steps(client, hear)
    for size in itertools.cycle((5_000_000, 50_000_000, 5)):
        header = copy.deepcopy(steps.kept[0][0])
        name = random.choice(("batch_repeat_interleave", "reorder_cache", "get_seq_length", "update", "fresh"))
        header["new"][2].append([name, ["c", "transformers.cache_utils:LinearAttentionLayer"]])
        header["do"] = [[name, [size]]]
        steps.send(next(steps._numbers), 0, header, steps.kept[0][1])
        yield


@attack("repeats", "language", KEPT_MIB + SESSIONS_MIB)
def repeats(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """lists of calls that repeat the rows of a state, each within its bound (A1)"""
    steps = _Steps(client, hear)
    for count in itertools.cycle((3, 4, 8, 60)):
        session = steps.opened(2)
        header = {**steps.kept[2][0], "do": [["batch_repeat_interleave", [64]]] * count}
        steps.send(session, 2, header, steps.kept[2][1])
        yield


@attack("reported-calls", "language", KEPT_MIB + SESSIONS_MIB)
def reported_calls(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """steps that tell of thousands of calls, which a session keeps (A3)"""
    steps = _Steps(client, hear)
    while True:
        session, number = steps.opened(2), 2
        calls = [["nothing", n, ["t", 0], [[[1], [1], "float32"]], []] for n in range(8000)]
        while number < 8 and steps.send(session, number, {**steps.kept[2][0], "t": calls}, steps.kept[2][1]):
            number += 1
            yield
        yield


@attack("forks", "language", KEPT_MIB + SESSIONS_MIB)
def forks(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """copies of a session that has some MiB, hundreds of them, and copies of the copies"""
    steps = _Steps(client, hear)
    while True:
        parent = steps.opened(2)
        header = steps.with_inputs(2, [["s", 0]])
        steps.send(parent, 2, header, [torch.randn(1 << 20), *steps.kept[2][1]])
        for _ in range(100):
            child = next(steps._numbers)
            steps.send(child, 0, *steps.kept[3], fork=(parent, 3))
            yield


@attack("deep-forms", "language", KEPT_MIB + SESSIONS_MIB)
def deep_forms(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """states of lists in lists, and of a hundred thousand parts"""
    steps = _Steps(client, hear)
    deep: Any = ["l", "", []]
    for _ in range(150):
        deep = ["l", "", [[0, deep]]]
    wide = ["l", "", [[n, ["v", n]] for n in range(60_000)]]
    for form in itertools.cycle((deep, wide)):
        header = copy.deepcopy(steps.kept[0][0])
        header["new"][2].append(["more", form])
        steps.send(next(steps._numbers), 0, header, steps.kept[0][1])
        yield


# -- values that Python reads, state, rows that meet


def _ask(client: EdgeClient, hear: Callable[[str], None], x: torch.Tensor, cut: str, **more: Any) -> None:
    try:
        client.infer(x, split=cut, **more)
        hear("answered")
    except IsthmusError as error:
        hear(type(error).__name__)


@attack("read-values", "reads")
def read_values(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """numbers that Python reads: long one way, then the other, then both (B2)"""
    for rows, columns in itertools.cycle(
        ((2, 3), (1 << 20, 16), (16, 1 << 20), (1 << 16, 1 << 12), (0, 4096), (-5, 7))
    ):
        x = torch.zeros(1, 8)
        x[0, 0], x[0, 1] = float(rows), float(columns)
        _ask(client, hear, x, "input")
        for cut in ("first", "second"):  # the edge would make it first: it lies
            _ask(client, hear, x.clamp(-3, 3), cut)
        yield


@attack("kept-state", "keeps")
def kept_state(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """inputs whose path keeps state, as requests and as files (B1, B5)"""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "far.npy"
        import numpy as np

        np.save(file, np.full((1, 8), 1e6, np.float32))
        while True:
            for cut in ("input", "first", "second"):
                _ask(client, hear, torch.full((1, 8), 1e6), cut)
            _ask(client, hear, file, "cloud-only-file")  # type: ignore[arg-type]
            yield


@attack("rows-meet", "experts")
def rows_meet(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """rows of a mixture of experts with capacity, to be computed with others' (B3)"""
    generator = torch.Generator().manual_seed(5)
    while True:
        _ask(client, hear, torch.randn(8, 16, generator=generator), random.choice(("input", "first")))
        yield


# -- files, and memory that is shared


@attack("inflating-files", "digits", KEPT_MIB + DECODER_MIB)
def inflating_files(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """files that decode to far more than they are: arrays without an item size, images, tiles, scans (N1 to N5)"""
    with tempfile.TemporaryDirectory() as folder:
        for number, (suffix, data) in enumerate(itertools.cycle(inflating())):
            file = Path(folder) / f"{number % 50}{suffix}"
            file.write_bytes(data)
            _ask(client, hear, file, "cloud-only-file")  # type: ignore[arg-type]
            yield


def inflating() -> list[tuple[str, bytes]]:
    """(suffix, bytes): the findings' files."""
    from PIL import Image

    found = []
    for text in ("'|V0', 'shape': (1000000000000,)", "'<U0', 'shape': (500000000,)", "'|S0', 'shape': (500000000,)",
                 "'<f4', 'shape': (0, 1000000000000)", "'<f4', 'shape': (100000, 100000)",
                 "'|O', 'shape': (9,)"):  # fmt: skip
        body = f"{{'descr': {text.split(', ', 1)[0]}, 'fortran_order': False, {text.split(', ', 1)[1]}, }}".ljust(117)
        found.append((".npy", b"\x93NUMPY\x01\x00\x76\x00" + body.encode() + b"\n"))
    for suffix, kind in ((".png", "PNG"), (".webp", "WEBP"), (".gif", "GIF"), (".tiff", "TIFF")):
        file = io.BytesIO()
        Image.new("L", (8000, 8000)).save(file, kind, **({"compression": "tiff_deflate"} if kind == "TIFF" else {}))
        found.append((suffix, file.getvalue()))
    file = io.BytesIO()
    Image.new("L", (2000, 2000)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    scan = data.rindex(b"\xff\xda")
    found.append((".jpg", data[:-2] + data[scan:-2] * 150 + b"\xff\xd9"))
    found.append((".jpg", data[:-2] + data[scan:-2] * 6400 + b"\xff\xd9"))
    tags = (256, 8), (257, 8), (258, 8), (259, 8), (262, 1), (322, 40000), (323, 40000), (324, 8), (325, 90)
    tile = (b"II*\x00\x08\x00\x00\x00" + (9).to_bytes(2, "little") + b"".join(
        tag.to_bytes(2, "little") + (4).to_bytes(2, "little") + (1).to_bytes(4, "little") + value.to_bytes(4, "little")
        for tag, value in tags
    ) + bytes(40))  # fmt: skip
    found.append((".tiff", tile))
    return found


@attack("lying-areas", "digits")
def lying_areas(client: EdgeClient, hear: Callable[[str], None]) -> Iterator[None]:
    """shared memory that changes while the server reads it, and ends before the places that are named"""
    draw, areas, x = random.Random(6), list[SendArea](), torch.randn(16, 1, 32, 32)
    take, write, description = SendArea.take, SendArea.write, SendArea.description

    def lying(area: SendArea) -> split_pb2.Area:
        areas.append(area)
        said = description(area)
        said.nbytes = 1 << 40
        return said

    def beyond(area: SendArea, request_id: int, nbytes: int) -> int | None:
        place = take(area, request_id, nbytes)
        return None if place is None else place + draw.choice((0, 0, 0, 1 << 30, 1 << 39))

    def nothing(area: SendArea, offset: int, buffers: Any) -> None:
        if offset < 1 << 30:
            write(area, offset, buffers)

    SendArea.description, SendArea.take, SendArea.write = lying, beyond, nothing  # type: ignore[method-assign]

    def changing() -> None:
        while True:
            for area in areas[-1:]:
                with contextlib.suppress(ValueError):
                    area._memory[4096 + draw.randrange(1 << 18)] = draw.randrange(256)

    threading.Thread(target=changing, daemon=True).start()
    while True:
        _ask(client, hear, x, draw.choice(("input", "stage1.0.conv1", "stem.0")), deadline=5.0)
        if draw.random() < 0.02:
            client.close()
            return  # another stream, and so another area
        yield


# -- the processes


def hostile(name: str, address: str, spec: str, queue: Any) -> None:
    """The hostile client's process: continues until it is ended."""
    torch.set_num_threads(1)
    os.nice(5)
    counted: Counter[str] = Counter()
    chosen, reported = ATTACKS[name], time.monotonic()
    address = through("127.0.0.2", address)
    while True:
        try:
            exact = name != "rows-meet"
            with EdgeClient(address, ModelChoice(spec, device="cpu", threads=1), metrics=False, exact=exact) as client:
                client.wrapped.model.requires_grad_(False)
                for _ in chosen.run(client, lambda word: counted.update([word])):
                    if time.monotonic() > reported + 1:
                        queue.put(dict(counted))
                        reported = time.monotonic()
        except Exception as error:
            counted[f"{type(error).__name__} of its own: {str(error)[:80]}"] += 1
            queue.put(dict(counted))
            time.sleep(0.2)


def honest(name: str, address: str, spec: str, answers: int, queue: Any, go: Any) -> None:
    """The honest client's process: so many answers, each compared."""
    torch.set_num_threads(1)
    model = ATTACKS[name].model
    counted: Counter[str] = Counter()
    waits: list[float] = []
    draw = random.Random(7)
    exact = model != "experts"
    with (
        torch.no_grad(),
        EdgeClient(address, ModelChoice(spec, device="cpu", threads=1), metrics=False, exact=exact) as client,
    ):
        inputs = _inputs(model)
        wanted = [
            client.wrapped.whole(**one, use_cache=False).logits if isinstance(one, dict) else client.wrapped.whole(one)
            for one in inputs
        ]
        cuts = ["input", *[layer.name for layer in client.wrapped.layers if layer.can_split]]
        for cut in cuts:
            client.infer(inputs[0], split=cut)
        queue.put("ready")
        go.wait()
        until = time.monotonic() + SECONDS
        while counted["answers"] < answers and time.monotonic() < until:
            which = draw.randrange(len(inputs))
            cut = draw.choice(cuts)
            began = time.monotonic()
            try:
                answer = client.infer(inputs[which], split=cut)
            except IsthmusError as error:
                counted[f"{type(error).__name__}: {str(error)[:100]}"] += 1
                time.sleep(0.02)
                continue
            waits.append(time.monotonic() - began)
            counted["answers"] += 1
            output = getattr(answer.output, "logits", answer.output)
            if answer.batch_size > 1:
                counted["in a batch"] += 1
                same = torch.allclose(output, wanted[which], rtol=1e-4, atol=1e-5)
            else:
                same = identical(output, wanted[which])
            counted["wrong"] += not same
    waits.sort()
    queue.put((dict(counted), waits[len(waits) // 2] if waits else 0.0, waits[-1] if waits else 0.0))


def _inputs(model: str) -> list[Any]:
    generator = torch.Generator().manual_seed(11)
    if model == "language":
        return [{"input_ids": torch.randint(0, 120, (1, n), generator=generator)} for n in (4, 8, 8, 12)]
    if model == "reads":
        found = [torch.randn(1, 8, generator=generator) for _ in range(4)]
        for n, x in enumerate(found):
            x[0, 0], x[0, 1] = float(n + 2), float(3 * n + 1)
        return found
    shape = {"keeps": (1, 8), "experts": (1, 16), "digits": (1, 1, 32, 32)}[model]
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def tried(name: str, answers: int, folder: Path) -> dict[str, Any]:
    """One attack on a server of its own."""
    chosen = ATTACKS[name]
    spec = chosen.model
    if spec != "digits":
        file = folder / f"{chosen.model}.toml"
        file.write_text(pressure_models.spec(chosen.model))
        spec = str(file)
    tables = {"": {"listen": "127.0.0.1:0", "threads": 1}, "models": {chosen.model: spec}, "limits": LIMITS}
    server = Server(folder / name, tables, ("--trials", "never"))
    context = multiprocessing.get_context("spawn")
    said, heard, go = context.Queue(), context.Queue(), context.Event()
    good = context.Process(target=honest, args=(name, server.address, spec, answers, heard, go), daemon=True)
    bad = context.Process(target=hostile, args=(name, server.address, spec, said), daemon=True)
    row: dict[str, Any] = {"does": " ".join((chosen.run.__doc__ or "").split())}
    try:
        good.start()
        assert heard.get(timeout=SECONDS) == "ready"
        rest, began = server.resident(), time.monotonic()
        bad.start()
        hostile_counts = said.get(timeout=SECONDS)
        go.set()
        counted, median, worst = heard.get(timeout=2 * SECONDS)
        time.sleep(0.5)
        while not said.empty():
            hostile_counts = said.get()
        peak = server.peak(began)
        row |= {
            "seconds": round(time.monotonic() - began, 1),
            "hostile": hostile_counts,
            "honest": counted,
            "median_ms": round(1000 * median, 1),
            "worst_ms": round(1000 * worst, 1),
            "rest_mib": round(rest),
            "above_mib": round(peak - rest),
            "limits_mib": chosen.mib,
            "alive": server.process.poll() is None,
        }
    finally:
        for process in (bad, good):
            if process.pid is not None:
                process.kill()
                process.join()
        status, _ = server.drain()
    row["exit_status"] = status
    errors = sum(count for key, count in counted.items() if ":" in key)
    row["holds"] = bool(
        row["alive"] and status == 0 and not counted.get("wrong") and counted.get("answers", 0) >= answers
        and row["above_mib"] <= 1.2 * chosen.mib and sum(hostile_counts.values())
    )  # fmt: skip
    row["honest_errors"] = errors
    return row


def main() -> int:
    """The exit status: 0 if every attack met its bound and no honest answer was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.attacks.pressure", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--answers", type=int, default=1000, help="of the honest client, for each; default: 1000")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go, beside those that are there")
    options = parser.parse_args()
    rows = json.loads(options.json.read_text())["attacks"] if options.json and options.json.exists() else {}
    failed = False
    with tempfile.TemporaryDirectory(prefix="isthmus-pressure-") as name:
        for one in options.only:
            row = rows[one] = tried(one, options.answers, Path(name))
            failed |= not row["holds"]
            good = row["honest"]
            print(
                f"{one:<16}{'holds' if row['holds'] else 'FAILS':<7}{row['above_mib']:>5} of {row['limits_mib']} MiB  "
                f"{good.get('answers', 0)} honest, {good.get('wrong', 0)} wrong, {row['honest_errors']} errors, "
                f"worst {row['worst_ms']:.0f} ms  {row['hostile']}",
                flush=True,
            )
            if options.json:
                reported = {
                    "date": time.strftime("%Y-%m-%d"),
                    "command": "python -m studies.attacks.pressure",
                    "attacks": rows,
                }
                options.json.write_text(json.dumps(reported, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

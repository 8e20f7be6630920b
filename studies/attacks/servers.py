"""Hostile servers: ``python -m studies.attacks.servers``. What do answers that were changed on their way do to an edge?

A relay speaks gRPC to both sides: what the real server says is changed deep (headers of answers with their checksums
put right again, sizes that are announced, payloads that inflate, results of decoding steps, greetings, refusals, frames
in another order). The edge asks on, for predictions and for generated tokens. Each request must end, with the model's
own answer, another answer of its form, or an error by name; the edge's memory stays within what its models can answer.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import psutil
import torch
import zstandard

from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from edge_client.transport import ConnectionOptions
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError
from shared_hooks.tensors import identical
from studies.attacks import pressure_models
from studies.attacks.mutation import NODES, NUMBERS, TEXTS
from studies.siege.material import header_of
from studies.siege.processes import Server
from studies.siege.stranger import ANY_SIZE, SERVICE

MIB = 1 << 20
BOMB = 900 * MIB
ALLOWED_MIB = 128
"""Above what it takes at rest: ten logits and four layers' keys need some kB."""
SECONDS = 8.0
MODELS = ("digits", "language")


class Relay:
    """Between an edge and a real server. ``rate``: of the frames that are changed."""

    def __init__(self, address: str, seed: int, rate: float) -> None:
        self._target = grpc.insecure_channel(address, ANY_SIZE)
        self._draw = random.Random(seed)
        self._rate = rate
        self._replies: list[split_pb2.ServerFrame] = []
        self._bomb = zstandard.compress(bytes(BOMB))
        self.changed = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=ANY_SIZE)
        self._server.add_generic_rpc_handlers((_Handler(self),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def session(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The stream, with its answers changed."""
        call = self._target.stream_stream(SERVICE + "Session")(frames)
        context.add_callback(call.cancel)
        try:
            for data in call:
                yield from self._changed(data)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details() or "")  # type: ignore[attr-defined]

    def other(self, method: str, request: bytes) -> bytes:
        """A call with one answer."""
        return self._target.unary_unary(method)(request, timeout=20)  # type: ignore[no-any-return]

    def _changed(self, data: bytes) -> Iterator[bytes]:
        draw = self._draw
        if draw.random() >= self._rate:
            yield data
            return
        self.changed += 1
        frame = split_pb2.ServerFrame.FromString(data)
        kind = frame.WhichOneof("frame")
        how = draw.random()
        if how < 0.1:
            made = bytearray(data)
            for _ in range(draw.choice((1, 3, 20))):
                made[draw.randrange(len(made))] = draw.randrange(256)
            yield bytes(made)
        elif how < 0.15:
            yield data
            yield data
        elif kind == "reply":
            self._replies = [*self._replies[-20:], copy.deepcopy(frame)]
            yield from self._reply(frame)
        elif kind == "welcome":
            yield self._fields(frame.welcome, frame)
        elif kind == "chunk":
            frame.chunk.offset = draw.choice((0, 1, 1 << 40, frame.chunk.offset + 1))
            yield frame.SerializeToString()
        else:
            yield self._fields(getattr(frame, kind), frame) if kind else data

    def _fields(self, message: Any, frame: Any) -> bytes:
        """Numbers, texts and truth values of a message, changed."""
        draw = self._draw
        fields = list(message.DESCRIPTOR.fields)
        for field in draw.sample(fields, min(3, len(fields))):
            try:
                if field.cpp_type in (field.CPPTYPE_UINT64, field.CPPTYPE_UINT32, field.CPPTYPE_INT64):
                    bits = 32 if field.cpp_type == field.CPPTYPE_UINT32 else 63
                    setattr(message, field.name, draw.choice((0, 1, 1 << 20, (1 << bits) - 1)))
                elif field.cpp_type == field.CPPTYPE_STRING:
                    setattr(message, field.name, draw.choice(("", "x" * 100_000, "__class__", "TooLarge", "\x1b[2J")))
                elif field.cpp_type == field.CPPTYPE_BOOL:
                    setattr(message, field.name, draw.random() < 0.5)
            except (TypeError, AttributeError, ValueError):
                continue
        return frame.SerializeToString()  # type: ignore[no-any-return]

    def _reply(self, frame: split_pb2.ServerFrame) -> Iterator[bytes]:
        draw, reply = self._draw, frame.reply
        how = draw.random()
        if how < 0.2:
            other = copy.deepcopy(draw.choice(self._replies))
            other.reply.id = reply.id
            yield other.SerializeToString()
            return
        if how < 0.3:
            reply.payload_bytes = draw.choice((0, 1, 1 << 30, 1 << 40, (1 << 64) - 1))
        elif how < 0.4:
            yield self._fields(reply, frame)
            return
        try:
            body = json.loads(reply.header[8:])
        except ValueError:
            yield frame.SerializeToString()
            return
        if how < 0.55 and body.get("sections"):
            body["sections"] = [["zstd", "uint8", [BOMB], [1], len(self._bomb), draw.choice((0, 5))]]
            reply.payload, reply.payload_bytes = self._bomb, -(-len(self._bomb) // 64) * 64
        elif how < 0.7 and isinstance(body.get("meta"), dict):
            body["meta"]["out"] = draw.choice(
                (
                    ["token", [1, 1, 500_000_000], "float64", 0],
                    ["top", [1, 1, 1 << 40], "float32", 2],
                    ["drawn", [], "x"],
                )
            )
        for _ in range(draw.choice((1, 2, 4))):
            self._node(body)
        reply.header = header_of(body)
        yield frame.SerializeToString()

    def _node(self, value: Any) -> None:
        draw = self._draw
        while isinstance(value, (list, dict)) and value:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            key = draw.choice(list(keys))
            inner = value[key]
            if not isinstance(inner, (list, dict)) or not inner or draw.random() < 0.2:
                value[key] = copy.deepcopy(draw.choice((*NUMBERS, *TEXTS, *NODES, [inner], inner)))
                return
            value = inner


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method == SERVICE + "Session":
            return grpc.stream_stream_rpc_method_handler(self._relay.session)
        return grpc.unary_unary_rpc_method_handler(lambda request, _: self._relay.other(details.method, request))


def edge(model: str, spec: str, port: int, minutes: float, queue: Any) -> None:
    """The edge's process: asks until the time is over, and reports what came."""
    torch.set_num_threads(1)
    logging.disable()
    counted: Counter[str] = Counter()
    until, reported, slowest = time.monotonic() + 60 * minutes, time.monotonic(), 0.0
    queue.put((dict(counted), slowest))
    options = ConnectionOptions(patience=2.0)
    while time.monotonic() < until:
        try:
            client = EdgeClient(
                f"127.0.0.1:{port}", ModelChoice(spec, device="cpu", threads=1), deadline=SECONDS, connection=options
            )
            with client, torch.no_grad():
                for word, seconds in _asked(client, model):
                    counted[word] += 1
                    counted["requests"] += 1
                    slowest = max(slowest, seconds)
                    if time.monotonic() > reported + 1:
                        queue.put((dict(counted), slowest))
                        reported = time.monotonic()
                    if time.monotonic() > until or counted["requests"] % 50 == 0:
                        break  # another greeting
        except IsthmusError as error:
            counted[f"at the beginning: {type(error).__name__}"] += 1
        except Exception as error:
            counted[f"OUTSIDE {type(error).__name__}: {error!s:.200}"] += 1
    queue.put((dict(counted), slowest))
    queue.put(None)


def _asked(client: EdgeClient, model: str) -> Iterator[tuple[str, float]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 1, 32, 32, generator=generator)
    words = torch.tensor([[5, 9, 7, 5, 9, 7]])
    own = client.wrapped.model
    wanted = client.wrapped.whole(x) if model == "digits" else own.generate(words, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    while True:
        began = time.monotonic()
        try:
            if model == "digits":
                found: Any = client.infer(x, split="stage1.0.conv1").output
            else:
                with client.generating(cut="model.layers.1") as made:
                    found = made.generate(input_ids=words, max_new_tokens=6, do_sample=False)
            word = "exact" if identical(found, wanted) else "another answer"
        except IsthmusError as error:
            word = type(error).__name__
        except Exception as error:
            word = f"OUTSIDE {type(error).__name__}: {error!s:.200}"
        yield word, time.monotonic() - began


def tried(model: str, seed: int, minutes: float, rate: float, folder: Path) -> dict[str, Any]:
    """One edge beside one relay."""
    spec = model
    if model != "digits":
        file = folder / f"{model}.toml"
        file.write_text(pressure_models.spec(model))
        spec = str(file)
    tables = {"": {"listen": "127.0.0.1:0", "threads": 1}, "models": {model: spec}}
    server = Server(folder / model, tables, ("--trials", "never"))
    relay = Relay(server.address, seed, rate)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=edge, args=(model, spec, relay.port, minutes, queue), daemon=True)
    process.start()
    looks, over = [0.0], threading.Event()
    try:
        queue.get(timeout=120)
        time.sleep(5)  # its model is loaded by then
        looking = psutil.Process(process.pid)
        rest = looking.memory_info().rss / MIB

        def look() -> None:
            while not over.wait(0.02):
                try:
                    looks[0] = max(looks[0], looking.memory_info().rss / MIB)
                except psutil.Error:
                    return

        threading.Thread(target=look, daemon=True).start()
        counted: dict[str, int] = {}
        slowest = 0.0
        hung = False
        try:
            while (said := queue.get(timeout=60)) is not None:
                counted, slowest = said
        except Exception:
            hung = True
        over.set()
        process.join(5)
        status = process.exitcode
    finally:
        process.kill()
        server.drain(5)
    row = {
        "seed": seed, "changed": relay.changed, "counted": counted, "slowest_s": round(slowest, 1),
        "above_mib": round(looks[0] - rest), "allowed_mib": ALLOWED_MIB, "exit_status": status, "hung": hung,
    }  # fmt: skip
    faults = [word for word in counted if "OUTSIDE" in word]
    faults += ["a request did not end"] if hung or slowest > SECONDS + 5 else []
    faults += [f"exit status {status}"] if status != 0 else []
    faults += [f"{row['above_mib']} MiB"] if looks[0] - rest > 1.2 * ALLOWED_MIB else []
    return {**row, "faults": faults}


def main() -> int:
    """The exit status: 0 if nothing falls short."""
    command = "python -m studies.attacks.servers"
    parser = argparse.ArgumentParser(prog=command, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="for each model; default: 2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.3, help="of the frames that are changed; default: 0.3")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows go, beside those that are there")
    options = parser.parse_args()
    rows = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else []
    fell = False
    with tempfile.TemporaryDirectory(prefix="isthmus-servers-") as name:
        for model in options.models:
            row = {"model": model, **tried(model, options.seed, options.minutes, options.rate, Path(name))}
            rows.append(row)
            fell |= bool(row["faults"])
            print(json.dumps(row), flush=True)
            if options.json:
                reported = {"date": time.strftime("%Y-%m-%d"), "command": command, "rows": rows}
                options.json.write_text(json.dumps(reported, indent=1) + "\n")
    return 1 if fell else 0


if __name__ == "__main__":
    sys.exit(main())

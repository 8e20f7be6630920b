"""Attacks on tails by name: ``python -m studies.attacks.tails``. What can a client do that brings tensors by name?

Honest requests for tails (``digits@CUT`` for every cut, and a model whose Python reads data) are changed: names,
shapes, datatypes, sizes, values (NaN, infinities, what no head gives), missing and further inputs, other cuts and
weights, codecs with parameters of all kinds. By gRPC and by HTTP, where lengths of the header lie, too. Each must be
refused by name, or answered with the bits that torch's own tail gives for what was sent; honest requests between them
stay exact.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import numpy as np
import torch
from torch import nn

from edge_client.light_codecs import encode
from protos.inference import inference_pb2 as pb
from shared_hooks import WrappedModel
from shared_hooks.crossing import NamedCrossing, named_crossing
from shared_hooks.errors import IsthmusError
from shared_hooks.models import load_spec
from studies.siege.processes import Server, shipped

METHOD = "/inference.GRPCInferenceService/ModelInfer"
NAMES = {"float32": "FP32", "int64": "INT64", "bool": "BOOL"}
TYPES = ["FP32", "FP64", "FP16", "BF16", "INT64", "INT32", "INT8", "UINT8", "BOOL", "BYTES", "", "x" * 300]
SIZES = [0, 1, -1, 2, 3, 7, 1 << 20, 1 << 31, 1 << 62, -(1 << 62)]
TEXTS = ["", "x", "stem.2", "input.x", "read.(model)", "../..", "a" * 5000, "\x00", "∂", "isthmus_frontier"]
VALUES = [float("nan"), float("inf"), -1e38, 1e-45, 0.0, -0.0, 7.0]
CODECS = ["lz4", "shuffle-zstd", "fp16", "int8", "zstd", "basis", "frames", "sparse", "int1", "x", ""]
SECONDS = 25.0
FIRST_SECONDS = 90.0
"""For honest requests before any attack: one took 18.7 s on a busy machine, and less than 0.5 s on a quiet one."""
ALLOWED_MIB = 256
"""Above rest: four requests of at most 16 MiB under way, decoded, computed, answered."""


class Reads(nn.Module):
    """(B, 8), (B,) -> (B, 4): its Python asks whether all of a mask is set, and how much of it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if not bool(mask.all()):
            hidden = hidden * mask[:, None]
        for _ in range(int(mask.sum())):
            hidden = self.second(hidden).tanh()
        return self.last(hidden)


class Honest:
    """A cut and an input: what crosses, by name, and torch's own tail."""

    def __init__(self, model: str, wrapped: WrappedModel, cut: str, inputs: dict[str, torch.Tensor]) -> None:
        self.model, self.cut, self.wrapped = model, cut, wrapped
        early = wrapped.head(cut, *inputs.values())
        self.crossing = early.crossing
        self.named: NamedCrossing = named_crossing(early.crossing, list(inputs))
        self.tensors = {one.name: one.tensor_of(early.pieces[one.piece]).contiguous() for one in self.named.tensors}
        for one, value in zip(self.named.reads, early.values, strict=True):
            self.tensors[one.name] = torch.tensor(one.numbers_of(value)).reshape(one.shape)

    def answer(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Torch's, of what crosses. Raises IsthmusError."""
        found = self.wrapped.forward(self.named.early(self.crossing, tensors))
        return found if isinstance(found, torch.Tensor) else next(iter(found.values()))

    def request(self) -> pb.ModelInferRequest:
        """As an edge sends it."""
        request = pb.ModelInferRequest(model_name=f"{self.model}@{self.cut}")
        request.parameters["isthmus_weights"].string_param = self.wrapped.weights_hash()
        for name, tensor in self.tensors.items():
            datatype = NAMES[str(tensor.dtype).removeprefix("torch.")]
            request.inputs.add(name=name, datatype=datatype, shape=list(tensor.shape))
            request.raw_input_contents.append(tensor.numpy().tobytes())
        return request


def changed(draw: random.Random, honest: Honest) -> tuple[str, pb.ModelInferRequest, dict[str, torch.Tensor] | None]:
    """What was done, the request, and what crosses then, where that is known."""
    request, tensors = honest.request(), dict(honest.tensors)
    at = draw.randrange(len(request.inputs))
    one, data = request.inputs[at], request.raw_input_contents
    kind = draw.choice(
        "name datatype shape size value number missing further twice cut weights codec params raw typed sizes".split()
    )
    if kind == "name":
        one.name = draw.choice([*TEXTS, one.name + " ", one.name.upper(), draw.choice(list(tensors))])
        return kind, request, tensors if one.name == list(tensors)[at] else None
    if kind == "datatype":
        one.datatype = draw.choice(TYPES)
        return kind, request, tensors if one.datatype == honest.request().inputs[at].datatype else None
    if kind == "shape":
        before = list(one.shape)
        shape = draw.choice(
            [[draw.choice(SIZES) for _ in before], [*before, 1], before[::-1], [], [1] * 40, [int(np.prod(before))]]
        )
        del one.shape[:]
        one.shape.extend(shape)
        return kind, request, tensors if list(one.shape) == before else None
    if kind == "size":
        data[at] = draw.choice([b"", data[at][:-1], data[at] + b"\0", data[at] * 2, bytes(draw.randrange(4096))])
        return kind, request, None
    if kind == "value":
        tensor = tensors[one.name].clone()
        if tensor.is_floating_point():
            flat = tensor.reshape(-1)
            for _ in range(draw.randrange(1, 9)):
                flat[draw.randrange(len(flat))] = draw.choice(
                    [float("nan"), float("inf"), -1e38, 1e-45, 0.0, -0.0, 7.0]
                )
        else:
            tensor = torch.full_like(tensor, draw.choice([0, 1]))
        tensors[one.name] = tensor
        data[at] = tensor.numpy().tobytes()
        return kind, request, tensors
    if kind == "number":
        numbers = [number for number, each in enumerate(request.inputs) if each.name.startswith(("read.", "count."))]
        if not numbers:
            return changed(draw, honest)
        at = draw.choice(numbers)
        value = draw.choice([-1, 0, 1, 2, 5, 1 << 40, -(1 << 63), (1 << 63) - 1])
        name = request.inputs[at].name
        tensors[name] = torch.full_like(tensors[name], value)
        data[at] = tensors[name].numpy().tobytes()
        return kind, request, tensors
    if kind == "missing":
        del request.inputs[at]
        if draw.random() < 0.7:
            del data[at]
        return kind, request, None
    if kind == "further":
        request.inputs.add(name=draw.choice(TEXTS) + "!", datatype="FP32", shape=[1])
        data.append(b"\0" * 4)
        return kind, request, None
    if kind == "twice":
        request.inputs.add().CopyFrom(one)
        data.append(data[at])
        return kind, request, None
    if kind == "cut":
        request.model_name = f"{honest.model}@{draw.choice([*TEXTS, honest.cut + '#9', honest.cut + '@x'])}"
        return kind, request, None
    if kind == "weights":
        request.parameters["isthmus_weights"].string_param = draw.choice([*TEXTS, "0" * 32])
        return kind, request, None
    if kind in ("codec", "params"):
        name = draw.choice(
            ["lz4", "shuffle-zstd", "fp16", "int8", "zstd", "basis", "frames", "sparse", "int1", "x", ""]
        )
        array = tensors[one.name].numpy()
        known = encode(name, array) if name in ("lz4", "shuffle-zstd", "fp16", "int8", "zstd") else None
        content, params = known or (data[at], [])
        if kind == "params":
            params = draw.choice([[], [0] * 6, [1 << 70], [1e308], ["x" * 99], {}, None, [[]], [0] * 99, [*params, 1]])
            if draw.random() < 0.5:
                content = bytes(draw.getrandbits(8) for _ in range(draw.randrange(1, 200)))
        elif known is not None and name not in ("fp16", "int8") and honest.named.tensors[0].name == one.name:
            pass  # a codec that keeps every bit: the answer is known
        data[at] = content
        entry: Any = draw.choice([[name, params], [name], name, None]) if kind == "params" else [name, params]
        text = json.dumps({draw.choice([one.name, one.name, "nobody"]): entry})
        text = draw.choice([text, text, text, "[" * 9999, "{}", "null", text[:-1], '{"a":' * 500])
        request.parameters["isthmus_codecs"].string_param = text
        flat = {each.name for each in honest.named.tensors if each.is_flat}
        lossless = kind == "codec" and known is not None and name in ("lz4", "shuffle-zstd", "zstd")
        said = json.loads(text) if text.startswith('{"') and text.endswith("}") else {}
        sure = lossless and one.name in said and one.name in flat
        return kind, request, tensors if sure else None
    if kind == "raw":
        bombs = [b"", data[at], bytes(1 << 20)]
        data[at] = draw.choice(bombs)
        request.parameters["isthmus_codecs"].string_param = json.dumps({one.name: [draw.choice(["zstd", "lz4"]), []]})
        return kind, request, None
    if kind == "typed":
        del data[:]
        one.contents.fp32_contents.extend([1.0] * draw.randrange(9))
        return kind, request, None
    size = draw.choice([0, 2, 3, 50, 5000, 1 << 24])  # all of one batch
    for number, each in enumerate(request.inputs):
        if len(each.shape):
            each.shape[0] = size
            row = data[number][: len(data[number]) // max(1, honest.tensors[each.name].shape[0])]
            data[number] = row * size if size < 1 << 20 else row
    return kind, request, None


class Doors:
    """One server, by both transports."""

    def __init__(self, server: Server, rest: str) -> None:
        self._channel = grpc.insecure_channel(server.address)
        self._call = self._channel.unary_unary(METHOD)
        self._rest = http.client.HTTPConnection(rest, timeout=SECONDS)

    def close(self) -> None:
        """Both connections."""
        self._channel.close()
        self._rest.close()

    def grpc(self, request: pb.ModelInferRequest, seconds: float = SECONDS) -> tuple[str, torch.Tensor | None]:
        """The error's name, or the answer."""
        try:
            reply = pb.ModelInferResponse.FromString(self._call(request.SerializeToString(), timeout=seconds))
        except grpc.RpcError as error:
            found: Any = error
            return str(found.details()).partition(":")[0][:40] or found.code().name, None
        flat = np.frombuffer(reply.raw_output_contents[0], np.float32).copy()
        return "", torch.from_numpy(flat).reshape(tuple(reply.outputs[0].shape))

    def http(self, draw: random.Random, request: pb.ModelInferRequest) -> tuple[str, torch.Tensor | None]:
        """The same; now and then a length of the header lies, and then there is no answer that must come."""
        inputs = [
            {
                "name": one.name,
                "datatype": one.datatype,
                "shape": list(one.shape),
                "parameters": {"binary_data_size": len(data)},
            }
            for one, data in zip(request.inputs, request.raw_input_contents, strict=False)
        ]
        parameters = {name: one.string_param for name, one in request.parameters.items()}
        text = json.dumps({"inputs": inputs, "parameters": {**parameters, "binary_data_output": False}}).encode()
        length, lies = len(text), draw.random() < 0.1
        if lies:
            length = draw.choice([0, 1, length - 1, length + 1, 1 << 40, -1])
        path = f"/v2/models/{quote(request.model_name, safe='')}"
        body = text + b"".join(request.raw_input_contents)
        headers = {"Inference-Header-Content-Length": str(length), "Content-Type": "application/octet-stream"}
        try:
            self._rest.request("POST", f"{path}/infer", body, headers)
            reply = self._rest.getresponse()
            said = json.loads(reply.read() or b"{}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._rest.close()
            return ("LIE" if lies else f"OUTSIDE {type(error).__name__}"), None
        if reply.status != 200:
            return str(said.get("error", "OUTSIDE")).partition(":")[0][:40], None
        one = said["outputs"][0]
        values = torch.tensor([float("nan") if each is None else each for each in one.get("data", [])])
        return ("LIE" if lies else ""), values.reshape(one["shape"]) if len(values) else None


def same(found: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    """Whether all bits are; NaN are one."""
    return found is not None and torch.equal(found.nan_to_num(), wanted.nan_to_num())


def tried(minutes: float, most: int, seed: int, folder: Path) -> dict[str, Any]:
    """One run's row."""
    draw = random.Random(seed)
    torch.set_num_threads(1)
    digits = WrappedModel(load_spec("digits").load_model())
    image = torch.rand(1, 1, 32, 32)
    honest = []
    digits.plan(image)
    for one in digits.cuts:
        if one.can_split:
            honest.append(Honest("digits", digits, one.name, {"image": image}))
    reads = WrappedModel(Reads().eval())
    inputs = {"x": torch.rand(4, 8), "mask": torch.ones(4, dtype=torch.bool)}
    reads.plan(*inputs.values())
    honest += [Honest("reads", reads, one.name, inputs) for one in reads.cuts if one.can_split] * 8
    server = Server(
        folder,
        {
            "": {"listen": "127.0.0.1:0"},
            "limits": {"max_request_bytes": 16 << 20},
            "rest": {"listen": "127.0.0.1:0"},
            "models.digits": {**shipped(), "tails": ["all"]},
            "models.reads": {
                "factory": "studies.attacks.tails:Reads",
                "tails": ["all"],
                "example": {"args": [{"shape": [4, 8]}, {"shape": [4], "dtype": "bool", "fill": 1}]},
            },
        },
    )
    row: dict[str, Any] = {"seed": seed}
    counted: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    faults: list[str] = []
    asked = answered = exact = 0
    slowest = 0.0
    doors = Doors(server, rest_of(server))
    try:
        for one in honest:
            if not same(doors.grpc(one.request(), FIRST_SECONDS)[1], one.answer(one.tensors)):
                faults.append(f"honest {one.model}@{one.cut} before")
        rest, began = server.resident(), time.monotonic()
        while time.monotonic() - began < 60 * minutes and asked < most and len(faults) < 20:
            one = draw.choice(honest)
            kind, request, tensors = changed(draw, one)
            start = time.monotonic()
            by_http = draw.random() < 0.4 and kind != "typed"
            error, found = doors.http(draw, request) if by_http else doors.grpc(request)
            slowest = max(slowest, time.monotonic() - start)
            asked += 1
            kinds[kind] += 1
            counted[error or "answered"] += 1
            if error.startswith("OUTSIDE"):
                faults.append(f"{kind}: {error}")
            if not error and tensors is not None:
                answered += 1
                try:
                    wanted = one.answer(tensors)
                except IsthmusError as why:
                    faults.append(f"{kind} at {one.cut}: answered, where torch's tail says {why}")
                else:
                    if found is not None and not same(found, wanted):
                        faults.append(f"{kind} at {one.cut}: another answer than torch's tail")
            if asked % 25 == 0:
                mine = draw.choice(honest)
                exact += 1
                if not same(doors.grpc(mine.request())[1], mine.answer(mine.tensors)):
                    faults.append(f"honest {mine.model}@{mine.cut} after {kind}")
        above = server.peak(began) - rest
        alive = server.process.poll() is None
        if not alive:
            faults.append("the server ended")
        if above > ALLOWED_MIB:
            faults.append(f"{above:.0f} MiB above rest")
        if slowest > SECONDS:
            faults.append(f"{slowest:.1f} s")
        row |= {
            "asked": asked, "answered as torch's tail": answered, "honest, exact": exact,
            "slowest_s": round(slowest, 2),
            "above_mib": round(above), "allowed_mib": ALLOWED_MIB, "kinds": dict(kinds.most_common()),
            "said": dict(counted.most_common()),
        }  # fmt: skip
    finally:
        doors.close()
        server.drain(5)
    return {**row, "faults": faults}


def rest_of(server: Server) -> str:
    """Where it answers HTTP: its log says so."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for line in server.log.read_text().splitlines():
            if "http://" in line:
                return line.partition("http://")[2].split("/")[0].split()[0].rstrip(",;")
        time.sleep(0.1)
    raise RuntimeError(f"no address of HTTP in {server.log}: {server.log.read_text()[-500:]}")


def main() -> int:
    """The exit status: 0 if nothing falls short."""
    parser = argparse.ArgumentParser(prog="python -m studies.attacks.tails", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--requests", type=int, default=100_000, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isthmus-tails-") as name:
        row = tried(options.minutes, options.requests, options.seed, Path(name))
    print(json.dumps(row, indent=1))
    if options.json:
        command = f"python -m studies.attacks.tails --minutes {options.minutes} --seed {options.seed}"
        reported = {"date": time.strftime("%Y-%m-%d"), "command": command, **row}
        options.json.write_text(json.dumps(reported, indent=1) + "\n")
    return 1 if row["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())

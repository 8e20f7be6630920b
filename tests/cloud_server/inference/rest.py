"""A client of HTTP by hand, and what the small model answers."""

from __future__ import annotations

import http.client
import json
from typing import Any

import numpy as np
import torch

from cloud_server.transport import CloudServer
from tests.cloud_server.real import Residual
from tests.waiting import PATIENCE

MODEL = Residual().eval()
INFER = "/v2/models/residual/infer"


def port_of(server: CloudServer) -> int:
    assert server.rest is not None
    return server.rest.port


Answer = tuple[int, dict[str, Any], bytes]


def ask(
    server: CloudServer, path: str, body: bytes | None = None, method: str = "", headers: Any = (), **how: Any
) -> Answer:
    """Status, JSON, and what stands behind it."""
    made = http.client.HTTPSConnection if "context" in how else http.client.HTTPConnection
    connection = made("127.0.0.1", port_of(server), timeout=PATIENCE, **how)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, dict(headers))
        response = connection.getresponse()
        data = response.read()
        size = int(response.getheader("Inference-Header-Content-Length") or len(data))
        return response.status, json.loads(data[:size] or b"null"), data[size:]
    finally:
        connection.close()


def tensor(x: torch.Tensor, **changes: Any) -> dict[str, Any]:
    return {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.tolist(), **changes}


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


ONES = torch.ones(2, 8)
GOOD = body(tensor(ONES))


def same(answer: Answer, x: torch.Tensor) -> None:
    status, message, behind = answer
    assert status == 200, message
    with torch.no_grad():
        wanted = MODEL(x)
    assert [one["name"] for one in message["outputs"]] == list(wanted)
    for one in message["outputs"]:
        nbytes = one.get("parameters", {}).get("binary_data_size")
        if nbytes is None:
            found = np.array(one["data"], "<f4")
        else:
            found, behind = np.frombuffer(behind[:nbytes], "<f4").copy(), behind[nbytes:]
        assert torch.equal(torch.tensor(found).reshape(one["shape"]), wanted[one["name"]])
    assert not behind

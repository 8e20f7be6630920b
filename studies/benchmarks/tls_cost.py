"""What credentials cost: a request by mutual TLS and with a token, against one in the clear, in turns.

One server of either kind, one torch thread each, wall-clock time: AlexNet as in the row `loopback`, and 3.2 MB there
as in `frontier`, without their own yardsticks.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from cloud_server.access import entry, hash_of, new_token
from deploy import certs
from edge_client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.model_choice import ModelChoice
from edge_client.transport import ConnectionOptions
from studies.benchmarks.networks import image
from studies.benchmarks.processes import cloud, target
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import interleave, pairwise, ratio, spreads, wall_ns

ELEMENTS = 64 * 112 * 112
REQUESTS = {
    "AlexNet": (image, 10, "loopback, AlexNet"),
    "Bare": (lambda: torch.randn(1, ELEMENTS), "before", "3.2 MB there, a small answer"),
}


def measure(options: Options) -> Row:
    lines: list[Line] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        words, credentials = _made(Path(name))
        for model, (make, where, what) in REQUESTS.items():
            x = make()
            clients = {}
            for kind, more in (("clear", ()), ("tls", words)):
                address = stack.enter_context(cloud(model, shape=tuple(x.shape), threads=1, words=more))
                choice = ModelChoice(target(model), device="cpu", threads=1)
                shown = ConnectionOptions(credentials=credentials) if more else ConnectionOptions()
                clients[kind] = stack.enter_context(EdgeClient(address, choice, where, connection=shown))
            run = {kind: lambda client=client, x=x: client.infer(x) for kind, client in clients.items()}
            measured = interleave(run, options.repeats(150), wall_ns, warm_up=10)
            found = spreads(measured, 1e-6)
            known = pairwise(measured["tls"], measured["clear"])
            details[what] = {kind: one.as_dict() for kind, one in found.items()}
            note = (
                f"{found['tls'].median:.2f} ms against {found['clear'].median:.2f} ms; neighbouring pairs "
                f"{known.low:.2f} to {known.high:.2f} x"
            )
            lines.append(Line(f"{what}: TLS / clear", ratio(measured["tls"], measured["clear"]), "x", note=note))
    return Row(tuple(lines), {"ms": details})


def _made(folder: Path) -> tuple[tuple[str, ...], Credentials]:
    """The server's words and the edge's credentials: an authority, a certificate for each, and a token."""
    authority = certs.new_authority("for a benchmark")
    files = {"ca.pem": certs.pem(authority[0])}
    for who, server in (("server", True), ("edge", False)):
        names = ("localhost", "127.0.0.1") if server else ("edge",)
        certificate, key = certs.leaf(authority, who, names, days=1, server=server)
        files |= {f"{who}.pem": certs.pem(certificate), f"{who}.key": certs.secret(key)}
    for name, data in files.items():
        certs.write(folder / name, data, private=name.endswith(".key"))
    token = new_token()
    (folder / "identities.toml").write_text(entry("edge", hash_of(token), None))
    options = {"cert": "server.pem", "key": "server.key", "client-ca": "ca.pem", "identities": "identities.toml"}
    words = [word for option, name in options.items() for word in (f"--{option}", str(folder / name))]
    shown = Credentials(ca=folder / "ca.pem", certificate=folder / "edge.pem", key=folder / "edge.key", token=token)
    return tuple(words), shown

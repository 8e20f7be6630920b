"""A stranger's words in a server's log: over gRPC, in the process that serves."""

from __future__ import annotations

import grpc

from protos.isthmus.v1 import split_pb2
from tests.cloud_server.fakes import GrpcClient
from tests.cloud_server.real import Process

FORGED = "x\n2026-01-01 00:00:00,000 INFO cloud_server: drained"


def test_greetings_make_no_forged_lines_and_no_megabytes() -> None:
    process = Process()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel:
            for number in range(200):
                hello = split_pb2.Hello(
                    protocol_version=3, client_id=FORGED, model_id=FORGED if number % 2 else "digits"
                )
                for setting in range(1000 if number < 20 else 0):
                    hello.environment[f"{FORGED} {setting}"] = "y" * 100
                client = GrpcClient(channel, split_pb2.ClientFrame(hello=hello))
                assert client.refusal()[0] in ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
        process.signal(15)
        assert process.wait() == 0
    finally:
        process.close()
    lines = process.log.splitlines()
    assert not any(line.startswith("2026-01-01") for line in lines) and all(line.isprintable() for line in lines)
    assert sum("stream of" in line for line in lines) <= 60 < 200
    assert len(process.log) < 60 * 1100 + 2000
    assert sum("cloud_server: drained" in line for line in lines if "\\n" not in line) == 1

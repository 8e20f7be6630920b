"""Ask a cloud server whether it serves: ``python deploy/health.py HOST:PORT [--wait SECONDS]``.

The standard gRPC health check, for containers and service managers. Exit status 0: serving; 1: not, or no answer.
Opens its channel as every client does, and loads no torch. The question needs no token; a server that wants clients'
certificates wants one here, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge_client.commands.common import add_credentials, credentials_of
from edge_client.credentials import Credentials
from edge_client.dial import dial


def status_of(address: str, timeout: float, credentials: Credentials | None = None) -> str:
    """SERVING, NOT_SERVING, ... or the name of the gRPC status with which the question failed."""
    with dial(address, credentials=credentials) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="keep asking for this long")
    add_credentials(parser)
    options = parser.parse_args()
    credentials = credentials_of(options)
    limit = time.monotonic() + options.wait
    while (status := status_of(options.address, 3.0, credentials)) != "SERVING" and time.monotonic() < limit:
        time.sleep(0.2)
    print(status)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())

"""Ray Serve's own gRPC proxy with our service, as it was tried (docs/decisions/0016-ray-serve.md): a server's process.

    python -m studies.ray.proxy SPEC PORT

The proxy listens on every address, which nobody can change; it is here to be timed, and serves nobody.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import studies.ray.cluster  # noqa: F401  (sets what Ray reads of the environment)


def add(servicer: Any, server: Any) -> None:
    """Ray Serve's proxy calls it: our streams, as bytes."""
    import grpc

    handlers = {"Session": grpc.stream_stream_rpc_method_handler(lambda incoming, context: iter(()))}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("isthmus.v1.Split", handlers),))
    server.add_registered_method_handlers("isthmus.v1.Split", handlers)


class Frame:
    """What the proxy takes for a message."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


class Proxied:
    """A core in a replica, whose frames come and go through Ray."""

    def __init__(self, spec: str) -> None:
        import torch

        from cloud_server.config import ModelEntry
        from cloud_server.core import Core
        from cloud_server.models import ServedModel
        from shared_hooks.models import load_spec

        torch.set_num_threads(1)
        self._core = Core([ServedModel(ModelEntry(load_spec(spec)), torch.device("cpu"))])

    async def Session(self, stream: Any) -> AsyncIterator[Frame]:
        from cloud_server.access import Caller
        from protos.frames import parse_client_frame, serialize_server_frame

        session, loop = self._core.open(Caller("ipv4:127.0.0.1:1")), asyncio.get_running_loop()

        async def take() -> None:
            async for data in stream:
                if not await loop.run_in_executor(None, session.receive, parse_client_frame(data)):
                    return
            session.finish()

        taking, frames = asyncio.ensure_future(take()), iter(session.frames())
        try:
            while (frame := await loop.run_in_executor(None, next, frames, None)) is not None:
                yield Frame(bytes(serialize_server_frame(frame)))
        finally:
            taking.cancel()
            session.disconnect()


def main() -> None:
    import ray
    from ray import serve
    from ray.serve.config import gRPCOptions

    spec, port = sys.argv[1:]
    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, logging_level="ERROR")
    options = gRPCOptions(port=int(port), grpc_servicer_functions=[f"{__name__}:add"], enable_reflection=False)
    if __name__ == "__main__":
        options.grpc_servicer_functions = ["studies.ray.proxy:add"]
    serve.start(http_options={"host": "127.0.0.1", "port": int(port) + 1}, grpc_options=options)
    from studies.ray.proxy import Proxied as named  # as replicas find it, not as __main__

    deployment = serve.deployment(named).options(max_ongoing_requests=100)
    serve.run(deployment.bind(spec), name="tried", route_prefix="/")
    print(f"listening on 127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

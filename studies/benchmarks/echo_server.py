"""A bare gRPC server: for every ``REQUEST`` messages it takes, it sends messages of the sizes given. Nothing else.

``python -m studies.benchmarks.echo_server REQUEST SIZE ...``; a size of 0 stands for the messages as they came.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from cloud_server.limits import Limits
from cloud_server.transport.listener import options

SERVICE, METHOD = "isthmus.Echo", "Session"


class Echo:
    def __init__(self, request: int, sizes: list[int]) -> None:
        self._request = request
        self._answers = [bytes(size) for size in sizes]

    def session(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        held: list[bytes] = []
        for message in messages:
            held.append(message)
            if len(held) == self._request:
                for answer in self._answers:
                    if answer:
                        yield answer
                    else:
                        yield from held
                held = []


def main() -> None:
    request, *sizes = map(int, sys.argv[1:])
    # the channel options of the real server, its thread pool, and serializers that hand bytes through
    server = grpc.server(futures.ThreadPoolExecutor(4), options=options(Limits().max_message_bytes, streams=4))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(Echo(request, sizes).session)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

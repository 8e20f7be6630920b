"""What a server says of a probe is checked: one that lies about its own time would make every link look infinite."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from edge_client.probing import LinkProber
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import RemoteError, ServerUnavailable


def answering(reply: split_pb2.ProbeReply, silent_streams: int = 0) -> tuple[grpc.Server, str]:
    """A server that answers every round with ``reply``; on its first ``silent_streams`` streams, none."""
    silent = iter(range(silent_streams))

    def probe(frames: Iterator[split_pb2.ProbeFrame], context: grpc.ServicerContext) -> Iterator[split_pb2.ProbeReply]:
        answers = next(silent, None) is None
        for frame in frames:
            if frame.last and answers:
                yield reply

    method = grpc.stream_stream_rpc_method_handler(
        probe, split_pb2.ProbeFrame.FromString, split_pb2.ProbeReply.SerializeToString
    )
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("isthmus.v1.Split", {"Probe": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (split_pb2.ProbeReply(last=True, received_bytes=10, server_ns=2**64 - 1), "reports that it spent"),
        (split_pb2.ProbeReply(last=True, received_bytes=11, server_ns=1), "received 11"),
    ],
)
def test_impossible_replies_are_no_measurements(reply: split_pb2.ProbeReply, says: str) -> None:
    server, address = answering(reply)
    try:
        with LinkProber(address) as prober, pytest.raises(RemoteError, match=says):
            prober.round(10)
    finally:
        server.stop(None).wait()


def test_a_server_that_stays_silent_is_given_up_and_may_answer_later() -> None:
    server, address = answering(split_pb2.ProbeReply(last=True, received_bytes=5, server_ns=1), silent_streams=1)
    try:
        with LinkProber(address) as prober:
            with pytest.raises(ServerUnavailable, match="did not answer"):
                prober.round(5, timeout=0.05)
            assert prober.round(5).total_ns > 0
    finally:
        server.stop(None).wait()

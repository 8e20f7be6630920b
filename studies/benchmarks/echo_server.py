"""A bare gRPC server: for every ``REQUEST`` messages it takes, it sends messages of the sizes given. Nothing else.

``python -m studies.benchmarks.echo_server REQUEST SIZE ...``; a size of 0 stands for the messages as they came. With
``--tail NETWORK LAYER_ID`` before that it computes a network's layers from there on, with a frontier of its own, before
it answers: what an echo takes between a head and a tail, whose work has emptied the caches. ``--decoder NETWORK BLOCK
TOKENS`` computes the blocks from there on and the logits of one token, and begins a new text after TOKENS.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import torch

from cloud_server.limits import Limits
from cloud_server.transport.server import options

SERVICE, METHOD = "isthmus.Echo", "Session"


class Echo:
    def __init__(self, request: int, sizes: list[int], work: Callable[[], object]) -> None:
        self._request, self._work = request, work
        self._answers = [bytes(size) for size in sizes]

    def session(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        held: list[bytes] = []
        for message in messages:
            held.append(message)
            if len(held) == self._request:
                self._work()
                for answer in self._answers:
                    if answer:
                        yield answer
                    else:
                        yield from held
                held = []


def nothing() -> object:
    return None


def tail(network: str, layer_id: int) -> Callable[[], object]:
    from shared_hooks import WrappedModel
    from studies.benchmarks import networks

    wrapped = WrappedModel(getattr(networks, network)())
    early = wrapped.forward(networks.image(), end=layer_id)
    return lambda: wrapped.forward(early, start=layer_id)


def decoder(network: str, block: int, tokens: int) -> Callable[[], object]:
    from studies.benchmarks import language

    model = getattr(language, network)()
    blocks = language.Blocks(model, block, model.config.num_hidden_layers)
    hidden = torch.zeros(1, 1, model.config.hidden_size)
    positions = itertools.cycle(range(tokens))

    @torch.no_grad()
    def work() -> object:
        return model.lm_head(model.model.norm(blocks.step(hidden, next(positions))))

    return work


def main() -> None:
    words, work = sys.argv[1:], nothing
    if words[0] == "--decoder":
        work, words = decoder(words[1], int(words[2]), int(words[3])), words[4:]
    if words[0] == "--tail":
        work, words = tail(words[1], int(words[2])), words[3:]
    request, *sizes = map(int, words)
    # the channel options of the real server, its thread pool, and serializers that hand bytes through
    server = grpc.server(futures.ThreadPoolExecutor(4), options=options(Limits().max_message_bytes, streams=4))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
        Echo(request, sizes, work).session
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

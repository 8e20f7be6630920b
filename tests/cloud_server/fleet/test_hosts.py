"""Where models are loaded: worker processes for each device, and a server that reads its file again on SIGHUP."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import psutil
import torch

from cloud_server.config import read_config
from cloud_server.core import Core
from cloud_server.fleet import Fleet, Processes
from cloud_server.fleet.on_devices import Replicated
from tests.cloud_server.fakes import CoreClient, GrpcClient
from tests.cloud_server.fleet.served import edge_of, entry
from tests.cloud_server.real import Process, ask, greet, value
from tests.waiting import eventually

X = torch.arange(16.0).reshape(2, 8)


def test_a_pool_for_each_device(tmp_path: Path) -> None:
    """What is loaded later has workers of its own; when it goes, they go."""
    file = tmp_path / "server.toml"
    file.write_text('device = "cpu"\nthreads = 1\n' + entry("one", more='device = "cpu,cpu"'))
    config = read_config(file)
    with Processes(config, [str(file), "--log-level=warning"]) as host:
        fleet = Fleet(host, config.models, lambda: read_config(file).models)
        assert isinstance(fleet["one"]._engine(), Replicated) and host.warm
        pools = host._known()
        assert [pool.crew.warm for pool in pools] == [1, 1]
        pids = [pid for pool in pools for pid in pool.crew.pids]
        with Core(fleet, workers=2) as core, edge_of("one") as edge:
            client = CoreClient(core, greet=False)
            client.send(greet(edge, "one"))
            for id in range(1, 4):
                ask(client, id, edge.head("first", X + id))
                assert torch.equal(value(client, id), edge.forward(X + id))
            file.write_text("threads = 1\n" + entry("two"))
            fleet.reload()
            eventually(lambda: len(host._known()) == 1)
            eventually(lambda: not any(map(psutil.pid_exists, pids)))
            assert host.warm and host.deaths == 0
            ask(client, 9, edge.head("first", X))
            failed = client.answer(9).failed
            assert failed is not None and failed.error == "UnknownModel"


def test_sighup_reads_the_file_again(tmp_path: Path) -> None:
    """A mistake in it changes nothing, and SIGTERM still ends the server well."""
    file = tmp_path / "server.toml"
    file.write_text(entry("one"))
    process = Process(str(file))
    try:
        with grpc.insecure_channel(f"127.0.0.1:{process.port}") as channel, edge_of("two") as edge:
            file.write_text(entry("two") + "factory = 1")
            process.signal(signal.SIGHUP)
            eventually(lambda: "nothing was changed: SpecError" in process.log)
            file.write_text(entry("two"))
            process.signal(signal.SIGHUP)
            eventually(lambda: "loaded: two; unloaded: one" in process.log)
            client = GrpcClient(channel, greet(edge, "two"))
            ask(client, 1, edge.head("first", X))
            assert torch.equal(value(client, 1), edge.forward(X))
            late = GrpcClient(channel, greet(edge, "one", client_id="late"))
            assert late.refusal()[0] == "NOT_FOUND"
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.close()

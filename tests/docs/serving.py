"""A cloud server in this process, for commands that pages show: as `cloud_server.cli` makes one, on a free port."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cloud_server.arguments import parser
from cloud_server.chain import Chain
from cloud_server.config import configure
from cloud_server.core import Core
from cloud_server.models import ServedModel
from cloud_server.transport import CloudServer
from shared_hooks.models import pick_device
from shared_hooks.observers.kinds import OBSERVERS


@contextmanager
def serving(words: Sequence[str]) -> Iterator[dict[str, str]]:
    """``cloud-server WORDS``; yields the ports of loopback where it listens, by those that the words say."""
    config = dataclasses.replace(configure(parser().parse_args(list(words))), workers=1, worker_processes=False)
    ports = {"rest": "127.0.0.1:0"} if config.rest else {}
    with ExitStack() as stack:
        engines = [
            ServedModel(one, pick_device(config.device), config.lifecycle, config.limits.rehearsals())
            for one in config.models
        ]
        chain = Chain(config.next, config.limits) if config.next else None
        core = stack.enter_context(Core(engines, config.limits, 1, config.observers, config.lifecycle, chain))
        server = CloudServer(core, "127.0.0.1:0", config.tls, config.identities, **ports)
        server.start()
        stack.callback(server.stop, 0)
        at = {config.listen.rpartition(":")[2]: str(server.port)}
        if server.rest is not None:
            at[config.rest.rpartition(":")[2]] = str(server.rest.port)
        yield at


@contextmanager
def a_server(folder: Path) -> Iterator[dict[str, str]]:
    """One of `digits`, which allows all observers; its file lies in ``folder``."""
    config = folder / "server.toml"
    config.write_text(f"[observers]\nallow = {json.dumps(sorted(OBSERVERS))}\n", encoding="utf-8")
    with serving([str(config)]) as ports:
        yield ports

"""A core on a port, and shutting down."""

from __future__ import annotations

import threading
from pathlib import Path

from cloud_server.access import Register, Tls
from cloud_server.core import Core
from cloud_server.inference import Inference
from cloud_server.transport.door import INFERENCE, MAX_WAITING, SERVICE, Door
from cloud_server.transport.inference_servicer import InferenceServicer
from cloud_server.transport.listener import Listener
from cloud_server.transport.rest import RestServer
from cloud_server.transport.servicer import SplitServicer
from shared_hooks.lifecycle import Stage

SPARE_THREADS = 8
"""For answering health and model lists, and for refusing streams beyond `Limits.max_clients`."""

CLOSING_SECONDS = 60.0
"""Beyond the drain, until a server that listens no more ends the streams that are left."""


class CloudServer:
    """A core on a port. ``address`` is HOST:PORT; after `start`, ``port`` is the real one.

    ``tls``: None = in the clear; ``identities``: the file that says who may; ``reflection``: whether the server
    describes its services to who asks. Raises SpecError.
    """

    def __init__(
        self,
        core: Core,
        address: str,
        tls: Tls | None = None,
        identities: Path | None = None,
        *,
        register: Register | None = None,
        reflection: bool = False,
        reuse_port: bool = False,
        rest: str = "",
    ) -> None:
        """``reuse_port``: other servers may listen there, too, and a draining one does so no more. ``register``: who is
        let in, instead of ``identities`` and certificates. ``rest``: HOST:PORT of the Open Inference Protocol by HTTP;
        empty = none.
        """
        self.core = core
        self._reuse_port = reuse_port
        self._ending = threading.Lock()  # taken by the first who stops it, and kept
        # Every stream holds one thread of the pool for as long as it lives.
        limits = core.limits
        # A request of the Open Inference Protocol does so, too, and before its message is there.
        threads = 2 * limits.max_clients + limits.max_probes + limits.max_profiles + MAX_WAITING + SPARE_THREADS
        if register is None:
            register = Register(identities, certificates=tls is not None and tls.client_ca is not None)
        self._door = door = Door(core, register)
        self._listener = Listener(
            address,
            door,
            (SERVICE, INFERENCE),
            threads,
            limits.max_message_bytes,
            tls,
            reflection=reflection,
            reuse_port=reuse_port,
        )
        self.inference = Inference(core, lambda: self._listener.health.serving)
        InferenceServicer(self.inference, door).add_to(self._listener.server)
        SplitServicer(core, door).add_to(self._listener.server)
        self.port = self._listener.port
        self.rest = RestServer(self.inference, door.guests, rest, tls, reuse_port) if rest else None

    def start(self) -> None:
        self._listener.start()
        if self.rest is not None:
            self.rest.start()

    def serving(self, able: bool) -> None:
        """What health says, until the server drains."""
        self._listener.serving(able)

    def drain(self) -> None:
        """Accepts nothing new: open streams are notified, new ones are refused, health says NOT_SERVING."""
        self._listener.unwell()
        if self._reuse_port:  # before clients are told: whoever comes back is to find the other server
            self._listener.server.stop(self.core.limits.drain_seconds + CLOSING_SECONDS)
        if self.rest is not None:
            self.rest.drain()
        self.core.drain()

    def stop(self, grace: float | None = None) -> None:
        """Ends the streams and the server; frames under way have ``grace`` seconds. A second call does nothing."""
        if not self._ending.acquire(blocking=False):
            return
        self.core.drained(self.core.wait_idle(0))
        self.core.lifecycle.emit(Stage.BEFORE_SHUTDOWN)
        self.core.dismiss()
        self.core.wait_gone(grace or 0)
        self._listener.close(grace)
        if self.rest is not None:
            self.rest.stop()
        self.core.close()
        self.core.lifecycle.emit(Stage.AFTER_SHUTDOWN)

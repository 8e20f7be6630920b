"""A port of Ray Serve's that nobody needs here, closed: each of its replicas listens on every address for calls between
deployments by gRPC, and unpickles what comes before it asks for anything, Ray's token included (seen with 2.60: a file
opened by a stranger's message). Calls between our deployments go another way.
"""

from __future__ import annotations

import os
from typing import Any

from shared_hooks.errors import SpecError

NAME = "add_port_to_grpc_server"
"""What Ray Serve's replica calls to listen there, once it is made; of a private module, for there is no setting."""


def close() -> None:
    """In a replica's process, while it is made. Raises SpecError for a Ray that does this in another way.

    With RAY_USE_TLS the port asks for a certificate of the cluster's, and stays.
    """
    from ray.serve._private import replica

    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    if not callable(getattr(replica, NAME, None)):
        import ray

        raise SpecError(
            f"Ray {ray.__version__}: its replicas listen for whoever comes, in a way that is not known here and cannot "
            "be closed: take Ray 2.60, or set RAY_USE_TLS=1 with certificates for the cluster"
        )
    setattr(replica, NAME, _nowhere)


def _nowhere(server: Any, address: str) -> int:
    """As Ray's: the port's number. There is none."""
    return 0

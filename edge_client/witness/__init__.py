"""Answers computed whole here, too, and compared.

witness      which requests, and what came of it
comparison   how far two outputs are apart
moment       what a forward may change, as it is at one moment

May import transport, screen, call.
"""

from edge_client.witness.witness import INPUT, Kept, Witness, Witnesses, check_share

__all__ = [
    "INPUT",
    "Kept",
    "Witness",
    "Witnesses",
    "check_share",
]
